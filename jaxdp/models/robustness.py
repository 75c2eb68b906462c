"""The effect of parameter changes on a model's outputs (Wang et al. 2024, section 2.3).

It is measured as robust accuracy and as rho. Both charge nothing. Their data must be public, or
held out from all decisions that claim to be private.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data import Source, pad_to_physical
from jaxdp.data.labels import (
    check_examples,
    check_logits,
    count,
    judge,
    labelled_batches,
    refuse_unlabelled,
    warn_if_not_finite,
)
from jaxdp.data.protocol import inputs_of
from jaxdp.report import progress_bar
from jaxdp.transforms import forms

Predict = Callable[[Any, jax.Array], jax.Array]


def robust_accuracy(
    predict: Predict,
    params: Any,
    source: Source,
    *,
    std: float | Sequence[float] = 0.1,
    draws: int = 10,
    relative: bool = False,
    seed: int = 0,
    batch_size: int = 500,
    draws_per_call: int | None = None,
) -> np.ndarray:  # Nine arguments, of which the last five have defaults that few change.
    """Computes the accuracy after Gaussian noise on every parameter, for several draws.

    The paper writes N(0, 0.1). As a standard deviation, as here, that noise is about as long as the
    weights of a trained ResNet-20 and leaves little of them. As a variance it leaves nothing. Sweep
    std from about 0.001. `relative` noise compares models of different scales: a layer before a
    normalisation computes the same with larger weights.

    Args:
      predict: `predict(params, inputs [B, ...]) -> logits [B, K]`.
      params: Floating-point arrays.
      source: PUBLIC or held-out examples, as in `jaxdp.finetune.accuracy`. Nothing is charged.
      std: The standard deviation of the noise, or S of them. All see the same draws, scaled.
      draws: D, the number of noise vectors. Each is the same for all examples.
      relative: Whether the noise on each array is std times its root mean square.
      seed: The seed of the noise, which is not secret.
      batch_size: The number of examples per call.
      draws_per_call: The number of noisy models per call, by `jax.vmap`. The default is all of
        them. On a CPU it is one, because mapped kernels become slow grouped convolutions there.

    Returns:
      float64 [D], or [S, D] if std is a sequence. An answer with a logit that is not finite is
      wrong. A warning tells how many there are.

    Raises:
      TypeError, ValueError: source is empty, or labels or logits are not as in
          `jaxdp.finetune.accuracy`.
      ValueError: A std is negative or not finite, or draws or draws_per_call are below 1.
    """
    check_examples(source, batch_size)
    stds = np.atleast_1d(np.asarray(std, np.float32))
    is_valid = (stds >= 0) & np.isfinite(stds)
    if not stds.size or not is_valid.all():
        raise ValueError(f"std must be finite and at least 0, one number or several, got {std}.")
    if draws < 1 or (draws_per_call is not None and draws_per_call < 1):
        raise ValueError(
            f"draws and draws_per_call must be at least 1, got {draws} and {draws_per_call}."
        )
    if draws_per_call is None:
        draws_per_call = 1 if forms.platform() == "cpu" else draws
    draw_numbers = np.arange(draws, dtype=np.uint32)
    calls, _ = pad_to_physical(draw_numbers, min(draws_per_call, draws))
    counts = np.zeros((3, len(stds), *calls.shape), np.int64)
    key = jax.random.key(seed)
    batches = labelled_batches(source, batch_size)
    total = math.ceil(len(source) / batch_size)
    for batch in progress_bar(batches, label="robust accuracy", unit="batch", total=total):
        for i, scale in enumerate(stds):
            for j, numbers in enumerate(calls):
                noise = jax.device_put((numbers, scale, np.bool_(relative)))
                of_call = _counts(predict, params, key, *noise, *batch)
                counts[:, i, j] += np.asarray(of_call)
    by_draw = counts.reshape(3, len(stds), -1)
    correct, not_finite, unlabelled = by_draw[:, :, :draws]  # drops the padding of the last call
    most_unlabelled = int(unlabelled.max())
    refuse_unlabelled(most_unlabelled, source)
    answers = len(source) * not_finite.size
    warn_if_not_finite(int(not_finite.sum()), answers)
    fractions = correct / len(source)
    if np.ndim(std):
        return fractions
    return fractions[0]


@functools.partial(jax.jit, static_argnums=0)
def _counts(
    predict: Predict,
    params: Any,
    key: Any,
    draws: Any,
    std: Any,
    relative: Any,
    batch: Any,
    mask: Any,
) -> jax.Array:
    """Returns the `Counts` [3, D] of the models perturbed by the given draws.

    `relative` is an array, so that both kinds of noise are one program.
    """

    def one(draw: jax.Array) -> jax.Array:
        own_key = jax.random.fold_in(key, draw)
        moved = _moved(own_key, params, std, relative)
        logits = predict(moved, inputs_of(batch))
        check_logits(logits, name="predict(params, inputs)", count=len(mask))
        judgements = judge(logits, batch["label"])
        return jnp.stack(count(judgements, mask))

    return jax.vmap(one, out_axes=1)(draws)


def _moved(
    key: jax.Array,
    params: Any,
    std: jax.Array,
    relative: jax.Array | None = None,
) -> Any:
    """Returns params plus Gaussian noise of standard deviation std.

    Where `relative` is true, it is std times the root mean square of each array.
    """
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    moved = []
    for own_key, leaf in zip(keys, leaves, strict=True):
        noise = jax.random.normal(own_key, leaf.shape, jnp.float32)
        if relative is not None:
            squares = jnp.square(leaf.astype(jnp.float32))
            noise *= jnp.where(relative, jnp.sqrt(jnp.mean(squares)), 1)
        noisy = leaf + std * noise
        moved.append(noisy.astype(leaf.dtype))
    return jax.tree.unflatten(treedef, moved)


class ParameterRobustness(NamedTuple):
    """Two lower estimates of rho, the largest ||f_{theta+Delta}(x) - f_theta(x)|| / ||Delta||.

    A small rho is robust.

    Attributes:
      random: The largest ratio among random Gaussian Delta. In P dimensions a random direction has
        a share of about 1 / sqrt(P) of the worst one.
      local: The limit for small Delta, the largest spectral norm of the Jacobian of the logits in
          theta.
    """

    random: float
    local: float


def parameter_robustness(
    predict: Predict,
    params: Any,
    inputs: Any,
    *,
    std: float = 0.01,
    draws: int = 10,
    iterations: int = 20,
    seed: int = 0,
    batch_size: int = 32,
) -> ParameterRobustness:
    """Estimates rho(f) = max ||f_{theta+Delta}(x) - f_theta(x)|| / ||Delta|| (section 2.3).

    Both estimates are lower estimates at the given theta over the given inputs. The maximum over
    all x, theta and Delta cannot be computed for a network.

    Args:
      predict: `predict(params, inputs [B, ...]) -> logits [B, K]`.
      params: theta, floating-point arrays.
      inputs: [n, ...], PUBLIC or held out. Nothing is charged.
      std, draws: The standard deviation and number of the Gaussian Delta. Each Delta is used for
          all inputs.
      iterations: The steps of the power method on J J^T, which converges to the spectral norm from
          below.
      seed: The seed of the noise and of the power method's start.
      batch_size: The number of inputs per call. The power method keeps as many gradients.

    Raises:
      ValueError: There are no inputs, std is not positive and finite, or draws, iterations or
          batch_size are below 1.
    """
    if not len(inputs):
        raise ValueError("inputs has no examples. Robustness needs at least one.")
    if not 0 < std < math.inf:
        raise ValueError(f"std must be positive and finite, got {std}.")
    if min(draws, iterations, batch_size) < 1:
        raise ValueError(
            f"draws, iterations and batch_size must be at least 1, got {draws}, {iterations} and "
            f"{batch_size}."
        )
    ratios = []
    norms = []
    key = jax.random.key(seed)
    examples = np.asarray(inputs)
    # The last batch is padded by repetition, which changes no maximum.
    batches, _ = pad_to_physical(np.arange(len(inputs)), min(batch_size, len(inputs)))
    for rows in progress_bar(batches, label="parameter robustness", unit="batch"):
        x = jax.device_put(examples[rows])
        for draw in range(draws):
            draw_key = jax.random.fold_in(key, draw)
            ratio = _ratio(predict, params, x, draw_key, jnp.float32(std))
            ratios.append(ratio)
        logits = jax.eval_shape(predict, params, x)
        direction = jax.random.normal(key, logits.shape)
        for _ in range(iterations):  # A compiled loop has slow convolutions on CPUs.
            direction, norm = _power_step(predict, params, x, direction)
        norms.append(norm)
    return ParameterRobustness(random=_largest(ratios), local=_largest(norms))


def _largest(values: Sequence[jax.Array]) -> float:
    return float(np.max(jax.device_get(values)))


@functools.partial(jax.jit, static_argnums=0)
def _ratio(
    predict: Predict,
    params: Any,
    inputs: jax.Array,
    key: jax.Array,
    std: jax.Array,
) -> jax.Array:
    """Returns the largest change of the logits over the length of one random Delta."""

    def difference(after: jax.Array, before: jax.Array) -> jax.Array:
        return after.astype(jnp.float32) - before.astype(jnp.float32)

    moved = _moved(key, params, std)
    # The change as the dtype of the parameters rounds it.
    delta = jax.tree.map(difference, moved, params)
    changes = predict(moved, inputs) - predict(params, inputs)
    largest = jnp.linalg.norm(changes, axis=-1).max()
    return largest / optax.tree.norm(delta)


@functools.partial(jax.jit, static_argnums=0)
def _power_step(
    predict: Predict,
    params: Any,
    inputs: jax.Array,
    directions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns J J^T u for each input, and the largest ||J^T u||.

    J is the Jacobian at an input and u = direction / ||direction||.
    """

    def one(x: jax.Array, direction: jax.Array) -> tuple[jax.Array, jax.Array]:
        length = jnp.linalg.norm(direction)
        unit = jnp.where(length > 0, direction / length, 0)  # 0 where no parameter moves the output

        def logits_at(params: Any) -> jax.Array:
            return predict(params, x[None])[0]

        logits, pull = jax.vjp(logits_at, params)
        (gradient,) = pull(unit.astype(logits.dtype))  # J^T u
        _, pushed = jax.jvp(logits_at, (params,), (gradient,))
        return pushed, optax.tree.norm(gradient)

    directions, norms = jax.vmap(one)(inputs, directions)
    return directions, norms.max()
