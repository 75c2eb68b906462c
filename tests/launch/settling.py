"""Workdirs whose ledgers are replaced by older copies. The study charges what they lack."""

import json
import pathlib
import shutil
from typing import Any

from jaxdp.privacy import Ledger
from jaxdp.privacy.store import accept
from launch import frame
from tests.launch import tiny


def restore(copy: Any, path: Any) -> None:
    """Puts an older copy in place of a ledger, as docs/howto/run_it_for_a_team.md says."""
    for end in ("-wal", "-shm"):
        pathlib.Path(f"{path}{end}").unlink(missing_ok=True)
    for end in ("", ".head"):
        shutil.copy(f"{copy}{end}", f"{path}{end}")
    accept(path)


def charges(path: Any) -> list[tuple[str, str, str]]:
    with Ledger(path, read_only=True) as ledger:
        rows = ledger.history()
    return sorted((row["dataset"], str(row["token"]), str(row["event"])) for row in rows)


def begin(root: pathlib.Path, *names: str) -> None:
    """Makes the ledgers of a workdir and copies of them, before a study runs there."""
    for path in (root / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        Ledger(path).backup(path.with_suffix(".copy"))


def check(study: Any, config: Any, root: pathlib.Path, *names: str) -> None:
    """Checks that each ledger is charged for what it lacks, and not for what another one has.

    `root` holds a finished run whose ledgers `begin` made.
    """
    result = json.loads((root / "result.json").read_text())
    paths = [root / name for name in names]
    before = [charges(path) for path in paths]
    assert all(before)
    for path in paths:
        restore(path.with_suffix(".copy"), path)
        assert not charges(path)
        assert frame.run(tiny.undrawn(study), config, root) == result
        assert [charges(path) for path in paths] == before
