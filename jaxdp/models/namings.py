"""The names of tensors in the files of each publisher.

Each naming is a row of `NAMINGS`, a table from our modules to the names in the file. The table is
complete: a tensor that is missing, superfluous or of another shape is an error when
`jaxdp.models.checkpoints` reads a file.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Two tensors of "augreg", from which the number of heads and the size of images are read.
QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
POSITIONS = "Transformer/posembed_input/pos_embedding"
_PRE_NORM: Mapping[str, Any] = {"norm_order": "pre"}
_PRE_NORM_1E6: Mapping[str, Any] = {"norm_order": "pre", "norm_epsilon": 1e-6}
_SELF = "swin.encoder.layers.*.blocks.*.attention.self"
_TORCH_LEAVES = {"kernel": ".weight", "bias": ".bias", "scale": ".weight"}
_BATCH_NORM_LEAVES = {**_TORCH_LEAVES, "mean": ".running_mean", "var": ".running_var"}
_LANGUAGE_LEAVES = {**_TORCH_LEAVES, "embedding": ".weight"}
Names = Mapping[str, str]
Table = tuple[str, str, Names]


def _from_torch(path: str, array: np.ndarray) -> np.ndarray:
    """Moves PyTorch's axes (out, in, *spatial) to ours, (*spatial, in, out)."""
    if not path.endswith("/kernel"):
        return array
    return np.moveaxis(array, (0, 1), (-1, -2))


def _from_convolution(path: str, array: np.ndarray) -> np.ndarray:
    """Converts as `_from_torch`. The head, a 1x1 convolution in the file, is a matrix."""
    if path == "head/kernel":
        return array[:, :, 0, 0].T
    return _from_torch(path, array)


def _from_caffe(path: str, array: np.ndarray) -> np.ndarray:
    """Converts as `_from_convolution`.

    The first convolution of the file takes the colours in the order blue, green, red.
    """
    if path == "conv/kernel":
        array = array[:, ::-1]
    return _from_convolution(path, array)


def _as_it_is(path: str, array: np.ndarray) -> np.ndarray:
    return array


def _from_flax(path: str, array: np.ndarray) -> np.ndarray:
    """Merges the axis of heads in attention, (D, heads, D / heads).

    All else is in the original Flax files as it is here.
    """
    if path.endswith("attention/out/kernel"):
        return array.reshape(-1, array.shape[-1])
    if re.search("attention/(query|key|value)/", path):
        if path.endswith("/kernel"):
            return array.reshape(len(array), -1)
        return array.ravel()
    return array


