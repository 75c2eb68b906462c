"""Data of the prediction experiments: private records as feature vectors, and inputs to ask about.

Whatever turns a record into features is public and looks at one record at a time: a network trained on public images,
public word vectors, and a linear map that is fitted to a public sample (`FeatureMap`). No statistic of the private
records enters, so certificates and privacy statements about the features hold for the records.

The features matter more for private prediction than for training. One full-batch step from zero on the features x
moves the parameters along sum_i clip((sigma(0) - y_i) x_i), which is a good classifier if the features are centred and
have similar variances; and k records move the logit of a query by at most k * clip * |x|_1 of it, whatever the number
of records. Hence the centring, the whitening and the unit length, which bound all queries alike.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import data
from jaxdp.data import sources
from jaxdp.files import Limits, read_npz
from jaxdp.prediction.features import FeatureMap
from jaxdp.transforms import losses

_BATCH = 500  # images that go through the frozen network at a time


@dataclasses.dataclass(frozen=True)
class Task:
    """Private records, and public inputs to ask about.

    Attributes:
      train: the private records, {"features" [d], "label" []}.
      test: inputs with their true labels, which serve evaluation only.
      provenance: where the features come from, for people.
      network: parameters of the frozen network, if there is one.
    """

    train: data.Source
    test: data.Source
    provenance: str
    network: Mapping[str, Any] | None = None


def load(config: Any) -> Task:
    """Reads the data set of an experiment.

    Args:
      config: `config.data` of a file in configs/predict, whose comments say what each field means. `config.kind` is
        "blobs", "images", "text" or "embeddings".

    Raises:
      FileNotFoundError: a file or data set is not there; the message says what was looked for.
      ValueError: an unknown kind, or a file without the arrays that it must hold.
    """
    kinds: Mapping[str, Callable[[Any], Task]] = {
        "blobs": blobs,
        "images": images,
        "text": text,
        "embeddings": embeddings,
    }
    if config.kind not in kinds:
        raise ValueError(f"config.data.kind must be one of {sorted(kinds)}, got {config.kind!r}.")
    return kinds[config.kind](config)


# --- Public maps ------------------------------------------------------------------------------------------------


def _fit(config: Any, public: np.ndarray, weights: np.ndarray | None = None) -> FeatureMap:
    how = config.features
    return FeatureMap.from_public(
        public, dimensions=how.dimensions, whiten=how.whiten, radius=how.radius, weights=weights
    )


def _task(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    num_classes: int,
    name: str,
    provenance: str,
    splits: tuple[str, str] = ("train", "test"),
    network: Mapping[str, Any] | None = None,
) -> Task:
    def source(part: str, features: np.ndarray, label: np.ndarray) -> data.Source:
        return data.from_arrays(features=features, label=label, num_classes=num_classes, name=f"{name}/{part}")

    return Task(source(splits[0], *train), source(splits[1], *test), provenance, network)


# --- Two Gaussians ----------------------------------------------------------------------------------------------


def blobs(config: Any) -> Task:
    """Two Gaussian classes in the plane at +-(separation, separation), with the features x, x^2 and x^3.

    Fields: separation, std, train and test (numbers of records), seed.
    """

    def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        # The stream of RandomState never changes between versions of NumPy.
        noise = np.random.RandomState(seed).standard_normal((count, 2))
        label = np.arange(count) % 2
        point = config.separation * (2 * label - 1)[:, None] + config.std * noise
        return np.concatenate([point, point**2, point**3], axis=1), label

    return _task(
        draw(config.train, 2 * config.seed),
        draw(config.test, 2 * config.seed + 1),
        num_classes=2,
        name="blobs",
        provenance="coordinates of points, their squares and cubes",
    )


# --- Images -----------------------------------------------------------------------------------------------------


class _Convolutions(nn.Module):
    """The two convolutions of the paper's image model, and a head that serves pre-training only.

    Attributes:
      num_classes: number of logits, 0 for the features [B, 3200] of 28x28 images.
    """

    num_classes: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (4, 4), (2, 2), padding="VALID", name="conv_0")(x))
        x = nn.relu(nn.Conv(32, (4, 4), padding="VALID", name="conv_1")(x))
        x = x.reshape(x.shape[0], -1)
        if not self.num_classes:
            return x
        x = nn.relu(nn.Dense(100, name="dense")(x))
        return nn.Dense(self.num_classes, name="head")(x)


def images(config: Any) -> Task:
    """Images as features of a frozen public network, or as pixels.

    Fields: source ("bundled", "tfds" or "npz") and where it is; classes and keep, see `_select`; network; features.
    Public is what the config declares public: a fraction of a bundled set, or a split of the others.
    """
    public, train, test, num_classes, name = _image_splits(config)
    extract, network, origin = _network(config)
    vectors = [(extract(image), label) for image, label in (public, train, test)]
    project = _fit(config, vectors[0][0])
    return _task(
        *((project(features), label) for features, label in vectors[1:]),
        num_classes=num_classes,
        name=name,
        splits=("train", "test") if config.source == "bundled" else (config.private_split, config.test_split),
        provenance=f"{origin}, centred and scaled on {len(public[0])} public images without their labels",
        network=network,
    )


_Labelled = tuple[np.ndarray, np.ndarray]


def _image_splits(config: Any) -> tuple[_Labelled, _Labelled, _Labelled, int, str]:
    """Returns (public, private, test, number of classes, name); images are float32 [n, H, W, C] in [0, 1]."""
    if config.source == "bundled":
        whole = data.bundled(config.name)
        fractions = [config.public_fraction, 1 - config.public_fraction - config.test_fraction, config.test_fraction]
        parts = whole.split(fractions, seed=config.split_seed)
        splits, num_classes, name = [_all(part) for part in parts], whole.num_classes, config.name
    elif config.source == "tfds":
        wanted = (config.public_split, config.private_split, config.test_split)
        _check_disjoint(config, "public_split", "private_split", "test_split")
        read = [data.from_tfds(config.name, split, data_dir=config.data_dir or None) for split in wanted]
        splits, num_classes, name = [_all(part) for part in read], read[0].num_classes, config.name
    elif config.source == "npz":
        wanted = (config.public_split, config.private_split, config.test_split)
        keys = [f"{split}_{what}" for split in wanted for what in ("images", "labels")]
        arrays = [*_read_npz(config, config.path, keys, "as MedMNIST distributes it").values()]
        splits = [
            (_all(data.from_arrays(image=image, label=label.reshape(-1), num_classes=config.num_classes)))
            for image, label in zip(arrays[::2], arrays[1::2], strict=True)
        ]
        num_classes, name = config.num_classes, config.name
    else:
        raise ValueError(f"config.data.source must be 'bundled', 'tfds' or 'npz', got {config.source!r}.")
    if config.classes:
        splits = [_select(split, config.classes, config.keep) for split in splits]
        num_classes = len(config.classes)
    public, private, test = splits
    return public, private, test, num_classes, name


def _check_disjoint(config: Any, *fields: str) -> None:
    """Refuses splits of the config's TFDS set that share a record."""
    data.check_disjoint(
        {f"config.data.{field}": (config.name, config[field], config.data_dir or None) for field in fields}
    )


