"""Rules without rounding: movement of entries, monotone selections, signs and comparisons.

Each of them is evaluated at the lower and at the upper endpoints by the primitive itself.
"""

import math

import jax.numpy as jnp

from jaxdp.transforms.boxes import (
    Box,
    Equation,
    Operand,
    are_nonnegative,
    is_float,
    is_nonnegative,
    lower,
    register_rule,
    upper,
)
from jaxdp.transforms.interval_rules.endpoints import NoRuleError, absolute

_SAME_SHAPE = {
    "copy",
    "copy_p",
    "stop_gradient",
    "optimization_barrier",
    "sharding_constraint",
    "name",
}
# These keep the entries of the last axis together if its length does not change.
_KEEP_LAST_AXIS = {"reshape", "squeeze", "expand_dims", "slice", "broadcast_in_dim"}
_MOVES = {
    *_SAME_SHAPE,
    *_KEEP_LAST_AXIS,
    "transpose",
    "rev",
    "tile",
    "concatenate",
    "stack",
    "unstack",
    "pad",
    "split",
    "device_put",
}
_MONOTONE = {
    "min",
    "clamp",
    "floor",
    "ceil",
    "round",
    "sign",
    "reduce_max",
    "reduce_min",
    "cummax",
    "cummin",
    "reduce_window_max",
    "reduce_window_min",
}
_MONOTONE_BOOLEAN = {"and", "or", "reduce_and", "reduce_or"}
_INDEXING = {"gather", "dynamic_slice", "dynamic_update_slice", "scatter", "select_n"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "is_finite"}
_ORDERING = {"argmax", "argmin", "sort", "top_k"}
# The rest of a division is exact: it has no digit below those of the operands.
_SIGNS = {"neg", "abs", "not", "xor", "rem"}
# These and the random ones have no rule, so they are refused for intervals.
_BITS = {
    "bitcast_convert_type",
    "nextafter",
    "population_count",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
}
_RANDOM = {
    "random_bits",
    "random_clone",
    "random_fold_in",
    "random_seed",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "rng_bit_generator",
    "threefry2x32",
}
# Exact operands of these give exact results. Every other primitive with float results needs a rule.
EXACT = {
    *_MOVES,
    *_MONOTONE,
    *_MONOTONE_BOOLEAN,
    *_INDEXING,
    *_COMPARISONS,
    *_ORDERING,
    *_SIGNS,
    *_BITS,
    *_RANDOM,
    "max",
    "iota",
    "empty",
    "empty2",
    "select_and_gather_add",
}


def at_both_ends(
    eqn: Equation,
    *operands: Operand,
    nonnegative: bool,
) -> list[Box]:
    """Evaluates a monotone primitive at all lower and at all upper endpoints."""
    lows = eqn.bind(*map(lower, operands))
    highs = eqn.bind(*map(upper, operands))
    results = []
    for low, high in zip(lows, highs, strict=True):
        # The maximum with 0 of `Box` would turn booleans into integers.
        has_sign = nonnegative and is_float(low)
        results.append(Box(low, high, nonnegative=has_sign))
    return results


# --- Movement and monotone selections -----------------------------------------------------------


@register_rule(*_MOVES)
def _move(eqn: Equation, *operands: Operand) -> list[Box]:
    results = at_both_ends(eqn, *operands, nonnegative=are_nonnegative(*operands))
    x = operands[0]
    if isinstance(x, Box) and len(results) == 1 and _keeps_last_axis(eqn, x, results[0]):
        _pass_facts(x, results[0])
    return results


def _keeps_last_axis(
    eqn: Equation,
    x: Box,
    result: Box,
) -> bool:
    """Returns whether facts about the last axis of x hold for the last axis of the result."""
    if eqn.name in _SAME_SHAPE:
        return True
    if eqn.name not in _KEEP_LAST_AXIS:
        return False
    if x.ndim == 0 or x.shape[-1] == 1:  # after a reshape an axis of 1 may be another one
        return False
    keeps_all_entries = math.prod(x.shape) == math.prod(result.shape)
    return keeps_all_entries and x.shape[-1:] == result.shape[-1:]


