"""The conversion of Renyi DP (RDP) to (epsilon, delta)."""

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import (
    DEFAULT_RDP_ORDERS,
    compute_delta,
    compute_epsilon,
)

RDP_ORDERS: tuple[float, ...] = tuple(DEFAULT_RDP_ORDERS)
# For grids, brackets and first checks. The smallest ones find the scale of many losses of little
# weight.
_WHOLE_ORDERS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024)
ROUGH_ORDERS = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, *map(float, _WHOLE_ORDERS))

# Log-sum-exp at small orders errs by about 1e-14 / (order - 1). dp_accounting reads a negative RDP
# as "no loss".
SLACK = 1e-13


def epsilon_from_rdp(rdp: np.ndarray, delta: float, orders: Sequence[float] = RDP_ORDERS) -> float:
    """Returns the least epsilon to which any of the orders converts."""
    return float(compute_epsilon(orders, rdp, delta)[0])


def delta_from_rdp(rdp: np.ndarray, epsilon: float) -> float:
    """Returns the least delta to which any of `RDP_ORDERS` converts."""
    return float(compute_delta(RDP_ORDERS, rdp, epsilon)[0])


def renyi_bound(epsilon: float, delta: float, order: float) -> float:
    """Returns the Renyi DP at `order` that converts to (epsilon, delta).

    It is <= 0 if the order is too small. The bound inverts epsilon = rdp + log(1 - 1/order) -
    log(delta order) / (order - 1) (Canonne, Kamath, Steinke 2020, arXiv 2004.00010, Proposition
    12).
    """
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def renyi_epsilon(rdp: float, delta: float, order: float) -> float:
    """Returns the epsilon to which `rdp` at `order` converts. It inverts `renyi_bound`."""
    return max(0.0, rdp + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def renyi_deltas(rdp: float, epsilons: np.ndarray, order: float) -> np.ndarray:
    """Returns the deltas, at most 1, to which `rdp` at `order` converts. It inverts
    `renyi_epsilon` at each epsilon [N].
    """
    log_deltas = (order - 1) * (rdp - epsilons + math.log1p(-1 / order)) - math.log(order)
    return np.exp(np.minimum(log_deltas + SLACK, 0.0))


def default_renyi_order(epsilon: float, delta: float) -> float:
    """Returns the order at which the bound admits most of a Gaussian.

    The same holds for any mechanism whose Renyi loss is proportional to the order.
    """
    return max(RDP_ORDERS, key=lambda order: renyi_bound(epsilon, delta, order) / order)
