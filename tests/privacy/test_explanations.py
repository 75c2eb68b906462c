"""`Ledger.explain`: what each group of releases costs, against independent float64 computations."""

import itertools
import json
import math

import pytest
from scipy import optimize, stats

from jaxdp.privacy import Ledger
from jaxdp.privacy import epsilon as epsilon_at
from jaxdp.privacy.events import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SelfComposedDpEvent,
    unproven,
)
from jaxdp.privacy.explanations import marginals_of

DELTA = 1e-5
STEP = PoissonSampledDpEvent(0.05, GaussianDpEvent(1.0))


def register(ledger, name="data", **terms):
    defaults = {"adjacency": "add_remove", "unit": "example", "epsilon": 8.0, "delta": DELTA}
    ledger.register(name, **defaults | terms)


def exact_gaussian(sigmas, delta=DELTA):
    """The epsilon of Gaussians by the formula of Balle and Wang, in the plain form."""
    if not sigmas:
        return 0.0
    mu = math.sqrt(math.fsum(sigma**-2 for sigma in sigmas))

    def excess(epsilon):
        far = stats.norm.cdf(-epsilon / mu - mu / 2)
        return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * far - delta

    return optimize.brentq(excess, 0, 100, xtol=1e-13)


def check_gaussians(costs, sigmas):
    """Compares the costs of groups of one Gaussian each with the formula."""
    everything = exact_gaussian(sigmas)
    for sigma in sigmas:
        row = costs[f"Gaussian({sigma:g})"]
        without = exact_gaussian([other for other in sigmas if other != sigma])
        assert row.alone == pytest.approx(exact_gaussian([sigma]), rel=1e-8)
        assert row.without == pytest.approx(without, rel=1e-8)
        assert row.marginal == pytest.approx(everything - without, rel=1e-6)
        assert row.remaining_without == pytest.approx(8.0 - without, rel=1e-8)


def by_name(explanation):
    return {cost.group: cost for cost in explanation.costs}


@pytest.fixture
def gaussians():
    """The explanations of three Gaussians that were spent in every order."""
    explanations = []
    for sigmas in itertools.permutations((1.5, 3.0, 6.0)):
        with Ledger.in_memory() as ledger:
            register(ledger)
            for sigma in sigmas:
                ledger.spend("data", GaussianDpEvent(sigma))
            explanations.append(ledger.explain("data"))
    return explanations


def test_costs_of_gaussians_are_exact_in_every_order(gaussians):
    for explanation in gaussians:
        assert explanation.epsilon == pytest.approx(exact_gaussian([1.5, 3.0, 6.0]), rel=1e-8)
        check_gaussians(by_name(explanation), [1.5, 3.0, 6.0])
        assert explanation == gaussians[0]  # the order of spends is no part of it
    names = [cost.group for cost in gaussians[0].costs]
    assert names == ["Gaussian(1.5)", "Gaussian(3)", "Gaussian(6)"]


def test_shares_and_costs_by_the_order_of_spends_are_caught(gaussians):
    """Broken twins: epsilon divided in the ratio of `alone`, and the growth of each spend."""
    explanation = gaussians[0]
    alone = sum(cost.alone for cost in explanation.costs)
    growth = 0.0
    shares, steps = {}, {}
    for number, cost in enumerate(explanation.costs, 1):
        share = explanation.epsilon * cost.alone / alone
        shares[cost.group] = _with_marginal(cost, share)
        grown = exact_gaussian([1.5, 3.0, 6.0][:number])
        steps[cost.group] = _with_marginal(cost, grown - growth)
        growth = grown
    for twin in (shares, steps):
        total = sum(cost.marginal for cost in twin.values())
        assert total == pytest.approx(explanation.epsilon)  # as plausible as that
        with pytest.raises(AssertionError):
            check_gaussians(twin, [1.5, 3.0, 6.0])
    assert sum(cost.marginal for cost in explanation.costs) < explanation.epsilon < alone


def _with_marginal(cost, marginal):
    return type(cost)(**vars(cost) | {"marginal": marginal})


def test_pure_epsilons_add_up_at_delta_0(ledger):
    register(ledger, delta=0.0, epsilon=2.0)
    for count, epsilon in ((1, 0.5), (3, 0.25)):
        for _ in range(count):
            ledger.spend("data", PureDpEvent(epsilon))
    costs = by_name(ledger.explain("data"))
    assert (costs["Pure(0.25)"].marginal, costs["Pure(0.5)"].marginal) == (0.75, 0.5)
    assert costs["Pure(0.25)"].releases == 3 and costs["Pure(0.25)"].alone == 0.75
    assert costs["Pure(0.25)"].remaining_without == 1.5


