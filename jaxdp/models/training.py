"""Training without privacy, for public data and for the reference of a private run.

`fit_public` gathers each batch on the host and takes any optimizer. `fit_in_memory` compiles whole
epochs for data on the device. `fit_until_steady` does so too, and stops by the training loss. Only
Split Adaptation and its attackers use these two, many times on a few images.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data import FixedBatchSampler, check_batch, check_source
from jaxdp.data.storage import zeros_on_device
from jaxdp.files import check_count, check_numbers
from jaxdp.report import progress_bar
from jaxdp.transforms.parameters import check_finite


def fit_public(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    batch_size: int,
    seed: bytes,
    augment: Callable[[jax.Array, Any], Any] | None = None,
    label: str = "public training",
    progress: bool = True,
) -> Any:  # Ten arguments, since this is the whole of a training without an object that keeps them.
    """Minimises the mean of a per-example loss over shuffled batches of PUBLIC data.

    Args:
      loss_fn: `loss_fn(params, example) -> scalar`.
      params: The pytree to start from.
      data: Public examples, a `jaxdp.data.Source` or a pytree of arrays with one first axis.
      optimizer: Any optax optimizer.
      steps, batch_size: The number of updates, and of examples in each.
      seed: 16 bytes that fix the order of the examples and the augmentation.
      augment: `augment(key, example) -> example`, one view per example and step.
      label, progress: The text of the progress bar (`jaxdp.report.progress_bar`), and whether to
          show it.

    Returns:
      The trained parameters.

    Raises:
      ValueError: A leaf of params holds NaN or an infinity.
    """
    check_finite(params)
    is_source = hasattr(data, "gather")
    if is_source:
        check_source(data, argument="data")
        count = len(data)
    else:
        data = jax.tree.map(np.asarray, data)
        count = len(jax.tree.leaves(data)[0])
    sampler = FixedBatchSampler(count, min(batch_size, count), seed=seed)

    def gather(rows: np.ndarray) -> Any:
        if is_source:
            return check_batch(data.gather(rows), "data")
        batch = jax.tree.map(lambda leaf: leaf[rows], data)
        return check_batch(batch, "data")

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        return jax.vmap(loss_fn, in_axes=(None, 0))(params, batch).mean()

    @jax.jit
    def update(
        params: Any,
        opt_state: Any,
        batch: Any,
        keys: jax.Array,
        number: Any,
    ) -> tuple[Any, Any]:
        if augment is not None:
            view_keys = jax.random.split(keys[number], sampler.batch_size)
            batch = jax.vmap(augment)(view_keys, batch)
        gradient = jax.grad(mean_loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state

    opt_state = optimizer.init(params)
    key_words = jnp.frombuffer(seed[:8], jnp.uint32)  # 64 bits, as a Threefry key has
    key = jax.random.wrap_key_data(key_words)
    keys = jax.random.split(key, steps)
    for step in progress_bar(range(steps), label=label, unit="step", show=progress):
        batch = gather(sampler.batch(step))
        params, opt_state = update(params, opt_state, batch, keys, np.int32(step))
    return params


# --- Small data sets in memory ------------------------------------------------------------------

# `loss_fn(params, frozen, batch, key) -> losses [B]`.
Loss = Callable[[Any, Any, Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The options of a training by Adam. The defaults are those of Split Adaptation.

    Attributes:
      learning_rate: The constant learning rate.
      epochs: Passes over the images, or over all copies of them.
      batch_size: Images of a step. At most as many as there are.
      patience: Training stops early, after so many epochs in a row without a new smallest training
          loss: the rule of section A.2, with 1 read literally. 0 runs all epochs.

    Raises:
      TypeError: patience is no int.
      ValueError: A number is not positive, or patience is negative.
    """

    learning_rate: float = 1e-5
    epochs: int = 100
    batch_size: int = 32
    patience: int = 0

    def __post_init__(self) -> None:
        check_positive(
            learning_rate=self.learning_rate, epochs=self.epochs, batch_size=self.batch_size
        )
        check_count("patience", self.patience, 0)


def fit_in_memory(
    loss_fn: Loss,
    params: Any,
    data: Any,
    *,
    key: jax.Array,
    learning_rate: float,
    epochs: int,
    batch_size: int,
    frozen: Any = None,
) -> Any:
    """Minimises the mean loss by Adam over a small data set in memory.

    Every epoch has a new order. Calls with the same `loss_fn`, shapes and batch size compile once
    for all learning rates.

    Args:
      loss_fn: `loss_fn(params, frozen, batch, key) -> losses [B]`, hashable, the same object for
          the same task.
      params: The pytree to start from.
      data: A pytree of arrays with the same first axis n. The last batch of an epoch repeats
          examples with weight zero.
      key: A typed PRNG key for the order and for `loss_fn`.
      learning_rate: The learning rate of Adam.
      epochs: The number of passes over the data.
      batch_size: The number of examples per step. At most n are used.
      frozen: Other values for `loss_fn`, which are not trained.

    Returns:
      The trained parameters.

    Raises:
      ValueError: There is no data, or a learning rate, number of epochs or batch size is not
          positive.
    """
    training = Training(learning_rate=learning_rate, epochs=epochs, batch_size=batch_size)
    return fit_until_steady(loss_fn, params, data, training, key=key, frozen=frozen).params


