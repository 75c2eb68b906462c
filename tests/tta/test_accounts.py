"""Accounts of streams: exact where units come back, parallel where they do not, charged before the
batch is touched."""

import math
import threading
import time

import numpy as np
import pytest
from scipy import optimize, special

from jaxdp.privacy import (
    Account,
    BudgetExceeded,
    GaussianDpEvent,
    LaplaceDpEvent,
    Ledger,
    NonPrivateDpEvent,
)
from jaxdp.privacy.events import composition
from jaxdp.tta.accounts import StreamAccount, epsilons
from jaxdp.tta.private import private
from jaxdp.tta.tent import Tent

DELTA = 1e-6


def closed_form(mu: float, delta: float = DELTA) -> float:
    """Returns epsilon of a mu-GDP mechanism: delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu -
    mu/2), inverted."""

    def gap(eps: float) -> float:
        first, second = (
            special.log_ndtr(-eps / mu + mu / 2),
            eps + special.log_ndtr(-eps / mu - mu / 2),
        )
        return first + math.log(-math.expm1(second - first)) - math.log(delta)

    return float(optimize.brentq(gap, 1e-9, mu**2 / 2 + 10 * mu, xtol=1e-12))


def new_ledger(adjacency="replace_one", **budget):
    ledger = Ledger.in_memory()
    ledger.register("stream", adjacency=adjacency, unit="photograph", **budget)
    return ledger


def charged(ledger) -> float:
    """Returns the total of 1 / noise_multiplier^2 in the ledger."""
    events = ledger.events("stream")
    return (
        sum(n / e.noise_multiplier**2 for e, n in composition(events[None]).items())
        if events
        else 0.0
    )


def serve(account, releases):
    for number, units in enumerate(releases):
        with account.spend(units, release=number):
            pass


# Per noise multiplier: one visit, one visit under zero-out, and 2, 3, 5 and 15 visits, at delta
# 1e-6.
TABLE = {
    8.594: (0.9819, 0.467, 1.43, 1.78, 2.36, 4.34),
    1.966: (4.9829, 2.297, 7.43, 9.45, 12.86, 25.84),
    1.084: (9.9798, 4.459, 15.24, 19.69, 27.46, 58.73),
    0.777: (14.9840, 6.529, 23.29, 30.45, 43.20, 96.26),
    0.619: (19.9656, 8.520, 31.48, 41.54, 59.67, 136.93),
}


@pytest.mark.slow
@pytest.mark.parametrize("sigma", TABLE)
def test_condition_8_published_noise_multipliers_cost_what_the_closed_form_says(sigma):
    method = private(Tent(), clip_norm=0.1, noise_multiplier=sigma)
    once, zero_out, *repeated = TABLE[sigma]
    rows = [({}, once), ({"adjacency": "zero_out"}, zero_out)]
    rows += [({"visits": k}, v) for k, v in zip((2, 3, 5, 15), repeated, strict=True)]
    for terms, published in rows:
        visits, adjacency = terms.get("visits", 1), terms.get("adjacency", "replace_one")
        ledger = new_ledger(adjacency)
        account = StreamAccount(ledger.account("stream"), event=GaussianDpEvent(sigma))
        # Photographs 0..3 come in every one of `visits` domains, in two batches each.
        serve(account, [[0, 1], [2, 3]] * visits)
        assert account.worst == visits
        mu = (2 if adjacency == "replace_one" else 1) * math.sqrt(visits) / sigma
        spent = ledger.epsilon("stream", delta=DELTA)
        assert closed_form(mu) <= spent <= closed_form(mu) * (1 + 1e-3)
        assert spent == pytest.approx(published, abs=0.006 if visits > 1 else 6e-4, rel=1e-4)
        sample, unit = account.epsilons(delta=DELTA)
        assert unit == pytest.approx(spent, rel=1e-4)
        assert sample == unit if visits == 1 else sample == pytest.approx(once, abs=6e-4, rel=1e-4)
        planned = method.epsilon(delta=DELTA, **terms)
        assert closed_form(mu) - 1e-4 <= planned <= closed_form(mu) * 1.001 + 1e-3


