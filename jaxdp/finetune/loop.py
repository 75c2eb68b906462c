"""The private training loop with ledger, checkpoints, crash recovery and evaluation.

A run is cut into chunks of `checkpoint_every` steps. Each chunk is one release of the till
(`jaxdp.release`). The compiled program, the data, the public settings, the step numbers and the
state at its start determine its bits. Its noise, batches and augmentation come from streams of its
own secret. Therefore:

* A chunk that runs again after a crash repeats the same computation bit for bit, and is not charged
  twice.
* If anything differs, noise and batches are fresh, and the ledger charges again.

The ledger holds the whole rest of the run before the first chunk, so that a run that does not fit
spends nothing.
"""

import contextlib
import functools
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

from jaxdp import memory
from jaxdp.data import Source, check_source
from jaxdp.finetune.trainer import FIRST_STEPS, PrivateTrainer, Programs, TrainState
from jaxdp.privacy import Account
from jaxdp.privacy.cautions import warn_if_weak
from jaxdp.release import Checkpoints, Hosts, Release, Till, digest, stream
from jaxdp.report import Callback, MetricsWriter, progress_bar
from jaxdp.transforms.noise import PrivatizeState
from jaxdp.transforms.parameters import check_finite

# The hold of a dead run lapses after this many seconds. Each chunk renews it.
_HELD_SECONDS = 3600.0


