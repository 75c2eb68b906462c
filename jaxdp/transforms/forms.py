"""Forms of one expression, chosen by the platform that a program is compiled for.

A process may compile for another platform than its own: it exports a model for a TPU, or computes
on the CPU of a host with a GPU. So a form is chosen when a program is lowered, and not when it is
traced. `jax.lax.platform_dependent` does so too, but it traces all forms, and lowers a Pallas
kernel for platforms that have none. It also leaves a kernel in programs that XLA divides among
devices, which the compiler refuses.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

# Platforms as `jax.jit(...).lower(lowering_platforms=...)` names them.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# The major number of the compute capability of a CUDA device that is not there. Ampere has 8.
_MODERN = 8

Forms = tuple[tuple[str, Callable[..., Any]], ...]  # by platform, of flat arguments

_traced = contextvars.ContextVar[str | None]("_traced", default=None)


def platform() -> str:
    """Returns the platform for which the calling form is traced, elsewhere that of this process."""
    return _traced.get() or own_platform()


def own_platform() -> str:
    """Returns the platform on which this process computes what is not on a device yet, of
    `PLATFORMS`.
    """
    device = jax.config.values["jax_default_device"] or jax.local_devices()[0]
    return device if isinstance(device, str) else platform_of(device)


def platform_of(device: jax.Device) -> str:
    """Returns the platform of a device, of `PLATFORMS`."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def capability() -> int:
    """Returns the major number of the compute capability of CUDA devices, by default a modern
    one.
    """
    known = str(getattr(jax.local_devices()[0], "compute_capability", "")).partition(".")[0]
    return int(known) if known.isdigit() else _MODERN


@contextlib.contextmanager
def traced_for(name: str) -> Iterator[None]:
    """Lets `platform` return `name`. What was traced before, such as a compiled function, keeps its
    forms.
    """
    token = _traced.set(name)
    try:
        yield
    finally:
        _traced.reset(token)


def for_platform(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`, traced apart for each platform that the program is compiled for.

    `platform` tells the function which one it is. The function must not close over traced values.
    """
    if _traced.get() is not None:
        return function(*args)
    own = own_platform()
    precision = jax.config.values["jax_default_matmul_precision"]

    def form(name: str) -> Callable[..., Any]:
        def traced(*args: Any) -> Any:
            with traced_for(name), jax.default_matmul_precision(precision):
                return function(*args)

        return traced

    others = {name: form(name) for name in PLATFORMS if name != own}
    return by_platform(*args, default=form(own), kernels=None, **others)


_form = Primitive("jaxdp_form")
_form.multiple_results = True


def by_platform(
    *args: Any,
    default: Callable[..., Any],
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    **forms: Callable[..., Any],
) -> Any:
    """Returns `default(*args)`, computed by the form of the platform that the program is compiled
    for.

    Args:
      args: Pytrees of arrays.
      default: The form of all platforms that have none of their own. Derivatives are those of this
          form.
      kernels: By platform, functions of args that call a Pallas kernel. XLA cannot divide a kernel,
        so a program of several devices has none, except inside of `jax.shard_map`.
      forms: By platform, other functions of args.

    Forms and kernels return what `default` returns, up to rounding. They must not close over traced
    values. Each is traced only in programs for its platform.
    """
    leaves, structure = jax.tree.flatten(args)

    def flat(*leaves: Any) -> Any:
        return default(*jax.tree.unflatten(structure, leaves))

    mesh = jax.sharding.get_abstract_mesh()
    # With one call in it, the program is not traced equation by equation where it is lowered.
    program, shapes = jax.make_jaxpr(jax.jit(flat), return_shape=True)(*leaves)
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise TypeError(
            "default closes over a traced value. Pass the value as an argument of by_platform."
        )

    def own(functions: Mapping[str, Callable[..., Any]]) -> Forms:
        return tuple(
            (name, functools.partial(_flat, f, structure, mesh)) for name, f in functions.items()
        )

    results = _form.bind(*leaves, default=program, forms=own(forms), kernels=own(kernels or {}))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _flat(form: Callable[..., Any], structure: Any, mesh: Any, *leaves: Any) -> list[Any]:
    # A form is traced when the program is lowered, where the mesh in context is no longer known.
    with contextlib.nullcontext() if mesh.empty else jax.sharding.use_abstract_mesh(mesh):
        return jax.tree.leaves(form(*jax.tree.unflatten(structure, leaves)))


@_form.def_effectful_abstract_eval
def _shapes(*_: Any, default: Any, forms: Forms, kernels: Forms) -> Any:
    return default.out_avals, default.effects


@_form.def_impl
def _computed(*args: Any, **parameters: Any) -> Any:
    return jax.jit(functools.partial(_form.bind, **parameters))(*args)


def _lowered(
    platform: str, context: Any, *args: Any, default: Any, forms: Forms, kernels: Forms
) -> Any:
    possible = {**dict(forms), **(dict(kernels) if _undivided(context) else {})}
    form = possible.get(platform, jaxpr_as_fun(default))
    return mlir.lower_fun(form, multiple_results=True)(context, *args)


def _undivided(context: Any) -> bool:
    """Returns whether each device computes all of the program, or a part that `jax.shard_map` tells
    it.
    """
    devices = context.module_context.axis_context
    if isinstance(devices, mlir.ShardingContext):
        return bool(devices.num_devices == 1)
    if isinstance(devices, mlir.SPMDAxisContext):
        manual = devices.manual_axes | set(devices.mesh.manual_axes)
        return not devices.manual_axes or manual == set(devices.mesh.axis_names)
    return True


for _platform in PLATFORMS:
    mlir.register_lowering(_form, functools.partial(_lowered, _platform), platform=_platform)


def _batched(args: Any, axes: Any, *, default: Any, forms: Forms, kernels: Forms) -> Any:
    def together(form: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(form, axes)

    program = jax.make_jaxpr(together(jaxpr_as_fun(default)))(*args)
    own = [tuple((name, together(f)) for name, f in functions) for functions in (forms, kernels)]
    results = _form.bind(*args, default=program, forms=own[0], kernels=own[1])
    return results, [0] * len(results)


batching.primitive_batchers[_form] = _batched


def _tangents(args: Any, tangents: Any, *, default: Any, forms: Forms, kernels: Forms) -> Any:
    # The results are computed by the form of the platform, and their derivatives by the default
    # form.
    results = _form.bind(*args, default=default, forms=forms, kernels=kernels)
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return results, jax.jvp(jaxpr_as_fun(default), tuple(args), tuple(tangents))[1]


ad.primitive_jvps[_form] = _tangents
