"""Plans of private training: noise, steps, batch size or epsilon from the other three."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxdp.files.text import down, up
from jaxdp.privacy.accounting import Adjacency, Method, epsilon
from jaxdp.privacy.calibration import calibrate_noise
from jaxdp.privacy.events import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from jaxdp.privacy.ledger import Account, BudgetExceeded
from jaxdp.privacy.privacy_warnings import warn_if_weak
from jaxdp.privacy.units import unit_words

MOST_STEPS = 10**6
# The most rows of a growing epsilon.
_MOST_ROWS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Steps of DP-SGD or a relative, each on a Poisson sample of the records.

    Attributes:
        records: n, the public number of records.
        batch_size: The expected batch size q n.
        noise_multiplier: The standard deviation of the noise over the clip norm.
        steps: The number of steps.
        epsilon: An upper bound on what all steps cost at `delta`.
        delta, adjacency: As in `jaxdp.privacy.epsilon`.
    """

    records: int
    batch_size: float
    noise_multiplier: float
    steps: int
    epsilon: float
    delta: float
    adjacency: Adjacency

    @property
    def sampling_probability(self) -> float:
        """The probability q with which a step reads a record."""
        return self.batch_size / self.records

    def event(self, first: int, last: int) -> DpEvent:
        """Returns the event of steps first, ..., last - 1."""
        return _event(self.sampling_probability, self.noise_multiplier, last - first)


def plan_training(
    *,
    records: int,
    delta: float,
    batch_size: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    adjacency: Adjacency = "add_remove",
    method: Method = "auto",
) -> TrainingPlan:
    """Returns the plan of training in which one quantity follows from three others.

    The four are batch size, noise, steps and epsilon.

        plan = jaxdp.privacy.plan_training(
            records=50_000, batch_size=500, steps=1000, epsilon=3.0, delta=1e-6
        )
        plan.noise_multiplier  # 0.865

    Args:
        records: The public number of records, at least 1.
        delta: The delta at which epsilon counts, in (0, 1). 1 / records or more gives a
            `PrivacyWarning`.
        batch_size: The expected batch size, in (0, records]. None asks for the largest integer.
        noise_multiplier: The noise multiplier, > 0. None asks for the smallest one, up to 1e-4 of
            its value.
        steps: The number of steps, at least 1. None asks for the most, up to 1e-4 of their number.
        epsilon: The target. None asks for the cost. Above 10 gives a `PrivacyWarning`.
        adjacency, method: As in `jaxdp.privacy.epsilon`.

    Raises:
        ValueError: Not exactly one of the four is None, a value is out of range, or no value meets
            the target.
    """
    _check_plan(
        records,
        delta,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        steps=steps,
        epsilon=epsilon,
    )
    terms: Any = {"delta": delta, "adjacency": adjacency, "method": method}

    def event(size: float, noise: float, count: int) -> DpEvent:
        return _event(size / records, noise, count)

    def cost(size: float, noise: float, count: int) -> float:
        return _epsilon(event(size, noise, count), **terms)

    def smallest(make_event: Callable[[float], DpEvent]) -> float:
        return calibrate_noise(make_event, epsilon=target, **terms)

    # What is left out is 0 here.
    size = batch_size or 0.0
    noise = noise_multiplier or 0.0
    count = steps or 0
    target = epsilon or 0.0
    if not noise:
        noise = smallest(lambda z: event(size, z, count))
    elif not count:
        _check_reach("step", cost(size, noise, 1), target)
        count = MOST_STEPS
        # `smallest` finds the smallest x at which 1 / x steps meet the target.
        if cost(size, noise, count) > target:
            count = int(1 / smallest(lambda x: event(size, noise, int(1 / x))))
    elif not size:
        _check_reach("record in a batch", cost(1, noise, count), target)
        size = records
        # The smallest x at which batches of records / x meet the target.
        if cost(size, noise, count) > target:
            # No batch has more than all records.
            x = smallest(lambda x: event(int(records * min(1, 1 / x)), noise, count))
            size = int(records / x)
    spent = cost(size, noise, count)
    warn_if_weak(epsilon=spent, delta=delta, records=records, sampling_probability=size / records)
    return TrainingPlan(
        records=records,
        batch_size=size,
        noise_multiplier=noise,
        steps=count,
        epsilon=spent,
        delta=delta,
        adjacency=adjacency,
    )


