"""Norms of per-example gradients of 2-D convolutions on a TPU.

XLA forms the gradient of each example by a grouped convolution or a batched product, which leaves most of the
matrix unit empty, and writes it. A kernel walks over examples, keeps one gradient in the memory of the chip, and
writes one row of 128 partial sums.

All arrays lie on the grid of the input, cut into cells of `strides` entries. An entry of a cell is a phase, and phases
are channels. So a strided convolution is one of stride 1: kernel position i meets phase p of the cell that is a
cells away, where s a + p = i d - lo for stride s, dilation d and padding lo. Cells lie on the lanes of a row. With x_a
the data moved by a rows of cells and g_b the cotangents moved by b columns, the gradient of an example is

    dV[i, j] = x_a(i) g_b(j)^T,

one product of all x_a below each other and all g_b below each other. What leaves the grid is zero. The squared norm of
that product A B^T is also the sum of the entries of (A^T A) * (B^T B), which is cheaper for few cells and many
channels. Two or more examples of few cells share the lanes there, and only the blocks of one example count.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxdp.transforms import rounding, shards

LANES = 128
# Rows of bfloat16 in a tile. Channels are filled up to whole tiles.
ROWS = 16
# Channels that are moved and transposed at once where the batch is on the lanes.
CHUNK = 32
# Bytes of a block of examples, of a matrix of products, and of all that a kernel keeps.
BLOCK_BYTES = 2**20
PRODUCT_BYTES = 2**22
KERNEL_BYTES = 80 * 2**20
# What the compiler may give to a kernel, with its own copies.
LIMIT_BYTES = KERNEL_BYTES + 2**24
# Row passes through the matrix unit for one example. The compiler unrolls them.
PASSES = 2**15

Pairs = tuple[tuple[int, int], ...]


class _Geometry(NamedTuple):
    """The arguments of a convolution."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs
    kernel_dilation: tuple[int, ...]

    @classmethod
    def of(
        cls,
        window: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        kernel_dilation: Sequence[int],
    ) -> "_Geometry":
        pairs = tuple((low, high) for low, high in padding)
        return cls(tuple(window), tuple(strides), pairs, tuple(kernel_dilation))


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a convolution lies on the lanes.

    Attributes:
      grid: The rows and columns of cells.
      rows, columns: (cells away, phase) of each kernel row and kernel column.
      channels, outputs: The numbers of channels of x and g.
    """

    grid: tuple[int, int]
    rows: Pairs
    columns: Pairs
    channels: int
    outputs: int

    @classmethod
    def of(cls, geometry: _Geometry, x: Any, g: Any) -> "_Plan":
        _, *size, channels = x.shape
        _, *out_size, outputs = g.shape
        strides = geometry.strides
        cells = [max(-(-n // s), out) for n, s, out in zip(size, strides, out_size, strict=True)]
        rows, columns = (_met(geometry, d) for d in range(2))
        return cls((cells[0], cells[1]), rows, columns, channels, outputs)

    @property
    def phases(self) -> tuple[list[int], list[int]]:
        """The phases of rows and of columns that the kernel meets."""
        return sorted({phase for _, phase in self.rows}), sorted({phase for _, phase in self.columns})

    @property
    def cells(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def moves(self) -> list[int]:
        """How many cells the columns of the kernel are away."""
        return sorted({away for away, _ in self.columns})

    def columns_of(self, phase: int) -> list[int]:
        """Returns how many cells the kernel columns that meet a phase are away."""
        return [away for away, other in self.columns if other == phase]

    @property
    def filled(self) -> tuple[int, int]:
        """The numbers of channels, filled up to whole tiles."""
        return _up(self.channels, ROWS), _up(self.outputs, ROWS)

    @property
    def heights(self) -> tuple[int, int]:
        """The rows of an example in the kernel: phases and channels of x, channels of g."""
        channels, outputs = self.filled
        return len(self.phases[0]) * len(self.phases[1]) * channels, outputs

    @functools.cached_property
    def sides(self) -> int:
        """The number of examples that share the lanes, where products of cells are cheaper than the gradient."""
        return LANES // _slot(self.cells) if self.by_cells else 1

    @property
    def lanes(self) -> int:
        return LANES if self.sides > 1 else _up(self.cells, LANES)

    @property
    def slot(self) -> int:
        """The lanes of one example."""
        return self.lanes // self.sides

    @functools.cached_property
    def by_cells(self) -> bool:
        """Whether products of cells are cheaper than the gradient, as where examples share the lanes."""
        return 2 * self.cells <= LANES or self._passes_by_cells < self._passes_of_gradient

    @property
    def passes(self) -> int:
        """Row passes through the matrix unit for one example."""
        return self._passes_by_cells if self.by_cells else self._passes_of_gradient

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The rows of A and of B for each phase of columns."""
        channels, outputs = self.filled
        return [(len(self.rows) * channels, len(self.columns_of(q)) * outputs) for q in self.phases[1]]

    @property
    def _passes_of_gradient(self) -> int:
        lanes = _up(self.cells, LANES)
        return sum(rows * _tiles(cols) * _tiles(lanes) for rows, cols in self.sizes)

    @property
    def _passes_by_cells(self) -> int:
        lanes = _up(self.cells, LANES)
        sides = LANES // _slot(self.cells)
        products = sum(_tiles(rows) + _tiles(cols) for rows, cols in self.sizes)
        if 4 * lanes * lanes > PRODUCT_BYTES:
            return 2**62
        return lanes * _tiles(lanes) * products // sides

    @property
    def stored(self) -> int:
        """The bytes that the kernel keeps of one block row, its moved copies and its products."""
        moved = sum(rows + cols for rows, cols in self.sizes) * self.lanes * 2
        sizes = [self.lanes**2] if self.by_cells else [rows * cols for rows, cols in self.sizes]
        return 2 * moved + 3 * 4 * max(sizes)

    @property
    def unrolled(self) -> int:
        """The number of examples whose products the compiler interleaves."""
        return 4 if self.passes <= 1024 else 2 if self.passes <= 4096 else 1


