import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdp import models


def count(name: str, shape: tuple[int, ...], num_classes: int, **attributes) -> int:
    return size(models.create(name, num_classes=num_classes, **attributes), shape)


@functools.cache  # several names have one architecture
def size(model: Any, shape: tuple[int, ...]) -> int:
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape)))
    assert set(variables) == {"params"}
    assert "head" in variables["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(variables))


def resnet_size(blocks: int, classes: int) -> int:
    """Convolutions without bias, two numbers per channel and normalisation, one dense layer."""
    total, channels = 27 * 16 + 2 * 16, 16
    for width in (16, 32, 64):
        for _ in range(blocks):
            total += 9 * channels * width + 9 * width * width + 4 * width
            channels = width
    return total + 64 * classes + classes


def wide_resnet_size(depth: int, factor: int, classes: int) -> int:
    """Convolutions with gain and bias, a normalisation of the INPUT of each, one dense layer."""
    total, channels = 27 * 16 + 2 * 16, 16
    for width in (16 * factor, 32 * factor, 64 * factor):
        total += 2 * channels + channels * width + 2 * width
        for _ in range((depth - 4) // 6):
            total += 2 * channels + 9 * channels * width + 2 * width
            total += 2 * width + 9 * width * width + 2 * width
            channels = width
    return total + 2 * channels + channels * classes + classes


def vit_size(width: int, depth: int, tokens: int, patch: int, channels: int, classes: int) -> int:
    embed = patch * patch * channels * width + width + (tokens + 1) * width + width
    attention = 4 * (width * width + width)
    mlp = width * 4 * width + 4 * width + 4 * width * width + width
    return embed + depth * (attention + mlp + 4 * width) + 2 * width + width * classes + classes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected", "published"),
    [
        ("resnet20", resnet_size(3, 10), 0.27e6),
        ("wrn_16_4", wide_resnet_size(16, 4, 10), 2.75e6),
        ("wrn_28_10", wide_resnet_size(28, 10, 10), 36.5e6),
        ("wrn_40_4", wide_resnet_size(40, 4, 10), 8.9e6),
        ("mlp", 3072 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10, None),
        ("cnn", 27 * 32 + 32 + 288 * 64 + 64 + 4096 * 128 + 128 + 1280 + 10, None),
        ("vit_tiny", vit_size(64, 4, 64, 4, 3, 10), None),
    ],
)
def test_sizes_on_cifar(name, expected, published):
    assert count(name, (32, 32, 3), 10) == expected
    if published is not None:
        assert expected == pytest.approx(published, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "depth", "published"),
    [
        ("vit_ti16", 192, 12, 5_717_416),
        ("vit_s16", 384, 12, 22_050_664),
        ("vit_b16", 768, 12, 86_567_656),
        ("vit_l16", 1024, 24, 304_326_632),
        ("deit_ti16", 192, 12, 5_717_416),
        ("deit_s16", 384, 12, 22_050_664),
        ("deit_b16", 768, 12, 86_567_656),
    ],
)
def test_vit_sizes_are_the_published_ones(name, width, depth, published):
    assert count(name, (224, 224, 3), 1000) == vit_size(width, depth, 196, 16, 3, 1000) == published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "published"),
    [
        ("dinov2_s14", 384, 22_056_576),
        ("dinov2_b14", 768, 86_580_480),
        ("dinov2_l14", 1024, 304_368_640),
    ],
)
def test_dinov2_sizes_are_the_published_ones(name, width, published):
    """The files hold 37 x 37 positions, a token of the training, and no head."""
    head, mask_token = 1000 * width + 1000, width
    ours = count(name, (518, 518, 3), 1000)
    assert ours - head + mask_token == published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "published"),
    [("deit_ti16", 192, 5_910_800), ("deit_s16", 384, 22_436_432), ("deit_b16", 768, 87_338_192)],
)
def test_distillation_adds_a_token_its_position_and_a_head(name, width, published):
    extra = count(f"{name}_distilled", (224, 224, 3), 1000) - count(name, (224, 224, 3), 1000)
    assert extra == 2 * width + 1000 * width + 1000
    assert count(f"{name}_distilled", (224, 224, 3), 1000) == published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("convnext_tiny", 28_589_128),
        ("convnext_small", 50_223_688),
        ("convnext_base", 88_591_464),
        ("convnext_large", 197_767_336),
    ],
)
def test_convnext_sizes_are_the_published_ones(name, published):
    assert count(name, (224, 224, 3), 1000) == published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("swin_tiny", 28_288_354),
        ("swin_small", 49_606_258),
        ("swin_base", 87_768_224),
        ("swin_large", 196_532_476),
    ],
)
def test_swin_sizes_are_the_published_ones(name, published):
    assert count(name, (224, 224, 3), 1000) == published


def test_attributes_override_the_name():
    model = models.create("vit_ti16", num_classes=3, patch_size=4, depth=6)
    assert (model.patch_size, model.depth, model.width, model.num_classes) == (4, 6, 192, 3)
    assert count("vit_tiny", (8, 8, 1), 10, patch_size=2, pool="mean") < count(
        "vit_tiny", (32, 32, 3), 10
    )


def test_an_unknown_name_lists_the_models():
    with pytest.raises(ValueError) as caught:
        models.create("resnet1000", num_classes=10)
    assert "resnet1000" in str(caught.value)
    assert all(name in str(caught.value) for name in models.MODELS)
    required = (
        "mlp cnn resnet20 wrn_16_4 wrn_28_10 wrn_40_4 vit_tiny vit_ti16 vit_s16 vit_b16 vit_l16"
    )
    assert set(required.split()) <= set(models.MODELS)


@pytest.mark.slow
def test_an_unknown_attribute_lists_the_attributes():
    with pytest.raises(
        TypeError, match=r"model 'mlp' has no depth\. Its attributes are activation, dtype, hidden"
    ):
        models.create("mlp", num_classes=10, depth=3)
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        models.create("mlp", num_classes=1)