@dataclasses.dataclass(frozen=True)
class Naming:
    """A publisher's names of tensors.

    Each table says how a group of our paths is named in the file. An example:

        ("block_*/", "encoder.layer.*.", {"norm_0": "layernorm_before"})

    names our "block_3/norm_0/scale" "encoder.layer.3.layernorm_before.weight" in the file. The end
    ".weight" comes from `leaves`.

    Attributes:
      signature: A tensor that only this naming has.
      tables: (beginning of our paths, beginning of the names in the file, {ends of the paths: ends
        of the names}). A path leads to a module or a parameter. A star stands for one number or
        word, the same on both sides. A name with "[*]" is a tensor that stacks query, key and value
        along the axis of outputs. The first match counts.
      ignored: Tensors, with such stars, that may be in the file and take no part in classification.
      attributes: The attributes of the model that the naming implies.
      leaves: Our name of a module's parameter to the end of its name in the file.
      outputs_axis: The axis of outputs of a tensor in the file, along which "[*]" is stacked.
      convert: `convert(our path, array of the file) -> our array`.
      resizes_positions: Whether the publisher's network interpolates its position embeddings to the
          size of the image.
    """

    signature: str
    tables: Sequence[Table]
    ignored: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    leaves: Names = dataclasses.field(default_factory=lambda: _TORCH_LEAVES)
    outputs_axis: int = 0
    convert: Callable[[str, np.ndarray], np.ndarray] = _from_torch
    resizes_positions: bool = False

    def find(self, path: str) -> "TensorPart | None":
        """Returns where the file holds the variable of ours at `path`, or None."""
        leaf = f"(?:/({'|'.join(self.leaves)}))?"
        for our_start, their_start, ends in self.tables:
            for our_end, their_end in ends.items():
                match = re.fullmatch(pattern(our_start + our_end) + leaf, path)
                if not match:
                    continue
                *stars, our_leaf = match.groups()
                starred = (their_start + their_end).replace("*", "{}")
                name, _, part = starred.format(*stars).partition("[")
                return TensorPart(name + self.leaves.get(our_leaf, ""), part.removesuffix("]"))
        return None

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor of the file takes no part in classification."""
        return any(re.fullmatch(pattern(ignored), name) for ignored in self.ignored)


class TensorPart(NamedTuple):
    """The place of a variable in a file.

    Attributes:
      name: The name of the tensor.
      part: "query", "key" or "value" of a tensor that stacks them, or "" for the whole tensor.
    """

    name: str
    part: str


def pattern(starred: str) -> str:
    """Returns the regular expression of a name, in which a star stands for one number or word."""
    return re.escape(starred).replace(r"\*", "([^_/.]+)")


_HUGGING_FACE_BLOCK = {
    "norm_0": "layernorm_before",
    "norm_1": "layernorm_after",
    "attention/out": "attention.output.dense",
    "mlp_0": "intermediate.dense",
    "mlp_1": "output.dense",
}
_TIMM_BLOCK = {
    "norm_0": "norm1",
    "norm_1": "norm2",
    "attention/out": "attn.proj",
    "attention/*": "attn.qkv[*]",
    "mlp_0": "mlp.fc1",
    "mlp_1": "mlp.fc2",
}
_WIDE_BLOCK = {
    "conv_0": "conv1",
    "conv_1": "conv2",
    "conv_2": "conv3",
    "conv_0_norm": "bn1",
    "conv_1_norm": "bn2",
    "conv_2_norm": "bn3",
    "shortcut": "downsample.0",
    "shortcut_norm": "downsample.1",
}
_RESNET_BLOCK = {"conv_0": "conv1", "norm_0": "bn1", "conv_1": "conv2", "norm_1": "bn2"}


def _hugging_face_vit(model: str, signature: str, **heads: str) -> Naming:
    tokens = {"class_token": "cls_token", "distillation_token": "distillation_token"}
    return Naming(
        signature,
        (
            ("", f"{model}.embeddings.", tokens | {"positions": "position_embeddings"}),
            ("embed", f"{model}.embeddings.patch_embeddings.projection", {"": ""}),
            (
                "block_*/",
                f"{model}.encoder.layer.*.",
                _HUGGING_FACE_BLOCK | {"attention/*": "attention.attention.*"},
            ),
            ("", "", {"norm": f"{model}.layernorm", **heads}),
        ),
        ignored=(f"{model}.pooler.dense.weight", f"{model}.pooler.dense.bias"),
        attributes=_PRE_NORM,
    )


def _dinov2(prefix: str) -> Naming:
    """Returns transformers' naming of DINOv2: Dinov2Model has no prefix and no head."""
    embeddings = f"{prefix}embeddings."
    tokens = {"class_token": "cls_token", "positions": "position_embeddings"}
    tokens["embed"] = "patch_embeddings.projection"
    layer = f"{prefix}encoder.layer.*."
    block = {"norm_0": "norm1", "norm_1": "norm2"}
    block |= {"mlp_0": "mlp.fc1", "mlp_1": "mlp.fc2"}
    block["attention/out"] = "attention.output.dense"
    block["attention/*"] = "attention.attention.*"
    block["layer_scale_0"] = "layer_scale1.lambda1"
    block["layer_scale_1"] = "layer_scale2.lambda1"
    end = {"norm": f"{prefix}layernorm", "head": "classifier"}
    tables = (("", embeddings, tokens), ("block_*/", layer, block), ("", "", end))
    return Naming(
        f"{prefix}encoder.layer.0.layer_scale1.lambda1",
        tables,
        ignored=(f"{embeddings}mask_token",),  # of the training
        attributes=_PRE_NORM_1E6,
        resizes_positions=True,
    )


def _squeezenet(version: str, places: tuple[int, ...]) -> Naming:
    """Returns torchvision's naming, in which fire module k is at `places[k - 2]` of a sequence."""
    layers = {"squeeze": "squeeze", "expand_1": "expand1x1", "expand_3": "expand3x3"}
    fires = [(f"fire_{k}_", f"features.{place}.", layers) for k, place in enumerate(places, 2)]
    return Naming(
        f"features.{places[2]}.squeeze.weight",
        (("", "", {"conv": "features.0", "head": "classifier.1"}), *fires),
        attributes={"version": version},
        convert=_from_convolution,
    )


