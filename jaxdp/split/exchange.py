"""What the two parties of Split Adaptation tell each other, in packages (`jaxdp.files.package`).

The server asks, and the client answers:

    frontend   first blocks as integers and scales, public directions, settings of the copies
      upload     representations to adapt to, of one of three kinds
    logits     logits of a step of the adaptation, if labels stay with the client
      gradients  the gradients of the client's loss
    adapted    a sign that the backend is adapted. It holds nothing of the backend.
      queries    representations of images to classify, or none
    answers    logits of the queries
      end        nothing

The same functions check every package before it is sent and after it came. A reader runs no code of
the other party: it looks up models and activations in a table.

Every `pack_...` raises ValueError for content that a receiver would refuse. Every `unpack_...`
raises ValueError if the package is damaged, does not fit, or exceeds `limits`, by default
`Limits()`.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import scipy.special

from jaxdp.files import Limits, Package, pack, shown, unpack
from jaxdp.models import Preprocessing
from jaxdp.models.layers import gelu
from jaxdp.models.swin import Swin
from jaxdp.models.vit import ViT
from jaxdp.split.backbone import Backbone
from jaxdp.split.checks import check_labels
from jaxdp.split.copies import index_of_copies
from jaxdp.split.noisy_upload import PrivateRelease, Projection, Released
from jaxdp.split.quantization import QuantizedFrontend, Scales, describe_frontend
from jaxdp.split.server import Gradients

_MODELS: Mapping[str, type[nn.Module]] = {"ViT": ViT, "Swin": Swin}
_ACTIVATIONS: Mapping[str, Any] = {
    "gelu": gelu,
    "gelu_tanh": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
}
# Attributes that are not sent: they describe the head, which stays with the server, or never
# differ.
_NOT_SENT = {"num_classes", "head_hidden", "distilled_head", "dtype", "parent", "name"}
_Form = tuple[tuple[int, ...], Any]  # shape and dtype of an array
_Expected = Mapping[str, _Form]


def _pack(
    kind: str,
    fields: Mapping[str, Any],
    arrays: Mapping[str, Any],
    understand: Callable[..., Any],
    *args: Any,
) -> bytes:
    """Returns a package if `understand(package, *args)` accepts it."""
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    understand(Package(kind, dict(fields), arrays), *args)
    return pack(kind, fields=fields, arrays=arrays)


def _unpack(
    data: bytes,
    kind: str,
    fields: Collection[str],
    limits: Limits | None,
    understand: Callable[..., Any],
    *args: Any,
) -> Any:
    """Reads a package that must have these fields and returns `understand(package, *args)`."""
    package = unpack(data, kind, fields=fields, limits=limits, name=f"the package {kind!r}")
    try:
        return understand(package, *args)
    except Exception as error:  # a model with wrong attributes may raise anything when it is traced
        raise ValueError(
            f"the package {kind!r} is whole but of no use. Its sender must make another one: "
            f"{shown(error)}"
        ) from error


# --- The frontend -------------------------------------------------------------------------------


class Shipment(NamedTuple):
    """The server's package for the client.

    Attributes:
      backbone: The architecture and its cut. Its head has 2 classes, since the server's number is
          not sent.
      frontend: Integers and scales.
      copies, n_patches: N_Aug augmented copies of every representation, and N_P, the patches
          replaced in each.
      projection: Public directions for private uploads, or None.
      clip_norm: The clip norm of coordinates in these directions, a function of public data.
    """

    backbone: Backbone
    frontend: QuantizedFrontend
    copies: int
    n_patches: int
    projection: Projection | None = None
    clip_norm: float | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its numbers.

        It shows the server which packages were made with its own frontend.
        """
        numbers = (self.copies, self.n_patches, self.clip_norm)
        digest = hashlib.sha256(repr(numbers).encode())
        for leaf in jax.tree.leaves((self.frontend, self.projection)):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()

    def check_count(self, count: int) -> None:
        """Raises ValueError if the client cannot augment this number of images."""
        if count < 1:
            raise ValueError("the client has no image. It needs at least one.")
        if count == 1 and self.copies and self.n_patches:
            raise ValueError(
                f"one image has no neighbours, which must give {self.n_patches} patches of its "
                "copies. Take more images, or ask the server for a frontend with n_patches=0."
            )


