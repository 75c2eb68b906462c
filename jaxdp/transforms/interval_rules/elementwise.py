"""Rules of elementwise functions: monotone functions, powers, trigonometry and arithmetic."""

import functools
import math
from collections.abc import Callable
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
    both,
    is_float,
    is_nonnegative,
    lower,
    magnitude,
    outward,
    register_rule,
    slack,
    tiny,
    upper,
    widen,
)
from jaxdp.transforms.interval_rules.endpoints import (
    Ends,
    NoRuleError,
    absolute,
    around,
    corner_products,
    ends_at_corners,
    least,
    most,
    off_diagonal,
    rounded,
)

_NO_INTEGER_DIVISION = "It does not support integer division by an interval or of an interval."


# --- Monotone functions -------------------------------------------------------------------------


def _monotone(
    ulps: float,
    below: float = -math.inf,
    above: float = math.inf,
    *,
    start: float = -math.inf,
    inputs: float = 0,
    falls: bool = False,
) -> Callable[..., Operand]:
    """Builds the rule of an increasing (or falling) function on [start, inf).

    Args:
      ulps: The error of the function, in units in the last place of the result.
      below, above: The range of the function.
      start: The start of its domain.
      inputs: Roundings of the argument, where implementations round it before they call exp.
      falls: Whether the function is falling.
    """

    def rule(eqn: Equation, x: Operand) -> Operand:
        low = lower(x)
        high = upper(x)
        if inputs:
            low, high = widen(low, high, inputs)
        if falls:
            low, high = high, low
        if start > -math.inf:
            # Points outside of the domain have no value that a bound could contain.
            low = jnp.maximum(low, start)
            high = jnp.maximum(high, start)
        low = eqn.bind(low)[0]
        high = eqn.bind(high)[0]
        # A unit in the last place is at most eps, which is two roundings of eps / 2.
        low, high = widen(low, high, 2 * ulps)
        # A widened end may lie outside of the range.
        low = jnp.maximum(low, below)
        high = jnp.minimum(high, above)
        return Box(low, high, nonnegative=below >= 0)

    return rule


# Units in the last place that `jaxdp.interval` assumes. They are measured in tests.
_MONOTONE_FUNCTIONS = {
    "exp": _monotone(8, below=0),
    "exp2": _monotone(8, below=0, inputs=4),
    "expm1": _monotone(8),
    "log": _monotone(8, start=0),
    "log2": _monotone(8, start=0),
    "log1p": _monotone(8, start=-1),
    "sqrt": _monotone(1, below=0, start=0),
    "rsqrt": _monotone(4, below=0, start=0, falls=True),
    "cbrt": _monotone(8),
    "sinh": _monotone(8, inputs=4),
    "asinh": _monotone(8),
    "atan": _monotone(8),
    "tanh": _monotone(8, -1, 1),
    "logistic": _monotone(8, 0, 1),
    "erf": _monotone(16, -1, 1),
    "erfc": _monotone(16, 0, 2, inputs=4, falls=True),
}
for _name, _rule in _MONOTONE_FUNCTIONS.items():
    register_rule(_name)(_rule)


# --- Powers -------------------------------------------------------------------------------------


@register_rule("square", "integer_pow")
def _integer_pow(eqn: Equation, x: Operand) -> Operand:
    exponent = eqn.params.get("y", 2)
    if exponent == 0:
        return jnp.ones_like(lower(x))
    # JAX inverts the power too, and does not raise the inverse.
    if exponent < 0:
        return _reciprocal(_power(x, -exponent))
    return _power(x, exponent)


def _power(x: Operand, exponent: int) -> Box:
    is_odd = exponent % 2 == 1
    base = x if is_odd else absolute(x)  # even powers fall on the left of zero

    def power(v: jax.Array) -> jax.Array:
        return lax.integer_pow(v, exponent)

    low, high = both(power, base)
    if is_float(low):
        # Squaring over and over takes fewer multiplications than the exponent.
        low, high = widen(low, high, 2 * exponent)
    return Box(low, high, nonnegative=is_nonnegative(base))


@register_rule("one_minus_square")
def _one_minus_square(eqn: Equation, x: Operand) -> Operand:
    """Bounds 1 - x^2, which JAX computes as (1 + x)(1 - x)."""
    high, low = eqn.ends(absolute(x))  # it falls with |x|
    return Box(*widen(low, high, 4))


@register_rule("exp_neg_sq")
def _exp_neg_sq(eqn: Equation, x: Operand) -> Operand:
    """Bounds exp(-x^2)."""
    square = _power(x, 2)
    low = jnp.exp(-square.upper)
    high = jnp.exp(-square.lower)
    low, high = widen(low, high, 16)
    low = jnp.maximum(low, 0)
    return Box(low, high, nonnegative=True)