def _check_plan(records: int, delta: float, **arguments: float | None) -> None:
    """Raises ValueError unless one of four arguments is None, and the others are in range."""
    left_out = [name for name, value in arguments.items() if value is None]
    if len(left_out) != 1:
        raise ValueError(
            f"exactly one of {', '.join(arguments)} must be left out, got {left_out or 'none'} "
            "left out."
        )
    if records < 1:
        raise ValueError(f"records must be at least 1, got {records}.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}.")
    batch_size = arguments["batch_size"]
    if batch_size is not None and not 0 < batch_size <= records:
        raise ValueError(
            f"batch_size must be in (0, {records}], up to the number of records, got {batch_size}."
        )
    for name in ("noise_multiplier", "epsilon"):
        value = arguments[name]
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be > 0 and finite, got {value}.")
    steps = arguments["steps"]
    if steps is not None and not (0 < steps < math.inf and steps % 1 == 0):
        raise ValueError(f"steps must be an integer > 0, got {steps}.")


def facts(
    event: Callable[[int, int], DpEvent],
    *,
    records: int,
    batch_size: float,
    noise_multiplier: str,
    steps: int,
    every: int,
    terms: Mapping[str, Any],
) -> list[tuple[str, str]]:
    """Returns what a training run costs as (name, value) rows for people.

    Args:
        event: `event(first, last)` of the steps first, ..., last - 1.
        every: The number of steps of a chunk. Epsilon is given at the ends of up to ten chunks, the
            last among them.
        terms: The delta, and the adjacency and unit of the data set, which are "add_remove" and
            "record" without them. The rows count units by their name, such as "patients".
        records, batch_size, noise_multiplier, steps: As in `TrainingPlan`.
    """
    delta = terms["delta"]
    adjacency = terms.get("adjacency", "add_remove")
    units = unit_words(terms.get("unit", "record")).many
    chunks = math.ceil(steps / every)
    rows = min(_MOST_ROWS, chunks)
    growth = {}
    for row in range(1, rows + 1):
        end = min(steps, every * math.ceil(chunks * row / rows))
        growth[end] = epsilon(event(0, end), delta=delta, adjacency=adjacency)
    ends = [f"{end}: {up(spent, 4)}" for end, spent in growth.items()]
    return [
        (units, f"{records}"),
        ("batch size", f"{batch_size:g} expected, sampling probability {batch_size / records:.6g}"),
        ("noise multiplier", noise_multiplier),
        ("steps", f"{steps}"),
        ("epsilon", f"{up(growth[steps])} at delta {delta:g}, {adjacency}"),
        ("epsilon after steps", ", ".join(ends)),
        (f"delta * {units}", f"{delta * records:.4g}"),
    ]


def left_after(account: Account, event: DpEvent) -> str:
    """Returns a sentence on what an event would leave of an account's budget. It spends nothing."""
    delta = 1e-5 if account.delta is None else account.delta
    before = account.epsilon(delta=delta)
    after = account.would_cost(event, delta=delta)
    remaining = account.remaining()
    text = f"epsilon {up(before, 4)} is spent at delta {delta:g}, {up(after, 4)} afterwards"
    try:
        account.check(event)
    except BudgetExceeded:
        return f"{text}: the budget has {down(remaining, 4)} left and REFUSES this"
    if remaining == math.inf:
        return f"{text}, without a budget"
    return f"{text}, {down(max(0.0, remaining - (after - before)), 4)} left"


# `plan_training` has an argument of this name.
_epsilon = epsilon


def _event(sampling_probability: float, noise_multiplier: float, steps: int) -> DpEvent:
    # A batch that is rounded to no record costs nothing.
    if sampling_probability == 0:
        steps = 0
    # Without steps any probability will do.
    step = PoissonSampledDpEvent(sampling_probability or 1.0, GaussianDpEvent(noise_multiplier))
    return SelfComposedDpEvent(step, steps)


def _check_reach(what: str, cost: float, target: float) -> None:
    if cost > target:
        raise ValueError(
            f"epsilon={target:g} must be at least {up(cost, 4)}, the cost of one {what}. Use more "
            "noise."
        )
