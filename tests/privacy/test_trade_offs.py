"""`Ledger.trade_off`: curves of f-DP and their mu, against closed forms and against samples."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from jaxdp.privacy import Ledger, delta
from jaxdp.privacy.events import (
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SelfComposedDpEvent,
    unproven,
)
from jaxdp.privacy.trade_offs import corners

DELTA = 1e-5
ALPHAS = np.concatenate([np.logspace(-9, -2, 30), np.linspace(0.02, 1, 60)])
STEPS = 10
STEP = PoissonSampledDpEvent(0.3, GaussianDpEvent(1.0))


def curve_of(*events, **terms):
    defaults = {"adjacency": "add_remove", "unit": "example", "delta": DELTA}
    with Ledger.in_memory() as ledger:
        ledger.register("data", **defaults | terms)
        for event in events:
            ledger.spend("data", event)
        return ledger.trade_off("data")


def gaussian_beta(mu, alpha):
    """G_mu, by the plain formula."""
    return stats.norm.cdf(stats.norm.ppf(1 - alpha) - mu)


def at(curve, alphas):
    return np.array([curve.at(float(alpha)) for alpha in alphas])


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_curve_of_gaussians_is_that_of_gaussian_dp(adjacency):
    curve = curve_of(GaussianDpEvent(3.0), GaussianDpEvent(4.0), adjacency=adjacency)
    mu = math.hypot(1 / 3, 1 / 4) * (2 if adjacency == "replace_one" else 1)
    assert curve.mu == pytest.approx(mu, rel=1e-9) and curve.mu >= mu
    exact = gaussian_beta(mu, ALPHAS)
    assert (at(curve, ALPHAS) <= exact + 1e-15).all()
    assert at(curve, ALPHAS) == pytest.approx(exact, abs=1e-4)
    # Lines touch the curve, so that the best point of 50 near a corner is on it.
    near = np.linspace(0.3, 0.31, 50)
    assert (gaussian_beta(mu, near) - at(curve, near)).min() < 1e-8
    assert curve.mu_up_to_slack <= curve.mu
    # Broken twins: another mu, and straight lines between points ON the curve.
    assert (at(curve, ALPHAS) > gaussian_beta(1.1 * mu, ALPHAS) + 1e-3).any()
    chords = np.interp(ALPHAS, ALPHAS[::9], exact[::9])
    assert (chords > exact + 1e-3).any()


def test_the_curve_of_a_pure_release():
    curve = curve_of(PureDpEvent(1.0))
    exact = np.maximum(1 - math.e * ALPHAS, (1 - ALPHAS) / math.e).clip(0)
    assert at(curve, ALPHAS) == pytest.approx(exact, abs=1e-9)
    assert curve.mu == pytest.approx(-2 * stats.norm.ppf(1 / (1 + math.e)), rel=1e-6)
    assert (gaussian_beta(curve.mu, ALPHAS) <= exact + 1e-9).all()
    assert (gaussian_beta(0.99 * curve.mu, ALPHAS) > exact).any()
    # The mu of several releases may be far below the root of the sum of squares.
    several = curve_of(SelfComposedDpEvent(PureDpEvent(0.2), 7))
    assert several.mu <= math.sqrt(7) * -2 * stats.norm.ppf(1 / (1 + math.exp(0.2)))
    assert (gaussian_beta(several.mu, ALPHAS) <= at(several, ALPHAS) + 1e-9).all()


@pytest.fixture(scope="module")
def errors():
    """The error rates of likelihood-ratio tests on sampled Gaussians, in both directions."""
    rng = np.random.default_rng(20261127)
    size = 60_000

    def losses(means):
        x = rng.normal(size=(size, STEPS)) + means
        return np.log1p(0.3 * np.expm1(x - 0.5)).sum(axis=1)

    absent = losses(0.0)
    present = losses(rng.random((size, STEPS)) < 0.3)
    rates = []
    for threshold in np.quantile(absent, np.linspace(0.01, 0.99, 25)):
        alarms = (absent > threshold).mean()
        misses = (present <= threshold).mean()
        rates += [(alarms, misses), (misses, alarms)]
    return np.array(rates), size


def check_errors(curve, errors):
    """Fails if attackers err less than the curve says, beyond six standard deviations."""
    rates, size = errors
    alarms, misses = (rates + 6 * np.sqrt(rates * (1 - rates) / size) + 1e-4).T
    assert (misses >= at(curve, alarms.clip(0, 1))).all()


@pytest.mark.slow
def test_no_attacker_errs_less_than_the_curve_says(errors):
    curve = curve_of(SelfComposedDpEvent(STEP, STEPS))
    check_errors(curve, errors)
    rates, _ = errors
    # The best attackers come near in the worse direction.
    assert (rates[:, 1] - at(curve, rates[:, 0])).min() < 0.01
    for twin in (
        SelfComposedDpEvent(STEP, STEPS - 2),
        SelfComposedDpEvent(PoissonSampledDpEvent(0.3, GaussianDpEvent(1.3)), STEPS),
        SelfComposedDpEvent(PoissonSampledDpEvent(0.2, GaussianDpEvent(1.0)), STEPS),
    ):
        with pytest.raises(AssertionError):
            check_errors(curve_of(twin), errors)


def test_the_curve_says_the_same_as_delta():
    event = SelfComposedDpEvent(STEP, STEPS)
    curve = curve_of(event)
    alpha, beta = np.array(curve.alpha), np.array(curve.beta)
    for epsilon in (0.0, 0.3, 1.5, 4.0):
        # Proposition 2.12 of Dong, Roth and Su: delta is the largest gap to a line.
        implied = (1 - math.exp(epsilon) * alpha - beta).max()
        exact = delta(event, epsilon=epsilon)
        assert implied == pytest.approx(exact, rel=5e-3)
        assert implied >= exact * (1 - 1e-3)


def test_mu_up_to_slack_is_the_smallest():
    curve = curve_of(SelfComposedDpEvent(STEP, STEPS))
    assert curve.mu == pytest.approx(math.sqrt(STEPS), rel=1e-9)  # that of whole batches
    assert curve.slack == DELTA and 0.5 < curve.mu_up_to_slack < 0.8 * curve.mu
    alpha, beta = np.array(curve.alpha), np.array(curve.beta)

    def holds(mu):
        bound = gaussian_beta(mu, np.minimum(alpha + DELTA, 1.0)) - DELTA
        return (beta >= bound - 1e-12).all()

    assert holds(curve.mu_up_to_slack) and not holds(0.999 * curve.mu_up_to_slack)


def test_the_worst_part_counts_and_nothing_is_free():
    with Ledger.in_memory() as ledger:
        ledger.register("data", adjacency="add_remove", unit="example")
        for part, sigma in (("a", 3.0), ("b", 2.0)):
            ledger.spend("data", GaussianDpEvent(sigma), partition=part)
        assert ledger.trade_off("data", slack=DELTA).mu == pytest.approx(1 / 2)
        assert ledger.trade_off("data", slack=DELTA, partition="a").mu == pytest.approx(1 / 3)
        with pytest.raises(ValueError, match="slack is needed"):
            ledger.trade_off("data")
        with pytest.raises(ValueError, match=r"slack must be in \[0, 1\), got -1"):
            ledger.trade_off("data", slack=-1)
    perfect = curve_of()
    assert perfect.mu == 0.0 and at(perfect, ALPHAS) == pytest.approx(1 - ALPHAS, abs=1e-9)
    none = curve_of(unproven("no proof"))
    assert none.mu == none.mu_up_to_slack == math.inf and not any(none.beta)
    assert json.loads(json.dumps(none.as_dict(), allow_nan=False))["mu"] is None
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
        none.at(1.5)


@pytest.mark.parametrize("accounting", ["rdp", "renyi_filter"])
def test_curves_of_renyi_accounts_are_below(accounting):
    events = (GaussianDpEvent(2.0), LaplaceDpEvent(8.0))
    tight = curve_of(*events)
    loose = curve_of(*events, accounting=accounting, epsilon=4.0)
    assert (at(loose, ALPHAS) <= at(tight, ALPHAS) + 1e-9).all() and max(loose.beta) > 0.9
    assert (loose.mu == math.inf) == (accounting == "renyi_filter")


def test_corners_of_noisy_deltas_stay_on_the_lines():
    rng = np.random.default_rng(7)
    epsilons = np.linspace(0, 5, 40)
    deltas = np.array([delta(GaussianDpEvent(1.0), epsilon=float(e)) for e in epsilons])
    deltas *= 1 + 0.2 * rng.random(40)
    alpha, beta = corners(epsilons, deltas)
    assert (np.diff(alpha) >= 0).all() and (np.diff(beta) <= 0).all()
    between = rng.random(1000)
    steep = 1 - deltas[:, None] - np.exp(epsilons)[:, None] * between
    flat = np.exp(-epsilons)[:, None] * (1 - deltas[:, None] - between)
    largest = np.maximum(steep, flat).max(axis=0).clip(0)
    assert np.interp(between, alpha, beta) == pytest.approx(largest, abs=1e-12)
