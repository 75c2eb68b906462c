"""The best of a random number of runs: the bound beside the exact divergence of small searches."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy.special import logsumexp

from jaxdp.privacy import (
    ComposedDpEvent,
    GaussianDpEvent,
    LabelDpEvent,
    LaplaceDpEvent,
    OneOfDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RepeatAndSelectDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    ZCDpEvent,
    epsilon,
)
from jaxdp.privacy.selection import mean_runs, selection_rdp, stopping_probability

ORDERS = (1.25, 2.0, 4.0, 16.0, 64.0, 256.0)
SHAPES = (0.0, 1.0, 4.0, math.inf)
MEANS = (2.0, 40.0)


def generated(z, mean, shape):
    """Returns E[z^K] in float64, from the definition of the distribution."""
    if shape == math.inf:
        return np.exp(mean * (z - 1))
    gamma = stopping_probability(mean, shape)
    rest = 1 - (1 - gamma) * z
    if shape == 0:
        return np.log(rest) / math.log(gamma)
    return (rest**-shape - 1) / (gamma**-shape - 1)


def best_of(outputs, mean, shape):
    """Returns the exact distribution of the best of K outputs. The first place is "no run"."""
    below = np.concatenate([[0.0], np.cumsum(outputs)])
    below[-1] = 1.0
    return np.diff(np.concatenate([[0.0], generated(below, mean, shape)]))


def divergence(p, q, order):
    """Returns the larger Renyi divergence of both directions."""
    both = []
    for one, other in ((p, q), (q, p)):
        held = one > 0
        logs = order * np.log(one[held]) + (1 - order) * np.log(other[held])
        both.append(logsumexp(logs) / (order - 1))
    return max(both)


def pairs():
    """Yields pairs of distributions of a mechanism whose outputs are in the order of their scores.

    They are randomised response of a score and a rare best output, the worst case of a search.
    """
    for loss in (0.1, 1.0):
        stays = math.exp(loss) / (1 + math.exp(loss))
        yield np.array([1 - stays, stays]), np.array([stays, 1 - stays])
        for rare in (0.2, 0.02, 0.001):
            more = rare * math.exp(loss)
            yield np.array([1 - rare, rare]), np.array([1 - more, more])
            rest, less, half = (1 - rare) / 2, (1 - more) / 2, rare / 2
            yield np.array([rest, rest, half, half]), np.array([less, less, half, more - half])


def exceeded(bound):
    """Returns how often the exact divergence of a search exceeds a bound."""
    count = 0
    for (p, q), mean, shape in itertools.product(pairs(), MEANS, SHAPES):
        run = np.array([divergence(p, q, order) for order in ORDERS])
        limits = bound(run, mean, shape)
        best, other = best_of(p, mean, shape), best_of(q, mean, shape)
        for order, limit in zip(ORDERS, limits, strict=True):
            count += divergence(best, other, order) > limit * (1 + 1e-9) + 1e-9
    return count


def test_no_exact_search_exceeds_the_bound_and_every_twin_is_exceeded():
    def whole(run, mean, shape):
        return selection_rdp(ORDERS, run, mean=mean, shape=shape)

    def one_run(run, mean, shape):
        return run

    def fewer(run, mean, shape):
        return selection_rdp(ORDERS, run, mean=1 + (mean - 1) / 8, shape=shape)

    assert exceeded(whole) == 0
    assert exceeded(one_run) > 50
    assert exceeded(fewer) > 10


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_the_pure_bound_holds_for_exact_searches(shape):
    worst = 0.0
    for (p, q), mean in itertools.product(pairs(), MEANS):
        run = np.abs(np.log(p / q)).max()
        # The first place, no run, has no mass.
        best, other = best_of(p, mean, shape)[1:], best_of(q, mean, shape)[1:]
        worst = max(worst, np.abs(np.log(best / other)).max() / run)
    assert 1.4 < worst <= 2 + shape  # one run only: 1 is exceeded
    search = RepeatAndSelectDpEvent(PureDpEvent(0.25), 10.0, shape)
    assert epsilon(search, delta=0.0) == pytest.approx((2 + shape) * 0.25)


def test_a_poisson_number_of_pure_runs_has_no_pure_bound():
    assert epsilon(RepeatAndSelectDpEvent(PureDpEvent(0.1), 10.0, math.inf), delta=0.0) == math.inf


@pytest.mark.parametrize("mean", [1.0001, 2.0, 10.0, 5000.0])
@pytest.mark.parametrize("shape", [0.0, 1e-9, 0.3, 1.0, 7.0])
def test_the_stopping_probability_has_the_mean(mean, shape):
    gamma = stopping_probability(mean, shape)
    assert mean_runs(gamma, shape) == pytest.approx(mean, rel=1e-12)
    if shape == 1:
        assert gamma == pytest.approx(1 / mean, rel=1e-12)


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_dp_accounting_computes_the_same(shape):
    run = SelfComposedDpEvent(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.3)), 50)
    search = dp_event.RepeatAndSelectDpEvent(run, 12.0, shape)
    reference = RdpAccountant().compose(search).get_epsilon(1e-5)
    assert epsilon(search, delta=1e-5) == pytest.approx(reference, rel=1e-6)


def test_a_pure_run_costs_less_than_its_concentrated_bound():
    pure, bound = (
        RepeatAndSelectDpEvent(ComposedDpEvent([GaussianDpEvent(6.0), part]), 10.0, 1.0)
        for part in (PureDpEvent(0.2), ZCDpEvent(0.02))
    )
    assert epsilon(pure, delta=1e-5) < epsilon(bound, delta=1e-5)


def test_candidates_that_differ_cost_the_most_expensive_at_every_order():
    few = SelfComposedDpEvent(PoissonSampledDpEvent(0.2, GaussianDpEvent(2.0)), 20)
    many = LaplaceDpEvent(3.0)
    both = OneOfDpEvent((few, many))
    costs = [epsilon(event, delta=1e-5, method="rdp") for event in (few, many, both)]
    # The curves cross, so the maximum costs a little more than each.
    assert max(costs) <= costs[2] < sum(costs[:2])
    assert epsilon(both, delta=0.0) == math.inf
    assert epsilon(OneOfDpEvent((many, PureDpEvent(0.5))), delta=0.0) == pytest.approx(0.5)
    search = RepeatAndSelectDpEvent(both, 5.0, 1.0)
    assert epsilon(search, delta=1e-5) > costs[2]


def test_what_has_no_rule_is_refused():
    truncated = TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 1.0)
    sampled = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    for event, adjacency in (
        (RepeatAndSelectDpEvent(truncated, 5.0, 1.0), "add_remove"),
        (RepeatAndSelectDpEvent(OneOfDpEvent((sampled, truncated)), 5.0, 1.0), "add_remove"),
        (RepeatAndSelectDpEvent(sampled, 5.0, 1.0), "replace_one"),
    ):
        with pytest.raises(ValueError, match="no accounting rule"):
            epsilon(event, delta=1e-5, adjacency=adjacency)
    for event in (LabelDpEvent(1.0), OneOfDpEvent((LabelDpEvent(1.0), PureDpEvent(2.0)))):
        with pytest.raises(ValueError, match="claim for"):
            epsilon(RepeatAndSelectDpEvent(event, 5.0, 1.0), delta=0.0)
