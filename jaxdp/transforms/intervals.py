"""`interval` turns a JAX function into a function of intervals whose result contains its value at
every point.

It is an interpreter of jaxprs in three layers. `boxes` holds the values, outward rounding and the
registry of rules. `interval_rules` holds one rule per primitive. This module traces the function,
rewrites the few patterns in which one quantity occurs twice (maximum, softmax, square), and applies
the rules.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxdp.transforms import interval_rules
from jaxdp.transforms.boxes import (
    RULES,
    Box,
    Equation,
    Interval,
    Operand,
    is_float,
    is_nonnegative,
    lower,
    register_rule,
    unchecked,
    upper,
    widen,
)
from jaxdp.transforms.walker import bind_equation

__all__ = [
    "Interval",
    "UnsupportedPrimitive",
    "bound",
    "interval",
    "lower",
    "register_rule",
    "upper",
    "widen",
]

# Functions of JAX with a rule of their own.
_WHOLE = ("exp_neg_sq", "logaddexp", "logaddexp2")
_OURS, _JAX = (os.path.dirname(os.path.abspath(f)) + os.sep for f in (__file__, jax.__file__))


class UnsupportedPrimitive(NotImplementedError):
    """The error for a primitive without an interval rule, or without one for these operands."""


def interval(fun: Callable[..., Any], *, product: str = "tight") -> Callable[..., Any]:
    """Transforms `fun` into a function over intervals.

        box = jaxdp.Interval(lower, upper)
        bounds = jaxdp.interval(fun)(box, x)  # bounds.lower <= fun(p, x) <= bounds.upper for every p in the box
        gradients = jaxdp.interval(jax.grad(loss_fn))(box, example)  # of every parameter vector in the box

    It composes with `jax.jit`, `jax.vmap` and `jax.lax.scan` around it and inside `fun`, and with
    `jax.grad` inside. No control flow may depend on an interval except `lax.cond` and `lax.switch`.
    They return the hull of their branches.

    Args:
      fun: Any JAX function of arrays. Its primitives are checked when the result is called.
      product: How dot products and convolutions of two intervals are bounded. "tight" is exact if
        the sign of one operand is known or few terms are summed, and otherwise within a factor of
        two in width. "rump" uses midpoint and radius (Rump 1999), with at most one and a half times
        the exact width. It bounds losses logit by logit, as published implementations of interval
        training do.

    Returns:
      A function with the arguments of `fun`. Any leaf of an argument may be an `Interval`, and an
      `Interval` may replace a whole pytree. Other leaves are exactly known. It returns the result
      of `fun` with `Interval`s as leaves.

    Formal guarantees:
      *Soundness.* For every point of the arguments, the value of `fun` in real arithmetic lies
      inside. Endpoints are moved outward by a bound on the rounding of each operation
      (`boxes.slack`). The floating-point value of `fun` at a point of the box also lies inside,
      unless terms of its sums cancel almost completely. The proof assumes IEEE rounding of + - * /
      sqrt and sums in any order (on a GPU: no Winograd or FFT convolutions). It assumes elementary
      functions within 8 units in the last place (16 for erf).

      *Isotonicity.* Smaller arguments give a result inside the result of larger arguments, because
      no rule chooses a formula by endpoints. This also holds in floating point, except for
      `product="rump"`, softmax inside a network, values (not gradients) of the cross-entropies, and
      elementary functions that are not monotone. On XLA's CPU these fail by 10 units in the last
      place for erf, 6 for tanh, at most 3 for others, 0 for exp, log and logistic.

      =============================  ========================================================================
      case                           behaviour
      =============================  ========================================================================
      no argument is an interval     the result contains the exact value, and its width is the rounding
      division by zero, log of 0     infinite endpoints
      points outside of a domain     log and sqrt of negative points are ignored
      NaN at some point              that endpoint is infinite
      boolean results                [False, True] where both occur
      integer arithmetic             exact, no rounding
      bfloat16, float16              products and sums in float32, results rounded outward
      =============================  ========================================================================

    Raises:
      UnsupportedPrimitive: When called: a primitive has no rule. The message names it, its line and
          the remedy.
      ValueError: `product` is unknown.
    """
    if product not in ("tight", "rump"):
        raise ValueError(f"product must be 'tight' or 'rump', got {product!r}.")

    @functools.wraps(fun)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        results, tree = bound(fun, args, kwargs, product=product)
        return jax.tree.unflatten(tree, [_plain(x) for x in results])

    return bounded


def bound(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    product: str = "tight",
) -> tuple[list[Operand], Any]:
    """Bounds `fun` and keeps known facts: returns flat results, which are `Box`es or exact arrays,
    and their tree.
    """

    def expand(x: Any) -> Any:
        return jax.tree.map(Box, x.lower, x.upper) if _is_interval(x) else x

    args, kwargs = jax.tree.map(expand, (tuple(args), kwargs or {}), is_leaf=_is_interval)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_interval)

    def flat(*points: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, points)
        return fun(*args, **kwargs)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_interval(x) else x for x in leaves]
    closed, result = jax.make_jaxpr(flat, return_shape=True)(*shapes)
    points = [x if _is_interval(x) else jnp.asarray(x) for x in leaves]
    return _evaluate(closed, points, product), jax.tree.structure(result)


def _is_interval(x: Any) -> bool:
    return isinstance(x, Interval)


def _plain(x: Operand) -> Interval:
    """Converts a result for the user: without facts, and with infinite endpoints in place of
    NaN.
    """
    x = interval_rules.without_nan(x)
    return unchecked(jnp.asarray(lower(x)), jnp.asarray(upper(x)))


def stage(
    fun: Callable[[Any, Any], Any], moving: Any, fixed: Any, *, product: str = "tight"
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Splits bounds of `fun(moving, fixed)` into three parts, for callers that stream.

    Args:
      fun: A function of two pytrees that returns a pytree of arrays.
      moving, fixed: Pytrees of arrays or shapes. The parts receive intervals for `moving` and known
          points for `fixed`.

    Returns:
      `first(fixed) -> kept` computes the values that do not depend on `moving`. `second(moving,
      kept) -> factors` computes everything except final outer products, such as per-example
      gradients of dense layers. `third(factors)` computes these and returns a list of (lower,
      upper), one for each array of the result. `kept` and `factors` are pytrees of arrays for
      `jax.vmap` and `jax.lax.map`. The parts must be traced in this order.
    """
    moving_leaves, fixed_leaves = jax.tree.leaves(moving), jax.tree.leaves(fixed)
    trees = jax.tree.structure(moving), jax.tree.structure(fixed)

    def flat(moving: Sequence[Any], fixed: Sequence[Any]) -> Any:
        return jax.tree.leaves(fun(*map(jax.tree.unflatten, trees, (moving, fixed))))

    shapes = [
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs] for xs in (moving_leaves, fixed_leaves)
    ]
    closed = jax.make_jaxpr(flat)(*shapes)
    jaxpr = closed.jaxpr
    inputs, points = jaxpr.invars[: len(moving_leaves)], jaxpr.invars[len(moving_leaves) :]
    live = _live(jaxpr)
    producers = {v: eqn for eqn in live for v in eqn.outvars}
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    moved, early, late = set(inputs), list[Any](), list[Any]()
    for eqn in live:
        depends = any(v in moved for v in _variables(eqn.invars))
        (late if depends else early).append(eqn)
        moved.update(eqn.outvars if depends else ())
    tail = _final_outer_products(jaxpr, late)
    body = [eqn for eqn in late if eqn not in tail]
    # The arrays that an outer product reads are computed once, and not for every entry.
    outer = [eqn for eqn in tail if eqn.primitive.name == "dot_general" and product == "tight"]
    tail = [eqn for eqn in tail if eqn not in outer]

    def needed(eqns: Sequence[Any], results: Sequence[Any], known: set[Any]) -> list[Any]:
        """Returns the variables that `eqns` and `results` take from earlier parts."""
        atoms = [a for eqn in eqns for a in (*eqn.invars, *_rewrite(eqn, producers)[1])]
        own = {v for eqn in eqns for v in eqn.outvars} | known | set(consts)
        return [v for v in dict.fromkeys(_variables([*atoms, *results])) if v not in own]

    made = {v for eqn in outer for v in eqn.outvars}
    to_third = needed(tail, jaxpr.outvars, made)
    to_second = needed([*body, *outer], to_third, set(inputs))
    signs: dict[Any, bool] = {}
    multiply: list[Callable[..., Box]] = []

    def hand_over(values: dict[Any, Any], names: Sequence[Any]) -> list[Any]:
        signs.update({v: is_nonnegative(values[v]) for v in names})
        return [
            unchecked(x.lower, x.upper) if _is_interval(x) else x
            for x in (values[v] for v in names)
        ]

    def take_over(names: Sequence[Any], handed: Sequence[Any]) -> dict[Any, Any]:
        found = {
            v: Box(x.lower, x.upper, nonnegative=signs[v]) if _is_interval(x) else x
            for v, x in zip(names, handed, strict=True)
        }
        return consts | found

    def first(fixed: Any) -> Any:
        values = consts | dict(zip(points, jax.tree.leaves(fixed), strict=True))
        _run(jaxpr, early, values, producers, product)
        return hand_over(values, to_second)

    def second(moving: Any, kept: Any) -> Any:
        values = take_over(to_second, kept)
        values.update(zip(inputs, jax.tree.leaves(moving, is_leaf=_is_interval), strict=True))
        _run(jaxpr, body, values, producers, product)
        split = [
            interval_rules.outer_parts(
                _equation(jaxpr, eqn, product), *(_read(values, a) for a in eqn.invars)
            )
            for eqn in outer
        ]
        multiply[:] = [product for _, product in split]
        return hand_over(values, to_third), [arrays for arrays, _ in split]

    def third(factors: Any) -> list[tuple[jax.Array, jax.Array]]:
        handed, operands = factors
        values = take_over(to_third, handed)
        for eqn, bounds, arrays in zip(outer, multiply, operands, strict=True):
            values[eqn.outvars[0]] = bounds(*arrays)
        _run(jaxpr, tail, values, producers, product)
        results = [_read(values, a) for a in jaxpr.outvars]
        return [(jnp.asarray(lower(x)), jnp.asarray(upper(x))) for x in results]

    return first, second, third


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [a for a in atoms if not isinstance(a, jex.Literal)]