@register_rule("pow")
def _pow(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    is_known = is_nonnegative(x)
    base = x if is_known else absolute(x)

    def power(base_end: jax.Array, exponent: jax.Array) -> jax.Array:
        return eqn.bind(base_end, exponent)[0]

    # x^y is monotone in x >= 0 and monotone in y, so its ends are at corners.
    low, high = widen(*ends_at_corners(power, base, y), 32)
    if not is_known:  # the power of a negative base has either sign, or is NaN
        low = jnp.where(lower(x) >= 0, low, -high)
    return Box(low, high, nonnegative=is_known)


# --- Sums of two exponentials -------------------------------------------------------------------


@register_rule("logaddexp", "logaddexp2")
def _logaddexp(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    """Bounds log(exp(x) + exp(y)), which rises with x and with y."""
    ends = eqn.ends(x, y)
    # It is max(x, y) plus a logarithm. The two may cancel, so the error scales with the maximum.
    scale_low = jnp.maximum(lower(x), lower(y))
    scale_high = jnp.maximum(upper(x), upper(y))
    return around(ends, (scale_low, scale_high), 24)


@register_rule("exp_share", "exp2_share")
def _exp_share(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    """Bounds exp(x) / (exp(x) + exp(y)) = sigmoid(x - y), or the same with powers of two."""
    low, high = _difference(x, y)
    if eqn.name == "exp2_share":
        # 2^x / (2^x + 2^y) = sigmoid((x - y) log 2).
        low = low * math.log(2)
        high = high * math.log(2)
        low, high = widen(low, high, 2)
    low = jax.nn.sigmoid(low)
    high = jax.nn.sigmoid(high)
    low, high = widen(low, high, 16)
    low = jnp.maximum(low, 0)
    high = jnp.minimum(high, 1)
    return Box(low, high, nonnegative=True)


# --- Trigonometry -------------------------------------------------------------------------------


@register_rule("sin", "cos")
def _sine(eqn: Equation, x: Operand) -> Operand:
    low, high = widen(lower(x), upper(x), 4)
    turn = 2 * math.pi
    top_phase = math.pi / 2 if eqn.name == "sin" else 0.0

    def reaches(phase: float) -> jax.Array:
        """Returns whether some phase + 2 pi n lies between the ends."""
        # The margin covers the rounding of this test.
        margin = 8 * slack(low.dtype, 4) * jnp.maximum(1, magnitude(x))
        first_turn = jnp.ceil((low - phase - margin) / turn)
        # The first phase + 2 pi n that is not below the lower end, but for the margin.
        first = first_turn * turn + phase
        return first <= high + margin

    ends = eqn.ends(x)
    bottom = least(ends)
    top = most(ends)
    bottom, top = widen(bottom, top, 16)
    error = slack(low.dtype, 16) * jnp.maximum(1, magnitude(x))  # of reducing a large argument
    has_trough = reaches(top_phase + math.pi)
    bottom = jnp.maximum(bottom - error, -1)
    bottom = jnp.where(has_trough, -1, bottom)
    has_crest = reaches(top_phase)
    top = jnp.minimum(top + error, 1)
    top = jnp.where(has_crest, 1, top)
    return Box(bottom, top)


# --- Sums and differences -----------------------------------------------------------------------


@register_rule("add", "add_any")
def _add(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    low = lower(x) + lower(y)
    high = upper(x) + upper(y)
    low, high = rounded(low, high)
    result = Box(low, high, nonnegative=are_nonnegative(x, y))
    for logits, bias in ((x, y), (y, x)):
        if not isinstance(logits, Box) or logits.differences is None:
            continue
        bias_axis = np.shape(lower(bias))[-1:]
        # Each class needs a bias of its own, which the differences then contain.
        if logits.shape == result.shape and bias_axis == logits.shape[-1:]:
            # The bias of a dense layer comes behind its product, whose differences are tight (T2).
            result.differences = functools.partial(_shifted, logits.differences, bias)
            break
    return result


def _shifted(
    differences: Callable[[], jax.Array],
    bias: Operand,
) -> jax.Array:
    """Returns upper bounds of (z + b)_j - (z + b)_c."""
    step = upper(bias)[..., :, None] - lower(bias)[..., None, :]
    total = differences() + outward(step, 1)
    return off_diagonal(outward(total, 1))


@register_rule("sub")
def _sub(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    low, high = _difference(x, y)
    return Box(low, high)


def _difference(x: Operand, y: Operand) -> Ends:
    """Bounds x - y."""
    low = lower(x) - upper(y)
    high = upper(x) - lower(y)
    return rounded(low, high)


# --- Products and quotients ---------------------------------------------------------------------


@register_rule("mul")
def _mul(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    low, high = corner_products(x, y)
    low, high = rounded(low, high)
    result = Box(low, high, nonnegative=are_nonnegative(x, y))
    for vector, factor in ((x, y), (y, x)):
        # If all entries have the same factor, their sum stays zero.
        is_scalar = np.shape(lower(factor))[-1:] in ((), (1,))
        if isinstance(vector, Box) and vector.zero_sum and is_scalar:
            result.zero_sum = True
    return result


@register_rule("polynomial")
def _polynomial(
    eqn: Equation,
    x: Operand,
    *coefficients: Operand,
) -> Any:
    """Bounds c_0 + x (c_1 + x (c_2 + ...))."""
    total: Any = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        product = _mul(eqn, total, x)
        total = _add(eqn, product, coefficient)
    return total


@register_rule("x_plus_xy")
def _x_plus_xy(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    """Bounds x (1 + y), which is never wider than x + x y."""
    low = 1 + lower(y)
    high = 1 + upper(y)
    low, high = widen(low, high)
    factor = Box(low, high, nonnegative=is_nonnegative(y))
    low, high = corner_products(x, factor)
    low, high = widen(low, high)
    return Box(low, high)


@register_rule("div")
def _div(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    if not is_float(y):
        raise NoRuleError(_NO_INTEGER_DIVISION)
    if isinstance(y, Interval):
        # Where y may be zero the inverse is unbounded, and so is the quotient.
        inverse = _reciprocal(y)
        low, high = corner_products(x, inverse)
        y_is_nonnegative = inverse.nonnegative
    else:
        low, high = _quotients(x, y)
        y_is_nonnegative = is_nonnegative(y)
    low, high = widen(low, high, 2)
    return Box(low, high, nonnegative=is_nonnegative(x) and y_is_nonnegative)


def _quotients(x: Operand, y: jax.Array) -> Ends:
    """Bounds x / y for a known y, before the rounding of a division whose result is normal."""
    # XLA multiplies by the reciprocal where y is a constant or one number. For |y| above 2^126 that
    # is subnormal: it has two digits less, or is flushed to zero.
    tiny_reciprocal = (jnp.abs(y) > 1 / tiny(y.dtype)) & jnp.isfinite(y)
    lows = []
    highs = []
    for end in (lower(x), upper(x)):
        quotient = end / y
        size = jnp.abs(end)
        # |y| is below 4 / tiny. So x / y is below 4 tiny up to |x| = 4, and normal beyond. There a
        # zero shows that the reciprocal was flushed.
        is_flushed = (quotient == 0) & (size > 4)
        error = slack(y.dtype, 4) * jnp.abs(quotient)
        error = error + tiny(y.dtype) * (4 + jnp.where(is_flushed, size, 0))
        error = jnp.where(tiny_reciprocal, error, 0)
        lows.append(quotient - error)
        highs.append(quotient + error)
    return least(lows), most(highs)


def _reciprocal(x: Operand) -> Box:
    """Bounds 1 / x. The result is (-inf, inf) if x may be zero."""
    low = lower(x)
    high = upper(x)
    if is_nonnegative(x):
        # 1 / 0 is inf, which is the right end if `low` is 0.
        below, above = widen(1 / high, 1 / low, 2)
        return Box(below, above, nonnegative=True)
    is_nonzero = (low > 0) | (high < 0)
    may_be_zero = ~is_nonzero
    below, above = widen(1 / high, 1 / low, 2)  # it falls on either side of zero
    below = jnp.where(may_be_zero, -jnp.inf, below)
    above = jnp.where(may_be_zero, jnp.inf, above)
    return Box(below, above)


@register_rule("rem")
def _rem(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    """Bounds the rest of a division, which has the sign of x and is smaller than x and than y."""
    if not is_float(x):
        raise NoRuleError(_NO_INTEGER_DIVISION)
    low = lower(x)
    high = upper(x)
    largest_y = magnitude(y)
    smallest_y = lower(absolute(y)) if isinstance(y, Interval) else largest_y
    # The rest of a division by zero, or of infinity, is NaN.
    is_known = (smallest_y > 0) & jnp.isfinite(low) & jnp.isfinite(high)
    below = jnp.maximum(-largest_y, jnp.minimum(low, 0))
    above = jnp.minimum(largest_y, jnp.maximum(high, 0))
    is_monotone = magnitude(x) < smallest_y  # then the rest is x itself
    rests = low, high
    if not isinstance(y, Interval):
        # Between two multiples of y the rest rises with x. There the ends have one sign, are less
        # than |y| apart, and their rests keep the order.
        rests = eqn.ends(x, y)
        has_one_sign = (low >= 0) | (high <= 0)
        rounding = 1 + 4 * slack(low.dtype, 1)  # of the difference of the ends
        is_short = (high - low) * rounding < largest_y
        is_monotone |= has_one_sign & is_short & (rests[0] <= rests[1])
    below = jnp.where(is_monotone, rests[0], below)
    above = jnp.where(is_monotone, rests[1], above)
    below = jnp.where(is_known, below, -jnp.inf)
    above = jnp.where(is_known, above, jnp.inf)
    return Box(below, above)
