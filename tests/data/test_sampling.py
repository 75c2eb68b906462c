"""Poisson sampling is Bernoulli, stateless and accounted as what it is."""

import dataclasses
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats

from jaxdp.data import FixedBatchSampler, FixedOrderSampler, PoissonSampler

SEED = bytes(range(16))
NUM_EXAMPLES, Q, STEPS = 64, 0.3, 1500


def two_sided(lower: float, upper: float) -> float:
    return min(1.0, 2 * min(lower, upper))


def poisson_p_values(
    batch: Callable[[int], np.ndarray], n: int, q: float, steps: int
) -> dict[str, float]:
    """P-values, one per property, of "example i is in batch t" being independent Bernoulli(q)."""
    included = np.zeros((steps, n), bool)
    for step in range(steps):
        indices = batch(step)
        assert len(np.unique(indices)) == len(indices)
        included[step, indices] = True
    x = (included - q) / np.sqrt(q * (1 - q))

    def chi2(statistic: float, freedom: int) -> float:
        return two_sided(stats.chi2.cdf(statistic, freedom), stats.chi2.sf(statistic, freedom))

    def normal(statistic: float) -> float:
        return float(2 * stats.norm.sf(abs(statistic)))

    gram = x.T @ x / np.sqrt(steps)
    sizes = included.sum(axis=1)
    # Cells of about equal probability for the distribution of the batch size.
    edges = stats.binom.ppf(np.linspace(0, 1, 11)[1:-1], n, q)
    cells = np.diff(np.concatenate([[0.0], stats.binom.cdf(edges, n, q), [1.0]]))
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=len(cells))
    p_values = {
        "total": stats.binomtest(int(included.sum()), included.size, q).pvalue,
        "examples": chi2(float(np.sum(x.sum(axis=0) ** 2) / steps), n),
        "batch size variance": chi2(float(np.sum(x.sum(axis=1) ** 2) / n), steps),
        "batch size distribution": stats.chisquare(observed, cells * steps).pvalue,
        "pairs of examples": chi2(float(np.sum(np.triu(gram, 1) ** 2)), n * (n - 1) // 2),
    }
    for lag in (1, 2, 3, 7):
        statistic = np.sum(x[:-lag] * x[lag:]) / np.sqrt(n * (steps - lag))
        p_values[f"steps at lag {lag}"] = normal(float(statistic))
    return p_values


def is_poisson(batch: Callable[[int], np.ndarray]) -> bool:
    """The one test that accepts the sampler and must reject the wrong ones; a right one fails once
    in 1000."""
    return min(poisson_p_values(batch, NUM_EXAMPLES, Q, STEPS).values()) > 1e-4


@pytest.mark.parametrize("seed", [SEED, bytes(16), b"\xff" * 16])
def test_sampling_is_accepted_as_poisson(seed):
    sampler = PoissonSampler(NUM_EXAMPLES, Q, seed=seed)
    p_values = poisson_p_values(sampler.batch, NUM_EXAMPLES, Q, STEPS)
    assert min(p_values.values()) > 1e-4, p_values


def test_the_test_accepts_an_independent_implementation():
    rng = np.random.default_rng(5)
    assert is_poisson(lambda step: np.flatnonzero(rng.random(NUM_EXAMPLES) < Q))


def scaled(factor: float) -> Callable[[int], np.ndarray]:
    return PoissonSampler(NUM_EXAMPLES, Q * factor, seed=SEED).batch


def tied_pairs(step: int) -> np.ndarray:
    half = PoissonSampler(NUM_EXAMPLES // 2, Q, seed=SEED).batch(step)
    return np.concatenate([2 * half, 2 * half + 1])


def two_examples_tied(step: int) -> np.ndarray:
    batch = set(PoissonSampler(NUM_EXAMPLES, Q, seed=SEED).batch(step).tolist())
    return np.array(sorted(batch | {1} if 0 in batch else batch - {1}), np.int64)


def favours_one(step: int) -> np.ndarray:
    batch = PoissonSampler(NUM_EXAMPLES, Q, seed=SEED).batch(step)
    return batch[batch != 0] if step % 2 else batch


def every_batch_twice(step: int) -> np.ndarray:
    return PoissonSampler(NUM_EXAMPLES, Q, seed=SEED).batch(step // 2)


WRONG_SAMPLERS = {
    "q times 0.7": scaled(0.7),
    "q times 1.3": scaled(1.3),
    "q times 1.05": scaled(1.05),
    "shuffled fixed-size batches": FixedBatchSampler(
        NUM_EXAMPLES, round(Q * NUM_EXAMPLES), seed=SEED
    ).batch,
    "fixed size, fresh each step": lambda step: np.random.default_rng(step).choice(
        64, 19, replace=False
    ),
    "truncated": PoissonSampler(NUM_EXAMPLES, Q, seed=SEED, truncated_batch_size=22).batch,
    "pairs of examples together": tied_pairs,
    "two examples together": two_examples_tied,
    "one example half as often": favours_one,
    "every batch twice": every_batch_twice,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_SAMPLERS)
def test_wrong_samplers_are_rejected(name):
    assert not is_poisson(WRONG_SAMPLERS[name])


def test_truncation_keeps_a_uniform_subset_of_poisson_batches():
    limit, steps = 18, 3000
    sampler = PoissonSampler(NUM_EXAMPLES, Q, seed=SEED, truncated_batch_size=limit)
    batches = [sampler.batch(step) for step in range(steps)]
    sizes = np.array([len(batch) for batch in batches])
    assert sizes.max() == limit
    probability = stats.binom.sf(limit - 1, NUM_EXAMPLES, Q)
    assert stats.binomtest(int((sizes == limit).sum()), steps, probability).pvalue > 1e-3
    full = [batch for batch in batches if len(batch) == limit]
    counts = np.bincount(np.concatenate(full), minlength=NUM_EXAMPLES)
    # Without replacement the counts have the variance of a chi-square shrunk by (n - limit) / (n -
    # 1).
    shrink = (NUM_EXAMPLES - limit) / (NUM_EXAMPLES - 1)
    expected = len(full) * limit / NUM_EXAMPLES
    statistic = np.sum((counts - expected) ** 2) / expected / shrink
    lower, upper = (
        stats.chi2.cdf(statistic, NUM_EXAMPLES - 1),
        stats.chi2.sf(statistic, NUM_EXAMPLES - 1),
    )
    assert two_sided(lower, upper) > 1e-3


def test_any_step_is_regenerated_without_the_steps_before():
    sampler = PoissonSampler(200, 0.1, seed=SEED)
    forward = [sampler.batch(step) for step in range(10)]
    again = PoissonSampler(200, 0.1, seed=bytes(SEED))
    for step in (7, 0, 9, 3):
        np.testing.assert_array_equal(again.batch(step), forward[step])
    other = PoissonSampler(200, 0.1, seed=bytes(reversed(SEED)))
    assert any(not np.array_equal(other.batch(step), forward[step]) for step in range(10))
    assert len({forward[step].tobytes() for step in range(10)}) == 10


def test_batches_are_int64_ascending_and_may_be_empty():
    batches = [PoissonSampler(3, 0.01, seed=SEED).batch(step) for step in range(50)]
    assert any(len(batch) == 0 for batch in batches)
    assert all(batch.dtype == np.int64 and batch.ndim == 1 for batch in batches)
    everyone = PoissonSampler(300, 1.0, seed=SEED).batch(2**64 - 1)
    np.testing.assert_array_equal(everyone, np.arange(300))


def test_seeds_are_secret_fresh_and_of_the_right_size():
    first, second = PoissonSampler(10, 0.5), PoissonSampler(10, 0.5)
    assert first.seed != second.seed
    assert len(first.seed) == 16
    for sampler in (
        PoissonSampler(10, 0.5, seed=b"a secret 16bytes"),
        FixedBatchSampler(10, 5, seed=b"a secret 16bytes"),
    ):
        assert "secret" not in repr(sampler) + str(sampler)
        assert "seed" not in repr(sampler)
    with pytest.raises(ValueError, match="seed must be 16 bytes"):
        PoissonSampler(10, 0.5, seed=b"short")
    with pytest.raises(TypeError, match="seed must be 16 bytes"):
        PoissonSampler(10, 0.5, seed=0)


def test_the_event_comes_from_the_sampler():
    gaussian = dp_accounting.GaussianDpEvent(1.5)
    sampler = PoissonSampler(1000, 0.05, seed=SEED)
    assert sampler.event(gaussian) == dp_event.PoissonSampledDpEvent(0.05, gaussian)
    assert sampler.expected_batch_size == pytest.approx(50)
    laplace = dp_accounting.LaplaceDpEvent(2.0)
    assert sampler.event(laplace) == dp_event.PoissonSampledDpEvent(0.05, laplace)
    truncated = dataclasses.replace(sampler, truncated_batch_size=60)
    assert truncated.event(gaussian) == dp_event.TruncatedSubsampledGaussianDpEvent(
        1000, 0.05, 60, 1.5
    )
    assert truncated.expected_batch_size == sampler.expected_batch_size


@pytest.mark.slow
def test_truncation_costs_what_dp_accounting_says():
    def epsilon(sampler: PoissonSampler) -> float:
        event = sampler.event(dp_accounting.GaussianDpEvent(1.0))
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        return accountant.compose(event, 100).get_epsilon(1e-5)

    plain = PoissonSampler(1000, 0.05, seed=SEED)
    tight = dataclasses.replace(plain, truncated_batch_size=45)
    loose = dataclasses.replace(plain, truncated_batch_size=150)
    assert epsilon(tight) > 1.02 * epsilon(plain)
    assert epsilon(loose) == pytest.approx(epsilon(plain), rel=1e-3)


def test_events_that_cannot_be_accounted_are_refused():
    sampler = PoissonSampler(100, 0.1, seed=SEED, truncated_batch_size=20)
    with pytest.raises(ValueError, match=r"must be a GaussianDpEvent .* got LaplaceDpEvent"):
        sampler.event(dp_accounting.LaplaceDpEvent(1.0))
    with pytest.raises(TypeError, match="inner_event must be a dp_accounting DpEvent, got float"):
        sampler.event(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.1), "num_examples must be at least 1, got 0"),
        ((10, 0.0), r"sampling_probability must be in \(0, 1\], got 0.0"),
        ((10, 1.5), "got 1.5"),
        ((10, float("nan")), "got nan"),
    ],
)
def test_impossible_samplers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PoissonSampler(*arguments, seed=SEED)