def _final_outer_products(jaxpr: Any, eqns: Sequence[Any]) -> list[Any]:
    """Finds outer products, with the equations that move their entries, which only one result
    uses.
    """
    made = {v: eqn for eqn in eqns for v in eqn.outvars}
    uses = [v for eqn in eqns for v in _variables(eqn.invars)] + _variables(jaxpr.outvars)
    found = []
    for v in _variables(jaxpr.outvars):
        chain = []
        while v in made and uses.count(v) == 1:
            eqn = made[v]
            chain.append(eqn)
            if eqn.primitive.name not in (
                "transpose",
                "reshape",
                "squeeze",
                "convert_element_type",
            ):
                break
            (v,) = eqn.invars
        last = chain[-1] if chain else None
        if (
            last is not None
            and last.primitive.name == "dot_general"
            and interval_rules.is_outer(last)
        ):
            found += chain
    return [eqn for eqn in eqns if eqn in found]


def _evaluate(closed: Any, operands: Sequence[Operand], product: str) -> list[Operand]:
    """Interprets a closed jaxpr without the equations that no result needs."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))
    eqns = _live(jaxpr)
    _run(jaxpr, eqns, values, {v: eqn for eqn in eqns for v in eqn.outvars}, product)
    return [_read(values, a) for a in jaxpr.outvars]


def _run(
    jaxpr: Any, eqns: Sequence[Any], values: dict[Any, Any], producers: dict[Any, Any], product: str
) -> None:
    """Interprets equations and adds their results to `values`. `producers` maps variables to their
    equations.
    """
    for eqn in eqns:
        inputs = [_read(values, a) for a in eqn.invars]
        if any(
            jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in (*eqn.invars, *eqn.outvars)
        ):
            raise UnsupportedPrimitive(
                _message(eqn, "`interval` does not support complex numbers.")
            )
        if any(map(_is_interval, inputs)) or not _is_exact(eqn):
            name, atoms = _rewrite(eqn, producers)
            outs = _apply(jaxpr, eqn, name, [_read(values, a) for a in atoms], product)
        else:
            outs = bind_equation(jaxpr, eqn, inputs)
        values.update(zip(eqn.outvars, outs, strict=True))


def _read(values: dict[Any, Any], atom: Any) -> Any:
    return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, jex.Literal) else values[atom]  # type: ignore[attr-defined]


def _live(jaxpr: Any) -> list[Any]:
    needed, kept = set(_variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            kept.append(eqn)
            needed.update(_variables(eqn.invars))
    return kept[::-1]


def _is_exact(eqn: Any) -> bool:
    """Returns whether exact operands give exact results."""
    plain = not [*jex.jaxprs_in_params(eqn.params)] and not any(
        is_float(v.aval) for v in eqn.outvars
    )
    return plain or eqn.primitive.name in interval_rules.EXACT


def _equation(jaxpr: Any, eqn: Any, product: str, name: str | None = None) -> Equation:
    return Equation(
        name=name or eqn.primitive.name,
        params=eqn.params,
        outputs=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars),
        product=product,
        bind=lambda *arrays: bind_equation(jaxpr, eqn, arrays),
        evaluate=lambda closed, xs: _evaluate(closed, xs, product),
    )


def _apply(jaxpr: Any, eqn: Any, name: str, operands: list[Any], product: str) -> list[Operand]:
    equation = _equation(jaxpr, eqn, product, name)
    if name not in RULES:
        raise UnsupportedPrimitive(
            _message(eqn, f"There is no interval rule for the primitive {name!r}.")
        )
    try:
        result = RULES[name](equation, *operands)
    except interval_rules.NoRuleError as error:
        raise UnsupportedPrimitive(
            _message(eqn, f"The interval rule of {name!r} does not apply. {error}")
        ) from None
    return [result] if isinstance(result, Interval | jax.Array | np.ndarray) else list(result)


def _message(eqn: Any, problem: str) -> str:
    return (
        f"{problem} It arises in {_user_line(eqn)}. Rewrite that line, or register a rule:\n"
        f"    @jaxdp.transforms.intervals.register_rule({eqn.primitive.name!r})\n"
        "    def rule(eqn, *operands): ...  # see register_rule"
    )


def _user_line(eqn: Any) -> str:
    """Returns the file, line and function outside of JAX and of this package's interpreter."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith((_OURS, _JAX)):
            return f"{frame.file_name}:{frame.line_num}, in {frame.function_name}"
    return "an unknown line"


