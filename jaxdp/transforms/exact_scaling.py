"""Exact scaling of floats by powers of two, so that lengths of vectors neither overflow nor vanish.

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

# For the itemsizes of float32 and float64: the integer of the same size, and the number of stored
# bits of the significand.
_LAYOUTS: dict[int, tuple[Any, int]] = {
    4: (jnp.int32, 23),
    8: (jnp.int64, 52),
}


def in_units(
    x: jax.Array,
    axis: int | Sequence[int] | None = None,
) -> tuple[jax.Array, jax.Array]:
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
    # An empty row has no largest entry, and 0 is the exponent of zero.
    largest = _exponents(x).max(axis, keepdims=True, initial=0)
    powers = largest - _bias(x.dtype)
    return times_power(x, -powers), powers


def times_power(x: jax.Array, powers: jax.Array) -> jax.Array:
    """Returns x * 2**powers, exactly, for integer powers that broadcast against x.

    Zero replaces a subnormal result or operand, and an infinity a result that is too large.
    Infinities and NaN stay.
    """
    ints, stored = _LAYOUTS[x.dtype.itemsize]
    before = _exponents(x)
    not_finite = _not_finite(x.dtype)
    powers = powers.astype(ints)
    after = before + powers
    # An integer added to the bits of the exponent multiplies by a power of two. Where the exponent
    # leaves its range the bits are nonsense, which the selections below replace.
    words = lax.bitcast_convert_type(x, ints) + powers * ints(1 << stored)
    scaled = lax.bitcast_convert_type(words, x.dtype)
    is_in_range = after < not_finite
    infinity = jnp.where(x > 0, jnp.inf, -jnp.inf)
    scaled = jnp.where(is_in_range, scaled, infinity.astype(x.dtype))
    is_normal = (before > 0) & (after > 0)
    scaled = jnp.where(is_normal, scaled, jnp.zeros_like(x))
    return jnp.where(before < not_finite, scaled, x)  # infinities and NaN


def tree_in_units(tree: Any) -> tuple[Any, jax.Array]:
    """Splits a pytree of float32 and float64 leaves as `in_units`, with one power for all.

    None leaves stay None. The power is an int32 scalar. That of a tree without leaves is 0.
    """
    powers = []
    for leaf in jax.tree.leaves(tree):
        largest = _exponents(leaf).max(initial=0)
        powers.append((largest - _bias(leaf.dtype)).astype(jnp.int32))  # those of float64 are int64
    if powers:
        power = jnp.stack(powers).max()
    else:
        power = jnp.int32(0)
    units = jax.tree.map(lambda leaf: times_power(leaf, -power), tree)
    return units, power


def finite(x: jax.Array) -> jax.Array:
    """Returns whether each entry is neither infinite nor NaN, by its bits."""
    return _exponents(x) != _not_finite(x.dtype)


def _exponents(x: jax.Array) -> jax.Array:
    """Returns the stored exponents.

    They are 0 of zero and of subnormal numbers, and `_not_finite` of infinities and NaN.
    """
    ints, stored = _LAYOUTS[x.dtype.itemsize]
    words = lax.bitcast_convert_type(x, ints) >> ints(stored)
    exponents: jax.Array = words & ints(_not_finite(x.dtype))  # without the sign
    return exponents


def _not_finite(dtype: Any) -> int:
    """Returns the stored exponent of infinities and NaN, all of whose bits are ones."""
    return 2 * _bias(dtype) + 1


def _bias(dtype: Any) -> int:
    """Returns the stored exponent of 1."""
    return int(jnp.finfo(dtype).maxexp) - 1
