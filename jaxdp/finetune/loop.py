"""The private training loop with ledger, checkpoints, crash recovery and evaluation.

A run is cut into chunks of `checkpoint_every` steps. Each chunk is one release of the till
(`jaxdp.release`). The compiled program, the data, the public settings, the step numbers and the
state at its start determine its bits. Its noise, batches and augmentation come from streams of its
own secret. Therefore:

* A chunk that runs again after a crash repeats the same computation bit for bit, and is not charged
  twice.
* If anything differs, noise and batches are fresh, and the ledger charges again.

A run with correlated noise is one release, and so is one whose steps share who takes part
(`BallsInBinsSampler`, `BMinSepSampler`). Its first chunk pays for all steps, and the others pay
nothing. `jaxdp.finetune.whole_runs` says what a later chunk pays that runs again and differs, and
when it is refused.

The ledger holds the whole rest of the run before the first chunk, so that a run that does not fit
spends nothing.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

import jax
import numpy as np

from jaxdp import memory
from jaxdp.data import CyclicPoissonSampler, Owners, Source, check_source
from jaxdp.data.physical import FIRST_STEPS
from jaxdp.files import check_count, check_function, shown, shows_keywords
from jaxdp.finetune import run_notes, whole_runs
from jaxdp.finetune.dropped import check_dropped
from jaxdp.finetune.programs import Programs
from jaxdp.finetune.step import TrainState
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import Account, DpEvent
from jaxdp.privacy.events import compose
from jaxdp.privacy.privacy_warnings import warn_if_weak, warn_of_another_number
from jaxdp.release import (
    Checkpoints,
    Hosts,
    Mark,
    Payment,
    Release,
    Till,
    digest,
    mark_again,
    stream,
)
from jaxdp.report import Callback, MetricsWriter, progress_bar
from jaxdp.transforms.noise import PrivatizeState
from jaxdp.transforms.parameters import check_finite

Requests = Sequence[tuple[Account, DpEvent]]
# The hold of a dead run lapses after this many seconds. Each chunk renews it.
_HELD_SECONDS = 3600.0
_DIVERGED = (
    "nothing more is spent. Begin a new run with a smaller learning rate or clip norm. The steps "
    "until now are paid."
)


class Diverged(ValueError):
    """The parameters that a run has released are not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How `fit` divides, keeps, watches and shows a run.

    Attributes:
      workdir: The directory of the run, for checkpoints, metrics, notes of charges and the secret
        seed of an unfinished chunk. None keeps nothing and cannot resume. Several processes share
        it.
      checkpoint_every: The number of steps per chunk.
      evaluate: `evaluate(params) -> {name: number}`, called with the moving average if there is
        one. No name is "epsilon", "step", "time" or "seconds". It must read public or held-out data
        only. For private data see `charged_accuracy`. Without a workdir it is also called with the
        first parameters, before any charge, because its error would lose the paid steps. After a
        crash it is called again for repeated steps. Every process calls it, and process 0 writes.
      evaluate_every: The number of steps between calls of `evaluate`, which also runs after the
        last step. The default is after every chunk.
      callbacks: Functions `callback(step, metrics, params)` that are called in order after every
        step, once its row is written. Later steps write over the arrays of params: a callback or
        `evaluate` copies what it keeps (`jax.device_get`). Where the mesh has several processes,
        process 0 alone calls them. `metrics` are the numbers of the row, `params` those for
        `evaluate`. They are released values, so what a callback does with them is post-processing.
        A callback that raises stops the run. A later call with the same workdir repeats the
        unfinished chunk at no charge, and calls the callbacks again for its steps.
      delta: The delta of the epsilon in the metrics. The default is the delta of the registered
        budget.
      seed: 16 secret bytes. The default is OS entropy, fresh for every chunk. Give a seed only to
        reproduce a test.
      progress: Whether to show a progress bar (`jaxdp.report.progress_bar`).
      round_start: The step at which a round of federated training begins. `params` then take the
        place of the parameters that the workdir has after so many steps. They are what a server
        made of released parameters. The optimizer's state and the rows of correlated noise go on. A
        round that was interrupted goes on from its own checkpoint, and a finished one returns what
        it released. None, the default, never reads `params` in a resumed run.
      allow_nonfinite: Whether a run starts although more than a tenth of its first examples have a
        loss or gradient that is NaN or infinite. Such an example contributes zero.
    """

    workdir: str | os.PathLike[str] | None = None
    checkpoint_every: int = 100
    evaluate: Callable[[Any], dict[str, float]] | None = None
    evaluate_every: int | None = None
    callbacks: Sequence[Callback] = ()
    delta: float | None = None
    seed: bytes | None = None
    progress: bool = True
    round_start: int | None = None
    allow_nonfinite: bool = False


class RunKeywords(TypedDict, total=False):
    """The fields of `RunOptions` as keywords of `fit`, for editors and type checkers."""

    workdir: str | os.PathLike[str] | None
    checkpoint_every: int
    evaluate: Callable[[Any], dict[str, float]] | None
    evaluate_every: int | None
    callbacks: Sequence[Callback]
    delta: float | None
    seed: bytes | None
    progress: bool
    round_start: int | None
    allow_nonfinite: bool


@shows_keywords(RunKeywords, vars(RunOptions()))
def fit(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    steps: int,
    account: Account | None,
    options: RunOptions = RunOptions(),
    **keywords: Unpack[RunKeywords],
) -> TrainState:
    """Runs `steps` steps of private training, or the rest of them after a crash.

        state = jaxdp.finetune.fit(
            trainer, params, source, steps=100, account=account, workdir="run"
        )

    Args:
      trainer: The trainer from `jaxdp.finetune.dp_sgd`, `adp_alloc`, `adp_clip` or `gep`.
      params: The first parameters. A resumed run reads them at its `round_start` only.
      source: The private examples. `len(source)` must be the sampler's `num_examples`. Its first
        and last examples are read for a check before anything is spent. The unit of privacy is
        decided here, because the sampler and the noise are made for its number: give
        `jaxdp.data.by_group(source, group, max_records=)` to protect owners of several records,
        with a trainer of group=True. `jaxdp.data.by_owners(source, owners, max_records=)` protects
        the owners of records that have several, with its own sampler. All other pairs are refused.
      steps: The total number of steps.
      account: The account that is charged, `ledger.account(name)` of the data set, registered with
        the trainer's unit. Where the mesh has several processes, only process 0 gives one, and the
        others give None.
      options: How the run is divided, kept, watched and shown.
      keywords: Fields of `RunOptions`, which replace those of `options`: workdir, checkpoint_every,
        evaluate, evaluate_every, callbacks, delta, seed, progress, round_start and
        allow_nonfinite.

    Returns:
      The state after the last step.

    Raises:
      BudgetExceeded: The rest of the run does not fit. Nothing is computed or charged. Earlier
          steps are kept.
      TypeError, ValueError: source is not as `jaxdp.data.check_source` demands.
      HostFailed: Another process of the mesh could not read, evaluate or write. Nothing of the
        chunk is kept. A later call with the same workdir repeats it at no charge.
      ValueError: A leaf of params holds NaN or an infinity. Nothing is computed or charged. Or the
        parameters after a chunk do, which are released. Nothing more is charged.
      ValueError: Of the first examples, which are at most a thousand, more than a tenth have a NaN
        or infinite loss or gradient with the first parameters, and `allow_nonfinite` is False. Or
        all of them have. Nothing is charged. A smaller share is a warning. The message has private
        counts, for the owner of the data. A resumed run does not look again.
      ValueError: source and sampler differ in size. Only one of trainer (`group=True`) and source
        (`by_group`) is about groups. Trainer and account differ in their unit of privacy. A
        schedule gives a step no positive noise. The workdir has a run for another unit, or with
        more than `steps` steps, or with fewer than `round_start`, another process uses it, or its
        newest checkpoint is damaged. Neither the account nor the caller has a delta. Processes of
        the mesh differ in config, program, data or versions, or share no workdir.

    Formal guarantees:
      At any instant the ledger has reserved the budget for everything that the process has computed
      on private data. If the run is one release, that is the whole run from its first step on, also
      if it stops early. On one device, a run that is killed and resumed repeats the interrupted
      chunk bit for bit. With a given `seed` it ends bit-identical to a run that is not killed. A
      loss that calls back to Python is not repeated: its interrupted chunk is charged again. No
      secret is left when the call returns, or when it fails between two chunks. Only a run that is
      one release and may go on leaves some: its checkpoints hold earlier noise and the pattern of
      participation until its last step. Whether a run starts may depend on the first examples,
      before anything is released. It is no part of the guarantee. Nothing later depends on more
      than released values. The times in the metrics are not protected: the time of a step tells
      about the size of its sampled batch.
    """
    options = dataclasses.replace(options, **keywords)
    hosts = Hosts(trainer.mesh)

    def check() -> None:
        check_source(source)
        trainer.check(source)
        _check_options(steps, options)
        check_chunks(trainer, steps, options.checkpoint_every)
        if hosts.leads:  # only process 0 has an account
            check_account(trainer, account, options.delta, source)

    hosts.each(check)
    trainer = trainer.planned(steps)
    memory.make_room_for_programs()
    with contextlib.ExitStack() as opened:
        opened.enter_context(hosts.explained())
        till = opened.enter_context(Till(options.workdir, seed=options.seed, hosts=hosts))
        files = opened.enter_context(contextlib.closing(_Files(till.workdir, hosts)))
        trainer = whole_runs.with_event(trainer, till.workdir, hosts)
        programs = opened.enter_context(trainer.compile(source))
        run = _Run(
            steps=steps,
            options=options,
            pays=cast(Account, account),  # Only process 0 has an account, and only it pays.
            hosts=hosts,
            till=till,
            files=files,
            programs=programs,
        )
        return run.train(params)


def _check_options(steps: int, options: RunOptions) -> None:
    """Raises TypeError or ValueError for counts and functions that are none."""
    check_count("steps", steps, 0)
    check_count("checkpoint_every", options.checkpoint_every, 1)
    if options.evaluate is not None:
        check_function("evaluate", options.evaluate, "evaluate(params) -> {'accuracy': 0.9}")
    if not isinstance(options.callbacks, Sequence):
        raise TypeError(
            "callbacks must be a list of functions, got "
            f"{type(options.callbacks).__name__}. Write callbacks=[callback]."
        )
    for callback in options.callbacks:
        check_function("callbacks", callback, "callback(step, metrics, params)")
    if not isinstance(options.allow_nonfinite, bool):
        raise TypeError(f"allow_nonfinite must be True or False, got {options.allow_nonfinite!r}.")
    if options.round_start is not None:
        check_count("round_start", options.round_start, 0)
    if options.evaluate_every is not None:
        check_count("evaluate_every", options.evaluate_every, 1)


def check_chunks(trainer: PrivateTrainer, steps: int, checkpoint_every: int) -> None:
    """Raises ValueError if a chunk would end inside a cycle of the sampler, which is paid whole."""
    if isinstance(trainer.sampler, CyclicPoissonSampler) and not trainer.is_whole:
        trainer.sampler.check_chunks(steps, checkpoint_every)


def check_account(
    trainer: PrivateTrainer, account: Account | None, delta: float | None, source: Source
) -> None:
    """Raises if the account cannot pay for the trainer or has no delta, before it is charged."""
    units = source.owners if isinstance(source, Owners) else len(source)
    if not isinstance(account, Account):
        raise TypeError(
            "account must be an account of a ledger in process 0, got "
            f"{'None' if account is None else type(account).__name__}. Use ledger.account(name)."
        )
    _check_unit(trainer, account)
    warn_if_weak(
        delta=account.delta if delta is None else delta,
        records=units,
        sampling_probability=getattr(trainer.sampler, "sampling_probability", None),
        unit=trainer.unit,
    )
    warn_of_another_number(
        account.name,
        registered=account.ledger.records(account.name),
        present=units,
        unit=trainer.unit,
    )
    account.epsilon(delta=delta)  # A missing delta must raise before a chunk is charged.


_ROW = {"step", "time", "seconds", "epsilon"}  # The report reads that of the ledger from a row.
_KEPT = "The steps until now are paid and kept. The same call goes on from them."


def _numbers(evaluation: Any, remedy: str = _KEPT) -> dict[str, float]:
    """Returns what `evaluate` returned, as numbers by name."""
    numbers = np.array([*evaluation.values()]) if isinstance(evaluation, Mapping) else None
    is_bad = numbers is None or numbers.ndim > 1 or numbers.dtype.kind not in "biuf"
    if is_bad or _ROW & evaluation.keys():
        raise TypeError(
            "evaluate must return numbers by name, such as {'accuracy': 0.9}, and none named "
            f"{sorted(_ROW)}, got {shown(repr(evaluation)[:80])}. {remedy}"
        )
    return {name: float(value) for name, value in evaluation.items()}


def _check_unit(trainer: PrivateTrainer, account: Account) -> None:
    """Raises ValueError if the ledger promises to protect another unit than the trainer does."""
    if account.unit != trainer.unit:
        raise ValueError(
            f"trainer protects one {trainer.unit!r}, but account {account.name!r} is registered "
            f"with unit={account.unit!r}. Give the trainer unit={account.unit!r}, with group=True "
            "and jaxdp.data.by_group if a unit may have several records, or register the data set "
            f"with unit={trainer.unit!r}."
        )


@dataclasses.dataclass(kw_only=True)
class _Run:
    """A run of `fit` once its files are open.

    Attributes:
      pays: The account that is charged. Once the run holds its budget, it spends from the hold.
    """

    steps: int
    options: RunOptions
    pays: Account
    hosts: Hosts
    till: Till
    files: "_Files"
    programs: Programs

    def __post_init__(self) -> None:
        self.trainer = self.programs.trainer
        self.source = self.programs.source
        self.whole: whole_runs.WholeRun | None = None
        self.shown: dict[str, float] = {}

    def train(self, params: Any) -> TrainState:
        """Takes the steps that are left, and returns the state after the last."""
        state, first = self._restored(params)
        steps = range(first, self.steps)
        self.hosts.agree(lambda: self._shared(state, steps))  # before anything is charged
        self.hosts.first(lambda: self._settle(first))
        bar = progress_bar(
            total=self.steps,
            initial=first,
            label="training",
            unit="step",
            show=self.options.progress and self.hosts.leads,
        )
        with bar as self.bar, contextlib.ExitStack() as room:
            token = ""
            charges: Any = []
            if steps:
                self.hosts.each(lambda: self.programs.start(state, steps))
                chunk = self._chunk(state, first)
                token = self.till.token(chunk)
                # A mark needs no room.
                charges = chunk.charges if isinstance(chunk.charges, Sequence) else []
            # The whole rest is held at once, so that a run that does not fit spends nothing.
            self.hosts.first(lambda: self._hold(first, token, charges, room))
            if steps:
                self.hosts.each(lambda: self.programs.wait(first))
            if steps and not first:
                self.hosts.each(lambda: self._check_examples(state))
            every = self._end(first) - first or 1
            for start in steps[::every]:
                if start > first:
                    # Before the chunk is paid.
                    self._check_params(state, start)
                state = self.till.release(self._chunk(state, start))
        return state

    def _check_examples(self, state: TrainState) -> None:
        """Raises or warns before the first release, if the first examples have no gradient.

        Later it would tell about private examples by the number of steps in the ledger.
        """
        allow = self.options.allow_nonfinite
        check_dropped(self.trainer, state, self.source, allow_nonfinite=allow)

    def _check_params(self, state: TrainState, step: int) -> None:
        """Raises `Diverged` if the parameters after some steps, which are released, are useless."""
        argument = f"params after step {step}"
        try:
            self.hosts.each(lambda: check_finite(state.params, argument=argument, remedy=_DIVERGED))
        except ValueError as error:
            raise Diverged(str(error)) from error

    def _restored(self, params: Any) -> tuple[TrainState, int]:
        """Returns the state to start from, on the devices, and the number of finished steps."""
        if self.trainer.is_whole:
            self.whole = whole_runs.WholeRun.of(self.trainer, self.source)
            self.files.whole_run = self.whole
        fresh = self.trainer.init(params)
        state, first = self.files.restore(fresh)
        state = self._in_round(state, first, fresh.params)
        if first < self.steps:
            # The parameters of an earlier chunk are released, so an error may depend on them.
            if first:
                self._check_params(state, first)
            else:
                self.hosts.each(lambda: check_finite(state.params))
        state = self.trainer.placed(state)
        evaluate = self.options.evaluate
        # In a workdir a run survives a later error of `evaluate`. In memory it would be lost.
        if evaluate is not None and self.options.workdir is None and first < self.steps:
            params = state.params if state.ema is None else state.ema
            self.hosts.each(lambda: _numbers(evaluate(params), "Nothing is charged yet."))
        return state, first

    def _in_round(self, state: TrainState, first: int, params: Any) -> TrainState:
        """Returns the state after `first` steps, with new parameters where a round begins."""
        begin = self.options.round_start
        if begin is None:
            return state
        if first < begin or begin > self.steps:
            raise ValueError(
                f"round_start must be at most steps={self.steps} and the {first} steps that the "
                f"workdir has, got {begin}. Take the steps of the earlier rounds first."
            )
        if first != begin or not first:
            return state
        if state.ema is not None:
            raise ValueError(
                "ema_decay must be None with round_start, whose parameters are no average of this "
                "run's."
            )
        self.hosts.each(lambda: check_finite(params))
        return state._replace(params=params)

    def _shared(self, state: TrainState, steps: range) -> dict[str, str]:
        """Returns what all processes of the mesh must agree on."""
        self.programs.start(state, steps)
        config = [
            self.steps,
            self.options.checkpoint_every,
            self.options.evaluate_every,
            repr(self.trainer.sampler),
            str(self.trainer.event(0, self.steps)),
            self.options.workdir is None,
            self.options.seed is None,
        ]
        return {
            "config": repr(config),
            "data": self.source.fingerprint,
            "program": digest([self.programs.text, self.trainer.query.public]),
        }

    def _settle(self, first: int) -> None:
        """Accounts for what a killed process left, once the workdir is known to fit the run."""
        if first > self.steps:
            raise ValueError(
                f"workdir holds a run of {first} steps, more than steps={self.steps}. Use a new "
                "workdir."
            )
        run_notes.settle_run(self.till, self.trainer, self.pays)
        if self.whole is not None:
            mark_again(self.till.notes(), self.pays)
        if self.till.workdir is not None:
            source = self.source
            run_notes.write(self.till.workdir, self.trainer, source, self.steps, self.pays)

    def _hold(self, first: int, token: str, charges: Requests, room: contextlib.ExitStack) -> None:
        """Holds the budget of all steps that are not yet charged, until `room` is closed.

        `token` and `charges` are those of the chunk that begins at `first`.
        """
        # A chunk that was interrupted has been charged and needs no room.
        is_paid = first < self.steps and self.pays.paid(token)
        if self.whole is None:
            unpaid = self._end(first) if is_paid else first
            rest = self.trainer.event(unpaid, self.steps)
        else:
            rest = compose(Counter(event for _, event in charges if not is_paid))
        held = self.pays.hold(rest, key=self.till.name, seconds=_HELD_SECONDS)
        self.pays = room.enter_context(held).account(self.pays)

    def _end(self, first: int) -> int:
        """Returns the step after the last one of the chunk that begins at `first`."""
        return min(first + self.options.checkpoint_every, self.steps)

    def _chunk(self, start: TrainState, first: int) -> Release[TrainState]:
        """Returns the release of the chunk that begins at step `first` in the state `start`."""
        last = self._end(first)
        label = f"training, steps {first}..{last - 1}"
        if self.whole is None:
            event = self.trainer.event(first, last)
            return self._release(start, range(first, last), [(self.pays, event)], label=label)
        note = {"first_step": first, "next_step": last}
        steps = range(first, last)
        if first:
            mark = self._mark(first)
            free = self._release(start, steps, mark or [], label=label, note=note)
            if mark is None or not self._is_fork(free, mark):
                return free  # the first attempt at this chunk
            whole_runs.check_fork(self.whole, first)
        label += f" of {self.whole.steps}, which are one release"
        pays = [(self.pays, self.trainer.event(0, last))]
        return self._release(start, steps, pays, label=label, note=note)

    def _mark(self, first: int) -> Mark | None:
        """Returns the mark of a later chunk, or None in memory, where nothing can be copied."""
        if self.till.workdir is None:
            return None
        rows = self.hosts.first(self.till.notes)
        return Mark(self.pays, rows, first)

    def _is_fork(self, chunk: Release[TrainState], mark: Mark) -> bool:
        """Returns whether a later chunk of a run that is one release may be released again."""
        if mark.is_lost:
            return True
        if not self.hosts.first(mark.is_begun):
            return False
        # Only process 0 has a token.
        token = self.till.token(chunk)
        is_foreign: bool = self.hosts.first(lambda: mark.is_foreign(token))
        return is_foreign

    def _release(
        self, start: TrainState, steps: range, charges: Requests | Payment, **words: Any
    ) -> Release[TrainState]:
        """Returns the release of numbered steps from the state `start`.

        `words` are the label and the note.
        """
        seed = self.whole.sampling_seed if self.whole is not None and steps.start else None
        of_pattern = [] if seed is None else [seed.hex()]
        return Release(
            charges=charges,
            facts=lambda: [
                *facts_of_steps(self.trainer, self.source, start),
                *of_pattern,  # another pattern of batches is another release
            ],
            # The text also holds how a batch is cut into physical batches (`jaxdp.data.physical`).
            programs=lambda: [self.programs.text],
            deterministic=True,  # The trainer compiles its steps with `repeatable`.
            compute=lambda secret: self._steps(start, secret, steps),
            keep=self.files.save,
            **words,
        )

    def _steps(self, state: TrainState, secret: bytes, steps: range) -> TrainState:
        """Takes numbered steps with all randomness from `secret`."""
        trainer = self.trainer
        noise = PrivatizeState(stream(secret, "gradient noise"), state.step)
        key = stream(secret, "augmentation", impl="threefry2x32")
        state = trainer.placed(state._replace(noise=noise, key=key))
        seed = None
        if self.whole is not None:
            if not steps.start:
                self.whole.draw(secret)
            seed = self.whole.sampling_seed
        metrics: dict[str, jax.Array] = {}

        def finish_previous() -> None:
            # The guard is off: the caller's functions may move arrays between host and device.
            with jax.transfer_guard("allow"):
                if metrics:
                    self._finished(state, _fetched(metrics), last=False)

        with trainer.batches(state, self.source, len(steps), seed=seed) as batches:
            for step in steps:
                # A process that cannot read its part of a batch stops all.
                batch = self.hosts.together(lambda: next(batches))
                with jax.transfer_guard("disallow"):
                    state, metrics = trainer.step(state, self.source, batch, finish_previous)
                if step < FIRST_STEPS:
                    # Now, since the caller's functions must not run between two tracings.
                    self.hosts.each(functools.partial(self.programs.wait, step + 1))
        if metrics:
            self._finished(state, _fetched(metrics), last=True)
        return state

    def _finished(self, state: TrainState, row: dict[str, float], *, last: bool) -> None:
        """Evaluates, writes and shows a step, which may be the last of its chunk."""
        ended = time.time()
        step = int(state.step)
        params = state.params if state.ema is None else state.ema
        evaluation: dict[str, float] = {}
        evaluate = self.options.evaluate
        if evaluate is not None and self._is_evaluated(step, last):
            self.hosts.later(lambda: evaluation.update(_numbers(evaluate(params))))

        def write() -> None:
            if last:
                row["epsilon"] = self.pays.epsilon(delta=self.options.delta)
            row.update(evaluation)
            self.files.write(step, ended, row)
            for callback in self.options.callbacks:
                callback(step, row, params)
            self._show(row)

        if last:
            self.hosts.first(write)
        elif self.hosts.leads:
            self.hosts.later(write)

    def _is_evaluated(self, step: int, last: bool) -> bool:
        """Returns whether `evaluate` is due after a step."""
        every = self.options.evaluate_every
        if every is None:
            return last
        return step % every == 0 or step == self.steps

    def _show(self, row: dict[str, float]) -> None:
        """Shows the newest value of every metric on the progress bar."""
        self.shown.update(row)
        texts = {name: f"{value:.3f}" for name, value in self.shown.items()}
        self.bar.set_postfix(texts, refresh=False)
        self.bar.update()


def _fetched(metrics: dict[str, jax.Array]) -> dict[str, float]:
    """Returns metrics as numbers on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


