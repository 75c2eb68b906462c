"""Epsilon of compositions by the accounting of their datasets, for one dataset and for several."""

import math
from collections.abc import Sequence

import numpy as np

from jaxdp.privacy.accounting import (
    Method,
    deltas_of_counts,
    epsilon_of_counts,
    rdp_of_counts,
    renyi_deltas,
    renyi_epsilon,
)
from jaxdp.privacy.compositions import combinations, is_proven, proven
from jaxdp.privacy.events import Counts
from jaxdp.privacy.terms import Dataset

# 3 * 0.1 is 0.30000000000000004 in binary. A budget of 0.3 must still allow three spends of 0.1.
ROUNDING = 1e-12


def epsilon_of(dataset: Dataset, counts: Counts, delta: float) -> float:
    """Returns epsilon of a composition at `delta`, by the dataset's accounting."""
    if dataset.accounting != "renyi_filter":
        return epsilon_of_counts(
            counts, delta=delta, adjacency=dataset.adjacency, method=dataset.method
        )
    spent = renyi_spent(dataset, counts)
    if spent == 0 or math.isinf(spent):
        return spent
    # No Renyi loss converts to a finite epsilon there.
    if delta == 0:
        return math.inf
    bound = dataset.renyi_bound
    # Only unspent events exceed the bound, because the filter refuses them.
    if spent > bound * (1 + ROUNDING):
        bound = spent
    assert dataset.renyi_order is not None
    return renyi_epsilon(bound, delta, dataset.renyi_order)


def deltas_of(dataset: Dataset, counts: Counts, epsilons: np.ndarray, least: float) -> np.ndarray:
    """Returns upper bounds on delta of a composition at ascending epsilons, float64 [N].

    Deltas far below `least` may be loose.
    """
    if dataset.accounting != "renyi_filter":
        return deltas_of_counts(
            counts, epsilons, least=least, adjacency=dataset.adjacency, method=dataset.method
        )
    spent = renyi_spent(dataset, counts)
    if spent == 0:
        return np.zeros(len(epsilons))
    bound = max(dataset.renyi_bound, spent)
    assert dataset.renyi_order is not None
    return renyi_deltas(bound, epsilons, dataset.renyi_order)


def renyi_spent(dataset: Dataset, counts: Counts) -> float:
    """Returns the Renyi loss of a composition at the dataset's order."""
    assert dataset.renyi_order is not None
    return rdp_of_counts(counts, order=dataset.renyi_order, adjacency=dataset.adjacency)


def used_epsilon(dataset: Dataset, counts: Counts) -> float:
    """Returns the part of the budget's epsilon that a composition uses."""
    assert dataset.epsilon is not None and dataset.delta is not None
    if dataset.accounting == "renyi_filter":
        return renyi_spent(dataset, counts) / dataset.renyi_bound * dataset.epsilon
    return epsilon_of(dataset, counts, dataset.delta)


def largest_epsilon(dataset: Dataset, compositions: Sequence[Counts], delta: float) -> float:
    """Returns epsilon of the units that bear most."""
    return max(epsilon_of(dataset, counts, delta) for counts in compositions)


def remaining_epsilon(dataset: Dataset, compositions: Sequence[Counts]) -> float:
    """Returns the budget's epsilon less the spent one, or infinity without a budget."""
    if dataset.epsilon is None or dataset.delta is None:
        return math.inf
    used = max(used_epsilon(dataset, proven(counts)) for counts in compositions)
    return max(0.0, dataset.epsilon - used)


def total_epsilon(accounts: Sequence[tuple[Dataset, list[Counts]]], delta: float) -> float:
    """Returns epsilon for a record in all datasets, given the compositions of each one's parts.

    `Ledger.total` states the theorems.
    """
    datasets = [dataset for dataset, _ in accounts]
    _check_one_change(datasets)
    for _, parts in accounts:
        if not all(is_proven(counts) for counts in parts):
            return math.inf
    # Filters whose events may be chosen adaptively each count as one interactive mechanism.
    filtered = []
    fixed_parts = []
    for dataset, parts in accounts:
        if dataset.accounting != "renyi_filter":
            fixed_parts.append(parts)
        # A filter counts from its first spend on.
        elif any(parts):
            filtered.append(dataset)
    sums = combinations(fixed_parts)
    delta_of_filters = math.fsum(dataset.delta or 0.0 for dataset in filtered)
    # Deltas that were written down and add up to `delta` may differ from it in the last digit.
    delta_left = 0.0 if math.isclose(delta_of_filters, delta) else delta - delta_of_filters
    if delta_left < 0 or (filtered and delta_left == 0 and any(sums)):
        raise ValueError(
            f"delta={delta!r} leaves nothing beside the registered deltas of the 'renyi_filter' "
            f"datasets {[dataset.name for dataset in filtered]}, which add up to "
            f"{delta_of_filters:g}. Ask for a larger delta."
        )
    method: Method = "rdp"
    if any(dataset.accounting == "pld" for dataset in datasets):
        method = "auto"
    adjacency = datasets[0].adjacency
    fixed = [
        epsilon_of_counts(counts, delta=delta_left, adjacency=adjacency, method=method)
        for counts in sums
    ]
    return max(fixed) + math.fsum(dataset.epsilon or 0.0 for dataset in filtered)


def _check_one_change(datasets: Sequence[Dataset]) -> None:
    """Raises ValueError unless a single change of a record means the same in all datasets."""
    first = datasets[0]
    for dataset in datasets:
        if (dataset.adjacency, dataset.unit) != (first.adjacency, first.unit):
            raise ValueError(
                f"names: dataset {first.name!r} has adjacency {first.adjacency!r} and unit "
                f"{first.unit!r}, {dataset.name!r} has {dataset.adjacency!r} and "
                f"{dataset.unit!r}, so no single change is meant. Ask for datasets that share "
                "both, and register data of the same people with the same terms."
            )
