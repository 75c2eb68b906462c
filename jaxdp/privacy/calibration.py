"""Noise calibration: the smallest noise that meets a privacy target."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping

from jaxdp.files import check_delta, check_numbers
from jaxdp.privacy.accounting import (
    ROUGH_ORDERS,
    Adjacency,
    Method,
    check_rules,
    epsilon_of_counts,
    rdp_epsilon_of_counts,
)
from jaxdp.privacy.events import DpEvent, MonteCarloDpEvent, composition

# The multipliers that are looked at.
_LARGEST = 2.0**40
_SMALLEST = 2.0**-20
# The factor by which epsilon may rise with the noise. The rounding of PLDs is far smaller.
_ROUNDING = 1.002


def calibrate_noise(
    make_event: Callable[[float], DpEvent],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    method: Method = "auto",
    tol: float = 1e-4,
) -> float:
    """Returns the smallest noise multiplier whose epsilon is at most the target.

    Args:
        make_event: A function of a noise multiplier (float > 0) that returns everything to be
            released, for example ``lambda z: SelfComposedDpEvent(PoissonSampledDpEvent(q,
            GaussianDpEvent(z)), steps)``. More noise must never cost more epsilon. It is called
            about twenty times.
        epsilon: The target, > 0 and finite.
        delta: The target's delta, in [0, 1). It may be 0 for pure releases only.
        adjacency: "add_remove", "replace_one" or "zero_out".
        method: As in `epsilon`. "rdp", which older work uses, needs more noise than "auto".
        tol: A relative tolerance in (0, 0.1]. The result is at most (1 + tol) times the smallest
            feasible multiplier.

    Returns:
        A multiplier z for which `jaxdp.privacy.epsilon(make_event(z), ...) <= epsilon` was
        computed.

    Raises:
        ValueError: An argument is impossible. An event has no accounting rule. No noise up to 2^40
            meets the target, or 2^-20 meets it. Epsilon rises with the noise.
    """
    check_numbers(epsilon=epsilon, tol=tol)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be finite and > 0, got {epsilon!r}.")
    if not 0 < tol <= 0.1:
        raise ValueError(f"tol must be in (0, 0.1], got {tol!r}.")
    check_delta(delta)
    # An event without a rule fails before the search begins.
    check_rules(composition(make_event(1.0)), adjacency=adjacency, method=method)
    costs: dict[float, float] = {}

    @functools.cache
    def cost(multiplier: float) -> float:
        counts = composition(make_event(multiplier))
        costs[multiplier] = epsilon_of_counts(
            counts, delta=delta, adjacency=adjacency, method=method
        )
        # Estimates of a simulation vary by their draws. The bracket is right for any costs.
        is_simulated = any(isinstance(leaf, MonteCarloDpEvent) for leaf in counts)
        if not is_simulated:
            _check_monotone(costs)
        return costs[multiplier]

    @functools.cache
    def rough_cost(multiplier: float) -> float:
        counts = composition(make_event(multiplier))
        return rdp_epsilon_of_counts(counts, delta=delta, adjacency=adjacency, orders=ROUGH_ORDERS)

    # A rough bracket by RDP costs milliseconds and saves most PLDs. The result does not depend on
    # it.
    start = 1.0
    low, high = _bracket(rough_cost, epsilon, 1.0, 2.0)
    # Without both ends RDP says nothing, and the search starts at 1.
    if low > 0 and high < math.inf:
        start = _refine(rough_cost, epsilon, low, high, tol=0.01)
    low, high = _bracket(cost, epsilon, start, 1.1)
    if high == math.inf:
        raise ValueError(
            f"epsilon={epsilon!r} at delta={delta!r} cannot be met: at the noise multiplier "
            f"{low:.3g} these releases still cost {costs[low]:.6g}. Some do not depend on it. Make "
            "these cheaper, or raise the target."
        )
    if low == 0:
        raise ValueError(
            f"epsilon={epsilon!r} at delta={delta!r} needs no noise: the multiplier {high:.3g} "
            "meets it already. Use the noise multiplier in make_event, or choose a smaller delta."
        )
    return _refine(cost, epsilon, low, high, tol=tol)


def _check_monotone(costs: Mapping[float, float]) -> None:
    """Raises ValueError if epsilon rises with the noise multiplier."""
    for (less, before), (more, after) in itertools.pairwise(sorted(costs.items())):
        if after > before * _ROUNDING + 1e-9:
            raise ValueError(
                f"make_event is not monotone: epsilon is {before:.6g} at the noise multiplier "
                f"{less:.6g}, but {after:.6g} at {more:.6g}. Return an event whose epsilon "
                "never rises with the noise."
            )


def _bracket(
    cost: Callable[[float], float], target: float, start: float, factor: float
) -> tuple[float, float]:
    """Returns (low, high) with cost(low) > target >= cost(high).

    0 and inf mean that an end is out of range.
    """
    low = 0.0
    high = math.inf
    multiplier = start
    while _SMALLEST <= multiplier <= _LARGEST:
        if cost(multiplier) <= target:
            high = multiplier
        else:
            low = multiplier
        if low > 0 and high < math.inf:
            break
        multiplier = multiplier * factor if high == math.inf else multiplier / factor
        factor *= factor  # steps grow, so 2^40 is few of them away
    return low, high


def _refine(
    cost: Callable[[float], float], target: float, low: float, high: float, *, tol: float
) -> float:
    """Shrinks a bracket to high <= (1 + tol) low and returns high.

    Epsilon is close to a power of the multiplier, so a secant in logarithms lands near the root.
    The new point lies slightly beyond the root, towards the farther end. Every fourth step bisects,
    so that the search ends.
    """
    cost_low = cost(low)
    cost_high = cost(high)
    step = 0
    while high > low * (1 + tol):
        step += 1
        guess = math.sqrt(low * high)
        if step % 4 and 0 < cost_high < cost_low < math.inf:
            share = math.log(cost_low / target) / math.log(cost_low / cost_high)
            root = low * (high / low) ** share
            is_near_low = root / low < high / root
            beyond_root = root * (1 + tol / 3) if is_near_low else root / (1 + tol / 3)
            if low < beyond_root < high:
                guess = beyond_root
        if not low < guess < high:
            break  # no float lies between the ends
        cost_of_guess = cost(guess)
        if cost_of_guess <= target:
            high, cost_high = guess, cost_of_guess
        else:
            low, cost_low = guess, cost_of_guess
    return high
