"""Rules of matrix products and convolutions: sums of products of two operands.

A general bilinear operation is bounded by a few evaluations at endpoints (`bilinear_bounds`). Dot
products have tighter forms where they are cheap: outer products, short sums, and gradients whose
entries sum to zero. docs/design/prediction.md has the derivations T1 to T3.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms.boxes import (
    Box,
    Equation,
    Interval,
    Operand,
    are_nonnegative,
    at_least_float32,
    inflate,
    is_float,
    is_nonnegative,
    lower,
    magnitude,
    moved,
    register_rule,
    slack,
    tiny,
    upper,
    widen,
)
from jaxdp.transforms.interval_rules.endpoints import (
    Ends,
    NoRuleError,
    axes_last,
    corner_products,
    narrow,
    off_diagonal,
    summable,
)
from jaxdp.transforms.interval_rules.softmax import PAIRWISE

# Sums of at most this many products are unrolled and bounded corner by corner.
_UNROLLED = 16
# Sums of at most K = 4 terms are bounded once more with each row subtracted, which takes K times as
# many products.
_CENTRED = 4
# Longer sums of products are summed in blocks, so that the rounding grows with the square root of
# the length.
_LONG = 256

Multiply = Callable[[jax.Array, jax.Array], jax.Array]
Dims = Any  # ((a_contract, b_contract), (a_batch, b_batch)) of lax.dot_general
_NO_BATCH: Any = ((), ())


# --- Any bilinear operation (T1) ----------------------------------------------------------------


def bilinear_bounds(
    product: str,
    multiply: Multiply,
    a: Operand,
    b: Operand,
    terms: int,
) -> Ends:
    """Bounds sums of `terms` products by a few evaluations at endpoints (T1).

    The bounds are exact if a factor has a known sign or is a point. Otherwise a = a+ - a-, and both
    parts are bounded separately. That is exact for entries of either factor that do not cross zero,
    and else at most twice too wide.
    """
    # The second factor becomes an interval, and of two intervals the one whose sign is unknown.
    b_is_point = not isinstance(b, Interval)
    b_has_sign = is_nonnegative(b) and isinstance(a, Interval)
    if b_is_point or b_has_sign:
        a, b = b, a
        multiply = _swapped(multiply)
    if product == "rump":
        return _midpoint_radius(multiply, a, b, terms)
    if not isinstance(b, Interval):
        return _product_of_points(multiply, lower(a), b, terms)
    # The second factor is widened by the rounding of the sum, instead of every result.
    # The other roundings are those of up to three additions of partial sums.
    b = inflate(b, terms + 6)
    a_is_nonnegative = is_nonnegative(a)
    if not isinstance(a, Interval):
        return _point_times_interval(multiply, a, b, a_is_nonnegative=a_is_nonnegative)
    return _interval_times_interval(multiply, a, b, a_is_nonnegative=a_is_nonnegative)


def _swapped(multiply: Multiply) -> Multiply:
    return lambda x, y: multiply(y, x)


def _product_of_points(
    multiply: Multiply,
    a: jax.Array,
    b: jax.Array,
    terms: int,
) -> Ends:
    """Bounds the rounding, which alone is uncertain."""
    value = multiply(a, b)
    magnitudes = multiply(jnp.abs(a), jnp.abs(b))
    error = slack(b.dtype, terms + 2) * magnitudes
    # No sign of a and b matters here, so one evaluation of magnitudes covers all orders of the sum.
    return value - error, value + error


def _point_times_interval(
    multiply: Multiply,
    a: jax.Array,
    b: Interval,
    *,
    a_is_nonnegative: bool,
) -> Ends:
    # a b = a+ b - a- b, and both parts of a point are known.
    positive = jnp.maximum(a, 0)
    negative = jnp.maximum(-a, 0)
    low = multiply(positive, b.lower)
    high = multiply(positive, b.upper)
    if a_is_nonnegative:
        return low, high
    low = low - multiply(negative, b.upper)
    high = high - multiply(negative, b.lower)
    return low, high


def _interval_times_interval(
    multiply: Multiply,
    a: Interval,
    b: Interval,
    *,
    a_is_nonnegative: bool,
) -> Ends:
    # A product of a+ >= 0 is smallest at the lower end of a+ where b is positive, and at the upper
    # end of a+ where b is negative.
    b_low_positive = jnp.maximum(b.lower, 0)
    b_high_positive = jnp.maximum(b.upper, 0)
    b_low_negative = jnp.minimum(b.lower, 0)
    b_high_negative = jnp.minimum(b.upper, 0)
    # The ends of a+.
    least = jnp.maximum(a.lower, 0)
    most = jnp.maximum(a.upper, 0)
    low = multiply(least, b_low_positive) + multiply(most, b_low_negative)
    high = multiply(most, b_high_positive) + multiply(least, b_high_negative)
    if a_is_nonnegative:
        return low, high
    # The ends of a-.
    least = jnp.maximum(-a.upper, 0)
    most = jnp.maximum(-a.lower, 0)
    most_negative = multiply(most, b_high_positive) + multiply(least, b_high_negative)
    low = low - most_negative
    least_negative = multiply(least, b_low_positive) + multiply(most, b_low_negative)
    high = high - least_negative
    return low, high


def _midpoint_radius(
    multiply: Multiply,
    a: Operand,
    b: Operand,
    terms: int,
) -> Ends:
    """Bounds |a b - a_m b_m| <= |a_m| b_r + a_r (|b_m| + b_r) (Rump 1999)."""
    b_mid = (lower(b) + upper(b)) / 2
    # The midpoint is rounded, so its distances to the ends may differ.
    b_radius = jnp.maximum(upper(b) - b_mid, b_mid - lower(b))
    # The second term covers the rounding of the midpoints, the products and their sums.
    b_radius = b_radius + slack(b.dtype, terms + 8) * magnitude(b)
    if not isinstance(a, Interval):
        mid = multiply(a, b_mid)
        radius = multiply(jnp.abs(a), b_radius)
    else:
        a_mid = (a.lower + a.upper) / 2
        a_radius = jnp.maximum(a.upper - a_mid, a_mid - a.lower)
        mid = multiply(a_mid, b_mid)
        radius = multiply(jnp.abs(a_mid), b_radius)
        radius = radius + multiply(a_radius, jnp.abs(b_mid) + b_radius)
    return mid - radius, mid + radius


def _unless_too_large(ends: Ends, largest_term: jax.Array, terms: int) -> Ends:
    """Replaces ends of a sum by infinite ones where a part of it may overflow, unlike the sum.

    In float32 2 * 2e38 - 1e38 is inf, which is no lower end. Where that may happen depends on the
    largest magnitudes of the factors, so the result stays isotonic.
    """
    low, high = ends
    # NaN fits nowhere. Four such sums may be added.
    fits = largest_term < float(jnp.finfo(low.dtype).max) / (8 * terms)
    return jnp.where(fits, low, -jnp.inf), jnp.where(fits, high, jnp.inf)


def _largest_term(a: Operand, b: Operand, dims: Dims) -> jax.Array:
    """Bounds |a_n b_n| for each entry of a dot product by the largest |a_n| and |b_n|."""
    (a_contract, b_contract), _ = dims
    # [..., 1] with the contracted axes of length 1, so that an entry is one product.
    a_top = jnp.max(magnitude(a), axis=a_contract, keepdims=True, initial=0)
    b_top = jnp.max(magnitude(b), axis=b_contract, keepdims=True, initial=0)
    return lax.dot_general(a_top, b_top, dims, precision=lax.Precision.HIGHEST)


def _product_result(
    eqn: Equation,
    ends: Ends,
    terms: int,
    *,
    nonnegative: bool,
) -> Box:
    """Adds the underflow of up to eight sums of products to the ends."""
    return narrow(eqn, *ends, nonnegative=nonnegative, underflows=8 * terms + 8)


def _check_float(eqn: Equation) -> None:
    """Raises NoRuleError if the result has no floating dtype."""
    if not is_float(eqn.outputs[0]):
        raise NoRuleError("It does not support products over an interval of integers.")


# --- Convolutions -------------------------------------------------------------------------------

_GEOMETRY = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
)


@register_rule("conv_general_dilated")
def _conv(
    eqn: Equation,
    a: Operand,
    b: Operand,
) -> Operand:
    _check_float(eqn)
    geometry = {name: eqn.params[name] for name in _GEOMETRY}
    kernel_axes = eqn.params["dimension_numbers"].rhs_spec[1:]  # all but the output channels
    terms = math.prod(b.shape[axis] for axis in kernel_axes)

    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        # What is bounded is computed in full: a TPU would multiply in bfloat16.
        return lax.conv_general_dilated(x, y, **geometry, precision=lax.Precision.HIGHEST)

    nonnegative = are_nonnegative(a, b)
    a = at_least_float32(a)
    b = at_least_float32(b)
    ends = bilinear_bounds(eqn.product, multiply, a, b, terms)
    if not nonnegative:
        largest_term = jnp.max(magnitude(a), initial=0) * jnp.max(magnitude(b), initial=0)
        ends = _unless_too_large(ends, largest_term, max(terms, 1))
    return _product_result(eqn, ends, terms, nonnegative=nonnegative)


# --- Dot products -------------------------------------------------------------------------------


@register_rule("dot_general")
def _dot_general(
    eqn: Equation,
    a: Operand,
    b: Operand,
) -> Operand:
    _check_float(eqn)
    a = at_least_float32(a)
    b = at_least_float32(b)
    dims = eqn.params["dimension_numbers"]
    (a_contract, _), (a_batch, _) = dims
    terms = math.prod(a.shape[axis] for axis in a_contract)
    # The tight forms are written for products without batch axes.
    if eqn.product != "tight" or a_batch:
        return _general_product(eqn, a, b, terms)
    if terms == 1:
        arrays, multiply = outer_parts(eqn, a, b)
        result = multiply(*arrays)
    elif terms <= _UNROLLED and _signs_are_unknown(a, b):
        ends = _short_sum(a, b, dims)
        result = _product_result(eqn, ends, terms, nonnegative=False)
    else:
        result = _general_product(eqn, a, b, terms)
    use_zero_sum(eqn, result, a, b, dims)
    _note_differences(result, a, b, dims)
    return result


def _signs_are_unknown(a: Operand, b: Operand) -> bool:
    """Returns whether `bilinear_bounds` may be too wide."""
    has_sign = is_nonnegative(a) or is_nonnegative(b)
    are_intervals = isinstance(a, Interval) and isinstance(b, Interval)
    return are_intervals and not has_sign


def _general_product(
    eqn: Equation,
    a: Operand,
    b: Operand,
    terms: int,
) -> Box:
    dims = eqn.params["dimension_numbers"]
    roundings, multiply = dot_product(dims, terms)
    ends = bilinear_bounds(eqn.product, multiply, a, b, roundings)
    nonnegative = are_nonnegative(a, b)
    if not nonnegative:  # otherwise no part of a sum exceeds the sum
        ends = _unless_too_large(ends, _largest_term(a, b, dims), max(terms, 1))
    return _product_result(eqn, ends, terms, nonnegative=nonnegative)


def dot_product(dims: Dims, terms: int) -> tuple[int, Multiply]:
    """Returns the number of roundings of an entry, and a dot product in full precision."""
    (a_contract, b_contract), (a_batch, _) = dims

    def plain(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST)

    # Blocks are cut along one contracted axis.
    if terms <= _LONG or len(a_contract) > 1 or a_batch:
        return terms, plain
    # About sqrt(terms) blocks. Their number is a power of two, so halves can be added.
    root_of_terms = math.sqrt(terms)
    levels = int(math.log2(root_of_terms))
    blocks = 2**levels
    size = math.ceil(terms / blocks)
    missing = blocks * size - terms

    def cut(x: jax.Array, axis: int) -> jax.Array:
        """Moves the contracted axis to the end, pads it with zeros and cuts it into blocks."""
        x = jnp.moveaxis(x, axis, -1)
        lead_padding = [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x, [*lead_padding, (0, missing)])
        return x.reshape(*x.shape[:-1], blocks, size)

    def blocked(x: jax.Array, y: jax.Array) -> jax.Array:
        x = cut(x, a_contract[0])
        y = cut(y, b_contract[0])
        contracted = ((x.ndim - 1,), (y.ndim - 1,))
        block_axes = ((x.ndim - 2,), (y.ndim - 2,))
        block_dims = (contracted, block_axes)
        block_sums = lax.dot_general(x, y, block_dims, precision=lax.Precision.HIGHEST)
        # XLA may merge a reduction over a batch axis into the dot product, so the blocks are added
        # one by one.
        for level in reversed(range(levels)):
            block_sums = block_sums[: 2**level] + block_sums[2**level :]
        return block_sums[0]

    return size + levels, blocked  # inside of a block, and one for each halving


# --- Short sums ---------------------------------------------------------------------------------


def _short_sum(
    a: Operand,
    b: Operand,
    dims: Dims,
) -> Ends:
    """Bounds a short sum of exact products."""
    (a_contract, b_contract), _ = dims
    a = axes_last(a, a_contract)
    b = axes_last(b, b_contract)
    terms = a.shape[-1]
    b = inflate(b, terms + 2)
    # Two matrices: all products in one array are slower to compute, and faster to compile.
    are_matrices = math.prod(a.shape) > terms and math.prod(b.shape) > terms
    if are_matrices:
        products = summable(Box(*_all_products(a, b, shared=1)), terms)
        low = jnp.sum(products.lower, axis=-1)
        high = jnp.sum(products.upper, axis=-1)
        return low, high
    pairs = [_all_products(_entry(a, i), _entry(b, i)) for i in range(terms)]
    boxes = [summable(Box(*ends), terms) for ends in pairs]
    lows = [box.lower for box in boxes]
    highs = [box.upper for box in boxes]
    low = functools.reduce(jnp.add, lows)
    high = functools.reduce(jnp.add, highs)
    return low, high


def _entry(x: Operand, i: int) -> Operand:
    return moved(lambda v: v[..., i], x)


def _all_products(
    x: Operand,
    y: Operand,
    shared: int = 0,
) -> Ends:
    """Pairs every entry of x with every entry of y, except along the last `shared` axes.

    x [3, 7] and y [5, 7] with one shared axis give [3, 5, 7].
    """

    def with_axes(
        v: Operand,
        count: int,
        behind: int,
    ) -> Operand:
        """Inserts `count` axes of length 1 before the last `behind` axes."""
        place = len(v.shape) - behind
        shape = (*v.shape[:place], *(1,) * count, *v.shape[place:])
        return moved(lambda ends: ends.reshape(shape), v)

    x_axes = len(x.shape) - shared
    y_axes = len(y.shape)
    x = with_axes(x, y_axes - shared, shared)
    y = with_axes(y, x_axes, y_axes)
    return corner_products(x, y)


# --- Outer products -----------------------------------------------------------------------------


def is_outer(eqn: Any) -> bool:
    """Returns whether each entry of a dot_general is one product."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    terms = math.prod(shape[axis] for axis in contracted)
    return terms == 1 and not batch


