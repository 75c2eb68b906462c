"""Claims for labels and claims for examples, which no account holds together."""

import math

import pytest

from jaxdp import privacy
from jaxdp.privacy import (
    GaussianDpEvent,
    LabelDpEvent,
    LaplaceDpEvent,
    Ledger,
    PoissonSampledDpEvent,
    PureDpEvent,
    events,
)
from jaxdp.report.verdicts import verdict

_EXAMPLES = ["add_remove", "replace_one", "zero_out"]


def _ledger(adjacency="replace_label", **terms):
    ledger = Ledger.in_memory()
    ledger.register("survey", adjacency=adjacency, unit="respondent", **terms)
    return ledger


def test_labels_compose_as_pure_events_do():
    ledger = _ledger(epsilon=2.0, delta=0.0)
    for _ in range(2):
        with ledger.spend("survey", LabelDpEvent(1.0)):
            pass
    assert ledger.epsilon("survey", delta=0.0) == pytest.approx(2.0)
    with pytest.raises(privacy.BudgetExceeded):
        ledger.spend("survey", LabelDpEvent(0.1))
    many = events.SelfComposedDpEvent(LabelDpEvent(0.1), 100)
    pure = events.SelfComposedDpEvent(PureDpEvent(0.1), 100)
    labels = privacy.epsilon(many, delta=1e-5, adjacency="replace_label")
    assert labels == privacy.epsilon(pure, delta=1e-5, adjacency="replace_one") < 5


@pytest.mark.parametrize("budget", [{"delta": 1e-5}, {"epsilon": 8.0, "delta": 1e-5}])
@pytest.mark.parametrize("accounting", ["pld", "rdp", "renyi_filter"])
@pytest.mark.parametrize(
    "event",
    [
        GaussianDpEvent(2.0),
        LaplaceDpEvent(2.0),
        PureDpEvent(0.5),
        PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)),
    ],
)
def test_an_account_of_labels_refuses_a_claim_for_examples(event, accounting, budget):
    if accounting == "renyi_filter" and "epsilon" not in budget:
        accounting = "pld"  # the filter needs a budget
    ledger = _ledger(accounting=accounting, **budget)
    with ledger.spend("survey", LabelDpEvent(0.5)):
        pass
    for refused in (ledger.spend, ledger.would_cost):
        with pytest.raises(ValueError, match=r"claim for whole examples.*claim for labels only"):
            refused("survey", event)
    assert ledger.events("survey") == {None: LabelDpEvent(0.5)}


@pytest.mark.parametrize("adjacency", _EXAMPLES)
@pytest.mark.parametrize(
    "event", [LabelDpEvent(0.5), PoissonSampledDpEvent(0.1, LabelDpEvent(0.5))]
)
def test_an_account_of_examples_refuses_a_claim_for_labels(event, adjacency):
    ledger = _ledger(adjacency, epsilon=8.0, delta=1e-5)
    with ledger.spend("survey", GaussianDpEvent(2.0)):
        pass
    with pytest.raises(ValueError, match=r"claim for labels only.*claim for whole examples"):
        ledger.spend("survey", event)
    assert ledger.events("survey") == {None: GaussianDpEvent(2.0)}


def test_epsilons_of_labels_and_examples_are_not_joined():
    ledger = _ledger()
    ledger.register("scans", adjacency="replace_one", unit="respondent")
    with pytest.raises(ValueError, match=r"'replace_label'.*'replace_one'"):
        ledger.total(["survey", "scans"], delta=1e-5)
    with pytest.raises(ValueError, match="'replace_label', not 'add_remove'"):
        ledger.register("survey", adjacency="add_remove", unit="respondent")


def test_no_noise_for_examples_is_calibrated_to_labels():
    with pytest.raises(ValueError, match="labels only"):
        privacy.calibrate_noise(GaussianDpEvent, epsilon=1.0, delta=1e-5, adjacency="replace_label")


def test_the_report_says_what_is_protected():
    ledger = _ledger(epsilon=2.0, delta=0.0)
    with ledger.spend("survey", LabelDpEvent(1.0), label="labels"):
        pass
    assert "protects     labels only: features count as public" in ledger.report_text()
    (account,) = ledger.report()["datasets"]
    shown = verdict(account)
    assert "the label of one respondent" in shown.change and "nothing else" in shown.change
    assert "which of two possible labels a certain respondent had" in shown.meaning


def test_the_event_has_a_text_of_its_own():
    assert events.parse("Label(0.5)") == LabelDpEvent(0.5)
    assert events.from_json(events.to_json(LabelDpEvent(0.5))) == LabelDpEvent(0.5)
    assert LabelDpEvent(0.5) != PureDpEvent(0.5)
    assert math.isinf(
        privacy.epsilon(events.NonPrivateDpEvent(), delta=0.0, adjacency="replace_label")
    )
