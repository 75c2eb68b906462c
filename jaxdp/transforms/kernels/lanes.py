"""Convolutions of a batch that is on the lanes, as XLA lays batches of a multiple of 128 examples.

A kernel brings parts of 128 examples into the chip and transposes them, so that XLA copies nothing.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import shards
from jaxdp.transforms.kernels import cells

# Channels that are moved and transposed at once.
CHUNK = 32
# Bytes of all that a kernel keeps.
KERNEL_BYTES = 80 * 2**20
# What the compiler may give to a kernel, with its own copies.
LIMIT_BYTES = KERNEL_BYTES + 2**24


def batch_on_lanes(plan: cells.Plan, batch: int) -> bool:
    """Returns whether the kernel transposes blocks of 128 examples and 128 cells by itself."""
    # A part of 128 cells has to be whole rows of the grid, with no empty lane in it.
    if plan.sides > 1:
        cells_fit = plan.slot == plan.cells
    else:
        whole_rows = cells.LANES % plan.grid[1] == 0
        cells_fit = whole_rows and plan.cells % cells.LANES == 0
    # The walk has whole blocks only, and no mask for a last one.
    if not cells_fit or batch % (cells.LANES * plan.sides):
        return False
    # A part holds whole cells, so the kernel must meet their first phases.
    for phases in plan.phases:
        if phases != list(range(len(phases))):
            return False
    # The dtypes are not known here, so the wider of the two counts.
    widest = jnp.dtype(jnp.float32)
    movers = _Mover.both(plan, [widest, widest])
    stored = sum(mover.stored for mover in movers)
    return stored + plan.stored <= KERNEL_BYTES


def _odd_tiles(rows: int) -> int:
    """Returns at least `rows` rows: an odd number of tiles of 8.

    The memory has four banks, which take turns by tiles. A read of one row of every example meets
    all of them.
    """
    tiles = math.ceil(rows / 8)
    return 8 * (tiles | 1)  # the next odd number


class _Blocks:
    """Walks over blocks of 128 examples, or of 128 for each that shares the lanes."""

    def __init__(
        self,
        plan: cells.Plan,
        strides: tuple[int, ...],
        x: jax.Array,
        g: jax.Array,
    ):
        self.number = len(x) // (cells.LANES * plan.sides)
        data = _cells_first(plan, strides, x)
        # Cotangents are on the grid of the cells already, so they have one phase.
        cotangents = _cells_first(plan, (1, 1), g)
        self.arrays = [data, cotangents]
        self.movers = _Mover.both(plan, [x.dtype, g.dtype])

    @property
    def memory(self) -> list[Any]:
        """The memory of both movers, one after the other."""
        data, cotangents = self.movers
        return [*data.memory, *cotangents.memory]

    def walk(
        self,
        sources: Sequence[Any],
        memory: Sequence[Any],
        compute: Callable[..., None],
    ) -> None:
        """Calls `compute(block, words)` for each block.

        Args:
          sources: The references to `arrays`.
          memory: The references to `memory`.
          compute: `words(i)` are the words of data and cotangents of example i of the block.
        """
        from jax.experimental import pallas as pl

        fields = len(_Memory._fields)
        memories = [_Memory(*memory[:fields]), _Memory(*memory[fields:])]
        own = list(zip(self.movers, sources, memories, strict=True))

        def start(block: Any) -> None:
            for mover, source, own_memory in own:
                mover.start(source, own_memory, block, 0)

        def words(i: jax.Array) -> list[jax.Array]:
            return [mover.words(own_memory.kept, i) for mover, _, own_memory in own]

        def turn(block: jax.Array, carry: int) -> int:
            for mover, source, own_memory in own:
                mover.transpose(source, own_memory, block)

            # The first part of the next block arrives while products are computed.
            @pl.when(block < self.number - 1)
            def _() -> None:
                start(block + 1)

            compute(block, words)
            return carry

        start(0)
        # A loop in place of a grid, because a block is brought in parts.
        lax.fori_loop(0, self.number, turn, 0)


def norms(
    plan: cells.Plan,
    strides: tuple[int, ...],
    x: jax.Array,
    g: jax.Array,
) -> jax.Array:
    """Returns the squared norms, M and E, [3, B], where the batch is on the lanes."""
    sums = examples(plan, strides, x, g, (), lambda: cells.norm_of(plan), cells.RESULTS)
    # [blocks, results, 128 examples, 128 lanes]. The lanes of a row belong to the examples that
    # share them.
    sums = sums.reshape(*sums.shape[:3], plan.sides, -1)
    by_example = jnp.sum(sums, 4)
    # [blocks, results, examples, sides] to [results, blocks, sides, examples], the order of the
    # batch.
    by_result = by_example.transpose(1, 0, 3, 2)
    return by_result.reshape(cells.RESULTS, -1)


def examples(
    plan: cells.Plan,
    strides: tuple[int, ...],
    x: jax.Array,
    g: jax.Array,
    others: Sequence[jax.Array],
    function_of: Callable[..., Callable[..., list[jax.Array]]],
    results: int,
) -> jax.Array:
    """Returns rows [blocks, results, 128, 128] of each example, where the batch is on the lanes.

    Args:
      plan, strides, x, g: As in `norms`.
      others: Arrays that lie in the chip.
      function_of: A function of references to `others`. It returns a function of the words of an
        example, which returns its rows.
      results: The number of rows.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    blocks = _Blocks(plan, strides, x, g)

    def kernel(
        data: Any,
        cotangents: Any,
        *references: Any,
    ) -> None:
        own = references[: len(others)]
        result, *memories, sums, written = references[len(others) :]
        rows_of = function_of(*own)

        def compute(
            block: jax.Array,
            words: Callable[[jax.Array], list[jax.Array]],
        ) -> None:
            def example(i: jax.Array) -> None:
                for row, values in enumerate(rows_of(*words(i))):
                    sums[row, pl.ds(i, 1), :] = values

            cells.each(example, cells.LANES, plan.unrolled)
            copy = pltpu.make_async_copy(sums, result.at[block], written)
            copy.start()
            copy.wait()  # the next block writes `sums` again

        blocks.walk((data, cotangents), memories, compute)

    # The arrays stay in the large memory, from which `_Mover` copies parts by itself.
    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    in_chip = pl.BlockSpec(memory_space=pltpu.VMEM)
    of_block = (results, cells.LANES, cells.LANES)  # results, examples, partial sums
    written = pltpu.SemaphoreType.DMA(())
    rows: jax.Array = pl.pallas_call(
        kernel,
        in_specs=[everywhere, everywhere, *(in_chip for _ in others)],
        out_specs=everywhere,
        out_shape=shards.shape_like(x, (blocks.number, *of_block)),
        scratch_shapes=[*blocks.memory, pltpu.VMEM(of_block, jnp.float32), written],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=LIMIT_BYTES),
    )(*blocks.arrays, *others)
    return rows


