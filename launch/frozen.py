"""Features of a frozen public network, computed once per image, so that a step of its head costs
next to nothing.

The part `features` of a model has the fields

    keep        "" computes the whole network in every step. "memory" keeps the features of a run in
                host memory, "workdir" also in features_*.npz in the workdir. These hold private
                data as the images do
    dimensions  of `jaxdp.models.Features`, from PUBLIC images; 0, or no public images, leaves the
                features as they are
    whiten      of `jaxdp.models.Features`

Nothing is charged: each record has its own features, by a function that no private record changed.
This needs images without augmentation, since an augmented view has other features.
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import DataSpec, Examples, from_arrays, read_column
from jaxdp.files import read_npz, write_durably
from jaxdp.models import Features, Pretrained, head_inputs

from . import frame, models

_BATCH = 100


class Head(Pretrained):
    """The head of a network, on its mapped features [B, r] in place of images."""

    def apply_fn(self, params: Any, images: jax.Array) -> jax.Array:
        """Maps features to logits, float32 [B, C]."""
        return images @ params["head"]["kernel"] + params["head"]["bias"].reshape(1, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureSource:
    """The features and labels of a source. They are computed, or read, when the first is asked
    for.
    """

    source: Examples
    find: Callable[[], np.ndarray]

    @property
    def name(self) -> str:
        """The name of the source, under which the ledger charges."""
        return self.source.name

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.source.num_classes

    @functools.cached_property
    def kept(self) -> Examples:
        """The features in memory."""
        label = read_column(self.source, "label")
        return from_arrays(
            features=self.find(), label=label, num_classes=self.num_classes, name=self.name
        )

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, indices: np.ndarray) -> Any:
        """Returns {"features" [B, r], "label" [B]}."""
        return self.kept.gather(indices)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the features and labels."""
        return self.kept.fingerprint


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A network of which only the head is trained.

    Attributes:
      network: The whole network, with its public parameters.
      public: PUBLIC images for the map of the features, or None.
      config: The part `features`, see above.
      root: The workdir.
    """

    network: Pretrained
    public: Examples | None
    config: Any
    root: pathlib.Path

    @property
    def _maps(self) -> bool:
        return self.public is not None and self.config.dimensions > 0

    @functools.cached_property
    def map(self) -> Features | None:
        """The public map of the features."""
        if self.public is None or not self._maps:
            return None
        options = {"dimensions": self.config.dimensions, "whiten": self.config.whiten}
        return Features.from_public(self._features("public", self.public), **options)

    def head(self) -> Head:
        """Returns the trained part, with a head of zeros."""
        width = self.config.dimensions if self._maps else self._width()
        classes = self.network.model.num_classes
        params = {"head": {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}}
        return Head(self.network.model, params, self.network.preprocessing)

    def source(self, role: str, images: Examples) -> FeatureSource:
        """Returns the mapped features of images."""

        def find() -> np.ndarray:
            features = self._features(role, images)
            return self.map(features) if self.map else features

        return FeatureSource(images, find)

    def whole(self, params: Any) -> Any:
        """Returns the parameters of the whole network, from those of the head on mapped
        features.
        """
        head = self.map.fold(params["head"]) if self.map else params["head"]
        return {**self.network.params, "head": head}

    def _width(self) -> int:
        side, channels = self.network.preprocessing.size, len(self.network.preprocessing.mean)
        image = jax.ShapeDtypeStruct((1, side, side, channels), jnp.float32)
        return int(jax.eval_shape(functools.partial(head_inputs, self.network), image).shape[1])

    def _features(self, role: str, images: Examples) -> np.ndarray:
        path = self.root / f"features_{role}.npz"
        if self.config.keep == "workdir" and path.exists():
            stored = read_npz(path, ["features", "of"])
            if str(stored["of"]) == self._of(images):
                return stored["features"]
        compute = jax.jit(functools.partial(head_inputs, self.network))
        features = models.outputs(compute, images, batch_size=_BATCH, label=f"features, {role}")
        if self.config.keep == "workdir":
            write_durably(path, lambda file: np.savez(file, features=features, of=self._of(images)))
        return features

    def _of(self, images: Examples) -> str:
        """Returns the hash of the images and of the network that features belong to."""
        digest = hashlib.sha256(
            f"{images.fingerprint} {self.network.preprocessing} {self.network.model}".encode()
        )
        for leaf in jax.tree.leaves((self.network.params, self.network.constants)):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()


def check(model: Any, private: Any, images: DataSpec) -> None:
    """Refuses a config whose features cannot be kept.

    Args:
      model, private: Parts of a config.
      images: The spec of the private images.

    Raises:
      ValueError: More than the head is trained, there is no checkpoint, or images are augmented.
    """
    frame.known("model.features.keep", [model.features.keep], ("", "memory", "workdir"))
    if not model.features.keep:
        return
    if model.trainable != "head" or model.lora.rank or not models.has_backbone(model):
        raise ValueError(
            "config.model.features.keep needs a checkpoint or 'scattering', of which only the "
            f"head is trained, got config.model.trainable={model.trainable!r}, "
            f"config.model.lora.rank={model.lora.rank} and "
            f"config.model.checkpoint={model.checkpoint!r}. Set config.model.features.keep='' to "
            "train more."
        )
    if private.augmult or images.crop_padding or images.flip:
        raise ValueError(
            "config.model.features.keep needs images without augmentation, whose features are "
            "computed once. Set config.private.augmult=0, config.data.crop_padding=0 and "
            "config.data.flip=False."
        )
