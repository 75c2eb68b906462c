"""Strategies of correlated noise by the optimisers of jax_privacy, and the choice of their bands.

    noise = optimal_noise(sampler, steps=400)                        # as many bands as are best
    noise = optimal_noise(sampler, steps=400, strategy="blt")
    noise = optimal_noise(None, steps=64)                            # of a stream

The error of a run is the expected squared error of the sum of all noise until a step, averaged over
the steps (`CorrelatedNoise.error`). It is that of the parameters of SGD with a constant learning
rate, for fixed gradients.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxdp.data import (
    BallsInBinsSampler,
    BMinSepSampler,
    CyclicPoissonSampler,
    FixedOrderSampler,
)
from jaxdp.files import check_count
from jaxdp.finetune.options import calibrated, event
from jaxdp.privacy import DpEvent, GaussianDpEvent, calibrate_noise, plan_training
from jaxdp.privacy.accounting import Adjacency
from jaxdp.privacy.events import describe
from jaxdp.transforms.noise import CorrelatedNoise, correlated

Pattern = FixedOrderSampler | CyclicPoissonSampler | BallsInBinsSampler | BMinSepSampler
_DIGITS = 5  # so that another machine, whose optimiser ends a little elsewhere, has the same noise
_MOST_BANDS = 64
_MOST_BUFFERS = 6


def optimal_noise(
    sampler: Pattern | None,
    *,
    steps: int,
    strategy: str = "banded",
    bands: int | None = None,
) -> CorrelatedNoise:
    """Returns the noise of an optimised strategy for the participations of a sampler.

    Args:
      sampler: The sampler of the run. With T steps an example takes part `participation(T)` times.
        Cyclic Poisson and b-min-sep sampling have proofs for "banded" only. None is a single epoch,
        such as a stream whose records are in one step.
      steps: T.
      strategy: "banded", a banded Toeplitz matrix by `toeplitz.optimize_banded_toeplitz`, "blt", a
        buffered linear Toeplitz matrix by `buffered_toeplitz.optimize`, or "bisr", the banded
        inverse square root. The optimisers are of `jax_privacy.matrix_factorization`. Coefficients
        are rounded to five decimal digits.
      bands: The number of bands, or of buffers of "blt". None, the default, takes the best of the
        powers of two up to the separation of participations, and of that, up to 64. For "blt" the
        optimiser chooses.

    Raises:
      ValueError: strategy is unknown, or bands is out of range.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {sorted(STRATEGIES)}, got {strategy!r}.")
    check_count("steps", steps, 1)
    if bands is not None:
        check_count("bands", bands, 1)
    most, separation = 1, steps
    if sampler is not None:
        most, separation = sampler.participation(steps)
    pattern = {"steps": steps, "participations": most, "min_separation": separation}
    noise: CorrelatedNoise = STRATEGIES[strategy](pattern, bands)
    return noise


def _banded(pattern: Mapping[str, Any], bands: int | None) -> CorrelatedNoise:
    """Returns the noise of banded Toeplitz matrices."""
    steps = pattern["steps"]
    most = min(steps, _MOST_BANDS)
    # More bands than the separation would let the participations of a unit overlap.
    if pattern["participations"] > 1:
        most = min(most, pattern["min_separation"])
    counts = sorted({*_powers_of_two(most), most}) if bands is None else [min(bands, steps)]
    noises = [correlated(_bands(steps, count), **pattern) for count in counts]
    return min(noises, key=_mean_error)


@functools.lru_cache(maxsize=64)  # a plan compares patterns with equal bands
def _bands(steps: int, count: int) -> tuple[float, ...]:
    """Returns the coefficients of the best banded Toeplitz matrix."""
    from jax_privacy.matrix_factorization import toeplitz

    if count == 1:
        return (1.0,)
    coefficients = toeplitz.optimize_banded_toeplitz(n=steps, bands=count)
    rounded: list[float] = np.round(np.asarray(coefficients), _DIGITS).tolist()
    return tuple(rounded)


