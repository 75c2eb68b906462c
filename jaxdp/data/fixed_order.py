"""The same batches in every epoch: an example takes part once per epoch, always at its own step.

It is the sampling of matrix factorisation without amplification ("fixed epoch order" of
Choquette-Choo et al. 2023, "Multi-epoch matrix factorization mechanisms").
"""

import dataclasses
import functools
from typing import NoReturn

import numpy as np

from jaxdp.data.sampling import _check_batches, _generator
from jaxdp.files import check_count

_FIXED_ORDER = 8  # the upper-most counter word, beside those of `jaxdp.data.sampling`


@dataclasses.dataclass(frozen=True)
class FixedOrderSampler:
    """Epochs of equal batches in one order, for `noise=jaxdp.correlated(...)`.

        sampler = jaxdp.data.FixedOrderSampler(len(source), 64)
        sampler.participation(4 * sampler.steps_per_epoch)      # (4, sampler.steps_per_epoch)

    Formal guarantees:
      - An example is in steps s, s + b, s + 2 b, ... of a run and in no other, with
        b = `steps_per_epoch`. `participation` counts them.
      - s depends on the seed and the index of the example, never on contents. The order is a
        permutation of `num_examples` slots. A data set with one example less has an empty slot,
        and the steps of all others stay. So the participation holds for "zero_out", and for
        "add_remove" with the number of slots public.
      - Nothing is amplified: the event of a run does not rest on a secret order. So the seed is
        public, and it is in `repr`.

    Attributes:
      num_examples: n, at least 1. Public.
      batch_size: The size of batches, in [1, n]. If it does not divide n, an epoch has the next
        number of batches, of sizes that differ by at most one.
      seed: 16 public bytes, which must not depend on the data. A run that goes on needs the same
        seed.

    Raises:
      TypeError, ValueError: A value is not as above.
    """

    num_examples: int
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: bytes = bytes(16)

    def __post_init__(self) -> None:
        _check_batches(self.num_examples, self.batch_size, self.seed)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch, the separation of participations."""
        return -(-self.num_examples // self.batch_size)

    @property
    def expected_batch_size(self) -> float:
        """The public mean size of a batch, the divisor of the clipped sum."""
        return self.num_examples / self.steps_per_epoch

    @property
    def batch_size_std(self) -> float:
        """The standard deviation of the size of a batch, for the choice of physical batches."""
        return 0.0

    @property
    def largest_batch(self) -> int:
        """The size that no batch exceeds."""
        return self.batch_size

    def participation(self, steps: int) -> tuple[int, int]:
        """Returns the most steps among `steps` that an example is in, and their separation."""
        return -(-steps // self.steps_per_epoch), self.steps_per_epoch

    def of_run(self, seed: bytes) -> "FixedOrderSampler":
        """Returns the sampler of a run with a secret seed, which is this one: the order is public.

        All chunks of a run have one order.
        """
        return self

    def batch(self, step: int) -> np.ndarray:
        """Returns the example indices of a step, int64 [B], ascending.

        B is `batch_size` or, where that does not divide `num_examples`, at most so many.
        """
        check_count("step", step, 0)
        order = _order(self.num_examples, self.seed)
        place = step % self.steps_per_epoch
        # Batch i has slots i, i + b, ... of the order.
        return np.sort(order[place :: self.steps_per_epoch].astype(np.int64))

    def words(self, units: str) -> str:
        """Returns the sampling in words for a report."""
        return (
            f"fixed order: each of {self.num_examples} {units} is in one of "
            f"{self.steps_per_epoch} steps, the same in every epoch"
        )

    def event(self, inner_event: object) -> NoReturn:
        """Raises ValueError: a step has no event of its own."""
        raise ValueError(
            "FixedOrderSampler has no event of a single step: an example is in the same steps of "
            "every epoch, so nothing is amplified. Give the trainer noise=jaxdp.correlated(...), "
            "whose event is that of the whole run, or use PoissonSampler."
        )

    def run_event(self, inner_event: object, steps: int) -> NoReturn:
        """Raises ValueError as `event`: the event of steps is that of their correlated noise."""
        self.event(inner_event)

    def check_strategy(self, strategy: object) -> None:
        """Does nothing. The sensitivity of any strategy covers this order."""


@functools.lru_cache(maxsize=8)
def _order(num_examples: int, seed: bytes) -> np.ndarray:
    """Returns the examples by slot, [num_examples], which every step of a run reads."""
    return _generator(seed, 0, _FIXED_ORDER).permutation(num_examples)
