"""Standard normals of which each device of a mesh computes the values that it holds.

XLA would compute whole vectors and exchange them. Here each value is computed from its own
position in the vector of `normal.standard_normals`, so each costs a block of the cipher.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.transforms import chacha, forms, normals
from jaxdp.transforms.noise.normal import (
    BLOCKS_TOGETHER,
    FEW_BLOCKS,
    behind_barrier,
    in_one_turn,
)
from jaxdp.transforms.noise.words import cipher_key


def divided_normals(
    number: jax.Array,
    key: jax.Array,
    shapes: Sequence[tuple[int, ...]],
    dtype: Any,
    shardings: Sequence[NamedSharding],
) -> Sequence[jax.Array]:
    """Draws arrays of `shapes` and `shardings`, which are pieces of one vector of normals."""
    sizes = [math.prod(shape) for shape in shapes]
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    local_shapes = []
    for sharding, shape in zip(shardings, shapes, strict=True):
        local_shapes.append(sharding.shard_shape(shape))
    local_sizes = [math.prod(shape) for shape in local_shapes]
    local_ends = np.cumsum(local_sizes)

    def draw_part(
        number: jax.Array,
        cipher_key: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Returns this device's part of each array."""
        # Each array of this device, [values], one behind the other.
        own_positions = []
        for shape, sharding, start in zip(shapes, shardings, starts, strict=True):
            own_positions.append(_positions(shape, sharding, start))
        positions = jnp.concatenate(own_positions)
        values = _normals_at_positions(cipher_key, number, positions, dtype)
        pieces = jnp.split(values[: local_ends[-1]], local_ends[:-1])  # without padding
        arrays = []
        for piece, shape in zip(pieces, local_shapes, strict=True):
            arrays.append(piece.reshape(shape))
        return tuple(arrays)

    draw = jax.shard_map(
        draw_part,
        mesh=shardings[0].mesh,
        in_specs=PartitionSpec(),
        out_specs=tuple(sharding.spec for sharding in shardings),
        # JAX cannot see that devices with equal positions compute equal values.
        check_vma=False,
    )
    arrays: tuple[jax.Array, ...] = draw(number, cipher_key(key))
    return arrays


def _positions(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    start: int,
) -> jax.Array:
    """Returns the positions of this device's part of an array in the vector, int32 [values].

    The array begins at `start`. A device with rows 2 and 3 of an array [4, 5] has start + 10 to
    start + 19.
    """
    local_shape = sharding.shard_shape(shape)
    positions = jnp.full(local_shape, start, jnp.int32)
    # A spec may be shorter than a shape. The axes that it lacks are not divided.
    for d, mesh_axes in itertools.zip_longest(range(len(shape)), sharding.spec):
        index = lax.broadcasted_iota(jnp.int32, local_shape, d)
        if mesh_axes:
            first = lax.axis_index(mesh_axes) * local_shape[d]
            index = first + index
        # Rows lie one behind the other in the vector, whatever part of them a device has.
        stride = math.prod(shape[d + 1 :])
        positions += index * stride
    return positions.reshape(-1)


def _normals_at_positions(
    cipher_key: jax.Array,
    number: jax.Array,
    positions: jax.Array,
    dtype: Any,
) -> jax.Array:
    """Returns the values of a vector of normals at int32 positions [n], and a few more."""
    values_of_block = 2 * normals.PAIRS[dtype.itemsize]
    # XLA-CPU takes five times as long for a number of blocks that is no multiple.
    positions = jnp.pad(positions, (0, -len(positions) % BLOCKS_TOGETHER))
    # The block of each value, and its place in the block.
    counters, place = jnp.divmod(positions, values_of_block)
    values: jax.Array = forms.by_platform(
        cipher_key,
        number,
        counters.astype(jnp.uint32),
        place.astype(jnp.uint32),
        default=functools.partial(_normals_at, dtype=dtype),
        cpu=functools.partial(_normals_at, dtype=dtype, on_cpu=True),
    )
    return values


def _normals_at(
    cipher_key: jax.Array,
    number: jax.Array,
    counters: jax.Array,
    place: jax.Array,
    *,
    dtype: Any,
    on_cpu: bool = False,
) -> jax.Array:
    """Returns value `place` of each block, [n] for uint32 counters and places [n]."""

    def normal_of(words: Any) -> jax.Array:
        own_words = list(words[: normals.WORDS])
        # A block of float32 has two pairs of normals.
        if normals.PAIRS[dtype.itemsize] > 1:
            second_words = list(words[normals.WORDS : 2 * normals.WORDS])
            own_words = [
                jnp.where(place < 2, first, second)
                for first, second in zip(own_words, second_words, strict=True)
            ]
        # The other normal of the pair is thrown away: its position may be on another device.
        x, y = normals.pair(own_words, dtype)
        return jnp.where(place % 2 == 0, x, y)

    def draw(first: jax.Array) -> jax.Array:
        # `first` is 0, which XLA does not know (`in_one_turn`).
        inputs = (counters + first, number, 0, chacha.NOISE)
        return normal_of(chacha.unrolled_block(cipher_key, inputs))

    if on_cpu and counters.size <= FEW_BLOCKS:
        return normal_of(chacha.block(cipher_key, (counters, number, 0, chacha.NOISE)))
    compute_once = in_one_turn if on_cpu else behind_barrier
    values: jax.Array = compute_once(cipher_key, draw)
    return values