def test_impossible_counts_and_steps_are_refused():
    with pytest.raises(ValueError, match="truncated_batch_size must be at least 1, got 0"):
        PoissonSampler(10, 0.1, seed=SEED, truncated_batch_size=0)
    with pytest.raises(TypeError, match="num_examples must be an int, got float"):
        PoissonSampler(10.0, 0.1, seed=SEED)
    for step in (-1, 2**64):
        with pytest.raises(ValueError, match="step must be"):
            PoissonSampler(10, 0.1, seed=SEED).batch(step)
    with pytest.raises(ValueError, match="batch_size must be at most num_examples=10, got 11"):
        FixedBatchSampler(10, 11, seed=SEED)


def test_fixed_batches_are_shuffled_epochs():
    sampler = FixedBatchSampler(23, 5, seed=SEED)
    assert sampler.steps_per_epoch == 4
    epochs = [
        np.concatenate([sampler.batch(4 * epoch + k) for k in range(4)]) for epoch in range(3)
    ]
    for epoch in epochs:
        assert len(np.unique(epoch)) == 20
        assert epoch.min() >= 0 and epoch.max() < 23
    assert not np.array_equal(epochs[0], epochs[1])
    np.testing.assert_array_equal(FixedBatchSampler(23, 5, seed=SEED).batch(6), sampler.batch(6))
    assert not hasattr(sampler, "event")
    counts = np.zeros(23)
    for step in range(4 * 500):
        counts[sampler.batch(step)] += 1
    # Each example misses an epoch with probability 3/23.
    assert np.all(np.abs(counts - 500 * 20 / 23) < 5 * np.sqrt(500 * 20 / 23 * 3 / 23))


