"""The two parties of an experiment: the server's model and public images, the client's task, and a task to tune on.

The `data` part of the config has one entry per set of images: "server", "client", "client_test", "tuning", each with

    source      "bundled", or "tfds"
    name, split, data_dir   which data set; a bundled one has no splits
    classes     labels to keep, renumbered in this order; () keeps all
    prepare     tfds: whether images differ in size and must be resized and cut as the model's preprocessing says
    images      at most so many, drawn once; 0 takes all
    rotate      quarter turns, by which known images make another task

and besides `pretrain_fraction`: the share of the server's images that trains the backbone if there is no checkpoint
(the rest is D_S), and `split_seed`. A `client_test` or `tuning` without a name takes the other half of the client's
images, or D_S as its own `rotate` turns it.
"""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdp.data import Source, bundled, check_disjoint, from_tfds, resize_images
from jaxdp.models import Preprocessing
from jaxdp.models.public import public_model, trained
from jaxdp.split.backbone import Backbone, Params, two_thirds


class Labelled(NamedTuple):
    """Images float32 [n, S, S, C] in [0, 1] and labels int32 [n], NumPy arrays."""

    images: Any
    labels: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What a client wants to classify.

    Attributes:
      pool: few shots are drawn from it.
      test: to measure accuracy.
      num_classes: K.
    """

    pool: Labelled
    test: Labelled
    num_classes: int

    @property
    def most_shots(self) -> int:
        """How many images the rarest class has."""
        return int(np.bincount(self.pool.labels, minlength=self.num_classes).min())

    def few(self, shots: int, seed: int) -> Labelled:
        """`shots` images of every class, without replacement.

        Raises:
          ValueError: a class has fewer.
        """
        rng = np.random.Generator(np.random.Philox(key=seed))
        rows: list[int] = []
        for label in range(self.num_classes):
            there = np.flatnonzero(self.pool.labels == label)
            if len(there) < shots:
                raise ValueError(f"shots={shots}, but class {label} has only {len(there)} images; take fewer shots")
            rows += rng.choice(there, shots, replace=False).tolist()
        return Labelled(self.pool.images[rows], self.pool.labels[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """What an experiment starts from.

    Attributes:
      backbone: the server's model and where it is cut.
      params: of the whole model, with a head for the server's labels.
      server: D_S, the server's labelled public images.
      pretraining: its other images, if the backbone was trained here.
      client: the client's task.
      tuning: a task of the server's, on which learning rates are chosen.
    """

    backbone: Backbone
    params: Params
    server: Labelled
    pretraining: Source | None
    client: Task
    tuning: Task


def load(config: Any, root: pathlib.Path) -> Setting:
    """Reads the images, and reads or trains the backbone.

    Args:
      config: with the parts data, model, train (as in `jaxdp.models.public`), cut, the number of blocks of the
        frontend or 0 for two thirds, and head_hidden.
      root: where a trained backbone is kept, as backbone.safetensors.

    Raises:
      FileNotFoundError: data or a checkpoint is not there; the message says how to get it.
      ValueError: the parts of the config do not fit, or the client shares an image with somebody else.
    """
    model, data = public_model(config.model), config.data
    _check_disjoint(data)
    read = functools.partial(read_images, preprocessing=model.preprocessing)
    server = read(data.server)
    if server.num_classes != config.model.num_classes:
        raise ValueError(
            f"config.model.num_classes must be {server.num_classes}, the classes of config.data.server, "
            f"got {config.model.num_classes}"
        )
    pretraining = None
    if not config.model.checkpoint:
        share = data.pretrain_fraction
        if not 0 < share < 1:
            raise ValueError(f"config.data.pretrain_fraction must be in (0, 1) without a checkpoint, got {share}")
        pretraining, server = server.split((share, 1 - share), seed=data.split_seed)
        model = trained(model, pretraining, config.train, root / "backbone.safetensors")
    cut = config.cut or two_thirds(model.model)
    backbone = Backbone(model.model, model.preprocessing, cut, config.head_hidden)
    public = _labelled(server, data.server_images, data.split_seed)
    client = read(data.client)
    if data.client_test.name:
        pool, test = client, read(data.client_test)
    else:
        pool, test = client.split((0.5, 0.5), seed=data.split_seed)
    return Setting(
        backbone,
        model.params,
        public,
        pretraining,
        _task(pool, test, data.client.images, data.client_test.images, data.split_seed),
        _tuning(read, data, server),
    )


def _check_disjoint(data: Any) -> None:
    """Refuses TFDS splits by which an image of the client is the server's or a test image, too."""
    client = data.client
    for name in ("server", "tuning", "client_test"):
        other = data[name]
        known = other.name and client.source == other.source == "tfds"
        if known and not (client.classes and other.classes and set(client.classes).isdisjoint(other.classes)):
            parts = {"client": client, name: other}
            check_disjoint(
                {f"config.data.{part}": (spec.name, spec.split, spec.data_dir or None) for part, spec in parts.items()}
            )


def _tuning(read: Any, data: Any, server: Source) -> Task:
    source = read(data.tuning) if data.tuning.name else server
    pool, test = source.split((0.5, 0.5), seed=data.split_seed + 1)
    task = _task(pool, test, data.tuning.images, data.tuning.images, data.split_seed)

    def turned(known: Labelled) -> Labelled:
        return known._replace(images=np.ascontiguousarray(np.rot90(known.images, data.tuning.rotate, axes=(1, 2))))

    return Task(turned(task.pool), turned(task.test), task.num_classes)


def _task(pool: Source, test: Source, most: int, most_test: int, seed: int) -> Task:
    if pool.num_classes != test.num_classes:
        raise ValueError(f"the client's test images have {test.num_classes} classes, not {pool.num_classes}")
    return Task(_labelled(pool, most, seed), _labelled(test, most_test, seed), pool.num_classes)


def _labelled(source: Source, most: int, seed: int) -> Labelled:
    """All images, or `most` of them in a random order."""
    order = np.argsort(np.random.Philox(key=seed).random_raw(len(source)), kind="stable")
    batch = source.gather(order[: most or None])
    return Labelled(batch["image"], batch["label"])


def read_images(spec: Any, preprocessing: Preprocessing) -> Source:
    """The images that a config names, of some classes, as large as the model wants them."""
    if spec.source == "bundled":
        source = bundled(spec.name)
    else:
        prepare = preprocessing.prepare if spec.prepare else None
        source = from_tfds(spec.name, spec.split, data_dir=spec.data_dir or None, prepare=prepare)
    source = source.of_classes(spec.classes) if spec.classes else source
    return resize_images(source, preprocessing.size, len(preprocessing.mean))


def as_arrays(data: Labelled) -> tuple[Any, Any]:
    """Images and labels on the device."""
    return jnp.asarray(data.images), jnp.asarray(data.labels)
