"""Compositions that grow by small steps, as a ledger's do."""

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jaxdp.privacy.events import (
    Counts,
    DpEvent,
    GaussianDpEvent,
    UnprovenDpEvent,
    precision,
)
from jaxdp.privacy.relations import LABELS, Adjacency
from jaxdp.privacy.renyi import leaf_rdp
from jaxdp.privacy.renyi_conversions import RDP_ORDERS, epsilon_from_rdp
from jaxdp.privacy.rules import is_boundless, leaf_pure_epsilon, leaf_rules

# Up to so many leaves the sum of losses is made anew for each step, because it costs little.
_FEW_LEAVES = 64
# A growing sum loses digits, so it is made anew after so many steps.
_MOST_STEPS = 256


class Tally:
    """The proven part of a composition that grows by small steps.

    It keeps the sum of the losses that a first check by RDP needs.

    One precision stands for all Gaussians: the sum of count / noise_multiplier^2. A method that
    adds returns a new tally and copies a dictionary of the distinct leaves that are not Gaussians.

    Attributes:
        adjacency: The adjacency of the dataset.
        orders: The Renyi orders of the first check.
        precision: The precision of the Gaussians.
        others: The leaves that are not Gaussians.
        rules: Which of "pld" and "rdp" have a rule for every leaf.
    """

    def __init__(self, adjacency: Adjacency, orders: Sequence[float] = RDP_ORDERS):
        self.adjacency: Adjacency = adjacency
        self.orders = orders
        self.precision = 0.0
        self.others: Counts = Counter()
        self.rules = frozenset({"pld", "rdp"})
        self._sums: np.ndarray | None = None  # the sum of `_losses` of the others
        self._age = 0  # the additions since that sum was computed from scratch

    def __bool__(self) -> bool:
        return bool(self.others or self.precision)

    @property
    def counts(self) -> Counts:
        """The leaves, with one Gaussian for all."""
        counts: Counts = Counter()
        if self.precision:
            counts[GaussianDpEvent(self.precision**-0.5)] = 1
        return counts + self.others

    def plus(self, step: Mapping[DpEvent, int], times: int = 1) -> "Tally":
        """Returns the composition with the proven part of `step` added `times` times."""
        total = copy.copy(self)
        total.others = self.others.copy()
        if len(self.others) > _FEW_LEAVES:
            total._sums = self._known_sums()
            total._age = self._age + 1
        else:
            total._sums = None
        for leaf, count in step.items():
            if isinstance(leaf, GaussianDpEvent):
                total.precision += times * precision({leaf: count})
                if self.adjacency == LABELS:  # a claim for examples
                    total.rules = frozenset()
            elif not isinstance(leaf, UnprovenDpEvent):
                total.others[leaf] += times * count
                total.rules &= leaf_rules(leaf, self.adjacency)
                if total._sums is not None:
                    losses = _losses(leaf, self.adjacency, self.orders)
                    total._sums = total._sums + times * count * losses
        return total

    def plus_share(self, other: "Tally", share: float) -> "Tally":
        """Returns the composition with a share of another one added. Counts are rounded up."""
        total = self.plus({leaf: math.ceil(share * count) for leaf, count in other.others.items()})
        total.precision += share * other.precision
        return total

    def minus(self, other: "Tally") -> "Tally":
        """Returns the part of this composition that exceeds another one."""
        rest = Tally(self.adjacency).plus(self.others - other.others)
        rest.precision = max(0.0, self.precision - other.precision)
        return rest

    def covers(self, other: "Tally") -> bool:
        """Returns whether this composition contains another one.

        It then costs at least as much.
        """
        # A sum of precisions depends on the order of the spends, in its last digits.
        if len(other.others) > len(self.others) or other.precision > self.precision * (1 + 1e-12):
            return False
        return all(count <= self.others[leaf] for leaf, count in other.others.items())

    def rdp_epsilon(self, delta: float) -> float:
        """Returns the RDP (or pure) bound on epsilon. It is infinite where RDP has no rule."""
        if not self:
            return 0.0
        sums = self._known_sums()
        if self.precision:
            gaussian = GaussianDpEvent(self.precision**-0.5)
            # A Gaussian has no pure epsilon.
            sums = sums + np.append(leaf_rdp(gaussian, self.adjacency, self.orders), math.inf)
        rdp, pure = sums[:-1], float(sums[-1])
        if np.isinf(rdp).all():
            return pure
        return min(pure, epsilon_from_rdp(rdp, delta, self.orders))

    def _known_sums(self) -> np.ndarray:
        """Returns the Renyi DP of the others at every order, and then their pure epsilon."""
        if self._sums is None or self._age > _MOST_STEPS:
            sums = np.zeros(len(self.orders) + 1)
            for leaf, count in self.others.items():
                sums = sums + count * _losses(leaf, self.adjacency, self.orders)
            self._sums = sums
            self._age = 0
        return self._sums


def _losses(leaf: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> np.ndarray:
    """Returns the Renyi DP of a leaf at every order and then its pure epsilon.

    A loss without a rule is infinite.
    """
    if not is_boundless([leaf]) and "rdp" in leaf_rules(leaf, adjacency):
        rdp = leaf_rdp(leaf, adjacency, orders)
    else:
        rdp = np.full(len(orders), math.inf)
    return np.append(rdp, leaf_pure_epsilon(leaf, adjacency))
