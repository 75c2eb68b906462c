"""Calibration metrics against float64 loops over bins, and the debiased estimate against a known
truth."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.recalibration import metrics
from jaxdp.recalibration.metrics import brier, classwise_ece, equal_width_bin, nll, reliability

# compiles faster than it runs eagerly
ece = jax.jit(metrics.ece, static_argnames=("bins", "binning", "debiased"))
BINNINGS = ("equal_width", "equal_mass")
KINDS = tuple(itertools.product(BINNINGS, (False, True)))  # (binning, debiased)


@functools.partial(jax.jit, static_argnames="bins")
def every_ece(confidence, correct, mask=None, bins=15):
    """Returns the error of each of KINDS, from one program."""
    return [
        metrics.ece(confidence, correct, mask=mask, bins=bins, binning=binning, debiased=debiased)
        for binning, debiased in KINDS
    ]


def examples(n, seed=0, accuracy=lambda c: c):
    """Confidences as of an over-confident model, with many of exactly 1; right with the given
    probability."""
    rng = np.random.default_rng(seed)
    confidence = np.minimum(rng.beta(4, 1.0, n) * 1.03, 1).astype(np.float32)
    return confidence, rng.random(n) < accuracy(confidence)


def bins_of(confidence, bins, binning):
    """Computes with one boolean array per bin, in float64 and without sorting."""
    confidence = confidence.astype(np.float64)
    if binning == "equal_width":
        lows = [k / bins for k in range(bins)] + [math.inf]
        return [(low <= confidence) & (confidence < high) for low, high in itertools.pairwise(lows)]
    ranks = np.array([np.sum(confidence < c) for c in confidence])
    return [np.array([r * bins // len(ranks) == b for r in ranks], bool) for b in range(bins)]


def slow_ece(confidence, correct, bins, binning, debiased=False):
    total = 0.0
    for members in bins_of(confidence, bins, binning):
        n = int(members.sum())
        if n:
            accuracy = float(np.mean(correct[members]))
            gap = abs(accuracy - float(np.mean(confidence[members].astype(np.float64))))
            s = math.sqrt(accuracy * (1 - accuracy) / (n - 1)) if n > 1 else 0.0
            if debiased and s > 0:  # the mean of a folded normal, as in textbooks
                folded = s * math.sqrt(2 / math.pi) * math.exp(-(gap**2) / (2 * s**2))
                gap -= folded + gap * math.erf(gap / (s * math.sqrt(2))) - gap
            total += n * gap
    return max(total / len(confidence), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "bins"), [(7, 32), (200, 1), (200, 15)])
def test_ece_is_the_sum_over_bins(n, bins):
    confidence, correct = examples(n, accuracy=lambda c: 0.1 + 0.7 * c)
    expected = [slow_ece(confidence, correct, bins, *kind) for kind in KINDS]
    np.testing.assert_allclose(
        every_ece(confidence, correct, bins=bins), expected, rtol=0, atol=2e-6
    )


def test_ece_keeps_its_digits_over_many_examples():
    confidence, correct = examples(300_000, accuracy=lambda c: c - 1e-3)
    expected = slow_ece(confidence, correct, 15, "equal_width")
    assert ece(confidence, correct) == pytest.approx(expected, abs=1e-6)


def test_an_edge_belongs_to_the_bin_above_it_and_1_to_the_last():
    """Also in a compiled function, whose divisions XLA may round in another way."""
    numbers = (1, 2, 6, 15, 22, 49)
    edges = [np.array([k / bins for k in range(bins + 1)], np.float32) for bins in numbers]
    below = [np.nextafter(each, np.float32(-1)) for each in edges]

    @jax.jit
    def indices(confidences):
        return [
            equal_width_bin(confidence, bins)
            for confidence, bins in zip(confidences, numbers, strict=True)
        ]

    found = zip(numbers, indices(edges), indices(below), strict=True)
    for bins, of_edges, of_below in found:
        expected = np.arange(bins + 1)
        np.testing.assert_array_equal(of_edges, np.minimum(expected, bins - 1))
        np.testing.assert_array_equal(of_below, np.maximum(expected - 1, 0))
    for bins in (15, 49):
        again = equal_width_bin(edges[numbers.index(bins)], bins)
        np.testing.assert_array_equal(again, np.minimum(np.arange(bins + 1), bins - 1))


def test_a_confidence_of_1_counts():
    assert ece(np.ones(4), np.array([True, True, True, False])) == 0.25
    counts, confidence, accuracy = reliability(np.ones(4), np.array([True, True, True, False]))
    assert counts.tolist() == [0] * 14 + [4]
    assert (confidence[-1], accuracy[-1]) == (1.0, 0.75)
    assert np.isnan(confidence[:-1]).all() and np.isnan(accuracy[:-1]).all()


def test_the_diagram_counts_and_averages_by_bin():
    confidence, correct = examples(500)
    table = reliability(confidence, correct, bins=10)
    assert table.counts.dtype == jnp.int32
    for b, members in enumerate(bins_of(confidence, 10, "equal_width")):
        assert table.counts[b] == members.sum()
        if members.any():
            np.testing.assert_allclose(
                table.confidence[b], confidence[members].astype(np.float64).mean(), rtol=1e-6
            )
            np.testing.assert_allclose(table.accuracy[b], correct[members].mean(), rtol=1e-6)


def test_bins_of_equal_mass_hold_equally_many_examples_unless_they_are_equal():
    confidence = np.arange(8) / 8
    correct = np.array([False, True] * 4)
    apart = (
        sum(abs(correct[i : i + 2].sum() - confidence[i : i + 2].sum()) for i in (0, 2, 4, 6)) / 8
    )
    assert ece(confidence, correct, bins=4, binning="equal_mass") == pytest.approx(apart, abs=1e-7)
    tied = np.array([0.5, 0.5, 0.5, 0.5])
    for order in ([True, True, False, False], [True, False, True, False]):
        assert ece(tied, np.array(order), bins=2, binning="equal_mass") == 0


@pytest.mark.slow
def test_masked_examples_do_not_count():
    confidence, correct = examples(400, accuracy=lambda c: c / 2)
    # 200 are left, whose errors another test has compiled.
    mask = np.random.default_rng(1).permutation(400) < 200
    confidence[~mask] = np.where(np.arange(200) % 2, np.nan, 0.99)
    left = np.array(every_ece(confidence[mask], correct[mask]))
    assert (left > 0.1).all()
    np.testing.assert_allclose(every_ece(confidence, correct, mask), left, rtol=0, atol=1e-7)
    assert np.isnan(every_ece(confidence, correct, np.zeros(400, bool))).all()
    one = np.arange(400) == np.flatnonzero(mask)[0]
    expected = [slow_ece(confidence[one], correct[one], 15, *kind) for kind in KINDS]
    np.testing.assert_allclose(every_ece(confidence, correct, one), expected, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_no_examples_and_nan_give_nan():
    assert np.isnan(every_ece(np.zeros(0), np.zeros(0, bool))).all()
    confidence, correct = examples(200)
    confidence[3] = np.nan
    assert np.isnan(every_ece(confidence, correct)).all()


@pytest.mark.slow
@pytest.mark.parametrize("binning", BINNINGS)
def test_vmap_is_a_loop_and_masks_do_not_recompile(binning):
    traced = []

    def error(confidence, correct, mask):
        traced.append(None)
        return ece(confidence, correct, binning=binning, debiased=True, mask=mask)

    confidence, correct = (
        np.stack(arrays) for arrays in zip(*(examples(64, seed) for seed in range(5)), strict=True)
    )
    mask = np.arange(64) < np.array([64, 50, 1, 0, 33])[:, None]
    compiled = jax.jit(error)
    looped = [compiled(*arrays) for arrays in zip(confidence, correct, mask, strict=True)]
    assert len(traced) == 1
    np.testing.assert_allclose(jax.vmap(error)(confidence, correct, mask), looped, atol=1e-7)
    tables = jax.vmap(reliability)(confidence, correct)
    np.testing.assert_array_equal(tables.counts[4], reliability(confidence[4], correct[4]).counts)


@pytest.mark.slow
def test_debiasing_removes_its_share_of_the_bias_and_no_more():
    """Checks calibrated data (true error 0), and data that are 0.1 off, where gaps are many
    deviations.

    Eight bins of 250 examples of one confidence p each: s = sqrt(p (1 - p) / 250), E|g| = s sqrt(2
    / pi) without and 2 - sqrt(2) times that with the correction if calibrated; 0.1 if not. The
    errors of 1000 trials have standard deviations below 0.01, so their mean is off by 0.002, over 6
    of its deviations, with probability below 1e-8. The second mean is off by 0.009 without the
    correction and 0.004 with each bin cut at 0; it stands at 0.0174 for half the variance, 0.0073
    for twice as much, 0.0025 if the bias at gap 0 is subtracted everywhere."""
    p = np.linspace(0.15, 0.85, 8, dtype=np.float32).repeat(250)
    draws = np.random.default_rng(7).random((1000, len(p)), np.float32)

    def mean_error(accuracy, **options):
        return float(
            jnp.mean(
                jax.vmap(lambda correct: ece(p, correct, bins=10, **options))(draws < accuracy)
            )
        )

    bias = float(np.mean(np.sqrt(p * (1 - p) / 250))) * math.sqrt(2 / math.pi)
    assert mean_error(p) == pytest.approx(bias, abs=0.002)
    assert mean_error(p, debiased=True) == pytest.approx((2 - math.sqrt(2)) * bias, abs=0.002)
    assert mean_error(p - 0.1, debiased=True) == pytest.approx(0.1, abs=0.002)


@pytest.mark.slow
def test_brier_and_nll_are_the_mean_over_examples():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(50, 4)) * 3, rng.integers(0, 4, 50)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    score = np.mean(
        [sum((p[i, k] - (k == y)) ** 2 for k in range(4)) for i, y in enumerate(labels)]
    )
    assert brier(p, labels) == pytest.approx(score, rel=1e-6)
    assert nll(logits, labels) == pytest.approx(
        -np.mean([math.log(p[i, y]) for i, y in enumerate(labels)]), rel=1e-6
    )
    batched = jax.vmap(nll)(logits.reshape(5, 10, 4), labels.reshape(5, 10))
    assert float(jnp.mean(batched)) == pytest.approx(float(nll(logits, labels)), rel=1e-6)


def test_the_ends_of_the_brier_score():
    labels = np.array([0, 1])
    assert brier(np.eye(2), labels) == 0 and brier(np.eye(2), 1 - labels) == 2
    assert brier(np.full((2, 2), 0.5), labels) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logits", "value"),
    [
        ([0.0, 0.0], math.log(2)),
        ([1e38, 1e38], math.log(2)),
        ([-1e4, 1e4], 2e4),
        ([1e30, 0.0], 0.0),
        ([0.0, -math.inf], 0.0),
        ([-math.inf, 0.0], math.inf),
    ],
)
def test_nll_of_huge_logits(logits, value):
    assert nll(np.array([logits]), np.array([0])) == pytest.approx(value, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_out_of_range_is_no_number(label):
    values, labels = np.full((2, 3), 1 / 3), np.array([0, label])
    assert np.isnan(brier(values, labels)) and np.isnan(nll(values, labels))
    assert np.isnan(nll(np.zeros((0, 3)), np.zeros(0, int))) and np.isnan(
        brier(np.zeros((0, 3)), np.zeros(0, int))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ece(np.ones((2, 3)), np.ones((2, 3), bool)),
            r"confidence .* \(2, 3\). .* jax.vmap",
        ),
        (lambda: ece(np.ones(3), np.ones(2, bool)), r"correct .* \(3,\), got shape \(2,\)"),
        (
            lambda: ece(np.ones(3), np.ones(3, bool), mask=np.ones((), bool)),
            r"mask .* got shape \(\)",
        ),
        (lambda: ece(np.ones(3), np.ones(3, bool), bins=0), "bins must be at least 1 .* got 0"),
        (
            lambda: ece(np.ones(3), np.ones(3, bool), binning="log"),
            "binning must be \"equal_width\" .* got 'log'",
        ),
        (
            lambda: reliability(np.ones(3), np.ones(3, bool), bins=-1),
            "bins must be at least 1 .* got -1",
        ),
        (lambda: reliability(np.ones(3), np.ones((3, 1), bool)), r"correct .* got shape \(3, 1\)"),
        (
            lambda: brier(np.ones(3), np.zeros(3, int)),
            r"probabilities must be \[n, K\].* \[n\]. Add a batch axis",
        ),
        (
            lambda: nll(np.ones((3, 2)), np.ones((3, 2))),
            r"labels must be \[n\].* got shape \[n, 2\].* Take argmax",
        ),
    ],
)
def test_bad_input_is_named_with_its_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("binning", BINNINGS)
def test_the_classwise_error_is_the_mean_over_classes(binning):
    """A mean over examples in place of classes would be another number, since the classes differ in
    size."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet([1.0, 2.0, 4.0], 300).astype(np.float32)
    y = rng.choice(3, 300, p=[0.1, 0.3, 0.6])
    expected = np.mean([slow_ece(p[:, k], y == k, 10, binning, False) for k in range(3)])
    assert classwise_ece(p, y, bins=10, binning=binning) == pytest.approx(expected, abs=2e-6)
    assert np.isnan(classwise_ece(p, np.where(y == 0, 3, y)))


