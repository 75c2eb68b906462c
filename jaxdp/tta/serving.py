"""The loop over a stream: reset, pay, step, compare, keep.

Each batch is one release of the till (`jaxdp.release`). Its noise and second views come from the
secret of that release, so no state can put one noise on two gradients. A killed process resumes in
its workdir. It repeats the interrupted batch bit for bit and does not pay again. If anything
differs, it draws fresh noise and pays again.
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxdp import release
from jaxdp.data.ids import identifier
from jaxdp.data.labels import check_labels, check_logits, judge
from jaxdp.files import parse_json, shown, understood, write_durably
from jaxdp.privacy.events import DpEvent, NonPrivateDpEvent, to_json
from jaxdp.privacy.ledger import BudgetExceeded
from jaxdp.report import MetricsWriter, progress_bar, read_metrics
from jaxdp.transforms.parameters import check_finite
from jaxdp.tta.accounts import BatchPayment, StreamAccount, Sum
from jaxdp.tta.adapter import Adapter
from jaxdp.tta.monitor import CollapseMonitor, CollapseReport
from jaxdp.tta.private import Private
from jaxdp.tta.streams import Batch

_LABEL = "test-time adaptation"
_STATE, _ROWS = "state.safetensors", "served.jsonl"
_DAMAGED = "Restore the workdir from a copy, or use a new one. A new one serves and charges all batches again."


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The results of a stream. Everything but `state.params`, `resets` and `reports` is NOT
    protected.

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


def serve(
    adapter: Any,
    stream: Iterable[Batch],
    *,
    account: StreamAccount | None,
    workdir: str | os.PathLike[str] | None = None,
    state: Any = None,
    seed: bytes | None = None,
    monitor: CollapseMonitor | None = None,
    deliver: Callable[[Batch, np.ndarray], None] | None = None,
    evaluate: Callable[[Batch, Any], dict[str, float]] | None = None,
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
        monitor: A monitor that measures the parameters after every `monitor.every` batches.
        deliver: `deliver(batch, logits [B, C])` after every batch. Give each row to the owner of
            its record only. After a crash the call is repeated for the interrupted batch only.
        evaluate: `evaluate(batch, params) -> {name: number}` after every batch. It may read public
            or held-out images under the batch's domain, never the stream itself.

    Returns:
        `Served`. A record without a label (-1), or with a label that is no class, counts as wrong.
        So accuracies are meaningless for a stream without labels. If a stream ends in the middle of
        an update (`Adapter.accumulate`) with a workdir, disk and returned state drop the unfinished
        sum, so that no secret stays. Its batches are predicted and paid for, and make no update.
        After an exception the sum stays, so that a later call can resume. Without a workdir the
        state keeps the sum, for a call with the same account.

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
        account that charged its batches accepts a state in the middle of an update, and only the
        newest state of that update. Otherwise two noisy sums of one pending sum would be charged as
        one. If an interrupted batch cannot be repeated, for example because the model calls back to
        Python, its update is charged again with all of its batches.
    """
    if account is not None and account.event != (event := _event(adapter)):
        raise ValueError(
            f"account charges {account.event} for a release, but the method has {event}. "
            "Make a StreamAccount with event=method.event."
        )
    if workdir is not None:
        pathlib.Path(workdir).mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        till = stack.enter_context(release.Till(workdir, seed=seed))
        files = (
            None
            if till.workdir is None
            else stack.enter_context(contextlib.closing(_Files(till.workdir)))
        )
        loop = _Loop(adapter, account, till, files, monitor, deliver, evaluate)
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
    monitor: CollapseMonitor | None
    deliver: Callable[[Batch, np.ndarray], None] | None
    evaluate: Callable[[Batch, Any], dict[str, float]] | None

    state: Any = dataclasses.field(init=False)
    step: int = dataclasses.field(init=False)  # of the state
    name: str = dataclasses.field(init=False)  # of the updates: the workdir's, or the first state's
    entering: Sum = dataclasses.field(init=False)  # the sum that the next batch enters
    rows: list[dict[str, Any]] = dataclasses.field(
        default_factory=list
    )  # the results of each batch
    run: str | None = None  # the workdir, for the account
    noted: dict[int, str] = dataclasses.field(
        default_factory=dict
    )  # the records of finished batches
    seen: int = 0  # batches of the stream
    fitting: set[Any] = dataclasses.field(
        default_factory=set
    )  # shapes and dtypes of images with fitting logits

    def begin(self, state: Any) -> None:
        """Continues the workdir's state, or begins with the given one."""
        kept = self.files.load(self.adapter, self._terms) if self.files else None
        if kept is not None:
            state, self.run, self.rows = kept
        else:
            state = self.adapter.init() if state is None else state
        check_finite(state.params, argument="params of the state")
        self.step, self.name = int(state.step), self.run or _name(self.adapter, state)
        self.entering = self._next(None, self.step)
        if kept is None and self.account is not None:
            self.entering = self._admit(state, self.account)
        # A new key gives the returned state another name, and fixes the kind of key that the
        # program is compiled for.
        self.state = state._replace(key=release.stream(release.new_seed(), _LABEL))
        if kept is not None:
            self._recount()
        elif self.files is not None:
            if self.till.notes():
                raise ValueError(
                    f"{shown(self.files.workdir)} holds notes of a stream, but its state is "
                    "missing. Use a new workdir."
                )
            self.run = self.name = release.new_seed().hex()
            self.entering = self._next(None, self.step)
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
        payment = (
            None
            if self.account is None
            else BatchPayment(self.account, units, self.entering, self.run)
        )

        def compute(secret: bytes) -> tuple[Any, np.ndarray, dict[str, Any]]:
            key = release.stream(secret, "noise and second views")
            after, logits = self.adapter.step(before, batch.images, key=key, mask=batch.mask)
            logits = np.asarray(logits)
            row: dict[str, Any] = {
                **_compared(batch, logits),
                "resets": [number] if batch.reset else [],
                "report": None,
                "evaluated": None if self.evaluate is None else self.evaluate(batch, after.params),
            }
            if self.monitor is not None and (number + 1) % self.monitor.every == 0:
                report = self.monitor(after.params)
                row["report"] = dataclasses.asdict(report)
                if self.monitor.reset and report.collapsed:
                    after = self.adapter.reset(after)
                    row["resets"].append(number + 1)
            return after, logits, row

        def keep(made: tuple[Any, np.ndarray, dict[str, Any]]) -> None:
            self.state, logits, row = made
            if self.deliver is not None:
                self.deliver(batch, logits)
            self.step += 1
            self.rows.append(row)
            if self.files is not None:
                self.files.add(len(self.rows), row)
                self._save()

        self.till.release(
            release.Release(
                label=_LABEL,
                charges=() if payment is None else payment,
                compute=compute,
                facts=lambda: [
                    self._constants,
                    self.adapter.parts(before),
                    batch.images,
                    batch.mask,
                    repr(units),
                ],
                programs=lambda: [self.adapter.lowered_text(before, batch.images)],
                keep=keep,
                note={"batch": number, "at": self.step, "records": records},
                once_in=self.run or "",
            )
        )
        self.entering = self._next(None if payment is None else payment.entered, self.step)

    def _check_shapes(self, batch: Batch) -> None:
        """Raises TypeError or ValueError for labels or logits of another shape or dtype, before the
        batch is paid.
        """
        count = len(batch.mask)
        check_labels(np.asarray(batch.labels), count, name="labels of a batch")
        kind = (batch.images.shape, batch.images.dtype)
        if isinstance(self.adapter, Adapter) and kind not in self.fitting:
            logits = jax.eval_shape(
                self.adapter.apply_fn, self.state.params, jnp.asarray(batch.images)
            )
            check_logits(logits, name="apply_fn(params, images)", count=count)
            self.fitting.add(kind)

    def end(self) -> None:
        """Refuses a stream that ended too early. Drops an unfinished sum from the workdir."""
        if self.files is None:
            return
        if self.seen < len(self.rows):
            raise ValueError(
                f"stream has {self.seen} batches, but {len(self.rows)} were served in "
                f"{self.files.workdir}. Give the same stream from its beginning, or use a new "
                "workdir."
            )
        if self.step % self.adapter.accumulate:
            self.state = self.state._replace(
                pending=jax.tree.map(jnp.zeros_like, self.state.pending)
            )
            self._save()

    def served(self) -> Served:
        """Returns the results of the batches so far."""
        if self.account is not None and self.files is None and self.entering.batches:
            self.account.leave_unfinished(_name(self.adapter, self.state), self.entering)
        hits: dict[str, Any] = {}
        for row in self.rows:
            for domain, found in row["hits"].items():
                hits[domain] = np.add(hits.get(domain, 0), found)
        reports = [
            (number, row["report"])
            for number, row in enumerate(self.rows)
            if row["report"] is not None
        ]
        return Served(
            state=self.state,
            accuracy={domain: float(right / count) for domain, (right, count) in hits.items()},
            correct=np.array([row["correct"] for row in self.rows], np.int64),
            # Rows of version 0.1 lack the number.
            not_finite=np.array([row.get("not_finite", 0) for row in self.rows], np.int64),
            count=np.array([row["count"] for row in self.rows], np.int64),
            resets=tuple(number for row in self.rows for number in row["resets"]),
            reports=tuple((number, CollapseReport(**report)) for number, report in reports),
            evaluated=tuple(row["evaluated"] for row in self.rows if row["evaluated"] is not None),
        )

    def _admit(self, state: Any, account: StreamAccount) -> Sum:
        """Returns the sum that a state holds. Refuses a state whose next update would be charged
        too little.
        """
        visits, unfinished = account.visits, self.step % self.adapter.accumulate != 0
        if unfinished and (held := visits.under_way(self.name)) is not None:
            return held
        if unfinished and any(
            np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(getattr(state, "pending", None))
        ):
            raise ValueError(
                "state is in the middle of an update, but it is not the newest state that this "
                "account has charged for that update. Its pending sum would be in two updates and "
                "paid for in one. Continue from the newest state with its account, or from "
                "adapter.reset(state), which drops the pending sum."
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
        last, entered = -1, None
        if self.account is not None:
            release.check_history(self.till.notes(), self.account.ledger)
        for row in self.till.notes():
            number, token = row["batch"], row["token"]
            if number != last:
                last, self.entering = number, self._next(entered, row["at"])
            if number < len(self.rows):
                self.noted[number] = row["records"]
            if self.account is not None:
                payment = BatchPayment(
                    self.account, _units_of(row["records"]), self.entering, self.run
                )
                with payment.reserve(label="charged again on resuming", token=token):
                    entered = payment.entered
        if last < len(self.rows):
            self.entering = self._next(entered, self.step)

    def _next(self, entered: Sum | None, step: int) -> Sum:
        """Returns the sum that the batch at a step enters: the sum of the batch before it, or a new
        one.
        """
        if entered is None or step % self.adapter.accumulate == 0:
            return Sum(f"{self.name}/{step // self.adapter.accumulate}")
        return entered

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
            "event": to_json(_event(self.adapter)),
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
        """Replaces the state atomically. Only its owner may read it, because a pending sum has no
        noise yet.
        """
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(parts))]
        # Number formats that NumPy lacks, such as bfloat16, are stored as integers of the same
        # size.
        plain = [x if x.dtype.isbuiltin == 1 else x.view(f"u{x.dtype.itemsize}") for x in arrays]
        named = {str(number): np.asarray(array, order="C") for number, array in enumerate(plain)}
        described = terms | {"kind": _kind(parts)}
        data = safetensors.numpy.save(
            named, described | {"digest": release.digest([named, described])}
        )
        write_durably(self.workdir / _STATE, data, mode=0o600)

    def load(
        self, adapter: Any, terms: dict[str, str]
    ) -> tuple[Any, str, list[dict[str, Any]]] | None:
        """Returns the stored state, the name of the run and the rows of its batches, or None
        without a state.
        """
        if not (path := self.workdir / _STATE).exists():
            return None
        (self.workdir / f"{_STATE}.tmp").unlink(
            missing_ok=True
        )  # left by a process that was killed
        with understood(path, _DAMAGED), safetensors.safe_open(path, framework="numpy") as file:
            found = file.metadata()
            named = {
                str(number): file.get_tensor(str(number)) for number in range(len(file.keys()))
            }
            stated = found.pop("digest", None)  # files of the first version have none
            names = (*terms, "kind", "run", "batches", "step")
            if stated not in (None, release.digest([named, found])) or not found.keys() <= set(
                names
            ):
                raise ValueError("it does not hold the state that was written.")
            if missing := [name for name in names if name not in found]:
                raise ValueError(f"it lacks {', '.join(missing)}.")
        # An unfinished sum was clipped to the old norm, and needs noise for that norm.
        unfinished = int(found["step"]) % adapter.accumulate != 0
        different = [
            name
            for name in terms
            if terms[name] != found[name] and (name != "clip_norm" or unfinished)
        ]
        if different:
            raise ValueError(
                f"{shown(self.workdir)} holds a stream with another {', '.join(different)}. Use a "
                "new workdir."
            )
        empty = adapter.init()
        leaves, structure = jax.tree.flatten(adapter.parts(empty))
        if found["kind"] != _kind(adapter.parts(empty)):
            raise ValueError(
                f"{shown(path)} holds the state of another adapter. Use a new workdir."
            )
        arrays = [
            jax.device_put(array.view(x.dtype))
            for array, x in zip(named.values(), leaves, strict=True)
        ]
        self._rows.truncate_after(int(found["batches"]))
        rows = read_metrics(self.workdir / _ROWS)
        if len(rows) != int(found["batches"]):
            raise ValueError(
                f"{shown(self.workdir / _ROWS)} is damaged: it has {len(rows)} of "
                f"{found['batches']} rows. {_DAMAGED}"
            )
        return adapter.whole(jax.tree.unflatten(structure, arrays), empty.key), found["run"], rows


