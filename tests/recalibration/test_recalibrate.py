"""Recalibration end to end: results against float64 loops, payments, errors before payment, noise of its own."""

import functools
import inspect
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdp.privacy import BudgetExceeded, Ledger, NonPrivateDpEvent, NoOpDpEvent, PureDpEvent
from jaxdp.recalibration import (
    AccT,
    NllT,
    Recalibration,
    Source,
    acc_t,
    ece_t,
    histogram_binning,
    logistic_binning,
    nll_t,
    none,
    one_source,
    recalibrate,
)
from jaxdp.transforms import noise

pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = noise.stream(bytes(range(16)), "test")
MODULE = sys.modules["jaxdp.recalibration.recalibrate"]  # the package shows the function of this name
ROOT = Path(__file__).parent.parent.parent
RATIO = (math.sqrt(5) - 1) / 2
BY_NAME = {
    "acc": acc_t,
    "nll": nll_t,
    "ece": ece_t,
    "histogram": histogram_binning,
    "logistic": logistic_binning,
}


def people(n, m=6, seed=0, sharpness=3.0):
    """Records of an over-confident model: right about half of the time, sure all of the time."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(n, m)) * sharpness).astype(np.float32)
    labels = np.where(rng.random(n) < 0.5, logits.argmax(1), rng.integers(0, m, n))
    return logits, labels


def divided(logits, labels, sizes):
    ends = np.cumsum(sizes)
    assert ends[-1] == len(labels)
    return list(zip(np.split(logits, ends[:-1]), np.split(labels, ends[:-1]), strict=True))


SIZES = [50, 0, 1, 29, 40]  # unequal, one empty, one of one record
SOURCES = divided(*people(120), SIZES)
# Few rounds and one shape, so that most tests share a compiled program.
SHORT = {
    "acc": functools.partial(acc_t, iterations=2),
    "nll": functools.partial(nll_t, iterations=2),
    "ece": functools.partial(ece_t, iterations=2),
    "histogram": histogram_binning,
    "logistic": logistic_binning,
}


# --- Without noise ----------------------------------------------------------------------------------------------------


def objectives(logits, labels, bound=10.0, bins=15):
    """What each method wants small, or (for signs) through zero, as functions of T in float64."""
    logits = logits.astype(np.float64)
    right = logits.argmax(1) == labels

    def softmax(t):
        exp = np.exp((logits - logits.max(1, keepdims=True)) / t)
        return exp / exp.sum(1, keepdims=True)

    def signed(t):
        return np.sum(right - softmax(t).max(1))

    def nll(t):
        return np.minimum(-np.log(softmax(t)[np.arange(len(labels)), labels]), bound).sum()

    def ece(t):
        p = softmax(t).max(1)
        cell = np.minimum(np.floor(p * bins), bins - 1)
        return sum(abs(np.sum((right - p)[cell == b])) for b in range(bins))

    return {"acc": lambda t: abs(signed(t)), "signed": signed, "nll": nll, "ece": ece}


def golden_section(f, low, high, iterations):
    for _ in range(iterations):
        left, right = high - RATIO * (high - low), low + RATIO * (high - low)
        low, high = (left, high) if f(left) >= f(right) else (low, right)
    return (low + high) / 2


def bisection(f, low, high, iterations):
    for _ in range(iterations):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return (low + high) / 2


@pytest.mark.parametrize(
    ("name", "settings", "objective", "search"),
    [
        ("acc", {}, "acc", golden_section),
        ("acc", {"iterations": 9, "split": True}, "acc", golden_section),
        ("acc", {"iterations": 7, "search": "bisection"}, "signed", bisection),
        ("nll", {"iterations": 8, "bound": 2.0}, "nll", golden_section),
        ("ece", {"iterations": 3, "bins": 7}, "ece", golden_section),
    ],
)
@pytest.mark.parametrize("spacing", ["linear", "log"])
def test_without_noise_the_temperature_is_that_of_a_float64_search(name, settings, objective, search, spacing):
    for seed in range(4):
        logits, labels = people(120, seed=seed)
        f = objectives(logits, labels, settings.get("bound", 10.0), settings.get("bins", 15))[objective]
        low, high = 0.25, 16.0
        iterations = settings.get("iterations", 5)
        if spacing == "linear":
            expected = search(f, low, high, iterations)
        else:
            expected = math.exp(search(lambda p: f(math.exp(p)), math.log(low), math.log(high), iterations))  # noqa: B023
        sources = divided(logits, labels, SIZES)
        found = BY_NAME[name](sources, epsilon=math.inf, bracket=(low, high), spacing=spacing, **settings)
        assert found.temperature == pytest.approx(expected, rel=1e-5)
        assert found.event == NonPrivateDpEvent()


def test_without_noise_every_bin_says_its_accuracy():
    logits, labels = people(120)
    exp = np.exp((logits - logits.max(1, keepdims=True)).astype(np.float64))
    p, right = (1 / exp.sum(1)), logits.argmax(1) == labels
    for form in ("split", "published"):
        found = histogram_binning(SOURCES, epsilon=math.inf, bins=15, form=form)
        for b in range(15):
            inside = (b / 15 <= p) & (p < (b + 1) / 15 if b < 14 else p <= 1)
            expected = right[inside].mean() if inside.any() else (b + 0.5) / 15
            assert found.bins[b] == pytest.approx(expected, abs=1e-6)
            np.testing.assert_allclose(found.apply(logits[inside]), expected, atol=1e-6)


def test_apply_is_the_largest_softmax_probability_at_the_temperature():
    found = acc_t(SOURCES, epsilon=math.inf)
    logits = people(9, m=4, seed=7)[0]
    exp = np.exp(logits.astype(np.float64) / found.temperature)
    confidence = found.apply(logits.astype(np.float64))
    assert confidence.dtype == np.float32
    np.testing.assert_allclose(confidence, (exp / exp.sum(1, keepdims=True)).max(1), rtol=1e-5)
    with pytest.raises(ValueError, match=r"logits must have shape \[n, m\], got \(4,\)"):
        found.apply(logits[0])


def test_a_bracket_that_is_too_narrow_is_reported():
    assert SHORT["acc"](SOURCES, epsilon=math.inf, bracket=(0.1, 0.2)).at_end == "high"
    assert SHORT["acc"](SOURCES, epsilon=math.inf, bracket=(20.0, 40.0)).at_end == "low"
    assert acc_t(SOURCES, epsilon=math.inf, bracket=(0.2, 40.0)).at_end is None


# --- Baselines --------------------------------------------------------------------------------------------------------


def test_none_changes_nothing_and_costs_nothing():
    unchanged, logits = none(), people(9)[0]
    exp = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(unchanged.apply(logits), (exp / exp.sum(1, keepdims=True)).max(1), rtol=1e-5)
    assert (unchanged.temperature, unchanged.at_end, unchanged.event) == (1.0, None, NoOpDpEvent())


def test_one_source_is_not_private_and_says_so():
    with Ledger.in_memory() as ledger:
        ledger.register("clinic", adjacency="add_remove", unit="patient")
        ledger.register("strict", adjacency="add_remove", unit="patient", epsilon=1e6, delta=0.0)
        found = one_source(Source(*people(120), account="clinic"), ledger=ledger)
        assert isinstance(found.method, NllT) and found.event == NonPrivateDpEvent()
        assert found.temperature == nll_t([people(120)], epsilon=math.inf).temperature
        assert ledger.epsilon("clinic", delta=1e-5) == math.inf
        with pytest.raises(BudgetExceeded):
            one_source(Source(*people(60), account="strict"), method=AccT(), ledger=ledger)


# --- Odd sources ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("epsilon", [1.0, math.inf])
def test_all_invalid_records_are_the_same_record(name, epsilon):
    """That it adds zero is shown for each method by itself."""
    logits, labels = people(120)
    bad, wrong = np.tile(logits[:1], (5, 1)), np.array([0, 0, 0, -1, 6])
    bad[0, 0], bad[1, 2], bad[2, 5] = np.nan, np.inf, -np.inf
    many_kinds = np.concatenate([bad, logits[5:]]), np.concatenate([wrong, labels[5:]])
    one_kind = np.concatenate([np.full_like(bad, np.nan), logits[5:]]), labels
    first, second = (
        SHORT[name](divided(*records, SIZES), epsilon=epsilon, key=KEY) for records in (many_kinds, one_kind)
    )
    for one, other in zip(jax.tree.leaves(first.parameters), jax.tree.leaves(second.parameters), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", SHORT)
def test_nothing_but_invalid_records_has_a_result_of_the_same_form(name):
    invalid = divided(np.full((120, 6), np.nan, np.float32), np.zeros(120, int), SIZES)
    for epsilon in (1.0, math.inf):
        usual, found = (SHORT[name](sources, epsilon=epsilon, key=KEY) for sources in (SOURCES, invalid))
        same_form(usual, found)


@pytest.mark.parametrize("name", ["acc", "histogram"])
def test_empty_sources_have_a_result_of_the_same_form(name):
    usual, found = (SHORT[name](sources, epsilon=1.0, key=KEY) for sources in (SOURCES, [people(0)] * 2))
    same_form(usual, found)


def same_form(usual, found):
    assert jax.tree.structure(found.parameters) == jax.tree.structure(usual.parameters)
    for leaf, like in zip(jax.tree.leaves(found.parameters), jax.tree.leaves(usual.parameters), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype) and np.isfinite(leaf).all()
    confidence = found.apply(people(9)[0])
    assert ((confidence >= 0) & (confidence <= 1)).all()


def test_the_result_shows_methods_parameters_and_the_price_alone():
    assert set(Recalibration.__dataclass_fields__) == {"method", "parameters", "event"}
    found = SHORT["acc"](SOURCES, epsilon=1.0, key=KEY)
    assert found.event == PureDpEvent(1.0)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found.parameters))


# --- Noise ------------------------------------------------------------------------------------------------------------


def counts(**arguments):
    """Something that is different whenever the noise is."""
    return histogram_binning(SOURCES, epsilon=1.0, **arguments).parameters.tolist()


def test_a_key_repeats_its_noise_and_without_one_noise_is_fresh():
    assert counts(key=KEY) == counts(key=KEY)
    assert counts(key=KEY) != counts(key=jax.random.fold_in(KEY, 1))
    assert len({tuple(counts()) for _ in range(5)}) == 5


def test_payments_never_share_noise():
    with Ledger.in_memory() as ledger:
        for i in range(len(SOURCES)):
            ledger.register(f"source {i}", adjacency="add_remove", unit="patient")
        results = [counts(key=KEY, ledger=ledger) for _ in range(3)]
        assert len(set(map(tuple, results))) == 3


def test_sources_do_not_share_noise():
    """The noise of 400 sources that are empty adds up like 400 independent ones: 20 times that of one."""
    nothing = [(np.zeros((0, 2), np.float32), np.zeros(0, int))] * 400
    drawn = []

    class Listening(AccT):
        def finish(self, state):
            return state[0].values

        def update(self, k, state, answer):
            return (state[0]._replace(values=state[0].values + answer), state[1]) if k == 0 else state

    for i in range(40):
        drawn.append(
            recalibrate(Listening(iterations=1), nothing, epsilon=2.0, key=jax.random.fold_in(KEY, i)).parameters[0]
        )
    # A scale of 1: standard deviation sqrt(2 x 400); with shared noise 20 times that. Five standard errors.
    assert np.std(drawn) == pytest.approx(math.sqrt(800), rel=5 / math.sqrt(2 * 40))


def test_noise_has_the_scale_of_its_epsilon():
    """The error of a histogram over many records: sd sqrt(2 d) / epsilon, in both cells."""
    logits = np.tile(np.float32([[0.0, 0.0]]), (4000, 1))
    sources = divided(logits, np.arange(4000) % 2, [1000] * 4)
    shares = [
        histogram_binning(sources, epsilon=0.2, bins=1, key=jax.random.fold_in(KEY, i)).bins[0] for i in range(150)
    ]
    # (R + a) / (R + W + a + b) with R = W = 2000: to first order 1/2 + (a - b) / 8000.
    expected = math.sqrt(2 * 2 * 4) / 0.2 / 8000
    assert np.mean(shares) == pytest.approx(0.5, abs=5 * expected / math.sqrt(150))
    assert np.std(shares) == pytest.approx(expected, rel=0.3)  # five standard errors


# --- Payment ----------------------------------------------------------------------------------------------------------


def registered(budgets, adjacency="add_remove", ledger=None):
    ledger = ledger or Ledger.in_memory()
    for name, budget in budgets.items():
        delta = None if budget is None else 0.0
        ledger.register(name, adjacency=adjacency, unit="patient", epsilon=budget, delta=delta)
    return ledger


def clinics(*names):
    return [Source(*people(20, seed=i), account=name) for i, name in enumerate(names)]


@pytest.fixture
def silent(monkeypatch):
    """Sources answer nothing: what is tested is who pays."""
    monkeypatch.setattr(MODULE, "_converse", lambda *args: None)


@pytest.mark.parametrize("name", SHORT)
def test_every_account_pays_epsilon_once(name):
    with registered(
        {"north": 1.0, "south": None, "source 2": 2.0, "source 3": 0.7, "west": 1.0, "east": 1.0}
    ) as ledger:
        named = [
            Source(*records, account=account) for records, account in zip(SOURCES, ("north", "south"), strict=False)
        ]
        found = SHORT[name]([*named, *SOURCES[2:4], Source(*SOURCES[4], account="west")], epsilon=0.7, ledger=ledger)
        for account in ("north", "south", "source 2", "source 3", "west"):
            assert ledger.epsilon(account, delta=0.0) == 0.7 == found.event.epsilon
            assert ledger.events(account) == {None: PureDpEvent(0.7)}
        assert ledger.epsilon("east") == 0.0
        assert {row["status"] for entry in ledger.report()["datasets"] for row in entry["open"]} == set()


def test_an_account_of_two_sources_pays_twice(silent):
    with registered({"north": 1.0, "south": 1.0}) as ledger:
        acc_t(clinics("north", "south", "north"), epsilon=0.4, ledger=ledger)
        assert ledger.epsilon("north") == pytest.approx(0.8) and ledger.epsilon("south") == 0.4
        with pytest.raises(BudgetExceeded, match="'north'"):
            acc_t(clinics("south", "north", "north"), epsilon=0.15, ledger=ledger)
        assert ledger.epsilon("north") == pytest.approx(0.8) and ledger.epsilon("south") == 0.4


@pytest.fixture
def no_computing(monkeypatch):
    """Fails the test if a source is asked anything."""
    monkeypatch.setattr(MODULE, "_converse", lambda *args: pytest.fail("a source was asked"))


def test_if_one_account_cannot_pay_nobody_pays_or_answers(no_computing):
    with registered({"north": 1.0, "south": 0.5, "west": 1.0}) as ledger:
        with pytest.raises(BudgetExceeded, match="'south'") as error:
            acc_t(clinics("north", "south", "west"), epsilon=0.7, ledger=ledger)
        assert error.value.would_spend == pytest.approx(0.7)
        assert [ledger.epsilon(name) for name in ("north", "south", "west")] == [0.0, 0.0, 0.0]
        assert ledger.report()["datasets"][0]["spends"] == []


GOOD = people(20)
MISTAKES = {
    "epsilon 0": ({"epsilon": 0.0}, ValueError, "epsilon must be > 0 .* got 0.0"),
    "epsilon nan": ({"epsilon": math.nan}, ValueError, "epsilon must be > 0 .* got nan"),
    "epsilon small": ({"epsilon": 1e-8}, ValueError, "epsilon=1e-08 .* use at least 0.0003"),
    "adjacency": ({"adjacency": "swap"}, ValueError, "adjacency must be one of .* got 'swap'"),
    "other adjacency": ({"adjacency": "replace_one"}, ValueError, "'replace_one', but 'source 0' .* 'add_remove'"),
    "old key": ({"key": np.zeros(2, np.uint32)}, TypeError, "key must be a typed key"),
    "many keys": ({"key": jax.random.split(KEY)}, ValueError, r"key has shape \(2,\)"),
    "iterations": ({"iterations": 0}, ValueError, "iterations .* got 0"),
    "half iterations": ({"iterations": 2.5}, ValueError, "iterations must be an integer .* got 2.5"),
    "bracket": ({"bracket": (3.0, 0.5)}, ValueError, r"bracket must be .* got \(3.0, 0.5\)"),
    "long bracket": ({"bracket": (1, 2, 3)}, ValueError, r"bracket must be .* got \(1, 2, 3\)"),
    "spacing": ({"spacing": "cubic"}, ValueError, "spacing must be 'log' or 'linear', got 'cubic'"),
    "search": ({"search": "ternary"}, ValueError, "search must be 'golden' or 'bisection', got 'ternary'"),
    "no sources": ({"sources": []}, ValueError, "sources is empty; give at least one"),
    "no list": ({"sources": GOOD}, TypeError, r"sources\[0\] must be a pair \(logits, labels\) .* got ndarray"),
    "triple": ({"sources": [(*GOOD, 3)]}, TypeError, r"sources\[0\] must be a pair"),
    "classes": ({"sources": [GOOD, people(9, m=4)]}, ValueError, r"same number of classes, got .* \[4, 6\]"),
    "labels": ({"sources": [(GOOD[0], GOOD[1] * 1.0)]}, TypeError, "'source 0' .* integer labels, got .* float64"),
    "lengths": ({"sources": [GOOD, (GOOD[0], GOOD[1][1:])]}, ValueError, "'source 1' must have logits"),
    "unregistered": ({"sources": [GOOD] * 3}, ValueError, "'source 2'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_before_anything_is_spent(mistake, no_computing):
    arguments, error, words = MISTAKES[mistake]
    with registered({"source 0": 1.0, "source 1": 1.0}) as ledger:
        with pytest.raises(error, match=words) as raised:
            acc_t(**{"sources": [GOOD, GOOD], "epsilon": 0.5, "ledger": ledger} | arguments)
        assert "20" not in str(raised.value) and "19" not in str(raised.value)  # sizes are private
        assert ledger.epsilon("source 0") == ledger.epsilon("source 1") == 0.0


def test_mistakes_of_the_other_methods_are_named_before_anything_is_spent(no_computing):
    with registered({"source 0": 1.0}) as ledger:
        for method, arguments, words in [
            (nll_t, {"bound": 0.0}, "bound .* got 0.0"),
            (nll_t, {"bound": 1e4}, "sensitivity of 10000.0"),
            (ece_t, {"bins": 0}, "bins .* got 0"),
            (ece_t, {"bins": 1.5}, "bins .* got 1.5"),
            (histogram_binning, {"form": "both"}, "form must be 'split' or 'published', got 'both'"),
            (logistic_binning, {"edges": (1.0, 0.0)}, "edges .* got"),
        ]:
            with pytest.raises(ValueError, match=words):
                method([GOOD], epsilon=0.5, ledger=ledger, **arguments)
        assert ledger.epsilon("source 0") == 0.0


def test_the_adjacency_is_that_of_the_account(silent):
    with registered({"north": 1.0}, adjacency="replace_one") as ledger:
        found = acc_t(clinics("north"), epsilon=1.0, adjacency="replace_one", ledger=ledger)
        assert found.method.split  # by default where that needs less noise
        assert ledger.epsilon("north") == 1.0
        with pytest.raises(ValueError, match="'add_remove', but 'north' is registered with 'replace_one'"):
            acc_t(clinics("north"), epsilon=1.0, ledger=ledger)
    assert not acc_t(clinics("north"), epsilon=1.0).method.split


def test_a_failure_while_sources_answer_stays_charged(monkeypatch):
    def fail(*args):
        raise RuntimeError("power cut")

    monkeypatch.setattr(MODULE, "_converse", fail)
    with registered({"north": 1.0, "south": 1.0}) as ledger:
        with pytest.raises(RuntimeError, match="power cut"):
            acc_t(clinics("north", "south"), epsilon=0.5, ledger=ledger)
        assert ledger.epsilon("north") == ledger.epsilon("south") == 0.5
        statuses = [row["status"] for entry in ledger.report()["datasets"] for row in entry["open"]]
        assert statuses == ["failed", "failed"]


DIE = """
import os, signal, sys
import numpy as np
import jaxdp.recalibration.recalibrate
from jaxdp.privacy import Ledger
from jaxdp.recalibration import Source, acc_t
sys.modules["jaxdp.recalibration.recalibrate"]._converse = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
records = np.zeros((3, 2), np.float32), np.zeros(3, int)
acc_t([Source(*records, account=name) for name in ("north", "south")], epsilon=0.5, ledger=Ledger(sys.argv[1]))
"""


def test_a_kill_while_sources_answer_leaves_every_account_charged(tmp_path):
    path = tmp_path / "ledger.sqlite"
    registered({"north": 1.0, "south": 1.0}, ledger=Ledger(path)).close()
    done = subprocess.run([sys.executable, "-c", DIE, path], cwd=ROOT, timeout=120, check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    with Ledger(path) as ledger:
        assert ledger.epsilon("north") == ledger.epsilon("south") == 0.5
        statuses = [row["status"] for entry in ledger.report()["datasets"] for row in entry["open"]]
        assert statuses == ["reserved", "reserved"]


# --- Speed ------------------------------------------------------------------------------------------------------------


def test_other_data_keys_epsilons_and_divisions_compile_nothing():
    def once(seed, epsilon, sizes):
        records = people(120, seed=seed)
        return SHORT["acc"](divided(*records, sizes), epsilon=epsilon, key=jax.random.fold_in(KEY, seed))

    play = MODULE._play
    once(0, 1.0, SIZES)
    before = play._cache_size()
    temperatures = {
        once(seed, epsilon, sizes).temperature
        for seed, (epsilon, sizes) in enumerate([(0.3, SIZES), (7.0, [120, 0, 0, 0, 0]), (1e3, [9, 9, 9, 9, 84])])
    }
    assert len(temperatures) == 3 and play._cache_size() == before


def test_every_function_has_the_common_arguments():
    for function in BY_NAME.values():
        parameters = inspect.signature(function).parameters
        assert list(parameters)[:3] == ["sources", "epsilon", "key"] and list(parameters)[-2:] == [
            "adjacency",
            "ledger",
        ]
        assert parameters["key"].default is None and parameters["adjacency"].default == "add_remove"
        assert {p.kind for name, p in parameters.items() if name != "sources"} == {inspect.Parameter.KEYWORD_ONLY}
    assert inspect.signature(acc_t).parameters["bracket"].default == (0.5, 3.0)
    assert inspect.signature(nll_t).parameters["bound"].default == 10.0
