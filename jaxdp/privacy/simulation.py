"""Bounds on delta by simulation, for a mixture of shifted Gaussians against one at 0.

A run whose participations are random is dominated by the pair

    P = E_x N(m_x, I),   Q = N(0, I),

where m_x is what participation x of a record adds to the noisy values, in standard deviations
(`jaxdp.privacy.mixtures`). `jaxdp.privacy.participation` has the proofs. With the loss
L = log(P / Q),

    delta(epsilon)  = E_P max(0, 1 - exp(epsilon - L)),
    delta'(epsilon) = E_Q max(0, 1 - exp(epsilon + L))      of the reversed pair.

Rare losses decide, so the draws come from other distributions, and each counts with its density
ratio w. Bounds on w make the terms bounded:

    forward   from P_s = E_x N((1 + s) m_x, I). By Jensen's inequality P_s / Q is at least
              exp((1 + s) L - s (1 + s) M / 2) with M = max_x |m_x|^2. So where L > epsilon,
              w = P / P_s is at most exp(s (1 + s) M / 2 - s epsilon).
    backward  from Q_s = N(-s m, I) with m = E_x m_x. By Jensen's inequality L is at least
              <m, y> - E_x |m_x|^2 / 2. So where L < -epsilon, w = Q / Q_s is at most
              exp(s (E_x |m_x|^2 / 2 - epsilon) + s^2 |m|^2 / 2).

The mean of N independent terms in [0, W] exceeds its estimate by more than the Chernoff-Hoeffding
bound with a small probability (Hoeffding 1963, theorem 1). Each of the estimates, of all s, all
epsilons and both directions, gets an equal share of `failure_probability`. Besides, delta of a
mixture is at most that of its longest shift (joint convexity), which needs no simulation.
"""

import math
import secrets

import numpy as np
from scipy import special

from jaxdp.files import check_count
from jaxdp.privacy.events import DpEvent, GaussianDpEvent, MonteCarloDpEvent, NoOpDpEvent
from jaxdp.privacy.gaussian import gaussian_delta, gaussian_epsilon
from jaxdp.privacy.mixtures import Mixture

_POINTS = 96
# Shifts so long that participation hides nothing. The run is charged as one without randomness.
_LONGEST = 400.0
# The largest epsilon has this delta without randomness in participation.
_LEAST_DELTA = 1e-16
# The parts of the largest epsilon on which the draws are aimed.
_AIMS = (0.0, 0.15, 0.3, 0.45)
# Bounds are rounded up by more than float64 errs in the sums.
_ROUNDED_UP = 1 + 1e-8
# The most numbers of a block of draws.
_BLOCK = 2**20


def simulated(
    mixture: Mixture,
    *,
    mechanism: str,
    draws: int,
    failure_probability: float,
    seed: bytes | None,
) -> DpEvent:
    """Returns the event of a mixture against the Gaussian at 0.

    It is a `MonteCarloDpEvent`, unless the shifts are 0 or so long that participation hides
    nothing.

    Args:
        mixture: The mixture.
        mechanism: The text of the event.
        draws: The draws of each of eight estimates, half of them of each direction.
        failure_probability: The probability that a delta of the event is too small.
        seed: 16 bytes for tests. None takes OS entropy.

    Raises:
        TypeError, ValueError: `draws` or `failure_probability` is out of range.
    """
    check_count("draws", draws, 1)
    if not 0 < failure_probability < 1:
        raise ValueError(f"failure_probability must be in (0, 1), got {failure_probability}.")
    if mixture.largest > _LONGEST:
        # A Gaussian of as long a shift, for all who take part in any way.
        return GaussianDpEvent(mixture.largest**-0.5)
    if mixture.largest == 0:
        return NoOpDpEvent()
    key = secrets.token_bytes(16) if seed is None else seed
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    mu = math.sqrt(mixture.largest)
    top = max(gaussian_epsilon(mu, _LEAST_DELTA), 1e-6)
    epsilons = np.linspace(0.0, top, _POINTS)
    share = failure_probability / (2 * len(_AIMS) * _POINTS)
    without = np.array([gaussian_delta(mu, float(epsilon)) for epsilon in epsilons])
    curves = []
    for one_direction in (_forward, _backward):
        bound = without
        for aim in _AIMS:
            log_most, sums = one_direction(mixture, rng, epsilons, aim * top, draws)
            bound = np.minimum(bound, _upper(sums, log_most, draws, math.log(1 / share)))
        curves.append(falling(np.minimum(bound * _ROUNDED_UP, 1.0)))
    return MonteCarloDpEvent(
        mechanism, draws, failure_probability, tuple(epsilons.tolist()), *curves
    )


