"""Squared norms of per-example gradients of dense layers by Gram matrices, on a TPU.

For one example with the rows u_t [p] and w_t [q], let U = u u^T and W = w w^T, [T, T] each. Then
||u^T w||^2 = sum_ts U_ts W_ts. The kernel holds U and W in the memory of the chip and writes sums
of their entries. It computes the blocks on and above the diagonal, 128 columns at a time, because
both matrices are symmetric.
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

# Longer examples would need a loop over blocks, and `formed` is then cheaper for most layers.
_LONGEST = 1024
# The most cycles of products in one step of the grid. They bound the size of the program.
_STEP = 10_000
# Examples share a step until its products take about this many cycles, and up to a number.
_LEAST_STEP = 1_500
_EXAMPLES = 8
# Cycles that a step takes beside its products.
_OVERHEAD = 150
# Cycles in which a tile of 8 x 128 entries of both matrices is summed.
_SUMS = 2


class GramNorms(NamedTuple):
    """Sums over the Gram matrices of each example, float32.

    Attributes:
      products: [B]. sum_ts U_ts W_ts.
      squares_u: [B]. sum_ts U_ts^2.
      squares_w: [B]. sum_ts W_ts^2.
      rows_u: [B, T]. The squared lengths of the rows of u, U_tt.
      rows_w: [B, T]. The squared lengths of the rows of w, W_tt.
    """

    products: jax.Array
    squares_u: jax.Array
    squares_w: jax.Array
    rows_u: jax.Array
    rows_w: jax.Array


def cycles(
    positions: int,
    rows: int,
    cols: int,
    itemsize: int = 2,
) -> float:
    """Returns the estimated cycles of one example: of its products and sums, or of reading it."""
    entries = _multiplied(positions)
    lengths = _parts(positions, rows, cols)
    steps = lengths.steps / _examples(positions, rows, cols)
    tile = tiles.SUBLANES * tiles.LANES
    sums = _SUMS * entries / tile
    products = _products(positions, rows + cols)
    computed = products + sums + _OVERHEAD * steps
    read = positions * (rows + cols) * itemsize
    return max(computed, read / tiles.BYTES_PER_CYCLE)  # reading overlaps with computing


def _products(positions: int, features: int) -> float:
    """Returns the cycles of the products of one example."""
    return _multiplied(positions) * features / tiles.PRODUCTS_PER_CYCLE


def _multiplied(positions: int) -> int:
    """Returns how many entries of a Gram matrix are computed, with padding."""
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
    return min(_EXAMPLES, max(1, shared))


def _vmem(
    positions: int,
    rows: int,
    cols: int,
    itemsize: int,
) -> float:
    """Returns the bytes that a step holds on the chip."""
    lengths = _parts(positions, rows, cols)
    examples = _examples(positions, rows, cols)
    positions_held = tiles.padded(positions, 2 * tiles.PACKED)
    entries = examples * positions_held * (lengths.rows + lengths.cols)
    read = entries * (2 * itemsize + 4)  # two buffers, and what is multiplied
    matrix = tiles.padded(positions) ** 2 * 4
    return read + (2 * examples + 1) * matrix  # two matrices each, and a block of products


def suits(
    positions: int,
    rows: int,
    cols: int,
    dtype: Any = jnp.bfloat16,
) -> bool:
    """Returns whether `gram_norms` serves u [B, positions, rows] and w [B, positions, cols].

    It serves 8 to 1024 positions, 64 or more rows and columns, bfloat16 and float32. Long examples
    of many rows need parts that are multiples of 128.
    """
    if not tiles.serves(rows, cols, dtype):
        return False
    if not 8 <= positions <= _LONGEST:
        return False
    if _parts(positions, rows, cols) == _NO_PARTS:
        return False
    itemsize = jnp.dtype(dtype).itemsize
    return tiles.fits(_vmem(positions, rows, cols, itemsize))


def gram_norms(
    u: jax.Array,
    w: jax.Array,
    *,
    u_across: bool = False,
    w_across: bool = False,
) -> GramNorms:
    """Returns sums over the Gram matrices of each example.

    Args:
      u: [B, T, p], bfloat16, or float32 with entries that bfloat16 has. B may be 0.
      w: [B, T, q], likewise.
      u_across: Whether XLA lays u with the positions on the lanes, as it does next to heads of
        attention. The result is the same. The wrong answer costs a copy of u.
      w_across: The same of w.

    Products are exact and are added in float32. A term of U_ts or W_ts passes the additions that
    `additions` tells, and a term of a sum over t and s at most 2 T + 64. No result of one example
    depends on another.
    """
    u, w = tiles.varied(u, w)
    size, positions = u.shape[:2]
    if size == 0:
        sums = shards.vary(jnp.zeros(0, jnp.float32), shards.varying_axes(u))
        lengths = jnp.broadcast_to(sums[:, None], (0, positions))
        return GramNorms(sums, sums, sums, lengths, lengths)
    sums, rows_u, rows_w = _sums(u, w, (u_across, w_across))
    products, squares_u, squares_w = (sums[:, k].sum(-1) for k in range(3))
    return GramNorms(products, squares_u, squares_w, rows_u[:, 0], rows_w[:, 0])


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


def _sums(
    u: jax.Array,
    w: jax.Array,
    across: tuple[bool, bool],
) -> tuple[jax.Array, ...]:
    """Returns the three sums [B, 3, 128], to be added over lanes, and both diagonals [B, 1, T]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    size, positions, rows = u.shape
    cols = w.shape[2]
    lengths = _parts(positions, rows, cols)
    examples = _examples(positions, rows, cols)
    of_u = _Operand(rows, lengths.rows, across[0])
    of_w = _Operand(cols, lengths.cols, across[1])

    def block(operand: _Operand) -> Any:
        def place(
            i: jax.Array,
            step: jax.Array,
        ) -> tuple[Any, ...]:
            # An operand of fewer parts stays at its last one, which is then not read again.
            last = operand.n_parts - 1
            if operand.n_parts < lengths.steps:
                part = jnp.minimum(step, last)
            else:
                part = step
            if operand.on_lanes:
                return (i, part, 0)
            return (i, 0, part)

        shape = (positions, operand.part)
        if operand.on_lanes:
            shape = shape[::-1]
        return pl.BlockSpec((examples, *shape), place)

    def result(*shape: int) -> tuple[Any, Any]:
        spec = pl.BlockSpec((examples, *shape), lambda i, step: (i, 0, 0))
        return spec, shards.shape_like(u, (size, *shape), jnp.float32)

    results = [result(3, tiles.LANES), result(1, positions), result(1, positions)]
    matrices = pltpu.VMEM((examples, positions, positions), jnp.float32)
    vmem = _vmem(positions, rows, cols, u.dtype.itemsize)
    called = pl.pallas_call(
        functools.partial(_kernel, operands=(of_u, of_w)),
        grid=(pl.cdiv(size, examples), lengths.steps),
        in_specs=[block(of_u), block(of_w)],
        out_specs=[spec for spec, _ in results],
        out_shape=[shape for _, shape in results],
        scratch_shapes=[matrices, matrices],
        compiler_params=tiles.compiler_params(vmem, 1, 1),
    )
    if of_u.on_lanes:
        u = u.swapaxes(1, 2)
    if of_w.on_lanes:
        w = w.swapaxes(1, 2)
    sums: tuple[jax.Array, ...] = called(u, w)
    return sums


