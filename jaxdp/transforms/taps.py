"""Taps: zeros that only derivatives see, added where a weight meets data.

The cotangent of a tap is the gradient of the loss with respect to the value that it was added to.
"""

from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir

from jaxdp.transforms import shards


def _value(x: Any, tap: Any) -> Any:
    return x


# Nothing is added: the value is that of x, and only the derivative below knows the tap.
_tap = jex.Primitive("jaxdp_tap")
_tap.def_impl(_value)
_tap.def_abstract_eval(_value)
mlir.register_lowering(_tap, mlir.lower_fun(_value, multiple_results=False))


def tapped(x: Any, tap: jax.Array) -> jax.Array:
    """Returns x + tap for a tap of zeros [1, ...]. It reads no tap, so none takes memory."""
    result: jax.Array = _tap.bind(x, tap)
    return result


def _tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, _ = primals
    x_tangent, tap_tangent = tangents
    if isinstance(tap_tangent, ad.Zero):
        return x, x_tangent
    # The tap varies over the mesh axes of the leaves, and x over those of the data too.
    tap_tangent = shards.vary(tap_tangent.reshape(x.shape), shards.varying_axes(x))
    if isinstance(x_tangent, ad.Zero):
        return x, tap_tangent
    return x, x_tangent + tap_tangent


ad.primitive_jvps[_tap] = _tangents
# Nothing reads a tap, so the result is batched as x is.
batching.primitive_batchers[_tap] = lambda args, axes: (args[0], axes[0])
