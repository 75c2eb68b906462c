"""Counts of the floating-point operations and bytes of a program, from its jaxpr. Nothing is
compiled or computed.

XLA's own cost analysis counts the body of a loop once. Here the body of a `scan` counts as often as
it runs."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

# Primitives that XLA does not fuse into others. Only their operands and results count as bytes.
_UNFUSED = (
    "dot_general",
    "ragged_dot",
    "conv_general",
    "fft",
    "reduce_",
    "cum",
    "sort",
    "top_k",
    "arg",
    "gather",
    "scatter",
)
# Primitives that compute nothing.
_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "concatenate",
        "dynamic_update_slice",
        "pad",
        "rev",
        "gather",
        "copy",
        "iota",
        "convert_element_type",
        "select_n",
        "split",
    }
)


class Count(NamedTuple):
    """Floating-point operations, and bytes that are read and written."""

    flops: float
    bytes: float


def count(fn: Callable, *args) -> Count:
    """Returns the cost of `fn(*args)`, for arrays or `jax.ShapeDtypeStruct`."""
    closed = jax.make_jaxpr(fn)(*args)
    program, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return _of_program(program)


def _of_program(jaxpr) -> Count:
    totals = [_of_equation(eqn) for eqn in jaxpr.eqns]
    return Count(sum(c.flops for c in totals), sum(c.bytes for c in totals))


def _of_equation(eqn) -> Count:
    inner = [_of_program(body) for body in core.jaxprs_in_params(eqn.params)]
    name = eqn.primitive.name
    if inner and name == "cond":
        return Count(max(c.flops for c in inner), max(c.bytes for c in inner))
    if inner and not name.startswith(("scatter", "reduce", "custom_jvp", "custom_vjp")):
        runs = eqn.params["length"] if name == "scan" else 1
        return Count(runs * sum(c.flops for c in inner), runs * sum(c.bytes for c in inner))
    if inner and name.startswith("custom"):
        return inner[0]
    if name.startswith("reduce_") and eqn.invars[0].aval.size == eqn.outvars[0].aval.size:
        return Count(0.0, 0.0)  # over axes of length one
    moved = [*eqn.invars, *eqn.outvars]
    if name.startswith("scatter"):  # in place: the operand is neither read nor written as a whole
        moved = [*eqn.invars[1:], eqn.invars[2]]
    elif name == "gather":
        moved = [*eqn.invars[1:], *eqn.outvars, *eqn.outvars]
    size = (
        sum(v.aval.size * v.aval.dtype.itemsize for v in moved) if name.startswith(_UNFUSED) else 0
    )
    return Count(_flops(eqn), float(size))


def _flops(eqn) -> float:
    name = eqn.primitive.name
    out = eqn.outvars[0].aval
    first = eqn.invars[0].aval if eqn.invars else None
    if name in _MOVES or not jnp.issubdtype(out.dtype, jnp.inexact):
        return 0.0
    # A complex product takes four products and two sums.
    factor = 1 if not jnp.issubdtype(out.dtype, jnp.complexfloating) else 6 if name == "mul" else 2
    if name == "dot_general":
        contracted, _ = eqn.params["dimension_numbers"]
        return (
            2.0
            * (4 if factor > 1 else 1)
            * out.size
            * math.prod(first.shape[d] for d in contracted[0])
        )
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        return (
            2.0 * out.size * kernel.size / kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        )
    if name == "fft":
        return (
            5.0
            * max(out.size, first.size)
            * math.log2(max(2, math.prod(eqn.params["fft_lengths"])))
        )
    if name.startswith("scatter"):
        return float(eqn.invars[2].aval.size)
    if name in ("sort", "top_k"):
        return first.size * math.log2(max(2, first.shape[-1]))
    return factor * float(max(first.size if name.startswith(("reduce", "cum")) else 0, out.size))