def _kernel(
    u: Any,
    w: Any,
    sums: Any,
    rows_u: Any,
    rows_w: Any,
    grams_u: Any,
    grams_w: Any,
    *,
    operands: tuple[_Operand, _Operand],
) -> None:
    """Adds the products of one part to the Gram matrices. The last step writes their sums."""
    from jax.experimental import pallas as pl

    step = pl.program_id(1)
    examples = range(u.shape[0])
    steps = max(operand.n_parts for operand in operands)

    def add(
        x: Any,
        grams: Any,
        operand: _Operand,
    ) -> None:
        axis = 0 if operand.on_lanes else 1
        for e in examples:
            part = x[e].astype(jnp.bfloat16)
            length = part.shape[axis]
            if length * operand.n_parts > operand.features:  # the last part goes beyond the array
                place_in_part = lax.broadcasted_iota(jnp.int32, part.shape, axis)
                feature = place_in_part + step * length
                part = jnp.where(feature < operand.features, part, 0)
            alone = operand.n_parts == 1
            _add_gram(part, grams.at[e], operand.on_lanes, first=step == 0, alone=alone)

    of_u, of_w = operands
    for x, grams, operand in ((u, grams_u, of_u), (w, grams_w, of_w)):
        add_part = functools.partial(add, x, grams, operand)
        # The operand with the most parts has one in every step.
        if operand.n_parts == steps:
            add_part()
        else:
            pl.when(step < operand.n_parts)(add_part)

    @pl.when(step == steps - 1)
    def _() -> None:
        for e in examples:
            gram_u = grams_u.at[e]
            gram_w = grams_w.at[e]
            _add_entries(gram_u, gram_w, sums.at[e])
            _diagonal(gram_u, rows_u.at[e])
            _diagonal(gram_w, rows_w.at[e])


