"""Participation patterns: who may take part in which step, beyond Poisson sampling.

    cyclic Poisson   random groups 0, ..., b - 1; step t samples group t mod b with probability q
    b-min-sep        a record is sampled with probability p, unless it took part in the b - 1 steps
                     before (arXiv:2602.09338)
    balls in bins    random bins 0, ..., b - 1; step t takes all of bin t mod b (arXiv:2410.06266)

In all of them two participations of a record are at least b steps apart, as correlated noise of b
bands needs it. `jaxdp.privacy.participation` has the events and their proofs.

Groups and bins are drawn for each record independently. So the records of neighbouring data sets
can be coupled, with or without the one record, and the proofs hold for "add_remove" too. Groups of
equal size would need a public number of records.
"""

import dataclasses
import functools
import math
import threading
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from scipy import stats

from jaxdp.data.sampling import PoissonSampler, _check_seed, _generator, _new_seed
from jaxdp.files import check_count, check_numbers

if TYPE_CHECKING:
    from dp_accounting import dp_event

# The upper-most counter words, beside those of `jaxdp.data.sampling`.
_BINS, _FIRST_FREE, _TRUNCATION = 4, 5, 9

# It exceeds the error of a binomial tail in float64.
_ROUNDED_UP = 1 + 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pattern:
    """What the patterns share: secret random numbers, and public sizes of batches."""

    seed: bytes = dataclasses.field(default_factory=_new_seed, repr=False)

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def of_run(self, seed: bytes) -> Self:
        """Returns the sampler of a run with its own secret seed, 16 bytes."""
        return dataclasses.replace(self, seed=seed)

    @property
    def least_separation(self) -> int:
        """The least distance of two steps of a record, b."""
        raise NotImplementedError

    def participation(self, steps: int) -> tuple[int, int]:
        """Returns the most steps among `steps` that a record is in, and their separation."""
        return -(-steps // self.least_separation), self.least_separation


class _Sizes:
    """The sizes of batches that each of n records joins with one probability."""

    num_examples: int

    @property
    def expected_batch_size(self) -> float:
        """The public mean size of a batch, the divisor of the clipped sum."""
        raise NotImplementedError

    @property
    def batch_size_std(self) -> float:
        """The standard deviation of the size of a batch."""
        share = self.expected_batch_size / self.num_examples
        return math.sqrt(self.expected_batch_size * (1 - share))

    @property
    def largest_batch(self) -> int:
        """The size that no batch exceeds."""
        return self.num_examples


def _groups(num_examples: int, count: int, seed: bytes) -> list[np.ndarray]:
    """Returns the records of groups that each record joins independently, int64 [B] each."""
    from jax_privacy import batch_selection

    # One round, so that each record is in one bin.
    strategy = batch_selection.BallsInBinsSampling(iterations=count, cycle_length=count)
    groups = strategy.batch_iterator(num_examples, rng=_generator(seed, 0, _BINS))
    return [np.sort(group.astype(np.int64)) for group in groups]


@dataclasses.dataclass(frozen=True)
class CyclicPoissonSampler(_Sizes, _Pattern):
    """Poisson sampling from one of b random groups in turn.

        sampler = jaxdp.data.CyclicPoissonSampler(len(source), 0.25, cycle_length=10)

    Formal guarantees:
      - A record is in one group, uniform and independent of the others. In every b-th step it is
        sampled with probability q, independently. It is in no other step.
      - So a record is eligible in at most ceil(T / b) of T consecutive steps, and their event is
        ceil(T / b) Poisson-sampled releases, for every adjacency (`run_event`). That holds for any
        groups. `fit` draws groups anew in every chunk of steps, which must be a multiple of b.
      - Seed, groups and batches are private values.

    Attributes:
      num_examples: n, at least 1. Public.
      sampling_probability: q in (0, 1], for a record of the step's group.
      cycle_length: b, the number of groups, at least 1. 1 is Poisson sampling.
      seed: 16 secret bytes, as in `PoissonSampler`.

    Raises:
      TypeError, ValueError: A value is not as above.
    """

    num_examples: int
    sampling_probability: float
    _: dataclasses.KW_ONLY
    cycle_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        PoissonSampler(self.num_examples, self.sampling_probability)  # Raises for wrong values.
        check_count("cycle_length", self.cycle_length, 1)

    @property
    def expected_batch_size(self) -> float:
        """The public number q * n / b, the divisor of the clipped sum."""
        return self.sampling_probability * self.num_examples / self.cycle_length

    @functools.cached_property
    def _members(self) -> list[np.ndarray]:
        return _groups(self.num_examples, self.cycle_length, self.seed)

    def batch(self, step: int) -> np.ndarray:
        """Returns the example indices of a step, int64 [B], ascending. B is random and may be 0."""
        check_count("step", step, 0)
        members = self._members[step % self.cycle_length]
        if not len(members):  # a sampler needs a record
            return members
        sampler = PoissonSampler(len(members), self.sampling_probability, seed=self.seed)
        return members[sampler.batch(step)]

    @property
    def least_separation(self) -> int:
        """b, `cycle_length`."""
        return self.cycle_length

    def event(self, inner_event: "dp_event.DpEvent") -> "dp_event.DpEvent":
        """Returns the privacy event of one step alone, `PoissonSampledDpEvent(q, inner_event)`."""
        sampler = PoissonSampler(self.num_examples, self.sampling_probability)
        return sampler.event(inner_event)

    def run_event(
        self,
        inner_event: "dp_event.DpEvent",
        steps: int,
        *,
        strategy: np.ndarray | None = None,
    ) -> "dp_event.DpEvent":
        """Returns the privacy event of consecutive steps: ceil(steps / b) times `event`.

        With the strategy of correlated noise, it is that of a whole run
        (`jaxdp.privacy.participation.cyclic_poisson_event`).

        Raises:
          ValueError: The strategy has more than b bands, or inner_event is not Gaussian beside one.
        """
        from dp_accounting import dp_event

        if strategy is not None:
            from jaxdp.privacy.participation import cyclic_poisson_event

            return cyclic_poisson_event(
                _multiplier(inner_event),
                cycle_length=self.cycle_length,
                sampling_probability=self.sampling_probability,
                steps=steps,
                strategy=strategy,
            )
        # A record is in one step of each round of b steps, so that the steps of a round compose in
        # parallel.
        rounds = -(-steps // self.cycle_length)
        return dp_event.SelfComposedDpEvent(self.event(inner_event), rounds)

    def check_strategy(self, strategy: np.ndarray) -> None:
        """Raises ValueError for a strategy, [T] or [T, T], without a proof for this sampling."""
        from jaxdp.privacy.participation import checked_strategy

        checked_strategy(strategy, len(strategy), cycle_length=self.cycle_length)

    def check_chunks(self, steps: int, every: int) -> None:
        """Raises ValueError if steps that are divided into chunks cost more than together."""
        if every < steps and every % self.cycle_length:
            raise ValueError(
                f"checkpoint_every must be a multiple of the sampler's cycle_length="
                f"{self.cycle_length}, or at least steps={steps}, got {every}. A chunk pays for "
                "whole cycles."
            )

    def words(self, units: str) -> str:
        """Returns the sampling in words for a report."""
        return (
            f"cyclic Poisson: each of {self.num_examples} {units} is in one of "
            f"{self.cycle_length} groups, and in every step of its group with probability "
            f"{self.sampling_probability:.6g}, {self.expected_batch_size:g} on average"
        )


def _multiplier(inner_event: "dp_event.DpEvent") -> float:
    """Returns the noise multiplier of a step, or raises ValueError for other noise."""
    from jaxdp.privacy.events import GaussianDpEvent, compose, composition

    inner = compose(composition(inner_event))
    if not isinstance(inner, GaussianDpEvent):
        raise ValueError(
            f"inner_event must be a GaussianDpEvent, got {type(inner).__name__}. Use "
            "PoissonSampler for other noise."
        )
    return float(inner.noise_multiplier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedSampler(_Sizes, _Pattern):
    """A pattern whose steps share their randomness, so that only all of them have an event."""

    num_examples: int
    steps: int
    draws: int = 2**18
    truncated_batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_examples", self.num_examples, 1)
        check_count("steps", self.steps, 1)
        check_count("draws", self.draws, 1)
        if self.truncated_batch_size is not None:
            check_count("truncated_batch_size", self.truncated_batch_size, 1)

    @property
    def largest_batch(self) -> int:
        """The size that no batch exceeds."""
        return min(self.num_examples, self.truncated_batch_size or self.num_examples)

    @property
    def truncation_probability(self) -> float:
        """A bound on the probability that one of the batches is truncated, in [0, 1].

        It is a function of public numbers. The size of each batch is binomial, so the bound is the
        sum of its upper tails (arXiv 2411.04205). It holds for data with one record more, too.
        """
        if self.truncated_batch_size is None:
            return 0.0
        share = self.expected_batch_size / self.num_examples
        # n + 1, since a neighbouring data set may have one record more.
        tail = stats.binom.sf(self.truncated_batch_size, self.num_examples + 1, share)
        return min(1.0, self._batches * float(tail) * _ROUNDED_UP)

    @property
    def _batches(self) -> int:
        """The number of batches whose sizes may differ."""
        return self.steps

    def truncated(self, batch: np.ndarray, step: int) -> np.ndarray:
        """Returns a batch, or a uniform part of it of the largest size, ascending.

        Args:
          batch: The example indices of a step without truncation, int64 [B].
          step: The number of the step, from which the choice follows.
        """
        if len(batch) <= self.largest_batch:
            return batch
        rng = _generator(self.seed, step, _TRUNCATION)
        return np.sort(rng.choice(batch, self.largest_batch, replace=False))

    def run_event(
        self,
        inner_event: "dp_event.DpEvent",
        steps: int,
        *,
        strategy: np.ndarray | None = None,
        seed: bytes | None = None,
    ) -> "dp_event.DpEvent":
        """Returns the privacy event of all steps, from new draws.

        It is that of the pattern in `jaxdp.privacy.participation`, with the price of truncation. A
        seed, 16 bytes, repeats draws.

        Raises:
          ValueError: `steps` are others than the sampler's. inner_event is not Gaussian. The
            strategy of correlated noise has no proof for this sampling (`check_strategy`).
        """
        from jaxdp.privacy.participation import truncated_event

        if steps != self.steps:
            raise ValueError(
                f"steps must be {self.steps}, the steps of the sampler, got {steps}. The event is "
                "that of exactly these steps. Make another sampler for another run."
            )
        untruncated = self._untruncated_event(
            _multiplier(inner_event),
            steps=steps,
            strategy=strategy,
            draws=self.draws,
            seed=seed,
        )
        return truncated_event(untruncated, self.truncation_probability)

    def _untruncated_event(self, noise_multiplier: float, **terms: Any) -> "dp_event.DpEvent":
        """Returns the event of all steps if no batch is truncated."""
        raise NotImplementedError

    def _words(self, text: str) -> str:
        """Returns the sampling in words with its truncation."""
        if self.truncated_batch_size is None:
            return text
        return f"{text}, and at most {self.truncated_batch_size}"

    def event(self, inner_event: object) -> NoReturn:
        """Raises ValueError: a step has no event of its own."""
        raise ValueError(
            f"{type(self).__name__} has no event of a single step: its {self.steps} steps share "
            "who takes part. Use run_event(inner_event, steps), or PoissonSampler."
        )

    def _check_step(self, step: int) -> None:
        check_count("step", step, 0)
        if step >= self.steps:
            raise ValueError(
                f"step must be below {self.steps}, the steps of the sampler, got {step}. The event "
                "does not cover it."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BallsInBinsSampler(SimulatedSampler):
    """Random bins that are used in turn, the same bins in every epoch.

        sampler = jaxdp.data.BallsInBinsSampler(num_examples=len(source), bins=20, steps=400)

    Formal guarantees:
      - A record is in one bin j, uniform and independent of the others, and in the steps j, j + b,
        ... and no others.
      - `run_event` is the event of all steps, for "add_remove" and "zero_out". It is simulated, and
        holds the probability that it is wrong, which is a part of delta.
      - Seed, bins and batches are private values.

    Attributes:
      num_examples: n, at least 1. Public.
      bins: b, at least 1.
      steps: T, all steps of the run.
      draws: The draws of each estimate of delta. More take longer and bound delta more tightly.
      truncated_batch_size: As in `BMinSepSampler`.
      seed: 16 secret bytes, as in `PoissonSampler`.

    Raises:
      TypeError, ValueError: A value is not as above.
    """

    bins: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("bins", self.bins, 1)

    @property
    def sampling_probability(self) -> float:
        """The probability 1 / b that a record is in a step."""
        return 1 / self.bins

    @property
    def expected_batch_size(self) -> float:
        """The public number n / b, the divisor of the clipped sum."""
        return self.num_examples / self.bins

    @property
    def _batches(self) -> int:
        """Every epoch has the same bins."""
        return min(self.bins, self.steps)

    @functools.cached_property
    def _members(self) -> list[np.ndarray]:
        return _groups(self.num_examples, self.bins, self.seed)

    def batch(self, step: int) -> np.ndarray:
        """Returns the example indices of a step, int64 [B], ascending. B is random and may be 0."""
        self._check_step(step)
        return self.truncated(self._members[step % self.bins], step)

    @property
    def least_separation(self) -> int:
        """b, `bins`."""
        return self.bins

    def _untruncated_event(self, noise_multiplier: float, **terms: Any) -> "dp_event.DpEvent":
        from jaxdp.privacy.participation import balls_in_bins_event

        return balls_in_bins_event(noise_multiplier, bins=self.bins, **terms)

    def check_strategy(self, strategy: np.ndarray) -> None:
        """Raises ValueError for a strategy, [T] or [T, T], without a proof for this sampling."""
        from jaxdp.privacy.participation import checked_strategy

        checked_strategy(strategy, self.steps, no_negative=True)

    def words(self, units: str) -> str:
        """Returns the sampling in words for a report."""
        return self._words(
            f"balls in bins: each of {self.num_examples} {units} is in one of {self.bins} bins, "
            f"and in every step of its bin, {self.expected_batch_size:g} on average"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BMinSepSampler(SimulatedSampler):
    """Poisson sampling of records that took no part in the last b - 1 steps.

        sampler = jaxdp.data.BMinSepSampler(
            num_examples=len(source), sampling_probability=0.1, separation=8, steps=400
        )

    The first step finds records as any later one does: a random part of them has to wait.

    Formal guarantees:
      - The steps of a record are a stationary renewal process with gaps b - 1 + Geometric(p),
        independent of the other records.
      - `run_event` is the event of all steps, as for `BallsInBinsSampler`.
      - With `truncated_batch_size=m`, a batch larger than m is cut to a uniform part of size m.
        Records that are cut wait as those that take part. So the run is the one without truncation,
        unless a batch is larger. `truncation_probability` bounds the probability of that, and delta
        grows by (1 + e^epsilon) times the bound (`jaxdp.privacy.truncated_event`).
      - Seed, waits and batches are private values.

    Attributes:
      num_examples: n, at least 1. Public.
      sampling_probability: p in (0, 1], for a record that need not wait.
      separation: b, the least distance of two steps of a record, at least 1.
      steps: T, all steps of the run.
      draws: The draws of each estimate of delta. More take longer and bound delta more tightly.
      truncated_batch_size: The largest batch size m, or None. Six or seven standard deviations
        above the mean size cost next to nothing.
      seed: 16 secret bytes, as in `PoissonSampler`.

    Raises:
      TypeError, ValueError: A value is not as above.
    """

    sampling_probability: float
    separation: int
    draws: int = 2**15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(sampling_probability=self.sampling_probability)
        PoissonSampler(self.num_examples, self.sampling_probability)  # Raises for wrong values.
        check_count("separation", self.separation, 1)

    @property
    def expected_batch_size(self) -> float:
        """The public number n p / (1 + (b - 1) p), the divisor of the clipped sum."""
        waiting = (self.separation - 1) * self.sampling_probability
        return self.num_examples * self.sampling_probability / (1 + waiting)

    @functools.cached_property
    def _past(self) -> "_Renewals":
        return _Renewals(self)

    def batch(self, step: int) -> np.ndarray:
        """Returns the example indices of a step, int64 [B], ascending. B is random and may be 0.

        The first call draws all earlier steps.
        """
        self._check_step(step)
        return self.truncated(self._past.batch(step), step)

    @property
    def least_separation(self) -> int:
        """b, `separation`."""
        return self.separation

    def _untruncated_event(self, noise_multiplier: float, **terms: Any) -> "dp_event.DpEvent":
        from jaxdp.privacy.participation import b_min_sep_event

        return b_min_sep_event(
            noise_multiplier,
            separation=self.separation,
            sampling_probability=self.sampling_probability,
            **terms,
        )

    def check_strategy(self, strategy: np.ndarray) -> None:
        """Raises ValueError for a strategy, [T] or [T, T], without a proof for this sampling."""
        from jaxdp.privacy.participation import checked_strategy

        checked_strategy(strategy, self.steps, no_negative=True, separation=self.separation)

    def words(self, units: str) -> str:
        """Returns the sampling in words for a report."""
        return self._words(
            f"b-min-sep: each of {self.num_examples} {units} is in a step with probability "
            f"{self.sampling_probability:.6g}, unless it was in one of the "
            f"{self.separation - 1} steps before, {self.expected_batch_size:.6g} on average"
        )


class _Renewals:
    """The batches of b-min-sep sampling in order. Threads may ask for them in any order."""

    _KEPT = 64  # batches, more than threads read ahead

    def __init__(self, sampler: BMinSepSampler):
        self._poisson = PoissonSampler(
            sampler.num_examples, sampler.sampling_probability, seed=sampler.seed
        )
        self._separation = sampler.separation
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        p = self._poisson.sampling_probability
        # The stationary law of the wait of a record: free with weight 1, and 1, ..., b - 1 steps to
        # go with weight p each.
        waits = np.append(1.0, np.full(self._separation - 1, p))
        rng = _generator(self._poisson.seed, 0, _FIRST_FREE)
        count = self._poisson.num_examples
        self._free_from = rng.choice(self._separation, size=count, p=waits / waits.sum())
        self._next = 0
        self._batches: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> np.ndarray:
        with self._lock:
            if step < self._next and step not in self._batches:
                self._restart()  # a batch that is no longer kept: again from the seed
            while self._next <= step:
                self._advance()
            return self._batches[step]

    def _advance(self) -> None:
        step = self._next
        sampled = self._poisson.batch(step)
        batch = sampled[self._free_from[sampled] <= step]
        self._free_from[batch] = step + self._separation
        self._batches[step] = batch
        self._batches.pop(step - self._KEPT, None)
        self._next = step + 1
