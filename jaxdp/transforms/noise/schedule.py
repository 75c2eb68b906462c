"""Public schedules of noise multipliers, evaluated by Python once for each step."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp.transforms.noise.scales import check_product, check_scale, range_of, real_number

# The charge of a schedule is a float64 and its noise a float32. This exceeds the rounding of the
# noise and its scale.
_ROUNDED_UP = 1 + 2.0**-22
# The steps that a compiled update knows of a schedule whose number of steps is not given.
_STEPS = 2**16
# The same for a schedule that calls JAX, where a step takes about half a millisecond.
_STEPS_OF_JAX = 2**12
# The steps whose multipliers are stored together.
_BLOCK_OF_STEPS = 2**10


class NoiseSchedule:
    """A public schedule of noise multipliers.

    Charge and noise of a step have one value, which Python computes once. A program that computed
    it too could differ: `1 + t**2 / 1e10` overflows int32 at t = 46,341.

    """

    def __init__(
        self,
        multiplier: Callable[[int], Any],
        clip_norm: float,
        steps: int | None,
    ):
        self._multiplier = multiplier
        self._clip_norm = clip_norm
        self._steps = steps
        # Evaluated multipliers by number of the block, NaN where not evaluated.
        self._blocks: dict[int, np.ndarray] = {}
        # Whether the schedule calls JAX, as far as it is evaluated.
        self._calls_jax = False

    @property
    def steps(self) -> int:
        """The number of steps that compiled programs know."""
        if self._steps is None:
            # The first step tells whether the schedule calls JAX.
            self._values(range(1))
            self._steps = _STEPS_OF_JAX if self._calls_jax else _STEPS
        return self._steps

    def planned(self, clip_norm: float, steps: int) -> "NoiseSchedule":
        """Returns a schedule for a clip norm and a number of steps.

        It shares the values that are known.
        """
        planned = NoiseSchedule(self._multiplier, clip_norm, steps)
        planned._blocks = self._blocks
        return planned

    def __call__(self, step: int) -> float:
        """Returns the multiplier of a step in float64.

        Raises ValueError for one that `privatize` refuses.
        """
        name = f"noise_multiplier({step})"
        (value,) = self._values(range(step, step + 1))
        multiplier = check_scale(name, float(value))
        check_product(name, multiplier, self._clip_norm)
        return multiplier

    def check(self) -> None:
        """Raises ValueError unless every step has noise."""
        # NaN compares as False.
        without_noise = ~(self._values(range(self.steps)) > 0)
        unusable = np.isnan(self.table()[:-1])  # the entry behind the plan is NaN
        refused = np.flatnonzero(without_noise | unusable)
        if not refused.size:
            return
        step = int(refused[0])
        # The call raises the error of an unusable multiplier.
        if self(step) == 0:
            raise ValueError(
                f"noise_multiplier({step}) must be positive, got 0.0: a schedule has noise in "
                f"every step of its plan of {self.steps}. Plan fewer steps, or give "
                "noise_multiplier=0 for a run without privacy."
            )

    def std(self, step: int) -> np.float32:
        """Returns the standard deviation of the noise of a step, a little more than the charge."""
        return np.float32(self(step) * self._clip_norm * _ROUNDED_UP)

    def table(self) -> np.ndarray:
        """Returns the standard deviations of all steps, float32 [steps + 1].

        The last one is NaN, and so are those that `privatize` refuses.
        """
        multipliers = np.append(self._values(range(self.steps)), math.nan)
        low, high = range_of(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            stds = multipliers * self._clip_norm
            outside_of_float32 = ~((stds >= low) & (stds <= high))
            # A product of zero is no noise, or noise on a constant sum, and not an underflow.
            lost = (multipliers != 0) & (self._clip_norm != 0) & outside_of_float32
            usable = (multipliers >= 0) & np.isfinite(multipliers) & ~lost
            return np.where(usable, stds * _ROUNDED_UP, math.nan).astype(np.float32)

    def _values(self, steps: range) -> np.ndarray:
        """Returns the multipliers of steps in float64, as the schedule gives them."""
        first_block = steps.start // _BLOCK_OF_STEPS
        last_block = (steps.stop - 1) // _BLOCK_OF_STEPS
        blocks = [self._evaluated(i, steps) for i in range(first_block, last_block + 1)]
        start = steps.start % _BLOCK_OF_STEPS
        return np.concatenate(blocks)[start : start + len(steps)]

    def _evaluated(self, number: int, steps: range) -> np.ndarray:
        """Returns a block of multipliers, in which those of `steps` are evaluated."""
        if number not in self._blocks:
            self._blocks[number] = np.full(_BLOCK_OF_STEPS, math.nan)
        block = self._blocks[number]
        first = number * _BLOCK_OF_STEPS
        start = max(0, steps.start - first)
        stop = min(_BLOCK_OF_STEPS, steps.stop - first)
        missing = start + np.flatnonzero(np.isnan(block[start:stop]))
        if not missing.size:
            return block
        # A schedule may call JAX, and an update may be traced.
        with jax.ensure_compile_time_eval():
            for place in missing.tolist():
                step = first + place
                value = self._multiplier(step)
                self._calls_jax |= isinstance(value, jax.Array)
                block[place] = real_number(f"noise_multiplier({step})", value)
        return block