@pytest.mark.parametrize(("records", "published"), [(2, 50.8), (4, 144.1)])
def test_condition_8_records_of_one_unit_in_one_release_count_squared(records, published):
    for batches in ([["a"] * records + ["b"]], [["a"]] * records):
        ledger = new_ledger()
        account = StreamAccount(ledger.account("stream"), event=GaussianDpEvent(0.619))
        for units in batches:  # In one batch, or in several that are accumulated into one release.
            with account.spend(units, release=0):
                pass
        assert account.worst == records**2
        spent = ledger.epsilon("stream", delta=DELTA)
        assert spent == pytest.approx(closed_form(2 * records / 0.619), rel=1e-3)
        assert spent == pytest.approx(published, abs=0.06)


def test_the_charge_is_the_largest_sum_of_squares_after_every_batch():
    random = np.random.default_rng(0)
    releases = [random.integers(0, 6, size=random.integers(0, 9)) for _ in range(40)]
    ledger = new_ledger()
    account = StreamAccount(ledger.account("stream"), event=GaussianDpEvent(2.0))
    counts = np.zeros((40, 6), int)
    for number, units in enumerate(releases):
        first, second = np.array_split(units, 2)
        for part in (first, second):
            with account.spend(part.tolist(), release=number):
                counts[number] += np.bincount(part, minlength=6)
                assert account.worst == (counts**2).sum(axis=0).max(initial=0)
                assert charged(ledger) == pytest.approx(account.worst / 4, rel=1e-12)
    assert account.worst > 40


def test_a_restarted_account_continues_and_a_fresh_one_pays_again():
    first, second = [[0, 1], [2, 3], [0, 0]], [[1, 2], [3, 4], [0, 2]]

    def run(restart):
        ledger = new_ledger()
        account = StreamAccount(ledger.account("stream"), event=GaussianDpEvent(2.0))
        serve(account, first)
        account = restart(ledger, account)
        for number, units in enumerate(second, start=2):  # Release 2 was half full.
            with account.spend(units, release=number):
                pass
        return 4 * charged(ledger), account.worst

    def worst(releases):
        return max(sum(r.count(u) ** 2 for r in releases) for u in range(5))

    whole = worst([[0, 1], [2, 3], [0, 0, 1, 2], [3, 4], [0, 2]])
    assert run(lambda ledger, account: account) == (pytest.approx(whole), whole)
    resumed = run(
        lambda ledger, account: StreamAccount(
            ledger.account("stream"), event=account.event, visits=account.visits
        )
    )
    assert resumed == (pytest.approx(whole), whole)
    fresh, _ = run(
        lambda ledger, account: StreamAccount(ledger.account("stream"), event=account.event)
    )
    assert fresh == pytest.approx(worst(first) + worst(second))
    assert fresh >= whole


def test_visits_need_the_ledger_that_was_charged_for_them():
    account = StreamAccount(new_ledger().account("stream"), event=GaussianDpEvent(2.0))
    serve(account, [["secret"], ["secret"]])
    with pytest.raises(ValueError, match="no such charge") as error:
        StreamAccount(new_ledger().account("stream"), event=account.event, visits=account.visits)
    assert "secret" not in str(error.value)
    half = new_ledger()
    with half.spend("stream", GaussianDpEvent(2.0)):
        pass
    with pytest.raises(ValueError, match="no such charge"):
        StreamAccount(half.account("stream"), event=account.event, visits=account.visits)
    # Another release that cost as much has paid for itself only.
    with half.spend("stream", GaussianDpEvent(1.0)):
        pass
    with pytest.raises(ValueError, match="no such charge"):
        StreamAccount(half.account("stream"), event=account.event, visits=account.visits)


def test_an_overspend_is_refused_before_the_batch_is_touched():
    ledger = new_ledger(epsilon=10.0, delta=DELTA)
    account = StreamAccount(ledger.account("stream"), event=GaussianDpEvent(1.084))
    serve(account, [["secret"], ["other"]])
    before = account.visits
    with pytest.raises(BudgetExceeded) as error, account.spend(["new", "secret"], release=2):
        pytest.fail("the batch was touched")
    assert "secret" not in str(error.value)
    assert account.visits == before and account.worst == 1
    with account.spend(["new"], release=2):  # Whoever is new is still welcome.
        pass


def test_a_failing_body_stays_charged():
    ledger = new_ledger()
    account = StreamAccount(ledger.account("stream"), event=GaussianDpEvent(1.0))
    with pytest.raises(KeyError), account.spend(["a"], release=0):
        raise KeyError("body")
    assert account.worst == 1
    with account.spend(["a"], release=1):
        pass
    assert charged(ledger) == pytest.approx(2)