def _inverse_root(pattern: Mapping[str, Any], bands: int | None) -> CorrelatedNoise:
    """Returns the noise of the banded inverse square root of the sum over steps."""
    steps = pattern["steps"]
    counts = _powers_of_two(min(steps, _MOST_BANDS)) if bands is None else [min(bands, steps)]
    # The coefficients of sqrt(1 - x), as `toeplitz.optimal_max_error_noising_coefs` of jax_privacy.
    powers = np.arange(1, max(counts))
    coefficients = np.round(np.cumprod([1.0, *((powers - 1.5) / powers)]), _DIGITS)
    noises = [correlated(coefficients[:count], **pattern, inverse=True) for count in counts]
    return min(noises, key=_mean_error)


def _buffered(pattern: Mapping[str, Any], buffers: int | None) -> CorrelatedNoise:
    """Returns the noise of buffered linear Toeplitz matrices."""
    from jax_privacy.matrix_factorization import buffered_toeplitz

    # The optimiser of jax_privacy promotes ranks.
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        best = buffered_toeplitz.optimize(
            n=pattern["steps"],
            min_sep=pattern["min_separation"],
            max_participations=pattern["participations"],
            error="mean",
            min_buffers=buffers or 1,
            max_buffers=buffers or _MOST_BUFFERS,
        )
        decays = np.round(np.asarray(best.buf_decay), _DIGITS)
        scales = np.round(np.asarray(best.output_scale), _DIGITS)
        rounded = buffered_toeplitz.BufferedToeplitz.build(decays, scales)
        return correlated(rounded, **pattern)


STRATEGIES: Mapping[str, Callable[..., Any]] = {
    "banded": _banded,
    "blt": _buffered,
    "bisr": _inverse_root,
}


def _powers_of_two(most: int) -> list[int]:
    """Returns the powers of two up to a number, ascending."""
    return [2**power for power in range(most.bit_length())]


def _mean_error(noise: CorrelatedNoise) -> float:
    return float(noise.error().mean())


def _error(noise: CorrelatedNoise, noise_multiplier: float) -> float:
    """Returns the root mean squared error of the sum of the noise until a step."""
    return noise_multiplier / noise.sensitivity * math.sqrt(_mean_error(noise))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedPlan:
    """A run with correlated noise that costs a target, beside DP-SGD at the same cost.

    Attributes:
      sampler: Who takes part: cyclic Poisson sampling, which amplifies, or a fixed order.
      noise: The noise of the best banded strategy.
      noise_multiplier: The standard deviation of its independent rows over the clip norm.
      error: The root of the mean squared error of the sum of noise until a step, in clip norms.
      fixed_order_error: The same of the best banded strategy in a fixed order.
      dp_sgd_error: The same of DP-SGD on Poisson samples of the same expected size, with its
        amplification by sampling.
      unamplified_error: The same of independent noise in a fixed order.
    """

    sampler: FixedOrderSampler | CyclicPoissonSampler
    noise: CorrelatedNoise
    noise_multiplier: float
    error: float
    fixed_order_error: float
    dp_sgd_error: float
    unamplified_error: float

    @property
    def bands(self) -> int:
        """The number of bands."""
        return self.noise.buffers + 1

    @property
    def event(self) -> DpEvent:
        """The event of the run."""
        return event(self.noise_multiplier, self.sampler, self.noise.steps, self.noise)

    def facts(self) -> list[tuple[str, str]]:
        """Returns the plan as (name, value) rows for people."""
        noise = self.noise
        gain = self.dp_sgd_error / self.error
        verdict = "less error"
        if gain <= 1:
            verdict = "no gain: take DP-SGD with Poisson sampling"
        pattern = f"each record in {noise.participations} of {noise.steps} steps at most"
        if noise.participations > 1:
            pattern += f", {noise.min_separation} or more apart"
        return [
            ("participation", self.sampler.words("records")),
            ("steps of a record", pattern),
            ("bands", f"{self.bands}, memory of {noise.buffers} copies of the parameters"),
            ("sensitivity", f"{noise.sensitivity:.6g} clip norms"),
            ("noise multiplier", f"{self.noise_multiplier:.6g}"),
            ("event", describe(self.event)),
            ("error of the sum of noise", f"{self.error:.4g} clip norms, root mean square"),
            ("of a fixed order", f"{self.fixed_order_error:.4g}, with its best bands"),
            ("of DP-SGD at this epsilon", f"{self.dp_sgd_error:.4g}, with Poisson sampling"),
            ("of independent noise", f"{self.unamplified_error:.4g}, in a fixed order"),
            ("gain over DP-SGD", f"{gain:.3g} times, {verdict}"),
        ]


