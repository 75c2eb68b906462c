"""The rules of `jaxdp.interval`, one per primitive, simple ones first.

Every rule is inclusion-isotonic, because endpoints come from monotone formulas. The choice of a
formula depends on shapes and on the structure of the function, never on endpoints.
docs/design/prediction.md has the derivations T1 to T3.
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
    at_least_float32,
    both,
    inflate,
    is_float,
    is_nonnegative,
    lower,
    magnitude,
    moved,
    outward,
    register_rule,
    slack,
    tiny,
    unchecked,
    upper,
    widen,
    without_overflow,
)
from jaxdp.transforms.walker import called_program, scan_starts

# Sums of at most this many products are unrolled and bounded corner by corner.
_UNROLLED = 16
# Sums of at most K = 4 terms are bounded once more with each row subtracted, which takes K times as
# many products.
_CENTRED = 4
# All pairwise differences of at most this many logits are bounded.
_PAIRWISE = 32
# Longer sums of products are summed in blocks, so that the rounding grows with the square root of
# the length.
_LONG = 256

Ends = tuple[jax.Array, jax.Array]  # (lower, upper)


class NoRuleError(Exception):
    """The error of a rule that does not cover its operands."""


# --- data movement and other operations without rounding ----------------------------------------

_SAME_SHAPE = (
    "copy",
    "copy_p",
    "stop_gradient",
    "optimization_barrier",
    "sharding_constraint",
    "name",
)
_MOVES = (
    *_SAME_SHAPE,
    *(
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "slice",
        "rev",
        "tile",
        "concatenate",
    ),
    *(
        "stack",
        "unstack",
        "pad",
        "split",
        "gather",
        "dynamic_slice",
        "dynamic_update_slice",
        "scatter",
        "select_n",
    ),
    "device_put",
)
_MONOTONE_EXACT = (
    *(
        "max",
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
    ),
    *("reduce_window_max", "reduce_window_min", "and", "or", "reduce_and", "reduce_or"),
)
# Exact operands of these give exact results. Every other primitive with float results needs a rule.
EXACT = {
    *_MOVES,
    *_MONOTONE_EXACT,
    *(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "neg",
        "abs",
        "not",
        "xor",
        "is_finite",
        "argmax",
        "argmin",
        "iota",
        "top_k",
    ),
    *("sort", "rem"),
    *(
        "empty",
        "empty2",
        "bitcast_convert_type",
        "select_and_gather_add",
        "shift_left",
        "shift_right_logical",
    ),
    *(
        "shift_right_arithmetic",
        "population_count",
        "nextafter",
        "random_bits",
        "random_wrap",
        "random_unwrap",
    ),
    *(
        "random_seed",
        "random_fold_in",
        "random_split",
        "random_clone",
        "threefry2x32",
        "rng_bit_generator",
    ),
}


def _check_positions(operands: Sequence[Operand]) -> None:
    if any(isinstance(x, Interval) for x in operands):
        raise NoRuleError("Its index or predicate depends on an interval.")


def _check_boolean(x: Operand) -> None:
    if x.dtype != jnp.bool_:
        raise NoRuleError("It does not support bitwise operations on an interval of integers.")


@register_rule(*_MOVES, *_MONOTONE_EXACT)
def _monotone_exact(eqn: Equation, *operands: Operand) -> list[Operand]:
    first = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "scatter": 1}.get(
        eqn.name, len(operands)
    )
    _check_positions(operands[first : 2 if eqn.name == "scatter" else None])
    if eqn.name in ("and", "or", "reduce_and", "reduce_or"):
        _check_boolean(operands[0])
    elif eqn.name == "select_n" and isinstance(operands[0], Interval):
        return [_select_unknown(*operands)]
    values = {"select_n": operands[1:], "gather": operands[:1], "dynamic_slice": operands[:1]}.get(
        eqn.name, operands
    )
    sign = (any if eqn.name == "max" else all)([is_nonnegative(x) for x in values])
    ends = zip(eqn.bind(*map(lower, operands)), eqn.bind(*map(upper, operands)), strict=True)
    results = [Box(low, high, nonnegative=sign and is_float(low)) for low, high in ends]
    if isinstance(operands[0], Box) and len(results) == 1:
        _pass_facts(eqn, operands[0], results[0])
    return list(results)


def _pass_facts(eqn: Equation, x: Box, result: Box) -> None:
    """Copies facts about the last axis if the equation keeps its entries."""
    keeps = eqn.name in _SAME_SHAPE or (
        eqn.name in ("reshape", "squeeze", "expand_dims", "slice", "broadcast_in_dim")
        and x.shape[-1:] == result.shape[-1:]
        and math.prod(x.shape) == math.prod(result.shape)
        and x.ndim > 0
        and x.shape[-1] > 1
    )
    if keeps:
        result.zero_sum = x.zero_sum
        if (inner := x.differences) is not None:
            shape = (*result.shape, result.shape[-1])
            result.differences = lambda: inner().reshape(shape)


def _extremes(dtype: Any) -> tuple[Any, Any]:
    """Returns (largest, smallest) value of a dtype, the endpoints of the empty hull."""
    if dtype == jnp.bool_:
        return True, False
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf, -jnp.inf
    return jnp.iinfo(dtype).max, jnp.iinfo(dtype).min


def _select_unknown(predicate: Operand, *cases: Operand) -> Box:
    """Returns the hull of the cases that the predicate (boolean, or an index) allows."""
    least, most = (jnp.asarray(end(predicate), jnp.int32) for end in (lower, upper))
    low, high = (
        jnp.full(np.shape(lower(cases[0])), end, cases[0].dtype)
        for end in _extremes(cases[0].dtype)
    )
    for i, case in enumerate(cases):
        possible = (least <= i) & (most >= i)
        low = jnp.where(possible, jnp.minimum(low, lower(case)), low)
        high = jnp.where(possible, jnp.maximum(high, upper(case)), high)
    return Box(low, high, nonnegative=all(map(is_nonnegative, cases)))


@register_rule("neg", "not")
def _antitone_exact(eqn: Equation, x: Operand) -> Operand:
    low, high = eqn.ends(x)
    return Box(high, low, zero_sum=isinstance(x, Box) and x.zero_sum)


@register_rule("abs")
def _abs(eqn: Equation, x: Operand) -> Operand:
    return _absolute(x)


def _absolute(x: Operand) -> Box:
    return Box(jnp.maximum(lower(x), -upper(x)), magnitude(x), nonnegative=True)


@register_rule("xor")
def _xor(eqn: Equation, x: Operand, y: Operand) -> Operand:
    _check_boolean(x)
    unknown = (lower(x) != upper(x)) | (lower(y) != upper(y))
    value = lower(x) ^ lower(y)
    return Box(value & ~unknown, value | unknown)


@register_rule("gt", "ge", "lt", "le")
def _order(eqn: Equation, x: Operand, y: Operand) -> Operand:
    if eqn.name in ("lt", "le"):
        x, y = y, x
    if eqn.name in ("gt", "lt"):  # a NaN endpoint means "possible"
        return Box(lower(x) > upper(y), ~(upper(x) <= lower(y)))
    return Box(lower(x) >= upper(y), ~(upper(x) < lower(y)))


@register_rule("eq", "ne")
def _equality(eqn: Equation, x: Operand, y: Operand) -> Operand:
    certain = (lower(x) == upper(y)) & (upper(x) == lower(y))
    possible = ~((upper(x) < lower(y)) | (lower(x) > upper(y)))
    return Box(certain, possible) if eqn.name == "eq" else Box(~possible, ~certain)


@register_rule("eq_itself", "ne_itself")
def _equality_to_itself(eqn: Equation, x: Operand) -> Operand:
    """Bounds x == x, which is False for NaN only. No NaN lies between finite ends."""
    certain = (
        jnp.isfinite(lower(x)) & jnp.isfinite(upper(x)) if is_float(x) else jnp.ones(x.shape, bool)
    )
    always = jnp.ones_like(certain)
    return Box(certain, always) if eqn.name == "eq_itself" else Box(~always, ~certain)


@register_rule("is_finite")
def _is_finite(eqn: Equation, x: Operand) -> Operand:
    low, high = lower(x), upper(x)
    return Box(jnp.isfinite(low) & jnp.isfinite(high), ~((low == jnp.inf) | (high == -jnp.inf)))


@register_rule("argmax", "argmin")
def _argmax(eqn: Equation, x: Operand) -> Operand:
    (axis,) = eqn.params["axes"]
    low, high = (lower(x), upper(x)) if eqn.name == "argmax" else (-upper(x), -lower(x))
    possible = ~(high < jnp.max(low, axis, keepdims=True))
    first = jnp.argmax(possible, axis)
    last = x.shape[axis] - 1 - jnp.argmax(jnp.flip(possible, axis), axis)
    return Box(first.astype(eqn.outputs[0].dtype), last.astype(eqn.outputs[0].dtype))


def _may_stand(x: Operand, places: Any) -> jax.Array:
    """Returns whether entry n of the last axis may be at place p in ascending order: bool [..., P,
    N].
    """

    def counted(side: str, among: jax.Array, entries: jax.Array) -> jax.Array:
        rows, size = jnp.sort(among), among.shape[-1]
        find = jax.vmap(functools.partial(jnp.searchsorted, side=side))
        return find(rows.reshape(-1, size), entries.reshape(-1, size)).reshape(
            *entries.shape[:-1], 1, size
        )

    # An entry stands behind those that are certainly smaller, and before those that are certainly
    # larger.
    first, behind = counted("left", upper(x), lower(x)), counted("right", lower(x), upper(x))
    place = np.asarray(places).reshape(*(1,) * (x.ndim - 1), -1, 1)
    return (first <= place) & (place < behind)


def _along_last(axis: int, *operands: Operand) -> list[Operand]:
    return [moved(lambda v: jnp.moveaxis(v, axis, -1), x) for x in operands]


@register_rule("top_k")
def _top_k(eqn: Equation, x: Operand) -> list[Operand]:
    """Bounds the k largest entries, and the indices that each of them can have."""
    x, axis = without_nan(x), eqn.params.get("axis", x.ndim - 1)
    values, dtype = [eqn.bind(end(x))[0] for end in (lower, upper)], eqn.outputs[1].dtype
    (rows,) = _along_last(axis, x)
    may = _may_stand(rows, rows.shape[-1] - 1 - np.arange(values[0].shape[axis]))
    ends = jnp.argmax(may, -1), rows.shape[-1] - 1 - jnp.argmax(jnp.flip(may, -1), -1)
    return [Box(*values), Box(*(jnp.moveaxis(end, -1, axis).astype(dtype) for end in ends))]


@register_rule("sort")
def _sort(eqn: Equation, *operands: Operand) -> list[Operand]:
    """Bounds sorted entries. Entries that are sorted by an interval may stand wherever their key
    can.
    """
    keys, axis = operands[: eqn.params["num_keys"]], eqn.params["dimension"]
    if not any(isinstance(key, Interval) for key in keys):  # both ends have one order
        return [
            Box(*ends)
            for ends in zip(*(eqn.bind(*map(end, operands)) for end in (lower, upper)), strict=True)
        ]
    if len(keys) > 1:
        raise NoRuleError("It does not sort by several keys of which one is an interval.")
    key, *others = _along_last(axis, without_nan(operands[0]), *operands[1:])
    results = [both(jnp.sort, key)]
    if others:
        may = _may_stand(key, np.arange(key.shape[-1]))
    for x in others:
        most, least = (jnp.asarray(end, x.dtype) for end in _extremes(x.dtype))
        low, high = (end(x)[..., None, :] for end in (lower, upper))
        results.append((jnp.where(may, low, most).min(-1), jnp.where(may, high, least).max(-1)))
    return [Box(*(jnp.moveaxis(end, -1, axis) for end in ends)) for ends in results]


@register_rule("rem")
def _rem(eqn: Equation, x: Operand, y: Operand) -> Operand:
    """Bounds the rest of a division, which has the sign of x. It rises with x between multiples of
    y.
    """
    if not is_float(x):
        raise NoRuleError("It does not support integer division by an interval or of an interval.")
    low, high, far = lower(x), upper(x), magnitude(y)
    near = lower(_absolute(y)) if isinstance(y, Interval) else far
    known = (
        (near > 0) & jnp.isfinite(low) & jnp.isfinite(high)
    )  # the rest by zero, or of infinity, is NaN
    ends = jnp.maximum(-far, jnp.minimum(low, 0)), jnp.minimum(far, jnp.maximum(high, 0))
    same = magnitude(x) < near
    rests = low, high
    if not isinstance(y, Interval):
        rests = eqn.ends(x, y)
        close = ((low >= 0) | (high <= 0)) & ((high - low) * (1 + 4 * slack(low.dtype, 1)) < near)
        same |= close & (rests[0] <= rests[1])
    low, high = (jnp.where(same, rest, end) for rest, end in zip(rests, ends, strict=True))
    return Box(jnp.where(known, low, -jnp.inf), jnp.where(known, high, jnp.inf))


@register_rule("convert_element_type")
def _convert(eqn: Equation, x: Operand) -> Operand:
    low, high = eqn.ends(x)
    source, target = jnp.dtype(x.dtype), jnp.dtype(eqn.outputs[0].dtype)
    known = (
        is_nonnegative(x)
        or source == jnp.bool_
        or bool(jnp.issubdtype(source, jnp.unsignedinteger))
    )
    if not jnp.issubdtype(target, jnp.floating):
        return _to_integer(x, low, high) if isinstance(x, Interval) else low
    if jnp.issubdtype(source, jnp.floating):
        a, b = jnp.finfo(source), jnp.finfo(target)
        exact = (
            a.nmant <= b.nmant and a.minexp - a.nmant >= b.minexp - b.nmant and a.maxexp <= b.maxexp
        )
    else:
        exact = source == jnp.bool_ or source.itemsize * 8 <= jnp.finfo(target).nmant
        if isinstance(x, np.ndarray | np.generic):  # a constant of the program
            exact = bool(np.all(np.asarray(x).astype(target).astype(source) == x))
    if not exact:
        below, above = widen(low, high)
        if jnp.issubdtype(source, jnp.integer):
            most = min(
                2.0 ** (jnp.finfo(target).nmant + 1), float(jnp.finfo(target).max)
            )  # exact below
            below = jnp.where(
                low >= most, jnp.maximum(below, most), jnp.where(low > -most, low, below)
            )
            above = jnp.where(
                high <= -most, jnp.minimum(above, -most), jnp.where(high < most, high, above)
            )
        low, high = below, above
    elif not isinstance(x, Interval):
        return low
    result = Box(low, high, nonnegative=known)
    if isinstance(x, Box):
        result.zero_sum, result.differences = x.zero_sum and exact, x.differences if exact else None
    return result


def _to_integer(x: Interval, low: jax.Array, high: jax.Array) -> Box:
    """Converts endpoints to integers or booleans. Where a value does not fit, the result is the
    whole range.
    """
    if low.dtype == jnp.bool_:
        return Box((x.lower > 0) | (x.upper < 0), ~((x.lower == 0) & (x.upper == 0)))
    if x.dtype == jnp.bool_:
        return Box(low, high)
    most, least = _extremes(low.dtype)

    def fits(end: jax.Array, converted: jax.Array) -> jax.Array:
        if is_float(end):
            return (end >= float(least)) & (end < float(most) + 1)
        return (converted.astype(end.dtype) == end) & ((converted < 0) == (end < 0))

    ok = fits(x.lower, low) & fits(x.upper, high)
    return Box(jnp.where(ok, low, least), jnp.where(ok, high, most))


@register_rule("reduce_precision")
def _reduce_precision(eqn: Equation, x: Operand) -> Operand:
    """Bounds both the rounded and the given value, because the rounding is intended."""
    low, high = eqn.ends(x)
    return Box(
        jnp.minimum(low, lower(x)), jnp.maximum(high, upper(x)), nonnegative=is_nonnegative(x)
    )


# --- elementwise functions ----------------------------------------------------------------------


def _narrow(eqn: Equation, low: jax.Array, high: jax.Array, **facts: Any) -> Box:
    """Converts a result computed in float32 to the equation's dtype and rounds it outward."""
    dtype = eqn.outputs[0].dtype
    if low.dtype != dtype:
        low, high = widen(low.astype(dtype), high.astype(dtype))
    return Box(*without_overflow(low, high), **facts)


