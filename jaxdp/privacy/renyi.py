"""Renyi DP of events."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from dp_accounting.rdp import RdpAccountant

from jaxdp.privacy.events import (
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    OneOfDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
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
    # Of samples, only those of Gaussians have a rule.
    if isinstance(event, PoissonSampledDpEvent):
        sigma = event.event.noise_multiplier
        rdp = sampled_gaussian_rdp(event.sampling_probability, sigma, orders)
        return rdp.clip(0.0) + SLACK
    accountant = RdpAccountant(orders, RELATIONS[adjacency])
    with np.errstate(over="ignore"):
        accountant.compose(event)
    return np.asarray(accountant.rdp).clip(0.0) + SLACK


def rdp_event(event: DpEvent, adjacency: Adjacency) -> DpEvent:
    """Returns an event whose RDP by dp_accounting equals the RDP of `event`.

    The RDP of dp_accounting never doubles a sensitivity.
    """
    match event:
        case GaussianDpEvent() | LaplaceDpEvent():
            return type(event)(event.noise_multiplier / distance_factor(adjacency))
        case SampledWithoutReplacementDpEvent():
            sampled = rdp_event(event.event, adjacency)
            return SampledWithoutReplacementDpEvent(
                event.source_dataset_size, event.sample_size, sampled
            )
    return event
