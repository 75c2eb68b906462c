"""Products of records and cotangents, with factors that the device multiplies without rounding.

Accelerators multiply float32 in TF32 or bfloat16 by default, which changes norms and sums by 1e-3
and more. Here factors are rounded first ("settled") to the bits that the device multiplies. The
norm of a gradient and the gradient in the sum then have the same factors.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import forms

# The precision of products of factors that are not settled.
PRECISION = lax.Precision.HIGHEST

# Stored bits of the significands that the units of accelerators multiply exactly.
TF32_BITS = 10
BFLOAT16_BITS = 7
# The bits of the exponent of float32, bfloat16 and TF32.
EXPONENT_BITS = 8

# Values of `jax_default_matmul_precision` with which a plain step multiplies so few bits.
_FEW_BITS = (None, "default", "fastest", "bfloat16", "tensorfloat32")
# The compute capability from which on a GPU multiplies TF32 and bfloat16.
_AMPERE = 8


def wide_dtype(*xs: Any) -> Any:
    """Returns float64 if one of xs is float64, else float32, under any dtype promotion rules."""
    has_double = any(x.dtype == jnp.float64 for x in xs)
    return jnp.dtype(jnp.float64 if has_double else jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """Converts an array to its `wide_dtype`."""
    return x.astype(wide_dtype(x))


def square(x: jax.Array) -> jax.Array:
    """Returns the squares of the entries in `wide_dtype`."""
    return jnp.square(wide(x))


def one_axis(x: jax.Array) -> jax.Array:
    """Returns the rows of `x` [B, ...] to be added up, [B, n] on a CPU.

    XLA on CPU adds one axis by windows of 32 entries. Windows of d axes have up to 32^d entries,
    added one after the other, whose rounding the norm of a large gradient would not cover. It
    joins a reshape with a sum that follows at once, so rows are reshaped before they are squared
    or multiplied. On accelerators a reshape may be a copy.
    """
    if forms.platform() != "cpu":
        return x
    return x.reshape(len(x), math.prod(x.shape[1:]))


def squared_lengths(x: jax.Array) -> jax.Array:
    """Returns the sums of squares [B] of the rows of `x` [B, ...], in its dtype."""
    rows = one_axis(x)
    axes = tuple(range(1, rows.ndim))
    return jnp.square(rows).sum(axes)


def along_batch(x: jax.Array, ndim: int) -> jax.Array:
    """Reshapes [B] to [B, 1, ..., 1] of `ndim` dimensions."""
    ones = (1,) * (ndim - 1)
    return x.reshape(-1, *ones)


def settled(x: jax.Array) -> jax.Array:
    """Rounds `x` to its own dtype if that is bfloat16 or float16.

    XLA may keep more digits of it in one use than in another. Then a norm would not belong to the
    gradient in the sum.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return x
    kind = jnp.finfo(x.dtype)
    exact = x.astype(jnp.float32)
    rounded = lax.reduce_precision(exact, kind.nexp, kind.nmant)
    if x.dtype == jnp.float16:  # reduce_precision flushes subnormal numbers to zero
        # 2^-14 is the smallest normal float16, and 2^-24 the step between those below.
        subnormal = jnp.abs(exact) < 2.0**-14
        rounded = jnp.where(subnormal, jnp.round(exact * 2.0**24) * 2.0**-24, rounded)
    return rounded.astype(x.dtype)


def multiplied_bits() -> int | None:
    """Returns how many stored bits of a float32 significand a plain step multiplies.

    They are those of TF32 on a GPU that has it, and those of bfloat16 on a TPU. None stands for all
    bits: on other platforms, and where JAX is told to multiply all.
    """
    precision = jax.config.values["jax_default_matmul_precision"]
    if precision not in _FEW_BITS:
        return None
    if forms.platform() == "tpu":
        # A TPU then takes several passes of bfloat16, which have more bits than one.
        if precision == "tensorfloat32":
            return None
        return BFLOAT16_BITS
    has_tf32 = forms.platform() == "cuda" and forms.capability() >= _AMPERE
    if has_tf32 and precision != "bfloat16":
        return TF32_BITS
    return None


def multiplies_bfloat16() -> bool:
    """Returns whether the platform multiplies bfloat16 many times faster than float32."""
    platform = forms.platform()
    return platform == "tpu" or (platform == "cuda" and forms.capability() >= _AMPERE)


def settled_precision() -> lax.Precision:
    """Returns the precision that multiplies settled factors without rounding them."""
    if multiplied_bits() is None:
        return PRECISION
    return lax.Precision.DEFAULT


def contracted(
    x: jax.Array,
    y: jax.Array,
    over: Sequence[int],
    batch: Sequence[int] = (),
    precision: lax.Precision | None = None,
) -> jax.Array:
    """Contracts equal dimensions of two arrays of any dtype. It accumulates in float32 or wider.

    `jnp.einsum` gives the same product, but takes twenty times as long to trace. The arrays are
    settled, unless a precision is given.
    """
    kind = wide_dtype(x, y)
    # `dot_general` takes operands of one dtype only.
    if x.dtype != y.dtype:
        x = x.astype(kind)
        y = y.astype(kind)
    return lax.dot_general(
        x,
        y,
        ((over, over), (batch, batch)),
        preferred_element_type=kind,
        precision=precision or settled_precision(),
    )


def outer_sum(u: jax.Array, w: jax.Array) -> jax.Array:
    """Computes sum_{n,t} u_nst w_nst^T, [S, p, q], for u [N, S, T, p] and w [N, S, T, q]."""
    if u.shape[1] == 1:  # a plain matrix product
        rows = u.reshape(-1, u.shape[-1])
        return contracted(rows, w.reshape(-1, w.shape[-1]), [0])[None]
    return contracted(u, w, [0, 2], [1])
