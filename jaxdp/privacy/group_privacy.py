"""Epsilon for several units at once, such as the m members of a family (group privacy).

A release of a sum, of which m units move at most m norms, has a rule of its own: its noise counts
1/m-fold. All releases about one unit are replaced by such events, and their losses are composed.

    event                             for m units
    Gaussian, Laplace (s)             the same with s / m
    DiscreteLaplace (rate, k)         the same with m k
    PoissonSampled (q, Gaussian (s))  OwnedGaussian (q, s, m), not under "replace_one"
    OwnedGaussian (q, s, k)           OwnedGaussian (q, s, m k)
    ZCDp (rho, xi)                    ZCDp (m^2 rho, m H_m xi), H_m = 1 + 1/2 + ... + 1/m
                                      (Bun and Steinke 2016, proposition 27)
    any other of pure epsilon e       Pure (m e)

Where an event has no such rule, the whole is converted (Vadhan 2017, lemma 2.2):

    (epsilon, delta) for one unit is (m epsilon, (1 + e^epsilon + ... + e^((m-1) epsilon)) delta)

for m units, at the best epsilon on a grid.

Under "add_remove" the m units leave one after the other. Truncated batches cost each of them
something else, so the lemma takes the largest delta of m data sets of n, n - 1, ... records. Here n
is the public number of examples, which counts the m units (docs/design/proofs.md, proof 8).

The rule of Poisson samples also holds for units in several groups of cyclic Poisson sampling, with
independent noise. With correlated noise it has no proof for them, so `CorrelatedSampleDpEvent` has
no rule. docs/design/proofs.md, proof 6, has both.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.files import shown
from jaxdp.files.text import finite, indented, up
from jaxdp.privacy.accounting import epsilon_of_counts
from jaxdp.privacy.events import (
    CorrelatedSampleDpEvent,
    Counts,
    DiscreteLaplaceDpEvent,
    DpEvent,
    GaussianDpEvent,
    LabelDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    OwnedGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    UnprovenDpEvent,
    ZCDpEvent,
)
from jaxdp.privacy.explanations import compositions_of, terms_of
from jaxdp.privacy.relations import LABELS, Adjacency
from jaxdp.privacy.rules import is_boundless, leaf_pure_epsilon, leaf_rules, pure_epsilon
from jaxdp.privacy.spent_epsilon import deltas_of, epsilon_of
from jaxdp.privacy.terms import Dataset
from jaxdp.privacy.units import unit_words

# The sizes of families in reports.
SIZES = (2, 3, 5, 10)
# A conversion multiplies delta by up to exp(m epsilon), so it starts from far smaller ones.
_LEAST = 1e-60
_POINTS = 2000
# After these, the smallest delta with a finite epsilon is known to a twentieth of a power of ten.
_HALVINGS = 10


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """What holds for the members of one group together.

    Attributes:
        size: m, the number of units.
        epsilon: Epsilon of everything for all of them, at the table's delta.
        is_composed: Whether the losses of m units are composed. Otherwise epsilon comes from the
            conversion, and is usually far larger.
    """

    size: int
    epsilon: float
    is_composed: bool


@dataclasses.dataclass(frozen=True)
class GroupPrivacy:
    """What everything reserved tells about several units, as `Ledger.group_privacy` returns it.

    Attributes:
        dataset: The name of the dataset.
        unit: The unit of privacy.
        delta: The delta of every epsilon.
        groups: One row for each size, ascending.
    """

    dataset: str
    unit: str
    delta: float
    groups: tuple[GroupRow, ...]

    def rows(self) -> list[dict[str, float]]:
        """Returns the table as rows with "size", "epsilon" and "delta", for CSV."""
        return [
            {"size": row.size, "epsilon": row.epsilon, "delta": self.delta} for row in self.groups
        ]

    def as_dict(self) -> dict[str, Any]:
        """Returns the table as plain data for JSON, with None for infinity."""
        return dict(finite(dataclasses.asdict(self)))

    def text(self) -> str:
        """Returns the table for people."""
        many = unit_words(shown(self.unit)).many
        lines = [f"{shown(self.dataset)}: several {many} together, at delta {self.delta:g}"]
        table = [[many, "epsilon", "by"]]
        for row in self.groups:
            way = "losses" if row.is_composed else "conversion"
            table.append([str(row.size), up(row.epsilon), way])
        return "\n".join([*lines, *indented(table)])


def check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns sizes of groups, ascending. Raises ValueError unless they are whole numbers >= 1."""
    if not sizes or not all(type(size) is int and 1 <= size <= 1000 for size in sizes):
        raise ValueError(
            f"sizes must be whole numbers from 1 to 1000, such as {SIZES}, got {sizes!r}."
        )
    return tuple(sorted(set(sizes)))