def _rounded(low: jax.Array, high: jax.Array, roundings: float = 1) -> Ends:
    return widen(low, high, roundings) if is_float(low) else (low, high)


def _monotone(
    ulps: float,
    below: float = -math.inf,
    above: float = math.inf,
    *,
    start: float = -math.inf,
    inputs: float = 0,
    falls: bool = False,
) -> Callable[..., Operand]:
    """Builds the rule for an increasing (or falling) function on [start, inf) with range [below,
    above].

    Its error is `ulps` units in the last place of the result, and `inputs` roundings of the
    argument where implementations round before they call exp.
    """

    def rule(eqn: Equation, x: Operand) -> Operand:
        low, high = widen(lower(x), upper(x), inputs) if inputs else (lower(x), upper(x))
        if falls:
            low, high = high, low
        if start > -math.inf:
            low, high = jnp.maximum(low, start), jnp.maximum(high, start)
        low, high = widen(eqn.bind(low)[0], eqn.bind(high)[0], 2 * ulps)
        return Box(jnp.maximum(low, below), jnp.minimum(high, above), nonnegative=below >= 0)

    return rule


for _name, _rule in {
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
}.items():
    register_rule(_name)(_rule)


@register_rule("square", "integer_pow")
def _integer_pow(eqn: Equation, x: Operand) -> Operand:
    y = eqn.params.get("y", 2)
    if y == 0:
        return jnp.ones_like(lower(x))
    return _power(x, y) if y > 0 else _reciprocal(_power(x, -y))


