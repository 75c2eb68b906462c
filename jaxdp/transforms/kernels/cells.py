"""Convolutions on the lanes of a TPU, one example at a time.

All arrays lie on the grid of the input, cut into cells of `strides` entries. An entry of a cell is
a phase, and phases are channels. So a strided convolution is one of stride 1: kernel position i
meets phase p of the cell that is a cells away, where s a + p = i d - lo for stride s, dilation d
and padding lo. Cells lie on the lanes of a row. With x_a the data moved by a rows of cells and g_b
the cotangents moved by b columns, the gradient of an example is

    dV[i, j] = x_a(i) g_b(j)^T,

one product of all x_a below each other and all g_b below each other. What leaves the grid is zero.
The squared norm of that product A B^T is also the sum of the entries of (A^T A) * (B^T B), which is
cheaper for few cells and many channels. Two or more examples of few cells share the lanes there,
and only the blocks of one example count.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import rounding

LANES = 128
# Rows of bfloat16 in a tile. Channels are filled up to whole tiles.
ROWS = 16
# Bytes of a matrix of products.
PRODUCT_BYTES = 2**22

# What a kernel of norms returns for an example: the squared norm, M and E.
RESULTS = 3
# A cost that is never the lower one.
_NEVER = 2**62

Pairs = tuple[tuple[int, int], ...]
# A and B of one phase of columns.
Stacks = tuple[jax.Array, jax.Array]


class Geometry(NamedTuple):
    """The arguments of a convolution.

    Attributes:
      window: The height and the width of the kernel.
      strides: The steps of the kernel along H and W.
      padding: (low, high) zeros around H and W. Data that are padded already need none.
      kernel_dilation: The steps between entries of the kernel.
    """

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs
    kernel_dilation: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
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
    def of(
        cls,
        geometry: Geometry,
        x: Any,
        g: Any,
    ) -> "Plan":
        """Returns the plan of data [B, H, W, C] and cotangents [B, OH, OW, K]."""
        _, *size, channels = x.shape
        _, *out_size, outputs = g.shape
        grid = []
        for entries, stride, positions in zip(size, geometry.strides, out_size, strict=True):
            # With padding behind the data, the result may have more positions than the data have
            # cells.
            grid.append(max(_ceil(entries, stride), positions))
        height, width = grid
        rows = _met(geometry, 0)
        columns = _met(geometry, 1)
        return cls((height, width), rows, columns, channels, outputs)

    @property
    def phases(self) -> tuple[list[int], list[int]]:
        """The phases of rows and of columns that the kernel meets."""
        of_rows = {phase for _, phase in self.rows}
        of_columns = {phase for _, phase in self.columns}
        return sorted(of_rows), sorted(of_columns)

    @property
    def cells(self) -> int:
        """The number of cells of the grid."""
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
        channels = up(self.channels, ROWS)
        outputs = up(self.outputs, ROWS)
        return channels, outputs

    @property
    def heights(self) -> tuple[int, int]:
        """The rows of an example in the kernel: phases and channels of x, channels of g."""
        channels, outputs = self.filled
        row_phases, column_phases = self.phases
        n_phases = len(row_phases) * len(column_phases)
        return n_phases * channels, outputs

    @functools.cached_property
    def sides(self) -> int:
        """The number of examples that share the lanes.

        They do where products of cells are cheaper than the gradient.
        """
        if self.by_cells:
            return LANES // _slot(self.cells)
        return 1

    @property
    def lanes(self) -> int:
        """The lanes of the examples that share them."""
        if self.sides > 1:
            return LANES
        return up(self.cells, LANES)

    @property
    def slot(self) -> int:
        """The lanes of one example."""
        return self.lanes // self.sides

    @functools.cached_property
    def by_cells(self) -> bool:
        """Whether products of cells are cheaper than the gradient.

        They are where two examples share the lanes.
        """
        if 2 * self.cells <= LANES:
            return True
        return self._passes_by_cells < self._passes_of_gradient

    @property
    def passes(self) -> int:
        """Row passes through the matrix unit for one example."""
        if self.by_cells:
            return self._passes_by_cells
        return self._passes_of_gradient

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The rows of A and of B for each phase of columns."""
        channels, outputs = self.filled
        rows = len(self.rows) * channels
        _, column_phases = self.phases
        sizes = []
        for phase in column_phases:
            columns = self.columns_of(phase)
            sizes.append((rows, len(columns) * outputs))
        return sizes

    @property
    def _passes_of_gradient(self) -> int:
        lane_tiles = _ceil(self.cells, LANES)
        # The unit holds 128 x 128 entries of B, and each row of A passes once for each such tile.
        return sum(rows * _ceil(cols, LANES) * lane_tiles for rows, cols in self.sizes)

    @property
    def _passes_by_cells(self) -> int:
        lanes = up(self.cells, LANES)
        # Products of cells are float32 [lanes, lanes].
        if 4 * lanes * lanes > PRODUCT_BYTES:
            return _NEVER
        # One product serves all examples that share the lanes.
        sides = LANES // _slot(self.cells)
        # A^T A contracts the rows of A, and B^T B those of B.
        row_tiles = sum(_ceil(rows, LANES) + _ceil(cols, LANES) for rows, cols in self.sizes)
        return lanes * _ceil(lanes, LANES) * row_tiles // sides

    @property
    def stored(self) -> int:
        """The bytes that the kernel keeps of one block row, its moved copies and its products."""
        moved = sum(rows + cols for rows, cols in self.sizes) * self.lanes * 2
        if self.by_cells:
            product = self.lanes**2
        else:
            product = max(rows * cols for rows, cols in self.sizes)
        return 2 * moved + 3 * 4 * product

    @property
    def unrolled(self) -> int:
        """The number of examples whose products the compiler interleaves."""
        if self.passes <= 1024:
            return 4
        if self.passes <= 4096:
            return 2
        return 1


