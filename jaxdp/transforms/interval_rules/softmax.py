"""Rules of softmax and its logarithms, by differences of logits.

p_c = exp(z_c) / sum_j exp(z_j) = 1 / sum_j exp(z_j - z_c) depends on z by differences only. Entry
[j, c] of `pairwise_gaps` is an upper bound of z_j - z_c (derivation T2).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms.boxes import (
    Box,
    Equation,
    Operand,
    at_least_float32,
    both,
    lower,
    magnitude,
    outward,
    register_rule,
    upper,
    widen,
)
from jaxdp.transforms.interval_rules.endpoints import (
    Ends,
    around,
    log_sum_exp,
    narrow,
    off_diagonal,
    sum_of_others,
)

# All pairwise differences of at most this many logits are bounded.
# There are K^2 of them for K logits.
PAIRWISE = 32


def pairwise_gaps(logits: Operand, product: str = "tight") -> jax.Array:
    """Computes upper bounds [..., j, c] of z_j - z_c, for logits z [..., K]."""
    high = upper(logits)
    low = lower(logits)
    gaps = high[..., :, None] - low[..., None, :]
    # The difference of two logits of -inf (probability zero) is unknown. A NaN stays NaN.
    gap_is_nan = jnp.isnan(gaps)
    high_is_known = ~jnp.isnan(high)[..., :, None]
    unknown = gap_is_nan & high_is_known & ~jnp.isnan(low)[..., None, :]
    # [..., j, c], rounded up, and 0 for j = c.
    gaps = off_diagonal(outward(gaps, 1))
    gaps = jnp.where(unknown, jnp.inf, gaps)
    if product != "tight" or not isinstance(logits, Box) or logits.differences is None:
        return gaps
    by_weights = logits.differences()
    is_unknown = jnp.isnan(by_weights)
    # Both are upper bounds, and the minimum of isotonic bounds is isotonic.
    smaller = jnp.minimum(gaps, by_weights)
    return jnp.where(is_unknown, gaps, smaller)


def certain_argmax(logits: Operand, product: str = "tight") -> jax.Array:
    """Returns the index [] of the entry of z [K] that is the largest at every point, or -1.

    Needs K >= 2.
    """
    # All pairs would be too many, so ends of single logits are compared.
    if logits.shape[-1] > PAIRWISE:
        best = jnp.argmax(lower(logits))
        is_best = jnp.arange(logits.shape[-1]) == best
        rivals = jnp.where(is_best, -jnp.inf, upper(logits))
        is_certain = jnp.max(rivals) < lower(logits)[best]
        return jnp.where(is_certain, best, -1).astype(jnp.int32)
    gaps = pairwise_gaps(logits, product)
    is_diagonal = np.eye(gaps.shape[-1], dtype=bool)
    # Column c has the gaps z_j - z_c to entry c.
    wins = jnp.all((gaps < 0) | is_diagonal, axis=0)
    is_certain = jnp.any(wins)
    winner = jnp.argmax(wins)
    return jnp.where(is_certain, winner, -1).astype(jnp.int32)


def probabilities(gaps: jax.Array) -> Ends:
    """Bounds softmax(z) by p_c = 1 / sum_j exp(z_j - z_c), from upper bounds of the differences."""
    low = 1 / jnp.sum(jnp.exp(gaps), axis=-2)
    # z_j - z_c >= -(upper bound of z_c - z_j)
    high = 1 / jnp.sum(jnp.exp(-gaps), axis=-1)
    # 16 roundings of exp, K of the sum, and those of the quotient.
    low, high = widen(low, high, gaps.shape[-1] + 20)
    return jnp.maximum(low, 0), jnp.minimum(high, 1)


@register_rule("softmax")
def _softmax(eqn: Equation, x: Operand) -> Operand:
    """Bounds exp(x) / sum(exp(x)) over the last axis as e / (e + the sum of the others).

    This form rises with e and falls with the others, so each end is exact.
    """
    x = at_least_float32(x)
    # The common shift cancels in every share, and no exponential overflows.
    shift = jnp.max(upper(x), axis=-1, keepdims=True)
    low = lower(x) - shift
    high = upper(x) - shift
    low, high = widen(low, high)
    low = jnp.exp(low)
    high = jnp.exp(high)
    # 16 roundings of exp, and those of two cumulative sums for the others.
    low, high = widen(low, high, 16 + 2 * x.shape[-1])
    low = jnp.maximum(low, 0)
    others_low = sum_of_others(low)
    others_high = sum_of_others(high)
    # If all exponentials underflow, 0 / 0 becomes 0 or 1. A NaN logit stays NaN.
    low_is_lost = (low == 0) & (others_high == 0)
    low = jnp.where(low_is_lost, 0, low / (low + others_high))
    high_is_lost = (high == 0) & (others_low == 0)
    high = jnp.where(high_is_lost, 1, high / (high + others_low))
    low, high = widen(low, high, 8)
    high = jnp.minimum(high, 1)
    return narrow(eqn, low, high, nonnegative=True)


@register_rule("log_softmax")
def _log_softmax(eqn: Equation, x: Operand) -> Operand:
    """Bounds x_k - log(sum(exp(x))) = -log(sum_j exp(x_j - x_k)) over the last axis."""
    x = at_least_float32(x)
    if x.shape[-1] <= PAIRWISE:
        gaps = pairwise_gaps(x, eqn.product)
        low = -log_sum_exp(gaps, -2)
        high = -log_sum_exp(-gaps, -1)
        ends = (low, high)
        scales = ends
    else:  # the entry at one end, and all others at the other end
        others_low = _log_sum_of_others(lower(x))
        others_high = _log_sum_of_others(upper(x))
        low = -jnp.logaddexp(others_high - lower(x), 0)
        high = -jnp.logaddexp(others_low - upper(x), 0)
        ends = (low, high)
        largest = 2 * jnp.max(magnitude(x), -1, keepdims=True)
        scales = (largest, largest)
    # exp and the sum move the logarithm by 16 + K roundings of 1, and it adds 16 of its own value.
    result = around(ends, scales, x.shape[-1] + 24)
    high = jnp.minimum(result.upper, 0)
    return narrow(eqn, result.lower, high)


def _log_sum_of_others(x: jax.Array) -> jax.Array:
    """Returns the logarithm of the sum of exponentials of the other entries of the last axis."""
    top = jnp.max(x, axis=-1, keepdims=True)
    shift = jnp.where(jnp.isfinite(top), top, 0)
    others = sum_of_others(jnp.exp(x - shift))
    return jnp.log(others) + shift


@register_rule("log_sum_exp")
def _log_sum_exp_of_last_axis(eqn: Equation, x: Operand) -> Operand:
    """Bounds log(sum(exp(x))) over the last axis, which rises with every entry."""
    x = at_least_float32(x)
    shape = eqn.outputs[0].shape
    ends = both(lambda v: log_sum_exp(v, -1), x)
    largest = both(lambda v: jnp.max(v, -1), x)
    result = around(ends, largest, x.shape[-1] + 24)
    low = result.lower.reshape(shape)
    high = result.upper.reshape(shape)
    return narrow(eqn, low, high)


@register_rule("cumlogsumexp")
def _cumlogsumexp(eqn: Equation, x: Operand) -> Operand:
    """Bounds logarithms of cumulative sums of exponentials, which rise with every entry."""
    x = at_least_float32(x)
    axis = eqn.params["axis"]

    def largest(v: jax.Array) -> jax.Array:
        return lax.cummax(v, axis=axis, reverse=eqn.params["reverse"])

    # JAX scans by logaddexp, so each entry may add the rounding of an exponential.
    roundings = 16 * x.shape[axis] + 24
    ends = eqn.ends(x)
    scales = both(largest, x)
    result = around(ends, scales, roundings)
    return narrow(eqn, result.lower, result.upper)
