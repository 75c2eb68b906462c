"""Programs of one example that JAX can batch, so that no example can see another one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxdp.transforms.jaxprs import every_equation, with_equations

# `lax.ragged_dot` contracts axis 1 of the rows with axis 1 of the weights [groups, rows, cols].
# Its rows are divided among the groups along axis 0, without an offset.
_RAGGED_DOT = ((((1,), (1,)), ((), ())), (0,), None)


def batchable(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """Returns a program with the same results, which JAX batches example by example.

    Each `lax.ragged_dot` becomes a product that JAX can batch. Each
    `jax.custom_batching.custom_vmap` becomes its function of one example, because its own rule is a
    function of the whole batch.
    """
    names = {eqn.primitive.name for eqn in every_equation(jaxpr)}
    if names.isdisjoint({"ragged_dot_general", "custom_vmap_call"}):
        return jaxpr
    return with_equations(jaxpr, _replaced)


def _replaced(eqn: Any) -> Any:
    if eqn.primitive.name == "custom_vmap_call":
        return _call_of(jex.jaxpr_as_fun(eqn.params["call"]), eqn)
    if eqn.primitive.name == "ragged_dot_general":
        dimensions = eqn.params["ragged_dot_dimension_numbers"]
        ragged = tuple(dimensions.lhs_ragged_dimensions)
        offset = eqn.params["group_offset"]
        # Any other product of `lax.ragged_dot_general` is left to JAX.
        if (dimensions.dot_dimension_numbers, ragged, offset) == _RAGGED_DOT:
            return _call_of(_ragged_dot, eqn)
    return eqn


def _call_of(function: Callable[..., Any], eqn: Any) -> Any:
    """Returns an equation that calls `function` on the operands of `eqn`."""
    avals = [variable.aval for variable in eqn.invars]
    program = jax.make_jaxpr(jax.jit(function))(*avals)
    (call,) = program.jaxpr.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars)


def _ragged_dot(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
) -> jax.Array:
    """Computes `lax.ragged_dot` as one product of masked rows. JAX cannot batch the primitive."""
    ends = jnp.cumsum(sizes)[None]
    sizes = sizes[None]
    row = jnp.arange(len(x))[:, None]
    is_in_group = (row >= ends - sizes) & (row < ends)
    zero = jnp.zeros((), x.dtype)
    # Each row lies in the columns of its own group, so one product with the stacked weights serves
    # all groups. Rows after the last group give 0, as those of the primitive do.
    rows = jnp.where(is_in_group[:, :, None], x[:, None], zero)
    rows = rows.reshape(len(x), -1)
    return rows @ w.reshape(-1, w.shape[-1])
