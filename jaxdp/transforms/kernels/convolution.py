"""Norms of per-example gradients of 2-D convolutions on a TPU.

XLA forms the gradient of each example by a grouped convolution or a batched product, which leaves
most of the matrix unit empty, and writes it. A kernel walks over examples, keeps one gradient in
the memory of the chip, and writes one row of 128 partial sums.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxdp.transforms import shards
from jaxdp.transforms.kernels import cells, lanes

# Bytes of a block of examples.
BLOCK_BYTES = 2**20
# Row passes through the matrix unit for one example. The compiler unrolls them.
PASSES = 2**15


def suits(
    x: Any,
    g: Any,
    geometry: cells.Geometry,
) -> bool:
    """Returns whether `norms_and_bounds` serves arrays of these shapes and types.

    It refuses kernels that are not of two dimensions, empty arrays, other types than bfloat16 and
    float32, and images that do not fit into the memory of a chip.
    """
    is_empty = 0 in (*x.shape[1:], *g.shape[1:])
    if len(geometry.window) != 2 or is_empty:
        return False
    served = (jnp.bfloat16, jnp.float32)
    if x.dtype not in served or g.dtype not in served:
        return False
    plan = cells.Plan.of(geometry, x, g)
    if plan.passes > PASSES:
        return False
    # Two blocks of bfloat16: one arrives while the other is computed.
    blocks = 2 * 2 * sum(plan.heights) * plan.lanes
    return plan.stored + blocks <= lanes.KERNEL_BYTES // 4


def norms_and_bounds(
    x: jax.Array, g: jax.Array, geometry: cells.Geometry
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns squared norms of per-example gradients of a kernel, and their M and E, float32 [B].

    M and E are those of `jaxdp.transforms.rounding`.

    The gradient of example i is dV_i[p, c, k] = sum over positions t of x_i[s t + d p - lo, c]
    g_i[t, k], for strides s, dilations d and padding lo. Neither it nor patches of the data are
    written. Entries are rounded to bfloat16, as XLA rounds those of a convolution of the default
    precision on a TPU. Their products are exact, and sums are of float32. A norm does not depend on
    other examples of the batch, whatever they hold.

    Args:
      x: [B, H, W, C], the data, bfloat16 or float32.
      g: [B, OH, OW, K], the cotangents of the result, likewise.
      geometry: The other arguments of the convolution.

    A mapped axis of `jax.vmap` becomes part of the batch.

    Formal guarantees:
      Up to the rounding of M and E themselves, M is at least the norm of the gradient of |x| and
      |g|, so (T + 8) eps M bounds the rounding of a gradient of T positions. The squared norm of
      the gradient of rounded entries differs from the first result by at most E and the rounding of
      a sum of squares. E is 0 where the kernel forms the gradient, whose entries are rounded as M
      tells.
    """
    squares, apart, spread = _mapped_norms(geometry, *shards.varied(x, g))
    return squares, apart, spread


def _mapped_norms(
    geometry: cells.Geometry,
    x: jax.Array,
    g: jax.Array,
) -> jax.Array:
    norms = custom_vmap(functools.partial(_norms, geometry))

    @norms.def_vmap
    def mapped(
        size: int,
        batched: Sequence[bool],
        x: jax.Array,
        g: jax.Array,
    ) -> tuple[jax.Array, bool]:
        x, g = _all_mapped(size, batched, (x, g))
        x = x.reshape(-1, *x.shape[2:])
        g = g.reshape(-1, *g.shape[2:])
        results = _mapped_norms(geometry, x, g)
        # [3, size * B] to [size, 3, B]
        by_map = results.reshape(len(results), size, -1)
        return by_map.swapaxes(0, 1), True

    result: jax.Array = norms(x, g)
    return result


