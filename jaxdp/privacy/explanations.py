"""What each group of releases adds to epsilon: alone, beside all the others, and what it left."""

import dataclasses
import functools
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from jaxdp.files import shown
from jaxdp.files.text import down, finite, indented, up
from jaxdp.privacy.compositions import maximal
from jaxdp.privacy.events import Counts, composition, describe, from_json, kind
from jaxdp.privacy.spent_epsilon import epsilon_of, remaining_epsilon, used_epsilon
from jaxdp.privacy.terms import Dataset

By = Literal["event", "type", "label", "run"]
GROUPINGS = get_args(By)
# Each group needs two compositions, of about 0.1 s each.
MOST_GROUPS = 50
_SPENDS = (
    "SELECT partition, json, run, label, count(*) AS spends FROM spends JOIN events ON events.id "
    "= event WHERE dataset = ? GROUP BY partition, event, run, label"
)
# An event has one row for each part, however many spends it has.
_TOTALS = (
    "SELECT partition, json, spends, '' AS run, '' AS label FROM totals JOIN events ON events.id "
    "= event WHERE dataset = ?"
)
# The releases on one unit, by group.
Groups = Mapping[str, Counts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupCost:
    """What one group of releases costs.

    Attributes:
        group: The event, type, label or run that the releases have in common.
        releases: The number of spends in the group, or of mechanisms if groups are types.
        alone: Epsilon of these releases, as if nothing else had been released.
        without: Epsilon of all other releases.
        marginal: What these releases add: epsilon of all less `without`. It is 0 where epsilon
            stays infinite.
        remaining_without: What would be left of the budget. It is infinite without a budget.
    """

    group: str
    releases: int
    alone: float
    without: float
    marginal: float
    remaining_without: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What spent the epsilon of a dataset, as `Ledger.explain` returns it.

    Attributes:
        dataset: The name of the dataset.
        by: What the releases of a group have in common.
        delta: The delta of every epsilon.
        epsilon: Epsilon of all releases. For a "renyi_filter" dataset it is the used share of the
            bound, in units of the budget's epsilon.
        budget: The budget's epsilon, or None.
        remaining: What is left of the budget. It is infinite without a budget.
        costs: The groups, the largest `marginal` first.
        omitted: The number of groups that are not in `costs`. They are the smallest ones alone.
    """

    dataset: str
    by: By
    delta: float
    epsilon: float
    budget: float | None
    remaining: float
    costs: tuple[GroupCost, ...]
    omitted: int

    def as_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain data for JSON, with None for infinity."""
        return dict(finite(dataclasses.asdict(self)))

    def text(self) -> str:
        """Returns the explanation as a table for people."""
        budget = "no budget"
        if self.budget is not None:
            budget = f"budget {self.budget:g}, remaining {down(self.remaining)}"
        lines = [f"{shown(self.dataset)}: epsilon {up(self.epsilon)} at delta {self.delta:g}"]
        lines[0] += f", {budget}"
        if not self.costs:
            return f"{lines[0]}\n  Nothing was spent."
        table = [["releases", self.by, "alone", "marginal", "without", "remaining without"]]
        for cost in self.costs:
            texts = [up(cost.alone), up(cost.marginal), up(cost.without)]
            texts.append(down(cost.remaining_without))
            table.append([str(cost.releases), shown(cost.group) or "-", *texts])
        lines += indented(table)
        if self.omitted:
            lines.append(f"  ... {self.omitted} more groups, the smallest ones alone")
        return "\n".join(lines)


def check_grouping(by: str) -> None:
    """Raises ValueError for an unknown grouping."""
    if by not in GROUPINGS:
        raise ValueError(f"by must be one of {list(GROUPINGS)}, got {by!r}.")


def spent_groups(
    db: sqlite3.Connection, dataset: Dataset, by: By
) -> tuple[list[Groups], Counter[str]]:
    """Returns the releases on each kind of unit by group, and the size of every group.

    The releases on the whole dataset are in every part. Parts with equal releases come once.
    """
    query = _TOTALS if by in ("event", "type") else _SPENDS
    parts: dict[str, dict[str, Counts]] = {"": {}}
    sizes: Counter[str] = Counter()
    for row in db.execute(query, (dataset.id,)):
        groups = parts.setdefault(row["partition"], {})
        for name, releases, counts in _groups_of(row, by):
            sizes[name] += releases
            groups.setdefault(name, Counter()).update(counts)
    return _units(parts), sizes


def _groups_of(row: sqlite3.Row, by: By) -> list[tuple[str, int, Counts]]:
    """Returns the groups of equal spends: the name, the number of releases and their leaves."""
    description, single = _understood(row["json"])
    spends = row["spends"]
    counts = Counter({leaf: count * spends for leaf, count in single.items()})
    match by:
        case "type":
            return [(kind(leaf), count, Counter({leaf: count})) for leaf, count in counts.items()]
        case "event":
            return [(description, spends, counts)]
        case "label":
            # An account puts its own label in front of the spend's.
            return [(str(row["label"] or "").split(":")[0], spends, counts)]
    return [(str(row["run"] or ""), spends, counts)]


@functools.lru_cache(maxsize=1024)
def _understood(text: str) -> tuple[str, Counts]:
    """Returns the description and the leaves of an event, given as JSON."""
    event = from_json(text)
    return describe(event), composition(event)


def _units(parts: Mapping[str, Groups]) -> list[Groups]:
    """Returns the releases on each kind of unit. Part "" is the whole dataset."""
    whole = parts[""]
    units = [_merged(whole, groups) for part, groups in parts.items() if part]
    return _unlike(units or [whole])


def _merged(whole: Groups, part: Groups) -> Groups:
    # In the order of the whole dataset, then of the part.
    names = [*whole, *(name for name in part if name not in whole)]
    empty: Counts = Counter()
    return {name: whole.get(name, empty) + part.get(name, empty) for name in names}


def _unlike(units: Sequence[Groups]) -> list[Groups]:
    distinct = {}
    for groups in units:
        # Parts with the same releases cost the same, so one stands for all.
        key = frozenset((name, frozenset(counts.items())) for name, counts in groups.items())
        distinct[key] = groups
    return list(distinct.values())


def costs_of(
    units: Sequence[Groups],
    sizes: Mapping[str, int],
    cost: Callable[[Counts], float],
    remaining: Callable[[Sequence[Counts]], float],
) -> tuple[list[GroupCost], int]:
    """Returns the cost of each group, and the number of groups that are left out.

    Args:
        units: The releases on each kind of unit, by group.
        sizes: The number of releases of each group.
        cost: Returns epsilon of a composition. It grows with the composition.
        remaining: Returns what is left of the budget after the given compositions.
    """
    total = _largest(cost, [_sum(groups) for groups in units])
    alone = {}
    for name in sizes:
        alone[name] = _largest(cost, [groups.get(name, Counter()) for groups in units])
    names = sorted(sizes, key=lambda name: alone[name], reverse=True)[:MOST_GROUPS]
    costs = []
    for name in names:
        rest = maximal(_sum(groups, without=name) for groups in units)
        # Composition is monotone, but the rounding of losses is not.
        without = min(_largest(cost, rest), total)
        costs.append(
            GroupCost(
                group=name,
                releases=sizes[name],
                alone=min(alone[name], total),
                without=without,
                marginal=0.0 if without == total else total - without,  # inf - inf is NaN
                remaining_without=remaining(rest),
            )
        )
    costs.sort(key=lambda row: row.marginal, reverse=True)
    return costs, len(sizes) - len(names)


def _sum(groups: Groups, without: str | None = None) -> Counts:
    total: Counts = Counter()
    for name, counts in groups.items():
        if name != without:
            total.update(counts)
    return total


def _largest(cost: Callable[[Counts], float], compositions: Sequence[Counts]) -> float:
    return max(map(cost, maximal(compositions)))


def explained(
    dataset: Dataset, units: Sequence[Groups], sizes: Mapping[str, int], *, by: By, delta: float
) -> Explanation:
    """Returns the explanation of a dataset from its releases, as `spent_groups` returns them."""

    def cost(counts: Counts) -> float:
        # The epsilon of a filter is its budget from the first spend on. Its shares add up.
        if dataset.accounting == "renyi_filter":
            return used_epsilon(dataset, counts)
        return epsilon_of(dataset, counts, delta)

    remaining = functools.partial(remaining_epsilon, dataset)
    costs, omitted = costs_of(units, sizes, cost, remaining)
    everything = maximal(_sum(groups) for groups in units)
    return Explanation(
        dataset=dataset.name,
        by=by,
        delta=delta,
        epsilon=_largest(cost, everything),
        budget=dataset.epsilon,
        remaining=remaining(everything),
        costs=tuple(costs),
        omitted=omitted,
    )


def marginals_of(account: Mapping[str, Any]) -> dict[int, float]:
    """Returns what each row of the spends of an account adds to epsilon, by the row's place.

    The account is one dataset of `Ledger.report`. Rows that are not computed are left out: all if
    the report leaves out rows or if a filter's budget is its epsilon, and the smallest ones of more
    than 50.
    """
    dataset = terms_of(account)
    if not _is_whole(account) or dataset.accounting == "renyi_filter":
        return {}
    units = _units_of(account)
    sizes = {str(place): row["spends"] for place, row in enumerate(account["spends"])}

    def cost(counts: Counts) -> float:
        return epsilon_of(dataset, counts, account["delta"])

    costs, _ = costs_of(units, sizes, cost, lambda compositions: math.inf)
    return {int(row.group): row.marginal for row in costs}


def compositions_of(account: Mapping[str, Any]) -> list[Counts]:
    """Returns the releases on each kind of unit of one dataset of `Ledger.report`.

    It returns none if the report leaves out rows.
    """
    if not _is_whole(account):
        return []
    return maximal(_sum(groups) for groups in _units_of(account))


def terms_of(account: Mapping[str, Any]) -> Dataset:
    """Returns the terms of one dataset of `Ledger.report`."""
    return Dataset(
        id=0,
        name=account["name"],
        adjacency=account["adjacency"],
        unit=account["unit"],
        epsilon=account["budget"],
        delta=account["delta"],
        accounting=account.get("accounting", "pld"),
        renyi_order=account.get("renyi_order"),
        allow_unproven=True,
        records=account["records"],
    )


def _is_whole(account: Mapping[str, Any]) -> bool:
    return bool(account["rows"] == len(account["spends"]))  # a report has 1000 rows at most


def _units_of(account: Mapping[str, Any]) -> list[Groups]:
    """Returns the releases on each kind of unit, by the place of their row in the report."""
    parts: dict[str, dict[str, Counts]] = {"": {}}
    for place, row in enumerate(account["spends"]):
        single = composition(from_json(json.dumps(row["event"])))
        counts = Counter({leaf: count * row["spends"] for leaf, count in single.items()})
        parts.setdefault(row.get("partition") or "", {})[str(place)] = counts
    return _units(parts)
