"""`Ledger.group_privacy`: epsilon for several units, by formulas and by independent sums."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import optimize, stats

from jaxdp.privacy import Ledger, accounting, balls_in_bins_event, truncated_event
from jaxdp.privacy.events import (
    CorrelatedSampleDpEvent,
    DiscreteLaplaceDpEvent,
    GaussianDpEvent,
    LabelDpEvent,
    LaplaceDpEvent,
    OwnedGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    ZCDpEvent,
    unproven,
)
from jaxdp.privacy.group_privacy import of_account

DELTA = 1e-5
STEP = PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0))


def table_of(*events, sizes=(1, 2, 3), **terms):
    defaults = {"adjacency": "add_remove", "unit": "person", "delta": DELTA}
    with Ledger.in_memory() as ledger:
        ledger.register("data", **defaults | terms)
        for event in events:
            ledger.spend("data", event)
        return ledger.group_privacy("data", sizes)


def epsilons(*events, **options):
    return [row.epsilon for row in table_of(*events, **options).groups]


def gaussian_epsilon(mu):
    def excess(epsilon):
        far = stats.norm.cdf(-epsilon / mu - mu / 2)
        return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * far - DELTA

    return optimize.brentq(excess, 0, 200, xtol=1e-12)


@pytest.mark.parametrize(("adjacency", "factor"), [("add_remove", 1), ("replace_one", 2)])
def test_gaussians_count_the_members(adjacency, factor):
    found = epsilons(GaussianDpEvent(5.0), GaussianDpEvent(5.0), adjacency=adjacency)
    mu = factor * math.sqrt(2) / 5
    exact = [gaussian_epsilon(size * mu) for size in (1, 2, 3)]
    assert found == pytest.approx(exact, rel=1e-8)
    # A broken twin: epsilon grows faster than the number of members.
    assert found[2] > 3 * found[0]


def test_pure_releases_of_any_kind_count_the_members():
    found = epsilons(
        PureDpEvent(0.1), LaplaceDpEvent(10.0), DiscreteLaplaceDpEvent(0.1, 1), delta=0.0
    )
    assert found == pytest.approx([0.3, 0.6, 0.9], rel=1e-9)
    labels = epsilons(LabelDpEvent(0.5), adjacency="replace_label", delta=0.0)
    assert labels == pytest.approx([0.5, 1.0, 1.5])


def test_concentrated_releases_count_the_square():
    found = epsilons(ZCDpEvent(0.1, 0.0), accounting="rdp")
    single = [
        accounting.epsilon(ZCDpEvent(0.1 * m**2, 0.0), delta=DELTA, method="rdp") for m in (1, 2, 3)
    ]
    assert found == pytest.approx(single)


def test_a_family_in_a_sample_is_a_mixture():
    """One step against the binomial mixture, by a sum over a line, in both directions."""
    found = epsilons(STEP, sizes=(3,))[0]
    x, step = np.linspace(-22, 25, 200_001, retstep=True)
    weights = stats.binom.pmf(np.arange(4), 3, 0.1)
    present = sum(w * stats.norm.pdf(x, j, 2.0) for j, w in enumerate(weights))
    absent = stats.norm.pdf(x, 0, 2.0)

    def excess(epsilon):
        factor = math.exp(epsilon)
        gaps = present - factor * absent, absent - factor * present
        return max(np.maximum(gap, 0).sum() * step for gap in gaps) - DELTA

    exact = optimize.brentq(excess, 0, 20)
    assert found == pytest.approx(exact, rel=2e-3) and found >= exact * (1 - 1e-9)
    # Broken twins: one member, and a sample that has all members or none.
    assert epsilons(STEP, sizes=(1,))[0] < 0.9 * exact
    together = PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0 / 3))
    assert accounting.epsilon(together, delta=DELTA) != pytest.approx(exact, rel=0.05)


def moments(means, weights, sigma):
    """E_Q (P / Q)^k for k = 2, 3, of a mixture P of normals against a centred one Q."""
    products = np.exp(means @ means.T / sigma**2)
    joint = weights[:, None] * products * weights
    return np.array([joint.sum(), (joint * ((products * weights) @ products)).sum()])


def moments_of_run(strategy, groups, sigma, *, cycle, q):
    """The same for C G + Z, of units of these groups against none, over all their samples."""
    starts = range(0, len(strategy), cycle)
    columns = np.stack([strategy[:, start + group] for start in starts for group in groups])
    samples = np.array(list(itertools.product([0, 1], repeat=len(columns))))
    sizes = samples.sum(axis=1)
    return moments(samples @ columns, q**sizes * (1 - q) ** (len(columns) - sizes), sigma)


@pytest.mark.parametrize("first_column", [[1.0, 0.0, 0.0], [1.0, 0.5, 0.2], [1.0, 1.0, 1.0]])
@pytest.mark.parametrize("q", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("groups", [(0, 0), (0, 1), (0, 2), (0, 1, 2)])
def test_a_family_in_several_groups_of_a_cycle(first_column, q, groups):
    """Independent and correlated noise: no sampled run exceeds the pair. See proof 6."""
    cycle, cycles, sigma = 3, 3, 1.5
    column = np.array(first_column) / np.linalg.norm(first_column)
    size = cycle * cycles
    strategy = sum(column[i] * np.eye(size, k=-i) for i in range(cycle))
    found = moments_of_run(strategy, groups, sigma, cycle=cycle, q=q)

    def pair(units):
        joined = np.arange(units + 1)
        weights = stats.binom.pmf(joined, units, q)
        return moments(joined[:, None] * 1.0, weights, sigma) ** cycles

    assert (found <= pair(len(groups)) * (1 + 1e-12)).all()
    # A broken twin: the pair of one unit.
    assert (found > pair(1) * (1 + 1e-6)).all()


def test_cycles_that_noise_ties_together_are_converted():
    tied = SelfComposedDpEvent(CorrelatedSampleDpEvent(0.1, GaussianDpEvent(2.0)), 5)
    apart = SelfComposedDpEvent(STEP, 5)
    table = table_of(tied, sizes=(1, 2))
    assert [row.is_composed for row in table.groups] == [True, False]
    single, composed = epsilons(apart, sizes=(1, 2))
    assert table.groups[0].epsilon == single  # about one unit it is a Poisson sample
    assert table.groups[1].epsilon > composed


def test_owners_with_several_records_add_them():
    owned = OwnedGaussianDpEvent(0.1, 4.0, 2)
    found = epsilons(owned, adjacency="zero_out", sizes=(1, 3))
    six = OwnedGaussianDpEvent(0.1, 4.0, 6)
    assert found[1] == accounting.epsilon(six, delta=DELTA, adjacency="zero_out") > found[0]


def test_what_has_no_rule_is_converted():
    """Renyi filters and mixed kinds: the lemma at the best epsilon, found here by a fine search."""
    terms = {"accounting": "renyi_filter", "epsilon": 1.0}
    table = table_of(GaussianDpEvent(20.0), sizes=(1, 2), **terms)
    assert [row.is_composed for row in table.groups] == [False, False]
    with Ledger.in_memory() as ledger:
        ledger.register("data", adjacency="add_remove", unit="person", delta=DELTA, **terms)
        ledger.spend("data", GaussianDpEvent(20.0))
        rates = np.linspace(1.0, 3.0, 400)
        single = [ledger.epsilon("data", delta=DELTA / (1 + math.exp(rate))) for rate in rates]
    best = min(2 * rate for rate, cost in zip(rates, single, strict=True) if cost <= rate)
    assert table.groups[1].epsilon == pytest.approx(best, rel=0.01)
    assert epsilons(unproven("no proof"), allow_unproven=True, sizes=(2,)) == [math.inf]


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_units_that_leave_truncated_batches_find_smaller_data(adjacency):
    """Heavy truncation costs the last unit more than the first one."""

    def of(records):
        return TruncatedSubsampledGaussianDpEvent(records, 0.5, 3, 4.0)

    rates = np.linspace(0.1, 3.0, 400)

    def converted(records, size):
        """The lemma at the best epsilon, for data of so many records."""
        deltas = [
            accounting.delta(of(records), epsilon=rate, adjacency=adjacency) for rate in rates
        ]
        factors = np.exp(np.arange(size)[:, None] * rates).sum(axis=0)
        return size * rates[np.argmax(np.array(deltas) * factors <= 0.01)]

    found = epsilons(of(20), sizes=(4,), delta=0.01, adjacency=adjacency)[0]
    first, last = converted(20, 4), converted(17, 4)
    assert last > 1.01 * first  # a broken twin: all units leave the whole data
    assert found == pytest.approx(last if adjacency == "add_remove" else first, rel=0.01)


def test_truncated_bins_pay_for_both_ends_of_the_path():
    """The conversion counts tau at each step, which is no less than at both ends. See proof 8."""
    size, tau, limit = 3, 1e-3, 0.02
    whole = balls_in_bins_event(8.0, bins=4, steps=4, draws=2**14, seed=bytes(16))
    found = epsilons(truncated_event(whole, tau), sizes=(size,), delta=limit)[0]
    assert 0 < epsilons(whole, sizes=(size,), delta=limit)[0] < found < math.inf
    rate = found / size
    steps = sum(math.exp(i * rate) for i in range(size)) * accounting.delta(whole, epsilon=rate)
    assert steps + (1 + math.exp(found)) * tau <= limit
    # A broken twin: the table without the price is too small.
    free = epsilons(whole, sizes=(size,), delta=limit)[0]
    rate = free / size
    steps = sum(math.exp(i * rate) for i in range(size)) * accounting.delta(whole, epsilon=rate)
    assert steps + (1 + math.exp(free)) * tau > limit


def test_the_table_for_people_and_programs():
    table = table_of(SelfComposedDpEvent(STEP, 3), sizes=(3, 2, 3))
    assert [row.size for row in table.groups] == [2, 3] and "people" in table.text()
    assert json.loads(json.dumps(table.as_dict()))["groups"][0]["size"] == 2
    assert table.rows()[1] == {"size": 3, "epsilon": table.groups[1].epsilon, "delta": DELTA}
    with Ledger.in_memory() as ledger:
        ledger.register("data", adjacency="add_remove", unit="person", delta=DELTA)
        assert of_account(ledger.report()["datasets"][0]) is None  # nothing was spent
        ledger.spend("data", SelfComposedDpEvent(STEP, 3))
        of_report = of_account(ledger.report()["datasets"][0])
        assert of_report == ledger.group_privacy("data")
        ledger.spend("data", STEP, partition="a")
        assert of_account(ledger.report()["datasets"][0]) is None  # members may be in two parts
        for sizes in ((), (0,), (1.5,), (2000,)):
            with pytest.raises(ValueError, match="sizes must be whole numbers from 1 to 1000"):
                ledger.group_privacy("data", sizes)
