"""`OwnedGaussianDpEvent`: several records of one owner in a Poisson sample, by integration."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxdp.privacy import Ledger, accounting
from jaxdp.privacy.events import (
    GaussianDpEvent,
    OwnedGaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    composition,
    describe,
    from_json,
    parse,
    to_json,
)

OWNED = OwnedGaussianDpEvent(0.1, 1.5, 3)


def delta_of(event, epsilon):
    return accounting.delta(event, epsilon=epsilon, adjacency="zero_out")


def densities(q, sigma, k, points=60_001):
    """The densities of a sample's sum with the owner's records and with zeros, on a line."""
    x, step = np.linspace(-12 * sigma, k + 12 * sigma, points, retstep=True)
    weights = stats.binom.pmf(np.arange(k + 1), k, q)
    present = sum(w * stats.norm.pdf(x, j, sigma) for j, w in enumerate(weights))
    return present, stats.norm.pdf(x, 0, sigma), step


def integrated(q, sigma, k, epsilon):
    present, absent, step = densities(q, sigma, k)
    factor = math.exp(epsilon)
    one = np.maximum(present - factor * absent, 0).sum() * step
    other = np.maximum(absent - factor * present, 0).sum() * step
    return max(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "sigma", "k"), [(0.1, 1.5, 3), (0.5, 4.0, 10), (0.02, 0.4, 2), (1, 3, 4)]
)
def test_one_release_matches_integration(q, sigma, k):
    event = OwnedGaussianDpEvent(q, sigma, k)
    for epsilon in (0.3, 2.0):
        exact = integrated(q, sigma, k, epsilon)
        if exact < 1e-12:
            continue
        bound = delta_of(event, epsilon)
        assert exact * (1 - 1e-6) <= bound <= exact * 1.002 + 1e-12
        # Broken twins: one record fewer, and more noise.
        for twin in (
            OwnedGaussianDpEvent(q, sigma, k - 1),
            OwnedGaussianDpEvent(q, 1.1 * sigma, k),
        ):
            if twin.records:
                assert delta_of(twin, epsilon) < exact


def test_two_releases_match_a_double_sum():
    present, absent, step = densities(0.1, 1.5, 3, points=1501)
    pair, zeros = np.outer(present, present), np.outer(absent, absent)
    for epsilon in (0.5, 1.5):
        factor = math.exp(epsilon)
        one = np.maximum(pair - factor * zeros, 0).sum() * step**2
        other = np.maximum(zeros - factor * pair, 0).sum() * step**2
        bound = delta_of(SelfComposedDpEvent(OWNED, 2), epsilon)
        assert bound == pytest.approx(max(one, other), rel=2e-3)


def test_records_that_point_in_one_direction_are_the_worst():
    """In the plane: two records at an angle, each of norm 1, against the mixture on a line."""
    q, sigma = 0.3, 1.0
    axis, step = np.linspace(-7, 9, 641, retstep=True)
    x, y = np.meshgrid(axis, axis)

    def density(a, b):
        return stats.norm.pdf(x, a, sigma) * stats.norm.pdf(y, b, sigma)

    worst = OwnedGaussianDpEvent(q, sigma, 2)
    bounds = []
    for angle in (0.0, 0.5, 1.5, math.pi):
        second = math.cos(angle), math.sin(angle)
        both = 1 + second[0], second[1]
        present = (1 - q) ** 2 * density(0, 0) + q * q * density(*both)
        present += q * (1 - q) * (density(1, 0) + density(*second))
        absent = density(0, 0)
        gaps = present - math.e * absent, absent - math.e * present
        bounds.append(max(np.maximum(gap, 0).sum() * step**2 for gap in gaps))
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] == pytest.approx(delta_of(worst, 1.0), rel=1e-3)


@pytest.mark.slow
def test_edges():
    def epsilon(event, adjacency="zero_out"):
        return accounting.epsilon(event, delta=1e-5, adjacency=adjacency)

    one = SelfComposedDpEvent(OwnedGaussianDpEvent(0.02, 1.0, 1), 100)
    plain = SelfComposedDpEvent(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.0)), 100)
    assert epsilon(one) == pytest.approx(epsilon(plain), rel=1e-9)
    whole = GaussianDpEvent(2.0)
    assert epsilon(OwnedGaussianDpEvent(1, 6.0, 3)) == pytest.approx(epsilon(whole), rel=1e-6)
    # Beyond 256 records a sample is charged as the whole, which is an upper bound.
    assert epsilon(OwnedGaussianDpEvent(0.5, 600.0, 300)) == pytest.approx(epsilon(whole), rel=1e-6)
    assert epsilon(OwnedGaussianDpEvent(0.5, 512.0, 256)) < epsilon(whole)
    assert not composition(OwnedGaussianDpEvent(0, 1.0, 3))
    assert epsilon(OwnedGaussianDpEvent(0.1, 0.0, 3)) == math.inf
    assert epsilon(OwnedGaussianDpEvent(0.5, 1e-9, 3)) >= 1e15
    assert describe(OWNED) == "OwnedGaussian(0.1, 1.5, 3)"
    assert parse(describe(OWNED)) == from_json(to_json(OWNED)) == OWNED


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "replace_label"])
def test_a_ledger_charges_it_for_zeros_only(adjacency):
    with Ledger.in_memory() as ledger:
        ledger.register("mails", adjacency=adjacency, unit="person", delta=1e-5)
        with pytest.raises(ValueError, match="who owns which record is public"):
            ledger.spend("mails", OWNED)
        assert ledger.epsilon("mails") == 0