def _all(source: data.Source) -> _Labelled:
    rows = source.gather(np.arange(len(source)))
    return rows["image"], rows["label"]


def _select(split: _Labelled, classes: Sequence[int], keep: Sequence[float]) -> _Labelled:
    """Keeps the images of `classes`, renumbered in this order, and of each class the fraction `keep` of them.

    Which images stay is decided by a hash of each image alone, so one record more or less changes no other.
    """
    image, label = split
    fraction = dict(zip(classes, keep or [1.0] * len(classes), strict=True))

    def stays(pixels: np.ndarray, value: int) -> bool:
        if value not in fraction or fraction[value] >= 1:
            return value in fraction
        digest = hashlib.blake2b(np.ascontiguousarray(pixels).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < fraction[value] * 2**64

    rows = np.array([i for i, value in enumerate(label) if stays(image[i], int(value))], np.int64)
    return image[rows], np.array([list(classes).index(int(value)) for value in label[rows]], np.int32)


def _standardise(image: jax.Array) -> jax.Array:
    """Removes each image's own brightness and contrast."""
    mean = image.mean(axis=(1, 2, 3), keepdims=True)
    return (image - mean) / (image.std(axis=(1, 2, 3), keepdims=True) + 1e-3)


def _network(config: Any) -> tuple[Callable[[np.ndarray], np.ndarray], Mapping[str, Any] | None, str]:
    """Returns (images [n, H, W, C] -> vectors [n, d], parameters, what it is)."""
    if not config.network.name:
        return lambda image: image.reshape(len(image), -1), None, "pixels"
    public = _network_source(config)
    params = _pretrain(config.network, public)
    apply = jax.jit(lambda image: _Convolutions().apply({"params": params}, _standardise(_fit_size(image))))

    def extract(image: np.ndarray) -> np.ndarray:
        # One shape for all batches: nothing recompiles.
        padded = np.concatenate([image, np.repeat(image[:1], -len(image) % _BATCH, axis=0)])
        parts = [np.asarray(apply(padded[i : i + _BATCH])) for i in range(0, len(padded), _BATCH)]
        return np.concatenate(parts)[: len(image)]

    return extract, params, f"activations of two convolutions trained on {public.name}"


def _network_source(config: Any) -> data.Source:
    """The public images of the frozen network; the bundled digits if they are not there."""
    wanted = (config.network.name, config.network.split, config.data_dir or None)
    try:
        if config.source == "tfds":
            private = (config.name, config.private_split, config.data_dir or None)
            data.check_disjoint({"config.data.network.split": wanted, "config.data.private_split": private})
        return data.from_tfds(*wanted[:2], data_dir=wanted[2])
    except FileNotFoundError:
        print(f"{config.network.name} is not there: the frozen network is trained on the bundled digits instead.")
        return data.bundled("digits")


def _fit_size(image: jax.Array) -> jax.Array:
    """Grey images of 28 by 28, the size that the network expects."""
    grey = image.mean(axis=3, keepdims=True)
    return jax.image.resize(grey, (len(image), 28, 28, 1), "linear") if grey.shape[1:3] != (28, 28) else grey


def _pretrain(config: Any, public: data.Source) -> Mapping[str, Any]:
    model = _Convolutions(num_classes=public.num_classes)
    params = model.init(jax.random.key(config.seed), jnp.zeros((1, 28, 28, 1)))["params"]
    optimizer = optax.adam(config.learning_rate)
    sampler = data.FixedBatchSampler(
        len(public), min(config.batch_size, len(public)), seed=config.seed.to_bytes(16, "little")
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, _standardise(_fit_size(batch["image"])))
        return jax.vmap(losses.softmax_cross_entropy)(logits, batch["label"]).mean()

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for step in range(config.steps):
        params, state = update(params, state, public.gather(sampler.batch(step)))
    return {name: params[name] for name in ("conv_0", "conv_1")}


# --- Text -------------------------------------------------------------------------------------------------------

# As the Penn Treebank splits words: "n't" and what follows an apostrophe are tokens, hyphenated words are one.
_TOKEN = re.compile(r"n't\b|\w+?(?=n't\b)|'\w+|\w+(?:[-.]\w+)*|``|''|\.\.\.|[^\w\s]")

_NEGATIONS = {"not", "n't", "no", "never", "nor", "neither", "nothing", "without", "hardly", "lacks", "lack", "lacking"}
_CLAUSE_ENDS = set(".,;:!?")


def tokenize(sentence: str) -> list[str]:
    """Returns the lower-case tokens of a text; markup such as <br /> separates words."""
    return _TOKEN.findall(re.sub(r"<[^>]*>", " ", sentence.lower()))


def text(config: Any) -> Task:
    """Texts as the mean of public word vectors, weighted by weight / (weight + frequency) (Arora et al. 2017).

    Fields: name, private_split, test_split, data_dir and field (of a TFDS set); word_vectors, weight and negation;
    features. Up to `negation` words after a negation, in the same clause, count with the opposite sign (Pang et al.
    2002 mark such words). The linear map is fitted to the weighted word vectors under the public word counts.
    """
    words, vectors, counts = _read_npz(
        config,
        config.word_vectors,
        ["words", "vectors", "counts"],
        "public word vectors, most frequent words first or not",
    ).values()
    frequency = counts.astype(np.float64) / counts.sum()
    table = vectors.astype(np.float64) * (config.weight / (config.weight + frequency))[:, None]
    index = {word.decode() if isinstance(word, bytes) else str(word): i for i, word in enumerate(words)}
    project = _fit(config, table, frequency)
    _check_disjoint(config, "private_split", "test_split")
    read = {}
    for split in (config.private_split, config.test_split):
        sentences, label = _read_text(config, split)
        read[split] = project(_mean_vectors(sentences, index, table, project.mean, config.negation)), label
    return _task(
        read[config.private_split],
        read[config.test_split],
        num_classes=2,
        name=config.name,
        splits=(config.private_split, config.test_split),
        provenance=f"weighted mean of {len(words)} public word vectors, centred and scaled under public word counts",
    )


def _mean_vectors(
    sentences: Sequence[str], index: Mapping[str, int], table: np.ndarray, neutral: np.ndarray, negation: int
) -> np.ndarray:
    """Returns the mean of each text's signed rows of `table` [n, d], `neutral` for a text without a known word."""

    def mean(sentence: str) -> np.ndarray:
        tokens = tokenize(sentence)
        known = [
            (index[token], sign) for token, sign in zip(tokens, _signs(tokens, negation), strict=True) if token in index
        ]
        if not known:
            return neutral
        rows, signs = (np.array(column) for column in zip(*known, strict=True))
        return signs @ table[rows] / len(rows)

    return np.stack([mean(sentence) for sentence in sentences])


def _signs(tokens: Sequence[str], negation: int) -> list[float]:
    """-1.0 for each of the `negation` tokens that follow a negation, up to a punctuation mark; else 1.0."""
    signs, left = [], 0
    for token in tokens:
        signs.append(-1.0 if left > 0 else 1.0)
        left = negation if token in _NEGATIONS else 0 if token in _CLAUSE_ENDS else left - 1
    return signs


def _read_text(config: Any, split: str) -> tuple[list[str], np.ndarray]:
    import tensorflow_datasets as tfds

    data_dir = config.data_dir or os.environ.get("TFDS_DATA_DIR") or None
    with sources._quiet_array_record():
        builder = sources._prepared_builder(tfds, config.name, data_dir)
        records = builder.as_data_source(split=split)
        rows = records.__getitems__(list(range(len(records))))
    label = np.array([row["label"] for row in rows], np.int32)
    if (label < 0).any():
        raise ValueError(f"split {split!r} of data set {config.name!r} has no labels (they are stored as -1).")
    return [row[config.field].decode("utf-8", "replace") for row in rows], label


# --- Embeddings from a file -------------------------------------------------------------------------------------


def embeddings(config: Any) -> Task:
    """Ready vectors from an .npz file, for example embeddings of a public language model.

    Fields: path, name, num_classes; features. The file holds train_features [n, d], train_labels [n], test_features,
    test_labels, and public_features [m, d]: embeddings of public texts of the kind, without labels.
    """
    keys = ["train_features", "train_labels", "test_features", "test_labels", "public_features"]
    arrays = _read_npz(config, config.path, keys, "embeddings of texts")
    project = _fit(config, arrays["public_features"])
    return _task(
        (project(arrays["train_features"]), arrays["train_labels"].reshape(-1)),
        (project(arrays["test_features"]), arrays["test_labels"].reshape(-1)),
        num_classes=config.num_classes,
        name=config.name,
        provenance=f"embeddings of {os.path.basename(config.path)}, centred and scaled on its public ones",
    )


def _read_npz(config: Any, path: str, keys: Sequence[str], what: str) -> dict[str, np.ndarray]:
    """Returns the arrays `keys` of a file, in this order; a field `limits` of the config may change `Limits`."""
    if not path or not os.path.exists(path):
        raise FileNotFoundError(
            f"there is no file at {path!r}; it should be an .npz file ({what}) with the arrays {', '.join(keys)}. "
            "Give its path with --config.data..., or run configs/predict/digits.py, which needs no file."
        )
    return read_npz(
        path,
        keys,
        remedy=f"It should hold {', '.join(keys)} ({what}); make it again.",
        limits=Limits(**config.get("limits", {})),
    )
