"""The launcher on a public checkpoint: parts, kept features, LoRA, optimizers, and the curve over
epsilon."""

import json
import re

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

from configs.finetune import cifar10_squeezenet
from jaxdp import data, models
from launch import curve, finetune, frame, trainers
from tests.launch import tiny

SIZES = {"patch_size": 4, "width": 8, "depth": 1, "num_heads": 2, "mlp_width": 12}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A ViT for grey 8x8 images and 3 classes in timm's names."""
    shapes = {
        "cls_token": (1, 1, 8),
        "pos_embed": (1, 5, 8),
        "patch_embed.proj.weight": (8, 1, 4, 4),
    }
    shapes |= {"patch_embed.proj.bias": (8,), "head.weight": (3, 8), "head.bias": (3,)}
    for name in ("blocks.0.norm1", "blocks.0.norm2", "norm"):
        shapes |= {f"{name}.weight": (8,), f"{name}.bias": (8,)}
    for name, rows, columns in (
        ("attn.qkv", 24, 8),
        ("attn.proj", 8, 8),
        ("mlp.fc1", 12, 8),
        ("mlp.fc2", 8, 12),
    ):
        shapes |= {f"blocks.0.{name}.weight": (rows, columns), f"blocks.0.{name}.bias": (rows,)}
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("public") / "vit.safetensors"
    save_file(
        {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()},
        path,
    )
    return str(path)


def config_of(checkpoint, **changes):
    config = tiny.finetune(
        **{
            "model.name": "vit_tiny",
            "model.checkpoint": checkpoint,
            "model.trainable": "head",
            "model.preprocessing": {"size": 8, "mean": (0.5,), "std": (0.5,)},
            "pretrain.new_head": True,
            "data.crop_padding": 0,
            "data.parts.public": 0.05,
            "private.augmult": 0,
            "private.steps": 2,
            "private.checkpoint_every": 2,
        }
    )
    config.model.options = SIZES
    config.update_from_flattened_dict(changes)
    return config


def served(checkpoint, path):
    """Returns the accuracy of saved parameters in the plain model, as a user serves them."""
    pretrained = models.load_checkpoint(
        checkpoint,
        model=models.create("vit_tiny", num_classes=10, **SIZES),
        preprocessing=models.Preprocessing(size=8, mean=(0.5,), std=(0.5,)),
        new_head=True,
    )
    test = data.bundled("digits").split([0.05, 0.65, 0.3], seed=0)[2]
    rows = test.gather(np.arange(len(test)))
    params = models.load_params(path)
    assert jax.tree.structure(params) == jax.tree.structure(dict(pretrained.params))
    found = np.asarray(jax.jit(pretrained.apply_fn)(params, rows["image"])).argmax(-1)
    return pretrained, params, (found == rows["label"]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["", "workdir"])  # the curve below keeps features in memory
def test_only_the_head_moves_and_the_saved_model_is_the_plain_one(checkpoint, keep, tmp_path):
    changes = {
        "model.features.keep": keep,
        "model.features.dimensions": 6 * (keep == "workdir"),
        "private.optimizer": "adamw",
        "private.weight_decay": 0.01,
    }
    result = frame.run(finetune.STUDY, config_of(checkpoint, **changes), tmp_path / "run")
    before, params, accuracy = served(checkpoint, tmp_path / "run" / "params.safetensors")
    assert result["private"] == pytest.approx(accuracy, abs=0.01)
    for name in set(params) - {"head"}:
        jax.tree.map(np.testing.assert_array_equal, params[name], before.params[name])
    assert np.abs(params["head"]["kernel"]).max() > 0
    kept = {path.name for path in (tmp_path / "run").glob("features_*.npz")}
    roles = ("public", "private", "test") if keep == "workdir" else ()
    assert kept == {f"features_{role}.npz" for role in roles}


@pytest.mark.slow
def test_scattering_needs_no_file_and_trains_only_its_head(tmp_path):
    """Catches a head that starts elsewhere than at zero, or features that are not those of the
    saved model."""
    config = config_of("", **{"model.name": "scattering", "model.features.keep": "memory"})
    config.model.options = {"scales": 1, "angles": 2, "groups": 3}
    result = frame.run(finetune.STUDY, config, tmp_path / "run")
    model = models.create("scattering", num_classes=10, scales=1, angles=2, groups=3)
    plain = models.Pretrained(model, {}, models.Preprocessing(size=8, mean=(0.5,), std=(0.5,)))
    test = data.bundled("digits").split([0.05, 0.65, 0.3], seed=0)[2]
    rows = test.gather(np.arange(len(test)))
    params = models.load_params(tmp_path / "run" / "params.safetensors")
    assert list(params) == ["head"]
    right = np.asarray(jax.jit(plain.apply_fn)(params, rows["image"])).argmax(-1) == rows["label"]
    assert result["private"] == pytest.approx(right.mean(), abs=0.01)


