"""Rules of the losses of `jaxdp.losses` and of their gradients, in closed form.

Intervals through the derivative of a log-sum-exp would be uselessly wide.
"""

import jax
import jax.numpy as jnp

from jaxdp.transforms.boxes import (
    Box,
    Equation,
    Interval,
    Operand,
    both,
    inflate,
    lower,
    magnitude,
    register_rule,
    slack,
    upper,
    widen,
)
from jaxdp.transforms.interval_rules.endpoints import (
    NoRuleError,
    corner_products,
    least,
    log_sum_exp,
    most,
    sum_of_others,
    summable,
)
from jaxdp.transforms.interval_rules.softmax import pairwise_gaps, probabilities

# --- Softmax cross-entropy ----------------------------------------------------------------------


@register_rule("softmax_cross_entropy_gradient")
def _softmax_gradient(
    eqn: Equation,
    logits: Operand,
    weights: Operand,
) -> Operand:
    """Bounds (sum_k y_k) softmax(z) - y by differences of logits and the simplex (T2, T3)."""
    low, high = probabilities(pairwise_gaps(logits, eqn.product))
    if eqn.product == "tight":
        # p_c = 1 - the others, whose bounds may be tighter.
        below = 1 - sum_of_others(high)
        above = 1 - sum_of_others(low)
        below, above = widen(below, above, 2)
        error = slack(low.dtype, low.shape[-1] + 4)
        above = above + error  # the others sum to at most 1 at any point
        below = below - error * jnp.maximum(1, sum_of_others(high))
        low = jnp.maximum(low, below)
        high = jnp.minimum(high, above)
    weights_inflated = inflate(weights, low.shape[-1])  # by the rounding of their sum

    def total_of(v: jax.Array) -> jax.Array:
        return jnp.sum(v, axis=-1, keepdims=True)

    total = Box(*both(total_of, weights_inflated))
    shares = Box(low, high, nonnegative=True)
    low, high = widen(*corner_products(shares, total))
    low = low - upper(weights)
    high = high - lower(weights)
    low, high = widen(low, high)
    # sum_c (Y p_c - y_c) = 0 with Y = sum_k y_k, because probabilities sum to 1.
    return Box(low, high, zero_sum=True)


@register_rule("softmax_cross_entropy")
def _softmax_value(
    eqn: Equation,
    logits: Operand,
    weights: Operand,
) -> Operand:
    """Bounds sum_k y_k log sum_j exp(z_j - z_k)."""
    gaps = pairwise_gaps(logits, eqn.product)
    # As in `probabilities`, z_j - z_c is at least minus the gap [c, j].
    low = log_sum_exp(-gaps, axis=-1)
    high = log_sum_exp(gaps, axis=-2)
    error = slack(low.dtype, gaps.shape[-1] + 24)
    low = low - error * (1 + jnp.abs(low))
    high = high + error * (1 + jnp.abs(high))
    # The term j = k is 1, so no logarithm is negative.
    loss_by_class = Box(low, high, nonnegative=True)
    low, high = widen(*corner_products(weights, loss_by_class))
    # A class without weight adds nothing even if its loss is unbounded.
    absent = (lower(weights) == 0) & (upper(weights) == 0)
    low = jnp.where(absent, 0, low)
    high = jnp.where(absent, 0, high)
    error = slack(low.dtype, low.shape[-1] + 2)
    low = low - error * jnp.abs(low)
    high = high + error * jnp.abs(high)
    summands = summable(Box(low, high), low.shape[-1])
    low = jnp.sum(summands.lower, axis=-1)
    high = jnp.sum(summands.upper, axis=-1)
    low, high = widen(low, high)
    return Box(low, high)


# --- Sigmoid cross-entropy ----------------------------------------------------------------------


@register_rule("sigmoid_cross_entropy_gradient")
def _sigmoid_gradient(
    eqn: Equation,
    logits: Operand,
    label: Operand,
) -> Operand:
    """Bounds sigmoid(z) - y."""
    low, high = both(jax.nn.sigmoid, logits)
    low, high = widen(low, high, 16)
    below = jnp.maximum(low, 0) - upper(label)
    above = jnp.minimum(high, 1) - lower(label)
    below, above = widen(below, above)
    return Box(below, above)


