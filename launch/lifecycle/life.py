"""The order of the stages, and the ledger's permission before they run.

The config is an `ml_collections.ConfigDict` as in `configs/lifecycle_digits.py`, whose comments
explain each field.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import tempfile
import traceback
from typing import Any

from ml_collections import ConfigDict

from jaxdp.files import write_json
from jaxdp.privacy import BudgetExceeded, ComposedDpEvent, DpEvent, Hold, Ledger
from jaxdp.release import alone
from jaxdp.version import __version__

from .. import frame, plans
from ..settings import check_numbers
from . import cache, document, parts
from .stages import STAGES, accounts, computations

# Only the owners of these parts may read errors about them.
_PRIVATE = {"private", "sources", "stream", "client"}


class Interrupted(KeyboardInterrupt):
    """A user stopped the lifecycle. The message names the stage and says how to continue."""


def run(config: Any, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Runs the stages that are not done yet, and writes the report.

    The config determines the charges of all stages that are not done. The ledger holds room for all
    of them together while the lifecycle runs. No stage touches private data unless everything fits.
    If a stage fails, the finished ones stay usable. The stages that build on it are skipped, and so
    are all later stages that would spend. The next call tries again. A stage with the same config,
    data and predecessors is not run again, and nothing is paid for twice (`cache`). The report and
    lifecycle.json are written after every stage.

    Args:
      config: The config of the lifecycle.
      workdir: The folder of the lifecycle, made if it is missing. Afterwards it holds:
          report.html      for people
          certificates.html  certificates without noise, NOT private, only with `config.certificates.show`
          ledger.sqlite    the spends of every private data set (`python -m launch.ledger`). `config.ledger` can name
                           another place, which several lifecycles may share
          lifecycle.json   the config, and the state and folder of each stage
          <stage>/<key>/   its result (stage.json), metrics (metrics.jsonl), checkpoints and parameters

    Returns:
      {stage: {"status": "done", "failed" or "skipped", "message": why, "folder": relative to the
      workdir}}.

    Raises:
      ValueError: Nothing is spent. The config of a stage that would spend is inconsistent, the
        ledger has a data set with other terms, or another process runs in the workdir.
      FileNotFoundError: The data is missing. The message says how to get it.
      BudgetExceeded: The stages that are not done do not all fit into the budgets, and no stage was
        run. Or `config.ledger` is not the ledger that paid for the workdir's releases, and it has
        no room for them.
      OSError: The workdir or the ledger cannot be written, for example because the disk is full.
      Interrupted: The user pressed Ctrl-C. The ledger counts all reservations. Another call
          continues.
    """
    root = pathlib.Path(workdir)
    check_numbers(config)
    frame.check_watch(config)
    cache.check_release(root / "lifecycle.json")
    data = parts.load(config.data)
    with alone(root), Ledger(config.ledger or root / "ledger.sqlite") as ledger:
        for name, terms in accounts(config).items():
            ledger.register(name, records=data.records(name), **terms)
        cache.settle(root, ledger, data.private.name)
        plan = _Plan(config, data, root)
        states = {
            stage.name: {"status": "waiting", "message": "not run yet", "folder": ""}
            for stage in STAGES
        }
        done: dict[str, cache.Done] = {}
        with contextlib.ExitStack() as held:
            hold, first = held.enter_context(plan.hold(ledger, done)), True
            for stage in STAGES:
                try:
                    if first and stage.charges is not None:  # the public stages before it are done
                        hold, first = held.enter_context(plan.hold(ledger, done)), False
                    states[stage.name] = _advance(stage, plan, done, states, hold)
                except KeyboardInterrupt as error:
                    message = "stopped by the user, and the next run continues"
                    states[stage.name] |= {"status": "interrupted", "message": message}
                    _write(config, states, root)
                    raise Interrupted(
                        f"Interrupted in stage {stage.name!r}. The stages before it are kept, and "
                        "the ledger counts all reservations. The same command continues from here "
                        "and pays nothing twice."
                    ) from error
                _write(config, states, root)
    bad = [name for name, state in states.items() if state["status"] != "done"]
    print(
        f"\n{document.summary(root)}\n\nIn {root}: report.html, lifecycle.json and a folder for "
        "each stage."
    )
    if bad:
        print(
            f"Not done: {', '.join(bad)}. The same command tries again, with or without another "
            "config."
        )
    return states


def show_plan(config: Any, workdir: str | os.PathLike[str] | None, target: str = "") -> None:
    """Prints what the stages that are not done would charge, and what the training takes. Writes
    nothing.

    `target` is as in `launch.frame.run`.

    Raises:
      ValueError, FileNotFoundError: As `run`.
    """
    root = None if workdir is None else pathlib.Path(workdir)
    check_numbers(config)
    data = parts.load(config.data)
    with tempfile.TemporaryDirectory() as nowhere:
        asked = _Plan(config, data, pathlib.Path(nowhere) if root is None else root).requests({})
    charged: dict[str, list[DpEvent]] = {}
    for name, event in asked:
        charged.setdefault(name, []).append(event)
    items: list[plans.Item] = [
        plans.Item(
            f"{name}, by all stages that are not done",
            name,
            ComposedDpEvent(charged[name]),
            {"records": data.records(name), **terms},
            ledger=config.ledger or "ledger.sqlite",
        )
        for name, terms in accounts(config).items()
        if name in charged
    ]
    if data.private.name in charged:
        items += computations(config, data)
    plans.show(items, root, target)


