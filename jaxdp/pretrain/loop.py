"""The pre-training loop with batches, warm-up and checkpoints, for PUBLIC data. It charges no
ledger.
"""

import collections
import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp import memory
from jaxdp.data import FixedBatchSampler, Source, check_batch, check_source
from jaxdp.files import read_json, write_json
from jaxdp.pretrain.dpadapter import SharpnessState, SharpnessTrainer
from jaxdp.release import Checkpoints, alone, derive, stream
from jaxdp.report import Callback, MetricsWriter, progress_bar
from jaxdp.transforms.parameters import check_finite


def fit(
    trainer: SharpnessTrainer,
    params: Any,
    source: Source,
    *,
    steps: int,
    perturbation_batch_size: int,
    update_batch_size: int,
    seed: bytes,
    shared_batch: bool = False,
    warmup_steps: int = 0,
    ascent_every: int = 1,
    augment: Callable[[jax.Array, Any], Any] | None = None,
    stats: Any = None,
    evaluate: Callable[[SharpnessState], dict[str, float]] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    workdir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1000,
    label: str = "pre-training",
    progress: bool = True,
) -> SharpnessState:
    """Runs `steps` steps of sharpness-aware training on PUBLIC data, or the rest of them after a
    crash.

    The random numbers of a step depend on the seed and the step only. On a deterministic device, a
    run that is killed and resumed ends bit-identical to a run that is not killed. A GPU is
    deterministic only on request.

    Args:
      trainer: The trainer from `dpadapter`, `sam` or `amp`.
      params: The first parameters. A resumed run does not read them.
      source: PUBLIC examples. Training on private examples is an uncharged release.
      steps: The total number of updates.
      perturbation_batch_size, update_batch_size: m1 and m2. B1 and B2 come from two independent
      shuffles of the source. seed: 16 bytes that fix the batches and the augmentation. The seed is
      not secret. shared_batch: Whether B1 is B2 with the same augmentation, as in SAM and AMP. Then
      m1 = m2. warmup_steps: The number of plain steps before the first ascent (step 1 of the
      paper). ascent_every: The number of steps between ascents. The steps between them keep the
      perturbation. augment: `augment(key, example) -> example`, jittable, one view per example and
      step. stats: The first running statistics, for a stateful trainer. evaluate: `evaluate(state)
      -> {name: number}`. evaluate_every: The number of steps between calls of `evaluate`, which
      also runs after the last step. The default is checkpoint_every. callbacks: Functions
      `callback(step, metrics, params)` that are called in order after every step, once its row is
      written. `metrics` are the numbers of the row. A callback that raises stops the run, which a
      later call with the same workdir resumes from the last checkpoint. workdir: The directory of
      checkpoints and metrics.jsonl. None keeps nothing and cannot resume. checkpoint_every: The
      number of steps between checkpoints. label, progress: The text of the progress bar
      (`jaxdp.report.progress_bar`), and whether to show it.

    Returns:
      The state after the last step.

    Raises:
      ValueError: An argument is out of range, a leaf of params holds NaN or an infinity, or the
        workdir holds another run. Nothing is computed.
    """
    check_source(source)
    plan = Batches(
        len(source),
        steps,
        perturbation_batch_size,
        update_batch_size,
        shared_batch,
        warmup_steps,
        ascent_every,
        seed,
    )
    every = {
        "checkpoint_every": checkpoint_every,
        "evaluate_every": checkpoint_every if evaluate_every is None else evaluate_every,
    }
    for name, count in every.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}.")
    plan.check_microbatches(trainer)
    trainer.check_devices("perturbation_batch_size", perturbation_batch_size)
    memory.make_room_for_programs()
    key = trainer.everywhere(stream(seed, "augmentation", impl="threefry2x32"))

    @jax.jit
    def views(key: jax.Array, step: jax.Array, number: jax.Array, examples: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(key, step), number)
        assert augment is not None
        return jax.vmap(augment)(jax.random.split(key, len(jax.tree.leaves(examples)[0])), examples)

    def batch(indices: np.ndarray, step: int, number: int) -> Any:
        examples = trainer.placed(check_batch(source.gather(indices)))
        if augment is None:
            return examples
        return views(key, *trainer.everywhere((np.uint32(step), np.uint32(number))), examples)

    with _Run(workdir, trainer, plan, source) as run:
        state, first = run.restore(trainer.init(params, stats))
        if first < steps:
            check_finite(state.params, argument="params of the workdir" if first else "params")
        rows = collections.deque[tuple[int, dict[str, Any]]]()
        with progress_bar(
            total=steps, initial=first, label=label, unit="step", show=progress
        ) as bar:
            for step in range(first, steps):
                perturbing, updating = plan.batches(step)
                second = batch(updating, step, 1)
                if perturbing is None or plan.shared_batch:
                    ascent = None if perturbing is None else second
                else:
                    ascent = batch(perturbing, step, 0)
                state, row = trainer.step(state, ascent, second)
                rows.append((step + 1, row))
                save, judge = (
                    (step + 1) % count == 0 or step + 1 == steps for count in every.values()
                )
                # Two steps may wait for the device. More batches could fill its memory.
                while len(rows) > (0 if save or judge or callbacks else 2):
                    number, waiting = rows.popleft()
                    numbers = {
                        name: float(value) for name, value in jax.device_get(waiting).items()
                    }
                    ended = time.time()
                    if evaluate is not None and judge and number == step + 1:
                        numbers |= evaluate(state)
                    run.write(number, ended, numbers)
                    for callback in callbacks:
                        callback(number, numbers, state.params)
                    bar.set_postfix(
                        {name: f"{value:.3f}" for name, value in numbers.items()}, refresh=False
                    )
                if save:
                    run.save(step + 1, state)
                bar.update()
    return state


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
        if self.steps < 0:
            raise ValueError(f"steps must be at least 0, got {self.steps}.")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"warmup_steps must be in 0..{self.steps}, the number of steps, got "
                f"{self.warmup_steps}."
            )
        if self.ascent_every < 1:
            raise ValueError(f"ascent_every must be at least 1, got {self.ascent_every}.")
        if not isinstance(self.seed, bytes) or len(self.seed) != 16:
            raise ValueError(
                f"seed must be 16 bytes such as (0).to_bytes(16, 'little'), got {self.seed!r}."
            )

    def check_microbatches(self, trainer: SharpnessTrainer) -> None:
        """Raises ValueError if the trainer cannot cut the batches into microbatches."""
        trainer.microbatches("the perturbation batch", self.perturbation_batch_size)
        trainer.microbatches("the update batch", self.update_batch_size)

    def batches(self, step: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns the indices of B1, or None without an ascent, and of B2."""
        updating = self._sampler("update", self.update_batch_size).batch(step)
        if step < self.warmup_steps or (step - self.warmup_steps) % self.ascent_every:
            return None, updating
        if self.shared_batch:
            return updating, updating
        return self._sampler("perturbation", self.perturbation_batch_size).batch(step), updating

    def _sampler(self, purpose: str, batch_size: int) -> FixedBatchSampler:
        seed = derive(self.seed, f"{purpose} batches")
        return FixedBatchSampler(self.num_examples, batch_size, seed=seed)


class _Run:
    """The identity, checkpoints and metrics of a run in its workdir, if there is one."""

    def __init__(
        self,
        workdir: str | os.PathLike[str] | None,
        trainer: SharpnessTrainer,
        plan: Batches,
        source: Source,
    ):
        self._checkpoints: Checkpoints | None = None
        self._opened = contextlib.ExitStack()
        if workdir is None:
            return
        with self._opened as opened:  # closes open files if the rest fails
            self._open(pathlib.Path(workdir), opened, trainer, plan, source)
            self._opened = opened.pop_all()

    def _open(
        self,
        root: pathlib.Path,
        opened: contextlib.ExitStack,
        trainer: SharpnessTrainer,
        plan: Batches,
        source: Source,
    ) -> None:
        opened.enter_context(alone(root))
        options = (
            "gamma",
            "ascent_rate",
            "ascent_steps",
            "ball",
            "rule",
            "microbatch_size",
            "stateful",
        )
        identity = {
            **{name: getattr(trainer, name) for name in options},
            **{name: value for name, value in vars(plan).items() if name not in ("seed", "steps")},
            "seed": plan.seed.hex(),
            "data": source.fingerprint,
        }
        path = root / "run.json"
        stored = (
            read_json(path, remedy="Restore it from a copy, or use a new workdir.")
            if path.exists()
            else identity
        )
        if stored != identity:
            names = sorted(name for name in identity if stored.get(name) != identity[name])
            raise ValueError(
                f"{root} holds a run with another {', '.join(names)}. Use a new workdir."
            )
        write_json(path, identity)
        self._steps = plan.steps
        self._metrics = opened.enter_context(MetricsWriter(root / "metrics.jsonl"))
        self._checkpoints = opened.enter_context(contextlib.closing(Checkpoints(root, keep=1)))

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.close()

    def restore(self, state: SharpnessState) -> tuple[SharpnessState, int]:
        """Returns the newest checkpoint, placed like `state`, or `state`, and the number of
        finished steps.
        """
        if self._checkpoints is None:
            return state, 0
        saved, step = self._checkpoints.restore(state._asdict())
        if step > self._steps:
            raise ValueError(
                f"workdir holds a run of {step} steps, more than steps={self._steps}. Use a new "
                "workdir."
            )
        self._metrics.truncate_after(step)  # The run repeats these steps.
        if not step:
            return state, 0
        return jax.device_put(
            SharpnessState(**saved), jax.tree.map(lambda x: x.sharding, state)
        ), step

    def write(self, step: int, ended: float, row: dict[str, float]) -> None:
        """Writes the metrics of a step that ended at a time."""
        if self._checkpoints is not None:
            self._metrics.write(step, ended, **row)

    def save(self, step: int, state: SharpnessState) -> None:
        """Makes the state after `step` steps durable."""
        if self._checkpoints is not None:
            self._checkpoints.save(step, state._asdict())