def _add_gram(
    x: jax.Array,
    gram: Any,
    on_lanes: bool,
    *,
    first: jax.Array,
    alone: bool,
) -> None:
    """Adds the products of the rows of x to a matrix, at and above its diagonal."""
    for start, end in _columns(gram.shape[0]):
        if on_lanes:
            product = tiles.product(x[:, :end], x[:, start:end], (0, 0))
        else:
            product = tiles.product(x[:end], x[start:end], (1, 1))
        if not alone:  # what the matrix holds before the first step is not defined
            sum_so_far = gram[:end, start:end]
            product += jnp.where(first, 0, sum_so_far)
        gram[:end, start:end] = product


def _add_entries(
    gram_u: Any,
    gram_w: Any,
    sums: Any,
) -> None:
    """Writes the sums over the rows of U * W, U * U and W * W."""

    def over_rows(
        begin: int,
        end: int,
        columns: slice,
    ) -> list[jax.Array]:
        x = gram_u[begin:end, columns]
        y = gram_w[begin:end, columns]
        products = (x * y, x * x, y * y)
        return [product.sum(0, keepdims=True) for product in products]

    totals = [jnp.zeros((1, tiles.LANES), jnp.float32) for _ in range(3)]
    for start, end in _columns(gram_u.shape[0]):
        columns = slice(start, end)
        terms = over_rows(start, end, columns)
        if start:  # a block above the diagonal has an equal one below it
            above = over_rows(0, start, columns)
            pairs = zip(terms, above, strict=True)
            terms = [own + 2 * other for own, other in pairs]
        n_empty = tiles.LANES - (end - start)
        if n_empty:
            empty = jnp.zeros((1, n_empty), jnp.float32)
            terms = [jnp.concatenate([term, empty], 1) for term in terms]
        totals = [total + term for total, term in zip(totals, terms, strict=True)]
    for k, total in enumerate(totals):
        sums[k : k + 1, :] = total


def _diagonal(gram: Any, entries: Any) -> None:
    """Writes the diagonal of a matrix [T, T] to a row [1, T]."""
    for start, end in _columns(gram.shape[0]):
        shape = (end - start, end - start)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        block = gram[start:end, start:end]
        diagonal = jnp.where(row == column, block, 0)
        entries[:, start:end] = diagonal.sum(0, keepdims=True)
