"""Normals on a TPU: the cipher and Box and Muller's method, in registers.

XLA computes the cipher again for each array that it fills, and stores pairs of values on an axis of
two, which a TPU pads to 128 lanes. The kernel computes each block once and writes whole rows of 128
values.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import chacha, normals, shards

LANES = 128
# A block gives four normals, which are the lanes 4 i to 4 i + 3 of a row.
VALUES = 4
# Rows of blocks that the kernel computes at once. Its 16 words take half of the registers of a TPU.
ROWS = 16
# Turns of its loop in one step of the grid, so that writing overlaps with computing: 32 KiB a
# turn.
TURNS = 16
VALUES_PER_STEP = TURNS * ROWS * VALUES * LANES
# Rows of blocks that XLA computes at once: 2 MiB of normals.
XLA_ROWS = 1024


def standard_normals(
    cipher_key: jax.Array,
    number: jax.Array,
    size: int,
) -> jax.Array:
    """Returns at least `size` float32 normals by a kernel.

    Their order is that of `jaxdp.transforms.noise`.

    Args:
      cipher_key: uint32 [8].
      number: uint32 scalar, word 13 of the cipher's input.
      size: The number of values.
    """
    # Importing Pallas takes 0.14 s, which only programs for a TPU need.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    steps = max(1, -(-size // VALUES_PER_STEP))
    rows_per_step = VALUES_PER_STEP // LANES
    # Two axes, because a block of the last axis alone has no place in memory under `jax.vmap`.
    inputs = jnp.append(cipher_key, number)[None]
    # The last step writes only the rows that there are. To cut off more would be a copy.
    rows = max(rows_per_step, -(-size // LANES))
    draw = pl.pallas_call(
        _kernel,
        grid=(steps,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)],
        out_specs=pl.BlockSpec((rows_per_step, LANES), lambda step: (step, 0)),
        out_shape=shards.shape_like(inputs, (rows, LANES)),
    )
    values: jax.Array = draw(inputs).reshape(-1)
    return values


def _kernel(inputs: jax.Array, values: jax.Array) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    cipher_key = [inputs[0, i] for i in range(8)]
    number = inputs[0, 8]
    first = pl.program_id(0) * TURNS

    def turn(t: jax.Array, carry: int) -> int:
        tiles = _tiles(cipher_key, number, first + t, ROWS, pltpu.roll)
        for i, tile in enumerate(tiles):
            start = (t * VALUES + i) * ROWS
            values[pl.ds(start, ROWS), :] = tile
        return carry

    lax.fori_loop(0, TURNS, turn, 0)


def standard_normals_by_xla(
    cipher_key: jax.Array,
    number: jax.Array,
    size: int,
) -> jax.Array:
    """Returns what `standard_normals` returns where XLA divides the program among devices.

    It takes several times as long, because XLA computes the cipher once for each tile.
    """
    values_per_turn = XLA_ROWS * VALUES * LANES
    turns = max(1, -(-size // values_per_turn))
    # Computed from the key, so that it varies over the same mesh axes as the values.
    empty = jnp.broadcast_to(cipher_key[0] * 0, (turns, VALUES, XLA_ROWS, LANES))

    def turn(t: jax.Array, values: jax.Array) -> jax.Array:
        tiles = jnp.stack(_tiles(list(cipher_key), number, t, XLA_ROWS, jnp.roll))
        updated: jax.Array = lax.dynamic_update_index_in_dim(values, tiles, t, 0)
        return updated

    # A loop in place of one expression, because XLA would hold the words of all blocks.
    values: jax.Array = lax.fori_loop(0, turns, turn, empty.astype(jnp.float32))
    return values.reshape(-1)


def _tiles(
    cipher_key: list[jax.Array],
    number: jax.Array,
    turn: jax.Array,
    rows: int,
    roll: Callable[[jax.Array, int, int], jax.Array],
) -> list[jax.Array]:
    """Returns four tiles [rows, 128], which are consecutive rows of normals: those of `turn`.

    Row r of tile t holds the blocks 32 (rows t + r) + i in its lanes 4 i to 4 i + 3. Lane 4 i + t
    of the cipher computes block i of tile t, so each normal is at most three lanes from its place.
    """
    lane = lax.broadcasted_iota(jnp.uint32, (rows, LANES), 1)
    row = lax.broadcasted_iota(jnp.uint32, (rows, LANES), 0)
    tile_of_lane = lane % VALUES
    block_of_lane = tile_of_lane * (32 * rows) + 32 * row + lane // VALUES
    counters = block_of_lane + turn.astype(jnp.uint32) * (rows * LANES)
    words = chacha.unrolled_block(cipher_key, (counters, number, 0, chacha.NOISE))

    float32 = jnp.dtype(jnp.float32)
    first_pair = normals.pair(words[: normals.WORDS], float32)
    second_pair = normals.pair(words[normals.WORDS : 2 * normals.WORDS], float32)
    components = [*first_pair, *second_pair]
    return [_ordered(components, tile_of_lane, roll, tile) for tile in range(VALUES)]


def _ordered(
    components: list[jax.Array],
    component_of_lane: jax.Array,
    roll: Callable[[jax.Array, int, int], jax.Array],
    tile: int,
) -> jax.Array:
    """Returns component c of block i of the tile at lane 4 i + c.

    It was computed at lane 4 i + tile, so it moves by c - tile lanes.
    """
    ordered = components[tile]
    for c in range(VALUES):
        if c == tile:
            continue
        moved = roll(components[c], (c - tile) % LANES, 1)
        ordered = jnp.where(component_of_lane == c, moved, ordered)
    return ordered
