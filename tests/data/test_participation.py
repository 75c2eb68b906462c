"""Participation patterns select records with the exact probabilities of their processes."""

import dataclasses
import itertools

import numpy as np
import pytest
from jax_privacy import batch_selection
from scipy import stats

from jaxdp.data import BallsInBinsSampler, BMinSepSampler, CyclicPoissonSampler
from jaxdp.privacy import GaussianDpEvent, PureDpEvent

SEED = bytes(range(16))
RECORDS, STEPS, B, Q = 6000, 6, 3, 0.3

CYCLIC = CyclicPoissonSampler(RECORDS, Q, cycle_length=B, seed=SEED)
BINS = BallsInBinsSampler(num_examples=RECORDS, bins=B, steps=STEPS, seed=SEED)
SEPARATED = BMinSepSampler(
    num_examples=RECORDS, sampling_probability=Q, separation=B, steps=STEPS, seed=SEED
)


def histories(batch, steps=STEPS):
    """Returns who took part when, bool [records, steps]."""
    included = np.zeros((RECORDS, steps), bool)
    for step in range(steps):
        rows = batch(step)
        assert rows.dtype == np.int64 and (np.diff(rows) > 0).all()
        included[rows, step] = True
    return included


def cyclic(x):
    """Returns the probability of a history."""
    total = 0.0
    for group in range(B):
        eligible = np.arange(STEPS) % B == group
        if not x[~eligible].any():
            taken = x[eligible].sum()
            total += Q**taken * (1 - Q) ** (eligible.sum() - taken) / B
    return total


def bins(x):
    return sum((x == (np.arange(STEPS) % B == group)).all() / B for group in range(B))


def separated(x):
    total = 0.0
    for wait in range(B):
        p = (1 if wait == 0 else Q) / (1 + (B - 1) * Q)
        free_from = wait
        for step, taken in enumerate(x):
            if step < free_from:
                p *= not taken
                continue
            p *= Q if taken else 1 - Q
            free_from = step + B if taken else free_from
        total += p
    return total


def p_value(included, law):
    """Returns the p-value of the histories of independent records under a law."""
    every = np.array(list(itertools.product([False, True], repeat=STEPS)))
    expected = np.array([law(x) for x in every])
    assert np.isclose(expected.sum(), 1)
    codes = included @ (2 ** np.arange(STEPS)[::-1])
    counts = np.bincount(codes, minlength=len(every))
    if counts[expected == 0].any():
        return 0.0
    likely = expected * RECORDS > 5
    cells = np.append(counts[likely], counts[~likely].sum())
    means = np.append(expected[likely], expected[~likely].sum()) * RECORDS
    is_used = means > 0
    return stats.chisquare(cells[is_used], means[is_used]).pvalue


LAWS = {"cyclic": (CYCLIC, cyclic), "bins": (BINS, bins), "separated": (SEPARATED, separated)}


@pytest.mark.parametrize("name", LAWS)
def test_records_follow_the_law_of_their_pattern(name):
    sampler, law = LAWS[name]
    assert p_value(histories(sampler.batch), law) > 1e-3
    mean = sampler.expected_batch_size
    assert np.isclose(mean, RECORDS * sum(law(x) * x[0] for x in every_history()))


def every_history():
    return np.array(list(itertools.product([False, True], repeat=STEPS)))