def test_condition_10_add_remove_does_not_fit_a_stream():
    with pytest.raises(
        ValueError,
        match="adjacency of dataset 'stream' must be 'replace_one' or 'zero_out', got 'add_remove'",
    ):
        StreamAccount(new_ledger("add_remove").account("stream"), event=GaussianDpEvent(1.0))
    with pytest.raises(ValueError, match="'replace_one' or 'zero_out'"):
        epsilons(GaussianDpEvent(1.0), visits=1, delta=DELTA, adjacency="add_remove")


@pytest.mark.parametrize("event", [NonPrivateDpEvent(), GaussianDpEvent(0.0)])
def test_without_noise_epsilon_is_infinite_and_charged_once(event):
    ledger = new_ledger()
    account = StreamAccount(ledger.account("stream"), event=event)
    serve(account, [["a", "b"], ["a"], ["c", "c"]])
    assert ledger.events("stream") == {None: NonPrivateDpEvent()}
    assert ledger.epsilon("stream", delta=DELTA) == math.inf
    assert account.epsilons(delta=DELTA) == (math.inf, math.inf)
    continued = StreamAccount(ledger.account("stream"), event=event, visits=account.visits)
    serve(continued, [["a"]])
    assert ledger.events("stream") == {None: NonPrivateDpEvent()}
    limited = StreamAccount(new_ledger(epsilon=20.0, delta=DELTA).account("stream"), event=event)
    with pytest.raises(BudgetExceeded), limited.spend(["a"], release=0):
        pytest.fail("the batch was touched")


def test_threads_share_an_account():
    ledger = new_ledger()

    class Slow(Account):
        def spend(self, *args, **kwargs):
            time.sleep(0.02)
            return super().spend(*args, **kwargs)

    account, together = (
        StreamAccount(Slow(ledger, "stream"), event=GaussianDpEvent(2.0)),
        threading.Barrier(4),
    )

    def visit(number):
        with account.spend(["the same"], release=number):
            together.wait(10)  # the bodies run side by side

    threads = [threading.Thread(target=visit, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert account.worst == 4 == pytest.approx(4 * charged(ledger)) and not together.broken


def test_a_forked_process_does_not_share_an_account(monkeypatch):
    """Neither copy would know of the visits of the other, and "a" would have three visits for the
    price of two."""
    ledger = new_ledger()
    account = StreamAccount(ledger.account("stream"), event=GaussianDpEvent(2.0))
    serve(account, [["a", "b"], ["b"]])
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(
        RuntimeError, match="the StreamAccount of 'stream' belongs to the process from which"
    ):
        serve(account, [["a"]])
    with pytest.raises(RuntimeError, match="was forked"):
        account.visits  # noqa: B018
    monkeypatch.undo()
    assert account.worst == 2 and account.visits.counts["a"] == {0: 1}


def test_ids_of_units_never_reach_the_ledger(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.register("stream", adjacency="zero_out", unit="patient")
        serve(
            StreamAccount(ledger.account("stream"), event=GaussianDpEvent(1.0)),
            [["Ada Lovelace"] * 2, ["Ada Lovelace"]],
        )
        assert "Lovelace" not in ledger.report_text()
    assert not any(b"Lovelace" in file.read_bytes() for file in tmp_path.iterdir())


def test_an_empty_batch_costs_nothing():
    ledger = new_ledger()
    serve(StreamAccount(ledger.account("stream"), event=GaussianDpEvent(1.0)), [[], []])
    assert ledger.epsilon("stream", delta=DELTA) == 0.0
    assert epsilons(GaussianDpEvent(1.0), visits=0, delta=DELTA, adjacency="zero_out").unit == 0.0


@pytest.mark.slow
def test_impossible_arguments():
    with pytest.raises(ValueError, match="event must be one GaussianDpEvent"):
        StreamAccount(new_ledger().account("stream"), event=LaplaceDpEvent(1.0))
    with pytest.raises(ValueError, match="visits must be at least 0, got -1"):
        epsilons(GaussianDpEvent(1.0), visits=-1, delta=DELTA, adjacency="zero_out")
    with pytest.raises(ValueError, match="not registered"):
        StreamAccount(Ledger.in_memory().account("elsewhere"), event=GaussianDpEvent(1.0))
