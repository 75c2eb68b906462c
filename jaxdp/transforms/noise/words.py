"""Words of the cipher for noise: the cipher's key, and words that are redrawn while they are 0."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import chacha

# The largest number of 32-bit words that are drawn until one is not zero.
_MOST_WORDS = 256
# -log(2**-32): a leading word of zeros adds this much to an exponential.
LOG_WORD = 32 * math.log(2)


def cipher_key(key: jax.Array) -> jax.Array:
    """Returns the key words of the cipher, uint32 [8], from a typed key of any generator."""
    if jax.random.key_impl(key) == chacha.CHACHA12:
        words = jax.random.key_data(key)
    else:
        words = jax.random.bits(key, (8,), jnp.uint32)
    # XLA would compute the noise of a constant key as it compiles.
    behind_barrier: jax.Array = lax.optimization_barrier(words)
    return behind_barrier


def leading_words(
    number: jax.Array,
    key: jax.Array,
    shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Draws words uint32 of `shape` until those of the first row are not zero.

    A value whose first word was zero draws the words of all rows again, from blocks of their own.

    Returns:
        The number of zeros before the word of the first row, int32 [*shape[1:]], and the words.
    """
    key_words = cipher_key(key)
    count = math.prod(shape)
    counters = lax.iota(jnp.uint32, -(-count // 16))

    def draw(turn: jax.Array | int) -> jax.Array:
        blocks = chacha.block(key_words, (counters, number, turn, chacha.NOISE))
        return blocks.reshape(-1)[:count].reshape(shape)

    def has_zero(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        turn, words, _ = state
        return (turn < _MOST_WORDS) & (words[0] == 0).any()

    def draw_again(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        turn, words, zeros = state
        is_zero = words[0] == 0
        return turn + 1, jnp.where(is_zero, draw(turn), words), zeros + is_zero.astype(jnp.int32)

    # The first draw is outside of the loop, which most calls never enter.
    words = draw(0)
    # Computed from the words, so that the counts vary over the same mesh axes as the loop's body.
    no_zeros = (words[0] * 0).astype(jnp.int32)
    _, words, zeros = lax.while_loop(has_zero, draw_again, (jnp.uint32(1), words, no_zeros))
    # A word that is zero after all turns has no logarithm.
    return zeros, words.at[0].max(1)
