"""How the arrays of training or adaptation lie on a mesh of devices.

JAX's compiler divides the work (`jax.jit` with `NamedSharding`s). Batches are divided along the
data axes. Parameters, their sums of gradients and the state of the optimizer lie as the caller
gives them. All other arrays are replicated.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdp.transforms import forms
from jaxdp.transforms.clipping import paths_of

ParamSharding = Callable[[str, Any], PartitionSpec]
"""(path of a parameter, such as "Dense_0/kernel", parameter) -> how it lies on the mesh."""


def check_mesh(
    mesh: Any,
    data_axes: Sequence[str],
    param_sharding: ParamSharding | None,
    *,
    processes: bool = False,
) -> None:
    """Raises TypeError or ValueError if the arguments do not describe a mesh of this process.

    With `processes` it may also be a mesh of all processes.
    """
    if mesh is None:
        if param_sharding is not None:
            raise ValueError("param_sharding needs mesh=, the mesh whose axes it names.")
        return
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. Make it with "
            "jax.make_mesh."
        )
    # A string is a sequence too, of names of one letter.
    is_text = isinstance(data_axes, str)
    if is_text or not data_axes or not set(data_axes) <= set(mesh.axis_names):
        raise ValueError(
            f"data_axes must be a tuple of names of mesh axes, got {data_axes!r}. The mesh has "
            f"{mesh.axis_names}."
        )
    if not mesh.is_multi_process:
        return
    if not processes:
        raise ValueError(
            "mesh has devices of other processes, which only jaxdp.finetune divides its work "
            "among. Make it of jax.local_devices()."
        )
    owners = {device.process_index for device in mesh.devices.flat}
    if len(owners) < jax.process_count():
        raise ValueError(
            f"mesh has devices of the processes {sorted(owners)} only, of {jax.process_count()}. "
            "Make it of jax.devices(), or of jax.local_devices() to train in this process alone."
        )


def platform_of(mesh: Mesh | None) -> str:
    """Returns the platform of the devices of a mesh, or of this process without a mesh."""
    if mesh is None:
        return forms.platform()
    return forms.platform_of(mesh.devices.flat[0])


def automatic(mesh: Mesh) -> Mesh:
    """Returns a mesh along whose axes XLA divides the work, whatever types the caller gave them."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a run lie.

    Attributes:
      mesh: The devices, with axes of type Auto.
      data_axes: The axes along which batches are divided.
      specs: How each leaf of the parameters lies on the mesh.
    """

    mesh: Mesh
    data_axes: tuple[str, ...]
    specs: tuple[PartitionSpec, ...]

    @classmethod
    def of(
        cls,
        params: Any,
        mesh: Mesh,
        data_axes: Sequence[str],
        rule: ParamSharding | None,
    ) -> "Layout":
        """Returns the layout of parameters by a rule, or by the shardings that they have.

        Raises:
          ValueError: A parameter is on devices outside of the mesh, or its spec does not fit it or
            the mesh.
        """
        mesh = automatic(mesh)
        specs = tuple(_spec(path, leaf, mesh, rule) for path, leaf in paths_of(params))
        return cls(mesh, tuple(data_axes), specs)

    def whole(self) -> "Layout":
        """Returns the layout while gradients are computed.

        Parameters are then not divided along the data axes (FSDP).
        """

        def undivided(axes: Any) -> tuple[str, ...] | None:
            if isinstance(axes, str):
                names = (axes,)
            else:
                names = tuple(axes or ())
            # `PartitionSpec` takes None for an axis that is not divided.
            return tuple(name for name in names if name not in self.data_axes) or None

        specs = tuple(PartitionSpec(*map(undivided, spec)) for spec in self.specs)
        return dataclasses.replace(self, specs=specs)

    def constrained(
        self,
        tree: Any,
        params: Any,
        moving: Any,
    ) -> Any:
        """Returns a pytree inside `jax.jit` whose parts lie as in `shardings`."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree, params, moving))

    @property
    def rows(self) -> NamedSharding:
        """The sharding of arrays with a leading axis of examples."""
        return NamedSharding(self.mesh, PartitionSpec(self.data_axes))

    def own_rows(self, size: int) -> np.ndarray:
        """Returns the positions of a batch that devices of this process need, ascending.

        Args:
          size: The number of examples of the batch.
        """
        slices = self.rows.addressable_devices_indices_map((size,)).values()
        positions = np.arange(size)
        # Devices along the other axes of the mesh hold the same rows.
        return np.unique(np.concatenate([positions[own] for own in slices]))

    def batch(self, tree: Any, size: int) -> Any:
        """Returns a batch on the devices.

        Args:
          tree: The examples at `own_rows`, on the host.
          size: The number of examples of the whole batch.
        """

        # No process needs the rows of the others.
        def whole(x: np.ndarray) -> jax.Array:
            array: jax.Array = jax.make_array_from_process_local_data(
                self.rows, x, (size, *x.shape[1:])
            )
            return array

        return jax.tree.map(whole, jax.device_get(tree))

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shardings(
        self,
        tree: Any,
        params: Any,
        moving: Any,
    ) -> Any:
        """Returns the shardings of a pytree. Its parts that are like params lie like params.

        Args:
          tree: The pytree.
          params: The parameters.
          moving: The parameters with None in place of frozen leaves.
        """
        of_leaves = [NamedSharding(self.mesh, spec) for spec in self.specs]
        of_params = jax.tree.unflatten(jax.tree.structure(params), of_leaves)
        of_moving = jax.tree.map(
            lambda leaf, sharding: None if leaf is None else sharding,
            moving,
            of_params,
            # Both trees have the structure of params only if None counts as a leaf.
            is_leaf=lambda x: x is None,
        )

        # The state of an optimizer has parts like its gradients, which lack frozen leaves.
        def find(part: Any) -> Any:
            if _alike(part, params):
                return of_params
            if _alike(part, moving):
                return of_moving
            # The buffers of correlated noise are arrays like the gradients, stacked.
            return jax.tree.map(_stacked, of_moving) if _alike(part, moving, axes=1) else None

        return jax.tree.map(
            lambda part: find(part) or self.everywhere,
            tree,
            # The largest part that is like the parameters is found first, before its leaves are
            # looked at.
            is_leaf=lambda part: find(part) is not None,
        )


