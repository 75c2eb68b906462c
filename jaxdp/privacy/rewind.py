"""The report of a ledger as it was at an earlier spend, computed from a copy of its file."""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from jaxdp.files import write_durably
from jaxdp.privacy import chain, database
from jaxdp.privacy.integrity import COUNTED_TOTALS
from jaxdp.privacy.ledger import Ledger

_LATER_CONTACTS = (
    "DELETE FROM meta WHERE key LIKE 'contact %' AND CAST(substr(key, 9) AS INTEGER) > ?"
)
# A data set that is not named stays if it has spends, so that no page can leave it out.
_LATER_DATASETS = (
    "DELETE FROM datasets WHERE id NOT IN (SELECT dataset FROM spends) AND name NOT IN "
    "(SELECT value FROM json_each(?))"
)
_REOPEN = (
    "UPDATE spends SET status = 'reserved' WHERE status = 'committed' AND id IN "
    "(SELECT value FROM json_each(?))"
)


def report_at(
    path: str | os.PathLike[str],
    spend: int,
    *,
    contacts: int,
    names: Sequence[str],
    unfinished: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns `Ledger.report` as it was after an earlier spend. The ledger stays as it is.

    The chain of a ledger tells the spends until then, and no more. The arguments have the rest.

    Args:
      path: The ledger's file.
      spend: The number of the last spend that counts, 0 for none.
      contacts: The number of rows of `Ledger.contact_history` that count.
      names: The data sets that were registered. One with spends counts in any case.
      unfinished: The numbers of spends that had not committed. One that did not commit until now
        had not then.

    Raises:
      LedgerDamaged, ValueError: There is no such ledger, or it is damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "ledger.sqlite"
        with Ledger(path, read_only=True) as ledger:
            ledger.backup(copy)
            history = ledger.head.ledger
        with contextlib.closing(database.connect(os.fspath(copy))) as db:
            db.execute("BEGIN IMMEDIATE")
            # The sums and holds are those of today. The sums are made again from the spends that
            # are left.
            db.execute("DELETE FROM totals")
            db.execute("DELETE FROM holds")
            db.execute("DELETE FROM spends WHERE id > ?", (spend,))
            db.execute(f"INSERT INTO totals {COUNTED_TOTALS}")
            db.execute(_REOPEN, (json.dumps(list(unfinished)),))
            db.execute(_LATER_CONTACTS, (contacts,))
            db.execute(_LATER_DATASETS, (json.dumps(list(names)),))
            db.execute("COMMIT")
            ledger_id, _, branch = history.partition(".")
            head = chain.last_head(db, ledger_id, branch)
        # A ledger whose head is of a later spend would be refused.
        write_durably(pathlib.Path(f"{copy}.head"), chain.head_text(head))
        with Ledger(copy, read_only=True) as earlier:
            return earlier.report()