class _Files:
    """The checkpoints and metrics of a run in its workdir."""

    def __init__(self, workdir: pathlib.Path | None, hosts: Hosts):
        self.whole_run: whole_runs.WholeRun | None = None
        self._checkpoints: Checkpoints | None = None
        self._hosts = hosts
        self._opened = contextlib.ExitStack()
        if workdir is None:
            return
        with self._opened as opened:  # closes open files if the rest fails
            hosts.first(lambda: self._open_metrics(workdir, opened))
            self._checkpoints = opened.enter_context(
                contextlib.closing(Checkpoints(workdir, keep=2, hosts=hosts))
            )
            self._opened = opened.pop_all()

    def _open_metrics(self, workdir: pathlib.Path, opened: contextlib.ExitStack) -> None:
        self._metrics = opened.enter_context(MetricsWriter(workdir / "metrics.jsonl"))

    def close(self) -> None:
        """Closes the files."""
        self._opened.close()

    def restore(self, state: TrainState) -> tuple[TrainState, int]:
        """Returns the newest checkpoint, or `state`, and the number of finished steps."""
        if self._checkpoints is None:
            return state, 0
        saved, step = self._checkpoints.restore(self._checkpoint(state))
        if self.whole_run is not None:
            self.whole_run.take(saved, step)
            if step >= self.whole_run.steps:
                self._forget()
        # The run repeats the steps after the checkpoint.
        self._hosts.first(lambda: self._metrics.truncate_after(step))
        return state._replace(**saved) if step else state, step

    def write(self, step: int, ended: float, row: dict[str, float]) -> None:
        """Writes the metrics of a step that ended at a time."""
        if self._checkpoints is not None:
            self._metrics.write(step, ended, **row)

    def save(self, state: TrainState) -> None:
        """Makes the state after a chunk durable. The keys are derived again and never stored."""
        if self._checkpoints is None:
            return
        step = int(state.step)
        is_end = self.whole_run is not None and self.whole_run.is_end(state)
        if is_end:
            state = whole_runs.without_secrets(state)
        self._checkpoints.save(step, self._checkpoint(state))
        if is_end:  # after the last checkpoint is durable
            self._forget()

    def _checkpoint(self, state: TrainState) -> dict[str, Any]:
        """Returns what a checkpoint holds of a state, and of a run as a whole."""
        content = _resumable(state)
        if self.whole_run is not None:
            content |= self.whole_run.content(state)
        return content

    def _forget(self) -> None:
        """Deletes the earlier checkpoints, which hold secrets of a run that has ended."""
        assert self._checkpoints is not None
        self._checkpoints.delete_older()


def facts_of_steps(trainer: PrivateTrainer, source: Source, start: TrainState) -> list[Any]:
    """Returns what determines the bits of steps from a state, besides programs and secret."""
    return [source.fingerprint, repr(trainer.sampler), trainer.query.public, _resumable(start)]


def _resumable(state: TrainState) -> dict[str, Any]:
    """Returns what a checkpoint holds of a state: all of it but the keys and the layout."""
    names = ["step", "params", "opt_state", "ema", "carried", "released"]
    if state.buffers is not None:
        names.append("buffers")
    return {name: getattr(state, name) for name in names}
