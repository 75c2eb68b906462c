"""Which leaf events have which accounting rule, and their pure epsilons."""

import functools
import math
from collections.abc import Iterable, Mapping

import numpy as np
from dp_accounting.rdp import RdpAccountant

from jaxdp.privacy.events import (
    DiscreteLaplaceDpEvent,
    DpEvent,
    LabelDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    OneOfDpEvent,
    OwnedGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
    UnprovenDpEvent,
    composition,
    describe,
    to_json,
)
from jaxdp.privacy.loss_densities import sampled_loss
from jaxdp.privacy.losses import has_distribution, randomized_response
from jaxdp.privacy.relations import (
    LABELS,
    METHODS,
    PROTECTED,
    RELATIONS,
    Adjacency,
    Method,
    distance_factor,
)
from jaxdp.privacy.renyi import rdp_event


def check_rules(
    counts: Mapping[DpEvent, int], *, adjacency: Adjacency, method: Method
) -> frozenset[str]:
    """Returns which of "pld" and "rdp" have a rule for every leaf.

    By "auto", "mixed" is among them if each leaf has one of both rules and the leaves differ:
    those without a PLD then stand in it by their Renyi divergence (`jaxdp.privacy.renyi_pairs`).

    Raises:
        ValueError: None has. The message names events without a rule.
    """
    if adjacency not in RELATIONS:
        raise ValueError(f"adjacency must be one of {sorted(RELATIONS)}, got {adjacency!r}.")
    if method not in METHODS:
        raise ValueError(f"method must be one of {list(METHODS)}, got {method!r}.")
    for leaf in counts:
        _check_claim(leaf, adjacency)
    missing: dict[str, list[DpEvent]] = {}
    # Which leaves keep each method from covering the composition.
    for way in ("pld", "rdp") if method == "auto" else (method,):
        missing[way] = [leaf for leaf in counts if way not in leaf_rules(leaf, adjacency)]
    rules = {way for way, leaves in missing.items() if not leaves}
    if method == "auto" and "pld" not in rules and len(missing["pld"]) < len(counts):
        without = [leaf for leaf in missing["pld"] if leaf in missing["rdp"]]
        if not without:
            rules.add("mixed")
        else:
            missing = {way: without for way in missing}
    if not rules:
        details = ", ".join(
            f"{way.upper()} has none for {to_json(leaves[0])}" for way, leaves in missing.items()
        )
        raise ValueError(
            f"no accounting rule covers this composition under {adjacency!r} adjacency: {details}. "
            "Register another adjacency, charge a bound that has a rule (the event unsampled, "
            "PureDpEvent, ZCDpEvent) or use unproven()."
        )
    return frozenset(rules)


def _check_claim(leaf: DpEvent, adjacency: Adjacency) -> None:
    """Raises ValueError if a leaf is for labels and the adjacency for examples, or vice versa.

    So it does if a leaf is for owners of fixed records, and the adjacency says otherwise.
    """
    if isinstance(leaf, OwnedGaussianDpEvent) and adjacency != "zero_out":
        raise ValueError(
            f"{describe(leaf)} is a claim for what the records of one owner contain: who owns "
            "which record is public. Its adjacency must be 'zero_out', for data set and trainer, "
            f"got {adjacency!r}."
        )
    if _is_of_claim(leaf, adjacency):
        return
    of_leaf = PROTECTED["replace_one" if adjacency == LABELS else LABELS]
    raise ValueError(
        f"{describe(leaf)} is a claim for {of_leaf}, and adjacency {adjacency!r} is a claim for "
        f"{PROTECTED[adjacency]}. One account cannot hold both: a release of labels shows the "
        f"features. Charge LabelDpEvent to datasets with adjacency={LABELS!r} and nothing else."
    )


def _is_of_claim(leaf: DpEvent, adjacency: Adjacency) -> bool:
    if is_boundless([leaf]):
        return True
    if adjacency == LABELS:
        return isinstance(leaf, LabelDpEvent)
    return not _has_labels(leaf)


def _has_labels(event: DpEvent) -> bool:
    """Returns whether an event, or the event of its samples, is for labels."""
    if isinstance(event, LabelDpEvent):
        return True
    return any(map(_has_labels, _inner(event)))


def _inner(event: DpEvent) -> list[DpEvent]:
    """Returns the leaves of the events of which a leaf is made."""
    events = event.events if isinstance(event, OneOfDpEvent) else ()
    if hasattr(event, "event"):
        events = (event.event,)
    leaves: list[DpEvent] = []
    for each in events:
        leaves += composition(each)
    return leaves


@functools.lru_cache(maxsize=2**16)
def leaf_rules(leaf: DpEvent, adjacency: Adjacency) -> frozenset[str]:
    """Returns which of "pld" and "rdp" have a rule for a leaf."""
    # Their epsilon is infinite by every method.
    if isinstance(leaf, NonPrivateDpEvent | UnprovenDpEvent):
        return frozenset({"pld", "rdp"})
    if not _is_of_claim(leaf, adjacency):
        return frozenset()
    rules = set()
    if has_distribution(leaf, adjacency):
        rules.add("pld")
    if isinstance(leaf, RepeatAndSelectDpEvent | OneOfDpEvent):
        if all("rdp" in leaf_rules(inner, adjacency) for inner in _inner(leaf)):
            rules.add("rdp")
        return frozenset(rules)
    accountant = RdpAccountant(neighboring_relation=RELATIONS[adjacency])
    if isinstance(leaf, PureDpEvent) or accountant.supports(rdp_event(leaf, adjacency)):
        rules.add("rdp")
    return frozenset(rules)


def is_boundless(counts: Iterable[DpEvent]) -> bool:
    """Returns whether a release is unproven or not private."""
    return any(isinstance(leaf, NonPrivateDpEvent | UnprovenDpEvent) for leaf in counts)


def pure_epsilon(counts: Mapping[DpEvent, int], adjacency: Adjacency) -> float:
    """Returns the sum of pure epsilons (Dwork et al. 2006). It is infinite if a leaf has none."""
    return math.fsum(count * leaf_pure_epsilon(leaf, adjacency) for leaf, count in counts.items())


def leaf_pure_epsilon(leaf: DpEvent, adjacency: Adjacency) -> float:
    """Returns the pure epsilon of a leaf, or infinity."""
    factor = distance_factor(adjacency)
    match leaf:
        case PureDpEvent():
            return leaf.epsilon
        case LaplaceDpEvent():
            return factor / float(leaf.noise_multiplier)
        case DiscreteLaplaceDpEvent():
            return factor * float(leaf.noise_parameter * leaf.sensitivity)
        case RandomizedResponseDpEvent() if adjacency != "add_remove":
            losses, _ = randomized_response(leaf, adjacency)
            return float(np.abs(losses).max())
        case PoissonSampledDpEvent(event=LaplaceDpEvent()) if adjacency != "replace_one":
            loss = np.array(1 / leaf.event.noise_multiplier)
            return float(sampled_loss(loss, leaf.sampling_probability))
        case OneOfDpEvent():
            return max(pure_epsilon(composition(event), adjacency) for event in leaf.events)
        # arXiv:2110.03620, Corollary 3. Of a Poisson number of runs there is no such bound.
        case RepeatAndSelectDpEvent() if leaf.shape < math.inf:
            factor_of_runs: float = 2 + leaf.shape
            return factor_of_runs * pure_epsilon(composition(leaf.event), adjacency)
    return math.inf
