"""Barriers that XLA on CPU keeps. They decide when it computes a value, and in which shape.

XLA on CPU removes `lax.optimization_barrier` before it fuses and orders operations. So the barriers
here are values that XLA cannot know while it compiles: a zero that is read from an array, and a
loop of as many turns as that zero says. Other backends keep barriers, and need none of this.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def zero_after(x: jax.Array) -> jax.Array:
    """Returns the uint32 scalar 0, which XLA cannot compute before `x`.

    Args:
      x: An array [...] of at least one entry.
    """
    word = lax.slice_in_dim(x.reshape(-1), 0, 1).reshape(())
    if word.dtype != jnp.uint32:
        word = lax.bitcast_convert_type(word.astype(jnp.float32), jnp.uint32)
    return jnp.minimum(word, 0)  # XLA does not know that no unsigned integer is less


@jax.custom_jvp
def materialised(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns `x`, which XLA computes in its own shape.

    Otherwise XLA computes it in the shape of a reshape that follows, element by element where rows
    could be copied.

    Args:
      x: Any array.
      zero: A result of `zero_after`.
    """

    def has_turn(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        turns, _ = state
        return turns > 0

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        turns, x = state
        return turns - 1, -x

    # XLA cannot know that the loop has no turn. The body changes x, because XLA takes what a loop
    # does not change out of it.
    _, result = lax.while_loop(has_turn, turn, (zero, x))
    unchanged: jax.Array = result
    return unchanged


@materialised.defjvp
def _materialised_jvp(
    primals: Any,
    tangents: Any,
) -> tuple[jax.Array, jax.Array]:
    return materialised(*primals), tangents[0]  # JAX cannot reverse such a loop
