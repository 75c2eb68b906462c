"""Which parameters adapt by default: as many as the public implementations adapt, under any naming."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import models, tta
from jaxdp.transforms.clipping import paths_of
from jaxdp.tta.select import merge, selected, trainable_part


@functools.cache
def shapes(name):
    """Shapes of a model's parameters."""
    model = models.create(name, num_classes=1000)
    image = jnp.zeros((1, 224, 224, 3))
    return jax.eval_shape(model.init, jax.random.key(0), image)["params"]


def count(params, paths):
    return len(paths), sum(leaf.size for path, leaf in paths_of(params) if path in paths)


def named(*paths):
    """Parameters of shape [3] with these paths, as nested dicts."""
    tree = {}
    for path in paths:
        *modules, name = path.split("/")
        node = functools.reduce(lambda node, module: node.setdefault(module, {}), modules, tree)
        node[name] = jnp.zeros(3)
    return tree


def test_vit_b16_adapts_what_the_public_code_adapts():
    params = shapes("vit_b16")
    assert count(params, selected(params, None)) == (50, 38_400)
    lower = selected(params, tta.lower_blocks(params))
    assert count(params, lower) == (36, 27_648)
    expected = {f"block_{k}/norm_{n}/{kind}" for k in range(9) for n in (0, 1) for kind in ("scale", "bias")}
    assert lower == expected


def test_convnext_excludes_nothing():
    params = shapes("convnext_tiny")
    every = selected(params, None)
    assert len(every) == 46 and selected(params, tta.lower_blocks(params)) == every


@pytest.mark.parametrize(
    ("depth", "kept"), [(1, 1), (2, 1), (3, 2), (4, 3), (6, 4), (8, 6), (10, 7), (12, 9), (24, 18), (32, 24)]
)
def test_a_quarter_of_the_blocks_is_excluded(depth, kept):
    params = named(*(f"block_{k}/norm/scale" for k in range(depth)), "norm/scale")
    assert selected(params, tta.lower_blocks(params)) == {f"block_{k}/norm/scale" for k in range(kept)}


STYLES = {
    "Linen": ("params/encoder/encoderblock_{}/LayerNorm_0/scale", "params/encoder/encoder_norm/scale"),
    "timm": ("blocks/{}/norm1/weight", "norm/weight"),
    "timm's keys": ("blocks.{}.norm1.weight", "norm.weight"),
    "Hugging Face": ("vit/encoder/layer/{}/layernorm_before/weight", "vit/layernorm/weight"),
    "Hugging Face's keys": ("vit.encoder.layer.{}.layernorm_before.weight", "vit.layernorm.weight"),
    "GPT": ("h/layers_{}/ln_1/bias", "h/ln_f/bias"),
}


@pytest.mark.parametrize("style", STYLES)
def test_other_namings(style):
    block, final = STYLES[style]
    blocks = [block.format(k) for k in range(12)]
    others = [path.replace("scale", "kernel").replace("weight", "kernel").replace("bias", "kernel") for path in blocks]
    params = named(*blocks, final, *others, "head/weight", "embed/bias")
    assert selected(params, None) == {*blocks, final}
    assert selected(params, tta.lower_blocks(params)) == set(blocks[:9])


@pytest.mark.parametrize(
    "block",
    [
        "stages/{}/blocks/{}/norm/weight",
        "stages.{}.blocks.{}.norm.weight",
        "encoder/stages/{}/layers/{}/layernorm/bias",
    ],
)
def test_blocks_in_stages_are_no_flat_list(block):
    params = named(*(block.format(stage, k) for stage in range(4) for k in range(3)), "norm/weight")
    assert selected(params, tta.lower_blocks(params)) == selected(params, None)
    assert len(selected(params, None)) == 13


@pytest.mark.parametrize(
    "path",
    [
        "norm/kernel",
        "scale",
        "head/bias",
        "attention/scale",
        "norm/mlp/bias",
        "lnx/scale",
        "online_0/bias",
        "norm/mean",
    ],
)
def test_what_is_no_normalisation(path):
    assert not tta.normalisation(path, jnp.zeros(3))


@pytest.mark.parametrize(
    "module", ["norm", "norm1", "LayerNorm_0", "GroupNorm_3", "layernorm_before", "ln", "ln_1", "ln2"]
)
def test_what_is_a_normalisation(module):
    for name in ("scale", "bias", "weight", "gamma", "beta"):
        assert tta.normalisation(f"a/{module}/{name}", jnp.zeros(3))


def test_integers_do_not_adapt_and_selecting_nothing_is_an_error():
    params = {"norm": {"scale": jnp.arange(3)}, "dense": {"kernel": jnp.zeros(3)}}
    with pytest.raises(
        ValueError, match=r"adapted selects no parameter.*\['dense/kernel', 'norm/scale'\].*Pass adapted="
    ):
        selected(params, None)
    assert selected(params, lambda path, leaf: True) == {"dense/kernel"}


def test_methods_choose_their_own_set():
    params = named("block_0/norm/scale", "block_1/norm/scale", "norm/scale")
    everything, lower = ("block_0/norm/scale", "block_1/norm/scale", "norm/scale"), ("block_0/norm/scale",)

    def paths(method, **kwargs):
        return tta.Adapter(lambda params, x: x, params, method, optax.sgd(1.0), **kwargs).adapted_paths

    for method in (tta.Tent(), tta.EATA(10), tta.COME(tta.EATA(10), 10)):
        assert paths(method) == everything
    for method in (tta.SAR(10), tta.DeYO(10), tta.COME(tta.SAR(10), 10)):
        assert paths(method) == lower
        assert paths(tta.private(method, clip_norm=1.0, noise_multiplier=1.0)) == lower
        assert paths(method, adapted=tta.normalisation) == everything


@pytest.mark.slow
def test_merge_undoes_trainable_part():
    params = named("block_0/norm/scale", "head/kernel")
    moving = trainable_part(params, frozenset(["block_0/norm/scale"]))
    assert moving["head"]["kernel"] is None and moving["block_0"]["norm"]["scale"] is params["block_0"]["norm"]["scale"]
    moved = jax.tree.map(lambda x: x + 1, moving)
    merged = merge(moved, params)
    np.testing.assert_array_equal(merged["block_0"]["norm"]["scale"], 1)
    assert merged["head"]["kernel"] is params["head"]["kernel"]