def pack_frontend(shipment: Shipment) -> bytes:
    """Returns the package "frontend".

    It holds no floating-point weight, only int8 codes, their scales, the scales of activations, and
    the projection. There is one scale per tensor, and per channel in the patch embedding. That
    hides little of these blocks, since 8 bits are nearly as good as the original (Table 3). The
    backend is protected: the package holds nothing of it. The model must be a ViT or Swin without a
    dtype, and its activation must be in the table.
    """
    backbone, frontend = shipment.backbone, shipment.frontend
    first, second, output = frontend.scales
    if (shipment.projection is None) != (shipment.clip_norm is None):
        raise ValueError("projection and clip_norm go together. Give both or neither.")
    arrays: dict[str, Any] = {f"codes/{path}": codes for path, codes in frontend.codes.items()}
    arrays |= {f"units/{path}": unit for path, unit in frontend.units.items()}
    arrays |= {f"first/{site}": scale for site, scale in first.items()}
    for site, scale in second.items():
        # The second scale of a linear map is the unit of its kernel, which is sent already.
        if f"{site}/kernel" not in frontend.codes:
            arrays[f"second/{site}"] = scale
    arrays["output"] = output
    if shipment.projection is not None:
        arrays["projection/mean"] = shipment.projection.mean
        arrays["projection/directions"] = shipment.projection.directions
    fields = {
        "model": _describe_model(backbone.model),
        "preprocessing": dataclasses.asdict(backbone.preprocessing),
        "cut": backbone.cut,
        "bits": frontend.bits,
        "copies": shipment.copies,
        "n_patches": shipment.n_patches,
        "clip_norm": shipment.clip_norm,
    }
    return _pack("frontend", fields, arrays, _shipment, Limits())


def unpack_frontend(data: bytes, *, limits: Limits | None = None) -> Shipment:
    """Reads a package of `pack_frontend`. It checks all numbers before it traces the model."""
    limits = limits or Limits()
    fields = ("model", "preprocessing", "cut", "bits", "copies", "n_patches", "clip_norm")
    return _unpack(data, "frontend", fields, limits, _shipment, limits)


def _shipment(package: Package, limits: Limits) -> Shipment:
    _, fields, arrays = package
    model = _read_model(fields["model"], limits)
    preprocessing = _read_preprocessing(fields["preprocessing"])
    backbone = Backbone(model, preprocessing, fields["cut"])
    _check_declared(backbone, arrays, limits)
    bits = fields["bits"]
    copies = fields["copies"]
    n_patches = fields["n_patches"]
    clip_norm = fields["clip_norm"]
    if type(bits) is not int or not 2 <= bits <= 8:
        raise ValueError(f"bits must be an integer in [2, 8], got {bits!r}.")
    if type(copies) is int:
        limits.check("copies", copies, "the frontend")
    check_augmentation(backbone, copies=copies, n_patches=n_patches)
    expected = _expected_codes(backbone)
    scales = [name for name, (_, dtype) in expected.items() if dtype == np.float32]
    if clip_norm is not None:
        _check_positive("clip_norm", clip_norm)
        expected |= _expected_projection(backbone, arrays)
    check_arrays(arrays, expected)
    for name in scales:
        if not (arrays[name] > 0).all():
            raise ValueError(f"scale {name!r} must be positive.")
    units = _under("units/", arrays)
    second = _under("second/", arrays)
    for path, site in describe_frontend(backbone).sites.items():
        if site.kind != "product":
            second[path] = units[f"{path}/kernel"]
    first = _under("first/", arrays)
    output = jax.device_put(arrays["output"])
    searched = Scales(first, second, output)
    projection = None
    if clip_norm is not None:
        projection = Projection(**_under("projection/", arrays))
    codes = _under("codes/", arrays)
    frontend = QuantizedFrontend(codes, units, searched, bits)
    return Shipment(backbone, frontend, copies, n_patches, projection, clip_norm)


