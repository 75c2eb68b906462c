"""The data of a lifecycle: disjoint parts of one data set, some of them private, some under a shift."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdp import data

PARTS = ("public", "private", "sources", "stream", "client", "test")


class Parts(NamedTuple):
    """Who holds what; no record is in two of them.

    Attributes:
      public: anybody's, to pre-train on.
      private: the training set, "<name>/private" in the ledger.
      sources: the hospitals that recalibrate, "hospital 0", ... in the ledger; their images are under one shift.
      stream: images that come while the model is in use, "stream" in the ledger, by the shift that they are under.
      client: images whose owner uploads noisy representations of them, "clinic" in the ledger.
      test: held out and public, which every figure of quality is measured on.
      source_test: the test images by the shift of the sources.
      stream_test: the test images by each shift of the stream.
    """

    public: data.Source
    private: data.Source
    sources: tuple[data.Source, ...]
    stream: dict[str, data.Source]
    client: data.Source
    test: data.Source
    source_test: dict[str, data.Source]
    stream_test: dict[str, data.Source]

    def records(self, account: str) -> int:
        """The public number of images behind an account of the ledger."""
        if account == "stream":
            return sum(len(images) for images in self.stream.values())
        return {source.name: len(source) for source in (self.private, self.client, *self.sources)}[account]

    def fingerprints(self, name: str) -> list[str]:
        """Of the records of one of the attributes, with their names. Of private data: to be kept beside the data."""
        part = getattr(self, name)
        if isinstance(part, data.Source):
            part = [part]
        named = part.items() if isinstance(part, Mapping) else [(source.name, source) for source in part]
        return [f"{name} {source.fingerprint}" for name, source in named]


def load(config: Any) -> Parts:
    """Reads and divides the data; which record is in which part does not depend on the records.

    Args:
      config: the `data` part of a lifecycle's config, whose comments say what each field means.

    Raises:
      FileNotFoundError: the data is not there; the message says how to get it.
      ValueError: the parts do not fit the data, or two of them share a record.
    """
    public, private, held, arriving, client, test = _parts(config).values()
    side, _, channels = private.arrays["image"].shape[1:]
    shifts = tuple(config.stream_shifts)
    if not 1 <= config.sources <= len(held) or not 1 <= len(shifts) <= len(arriving):
        raise ValueError(
            f"config.data has {len(held)} images for config.data.sources={config.sources} sources and {len(arriving)} "
            f"for the {len(shifts)} of config.data.stream_shifts; every one needs an image."
        )
    hospitals = {f"hospital {k}": images for k, images in enumerate(_cut(held, config.sources))}
    stream = dict(zip(shifts, _cut(arriving, len(shifts)), strict=True))
    corrupted = functools.partial(_corrupted, severity=config.severity)
    return Parts(
        public=data.resize_images(public, side, channels),
        private=dataclasses.replace(private, name=f"{config.name}/private"),
        sources=tuple(corrupted(images, config.source_shift, name=name) for name, images in hospitals.items()),
        stream={shift: corrupted(images, shift, name="stream") for shift, images in stream.items()},
        client=dataclasses.replace(client, name="clinic"),
        test=test,
        source_test={config.source_shift: corrupted(test, config.source_shift)},
        stream_test={shift: corrupted(test, shift) for shift in shifts},
    )


def _parts(config: Any) -> dict[str, data.Source]:
    wanted = {name: config.parts[name] for name in PARTS}
    if config.source == "tfds":
        if not all(isinstance(where, str) and "/" in where for where in wanted.values()):
            raise ValueError(f"config.data.parts must name TFDS splits, such as 'cifar10/train[:500]'; got {wanted}.")
        data_dir = config.get("data_dir") or None
        read = {part: where.rpartition("/")[::2] for part, where in wanted.items()}
        data.check_disjoint({f"config.data.parts.{part}": (*where, data_dir) for part, where in read.items()})
        return {part: data.from_tfds(name, split, data_dir=data_dir) for part, (name, split) in read.items()}
    if config.source != "bundled":
        raise ValueError(f"config.data.source must be 'bundled' or 'tfds', got {config.source!r}.")
    whole = data.bundled(config.name)
    if "image" not in whole.arrays:
        raise ValueError(f"config.data.name must be a bundled set of images, got {config.name!r}.")
    if min(wanted.values()) < 1 or sum(wanted.values()) > len(whole):
        raise ValueError(
            f"config.data.parts must be numbers of images >= 1 that add up to at most {len(whole)}, the images of "
            f"{config.name!r}; got {wanted}."
        )
    cut = whole.split([count / len(whole) for count in wanted.values()], seed=config.split_seed)
    return dict(zip(wanted, cut, strict=True))


def _cut(source: data.Source, pieces: int) -> list[data.Source]:
    return [source.take(rows) for rows in np.array_split(np.arange(len(source)), pieces)]


def _corrupted(source: data.Source, shift: str, *, severity: int, name: str = "") -> data.Source:
    """Corrupts the images once, here, rather than whenever one is read."""
    columns = data.corrupt(source, shift, severity=severity).gather(np.arange(len(source)))
    image = np.rint(255 * columns["image"]).astype(np.uint8)
    return data.from_arrays(
        image=image, label=columns["label"], num_classes=source.num_classes, name=name or source.name
    )