def _event(adapter: Any) -> DpEvent:
    return getattr(adapter.method, "event", NonPrivateDpEvent())


def _clip_norm(adapter: Any) -> float | None:
    """Returns the largest norm of a record's contribution, or None for a method that is not
    private.
    """
    return adapter.method.sensitivity("zero_out") if isinstance(adapter.method, Private) else None


def _compared(batch: Batch, logits: np.ndarray) -> dict[str, Any]:
    """Compares predictions with labels. Nothing here raises because of a record's values."""
    judged = judge(logits, np.asarray(batch.labels))
    right = judged.correct[batch.mask]
    of = {
        domain: right[np.array(batch.domains) == domain] for domain in dict.fromkeys(batch.domains)
    }
    hits = {domain: [int(part.sum()), len(part)] for domain, part in of.items()}
    not_finite = int((~judged.finite[batch.mask]).sum())
    return {
        "correct": int(right.sum()),
        "not_finite": not_finite,
        "count": len(right),
        "hits": hits,
    }


def _name(adapter: Any, state: Any) -> str:
    """Names a state and the clip norm of its pending sum without revealing its key."""
    key = np.asarray(jax.random.key_data(state.key)).tobytes()
    return hashlib.sha256(key + f"{int(state.step)} {_clip_norm(adapter)!r}".encode()).hexdigest()[
        :16
    ]


def _kind(parts: Any) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(parts)[0]
    return json.dumps(
        [[jax.tree_util.keystr(path), str(leaf.dtype), leaf.shape] for path, leaf in leaves]
    )


def _as_text(units: Sequence[Hashable], domains: Sequence[str]) -> str:
    """Returns the units and domains of a batch as text, for the notes of the workdir."""

    def plain(unit: Hashable) -> Any:
        named = identifier(unit, "units")
        if isinstance(unit, tuple):
            return [plain(part) for part in unit]
        # Texts and numbers are noted as they are given. The notes of a run from before identifiers
        # have both.
        if isinstance(unit, str | int | np.integer):
            return str(unit) if isinstance(unit, str) else int(unit)
        return named

    return json.dumps([[plain(unit) for unit in units], [str(domain) for domain in domains]])


def _units_of(records: str) -> tuple[Hashable, ...]:
    def unit(noted: Any) -> Hashable:
        return tuple(map(unit, noted)) if isinstance(noted, list) else noted

    return tuple(map(unit, parse_json(records)[0]))