def _rewrite(eqn: Any, producers: dict[Any, Any]) -> tuple[str, Sequence[Any]]:
    """Returns the name of the rule and its operands. Patterns that use one quantity twice have
    separate rules.
    """
    name, atoms = eqn.primitive.name, eqn.invars
    # The derivative of max(x, y) compares x with max(x, y). Interval arithmetic would treat the
    # sides as independent.
    if name == "eq" and (found := _meets_itself(atoms, producers, "max", "min")):
        return ("ge" if found[0] == "max" else "le"), found[1:]
    if name == "mul" and _same(atoms[0], atoms[1]):
        return "square", atoms[:1]
    # JAX 0.10 computes the derivative of tanh as x + x y with x = g (1 - y).
    if name in ("add", "add_any") and is_float(eqn.outvars[0].aval):
        found = _meets_itself(atoms, producers, "mul")
        if found and not isinstance(found[1], jex.Literal):
            return "x_plus_xy", found[1:]
    if name in ("eq", "ne") and _same(atoms[0], atoms[1]):
        return f"{name}_itself", atoms[:1]
    # Bodies that use an operand twice. JAX 0.12 computes exp(-x^2), in the derivative of erf, from
    # the bits of x.
    if name == "custom_jvp_call":
        return next(
            (known for known in _WHOLE if _is_of_jax(eqn.params["call_jaxpr"].jaxpr, known)), name
        ), atoms
    if name in ("exp", "exp2") and (operands := _share(atoms[0], producers, name)):
        return f"{name}_share", operands
    if name == "div" and (operands := _softmax(atoms[0], atoms[1], producers)):
        return "softmax", operands
    if name == "sub" and (operands := _log_softmax(atoms[0], atoms[1], producers)):
        return "log_softmax", operands
    if name == "add" and (operands := _log_sum_exp(atoms, producers)):
        return "log_sum_exp", operands
    return name, atoms


