"""Whether requests to spend or hold fit the budgets of their datasets."""

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from jaxdp.privacy import holds
from jaxdp.privacy.budget import BudgetCheck, Undecided
from jaxdp.privacy.datasets import dataset_of
from jaxdp.privacy.events import Counts, DpEvent
from jaxdp.privacy.spends import Spends
from jaxdp.privacy.store import Store

Result = TypeVar("Result")


class Request(NamedTuple):
    """Events to spend on a dataset or to hold for.

    Attributes:
        name: The dataset.
        hold: The hold whose room they use, or None.
        label: The label for the report.
        step: The events.
    """

    name: str
    hold: str | None
    label: str
    step: Counts


def names_of(requests: Sequence[Request]) -> list[str]:
    """Returns the datasets of requests, each once, in their order."""
    return list(dict.fromkeys(request.name for request in requests))


def sum_of_steps(requests: Sequence[Request]) -> Counts:
    """Returns the events of all requests together."""
    return sum((request.step for request in requests), Counter[DpEvent]())


class Admission:
    """Admits requests that fit their budgets, and remembers what it had to compute for them."""

    def __init__(self, store: Store, spends: Spends):
        self._store = store
        self._spends = spends
        self._checks: dict[int, BudgetCheck] = {}
        self._prepared: set[DpEvent] = set()

    def settled(
        self,
        work: Callable[[sqlite3.Connection], Result],
        mode: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE",
    ) -> Result:
        """Returns `work(db)` of one transaction.

        The transaction is restarted whenever a PLD has to decide something.
        """
        while True:
            try:
                with self._store.transaction(mode) as db:
                    return work(db)
            except Undecided as error:
                undecided = error
            # This is slow and runs without the write lock. Counts may change meanwhile, so the loop
            # asks again.
            with self._store.lock:
                is_allowed = undecided.decide()
            if not is_allowed:
                raise undecided.refusal()

    def admit(
        self,
        db: sqlite3.Connection,
        requests: Sequence[Request],
        partition: str | None,
        *,
        more_follow: bool,
    ) -> None:
        """Raises unless the requests to each dataset fit beside everything that is spent and held.

        Events that a request takes out of a hold count once. While a program spends what it holds,
        the sum and the verdict do not change.
        """
        for name in names_of(requests):
            dataset = dataset_of(db, name)
            own = [request for request in requests if request.name == name]
            held_by_others, with_own_holds = _beside(holds.held(db, dataset), own)
            # It is an exception, because a PLD must not run while the transaction holds the lock.
            question = Undecided(
                self._checks.setdefault(dataset.id, BudgetCheck(dataset)),
                self._spends.tallies(db, dataset, partition),
                held_by_others=held_by_others,
                with_own_holds=with_own_holds,
                requested=sum_of_steps(own),
                more_follow=more_follow,
            )
            if not question.is_allowed():
                raise question

    def prepare(self, requests: Sequence[Request]) -> None:
        """Computes the losses of events that are new, which is slow.

        It happens before the write lock makes others wait.
        """
        for request in requests:
            if request.step.keys() <= self._prepared:
                continue
            with self._store.transaction("DEFERRED") as db:
                dataset = dataset_of(db, request.name)
                for tally in self._spends.tallies(db, dataset, None):
                    # The losses do not depend on delta, so any will do.
                    tally.plus(request.step).rdp_epsilon(0.5)
            self._prepared |= request.step.keys()


def _beside(held: dict[str | None, Counts], requests: Sequence[Request]) -> tuple[Counts, Counts]:
    """Returns what others hold, and the requests together with what their own holds keep.

    Of a hold {a: 3}, a request {a: 1, b: 1} makes {a: 3, b: 1}: it takes the `a` out of the hold.
    """
    steps: dict[str | None, Counts] = {}
    for request in requests:
        steps[request.hold] = steps.get(request.hold, Counter()) + request.step
    held_by_others: Counts = Counter()
    for hold, counts in held.items():
        if hold not in steps:
            held_by_others += counts
    with_own_holds: Counts = Counter()
    for hold, step in steps.items():
        # The union has the larger count of each event. So what a request takes out of its own hold
        # counts once.
        with_own_holds += held.get(hold, Counter()) | step
    return held_by_others, with_own_holds
