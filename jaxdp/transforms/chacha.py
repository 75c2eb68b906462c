"""ChaCha12, the stream cipher of RFC 8439 with 12 rounds, as a generator of typed keys for
`jax.random`.

`jax.random.key(seed, impl=CHACHA12)` and `jax.random.wrap_key_data(words, impl=CHACHA12)` with
eight uint32 words make keys. Every word that a key yields is a word of a block of the cipher under
that key. The purposes read different blocks: word 15 of the input tells bits, children of `split`,
children of `fold_in` and the normals of `jaxdp.transforms.noise` apart. Within a purpose, words 12
to 14 tell the blocks of one call apart. So if ChaCha12 is a pseudo-random function of its input,
these streams of a key are independent and uniform, and so are those of its descendants. Two calls
with one key and one purpose read the same blocks. Noise tells its draws apart by word 13, and by
word 14 the turns of a draw that goes on.

Each word is a function of the key and of its index. So keys are independent under `jax.vmap`,
unlike "rbg" keys of JAX, and bits do not depend on the backend.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl

_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32)
DOUBLE_ROUNDS = 6  # 10 in RFC 8439. `jaxdp.transforms.noise` says why 6 are enough.
BITS, SPLIT, FOLD_IN, NOISE = range(4)  # word 15 of the input, per purpose
_LARGEST_COUNT = 2**32


def block(key: jax.Array, inputs: Sequence[Any]) -> jax.Array:
    """Returns words [16, n] of n blocks. The code is small, so it compiles in a tenth of a second
    for few blocks.

    Args:
        key: uint32 [8].
        inputs: Words 12 to 15 of the cipher's input, which are the counter and the nonce. Each is a
            scalar or has shape [n].
    """
    own = jnp.stack(
        jnp.broadcast_arrays(*(jnp.atleast_1d(jnp.asarray(x, jnp.uint32)) for x in inputs))
    )
    shared = jnp.concatenate([jnp.asarray(_CONSTANTS), key])[:, None]
    count = own.shape[1]
    rows = jnp.concatenate([jnp.broadcast_to(shared, (12, count)), own]).reshape(4, 4, count)
    roll = functools.partial(jnp.roll, axis=0)
    ended = lax.fori_loop(
        0, DOUBLE_ROUNDS, lambda _, state: _double_round(state, roll), tuple(rows)
    )
    words: jax.Array = (jnp.stack(ended) + rows).reshape(16, count)
    return words


def unrolled_block(key: jax.Array | list[jax.Array], inputs: Sequence[Any]) -> list[jax.Array]:
    """Returns the 16 words of `block` as expressions in `inputs` of any shape, which XLA fuses into
    what reads them.
    """
    start = jnp.broadcast_arrays(
        *(jnp.asarray(x, jnp.uint32) for x in [*_CONSTANTS, *key, *inputs])
    )
    state = start
    for _ in range(DOUBLE_ROUNDS):
        state = _unrolled_double_round(state)
    return [x + y for x, y in zip(state, start, strict=True)]


@jax.jit  # traced once, and inlined by XLA
def _unrolled_double_round(words: list[jax.Array]) -> list[jax.Array]:
    rows = np.empty((4, 4), object)  # NumPy would read an array of arrays as one array of numbers
    for i, word in enumerate(words):
        rows[divmod(i, 4)] = word
    return [word for row in _double_round(tuple(rows), np.roll) for word in row]


def _double_round(rows: Any, roll: Callable[..., Any]) -> Any:
    """Applies one round to the columns of the 4x4 state and one to its diagonals, four quarter
    rounds at once.
    """
    a, b, c, d = _quarter_round(*rows)
    a, b, c, d = _quarter_round(a, roll(b, -1), roll(c, -2), roll(d, -3))
    return a, roll(b, 1), roll(c, 2), roll(d, 3)


def _quarter_round(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any, Any]:
    for first, second in ((16, 12), (8, 7)):
        a = a + b
        d = _rotate_left(d ^ a, first)
        c = c + d
        b = _rotate_left(b ^ c, second)
    return a, b, c, d


def _rotate_left(x: Any, bits: int) -> Any:
    return (x << bits) | (x >> (32 - bits))


def _seed(seed: jax.Array) -> jax.Array:
    high = (seed >> 32).astype(jnp.uint32) if seed.dtype.itemsize > 4 else jnp.uint32(0)
    return jnp.concatenate([jnp.stack([seed.astype(jnp.uint32), high]), jnp.zeros(6, jnp.uint32)])


@functools.partial(jax.jit, static_argnums=1)
def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    words = block(key, (lax.iota(jnp.uint32, math.prod(shape)), 0, 0, SPLIT))
    return words[:8].T.reshape(*shape, 8)


@jax.jit
def _fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    return block(key, (data, 0, 0, FOLD_IN))[:8, 0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    if bit_width == 64:
        halves: jax.Array = _random_bits(key, 32, (2, *shape)).astype("uint64")
        return halves[0] << 32 | halves[1]
    count = math.prod(shape)
    blocks = -(-count // 16)
    if blocks > _LARGEST_COUNT:
        raise ValueError(
            f"shape {shape} takes {blocks} blocks, but one key has {_LARGEST_COUNT}. Split the key."
        )
    words = block(key, (lax.iota(jnp.uint32, blocks), 0, 0, BITS))
    return words.reshape(-1)[:count].reshape(shape).astype(f"uint{bit_width}")


CHACHA12 = define_prng_impl(
    key_shape=(8,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="chacha12",
    tag="chacha12",
)
