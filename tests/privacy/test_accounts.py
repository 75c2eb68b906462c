"""Reservations, accounts, questions before spending, holds, and totals over several datasets."""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import sqlite3
import threading
from pathlib import Path

import pytest

from jaxdp.privacy import (
    Account,
    BudgetExceeded,
    Hold,
    Ledger,
    accounting,
    compositions,
    holds,
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
    ZCDpEvent,
    to_json,
    unproven,
)

DELTA = 1e-5
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
TENTH = PureDpEvent(0.1)


def times(count, event=TENTH):
    return SelfComposedDpEvent(event, count)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to."""
    now = [1e9]
    monkeypatch.setattr(holds, "clock", lambda: now[0])
    return now


@pytest.fixture
def plds():
    """A function that returns how many epsilons needed to be computed."""
    accounting.epsilon_of_leaves.cache_clear()
    return lambda: accounting.epsilon_of_leaves.cache_info().misses


def register(ledger, name="data", **terms):
    ledger.register(
        name, **{"adjacency": "add_remove", "unit": "example", "epsilon": 1.0, "delta": 0.0} | terms
    )
    return ledger.account(name)


def spend(account, event=TENTH, **kwargs):
    with account.spend(event, **kwargs) as record:
        return record


def rows(path, query):
    with sqlite3.connect(path) as db:
        result = db.execute(query).fetchall()
    db.close()
    return result


# --- Reservations -------------------------------------------------------------------------------


def test_a_spend_charges_at_the_call(ledger):
    register(ledger)
    ledger.spend("data", TENTH, label="never entered")
    assert ledger.epsilon("data") == pytest.approx(0.1)
    ledger.spend_all([("data", TENTH), ("data", TENTH)])
    assert ledger.epsilon("data") == pytest.approx(0.3)
    opened = ledger.report()["datasets"][0]["open"]
    assert [(row["status"], row["label"]) for row in opened] == [
        ("reserved", label) for label in ("never entered", "", "")
    ]
    with pytest.raises(BudgetExceeded):
        ledger.spend("data", PureDpEvent(0.8))
    with pytest.raises(ValueError, match="not registered"):
        ledger.spend("missing", TENTH)


def test_a_reservation_is_entered_once(ledger):
    register(ledger)
    for reservation in (ledger.spend("data", TENTH), ledger.spend_all([("data", TENTH)])):
        with reservation as yielded:
            assert yielded == reservation.charged
        with pytest.raises(RuntimeError, match=r"entered before.*Call spend again"), reservation:
            pytest.fail("a second body ran on one charge")
    assert ledger.report()["datasets"][0]["open"] == []
    assert ledger.epsilon("data") == pytest.approx(0.2)


def test_a_reservation_may_be_entered_later(path):
    with Ledger(path) as ledger:
        register(ledger)
        reservation = ledger.spend("data", TENTH)
        assert rows(path, "SELECT status FROM spends") == [("reserved",)]
        with pytest.raises(KeyError), reservation:
            raise KeyError
        assert rows(path, "SELECT status FROM spends") == [("failed",)]


# --- Accounts -----------------------------------------------------------------------------------


def test_an_account_is_a_value(ledger):
    register(ledger, delta=DELTA)
    register(ledger, "free", adjacency="zero_out", epsilon=None, delta=None)
    account = ledger.account("data", label="run 1")
    assert (account.ledger, account.name, account.label, account.held) == (
        ledger,
        "data",
        "run 1",
        None,
    )
    assert account == Account(ledger, "data", "run 1") != ledger.account("data")
    assert len({account, Account(ledger, "data", "run 1")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        account.label = "run 2"
    assert (account.adjacency, account.delta) == ("add_remove", DELTA)
    assert (ledger.account("free").adjacency, ledger.account("free").delta) == ("zero_out", None)
    with pytest.raises(ValueError, match="'missing' is not registered"):
        ledger.account("missing")
    with pytest.raises(ValueError, match="label must be a string, got 3"):
        ledger.account("data", label=3)


def test_an_account_does_what_the_ledger_does(ledger):
    register(ledger, delta=DELTA)
    account = ledger.account("data")
    record = spend(account, GaussianDpEvent(8.0), token="t", partition="north")
    assert (
        not record.replay
        and spend(account, GaussianDpEvent(8.0), token="t", partition="north").replay
    )
    assert account.paid("t") and not account.paid("u")
    assert (
        account.epsilon() == ledger.epsilon("data") == epsilon_at(GaussianDpEvent(8.0), delta=DELTA)
    )
    assert account.epsilon(delta=1e-3) == ledger.epsilon("data", delta=1e-3)
    assert account.remaining() == ledger.remaining("data")
    assert set(ledger.events("data")) == {"north"}
    assert account.would_cost(STEP) == ledger.would_cost("data", STEP)
    with pytest.raises(BudgetExceeded):
        account.check(PureDpEvent(2.0))


def test_labels_of_accounts(ledger):
    register(ledger, epsilon=None)
    for label, kwargs in (
        ("", {}),
        ("", {"label": "epoch"}),
        ("run 1", {}),
        ("run 1", {"label": "epoch"}),
    ):
        ledger.account("data", label=label).spend(TENTH, **kwargs)
    ledger.spend_all(
        [(ledger.account("data", label="run 2"), TENTH), ("data", TENTH)], label="both"
    )
    labels = [row["label"] for row in ledger.report()["datasets"][0]["open"]]
    assert labels == ["", "epoch", "run 1", "run 1: epoch", "run 2: both", "both"]


def test_accounts_of_another_ledger_are_refused(ledger):
    with Ledger.in_memory() as other:
        for each in (ledger, other):
            register(each)
        stranger = other.account("data")
        for ask in (ledger.spend_all, ledger.check, ledger.hold):
            with pytest.raises(ValueError, match=r"'data' belongs to .* ledger\.account\('data'\)"):
                ask([("data", TENTH), (stranger, TENTH)])
        with pytest.raises(ValueError, match="belongs to"):
            # Otherwise the ledger of the hold would pay in place of the account's.
            ledger.hold([("data", TENTH)]).account(stranger)
        with pytest.raises(ValueError, match="belongs to"):
            ledger.spend(stranger, TENTH)
        assert ledger.epsilon("data") == other.epsilon("data") == 0.0


# --- Questions before spending ------------------------------------------------------------------


def test_paid(ledger):
    register(ledger)
    register(ledger, "other")
    assert not ledger.paid("data", "t")
    ledger.spend("data", TENTH, token="t")
    assert (
        ledger.paid("data", "t") and not ledger.paid("data", "u") and not ledger.paid("other", "t")
    )
    with pytest.raises(ValueError, match="'missing' is not registered"):
        ledger.paid("missing", "t")
    with pytest.raises(ValueError, match="token must be a non-empty string"):
        ledger.paid("data", "")


@pytest.mark.slow
@pytest.mark.parametrize("accounting_name", ["pld", "rdp", "renyi_filter"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_would_cost_is_epsilon_after_the_spend(ledger, accounting_name, adjacency):
    account = register(
        ledger, epsilon=8.0, delta=DELTA, accounting=accounting_name, adjacency=adjacency
    )
    for event in (times(100, STEP), GaussianDpEvent(10.0)):
        if adjacency == "replace_one":
            event = GaussianDpEvent(20.0)
        for delta in (None, 1e-3):
            costs = account.would_cost(event, delta=delta)
            assert costs == account.would_cost(event, delta=delta) > 0  # asking spends nothing
        spend(account, event)
        assert account.epsilon(delta=1e-3) == costs
    assert len(ledger.report()["datasets"][0]["spends"]) <= 2


def test_would_cost_of_partitions(ledger):
    register(ledger, epsilon=None)
    ledger.spend("data", TENTH)
    ledger.spend("data", times(3), partition="a")
    for event, partition in ((times(2), "b"), (times(5), "b"), (TENTH, "a"), (TENTH, None)):
        costs = ledger.would_cost("data", event, partition=partition)
        ledger.spend("data", event, partition=partition)
        assert ledger.epsilon("data", partition=partition) == costs


def test_would_cost_refuses_what_a_spend_refuses(ledger):
    register(ledger)
    register(ledger, "no delta", epsilon=None, delta=None)
    for name, event, words in (
        ("missing", TENTH, "not registered"),
        ("no delta", TENTH, "delta is needed"),
        ("data", GaussianDpEvent(-1.0), "noise_multiplier"),
        ("data", RandomizedResponseDpEvent(0.5, 4), "no accounting rule"),
    ):
        with pytest.raises(ValueError, match=words):
            ledger.would_cost(name, event)
        if name != "no delta":
            with pytest.raises(ValueError, match=words):
                ledger.check([(name, event)])
    assert ledger.would_cost("data", unproven("why")) == math.inf
    assert ledger.would_cost("data", PureDpEvent(5.0)) == 5.0  # over the budget: check says so


def test_would_cost_of_what_a_renyi_filter_refuses_is_more_than_its_bound(ledger):
    account = register(ledger, delta=DELTA, accounting="renyi_filter")
    assert account.would_cost(GaussianDpEvent(20.0)) == pytest.approx(1.0)
    assert account.would_cost(GaussianDpEvent(1.0)) > 2.0
    with pytest.raises(BudgetExceeded):
        account.check(GaussianDpEvent(1.0))


def test_check_asks_for_the_sum_and_changes_nothing(path):
    with Ledger(path) as ledger:
        a, _ = register(ledger, "a"), register(ledger, "b", epsilon=0.5)
        before = rows(path, "SELECT * FROM sqlite_master")
        ledger.check([("a", times(5)), ("b", times(5)), (a, times(5))])
        for requests, name in (
            ([("b", times(5)), (a, times(5)), ("a", times(6))], "a"),
            ([("b", times(6)), ("a", times(11))], "b"),
        ):
            with pytest.raises(BudgetExceeded, match=f"'{name}'") as checked:
                ledger.check(requests)
            with pytest.raises(BudgetExceeded) as spent:
                ledger.spend_all(requests)
            assert str(checked.value) == str(spent.value) and checked.value.dataset == name
            assert checked.value.would_spend == spent.value.would_spend
        with pytest.raises(BudgetExceeded, match="has no proof"):
            ledger.check([("a", unproven("why"))])
        with pytest.raises(ValueError, match="'c' is not registered"):
            ledger.check([("a", TENTH), ("c", TENTH)])
        assert rows(path, "SELECT count(*) FROM spends UNION ALL SELECT count(*) FROM events") == [
            (0,),
            (0,),
        ]
        assert rows(path, "SELECT * FROM sqlite_master") == before


def test_what_was_checked_is_spent_without_another_pld(ledger, plds):
    budget = 1.01 * epsilon_at(times(1000, STEP), delta=DELTA)
    register(ledger, epsilon=budget, delta=DELTA)
    ledger.check([("data", times(1000, STEP))])
    asked = plds()
    assert asked >= 1
    ledger.spend("data", times(1000, STEP))
    assert plds() == asked


@pytest.mark.slow
def test_seventy_unlike_parts_get_their_verdicts(ledger):
    """Each needs a PLD, and more verdicts than are usually remembered; the ledger once asked for
    ever."""
    events = [GaussianDpEvent(8.0 + 0.001 * index) for index in range(70)]
    budget = 1.001 * epsilon_at(ComposedDpEvent([events[0], GaussianDpEvent(8.0)]), delta=DELTA)
    register(ledger, epsilon=budget, delta=DELTA)
    for index, event in enumerate(events):
        ledger.spend("data", event, partition=f"{index}")
    ledger.spend("data", GaussianDpEvent(8.0))
    assert ledger.epsilon("data") <= budget


# --- Holds --------------------------------------------------------------------------------------


def test_a_hold_keeps_room_and_is_no_spend(path):
    with Ledger(path) as ledger, Ledger(path) as other:
        account = register(ledger)
        with account.hold(times(7)) as hold:
            assert isinstance(hold, Hold) and hold.names == ("data",)
            assert (ledger.epsilon("data"), ledger.remaining("data"), ledger.events("data")) == (
                0.0,
                1.0,
                {},
            )
            other.spend("data", times(3))
            stranger = other.account("data")
            for ask in (stranger.spend, stranger.hold, stranger.check):
                with pytest.raises(
                    BudgetExceeded, match=r"0\.3 is spent .* make it 1\.1, 0\.7 of which is room"
                ) as e:
                    ask(TENTH)
                assert (e.value.held, e.value.would_spend) == (
                    pytest.approx(0.7),
                    pytest.approx(1.1),
                )
                assert "report" in str(e.value)
            for _ in range(7):
                spend(hold.account("data"))
            with pytest.raises(BudgetExceeded) as refused:
                spend(hold.account("data"))
            assert refused.value.held == 0.0 and "hold" not in str(refused.value)
        assert ledger.epsilon("data") == pytest.approx(1.0)


def test_a_hold_is_on_all_datasets_or_on_none(ledger):
    register(ledger, "a"), register(ledger, "b", epsilon=0.5)
    with pytest.raises(BudgetExceeded, match="'b'"):
        ledger.hold([("a", times(5)), ("b", times(6))])
    spend(ledger.account("a"), times(10))  # nothing is held
    with ledger.hold([("b", times(2)), ("a", NoOpDpEvent()), ("b", times(3))]) as hold:
        assert hold.left("b") == times(5) and hold.left("a") == NoOpDpEvent()
        with pytest.raises(BudgetExceeded, match="'b'"):
            ledger.spend("b", TENTH)
        with pytest.raises(ValueError, match=r"on \['b', 'a'\], not on 'c'"):
            hold.account("c")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"requests": [("missing", TENTH)]}, "not registered"),
        ({"requests": [("data", GaussianDpEvent(-1.0))]}, "noise_multiplier"),
        ({"requests": [("data", RandomizedResponseDpEvent(0.5, 4))]}, "no accounting rule"),
        ({"key": ""}, "key"),
        ({"label": None}, "label"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": math.inf}, "seconds"),
        ({"seconds": math.nan}, "seconds"),
    ],
)
def test_impossible_holds_are_refused(path, wrong, words):
    with Ledger(path) as ledger:
        register(ledger)
        before = rows(path, "SELECT * FROM sqlite_master")
        with pytest.raises(ValueError, match=words):
            ledger.hold(**{"requests": [("data", TENTH)]} | wrong)
        assert rows(path, "SELECT * FROM sqlite_master") == before
    with pytest.raises(BudgetExceeded, match="has no proof"), Ledger(path) as ledger:
        ledger.hold([("data", unproven("why"))])


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_a_hold_goes_back_at_the_end_of_its_body(ledger, error):
    account = register(ledger)
    with (
        pytest.raises(error) if error else contextlib.nullcontext(),
        account.hold(times(9)) as hold,
    ):
        spend(hold.account(account))
        if error:
            raise error
    assert hold.left("data") == NoOpDpEvent()
    assert ledger.report()["datasets"][0]["holds"] == []
    hold.close()
    spend(hold.account(account), times(9))  # an ordinary spend
    assert account.epsilon() == pytest.approx(1.0)


def test_a_hold_that_cannot_be_closed(monkeypatch):
    """What the body raised matters more than room that comes back by itself; a second try may
    succeed."""

    class Disk(sqlite3.Connection):
        full = False

        def execute(self, text, *values):
            if self.full and text.startswith("DELETE FROM holds WHERE id"):
                raise sqlite3.OperationalError("full")
            return super().execute(text, *values)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Disk))
    account = register(Ledger.in_memory())
    with pytest.raises(KeyError), account.hold(times(4)):
        Disk.full = True
        raise KeyError
    Disk.full = False
    with pytest.raises(OSError, match="full"), account.hold(times(5)) as hold:
        Disk.full = True
    Disk.full = False
    assert hold.left("data") == times(5)
    hold.close()
    spend(account, times(6))


def test_a_hold_that_nobody_closes_lapses(ledger, clock):
    account = register(ledger)
    hold = account.hold(times(10), seconds=60.0)
    clock[0] += 59.0
    with pytest.raises(BudgetExceeded):
        spend(account)
    spend(hold.account("data"), token="t")  # moves the end
    clock[0] += 59.0
    with pytest.raises(BudgetExceeded):
        spend(account)
    assert spend(hold.account("data"), token="t").replay  # does not
    assert hold.left("data") == times(9)
    clock[0] += 1.0
    assert hold.left("data") == NoOpDpEvent() and ledger.report()["datasets"][0]["holds"] == []
    spend(account, times(8))
    spend(hold.account("data"))  # an ordinary spend now
    with pytest.raises(BudgetExceeded) as error:
        spend(hold.account("data"))
    assert error.value.held == 0.0
    assert account.epsilon() == pytest.approx(1.0)


def test_a_spend_takes_from_its_hold_what_they_share(ledger):
    """The multiset difference, on paper: H = 3 a + 2 b; E = 4 a + b + c; left is b, and a + c were
    additional."""
    account = register(ledger)
    a, b, c = PureDpEvent(0.1), PureDpEvent(0.05), PureDpEvent(0.25)
    hold = account.hold(ComposedDpEvent([times(3, a), times(2, b)]))  # 0.4
    under = hold.account(account)
    # Beside E (0.7) the hold keeps 0.05: 0.25 is free for others, no more.
    others = ledger.hold([("data", PureDpEvent(0.25))])
    under.check(ComposedDpEvent([times(4, a), b, c]))
    with pytest.raises(BudgetExceeded):
        under.check(ComposedDpEvent([times(4, a), b, c, PureDpEvent(0.01)]))
    record = spend(under, ComposedDpEvent([times(4, a), b, c]), token="t")
    assert hold.left("data") == b
    # takes nothing
    assert spend(under, ComposedDpEvent([times(4, a), b, c]), token="t").id == record.id
    assert hold.left("data") == b
    assert account.epsilon() == pytest.approx(0.7)
    with pytest.raises(BudgetExceeded):
        spend(account, PureDpEvent(0.01))
    spend(under, b)
    assert hold.left("data") == NoOpDpEvent()
    others.close()
    spend(account, PureDpEvent(0.25))


def test_spend_all_takes_from_holds(ledger):
    register(ledger, "a"), register(ledger, "b")
    with ledger.hold([("a", times(9)), ("b", times(9))]) as hold:
        a, b = hold.account("a"), hold.account("b")
        ledger.spend_all([(a, times(2)), (b, TENTH), (a, times(3))])
        assert (hold.left("a"), hold.left("b")) == (times(4), times(8))
        # on all or none: the room of a is not taken either
        with pytest.raises(BudgetExceeded, match="'b'"):
            ledger.spend_all([(a, TENTH), ("b", times(2))])
        assert hold.left("a") == times(4)
        ledger.check([(a, times(5)), (b, times(9))])
        with pytest.raises(BudgetExceeded, match="'a'"):
            ledger.check([(a, times(4)), ("a", times(2))])


def test_a_spend_on_a_part_takes_from_the_hold(ledger):
    account = register(ledger)
    with account.hold(times(8)) as hold:
        spend(hold.account(account), times(5), partition="a")
        assert hold.left("data") == times(3)
        spend(hold.account(account), times(3), partition="b")
        spend(account, times(5), partition="b")
        with pytest.raises(BudgetExceeded):
            spend(account, times(6), partition="a")
    assert account.epsilon() == pytest.approx(0.8)


def test_spends_under_a_hold_compute_no_pld(ledger, plds):
    plan = times(1000, STEP)
    account = register(ledger, epsilon=1.01 * epsilon_at(plan, delta=DELTA), delta=DELTA)
    hold = account.hold(plan)
    assert plds() == 1  # one for the plan and its hold, none for what may come
    for _ in range(200):
        spend(hold.account(account), times(5, STEP))
    assert plds() == 1
    assert hold.left("data") == NoOpDpEvent()
    assert ledger.events("data") == {None: plan}


def test_a_hold_under_a_renyi_filter(ledger):
    account = register(
        ledger, epsilon=2.0, delta=DELTA, accounting="renyi_filter", renyi_order=12.0
    )
    bound = accounting.renyi_bound(2.0, DELTA, 12.0)
    steps = int(bound / (12 / 2 / 400))
    with account.hold(times(steps, GaussianDpEvent(20.0))) as hold:
        assert account.epsilon() == 0.0 and account.remaining() == 2.0
        with pytest.raises(BudgetExceeded, match=r"Renyi filter.*room that others hold") as error:
            spend(account, GaussianDpEvent(20.0))
        assert error.value.held == pytest.approx(2.0 * steps * (12 / 2 / 400) / bound)
        for _ in range(steps - 1):
            spend(hold.account(account), GaussianDpEvent(20.0))
        assert hold.left("data") == GaussianDpEvent(20.0)
    spend(account, GaussianDpEvent(20.0))
    with pytest.raises(BudgetExceeded):
        spend(account, GaussianDpEvent(20.0))
    assert account.epsilon() == pytest.approx(2.0)


def test_a_hold_without_a_budget_limits_nobody(ledger):
    account = register(ledger, epsilon=None, delta=DELTA)
    with account.hold(times(10, STEP)) as hold:
        spend(account, NonPrivateDpEvent())
        spend(hold.account(account), STEP)
        assert hold.left("data") == times(9, STEP)


@pytest.mark.slow
def test_what_is_held_counts_beside_an_event_without_a_rule_in_common(ledger):
    # has a PLD rule only, the other an RDP rule only
    event = TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 1.0)
    budget = 1.0001 * epsilon_at(event, delta=DELTA)
    account = register(ledger, epsilon=budget, delta=DELTA)
    with account.hold(ZCDpEvent(0.01)), pytest.raises(BudgetExceeded, match="others hold"):
        spend(account, event)
    spend(account, event)


# --- Keys ---------------------------------------------------------------------------------------


def test_a_hold_with_the_same_key_replaces_the_earlier_one(ledger):
    account = register(ledger)
    first = account.hold(times(9), key="job 1")
    spend(first.account(account), times(4), token="t")
    with pytest.raises(BudgetExceeded):
        account.hold(times(7), key="job 1")
    assert first.left("data") == times(5)  # what was refused replaced nothing
    second = account.hold(times(6), key="job 1")
    assert (first.left("data"), second.left("data")) == (NoOpDpEvent(), times(6))
    with pytest.raises(BudgetExceeded):
        account.hold(TENTH, key="job 2")
    with pytest.raises(BudgetExceeded):
        spend(first.account(account))  # an ordinary spend, without room beside the second hold
    first.close()
    assert second.left("data") == times(6)
    spend(second.account(account), times(6))


# --- Holds under holds --------------------------------------------------------------------------


def test_a_hold_under_a_hold_counts_its_room_once(ledger):
    outer = register(ledger).hold(times(8), key="outer", label="the outer one")
    account = outer.account("data")
    with account.hold(times(6), key="inner") as inner:  # is there already
        assert inner.left("data") == outer.left("data") == times(8)
        spend(inner.account(account), times(2))
        assert outer.left("data") == times(6)
    assert outer.left("data") == times(6)
    with account.hold(times(8)) as inner:  # two more are needed, and there is room for two more
        assert outer.left("data") == times(8)
        with pytest.raises(BudgetExceeded):
            spend(ledger.account("data"))
        spend(inner.account(account), times(3))
    assert outer.left("data") == times(3)  # six less the three that were spent
    with pytest.raises(BudgetExceeded):
        account.hold(times(9))
    assert outer.left("data") == times(3)
    assert [(h["key"], h["label"]) for h in ledger.report()["datasets"][0]["holds"]] == [
        ("outer", "the outer one")
    ]
    inner.close()  # twice does nothing
    assert outer.left("data") == times(3)


def test_a_hold_under_a_hold_that_is_gone_is_a_hold_of_its_own(ledger, clock):
    account = register(ledger)
    outer = account.hold(times(8), seconds=60.0)
    clock[0] += 60.0
    with outer.account(account).hold(times(9)) as inner:
        assert inner.left("data") == times(9) and outer.left("data") == NoOpDpEvent()
    assert inner.left("data") == NoOpDpEvent()
    spend(account, times(10))


def test_a_hold_under_a_hold_may_add_a_dataset(ledger):
    register(ledger, "a"), register(ledger, "b")
    with ledger.hold([("a", times(5))]) as outer:
        with ledger.hold([(outer.account("a"), times(5)), ("b", times(5))]) as inner:
            spend(inner.account("b"))
            assert (inner.left("a"), inner.left("b")) == (times(5), times(4))
        assert (outer.left("a"), outer.left("b")) == (times(5), NoOpDpEvent())
        with (
            ledger.hold([("b", times(2))]) as other,
            pytest.raises(ValueError, match="2 different holds"),
        ):
            ledger.hold([(outer.account("a"), TENTH), (other.account("b"), TENTH)])


# --- Reports, threads, totals -------------------------------------------------------------------


def test_the_report_mentions_holds_in_one_line(ledger, clock):
    account = register(ledger)
    register(ledger, "idle")
    assert " held " not in ledger.report_text()
    account.hold(times(3), key="k", label="training", seconds=60.0)
    ledger.account("data", label="job").hold(times(2), seconds=30.0)
    entry, idle = json.loads(json.dumps(ledger.report(), allow_nan=False))["datasets"]
    assert idle["holds"] == []
    assert [(h["description"], h["key"], h["label"]) for h in entry["holds"]] == [
        ("Pure(0.1) x 2", None, "job"),
        ("Pure(0.1) x 3", "k", "training"),
    ]
    assert entry["holds"][0]["lapses_at"] == "2001-09-09T01:47:10.000+00:00"
    assert (entry["headline"], entry["remaining"], entry["spends"]) == ("0", 1.0, [])
    (line,) = (line for line in ledger.report_text().splitlines() if " held " in line)
    assert (
        "Pure(0.1) x 2 (job, run" in line
        and "Pure(0.1) x 3 (training, run" in line
        and "01:47:10" in line
    )


def test_eight_threads_hold_and_spend_exactly_the_budget(path):
    with Ledger(path) as ledger:
        account = register(ledger, epsilon=2.0)
        spent, failures = [], []

        def work():
            try:
                while True:
                    with account.hold(times(2)) as hold:
                        for _ in range(2):  # Room that is held is there.
                            try:
                                spent.append(spend(hold.account(account)))
                            except BudgetExceeded as error:
                                failures.append(error)
            except BudgetExceeded:
                pass

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == [] and len(spent) == 20
        assert account.epsilon() == pytest.approx(2.0)
        assert rows(path, "SELECT count(*) FROM holds") == [(0,)]


@pytest.mark.slow
def test_total_is_the_epsilon_of_all_events_together(ledger):
    for name in "abc":
        register(ledger, name, epsilon=None, delta=DELTA)
    events = {"a": times(100, STEP), "b": GaussianDpEvent(3.0), "c": PureDpEvent(0.3)}
    for name, event in events.items():
        ledger.spend(name, event)
    for delta in (DELTA, 1e-3):
        expected = epsilon_at(ComposedDpEvent(list(events.values())), delta=delta)
        for order in ("abc", "cab"):
            assert ledger.total(list(order), delta=delta) == pytest.approx(expected, rel=1e-9)
        parts = [ledger.epsilon(name, delta=delta) for name in "abc"]
        assert max(parts) < expected < sum(parts)
    assert (
        ledger.total(["a"], delta=DELTA)
        == ledger.epsilon("a")
        == ledger.total(["a", "a"], delta=DELTA)
    )
    ledger.spend("c", unproven("why"))
    assert ledger.total(list("abc"), delta=DELTA) == math.inf
    assert ledger.total(list("ab"), delta=DELTA) < math.inf


def test_total_is_the_worst_choice_of_parts(ledger):
    """In a, part x is worst at small delta and y at large; in b, every record pays 0.1."""
    register(ledger, "a", epsilon=None), register(ledger, "b", epsilon=None)
    many, one = times(100, PureDpEvent(0.02)), PureDpEvent(1.0)
    ledger.spend("a", many, partition="x")
    ledger.spend("a", one, partition="y")
    ledger.spend("b", TENTH)
    # parts of different datasets have nothing in common but the name
    ledger.spend("b", times(2), partition="x")
    for delta in (0.0, 1e-2):
        choices = [ComposedDpEvent([part, times(3)]) for part in (many, one)]
        assert ledger.total(["a", "b"], delta=delta) == pytest.approx(
            max(epsilon_at(e, delta=delta) for e in choices)
        )
    assert ledger.total(["a", "b"], delta=0.0) == pytest.approx(2.3)


def test_total_of_very_many_parts_is_an_upper_bound(ledger, monkeypatch):
    for name in "ab":
        register(ledger, name, epsilon=None)
        for index in range(1, 5):
            ledger.spend(
                name,
                ComposedDpEvent([times(index), times(5 - index, PureDpEvent(0.2))]),
                partition=f"{index}",
            )
    exact = ledger.total(["a", "b"], delta=0.0)
    assert exact == pytest.approx(2 * ledger.epsilon("a")) == pytest.approx(1.8)
    monkeypatch.setattr(compositions, "COMBINATIONS", 3)
    assert ledger.total(["a", "b"], delta=0.0) == pytest.approx(2 * (4 * 0.1 + 4 * 0.2))


def test_total_of_rdp_accounts(ledger):
    for name in "ab":
        register(ledger, name, epsilon=None, delta=DELTA, accounting="rdp")
        ledger.spend(name, GaussianDpEvent(4.0))
    both = times(2, GaussianDpEvent(4.0))
    by_rdp, by_pld = epsilon_at(both, delta=DELTA, method="rdp"), epsilon_at(both, delta=DELTA)
    assert ledger.total(["a", "b"], delta=DELTA) == by_rdp > by_pld
    register(ledger, "c", epsilon=None, delta=DELTA)
    assert ledger.total(["a", "b", "c"], delta=DELTA) == by_pld


def test_a_renyi_filter_enters_a_total_with_its_budget(ledger):
    for name, epsilon in (("f", 2.0), ("g", 3.0)):
        register(ledger, name, epsilon=epsilon, delta=1e-6, accounting="renyi_filter")
    register(ledger, "a", epsilon=None)
    rest = GaussianDpEvent(4.0)
    ledger.spend("a", rest)
    # nothing was spent on f
    assert ledger.total(["f", "a"], delta=DELTA) == epsilon_at(rest, delta=DELTA)
    ledger.spend("f", GaussianDpEvent(20.0))
    assert ledger.total(["f", "a"], delta=DELTA) == pytest.approx(
        2.0 + epsilon_at(rest, delta=9e-6), rel=1e-9
    )
    ledger.spend("g", GaussianDpEvent(20.0))
    assert ledger.total(["g", "f", "a"], delta=DELTA) == pytest.approx(
        5.0 + epsilon_at(rest, delta=8e-6), rel=1e-9
    )
    assert ledger.total(["f", "g"], delta=2e-6) == 5.0
    for names, delta in ((["f", "g"], 1.9e-6), (["f", "a"], 1e-6), (["f"], 0.0)):
        with pytest.raises(ValueError, match=r"leaves nothing beside .* Ask for a larger delta"):
            ledger.total(names, delta=delta)


def test_total_needs_one_meaning_of_a_record(ledger):
    (
        register(ledger, "a"),
        register(ledger, "b", adjacency="replace_one"),
        register(ledger, "c", unit="patient"),
    )
    for names, words in (
        (["a", "b"], r"'a' has adjacency 'add_remove'.*'b' has 'replace_one'.*same terms"),
        (["c", "a"], r"unit 'patient'.*'example'"),
        (["a", "missing"], "not registered"),
        ([], "one or more"),
        ("a", "sequence"),
    ):
        with pytest.raises(ValueError, match=words):
            ledger.total(names, delta=DELTA)
    with pytest.raises(ValueError, match="delta"):
        ledger.total(["a"], delta=1.0)


# --- The file -----------------------------------------------------------------------------------

OLD = Path(__file__).with_name("ledger_before_holds.sql")
# What it says: composed events, epsilon at the registered delta and at 1e-3, what remains. The
# jaxdp that wrote it said 1.6327214 and 1.0419843 of "train", by another grid of losses. Both grids
# are above the exact epsilon.
OLD_SAID = {
    "train": (
        {None: times(503, STEP), "north": LaplaceDpEvent(20.0), "south": GaussianDpEvent(4.0)},
        (1.6327912668442923, 1.0420531859274156, 6.3672087331557075),
    ),
    "stream": ({None: GaussianDpEvent(9.0)}, (2.0, 1.3720222473652601, 1.8598351479197324)),
    "survey": ({None: LaplaceDpEvent(4.0)}, (0.5, 0.49799899951036153, math.inf)),
}


@pytest.mark.slow
def test_a_ledger_from_before_holds_means_the_same(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(OLD.read_text())
    totals = rows(path, "SELECT * FROM totals")
    with Ledger(path) as ledger:
        for _ in range(2):
            for name, (events, numbers) in OLD_SAID.items():
                found = ledger.events(name)
                assert {part: to_json(e) for part, e in found.items()} == {
                    p: to_json(e) for p, e in events.items()
                }
                said = (
                    ledger.epsilon(name),
                    ledger.epsilon(name, delta=1e-3),
                    ledger.remaining(name),
                )
                assert said == pytest.approx(numbers, rel=1e-6)
            # Once more with a hold, which changes none of these.
            hold = ledger.hold([("train", times(10, STEP)), ("survey", LaplaceDpEvent(4.0))])
        assert rows(path, "SELECT * FROM totals") == totals
        assert (
            ledger.paid("train", "t0")
            and ledger.paid("stream", "b")
            and not ledger.paid("train", "b")
        )
        with hold.account("train").spend(STEP, token="t2") as record:
            assert record.replay and record.id == 3
        with hold.account("train").spend(STEP) as record:
            assert record.id == 9
        assert ledger.total(["train"], delta=DELTA) == ledger.epsilon("train")


@pytest.mark.slow
def test_accounts_are_documented():
    for owner in (Account, Hold):
        for name, member in vars(owner).items():
            if not name.startswith("_") and callable(member):
                assert inspect.getdoc(member), name
