"""The pre-training loop with batches, warm-up and checkpoints, for PUBLIC data.

It charges no ledger.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from jaxdp import memory
from jaxdp.data import FixedBatchSampler, Source, check_batch, check_source
from jaxdp.files import read_json, write_json
from jaxdp.pretrain.dpadapter import SharpnessState, SharpnessTrainer
from jaxdp.release import Checkpoints, alone, derive, stream
from jaxdp.report import Callback, MetricsWriter, progress_bar
from jaxdp.transforms.parameters import check_finite

# Steps that may wait for the device before their metrics are read. More batches could fill its
# memory.
_MOST_WAITING = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How `fit` plans, keeps, watches and shows a run.

    Attributes:
      shared_batch: Whether B1 is B2 with the same augmentation, as in SAM and AMP. Then m1 = m2.
      warmup_steps: The number of plain steps before the first ascent (step 1 of the paper).
      ascent_every: The number of steps between ascents. The steps between them keep the
        perturbation.
      augment: `augment(key, example) -> example`, jittable, one view per example and step.
      stats: The first running statistics, for a stateful trainer.
      evaluate: `evaluate(state) -> {name: number}`.
      evaluate_every: The number of steps between calls of `evaluate`, which also runs after the
        last step. The default is checkpoint_every.
      callbacks: Functions `callback(step, metrics, params)` that are called in order after every
        step, once its row is written. `metrics` are the numbers of the row. A callback that raises
        stops the run, which a later call with the same workdir resumes from the last checkpoint.
      workdir: The directory of checkpoints and metrics.jsonl. None keeps nothing and cannot resume.
      checkpoint_every: The number of steps between checkpoints.
      label: The text of the progress bar (`jaxdp.report.progress_bar`).
      progress: Whether to show the progress bar.
    """

    shared_batch: bool = False
    warmup_steps: int = 0
    ascent_every: int = 1
    augment: Callable[[jax.Array, Any], Any] | None = None
    stats: Any = None
    evaluate: Callable[[SharpnessState], dict[str, float]] | None = None
    evaluate_every: int | None = None
    callbacks: Sequence[Callback] = ()
    workdir: str | os.PathLike[str] | None = None
    checkpoint_every: int = 1000
    label: str = "pre-training"
    progress: bool = True

    def periods(self) -> dict[str, int]:
        """Returns the number of steps between checkpoints, and between calls of `evaluate`."""
        evaluate_every = self.evaluate_every
        if evaluate_every is None:
            evaluate_every = self.checkpoint_every
        return {"checkpoint_every": self.checkpoint_every, "evaluate_every": evaluate_every}


class RunKeywords(TypedDict, total=False):
    """The fields of `RunOptions` as keywords of `fit`, for editors and type checkers."""

    shared_batch: bool
    warmup_steps: int
    ascent_every: int
    augment: Callable[[jax.Array, Any], Any] | None
    stats: Any
    evaluate: Callable[[SharpnessState], dict[str, float]] | None
    evaluate_every: int | None
    callbacks: Sequence[Callback]
    workdir: str | os.PathLike[str] | None
    checkpoint_every: int
    label: str
    progress: bool