def fit(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    steps: int,
    account: Account | None,
    workdir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    delta: float | None = None,
    seed: bytes | None = None,
    progress: bool = True,
) -> TrainState:
    """Runs `steps` steps of private training, or the rest of them after a crash.

    Args:
      trainer: The trainer from `jaxdp.finetune.dp_sgd`, `adp_alloc`, `adp_clip` or `gep`.
      params: The first parameters. A resumed run does not read them.
      source: The private examples. `len(source)` must be the sampler's `num_examples`. Its first
        and last examples are read for a check before anything is spent. The unit of privacy is
        decided here, because the sampler and the noise are made for its number: give
        `jaxdp.data.by_group(source, group, max_records=)` to protect owners of several records,
        with a trainer of group=True. All other pairs are refused.
      steps: The total number of steps.
      account: The account that is charged, `ledger.account(name)` of the data set, registered with
        the trainer's unit. Where the mesh has several processes, only process 0 gives one, and the
        others give None.
      workdir: The directory of the run, for checkpoints, metrics, notes of charges and the secret
        seed of an unfinished chunk. None keeps nothing and cannot resume. Several processes share
        it.
      checkpoint_every: The number of steps per chunk.
      evaluate: `evaluate(params) -> {name: number}`, called with the moving average if there is
        one. It must read public or held-out data only. For private data see `charged_accuracy`.
        After a crash it is called again for the steps that are repeated. Every process of the mesh
        calls it, and process 0 writes the numbers.
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

    Returns:
      The state after the last step.

    Raises:
      BudgetExceeded: The rest of the run does not fit. Nothing is computed or charged. Earlier
          steps are kept.
      TypeError, ValueError: source is not as `jaxdp.data.check_source` demands.
      HostFailed: Another process of the mesh could not read, evaluate or write. Nothing of the
        chunk is kept. A later call with the same workdir repeats it at no charge.
      ValueError: A leaf of params holds NaN or an infinity, or of the kept parameters of a resumed
        run, which are released. Nothing is computed or charged.
      ValueError: source and sampler differ in size. Only one of trainer (`group=True`) and source
        (`by_group`) is about groups. Trainer and account differ in their unit of privacy. A
        schedule gives a step no positive noise. The workdir has a run with more than `steps` steps,
        another process uses it, or its newest checkpoint is damaged. Neither the account nor the
        caller has a delta. Processes of the mesh differ in config, program, data or versions, or
        share no workdir.

    Formal guarantees:
      At any instant the ledger has reserved the budget for everything that the process has computed
      on private data. On one device, a run that is killed and resumed repeats the interrupted chunk
      bit for bit. With a given `seed` it ends bit-identical to a run that is not killed. A loss
      that calls back to Python is not repeated: its interrupted chunk is charged again. No secret
      is left when the call returns, or when it fails between two chunks. The times in the metrics
      are not protected: the time of a step tells about the size of its sampled batch.
    """
    hosts, pays = Hosts(trainer.mesh), cast(Account, account)  # only process 0 has an account

    def check() -> None:
        check_source(source)
        trainer.check(source)
        if checkpoint_every < 1 or steps < 0:
            raise ValueError(
                f"checkpoint_every must be >= 1 and steps >= 0, got {checkpoint_every} and {steps}."
            )
        if evaluate_every is not None and evaluate_every < 1:
            raise ValueError(
                f"evaluate_every must be at least 1, got {evaluate_every}. None evaluates after "
                "every chunk."
            )
        if hosts.leads:
            _check_account(trainer, account, delta)

    hosts.each(check)
    trainer = trainer.planned(steps)
    memory.make_room_for_programs()
    with (
        hosts.explained(),
        Till(workdir, seed=seed, hosts=hosts) as till,
        contextlib.closing(_Files(till.workdir, hosts)) as files,
        trainer.compile(source) as programs,
    ):
        state, first = files.restore(trainer.init(params))
        if (
            first < steps
        ):  # Parameters of an earlier chunk are released, so an error may depend on them.
            hosts.each(
                lambda: check_finite(
                    state.params, argument="params of the workdir" if first else "params"
                )
            )
        state = trainer.placed(state)
        shown: dict[str, float] = {}

        def chunk(pays: Account, start: TrainState, first: int) -> Release[TrainState]:
            last = min(first + checkpoint_every, steps)
            return Release(
                label=f"training, steps {first}..{last - 1}",
                charges=[(pays, trainer.event(first, last))],
                facts=lambda: [
                    source.fingerprint,
                    repr(trainer.sampler),
                    trainer.query.public,
                    _resumable(start),
                ],
                programs=lambda: [programs.text],
                deterministic=True,  # The trainer compiles its steps with `repeatable`.
                compute=lambda secret: _run(
                    programs, start, secret, range(first, last), finished, hosts
                ),
                keep=files.save,
            )

        def trace() -> None:
            programs.start(state, range(first, steps))

        def shared() -> dict[str, str]:
            trace()
            config = [
                steps,
                checkpoint_every,
                evaluate_every,
                repr(trainer.sampler),
                str(trainer.event(0, steps)),
            ]
            return {
                "config": repr([*config, workdir is None, seed is None]),
                "data": source.fingerprint,
                "program": digest([programs.text, trainer.query.public]),
            }

        def settle() -> None:
            if first > steps:
                raise ValueError(
                    f"workdir holds a run of {first} steps, more than steps={steps}. Use a new "
                    "workdir."
                )
            till.settle([pays])

        hosts.agree(shared)
        hosts.first(settle)
        with (
            progress_bar(
                total=steps,
                initial=first,
                label="training",
                unit="step",
                show=progress and hosts.leads,
            ) as bar,
            contextlib.ExitStack() as room,
        ):

            def finished(state: TrainState, row: dict[str, float], last: bool) -> None:
                ended, step = time.time(), int(state.step)
                params = state.params if state.ema is None else state.ema
                due = (
                    last if evaluate_every is None else step % evaluate_every == 0 or step == steps
                )
                found: dict[str, float] = {}
                if evaluate is not None and due:
                    hosts.later(lambda: found.update(evaluate(params)))

                def write() -> None:
                    if last:
                        row["epsilon"] = pays.epsilon(delta=delta)
                    row.update(found)
                    files.write(step, ended, row)
                    for callback in callbacks:
                        callback(step, row, params)
                    shown.update(row)
                    bar.set_postfix(
                        {key: f"{value:.3f}" for key, value in shown.items()}, refresh=False
                    )
                    bar.update()

                if last:
                    hosts.first(write)
                elif hosts.leads:
                    hosts.later(write)

            def hold() -> None:
                nonlocal pays
                # An interrupted chunk has been charged and needs no room.
                after = (
                    min(first + checkpoint_every, steps)
                    if first < steps and pays.paid(token)
                    else first
                )
                held = pays.hold(trainer.event(after, steps), key=till.name, seconds=_HELD_SECONDS)
                pays = room.enter_context(held).account(pays)

            token = ""
            if first < steps:
                hosts.each(trace)
                token = till.token(chunk(pays, state, first))
            hosts.first(hold)
            if first < steps:
                hosts.each(lambda: programs.wait(first))
            for start in range(first, steps, checkpoint_every):
                state = till.release(chunk(pays, state, start))
    return state


