"""The contract of the frame, on a toy study: what is kept, refused, resumed and shared between processes."""

import dataclasses
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import pytest
from ml_collections import ConfigDict

from jaxdp.privacy import BudgetExceeded, GaussianDpEvent
from launch import dpadapter, finetune, frame, pretrain

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Sum(NamedTuple):
    kind: str
    number: float


def config(**changes):
    return ConfigDict({"kinds": ("a b", "c"), "numbers": (1.0, 2.5), "public_benchmark": True, "steps": 3, **changes})


def opened(config, root):
    frame.known("kinds", config.kinds, ("a b", "c", "slow", "spends", "a_b"))
    return {"runs": []}


def run_one(cell, work):
    work.shared["runs"].append(cell)
    if cell.kind == "slow":
        (work.root / "started").touch()
        time.sleep(60)
    if cell.kind == "spends":
        account = frame.account(work.root / "ledger.sqlite", "toy", epsilon=1e-3, delta=1e-5)
        with account as pays, pays.spend(GaussianDpEvent(1.0)):
            pass
    (work.folder(cell) / "scratch").mkdir()
    return {"value": 2 * cell.number}


STUDY = frame.Study(
    name="toy",
    open=opened,
    cells=lambda config: (Sum(kind, number) for kind in config.kinds for number in config.numbers),
    run=run_one,
    result=lambda rows, work: {"total": sum(row["value"] for row in rows)},
    summary=lambda result: f"total {result['total']}",
    tables=lambda result, work: {"Total": [{"name": "50 % & more", "total": result["total"]}], "note": "A note."},
    figures=lambda result, work: (work.root / "figure.png").touch(),
    benchmark="use another function for private data.",
)
STUDIES = [finetune.STUDY, dpadapter.STUDY, pretrain.STUDY]


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_run_leaves_rows_tables_and_its_result(tmp_path, capsys):
    result = frame.run(STUDY, config(), tmp_path)
    assert result == {"total": 14.0} == json.loads((tmp_path / "result.json").read_text())
    assert json.loads((tmp_path / "cells" / "a_b" / "2.5" / "row.json").read_text()) == {
        **{"kind": "a b", "number": 2.5, "value": 5.0}
    }
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["value"]) for row in rows] == [("a b", 2), ("a b", 5), ("c", 2), ("c", 5)]
    assert "## Total" in (tmp_path / "tables.md").read_text() and "A note." in (tmp_path / "tables.md").read_text()
    latex = (tmp_path / "tables.tex").read_text()
    assert r"50 \% \& more & 14" in latex and "A note" not in latex
    assert (tmp_path / "figure.png").exists() and not list(tmp_path.rglob("scratch"))
    assert "total 14.0" in capsys.readouterr().out


def test_a_finished_run_does_nothing(tmp_path, capsys):
    frame.run(STUDY, config(), tmp_path)
    before = contents(tmp_path)
    assert frame.run(STUDY, config(), tmp_path) == {"total": 14.0}
    assert "holds a finished run: nothing to do.\n\ntotal 14.0" in capsys.readouterr().out
    assert contents(tmp_path) == before


def test_an_interrupted_run_goes_on_with_the_next_cell(tmp_path):
    runs = []

    def interrupted(cell, work):
        runs.append(cell)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return run_one(cell, work)

    study = dataclasses.replace(STUDY, run=interrupted)
    with pytest.raises(KeyboardInterrupt):
        frame.run(study, config(), tmp_path)
    assert not (tmp_path / "result.json").exists()
    kept = contents(tmp_path / "cells" / "a_b")
    assert frame.run(study, config(), tmp_path) == {"total": 14.0}
    assert contents(tmp_path / "cells" / "a_b") == kept
    assert runs == [*frame.distinct(STUDY.cells(config()))[:3], *frame.distinct(STUDY.cells(config()))[2:]]