def fit(
    trainer: SharpnessTrainer,
    params: Any,
    source: Source,
    *,
    steps: int,
    perturbation_batch_size: int,
    update_batch_size: int,
    seed: bytes,
    options: RunOptions = RunOptions(),
    **keywords: Unpack[RunKeywords],
) -> SharpnessState:
    """Runs steps of sharpness-aware training on PUBLIC data, or the rest of them after a crash.

    The random numbers of a step depend on the seed and the step only. On a deterministic device, a
    run that is killed and resumed ends bit-identical to a run that is not killed. A GPU is
    deterministic only on request.

    Args:
      trainer: The trainer from `dpadapter`, `sam` or `amp`.
      params: The first parameters. A resumed run does not read them.
      source: PUBLIC examples. Training on private examples is an uncharged release.
      steps: The total number of updates.
      perturbation_batch_size, update_batch_size: m1 and m2. B1 and B2 come from two independent
        shuffles of the source.
      seed: 16 bytes that fix the batches and the augmentation. The seed is not secret.
      options: How the run is planned, kept, watched and shown.
      keywords: Fields of `RunOptions`, which replace those of `options`: shared_batch,
        warmup_steps, ascent_every, augment, stats, evaluate, evaluate_every, callbacks, workdir,
        checkpoint_every, label and progress.

    Returns:
      The state after the last step.

    Raises:
      ValueError: An argument is out of range, a leaf of params holds NaN or an infinity, or the
        workdir holds another run. Nothing is computed.
    """
    options = dataclasses.replace(options, **keywords)
    check_source(source)
    plan = Batches(
        num_examples=len(source),
        steps=steps,
        perturbation_batch_size=perturbation_batch_size,
        update_batch_size=update_batch_size,
        shared_batch=options.shared_batch,
        warmup_steps=options.warmup_steps,
        ascent_every=options.ascent_every,
        seed=seed,
    )
    for name, period in options.periods().items():
        if period < 1:
            raise ValueError(f"{name} must be at least 1, got {period}.")
    plan.check_microbatches(trainer)
    trainer.check_devices("perturbation_batch_size", perturbation_batch_size)
    memory.make_room_for_programs()
    # Without a workdir nothing is compared, and the source is not read for its fingerprint.
    identity = functools.partial(_identity, trainer, plan, source)
    with contextlib.closing(_Files(options.workdir, identity, steps)) as files:
        state, first = files.restore(trainer.init(params, options.stats))
        if first < steps:
            check_finite(state.params, argument="params of the workdir" if first else "params")
        return _Run(trainer, source, plan, options, files).train(state, first)


class _Run:
    """A run of `fit` once its files are open."""

    def __init__(
        self,
        trainer: SharpnessTrainer,
        source: Source,
        plan: "Batches",
        options: RunOptions,
        files: "_Files",
    ):
        self._trainer = trainer
        self._source = source
        self._plan = plan
        self._options = options
        self._files = files
        key = stream(plan.seed, "augmentation", impl="threefry2x32")
        self._key = trainer.everywhere(key)
        self._views = jax.jit(self._augmented)
        # The metrics of steps that the device may not have finished: (step, metrics).
        self._waiting = collections.deque[tuple[int, dict[str, Any]]]()

    def train(self, state: SharpnessState, first: int) -> SharpnessState:
        """Takes the steps from `first` on, and returns the state after the last."""
        steps = self._plan.steps
        bar = progress_bar(
            total=steps,
            initial=first,
            label=self._options.label,
            unit="step",
            show=self._options.progress,
        )
        periods = self._options.periods()
        with bar as self._bar:
            for step in range(first, steps):
                state, metrics = self._trainer.step(state, *self._batches(step))
                done = step + 1
                self._waiting.append((done, metrics))
                save = done % periods["checkpoint_every"] == 0 or done == steps
                evaluate = done % periods["evaluate_every"] == 0 or done == steps
                read_all = save or evaluate or bool(self._options.callbacks)
                while len(self._waiting) > (0 if read_all else _MOST_WAITING):
                    number, waiting = self._waiting.popleft()
                    self._finish(number, waiting, state, evaluate=evaluate and number == done)
                if save:
                    self._files.save(done, state)
                self._bar.update()
        return state

    def _batches(self, step: int) -> tuple[Any, Any]:
        """Returns B1, or None without an ascent, and B2 on the devices."""
        perturbing, updating = self._plan.batches(step)
        update_batch = self._batch(updating, step, 1)
        if perturbing is None:
            return None, update_batch
        if self._plan.shared_batch:
            return update_batch, update_batch
        return self._batch(perturbing, step, 0), update_batch

    def _batch(self, indices: np.ndarray, step: int, number: int) -> Any:
        """Reads a batch. B1 has number 0 and B2 number 1, so that their views differ."""
        examples = self._trainer.placed(check_batch(self._source.gather(indices)))
        if self._options.augment is None:
            return examples
        step_and_number = self._trainer.everywhere((np.uint32(step), np.uint32(number)))
        return self._views(self._key, *step_and_number, examples)

    def _augmented(self, key: jax.Array, step: jax.Array, number: jax.Array, examples: Any) -> Any:
        assert self._options.augment is not None
        key = jax.random.fold_in(jax.random.fold_in(key, step), number)
        keys = jax.random.split(key, len(jax.tree.leaves(examples)[0]))
        return jax.vmap(self._options.augment)(keys, examples)

    def _finish(
        self, number: int, metrics: dict[str, Any], state: SharpnessState, *, evaluate: bool
    ) -> None:
        """Writes and shows the metrics of a step, with those of `evaluate` if it is due."""
        row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        ended = time.time()
        if evaluate and self._options.evaluate is not None:
            row |= self._options.evaluate(state)
        self._files.write(number, ended, row)
        for callback in self._options.callbacks:
            callback(number, row, state.params)
        texts = {name: f"{value:.3f}" for name, value in row.items()}
        self._bar.set_postfix(texts, refresh=False)


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
        perturbing = self._sampler("perturbation", self.perturbation_batch_size).batch(step)
        return perturbing, updating

    def _sampler(self, purpose: str, batch_size: int) -> FixedBatchSampler:
        # The two purposes have seeds of their own, so that B1 and B2 are independent.
        seed = derive(self.seed, f"{purpose} batches")
        return FixedBatchSampler(self.num_examples, batch_size, seed=seed)


