"""Marks in a ledger, which say that a state goes on once although its workdir may be copied."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdp.privacy import Account, DpEvent, NoOpDpEvent
from jaxdp.release.identity import digest

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a later chunk charges: nothing, under a token that says that its state goes on once.

    The release before the chunk determines that state bit for bit. So the token of the mark is a
    hash of that release's token and of the chunk's first step. The label names the attempt, and
    repeated bits have equal attempts.

    Attributes:
      account: The account of the run. Only process 0 has it.
      rows: The notes of the workdir before the chunk.
      first: The first step of the chunk.
    """

    account: Account
    rows: Rows
    first: int

    @property
    def _before(self) -> str | None:
        """The token of the release that the chunk goes on from, if the last such note is of it.

        Notes that were copied before the checkpoints end with an earlier one.
        """
        for row in reversed(self.rows):
            if row.get("first_step", self.first) < self.first:
                is_of = row.get("next_step", self.first) == self.first
                return row["token"] if is_of else None
        return None

    @property
    def is_lost(self) -> bool:
        """Whether the notes lack that release, or every payment for the run."""
        is_paid = any(row["charges"] for row in self.rows if "first_step" in row)
        return not is_paid or self._before is None

    @property
    def token(self) -> str:
        """The token of the mark."""
        assert not self.is_lost
        return digest([self._before, self.first])

    @property
    def _attempts(self) -> list[str]:
        """The tokens of the attempts at the chunk that the workdir knows."""
        return [row["token"] for row in self.rows if row.get("first_step") == self.first]

    def is_begun(self) -> bool:
        """Returns whether this workdir or another one has begun the chunk."""
        # The notes of a copied workdir may lack the attempt. The ledger has its mark.
        return bool(self._attempts) or self.account.paid(self.token)

    def is_foreign(self, attempt: str) -> bool:
        """Returns whether the chunk was begun by attempts with other tokens only."""
        attempts = self._attempts
        if attempts and attempt not in attempts:
            return True
        return self.account.paid(self.token) and not self._is_of(attempt)

    def _is_of(self, attempt: str) -> bool:
        """Returns whether the mark in the ledger is that of an attempt.

        It reads the whole history, which happens only for a chunk that was begun before.
        """
        history = self.account.ledger.history(self.account.name)
        (label,) = [row["label"] for row in history if row["token"] == self.token]
        is_of: bool = label.endswith(_of_attempt(attempt))
        return is_of

    @contextlib.contextmanager
    def reserve(self, *, label: str, token: str) -> Iterator[list[tuple[Account, DpEvent]]]:
        """Makes the mark, as a `jaxdp.release.Payment`.

        Raises:
          ValueError: Another process made it since `is_begun`.
        """
        words = {"label": label + _of_attempt(token), "token": self.token}
        reservation = self.account.spend(NoOpDpEvent(), **words)
        # A replay that is not entered leaves the mark of the other attempt as it is.
        if reservation.charged.replay and not self._is_of(token):
            raise ValueError(
                f"workdir holds a run whose step {self.first} another process began just now, in a "
                "copy of this workdir. Nothing is spent. Go on in one of them."
            )
        with reservation:
            yield []


def _of_attempt(token: str) -> str:
    """Returns the end of the label of a mark."""
    return f", attempt {token[:16]}"


def mark_again(rows: Rows, account: Account) -> None:
    """Makes the marks that a ledger lacks, such as one that was restored from an older copy."""
    for place, row in enumerate(rows):
        if not row.get("first_step") or row["charges"]:
            continue
        mark = Mark(account, rows[:place], row["first_step"])
        if mark.is_lost or account.paid(mark.token):
            continue
        label = f"training, steps from {mark.first}, marked again on resuming"
        with mark.reserve(label=label, token=row["token"]):
            pass
