"""Values on several devices: those that differ inside a `jax.shard_map`, and those on meshes of type Explicit.

Under `check_vma=True`, the default, JAX tracks over which mesh axes a value varies. Under `check_vma=False` it does
not, and these functions report every value as equal on all devices.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

# Primitives that have a mesh axis as a parameter and move no values between devices.
_LOCAL = frozenset({"pvary", "pcast", "axis_index"})


def manual_axes() -> frozenset[str]:
    """Returns the mesh axes of the enclosing `jax.shard_map`, or the empty set outside of one."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def auto_devices() -> int:
    """Returns how many devices of the mesh in context divide the work by themselves, 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh.auto_axes)


def varying_axes(*values: Any) -> frozenset[str]:
    """Returns the mesh axes over which any of the arrays varies."""
    found: frozenset[str] = frozenset()
    for value in values:
        kind = jax.typeof(value)
        manual = getattr(kind, "manual_axis_type", None)  # `vma` before JAX 0.10.2
        found |= getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return found


def shape_like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of an array [*shape] that varies over the mesh axes of `x`, for a kernel's result."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    # `vma` before JAX 0.10.2
    varies = {"vma": varying_axes(x)} if manual is None else {"manual_axis_type": manual}
    return jax.ShapeDtypeStruct(shape, dtype, **varies)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Types a value as varying over `axes`, so that JAX does not sum its cotangents over them."""
    missing = tuple(sorted(set(axes) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def untracked_axes() -> frozenset[str]:
    """Returns the axes of the enclosing shards over which JAX does not record what varies.

    They are those of a `jax.pmap`, and of a `jax.shard_map` with `check_vma=False`.
    """
    return frozenset(axis for axis in manual_axes() if axis not in varying_axes(lax.axis_index(axis)))


def collectives(eqns: Iterable[Any]) -> set[str]:
    """Returns the names of the primitives that combine values of several devices of a mesh axis."""
    axes, found = manual_axes(), set()
    for eqn in eqns:
        named = [eqn.params.get(name, ()) for name in ("axes", "axis_name")]
        flat = {axis for names in named for axis in (names if isinstance(names, (tuple, list)) else (names,))}
        if eqn.primitive.name not in _LOCAL and any(isinstance(axis, str) and axis in axes for axis in flat):
            found.add(eqn.primitive.name)
    return found


def spec_of(x: Any) -> PartitionSpec:
    """Returns how an array is divided over mesh axes of type Explicit, as its type tells."""
    spec: PartitionSpec = jax.typeof(x).sharding.spec
    return spec


def automatic(function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
    """Returns `function` with all Explicit mesh axes of its arguments as Auto axes inside, where XLA divides the work.

    Args:
      function: A function of pytrees of arrays.
      out_specs: The specs of its result where an axis is Explicit, a prefix of the pytree of the result.
    """

    def call(*args: Any) -> Any:
        meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
        mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
        if mesh is None:
            return function(*args)
        entered = not jax.sharding.get_abstract_mesh().empty
        with contextlib.nullcontext() if entered else jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(function, out_sharding=out_specs)(*args)

    return call
