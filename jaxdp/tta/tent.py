"""Tent (Wang et al. 2021, arXiv:2006.10726): minimise the entropy of the predictions."""

import dataclasses

from jaxdp.tta.method import Method


@dataclasses.dataclass(frozen=True, eq=False)
class Tent(Method):
    """Loss of a batch: mean_i H_i, over every normalisation layer's scale and bias."""