def _is_of_jax(body: Any, function: str) -> bool:
    """Returns whether a body is that of a function of JAX with this name."""
    name, _, place = (body.debug_info.func_src_info or "").partition(" at ")
    return name == function and place.startswith(_JAX)


def _meets_itself(
    atoms: Sequence[Any], producers: dict[Any, Any], *names: str
) -> tuple[str, Any, Any] | None:
    """Returns (name, x, z) if the atoms are x and y = name(x, z), in any order."""
    for x, y in (atoms, atoms[::-1]):
        made = _producer(y, producers)
        if made and made.primitive.name in names:
            for one, other in (made.invars, made.invars[::-1]):
                if _same(x, one):
                    return made.primitive.name, x, other
    return None


def _producer(atom: Any, producers: dict[Any, Any]) -> Any:
    return None if isinstance(atom, jex.Literal) else producers.get(atom)


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, jex.Literal) or isinstance(y, jex.Literal):
        return (
            isinstance(x, jex.Literal)
            and isinstance(y, jex.Literal)
            and bool(np.all(x.val == y.val))
        )
    return x is y


def _share(exponent: Any, producers: dict[Any, Any], exp: str) -> tuple[Any, Any] | None:
    """Matches exp(x - logaddexp(x, y)), the derivative of logaddexp. Returns (x, y)."""
    sub = _producer(exponent, producers)
    if not sub or sub.primitive.name != "sub":
        return None
    x, total = (_finite(a, producers) for a in sub.invars)
    made, known = _producer(total, producers), {"exp": "logaddexp", "exp2": "logaddexp2"}[exp]
    if (
        not made
        or made.primitive.name != "custom_jvp_call"
        or _rewrite(made, producers)[0] != known
    ):
        return None
    return next(
        ((one, other) for one, other in (made.invars, made.invars[::-1]) if _same(x, one)), None
    )


