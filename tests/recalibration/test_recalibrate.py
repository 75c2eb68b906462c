"""Recalibration end to end: results against float64 loops, payments, errors before payment, noise
of its own."""

import dataclasses
import functools
import inspect
import logging
import math
import signal
import sys

import jax
import numpy as np
import pytest

from jaxdp.privacy import (
    BudgetExceeded,
    Ledger,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PureDpEvent,
    SelfComposedDpEvent,
)
from jaxdp.privacy.events import composition
from jaxdp.recalibration import (
    AccT,
    EceT,
    HistogramBinning,
    NllT,
    Party,
    Recalibration,
    acc_t,
    ece_t,
    event,
    histogram_binning,
    logistic_binning,
    nll_t,
    none,
    one_source,
    recalibrate,
)
from jaxdp.transforms import noise
from tests import forked

KEY = noise.stream(bytes(range(16)), "test")
# the package shows the function of this name
MODULE = sys.modules["jaxdp.recalibration.recalibrate"]
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


SIZES = [50, 0, 1, 69]  # unequal, one empty, one of one record
SOURCES = divided(*people(120), SIZES)
# Few rounds and one shape, so that most tests share a compiled program. A round of all sources has
# noise in whole blocks of 16 numbers, whose program is half as long.
SHORT = {
    "acc": functools.partial(acc_t, iterations=2),
    "nll": functools.partial(nll_t, iterations=2),
    "ece": functools.partial(ece_t, iterations=2, bins=4),
    "histogram": functools.partial(histogram_binning, bins=16),
    "logistic": logistic_binning,
}


# --- Without noise ------------------------------------------------------------------------------


