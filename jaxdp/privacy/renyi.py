"""Renyi DP of events."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from dp_accounting.rdp import RdpAccountant

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
from jaxdp.privacy.renyi_conversions import RDP_ORDERS, SLACK
from jaxdp.privacy.sampled_gaussian import sampled_gaussian_rdp
from jaxdp.privacy.selection import selection_rdp


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
            return np.asarray(orders) / 2 / sigma / sigma + SLACK  # alpha / (2 sigma^2)
    return _computed_rdp(leaf, adjacency, orders)


@functools.lru_cache(maxsize=2**16)
def _computed_rdp(leaf: DpEvent, adjacency: Adjacency, orders: Sequence[float]) -> np.ndarray:
    if isinstance(leaf, PureDpEvent):
        # This is the Renyi divergence of binary randomised response, the worst pure pair.
        alpha = np.asarray(orders)
        loss = leaf.epsilon
        log_moment = np.logaddexp(alpha * loss, (1 - alpha) * loss) - np.logaddexp(loss, 0.0)
        rdp: np.ndarray = log_moment / (alpha - 1)
        return rdp + SLACK
    if isinstance(leaf, OneOfDpEvent):
        curves = [total_rdp(composition(event), adjacency, orders) for event in leaf.events]
        largest: np.ndarray = np.max(curves, axis=0)
        return largest
    if isinstance(leaf, RepeatAndSelectDpEvent):
        run = total_rdp(composition(leaf.event), adjacency, orders)
        return selection_rdp(orders, run, mean=leaf.mean, shape=leaf.shape) + SLACK
    event = rdp_event(tamed(leaf), adjacency)
    match event:
        case PoissonSampledDpEvent(
            sampling_probability=q, event=GaussianDpEvent(noise_multiplier=sigma)
        ) if 0 < q < 1 and sigma > 0 and adjacency in ("add_remove", "zero_out"):
            return sampled_gaussian_rdp(q, sigma, orders).clip(0.0) + SLACK
    accountant = RdpAccountant(orders, RELATIONS[adjacency])
    with _without_unused_orders(), np.errstate(over="ignore"):
        accountant.compose(event)
    return np.asarray(accountant.rdp).clip(0.0) + SLACK


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
