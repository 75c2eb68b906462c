"""The ledger: what it charges, what it refuses, what it remembers."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import resource
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from jaxdp.privacy import (
    BudgetExceeded,
    Ledger,
    accounting,
    database,
    ledger_reader,
    store,
)
from jaxdp.privacy import epsilon as epsilon_at
from jaxdp.privacy.events import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    UnprovenDpEvent,
    ZCDpEvent,
    unproven,
)
from jaxdp.version import __version__

DELTA = 1e-5
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))


def register(ledger, name="data", **terms):
    ledger.register(name, **{"adjacency": "add_remove", "unit": "example"} | terms)


def spend(ledger, event, name="data", **kwargs):
    with ledger.spend(name, event, **kwargs) as record:
        return record


def rows(path, query):
    with sqlite3.connect(path) as db:
        result = db.execute(query).fetchall()
    db.close()
    return result


# --- Charging -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_epsilon_is_recomputed_from_all_events(ledger):
    register(ledger)
    assert ledger.epsilon("data", delta=DELTA) == 0.0
    for _ in range(3):
        spend(ledger, STEP)
    spend(ledger, SelfComposedDpEvent(STEP, 97))
    spend(ledger, GaussianDpEvent(8.0), label="evaluation")
    event = ComposedDpEvent([SelfComposedDpEvent(STEP, 100), GaussianDpEvent(8.0)])
    assert ledger.epsilon("data", delta=DELTA) == epsilon_at(event, delta=DELTA)
    assert ledger.epsilon("data", delta=1e-3) < ledger.epsilon("data", delta=DELTA)
    assert epsilon_at(ledger.events("data")[None], delta=DELTA) == ledger.epsilon(
        "data", delta=DELTA
    )
    assert ledger.remaining("data") == math.inf


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
def test_adjacency_of_the_dataset_is_used(ledger, adjacency):
    register(ledger, adjacency=adjacency)
    event = ComposedDpEvent([GaussianDpEvent(3.0), LaplaceDpEvent(5.0)])
    spend(ledger, event)
    assert ledger.epsilon("data", delta=DELTA) == epsilon_at(
        event, delta=DELTA, adjacency=adjacency
    )


@contextlib.contextmanager
def full_disk():
    """The ledger's log cannot be written, nor can its head."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(path):
    with Ledger(path) as ledger:
        register(ledger)
        words = r"ledger '.*' cannot be read or written: .*counts.*Free space .*[0-9] bytes are"
        with (
            full_disk(),
            pytest.raises(OSError, match=words),
            ledger.spend("data", PureDpEvent(1.0)),
        ):
            pytest.fail("the body ran although nothing was reserved")
        assert ledger.epsilon("data", delta=0.0) == 0.0
        with (
            contextlib.ExitStack() as full,
            pytest.raises(OSError, match=words),
            ledger.spend("data", PureDpEvent(2.0)),
        ):
            full.enter_context(full_disk())
        # What a body raised matters more than a mark that cannot be written.
        with (
            contextlib.ExitStack() as full,
            pytest.raises(KeyError),
            ledger.spend("data", PureDpEvent(4.0)),
        ):
            full.enter_context(full_disk())
            raise KeyError
        assert ledger.epsilon("data", delta=0.0) == 6.0
        assert [row["status"] for row in ledger.report()["datasets"][0]["open"]] == [
            "reserved",
            "reserved",
        ]
        spend(ledger, PureDpEvent(1.0))
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    with Ledger(path) as ledger:
        assert ledger.epsilon("data", delta=0.0) == 7.0


def test_an_interrupt_leaves_no_transaction_open(path, monkeypatch):
    """Ctrl-C just after a transaction began, or in it: others are not kept waiting, and the ledger
    can be used."""
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)

    class Interrupting(sqlite3.Connection):
        armed = False

        def execute(self, statement, *values):
            found = super().execute(statement, *values)
            if self.armed and statement.startswith("BEGIN"):
                raise KeyboardInterrupt
            return found

    with contextlib.ExitStack() as opened:
        with monkeypatch.context() as patch:
            patch.setattr(
                sqlite3, "connect", functools.partial(sqlite3.connect, factory=Interrupting)
            )
            ledger = opened.enter_context(Ledger(path))
        other = opened.enter_context(Ledger(path))
        register(ledger)

        Interrupting.armed = True
        with pytest.raises(KeyboardInterrupt):
            spend(ledger, PureDpEvent(1.0))
        Interrupting.armed = False
        spend(other, PureDpEvent(2.0))
        spend(ledger, PureDpEvent(4.0))
        assert other.epsilon("data", delta=0.0) == 6.0


