"""Public checkpoints of ViTs, DeiTs, Swins, ConvNeXts and CIFAR ResNets under the names that their publishers gave the
tensors.

Each naming is a table of rules (`NAMINGS`) from paths of our variables (parameters and constants) to names in the
file. The table is complete: a tensor that is missing, superfluous or of another shape is an error, never skipped.
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

from jaxdp.files import Limits, check_finite, read_json, read_npz
from jaxdp.models.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocessing,
    from_hugging_face,
    from_timm,
)
from jaxdp.models.pretrained import load_tensors

_REMEDY = "Get it from its publisher again."
Tensors = Mapping[str, np.ndarray]
# For each leaf of a module of ours: how its name ends in the file, and how the array there becomes ours.
Leaves = Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]
# A module (or, with `_SAME`, a parameter) of ours as a regular expression, its name in the file, its leaves.
Rules = tuple[tuple[str, str, Leaves], ...]


@dataclasses.dataclass(frozen=True)
class Naming:
    """How a publisher names tensors.

    Attributes:
      signature: a tensor that only this naming has.
      rules: every parameter is found by exactly one of them.
      ignored: regular expressions of tensors that may be in the file and take no part in classification.
      attributes: what the naming says about the model's attributes.
    """

    signature: str
    rules: Rules
    ignored: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _third(k: int) -> Callable[[np.ndarray], np.ndarray]:
    """Query, key and value (k = 0, 1, 2) are stacked along the first axis, that of the outputs."""
    return lambda array: np.split(array, 3)[k].T


def _same(array: np.ndarray) -> np.ndarray:
    return array


_SAME: Leaves = {"": ("", _same)}
# PyTorch keeps (out, in) and OIHW, a depthwise kernel as (C, 1, H, W); a norm's scale is its "weight".
_NORM: Leaves = {"/scale": (".weight", _same), "/bias": (".bias", _same)}
_BATCH_NORM: Leaves = {**_NORM, "/mean": (".running_mean", _same), "/var": (".running_var", _same)}
_DENSE: Leaves = {"/kernel": (".weight", np.transpose), "/bias": (".bias", _same)}
_CONV: Leaves = {"/kernel": (".weight", lambda w: np.transpose(w, (2, 3, 1, 0))), "/bias": (".bias", _same)}
_QKV: tuple[Leaves, ...] = tuple({"/kernel": (".weight", _third(k)), "/bias": (".bias", _third(k))} for k in range(3))
_IN: tuple[Leaves, ...] = tuple({"/kernel": ("_weight", _third(k)), "/bias": ("_bias", _third(k))} for k in range(3))
# The original Flax files are laid out like ours, but for the axis of heads in attention: (D, heads, D / heads).
_FLAX_NORM: Leaves = {"/scale": ("/scale", _same), "/bias": ("/bias", _same)}
_FLAX: Leaves = {"/kernel": ("/kernel", _same), "/bias": ("/bias", _same)}
_FLAX_IN: Leaves = {"/kernel": ("/kernel", lambda w: w.reshape(len(w), -1)), "/bias": ("/bias", np.ravel)}
_FLAX_OUT: Leaves = {"/kernel": ("/kernel", lambda w: w.reshape(-1, w.shape[-1])), "/bias": ("/bias", _same)}


def _hugging_face_vit(prefix: str, *heads: str) -> Rules:
    layer = prefix + r".encoder.layer.\1."
    return (
        ("class_token", f"{prefix}.embeddings.cls_token", _SAME),
        ("distillation_token", f"{prefix}.embeddings.distillation_token", _SAME),
        ("positions", f"{prefix}.embeddings.position_embeddings", _SAME),
        ("embed", f"{prefix}.embeddings.patch_embeddings.projection", _CONV),
        (r"block_(\d+)/norm_0", layer + "layernorm_before", _NORM),
        (r"block_(\d+)/attention/(query|key|value)", layer + r"attention.attention.\2", _DENSE),
        (r"block_(\d+)/attention/out", layer + "attention.output.dense", _DENSE),
        (r"block_(\d+)/norm_1", layer + "layernorm_after", _NORM),
        (r"block_(\d+)/mlp_0", layer + "intermediate.dense", _DENSE),
        (r"block_(\d+)/mlp_1", layer + "output.dense", _DENSE),
        ("norm", f"{prefix}.layernorm", _NORM),
        *((ours, theirs, _DENSE) for ours, theirs in zip(("head", "head_distilled"), heads, strict=False)),
    )


_HUGGING_FACE_CONVNEXT: Rules = (
    ("stem", "convnext.embeddings.patch_embeddings", _CONV),
    ("stem_norm", "convnext.embeddings.layernorm", _NORM),
    (r"stage_(\d+)_downsample_norm", r"convnext.encoder.stages.\1.downsampling_layer.0", _NORM),
    (r"stage_(\d+)_downsample", r"convnext.encoder.stages.\1.downsampling_layer.1", _CONV),
    (r"stage_(\d+)_block_(\d+)/conv", r"convnext.encoder.stages.\1.layers.\2.dwconv", _CONV),
    (r"stage_(\d+)_block_(\d+)/norm", r"convnext.encoder.stages.\1.layers.\2.layernorm", _NORM),
    (r"stage_(\d+)_block_(\d+)/mlp_0", r"convnext.encoder.stages.\1.layers.\2.pwconv1", _DENSE),
    (r"stage_(\d+)_block_(\d+)/mlp_1", r"convnext.encoder.stages.\1.layers.\2.pwconv2", _DENSE),
    (r"stage_(\d+)_block_(\d+)/layer_scale", r"convnext.encoder.stages.\1.layers.\2.layer_scale_parameter", _SAME),
    ("norm", "convnext.layernorm", _NORM),
    ("head", "classifier", _DENSE),
)

_SWIN_BLOCK = r"stage_(\d+)_block_(\d+)/"
_SWIN_LAYER = r"swin.encoder.layers.\1.blocks.\2."
_HUGGING_FACE_SWIN: Rules = (
    ("embed", "swin.embeddings.patch_embeddings.projection", _CONV),
    ("embed_norm", "swin.embeddings.norm", _NORM),
    (_SWIN_BLOCK + "norm_0", _SWIN_LAYER + "layernorm_before", _NORM),
    (_SWIN_BLOCK + "attention/(query|key|value)", _SWIN_LAYER + r"attention.self.\3", _DENSE),
    (_SWIN_BLOCK + "attention/position_bias", _SWIN_LAYER + "attention.self.relative_position_bias_table", _SAME),
    (_SWIN_BLOCK + "attention/out", _SWIN_LAYER + "attention.output.dense", _DENSE),
    (_SWIN_BLOCK + "norm_1", _SWIN_LAYER + "layernorm_after", _NORM),
    (_SWIN_BLOCK + "mlp_0", _SWIN_LAYER + "intermediate.dense", _DENSE),
    (_SWIN_BLOCK + "mlp_1", _SWIN_LAYER + "output.dense", _DENSE),
    *(
        (f"stage_{stage + 1}_merge/{part}", f"swin.encoder.layers.{stage}.downsample.{part}", leaves)
        for stage in range(3)  # a merging ends a stage in the file, and begins the next in ours
        for part, leaves in (("norm", _NORM), ("reduction", _DENSE))
    ),
    ("norm", "swin.layernorm", _NORM),
    ("head", "classifier", _DENSE),
)

_TIMM_VIT: Rules = (
    ("class_token", "cls_token", _SAME),
    ("distillation_token", "dist_token", _SAME),
    ("positions", "pos_embed", _SAME),
    ("embed", "patch_embed.proj", _CONV),
    (r"block_(\d+)/norm_0", r"blocks.\1.norm1", _NORM),
    (r"block_(\d+)/attention/query", r"blocks.\1.attn.qkv", _QKV[0]),
    (r"block_(\d+)/attention/key", r"blocks.\1.attn.qkv", _QKV[1]),
    (r"block_(\d+)/attention/value", r"blocks.\1.attn.qkv", _QKV[2]),
    (r"block_(\d+)/attention/out", r"blocks.\1.attn.proj", _DENSE),
    (r"block_(\d+)/norm_1", r"blocks.\1.norm2", _NORM),
    (r"block_(\d+)/mlp_0", r"blocks.\1.mlp.fc1", _DENSE),
    (r"block_(\d+)/mlp_1", r"blocks.\1.mlp.fc2", _DENSE),
    ("norm", "norm", _NORM),
    ("head", "head", _DENSE),
    ("head_distilled", "head_dist", _DENSE),
)

_TIMM_CONVNEXT: Rules = (
    ("stem", "stem.0", _CONV),
    ("stem_norm", "stem.1", _NORM),
    (r"stage_(\d+)_downsample_norm", r"stages.\1.downsample.0", _NORM),
    (r"stage_(\d+)_downsample", r"stages.\1.downsample.1", _CONV),
    (r"stage_(\d+)_block_(\d+)/conv", r"stages.\1.blocks.\2.conv_dw", _CONV),
    (r"stage_(\d+)_block_(\d+)/norm", r"stages.\1.blocks.\2.norm", _NORM),
    (r"stage_(\d+)_block_(\d+)/mlp_0", r"stages.\1.blocks.\2.mlp.fc1", _DENSE),
    (r"stage_(\d+)_block_(\d+)/mlp_1", r"stages.\1.blocks.\2.mlp.fc2", _DENSE),
    (r"stage_(\d+)_block_(\d+)/layer_scale", r"stages.\1.blocks.\2.gamma", _SAME),
    ("norm", "head.norm", _NORM),
    ("head", "head.fc", _DENSE),
)

_TIMM_SWIN: Rules = (
    ("embed", "patch_embed.proj", _CONV),
    ("embed_norm", "patch_embed.norm", _NORM),
    (r"stage_(\d+)_merge/norm", r"layers.\1.downsample.norm", _NORM),
    (r"stage_(\d+)_merge/reduction", r"layers.\1.downsample.reduction", _DENSE),
    (_SWIN_BLOCK + "norm_0", r"layers.\1.blocks.\2.norm1", _NORM),
    (_SWIN_BLOCK + "attention/query", r"layers.\1.blocks.\2.attn.qkv", _QKV[0]),
    (_SWIN_BLOCK + "attention/key", r"layers.\1.blocks.\2.attn.qkv", _QKV[1]),
    (_SWIN_BLOCK + "attention/value", r"layers.\1.blocks.\2.attn.qkv", _QKV[2]),
    (_SWIN_BLOCK + "attention/position_bias", r"layers.\1.blocks.\2.attn.relative_position_bias_table", _SAME),
    (_SWIN_BLOCK + "attention/out", r"layers.\1.blocks.\2.attn.proj", _DENSE),
    (_SWIN_BLOCK + "norm_1", r"layers.\1.blocks.\2.norm2", _NORM),
    (_SWIN_BLOCK + "mlp_0", r"layers.\1.blocks.\2.mlp.fc1", _DENSE),
    (_SWIN_BLOCK + "mlp_1", r"layers.\1.blocks.\2.mlp.fc2", _DENSE),
    ("norm", "norm", _NORM),
    ("head", "head.fc", _DENSE),
)

_QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
_POSITIONS = "Transformer/posembed_input/pos_embedding"
_AUGREG_BLOCK = r"Transformer/encoderblock_\1/"
_AUGREG: Rules = (
    ("class_token", "cls", _SAME),
    ("positions", _POSITIONS, _SAME),
    ("embed", "embedding", _FLAX),
    (r"block_(\d+)/norm_0", _AUGREG_BLOCK + "LayerNorm_0", _FLAX_NORM),
    (r"block_(\d+)/attention/(query|key|value)", _AUGREG_BLOCK + r"MultiHeadDotProductAttention_1/\2", _FLAX_IN),
    (r"block_(\d+)/attention/out", _AUGREG_BLOCK + "MultiHeadDotProductAttention_1/out", _FLAX_OUT),
    (r"block_(\d+)/norm_1", _AUGREG_BLOCK + "LayerNorm_2", _FLAX_NORM),
    (r"block_(\d+)/mlp_0", _AUGREG_BLOCK + "MlpBlock_3/Dense_0", _FLAX),
    (r"block_(\d+)/mlp_1", _AUGREG_BLOCK + "MlpBlock_3/Dense_1", _FLAX),
    ("norm", "Transformer/encoder_norm", _FLAX_NORM),
    ("head", "head", _FLAX),
)

_TORCH_ENCODER: Rules = (
    ("class_token", "cls_token", _SAME),
    ("positions", "pos_embed", _SAME),
    ("embed", "patch_embed.proj", _CONV),
    (r"block_(\d+)/attention/query", r"transformer.layers.\1.self_attn.in_proj", _IN[0]),
    (r"block_(\d+)/attention/key", r"transformer.layers.\1.self_attn.in_proj", _IN[1]),
    (r"block_(\d+)/attention/value", r"transformer.layers.\1.self_attn.in_proj", _IN[2]),
    (r"block_(\d+)/attention/out", r"transformer.layers.\1.self_attn.out_proj", _DENSE),
    (r"block_(\d+)/norm_0", r"transformer.layers.\1.norm1", _NORM),
    (r"block_(\d+)/mlp_0", r"transformer.layers.\1.linear1", _DENSE),
    (r"block_(\d+)/mlp_1", r"transformer.layers.\1.linear2", _DENSE),
    (r"block_(\d+)/norm_1", r"transformer.layers.\1.norm2", _NORM),
    ("norm", "mlp_head.0", _NORM),
    ("head", "mlp_head.1", _DENSE),
)

_CIFAR_RESNET: Rules = (
    ("conv", "conv1", _CONV),
    ("norm", "bn1", _BATCH_NORM),
    *(
        (rf"stage_{stage}_block_(\d+)_{ours}_{k}", rf"layer{stage + 1}.\1.{theirs}{k + 1}", leaves)
        for stage in range(3)  # counted from 1 in the file
        for k in range(2)
        for ours, theirs, leaves in (("conv", "conv", _CONV), ("norm", "bn", _BATCH_NORM))
    ),
    ("head", "linear", _DENSE),
)

_PRE_NORM: Mapping[str, Any] = {"norm_order": "pre"}
_PRE_NORM_1E6: Mapping[str, Any] = {**_PRE_NORM, "norm_epsilon": 1e-6}

# The first whose signature is in the file is what "auto" takes.
NAMINGS: Mapping[str, Naming] = {
    # transformers' ViTForImageClassification
    "hf_vit": Naming(
        "vit.embeddings.cls_token",
        _hugging_face_vit("vit", "classifier"),
        ignored=(r"vit\.pooler\.dense\.(weight|bias)",),
        attributes=_PRE_NORM,
    ),
    # DeiTForImageClassificationWithTeacher
    "hf_deit_teacher": Naming(
        "distillation_classifier.weight",
        _hugging_face_vit("deit", "cls_classifier", "distillation_classifier"),
        ignored=(r"deit\.pooler\.dense\.(weight|bias)",),
        attributes=_PRE_NORM,
    ),
    # DeiTForImageClassification: ViT(distilled=True, distilled_head=False)
    "hf_deit": Naming(
        "deit.embeddings.cls_token",
        _hugging_face_vit("deit", "classifier"),
        ignored=(r"deit\.pooler\.dense\.(weight|bias)",),
        attributes=_PRE_NORM,
    ),
    # ConvNextForImageClassification
    "hf_convnext": Naming("convnext.embeddings.patch_embeddings.weight", _HUGGING_FACE_CONVNEXT),
    # SwinForImageClassification; old files hold buffers
    "hf_swin": Naming(
        "swin.embeddings.patch_embeddings.projection.weight",
        _HUGGING_FACE_SWIN,
        ignored=(r"swin\.encoder\.layers\.\d+\.blocks\.\d+\.attention\.self\.relative_position_index",),
    ),
    # timm's vit_*, deit_* and deit_*_distilled
    "timm_vit": Naming("blocks.0.attn.qkv.weight", _TIMM_VIT, attributes=_PRE_NORM_1E6),
    # timm's convnext_*
    "timm_convnext": Naming("stages.0.blocks.0.conv_dw.weight", _TIMM_CONVNEXT),
    # timm's swin_* since 0.9; old files hold buffers
    "timm_swin": Naming(
        "layers.0.blocks.0.attn.relative_position_bias_table",
        _TIMM_SWIN,
        ignored=(r"layers\.\d+\.blocks\.\d+\.(attn_mask|attn\.relative_position_index)",),
        attributes={"norm_epsilon": 1e-5},
    ),
    # google-research/vision_transformer (Steiner et al. 2022, arXiv:2106.10270)
    "augreg": Naming(_QUERY, _AUGREG, attributes=_PRE_NORM_1E6),
    # a ViT around PyTorch's nn.TransformerEncoder
    "torch_encoder": Naming("transformer.layers.0.self_attn.in_proj_weight", _TORCH_ENCODER),
    # akamaster/pytorch_resnet_cifar10: ResNet(norm="frozen_batch", shortcut="pad") of any depth
    "cifar_resnet": Naming(
        "linear.weight",
        _CIFAR_RESNET,
        ignored=(r"(.+\.)?bn\d\.num_batches_tracked",),
        attributes={"norm": "frozen_batch", "shortcut": "pad"},
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A public model that takes images in [0, 1] and normalises them itself.

    Attributes:
      model: Linen module; sees normalised images only.
      params: its parameters, nested dicts of float32 arrays; all that is trained or adapted.
      preprocessing: what the checkpoint expects.
      constants: its other collections by name, such as "batch_stats" with the mean and variance of every
        `FrozenBatchNorm`; nothing changes them.
    """

    model: nn.Module
    params: Mapping[str, Any] = dataclasses.field(repr=False)
    preprocessing: Preprocessing
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def apply_fn(self, params: Mapping[str, Any], images: jax.Array) -> jax.Array:
        """Maps images [B, S, S, C] in [0, 1], as `preprocessing.prepare` makes them, to float32 logits
        [B, num_classes].

        Args:
          params: such as `self.params`, or a trained or adapted copy.
          images: floating point.
        """
        logits: Any = self.model.apply({**self.constants, "params": params}, self.preprocessing.normalise(images))
        return logits


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    naming: str = "auto",
    preprocessing: Preprocessing | None = None,
    limits: Limits | None = None,
) -> Pretrained:
    """Reads a public checkpoint into a model of this package.

    `Pretrained.params` and `Pretrained.constants` are exactly the tensors of the file. A new head for other classes
    comes afterwards: build that model, call `merge_pretrained(fresh, pretrained.params)`, and put both in with
    `dataclasses.replace(pretrained, model=..., params=...)`, which keeps constants and preprocessing.

    What the file or its neighbours say about the model is checked too. No file in the namings of timm and of
    PyTorch says how many heads attention has (published ViTs and DeiTs: width / 64; a Swin's position biases say it),
    nor which activation is used.

    Args:
      path: a .safetensors or .npz file. Other formats hold pickles and are not read.
      model: for example `create("vit_b16", num_classes=1000, norm_epsilon=1e-12)`; fixes every name and shape.
      naming: a key of `NAMINGS`, or "auto" to recognise it from the names in the file.
      preprocessing: normalisation and size the checkpoint was trained with. None takes what the file says: augreg
        files are normalised by 0.5, others have Hugging Face's preprocessor_config.json or timm's config.json beside
        them.
      limits: on the bytes of its arrays; `Limits()` by default.

    Returns:
      Model, parameters, preprocessing and constants.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if its format or naming is unknown; if tensors are missing, superfluous or of another shape (all are
        listed), images of another size than the position embeddings are for included (no interpolation); if the
        model's attributes or the given normalisation contradict what the file says; if nothing says what the
        normalisation is; if the file is damaged, exceeds a limit, or has a value that is NaN or infinite.
    """
    path = Path(path)
    tensors = _read(path, limits)
    try:
        naming = _recognise(naming, tensors)
        _check_attributes(naming, _read_json(path.with_name("config.json")), tensors, model)
        preprocessing = _choose(preprocessing, path, naming, tensors)
        variables = _translate(naming, tensors, model, preprocessing)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Pretrained(model, variables.pop("params"), preprocessing, constants=variables)


