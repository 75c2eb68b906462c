"""Patterns of equations in which one quantity occurs twice, and the rules that replace them.

Interval arithmetic treats the operands of an equation as independent. So x - x over [0, 1] is
[-1, 1], and the bounds of a softmax would be useless. `rewrite` recognises the few patterns that
losses and their derivatives contain. Each has a rule of its own, of the quantities that are
independent.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

Producers = Mapping[Any, Any]  # the equation that computes a variable
Match = tuple[str, Sequence[Any]]  # the name of a rule, and its operands

JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


def rewrite(eqn: Any, producers: Producers) -> Match:
    """Returns the name of the rule for an equation, and the rule's operands."""
    for pattern in _PATTERNS.get(eqn.primitive.name, ()):
        match = pattern(eqn, producers)
        if match is not None:
            return match
    return eqn.primitive.name, eqn.invars


# --- Arithmetic ---------------------------------------------------------------------------------


def _equals_its_extremum(eqn: Any, producers: Producers) -> Match | None:
    """Matches x == max(x, z), in the derivative of max. It means x >= z."""
    # With independent operands, x would equal max(x, z) for certain only where both are points.
    pair = _meets_itself(eqn.invars, producers, ("max", "min"))
    if pair is None:
        return None
    name, x, z = pair
    return ("ge" if name == "max" else "le"), (x, z)


def _compares_with_itself(eqn: Any, producers: Producers) -> Match | None:
    """Matches x == x and x != x, the usual test for NaN."""
    x, y = eqn.invars
    if _same(x, y):
        return (f"{eqn.primitive.name}_itself", (x,))
    return None


def _square(eqn: Any, producers: Producers) -> Match | None:
    """Matches x * x, which is never negative."""
    x, y = eqn.invars
    if _same(x, y):
        return ("square", (x,))
    return None


def _x_plus_xy(eqn: Any, producers: Producers) -> Match | None:
    """Matches x + x y. JAX 0.10 computes the derivative of tanh so, with x = g (1 - y)."""
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return None
    pair = _meets_itself(eqn.invars, producers, ("mul",))
    # A literal x has one value, so nothing uncertain occurs twice.
    if pair is None or isinstance(pair[1], jex.Literal):
        return None
    _, x, y = pair
    return "x_plus_xy", (x, y)


def _meets_itself(
    operands: Sequence[Any], producers: Producers, names: Sequence[str]
) -> tuple[str, Any, Any] | None:
    """Returns (name, x, z) if the operands are x and name(x, z), in any order."""
    for x, y in (operands, operands[::-1]):
        inner = _producer(y, producers)
        if inner is None or inner.primitive.name not in names:
            continue
        left, right = inner.invars
        if _same(x, left):
            return inner.primitive.name, x, right
        if _same(x, right):
            return inner.primitive.name, x, left
    return None


# --- Functions of JAX ---------------------------------------------------------------------------

# Functions of JAX whose bodies use an operand twice. JAX 0.12 computes exp(-x^2), in the derivative
# of erf, from the bits of x.
_FUNCTIONS = ("exp_neg_sq", "logaddexp", "logaddexp2")


def _function_of_jax(eqn: Any, producers: Producers) -> Match | None:
    body = eqn.params["call_jaxpr"].jaxpr
    # Such as "logaddexp at .../jax/_src/lax/other.py:261". Nothing else in a jaxpr names the file.
    name, _, place = (body.debug_info.func_src_info or "").partition(" at ")
    # A user's function may have the same name.
    if name in _FUNCTIONS and place.startswith(JAX_FOLDER):
        return name, eqn.invars
    return None


def _share(eqn: Any, producers: Producers) -> Match | None:
    """Matches exp(x - logaddexp(x, y)), the derivative of logaddexp."""
    name = eqn.primitive.name
    difference = _producer(eqn.invars[0], producers, "sub")
    if difference is None:
        return None
    # With independent operands the share could exceed 1.
    x, total = (_finite(operand, producers) for operand in difference.invars)
    log_sum = _producer(total, producers, "custom_jvp_call")
    function = "logaddexp" if name == "exp" else "logaddexp2"
    if log_sum is None or rewrite(log_sum, producers)[0] != function:
        return None
    left, right = log_sum.invars
    if _same(x, left):
        return f"{name}_share", (left, right)
    if _same(x, right):
        return f"{name}_share", (right, left)
    return None


def _finite(x: Any, producers: Producers) -> Any:
    """Returns z if x is where(z == inf, ..., z), which JAX subtracts in place of z. Else x."""
    select = _producer(x, producers, "select_n")
    if select is None:
        return x
    # `select_n` has the case of False first.
    predicate, z = select.invars[:2]
    test = _producer(predicate, producers, "eq")
    if test is None or not _same(test.invars[0], z):
        return x
    bound = test.invars[1]
    if isinstance(bound, jex.Literal) and np.all(bound.val == np.inf):
        return z
    return x


# --- Softmax over the last axis -----------------------------------------------------------------


def _softmax(eqn: Any, producers: Producers) -> Match | None:
    """Matches exp(a - m) / sum(exp(a - m)), with m constant along the axis."""
    top, bottom = eqn.invars
    exp = _producer(top, producers, "exp")
    summed = _exponent_of_sum(bottom, producers)
    if exp is None or summed is None or summed is not exp.invars[0]:
        return None
    shift = _shift(summed, producers)
    if shift:
        return ("softmax", (shift[0],))
    return None