def weighted_sums(
    plan: cells.Plan,
    strides: tuple[int, ...],
    x: jax.Array,
    g: jax.Array,
    factors: jax.Array,
) -> list[jax.Array]:
    """Returns sums of factors times A B^T for each phase of columns.

    The batch is on the lanes.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    blocks = _Blocks(plan, strides, x, g)
    sizes = plan.sizes

    def kernel(
        factors: Any,
        data: Any,
        cotangents: Any,
        *memory: Any,
    ) -> None:
        results = memory[: len(sizes)]
        memories = memory[len(sizes) :]
        for result in results:
            result[...] = jnp.zeros_like(result)  # kept over all blocks
        weighted = cells.weighted_of(plan)

        def compute(
            block: jax.Array,
            words: Callable[[jax.Array], list[jax.Array]],
        ) -> None:
            def factors_of(i: jax.Array) -> list[jax.Array]:
                # Example i of each side is in another group of 128, as `_copies` lays them.
                return [factors[block * plan.sides + side, i] for side in range(plan.sides)]

            def several(turn: jax.Array, carry: int) -> int:
                examples = [turn * plan.unrolled + k for k in range(plan.unrolled)]
                terms = []
                for i in examples:
                    data, cotangents = words(i)
                    terms.append(weighted(data, cotangents, factors_of(i)))
                by_phase = zip(*terms, strict=True)
                for result, of_examples in zip(results, by_phase, strict=True):
                    # One read and one write of the result serve several examples.
                    result[...] += functools.reduce(jnp.add, of_examples)
                return carry

            lax.fori_loop(0, cells.LANES // plan.unrolled, several, 0)

        blocks.walk((data, cotangents), memories, compute)

    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    by_block = factors.astype(jnp.float32).reshape(-1, cells.LANES)
    sums: list[jax.Array] = pl.pallas_call(
        kernel,
        # A factor is a scalar, which the scalar memory gives to a branch or a product.
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), everywhere, everywhere],
        out_specs=[pl.BlockSpec(memory_space=pltpu.VMEM) for _ in sizes],
        out_shape=[shards.shape_like(x, size) for size in sizes],
        scratch_shapes=blocks.memory,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=LIMIT_BYTES),
    )(by_block, *blocks.arrays)
    return sums


def _cells_first(
    plan: cells.Plan,
    strides: tuple[int, ...],
    y: jax.Array,
) -> jax.Array:
    """Returns y [B, ...] as [rows, row phases, columns, column phases, channels, B]."""
    height, width = plan.grid
    down, across = strides
    y = cells.on_grid(plan, strides, y)
    # [B, H, W, C] to [H, W, C, B]. XLA has laid a batch on the lanes so.
    y = y.transpose(1, 2, 3, 0)
    channels = y.shape[2]
    missing = cells.up(channels, cells.ROWS) - channels
    y = jnp.pad(y, [(0, 0), (0, 0), (0, missing), (0, 0)])
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

    plan: cells.Plan
    met: tuple[int, int]
    channels: int
    dtype: Any

    @classmethod
    def both(
        cls,
        plan: cells.Plan,
        dtypes: Sequence[Any],
    ) -> tuple["_Mover", "_Mover"]:
        """Returns those of the data and of the cotangents."""
        rows, columns = plan.phases
        channels, outputs = plan.filled
        of_data, of_cotangents = dtypes
        data = cls(plan, (len(rows), len(columns)), channels, of_data)
        cotangents = cls(plan, (1, 1), outputs, of_cotangents)
        return data, cotangents

    @property
    def chunk(self) -> int:
        """The channels of a part."""
        # Chunks are equal, so that parts have one shape.
        return math.gcd(self.channels, CHUNK)

    @property
    def space(self) -> int:
        """The rows of words from one cell of a part to the next."""
        return _odd_tiles(self.chunk // 2)

    @property
    def pitch(self) -> int:
        """The rows of words from one example to the next."""
        words = math.prod(self.met) * self.channels // 2
        return _odd_tiles(words)

    @property
    def tiles(self) -> int:
        """The number of parts into which the cells are cut."""
        return self.plan.lanes // cells.LANES

    @property
    def rows(self) -> int:
        """The rows of the grid in a part, for one of the examples that share the lanes."""
        return self.plan.grid[0] // self.tiles

    @property
    def parts(self) -> int:
        """The number of parts of a block."""
        chunks = self.channels // self.chunk
        return self.tiles * math.prod(self.met) * chunks

    @property
    def stored(self) -> int:
        """The bytes of its memory."""
        # The `words` of one part, and the `kept` of a block, 128 x 128 words for each row.
        word_rows = self.space + self.tiles * self.pitch
        two_parts = 2 * int(self.dtype.itemsize) * self.chunk
        bytes_of_entry = two_parts + 4 * word_rows
        return cells.LANES**2 * bytes_of_entry

    @property
    def memory(self) -> list[Any]:
        """The fields of `_Memory`."""
        from jax.experimental.pallas import tpu as pltpu

        rows = self.plan.sides * self.rows
        width = self.plan.grid[1]
        part = (2, rows, width, self.chunk, cells.LANES)
        words = (cells.LANES, self.space, cells.LANES)
        block = (self.tiles, cells.LANES * self.pitch, cells.LANES)
        return [
            pltpu.VMEM(part, self.dtype),
            pltpu.VMEM(words, jnp.uint32),
            pltpu.VMEM(block, jnp.uint32),
            pltpu.SemaphoreType.DMA((2,)),
        ]

    def _place(self, part: Any) -> tuple[Any, Any, Any, Any]:
        """Returns (tile, row phase, column phase, chunk) of a part."""
        chunks = self.channels // self.chunk
        row_phases, column_phases = self.met
        # Parts are numbered by tile, row phase, column phase and chunk, the last one fastest.
        rest = lax.div(part, chunks)
        chunk = lax.rem(part, chunks)
        rows = lax.div(rest, column_phases)
        across = lax.rem(rest, column_phases)
        tile = lax.div(rows, row_phases)
        down = lax.rem(rows, row_phases)
        return tile, down, across, chunk

    def _copies(
        self,
        source: Any,
        memory: _Memory,
        block: Any,
        part: Any,
    ) -> Iterator[Any]:
        """Yields the copies that bring a part, one for each example that shares the lanes."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        tile, down, across, chunk = self._place(jnp.int32(part))
        # Parts take turns in the two halves of the memory.
        half = lax.rem(jnp.int32(part), 2)
        # The compiler does not see by itself that the offset is aligned.
        first_channel = pl.multiple_of(chunk * self.chunk, self.chunk)
        channels = pl.ds(first_channel, self.chunk)
        rows = pl.ds(tile * self.rows, self.rows)
        for side in range(self.plan.sides):
            group = block * self.plan.sides + side
            first = pl.multiple_of(group * cells.LANES, cells.LANES)
            examples = pl.ds(first, cells.LANES)
            own_rows = pl.ds(side * self.rows, self.rows)
            yield pltpu.make_async_copy(
                source.at[rows, down, :, across, channels, examples],
                memory.parts.at[half, own_rows],
                memory.arrived.at[half],
            )

    def start(
        self,
        source: Any,
        memory: _Memory,
        block: Any,
        part: Any,
    ) -> None:
        """Starts to bring a part into its half of the memory."""
        for copy in self._copies(source, memory, block, part):
            copy.start()

    def transpose(
        self,
        source: Any,
        memory: _Memory,
        block: Any,
    ) -> None:
        """Keeps all parts of a block, with cells on the lanes.

        The copy of the first part was started before.
        """
        from jax.experimental import pallas as pl

        def turn(part: jax.Array, carry: int) -> int:
            @pl.when(part < self.parts - 1)
            def _() -> None:
                self.start(source, memory, block, part + 1)

            # The next part arrives in the other half meanwhile.
            for copy in self._copies(source, memory, block, part):
                copy.wait()
            self._spread(memory, lax.rem(part, 2))
            self._transpose(memory, part)
            return carry

        lax.fori_loop(0, self.parts, turn, 0)

    def _spread(self, memory: _Memory, half: jax.Array) -> None:
        """Writes the words of a part, each of two channels of a cell, with space between cells."""
        from jax.experimental import pallas as pl

        width = self.plan.grid[1]
        size = self.chunk // 2  # words of a cell
        flat = memory.parts.reshape(2 * cells.LANES * self.chunk, cells.LANES)

        def row(i: jax.Array) -> None:
            first = (half * cells.LANES + i * width) * self.chunk
            if self.dtype.itemsize == 2:
                entries = memory.parts[half, i].reshape(width * self.chunk, cells.LANES)
                words = cells.words_of(entries)
            else:
                # Every second row, because a word holds channels 2 k and 2 k + 1.
                even = flat[pl.ds(first, width * size, stride=2), :]
                odd = flat[pl.ds(first + 1, width * size, stride=2), :]
                words = cells.packed(even, odd)
            own = pl.ds(i * width, width)
            by_cell = words.reshape(width, size, cells.LANES)
            memory.words[own, pl.ds(0, size), :] = by_cell

        cells.each(row, self.plan.sides * self.rows, 2)

    def _transpose(self, memory: _Memory, part: jax.Array) -> None:
        from jax.experimental import pallas as pl

        tile, down, across, chunk = self._place(part)
        words = memory.words.reshape(cells.LANES * self.space, cells.LANES)
        phase = down * self.met[1] + across
        first = phase * (self.channels // 2) + chunk * (self.chunk // 2)

        def pair(i: jax.Array) -> None:
            # Word i of each of 128 cells: [cells, examples], which becomes [examples, cells].
            of_cells = words[pl.ds(i, cells.LANES, stride=self.space), :]
            transposed = of_cells.T
            own = pl.ds(first + i, cells.LANES, stride=self.pitch)
            memory.kept[tile, own, :] = transposed

        # Three units transpose at the same time.
        cells.each(pair, self.chunk // 2, 8)

    def words(self, kept: Any, i: jax.Array) -> jax.Array:
        """Returns the words of an example, [channels / 2, lanes]."""
        from jax.experimental import pallas as pl

        size = math.prod(self.met) * self.channels // 2
        first = pl.multiple_of(i * self.pitch, 8)
        rows = pl.ds(first, size)
        by_tile = [kept[tile, rows, :] for tile in range(self.tiles)]
        return jnp.concatenate(by_tile, 1)