def test_records(path):
    with Ledger(path, run="run-7") as ledger:
        register(ledger)
        record = spend(ledger, STEP, label="epoch 3", partition="north")
    assert (record.dataset, record.event, record.replay) == ("data", STEP, False)
    ((spend_id, partition, label, status, run, version, reserved, finished),) = rows(
        path,
        "SELECT id, partition, label, status, run, version, reserved_at, finished_at FROM spends",
    )
    assert (spend_id, partition, label, status, run) == (
        record.id,
        "north",
        "epoch 3",
        "committed",
        "run-7",
    )
    assert version == __version__
    assert reserved <= finished and reserved.endswith("+00:00")


# --- Budgets ------------------------------------------------------------------------------------


def test_budget_is_checked_before_the_body_runs(ledger):
    register(ledger, epsilon=1.0, delta=0.0)
    for _ in range(10):  # 0.1 ten times is 1.0000000000000002 in some orders of addition.
        spend(ledger, PureDpEvent(0.1))
    assert ledger.remaining("data") == pytest.approx(0.0, abs=1e-12)
    ran = []
    with (
        pytest.raises(BudgetExceeded, match="'data'") as error,
        ledger.spend("data", PureDpEvent(0.01)),
    ):
        ran.append(True)
    assert not ran
    assert error.value.dataset == "data"
    assert error.value.budget == (1.0, 0.0)
    assert error.value.would_spend == pytest.approx(1.01)
    assert "charged" in str(error.value) and "calibrate_noise" in str(error.value)
    assert ledger.epsilon("data") == pytest.approx(1.0)
    spend(ledger, NoOpDpEvent())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accounting_name", "budget"), [("pld", 0.7), ("rdp", 1.0)], ids=["pld", "rdp"]
)
def test_a_loop_spends_exactly_the_budget(ledger, accounting_name, budget):
    register(ledger, epsilon=budget, delta=DELTA, accounting=accounting_name)
    steps = 0
    with pytest.raises(BudgetExceeded):
        while True:
            spend(ledger, STEP)
            steps += 1
    assert steps > 3
    method = "auto" if accounting_name == "pld" else "rdp"
    assert epsilon_at(SelfComposedDpEvent(STEP, steps), delta=DELTA, method=method) <= budget
    assert epsilon_at(SelfComposedDpEvent(STEP, steps + 1), delta=DELTA, method=method) > budget
    assert ledger.epsilon("data") <= budget


@pytest.mark.slow
def test_a_loop_computes_few_plds(ledger):
    before = accounting.epsilon_of_leaves.cache_info().misses
    register(ledger, epsilon=2.0, delta=DELTA)
    large, small = (
        SelfComposedDpEvent(STEP, 900),
        PoissonSampledDpEvent(0.011, GaussianDpEvent(1.2)),
    )
    spend(ledger, large)
    with pytest.raises(BudgetExceeded):
        for index in range(10_000):
            spend(ledger, STEP if index % 3 else small)
    assert ledger.report()["datasets"][0]["spends"][1]["spends"] > 100
    assert accounting.epsilon_of_leaves.cache_info().misses - before < 60


def test_budgets_never_change_quietly(ledger):
    register(ledger, epsilon=1.0, delta=DELTA)
    register(ledger, epsilon=1, delta=DELTA)
    for other in ({"epsilon": 2.0, "delta": DELTA}, {"epsilon": 1.0, "delta": 1e-6}, {}):
        with pytest.raises(ValueError, match="already registered"):
            register(ledger, **other)
    with pytest.raises(ValueError, match="unit 'example', not 'user'"):
        ledger.register("data", adjacency="add_remove", unit="user", epsilon=1.0, delta=DELTA)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"adjacency": "swap"}, "adjacency"),
        ({"unit": ""}, "unit"),
        ({"epsilon": 1.0}, "delta"),
        ({"epsilon": 0.0, "delta": 0.1}, "epsilon"),
        ({"epsilon": math.inf, "delta": 0.1}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"accounting": "gdp"}, "accounting"),
        ({"accounting": "renyi_filter", "epsilon": 1.0, "delta": 0.0}, "delta > 0"),
        ({"accounting": "renyi_filter"}, "budget"),
        (
            {"accounting": "renyi_filter", "epsilon": 1.0, "delta": 1e-5, "renyi_order": 1.5},
            "larger order",
        ),
        ({"renyi_order": 8.0}, "renyi_filter"),
        ({"name": ""}, "name"),
    ],
)
def test_impossible_terms_are_refused(ledger, terms, words):
    with pytest.raises(ValueError, match=words):
        register(ledger, **terms)
    assert ledger.report()["datasets"] == []


