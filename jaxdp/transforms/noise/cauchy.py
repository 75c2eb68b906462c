"""Cauchy noise from the tangent of an angle."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.transforms import normals
from jaxdp.transforms.noise.words import leading_words


@functools.partial(jax.jit, static_argnums=(2, 3))
def standard_cauchy(
    number: jax.Array,
    key: jax.Array,
    size: int,
    dtype: Any,
) -> jax.Array:
    """Draws [size] values of density 1 / (pi (1 + x**2)), each the mean of two Cauchy draws."""
    zero_words, (high, low, choice) = leading_words(number, key, (3, 2, size))
    # Below pi / 4, where the tangent is below 1.
    angle = normals.uniform(high, low, dtype) * (math.pi / 4)
    # Behind a word of zeros the tangent is the angle, to a relative 2**-64.
    below_one = jnp.where(zero_words == 0, jnp.tan(angle), jnp.ldexp(angle, -32 * zero_words))
    # |C| < 1 has probability 1/2, and 1/|C| has the law of |C|. So the draws are precise near zero
    # and far out.
    magnitude = jnp.where(choice & 1 == 0, below_one, 1 / below_one)
    draws = jnp.where(choice & 2 == 0, magnitude, -magnitude)
    # Halved before they are added, because their sum may exceed the largest float.
    return draws[0] * 0.5 + draws[1] * 0.5
