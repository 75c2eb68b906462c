"""The loop over a stream: reset, pay, step, compare, keep.

Each batch is one release of the till (`jaxdp.release`). Its noise and second views come from the
secret of that release, so no state can put one noise on two gradients. A killed process resumes in
its workdir. It repeats the interrupted batch bit for bit and does not pay again. If anything
differs, it draws fresh noise and pays again.

A unit is charged for the sums that it enters. A sum is an update, or with correlated noise all
updates of a period, which are one release. So a period is paid when its first batch comes, and
later batches of it pay for units that come back only. An interrupted batch that differs goes on
from the same buffers with another row of Z. So it adds to what is known the entries of C G' + Z'
from its update on, which move by no more than those of a period. All units of the period so far pay
for one more.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxdp import release
from jaxdp.data.ids import identifier
from jaxdp.data.labels import check_labels, check_logits, judge
from jaxdp.files import parse_json, shown, shows_keywords, understood, write_durably
from jaxdp.privacy.events import DpEvent, NonPrivateDpEvent, to_json
from jaxdp.privacy.ledger import BudgetExceeded
from jaxdp.report import MetricsWriter, progress_bar, read_metrics
from jaxdp.transforms.noise import CorrelatedNoise
from jaxdp.transforms.parameters import check_finite
from jaxdp.tta.accounts import BatchPayment, StreamAccount, Sum
from jaxdp.tta.adapter import Adapter, next_row
from jaxdp.tta.monitor import CollapseMonitor, CollapseReport
from jaxdp.tta.private import Private
from jaxdp.tta.streams import Batch

_LABEL = "test-time adaptation"
_STATE = "state.safetensors"
_ROWS = "served.jsonl"
_DAMAGED = (
    "Restore the workdir from a copy, or use a new one. A new one serves and charges all batches "
    "again."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The results of a stream.

    Everything but `state.params`, `resets` and `reports` is NOT protected.

    The prediction of a record is for its owner only. Accuracies and counts reveal more about single
    records than the ledger accounts for. Publish them for public benchmarks, or pay for them
    separately.

    Attributes:
        state: The adapter's state after the last batch. It holds secrets besides its params.
        accuracy: {domain: fraction of its records with a correct prediction}, in the order of the
            stream.
        correct: int64 [T], correct predictions in each batch, by the rules of `jaxdp.data.labels`.
        not_finite: int64 [T], predictions in each batch with a NaN or infinite logit, which count
            as wrong.
        count: int64 [T], records in each batch.
        resets: The numbers of the batches before which the stream or the monitor reset the model.
        reports: Pairs (number of the batch before it, report) of the monitor.
        evaluated: The results of `evaluate` after each batch, empty without `evaluate`.
    """

    state: Any = dataclasses.field(repr=False)
    accuracy: dict[str, float] = dataclasses.field(repr=False)
    correct: np.ndarray = dataclasses.field(repr=False)
    not_finite: np.ndarray = dataclasses.field(repr=False)
    count: np.ndarray = dataclasses.field(repr=False)
    resets: tuple[int, ...]
    reports: tuple[tuple[int, CollapseReport], ...] = dataclasses.field(repr=False)
    evaluated: tuple[dict[str, float], ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observers:
    """What `serve` calls after each batch.

    Attributes:
        monitor: A monitor that measures the parameters after every `monitor.every` batches.
        deliver: `deliver(batch, logits [B, C])` after every batch. Give each row to the owner of
            its record only. After a crash the call is repeated for the interrupted batch only.
        evaluate: `evaluate(batch, params) -> {name: number}` after every batch. It may read public
            or held-out images under the batch's domain, never the stream itself.
    """

    monitor: CollapseMonitor | None = None
    deliver: Callable[[Batch, np.ndarray], None] | None = None
    evaluate: Callable[[Batch, Any], dict[str, float]] | None = None


class ObserverKeywords(TypedDict, total=False):
    """The fields of `Observers` as keywords, for editors and type checkers."""

    monitor: CollapseMonitor | None
    deliver: Callable[[Batch, np.ndarray], None] | None
    evaluate: Callable[[Batch, Any], dict[str, float]] | None


@shows_keywords(ObserverKeywords, vars(Observers))
def serve(
    adapter: Any,
    stream: Iterable[Batch],
    *,
    account: StreamAccount | None,
    workdir: str | os.PathLike[str] | None = None,
    state: Any = None,
    seed: bytes | None = None,
    **observers: Unpack[ObserverKeywords],
) -> Served:
    """Adapts to a stream batch by batch. Pays for each batch before reading it.

    Args:
        adapter: An `Adapter`. It decides whether a batch is predicted before or after adapting to
            it.
        stream: A `Stream`, or any iterable of `Batch`. Its number of batches may be unknown.
        account: The account that is charged, for the ids of its `unit`. None charges and guarantees
            nothing: the stream is public, or its cost is charged elsewhere. An account with a
            workdir is for that workdir only.
        workdir: A folder for this stream only, readable by its owner only. It holds the state, the
            rows behind `Served`, and notes of the units and the charge of each batch. After a
            crash, or with a longer stream, call again with the same workdir and the stream from its
            beginning. Finished batches are skipped. A copy or a backup would forget visits. None
            keeps nothing, and an interrupted stream is paid again.
        state: A state from `adapter.init()` or an earlier call. None for a new one. A state in the
            workdir wins.
        seed: 16 secret bytes that reproduce the noise, for tests. None draws fresh bytes from the
            operating system for every batch.
        observers: The attributes of `Observers`: monitor, deliver, and evaluate.

    Returns:
        `Served`. A record without a label (-1), or with a label that is no class, counts as wrong.
        So accuracies are meaningless for a stream without labels. If a stream ends in the middle of
        an update (`Adapter.accumulate`) with a workdir, disk and returned state drop the unfinished
        sum, so that no secret stays. Its batches are predicted and paid for, and make no update.
        Rows of correlated noise are dropped too, so a longer stream begins a new period. After an
        exception they stay, so that a later call can resume. Without a workdir the state keeps
        them, for a call with the same account.

    Raises:
        ValueError: Labels are not [B], or logits not [B, C]. The state's parameters are NaN or
            infinite. The account has another event than the method. It has charged an update from
            this state already, has not charged the unfinished update of this state, or has charged
            batches outside of the workdir. Or the workdir holds another stream or other settings,
            is damaged, or is in use by another process.
        TypeError: A unit is no identifier (`jaxdp.data.ids`), or labels are not integers, or logits
            not floating point.
        BudgetExceeded: The budget does not allow the next batch, which is not read. The attribute
            `served` of the exception holds the results of the batches before it.

    Formal guarantees:
        With an account, the parameters after all batches together are as private as the ledger
        says. Resets of the stream are public. Resets of the monitor are post-processing of released
        parameters and public images. Labels are only compared with predictions in memory. Only the
        account that charged its batches accepts a state in the middle of an update, or of a period
        of correlated noise, and only the newest state of it. Otherwise two noisy sums of one
        pending sum would be charged as one. If an interrupted batch cannot be repeated, for example
        because the model calls back to Python, its update or period is charged again with all of
        its batches.
    """
    observing = Observers(**observers)
    if account is not None and account.event != _event(adapter):
        raise ValueError(
            f"account charges {account.event} for a release, but the method has {_event(adapter)}. "
            "Make a StreamAccount with event=method.event."
        )
    if workdir is not None:
        pathlib.Path(workdir).mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        till = stack.enter_context(release.Till(workdir, seed=seed))
        files = None
        if till.workdir is not None:
            files = stack.enter_context(contextlib.closing(_Files(till.workdir)))
        loop = _Loop(adapter, account, till, files, observing)
        try:
            batches = iter(progress_bar(stream, label="stream", unit="batch"))
            first = list(itertools.islice(batches, 1))
            if first and isinstance(adapter, Adapter):
                adapter.prepare(first[0].images)  # what does not fit the model costs nothing
            loop.begin(state)
            for number, batch in enumerate(itertools.chain(first, batches)):
                loop.serve(number, batch)
        except BudgetExceeded as error:
            error.served = loop.served()  # type: ignore[attr-defined]
            raise
        loop.end()
        return loop.served()


@dataclasses.dataclass
class _Loop:
    """One call of `serve`."""

    adapter: Any
    account: StreamAccount | None
    till: release.Till
    files: "_Files | None"
    observers: Observers

    state: Any = dataclasses.field(init=False)
    # The number of the state's step.
    step: int = dataclasses.field(init=False)
    # The name of the updates: the workdir's, or the first state's.
    name: str = dataclasses.field(init=False)
    # The sum that the next batch enters.
    entering: Sum = dataclasses.field(init=False)
    # The results of each batch.
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # The name of the workdir, for the account.
    run: str | None = None
    # The records of finished batches, as the workdir notes them.
    noted: dict[int, str] = dataclasses.field(default_factory=dict)
    # The number of batches that the stream has yielded.
    seen: int = 0
    # Shapes and dtypes of images for which the logits were checked.
    checked: set[Any] = dataclasses.field(default_factory=set)

    def begin(self, state: Any) -> None:
        """Continues the workdir's state, or begins with the given one."""
        stored = self.files.load(self.adapter, self._terms) if self.files else None
        if stored is not None:
            state, self.run, self.rows = stored
        elif state is None:
            state = self.adapter.init()
        check_finite(state.params, argument="params of the state")
        self.step = int(state.step)
        self.name = self.run or _name(self.adapter, state)
        self.entering = self._new_sum(self.step)
        if stored is None and self.account is not None:
            self.entering = self._admit(state, self.account)
        # A new key gives the returned state another name, and fixes the kind of key that the
        # program is compiled for.
        self.state = state._replace(key=release.stream(release.new_seed(), _LABEL))
        if stored is not None:
            self._recount()
        elif self.files is not None:
            self._begin_workdir(self.files)

    def _begin_workdir(self, files: "_Files") -> None:
        if self.till.notes():
            raise ValueError(
                f"{shown(files.workdir)} holds notes of a stream, but its state is missing. Use a "
                "new workdir."
            )
        self.run = release.new_seed().hex()
        self.name = self.run
        self.entering = self._new_sum(self.step)
        if self.account is not None:
            self.account.check_run(self.run)
        self._save()

    def serve(self, number: int, batch: Batch) -> None:
        """Serves one batch, unless it is finished."""
        self.seen += 1
        units = batch.visitors(self._unit)
        records = None if self.files is None else _as_text(units, batch.domains)
        if self.files is not None and number < len(self.rows):
            if self.noted.get(number) != records:
                raise ValueError(
                    f"batch {number} of stream differs in units or domains from the batch that was "
                    f"served in {shown(self.files.workdir)}. Give the same stream from its "
                    "beginning, or use a new workdir."
                )
            return
        self._check_shapes(batch)
        before = self.adapter.reset(self.state) if batch.reset else self.state
        row = next_row(self.adapter, before)
        self.entering = self._next(self.entering, self.step, row)
        payment = None
        if self.account is not None:
            payment = BatchPayment(self.account, units, self.entering, self.run)

        def facts() -> list[Any]:
            state = self.adapter.parts(before)
            return [self._constants, state, batch.images, batch.mask, repr(units)]

        what = release.Release(
            label=_LABEL,
            charges=() if payment is None else payment,
            compute=lambda secret: self._step(number, batch, before, secret),
            facts=facts,
            programs=lambda: [self.adapter.lowered_text(before, batch.images)],
            keep=lambda result: self._keep(batch, *result),
            note={"batch": number, "at": self.step, "row": row, "records": records},
            once_in=self.run or "",
        )
        self.till.release(what)
        if payment is not None:
            self.entering = payment.entered
        # The batch may have ended its sum.
        self.entering = self._next(self.entering, self.step, next_row(self.adapter, self.state))

    def _step(
        self, number: int, batch: Batch, before: Any, secret: bytes
    ) -> tuple[Any, np.ndarray, dict[str, Any]]:
        """Returns the state after a batch, its logits, and the row of its results."""
        key = release.stream(secret, "noise and second views")
        after, logits = self.adapter.step(before, batch.images, key=key, mask=batch.mask)
        logits = np.asarray(logits)
        row = _compared(batch, logits)
        row["resets"] = [number] if batch.reset else []
        row["report"] = None
        row["evaluated"] = None
        if self.observers.evaluate is not None:
            row["evaluated"] = self.observers.evaluate(batch, after.params)
        monitor = self.observers.monitor
        if monitor is not None and (number + 1) % monitor.every == 0:
            report = monitor(after.params)
            row["report"] = dataclasses.asdict(report)
            if monitor.reset and report.collapsed:
                after = self.adapter.reset(after)
                row["resets"].append(number + 1)
        return after, logits, row

    def _keep(self, batch: Batch, after: Any, logits: np.ndarray, row: dict[str, Any]) -> None:
        self.state = after
        # A crash after the delivery repeats the batch and its delivery.
        if self.observers.deliver is not None:
            self.observers.deliver(batch, logits)
        self.step += 1
        self.rows.append(row)
        if self.files is not None:
            # The row first: on resuming, a row without its state is cut off, and its batch served
            # again.
            self.files.add(len(self.rows), row)
            self._save()

    def _check_shapes(self, batch: Batch) -> None:
        """Raises for labels or logits of another shape or dtype, before the batch is paid."""
        count = len(batch.mask)
        check_labels(np.asarray(batch.labels), count, name="labels of a batch")
        kind = (batch.images.shape, batch.images.dtype)
        if not isinstance(self.adapter, Adapter) or kind in self.checked:
            return
        images = jnp.asarray(batch.images)
        logits = jax.eval_shape(self.adapter.apply_fn, self.state.params, images)
        check_logits(logits, name="apply_fn(params, images)", count=count)
        self.checked.add(kind)

    def end(self) -> None:
        """Refuses a stream that ended too early. Drops secrets from the workdir."""
        if self.files is None:
            return
        if self.seen < len(self.rows):
            raise ValueError(
                f"stream has {self.seen} batches, but {len(self.rows)} were served in "
                f"{self.files.workdir}. Give the same stream from its beginning, or use a new "
                "workdir."
            )
        rows = getattr(self.state, "rows", None)
        # A reset that is due has not cleared them yet.
        holds_noise = rows is not None and int(rows.number) != 0
        # An unfinished sum lacks its noise, and kept rows are noise of released updates.
        if self.step % self.adapter.accumulate or holds_noise:
            secrets = {"pending": self.state.pending, "rows": self.state.rows}
            self.state = self.state._replace(**jax.tree.map(jnp.zeros_like, secrets))
            self._save()

    def served(self) -> Served:
        """Returns the results of the batches so far."""
        if self.account is not None and self.files is None and self.entering.batches:
            self.account.leave_unfinished(_name(self.adapter, self.state), self.entering)
        hits: dict[str, Any] = {}
        reports = []
        evaluated = []
        resets: list[int] = []
        for number, row in enumerate(self.rows):
            for domain, correct_and_count in row["hits"].items():
                hits[domain] = np.add(hits.get(domain, 0), correct_and_count)
            resets += row["resets"]
            if row["report"] is not None:
                reports.append((number, CollapseReport(**row["report"])))
            if row["evaluated"] is not None:
                evaluated.append(row["evaluated"])
        return Served(
            state=self.state,
            accuracy={domain: float(correct / count) for domain, (correct, count) in hits.items()},
            correct=np.array([row["correct"] for row in self.rows], np.int64),
            # Rows of version 0.1 lack the number.
            not_finite=np.array([row.get("not_finite", 0) for row in self.rows], np.int64),
            count=np.array([row["count"] for row in self.rows], np.int64),
            resets=tuple(resets),
            reports=tuple(reports),
            evaluated=tuple(evaluated),
        )

    def _admit(self, state: Any, account: StreamAccount) -> Sum:
        """Returns the sum that a state holds.

        Raises ValueError for a state whose next update would be charged too little.
        """
        visits = account.visits
        row = next_row(self.adapter, state)
        unfinished = self.step % self.adapter.accumulate != 0 or row != 0
        held = visits.under_way(self.name)
        if unfinished and held is not None:
            return held
        pending = jax.tree.leaves([getattr(state, "pending", None), row and state.rows.buffers])
        if unfinished and any(np.any(np.asarray(leaf)) for leaf in pending):
            whole = "a period of correlated noise" if row else "an update"
            raise ValueError(
                f"state is in the middle of {whole}, but it is not the newest state that this "
                "account has charged for it. Its pending sum or noise would be in two releases and "
                "paid for in one. Continue from the newest state with its account, or from "
                "adapter.reset(state), which drops both."
            )
        if any(self.entering.release in releases for releases in visits.counts.values()):
            raise ValueError(
                "state has been served before, so the account would confuse its next update with "
                "a charged one. Continue from the state of `Served`, or from "
                "state._replace(key=adapter.init().key)."
            )
        return self.entering

    def _recount(self) -> None:
        """Counts the visits in the workdir's notes. This charges them if the ledger lacks them."""
        last = -1
        entered = None
        if self.account is not None:
            release.check_history(self.till.notes(), self.account.ledger)
        for note in self.till.notes():
            number = note["batch"]
            token = note["token"]
            # A batch that was released again has a note for each time, and enters one sum.
            if number != last:
                last = number
                held = entered or self._new_sum(note["at"])
                # Notes of version 0.1 are of independent noise.
                self.entering = self._next(held, note["at"], note.get("row", 0))
            if number < len(self.rows):
                self.noted[number] = note["records"]
            if self.account is not None:
                units = _units_of(note["records"])
                payment = BatchPayment(self.account, units, self.entering, self.run)
                with payment.reserve(label="charged again on resuming", token=token):
                    entered = payment.entered
        if last < len(self.rows):
            held = entered or self._new_sum(self.step)
            self.entering = self._next(held, self.step, next_row(self.adapter, self.state))

    def _next(self, held: Sum, step: int, row: int) -> Sum:
        """Returns the sum that the batch at a step enters. It may be that of the batch before."""
        if step % self.adapter.accumulate == 0 and row == 0:
            return self._new_sum(step)
        return held

    def _new_sum(self, step: int) -> Sum:
        return Sum(f"{self.name}/{step // self.adapter.accumulate}")

    def _save(self) -> None:
        assert self.files is not None and self.run is not None
        place = {"run": self.run, "batches": str(len(self.rows)), "step": str(self.step)}
        self.files.save(self.adapter.parts(self.state), self._terms | place)

    @property
    def _unit(self) -> Any:
        return "photograph" if self.account is None else self.account.unit

    @property
    def _terms(self) -> dict[str, str]:
        """The settings that may not change in a workdir."""
        return {
            "unit": self._unit,
            "accumulate": str(self.adapter.accumulate),
            "event": _words(self.adapter),
            "clip_norm": repr(_clip_norm(self.adapter)),
        }

    @functools.cached_property
    def _constants(self) -> str:
        return release.digest(self.adapter.constants)


class _Files:
    """The files in a workdir besides the till's: the state, and a row for each batch."""

    def __init__(self, workdir: pathlib.Path):
        self.workdir = workdir
        (workdir / _ROWS).touch(mode=0o600)
        self._rows = MetricsWriter(workdir / _ROWS, fsync=True)

    def close(self) -> None:
        self._rows.close()

    def add(self, number: int, row: dict[str, Any]) -> None:
        """Writes the row of a batch durably."""
        self._rows.write(number, **row)

    def save(self, parts: Any, terms: dict[str, str]) -> None:
        """Replaces the state atomically.

        Only its owner may read it, because a pending sum has no noise yet.
        """
        arrays = {}
        for number, leaf in enumerate(jax.tree.leaves(jax.device_get(parts))):
            array = np.asarray(leaf, order="C")
            # Number formats that NumPy lacks, such as bfloat16, are stored as integers of the same
            # size.
            if array.dtype.isbuiltin != 1:
                array = array.view(f"u{array.dtype.itemsize}")
            arrays[str(number)] = array
        facts = terms | {"kind": _kind(parts)}
        digest = release.digest([arrays, facts])
        data = safetensors.numpy.save(arrays, facts | {"digest": digest})
        write_durably(self.workdir / _STATE, data, mode=0o600)

    def load(
        self, adapter: Any, terms: dict[str, str]
    ) -> tuple[Any, str, list[dict[str, Any]]] | None:
        """Returns the stored state, the name of the run and its rows, or None without a state."""
        path = self.workdir / _STATE
        if not path.exists():
            return None
        # Left by a process that was killed.
        (self.workdir / f"{_STATE}.tmp").unlink(missing_ok=True)
        with understood(path, _DAMAGED):
            arrays, facts = _read_state(path, {*terms, "kind", "run", "batches", "step"})
        different = [name for name in terms if terms[name] != facts[name]]
        # An unfinished sum was clipped to the old norm, and needs noise for that norm. So do the
        # updates of a period of correlated noise.
        finished = int(facts["step"]) % adapter.accumulate == 0 and _correlation(adapter) is None
        if finished and "clip_norm" in different:
            different.remove("clip_norm")
        if different:
            raise ValueError(
                f"{shown(self.workdir)} holds a stream with another {', '.join(different)}. Use a "
                "new workdir."
            )
        empty = adapter.init()
        leaves, structure = jax.tree.flatten(adapter.parts(empty))
        if facts["kind"] != _kind(adapter.parts(empty)):
            raise ValueError(
                f"{shown(path)} holds the state of another adapter. Use a new workdir."
            )
        state_leaves = [
            jax.device_put(array.view(leaf.dtype))
            for array, leaf in zip(arrays, leaves, strict=True)
        ]
        state = adapter.whole(jax.tree.unflatten(structure, state_leaves), empty.key)
        # A batch whose row was written, but not its state, is served again.
        self._rows.truncate_after(int(facts["batches"]))
        rows = read_metrics(self.workdir / _ROWS)
        if len(rows) != int(facts["batches"]):
            raise ValueError(
                f"{shown(self.workdir / _ROWS)} is damaged: it has {len(rows)} of "
                f"{facts['batches']} rows. {_DAMAGED}"
            )
        return state, facts["run"], rows


def _read_state(path: pathlib.Path, names: set[str]) -> tuple[list[np.ndarray], dict[str, str]]:
    """Returns the arrays of a file and its facts, which must be those of `names`."""
    with safetensors.safe_open(path, framework="numpy") as file:
        facts = file.metadata()
        keys = [str(number) for number in range(len(file.keys()))]
        arrays = {key: file.get_tensor(key) for key in keys}
    digest = facts.pop("digest", None)  # files of the first version have none
    intact = digest in (None, release.digest([arrays, facts]))
    if not intact or not facts.keys() <= names:
        raise ValueError("it does not hold the state that was written.")
    missing = sorted(names - facts.keys())
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}.")
    return list(arrays.values()), facts