@register_rule("sigmoid_cross_entropy")
def _sigmoid_value(
    eqn: Equation,
    logits: Operand,
    label: Operand,
) -> Operand:
    """Bounds log(1 + exp(z)) - y z, which is convex in z with its minimum where sigmoid(z) = y."""
    low = lower(logits)
    high = upper(logits)

    # As max(z, 0) + log(1 + exp(-|z|)), which does not overflow.
    def value(z: jax.Array, y: jax.Array) -> jax.Array:
        linear = jnp.maximum(z, 0) - y * z
        return linear + jnp.log1p(jnp.exp(-jnp.abs(z)))

    # The loss is linear in y, so its ends are at ends of y.
    labels = [lower(label)]
    # A known label is one array at both ends.
    if upper(label) is not lower(label):
        labels.append(upper(label))
    tops = []
    bottoms = []
    for y in labels:
        at_ends = [value(low, y), value(high, y)]
        # sigmoid(z) = y at z = log(y / (1 - y)).
        log_of_label = jnp.log(jnp.clip(y, 0, 1))
        log_odds = log_of_label - jnp.log1p(-jnp.clip(y, 0, 1))
        turning_point = jnp.clip(log_odds, low, high)
        tops += at_ends
        # An error in the turning point changes the value by the square of the error, far below the
        # slack.
        at_turn = value(turning_point, y)
        bottoms.append(least([*at_ends, at_turn]))
    scale = 1 + magnitude(logits) * jnp.maximum(1, magnitude(label))
    error = slack(low.dtype, 32) * scale
    low = least(bottoms) - error
    high = most(tops) + error
    return Box(low, high)


# --- Hinge --------------------------------------------------------------------------------------


@register_rule("binary_hinge", "binary_hinge_gradient")
def _binary_hinge(
    eqn: Equation,
    logits: Operand,
    sign: Operand,
) -> Operand:
    """Bounds max(0, 1 - s z) or -s [1 - s z > 0]."""
    low, high = widen(*corner_products(sign, logits))
    low, high = widen(1 - high, 1 - low)
    if eqn.name == "binary_hinge":
        return _positive_part(low, high)
    certain = (low > 0).astype(low.dtype)
    possible = (~(high <= 0)).astype(low.dtype)  # also NaN
    is_positive = Box(certain, possible, nonnegative=True)
    low, high = corner_products(is_positive, sign)
    return Box(-high, -low)


def _positive_part(low: jax.Array, high: jax.Array) -> Box:
    """Bounds max(0, x)."""
    low = jnp.maximum(low, 0)
    high = jnp.maximum(high, 0)
    return Box(low, high, nonnegative=True)


@register_rule("multiclass_hinge", "multiclass_hinge_gradient")
def _multiclass_hinge(
    eqn: Equation,
    logits: Operand,
    weights: Operand,
) -> Operand:
    """Bounds max(0, 1 + max_{k != y} z_k - z_y) or (e_j - e_y) [loss > 0]."""
    if isinstance(weights, Interval):
        raise NoRuleError("It does not support a label that depends on an interval.")
    label = jnp.argmax(weights, axis=-1)
    is_label = jax.nn.one_hot(label, weights.shape[-1], dtype=jnp.bool_)
    gaps = pairwise_gaps(logits, eqn.product)
    # Bounds of z_k - z_y for every class k.
    column_of_label = jnp.take_along_axis(gaps, label[..., None, None], axis=-1)
    above = column_of_label[..., 0]
    row_of_label = jnp.take_along_axis(gaps, label[..., None, None], axis=-2)
    below = -row_of_label[..., 0, :]
    above = jnp.where(is_label, -jnp.inf, above)  # no rival of itself
    below = jnp.where(is_label, -jnp.inf, below)
    # `argmax` takes NaN for the largest, so such weights would pass for a label.
    has_nan = jnp.isnan(weights).any(axis=-1)
    low = 1 + jnp.max(below, axis=-1)
    high = 1 + jnp.max(above, axis=-1)
    low, high = widen(low, high)
    low = jnp.where(has_nan, jnp.nan, low)
    high = jnp.where(has_nan, jnp.nan, high)
    if eqn.name == "multiclass_hinge":
        return _positive_part(low, high)
    return _multiclass_hinge_gradient(gaps, is_label, low, high)


def _multiclass_hinge_gradient(
    gaps: jax.Array,
    is_label: jax.Array,
    low: jax.Array,
    high: jax.Array,
) -> Box:
    """Bounds (e_j - e_y) [loss > 0], where j is the rival: the largest class besides y."""
    is_certain = (low > 0)[..., None]
    is_possible = ~(high <= 0)[..., None]  # also NaN
    # Entry [k, j]: whether z_k < z_j for certain, for another class j than the label.
    gaps = jnp.where(is_label[..., :, None], jnp.inf, gaps)
    is_beaten = (gaps < 0) & ~is_label[..., None, :]
    may_rival = ~jnp.any(is_beaten, axis=-1) & ~is_label
    rivals = jnp.sum(may_rival, axis=-1, keepdims=True)
    is_only_rival = may_rival & (rivals == 1)
    dtype = low.dtype
    of_label = -is_possible.astype(dtype)
    of_rival = (is_only_rival & is_certain).astype(dtype)
    low = jnp.where(is_label, of_label, of_rival)
    of_label = -is_certain.astype(dtype)
    of_rival = (may_rival & is_possible).astype(dtype)
    high = jnp.where(is_label, of_label, of_rival)
    return Box(low, high, zero_sum=True)