def _power(x: Operand, y: int) -> Box:
    base = x if y % 2 else _absolute(x)
    low, high = both(lambda v: lax.integer_pow(v, y), base)
    return Box(*_rounded(low, high, 2 * y), nonnegative=is_nonnegative(base))


@register_rule("one_minus_square")
def _one_minus_square(eqn: Equation, x: Operand) -> Operand:
    """Bounds 1 - x^2, which JAX computes as (1 + x)(1 - x)."""
    high, low = eqn.ends(_absolute(x))
    return Box(*widen(low, high, 4))


@register_rule("exp_neg_sq")
def _exp_neg_sq(eqn: Equation, x: Operand) -> Operand:
    """Bounds exp(-x^2)."""
    square = _power(x, 2)
    low, high = widen(jnp.exp(-square.upper), jnp.exp(-square.lower), 16)
    return Box(jnp.maximum(low, 0), high, nonnegative=True)


@register_rule("logaddexp", "logaddexp2")
def _logaddexp(eqn: Equation, x: Operand, y: Operand) -> Operand:
    """Bounds log(exp(x) + exp(y)), which rises with both. Its larger operand and the logarithm may
    cancel.
    """
    return _around(eqn.ends(x, y), _ends_of_max(x, y), 24)


@register_rule("exp_share", "exp2_share")
def _exp_share(eqn: Equation, x: Operand, y: Operand) -> Operand:
    """Bounds exp(x) / (exp(x) + exp(y)) = sigmoid(x - y), or the same with powers of two."""
    low, high = _rounded(lower(x) - upper(y), upper(x) - lower(y))
    if eqn.name == "exp2_share":
        low, high = widen(*both(lambda v: v * math.log(2), unchecked(low, high)), 2)
    low, high = widen(jax.nn.sigmoid(low), jax.nn.sigmoid(high), 16)
    return Box(jnp.maximum(low, 0), jnp.minimum(high, 1), nonnegative=True)


def _ends_of_max(x: Operand, y: Operand) -> Ends:
    return jnp.maximum(lower(x), lower(y)), jnp.maximum(upper(x), upper(y))


def _around(ends: Ends, scales: Ends, roundings: float) -> Box:
    """Moves ends outward by roundings of 1 + |scale|. An infinite end stays."""
    low, high = (
        jnp.where(
            jnp.isfinite(end), end + sign * slack(end.dtype, roundings) * (1 + jnp.abs(scale)), end
        )
        for sign, end, scale in zip((-1, 1), ends, scales, strict=True)
    )
    return Box(*without_overflow(low, high))


@register_rule("log_sum_exp")
def _log_sum_exp_of(eqn: Equation, x: Operand) -> Operand:
    """Bounds log(sum(exp(x))) over the last axis, which rises with every entry."""
    wide, shape = at_least_float32(x), eqn.outputs[0].shape
    ends, scales = (
        both(f, wide) for f in (lambda v: _log_sum_exp(v, -1), lambda v: jnp.max(v, -1))
    )
    result = _around(ends, scales, wide.shape[-1] + 24)
    return _narrow(eqn, result.lower.reshape(shape), result.upper.reshape(shape))


@register_rule("log_softmax")
def _log_softmax(eqn: Equation, x: Operand) -> Operand:
    """Bounds x_k - log(sum(exp(x))) = -log(sum_j exp(x_j - x_k)) over the last axis, by differences
    up to a length.
    """
    x = at_least_float32(x)
    if x.shape[-1] <= _PAIRWISE:
        gaps = pairwise_gaps(x, eqn.product)
        ends = scales = -_log_sum_exp(gaps, -2), -_log_sum_exp(-gaps, -1)
    else:  # the entry at one end, and all others at the other end
        low, high = (_log_of_others(end) for end in (lower(x), upper(x)))
        ends = -jnp.logaddexp(high - lower(x), 0), -jnp.logaddexp(low - upper(x), 0)
        scales = (2 * jnp.max(magnitude(x), -1, keepdims=True),) * 2
    result = _around(ends, scales, x.shape[-1] + 24)
    return _narrow(eqn, result.lower, jnp.minimum(result.upper, 0))


def _log_of_others(x: jax.Array) -> jax.Array:
    """Returns the logarithm of the sum of exponentials of the other entries of the last axis."""
    top = jnp.max(x, axis=-1, keepdims=True)
    shift = jnp.where(jnp.isfinite(top), top, 0)
    return jnp.log(_others(jnp.exp(x - shift))) + shift


@register_rule("pow")
def _pow(eqn: Equation, x: Operand, y: Operand) -> Operand:
    known = is_nonnegative(x)
    base = x if known else _absolute(x)
    corners = [eqn.bind(a(base), b(y))[0] for a in (lower, upper) for b in (lower, upper)]
    low, high = widen(_least(corners), _most(corners), 32)
    if not known:  # the power of a negative base has either sign, or is NaN
        low = jnp.where(lower(x) >= 0, low, -high)
    return Box(low, high, nonnegative=known)


@register_rule("sin", "cos")
def _sine(eqn: Equation, x: Operand) -> Operand:
    low, high = widen(lower(x), upper(x), 4)
    turn, shift = 2 * math.pi, math.pi / 2 if eqn.name == "sin" else 0.0

    def reaches(phase: float) -> jax.Array:
        # Whether some phase + 2 pi n lies between the ends. The margin covers the rounding of this
        # test.
        margin = 8 * slack(low.dtype, 4) * jnp.maximum(1, magnitude(x))
        return jnp.ceil((low - phase - margin) / turn) * turn + phase <= high + margin

    ends = eqn.ends(x)
    bottom, top = widen(_least(ends), _most(ends), 16)
    error = slack(low.dtype, 16) * jnp.maximum(1, magnitude(x))  # of reducing a large argument
    bottom = jnp.where(reaches(shift + math.pi), -1, jnp.maximum(bottom - error, -1))
    return Box(bottom, jnp.where(reaches(shift), 1, jnp.minimum(top + error, 1)))