def outer_parts(
    eqn: Equation,
    a: Operand,
    b: Operand,
) -> tuple[list[jax.Array], Callable[..., Box]]:
    """Splits the rule of an outer product into arrays and a function of these arrays.

    The arrays have the sizes of the operands. A caller that keeps them in memory prevents XLA from
    computing them again for every entry.
    """
    (a_contract, b_contract), _ = eqn.params["dimension_numbers"]
    a = at_least_float32(a)
    b = at_least_float32(b)
    if a_contract:
        a = _entry(axes_last(a, a_contract), 0)
        b = _entry(axes_last(b, b_contract), 0)
    # One operand is widened by the rounding instead of every entry.
    # One factor of every entry is enough, and the products are many more than the factors.
    if isinstance(a, Interval):
        a = inflate(a, 2, keep_sign=True)
    else:
        b = inflate(b, 2, keep_sign=True)
    a_is_point = not isinstance(a, Interval)
    b_is_point = not isinstance(b, Interval)
    a_sign = is_nonnegative(a)
    b_sign = is_nonnegative(b)

    def multiply(*arrays: jax.Array) -> Box:
        # [I, 1] times [1, J] for operands [I] and [J].
        y_axes = (1,) * arrays[2].ndim
        x_axes = (1,) * arrays[0].ndim
        x = [v.reshape(*v.shape, *y_axes) for v in arrays[:2]]
        y = [v.reshape(*x_axes, *v.shape) for v in arrays[2:]]
        if a_is_point:
            ends = _product_of_parts(y, x)
        elif b_is_point:
            ends = _product_of_parts(x, y)
        else:
            a_box = Box(*x, nonnegative=a_sign)
            b_box = Box(*y, nonnegative=b_sign)
            ends = corner_products(a_box, b_box)
        return _product_result(eqn, ends, 1, nonnegative=a_sign and b_sign)

    return [*_ends_or_parts(a), *_ends_or_parts(b)], multiply


