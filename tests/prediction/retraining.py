"""Training on really changed data in NumPy, for tests that ask whether bounds contain the result.

Independent of `jaxdp`: gradients of multilayer perceptrons by hand, one plain loop, any dtype.
"""

from typing import Any

import numpy as np

Leaves = list[np.ndarray]  # weight [in, out] and bias [out] of each dense layer, ReLU between them


def forward(leaves: Leaves, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the input of each layer and the logits."""
    inputs = [x]
    for weight, bias in zip(leaves[:-2:2], leaves[1:-2:2], strict=True):
        inputs.append(np.maximum(inputs[-1] @ weight + bias, 0))
    return inputs, inputs[-1] @ leaves[-2] + leaves[-1]


def gradients(leaves: Leaves, x: np.ndarray, y: np.ndarray, loss: str) -> Leaves:
    """Returns each record's gradient of "bce", "ce", "mse" (the sum of squares) or "mae" (of
    absolute values): arrays [b, ...] like `leaves`."""
    inputs, z = forward(leaves, x)
    if loss == "bce":
        small = np.exp(-abs(z))
        delta = np.where(z > 0, 1, small) / (1 + small) - y.reshape(-1, 1)
    elif loss == "ce":
        p = np.exp(z - z.max(axis=1, keepdims=True))
        delta = p / p.sum(axis=1, keepdims=True) - np.eye(z.shape[1])[y.astype(int)]
    elif loss == "mae":
        delta = np.sign(z - y.reshape(z.shape))
    else:
        delta = 2 * (z - y.reshape(z.shape))
    grads: Leaves = []
    for i in reversed(range(len(inputs))):
        delta = delta.astype(x.dtype)
        grads = [inputs[i][:, :, None] * delta[:, None, :], delta, *grads]
        delta = (delta @ leaves[2 * i].T) * (inputs[i] > 0)
    return grads


def clipped(leaves: Leaves, x: np.ndarray, y: np.ndarray, loss: str, clip: float) -> np.ndarray:
    """Returns each record's clipped gradient, flat: [b, P]."""
    return np.clip(flatten(gradients(leaves, x, y, loss)), -clip, clip)


def flatten(leaves: Leaves) -> np.ndarray:
    """Returns arrays [b, ...] as one array [b, P]."""
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def train(
    leaves: Leaves,
    x: np.ndarray,
    y: np.ndarray,
    batches: list[np.ndarray],
    *,
    loss: str,
    clip: float,
    learning_rate: float,
    divisor: int | None,
    dtype: Any = np.float64,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    dampening: float = 0.0,
    l1: float = 0.0,
    trace: bool = False,
) -> Any:
    """Trains with one step for each array of rows in `batches`.

    `divisor` None divides by the number of records in the batch. Returns the parameters; with
    `trace`, also each step's clipped gradients of ALL records, [steps, n, P]."""
    theta, x = [leaf.astype(dtype) for leaf in leaves], x.astype(dtype)
    velocity = [np.zeros_like(leaf) for leaf in theta]
    seen = []
    for t, rows in enumerate(batches):
        if trace:
            seen.append(clipped(theta, x, y, loss, clip))
        sums = [
            np.clip(g, -clip, clip).sum(axis=0) for g in gradients(theta, x[rows], y[rows], loss)
        ]
        push = [
            g / (divisor or len(rows)) + weight_decay * p for g, p in zip(sums, theta, strict=True)
        ]
        new = 1 - dampening if t else 1
        velocity = [momentum * v + new * g for v, g in zip(velocity, push, strict=True)]
        step = (
            [g + momentum * v for g, v in zip(push, velocity, strict=True)]
            if nesterov
            else velocity
        )
        rate = learning_rate / (1 + lr_decay * t)
        theta = [p - rate * s for p, s in zip(theta, step, strict=True)]
        shrunk = [np.sign(p) * np.maximum(abs(p) - rate * l1, 0) for p in theta]
        theta = [p.astype(dtype) for p in shrunk]
    return (theta, np.array(seen)) if trace else theta


def worst_change(
    seen: np.ndarray,
    order: np.ndarray,
    n: int,
    k: int,
    direction: np.ndarray,
    threat: str,
    epochs: int,
) -> list[np.ndarray]:
    """Chooses, to first order, the k changes that move the result most along `direction`.

    Rows 0..n-1 of the pool are the data, the rest candidates that may be added any number of times.
    `seen` [steps, pool, P] are clipped gradients along a training. Returns the changed batches:
    "add_remove" and "replace_one" change records of the data set (added ones sit in one batch of
    each epoch), "replace_per_batch" k records of every batch."""
    push = -seen @ direction  # [steps, pool]: what a record's presence adds
    batches = [row[row >= 0] for row in order]
    per_epoch = len(batches) // epochs
    if threat == "replace_per_batch":
        changed = []
        for gain, rows in zip(push, batches, strict=True):
            new = n + np.argmax(gain[n:])
            out = rows[np.argsort(gain[rows])[:k]]
            changed.append(np.where(np.isin(rows, out), new, rows))
        return changed
    member = np.array([np.isin(np.arange(n), rows) for rows in batches], float)  # [steps, n]
    leaving = (member * push[:, :n]).sum(axis=0)
    if threat == "replace_one":
        gains = member.T @ push[:, n:] - leaving[:, None]  # [n, candidates]
        best = {i: n + np.argmax(gains[i]) for i in np.argsort(-gains.max(axis=1))[:k]}
        return [np.array([best.get(i, i) for i in rows]) for rows in batches]
    removals = [(-gain, i, None) for i, gain in enumerate(leaving)]
    grid = push[:, n:].reshape(epochs, per_epoch, -1)
    additions = [(total, n + c, None) for c, total in enumerate(grid.max(axis=1).sum(axis=0))]
    options = sorted(removals + additions * k, key=lambda option: -option[0])[:k]
    removed = {i for _, i, _ in options if i < n}
    changed = [np.array([i for i in rows if i not in removed], int) for rows in batches]
    for _, i, _ in options:
        if i >= n:
            for epoch in range(epochs):
                t = epoch * per_epoch + int(np.argmax(grid[epoch, :, i - n]))
                changed[t] = np.append(changed[t], i)
    return changed