def _least(xs: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.minimum, xs)


def _most(xs: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, xs)


@register_rule("add", "add_any")
def _add(eqn: Equation, x: Operand, y: Operand) -> Operand:
    ends = _rounded(lower(x) + lower(y), upper(x) + upper(y))
    result = Box(*ends, nonnegative=is_nonnegative(x) and is_nonnegative(y))
    for a, b in ((x, y), (y, x)):
        same = a.shape == result.shape and np.shape(lower(b))[-1:] == a.shape[-1:]
        if isinstance(a, Box) and a.differences is not None and same:
            result.differences = functools.partial(_shifted, a.differences, b)
            break
    return result


def _shifted(differences: Callable[[], jax.Array], b: Operand) -> jax.Array:
    """Returns upper bounds of (z + b)_j - (z + b)_c."""
    step = upper(b)[..., :, None] - lower(b)[..., None, :]
    total = differences() + outward(step, 1)
    return _off_diagonal(outward(total, 1))


def _off_diagonal(x: jax.Array) -> jax.Array:
    """Sets the diagonal of the last two axes to zero, since z_c - z_c = 0."""
    size = x.shape[-1]
    return jnp.where(
        np.eye(size, dtype=bool).reshape(*(1,) * (x.ndim - 2), size, size), jnp.zeros_like(x), x
    )


@register_rule("sub")
def _sub(eqn: Equation, x: Operand, y: Operand) -> Operand:
    return Box(*_rounded(lower(x) - upper(y), upper(x) - lower(y)))


@register_rule("mul")
def _mul(eqn: Equation, x: Operand, y: Operand) -> Operand:
    result = Box(
        *_rounded(*_corner_products(x, y)), nonnegative=is_nonnegative(x) and is_nonnegative(y)
    )
    for a, b in ((x, y), (y, x)):
        # If all entries have the same factor, their sum stays zero.
        if isinstance(a, Box) and a.zero_sum and np.shape(lower(b))[-1:] in ((), (1,)):
            result.zero_sum = True
    return result


@register_rule("polynomial")
def _polynomial(eqn: Equation, x: Operand, *coefficients: Operand) -> Any:
    """Bounds c_0 + x (c_1 + x (c_2 + ...))."""
    total: Any = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = _add(eqn, _mul(eqn, total, x), coefficient)
    return total


@register_rule("x_plus_xy")
def _x_plus_xy(eqn: Equation, x: Operand, y: Operand) -> Operand:
    """Bounds x (1 + y), which is never wider than x + x y."""
    low, high = widen(*both(lambda v: 1 + v, y))
    return Box(*widen(*_corner_products(x, Box(low, high, nonnegative=is_nonnegative(y)))))


def _corner_products(x: Operand, y: Operand) -> Ends:
    """Returns the smallest and largest products of endpoints, and skips products that cannot be
    extreme.
    """
    if is_nonnegative(x) and is_nonnegative(y):
        return lower(x) * lower(y), upper(x) * upper(y)
    if not isinstance(x, Interval) or is_nonnegative(y):
        x, y = y, x
    if not isinstance(y, Interval):
        low, high = lower(x) * y, upper(x) * y
        return (
            (low, high) if is_nonnegative(y) else (jnp.minimum(low, high), jnp.maximum(low, high))
        )
    if is_nonnegative(x):
        ends = lower(x), upper(x)
        return _least([lower(y) * end for end in ends]), _most([upper(y) * end for end in ends])
    products = [end(x) * other(y) for end in (lower, upper) for other in (lower, upper)]
    return _least(products), _most(products)


@register_rule("div")
def _div(eqn: Equation, x: Operand, y: Operand) -> Operand:
    if not is_float(y):
        raise NoRuleError("It does not support integer division by an interval or of an interval.")
    if not isinstance(y, Interval):
        low, high = lower(x) / y, upper(x) / y
        low, high, positive = jnp.minimum(low, high), jnp.maximum(low, high), is_nonnegative(y)
    else:
        inverse = _reciprocal(y)
        (low, high), positive = _corner_products(x, inverse), inverse.nonnegative
    return Box(*widen(low, high, 2), nonnegative=is_nonnegative(x) and positive)


def _reciprocal(x: Operand) -> Box:
    """Bounds 1 / x. The result is (-inf, inf) if x may be zero."""
    low, high = lower(x), upper(x)
    if is_nonnegative(x):
        return Box(*widen(1 / high, 1 / low, 2), nonnegative=True)
    crosses = ~((low > 0) | (high < 0))
    below, above = widen(1 / high, 1 / low, 2)
    return Box(jnp.where(crosses, -jnp.inf, below), jnp.where(crosses, jnp.inf, above))


def without_nan(x: Operand) -> Operand:
    """Replaces NaN endpoints, where nothing is known, by infinite endpoints."""
    low, high = lower(x), upper(x)
    if not is_float(low):
        return x
    return Box(jnp.where(jnp.isnan(low), -jnp.inf, low), jnp.where(jnp.isnan(high), jnp.inf, high))


@register_rule("softmax")
def _softmax(eqn: Equation, x: Operand) -> Operand:
    """Bounds exp(x) / sum(exp(x)) over the last axis, with each entry as e / (e + sum of the
    others).
    """
    x = at_least_float32(x)
    shift = jnp.max(upper(x), axis=-1, keepdims=True)
    low, high = widen(lower(x) - shift, upper(x) - shift)
    low, high = widen(jnp.exp(low), jnp.exp(high), 16 + 2 * x.shape[-1])
    low = jnp.maximum(low, 0)
    others_low, others_high = (_others(e) for e in (low, high))
    # If all exponentials underflow, 0 / 0 becomes 0 or 1. A NaN logit stays NaN.
    low = jnp.where((low == 0) & (others_high == 0), 0, low / (low + others_high))
    high = jnp.where((high == 0) & (others_low == 0), 1, high / (high + others_low))
    low, high = widen(low, high, 8)
    return _narrow(eqn, low, jnp.minimum(high, 1), nonnegative=True)


def _others(e: jax.Array) -> jax.Array:
    """Sums over the last axis without the entry itself, and without cancellation."""
    size = e.shape[-1]
    if size == 1:
        return jnp.zeros_like(e)
    zero = jnp.zeros((*e.shape[:-1], 1), e.dtype)
    before = jnp.concatenate([zero, jnp.cumsum(e, axis=-1)[..., :-1]], axis=-1)
    after = jnp.flip(jnp.cumsum(jnp.flip(e, -1), axis=-1), -1)
    return before + jnp.concatenate([after[..., 1:], zero], axis=-1)


# --- sums ---------------------------------------------------------------------------------------


@register_rule("reduce_sum", "cumsum", "reduce_window_sum")
def _sum(eqn: Equation, x: Operand) -> Operand:
    """Bounds sums of entries, which may repeat entries. Integers are exact."""
    if not is_float(x):
        return Box(*eqn.ends(x))
    p = eqn.params
    if eqn.name == "reduce_window_sum":
        terms = math.prod(p["window_dimensions"])
    else:
        terms = math.prod(
            x.shape[a] for a in (p["axes"] if eqn.name == "reduce_sum" else [p["axis"]])
        )
    low, high = eqn.ends(inflate(at_least_float32(x), terms + 2))
    least = (terms + 1) * tiny(low.dtype)
    return _narrow(eqn, low - least, high + least, nonnegative=is_nonnegative(x))


