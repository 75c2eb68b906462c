"""Squared norms of per-example gradients of dense layers by forming them, on a TPU.

The kernel forms blocks of u_i^T w_i in the memory of the chip and writes sums of their squares. It
costs one product for each example, and is for long examples of narrow layers, where Gram matrices
cost more.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.transforms import shards
from jaxdp.transforms.kernels import tiles

# Cycles of products in one step of the grid. They bound the size of the program.
_STEP = 6_500
# Cycles that a step takes beside its products.
_OVERHEAD = 220
# Cycles in which squares of a tile of 8 x 128 entries are added, if the products take less.
_SQUARES = 7
_LONGEST = 4096


class _Blocks(NamedTuple):
    """The rows and columns of the gradient that one step forms, and the cycles of one example."""

    rows: int
    cols: int
    cycles: float


_NO_BLOCKS = _Blocks(0, 0, math.inf)


def cycles(
    positions: int,
    rows: int,
    cols: int,
) -> float:
    """Returns the estimated cycles of one example.

    They are those of its products, of adding squares, or of reading it.
    """
    return _blocks(positions, rows, cols).cycles


@functools.cache
def _blocks(
    positions: int,
    rows: int,
    cols: int,
) -> _Blocks:
    """Returns the blocks of the least cost, or `_NO_BLOCKS` if none fits."""

    def cost(block_rows: int, block_cols: int) -> float:
        entries = tiles.padded(block_rows, tiles.PACKED) * tiles.padded(block_cols)
        products = tiles.padded(positions) * entries / tiles.PRODUCTS_PER_CYCLE
        squares = _SQUARES * entries / (tiles.SUBLANES * tiles.LANES)
        # The columns stay on the chip while all rows pass.
        features = block_rows + block_cols * block_rows / rows
        read = positions * features * tiles.ITEMSIZE / tiles.BYTES_PER_CYCLE
        # `tiles.parts` gives only divisors, so no block goes beyond the axes.
        steps = (rows // block_rows) * (cols // block_cols)
        return steps * max(products + _OVERHEAD, squares, read)

    # So many entries take `_STEP` cycles.
    most = _STEP * tiles.PRODUCTS_PER_CYCLE / tiles.padded(positions)
    sides = itertools.product(tiles.parts(rows), tiles.parts(cols))
    fitting = []
    for block_rows, block_cols in sides:
        if block_rows * block_cols <= most:
            cycles = cost(block_rows, block_cols)
            fitting.append(_Blocks(block_rows, block_cols, cycles))
    return min(fitting, key=lambda one: one.cycles, default=_NO_BLOCKS)


def _vmem(positions: int, blocks: _Blocks) -> float:
    """Returns the bytes that a step holds on the chip."""
    entries = tiles.padded(positions) * (blocks.rows + blocks.cols)
    read = entries * (2 * tiles.ITEMSIZE + 4)  # two buffers, and what is multiplied
    return read + 2 * blocks.rows * tiles.LANES * 4  # a product of 128 columns, twice


def suits(
    positions: int,
    rows: int,
    cols: int,
) -> bool:
    """Returns whether `formed_norms` serves u [B, positions, rows] and w [B, positions, cols].

    It serves 8 to 4096 positions, 64 or more rows and columns. Many rows or columns must be a
    multiple of 128.
    """
    if not tiles.serves(rows, cols) or not 8 <= positions <= _LONGEST:
        return False
    blocks = _blocks(positions, rows, cols)
    return blocks != _NO_BLOCKS and tiles.fits(_vmem(positions, blocks))


def formed_norms(u: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ||u_i^T w_i||^2 of each example, float32 [B].

    Args:
      u: [B, T, p], bfloat16. B may be 0.
      w: [B, T, q], likewise.

    Products are exact and are added in float32. A term of an entry passes at most T additions. No
    result of one example depends on another.
    """
    u, w = shards.varied(u, w)
    if len(u) == 0:
        # An empty batch has no step of the grid.
        return shards.vary(jnp.zeros(0, jnp.float32), shards.varying_axes(u))
    return _sums(u, w).sum((1, 2))


def _sums(u: jax.Array, w: jax.Array) -> jax.Array:
    """Returns sums of squares [B, 8, 128], to be added."""
    from jax.experimental import pallas as pl

    size, positions, rows = u.shape
    cols = w.shape[2]
    blocks = _blocks(positions, rows, cols)
    vmem = _vmem(positions, blocks)
    tile = (tiles.SUBLANES, tiles.LANES)
    # The axes of the grid are examples (i), and blocks of columns (b) and of rows (a).
    of_u = pl.BlockSpec((1, positions, blocks.rows), lambda i, b, a: (i, 0, a))
    of_w = pl.BlockSpec((1, positions, blocks.cols), lambda i, b, a: (i, 0, b))
    of_sums = pl.BlockSpec((1, *tile), lambda i, b, a: (i, 0, 0))
    sums: jax.Array = pl.pallas_call(
        _kernel,
        grid=(size, cols // blocks.cols, rows // blocks.rows),
        in_specs=[of_u, of_w],
        out_specs=of_sums,
        out_shape=shards.shape_like(u, (size, *tile)),
        compiler_params=tiles.compiler_params(vmem, parallel=1),
    )(u, w)
    return sums


def _kernel(
    u: Any,
    w: Any,
    sums: Any,
) -> None:
    from jax.experimental import pallas as pl

    is_first_column = pl.program_id(1) == 0
    is_first_row = pl.program_id(2) == 0

    # All steps of an example add to one tile, which holds anything before the first one.
    @pl.when(is_first_column & is_first_row)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    left = u[0]
    total = jnp.zeros((tiles.SUBLANES, tiles.LANES), jnp.float32)
    # The squares of some columns are added while the units multiply the next ones.
    for start in range(0, w.shape[2], tiles.LANES):
        columns = slice(start, start + tiles.LANES)
        right = w[0, :, columns]
        product = tiles.product(left, right, (0, 0))
        total += _tile_of_sums(jnp.square(product))
    sums[0] += total


def _tile_of_sums(x: jax.Array) -> jax.Array:
    """Returns sums over parts of x [p, q], as a tile [8, 128]."""
    rows, cols = x.shape
    padded_rows = tiles.padded(rows, tiles.SUBLANES)
    padded_cols = tiles.padded(cols, tiles.LANES)
    x = jnp.pad(x, [(0, padded_rows - rows), (0, padded_cols - cols)])
    tile_rows = padded_rows // tiles.SUBLANES
    tile_cols = padded_cols // tiles.LANES
    x = x.reshape(tile_rows, tiles.SUBLANES, tile_cols, tiles.LANES)
    # Whole tiles are added entry by entry. Sums within a tile would move its lanes.
    return x.sum((0, 2))
