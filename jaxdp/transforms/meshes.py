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
"""A rule from the path of a parameter, such as "Dense_0/kernel", and the parameter to how it lies on the mesh."""


def check_mesh(
    mesh: Any,
    data_axes: Sequence[str],
    param_sharding: ParamSharding | None,
    *,
    processes: bool = False,
) -> None:
    """Raises TypeError or ValueError if the arguments do not describe a mesh of this process or, if
    allowed, of all.
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
    if isinstance(data_axes, str) or not data_axes or not set(data_axes) <= set(mesh.axis_names):
        raise ValueError(
            f"data_axes must be a tuple of names of mesh axes, got {data_axes!r}. The mesh has "
            f"{mesh.axis_names}."
        )
    if mesh.is_multi_process and not processes:
        raise ValueError(
            "mesh has devices of other processes, which only jaxdp.finetune divides its work "
            "among. Make it of jax.local_devices()."
        )
    if (
        mesh.is_multi_process
        and len(there := {x.process_index for x in mesh.devices.flat}) < jax.process_count()
    ):
        raise ValueError(
            f"mesh has devices of the processes {sorted(there)} only, of {jax.process_count()}. "
            "Make it of jax.devices(), or of jax.local_devices() to train in this process alone."
        )


def platform_of(mesh: Mesh | None) -> str:
    """Returns the platform of the devices of a mesh, without one that of this process, of
    `forms.PLATFORMS`.
    """
    return forms.platform() if mesh is None else forms.platform_of(mesh.devices.flat[0])


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
        cls, params: Any, mesh: Mesh, data_axes: Sequence[str], rule: ParamSharding | None
    ) -> "Layout":
        """Returns the layout of parameters by a rule, or by the shardings that they have.

        Raises:
          ValueError: A parameter is on devices outside of the mesh, or its spec does not fit it or
              the mesh.
        """
        mesh = Mesh(
            mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
        )
        specs = []
        for path, leaf in paths_of(params):
            own = leaf.sharding if isinstance(leaf, jax.Array) else None
            if own is not None and leaf.committed and not own.device_set <= set(mesh.devices.flat):
                raise ValueError(
                    f"params has {path!r} on devices {sorted(map(str, own.device_set))}, which are "
                    f"not all in mesh, whose devices are {sorted(map(str, mesh.devices.flat))}. "
                    "Move it with jax.device_put."
                )
            spec = own.spec if isinstance(own, NamedSharding) else PartitionSpec()
            spec = spec if rule is None else rule(path, leaf)
            try:
                NamedSharding(mesh, spec).shard_shape(leaf.shape)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{'params' if rule is None else 'param_sharding'} gives {path!r} of shape "
                    f"{leaf.shape} the spec {spec}, which does not fit mesh={dict(mesh.shape)}. "
                    "Give param_sharding a spec whose axes mesh has and whose sizes divide the "
                    f"shape. JAX says: {' '.join(str(error).split())[:200].rstrip('.')}."
                ) from error
            specs.append(spec)
        return cls(mesh, tuple(data_axes), tuple(specs))

    def whole(self) -> "Layout":
        """Returns the layout while gradients are computed: parameters are not divided along the
        data axes (FSDP).
        """

        def undivided(spec: PartitionSpec) -> PartitionSpec:
            axes = [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in spec]
            kept = [tuple(name for name in names if name not in self.data_axes) for names in axes]
            return PartitionSpec(*(names or None for names in kept))

        return dataclasses.replace(self, specs=tuple(map(undivided, self.specs)))

    def constrained(self, tree: Any, params: Any, moving: Any) -> Any:
        """Returns a pytree inside `jax.jit` whose parts lie as in `shardings`."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree, params, moving))

    @property
    def rows(self) -> NamedSharding:
        """The sharding of arrays with a leading axis of examples."""
        return NamedSharding(self.mesh, PartitionSpec(self.data_axes))

    def own_rows(self, size: int) -> np.ndarray:
        """Returns the positions of a batch of `size` examples that devices of this process need,
        ascending.
        """
        parts = self.rows.addressable_devices_indices_map((size,)).values()
        return np.unique(np.concatenate([np.arange(size)[part] for part in parts]))

    def batch(self, tree: Any, size: int) -> Any:
        """Returns a batch of `size` examples on the devices, from the examples at `own_rows` on the
        host.
        """
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(self.rows, x, (size, *x.shape[1:])),
            jax.device_get(tree),
        )

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, tree: Any, params: Any, moving: Any) -> Any:
        """Returns the shardings of a pytree, whose parts like `params` or `moving` lie like the
        parameters.

        Args:
          tree: The pytree.
          params: The parameters.
          moving: The parameters with None in place of frozen leaves.
        """
        lie = jax.tree.unflatten(
            jax.tree.structure(params), [NamedSharding(self.mesh, spec) for spec in self.specs]
        )
        known = [(params, lie)]
        known += [
            (
                moving,
                jax.tree.map(lambda m, s: None if m is None else s, moving, lie, is_leaf=_is_none),
            )
        ]

        def find(part: Any) -> Any:
            return next((lie for like, lie in known if _alike(part, like)), None)

        return jax.tree.map(
            lambda part: find(part) or self.everywhere, tree, is_leaf=lambda x: find(x) is not None
        )


def put(tree: Any, shardings: Any, *, copy: bool = False) -> Any:
    """Returns a pytree whose arrays lie as given. JAX sends no typed keys to other processes, so
    their words are sent.

    All processes have equal arrays on the host. JAX compares them.
    """

    def is_key(x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    words = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    there = jax.device_put(words, shardings, may_alias=False if copy else None)

    def typed(x: Any, old: Any) -> Any:
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(old)) if is_key(old) else x

    return jax.tree.map(typed, there, tree)


def rounded_up(
    sizes: Sequence[int], mesh: Mesh | None, data_axes: Sequence[str]
) -> tuple[int, ...]:
    """Returns the sizes of batches, descending, as multiples of the number of devices that share a
    batch.
    """
    count = data_devices(mesh, data_axes)
    return tuple(sorted({-(-size // count) * count for size in sizes}, reverse=True))


def data_devices(mesh: Mesh | None, data_axes: Sequence[str]) -> int:
    """Returns the number of parts into which a batch is divided."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in data_axes)


def _is_none(x: Any) -> bool:
    return x is None


def _alike(tree: Any, like: Any) -> bool:
    same: bool = jax.tree.structure(tree) == jax.tree.structure(like)  # type: ignore[operator]
    if not same:
        return False
    return all(x.shape == y.shape for x, y in zip(*map(jax.tree.leaves, (tree, like)), strict=True))
