"""The layout of tokens and of cotangents of images in the memory of a TPU.

A plain step sums the gradient of a LayerNorm's scale over examples and tokens. A private one sums
it over the tokens of each example. For that sum alone XLA lays arrays [B, T, d] with the tokens
outermost, and copies them between that layout and the one of the products around them. With the
layout of the plain step XLA sums where it multiplies. A private step of Tent on ViT-S/16 takes 1.20
of the plain one without it, by the estimate for v5e (docs/results/accelerators.md).

Kernels of convolutions read images with the examples on the lanes. XLA lays some cotangents with
the features there, and copies them. It also computes a cotangent twice, for the kernel and for the
convolution before it. An array of a fixed layout is written once, and both read it.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.experimental import layout
from jax.interpreters import ad, batching, mlir

from jaxdp.transforms import forms

# The lanes of a TPU's registers. Fewer features than lanes may lie across the tokens.
_LANES = 128

_exported = contextvars.ContextVar("_exported", default=False)


@contextlib.contextmanager
def in_exports() -> Iterator[None]:
    """Lets programs that `jax.export` makes fix layouts too.

    The call by which XLA is told of a layout is none of those whose meaning JAX guarantees for
    exported programs. `jax.export.export` takes it with
    `disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]`.
    """
    token = _exported.set(True)
    try:
        yield
    finally:
        _exported.reset(token)


def features_last(x: jax.Array) -> jax.Array:
    """Returns `x`, which lies in a TPU's memory in the order of its axes if it holds tokens.

    Its cotangent does so too. Elsewhere, and for other arrays, XLA chooses.

    Args:
      x: An array of one example. Tokens are [..., T, d] with leading axes of length one, T of at
        least 2 and d of at least 128.
    """
    *lead, tokens, features = (1, 1, *x.shape)
    if max(lead) > 1 or tokens == 1 or features < _LANES:
        return x
    result: jax.Array = _in_order.bind(x, order=tuple(range(x.ndim)), kind="tokens")
    return result


def cotangent_on_lanes(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Returns `x`, whose cotangents have examples on the lanes where these fill all lanes.

    Args:
      x: The picture of one example.
      order: Its axes, of which the first varies slowest in memory.
    """
    result: jax.Array = _in_order.bind(x, order=tuple(order), kind="value")
    return result


def _value(x: Any, **_: Any) -> Any:
    return x


# Of a "value" only the cotangent has a layout, that of "pictures".
_in_order = jex.Primitive("jaxdp_in_order")
_in_order.def_impl(_value)
_in_order.def_abstract_eval(_value)


def _transposed(cotangent: Any, _: Any, order: tuple[int, ...], kind: str) -> list[Any]:
    kind = "pictures" if kind == "value" else kind
    return [_in_order.bind(cotangent, order=order, kind=kind)]


ad.deflinear2(_in_order, _transposed)


def _batched(args: Any, axes: Any, order: tuple[int, ...], kind: str) -> tuple[Any, int]:
    [x], [axis] = args, axes
    inner = [1 + d for d in order]
    # Examples vary slowest around tokens, and fastest around pictures.
    order = (0, *inner) if kind == "tokens" else (*inner, 0)
    return _in_order.bind(jnp.moveaxis(x, axis, 0), order=order, kind=kind), 0


batching.primitive_batchers[_in_order] = _batched


def _laid(x: jax.Array, order: tuple[int, ...], kind: str) -> jax.Array:
    if kind == "value":
        return x
    # Kernels transpose a batch that does not fill the lanes, and nothing mapped one alone.
    if kind == "pictures" and (order[-1] != 0 or x.shape[0] % _LANES):
        return x
    return layout.with_layout_constraint(x, layout.Layout(major_to_minor=order))


def _lowered(context: Any, x: Any, **params: Any) -> Any:
    # XLA does not divide the call among devices.
    left_out = context.module_context.lowering_parameters.for_export and not _exported.get()
    form = _value if left_out or not forms.is_undivided(context) else _laid
    return mlir.lower_fun(form, multiple_results=False)(context, x, **params)


mlir.register_lowering(_in_order, mlir.lower_fun(_value, multiple_results=False))
mlir.register_lowering(_in_order, _lowered, platform="tpu")