def _pass_facts(x: Box, result: Box) -> None:
    result.zero_sum = x.zero_sum
    differences = x.differences
    if differences is not None:
        # [..., K, K]
        shape = (*result.shape, result.shape[-1])
        result.differences = lambda: differences().reshape(shape)


@register_rule(*_MONOTONE)
def _monotone(eqn: Equation, *operands: Operand) -> list[Box]:
    return at_both_ends(eqn, *operands, nonnegative=are_nonnegative(*operands))


@register_rule("max")
def _max(eqn: Equation, *operands: Operand) -> list[Box]:
    # One operand without a minus sign is enough.
    return at_both_ends(eqn, *operands, nonnegative=any(map(is_nonnegative, operands)))


@register_rule(*_MONOTONE_BOOLEAN)
def _monotone_boolean(eqn: Equation, *operands: Operand) -> list[Box]:
    _check_boolean(operands[0])
    return at_both_ends(eqn, *operands, nonnegative=False)


def _check_boolean(x: Operand) -> None:
    if x.dtype != jnp.bool_:
        raise NoRuleError("It does not support bitwise operations on an interval of integers.")


# --- Signs --------------------------------------------------------------------------------------


@register_rule("neg", "not")
def _antitone(eqn: Equation, x: Operand) -> Operand:
    low, high = eqn.ends(x)
    # The sum of all negatives is zero too.
    return Box(high, low, zero_sum=isinstance(x, Box) and x.zero_sum)


@register_rule("abs")
def _abs(eqn: Equation, x: Operand) -> Operand:
    return absolute(x)


@register_rule("xor")
def _xor(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    _check_boolean(x)
    # No operand is monotone: the result is known only where both operands are.
    x_is_unknown = lower(x) != upper(x)
    y_is_unknown = lower(y) != upper(y)
    unknown = x_is_unknown | y_is_unknown
    value = lower(x) ^ lower(y)
    return Box(value & ~unknown, value | unknown)


# --- Comparisons: [certainly, possibly] ---------------------------------------------------------
# A comparison with a NaN endpoint is False. So it is not certain, and its negation is possible.


@register_rule("gt", "ge", "lt", "le")
def _order(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    # x < y is y > x, so two comparisons are left.
    if eqn.name in ("lt", "le"):
        x, y = y, x
    if eqn.name in ("gt", "lt"):
        certain = lower(x) > upper(y)
        possible = ~(upper(x) <= lower(y))
    else:
        certain = lower(x) >= upper(y)
        possible = ~(upper(x) < lower(y))
    return Box(certain, possible)


@register_rule("eq", "ne")
def _equality(
    eqn: Equation,
    x: Operand,
    y: Operand,
) -> Operand:
    # Only two equal points are equal for certain.
    certain = (lower(x) == upper(y)) & (upper(x) == lower(y))
    is_different = (upper(x) < lower(y)) | (lower(x) > upper(y))
    possible = ~is_different
    if eqn.name == "eq":
        return Box(certain, possible)
    return Box(~possible, ~certain)


@register_rule("eq_itself", "ne_itself")
def _equality_to_itself(eqn: Equation, x: Operand) -> Operand:
    """Bounds x == x, which is False for NaN only. No NaN lies between finite ends."""
    if is_float(x):
        certain = jnp.isfinite(lower(x)) & jnp.isfinite(upper(x))
    else:
        certain = jnp.ones(x.shape, bool)
    always = jnp.ones_like(certain)
    if eqn.name == "eq_itself":
        return Box(certain, always)
    return Box(~always, ~certain)


@register_rule("is_finite")
def _is_finite(eqn: Equation, x: Operand) -> Operand:
    low = lower(x)
    high = upper(x)
    certain = jnp.isfinite(low) & jnp.isfinite(high)
    # No point is finite if the box is {inf} or {-inf}.
    is_infinite = (low == jnp.inf) | (high == -jnp.inf)
    return Box(certain, ~is_infinite)
