"""How well calibrated a classifier is: expected calibration error, Brier score, negative log likelihood.

NOT private. These metrics are computed on test data as they are, without noise; the value of a private set is a release
that no ledger has seen and must not be published.

All functions are pure, compute in float32, and go under `jax.jit` and `jax.vmap`. No example at all, a NaN in one or a
label out of range give NaN, never a plausible number. They raise ValueError for shapes that do not fit, bins below 1
and an unknown binning.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

_Binning = Literal["equal_width", "equal_mass"]


class Reliability(NamedTuple):
    """A reliability diagram: accuracy against confidence, bin by bin. An empty bin has NaN for both.

    Attributes:
      counts: int32 [bins], number of examples.
      confidence: float32 [bins], their mean confidence.
      accuracy: float32 [bins], the fraction of them that is classified correctly.
    """

    counts: jax.Array
    confidence: jax.Array
    accuracy: jax.Array


def ece(
    confidence: jax.Array,
    correct: jax.Array,
    *,
    bins: int = 15,
    binning: _Binning = "equal_width",
    debiased: bool = False,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Expected calibration error (App. A.1): the mean over examples of |accuracy - confidence| of their bin.

        ECE = sum_b n_b / n |acc_b - conf_b|

    Few examples overstate it: of a perfectly calibrated model too, each |acc_b - conf_b| is positive on average.
    `debiased` subtracts for the absolute error what Kumar, Liang and Ma (2019, arXiv:1909.10155) subtract for the
    squared one: with g_b = acc_b - conf_b taken as normal of variance s_b^2 = acc_b (1 - acc_b) / (n_b - 1), the mean
    of |g_b| (of a folded normal) exceeds |E g_b| by

        bias_b = 2 s_b (phi(z_b) - z_b Phi(-z_b)),   z_b = |E g_b| / s_b

    where the measured g_b stands for its unknown expectation. The correction falls short where a bin is nearly
    calibrated: at E g_b = 0 it removes sqrt(2) - 1 = 41% of the bias. A bin of one example shows no variance and is not
    corrected. The total is cut at 0; a cut of every bin would bring back the bias of calibrated bins.

    Args:
      confidence: float [n] in [0, 1], the probability given to the predicted class.
      correct: bool [n], whether the predicted class is the true one.
      bins: their number.
      binning: "equal_width", see `equal_width_bin`; or "equal_mass", bins of equally many examples by rank of their
        confidence (sizes differ by at most 1). Equal confidences stay together, in the bin of the first of them: the
        order of the examples does not matter, but with many ties some bins are larger and others empty.
      debiased: subtract the estimated bias.
      mask: bool [n], False for examples to leave out; None keeps all. Its number of True may differ from call to call
        without recompiling.

    Returns:
      float32 [].
    """
    _check_examples(confidence, correct=correct, mask=confidence if mask is None else mask)
    _check_bins(bins)
    if binning not in get_args(_Binning):
        raise ValueError(f'binning must be "equal_width" or "equal_mass", got {binning!r}')
    confidence = jnp.asarray(confidence, jnp.float32)
    kept = jnp.ones(confidence.shape, bool) if mask is None else jnp.asarray(mask, bool)
    index = equal_width_bin(confidence, bins) if binning == "equal_width" else _equal_mass_bin(confidence, bins, kept)
    table = _tabulate(confidence, correct, jnp.where(kept, index, bins), bins)
    gap = jnp.abs(table.accuracy - table.confidence)
    if debiased:
        variance = table.accuracy * (1 - table.accuracy) / jnp.maximum(table.counts - 1, 1)
        deviation = jnp.sqrt(jnp.maximum(variance, 1e-30))  # in the limit of 0 the bias is 0, without 0 / 0
        z = gap / deviation
        gap -= 2 * deviation * (jax.scipy.stats.norm.pdf(z) - z * jax.scipy.stats.norm.cdf(-z))
    error = jnp.sum(jnp.where(table.counts > 0, table.counts * gap, 0)) / jnp.sum(table.counts)
    return jnp.maximum(error, 0)


def reliability(confidence: jax.Array, correct: jax.Array, *, bins: int = 15) -> Reliability:
    """The reliability diagram over bins of equal width (`equal_width_bin`), for `jaxdp.report.plot_reliability`.

    Args:
      confidence: float [n] in [0, 1], the probability given to the predicted class.
      correct: bool [n], whether the predicted class is the true one.
      bins: their number.
    """
    _check_examples(confidence, correct=correct)
    return _tabulate(jnp.asarray(confidence, jnp.float32), correct, equal_width_bin(confidence, bins), bins)