@register_rule("reduce_prod")
def _reduce_prod(eqn: Equation, x: Operand) -> Operand:
    """Multiplies halves with each other. Each multiplication bounds its own rounding and
    underflow.
    """
    if not is_float(x):
        raise NoRuleError("It does not support products over an interval of integers.")
    known = is_nonnegative(x)
    x = _last(at_least_float32(x), eqn.params["axes"])
    low, high = lower(x), upper(x)
    while (half := low.shape[-1] // 2) > 0:
        parts = slice(half), slice(half, 2 * half)
        ends = widen(
            *_corner_products(*(Box(low[..., p], high[..., p], nonnegative=known) for p in parts))
        )
        low, high = (
            jnp.concatenate([a, b[..., 2 * half :]], -1)
            for a, b in zip(ends, (low, high), strict=True)
        )
    return _narrow(eqn, low[..., 0], high[..., 0], nonnegative=known)


@register_rule("cumprod")
def _cumprod(eqn: Equation, x: Operand) -> Operand:
    """Multiplies neighbours, then pairs of them, and so on. Each multiplication bounds its own
    rounding.
    """
    if not is_float(x):
        raise NoRuleError("It does not support products over an interval of integers.")
    x, known = at_least_float32(x), is_nonnegative(x)

    def multiply(a: Ends, b: Ends) -> Ends:
        return widen(*_corner_products(Box(*a, nonnegative=known), Box(*b, nonnegative=known)))

    ends = lax.associative_scan(
        multiply, (lower(x), upper(x)), reverse=eqn.params["reverse"], axis=eqn.params["axis"]
    )
    return _narrow(eqn, *ends, nonnegative=known)


@register_rule("cumlogsumexp")
def _cumlogsumexp(eqn: Equation, x: Operand) -> Operand:
    """Bounds logarithms of cumulative sums of exponentials, which rise with every entry."""
    wide, axis = at_least_float32(x), eqn.params["axis"]

    def tops(v: jax.Array) -> jax.Array:
        return lax.cummax(v, axis=axis, reverse=eqn.params["reverse"])

    result = _around(eqn.ends(wide), both(tops, wide), 16 * x.shape[axis] + 24)
    return _narrow(eqn, result.lower, result.upper)


@register_rule("scatter-add")
def _scatter_add(eqn: Equation, x: Operand, indices: Operand, updates: Operand) -> Operand:
    _check_positions([indices])
    if not is_float(x):
        return Box(*eqn.ends(x, indices, updates))
    # An entry receives at most one update per index.
    terms = math.prod(indices.shape[:-1]) + 1
    x, updates = (inflate(at_least_float32(v), terms + 1) for v in (x, updates))
    low, high = eqn.ends(x, indices, updates)
    least = terms * tiny(low.dtype)
    return _narrow(eqn, low - least, high + least)


@register_rule("select_and_scatter_add")
def _select_and_scatter_add(eqn: Equation, source: Operand, x: Operand) -> Operand:
    """Bounds the derivative of max pooling: the cotangent may go to any entry that can be the
    window's largest.
    """
    if eqn.params["select_prim"].name == "le":  # min pooling
        x = Box(-upper(x), -lower(x)) if isinstance(x, Interval) else -x
    window, strides, padding = (
        eqn.params[k] for k in ("window_dimensions", "window_strides", "padding")
    )
    offsets = list(np.ndindex(*window))
    padded = [
        lax.pad(end(x), jnp.asarray(-jnp.inf, x.dtype), [(int(a), int(b), 0) for a, b in padding])
        for end in (lower, upper)
    ]

    def patch(array: jax.Array, offset: tuple[int, ...]) -> jax.Array:
        limits = [
            o + (n - 1) * s + 1 for o, n, s in zip(offset, source.shape, strides, strict=True)
        ]
        return lax.slice(array, offset, limits, strides)

    lows, highs = ([patch(end, o) for o in offsets] for end in padded)
    low, high = (jnp.zeros_like(padded[0]) for _ in range(2))
    wide = inflate(source, len(offsets) + 1)
    nothing = jnp.full_like(lows[0], -jnp.inf)
    for i, offset in enumerate(offsets):
        earlier, later = (_most([nothing, *ends]) for ends in (lows[:i], lows[i + 1 :]))
        if isinstance(x, Interval):
            rivals = _most([nothing, *highs[:i], *highs[i + 1 :]])
            certain = (lows[i] > rivals) | jnp.isneginf(rivals)
            possible = ~(highs[i] < jnp.maximum(earlier, later))
        else:  # ties select the first entry of the window
            certain = possible = (lows[i] > earlier) & (lows[i] >= later)
        part_low = jnp.where(
            certain, wide.lower, jnp.where(possible, jnp.minimum(wide.lower, 0), 0)
        )
        part_high = jnp.where(
            certain, wide.upper, jnp.where(possible, jnp.maximum(wide.upper, 0), 0)
        )
        config = [
            (o, size - o - (n - 1) * s - 1, s - 1)
            for o, n, s, size in zip(offset, source.shape, strides, low.shape, strict=True)
        ]
        low = low + lax.pad(part_low, jnp.zeros((), low.dtype), config)
        high = high + lax.pad(part_high, jnp.zeros((), low.dtype), config)
    crop = [(-int(a), -int(b), 0) for a, b in padding]
    return Box(*widen(*both(lambda v: lax.pad(v, jnp.zeros((), v.dtype), crop), Box(low, high))))


# --- products -----------------------------------------------------------------------------------


Multiply = Callable[[jax.Array, jax.Array], jax.Array]


def _bilinear(eqn: Equation, multiply: Multiply, a: Operand, b: Operand, terms: int) -> Ends:
    """Bounds sums of `terms` products by a few evaluations at endpoints (T1).

    The bounds are exact if a factor has a known sign or is a point. Otherwise a = a+ - a-, and both
    parts are bounded separately. That is exact for entries of either factor that do not cross zero,
    and else at most twice too wide.
    """
    if not isinstance(b, Interval) or (is_nonnegative(b) and isinstance(a, Interval)):
        straight = multiply
        multiply, a, b = (lambda x, y: straight(y, x)), b, a
    if eqn.product == "rump":
        return _midpoint_radius(multiply, a, b, terms)
    if not isinstance(b, Interval) and not isinstance(
        a, Interval
    ):  # two points: only rounding is uncertain
        value, error = multiply(a, b), slack(b.dtype, terms + 2) * multiply(jnp.abs(a), jnp.abs(b))
        return value - error, value + error
    b = inflate(b, terms + 6)
    known = is_nonnegative(a)
    if not isinstance(a, Interval):
        plus, minus = jnp.maximum(a, 0), jnp.maximum(-a, 0)
        low, high = multiply(plus, b.lower), multiply(plus, b.upper)
        return (
            (low, high)
            if known
            else (low - multiply(minus, b.upper), high - multiply(minus, b.lower))
        )
    low_plus, high_plus = jnp.maximum(b.lower, 0), jnp.maximum(b.upper, 0)
    low_minus, high_minus = jnp.minimum(b.lower, 0), jnp.minimum(b.upper, 0)
    p_low, p_high = jnp.maximum(a.lower, 0), jnp.maximum(a.upper, 0)
    low = multiply(p_low, low_plus) + multiply(p_high, low_minus)
    high = multiply(p_high, high_plus) + multiply(p_low, high_minus)
    if known:
        return low, high
    n_low, n_high = jnp.maximum(-a.upper, 0), jnp.maximum(-a.lower, 0)
    return (
        low - (multiply(n_high, high_plus) + multiply(n_low, high_minus)),
        high - (multiply(n_low, low_plus) + multiply(n_high, low_minus)),
    )


def _midpoint_radius(multiply: Multiply, a: Operand, b: Operand, terms: int) -> Ends:
    """Bounds |a b - a_m b_m| <= |a_m| b_r + a_r (|b_m| + b_r) (Rump 1999)."""
    b_mid = (lower(b) + upper(b)) / 2
    # The second term covers the rounding of the midpoints, the products and their sums.
    b_rad = jnp.maximum(upper(b) - b_mid, b_mid - lower(b)) + slack(b.dtype, terms + 8) * magnitude(
        b
    )
    if not isinstance(a, Interval):
        mid, rad = multiply(a, b_mid), multiply(jnp.abs(a), b_rad)
    else:
        a_mid = (a.lower + a.upper) / 2
        a_rad = jnp.maximum(a.upper - a_mid, a_mid - a.lower)
        mid = multiply(a_mid, b_mid)
        rad = multiply(jnp.abs(a_mid), b_rad) + multiply(a_rad, jnp.abs(b_mid) + b_rad)
    return mid - rad, mid + rad


@register_rule("conv_general_dilated")
def _conv(eqn: Equation, a: Operand, b: Operand) -> Operand:
    names = (
        "window_strides",
        "padding",
        "lhs_dilation",
        "rhs_dilation",
        "dimension_numbers",
        "feature_group_count",
    )
    params = {name: eqn.params[name] for name in (*names, "batch_group_count")}
    terms = math.prod(b.shape[d] for d in eqn.params["dimension_numbers"].rhs_spec[1:])

    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, y, **params, precision=lax.Precision.HIGHEST)

    ends = _bilinear(eqn, multiply, at_least_float32(a), at_least_float32(b), terms)
    return _product_result(eqn, ends, terms, nonnegative=is_nonnegative(a) and is_nonnegative(b))


