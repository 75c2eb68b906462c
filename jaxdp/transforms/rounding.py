"""Bounds on the rounding of sums, by which a clipped contribution keeps its bound for every input.

In floating point a sum of n products differs from the exact one by at most n u sum |x y|, in any
order of the additions, with u = 2^-24 for float32 (Higham 2002, section 3.1; Jeannerod and Rump
2013 without terms of higher order). Here each addition counts as eps = 2 u. This also covers the
adders of tensor cores, which truncate, and the rounding of the bounds.

Let dV = sum_t u_t w_t^T be the gradient of one example at one site, with lengths |u_t| = a_t and
|w_t| = b_t. Let M = sum_t a_t b_t. It would be the norm of dV if all terms had one direction.

* The contribution is c dV, computed as a sum over t. Its norm is at most c (||dV|| + D), D = (T +
  8) eps M.
* A gradient that is formed twice, for its norm and for the sum, differs by at most 2 D.
* The Gram form computes U_ts = <u_t, u_s> and W_ts = <w_t, w_s>, as sums that a term enters by r_u
  and r_w additions, and sums their products by r_T. Its result differs from ||dV||^2 by at most

      E = eps sum_{t,s} (r_u a_t a_s |W_ts| + r_w |U_ts| b_t b_s + r_T |U_ts W_ts|).

For several sites of one weight, M is the sum of theirs, and T the largest of theirs plus their
number.

So ||contribution|| <= c (sqrt(total + E) + D). `covered` reports the norm n = sqrt(total) if this
sum is at most (1 + SLACK) n, and otherwise the sum divided by 1 + SLACK. A factor c <= bound / n
then bounds every contribution by (1 + SLACK) bound. D and E are small beside the norm unless the
terms of a gradient cancel.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

# A contribution exceeds the bound of its clipping rule by at most this fraction of it.
SLACK = 2.0**-8

# Products below the smallest normal float32 are flushed to zero. Each counts as this much instead.
FLUSHED = 2.0**-126

# Roundings of an entry of a contribution other than the additions over positions: the product with
# the clip factor, in up to two parts, and the sums of the parts, of devices and of positions that
# are added apart. Parts of 8 bits lose more, which the caller counts as terms.
_OTHERS = 8

_Function = TypeVar("_Function", bound=Callable[..., Any])


def traced_once(function: _Function, static_argnums: Sequence[int] = ()) -> _Function:
    """Returns a function whose calls with equal shapes share a trace, in any program.

    Every layer calls such a function, and layers of one shape share the trace: a tenth of the time
    in which the clipped gradient of a ViT is traced. The program is the same, because the trace is
    inlined. The function must not ask for the platform, which the trace would keep.
    """
    return cast(_Function, jax.jit(function, static_argnums=static_argnums, inline=True))


@traced_once
def root(squares: jax.Array) -> jax.Array:
    """Returns the square root, with the derivative 0 where it is 0, and 0 of negative numbers."""
    is_positive = squares > 0
    # The derivative of sqrt is infinite at 0, and would pass through the outer `where` as NaN.
    roots = jnp.sqrt(lax.select(is_positive, squares, jnp.ones_like(squares)))
    return lax.select(is_positive, roots, jnp.minimum(squares, 0) * 0)  # NaN stays NaN


@traced_once
def covered(
    squares: jax.Array,
    spread: jax.Array,
    error: jax.Array,
) -> jax.Array:
    """Returns the squared norm to report for a gradient.

    Args:
      squares: The squared norm as computed. The exact one is at most `squares + spread`.
      error: How far the norm of the contribution may exceed that of the exact gradient.
    """
    largest = root(squares + spread) + error
    return jnp.maximum(squares, jnp.square(largest / (1 + SLACK)))


def eps(dtype: Any) -> float:
    """Returns the bound on the relative rounding of one addition, twice the unit roundoff."""
    return float(jnp.finfo(dtype).eps)


def of_sum(terms: int, dtype: Any) -> float:
    """Returns (T + 8) eps, the rounding of an entry relative to the sum of its absolute terms.

    Args:
      terms: T, the number of terms.
      dtype: The dtype of the sum.
    """
    return (terms + _OTHERS) * eps(dtype)


def additions(count: int) -> int:
    """Returns how many additions a term passes where XLA adds up one axis of `count` terms.

    Reductions are trees: windows of 32 entries on a CPU, and blocks of threads on an accelerator.
    """
    # Several axes at once have windows of 32 entries along each, up to 1024 for two axes, on a CPU.
    # So what is added up there is one axis (`products.one_axis`).
    return min(count, 64 + 2 * math.isqrt(count))
