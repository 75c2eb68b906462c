"""Losses of ONE example, with closed-form gradients.

Every function takes the logits and the label of one example and returns a float32 scalar, or
float64 for float64 logits. bfloat16 logits are computed in float32, and their gradient is bfloat16.
`jax.vmap` gives a batch.

Each loss is a `jax.custom_vjp` whose backward pass is the equation in its docstring, stable for any
finite logits. Values and gradients are primitives named after the loss
("softmax_cross_entropy_gradient"), which `jaxdp.interval` bounds in closed form. Only one
reverse-mode derivative is supported (`jax.grad`, `jax.vjp`, `jax.jacrev`), and neither `jax.jvp`
nor `jax.hessian`.

NaN logits or labels give a NaN loss and a NaN gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

__all__ = [
    "absolute_error",
    "corrected_cross_entropy",
    "hinge",
    "next_token",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "squared_error",
]


def softmax_cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Computes the cross-entropy between a label and softmax(logits).

        loss = sum_k y_k (log sum_j exp(z_j) - z_k),     dloss/dz = (sum_k y_k) softmax(z) - y,
        dloss/dy_k = log sum_j exp(z_j) - z_k

    A class with logit -inf has probability zero. It adds nothing to the loss unless the label puts
    mass on it.

    Args:
        logits: [K] with K >= 1.
        label: An integer class [] in 0..K-1, or probabilities [K] (one-hot, smoothed, mixed). An
            integer class outside 0..K-1 gives NaN.

    Raises:
        ValueError: `logits` is not a vector or `label` has neither form.
    """
    logits = _at_least_float32(logits)
    return _softmax_cross_entropy(logits, _class_weights(logits, label))


def corrected_cross_entropy(logits: jax.Array, likelihood: jax.Array) -> jax.Array:
    """Computes the cross-entropy of a noisy label by forward correction.

        loss = -log sum_c P(noisy label | true label c) softmax(z)_c

    Its minimum over all functions predicts the true label, not the noisy one (Patrini et al. 2017,
    arXiv:1609.03683, Theorem 2).

    Args:
        logits: [K] with K >= 1, of the true label.
        likelihood: [K], P(noisy label | true label c) for every class c, such as the column of
            `jaxdp.release.NoisyLabels.corrected`.

    Raises:
        ValueError: `logits` is not a vector or `likelihood` has another shape.
    """
    logits = _at_least_float32(logits)
    if logits.ndim != 1 or likelihood.shape != logits.shape:
        raise ValueError(
            f"likelihood must be [K] for logits [K], got shapes {likelihood.shape} and "
            f"{logits.shape}."
        )
    # A likelihood of 0 has the logarithm -inf, which adds nothing to the sum.
    log_likelihood = jnp.log(likelihood.astype(logits.dtype))
    log_shares = jax.nn.log_softmax(logits)
    return -jax.nn.logsumexp(log_shares + log_likelihood)


def next_token(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the mean cross-entropy of the tokens of one text, where they are known.

        loss = sum_t (log sum_j exp(z_tj) - z_t,y_t) / n,  over the n positions t with y_t >= 0

    It is a plain function: every derivative of JAX works, and memory beyond the logits is that of
    one more such array.

    Args:
        logits: [T, V], from the tokens up to each position: `model(tokens[:-1])`.
        targets: [T] integers, the tokens that follow: `tokens[1:]`. A negative one is padding. One
            of V or more gives a NaN loss and a NaN gradient. Without a known token the loss is 0.

    Raises:
        ValueError: The shapes do not match.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be [T, V] and targets [T], got {logits.shape} and {targets.shape}."
        )
    if targets.dtype.itemsize < 4:  # it may not hold the size of the vocabulary
        targets = targets.astype(jnp.int32)
    logits = _at_least_float32(logits)
    known = targets >= 0
    # Padding looks up class 0, whose loss is left out below.
    places = jnp.maximum(targets, 0)[:, None]
    picked = jnp.take_along_axis(logits, places, axis=1, mode="fill", fill_value=jnp.nan)
    logits_of_targets = picked[:, 0]
    # A lookup outside of the vocabulary has a gradient of zero, so the loss is multiplied by NaN
    # too.
    exists = jnp.where(targets < logits.shape[1], 1, jnp.nan)
    exists = exists.astype(logits.dtype)
    log_ratios = jax.nn.logsumexp(logits, axis=1) - logits_of_targets
    losses = exists * log_ratios
    known_losses = jnp.where(known, losses, 0)
    total = known_losses.sum()
    count = jnp.maximum(known.sum(), 1)  # the loss of a text without a known token is 0
    return total / count.astype(losses.dtype)


