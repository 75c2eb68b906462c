"""DINOv2 under transformers' names against a forward pass in NumPy float64, written from the names
of the file alone."""

import math

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy import special

from jaxdp import models
from jaxdp.models import Preprocessing, load_checkpoint
from jaxdp.models.positions import resize_positions

WIDTH, DEPTH, HEADS, HIDDEN, PATCH, CLASSES = 8, 3, 2, 12, 2, 5
TRAINED, USED = 4, 3  # patches along a side, of the file and of the images here
PREPROCESSING = Preprocessing(size=USED * PATCH, mean=(0.5,) * 3, std=(0.25,) * 3)
SIZES = {"patch_size": PATCH, "width": WIDTH, "depth": DEPTH, "num_heads": HEADS}


def shapes(prefix):
    """Names and shapes of the tensors of Dinov2ForImageClassification."""
    square, vector = (WIDTH, WIDTH), (WIDTH,)
    names = {
        "embeddings.cls_token": (1, 1, WIDTH),
        "embeddings.mask_token": (1, WIDTH),
        "embeddings.position_embeddings": (1, 1 + TRAINED**2, WIDTH),
        "embeddings.patch_embeddings.projection.weight": (WIDTH, 3, PATCH, PATCH),
        "embeddings.patch_embeddings.projection.bias": vector,
        "layernorm.weight": vector,
        "layernorm.bias": vector,
    }
    for k in range(DEPTH):
        layer = f"encoder.layer.{k}"
        for norm in ("norm1", "norm2"):
            names |= {f"{layer}.{norm}.weight": vector, f"{layer}.{norm}.bias": vector}
        for part in ("query", "key", "value"):
            dense = f"{layer}.attention.attention.{part}"
            names |= {f"{dense}.weight": square, f"{dense}.bias": vector}
        dense = f"{layer}.attention.output.dense"
        names |= {f"{dense}.weight": square, f"{dense}.bias": vector}
        names |= {f"{layer}.mlp.fc1.weight": (HIDDEN, WIDTH), f"{layer}.mlp.fc1.bias": (HIDDEN,)}
        names |= {f"{layer}.mlp.fc2.weight": (WIDTH, HIDDEN), f"{layer}.mlp.fc2.bias": vector}
        names |= {f"{layer}.layer_scale{j}.lambda1": vector for j in (1, 2)}
    return {prefix + name: shape for name, shape in names.items()}


def tensors(prefix="dinov2.", head=True):
    generator = np.random.default_rng(0)
    all_shapes = shapes(prefix)
    if head:
        all_shapes |= {"classifier.weight": (CLASSES, 2 * WIDTH), "classifier.bias": (CLASSES,)}
    return {
        name: generator.normal(scale=0.6, size=shape).astype(np.float32)
        for name, shape in all_shapes.items()
    }


# --- The forward pass ---------------------------------------------------------------------------


def cubic(distance, a):
    """The kernel of Keys (1981), Eq. 4, for one number."""
    t = abs(distance)
    if t < 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def interpolated(grid, side, a=-0.75):
    """A grid [old, old, D] at side x side places, a sum over the 16 neighbours of each place."""
    old = len(grid)
    found = np.zeros((side, side, grid.shape[-1]))
    for i in range(side):
        for j in range(side):
            y, x = ((k + 0.5) * old / side - 0.5 for k in (i, j))
            for row in range(math.floor(y) - 1, math.floor(y) + 3):
                for column in range(math.floor(x) - 1, math.floor(x) + 3):
                    inside = grid[min(max(row, 0), old - 1), min(max(column, 0), old - 1)]
                    found[i, j] += cubic(y - row, a) * cubic(x - column, a) * inside
    return found


def layer_norm(x, t, name):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]


def dense(x, t, name):
    return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]


