"""`METHODS`, the table of the ways in which a client can adapt a server's model.

The first six are the baselines that Split Adaptation is compared with. They keep nothing private.
The others are the treatments of a client's representations before they leave it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxdp.split.baselines import BASELINES
from jaxdp.split.copies import augment_then_noise, noise_then_augment
from jaxdp.split.noisy_upload import release_privately

METHODS: Mapping[str, Callable[..., Any]] = {
    **BASELINES,
    "sa": augment_then_noise,
    "sa_noise_once": noise_then_augment,
    "sa_private": release_privately,
}
