"""What the two parties of Split Adaptation tell each other, as packages (`jaxdp.split.package`), and nothing else.

    frontend   server to client   the first blocks as integers and their scales, public directions, how copies are made
    queries    client to server   representations of images to classify
    upload     client to server   representations to adapt to, of one of three kinds; the server starts when it comes
    loss/      both ways          logits of a step and the client's gradients by them, if labels stay with the client
    adapted    server to client   the backend is adapted; nothing of it is sent
    answers    server to client   logits of the queries

Every package is checked before it is written and again after it is read, by the same functions. A party that reads one
runs no code of the other: models and activations are looked up in a table. Where the parties share no folder, anything
that carries folders will do, if it puts each in its place whole, for example by renaming it.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxdp.files import Limits
from jaxdp.models import Preprocessing
from jaxdp.models.layers import gelu
from jaxdp.models.swin import Swin
from jaxdp.models.vit import Product, ViT
from jaxdp.split.backbone import Backbone
from jaxdp.split.copies import Copies
from jaxdp.split.package import Package, read_package, write_package
from jaxdp.split.private import PrivateRelease, Projection, Released
from jaxdp.split.quantization import QuantizedFrontend, Scales, check_labels
from jaxdp.split.server import Gradients

_MODELS: Mapping[str, type[nn.Module]] = {"ViT": ViT, "Swin": Swin}
_ACTIVATIONS: Mapping[str, Any] = {"gelu": gelu, "gelu_tanh": nn.gelu, "relu": nn.relu, "silu": nn.silu}
# Of the head, of which the client has no part, or always the same.
_UNTOLD = {"num_classes", "head_hidden", "distilled_head", "dtype", "parent", "name"}
_POLL_SECONDS = 0.01
_Expected = tuple[tuple[int, ...], Any]  # shape and dtype of an array

# --- The frontend -----------------------------------------------------------------------------------------------------


class Shipment(NamedTuple):
    """What a client gets from the server.

    Attributes:
      backbone: the architecture and where it is cut. How many classes the server's head has is not told: it has 2.
      frontend: integers and scales.
      copies: N_Aug, augmented copies of every representation, which the client or the server makes.
      n_patches: N_P, how many patches are replaced in each.
      projection: public directions for private uploads; None for none.
      clip_norm: norm to which coordinates in these directions are clipped, a function of public data.
    """

    backbone: Backbone
    frontend: QuantizedFrontend
    copies: int
    n_patches: int
    projection: Projection | None = None
    clip_norm: float | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its numbers, by which a server knows what was made with its own frontend."""
        digest = hashlib.sha256(repr((self.copies, self.n_patches, self.clip_norm)).encode())
        for leaf in jax.tree.leaves((self.frontend, self.projection)):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()

    def check_count(self, count: int) -> None:
        """ValueError if so many images of a client cannot be augmented."""
        if count < 1:
            raise ValueError("the client has no image; it needs at least one")
        if count == 1 and self.copies and self.n_patches:
            raise ValueError(
                f"one image has no neighbours, from which {self.n_patches} patches of its copies could come; take more "
                "images, or ask the server for a frontend with n_patches=0"
            )


def send_frontend(folder: str | os.PathLike[str], shipment: Shipment) -> None:
    """Writes the package "frontend".

    It holds no floating-point weight: int8 codes, one scale per tensor (per channel in the patch embedding), those of
    activations, and the projection. That hides little of these blocks, since 8 bits are nearly as good as the original
    (Table 3): what is protected is the backend, of which nothing is in the package.

    Args:
      folder: the new package.
      shipment: its backbone may have any number of classes.

    Raises:
      FileExistsError: `folder` exists.
      ValueError: a model that is neither ViT nor Swin, has a dtype, or an activation without a name here; more patches
        than the representation has; parts that do not fit together.
    """
    backbone, frontend = shipment.backbone, shipment.frontend
    first, second, output = frontend.scales
    if (shipment.projection is None) != (shipment.clip_norm is None):
        raise ValueError("projection and clip_norm must be given both or neither: one clips what the other projects")
    arrays: dict[str, Any] = {f"codes/{path}": codes for path, codes in frontend.codes.items()}
    arrays |= {f"units/{path}": unit for path, unit in frontend.units.items()}
    arrays |= {f"first/{site}": scale for site, scale in first.items()}
    # The second scale of a linear map is the unit of its kernel.
    arrays |= {f"second/{site}": scale for site, scale in second.items() if f"{site}/kernel" not in frontend.codes}
    arrays["output"] = output
    if shipment.projection is not None:
        arrays |= {f"projection/{name}": array for name, array in shipment.projection._asdict().items()}
    fields = {
        "model": _told_model(backbone.model),
        "preprocessing": _told(dataclasses.asdict(backbone.preprocessing)),
        "cut": backbone.cut,
        "bits": frontend.bits,
        "copies": shipment.copies,
        "n_patches": shipment.n_patches,
        "clip_norm": shipment.clip_norm,
    }
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    _shipment(Package(fields, arrays), Limits())
    write_package(folder, "frontend", fields=fields, arrays=arrays)