def _expected_codes(backbone: Backbone) -> dict[str, _Form]:
    """Returns shape and dtype of the codes and scales of a frontend."""
    _, shapes, sites = describe_frontend(backbone)
    expected: dict[str, _Form] = {"output": ((), np.float32)}
    for path, shape in shapes.items():
        # Only the kernel of the patch embedding is a convolution. It has a scale per channel.
        channels: tuple[int, ...] = ()
        if path.endswith("/kernel"):
            channels = shape[3:]
        expected[f"codes/{path}"] = (shape, np.int8)
        expected[f"units/{path}"] = (channels, np.float32)
    for path, site in sites.items():
        if site.kind == "product":
            expected[f"first/{path}"] = ((site.heads,), np.float32)
            expected[f"second/{path}"] = ((site.heads,), np.float32)
        else:
            expected[f"first/{path}"] = ((), np.float32)
    return expected


def _expected_projection(backbone: Backbone, arrays: Mapping[str, np.ndarray]) -> _Expected:
    """Returns shape and dtype of the arrays of a projection.

    The sender chooses the number of directions.
    """
    tokens, width = describe_frontend(backbone).tokens
    directions = arrays.get("projection/directions", np.zeros((0, 1)))
    k = 1
    if directions.ndim == 2 and directions.size:
        k = directions.shape[1]
    return {
        "projection/mean": ((tokens, width), np.float32),
        "projection/directions": ((tokens * width, k), np.float32),
    }


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns the arrays whose names start with a prefix, without it."""
    names = [name for name in arrays if name.startswith(prefix)]
    # `jnp.asarray` would compile a program for each shape.
    return {name.removeprefix(prefix): jax.device_put(arrays[name]) for name in names}


def _check_declared(backbone: Backbone, arrays: Mapping[str, np.ndarray], limits: Limits) -> None:
    """Refuses numbers that the arrays contradict.

    It comes before a trace of the model, which takes time for every block.
    """
    limits.check("blocks", backbone.model.num_blocks, "the frontend")
    codes = sum(name.startswith("codes/") for name in arrays)
    if backbone.cut > codes:
        raise ValueError(f"cut={backbone.cut} blocks cannot have only {codes} arrays of codes.")
    size = backbone.preprocessing.size
    resize = backbone.preprocessing.resize or size
    if isinstance(resize, tuple):
        pixels = math.prod(resize)
    else:
        pixels = resize**2
    limits.check("pixels", pixels, "the preprocessing of the frontend")
    if isinstance(backbone.model, Swin):
        side = size // backbone.model.patch_size
        # A mask has an entry for every token and every token of its window.
        window = min(backbone.model.window, side)
        entries = (side * window) ** 2
        limits.check("pixels", entries, "the windows of the frontend")


def check_augmentation(backbone: Backbone, *, copies: Any, n_patches: Any) -> None:
    """Raises ValueError if these settings cannot augment representations of this backbone."""
    tokens, _ = describe_frontend(backbone).tokens
    patches = tokens - backbone.prefix_tokens
    for name, value in (("copies", copies), ("n_patches", n_patches)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}.")
    if n_patches > patches:
        raise ValueError(
            f"n_patches={n_patches} is more than the {patches} patches of a representation. Use at "
            f"most {patches}. The paper replaces about a quarter of the patches."
        )


# --- The model as JSON --------------------------------------------------------------------------


def _defaults(family: Any) -> dict[str, Any]:
    """Returns the attributes that are sent, with their defaults."""
    sent = [field for field in dataclasses.fields(family) if field.name not in _NOT_SENT]
    return {field.name: field.default for field in sent}


def _describe_model(model: Any) -> dict[str, Any]:
    names = {family: name for name, family in _MODELS.items()}
    name = names.get(type(model))
    if name is None:
        raise ValueError(
            f"model must be one of {', '.join(_MODELS)} to be sent, got {type(model).__name__}."
        )
    if model.dtype is not None:
        raise ValueError(
            f"model.dtype must be None (float32) to be sent, got {model.dtype!r}. Clone it with "
            "dtype=None."
        )
    attributes = {name: getattr(model, name) for name in _defaults(type(model))}
    known = [name for name, function in _ACTIVATIONS.items() if function is model.activation]
    if not known:
        raise ValueError(f"model.activation must be one of {', '.join(_ACTIVATIONS)} to be sent.")
    attributes["activation"] = known[0]
    return {"class": name, "attributes": attributes}


def _read_model(described: Any, limits: Limits) -> Any:
    if not isinstance(described, dict) or set(described) != {"class", "attributes"}:
        raise ValueError("model must have the fields 'class' and 'attributes'.")
    name = described["class"]
    attributes = described["attributes"]
    if not isinstance(name, str) or name not in _MODELS:
        raise ValueError(f"model must be one of {', '.join(_MODELS)}, got {name!r}.")
    defaults = _defaults(_MODELS[name])
    wrong = [attributes]
    if isinstance(attributes, dict):
        wrong = sorted(set(attributes) ^ set(defaults))
    if wrong:
        raise ValueError(
            f"attributes of {name} must be {', '.join(defaults)}. Missing or unknown: {wrong}."
        )
    values = {
        key: _read_attribute(key, value, defaults[key], limits) for key, value in attributes.items()
    }
    return _MODELS[name](num_classes=2, **values)


def _read_attribute(
    name: str,
    value: Any,
    default: Any,
    limits: Limits,
) -> Any:
    """Returns the attribute for the model. Its default determines the type."""
    if name == "activation":
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {value!r}.")
        return _ACTIVATIONS[value]
    is_list = isinstance(value, list | tuple)
    numbers = value if is_list else [value]
    like = default[0] if isinstance(default, tuple) else default

    def fits(number: Any) -> bool:
        whole = type(like) is float and type(number) is int  # JSON writes 4.0 as 4
        if type(number) is not type(like) and not whole:
            return False
        if isinstance(number, bool | str):
            return True
        return number > 0 or number == like  # a layer scale of 0 is none

    if isinstance(default, tuple) != is_list or not numbers or not all(map(fits, numbers)):
        raise ValueError(f"{name} must be like {default!r}, got {value!r}.")
    for number in numbers:
        # The limit is far above every width or side, and a product of two below it is exact.
        if type(number) is int:
            limits.check("pixels", number, f"the attribute {name!r} of the frontend")
    if is_list:
        return tuple(numbers)
    return value


def _read_preprocessing(fields: Any) -> Preprocessing:
    names = {field.name for field in dataclasses.fields(Preprocessing)}
    if not isinstance(fields, dict) or set(fields) != names:
        raise ValueError(f"preprocessing must have the fields {', '.join(sorted(names))}.")
    resize = fields["resize"]
    sizes = [fields["size"]]
    if isinstance(resize, list | tuple) and len(resize) == 2:
        sizes += resize
    elif resize is not None:
        sizes.append(resize)
    positive = all(type(n) is int and n > 0 for n in sizes)
    if not (positive and _is_numbers(fields["mean"]) and _is_numbers(fields["std"])):
        raise ValueError(
            f"preprocessing must have positive integer sizes and lists of numbers, got {fields}."
        )
    if not fields["mean"] or not isinstance(fields["interpolation"], str):
        raise ValueError(
            f"preprocessing must have channels and the name of an interpolation, got {fields}."
        )
    if isinstance(resize, list):  # JSON has no tuples
        resize = tuple(resize)
    return Preprocessing(**{**fields, "resize": resize})


def _is_numbers(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return all(type(number) in (int, float) for number in value)


# --- The upload ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Uploaded:
    """The published upload: every copy with fresh noise, float32 [1 + N_Aug, n, T, D].

    Labels stay with the client.

    The number of classes is a public declaration, in all three uploads.
    """

    copies: Any
    num_classes: int

    @property
    def representations(self) -> jax.Array:
        """The first copies, float32 [n, T, D]."""
        return self.copies[0]

    def index(self) -> tuple[jax.Array, jax.Array]:
        """Returns image and number of every copy, as `Copies.index`."""
        each, count = self.copies.shape[:2]
        return index_of_copies(count, each)

    def batch(self, images: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns copies [B, T, D]: copy `numbers[b]` of image `images[b]`."""
        return self.copies[numbers, images]


