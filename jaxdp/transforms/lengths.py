"""Vectors of any finite floats in units of a power of two, so that their lengths neither overflow
nor vanish.

The square of a float32 overflows above 1.8e19 and vanishes below 1e-19. Division by the largest
entry is no remedy. XLA may turn `x / m` into `x * (1 / m)`. The reciprocal of an m above 2**126 is
subnormal, and XLA flushes it to zero. Here the exponents of floats are moved as integers, which is
exact and which no option of the compiler changes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Of float32 and float64, by itemsize: the integer of the same size, and the number of stored bits
# of the significand.
_LAYOUTS: dict[int, tuple[Any, int]] = {4: (jnp.int32, 23), 8: (jnp.int64, 52)}


def in_units(x: jax.Array, axis: int | Sequence[int] | None = None) -> tuple[jax.Array, jax.Array]:
    """Splits x into units and powers with x = units * 2**powers, exactly.

    Args:
      x: float32 or float64 of any shape.
      axis: The axes whose entries share a power. None, the default, is all of them.

    Returns:
      (units, powers). Units have the shape of x. The largest of those that share a power is in [1,
      2). If all are zero or subnormal, their units are zero. Units smaller than the smallest normal
      float are zero too, and those of infinities and NaN are themselves. Powers are integers with
      `axis` kept at length 1.
    """
    powers = _exponents(x).max(axis, keepdims=True, initial=0) - _bias(x.dtype)
    return times_power(x, -powers), powers


def times_power(x: jax.Array, powers: jax.Array) -> jax.Array:
    """Returns x * 2**powers, exactly, for integer powers that broadcast against x.

    Zero replaces a subnormal result or operand, and an infinity a result that is too large.
    Infinities and NaN stay.
    """
    ints, stored = _LAYOUTS[x.dtype.itemsize]
    before, top = _exponents(x), _not_finite(x.dtype)
    powers = powers.astype(ints)
    after = before + powers
    moved = lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, ints) + powers * ints(1 << stored), x.dtype
    )
    moved = jnp.where(after < top, moved, jnp.where(x > 0, jnp.inf, -jnp.inf).astype(x.dtype))
    moved = jnp.where((before > 0) & (after > 0), moved, jnp.zeros_like(x))
    return jnp.where(before < top, moved, x)


def tree_in_units(tree: Any) -> tuple[Any, jax.Array]:
    """Splits a pytree of float32 and float64 leaves as `in_units`, with one power for all of them,
    int32 [].

    None leaves stay None. A tree without leaves has the power 0.
    """
    leaves = jax.tree.leaves(tree)
    powers = [(_exponents(x).max(initial=0) - _bias(x.dtype)).astype(jnp.int32) for x in leaves]
    power = jnp.stack(powers).max() if powers else jnp.int32(0)
    return jax.tree.map(lambda x: times_power(x, -power), tree), power


def finite(x: jax.Array) -> jax.Array:
    """Returns whether each entry is neither infinite nor NaN, by its bits."""
    return _exponents(x) != _not_finite(x.dtype)


def _exponents(x: jax.Array) -> jax.Array:
    """Returns the stored exponents: 0 of zero and of subnormal numbers, `_not_finite` of infinities
    and NaN.
    """
    ints, stored = _LAYOUTS[x.dtype.itemsize]
    stored_exponents: jax.Array = (lax.bitcast_convert_type(x, ints) >> ints(stored)) & ints(
        _not_finite(x.dtype)
    )
    return stored_exponents


def _not_finite(dtype: Any) -> int:
    return 2 * _bias(dtype) + 1


def _bias(dtype: Any) -> int:
    """Returns the stored exponent of 1."""
    return int(jnp.finfo(dtype).maxexp) - 1