def receive_frontend(folder: str | os.PathLike[str], *, limits: Limits | None = None) -> Shipment:
    """Reads what `send_frontend` wrote.

    Args:
      folder: the package.
      limits: on what it declares; `Limits()` by default. Nothing of the model is traced before they are checked.

    Raises:
      FileNotFoundError: there is no package, or a file of it is missing.
      ValueError: it is damaged, exceeds a limit, or describes no frontend: an unknown model, attribute or activation,
        arrays that are missing, superfluous, of another shape or dtype, scales that are not positive.
    """
    limits = limits or Limits()
    fields = ("model", "preprocessing", "cut", "bits", "copies", "n_patches", "clip_norm")
    package = read_package(folder, "frontend", fields=fields, arrays=["output"], limits=limits)
    return _understood(folder, lambda p: _shipment(p, limits), package)


def _shipment(package: Package, limits: Limits) -> Shipment:
    fields, arrays = package
    model = _read_model(fields["model"], limits)
    backbone = Backbone(model, _read_preprocessing(fields["preprocessing"]), fields["cut"])
    _check_declared(backbone, arrays, limits)
    bits, copies, n_patches, clip_norm = (fields[name] for name in ("bits", "copies", "n_patches", "clip_norm"))
    if type(bits) is not int or not 2 <= bits <= 8:
        raise ValueError(f"bits must be an integer in [2, 8], got {bits!r}")
    limits.check("copies", copies if type(copies) is int else 0, "the frontend")
    (tokens, width), shapes, products = _frontend(backbone)
    check_augmentation(backbone, copies=copies, n_patches=n_patches)
    expected: dict[str, _Expected] = {"output": ((), np.float32)}
    for path, shape in shapes.items():
        kernel = path.endswith("/kernel")
        # Of the kernels, that of the patch embedding alone is a convolution, with a scale per channel.
        expected |= {f"codes/{path}": (shape, np.int8), f"units/{path}": (shape[3:] if kernel else (), np.float32)}
        if kernel:
            expected[f"first/{path.removesuffix('/kernel')}"] = ((), np.float32)
    for site, heads in products.items():
        expected |= {f"first/{site}": ((heads,), np.float32), f"second/{site}": ((heads,), np.float32)}
    scales = [name for name, (_, dtype) in expected.items() if dtype == np.float32]
    if clip_norm is not None:
        directions = arrays.get("projection/directions", np.zeros((0, 1)))
        k = directions.shape[1] if directions.ndim == 2 and directions.size else 1
        expected["projection/mean"] = ((tokens, width), np.float32)
        expected["projection/directions"] = ((tokens * width, k), np.float32)
        _check_positive("clip_norm", clip_norm)
    _check_arrays(arrays, expected)
    for name in scales:
        if not (arrays[name] > 0).all():
            raise ValueError(f"scale {name!r} must be positive, and is not")

    def under(prefix: str) -> dict[str, jax.Array]:
        return {name.removeprefix(prefix): jnp.asarray(x) for name, x in arrays.items() if name.startswith(prefix)}

    codes, of_codes, first = under("codes/"), under("units/"), under("first/")
    kernels = {site: of_codes[f"{site}/kernel"] for site in first if site not in products}
    found = Scales(first, {**kernels, **under("second/")}, jnp.asarray(arrays["output"]))
    projection = None if clip_norm is None else Projection(**under("projection/"))
    frontend = QuantizedFrontend(codes, of_codes, found, bits)
    return Shipment(backbone, frontend, copies, n_patches, projection, clip_norm)


