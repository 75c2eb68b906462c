"""benchmarks/results/evidence_tta.json has the runs of configs/tta/usps_shift.py."""

import json
import math

import jax
import numpy as np
import pytest

from benchmarks import evidence_tta, pages
from benchmarks.registry import RESULTS
from jaxdp.models import create
from launch import adapt_settings

FOUND = json.loads((RESULTS / "evidence_tta.json").read_text())


@pytest.mark.parametrize("study", [name for name in FOUND if name in evidence_tta.STUDIES])
def test_the_runs_are_those_of_the_config(study):
    config, found = evidence_tta.STUDIES[study](), FOUND[study]
    assert found["source models"] == config.protocol.sources
    assert found["streams"] * found["source models"] == config.protocol.seeds
    assert found["images per domain"] == config.data.images and {*found["domains"]} == {
        *config.data.corruptions
    }
    pairs = [(cell["method"], cell["setting"]) for cell in found["cells"]]
    assert {*pairs} == {*adapt_settings.compared(config), ("no adaptation", "original")}
    lengths = {row["images"] for row in found.get("by length", ())}
    assert lengths - {config.data.images} == {*config.protocol.lengths}
    for cell in found["cells"]:
        assert all(
            math.isfinite(number) for number in (*cell["over_source"], *cell["over_original"])
        )


def test_the_costs_of_training_and_adaptation_are_differences():
    points = [
        {"epsilon": 8.0, "accuracy": 0.85, "deviation": 0.01},
        {"epsilon": 2.0, "accuracy": 0.7, "deviation": None},
    ]
    training = {"runs": {"cifar10_full": {"records": 9, "without_privacy": 0.9, "points": points}}}
    cells = [
        {"method": "Tent", "setting": "epsilon 10", "over_original": [0.02, 0.004]},
        {"method": "Tent", "setting": "original", "over_original": [0.0, 0.0]},
    ]
    gains = {"original": [0.03, 0.01], "epsilon 10": [0.02, 0.01]}
    one = {"cells": cells, "mean gain of the methods": gains}
    report = {"continual": one, "episodic": {"cells": [], "mean gain of the methods": gains}}
    found = evidence_tta.costs(training, {"runs": {}}, report)
    changes = {(row["what is private"], row["epsilon"]): row["change"][0] for row in found}
    assert changes == pytest.approx(
        {
            ("DP-SGD on scattering features, 9 images of CIFAR-10", 8.0): -0.05,
            ("DP-SGD on scattering features, 9 images of CIFAR-10", 2.0): -0.2,
            ("adaptation, continual, mean of the five", 10.0): -0.01,
            ("adaptation, continual, Tent", 10.0): 0.02,
            ("adaptation, episodic, mean of the five", 10.0): -0.01,
        }
    )
    lines = evidence_tta.cost_tables(training, {"runs": {}}, report)["costs of privacy"]
    table = pages.markdown(lines)
    assert "-5.0 ± 1.0" in table and "-20.0" not in table


def test_group_norms_take_the_place_of_batch_norms():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(16, 8, 8, 3)).astype(np.float32)
    model = create("resnet20", num_classes=4, depth=8, norm="group", groups=2)
    given = jax.tree.map(
        np.asarray, dict(jax.jit(model.init)(jax.random.key(1), images[:1])["params"])
    )
    for name in (name for name in given if "norm" in name):
        shape = given[name]["scale"].shape
        scale, bias = 0.5 + rng.uniform(size=shape), rng.normal(size=shape)
        given[name] = {"scale": np.float32(scale), "bias": np.float32(bias)}

    apply = jax.jit(
        lambda params: model.apply({"params": params}, images, capture_intermediates=True)
    )

    def gap(params):
        outputs = apply(params)[1]["intermediates"]
        gaps = []
        for name in (name for name in given if "norm" in name):
            output = np.asarray(outputs[name]["__call__"][0], np.float64)
            gaps.append(np.abs(output.mean((0, 1, 2)) - given[name]["bias"]).max())
            gaps.append(np.abs(output.std((0, 1, 2)) - given[name]["scale"]).max())
        return max(gaps)

    made = evidence_tta.group_norms(model, given, images)
    assert gap(made) < 1e-3 < gap(given)
    assert all(
        np.array_equal(made[name]["kernel"], given[name]["kernel"])
        for name in given
        if "conv" in name
    )