def group_privacy_of(
    dataset: Dataset, compositions: Sequence[Counts], delta: float, sizes: Sequence[int]
) -> GroupPrivacy:
    """Returns the table of a dataset, for the worst of several compositions."""
    tables = [_epsilons(dataset, counts, delta, sizes) for counts in compositions]
    groups = []
    for place, size in enumerate(sizes):
        rows = [table[place] for table in tables]
        epsilon = max(row.epsilon for row in rows)
        groups.append(GroupRow(size, epsilon, all(row.is_composed for row in rows)))
    return GroupPrivacy(dataset.name, dataset.unit, delta, tuple(groups))


def _epsilons(
    dataset: Dataset, counts: Counts, delta: float, sizes: Sequence[int]
) -> list[GroupRow]:
    """Returns the rows of one composition."""
    rows = []
    for size in sizes:
        of_group = _counts_of_group(counts, size, dataset)
        if of_group is None:
            rows.append(GroupRow(size, _converted(dataset, counts, delta, size), False))
            continue
        adjacency = _adjacency_of_group(of_group, dataset.adjacency)
        # Of a dataset by RDP too: the losses of several records of a sample have no rule there.
        bound = epsilon_of_counts(of_group, delta=delta, adjacency=adjacency, method="auto")
        rows.append(GroupRow(size, bound, True))
    return rows


# --- Rules of events ----------------------------------------------------------------------------


def _counts_of_group(counts: Counts, size: int, dataset: Dataset) -> Counts | None:
    """Returns the releases as they are about `size` units, or None if one has no rule."""
    if dataset.accounting == "renyi_filter":
        return None  # Its events may depend on earlier outputs.
    of_group: Counts = Counter()
    for leaf, count in counts.items():
        leaf_of_group = _leaf_of_group(leaf, size, dataset.adjacency)
        if leaf_of_group is None:
            return None
        of_group[leaf_of_group] += count
    adjacency = _adjacency_of_group(of_group, dataset.adjacency)
    return of_group if all(leaf_rules(leaf, adjacency) for leaf in of_group) else None


def _adjacency_of_group(counts: Counts, adjacency: Adjacency) -> Adjacency:
    """Returns the relation of the pairs of a group.

    The events of `_leaf_of_group` have the same pairs for records that leave and for zeros. The
    ledger itself charges `OwnedGaussianDpEvent` for zeros only.
    """
    has_owned = any(isinstance(leaf, OwnedGaussianDpEvent) for leaf in counts)
    return "zero_out" if has_owned else adjacency


def _leaf_of_group(leaf: DpEvent, size: int, adjacency: Adjacency) -> DpEvent | None:
    """Returns a leaf as it is about `size` units, or None if it has no rule."""
    match leaf:
        case NonPrivateDpEvent() | UnprovenDpEvent():
            return leaf
        case GaussianDpEvent() | LaplaceDpEvent():
            return type(leaf)(leaf.noise_multiplier / size)
        case DiscreteLaplaceDpEvent():
            return DiscreteLaplaceDpEvent(leaf.noise_parameter, size * leaf.sensitivity)
        case OwnedGaussianDpEvent(sampling_probability=q, noise_multiplier=sigma):
            return OwnedGaussianDpEvent(q, sigma, size * leaf.records)
        case ZCDpEvent(rho=rho, xi=xi):
            harmonic = math.fsum(1 / i for i in range(1, size + 1))
            return ZCDpEvent(size**2 * rho, size * harmonic * xi)
        case CorrelatedSampleDpEvent():
            return leaf if size == 1 else None
        case PoissonSampledDpEvent(sampling_probability=q, event=GaussianDpEvent() as inner):
            if adjacency != "replace_one":
                return OwnedGaussianDpEvent(q, inner.noise_multiplier, size)
    pure = size * leaf_pure_epsilon(leaf, adjacency)
    if pure == math.inf:
        return None
    return LabelDpEvent(pure) if adjacency == LABELS else PureDpEvent(pure)


