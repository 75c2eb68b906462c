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

Form = Callable[..., Any]
Forms = tuple[tuple[str, Form], ...]  # (platform, function of flat arguments)

# The platform for which a form is being traced.
_traced = contextvars.ContextVar[str | None]("_traced", default=None)


def platform() -> str:
    """Returns the platform for which the calling form is traced, elsewhere that of this process."""
    return _traced.get() or own_platform()


def own_platform() -> str:
    """Returns the platform where this process computes what is on no device yet."""
    # The setting may be a device, or the name of a platform.
    device = jax.config.values["jax_default_device"] or jax.local_devices()[0]
    if isinstance(device, str):
        return device
    return platform_of(device)


def platform_of(device: jax.Device) -> str:
    """Returns the platform of a device, of `PLATFORMS`."""
    # JAX calls CUDA and ROCm "gpu", and lowers for them by their own names.
    if device.platform != "gpu":
        return str(device.platform)
    if "rocm" in device.client.platform_version.lower():
        return "rocm"
    return "cuda"


def capability() -> int:
    """Returns the major number of the compute capability of CUDA devices.

    Without a CUDA device it is a modern one.
    """
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    major, _, _ = capability.partition(".")
    if major.isdigit():
        return int(major)
    return _MODERN


@contextlib.contextmanager
def traced_for(name: str) -> Iterator[None]:
    """Lets `platform` return `name`.

    What was traced before, such as a compiled function, keeps its forms.
    """
    token = _traced.set(name)
    try:
        yield
    finally:
        _traced.reset(token)


def for_platform(function: Form, *args: Any) -> Any:
    """Returns `function(*args)`, traced apart for each platform that the program is compiled for.

    `platform` tells the function which one it is. The function must not close over traced values.
    """
    if _traced.get() is not None:  # an outer call has chosen the platform
        return function(*args)
    own = own_platform()
    # A form is traced when the program is lowered, where the caller's setting may be gone.
    precision = jax.config.values["jax_default_matmul_precision"]

    def form(name: str) -> Form:
        def traced(*args: Any) -> Any:
            with traced_for(name), jax.default_matmul_precision(precision):
                return function(*args)

        return traced

    # The form of this platform is the default, so derivatives are of what a user runs here.
    others = {name: form(name) for name in PLATFORMS if name != own}
    return by_platform(*args, default=form(own), kernels=None, **others)


_form = Primitive("jaxdp_form")
_form.multiple_results = True


def by_platform(
    *args: Any,
    default: Form,
    kernels: Mapping[str, Form] | None = None,
    **forms: Form,
) -> Any:
    """Returns `default(*args)`, computed by the form of the platform that is compiled for.

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
    mesh = jax.sharding.get_abstract_mesh()

    # The default is traced now, because its shapes are those of the result. Forms and kernels wait
    # until the program is lowered.
    def default_of_leaves(*leaves: Any) -> Any:
        return default(*jax.tree.unflatten(structure, leaves))

    # With one call in it, the program is not traced equation by equation where it is lowered.
    trace = jax.make_jaxpr(jax.jit(default_of_leaves), return_shape=True)
    program, shapes = trace(*leaves)
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise TypeError(
            "default closes over a traced value. Pass the value as an argument of by_platform."
        )

    def flat_forms(functions: Mapping[str, Form]) -> Forms:
        items = functions.items()
        return tuple((name, functools.partial(_flat, f, structure, mesh)) for name, f in items)

    results = _form.bind(
        *leaves, default=program, forms=flat_forms(forms), kernels=flat_forms(kernels or {})
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _flat(
    form: Form,
    structure: Any,
    mesh: Any,
    *leaves: Any,
) -> list[Any]:
    """Returns the leaves of the result of a form, from the leaves of its arguments."""
    # A form is traced when the program is lowered, where the mesh in context is no longer known.
    with contextlib.nullcontext() if mesh.empty else jax.sharding.use_abstract_mesh(mesh):
        return jax.tree.leaves(form(*jax.tree.unflatten(structure, leaves)))


@_form.def_effectful_abstract_eval
def _shapes(
    *_: Any,
    default: Any,
    forms: Forms,
    kernels: Forms,
) -> Any:
    return default.out_avals, default.effects


@_form.def_impl
def _computed(*args: Any, **parameters: Any) -> Any:
    return jax.jit(functools.partial(_form.bind, **parameters))(*args)


def _lowered(
    platform: str,
    context: Any,
    *args: Any,
    default: Any,
    forms: Forms,
    kernels: Forms,
) -> Any:
    """Lowers the form of a platform: a kernel if there is one, else a form, else the default."""
    form = dict(forms).get(platform, jaxpr_as_fun(default))
    if is_undivided(context):
        form = dict(kernels).get(platform, form)
    return mlir.lower_fun(form, multiple_results=True)(context, *args)


def is_undivided(context: Any) -> bool:
    """Returns whether XLA divides no work of the program among devices.

    Each device computes all of the program, or the part that `jax.shard_map` gives it.
    """
    devices = context.module_context.axis_context
    if isinstance(devices, mlir.ShardingContext):
        return bool(devices.num_devices == 1)
    # Inside of `jax.shard_map` over all axes of the mesh, XLA divides nothing further. Over some
    # axes, it still divides along the others.
    if isinstance(devices, mlir.SPMDAxisContext):
        manual = devices.manual_axes | set(devices.mesh.manual_axes)
        return not devices.manual_axes or manual == set(devices.mesh.axis_names)
    return True


for _platform in PLATFORMS:
    mlir.register_lowering(_form, functools.partial(_lowered, _platform), platform=_platform)


def _batched(
    args: Any,
    axes: Any,
    *,
    default: Any,
    forms: Forms,
    kernels: Forms,
) -> Any:
    def batched(form: Form) -> Form:
        return jax.vmap(form, axes)

    # Forms are batched where they are traced, so their own rules under `jax.vmap` apply.
    program = jax.make_jaxpr(batched(jaxpr_as_fun(default)))(*args)
    results = _form.bind(
        *args,
        default=program,
        forms=tuple((name, batched(form)) for name, form in forms),
        kernels=tuple((name, batched(kernel)) for name, kernel in kernels),
    )
    return results, [0] * len(results)


batching.primitive_batchers[_form] = _batched


def _tangents(
    args: Any,
    tangents: Any,
    *,
    default: Any,
    forms: Forms,
    kernels: Forms,
) -> Any:
    # The form of the platform computes the results, and the default form their derivatives.
    results = _form.bind(*args, default=default, forms=forms, kernels=kernels)
    # `jax.jvp` takes no symbolic zeros.
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    _, derivatives = jax.jvp(jaxpr_as_fun(default), tuple(args), tangents)
    return results, derivatives


ad.primitive_jvps[_form] = _tangents
