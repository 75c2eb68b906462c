"""Laplace noise, real and discrete, as differences of two exponentials."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

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


@functools.partial(jax.jit, static_argnums=(3, 4))
def discrete_values(
    number: jax.Array,
    scale: float | jax.Array,
    key: jax.Array,
    size: int,
    dtype: Any,
) -> jax.Array:
    """Draws int32 [size] values k of probability proportional to exp(-|k| / scale)."""
    zero_words, rest = _exponentials(number, key, size, jnp.float32)
    word = jnp.asarray(LOG_WORD * scale, jnp.float32)
    whole_word = jnp.floor(word)
    # Whole numbers are added as integers because float32 does not represent all of them beyond
    # 2**24.
    fractions = rest * scale + zero_words.astype(jnp.float32) * (word - whole_word)
    wholes = zero_words * whole_word.astype(jnp.int32)
    geometric = wholes + jnp.floor(fractions).astype(jnp.int32)
    values: jax.Array = geometric[0] - geometric[1]
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
    return zero_words, normals.minus_log(high, low, dtype)
