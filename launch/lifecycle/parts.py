"""The data of a lifecycle: disjoint parts of one data set, some of them private, some under a shift."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp import data as sources
from jaxdp.data import Examples

from .. import data


class Parts(NamedTuple):
    """Disjoint parts of the data by holder.

    Attributes:
      public: Public images for pre-training.
      private: The training set, "<name>/private" in the ledger.
      sources: The hospitals that recalibrate, "hospital 0", ... in the ledger. Their images are under one shift.
      stream: Images that arrive while the model is in use, by their shift. "stream" in the ledger.
      client: Images whose owner uploads noisy representations of them. "clinic" in the ledger.
      test: Held-out public images, on which all quality is measured.
      source_test: The test images by the shift of the sources.
      stream_test: The test images by each shift of the stream.
    """

    public: Examples
    private: Examples
    sources: tuple[Examples, ...]
    stream: dict[str, Examples]
    client: Examples
    test: Examples
    source_test: dict[str, Examples]
    stream_test: dict[str, Examples]

    def records(self, account: str) -> int:
        """Returns the public number of images behind an account of the ledger."""
        if account == "stream":
            return sum(len(images) for images in self.stream.values())
        return {source.name: len(source) for source in (self.private, self.client, *self.sources)}[account]

    def fingerprints(self, name: str) -> list[str]:
        """Returns names and fingerprints of an attribute's records. Fingerprints of private data are private."""
        part = getattr(self, name)
        if isinstance(part, Examples):
            part = [part]
        named = part.items() if isinstance(part, Mapping) else [(source.name, source) for source in part]
        return [f"{name} {source.fingerprint}" for name, source in named]


# A config divides the data into these. The other fields are some of these under a shift.
ROLES = Parts._fields[:6]


def load(config: Any) -> Parts:
    """Returns the parts of the data. The division does not depend on the records.

    Args:
      config: The `data` part of a lifecycle's config, whose comments explain each field.

    Raises:
      FileNotFoundError: The data is missing. The message says how to get it.
      ValueError: The parts do not fit the data, or two of them share a record.
    """
    found = data.parts(config, *ROLES)
    if missing := [role for role in ROLES if role not in found]:
        raise ValueError(f"config.data.parts must also name {', '.join(missing)}, got {dict(config.parts)}.")
    data.require_images(found)
    held, arriving, test = found["sources"], found["stream"], found["test"]
    side, _, channels = found["private"].arrays["image"].shape[1:]
    shifts = tuple(config.stream_shifts)
    if not 1 <= config.sources <= len(held) or not 1 <= len(shifts) <= len(arriving):
        raise ValueError(
            f"config.data has {len(held)} images for config.data.sources={config.sources} sources and {len(arriving)} "
            f"for the {len(shifts)} of config.data.stream_shifts. Every one needs an image."
        )
    hospitals = {f"hospital {k}": images for k, images in enumerate(data.cut(held, config.sources))}
    stream = dict(zip(shifts, data.cut(arriving, len(shifts)), strict=True))

    def corrupted(source: Examples, shift: str, name: str = "") -> Examples:
        return data.in_memory(data.under(source, config, shift), name or source.name)

    return Parts(
        public=sources.resize_images(found["public"], side, channels),
        private=dataclasses.replace(found["private"], name=f"{config.name}/private"),
        sources=tuple(corrupted(images, config.source_shift, name) for name, images in hospitals.items()),
        stream={shift: corrupted(images, shift, "stream") for shift, images in stream.items()},
        client=dataclasses.replace(found["client"], name="clinic"),
        test=test,
        source_test={config.source_shift: corrupted(test, config.source_shift)},
        stream_test={shift: corrupted(test, shift) for shift in shifts},
    )
