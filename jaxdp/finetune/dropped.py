"""Examples whose loss or gradient is NaN or infinite, before a run spends anything on them.

Such an example contributes zero (`jaxdp.clipped_grad`), and a step costs the same with it. So a run
looks at its first examples with its first parameters, before anything is released. The counts are
private: they are in warnings and errors for the owner of the data, and in no file of the run.
"""

import math
import warnings
from typing import Any

import numpy as np

from jaxdp.data import Source
from jaxdp.finetune.step import TrainState
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.transforms.not_finite import (
    FIRST_EXAMPLES,
    LARGEST_SHARE,
    LEAST_EXAMPLES,
    PRIVATE,
)

_REMEDY = (
    "Each of them contributes nothing, and a step costs the same. jaxdp.data.count_not_finite says "
    "which columns hold NaN or an infinity. If none does, the loss makes them."
)


def check_dropped(
    trainer: PrivateTrainer, state: TrainState, source: Source, *, allow_nonfinite: bool
) -> None:
    """Looks at the first examples of a source with the parameters of a state.

    It takes 100 of them, or a physical batch if that is more, and at most 1000. The program is that
    of the first step, so nothing else is compiled. Every process of the mesh calls it.

    Raises:
      ValueError: More than a tenth of them would be dropped, and `allow_nonfinite` is False. Or all
          of them would be.

    Warns:
      UserWarning: Some would be dropped.
    """
    # Whole physical batches, so that the look compiles no program but those of the run.
    size = trainer.physical(state, source).sizes[0]
    looked_at = size * math.ceil(LEAST_EXAMPLES / size)
    count = min(len(source), FIRST_EXAMPLES, looked_at)
    if not count:
        return
    state = trainer.refreshed(state)  # GEP has no basis before
    dropped = 0
    for physical in trainer.load(state, source, np.arange(count), step=0):
        sums: Any = trainer.part_sum(state, *physical)
        flags = sums.dropped
        if flags.is_fully_addressable:  # Otherwise each process holds those of its examples.
            flags = np.asarray(flags)  # A sum on the device compiles a program for each size.
        dropped += int(flags.sum())
    if not dropped:
        return
    if dropped == count:
        raise ValueError(
            f"loss_fn has no finite value and gradient for any of the first {count} examples of "
            f"source, with the first parameters. Nothing can be learned, and nothing is spent. "
            f"Guard logarithms, roots and divisions. {_REMEDY} {PRIVATE}"
        )
    what = (
        f"loss_fn has a NaN or infinite value or gradient for {dropped} of the first {count} "
        f"examples of source. {_REMEDY}"
    )
    if dropped > LARGEST_SHARE * count and not allow_nonfinite:
        raise ValueError(
            f"{what} A run starts with more than a tenth of them only with allow_nonfinite=True. "
            f"Nothing is spent. {PRIVATE}"
        )
    warnings.warn(f"{what} {PRIVATE}", stacklevel=2)
