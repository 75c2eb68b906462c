"""Public checkpoints of image and language models, read under the names of their publishers.

`jaxdp.models.namings` has the names.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.files import Limits, check_finite, read_json, read_npz, shown, shown_lines
from jaxdp.models.language import LanguageModel
from jaxdp.models.namings import NAMINGS, POSITIONS, QUERY, TensorPart
from jaxdp.models.positions import resize_positions
from jaxdp.models.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocessing,
    Vectors,
    from_hugging_face,
    from_timm,
)
from jaxdp.models.pretrained import load_tensors

_REMEDY = "Get it from its publisher again."
HEADS = ("head", "head_distilled")  # the modules that end in the classes
Tensors = Mapping[str, np.ndarray]
Variables = dict[tuple[str, ...], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A public model. It takes images in [0, 1] and normalises them itself, or it takes tokens.

    Attributes:
      model: The Linen module. It sees normalised images only.
      params: Nested dicts of float32 arrays, all parameters that are trained or adapted.
      preprocessing: The preprocessing that the checkpoint expects, a `Preprocessing`. `Vectors` for
          a model of tables, None for a language model.
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
              vectors [B, d], or tokens [B, T].

        Returns:
          [B, num_classes], or for tokens [B, T, num_classes].
        """
        return self._applied({"params": params}, inputs)

    def _applied(self, variables: Mapping[str, Any], inputs: jax.Array) -> jax.Array:
        """Applies the model with variables besides or instead of the constants."""
        normalised = inputs
        if self.preprocessing:
            normalised = self.preprocessing.normalise(inputs)
        logits: Any = self.model.apply({**self.constants, **variables}, normalised)
        return logits


def blank_inputs(preprocessing: Preprocessing | Vectors | None) -> jax.Array:
    """Returns the inputs of one record, zeros [1, ...], with which a model makes its parameters."""
    if preprocessing is None:
        return jnp.zeros((1, 1), jnp.int32)
    if isinstance(preprocessing, Vectors):
        return jnp.zeros((1, preprocessing.width))
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
    new head, and for the positions of a DINOv2 at another image size (`resize_positions`).

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
        shape (the message lists all). Only the position embeddings of DINOv2 are interpolated, as
        its publisher does. The model's
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
    """Returns the tensors of a file by name."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {os.fspath(path)!r}.")
    if path.suffix == ".npz":
        tensors = read_npz(path, remedy=_REMEDY, limits=limits)
        check_finite(tensors, path, _REMEDY)
        return tensors
    if path.suffix == ".safetensors":
        loaded = load_tensors(path, remedy=_REMEDY, limits=limits)
        return {name: np.asarray(tensor) for name, tensor in loaded.items()}
    raise ValueError(
        f"path must end in .safetensors or .npz, got {path.name!r}. Convert other formats, which "
        "hold pickles."
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    return read_json(path, remedy=_REMEDY)


def _recognise(naming: str, tensors: Tensors) -> str:
    """Returns a key of `NAMINGS`: the given one, or for "auto" the one whose signature is there."""
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
    naming: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    model: nn.Module,
) -> None:
    """Raises ValueError if the model has other attributes than the checkpoint states.

    The naming states some, Hugging Face's config.json others, and shapes the number of heads.
    """
    stated = dict(NAMINGS[naming].attributes)
    attributes = {"num_attention_heads": "num_heads", "layer_norm_eps": "norm_epsilon"}
    if isinstance(model, LanguageModel):
        attributes = _LANGUAGE_CONFIG
        # The file states a number also where None stands for as many as heads.
        model = model.clone(kv_heads=model.kv_heads or model.num_heads)
        config = {**config, **_rotary(config)}
        # The model may have fewer rotary positions than the checkpoint was trained for.
        most = config.get("max_position_embeddings", model.positions)
        stated["positions"] = min(model.positions, most)
    for key, attribute in attributes.items():
        if config.get(key) is not None:
            stated[attribute] = config[key]
    if naming == "augreg" and QUERY in tensors and tensors[QUERY].ndim == 3:
        stated["num_heads"] = tensors[QUERY].shape[1]  # [D, heads, D / heads]
    wrong = [
        f"{name}={value!r}, not {getattr(model, name)!r}"
        for name, value in stated.items()
        if getattr(model, name, value) != value  # an attribute that the model lacks cannot differ
    ]
    if wrong:
        raise ValueError(f"the checkpoint needs a model with {'; '.join(wrong)}.")


# The keys of config.json of GPT-2 and Llama, and our attributes.
_LANGUAGE_CONFIG = {
    "n_head": "num_heads",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "kv_heads",
    "layer_norm_epsilon": "norm_epsilon",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "vocab_size": "num_classes",
    "n_positions": "positions",
    "tie_word_embeddings": "tied",
}
# What each form of `LanguageModel` computes. Files that state another activation are refused.
_ACTIVATIONS = {"activation_function": "gelu_new", "hidden_act": "silu"}


def _rotary(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the base of rotary positions, where config.json keeps it apart.

    Raises:
      ValueError: The config asks for what `LanguageModel` does not compute.
    """
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    unknown = [
        f"{name}={config[name]!r}"
        for name, activation in _ACTIVATIONS.items()
        if config.get(name, activation) != activation
    ]
    if kind != "default":
        unknown.append(f"rope_type={kind!r}")
    if unknown:
        raise ValueError(
            f"config.json has {', '.join(unknown)}, which LanguageModel does not compute. Take "
            "another one."
        )
    if "rope_theta" not in rotary:
        return {}
    return {"rope_theta": rotary["rope_theta"]}


