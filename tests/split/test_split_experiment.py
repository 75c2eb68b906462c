"""The experiment end to end, on real digits at the smallest size."""

import json
import shutil

import numpy as np
import pytest

from configs.split import cifar10, deit_b, digits, swin_l, vit_l
from jaxdp.privacy import Ledger
from jaxdp.privacy.events import composition
from jaxdp.release import alone
from jaxdp.split import experiment, tasks

pytestmark = pytest.mark.usefixtures("quick_compilation")


def tiny_config():
    config = digits.get_config()
    options = {"patch_size": 4, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 16}
    for part in (config, config.auxiliary):
        part.model.options = options
        part.train.update({"steps": 100, "learning_rate": 1e-2})
    config.update({"seeds": (1, 42), "shots": (3,), "learning_rates": (1e-3, 1e-2)})
    config.data.server_images = 40
    config.tuning.seeds = (1,)
    config.server.update({"frontends": 0, "samples": 4})
    config.client.copies = 2
    config.adaptation.epochs = 2
    config.baselines.epochs = 2
    # One of each kind: most of the time goes into compilation.
    config.methods = ("Linear probing", "Split Adaptation", "SA, noise once")
    config.stolen = ("Quantised frontend",)
    rows = ("Split Adaptation", "backend not tuned", "one noisy copy (no patch retrieval)")
    config.ablation.update({"shots": 3, "rows": rows})
    uploads, attackers = ("Split learning", "Split Adaptation"), ("noise-aware", "aggregating")
    config.attack.update({"uploads": uploads, "attackers": attackers, "images": 40, "epochs": 1})
    config.attack.epsilons = (8.0,)
    config.noise.update({"scales": (0.8,), "seeds": 1})
    config.private.update({"epsilons": (1.0, 8.0), "dimensions": (2,), "shots": (5,), "steps": 5})
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick_compilation):
    root = tmp_path_factory.mktemp("split")
    return root, experiment.run(tiny_config(), root)


def test_all_tables_and_figures_are_written(finished):
    root, result = finished
    text = (root / "tables.md").read_text()
    for title in ("Table 1", "Table 2", "Table 3", "Table 4", "Tables 5 and 6", "Figure 4", "A real epsilon"):
        assert f"## {title}" in text
    assert "inf (empirical only)" in text and "Chance is 20 %" in text
    for name in ("noise.png", "attack_noise.png", "private.png", "reconstructions.png"):
        assert (root / name).stat().st_size > 10_000
    assert json.loads((root / "result.json").read_text()) == json.loads(json.dumps(result))


def test_numbers_are_those_of_the_runs(finished):
    root, result = finished
    runs = [json.loads((root / "runs" / f"Linear probing, 3 shots, seed {s}.json").read_text()) for s in (1, 42)]
    accuracies = [run["accuracy"] for run in runs]
    cell = result["accuracy"]["Linear probing"]["3"]["accuracy"]
    assert cell["mean"] == pytest.approx(np.mean(accuracies))
    assert cell["error"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2)
    assert f"{100 * cell['mean']:.1f} ± {100 * cell['error']:.1f}" in (root / "tables.md").read_text()
    published = [
        json.loads((root / "runs" / f"Split Adaptation, 3 shots, seed {seed}.json").read_text()) for seed in (1, 42)
    ]
    ablated = [json.loads((root / "runs" / f"ablation, Split Adaptation, seed {s}.json").read_text()) for s in (1, 42)]
    assert published == ablated  # the same run, made twice
    assert result["ablation"]["Split Adaptation"]["loss"] == {"mean": 0.0, "error": 0.0}


def test_learning_rates_are_chosen_on_the_servers_task(finished):
    root, result = finished
    for name, rate in result["learning_rates"].items():
        tried = {r: json.loads((root / "tuning" / f"{name}, {r:g}.json").read_text()) for r in (1e-3, 1e-2)}
        assert tried[rate]["accuracy"] == max(found["accuracy"] for found in tried.values())


def test_the_ledger_shows_what_was_paid(finished):
    root, result = finished
    with Ledger(root / "ledger.sqlite") as ledger:
        assert ledger.epsilon(experiment.PUBLISHED_CLIENT) == np.inf
        for row, asked in zip(result["private"], (1.0, 8.0), strict=True):
            name = f"client 1, 5 shots, 2 dimensions, epsilon {asked:g}"
            assert row["epsilon"] == ledger.epsilon(name) and 0.95 * asked < row["epsilon"] <= asked
    assert set(spends(root).values()) == {1} and len(spends(root)) == 5


