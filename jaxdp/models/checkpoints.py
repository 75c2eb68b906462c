"""Public checkpoints of image and language models, read under the names of their publishers.

Each naming is a row of `NAMINGS`, a table from our modules to the names in the file. The table is
complete: a tensor that is missing, superfluous or of another shape is an error.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.files import Limits, check_finite, read_json, read_npz, shown, shown_lines
from jaxdp.models.language import LanguageModel
from jaxdp.models.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocessing,
    from_hugging_face,
    from_timm,
)
from jaxdp.models.pretrained import load_tensors

_REMEDY = "Get it from its publisher again."
_PRE_NORM: Mapping[str, Any] = {"norm_order": "pre"}
_PRE_NORM_1E6: Mapping[str, Any] = {**_PRE_NORM, "norm_epsilon": 1e-6}
_QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
_SELF = "swin.encoder.layers.*.blocks.*.attention.self"
_POSITIONS = "Transformer/posembed_input/pos_embedding"
_TORCH_LEAVES = {"kernel": ".weight", "bias": ".bias", "scale": ".weight"}
_BATCH_NORM_LEAVES = {**_TORCH_LEAVES, "mean": ".running_mean", "var": ".running_var"}
_LANGUAGE_LEAVES = {**_TORCH_LEAVES, "embedding": ".weight"}
HEADS = ("head", "head_distilled")  # the modules that end in the classes
Names = Mapping[str, str]
Tables = tuple[tuple[str, str, Names], ...]
Tensors = Mapping[str, np.ndarray]


def _from_torch(path: str, array: np.ndarray) -> np.ndarray:
    """Moves PyTorch's axes (out, in, *spatial) to ours, (*spatial, in, out)."""
    return np.moveaxis(array, (0, 1), (-1, -2)) if path.endswith("/kernel") else array


def _from_convolution(path: str, array: np.ndarray) -> np.ndarray:
    """Converts as `_from_torch`. The head, a 1x1 convolution in the file, is a matrix."""
    return array[:, :, 0, 0].T if path == "head/kernel" else _from_torch(path, array)


def _from_caffe(path: str, array: np.ndarray) -> np.ndarray:
    """Converts as `_from_convolution`. The first convolution of the file takes blue, green and red
    in this order.
    """
    return _from_convolution(path, array[:, ::-1] if path == "conv/kernel" else array)


def _as_it_is(path: str, array: np.ndarray) -> np.ndarray:
    return array


def _from_flax(path: str, array: np.ndarray) -> np.ndarray:
    """Merges the axis of heads in attention, (D, heads, D / heads). Otherwise the original Flax
    files are like ours.
    """
    if path.endswith("attention/out/kernel"):
        return array.reshape(-1, array.shape[-1])
    if re.search("attention/(query|key|value)/", path):
        return array.reshape(len(array), -1) if path.endswith("/kernel") else array.ravel()
    return array


@dataclasses.dataclass(frozen=True)
class Naming:
    """A publisher's names of tensors.

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
    """

    signature: str
    tables: Tables
    ignored: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    leaves: Names = dataclasses.field(default_factory=lambda: _TORCH_LEAVES)
    outputs_axis: int = 0
    convert: Callable[[str, np.ndarray], np.ndarray] = _from_torch

    def find(self, path: str) -> tuple[str, str] | None:
        """Returns the name of our variable in the file, and the part of that tensor ("" for the
        whole tensor).
        """
        leaf = f"(?:/({'|'.join(self.leaves)}))?"
        for ours, theirs, names in self.tables:
            for end, their_end in names.items():
                if match := re.fullmatch(_pattern(ours + end) + leaf, path):
                    *stars, found = match.groups()
                    name, _, part = (
                        (theirs + their_end).replace("*", "{}").format(*stars).partition("[")
                    )
                    return name + self.leaves.get(found, ""), part.removesuffix("]")
        return None