def _stated_preprocessing(path: Path, naming: str, tensors: Tensors) -> Preprocessing | None:
    """Returns the preprocessing that the files state, or None.

    Files with unusual statements raise errors of several types.
    """
    if timm := _read_json(path.with_name("config.json")).get("pretrained_cfg"):
        return from_timm(timm)
    if hugging_face := _read_json(path.with_name("preprocessor_config.json")):
        return from_hugging_face(hugging_face)
    if naming == "augreg" and POSITIONS in tensors and "embedding/kernel" in tensors:
        patches = tensors[POSITIONS].shape[1] - ("cls" in tensors)  # "cls" has a position too
        patch_size = tensors["embedding/kernel"].shape[0]
        size = math.isqrt(patches) * patch_size
        # 0.5 and 0.5 take pixels in [0, 1] to [-1, 1].
        return Preprocessing(
            size=size, mean=(0.5,) * 3, std=(0.5,) * 3, resize=math.floor(size / 0.9)
        )
    return None


def _choose(
    given: Preprocessing | None,
    path: Path,
    naming: str,
    tensors: Tensors,
) -> Preprocessing:
    """Returns the given preprocessing, or else the one that the files state.

    Raises:
      ValueError: There is none, or the given one contradicts the files.
    """
    stated = None
    reason = "no file says how this checkpoint normalises images"
    try:
        stated = _stated_preprocessing(path, naming, tensors)
    except Exception as error:  # whatever is wrong with a file that is not ours
        reason = f"the files beside {path.name!r} cannot be used ({error})"
    preprocessing = given or stated
    if preprocessing is None:
        raise ValueError(
            f"preprocessing must be given, since {reason}. Most augreg ViTs (google/vit-*, timm's "
            "vit_*.augreg_*) need Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, "
            "0.5), resize=248). DeiT, Swin, ConvNeXt, ResNet and torchvision's SqueezeNet need "
            f"mean={IMAGENET_MEAN}, std={IMAGENET_STD}."
        )
    if stated is not None:
        given_constants = [*preprocessing.mean, *preprocessing.std]
        stated_constants = [*stated.mean, *stated.std]
        if not np.allclose(given_constants, stated_constants, atol=1e-3):
            raise ValueError(
                f"preprocessing has mean={preprocessing.mean}, std={preprocessing.std}, but the "
                f"checkpoint was trained with mean={stated.mean}, std={stated.std}."
            )
    return preprocessing


def _by_layer(variables: Any) -> Variables:
    """Returns variables by path, with the stack of layers "blocks" as "block_0", "block_1", ...

    Example: ("params", "blocks", "norm_0", "scale") of shape [12, 768] becomes
    ("params", "block_0", "norm_0", "scale"), ... of shape [768] each.
    """
    by_layer: Variables = {}
    for (collection, first, *keys), x in flatten_dict(variables).items():
        if first != "blocks":
            by_layer[collection, first, *keys] = x
            continue
        layer = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        for k in range(x.shape[0]):
            by_layer[collection, f"block_{k}", *keys] = layer
    return by_layer


def _stacked(variables: Variables) -> Variables:
    """Returns the variables of `_by_layer` with the layers of a stack in one array."""
    stacked: Variables = {}
    layers: dict[tuple[str, ...], list[np.ndarray]] = {}
    for (collection, first, *keys), x in variables.items():
        if first.startswith("block_"):
            layers.setdefault((collection, "blocks", *keys), []).append(x)
        else:
            stacked[collection, first, *keys] = x
    for path, arrays in layers.items():  # `_by_layer` has the layers in their order.
        stacked[path] = np.stack(arrays)
    return stacked


