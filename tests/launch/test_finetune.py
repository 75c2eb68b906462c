"""The launcher as a user runs it: whole experiments in separate processes, some of them killed."""

import importlib.util
import json
import os
import pathlib
import re
import signal
import time
from unittest import mock

import jax
import ml_collections
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy import special

from jaxdp import data, finetune, models
from jaxdp.privacy import Ledger
from jaxdp.privacy.events import composition
from jaxdp.report import read_metrics
from launch import finetune as launched
from launch import release, report, serve_check, trainers
from tests.launch import golden, program, settling, tiny

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
CELL = pathlib.Path("cells", "private")


def launch(workdir, config="configs/digits_dpsgd.py", **overrides):
    overrides = {name.replace("__", "."): value for name, value in overrides.items()}
    if config == "configs/digits_dpsgd.py":
        overrides = {**tiny.FINETUNE, **overrides}
    return program.call(program.command("finetune", config, workdir, overrides))


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def table_of(printed):
    """Returns accuracy and epsilon by the name of the model, from what a run prints."""
    names = ("before fine-tuning", "private", "no privacy", "no pre-training")
    rows = {}
    for line in printed.splitlines():
        for name in names:
            if match := re.match(rf"{name} +([\d.]+) +([\d.]+|inf)$", line):
                rows[name] = tuple(map(float, match.groups()))
    return rows


def steps_charged(folder, dataset="digits/private"):
    with Ledger(folder / "ledger.sqlite") as ledger:
        return composition(ledger.events(dataset)[None])


def plant_seed(workdir):
    """Gives the private run a seed, so that two experiments can be compared."""
    (workdir / CELL).mkdir(parents=True)
    (workdir / CELL / "secret_seed").write_text(bytes(range(16)).hex())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished") / "run"
    plant_seed(workdir)
    process = launch(workdir)
    assert process.returncode == 0, process.stderr
    return workdir, process