def _product_result(eqn: Equation, ends: Ends, terms: int, *, nonnegative: bool) -> Box:
    least = (8 * terms + 8) * tiny(ends[0].dtype)
    return _narrow(eqn, ends[0] - least, ends[1] + least, nonnegative=nonnegative)


@register_rule("dot_general")
def _dot_general(eqn: Equation, a: Operand, b: Operand) -> Operand:
    a, b = at_least_float32(a), at_least_float32(b)
    dims = eqn.params["dimension_numbers"]
    (a_contract, _), (a_batch, _) = dims
    terms = math.prod(a.shape[d] for d in a_contract)
    tight = eqn.product == "tight" and not a_batch
    unsigned = (
        not (is_nonnegative(a) or is_nonnegative(b))
        and isinstance(a, Interval)
        and isinstance(b, Interval)
    )
    if tight and terms == 1:
        arrays, outer = outer_parts(eqn, a, b)
        result = outer(*arrays)
    else:
        if tight and unsigned and terms <= _UNROLLED:
            ends = _corner_sum(a, b, dims)
        else:
            length, multiply = dot_product(dims, terms)
            ends = _bilinear(eqn, multiply, a, b, length)
        result = _product_result(
            eqn, ends, terms, nonnegative=is_nonnegative(a) and is_nonnegative(b)
        )
    if tight:
        use_zero_sum(eqn, result, a, b, dims)
        _note_differences(result, a, b, dims)
    return result


Dims = Any  # ((a_contract, b_contract), (a_batch, b_batch)) of lax.dot_general


def is_outer(eqn: Any) -> bool:
    """Returns whether each entry of a dot_general is one product."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return not batch and math.prod(eqn.invars[0].aval.shape[d] for d in contracted) == 1


def dot_product(dims: Dims, terms: int) -> tuple[int, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Returns the number of roundings of an entry and a full-precision dot product."""
    (a_contract, b_contract), (a_batch, _) = dims

    def plain(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST)

    if terms <= _LONG or len(a_contract) > 1 or a_batch:
        return terms, plain
    levels = int(math.log2(math.sqrt(terms)))
    blocks = 2**levels
    size = math.ceil(terms / blocks)

    def blocked(x: jax.Array, y: jax.Array) -> jax.Array:
        parts = []
        for v, axis in ((x, a_contract[0]), (y, b_contract[0])):
            v = jnp.moveaxis(v, axis, -1)
            v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, blocks * size - terms)])
            parts.append(v.reshape(*v.shape[:-1], blocks, size))
        x, y = parts
        last, blocks_of = ((x.ndim - 1,), (y.ndim - 1,)), ((x.ndim - 2,), (y.ndim - 2,))
        products = lax.dot_general(x, y, (last, blocks_of), precision=lax.Precision.HIGHEST)
        # XLA may merge a reduction over a batch axis into the dot product, so the blocks are added
        # one by one.
        for level in reversed(range(levels)):
            products = products[: 2**level] + products[2**level :]
        return products[0]

    return size + levels, blocked


def _last(x: Operand, axes: Sequence[int]) -> Operand:
    """Moves contracted axes to the end and merges them."""
    kept = [d for d in range(len(x.shape)) if d not in axes]
    return moved(
        lambda v: jnp.transpose(v, (*kept, *axes)).reshape(*(v.shape[d] for d in kept), -1), x
    )


def _index(x: Operand, i: int) -> Operand:
    return moved(lambda v: v[..., i], x)


def _all_products(x: Operand, y: Operand, shared: int = 0) -> Ends:
    """Pairs every entry of x with every entry of y for `_corner_products`, except along the last
    `shared` axes.
    """

    def spread(v: Operand, new: int, kept: int) -> Operand:
        place = len(v.shape) - kept
        return moved(
            lambda end: end.reshape(*end.shape[:place], *(1,) * new, *end.shape[place:]), v
        )

    left, right = len(x.shape) - shared, len(y.shape)
    return _corner_products(spread(x, right - shared, shared), spread(y, left, right))


def outer_parts(
    eqn: Equation, a: Operand, b: Operand
) -> tuple[list[jax.Array], Callable[..., Box]]:
    """Splits the rule of an outer product into arrays of the operands' sizes and a function of
    these arrays.

    A caller that keeps the arrays in memory prevents XLA from computing them again for every entry.
    """
    (a_contract, b_contract), _ = eqn.params["dimension_numbers"]
    a, b = at_least_float32(a), at_least_float32(b)
    if a_contract:
        a, b = (_index(_last(x, axes), 0) for x, axes in ((a, a_contract), (b, b_contract)))
    # One operand is widened by the rounding instead of every entry.
    if isinstance(a, Interval):
        a = inflate(a, 2, keep_sign=True)
    else:
        b = inflate(b, 2, keep_sign=True)
    points, signs = (
        [not isinstance(x, Interval) for x in (a, b)],
        [is_nonnegative(x) for x in (a, b)],
    )

    def multiply(*arrays: jax.Array) -> Box:
        x = [v.reshape(*v.shape, *(1,) * arrays[2].ndim) for v in arrays[:2]]
        y = [v.reshape(*(1,) * arrays[0].ndim, *v.shape) for v in arrays[2:]]
        if any(points):
            # One of two terms is zero. A minimum of two products that keeps NaN would take longer.
            (low, high), (positive, negative) = (y, x) if points[0] else (x, y)
            ends = low * positive + high * negative, high * positive + low * negative
        else:
            ends = _corner_products(Box(*x, nonnegative=signs[0]), Box(*y, nonnegative=signs[1]))
        return _product_result(eqn, ends, 1, nonnegative=all(signs))

    def parts(x: Operand) -> list[jax.Array]:
        return (
            [x.lower, x.upper]
            if isinstance(x, Interval)
            else [jnp.maximum(x, 0), jnp.minimum(x, 0)]
        )

    return [*parts(a), *parts(b)], multiply


def _corner_sum(a: Operand, b: Operand, dims: Dims) -> Ends:
    """Bounds a short sum of exact products."""
    (a_contract, b_contract), _ = dims
    a, b = _last(a, a_contract), _last(b, b_contract)
    terms = a.shape[-1]
    b = inflate(b, terms + 2)
    if (
        math.prod(a.shape) > terms and math.prod(b.shape) > terms
    ):  # matrices: slower to compute, faster to compile
        low, high = _all_products(a, b, shared=1)
        return jnp.sum(low, axis=-1), jnp.sum(high, axis=-1)
    lows, highs = zip(
        *(_all_products(_index(a, i), _index(b, i)) for i in range(terms)), strict=True
    )
    return functools.reduce(jnp.add, lows), functools.reduce(jnp.add, highs)


