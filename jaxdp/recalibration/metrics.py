"""The calibration of a classifier: expected calibration errors, Brier score, negative log likelihood.

NOT private. These metrics have no noise. A value on a private data set is a release outside every ledger: never publish
it.

All functions are pure, compute in float32, and work under `jax.jit` and `jax.vmap`. The result is NaN if there is no
example, a value is NaN or a label is out of range. The functions raise ValueError for shapes that do not fit, bins
below 1 and an unknown binning.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

_Binning = Literal["equal_width", "equal_mass"]


def _compiled(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a metric of arrays. It converts lists and arrays of other libraries."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def metric(*args: Any, **options: Any) -> Any:
            options = {name: x if name in static else _array(x) for name, x in options.items()}
            return compiled(*map(_array, args), **options)

        return metric

    return decorate


def _array(x: Any) -> Any:
    return x if x is None or isinstance(x, jax.Array) else np.asarray(x)


class Reliability(NamedTuple):
    """A reliability diagram: accuracy against confidence, bin by bin. Both are NaN for an empty bin.

    Attributes:
      counts: int32 [bins], the number of examples.
      confidence: float32 [bins], their mean confidence.
      accuracy: float32 [bins], the fraction of correct ones.
    """

    counts: Int[Array, " bins"]
    confidence: Float[Array, " bins"]
    accuracy: Float[Array, " bins"]


@_compiled("bins", "binning", "debiased")
def ece(
    confidence: Float[Array, " n"],
    correct: Bool[Array, " n"],
    *,
    bins: int = 15,
    binning: _Binning = "equal_width",
    debiased: bool = False,
    mask: Bool[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Computes the expected calibration error (App. A.1): the mean of |accuracy - confidence| of each example's bin.

        ECE = sum_b n_b / n |acc_b - conf_b|

    A few examples overstate it: each |acc_b - conf_b| is positive on average even for a perfectly calibrated model.
    `debiased` subtracts an estimate of this bias. Kumar, Liang and Ma (2019, arXiv:1909.10155) do so for the squared
    error, this function for the absolute one. Take g_b = acc_b - conf_b as normal with variance s_b^2 = acc_b (1 -
    acc_b) / (n_b - 1). Then the mean of |g_b| (a folded normal) exceeds |E g_b| by

        bias_b = 2 s_b (phi(z_b) - z_b Phi(-z_b)),   z_b = |E g_b| / s_b

    The measured g_b replaces its unknown expectation. The correction is too small for a nearly calibrated bin: at E g_b
    = 0 it removes sqrt(2) - 1 = 41% of the bias. A bin with one example shows no variance and gets no correction. The
    total is cut at 0. A cut of every bin would restore the bias of calibrated bins. The result is float32 [].

    Args:
      confidence: float [n] in [0, 1], the probability of the predicted class.
      correct: bool [n], whether the predicted class is the true one.
      bins: The number of bins.
      binning: "equal_width" is `equal_width_bin`. "equal_mass" makes bins of equally many examples by rank of
        confidence, with sizes that differ by at most 1. Equal confidences share the bin of the first of them, so the
        order of examples does not matter. With many ties some bins are larger and others empty.
      debiased: Whether to subtract the estimated bias.
      mask: bool [n], False for examples to leave out. None keeps all. Another number of True does not recompile.
    """
    _check_examples(confidence, correct=correct, mask=confidence if mask is None else mask)
    _check_bins(bins)
    if binning not in get_args(_Binning):
        raise ValueError(f'binning must be "equal_width" or "equal_mass", got {binning!r}.')
    confidence = jnp.asarray(confidence, jnp.float32)
    kept = jnp.ones(confidence.shape, bool) if mask is None else jnp.asarray(mask, bool)
    index = equal_width_bin(confidence, bins) if binning == "equal_width" else _equal_mass_bin(confidence, bins, kept)
    table = _tabulate(confidence, correct, jnp.where(kept, index, bins), bins)
    gap = jnp.abs(table.accuracy - table.confidence)
    if debiased:
        variance = table.accuracy * (1 - table.accuracy) / jnp.maximum(table.counts - 1, 1)
        deviation = jnp.sqrt(jnp.maximum(variance, 1e-30))  # avoids 0 / 0, and the bias tends to 0
        z = gap / deviation
        gap -= 2 * deviation * (jax.scipy.stats.norm.pdf(z) - z * jax.scipy.stats.norm.cdf(-z))
    error = jnp.sum(jnp.where(table.counts > 0, table.counts * gap, 0)) / jnp.sum(table.counts)
    return jnp.maximum(error, 0)


@_compiled("bins", "binning")
def classwise_ece(
    probabilities: Float[Array, "n m"],
    labels: Int[Array, " n"],
    *,
    bins: int = 15,
    binning: _Binning = "equal_width",
) -> Float[Array, ""]:
    """Computes the mean over classes k of the ECE of probability k as a confidence in 1[k = y] (Kull et al. 2019).

    With binning="equal_mass" it is the adaptive calibration error (Nixon et al. 2019, arXiv:1904.01685). The result is
    float32 [].

    Args:
      probabilities: float [n, m].
      labels: int [n] in 0 .. m - 1.
      bins, binning: As in `ece`.
    """
    _check_classes("probabilities", probabilities, labels)
    probabilities, labels = jnp.asarray(probabilities, jnp.float32), jnp.asarray(labels)

    def of_class(p: jax.Array, k: jax.Array) -> jax.Array:
        return ece(p, labels == k, bins=bins, binning=binning)

    errors = jax.vmap(of_class, (1, 0))(probabilities, jnp.arange(probabilities.shape[1]))
    return _mean(jnp.broadcast_to(errors.mean(), labels.shape), labels, probabilities.shape[1])


