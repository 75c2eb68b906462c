"""A model's whole life from a config: every stage once, one ledger, one report.

The config is an `ml_collections.ConfigDict` as in `configs/lifecycle_digits.py`, whose comments say what each field
means.
"""

import contextlib
import json
import os
import pathlib
import traceback
from typing import Any

from ml_collections import ConfigDict

from jaxdp.lifecycle import cache, document, parts
from jaxdp.lifecycle.stages import STAGES, accounts
from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.report.workdir import alone, write_json
from jaxdp.version import __version__

# What only the owners of private images may read.
_PRIVATE = {"private", "sources", "stream"}


class Interrupted(KeyboardInterrupt):
    """Somebody stopped the lifecycle; the message says in which stage, and how to go on."""


def run(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Runs the stages that are not done yet, and writes the report.

    A stage that fails leaves the others usable: what builds on it is skipped, the others go on, and it is tried again
    by the next call. A stage whose config, data and predecessors are as they were is not run again, and nothing is
    paid for twice (`jaxdp.lifecycle.cache`). All of it is written after every stage.

    Args:
      config: the lifecycle.
      workdir: its directory, made if needed. It holds afterwards:
          report.html      for people
          ledger.sqlite    what every private data set paid (`python -m launch.ledger`), unless `config.ledger` names
                           another place, which several lifecycles may share
          lifecycle.json   the config, and for each stage its state and folder
          <stage>/<key>/   its result (stage.json), figures, metrics (metrics.jsonl), checkpoints and parameters

    Returns:
      {stage: {"status": "done", "failed" or "skipped", "message": why, "folder": relative to the workdir}}.

    Raises:
      ValueError: the config is inconsistent, the ledger knows a data set on other terms, or another process runs in
        the workdir. Before anything is spent.
      FileNotFoundError: the data is not there; the message says how to get it.
      BudgetExceeded: `config.ledger` is another ledger than the one that the workdir's releases were charged to, and
        has no room for them.
      OSError: the workdir or the ledger cannot be written, for example because the disk is full.
      Interrupted: by Ctrl-C. The ledger counts what was reserved; another call goes on.
    """
    root = pathlib.Path(workdir)
    data = parts.load(config.data)
    with alone(root), Ledger(config.ledger or root / "ledger.sqlite") as ledger:
        for name, terms in accounts(config).items():
            ledger.register(name, **terms)
        cache.settle(root, ledger, data.private.name)
        states = {stage.name: {"status": "waiting", "message": "not run yet", "folder": ""} for stage in STAGES}
        done: dict[str, cache.Done] = {}
        for stage in STAGES:
            try:
                states[stage.name] = _advance(stage, config, data, done, ledger, root)
            except KeyboardInterrupt as error:
                states[stage.name] |= {"status": "interrupted", "message": "stopped by the user; the next run goes on"}
                _write(config, states, ledger, root)
                raise Interrupted(
                    f"Interrupted in stage {stage.name!r}. The stages before it are kept, and the ledger counts "
                    "everything that was reserved. The same command goes on from here and pays nothing twice."
                ) from error
            _write(config, states, ledger, root)
    bad = [name for name, state in states.items() if state["status"] != "done"]
    print(f"\n{document.summary(root)}\n\nIn {root}: report.html, lifecycle.json and a folder for each stage.")
    if bad:
        print(f"Not done: {', '.join(bad)}. The same command tries again, with or without another config.")
    return states


def _advance(
    stage: cache.Stage,
    config: Any,
    data: parts.Parts,
    done: dict[str, cache.Done],
    ledger: Ledger,
    root: pathlib.Path,
) -> dict[str, str]:
    """Runs one stage unless it is done or cannot be; puts it into `done` and returns its state."""
    if missing := [name for name in stage.after if name not in done]:
        return _say(stage, "skipped", f"it builds on {' and '.join(missing)}, which failed or was skipped")
    before = {name: done[name] for name in stage.after}
    folder = root / stage.name / stage.key(config, data, before)
    if (found := cache.find(folder)) is not None:
        done[stage.name] = found
        return _say(stage, "done", "done before with this config and data: nothing to do", folder, root)
    folder.mkdir(parents=True, exist_ok=True)
    read = ConfigDict({part: config[part].copy_and_resolve_references() for part in stage.config})
    print(f"{stage.name}: running", flush=True)
    try:
        result = stage.run(cache.Job(read, data, before, folder, ledger))
        done[stage.name] = cache.keep(folder, result)
    except Exception as error:
        with contextlib.suppress(OSError):  # the disk may be what failed
            (folder / "error.txt").write_text(traceback.format_exc())
        state = _say(stage, "failed", f"{type(error).__name__}: {error}", folder, root)
        if _PRIVATE.isdisjoint(stage.data) or isinstance(error, BudgetExceeded):
            return state
        # The report is for others, and what an error says may depend on the private images.
        return state | {"message": f"{type(error).__name__}; error.txt in its folder says more, to the data's owners"}
    (folder / "error.txt").unlink(missing_ok=True)
    return _say(stage, "done", "", folder, root)


def _say(
    stage: cache.Stage, status: str, message: str, folder: pathlib.Path | None = None, root: pathlib.Path | None = None
) -> dict[str, str]:
    print(f"{stage.name}: {status}" + (f", {message}" if message else ""), flush=True)
    where = "" if folder is None or root is None else str(folder.relative_to(root))
    return {"status": status, "message": "" if status == "done" else message, "folder": where}


def _write(config: Any, states: dict[str, dict[str, str]], ledger: Ledger, root: pathlib.Path) -> None:
    """Makes what is known so far readable: the state, the accounts, the report."""
    write_json(
        root / "lifecycle.json",
        {
            "version": __version__,
            "config": json.loads(config.to_json()),
            "accounts": list(accounts(config)),
            "stages": states,
        },
    )
    document.write(root)
