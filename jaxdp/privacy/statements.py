"""What other accountants read of a dataset: its Renyi DP at many orders, and its zCDP."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp.files import shown
from jaxdp.files.text import finite, indented, up
from jaxdp.privacy.events import (
    Counts,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    ZCDpEvent,
)
from jaxdp.privacy.relations import Adjacency, distance_factor
from jaxdp.privacy.renyi import total_rdp
from jaxdp.privacy.renyi_conversions import RDP_ORDERS
from jaxdp.privacy.rules import is_boundless, leaf_pure_epsilon, leaf_rules
from jaxdp.privacy.spent_epsilon import renyi_spent
from jaxdp.privacy.terms import Dataset

# The orders in the text.
_SHOWN = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_UP = 1 + 1e-12  # above the rounding of a sum


@dataclasses.dataclass(frozen=True)
class RenyiStatement:
    """The Renyi DP and the zCDP of everything spent, as `Ledger.renyi` returns them.

    Attributes:
        dataset: The name of the dataset.
        adjacency: The neighbouring relation for which they hold, in both directions.
        orders: Renyi orders > 1, ascending [N]. Empty if a release has no rule.
        rdp: A bound on the Renyi divergence at each order [N], in nats.
        rho: The rho of zero-concentrated DP. None if a release has none. It is infinite with a
            release without a proof.
    """

    dataset: str
    adjacency: str
    orders: tuple[float, ...]
    rdp: tuple[float, ...]
    rho: float | None

    def rows(self) -> list[dict[str, float]]:
        """Returns the orders as rows with "order" and "rdp", for CSV."""
        pairs = zip(self.orders, self.rdp, strict=True)
        return [{"order": order, "rdp": rdp} for order, rdp in pairs]

    def as_dict(self) -> dict[str, Any]:
        """Returns the statement as plain data for JSON, with None for infinity."""
        return dict(finite(dataclasses.asdict(self)))

    def text(self) -> str:
        """Returns rho and some orders for people."""
        rho = "none" if self.rho is None else up(self.rho)
        lines = [f"{shown(self.dataset)}: zCDP rho {rho}, adjacency {self.adjacency}"]
        if not self.rdp:
            return f"{lines[0]}\n  A release has no rule for Renyi DP."
        few = [row for row in self.rows() if len(self.rdp) == 1 or row["order"] in _SHOWN]
        table = [["order", "Renyi DP"]]
        table += [[f"{row['order']:g}", up(row["rdp"])] for row in few]
        lines += indented(table)
        return "\n".join(lines)


def renyi_statement(dataset: Dataset, compositions: Sequence[Counts]) -> RenyiStatement:
    """Returns the statement that holds for each of several compositions of a dataset."""
    if dataset.accounting == "renyi_filter":
        return _of_a_filter(dataset, compositions)
    rhos = [total_rho(counts, dataset.adjacency) for counts in compositions]
    known = [rho for rho in rhos if rho is not None]
    rho = max(known) if len(known) == len(rhos) else None
    curves = [_rdp(counts, dataset.adjacency) for counts in compositions]
    ruled = [curve for curve in curves if curve is not None]
    divergences = np.max(ruled, axis=0) if len(ruled) == len(curves) else np.zeros(0)
    # The series of sampled releases diverges at some orders, of which nothing is known then.
    is_finite = np.isfinite(divergences)
    is_shown = is_finite if is_finite.any() else np.ones(len(is_finite), bool)
    orders = np.array(RDP_ORDERS)[: len(is_finite)][is_shown]
    return RenyiStatement(
        dataset=dataset.name,
        adjacency=dataset.adjacency,
        orders=tuple(map(float, orders)),
        rdp=tuple(map(float, divergences[is_shown])),
        rho=rho,
    )


def _of_a_filter(dataset: Dataset, compositions: Sequence[Counts]) -> RenyiStatement:
    """Returns the one statement that holds for adaptively chosen events: the filter's bound."""
    assert dataset.renyi_order is not None
    spent = max(renyi_spent(dataset, counts) for counts in compositions)
    bound = max(spent, dataset.renyi_bound) if spent else 0.0
    orders = (dataset.renyi_order,)
    return RenyiStatement(dataset.name, dataset.adjacency, orders, (bound,), None)


def _rdp(counts: Counts, adjacency: Adjacency) -> np.ndarray | None:
    """Returns the Renyi DP at `RDP_ORDERS`, or None if a release has no rule."""
    if is_boundless(counts):
        return np.full(len(RDP_ORDERS), math.inf)
    if not all("rdp" in leaf_rules(leaf, adjacency) for leaf in counts):
        return None
    return total_rdp(counts, adjacency)


def total_rho(counts: Counts, adjacency: Adjacency) -> float | None:
    """Returns the rho of a composition, the sum over its releases, or None if one has none."""
    if is_boundless(counts):
        return math.inf
    rhos = {leaf: leaf_rho(leaf, adjacency) for leaf in counts}
    if None in rhos.values():
        return None
    return math.fsum(counts[leaf] * rho for leaf, rho in rhos.items() if rho) * _UP


def leaf_rho(leaf: DpEvent, adjacency: Adjacency) -> float | None:
    """Returns the rho of a leaf, or None (Bun and Steinke 2016, arXiv 1605.02658).

    A Gaussian has rho = distance^2 / (2 sigma^2), proposition 1.6. Sampling does not lower it: at
    large orders the sampled divergence is as large as the whole one, and never larger, by
    quasi-convexity. A pure release has epsilon^2 / 2, proposition 1.4.
    """
    match leaf:
        case ZCDpEvent(rho=rho, xi=xi):
            # A loss of xi has no rho alone.
            return float(rho) if xi == 0 else None
        case GaussianDpEvent(noise_multiplier=sigma):
            return (distance_factor(adjacency) / float(sigma)) ** 2 / 2  # Proposition 1.6
        # zCDP has no amplification by sampling, so a sample is charged as the whole.
        case PoissonSampledDpEvent(event=GaussianDpEvent() as whole):
            return leaf_rho(whole, adjacency)
    loss = leaf_pure_epsilon(leaf, adjacency)
    return loss * loss / 2 if loss < math.inf else None  # Proposition 1.4