def _spec(
    path: str,
    leaf: Any,
    mesh: Mesh,
    rule: ParamSharding | None,
) -> PartitionSpec:
    """Returns how a parameter lies on the mesh: as a rule says, or as it lies already."""
    own = leaf.sharding if isinstance(leaf, jax.Array) else None
    devices = set(mesh.devices.flat)
    # JAX moves an array that is not committed, but not one that the user has placed.
    if own is not None and leaf.committed and not own.device_set <= devices:
        raise ValueError(
            f"params has {path!r} on devices {sorted(map(str, own.device_set))}, which are "
            f"not all in mesh, whose devices are {sorted(map(str, mesh.devices.flat))}. "
            "Move it with jax.device_put."
        )
    if rule is not None:
        spec = rule(path, leaf)
    else:
        spec = own.spec if isinstance(own, NamedSharding) else PartitionSpec()
    try:
        # JAX checks the axes of the spec and the sizes here, with no array moved.
        NamedSharding(mesh, spec).shard_shape(leaf.shape)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{'params' if rule is None else 'param_sharding'} gives {path!r} of shape "
            f"{leaf.shape} the spec {spec}, which does not fit mesh={dict(mesh.shape)}. "
            "Give param_sharding a spec whose axes mesh has and whose sizes divide the "
            f"shape. JAX says: {' '.join(str(error).split())[:200].rstrip('.')}."
        ) from error
    return spec


def put(
    tree: Any,
    shardings: Any,
    *,
    copy: bool = False,
) -> Any:
    """Returns a pytree whose arrays lie as given.

    All processes have equal arrays on the host. JAX compares them. It sends no typed keys to other
    processes, so their words are sent.
    """

    def is_key(x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    def sent(x: Any) -> Any:
        if is_key(x):
            return jax.random.key_data(x)
        return x

    def received(x: Any, before: Any) -> Any:
        if not is_key(before):
            return x
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(before))

    words = jax.tree.map(sent, tree)
    # A copy shares no memory with the caller's arrays, which a donation of the result would delete.
    placed = jax.device_put(words, shardings, may_alias=False if copy else None)
    return jax.tree.map(received, placed, tree)


def rounded_up(
    sizes: Sequence[int],
    mesh: Mesh | None,
    data_axes: Sequence[str],
) -> tuple[int, ...]:
    """Returns the sizes of batches, descending, as multiples of the number of their devices."""
    count = data_devices(mesh, data_axes)
    # Two sizes may have one multiple.
    multiples = {-(-size // count) * count for size in sizes}
    return tuple(sorted(multiples, reverse=True))


def data_devices(mesh: Mesh | None, data_axes: Sequence[str]) -> int:
    """Returns the number of parts into which a batch is divided."""
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in data_axes)


def _stacked(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of a stack of arrays that have a sharding."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _alike(tree: Any, like: Any, *, axes: int = 0) -> bool:
    """Returns whether two pytrees have one structure and leaves of equal shapes.

    Those of the first may have further leading axes.
    """
    structures = jax.tree.structure(tree), jax.tree.structure(like)
    if structures[0] != structures[1]:  # type: ignore[operator]
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
    return all(x.ndim == y.ndim + axes and x.shape[axes:] == y.shape for x, y in pairs)
