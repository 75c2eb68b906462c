"""The error of a ledger that must not be used."""

import os
import sqlite3

from jaxdp.files import shown


class LedgerDamaged(ValueError):
    """A ledger that does not hold everything that was spent.

    Nothing was charged, and no run may use it.
    """


def damaged(path: str | os.PathLike[str], what: str, *, gone: bool = False) -> LedgerDamaged:
    """Returns the error for a ledger that must not be used.

    Args:
        path: The ledger.
        what: What is wrong with it, in words that follow its path.
        gone: Whether nothing of the ledger is left, so that an older copy is no remedy.
    """
    path = shown(path)
    quoted = repr(os.fspath(path))
    if gone:
        last_remedy = "delete what is left of it, and a new ledger is made"
    else:
        last_remedy = f"`jaxdp ledger accept {path}` makes an intact older copy valid"
    return LedgerDamaged(
        f"ledger {quoted} {shown(what).removesuffix('.')}. It would under-count, so it is not "
        f"used. Restore `{path}` and `{path}.head` from a backup. If no better copy exists, "
        f"{last_remedy}. Runs that were charged since then charge it again when they are resumed "
        "in their workdirs."
    )


def is_damage(error: sqlite3.Error) -> bool:
    """Returns whether an error of SQLite shows a damaged file, and not a full disk or a lock."""
    # The low byte of an extended code is the primary one.
    primary_code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    # SQLite reports text that is not UTF-8 without a code of its own.
    return primary_code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "UTF-8" in str(error)