jax.tree_util.register_dataclass(Uploaded, data_fields=["copies"], meta_fields=["num_classes"])


class NoisyOnce(NamedTuple):
    """One noisy representation of every image, float32 [n, T, D], without labels.

    The server makes the copies.
    """

    representations: Any
    num_classes: int


class Private(NamedTuple):
    """The result of `release_privately`, with labels, and its settings.

    The client's work ends with it.
    """

    released: Released
    release: PrivateRelease

    @property
    def num_classes(self) -> int:
        """K."""
        return self.release.num_classes


Upload = Uploaded | NoisyOnce | Private
MODES: Mapping[str, Any] = {"published": Uploaded, "noise_once": NoisyOnce, "private": Private}


def mode_of(upload: Upload) -> str:
    """Returns the name of an upload's kind, one of `MODES`."""
    return next(name for name, kind in MODES.items() if isinstance(upload, kind))


def pack_upload(upload: Upload, shipment: Shipment) -> bytes:
    """Returns the package "upload". It charges nothing: a till calls it after the payment."""
    fields: dict[str, Any] = {"num_classes": upload.num_classes}
    match upload:
        case Uploaded():
            arrays: dict[str, Any] = {"copies": upload.copies}
        case NoisyOnce():
            arrays = {"representations": upload.representations}
        case Private():
            fields = dataclasses.asdict(upload.release)
            arrays = upload.released._asdict()
    fields |= {"mode": mode_of(upload), "frontend": shipment.fingerprint}
    return _pack("upload", fields, arrays, _upload, shipment, Limits())