def _shapes_of(model: nn.Module, preprocessing: Preprocessing | None) -> Any:
    """Returns the shapes of a model's variables."""
    try:
        hash(model)
    except TypeError:
        # An attribute has no hash, such as a list.
        return _traced_shapes.__wrapped__(model, preprocessing)
    return _traced_shapes(model, preprocessing)


# A model of many layers takes a second to trace.
@functools.lru_cache(maxsize=32)
def _traced_shapes(model: nn.Module, preprocessing: Preprocessing | None) -> Any:
    # Shapes alone, so no parameter is drawn from the key.
    return jax.eval_shape(lambda: model.init(jax.random.key(0), blank_inputs(preprocessing)))


def _translate(
    naming: str,
    tensors: Tensors,
    model: nn.Module,
    preprocessing: Preprocessing | None,
    new_head: bool,
) -> dict[str, Any]:
    """Returns our collections from the tensors of a file.

    Raises:
      ValueError: Something does not fit. The message lists all of it.
    """
    shapes = _shapes_of(model, preprocessing)
    is_stacked = isinstance(model, LanguageModel)
    expected = _by_layer(shapes) if is_stacked else flatten_dict(shapes)
    translation = _Translation(naming, tensors)
    for path, leaf in expected.items():
        translation.add(path, leaf, new_head=new_head)
    problems = translation.problems + translation.superfluous()
    if problems:
        size = ""
        if preprocessing:
            size = f" at {preprocessing.size}x{preprocessing.size}"
        remedy = ", with its vocabulary and number of positions"
        if preprocessing:
            remedy = " at its image size"
        raise ValueError(
            f"the checkpoint (naming {naming!r}) does not fit the model{size}. Build the "
            f"checkpoint's model{remedy} (position embeddings are not interpolated):\n  "
            + "\n  ".join(problems)
        )
    variables = translation.variables
    return jax.device_put(unflatten_dict(_stacked(variables) if is_stacked else variables))


def _positions_for(tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns positions with the tokens of `shape`, or the tensor itself if it cannot fit."""
    _, tokens, width = shape
    if tensor.shape == shape or tensor.ndim != 3 or tensor.shape[-1] != width:
        return tensor
    return resize_positions(tensor, tokens, prefix_tokens=1)


class _Translation:
    """The variables that have been found in a file, and the problems of the others."""

    def __init__(self, naming: str, tensors: Tensors):
        self.variables: Variables = {}
        self.problems: list[str] = []
        self._name = naming
        self._naming = NAMINGS[naming]
        self._tensors = tensors
        self._used: set[str] = set()

    def add(self, path: tuple[str, ...], expected: Any, *, new_head: bool) -> None:
        """Translates the tensor of one variable of ours, or adds a problem."""
        _, *keys = path
        where = "/".join(keys)
        place = self._naming.find(where)
        if place is None:
            self.problems.append(f"{where} of the model: not in the naming {self._name!r}")
            return
        self._used.add(place.name)
        # The head of the file counts as used, so that it is not superfluous.
        if new_head and keys[0] in HEADS:
            self.variables[path] = np.zeros(expected.shape, np.float32)
            return
        tensor = self._tensors.get(place.name)
        if tensor is None:
            self.problems.append(f"{place.name}: missing, for {where} {expected.shape}")
            return
        if where == "positions" and self._naming.resizes_positions:
            tensor = _positions_for(tensor, expected.shape)
        array = self._converted(tensor, place, where)
        if array is None or array.shape != expected.shape:
            self.problems.append(
                f"{place.name}: shape {tensor.shape} does not fit {where} {expected.shape}"
            )
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            self.problems.append(f"{place.name}: dtype {array.dtype} is not floating point")
        else:
            self.variables[path] = np.asarray(array, np.float32)

    def _converted(self, tensor: np.ndarray, place: TensorPart, where: str) -> np.ndarray | None:
        """Returns our array, or None if the number of axes of the tensor does not fit."""
        try:
            if place.part:
                number = ("query", "key", "value").index(place.part)  # in one tensor
                tensor = np.split(tensor, 3, self._naming.outputs_axis)[number]
            return self._naming.convert(where, tensor)
        except (ValueError, IndexError, TypeError):
            return None

    def superfluous(self) -> list[str]:
        """Returns the problems of tensors that no variable has used."""
        return [
            f"{name}: superfluous, shape {self._tensors[name].shape}"
            for name in sorted(set(self._tensors) - self._used)
            if not self._naming.ignores(name)
        ]
