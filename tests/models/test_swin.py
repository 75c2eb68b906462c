"""Where a Swin is cut, what the package relies on, and its checkpoints' names. Its forward pass is
that of test_families."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdp import models
from jaxdp.models.vit import Product
from tests.models.families import TINY, build, images_of, outputs

TWO_STAGES = TINY["swin"][1]
IMAGES = images_of("swin")


def create(attributes, **more):
    return models.create("swin_tiny", num_classes=5, **{**attributes, **more})


def example():
    """Returns the model of two stages, and its parameters off their initial values."""
    model, variables = build("swin")
    return model, variables["params"]


# Cutting
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_parts_are_the_whole_at_every_cut():
    model, params = example()
    cuts = {1: (64, 8), 2: (16, 16), 3: (16, 16)}  # a cut between stages comes after the merging
    parts = {}
    for cut, tokens in cuts.items():
        between = jnp.zeros((1, *tokens))
        front = jax.eval_shape(
            lambda cut=cut: model.init(jax.random.key(0), IMAGES, 0, cut)["params"]
        )
        back = jax.eval_shape(
            lambda cut=cut, x=between: model.init(jax.random.key(0), x, cut)["params"]
        )
        assert not set(front) & set(back)
        assert jax.tree.map(jnp.shape, {**front, **back}) == jax.tree.map(jnp.shape, params)
        parts[cut] = tuple({name: params[name] for name in part} for part in (front, back))

    @jax.jit
    def joined(parts):
        tokens = {
            cut: model.apply({"params": front}, IMAGES, 0, cut) for cut, (front, _) in parts.items()
        }
        logits = {
            cut: model.apply({"params": back}, tokens[cut], cut) for cut, (_, back) in parts.items()
        }
        return tokens, logits

    tokens, logits = joined(parts)
    assert {cut: x.shape[1:] for cut, x in tokens.items()} == cuts
    for cut in cuts:
        np.testing.assert_allclose(logits[cut], outputs("swin")[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_may_be_cut_where():
    model, params = example()
    assert (model.num_blocks, model.prefix_tokens) == (4, 0)
    middle = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 64, 8)), 1, 3)["params"]
    )
    assert set(middle) == {"stage_0_block_1", "stage_1_merge", "stage_1_block_0"}
    last = jax.eval_shape(lambda: model.apply({"params": params}, IMAGES, 0, 4))
    assert last.shape == (3, 16, 16)  # before the last LayerNorm
    large = models.create("swin_large", num_classes=1000)
    handed_over = jax.eval_shape(
        lambda: large.init_with_output(
            jax.random.key(0), jnp.zeros((1, 224, 224, 3)), 0, sum(large.depths[:3])
        )[0]
    )
    assert handed_over.shape == (1, 7 * 7, 1536)


# What the rest of the package relies on
# -------------------------------------------------------------------------------


@pytest.mark.slow
def test_interceptors_see_every_product_and_heads_come_fastest():
    model, params = example()
    modules, operands = [], {}

    def spy(call, args, kwargs, context):
        result = call(*args, **kwargs)
        if isinstance(context.module, nn.Dense | nn.Conv | Product):
            modules.append(context.module)
            operands["/".join(context.module.path)] = (*args, result)
        return result

    def run(params):
        with nn.intercept_methods(spy):
            model.apply({"params": params}, IMAGES, 0, 2)
        return operands

    text = str(jax.make_jaxpr(run)(params))
    assert (
        len(modules)
        == text.count("dot_general[") + text.count("conv_general_dilated[")
        == 1 + 2 * 8 + 1
    )
    seen = jax.jit(run)(params)
    for path in (module.path for module in modules if isinstance(module, Product)):
        assert all(x.shape[0] == 3 * 4 * 2 for x in seen["/".join(path)])  # images, windows, heads
    for block in ("stage_0_block_0", "stage_0_block_1"):
        products = [*seen[f"{block}/attention/scores"][:2], seen[f"{block}/attention/mixture"][1]]
        for product, name in zip(products, ("query", "key", "value"), strict=True):
            together = product.reshape(-1, 2, 16, 4).swapaxes(1, 2).reshape(3, 64, 8)
            np.testing.assert_array_equal(together, seen[f"{block}/attention/{name}"][-1])


@pytest.mark.parametrize(
    ("attributes", "shape", "message"),
    [
        ({}, (16, 12, 3), "images must be square, got 16x12"),
        ({"patch_size": 3}, (16, 16, 3), "patch_size must divide the image 16x16, got 3"),
        (
            {"window": 3},
            (16, 16, 3),
            "window must divide the 8x8 grid of stage 0, got 3. Resize the images or choose",
        ),
        ({"window": 7}, (14, 14, 3), "an even side before patches are merged, got 7x7"),
        ({"num_heads": (2, 3)}, (16, 16, 3), "num_heads must divide the width 16, got 3"),
        ({"num_heads": (2,)}, (16, 16, 3), r"one entry per stage, got \(2, 2\) and \(2,\)"),
    ],
)
def test_impossible_models_are_refused(attributes, shape, message):
    model = create(TWO_STAGES, **attributes)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape)))


def test_tokens_of_no_square_grid_are_refused():
    model, params = example()
    with pytest.raises(ValueError, match="x must have the tokens of a square grid, got 63"):
        jax.eval_shape(lambda: model.apply({"params": params}, jnp.zeros((1, 63, 8)), 1))


# Checkpoints; logits of the libraries that publish them are compared in test_checkpoints.py
# ---------------------------


FOUR_STAGES = {
    "patch_size": 1,
    "window": 2,
    "width": 2,
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 1, 2, 2),
} | {"mlp_ratio": 2}
NAMES = {
    "hf_swin": {
        "attention": (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
        ),
        "table": "attention.self.relative_position_bias_table",
        "norms": ("layernorm_before", "layernorm_after"),
        "mlp": ("intermediate.dense", "output.dense"),
        "outside": (
            "swin.embeddings.patch_embeddings.projection",
            "swin.embeddings.norm",
            "swin.layernorm",
        ),
        "layer": "swin.encoder.layers.{}",
        "head": "classifier",
        "merged before": 0,
        "buffers": ("blocks.0.attention.self.relative_position_index",),
    },
    "timm_swin": {
        "attention": ("attn.qkv", "attn.proj"),
        "table": "attn.relative_position_bias_table",
        "norms": ("norm1", "norm2"),
        "mlp": ("mlp.fc1", "mlp.fc2"),
        "outside": ("patch_embed.proj", "patch_embed.norm", "norm"),
        "layer": "layers.{}",
        "head": "head.fc",
        "merged before": 1,
        "buffers": ("blocks.0.attn.relative_position_index", "blocks.0.attn_mask"),
    },
}


def published(naming):
    """Random tensors as they are named and laid out in a file of `FOUR_STAGES`, buffers
    included."""
    rng, names, tensors = np.random.default_rng(3), NAMES[naming], {}

    def put(name, *shape, bias=True):
        tensors[f"{name}.weight"] = rng.random(shape, np.float32)
        if bias:
            tensors[f"{name}.bias"] = rng.random(shape[:1], np.float32)

    embed, embed_norm, norm = names["outside"]
    put(embed, 2, 3, 1, 1)
    put(embed_norm, 2)
    put(norm, 16)
    put(names["head"], 5, 16)
    for stage, heads in enumerate(FOUR_STAGES["num_heads"]):
        width, layer = 2 * 2**stage, names["layer"].format(stage)
        for name in names["attention"]:
            put(f"{layer}.blocks.0.{name}", 3 * width if "qkv" in name else width, width)
        for name in names["norms"]:
            put(f"{layer}.blocks.0.{name}", width)
        for name, shape in zip(names["mlp"], [(2 * width, width), (width, 2 * width)], strict=True):
            put(f"{layer}.blocks.0.{name}", *shape)
        tensors[f"{layer}.blocks.0.{names['table']}"] = rng.random((9, heads), np.float32)
        for name in names["buffers"]:
            tensors[f"{layer}.{name}"] = np.zeros((4, 4), np.int64)
        if stage < 3:
            merging = f"{names['layer'].format(stage + names['merged before'])}.downsample"
            put(f"{merging}.norm", 4 * width)
            put(f"{merging}.reduction", 2 * width, 4 * width, bias=False)
    return tensors


def load(naming, tensors, folder, **attributes):
    save_file(tensors, folder / "swin.safetensors")
    preprocessing = models.Preprocessing(size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
    model = create(FOUR_STAGES, **attributes)
    return models.load_checkpoint(
        folder / "swin.safetensors", model=model, preprocessing=preprocessing
    ).params


@pytest.mark.slow
@pytest.mark.parametrize("naming", NAMES)
def test_four_stages_are_read_and_buffers_of_old_files_ignored(naming, tmp_path):
    tensors, names = published(naming), NAMES[naming]
    params = load(naming, tensors, tmp_path)
    for stage in range(4):
        block, name = params[f"stage_{stage}_block_0"], f"{names['layer'].format(stage)}.blocks.0."
        parts = [tensors[f"{name}{part}.weight"] for part in names["attention"]]
        parts = parts if naming == "hf_swin" else [*np.split(parts[0], 3), parts[1]]
        for ours, theirs in zip(("query", "key", "value", "out"), parts, strict=True):
            np.testing.assert_array_equal(block["attention"][ours]["kernel"], theirs.T)
        np.testing.assert_array_equal(
            block["attention"]["position_bias"], tensors[name + names["table"]]
        )
        if stage:
            merging = f"{names['layer'].format(stage - 1 + names['merged before'])}.downsample"
            found = params[f"stage_{stage}_merge"]
            np.testing.assert_array_equal(
                found["reduction"]["kernel"], tensors[f"{merging}.reduction.weight"].T
            )
            np.testing.assert_array_equal(found["norm"]["scale"], tensors[f"{merging}.norm.weight"])


@pytest.mark.slow
def test_a_file_says_heads_window_and_epsilon(tmp_path):
    tensors = published("timm_swin")
    table = r"layers\.{}\.blocks\.0\.attn\.relative_position_bias_table: shape \(9, {}\) "
    table += "does not fit stage_"
    with pytest.raises(
        ValueError, match=table.format(0, 1) + r"0_block_0/attention/position_bias \(9, 2\)"
    ):
        load("timm_swin", tensors, tmp_path, num_heads=(2, 1, 2, 2))
    with pytest.raises(
        ValueError, match=table.format(2, 2) + r"2_block_0/attention/position_bias \(49, 2\)"
    ):
        load("timm_swin", tensors, tmp_path, window=4)
    with pytest.raises(
        ValueError, match="the checkpoint needs a model with norm_epsilon=1e-05, not 1e-06"
    ):
        load("timm_swin", tensors, tmp_path, norm_epsilon=1e-6)