def test_bad_spends_charge_nothing(ledger):
    register(ledger, delta=DELTA)
    register(ledger, "pure", delta=0.0, accounting="rdp")
    for event, kwargs, words in (
        (STEP, {"name": "missing"}, "not registered"),
        (STEP, {"partition": ""}, "partition"),
        (STEP, {"token": ""}, "token"),
        (STEP, {"label": None}, "label"),
        (GaussianDpEvent(-1.0), {}, "noise_multiplier"),
        (RandomizedResponseDpEvent(0.5, 4), {}, "no accounting rule"),
        (
            TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 1.0),
            {"name": "pure"},
            "no accounting rule",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            spend(ledger, event, **kwargs)
    spend(ledger, ZCDpEvent(0.1))
    assert ledger.epsilon("data") == epsilon_at(ZCDpEvent(0.1), delta=DELTA)
    # An event without an RDP rule can join one without a PLD rule.
    spend(ledger, TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 1.0))
    assert ledger.epsilon("data") > epsilon_at(ZCDpEvent(0.1), delta=DELTA)
    with pytest.raises(ValueError, match="not registered"):
        ledger.epsilon("missing")


def test_delta_must_come_from_somewhere(ledger):
    register(ledger)
    with pytest.raises(ValueError, match="delta"):
        ledger.epsilon("data")


# --- Unproven and non-private releases ----------------------------------------------------------


def test_unproven_releases_are_never_a_number(ledger):
    register(ledger, delta=DELTA)
    spend(ledger, GaussianDpEvent(2.0))
    spend(ledger, unproven("published without a proof"))
    assert ledger.epsilon("data") == math.inf
    assert ledger.proven_epsilon("data") == epsilon_at(GaussianDpEvent(2.0), delta=DELTA)
    (entry,) = ledger.report()["datasets"]
    assert entry["headline"] == "inf (empirical only)"
    text = ledger.report_text()
    assert text.index("inf (empirical only)") < text.index("proven part")
    assert "published without a proof" in text


def test_a_budget_stands_for_proofs(ledger):
    register(ledger, epsilon=1.0, delta=0.0)
    with pytest.raises(BudgetExceeded, match="allow_unproven"):
        spend(ledger, ComposedDpEvent([PureDpEvent(0.1), unproven("why")]))
    assert ledger.epsilon("data") == 0.0
    register(ledger, "open", epsilon=1.0, delta=0.0, allow_unproven=True)
    spend(ledger, unproven("why"), "open")
    spend(ledger, PureDpEvent(0.9), "open")
    with pytest.raises(BudgetExceeded, match="budget epsilon 1"):
        spend(ledger, PureDpEvent(0.2), "open")
    assert ledger.epsilon("open") == math.inf
    assert ledger.remaining("open") == pytest.approx(0.1)


def test_non_private_is_infinite_and_over_every_budget(ledger):
    register(ledger, delta=DELTA)
    spend(ledger, NonPrivateDpEvent())
    assert ledger.epsilon("data") == ledger.proven_epsilon("data") == math.inf
    assert ledger.report()["datasets"][0]["headline"] == "inf"
    for name in ("pld", "rdp", "renyi_filter"):
        register(ledger, name, epsilon=100.0, delta=DELTA, accounting=name)
        with pytest.raises(BudgetExceeded):
            spend(ledger, GaussianDpEvent(0.0), name)


# --- Partitions ---------------------------------------------------------------------------------


def test_disjoint_partitions_compose_in_parallel(ledger):
    register(ledger)
    spend(ledger, PureDpEvent(0.1))
    spend(ledger, PureDpEvent(0.2), partition="a")
    spend(ledger, PureDpEvent(0.4), partition="b")
    spend(ledger, PureDpEvent(0.3), partition="a")
    assert ledger.epsilon("data", delta=0.0, partition="a") == pytest.approx(0.6)
    assert ledger.epsilon("data", delta=0.0, partition="b") == pytest.approx(0.5)
    assert ledger.epsilon("data", delta=0.0, partition="unseen") == pytest.approx(0.1)
    assert ledger.epsilon("data", delta=0.0) == pytest.approx(0.6)
    assert set(ledger.events("data")) == {None, "a", "b"}


