import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import models


def tree():
    return {
        "params": {
            "conv": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16)},
            "head": {"kernel": jnp.zeros((3, 2)), "scale": jnp.float32(2.5)},
        },
        "batch_stats": {"norm": {"mean": jnp.arange(3, dtype=jnp.int32)}},
    }


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)


def test_parameters_survive_a_round_trip_bit_for_bit(tmp_path):
    path = tmp_path / "model.safetensors"
    models.save_params(path, tree())
    assert_same(models.load_params(path), tree())
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_other_readers_find_each_parameter_under_its_path(tmp_path):
    from safetensors import safe_open

    models.save_params(tmp_path / "m", {"a": {"b": np.ones(2, np.float32)}})
    with safe_open(tmp_path / "m", framework="np") as file:
        assert list(file.keys()) == ["a/b"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    models.save_params(path, tree())

    def disk_full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        models.save_params(path, {"other": jnp.ones(1)})
    assert_same(models.load_params(path), tree())
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_not_nested_dicts_of_arrays_is_refused(tmp_path):
    with pytest.raises(TypeError, match="params must be nested dicts of arrays, got list at 'a/b'"):
        models.save_params(tmp_path / "m", {"a": {"b": [1.0]}})
    with pytest.raises(ValueError, match=r"got 'b/c' in \('a', 'b/c'\)"):
        models.save_params(tmp_path / "m", {"a": {"b/c": jnp.ones(1)}})
    with pytest.raises(FileNotFoundError, match="there is no parameter file"):
        models.load_params(tmp_path / "missing")


def backbone(num_classes: int, seed: int, **attributes):
    model = models.create("mlp", num_classes=num_classes, **{"hidden": (6, 4), **attributes})
    return model.init(jax.random.key(seed), jnp.zeros((1, 5)))["params"]


@pytest.mark.slow
def test_a_backbone_gets_a_new_head():
    fresh, pretrained = backbone(3, seed=0), backbone(10, seed=1)
    merged = models.merge_pretrained(fresh, pretrained)
    assert_same(merged["head"], fresh["head"])
    for name in ("dense_0", "dense_1"):
        assert_same(merged[name], pretrained[name])
    without_head = {name: value for name, value in pretrained.items() if name != "head"}
    assert_same(models.merge_pretrained(fresh, without_head), merged)


@pytest.mark.slow
def test_arrays_take_the_dtype_of_the_model():
    fresh = backbone(3, seed=0)
    half = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), backbone(3, seed=1))
    merged = models.merge_pretrained(fresh, half, exclude=())
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(merged["head"]["kernel"], half["head"]["kernel"].astype(np.float32))


def test_excluded_paths_are_whole_components():
    fresh, pretrained = backbone(3, seed=0), backbone(3, seed=1)
    merged = models.merge_pretrained(fresh, pretrained, exclude=["dense_0/kernel"])
    np.testing.assert_array_equal(merged["dense_0"]["kernel"], fresh["dense_0"]["kernel"])
    np.testing.assert_array_equal(merged["head"]["kernel"], pretrained["head"]["kernel"])
    with pytest.raises(ValueError, match=r"exclude has 'dense', .* \['dense_0', 'dense_1', 'head'\]"):
        models.merge_pretrained(fresh, pretrained, exclude=["dense"])


@pytest.mark.slow
def test_every_mismatch_is_listed():
    fresh, pretrained = backbone(3, seed=0), backbone(10, seed=1, hidden=(6, 5, 4))
    with pytest.raises(ValueError) as caught:
        models.merge_pretrained(fresh, pretrained)
    lines = str(caught.value).splitlines()[1:]
    assert sorted(line.strip() for line in lines) == [
        "dense_1/bias: shape (5,) in pretrained, (4,) in params",
        "dense_1/kernel: shape (6, 5) in pretrained, (6, 4) in params",
        "dense_2/bias: not in params",
        "dense_2/kernel: not in params",
    ]
    del pretrained["dense_0"]
    with pytest.raises(ValueError, match="dense_0/kernel: missing in pretrained"):
        models.merge_pretrained(fresh, pretrained)
