"""Vectors of standard normals, each platform by the form that is fastest there.

Value v of a vector is value v % n of block v // n of the cipher, where a block gives n values. So
all forms draw the same normals, up to the rounding of logarithms and roots.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms import barriers, chacha, forms, normals
from jaxdp.transforms.kernels import normals as kernel
from jaxdp.transforms.noise.words import cipher_key

# XLA-CPU computes blocks of the cipher one by one, which takes five times as long, unless their
# number is a multiple.
BLOCKS_TOGETHER = 8
# So few blocks take no time, and the small code of `chacha.block` is traced and compiled sooner.
FEW_BLOCKS = 2**8


def pieces_of(
    vector: jax.Array,
    sizes: Sequence[int],
) -> list[jax.Array]:
    """Cuts a vector into vectors of the given sizes. What is left is dropped."""
    # Without the barrier XLA may compute the vector once for each piece.
    whole = lax.optimization_barrier(vector)
    ends = np.cumsum(sizes).tolist()
    return [lax.slice(whole, (end - size,), (end,)) for end, size in zip(ends, sizes, strict=True)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def standard_normals(
    number: jax.Array,
    key: jax.Array,
    sizes: tuple[int, ...],
    dtype: Any,
) -> list[jax.Array]:
    """Draws vectors of the given sizes, which are pieces of one vector.

    Normals are those of Box and Muller's method, with 64 bits for the radius and 3 + 64 for the
    angle.
    """

    def pieces_by(
        form: Callable[..., jax.Array],
        **options: Any,
    ) -> Callable[..., list[jax.Array]]:
        def pieces(cipher_key: jax.Array, number: jax.Array) -> list[jax.Array]:
            # A form may return a longer vector than it is asked for, because cutting the vector to
            # size and then to pieces would copy it once more.
            return pieces_of(form(cipher_key, number, sum(sizes), **options), sizes)

        return pieces

    platforms = {"cpu": pieces_by(_normals_on_cpu, dtype=dtype)}
    kernels = {}
    if dtype == jnp.float32:
        platforms["tpu"] = pieces_by(kernel.standard_normals_by_xla)
        kernels["tpu"] = pieces_by(kernel.standard_normals)
    by_xla = pieces_by(_normals_by_xla, dtype=dtype)
    pieces: list[jax.Array] = forms.by_platform(
        cipher_key(key), number, default=by_xla, kernels=kernels, **platforms
    )
    return pieces


def _normals_on_cpu(
    cipher_key: jax.Array,
    number: jax.Array,
    size: int,
    *,
    dtype: Any,
) -> jax.Array:
    block_count = _blocks_of(size, dtype)
    if block_count > FEW_BLOCKS:
        return _normals_by_xla(cipher_key, number, size, dtype=dtype, on_cpu=True)
    pair_count = normals.PAIRS[dtype.itemsize]
    counters = lax.iota(jnp.uint32, block_count)
    words = chacha.block(cipher_key, (counters, number, 0, chacha.NOISE))
    # Of 16 words a block, 10 or 5 are used.
    words = words[: pair_count * normals.WORDS]
    words = words.reshape(pair_count, normals.WORDS, block_count)
    words_of_pairs = list(words.swapaxes(0, 1))
    values = jnp.stack(normals.pair(words_of_pairs, dtype))  # [2, pairs, blocks]
    return values.transpose(2, 1, 0).reshape(-1)


def _normals_by_xla(
    cipher_key: jax.Array,
    number: jax.Array,
    size: int,
    *,
    dtype: Any,
    on_cpu: bool = False,
) -> jax.Array:
    # XLA-CPU computes the cipher once for each array that it fills. One complex128 array for the
    # four float32 normals of a block saves a third of the time.
    is_packed = on_cpu and dtype == jnp.float32
    compute_once = in_one_turn if on_cpu else behind_barrier
    # XLA-CPU takes twice as long where it computes the counters and the cipher in one program.
    counters = lax.iota(jnp.uint32, _blocks_of(size, dtype))

    def draw(first: jax.Array) -> Any:
        inputs = (counters + first, number, 0, chacha.NOISE)
        words = chacha.unrolled_block(cipher_key, inputs)
        pairs = []
        for i in range(normals.PAIRS[dtype.itemsize]):
            start = i * normals.WORDS
            x, y = normals.pair(words[start : start + normals.WORDS], dtype)
            pairs.append(lax.complex(x, y))
        return _packed(pairs) if is_packed else pairs

    # complex128 exists under x64 only.
    with jax.enable_x64(True) if is_packed else contextlib.nullcontext():
        return _flat(compute_once(cipher_key, draw))


def _blocks_of(size: int, dtype: Any) -> int:
    """Returns the number of blocks that give `size` values, a multiple of `BLOCKS_TOGETHER`."""
    values_together = 2 * normals.PAIRS[dtype.itemsize] * BLOCKS_TOGETHER
    return BLOCKS_TOGETHER * max(1, -(-size // values_together))


def behind_barrier(
    cipher_key: jax.Array,
    draw: Callable[[jax.Array], Any],
) -> Any:
    """Returns `draw(0)`, which XLA computes once, and not again for each of its readers."""
    return lax.optimization_barrier(draw(jnp.uint32(0)))


def in_one_turn(
    cipher_key: jax.Array,
    draw: Callable[[jax.Array], Any],
) -> Any:
    """Returns `draw(0)`, computed once by a loop of one turn.

    XLA-CPU removes barriers before it fuses. It cannot know that the loop has one turn, and that
    `draw` is constant.
    """
    zero = barriers.zero_after(cipher_key)  # varies over the same mesh axes as the key
    shapes = jax.eval_shape(draw, jax.ShapeDtypeStruct((), jnp.uint32))
    start = jax.tree.map(lambda x: jnp.full(x.shape, zero.astype(x.dtype)), shapes)
    return lax.fori_loop(jnp.uint32(0), zero + 1, lambda turn, _: draw(turn), start)


def _packed(pairs: Sequence[jax.Array]) -> jax.Array:
    """Returns two complex64 arrays as one complex128 array of their bits.

    The real part holds the bits of the first array, the imaginary part those of the second one.
    """

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.uint32).astype(jnp.uint64)

    halves = []
    for pair in pairs:
        both = bits(pair.real) | (bits(pair.imag) << jnp.uint64(32))
        halves.append(both)
    first, second = (lax.bitcast_convert_type(half, jnp.float64) for half in halves)
    return lax.complex(first, second)


def _flat(pairs: Any) -> jax.Array:
    """Returns the normals block by block, from `_packed` pairs or a list of complex pairs."""
    if isinstance(pairs, jax.Array):
        halves = (pairs.real, pairs.imag)
        columns = [lax.bitcast_convert_type(half, jnp.float32) for half in halves]
    else:
        columns = [jnp.stack([pair.real, pair.imag], axis=-1) for pair in pairs]
    # [blocks, pairs, 2]
    return jnp.stack(columns, axis=1).reshape(-1)
