"""Values on several devices, inside of a `jax.shard_map` and on meshes of type Explicit.

Under `check_vma=True`, the default, JAX tracks over which mesh axes a value varies. Under
`check_vma=False` it does not, and these functions report every value as equal on all devices.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

# Primitives that have a mesh axis as a parameter and move no values between devices.
_LOCAL = frozenset({"pvary", "pcast", "axis_index"})


def manual_axes() -> frozenset[str]:
    """Returns the mesh axes of the enclosing `jax.shard_map`, or the empty set outside of one."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def auto_devices() -> int:
    """Returns among how many devices of the mesh in context XLA divides work, 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh.auto_axes)


def varying_axes(*values: Any) -> frozenset[str]:
    """Returns the mesh axes over which any of the arrays varies."""
    axes: frozenset[str] = frozenset()
    for value in values:
        array_type = jax.typeof(value)
        manual = _manual_axis_type(array_type)
        axes |= getattr(array_type, "vma", frozenset()) if manual is None else manual.varying
    return axes


def _manual_axis_type(array_type: Any) -> Any:
    """Returns what a type says of mesh axes, or None before JAX 0.10.2, which has `vma` instead."""
    return getattr(array_type, "manual_axis_type", None)


def shape_like(x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result, float32 [*shape] over the mesh axes of `x`."""
    manual = _manual_axis_type(jax.typeof(x))
    varies = {"vma": varying_axes(x)} if manual is None else {"manual_axis_type": manual}
    return jax.ShapeDtypeStruct(shape, np.float32, **varies)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Types a value as varying over `axes`, so that JAX does not sum its cotangents over them."""
    # JAX refuses to type a value as varying over an axis twice.
    missing = tuple(sorted(set(axes) - varying_axes(x)))
    if not missing:
        return x
    varying: jax.Array = lax.pcast(x, missing, to="varying")
    return varying


def varied(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, each typed as varying over the mesh axes of any of them.

    The operands of a kernel must vary over the same axes.
    """
    axes = varying_axes(*arrays)
    return [vary(x, axes) for x in arrays]


def untracked_axes() -> frozenset[str]:
    """Returns the axes of the enclosing shards over which JAX does not record what varies.

    They are those of a `jax.pmap`, and of a `jax.shard_map` with `check_vma=False`.
    """
    # The index of a device along an axis varies over it, if JAX records that.
    return frozenset(
        axis for axis in manual_axes() if axis not in varying_axes(lax.axis_index(axis))
    )


def collectives(
    jaxpr: Any,
    bound: frozenset[Any] = frozenset(),
) -> set[tuple[str, str]]:
    """Returns (primitive, axis) of what combines values along a named axis from outside.

    Such an axis belongs to an enclosing `jax.vmap(axis_name=)`, `jax.pmap` or `jax.shard_map`.
    Along an axis of a vmap, the place is counted too. A `jax.shard_map` inside of the program has
    its axes for itself.

    Args:
      jaxpr: The program.
      bound: The axes of the enclosing maps that are part of the program.
    """
    found: set[tuple[str, str]] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        own_axes = _bound_axes(eqn)
        outside = _named_axes(eqn) - bound - own_axes
        if name in _LOCAL:
            # The place of a shard says nothing of its values. Along `jax.vmap` it would number the
            # examples.
            outside -= manual_axes()
        found.update((name, str(axis)) for axis in outside)
        # Custom derivatives are programs in parameters too.
        for inner in jex.jaxprs_in_params(eqn.params):
            found |= collectives(inner, bound | own_axes)
    return found


def _named_axes(eqn: Any) -> frozenset[Any]:
    """Returns the named axes among the parameters of an equation. Axes of an array are integers."""
    axes: set[Any] = set()
    # `psum` and `pmax` have the parameter `axes`. `all_gather` and `ppermute` have `axis_name`.
    for parameter in ("axes", "axis_name"):
        value = eqn.params.get(parameter, ())
        axes.update(value if isinstance(value, (tuple, list)) else (value,))
    axes.discard(None)
    return frozenset(axis for axis in axes if not isinstance(axis, int | np.integer))


def _bound_axes(eqn: Any) -> frozenset[Any]:
    """Returns the named axes that only the inner program of an equation has."""
    if eqn.primitive.name == "xla_pmap":
        return frozenset({eqn.params["axis_name"]})
    if eqn.primitive.name != "shard_map":
        return frozenset()
    # The parameter has another name in older releases. None stands for all axes.
    axes = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return frozenset(eqn.params["mesh"].axis_names if axes is None else axes)


def spec_of(x: Any) -> PartitionSpec:
    """Returns how an array is divided over mesh axes of type Explicit, as its type tells."""
    spec: PartitionSpec = jax.typeof(x).sharding.spec
    return spec


def automatic(
    function: Callable[..., Any],
    out_specs: Any,
) -> Callable[..., Any]:
    """Returns `function` with Explicit mesh axes of its arguments as Auto axes inside.

    XLA divides the work along Auto axes.

    Args:
      function: A function of pytrees of arrays.
      out_specs: The specs of its result where an axis is Explicit, a prefix of the pytree of the
        result.
    """

    def call(*args: Any) -> Any:
        meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
        # Without an Explicit axis nothing is to be done, and the function is traced as it is.
        mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
        if mesh is None:
            return function(*args)
        has_mesh = not jax.sharding.get_abstract_mesh().empty
        # `jax.sharding.auto_axes` reads the mesh in context, which a caller with sharded arrays
        # need not have set.
        with contextlib.nullcontext() if has_mesh else jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(function, out_sharding=out_specs)(*args)

    return call
