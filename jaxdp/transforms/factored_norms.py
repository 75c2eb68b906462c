"""Norms of per-example gradients from their factors, without forming a gradient.

For one example with dV = sum_t u_t w_t^T

    ||dV||^2 = sum_{t,t'} <u_t, u_t'> <w_t, w_t'>                                    (Gram form)

Goodfellow (2015, arXiv:1510.01799) has it for one position and Li et al. (2022, arXiv:2110.05679)
for sequences. Equal rows of a table are added up instead. `jaxdp.transforms.rounding` has the
bounds that the norms cover.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import dense, forms, rounding
from jaxdp.transforms.products import (
    PRECISION,
    contracted,
    multiplies_bfloat16,
    one_axis,
    settled,
    square,
    wide,
    wide_dtype,
)
from jaxdp.transforms.weight_rules import Factor, OneHot, Pair

# Longer inner products are summed in blocks of this many terms, which rounds less.
_BLOCK = 2048

# Gram matrices of more positions are computed by blocks of at most this many rows. A TPU would copy
# the rows of each block.
_GRAM_ROWS = 256
_GRAM_ROWS_TPU = 1024

# A TPU picks columns by a product for up to this many rows of a lookup. A lookup along the lanes
# would copy all of x first: 5.3 M cycles for 8 texts of 512 tokens and GPT-2's vocabulary, where
# the product takes 1.6 M. The cost of a product grows with the square of the length.
_LONGEST_ONE_HOT = 1024

# Gram matrices of at most this many blocks are computed without a loop on a GPU.
_UNROLLED = 10

Lengths = tuple[jax.Array, jax.Array]  # of u and w, [B, S, T] each


def squared_norms(
    pairs: Sequence[Pair],
    lanes: Sequence[dense.Lanes] = (),
) -> jax.Array:
    """Computes ||sum_j sum_t u_jt w_jt^T||^2 [B] from the factors of the sites of one weight.

    Args:
      pairs: The factors of each site, as of `Site.factors`.
      lanes: How XLA lays those of each site, as in `dense`. Without it the features are on the
        lanes.

    Formal guarantees:
      The root of the result times 1 + `rounding.SLACK` is at least the norm of the exact gradient,
      and that of the sum of its terms in float32, whatever their order and however they cancel.
      Squares that underflow count at their upper bound, so a tiny u and a huge w cannot hide a
      gradient. A norm of 0 is reported as up to about 1e-16.
    """
    # Two cases need no Gram matrix: rows of a table, and one position, whose gradient is an outer
    # product.
    if _all_lookups(pairs):
        return _squared_norms_of_rows(pairs)
    if len(pairs) == 1 and _positions(pairs[0]) == 1:
        return _squared_norms_of_one_position(pairs[0])
    rows, cols = _sizes(pairs)
    kind = wide_dtype(*jax.tree.leaves(pairs))
    norms: list[_Norm] = []
    squares: list[jax.Array] = []
    spreads: list[jax.Array] = []
    lanes = lanes or [(False, False)] * len(pairs)
    for pair, lanes_of_pair in zip(pairs, lanes, strict=True):
        norm = _gram_norm(pair, kind, lanes_of_pair, alone=len(pairs) == 1)
        squares.append(norm.squares)
        spreads.append(norm.spread)
        # The gradients of two sites have a product too, which counts twice.
        # `norms` has the sites before this one, where `zip` stops.
        for other, other_norm in zip(pairs, norms, strict=False):
            grams = _grams(pair, other, kind)
            counts = _counts(pair, other)
            # ||A + B||^2 = ||A||^2 + 2 <A, B> + ||B||^2, and <A, B> is a sum over Gram matrices of
            # both.
            product, its_spread = _gram_sums(grams, norm.lengths, other_norm.lengths, counts)
            squares.append(2 * product)
            spreads.append(2 * its_spread)
        norms.append(norm)
    total = _added(squares)
    spread = _added(spreads)
    apart = _added([norm.apart for norm in norms])
    lengths_u = _added([norm.lengths_u for norm in norms])
    lengths_w = _added([norm.lengths_w for norm in norms])
    flushed = _flushed(rows, cols, lengths_u, lengths_w)
    # Groups are orthogonal parts of the weight, so their M add up in squares.
    largest = rounding.root(jnp.square(apart).sum(1))
    error = rounding.of_sum(_terms(pairs), kind) * largest
    return rounding.covered(total, spread, error) + flushed


def norm_of_pair(pair: Pair) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ||sum_t u_t w_t^T||^2 of each example, and E and M of `rounding`, [B] each."""
    rows, cols = _sizes([pair])
    kind = wide_dtype(*jax.tree.leaves(pair))
    norm = _gram_norm(pair, kind, (False, False), alone=True)
    flushed = _flushed(rows, cols, norm.lengths_u, norm.lengths_w)
    apart = rounding.root(jnp.square(norm.apart).sum(1))
    return norm.squares, norm.spread + flushed, apart


