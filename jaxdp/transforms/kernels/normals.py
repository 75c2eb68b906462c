"""Normals on a TPU: the cipher and Box and Muller's method, in registers.

XLA computes the cipher again for each array that it fills, and stores pairs of values on an axis of two,
which a TPU pads to 128 lanes. The kernel computes each block once and writes whole rows of 128 values.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxdp.transforms import chacha, normals, shards

LANES = 128
# Rows of blocks that are computed at once. The 16 words of 16 rows take half of the registers of a TPU.
ROWS = 16
# A block gives four normals, which are the lanes 4 i to 4 i + 3 of a row.
VALUES = 4
# Turns of the loop in one step of the grid, so that writing overlaps with computing: 512 KiB a step.
TURNS = 16
VALUES_PER_STEP = TURNS * ROWS * VALUES * LANES


def standard_normals(cipher_key: jax.Array, number: jax.Array, size: int, *, interpret: bool = False) -> jax.Array:
    """Returns at least `size` float32 standard normals, in the order of `jaxdp.transforms.noise`.

    Args:
      cipher_key: uint32 [8].
      number: uint32 scalar, word 13 of the cipher's input.
      size: The number of values.
      interpret: Runs the kernel step by step in JAX, on any platform.
    """
    steps = max(1, -(-size // VALUES_PER_STEP))
    rows = steps * VALUES_PER_STEP // LANES
    # Two axes, because a block of the last axis alone has no place in memory under `jax.vmap`.
    inputs = jnp.append(cipher_key, number)[None]
    drawn = pl.pallas_call(
        _kernel,
        grid=(steps,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)],
        out_specs=pl.BlockSpec((rows // steps, LANES), lambda step: (step, 0)),
        out_shape=shards.shape_like(inputs, (rows, LANES), jnp.float32),
        interpret=interpret,
    )(inputs)
    values: jax.Array = drawn.reshape(-1)
    return values


def _kernel(inputs: jax.Array, values: jax.Array) -> None:
    cipher_key = [inputs[0, i] for i in range(8)]
    number = inputs[0, 8]
    first = pl.program_id(0).astype(jnp.uint32) * (TURNS * ROWS * LANES)
    lane = lax.broadcasted_iota(jnp.uint32, (ROWS, LANES), 1)
    row = lax.broadcasted_iota(jnp.uint32, (ROWS, LANES), 0)
    # Row r of tile t holds the blocks 32 (ROWS t + r) + i in its lanes 4 i to 4 i + 3. Lane 4 i + t of
    # the cipher computes block i of tile t, so each normal is at most three lanes from its place.
    own_block = (lane % VALUES) * (32 * ROWS) + 32 * row + lane // VALUES

    def turn(t: jax.Array, carry: int) -> int:
        counters = own_block + (first + t.astype(jnp.uint32) * (ROWS * LANES))
        words = chacha.unrolled_block(cipher_key, (counters, number, 0, chacha.NOISE))
        pairs = [
            normals.pair(words[: normals.WORDS], jnp.dtype(jnp.float32)),
            normals.pair(words[normals.WORDS : 2 * normals.WORDS], jnp.dtype(jnp.float32)),
        ]
        components = [*pairs[0], *pairs[1]]
        for tile in range(VALUES):
            ordered = _ordered(components, tile, lane % VALUES)
            values[pl.ds((t * VALUES + tile) * ROWS, ROWS), :] = ordered
        return carry

    lax.fori_loop(0, TURNS, turn, 0)


def _ordered(components: list[jax.Array], tile: int, place: jax.Array) -> jax.Array:
    """Returns component c of block i of the tile at lane 4 i + c. It was computed at lane 4 i + tile."""
    ordered = components[tile]
    for c in range(VALUES):
        if c != tile:
            moved = pltpu.roll(components[c], (c - tile) % LANES, 1)
            ordered = jnp.where(place == c, moved, ordered)
    return ordered
