"""The lifecycle as a study: the order of the stages, and the ledger's permission before they run.

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdp.data import DataSpec
from jaxdp.privacy import BudgetExceeded, ComposedDpEvent, DpEvent, Hold, Ledger
from jaxdp.privacy.privacy_warnings import warn_of_another_number
from jaxdp.release import alone
from jaxdp.report import format_table

from .. import frame, plans
from ..config_dict import ConfigDict
from ..settings import check_values
from ..study import PrivateSet
from . import cache, document, parts, references
from .stage import Accounts, Done, Job, Stage
from .stages import known as stages

_State = dict[str, Any]
_FOR_OWNERS = "error.txt in its folder has the message for the owners"


class Interrupted(KeyboardInterrupt):
    """A user stopped the lifecycle. The message names the stage and says how to continue."""


class Step(NamedTuple):
    """A cell: a stage with the key by which its result is found. Only a run knows the keys."""

    stage: str
    key: str = ""


def run(
    config: Any, workdir: str | os.PathLike[str], choice: frame.Choice = frame.DEFAULT
) -> dict[str, Any]:
    """Runs the stages that are not done yet, and writes the report.

    The config determines the charges of all stages that are not done. The ledger holds room for all
    of them together while the lifecycle runs. No stage touches private data unless everything fits.
    If a stage fails, the finished ones stay usable. The stages that build on it are skipped, and so
    are all later stages that would spend. The next call tries again. A stage with the same config,
    data and predecessors is not run again, and nothing is paid for twice (`cache`). The report and
    result.json are written after every stage that runs.

    Args:
      config: The config of the lifecycle.
      choice: What the user says about the ledger, see `launch.frame.ledgers`.
      workdir: The folder of the lifecycle, made if it is missing. Afterwards it holds the files of
          a study (`launch.frame`), of which these are of interest:
          report.html            for people
          certificates.html      certificates without noise, NOT private, only with
                                 `config.certificates.show`
          ledger.sqlite          the spends of every private data set (`python -m launch.ledger`).
                                 `config.ledger` can name another place, which several lifecycles
                                 may share
          result.json            the config, and the state and folder of each stage
          cells/<stage>/<key>/   its result (row.json), metrics (metrics.jsonl), checkpoints and
                                 parameters

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
    states: dict[str, Any] = frame.run(STUDY, config, workdir, choice=choice)["stages"]
    return states


def show_plan(
    config: Any,
    workdir: str | os.PathLike[str] | None,
    target: str = "",
    choice: frame.Choice = frame.DEFAULT,
) -> None:
    """Prints what the stages that are not done would charge, and what the training takes. Writes
    nothing.

    `target` and `choice` are as in `launch.frame.run`.

    Raises:
      ValueError, FileNotFoundError: As `run`.
    """
    check_values(config)
    data = parts.load(config.data)
    root = None if workdir is None else pathlib.Path(workdir)
    with tempfile.TemporaryDirectory() as nowhere:
        life = Life(config, data, pathlib.Path(nowhere) if root is None else root)
        ledger = frame.asked(choice, config, root, _private(life))
        plans.show(list(life.plan()), root, target, ledger=ledger)


def accounts(config: Any) -> Accounts:
    """Returns the terms of the private data sets by their name in the ledger."""
    named: Accounts = {}
    for stage in stages():
        if stage.accounts is not None:
            named |= stage.accounts(config)
    return named


