"""The layout of tokens in the memory of a TPU.

A plain step sums the gradient of a LayerNorm's scale over examples and tokens. A private one sums
it over the tokens of each example. For that sum alone XLA lays arrays [B, T, d] with the tokens
outermost, and copies them between that layout and the one of the products around them. With the
layout of the plain step XLA sums where it multiplies. A private step of Tent on ViT-S/16 takes 1.20
of the plain one without it, by the estimate for v5e (docs/results/accelerators.md).
"""

import contextlib
import contextvars
from collections.abc import Iterator
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
    result: jax.Array = _in_order.bind(x)
    return result


def _value(x: Any) -> Any:
    return x


_in_order = jex.Primitive("jaxdp_in_order")
_in_order.def_impl(_value)
_in_order.def_abstract_eval(_value)
ad.deflinear2(_in_order, lambda cotangent, _: [_in_order.bind(cotangent)])


def _batched(args: Any, axes: Any) -> tuple[Any, int]:
    [x], [axis] = args, axes
    return _in_order.bind(jnp.moveaxis(x, axis, 0)), 0


batching.primitive_batchers[_in_order] = _batched


def _laid(x: jax.Array) -> jax.Array:
    order = layout.Layout(major_to_minor=tuple(range(x.ndim)))
    result: jax.Array = layout.with_layout_constraint(x, order)
    return result


def _lowered(context: Any, x: Any) -> Any:
    # XLA does not divide the call among devices.
    left_out = context.module_context.lowering_parameters.for_export and not _exported.get()
    form = _value if left_out or not forms.is_undivided(context) else _laid
    return mlir.lower_fun(form, multiple_results=False)(context, x)


mlir.register_lowering(_in_order, mlir.lower_fun(_value, multiple_results=False))
mlir.register_lowering(_in_order, _lowered, platform="tpu")