def test_the_worst_partition_depends_on_delta(ledger):
    """Many small releases against one large one: neither history covers the other, both must be
    computed."""
    register(ledger)
    many, one = SelfComposedDpEvent(PureDpEvent(0.02), 100), PureDpEvent(1.0)
    spend(ledger, many, partition="many")
    spend(ledger, one, partition="one")
    assert ledger.epsilon("data", delta=0.0) == pytest.approx(2.0)
    assert ledger.epsilon("data", delta=1e-2) == pytest.approx(
        epsilon_at(one, delta=1e-2), rel=1e-6
    )
    assert epsilon_at(many, delta=1e-2) < epsilon_at(one, delta=1e-2)


def test_budget_holds_in_every_partition(ledger):
    register(ledger, epsilon=1.0, delta=0.0)
    spend(ledger, PureDpEvent(0.6), partition="a")
    spend(ledger, PureDpEvent(0.9), partition="b")
    with pytest.raises(BudgetExceeded):
        spend(ledger, PureDpEvent(0.2))  # Fits with a, not with b.
    spend(ledger, PureDpEvent(0.1))
    with pytest.raises(BudgetExceeded):
        spend(ledger, PureDpEvent(0.1), partition="b")
    spend(ledger, PureDpEvent(0.3), partition="a")
    assert ledger.epsilon("data") == pytest.approx(1.0)
    assert ledger.remaining("data", partition="c") == pytest.approx(0.9)


def test_an_unproven_release_on_a_partition_shows_in_the_headline(ledger):
    register(ledger, delta=DELTA)
    spend(ledger, PureDpEvent(0.5), partition="a")
    spend(ledger, unproven("why"), partition="b")
    assert ledger.epsilon("data") == math.inf
    assert ledger.epsilon("data", partition="a") <= 0.5
    assert ledger.proven_epsilon("data") <= 0.5


# --- Tokens -------------------------------------------------------------------------------------


def test_a_token_is_paid_once(ledger):
    register(ledger, epsilon=1.0, delta=0.0)
    with pytest.raises(KeyError), ledger.spend("data", PureDpEvent(0.8), token="step 1") as first:
        raise KeyError
    again = spend(ledger, PureDpEvent(0.8), token="step 1")
    assert dataclasses.replace(again, replay=False) == first
    assert again.replay and not first.replay
    assert ledger.epsilon("data") == 0.8
    assert ledger.report()["datasets"][0]["open"] == []  # The replay finished what had failed.


def test_a_token_stands_for_one_release(ledger):
    register(ledger, delta=0.0)
    register(ledger, "other", delta=0.0)
    spend(ledger, ComposedDpEvent([PureDpEvent(0.8), LaplaceDpEvent(2)]), token="t", partition="a")
    # Written differently, but equal.
    assert spend(
        ledger, ComposedDpEvent([LaplaceDpEvent(2.0), PureDpEvent(0.8)]), token="t", partition="a"
    ).replay
    with pytest.raises(ValueError, match="fresh"):
        spend(ledger, PureDpEvent(0.1), token="t", partition="a")
    with pytest.raises(ValueError, match="fresh"):
        spend(ledger, ComposedDpEvent([PureDpEvent(0.8), LaplaceDpEvent(2.0)]), token="t")
    assert not spend(ledger, PureDpEvent(0.8), "other", token="t").replay
    assert ledger.epsilon("data") == pytest.approx(1.3)


def test_a_token_is_paid_once_by_all(ledger):
    for name in ("a", "b"):
        register(ledger, name, epsilon=1.0, delta=0.0)
    with (
        pytest.raises(KeyError),
        ledger.spend_all([("a", PureDpEvent(0.8)), ("b", PureDpEvent(0.6))], token="t"),
    ):
        raise KeyError
    with ledger.spend_all([("a", PureDpEvent(0.8)), ("b", PureDpEvent(0.6))], token="t") as again:
        assert [spend.replay for spend in again] == [True, True]
    assert (ledger.epsilon("a"), ledger.epsilon("b")) == (0.8, 0.6)
    with pytest.raises(BudgetExceeded), ledger.spend_all([("a", PureDpEvent(0.8))], token="u"):
        raise AssertionError
    # the second would be taken for a retry of the first
    twice = [
        ("a", PureDpEvent(0.1)),
        ("a", PureDpEvent(0.1)),
    ]
    with (
        pytest.raises(ValueError, match="each dataset pays once"),
        ledger.spend_all(twice, token="v"),
    ):
        raise AssertionError
    assert ledger.epsilon("a") == 0.8


