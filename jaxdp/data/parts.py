"""The public, private and test part of a bundled data set, the same for every stage that names the same fractions."""

import dataclasses
from typing import Any

from jaxdp.data.sources import Source, bundled

PARTS = ("public", "private", "test")


def bundled_parts(config: Any) -> dict[str, Source]:
    """Cuts a bundled data set by random; which record is where does not depend on the records.

    Args:
      config: the `data` part of an experiment's config: name, public_fraction, test_fraction and split_seed. What is
        left is private.

    Returns:
      The sources by part, with names such as "digits/private".
    """
    fractions = (config.public_fraction, 1 - config.public_fraction - config.test_fraction, config.test_fraction)
    sources = bundled(config.name).split(fractions, seed=config.split_seed)
    named = (dataclasses.replace(x, name=f"{config.name}/{part}") for part, x in zip(PARTS, sources, strict=True))
    return dict(zip(PARTS, named, strict=True))