class Life:
    """The stages of one run: which are done, their states, and what the others will spend."""

    def __init__(self, config: Any, data: parts.Parts, root: pathlib.Path):
        references.check(config, is_public=_is_public(config))
        self.config = config
        self.data = data
        self.root = root
        self.stages = stages()
        self.done: dict[str, Done] = {}
        waiting = {"status": "waiting", "message": "not run yet", "folder": ""}
        self.states: dict[str, _State] = {stage.name: dict(waiting) for stage in self.stages}
        self.hold: Hold | None = None
        self.is_behind = False  # whether the report lacks stages that were done before
        self._charges = functools.cache(lambda stage: stage.charges(config, data))

    def step(self, stage: Stage, done: dict[str, Done]) -> Step:
        """Returns the cell of a stage. The stages that it builds on must be in `done`."""
        before = {name: done[name] for name in stage.after}
        return Step(stage.name, stage.key(self.config, self.data, before))

    def folder(self, step: Step) -> pathlib.Path:
        """Returns the folder of a cell."""
        return frame.cell_folder(self.root, step)

    def requests(self) -> list[tuple[str, DpEvent]]:
        """Returns the (account, event) pairs of all stages that will run and spend.

        A stage may have a finished folder while a public stage before it has not run yet. If that
        public stage repeats its earlier result, the folder is found. So such a stage asks for
        nothing now, and is held before the first private stage.
        """
        done = dict(self.done)
        noisy = set[str]()  # will run with fresh noise, or build on such a stage
        pairs: list[tuple[str, DpEvent]] = []
        for stage in self.stages:
            builds_on_noise = not noisy.isdisjoint(stage.after)
            folder = None
            if not builds_on_noise and all(name in done for name in stage.after):
                folder = self.folder(self.step(stage, done))
                finished = cache.find(folder)
                if finished is not None:
                    done[stage.name] = finished
                    continue
            elif not builds_on_noise and any(self.root.glob(f"cells/{stage.name}/*/row.json")):
                continue
            if builds_on_noise or stage.charges is not None:
                noisy.add(stage.name)
            if stage.charges is not None:
                charges = self._charges(stage)
                if folder is not None:
                    charges = plans.outstanding(charges, folder)
                pairs += charges.items()
        return pairs

    def hold_all(self, ledger: Ledger) -> Hold:
        """Holds the room of all requests. It replaces the room that this workdir's lifecycle held
        before.
        """
        key = hashlib.sha256(os.fspath(self.root.resolve()).encode()).hexdigest()
        return ledger.hold(self.requests(), key=f"lifecycle {key}", label="lifecycle")

    def plan(self) -> Iterator[plans.Item]:
        """Yields what all stages that are not done would charge together and compute."""
        charged: dict[str, list[DpEvent]] = {}
        for name, event in self.requests():
            charged.setdefault(name, []).append(event)
        for name, terms in accounts(self.config).items():
            if name in charged:
                yield plans.Item(
                    f"{name}, by all stages that are not done",
                    name,
                    ComposedDpEvent(charged[name]),
                    {"records": self.data.records(name), **terms},
                )
        if self.data.private.name in charged:
            for stage in self.stages:
                if stage.plan is not None:
                    yield from stage.plan(self.config, self.data)


# --- The study ----------------------------------------------------------------------------------


def _open(config: Any, root: pathlib.Path) -> Life:
    cache.check_release(root)
    return Life(config, parts.load(config.data), root)


def _rows(work: frame.Work, cells: Sequence[Any]) -> list[_State]:
    """Runs the stages in their order. Publishes their states after every stage that runs."""
    life: Life = work.shared
    with contextlib.ExitStack() as held:
        held.enter_context(alone(work.root))
        assert work.ledger is not None  # the study has private sets
        ledger = held.enter_context(Ledger(work.ledger, run=frame.run_of(work.root)))
        for name, terms in accounts(work.config).items():
            _register(ledger, name, life.data.records(name), terms)
        cache.settle(work.root, ledger, life.data.private.name)
        life.hold = held.enter_context(life.hold_all(ledger))
        is_first = True
        for stage in life.stages:
            try:
                # All public stages before the first private one are done, so their results are
                # known, and with them which later stages are done.
                if is_first and stage.charges is not None:
                    life.hold = held.enter_context(life.hold_all(ledger))
                    is_first = False
                life.states[stage.name] = _advance(stage, work)
            except KeyboardInterrupt as error:
                life.states[stage.name] |= {
                    "status": "interrupted",
                    "message": "stopped by the user, and the next run continues",
                }
                _publish(work)
                raise Interrupted(
                    f"Interrupted in stage {stage.name!r}. The stages before it are kept, and "
                    "the ledger counts all reservations. The same command continues from here "
                    "and pays nothing twice."
                ) from error
            # A resumed run would write one report for each stage that was done before.
            if not life.is_behind:
                _publish(work)
        if life.is_behind:
            _publish(work)
    return _listed(life)


def _register(ledger: Ledger, name: str, present: int, terms: Mapping[str, Any]) -> None:
    """Registers a data set. One that has grown since keeps its declared number, with a warning."""
    try:
        declared = ledger.records(name)
    except ValueError:  # It is not registered.
        declared = None
    ledger.register(name, records=declared or present, **terms)
    warn_of_another_number(name, registered=declared, present=present, unit=terms["unit"])


def _private(life: Life) -> list[PrivateSet]:
    """Returns the training set. The other parties' sets are named alike in every lifecycle."""
    return [PrivateSet(life.data.private.name, life.data.private, _is_public(life.config))]


def _is_public(config: Any) -> bool:
    return DataSpec(source=config.data.source).is_public


def _listed(life: Life) -> list[_State]:
    return [{"stage": name, **state} for name, state in life.states.items()]


