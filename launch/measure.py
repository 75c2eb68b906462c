"""The measured cost of the programs of a `split_costs.Cost` on this device, beside the
counted cost (Table 2).
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxdp.data.storage import zeros_on_device

from . import plans
from .split_costs import Program

_REPEATS = 3


class Measured(NamedTuple):
    """What XLA reports about the compiled programs.

    Attributes:
      forward_flops, training_flops: Per image. They include softmax, GELU and LayerNorm, which are
          not products.
      peak_bytes: Arguments, results and temporary memory of the largest program, with Adam's state
          and one batch.
      seconds: The time of the whole adaptation: one call's time, times the number of calls. None
          unless timed.
    """

    forward_flops: float
    training_flops: float
    peak_bytes: int
    seconds: float | None


def measure(programs: Mapping[str, Program], images: int, *, timed: bool) -> Measured:
    """Compiles the client's programs for `images` images, reads XLA's analysis, and times them if
    `timed`.
    """
    flops, peak, seconds = {"training": 0.0}, 0, 0.0
    for name, program in programs.items():
        compiled: Any = jax.jit(program.run).lower(*program.args).compile()
        flops[name] = compiled.cost_analysis()["flops"] / program.images
        if not program.passes:
            continue
        peak = max(peak, plans.memory_of(compiled))
        if timed:
            seconds += (
                _seconds(compiled, program.args) * program.passes * -(-images // program.images)
            )
    return Measured(flops["forward"], flops["training"], peak, seconds if timed else None)


def _seconds(compiled: Callable[..., Any], shapes: tuple[Any, ...]) -> float:
    """Returns the median time of some calls, after a first call."""
    args, taken = zeros_on_device(shapes), []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
