"""Formulas on endpoints that rules of several kinds share.

A pair `Ends` is (lower, upper). Every formula is monotone in the endpoints, which makes the rules
inclusion-isotonic.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.transforms.boxes import (
    Box,
    Equation,
    Interval,
    Operand,
    are_nonnegative,
    is_float,
    is_nonnegative,
    is_unsigned,
    lower,
    magnitude,
    moved,
    slack,
    tiny,
    upper,
    widen,
    without_overflow,
)

Ends = tuple[jax.Array, jax.Array]  # (lower, upper)


class NoRuleError(Exception):
    """The error of a rule that does not cover its operands."""


def check_positions(positions: Sequence[Operand]) -> None:
    """Raises NoRuleError if an index depends on an interval."""
    if any(isinstance(x, Interval) for x in positions):
        raise NoRuleError("Its index or predicate depends on an interval.")


# --- Smallest and largest values ----------------------------------------------------------------


def least(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the smallest of several arrays, entry by entry."""
    return functools.reduce(jnp.minimum, arrays)


def most(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the largest of several arrays, entry by entry."""
    return functools.reduce(jnp.maximum, arrays)


def empty_hull(dtype: Any) -> tuple[Any, Any]:
    """Returns (largest, smallest) value of a dtype, the endpoints of the hull of no value."""
    if dtype == jnp.bool_:
        return True, False
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf, -jnp.inf
    limits = jnp.iinfo(dtype)
    # A Python int above 2^31 would be read as int32.
    return np.asarray(limits.max, dtype), np.asarray(limits.min, dtype)


def hull_of_cases(index: Operand, cases: Sequence[Operand]) -> Box:
    """Returns the hull of the cases that an index (a boolean or an integer) allows."""
    # A boolean selects case 0 or 1.
    first = jnp.asarray(lower(index), jnp.int32)
    last = jnp.asarray(upper(index), jnp.int32)
    shape = np.shape(lower(cases[0]))
    dtype = cases[0].dtype
    # The hull of no case. Each case that is possible widens it.
    low, high = (jnp.full(shape, end, dtype) for end in empty_hull(dtype))
    for i, case in enumerate(cases):
        possible = (first <= i) & (last >= i)
        smaller = jnp.minimum(low, lower(case))
        low = jnp.where(possible, smaller, low)
        larger = jnp.maximum(high, upper(case))
        high = jnp.where(possible, larger, high)
    return Box(low, high, nonnegative=are_nonnegative(*cases))


def absolute(x: Operand) -> Box:
    """Bounds |x|."""
    if is_unsigned(x.dtype):  # -x would wrap around
        return Box(lower(x), upper(x), nonnegative=True)
    # The lower end is negative where x may be zero. Box raises it to 0.
    low = jnp.maximum(lower(x), -upper(x))
    return Box(low, magnitude(x), nonnegative=True)


def without_nan(x: Operand) -> Operand:
    """Replaces NaN endpoints, where nothing is known, by infinite endpoints."""
    low = lower(x)
    high = upper(x)
    if not is_float(low):
        return x
    low = jnp.where(jnp.isnan(low), -jnp.inf, low)
    high = jnp.where(jnp.isnan(high), jnp.inf, high)
    return Box(low, high)


# --- Rounding -----------------------------------------------------------------------------------


def rounded(low: jax.Array, high: jax.Array) -> Ends:
    """Widens endpoints by one rounding. Integers have none."""
    if is_float(low):
        return widen(low, high)
    return (low, high)


def narrow(
    eqn: Equation,
    low: jax.Array,
    high: jax.Array,
    *,
    nonnegative: bool = False,
    underflows: int = 0,
) -> Box:
    """Converts a result computed in float32 to the equation's dtype and rounds it outward.

    Each of `underflows` operations may have lost up to the smallest normal number.
    """
    if underflows:
        underflow = underflows * tiny(low.dtype)
        low = low - underflow
        high = high + underflow
    dtype = eqn.outputs[0].dtype
    if low.dtype != dtype:
        # It rounds to nearest, so the ends move outward once more.
        low = low.astype(dtype)
        high = high.astype(dtype)
        low, high = widen(low, high)
    low, high = without_overflow(low, high)
    return Box(low, high, nonnegative=nonnegative)


def summable(x: Operand, terms: int) -> Box:
    """Widens the terms of a sum so that no part of it overflows inward.

    In float32 3e38 + 3e38 - 3e38 is inf, which is no lower end of a sum of 3e38. So a lower end is
    at most a share of the largest float, and an upper end at least minus that. The largest float
    itself would not do. It is the same for a smaller box, so the sum stays isotonic.
    """
    limit = float(jnp.finfo(x.dtype).max) / (2 * max(terms, 1))
    return Box(jnp.minimum(lower(x), limit), jnp.maximum(upper(x), -limit))


def around(
    ends: Ends,
    scales: Ends,
    roundings: float,
) -> Box:
    """Moves each end outward by the error of roundings of 1 + |scale|. An infinite end stays."""

    def moved_end(
        end: jax.Array,
        scale: jax.Array,
        sign: int,
    ) -> jax.Array:
        is_finite = jnp.isfinite(end)
        error = sign * slack(end.dtype, roundings) * (1 + jnp.abs(scale))
        # Its scale may be infinite too, and inf - inf would be NaN.
        return jnp.where(is_finite, end + error, end)

    low = moved_end(ends[0], scales[0], -1)
    high = moved_end(ends[1], scales[1], +1)
    low, high = without_overflow(low, high)
    return Box(low, high)


# --- Products -----------------------------------------------------------------------------------


def corner_products(x: Operand, y: Operand) -> Ends:
    """Returns the smallest and the largest product of endpoints.

    A product of intervals is extreme at two of its four corners. A known sign or a point says
    which, and the other corners are not computed.
    """
    if are_nonnegative(x, y):
        low = lower(x) * lower(y)
        high = upper(x) * upper(y)
        return low, high
    # The factor with more known about it becomes y if it is a point, and x if only its sign is
    # known.
    if not isinstance(x, Interval) or is_nonnegative(y):
        x, y = y, x
    if not isinstance(y, Interval):
        low = lower(x) * y
        high = upper(x) * y
        if is_nonnegative(y):
            return low, high
        return jnp.minimum(low, high), jnp.maximum(low, high)
    if is_nonnegative(x):
        x_low = lower(x)
        x_high = upper(x)
        # The sign of an end of y decides which end of x it meets.
        low = least([lower(y) * x_low, lower(y) * x_high])
        high = most([upper(y) * x_low, upper(y) * x_high])
        return low, high
    return ends_at_corners(jnp.multiply, x, y)


def ends_at_corners(
    function: Callable[[jax.Array, jax.Array], jax.Array],
    x: Operand,
    y: Operand,
) -> Ends:
    """Returns the smallest and the largest value of a function of endpoints."""
    corners = []
    for end_of_x in (lower(x), upper(x)):
        for end_of_y in (lower(y), upper(y)):
            corners.append(function(end_of_x, end_of_y))
    return least(corners), most(corners)


# --- Axes ---------------------------------------------------------------------------------------


def axes_last(x: Operand, axes: Sequence[int]) -> Operand:
    """Moves axes to the end and merges them: [2, 3, 4] with axes (0, 1) becomes [4, 6]."""
    others = [axis for axis in range(len(x.shape)) if axis not in axes]

    def move(v: jax.Array) -> jax.Array:
        shape = [v.shape[axis] for axis in others]
        return jnp.transpose(v, (*others, *axes)).reshape(*shape, -1)

    return moved(move, x)


def sum_of_others(x: jax.Array) -> jax.Array:
    """Sums over the last axis without the entry itself: [1, 2, 4] becomes [6, 5, 3].

    It adds the sums before and behind each entry. A subtraction from the total would cancel.
    """
    size = x.shape[-1]
    if size == 1:
        return jnp.zeros_like(x)
    zero = jnp.zeros((*x.shape[:-1], 1), x.dtype)
    up_to_here = jnp.cumsum(x, axis=-1)
    # Of the entries [a, b, c]: before [0, a, a + b], behind [b + c, c, 0].
    before = jnp.concatenate([zero, up_to_here[..., :-1]], axis=-1)
    backwards = jnp.flip(x, -1)
    from_here = jnp.flip(jnp.cumsum(backwards, axis=-1), -1)
    behind = jnp.concatenate([from_here[..., 1:], zero], axis=-1)
    return before + behind


def off_diagonal(x: jax.Array) -> jax.Array:
    """Sets the diagonal of the last two axes to zero, since z_c - z_c = 0."""
    size = x.shape[-1]
    lead = (1,) * (x.ndim - 2)
    diagonal = np.eye(size, dtype=bool).reshape(*lead, size, size)
    return jnp.where(diagonal, jnp.zeros_like(x), x)


def log_sum_exp(x: jax.Array, axis: int) -> jax.Array:
    """Returns log(sum(exp(x))) over an axis. The largest entry is subtracted against overflow."""
    top = jnp.max(x, axis=axis, keepdims=True)
    shift = jnp.where(jnp.isfinite(top), top, 0)  # inf - inf would be NaN
    squeezed = jnp.squeeze(shift, axis)
    total = jnp.sum(jnp.exp(x - shift), axis=axis)
    return squeezed + jnp.log(total)