def unpack_upload(data: bytes, shipment: Shipment, *, limits: Limits | None = None) -> Upload:
    """Reads a package of `pack_upload` for the same shipment. A private upload must have noise."""
    limits = limits or Limits()
    fields = ("frontend", "mode", "num_classes")
    return _unpack(data, "upload", fields, limits, _upload, shipment, limits)


def _upload(package: Package, shipment: Shipment, limits: Limits) -> Upload:
    _, fields, arrays = package
    _check_made_with(fields["frontend"], shipment)
    mode = fields["mode"]
    num_classes = fields["num_classes"]
    if type(num_classes) is not int or num_classes < 2:
        raise ValueError(f"num_classes must be an integer of at least 2, got {num_classes!r}.")
    limits.check("num_classes", num_classes, "the upload")
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    if mode == "private":
        return _private_upload(package, shipment, limits)
    tokens = describe_frontend(shipment.backbone).tokens
    if mode == "published":
        count = _length(arrays, "copies", 1)
        shape = (1 + shipment.copies, count, *tokens)
        check_arrays(arrays, {"copies": (shape, np.float32)})
        shipment.check_count(count)
        return Uploaded(arrays["copies"], num_classes)
    count = _length(arrays, "representations")
    check_arrays(arrays, {"representations": ((count, *tokens), np.float32)})
    shipment.check_count(count)
    return NoisyOnce(arrays["representations"], num_classes)


def _private_upload(package: Package, shipment: Shipment, limits: Limits) -> Private:
    _, fields, arrays = package
    # The server makes `label_noise_matrix` in float64, which this number alone would fill memory
    # with.
    matrix = 8 * fields["num_classes"] ** 2
    limits.check("bytes", matrix, "the label noise of a private upload")
    if shipment.projection is None:
        raise ValueError(
            "mode='private' needs a frontend with a projection. Ask the server for one."
        )
    count = _length(arrays, "features")
    k = shipment.projection.directions.shape[1]
    expected = {"features": ((count, k), np.float32), "labels": ((count,), np.int32)}
    check_arrays(arrays, expected)
    shipment.check_count(count)
    check_labels(arrays["labels"], count, fields["num_classes"])
    names = [field.name for field in dataclasses.fields(PrivateRelease)]
    settings: Any = {name: fields.get(name) for name in names}
    # An upload without noise would have no guarantee, so 0 is refused here.
    for name in ("clip_norm", "noise_multiplier", "label_epsilon"):
        _check_positive(f"{name} of a private upload", settings[name])
    return Private(Released(**arrays), PrivateRelease(**settings))  # type: ignore[arg-type]


