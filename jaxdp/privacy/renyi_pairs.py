"""The pair of distributions that stands for releases with a Renyi divergence and no loss of their
own, such as a private search.

    1. rdp(order) = the sum of the releases' Renyi divergences         `RenyiCurve`
    2. delta(epsilon) = min over orders of exp((order - 1) (rdp(order) - epsilon))
                        (1 - 1 / order)^order / (order - 1)            `_deltas`
    3. the pair whose deltas are the lower hull of that curve          `renyi_pair`

So the other releases of an account keep their losses, and only these are bounded by the curve.

Formal guarantees: the pair of all releases of 1, composed with the pairs of the others, bounds
every delta of all of them together. Proof. The releases of 1 may depend on each other and on
whatever the analyst has seen, and their divergences add up (Mironov 2017, arXiv 1702.07476,
proposition 1). Each order bounds delta at each epsilon, in both directions, because neighbours are
symmetric (Canonne, Kamath and Steinke 2020, arXiv 2004.00010, proposition 12). By
`jaxdp.privacy.curve_pairs` the pair of 3 then dominates them: they are f-DP for its trade-off
function f. The others are f'-DP for that of their product of pairs. An analyst who may take the
releases of both kinds in any order is a concurrent composition of two interactive mechanisms. It is
as private as the product of both pairs (Vadhan and Zhang 2022, arXiv 2207.08335).

The curve bounds each delta as closely as the orders do. Its pair is worse than the divergences
where the curve is composed, because it has the worst delta at every epsilon at once. So the
composition of all divergences is often smaller if most of the loss has no pair of its own, and the
accountant takes the smaller one.
"""

import dataclasses
import math

import numpy as np

from jaxdp.privacy.curve_pairs import CurvePair, hull_pair
from jaxdp.privacy.events import DpEvent
from jaxdp.privacy.renyi_conversions import RDP_ORDERS, epsilon_from_rdp, renyi_deltas

# Lines between so many points add below 1e-3 of epsilon in the example of the tests.
_POINTS = 4096
# exp overflows near 709.
_MOST_EPSILON = 600.0
# A smaller largest epsilon would have points that exp does not tell apart.
_LEAST_EPSILON = 1e-6
# Of the reversed pair. Beyond it, 1 - exp(-epsilon) loses the digits of delta.
_MOST_REVERSED = 16.0


@dataclasses.dataclass(frozen=True)
class RenyiCurve(DpEvent):
    """Several releases by their Renyi divergences. It stands in a composition, in no ledger.

    Attributes:
        rdp: Bounds on the divergences at `RDP_ORDERS`, in both directions. They may be infinite.
        pure: The pure epsilon, or infinity.
    """

    rdp: tuple[float, ...]
    pure: float


def renyi_pair(curve: RenyiCurve, depth: float) -> CurvePair:
    """Returns the pair of a curve.

    Args:
        curve: The curve.
        depth: The first distribution has a mass of about exp(-depth), or more, where the second
            has none.
    """
    rdp = np.array(curve.rdp)
    top = min(epsilon_from_rdp(rdp, math.exp(-depth)), curve.pure, _MOST_EPSILON)
    epsilons = np.linspace(0.0, max(top, _LEAST_EPSILON), _POINTS)
    deltas = _deltas(rdp, epsilons)
    deltas[epsilons >= curve.pure] = 0.0
    is_reversed = epsilons <= _MOST_REVERSED
    return hull_pair(epsilons, deltas, deltas[is_reversed])


def _deltas(rdp: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Returns the least of the deltas to which the orders convert, at each epsilon [N]."""
    deltas = np.ones(len(epsilons))
    for order, divergence in zip(RDP_ORDERS, rdp, strict=True):
        if divergence < math.inf:
            here = renyi_deltas(float(divergence), epsilons, order)
            deltas = np.minimum(deltas, here)
    return deltas
