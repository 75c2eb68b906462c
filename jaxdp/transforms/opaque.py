"""The old names of `barriers`."""

from jaxdp.transforms.barriers import materialised as formed
from jaxdp.transforms.barriers import zero_after as zero

__all__ = ["formed", "zero"]
