"""Simulated events bound exact deltas, compose, and are rejected if they are too cheap."""

import itertools
import math

import numpy as np
import pytest
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation
from scipy import integrate, stats

from jaxdp.privacy import (
    CorrelatedSampleDpEvent,
    GaussianDpEvent,
    Ledger,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    delta,
    epsilon,
    truncated_event,
)
from jaxdp.privacy.curve_pairs import hull_pair
from jaxdp.privacy.events import MonteCarloDpEvent, compose, composition, from_json, to_json
from jaxdp.privacy.mixtures import Bins, Renewals
from jaxdp.privacy.participation import (
    b_min_sep_event,
    balls_in_bins_event,
    cyclic_poisson_event,
)
from jaxdp.privacy.simulation import falling, rounded_up

SEED = bytes(range(16))
SIGMA = 0.8
SOME = {"draws": 2**14, "seed": SEED}
EPSILONS = (0.0, 0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def two_bins():
    return balls_in_bins_event(SIGMA, bins=2, steps=2, **SOME)


def exact(shifts, weights, at, *, reverse=False):
    """Returns delta of sum_x w_x N(m_x, I) against N(0, I) in the plane, by quadrature."""
    grid = np.linspace(-8, 10, 301)
    y = np.stack(np.meshgrid(grid, grid, indexing="ij"), axis=-1)
    q = np.exp(-(y**2).sum(-1) / 2) / (2 * np.pi)
    p = np.zeros_like(q)
    for weight, shift in zip(weights, shifts, strict=True):
        p += weight * np.exp(-((y - shift) ** 2).sum(-1) / 2) / (2 * np.pi)
    first, second = (q, p) if reverse else (p, q)
    gain = np.maximum(first - math.exp(at) * second, 0)
    return integrate.simpson(integrate.simpson(gain, x=grid), x=grid)


def is_sound(event, shifts, weights):
    """Returns whether both curves of an event are at least the exact deltas."""
    sound = []
    for at in EPSILONS:
        place = np.searchsorted(event.epsilons, at, side="right") - 1
        for reverse, curve in ((False, event.forward), (True, event.backward)):
            # The bound at the point below `at` exceeds the delta at `at`.
            sound.append(curve[place] >= exact(shifts, weights, at, reverse=reverse))
    return all(sound)


def bins_of(sigma):
    return np.eye(2) / sigma, [0.5, 0.5]


def renewals_of(sigma, p=0.4):
    """Returns shifts and probabilities of two steps that exclude each other, b = 2."""
    first = p / (1 + p)
    second = (1 - p) * first + first * p
    return np.vstack([np.eye(2), np.zeros(2)]) / sigma, [first, second, 1 - first - second]


@pytest.mark.slow
def test_bounds_hold_and_are_near_the_exact_deltas(two_bins):
    assert is_sound(two_bins, *bins_of(SIGMA))
    for at in EPSILONS:
        true = max(exact(*bins_of(SIGMA), at), exact(*bins_of(SIGMA), at, reverse=True))
        assert true <= delta(two_bins, epsilon=at) < 1.3 * true + 3e-4
    separated = b_min_sep_event(SIGMA, separation=2, sampling_probability=0.4, steps=2, **SOME)
    assert is_sound(separated, *renewals_of(SIGMA))
    # Accounts of half the noise, or of too much amplification, are found out.
    assert not is_sound(two_bins, *bins_of(SIGMA / 2))
    more = balls_in_bins_event(SIGMA, bins=4, steps=4, **SOME)
    assert not is_sound(more, *bins_of(SIGMA))
    rarer = b_min_sep_event(SIGMA, separation=2, sampling_probability=0.2, steps=2, **SOME)
    assert not is_sound(rarer, *renewals_of(SIGMA))


def test_losses_are_those_of_the_maintained_library():
    column = np.array([1.0, 0.6, 0.2])
    steps, b, p = 7, 3, 0.3
    matrix = sum(value * np.eye(steps, k=-lag) for lag, value in enumerate(column))
    y = np.random.default_rng(0).normal(size=(steps, 20))
    bins = batch_selection.BallsInBinsSampling(iterations=steps, cycle_length=b)
    theirs = sample_generation.compute_privacy_loss(bins, y, SIGMA, column)
    shifts = matrix @ (np.arange(steps)[:, None] % b == np.arange(b)) / SIGMA
    ours = Bins(shifts.T @ shifts).log_ratio(y.T / SIGMA @ shifts, 1.0)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    waits = batch_selection.BMinSepSampling(sampling_prob=p, iterations=steps, min_sep=b)
    theirs = sample_generation.compute_privacy_loss(waits, y, SIGMA, column[:1])
    ours = Renewals(np.eye(steps) / SIGMA, b, p).log_ratio(y.T / SIGMA, 1.0)
    np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_the_ratio_of_renewals_is_the_sum_over_histories():
    # jax-privacy 2.0.0 exchanges the lengths of the last columns of a banded strategy.
    matrix = (np.eye(5) + 0.5 * np.eye(5, k=-1)) / SIGMA
    y = np.random.default_rng(0).normal(size=(9, 5))
    ratio = np.zeros(9)
    for history in itertools.product([0, 1], repeat=5):
        shift = 0.7 * matrix @ np.array(history)
        weight = renewal_law(history, 2, 0.3)
        ratio += weight * np.exp(y @ shift - shift @ shift / 2)
    ours = Renewals(matrix, 2, 0.3).log_ratio(y, 0.7)
    np.testing.assert_allclose(ours, np.log(ratio), atol=1e-12)


def renewal_law(history, separation, p):
    """Returns the probability of a history of stationary renewals."""
    total = 0.0
    for wait in range(separation):
        weight = (p if wait else 1.0) / (1 + (separation - 1) * p)
        free_from = wait
        for step, taken in enumerate(history):
            if step < free_from:
                weight *= 1 - taken
            else:
                weight *= p if taken else 1 - p
                free_from = step + separation if taken else free_from
        total += weight
    return total


def test_moments_of_renewals_are_those_of_all_histories():
    matrix = np.eye(5) + 0.5 * np.eye(5, k=-1)
    mixture = Renewals(matrix, 2, 0.4)
    rate = 0.4 / 1.4
    np.testing.assert_allclose(mixture.rate, rate)
    every = np.array(list(itertools.product([0, 1], repeat=5)))
    apart = every[~(every[:, 1:] & every[:, :-1]).any(axis=1)]
    lengths = np.square(apart @ matrix.T).sum(axis=1)
    np.testing.assert_allclose(mixture.largest, lengths.max())
    values = mixture.draw(np.random.default_rng(0), 40_000, 1.0)
    error = (values.mean(axis=0) - mixture._mean) * 200 / values.std(axis=0)
    assert stats.chi2.sf(float(error @ error), 5) > 1e-9


def test_an_event_is_read_again_as_it_was(two_bins, tmp_path):
    assert from_json(to_json(two_bins)) == two_bins
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("d", adjacency="add_remove", unit="example", epsilon=9.0, delta=1e-3)
        with ledger.spend("d", two_bins, label="run"):
            pass
        spent = ledger.epsilon("d", delta=1e-3)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.epsilon("d", delta=1e-3) == spent == epsilon(two_bins, delta=1e-3)
        text = str(ledger.report())
    assert "16384 draws, wrong with probability 1e-08 which delta includes" in text


def test_the_failure_is_a_part_of_delta(two_bins):
    likely = compose(composition(two_bins))
    unlikely = MonteCarloDpEvent(
        two_bins.mechanism, 1, 1e-3, two_bins.epsilons, two_bins.forward, two_bins.backward
    )
    extra = delta(unlikely, epsilon=2.0) - delta(likely, epsilon=2.0)
    assert 0.9e-3 < extra < 1.1e-3
    assert epsilon(unlikely, delta=1e-3) == math.inf
    assert epsilon(SelfComposedDpEvent(unlikely, 2), delta=2e-3) == math.inf


def test_composition_lies_between_its_parts_and_their_sum(two_bins):
    alone = epsilon(two_bins, delta=1e-3)
    twice = epsilon(SelfComposedDpEvent(two_bins, 2), delta=1e-3)
    assert alone < twice < 2 * epsilon(two_bins, delta=5e-4)
    whole = epsilon(SelfComposedDpEvent(GaussianDpEvent(SIGMA), 2), delta=1e-3)
    assert twice < whole


def test_a_pair_has_the_deltas_of_its_curves(two_bins):
    curves = map(np.array, (two_bins.epsilons, two_bins.forward, two_bins.backward))
    (losses, log_masses), lost, _ = hull_pair(*curves)
    masses = np.exp(log_masses)
    np.testing.assert_allclose(masses.sum() + lost, 1)
    for at, bound in zip(two_bins.epsilons, two_bins.forward, strict=True):
        above = losses > at + 1e-12
        hull = lost + float(masses[above] @ -np.expm1(at - losses[above]))
        # The hull is below every point above it, and convex between.
        assert 0.5 * bound < hull < bound * (1 + 1e-6)


def test_cyclic_poisson_divides_the_steps():
    event = cyclic_poisson_event(2.0, cycle_length=4, sampling_probability=0.1, steps=10)
    assert event.count == 3 and event.event.event.noise_multiplier == 2.0
    strategy = np.eye(10) + np.eye(10, k=-1)
    event = cyclic_poisson_event(
        2.0, cycle_length=4, sampling_probability=0.1, steps=10, strategy=strategy
    )
    assert event.event.event.noise_multiplier == pytest.approx(2 / math.sqrt(2))


@pytest.mark.parametrize(
    ("strategy", "steps", "kind"),
    [
        (np.eye(10) + np.eye(10, k=-1), 10, CorrelatedSampleDpEvent),
        (np.eye(10)[0] + 0.5 * np.eye(10)[1], 10, CorrelatedSampleDpEvent),
        (2 * np.eye(10), 10, PoissonSampledDpEvent),
        (np.eye(10)[0], 10, PoissonSampledDpEvent),
        (None, 10, PoissonSampledDpEvent),
        (np.tri(4), 4, PoissonSampledDpEvent),  # one cycle
    ],
)
def test_cycles_that_noise_ties_together_have_an_event_of_their_own(strategy, steps, kind):
    terms = {"cycle_length": 4, "sampling_probability": 0.1, "steps": steps}
    assert type(cyclic_poisson_event(2.0, strategy=strategy, **terms).event) is kind


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (np.eye(3), "shape"),
        (np.ones((4, 4)), "lower triangular"),
        (np.eye(4) - np.eye(4, k=-1), "no negative entry"),
        (np.tri(4), "at most separation=2 bands, got 4"),
    ],
)
def test_strategies_without_a_proof_are_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        b_min_sep_event(
            1.0, separation=2, sampling_probability=0.5, steps=4, strategy=strategy, **SOME
        )


