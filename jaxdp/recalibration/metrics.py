"""The calibration of a classifier: errors of calibration, Brier score, log likelihood.

NOT private. These metrics have no noise. A value on a private data set is a release outside every
ledger: never publish it.

All functions are pure, compute in float32, and work under `jax.jit` and `jax.vmap`. The result is
NaN if there is no example, a value is NaN, a label is out of range, or a confidence or probability
is outside of [0, 1]. A call with arrays outside of `jax.jit` raises ValueError for the last of
these, as for percent in place of fractions. The functions raise TypeError or ValueError for shapes
and dtypes that do not fit, and ValueError for impossible bins and an unknown binning.

Memory is that of the input, and a few numbers for each example and each bin. Sums by bin are sums
of integers. So they do not depend on the order of the examples, and they keep their digits over
millions of them.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxdp.data.labels import check_labelled

_Values = Array | np.ndarray
_Binning = Literal["equal_width", "equal_mass"]

# 1 as a fixed-point number, which holds all digits of a float32 in [0.5, 1].
_FIXED = 2**24
_MOST_BINS = 2**15
# Probabilities of 16 bits, and means of several models, can exceed 1 by rounding. They are cut to
# [0, 1].
_ROUNDING = 1e-3


P = ParamSpec("P")
R = TypeVar("R")


def _compiled(*static: str, fraction: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compiles a metric of arrays. It converts lists and arrays of other libraries.

    `fraction` is the name of a first argument whose values must be in [0, 1].
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        compiled = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def metric(*args: P.args, **options: P.kwargs) -> R:
            arrays = [_array(x) for x in args]
            for name in options.keys() - set(static):
                options[name] = _array(options[name])
            value = compiled(*arrays, **options)
            if fraction:
                values = arrays[0] if arrays else options[fraction]
                _check_fractions(fraction, values, options.get("mask"))
            return value

        return metric

    return decorate


def _check_fractions(name: str, values: Any, mask: Any) -> None:
    """Raises ValueError if a value that counts is outside of [0, 1].

    It cannot read arrays that are being traced.
    """
    if isinstance(values, jax.core.Tracer) or isinstance(mask, jax.core.Tracer):
        return
    values = np.asarray(values)
    if mask is not None:
        values = values[np.asarray(mask)]
    if not values.size:
        return
    low = float(values.min())
    high = float(values.max())
    if low < -_ROUNDING or high > 1 + _ROUNDING:  # False for NaN
        raise ValueError(
            f"{name} must be in [0, 1], got values from {low:g} to {high:g}. Divide percent by "
            "100, and apply softmax to logits."
        )


def _array(x: Any) -> Any:
    if x is None or isinstance(x, jax.Array):
        return x
    return np.asarray(x)


class Reliability(NamedTuple):
    """A reliability diagram: accuracy against confidence, bin by bin.

    Both are NaN for an empty bin.

    Attributes:
      counts: int32 [bins], the number of examples.
      confidence: float32 [bins], their mean confidence.
      accuracy: float32 [bins], the fraction of correct ones.
    """

    counts: Int[Array, " bins"]
    confidence: Float[Array, " bins"]
    accuracy: Float[Array, " bins"]


@_compiled("bins", "binning", "debiased", fraction="confidence")
def ece(
    confidence: Float[_Values, " n"],
    correct: Bool[_Values, " n"],
    *,
    bins: int = 15,
    binning: _Binning = "equal_width",
    debiased: bool = False,
    mask: Bool[_Values, " n"] | None = None,
) -> Float[Array, ""]:
    """Computes the expected calibration error (App. A.1).

    It is the mean of |accuracy - confidence| of each example's bin.

        ECE = sum_b n_b / n |acc_b - conf_b|

    A few examples overstate it: each |acc_b - conf_b| is positive on average even for a perfectly
    calibrated model. `debiased` subtracts an estimate of this bias. Kumar, Liang and Ma (2019,
    arXiv:1909.10155) do so for the squared error, this function for the absolute one. Take g_b =
    acc_b - conf_b as normal with variance s_b^2 = acc_b (1 - acc_b) / (n_b - 1). Then the mean of
    |g_b| (a folded normal) exceeds |E g_b| by

        bias_b = 2 s_b (phi(z_b) - z_b Phi(-z_b)),   z_b = |E g_b| / s_b

    The measured g_b replaces its unknown expectation. The correction is too small for a nearly
    calibrated bin: at E g_b = 0 it removes sqrt(2) - 1 = 41% of the bias. A bin with one example
    shows no variance and gets no correction. The total is cut at 0. A cut of every bin would
    restore the bias of calibrated bins. The result is float32 [].

    Args:
      confidence: float [n] in [0, 1], the probability of the predicted class.
      correct: bool [n], whether the predicted class is the true one: `predicted == labels`, never
          the classes.
      bins: The number of bins, at most 32,768.
      binning: "equal_width" is `equal_width_bin`. "equal_mass" makes bins of equally many examples
        by rank of confidence, with sizes that differ by at most 1. Equal confidences share the bin
        of the first of them, so the order of examples does not matter. With many ties some bins are
        larger and others empty.
      debiased: Whether to subtract the estimated bias.
      mask: bool [n], False for examples to leave out. None keeps all. Another number of True does
          not recompile.
    """
    _check_examples(confidence, correct, mask)
    _check_bins(bins)
    if binning not in get_args(_Binning):
        raise ValueError(f'binning must be "equal_width" or "equal_mass", got {binning!r}.')
    confidence = jnp.asarray(confidence, jnp.float32)
    counted = jnp.ones(confidence.shape, bool) if mask is None else jnp.asarray(mask)
    if binning == "equal_width":
        bin_of = equal_width_bin(confidence, bins)
    else:
        bin_of = _equal_mass_bin(confidence, bins, counted)
    table = _tabulate(confidence, correct, bin_of, counted, bins)
    gap = jnp.abs(table.accuracy - table.confidence)
    if debiased:
        variance = table.accuracy * (1 - table.accuracy)
        variance /= jnp.maximum(table.counts - 1, 1)
        deviation = jnp.sqrt(jnp.maximum(variance, 1e-30))  # avoids 0 / 0, and the bias tends to 0
        z = gap / deviation
        excess = jax.scipy.stats.norm.pdf(z) - z * jax.scipy.stats.norm.cdf(-z)
        gap -= 2 * deviation * excess
    gaps = jnp.where(table.counts > 0, table.counts * gap, 0)
    error = jnp.sum(gaps) / jnp.sum(table.counts)
    return jnp.where(_all_fractions(confidence, counted), jnp.maximum(error, 0), jnp.nan)


@_compiled("bins", "binning", fraction="probabilities")
def classwise_ece(
    probabilities: Float[_Values, "n m"],
    labels: Int[_Values, " n"],
    *,
    bins: int = 15,
    binning: _Binning = "equal_width",
) -> Float[Array, ""]:
    """Computes the mean over classes k of the ECE of probability k (Kull et al. 2019).

    Probability k is taken as a confidence in 1[k = y].

    With binning="equal_mass" it is the adaptive calibration error (Nixon et al. 2019,
    arXiv:1904.01685). One class is taken after the other, so memory beyond the input is that of one
    `ece`. The result is float32 [].

    Args:
      probabilities: float [n, m] in [0, 1].
      labels: int [n] in 0 .. m - 1.
      bins, binning: As in `ece`.
    """
    check_labelled(probabilities, labels, names=("probabilities", "labels"), least=2)
    probabilities = jnp.asarray(probabilities)
    labels = jnp.asarray(labels)
    classes = probabilities.shape[1]

    def of_class(k: jax.Array) -> jax.Array:
        column = jax.lax.dynamic_index_in_dim(probabilities, k, axis=1, keepdims=False)
        return ece(column, labels == k, bins=bins, binning=binning)

    errors = jax.lax.map(of_class, jnp.arange(classes, dtype=labels.dtype))
    # NaN if a label is out of range.
    return _mean(jnp.broadcast_to(errors.mean(), labels.shape), labels, classes)


@_compiled("bins", fraction="confidence")
def reliability(
    confidence: Float[_Values, " n"], correct: Bool[_Values, " n"], *, bins: int = 15
) -> Reliability:
    """Computes the reliability diagram over bins of equal width, for `plot_reliability`.

    Arguments are as in `ece`. If a confidence is NaN or outside of [0, 1], means and accuracies are
    NaN in all bins.
    """
    _check_examples(confidence, correct)
    confidence = jnp.asarray(confidence, jnp.float32)
    counted = jnp.ones(confidence.shape, bool)
    table = _tabulate(confidence, correct, equal_width_bin(confidence, bins), counted, bins)
    valid = _all_fractions(confidence, counted)
    return Reliability(
        counts=table.counts,
        confidence=jnp.where(valid, table.confidence, jnp.nan),
        accuracy=jnp.where(valid, table.accuracy, jnp.nan),
    )


def equal_width_bin(confidence: Float[_Values, "..."], bins: int) -> Int[Array, "..."]:
    """Returns the index of the bin of each confidence.

    The bins are [0, 1/bins), [1/bins, 2/bins), ..., [1 - 1/bins, 1].

    The result is int32, shaped like `confidence`. The last bin includes both ends (Sec. 2.1). Edges
    are k / bins rounded to float32. A confidence equal to an edge belongs to the bin above it.
    Multiplication by `bins` could put it below. Values outside [0, 1] count in the nearest bin, NaN
    in the last one.
    """
    _check_bins(bins)
    # In NumPy, because XLA's division is not correctly rounded.
    edges = np.arange(1, bins, dtype=np.float32) / np.float32(bins)
    confidence = jnp.asarray(confidence, jnp.float32)
    index = jnp.searchsorted(edges, confidence, side="right", method="scan_unrolled")
    return index.astype(jnp.int32)


@_compiled(fraction="probabilities")
def brier(probabilities: Float[_Values, "n m"], labels: Int[_Values, " n"]) -> Float[Array, ""]:
    """Computes the Brier score: the mean squared distance of probabilities from the one-hot label.

        BS = 1/n sum_i sum_k (p_ik - 1[k = y_i])^2,   in [0, 2]

    For two classes it is twice the Brier score of the probability of one class. The result is
    float32 [].

    Args:
      probabilities: float [n, m] in [0, 1].
      labels: int [n] in 0 .. m - 1.
    """
    check_labelled(probabilities, labels, names=("probabilities", "labels"), least=2)
    probabilities = jnp.asarray(probabilities, jnp.float32)
    labels = jnp.asarray(labels)
    classes = probabilities.shape[1]
    one_hot = jax.nn.one_hot(labels, classes, dtype=jnp.float32)
    distances = jnp.sum(jnp.square(probabilities - one_hot), axis=1)
    score = _mean(distances, labels, classes)
    return jnp.where(_all_fractions(probabilities, True), score, jnp.nan)


@_compiled()
def nll(logits: Float[_Values, "n m"], labels: Int[_Values, " n"]) -> Float[Array, ""]:
    """Computes the mean negative log likelihood of labels under softmax(logits), in nats.

    Huge logits are safe.

    The result is float32 []. It is inf if a label has probability 0 (its logit is -inf).

    Args:
      logits: float [n, m].
      labels: int [n] in 0 .. m - 1.
    """
    check_labelled(logits, labels, least=2)
    logits = jnp.asarray(logits, jnp.float32)
    labels = jnp.asarray(labels)
    # log_softmax subtracts the largest logit first and keeps all digits of large logits, unlike
    # logsumexp(z) - z_y.
    log_p = jax.nn.log_softmax(logits)
    of_label = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
    return -_mean(of_label, labels, logits.shape[1])


def _tabulate(
    confidence: jax.Array,
    correct: _Values,
    bin_of: jax.Array,
    counted: jax.Array,
    bins: int,
) -> Reliability:
    """Counts and averages by bin the examples that count."""
    bin_of = jnp.where(counted, bin_of, bins)  # `segment_sum` leaves out an index beyond its end
    counts = jax.ops.segment_sum(jnp.ones_like(bin_of), bin_of, bins)
    right = jax.ops.segment_sum(jnp.asarray(correct, jnp.int32), bin_of, bins)
    return Reliability(counts, _sum_by_bin(confidence, bin_of, bins) / counts, right / counts)


def _sum_by_bin(confidence: jax.Array, bin_of: jax.Array, bins: int) -> jax.Array:
    """Sums confidences [n] by bin, float32 [bins].

    Scattered sums of floats add one by one and lose three digits over 10^5 examples. So the
    confidences become whole multiples of 2^-24. Their digits are cut into parts, whose sums of n
    numbers fit in int32.
    """
    fixed = jnp.clip(confidence, 0, 1) * _FIXED
    whole = jnp.round(fixed).astype(jnp.int32)
    digits = 31 - len(confidence).bit_length()
    total = jnp.zeros(bins, jnp.float32)
    for shift in reversed(range(0, _FIXED.bit_length(), digits)):
        part = (whole >> shift) & (2**digits - 1)
        sums = jax.ops.segment_sum(part, bin_of, bins).astype(jnp.float32)
        total += sums * (2.0**shift / _FIXED)
    return total


def _all_fractions(values: jax.Array, counted: jax.Array | bool) -> jax.Array:
    """Returns whether all values that count are in [0, 1] up to rounding, bool []. NaN is not."""
    fractions = (values >= -_ROUNDING) & (values <= 1 + _ROUNDING)
    return jnp.all(fractions | ~jnp.asarray(counted))


def _equal_mass_bin(confidence: jax.Array, bins: int, counted: jax.Array) -> jax.Array:
    """Returns floor(rank * bins / n) among the examples that count. The others get any number."""
    confidence = jnp.where(counted, confidence, jnp.nan)  # sorted behind all numbers
    rank = jnp.searchsorted(jnp.sort(confidence), confidence)
    # The bin is the number of k >= 1 with rank >= k n / bins. Neither product here leaves int32, as
    # rank * bins may.
    n = jnp.sum(counted)
    k = jnp.arange(1, bins)
    starts = k * (n // bins) + (k * (n % bins) + bins - 1) // bins
    return jnp.searchsorted(starts, rank, side="right", method="scan_unrolled").astype(jnp.int32)


def _mean(values: jax.Array, labels: jax.Array, classes: int) -> jax.Array:
    """Returns the mean of values [n], NaN if a label is out of range."""
    in_range = (labels >= 0) & (labels < classes)
    return jnp.mean(jnp.where(in_range, values, jnp.nan))


def _check_bins(bins: int) -> None:
    if not 1 <= bins <= _MOST_BINS:
        raise ValueError(
            f"bins must be at least 1 and at most {_MOST_BINS}, got {bins}. The paper uses 15."
        )


def _check_examples(confidence: Any, correct: Any, mask: Any = None) -> None:
    """Raises unless confidence is floating point [n], and the others are bool [n]."""
    shape = jnp.shape(confidence)
    if len(shape) != 1:
        raise ValueError(
            f"confidence must be one-dimensional, got shape {shape}. Pass one number per example, "
            "and use jax.vmap for further axes."
        )
    if not jnp.issubdtype(confidence.dtype, jnp.floating):
        raise TypeError(
            f"confidence must be floating point, got dtype {confidence.dtype}. Give "
            "probabilities, not classes."
        )
    for name, value in (("correct", correct), ("mask", mask)):
        if value is None:
            continue
        if jnp.shape(value) != shape:
            raise ValueError(
                f"{name} must have one entry per example and shape {shape}, got shape "
                f"{jnp.shape(value)}."
            )
        if value.dtype != bool:
            remedy = "Compare, or use astype(bool)."
            if name == "correct":
                remedy = "Give predicted == labels, not classes."
            raise TypeError(f"{name} must be bool, got dtype {value.dtype}. {remedy}")