@pytest.mark.parity
def test_errors_are_those_of_scikit_learn(record_property):
    """Calibration errors and Brier scores of scikit-learn's curves."""
    calibration, scores = (
        pytest.importorskip(f"sklearn.{name}") for name in ("calibration", "metrics")
    )
    confidence, correct = examples(2000, accuracy=lambda c: 0.1 + 0.7 * c)
    right, mean = calibration.calibration_curve(correct, confidence, n_bins=15)
    counts = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    counts = counts[counts > 0]
    theirs = float(np.sum(counts * np.abs(right - mean)) / counts.sum())
    record_property("ECE", f"{theirs:.4f}")
    assert ece(confidence, correct) == pytest.approx(theirs, abs=2e-6)
    both = np.stack([1 - confidence, confidence], 1)
    twice = 2 * scores.brier_score_loss(correct, confidence)
    assert brier(both, correct.astype(int)) == pytest.approx(twice, rel=1e-5)


@pytest.mark.parity
def test_errors_are_those_of_netcal(record_property):
    """The calibration error of netcal, for a confidence in the predicted class and for one of two
    classes."""
    netcal, rng = pytest.importorskip("netcal.metrics"), np.random.default_rng(0)
    p = rng.dirichlet([1.0, 2.0, 4.0], 1500)
    y = np.array([rng.choice(3, p=one) for one in p])
    for name, theirs, ours in (
        ("predicted class", netcal.ECE(15).measure(p, y), ece(p.max(1), p.argmax(1) == y)),
        ("one of two", netcal.ECE(15).measure(p[:, 0], (y == 0).astype(int)), ece(p[:, 0], y == 0)),
    ):
        record_property(name, f"{theirs:.4f}")
        assert ours == pytest.approx(float(theirs), abs=2e-6)