def use_zero_sum(eqn: Equation, result: Box, a: Operand, b: Operand, dims: Dims) -> None:
    """Tightens sum_j d_j w_j by sum_j d_j (w_j - w_c), which is equal for every c if the d_j sum to
    zero (T3).
    """
    (a_contract, b_contract), _ = dims
    if len(a_contract) != 1:
        return
    for d, w, d_axis, w_axis in (
        (a, b, a_contract[0], b_contract[0]),
        (b, a, b_contract[0], a_contract[0]),
    ):
        if not (
            isinstance(d, Box) and d.zero_sum and d_axis == d.ndim - 1 and d.shape[-1] <= _CENTRED
        ):
            continue
        rows = _last(w, [w_axis])
        size = rows.shape[-1]
        for c in range(size):
            ends = widen(
                lower(rows) - upper(rows)[..., c : c + 1], upper(rows) - lower(rows)[..., c : c + 1]
            )
            itself = (np.arange(size) == c).reshape(*(1,) * (len(rows.shape) - 1), size)
            centred = Box(*(jnp.where(itself, 0, end) for end in ends))
            last = (centred.ndim - 1,)
            pair, places = (
                ((d, centred), ((d_axis,), last)) if d is a else ((centred, d), (last, (d_axis,)))
            )
            below, above = _corner_sum(*pair, (places, ((), ())))
            least = 8 * size * tiny(below.dtype)
            bounds = _narrow(eqn, below - least, above + least)
            result.lower = jnp.maximum(result.lower, bounds.lower)
            result.upper = jnp.minimum(result.upper, bounds.upper)
        return


def _note_differences(result: Box, a: Operand, b: Operand, dims: Dims) -> None:
    """Stores how to bound z_j - z_c = sum_n h_n (w_nj - w_nc) for a result z [..., K] = h w
    (T2).
    """
    (a_contract, b_contract), _ = dims
    if len(a_contract) != 1 or len(a.shape) + len(b.shape) - 2 != result.ndim:
        return
    h, w, h_axis, w_axis = a, b, a_contract[0], b_contract[0]
    if len(b.shape) == 1 and len(a.shape) == 2:
        h, w, h_axis, w_axis = b, a, w_axis, h_axis
    if len(w.shape) != 2 or not 1 < w.shape[1 - w_axis] <= _PAIRWISE:
        return

    def differences() -> jax.Array:
        low, high = (jnp.moveaxis(end(w), w_axis, 0) for end in (lower, upper))  # [n, K]
        ends = widen(low[:, :, None] - high[:, None, :], high[:, :, None] - low[:, None, :])
        gap = Box(*map(_off_diagonal, ends))  # [n, K, K]
        length, multiply = dot_product((((h_axis,), (0,)), ((), ())), h.shape[h_axis])
        tight = Equation("dot_general", {}, (), "tight", lambda: [], lambda c, x: [])
        _, top = _bilinear(tight, multiply, h, gap, length)
        return _off_diagonal(top + 8 * h.shape[h_axis] * tiny(top.dtype))

    result.differences = differences


# --- losses -------------------------------------------------------------------------------------


def pairwise_gaps(logits: Operand, product: str = "tight") -> jax.Array:
    """Computes upper bounds [..., j, c] of z_j - z_c, for logits z [..., K]."""
    high, low = upper(logits), lower(logits)
    box = high[..., :, None] - low[..., None, :]
    # The difference of two logits of -inf (probability zero) is unknown. A NaN stays NaN.
    vague = jnp.isnan(box) & ~jnp.isnan(high)[..., :, None] & ~jnp.isnan(low)[..., None, :]
    box = _off_diagonal(outward(box, 1))
    box = jnp.where(vague, jnp.inf, box)
    if product == "tight" and isinstance(logits, Box) and logits.differences is not None:
        gaps = logits.differences()
        return jnp.where(jnp.isnan(gaps), box, jnp.minimum(box, gaps))
    return box


def certain_argmax(logits: Operand, product: str = "tight") -> jax.Array:
    """Returns the index [] of the entry of z [K] that is the largest at every point, or -1. Needs K
    >= 2.
    """
    if logits.shape[-1] > _PAIRWISE:
        best = jnp.argmax(lower(logits))
        rest = jnp.where(jnp.arange(logits.shape[-1]) == best, -jnp.inf, upper(logits))
        return jnp.where(jnp.max(rest) < lower(logits)[best], best, -1).astype(jnp.int32)
    gaps = pairwise_gaps(logits, product)
    wins = jnp.all((gaps < 0) | np.eye(gaps.shape[-1], dtype=bool), axis=0)
    return jnp.where(jnp.any(wins), jnp.argmax(wins), -1).astype(jnp.int32)