def _log_softmax(eqn: Any, producers: Producers) -> Match | None:
    """Matches s - log(sum(exp(s))). The operand is a if s = a - m with a constant m, else s."""
    shifted, total = eqn.invars
    log = _producer(_source(total, producers, _repeats_last_axis), producers, "log")
    if log is None or _exponent_of_sum(log.invars[0], producers) is not shifted:
        return None
    shift = _shift(shifted, producers)
    # The shift cancels. Its own bounds would only widen the result.
    return "log_softmax", (shift[0] if shift else shifted,)


def _log_sum_exp(eqn: Any, producers: Producers) -> Match | None:
    """Matches log(sum(exp(a - m))) + m, with m constant along the axis."""
    for summand, m in (eqn.invars, eqn.invars[::-1]):
        log = _producer(summand, producers, "log")
        if log is None:
            continue
        shift = _shift(_exponent_of_sum(log.invars[0], producers), producers)
        if shift is None:
            continue
        a, subtracted = shift
        # One sum for each row of a, which no axis repeats.
        rows = log.outvars[0].aval.size
        is_row_sum = rows * a.aval.shape[-1] == a.aval.size
        source = _source(subtracted, producers, _adds_axes)
        adds_back = source is _source(m, producers, _adds_axes)
        if is_row_sum and adds_back:
            return "log_sum_exp", (a,)
    return None


def _exponent_of_sum(total: Any, producers: Producers) -> Any:
    """Returns x if a value is sum(exp(x)) over the last axis. Else None."""

    # jax.nn.logsumexp takes the absolute value of the sum.
    def is_passed(eqn: Any) -> bool:
        return eqn.primitive.name == "abs" or _repeats_last_axis(eqn)

    source = _source(total, producers, is_passed)
    summation = _producer(source, producers, "reduce_sum")
    if summation is None:
        return None
    summand = summation.invars[0]
    if summation.params["axes"] != (summand.aval.ndim - 1,):
        return None
    exp = _producer(summand, producers, "exp")
    if exp is None:
        return None
    return exp.invars[0]


def _shift(x: Any, producers: Producers) -> tuple[Any, Any] | None:
    """Returns (a, m) if x = a - m, a has the shape of x, and m is constant along the last axis."""
    difference = _producer(x, producers, "sub")
    if difference is None:
        return None
    a, m = difference.invars
    if isinstance(a, jex.Literal):
        return None
    last = len(x.aval.shape) - 1
    # Such as the maximum with `keepdims=True`, which XLA repeats along the axis.
    is_constant = m.aval.shape[last:] == (1,)
    if a.aval.shape == x.aval.shape and is_constant:
        return (a, m)
    return None


# --- Variables and their producers --------------------------------------------------------------


def _producer(
    atom: Any,
    producers: Producers,
    name: str | None = None,
) -> Any:
    """Returns the equation that computes a variable, if its primitive has this name. Else None."""
    if atom is None or isinstance(atom, jex.Literal):
        return None
    eqn = producers.get(atom)
    if eqn is None or name not in (None, eqn.primitive.name):
        return None
    return eqn


def _same(x: Any, y: Any) -> bool:
    """Returns whether two operands are one variable, or equal literals."""
    # Two literals of one value are two objects, unlike a variable that occurs twice.
    if isinstance(x, jex.Literal) and isinstance(y, jex.Literal):
        return bool(np.all(x.val == y.val))
    return x is y


def _source(
    atom: Any,
    producers: Producers,
    passes: Callable[[Any], bool],
) -> Any:
    """Returns the value behind equations of one operand that `passes` accepts."""
    while (eqn := _producer(atom, producers)) is not None and passes(eqn):
        atom = eqn.invars[0]
    return atom


def _adds_axes(eqn: Any) -> bool:
    """Returns whether an equation only adds axes of length one, or none."""
    # logsumexp stops the gradient of its shift. The value stays.
    if eqn.primitive.name == "stop_gradient":
        return True
    size_before = eqn.invars[0].aval.size
    size_after = eqn.outvars[0].aval.size
    return size_before == size_after and _repeats_last_axis(eqn)


def _repeats_last_axis(eqn: Any) -> bool:
    """Returns whether an equation adds or repeats trailing axes, with the others in place."""
    before = eqn.invars[0].aval.shape
    after = eqn.outvars[0].aval.shape
    if eqn.primitive.name == "broadcast_in_dim":
        if eqn.params["broadcast_dimensions"] != tuple(range(len(before))):
            return False
    elif eqn.primitive.name != "reshape":
        return False
    lead = len(after) - 1
    # [..., K] or [..., 1] or [...] becomes [..., K].
    trailing = before[lead:]
    keeps_others = before[:lead] == after[:-1]
    return keeps_others and trailing in ((), (1,), after[-1:])


_PATTERNS: dict[str, tuple[Callable[[Any, Producers], Match | None], ...]] = {
    "eq": (_equals_its_extremum, _compares_with_itself),
    "ne": (_compares_with_itself,),
    "mul": (_square,),
    "add": (_x_plus_xy, _log_sum_exp),
    "add_any": (_x_plus_xy,),
    "custom_jvp_call": (_function_of_jax,),
    "exp": (_share,),
    "exp2": (_share,),
    "div": (_softmax,),
    "sub": (_log_softmax,),
}
