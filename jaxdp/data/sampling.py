"""The examples of a step's batch: Poisson sampling, or shuffled epochs for public data.

Samplers are stateless. `sampler.batch(step)` depends on the 128-bit seed and the step only, so a
run that crashed regenerates any batch. The seed is the key of NumPy's Philox generator and the step
is the upper half of its counter. The streams of different steps are therefore disjoint.
"""

import dataclasses
import math
import secrets
from typing import TYPE_CHECKING

import numpy as np

from jaxdp.files import check_count, check_numbers

if TYPE_CHECKING:
    from dp_accounting import dp_event

_SEED_BYTES = 16
# The upper-most counter word of each sampler separates the streams of one seed.
_POISSON, _SHUFFLE = 1, 2


def _generator(seed: bytes, step: int, purpose: int) -> np.random.Generator:
    check_count("step", step, 0)
    if step >= 2**64:
        raise ValueError(f"step must be below 2**64, got {step}.")
    # The two lower words count the blocks of one stream.
    counter = np.array([0, 0, step, purpose], np.uint64)
    return np.random.Generator(
        np.random.Philox(key=int.from_bytes(seed, "little"), counter=counter)
    )


def _new_seed() -> bytes:
    return secrets.token_bytes(_SEED_BYTES)


def _check_seed(seed: bytes) -> None:
    rule = f"seed must be {_SEED_BYTES} bytes such as secrets.token_bytes(16)"
    if not isinstance(seed, bytes):
        raise TypeError(f"{rule}, got {type(seed).__name__}.")
    if len(seed) != _SEED_BYTES:
        raise ValueError(f"{rule}, got {len(seed)}.")


def _check_batches(num_examples: int, batch_size: int, seed: bytes) -> None:
    """Raises for a sampler of equal batches whose numbers or seed are wrong."""
    check_count("num_examples", num_examples, 1)
    check_count("batch_size", batch_size, 1)
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size must be at most num_examples={num_examples}, got {batch_size}."
        )
    _check_seed(seed)


