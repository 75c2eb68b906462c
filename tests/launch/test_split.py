"""The launcher of Split Adaptation as a user runs it; tests/split/test_split_experiment.py runs the experiment."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def launch(workdir, *flags):
    command = [sys.executable, "-m", "launch.split", "--config", "configs/split/digits.py", "--workdir", str(workdir)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_what_the_experiment_says_reaches_the_user(tmp_path):
    process = launch(tmp_path / "run", "--config.public_benchmark=False")
    assert process.returncode != 0
    assert "A client with private images uses launch/split_client.py" in process.stderr
    assert not (tmp_path / "run").exists()


def test_flags_that_name_no_field_are_refused(tmp_path):
    process = launch(tmp_path / "run", "--config.sheds=5")
    assert process.returncode != 0 and "sheds" in process.stderr
