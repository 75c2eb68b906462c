"""When a warm-up ends and when a run stops, by what the finished steps measured.

Wang et al. 2024 warm up until "the accuracy meets the targeted benchmark" (section 4.3), and train
for K steps or "until the parameter loss stabilizes" (section 4.4).

The rules read the rows of metrics.jsonl alone. A resumed run reads them again, so that it decides
as a run that was not interrupted.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxdp.pretrain.batches import Batches

if TYPE_CHECKING:
    from jaxdp.pretrain.loop import RunOptions


class Target(NamedTuple):
    """The end of the warm-up: a number of `evaluate` is at least `value`.

    Attributes:
      name: The name of the number, such as "accuracy".
      value: The target.
    """

    name: str
    value: float


class Stable(NamedTuple):
    """The end of a run: the loss no longer falls.

    The losses of the steps after the warm-up are divided into windows. The run stops after a window
    whose mean loss is less than `tolerance` times the mean of the window before below that mean.

    Attributes:
      steps: The number of steps in a window.
      tolerance: The least relative fall of the mean loss with which the run goes on.
    """

    steps: int
    tolerance: float


class Progress:
    """The warm-up and the end of one run.

    Attributes:
      plan: The batches of the next step. There is no ascent before the end of the warm-up.
      first_ascent: The number of finished steps at the end of the warm-up, None before it.
      stopped: Whether the loss is stable.
    """

    def __init__(self, plan: Batches, options: "RunOptions"):
        """Raises ValueError if warmup_until or stop_when of the options is out of range."""
        until, stable = options.warmup_until, options.stop_when
        if until is not None and options.evaluate is None:
            raise ValueError(
                f"warmup_until={until} needs `evaluate`, which returns its number, got None."
            )
        if stable is not None and not (stable.steps >= 1 and 0 <= stable.tolerance < 1):
            raise ValueError(
                f"stop_when must have steps of at least 1 and a tolerance in [0, 1), got {stable}."
            )
        self.stopped = False
        self._until = until
        self._stable = stable
        self._evaluate_every = options.periods()["evaluate_every"]
        self._least = plan.warmup_steps
        self._window: list[float] = []
        self._mean: float | None = None
        self.first_ascent = plan.warmup_steps if until is None else None
        warm = plan.warmup_steps if until is None else plan.steps
        self.plan = dataclasses.replace(plan, warmup_steps=warm)

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must share. A run without rules has nothing more than its plan."""
        identity: dict[str, Any] = {}
        if self._until is not None:
            identity["warmup_until"] = [*self._until, self._evaluate_every]
        if self._stable is not None:
            identity["stop_when"] = list(self._stable)
        return identity

    def decides(self, done: int) -> bool:
        """Returns whether the row of step `done` may stop the run."""
        if self._stable is None or self.first_ascent is None or done <= self.first_ascent:
            return False
        return (done - self.first_ascent) % self._stable.steps == 0

    def trained(self, done: int, loss: float) -> None:
        """Notes the loss of step `done`. Steps come in order, each once."""
        if self._stable is None or self.first_ascent is None or done <= self.first_ascent:
            return
        self._window.append(loss)
        if not self.decides(done):
            return
        mean, before = statistics.fmean(self._window), self._mean
        self._window.clear()
        self._mean = mean
        # A loss that is NaN compares as False, so that a diverged run does not look stable.
        self.stopped = before is not None and before - mean < self._stable.tolerance * abs(before)

    def evaluated(self, done: int, numbers: Mapping[str, float]) -> None:
        """Notes what `evaluate` returned after step `done`.

        Raises:
          ValueError: `numbers` lacks the number of the target.
        """
        if self._until is None or self.first_ascent is not None:
            return
        if self._until.name not in numbers:
            raise ValueError(
                f"evaluate must return {self._until.name!r}, which warmup_until names, got "
                f"{sorted(numbers)}."
            )
        # The last step of a shorter run is evaluated too. A longer run would not know that number.
        due = done >= self._least and done % self._evaluate_every == 0
        if due and numbers[self._until.name] >= self._until.value:
            self.first_ascent = done
            self.plan = dataclasses.replace(self.plan, warmup_steps=done)

    def replay(self, rows: Iterable[Mapping[str, float]], done: int) -> None:
        """Notes the rows of the `done` steps that an earlier call finished.

        Raises:
          ValueError: A row is missing.
        """
        rows = list(rows)
        if [row["step"] for row in rows] != list(range(1, done + 1)):
            raise ValueError(
                f"metrics.jsonl must have the rows of the {done} finished steps, by which "
                f"warmup_until and stop_when decide, got {len(rows)} rows. Use a new workdir."
            )
        for row in rows:
            self.trained(int(row["step"]), row["loss"])
            if self._until is not None and self._until.name in row:
                self.evaluated(int(row["step"]), row)