def spends(root):
    """How often every client paid."""
    with Ledger(root / "ledger.sqlite") as ledger:
        names = [entry["name"] for entry in ledger.report()["datasets"]]
        return {name: max(composition(ledger.events(name)[None]).values()) for name in names}


def test_the_attackers_are_where_they_belong(finished):
    attacks = finished[1]["attacks"]
    assert set(attacks["Split Adaptation"]) == {"mean image", "noise-aware", "aggregating"}
    assert set(attacks["Split learning"]) == {"mean image", "noise-aware"}
    assert set(attacks["Split learning"]["noise-aware"]) == {"psnr", "ssim_uniform7"}  # 8x8: no 11-tap window


def test_a_finished_run_is_kept_and_an_interrupted_one_goes_on(finished, tmp_path, capsys):
    root, result = finished
    assert experiment.run(tiny_config(), root) == json.loads((root / "result.json").read_text())
    assert "nothing to do" in capsys.readouterr().out
    again = tmp_path / "again"
    shutil.copytree(root, again)
    (again / "result.json").unlink()
    lost = again / "runs" / "SA, noise once, 3 shots, seed 42.json"
    lost.unlink()
    for path in ("private, 5 shots, 2 dimensions, epsilon 8, seed 42.json", "attack, Split Adaptation.json"):
        (again / "runs" / path).unlink()  # paid for, and lost
    resumed = experiment.run(tiny_config(), again)
    assert resumed["accuracy"] == result["accuracy"] and resumed["private"] == result["private"]
    assert resumed["attacks"] == result["attacks"] and spends(again) == spends(root)


def test_one_experiment_runs_in_a_workdir(tmp_path):
    with alone(tmp_path), pytest.raises(ValueError, match="another process is running in"):
        experiment.run(tiny_config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_mistakes_in_a_config_are_named_before_anything_is_written(tmp_path):
    config = tiny_config()
    config.public_benchmark = False
    with pytest.raises(ValueError, match="public_benchmark must be True"):
        experiment.run(config, tmp_path)
    config = tiny_config()
    config.ablation.shots = 7
    with pytest.raises(ValueError, match=r"ablation\.shots must be one of"):
        experiment.run(config, tmp_path)
    config = tiny_config()
    config.ablation.rows = ("without Hilbert",)
    with pytest.raises(ValueError, match=r"ablation\.rows must be some of .* with Split Adaptation, got"):
        experiment.run(config, tmp_path)
    config = tiny_config()
    config.seeds = ()
    with pytest.raises(ValueError, match="seeds must have at least one"):
        experiment.run(config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_data_that_does_not_fit_is_refused(tmp_path):
    config = tiny_config()
    config.model.num_classes = 4
    with pytest.raises(ValueError, match="num_classes must be 5"):
        tasks.load(config, tmp_path)
    config = tiny_config()
    config.data.pretrain_fraction = 1.0
    with pytest.raises(ValueError, match="pretrain_fraction must be in"):
        tasks.load(config, tmp_path)


def test_few_shots_are_drawn_from_the_pool(finished):
    task = tasks.load(tiny_config(), finished[0]).client
    few = task.few(3, seed=1)
    np.testing.assert_array_equal(np.bincount(few.labels), [3] * 5)
    pool, test = ({image.tobytes() for image in part.images} for part in (task.pool, task.test))
    drawn = [image.tobytes() for image in few.images]
    assert set(drawn) <= pool and len(set(drawn)) == 15 and not set(drawn) & test
    assert (task.few(3, seed=2).images != few.images).any()
    with pytest.raises(ValueError, match="shots=1000, but class 0 has only"):
        task.few(1000, seed=1)


@pytest.mark.parametrize("module", [cifar10, vit_l, deit_b, swin_l])
def test_larger_configs_have_the_same_fields(module):
    def fields(config, prefix=""):
        for name, value in config.items():
            yield from fields(value, f"{prefix}{name}.") if hasattr(value, "items") else [prefix + name]

    free = ("model.options.", "model.preprocessing", "auxiliary.model.", "data.tuning.", "auxiliary.train.")
    same = [{f for f in fields(c.get_config()) if not f.startswith(free)} for c in (module, digits)]
    assert same[0] == same[1]