class _Plan:
    """The spends of the stages that are not done."""

    def __init__(self, config: Any, data: parts.Parts, root: pathlib.Path):
        self.config, self.data, self.root = config, data, root
        self._charges = functools.cache(lambda stage: stage.charges(config, data))

    def folder(self, stage: cache.Stage, done: dict[str, cache.Done]) -> pathlib.Path:
        """Returns the folder of a stage's result. The stages that it builds on must be in
        `done`.
        """
        before = {name: done[name] for name in stage.after}
        return self.root / stage.name / stage.key(self.config, self.data, before)

    def requests(self, done: dict[str, cache.Done]) -> list[tuple[str, DpEvent]]:
        """Returns the (account, event) pairs of all stages that are not done and cannot turn out to
        be done.

        A stage may have a finished folder while a public stage before it has not run yet. If that
        public stage repeats its earlier result, the folder is found.
        """
        done, private, asked = dict(done), set[str](), list[tuple[str, DpEvent]]()
        for stage in STAGES:
            fresh = not private.isdisjoint(stage.after)  # fresh noise gives a new result
            folder = None
            if not fresh and all(name in done for name in stage.after):
                folder = self.folder(stage, done)
                if (found := cache.find(folder)) is not None:
                    done[stage.name] = found
                    continue
            elif not fresh and any(self.root.glob(f"{stage.name}/*/stage.json")):
                continue
            if fresh or stage.charges is not None:
                private.add(stage.name)
            if stage.charges is not None:
                charges = self._charges(stage)
                asked += (charges if folder is None else plans.outstanding(charges, folder)).items()
        return asked

    def hold(self, ledger: Ledger, done: dict[str, cache.Done]) -> Hold:
        """Holds the room of all requests. It replaces the room that this workdir's lifecycle held
        before.
        """
        key = hashlib.sha256(os.fspath(self.root.resolve()).encode()).hexdigest()
        return ledger.hold(self.requests(done), key=f"lifecycle {key}", label="lifecycle")


def _advance(
    stage: cache.Stage,
    plan: _Plan,
    done: dict[str, cache.Done],
    states: dict[str, dict[str, str]],
    hold: Hold,
) -> dict[str, str]:
    """Runs one stage if it is possible and not done. Puts it into `done` and returns its state."""
    if missing := [name for name in stage.after if name not in done]:
        return _say(
            stage, "skipped", f"it builds on {' and '.join(missing)}, which failed or was skipped"
        )
    folder = plan.folder(stage, done)
    if (found := cache.find(folder)) is not None:
        done[stage.name] = found
        return _say(stage, "done", "done before with this config and data", folder, plan.root)
    failed = [
        other.name
        for other in STAGES
        if other.charges is not None and states[other.name]["status"] == "failed"
    ]
    if stage.charges is not None and failed:
        return _say(
            stage, "skipped", f"nothing more is spent until {' and '.join(failed)} can be done"
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = ConfigDict(
        {part: plan.config[part].copy_and_resolve_references() for part in stage.config}
    )

    print(f"{stage.name}: running", flush=True)
    try:
        before = {name: done[name] for name in stage.after}
        account = functools.partial(hold.account, label=stage.name)
        watching = functools.partial(frame.watching, plan.config, folder)
        result = stage.run(cache.Job(config, plan.data, before, folder, account, watching))
        done[stage.name] = cache.keep(folder, result)
    except Exception as error:
        with contextlib.suppress(OSError):  # the disk may be what failed
            (folder / "error.txt").write_text(traceback.format_exc())
        state = _say(stage, "failed", f"{type(error).__name__}: {error}", folder, plan.root)
        if _PRIVATE.isdisjoint(stage.data) or isinstance(error, BudgetExceeded):
            return state
        # Others read the report, and an error may depend on private images.
        return state | {
            "message": f"{type(error).__name__}: error.txt in its folder has the message for the "
            "owners"
        }
    (folder / "error.txt").unlink(missing_ok=True)
    return _say(stage, "done", "", folder, plan.root)


def _say(
    stage: cache.Stage,
    status: str,
    message: str,
    folder: pathlib.Path | None = None,
    root: pathlib.Path | None = None,
) -> dict[str, str]:
    print(f"{stage.name}: {status}" + (f", {message}" if message else ""), flush=True)
    where = "" if folder is None or root is None else str(folder.relative_to(root))
    return {"status": status, "message": "" if status == "done" else message, "folder": where}


def _write(config: Any, states: dict[str, dict[str, str]], root: pathlib.Path) -> None:
    """Writes the state, the accounts and the report."""
    write_json(
        root / "lifecycle.json",
        {
            "version": __version__,
            "versions": frame.versions(),
            "format": cache.FORMAT,
            "config": json.loads(config.to_json()),
            "accounts": list(accounts(config)),
            "stages": states,
        },
    )
    document.write(root)
