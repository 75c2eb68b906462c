"""Jaxprs by their public parts: programs inside of programs, loops, and single equations.

JAX documents `jax.extend.core` only. What is not public, such as how a primitive is bound, is
reached by programs of one equation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

# Primitives whose body replaces the call, and the name of the parameter that has the body.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
REMATS = frozenset({"remat", "remat2", "checkpoint"})
CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vmap_call"})
# Primitives that evaluate a body once, on all of their operands.
_ONCE = CALLS.keys() | REMATS | CUSTOM_RULES | {"shard_map"}


def is_complex(variable: Any) -> bool:
    """Returns whether a variable of a jaxpr is complex."""
    return jnp.issubdtype(variable.aval.dtype, jnp.complexfloating)


def inner_program(
    name: str,
    params: Mapping[str, Any],
) -> jex.ClosedJaxpr | None:
    """Returns the program that a primitive calls once with all of its operands, or None."""
    if name in _ONCE:
        return called_program(params)
    return None


def called_program(params: Mapping[str, Any]) -> jex.ClosedJaxpr:
    """Returns the program among the parameters of a primitive that calls one."""
    # `jit` and `remat` have "jaxpr", custom rules "call_jaxpr", and `custom_vmap_call` has "call".
    body = next(params[key] for key in ("jaxpr", "call_jaxpr", "call") if key in params)
    # The body of `remat` is a jaxpr without constants.
    return body if hasattr(body, "consts") else jex.ClosedJaxpr(body, ())


def every_equation(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of its inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from every_equation(inner)


def has_custom_vjp(eqn: Any) -> bool:
    """Returns whether an equation is or contains a `jax.custom_vjp`."""
    if "custom_vjp" in eqn.primitive.name:
        return True
    bodies = jex.jaxprs_in_params(eqn.params)
    return any(any(map(has_custom_vjp, body.eqns)) for body in bodies)


def forward_bytes(jaxpr: Any) -> int:
    """Returns the bytes of all values that a jaxpr computes, those of a `scan` per iteration."""
    total = 0
    for eqn in jaxpr.eqns:
        bodies = list(jex.jaxprs_in_params(eqn.params))
        if bodies:
            iterations = eqn.params.get("length", 1)  # those of a `while` are unknown
            total += iterations * sum(map(forward_bytes, bodies))
            continue
        for variable in eqn.outvars:
            itemsize = getattr(variable.aval.dtype, "itemsize", 0)  # keys have none
            total += variable.aval.size * itemsize
    return total


# --- Loops ---


def scan_starts(
    body: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> tuple[int, int]:
    """Returns where the carries and the scanned arrays begin among the operands of a `scan`.

    The parameters that say so differ between releases of JAX. In every release, constants come
    first, and only scanned and stacked arrays have one axis more outside of the body than inside.

    Args:
      body: The closed jaxpr of one iteration.
      operands, results: Arrays or shapes, those of the scan.
    """

    def unscanned(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(x.shape) == len(v.aval.shape) for x, v in pairs)

    # Constants and carries come before scanned arrays, and neither has the axis of the loop.
    first_x = unscanned(operands, body.jaxpr.invars)
    n_carries = unscanned(results, body.jaxpr.outvars)
    return first_x - n_carries, first_x


def scan_layout(scan: jex.JaxprEqn) -> tuple[int, int]:
    """Returns `scan_starts` of an equation."""
    operands = [v.aval for v in scan.invars]
    results = [v.aval for v in scan.outvars]
    return scan_starts(scan.params["jaxpr"], operands, results)


def scan_parts(
    scan: jex.JaxprEqn, operands: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the operands of a `scan` as constants, initial carry, and scanned arrays."""
    first_carry, first_x = scan_layout(scan)
    constants = list(operands[:first_carry])
    carry = list(operands[first_carry:first_x])
    return constants, carry, list(operands[first_x:])


# --- Programs from programs ---


def bind_equation(
    jaxpr: jex.Jaxpr,
    eqn: jex.JaxprEqn,
    operands: Sequence[Any],
) -> list[Any]:
    """Evaluates one equation of a jaxpr as a program of its own.

    JAX has no public interface to bind the primitive of an equation.
    """
    pairs = zip(eqn.invars, operands, strict=True)
    # Literals belong to the equation and are no inputs.
    # A variable that is an operand twice is one input.
    values = {variable: x for variable, x in pairs if not isinstance(variable, jex.Literal)}
    program = jaxpr.replace(
        constvars=[],
        invars=list(values),
        outvars=eqn.outvars,
        eqns=[eqn],
        effects=eqn.effects,
    )
    evaluate = jex.jaxpr_as_fun(jex.ClosedJaxpr(program, ()))
    results: list[Any] = evaluate(*values.values())
    return results


def restricted(program: jex.ClosedJaxpr, results: Sequence[int]) -> jex.ClosedJaxpr:
    """Returns the program of some results, without the equations that they do not need."""
    outvars = [program.jaxpr.outvars[number] for number in results]
    jaxpr = program.jaxpr.replace(outvars=outvars)
    return jex.ClosedJaxpr(jaxpr.replace(eqns=live_equations(jaxpr)), program.consts)


def live_equations(jaxpr: jex.Jaxpr) -> list[Any]:
    """Returns the equations that a result needs, in order."""
    # By identity, because literals have no hash.
    needed = set(map(id, jaxpr.outvars))
    live = []
    # From the last to the first, a result is known to be needed before the equation that computes
    # it.
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(map(id, eqn.outvars)):
            live.append(eqn)
            needed.update(map(id, eqn.invars))
    return live[::-1]


def with_equations(
    jaxpr: jex.Jaxpr,
    change: Callable[[Any], Any],
) -> jex.Jaxpr:
    """Replaces each equation of a jaxpr and of its inner programs by `change(equation)`."""

    def replaced(value: Any) -> Any:
        """Returns a parameter of an equation with its programs changed."""
        if isinstance(value, jex.ClosedJaxpr):
            return jex.ClosedJaxpr(with_equations(value.jaxpr, change), value.consts)
        if isinstance(value, jex.Jaxpr):
            return with_equations(value, change)
        if type(value) is tuple:  # not a named one, such as the numbers of a convolution
            return tuple(map(replaced, value))
        return value

    eqns = []
    for eqn in jaxpr.eqns:
        params = {name: replaced(value) for name, value in eqn.params.items()}
        # Inner programs are changed first, so `change` sees them as they will be.
        eqns.append(change(eqn.replace(params=params)))
    result: jex.Jaxpr = jaxpr.replace(eqns=eqns)
    return result