def _gpt2(prefix: str) -> Naming:
    """Returns the naming of GPT-2, whose dense layers are (inputs, outputs) as ours are."""
    block = {"norm_0": "ln_1", "norm_1": "ln_2", "mlp_0": "mlp.c_fc", "mlp_1": "mlp.c_proj"}
    block |= {"attention/out": "attn.c_proj", "attention/*": "attn.c_attn[*]"}
    return Naming(
        f"{prefix}h.0.attn.c_attn.weight",
        (
            ("", prefix, {"embed": "wte", "positions": "wpe.weight", "norm": "ln_f"}),
            ("block_*/", f"{prefix}h.*.", block),
        ),
        ignored=(f"{prefix}h.*.attn.bias", f"{prefix}h.*.attn.masked_bias"),  # the causal mask
        attributes={"form": "gpt2", "tied": True},
        leaves=_LANGUAGE_LEAVES,
        convert=_as_it_is,
        outputs_axis=-1,
    )


# "auto" takes the first naming whose signature is in the file.
NAMINGS: Mapping[str, Naming] = {
    # "hf" is transformers. hf_deit lacks the teacher's head: ViT(distilled=True,
    # distilled_head=False).
    "hf_vit": _hugging_face_vit("vit", "vit.embeddings.cls_token", head="classifier"),
    "hf_deit_teacher": _hugging_face_vit(
        "deit",
        "distillation_classifier.weight",
        head="cls_classifier",
        head_distilled="distillation_classifier",
    ),
    "hf_deit": _hugging_face_vit("deit", "deit.embeddings.cls_token", head="classifier"),
    "hf_dinov2": _dinov2("dinov2."),  # Dinov2ForImageClassification
    "hf_dinov2_backbone": _dinov2(""),  # Dinov2Model, which needs new_head=True
    "hf_convnext": Naming(  # ConvNextForImageClassification
        "convnext.embeddings.patch_embeddings.weight",
        (
            ("stem", "convnext.embeddings.", {"": "patch_embeddings", "_norm": "layernorm"}),
            (
                "stage_*_downsample",
                "convnext.encoder.stages.*.downsampling_layer.",
                {"_norm": "0", "": "1"},
            ),
            (
                "stage_*_block_*/",
                "convnext.encoder.stages.*.layers.*.",
                {"conv": "dwconv", "norm": "layernorm"},
            ),
            (
                "stage_*_block_*/mlp_",
                "convnext.encoder.stages.*.layers.*.pwconv",
                {"0": "1", "1": "2"},
            ),
            (
                "stage_*_block_*/layer_scale",
                "convnext.encoder.stages.*.layers.*.layer_scale_parameter",
                {"": ""},
            ),
            ("", "", {"norm": "convnext.layernorm", "head": "classifier"}),
        ),
    ),
    "hf_swin": Naming(  # SwinForImageClassification; old files hold buffers
        "swin.embeddings.patch_embeddings.projection.weight",
        (
            ("embed", "swin.embeddings.", {"": "patch_embeddings.projection", "_norm": "norm"}),
            (
                "stage_*_block_*/attention/position_bias",
                f"{_SELF}.relative_position_bias_table",
                {"": ""},
            ),
            ("stage_*_block_*/", "swin.encoder.layers.*.blocks.*.", _HUGGING_FACE_BLOCK),
            ("stage_*_block_*/attention/*", f"{_SELF}.*", {"": ""}),
            # The file counts a merging of patches to the stage before it, our model to the stage
            # after it.
            ("stage_1_merge/*", "swin.encoder.layers.0.downsample.*", {"": ""}),
            ("stage_2_merge/*", "swin.encoder.layers.1.downsample.*", {"": ""}),
            ("stage_3_merge/*", "swin.encoder.layers.2.downsample.*", {"": ""}),
            ("", "", {"norm": "swin.layernorm", "head": "classifier"}),
        ),
        ignored=(f"{_SELF}.relative_position_index",),
    ),
    "timm_vit": Naming(  # timm's vit_*, deit_* and deit_*_distilled
        "blocks.0.attn.qkv.weight",
        (
            (
                "",
                "",
                {
                    "class_token": "cls_token",
                    "distillation_token": "dist_token",
                    "positions": "pos_embed",
                },
            ),
            (
                "",
                "",
                {
                    "embed": "patch_embed.proj",
                    "norm": "norm",
                    "head": "head",
                    "head_distilled": "head_dist",
                },
            ),
            ("block_*/", "blocks.*.", _TIMM_BLOCK),
        ),
        attributes=_PRE_NORM_1E6,
    ),
    "timm_convnext": Naming(  # timm's convnext_*
        "stages.0.blocks.0.conv_dw.weight",
        (
            (
                "",
                "",
                {"stem": "stem.0", "stem_norm": "stem.1", "norm": "head.norm", "head": "head.fc"},
            ),
            ("stage_*_downsample", "stages.*.downsample.", {"_norm": "0", "": "1"}),
            (
                "stage_*_block_*/",
                "stages.*.blocks.*.",
                {"conv": "conv_dw", "norm": "norm", "layer_scale": "gamma"},
            ),
            ("stage_*_block_*/mlp_", "stages.*.blocks.*.mlp.", {"0": "fc1", "1": "fc2"}),
        ),
    ),
    "timm_swin": Naming(  # timm's swin_* since 0.9; old files hold buffers
        "layers.0.blocks.0.attn.relative_position_bias_table",
        (
            ("embed", "patch_embed.", {"": "proj", "_norm": "norm"}),
            ("stage_*_merge/*", "layers.*.downsample.*", {"": ""}),
            (
                "stage_*_block_*/attention/",
                "layers.*.blocks.*.attn.",
                {"position_bias": "relative_position_bias_table"},
            ),
            ("stage_*_block_*/", "layers.*.blocks.*.", _TIMM_BLOCK),
            ("", "", {"norm": "norm", "head": "head.fc"}),
        ),
        ignored=("layers.*.blocks.*.attn_mask", "layers.*.blocks.*.attn.relative_position_index"),
        attributes={"norm_epsilon": 1e-5},
    ),
    "augreg": Naming(  # google-research/vision_transformer (Steiner et al. 2022, arXiv:2106.10270)
        QUERY,
        (
            (
                "",
                "",
                {
                    "class_token": "cls",
                    "positions": POSITIONS,
                    "embed": "embedding",
                    "head": "head",
                },
            ),
            ("block_*/norm_", "Transformer/encoderblock_*/LayerNorm_", {"0": "0", "1": "2"}),
            (
                "block_*/attention/*",
                "Transformer/encoderblock_*/MultiHeadDotProductAttention_1/*",
                {"": ""},
            ),
            ("block_*/mlp_*", "Transformer/encoderblock_*/MlpBlock_3/Dense_*", {"": ""}),
            ("norm", "Transformer/encoder_norm", {"": ""}),
        ),
        attributes=_PRE_NORM_1E6,
        leaves={"kernel": "/kernel", "bias": "/bias", "scale": "/scale"},
        convert=_from_flax,
    ),
    "torch_encoder": Naming(  # a ViT around PyTorch's nn.TransformerEncoder
        "transformer.layers.0.self_attn.in_proj_weight",
        (
            (
                "",
                "",
                {"class_token": "cls_token", "positions": "pos_embed", "embed": "patch_embed.proj"},
            ),
            ("block_*/attention/out", "transformer.layers.*.self_attn.out_proj", {"": ""}),
            (
                "block_*/attention/*/",
                "transformer.layers.*.self_attn.in_proj_",
                {"kernel": "weight[*]", "bias": "bias[*]"},
            ),
            ("block_*/norm_", "transformer.layers.*.norm", {"0": "1", "1": "2"}),
            ("block_*/mlp_", "transformer.layers.*.linear", {"0": "1", "1": "2"}),
            ("", "", {"norm": "mlp_head.0", "head": "mlp_head.1"}),
        ),
    ),
    "cifar_resnet": Naming(  # akamaster/pytorch_resnet_cifar10, of any depth
        "linear.weight",
        (
            ("", "", {"conv": "conv1", "norm": "bn1", "head": "linear"}),
            # Stages are counted from 1 in the file.
            ("stage_0_block_*_", "layer1.*.", _RESNET_BLOCK),
            ("stage_1_block_*_", "layer2.*.", _RESNET_BLOCK),
            ("stage_2_block_*_", "layer3.*.", _RESNET_BLOCK),
        ),
        ignored=("bn1.num_batches_tracked", "layer*.*.bn*.num_batches_tracked"),
        attributes={"norm": "frozen_batch", "shortcut": "pad"},
        leaves=_BATCH_NORM_LEAVES,
    ),
    "resnet": Naming(  # torchvision's and timm's resnet18, 34, 50 and 101
        "layer4.0.conv1.weight",
        (
            ("", "", {"conv": "conv1", "conv_norm": "bn1", "head": "fc"}),
            # Stages are counted from 1 in the file, and so are the convolutions of a block.
            ("stage_0_block_*_", "layer1.*.", _WIDE_BLOCK),
            ("stage_1_block_*_", "layer2.*.", _WIDE_BLOCK),
            ("stage_2_block_*_", "layer3.*.", _WIDE_BLOCK),
            ("stage_3_block_*_", "layer4.*.", _WIDE_BLOCK),
        ),
        ignored=(
            "bn1.num_batches_tracked",
            "layer*.*.bn*.num_batches_tracked",
            "layer*.*.downsample.1.num_batches_tracked",
        ),
        attributes={"norm": "frozen_batch"},
        leaves=_BATCH_NORM_LEAVES,
    ),
    "efficientnet_lite": Naming(  # timm's (tf_)efficientnet_lite*
        "blocks.6.0.conv_pwl.weight",
        (
            (
                "",
                "",
                {
                    "conv": "conv_stem",
                    "conv_norm": "bn1",
                    "conv_last": "conv_head",
                    "conv_last_norm": "bn2",
                },
            ),
            ("head", "classifier", {"": ""}),
            ("stage_0_block_0_", "blocks.0.0.", {"depthwise": "conv_dw", "project": "conv_pw"}),
            ("stage_0_block_0_", "blocks.0.0.", {"depthwise_norm": "bn1", "project_norm": "bn2"}),
            (
                "stage_*_block_*_",
                "blocks.*.*.",
                {"expand": "conv_pw", "depthwise": "conv_dw", "project": "conv_pwl"},
            ),
            (
                "stage_*_block_*_",
                "blocks.*.*.",
                {"expand_norm": "bn1", "depthwise_norm": "bn2", "project_norm": "bn3"},
            ),
        ),
        ignored=("bn*.num_batches_tracked", "blocks.*.*.bn*.num_batches_tracked"),
        attributes={"norm": "frozen_batch"},
        leaves=_BATCH_NORM_LEAVES,
    ),
    "hf_gpt2": _gpt2("transformer."),  # GPT2LMHeadModel
    "gpt2": _gpt2(""),  # the first file of its publisher has no prefix
    "hf_llama": Naming(  # LlamaForCausalLM
        "model.layers.0.self_attn.q_proj.weight",
        (
            ("", "", {"embed": "model.embed_tokens", "norm": "model.norm", "unembed": "lm_head"}),
            (
                "block_*/",
                "model.layers.*.",
                {"norm_0": "input_layernorm", "norm_1": "post_attention_layernorm"},
            ),
            (
                "block_*/attention/",
                "model.layers.*.self_attn.",
                {"query": "q_proj", "key": "k_proj", "value": "v_proj"},
            ),
            ("block_*/attention/out", "model.layers.*.self_attn.o_proj", {"": ""}),
            (
                "block_*/mlp_",
                "model.layers.*.mlp.",
                {"0": "up_proj", "gate": "gate_proj", "1": "down_proj"},
            ),
        ),
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
        attributes={"form": "llama"},
        leaves=_LANGUAGE_LEAVES,
    ),
    "squeezenet1_0": _squeezenet("1.0", (3, 4, 5, 7, 8, 9, 10, 12)),
    "squeezenet1_1": _squeezenet("1.1", (3, 4, 6, 7, 9, 10, 11, 12)),
    # forresti/SqueezeNet and songhan/SqueezeNet-Deep-Compression, as arrays
    "caffe_squeezenet": Naming(
        "fire2/squeeze1x1/weight",
        (
            ("", "", {"conv": "conv1", "head": "conv10"}),
            (
                "fire_*_",
                "fire*/",
                {"squeeze": "squeeze1x1", "expand_1": "expand1x1", "expand_3": "expand3x3"},
            ),
        ),
        attributes={"version": "1.0", "head_padding": 1},
        leaves={"kernel": "/weight", "bias": "/bias"},
        convert=_from_caffe,
    ),
}
