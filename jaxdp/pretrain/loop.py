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
from jaxdp.data import Source, check_batch, check_source
from jaxdp.files import read_json, shows_keywords, write_json
from jaxdp.pretrain.batches import Batches
from jaxdp.pretrain.dpadapter import SharpnessState, SharpnessTrainer
from jaxdp.pretrain.progress import Progress, Stable, Target
from jaxdp.release import Checkpoints, alone, stream
from jaxdp.report import Callback, MetricsWriter, progress_bar, read_metrics
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
      warmup_until: `jaxdp.pretrain.Target(name, value)`: the warm-up ends after a call of
        `evaluate` after every evaluate_every steps whose number `name` is at least `value`, and
        not before warmup_steps. If that never happens, there is no ascent. None is warmup_steps.
      stop_when: `jaxdp.pretrain.Stable(steps, tolerance)`: the run stops when its loss no longer
        falls. None is the number of steps.
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
    warmup_until: Target | None = None
    stop_when: Stable | None = None
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
    warmup_until: Target | None
    stop_when: Stable | None
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


@shows_keywords(RunKeywords, vars(RunOptions()))
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
      steps: The total number of updates, or the most of them with stop_when.
      perturbation_batch_size, update_batch_size: m1 and m2. B1 and B2 come from two independent
        shuffles of the source.
      seed: 16 bytes that fix the batches and the augmentation. The seed is not secret.
      options: How the run is planned, kept, watched and shown.
      keywords: Fields of `RunOptions`, which replace those of `options`: shared_batch,
        warmup_steps, warmup_until, stop_when, ascent_every, augment, stats, evaluate,
        evaluate_every, callbacks, workdir, checkpoint_every, label and progress.

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
    progress = Progress(plan, options)
    # Without a workdir nothing is compared, and the source is not read for its fingerprint.
    identity = functools.partial(_identity, trainer, plan, progress, source)
    with contextlib.closing(_Files(options.workdir, identity, steps)) as files:
        state, first = files.restore(trainer.init(params, options.stats))
        if progress.identity:
            progress.replay(files.rows(), first)
        if first < steps:
            check_finite(state.params, argument="params of the workdir" if first else "params")
        return _Run(trainer, source, progress, options, files).train(state, first)


