"""--log_json: one line of JSON per event, without private values."""

import dataclasses
import json
import logging
import pathlib
from unittest import mock

import numpy as np
import pytest

from jaxdp.files.happenings import EVENTS
from jaxdp.privacy import GaussianDpEvent, Ledger
from jaxdp.release import Checkpoints
from launch import frame
from launch.frame import events, program
from tests.launch import program as launched
from tests.launch import test_frame as toy

FIELDS = {
    "start": {"launcher", "version"},
    "cell": {"study", "workdir", "cell"},
    "payment": {"ledger", "dataset", "spend", "label", "charge", "epsilon", "delta"},
    "checkpoint": {"step"},
    "cell_end": {"study", "workdir", "cell"},
    "cell_error": {"study", "workdir", "cell", "kind"},
    "end": set(),
    "error": {"kind"},
}


def lines_of(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert set(line) == FIELDS[line["event"]] | {"time", "event", "pid"}
    return lines


def test_a_run_tells_its_cells_and_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a relative path is told whole
    log = tmp_path / "events.jsonl"
    with events.as_lines(str(log), "toy"):
        frame.run(toy.STUDY, toy.config(), pathlib.Path("run"))
    lines = lines_of(log)
    kinds = [line["event"] for line in lines]
    assert kinds == ["start", *["cell", "cell_end"] * 4, "end"]
    assert lines[1]["cell"] == {"kind": "a b", "number": 1.0}
    assert lines[1]["workdir"] == str(tmp_path / "run")
    assert "value" not in log.read_text()  # what a cell computed
    EVENTS.info("%s %s", "payment", {})
    assert lines_of(log) == lines  # nobody listens any more


def test_a_payment_names_its_ledger_and_epsilon(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "events.jsonl"
    with Ledger("a.sqlite") as ledger:
        ledger.register("patients", adjacency="add_remove", unit="patient", delta=1e-5)
        account = ledger.account("patients", label="training")
        with events.as_lines(str(log), "toy"):
            for _ in range(2):
                with account.spend(GaussianDpEvent(2.0), label="epoch", token="once"):
                    pass
        epsilon = ledger.epsilon("patients")
    (line,) = [line for line in lines_of(log) if line["event"] == "payment"]  # a replay is free
    del line["time"], line["pid"]
    assert line == {
        "event": "payment",
        "ledger": str(tmp_path / "a.sqlite"),
        "dataset": "patients",
        "spend": 1,
        "label": "training: epoch",
        "charge": "Gaussian(2)",
        "epsilon": epsilon,
        "delta": 1e-5,
    }


def test_a_checkpoint_tells_its_step(tmp_path):
    log = tmp_path / "events.jsonl"
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    with events.as_lines(str(log), "toy"), mock.patch("jaxdp.release.checkpoints.sync_tree"):
        checkpoints.save(3, {"w": np.zeros(2)})
    checkpoints.close()
    assert [line.get("step") for line in lines_of(log)] == [None, 3, None]


def test_an_error_is_told_by_its_kind_alone(tmp_path):
    log = tmp_path / "events.jsonl"

    def fail(cell, work):
        raise ValueError("row 7 has the value 'Smith'.")

    study = dataclasses.replace(toy.STUDY, run=fail)
    with pytest.raises(ValueError, match="Smith"), events.as_lines(str(log), "toy"):
        frame.run(study, toy.config(), tmp_path / "run")
    kinds = [(line["event"], line.get("kind")) for line in lines_of(log)]
    assert kinds == [
        *[("start", None), ("cell", None)],
        *[("cell_error", "ValueError"), ("error", "ValueError")],
    ]
    assert "Smith" not in log.read_text()


def test_lines_on_stderr_leave_the_text_of_absl_alone(tmp_path, capsys):
    with events.as_lines(events.STDERR, "toy"):
        assert not EVENTS.propagate  # the default verbosity of a launcher shows warnings
    assert EVENTS.propagate and EVENTS.level == logging.NOTSET
    start, end = map(json.loads, capsys.readouterr().err.splitlines())
    assert (start["event"], end["event"]) == ("start", "end")


def test_a_log_that_cannot_be_written_is_a_mistake(tmp_path):
    refused = pytest.raises(program.MISTAKES, match="--log_json must be in a folder that exists")
    with refused, events.as_lines(str(tmp_path / "no" / "log"), "toy"):
        raise AssertionError("the body ran")


def test_a_launcher_takes_the_flag(tmp_path):
    log = tmp_path / "events.jsonl"
    command = launched.command("pretrain", "configs/pretrain/digits.py", tmp_path / "run", {})
    refused = launched.call([*command, "--stale=never", f"--log_json={log}"])
    assert refused.returncode == 2 and "--stale must be" in refused.stderr
    start, error = lines_of(log)
    assert (start["launcher"], error["kind"]) == ("pretrain", "ValueError")
