"""What a ledger hands out: an account to spend from, a hold on room in it, and the reservation of a charge.

    account = ledger.account("cifar10/train", label="run 7")
    with account.hold(plan) as hold:  # nobody else can take the room
        for event in events:
            with hold.account(account).spend(event, label="fine-tuning"):
                ...  # touch the private data here

All three are handles: `jaxdp.privacy.ledger.Ledger` keeps the state, in its file.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from jaxdp.privacy.accounting import Adjacency
from jaxdp.privacy.events import DpEvent

if TYPE_CHECKING:
    from jaxdp.privacy.ledger import Ledger

DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Spend:
    """One charge.

    Attributes:
        id: number of the reservation in this ledger.
        dataset: the dataset's name.
        event: the canonical event that is charged.
        replay: True if the token was already paid for, so nothing new was charged.
    """

    id: int
    dataset: str
    event: DpEvent
    replay: bool


Charged = TypeVar("Charged", Spend, tuple[Spend, ...])


class Reservation(Generic[Charged]):
    """A charge that is on disk already; `Ledger.spend` and `Ledger.spend_all` return it.

    `with reservation as spend:` runs the body that the charge pays for and marks the charge committed, or failed if
    the body raises. A reservation that is never entered stays charged, with status "reserved".

    Attributes:
        charged: the `Spend`, or a tuple of them: what `with` yields.
    """

    def __init__(self, ledger: "Ledger", charged: Charged):
        self.charged: Charged = charged
        self._ledger = ledger
        self._entered = False

    def __enter__(self) -> Charged:
        if self._entered:
            raise RuntimeError(
                f"the reservation of {self.charged!r} was entered before, and a charge pays for one body; call spend "
                "again, with the same token if it is the same release"
            )
        self._entered = True
        return self.charged

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish("committed")
        else:  # If the mark cannot be written, what the body raised matters more, and the charge counts anyway.
            with contextlib.suppress(OSError):
                self._finish("failed")

    def _finish(self, status: Literal["committed", "failed"]) -> None:
        self._ledger._finish((self.charged,) if isinstance(self.charged, Spend) else self.charged, status)


@dataclasses.dataclass(frozen=True)
class Account:
    """One dataset of a ledger, to be spent from; `Ledger.account` and `Hold.account` return it.

    Functions that touch private data take an account in place of a ledger, a dataset's name and a label.

    Attributes:
        ledger: the ledger.
        name: a dataset that is registered in it.
        label: who spends, for people who read the report; "" leaves the labels of single spends as they are. Never
            put data in it.
        held: the hold whose room the spends take, or None.

    Raises:
        ValueError: the dataset is not registered, or `label` is not a string.
    """

    ledger: "Ledger"
    name: str
    label: str = ""
    held: "Hold | None" = None

    def __post_init__(self) -> None:
        if not isinstance(self.label, str):
            raise ValueError(f"label must be a string, got {self.label!r}")
        self.ledger.adjacency(self.name)

    @property
    def adjacency(self) -> Adjacency:
        """The dataset's neighbouring relation."""
        return self.ledger.adjacency(self.name)

    @property
    def delta(self) -> float | None:
        """The delta that the dataset was registered with, or None."""
        return self.ledger.delta(self.name)

    def labelled(self, label: str | None) -> str:
        """Returns the label of one spend: "account's label: spend's label", or the one of them that is not empty."""
        return ": ".join(part for part in (self.label, label) if part)

    def spend(
        self, event: DpEvent, *, label: str | None = None, partition: str | None = None, token: str | None = None
    ) -> Reservation[Spend]:
        """Charges `event`; see `Ledger.spend`. The report shows `labelled(label)`."""
        return self.ledger.spend(self, event, label=label or "", partition=partition, token=token)

    def epsilon(self, *, delta: float | None = None) -> float:
        """Returns epsilon of everything reserved so far; see `Ledger.epsilon`."""
        return self.ledger.epsilon(self.name, delta=delta)

    def remaining(self) -> float:
        """Returns the budget's epsilon less what is spent; see `Ledger.remaining`."""
        return self.ledger.remaining(self.name)

    def paid(self, token: str) -> bool:
        """Returns whether a spend with this token was charged; see `Ledger.paid`."""
        return self.ledger.paid(self.name, token)

    def would_cost(self, event: DpEvent, *, delta: float | None = None) -> float:
        """Returns what `epsilon` would be after spending `event`; spends nothing. See `Ledger.would_cost`."""
        return self.ledger.would_cost(self.name, event, delta=delta)

    def check(self, event: DpEvent) -> None:
        """Raises what spending `event` would raise; spends nothing. See `Ledger.check`."""
        self.ledger.check([(self, event)])

    def hold(self, event: DpEvent, *, key: str | None = None, label: str | None = None, seconds: float = DAY) -> "Hold":
        """Keeps room for `event`; see `Ledger.hold`. `hold.account(account)` spends from the room."""
        return self.ledger.hold([(self, event)], key=key, label=label or "", seconds=seconds)


class Hold:
    """Room that nobody else can take, for events to be spent later; `Ledger.hold` returns it.

    `with hold:` closes it at the end, however the body ends. A hold that is not closed lapses by itself.

    Returning room. A hold is no spend, so whatever is not spent can be spent by others afterwards. Whether the proof
    allows that is the question of early stopping (see `jaxdp.privacy.ledger`):

    * ``accounting="renyi_filter"``: always.
    * ``accounting="pld"`` or ``"rdp"``: the proof needs the number of releases fixed in advance. Returned room is
      sound only if the reason to stop was not read off what was released: a crash, an error, a full disk. Otherwise
      spend the whole plan, or quote the plan or the budget and not the smaller number spent.

    Attributes:
        ledger: the ledger.
        names: the datasets on which it holds room.
    """

    def __init__(self, ledger: "Ledger", id: str, added: Mapping[str, Mapping[DpEvent, int]], *, nested: bool):
        self.ledger = ledger
        self.names = tuple(added)
        self._id = id
        self._added = added
        self._nested = nested
        self._closed = False

    def account(self, account: str | Account, *, label: str = "") -> Account:
        """Returns an account whose spends come out of this hold.

        A spend takes the events that it shares with the hold out of the hold. What it has beyond them is charged in
        addition, and must fit beside what is spent and held. A replayed token takes nothing. Under a hold that was
        closed, taken over or has lapsed, spends are ordinary ones.

        Args:
            account: a dataset's name, or an account, whose label is kept.
            label: the account's label; with an `Account`, "" keeps the one that it has.

        Raises:
            ValueError: the hold has no room on that dataset.
        """
        name = account.name if isinstance(account, Account) else account
        if name not in self.names:
            raise ValueError(f"the hold is on {list(self.names)}, not on {name!r}; name {name!r} in ledger.hold")
        kept = account.label if isinstance(account, Account) else ""
        return Account(self.ledger, name, label or kept, self)

    def left(self, name: str) -> DpEvent:
        """Returns the events that the hold still keeps room for on a dataset; a `NoOpDpEvent` if there are none.

        The hold of an account that spends from another hold counts the other one's room as well.
        """
        return self.ledger._held_left(self._id, name)

    def close(self) -> None:
        """Returns what was never spent; does nothing if that was done before.

        A hold that was made under another one returns what it added to that one.
        """
        with self.ledger._lock:
            if not self._closed:
                self.ledger._release(self._id, self._added if self._nested else None)
                self._closed = True

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # A hold that cannot be closed lapses; what the body raised matters more.
            with contextlib.suppress(OSError):
                self.close()


Request = tuple[str | Account, DpEvent]
Requests = Sequence[Request]
