"""The pre-training launcher as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxdp import models

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parents[2]


def launch(workdir, config, overrides):
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    # ml_collections still loads config files by a deprecated function; everything else may not warn.
    warnings = ["-W", "error", "-W", "ignore:the load_module:DeprecationWarning"]
    command = [sys.executable, *warnings, "-m", "launch.pretrain", "--config", config, "--workdir", str(workdir)]
    return subprocess.run(
        [*command, *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_launcher_trains_and_prints_what_the_model_withstands(tmp_path):
    overrides = {
        "model.options.widths": "(8,)",
        "train.steps": 40,
        "train.checkpoint_every": 20,
        "ascent.batch_size": 100,
        "ascent.microbatch_size": 50,
        "robustness.std": "(0.1,)",
        "robustness.relative_std": "(0.5,)",
        "robustness.draws": 2,
        "robustness.inputs": 2,
    }
    process = launch(tmp_path / "run", "configs/pretrain/digits.py", overrides)
    assert process.returncode == 0, process.stderr
    assert "dpadapter: 898 public examples (digits/public), 539 test (digits/test), images 8x8x1" in process.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (line,) = (line for line in process.stdout.splitlines() if line.startswith("none "))
    assert float(line.split()[1]) == pytest.approx(result["accuracy"], rel=1e-3)
    assert result["accuracy"] > 0.5  # chance is 0.1
    assert "std 0.1 " in process.stdout and "std 0.5 of each tensor" in process.stdout
    assert models.load_params(tmp_path / "run" / "params.safetensors")["head"]["bias"].shape == (10,)


def test_flags_that_name_no_field_are_refused(tmp_path):
    process = launch(tmp_path / "run", "configs/pretrain/digits.py:sam", {"ascent.bach_size": 5})
    assert process.returncode != 0 and "bach_size" in process.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.download
def test_four_steps_on_real_data(tmp_path):
    overrides = {
        "data.data_dir": os.environ["JAXDP_DATA_DIR"],
        "data.name": "cifar10",
        "data.test_split": "test[:100]",
        "train.steps": 4,
        "train.checkpoint_every": 2,
        "ascent.batch_size": 100,
        "robustness.draws": 1,
        "robustness.inputs": 2,
    }
    process = launch(tmp_path / "run", "configs/pretrain/cifar100.py:cpu", overrides)
    assert process.returncode == 0, process.stderr
    where = json.loads((tmp_path / "run" / "result.json").read_text())["provenance"]
    assert where["train"]["name"] == "cifar10/train[:8000]" and where["train"]["examples"] == 8000