# --- The client's loss --------------------------------------------------------------------------


def loss_gradients(labels: Any, num_classes: int) -> Gradients:
    """Returns the client's side of the loss of Eq. 14: the gradients of every row by its logits.

    It protects NO label. The gradient is softmax - onehot, whose only negative entry is the label.
    So the server knows every label after one epoch, as it would from the loss of a single example
    (Li et al. 2022, arXiv:2102.08504). A `Private` upload protects labels.

    Args:
      labels: int [n] in [0, num_classes).
      num_classes: K.

    Returns:
      `gradients(logits, images)`. It raises ValueError if logits are not finite [B, K], or images
      not integers [B] in [0, n).
    """
    labels = np.asarray(labels)
    check_labels(labels, len(labels), num_classes)

    def gradients(logits: Any, images: Any) -> np.ndarray:
        logits = np.asarray(logits)
        images = np.asarray(images)
        shape = (len(images), num_classes)
        if logits.shape != shape or not np.isfinite(logits).all():
            raise ValueError(
                f"logits must be finite and [B, {num_classes}], one row per image, got "
                f"{logits.shape}."
            )
        whole = np.issubdtype(images.dtype, np.integer)
        if not whole or ((images < 0) | (images >= len(labels))).any():
            raise ValueError(
                f"images must be integers in [0, {len(labels)}), the images of the upload."
            )
        # softmax - onehot
        gradient = scipy.special.softmax(logits.astype(np.float64), axis=1)
        gradient[np.arange(len(images)), labels[images]] -= 1
        return gradient.astype(np.float32)

    return gradients


# --- Queries ------------------------------------------------------------------------------------


def pack_queries(representations: Any, shipment: Shipment) -> bytes:
    """Returns the package "queries": representations float32 [m, T, D] to classify.

    No guarantee covers them.
    """
    fields = {"frontend": shipment.fingerprint}
    arrays = {"representations": representations}
    return _pack("queries", fields, arrays, _queries, shipment)


def unpack_queries(data: bytes, shipment: Shipment, *, limits: Limits | None = None) -> np.ndarray:
    """Reads a package of `pack_queries` for the same shipment."""
    return _unpack(data, "queries", ["frontend"], limits, _queries, shipment)


def _queries(package: Package, shipment: Shipment) -> np.ndarray:
    _check_made_with(package.fields["frontend"], shipment)
    count = _length(package.arrays, "representations")
    tokens = describe_frontend(shipment.backbone).tokens
    check_arrays(package.arrays, {"representations": ((count, *tokens), np.float32)})
    return package.arrays["representations"]


def _check_made_with(fingerprint: Any, shipment: Shipment) -> None:
    if fingerprint != shipment.fingerprint:
        raise ValueError(
            "the package was made with another frontend. Give both parties the same package "
            "'frontend'."
        )


def _length(arrays: Mapping[str, np.ndarray], name: str, axis: int = 0) -> int:
    """Returns the length of an axis of an array, or 0 if there is no such array or axis."""
    shape = np.shape(arrays.get(name, ()))
    if axis >= len(shape):
        return 0
    return shape[axis]


def check_arrays(arrays: Mapping[str, np.ndarray], expected: _Expected) -> None:
    """Raises ValueError unless the arrays have these names, shapes and dtypes."""
    wrong = sorted(set(arrays) ^ set(expected))
    if wrong:
        what = "does not belong there"
        if wrong[0] in expected:
            what = "is missing"
        raise ValueError(f"array {wrong[0]!r} {what}.")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"array {name!r} must be {np.dtype(dtype)} of shape {shape}, got {array.dtype} "
                f"{array.shape}."
            )


def _check_positive(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and positive, got {value!r}.")