def _check_declared(backbone: Backbone, arrays: Mapping[str, np.ndarray], limits: Limits) -> None:
    """Refuses numbers that the arrays do not bear out, before the model is traced: that takes time for every block."""
    limits.check("blocks", backbone.model.num_blocks, "the frontend")
    codes = sum(name.startswith("codes/") for name in arrays)
    if backbone.cut > codes:
        raise ValueError(f"cut={backbone.cut} blocks cannot have only {codes} arrays of codes")
    size, resize = backbone.preprocessing.size, backbone.preprocessing.resize or backbone.preprocessing.size
    pixels = math.prod(resize) if isinstance(resize, tuple) else resize**2
    limits.check("pixels", pixels, "the preprocessing of the frontend")
    if isinstance(backbone.model, Swin):  # its masks are arrays of every token and the tokens of its window
        side = size // backbone.model.patch_size
        limits.check("pixels", (side * min(backbone.model.window, side)) ** 2, "the windows of the frontend")


@functools.lru_cache
def _frontend(backbone: Backbone) -> tuple[tuple[int, int], dict[str, tuple[int, ...]], dict[str, int]]:
    """Shape [T, D] of a representation, shapes of the frontend's parameters, numbers of heads of its products."""
    products: dict[str, int] = {}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Product):
            products["/".join(context.module.path)] = context.module.num_heads
        return next_fun(*args, **kwargs)

    def run() -> Any:
        images = jnp.zeros(backbone.images.shape)
        return backbone.model.init_with_output(jax.random.key(0), images, 0, backbone.cut)

    with nn.intercept_methods(note):
        representation, variables = jax.eval_shape(run)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(variables["params"], sep="/").items()}
    return representation.shape[1:], shapes, products


