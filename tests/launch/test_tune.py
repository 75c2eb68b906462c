"""A private search by the launcher."""

import json

import numpy as np
import pytest

from configs import digits_dpsgd
from configs.finetune import labels, tune
from jaxdp.finetune import RandomRuns
from jaxdp.privacy import Ledger, OneOfDpEvent, epsilon
from launch import finetune, release
from launch.tune import with_grid

BINS = {"kind": "balls_in_bins", "separation": 73}  # batches of 16 of 1168 digits
# Of which each has an event of its own, or none.
METHODS = {"method": ("dp_sgd", "adp_alloc", "adp_clip", "sla_clip", "gep")}


def _config(**chosen):
    config = tune.get_config()
    config.pretrain.steps = 2
    config.private.update({"steps": 2, "checkpoint_every": 2, "batch_size": 16})
    config.private.physical_batch_size = 64
    config.model.options.widths = (4,)
    config.tune.update(chosen)
    config.tune.grid = {"learning_rate": (0.1, 0.3)}
    return config


@pytest.mark.slow
def test_a_search_is_one_charge_of_its_epsilon_and_tells_nothing_of_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(RandomRuns, "draw", lambda runs, secret: 2)
    root = tmp_path / "run"
    finetune.experiment(_config(score="charged"), str(root))
    result = json.loads((root / "result.json").read_text())
    assert 3.99 < result["epsilon"] <= 4.0 and result["candidates"] == 2
    assert 0 <= result["score"] <= 1 and result["best"].startswith("learning_rate 0.")
    assert "One search among 2 candidates, with 6 runs expected" in (root / "tables.md").read_text()
    with Ledger(root / "ledger.sqlite", read_only=True) as ledger:
        [name] = [row["name"] for row in ledger.report()["datasets"]]
        [event] = ledger.events(name).values()
    assert (event.mean, event.shape) == (6.0, 1.0) and "Gaussian" in str(event.event)
    search = root / "cells" / "private" / "search"
    left = {path.name for path in search.iterdir()}
    assert left == {"lock", "charges.jsonl", "released.safetensors"}
    assert not [path for path in root.rglob("*") if "metrics" in path.name]
    finetune.experiment(_config(score="charged"), str(root))  # is finished, and free
    folder = release.write(root, tmp_path / "release")
    card = json.loads((folder / "card.json").read_text())
    assert f"{result['epsilon']:.4g}"[:4] in json.dumps(card)


@pytest.mark.slow
def test_every_method_is_a_candidate_with_the_event_of_its_trainer(tmp_path):
    config = _config()
    config.private.method_options.gep.anchors = 80
    config.private.update({"batch_size": 584, "steps": 4})  # two epochs
    config.tune.grid = METHODS | {"method_options": {"adp_clip": {"quantile": (0.3, 0.6)}}}
    opened = finetune.tune.STUDY.open(config, tmp_path)
    assert list(opened.trainers)[4:6] == [
        "method adp_clip, method_options.adp_clip.quantile 0.3",
        "method adp_clip, method_options.adp_clip.quantile 0.6",
    ]
    [quantile] = [
        trainer.query.quantile
        for name, trainer in opened.trainers.items()
        if name == "method adp_clip, method_options.adp_clip.quantile 0.6"
    ]
    assert quantile == 0.6
    trained = [trainer.planned(4).event(0, 4) for trainer in opened.trainers.values()]
    paid = {event: None for event in trained}
    # A schedule has another event, and its twin, the first noise in every epoch, has not.
    assert len(paid) == 2
    assert opened.event == opened.runs.event(OneOfDpEvent(tuple(paid)))
    cost = epsilon(opened.event, delta=1e-5)
    assert 3.99 < cost <= 4.0
    one_event = opened.runs.event(trained[0])
    assert epsilon(one_event, delta=1e-5) < cost


@pytest.mark.parametrize(
    ("part", "options", "words"),
    [
        ("tune", {"score": "private"}, "tune.score"),
        ("tune", {"runs": 1.0}, r"config.tune.runs must be above 1"),
        ("tune", {"distribution": "fixed"}, r"config.tune.distribution has 'fixed'"),
        ("private", {"scaler_noise_multiplier": 2.0}, "scaler_noise_multiplier must be 0"),
        ("private", {"truncated_batch_size": 30}, "private.truncated_batch_size must be 0"),
        ("private", {"participation": BINS}, "participation.kind is 'balls_in_bins'"),
        ("data", {"adjacency": "replace_one"}, "data.adjacency must be 'add_remove'"),
        ("grid", {"method": ("dp_sgd", "sgd")}, "private.method has 'sgd'"),
        ("grid", {"clip_norm": ("a",)}, "tune.grid.clip_norm must have values such as 1.0"),
        ("grid", {"epsilon": (1.0, 2.0)}, "tune.grid has 'epsilon'"),
        ("grid", {"allow_nonfinite": (False, True)}, "tune.grid has 'allow_nonfinite'"),
        ("grid", {"learning_rate": ()}, "tune.grid.learning_rate must have at least one"),
        ("grid", {"clip_norm": (0.0,)}, "tune.grid.clip_norm must be"),
    ],
)
def test_a_config_that_cannot_work_is_refused(part, options, words, tmp_path):
    config = _config()
    if part == "grid":
        config.tune.grid = options
    else:
        with config.unlocked():
            config[part].update(options)
    with pytest.raises(ValueError, match=words):
        finetune.experiment(config, str(tmp_path / "run"))
    assert not np.any([path.suffix == ".sqlite" for path in tmp_path.rglob("*")])


def test_a_grid_of_the_command_line_makes_a_search_of_any_config():
    plain = digits_dpsgd.get_config()
    searched = with_grid(plain, "learning_rate=0.1,0.3 schedule=cosine")
    assert searched.tune.grid.to_dict() == {"learning_rate": (0.1, 0.3), "schedule": ("cosine",)}
    assert searched.tune.score == "charged" and "tune" not in plain
    assert with_grid(_config(runs=3.0), "clip_norm=1").tune.runs == 3.0
    inner = with_grid(plain, "method_options.adp_clip.quantile=0.3,0.5").tune.grid
    assert inner.method_options.adp_clip.quantile == (0.3, 0.5)
    for wrong in ("learning_rate", "learning_rate=", "=1"):
        with pytest.raises(ValueError, match="--tune must name fields"):
            with_grid(plain, wrong)
    for twice in ("clip_norm=1 clip_norm=2", "method_options=1 method_options.gep.anchors=2"):
        with pytest.raises(ValueError, match="--tune must name each field once"):
            with_grid(plain, twice)
    with pytest.raises(ValueError, match="part 'labels': noisy labels are paid once"):
        with_grid(labels.get_config(), "learning_rate=0.1,0.3")
