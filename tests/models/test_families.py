"""Each family against an independent NumPy float64 forward pass, and as a function of one example
at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from jaxdp import models

TINY = {
    "mlp": ("mlp", {"hidden": (7, 5)}),
    "cnn": ("cnn", {"widths": (4, 8), "dense": 6}),
    "cnn group": ("cnn", {"widths": (4, 8), "dense": 0, "norm": "group", "groups": 2}),
    "resnet": ("resnet20", {"depth": 8}),
    "resnet frozen": ("resnet20", {"depth": 8, "norm": "frozen_batch", "shortcut": "conv"}),
    "resnet plain": ("resnet20", {"depth": 8, "norm": None}),
    "wide resnet": ("wrn_16_4", {"depth": 10, "width": 1}),
    "vit": ("vit_tiny", {"width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}),
    "vit mean": (
        "vit_tiny",
        {"width": 8, "depth": 1, "num_heads": 2, "mlp_width": 12, "pool": "mean"},
    ),
    "vit distilled": (
        "deit_ti16_distilled",
        {"patch_size": 4, "width": 8, "depth": 1, "num_heads": 2, "mlp_width": 12},
    ),
    "vit post": (
        "vit_tiny",
        {"width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
        | {"norm_order": "post", "norm_epsilon": 0.1, "activation": jax.nn.relu},
    ),
    "convnext": ("convnext_tiny", {"widths": (4, 6), "depths": (1, 2)}),
}
# Kinds whose gradients are looked at. Others have the same layers.
TRAINED = {"resnet", "wide resnet", "vit", "vit distilled", "vit post", "convnext", "cnn group"}
IMAGES = np.random.default_rng(0).random((3, 8, 8, 2), np.float32)


def model_of(kind: str, dtype=None):
    name, attributes = TINY[kind]
    return models.create(name, num_classes=5, dtype=dtype, **attributes)


@functools.cache
def build(kind: str):
    """The tiny model of a kind and variables whose every leaf is moved off its initial value."""
    model = model_of(kind)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 2)))
    rng = np.random.default_rng(1)

    def leaf(path, shape):
        names = [entry.key for entry in path]
        centre = 1.0 if names[-1] in ("scale", "gain", "var", "layer_scale") else 0.0
        fan_in = np.prod(shape.shape[:-1]) if names[-1] == "kernel" else 25
        return np.asarray(centre + rng.normal(0, 1 / np.sqrt(fan_in), shape.shape), np.float32)

    variables = jax.tree_util.tree_map_with_path(leaf, shapes)
    if "batch_stats" in variables:
        variables["batch_stats"] = jax.tree.map(np.abs, variables["batch_stats"])
    return model, variables


@functools.cache
def program(kind: str):
    """Returns a compiled function of parameters and images: the logits, and the gradient of the
    first logit of the first image if the kind is in `TRAINED`."""
    model, variables = build(kind)

    def outputs(params, images):
        def first_logit(params):
            logits = model.apply({**variables, "params": params}, images)
            return logits[0, 0], logits

        if kind not in TRAINED:
            return first_logit(params)[1], None
        gradient, logits = jax.grad(first_logit, has_aux=True)(params)
        return logits, gradient

    return jax.jit(outputs)


@functools.cache
def outputs(kind: str):
    return program(kind)(build(kind)[1]["params"], IMAGES)


def conv(x, kernel, stride=1, padding=None):
    """Cross-correlation, NHWC by HWIO; padding None is "SAME" (the odd pixel below and to the
    right)."""
    size = kernel.shape[0]
    height, width = (-(-extent // stride) for extent in x.shape[1:3])
    pads = []
    for extent, out in zip(x.shape[1:3], (height, width), strict=True):
        total = max((out - 1) * stride + size - extent, 0)
        pads.append((total // 2, total - total // 2) if padding is None else (padding, padding))
    x = np.pad(x, ((0, 0), *pads, (0, 0)))
    rows, columns = ((extent - size) // stride + 1 for extent in x.shape[1:3])
    y = np.zeros((x.shape[0], rows, columns, kernel.shape[-1]))
    for i in range(size):
        for j in range(size):
            window = x[
                :,
                i : i + (rows - 1) * stride + 1 : stride,
                j : j + (columns - 1) * stride + 1 : stride,
            ]
            y += window @ kernel[i, j]
    return y


def ws_conv(x, p, stride=1):
    kernel = p["kernel"]
    flat = kernel.reshape(-1, kernel.shape[-1])
    scale = p["gain"] / np.sqrt(np.maximum(flat.var(axis=0) * flat.shape[0], 1e-4))
    return conv(x, (kernel - flat.mean(axis=0)) * scale, stride) + p["bias"]


def group_norm(x, p, groups):
    out = np.empty_like(x)
    size = x.shape[-1] // groups
    for b in range(x.shape[0]):
        for g in range(groups):
            part = x[b, ..., g * size : (g + 1) * size]
            out[b, ..., g * size : (g + 1) * size] = (part - part.mean()) / np.sqrt(
                part.var() + 1e-5
            )
    return out * p["scale"] + p["bias"]


def layer_norm(x, p, epsilon=1e-6):
    centred = x - x.mean(axis=-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) * p["scale"]
        + p["bias"]
    )


def gelu(x):
    return x * (1 + special.erf(x / np.sqrt(2))) / 2


def reduce(x, p, size):
    """Non-overlapping size x size patches, each mapped linearly."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, channels).transpose(
        0, 1, 3, 2, 4, 5
    )
    return x.reshape(*x.shape[:3], -1) @ p["kernel"].reshape(-1, p["kernel"].shape[-1]) + p["bias"]


