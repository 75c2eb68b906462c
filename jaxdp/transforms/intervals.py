"""`interval` turns a JAX function into a function of intervals that bounds it at every point.

It is an interpreter of jaxprs in four modules. `boxes` holds the values, outward rounding and the
registry of rules. `interval_rules` holds one rule per primitive. `interval_patterns` recognises the
few patterns in which one quantity occurs twice (maximum, softmax, square). This module traces the
function and applies the rules.
"""

import dataclasses
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
    both,
    is_float,
    is_nonnegative,
    lower,
    register_rule,
    unchecked,
    upper,
    widen,
)
from jaxdp.transforms.interval_patterns import JAX_FOLDER, Producers, rewrite
from jaxdp.transforms.jaxprs import bind_equation, is_complex, live_equations

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

Values = dict[Any, Any]  # the operand of each variable of a jaxpr

_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


class UnsupportedPrimitive(NotImplementedError):
    """The error for a primitive without an interval rule, or without one for these operands."""


def interval(
    fun: Callable[..., Any],
    *,
    product: str = "tight",
) -> Callable[..., Any]:
    """Transforms `fun` into a function over intervals.

        box = jaxdp.Interval(lower, upper)
        bounds = jaxdp.interval(fun)(box, x)
        # For every p in the box: bounds.lower <= fun(p, x) <= bounds.upper
        gradients = jaxdp.interval(jax.grad(loss_fn))(box, example)
        # The gradients of all parameter vectors in the box.

    It composes with `jax.jit`, `jax.vmap` and `jax.lax.scan` around it and inside `fun`, and with
    `jax.grad` inside. No control flow may depend on an interval except `lax.cond` and `lax.switch`,
    which return the hull of their branches.

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

      =============================  ===============================================================
      case                           behaviour
      =============================  ===============================================================
      no argument is an interval     contains the exact value, and is as wide as the rounding
      division by zero, log of 0     infinite endpoints
      points outside of a domain     log and sqrt of negative points are ignored
      NaN at some point              that endpoint is infinite
      boolean results                [False, True] where both occur
      integer arithmetic             exact, or the whole range where an integer may wrap around
      bfloat16, float16              products and sums in float32, results rounded outward
      =============================  ===============================================================

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
        return jax.tree.unflatten(tree, [_for_user(x) for x in results])

    return bounded


def bound(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    product: str = "tight",
) -> tuple[list[Operand], Any]:
    """Bounds `fun` and keeps known facts about its results.

    Returns:
      The flat results, which are `Box`es or exact arrays, and the tree of the result of `fun`.
    """

    def expand(x: Any) -> Any:
        """Replaces an interval of pytrees by a pytree of intervals."""
        if _is_interval(x):
            # Endpoints that are pytrees have a box for each pair of leaves.
            return jax.tree.map(Box, x.lower, x.upper)
        return x

    arguments = jax.tree.map(expand, (tuple(args), kwargs or {}), is_leaf=_is_interval)
    leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_interval)

    def flat(*points: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, points)
        return fun(*args, **kwargs)

    # Shapes in place of intervals: the program cannot depend on an endpoint.
    like_points = [_shape_of(x) if _is_interval(x) else x for x in leaves]
    closed, result = jax.make_jaxpr(flat, return_shape=True)(*like_points)
    operands = [x if _is_interval(x) else jnp.asarray(x) for x in leaves]
    return _evaluate(closed, operands, product), jax.tree.structure(result)


def _is_interval(x: Any) -> bool:
    return isinstance(x, Interval)


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _for_user(x: Operand) -> Interval:
    """Converts a result: without facts, and with infinite endpoints in place of NaN."""
    x = interval_rules.without_nan(x)
    return unchecked(*both(jnp.asarray, x))


# --- Bounds in three stages ---------------------------------------------------------------------


def stage(
    fun: Callable[[Any, Any], Any],
    moving: Any,
    fixed: Any,
    *,
    product: str = "tight",
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Splits bounds of `fun(moving, fixed)` into three stages, for callers that stream.

    Args:
      fun: A function of two pytrees that returns a pytree of arrays.
      moving, fixed: Pytrees of arrays or shapes. The stages receive intervals for `moving` and
          known points for `fixed`.
      product: See `interval`.

    Returns:
      `first(fixed) -> kept` computes the values that do not depend on `moving`. `second(moving,
      kept) -> factors` computes everything except final outer products, such as per-example
      gradients of dense layers. `third(factors)` computes these and returns a list of (lower,
      upper), one for each array of the result. `kept` and `factors` are pytrees of arrays for
      `jax.vmap` and `jax.lax.map`. The stages must be traced in this order.
    """
    moving_leaves, moving_tree = jax.tree.flatten(moving)
    fixed_leaves, fixed_tree = jax.tree.flatten(fixed)

    def flat(moving: Sequence[Any], fixed: Sequence[Any]) -> Any:
        moving_argument = jax.tree.unflatten(moving_tree, moving)
        fixed_argument = jax.tree.unflatten(fixed_tree, fixed)
        result = fun(moving_argument, fixed_argument)
        return jax.tree.leaves(result)

    moving_shapes = [_shape_of(x) for x in moving_leaves]
    fixed_shapes = [_shape_of(x) for x in fixed_leaves]
    closed = jax.make_jaxpr(flat)(moving_shapes, fixed_shapes)
    stages = _Stages(closed, len(moving_leaves), product)
    return stages.first, stages.second, stages.third