# --- The Renyi filter ---------------------------------------------------------------------------


def test_renyi_filter_stops_at_the_bound(ledger):
    register(ledger, epsilon=2.0, delta=DELTA, accounting="renyi_filter", renyi_order=12.0)
    bound = accounting.renyi_bound(2.0, DELTA, 12.0)
    assert ledger.epsilon("data") == 0.0 and ledger.remaining("data") == 2.0
    spent, sigma = 0.0, 20.0
    with pytest.raises(BudgetExceeded, match="Renyi filter at order 12"):
        while True:
            event = GaussianDpEvent(sigma)
            spend(ledger, event)
            spent += 12.0 / (2 * sigma**2)
            sigma = max(2.0, sigma * 0.9)  # "Adaptive": each event is new.
    assert spent <= bound < spent + 12.0 / (2 * sigma**2)
    assert ledger.remaining("data") == pytest.approx(2.0 * (1 - spent / bound), rel=1e-6)
    # What holds under adaptive choice is the bound, whatever was spent of it.
    assert ledger.epsilon("data") == pytest.approx(2.0, rel=1e-12)
    assert ledger.epsilon("data", delta=1e-7) == pytest.approx(
        accounting.renyi_epsilon(bound, 1e-7, 12.0)
    )
    assert ledger.epsilon("data", delta=0.0) == math.inf


def test_renyi_filter_charges_replacement_fourfold(ledger):
    for adjacency in ("add_remove", "replace_one"):
        register(
            ledger,
            adjacency,
            adjacency=adjacency,
            epsilon=2.0,
            delta=DELTA,
            accounting="renyi_filter",
        )
        spend(ledger, GaussianDpEvent(20.0), adjacency)
    used = [2.0 - ledger.remaining(name) for name in ("add_remove", "replace_one")]
    assert used[1] == pytest.approx(4 * used[0], rel=1e-6)


def test_renyi_filter_default_order_admits_most_gaussians():
    steps = {}
    for order in (None, 2.0, 40.0):
        with Ledger.in_memory() as ledger:
            try:
                register(
                    ledger, epsilon=2.0, delta=DELTA, accounting="renyi_filter", renyi_order=order
                )
            except ValueError:
                steps[order] = 0
                continue
            steps[order] = 0
            with pytest.raises(BudgetExceeded):
                while True:
                    spend(ledger, GaussianDpEvent(20.0))
                    steps[order] += 1
    assert steps[None] > max(steps[2.0], steps[40.0]) > 0
    assert epsilon_at(SelfComposedDpEvent(GaussianDpEvent(20.0), steps[None]), delta=DELTA) <= 2.0


def test_renyi_filter_in_partitions(ledger):
    register(ledger, epsilon=2.0, delta=DELTA, accounting="renyi_filter", renyi_order=12.0)
    for partition in ("a", "b", "c"):
        spend(ledger, GaussianDpEvent(4.0), partition=partition)
    assert ledger.remaining("data") == pytest.approx(
        2.0 * (1 - 12 / 32 / accounting.renyi_bound(2.0, DELTA, 12.0))
    )


# --- Several accounts at once -------------------------------------------------------------------


def accounts(ledger, budgets, **terms):
    for name, epsilon in budgets.items():
        register(ledger, name, epsilon=epsilon, **{"delta": 0.0} | terms)
    return list(budgets)


def spend_all(ledger, names, event, **kwargs):
    with ledger.spend_all([(name, event) for name in names], **kwargs) as records:
        return records