def plan_correlated(
    *,
    records: int,
    batch_size: int,
    steps: int,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
) -> CorrelatedPlan:
    """Returns the plan of a run with correlated noise for a target, and what it gains.

        plan = jaxdp.finetune.plan_correlated(
            records=10_000, batch_size=500, steps=100, epsilon=8.0, delta=1e-6
        )
        plan.bands, plan.dp_sgd_error / plan.error

    More groups of cyclic Poisson sampling allow more bands, whose noise cancels better. But they
    sample a record of a group with a larger probability, which amplifies less (Choquette-Choo et
    al. 2023, "(Amplified) banded matrix factorization"). So the plan takes the best of the numbers
    of groups that are powers of two, and of the fixed order.

    Args:
      records, batch_size: As of a `jaxdp.data.FixedOrderSampler`. Samples have the same expected
        size.
      steps: The number of steps of the run.
      epsilon, delta, adjacency: The target, as in `jaxdp.privacy.calibrate_noise`.

    Raises:
      ValueError: An argument is out of range, or no noise meets the target.
    """
    order = FixedOrderSampler(records, batch_size)
    target: Any = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency}
    # One Gaussian of this multiplier is all that the target pays.
    multiplier = calibrate_noise(GaussianDpEvent, **target)
    independent = optimal_noise(order, steps=steps, bands=1)
    in_order = optimal_noise(order, steps=steps)
    plans: list[tuple[Any, CorrelatedNoise, float]]
    plans = [(order, in_order, multiplier * in_order.sensitivity)]
    plans += amplified_plans(order, steps=steps, **target)
    errors = [_error(noise, sigma) for _, noise, sigma in plans]
    sampler, noise, sigma = plans[int(np.argmin(errors))]
    sampled = plan_training(
        records=records, batch_size=order.expected_batch_size, steps=steps, **target
    )
    return CorrelatedPlan(
        sampler=sampler,
        noise=noise,
        noise_multiplier=sigma,
        error=min(errors),
        fixed_order_error=errors[0],
        # The sum of t independent rows has t times the variance of one.
        dp_sgd_error=sampled.noise_multiplier * math.sqrt((steps + 1) / 2),
        unamplified_error=_error(independent, multiplier * independent.sensitivity),
    )


def amplified_plans(
    order: FixedOrderSampler, *, steps: int, **target: Any
) -> list[tuple[CyclicPoissonSampler, CorrelatedNoise, float]]:
    """Returns sampler, noise and noise multiplier of each number of groups of cyclic sampling.

    Args:
      order: A fixed order whose batches have the expected size of the samples.
      steps, target: As in `plan_correlated`.
    """
    records = order.num_examples
    plans = []
    # [1:]: one group is Poisson sampling, which `dp_sgd_error` stands for.
    for groups in _powers_of_two(min(order.steps_per_epoch - 1, steps, _MOST_BANDS))[1:]:
        share = order.expected_batch_size * groups / records
        sampler = CyclicPoissonSampler(records, min(1.0, share), cycle_length=groups)
        noise = optimal_noise(sampler, steps=steps, bands=groups)
        plans.append((sampler, noise, calibrated(sampler, steps=steps, noise=noise, **target)))
    return plans
