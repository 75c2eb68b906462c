"""Pre-training: what it leaves, also after an interruption, what is refused, and the launcher as a
user runs it."""

import importlib.util
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from jaxdp import data, models
from jaxdp.pretrain import METHODS, robust_accuracy
from jaxdp.report import read_metrics
from launch import frame, pretrain, release
from tests.launch import golden, program, tiny

pytestmark = pytest.mark.slow

TRAINING = pathlib.Path("cells", "dpadapter", "metrics.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Interrupts a run between two checkpoints, and runs it again by its launcher.

    Returns its workdir and its result, and what was printed.
    """
    workdir = tmp_path_factory.mktemp("pretrain") / "run"

    def interrupt(*arguments, **options):
        if len(read_metrics(workdir / TRAINING)) == 5:
            raise KeyboardInterrupt
        return np.zeros(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain.pretrain, "robust_accuracy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            frame.run(pretrain.STUDY, tiny.pretrain(), workdir)
    assert (workdir / "config.json").exists() and not (workdir / "params.safetensors").exists()
    # a resumed run may be watched otherwise
    watch = "tensorboard" if importlib.util.find_spec("tensorboardX") else ""
    fields = {**tiny.PRETRAIN, "watch": watch}
    return workdir, *program.study(
        "pretrain", "configs/pretrain/digits.py:dpadapter", workdir, fields
    )


def test_the_steps_of_a_watched_run_are_written_for_tensorboard(finished):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = (finished[0] / TRAINING).with_name("tensorboard")
    found = {
        event.step: event.value
        for event in reader.EventAccumulator(str(folder)).Reload().Scalars("loss")
    }
    rows = {row["step"]: row["loss"] for row in read_metrics(finished[0] / TRAINING)}
    assert found == pytest.approx({step: rows[step] for step in (4, 5, 6)}, rel=1e-6)


def test_the_result_is_what_it_was(finished):
    assert golden.differences("pretrain", finished[1]) == []


def test_the_launcher_prints_what_the_model_withstands(finished):
    _, result, printed = finished
    assert (
        "dpadapter: 90 public examples (digits/public), 90 test (digits/test), images 8x8x1"
        in printed
    )
    (line,) = (line for line in printed.splitlines() if line.startswith("none "))
    assert float(line.split()[1]) == pytest.approx(result["accuracy"], rel=1e-3)
    assert "std 0.1 " in printed and "std 0.5 of each tensor" in printed


def test_a_run_leaves_what_it_promises(finished):
    workdir, result, _ = finished
    assert json.loads((workdir / "result.json").read_text()) == result
    assert (workdir / "robustness.png").read_bytes().startswith(b"\x89PNG")
    rows = read_metrics(workdir / TRAINING)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "accuracy" in row] == [3, 6] and rows[2][
        "accuracy"
    ] == 0  # not measured again
    assert rows[-1]["accuracy"] == result["accuracy"]
    assert result["perturbation_norm"] == {
        "first": pytest.approx(rows[0]["perturbation_norm"]),
        "last": pytest.approx(rows[-1]["perturbation_norm"]),
    }
    assert all(0 < row["perturbation_norm"] <= 0.5 * (1 + 1e-6) for row in rows)


def test_lemma_a1_stands_beside_the_change_of_the_model(finished):
    workdir, result, printed = finished
    assert "Lemma A.1:" in printed and (workdir / "lemma_a1.png").read_bytes()[1:4] == b"PNG"
    assert [row["direction"] for row in result["changes"]] == ["gradient", "noise"]
    for row in result["changes"]:
        assert row["length"] == pytest.approx(0.5, rel=1e-5)
        assert 0 < row["loss"] <= row["loss_bound"]
        assert 0 < row["gradient"] <= row["gradient_bound"]
    gradient, noise = (row["loss"] for row in result["changes"])
    assert gradient > 2 * noise


def test_a_target_ends_the_warm_up_and_a_stable_loss_the_run(tmp_path):
    rules = {
        "ascent__warmup_accuracy": 0.12,
        "train__stable": {"steps": 2, "tolerance": 0.99},
        "train__steps": 40,
        "robustness__lengths": (),
    }
    result = frame.run(pretrain.STUDY, tiny.pretrain(**rules), tmp_path)
    rows = read_metrics(tmp_path / TRAINING)
    accuracies = {row["step"]: row["train_accuracy"] for row in rows if "train_accuracy" in row}
    first = min(step for step, accuracy in accuracies.items() if accuracy >= 0.12)
    assert 0 < first == result["warmup_steps"] and first + 4 == result["steps"] == len(rows)


def test_the_saved_model_has_the_accuracies_that_are_reported(finished):
    workdir, result, _ = finished
    params = models.load_params(workdir / "params.safetensors")
    model = models.create("cnn", num_classes=10, widths=(8,), dense=0, norm="group")
    test = data.bundled("digits").split([0.05, 0.9, 0.05], seed=0)[2]

    def predict(params, images):
        return model.apply({"params": params}, (images - 0.3) / 0.4)

    rows = test.gather(np.arange(len(test)))
    found = np.asarray(jax.jit(predict)(params, rows["image"])).argmax(-1)
    assert result["accuracy"] == pytest.approx((found == rows["label"]).mean(), abs=1.5 / len(test))
    for kind, stds in (("absolute", [0.1, 1.0]), ("relative", [0.5])):
        again = robust_accuracy(
            predict, params, test, std=stds, draws=2, relative=kind == "relative", seed=0
        )
        assert result["robust_accuracy"][kind]["std"] == stds
        np.testing.assert_allclose(
            result["robust_accuracy"][kind]["draws"], again, atol=1.5 / len(test)
        )
    assert result["rho"]["random"] > 0 and result["rho"]["local"] > 0


def test_the_result_says_where_the_model_comes_from(finished):
    _, result, _ = finished
    public, _, test = data.bundled("digits").split([0.05, 0.9, 0.05], seed=0)
    where = result["provenance"]
    assert where["train"] == {
        "name": "digits/public",
        "fingerprint": public.fingerprint,
        "examples": len(public),
    }
    assert where["test"] == {
        "name": "digits/test",
        "fingerprint": test.fingerprint,
        "examples": len(test),
    }
    assert (
        where["config"]["method"]["name"] == "dpadapter"
        and where["config"]["method"]["dpadapter"]["gamma"] == 0.5
    )
    assert where["config"]["train"]["steps"] == 6 and where["config"]["seed"] == 0
    assert where["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("method", ["standard", "sam", "amp"])
def test_the_other_methods_ascend_on_the_batch_of_the_update(tmp_path, method):
    task = pretrain.STUDY.open(tiny.pretrain(method), tmp_path)
    batches, trainer = task.batches, task.trainer
    assert (
        batches.shared_batch and batches.perturbation_batch_size == batches.update_batch_size == 10
    )
    expected = {
        "standard": (0.0, "project"),
        "sam": (0.05, "normalise"),
        "amp": (1.0, "project"),
    }
    assert (trainer.gamma, trainer.rule) == expected[method]


def test_the_learning_rate_falls_as_in_the_paper(tmp_path):
    config = tiny.pretrain(train__steps=1000, train__momentum=0.0, train__weight_decay=0.0)
    optimizer = pretrain.STUDY.open(config, tmp_path).trainer.optimizer
    params = {"x": jnp.ones(())}
    state, rates = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(1000):
        updates, state = update(params, state, params)
        rates.append(-float(updates["x"]))
    for steps, rate in ((slice(0, 500), 0.1), (slice(500, 750), 0.01), (slice(750, 1000), 0.001)):
        np.testing.assert_allclose(rates[steps], rate, rtol=1e-5)


def test_images_are_fitted_to_the_model(tmp_path, capsys):
    preprocessing = {"size": 12, "mean": (0.3,) * 3, "std": (0.4,) * 3}
    task = pretrain.STUDY.open(tiny.pretrain(model__preprocessing=preprocessing), tmp_path)
    assert task.train[0]["image"].shape == task.test[0]["image"].shape == (12, 12, 3)
    assert "images 12x12x3, 10 classes" in capsys.readouterr().out


def test_configs_build_and_name_models_and_methods_that_exist():
    from configs.pretrain import cifar100

    for variant in ("dpadapter", "sam", "cpu", "paper", "cpu,amp", "paper,standard"):
        config = cifar100.get_config(variant)
        assert json.loads(config.to_json()) and set(config) == set(tiny.pretrain())
        assert set(config.method) == {"name", *METHODS} and config.method.name in METHODS
        models.create(config.model.name, num_classes=100, **dict(config.model.options))
    assert cifar100.get_config("cpu").data.parts.public == "train[:8000]"
    with pytest.raises(ValueError, match="takes 'paper' or 'cpu', a method, or both"):
        cifar100.get_config("gpu,sam")


@pytest.mark.download
def test_four_steps_on_real_data(tmp_path):
    overrides = {
        "data.data_dir": os.environ["JAXDP_DATA_DIR"],
        "data.name": "cifar10",
        "data.parts.test": "test[:100]",
        "train.steps": 4,
        "train.checkpoint_every": 2,
        "ascent.batch_size": 100,
        "robustness.draws": 1,
        "robustness.inputs": 2,
    }
    config = "configs/pretrain/cifar100.py:cpu"
    process = program.run(program.command("pretrain", config, tmp_path / "run", overrides))
    assert process.returncode == 0, process.stderr
    where = json.loads((tmp_path / "run" / "result.json").read_text())["provenance"]
    assert where["train"]["name"] == "cifar10/train[:8000]" and where["train"]["examples"] == 8000


def test_a_public_backbone_is_released_without_accounts(finished, tmp_path):
    workdir, result, _ = finished
    folder = release.write(workdir, tmp_path / "release")
    card = json.loads((folder / "card.json").read_text())
    assert card["guarantees"] == []
    assert "No data set was charged" in (folder / "README.md").read_text()
    assert "No data set was charged" in (folder / "report.html").read_text()
    assert f"{100 * result['accuracy']:.1f} %" in card["measured"]["test accuracy"]
    images = data.bundled("digits").gather(np.arange(40))["image"]
    network = pretrain.models.network(tiny.pretrain().model, 10)
    params = models.load_params(workdir / "params.safetensors")
    expected = special.softmax(jax.jit(network.apply_fn)(params, images), axis=-1)
    served = models.load_released(folder)
    np.testing.assert_allclose(served(images), expected, atol=1e-6)
    assert served.labels(images) == [str(digit) for digit in expected.argmax(axis=1)]
