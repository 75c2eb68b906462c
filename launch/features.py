"""Data of private prediction: private records as feature vectors, and inputs to ask about.

The maps from records to features are public, and each reads one record at a time. They are a
network trained on public images, public word vectors, and a `FeatureMap` of a public sample. So
certificates and privacy statements about the features hold for the records.

One full-batch step from zero moves the parameters along sum_i clip((sigma(0) - y_i) x_i). That
gives a good classifier if the features are centred and have similar variances. For any number of
records, k of them move the logit of a query x by at most k * clip * |x|_1. So features are centred,
whitened and scaled to unit length.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data import Examples, bundled, from_arrays, read_column
from jaxdp.data.protocol import check_source
from jaxdp.data.selection import everything, image_shape
from jaxdp.data.spec import open_parts
from jaxdp.models import Preprocessing, Pretrained, load_params
from jaxdp.prediction.features import FeatureMap

from . import data, frame, models


def _flat(params: Any, inputs: jax.Array) -> jax.Array:
    return inputs.reshape(len(inputs), -1)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """The public map from inputs to features in JAX, in float32, for a model that is released.

    Attributes:
      inputs: What one input is.
      shape: The shape of one input.
      project: The `FeatureMap`, or None.
      network: Parameters of the frozen network, if one is used.
      vectors: From the parameters of the network and inputs [n, ...] to vectors [n, d].
    """

    inputs: str
    shape: tuple[int, ...]
    project: FeatureMap | None
    network: Any = None
    vectors: Callable[[Any, jax.Array], jax.Array] = _flat

    @property
    def params(self) -> dict[str, Any]:
        """What a call needs, as a pytree."""
        params = {} if self.network is None else {"network": self.network}
        if self.project is None:
            return params
        constants = {"mean": self.project.mean, "matrix": self.project.matrix}
        constants["radius"] = np.array(self.project.radius)
        return params | {name: np.float32(value) for name, value in constants.items()}

    def __call__(self, params: Mapping[str, Any], inputs: jax.Array) -> jax.Array:
        """Returns the features [n, r] of inputs [n, ...], with the parameters of `params`."""
        vectors = self.vectors(params.get("network"), inputs)
        if "matrix" not in params:
            return vectors
        mapped = (vectors - params["mean"][None]) @ params["matrix"]
        lengths = jnp.linalg.norm(mapped, axis=1, keepdims=True)
        return params["radius"] * mapped / jnp.where(lengths > 0, lengths, 1.0)


class Task(NamedTuple):
    """Private records, and public inputs to ask about.

    Attributes:
      train: The private records, {"features" [d], "label" []}.
      test: Inputs with their true labels. The labels serve evaluation only.
      provenance: The origin of the features, for people.
      mapping: How the features are made of an input.
      network: Parameters of the frozen network, if one is used.
      start: Initial parameters of the dense layers, if the network's own are trained on.
      rows: The private rows of a table before any map, which a ledger recognises.
    """

    train: Examples
    test: Examples
    provenance: str
    mapping: Mapped
    network: Mapping[str, Any] | None = None
    start: Mapping[str, Any] | None = None
    rows: Examples | None = None


class Opened(NamedTuple):
    """Data of which no feature is computed yet.

    Attributes:
      inputs: The number of inputs to ask about.
      classes: The number of classes.
      width: The number of features, or the largest that it may be.
      compute: Returns the features. Its argument is a file with the parameters of the frozen
        network. Without the file they are trained.
    """

    inputs: int
    classes: int
    width: int
    compute: Callable[[pathlib.Path], Task]


def read(config: Any) -> Opened:
    """Opens the data of a study.

    Args:
      config: The `data` part of its config. It has `kind`, "images", "table", "text", "embeddings"
        or "blobs", and the fields of the function of this name. All but blobs have `features`:
        dimensions, whiten and radius of a `FeatureMap`.

    Raises:
      FileNotFoundError: A file or data set is missing. The message names it.
      ValueError: The kind is unknown, or the data does not fit.
    """
    frame.known("data.kind", [config.kind], _KINDS)
    data.check_group(config)
    return _KINDS[config.kind](config)


def blobs(config: Any) -> Opened:
    """Returns two Gaussian classes in the plane at +-(separation, separation), with the features x,
    x^2 and x^3.

    Fields: separation, std, train and test (numbers of records), seed.
    """

    def draw(part: str, seed: int) -> Examples:
        # RandomState gives the same numbers in all versions of NumPy.
        noise = np.random.RandomState(seed).standard_normal((config[part], 2))
        label = np.arange(config[part]) % 2
        point = config.separation * (2 * label - 1)[:, None] + config.std * noise
        features = np.concatenate([point, point**2, point**3], axis=1)
        return from_arrays(features=features, label=label, num_classes=2, name=f"blobs/{part}")

    def compute(_: pathlib.Path) -> Task:
        train, test = draw("train", 2 * config.seed), draw("test", 2 * config.seed + 1)
        origin = "coordinates of points, their squares and cubes"
        return Task(train, test, origin, Mapped(origin, (6,), None))

    return Opened(config.test, 2, 6, compute)


def embeddings(config: Any) -> Opened:
    """Returns ready vectors from an .npz file, for example embeddings of a public language model.

    Fields: path, name, num_classes. The file holds train_features [n, d], train_labels [n],
    test_features, test_labels, and public_features [m, d]. The last are embeddings of public texts
    of the same kind, without labels. Without `features` the vectors are used as they are, and the
    last array is not read.
    """
    keys = ["train_features", "train_labels", "test_features", "test_labels"]
    if config.features:
        keys.append("public_features")
    arrays = data.arrays(config, "path", keys, "embeddings of texts")

    def compute(_: pathlib.Path) -> Task:
        origin = f"embeddings of {pathlib.Path(config.path).name}"
        project = None
        if config.features:
            project = FeatureMap.from_public(arrays["public_features"], **config.features)
            origin += ", centred and scaled on its public ones"

        def records(part: str) -> Examples:
            vectors = arrays[f"{part}_features"]
            return from_arrays(
                features=vectors if project is None else project(vectors),
                label=arrays[f"{part}_labels"].reshape(-1),
                num_classes=config.num_classes,
                name=f"{config.name}/{part}",
            )

        mapping = Mapped("an embedding of the same public network", test.shape[1:], project)
        return Task(records("train"), records("test"), origin, mapping)

    test = arrays["test_features"]
    return Opened(len(test), config.num_classes, _width(config, test.shape[1]), compute)


def _width(config: Any, vectors: int) -> int:
    """Returns the number of features of vectors of a width. A map may keep fewer of them."""
    dimensions: int = config.features.dimensions if config.features else 0
    return dimensions or vectors


def table(config: Any) -> Opened:
    """Returns the features of a table, which `jaxdp.data.from_csv` reads.

    Fields: the fields of a set of records in launch/data.py. The parts are `private`, `test` and,
    with `features`, `public` (used without its labels). Without `features` the numbers of the table
    are used as they are.
    """
    roles = ("public", "private", "test") if config.features else ("private", "test")
    sources = open_parts(data.specs(config, *roles, needs=_NEEDED, tables=True))
    for role, source in sources.items():
        check_source(source, "features", "label", argument=f"config.data.parts.{role}")
    if config.features and "public" not in sources:
        raise ValueError(
            "config.data.parts.public must name rows that are public, on which features are "
            "centred and scaled. Or set config.data.features=()."
        )
    private, test = sources["private"], sources["test"]

    def compute(_: pathlib.Path) -> Task:
        origin = "the numbers of a table"
        project = None
        if config.features:
            public = read_column(sources["public"], "features")
            project = FeatureMap.from_public(public, **config.features)
            origin += f", centred and scaled on {len(public)} public rows without their labels"

        def records(source: Examples) -> Examples:
            vectors = read_column(source, "features")
            return from_arrays(
                features=vectors if project is None else project(vectors),
                label=read_column(source, "label"),
                num_classes=source.num_classes,
                name=source.name,
            )

        mapping = Mapped(rows_of(config, test), (columns,), project)
        return Task(records(private), records(test), origin, mapping, rows=private)

    columns = read_column(test, "features").shape[1]
    return Opened(len(test), private.num_classes, _width(config, columns), compute)


# --- Images -------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """The paper's network on images of 28 by 28. It normalises the brightness and contrast of each,
    in grey.
    """

    # Of the head in training. 0 has no dense layer and returns the features [B, 3200].
    num_classes: int
    WIDTH: ClassVar[int] = 3200

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.mean(axis=3, keepdims=True)
        x = x - x.mean(axis=(1, 2, 3), keepdims=True)
        x = x / (x.std(axis=(1, 2, 3), keepdims=True) + 1e-3)
        x = nn.relu(nn.Conv(16, (4, 4), (2, 2), padding="VALID", name="conv_0")(x))
        x = nn.relu(nn.Conv(32, (4, 4), padding="VALID", name="conv_1")(x))
        x = x.reshape(x.shape[0], -1)
        if not self.num_classes:
            return x
        x = nn.relu(nn.Dense(100, name="dense")(x))
        return nn.Dense(self.num_classes, name="head")(x)


def rows_of(config: Any, source: Examples) -> str:
    """Returns what the features of a table are, so that the user of a model can make them."""
    options = json.dumps(config.options.to_dict())
    return (
        f"the features of a row, in this order: {', '.join(source.feature_names)}. "
        f"jaxdp.data.from_csv makes them from a table with these options: {options}"
    )


def images(config: Any) -> Opened:
    """Returns images as activations of a frozen network, or as pixels if no part is `upstream`.

    Fields: the fields of a set of images in launch/data.py, network, classes and keep. The parts
    are `public` (used without its labels), `private`, `test` and, to train the network, `upstream`.
    `network` has steps, batch_size, learning_rate and seed. `classes` are the labels to keep,
    renumbered in this order. `keep` is the share of each class to keep. () keeps everything in
    both. Without `features` the activations are used as they are, and no part is `public`.

    Two more fields of `network` make the paper's own network: `classes`, groups of labels of the
    upstream images that are one class each, and `dense`, whether the trained layers start from its
    dense layers.
    """
    try:
        needs = (*_NEEDED, "public") if config.features else _NEEDED
        sources = open_parts(data.specs(config, *_ROLES, needs=needs), images=True)
    except FileNotFoundError:
        sources = _without_upstream(config)
    public = None
    if config.features:
        public = _some_classes(sources["public"], config)
    private = _some_classes(sources["private"], config)
    test = _some_classes(sources["test"], config)
    upstream = sources.get("upstream")
    if upstream is not None and config.network.get("classes", ()):
        upstream = _grouped(upstream, config.network.classes)

    def compute(network: pathlib.Path) -> Task:
        params, start, origin = None, None, "pixels"
        project = None
        if upstream is not None:
            params = _pretrained(config.network, upstream, network)
            origin = f"activations of two convolutions trained on {upstream.name}"
            if config.network.get("dense", False):
                start = _dense_layers(params, private.num_classes)
        if public is not None:
            project = FeatureMap.from_public(_vectors(params, public), **config.features)
            origin += f", centred and scaled on {len(public)} public images without their labels"

        def records(source: Examples, part: str) -> Examples:
            bundled = config.source == "bundled"
            vectors = _vectors(params, source)
            return from_arrays(
                features=vectors if project is None else project(vectors),
                label=read_column(source, "label"),
                num_classes=source.num_classes,
                name=f"{config.name}/{part}" if bundled else source.name,
            )

        mapping = _mapped(params, test, project)
        return Task(
            records(private, "train"), records(test, "test"), origin, mapping, params, start
        )

    width = math.prod(image_shape(test)) if upstream is None else Convolutions.WIDTH
    return Opened(len(test), private.num_classes, _width(config, width), compute)


_NEEDED = ("private", "test")
_ROLES = ("upstream", "public", *_NEEDED)


def _without_upstream(config: Any) -> dict[str, Examples]:
    """Returns the images of each role, with the bundled digits to train the network.

    Raises:
      FileNotFoundError: The images of another role are missing too, or no network is trained.
    """
    others = copy.deepcopy(config)
    others.parts.upstream = ""
    sources = open_parts(data.specs(others, *_ROLES), images=True)
    print(
        f"{config.parts.upstream} is missing. The frozen network is trained on the bundled "
        "digits instead."
    )
    return sources | {"upstream": bundled("digits")}


def _some_classes(source: Examples, config: Any) -> Examples:
    """Returns some classes, and a share of each. The hash of an image alone decides whether it
    stays.
    """
    if not config.classes:
        return source
    chosen = source.of_classes(config.classes)
    if not config.keep:
        return chosen
    if len(config.keep) != len(config.classes):
        raise ValueError(
            f"config.data.keep must have a share for each of {len(config.classes)} classes, or be "
            "()."
        )
    columns, rows = everything(chosen), []
    for row, (image, label) in enumerate(zip(columns["image"], columns["label"], strict=True)):
        digest = hashlib.blake2b(image.tobytes(), digest_size=8).digest()
        if int.from_bytes(digest, "little") < config.keep[label] * 2**64:
            rows.append(row)
    return chosen.take(np.array(rows, np.int64))


def _grouped(source: Examples, groups: Sequence[Sequence[int]]) -> Examples:
    """Returns the images of some labels, in memory. The labels of a group are one class."""
    labels = list(itertools.chain(*groups))
    class_of_label = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    columns = everything(source.of_classes(labels))
    return from_arrays(
        image=columns["image"],
        label=class_of_label[columns["label"]],
        num_classes=len(groups),
        name=source.name,
    )


def _dense_layers(params: Mapping[str, Any], num_classes: int) -> dict[str, Any]:
    """Returns the network's dense layers as parameters of `models.Dense`.

    The last layer starts at zero if the network was trained on another number of classes.
    """
    outputs = 1 if num_classes == 2 else num_classes
    last = params["head"]
    if last["bias"].size != num_classes:
        width = len(last["kernel"])
        last = {"kernel": np.zeros((width, outputs), np.float32)}
        last["bias"] = np.zeros(outputs, np.float32)
    elif num_classes == 2:  # two logits are one, their difference
        last = {name: np.diff(array) for name, array in last.items()}
    return {"dense_0": dict(params["dense"]), "dense_1": dict(last)}


def _network(source: Examples, num_classes: int) -> Pretrained:
    channels = image_shape(source)[-1]
    preprocessing = Preprocessing(size=28, mean=channels * (0.0,), std=channels * (1.0,))
    return Pretrained(Convolutions(num_classes), {}, preprocessing)


def _pretrained(how: Any, upstream: Examples, path: pathlib.Path) -> Mapping[str, Any]:
    """Returns parameters of the convolutions, from the file or trained here."""
    if path.exists():
        return load_params(path)
    network = _network(upstream, upstream.num_classes)
    params = models.train(
        network,
        models.fresh(network, how.seed),
        models.resize(network, upstream),
        how,
        seed=how.seed,
        optimizer=lambda _: optax.adam(how.learning_rate),  # without decay
        label="frozen network",
    )
    if how.get("dense", False):
        return params
    return _convolutions(params)


def _convolutions(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in params if name.startswith("conv")}


def _vectors(params: Mapping[str, Any] | None, source: Examples) -> np.ndarray:
    """Returns activations of the network, or pixels, [n, d]."""
    if params is None:
        return everything(source)["image"].reshape(len(source), -1)
    network = _network(source, 0)
    return models.logits(network, _convolutions(params), models.resize(network, source))


def _mapped(params: Mapping[str, Any] | None, source: Examples, project: Any) -> Mapped:
    """Returns the map from images to the features of a study."""
    what = "an image in [0, 1], of this size"
    if params is None:
        return Mapped(what, image_shape(source), project)
    network = _network(source, 0)
    shape = (network.preprocessing.size, network.preprocessing.size, image_shape(source)[-1])
    return Mapped(what, shape, project, _convolutions(params), network.apply_fn)


# --- Text ---------------------------------------------------------------------------------------

# The Penn Treebank splits words so: "n't" and the part after an apostrophe are tokens. A hyphenated
# word is one token.
_TOKEN = re.compile(r"n't\b|\w+?(?=n't\b)|'\w+|\w+(?:[-.]\w+)*|``|''|\.\.\.|[^\w\s]")
_NEGATIONS = {
    *("not", "n't", "no", "never", "nor", "neither", "nothing", "without"),
    *("hardly", "lacks", "lack", "lacking"),
}
_CLAUSE_ENDS = set(".,;:!?")


def text(config: Any) -> Opened:
    """Returns texts as the mean of public word vectors, weighted by weight / (weight + frequency)
    (Arora et al. 2017).

    Fields: name, data_dir and parts (private, test) of a TFDS set with two classes, its `field`,
    word_vectors, weight and negation. `word_vectors` is an .npz file with words, vectors and
    counts. Up to `negation` words after a negation in the same clause count with the opposite sign
    (Pang et al. 2002 mark such words). The linear map is fitted to the weighted word vectors under
    the public word counts.
    """
    keys = ("words", "vectors", "counts")
    words, vectors, counts = data.arrays(
        config, "word_vectors", keys, "public word vectors"
    ).values()
    specs = data.specs(config, *_NEEDED, needs=_NEEDED, source="tfds")
    texts_of = {role: data.texts(specs[role], config.field) for role in _NEEDED}

    def compute(_: pathlib.Path) -> Task:
        frequency = counts.astype(np.float64) / counts.sum()
        table = vectors.astype(np.float64) * (config.weight / (config.weight + frequency))[:, None]
        index = {_text(word): row for row, word in enumerate(words)}
        project = FeatureMap.from_public(table, weights=frequency, **config.features)

        def mean(sentence: str) -> np.ndarray:
            tokens = tokenize(sentence)
            signed = zip(tokens, signs(tokens, config.negation), strict=True)
            known = [sign * table[index[token]] for token, sign in signed if token in index]
            return np.mean(known, axis=0) if known else project.mean

        def records(role: str) -> Examples:
            texts, label = texts_of[role]
            return from_arrays(
                features=project(np.stack([mean(sentence) for sentence in texts])),
                label=label,
                num_classes=2,
                name=specs[role].title,
            )

        origin = (
            f"weighted mean of {len(words)} public word vectors, centred and scaled under public "
            "word counts"
        )
        mapping = Mapped("the weighted mean of word vectors", vectors.shape[1:], project)
        return Task(records("private"), records("test"), origin, mapping)

    _, test_labels = texts_of["test"]
    return Opened(len(test_labels), 2, _width(config, vectors.shape[1]), compute)


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


def tokenize(sentence: str) -> list[str]:
    """Returns the lower-case tokens of a text. Markup such as <br /> separates words."""
    return _TOKEN.findall(re.sub(r"<[^>]*>", " ", sentence.lower()))


def signs(tokens: Sequence[str], negation: int) -> list[float]:
    """Returns -1.0 for the `negation` tokens after a negation, up to a punctuation mark, and 1.0
    for the others.
    """
    signs, left = [], 0
    for token in tokens:
        signs.append(-1.0 if left > 0 else 1.0)
        left -= 1
        if token in _NEGATIONS:
            left = negation
        elif token in _CLAUSE_ENDS:
            left = 0
    return signs


_KINDS = {
    "blobs": blobs,
    "images": images,
    "table": table,
    "text": text,
    "embeddings": embeddings,
}
