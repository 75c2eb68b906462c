"""How a sampled batch is cut into physical batches. Nothing else decides it.

A sampled batch has any size. A compiled program takes one size. So a batch is cut into *physical
batches* of a few sizes, each a program of its own, and padded with masked rows. No example is left
out, and the sum over a batch does not depend on the cut, up to rounding:

    sizes = PhysicalSizes.choose(sampler, largest=300)
    for rows, mask in sizes.of_step(step).cut(sampler.batch(step)):
        ...     # rows int64 [m], mask bool [m], with m one of sizes.sizes

The cut is part of the token of a release. The same examples in other physical batches have other
last bits, and other random views, because the number of the physical batch is folded into the key.
Under an equal token that would put one noise on two sums, whose difference is not private. So
`token_text`, which holds the sizes and `FIRST_STEPS`, is hashed into the token with the programs
(`jaxdp.finetune.programs`). A changed cut is a changed token: an interrupted release is charged
again and draws fresh noise.

Other words mean other things. `truncated_batch_size` of `PoissonSampler` drops sampled examples and
changes the event. `microbatch_size` of `jaxdp.clipped_grad` and `jaxdp.pretrain` divides the work
inside one program. The chunks of `jaxdp.finetune.fit` are steps between two checkpoints.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxdp.data.fixed_order import FixedOrderSampler
from jaxdp.data.participation import BallsInBinsSampler, BMinSepSampler, CyclicPoissonSampler
from jaxdp.data.sampling import PoissonSampler
from jaxdp.files import check_count

Sampler = (
    PoissonSampler | CyclicPoissonSampler | BallsInBinsSampler | BMinSepSampler | FixedOrderSampler
)
"""A sampler of private training."""

# The first steps of a run take the largest size alone, so that the run starts before the programs
# of the other sizes are compiled.
FIRST_STEPS = 8
_MOST_SIZES = 3  # each is a compiled program
_CANDIDATES = 60
# The memory of the physical batches, where a device does not tell its own.
_MEMORY = 2**31


@dataclasses.dataclass(frozen=True)
class PhysicalSizes:
    """The sizes of physical batches, and the cut of a batch into them.

    The cut goes from the largest size to the smallest. At each size it either takes as many full
    physical batches as fit and leaves the rest to the smaller sizes, or it covers the rest with
    this size and pads the last one. Of these cuts it is the cheapest, where a physical batch of m
    rows costs m + `overhead`, padding included.

    Attributes:
      sizes: The sizes, descending, at least one.
      overhead: The cost of a call in rows.
    """

    sizes: tuple[int, ...]
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for size in self.sizes:
            check_count("physical_batch_size", size, 1)

    @classmethod
    def choose(cls, sampler: Sampler, *, largest: int, overhead: float = 0.0) -> "PhysicalSizes":
        """Returns up to three sizes with a small expected cost for the sampler's batches.

        None is above `largest`. `overhead` is at least 1 and a 64th of the expected batch size.
        With that, expected padding is below 3 % of the expected batch size where this is 32 or
        more. The choice depends on public numbers alone.
        """
        check_count("largest", largest, 1)
        batch_sizes, probabilities = _batch_sizes(sampler)
        overhead = max(1.0, sampler.expected_batch_size / 64, overhead)
        candidates = _candidates(sampler, largest, largest_batch=int(batch_sizes[-1]))

        def of(sizes: Sequence[int]) -> PhysicalSizes:
            return cls(tuple(sorted(set(sizes), reverse=True)), overhead)

        def cost(sizes: Sequence[int]) -> float:
            physical = of(sizes)
            prices = np.array(physical.sizes) + overhead
            return float(probabilities @ (physical._counts(batch_sizes).T @ prices))

        def with_best(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (*sizes, min(candidates, key=lambda size: cost((*sizes, size))))

        # Greedy: the best size is added, then each size is exchanged for a better one.
        best: tuple[int, ...] = ()
        for _ in range(_MOST_SIZES):
            best = with_best(best)
            for old in best:
                best = with_best(tuple(size for size in best if size != old))
        physical = of(best)
        calls = physical._counts(batch_sizes).sum(axis=1).tolist()
        used = [size for size, count in zip(physical.sizes, calls, strict=True) if count]
        return of(used or physical.sizes[-1:])

    @classmethod
    def for_memory(
        cls,
        sampler: Sampler,
        *,
        memory: int | None,
        row_bytes: "RowBytes",
        devices: int = 1,
        launches_cost: bool = False,
    ) -> "PhysicalSizes":
        """Returns sizes whose largest takes about a quarter of the memory of a device.

        Args:
          sampler: The sampler of the batches.
          memory: The bytes of one device. None, where it does not tell, counts as 8 GiB.
          row_bytes: The bytes of an example.
          devices: The number of devices that share a physical batch.
          launches_cost: Whether a call takes as long for a few rows as for many, as on a GPU.
        """
        limit = memory or 4 * _MEMORY  # a quarter is `_MEMORY`
        rows_per_device = int(limit / 4 / max(1, row_bytes.held))
        largest = max(1, rows_per_device) * devices
        overhead = row_bytes.overhead
        if launches_cost:
            overhead = max(overhead, min(largest, sampler.expected_batch_size) / 8)
        return cls.choose(sampler, largest=largest, overhead=overhead)

    def of_step(self, step: int) -> "PhysicalSizes":
        """Returns the sizes into which the batch of a numbered step is cut."""
        if step >= FIRST_STEPS:
            return self
        return dataclasses.replace(self, sizes=self.sizes[:1])

    def token_text(self) -> str:
        """Returns what the token of a release holds about the cut."""
        return f"first steps={FIRST_STEPS}\n{self}"

    def counts(self, size: int) -> dict[int, int]:
        """Returns {size: number of physical batches} for `size` examples, in all at least one."""
        counts = self._counts(np.array([size]))[:, 0]
        counts[-1] += not counts.any()  # an empty batch: one of padding
        return dict(zip(self.sizes, counts.tolist(), strict=True))

    def cut(self, indices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the physical batches of a batch, (indices int64 [m], mask bool [m]) each.

        Padding is as in `pad_to_physical`.
        """
        physical: list[tuple[np.ndarray, np.ndarray]] = []
        start = 0
        for size, count in self.counts(len(indices)).items():
            if not count:
                continue
            stop = start + count * size
            rows, masks = pad_to_physical(indices[start:stop], size)
            physical += zip(rows, masks, strict=True)
            start = stop
        return physical

    def _counts(self, batch_sizes: np.ndarray) -> np.ndarray:
        """Returns the number of calls of each size, [sizes, n], for the batch sizes [n]."""
        largest = self.sizes[0]
        padded = np.zeros((len(self.sizes), len(batch_sizes)), np.int64)
        padded[0] = -(-batch_sizes // largest)
        if len(self.sizes) == 1:
            return padded
        # The rest after full batches of the largest size goes into smaller ones, or is padded to
        # the largest size: what costs less.
        smaller = PhysicalSizes(self.sizes[1:], self.overhead)
        full = np.concatenate(
            [batch_sizes[None] // largest, smaller._counts(batch_sizes % largest)]
        )
        prices = np.array(self.sizes) + self.overhead
        return np.where(prices @ padded <= prices @ full, padded, full)


@dataclasses.dataclass(frozen=True)
class RowBytes:
    """The bytes of one example in a physical batch, from public shapes.

    Attributes:
      forward: The bytes of the values of its forward pass.
      gradient: The bytes of its gradient, as many as those of the trained parameters.
      gradients_held: The number of per-example gradients that the method holds for it.
    """

    forward: int
    gradient: int
    gradients_held: int

    @property
    def held(self) -> int:
        """The bytes that are held at once: the forward pass counts twice, for its cotangents."""
        return 2 * self.forward + self.gradients_held * self.gradient

    @property
    def overhead(self) -> float:
        """The cost of a call in rows, by the bytes that are moved.

        A call reads and writes arrays like the parameters four times, and a row its values some six
        times.
        """
        return 4 * self.gradient / max(1, 6 * self.forward)


def _batch_sizes(sampler: Sampler) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sizes of batches within five standard deviations, and their probabilities."""
    mean = sampler.expected_batch_size
    std = sampler.batch_size_std
    least = max(0, math.floor(mean - 5 * std))
    sizes = np.arange(least, math.ceil(mean + 5 * std) + 1)
    # The normal limit of the binomial. Its width is positive also where q = 1.
    deviations = (sizes - mean) / max(std, 0.1)
    weights = np.exp(-0.5 * np.square(deviations))
    return np.minimum(sizes, sampler.largest_batch), weights / weights.sum()


def _candidates(sampler: Sampler, largest: int, *, largest_batch: int) -> list[int]:
    """Returns the sizes among which `choose` searches, ascending."""
    top = max(1, min(largest, largest_batch))
    mean = sampler.expected_batch_size
    std = sampler.batch_size_std
    # A size near the mean takes most batches in one call. Spaced sizes take what is left.
    near_mean = mean + std * np.linspace(-4, 4, 2 * _CANDIDATES // 3)
    spaced = np.geomspace(1, top, _CANDIDATES)
    sizes = np.concatenate([spaced, near_mean, [largest]])
    sizes = np.clip(np.rint(sizes), 1, top)
    return sorted({int(size) for size in sizes})


def pad_to_physical(indices: np.ndarray, physical_batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a batch of any size into k >= 1 physical batches of one size.

    The last one is padded with index 0 and masked out.

    Args:
      indices: Integer [B], B >= 0.
      physical_batch_size: m >= 1, the number of examples that fit in memory, in every compiled
          step.

    Returns:
      (indices int64 [k, m], mask bool [k, m]) with k = max(1, ceil(B / m)). mask is False on
      padding, where the gradient of example 0 must not count.

    Raises:
      ValueError: indices is not one-dimensional.
      TypeError: indices are not integers.
    """
    check_count("physical_batch_size", physical_batch_size, 1)
    indices = np.asarray(indices)
    if indices.ndim != 1:
        raise ValueError(f"indices must be one-dimensional, got shape {indices.shape}.")
    if not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(f"indices must be integers, got dtype {indices.dtype}.")
    # An empty batch has one physical batch of padding, so that its step is the same program.
    count = max(1, -(-len(indices) // physical_batch_size))
    padded = np.zeros(count * physical_batch_size, np.int64)
    padded[: len(indices)] = indices
    mask = np.arange(len(padded)) < len(indices)
    shape = (count, physical_batch_size)
    return padded.reshape(shape), mask.reshape(shape)