def _pattern(starred: str) -> str:
    return re.escape(starred).replace(r"\*", "([^_/.]+)")


_HUGGING_FACE_BLOCK = {
    **{
        "norm_0": "layernorm_before",
        "norm_1": "layernorm_after",
        "attention/out": "attention.output.dense",
    },
    **{"mlp_0": "intermediate.dense", "mlp_1": "output.dense"},
}
_TIMM_BLOCK = {
    **{
        "norm_0": "norm1",
        "norm_1": "norm2",
        "attention/out": "attn.proj",
        "attention/*": "attn.qkv[*]",
    },
    **{"mlp_0": "mlp.fc1", "mlp_1": "mlp.fc2"},
}
_WIDE_BLOCK = {f"conv_{k}": f"conv{k + 1}" for k in range(3)} | {
    f"conv_{k}_norm": f"bn{k + 1}" for k in range(3)
}
_WIDE_BLOCK |= {"shortcut": "downsample.0", "shortcut_norm": "downsample.1"}
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


def _squeezenet(version: str, places: tuple[int, ...]) -> Naming:
    """Returns torchvision's naming, in which fire module k is at `places[k - 2]` of a sequence."""
    parts = {"squeeze": "squeeze", "expand_1": "expand1x1", "expand_3": "expand3x3"}
    return Naming(
        f"features.{places[2]}.squeeze.weight",
        (
            ("", "", {"conv": "features.0", "head": "classifier.1"}),
            *((f"fire_{k}_", f"features.{place}.", parts) for k, place in enumerate(places, 2)),
        ),
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
            # A merging ends a stage in the file and begins the next stage in our model.
            *(
                (f"stage_{k + 1}_merge/*", f"swin.encoder.layers.{k}.downsample.*", {"": ""})
                for k in range(3)
            ),
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
        _QUERY,
        (
            (
                "",
                "",
                {
                    "class_token": "cls",
                    "positions": _POSITIONS,
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
            *((f"stage_{k}_block_*_", f"layer{k + 1}.*.", _RESNET_BLOCK) for k in range(3)),
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
            *((f"stage_{k}_block_*_", f"layer{k + 1}.*.", _WIDE_BLOCK) for k in range(4)),
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
    "hf_gpt2": _gpt2(
        "transformer."
    ),  # GPT2LMHeadModel; the first file of its publisher has no prefix
    "gpt2": _gpt2(""),
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
                {n: f"{n[0]}_proj" for n in ("query", "key", "value")},
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


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A public model. It takes images in [0, 1] and normalises them itself, or it takes tokens.

    Attributes:
      model: The Linen module. It sees normalised images only.
      params: Nested dicts of float32 arrays, all parameters that are trained or adapted.
      preprocessing: The preprocessing that the checkpoint expects, a `Preprocessing`. None for a
          language model.
      constants: The other collections by name, such as "batch_stats" with the mean and variance of
        every `FrozenBatchNorm`. They never change.
    """

    model: nn.Module
    params: Mapping[str, Any] = dataclasses.field(repr=False)
    preprocessing: Any
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def apply_fn(self, params: Mapping[str, Any], inputs: jax.Array) -> jax.Array:
        """Maps inputs to float32 logits.

        Args:
          params: Parameters with the structure of `self.params`.
          inputs: Images, floating point [B, S, S, C] in [0, 1] as `preprocessing.prepare` returns,
              or tokens [B, T].

        Returns:
          [B, num_classes], or for tokens [B, T, num_classes].
        """
        return self._applied({"params": params}, inputs)

    def _applied(self, variables: Mapping[str, Any], inputs: jax.Array) -> jax.Array:
        normalised = self.preprocessing.normalise(inputs) if self.preprocessing else inputs
        logits: Any = self.model.apply({**self.constants, **variables}, normalised)
        return logits


def blank_inputs(preprocessing: Preprocessing | None) -> jax.Array:
    """Returns the inputs of one record, zeros [1, ...], with which a model makes its parameters."""
    if preprocessing is None:
        return jnp.zeros((1, 1), jnp.int32)
    return jnp.zeros((1, preprocessing.size, preprocessing.size, len(preprocessing.mean)))


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    naming: str = "auto",
    preprocessing: Preprocessing | None = None,
    new_head: bool = False,
    limits: Limits | None = None,
) -> Pretrained:
    """Reads a public checkpoint into a model of this package.

    `Pretrained.params` and `Pretrained.constants` are exactly the tensors of the file, except for a
    new head.

    The file and its neighbours must agree with the model's attributes. No file states the
    activation. The namings of timm and PyTorch do not state the number of heads of a ViT either
    (published ViTs and DeiTs: width / 64).

    Args:
      path: A .safetensors or .npz file. Other formats hold pickles and are not read.
      model: The model, which fixes every name and shape, for example
        `create("vit_b16", num_classes=1000, norm_epsilon=1e-12)`.
      naming: A key of `NAMINGS`, or "auto" to recognise it from the names in the file.
      preprocessing: The normalisation and size of the checkpoint's training. None takes 0.5 for
        augreg files. For others it reads Hugging Face's preprocessor_config.json or timm's
        config.json beside the file. A language model has none.
      new_head: Whether the model has other classes than the file. Its head then starts at zero. The
          file's is not used.
      limits: The limit on the bytes of its arrays. The default is `Limits()`.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: The format or naming is unknown. Tensors are missing, superfluous or of another
        shape (the message lists all, and position embeddings are not interpolated). The model's
        attributes or the given normalisation contradict the files. No file states the
        normalisation. The file is damaged, exceeds a limit, or is not finite.
    """
    path = Path(path)
    tensors = _read(path, limits)
    try:
        naming = _recognise(naming, tensors)
        _check_attributes(naming, _read_json(path.with_name("config.json")), tensors, model)
        if not isinstance(model, LanguageModel):
            preprocessing = _choose(preprocessing, path, naming, tensors)
        elif preprocessing is not None:
            raise ValueError(
                f"preprocessing must be None for a language model, got {preprocessing}."
            )
        variables = _translate(naming, tensors, model, preprocessing, new_head)
    except ValueError as error:
        raise ValueError(f"{shown(path)}: {shown_lines(error)}") from error
    return Pretrained(model, variables.pop("params"), preprocessing, constants=variables)


def _read(path: Path, limits: Limits | None) -> Tensors:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {os.fspath(path)!r}.")
    if path.suffix == ".npz":
        tensors = read_npz(path, remedy=_REMEDY, limits=limits)
        check_finite(tensors, path, _REMEDY)
        return tensors
    if path.suffix == ".safetensors":
        return {
            name: np.asarray(x)
            for name, x in load_tensors(path, remedy=_REMEDY, limits=limits).items()
        }
    raise ValueError(
        f"path must end in .safetensors or .npz, got {path.name!r}. Convert other formats, which "
        "hold pickles."
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    return read_json(path, remedy=_REMEDY) if path.exists() else {}


def _recognise(naming: str, tensors: Tensors) -> str:
    if naming in NAMINGS:
        return naming
    if naming != "auto":
        raise ValueError(f"unknown naming {naming!r}. There are auto, {', '.join(NAMINGS)}.")
    for name, known in NAMINGS.items():
        if known.signature in tensors:
            return name
    some = ", ".join(sorted(tensors)[:5])
    raise ValueError(
        f"no naming of {', '.join(NAMINGS)} has names such as {some}. Give a checkpoint in one of "
        "them."
    )


def _check_attributes(
    naming: str, config: Mapping[str, Any], tensors: Tensors, model: nn.Module
) -> None:
    """Compares the naming, Hugging Face's config.json and the shapes with the attributes that the
    model has.
    """
    stated = dict(NAMINGS[naming].attributes)
    known = {"num_attention_heads": "num_heads", "layer_norm_eps": "norm_epsilon"}
    if isinstance(model, LanguageModel):
        known, model = _LANGUAGE_CONFIG, model.clone(kv_heads=model.kv_heads or model.num_heads)
        config = {**config, **_rotary(config)}
        stated["positions"] = min(
            model.positions, config.get("max_position_embeddings", model.positions)
        )
    stated |= {
        ours: config[theirs] for theirs, ours in known.items() if config.get(theirs) is not None
    }
    if naming == "augreg" and _QUERY in tensors and tensors[_QUERY].ndim == 3:
        stated["num_heads"] = tensors[_QUERY].shape[1]
    wrong = [
        f"{name}={value!r}, not {getattr(model, name)!r}"
        for name, value in stated.items()
        if getattr(model, name, value) != value
    ]
    if wrong:
        raise ValueError(f"the checkpoint needs a model with {'; '.join(wrong)}.")


_LANGUAGE_CONFIG = {  # config.json of GPT-2 and Llama
    **{
        "n_head": "num_heads",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "kv_heads",
    },
    **{
        "layer_norm_epsilon": "norm_epsilon",
        "rms_norm_eps": "norm_epsilon",
        "rope_theta": "rotary_base",
    },
    **{"vocab_size": "num_classes", "n_positions": "positions", "tie_word_embeddings": "tied"},
}
_ACTIVATIONS = {"activation_function": "gelu_new", "hidden_act": "silu"}


def _rotary(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the base of rotary positions. Raises ValueError for what `LanguageModel` does not
    compute.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    wrong = [
        f"{name}={config[name]!r}"
        for name, ours in _ACTIVATIONS.items()
        if config.get(name, ours) != ours
    ]
    if wrong or kind != "default":
        wrong += [f"rope_type={kind!r}"] * (kind != "default")
        raise ValueError(
            f"config.json has {', '.join(wrong)}, which LanguageModel does not compute. Take "
            "another one."
        )
    return {"rope_theta": rotary["rope_theta"]} if "rope_theta" in rotary else {}


def _stated_preprocessing(path: Path, naming: str, tensors: Tensors) -> Preprocessing | None:
    """Returns the preprocessing that the files state. Raises errors of several types for unusual
    statements.
    """
    if timm := _read_json(path.with_name("config.json")).get("pretrained_cfg"):
        return from_timm(timm)
    if hugging_face := _read_json(path.with_name("preprocessor_config.json")):
        return from_hugging_face(hugging_face)
    if naming == "augreg" and _POSITIONS in tensors and "embedding/kernel" in tensors:
        tokens = tensors[_POSITIONS].shape[1] - ("cls" in tensors)
        size = math.isqrt(tokens) * tensors["embedding/kernel"].shape[0]
        return Preprocessing(
            size=size, mean=(0.5,) * 3, std=(0.5,) * 3, resize=math.floor(size / 0.9)
        )
    return None


def _choose(
    given: Preprocessing | None, path: Path, naming: str, tensors: Tensors
) -> Preprocessing:
    """Returns the given preprocessing, if it does not contradict the checkpoint, or the stated
    one.
    """
    stated, reason = None, "no file says how this checkpoint normalises images"
    try:
        stated = _stated_preprocessing(path, naming, tensors)
    except Exception as error:
        reason = f"the files beside {path.name!r} cannot be used ({error})"
    chosen = given or stated
    if chosen is None:
        raise ValueError(
            f"preprocessing must be given, since {reason}. Most augreg ViTs (google/vit-*, timm's "
            "vit_*.augreg_*) need Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, "
            "0.5), resize=248). DeiT, Swin, ConvNeXt, ResNet and torchvision's SqueezeNet need "
            f"mean={IMAGENET_MEAN}, std={IMAGENET_STD}."
        )
    if stated and not np.allclose(
        [*chosen.mean, *chosen.std], [*stated.mean, *stated.std], atol=1e-3
    ):
        raise ValueError(
            f"preprocessing has mean={chosen.mean}, std={chosen.std}, but the checkpoint was "
            f"trained with mean={stated.mean}, std={stated.std}."
        )
    return chosen


def _by_layer(variables: Any) -> dict[tuple[str, ...], Any]:
    """Returns variables by path. Those of a stack of layers, "blocks", become those of layers
    "block_0", ...
    """
    found: dict[tuple[str, ...], Any] = {}
    for (collection, first, *keys), x in flatten_dict(variables).items():
        if first == "blocks":
            one = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            found |= {(collection, f"block_{k}", *keys): one for k in range(x.shape[0])}
        else:
            found[collection, first, *keys] = x
    return found


def _stacked(variables: Mapping[tuple[str, ...], np.ndarray]) -> dict[tuple[str, ...], np.ndarray]:
    """Returns the variables of `_by_layer` with the layers of a stack in one array."""
    found: dict[tuple[str, ...], Any] = {}
    for (collection, first, *keys), x in variables.items():  # layers are in order
        if first.startswith("block_"):
            found.setdefault((collection, "blocks", *keys), []).append(x)
        else:
            found[collection, first, *keys] = x
    return {path: np.stack(x) if isinstance(x, list) else x for path, x in found.items()}


def _translate(
    naming: str,
    tensors: Tensors,
    model: nn.Module,
    preprocessing: Preprocessing | None,
    new_head: bool,
) -> dict[str, Any]:
    """Returns our collections from the tensors of a file. A ValueError lists everything that does
    not fit.
    """
    variables = jax.eval_shape(model.init, jax.random.key(0), blank_inputs(preprocessing))
    stack = isinstance(model, LanguageModel)
    expected_of = _by_layer(variables) if stack else flatten_dict(variables)
    rules, used, problems = NAMINGS[naming], set[str](), list[str]()
    translated: dict[tuple[str, ...], np.ndarray] = {}
    for (collection, *keys), expected in expected_of.items():
        path = "/".join(keys)
        if (found := rules.find(path)) is None:
            problems.append(f"{path} of the model: not in the naming {naming!r}")
            continue
        name, part = found
        used.add(name)
        if new_head and keys[0] in HEADS:
            translated[collection, *keys] = np.zeros(expected.shape, np.float32)
            continue
        if (given := tensors.get(name)) is None:
            problems.append(f"{name}: missing, for {path} {expected.shape}")
            continue
        try:
            stacked = _part(given, part, rules.outputs_axis) if part else given
            array = rules.convert(path, stacked)
        except (ValueError, IndexError, TypeError):  # The number of axes does not fit.
            array = None
        if array is None or array.shape != expected.shape:
            problems.append(f"{name}: shape {given.shape} does not fit {path} {expected.shape}")
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            problems.append(f"{name}: dtype {array.dtype} is not floating point")
        else:
            translated[collection, *keys] = np.asarray(array, np.float32)
    for name in sorted(set(tensors) - used):
        if not any(re.fullmatch(_pattern(ignored), name) for ignored in rules.ignored):
            problems.append(f"{name}: superfluous, shape {tensors[name].shape}")
    if problems:
        size = f" at {preprocessing.size}x{preprocessing.size}" if preprocessing else ""
        remedy = (
            " at its image size"
            if preprocessing
            else ", with its vocabulary and number of positions"
        )
        raise ValueError(
            f"the checkpoint (naming {naming!r}) does not fit the model{size}. Build the "
            f"checkpoint's model{remedy}"
            " (position embeddings are not interpolated):\n  " + "\n  ".join(problems)
        )
    return jax.device_put(unflatten_dict(_stacked(translated) if stack else translated))


def _part(stacked: np.ndarray, part: str, axis: int) -> np.ndarray:
    return np.split(stacked, 3, axis)[("query", "key", "value").index(part)]
