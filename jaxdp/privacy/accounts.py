"""What a ledger gives to those who spend: spends, reservations, accounts and holds."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from jaxdp.privacy.accounting import Adjacency
from jaxdp.privacy.events import Counts, DpEvent

if TYPE_CHECKING:
    from jaxdp.privacy.ledger import Ledger

DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Spend:
    """One charge.

    Attributes:
        id: The number of the reservation in this ledger.
        dataset: The dataset's name.
        event: The canonical event that is charged.
        replay: True if the token was already paid for, so that nothing new was charged.
    """

    id: int
    dataset: str
    event: DpEvent
    replay: bool


Charged = TypeVar("Charged", Spend, tuple[Spend, ...])


class Reservation(Generic[Charged]):
    """A charge on disk, as `Ledger.spend` and `Ledger.spend_all` return it.

    `with reservation as spend:` runs the body that the charge pays for. It marks the charge
    committed, or failed if the body raises. A reservation that is never entered stays charged, with
    status "reserved".

    Attributes:
        charged: The `Spend`, or a tuple of them, that `with` yields.
    """

    def __init__(self, ledger: "Ledger", charged: Charged):
        self.charged: Charged = charged
        self._ledger = ledger
        self._entered = False

    def __enter__(self) -> Charged:
        if self._entered:
            raise RuntimeError(
                f"the reservation of {self.charged!r} was entered before, and a charge pays for "
                "one body. Call spend again, with the same token if it is the same release."
            )
        self._entered = True
        return self.charged

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        spends = (self.charged,) if isinstance(self.charged, Spend) else self.charged
        # The error of the body hides a failure to write the mark. The charge counts in any case.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
            self._ledger._finish(spends, "committed" if kind is None else "failed")


@dataclasses.dataclass(frozen=True)
class Account:
    """One dataset of a ledger to spend from, as `Ledger.account` and `Hold.account` return it.

    Attributes:
        ledger: The ledger.
        name: A dataset that is registered in it.
        label: Who spends, for the report. It precedes the labels of single spends. Never put data
            in it.
        held: The hold whose room the spends use, or None.

    Raises:
        ValueError: The dataset is not registered, or `label` is not a string.
    """

    ledger: "Ledger"
    name: str
    label: str = ""
    held: "Hold | None" = None

    def __post_init__(self) -> None:
        check_label(self.label)
        # Raises for a dataset that is not registered.
        self.ledger.adjacency(self.name)

    @property
    def adjacency(self) -> Adjacency:
        """The dataset's neighbouring relation."""
        return self.ledger.adjacency(self.name)

    @property
    def unit(self) -> str:
        """The dataset's unit of privacy."""
        return self.ledger.unit(self.name)

    @property
    def delta(self) -> float | None:
        """The delta that the dataset was registered with, or None."""
        return self.ledger.delta(self.name)

    def labelled(self, label: str | None) -> str:
        """Returns the label of one spend: "account's label: spend's label".

        An empty label is left out, with the colon.
        """
        return ": ".join(part for part in (self.label, label) if part)

    def spend(
        self,
        event: DpEvent,
        *,
        label: str | None = None,
        partition: str | None = None,
        token: str | None = None,
    ) -> Reservation[Spend]:
        """Charges `event` as `Ledger.spend` does. The report shows `labelled(label)`."""
        return self.ledger.spend(self, event, label=label or "", partition=partition, token=token)

    def epsilon(self, *, delta: float | None = None) -> float:
        """Returns `Ledger.epsilon` of this dataset."""
        return self.ledger.epsilon(self.name, delta=delta)

    def remaining(self) -> float:
        """Returns `Ledger.remaining` of this dataset."""
        return self.ledger.remaining(self.name)

    def paid(self, token: str) -> bool:
        """Returns whether a spend with this token was charged (`Ledger.paid`)."""
        return self.ledger.paid(self.name, token)

    def would_cost(self, event: DpEvent, *, delta: float | None = None) -> float:
        """Returns `epsilon` as it would be after spending `event` (`Ledger.would_cost`)."""
        return self.ledger.would_cost(self.name, event, delta=delta)

    def check(self, event: DpEvent) -> None:
        """Raises the errors that spending `event` would raise (`Ledger.check`)."""
        self.ledger.check([(self, event)])

    def hold(
        self,
        event: DpEvent,
        *,
        key: str | None = None,
        label: str | None = None,
        seconds: float = DAY,
    ) -> "Hold":
        """Keeps room for `event` (`Ledger.hold`). `hold.account(account)` spends from the room."""
        return self.ledger.hold([(self, event)], key=key, label=label or "", seconds=seconds)


Requests = Sequence[tuple[str | Account, DpEvent]]


class Hold:
    """Room for later events that only this hold can spend, as `Ledger.hold` returns it.

    `with hold:` closes it at the end. A hold that is not closed lapses by itself. Others can then
    spend its room. The accounting decides whether the proof allows that (early stopping, see the
    module's text):

    * ``accounting="renyi_filter"``: always.
    * ``accounting="pld"`` or ``"rdp"``: only if no released output was the reason to stop, as after
      a crash, an error or a full disk. The proof needs the number of releases fixed in advance.
      Otherwise spend the whole plan, or quote the plan or the budget and not the smaller number
      spent.

    Attributes:
        ledger: The ledger.
        names: The datasets on which it holds room.
    """

    def __init__(self, ledger: "Ledger", id: str, added: Mapping[str, Counts], *, nested: bool):
        self.ledger = ledger
        self.names = tuple(added)
        self._id = id
        # What closing returns, or None for the whole hold.
        self._added = added if nested else None
        self._closed = False

    def account(self, account: str | Account, *, label: str = "") -> Account:
        """Returns an account whose spends use the room of this hold.

        A spend takes the events that it shares with the hold out of the hold. Its other events must
        fit beside everything that is spent and held. A replayed token takes nothing. If the hold
        was closed or taken over or has lapsed, spends are ordinary.

        Args:
            account: A dataset's name, or an account.
            label: The new account's label. "" keeps the label of `account`.

        Raises:
            ValueError: The hold has no room on that dataset, or the account is of another ledger.
        """
        if isinstance(account, Account):
            check_ledger(account, self.ledger)
            name = account.name
            label = label or account.label
        else:
            name = account
        if name not in self.names:
            raise ValueError(
                f"the hold is on {list(self.names)}, not on {name!r}. Name {name!r} in ledger.hold."
            )
        return Account(self.ledger, name, label, self)

    def left(self, name: str) -> DpEvent:
        """Returns the events for which the hold keeps room, or a `NoOpDpEvent`.

        They include the room of a hold that it extends.
        """
        return self.ledger._held_left(self._id, name)

    def close(self) -> None:
        """Returns the unspent room, once.

        A hold that extends another one returns only the room that it added.
        """
        # Two threads that close the hold return its room once.
        with self.ledger._store.lock:
            if not self._closed:
                self.ledger._release(self._id, self._added)
                self._closed = True

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # A hold that cannot be closed lapses. The error of the body hides that failure.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
            self.close()


def check_ledger(account: Account, ledger: "Ledger") -> None:
    """Raises ValueError if an account is of another ledger."""
    if account.ledger is not ledger:
        raise ValueError(
            f"account {account.name!r} belongs to the ledger {account.ledger.path!r}, not to "
            f"{ledger.path!r}. Take it from this ledger: ledger.account({account.name!r})."
        )


def check_label(label: object) -> None:
    """Raises ValueError for a label that is not a string."""
    if not isinstance(label, str):
        raise ValueError(f"label must be a string, got {label!r}.")