def _forward(
    mixture: Mixture, rng: np.random.Generator, epsilons: np.ndarray, aim: float, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log W at the epsilons, and sums of the terms of delta."""
    # This s has the smallest W at epsilon = aim.
    s = max(0.0, aim / mixture.largest - 0.5)
    sums = np.zeros(len(epsilons))
    for count in _blocks(draws, mixture.width):
        values = mixture.draw(rng, count, 1 + s)
        loss = mixture.log_ratio(values, 1.0)
        log_weight = loss - mixture.log_ratio(values, 1 + s)
        sums += _sums(loss, log_weight, epsilons)
    return s * (1 + s) * mixture.largest / 2 - s * epsilons, sums


def _backward(
    mixture: Mixture, rng: np.random.Generator, epsilons: np.ndarray, aim: float, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log W at the epsilons, and sums of the terms of delta of the reversed pair."""
    length = mixture.square_of_mean
    # As there, for the W of this direction.
    s = max(0.0, (aim - mixture.mean_square / 2) / length)
    sums = np.zeros(len(epsilons))
    for count in _blocks(draws, mixture.width):
        values = mixture.draw_mean(rng, count, -s)
        log_weight = s * mixture.along_mean(values) + s * s * length / 2
        loss = -mixture.log_ratio(values, 1.0)
        sums += _sums(loss, log_weight, epsilons)
    return s * (mixture.mean_square / 2 - epsilons) + s * s * length / 2, sums


def _blocks(draws: int, width: int) -> list[int]:
    """Returns the sizes of blocks of draws."""
    size = max(1, _BLOCK // width)
    return [min(size, draws - start) for start in range(0, draws, size)]


def _sums(loss: np.ndarray, log_weight: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Returns sums of w max(0, 1 - exp(epsilon - loss)) at the epsilons."""
    counts = loss > 0
    loss = loss[counts]
    weight = np.exp(log_weight[counts])
    # The losses above an epsilon are those of its own interval and of all later ones.
    place = np.searchsorted(epsilons, loss) - 1
    size = len(epsilons)
    whole = np.bincount(place, weight, size)
    discounted = np.bincount(place, weight * np.exp(epsilons[place] - loss), size)
    sums = np.zeros(size)
    above = 0.0
    discount = 0.0
    # The epsilons are equally far apart.
    step = math.exp(-(epsilons[1] - epsilons[0]))
    for index in reversed(range(size)):
        above += whole[index]
        discount = discount * step + discounted[index]
        sums[index] = max(0.0, above - discount)
    return sums


def _upper(sums: np.ndarray, log_most: np.ndarray, draws: int, log_inverse: float) -> np.ndarray:
    """Returns bounds on means of terms in [0, W], each wrong with probability exp(-log_inverse).

    The mean p of terms in [0, 1] with the estimate e < p has that probability of at most
    exp(-N KL(e, p)).
    """
    most = np.exp(np.clip(log_most, -600.0, 600.0))
    estimate = np.minimum(sums / draws / most, 1.0)
    low = estimate
    high = np.ones_like(estimate)
    # More halvings than float64 has digits.
    for _ in range(60):
        middle = (low + high) / 2
        distance = special.rel_entr(estimate, middle)
        distance += special.rel_entr(1 - estimate, 1 - middle)
        is_enough = draws * distance >= log_inverse
        high = np.where(is_enough, middle, high)
        low = np.where(is_enough, low, middle)
    # The upper end is a bound after any number of halvings.
    bounds: np.ndarray = high * most
    return bounds


def falling(bounds: np.ndarray) -> tuple[float, ...]:
    """Returns bounds on deltas in few digits, none above the one before.

    A delta falls with epsilon, so a bound on it holds for all later ones.
    """
    short = [rounded_up(bound) for bound in np.minimum.accumulate(bounds)]
    # Of two numbers that are nearly equal, the smaller one may be rounded to the larger.
    return tuple(np.minimum.accumulate(short).tolist())


def rounded_up(value: float) -> float:
    """Returns a number of few digits that is at least `value`, for a short text."""
    digits = float(f"{value:.5e}")
    return min(1.0, digits if digits >= value else float(f"{value * (1 + 2e-5):.5e}"))
