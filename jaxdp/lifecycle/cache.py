"""What is kept of a stage: finished ones are found by content, interrupted ones go on, and nothing is paid for twice.

A stage's folder is `<workdir>/<stage>/<key>`. The key is a hash of all that the result depends on: the stage's part of
the config, the fingerprints of its data, what the stages before it made, and the version of the library. So a changed
config finds what was made with it before, if anything was, and the budget is not charged again.

A stage touches private data inside `Job.release`, which pays under a token first. All noise of the release is derived
from the token and a secret seed in the folder: a stage that was interrupted and is run again repeats the same release
bit for bit, and the ledger does not charge it again. The seed is deleted when the stage ends.
"""

import dataclasses
import functools
import hashlib
import hmac
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdp.finetune.loop import VARIABLES, processor, stored_seed
from jaxdp.lifecycle.parts import Parts
from jaxdp.models import load_params, save_params
from jaxdp.privacy import DpEvent, Ledger
from jaxdp.privacy.events import from_json, to_json
from jaxdp.report import MetricsWriter, read_metrics
from jaxdp.report.workdir import write_json
from jaxdp.version import __version__


@dataclasses.dataclass(frozen=True)
class Done:
    """A finished stage.

    Attributes:
      folder: with its files.
      result: what the stage returned.
      content: a hash of the result and of the parameters that the stage left in its folder.
    """

    folder: pathlib.Path
    result: dict[str, Any]
    content: str


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What a stage is given.

    Attributes:
      config: the parts that it reads, of the lifecycle's config.
      data: of the whole lifecycle.
      before: the stages that it builds on, by name.
      folder: its own.
      ledger: of all private data.
    """

    config: Any
    data: Parts
    before: Mapping[str, Done]
    folder: pathlib.Path
    ledger: Ledger

    def release(
        self, requests: Sequence[tuple[str, DpEvent]], compute: Callable[[bytes], dict[str, Any]], *, label: str
    ) -> dict[str, Any]:
        """Pays for a release by all data sets or none, makes it, and keeps it; what is kept is not made again.

        Args:
          requests: (account, event) pairs.
          compute: `compute(secret) -> arrays`, a nested dict, all of which the events pay for. Nothing else may touch
            private data. It must be deterministic, with all randomness from its 16 secret bytes, which other programs,
            data, versions or machines do not share. A stage makes one release.
          label: for people who read the ledger.

        Returns:
          What `compute` returned.

        Raises:
          BudgetExceeded: nothing was computed or charged.
        """
        path = self.folder / "released.safetensors"
        if not path.exists():
            events = [[name, to_json(event)] for name, event in requests]
            seed = stored_seed(self.folder / "secret_seed")
            facts = json.dumps([self.folder.name, events, _program(), _machine()])
            token = hmac.digest(seed, b"token" + facts.encode(), "sha256").hex()
            with self.ledger.spend_all(requests, label=label, token=token):
                with MetricsWriter(self.folder / "charges.jsonl", fsync=True) as charges:
                    for number, (name, event) in enumerate(events):
                        charges.write(number, dataset=name, event=event, token=token)
                save_params(path, compute(hmac.digest(seed, b"release" + token.encode(), "sha256")[:16]))
        return load_params(path)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step in a model's life.

    Attributes:
      name: also of its folder.
      run: `run(job) -> result`, a JSON-able dict; what others need besides goes into .safetensors files in its folder.
      after: names of the stages that it builds on.
      data: the parts of the data that it reads.
      config: the parts of the config that it reads.
    """

    name: str
    run: Callable[[Job], dict[str, Any]]
    after: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    config: tuple[str, ...] = ()

    def key(self, config: Any, data: Parts, before: Mapping[str, Done]) -> str:
        """The hash by which the stage's result is found."""
        read = json.loads(config.to_json())
        facts = {
            "stage": self.name,
            "config": {part: read[part] for part in self.config},
            "data": {part: data.fingerprints(part) for part in self.data},
            "before": {name: before[name].content for name in self.after},
            "version": __version__,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def find(folder: pathlib.Path) -> Done | None:
    """The finished stage in a folder; None if there is none, a file is missing, or parameters are not what it left."""
    path = folder / "stage.json"
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    whole = all((folder / name).exists() for name in kept.get("files", ()))
    if not whole or _content(folder, kept["result"]) != kept["content"]:
        return None
    return Done(folder, kept["result"], kept["content"])


def keep(folder: pathlib.Path, result: dict[str, Any]) -> Done:
    """Makes a stage finished, and forgets its secrets: who learns a seed could subtract the noise."""
    for secret in folder.rglob("secret_seed"):
        secret.unlink()
    result = json.loads(json.dumps(result))
    done = Done(folder, result, _content(folder, result))
    files = sorted(path.name for path in folder.iterdir() if path.suffix in (".png", ".jsonl", ".safetensors"))
    write_json(folder / "stage.json", {"result": result, "content": done.content, "files": files})
    return done


def settle(root: pathlib.Path, ledger: Ledger, account: str) -> None:
    """Tells a ledger everything that was ever charged in a workdir; free where it knows, so usually nothing.

    Args:
      root: the workdir.
      ledger: to tell.
      account: that of charges which name none, those of `jaxdp.finetune.fit`.

    Raises:
      BudgetExceeded: it is another ledger than the one which was charged, and has no room for this.
    """
    for path in sorted(root.glob("*/*/charges.jsonl")):
        for row in read_metrics(path):
            event, label = from_json(row["event"]), f"{path.parent.parent.name}, charged again"
            with ledger.spend(row.get("dataset", account), event, label=label, token=row["token"]):
                pass


def _content(folder: pathlib.Path, result: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def _program() -> str:
    """A hash of this library."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _machine() -> list[Any]:
    """What besides the library decides about the last bits of a computation."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "scipy", "flax", "optax")]
    devices = [f"{device.device_kind} {device.client.platform_version}" for device in jax.devices()]
    flags = sorted(f"{name}={value}" for name, value in jax.config.values.items())
    return [*versions, *devices, *flags, *map(os.environ.get, VARIABLES), platform.node(), *processor()]
