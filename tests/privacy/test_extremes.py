"""Extreme arguments: no crash, no number below the exact one, and monotone in noise, count,
sampling and delta."""

import itertools
import math

import mpmath
import pytest

from jaxdp.privacy import Ledger, calibrate_noise
from jaxdp.privacy import delta as delta_at
from jaxdp.privacy import epsilon as epsilon_at
from jaxdp.privacy.events import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SelfComposedDpEvent,
)
from jaxdp.privacy.ledger import BudgetExceeded

SIGMAS = (1e-300, 1e-6, 1e-3, 1.0, 1e10, 1e100, 1.4e154, 1e300)
COUNTS = (1, 10, 10**6, 10**9)
PROBABILITIES = (1e-300, 1e-12, 0.5, 1 - 1e-12, 1.0)
DELTAS = (1e-300, 1e-15, 1e-5, 0.5, 1 - 1e-9)
PURE = (1e-300, 1e-6, 1.0, 100.0, 800.0, 1e5)
ADJACENCIES = ("add_remove", "replace_one")
# Each axis varies around these (sigma, count, probability, delta) under an adjacency.
CENTRES = (
    ((1.0, 10, 0.5, 1e-5), "add_remove"),
    ((1e-3, 10**6, 1 - 1e-12, 1e-15), "replace_one"),
    ((1e10, 10, 1e-12, 1e-300), "add_remove"),
)
AXES = {
    "sigma": (0, SIGMAS),
    "count": (1, COUNTS),
    "probability": (2, PROBABILITIES),
    "delta": (3, DELTAS),
}
# Discretisation may cost this share, so that a bound may fall by it along an axis.
SLACK = 2e-3
# Smaller losses are charged as this one.
LEAST = 1e-100


def releases(sigma, count, probability):
    return SelfComposedDpEvent(PoissonSampledDpEvent(probability, GaussianDpEvent(sigma)), count)


@pytest.mark.slow
@pytest.mark.parametrize(("centre", "adjacency"), CENTRES)
@pytest.mark.parametrize("axis", AXES)
def test_epsilon_is_monotone_up_to_the_ends(axis, centre, adjacency):
    place, values = AXES[axis]
    epsilons = []
    for value in values:
        sigma, count, probability, delta = (*centre[:place], value, *centre[place + 1 :])
        epsilons.append(
            epsilon_at(releases(sigma, count, probability), delta=delta, adjacency=adjacency)
        )
    if axis in ("sigma", "delta"):
        epsilons.reverse()
    for less, more in itertools.pairwise(epsilons):
        assert 0 <= less <= more * (1 + SLACK)


def gaussian_delta(mu, epsilon):
    """The curve of N(0, 1) against N(mu, 1), theorem 8 of Balle and Wang 2018 (arXiv
    1805.06530)."""
    upper = mpmath.erfc((epsilon / mu - mu / 2) / mpmath.sqrt(2)) / 2
    lower = mpmath.erfc((epsilon / mu + mu / 2) / mpmath.sqrt(2)) / 2
    return upper - mpmath.exp(epsilon) * lower


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("delta", DELTAS)
def test_gaussians_are_at_their_closed_form(delta, adjacency):
    factor = 2 if adjacency == "replace_one" else 1
    for sigma, count in itertools.product(SIGMAS, COUNTS):
        epsilon = epsilon_at(releases(sigma, count, 1.0), delta=delta, adjacency=adjacency)
        if sigma < 1e-100:
            assert epsilon == math.inf
            continue
        with mpmath.workdps(150):
            # Multipliers above 1e100 are charged as 1e100.
            mu = factor * mpmath.sqrt(count) / mpmath.mpf(min(sigma, 1e100))
            assert gaussian_delta(mu, mpmath.mpf(epsilon)) <= delta
            assert epsilon == 0 or gaussian_delta(mu, 0.99 * mpmath.mpf(epsilon)) > delta


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_one_pure_release_is_at_its_closed_form(adjacency):
    """P is binary randomised response: delta = (e^loss - e^epsilon) / (1 + e^loss)."""
    for loss, epsilon in itertools.product(PURE, (0.0, 1e-6, 0.7, 99.9, 100.0, 799.0, 1e300)):
        exact = -math.expm1(epsilon - loss) / (1 + math.exp(-loss)) if epsilon < loss else 0.0
        value = delta_at(PureDpEvent(loss), epsilon=epsilon, adjacency=adjacency)
        assert exact * (1 - 1e-14) <= value <= exact * 1.01 + LEAST
    for loss, delta in itertools.product(PURE, DELTAS):
        with mpmath.workdps(700):
            odds = mpmath.exp(loss) - delta * (1 + mpmath.exp(loss))
            exact = float(mpmath.log(odds)) if odds > 1 else 0.0
        value = epsilon_at(PureDpEvent(loss), delta=delta, adjacency=adjacency)
        assert exact * (1 - 1e-14) <= value <= exact * 1.01 + LEAST


@pytest.mark.slow
@pytest.mark.parametrize("loss", PURE)
def test_many_pure_releases_are_monotone(loss):
    for delta in (1e-15, 0.5):
        epsilons = [
            epsilon_at(SelfComposedDpEvent(PureDpEvent(loss), count), delta=delta)
            for count in COUNTS
        ]
        assert epsilons[-1] <= COUNTS[-1] * loss
        for less, more in itertools.pairwise(epsilons):
            assert 0 <= less <= more * (1 + SLACK)


@pytest.mark.parametrize("delta", [1e-300, 1e-15, 0.5, 1 - 1e-9])
def test_calibration_meets_extreme_targets_or_names_the_argument(delta):
    for target in (1e-6, 1.0, 800.0, 1e5):
        try:
            sigma = calibrate_noise(GaussianDpEvent, epsilon=target, delta=delta)
        except ValueError as error:
            assert "noise" in str(error)
        else:
            assert epsilon_at(GaussianDpEvent(sigma), delta=delta) <= target


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxdp.privacy.PrivacyWarning")
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 1 - 1e-9])
def test_a_ledger_charges_extreme_events(delta, tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("open", adjacency="add_remove", unit="example", delta=delta)
        ledger.register("closed", adjacency="add_remove", unit="example", epsilon=1e-6, delta=delta)
        last = 0.0
        for sigma in reversed(SIGMAS):
            event = SelfComposedDpEvent(GaussianDpEvent(sigma), 10**6)
            with ledger.spend("open", event):
                pass
            assert last <= ledger.epsilon("open")
            last = ledger.epsilon("open")
            if epsilon_at(event, delta=delta) > 1e-6:
                with pytest.raises(BudgetExceeded):
                    ledger.spend("closed", event)
        assert last == math.inf
        assert ledger.epsilon("closed") == 0
        assert ledger.total(["open", "closed"], delta=delta) == math.inf