def _read(path: Path, limits: Limits | None) -> Tensors:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {os.fspath(path)!r}")
    if path.suffix == ".npz":
        tensors = read_npz(path, remedy=_REMEDY, limits=limits)
        check_finite(tensors, path, _REMEDY)
        return tensors
    if path.suffix == ".safetensors":
        return {name: np.asarray(x) for name, x in load_tensors(path, remedy=_REMEDY, limits=limits).items()}
    raise ValueError(
        f"path must end in .safetensors or .npz, got {path.name!r}; convert other formats, which are pickles"
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    return read_json(path, remedy=_REMEDY) if path.exists() else {}


def _recognise(naming: str, tensors: Tensors) -> str:
    if naming != "auto":
        if naming not in NAMINGS:
            raise ValueError(f"unknown naming {naming!r}; there are auto, {', '.join(NAMINGS)}")
        return naming
    for name, known in NAMINGS.items():
        if known.signature in tensors:
            return name
    some = ", ".join(sorted(tensors)[:5])
    raise ValueError(
        f"no naming of {', '.join(NAMINGS)} has names such as {some}; "
        "is it a ViT, DeiT, Swin, ConvNeXt or CIFAR ResNet?"
    )


def _check_attributes(naming: str, config: Mapping[str, Any], tensors: Tensors, model: nn.Module) -> None:
    """Compares what naming, Hugging Face's config.json and shapes say with the model, where it has the attribute."""
    stated = dict(NAMINGS[naming].attributes)
    for theirs, ours in (("num_attention_heads", "num_heads"), ("layer_norm_eps", "norm_epsilon")):
        if theirs in config:
            stated[ours] = config[theirs]
    if naming == "augreg" and _QUERY in tensors and tensors[_QUERY].ndim == 3:
        stated["num_heads"] = tensors[_QUERY].shape[1]
    wrong = [
        f"{name}={value!r}, not {getattr(model, name)!r}"
        for name, value in stated.items()
        if getattr(model, name, value) != value
    ]
    if wrong:
        raise ValueError(f"the checkpoint needs a model with {'; '.join(wrong)}")


def _stated_preprocessing(path: Path, naming: str, tensors: Tensors) -> Preprocessing | None:
    """What the files say; raises an error of some kind where they say something unusual."""
    timm = _read_json(path.with_name("config.json")).get("pretrained_cfg")
    hugging_face = _read_json(path.with_name("preprocessor_config.json"))
    if timm:
        return from_timm(timm)
    if hugging_face:
        return from_hugging_face(hugging_face)
    if naming == "augreg" and _POSITIONS in tensors and "embedding/kernel" in tensors:
        tokens = tensors[_POSITIONS].shape[1] - ("cls" in tensors)
        size = math.isqrt(tokens) * tensors["embedding/kernel"].shape[0]
        return Preprocessing(size=size, mean=(0.5,) * 3, std=(0.5,) * 3, resize=math.floor(size / 0.9))
    return None


def _choose(given: Preprocessing | None, path: Path, naming: str, tensors: Tensors) -> Preprocessing:
    """What the caller gives, as long as it does not contradict the checkpoint; else what the checkpoint states."""
    try:
        stated = _stated_preprocessing(path, naming, tensors)
    except Exception as error:
        if given is None:
            raise ValueError(f"preprocessing must be given, since what is beside {path.name!r} says {error}") from error
        stated = None
    if given is None and stated is None:
        raise ValueError(
            "preprocessing must be given, since no file says how this checkpoint normalises images. Common values: "
            "augreg ViTs (google/vit-*, timm's vit_*.augreg_*) have mean = std = (0.5, 0.5, 0.5); "
            f"DeiT, Swin, ConvNeXt and cifar_resnet have mean={IMAGENET_MEAN}, std={IMAGENET_STD}. "
            "For example preprocessing=Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), resize=248)"
        )
    if given is None or stated is None:
        return given or stated  # type: ignore[return-value]
    if not np.allclose([*given.mean, *given.std], [*stated.mean, *stated.std], atol=1e-3):
        raise ValueError(
            f"preprocessing has mean={given.mean}, std={given.std}, but the checkpoint was trained with "
            f"mean={stated.mean}, std={stated.std}"
        )
    return given


def _find(path: str, rules: Rules) -> tuple[str, Callable[[np.ndarray], np.ndarray]] | None:
    """The name in the file of our variable `path`, and the conversion of the array there."""
    for ours, theirs, leaves in rules:
        for leaf, (suffix, convert) in leaves.items():
            if match := re.fullmatch(ours + leaf, path):
                return match.expand(theirs) + suffix, convert
    return None


def _translate(naming: str, tensors: Tensors, model: nn.Module, preprocessing: Preprocessing) -> dict[str, Any]:
    """Our collections from the tensors of a file; a ValueError lists everything that does not fit."""
    images = jnp.zeros((1, preprocessing.size, preprocessing.size, len(preprocessing.mean)))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    translated: dict[tuple[str, ...], jax.Array] = {}
    problems: list[str] = []
    used: set[str] = set()
    for (collection, *keys), expected in flatten_dict(variables).items():
        path = "/".join(keys)
        found = _find(path, NAMINGS[naming].rules)
        if found is None:
            problems.append(f"{path} of the model: the naming {naming!r} has no such variable")
            continue
        name, convert = found
        used.add(name)
        if name not in tensors:
            problems.append(f"{name}: missing, for {path} {expected.shape}")
            continue
        array = _convert(convert, tensors[name])
        if array is None or array.shape != expected.shape:
            problems.append(f"{name}: shape {tensors[name].shape} does not fit {path} {expected.shape}")
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            problems.append(f"{name}: dtype {array.dtype} is not floating point")
        else:
            translated[collection, *keys] = jnp.asarray(array, jnp.float32)
    ignored = re.compile("|".join(NAMINGS[naming].ignored) or "(?!)")
    superfluous = sorted(name for name in tensors if name not in used and not ignored.fullmatch(name))
    problems += [f"{name}: superfluous, shape {tensors[name].shape}" for name in superfluous]
    if problems:
        raise ValueError(
            f"the checkpoint (naming {naming!r}) does not fit the model at {preprocessing.size}x{preprocessing.size}; "
            "build the model of the checkpoint, at its image size (position embeddings are not interpolated):\n  "
            + "\n  ".join(problems)
        )
    return unflatten_dict(translated)


def _convert(convert: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray | None:
    """None where the array has not even the number of axes that the conversion needs."""
    try:
        return convert(array)
    except ValueError:
        return None