def equal_width_bin(confidence: jax.Array, bins: int) -> jax.Array:
    """Which of [0, 1/bins), [1/bins, 2/bins), ..., [1 - 1/bins, 1] a confidence is in; int32, shaped like `confidence`.

    Both ends of the last bin belong to it (Sec. 2.1). Edges are k / bins rounded to float32; a confidence equal to one
    belongs to the bin above it, where multiplying by `bins` may put it below. Values outside [0, 1] count in the
    nearest bin, NaN in the last one.
    """
    _check_bins(bins)
    edges = np.arange(1, bins, dtype=np.float32) / np.float32(bins)  # XLA's division is not correctly rounded
    index = jnp.searchsorted(edges, jnp.asarray(confidence, jnp.float32), side="right", method="compare_all")
    return index.astype(jnp.int32)


def brier(probabilities: jax.Array, labels: jax.Array) -> jax.Array:
    """Brier score of several classes: the mean squared distance between probabilities and the one-hot label.

        BS = 1/n sum_i sum_k (p_ik - 1[k = y_i])^2,   in [0, 2]

    For two classes it is twice the Brier score of the probability of one of them.

    Args:
      probabilities: float [n, m].
      labels: int [n] in 0 .. m - 1.

    Returns:
      float32 [].
    """
    _check_classes("probabilities", probabilities, labels)
    probabilities, labels = jnp.asarray(probabilities, jnp.float32), jnp.asarray(labels)
    distances = jnp.square(probabilities - jax.nn.one_hot(labels, probabilities.shape[1], dtype=jnp.float32))
    return _mean(jnp.sum(distances, axis=1), labels, probabilities.shape[1])


def nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean negative log likelihood of the labels under softmax(logits), in nats; safe for huge logits.

    Args:
      logits: float [n, m].
      labels: int [n] in 0 .. m - 1.

    Returns:
      float32 []; inf if a label has probability 0 (its logit is -inf).
    """
    _check_classes("logits", logits, labels)
    logits, labels = jnp.asarray(logits, jnp.float32), jnp.asarray(labels)
    # Not logsumexp(z) - z_y: this subtracts the largest logit first, and so keeps all digits where logits are large.
    log_p = jax.nn.log_softmax(logits)
    return -_mean(jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0], labels, logits.shape[1])


def _tabulate(confidence: jax.Array, correct: jax.Array, index: jax.Array, bins: int) -> Reliability:
    """Count and average by bin, leaving out examples with an index of `bins`."""
    # Sums over comparisons, not scattered ones: those add one by one and lose three digits over 10^5 examples.
    inside = index[None] == jnp.arange(bins)[:, None]
    counts = jnp.sum(inside, axis=1, dtype=jnp.int32)
    values = (confidence, jnp.asarray(correct, jnp.float32))
    return Reliability(counts, *(jnp.sum(jnp.where(inside, value[None], 0), axis=1) / counts for value in values))


def _equal_mass_bin(confidence: jax.Array, bins: int, kept: jax.Array) -> jax.Array:
    """floor(rank * bins / n) among the examples kept; the others get any number."""
    confidence = jnp.where(kept, confidence, jnp.nan)  # sorted behind all numbers
    rank = jnp.searchsorted(jnp.sort(confidence), confidence)
    return rank * bins // jnp.sum(kept)


def _mean(values: jax.Array, labels: jax.Array, classes: int) -> jax.Array:
    return jnp.mean(jnp.where((labels >= 0) & (labels < classes), values, jnp.nan))


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}; the paper uses 15")


def _check_examples(confidence: jax.Array, **others: jax.Array) -> None:
    shape = jnp.shape(confidence)
    if len(shape) != 1:
        raise ValueError(
            f"confidence must be one-dimensional, got shape {shape}; pass one number per example, and jax.vmap over "
            "further axes"
        )
    for name, value in others.items():
        if jnp.shape(value) != shape:
            raise ValueError(
                f"{name} must have one entry per example, as confidence has {shape}, got shape {jnp.shape(value)}"
            )


def _check_classes(name: str, value: jax.Array, labels: jax.Array) -> None:
    if jnp.ndim(value) != 2:
        raise ValueError(f"{name} must be [n, m], one row per example, got shape {jnp.shape(value)}; add a batch axis")
    if jnp.shape(labels) != jnp.shape(value)[:1]:
        raise ValueError(
            f"labels must be class numbers of shape {jnp.shape(value)[:1]}, one per row of {name}, got shape "
            f"{jnp.shape(labels)}; take argmax over one-hot labels"
        )
