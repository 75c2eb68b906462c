"""Products of full precision, whatever the platform multiplies in by default.

A TPU multiplies float32 in bfloat16 by default, and a GPU in TF32. A bound of a computation in
floating point does not hold for such a computation. So what is bounded asks for full precision,
also where a function asks for less.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from jaxdp.transforms.jaxprs import with_equations

# Primitives that multiply floats in the precision of a parameter.
_PRODUCTS = {"dot_general", "conv_general_dilated"}


def in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, with all its products of floats in the precision of their dtypes.

    Derivatives are to be taken inside of `function`.
    """

    @functools.wraps(function)
    def precise(*args: Any) -> Any:
        # The setting reaches the products that `jnp` and rules of derivatives add.
        with jax.default_matmul_precision("highest"):
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        closed = jex.ClosedJaxpr(with_equations(program.jaxpr, _precise), program.consts)
        leaves = jex.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return precise


def _precise(eqn: Any) -> Any:
    """Returns an equation whose product asks for full precision, also if the function does not."""
    if eqn.primitive.name not in _PRODUCTS:
        return eqn
    both_operands = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return eqn.replace(params={**eqn.params, "precision": both_operands})
