"""The loop over a stream: reset, pay, step, compare."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np
from tqdm import tqdm

from jaxdp.privacy.events import NonPrivateDpEvent
from jaxdp.privacy.ledger import BudgetExceeded
from jaxdp.tta.accounts import StreamAccount
from jaxdp.tta.monitor import CollapseMonitor, CollapseReport
from jaxdp.tta.streams import Batch

Unit = Literal["photograph", "sample"]


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """What came of a stream. Everything but `state.params`, `resets` and `reports` is NOT protected.

    A record's own prediction depends on it directly: tell it to the record's owner, nobody else. Whoever sees
    accuracies or counts of correct predictions learns about single records beyond what the ledger says: publish them
    for public benchmarks, or pay for them separately.

    Attributes:
        state: of the adapter, after the last batch; holds secrets besides its params.
        accuracy: {domain: fraction of its records that were predicted right}, in the order of the stream.
        correct: int64 [T], correct predictions in each batch.
        count: int64 [T], records in each batch.
        resets: numbers of the batches before which the model went back to its source, other than by the adapter.
        reports: (number of the batch after which it was made, report) of the monitor.
    """

    state: Any = dataclasses.field(repr=False)
    accuracy: dict[str, float] = dataclasses.field(repr=False)
    correct: np.ndarray = dataclasses.field(repr=False)
    count: np.ndarray = dataclasses.field(repr=False)
    resets: tuple[int, ...]
    reports: tuple[tuple[int, CollapseReport], ...] = dataclasses.field(repr=False)


def serve(
    adapter: Any,
    stream: Iterable[Batch],
    *,
    account: StreamAccount | None,
    state: Any = None,
    unit: Unit = "photograph",
    monitor: CollapseMonitor | None = None,
    reset_on_collapse: bool = False,
    deliver: Callable[[Batch, np.ndarray], None] | None = None,
    progress: bool = False,
) -> Served:
    """Adapts to a stream batch by batch, paying for each before it is touched.

    Args:
        adapter: an `Adapter`; it decides whether a batch is predicted before or after adapting to it.
        stream: a `Stream`, or any iterable of `Batch`.
        account: what is charged. It has no default: None says that the stream is public, or that somebody else keeps
            the account, and then nothing is charged and nothing guaranteed.
        state: from `adapter.init()` or an earlier call, to go on from; by default a new one. A state is used once:
            noise on two updates hides neither.
        unit: whom the account protects: "photograph", `Batch.units`, or "sample", a photograph under one corruption.
            The same in all calls with one account, which would not know one by the name of the other.
        monitor: looks at the parameters after every `monitor.every` batches.
        reset_on_collapse: go back to the source model when the monitor says that the model collapsed.
        deliver: `deliver(batch, logits [B, C])` after every batch, to give each record's owner its own row, and nobody
            else.
        progress: show a bar with the number of batches.

    Returns:
        `Served`; where the stream has no labels (-1), its accuracies and counts mean nothing. Nothing is written to
        disk but the ledger.

    Formal guarantees:
        With an account, the parameters after all batches together are as private as the ledger says. Resets are public
        (the stream's) or post-processing (the monitor's, of released parameters and public images). Labels are compared
        with predictions in memory and enter nothing else.

    Raises:
        ValueError: the account's event is not the method's; the account has charged for an update that was made from
            this state; unit is unknown; reset_on_collapse without a monitor.
        BudgetExceeded: before the batch that the budget does not allow; what came of those before it is in the
            attribute `served` of the exception.
    """
    if unit not in ("photograph", "sample"):
        raise ValueError(f"unit must be 'photograph' or 'sample', got {unit!r}")
    if reset_on_collapse and monitor is None:
        raise ValueError("reset_on_collapse=True needs a monitor")
    event = getattr(adapter.method, "event", NonPrivateDpEvent())
    if account is not None and account.event != event:
        raise ValueError(f"account charges {account.event} for a release, but the method's is {event}: make it again")
    state = adapter.init() if state is None else state
    if account is not None and state.step % adapter.accumulate == 0 and account.charged(_release(adapter, state)):
        raise ValueError(
            "state has been served from before: its noise is in an update already, and on other records it would "
            "cancel in the difference. Go on from the state that came of that, or from "
            "state._replace(key=adapter.init().key)"
        )
    correct: list[int] = []
    count: list[int] = []
    resets: list[int] = []
    reports: list[tuple[int, CollapseReport]] = []
    hits: dict[str, list[np.ndarray]] = {}

    def served() -> Served:
        return Served(
            state=state,
            accuracy={domain: float(np.concatenate(parts).mean()) for domain, parts in hits.items()},
            correct=np.array(correct, np.int64),
            count=np.array(count, np.int64),
            resets=tuple(resets),
            reports=tuple(reports),
        )

    for number, batch in enumerate(tqdm(stream, unit="batch", disable=not progress)):
        if batch.reset:
            state = adapter.reset(state)
            resets.append(number)
        units = batch.units if unit == "photograph" else batch.samples
        try:
            with account.spend(units, release=_release(adapter, state)) if account else contextlib.nullcontext():
                state, logits = adapter.step(state, batch.images, mask=batch.mask)
                logits = np.asarray(logits)
        except BudgetExceeded as error:
            error.served = served()  # type: ignore[attr-defined]
            raise
        if deliver is not None:
            deliver(batch, logits)
        right = (logits.argmax(axis=-1) == batch.labels)[batch.mask]
        correct.append(int(right.sum()))
        count.append(len(right))
        for domain in dict.fromkeys(batch.domains):
            hits.setdefault(domain, []).append(right[np.array(batch.domains) == domain])
        if monitor is not None and (number + 1) % monitor.every == 0:
            report = monitor(state.params)
            reports.append((number, report))
            if reset_on_collapse and report.collapsed:
                state = adapter.reset(state)
                resets.append(number + 1)
    return served()


def _release(adapter: Any, state: Any) -> tuple[str, int]:
    """Identity of the noisy sum that the next batch enters: the run, known by its noise key, and the update."""
    key = np.asarray(jax.random.key_data(state.key)).tobytes()
    return hashlib.sha256(key).hexdigest()[:16], int(state.step) // adapter.accumulate