@_compiled("bins")
def reliability(confidence: Float[Array, " n"], correct: Bool[Array, " n"], *, bins: int = 15) -> Reliability:
    """Computes the reliability diagram over bins of equal width, for `jaxdp.report.plot_reliability`.

    Arguments are as in `ece`.
    """
    _check_examples(confidence, correct=correct)
    return _tabulate(jnp.asarray(confidence, jnp.float32), correct, equal_width_bin(confidence, bins), bins)


def equal_width_bin(confidence: Float[Array, "..."], bins: int) -> Int[Array, "..."]:
    """Returns the index of the bin of each confidence: [0, 1/bins), [1/bins, 2/bins), ..., [1 - 1/bins, 1].

    The result is int32, shaped like `confidence`. The last bin includes both ends (Sec. 2.1). Edges are k / bins
    rounded to float32. A confidence equal to an edge belongs to the bin above it. Multiplication by `bins` could put it
    below. Values outside [0, 1] count in the nearest bin, NaN in the last one.
    """
    _check_bins(bins)
    edges = np.arange(1, bins, dtype=np.float32) / np.float32(bins)  # XLA's division is not correctly rounded
    index = jnp.searchsorted(edges, jnp.asarray(confidence, jnp.float32), side="right", method="compare_all")
    return index.astype(jnp.int32)


@_compiled()
def brier(probabilities: Float[Array, "n m"], labels: Int[Array, " n"]) -> Float[Array, ""]:
    """Computes the Brier score of several classes: the mean squared distance of probabilities from the one-hot label.

        BS = 1/n sum_i sum_k (p_ik - 1[k = y_i])^2,   in [0, 2]

    For two classes it is twice the Brier score of the probability of one class. The result is float32 [].

    Args:
      probabilities: float [n, m].
      labels: int [n] in 0 .. m - 1.
    """
    _check_classes("probabilities", probabilities, labels)
    probabilities, labels = jnp.asarray(probabilities, jnp.float32), jnp.asarray(labels)
    distances = jnp.square(probabilities - jax.nn.one_hot(labels, probabilities.shape[1], dtype=jnp.float32))
    return _mean(jnp.sum(distances, axis=1), labels, probabilities.shape[1])


@_compiled()
def nll(logits: Float[Array, "n m"], labels: Int[Array, " n"]) -> Float[Array, ""]:
    """Computes the mean negative log likelihood of labels under softmax(logits), in nats. Huge logits are safe.

    The result is float32 []. It is inf if a label has probability 0 (its logit is -inf).

    Args:
      logits: float [n, m].
      labels: int [n] in 0 .. m - 1.
    """
    _check_classes("logits", logits, labels)
    logits, labels = jnp.asarray(logits, jnp.float32), jnp.asarray(labels)
    # log_softmax subtracts the largest logit first and keeps all digits of large logits, unlike logsumexp(z) - z_y.
    log_p = jax.nn.log_softmax(logits)
    return -_mean(jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0], labels, logits.shape[1])


def _tabulate(confidence: jax.Array, correct: jax.Array, index: jax.Array, bins: int) -> Reliability:
    """Counts and averages by bin. It leaves out examples with index `bins`."""
    # These are sums over comparisons. Scattered sums add one by one and lose three digits over 10^5 examples.
    inside = index[None] == jnp.arange(bins)[:, None]
    counts = jnp.sum(inside, axis=1, dtype=jnp.int32)
    values = (confidence, jnp.asarray(correct, jnp.float32))
    return Reliability(counts, *(jnp.sum(jnp.where(inside, value[None], 0), axis=1) / counts for value in values))


def _equal_mass_bin(confidence: jax.Array, bins: int, kept: jax.Array) -> jax.Array:
    """Returns floor(rank * bins / n) among the kept examples. The others get any number."""
    confidence = jnp.where(kept, confidence, jnp.nan)  # sorted behind all numbers
    rank = jnp.searchsorted(jnp.sort(confidence), confidence)
    return rank * bins // jnp.sum(kept)


def _mean(values: jax.Array, labels: jax.Array, classes: int) -> jax.Array:
    return jnp.mean(jnp.where((labels >= 0) & (labels < classes), values, jnp.nan))


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}. The paper uses 15.")


def _check_examples(confidence: jax.Array, **others: jax.Array) -> None:
    shape = jnp.shape(confidence)
    if len(shape) != 1:
        raise ValueError(
            f"confidence must be one-dimensional, got shape {shape}. Pass one number per example, and use jax.vmap for "
            "further axes."
        )
    for name, value in others.items():
        if jnp.shape(value) != shape:
            raise ValueError(f"{name} must have one entry per example and shape {shape}, got shape {jnp.shape(value)}.")


def _check_classes(name: str, value: jax.Array, labels: jax.Array) -> None:
    if jnp.ndim(value) != 2:
        raise ValueError(f"{name} must be [n, m], one row per example, got shape {jnp.shape(value)}. Add a batch axis.")
    if jnp.shape(labels) != jnp.shape(value)[:1]:
        raise ValueError(
            f"labels must be class numbers of shape {jnp.shape(value)[:1]}, one per row of {name}, got shape "
            f"{jnp.shape(labels)}. Take argmax over one-hot labels."
        )
