"""Rules of conversions between dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.transforms.boxes import (
    Box,
    Equation,
    Interval,
    Operand,
    is_float,
    is_nonnegative,
    is_unsigned,
    lower,
    register_rule,
    upper,
    widen,
)
from jaxdp.transforms.interval_rules.endpoints import Ends, empty_hull


@register_rule("convert_element_type")
def _convert(eqn: Equation, x: Operand) -> Operand:
    low, high = eqn.ends(x)
    target = jnp.dtype(eqn.outputs[0].dtype)
    if not jnp.issubdtype(target, jnp.floating):
        if isinstance(x, Interval):
            return _to_integer(x, low, high)
        return low
    is_exact = _fits(x, target)
    if is_exact and not isinstance(x, Interval):
        return low
    if not is_exact:
        low, high = _rounded_ends(x.dtype, low, high)
    nonnegative = is_nonnegative(x) or is_unsigned(x.dtype)
    result = Box(low, high, nonnegative=nonnegative)
    # Rounding would break both facts.
    if is_exact and isinstance(x, Box):
        result.zero_sum = x.zero_sum
        result.differences = x.differences
    return result


def _fits(x: Operand, target: Any) -> bool:
    """Returns whether every value of x is a number of the float dtype `target`."""
    source = jnp.dtype(x.dtype)
    to = jnp.finfo(target)
    if jnp.issubdtype(source, jnp.floating):
        of = jnp.finfo(source)
        has_digits = of.nmant <= to.nmant
        # The smallest subnormal number is 2^(minexp - nmant).
        has_smallest = of.minexp - of.nmant >= to.minexp - to.nmant
        return has_digits and has_smallest and of.maxexp <= to.maxexp
    if isinstance(x, np.ndarray | np.generic):  # a constant of the program
        converted = np.asarray(x).astype(target)
        return bool(np.all(converted.astype(source) == x))
    # Any number of the dtype, because a traced value is not known.
    return source == jnp.bool_ or source.itemsize * 8 <= to.nmant


def _rounded_ends(
    source: Any,
    low: jax.Array,
    high: jax.Array,
) -> Ends:
    """Rounds converted ends outward. Ends that are small integers have no error and stay."""
    below, above = widen(low, high)
    if not jnp.issubdtype(source, jnp.integer):
        return below, above
    to = jnp.finfo(low.dtype)
    # Integers up to 2^(nmant + 1) are converted exactly. The range of float16 ends earlier.
    limit = min(2.0 ** (to.nmant + 1), float(to.max))
    # Widened ends stop at the limit, from either side. Otherwise a smaller box could have a larger
    # result.
    is_large = low >= limit
    if_large = jnp.maximum(below, limit)
    otherwise = jnp.where(low > -limit, low, below)
    below = jnp.where(is_large, if_large, otherwise)
    is_small = high <= -limit
    if_small = jnp.minimum(above, -limit)
    otherwise = jnp.where(high < limit, high, above)
    above = jnp.where(is_small, if_small, otherwise)
    return below, above


def _to_integer(
    x: Interval,
    low: jax.Array,
    high: jax.Array,
) -> Box:
    """Converts endpoints to integers or booleans.

    Where a value does not fit, the result is the whole range, because overflow wraps.
    """
    if low.dtype == jnp.bool_:
        is_nonzero = (x.lower > 0) | (x.upper < 0)
        is_zero = (x.lower == 0) & (x.upper == 0)
        return Box(is_nonzero, ~is_zero)
    if x.dtype == jnp.bool_:
        return Box(low, high)
    largest, smallest = empty_hull(low.dtype)

    def fits(end: jax.Array, converted: jax.Array) -> jax.Array:
        if is_float(end):
            # Digits behind the point are cut off, so numbers up to `largest` + 1 fit.
            return (end >= float(smallest)) & (end < float(largest) + 1)
        # A conversion between integers that loses nothing can be undone.
        is_same = converted.astype(end.dtype) == end
        # A number that wraps may be converted back to itself, with the other sign.
        has_same_sign = (converted < 0) == (end < 0)
        return is_same & has_same_sign

    both_fit = fits(x.lower, low) & fits(x.upper, high)
    low = jnp.where(both_fit, low, smallest)
    high = jnp.where(both_fit, high, largest)
    return Box(low, high)


# The operations of integers that may wrap around.
WRAPPING = {
    *("add", "add_any", "sub", "mul", "x_plus_xy", "neg", "abs", "square", "integer_pow"),
    *("reduce_sum", "cumsum", "reduce_window_sum", "scatter-add"),
}


def as_real(x: Operand) -> Box:
    """Returns float32 bounds of integers, which do not wrap around."""
    low = lower(x).astype(jnp.float32)
    high = upper(x).astype(jnp.float32)
    return Box(*widen(low, high))


def whole_if_wrapping(result: Operand, real: Operand) -> Box:
    """Returns bounds of integers, and the whole range where they may have wrapped around.

    Args:
      result: Bounds computed in integers.
      real: Bounds of the same numbers by `as_real`.
    """
    largest, smallest = empty_hull(result.dtype)

    def margin(limit: float) -> float:
        # The rounding of large numbers exceeds 1.
        return 0.5 if abs(limit) < 2.0**20 else -(2.0**-20) * abs(limit)

    above = float(largest) + margin(float(largest))
    below = float(smallest) - margin(float(smallest))
    may_wrap = (upper(real) >= above) | (lower(real) <= below)
    low = jnp.where(may_wrap, smallest, lower(result))
    high = jnp.where(may_wrap, largest, upper(result))
    return Box(low, high, nonnegative=is_unsigned(result.dtype))


@register_rule("reduce_precision")
def _reduce_precision(eqn: Equation, x: Operand) -> Operand:
    """Bounds both the rounded and the given value, because the rounding is intended."""
    low, high = eqn.ends(x)
    below = jnp.minimum(low, lower(x))
    above = jnp.maximum(high, upper(x))
    return Box(below, above, nonnegative=is_nonnegative(x))