def _publish(work: frame.Work) -> None:
    work.shared.is_behind = False
    work.publish(_listed(work.shared))
    document.write(work.root)


def _advance(stage: Stage, work: frame.Work) -> _State:
    """Runs one stage if it is possible and not done. Returns its state."""
    life: Life = work.shared
    missing = [name for name in stage.after if name not in life.done]
    if missing:
        reason = f"it builds on {' and '.join(missing)}, which failed or was skipped"
        return _say(stage, "skipped", reason)
    step = life.step(stage, life.done)
    folder = work.folder(step)
    finished = cache.find(folder)
    if finished is not None:
        life.done[stage.name] = finished
        life.is_behind = True
        return _say(stage, "done", "done before with this config and data", folder, work.root)
    failed = [
        other.name
        for other in life.stages
        if other.charges is not None and life.states[other.name]["status"] == "failed"
    ]
    if stage.charges is not None and failed:
        reason = f"nothing more is spent until {' and '.join(failed)} can be done"
        return _say(stage, "skipped", reason)
    if life.is_behind:  # The stage may take hours.
        _publish(work)
    # The row of a stage whose files have changed is no result.
    (folder / "row.json").unlink(missing_ok=True)
    print(f"{stage.name}: running", flush=True)
    try:
        work.row(step)
    except Exception as error:
        return _failed(stage, error, folder, work.root)
    finished = cache.find(folder)
    assert finished is not None
    life.done[stage.name] = finished
    (folder / "error.txt").unlink(missing_ok=True)
    return _say(stage, "done", "", folder, work.root)


def _run(step: Step, work: frame.Work) -> dict[str, Any]:
    """Returns the row of a stage."""
    life: Life = work.shared
    (stage,) = [stage for stage in life.stages if stage.name == step.stage]
    folder = work.folder(step)
    read = [part for part in stage.config if part in life.config]  # references may be missing
    fields = {part: life.config[part].copy_and_resolve_references() for part in read}
    assert life.hold is not None
    job = Job(
        config=ConfigDict(fields),
        data=life.data,
        before={name: life.done[name] for name in stage.after},
        folder=folder,
        account=functools.partial(life.hold.account, label=stage.name),
        watching=functools.partial(frame.watching, life.config, folder),
    )
    return cache.described(folder, stage.run(job))


def _failed(stage: Stage, error: Exception, folder: pathlib.Path, root: pathlib.Path) -> _State:
    with contextlib.suppress(OSError):  # the disk may be what failed
        (folder / "error.txt").write_text(traceback.format_exc())
    kind = type(error).__name__
    state = _say(stage, "failed", f"{kind}: {error}", folder, root)
    if stage.is_private and not isinstance(error, BudgetExceeded):
        # Others read the report, and an error may depend on private images.
        state["message"] = f"{kind}: {_FOR_OWNERS}"
    return state


def _say(
    stage: Stage,
    status: str,
    message: str,
    folder: pathlib.Path | None = None,
    root: pathlib.Path | None = None,
) -> _State:
    print(f"{stage.name}: {status}" + (f", {message}" if message else ""), flush=True)
    place = "" if folder is None or root is None else str(folder.relative_to(root))
    return {"status": status, "message": "" if status == "done" else message, "folder": place}


def _result(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    states = {}
    for row in rows:
        states[row["stage"]] = {key: row[key] for key in ("status", "message", "folder")}
    result = {
        "config": json.loads(work.config.to_json()),
        "accounts": list(accounts(work.config)),
        "stages": states,
    }
    finished = document.Life(work.root, result)  # reads the ledger once for both tables
    result["accuracy"] = document.accuracies(finished)
    result["protection"] = document.protection(finished)
    return result


def _summary(result: Any) -> str:
    tables = [format_table(result[name]) for name in ("accuracy", "protection") if result[name]]
    text = "\n\n".join(tables)
    bad = [name for name, state in result["stages"].items() if state["status"] != "done"]
    if bad:
        text += (
            f"\n\nNot done: {', '.join(bad)}. The same command tries again, with or without "
            "another config."
        )
    return text


def _unbound(config: Any) -> ConfigDict:
    """Returns no part of the config: a workdir takes any, since stages are found by content."""
    return ConfigDict()


STUDY = frame.Study(
    name="lifecycle",
    open=_open,
    private=_private,
    cells=lambda config: [Step(stage.name) for stage in stages()],
    run=_run,
    rows=_rows,
    result=_result,
    summary=_summary,
    grows=_unbound,
    plan=lambda config, opened: opened().plan(),
    report=frame.Report(title="a model's life", write=document.write),
    life=".lifecycle.deploy",
)
