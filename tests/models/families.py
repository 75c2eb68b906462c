"""A tiny model of each family with its NumPy float64 forward pass, which the suites share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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
    # A grid of 8x8 whose windows shift and one of 4x4, one window; a grid of 6x6 with nine windows.
    "swin": (
        "swin_tiny",
        {"patch_size": 2, "window": 4, "width": 8, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "swin nine windows": (
        "swin_tiny",
        {"patch_size": 2, "window": 2, "width": 6, "depths": (2,), "num_heads": (3,)}
        | {"mlp_ratio": 2, "norm_epsilon": 0.1, "activation": jnp.tanh},
    ),
}
SIDES = {"swin": 16, "swin nine windows": 12}
# Kinds whose gradients are looked at. Others have the same layers.
TRAINED = {"resnet", "wide resnet", "vit", "vit distilled", "vit post", "convnext", "cnn group"}
TRAINED.add("swin")


@functools.cache
def images_of(kind: str):
    side = SIDES.get(kind, 8)
    return np.random.default_rng(0).random((3, side, side, 2), np.float32)


IMAGES = images_of("vit")


def model_of(kind: str, dtype=None):
    name, attributes = TINY[kind]
    return models.create(name, num_classes=5, dtype=dtype, **attributes)


@functools.cache
def build(kind: str):
    """The tiny model of a kind and variables whose every leaf is moved off its initial value."""
    model = model_of(kind)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images_of(kind))
    rng = np.random.default_rng(1)

    def leaf(path, shape):
        names = [entry.key for entry in path]
        centre = 1.0 if names[-1] in ("scale", "gain", "var", "layer_scale") else 0.0
        fan_in = np.prod(shape.shape[:-1]) if names[-1] == "kernel" else 25
        fan_in = 1 if names[-1] == "position_bias" else fan_in
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
    return program(kind)(build(kind)[1]["params"], images_of(kind))


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
    return x @ p["kernel"] + p.get("bias", 0)


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


def attention_in_windows(x, p, window, shift, heads):
    """Among all tokens of an image, with weight zero for pairs that are not in one window of the
    image."""
    side, size = int(np.sqrt(x.shape[1])), x.shape[2] // heads
    rows, columns = np.divmod(np.arange(side**2), side)
    down, right = rows[:, None] - rows, columns[:, None] - columns
    together = (rows[:, None] - shift) // window == (rows - shift) // window
    together &= (columns[:, None] - shift) // window == (columns - shift) // window
    table = p["position_bias"].reshape(2 * window - 1, 2 * window - 1, heads)
    bias = table[
        np.where(together, down, 0) + window - 1, np.where(together, right, 0) + window - 1
    ]
    q, k, v = (dense(x, p[name]) for name in ("query", "key", "value"))
    out = np.zeros_like(x)
    for b in range(len(x)):
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            weights = (
                np.exp(q[b, :, part] @ k[b, :, part].T / np.sqrt(size) + bias[:, :, h]) * together
            )
            out[b, :, part] = weights / weights.sum(axis=1, keepdims=True) @ v[b, :, part]
    return dense(out, p["out"])


def merge(x, p, epsilon):
    side = int(np.sqrt(x.shape[1]))
    grid = x.reshape(len(x), side, side, -1)
    corners = [grid[:, i::2, j::2] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))]
    x = np.concatenate(corners, axis=-1).reshape(len(x), side**2 // 4, -1)
    return dense(layer_norm(x, p["norm"], epsilon), p["reduction"])


def swin(attributes, x, p):
    epsilon, activation = attributes.get("norm_epsilon", 1e-5), gelu
    if "activation" in attributes:
        activation = np.tanh
    side = x.shape[1] // 2
    x = layer_norm(reduce(x, p["embed"], 2).reshape(len(x), side**2, -1), p["embed_norm"], epsilon)
    for stage, depth in enumerate(attributes["depths"]):
        heads = attributes["num_heads"][stage]
        if stage:
            x, side = merge(x, p[f"stage_{stage}_merge"], epsilon), side // 2
        window = min(attributes["window"], side)
        for k in range(depth):
            block = p[f"stage_{stage}_block_{k}"]
            shift = window // 2 if k == 1 and side > window else 0
            y = layer_norm(x, block["norm_0"], epsilon)
            x = x + attention_in_windows(y, block["attention"], window, shift, heads)
            y = activation(dense(layer_norm(x, block["norm_1"], epsilon), block["mlp_0"]))
            x = x + dense(y, block["mlp_1"])
    return dense(layer_norm(x, p["norm"], epsilon).mean(axis=1), p["head"])


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
    if kind.startswith("swin"):
        return swin(attributes, x, p)
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
