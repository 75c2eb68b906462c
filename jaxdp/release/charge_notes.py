"""The charges that a workdir notes, and the settlement of those that a ledger lacks.

A run notes each charge after its reservation, with the head of the ledger. So a ledger that lost
the charge, or that is restored from an older copy, is charged again when the run is resumed.
"""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxdp.privacy import Account, DpEvent, Ledger
from jaxdp.privacy.events import from_json, to_json
from jaxdp.privacy.ledger import Head
from jaxdp.report import read_metrics

FILE = "charges.jsonl"


def notes(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the notes of a workdir, a row for each paid release.

    A row has "token" and "charges", which are (account, event) pairs. "partition" is the part of
    the data set that paid, if it was one.
    """
    path = workdir / FILE
    rows = read_metrics(path) if path.exists() else []
    for row in rows:
        # The first release of jaxdp noted one event a row, and no name for a single account.
        if "charges" not in row:
            row["charges"] = [[row.get("dataset", ""), row["event"]]]
    return rows


def have(rows: Sequence[Mapping[str, Any]], charges: Sequence[tuple[Account, DpEvent]]) -> bool:
    """Returns whether a row of `notes` has the same charges. A single account may be renamed."""

    def comparable(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return sorted(("" if len(charges) == 1 else name, event) for name, event in pairs)

    asked = comparable((account.name, to_json(event)) for account, event in charges)
    return any(comparable(row["charges"]) == asked for row in rows)


def settle(
    rows: Sequence[Mapping[str, Any]],
    account_of: Callable[[str], Account | None],
    *,
    partition: str | None = None,
) -> None:
    """Charges accounts for rows of `notes` that they lack.

    A last row that was only reserved is committed. `account_of` returns the account for a noted
    name, with "" for a charge of the first release. None omits the charge. `partition` is the part
    that paid for rows of earlier versions, which noted none.

    Raises:
      BudgetExceeded: An account has no room.
      LedgerDamaged: A ledger that the notes know has lost history.
    """
    # Every ledger is checked before one of them is charged.
    for ledger in _ledgers(rows, account_of):
        check_history(rows, ledger)
    for row in rows:
        # The last row may be of a process that died before it committed. Its charge is a replay,
        # which marks the reservation committed.
        is_last = row is rows[-1]
        for name, event in row["charges"]:
            account = account_of(name)
            if account is None or (account.paid(row["token"]) and not is_last):
                continue
            part = row.get("partition", partition)
            words = {"label": "charged again on resuming", "token": row["token"]}
            with account.spend(from_json(event), partition=part, **words):
                pass


def _ledgers(
    rows: Sequence[Mapping[str, Any]], account_of: Callable[[str], Account | None]
) -> list[Ledger]:
    """Returns the ledgers of all noted accounts, each once."""
    ledgers: list[Ledger] = []
    for row in rows:
        for name, _ in row["charges"]:
            account = account_of(name)
            if account is not None and account.ledger not in ledgers:
                ledgers.append(account.ledger)
    return ledgers


def check_history(rows: Sequence[Mapping[str, Any]], ledger: Ledger) -> None:
    """Raises LedgerDamaged if a ledger's history lacks the newest of its heads in `notes`."""
    # The newest head that the ledger knows vouches for all earlier ones, because spends are linked.
    for row in reversed(rows):
        known = ledger.contains(Head(*row["head"])) if "head" in row else None
        if known is False:
            raise ledger.damaged(
                f"has lost history: a run was charged as spend {row['head'][1]}, which it lacks."
            )
        if known:
            return
