"""Tent (Wang et al. 2021, arXiv:2006.10726): minimisation of the entropy of the predictions."""

import dataclasses

from jaxdp.tta.method import Method


@dataclasses.dataclass(frozen=True, eq=False)
class Tent(Method):
    """Minimisation of mean_i H_i over the scale and bias of every normalisation layer."""
