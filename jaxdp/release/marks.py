"""Marks in a ledger, which say that a state goes on once although its workdir may be copied.

A mark is an event without cost. Its token says what happens once, and its label says how. Who
finds the mark of another attempt stops, or pays again.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdp.privacy import Account, DpEvent, NoOpDpEvent
from jaxdp.release.identity import digest

Rows = Sequence[Mapping[str, Any]]

# What a label ends with, before the name of the attempt.
_ATTEMPT = ", attempt "
_NAME = 16  # characters of an attempt in a label, 64 bits


# --- A mark --------------------------------------------------------------------------------------


def is_marked(account: Account, token: str, *, by_others_than: str | None = None) -> bool:
    """Returns whether the account's ledger has a mark, or one of other attempts than the given.

    It looks in all accounts of the ledger. A copy of a workdir may pay from another account, and
    an account may be renamed. Another ledger cannot be seen.
    """
    attempts = {label.rpartition(_ATTEMPT)[2] for label in account.ledger.labels_of(token)}
    if by_others_than is not None:
        attempts.discard(by_others_than[:_NAME])
    return bool(attempts)


@contextlib.contextmanager
def marked(
    account: Account, token: str, *, label: str, attempt: str, refusal: str
) -> Iterator[None]:
    """Makes a mark: an event without cost, under a token that all copies of a workdir share.

    Args:
      account: The account that the mark is in.
      token: What happens once.
      label: The label of the mark, without the attempt.
      attempt: How it happens: a hash, equal for equal bits.
      refusal: The message of the error.

    Raises:
      ValueError: Another attempt has made the mark.
    """
    if is_marked(account, token, by_others_than=attempt):
        raise ValueError(refusal)
    label = f"{label}{_ATTEMPT}{attempt[:_NAME]}"
    reservation = account.spend(NoOpDpEvent(), label=label, token=token)
    # Another process may have been quicker. A replay that is not entered leaves its mark as it is.
    if is_marked(account, token, by_others_than=attempt):
        raise ValueError(refusal)
    with reservation:
        yield


# --- The marks of training -----------------------------------------------------------------------


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
        # The newest note of an earlier chunk. Notes of other releases have no "first_step".
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
        return bool(self._attempts) or is_marked(self.account, self.token)

    def is_foreign(self, attempt: str) -> bool:
        """Returns whether the chunk was begun by attempts with other tokens only."""
        attempts = self._attempts
        if attempts and attempt not in attempts:
            return True
        return is_marked(self.account, self.token, by_others_than=attempt)

    @contextlib.contextmanager
    def reserve(self, *, label: str, token: str) -> Iterator[list[tuple[Account, DpEvent]]]:
        """Makes the mark, as a `jaxdp.release.Payment`.

        Raises:
          ValueError: Another process made it since `is_begun`.
        """
        refusal = (
            f"workdir holds a run whose step {self.first} another process began just now, in a "
            "copy of this workdir. Nothing is spent. Go on in one of them."
        )
        with marked(self.account, self.token, label=label, attempt=token, refusal=refusal):
            yield []


def mark_again(rows: Rows, account: Account) -> None:
    """Makes the marks that a ledger lacks, such as one that was restored from an older copy."""
    for place, row in enumerate(rows):
        # Only later chunks of a run that is one release have a mark. They charge nothing.
        if not row.get("first_step") or row["charges"]:
            continue
        mark = Mark(account, rows[:place], row["first_step"])
        if mark.is_lost or is_marked(account, mark.token):
            continue
        label = f"training, steps from {mark.first}, marked again on resuming"
        with mark.reserve(label=label, token=row["token"]):
            pass