def _event(adapter: Any) -> DpEvent:
    return getattr(adapter.method, "event", NonPrivateDpEvent())


def _correlation(adapter: Any) -> CorrelatedNoise | None:
    return adapter.method.noise if isinstance(adapter.method, Private) else None


def _words(adapter: Any) -> str:
    """Returns the event of a release, and the strategy of its correlated noise, as text."""
    noise = _correlation(adapter)
    return to_json(_event(adapter)) + (f" {noise!r}" if noise else "")


def _clip_norm(adapter: Any) -> float | None:
    """Returns the largest norm of a record's contribution, or None for a method without privacy."""
    if not isinstance(adapter.method, Private):
        return None
    return adapter.method.sensitivity("zero_out")


def _compared(batch: Batch, logits: np.ndarray) -> dict[str, Any]:
    """Compares predictions with labels. Nothing here raises because of a record's values."""
    judged = judge(logits, np.asarray(batch.labels))
    correct = judged.correct[batch.mask]
    domains = np.array(batch.domains)
    hits = {}
    for domain in dict.fromkeys(batch.domains):
        of_domain = correct[domains == domain]
        hits[domain] = [int(of_domain.sum()), len(of_domain)]
    return {
        "correct": int(correct.sum()),
        "not_finite": int((~judged.finite[batch.mask]).sum()),
        "count": len(correct),
        "hits": hits,
    }


