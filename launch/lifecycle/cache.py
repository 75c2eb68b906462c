"""The results of stages: finished ones are found by content, interrupted ones continue, and nothing
is paid for twice.

The folder of a stage is `<workdir>/<stage>/<key>`. The key is a hash of the stage's part of the
config, the fingerprints of its data, the results of the stages before it, and the version of the
library. The result depends on nothing else. So a config that was used before finds its results, and
the budget is not charged again.

A stage touches private data through the functions that a user would call (`finetune.fit`,
`tta.serve`, ...), with an account and with its folder as their workdir. The till in the folder
makes an interrupted release once, and pays for it once.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from jaxdp.files import read_json, write_json
from jaxdp.privacy import Account, DpEvent, Ledger
from jaxdp.release import notes
from jaxdp.release import settle as settle_notes
from jaxdp.report import Callback
from jaxdp.version import __version__

from .parts import Parts

Charges = dict[str, DpEvent]
FORMAT = 3  # of workdirs, which had no number in the first releases


@dataclasses.dataclass(frozen=True)
class Done:
    """A finished stage.

    Attributes:
      folder: The folder with its files.
      result: The return value of the stage.
      content: A hash of the result and of the parameters in the folder.
    """

    folder: pathlib.Path
    result: dict[str, Any]
    content: str


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The input of a stage.

    Attributes:
      config: The parts of the lifecycle's config that the stage reads.
      data: The data of the whole lifecycle.
      before: The stages that it builds on, by name.
      folder: The folder of the stage.
      account: `account(name)` of a private data set, labelled with the stage's name. Its spends
          were held before.
      watching: `launch.frame.watching` for the folder of the stage.
    """

    config: Any
    data: Parts
    before: Mapping[str, Done]
    folder: pathlib.Path
    account: Callable[[str], Account]
    watching: Callable[[], AbstractContextManager[list[Callback]]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step in a model's life.

    Attributes:
      name: The name, also of its folder.
      run: `run(job) -> result`, a JSON-able dict. Arrays for other stages go into .safetensors
          files in its folder.
      after: The names of the stages that it builds on.
      data: The parts of the data that it reads.
      config: The parts of the config that it reads.
      charges: `charges(config, data) -> {account: event}`, all that the stage will spend. None if
          it spends nothing.
    """

    name: str
    run: Callable[[Job], dict[str, Any]]
    after: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    charges: Callable[[Any, Parts], Charges] | None = None

    def key(self, config: Any, data: Parts, before: Mapping[str, Done]) -> str:
        """Returns the hash by which the stage's result is found."""
        read = json.loads(config.to_json())
        facts = {
            "stage": self.name,
            "config": {part: read[part] for part in self.config},
            "data": {part: data.fingerprints(part) for part in self.data},
            "before": {name: before[name].content for name in self.after},
            "version": __version__,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def check_release(path: pathlib.Path) -> None:
    """Raises ValueError if lifecycle.json at `path` was written by a release with another
    layout.
    """
    if path.exists() and read_json(path).get("format") != FORMAT:
        raise ValueError(
            f"{path.parent} was made by another release of jaxdp with another layout. Use a new "
            "workdir. You can keep a ledger that config.ledger names."
        )


def find(folder: pathlib.Path) -> Done | None:
    """Returns the finished stage in a folder. None if it is missing or incomplete, or its
    parameters have changed.

    Raises:
      ValueError: Its stage.json is damaged.
    """
    path = folder / "stage.json"
    if not path.exists():
        return None
    kept = read_json(path, keys=("result", "content"))
    whole = all((folder / name).exists() for name in kept.get("files", ()))
    if not whole or _content(folder, kept["result"]) != kept["content"]:
        return None
    return Done(folder, kept["result"], kept["content"])


def keep(folder: pathlib.Path, result: dict[str, Any]) -> Done:
    """Marks a stage as finished."""
    result = json.loads(json.dumps(result))
    done = Done(folder, result, _content(folder, result))
    files = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".jsonl", ".safetensors")
    )
    write_json(folder / "stage.json", {"result": result, "content": done.content, "files": files})
    return done


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
    for path in sorted(root.glob("*/*/charges.jsonl")):
        label = path.parent.parent.name
        settle_notes(notes(path.parent), functools.partial(_account, ledger, private, label))


def _account(ledger: Ledger, private: str, label: str, name: str) -> Account:
    return ledger.account(name or private, label=label)


def _content(folder: pathlib.Path, result: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
