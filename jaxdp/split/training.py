"""Adam over a small data set in memory: the one training loop of this stage."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Loss = Callable[[Any, Any, Any, jax.Array], jax.Array]


def minimise(
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
    """Minimises the mean loss by Adam, shuffling anew in every epoch.

    Calls with the same `loss_fn`, shapes and batch size compile once, whatever the learning rate.

    Args:
      loss_fn: `loss_fn(params, frozen, batch, key) -> losses [B]`; hashable, the same object for the same task.
      params: what is trained, a pytree.
      data: pytree of arrays with the same first axis n; the last batch of an epoch repeats examples with weight zero.
      key: typed PRNG key, of the order and of what `loss_fn` draws.
      learning_rate: of Adam, positive.
      epochs: passes over the data.
      batch_size: examples per step; at most n of them are used.
      frozen: what `loss_fn` needs besides, not trained.

    Returns:
      The trained parameters.

    Raises:
      ValueError: no data, or a learning rate, number of epochs or batch size that is not positive.
    """
    count = len(jax.tree.leaves(data)[0])
    for name, value in (("learning_rate", learning_rate), ("epochs", epochs), ("batch_size", batch_size)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")
    if count == 0:
        raise ValueError("data must have at least one example, got none")
    state = optax.scale_by_adam().init(params)
    for epoch_key in jax.random.split(key, epochs):
        params, state = _epoch(
            loss_fn, min(batch_size, count), params, state, frozen, data, epoch_key, jnp.float32(learning_rate)
        )
    return params


def batches(key: jax.Array, count: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The batches of one epoch.

    Args:
      key: typed PRNG key.
      count: number of examples.
      size: examples per batch, at most `count`.

    Returns:
      Rows int32 [steps, size] in a new order, weights float32 [steps, size] that are 0 where the last batch repeats
      an example, and a key for every step.
    """
    steps = -(-count // size)
    order_key, key = jax.random.split(key)
    order = jax.random.permutation(order_key, count)
    rows = jnp.concatenate([order, order])[: steps * size].reshape(steps, size)
    weights = (jnp.arange(steps * size) < count).reshape(steps, size).astype(jnp.float32)
    return rows, weights, jax.random.split(key, steps)


def adam_step(params: Any, state: Any, gradients: Any, learning_rate: jax.Array) -> tuple[Any, Any]:
    """One step of Adam whose learning rate is an array, so that another one compiles nothing."""
    updates, state = optax.scale_by_adam().update(gradients, state)
    return jax.tree.map(lambda p, u: p - learning_rate * u, params, updates), state


@functools.partial(jax.jit, static_argnums=(0, 1))
def _epoch(
    loss_fn: Loss, size: int, params: Any, state: Any, frozen: Any, data: Any, key: jax.Array, learning_rate: jax.Array
) -> tuple[Any, Any]:
    def mean_loss(params: Any, rows: jax.Array, weight: jax.Array, key: jax.Array) -> jax.Array:
        losses = loss_fn(params, frozen, jax.tree.map(lambda column: column[rows], data), key)
        return (losses * weight).sum() / weight.sum()

    def step(carry: tuple[Any, Any], batch: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[tuple[Any, Any], None]:
        return adam_step(*carry, jax.grad(mean_loss)(carry[0], *batch), learning_rate), None

    count = len(jax.tree.leaves(data)[0])
    return jax.lax.scan(step, (params, state), batches(key, count, size))[0]