def _name(adapter: Any, state: Any) -> str:
    """Names a state and the clip norm of its pending sum without revealing its key."""
    key = np.asarray(jax.random.key_data(state.key)).tobytes()
    place = f"{int(state.step)} {_clip_norm(adapter)!r}"
    noise = _correlation(adapter)
    if noise is not None:
        place += f" {noise!r}"
    return hashlib.sha256(key + place.encode()).hexdigest()[:16]


def _kind(parts: Any) -> str:
    """Returns the path, dtype and shape of each array of a state, as text."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(parts)
    rows = [(jax.tree_util.keystr(path), str(leaf.dtype), leaf.shape) for path, leaf in leaves]
    return json.dumps(rows)


def _as_text(units: Sequence[Hashable], domains: Sequence[str]) -> str:
    """Returns the units and domains of a batch as text, for the notes of the workdir."""

    def plain(unit: Hashable) -> Any:
        named = identifier(unit, "units")
        if isinstance(unit, tuple):
            return [plain(element) for element in unit]
        # Texts and numbers are noted as they are given. The notes of a run from before identifiers
        # have both.
        if isinstance(unit, str):
            return str(unit)
        if isinstance(unit, int | np.integer):
            return int(unit)
        return named

    return json.dumps([list(map(plain, units)), list(map(str, domains))])


def _units_of(records: str) -> tuple[Hashable, ...]:
    """Returns the units in a text of `_as_text`. JSON has lists in place of tuples."""

    def unit(noted: Any) -> Hashable:
        return tuple(map(unit, noted)) if isinstance(noted, list) else noted

    units, _ = parse_json(records)
    return tuple(map(unit, units))
