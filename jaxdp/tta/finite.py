"""Gradients of batches in which some records have no finite loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# compute(rows, present [B]) -> (result, whether the loss of each row is finite [B])
Compute = Callable[[Any, jax.Array], tuple[Any, jax.Array]]


def all_finite(tree: Any) -> jax.Array:
    """Returns whether every number of a pytree of arrays is finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def without_bad_rows(compute: Compute, rows: Any, present: jax.Array) -> tuple[Any, Any, jax.Array]:
    """Returns (result of all rows, result of the rows that are finite, which rows are finite).

    The gradient of a batch through a row that is NaN is NaN, also where the cotangent of that row
    is 0. So a batch with such rows is computed again, with a finite row in their places that is not
    present. The second program is compiled and costs nothing while it does not run. It is no loop,
    in which XLA computes convolutions slowly on CPU.
    """
    first, finite = compute(rows, present)

    def with_replacements() -> tuple[Any, jax.Array]:
        # The first finite row stands in for the others: a loss of NaN has a NaN gradient even if it
        # is multiplied by 0.
        source = jnp.where(finite, jnp.arange(len(finite)), jnp.argmax(finite))
        replaced = jax.tree.map(lambda x: x[source], rows)
        result, still_finite = compute(replaced, present & finite)
        return result, still_finite & finite

    # The second pass is only for batches that need it.
    last, finite = jax.lax.cond(finite.all(), lambda: (first, finite), with_replacements)
    return first, last, finite