@pytest.mark.slow
def test_lora_is_merged_when_saved(checkpoint, tmp_path):
    changes = {"model.trainable": "lora", "model.lora.rank": 2, "private.learning_rate": 5.0}
    result = frame.run(finetune.STUDY, config_of(checkpoint, **changes), tmp_path / "run")
    before, params, accuracy = served(checkpoint, tmp_path / "run" / "params.safetensors")
    assert result["private"] == pytest.approx(accuracy, abs=0.01)
    moved = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(params),
            jax.tree.leaves(dict(before.params)),
            strict=True,
        )
        if not np.array_equal(a, b)
    }
    assert moved == {
        "head/kernel",
        "head/bias",
        *(f"block_0/attention/{part}/kernel" for part in ("query", "value")),
    }


@pytest.mark.slow
def test_a_curve_has_a_ledger_and_a_model_for_every_point(checkpoint, tmp_path):
    config = config_of(checkpoint, **{"model.features.keep": "memory", "references": True})
    with config.unlocked():
        config.curve = {"epsilons": (1.0, 8.0), "learning_rates": (0.5, 1.0), "runs": 2}
        config.public_benchmark = True
    result = frame.run(curve.STUDY, config, tmp_path / "run")
    assert [point["epsilon"] for point in result["points"]] == [1.0, 8.0]
    assert all(point["deviation"] is not None for point in result["points"])
    assert 0 <= result["without_privacy"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert 0.9 * row["epsilon"] < row["epsilon_spent"] <= row["epsilon"]
        folder = tmp_path / "run" / "cells" / frame.file_name(row["epsilon"]) / str(row["run"])
        assert (folder / "ledger.sqlite").exists() and (folder / "params.safetensors").exists()
    assert (tmp_path / "run" / "curve.png").exists()


KEPT, NO_OPTIMIZER = {"model.features.keep": "memory"}, " must be an optimizer of optax.*got "


# Before a blank or "=", the message names the first field.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.trainable": "heads"}, "='heads' matches no parameter.*block_0/attention/key/bias"),
        (KEPT | {"model.trainable": "all"}, " needs a checkp"),
        (KEPT | {"private.augmult": 2}, "needs images without augmentation"),
        ({"model.features.keep": "disk"}, " has 'disk', which is not one of"),
        ({"model.lora.rank": 1, "model.lora.layers": "x"}, "layers must match a dense layer"),
        ({"private.optimizer": "sdg"}, NO_OPTIMIZER + "'sdg'"),
        ({"private.optimizer": "tree"}, NO_OPTIMIZER + "'tree'"),
        ({"pretrain.weights": "x.safetensors"}, "both give a start"),
        ({"pretrain.new_head": False}, r"head\.bias: shape \(3,\) does not fit head/bias \(10,\)"),
    ],
)
def test_mistakes_are_named_before_anything_is_spent(checkpoint, changes, message, tmp_path):
    named = rf"config\.{re.escape(next(iter(changes)))}" if message.startswith((" ", "=")) else ""
    with pytest.raises(ValueError, match=named + message):
        frame.run(finetune.STUDY, config_of(checkpoint, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weight_decay_and_schedules_are_those_of_optax(checkpoint):
    config = config_of(checkpoint).private
    config.weight_decay, config.schedule, config.steps = 0.1, "linear", 4
    params, gradient = np.float32(2.0), np.float32(1.0)
    for name, expected in (
        (
            "sgd",
            optax.chain(
                optax.add_decayed_weights(0.1), optax.sgd(optax.linear_schedule(0.35, 0, 4), 0.9)
            ),
        ),
        ("adamw", optax.adamw(optax.linear_schedule(0.35, 0, 4), weight_decay=0.1)),
    ):
        config.optimizer = name
        updates = []
        for made in (trainers.optimizer(config), expected):
            state = made.init(params)
            for _ in range(3):
                update, state = made.update(gradient, state, params)
            updates.append(float(update))
        assert updates[0] == pytest.approx(updates[1], rel=1e-6)
    config.optimizer_options = {"adamw": {"beta": 1}}
    with pytest.raises(
        ValueError,
        match=r"optimizer_options\.adamw has beta, which optax\.adamw lacks\. It has learn",
    ):
        trainers.optimizer(config)


def test_the_curve_of_cifar_10_is_of_a_public_benchmark(tmp_path):
    config = cifar10_squeezenet.get_config()
    config.public_benchmark = False
    with pytest.raises(ValueError, match=r"config\.public_benchmark must be True"):
        frame.run(curve.STUDY, config, tmp_path / "run")
    assert cifar10_squeezenet.get_config("full").private.batch_size == 50_000
