"""Checks of the values of parameters, before a run spends anything on them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.transforms.clipping import paths_of


def not_finite(params: Any) -> list[str]:
    """Returns the paths of the leaves that hold NaN or an infinity, such as "Dense_0/kernel".

    Leaves that are no floating-point or complex arrays are skipped. Where several processes share
    an array, each reads its own part.
    """
    return [path for path, leaf in paths_of(params) if not all(map(_finite, _parts(leaf)))]


_AGAIN = "nothing is spent. Initialise or load them again."


def check_finite(params: Any, *, argument: str = "params", remedy: str = _AGAIN) -> None:
    """Raises ValueError that names the leaves with NaN or infinities.

    The parameters must be public or released. `remedy` ends the message.
    """
    paths = not_finite(params)
    if not paths:
        return
    names = ", ".join(map(repr, paths[:3]))
    if len(paths) > 3:
        names += f" and {len(paths) - 3} more"
    raise ValueError(
        f"{argument} has NaN or infinite values in {names}. Nothing can be learned from them, "
        f"and {remedy}"
    )


def _parts(leaf: Any) -> list[Any]:
    """Returns the floating parts of a leaf that this process has, as arrays on the host."""
    # Python scalars have no dtype. They are settings, as in `clip_arguments.is_array`.
    if not jnp.issubdtype(getattr(leaf, "dtype", object), jnp.inexact):
        return []
    if not isinstance(leaf, jax.Array):
        return [leaf]
    # A replicated array has the same values in each replica.
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [jax.device_get(shard.data) for shard in shards]


def _finite(array: Any) -> bool:
    return bool(np.isfinite(np.asarray(array)).all())
