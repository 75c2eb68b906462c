"""Recalibration: what it keeps, what its tables hold, what it refuses."""

import json
import math
import shutil
import sys

import jax
import numpy as np
import pytest
from scipy import special
from sklearn import isotonic, linear_model

from configs.recalibration import cifar10, digits, imagenet
from jaxdp import models
from jaxdp.privacy import Ledger, PureDpEvent
from jaxdp.privacy.events import composition
from launch import calibration, frame, optimizers, recalibrate, release
from launch.simulation import Order, Outcome
from tests.launch import program, settling, tiny

pytestmark = pytest.mark.slow

SHIFTS = ("clean", "contrast", "pixelate")
METHODS = ("Acc-T", "HB split", "one source", "none")
PARTS = ("sources", "samples", "epsilon", "centre", "no privacy")


def run(config, root):
    return frame.run(tiny.undrawn(recalibrate.STUDY), config, root)


def settings(config):
    return list(
        dict.fromkeys(setting for part in recalibrate.parts(config).values() for setting in part)
    )


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Returns the workdir and the result of a study, and what its launcher printed."""
    root, config = (
        tmp_path_factory.mktemp("recalibrate"),
        tmp_path_factory.mktemp("config") / "tiny.py",
    )
    config.write_text("from tests.launch.tiny import recalibrate as get_config")
    settling.begin(root, "ledger.sqlite")
    return root, *program.study("recalibrate", str(config), root, {})


@pytest.fixture(scope="module")
def finished(launched):
    return launched[:2]


def test_the_launcher_recalibrates_and_prints_scores_and_costs(launched):
    root, _, printed = launched
    assert "4 methods under 3 shifts of 1078 test images, 6 settings" in printed
    result = json.loads((root / "result.json").read_text())
    for name, releases, epsilon in (("HB split", "1", "2"), ("none", "0", "0")):
        (line,) = (line for line in printed.splitlines() if line.startswith(name))
        assert line.removeprefix(name).split()[:2] == [releases, epsilon]
        scores = [
            result["cells"][shift][name]["centre"]["ece"][0] for shift in ("contrast", "pixelate")
        ]
        assert f"{np.median(scores):.4f}" in line
    assert "Every source pays PureDpEvent(epsilon) for one record (add_remove)" in printed
    assert "for public benchmarks only" in printed


def float64_scores(logits, labels):
    """Returns ECE in 15 bins and Brier score of the largest softmax probability."""
    logits = logits.astype(np.float64)
    p = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    right = logits.argmax(1) == labels
    cell = np.minimum(np.floor(p * 15), 14)
    gaps = [abs((right[cell == b] - p[cell == b]).sum()) for b in range(15)]
    return sum(gaps) / len(p), np.mean((right - p) ** 2)


def test_the_baseline_is_judged_on_what_each_trial_leaves_over(finished):
    root, result = finished
    parts = recalibrate.parts(tiny.recalibrate())
    with np.load(root / "logits" / "pixelate.npz") as file:
        logits, labels = file["logits"], file["labels"]
    order = Order.draw(0, records=len(labels), trials=5, settings=settings(tiny.recalibrate()))
    for factor in ("sources", "samples", "epsilon"):
        found = result["cells"]["pixelate"]["none"][factor]
        for k, setting in enumerate(parts[factor]):
            kept = [
                np.setdiff1d(np.arange(len(labels)), row[: setting.sources * setting.samples])
                for row in order.rows
            ]
            assert {len(rest) for rest in kept} == {1078 - setting.sources * setting.samples}
            eces, briers = zip(
                *(float64_scores(logits[rest], labels[rest]) for rest in kept), strict=True
            )
            assert found["ece"][k] == pytest.approx(np.mean(eces), abs=1e-5)
            assert found["ece_error"][k] == pytest.approx(
                np.std(eces, ddof=1) / math.sqrt(5), abs=1e-5
            )
            assert found["brier"][k] == pytest.approx(np.mean(briers), abs=1e-5)
    assert result["accuracy"]["pixelate"] == pytest.approx(np.mean(logits.argmax(1) == labels))


def test_tables_hold_what_was_kept(finished):
    root, result = finished
    assert result == json.loads((root / "result.json").read_text())
    kept = {}
    for shift in SHIFTS:
        for name in METHODS:
            row = json.loads(
                (root / "cells" / shift / name.replace(" ", "_") / "row.json").read_text()
            )
            kept[shift, name] = {part: row[part] for part in PARTS}
    text = (root / "tables.md").read_text()
    tables = [
        [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in part.splitlines()
            if line.startswith("|")
        ]
        for part in text.split("## ")[1:]
    ]
    overall, centre, per_shift, no_privacy, costs = (
        {row[0]: row[1:] for row in table[2:]} for table in tables
    )
    for name in METHODS:
        # the clean images do not count
        shifted = [kept[shift, name] for shift in ("contrast", "pixelate")]
        for table, factors in ((overall, ("sources", "samples", "epsilon")), (centre, ("centre",))):
            for column, (score, mean) in enumerate(
                [("ece", np.median), ("ece", np.mean), ("brier", np.median), ("brier", np.mean)]
            ):
                values = [
                    value for cell in shifted for factor in factors for value in cell[factor][score]
                ]
                assert table[name][column] == f"{mean(values):.4f}"
    assert overall.keys() == centre.keys() and len(overall["none"]) == 4
    for table, part in ((per_shift, "centre"), (no_privacy, "no privacy")):
        assert table["contrast"][0] == f"{result['accuracy']['contrast']:.4f}"
        assert table["contrast"][1:] == [
            f"{kept['contrast', name][part]['ece'][0]:.4f}" for name in METHODS
        ]
        assert list(table) == list(SHIFTS)
    worst = max(
        error for cell in kept.values() for part in cell.values() for error in part["ece_error"]
    )
    assert f"means of 5 trials. The standard error of an ECE is at most {worst:.2g}." in text
    assert "binning with a single bin would win" in text and "Brier" in text
    # 3 releases of sensitivity 1 at epsilon 2 have Laplace noise of scale 1.5 from each of 4
    # sources, 1 release 0.5.
    assert costs["Acc-T"][0] == "3" and float(costs["Acc-T"][1]) == pytest.approx(
        1.5 * math.sqrt(2 * 4), rel=0.01
    )
    assert costs["HB split"][0] == "1" and float(costs["HB split"][1]) == pytest.approx(
        0.5 * math.sqrt(2 * 4), rel=0.01
    )
    assert [costs[name][2] for name in costs] == ["2", "2", "inf", "0"]


def test_one_trial_has_no_standard_error():
    (one, two) = (recalibrate._moments([Outcome(np.full(n, 0.5), np.full(n, 0.2))]) for n in (1, 2))
    assert (one["ece_error"], two["ece_error"]) == ([None], [0.0])
    found = {"trials": 1, "cells": {"clean": {"none": {"centre": one}}}}
    assert calibration._trials(found) == "Scores are of one trial, which has no standard error."


def test_settings_are_not_mixed_up(finished):
    _, result = finished
    cell = result["cells"]["contrast"]["HB split"]
    assert cell["centre"] == {score: values[-1:] for score, values in cell["epsilon"].items()}
    assert len({cell["no privacy"]["ece"][0], *cell["epsilon"]["ece"]}) == 3
    for name in ("none", "one source"):  # no noise, whatever epsilon
        found = result["cells"]["contrast"][name]
        assert len({found["no privacy"]["ece"][0], *found["epsilon"]["ece"]}) == 1
    assert result["settings"] == {
        "sources": [[4, 5, 1.0], [8, 5, 1.0]],
        "samples": [[4, 5, 1.0], [4, 10, 1.0]],
        "epsilon": [[4, 10, 0.5], [4, 10, 2.0]],
        "centre": [[4, 10, 2.0]],
    }
    assert cell["sources"]["ece"][0] == cell["samples"]["ece"][0]  # one setting of two factors


def test_the_sources_of_the_diagrams_pay_for_every_method(finished):
    root, result = finished
    with Ledger(root / "ledger.sqlite") as ledger:
        assert len(ledger.report(delta=0.0)["datasets"]) == 4
        for i in range(4):
            (counts,) = map(composition, ledger.events(f"source {i}").values())
            assert counts == {PureDpEvent(2.0): 2}
    diagrams = result["example"]["diagrams"]
    assert list(diagrams) == ["before", "Acc-T", "HB split"]
    assert [sum(diagram["counts"]) for diagram in diagrams.values()] == [1078 - 40] * 3
    assert list(result["example"]["temperatures"]) == ["before", "Acc-T"]
    assert 0.5 < result["example"]["temperatures"]["Acc-T"] < 3


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Returns the workdir and the result of a study with all sweeps, whose network SGD trains."""
    root = tmp_path_factory.mktemp("sweeps")
    draw = calibration.plot_panels

    def draw_sweep(path, *args, **terms):
        if path.stem in ("severity", "bins", "division"):
            draw(path, *args, **terms)

    # The other figures are those of `launched`, a fifth of a second each.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "plot_panels", draw_sweep)
        patch.setattr(calibration, "plot_reliability", lambda *args, **terms: None)
        return root, frame.run(recalibrate.STUDY, tiny.recalibrate_sweeps(), root)


