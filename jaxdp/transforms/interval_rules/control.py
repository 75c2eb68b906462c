"""Rules of calls, loops and branches, which bound the programs inside."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms.boxes import (
    Equation,
    Interval,
    Operand,
    lower,
    register_rule,
    unchecked,
    upper,
)
from jaxdp.transforms.interval_rules.endpoints import NoRuleError, hull_of_cases
from jaxdp.transforms.jaxprs import (
    CALLS,
    CUSTOM_RULES,
    REMATS,
    called_program,
    scan_starts,
)


@register_rule(*CALLS, *REMATS, *CUSTOM_RULES)
def _call(eqn: Equation, *operands: Operand) -> list[Operand]:
    return eqn.evaluate(called_program(eqn.params), operands)


# --- Loops --------------------------------------------------------------------------------------
# The carried state of a loop must be pytrees of one structure in every iteration.


def _without_facts(xs: Sequence[Operand]) -> list[Any]:
    """Replaces boxes by pytrees without facts, which loops can carry."""
    return _as_kinds(xs, _kinds(xs))


def _as_kinds(xs: Sequence[Operand], is_interval: Sequence[bool]) -> list[Any]:
    """As `_without_facts`, with points as intervals where `is_interval` says so."""
    results: list[Any] = []
    for x, flag in zip(xs, is_interval, strict=True):
        result = unchecked(lower(x), upper(x)) if flag else x
        results.append(result)
    return results


def _kinds(xs: Sequence[Any]) -> list[bool]:
    return [isinstance(x, Interval) for x in xs]


def _initial_state(
    body: Callable[[list[Operand]], list[Operand]], init: Sequence[Operand]
) -> tuple[list[bool], list[Any]]:
    """Returns which entries of a loop's state are intervals, and the initial state.

    An entry that starts as a point becomes an interval if an iteration makes it one. That may make
    others intervals, so this is repeated until nothing changes.
    """

    def one_iteration(state: list[Any]) -> list[Any]:
        return _without_facts(body(state))

    kinds = _kinds(init)
    # Kinds only change from points to intervals, so this ends.
    while True:
        state = _as_kinds(init, kinds)
        results = jax.eval_shape(one_iteration, state)
        of_results = _kinds(results[: len(init)])
        next_kinds = [a or b for a, b in zip(kinds, of_results, strict=True)]
        if next_kinds == kinds:
            return kinds, jax.tree.map(jnp.asarray, state)
        kinds = next_kinds


@register_rule("scan")
def _scan(eqn: Equation, *operands: Operand) -> list[Operand]:
    params = eqn.params
    body = params["jaxpr"]
    carry_start, x_start = scan_starts(body, operands, eqn.outputs)
    constants = operands[:carry_start]
    init = operands[carry_start:x_start]
    xs = _without_facts(operands[x_start:])

    def zeros_like_one(x: jax.Array) -> jax.Array:  # `eval_shape` reads shapes only
        return jnp.zeros(x.shape[1:], x.dtype)

    # `init` is not sliced, but each turn gets one row of xs.
    like_x = jax.tree.map(zeros_like_one, xs)

    def first_step(state: list[Operand]) -> list[Operand]:
        return eqn.evaluate(body, [*constants, *state, *like_x])

    # Kinds that one turn leaves as they are hold for all turns.
    kinds, start = _initial_state(first_step, init)

    def step(state: Any, x: Any) -> Any:
        # Facts about a state are lost here: the next turn knows no sign.
        results = eqn.evaluate(body, [*constants, *state, *x])
        carried = _as_kinds(results[: len(init)], kinds)
        return carried, _without_facts(results[len(init) :])

    final, stacked = lax.scan(
        step,
        start,
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params.get("unroll", 1),
    )
    return [*final, *stacked]


@register_rule("while")
def _while(eqn: Equation, *operands: Operand) -> list[Operand]:
    params = eqn.params
    body_start = params["cond_nconsts"]
    state_start = body_start + params["body_nconsts"]
    condition_constants = operands[:body_start]
    body_constants = operands[body_start:state_start]

    def step(state: Sequence[Operand]) -> list[Operand]:
        return eqn.evaluate(params["body_jaxpr"], [*body_constants, *state])

    def condition(state: Any) -> jax.Array:
        (result,) = eqn.evaluate(params["cond_jaxpr"], [*condition_constants, *state])
        # Points of the box would take different numbers of turns.
        if isinstance(result, Interval):
            raise NoRuleError("The condition of the loop depends on an interval.")
        return result

    kinds, start = _initial_state(step, operands[state_start:])

    def next_state(state: Any) -> list[Any]:
        return _as_kinds(step(state), kinds)

    return lax.while_loop(condition, next_state, start)


# --- Branches -----------------------------------------------------------------------------------


@register_rule("cond")
def _cond(
    eqn: Equation,
    index: Operand,
    *operands: Operand,
) -> list[Operand]:
    branches = eqn.params["branches"]
    if isinstance(index, Interval):
        # Each branch that the index allows is possible somewhere in the box.
        results = [eqn.evaluate(branch, operands) for branch in branches]
        return [hull_of_cases(index, cases) for cases in zip(*results, strict=True)]
    xs = _without_facts(operands)

    def bounds_of(branch: Any) -> Callable[[Any], list[Any]]:
        return lambda xs: _without_facts(eqn.evaluate(branch, xs))

    # A result is an interval if it is one in any branch, because branches must agree.
    shapes = [jax.eval_shape(bounds_of(branch), xs) for branch in branches]
    kinds = [any(_kinds(cases)) for cases in zip(*shapes, strict=True)]

    def alike(branch: Any) -> Callable[[Any], list[Any]]:
        return lambda xs: _as_kinds(eqn.evaluate(branch, xs), kinds)

    case = jnp.asarray(index, jnp.int32)
    functions = [alike(branch) for branch in branches]
    result: list[Operand] = lax.switch(case, functions, xs)
    return result