def objectives(logits, labels, bound=10.0, bins=15):
    """Returns each method's objective or, for signs, its function with a zero, of T in float64."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "objective", "search"),
    [
        ("acc", {}, "acc", golden_section),
        ("acc", {"iterations": 3, "split": True, "spacing": "linear"}, "acc", golden_section),
        ("acc", {"iterations": 3, "search": "bisection"}, "signed", bisection),
        ("nll", {"iterations": 3, "bound": 2.0, "spacing": "linear"}, "nll", golden_section),
        ("ece", {"iterations": 2, "bins": 7}, "ece", golden_section),
    ],
)
def test_without_noise_the_temperature_is_that_of_a_float64_search(
    name, settings, objective, search
):
    for seed in range(4):
        logits, labels = people(120, seed=seed)
        f = objectives(logits, labels, settings.get("bound", 10.0), settings.get("bins", 15))[
            objective
        ]
        low, high = 0.25, 16.0
        iterations = settings.get("iterations", 5)
        if settings.get("spacing") == "linear":
            expected = search(f, low, high, iterations)
        else:
            expected = math.exp(
                search(lambda p, f=f: f(math.exp(p)), math.log(low), math.log(high), iterations)
            )
        sources = divided(logits, labels, SIZES)
        found = BY_NAME[name](sources, epsilon=math.inf, bracket=(low, high), **settings)
        assert found.temperature == pytest.approx(expected, rel=1e-5)
        assert found.event == NonPrivateDpEvent()


@pytest.mark.slow
def test_without_noise_every_bin_says_its_accuracy():
    logits, labels = people(120)
    exp = np.exp((logits - logits.max(1, keepdims=True)).astype(np.float64))
    p, right = (1 / exp.sum(1)), logits.argmax(1) == labels
    for form in ("split", "published"):
        found = histogram_binning(SOURCES, epsilon=math.inf, bins=15, form=form)
        confidence = found.apply(logits)
        for b in range(15):
            inside = (b / 15 <= p) & (p < (b + 1) / 15 if b < 14 else p <= 1)
            expected = right[inside].mean() if inside.any() else (b + 0.5) / 15
            assert found.bins[b] == pytest.approx(expected, abs=1e-6)
            np.testing.assert_allclose(confidence[inside], expected, atol=1e-6)


@pytest.mark.slow
def test_apply_is_the_largest_softmax_probability_at_the_temperature():
    found = SHORT["acc"](SOURCES, epsilon=math.inf)
    logits = people(9, m=4, seed=7)[0]
    exp = np.exp(logits.astype(np.float64) / found.temperature)
    confidence = found.apply(logits.astype(np.float64))
    assert confidence.dtype == np.float32
    np.testing.assert_allclose(confidence, (exp / exp.sum(1, keepdims=True)).max(1), rtol=1e-5)
    with pytest.raises(ValueError, match=r"logits must be \[n, K\].* got shape \[n\]"):
        found.apply(logits[0])


@pytest.mark.slow
def test_a_bracket_that_is_too_narrow_is_reported():
    assert SHORT["acc"](SOURCES, epsilon=math.inf, bracket=(0.1, 0.2)).at_end == "high"
    assert SHORT["acc"](SOURCES, epsilon=math.inf, bracket=(20.0, 40.0)).at_end == "low"
    assert acc_t(SOURCES, epsilon=math.inf, iterations=3, bracket=(0.2, 40.0)).at_end is None


# --- Baselines ----------------------------------------------------------------------------------


def test_none_changes_nothing_and_costs_nothing():
    unchanged, logits = none(), people(9)[0]
    exp = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(
        unchanged.apply(logits), (exp / exp.sum(1, keepdims=True)).max(1), rtol=1e-5
    )
    assert (unchanged.temperature, unchanged.at_end, unchanged.event) == (1.0, None, NoOpDpEvent())


@pytest.mark.slow
def test_one_source_is_not_private_and_says_so():
    with Ledger.in_memory() as ledger:
        ledger.register("clinic", adjacency="add_remove", unit="patient")
        ledger.register("strict", adjacency="add_remove", unit="patient", epsilon=1e6, delta=0.0)
        found = one_source(Party(*people(120), account=ledger.account("clinic")))
        assert isinstance(found.method, NllT) and found.event == NonPrivateDpEvent()
        assert found.temperature == nll_t([people(120)], epsilon=math.inf).temperature
        assert ledger.epsilon("clinic", delta=1e-5) == math.inf
        with pytest.raises(BudgetExceeded):
            one_source(Party(*people(60), account=ledger.account("strict")), method=AccT())


# --- Odd sources --------------------------------------------------------------------------------

# Sums without noise are the same for all methods: one of a scalar and one of a vector.
WITHOUT_NOISE = [("acc", math.inf), ("histogram", math.inf)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epsilon"), [*((name, 1.0) for name in SHORT), *WITHOUT_NOISE])
def test_all_invalid_records_are_the_same_record(name, epsilon):
    """Compares kinds of invalid records. Tests of the methods show that each adds zero."""
    logits, labels = people(120)
    bad, wrong = np.tile(logits[:1], (5, 1)), np.array([0, 0, 0, -1, 6])
    bad[0, 0], bad[1, 2], bad[2, 5] = np.nan, np.inf, -np.inf
    many_kinds = np.concatenate([bad, logits[5:]]), np.concatenate([wrong, labels[5:]])
    one_kind = np.concatenate([np.full_like(bad, np.nan), logits[5:]]), labels
    method = SHORT[name](SOURCES, epsilon=epsilon).method
    first, second = (  # under one noise, which two releases of different records never share
        MODULE.converse(
            method,
            [Party(*source) for source in divided(*records, SIZES)],
            KEY,
            epsilon=epsilon,
            adjacency="add_remove",
        )
        for records in (many_kinds, one_kind)
    )
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epsilon"), [*((name, 1.0) for name in SHORT), *WITHOUT_NOISE])
def test_nothing_but_invalid_records_has_a_result_of_the_same_form(name, epsilon):
    invalid = divided(np.full((120, 6), np.nan, np.float32), np.zeros(120, int), SIZES)
    usual, found = (
        SHORT[name](sources, epsilon=epsilon, key=KEY) for sources in (SOURCES, invalid)
    )
    same_form(usual, found)


@pytest.mark.slow
def test_empty_sources_have_a_result_of_the_same_form():
    usual, found = (
        SHORT["histogram"](sources, epsilon=1.0, key=KEY) for sources in (SOURCES, [people(0)] * 2)
    )
    same_form(usual, found)


def same_form(usual, found):
    assert jax.tree.structure(found.parameters) == jax.tree.structure(usual.parameters)
    for leaf, like in zip(
        jax.tree.leaves(found.parameters), jax.tree.leaves(usual.parameters), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype) and np.isfinite(leaf).all()
    confidence = found.apply(people(9)[0])
    assert ((confidence >= 0) & (confidence <= 1)).all()


@pytest.mark.slow
def test_the_result_shows_methods_parameters_and_the_price_alone():
    assert set(Recalibration.__dataclass_fields__) == {"method", "parameters", "event"}
    found = SHORT["acc"](SOURCES, epsilon=1.0, key=KEY)
    assert found.event == PureDpEvent(1.0)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found.parameters))


# --- Noise --------------------------------------------------------------------------------------


def counts(sources=SOURCES, **arguments):
    """Returns a value that differs whenever the noise differs."""
    return SHORT["histogram"](sources, epsilon=1.0, **arguments).parameters.tolist()


@pytest.mark.slow
def test_a_key_repeats_its_noise_and_without_one_noise_is_fresh():
    assert counts(key=KEY) == counts(key=KEY)
    assert counts(key=KEY) != counts(key=jax.random.fold_in(KEY, 1))
    assert len({tuple(counts()) for _ in range(5)}) == 5


@pytest.mark.parametrize("name", BY_NAME)
def test_numbers_of_64_bits_change_no_method(name):
    source = people(40)
    exact = BY_NAME[name]([source], epsilon=math.inf)
    with jax.enable_x64(True):
        BY_NAME[name]([source], epsilon=1.0, key=KEY)
        wide = BY_NAME[name]([source], epsilon=math.inf)
    np.testing.assert_allclose(wide.apply(source[0]), exact.apply(source[0]), rtol=1e-4)


def test_payments_never_share_noise():
    with registered({f"source {i}": None for i in range(len(SOURCES))}) as ledger:
        paying = [
            Party(*records, account=ledger.account(f"source {i}"))
            for i, records in enumerate(SOURCES)
        ]
        once = counts(paying, key=KEY)
        assert counts(paying, key=KEY) == once  # the same release, paid once
        assert ledger.events("source 0") == {None: PureDpEvent(1.0)}
        # One right record becomes wrong.
        right = np.flatnonzero(paying[3].labels == paying[3].logits.argmax(1))
        labels = paying[3].labels.copy()
        labels[right[0]] = (labels[right[0]] + 1) % 6
        changed = [*paying[:3], dataclasses.replace(paying[3], labels=labels)]
        found = [counts(changed, key=KEY), *(counts(paying) for _ in range(3))]
        assert ledger.events("source 0") == {None: SelfComposedDpEvent(PureDpEvent(1.0), 5)}
        assert len(set(map(tuple, [once, *found]))) == 5
        # Under one noise the label would move the bin of its record only. Two noises are equal in
        # the other 15 bins, by ends and middles alone, with a probability below 1e-10.
        exact = [
            SHORT["histogram"](sources, epsilon=math.inf).parameters
            for sources in (paying, changed)
        ]
        others = np.equal(*exact)
        assert others.sum() == 15
        assert np.not_equal(found[0], once)[others].any()


def released(method, sources, epsilon, keys):
    """Returns what `recalibrate` releases under each of many keys, without its facts and
    payment."""
    parties = [Party(*source) for source in sources]
    terms = {"epsilon": epsilon, "adjacency": "add_remove"}
    return [
        MODULE.converse(method, parties, jax.random.fold_in(KEY, i), **terms) for i in range(keys)
    ]


@pytest.mark.slow
def test_sources_do_not_share_noise():
    """Checks that the noise of 400 empty sources is 20 times the noise of one, as if
    independent."""
    nothing = [(np.zeros((0, 2), np.float32), np.zeros(0, int))] * 400

    class Listening(AccT):
        def finish(self, state):
            return state[0].values

        def update(self, k, state, answer):
            return (
                (state[0]._replace(values=state[0].values + answer), state[1]) if k == 0 else state
            )

    drawn = [values[0] for values in released(Listening(iterations=1), nothing, 2.0, 40)]
    # A scale of 1: standard deviation sqrt(2 x 400); with shared noise 20 times that. Five standard
    # errors.
    assert np.std(drawn) == pytest.approx(math.sqrt(800), rel=5 / math.sqrt(2 * 40))


@pytest.mark.slow
def test_noise_has_the_scale_of_its_epsilon():
    """Checks the error of a histogram over many records: sd sqrt(2 d) / epsilon, in both cells."""
    logits = np.tile(np.float32([[0.0, 0.0]]), (4000, 1))
    sources = divided(logits, np.arange(4000) % 2, [1000] * 4)
    shares = [bins[0] for bins in released(HistogramBinning(bins=1), sources, 0.2, 150)]
    # (R + a) / (R + W + a + b) with R = W = 2000: to first order 1/2 + (a - b) / 8000.
    expected = math.sqrt(2 * 2 * 4) / 0.2 / 8000
    assert np.mean(shares) == pytest.approx(0.5, abs=5 * expected / math.sqrt(150))
    assert np.std(shares) == pytest.approx(expected, rel=0.3)  # five standard errors


# --- Payment ------------------------------------------------------------------------------------


def registered(budgets, adjacency="add_remove", ledger=None):
    ledger = ledger or Ledger.in_memory()
    for name, budget in budgets.items():
        delta = None if budget is None else 0.0
        ledger.register(name, adjacency=adjacency, unit="patient", epsilon=budget, delta=delta)
    return ledger


def paying(ledger):
    """Returns SOURCES with accounts "source 0", ..., which are registered without a budget."""
    for i in range(len(SOURCES)):
        ledger.register(f"source {i}", adjacency="add_remove", unit="patient")
    return [
        Party(*records, account=ledger.account(f"source {i}")) for i, records in enumerate(SOURCES)
    ]


def clinics(ledger, *names):
    return [
        Party(*people(20, seed=i), account=ledger.account(name)) for i, name in enumerate(names)
    ]


@pytest.fixture
def silent(monkeypatch):
    """Sources answer nothing: what is tested is who pays."""
    monkeypatch.setattr(MODULE, "converse", lambda *args, **kwargs: none().parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_every_account_pays_epsilon_once(name):
    with registered(
        {"north": 1.0, "south": None, "source 2": 2.0, "west": 0.7, "east": 1.0}
    ) as ledger:
        names = ("north", "south", "source 2", "west")
        sources = [
            Party(*records, account=ledger.account(name))
            for records, name in zip(SOURCES, names, strict=True)
        ]
        found = SHORT[name](sources, epsilon=0.7)
        for account in names:
            assert ledger.epsilon(account, delta=0.0) == 0.7 == found.event.epsilon
            assert ledger.events(account) == {None: PureDpEvent(0.7)}
        assert ledger.epsilon("east") == 0.0
        assert {
            row["status"] for entry in ledger.report()["datasets"] for row in entry["open"]
        } == set()


@pytest.mark.slow
def test_a_grid_search_pays_as_the_golden_section_search(silent):
    grid = {"iterations": 2, "search": "grid"}
    with registered({"north": 0.9}) as ledger:
        for function, kind in ((acc_t, AccT), (nll_t, NllT), (ece_t, EceT)):
            result = function(clinics(ledger, "north"), epsilon=0.3, **grid)
            assert result.method == kind(**grid) and result.method.rounds == 3
            assert result.event == PureDpEvent(0.3)
        assert ledger.epsilon("north") == pytest.approx(0.9)


@pytest.mark.slow
def test_a_grid_ends_at_one_of_its_temperatures_and_monotone_bins_ascend():
    sources = divided(*people(120), SIZES)
    found = acc_t(sources, epsilon=5.0, key=KEY, iterations=2, search="grid")
    grid = 0.5 * 6 ** ((np.arange(3) + 0.5) / 3)  # thirds of log T between 0.5 and 3
    assert np.abs(grid - found.temperature).min() < 1e-5
    bins = {
        monotone: SHORT["histogram"](sources, epsilon=1.0, key=KEY, monotone=monotone).bins
        for monotone in (False, True)
    }
    assert (np.diff(bins[True]) >= 0).all() and not (np.diff(bins[False]) >= 0).all()


def test_an_account_of_two_sources_pays_twice(silent):
    with registered({"north": 1.0, "south": 1.0}) as ledger:
        acc_t(clinics(ledger, "north", "south", "north"), epsilon=0.4)
        assert ledger.epsilon("north") == pytest.approx(0.8) and ledger.epsilon("south") == 0.4
        with pytest.raises(BudgetExceeded, match="'north'"):
            acc_t(clinics(ledger, "south", "north", "north"), epsilon=0.15)
        assert ledger.epsilon("north") == pytest.approx(0.8) and ledger.epsilon("south") == 0.4


@pytest.fixture
def no_computing(monkeypatch):
    """Fails the test if a source is asked anything."""
    monkeypatch.setattr(
        MODULE, "converse", lambda *args, **kwargs: pytest.fail("a source was asked")
    )


GOOD = people(20)
MISTAKES = {  # beside those of tests/test_stages.py
    "epsilon nan": ({"epsilon": math.nan}, ValueError, "epsilon must be > 0 .* got nan"),
    "epsilon small": ({"epsilon": 1e-8}, ValueError, "epsilon=1e-08 .* Use at least 0.0003"),
    "old key": ({"key": np.zeros(2, np.uint32)}, TypeError, "key must be a typed key"),
    "many keys": (
        {"key": jax.random.split(KEY)},
        ValueError,
        r"key must have shape \(\), got \(2,\)",
    ),
    "half iterations": (
        {"iterations": 2.5},
        ValueError,
        "iterations must be an integer .* got 2.5",
    ),
    "bracket": ({"bracket": (3.0, 0.5)}, ValueError, r"bracket must be .* got \(3.0, 0.5\)"),
    "long bracket": ({"bracket": (1, 2, 3)}, ValueError, r"bracket must be .* got \(1, 2, 3\)"),
    "spacing": ({"spacing": "cubic"}, ValueError, "spacing must be 'log' or 'linear', got 'cubic'"),
    "search": (
        {"search": "ternary"},
        ValueError,
        "search must be 'golden', 'grid' or 'bisection', got 'ternary'",
    ),
    "no sources": ({"sources": []}, ValueError, "sources is empty. Give at least one"),
    "no list": (
        {"sources": GOOD},
        TypeError,
        r"sources\[0\] must be a pair \(logits, labels\) .* got ndarray",
    ),
    "triple": ({"sources": [(*GOOD, 3)]}, TypeError, r"sources\[0\] must be a pair"),
    "classes": (
        {"sources": [GOOD, people(9, m=4)]},
        ValueError,
        r"same number of classes, got .* \[4, 6\]",
    ),
    "labels": (
        {"sources": [(GOOD[0], GOOD[1] * 1.0)]},
        TypeError,
        r"sources\[0\].* must be integers, got dtype float64",
    ),
    "lengths": (
        {"sources": [GOOD, (GOOD[0], GOOD[1][1:])]},
        ValueError,
        r"sources\[1\].* labels .* of another n",
    ),
    "some accounts": (
        {"sources": [0, GOOD, 1]},
        ValueError,
        r"sources \[1\] have no account but others do",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_before_anything_is_spent(mistake, no_computing):
    arguments, error, words = MISTAKES[mistake]
    with registered({"source 0": 1.0, "source 1": 1.0}) as ledger:
        given = {"sources": [0, 1], "epsilon": 0.5} | arguments
        if given["sources"] is not GOOD:  # numbers stand for sources that can pay
            paying = clinics(ledger, "source 0", "source 1")
            given["sources"] = [
                paying[one] if isinstance(one, int) else one for one in given["sources"]
            ]
        with pytest.raises(error, match=words) as raised:
            acc_t(**given)
        assert "20" not in str(raised.value) and "19" not in str(raised.value)  # sizes are private
        assert ledger.epsilon("source 0") == ledger.epsilon("source 1") == 0.0


def test_mistakes_of_the_other_methods_are_named_before_anything_is_spent(no_computing):
    with registered({"source 0": 1.0}) as ledger:
        for method, arguments, words in [
            (nll_t, {"bound": 0.0}, "bound .* got 0.0"),
            (nll_t, {"bound": 1e4}, "sensitivity of 10000.0"),
            (ece_t, {"bins": 0}, "bins .* got 0"),
            (ece_t, {"bins": 1.5}, "bins .* got 1.5"),
            (
                histogram_binning,
                {"form": "both"},
                "form must be 'split' or 'published', got 'both'",
            ),
            (logistic_binning, {"edges": (1.0, 0.0)}, "edges .* got"),
        ]:
            with pytest.raises(ValueError, match=words):
                method(clinics(ledger, "source 0"), epsilon=0.5, **arguments)
        assert ledger.epsilon("source 0") == 0.0


def test_the_adjacency_is_that_of_the_account(silent):
    with registered({"north": 1.0}, adjacency="replace_one") as ledger:
        found = acc_t(clinics(ledger, "north"), epsilon=1.0, adjacency="replace_one")
        assert found.method.split  # by default where that needs less noise
        assert ledger.epsilon("north") == 1.0
        with pytest.raises(
            ValueError, match="'add_remove', but 'north' is registered with 'replace_one'"
        ):
            acc_t(clinics(ledger, "north"), epsilon=1.0)
    assert not acc_t([people(20)], epsilon=1.0).method.split


@pytest.mark.slow
def test_what_planners_ask_is_what_is_charged():
    assert (event(0.3), event(math.inf)) == (PureDpEvent(0.3), NonPrivateDpEvent())
    with Ledger.in_memory() as ledger:
        sources = paying(ledger)
        for epsilon in (0.3, math.inf):
            found = SHORT["histogram"](sources, epsilon=epsilon)
            assert found.event == event(epsilon)
        assert composition(ledger.events("source 0")[None]) == {
            PureDpEvent(0.3): 1,
            NonPrivateDpEvent(): 1,
        }


# --- What a crash leaves ------------------------------------------------------------------------

DIE = """
import os, signal, sys
import numpy as np
import jaxdp.recalibration.recalibrate
from jaxdp.privacy import Ledger
from jaxdp.recalibration import Party, acc_t