def _ends_or_parts(x: Operand) -> list[jax.Array]:
    """Returns the ends of an interval, or the positive and the negative part of a point."""
    if isinstance(x, Interval):
        return [x.lower, x.upper]
    positive = jnp.maximum(x, 0)
    negative = jnp.minimum(x, 0)
    return [positive, negative]


def _product_of_parts(
    ends: Sequence[jax.Array],
    parts: Sequence[jax.Array],
) -> Ends:
    """Multiplies an interval with a point that is given as its positive and negative part."""
    low, high = ends
    positive, negative = parts
    # One of two terms is zero. A minimum of two products that keeps NaN would take longer.
    smallest = low * positive + high * negative
    largest = high * positive + low * negative
    return smallest, largest


# --- Facts: entries that sum to zero (T3), differences of logits (T2) ---------------------------


def use_zero_sum(
    eqn: Equation,
    result: Box,
    a: Operand,
    b: Operand,
    dims: Dims,
) -> None:
    """Tightens sum_j d_j w_j by sum_j d_j (w_j - w_c) if the entries d_j sum to zero (T3).

    Both sums are equal for every c. All c are tried and the bounds intersected. A c that is chosen
    by looking at endpoints would not be isotonic.
    """
    (a_contract, b_contract), _ = dims
    # Entries sum to zero along the last axis alone.
    if len(a_contract) != 1:
        return
    a_axis = a_contract[0]
    b_axis = b_contract[0]
    if _sums_to_zero(a, a_axis):
        rows = axes_last(b, [b_axis])
    elif _sums_to_zero(b, b_axis):
        rows = axes_last(a, [a_axis])
    else:
        return
    size = rows.shape[-1]
    last = (len(rows.shape) - 1,)
    for c in range(size):
        centred = _minus_entry(rows, c)
        if _sums_to_zero(a, a_axis):
            contracted = ((a_axis,), last)
            low, high = _short_sum(a, centred, (contracted, _NO_BATCH))
        else:
            contracted = (last, (b_axis,))
            low, high = _short_sum(centred, b, (contracted, _NO_BATCH))
        bounds = narrow(eqn, low, high, underflows=8 * size)
        # Both bounds hold, so the tighter end of each does.
        result.lower = jnp.maximum(result.lower, bounds.lower)
        result.upper = jnp.minimum(result.upper, bounds.upper)


