"""The recalibration launcher as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def launch(workdir, overrides):
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    # ml_collections still loads config files by a deprecated function; everything else may not warn.
    warnings = ["-W", "error", "-W", "ignore:the load_module:DeprecationWarning"]
    command = [sys.executable, *warnings, "-m", "launch.recalibrate", "--config", "configs/recalibration/digits.py"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [*command, "--workdir", str(workdir), *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_launcher_recalibrates_and_prints_scores_and_costs(tmp_path):
    overrides = {
        "data.corruptions": "('contrast',)",
        "train.steps": 20,
        "methods": "('HB split', 'none')",
        "sweep.trials": 3,
        "sweep.sources.values": "(4,)",
        "sweep.samples.values": "(5,)",
        "sweep.epsilon.values": "(1.0,)",
        "figures.methods": "('HB split', 'none')",
        "figures.reliability_shift": "contrast",
        "figures.reliability_methods": "('HB split',)",
    }
    process = launch(tmp_path / "run", overrides)
    assert process.returncode == 0, process.stderr
    assert "2 methods under 1 shifts of 1078 test images, 4 settings" in process.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for name, releases, epsilon in (("HB split", "1", "1"), ("none", "0", "0")):
        (line,) = (line for line in process.stdout.splitlines() if line.startswith(name))
        assert line.removeprefix(name).split()[:2] == [releases, epsilon]
        assert f"{result['cells']['contrast'][name]['centre']['ece'][0]:.4f}" in line
    assert "Every source pays PureDpEvent(epsilon) for one record (add_remove)" in process.stdout
    assert "for public benchmarks only" in process.stdout


def test_flags_that_name_no_field_are_refused(tmp_path):
    process = launch(tmp_path / "run", {"sweep.trails": 5})
    assert process.returncode != 0 and "trails" in process.stderr
    assert not (tmp_path / "run").exists()
