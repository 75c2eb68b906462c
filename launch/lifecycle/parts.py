"""The data of a lifecycle: disjoint parts of one data set, some of them private, some under a shift
or from a site.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdp import data as sources
from jaxdp.data import Examples, Groups, Source

from .. import data


class Parts(NamedTuple):
    """Disjoint parts of the data by holder.

    Attributes:
      public: Public images for pre-training.
      private: The images of the training set, "<name>/private" in the ledger.
      sources: The hospitals that recalibrate, "hospital 0", ... in the ledger, by unit of privacy.
        Their images may be under one shift.
      stream: Images that arrive while the model is in use, by their shift or part, each by unit of
        privacy. "stream" in the ledger.
      client: Images whose owner uploads noisy representations of them. "clinic" in the ledger.
        Where owners of several images are protected, it has the first image of each.
      test: Held-out public images, on which all quality is measured.
      source_test: The test images by the shift of the sources.
      stream_test: The test images by each shift of the stream, or by its parts.
      units: The training set by unit of privacy: `private`, or the owners with all of their images.
      unit: The unit of privacy of all private parts.
    """

    public: Examples
    private: Examples
    sources: tuple[Examples | Groups, ...]
    stream: dict[str, Examples | Groups]
    client: Examples
    test: Examples
    source_test: dict[str, Examples]
    stream_test: dict[str, Examples]
    units: Examples | Groups
    unit: str

    def records(self, account: str) -> int:
        """Returns the public number of units behind an account of the ledger."""
        if account == "stream":
            return sum(len(images) for images in self.stream.values())
        return {source.name: len(source) for source in (self.units, self.client, *self.sources)}[
            account
        ]

    def fingerprints(self, name: str) -> list[str]:
        """Returns names and fingerprints of an attribute's records. Fingerprints of private data
        are private.
        """
        part = self.units if name == "private" else getattr(self, name)
        if isinstance(part, Source):
            part = [part]
        named = (
            part.items()
            if isinstance(part, Mapping)
            else [(source.name, source) for source in part]
        )
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
    if missing := [role for role in ROLES if not config.parts.get(role)]:
        raise ValueError(
            f"config.data.parts must also name {', '.join(missing)}, got {dict(config.parts)}."
        )
    found = data.parts(config, *ROLES, grouped=True)
    data.require_images(found)
    shifts, source_shift, test = (
        _stream(config),
        config.get("source_shift", data.CLEAN),
        found["test"],
    )
    side, _, channels = data.image_shape(found["private"])
    for field, count, role in (
        ("sources", hospitals(config), "sources"),
        ("stream_shifts", len(shifts), "stream"),
    ):
        if role in found and not 1 <= count <= len(found[role]):
            raise ValueError(
                f"config.data has {len(found[role])} images for the {count} of "
                f"config.data.{field}. Every one needs an image."
            )

    training = dataclasses.replace(found["private"], name=f"{config.name}/private")

    def several(role: str, count: int) -> Sequence[Examples]:
        return (
            data.cut(config, found[role], count)
            if role in found
            else [found[f"{role} {k}"] for k in range(count)]
        )

    def shifted(source: Examples, shift: str, name: str = "") -> Examples:
        name = name or source.name
        if shift == data.CLEAN:
            return dataclasses.replace(source, name=name)
        return data.in_memory(data.under(source, config, shift), name)

    def by_unit(source: Examples, shift: str, name: str) -> Examples | Groups:
        return data.units(config, source, shifted(source, shift, name))

    held = several("sources", hospitals(config))
    stream = zip(shifts.items(), several("stream", len(shifts)), strict=True)
    return Parts(
        public=sources.resize_images(found["public"], side, channels),
        private=training,
        sources=tuple(
            by_unit(images, source_shift, f"hospital {k}") for k, images in enumerate(held)
        ),
        stream={domain: by_unit(images, shift, "stream") for (domain, shift), images in stream},
        client=dataclasses.replace(data.one_each(config, found["client"]), name="clinic"),
        test=test,
        source_test={source_shift: shifted(test, source_shift)},
        stream_test={domain: shifted(test, shift) for domain, shift in shifts.items()},
        units=data.units(config, training),
        unit=unit_of(config),
    )


def unit_of(config: Any) -> str:
    """Returns the unit of privacy in the ledger."""
    return str(data.terms(config, unit="image")["unit"])


def hospitals(config: Any) -> int:
    """Returns the number of hospitals: the parts of the role "sources", or `sources` if they share
    one part.
    """
    given = config.parts.sources
    return len(given) if isinstance(given, list | tuple) else config.sources


def _stream(config: Any) -> dict[str, str]:
    """Returns the shift of each domain of the stream. Several parts are real domains, under no
    artificial shift.
    """
    given = config.parts.stream
    if isinstance(given, list | tuple):
        return {pathlib.Path(str(part)).stem: data.CLEAN for part in given}
    return {shift: shift for shift in config.get("stream_shifts", (data.CLEAN,))}
