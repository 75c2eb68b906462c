"""Squared norms of per-example gradients of dense layers by Gram matrices, on a TPU.

For one example with the rows u_t [p] and w_t [q], let U = u u^T and W = w w^T, [T, T] each. Then
||u^T w||^2 = sum_ts U_ts W_ts. The kernel holds U and W in the memory of the chip and writes eight
sums over their entries. It computes the blocks on and above the diagonal, 128 columns at a time,
because both matrices are symmetric.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import shards
from jaxdp.transforms.kernels import tiles

# Longer examples would need a loop over blocks, and `formed` is then cheaper for most layers.
_LONGEST = 1024
# The most cycles of products in one step of the grid. They bound the size of the program.
_STEP = 10_000
# Examples share a step until its products take about this many cycles, and up to a number. Numbers
# of examples are powers of two.
_LEAST_STEP = 1_500
_EXAMPLES = 8
# Columns of the matrices of at most this many positions stay in registers.
_SHORT = 2 * tiles.LANES
# Cycles that a step takes beside its products.
_OVERHEAD = 150
# Cycles in which a tile of 8 x 128 entries of both matrices is summed.
_SUMS = 2


class GramNorms(NamedTuple):
    """Sums over the Gram matrices of each example, float32 [B].

    Attributes:
      products: sum_ts U_ts W_ts.
      squares_u: sum_ts U_ts^2.
      squares_w: sum_ts W_ts^2.
      trace_u: sum_t |u_t|^2.
      trace_w: sum_t |w_t|^2.
      apart: sum_t |u_t| |w_t|.
      lengths_u: sum_t |u_t|.
      lengths_w: sum_t |w_t|.
    """

    products: jax.Array
    squares_u: jax.Array
    squares_w: jax.Array
    trace_u: jax.Array
    trace_w: jax.Array
    apart: jax.Array
    lengths_u: jax.Array
    lengths_w: jax.Array


_SUMS_OF_ONE = len(GramNorms._fields)
Rows = tuple[jax.Array, ...]  # of u and w, or none


def cycles(
    positions: int,
    rows: int,
    cols: int,
) -> float:
    """Returns the estimated cycles of one example: of its products and sums, or of reading it."""
    entries = _multiplied(positions)
    lengths = _parts(positions, rows, cols)
    steps = lengths.steps / _examples(positions, rows, cols)
    tile = tiles.SUBLANES * tiles.LANES
    sums = _SUMS * entries / tile
    products = _products(positions, rows + cols)
    computed = products + sums + _OVERHEAD * steps
    read = positions * (rows + cols) * tiles.ITEMSIZE
    return max(computed, read / tiles.BYTES_PER_CYCLE)  # reading overlaps with computing


def _products(positions: int, features: int) -> float:
    """Returns the cycles of the products of one example."""
    return _multiplied(positions) * features / tiles.PRODUCTS_PER_CYCLE


def _multiplied(positions: int) -> int:
    """Returns how many entries of a Gram matrix are computed, with padding."""
    # The rows of a block of columns end at the diagonal.
    ends = (end for _, end in _columns(positions))
    rows = sum(tiles.padded(end, tiles.PACKED) for end in ends)
    return rows * tiles.LANES


def _columns(positions: int) -> list[tuple[int, int]]:
    """Returns the first column and the end of each block of columns."""
    starts = range(0, positions, tiles.LANES)
    return [(start, min(start + tiles.LANES, positions)) for start in starts]


class _Parts(NamedTuple):
    """How many rows and columns of an example one step reads, and the number of steps."""

    rows: int
    cols: int
    steps: int


_NO_PARTS = _Parts(0, 0, 0)


@functools.cache
def _parts(
    positions: int,
    rows: int,
    cols: int,
) -> _Parts:
    """Returns the parts of the fewest steps, or `_NO_PARTS` if every program would be too large."""
    # So many features take `_STEP` cycles.
    most = _STEP * tiles.PRODUCTS_PER_CYCLE / _multiplied(positions)
    fitting = []
    for part_rows, part_cols in itertools.product(_lengths(rows), _lengths(cols)):
        if part_rows + part_cols <= most:
            steps_u = math.ceil(rows / part_rows)
            steps_w = math.ceil(cols / part_cols)
            fitting.append(_Parts(part_rows, part_cols, max(steps_u, steps_w)))

    def order(lengths: _Parts) -> tuple[int, int]:
        # Of equally many steps, those with the least padding.
        return lengths.steps, lengths.rows + lengths.cols

    return min(fitting, key=order, default=_NO_PARTS)


def _lengths(size: int) -> list[int]:
    """Returns lengths of parts of an axis. Where none divides it, the last part goes beyond it."""
    dividing = tiles.parts(size, size)
    if size % tiles.LANES == 0:
        return [*dividing]
    # `_Operand.part_of` sets what lies beyond the axis to zero.
    beyond = range(tiles.LANES, size, tiles.LANES)
    return [*dividing, *beyond]


def additions(
    positions: int,
    rows: int,
    cols: int,
) -> tuple[int, int]:
    """Returns how many additions a term of U_ts, and one of W_ts, passes at most."""
    lengths = _parts(positions, rows, cols)
    of_u = _additions(rows, lengths.rows)
    of_w = _additions(cols, lengths.cols)
    return of_u, of_w


def _additions(size: int, length: int) -> int:
    """Returns the additions within a part, and those of all parts."""
    n_parts = math.ceil(size / length)
    return min(size, length) + n_parts


@functools.cache
def _examples(
    positions: int,
    rows: int,
    cols: int,
) -> int:
    """Returns how many examples one step has. Small ones share a step."""
    if _parts(positions, rows, cols).steps != 1:
        return 1
    # Small products would leave most of a step to its overhead.
    shared = int(_LEAST_STEP / _products(positions, rows + cols))
    most = min(_EXAMPLES, max(1, shared))
    # A power of two divides 128, the number of examples in a block of the sums.
    return 1 << int(math.log2(most))


def _vmem(
    positions: int,
    rows: int,
    cols: int,
) -> float:
    """Returns the bytes that a step holds on the chip."""
    lengths = _parts(positions, rows, cols)
    examples = _examples(positions, rows, cols)
    positions_held = tiles.padded(positions, 2 * tiles.PACKED)
    entries = examples * positions_held * (lengths.rows + lengths.cols)
    read = entries * (2 * tiles.ITEMSIZE + 4)  # two buffers, and what is multiplied
    matrix = tiles.padded(positions) ** 2 * 4
    return read + (2 * examples + 1) * matrix  # two matrices each, and a block of products


def suits(
    positions: int,
    rows: int,
    cols: int,
) -> bool:
    """Returns whether `gram_norms` serves u [B, positions, rows] and w [B, positions, cols].

    It serves 8 to 1024 positions, 64 or more rows and columns. Long examples of many rows need
    parts that are multiples of 128.
    """
    if not tiles.serves(rows, cols):
        return False
    if not 8 <= positions <= _LONGEST:
        return False
    if _parts(positions, rows, cols) == _NO_PARTS:
        return False
    return tiles.fits(_vmem(positions, rows, cols))


def gram_norms(
    u: jax.Array,
    w: jax.Array,
    *,
    u_across: bool = False,
    w_across: bool = False,
    with_rows: bool = False,
) -> tuple[GramNorms, Rows]:
    """Returns sums over the Gram matrices of each example, and their diagonals.

    Args:
      u: [B, T, p], bfloat16. B may be 0.
      w: [B, T, q], likewise.
      u_across: Whether XLA lays u with the positions on the lanes, as it does next to heads of
        attention. The result is the same. The wrong answer costs a copy of u.
      w_across: The same of w.
      with_rows: Whether the diagonals |u_t|^2 and |w_t|^2, [B, T] each, are written.

    Products are exact and are added in float32. A term of U_ts or W_ts passes the additions that
    `additions` tells, and a term of a sum over t and s at most 2 T + 64. No result of one example
    depends on another.
    """
    u, w = shards.varied(u, w)
    # An empty batch has no block for a kernel.
    if len(u) == 0:
        nothing = shards.vary(jnp.zeros(0, jnp.float32), shards.varying_axes(u))
        no_rows = jnp.broadcast_to(nothing[:, None], (0, u.shape[1]))
        return GramNorms(*[nothing] * _SUMS_OF_ONE), (no_rows,) * (2 * with_rows)
    sums, *rows = _sums(u, w, (u_across, w_across), with_rows=with_rows)
    # The last block of 128 examples may have lanes of no example.
    return GramNorms(*sums[:, : len(u)]), tuple(of_one[:, 0] for of_one in rows)


class _Operand(NamedTuple):
    """How the kernel reads u or w.

    Attributes:
      features: The number of features of a row.
      part: The number of features that a step reads.
      on_lanes: Whether the positions are on the lanes, so that blocks are [features, positions].
    """

    features: int
    part: int
    on_lanes: bool

    @property
    def n_parts(self) -> int:
        """The number of steps that read a part."""
        return -(-self.features // self.part)

    def part_of(
        self,
        x: Any,
        example: int,
        step: jax.Array,
    ) -> jax.Array:
        """Returns the features of an example that a step multiplies."""
        part: jax.Array = x[example]
        if self.part * self.n_parts == self.features:
            return part
        axis = 0 if self.on_lanes else 1
        # The last part goes beyond the array.
        place_in_part = lax.broadcasted_iota(jnp.int32, part.shape, axis)
        feature = place_in_part + step * self.part
        return jnp.where(feature < self.features, part, 0)


def _sums(
    u: jax.Array,
    w: jax.Array,
    across: tuple[bool, bool],
    *,
    with_rows: bool,
) -> list[jax.Array]:
    """Returns the sums of all examples, [8, B or more], and both diagonals [B, 1, T] if wanted."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    size, positions, rows = u.shape
    cols = w.shape[2]
    lengths = _parts(positions, rows, cols)
    examples = _examples(positions, rows, cols)
    of_u = _Operand(rows, lengths.rows, across[0])
    of_w = _Operand(cols, lengths.cols, across[1])

    # The sums of 128 examples are a block of the result, to which several turns write. The axes of
    # the grid are these blocks, the turns within them, and parts of features.
    all_turns = pl.cdiv(size, examples)
    blocks = pl.cdiv(size, tiles.LANES)
    turns = min(all_turns, tiles.LANES // examples)

    def step_at(i: jax.Array, turn: jax.Array) -> jax.Array:
        # Turns behind the last example read nothing new.
        return jnp.minimum(i * turns + turn, all_turns - 1)

    is_written = lengths.steps > 1 or positions > _SHORT
    matrices = pltpu.VMEM((examples, positions, positions), jnp.float32)
    vmem = _vmem(positions, rows, cols)
    kernel = functools.partial(
        _kernel,
        operands=(of_u, of_w),
        all_turns=all_turns,
        is_full=blocks * turns == all_turns,
        with_rows=with_rows,
    )
    of_sums = pl.BlockSpec((_SUMS_OF_ONE, tiles.LANES), lambda i, turn, step: (0, i))
    of_rows = pl.BlockSpec((examples, 1, positions), lambda i, turn, step: (step_at(i, turn), 0, 0))
    all_sums = shards.shape_like(u, (_SUMS_OF_ONE, blocks * tiles.LANES))
    all_rows = shards.shape_like(u, (size, 1, positions))
    n_rows = 2 * with_rows
    called = pl.pallas_call(
        kernel,
        grid=(blocks, turns, lengths.steps),
        in_specs=[
            _block(operand, examples, positions, lengths.steps, step_at) for operand in (of_u, of_w)
        ],
        out_specs=[of_sums, *[of_rows] * n_rows],
        out_shape=[all_sums, *[all_rows] * n_rows],
        scratch_shapes=[matrices, matrices] if is_written else [],
        compiler_params=tiles.compiler_params(vmem, parallel=1),
    )
    if of_u.on_lanes:
        # Where XLA has laid u so, the swap moves nothing.
        u = u.swapaxes(1, 2)
    if of_w.on_lanes:
        w = w.swapaxes(1, 2)
    results: list[jax.Array] = called(u, w)
    return results


def _block(
    operand: _Operand,
    examples: int,
    positions: int,
    steps: int,
    step_at: Callable[[jax.Array, jax.Array], jax.Array],
) -> Any:
    """Returns the block that a step reads of an operand.

    Args:
      operand, examples, positions: What an array has, and how many examples one step has.
      steps: How many parts of features the grid has.
      step_at: Returns which examples a turn has.
    """
    from jax.experimental import pallas as pl

    def place(
        i: jax.Array,
        turn: jax.Array,
        step: jax.Array,
    ) -> tuple[Any, ...]:
        own = step_at(i, turn)
        # An operand of fewer parts stays at its last one, which is then not read again.
        last = operand.n_parts - 1
        if operand.n_parts < steps:
            part = jnp.minimum(step, last)
        else:
            part = step
        if operand.on_lanes:
            return (own, part, 0)
        return (own, 0, part)

    shape = (positions, operand.part)
    if operand.on_lanes:
        shape = shape[::-1]
    return pl.BlockSpec((examples, *shape), place)


def _kernel(
    u: Any,
    w: Any,
    sums: Any,
    *others: Any,
    operands: tuple[_Operand, _Operand],
    all_turns: int,
    is_full: bool,
    with_rows: bool,
) -> None:
    """Writes sums over the Gram matrices of some examples.

    With several parts of features it first adds up the matrices in memory. The last step writes
    their sums. Those of one part and few positions are not written, so their entries are summed
    while the units multiply.
    """
    from jax.experimental import pallas as pl

    diagonals = others[: 2 * with_rows]
    grams = others[2 * with_rows :]
    turn = pl.program_id(1)
    step = pl.program_id(2)
    n_examples = u.shape[0]
    steps = max(operand.n_parts for operand in operands)
    positions = u.shape[2] if operands[0].on_lanes else u.shape[1]

    def columns_of(
        e: int,
        start: int,
        end: int,
    ) -> list[Any]:
        """Returns some columns of both matrices of an example, at and above the diagonal."""
        if grams:
            return [matrices.at[e, :end, start:end] for matrices in grams]
        columns = []
        for x, operand in zip((u, w), operands, strict=True):
            part = operand.part_of(x, e, step)
            columns.append(_products_of_rows(part, start, end, operand.on_lanes))
        return columns

    def write() -> None:
        lane = lax.broadcasted_iota(jnp.int32, sums.shape, 1)
        total = sums[...]
        for e in range(n_examples):
            rows: dict[int, list[jax.Array]] = {}  # by the number of columns
            for start, end in _columns(positions):
                gram_u, gram_w = columns_of(e, start, end)
                own = _rows_of_columns(gram_u, gram_w, start)
                before = rows.get(end - start)
                rows[end - start] = own if before is None else _added(before, own)
                for diagonal, squares in zip(diagonals, own[3:5], strict=False):
                    diagonal[e, :, start:end] = squares
            # Eight rows of one length are a tile, so one reduction serves all sums.
            stacked = [jnp.concatenate(terms, 0) for terms in rows.values()]
            of_one = sum(terms.sum(1, keepdims=True) for terms in stacked)
            own_lane = turn * n_examples + e
            is_own = lane == own_lane
            # [8, 1] to the lane of its example in [8, 128].
            total = jnp.where(is_own, of_one, total)
        sums[...] = total

    def run() -> None:
        for x, matrices, operand in zip((u, w), grams, operands, strict=False):
            add_part = functools.partial(_add_products, x, matrices, operand, step)
            _when(step < operand.n_parts, add_part, always=operand.n_parts == steps)
        _when(step == steps - 1, write, always=steps == 1)

    block = pl.program_id(0)
    own_turn = block * pl.num_programs(1) + turn
    _when(own_turn < all_turns, run, always=is_full)


def _add_products(
    x: Any,
    matrices: Any,
    operand: _Operand,
    step: jax.Array,
) -> None:
    """Adds the products of a part of the features to the matrices [examples, T, T]."""
    n_examples, positions, _ = matrices.shape
    for e in range(n_examples):
        part = operand.part_of(x, e, step)
        for start, end in _columns(positions):
            on_lanes = operand.on_lanes
            product = _products_of_rows(part, start, end, on_lanes)
            if operand.n_parts > 1:  # what a matrix holds before the first step is not defined
                sum_so_far = matrices[e, :end, start:end]
                product += jnp.where(step == 0, 0, sum_so_far)
            matrices[e, :end, start:end] = product


def _when(
    condition: jax.Array,
    body: Callable[[], None],
    *,
    always: bool,
) -> None:
    """Runs the body if the condition holds. What runs always has no branch, so it overlaps."""
    from jax.experimental import pallas as pl

    if always:
        body()
    else:
        pl.when(condition)(body)


def _products_of_rows(
    x: jax.Array,
    start: int,
    end: int,
    on_lanes: bool,
) -> jax.Array:
    """Returns the products of the rows of x before `end` with those from `start` to `end`."""
    if on_lanes:
        return tiles.product(x[:, :end], x[:, start:end], (0, 0))
    return tiles.product(x[:end], x[start:end], (1, 1))


def _added(
    xs: list[jax.Array],
    ys: list[jax.Array],
) -> list[jax.Array]:
    return [x + y for x, y in zip(xs, ys, strict=True)]


def _rows_of_columns(
    gram_u: Any,
    gram_w: Any,
    start: int,
) -> list[jax.Array]:
    """Returns the part of the sums of `GramNorms` that each column from `start` on has.

    Args:
      gram_u, gram_w: The columns at and above the diagonal.
      start: Their first row at the diagonal.
    """
    above = [jnp.zeros((1, gram_u.shape[1]), jnp.float32)] * 3
    for begin, end in _columns(gram_u.shape[0]):
        x = gram_u[begin:end]
        y = gram_w[begin:end]
        products = (x * y, x * x, y * y)
        terms = [product.sum(0, keepdims=True) for product in products]
        if begin < start:
            above = _added(above, terms)
    # The last rows are at the diagonal. A block above it has an equal one below it.
    terms = _added(terms, [2 * term for term in above])
    squares_u = _diagonal(x)
    squares_w = _diagonal(y)
    length_u = jnp.sqrt(squares_u)
    length_w = jnp.sqrt(squares_w)
    return [*terms, squares_u, squares_w, length_u * length_w, length_u, length_w]


def _diagonal(block: jax.Array) -> jax.Array:
    """Returns the diagonal of a square block as a row."""
    row = lax.broadcasted_iota(jnp.int32, block.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, block.shape, 1)
    return jnp.where(row == column, block, 0).sum(0, keepdims=True)