# --- Conversion ---------------------------------------------------------------------------------


def _converted(dataset: Dataset, counts: Counts, delta: float, size: int) -> float:
    """Returns epsilon for `size` units, from the curve of deltas of one unit."""
    epsilons, deltas = _curve(dataset, counts, delta, size)
    powers = np.arange(size)[:, None] * epsilons
    with np.errstate(divide="ignore", over="ignore"):
        # 1 + e^epsilon + ... + e^((m-1) epsilon), in logarithms.
        log_deltas = np.log(deltas) + np.logaddexp.reduce(powers, axis=0)
        is_enough = log_deltas <= np.log(delta)
    if not is_enough.any():
        return math.inf
    return float(size * epsilons[np.argmax(is_enough)])  # the first that is enough


def _curve(
    dataset: Dataset, counts: Counts, delta: float, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ascending epsilons and their deltas for any one of the units that leave in turn."""
    last = math.inf
    if dataset.accounting != "renyi_filter":
        last = pure_epsilon(counts, dataset.adjacency)
    if delta > 0:
        least, bound = _smallest(dataset, counts, delta)
        last = min(last, bound)
    if last == math.inf:
        return np.zeros(1), np.ones(1)
    # Small epsilons are the likely ones.
    epsilons = last * np.linspace(0, 1, _POINTS) ** 2
    # Among the epsilons only the last one, which is pure, has delta 0.
    if delta == 0:
        return epsilons[-1:], np.zeros(1)
    after = {frozenset(_after_leaving(counts, left).items()) for left in range(size)}
    if dataset.adjacency != "add_remove" or len(after) == 1:
        return epsilons, deltas_of(dataset, counts, epsilons, least)
    curves = [deltas_of(dataset, Counter(dict(each)), epsilons, least) for each in after]
    return epsilons, np.max(curves, axis=0)


def _smallest(dataset: Dataset, counts: Counts, delta: float) -> tuple[float, float]:
    """Returns the smallest delta at most `delta` that has a finite epsilon, and this epsilon.

    The failure of a simulation is a part of every delta, so no smaller one has a finite epsilon. If
    none has, it returns `delta` and infinity.
    """
    bound = epsilon_of(dataset, counts, min(delta, _LEAST))
    if bound < math.inf:
        return min(delta, _LEAST), bound
    bound = epsilon_of(dataset, counts, delta)
    if bound == math.inf:
        return delta, bound
    low, high = math.log(_LEAST), math.log(delta)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = epsilon_of(dataset, counts, math.exp(middle))
        if found < math.inf:
            high, bound = middle, found
        else:
            low = middle
    return math.exp(high), bound


def _after_leaving(counts: Counts, left: int) -> Counts:
    """Returns the releases about data that so many units have left."""
    smaller: Counts = Counter()
    for leaf, count in counts.items():
        if isinstance(leaf, TruncatedSubsampledGaussianDpEvent):
            leaf = TruncatedSubsampledGaussianDpEvent(
                max(1, leaf.dataset_size - left),
                leaf.sampling_probability,
                leaf.truncated_batch_size,
                leaf.noise_multiplier,
            )
        smaller[leaf] += count
    return smaller


# --- Reports ------------------------------------------------------------------------------------


def of_account(account: Mapping[str, Any]) -> GroupPrivacy | None:
    """Returns the table of one dataset of `Ledger.report`, for the sizes in `SIZES`.

    It returns None if the report leaves out rows, if nothing was spent, if a release is unproven or
    not private, or if an event has no rule for several units. A conversion would take seconds. It
    returns None for disjoint parts too, because units may be in several of them.
    """
    if account.get("partitions"):
        return None
    compositions = compositions_of(account)
    if not any(compositions) or any(map(is_boundless, compositions)):
        return None
    dataset = terms_of(account)
    # Whether an event has a rule is the same for all sizes from 2 on.
    if any(_counts_of_group(counts, 2, dataset) is None for counts in compositions):
        return None
    return group_privacy_of(dataset, compositions, account["delta"], SIZES)
