"""Which part of a public model is trained: patterns, LoRA, and heads on kept features."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxdp
from jaxdp import models
from jaxdp.models import (
    Features,
    Preprocessing,
    Pretrained,
    head_inputs,
    merge_lora,
    trainable,
    with_lora,
)

IMAGES = np.random.default_rng(0).random((3, 8, 8, 3), np.float32)


@functools.cache
def vit():
    sizes = {"patch_size": 4, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
    model = models.create("vit_tiny", num_classes=4, **sizes)
    params = jax.jit(model.init)(jax.random.key(0), IMAGES)["params"]
    return Pretrained(model, params, Preprocessing(size=8, mean=(0.5,) * 3, std=(0.5,) * 3))


def chosen(choice, params):
    keep = trainable(choice, params)
    return {path for path, leaf in flatten_dict(params, sep="/").items() if keep(path, leaf)}


def test_parts_are_chosen_by_name_or_pattern():
    params = vit().params
    paths = set(flatten_dict(params, sep="/"))
    head = {"head/kernel", "head/bias"}
    norms = {f"{name}/{leaf}" for name in NORMS for leaf in ("scale", "bias")}
    assert chosen("all", params) == paths
    assert chosen("head", params) == head
    assert chosen("norms", params) == norms | head
    assert chosen("block_1/mlp_.*|head/.*", params) == head | {
        p for p in paths if p.startswith("block_1/mlp_")
    }
    assert chosen(".*/bias", params) == {path for path in paths if path.endswith("/bias")}


NORMS = ("norm", "block_0/norm_0", "block_0/norm_1", "block_1/norm_0", "block_1/norm_1")


@pytest.mark.parametrize("choice", ["lora", "block_2/.*", "head", "kernel"])
def test_a_pattern_that_matches_nothing_is_refused_with_all_names(choice):
    params = {name: part for name, part in vit().params.items() if name != "head"}
    with pytest.raises(
        ValueError, match=r"matches no parameter.*'lora'.*block_0/attention/key/bias, .*positions"
    ):
        trainable(choice, params)
    with pytest.raises(ValueError, match=r"must be a regular expression, got '\('"):
        trainable("(", params)


@pytest.mark.slow
def test_lora_starts_as_the_model_is_trained_and_merges_into_it():
    base = vit()
    tuned = with_lora(base, rank=2, seed=1)
    added = {
        f"lora/block_{k}/attention/{part}/{leaf}"
        for k in range(2)
        for part in ("query", "value")
        for leaf in UPS
    }
    assert (
        set(flatten_dict(tuned.params, sep="/")) - set(flatten_dict(base.params, sep="/")) == added
    )
    assert chosen("lora", tuned.params) == added | {"head/kernel", "head/bias"}
    apply_tuned, apply_base = jax.jit(tuned.apply_fn), jax.jit(base.apply_fn)
    # B is zero at the start.
    np.testing.assert_array_equal(
        apply_tuned(tuned.params, IMAGES), apply_base(base.params, IMAGES)
    )

    def loss(params, example):
        return jaxdp.losses.softmax_cross_entropy(
            tuned.apply_fn(params, example["image"][None])[0], example["label"]
        )

    batch = {"image": IMAGES, "label": np.array([0, 1, 2])}
    options = {"clip_norm": 1.0, "trainable": trainable("lora", tuned.params)}
    engines = [
        jax.jit(jaxdp.clipped_grad(loss, engine=engine, **options))
        for engine in ("bookkeeping", "vmap")
    ]
    moved = tuned.params
    for _ in range(2):
        sums, reference = (engine(moved, batch).grads for engine in engines)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), sums, reference)
        moved = jax.tree.map(
            lambda p, g: p if g is None else p - g, moved, sums, is_leaf=lambda x: x is None
        )
    before, after = flatten_dict(tuned.params, sep="/"), flatten_dict(moved, sep="/")
    assert {path for path in before if not np.array_equal(before[path], after[path])} == chosen(
        "lora", tuned.params
    )
    merged = merge_lora(moved)
    assert set(flatten_dict(merged, sep="/")) == set(flatten_dict(base.params, sep="/"))
    np.testing.assert_allclose(apply_base(merged, IMAGES), apply_tuned(moved, IMAGES), atol=1e-5)
    assert np.abs(apply_base(merged, IMAGES) - apply_base(base.params, IMAGES)).max() > 1e-3


UPS = ("down", "up")


def test_lora_without_a_layer_or_a_rank_is_refused():
    with pytest.raises(ValueError, match=r"rank must be at least 1, got 0"):
        with_lora(vit(), seed=0, rank=0)
    with pytest.raises(
        ValueError, match=r"must match a dense layer, .* There are block_0/attention/key, .*head"
    ):
        with_lora(vit(), seed=0, rank=1, layers="block_7/.*")
    with pytest.raises(TypeError, match=r"rank must be an int, got float 2\.0"):
        with_lora(vit(), seed=0, rank=2.0)


def test_factors_of_lora_are_not_lost_by_new_ones():
    tuned = with_lora(vit(), seed=0, rank=1)
    with pytest.raises(ValueError, match=r"must have no factors of LoRA, .* Merge them first"):
        with_lora(tuned, seed=1, rank=1)
    filled = jax.tree.map(jnp.ones_like, tuned.params["lora"])
    params = merge_lora({**tuned.params, "lora": filled})
    merged = Pretrained(tuned.model, params, tuned.preprocessing, tuned.constants)
    again = with_lora(merged, seed=1, rank=1)
    np.testing.assert_allclose(
        jax.jit(again.apply_fn)(again.params, IMAGES),
        jax.jit(tuned.apply_fn)({**tuned.params, "lora": filled}, IMAGES),
        atol=1e-5,
    )


def test_a_head_on_mapped_features_folds_back_into_the_plain_model():
    network = vit()
    apply = jax.jit(network.apply_fn)
    features = np.asarray(jax.jit(lambda images: head_inputs(network, images))(IMAGES))
    assert features.shape == (3, 8)
    head = jax.device_get(network.params["head"])
    np.testing.assert_allclose(
        features @ head["kernel"] + head["bias"], apply(network.params, IMAGES), atol=1e-6
    )
    random = np.random.default_rng(1)
    public = random.standard_normal((50, 8)) @ random.standard_normal((8, 8)) + 3
    project = Features.from_public(public, dimensions=5, whiten=0.5)
    mapped = project(public)
    np.testing.assert_allclose(mapped.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(np.square(mapped).sum(axis=1).mean(), 1, rtol=1e-5)
    covariance = np.cov(mapped.T, bias=True)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-6)
    deviations = np.sqrt(np.linalg.eigvalsh(np.cov(public.T, bias=True))[::-1][:5])
    np.testing.assert_allclose(
        np.diag(covariance) / covariance[0, 0], deviations / deviations[0], rtol=1e-4
    )
    trained = {"kernel": random.standard_normal((5, 4)), "bias": random.standard_normal(4)}
    params = {**network.params, "head": project.fold(trained)}
    expected = project(features) @ trained["kernel"] + trained["bias"]
    np.testing.assert_allclose(apply(params, IMAGES), expected, atol=1e-4)
    with pytest.raises(ValueError, match="dimensions must be at most 8"):
        Features.from_public(public, dimensions=9)
    with pytest.raises(ValueError, match="at least two features"):
        Features.from_public(public[:1])


def test_a_model_without_one_linear_head_has_no_features_to_keep():
    model = models.create("squeezenet1_1", num_classes=3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    network = Pretrained(model, shapes, Preprocessing(size=32, mean=(0.5,) * 3, std=(0.5,) * 3))
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)

    def features(network):
        return jax.eval_shape(
            lambda params, images: head_inputs(dataclasses.replace(network, params=params), images),
            shapes,
            images,
        )

    with pytest.raises(
        ValueError, match=r"one linear head on one vector per image.*A SqueezeNet needs pool='feat"
    ):
        features(network)
    pooled = dataclasses.replace(network, model=model.clone(pool="features"))
    assert features(pooled).shape == (2, 512)
