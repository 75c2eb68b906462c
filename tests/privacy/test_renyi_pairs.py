"""Releases with a Renyi divergence beside releases with losses: the pair that stands for them."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import isotonic_regression

from jaxdp.privacy import (
    ComposedDpEvent,
    GaussianDpEvent,
    Ledger,
    OneOfDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RepeatAndSelectDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    ZCDpEvent,
    epsilon,
)
from jaxdp.privacy.convolution import Losses, epsilon_bound, log_delta_bound
from jaxdp.privacy.losses import distribution
from jaxdp.privacy.renyi_conversions import RDP_ORDERS
from jaxdp.privacy.renyi_pairs import RenyiCurve
from tests.privacy.test_selection import best_of, divergence, pairs

ORDERS = np.array(RDP_ORDERS)
RUN = SelfComposedDpEvent(PoissonSampledDpEvent(0.05, GaussianDpEvent(2.0)), 50)
SEARCH = RepeatAndSelectDpEvent(RUN, 5.0, 1.0)
TRAINING = SelfComposedDpEvent(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.0)), 500)


def losses_of(curve, *others):
    """Returns the losses of a curve and of other leaves, as the accountant composes them."""
    leaves = [distribution(leaf, "add_remove", False, 80.0) for leaf in (curve, *others)]
    return Losses(tuple((leaf, 1) for leaf in leaves))


def exact_delta(p, q, pure, epsilon):
    """Returns delta of a pair beside randomised response, by enumeration of their outputs."""
    stays = math.exp(pure) / (1 + math.exp(pure))
    joint = np.outer(p, [stays, 1 - stays])
    other = np.outer(q, [1 - stays, stays])
    return np.maximum(joint - math.exp(epsilon) * other, 0.0).sum()


def exceeded(curve_of):
    """Returns how often an exact delta exceeds the bound by a curve of a pair's divergences."""
    count = 0
    pure = 0.8
    for p, q in [*pairs()][::2]:
        # A search of 3 runs: a pair with its rare outputs at one end.
        best = best_of(p, 3.0, 1.0)[1:], best_of(q, 3.0, 1.0)[1:]
        rdp = np.array([divergence(*best, order) for order in ORDERS])
        losses = losses_of(curve_of(rdp), PureDpEvent(pure))
        for at in (0.05, 0.6):
            bound = math.exp(log_delta_bound(losses, at))
            for one, other in (best, best[::-1]):
                count += exact_delta(one, other, pure, at) > bound * (1 + 1e-9)
    return count


@pytest.mark.slow
def test_no_exact_composition_exceeds_the_pair_and_every_twin_is_exceeded():
    assert exceeded(lambda rdp: RenyiCurve(tuple(rdp), math.inf)) == 0
    # Smaller divergences, and a pure epsilon that the releases do not have.
    assert exceeded(lambda rdp: RenyiCurve(tuple(rdp / 3), math.inf)) > 1
    assert exceeded(lambda rdp: RenyiCurve(tuple(rdp), 0.1)) > 1


def reference_delta(rdp, sigma, at):
    """Returns delta of a curve beside a Gaussian, in float64 and without a grid of losses.

    The largest convex curve below the bounds has the slopes of an isotonic regression. Q has its
    masses where they change, and P those times exp(loss).
    """
    x = np.linspace(0.0, 12.0, 20_001)
    logs = [
        (a - 1) * (r - x + math.log1p(-1 / a)) - math.log(a)
        for a, r in zip(ORDERS, rdp, strict=True)
    ]
    delta = np.exp(np.minimum(np.min(logs, axis=0), 0.0))
    losses = np.concatenate([-x[:0:-1], x])
    ratio = np.exp(losses)
    below = np.exp(-x[:0:-1])
    divergence = np.concatenate([1 - below + below * delta[:0:-1], delta])
    widths = np.diff(ratio)
    slopes = isotonic_regression(np.diff(divergence) / widths, weights=widths).x
    masses = ratio[1:-1] * np.diff(slopes)
    left = losses[1:-1]
    mu = 1 / sigma
    # Delta of the Gaussian at epsilon = at - loss, of any sign.
    rest = at - left
    whole = stats.norm.sf(rest / mu - mu / 2)
    gaussian = whole - np.exp(rest + stats.norm.logsf(rest / mu + mu / 2))
    return float(masses @ gaussian + delta[-1])


