"""The layouts of cotangents in the memory of a TPU.

XLA chooses how arrays lie from the operations that read them. A private step sums some gradients
for each example where a plain one sums them for the batch. For these sums alone XLA may choose
another layout than for all other operations, and copies arrays between both.

Tokens: XLA laid the arrays [B, T, d] of a Transformer of which only the norms are trained with the
tokens outermost. A private step of Tent on ViT-S/16 took 1.20 of the plain one, by the estimate for
v5e. In the layout of the plain step, in which XLA sums where it multiplies, it takes 0.94.

Pictures: the kernels of convolutions read arrays with the examples on the lanes. XLA laid some
cotangents with the features there, and copied them. It also computed a cotangent twice, for the
kernel and for the convolution before it. An array of a fixed layout is written once, and both read
it. The clipped gradient of WRN-10-4 took 1.88 of the plain one, and takes 1.53.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.experimental import layout
from jax.interpreters import ad, batching, mlir

from jaxdp.transforms import forms

# The lanes of a TPU's registers.
_LANES = 128
# Arrays of fewer entries may stay in the memory of the chip, where a copy is cheap. By the estimate
# for v5e, a fixed layout of tokens makes two blocks of a ViT-S/16 22 % faster for 64 images of
# 224 x 224, whose arrays have 4.8 million entries, and 8 % slower for 64 images of 96 x 96.
_LARGE = 2**22
# In an order of axes: that of the examples, before `jax.vmap` has made it.
_EXAMPLES = -1

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


def of_tokens(x: jax.Array) -> jax.Array:
    """Returns `x`, whose cotangents have the order of their axes if they are of many tokens.

    Args:
      x: An array of one example. Tokens are [..., T, d] with leading axes of length one, T of at
        least 2, and d of at least 128. Fewer features may lie across the tokens.
    """
    if x.ndim < 2:
        return x
    *lead, tokens, features = x.shape
    if math.prod(lead) > 1 or tokens == 1 or features < _LANES:
        return x
    return _cotangent_in_order(x, (_EXAMPLES, *range(x.ndim)))


def of_pictures(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Returns `x`, whose cotangents have the examples on the lanes where these fill all lanes.

    Args:
      x: A picture of one example.
      order: Its axes, of which the first varies slowest in memory.
    """
    return _cotangent_in_order(x, (*order, _EXAMPLES))


def _cotangent_in_order(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    result: jax.Array = _in_order.bind(x, order=order, fixed=False)
    return result


def _value(x: Any, **_: Any) -> Any:
    return x


# An array with the order of its axes, slowest first, which holds for the array itself if it is
# `fixed`, and otherwise for its cotangent.
_in_order = jex.Primitive("jaxdp_in_order")
_in_order.def_impl(_value)
_in_order.def_abstract_eval(_value)


def _transposed(cotangent: Any, _: Any, order: tuple[int, ...], fixed: bool) -> list[Any]:
    return [_in_order.bind(cotangent, order=order, fixed=True)]


ad.deflinear2(_in_order, _transposed)


def _batched(args: Any, axes: Any, order: tuple[int, ...], fixed: bool) -> tuple[Any, int]:
    [x], [axis] = args, axes
    x = jnp.moveaxis(x, axis, 0)
    after = tuple(1 + place for place in order)
    # 1 + _EXAMPLES is the new axis. Where examples have theirs, a further one varies slowest.
    if _EXAMPLES not in order:
        after = (0, *after)
    return _in_order.bind(x, order=after, fixed=fixed), 0


batching.primitive_batchers[_in_order] = _batched


def _laid(x: jax.Array, order: tuple[int, ...], fixed: bool) -> jax.Array:
    if not fixed or _EXAMPLES in order:
        return x
    is_of_pictures = order[-1] == 0
    # Kernels transpose a batch that does not fill the lanes.
    if is_of_pictures and len(x) % _LANES:
        return x
    if not is_of_pictures and x.size < _LARGE:
        return x
    result: jax.Array = layout.with_layout_constraint(x, layout.Layout(major_to_minor=order))
    return result


def _lowered(context: Any, x: Any, **params: Any) -> Any:
    # XLA does not divide the call among devices.
    left_out = context.module_context.lowering_parameters.for_export and not _exported.get()
    form = _value if left_out or not forms.is_undivided(context) else _laid
    return mlir.lower_fun(form, multiple_results=False)(context, x, **params)


mlir.register_lowering(_in_order, mlir.lower_fun(_value, multiple_results=False))
mlir.register_lowering(_in_order, _lowered, platform="tpu")
