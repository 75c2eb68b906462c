"""The data of a lifecycle: disjoint parts of one data set, some of them private, some under a shift
or from a site.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdp.data import DataSpec, Examples, Groups, Source, resize_images
from jaxdp.data.selection import cut, image_shape, one_each, units
from jaxdp.data.shifts import CLEAN, Shift
from jaxdp.data.spec import open_parts

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
            return sum(map(len, self.stream.values()))
        of_name = {}
        for source in (self.units, self.client, *self.sources):
            of_name[source.name] = len(source)
        return of_name[account]

    def fingerprints(self, name: str) -> list[str]:
        """Returns names and fingerprints of an attribute's records. Fingerprints of private data
        are private.
        """
        part: Any = self.units if name == "private" else getattr(self, name)
        if isinstance(part, Mapping):
            return [f"{name} {source.fingerprint}" for name, source in part.items()]
        sources: Iterable[Any] = [part] if isinstance(part, Source) else part
        return [f"{source.name} {source.fingerprint}" for source in sources]


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
    missing = [role for role in ROLES if not config.parts.get(role)]
    if missing:
        raise ValueError(
            f"config.data.parts must also name {', '.join(missing)}, got {dict(config.parts)}."
        )
    specs = data.specs(config, *ROLES, grouped=True, unit="image")
    sources = open_parts(specs, images=True)
    # The ledger's name, also where the part is of another set of TFDS.
    sources["private"] = dataclasses.replace(sources["private"], name=f"{config.name}/private")
    source_shift = data.shift(config, config.get("source_shift", CLEAN))
    shifts = {domain: data.shift(config, name) for domain, name in _stream(config).items()}
    count = hospitals(config)
    _check_enough(sources, "sources", "sources", count)
    _check_enough(sources, "stream", "stream_shifts", len(shifts))
    return _divided(specs["private"], sources, count, source_shift, shifts)


def _check_enough(sources: Mapping[str, Examples], role: str, field: str, parties: int) -> None:
    """Refuses a role whose one part is to be divided among more parties than it has images."""
    if role in sources and not 1 <= parties <= len(sources[role]):
        raise ValueError(
            f"config.data has {len(sources[role])} images for the {parties} of "
            f"config.data.{field}. Every one needs an image."
        )


def _divided(
    spec: DataSpec,
    sources: Mapping[str, Examples],
    hospitals: int,
    source_shift: Shift,
    shifts: Mapping[str, Shift],
) -> Parts:
    """Returns the parts from the sources by role.

    Args:
      spec: The spec of the private images, for the units of all parts.
      sources: The sources by role.
      hospitals: Their number.
      source_shift: The shift of the hospitals.
      shifts: The shift of each domain of the stream.
    """

    def several(role: str, count: int) -> Sequence[Examples]:
        """Returns the images of each party of a role."""
        if role in sources:
            return cut(sources[role], count, group=spec.group)
        return [sources[f"{role} {k}"] for k in range(count)]

    def by_unit(images: Examples, shift: Shift, name: str) -> Examples | Groups:
        shown = _shifted(images, shift, name)
        return units(images, spec.group, max_records=spec.max_records, computed=shown)

    training = sources["private"]
    test = sources["test"]
    upload = one_each(sources["client"], spec.group)
    side, _, channels = image_shape(training)
    of_hospitals = []
    for k, images in enumerate(several("sources", hospitals)):
        of_hospitals.append(by_unit(images, source_shift, f"hospital {k}"))
    stream, stream_test = {}, {}
    of_domains = several("stream", len(shifts))
    for (domain, shift), images in zip(shifts.items(), of_domains, strict=True):
        stream[domain] = by_unit(images, shift, "stream")
        stream_test[domain] = _shifted(test, shift, test.name)
    return Parts(
        public=resize_images(sources["public"], side, channels),
        private=training,
        sources=tuple(of_hospitals),
        stream=stream,
        client=dataclasses.replace(upload, name="clinic"),
        test=test,
        source_test={source_shift.name: _shifted(test, source_shift, test.name)},
        stream_test=stream_test,
        units=units(training, spec.group, max_records=spec.max_records),
        unit=spec.unit,
    )


def _shifted(images: Examples, shift: Shift, name: str) -> Examples:
    """Returns images under a shift, computed once."""
    if shift.name == CLEAN:
        return dataclasses.replace(images, name=name)
    return data.in_memory(data.under(images, shift), name)


def unit_of(config: Any) -> str:
    """Returns the unit of privacy in the ledger."""
    return str(data.terms(config, unit="image")["unit"])


def hospitals(config: Any) -> int:
    """Returns the number of hospitals: the parts of the role "sources", or `sources` if they share
    one part.
    """
    sources = config.parts.sources
    return len(sources) if isinstance(sources, list | tuple) else config.sources


def _stream(config: Any) -> dict[str, str]:
    """Returns the shift of each domain of the stream. Several parts are real domains, under no
    artificial shift.
    """
    streams = config.parts.stream
    if isinstance(streams, list | tuple):
        names = [pathlib.Path(str(part)).stem for part in streams]
        if len(set(names)) < len(names):  # splits of two sets, or files of two folders
            names = [str(part) for part in streams]
        return dict.fromkeys(names, CLEAN)
    return {shift: shift for shift in config.get("stream_shifts", (CLEAN,))}