def in_bins(confidence, correct, bins):
    """Computes the error in float64 with NumPy, with the float32 edges of `equal_width_bin`."""
    edges = np.arange(1, bins, dtype=np.float32) / np.float32(bins)
    index = np.searchsorted(edges, confidence, side="right")
    gaps = np.bincount(index, correct.astype(float) - confidence.astype(float), bins)
    return np.abs(gaps).sum() / len(confidence)


@pytest.mark.slow
def test_a_thousand_bins_over_many_examples_keep_their_digits():
    """The first version compared every example with every bin, 12 bytes each."""
    confidence, correct = examples(200_000, accuracy=lambda c: c - 0.01)
    found = metrics.ece(confidence, correct, bins=1000)
    assert found == pytest.approx(in_bins(confidence, correct, 1000), rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "arrays", "limit"),
    [
        (
            metrics.ece,
            (
                jax.ShapeDtypeStruct((300_000,), "float32"),
                jax.ShapeDtypeStruct((300_000,), bool),
            ),
            60,
        ),
        (
            metrics.classwise_ece,
            (
                jax.ShapeDtypeStruct((50_000, 1000), "float32"),
                jax.ShapeDtypeStruct((50_000,), "int32"),
            ),
            1,
        ),
    ],
)
def test_memory_is_that_of_the_input_and_a_few_numbers_for_each_example(metric, arrays, limit):
    """Asks the compiler. Nothing is computed. `limit` is in bytes for each number of the first
    array."""
    options = {"bins": 1000} if metric is metrics.ece else {}
    compiled = jax.jit(functools.partial(metric, **options)).lower(*arrays).compile()
    assert (
        compiled.memory_analysis().temp_size_in_bytes < limit * math.prod(arrays[0].shape) + 2**20
    )