def logits_of(root, shift):
    with np.load(root / "logits" / f"{shift}.npz") as file:
        return file["logits"], file["labels"]


def test_severities_are_shifts_of_one_run(swept):
    root, result = swept
    assert list(result["cells"]) == ["clean", "contrast_1", "contrast_5"]
    assert result["severities"]["contrast_1"] == 1 and result["severities"]["contrast_5"] == 5
    assert result["accuracy"]["contrast_1"] > result["accuracy"]["contrast_5"] + 0.02
    table = (root / "tables.md").read_text().split("by severity")[1].split("##")[0]
    (line,) = (line for line in table.splitlines() if line.startswith("| none"))
    errors = [
        result["cells"][shift]["none"]["centre"]["ece"][0] for shift in ("contrast_1", "contrast_5")
    ]
    assert [cell.strip() for cell in line.split("|")[2:4]] == [f"{e:.4f}" for e in errors]
    assert (root / "figures" / "severity.png").stat().st_size > 10_000


def test_the_recipe_of_the_paper_trains_the_source_model(swept):
    """Fails if the optimizer of the config is not used: the golden AdamW has other logits."""
    root, result = swept
    logits, labels = logits_of(root, "clean")
    assert np.mean(logits.argmax(1) == labels) == pytest.approx(result["accuracy"]["clean"])
    assert result["accuracy"]["clean"] > 0.4
    assert (root / "source.safetensors").exists()
    rates = optimizers.optimizer(tiny.recalibrate_sweeps().train, "train")
    params = {"w": np.ones(2, np.float32)}
    state = rates.init(params)
    steps = []
    for _ in range(20):  # SGD with momentum 0.9, Nesterov, and a decay of 5e-4 w
        change, state = rates.update({"w": np.zeros(2, np.float32)}, state, params)
        steps.append(float(change["w"][0]))
    assert steps[0] == pytest.approx(-0.05 * 5e-4 * 1.9, rel=1e-5)
    assert steps[9] / steps[10] == pytest.approx(10, rel=0.2)  # the step of the schedule