def sigmoid_cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Computes the binary cross-entropy of a label and sigmoid(logits), summed over the logits.

        loss = sum_k max(z_k, 0) - y_k z_k + log(1 + exp(-|z_k|)),
        dloss/dz = sigmoid(z) - y,     dloss/dy = -z

    Args:
        logits: [] or [1] for one binary decision, or [K] for K decisions.
        label: The probability in [0, 1] of the positive class, shaped like `logits`, or [] for [1].

    Raises:
        ValueError: The shapes do not match.
    """
    logits = _at_least_float32(logits)
    return _sigmoid_cross_entropy(logits, _like(label, logits))


def squared_error(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Computes the squared distance between a prediction and its target, without a factor 1/2.

        loss = sum_k (z_k - y_k)**2,     dloss/dz = 2 (z - y) = -dloss/dy

    Args:
        logits: The prediction, of any shape.
        label: The target, of the same shape, or [] for a prediction of one element.

    Raises:
        ValueError: The shapes do not match.
    """
    logits = _at_least_float32(logits)
    return _squared_error(logits, _like(label, logits))


def absolute_error(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Computes the l1 distance between a prediction and its target.

        loss = sum_k |z_k - y_k|,     dloss/dz = sign(z - y) = -dloss/dy

    A residual of 0 has the subgradient 0. Each entry of the gradient lies in [-1, 1] whatever the
    target is, so a moved target moves it by at most 2.

    Args:
        logits: The prediction, of any shape.
        label: The target, of the same shape, or [] for a prediction of one element.

    Raises:
        ValueError: The shapes do not match.
    """
    logits = _at_least_float32(logits)
    return _absolute_error(logits, _like(label, logits))


def hinge(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Computes the hinge loss with margin 1.

    It is the binary loss for one logit, and that of Crammer and Singer (2001) for several.

        one logit:      loss = max(0, 1 - s z),                     dloss/dz = -s [loss > 0]
        K >= 2 logits:  loss = max(0, 1 + max_{k != y} z_k - z_y),  dloss/dz = (e_j-e_y) [loss > 0]

    Here s is 1 if label > 0 and -1 otherwise, and e_k is a unit vector. j is the class with the
    largest logit except y, the first one in a tie. On the kinks this is one of the subgradients.
    The label has no gradient.

    Args:
        logits: [] or [1] (binary), or [K] (multi-class).
        label: Binary: 0 or 1, or -1 or +1, shaped like `logits` or []. Multi-class: an integer
            class [], or a one-hot vector [K], whose largest entry is the class. An integer class
            outside 0..K-1 gives NaN.

    Raises:
        ValueError: The shapes do not match.
    """
    logits = _at_least_float32(logits)
    # One logit is a binary decision, whatever its shape.
    if logits.size == 1:
        label = _like(label, logits)
        sign = jnp.where(label > 0, 1.0, -1.0)
        sign = sign.astype(logits.dtype)
        # A comparison counts a NaN label as -1.
        sign = jnp.where(jnp.isnan(label), label, sign)
        return _binary_hinge(logits, sign)
    weights = _class_weights(logits, label)
    # The largest entry is the class, which is no smooth function of the vector.
    weights = jax.lax.stop_gradient(weights)
    return _multiclass_hinge(logits, weights)


# Values and gradients, of logits [..., K] and a label. Each is the equation in the docstring of its
# loss.


def _softmax_value(logits: jax.Array, weights: jax.Array) -> jax.Array:
    log_normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return _weighted_sum(weights, log_normaliser - logits)


def _softmax_gradient(logits: jax.Array, weights: jax.Array) -> jax.Array:
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # Weights that do not add up to 1 multiply the logarithm of the normaliser by their sum.
    return total * jax.nn.softmax(logits, axis=-1) - weights


def _softmax_label_gradient(logits: jax.Array, weights: jax.Array) -> jax.Array:
    # The logits of one example, [K]. JAX batches the backward pass.
    return jax.nn.logsumexp(logits) - logits


def _sigmoid_value(logits: jax.Array, label: jax.Array) -> jax.Array:
    linear = jnp.maximum(logits, 0) - label * logits  # overflows for no logit
    exponential = jnp.exp(-jnp.abs(logits))  # it does not overflow
    return linear + jnp.log1p(exponential)


def _sigmoid_gradient(logits: jax.Array, label: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(logits) - label


def _sigmoid_label_gradient(logits: jax.Array, label: jax.Array) -> jax.Array:
    return -logits


def _binary_hinge_value(logits: jax.Array, sign: jax.Array) -> jax.Array:
    return jnp.maximum(0, 1 - sign * logits)


def _binary_hinge_gradient(logits: jax.Array, sign: jax.Array) -> jax.Array:
    negative_sign = -sign
    loss = _binary_hinge_value(logits, sign)
    return negative_sign * _active(loss)


def _multiclass_hinge_value(logits: jax.Array, weights: jax.Array) -> jax.Array:
    loss, _ = _multiclass_hinge_parts(logits, weights)
    return loss


def _multiclass_hinge_gradient(logits: jax.Array, weights: jax.Array) -> jax.Array:
    loss, direction = _multiclass_hinge_parts(logits, weights)
    return _active(loss)[..., None] * direction


def _multiclass_hinge_parts(
    logits: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns (the loss [...], e_j - e_y [..., K])."""

    def one_hot_of_largest(x: jax.Array) -> jax.Array:
        largest = jnp.argmax(x, axis=-1)
        return jax.nn.one_hot(largest, logits.shape[-1], dtype=logits.dtype)

    true = one_hot_of_largest(weights)
    # The label itself is no rival.
    others = jnp.where(true > 0, -jnp.inf, logits)
    rival = one_hot_of_largest(others)
    margin = jnp.max(others, axis=-1) - _weighted_sum(true, logits)
    # argmax and one_hot would turn a NaN into an ordinary class.
    nan_weights = jnp.isnan(weights).any(axis=-1)
    is_nan = nan_weights | jnp.isnan(logits).any(axis=-1)
    loss = jnp.maximum(0, 1 + margin)
    nan = jnp.where(is_nan, jnp.nan, 0.0)
    return loss + nan.astype(logits.dtype), rival - true


def _active(loss: jax.Array) -> jax.Array:
    """Returns 1 where a hinge loss is positive, 0 where it is 0, and NaN where it is NaN."""
    is_nan = jnp.isnan(loss)
    is_positive = (loss > 0).astype(loss.dtype)
    return jnp.where(is_nan, loss, is_positive)


def _primitive(
    name: str,
    function: Callable[..., jax.Array],
) -> jex.Primitive:
    """Makes a primitive of a function of (logits [..., K], label [..., K]).

    `jaxdp.interval` finds its rule by the name.
    """
    primitive = jex.Primitive(name)

    def shape(logits: Any, label: Any) -> Any:
        result = jax.eval_shape(function, logits, label)
        # The type of the logits otherwise, with the mesh axes over which they vary.
        return logits.update(shape=result.shape, weak_type=False)

    def batched(operands: Any, axes: Any) -> tuple[jax.Array, int]:
        pairs = list(zip(operands, axes, strict=True))
        # Both operands need the mapped axis, because the functions work along the last axes.
        (size,) = {x.shape[axis] for x, axis in pairs if axis is not None}
        moved = []
        for x, axis in pairs:
            if axis is None:
                mapped = jnp.broadcast_to(x, (size, *x.shape))
            else:
                mapped = jnp.moveaxis(x, axis, 0)
            moved.append(mapped)
        return primitive.bind(*moved), 0

    def differentiated(primals: Any, tangents: Any) -> Any:
        # `jax.jvp` takes no symbolic zeros.
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(function, primals, tangents)

    primitive.def_impl(jax.jit(function))  # a call outside of `jax.jit` is one program
    primitive.def_abstract_eval(shape)
    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = differentiated
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    return primitive


def _loss(
    name: str,
    value: Callable[..., jax.Array],
    gradient: Callable[..., jax.Array],
    label_gradient: Callable[..., jax.Array] | None = None,
    *,
    elementwise: bool = False,
) -> Callable[..., jax.Array]:
    """Builds the loss (logits, label) -> scalar from its parts.

    Args:
      name: The name of the primitive of its value.
      value, gradient: The value, and the gradient with respect to the logits.
      label_gradient: The gradient with respect to the label, or None if that has no gradient.
      elementwise: Whether the value has the shape of the logits, and is to be summed.
    """
    value_p = _primitive(name, value)
    gradient_p = _primitive(f"{name}_gradient", gradient)

    @jax.custom_vjp
    def loss(logits: jax.Array, label: jax.Array) -> jax.Array:
        values: jax.Array = value_p.bind(logits, label)
        if elementwise:
            return jnp.sum(values)
        return values

    def forward(
        logits: jax.Array,
        label: jax.Array,
    ) -> tuple[jax.Array, Any]:
        return loss(logits, label), (logits, label)

    def backward(
        operands: Any,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        d_label = None
        if label_gradient is not None:
            d_label = cotangent * label_gradient(*operands)
        d_logits = cotangent * gradient_p.bind(*operands)
        return d_logits, d_label

    loss.defvjp(forward, backward)
    return loss


_softmax_cross_entropy = _loss(
    "softmax_cross_entropy", _softmax_value, _softmax_gradient, _softmax_label_gradient
)
_sigmoid_cross_entropy = _loss(
    "sigmoid_cross_entropy",
    _sigmoid_value,
    _sigmoid_gradient,
    _sigmoid_label_gradient,
    elementwise=True,
)
_binary_hinge = _loss("binary_hinge", _binary_hinge_value, _binary_hinge_gradient, elementwise=True)
_multiclass_hinge = _loss("multiclass_hinge", _multiclass_hinge_value, _multiclass_hinge_gradient)


def _loss_of_difference(
    value: Callable[[jax.Array], jax.Array],
    gradient: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[..., jax.Array]:
    """Builds the loss sum(value(z - y)), from `gradient(cotangent, z - y)` of the logits."""

    @jax.custom_vjp
    def loss(logits: jax.Array, label: jax.Array) -> jax.Array:
        return jnp.sum(value(logits - label))

    def forward(
        logits: jax.Array,
        label: jax.Array,
    ) -> tuple[jax.Array, Any]:
        # The gradients need the difference only.
        return loss(logits, label), logits - label

    def backward(
        difference: Any,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        d_logits = gradient(cotangent, difference)
        return d_logits, -d_logits

    loss.defvjp(forward, backward)
    return loss


_squared_error = _loss_of_difference(
    jnp.square, lambda cotangent, difference: cotangent * 2 * difference
)
_absolute_error = _loss_of_difference(
    jnp.abs, lambda cotangent, difference: cotangent * jnp.sign(difference)
)


def _weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    # A zero weight hides an infinite value (a class of probability zero), since 0 * inf is NaN.
    is_zero = weights == 0
    zeros = jnp.zeros_like(values)
    products = jnp.where(is_zero, zeros, weights * values)
    return jnp.sum(products, axis=-1)


def _at_least_float32(logits: jax.Array) -> jax.Array:
    # bfloat16 has fewer than three decimal digits.
    logits = jnp.asarray(logits)
    if logits.dtype == jnp.float64:
        return logits
    return logits.astype(jnp.float32)


def _class_weights(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Converts the label to weights [K], which are NaN for an integer class that does not exist."""
    label = jnp.asarray(label)
    if logits.ndim != 1:
        raise ValueError(
            f"logits must be the vector [K] of one example, got {logits.shape}. Use jax.vmap for "
            "a batch."
        )
    if label.shape == () and jnp.issubdtype(label.dtype, jnp.integer):
        exists = (label >= 0) & (label < logits.size)
        one_hot = jax.nn.one_hot(label, logits.size, dtype=logits.dtype)
        return jnp.where(exists, one_hot, jnp.nan)
    if label.shape != logits.shape:
        raise ValueError(
            "label must be an integer class of shape () or class probabilities of shape "
            f"{logits.shape}, got {label.dtype} of shape {label.shape}."
        )
    return label.astype(logits.dtype)


def _like(label: jax.Array, logits: jax.Array) -> jax.Array:
    """Converts the label to the dtype and the shape of the logits."""
    label = jnp.asarray(label).astype(logits.dtype)
    is_for_one_logit = label.shape == () and logits.size == 1
    if label.shape != logits.shape and not is_for_one_logit:
        raise ValueError(
            f"label must have the shape {logits.shape} of the logits, got {label.shape}."
        )
    return label.reshape(logits.shape)
