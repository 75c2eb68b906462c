"""The adaptation experiment: what it keeps, what it reads, what it refuses."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
from scipy.special import log_ndtr

from configs.tta import cifar10, cifar10_batch_one, digits, imagenet_c, imagenet_r
from jaxdp import data
from jaxdp.privacy import Ledger
from jaxdp.release import alone
from jaxdp.tta import experiment
from jaxdp.tta.adapter import Adapter

pytestmark = pytest.mark.usefixtures("quick_compilation")


def small():
    config = digits.get_config()
    config.data.images, config.tuning.images = 32, 64
    config.data.corruptions = ("gaussian_noise", "contrast")
    config.model.options.depth = 2
    config.train.steps = 30
    config.protocol.seeds = 2
    config.methods = ("Tent-COME",)
    config.privacy.budgets = (5.0,)
    config.tuning.learning_rates = (1e-3, 10.0)
    config.tuning.clipped_steps = (1e-3,)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapt")
    return root, experiment.run(small(), root)


def cell(result, method, setting):
    (found,) = [c for c in result["cells"] if (c["method"], c["setting"]) == (method, setting)]
    return found


def gdp_delta(epsilon, mu):
    """Dong, Roth, Su 2022, in float64."""
    first, second = log_ndtr(-epsilon / mu + mu / 2), log_ndtr(-epsilon / mu - mu / 2)
    return math.exp(first) - math.exp(epsilon + second)


def test_tables_are_means_over_the_runs_that_were_kept(finished):
    root, result = finished
    assert {(c["method"], c["setting"]) for c in result["cells"]} == {
        *(("Tent-COME", setting) for setting in ("original", "clipped", "epsilon 5")),
        ("no adaptation", "original"),
    }
    runs = [json.loads(path.read_text()) for path in (root / "runs").glob("Tent-COME_epsilon_5_*.json")]
    means = [np.mean(list(run["accuracy"].values())) for run in runs]
    found = cell(result, "Tent-COME", "epsilon 5")
    assert len(means) == 2
    np.testing.assert_allclose([found["mean"], found["std"]], [np.mean(means), np.std(means, ddof=1)])
    source = cell(result, "no adaptation", "original")
    np.testing.assert_allclose(found["over_source"][0], found["mean"] - source["mean"], atol=1e-12)
    np.testing.assert_allclose(
        cell(result, "Tent-COME", "clipped")["over_original"][0],
        cell(result, "Tent-COME", "clipped")["mean"] - cell(result, "Tent-COME", "original")["mean"],
        atol=1e-12,
    )
    text = (root / "tables.md").read_text()
    assert text.count("## ") == 5 and f"{100 * found['mean']:.1f} ± {100 * found['std']:.1f}" in text
    for name in ("by_epsilon.png", "stream_original.png", "gain_clipped.png", "stream_epsilon_5.png"):
        assert (root / name).stat().st_size > 10_000


def test_both_epsilons_are_exact_and_in_the_ledger(finished):
    root, result = finished
    found = cell(result, "Tent-COME", "epsilon 5")
    sigma = found["noise_multiplier"]
    assert found["visits"] == 2  # every photograph comes under two corruptions
    assert gdp_delta(found["epsilon_sample"], 2 / sigma) == pytest.approx(1e-6, rel=0.02)
    assert gdp_delta(found["epsilon_unit"], 2 * math.sqrt(2) / sigma) == pytest.approx(1e-6, rel=0.02)
    assert found["epsilon_sample"] <= 5 < found["epsilon_unit"]
    with Ledger(root / "ledger.sqlite") as ledger:
        assert ledger.epsilon("Tent-COME, epsilon 5, stream 0") == pytest.approx(found["epsilon_unit"], rel=1e-3)
        for setting in ("original", "clipped"):
            assert ledger.epsilon(f"Tent-COME, {setting}, stream 1") == math.inf


def test_hyper_parameters_come_from_the_held_out_corruptions_only(finished):
    root, result = finished
    tried = json.loads((root / "tuning" / "Tent-COME_original.json").read_text())
    assert [row["learning_rate"] for row in tried] == [1e-3, 10.0]
    best = max(tried, key=lambda row: row["accuracy"])
    assert cell(result, "Tent-COME", "original")["learning_rate"] == best["learning_rate"]
    task = experiment._Task.of(small(), root)
    assert tuple(task.tuning) == ("speckle_noise", "gaussian_blur") and len(task.evaluation) == 2
    clean = data.bundled("digits").split([0.6, 0.4], seed=0)[1].gather(np.arange(128))["label"]
    seen = [source.arrays["label"] for source in (*(s["contrast"] for s in task.evaluation), *task.tuning.values())]
    parts = [clean[:32], clean[32:64], clean[64:128], clean[64:128]]  # other photographs for each stream and tuning
    for found, expected in zip(seen, parts, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_interrupted_experiment_keeps_its_runs_and_pays_for_none_of_them_again(finished, tmp_path, capsys):
    root, result = finished
    with Ledger(root / "ledger.sqlite") as ledger:
        before = {entry["name"]: entry["proven_epsilon"] for entry in ledger.report(delta=1e-6)["datasets"]}
    (root / "result.json").unlink()
    (root / "runs" / "Tent-COME_epsilon_5_1.json").unlink()
    again = experiment.run(small(), root)
    with Ledger(root / "ledger.sqlite") as ledger:
        after = {entry["name"]: entry["proven_epsilon"] for entry in ledger.report(delta=1e-6)["datasets"]}
    repeated = "Tent-COME, epsilon 5, stream 1"  # its noise was fresh, so it is charged a second time
    assert after.pop(repeated) > before.pop(repeated)
    assert after == before
    assert cell(again, "Tent-COME", "clipped") == cell(result, "Tent-COME", "clipped")
    assert "nothing to do" not in capsys.readouterr().out
    assert experiment.run(small(), root) == json.loads((root / "result.json").read_text())
    assert "nothing to do" in capsys.readouterr().out


def test_a_crash_in_the_middle_of_a_run_is_charged_once(finished, tmp_path, monkeypatch):
    root, result = finished
    for name in ("source.safetensors", "tuning"):
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy
        copy(root / name, tmp_path / name)
    step, calls = Adapter.step, itertools.count()

    def dies(adapter, *args, **kwargs):
        found = step(adapter, *args, **kwargs)
        if next(calls) in crashes:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Adapter, "step", dies)
    batches = 64 // small().protocol.batch_size
    crashes = {0, 2 * batches + 2, 2 * batches + 4}  # in a run without noise, and twice in one with noise
    for _ in crashes:
        with pytest.raises(KeyboardInterrupt):
            experiment.run(small(), tmp_path)
        assert len(list((tmp_path / "runs").glob("*/secret_seed"))) == 1
    again = experiment.run(small(), tmp_path)
    assert all(path.suffix == ".json" for path in (tmp_path / "runs").iterdir())
    assert cell(again, "Tent-COME", "clipped") == cell(result, "Tent-COME", "clipped")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for seed in (0, 1):
            found = ledger.epsilon(f"Tent-COME, epsilon 5, stream {seed}")
            assert found == pytest.approx(cell(again, "Tent-COME", "epsilon 5")["epsilon_unit"], rel=1e-3)


def test_a_workdir_is_used_by_one_process_at_a_time(tmp_path):
    with alone(tmp_path), pytest.raises(ValueError, match="another process is running in"):
        experiment.run(small(), tmp_path)


def test_what_is_no_public_benchmark_is_refused_before_anything_is_read(tmp_path):
    config = small()
    config.public_benchmark = False
    with pytest.raises(ValueError, match="public_benchmark must be True"):
        experiment.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_config_in_the_same_workdir_is_refused(finished):
    config = small()
    config.privacy.budgets = (6.0,)
    with pytest.raises(ValueError, match=r"another privacy\.budgets; use a new workdir"):
        experiment.run(config, finished[0])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("methods", ("Tent", "Tempt"), "config.methods has 'Tempt'; there are Tent, EATA"),
        ("data.images", 600, "together need 1200 photographs, but digits"),
        ("model.preprocessing", None, "config.model.preprocessing must be given"),
        ("privacy.adjacency", "add_remove", "config.privacy.adjacency must be 'replace_one' or 'zero_out'"),
    ],
)
def test_mistakes_in_a_config_are_named(finished, tmp_path, field, value, message):
    config = small()
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict({field: value})
    source = finished[0] / "source.safetensors"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "source.safetensors").write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match=message):
        experiment.run(config, tmp_path / "run")


def test_the_private_form_of_each_method_is_described(finished):
    text = (finished[0] / "methods.txt").read_text()
    assert "Tent-COME: private Tent" in text and "COME's entropy of the opinion" in text


def test_given_hyper_parameters_are_not_tuned(finished, tmp_path):
    config = small()
    config.hyper_parameters = {"Tent": {"clipped": {"learning_rate": 0.5, "clip_norm": 2.0}}}
    assert experiment._choose(config, None, "Tent", None, "clipped", tmp_path) == {
        "learning_rate": 0.5,
        "clip_norm": 2.0,
    }


@pytest.mark.parametrize(
    "config",
    [
        cifar10.get_config(),
        cifar10_batch_one.get_config("8"),
        imagenet_c.get_config(),
        imagenet_c.get_config("episodic"),
        imagenet_c.get_config("convnext"),
        imagenet_r.get_config(),
    ],
    ids=["cifar10", "batch_one", "imagenet_c", "episodic", "convnext", "imagenet_r"],
)
def test_configs_name_known_corruptions_methods_and_settings(config):
    assert set(config.data.corruptions) <= {*data.CORRUPTIONS, "clean"}
    assert set(config.tuning.corruptions) == set(data.HELD_OUT_CORRUPTIONS)
    settings = set(experiment._settings(config))
    for given in config.hyper_parameters.values():
        assert set(given) == settings
        assert all(choice.learning_rate > 0 for choice in given.values())
    json.loads(config.to_json())


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="variant must be 'continual', 'episodic' or 'convnext'"):
        imagenet_c.get_config("cyclic")