def test_a_run_leaves_what_it_promises(finished):
    workdir, process = finished
    names = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()}
    assert {
        "result.json",
        "training.png",
        "params.safetensors",
        "ledger.sqlite",
        f"{CELL}/metrics.jsonl",
    } <= names
    assert any(name.startswith(f"{CELL}/checkpoints/6/") for name in names)
    assert (workdir / "training.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "90 public (digits/public), 1168 private (digits/private), 539 test (digits/test)"
        in process.stdout
    )
    assert "The ledger recomputes epsilon = " in process.stdout
    assert [row["step"] for row in read_metrics(workdir / CELL / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_a_finished_run_is_released_and_served_without_its_code(finished, tmp_path, capsys):
    workdir, _ = finished
    folder = release.write(workdir, tmp_path / "release")
    serve_check.main(["serve-check", str(folder)])
    assert "the answers are equal" in capsys.readouterr().out
    bound = json.loads((workdir / "config.json").read_text())
    config = ml_collections.ConfigDict(bound["config"])
    test = data.bundled("digits").gather(np.arange(40))["image"]
    network = launched.models.network(config.model, 10)
    params = models.load_params(workdir / "params.safetensors")
    expected = special.softmax(jax.jit(network.apply_fn)(params, test), axis=-1)
    np.testing.assert_allclose(models.load_released(folder)(test), expected, atol=1e-6)
    assert report.verify(folder / "report.html", workdir).is_true
    with pytest.raises(FileNotFoundError, match="has no finished run"):
        release.write(tmp_path)


def test_no_secret_is_left(finished):
    workdir, _ = finished
    assert not list(workdir.rglob("*secret*"))


def test_epsilon_is_what_dp_accounting_says_and_at_most_the_target(finished):
    workdir, _ = finished
    result = result_of(workdir)
    step = dp_event.PoissonSampledDpEvent(
        64 / 1168, dp_event.GaussianDpEvent(result["noise_multiplier"])
    )
    assert steps_charged(workdir) == {step: 6}
    independent = PLDAccountant()
    independent.compose(step, 6)
    assert result["epsilon"] <= 4.0
    assert result["epsilon"] == pytest.approx(independent.get_epsilon(1e-5), rel=1e-3)
    assert result["epsilon"] > 3.9  # the noise is as small as possible
    assert result["delta"] == 1e-5
    assert result["steps"] == 6


def test_without_references_only_the_private_model_is_trained(finished):
    workdir, process = finished
    assert set(result_of(workdir)) == {
        *(
            "private",
            "epsilon",
            "delta",
            "method",
            "noise_multiplier",
            "steps",
            "dataset",
            "unit",
            "adjacency",
        ),
        *("before", "after", "gained", "lost", "tested", "curves"),
    }
    assert not (workdir / "references").exists()
    result, rows = result_of(workdir), table_of(process.stdout)
    assert list(rows) == ["before fine-tuning", "private"]
    assert rows["before fine-tuning"][0] == pytest.approx(result["before"], abs=1e-4)
    assert rows["private"][0] == pytest.approx(result["after"], abs=1e-4)
    assert "--config.references=True shows what the model reaches without" in process.stdout


def test_the_saved_model_has_the_accuracy_that_is_reported(finished):
    workdir, _ = finished
    params = models.load_params(workdir / "params.safetensors")
    model = models.create("cnn", num_classes=10, widths=(4,), dense=0)
    test = data.bundled("digits").split([0.05, 0.65, 0.3], seed=0)[2]
    rows = test.gather(np.arange(len(test)))
    found = np.asarray(
        jax.jit(model.apply)({"params": params}, (rows["image"] - 0.3) / 0.4)
    ).argmax(-1)
    assert result_of(workdir)["private"] == pytest.approx(
        (found == rows["label"]).mean(), abs=1.5 / len(test)
    )


def test_a_reference_has_the_epsilon_of_its_own_ledger(monkeypatch):
    """The private model's ledger also counts an earlier run here."""
    changes = {"before": 0.1, "after": 0.5, "gained": 5, "lost": 1}
    rows = [
        {"model": "private", "accuracy": 0.5, "epsilon": 2.5, **changes},
        {"model": "no_pretraining", "accuracy": 0.4, "epsilon": 2.0, **changes},
    ]
    monkeypatch.setattr(trainers, "curves", lambda folder: {})
    work = mock.MagicMock(shared=launched._Opened(mock.MagicMock(), mock.MagicMock()))
    work.config.private.delta = 1e-5
    work.shared.task.spec.terms = {"unit": "example", "adjacency": "add_remove"}
    table = table_of(launched._summary(launched._result(rows, work)))
    assert (table["private"], table["no pre-training"]) == ((0.5, 2.5), (0.4, 2.0))


def test_references_have_a_ledger_of_their_own(tmp_path):
    fields = {"references": True, "private__steps": 2, "private__checkpoint_every": 1}
    ledgers = ("ledger.sqlite", "references/ledger.sqlite")
    settling.begin(tmp_path / "run", *ledgers)
    process = launch(tmp_path / "run", **fields)
    assert process.returncode == 0, process.stderr
    result = result_of(tmp_path / "run")
    assert {"private", "no privacy", "no pre-training"} <= set(result)
    assert all(0 <= result[name] <= 1 for name in ("private", "no privacy", "no pre-training"))
    rows = table_of(process.stdout)
    assert list(rows) == ["before fine-tuning", "private", "no privacy", "no pre-training"]
    assert rows["no privacy"] == (pytest.approx(result["no privacy"], abs=1e-4), float("inf"))
    assert "them would cost their own epsilon" in process.stdout
    assert "--config.references=True" not in process.stdout
    assert golden.differences("finetune", result) == []
    assert sum(steps_charged(tmp_path / "run").values()) == 2
    assert sum(steps_charged(tmp_path / "run" / "references").values()) == 2
    settling.check(launched.STUDY, tiny.finetune(**fields), tmp_path / "run", *ledgers)


def test_an_experiment_that_is_killed_resumes_to_the_same_result(finished, tmp_path):
    workdir = tmp_path / "run"
    plant_seed(workdir)
    command = program.command("finetune", "configs/digits_dpsgd.py", workdir, tiny.FINETUNE)
    process, _, errors = program.start(command, tmp_path)
    charges = workdir / CELL / "charges.jsonl"
    deadline = time.monotonic() + 120
    while not (charges.exists() and charges.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    assert process.returncode == -signal.SIGKILL, errors.read_text()
    assert not (workdir / "result.json").exists()
    # One chunk, so that the planted seed covers the whole run.
    assert sum(steps_charged(workdir).values()) == 6 and (workdir / CELL / "secret_seed").exists()
    again = launch(workdir)
    assert again.returncode == 0, again.stderr
    whole, _ = finished
    assert result_of(workdir) == result_of(whole)
    assert (workdir / "params.safetensors").read_bytes() == (
        whole / "params.safetensors"
    ).read_bytes()
    assert steps_charged(workdir) == steps_charged(whole)
    assert not list(workdir.rglob("*secret*"))


def load(path):
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- Configs of data sets that are not bundled --------------------------------------------------

TFDS = {
    "cifar10": ("configs/cifar10_dpsgd.py:cpu", "cifar10/train", 50_000),
    "fashion_mnist": ("configs/fashion_mnist_dpsgd.py", "fashion_mnist/train", 60_000),
}


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("configs/cifar10_dpsgd.py", ()),
        ("configs/cifar10_dpsgd.py", ("paper",)),
        ("configs/cifar10_dpsgd.py", ("cpu",)),
        ("configs/fashion_mnist_dpsgd.py", ()),
        ("configs/digits_dpsgd.py", ()),
    ],
)
def test_configs_build_and_name_a_model_that_exists(path, arguments):
    config = load(path).get_config(*arguments)
    assert json.loads(config.to_json())
    assert set(config) == set(load("configs/digits_dpsgd.py").get_config())
    assert set(config.private) == set(load("configs/digits_dpsgd.py").get_config().private)
    models.create(config.model.name, num_classes=10, **dict(config.model.options))


def test_random_rounds_are_dp_sgd_of_one_example_with_the_number_of_steps_drawn(tmp_path):
    config = load("configs/digits_dpsgd.py").get_config("random_round")
    task, trainer = launched.STUDY.open(config, tmp_path)
    rounds = finetune.random_round(config.private.steps, seed=bytes(16))
    assert 1 < rounds < config.private.steps == 20 * len(task.private)
    assert trainers.steps(config.private) == rounds
    private, same = config.private, config.private.copy_and_resolve_references()
    del same.random_round
    same.steps = rounds
    plain = task.trainer(same)
    assert trainer.event(0, rounds) == plain.event(0, rounds)
    assert trainer.sampler.expected_batch_size == pytest.approx(1.0)
    private.random_round.seed = 1
    assert trainers.steps(private) != rounds


@pytest.mark.download
@pytest.mark.parametrize("name", TFDS)
def test_two_steps_on_real_data(tmp_path, name):
    path, dataset, n = TFDS[name]
    process = launch(
        tmp_path / "run",
        path,
        data__data_dir=os.environ["JAXDP_DATA_DIR"],
        data__parts__test="test[:200]",
        private__steps="2",
        private__checkpoint_every="1",
        private__batch_size="12",
        private__physical_batch_size="8",
        references="False",
    )
    assert process.returncode == 0, process.stderr
    result = result_of(tmp_path / "run")
    assert result["dataset"] == dataset
    step = dp_event.PoissonSampledDpEvent(
        12 / n, dp_event.GaussianDpEvent(result["noise_multiplier"])
    )
    assert steps_charged(tmp_path / "run", dataset) == {step: 2}
    assert [row["step"] for row in read_metrics(tmp_path / "run" / CELL / "metrics.jsonl")] == [
        1,
        2,
    ]
