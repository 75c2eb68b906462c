"""Weighted sums of per-example gradients of dense layers, on a TPU.

The kernel computes sum_i f_i u_i^T w_i. It multiplies the product of one example by its factor in
float32, so a factor needs no parts in bfloat16, and rows of an example with the factor 0 need not
be zeroed first: they are not used.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import shards
from jaxdp.transforms.kernels import tiles

# The most positions of one product. Longer examples are divided.
_LONGEST = 1024
# Below this, padding to 128 positions costs more than two or three products without it.
_SHORTEST = 48
# The most cycles of products in one step of the grid. They bound the size of the program.
_STEP = 6_500
# Examples share a step until its products take about this many cycles, and up to a number.
_LEAST_STEP = 2_000
_EXAMPLES = 8
# Cycles that a step takes beside its products.
_OVERHEAD = 220
# The largest block of the sum, and its longest side.
_ENTRIES = 768 * 1536
_SIDE = 3072


class _Blocks(NamedTuple):
    """The part of the work that one step does.

    Attributes:
      rows, cols: The rows and columns of the sum.
      positions: The positions of an example.
      examples: The number of examples.
      cycles: The cycles of one example, in all steps.
    """

    rows: int
    cols: int
    positions: int
    examples: int
    cycles: float


_NO_BLOCKS = _Blocks(0, 0, 0, 0, math.inf)


def cycles(
    positions: int,
    rows: int,
    cols: int,
) -> float:
    """Returns the estimated cycles of one example, whose positions are padded to 128 or more."""
    return _blocks(positions, rows, cols).cycles


def suits(
    positions: int,
    rows: int,
    cols: int,
) -> bool:
    """Returns whether `weighted_sum` serves u [B, positions, rows] and w [B, positions, cols].

    It serves 48 to 1024 positions, and multiples of 128 above, and 64 or more rows and columns.
    """
    if not tiles.serves(rows, cols) or positions < _SHORTEST:
        return False
    blocks = _blocks(positions, rows, cols)
    return blocks != _NO_BLOCKS and tiles.fits(_vmem(blocks))


@functools.cache
def _blocks(
    positions: int,
    rows: int,
    cols: int,
) -> _Blocks:
    """Returns the blocks of the least cost, or `_NO_BLOCKS` if none fits."""
    length = _positions_at_once(positions)
    if length == 0:
        return _NO_BLOCKS

    def block(block_rows: int, block_cols: int) -> _Blocks:
        products = tiles.padded(length) * block_rows * block_cols / tiles.PRODUCTS_PER_CYCLE
        read = length * (block_rows + block_cols) * tiles.ITEMSIZE / tiles.BYTES_PER_CYCLE
        examples = 1
        if length == positions:
            # Parts of an example take steps of their own, so only whole ones share a step.
            examples = min(_EXAMPLES, max(1, int(_LEAST_STEP / products)))
        blocks_of_rows = -(-rows // block_rows)
        blocks_of_cols = -(-cols // block_cols)
        steps = blocks_of_rows * blocks_of_cols * positions // length
        # Reading overlaps with computing.
        cost = steps * max(products + _OVERHEAD / examples, read)
        return _Blocks(block_rows, block_cols, length, examples, cost)

    most = min(_ENTRIES, _STEP * tiles.PRODUCTS_PER_CYCLE / tiles.padded(length))
    pairs = itertools.product(_sides(rows), _sides(cols))
    fitting = [block(*sides) for sides in pairs if sides[0] * sides[1] <= most]
    return min(fitting, key=lambda one: one.cycles, default=_NO_BLOCKS)


def _positions_at_once(positions: int) -> int:
    """Returns the positions of one product, or 0 if a long example has no parts of 128."""
    if positions <= _LONGEST:
        return positions
    return max(tiles.parts(positions, _LONGEST), default=0)


def _sides(size: int) -> list[int]:
    """Returns sides of blocks. The last block may go beyond the axis."""
    longest = min(size, _SIDE)
    multiples = range(longest // tiles.LANES * tiles.LANES, 0, -tiles.LANES)
    return [longest, *multiples]


def _vmem(blocks: _Blocks) -> float:
    """Returns the bytes that a step holds on the chip."""
    positions = blocks.examples * tiles.padded(blocks.positions)
    entries = positions * (blocks.rows + blocks.cols)
    read = entries * (2 * tiles.ITEMSIZE + 4)  # two buffers, and what is multiplied
    return read + 3 * blocks.rows * blocks.cols * 4  # two buffers of the sum, and a product


def weighted_sum(
    u: jax.Array,
    w: jax.Array,
    factors: jax.Array,
    *,
    u_across: bool = False,
    w_across: bool = False,
) -> jax.Array:
    """Returns sum_i factors_i u_i^T w_i, float32 [p, q].

    Args:
      u: [B, T, p], bfloat16. B may be 0.
      w: [B, T, q], likewise.
      factors: float32 [B].
      u_across: Whether XLA lays u with the positions on the lanes, as it does next to heads of
        attention. The result is the same. The wrong answer costs a copy of u.
      w_across: The same of w. At most one of both saves a copy.

    Formal guarantees:
      An example whose factor is exactly 0 contributes exactly 0, also if its rows are NaN or
      infinite. Products are exact and are added in float32. They are multiplied by the factor in
      float32, at most 1024 positions together.
    """
    u, w, factors = shards.varied(u, w, factors)
    if len(u) == 0:
        empty = jnp.zeros((u.shape[2], w.shape[2]), jnp.float32)
        return shards.vary(empty, shards.varying_axes(u))
    # The kernel reads its first factor across, and (sum u^T w)^T = sum w^T u.
    if w_across and not u_across:
        return _sum(w, u, factors, (True, False)).T
    return _sum(u, w, factors, (u_across, w_across))


def _operand(
    blocks: _Blocks,
    features: int,
    axis: int,
    is_across: bool,
) -> Any:
    """Returns the block that a step reads of an operand.

    Args:
      blocks: The sizes of blocks.
      features: How many features of the operand a block has.
      axis: The axis of the grid that counts these blocks.
      is_across: Whether the positions are on the lanes.
    """
    from jax.experimental import pallas as pl

    def place(*turns: Any) -> tuple[Any, ...]:
        of_features = turns[axis]
        # The first two axes of the grid are blocks of the sum.
        examples, positions = turns[2:]
        if is_across:
            return (examples, of_features, positions)
        return (examples, positions, of_features)

    shape = (blocks.positions, features)
    if is_across:
        shape = shape[::-1]
    return pl.BlockSpec((blocks.examples, *shape), place)


def _sum(
    u: jax.Array,
    w: jax.Array,
    factors: jax.Array,
    across: tuple[bool, bool],
) -> jax.Array:
    """Returns the sum. The matrix units hold blocks of w, by which rows of u^T are multiplied."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    size, positions, rows = u.shape
    cols = w.shape[2]
    blocks = _blocks(positions, rows, cols)
    steps = pl.cdiv(size, blocks.examples)
    # Examples behind the batch have the factor 0, so they are not used.
    padding = (0, steps * blocks.examples - size)
    padded = jnp.pad(factors.astype(jnp.float32), padding)
    # Two axes, because a block of the last axis alone has no place in memory under `jax.vmap`.
    padded = padded[None]
    # The axes of the grid are blocks of rows (a) and of columns (b) of the sum, examples (i), and
    # parts of their positions (t).
    u_across, w_across = across
    if u_across:
        u = u.swapaxes(1, 2)
    if w_across:
        w = w.swapaxes(1, 2)
    of_u = _operand(blocks, blocks.rows, 0, u_across)
    of_w = _operand(blocks, blocks.cols, 1, w_across)
    of_factors = pl.BlockSpec(memory_space=pltpu.SMEM)
    of_total = pl.BlockSpec((blocks.rows, blocks.cols), lambda a, b, i, t: (a, b))
    blocks_of_rows = pl.cdiv(rows, blocks.rows)
    blocks_of_cols = pl.cdiv(cols, blocks.cols)
    turns = positions // blocks.positions
    vmem = _vmem(blocks)
    total: jax.Array = pl.pallas_call(
        functools.partial(_kernel, across=across),
        # The axes of the sum come first, so a block of it stays on the chip for all examples.
        grid=(blocks_of_rows, blocks_of_cols, steps, turns),
        in_specs=[of_factors, of_u, of_w],
        out_specs=of_total,
        out_shape=shards.shape_like(u, (rows, cols)),
        compiler_params=tiles.compiler_params(vmem, parallel=2),
    )(padded, u, w)
    return total


