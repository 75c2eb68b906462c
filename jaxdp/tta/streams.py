"""Streams of test batches: the batch of each record, and the resets of an evaluation.

    stream = Stream({"gaussian_noise": noisy, "fog": foggy}, batch_size=64, seed=0)
    for batch in stream:
        ...  # batch.images, batch.labels, batch.mask, batch.reset, batch.units

A domain is a source under one condition (a corruption, a site). `Stream` has the protocols of the
test-time adaptation papers as orders and reset rules. Continual protocols never reset. Episodic
protocols reset before each corruption ("domain") or each batch ("batch"). The other protocols mix
all domains, or shift the labels.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from jaxdp.data import Source, check_source, identifiers, read_column
from jaxdp.data.order import shuffled
from jaxdp.files import check_choice

Order = Literal["continual", "mixed", "label_shifted"]
Reset = Literal["never", "domain", "batch"]
Remainder = Literal["drop", "pad"]
Unit = Literal["photograph", "sample"]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """One batch of a stream. The first m = mask.sum() rows are records, the others padding.

    Attributes:
      images: float32 [B, H, W, C], zeros in padding.
      labels: int32 [B], -1 in padding. They are for evaluation only, adaptation never reads them.
      mask: bool [B], False for padding. The divisor of an update stays the public B.
      domains: [m], the name of each record's domain.
      positions: int64 [m], the position of each record in its domain.
      units: [m], the unit of each record, an identifier (`jaxdp.data.ids`), see `Stream.units`.
      reset: Whether the model is reset to its source parameters before this batch.

    Raises:
      ValueError: units, domains or positions do not name every record, so some record would not be
          charged.
    """

    images: np.ndarray = dataclasses.field(repr=False)
    labels: np.ndarray = dataclasses.field(repr=False)
    mask: np.ndarray = dataclasses.field(repr=False)
    domains: tuple[str, ...] = dataclasses.field(repr=False)
    positions: np.ndarray = dataclasses.field(repr=False)
    units: tuple[Hashable, ...] = dataclasses.field(repr=False)
    reset: bool

    def __post_init__(self) -> None:
        records = int(np.sum(self.mask))
        for name in ("units", "domains", "positions"):
            count = len(getattr(self, name))
            if count != records:
                raise ValueError(
                    f"{name} must name each of the {records} records under mask, got {count}."
                )

    def visitors(self, unit: Unit) -> tuple[Hashable, ...]:
        """Returns the [m] ids that an account charges.

        They are `units` for "photograph", and pairs (domain, position) for "sample".
        """
        check_choice("unit", unit, Unit)
        if unit == "photograph":
            return self.units
        return tuple(zip(self.domains, self.positions.tolist(), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Batches of one fixed size from one or several domains. Every record comes at most once.

    Orders:
      "continual": Domain after domain, each shuffled by the same seed. No batch spans two domains.
      "mixed": The records of all domains shuffled together.
      "label_shifted": As "continual", but each domain has one phase for each class in turn. A
        record is in the phase of its class with odds `imbalance` : 1 against each other phase,
        independently of other records. The order in a phase is random. Infinite odds give strictly
        one class after another, odds of 1 give "continual".

    Attributes:
      domains: {name: source} in stream order, with one image shape and one number of classes.
        Without a column "label" the labels of batches are -1.
      batch_size: B >= 1, the size of every batch and the public divisor of its update.
      order: See above.
      reset: "never", "domain" or "batch". "domain" resets before the first batch of every domain
        ("episodic" in the papers on ImageNet-C). "batch" resets before every batch (Tent's flag
        EPISODIC), so it has an effect only if predictions follow the update.
      seed: A public non-negative int below 2**128.
      remainder: The treatment of the last n mod B records of a domain (of the stream, if mixed).
        "drop" drops them, as in the papers. "pad" fills the batch with masked rows.
      imbalance: The odds >= 1 of a "label_shifted" stream.
      units: The public units, for example the patients of scans: [n], of position i in every
        domain, or {domain: [n]} if domains hold different photographs. They are identifiers
        (`jaxdp.data.ids`): texts, compared as bytes after NFC and without outer blanks, or whole
        numbers, or tuples of them. The default is the position. If domains hold different
        photographs, each of another unit, protect the unit "sample" instead.

    Raises:
      ValueError: On construction, if a value is out of range, a unit is missing or a domain yields
          no batch.
      TypeError: On construction, if a unit is no identifier, such as floating point.

    Formal guarantees:
      - The batch of each position, the number of batches and the resets depend only on the numbers
        of records, the public seed and the fields of this class. Batches are disjoint and of fixed
        size, as parallel composition over a stream needs. Replacing the contents of a record moves
        no record.
      - "label_shifted" is the exception, because it reads labels. It models a stream that arrives
        in this order. It is sound if the order is taken as given, like arrival times. To sort,
        route, reject or de-duplicate private records by their contents is a separate release that
        no account here sees.
      - Adding or removing a record shifts all later records across batch boundaries. Neighbours are
        therefore streams that differ in the contents of one unit ("replace_one", "zero_out"), never
        in length.
      - Each record comes once, but a unit may come back. By default position i is the same
        photograph i in every domain, as in ImageNet-C and CIFAR-10-C. Its 15 corruptions are 15
        visits.
    """

    domains: Mapping[str, Source]
    _: dataclasses.KW_ONLY
    batch_size: int = 64
    order: Order = "continual"
    reset: Reset = "never"
    seed: int
    remainder: Remainder = "drop"
    imbalance: float = math.inf
    units: Sequence[Hashable] | Mapping[str, Sequence[Hashable]] | None = dataclasses.field(
        default=None, repr=False
    )

    def __post_init__(self) -> None:
        check_choice("order", self.order, Order)
        check_choice("reset", self.reset, Reset)
        check_choice("remainder", self.remainder, Remainder)
        self._check_numbers()
        self._check_domains()
        self._check_units()
        names = ["the stream"] if self.order == "mixed" else list(self.domains)
        for name, batches in zip(names, self._sections, strict=True):
            if not batches:
                raise ValueError(
                    f"{name!r} has too few records for batch_size={self.batch_size}. Use a smaller "
                    "batch_size, or remainder='pad'."
                )

    def _check_numbers(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}.")
        if not 0 <= self.seed < 2**128:
            raise ValueError(f"seed must be in [0, 2**128), got {self.seed}.")
        if not self.imbalance >= 1:
            raise ValueError(f"imbalance must be at least 1, got {self.imbalance}.")
        if self.imbalance < math.inf and self.order != "label_shifted":
            raise ValueError(
                f"imbalance={self.imbalance} needs order='label_shifted', got order={self.order!r}."
            )
        if self.order == "mixed" and self.reset == "domain":
            raise ValueError(
                "reset='domain' has no meaning with order='mixed'. Use reset='never' or 'batch'."
            )

    def _check_domains(self) -> None:
        if not self.domains:
            raise ValueError("domains must hold at least one source.")
        classes = [getattr(source, "num_classes", 0) for source in self.domains.values()]
        if len({*zip(self._shapes, classes, strict=True)}) > 1:
            raise ValueError(
                f"domains must have one image shape and number of classes, got {self._shapes} and "
                f"{classes}."
            )
        if self.order == "label_shifted" and not classes[0]:
            raise ValueError(
                "order='label_shifted' needs domains with a column 'label' and num_classes."
            )

    def _check_units(self) -> None:
        sizes = {name: len(source) for name, source in self.domains.items()}
        if self.units is None:
            return
        if not isinstance(self.units, Mapping):
            longest = max(sizes.values())
            if len(self.units) != longest:
                raise ValueError(
                    f"units must name each of the {longest} positions, got {len(self.units)}."
                )
            identifiers(self.units, "units")
            return
        lengths = {name: len(units) for name, units in self.units.items()}
        if sizes != lengths:
            raise ValueError(
                f"units must name each position of each domain, {sizes}, got {lengths}."
            )
        for units in self.units.values():
            identifiers(units, "units")

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, range(len(self)))

    def batch(self, index: int) -> Batch:
        """Returns batch `index` in [0, len(stream)) and reads the images of that batch only."""
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}.")
        rows, reset = self._schedule[index]
        domain_numbers, positions = rows.T
        sources = list(self.domains.values())
        images = np.zeros((self.batch_size, *self._shapes[0]), np.float32)
        labels = np.full(self.batch_size, -1, np.int32)
        for number in np.unique(domain_numbers):
            here = np.flatnonzero(domain_numbers == number)
            examples = sources[number].gather(positions[here])
            images[here] = examples["image"]
            labels[here] = examples.get("label", -1)
        mask = np.arange(self.batch_size) < len(rows)
        return self._batch(images, labels, mask, rows, reset)

    def visitors(self, unit: Unit) -> Iterator[tuple[Hashable, ...]]:
        """Yields `Batch.visitors` of every batch. Reads no image."""
        nothing = np.zeros(0, np.float32)
        for rows, reset in self._schedule:
            mask = np.ones(len(rows), bool)
            yield self._batch(nothing, nothing, mask, rows, reset).visitors(unit)

    @property
    def resets(self) -> tuple[bool, ...]:
        """Whether the model is reset before each batch. Reads no image."""
        return tuple(reset for _, reset in self._schedule)

    def _batch(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mask: np.ndarray,
        rows: np.ndarray,
        reset: bool,
    ) -> Batch:
        """Returns the batch of rows (domain number, position), int64 [m, 2]."""
        domain_numbers, positions = rows.T
        names = list(self.domains)
        domains = tuple(names[number] for number in domain_numbers)
        units: Sequence[Hashable]
        if self.units is None:
            units = positions.tolist()
        elif isinstance(self.units, Mapping):
            units = [self.units[name][i] for name, i in zip(domains, positions, strict=True)]
        else:
            units = [self.units[i] for i in positions]
        return Batch(images, labels, mask, domains, positions, tuple(units), reset)

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        """The shape of an image of each domain."""
        shapes = []
        for name, source in self.domains.items():
            example = check_source(source, "image", argument=f"domains[{name!r}]")
            shapes.append(example["image"].shape)
        return shapes

    @functools.cached_property
    def _schedule(self) -> list[tuple[np.ndarray, bool]]:
        """The rows (domain number, position) of each batch, int64 [m, 2], and whether it resets."""
        schedule = []
        for batches in self._sections:
            for number, rows in enumerate(batches):
                first_of_domain = self.reset == "domain" and number == 0
                schedule.append((rows, self.reset == "batch" or first_of_domain))
        return schedule

    @functools.cached_property
    def _sections(self) -> list[list[np.ndarray]]:
        """The batches of each section: a domain, or the whole stream if mixed.

        No batch spans two sections.
        """
        sections = []
        for number, source in enumerate(self.domains.values()):
            positions = self._order_of(source)
            sections.append(np.stack([np.full_like(positions, number), positions], axis=1))
        if self.order == "mixed":
            rows = np.concatenate(sections)
            sections = [rows[shuffled(len(rows), seed=self.seed)]]
        return [self._cut(rows) for rows in sections]

    def _order_of(self, source: Source) -> np.ndarray:
        """Returns the positions of a domain in their order."""
        match self.order:
            case "continual":
                return shuffled(len(source), seed=self.seed)
            case "mixed":  # all domains are shuffled together later
                return np.arange(len(source))
            case "label_shifted":
                return self._label_shifted(source)

    def _cut(self, rows: np.ndarray) -> list[np.ndarray]:
        stop = len(rows)
        if self.remainder == "drop":
            stop -= len(rows) % self.batch_size
        starts = range(0, stop, self.batch_size)
        return [rows[start : min(stop, start + self.batch_size)] for start in starts]

    def _label_shifted(self, source: Source) -> np.ndarray:
        labels = read_column(source, "label")
        classes = getattr(source, "num_classes", 0)
        count = len(labels)
        order = shuffled(count, seed=self.seed)
        # The shuffle uses the first `count` words. Later words make phases independent of the order
        # in a phase.
        _, stray_words, phase_words = _words(self.seed, 3 * count).reshape(3, count)
        # Each other class is `imbalance` times less likely than the own one.
        in_own_phase = 1 / (1 + (classes - 1) / self.imbalance)  # the probability
        uniform = (stray_words >> np.uint64(11)) * 2.0**-53  # 53 bits fit a float64
        # A single class has no other phase, and `in_own_phase` is 1.
        others = np.uint64(max(classes - 1, 1))
        other = 1 + (phase_words % others).astype(np.int64)
        phase = (labels + np.where(uniform >= in_own_phase, other, 0)) % classes
        # A stable sort keeps the random order within a phase.
        return order[np.argsort(phase[order], kind="stable")]


def _words(seed: int, count: int) -> np.ndarray:
    """Returns public random uint64 [count].

    NumPy guarantees that the raw stream of a bit generator never changes.
    """
    return np.random.Philox(key=seed).random_raw(count)