def test_all_accounts_pay(path):
    with Ledger(path) as ledger, Ledger(path) as other:
        names = accounts(ledger, {"a": 1.0, "b": 2.0, "c": None})
        with ledger.spend_all(
            [("c", PureDpEvent(1.0)), ("a", PureDpEvent(0.25))], label="both"
        ) as records:
            assert other.epsilon("c", delta=0.0) == 1.0 and other.epsilon("a") == 0.25
            assert rows(path, "SELECT status FROM spends") == [("reserved",)] * 2
        assert [(r.dataset, r.event, r.replay) for r in records] == [
            ("c", PureDpEvent(1.0), False),
            ("a", PureDpEvent(0.25), False),
        ]
        assert rows(path, "SELECT id, status, label FROM spends") == [
            (r.id, "committed", "both") for r in records
        ]
        assert [ledger.epsilon(name, delta=0.0) for name in names] == [0.25, 0.0, 1.0]


BUDGETS = {  # terms, an event, and budgets that hold it and do not
    "pure": ({}, PureDpEvent(1.0), 1.0, 0.99),
    "pld": (
        {"delta": DELTA},
        GaussianDpEvent(4.0),
        1.01 * epsilon_at(GaussianDpEvent(4.0), delta=DELTA),
        0.5,
    ),
    "renyi": ({"delta": DELTA, "accounting": "renyi_filter"}, GaussianDpEvent(4.0), 2.0, 0.5),
}


@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("poor", [0, 1, 2])
def test_if_one_account_cannot_pay_none_does(path, kind, poor):
    terms, event, enough, too_little = BUDGETS[kind]
    with Ledger(path) as ledger:
        names = accounts(
            ledger, {f"{i}": too_little if i == poor else enough for i in range(3)}, **terms
        )
        ran = []
        requests = [(name, event) for name in names]
        with pytest.raises(BudgetExceeded, match=f"'{poor}'") as error, ledger.spend_all(requests):
            ran.append(True)
        assert error.value.dataset == f"{poor}" and not ran
        assert (
            rows(path, "SELECT count(*) FROM spends")
            == rows(path, "SELECT count(*) FROM totals")
            == [(0,)]
        )
        assert all(ledger.epsilon(name) == 0.0 for name in names)
        rich = [name for name in names if name != f"{poor}"]
        first, second = spend_all(ledger, rich, event)  # the refusal left nothing behind
        assert second.id == first.id + 1
        assert all(0 < ledger.epsilon(name) <= enough for name in rich)


def test_an_account_that_is_named_twice_pays_twice(ledger):
    names = accounts(ledger, {"a": 1.0, "b": 1.0})
    spend_all(ledger, ["a", "b", "a"], PureDpEvent(0.3))
    assert [ledger.epsilon(name) for name in names] == pytest.approx([0.6, 0.3])
    with pytest.raises(BudgetExceeded, match="'a'"):  # enough for one of the two
        spend_all(ledger, ["b", "a", "a"], PureDpEvent(0.4))
    assert [ledger.epsilon(name) for name in names] == pytest.approx([0.6, 0.3])


def test_an_account_may_be_named_more_often_than_verdicts_are_remembered(ledger):
    """And each verdict needs a PLD, since RDP does not allow the whole."""
    times = 100
    event = GaussianDpEvent(8.0 * math.sqrt(times))
    accounts(
        ledger,
        {"a": 1.001 * epsilon_at(SelfComposedDpEvent(event, times), delta=DELTA)},
        delta=DELTA,
    )
    spend_all(ledger, ["a"] * times, event)
    assert ledger.epsilon("a") == pytest.approx(
        epsilon_at(GaussianDpEvent(8.0), delta=DELTA), rel=1e-3
    )
    with pytest.raises(BudgetExceeded):
        spend_all(ledger, ["a"] * 10, event)