def test_an_order_is_fixed_and_every_example_takes_part_once_an_epoch():
    sampler = FixedOrderSampler(23, 5)
    assert sampler.steps_per_epoch == 5 and sampler.expected_batch_size == 23 / 5
    batches = [sampler.batch(step) for step in range(10)]
    assert sorted(np.concatenate(batches[:5]).tolist()) == list(range(23))
    assert {len(batch) for batch in batches} == {4, 5} and sampler.largest_batch == 5
    for first, second in zip(batches[:5], batches[5:], strict=True):
        np.testing.assert_array_equal(first, second)
    # A run has one order, whatever the secrets of its chunks are.
    assert sampler.of_run(SEED) is sampler
    other = FixedOrderSampler(23, 5, seed=SEED)
    assert any(not np.array_equal(other.batch(step), batches[step]) for step in range(5))
    assert repr(SEED) in repr(other)
    # What it states is what it does.
    for steps in (1, 5, 6, 10):
        taken = [[step for step in range(steps) if i in batches[step]] for i in range(23)]
        assert sampler.participation(steps) == (max(map(len, taken)), 5)
    with pytest.raises(ValueError, match="no event of a single step"):
        sampler.event(dp_event.GaussianDpEvent(1.0))
    with pytest.raises(ValueError, match="batch_size must be at most num_examples=4, got 5"):
        FixedOrderSampler(4, 5)