@pytest.mark.parametrize("noise_multiplier", [-1.0, math.nan])
def test_noise_that_is_none_is_refused(noise_multiplier):
    with pytest.raises(ValueError, match="noise_multiplier must be at least 0"):
        balls_in_bins_event(noise_multiplier, bins=2, steps=4, **SOME)
    with pytest.raises(ValueError, match="noise_multiplier must be at least 0"):
        b_min_sep_event(noise_multiplier, separation=2, sampling_probability=0.5, steps=4, **SOME)


def test_a_strategy_counts_in_bins():
    event = balls_in_bins_event(2.0, bins=2, steps=4, strategy=np.tri(4), **SOME)
    plain = balls_in_bins_event(2.0, bins=2, steps=4, **SOME)
    assert epsilon(event, delta=1e-3) > epsilon(plain, delta=1e-3)


def test_relations_without_a_proof_are_refused(two_bins):
    with pytest.raises(ValueError, match="no accounting rule covers"):
        epsilon(two_bins, delta=1e-3, adjacency="replace_one")
    assert epsilon(two_bins, delta=1e-3, adjacency="zero_out") < math.inf
    with pytest.raises(ValueError, match="no accounting rule covers"):
        epsilon(two_bins, delta=1e-3, method="rdp")


@pytest.mark.parametrize(
    ("epsilons", "forward"), [((0.0, 1.0), (0.1, 0.2)), ((0.5, 1.0), (0.2, 0.1)), ((0.0,), ())]
)
def test_curves_that_are_none_are_refused(epsilons, forward):
    with pytest.raises(ValueError, match="MonteCarloDpEvent"):
        to_json(MonteCarloDpEvent("x", 1, 0.1, epsilons, forward, forward))


