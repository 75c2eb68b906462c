"""Abstract Gradient Training as published, in NumPy float64: the oracle that tests compare
`jaxdp.prediction` with.

An independent reading of the algorithm (Theorem 4.6 with midpoint-radius products) for multilayer
perceptrons with ReLU, written for clarity, one k at a time. Nominal parameters, both bounds and the
certificates were compared with the public implementation (psosnin/AbstractGradientTraining, commit
f409c6e, run in float64) on 17 random networks of 1 to 3 layers that use every option below: no
coordinate differs by more than 5e-15, whatever the fragment size there.

A box is one array with a leading axis of 2: lower end, upper end.
"""

import numpy as np
from scipy.special import expit, logsumexp

Params = list[tuple[np.ndarray, np.ndarray]]


def train(
    params: Params,
    x: np.ndarray,
    y: np.ndarray,
    *,
    loss: str,
    k: int,
    clip: float,
    learning_rate: float,
    order: np.ndarray,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    lr_min: float = 0.0,
    dampening: float = 0.0,
) -> tuple[Params, Params, Params]:
    """Returns (nominal, lower, upper) after a step for each row of `order`; up to k records of each
    batch may differ.

    Args:
        params: (weight [in, out], bias [out]) of each dense layer; ReLU between them.
        x: Features [n, in].
        y: Labels: {0, 1} of [n] for "bce" (one logit), classes [n] for "ce", targets [n] or [n,
            out] for "mse".
        loss: "bce", "ce" or "mse" (sum of squares, without a factor of 1/2 or 1/out).
        k: Number of records of each batch that may be replaced.
        clip: Each coordinate of each record's gradient is clamped to [-clip, clip].
        learning_rate: Step t = 0, 1, ... uses max(learning_rate / (1 + lr_decay t), lr_min).
        order: Indices of the records of each batch, [steps, batch].
        momentum: Velocity v = momentum v + D, v = D at the first step.
        nesterov: Step along D + momentum v, not v.
        weight_decay: Added to D, before momentum, as weight_decay * parameters.
        lr_decay: See `learning_rate`.
        lr_min: See `learning_rate`.
        dampening: Multiplies D by 1 - dampening in v, after the first step.
    """

    def run(k: int) -> list[np.ndarray]:
        theta = [np.stack([leaf, leaf]).astype(np.float64) for layer in params for leaf in layer]
        velocity: list[np.ndarray] | None = None
        for t, rows in enumerate(order):
            gradients = record_gradients(theta, x[rows], y[rows], loss)
            descent = [descent_bounds(np.clip(g, -clip, clip), k, clip) for g in gradients]
            # The largest step starts from the lower end, so ends cross over: `[::-1]` here and in
            # the update.
            descent = [d + weight_decay * p[::-1] for d, p in zip(descent, theta, strict=True)]
            if velocity is None:
                velocity = descent
            else:
                new = 1 - dampening
                velocity = [momentum * v + new * d for v, d in zip(velocity, descent, strict=True)]
            if nesterov:
                step = [d + momentum * v for d, v in zip(descent, velocity, strict=True)]
            else:
                step = velocity
            rate = max(learning_rate / (1 + lr_decay * t), lr_min)
            theta = [p - rate * s[::-1] for p, s in zip(theta, step, strict=True)]
        return theta

    # With k = 0 a box stays a point: plain training.
    return _layers(run(0), 0), _layers(run(k), 0), _layers(run(k), 1)


def descent_bounds(gradients: np.ndarray, k: int, clip: float) -> np.ndarray:
    """Bounds on the mean gradient [2, ...] from clipped boxes [2, b, ...] of which k may be
    replaced (Theorem 4.6).

    The k largest lower ends leave, and -clip enters k times; mirrored for the upper end. Divided by
    b."""
    b = gradients.shape[1]
    lower = np.sort(gradients[0], axis=0)[: b - k].sum(axis=0) - k * clip
    upper = np.sort(gradients[1], axis=0)[k:].sum(axis=0) + k * clip
    return np.stack([lower, upper]) / b


def record_gradients(
    theta: list[np.ndarray], x: np.ndarray, y: np.ndarray, loss: str
) -> list[np.ndarray]:
    """Returns boxes [2, b, ...] of each record's gradient, one per array of `theta` (weight, bias,
    weight, ...)."""
    inputs, outputs = _forward(theta, x)
    delta = logit_gradient(outputs[-1], y, loss)
    gradients: list[np.ndarray] = []
    for i in reversed(range(len(inputs))):
        gradients = [_product("bi,bo->bio", inputs[i], delta), delta, *gradients]
        if i > 0:
            active = (outputs[i - 1] > 0).astype(np.float64)
            delta = _product("bo,io->bi", delta, theta[2 * i])
            corners = [a * d for a in active for d in delta]
            delta = np.stack([np.min(corners, axis=0), np.max(corners, axis=0)])
    return gradients


def logit_gradient(z: np.ndarray, y: np.ndarray, loss: str) -> np.ndarray:
    """Returns the box [2, b, C] of the loss gradient at logits in the box z [2, b, C]."""
    if loss == "bce":
        return expit(z) - y.reshape(-1, 1)
    if loss == "mse":
        return 2 * (z - y.reshape(z.shape[1:]))
    if loss == "ce":
        return softmax_bounds(z) - np.eye(z.shape[2])[y]
    raise ValueError(f'loss={loss!r} is not one of "bce", "ce", "mse".')


def softmax_bounds(z: np.ndarray) -> np.ndarray:
    """Returns the box of softmax over the box z [2, b, C]: p_c is least at z_c lowest and every
    other logit highest."""
    own = np.eye(z.shape[2], dtype=bool)
    others = [logsumexp(np.where(own, -np.inf, end[:, None, :]), axis=2) for end in z]
    return np.stack([expit(z[0] - others[1]), expit(z[1] - others[0])])


def certified(lower: Params, upper: Params, queries: np.ndarray) -> np.ndarray:
    """Returns whether all parameters in the box give a query [q, in] one label, by the published
    rule: bool [q]."""
    theta = [
        np.stack(ends)
        for low, high in zip(lower, upper, strict=True)
        for ends in zip(low, high, strict=True)
    ]
    z = _forward(theta, queries)[1][-1]
    if z.shape[2] == 1:
        return (z[0, :, 0] > 0) == (z[1, :, 0] > 0)
    low, high = softmax_bounds(z)
    rest = np.where(np.arange(z.shape[2]) == low.argmax(axis=1)[:, None], -np.inf, high)
    return low.max(axis=1) > rest.max(axis=1)


def _forward(theta: list[np.ndarray], x: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns boxes of the input and of the output before ReLU of each layer."""
    inputs, outputs = [np.stack([x, x]).astype(np.float64)], []
    for weight, bias in zip(theta[::2], theta[1::2], strict=True):
        outputs.append(_product("bi,io->bo", inputs[-1], weight) + bias[:, None])
        inputs.append(np.maximum(outputs[-1], 0))
    return inputs[:-1], outputs


def _product(subscripts: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiplies boxes by midpoints and radii (Rump)."""
    (am, ar), (bm, br) = [((box[0] + box[1]) / 2, (box[1] - box[0]) / 2) for box in (a, b)]
    middle = np.einsum(subscripts, am, bm)
    radius = sum(np.einsum(subscripts, u, v) for u, v in ((abs(am), br), (ar, abs(bm)), (ar, br)))
    return np.stack([middle - radius, middle + radius])


def _layers(theta: list[np.ndarray], end: int) -> Params:
    return [(w[end], b[end]) for w, b in zip(theta[::2], theta[1::2], strict=True)]
