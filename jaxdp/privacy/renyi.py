"""Renyi DP of events, and its conversion to (epsilon, delta)."""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import (
    DEFAULT_RDP_ORDERS,
    compute_delta,
    compute_epsilon,
)

from jaxdp.privacy.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    OneOfDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    composition,
)
from jaxdp.privacy.losses import tamed
from jaxdp.privacy.relations import RELATIONS, Adjacency, distance_factor
from jaxdp.privacy.selection import selection_rdp

RDP_ORDERS: tuple[float, ...] = tuple(DEFAULT_RDP_ORDERS)
# For grids, brackets and first checks. The smallest ones find the scale of many losses of little
# weight.
_WHOLE_ORDERS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024)
ROUGH_ORDERS = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, *map(float, _WHOLE_ORDERS))

# Log-sum-exp at small orders errs by about 1e-14 / (order - 1). dp_accounting reads a negative RDP
# as "no loss".
_SLACK = 1e-13


# --- Conversion ---------------------------------------------------------------------------------


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
    return np.exp(np.minimum(log_deltas + _SLACK, 0.0))


def default_renyi_order(epsilon: float, delta: float) -> float:
    """Returns the order at which the bound admits most of a Gaussian.

    The same holds for any mechanism whose Renyi loss is proportional to the order.
    """
    return max(RDP_ORDERS, key=lambda order: renyi_bound(epsilon, delta, order) / order)


# --- Events -------------------------------------------------------------------------------------


def total_rdp(
    counts: Mapping[DpEvent, int], adjacency: Adjacency, orders: Sequence[float] = RDP_ORDERS
) -> np.ndarray:
    """Returns the Renyi DP of a composition at every order."""
    total = np.zeros(len(orders))
    for leaf, count in counts.items():
        total += count * leaf_rdp(leaf, adjacency, orders)
    return total


def leaf_rdp(leaf: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> np.ndarray:
    """Returns the Renyi DP of a leaf at every order."""
    # Gaussians are not cached, because every sum of Gaussians is another one.
    if isinstance(leaf, GaussianDpEvent):
        sigma: float = leaf.noise_multiplier / distance_factor(adjacency)
        with np.errstate(over="ignore"):
            return np.asarray(orders) / 2 / sigma / sigma + _SLACK
    return _computed_rdp(leaf, adjacency, orders)


@functools.lru_cache(maxsize=2**16)
def _computed_rdp(leaf: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> np.ndarray:
    if isinstance(leaf, PureDpEvent):
        # This is the Renyi divergence of binary randomised response, the worst pure pair.
        alpha = np.asarray(orders)
        loss = leaf.epsilon
        log_moment = np.logaddexp(alpha * loss, (1 - alpha) * loss) - np.logaddexp(loss, 0.0)
        rdp: np.ndarray = log_moment / (alpha - 1)
        return rdp + _SLACK
    if isinstance(leaf, OneOfDpEvent):
        curves = [total_rdp(composition(event), adjacency, orders) for event in leaf.events]
        largest: np.ndarray = np.max(curves, axis=0)
        return largest
    if isinstance(leaf, RepeatAndSelectDpEvent):
        run = total_rdp(composition(leaf.event), adjacency, orders)
        return selection_rdp(orders, run, mean=leaf.mean, shape=leaf.shape) + _SLACK
    accountant = RdpAccountant(orders, RELATIONS[adjacency])
    with _without_unused_orders(), np.errstate(over="ignore"):
        accountant.compose(rdp_event(tamed(leaf), adjacency))
    return np.asarray(accountant.rdp).clip(0.0) + _SLACK


@contextlib.contextmanager
def _without_unused_orders() -> Iterator[None]:
    """Drops the log lines about orders at which an RDP series diverges.

    These are infinite and never used.
    """
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def rdp_event(event: DpEvent, adjacency: Adjacency) -> DpEvent:
    """Returns an event whose RDP by dp_accounting equals the RDP of `event`.

    The RDP of dp_accounting never doubles a sensitivity.
    """
    match event:
        case GaussianDpEvent() | LaplaceDpEvent():
            return type(event)(event.noise_multiplier / distance_factor(adjacency))
        case PoissonSampledDpEvent():
            sampled = rdp_event(event.event, adjacency)
            return PoissonSampledDpEvent(event.sampling_probability, sampled)
        case SampledWithoutReplacementDpEvent():
            sampled = rdp_event(event.event, adjacency)
            return SampledWithoutReplacementDpEvent(
                event.source_dataset_size, event.sample_size, sampled
            )
        case ComposedDpEvent():
            return ComposedDpEvent([rdp_event(child, adjacency) for child in event.events])
        case SelfComposedDpEvent():
            return SelfComposedDpEvent(rdp_event(event.event, adjacency), event.count)
    return event
