"""ChaCha12, the stream cipher of RFC 8439 with 12 rounds, as a generator of typed keys.

`jax.random.key(seed, impl=CHACHA12)` makes a key, and so does
`jax.random.wrap_key_data(words, impl=CHACHA12)` with eight uint32 words. A block of the cipher is a
function of sixteen words:

=========  ====================================================================================
words      content
=========  ====================================================================================
0 to 3     the constants of RFC 8439
4 to 11    the key
12         the number of the block in a call, or of the child of `split`, or the data of `fold_in`
13         the number of a draw of noise, else 0
14         the turn of a draw of noise that goes on, else 0
15         the purpose: `BITS`, `SPLIT`, `FOLD_IN` or `NOISE`
=========  ====================================================================================

So the purposes read different blocks, and so do the words of one call. If ChaCha12 is a
pseudo-random function of its input, the streams of a key are independent and uniform, and so are
those of its descendants. Two calls with one key and one purpose read the same blocks, except of
noise with another number.

Each word is a function of the key and of its index. So keys are independent under `jax.vmap`,
unlike "rbg" keys of JAX, and bits do not depend on the backend.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl

# RFC 8439, section 2.3.
_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32)
# 10 in RFC 8439. `jaxdp.transforms.noise` says why 6 are enough.
DOUBLE_ROUNDS = 6
# Word 15 of the input, per purpose.
BITS = 0
SPLIT = 1
FOLD_IN = 2
NOISE = 3
WORDS_OF_BLOCK = 16
# Word 12 has 32 bits.
_MOST_BLOCKS = 2**32


def block(key: jax.Array, inputs: Sequence[Any]) -> jax.Array:
    """Returns words [16, n] of n blocks.

    The code is small, so it compiles in a tenth of a second for few blocks.

    Args:
        key: uint32 [8], or [8, n] with a key for each block.
        inputs: Words 12 to 15 of the cipher's input, which are the counter and the nonce. Each is a
            scalar or has shape [n].
    """
    inputs = [jnp.atleast_1d(jnp.asarray(word, jnp.uint32)) for word in inputs]
    own_words = jnp.stack(jnp.broadcast_arrays(*inputs))
    count = own_words.shape[1]
    constants = jnp.asarray(_CONSTANTS)[:, None]
    keys = key.reshape(8, -1)
    shared_words = [jnp.broadcast_to(x, (len(x), count)) for x in (constants, keys)]
    words = jnp.concatenate([*shared_words, own_words])
    # Rows of the 4 x 4 state of RFC 8439, of all blocks at once.
    start = words.reshape(4, 4, count)
    roll = functools.partial(jnp.roll, axis=0)

    def double_round(_: jax.Array, rows: Any) -> Any:
        return _double_round(rows, roll)

    end = lax.fori_loop(0, DOUBLE_ROUNDS, double_round, tuple(start))
    # The start is added, because the rounds alone could be inverted.
    block: jax.Array = (jnp.stack(end) + start).reshape(WORDS_OF_BLOCK, count)
    return block


def unrolled_block(
    key: jax.Array | list[jax.Array],
    inputs: Sequence[Any],
) -> list[jax.Array]:
    """Returns the 16 words of `block` as expressions in `inputs` of any shape.

    XLA fuses them into what reads them.
    """
    state = [*_CONSTANTS, *key, *inputs]
    words = [jnp.asarray(word, jnp.uint32) for word in state]
    start = jnp.broadcast_arrays(*words)
    end = start
    for _ in range(DOUBLE_ROUNDS):
        end = _unrolled_double_round(end)
    return [x + y for x, y in zip(end, start, strict=True)]


@jax.jit  # traced once, and inlined by XLA
def _unrolled_double_round(words: list[jax.Array]) -> list[jax.Array]:
    # Filled one by one, because NumPy would read an array of arrays as one array of numbers.
    rows = np.empty((4, 4), object)
    for i, word in enumerate(words):
        rows[divmod(i, 4)] = word
    rounded = _double_round(tuple(rows), np.roll)
    return list(itertools.chain.from_iterable(rounded))


def _double_round(rows: Any, roll: Callable[..., Any]) -> Any:
    """Applies one round to the columns of the 4x4 state and one to its diagonals.

    Four quarter rounds are computed at once.
    """
    # RFC 8439, section 2.3, the "inner block".
    a, b, c, d = _quarter_round(*rows)
    # Rolled, the diagonals are columns.
    b = roll(b, -1)
    c = roll(c, -2)
    d = roll(d, -3)
    a, b, c, d = _quarter_round(a, b, c, d)
    b = roll(b, 1)
    c = roll(c, 2)
    d = roll(d, 3)
    return a, b, c, d


def _quarter_round(
    a: Any,
    b: Any,
    c: Any,
    d: Any,
) -> tuple[Any, Any, Any, Any]:
    # RFC 8439, section 2.1, in two halves.
    for rotation_of_d, rotation_of_b in ((16, 12), (8, 7)):
        a = a + b
        d = _rotate_left(d ^ a, rotation_of_d)
        c = c + d
        b = _rotate_left(b ^ c, rotation_of_b)
    return a, b, c, d


def _rotate_left(x: Any, bits: int) -> Any:
    return (x << bits) | (x >> (32 - bits))


# --- The generator of `jax.random` --------------------------------------------------------------


def _seed(seed: jax.Array) -> jax.Array:
    """Returns key words with the 64 bits of a seed in the first two. The others are 0."""
    low = seed.astype(jnp.uint32)
    # Without x64 a seed has 32 bits.
    if seed.dtype.itemsize > 4:
        high = (seed >> 32).astype(jnp.uint32)
    else:
        high = jnp.uint32(0)
    seed_words = jnp.stack([low, high])
    zero_words = jnp.zeros(6, jnp.uint32)
    return jnp.concatenate([seed_words, zero_words])


@functools.partial(jax.jit, static_argnums=1)
def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    counters = lax.iota(jnp.uint32, math.prod(shape))
    words = block(key, (counters, 0, 0, SPLIT))
    keys = words[:8].T
    return keys.reshape(*shape, 8)


@jax.jit
def _fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    words = block(key, (data, 0, 0, FOLD_IN))
    return words[:8, 0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_bits(
    key: jax.Array,
    bit_width: int,
    shape: tuple[int, ...],
) -> jax.Array:
    if bit_width == 64:
        halves: jax.Array = _random_bits(key, 32, (2, *shape))
        halves = halves.astype("uint64")
        return halves[0] << 32 | halves[1]
    count = math.prod(shape)
    block_count = -(-count // WORDS_OF_BLOCK)
    # Word 12 would wrap, and the stream repeat.
    if block_count > _MOST_BLOCKS:
        raise ValueError(
            f"shape {shape} takes {block_count} blocks, but one key has {_MOST_BLOCKS}. Split the "
            "key."
        )
    counters = lax.iota(jnp.uint32, block_count)
    words = block(key, (counters, 0, 0, BITS))
    # A word gives one value, also of 8 or 16 bits.
    values = words.reshape(-1)[:count]
    return values.reshape(shape).astype(f"uint{bit_width}")


# pickle finds functions by their names, which compiled functions do not have. A key is pickled with
# those of its generator.
def _children(key: jax.Array, shape: tuple[int, ...]) -> Any:
    return _split(key, shape)


def _child(key: jax.Array, data: Any) -> Any:
    return _fold_in(key, data)


def _bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> Any:
    return _random_bits(key, bit_width, shape)


CHACHA12 = define_prng_impl(
    key_shape=(8,),
    seed=_seed,
    split=_children,
    random_bits=_bits,
    fold_in=_child,
    name="chacha12",
    tag="chacha12",
)