def _flushed(rows: int, cols: int, lengths_u: jax.Array, lengths_w: jax.Array) -> jax.Array:
    """Returns what squares that are flushed to zero add to a squared norm at most.

    Each counts at its upper bound, times the lengths of the other factor.
    """
    squares_w = rows * jnp.square(lengths_w)
    squares_u = cols * jnp.square(lengths_u)
    return rounding.FLUSHED * (squares_w + squares_u)


def _added(terms: Sequence[jax.Array]) -> jax.Array:
    """Adds up arrays from the first to the last, without an array of zeros in front."""
    return functools.reduce(jnp.add, terms)


def _squared_norms_of_one_position(pair: Pair) -> jax.Array:
    """Computes the squared norms [B] of outer products, |u|^2 |w|^2."""
    rows, cols = _sizes([pair])
    parts, w = pair
    # A square that is flushed to zero counts at its upper bound.
    squares_of_parts = sum(square(part).sum((2, 3)) for part in parts)
    square_u = squares_of_parts + rows * rounding.FLUSHED
    square_w = square(w).sum((2, 3))
    square_w = square_w + cols * rounding.FLUSHED
    return (square_u * square_w).sum(1)


def _sizes(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Returns the largest numbers of entries of u and of w."""
    rows = max(sum(map(_width, parts)) for parts, _ in pairs)
    cols = max(_width(w) for _, w in pairs)
    return rows, cols


def _width(x: Factor) -> int:
    if isinstance(x, OneHot):
        # A row of an identity matrix has one entry that is not zero.
        return 1
    width: int = x.shape[-1]
    return width


def lost_in_parts() -> int:
    """Returns the rounding of a cotangent in two parts, as additions of `rounding.of_sum`.

    A cotangent times a factor has 24 bits. Two parts in bfloat16 have 16 of them.
    """
    if multiplies_bfloat16():
        return 2**7  # 2**-16, in units of 2**-23
    return 0


# --- Inner products ---


def inner_products(
    x: Factor,
    y: Factor,
    precision: lax.Precision | None = None,
) -> jax.Array:
    """Computes the inner products [B, S, T, T'] of all rows.

    The factors are settled, unless a precision is given.
    """
    if isinstance(x, OneHot) and isinstance(y, OneHot):
        own = x.index[..., :, None]
        other = y.index[..., None, :]
        # Two rows of no index, which is negative, are zeros and have the product 0.
        is_same = (own == other) & (own >= 0)
        return is_same.astype(jnp.float32)
    if isinstance(x, OneHot):
        return inner_products(y, x).swapaxes(-1, -2)
    if isinstance(y, OneHot):
        if _multiplies_one_hot(x, y):
            # A negative index is a row of zeros.
            rows_of_y = jax.nn.one_hot(y.index, x.shape[-1], dtype=x.dtype)
            return contracted(x, rows_of_y, [3], [0, 1], precision)
        # A row of zeros picks an entry behind the last one, which is zero.
        columns = jnp.where(y.index < 0, x.shape[-1], y.index)
        columns = columns[..., None, :]
        # <x_t, e_i> = x_t[i], so T x T' entries are read and none is multiplied.
        picked = jnp.take_along_axis(x, columns, axis=-1, mode="fill", fill_value=0)
        return wide(picked)
    terms = x.shape[-1]
    blocks, rest = divmod(terms, _BLOCK)
    if blocks < 2:
        return contracted(x, y, [3], [0, 1], precision)

    def product(start: Any, size: int) -> jax.Array:
        u = lax.dynamic_slice_in_dim(x, start, size, axis=-1)
        w = lax.dynamic_slice_in_dim(y, start, size, axis=-1)
        return contracted(u, w, [3], [0, 1], precision)

    def add(
        total: jax.Array,
        start: jax.Array,
    ) -> tuple[jax.Array, None]:
        return total + product(start, _BLOCK), None

    if rest:
        # The rest starts the sum, because blocks of the loop have one size.
        first = product(terms - rest, rest)
    else:
        first = jnp.zeros_like(product(0, _BLOCK))
    starts = jnp.arange(blocks) * _BLOCK
    total, _ = lax.scan(add, first, starts)
    return total


def _multiplies_one_hot(x: jax.Array, y: OneHot) -> bool:
    """Returns whether entries of x are picked by a product with rows of zeros and a one.

    The product is exact in bfloat16. An entry that is not finite makes all of its row NaN, which
    the norm of x does as well.
    """
    positions = y.index.shape[-1]
    is_exact = x.dtype == jnp.bfloat16
    return forms.platform() == "tpu" and is_exact and positions <= _LONGEST_ONE_HOT


def _additions(xs: Sequence[Factor], ys: Sequence[Factor]) -> int:
    """Returns how many additions a term of the inner products of two factors passes."""

    def of_part(x: Factor, y: Factor) -> int:
        if isinstance(x, OneHot) or isinstance(y, OneHot):
            return 0  # a row of a table is picked
        terms: int = x.shape[-1]
        if terms < 2 * _BLOCK:
            return terms
        # Those within a block, those of the blocks, and that of the rest.
        return _BLOCK + terms // _BLOCK + 1

    most = max(map(of_part, xs, ys))
    # The inner products of the parts are added up as well.
    return most + len(xs) - 1


# --- Rows of tables ---


def _all_lookups(pairs: Sequence[Pair]) -> bool:
    """Returns whether all sites look up rows."""

    def is_lookup(pair: Pair) -> bool:
        parts, w = pair
        u_is_lookup = len(parts) == 1 and isinstance(parts[0], OneHot)
        return u_is_lookup and not isinstance(w, OneHot)

    return all(map(is_lookup, pairs))


def _squared_norms_of_rows(pairs: Sequence[Pair]) -> jax.Array:
    """Computes the squared norms [B] of tables to which the rows of all pairs are added.

    Equal rows are added in a table of T rows. Its cost is that of the rows, where Gram matrices
    cost T times as much.
    """
    index, w = _all_rows(pairs)
    looked_up = (index >= 0).sum((1, 2)).astype(w.dtype)
    flushed = rounding.FLUSHED * w.shape[-1] * looked_up
    (first, *_), _ = pairs[0]
    # No row is met twice, so the squares of the rows add up.
    are_distinct = len(pairs) == 1 and (first.distinct or w.shape[2] == 1)
    if are_distinct:
        return square(w).sum((1, 2, 3)) + flushed
    _, total = sums_of_equal_rows(index, w)
    # Rows of one index may cancel. M counts the length of each by itself, [B, S, T].
    lengths = rounding.root(square(w).sum(-1))
    apart = lengths.sum(2)
    largest = rounding.root(jnp.square(apart).sum(1))
    error = rounding.of_sum(_terms(pairs), w.dtype) * largest
    squares = square(total).sum((1, 2, 3))
    return rounding.covered(squares, jnp.zeros_like(squares), error) + flushed


def _all_rows(pairs: Sequence[Pair]) -> tuple[jax.Array, jax.Array]:
    """Returns the rows (index [B, S, T], w [B, S, T, cols]) of all sites.

    Rows of no index are zero.
    """
    kind = wide_dtype(*(w for _, w in pairs))
    index = jnp.concatenate([parts[0].index for parts, _ in pairs], 2)
    w = jnp.concatenate([w.astype(kind) for _, w in pairs], 2)
    return index, jnp.where((index >= 0)[..., None], w, 0)


@rounding.traced_once
def sums_of_equal_rows(
    index: jax.Array,
    w: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Adds up the rows w [B, S, T, cols] of equal index [B, S, T].

    Returns distinct indices and the sums of their rows, in the same shapes. Places without a row
    have the index -1. The indices 3 7 3 become 3 7 -1.
    """
    w = jnp.where((index >= 0)[..., None], w, 0)
    if w.shape[2] <= 1:
        return index, w

    def of_one(
        index: jax.Array,
        w: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        # Distinct indices are numbered in ascending order. So T places hold all sums, however long
        # the table is.
        order = jnp.argsort(index)
        ranked = index[order]
        first_is_new = jnp.zeros(1, bool)
        others_are_new = ranked[1:] != ranked[:-1]
        is_new = jnp.concatenate([first_is_new, others_are_new])
        # The rank in ascending order, from 0.
        number = jnp.cumsum(is_new).astype(order.dtype)
        place = jnp.zeros_like(order)
        place = place.at[order].set(number, unique_indices=True)
        distinct = jnp.full_like(index, -1)
        # Equal indices write the same value, so their order does not matter.
        distinct = distinct.at[number].set(ranked, indices_are_sorted=True)
        total = jnp.zeros_like(w).at[place].add(w)
        return distinct, total

    return jax.vmap(jax.vmap(of_one))(index, w)


# --- Gram matrices ---


def gram_rows(positions: int) -> int:
    """Returns the number of rows of blocks of Gram matrices, which divides that of positions."""
    most = _GRAM_ROWS_TPU if forms.platform() == "tpu" else _GRAM_ROWS
    # Above half of the most, because more and smaller blocks need more turns of the loop.
    sizes = range(most, most // 2, -1)
    return next((size for size in sizes if positions % size == 0), positions)


class _Norm(NamedTuple):
    """||sum_t u_t w_t^T||^2 of each example, and what bounds its rounding.

    Attributes:
      squares: [B]. The squared norms.
      spread: [B]. E of `rounding`.
      lengths: The lengths of u and w.
      sums: Sums over them, if a kernel has computed them.
    """

    squares: jax.Array
    spread: jax.Array
    lengths: Lengths
    sums: dense.LengthSums | None = None

    @property
    def apart(self) -> jax.Array:
        """The sums of the products of lengths, [B, S]."""
        if self.sums is not None:
            return self.sums.apart
        length_u, length_w = self.lengths
        return (length_u * length_w).sum(2)

    @property
    def lengths_u(self) -> jax.Array:
        """The sums of the lengths of u, [B]."""
        if self.sums is not None:
            return self.sums.lengths_u
        return self.lengths[0].sum((1, 2))

    @property
    def lengths_w(self) -> jax.Array:
        """The sums of the lengths of w, [B]."""
        if self.sums is not None:
            return self.sums.lengths_w
        return self.lengths[1].sum((1, 2))


def _gram_norm(
    pair: Pair,
    kind: Any,
    lanes: dense.Lanes,
    *,
    alone: bool,
) -> _Norm:
    """Returns ||sum_t u_t w_t^T||^2 and what bounds its rounding.

    Only several sites of one weight need the lengths of rows. `alone` says that there is one site.
    """
    if not dense.has_gram_norm(*pair):
        return _gram_norm_by_xla(pair, kind)

    def by_xla(pair: Pair) -> _Norm:
        norm = _gram_norm_by_xla(jax.tree.map(settled, pair), kind)
        # All forms return one structure.
        sums = dense.LengthSums(norm.apart, norm.lengths_u, norm.lengths_w)
        return norm._replace(sums=sums)

    def by_kernel(pair: Pair) -> _Norm:
        ((u,), w) = pair
        squares, spread, sums, rows = dense.gram_norm(u, w, lanes, with_rows=not alone)
        # XLA drops lengths that nothing reads.
        lengths = _lengths(pair, kind) if alone else (rows[0], rows[1])
        return _Norm(squares, spread, lengths, sums)

    norm: _Norm = forms.by_platform(pair, default=by_xla, kernels={"tpu": by_kernel})
    return norm


def _gram_norm_by_xla(pair: Pair, kind: Any) -> _Norm:
    """Returns what `_gram_norm` does.

    Gram matrices are symmetric. Of long ones the blocks of one half are computed, one after the
    other.
    """
    positions = _positions(pair)
    size = gram_rows(positions)
    counts = _counts(pair, pair)
    if size == positions:
        grams = _grams(pair, pair, kind)
        # Their diagonals are the squared lengths.
        length_u, length_w = (rounding.root(_diagonal(gram)) for gram in grams)
        lengths = (length_u, length_w)
        total, error = _gram_sums(grams, lengths, lengths, counts)
        return _Norm(total, error, lengths)

    lengths = _lengths(pair, kind)

    def rows_of_block(k: Any) -> tuple[Pair, Lengths]:
        def sliced(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, k * size, size, axis=2)

        rows: tuple[Pair, Lengths] = jax.tree.map(sliced, (pair, lengths))
        return rows

    def block(place: Any) -> tuple[jax.Array, jax.Array]:
        (x, lengths_x), (y, lengths_y) = map(rows_of_block, place)
        grams = _grams(x, y, kind)
        return _gram_sums(grams, lengths_x, lengths_y, counts)

    blocks = range(positions // size)
    places = list(itertools.combinations_with_replacement(blocks, 2))
    # A block beside the diagonal stands for two.
    times = [1 if i == j else 2 for i, j in places]
    twice = jnp.array(times, kind)[:, None]
    # A loop on an accelerator copies what it reads and writes.
    if forms.platform() != "cpu" and len(places) <= _UNROLLED:
        of_blocks = map(block, places)
        sums = [jnp.stack(xs) for xs in zip(*of_blocks, strict=True)]
    else:
        sums = list(lax.map(block, jnp.array(places)))
    # [blocks, B] to [B]
    total, spread = ((twice * x).sum(0) for x in sums)
    return _Norm(total, spread, lengths)


def _grams(
    x: Pair,
    y: Pair,
    kind: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns the inner products <u_t, u'_t'> and <w_t, w'_t'> [B, S, T, T'] of two pairs."""
    parts_x, w_x = x
    parts_y, w_y = y
    factors = (*parts_x, w_x, *parts_y, w_y)
    # The sums of rows of a lookup are not settled.
    has_lookup = any(isinstance(factor, OneHot) for factor in factors)
    precision = PRECISION if has_lookup else None

    def gram(p: Factor, q: Factor) -> jax.Array:
        return inner_products(p, q, precision).astype(kind)

    of_parts = [gram(p, q) for p, q in zip(parts_x, parts_y, strict=True)]
    # Parts of u are slices of one long row, so their inner products add up.
    gram_u = functools.reduce(jnp.add, of_parts)
    gram_w = gram(w_x, w_y)
    return gram_u, gram_w


def _diagonal(gram: jax.Array) -> jax.Array:
    """Returns the diagonals [B, S, T] of matrices [B, S, T, T]."""
    diagonals: jax.Array
    if forms.platform() == "cpu":
        # `jnp.diagonal` is a gather by indices of twelve operations, which each layer compiles.
        b, s, t, _ = gram.shape
        entries = gram.reshape(b, s, t * t)
        diagonals = lax.slice(entries, (0, 0, 0), entries.shape, (1, 1, t + 1))
    else:
        diagonals = jnp.diagonal(gram, axis1=2, axis2=3)
    return diagonals


def _gram_sums(
    grams: Sequence[jax.Array],
    x: Lengths,
    y: Lengths,
    counts: tuple[int, int, int],
) -> tuple[jax.Array, jax.Array]:
    """Returns sum_ts U_ts W_ts and a bound on its rounding, E in `rounding`, [B] each.

    Args:
      grams: U and W, [B, S, T, T'].
      x, y: The lengths of u and w, [B, S, T] and [B, S, T'] each.
      counts: r_u, r_w and r_T.
    """
    gram_u, gram_w = map(one_axis, grams)
    products = gram_u * gram_w
    axes = tuple(range(1, products.ndim))
    return products.sum(axes), _gram_spread(grams, x, y, counts)


@functools.partial(rounding.traced_once, static_argnums=(3,))
def _gram_spread(
    grams: Sequence[jax.Array],
    x: Lengths,
    y: Lengths,
    counts: tuple[int, int, int],
) -> jax.Array:
    """Returns E in `rounding`, [B]. Arguments are as in `_gram_sums`."""
    gram_u, gram_w = grams
    # By Cauchy and Schwarz, at least the absolute terms of an inner product.
    x_u, x_w = x
    y_u, y_w = y
    most_u = x_u[..., :, None] * y_u[..., None, :]
    most_w = x_w[..., :, None] * y_w[..., None, :]
    abs_u = jnp.abs(gram_u)
    abs_w = jnp.abs(gram_w)
    eps = rounding.eps(gram_u.dtype)
    # E = eps sum (r_u |u||u'||W| + r_w |U||w||w'| + r_T |U W|), as in `rounding`.
    r_u, r_w, r_t = (eps * count for count in counts)
    of_u = r_u * most_u * abs_w
    of_w = r_w * most_w * abs_u
    of_factors = of_u + of_w
    spread = of_factors + r_t * abs_u * abs_w
    return spread.sum((1, 2, 3))


@rounding.traced_once
def without_cancellation(pair: Pair) -> jax.Array:
    """Returns the norms [B] that dV would have if its terms had one direction, M in `rounding`."""
    length_u, length_w = _lengths(pair, wide_dtype(pair[1]))
    lengths = (length_u * length_w).sum(2)
    return rounding.root(jnp.square(lengths).sum(1))


def _lengths(pair: Pair, kind: Any) -> Lengths:
    def squares(x: Factor) -> jax.Array:
        if isinstance(x, OneHot):
            return (x.index >= 0).astype(kind)
        return square(x).sum(-1).astype(kind)

    parts, w = pair
    squares_u = functools.reduce(jnp.add, map(squares, parts))
    length_u = rounding.root(squares_u)
    length_w = rounding.root(squares(w))
    return length_u, length_w


def _positions(pair: Pair) -> int:
    """Returns the number of positions T of a pair."""
    return int(jax.tree.leaves(pair[1])[0].shape[2])


def _terms(pairs: Sequence[Pair]) -> int:
    """Returns how many terms an entry of the gradient may be a sum of, one after the other."""

    def terms(pair: Pair) -> int:
        parts, w = pair
        # Then each entry of the gradient is one entry of w.
        if any(isinstance(x, OneHot) and x.distinct for x in (*parts, w)):
            return 1
        return _positions(pair)

    most = max(map(terms, pairs))
    return most + len(pairs) + lost_in_parts()


def _counts(x: Pair, y: Pair) -> tuple[int, int, int]:
    """Returns r_u, r_w and r_T of `rounding` for two pairs."""
    parts_x, w_x = x
    parts_y, w_y = y
    of_u = _additions(parts_x, parts_y)
    of_w = _additions([w_x], [w_y])
    groups = jax.tree.leaves(w_x)[0].shape[1]
    of_positions = rounding.additions(groups * _positions(x) * _positions(y))
    return of_u, of_w, of_positions