def displaced(sigma, at, *, share, tau):
    """Returns the exact delta of a step in which a truncated batch loses another record.

    A record takes part with probability `share`. With probability `tau`, given that, the batch is
    full, and the record displaces one of the opposite gradient: +1 in place of -1. Whether the
    batch is full is known.
    """

    def curve(mu, epsilon_):
        return stats.norm.cdf(mu / 2 - epsilon_ / mu) - math.exp(epsilon_) * stats.norm.cdf(
            -mu / 2 - epsilon_ / mu
        )

    def sampled(mu):
        # Delta of (1 - q) Q + q P against Q.
        shifted = math.log(1 + (math.exp(at) - 1) / share)
        return share * curve(mu, shifted)

    return (1 - tau) * sampled(1 / sigma) + tau * sampled(2 / sigma)


def test_truncation_has_its_price_in_delta():
    event = balls_in_bins_event(SIGMA, bins=2, steps=1, **SOME)
    tau = 0.02
    priced = truncated_event(event, tau)
    assert isinstance(priced, MonteCarloDpEvent) and "Truncated(BallsInBins" in priced.mechanism
    assert from_json(to_json(priced)) == priced
    for at in (0.0, 1.0):
        rise = delta(priced, epsilon=at) - delta(event, epsilon=at)
        assert rise <= (1 + math.exp(at)) * tau * (1 + 1e-4)
        assert rise >= (1 + math.exp(at)) * tau * 0.9
    # Delta falls with epsilon, although its price rises.
    curve = np.array(priced.forward)
    assert (np.diff(curve) <= 0).all() and curve.min() > 2 * tau
    assert epsilon(priced, delta=tau) == math.inf