def depthwise(x, p):
    x = np.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0)))
    out = np.empty((len(x), x.shape[1] - 6, x.shape[2] - 6, x.shape[3]))
    for i in range(out.shape[1]):
        for j in range(out.shape[2]):
            out[:, i, j] = (x[:, i : i + 7, j : j + 7] * p["kernel"][:, :, 0]).sum(axis=(1, 2))
    return out + p["bias"]


def dense(x, p):
    return x @ p["kernel"] + p["bias"]


def relu(x):
    return np.maximum(x, 0)


def halve(x):
    return (x[:, ::2, ::2] + x[:, 1::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, 1::2]) / 4


def attention(x, p, heads):
    out = np.zeros_like(x)
    size = x.shape[-1] // heads
    q, k, v = (dense(x, p[name]) for name in ("query", "key", "value"))
    for b in range(x.shape[0]):
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            scores = q[b, :, part] @ k[b, :, part].T / np.sqrt(size)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[b, :, part] = weights / weights.sum(axis=1, keepdims=True) @ v[b, :, part]
    return dense(out, p["out"])


def reference(kind, x, variables):
    p, stats = variables["params"], variables.get("batch_stats")
    attributes = TINY[kind][1]
    if kind == "mlp":
        x = x.reshape(len(x), -1)
        return dense(relu(dense(relu(dense(x, p["dense_0"])), p["dense_1"])), p["head"])
    if kind.startswith("cnn"):
        for k in range(2):
            x = conv(x, p[f"conv_{k}"]["kernel"]) + p[f"conv_{k}"]["bias"]
            x = halve(np.tanh(group_norm(x, p[f"norm_{k}"], 2) if "norm" in attributes else x))
        x = x.reshape(len(x), -1)
        x = np.tanh(dense(x, p["dense"])) if attributes["dense"] else x
        return dense(x, p["head"])
    if kind.startswith("resnet"):

        def norm(name, x):
            if kind == "resnet plain":
                return x
            if stats is None:
                return group_norm(x, p[name], 8)
            mean, var = stats[name]["mean"], stats[name]["var"]
            return (x - mean) / np.sqrt(var + 1e-5) * p[name]["scale"] + p[name]["bias"]

        def convolve(name, x, stride=1):
            kernel = p[name]["kernel"]
            return conv(x, kernel, stride, kernel.shape[0] // 2) + p[name].get("bias", 0)

        x = relu(norm("norm", convolve("conv", x)))
        for k in range(3):
            name, stride = f"stage_{k}_block_0", 1 if k == 0 else 2
            y = relu(norm(f"{name}_norm_0", convolve(f"{name}_conv_0", x, stride)))
            y = norm(f"{name}_norm_1", convolve(f"{name}_conv_1", y))
            if k and "shortcut" in attributes:
                x = norm(f"{name}_shortcut_norm", convolve(f"{name}_shortcut", x, stride))
            elif k:
                zeros = np.zeros((*y.shape[:3], x.shape[-1] // 2))
                x = np.concatenate([zeros, x[:, ::2, ::2], zeros], axis=-1)
            x = relu(x + y)
        return dense(x.mean(axis=(1, 2)), p["head"])
    if kind == "wide resnet":

        def branch(name, x, stride=1):
            return ws_conv(group_norm(relu(x), p[f"{name}_norm"], 16), p[f"{name}_conv"], stride)

        x = ws_conv(x, p["conv"])
        for k in range(3):
            name, stride = f"stage_{k}_block_0", 1 if k == 0 else 2
            x = branch(f"{name}_skip", x, stride) + branch(
                f"{name}_1", branch(f"{name}_0", x, stride)
            )
        return dense(group_norm(relu(x), p["norm"], 16).mean(axis=(1, 2)), p["head"])
    if kind == "convnext":
        x = layer_norm(reduce(x, p["stem"], 4), p["stem_norm"])
        for k in range(2):
            if k:
                x = reduce(layer_norm(x, p["stage_1_downsample_norm"]), p["stage_1_downsample"], 2)
            for j in range(attributes["depths"][k]):
                block = p[f"stage_{k}_block_{j}"]
                y = layer_norm(depthwise(x, block["conv"]), block["norm"])
                x = x + block["layer_scale"] * dense(gelu(dense(y, block["mlp_0"])), block["mlp_1"])
        return dense(layer_norm(x.mean(axis=(1, 2)), p["norm"]), p["head"])
    x = reduce(x, p["embed"], 4).reshape(len(x), 4, 8)
    names = {"vit mean": [], "vit distilled": ["class_token", "distillation_token"]}.get(
        kind, ["class_token"]
    )
    x = np.concatenate([*(np.broadcast_to(p[name], (len(x), 1, 8)) for name in names), x], axis=1)
    x = x + p["positions"]
    for k in range(attributes["depth"]):
        block = p[f"block_{k}"]
        if kind == "vit post":
            x = layer_norm(x + attention(x, block["attention"], 2), block["norm_0"], 0.1)
            x = layer_norm(
                x + dense(relu(dense(x, block["mlp_0"])), block["mlp_1"]), block["norm_1"], 0.1
            )
        else:
            x = x + attention(layer_norm(x, block["norm_0"]), block["attention"], 2)
            x = x + dense(
                gelu(dense(layer_norm(x, block["norm_1"]), block["mlp_0"])), block["mlp_1"]
            )
    x = layer_norm(x, p["norm"], 0.1 if kind == "vit post" else 1e-6)
    if kind == "vit distilled":
        return (dense(x[:, 0], p["head"]) + dense(x[:, 1], p["head_distilled"])) / 2
    return dense(x.mean(axis=1) if kind == "vit mean" else x[:, 0], p["head"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
def test_the_forward_pass_is_the_documented_one_and_takes_examples_one_by_one(kind):
    _, variables = build(kind)
    logits, _ = outputs(kind)
    assert logits.shape == (3, 5) and logits.dtype == jnp.float32
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables)
    expected = reference(kind, IMAGES.astype(np.float64), wide)
    assert expected.std() > 0.01
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)
    # The other examples of the batch do not matter, not even when they are not numbers.
    poisoned = IMAGES.copy()
    poisoned[1:] = np.nan
    others, _ = program(kind)(variables["params"], poisoned)
    np.testing.assert_allclose(others[0], logits[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
def test_bfloat16_computes_close_to_float32_and_gives_float32_logits(kind):
    model, (_, variables) = model_of(kind, jnp.bfloat16), build(kind)
    jaxpr = jax.make_jaxpr(model.apply)(variables, IMAGES)
    assert [aval.dtype for aval in jaxpr.out_avals] == [jnp.float32]
    fresh = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    assert {leaf.dtype for leaf in jax.tree.leaves(fresh)} == {jnp.dtype("float32")}
    assert "bf16" in str(jaxpr)
    if kind in ("mlp", "wide resnet", "vit"):
        exact, _ = outputs(kind)
        np.testing.assert_allclose(
            jax.jit(model.apply)(variables, IMAGES), exact, atol=0.15, rtol=0.1
        )


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
@pytest.mark.parametrize("kind", ["vit distilled", "convnext"])
def test_layer_norms_are_recognised_by_their_paths(kind: str) -> None:
    for path, _ in jax.tree_util.tree_leaves_with_path(build(kind)[1]["params"]):
        *modules, leaf = (entry.key for entry in path)
        assert any("norm" in module for module in modules) == (
            leaf in ("scale", "bias") and "norm" in modules[-1]
        )
        assert leaf != "scale" or "norm" in modules[-1]
