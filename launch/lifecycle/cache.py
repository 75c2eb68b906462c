"""The results of stages: finished ones are found by content, interrupted ones continue, and nothing
is paid for twice.

A stage with a key is a cell of the study, so its folder is `cells/<stage>/<key>` in the workdir,
and row.json in it has the result. The key is a hash of the stage's part of the config, the
fingerprints of its data, the results of the stages before it, and the version of the library. The
result depends on nothing else. So a config that was used before finds its results, and the budget
is not charged again.

A stage touches private data through the functions that a user would call (`finetune.fit`,
`tta.serve`, ...), with an account and with its folder as their workdir. The till in the folder
makes an interrupted release once, and pays for it once.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxdp.files import read_json
from jaxdp.privacy import Account, Ledger
from jaxdp.release import notes
from jaxdp.release import settle as settle_notes

from .. import frame
from .stage import Done


def check_release(root: pathlib.Path) -> None:
    """Raises ValueError for the workdir of a release with another layout. Its stages would not be
    found, and would pay once more.
    """
    # Releases before had a file of states, and a stage's folder was <stage>/<key>.
    if (root / "lifecycle.json").exists() or any(root.glob("*/*/charges.jsonl")):
        raise ValueError(
            f"{root} was made by another release of jaxdp with another layout. Use a new workdir. "
            "You can keep a ledger that config.ledger names."
        )


def find(folder: pathlib.Path) -> Done | None:
    """Returns the finished stage in a folder. None if it is missing or incomplete, or its
    parameters have changed.

    Raises:
      ValueError: Its row.json is damaged.
    """
    path = folder / "row.json"
    if not path.exists():
        return None
    row = read_json(path, keys=("result", "content"))
    is_whole = all((folder / name).exists() for name in row.get("files", ()))
    if not is_whole or _content(folder, row["result"]) != row["content"]:
        return None
    return Done(folder, row["result"], row["content"])


def described(folder: pathlib.Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of a stage: its result, and by what `find` knows that its files are whole."""
    result = json.loads(json.dumps(result))  # as it will be read
    suffixes = (".jsonl", ".safetensors")
    files = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    return {"result": result, "content": _content(folder, result), "files": files}


def settle(root: pathlib.Path, ledger: Ledger, private: str) -> None:
    """Charges a ledger for all noted charges of a workdir that it does not know yet. Usually it
    knows all of them.

    Args:
      root: The workdir.
      ledger: The ledger.
      private: The account of charges without an account name. Fine-tuning of the first release
          noted such charges.

    Raises:
      BudgetExceeded: The charges were made to another ledger, and this one has no room for them.
    """
    cells = root / "cells"
    for folder in frame.noted(cells):
        label = folder.relative_to(cells).parts[0]
        settle_notes(notes(folder), functools.partial(_account, ledger, private, label))


def _account(ledger: Ledger, private: str, label: str, name: str) -> Account:
    return ledger.account(name or private, label=label)


def _content(folder: pathlib.Path, result: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
