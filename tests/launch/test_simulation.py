"""Simulated trials equal the real trials, and their noise is the sum over all sources."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp.recalibration import (
    AccBisection,
    AccT,
    Bracket,
    EceT,
    HistogramBinning,
    LogisticBinning,
    NllT,
    Records,
    ece,
    play,
    recalibrate,
)
from jaxdp.recalibration.protocol import Scale
from launch import simulation
from launch.simulation import Order, Setting, noise_of_sources, reach, simulate, unchanged

pytestmark = pytest.mark.slow

WIDE = Bracket(low=0.5, high=16.0)
METHODS = [
    AccT(bracket=WIDE, iterations=3),
    AccT(bracket=WIDE, iterations=2, split=True),
    AccBisection(bracket=WIDE, iterations=3),
    NllT(bracket=WIDE, iterations=2),
    EceT(bracket=WIDE, iterations=2),
    AccT(bracket=WIDE, iterations=2, search="grid"),
    HistogramBinning(monotone=True),
    LogisticBinning(),
]
SETTINGS = [Setting(4, 10, math.inf), Setting(3, 20, math.inf)]
TRIALS = 3


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 300)
    logits = 4 * (rng.normal(size=(300, 5)) + 1.2 * np.eye(5)[labels])
    return Records(jnp.asarray(logits, jnp.float32), jnp.asarray(labels, jnp.int32))


@pytest.fixture(scope="module")
def order():
    return Order.draw(7, records=300, trials=TRIALS, settings=SETTINGS)


def of_trial(records, order, trial, setting):
    """Returns the (logits, labels) of each source in a trial."""
    used = np.asarray(order.rows[trial])[: setting.sources * setting.samples]
    logits, labels = np.asarray(records.logits), np.asarray(records.labels)
    return [(logits[rows], labels[rows]) for rows in used.reshape(setting.sources, -1)]


def judged(found, records, order, trial, setting):
    """Returns ECE and Brier score on the records that the trial did not use, from the public
    functions."""
    used = np.asarray(order.rows[trial])[: setting.sources * setting.samples]
    confidence, right = found.apply(records.logits), records.correct
    # a mask, so that all trials share compiled programs
    test = np.isin(np.arange(300), used, invert=True)
    errors = (np.float64(confidence) - np.asarray(right))[test]
    return float(ece(confidence, right, mask=test)), np.mean(errors**2)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_without_noise_a_trial_is_a_call_on_its_sources(method, records, order):
    # The programs of a setting are its own. One method shows that each setting has its outcome.
    settings = SETTINGS if method is METHODS[0] else SETTINGS[:1]
    outcomes = simulate(method, records, order, settings, key=jax.random.key(0))
    for setting, outcome in zip(settings, outcomes, strict=True):
        for trial in range(TRIALS):
            sources = of_trial(records, order, trial, setting)
            found = recalibrate(method, sources, epsilon=math.inf)
            expected = judged(found, records, order, trial, setting)
            np.testing.assert_allclose(
                (outcome.ece[trial], outcome.brier[trial]), expected, atol=2e-5
            )


# The first source alone is a shorter beginning of the order, whatever the method asks. A search and
# bins are judged by different functions.
@pytest.mark.parametrize("method", [METHODS[0], HistogramBinning(monotone=True)], ids=repr)
def test_without_a_key_a_trial_is_a_call_on_its_first_source(method, records, order):
    settings = SETTINGS if method is METHODS[0] else SETTINGS[:1]
    outcomes = simulate(method, records, order, settings, key=None)
    for setting, outcome in zip(settings, outcomes, strict=True):
        for trial in range(TRIALS):
            first, *_ = of_trial(records, order, trial, setting)
            found = recalibrate(method, [first], epsilon=math.inf)
            expected = judged(found, records, order, trial, setting)
            np.testing.assert_allclose(
                (outcome.ece[trial], outcome.brier[trial]), expected, atol=2e-5
            )


def test_without_recalibration_confidences_are_those_of_the_model(records, order):
    outcome = unchanged(records, order, SETTINGS)[1]
    top = np.asarray(jax.nn.softmax(records.logits).max(1), np.float64)
    right = np.asarray(records.correct)
    for trial in range(TRIALS):
        test = np.setdiff1d(np.arange(300), np.asarray(order.rows[trial])[:60])
        assert outcome.brier[trial] == pytest.approx(np.mean((top - right)[test] ** 2), abs=1e-5)


@pytest.mark.parametrize("sources", [1, 5, 6])
def test_noise_is_the_sum_of_the_noise_of_so_many_sources(sources):
    # Against 40,000 sums drawn by NumPy. A false alarm has probability 1e-4. Other scales are
    # rejected.
    drawn = np.asarray(
        noise_of_sources(jax.random.key(sources), (40_000, 1, 1), sources, Scale(0.5, 6.0))
    ).ravel()
    rng = np.random.default_rng(1)
    for scale, same in ((3.0, True), (0.7 * 3.0, False), (1.3 * 3.0, False)):
        sums = rng.laplace(scale=scale, size=(40_000, sources)).sum(1)
        assert (stats.ks_2samp(drawn, sums).pvalue > 1e-4) == same


@pytest.mark.parametrize("method", METHODS[:5], ids=repr)
def test_every_temperature_that_random_answers_lead_to_is_tabulated(method):
    asked, ends = reach(method)
    rng = np.random.default_rng(2)
    shape = 100, method.rounds, 15 if isinstance(method, EceT) else 1
    answers = rng.normal(size=shape) * 10.0 ** rng.normal(size=(*shape[:2], 1))
    for seen, table in zip(played(method, answers), [*asked, ends], strict=True):
        distance = np.abs(table / np.asarray(seen)[:, None] - 1).min(axis=1)
        assert (distance < 1e-5).all()


def played(method, answers):
    """Returns the temperatures of each round and of the end, [n] each, for answers [n, rounds,
    ...]."""

    def one(script):
        asked = []
        end = play(method, lambda k, t: asked.append(t) or script[k], 0.0)
        return [*asked, end.temperature]

    return jax.jit(jax.vmap(one))(np.float32(answers))


@pytest.mark.slow
@pytest.mark.parametrize("method", [AccT(iterations=4), AccT(iterations=3, split=True)], ids=repr)
def test_equal_states_are_followed_once_and_lose_no_temperature(method):
    """A twin that keeps one state for each temperature asked loses some."""
    sizes = [[-(10.0**-k), -(10.0**k), 10.0**-k, 10.0**k] for k in range(3, 3 + method.rounds)]
    every = played(method, np.array(list(itertools.product(*sizes)))[..., None])
    asked, ends = reach(method)
    for mine, scripted in zip([*asked, ends], every, strict=True):
        np.testing.assert_array_equal(mine, np.unique(scripted))
    ends = reach(AccT(iterations=12))[1]
    # Equal temperatures of two scripts may differ in their last bit. How often depends on the
    # compiler's optimisations.
    apart = 1 + np.sum(np.diff(ends) > 1e-6 * ends[:-1])
    fibonacci = [1, 1]
    while len(fibonacci) < 12 + 3:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    # 4^13 scripts would take hours
    assert apart == fibonacci[-1] - 1 == 609 and len(ends) < 2 * apart


def test_a_temperature_that_is_not_tabulated_gives_no_number(records, order, monkeypatch):
    asked, ends = reach(METHODS[0])
    monkeypatch.setattr(
        simulation, "reach", lambda _: ([1.01 * temperatures for temperatures in asked], ends)
    )
    for outcome in simulate(METHODS[0], records, order, SETTINGS, key=None):
        assert np.isnan(outcome.ece).all()