def test_refits_are_judged_on_what_they_did_not_see(swept):
    root, result = swept
    logits, labels = logits_of(root, "contrast_5")
    right = logits.argmax(1) == labels
    order = np.sort(logits.astype(np.float64), 1)
    others = special.logsumexp(order[:, :-1], 1)
    design = (order[:, -1] - others)[:, None]  # the log-odds
    parts = recalibrate.parts(tiny.recalibrate_sweeps())
    settings = list(dict.fromkeys(setting for part in parts.values() for setting in part))
    drawn = Order.draw(0, records=len(labels), trials=5, settings=settings)
    briers = {"isotonic, not private": [], "Platt, not private": []}
    for row in np.asarray(drawn.rows):
        used = row[:40]
        rest = np.setdiff1d(np.arange(len(labels)), used)
        step = isotonic.IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        fitted = step.fit(design[used, 0], right[used]).predict(design[rest, 0])
        briers["isotonic, not private"].append(np.mean((fitted - right[rest]) ** 2))
        # The smoothed targets of Platt as weights of both classes.
        high, low = (
            (right[used].sum() + 1) / (right[used].sum() + 2),
            1 / ((~right[used]).sum() + 2),
        )
        target = np.where(right[used], high, low)
        line = linear_model.LogisticRegression(C=1e6, tol=1e-8).fit(
            np.concatenate([design[used]] * 2),
            np.repeat([True, False], 40),
            np.concatenate([target, 1 - target]),
        )
        fitted = line.predict_proba(design[rest])[:, 1]
        briers["Platt, not private"].append(np.mean((fitted - right[rest]) ** 2))
    for name, expected in briers.items():
        scores = result["cells"]["contrast_5"][name]
        assert scores["centre"]["brier"][0] == pytest.approx(np.mean(expected), abs=2e-4)
        assert scores["centre"] == scores["no privacy"]  # no noise, whatever epsilon
        (cost,) = (cost for cost in result["costs"] if cost["method"] == name)
        assert cost["epsilon"] is None and cost["releases"] is None