def _sums_to_zero(x: Operand, axis: int) -> bool:
    """Returns whether entries along an axis sum to zero, and are few."""
    if not isinstance(x, Box) or not x.zero_sum:
        return False
    return axis == x.ndim - 1 and x.shape[-1] <= _CENTRED


def _minus_entry(rows: Operand, c: int) -> Box:
    """Bounds w_j - w_c along the last axis, which is exactly 0 for j = c."""
    entry = slice(c, c + 1)
    below = lower(rows) - upper(rows)[..., entry]
    above = upper(rows) - lower(rows)[..., entry]
    below, above = widen(below, above)
    lead = (1,) * (len(rows.shape) - 1)
    # Outward rounding has moved it off 0.
    is_itself = np.arange(rows.shape[-1]) == c
    is_itself = is_itself.reshape(*lead, -1)
    below = jnp.where(is_itself, 0, below)
    above = jnp.where(is_itself, 0, above)
    return Box(below, above)


def _note_differences(
    result: Box,
    a: Operand,
    b: Operand,
    dims: Dims,
) -> None:
    """Stores how to bound z_j - z_c = sum_n h_n (w_nj - w_nc), for a result z = h w (T2)."""
    (a_contract, b_contract), _ = dims
    # That is without batch axes, and with one contracted axis.
    is_plain = len(a.shape) + len(b.shape) - 2 == result.ndim
    if len(a_contract) != 1 or not is_plain:
        return
    hidden = a
    weights = b
    hidden_axis = a_contract[0]
    weights_axis = b_contract[0]
    weights_are_first = len(b.shape) == 1 and len(a.shape) == 2
    if weights_are_first:  # w^T h
        hidden = b
        weights = a
        hidden_axis, weights_axis = weights_axis, hidden_axis
    if len(weights.shape) != 2:
        return
    # A softmax bounds all pairs of at most `PAIRWISE` logits, and asks for no others.
    logits = weights.shape[1 - weights_axis]
    if not 1 < logits <= PAIRWISE:
        return
    terms = hidden.shape[hidden_axis]

    # A function, because only a softmax asks for them, and they take K^2 products.
    def differences() -> jax.Array:
        low = jnp.moveaxis(lower(weights), weights_axis, 0)  # [n, K]
        high = jnp.moveaxis(upper(weights), weights_axis, 0)
        below = low[:, :, None] - high[:, None, :]  # [n, K, K]
        above = high[:, :, None] - low[:, None, :]
        below, above = widen(below, above)
        gaps = Box(off_diagonal(below), off_diagonal(above))
        product = (((hidden_axis,), (0,)), _NO_BATCH)
        roundings, multiply = dot_product(product, terms)
        ends = bilinear_bounds("tight", multiply, hidden, gaps, roundings)
        # [..., K, K], of which entry [j, c] is the upper end of z_j - z_c.
        _, top = _unless_too_large(ends, _largest_term(hidden, gaps, product), max(terms, 1))
        return off_diagonal(top + 8 * terms * tiny(top.dtype))

    result.differences = differences