@dataclasses.dataclass(eq=False)
class _Run:
    """A run of `fit` once its files are open."""

    trainer: SharpnessTrainer
    source: Source
    progress: Progress
    options: RunOptions
    files: "_Files"

    def __post_init__(self) -> None:
        key = stream(self.progress.plan.seed, "augmentation", impl="threefry2x32")
        self._key = self.trainer.everywhere(key)
        self._views = jax.jit(self._augmented)
        # The metrics of steps that the device may not have finished: (step, metrics).
        self._waiting = collections.deque[tuple[int, dict[str, Any]]]()

    def train(self, state: SharpnessState, first: int) -> SharpnessState:
        """Takes the steps from `first` on, and returns the state after the last."""
        progress, steps = self.progress, self.progress.plan.steps
        bar = progress_bar(
            total=steps,
            initial=first,
            label=self.options.label,
            unit="step",
            show=self.options.progress,
        )
        periods = self.options.periods()
        with bar as self._bar:
            for step in range(first, steps):
                if progress.stopped:
                    break
                state, metrics = self.trainer.step(state, *self._batches(step))
                done = step + 1
                self._waiting.append((done, metrics))
                save = done % periods["checkpoint_every"] == 0 or done == steps
                evaluate = done % periods["evaluate_every"] == 0 or done == steps
                read_all = save or evaluate or progress.decides(done)
                read_all = read_all or bool(self.options.callbacks)
                while len(self._waiting) > (0 if read_all else _MOST_WAITING):
                    number, waiting = self._waiting.popleft()
                    self._finish(number, waiting, state, evaluate=evaluate and number == done)
                if save or progress.stopped:
                    self.files.save(done, state)
                self._bar.update()
        return state

    def _batches(self, step: int) -> tuple[Any, Any]:
        """Returns B1, or None without an ascent, and B2 on the devices."""
        perturbing, updating = self.progress.plan.batches(step)
        update_batch = self._batch(updating, step, 1)
        if perturbing is None:
            return None, update_batch
        if self.progress.plan.shared_batch:
            return update_batch, update_batch
        return self._batch(perturbing, step, 0), update_batch

    def _batch(self, indices: np.ndarray, step: int, number: int) -> Any:
        """Reads a batch. B1 has number 0 and B2 number 1, so that their views differ."""
        examples = self.trainer.placed(check_batch(self.source.gather(indices)))
        if self.options.augment is None:
            return examples
        step_and_number = self.trainer.everywhere((np.uint32(step), np.uint32(number)))
        return self._views(self._key, *step_and_number, examples)

    def _augmented(self, key: jax.Array, step: jax.Array, number: jax.Array, examples: Any) -> Any:
        assert self.options.augment is not None
        key = jax.random.fold_in(jax.random.fold_in(key, step), number)
        keys = jax.random.split(key, len(jax.tree.leaves(examples)[0]))
        return jax.vmap(self.options.augment)(keys, examples)

    def _finish(
        self, number: int, metrics: dict[str, Any], state: SharpnessState, *, evaluate: bool
    ) -> None:
        """Writes and shows the metrics of a step, with those of `evaluate` if it is due."""
        row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        ended = time.time()
        self.progress.trained(number, row["loss"])
        if (evaluate or self.progress.stopped) and self.options.evaluate is not None:
            numbers = self.options.evaluate(state)
            self.progress.evaluated(number, numbers)
            row |= numbers
        self.files.write(number, ended, row)
        for callback in self.options.callbacks:
            callback(number, row, state.params)
        texts = {name: f"{value:.3f}" for name, value in row.items()}
        self._bar.set_postfix(texts, refresh=False)


def _identity(
    trainer: SharpnessTrainer, plan: Batches, progress: Progress, source: Source
) -> dict[str, Any]:
    """Returns what a resumed run must share with the run in the workdir."""
    names = ("gamma", "ascent_rate", "ascent_steps", "ball", "rule", "microbatch_size", "stateful")
    identity = {name: getattr(trainer, name) for name in names} | vars(plan)
    del identity["steps"]  # A longer run continues a shorter one.
    identity["seed"] = plan.seed.hex()
    identity["data"] = source.fingerprint
    return identity | progress.identity


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
        return jax.tree.map(_placed, SharpnessState(**saved), state), step

    def rows(self) -> list[dict[str, Any]]:
        """Returns the metrics of the finished steps."""
        return [] if self._checkpoints is None else read_metrics(self._metrics.path)

    def write(self, step: int, ended: float, row: dict[str, float]) -> None:
        """Writes the metrics of a step that ended at a time."""
        if self._checkpoints is not None:
            self._metrics.write(step, ended, **row)

    def save(self, step: int, state: SharpnessState) -> None:
        """Makes the state after `step` steps durable."""
        if self._checkpoints is not None:
            self._checkpoints.save(step, state._asdict())


def _placed(saved: Any, like: jax.Array) -> jax.Array:
    """Returns an array of a checkpoint on the devices, placed like that of the first state."""
    # An array that is bound to its device belongs to other programs than one that is not. A resumed
    # run would compile all of them again.
    return jax.device_put(saved, like.sharding if like.committed else None)


def _identify(root: pathlib.Path, identity: Mapping[str, Any]) -> None:
    """Writes the identity of a run into its folder. Raises ValueError if another run is there."""
    path = root / "run.json"
    stored: Mapping[str, Any] = identity
    if path.exists():
        stored = read_json(path, remedy="Restore it from a copy, or use a new workdir.")
    if stored != identity:
        every = {*identity, *stored}
        names = sorted(name for name in every if stored.get(name) != identity.get(name))
        raise ValueError(f"{root} holds a run with another {', '.join(names)}. Use a new workdir.")
    write_json(path, identity)