def test_a_part_that_bears_less_adds_nothing(ledger):
    register(ledger, delta=0.0, epsilon=2.0)
    ledger.spend("data", PureDpEvent(0.125))
    ledger.spend("data", PureDpEvent(0.5), partition="a", label="ward: a")
    ledger.spend("data", PureDpEvent(0.25), partition="b", label="ward: b")
    costs = by_name(ledger.explain("data"))
    assert costs["Pure(0.25)"].marginal == 0.0 and costs["Pure(0.25)"].alone == 0.25
    assert costs["Pure(0.5)"].marginal == 0.25  # part b then bears the most
    assert costs["Pure(0.125)"].marginal == 0.125
    assert by_name(ledger.explain("data", by="label"))["ward"].marginal == 0.5


def test_groups_are_events_types_labels_or_runs(ledger):
    register(ledger)
    training = SelfComposedDpEvent(STEP, 100)
    answers = SelfComposedDpEvent(PureDpEvent(0.1), 5)
    ledger.spend("data", ComposedDpEvent([training, answers]), label="fit: both")
    ledger.spend("data", PureDpEvent(0.3), label="predict: one")
    assert set(by_name(ledger.explain("data"))) == {
        "Pure(0.1) x 5 + PoissonSampled(0.05, Gaussian(1)) x 100",
        "Pure(0.3)",
    }
    types = by_name(ledger.explain("data", by="type"))
    assert {name: cost.releases for name, cost in types.items()} == {
        "PoissonSampled(Gaussian)": 100,
        "Pure": 6,
    }
    pure = ComposedDpEvent([answers, PureDpEvent(0.3)])
    assert types["Pure"].alone == epsilon_at(pure, delta=DELTA)
    assert types["Pure"].without == epsilon_at(training, delta=DELTA)
    assert set(by_name(ledger.explain("data", by="label"))) == {"fit", "predict"}
    (run,) = ledger.explain("data", by="run").costs
    assert (run.group, run.without, run.releases) == (ledger.run, 0.0, 2)
    assert run.marginal == run.alone == ledger.epsilon("data")
    with pytest.raises(ValueError, match=r"by must be one of \['event', .* got 'day'"):
        ledger.explain("data", by="day")


def test_a_release_without_proof_is_what_makes_epsilon_infinite(ledger):
    register(ledger, epsilon=None)
    ledger.spend("data", PureDpEvent(0.5))
    ledger.spend("data", unproven("no proof"))
    costs = by_name(ledger.explain("data"))
    assert costs["Unproven(no proof)"].marginal == math.inf
    assert costs["Unproven(no proof)"].without == pytest.approx(0.5, abs=1e-4)
    assert costs["Pure(0.5)"].marginal == 0.0  # epsilon stays infinite
    row = ledger.explain("data").as_dict()
    assert row["epsilon"] is None and row["costs"][0]["marginal"] is None
    json.dumps(row, allow_nan=False)


def test_shares_of_a_filter_add_up(ledger):
    register(ledger, accounting="renyi_filter")
    ledger.spend("data", GaussianDpEvent(4.0))
    ledger.spend("data", LaplaceDpEvent(9.0))
    explanation = ledger.explain("data")
    marginals = math.fsum(cost.marginal for cost in explanation.costs)
    assert (
        marginals
        == pytest.approx(explanation.epsilon)
        == pytest.approx(8.0 - ledger.remaining("data"))
    )


def test_a_report_computes_the_same_marginals_from_its_rows(ledger):
    register(ledger, delta=0.0, epsilon=2.0)
    register(ledger, "filtered", accounting="renyi_filter")
    ledger.spend("filtered", GaussianDpEvent(4.0))
    for partition, epsilon in ((None, 0.125), ("a", 0.5), ("b", 0.25), ("b", 0.25)):
        ledger.spend("data", PureDpEvent(epsilon), partition=partition)
    data, filtered = ledger.report()["datasets"]
    assert [row["partition"] for row in data["spends"]] == [None, "a", "b"]
    assert marginals_of(data) == {0: 0.125, 1: 0.0, 2: 0.0}  # both parts bear the same
    ledger.spend("data", PureDpEvent(0.0625), partition="a")
    data = ledger.report()["datasets"][0]
    assert marginals_of(data) == {0: 0.125, 1: 0.0625, 2: 0.0, 3: 0.0625}
    assert marginals_of(data | {"rows": 5}) == {}  # a row is not in the report
    assert marginals_of(filtered) == {}


def test_an_empty_account_and_very_many_groups(ledger):
    register(ledger, delta=0.0, epsilon=None)
    assert "Nothing was spent" in ledger.explain("data").text()
    for number in range(60):
        ledger.spend("data", PureDpEvent(1 + number / 64))
    explanation = ledger.explain("data")
    assert len(explanation.costs) == 50 and explanation.omitted == 10
    assert min(cost.alone for cost in explanation.costs) == 1 + 10 / 64
    assert "10 more groups" in explanation.text()
