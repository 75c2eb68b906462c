"""Which values differ between the devices of a `jax.shard_map`.

With `check_vma=True`, its default, JAX tracks over which mesh axes a value varies. With `check_vma=False` it does not,
and every value here looks the same on all devices.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

# Primitives that name a mesh axis and move nothing between devices.
_LOCAL = frozenset({"pvary", "pcast", "axis_index"})


def manual_axes() -> frozenset[str]:
    """The mesh axes of the enclosing `jax.shard_map`; none outside of one."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(*values: Any) -> frozenset[str]:
    """The mesh axes over which any of the arrays varies."""
    found: frozenset[str] = frozenset()
    for value in values:
        kind = jax.typeof(value)
        manual = getattr(kind, "manual_axis_type", None)  # `vma` before JAX 0.10.2
        found |= getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return found


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The same value, typed as varying over `axes`: its cotangents are not summed over them."""
    missing = tuple(sorted(set(axes) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def collectives(eqns: Iterable[Any]) -> set[str]:
    """The primitives among equations that combine values of several devices of a mesh axis."""
    axes, found = manual_axes(), set()
    for eqn in eqns:
        named = [eqn.params.get(name, ()) for name in ("axes", "axis_name")]
        flat = {axis for names in named for axis in (names if isinstance(names, (tuple, list)) else (names,))}
        if eqn.primitive.name not in _LOCAL and any(isinstance(axis, str) and axis in axes for axis in flat):
            found.add(eqn.primitive.name)
    return found