def test_options_and_divisions_are_swept(swept):
    root, result = swept
    swept_bins = result["options"]["bins"]
    assert swept_bins["values"] == [1, 5] and list(swept_bins["cells"]) == list(result["cells"])
    for shift, cells in swept_bins["cells"].items():
        assert list(cells) == ["HB split"]
        ece = cells["HB split"]["centre"]["ece"]
        assert len(ece) == 2 and ece[0] != ece[1]
        # One bin says the accuracy of 40 records to all: its Brier score without noise follows.
        logits, labels = logits_of(root, shift)
        p = np.mean(logits.argmax(1) == labels)
        expected = p * (1 - p) * (1 + 1 / 40)
        brier = cells["HB split"]["no privacy"]["brier"][0]
        assert brier == pytest.approx(expected, rel=0.05)
    assert result["settings"]["division"] == [[1, 40, 2.0], [4, 10, 2.0]]
    cell = result["cells"]["contrast_5"]["HB split"]
    assert cell["division"]["ece"][1] == cell["centre"]["ece"][0]  # one setting of two parts
    tables = (root / "tables.md").read_text()
    for title in ("by bins, with 4 sources", "by division of 40 records among sources"):
        assert f"Mean ECE over 2 shifts {title}" in tables
    for name in ("bins", "division"):
        assert (root / "figures" / f"{name}.png").stat().st_size > 10_000


def test_figures_are_drawn(finished):
    root, _ = finished
    names = {path.name for path in (root / "figures").iterdir()}
    shifts = {f"{shift}.png" for shift in SHIFTS}
    assert names == shifts | {"all_shifts.png", "reliability.png"}
    assert all((root / "figures" / name).stat().st_size > 10_000 for name in names)


def test_a_restored_ledger_is_charged_for_what_it_lacks(finished, tmp_path):
    root = shutil.copytree(finished[0], tmp_path / "run")
    settling.check(recalibrate.STUDY, tiny.recalibrate(), root, "ledger.sqlite")