def _met(geometry: _Geometry, d: int) -> Pairs:
    """Returns (cells away, phase) of the kernel's entries along dimension d."""
    low, _ = geometry.padding[d]
    places = (i * geometry.kernel_dilation[d] - low for i in range(geometry.window[d]))
    return tuple(divmod(place, geometry.strides[d]) for place in places)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _tiles(n: int) -> int:
    return -(-n // LANES)


def _slot(cells: int) -> int:
    """Returns the lanes that an example takes beside others."""
    return min(LANES, max(8, 1 << (cells - 1).bit_length()))


def suits(
    x: Any,
    g: Any,
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
    kernel_dilation: Sequence[int] = (1, 1),
) -> bool:
    """Returns whether `squared_norms` serves arrays of these shapes and types.

    It refuses kernels that are not of two dimensions, empty arrays, other types than bfloat16 and float32, and images
    that do not fit into the memory of a chip.
    """
    if len(window) != 2 or not math.prod((*x.shape[1:], *g.shape[1:])):
        return False
    if {jnp.dtype(x.dtype), jnp.dtype(g.dtype)} - {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        return False
    plan = _Plan.of(_Geometry.of(window, strides, padding, kernel_dilation), x, g)
    blocks = 2 * 2 * sum(plan.heights) * plan.lanes
    return plan.passes <= PASSES and plan.stored + blocks <= KERNEL_BYTES // 4


def squared_norms(
    x: jax.Array,
    g: jax.Array,
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
    kernel_dilation: Sequence[int] = (1, 1),
) -> jax.Array:
    """Returns the squared norm of each example's gradient of a convolution's kernel, float32 [B].

    The gradient of example i is dV_i[p, c, k] = sum over positions t of x_i[s t + d p - lo, c] g_i[t, k], for
    strides s, dilations d and padding lo. Neither it nor patches of the data are written. Entries are rounded to
    bfloat16, as XLA rounds those of a convolution of the default precision on a TPU. Their products are exact, and
    sums are of float32. A norm does not depend on other examples of the batch, whatever they hold.

    Args:
      x: [B, H, W, C], the data, bfloat16 or float32.
      g: [B, OH, OW, K], the cotangents of the result, likewise.
      window: The height and the width of the kernel.
      strides: The steps of the kernel along H and W.
      padding: (low, high) zeros around H and W. Data that are padded already need none.
      kernel_dilation: The steps between entries of the kernel.

    A mapped axis of `jax.vmap` becomes part of the batch.
    """
    return _varying(_Geometry.of(window, strides, padding, kernel_dilation), x, g, bounds=False)[0]


def norms_and_bounds(
    x: jax.Array,
    g: jax.Array,
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
    kernel_dilation: Sequence[int] = (1, 1),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `squared_norms`, and M and E of `jaxdp.transforms.rounding`, float32 [B] each.

    Formal guarantees:
      Up to the rounding of M and E themselves, M is at least the norm of the gradient of |x| and |g|, so (T + 8) eps M
      bounds the rounding of a gradient of T positions. The squared norm of the gradient of rounded entries differs
      from the first result by at most E and the rounding of a sum of squares. E is 0 where the kernel forms the
      gradient, whose entries are rounded as M tells.
    """
    squares, apart, spread = _varying(_Geometry.of(window, strides, padding, kernel_dilation), x, g, bounds=True)
    return squares, apart, spread


def _varying(geometry: _Geometry, x: jax.Array, g: jax.Array, bounds: bool) -> jax.Array:
    axes = shards.varying_axes(x, g)
    return _mapped_norms(geometry, bounds, shards.vary(x, axes), shards.vary(g, axes))


def _mapped_norms(geometry: _Geometry, bounds: bool, x: jax.Array, g: jax.Array) -> jax.Array:
    norms = custom_vmap(functools.partial(_norms, geometry, bounds))

    @norms.def_vmap
    def mapped(size: int, batched: Sequence[bool], x: jax.Array, g: jax.Array) -> tuple[jax.Array, bool]:
        x, g = (y.reshape(-1, *y.shape[2:]) for y in _all_mapped(size, batched, (x, g)))
        results = _mapped_norms(geometry, bounds, x, g)
        return results.reshape(len(results), size, -1).swapaxes(0, 1), True

    result: jax.Array = norms(x, g)
    return result


def _all_mapped(size: int, batched: Sequence[bool], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns arrays that all have the mapped axis in front."""
    pairs = zip(arrays, batched, strict=True)
    return [y if own else jnp.broadcast_to(y, (size, *y.shape)) for y, own in pairs]


def _norms(geometry: _Geometry, bounds: bool, x: jax.Array, g: jax.Array) -> jax.Array:
    """Returns squared norms [1, B], with `bounds` followed by M and E, [3, B]."""
    if not len(x):
        return jnp.broadcast_to(jnp.sum(x.astype(jnp.float32), (1, 2, 3)), (3 if bounds else 1, 0))
    plan = _Plan.of(geometry, x, g)
    norms = _norms_by_batch if _batch_on_lanes(plan, len(x)) else _norms_of_blocks
    return norms(plan, geometry.strides, x, g, bounds)


def sums_suit(
    x: Any,
    g: Any,
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
    kernel_dilation: Sequence[int] = (1, 1),
) -> bool:
    """Returns whether `weighted_sum` serves arrays of these shapes and types: those whose batch is on the lanes."""
    pads = [(low, high) for low, high in padding]
    if not x.shape[0] or not suits(x, g, window=window, strides=strides, padding=pads, kernel_dilation=kernel_dilation):
        return False
    plan = _Plan.of(_Geometry.of(window, strides, padding, kernel_dilation), x, g)
    stored = 4 * sum(rows * columns for rows, columns in plan.sizes)
    return _batch_on_lanes(plan, x.shape[0]) and stored <= PRODUCT_BYTES


def weighted_sum(
    x: jax.Array,
    g: jax.Array,
    factors: jax.Array,
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
    kernel_dilation: Sequence[int] = (1, 1),
) -> jax.Array:
    """Returns the weighted sum of the examples' gradients of a convolution's kernel, float32 [*window, C, K].

    The gradient of an example is that of `squared_norms`, as are the other arguments. Its factor multiplies it in
    float32. An example whose factor is 0 adds 0, whatever it holds.

    Args:
      factors: [B], real.

    A mapped axis of `jax.vmap` becomes a loop.
    """
    axes = shards.varying_axes(x, g, factors)
    total = custom_vmap(functools.partial(_sum, _Geometry.of(window, strides, padding, kernel_dilation)))

    @total.def_vmap
    def mapped(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        return lax.map(lambda own: total(*own), _all_mapped(size, batched, arrays)), True

    result: jax.Array = total(*(shards.vary(y, axes) for y in (x, g, factors)))
    return result


def _sum(geometry: _Geometry, x: jax.Array, g: jax.Array, factors: jax.Array) -> jax.Array:
    plan = _Plan.of(geometry, x, g)
    channels, outputs = plan.filled
    parts = []
    for total in _sum_by_batch(plan, geometry.strides, x, g, factors):
        part = total.reshape(len(plan.rows), channels, -1, outputs)
        parts.append(part[:, : plan.channels, :, : plan.outputs].swapaxes(1, 2))
    # Columns of one phase are together.
    phases = [phase for _, phase in plan.columns]
    order = sorted(range(len(phases)), key=phases.__getitem__)
    return jnp.concatenate(parts, 1)[:, jnp.argsort(jnp.array(order))]


# --- Examples in blocks: XLA brings the cells onto the lanes ---


def _norms_of_blocks(plan: _Plan, strides: tuple[int, ...], x: jax.Array, g: jax.Array, bounds: bool) -> jax.Array:
    """Returns the squared norms of examples whose cells XLA brings onto the lanes."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch = len(x)
    data = _on_lanes(plan, _phases(plan, strides, x))
    cotangents = _on_lanes(plan, _on_grid(plan, (1, 1), g))
    groups, height, lanes = data.shape
    width = cotangents.shape[1]
    size = max(1, min(groups, BLOCK_BYTES // (2 * (height + width) * lanes)))

    results = 3 if bounds else 1

    def kernel(data: jax.Array, cotangents: jax.Array, sums: jax.Array) -> None:
        norm = _norm(plan, bounds)

        def example(i: jax.Array) -> None:
            for row, values in enumerate(norm(_words(data[i]), _words(cotangents[i]))):
                sums[i, row : row + 1] = values

        _each(example, size, plan.unrolled)

    sums = pl.pallas_call(
        kernel,
        grid=(-(-groups // size),),
        in_specs=[
            pl.BlockSpec((size, height, lanes), lambda step: (step, 0, 0)),
            pl.BlockSpec((size, width, lanes), lambda step: (step, 0, 0)),
        ],
        # The middle axis makes a block of any number of examples whole in the last two.
        out_specs=pl.BlockSpec((size, results, LANES), lambda step: (step, 0, 0)),
        out_shape=shards.shape_like(data, (groups, results, LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=LIMIT_BYTES),
    )(data, cotangents)
    by_example = jnp.sum(sums.reshape(groups, results, plan.sides, -1), 3)
    return by_example.swapaxes(0, 1).reshape(results, -1)[:, :batch]


def _on_grid(plan: _Plan, strides: tuple[int, ...], y: jax.Array) -> jax.Array:
    """Returns y [B, ...] with zeros behind it, so that it fills the cells of the grid."""
    behind = [(0, cells * s - n) for cells, s, n in zip(plan.grid, strides, y.shape[1:3], strict=True)]
    return jnp.pad(y, [(0, 0), *behind, (0, 0)])


def _phases(plan: _Plan, strides: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Returns data [B, phases, rows, columns, C] of the phases that the kernel meets."""
    batch, channels = len(x), x.shape[-1]
    (height, width), (down, across) = plan.grid, strides
    cells = _on_grid(plan, strides, x).reshape(batch, height, down, width, across, channels)
    met = [cells[:, :, p, :, q] for p in plan.phases[0] for q in plan.phases[1]]
    return jnp.stack(met, 1)


def _on_lanes(plan: _Plan, y: jax.Array) -> jax.Array:
    """Returns y [B, (phases,) rows, columns, channels] as bfloat16 [groups, phases * channels, lanes]."""
    batch, channels, sides = len(y), y.shape[-1], plan.sides
    y = y.astype(jnp.bfloat16).reshape(batch, -1, plan.cells, channels).swapaxes(2, 3)
    whole = (_up(batch, sides) - batch, 0, _up(channels, ROWS) - channels, plan.slot - plan.cells)
    y = jnp.pad(y, [(0, n) for n in whole])
    y = y.reshape(len(y) // sides, sides, -1, plan.slot).swapaxes(1, 2)
    return y.reshape(len(y), -1, plan.lanes)


# --- The batch on the lanes, as XLA lays convolutions of whole batches of 128: the kernel brings the cells there ---


def _batch_on_lanes(plan: _Plan, batch: int) -> bool:
    """Returns whether the kernel transposes blocks of 128 examples and 128 cells by itself."""
    cells_fit = plan.slot == plan.cells if plan.sides > 1 else plan.cells % LANES == 0 and LANES % plan.grid[1] == 0
    phases_fit = all(phases == list(range(len(phases))) for phases in plan.phases)
    if batch % (LANES * plan.sides) or not cells_fit or not phases_fit:
        return False
    stored = sum(mover.stored for mover in _Mover.both(plan, [jnp.dtype(jnp.float32)] * 2))
    return stored + plan.stored <= KERNEL_BYTES


def _odd_tiles(rows: int) -> int:
    """Returns at least `rows` rows: an odd number of tiles of 8.

    The memory has four banks, which take turns by tiles. A read of one row of every example meets all of them.
    """
    return 8 * (-(-rows // 8) | 1)


class _Blocks:
    """Walks over blocks of 128 examples, or of 128 for each that shares the lanes."""

    def __init__(self, plan: _Plan, strides: tuple[int, ...], x: jax.Array, g: jax.Array):
        self.number = len(x) // (LANES * plan.sides)
        self.arrays = [_cells_first(plan, strides, x), _cells_first(plan, (1, 1), g)]
        self.movers = _Mover.both(plan, [x.dtype, g.dtype])

    @property
    def memory(self) -> list[Any]:
        return [space for mover in self.movers for space in mover.memory]

    def walk(self, sources: Sequence[Any], memory: Sequence[Any], compute: Callable[..., None]) -> None:
        """Calls `compute(block, words)` for each block.

        Args:
          sources: The references to `arrays`.
          memory: Those to `memory`.
          compute: `words(i)` are the words of data and cotangents of example i of the block.
        """
        from jax.experimental import pallas as pl

        memories = [_Memory(*memory[:4]), _Memory(*memory[4:])]
        own = list(zip(self.movers, sources, memories, strict=True))

        def start(block: Any) -> None:
            for mover, source, parts in own:
                mover.start(source, parts, block, 0)

        def words(i: jax.Array) -> list[jax.Array]:
            return [mover.words(parts.kept, i) for mover, _, parts in own]

        def turn(block: jax.Array, carry: int) -> int:
            for mover, source, parts in own:
                mover.transpose(source, parts, block)

            # The first part of the next block arrives while products are computed.
            @pl.when(block < self.number - 1)
            def _() -> None:
                start(block + 1)

            compute(block, words)
            return carry

        start(0)
        # A loop in place of a grid, because a block is brought in parts.
        lax.fori_loop(0, self.number, turn, 0)


def _norms_by_batch(plan: _Plan, strides: tuple[int, ...], x: jax.Array, g: jax.Array, bounds: bool) -> jax.Array:
    """Returns the squared norms where the batch is on the lanes."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    blocks = _Blocks(plan, strides, x, g)
    results = 3 if bounds else 1

    def kernel(data: Any, cotangents: Any, result: Any, *memory: Any) -> None:
        *parts, sums, written = memory
        norm = _norm(plan, bounds)

        def compute(block: jax.Array, words: Callable[[jax.Array], list[jax.Array]]) -> None:
            def example(i: jax.Array) -> None:
                for row, values in enumerate(norm(*words(i))):
                    sums[row, pl.ds(i, 1), :] = values

            _each(example, LANES, plan.unrolled)
            copy = pltpu.make_async_copy(sums, result.at[block], written)
            copy.start()
            copy.wait()

        blocks.walk((data, cotangents), parts, compute)

    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    sums = pl.pallas_call(
        kernel,
        in_specs=[everywhere, everywhere],
        out_specs=everywhere,
        out_shape=shards.shape_like(x, (blocks.number, results, LANES, LANES), jnp.float32),
        scratch_shapes=[
            *blocks.memory,
            pltpu.VMEM((results, LANES, LANES), jnp.float32),
            pltpu.SemaphoreType.DMA(()),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=LIMIT_BYTES),
    )(*blocks.arrays)
    by_example = jnp.sum(sums.reshape(blocks.number, results, LANES, plan.sides, -1), 4)
    return by_example.transpose(1, 0, 3, 2).reshape(results, -1)


def _sum_by_batch(
    plan: _Plan, strides: tuple[int, ...], x: jax.Array, g: jax.Array, factors: jax.Array
) -> list[jax.Array]:
    """Returns sums of factors times A B^T for each phase of columns, where the batch is on the lanes."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    blocks = _Blocks(plan, strides, x, g)
    sizes = plan.sizes

    def kernel(factors: Any, data: Any, cotangents: Any, *memory: Any) -> None:
        results, parts = memory[: len(sizes)], memory[len(sizes) :]
        for result in results:
            result[...] = jnp.zeros_like(result)
        weighted = _weighted(plan)

        def compute(block: jax.Array, words: Callable[[jax.Array], list[jax.Array]]) -> None:
            def factors_of(i: jax.Array) -> list[jax.Array]:
                return [factors[block * plan.sides + side, i] for side in range(plan.sides)]

            def several(turn: jax.Array, carry: int) -> int:
                numbers = [turn * plan.unrolled + k for k in range(plan.unrolled)]
                terms = [weighted(*words(i), factors_of(i)) for i in numbers]
                for result, own in zip(results, zip(*terms, strict=True), strict=True):
                    result[...] += functools.reduce(jnp.add, own)
                return carry

            lax.fori_loop(0, LANES // plan.unrolled, several, 0)

        blocks.walk((data, cotangents), parts, compute)

    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    sums: list[jax.Array] = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), everywhere, everywhere],
        out_specs=[pl.BlockSpec(memory_space=pltpu.VMEM) for _ in sizes],
        out_shape=[shards.shape_like(x, size, jnp.float32) for size in sizes],
        scratch_shapes=blocks.memory,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=LIMIT_BYTES),
    )(factors.astype(jnp.float32).reshape(-1, LANES), *blocks.arrays)
    return sums


def _cells_first(plan: _Plan, strides: tuple[int, ...], y: jax.Array) -> jax.Array:
    """Returns y [B, ...] as [rows, row phases, columns, column phases, channels, B]."""
    (height, width), (down, across) = plan.grid, strides
    y = _on_grid(plan, strides, y).transpose(1, 2, 3, 0)
    y = jnp.pad(y, [(0, 0), (0, 0), (0, _up(y.shape[2], ROWS) - y.shape[2]), (0, 0)])
    return y.reshape(height, down, width, across, *y.shape[2:])


class _Memory(NamedTuple):
    """The memory of a `_Mover`.

    Attributes:
      parts: Two parts as they lie in the array: one arrives while the other is transposed.
      words: [cells, rows, examples], a part with two channels in a word.
      kept: [tiles, examples * rows, cells], the words of a block.
      arrived: A semaphore for each of the two parts.
    """

    parts: Any
    words: Any
    kept: Any
    arrived: Any


@dataclasses.dataclass(frozen=True)
class _Mover:
    """Brings parts of 128 cells and some channels into the chip, and transposes them.

    Attributes:
      plan: The plan.
      met: The numbers of phases of rows and of columns that the kernel meets.
      channels: The channels of the array.
      dtype: The type of its entries.
    """

    plan: _Plan
    met: tuple[int, int]
    channels: int
    dtype: Any

    @classmethod
    def both(cls, plan: _Plan, dtypes: Sequence[Any]) -> tuple["_Mover", "_Mover"]:
        """Returns those of the data and of the cotangents."""
        rows, columns = plan.phases
        channels, outputs = plan.filled
        data = cls(plan, (len(rows), len(columns)), channels, dtypes[0])
        return data, cls(plan, (1, 1), outputs, dtypes[1])

    @property
    def chunk(self) -> int:
        """The channels of a part."""
        return math.gcd(self.channels, CHUNK)

    @property
    def space(self) -> int:
        """The rows of words from one cell of a part to the next."""
        return _odd_tiles(self.chunk // 2)

    @property
    def pitch(self) -> int:
        """The rows of words from one example to the next."""
        return _odd_tiles(math.prod(self.met) * self.channels // 2)

    @property
    def tiles(self) -> int:
        return self.plan.lanes // LANES

    @property
    def rows(self) -> int:
        """The rows of the grid in a part, for one of the examples that share the lanes."""
        return self.plan.grid[0] // self.tiles

    @property
    def parts(self) -> int:
        return self.tiles * math.prod(self.met) * (self.channels // self.chunk)

    @property
    def stored(self) -> int:
        """The bytes of its memory."""
        rows = self.space + self.tiles * self.pitch
        return LANES * LANES * (2 * int(self.dtype.itemsize) * self.chunk + 4 * rows)

    @property
    def memory(self) -> list[Any]:
        """The fields of `_Memory`."""
        from jax.experimental.pallas import tpu as pltpu

        part = (2, self.plan.sides * self.rows, self.plan.grid[1], self.chunk, LANES)
        return [
            pltpu.VMEM(part, self.dtype),
            pltpu.VMEM((LANES, self.space, LANES), jnp.uint32),
            pltpu.VMEM((self.tiles, LANES * self.pitch, LANES), jnp.uint32),
            pltpu.SemaphoreType.DMA((2,)),
        ]

    def _place(self, part: Any) -> tuple[Any, Any, Any, Any]:
        """Returns (tile, row phase, column phase, chunk) of a part."""
        chunks = self.channels // self.chunk
        rest, chunk = lax.div(part, chunks), lax.rem(part, chunks)
        rest, across = lax.div(rest, self.met[1]), lax.rem(rest, self.met[1])
        return lax.div(rest, self.met[0]), lax.rem(rest, self.met[0]), across, chunk

    def _copies(self, source: Any, memory: _Memory, block: Any, part: Any) -> Iterator[Any]:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        tile, down, across, chunk = self._place(jnp.int32(part))
        half = lax.rem(jnp.int32(part), 2)
        channels = pl.ds(pl.multiple_of(chunk * self.chunk, self.chunk), self.chunk)
        for side in range(self.plan.sides):
            first = pl.multiple_of((block * self.plan.sides + side) * LANES, LANES)
            yield pltpu.make_async_copy(
                source.at[pl.ds(tile * self.rows, self.rows), down, :, across, channels, pl.ds(first, LANES)],
                memory.parts.at[half, pl.ds(side * self.rows, self.rows)],
                memory.arrived.at[half],
            )

    def start(self, source: Any, memory: _Memory, block: Any, part: Any) -> None:
        """Starts to bring a part into its half of the memory."""
        for copy in self._copies(source, memory, block, part):
            copy.start()

    def transpose(self, source: Any, memory: _Memory, block: Any) -> None:
        """Keeps all parts of a block, with cells on the lanes. The first part was started before."""
        from jax.experimental import pallas as pl

        def turn(part: jax.Array, carry: int) -> int:
            @pl.when(part < self.parts - 1)
            def _() -> None:
                self.start(source, memory, block, part + 1)

            for copy in self._copies(source, memory, block, part):
                copy.wait()
            self._spread(memory, lax.rem(part, 2))
            self._transpose(memory, part)
            return carry

        lax.fori_loop(0, self.parts, turn, 0)

    def _spread(self, memory: _Memory, half: jax.Array) -> None:
        """Writes the words of a part, each of two channels of a cell, with space between cells."""
        from jax.experimental import pallas as pl

        width, size = self.plan.grid[1], self.chunk // 2
        flat = memory.parts.reshape(2 * LANES * self.chunk, LANES)

        def row(i: jax.Array) -> None:
            first = half * LANES + i * width
            if self.dtype.itemsize == 2:
                words = _words(memory.parts[half, i].reshape(width * self.chunk, LANES))
            else:
                rows = [pl.ds(first * self.chunk + k, width * size, stride=2) for k in range(2)]
                words = _packed(*(flat[of_channel, :] for of_channel in rows))
            cells = pl.ds(i * width, width)
            memory.words[cells, pl.ds(0, size), :] = words.reshape(width, size, LANES)

        _each(row, self.plan.sides * self.rows, 2)

    def _transpose(self, memory: _Memory, part: jax.Array) -> None:
        from jax.experimental import pallas as pl

        tile, down, across, chunk = self._place(part)
        words = memory.words.reshape(LANES * self.space, LANES)
        phase = down * self.met[1] + across
        first = phase * (self.channels // 2) + chunk * (self.chunk // 2)

        def pair(i: jax.Array) -> None:
            of_cells = words[pl.ds(i, LANES, stride=self.space), :]
            memory.kept[tile, pl.ds(first + i, LANES, stride=self.pitch), :] = of_cells.T

        # Three units transpose at the same time.
        _each(pair, self.chunk // 2, 8)

    def words(self, kept: Any, i: jax.Array) -> jax.Array:
        """Returns the words of an example, [channels / 2, lanes]."""
        from jax.experimental import pallas as pl

        size = math.prod(self.met) * self.channels // 2
        rows = pl.ds(pl.multiple_of(i * self.pitch, 8), size)
        return jnp.concatenate([kept[tile, rows, :] for tile in range(self.tiles)], 1)


# --- One example, or as many as share the lanes ---


def _each(example: Callable[[Any], None], size: int, unrolled: int) -> None:
    """Calls `example` for each number below `size`, several in one turn of a loop."""
    several = math.gcd(size, unrolled)

    def turn(t: jax.Array, carry: int) -> int:
        for i in range(several):
            example(t * several + i)
        return carry

    lax.fori_loop(0, size // several, turn, 0)


def _words(y: jax.Array) -> jax.Array:
    """Returns bfloat16 [2 n, lanes] as uint32 [n, lanes], which units for 32 bits move."""
    from jax.experimental.pallas import tpu as pltpu

    words: jax.Array = pltpu.bitcast(y, jnp.uint32)
    return words


def _packed(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns words of two float32 arrays, rounded to bfloat16."""
    from jax.experimental.pallas import tpu as pltpu

    # The upper half of a float32 number that a bfloat16 number holds exactly is that number.
    rounded = (y.astype(jnp.bfloat16).astype(jnp.float32) for y in (low, high))
    low, high = (pltpu.bitcast(y, jnp.uint32) for y in rounded)
    return (low >> 16) | high


def _stacks(plan: _Plan) -> Callable[[jax.Array, jax.Array], list[tuple[jax.Array, jax.Array]]]:
    """Returns a function of the words of data and cotangents that returns A and B for each phase of columns."""
    lane = lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1)
    cell = lax.rem(lane, jnp.int32(plan.slot))
    height, width = plan.grid
    row, column = lax.div(cell, jnp.int32(width)), lax.rem(cell, jnp.int32(width))

    def moved(words: jax.Array, by: int, inside: jax.Array) -> jax.Array:
        """Returns the bfloat16 numbers that are `by` cells behind, and zero where these are not `inside`."""
        from jax.experimental.pallas import tpu as pltpu

        if by:
            words = jnp.where(inside, pltpu.roll(words, -by % plan.lanes, 1), jnp.uint32(0))
        numbers: jax.Array = pltpu.bitcast(words, jnp.bfloat16)
        return numbers

    def within(place: jax.Array, away: int, size: int) -> jax.Array:
        # Behind the last cell lie those of another example, or none.
        return (place + away >= 0) & (place + away < size) & (cell < plan.cells)

    def stacks(data: jax.Array, cotangents: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        beside = {b: moved(cotangents, -b, within(column, -b, width)) for b in plan.moves}
        pairs = []
        for number, phase in enumerate(plan.phases[1]):
            below = [moved(_phase(plan, data, p, number), a * width, within(row, a, height)) for a, p in plan.rows]
            others = [beside[b] for b in plan.columns_of(phase)]
            pairs.append((jnp.concatenate(below, 0), jnp.concatenate(others, 0)))
        return pairs

    return stacks


def _norm(plan: _Plan, bounds: bool) -> Callable[[jax.Array, jax.Array], list[jax.Array]]:
    """Returns a function of the words of data and cotangents that returns partial sums [1, 128].

    They are those of the squares, and with `bounds` those of M and of E.
    """
    stacks = _stacks(plan)

    def norm(data: jax.Array, cotangents: jax.Array) -> list[jax.Array]:
        of_phases = [_sums(plan, bounds, a, b) for a, b in stacks(data, cotangents)]
        return [functools.reduce(jnp.add, rows) for rows in zip(*of_phases, strict=True)]

    return norm


def _sums(plan: _Plan, bounds: bool, a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """Returns partial sums of the squared norm of a b^T, and with `bounds` of M and E."""
    product = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
    if not plan.by_cells:
        gradient = product(a, b, (((1,), (1,)), ((), ())))
        squares = _folded(gradient * gradient)
        if not bounds:
            return [squares]
        apart = _folded(_length(a) * _length(b))
        return [squares, apart, jnp.zeros_like(apart)]
    over_rows = (((0,), (0,)), ((), ()))
    data, cotangents = product(a, a, over_rows), product(b, b, over_rows)
    # Not a product with zeros: another example may hold NaN.
    own, diagonal = _same(data.shape, plan.slot), _same(data.shape, 1)
    squares = _folded(jnp.where(own, data * cotangents, 0.0))
    if not bounds:
        return [squares]
    eps = rounding.eps(jnp.float32)
    lengths = [
        [jnp.sqrt(jnp.sum(jnp.where(diagonal, y, 0.0), d, keepdims=True)) for d in range(2)] for y in (data, cotangents)
    ]
    (across_a, down_a), (across_b, down_b) = lengths
    data, cotangents = jnp.abs(data), jnp.abs(cotangents)
    # A unit adds the rows of a product one after the other. The sum of all entries is a sum over rows, then lanes.
    spread = (eps * len(a)) * (down_a * across_a) * cotangents
    spread += (eps * len(b)) * (down_b * across_b) * data
    spread += (eps * (plan.lanes + LANES)) * (data * cotangents)
    return [squares, _folded(across_a * across_b), _folded(jnp.where(own, spread, 0.0))]


def _length(y: jax.Array) -> jax.Array:
    """Returns the lengths [1, lanes] of the columns of an array."""
    wide = y.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(wide * wide, 0, keepdims=True))


def _same(shape: tuple[int, ...], slot: int) -> jax.Array:
    """Returns whether the row and the column of an entry are of one slot."""
    row, column = (lax.div(lax.broadcasted_iota(jnp.int32, shape, d), jnp.int32(slot)) for d in range(2))
    return row == column


def _weighted(plan: _Plan) -> Callable[..., list[jax.Array]]:
    """Returns a function of words and factors that returns the weighted A B^T for each phase of columns."""
    stacks = _stacks(plan)
    side_of_lane = lax.div(lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1), jnp.int32(plan.slot))
    over_lanes = (((1,), (1,)), ((), ()))

    def weighted(data: jax.Array, cotangents: jax.Array, factors: list[jax.Array]) -> list[jax.Array]:
        sums = None
        for side, factor in enumerate(factors):
            own = [jnp.where(side_of_lane == side, words, jnp.uint32(0)) for words in (data, cotangents)]
            pairs = stacks(*(own if plan.sides > 1 else (data, cotangents)))
            products = [lax.dot_general(a, b, over_lanes, preferred_element_type=jnp.float32) for a, b in pairs]
            # An example without weight may hold NaN.
            terms = [jnp.where(factor == 0, 0.0, factor * product) for product in products]
            sums = terms if sums is None else [a + b for a, b in zip(sums, terms, strict=True)]
        return sums or []

    return weighted


def _phase(plan: _Plan, words: jax.Array, row_phase: int, column: int) -> jax.Array:
    """Returns the words of the channels of one phase."""
    rows, columns = plan.phases
    size = plan.filled[0] // 2
    first = (rows.index(row_phase) * len(columns) + column) * size
    return words[first : first + size]


def _folded(squares: jax.Array) -> jax.Array:
    """Returns sums [1, 128] of the columns of an array."""
    sums = jnp.sum(squares, 0, keepdims=True)
    n = sums.shape[1]
    sums = jnp.pad(sums, ((0, 0), (0, _up(n, LANES) - n)))
    pieces = [sums[:, first : first + LANES] for first in range(0, sums.shape[1], LANES)]
    return functools.reduce(jnp.add, pieces)