path, workdir, dies = sys.argv[1], sys.argv[2], sys.argv[3] == "dies"
module = sys.modules["jaxdp.recalibration.recalibrate"]
converse = module.converse

def answers(*args, **kwargs):
    found = converse(*args, **kwargs)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

module.converse = answers
records = np.zeros((3, 2), np.float32), np.zeros(3, int)
with Ledger(path) as ledger:
    sources = [Party(*records, account=ledger.account(name)) for name in ("north", "south")]
    print(acc_t(sources, epsilon=0.5, workdir=workdir).temperature)
"""


def started(path, workdir, how):
    return forked.run(DIE, path, workdir, how, modules=forked.STAGES)


@pytest.mark.slow
def test_a_kill_leaves_every_account_charged_and_its_workdir_goes_on_for_nothing(tmp_path):
    path, workdir = tmp_path / "ledger.sqlite", tmp_path / "run"
    registered({"north": 0.5, "south": 0.5}, ledger=Ledger(path)).close()
    assert started(path, workdir, "dies").returncode == -signal.SIGKILL
    assert (workdir / "secret_seed").exists() and not (workdir / "released.safetensors").exists()
    with Ledger(path) as ledger:
        assert ledger.epsilon("north") == ledger.epsilon("south") == 0.5
        statuses = [row["status"] for entry in ledger.report()["datasets"] for row in entry["open"]]
        assert statuses == ["reserved", "reserved"]
    done = [started(path, workdir, "lives") for _ in range(2)]
    assert [run.returncode for run in done] == [0, 0]
    assert done[0].stdout == done[1].stdout and 0.5 < float(done[0].stdout) < 3
    assert not list(tmp_path.rglob("secret_seed"))
    with Ledger(path) as ledger:
        assert ledger.epsilon("north") == ledger.epsilon("south") == 0.5
        assert [row for entry in ledger.report()["datasets"] for row in entry["open"]] == []


class PowerCut(Exception):
    """In place of a crash."""


@pytest.fixture
def dying(monkeypatch):
    """Makes the first conversation die once it has its result, which it writes down."""
    heard, converse = [], MODULE.converse

    def answers(*args, **kwargs):
        heard.append(converse(*args, **kwargs))
        if len(heard) == 1:
            raise PowerCut
        return heard[-1]

    monkeypatch.setattr(MODULE, "converse", answers)
    return heard


def same(one, other):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(HistogramBinning):
    """A method that a user writes; the class says nothing of the weight."""

    def summand(self, k, records, temperature):
        return WEIGHT["now"] * super().summand(k, records, temperature)

    def sensitivity(self, k, adjacency, num_classes):
        return 1.0


WEIGHT = {"now": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["division", "method", "nothing"])
def test_what_is_changed_after_a_crash_draws_fresh_noise_and_pays_again(
    change, tmp_path, dying, monkeypatch
):
    """tests/test_stages.py has other data, another epsilon and another machine."""
    with registered({"north": None, "south": None}) as ledger:

        def ask(cut=20):
            if change in ("method", "nothing"):
                MODULE._play.clear_cache()  # as in a process of its own
            parts = divided(*people(40), [cut, 40 - cut])
            names = ("north", "south")
            sources = [
                Party(*part, account=ledger.account(name))
                for part, name in zip(parts, names, strict=True)
            ]
            return recalibrate(Weighted(bins=3), sources, epsilon=1.0, workdir=tmp_path)

        with pytest.raises(PowerCut):
            ask()
        if change == "method":
            monkeypatch.setitem(WEIGHT, "now", 0.5)
        ask(**({"cut": 19} if change == "division" else {}))
        assert same(*dying) == (change == "nothing")
        spent = sum(composition(ledger.events("north")[None]).values())
        assert spent == (1 if change == "nothing" else 2)
    assert not list(tmp_path.rglob("secret_seed"))


@pytest.mark.slow
def test_a_method_that_calls_back_to_python_is_charged_again_after_a_crash(tmp_path, dying):
    class Calling(HistogramBinning):
        def summand(self, k, records, temperature):
            added = super().summand(k, records, temperature)
            return jax.pure_callback(
                np.asarray, jax.ShapeDtypeStruct(added.shape, added.dtype), added
            )

    with registered({"north": None}) as ledger:
        ask = functools.partial(
            recalibrate, Calling(bins=16), clinics(ledger, "north"), epsilon=1.0, workdir=tmp_path
        )
        with pytest.raises(PowerCut):
            ask()
        found = ask()
        assert not same(*dying) and ledger.events("north") == {
            None: SelfComposedDpEvent(PureDpEvent(1.0), 2)
        }
        assert same(ask().parameters, found.parameters) and len(dying) == 2  # what is kept is kept
        assert ledger.events("north") == {None: SelfComposedDpEvent(PureDpEvent(1.0), 2)}


@pytest.mark.slow
def test_a_workdir_keeps_one_result(tmp_path):
    with registered({"north": 1.0}) as ledger:
        ask = functools.partial(SHORT["histogram"], epsilon=0.5, workdir=tmp_path)
        ask(clinics(ledger, "north"))
        with pytest.raises(ValueError, match="keeps another release"):
            ask(clinics(ledger, "north"), bins=3)
        assert ledger.epsilon("north") == 0.5
    with registered({"north": 1.0}) as restored:  # an older copy does not know what is kept
        ask(clinics(restored, "north"))
        assert restored.epsilon("north") == 0.5


# --- Speed --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_data_keys_epsilons_and_divisions_compile_nothing(caplog):
    def once(seed, epsilon, sizes):
        records = people(120, seed=seed)
        return SHORT["acc"](
            divided(*records, sizes), epsilon=epsilon, key=jax.random.fold_in(KEY, 3 + seed)
        )

    once(0, 1.0, SIZES)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        temperatures = {
            once(seed, epsilon, sizes).temperature
            for seed, (epsilon, sizes) in enumerate(
                4 * [(0.3, SIZES), (7.0, [120, 0, 0, 0]), (1e3, [9, 9, 9, 93])]
            )
        }
    assert len(temperatures) > 1  # two reductions of the bracket leave four values
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]


@pytest.mark.slow
def test_every_function_has_the_common_arguments():
    for function in BY_NAME.values():
        parameters = inspect.signature(function).parameters
        assert list(parameters)[:3] == ["sources", "epsilon", "key"]
        assert list(parameters)[-2:] == ["adjacency", "workdir"]
        assert parameters["key"].default is None and parameters["adjacency"].default == "add_remove"
        assert {p.kind for name, p in parameters.items() if name != "sources"} == {
            inspect.Parameter.KEYWORD_ONLY
        }
    assert inspect.signature(acc_t).parameters["bracket"].default == (0.5, 3.0)
    assert inspect.signature(nll_t).parameters["bound"].default == 10.0
