"""Which parameters adapt by default: as many as the public implementations adapt, under any
naming."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import models, tta
from jaxdp.transforms.clipping import paths_of
from jaxdp.tta.select import adapted_leaves, merge, selected, trainable_part


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
    expected = {
        f"block_{k}/norm_{n}/{kind}" for k in range(9) for n in (0, 1) for kind in ("scale", "bias")
    }
    assert lower == expected


def test_convnext_excludes_nothing():
    params = shapes("convnext_tiny")
    every = selected(params, None)
    assert len(every) == 46 and selected(params, tta.lower_blocks(params)) == every


@pytest.mark.parametrize(
    ("depth", "kept"),
    [(1, 1), (2, 1), (3, 2), (4, 3), (6, 4), (8, 6), (10, 7), (12, 9), (24, 18), (32, 24)],
)
def test_a_quarter_of_the_blocks_is_excluded(depth, kept):
    params = named(*(f"block_{k}/norm/scale" for k in range(depth)), "norm/scale")
    assert selected(params, tta.lower_blocks(params)) == {
        f"block_{k}/norm/scale" for k in range(kept)
    }


STYLES = {
    "Linen": (
        "params/encoder/encoderblock_{}/LayerNorm_0/scale",
        "params/encoder/encoder_norm/scale",
    ),
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
    others = [
        path.replace("scale", "kernel").replace("weight", "kernel").replace("bias", "kernel")
        for path in blocks
    ]
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
        "abnormality_head/bias",
        "denormalise/weight",
        "weight_norm/scale",
        "SpectralNorm_0/scale",
        "3.weight",
    ],
)
def test_what_is_no_normalisation(path):
    assert not tta.normalisation(path, jnp.zeros(3))


@pytest.mark.parametrize(
    "module",
    [
        *(
            "norm",
            "norm1",
            "LayerNorm_0",
            "GroupNorm_3",
            "layernorm_before",
            "ln",
            "ln_1",
            "ln2",
            "bn1",
            "gn2",
        ),
        *("rms_1", "batchnorm/~", "BatchNorm2d", "batch_normalization_1", "norms/0"),
    ],
)
def test_what_is_a_normalisation(module):
    for name in ("scale", "offset", "bias", "weight", "gamma", "beta"):
        assert tta.normalisation(f"a/{module}/{name}", jnp.zeros(3))


def test_integers_do_not_adapt_and_selecting_nothing_is_an_error():
    params = {"norm": {"scale": jnp.arange(3)}, "dense": {"kernel": jnp.zeros(3)}}
    with pytest.raises(
        ValueError,
        match=r"adapted selects no parameter.*\['dense/kernel', 'norm/scale'\].*Pass adapted=",
    ):
        selected(params, None)
    assert selected(params, lambda path, leaf: True) == {"dense/kernel"}


def test_methods_choose_their_own_set():
    params = named("block_0/norm/scale", "block_1/norm/scale", "norm/scale")
    everything, lower = (
        ("block_0/norm/scale", "block_1/norm/scale", "norm/scale"),
        ("block_0/norm/scale",),
    )

    def paths(method, **kwargs):
        return tta.Adapter(
            lambda params, x: x, params, method, optax.sgd(1.0), **kwargs
        ).adapted_paths

    for method in (tta.Tent(), tta.EATA(10), tta.COME(tta.EATA(10), 10)):
        assert paths(method) == everything
    for method in (tta.SAR(10), tta.DeYO(10), tta.COME(tta.SAR(10), 10)):
        assert paths(method) == lower
        assert paths(tta.private(method, clip_norm=1.0, noise_multiplier=1.0)) == lower
        assert paths(method, adapted=tta.normalisation) == everything


# --- By the program of the model ---


def _layer_norm(h, affine):
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
    return h * affine["weight"][None] + affine["bias"][None]


def _stored(h, affine):
    h = (h - jnp.linspace(0, 1, 6)[None]) * jax.lax.rsqrt(jnp.linspace(0.5, 1, 6) + 1e-5)[None]
    return h * affine["scale"][None] + affine["offset"][None]


def numbered(params, images):
    """A model whose names mislead: numbers for LayerNorms, and "norm" in the names of what is
    none."""
    h = images.reshape(len(images), -1) @ params["embed"]
    h = jnp.tanh(_layer_norm(h, params["layers"]["0"]["norm"]["1"]))
    h = jnp.tanh(h @ params["denormalise"]["weight"] + params["denormalise"]["bias"][None])
    h = jnp.tanh(_stored(h, params["layers"]["1"]["batch"]))
    h = _layer_norm(h @ params["embed"][:6], params["layers"]["2"]["last"])
    return h @ params["abnormality_head"]["weight"] + params["abnormality_head"]["bias"][None]


def _of(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape) / 3 + 0.3, jnp.float32)


NUMBERED = {
    "embed": _of(12, 6),
    "denormalise": {"weight": _of(6, 6), "bias": _of(6)},
    "abnormality_head": {"weight": _of(6, 4), "bias": _of(4)},
    "layers": {
        "0": {"norm": {"1": {"weight": _of(6), "bias": _of(6)}}},
        "1": {"batch": {"scale": _of(6), "offset": _of(6)}},
        "2": {"last": {"weight": _of(6), "bias": _of(6)}},
    },
}
NORMS = {
    "layers/0/norm/1/weight",
    "layers/0/norm/1/bias",
    "layers/1/batch/scale",
    "layers/1/batch/offset",
}
NORMS |= {"layers/2/last/weight", "layers/2/last/bias"}
LOWER = {path for path in NORMS if "layers/2" not in path}
IMAGES = jax.ShapeDtypeStruct((2, 2, 2, 3), jnp.float32)
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def number_of(method, apply_fn=numbered, params=NUMBERED, **settings):
    return tta.Adapter(apply_fn, params, method, MOMENTUM, **settings)


@pytest.mark.parametrize(
    ("method", "expected"), [(tta.Tent(), NORMS), (tta.EATA(4), NORMS), (tta.SAR(4), LOWER)]
)
def test_names_do_not_count(method, expected):
    adapter = number_of(method, images=IMAGES)
    assert set(adapter.adapted_paths) == expected
    by_names = selected(NUMBERED, None)
    assert not expected <= by_names, "the rule of names misses layers"
    assert adapter.describe().splitlines()[:2] == [
        f"{type(method).__name__} adapts {len(expected)} of 11 parameters",
        "  layers/0/norm/1/bias [6]: offset of a normalisation by own statistics",
    ]
    assert (
        "layers/1/batch/scale [6]: scale of a normalisation by stored statistics"
        in adapter.describe()
    )


def earlier_rule(path, leaf):
    """The rule of names of the first version."""
    *modules, name = path.split("/")
    return name in ("scale", "bias", "weight") and bool(modules) and "norm" in modules[-1]


def test_the_rule_of_names_of_the_first_version_is_caught():
    taken = selected(NUMBERED, earlier_rule)
    assert taken == {
        f"{name}/{leaf}"
        for name in ("denormalise", "abnormality_head")
        for leaf in ("weight", "bias")
    }
    assert taken.isdisjoint(number_of(tta.Tent(), images=IMAGES).adapted_paths)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["published", "private"])
def test_the_first_batch_decides(kind):
    method = tta.SAR(4, margin=1.0, reset_below=0.0)
    method = (
        tta.private(method, clip_norm=1.0, noise_multiplier=1.0) if kind == "private" else method
    )
    images = np.random.default_rng(0).normal(size=(5, 2, 2, 3)).astype(np.float32)
    late, early = number_of(method), number_of(method, images=IMAGES)
    assert set(late.adapted_paths) == {"layers/0/norm/1/weight", "layers/0/norm/1/bias"}
    assert "suggested by its name, until the first batch" in late.describe()
    key = jax.random.key(0)
    for state in (late.init(key), number_of(method).init(key)):
        state, _ = late.step(state, images)
        expected, _ = early.step(early.init(key), images)
        assert late.describe() == early.describe() and set(late.adapted_paths) == LOWER
        for one, two in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
        ):
            np.testing.assert_array_equal(one, two)
        moved = jax.tree.map(lambda new, old: bool(np.any(new != old)), state.params, NUMBERED)
        assert {path for path, moves in paths_of(moved) if moves} == LOWER
        again, _ = late.step(state, images)
        assert again.step == 2


@pytest.mark.slow
def test_fisher_has_the_same_leaves():
    images = np.random.default_rng(0).normal(size=(5, 2, 2, 3)).astype(np.float32)
    for adapted, expected in (
        (None, NORMS),
        (tta.normalisation, NORMS),
        (tta.lower_blocks(NUMBERED), LOWER),
    ):
        found = tta.fisher(numbered, NUMBERED, [images], adapted)
        assert {path for path, leaf in paths_of(found) if leaf is not None} == expected
        assert set(number_of(tta.Tent(), adapted=adapted, images=IMAGES).adapted_paths) == expected


def test_a_choice_of_the_caller_counts():
    adapter = number_of(tta.Tent(), adapted=lambda path, leaf: "head" in path)
    assert adapter.adapted_paths == ("abnormality_head/bias", "abnormality_head/weight")
    assert adapter.describe().endswith("abnormality_head/weight [6, 4]: by adapted=")


def _to_logits(params, images):
    return _layer_norm(images.reshape(len(images), -1) @ params["embed"], params["norm"])


def _without(params, images):
    return jnp.tanh(
        images.reshape(len(images), -1) @ params["embed"] + params["layer"]["bias"][None]
    )


def _named_head(params, images):
    return images.reshape(len(images), -1) @ params["embed"] + params["norm"]["bias"][None]


def _hidden(params, images):
    h = images.reshape(len(images), -1) @ params["embed"]
    like = jax.ShapeDtypeStruct(h.shape, h.dtype)
    return (
        jax.pure_callback(_layer_norm, like, h, params["norm"], vmap_method="broadcast_all")
        @ params["embed"][:6]
    )


AFFINE = {"weight": _of(6), "bias": _of(6)}


@pytest.mark.parametrize(
    ("apply_fn", "params", "message"),
    [
        (
            _to_logits,
            {"norm": AFFINE},
            r"selects \['norm/bias', 'norm/weight'\], whose results are the logits",
        ),
        (
            _without,
            {"layer": {"bias": _of(6)}},
            r"selects no parameter.*\['embed', 'layer/bias'\].*Pass adapted=",
        ),
        (
            _named_head,
            {"norm": {"bias": _of(6)}},
            r"selects \['norm/bias'\], whose results are the logits",
        ),
    ],
    ids=["head", "none", "head by its name"],
)
def test_what_must_not_adapt(apply_fn, params, message):
    params |= {"embed": _of(12, 6)}
    with pytest.raises(ValueError, match=message):
        number_of(tta.Tent(), apply_fn, params, images=IMAGES)
    with pytest.raises(ValueError, match=message):
        tta.fisher(apply_fn, params, [np.zeros(IMAGES.shape, np.float32)])


def test_what_a_kernel_hides_goes_by_names_with_a_warning():
    params = {"embed": _of(12, 6), "norm": AFFINE, "other": {"weight": _of(6)}}
    program = jax.make_jaxpr(_hidden)(params, IMAGES)
    with pytest.warns(
        UserWarning, match=r"\['norm/bias', 'norm/weight'\] adapt because of their names only"
    ):
        found = adapted_leaves(params, None, program)
    assert [leaf.reason for leaf in found] == [
        "by its name, because an operation hides what is computed"
    ] * 2


@pytest.mark.slow
def test_merge_undoes_trainable_part():
    params = named("block_0/norm/scale", "head/kernel")
    moving = trainable_part(params, frozenset(["block_0/norm/scale"]))
    assert (
        moving["head"]["kernel"] is None
        and moving["block_0"]["norm"]["scale"] is params["block_0"]["norm"]["scale"]
    )
    moved = jax.tree.map(lambda x: x + 1, moving)
    merged = merge(moved, params)
    np.testing.assert_array_equal(merged["block_0"]["norm"]["scale"], 1)
    assert merged["head"]["kernel"] is params["head"]["kernel"]