@pytest.mark.parametrize("sigma", [1.5, 4.0])
def test_a_curve_beside_a_gaussian_has_the_delta_of_its_density(sigma):
    rdp = ORDERS / 2 / 3.0**2 + 0.3 / (ORDERS - 1)
    losses = losses_of(RenyiCurve(tuple(rdp), math.inf), GaussianDpEvent(sigma))
    for at in (1.0, 2.5, 4.0):
        ours = math.exp(log_delta_bound(losses, at))
        truth = reference_delta(rdp, sigma, at)
        assert truth * (1 - 1e-3) <= ours <= truth * 1.02
        assert reference_delta(rdp * 1.1, sigma, at) > 1.05 * ours
    alone = losses_of(RenyiCurve(tuple(ORDERS / 2 / 3.0**2), math.inf))
    by_order = np.min(ORDERS / 18 + np.log1p(-1 / ORDERS) - np.log(1e-5 * ORDERS) / (ORDERS - 1))
    assert epsilon_bound(alone, 1e-5) == pytest.approx(by_order, rel=1e-3)


def test_a_search_leaves_other_releases_their_losses():
    together = ComposedDpEvent([SEARCH, TRAINING])
    by_rdp = epsilon(together, delta=1e-5, method="rdp")
    mixed = epsilon(together, delta=1e-5)
    alone = [epsilon(event, delta=1e-5) for event in (SEARCH, TRAINING)]
    assert max(alone) < mixed < 0.97 * by_rdp
    # One curve for both searches: two curves would compose their worst deltas.
    twice = ComposedDpEvent([SEARCH, SEARCH, GaussianDpEvent(50.0)])
    searches = epsilon(ComposedDpEvent([SEARCH, SEARCH]), delta=1e-5)
    assert searches < epsilon(twice, delta=1e-5) < 1.05 * searches
    with Ledger.in_memory() as ledger:
        ledger.register("d", adjacency="add_remove", unit="example", epsilon=9.0, delta=1e-5)
        for event in (SEARCH, TRAINING):
            with ledger.spend("d", event):
                pass
        assert ledger.epsilon("d") == mixed
        ledger.register("r", adjacency="add_remove", unit="example", accounting="rdp")
        for event in (SEARCH, TRAINING):
            with ledger.spend("r", event):
                pass
        assert ledger.epsilon("r", delta=1e-5) == pytest.approx(by_rdp)


def test_releases_that_share_no_rule_are_composed():
    truncated = TruncatedSubsampledGaussianDpEvent(1000, 0.1, 150, 2.0)
    for event in (SEARCH, ZCDpEvent(0.02), OneOfDpEvent((RUN, PureDpEvent(0.1)))):
        both = ComposedDpEvent([truncated, event])
        alone = [epsilon(each, delta=1e-5) for each in (truncated, event)]
        assert max(alone) < epsilon(both, delta=1e-5) < sum(alone)
        for method in ("pld", "rdp"):
            with pytest.raises(ValueError, match="no accounting rule"):
                epsilon(both, delta=1e-5, method=method)
    hidden = RepeatAndSelectDpEvent(truncated, 5.0, 1.0)
    with pytest.raises(ValueError, match=r"RDP has none for .*RepeatAndSelect"):
        epsilon(ComposedDpEvent([TRAINING, hidden]), delta=1e-5)
    assert epsilon(ComposedDpEvent([GaussianDpEvent(3.0), ZCDpEvent(0.0)]), delta=1e-5) > 0


def test_a_pure_search_costs_no_more_than_its_pure_epsilon():
    search = RepeatAndSelectDpEvent(PureDpEvent(0.2), 10.0, 1.0)
    beside = epsilon(ComposedDpEvent([search, GaussianDpEvent(4.0)]), delta=1e-5)
    as_pure = epsilon(ComposedDpEvent([PureDpEvent(0.6), GaussianDpEvent(4.0)]), delta=1e-5)
    assert epsilon(GaussianDpEvent(4.0), delta=1e-5) < beside <= as_pure * (1 + 1e-4)