class Fitted(NamedTuple):
    """Trained parameters, and the number of epochs that trained them."""

    params: Any
    epochs: int


def fit_until_steady(
    loss_fn: Loss,
    params: Any,
    data: Any,
    training: Training,
    *,
    key: jax.Array,
    frozen: Any = None,
) -> Fitted:
    """Trains as `fit_in_memory` does, until the training loss does not decrease.

    The loss of an epoch is the mean over its examples, each before the step that it is used in.

    Args:
      loss_fn, params, data, key, frozen: As in `fit_in_memory`.
      training: The options. `epochs` is the most.

    Raises:
      ValueError: There is no data.
    """
    count = len(jax.tree.leaves(data)[0])
    if count == 0:
        raise ValueError("data must have at least one example, got none.")
    state = adam_state(params)
    size = min(training.batch_size, count)
    # An array, so that another rate is no other program.
    rate = np.float32(training.learning_rate)
    smallest = math.inf
    since = 0  # epochs since the smallest loss
    taken = 0
    epoch_keys = jax.random.split(key, training.epochs)
    for epoch_key in progress_bar(epoch_keys, label="training", unit="epoch"):
        batches = epoch_batches(epoch_key, count, size)
        after = _epoch(loss_fn, params, state, frozen, data, batches, rate)
        params, state, loss = jax.block_until_ready(after)
        taken += 1
        since += 1
        if loss < smallest:
            since = 0
            smallest = float(loss)
        if since == training.patience > 0:  # 0 never stops
            break
    return Fitted(params, taken)


@functools.partial(jax.jit, static_argnums=0)
def _epoch(
    loss_fn: Loss,
    params: Any,
    state: Any,
    frozen: Any,
    data: Any,
    batches: Any,
    learning_rate: jax.Array,
) -> tuple[Any, Any, jax.Array]:
    """Returns parameters, state of Adam and mean loss after one epoch."""

    def mean_loss(
        params: Any,
        rows: jax.Array,
        weight: jax.Array,
        key: jax.Array,
    ) -> jax.Array:
        batch = jax.tree.map(lambda column: column[rows], data)
        losses = loss_fn(params, frozen, batch, key)
        return (losses * weight).sum() / weight.sum()

    def step(
        carry: tuple[Any, Any], batch: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[Any, Any], jax.Array]:
        params, state = carry
        _, weight, _ = batch
        loss, gradients = jax.value_and_grad(mean_loss)(params, *batch)
        return adam_step(params, state, gradients, learning_rate), loss * weight.sum()

    (params, state), sums = jax.lax.scan(step, (params, state), batches)
    _, weights, _ = batches
    return params, state, sums.sum() / weights.sum()


@functools.partial(jax.jit, static_argnums=(1, 2))
def epoch_batches(key: jax.Array, count: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the batches of one epoch over `count` examples, `size` <= `count` in each.

    Returns:
      Rows int32 [steps, size] in a new order, weights float32 [steps, size], 0 where the last batch
      repeats an example, and a key for every step.
    """
    steps = -(-count // size)
    order_key, key = jax.random.split(key)
    order = jax.random.permutation(order_key, count)
    # The last batch is filled up from the start of the order, with weight 0.
    repeated = jnp.concatenate([order, order])
    places = steps * size
    rows = repeated[:places].reshape(steps, size)
    is_new = jnp.arange(places) < count
    weights = is_new.reshape(steps, size).astype(jnp.float32)
    return rows, weights, jax.random.split(key, steps)


def adam_state(params: Any) -> Any:
    """Returns the state of `adam_step` before its first step."""
    return zeros_on_device(jax.eval_shape(optax.scale_by_adam().init, params))


def adam_step(
    params: Any,
    state: Any,
    gradients: Any,
    learning_rate: jax.Array,
) -> tuple[Any, Any]:
    """Returns parameters and state after one step of Adam.

    The learning rate is an array, which can change without recompilation.
    """
    updates, state = optax.scale_by_adam().update(gradients, state)

    def moved(param: jax.Array, update: jax.Array) -> jax.Array:
        return param - learning_rate * update

    return jax.tree.map(moved, params, updates), state


def check_positive(**values: float) -> None:
    """Raises ValueError that names the first non-positive value."""
    check_numbers(**values)
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}.")