def test_bad_requests_charge_no_account(ledger):
    accounts(ledger, {"a": 1.0, "b": 1.0})
    good = ("a", PureDpEvent(0.1))
    for requests, words in [
        ([good, ("unheard of", PureDpEvent(0.1))], "'unheard of'"),
        ([good, ("b", PureDpEvent(math.nan))], "nan"),
        ([good, ("b", "an event")], "event"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words), ledger.spend_all(requests):
            raise AssertionError("the body ran")
    with pytest.raises(ValueError, match="label"), ledger.spend_all([good], label=3):
        raise AssertionError("the body ran")
    assert ledger.epsilon("a") == ledger.epsilon("b") == 0.0
    with ledger.spend_all([]) as records:
        assert records == ()


def test_a_raising_body_leaves_all_accounts_charged(ledger):
    names = accounts(ledger, {"a": 1.0, "b": 1.0})
    requests = [(name, PureDpEvent(0.5)) for name in names]
    with pytest.raises(KeyError, match="body"), ledger.spend_all(requests, label="broken"):
        raise KeyError("body")
    assert [ledger.epsilon(name) for name in names] == [0.5, 0.5]
    for entry in ledger.report()["datasets"]:
        assert [(row["status"], row["label"]) for row in entry["open"]] == [("failed", "broken")]
        assert entry["spends"][0]["open"] == 1


def test_threads_that_name_accounts_in_any_order_spend_both_budgets_exactly(path):
    with Ledger(path) as ledger:
        names = accounts(ledger, {"a": 1.0, "b": 1.0})
        spent = []

        def work(order):
            with contextlib.suppress(BudgetExceeded):
                while True:
                    spent.append(spend_all(ledger, order, PureDpEvent(0.05)))

        threads = [
            threading.Thread(target=work, args=(order,)) for order in (names, names[::-1]) * 2
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(spent) == 20
        assert [ledger.epsilon(name) for name in names] == pytest.approx([1.0, 1.0])


# --- The file -----------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent.parent / "golden" / "ledger_v1.sqlite"


def write_golden(path):
    """Writes the ledger that tests/golden/ledger_v1.sqlite holds; run it once per schema version,
    then never again."""
    with Ledger(path, run="golden") as ledger:
        ledger.register(
            "cifar10/train", adjacency="add_remove", unit="example", epsilon=8.0, delta=1e-5
        )
        spend(
            ledger, SelfComposedDpEvent(STEP, 2000), "cifar10/train", label="dp-sgd", token="run 1"
        )
        spend(ledger, STEP, "cifar10/train", label="one more")
        spend(ledger, GaussianDpEvent(4.0), "cifar10/train", partition="a", label="histogram")
        ledger.register("hospital", adjacency="replace_one", unit="patient", epsilon=1.0, delta=0.0)
        spend(ledger, LaplaceDpEvent(8.0), "hospital", label="temperature")
        ledger.register("stream", adjacency="zero_out", unit="image", delta=1e-6, accounting="rdp")
        spend(ledger, unproven("published attack only"), "stream", label="adapters")
        spend(ledger, ComposedDpEvent([ZCDpEvent(0.1), PureDpEvent(0.25)]), "stream", label="batch")
        ledger.register(
            "adaptive",
            adjacency="add_remove",
            unit="user",
            epsilon=2.0,
            delta=1e-5,
            accounting="renyi_filter",
        )
        with (
            pytest.raises(KeyError),
            ledger.spend("adaptive", GaussianDpEvent(10.0), label="broken"),
        ):
            raise KeyError


def test_golden_file_of_version_1_means_the_same(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(GOLDEN.read_bytes())
    with Ledger(path) as ledger:
        report = {entry["name"]: entry for entry in ledger.report()["datasets"]}
        assert ledger.epsilon("cifar10/train", partition="a") == pytest.approx(2.7909, rel=2e-3)
        assert ledger.epsilon("hospital") == 0.25
        assert ledger.epsilon("stream") == math.inf
        assert ledger.proven_epsilon("stream") == pytest.approx(2.3394, rel=2e-3)
        assert ledger.epsilon("adaptive") == pytest.approx(2.0)
        assert report["adaptive"]["renyi_order"] == 10.2
        assert [row["status"] for row in report["adaptive"]["open"]] == ["failed"]
        assert spend(ledger, SelfComposedDpEvent(STEP, 2000), "cifar10/train", token="run 1").replay
        with pytest.raises(BudgetExceeded):
            spend(ledger, LaplaceDpEvent(1.0), "hospital")
        spend(ledger, LaplaceDpEvent(8.0), "hospital")
        assert ledger.epsilon("hospital") == 0.5


def test_schema_of_version_2_is_frozen(tmp_path):
    """A change of the schema needs a new SCHEMA_VERSION, a migration and another golden file."""
    path, golden = tmp_path / "ledger.sqlite", tmp_path / "golden.sqlite"
    golden.write_bytes(GOLDEN.with_name("ledger_v2.sqlite").read_bytes())
    write_golden(path)
    for query in (
        "SELECT type, name, sql FROM sqlite_master",
        "PRAGMA user_version",
        "PRAGMA application_id",
    ):
        assert rows(path, query) == rows(golden, query)
    for query in (
        "SELECT json FROM events",
        "SELECT partition, label, token, status, run FROM spends",
    ):
        assert rows(path, query) == rows(golden, query)


def test_a_newer_schema_is_refused(path):
    Ledger(path).close()
    rows(path, f"PRAGMA user_version = {store.SCHEMA_VERSION + 1}")
    with pytest.raises(ValueError, match=r"schema version 3.*Upgrade jaxdp"):
        Ledger(path)


def test_other_files_are_refused_untouched(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be looked at as one\n" * 100)
    other = tmp_path / "other.sqlite"
    rows(other, "CREATE TABLE t (x)")
    for path in (text, other):
        before = path.read_bytes()
        with pytest.raises(ValueError, match=r"ledger"):
            Ledger(path)
        assert path.read_bytes() == before
    with pytest.raises(ValueError, match="cannot be opened"):
        Ledger(tmp_path)
    with pytest.raises(ValueError, match="directory that does not exist"):
        Ledger(tmp_path / "missing" / "ledger.sqlite")


def test_durability_settings(path):
    with contextlib.closing(store.Store(os.fspath(path))) as opened:
        assert opened.db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert opened.db.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL


def test_an_in_memory_ledger_refuses_to_be_forked(ledger, monkeypatch):
    register(ledger)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="forked"):
        ledger.epsilon("data", delta=DELTA)


@pytest.mark.slow
def test_many_spends_answer_at_once(path):
    with Ledger(path) as ledger:
        register(ledger, delta=DELTA)
        spend(ledger, STEP, label="step 0")
        with sqlite3.connect(path) as db:
            db.execute(
                "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < "
                "199999) INSERT INTO spends (dataset, partition, event, label, status, run, "
                "version, reserved_at, link) SELECT 1, '', 1, 'step ' || i, 'committed', 'bulk', "
                "'0', '2030-01-01', 'none' FROM n"
            )
            db.execute("UPDATE totals SET spends = (SELECT count(*) FROM spends)")
        db.close()
        start = time.process_time()
        value = ledger.epsilon("data")
        report = ledger.report()
        with pytest.raises(ValueError, match="fresh"):
            spend(ledger, STEP, token="t") and spend(ledger, PureDpEvent(1.0), token="t")
        elapsed = time.process_time() - start
    assert report["datasets"][0]["spends"][0]["spends"] == 200_000
    assert value == epsilon_at(SelfComposedDpEvent(STEP, 200_000), delta=DELTA)
    # Processor time, about 0.5 s; a scan of all rows per question would take longer.
    assert elapsed < 1.5


@pytest.mark.slow
def test_report_is_json_and_text(ledger):
    register(ledger, "big budget", epsilon=8.0, delta=DELTA)
    register(ledger, "unused", adjacency="replace_one", unit="user")
    for index in range(5):
        spend(ledger, STEP, "big budget", label=f"step {index}")
    report = json.loads(json.dumps(ledger.report(), allow_nan=False))
    first, second = report["datasets"]
    assert (first["name"], first["budget"], first["adjacency"]) == ("big budget", 8.0, "add_remove")
    assert first["spends"][0]["event"]["type"] == "PoissonSampled"
    assert (second["headline"], second["remaining"], second["spends"]) == ("0", None, [])
    text = ledger.report_text()
    for words in (
        "add_remove, unit example",
        "epsilon 8 at delta 1e-05",
        "step 0 .. step 4",
        "PoissonSampled(0.01, Gaussian(1))",
    ):
        assert words in text
    assert UnprovenDpEvent.__name__ not in text


def test_a_report_is_of_one_instant(tmp_path, monkeypatch):
    """Another process spends while a slow PLD is computed. A report that read the numbers after
    the rows would hold both instants."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger, Ledger(path) as other:
        register(ledger, epsilon=8.0, delta=DELTA)
        spend(ledger, GaussianDpEvent(4.0))
        before = ledger.report()
        original = ledger_reader.largest_epsilon

        def slow(*args):
            spend(other, GaussianDpEvent(4.0))
            return original(*args)

        monkeypatch.setattr(ledger_reader, "largest_epsilon", slow)
        during = ledger.report()
        monkeypatch.undo()
        assert during == before
        after = ledger.report()
    assert after["head"]["spend"] > before["head"]["spend"]
    assert after["datasets"][0]["proven_epsilon"] > before["datasets"][0]["proven_epsilon"]
