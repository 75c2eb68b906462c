"""The ways in which `launch.adapt` runs a method, and the lengths of its streams."""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp import finetune, tta

SOURCE = "no adaptation"
ORIGINAL, CLIPPED = "original", "clipped"
CLIPPINGS = {"image": CLIPPED, "batch": "clipped per batch"}
FILTERS = {"remove": "", "keep": ", filters kept"}
INDEPENDENT = "independent"
NOISES = (INDEPENDENT, *finetune.STRATEGIES)


class Setting(NamedTuple):
    """How a method is run.

    Attributes:
      unit: Whose gradients are clipped: "image", "batch", or "" for the method as published.
      epsilon: The target of the private form, for one visit. 0 for a form without noise.
      filters: What becomes of the filters in the private form, see `jaxdp.tta.private`.
      noise: "independent", or the strategy of correlated noise, of `jaxdp.finetune.STRATEGIES`.
    """

    unit: str = ""
    epsilon: float = 0.0
    filters: str = ""
    noise: str = ""


def settings(config: Any) -> dict[str, Setting]:
    """Returns the ways in which methods are run, by name."""
    ways = {ORIGINAL: Setting()}
    for unit in config.clipping:
        ways[CLIPPINGS[unit]] = Setting(unit)
    privacy = config.privacy
    for noise, filters, budget in itertools.product(
        noises(config), privacy.filters, privacy.budgets
    ):
        correlation = "" if noise == INDEPENDENT else f", {noise} noise"
        name = f"epsilon {budget:g}{FILTERS[filters]}{correlation}"
        ways[name] = Setting("image", budget, filters, noise)
    return ways


def noises(config: Any) -> tuple[str, ...]:
    """Returns the kinds of noise that are compared."""
    return tuple(config.privacy.get("noise", (INDEPENDENT,)))


def period(config: Any) -> int:
    """Returns the updates of a period of correlated noise, by default those of a domain.

    A photograph is in every domain once, so it is in a period once.
    """
    declared: int = config.privacy.get("noise_steps", 0)
    if declared:
        return declared
    protocol = config.protocol
    batches = config.data.images // protocol.batch_size
    if protocol.remainder == "pad":
        batches = -(-config.data.images // protocol.batch_size)
    return max(1, batches // protocol.accumulate)


def compared(config: Any, part: str = "runs") -> list[tuple[str, str]]:
    """Returns each method with each of its settings in a part.

    Filters are kept only in a method that has one on single images. Shorter streams compare the
    paper's private form with the original.
    """
    pairs = []
    for method, (name, way) in itertools.product(config.methods, settings(config).items()):
        base, *_ = method.partition("-")
        filtered = getattr(tta.METHODS[base], "reliable", None) is not tta.Method.reliable
        ablation = way.filters == "keep" or (way.unit and not way.epsilon)
        ablation = ablation or way.noise not in ("", INDEPENDENT)
        if (filtered or way.filters != "keep") and (part == "runs" or not ablation):
            pairs.append((method, name))
    return pairs


def lengths(config: Any) -> dict[str, int]:
    """Returns the photographs of each domain in the streams of a part."""
    shorter = {f"first {images}": images for images in config.protocol.lengths}
    return {"runs": config.data.images, **shorter}


def usual(ways: Mapping[str, Setting], setting: str) -> str:
    """Returns the setting of the paper from which this one differs in one choice, "" for none.

    Kept filters differ from removed ones, clipped batches from clipped images, and correlated noise
    from independent noise.
    """
    other = ways[setting]
    if other.filters == "keep":
        other = other._replace(filters="remove")
    if other.unit == "batch":
        other = other._replace(unit="image")
    if other.noise:
        other = other._replace(noise=INDEPENDENT)
    names = (name for name, way in ways.items() if way == other != ways[setting])
    return next(names, "")