def _kernel(
    factors: Any,
    u: Any,
    w: Any,
    total: Any,
    *,
    across: tuple[bool, bool],
) -> None:
    from jax.experimental import pallas as pl

    step = pl.program_id(2)
    part = pl.program_id(3)
    examples = u.shape[0]
    own_factors = [factors[0, step * examples + k] for k in range(examples)]

    _clear(total, (step == 0) & (part == 0))  # it holds anything before
    are_used = [factor != 0 for factor in own_factors]
    is_used = functools.reduce(jnp.logical_or, are_used)

    @pl.when(is_used)
    def _() -> None:
        products = []
        for k, factor in enumerate(own_factors):
            products.append(_scaled(factor, u[k], w[k], across))
        total[...] += functools.reduce(jnp.add, products)


def _clear(total: Any, first: jax.Array) -> None:
    """Sets the sum to zero in the first step. A loop is a short program for many rows."""
    from jax.experimental import pallas as pl

    rows = total.shape[0]
    # Eight rows are a tile. Sides that are no multiple of 128 may have fewer common factors.
    at_once = next(n for n in (8, 4, 2, 1) if rows % n == 0)

    def clear(k: jax.Array, carry: int) -> int:
        part = pl.ds(k * at_once, at_once)
        total[part, :] = jnp.zeros((at_once, total.shape[1]), jnp.float32)
        return carry

    lax.fori_loop(0, jnp.where(first, rows // at_once, 0), clear, 0)


def _scaled(
    factor: jax.Array,
    u: jax.Array,
    w: jax.Array,
    across: tuple[bool, bool],
) -> jax.Array:
    """Returns factor u^T w, or zeros if the factor is 0."""
    positions = [1 if on_lanes else 0 for on_lanes in across]
    product = tiles.product(u, w, positions)
    # 0 * NaN is NaN, so the product is left out and not multiplied by 0.
    return jnp.where(factor != 0, factor * product, 0)
