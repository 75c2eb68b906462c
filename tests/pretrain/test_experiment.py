"""Pre-training experiments: what they leave, also after an interruption, and what is refused."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import data, models
from jaxdp.pretrain import experiment, robust_accuracy
from jaxdp.report import read_metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")
SMALL = {
    "model.options.widths": (8,),
    "train.steps": 6,
    "train.batch_size": 10,
    "train.checkpoint_every": 3,
    "ascent.batch_size": 20,
    "ascent.microbatch_size": 10,
    "data.public_fraction": 0.05,
    "data.test_fraction": 0.05,
    "robustness.std": (0.1, 1.0),
    "robustness.relative_std": (0.5,),
    "robustness.draws": 2,
    "robustness.inputs": 4,
}


def digits(method="dpadapter", **changes):
    config = importlib.import_module("configs.pretrain.digits").get_config(method)
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict({**SMALL, **changes})
    return config


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is interrupted between two checkpoints, and taken up again."""
    workdir = tmp_path_factory.mktemp("pretrain") / "run"

    def interrupt(*arguments):
        if len(read_metrics(workdir / "training" / "metrics.jsonl")) == 3:
            raise KeyboardInterrupt
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment._Task, "accuracy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            experiment.run(digits(), workdir)
    assert (workdir / "config.json").exists() and not (workdir / "params.safetensors").exists()
    return workdir, experiment.run(digits(), workdir)


def test_a_run_leaves_what_it_promises(finished):
    workdir, result = finished
    assert json.loads((workdir / "result.json").read_text()) == result
    assert (workdir / "robustness.png").read_bytes().startswith(b"\x89PNG")
    rows = read_metrics(workdir / "training" / "metrics.jsonl")
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


def test_the_saved_model_has_the_accuracies_that_are_reported(finished):
    workdir, result = finished
    params = models.load_params(workdir / "params.safetensors")
    model = models.create("cnn", num_classes=10, widths=(8,), dense=0, norm="group")
    test = data.bundled("digits").split([0.05, 0.9, 0.05], seed=0)[2]

    def predict(params, images):
        return model.apply({"params": params}, (images - 0.3) / 0.4)

    rows = test.gather(np.arange(len(test)))
    found = np.asarray(jax.jit(predict)(params, rows["image"])).argmax(-1)
    assert result["accuracy"] == pytest.approx((found == rows["label"]).mean(), abs=1.5 / len(test))
    for kind, stds in (("absolute", [0.1, 1.0]), ("relative", [0.5])):
        again = robust_accuracy(predict, params, test, std=stds, draws=2, relative=kind == "relative", seed=0)
        assert result["robust_accuracy"][kind]["std"] == stds
        np.testing.assert_allclose(result["robust_accuracy"][kind]["draws"], again, atol=1.5 / len(test))
    assert result["rho"]["random"] > 0 and result["rho"]["local"] > 0


def test_the_result_says_where_the_model_comes_from(finished):
    _, result = finished
    public, _, test = data.bundled("digits").split([0.05, 0.9, 0.05], seed=0)
    where = result["provenance"]
    assert where["train"] == {"name": "digits/public", "fingerprint": public.fingerprint, "examples": len(public)}
    assert where["test"] == {"name": "digits/test", "fingerprint": test.fingerprint, "examples": len(test)}
    assert where["config"]["method"]["name"] == "dpadapter" and where["config"]["method"]["dpadapter"]["gamma"] == 0.5
    assert where["config"]["train"]["steps"] == 6 and where["config"]["seed"] == 0
    assert where["versions"]["jax"] == jax.__version__


def test_a_finished_run_says_so_and_does_nothing(finished, capsys):
    workdir, result = finished
    before = contents(workdir)
    assert experiment.run(digits(), workdir) == result
    assert "holds a finished run: nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"another method\.dpadapter\.gamma, train\.steps; use a new workdir"):
        experiment.run(digits(method__dpadapter__gamma=1.0, train__steps=7), workdir)
    assert contents(workdir) == before


@pytest.mark.parametrize("method", ["standard", "sam", "amp"])
def test_the_other_methods_ascend_on_the_batch_of_the_update(tmp_path, method):
    config = digits(method)
    task = experiment._Task.of(config)
    plan, trainer = experiment._plan(config, task), experiment._trainer(config, task)
    assert plan.shared_batch and plan.perturbation_batch_size == plan.update_batch_size == 10
    expected = {
        "standard": (0.0, "project"),
        "sam": (0.05, "normalise"),
        "amp": (1.0, "project"),
    }
    assert (trainer.gamma, trainer.rule) == expected[method]


def test_the_learning_rate_falls_as_in_the_paper():
    config = digits(train__steps=1000, train__momentum=0.0, train__weight_decay=0.0)
    task = experiment._Task.of(config)
    optimizer = experiment._trainer(config, task).optimizer
    params = {"x": jnp.ones(())}
    state, rates = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(1000):
        updates, state = update(params, state, params)
        rates.append(-float(updates["x"]))
    for steps, rate in ((slice(0, 500), 0.1), (slice(500, 750), 0.01), (slice(750, 1000), 0.001)):
        np.testing.assert_allclose(rates[steps], rate, rtol=1e-5)


def test_images_can_be_fitted_to_another_shape():
    config = digits(data__size=12, data__channels=3)
    task = experiment._Task.of(config)
    assert task.train[0]["image"].shape == task.test[0]["image"].shape == (12, 12, 3)
    assert "images 12x12x3, 10 classes" in task.describe()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method__name": "dp"}, "config.method.name must be one of standard, sam, amp, dpadapter, got 'dp'"),
        ({"method__dpadapter__gamma": -1.0}, "gamma must be at least 0 and at most 1e.30, got -1.0"),
        ({"train__schedule": "linear"}, "config.train.schedule must be one of cosine, steps, got 'linear'"),
        ({"data__source": "web"}, "config.data.source must be 'bundled' or 'tfds', got 'web'"),
        ({"ascent__batch_size": 91}, r"perturbation_batch_size must be in 1..90, .*, got 91"),
        ({"ascent__microbatch_size": 7}, "microbatch_size must divide the 20 examples of the perturbation batch"),
        ({"ascent__warmup_steps": 7}, "warmup_steps must be in 0..6"),
        ({"data__name": "blobs"}, "source 'blobs/public' has no images"),
    ],
)
def test_a_refused_config_can_be_mended_in_the_same_workdir(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        experiment.run(digits(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_configs_build_and_name_models_and_methods_that_exist():
    from configs.pretrain import cifar100

    for variant in ("dpadapter", "sam", "cpu", "paper", "cpu,amp", "paper,standard"):
        config = cifar100.get_config(variant)
        assert json.loads(config.to_json()) and set(config) == set(digits())
        assert set(config.method) == {"name", *experiment._METHODS} and config.method.name in experiment._METHODS
        models.create(config.model.name, num_classes=100, **dict(config.model.options))
    assert cifar100.get_config("cpu").data.train_split == "train[:8000]"
    with pytest.raises(ValueError, match="takes 'paper' or 'cpu', a method, or both"):
        cifar100.get_config("gpu,sam")