def _finite(x: Any, producers: dict[Any, Any]) -> Any:
    """Returns z if x is where(z == inf, ..., z), which JAX subtracts in place of z. Else returns
    x.
    """
    made = _producer(x, producers)
    if not made or made.primitive.name != "select_n":
        return x
    test, z = _producer(made.invars[0], producers), made.invars[1]
    if not test or test.primitive.name != "eq" or not _same(test.invars[0], z):
        return x
    bound = test.invars[1]
    return z if isinstance(bound, jex.Literal) and bool(np.all(bound.val == np.inf)) else x


def _log_softmax(shifted: Any, total: Any, producers: dict[Any, Any]) -> tuple[Any, ...] | None:
    """Matches s - log(sum(exp(s))) over the last axis. Returns (a,) if s = a - m with a constant m,
    else (s,).
    """
    log = _producer(_root(total, producers, _repeats_last), producers)
    if (
        not log
        or log.primitive.name != "log"
        or _sum_of_exp(log.invars[0], producers) is not shifted
    ):
        return None
    return _shifted(shifted, producers)[:1] or (shifted,)


def _log_sum_exp(atoms: Sequence[Any], producers: dict[Any, Any]) -> tuple[Any, ...] | None:
    """Matches log(sum(exp(a - m))) + m over the last axis, with m constant along it. Returns
    (a,).
    """
    for log, m in (atoms, atoms[::-1]):
        made = _producer(log, producers)
        if made and made.primitive.name == "log":
            shifted = _sum_of_exp(made.invars[0], producers)
            a, *shift = _shifted(shifted, producers) or (None,)
            once = bool(shift) and made.outvars[0].aval.size * a.aval.shape[-1] == a.aval.size
            if once and _root(shift[0], producers, _keeps) is _root(m, producers, _keeps):
                return (a,)
    return None


def _sum_of_exp(total: Any, producers: dict[Any, Any]) -> Any:
    """Returns x if a value is sum(exp(x)) over the last axis."""
    made = _producer(
        _root(total, producers, lambda eqn: eqn.primitive.name == "abs" or _repeats_last(eqn)),
        producers,
    )
    if (
        not made
        or made.primitive.name != "reduce_sum"
        or made.params["axes"] != (made.invars[0].aval.ndim - 1,)
    ):
        return None
    exp = _producer(made.invars[0], producers)
    return exp.invars[0] if exp and exp.primitive.name == "exp" else None


def _shifted(x: Any, producers: dict[Any, Any]) -> tuple[Any, ...]:
    """Returns (a, m) if x = a - m, a has the shape of x, and m is constant along the last axis.
    Else nothing.
    """
    sub = _producer(x, producers)
    if not sub or sub.primitive.name != "sub" or isinstance(sub.invars[0], jex.Literal):
        return ()
    a, m = sub.invars
    last = len(x.aval.shape) - 1
    return (a, m) if a.aval.shape == x.aval.shape and m.aval.shape[last:] == (1,) else ()


def _root(atom: Any, producers: dict[Any, Any], passes: Callable[[Any], bool]) -> Any:
    """Returns the value behind equations of one operand that `passes` accepts."""
    while (made := _producer(atom, producers)) and passes(made):
        atom = made.invars[0]
    return atom


def _keeps(eqn: Any) -> bool:
    """Returns whether an equation only adds axes of length one, or none."""
    return eqn.primitive.name == "stop_gradient" or (
        _repeats_last(eqn) and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    )


def _softmax(top: Any, bottom: Any, producers: dict[Any, Any]) -> tuple[Any, ...] | None:
    """Matches exp(a - m) / sum(exp(a - m)) over the last axis, with m constant along it. Returns
    (a,).
    """
    exp, summed = _producer(top, producers), _sum_of_exp(bottom, producers)
    if not exp or exp.primitive.name != "exp" or summed is None or summed is not exp.invars[0]:
        return None
    return _shifted(summed, producers)[:1] or None


def _repeats_last(eqn: Any) -> bool:
    """Returns whether an equation adds or repeats trailing axes and keeps the other axes in
    place.
    """
    if eqn.primitive.name not in ("broadcast_in_dim", "reshape"):
        return False
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "broadcast_in_dim" and eqn.params["broadcast_dimensions"] != tuple(
        range(len(before))
    ):
        return False
    return before[: len(after) - 1] == after[:-1] and before[len(after) - 1 :] in (
        (),
        (1,),
        after[-1:],
    )
