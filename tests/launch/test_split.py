"""Split Adaptation end to end, on real digits at the smallest size."""

import json
import shutil

import numpy as np
import pytest

from configs.split import cifar10, cifar100, deit_b, digits, swin_l, vit_l
from jaxdp import models
from jaxdp.data import bundled
from jaxdp.data.selection import few_shots, smallest_class
from jaxdp.privacy import Ledger
from jaxdp.privacy.events import composition
from launch import frame, release, split, split_figures, split_runs
from tests.launch import golden, tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    return root, frame.run(split.STUDY, tiny.split(), root)


def test_the_result_is_what_it_was(finished):
    assert golden.differences("split", finished[1], tolerance=0.05) == []


def folder(root, *cell):
    return root.joinpath("cells", *map(frame.file_name, cell))


def row(root, *cell):
    return json.loads((folder(root, *cell) / "row.json").read_text())


def test_all_tables_and_figures_are_written(finished):
    root, result = finished
    text = (root / "tables.md").read_text()
    for title in (
        "Table 1",
        "Table 2",
        "Table 3",
        "Table 4",
        "Tables 5 and 6",
        "Figure 4",
        "Table 9",
        "Table 10",
        "Training until the loss does not decrease",
        "A real epsilon",
    ):
        assert f"## {title}" in text
    assert "inf (empirical only)" in text and "Chance is 20 %" in text
    for name in (
        "noise.png",
        "attack_noise.png",
        "tradeoff.png",
        "private.png",
        "reconstructions.png",
        "attackers.png",
    ):
        assert (root / name).stat().st_size > 10_000
    assert json.loads((root / "result.json").read_text()) == json.loads(json.dumps(result))


def test_numbers_are_those_of_the_runs(finished):
    root, result = finished
    accuracies = [row(root, "runs", "Linear probing", 3, seed, 1.0)["accuracy"] for seed in (1, 42)]
    found = result["accuracy"]["Linear probing"]["3"]["accuracy"]
    assert found["mean"] == pytest.approx(np.mean(accuracies))
    assert found["error"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2)
    assert (
        f"{100 * found['mean']:.1f} ± {100 * found['error']:.1f}"
        in (root / "tables.md").read_text()
    )
    ablation = result["ablation"]
    assert ablation["Split Adaptation"]["loss"] == {"mean": 0.0, "error": 0.0}
    untuned = (
        ablation["Split Adaptation"]["accuracy"]["mean"]
        - ablation["backend not tuned"]["accuracy"]["mean"]
    )
    assert ablation["backend not tuned"]["loss"]["mean"] == pytest.approx(untuned)


def test_learning_rates_are_chosen_on_the_servers_task(finished):
    root, result = finished
    for name, rate in result["learning_rates"].items():
        tried = {r: row(root, "tuning", name, r)["accuracy"] for r in (1e-3, 1e-2)}
        assert tried[rate] == max(tried.values())


def test_the_ledger_shows_what_was_paid(finished):
    root, result = finished
    with Ledger(root / "ledger.sqlite") as ledger:
        assert ledger.epsilon(split.PUBLISHED_CLIENT) == np.inf
        for found, asked in zip(result["private"], (1.0, 8.0), strict=True):
            name = f"client 1, 3 shots, 2 dimensions, epsilon {asked:g}"
            assert (
                found["epsilon"] == ledger.epsilon(name)
                and 0.95 * asked < found["epsilon"] <= asked
            )
    assert set(spends(root).values()) == {1} and len(spends(root)) == 5


def spends(root):
    """Returns how often every client paid."""
    with Ledger(root / "ledger.sqlite") as ledger:
        names = [entry["name"] for entry in ledger.report()["datasets"]]
        return {name: max(composition(ledger.events(name)[None]).values()) for name in names}


def test_the_attackers_are_where_they_belong(finished):
    attacks = finished[1]["attacks"]
    ours = {"mean image", "noise-aware", "aggregating"}
    assert set(attacks["Split Adaptation"]) == ours
    assert set(attacks["Split learning"]) == {"mean image", "noise-aware"}
    # 8x8: no 11-tap window
    assert set(attacks["Split learning"]["noise-aware"]) == {
        "psnr",
        "ssim_uniform7",
    }