def _identity(trainer: SharpnessTrainer, plan: Batches, source: Source) -> dict[str, Any]:
    """Returns what a resumed run must share with the run in the workdir."""
    identity: dict[str, Any] = {}
    for name in (
        "gamma",
        "ascent_rate",
        "ascent_steps",
        "ball",
        "rule",
        "microbatch_size",
        "stateful",
    ):
        identity[name] = getattr(trainer, name)
    identity |= vars(plan)
    del identity["steps"]  # A longer run continues a shorter one.
    identity["seed"] = plan.seed.hex()
    identity["data"] = source.fingerprint
    return identity


class _Files:
    """The identity, checkpoints and metrics of a run in its workdir, if there is one.

    Args:
      workdir: The folder, or None.
      identity: Returns the values that a run in the folder must have, by name.
      steps: The number of steps of the run.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str] | None,
        identity: Callable[[], Mapping[str, Any]],
        steps: int,
    ):
        self._steps = steps
        self._checkpoints: Checkpoints | None = None
        self._opened = contextlib.ExitStack()
        if workdir is None:
            return
        root = pathlib.Path(workdir)
        with self._opened as opened:  # closes open files if the rest fails
            opened.enter_context(alone(root))
            _identify(root, identity())
            self._metrics = opened.enter_context(MetricsWriter(root / "metrics.jsonl"))
            checkpoints = contextlib.closing(Checkpoints(root, keep=1))
            self._checkpoints = opened.enter_context(checkpoints)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Closes the files."""
        self._opened.close()

    def restore(self, state: SharpnessState) -> tuple[SharpnessState, int]:
        """Returns the newest checkpoint, or `state`, and the number of finished steps.

        The arrays of a checkpoint are placed like those of `state`.
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
        shardings = jax.tree.map(lambda x: x.sharding, state)
        return jax.device_put(SharpnessState(**saved), shardings), step

    def write(self, step: int, ended: float, row: dict[str, float]) -> None:
        """Writes the metrics of a step that ended at a time."""
        if self._checkpoints is not None:
            self._metrics.write(step, ended, **row)

    def save(self, step: int, state: SharpnessState) -> None:
        """Makes the state after `step` steps durable."""
        if self._checkpoints is not None:
            self._checkpoints.save(step, state._asdict())


def _identify(root: pathlib.Path, identity: Mapping[str, Any]) -> None:
    """Writes the identity of a run into its folder. Raises ValueError if another run is there."""
    path = root / "run.json"
    stored: Mapping[str, Any] = identity
    if path.exists():
        stored = read_json(path, remedy="Restore it from a copy, or use a new workdir.")
    if stored != identity:
        names = sorted(name for name in identity if stored.get(name) != identity[name])
        raise ValueError(f"{root} holds a run with another {', '.join(names)}. Use a new workdir.")
    write_json(path, identity)