def _met(geometry: Geometry, d: int) -> Pairs:
    """Returns (cells away, phase) of the kernel's entries along dimension d."""
    low, _ = geometry.padding[d]
    dilation = geometry.kernel_dilation[d]
    stride = geometry.strides[d]
    places = (i * dilation - low for i in range(geometry.window[d]))
    # Floor division: a place in the padding before the data has a negative cell.
    return tuple(divmod(place, stride) for place in places)


def up(n: int, multiple: int) -> int:
    """Returns the least multiple that is at least n."""
    return _ceil(n, multiple) * multiple


def _ceil(n: int, size: int) -> int:
    """Returns n / size, rounded up."""
    return -(-n // size)


def _slot(cells: int) -> int:
    """Returns the lanes that an example takes beside others."""
    power_of_two = 1 << (cells - 1).bit_length()
    # A power of two divides the lanes among whole examples.
    return min(LANES, max(8, power_of_two))


def on_grid(
    plan: Plan,
    strides: tuple[int, ...],
    y: jax.Array,
) -> jax.Array:
    """Returns y [B, ...] with zeros behind it, so that it fills the cells of the grid."""
    height, width = plan.grid
    down, across = strides
    rows_behind = height * down - y.shape[1]
    columns_behind = width * across - y.shape[2]
    return jnp.pad(y, [(0, 0), (0, rows_behind), (0, columns_behind), (0, 0)])


def each(
    example: Callable[[Any], None],
    size: int,
    unrolled: int,
) -> None:
    """Calls `example` for each number below `size`, several in one turn of a loop."""
    several = math.gcd(size, unrolled)  # so that all turns have as many

    def turn(t: jax.Array, carry: int) -> int:
        for i in range(several):
            example(t * several + i)
        return carry

    lax.fori_loop(0, size // several, turn, 0)


def words_of(y: jax.Array) -> jax.Array:
    """Returns bfloat16 [2 n, lanes] as uint32 [n, lanes], which units for 32 bits move."""
    from jax.experimental.pallas import tpu as pltpu

    words: jax.Array = pltpu.bitcast(y, jnp.uint32)
    return words


def packed(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns words of two float32 arrays, rounded to bfloat16."""
    from jax.experimental.pallas import tpu as pltpu

    def bits(y: jax.Array) -> jax.Array:
        # The upper half of a float32 number that a bfloat16 number holds exactly is that number.
        rounded = y.astype(jnp.bfloat16).astype(jnp.float32)
        words: jax.Array = pltpu.bitcast(rounded, jnp.uint32)
        return words

    low_bits = bits(low)
    high_bits = bits(high)
    # The first of two rows of bfloat16 is the lower half of a word.
    return (low_bits >> 16) | high_bits


def _stacks(plan: Plan) -> Callable[[jax.Array, jax.Array], list[Stacks]]:
    """Returns a function that stacks the words of data and cotangents.

    It returns A and B for each phase of columns.
    """
    lane = lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1)
    cell = lax.rem(lane, jnp.int32(plan.slot))
    height, width = plan.grid
    row = lax.div(cell, jnp.int32(width))
    column = lax.rem(cell, jnp.int32(width))

    def moved(
        words: jax.Array,
        by: int,
        inside: jax.Array,
    ) -> jax.Array:
        """Returns the bfloat16 numbers that are `by` cells behind.

        Numbers from places that are not `inside` are zero.
        """
        from jax.experimental.pallas import tpu as pltpu

        if by:
            # A roll by a positive number moves away from lane 0.
            rolled = pltpu.roll(words, -by % plan.lanes, 1)
            words = jnp.where(inside, rolled, jnp.uint32(0))
        numbers: jax.Array = pltpu.bitcast(words, jnp.bfloat16)
        return numbers

    def within(
        place: jax.Array,
        away: int,
        size: int,
    ) -> jax.Array:
        # Behind the last cell lie those of another example, or none.
        return (place + away >= 0) & (place + away < size) & (cell < plan.cells)

    def stacks(data: jax.Array, cotangents: jax.Array) -> list[Stacks]:
        beside = {}
        for away in plan.moves:
            inside = within(column, -away, width)
            beside[away] = moved(cotangents, -away, inside)
        pairs = []
        for number, phase in enumerate(plan.phases[1]):
            below = []
            for away, row_phase in plan.rows:
                words = _phase(plan, data, row_phase, number)
                inside = within(row, away, height)
                # Cells of the next row are `width` lanes away.
                below.append(moved(words, away * width, inside))
            of_columns = [beside[away] for away in plan.columns_of(phase)]
            a = jnp.concatenate(below, 0)
            b = jnp.concatenate(of_columns, 0)
            pairs.append((a, b))
        return pairs

    return stacks


def columns_of(
    plan: Plan, bases: Sequence[Any]
) -> Callable[[jax.Array, jax.Array], list[jax.Array]]:
    """Returns a function of the words of data and cotangents, where gradients are formed.

    It returns partial sums [1, 128] of M, and sums over the rows of the gradient of each phase of
    columns, in `statistics` rows [1, 128].

    Args:
      plan: The plan, not `by_cells`.
      bases: For each phase of columns, a reference to arrays [n, rows of A, rows of B].
    """
    stacks = _stacks(plan)

    def columns(data: jax.Array, cotangents: jax.Array) -> list[jax.Array]:
        apart = []
        rows = []
        for (a, b), of_phase in zip(stacks(data, cotangents), bases, strict=True):
            gradient = _product(a, b, over=1)
            # Column t of A and of B is position t, so M is the sum of products of lengths.
            apart.append(_folded(_length(a) * _length(b)))
            terms = [gradient * gradient, gradient]
            terms += [of_phase[n] * gradient for n in range(of_phase.shape[0])]
            for term in terms:
                rows += _cut(jnp.sum(term, 0, keepdims=True))
        return [functools.reduce(jnp.add, apart), *rows]

    return columns


def statistics(plan: Plan, n_bases: int) -> int:
    """Returns the number of rows that `columns_of` returns behind the first one."""
    tiles = sum(_ceil(columns, LANES) for _, columns in plan.sizes)
    return (2 + n_bases) * tiles


def norm_of(plan: Plan) -> Callable[[jax.Array, jax.Array], list[jax.Array]]:
    """Returns a function of the words of data and cotangents.

    It returns partial sums [1, 128] of `RESULTS`.
    """
    stacks = _stacks(plan)

    def norm(data: jax.Array, cotangents: jax.Array) -> list[jax.Array]:
        of_phases = [_sums(plan, a, b) for a, b in stacks(data, cotangents)]
        return [functools.reduce(jnp.add, rows) for rows in zip(*of_phases, strict=True)]

    return norm


def _sums(
    plan: Plan,
    a: jax.Array,
    b: jax.Array,
) -> list[jax.Array]:
    """Returns partial sums of the squared norm of a b^T, of M and of E."""
    if plan.by_cells:
        return _sums_by_cells(plan, a, b)
    return _sums_of_gradient(a, b)


def _sums_of_gradient(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    gradient = _product(a, b, over=1)
    squares = _folded(gradient * gradient)
    apart = _folded(_length(a) * _length(b))
    # E is 0 where the gradient is formed.
    return [squares, apart, jnp.zeros_like(apart)]


def _product(
    a: jax.Array,
    b: jax.Array,
    over: int,
) -> jax.Array:
    """Contracts one dimension of two arrays in float32."""
    contracted = (((over,), (over,)), ((), ()))
    return lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)


def _sums_by_cells(
    plan: Plan,
    a: jax.Array,
    b: jax.Array,
) -> list[jax.Array]:
    # Not products with zeros: another example may hold NaN.
    lanes = (plan.lanes, plan.lanes)
    # Blocks along the diagonal, each with the products of one example.
    own = _same(lanes, plan.slot)

    def own_products(y: jax.Array) -> jax.Array:
        return jnp.where(own, _product(y, y, over=0), 0.0)

    data = own_products(a)
    cotangents = own_products(b)
    squares = _folded(data * cotangents)

    diagonal = _same(lanes, 1)

    def squared_lengths(y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(diagonal, y, 0.0), 0, keepdims=True)

    square_a = squared_lengths(data)
    square_b = squared_lengths(cotangents)
    apart = _folded(jnp.sqrt(square_a) * jnp.sqrt(square_b))

    # With a_t a_s at most (a_t^2 + a_s^2) / 2, E is a sum over columns, since the products are
    # symmetric.
    data = jnp.abs(data)
    cotangents = jnp.abs(cotangents)
    sum_a = jnp.sum(data, 0, keepdims=True)
    sum_b = jnp.sum(cotangents, 0, keepdims=True)
    # A unit adds the rows of a product one after the other. The sum of all entries is one over
    # rows, then lanes.
    of_a = len(a) * _folded(square_a * sum_b)
    of_b = len(b) * _folded(square_b * sum_a)
    spread = of_a + of_b
    spread += (plan.lanes + LANES) * _folded(data * cotangents)
    # Products that underflow count at their upper bound, so tiny data cannot hide a gradient behind
    # huge cotangents.
    # Over eps, by which all of E is multiplied at the end.
    least = rounding.FLUSHED / rounding.eps(jnp.float32)
    of_a = len(a) * _folded(sum_b)
    of_b = len(b) * _folded(sum_a)
    flushed = of_a + of_b + plan.lanes
    spread += least * flushed
    return [squares, apart, rounding.eps(jnp.float32) * spread]


def _length(y: jax.Array) -> jax.Array:
    """Returns the lengths [1, lanes] of the columns of an array."""
    wide = y.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(wide * wide, 0, keepdims=True))


def _same(shape: tuple[int, ...], slot: int) -> jax.Array:
    """Returns whether the row and the column of an entry are of one slot."""

    def slots_along(d: int) -> jax.Array:
        numbers = lax.broadcasted_iota(jnp.int32, shape, d)
        return lax.div(numbers, jnp.int32(slot))

    row = slots_along(0)
    column = slots_along(1)
    return row == column


def weighted_of(plan: Plan) -> Callable[..., list[jax.Array]]:
    """Returns a function of the words of data and cotangents, and of factors.

    The factors are those of the examples that share the lanes. It returns the weighted A B^T for
    each phase of columns.
    """
    stacks = _stacks(plan)
    lane = lax.broadcasted_iota(jnp.int32, (1, plan.lanes), 1)
    side_of_lane = lax.div(lane, jnp.int32(plan.slot))

    def of_side(words: jax.Array, side: int) -> jax.Array:
        """Returns the words of one of the examples that share the lanes, and zeros."""
        return jnp.where(side_of_lane == side, words, jnp.uint32(0))

    def weighted(
        data: jax.Array,
        cotangents: jax.Array,
        factors: list[jax.Array],
    ) -> list[jax.Array]:
        sums: list[jax.Array] = []
        for side, factor in enumerate(factors):
            own = (data, cotangents)
            if plan.sides > 1:
                own = (of_side(data, side), of_side(cotangents, side))
            products = [_product(a, b, over=1) for a, b in stacks(*own)]
            # An example without weight may hold NaN.
            terms = [jnp.where(factor == 0, 0.0, factor * product) for product in products]
            if sums:
                sums = [a + b for a, b in zip(sums, terms, strict=True)]
            else:
                sums = terms
        return sums

    return weighted


def _phase(
    plan: Plan,
    words: jax.Array,
    row_phase: int,
    column: int,
) -> jax.Array:
    """Returns the words of the channels of one phase."""
    rows, columns = plan.phases
    # Two channels of bfloat16 share a word.
    size = plan.filled[0] // 2
    first = (rows.index(row_phase) * len(columns) + column) * size
    return words[first : first + size]


def _folded(squares: jax.Array) -> jax.Array:
    """Returns sums [1, 128] of the columns of an array."""
    return functools.reduce(jnp.add, _cut(jnp.sum(squares, 0, keepdims=True)))


def _cut(row: jax.Array) -> list[jax.Array]:
    """Cuts a row into rows of 128. Zeros fill the last one."""
    columns = row.shape[1]
    filled = up(columns, LANES)
    row = jnp.pad(row, ((0, 0), (0, filled - columns)))
    return [row[:, first : first + LANES] for first in range(0, filled, LANES)]
