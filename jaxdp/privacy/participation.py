"""Events of runs in which a pattern decides who takes part in which step.

A run releases C G + sigma Z: the rows of G are the clipped sums of T steps, in units of the clip
norm, Z is N(0, 1) and C a lower triangular strategy, [T, T]. C = I is DP-SGD. Equivalently, the
noise of the steps is C^-1 Z. A record that takes part in the steps x, a 0-1 vector [T], shifts the
release by at most m_x = C x / sigma standard deviations.

    cyclic Poisson   A record is eligible in every b-th step, and sampled there with probability q.
                     With bands <= b, its steps move disjoint rows. So the run is ceil(T / b)
                     Poisson-sampled Gaussians of multiplier sigma / max_t |C e_t|
                     (Choquette-Choo et al. 2023, arXiv 2306.08153, theorem 4).
    balls in bins    x = bin j, the steps j, j + b, j + 2 b, ..., with a uniform j
                     (Choquette-Choo et al. 2024, arXiv 2410.06266; for one epoch of C = I, Chua et
                     al. 2024, arXiv 2412.16802).
    b-min-sep        x is a stationary renewal process: a record is sampled with probability p
                     unless it took part in the b - 1 steps before (arXiv 2602.09338).

The last two are dominated by the pair (E_x N(m_x, I), N(0, I)) for adaptive steps, if C has no
negative entry, for a record against none or against the null record. So they have no rule for
"replace_one". Their deltas are simulated (`jaxdp.privacy.simulation`). The event holds the result,
and composes as any pair does.
"""

import dataclasses

import numpy as np
from scipy import linalg