@dataclasses.dataclass(frozen=True)
class PoissonSampler:
    """Poisson sampling: each example takes part in each step independently, with one probability.

    Batches are drawn by `jax_privacy.batch_selection.CyclicPoissonSampling` with one cycle.

    Formal guarantees:
      - Without truncation, the indicators "example i is in the batch of step t" are independent
        Bernoulli(q) over all (i, t), up to the quality of the Philox generator (statistically
        strong, not a cryptographic cipher). `PoissonSampledDpEvent` assumes this sampling. `event`
        derives that event from this object.
      - With `truncated_batch_size=m`, a batch larger than m is cut to a uniformly random subset of
        size m. That is NOT Poisson sampling. Its event is `TruncatedSubsampledGaussianDpEvent`
        (arXiv:2508.15089).
      - With `records_per_owner=k`, examples are records with several owners, of whom each has at
        most k (`jaxdp.data.by_owners`). The event is then `OwnedGaussianDpEvent(q, sigma, k)`, for
        all records of one owner, with the adjacency "zero_out".
      - Amplification holds only while the batches stay secret. The seed and the index arrays with
        their length are private values. The seed is not in `repr`, and neither may appear in logs
        or metrics.
      - `num_examples` is public by declaration. Under "add_remove" the real number of records is
        private. The user who fixes q and the divisor q * num_examples declares this number public.

    Attributes:
      num_examples: n, at least 1.
      sampling_probability: q in (0, 1].
      seed: 16 secret bytes. The default is OS entropy. A resumed run passes its own seed. Two runs
        that share a seed draw the same batches.
      truncated_batch_size: The largest batch size, or None.
      records_per_owner: The most examples of one owner, at least 1. None, the default, is for
        examples that are the units of privacy.

    Raises:
      TypeError, ValueError: A value is not as above.
    """

    num_examples: int
    sampling_probability: float
    _: dataclasses.KW_ONLY
    seed: bytes = dataclasses.field(default_factory=_new_seed, repr=False)
    truncated_batch_size: int | None = None
    # Not in the text of a sampler, which is a fact of releases of earlier versions.
    records_per_owner: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("num_examples", self.num_examples, 1)
        check_numbers(sampling_probability=self.sampling_probability)
        if not 0 < self.sampling_probability <= 1:
            raise ValueError(
                f"sampling_probability must be in (0, 1], got {self.sampling_probability}."
            )
        _check_seed(self.seed)
        if self.truncated_batch_size is not None:
            check_count("truncated_batch_size", self.truncated_batch_size, 1)
        if self.records_per_owner is None:
            return
        check_count("records_per_owner", self.records_per_owner, 1)
        if self.truncated_batch_size is not None:
            raise ValueError(
                "truncated_batch_size must be None with records_per_owner, got "
                f"{self.truncated_batch_size}. No accounting is known for both."
            )

    @property
    def expected_batch_size(self) -> float:
        """The public number q * n, the divisor of the clipped sum, with or without truncation."""
        return self.sampling_probability * self.num_examples

    @property
    def batch_size_std(self) -> float:
        """The standard deviation of the size of a batch, without truncation."""
        return math.sqrt(self.expected_batch_size * (1 - self.sampling_probability))

    @property
    def largest_batch(self) -> int:
        """The size that no batch exceeds."""
        return min(self.num_examples, self.truncated_batch_size or self.num_examples)

    def of_run(self, seed: bytes) -> "PoissonSampler":
        """Returns the sampler of a run with its own secret seed, 16 bytes."""
        return dataclasses.replace(self, seed=seed)

    def batch(self, step: int) -> np.ndarray:
        """Returns the example indices of a step, int64 [B], ascending. B is random and may be 0.

        Args:
          step: In [0, 2**64). The same step gives the same batch under one version of NumPy and
            jax-privacy. Neither promises its sampling stream across versions.
        """
        from jax_privacy import batch_selection

        # One step at a time, so that a batch depends on no step before it.
        strategy = batch_selection.CyclicPoissonSampling(
            sampling_prob=self.sampling_probability,
            iterations=1,
            truncated_batch_size=self.truncated_batch_size,
        )
        generator = _generator(self.seed, step, _POISSON)
        indices = next(iter(strategy.batch_iterator(self.num_examples, rng=generator)))
        return np.sort(indices.astype(np.int64))

    def event(self, inner_event: "dp_event.DpEvent") -> "dp_event.DpEvent":
        """Returns the privacy event of one step.

        `inner_event` is that of the mechanism on the sampled batch. The result is
        `PoissonSampledDpEvent(q, inner_event)`, or with truncation a
        `TruncatedSubsampledGaussianDpEvent`. With `records_per_owner` it is an
        `OwnedGaussianDpEvent`.

        Raises:
          TypeError: inner_event is not a DpEvent.
          ValueError: The sampler truncates or has several records of an owner, and inner_event is
              not a GaussianDpEvent. No accounting is known.
        """
        from dp_accounting import dp_event

        from jaxdp.privacy.events import OwnedGaussianDpEvent

        if not isinstance(inner_event, dp_event.DpEvent):
            raise TypeError(
                f"inner_event must be a dp_accounting DpEvent, got {type(inner_event).__name__}."
            )
        option = "truncated_batch_size"
        if self.records_per_owner is not None:
            option = "records_per_owner"
        elif self.truncated_batch_size is None:
            return dp_event.PoissonSampledDpEvent(self.sampling_probability, inner_event)
        if not isinstance(inner_event, dp_event.GaussianDpEvent):
            raise ValueError(
                f"inner_event must be a GaussianDpEvent with {option}, got "
                f"{type(inner_event).__name__}. Set {option}=None."
            )
        if self.records_per_owner is not None:
            return OwnedGaussianDpEvent(
                self.sampling_probability, inner_event.noise_multiplier, self.records_per_owner
            )
        return dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=self.num_examples,
            sampling_probability=self.sampling_probability,
            truncated_batch_size=self.truncated_batch_size,
            noise_multiplier=inner_event.noise_multiplier,
        )

    def run_event(self, inner_event: "dp_event.DpEvent", steps: int) -> "dp_event.DpEvent":
        """Returns the privacy event of consecutive steps: `steps` times `event`."""
        from dp_accounting import dp_event

        return dp_event.SelfComposedDpEvent(self.event(inner_event), steps)

    def words(self, units: str) -> str:
        """Returns the sampling in words for a report."""
        if self.records_per_owner:
            units = "records"
        text = (
            f"Poisson: each of {self.num_examples} {units} is in a step with probability "
            f"{self.sampling_probability:.6g}, {self.expected_batch_size:g} on average"
        )
        if self.truncated_batch_size is None:
            return text
        return f"{text}, and at most {self.truncated_batch_size}"


@dataclasses.dataclass(frozen=True)
class FixedBatchSampler:
    """Shuffled epochs of equal batches, for NON-PRIVATE training on public data.

    It has no `event`. Shuffled fixed-size batches are not Poisson sampling, and accounting for them
    as such understates epsilon (Chua et al., arXiv:2403.17673). Examples left over in an epoch are
    dropped. Every epoch has a new order.

    Attributes:
      num_examples: n, at least 1.
      batch_size: The size of every batch, in [1, n].
      seed: 16 bytes. The default is OS entropy.

    Raises:
      TypeError, ValueError: A value is not as above.
    """

    num_examples: int
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: bytes = dataclasses.field(default_factory=_new_seed, repr=False)

    def __post_init__(self) -> None:
        _check_batches(self.num_examples, self.batch_size, self.seed)

    @property
    def steps_per_epoch(self) -> int:
        """The number of whole batches in one epoch."""
        return self.num_examples // self.batch_size

    def batch(self, step: int) -> np.ndarray:
        """Returns the example indices of a step, int64 [batch_size], no repeats within an epoch."""
        check_count("step", step, 0)
        epoch, position = divmod(step, self.steps_per_epoch)
        order = _generator(self.seed, epoch, _SHUFFLE).permutation(self.num_examples)
        start = position * self.batch_size
        return order[start : start + self.batch_size].astype(np.int64)
