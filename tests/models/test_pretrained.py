import collections
import dataclasses
import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any


def drawn(shapes: Any, seed: int = 0) -> Any:
    """Returns a tree of these shapes, without a program for each."""
    rng = np.random.default_rng(seed)

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.device_put(rng.normal(size=x.shape).astype(x.dtype))

    return jax.tree.map(leaf, shapes)


Pair = collections.namedtuple("Pair", ["first", "second"])
TREES = {
    "list": [jnp.arange(3.0), {"a": jnp.ones((2, 2), jnp.bfloat16)}],
    "named tuple": Pair(jnp.arange(3), (jnp.float32(2), np.float32(3))),
    "dataclass": {"layers": [Layer(jnp.ones((2, 3)), None), Layer(jnp.zeros(3), jnp.ones(3))]},
    "integer keys": {0: jnp.ones(2), 11: jnp.zeros(2)},
    "haiku": {
        "mlp/~/linear_0": {"w": jnp.ones((2, 3))},
        "mlp/~/linear_1": {"w": jnp.zeros((3, 2))},
    },
    "nnx": drawn(
        nnx.split(
            nnx.eval_shape(
                lambda: nnx.Sequential(
                    nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(3, rngs=nnx.Rngs(0))
                )
            )
        )[1]
    ),
    "equinox": eqx.filter(
        drawn(eqx.filter_eval_shape(eqx.nn.MLP, 2, 2, 3, 1, key=jax.random.key(0))), eqx.is_array
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_any_pytree_comes_back_into_a_template(name, tmp_path):
    saved, path = TREES[name], tmp_path / "m.safetensors"
    models.save_params(path, saved)
    assert_same(models.load_params(path, like=jax.tree.map(jnp.zeros_like, saved)), saved)
    assert_same(models.load_params(path, like=jax.eval_shape(lambda: saved)), saved)
    with pytest.raises(ValueError, match="whose structure is not in the file"):
        models.load_params(path)


def test_a_template_that_does_not_fit_lists_every_leaf(tmp_path):
    models.save_params(tmp_path / "m", {"a": jnp.ones(2), "b": [jnp.ones(3)], "c": jnp.ones(4)})
    with pytest.raises(ValueError) as caught:
        models.load_params(
            tmp_path / "m",
            like={"a": jnp.ones(3), "b": [jnp.ones(3, jnp.bfloat16)], "d": jnp.ones(1)},
        )
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "a: float32 (2,) in the file, float32 (3,) in like",
        "b/0: float32 (3,) in the file, bfloat16 (3,) in like",
        "d: missing in the file",
        "c: not in like.",
    ]


def test_what_is_no_pytree_of_arrays_is_refused(tmp_path):
    with pytest.raises(TypeError, match="params must be a pytree of arrays, got float at 'a/b/0'"):
        models.save_params(tmp_path / "m", {"a": {"b": [1.0]}})
    with pytest.raises(TypeError, match=r"got a random key at 'a'.*nnx\.split"):
        models.save_params(tmp_path / "m", {"a": jax.random.key(0)})
    with pytest.raises(ValueError, match="two leaves with the path 'a/b'"):
        models.save_params(tmp_path / "m", {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)})
    with pytest.raises(FileNotFoundError, match="there is no parameter file"):
        models.load_params(tmp_path / "missing")


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"a": jnp.ones(2, jnp.float8_e4m3fn)}, TypeError, "dtype float8_e4m3fn at 'a'.* Cast it"),
        ({"a": jnp.ones(2, jnp.int4)}, TypeError, "dtype int4 at 'a'"),
        ({"__metadata__": jnp.ones(2)}, ValueError, "no leaf '__metadata__'"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, params, error, message):
    with pytest.raises(error, match=message):
        models.save_params(tmp_path / "params.safetensors", params)
    assert not (tmp_path / "params.safetensors").exists()


def test_a_backbone_of_another_library_gets_a_new_head():
    fresh, old = (
        {"body": [jnp.full(2, x)], "head": Pair(jnp.full(k, x), None)}
        for x, k in ((0.0, 3), (1.0, 5))
    )
    merged = models.merge_pretrained(fresh, old)
    assert_same(merged, {"body": [jnp.ones(2)], "head": fresh["head"]})


def backbone(num_classes: int, seed: int, **attributes):
    model = models.create("mlp", num_classes=num_classes, **{"hidden": (6, 4), **attributes})
    return drawn(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 5))), seed)["params"]


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
    np.testing.assert_array_equal(
        merged["head"]["kernel"], half["head"]["kernel"].astype(np.float32)
    )


def test_excluded_paths_are_whole_components():
    fresh, pretrained = backbone(3, seed=0), backbone(3, seed=1)
    merged = models.merge_pretrained(fresh, pretrained, exclude=["dense_0/kernel"])
    np.testing.assert_array_equal(merged["dense_0"]["kernel"], fresh["dense_0"]["kernel"])
    np.testing.assert_array_equal(merged["head"]["kernel"], pretrained["head"]["kernel"])
    with pytest.raises(
        ValueError, match=r"exclude has 'dense', .* \['dense_0', 'dense_1', 'head'\]"
    ):
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