@pytest.mark.slow
def test_bins_of_equal_mass_do_not_overflow():
    """rank * bins is above 2^31 for the last tenth of the examples."""
    n, bins = 75_000, 32_000
    confidence = ((np.arange(n) + 0.5) / n).astype(np.float32)
    correct = np.arange(n) % 3 == 0
    index = np.searchsorted(np.sort(confidence), confidence).astype(object) * bins // n
    gaps = np.bincount(index.astype(int), correct - confidence.astype(float), bins)
    found = metrics.ece(confidence, correct, bins=bins, binning="equal_mass")
    assert found == pytest.approx(np.abs(gaps).sum() / n, rel=2e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p, c: metrics.ece(p, np.arange(8)),
            TypeError,
            "correct must be bool, got dtype int32. Give predicted",
        ),
        (
            lambda p, c: metrics.ece(p, c.astype(float)),
            TypeError,
            "correct must be bool, got dtype float",
        ),
        (
            lambda p, c: metrics.ece(100 * p, c),
            ValueError,
            r"confidence must be in \[0, 1\].* Divide percent by 100",
        ),
        (lambda p, c: metrics.ece(-p, c), ValueError, r"confidence must be in \[0, 1\]"),
        (
            lambda p, c: metrics.ece(confidence=100 * p, correct=c),
            ValueError,
            r"confidence must be in \[0, 1\]",
        ),
        (
            lambda p, c: metrics.ece(c, c),
            TypeError,
            "confidence must be floating point, got dtype bool",
        ),
        (
            lambda p, c: metrics.ece(p, c, mask=np.arange(8)),
            TypeError,
            "mask must be bool, got dtype int",
        ),
        (
            lambda p, c: metrics.ece(p, c, bins=40_000),
            ValueError,
            "bins must be .* at most 32768, got 40000",
        ),
        (lambda p, c: reliability(100 * p, c), ValueError, r"confidence must be in \[0, 1\]"),
        (lambda p, c: reliability(p, np.arange(8)), TypeError, "correct must be bool"),
        (
            lambda p, c: brier(3 * np.stack([p, p], 1), c.astype(int)),
            ValueError,
            r"probabilities must be in \[0, 1\]",
        ),
        (
            lambda p, c: classwise_ece(3 * np.stack([p, p], 1), c.astype(int)),
            ValueError,
            r"probabilities .* softmax",
        ),
    ],
)
def test_classes_and_percent_in_place_of_correctness_and_fractions_are_named(call, error, message):
    confidence = np.linspace(0.5, 1.0, 8, dtype=np.float32)
    with pytest.raises(error, match=message):
        call(confidence, confidence > 0.7)


@pytest.mark.slow
def test_percent_inside_of_a_compiled_function_are_no_number():
    """A traced value cannot raise. Values that do not count may be anything."""
    percent, correct = np.array([94.0, 0.5], np.float32), np.array([True, False])
    every, last = np.ones(2, bool), np.array([False, True])
    assert np.isnan(ece(percent, correct, mask=every)) and ece(percent, correct, mask=last) == 0.5
    assert metrics.ece(percent, correct, mask=last) == 0.5
    assert ece(np.array([1 + 1e-6, 0.5], np.float32), correct, mask=every) == 0.25  # rounding


def test_lists_are_arrays():
    confidence, correct, rows, labels = (
        [0.9, 0.6, 0.7],
        [True, False, True],
        [[1.0, 0.0], [0.25, 0.75]],
        [0, 1],
    )
    for metric, args in (
        (metrics.ece, (confidence, correct)),
        (brier, (rows, labels)),
        (nll, (rows, labels)),
    ):
        assert metric(*args) == metric(*map(np.asarray, args))
    masked = metrics.ece(confidence, correct, mask=[True, True, False])
    assert masked == metrics.ece(np.array(confidence[:2]), np.array(correct[:2]))