class _Stages:
    """The three stages of a program whose first inputs are intervals.

    A stage hands variables to the next one as pytrees of arrays. Facts about them travel beside
    them, in `signs` and `outer_products`, which a stage fills while it is traced.
    """

    def __init__(
        self,
        closed: Any,
        moving: int,
        product: str,
    ) -> None:
        jaxpr = closed.jaxpr
        self.jaxpr = jaxpr
        self.product = product
        self.constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self.moving = jaxpr.invars[:moving]
        self.fixed = jaxpr.invars[moving:]
        eqns = live_equations(jaxpr)
        # Of all stages, because a pattern may begin in an earlier one.
        self.producers = _producers(eqns)
        # What depends on no interval is computed once for a batch, and not once for each distance
        # k.
        self.early, late = self._split_by_dependence(eqns)
        # Their results are as large as the parameters. A caller forms them for a block of examples,
        # and adds them up.
        final = _final_outer_products(jaxpr, late)
        self.body = [eqn for eqn in late if eqn not in final]
        # The arrays that an outer product reads are computed once, and not for every entry.
        self.outer = [eqn for eqn in final if _is_dot(eqn) and product == "tight"]
        self.tail = [eqn for eqn in final if eqn not in self.outer]
        outer_results = set(_producers(self.outer))
        # The third stage computes the outer products by itself, so they are not handed over.
        self.to_third = self._needed(self.tail, jaxpr.outvars, outer_results)
        second_stage = [*self.body, *self.outer]
        self.to_second = self._needed(second_stage, self.to_third, set(self.moving))
        # Filled by a stage while it is traced, and read by the next one.
        self.signs: dict[Any, bool] = {}
        self.outer_products: list[Callable[..., Box]] = []

    def _split_by_dependence(self, eqns: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the equations that do not depend on intervals, and those that do."""
        # A jaxpr has each equation behind those that it reads, so one pass is enough.
        dependent = set(self.moving)
        early = []
        late = []
        for eqn in eqns:
            if any(v in dependent for v in _variables(eqn.invars)):
                late.append(eqn)
                dependent.update(eqn.outvars)
            else:
                early.append(eqn)
        return early, late

    def _needed(
        self,
        eqns: Sequence[Any],
        results: Sequence[Any],
        known: set[Any],
    ) -> list[Any]:
        """Returns the variables that `eqns` and `results` take from earlier stages."""
        atoms: list[Any] = []
        # Every stage has the constants of the program.
        own = known | set(self.constants)
        for eqn in eqns:
            # The rule of a pattern reads operands of earlier equations.
            _, operands = rewrite(eqn, self.producers)
            atoms += [*eqn.invars, *operands]
            own.update(eqn.outvars)
        read = _variables([*atoms, *results])
        return [v for v in dict.fromkeys(read) if v not in own]

    def _hand_over(self, values: Values, variables: Sequence[Any]) -> list[Any]:
        self.signs.update({v: is_nonnegative(values[v]) for v in variables})
        operands = [values[v] for v in variables]
        # Loops carry the class that JAX knows as a node of pytrees, which has no facts.
        return [unchecked(x.lower, x.upper) if _is_interval(x) else x for x in operands]

    def _take_over(self, variables: Sequence[Any], handed: Sequence[Any]) -> Values:
        values = dict(self.constants)
        for v, x in zip(variables, handed, strict=True):
            if _is_interval(x):
                x = Box(x.lower, x.upper, nonnegative=self.signs[v])
            values[v] = x
        return values

    def _run(self, eqns: Sequence[Any], values: Values) -> None:
        _run(self.jaxpr, eqns, values, self.producers, self.product)

    def first(self, fixed: Any) -> Any:
        """Computes the values that do not depend on intervals."""
        leaves = jax.tree.leaves(fixed)
        values = self.constants | dict(zip(self.fixed, leaves, strict=True))
        self._run(self.early, values)
        return self._hand_over(values, self.to_second)

    def second(self, moving: Any, kept: Any) -> Any:
        """Computes all but the final outer products, and the arrays that these read."""
        values = self._take_over(self.to_second, kept)
        leaves = jax.tree.leaves(moving, is_leaf=_is_interval)
        values.update(zip(self.moving, leaves, strict=True))
        self._run(self.body, values)
        factors = []
        multiply = []
        for eqn in self.outer:
            equation = _equation(self.jaxpr, eqn, self.product)
            operands = [_read(values, atom) for atom in eqn.invars]
            arrays, function = interval_rules.outer_parts(equation, *operands)
            factors.append(arrays)
            multiply.append(function)
        # Replaced and not extended, because the stage may be traced again.
        self.outer_products[:] = multiply
        return self._hand_over(values, self.to_third), factors

    def third(self, factors: Any) -> list[tuple[jax.Array, jax.Array]]:
        """Computes the outer products and the results."""
        handed, arrays_of = factors
        values = self._take_over(self.to_third, handed)
        outer = zip(self.outer, self.outer_products, arrays_of, strict=True)
        for eqn, function, arrays in outer:
            (result,) = eqn.outvars
            values[result] = function(*arrays)
        self._run(self.tail, values)
        results = [_read(values, atom) for atom in self.jaxpr.outvars]

        return [both(jnp.asarray, x) for x in results]


def _is_dot(eqn: Any) -> bool:
    name: str = eqn.primitive.name
    return name == "dot_general"


# What JAX puts between the outer product of a weight's gradient and the result.
_MOVES = {"transpose", "reshape", "squeeze", "convert_element_type"}


def _final_outer_products(jaxpr: Any, eqns: Sequence[Any]) -> list[Any]:
    """Finds outer products that only one result uses, and the equations that move their entries."""
    producers = _producers(eqns)
    uses = _variables(jaxpr.outvars)
    for eqn in eqns:
        uses += _variables(eqn.invars)
    final = []
    for v in _variables(jaxpr.outvars):
        chain = []
        # A value with a second reader is needed before the third stage.
        while v in producers and uses.count(v) == 1:
            eqn = producers[v]
            chain.append(eqn)
            if eqn.primitive.name not in _MOVES:
                break
            (v,) = eqn.invars
        if not chain:
            continue
        first = chain[-1]
        if _is_dot(first) and interval_rules.is_outer(first):
            final += chain
    # In the order of the program, in which the third stage runs them.
    return [eqn for eqn in eqns if eqn in final]


# --- The interpreter ----------------------------------------------------------------------------


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [a for a in atoms if not isinstance(a, jex.Literal)]


def _producers(eqns: Sequence[Any]) -> Producers:
    """Returns the equation that computes each variable."""
    producers: dict[Any, Any] = {}
    for eqn in eqns:
        for variable in eqn.outvars:
            producers[variable] = eqn
    return producers


def _evaluate(
    closed: Any,
    operands: Sequence[Operand],
    product: str,
) -> list[Operand]:
    """Interprets a closed jaxpr without the equations that no result needs."""
    jaxpr = closed.jaxpr
    values: Values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))
    eqns = live_equations(jaxpr)  # others need no rule
    producers = _producers(eqns)
    _run(jaxpr, eqns, values, producers, product)
    return [_read(values, atom) for atom in jaxpr.outvars]


def _run(
    jaxpr: Any,
    eqns: Sequence[Any],
    values: Values,
    producers: Producers,
    product: str,
) -> None:
    """Interprets equations and adds their results to `values`."""
    for eqn in eqns:
        inputs = [_read(values, atom) for atom in eqn.invars]
        # Complex numbers have no order, and so no ends.
        if any(map(is_complex, (*eqn.invars, *eqn.outvars))):
            problem = "`interval` does not support complex numbers."
            raise UnsupportedPrimitive(_message(eqn, problem))
        # The rounding of known operands is uncertain as well, unless the primitive rounds nothing.
        if any(map(_is_interval, inputs)) or not _is_exact(eqn):
            name, atoms = rewrite(eqn, producers)
            operands = [_read(values, atom) for atom in atoms]
            results = _apply_rule(_equation(jaxpr, eqn, product, name), eqn, operands)
        else:
            results = bind_equation(jaxpr, eqn, inputs)
        values.update(zip(eqn.outvars, results, strict=True))


def _read(values: Values, atom: Any) -> Any:
    if isinstance(atom, jex.Literal):
        # A Python scalar lacks the dtype that the program gives it.
        return np.asarray(atom.val, atom.aval.dtype)  # type: ignore[attr-defined]
    return values[atom]


def _is_exact(eqn: Any) -> bool:
    """Returns whether exact operands give exact results."""
    if eqn.primitive.name in interval_rules.EXACT:
        return True
    has_body = bool([*jex.jaxprs_in_params(eqn.params)])
    # A body may compute in floats, whatever it returns.
    return not has_body and not any(is_float(v.aval) for v in eqn.outvars)


def _equation(
    jaxpr: Any,
    eqn: Any,
    product: str,
    name: str | None = None,
) -> Equation:
    return Equation(
        name=name or eqn.primitive.name,
        params=eqn.params,
        outputs=tuple(_shape_of(v.aval) for v in eqn.outvars),
        product=product,
        bind=lambda *arrays: bind_equation(jaxpr, eqn, arrays),
        evaluate=lambda closed, operands: _evaluate(closed, operands, product),
    )


def _apply_rule(
    equation: Equation,
    eqn: Any,
    operands: Sequence[Any],
) -> list[Operand]:
    name = equation.name
    if name not in RULES:
        problem = f"There is no interval rule for the primitive {name!r}."
        raise UnsupportedPrimitive(_message(eqn, problem))
    try:
        result = RULES[name](equation, *operands)
        # A float that is too large becomes infinite. An integer comes back at the other end.
        is_integer = jnp.issubdtype(equation.outputs[0].dtype, jnp.integer)
        if is_integer and name in interval_rules.WRAPPING:
            result = _without_wraps(equation, result, operands)
    except interval_rules.NoRuleError as error:
        problem = f"The interval rule of {name!r} does not apply. {error}"
        raise UnsupportedPrimitive(_message(eqn, problem)) from None
    if isinstance(result, Interval | jax.Array | np.ndarray):
        return [result]
    return list(result)


def _without_wraps(equation: Equation, result: Any, operands: Sequence[Any]) -> Operand:
    """Returns bounds of integers that also hold where the operation wraps around."""
    reals = list(map(interval_rules.as_real, operands))
    if equation.name == "scatter-add":
        reals[1] = operands[1]  # positions stay integers
    # The same rule in floats says how far the exact values reach.
    like_result = jax.ShapeDtypeStruct(equation.outputs[0].shape, jnp.float32)
    in_floats = dataclasses.replace(equation, outputs=(like_result,))
    real: Any = RULES[equation.name](in_floats, *reals)
    return interval_rules.whole_if_wrapping(result, real)


def _message(eqn: Any, problem: str) -> str:
    return (
        f"{problem} It arises in {_user_line(eqn)}. Rewrite that line, or register a rule:\n"
        f"    @jaxdp.transforms.intervals.register_rule({eqn.primitive.name!r})\n"
        "    def rule(eqn, *operands): ...  # see register_rule"
    )


def _user_line(eqn: Any) -> str:
    """Returns the file, line and function outside of JAX and of this package's interpreter."""
    traceback = eqn.source_info.traceback
    # The innermost frame comes first.
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith((_OUR_FOLDER, JAX_FOLDER)):
            return f"{frame.file_name}:{frame.line_num}, in {frame.function_name}"
    return "an unknown line"