from jaxdp.files import check_count, check_numbers
from jaxdp.privacy.events import (
    CorrelatedSampleDpEvent,
    DpEvent,
    GaussianDpEvent,
    MonteCarloDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from jaxdp.privacy.mixtures import Bins, Renewals
from jaxdp.privacy.simulation import falling, rounded_up, simulated

DRAWS = 2**18
FAILURE_PROBABILITY = 1e-8


def cyclic_poisson_event(
    noise_multiplier: float,
    *,
    cycle_length: int,
    sampling_probability: float,
    steps: int,
    strategy: np.ndarray | None = None,
) -> DpEvent:
    """Returns the event of a run with cyclic Poisson sampling.

    Args:
        noise_multiplier: sigma, the standard deviation of Z over the clip norm.
        cycle_length: b, the number of groups.
        sampling_probability: q, with which a record of the step's group is sampled.
        steps: T.
        strategy: C, float [T, T], lower triangular with at most b bands, or the first column [T]
            of a Toeplitz matrix. None is DP-SGD.

    Returns:
        ceil(T / b) events, `PoissonSampledDpEvent`, or `CorrelatedSampleDpEvent` if noise ties
        several cycles together.

    Raises:
        TypeError, ValueError: An argument is not as above.
    """
    check_count("cycle_length", cycle_length, 1)
    matrix = checked_strategy(strategy, steps, cycle_length=cycle_length)
    norm = 1.0
    if matrix is not None:
        # No column of a Toeplitz matrix is longer than the first.
        norm = float(np.linalg.norm(matrix, axis=0).max())
    cycles = -(-steps // cycle_length)
    # Correlated noise ties a cycle to the next one, for units of different groups.
    is_tied = cycles > 1 and matrix is not None and _correlates(matrix)
    kind = CorrelatedSampleDpEvent if is_tied else PoissonSampledDpEvent
    step = kind(sampling_probability, GaussianDpEvent(noise_multiplier / norm))
    return SelfComposedDpEvent(step, cycles)


def balls_in_bins_event(
    noise_multiplier: float,
    *,
    bins: int,
    steps: int,
    strategy: np.ndarray | None = None,
    draws: int = DRAWS,
    failure_probability: float = FAILURE_PROBABILITY,
    seed: bytes | None = None,
) -> DpEvent:
    """Returns the event of a run with balls-in-bins sampling, a `MonteCarloDpEvent`.

    Every call draws anew. A run needs one event, which is chosen before it begins.

    Args:
        noise_multiplier: sigma, the standard deviation of Z over the clip norm.
        bins: b, the number of bins.
        steps: T, all steps of the run.
        strategy: C, float [T, T], lower triangular without negative entries, or the first column
            [T] of a Toeplitz matrix. None is DP-SGD.
        draws: The draws of each estimate. 2**18 take a second or two for ten bins.
        failure_probability: The probability over the draws that the event is too cheap, in
            (0, 1). It is a part of every delta of the event.
        seed: 16 bytes, for tests. None, the default, takes OS entropy.

    Returns:
        The event. It is a Gaussian where noise is so small that the bins hide nothing.

    Raises:
        TypeError, ValueError: An argument is not as above.
    """
    check_count("bins", bins, 1)
    matrix = checked_strategy(strategy, steps, no_negative=True)
    _check_noise(noise_multiplier)
    if noise_multiplier == 0:
        return NonPrivateDpEvent()
    taking_part = (np.arange(steps)[:, None] % bins == np.arange(bins)).astype(float)
    shifts = taking_part if matrix is None else _whole(matrix) @ taking_part
    # The products of the shifts are all that the losses depend on, [b, b] for any T.
    mixture = Bins(shifts.T @ shifts / noise_multiplier**2)
    name = f"BallsInBins({bins}, {steps}, {_text(noise_multiplier, strategy)})"
    return simulated(
        mixture, mechanism=name, draws=draws, failure_probability=failure_probability, seed=seed
    )


def b_min_sep_event(
    noise_multiplier: float,
    *,
    separation: int,
    sampling_probability: float,
    steps: int,
    strategy: np.ndarray | None = None,
    draws: int = DRAWS // 8,
    failure_probability: float = FAILURE_PROBABILITY,
    seed: bytes | None = None,
) -> DpEvent:
    """Returns the event of a run with b-min-sep sampling, a `MonteCarloDpEvent`.

    Args:
        separation: b, the least distance of two steps of a record.
        sampling_probability: p, with which a record that may take part does, in (0, 1].
        strategy: C, float [T, T], lower triangular without negative entries, with at most b bands,
            or the first column [T] of a Toeplitz matrix. None is DP-SGD.
        noise_multiplier, steps, draws, failure_probability, seed: As in `balls_in_bins_event`. The
            time of a draw grows with the steps.

    Returns:
        The event, as `balls_in_bins_event` does.

    Raises:
        TypeError, ValueError: An argument is not as above.
    """
    check_count("separation", separation, 1)
    check_numbers(sampling_probability=sampling_probability)
    if not 0 < sampling_probability <= 1:
        raise ValueError(f"sampling_probability must be in (0, 1], got {sampling_probability}.")
    matrix = checked_strategy(strategy, steps, no_negative=True, separation=separation)
    _check_noise(noise_multiplier)
    if noise_multiplier == 0:
        return NonPrivateDpEvent()
    matrix = np.eye(steps) if matrix is None else _whole(matrix)
    mixture = Renewals(matrix / noise_multiplier, separation, sampling_probability)
    pattern = f"{separation}, {sampling_probability:.9g}, {steps}"
    name = f"BMinSep({pattern}, {_text(noise_multiplier, strategy)})"
    return simulated(
        mixture, mechanism=name, draws=draws, failure_probability=failure_probability, seed=seed
    )


def truncated_event(event: DpEvent, probability: float) -> DpEvent:
    """Returns the event of a run whose batches are truncated, from that without truncation.

    The two runs are equal unless a batch is truncated. So they differ by at most tau in total
    variation, and for neighbours D, D' (Chua et al. 2024, arXiv 2411.04205)

        P(truncated on D) <= P(run on D) + tau <= e^epsilon P(run on D') + delta + tau
                          <= e^epsilon P(truncated on D') + delta + (1 + e^epsilon) tau.

    Args:
        event: The event without truncation, of `balls_in_bins_event` or `b_min_sep_event`.
        probability: tau in [0, 1], a bound on the probability that a batch of the run is truncated,
            for both neighbours. Truncation must not depend on what the run releases.

    Returns:
        The event with (1 + e^epsilon) tau in its deltas. It is non-private where these reach 1, or
        where noise is so small that the event has no simulation.

    Raises:
        ValueError: probability is not in [0, 1], or the event is another one.
    """
    check_numbers(probability=probability)
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], got {probability}.")
    if probability == 0 or isinstance(event, NoOpDpEvent | NonPrivateDpEvent):
        return event
    # A run that is charged as a Gaussian has no curve to which the price could be added.
    if isinstance(event, GaussianDpEvent):
        return NonPrivateDpEvent()
    if not isinstance(event, MonteCarloDpEvent):
        raise ValueError(
            f"event must be that of balls in bins or b-min-sep, got {type(event).__name__}. "
            "PoissonSampler(truncated_batch_size=...) has an event of its own."
        )
    price = probability * (1 + np.exp(event.epsilons))  # (1 + e^epsilon) tau

    def raised(curve: tuple[float, ...]) -> tuple[float, ...]:
        # Delta falls with epsilon, although the price rises.
        return falling(np.minimum(curve + price, 1.0))

    forward = raised(event.forward)
    backward = raised(event.backward)
    if max(forward[-1], backward[-1]) >= 1:
        return NonPrivateDpEvent()
    return dataclasses.replace(
        event,
        mechanism=f"Truncated({event.mechanism}, with probability {rounded_up(probability):g})",
        forward=forward,
        backward=backward,
    )


def _text(noise_multiplier: float, strategy: np.ndarray | None) -> str:
    noise = f"Gaussian({noise_multiplier:.9g})"
    return noise if strategy is None else f"{noise}, correlated"


def _check_noise(noise_multiplier: float) -> None:
    check_numbers(noise_multiplier=noise_multiplier)
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier must be at least 0, got {noise_multiplier}.")


def checked_strategy(
    strategy: np.ndarray | None,
    steps: int,
    *,
    no_negative: bool = False,
    **most_bands: int,
) -> np.ndarray | None:
    """Returns a strategy as float64, [T, T] or the first column [T], if a proof holds for it.

    Args:
        strategy: C, or None, which is the identity.
        steps: T.
        no_negative: Whether the proof needs entries without a sign.
        most_bands: The most bands of the proof, by the name of the argument that sets them.

    Raises:
        TypeError, ValueError: The strategy is no finite lower triangular matrix, or has entries
            that the proof does not allow.
    """
    check_count("steps", steps, 1)
    if strategy is None:
        return None
    matrix = np.asarray(strategy, np.float64)
    if matrix.shape not in ((steps,), (steps, steps)):
        raise ValueError(
            f"strategy must have shape {(steps, steps)} or {(steps,)}, got {matrix.shape}."
        )
    has_later = matrix.ndim == 2 and np.triu(matrix, 1).any()
    if not np.isfinite(matrix).all() or has_later:
        raise ValueError(
            "strategy must be finite and lower triangular: a step has the noise of steps before."
        )
    if no_negative and (matrix < 0).any():
        raise ValueError(
            f"strategy must have no negative entry, got {matrix.min():g}. The dominating pair is "
            "proven for such strategies only. Use cyclic Poisson sampling."
        )
    for name, most in most_bands.items():
        _check_bands(matrix, most, name)
    return matrix


def _correlates(matrix: np.ndarray) -> bool:
    """Returns whether a checked strategy has entries below its diagonal."""
    below = matrix[1:] if matrix.ndim == 1 else np.tril(matrix, -1)
    return bool(below.any())


def _whole(matrix: np.ndarray) -> np.ndarray:
    """Returns the lower triangular matrix [T, T] of a checked strategy."""
    if matrix.ndim == 2:
        return matrix
    whole: np.ndarray = linalg.toeplitz(matrix, np.zeros_like(matrix))
    return whole


def _check_bands(matrix: np.ndarray, most: int, name: str) -> None:
    places = np.nonzero(matrix)
    # In the first column of a Toeplitz matrix the row is the distance from the diagonal.
    distances = places[0] - places[1] if matrix.ndim == 2 else places[0]
    bands = int(distances.max(initial=-1)) + 1
    if bands > most:
        raise ValueError(
            f"strategy must have at most {name}={most} bands, got {bands}. Use more separation, or "
            "a banded strategy of fewer bands."
        )