TWINS = {
    "each record twice in a cycle": ("cyclic", lambda t: np.union1d(*pair(CYCLIC, t))),
    "each bin twice": ("bins", lambda t: np.union1d(*pair(BINS, t))),
    "no separation": ("separated", lambda t: SEPARATED._past._poisson.batch(t)),
    "new groups in every cycle": ("cyclic", lambda t: CYCLIC.of_run(bytes([t // B]) * 16).batch(t)),
    "a cold start": ("separated", lambda t: COLD[t]),
}


def pair(sampler, step):
    return sampler.batch(step), sampler.batch((step + 1) % STEPS)


COLD = list(
    batch_selection.BMinSepSampling(
        sampling_prob=Q, iterations=STEPS, min_sep=B, warm_start=False
    ).batch_iterator(RECORDS, rng=np.random.default_rng(3))
)


@pytest.mark.parametrize("name", TWINS)
def test_other_laws_are_rejected(name):
    pattern, batch = TWINS[name]
    law = LAWS[pattern][1]
    assert p_value(histories(lambda t: np.sort(np.int64(batch(t)))), law) < 1e-6


APART = {"partition_type": batch_selection.PartitionType.INDEPENDENT}


@pytest.mark.parametrize(
    ("strategy", "law"),
    [
        (batch_selection.CyclicPoissonSampling(Q, STEPS, cycle_length=B, **APART), cyclic),
        (batch_selection.BallsInBinsSampling(iterations=STEPS, cycle_length=B), bins),
        (batch_selection.BMinSepSampling(sampling_prob=Q, iterations=STEPS, min_sep=B), separated),
    ],
)
def test_the_maintained_strategies_have_the_same_laws(strategy, law):
    batches = list(strategy.batch_iterator(RECORDS, rng=np.random.default_rng(1)))
    assert p_value(histories(lambda t: np.sort(np.int64(batches[t]))), law) > 1e-3


@pytest.mark.parametrize("sampler", [CYCLIC, BINS, SEPARATED], ids=list(LAWS))
def test_any_step_is_drawn_again_and_seeds_differ(sampler):
    first = [sampler.batch(step) for step in range(STEPS)]
    again = sampler.of_run(SEED)
    for step in (4, 1, 5, 0):
        np.testing.assert_array_equal(again.batch(step), first[step])
    other = sampler.of_run(bytes(16))
    assert not all(np.array_equal(other.batch(k), first[k]) for k in range(STEPS))
    assert "seed" not in repr(sampler)


def test_an_event_covers_what_was_said_and_no_more():
    gaussian = GaussianDpEvent(1.0)
    assert CYCLIC.run_event(gaussian, 7).count == 3
    for sampler in (BINS, SEPARATED):
        with pytest.raises(ValueError, match="no event of a single step"):
            sampler.event(gaussian)
        with pytest.raises(ValueError, match="steps must be 6"):
            sampler.run_event(gaussian, STEPS + 1)
        with pytest.raises(ValueError, match="step must be below 6"):
            sampler.batch(STEPS)
        with pytest.raises(ValueError, match="must be a GaussianDpEvent, got PureDpEvent"):
            sampler.run_event(PureDpEvent(1.0), STEPS)
    with pytest.raises(ValueError, match="multiple of the sampler's cycle_length=3"):
        CYCLIC.check_chunks(100, 10)
    CYCLIC.check_chunks(100, 9)
    CYCLIC.check_chunks(10, 10)


TRUNCATED = BMinSepSampler(
    num_examples=200,
    sampling_probability=0.2,
    separation=3,
    steps=1000,
    truncated_batch_size=39,
    seed=SEED,
)


def test_truncated_batches_are_as_likely_as_their_price_says():
    batches = [TRUNCATED.batch(step) for step in range(TRUNCATED.steps)]
    assert max(map(len, batches)) == TRUNCATED.largest_batch == 39
    whole = dataclasses.replace(TRUNCATED, truncated_batch_size=None)
    larger = [k for k, batch in enumerate(batches) if len(whole.batch(k)) > len(batch)]
    for k, batch in enumerate(batches):
        assert np.isin(batch, whole.batch(k)).all() and (np.diff(batch) > 0).all()

    def is_right(tail):
        # 17 of 1000 batches are truncated in the mean.
        return stats.poisson.sf(len(larger) - 1, 1000 * tail) > 1e-6

    share = TRUNCATED.expected_batch_size / 200
    assert is_right(stats.binom.sf(39, 200, share))
    # A twin that forgets ties, and one that has the mean size of another pattern.
    assert not is_right(stats.binom.sf(46, 200, share))
    assert not is_right(stats.binom.sf(39, 200, share - 0.04))
    assert TRUNCATED.truncation_probability == 1.0
    few = dataclasses.replace(TRUNCATED, steps=5, truncated_batch_size=60)
    # A neighbour may have one record more.
    expected = 5 * stats.binom.sf(60, 201, share)
    np.testing.assert_allclose(few.truncation_probability, expected, rtol=1e-8)
    again = dataclasses.replace(TRUNCATED)
    np.testing.assert_array_equal(again.batch(larger[0]), batches[larger[0]])


def test_bins_are_truncated_once_for_all_epochs():
    bins = dataclasses.replace(BINS, truncated_batch_size=2100)
    tail = stats.binom.sf(2100, RECORDS + 1, 1 / 3)
    np.testing.assert_allclose(bins.truncation_probability, 3 * tail, rtol=1e-8)
    small = dataclasses.replace(BINS, truncated_batch_size=5)
    assert [len(small.batch(k)) for k in range(STEPS)] == [5] * STEPS
    assert "and at most 5" in small.words("examples")
    with pytest.raises(ValueError, match="truncated_batch_size must be at least 1, got 0"):
        dataclasses.replace(BINS, truncated_batch_size=0)
