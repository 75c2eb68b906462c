"""AdpAlloc: DP-SGD whose noise falls from epoch to epoch.

This is section V of Yu, Liu, Pu, Gursoy and Truex 2019. A schedule maps the first noise multiplier
sigma_0 and the epoch t = 0, 1, ... to sigma_t:

    time-based    sigma_0 / (1 + k t)
    step          sigma_0 k^floor(t / period)
    exponential   sigma_0 exp(-k t)
    polynomial    (sigma_0 - sigma_end) (1 - min(t, period) / period)^power + sigma_end

All schedules are public. The fifth rule of the paper is not offered. It lowers the noise when the
accuracy on held-out records stops rising, and so it queries private data in every epoch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import optax

from jaxdp.data import PoissonSampler
from jaxdp.files import check_function, shows_keywords
from jaxdp.finetune.dp_sgd import dp_sgd
from jaxdp.finetune.options import OPTION_DEFAULTS, Options, beside, noise_and_options
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    SelfComposedDpEvent,
    accounting,
    calibrate_noise,
)
from jaxdp.privacy.accounting import Adjacency, Method
from jaxdp.report import counting

NoiseSchedule = Callable[[float, Any], Any]
"""A map from (sigma_0, epoch t) to sigma_t.

All are Python numbers. The map is evaluated on the host, once for each step.
"""

# A sigma_0 so large that epochs whose noise grows with it cost next to nothing.
_LARGEST = 2.0**40


def constant_noise() -> NoiseSchedule:
    """Returns the schedule sigma_0 in every epoch, which is DP-SGD."""
    return lambda sigma_0, epoch: sigma_0 + 0 * epoch


def time_based_noise(rate: float) -> NoiseSchedule:
    """Returns the schedule sigma_0 / (1 + rate * epoch), with rate >= 0."""
    is_valid = 0 <= rate < math.inf
    _check(
        "rate",
        rate,
        is_valid,
        "finite and at least 0, so that noise neither rises nor turns negative",
    )
    return lambda sigma_0, epoch: sigma_0 / (1 + rate * epoch)


def step_noise(factor: float, period: int) -> NoiseSchedule:
    """Returns the schedule sigma_0 * factor^(epoch // period).

    It has 0 < factor <= 1 and period >= 1 epochs.
    """
    is_valid = 0 < factor <= 1
    _check("factor", factor, is_valid, "in (0, 1], so that noise neither rises nor turns negative")
    _check("period", period, period >= 1, "at least 1 epoch")
    logarithm = math.log(factor)
    return lambda sigma_0, epoch: sigma_0 * math.e ** (logarithm * (epoch // period))


def exponential_noise(rate: float) -> NoiseSchedule:
    """Returns the schedule sigma_0 * exp(-rate * epoch), with rate >= 0.

    Yu et al. found it the best on average.
    """
    _check("rate", rate, 0 <= rate < math.inf, "finite and at least 0, so that noise does not rise")
    return lambda sigma_0, epoch: sigma_0 * math.e ** (-rate * epoch)


def polynomial_noise(end: float, power: float, period: int) -> NoiseSchedule:
    """Returns the schedule (sigma_0 - end) * (1 - epoch / period)^power + end.

    From epoch `period` on it is `end`. `end` is positive and does not depend on sigma_0, so no
    sigma_0 changes the privacy loss from epoch `period` on. The noise rises if sigma_0 is below
    `end`. The power is at most 100.
    """
    is_valid = 0 < end < math.inf
    _check("end", end, is_valid, "finite and positive, since a step without noise is not private")
    _check("power", power, 0 < power <= 100, "in (0, 100]")
    _check("period", period, period >= 1, "at least 1 epoch")

    def schedule(sigma_0: float, epoch: Any) -> Any:
        # The factor (epoch < period) keeps the noise at sigma_end in all epochs after `period`.
        left = (period - epoch) * (epoch < period) / period
        return (sigma_0 - end) * left**power + end

    return schedule


SCHEDULES: Mapping[str, Callable[..., NoiseSchedule]] = {
    "constant": constant_noise,
    "time_based": time_based_noise,
    "step": step_noise,
    "exponential": exponential_noise,
    "polynomial": polynomial_noise,
}


def calibrate_schedule(
    schedule: NoiseSchedule,
    sampler: PoissonSampler,
    *,
    steps: int,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    method: Method = "auto",
    besides: DpEvent | None = None,
) -> float:
    """Returns the smallest sigma_0 with which all steps together cost at most the target.

    Every epoch is accounted with its own noise, without averaging. A few hundred different epochs
    take up to a minute.

    Args:
      schedule: The schedule, such as `exponential_noise(0.01)`.
      sampler: The sampler of the run. An epoch is ceil(1 / q) steps.
      steps: The number of steps of the whole run.
      epsilon, delta, adjacency, method: As in `jaxdp.privacy.calibrate_noise`.
      besides: As in `dp_sgd`.

    Raises:
      ValueError: No sigma_0 meets the target. The message gives the epsilon that the schedule can
          reach.
    """

    def event(sigma_0: float) -> DpEvent:
        return beside(schedule_event(schedule, sigma_0, sampler, steps), besides)

    # The search raises sigma_0 until the cost meets the target. No sigma_0 can if epochs without
    # noise to speak of cost more already. What `besides` costs is said by the search.
    fixed = schedule_event(schedule, _LARGEST, sampler, steps)
    floor = accounting.epsilon(fixed, delta=delta, adjacency=adjacency, method=method)
    if floor > epsilon:
        epochs = range(math.ceil(steps / _epoch_steps(sampler)))
        worst = min(schedule(_LARGEST, epoch) for epoch in epochs)
        raise ValueError(
            f"epsilon={epsilon} is out of reach: for every sigma_0 some epochs have a noise "
            f"multiplier of {worst:.4g}, and the run costs at least {floor:.4g} at "
            f"delta={delta:g}. Raise the noise that does not depend on sigma_0, or reach it later. "
            "You can also train for fewer steps or choose a larger epsilon."
        )
    with counting(event, label="noise", unit="trial") as tried:
        return calibrate_noise(
            tried, epsilon=epsilon, delta=delta, adjacency=adjacency, method=method
        )


def schedule_event(
    schedule: NoiseSchedule,
    sigma_0: float,
    sampler: PoissonSampler,
    steps: int,
) -> DpEvent:
    """Returns the event of the first `steps` steps.

    An epoch without positive noise is a `NonPrivateDpEvent`.
    """
    length = _epoch_steps(sampler)
    epochs = []
    for epoch, first in enumerate(range(0, steps, length)):
        sigma = float(schedule(sigma_0, epoch))
        # A multiplier that underflows to 0 is no noise.
        step = sampler.event(GaussianDpEvent(sigma)) if sigma > 0 else NonPrivateDpEvent()
        epochs.append(SelfComposedDpEvent(step, min(length, steps - first)))
    return ComposedDpEvent(epochs)


@shows_keywords(Options, OPTION_DEFAULTS)
def adp_alloc(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float | Mapping[str, float],
    noise_multiplier: float | None = None,
    schedule: NoiseSchedule,
    sampler: PoissonSampler,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """Returns a trainer for DP-SGD with noise that falls from epoch to epoch.

        schedule = jaxdp.finetune.exponential_noise(0.01)
        trainer = jaxdp.finetune.adp_alloc(
            loss_fn, optax.sgd(0.5), sampler=sampler, clip_norm=1.0, schedule=schedule,
            epsilon=4.0, delta=1e-6, steps=1000,
        )

    Args:
      loss_fn, optimizer, clip_norm, sampler, options: As in `dp_sgd`.
      noise_multiplier: sigma_0, the noise multiplier of the first epoch. None, the default, is
        `calibrate_schedule` of `epsilon`, `delta` and `steps`.
      schedule: The public schedule of the noise. It must not depend on private data.

    Raises:
      TypeError: As in `dp_sgd`, or schedule is no function.
      ValueError: As in `dp_sgd`. `PrivateTrainer.event` raises it for an epoch whose noise is
        negative or not finite, and `fit`, before it spends anything, for an epoch without positive
        noise.

    Formal guarantees:
      As `dp_sgd`, where a step of epoch e is PoissonSampled(q, Gaussian(sigma_e)). An epoch is
      ceil(1 / q) steps.
    """
    check_function("schedule", schedule, "schedule(sigma_0, epoch) -> 1.0")
    calibrate = functools.partial(calibrate_schedule, schedule)
    noise_multiplier, others = noise_and_options(noise_multiplier, options, sampler, calibrate)
    # The schedule is the argument that varies. `noise_multiplier` is its sigma_0 only.
    if callable(noise_multiplier) or not 0 < noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be positive and finite, got {noise_multiplier}. Pass a "
            "schedule as `schedule`."
        )
    return dp_sgd(
        loss_fn,
        optimizer,
        clip_norm=clip_norm,
        noise_multiplier=_Steps(schedule, noise_multiplier, _epoch_steps(sampler)),
        sampler=sampler,
        **others,
    )


@dataclasses.dataclass(frozen=True)
class _Steps:
    """A schedule over steps, made from a schedule over epochs."""

    schedule: NoiseSchedule
    sigma_0: float
    length: int

    def __call__(self, step: Any) -> Any:
        return self.schedule(self.sigma_0, step // self.length)


def _epoch_steps(sampler: PoissonSampler) -> int:
    """Returns the number of steps in which each example is expected to take part about once."""
    # In floating point 1 / (1 / 49) is a little more than 49.
    return math.ceil((1 - 1e-12) / sampler.sampling_probability)


def _check(
    name: str,
    value: float,
    is_valid: bool,
    rule: str,
) -> None:
    if not is_valid:
        raise ValueError(f"{name} must be {rule}, got {value}.")
