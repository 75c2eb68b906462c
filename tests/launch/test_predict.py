"""The prediction launcher as a user runs it, and its configs."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxdp.prediction import experiment
from jaxdp.privacy import Ledger, PureDpEvent
from jaxdp.privacy.events import composition

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = [
    ("blobs", ()),
    ("blobs", ("close",)),
    ("blobs", ("mlp",)),
    ("digits", ()),
    ("pneumonia", ()),
    ("octmnist", ()),
    ("sst2", ()),
    ("imdb", ()),
    ("imdb", ("embeddings",)),
]


def load(name):
    path = ROOT / "configs" / "predict" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(workdir, config="configs/predict/digits.py", **overrides):
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    # ml_collections still loads config files by a deprecated function; everything else may not warn.
    warnings = ["-W", "error", "-W", "ignore:the load_module:DeprecationWarning"]
    command = [sys.executable, *warnings, "-m", "launch.predict", "--config", config, "--workdir", str(workdir)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_launcher_answers_prints_and_charges(tmp_path):
    process = launch(tmp_path / "run", references="False", prediction__queries=20, certificate__max_distance=15)
    assert process.returncode == 0, process.stderr
    assert "1078 private records (digits/train), 539 test inputs" in process.stdout
    assert "20 answers about digits/train" in process.stdout
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        (counts,) = map(composition, ledger.events("digits/train").values())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert counts == {PureDpEvent(result["epsilon_per_query"]): 20}


def test_flags_that_name_no_field_are_refused(tmp_path):
    process = launch(tmp_path / "run", prediction__querries=5)
    assert process.returncode != 0 and "querries" in process.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "variant"), CONFIGS)
def test_configs_have_the_fields_of_the_digits_config(name, variant):
    config, digits = load(name).get_config(*variant), load("digits").get_config()
    assert json.loads(config.to_json())
    assert set(config) == set(digits)
    for part in ("model", "training", "certificate", "prediction", "ensemble", "pate", "student", "dp_sgd"):
        assert set(config[part]) == set(digits[part])
    assert (config.prediction.queries, config.prediction.epsilon, config.prediction.delta) == (100, 10.0, 1e-5)
    # A part of the data holds enough records for every distance, and distances have no gap.
    assert config.certificate.max_distance >= 100


@pytest.mark.parametrize("name", ["blobs", "imdb"])
def test_an_unknown_variant_is_refused(name):
    with pytest.raises(ValueError, match=r"the variant must be one of .*, got 'large'"):
        load(name).get_config("large")


@pytest.mark.parametrize(
    ("name", "variant", "missing"),
    [
        ("pneumonia", (), "data set 'pneumonia_mnist' is not prepared"),
        ("sst2", (), "there is no file at ''; it should be an .npz file .* with the arrays words, vectors, counts"),
        ("imdb", (), "arrays words, vectors, counts"),
        ("imdb", ("embeddings",), "arrays train_features, .*, public_features"),
        ("octmnist", (), r"arrays val_images, val_labels, .*run configs/predict/digits.py"),
    ],
)
def test_without_data_the_error_says_what_to_do_and_nothing_is_spent(tmp_path, name, variant, missing):
    config = load(name).get_config(*variant)
    if "data_dir" in config.data:
        config.data.data_dir = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=missing):
        experiment.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.download
def test_real_x_rays(tmp_path):
    config = load("pneumonia").get_config()
    config.update_from_flattened_dict(
        {
            "references": False,
            "data.data_dir": os.environ["JAXDP_DATA_DIR"],
            "data.network.steps": 50,
            "certificate.max_distance": 30,
        }
    )
    result = experiment.run(config, tmp_path)
    assert result["dataset"] == "pneumonia_mnist/train" and result["private_records"] == 4708
    # Chance is 62.5 %; four standard errors of 100 answers that are right four times in five are 16 %.
    assert result["released"]["per_query"] > 0.625
    assert np.load(tmp_path / "answers.npz")["answers"].shape == (100,)
