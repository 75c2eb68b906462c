"""What the compilers of a TPU or a GPU that is not there say about a program.

They say its memory, and what a step would take.

The extra `compilers` has them. They run on any machine. What they say is an estimate, not a time.
"""

from jaxdp.compilers.process import Estimate, NotCompiled, estimate
from jaxdp.compilers.targets import CAVEAT, TARGETS, Target, require, target

__all__ = [
    "CAVEAT",
    "TARGETS",
    "Estimate",
    "NotCompiled",
    "Target",
    "estimate",
    "require",
    "target",
]
