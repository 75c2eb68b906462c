"""The lifecycle and its report as a user runs them, in processes of their own."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxdp.privacy import Ledger

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = {
    "data.parts.public": 60,
    "data.parts.private": 60,
    "data.parts.sources": 20,
    "data.parts.stream": 16,
    "data.parts.test": 40,
    "data.sources": 2,
    "model.options.widths": "(8,)",
    "pretrain.steps": 4,
    "pretrain.perturbation_batch_size": 32,
    "finetune.steps": 24,
    "finetune.checkpoint_every": 2,
    "finetune.batch_size": 16,
    "finetune.physical_batch_size": 24,
    "finetune.augmult": 0,
    "adapt.batch_size": 8,
    "predict.queries": 4,
    "predict.max_distance": 4,
    "audit_finetune.canaries": 40,
    "audit_recalibrate.trials": 10,
    "audit_predict.images": 8,
    "audit_predict.candidates": 2,
    "audit_predict.trials": 10,
    "audit_adapt.candidates": 2,
    "audit_adapt.trials": 10,
}


def command(module, *arguments):
    # ml_collections still loads config files by a deprecated function; everything else may not warn.
    return [sys.executable, "-W", "error", "-W", "ignore:the load_module:DeprecationWarning", "-m", module, *arguments]


def flags(workdir, **changes):
    changes = {**TINY, **{name.replace("__", "."): value for name, value in changes.items()}}
    fields = [f"--config.{name}={value}" for name, value in changes.items()]
    return ["--config", "configs/lifecycle_digits.py", "--workdir", str(workdir), *fields]


def lifecycle(workdir, **changes):
    return command("launch.lifecycle", *flags(workdir, **changes))


def launch(command):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


# A process in the background of a shell would ignore Ctrl-C.
INTERRUPTIBLE = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('launch.lifecycle', run_name='__main__', alter_sys=True)"
)


def test_a_whole_life_with_ctrl_c_in_the_middle(tmp_path):
    workdir = tmp_path / "run"
    running = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *flags(workdir)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not list(workdir.glob("finetune/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    printed, errors = running.communicate(timeout=300)
    assert running.returncode == 130, errors
    assert "pretrain: done" in printed and "Traceback" not in errors
    assert "Interrupted in stage 'finetune'" in errors and "The same command goes on from here" in errors
    assert "interrupted" in (workdir / "report.html").read_text()

    process = launch(lifecycle(workdir, recalibrate__epsilon=3.0))  # more than a hospital has
    assert process.returncode == 1, process.stderr
    assert "pretrain: done, done before with this config and data: nothing to do" in process.stdout
    assert "recalibrate: failed, BudgetExceeded: dataset 'hospital 0', budget epsilon 2" in process.stdout
    assert "Not done: recalibrate, deploy, audit_recalibrate." in process.stdout
    assert "adapt: done" in process.stdout and "predict: done" in process.stdout

    process = launch(lifecycle(workdir))
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("nothing to do") == 7 and "stream" in process.stdout
    with Ledger(workdir / "ledger.sqlite") as ledger:
        assert ledger.epsilon("hospital 0") == 1 and ledger.epsilon("digits/private") <= 10

    written = (workdir / "report.html").read_bytes()
    process = launch(command("launch.report", str(workdir)))
    assert process.returncode == 0 and process.stdout.strip() == str(workdir / "report.html")
    assert (workdir / "report.html").read_bytes() == written


def test_what_is_missing_is_said_in_one_line(tmp_path):
    process = launch(command("launch.report", str(tmp_path)))
    assert process.returncode == 1
    assert (
        process.stderr.strip()
        == f"there is no {tmp_path}/lifecycle.json; give the workdir that launch.lifecycle was given."
    )
    process = launch(lifecycle(tmp_path / "run", data__source="cloud"))
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert "ValueError: config.data.source must be 'bundled' or 'tfds', got 'cloud'." in process.stderr
    assert not (tmp_path / "run").exists()