def test_what_was_paid_for_and_lost_is_made_again_and_not_paid_again(finished, tmp_path):
    root, result = finished
    again = tmp_path / "again"
    shutil.copytree(root, again)
    (again / "result.json").unlink()
    shutil.rmtree(folder(again, "runs", "SA, noise once", 3, 42, 1.0))
    shutil.rmtree(folder(again, "private", 3, 2, 8.0, 42))
    shutil.rmtree(folder(again, "attacks", "Split Adaptation", 1.0))
    resumed = frame.run(tiny.undrawn(split.STUDY), tiny.split(), again)
    assert resumed["accuracy"] == result["accuracy"] and resumed["private"] == result["private"]
    assert resumed["attacks"] == result["attacks"] and spends(again) == spends(root)


def test_few_shots_are_drawn_from_the_pool(tmp_path):
    task = split_runs.Bench(tiny.split(), tmp_path).client
    few = few_shots(task.pool, 3, seed=1)
    np.testing.assert_array_equal(np.bincount(few["label"]), [3] * 5)
    pool, test = (
        {image.tobytes() for image in part.gather(np.arange(len(part)))["image"]}
        for part in (task.pool, task.test)
    )
    drawn = [image.tobytes() for image in few["image"]]
    assert set(drawn) <= pool and len(set(drawn)) == 15 and not set(drawn) & test
    assert (few_shots(task.pool, 3, seed=2)["image"] != few["image"]).any()
    with pytest.raises(
        ValueError, match=f"shots must be at most {smallest_class(task.pool)}, .* got 1000"
    ):
        few_shots(task.pool, 1000, seed=1)


def test_known_images_turned_make_another_task(tmp_path):
    known, turned = (
        split_runs.Bench(tiny.split(data__tuning__rotate=k), tmp_path).tuning for k in (0, 1)
    )
    first, second = (few_shots(task.pool, 2, seed=1) for task in (known, turned))
    np.testing.assert_array_equal(first["label"], second["label"])
    np.testing.assert_array_equal(np.rot90(first["image"], axes=(1, 2)), second["image"])


def test_the_picture_of_the_augmentation_is_drawn(tmp_path):
    images = bundled("digits").gather(np.arange(3))["image"]
    split_figures.draw_hilbert(images, tmp_path / "hilbert.png")
    assert (tmp_path / "hilbert.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        split_figures.draw_hilbert(2 * images, tmp_path / "none.png")


def test_sweeps_have_the_values_of_the_papers_tables():
    for config in (digits.get_config("appendix"), vit_l.get_config()):
        numbers = [round(196 * share) for share in config.sweeps.patches]
        assert (numbers[:11], numbers[11:]) == ([*range(0, 101, 10)], [120, 140, 160, 180])
        assert (len(config.sweeps.copies), max(config.sweeps.copies)) == (15, 100)
        variants = [split.swept(config, "patches", share) for share in config.sweeps.patches]
        replaced = [
            round(variant.patches * config.client.patch_share * 196) for variant in variants
        ]
        assert replaced == numbers
    assert swin_l.get_config().sweeps.patches == ()  # a Swin replaces no patches


def test_a_workdir_grows_by_patiences_and_not_by_another_number_of_epochs():
    grown, changed, same = (
        split._grows(tiny.split(**changes))
        for changes in ({"rule__patience": (1, 5)}, {"rule__epochs": 9}, {})
    )
    assert grown == same != changed


@pytest.mark.parametrize("module", [cifar10, cifar100, vit_l, deit_b, swin_l])
def test_larger_configs_have_the_same_fields(module):
    def fields(config, prefix=""):
        for name, value in config.items():
            yield from (
                fields(value, f"{prefix}{name}.") if hasattr(value, "items") else [prefix + name]
            )

    free = (
        "model.options.",
        "model.preprocessing",
        "auxiliary.model.",
        "data.tuning.",
        "auxiliary.train.",
    )
    same = [{f for f in fields(c.get_config()) if not f.startswith(free)} for c in (module, digits)]
    assert same[0] == same[1]
    assert list(split.STUDY.cells(module.get_config()))


def test_the_public_backbone_is_released(finished, tmp_path):
    root, _ = finished
    served = models.load_released(release.write(root, tmp_path / "release"))
    assert served.card["guarantees"] == []
    params = models.load_params(root / "backbone.safetensors")
    network = split_runs.models.network(tiny.split().model)
    images = np.random.default_rng(0).random((3, *served.card["input"]["shape"]), np.float32)
    logits = np.asarray(network.apply_fn(params, images), np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(served(images), powers / powers.sum(1, keepdims=True), atol=1e-6)
