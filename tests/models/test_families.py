"""Each family against an independent NumPy float64 forward pass, and as a function of one example
at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import models
from tests.models.families import (
    IMAGES,
    TINY,
    TRAINED,
    build,
    images_of,
    model_of,
    outputs,
    program,
    reference,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
def test_the_forward_pass_is_the_documented_one_and_takes_examples_one_by_one(kind):
    _, variables = build(kind)
    logits, _ = outputs(kind)
    assert logits.shape == (3, 5) and logits.dtype == jnp.float32
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables)
    images = images_of(kind)
    expected = reference(kind, images.astype(np.float64), wide)
    assert expected.std() > 0.01
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)
    # The other examples of the batch do not matter, not even when they are not numbers.
    poisoned = images.copy()
    poisoned[1:] = np.nan
    others, _ = program(kind)(variables["params"], poisoned)
    np.testing.assert_allclose(others[0], logits[0], rtol=1e-5, atol=1e-6)


# The error that bfloat16 may have.
ROUNDED = {kind: {"atol": 0.15, "rtol": 0.1} for kind in ("mlp", "wide resnet", "vit")}
ROUNDED["swin nine windows"] = {"atol": 0.1, "rtol": 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
def test_bfloat16_computes_close_to_float32_and_gives_float32_logits(kind):
    model, (_, variables), images = model_of(kind, jnp.bfloat16), build(kind), images_of(kind)
    jaxpr = jax.make_jaxpr(model.apply)(variables, images)
    assert [aval.dtype for aval in jaxpr.out_avals] == [jnp.float32]
    fresh = jax.eval_shape(model.init, jax.random.key(0), images)
    assert {leaf.dtype for leaf in jax.tree.leaves(fresh)} == {jnp.dtype("float32")}
    assert "bf16" in str(jaxpr)
    if kind in ROUNDED:
        exact, _ = outputs(kind)
        rounded = jax.jit(model.apply)(variables, images)
        np.testing.assert_allclose(rounded, exact, **ROUNDED[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(TRAINED))
def test_every_parameter_receives_a_gradient(kind):
    for path, gradient in jax.tree_util.tree_leaves_with_path(outputs(kind)[1]):
        name = jax.tree_util.keystr(path)
        if "'key']['bias'" in name:
            continue  # softmax does not see a shift that all keys share
        assert np.abs(gradient).max() > 1e-6, name


@pytest.mark.slow
def test_frozen_statistics_are_constants():
    model, variables = build("resnet frozen")
    _, state = jax.jit(lambda variables: model.apply(variables, IMAGES, mutable=["batch_stats"]))(
        variables
    )
    for before, after in zip(
        jax.tree.leaves(variables["batch_stats"]),
        jax.tree.leaves(state["batch_stats"]),
        strict=True,
    ):
        np.testing.assert_array_equal(before, after)
    assert set(variables["params"]["norm"]) == {"scale", "bias"}


@pytest.mark.parametrize(
    ("name", "attributes", "message"),
    [
        ("resnet20", {"depth": 21}, "depth must be 6 n \\+ 2"),
        ("resnet20", {"norm": "batch"}, "Batch statistics mix the examples"),
        ("resnet20", {"groups": 5}, "groups must divide the number of channels 16, got groups=5"),
        ("resnet20", {"shortcut": "none"}, "shortcut must be 'pad' or 'conv'"),
        ("wrn_16_4", {"depth": 17}, "depth must be 6 n \\+ 4"),
        ("vit_tiny", {"patch_size": 3}, "patch_size must divide the image 8x8, got 3"),
        ("vit_tiny", {"num_heads": 5}, "num_heads must divide the width 64, got 5"),
        ("vit_tiny", {"pool": "max"}, "pool must be 'token', 'mean' or 'token_and_mean'"),
        ("vit_tiny", {"norm_order": "both"}, "norm_order must be 'pre' or 'post', got 'both'"),
        (
            "vit_tiny",
            {"distilled": True, "pool": "mean"},
            "distilled=True needs pool='token', got pool='mean'",
        ),
        ("convnext_tiny", {}, "the image must be at least 32x32, got 8x8"),
        ("squeezenet1_0", {}, "the image must be at least 21x21, got 8x8"),
        ("squeezenet1_1", {}, "the image must be at least 21x21, got 8x8"),
        ("convnext_tiny", {"widths": (4, 8)}, "one entry per stage"),
        ("cnn", {"widths": (4, 4, 4, 4)}, "too small to halve again at 1x1"),
    ],
)
def test_impossible_models_are_refused(name, attributes, message):
    model = models.create(name, num_classes=5, **attributes)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, jax.random.key(0), IMAGES)


@pytest.mark.slow
def test_a_standardised_resnet_ignores_scale_and_shift_of_its_kernels() -> None:
    model = models.ResNet(num_classes=3, depth=8, standardise=True)
    images = np.random.default_rng(0).random((2, 16, 16, 3), np.float32)
    params = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(1), images)["params"])
    moved = jax.tree_util.tree_map_with_path(
        lambda path, x: 3 * x + 0.5 if "conv" in str(path) and path[-1].key == "kernel" else x,
        params,
    )
    apply = jax.jit(model.apply)
    expected, found = (apply({"params": p}, images) for p in (params, moved))
    # float32 loses a digit to the shift
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert params["stage_0_block_0_conv_0"]["gain"].shape == (16,)


@pytest.mark.slow
def test_without_its_head_the_distillation_token_only_takes_part_in_attention() -> None:
    attributes = TINY["vit distilled"][1]
    _, variables = build("vit distilled")
    model = models.create("deit_ti16_distilled", num_classes=5, distilled_head=False, **attributes)
    params = {
        name: value for name, value in variables["params"].items() if name != "head_distilled"
    }
    silent = jax.tree.map(lambda x: 0 * x, variables["params"]["head_distilled"])
    doubled = {
        **variables["params"],
        "head_distilled": silent,
        "head": jax.tree.map(lambda x: 2 * x, params["head"]),
    }
    expected, _ = program("vit distilled")(doubled, IMAGES)
    np.testing.assert_allclose(
        jax.jit(model.apply)({"params": params}, IMAGES), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit distilled", "convnext", "swin"])
def test_layer_norms_are_recognised_by_their_paths(kind: str) -> None:
    for path, _ in jax.tree_util.tree_leaves_with_path(build(kind)[1]["params"]):
        *modules, leaf = (entry.key for entry in path)
        assert any("norm" in module for module in modules) == (
            leaf in ("scale", "bias") and "norm" in modules[-1]
        )
        assert leaf != "scale" or "norm" in modules[-1]
