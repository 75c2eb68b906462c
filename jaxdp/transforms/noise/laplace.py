"""Laplace noise as a difference of two exponentials."""

import functools
from typing import Any

import jax

from jaxdp.transforms import normals
from jaxdp.transforms.noise.words import LOG_WORD, leading_words


@functools.partial(jax.jit, static_argnums=(2, 3))
def standard_laplace(
    number: jax.Array,
    key: jax.Array,
    size: int,
    dtype: Any,
) -> jax.Array:
    """Draws [size] values of density exp(-|x|) / 2."""
    zero_words, rest = _exponentials(number, key, size, dtype)
    # The zero words are subtracted as integers, so equal ones cancel without a rounding error.
    difference = (zero_words[0] - zero_words[1]).astype(dtype)
    values: jax.Array = difference * LOG_WORD + (rest[0] - rest[1])
    return values


def _exponentials(
    number: jax.Array,
    key: jax.Array,
    size: int,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Draws two rows of exponentials `zero_words * LOG_WORD + rest`, as their two summands.

    Returns:
        `zero_words`, int32 [2, size], and `rest` from 0 to LOG_WORD, [2, size].
    """
    zero_words, (high, low) = leading_words(number, key, (2, 2, size))
    # A word of zeros before u divides u by 2^32, which adds LOG_WORD to -log(u).
    return zero_words, normals.minus_log(high, low, dtype)