def test_a_study_that_grows_takes_more_cells(tmp_path):
    def grows(config):
        part = ConfigDict(config.to_dict())
        del part.numbers
        return part

    growing = dataclasses.replace(STUDY, grows=grows)
    frame.run(growing, config(), tmp_path)
    kept = contents(tmp_path / "cells")
    assert frame.run(growing, config(numbers=(1.0, 2.5, 10.0)), tmp_path) == {"total": 54.0}
    assert kept.items() <= contents(tmp_path / "cells").items()
    with pytest.raises(ValueError, match="another steps; use a new workdir"):
        frame.run(growing, config(steps=4), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "config.steps must be an integer of at least 1, got 0"),
        ({"kinds": ("d",)}, "config.kinds has 'd', which is not one of a b, c"),
        ({"kinds": ("a b", "a_b")}, "names that are one as names of folders"),
        ({"public_benchmark": False}, "config.public_benchmark must be True: use another function"),
    ],
)
def test_a_refused_config_leaves_no_trace(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        frame.run(STUDY, config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_workdir_belongs_to_one_study_config_and_release(tmp_path):
    frame.run(STUDY, config(), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"another numbers, steps; use a new workdir"):
        frame.run(STUDY, config(numbers=(3.0,), steps=4), tmp_path)
    with pytest.raises(ValueError, match="belongs to the study 'toy', not to 'finetune'"):
        frame.check_same_config("finetune", config(), tmp_path)
    assert contents(tmp_path) == before
    (tmp_path / "config.json").write_text(json.dumps(config().to_dict()))  # as the first releases wrote it
    with pytest.raises(ValueError, match="was made by another release of jaxdp"):
        frame.run(STUDY, config(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        frame.run(STUDY, config(), tmp_path)


def test_a_mistake_that_is_found_late_can_be_mended_in_the_same_workdir(tmp_path):
    def fails(cell, work):
        raise ValueError("the model does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        frame.run(dataclasses.replace(STUDY, run=fails), config(), tmp_path)
    assert frame.run(STUDY, config(steps=4), tmp_path) == {"total": 14.0}


def test_what_cannot_be_paid_says_what_to_do(tmp_path):
    with pytest.raises(BudgetExceeded) as caught:
        frame.run(STUDY, config(kinds=("spends",)), tmp_path)
    assert any("delete the folder" in note for note in caught.value.__notes__)
    assert not (tmp_path / "result.json").exists()


def _other(root):
    frame.run(STUDY, config(kinds=("slow", "c"), numbers=(1.0,)), root)


def test_a_cell_that_another_process_holds_is_left_to_it_and_a_killed_one_is_run_again(tmp_path, monkeypatch):
    other = multiprocessing.get_context("spawn").Process(target=_other, args=(tmp_path,))
    other.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    order, row = [], frame.Work.row

    def watched(work, cell, *, wait=True):
        found = row(work, cell, wait=wait)
        order.append(cell.kind)
        if cell.kind == "c":
            os.kill(other.pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(frame.Work, "row", watched)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    result = frame.run(STUDY, config(kinds=("slow", "c"), numbers=(1.0,)), tmp_path)
    other.join()
    assert result == {"total": 4.0} and order[:2] == ["c", "slow"]


# --- The launchers ----------------------------------------------------------------------------------------------------


def command(module, *arguments):
    # ml_collections still loads config files by a deprecated function; everything else may not warn.
    warnings = ["-W", "error", "-W", "ignore:the load_module:DeprecationWarning"]
    process = subprocess.run(
        [sys.executable, *warnings, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return process.returncode, process.stdout + process.stderr


def test_a_program_tells_mistakes_in_sentences(tmp_path):
    run = ("launch.finetune", "--config", "configs/digits_dpsgd.py", "--workdir", str(tmp_path / "run"))
    code, said = command(*run, "--config.private.steps=0")
    assert code == 1 and "ValueError: config.private.steps must be an integer of at least 1, got 0" in said
    assert "Traceback" not in said and "the same command goes on and pays nothing twice" in said
    code, said = command(*run, "--config.private.steps=0", "--verbosity=1")
    assert code == 1 and "Traceback" in said and "check_numbers" in said
    code, said = command(*run, "--config.private.stepps=5")
    assert code != 0 and "stepps" in said
    code, said = command(*run, "digits")
    assert code != 0 and "unexpected arguments ['digits']" in said
    assert not (tmp_path / "run").exists()


def test_a_program_asks_for_what_is_missing():
    for arguments, missing in (([], "--config"), (["--config", "configs/digits_dpsgd.py"], "--workdir")):
        code, said = command("launch.finetune", *arguments)
        assert code != 0 and missing in said


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_study_is_data(study):
    assert isinstance(study, frame.Study) and study.cells and study.run
