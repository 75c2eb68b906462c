"""The examples of each step of pre-training."""

import dataclasses

import numpy as np

from jaxdp.data import FixedBatchSampler
from jaxdp.files import check_count
from jaxdp.pretrain.dpadapter import SharpnessTrainer
from jaxdp.release import derive


@dataclasses.dataclass(frozen=True)
class Batches:
    """The examples of each step. The fields are arguments of `fit`.

    Raises:
      ValueError: A field is out of range.
    """

    num_examples: int
    steps: int
    perturbation_batch_size: int
    update_batch_size: int
    shared_batch: bool
    warmup_steps: int
    ascent_every: int
    seed: bytes = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not self.num_examples:
            raise ValueError("source has no examples. Give public examples to train on.")
        for name in ("perturbation_batch_size", "update_batch_size"):
            size = getattr(self, name)
            if not 1 <= size <= self.num_examples:
                raise ValueError(
                    f"{name} must be in 1..{self.num_examples}, the number of examples in source, "
                    f"got {size}."
                )
        if self.shared_batch and self.perturbation_batch_size != self.update_batch_size:
            raise ValueError(
                "perturbation_batch_size must equal update_batch_size with shared_batch=True, got "
                f"{self.perturbation_batch_size} and {self.update_batch_size}. shared_batch=False "
                "draws two batches."
            )
        check_count("steps", self.steps, 0)
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"warmup_steps must be in 0..{self.steps}, the number of steps, got "
                f"{self.warmup_steps}."
            )
        check_count("ascent_every", self.ascent_every, 1)
        if not isinstance(self.seed, bytes) or len(self.seed) != 16:
            raise ValueError(
                f"seed must be 16 bytes such as (0).to_bytes(16, 'little'), got {self.seed!r}."
            )

    def check_microbatches(self, trainer: SharpnessTrainer) -> None:
        """Raises ValueError if the trainer cannot cut the batches into microbatches."""
        trainer.microbatches("the perturbation batch", self.perturbation_batch_size)
        trainer.microbatches("the update batch", self.update_batch_size)

    @property
    def ascents(self) -> int:
        """The number of steps with a perturbation batch."""
        return len(range(self.warmup_steps, self.steps, self.ascent_every))

    def batches(self, step: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns the indices of B1, or None without an ascent, and of B2."""
        updating = self._sampler("update", self.update_batch_size).batch(step)
        if step < self.warmup_steps or (step - self.warmup_steps) % self.ascent_every:
            return None, updating
        if self.shared_batch:
            return updating, updating
        perturbing = self._sampler("perturbation", self.perturbation_batch_size).batch(step)
        return perturbing, updating

    def _sampler(self, purpose: str, batch_size: int) -> FixedBatchSampler:
        # The two purposes have seeds of their own, so that B1 and B2 are independent.
        seed = derive(self.seed, f"{purpose} batches")
        return FixedBatchSampler(self.num_examples, batch_size, seed=seed)