def test_bounds_that_are_nearly_equal_stay_in_order():
    """Rounding up to few digits alone gives the smaller one 1.23502 and the larger one 1.235."""
    larger, smaller = 0.1234996, 0.1234994
    assert rounded_up(larger) < rounded_up(smaller)
    assert falling(np.array([larger, smaller])) == (0.1235, 0.1235)
    assert falling(np.array([0.5, 0.7, 0.25])) == (0.5, 0.5, 0.25)


def test_an_account_without_the_price_is_rejected():
    sigma, share, tau = 0.5, 0.5, 0.3
    event = balls_in_bins_event(sigma, bins=2, steps=1, **SOME)
    at = 3.5
    cost = displaced(sigma, at, share=share, tau=tau)
    assert delta(event, epsilon=at) < cost < delta(truncated_event(event, share * tau), epsilon=at)


def test_events_that_no_truncation_has_a_price_for_are_refused(two_bins):
    assert truncated_event(GaussianDpEvent(1.0), 0.0) == GaussianDpEvent(1.0)
    assert isinstance(truncated_event(GaussianDpEvent(0.01), 1e-9), NonPrivateDpEvent)
    assert isinstance(truncated_event(two_bins, 0.5), NonPrivateDpEvent)
    with pytest.raises(ValueError, match="balls in bins or b-min-sep, got PoissonSampled"):
        truncated_event(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)), 1e-9)
    with pytest.raises(ValueError, match=r"probability must be in \[0, 1\], got 1.5"):
        truncated_event(GaussianDpEvent(1.0), 1.5)