def _all_mapped(
    size: int,
    batched: Sequence[bool],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Returns arrays that all have the mapped axis in front."""
    mapped = []
    for y, is_mapped in zip(arrays, batched, strict=True):
        if not is_mapped:
            y = jnp.broadcast_to(y, (size, *y.shape))
        mapped.append(y)
    return mapped


def _norms(
    geometry: cells.Geometry,
    x: jax.Array,
    g: jax.Array,
) -> jax.Array:
    """Returns squared norms, M and E, [3, B]."""
    if not len(x):
        # Computed from x, so that it varies over the same mesh axes.
        nothing = jnp.sum(x.astype(jnp.float32), (1, 2, 3))
        return jnp.broadcast_to(nothing, (cells.RESULTS, 0))
    plan = cells.Plan.of(geometry, x, g)
    if lanes.batch_on_lanes(plan, len(x)):
        return lanes.norms(plan, geometry.strides, x, g)
    return _norms_of_blocks(plan, geometry.strides, x, g)


def column_sums_suit(
    x: Any,
    g: Any,
    geometry: cells.Geometry,
) -> bool:
    """Returns whether `column_sums` serves arrays of these shapes and types.

    It serves those whose batch is on the lanes, and whose gradients are formed.
    """
    if not x.shape[0] or not suits(x, g, geometry):
        return False
    plan = cells.Plan.of(geometry, x, g)
    return not plan.by_cells and lanes.batch_on_lanes(plan, x.shape[0])


def column_sums(
    x: jax.Array,
    g: jax.Array,
    bases: jax.Array,
    geometry: cells.Geometry,
) -> tuple[jax.Array, jax.Array]:
    """Returns sums over the rows of per-example gradients, [2 + n, B, K], and M of them, [B].

    The gradient dV [*window, C, K] of an example is that of `norms_and_bounds`, formed once, as
    are the other arguments and M. In each feature the sums are those of dV^2, of dV, and of dV
    times each base.

    Args:
      bases: float32 [n, *window, C, K].

    A mapped axis of `jax.vmap` becomes a loop.
    """
    function = functools.partial(_column_sums, geometry)
    sums, apart = _looped_under_vmap(function)(*shards.varied(x, g, bases))
    return sums, apart


def _looped_under_vmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays for which a mapped axis of `jax.vmap` becomes a loop."""
    looped = custom_vmap(function)

    @looped.def_vmap
    def mapped(
        size: int,
        batched: Sequence[bool],
        *arrays: jax.Array,
    ) -> tuple[Any, Any]:
        own = _all_mapped(size, batched, arrays)
        # A sum or a base of one mapped entry must not mix with that of another, so the batch cannot
        # hold both.
        results = lax.map(lambda arrays: looped(*arrays), own)
        return results, jax.tree.map(lambda _: True, results)

    called: Callable[..., Any] = looped
    return called


def _column_sums(
    geometry: cells.Geometry,
    x: jax.Array,
    g: jax.Array,
    bases: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    plan = cells.Plan.of(geometry, x, g)
    n_bases = len(bases)
    by_phase = _in_phases(plan, bases)
    n_rows = cells.statistics(plan, n_bases)

    def columns_of(*references: Any) -> Any:
        return cells.columns_of(plan, references)

    rows = lanes.examples(plan, geometry.strides, x, g, by_phase, columns_of, 1 + n_rows)
    rows = rows.swapaxes(0, 1).reshape(1 + n_rows, -1, cells.LANES)  # [rows, B, 128]
    apart = rows[0].sum(1)  # row 0 is M
    _, outputs = plan.filled
    total: Any = 0.0
    first = 1
    for _, columns in plan.sizes:
        tiles = cells.up(columns, cells.LANES) // cells.LANES
        end = first + (2 + n_bases) * tiles
        # The rows of a statistic are its columns, cut into tiles of 128.
        of_phase = rows[first:end].reshape(2 + n_bases, tiles, len(x), cells.LANES)
        of_phase = of_phase.swapaxes(1, 2).reshape(2 + n_bases, len(x), -1)
        # Columns of a phase are kernel columns times outputs.
        by_column = of_phase[..., :columns].reshape(2 + n_bases, len(x), -1, outputs)
        total = total + by_column.sum(2)
        first = end
    # Outputs were filled up to whole tiles.
    return total[..., : plan.outputs], apart


def _in_phases(plan: cells.Plan, bases: jax.Array) -> list[jax.Array]:
    """Returns the bases in the order of the gradient of each phase of columns.

    They are [n, rows of A, rows of B].
    """
    channels, outputs = plan.filled
    missing = [(0, 0)] * 3 + [(0, channels - plan.channels), (0, outputs - plan.outputs)]
    bases = jnp.pad(bases, missing)
    by_phase = []
    for phase, (rows, columns) in zip(plan.phases[1], plan.sizes, strict=True):
        places = [j for j, (_, own) in enumerate(plan.columns) if own == phase]
        of_phase = bases[:, :, jnp.array(places)].swapaxes(2, 3)
        by_phase.append(of_phase.reshape(len(bases), rows, columns))
    return by_phase


def sums_suit(
    x: Any,
    g: Any,
    geometry: cells.Geometry,
) -> bool:
    """Returns whether `weighted_sum` serves arrays of these shapes and types.

    It serves those whose batch is on the lanes.
    """
    if not x.shape[0] or not suits(x, g, geometry):
        return False
    plan = cells.Plan.of(geometry, x, g)
    entries = sum(rows * columns for rows, columns in plan.sizes)
    if 4 * entries > cells.PRODUCT_BYTES:  # float32 totals stay in the chip
        return False
    return lanes.batch_on_lanes(plan, x.shape[0])


def weighted_sum(
    x: jax.Array,
    g: jax.Array,
    factors: jax.Array,
    geometry: cells.Geometry,
) -> jax.Array:
    """Returns the weighted sum of per-example gradients of a kernel, float32 [*window, C, K].

    The gradient of an example is that of `norms_and_bounds`, as are the other arguments. Its factor
    multiplies it in float32. An example whose factor is 0 adds 0, whatever it holds.

    Args:
      factors: [B], real.

    A mapped axis of `jax.vmap` becomes a loop.
    """
    function = functools.partial(_sum, geometry)
    total: jax.Array = _looped_under_vmap(function)(*shards.varied(x, g, factors))
    return total


def _sum(
    geometry: cells.Geometry,
    x: jax.Array,
    g: jax.Array,
    factors: jax.Array,
) -> jax.Array:
    plan = cells.Plan.of(geometry, x, g)
    channels, outputs = plan.filled
    by_phase = []
    for total in lanes.weighted_sums(plan, geometry.strides, x, g, factors):
        columns = total.reshape(len(plan.rows), channels, -1, outputs)
        # Without the filled channels and outputs, [rows, C, columns, K].
        columns = columns[:, : plan.channels, :, : plan.outputs]
        by_phase.append(columns.swapaxes(1, 2))
    # Columns of one phase are together. They go back to their places in the kernel.
    phases = [phase for _, phase in plan.columns]
    order = sorted(range(len(phases)), key=phases.__getitem__)
    columns = jnp.concatenate(by_phase, 1)
    places = jnp.argsort(jnp.array(order))
    return columns[:, places]


def _norms_of_blocks(
    plan: cells.Plan,
    strides: tuple[int, ...],
    x: jax.Array,
    g: jax.Array,
) -> jax.Array:
    """Returns the squared norms, M and E of examples whose cells XLA brings onto the lanes."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch = len(x)
    data = _on_lanes(plan, _phases(plan, strides, x))
    cotangents = _on_lanes(plan, cells.on_grid(plan, (1, 1), g))
    groups, data_rows, lane_count = data.shape
    cotangent_rows = cotangents.shape[1]
    group_bytes = 2 * (data_rows + cotangent_rows) * lane_count  # of bfloat16
    size = max(1, min(groups, BLOCK_BYTES // group_bytes))

    def kernel(
        data: jax.Array,
        cotangents: jax.Array,
        sums: jax.Array,
    ) -> None:
        norm = cells.norm_of(plan)

        def example(i: jax.Array) -> None:
            data_words = cells.words_of(data[i])
            cotangent_words = cells.words_of(cotangents[i])
            results = norm(data_words, cotangent_words)
            for row, values in enumerate(results):
                sums[i, row : row + 1] = values

        cells.each(example, size, plan.unrolled)

    def block_of(rows: int, lane_count: int) -> Any:
        return pl.BlockSpec((size, rows, lane_count), lambda step: (step, 0, 0))

    steps = math.ceil(groups / size)
    sums_shape = (groups, cells.RESULTS, cells.LANES)
    sums = pl.pallas_call(
        kernel,
        grid=(steps,),
        in_specs=[
            block_of(data_rows, lane_count),
            block_of(cotangent_rows, lane_count),
        ],
        # The middle axis makes a block of any number of examples whole in the last two.
        out_specs=block_of(cells.RESULTS, cells.LANES),
        out_shape=shards.shape_like(data, sums_shape),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=lanes.LIMIT_BYTES),
    )(data, cotangents)
    # The lanes of a row belong to the examples that share them.
    by_side = sums.reshape(groups, cells.RESULTS, plan.sides, -1)
    by_group = jnp.sum(by_side, 3).swapaxes(0, 1)
    by_example = by_group.reshape(cells.RESULTS, -1)
    # Examples that fill up the last group are zeros.
    return by_example[:, :batch]


def _phases(
    plan: cells.Plan,
    strides: tuple[int, ...],
    x: jax.Array,
) -> jax.Array:
    """Returns data [B, phases, rows, columns, C] of the phases that the kernel meets."""
    batch = len(x)
    channels = x.shape[-1]
    height, width = plan.grid
    down, across = strides
    x = cells.on_grid(plan, strides, x)
    x = x.reshape(batch, height, down, width, across, channels)
    by_phase = []
    for row_phase, column_phase in itertools.product(*plan.phases):
        by_phase.append(x[:, :, row_phase, :, column_phase])
    return jnp.stack(by_phase, 1)


def _on_lanes(plan: cells.Plan, y: jax.Array) -> jax.Array:
    """Returns bfloat16 [groups, phases * channels, lanes].

    Args:
      plan: Of the convolution.
      y: [B, (phases,) rows, columns, channels].
    """
    batch = len(y)
    channels = y.shape[-1]
    sides = plan.sides
    y = y.astype(jnp.bfloat16)
    # [B, phases, cells, C] to [B, phases, C, cells]
    y = y.reshape(batch, -1, plan.cells, channels).swapaxes(2, 3)
    examples_missing = cells.up(batch, sides) - batch
    channels_missing = cells.up(channels, cells.ROWS) - channels
    cells_missing = plan.slot - plan.cells
    missing = [examples_missing, 0, channels_missing, cells_missing]
    y = jnp.pad(y, [(0, behind) for behind in missing])
    groups = len(y) // sides
    y = y.reshape(groups, sides, -1, plan.slot).swapaxes(1, 2)
    return y.reshape(len(y), -1, plan.lanes)
