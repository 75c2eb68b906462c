"""The charges that a workdir notes, and the settlement of those that a ledger lacks.

A cell that is done is not run again. So no till sees that a ledger was restored from a copy that is
older than the charges of the cell, or is another one. The frame looks before it calls a run
finished.
"""

import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.files import shown, write_durably
from jaxdp.finetune.tune import SECRET
from jaxdp.privacy import Account, BudgetExceeded, Ledger
from jaxdp.release import Mark, mark_again, notes, settle
from jaxdp.release.charge_notes import FILE

from . import ledgers
from .code import ASIDE
from .workdir import cell_folder

if TYPE_CHECKING:
    from .running import Work


def noted(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders in and below a folder that note charges."""
    return _folders_with(FILE, folder)


def _folders_with(name: str, folder: pathlib.Path) -> list[pathlib.Path]:
    found = []
    # Another process may delete folders meanwhile, which `walk` leaves out.
    for path, folders, files in os.walk(folder):
        # The runs of an unfinished search pay a ledger in memory.
        folders[:] = [below for below in folders if below != SECRET]
        if name in files:
            found.append(pathlib.Path(path))
    return sorted(found)


def keep(folder: pathlib.Path) -> None:
    """Copies the notes of the scratch folder of a cell, which is deleted, beside the row."""
    kept = notes(folder)
    tokens = {row["token"] for row in kept}
    for scratch in noted(folder / "scratch"):
        rows = notes(scratch)
        # A row without a charge counts only if it stands for a mark.
        paid = [row for row in rows if row["charges"] or "first_step" in row]
        kept += [row for row in paid if row["token"] not in tokens]
    if len(kept) > len(tokens):
        lines = [f"{json.dumps(row)}\n" for row in kept]
        write_durably(folder / FILE, "".join(lines).encode())


def lacking(root: pathlib.Path, ledger: pathlib.Path | None) -> list[pathlib.Path]:
    """Returns the folders of a workdir with notes that no ledger has.

    Args:
      root: The workdir.
      ledger: The ledger of its private sets, if it is known.

    Raises:
      LedgerDamaged: A ledger has lost history, or an older copy of it was not accepted.
    """
    rows = {folder: notes(folder) for folder in noted(root)}
    inside = [folder / ledgers.NAME for folder in _folders_with(ledgers.NAME, root)]
    own = {path for path in inside if "cells" in path.relative_to(root).parts}
    for path in inside if ledger is None else [ledger, *inside]:
        # A ledger among the cells is that of its cell.
        payer = path.parent if path in own else root
        asked = [folder for folder in rows if folder.is_relative_to(payer)]
        if asked and path.exists():
            with Ledger(path, read_only=True) as opened:
                for folder in asked:
                    if _has(opened, rows[folder]):
                        del rows[folder]
    return list(rows)


def _has(ledger: Ledger, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a ledger has all charges and marks of a folder."""
    names = ledger.names()
    for place, row in enumerate(rows):
        for name, _ in row["charges"]:
            # An account that is not there may have another name now.
            known = [name] if name in names else names
            if not any(ledger.paid(other, row["token"]) for other in known):
                return False
        mark = _mark(ledger, rows[:place], row)
        if mark is not None and not (mark.is_lost or ledger.labels_of(mark.token)):
            return False
    return True


def _mark(
    ledger: Ledger, before: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
) -> Mark | None:
    """Returns the mark that stands for a note without a charge, or None for another note."""
    paid = [earlier["charges"] for earlier in before if earlier["charges"]]
    if row["charges"] or not row.get("first_step") or not paid:
        return None
    (name, _), *_ = paid[0]
    if name not in ledger.names():
        return None
    return Mark(ledger.account(name), before, row["first_step"])


def settle_cells(work: "Work") -> None:
    """Charges the ledgers of a run for what its cells have noted and no ledger has.

    Raises:
      BudgetExceeded: A ledger has no room for it.
      LedgerDamaged: As `lacking`.
    """
    pays = work.study.account
    if pays is None:
        return
    for folder in lacking(work.root, work.ledger):
        cell = _cell_of(folder, work)
        if cell is None:
            continue
        with pays(cell, work) as account:
            path = account.ledger.path
            rows = notes(folder)
            try:
                settle(rows, functools.partial(_named, account))
                mark_again(rows, account)
            except BudgetExceeded as error:
                error.add_note(
                    f"{shown(work.root)} notes charges that {path} lacks and has no room for. "
                    "They were released, so its files stay as they are."
                )
                raise
            print(f"{path} has been charged for what {shown(folder)} notes.", flush=True)


def _cell_of(folder: pathlib.Path, work: "Work") -> Any:
    """Returns the cell that paid for the notes of a folder, or None if the run does not have it.

    The first cell pays for what all cells share.
    """
    parts = folder.relative_to(work.root).parts
    if parts[:1] == (ASIDE,):
        parts = parts[2:]  # behind its number
    for cell in work.cells:
        own = cell_folder(pathlib.Path(), cell).parts
        if parts[: len(own)] == own:
            return cell
    return None if parts[:1] == ("cells",) else work.cells[0]


def _named(account: Account, name: str) -> Account:
    """Returns the account of a noted name in the ledger of an account."""
    ledger = account.ledger
    # A name that the ledger lacks is an earlier name of this account.
    is_other = name != account.name and name in ledger.names()
    return ledger.account(name, label=account.label) if is_other else account