def _check_account(trainer: PrivateTrainer, account: Account | None, delta: float | None) -> None:
    if account is None:
        raise TypeError(
            "account must be an account of a ledger in process 0, got None. Use "
            "ledger.account(name)."
        )
    _check_unit(trainer, account)
    warn_if_weak(
        delta=account.delta if delta is None else delta,
        records=trainer.sampler.num_examples,
        sampling_probability=trainer.sampler.sampling_probability,
    )
    account.epsilon(delta=delta)  # A missing delta must raise before a chunk is charged.


def _check_unit(trainer: PrivateTrainer, account: Account) -> None:
    """Raises ValueError if the ledger promises to protect another unit than the trainer does."""
    if account.unit != trainer.unit:
        raise ValueError(
            f"trainer protects one {trainer.unit!r}, but account {account.name!r} is registered "
            f"with unit={account.unit!r}. Give the trainer unit={account.unit!r}, with group=True "
            "and jaxdp.data.by_group if a unit may have several records, or register the data set "
            f"with unit={trainer.unit!r}."
        )


def _run(
    programs: Programs,
    state: TrainState,
    secret: bytes,
    steps: range,
    finished: Callable[[TrainState, dict[str, float], bool], None],
    hosts: Hosts,
) -> TrainState:
    """Runs numbered steps with all randomness from `secret`. Calls `finished(state, metrics, last)`
    after each step.
    """
    trainer, source = programs.trainer, programs.source
    state = trainer.placed(
        state._replace(
            noise=PrivatizeState(stream(secret, "gradient noise"), state.step),
            key=stream(secret, "augmentation", impl="threefry2x32"),
        )
    )
    row: dict[str, jax.Array] = {}

    def meanwhile() -> None:
        """Writes the row of the step before. What it is given to do may move arrays as it likes."""
        with jax.transfer_guard("allow"):
            if row:
                finished(state, _fetched(row), False)

    with trainer.batches(state, source, len(steps)) as batches:
        for step in steps:
            batch = hosts.together(lambda: next(batches))  # A process that cannot read stops all.
            with jax.transfer_guard("disallow"):
                state, row = trainer.step(state, source, batch, meanwhile)
            if (
                step < FIRST_STEPS
            ):  # before the caller's functions run, which a later tracing must not depend on
                hosts.each(functools.partial(programs.wait, step + 1))
    if row:
        finished(state, _fetched(row), True)
    return state


def _fetched(row: dict[str, jax.Array]) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(row).items()}


class _Files:
    """The checkpoints and metrics of a run in its workdir."""

    def __init__(self, workdir: pathlib.Path | None, hosts: Hosts):
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
        saved, step = self._checkpoints.restore(_resumable(state))
        self._hosts.first(
            lambda: self._metrics.truncate_after(step)
        )  # The run repeats these steps.
        return state._replace(**saved) if step else state, step

    def write(self, step: int, ended: float, row: dict[str, float]) -> None:
        """Writes the metrics of a step that ended at a time."""
        if self._checkpoints is not None:
            self._metrics.write(step, ended, **row)

    def save(self, state: TrainState) -> None:
        """Makes the state after a chunk durable. The keys are derived again and never stored."""
        if self._checkpoints is not None:
            self._checkpoints.save(int(state.step), _resumable(state))


def _resumable(state: TrainState) -> dict[str, Any]:
    return {
        name: getattr(state, name)
        for name in ("step", "params", "opt_state", "ema", "carried", "released")
    }