def probabilities(gaps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bounds softmax(z) by p_c = 1 / sum_j exp(z_j - z_c), from upper bounds [..., j, c] of z_j -
    z_c.
    """
    # z_j - z_c >= -(upper bound of z_c - z_j)
    low, high = 1 / jnp.sum(jnp.exp(gaps), axis=-2), 1 / jnp.sum(jnp.exp(-gaps), axis=-1)
    low, high = widen(low, high, gaps.shape[-1] + 20)
    return jnp.maximum(low, 0), jnp.minimum(high, 1)


@register_rule("softmax_cross_entropy_gradient")
def _softmax_gradient(eqn: Equation, logits: Operand, weights: Operand) -> Operand:
    """Bounds (sum_k y_k) softmax(z) - y by differences of logits and by the simplex constraint
    (T3).
    """
    low, high = probabilities(pairwise_gaps(logits, eqn.product))
    if eqn.product == "tight":
        below, above = widen(1 - _others(high), 1 - _others(low), 2)
        error = slack(low.dtype, low.shape[-1] + 4)  # the others sum to at most 1 at any point
        above, below = above + error, below - error * jnp.maximum(1, _others(high))
        low, high = jnp.maximum(low, below), jnp.minimum(high, above)
    total = Box(
        *both(lambda v: jnp.sum(v, axis=-1, keepdims=True), inflate(weights, low.shape[-1]))
    )
    low, high = widen(*_corner_products(Box(low, high, nonnegative=True), total))
    return Box(*widen(low - upper(weights), high - lower(weights)), zero_sum=True)


@register_rule("softmax_cross_entropy")
def _softmax_value(eqn: Equation, logits: Operand, weights: Operand) -> Operand:
    """Bounds sum_k y_k log sum_j exp(z_j - z_k)."""
    gaps = pairwise_gaps(logits, eqn.product)
    low, high = _log_sum_exp(-gaps, axis=-1), _log_sum_exp(gaps, axis=-2)
    error = slack(low.dtype, gaps.shape[-1] + 24)
    low, high = low - error * (1 + jnp.abs(low)), high + error * (1 + jnp.abs(high))
    ends = widen(*_corner_products(weights, Box(low, high, nonnegative=True)))
    # A class without weight adds nothing even if its loss is unbounded.
    absent = (lower(weights) == 0) & (upper(weights) == 0)
    low, high = (jnp.where(absent, 0, end) for end in ends)
    scale = slack(low.dtype, low.shape[-1] + 2)
    low, high = (
        jnp.sum(end, axis=-1) for end in (low - scale * jnp.abs(low), high + scale * jnp.abs(high))
    )
    return Box(*widen(low, high))


def _log_sum_exp(x: jax.Array, axis: int) -> jax.Array:
    top = jnp.max(x, axis=axis, keepdims=True)
    shift = jnp.where(jnp.isfinite(top), top, 0)
    return jnp.squeeze(shift, axis) + jnp.log(jnp.sum(jnp.exp(x - shift), axis=axis))


@register_rule("sigmoid_cross_entropy_gradient")
def _sigmoid_gradient(eqn: Equation, logits: Operand, label: Operand) -> Operand:
    """Bounds sigmoid(z) - y."""
    low, high = widen(*both(jax.nn.sigmoid, logits), 16)
    return Box(*widen(jnp.maximum(low, 0) - upper(label), jnp.minimum(high, 1) - lower(label)))


@register_rule("sigmoid_cross_entropy")
def _sigmoid_value(eqn: Equation, logits: Operand, label: Operand) -> Operand:
    """Bounds log(1 + exp(z)) - y z, which is convex in z with its minimum where sigmoid(z) = y."""
    low, high = lower(logits), upper(logits)

    def value(z: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.maximum(z, 0) - y * z + jnp.log1p(jnp.exp(-jnp.abs(z)))

    tops, bottoms = [], []
    for y in {id(v): v for v in (lower(label), upper(label))}.values():
        ends = [value(low, y), value(high, y)]
        turn = jnp.clip(jnp.log(jnp.clip(y, 0, 1)) - jnp.log1p(-jnp.clip(y, 0, 1)), low, high)
        tops += ends
        # An error in the turning point changes the value by the square of the error, far below the
        # slack.
        bottoms.append(_least([*ends, value(turn, y)]))
    error = slack(low.dtype, 32) * (1 + magnitude(logits) * jnp.maximum(1, magnitude(label)))
    return Box(_least(bottoms) - error, _most(tops) + error)


@register_rule("binary_hinge", "binary_hinge_gradient")
def _binary_hinge(eqn: Equation, logits: Operand, sign: Operand) -> Operand:
    """Bounds max(0, 1 - s z) or -s [1 - s z > 0]."""
    low, high = widen(*_corner_products(sign, logits))
    low, high = widen(1 - high, 1 - low)
    if eqn.name == "binary_hinge":
        return Box(jnp.maximum(low, 0), jnp.maximum(high, 0), nonnegative=True)
    active = Box((low > 0).astype(low.dtype), (~(high <= 0)).astype(low.dtype), nonnegative=True)
    low, high = _corner_products(active, sign)
    return Box(-high, -low)


@register_rule("multiclass_hinge", "multiclass_hinge_gradient")
def _multiclass_hinge(eqn: Equation, logits: Operand, weights: Operand) -> Operand:
    """Bounds max(0, 1 + max_{k != y} z_k - z_y) or (e_j - e_y) [loss > 0]."""
    if isinstance(weights, Interval):
        raise NoRuleError("It does not support a label that depends on an interval.")
    true = jnp.argmax(weights, axis=-1)
    is_true = jax.nn.one_hot(true, weights.shape[-1], dtype=jnp.bool_)
    gaps = pairwise_gaps(logits, eqn.product)
    # Bounds of z_k - z_y for every class k.
    above = jnp.take_along_axis(gaps, true[..., None, None], axis=-1)[..., 0]
    below = -jnp.take_along_axis(gaps, true[..., None, None], axis=-2)[..., 0, :]
    above, below = (jnp.where(is_true, -jnp.inf, v) for v in (above, below))
    nan = jnp.isnan(weights).any(axis=-1)
    low, high = (
        jnp.where(nan, jnp.nan, v)
        for v in widen(1 + jnp.max(below, axis=-1), 1 + jnp.max(above, axis=-1))
    )
    if eqn.name == "multiclass_hinge":
        return Box(jnp.maximum(low, 0), jnp.maximum(high, 0), nonnegative=True)
    certain, possible = (low > 0)[..., None], ~(high <= 0)[..., None]
    # Class k can be the rival unless the logit of another class is certainly larger.
    beaten = (jnp.where(is_true[..., :, None], jnp.inf, gaps) < 0) & ~is_true[
        ..., None, :
    ]  # [k, j]: z_k < z_j
    may_rival = ~jnp.any(beaten, axis=-1) & ~is_true
    surely = may_rival & (jnp.sum(may_rival, axis=-1, keepdims=True) == 1)
    dtype = low.dtype
    low = jnp.where(is_true, -possible.astype(dtype), (surely & certain).astype(dtype))
    high = jnp.where(is_true, -certain.astype(dtype), (may_rival & possible).astype(dtype))
    return Box(low, high, zero_sum=True)


# --- control flow -------------------------------------------------------------------------------


@register_rule(
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call"
)
@register_rule("custom_vjp_call", "custom_vmap_call")
def _call(eqn: Equation, *operands: Operand) -> list[Operand]:
    return eqn.evaluate(called_program(eqn.params), operands)


def _plain(xs: Sequence[Operand], wanted: Sequence[bool] | None = None) -> list[Any]:
    """Converts intervals to pytrees without facts, which loops can carry, and points to intervals
    where wanted.
    """
    wanted = [isinstance(x, Interval) for x in xs] if wanted is None else wanted
    return [unchecked(lower(x), upper(x)) if w else x for x, w in zip(xs, wanted, strict=True)]


def _carried(
    body: Callable[[list[Operand]], list[Operand]], init: Sequence[Operand]
) -> tuple[list[bool], list[Any]]:
    """Returns (which entries of a loop's state become intervals, the initial state)."""
    kinds = [isinstance(x, Interval) for x in init]
    while True:
        state = _plain(init, kinds)
        outs = jax.eval_shape(lambda state: _plain(body(state)), state)
        grown = [
            k or isinstance(x, Interval) for k, x in zip(kinds, outs[: len(init)], strict=True)
        ]
        if grown == kinds:
            return kinds, jax.tree.map(jnp.asarray, state)
        kinds = grown


@register_rule("scan")
def _scan(eqn: Equation, *operands: Operand) -> list[Operand]:
    p, closed = eqn.params, eqn.params["jaxpr"]
    first_carry, first_x = scan_starts(closed, operands, eqn.outputs)
    consts, init, xs = (
        operands[:first_carry],
        operands[first_carry:first_x],
        _plain(operands[first_x:]),
    )
    first = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), xs)
    kinds, start = _carried(lambda state: eqn.evaluate(closed, [*consts, *state, *first]), init)

    def body(state: Any, x: Any) -> Any:
        outs = eqn.evaluate(closed, [*consts, *state, *x])
        return _plain(outs[: len(init)], kinds), _plain(outs[len(init) :])

    final, stacked = lax.scan(
        body, start, xs, length=p["length"], reverse=p["reverse"], unroll=p.get("unroll", 1)
    )
    return [*final, *stacked]


@register_rule("while")
def _while(eqn: Equation, *operands: Operand) -> list[Operand]:
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]

    def step(state: Sequence[Operand]) -> list[Operand]:
        return eqn.evaluate(p["body_jaxpr"], [*body_consts, *state])

    def condition(state: Any) -> jax.Array:
        (result,) = eqn.evaluate(p["cond_jaxpr"], [*cond_consts, *state])
        if isinstance(result, Interval):
            raise NoRuleError("The condition of the loop depends on an interval.")
        return result

    kinds, start = _carried(step, operands[n_cond + n_body :])
    return lax.while_loop(condition, lambda state: _plain(step(state), kinds), start)


@register_rule("cond")
def _cond(eqn: Equation, index: Operand, *operands: Operand) -> list[Operand]:
    branches = eqn.params["branches"]
    if not isinstance(index, Interval):
        functions = [lambda xs, b=b: eqn.evaluate(b, xs) for b in branches]
        xs = _plain(operands)
        shapes = [jax.eval_shape(lambda xs, f=f: _plain(f(xs)), xs) for f in functions]
        kinds = [any(isinstance(x, Interval) for x in cases) for cases in zip(*shapes, strict=True)]
        alike = [lambda xs, f=f: _plain(f(xs), kinds) for f in functions]
        chosen: list[Operand] = lax.switch(jnp.asarray(index, jnp.int32), alike, xs)
        return chosen
    results = [eqn.evaluate(b, operands) for b in branches]
    return [_select_unknown(index, *cases) for cases in zip(*results, strict=True)]
