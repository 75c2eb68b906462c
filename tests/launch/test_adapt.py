"""The adaptation launcher as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_launcher_adapts_prints_both_epsilons_and_charges(tmp_path):
    overrides = {
        "train.steps": 30,
        "model.options.depth": 2,
        "methods": "('Tent',)",
        "privacy.budgets": "(5.0,)",
        "protocol.seeds": 1,
        "data.images": 32,
        "data.corruptions": "('contrast', 'gaussian_noise')",
        "tuning.learning_rates": "(1e-3,)",
        "tuning.clipped_steps": "(1e-3,)",
    }
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    # ml_collections still loads config files by a deprecated function; everything else may not warn.
    warnings = ["-W", "error", "-W", "ignore:the load_module:DeprecationWarning"]
    command = [sys.executable, *warnings, "-m", "launch.adapt", "--config", "configs/tta/digits.py"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [*command, "--workdir", str(tmp_path / "run"), *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "1 streams of 2 domains with 32 photographs each" in process.stdout
    assert "epsilon 5: epsilon = 5 for a sample, 7.4" in process.stdout
    assert "for a photograph (seen 2 times), at delta = 1e-06, replace_one" in process.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [c["setting"] for c in result["cells"]] == ["original", "clipped", "epsilon 5", "original"]
    assert (tmp_path / "run" / "ledger.sqlite").exists()
