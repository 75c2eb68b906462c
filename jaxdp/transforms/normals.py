"""Normals from words of the cipher, by Box and Muller's method (1958).

`pair` is all arithmetic between random words and noise. Every platform calls it, so all draw the
same normals up to the rounding of their logarithms and roots. `jaxdp.transforms.noise` says how
many words a normal takes, and why.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# A pair of normals takes five words: two for the radius, two for the angle, one for the octant.
WORDS = 5
# Pairs that a block of 16 words gives, per itemsize of a normal.
PAIRS = {4: 2, 8: 1}
# The last term of the Taylor series of a cosine in [0, pi / 4], per itemsize. The next ones are
# below 2e-10 and 5e-24.
_TERMS = {4: 10, 8: 20}


@functools.partial(jax.jit, static_argnums=1)  # traced once, and inlined by XLA
def pair(
    words: Sequence[jax.Array],
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns two independent standard normals.

    Args:
      words: Five uniform uint32 arrays of one shape.
      dtype: float32 or float64, the dtype of the normals.
    """
    # The squared radius of two normals has the tail exp(-r^2 / 2), so it is -2 log(u).
    squared_radius = 2 * minus_log(words[0], words[1], dtype)
    radius = jnp.sqrt(squared_radius)
    turn = uniform(words[2], words[3], dtype)
    # An eighth of a turn, where the series of sine and cosine are short.
    angle = turn * (math.pi / 4)
    octant = words[4]

    sine = radius * _sine(angle)
    cosine = radius * _cosine(angle)
    # Three bits of the octant reflect the point at the diagonal and at the two axes.
    is_reflected = octant & 1 == 0
    x = jnp.where(is_reflected, sine, cosine)
    y = jnp.where(is_reflected, cosine, sine)
    x = jnp.where(octant & 2 == 0, x, -x)
    y = jnp.where(octant & 4 == 0, y, -y)
    return x, y


def minus_log(
    high: jax.Array,
    low: jax.Array,
    dtype: Any,
) -> jax.Array:
    """Returns -log(u) of a uniform u of 64 bits, precise to a float also where u is almost 1."""
    is_below_half = high >> 31 == 0
    # u itself, or 1 - u, which has all its digits where u is almost 1.
    high_of_small = jnp.where(is_below_half, high, ~high)
    # The lower word is as uniform as its complement, so it stays.
    small = uniform(high_of_small, low, dtype)
    rounded_u = jnp.where(is_below_half, small, 1 - small)
    log = -jnp.log(rounded_u)
    # log / (1 - rounded_u) hardly depends on rounded_u, so its error cancels in the product.
    is_one = rounded_u == 1
    corrected = jnp.where(is_one, small, log * (small / (1 - rounded_u)))
    return jnp.where(is_below_half, log, corrected)


def uniform(
    high: jax.Array,
    low: jax.Array,
    dtype: Any,
) -> jax.Array:
    """Maps 64 bits to (0, 1] with the full relative precision of a float near zero."""
    high_part = high.astype(dtype) * 2.0**-32
    # The half keeps 0 out, whose logarithm is infinite.
    low_part = (low.astype(dtype) + 0.5) * 2.0**-64
    return high_part + low_part


def _sine(x: jax.Array) -> jax.Array:
    return x * _series(x * x, _TERMS[x.dtype.itemsize] + 1)


def _cosine(x: jax.Array) -> jax.Array:
    return _series(x * x, _TERMS[x.dtype.itemsize])


def _series(y: jax.Array, last: int) -> jax.Array:
    """Sums the Taylor series of sin(x) / x for odd `last` and of cos(x) for even, where y is x**2.

    With `last` 4 it is 1 - y / 2 (1 - y / 12), which is 1 - x^2 / 2! + x^4 / 4!.
    """
    total = jnp.ones_like(y)
    # From the smallest term on, which loses the least.
    for k in range(last, 1, -2):
        factor = 1 / (k * (k - 1))
        total = 1 - total * y * factor
    return total