def attention(x, t, name):
    def heads(part):
        y = dense(x, t, f"{name}.attention.{part}")
        return y.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

    query, key, value = (heads(part) for part in ("query", "key", "value"))
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(WIDTH // HEADS)
    mixed = special.softmax(scores, axis=-1) @ value
    return dense(mixed.transpose(0, 2, 1, 3).reshape(x.shape), t, f"{name}.output.dense")


def expected_logits(images, float32, a=-0.75, prefix="dinov2."):
    """Logits of images [n, S, S, 3] in [0, 1]."""
    t = {name.removeprefix(prefix): np.float64(x) for name, x in float32.items()}
    pixels = (np.float64(images) - 0.5) / 0.25
    side = pixels.shape[1] // PATCH
    patches = pixels.reshape(len(pixels), side, PATCH, side, PATCH, 3)
    kernel = t["embeddings.patch_embeddings.projection.weight"]
    x = np.einsum("nipjqc,dcpq->nijd", patches, kernel).reshape(len(pixels), side**2, WIDTH)
    x = x + t["embeddings.patch_embeddings.projection.bias"]
    positions = t["embeddings.position_embeddings"][0]
    grid = positions[1:].reshape(TRAINED, TRAINED, WIDTH)
    token = t["embeddings.cls_token"][0] + positions[:1]
    x = x + interpolated(grid, side, a).reshape(side**2, WIDTH)
    x = np.concatenate([np.broadcast_to(token, (len(x), 1, WIDTH)), x], axis=1)
    for k in range(DEPTH):
        layer = f"encoder.layer.{k}"
        y = attention(layer_norm(x, t, f"{layer}.norm1"), t, f"{layer}.attention")
        x = x + t[f"{layer}.layer_scale1.lambda1"] * y
        y = dense(layer_norm(x, t, f"{layer}.norm2"), t, f"{layer}.mlp.fc1")
        y = dense(y * special.ndtr(y), t, f"{layer}.mlp.fc2")
        x = x + t[f"{layer}.layer_scale2.lambda1"] * y
    x = layer_norm(x, t, "layernorm")
    return dense(np.concatenate([x[:, 0], x[:, 1:].mean(1)], -1), t, "classifier")


# --- The loader ---------------------------------------------------------------------------------


def model(**attributes):
    options = {**SIZES, "mlp_width": HIDDEN, "pool": "token_and_mean", **attributes}
    return models.create("dinov2_s14", num_classes=CLASSES, **options)


def load(folder, arrays, preprocessing=PREPROCESSING, **options):
    path = folder / "model.safetensors"
    save_file(arrays, path)
    return load_checkpoint(path, **{"model": model(), "preprocessing": preprocessing, **options})


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).uniform(size=(4, 6, 6, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def logits(tmp_path_factory, images):
    pretrained = load(tmp_path_factory.mktemp("dinov2"), tensors())
    return np.asarray(jax.jit(pretrained.apply_fn)(pretrained.params, images))


@pytest.mark.slow
def test_logits_are_those_of_the_forward_pass_in_float64(images, logits):
    expected = expected_logits(images, tensors())
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.slow
def test_every_tensor_and_the_kernel_of_the_interpolation_count(images, logits):
    """The twins: two tensors of a shape exchanged, and the coefficient that JAX and Pillow have."""
    arrays = tensors()
    assert np.abs(logits - expected_logits(images, arrays, a=-0.5)).max() > 1e-3
    layer = "dinov2.encoder.layer.1"
    for one, other in (
        ("layer_scale1.lambda1", "layer_scale2.lambda1"),
        ("norm1.weight", "norm2.weight"),
        ("attention.attention.query.weight", "attention.output.dense.weight"),
    ):
        a, b = f"{layer}.{one}", f"{layer}.{other}"
        exchanged = {**arrays, a: arrays[b], b: arrays[a]}
        assert np.abs(logits - expected_logits(images, exchanged)).max() > 1e-3, one


def test_positions_of_the_trained_size_stay_as_they_are(tmp_path):
    arrays = tensors()
    side = TRAINED * PATCH
    trained = Preprocessing(size=side, mean=(0.5,) * 3, std=(0.25,) * 3)
    pretrained = load(tmp_path, arrays, trained)
    name = "dinov2.embeddings.position_embeddings"
    np.testing.assert_array_equal(pretrained.params["positions"], arrays[name])


def test_a_file_without_a_head_needs_a_new_one(tmp_path):
    arrays = tensors("", head=False)
    headless = load(tmp_path, arrays, new_head=True, model=model(pool="token"))
    assert headless.params["head"]["kernel"].shape == (WIDTH, CLASSES)
    assert not np.any(headless.params["head"]["kernel"])
    scale = arrays["encoder.layer.2.layer_scale2.lambda1"]
    np.testing.assert_array_equal(headless.params["block_2"]["layer_scale_1"], scale)
    with pytest.raises(ValueError, match=r"classifier\.weight: missing, for head/kernel \(8, 5\)"):
        load(tmp_path, arrays, model=model(pool="token"))


def test_another_model_is_refused(tmp_path):
    superfluous = r"encoder\.layer\.0\.layer_scale1\.lambda1: superfluous, shape \(8,\)"
    with pytest.raises(ValueError, match=superfluous):
        load(tmp_path, tensors(), model=model(layer_scale=0.0))
    with pytest.raises(ValueError, match="needs a model with norm_epsilon=1e-06, not 1e-05"):
        load(tmp_path, tensors(), model=model(norm_epsilon=1e-5))
    arrays = tensors()
    arrays["dinov2.embeddings.position_embeddings"] = np.zeros((1, 16, WIDTH), np.float32)
    with pytest.raises(ValueError, match="need a square grid of patches, got 15 patches"):
        load(tmp_path, arrays)


# --- The interpolation --------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 7), (5, 2), (1, 2)])
def test_positions_are_the_sum_over_sixteen_neighbours(old, new):
    positions = np.random.default_rng(old).normal(size=(1, 2 + old**2, 3))
    resized = resize_positions(positions, 2 + new**2, prefix_tokens=2)
    np.testing.assert_array_equal(resized[:, :2], positions[:, :2])
    grid = positions[0, 2:].reshape(old, old, 3)
    expected = interpolated(grid, new).reshape(new**2, 3)
    np.testing.assert_allclose(resized[0, 2:], expected, atol=1e-12)
    if old > 1:
        assert np.abs(expected - interpolated(grid, new, a=-0.5).reshape(-1, 3)).max() > 1e-3


def test_equal_positions_stay_equal_and_a_grid_of_the_same_side_stays():
    positions = np.random.default_rng(0).normal(size=(1, 10, 3)).astype(np.float32)
    same = resize_positions(positions, 10, prefix_tokens=1)
    assert same.dtype == np.float32
    np.testing.assert_array_equal(same, positions)
    flat = np.full((1, 10, 3), 0.3)
    np.testing.assert_allclose(resize_positions(flat, 26, prefix_tokens=1), 0.3, atol=1e-12)


# --- The library that publishes -----------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("size", [8, 6])
@pytest.mark.filterwarnings("ignore")  # the other library's own
def test_dinov2_is_that_of_transformers(size, tmp_path, record_property):
    """Logits of a random DINOv2, at the size of its positions (8) and at another one (6)."""
    import torch
    import transformers

    config = transformers.Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        mlp_ratio=2,
        image_size=TRAINED * PATCH,
        patch_size=PATCH,
        num_labels=CLASSES,
    )
    theirs = transformers.Dinov2ForImageClassification(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
        pixels = torch.randn((2, 3, size, size), generator=generator)
        expected = theirs(pixels).logits.numpy()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    pretrained = load_checkpoint(
        tmp_path / "model.safetensors",
        model=model(mlp_width=2 * WIDTH),
        preprocessing=Preprocessing(size=size, mean=(0.0,) * 3, std=(1.0,) * 3),
    )
    ours = pretrained.apply_fn(pretrained.params, pixels.numpy().transpose(0, 2, 3, 1))
    difference = np.abs(np.asarray(ours) - expected).max()
    record_property("compared with", "transformers")
    record_property("largest difference", f"{difference:.1e}")
    record_property("allowed", "1e-4")
    assert difference <= 1e-4