@pytest.mark.parametrize("place", ["computed", "kept"])
def test_diagrams_that_were_interrupted_are_the_same_and_are_paid_once(
    finished, tmp_path, monkeypatch, place
):
    """Tests a first method that was paid for, and whose result was lost before or after it was
    kept."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    for name in (
        "result.json",
        "ledger.sqlite",
        "ledger.sqlite.head",
        ".ledger.sqlite.anchor",
        "cells/reliability/pixelate/row.json",
        "cells/reliability/pixelate/charges.jsonl",
    ):
        (tmp_path / name).unlink()
    module = sys.modules["jaxdp.recalibration.recalibrate"]
    owner, name = (
        (module, "converse") if place == "computed" else (recalibrate.recalibration, "recalibrate")
    )
    work, heard = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        heard.append(work(*args, **kwargs))
        if len(heard) == 1:
            raise KeyboardInterrupt
        return heard[-1]

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tiny.recalibrate(), tmp_path)
    assert list(tmp_path.rglob("secret_seed")) != [] or place == "kept"
    example = run(tiny.recalibrate(), tmp_path)["example"]
    first, second = (getattr(found, "parameters", found) for found in heard[:2])
    assert (
        first.temperature == second.temperature == pytest.approx(example["temperatures"]["Acc-T"])
    )
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for i in range(4):
            (counts,) = map(composition, ledger.events(f"source {i}").values())
            assert counts == {PureDpEvent(2.0): 2}  # two methods
    assert not list(tmp_path.rglob("secret_seed"))


@pytest.mark.parametrize(
    "config",
    [
        cifar10.get_config(),
        cifar10.get_config("checkpoint"),
        cifar10.get_config("wrn"),
        digits.get_config(),
        imagenet.get_config(),
        imagenet.get_config("convnext"),
        imagenet.get_config("resnet50"),
    ],
    ids=["cifar10", "checkpoint", "wrn", "digits", "imagenet", "convnext", "resnet50"],
)
def test_configs_are_consistent_and_have_the_fields_of_the_first(config):
    if config.model.name in ("vit_b16", "convnext_tiny"):
        config.model.checkpoint = "model.safetensors"
    *cells, _ = recalibrate.STUDY.cells(config)
    assert {"Acc-T", "NLL-T", "ECE-T", "HB published", "none", "one source"} <= {
        cell.method for cell in cells
    }
    assert recalibrate.parts(config)["centre"][0].epsilon == 1
    assert set(config) == set(cifar10.get_config())
    json.loads(config.to_json())


def test_images_at_the_size_of_the_paper_are_read_when_they_are_classified(monkeypatch):
    config = imagenet.get_config()
    data = recalibrate.data
    # It would read which photographs a split has, and they are not here.
    monkeypatch.setattr(data, "check_records_apart", lambda specs: None)
    shift, parts = data.shift(config.data, "fog"), data.specs(config.data, "test")
    assert not shift.in_memory and not parts["test"].in_memory
    assert data.shift(cifar10.get_config().data, "fog").in_memory  # CIFAR-10-C takes 30 MB


def test_the_paper_s_factors():
    cifar = recalibrate.parts(cifar10.get_config())
    assert cifar["sources"][-1] == (250, 10, 1.0) and cifar["samples"][-1] == (50, 50, 1.0)
    assert cifar["epsilon"][0] == (50, 30, 0.2) and cifar["centre"] == [(50, 30, 1.0)]
    large = recalibrate.parts(imagenet.get_config())
    assert large["sources"][-1] == (2000, 10, 1.0) and large["samples"][-1] == (100, 100, 1.0)
    assert large["epsilon"][0] == (100, 50, 0.2)


@pytest.mark.parametrize(
    ("config", "epochs", "images", "decay"),
    [
        (cifar10.get_config("wrn"), 200, 50_000, 5e-4),
        (cifar10.get_config("wrn_cifar100"), 200, 50_000, 5e-4),
        (imagenet.get_config("resnet50"), 90, 1_281_167, 1e-4),
    ],
    ids=["wrn", "wrn_cifar100", "resnet50"],
)
def test_the_paper_s_networks_train_by_its_recipe(config, epochs, images, decay):
    """Section E.1: SGD from 0.1 with a cosine, for 200 or 90 epochs."""
    how = config.train
    assert math.ceil(images / how.batch_size) * epochs == how.steps
    assert (how.optimizer, how.schedule, how.learning_rate) == ("sgd", "cosine", 0.1)
    assert how.weight_decay == decay and how.optimizer_options.sgd.momentum == 0.9
    assert config.data.parts.public and not config.model.checkpoint
    first = optimizers.optimizer(how, "train")
    params = {"w": np.ones(1, np.float32)}
    change, _ = first.update({"w": np.ones(1, np.float32)}, first.init(params), params)
    push = 1.9 if how.optimizer_options.sgd.nesterov else 1.0
    assert float(change["w"][0]) == pytest.approx(-0.1 * push * (1 + decay), rel=1e-5)


def test_the_public_classifier_is_released_if_it_was_trained_here(finished, tmp_path):
    root, _ = finished
    served = models.load_released(release.write(root, tmp_path / "release"))
    assert served.card["guarantees"] == []
    images = np.random.default_rng(0).random((3, *served.card["input"]["shape"]), np.float32)
    network = recalibrate.models.network(tiny.recalibrate().model)
    params = models.load_params(root / "source.safetensors")
    logits = jax.jit(network.apply_fn)(params, images)
    np.testing.assert_allclose(served(images), special.softmax(logits, axis=1), atol=1e-6)
    shutil.copytree(root, tmp_path / "run")
    (tmp_path / "run" / "source.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"source\.safetensors is not in the workdir"):
        release.write(tmp_path / "run", tmp_path / "other")