def check_augmentation(backbone: Backbone, *, copies: Any, n_patches: Any) -> None:
    """ValueError if representations of this backbone cannot be augmented like that."""
    patches = _frontend(backbone)[0][0] - backbone.prefix_tokens
    for name, value in (("copies", copies), ("n_patches", n_patches)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    if n_patches > patches:
        raise ValueError(
            f"n_patches={n_patches} is more than the {patches} patches of a representation; use at most {patches} "
            "(the paper replaces about a quarter of them)"
        )


# --- The model as JSON ------------------------------------------------------------------------------------------------


def _attributes(family: Any) -> dict[str, Any]:
    """Names of the attributes that are told, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(family) if field.name not in _UNTOLD}


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple | list) else value for name, value in values.items()}


def _told_model(model: Any) -> dict[str, Any]:
    name = next((name for name, family in _MODELS.items() if type(model) is family), None)
    if name is None:
        raise ValueError(f"model must be one of {', '.join(_MODELS)} to be sent, got {type(model).__name__}")
    if model.dtype is not None:
        raise ValueError(
            f"model.dtype must be None (float32) to be sent, got {model.dtype!r}; clone it with dtype=None"
        )
    attributes = _told({name: getattr(model, name) for name in _attributes(type(model))})
    activation = next((name for name, f in _ACTIVATIONS.items() if f is model.activation), None)
    if activation is None:
        raise ValueError(f"model.activation must be one of {', '.join(_ACTIVATIONS)} to be sent, got another function")
    return {"class": name, "attributes": {**attributes, "activation": activation}}


def _read_model(described: Any, limits: Limits) -> Any:
    if not isinstance(described, dict) or set(described) != {"class", "attributes"}:
        raise ValueError("model must have the fields 'class' and 'attributes'")
    name, given = described["class"], described["attributes"]
    if not isinstance(name, str) or name not in _MODELS:
        raise ValueError(f"model must be one of {', '.join(_MODELS)}, got {name!r}")
    defaults = _attributes(_MODELS[name])
    if not isinstance(given, dict) or set(given) != set(defaults):
        wrong = sorted(set(given) ^ set(defaults)) if isinstance(given, dict) else [given]
        raise ValueError(f"attributes of {name} must be {', '.join(defaults)}; missing or unknown: {wrong}")
    values = {key: _read_attribute(key, value, defaults[key]) for key, value in given.items()}
    for key, value in values.items():  # no width or side of a real model comes near; products of two stay exact
        for number in value if isinstance(value, tuple) else (value,):
            limits.check("pixels", number if type(number) is int else 0, f"the attribute {key!r} of the frontend")
    return _MODELS[name](num_classes=2, **values)


def _read_attribute(name: str, value: Any, default: Any) -> Any:
    """The attribute as the model has it; its default says what it must be."""
    if name == "activation":
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {value!r}")
        return _ACTIVATIONS[value]
    if isinstance(default, tuple):
        if not (isinstance(value, list) and value and all(type(n) is int and n > 0 for n in value)):
            raise ValueError(f"{name} must be a list of positive integers, got {value!r}")
        return tuple(value)
    right = type(value) is type(default) or (type(default) is float and type(value) is int)
    if not right or (not isinstance(value, bool | str) and not value > 0):
        raise ValueError(f"{name} must be like {default!r}, got {value!r}")
    return value


def _read_preprocessing(given: Any) -> Preprocessing:
    names = {field.name for field in dataclasses.fields(Preprocessing)}
    if not isinstance(given, dict) or set(given) != names:
        raise ValueError(f"preprocessing must have the fields {', '.join(sorted(names))}")
    resize, sizes = given["resize"], [given["size"]]
    if resize is not None:
        sizes += resize if isinstance(resize, list) and len(resize) == 2 else [resize]
    colours = [*given["mean"], *given["std"]] if all(isinstance(given[n], list) for n in ("mean", "std")) else [None]
    if not all(type(n) is int and n > 0 for n in sizes) or not all(type(x) in (int, float) for x in colours):
        raise ValueError(f"preprocessing must have positive integer sizes and lists of numbers, got {given}")
    if not given["mean"] or not isinstance(given["interpolation"], str):
        raise ValueError(f"preprocessing must have channels and the name of an interpolation, got {given}")
    return Preprocessing(**{**given, "resize": tuple(resize) if isinstance(resize, list) else resize})


# --- The upload -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Uploaded:
    """As published: every copy with noise of its own, made by the client. Labels stay with it; protects nothing proven.

    Attributes:
      copies: float32 [1 + N_Aug, n, T, D].
      num_classes: K, a public declaration.
    """

    copies: jax.Array
    num_classes: int

    @classmethod
    def of(cls, copies: Copies, *, num_classes: int) -> "Uploaded":
        """All copies in the memory of the host."""
        return cls(copies.materialized(), num_classes)  # type: ignore[arg-type]

    @property
    def representations(self) -> jax.Array:
        """The first copies, float32 [n, T, D]."""
        return self.copies[0]

    def index(self) -> tuple[jax.Array, jax.Array]:
        """Image and number of every copy, int32 [n (1 + N_Aug)] each; in the order of `Copies`."""
        each, count = self.copies.shape[:2]
        images, numbers = jnp.divmod(jnp.arange(count * each, dtype=jnp.int32), each)
        return images, numbers

    def batch(self, images: jax.Array, numbers: jax.Array) -> jax.Array:
        """Copies [B, T, D]: copy `numbers[b]` of image `images[b]`."""
        return self.copies[numbers, images]


jax.tree_util.register_dataclass(Uploaded, data_fields=["copies"], meta_fields=["num_classes"])


class NoisyOnce(NamedTuple):
    """One noisy representation of every image, of which the server makes copies. Labels stay with the client.

    Attributes:
      representations: float32 [n, T, D].
      num_classes: K, a public declaration.
    """

    representations: Any
    num_classes: int


class Private(NamedTuple):
    """What `release_privately` released, labels included, and how; the server needs the client no more.

    Attributes:
      released: features float32 [n, k] and labels int32 [n].
      release: public.
    """

    released: Released
    release: PrivateRelease

    @property
    def num_classes(self) -> int:
        """K, a public declaration."""
        return self.release.num_classes


Upload = Uploaded | NoisyOnce | Private
MODES: Mapping[str, Any] = {"published": Uploaded, "noise_once": NoisyOnce, "private": Private}
_PUBLIC_NUMBERS = ("clip_norm", "noise_multiplier", "label_epsilon", "num_classes", "mechanism")


def mode_of(upload: Upload) -> str:
    """The name of its kind, one of `MODES`."""
    return next(name for name, kind in MODES.items() if isinstance(upload, kind))


def send_upload(folder: str | os.PathLike[str], upload: Upload, shipment: Shipment) -> None:
    """Writes the package "upload". It charges nothing: a till calls it with what was paid for.

    Raises:
      FileExistsError: `folder` exists.
      ValueError: the upload does not fit the frontend, is not finite, or is called private and has no noise.
    """
    fields: dict[str, Any]
    arrays: dict[str, Any]
    match upload:
        case Uploaded():
            fields, arrays = {"num_classes": upload.num_classes}, {"copies": upload.copies}
        case NoisyOnce():
            fields, arrays = {"num_classes": upload.num_classes}, {"representations": upload.representations}
        case Private():
            fields = {name: getattr(upload.release, name) for name in _PUBLIC_NUMBERS}
            arrays = upload.released._asdict()
    fields |= {"mode": mode_of(upload), "frontend": shipment.fingerprint}
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    _upload(Package(fields, arrays), shipment, Limits())
    write_package(folder, "upload", fields=fields, arrays=arrays)


def receive_upload(folder: str | os.PathLike[str], shipment: Shipment, *, limits: Limits | None = None) -> Upload:
    """Reads what `send_upload` wrote, for the same shipment.

    Args:
      folder: the package.
      shipment: for which it was made.
      limits: on what it declares; `Limits()` by default.

    Raises:
      FileNotFoundError: there is no package, or a file of it is missing.
      ValueError: it is damaged, exceeds a limit, or does not fit the frontend.
    """
    limits = limits or Limits()
    package = read_package(folder, "upload", fields=["frontend", "mode", "num_classes"], limits=limits)
    return _understood(folder, lambda p: _upload(p, shipment, limits), package)


def _upload(package: Package, shipment: Shipment, limits: Limits) -> Upload:
    fields, arrays = package
    _check_made_with(fields["frontend"], shipment)
    tokens, mode, num_classes = _frontend(shipment.backbone)[0], fields["mode"], fields["num_classes"]
    if type(num_classes) is not int or num_classes < 2:
        raise ValueError(f"num_classes must be an integer of at least 2, got {num_classes!r}")
    limits.check("num_classes", num_classes, "the upload")
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    main, axis = {"published": ("copies", 1), "noise_once": ("representations", 0), "private": ("features", 0)}[mode]
    shape = np.shape(arrays.get(main, ()))
    count = shape[axis] if len(shape) > axis else 0
    expected: dict[str, _Expected]
    if mode == "published":
        expected = {"copies": ((1 + shipment.copies, count, *tokens), np.float32)}
    elif mode == "noise_once":
        expected = {"representations": ((count, *tokens), np.float32)}
    elif shipment.projection is None:
        raise ValueError("mode='private' needs a frontend with a projection; ask the server for one")
    else:
        k = shipment.projection.directions.shape[1]
        expected = {"features": ((count, k), np.float32), "labels": ((count,), np.int32)}
    _check_arrays(arrays, expected)
    shipment.check_count(count)
    if mode == "published":
        return Uploaded(arrays["copies"], num_classes)  # type: ignore[arg-type]
    if mode == "noise_once":
        return NoisyOnce(arrays["representations"], num_classes)
    check_labels(arrays["labels"], count, num_classes)
    numbers = {name: fields.get(name) for name in _PUBLIC_NUMBERS}
    for name in ("clip_norm", "noise_multiplier", "label_epsilon"):
        _check_positive(f"{name} of a private upload", numbers[name])
    return Private(Released(arrays["features"], arrays["labels"]), PrivateRelease(**numbers))  # type: ignore[arg-type]


# --- The client's loss ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LossClient:
    """The client's side of the loss of Eq. 14, for uploads without labels.

    It protects NO label. The gradient of the cross-entropy by the logits is softmax - onehot: its one negative entry is
    the label, so the server knows every label after one epoch, as it would from the loss of a single example (Li et
    al. 2022, arXiv:2102.08504). The guarantee for labels is that of a `Private` upload.

    Attributes:
      labels: int [n] in [0, num_classes).
      num_classes: K.
    """

    labels: Any
    num_classes: int

    def __post_init__(self) -> None:
        check_labels(self.labels, len(self.labels), self.num_classes)

    def gradients(self, logits: Any, images: Any) -> np.ndarray:
        """Gradients of the cross-entropy of every row by its logits.

        Args:
          logits: floating point [B, K], finite.
          images: integers [B] in [0, n): of which image each row is a copy.

        Returns:
          float32 [B, K]: softmax(logits) - onehot(labels[images]).

        Raises:
          ValueError: other shapes, or values out of range.
        """
        logits, images = np.asarray(logits), np.asarray(images)
        if logits.shape != (len(images), self.num_classes) or not np.isfinite(logits).all():
            raise ValueError(
                f"logits must be finite and [B, {self.num_classes}], one row per image, got {logits.shape}"
            )
        if not np.issubdtype(images.dtype, np.integer) or ((images < 0) | (images >= len(self.labels))).any():
            raise ValueError(f"images must be integers in [0, {len(self.labels)}), those of the upload")
        odds = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
        result = odds / odds.sum(1, keepdims=True)
        result[np.arange(len(images)), np.asarray(self.labels)[images]] -= 1
        return result.astype(np.float32)


def ask(folder: Path, logits: np.ndarray, images: np.ndarray, *, timeout: float) -> np.ndarray:
    """Asks the client for gradients, by a package at `folder`.logits that it answers at `folder`.gradients.

    Raises:
      TimeoutError: no answer within `timeout` seconds.
      ValueError: the answer is damaged.
    """
    question, reply = folder.with_name(f"{folder.name}.logits"), folder.with_name(f"{folder.name}.gradients")
    write_package(question, "logits", fields={}, arrays={"logits": logits, "images": images})
    wait_for(reply, timeout=timeout, sender="the client")
    gradients = read_package(reply, "gradients", arrays=["gradients"]).arrays["gradients"]
    _remove(question)  # first: `answer` does not look for a reply where there is no question
    _remove(reply)
    return gradients


def answer(folder: Path, gradients: Gradients) -> int:
    """Answers every question in `folder` that has no answer yet; returns how many."""
    answered = 0
    for question in sorted(folder.glob("[!.]*.logits")):
        reply = question.with_suffix(".gradients")
        if reply.exists():
            continue
        try:
            arrays = read_package(question, "logits", arrays=["logits", "images"]).arrays
        except FileNotFoundError:  # The server has just read the answer, and removed both.
            continue
        result = gradients(arrays["logits"], arrays["images"])
        write_package(reply, "gradients", fields={}, arrays={"gradients": result})
        answered += 1
    return answered


def file_gradients(folder: Path, *, timeout: float) -> Gradients:
    """The client behind a folder, as `adapt_by_client` asks it; forgets what an earlier server asked there."""
    for stale in (*folder.glob("[!.]*.logits"), *folder.glob("[!.]*.gradients")):
        _remove(stale)
    run, steps = uuid.uuid4().hex[:8], itertools.count()
    return lambda logits, images: ask(folder / f"{run}-{next(steps):08d}", logits, images, timeout=timeout)


def answer_until(done: Path, folder: Path, gradients: Gradients | None, *, timeout: float) -> None:
    """Answers questions in `folder`, if there is somebody who can, until the package `done` is there.

    Raises:
      TimeoutError: neither a question nor `done` within `timeout` seconds.
    """
    last = time.monotonic()
    while not _is_there(done):
        if gradients is not None and answer(folder, gradients):
            last = time.monotonic()
        elif time.monotonic() > last + timeout:
            raise _gone(done, timeout, "the server")
        time.sleep(_POLL_SECONDS)


# --- Questions about other images -------------------------------------------------------------------------------------


def send_queries(folder: str | os.PathLike[str], representations: Any, shipment: Shipment) -> None:
    """Writes the package "queries": representations float32 [m, T, D] to be classified. No guarantee covers them.

    Raises:
      FileExistsError: `folder` exists.
      ValueError: they do not fit the frontend.
    """
    fields, arrays = {"frontend": shipment.fingerprint}, {"representations": np.asarray(representations)}
    _queries(Package(fields, arrays), shipment)
    write_package(folder, "queries", fields=fields, arrays=arrays)


def receive_queries(folder: str | os.PathLike[str], shipment: Shipment, *, limits: Limits | None = None) -> np.ndarray:
    """Reads finite representations [m, T, D]; arguments and errors as `receive_upload`."""
    package = read_package(folder, "queries", fields=["frontend"], limits=limits)
    return _understood(folder, lambda p: _queries(p, shipment), package)


def _queries(package: Package, shipment: Shipment) -> np.ndarray:
    _check_made_with(package.fields["frontend"], shipment)
    shape = np.shape(package.arrays.get("representations", ()))
    count = shape[0] if shape else 0
    if not count:
        raise ValueError("representations must be at least one, got none")
    _check_arrays(package.arrays, {"representations": ((count, *_frontend(shipment.backbone)[0]), np.float32)})
    return package.arrays["representations"]


def send_answers(folder: str | os.PathLike[str], logits: Any, *, queries: Path) -> None:
    """Writes the package "answers": logits float32 [m, K] of the package `queries`."""
    write_package(folder, "answers", fields={"queries": manifest_sum(queries)}, arrays={"logits": logits})


def receive_answers(folder: str | os.PathLike[str], *, queries: Path, num_classes: int) -> np.ndarray:
    """Reads logits float32 [m, K] of the package `queries`; errors as `receive_upload`, also if they are of another."""

    def check(package: Package) -> np.ndarray:
        if package.fields["queries"] != manifest_sum(queries):
            raise ValueError(f"they answer other queries than {queries}; delete them, and start both parties again")
        count = len(read_package(queries, "queries", arrays=["representations"]).arrays["representations"])
        _check_arrays(package.arrays, {"logits": ((count, num_classes), np.float32)})
        return package.arrays["logits"]

    return _understood(folder, check, read_package(folder, "answers", fields=["queries"]))


# --- Folders ----------------------------------------------------------------------------------------------------------


def share(own: Path, shared: Path, kind: str) -> None:
    """Puts a copy of a package where the other party looks for it, unless the same one is there already.

    Raises:
      ValueError: there is another one.
    """
    if not os.path.lexists(shared):
        fields, arrays = read_package(own, kind)
        write_package(shared, kind, fields=fields, arrays=arrays)
    elif manifest_sum(shared) != manifest_sum(own):
        raise ValueError(
            f"{shared} is not the package that is in {own}: it belongs to another run. Delete {shared.parent}, with "
            "what both parties put there, or exchange through another folder"
        )


def wait_for(folder: Path, *, timeout: float, sender: str) -> None:
    """Waits until there is a package at `folder`.

    Raises:
      TimeoutError: there is none after `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while not _is_there(folder):
        if time.monotonic() > end:
            raise _gone(folder, timeout, sender)
        time.sleep(_POLL_SECONDS)


def _gone(folder: Path, timeout: float, sender: str) -> TimeoutError:
    return TimeoutError(
        f"{folder} did not come from {sender} within {timeout:g} seconds. Is it running, and with the same folder? "
        "Start both again as before: what was sent stays sent, and nothing is paid twice"
    )


def _is_there(folder: Path) -> bool:
    return (folder / "manifest.json").exists()


def manifest_sum(folder: Path) -> str:
    """SHA-256 of a package's manifest, which has the sums of all its files."""
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def _remove(folder: Path) -> None:
    """Removes a package at once for those who look for it."""
    hidden = folder.with_name(f".{folder.name}.removed")
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


# --- Checks -----------------------------------------------------------------------------------------------------------


def _understood(folder: Any, read: Callable[[Package], Any], package: Package) -> Any:
    try:
        return read(package)
    except Exception as error:  # whatever a model with such attributes raises when it is traced
        raise ValueError(f"{folder} is whole but of no use; its sender must make another one: {error}") from error


def _check_made_with(fingerprint: Any, shipment: Shipment) -> None:
    if fingerprint != shipment.fingerprint:
        raise ValueError("it was made with another frontend than this one; give both parties the same 'frontend'")


def _check_arrays(arrays: Mapping[str, np.ndarray], expected: Mapping[str, _Expected]) -> None:
    if wrong := sorted(set(arrays) ^ set(expected)):
        what = "is missing" if wrong[0] in expected else "does not belong there"
        raise ValueError(f"array {wrong[0]!r} {what}")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"array {name!r} must be {np.dtype(dtype)} of shape {shape}, got {array.dtype} {array.shape}"
            )


def _check_positive(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and positive, got {value!r}")
