"""Programs as other libraries and papers write them, to count what clipping adds to their
gradients.

`PROGRAMS` maps a name to a function that makes a `Program`. The numbers of a program are sizes:
small ones to run, and large ones to count."""

from tests.foreign_programs import (  # noqa: F401 # each module registers its programs
    attention,
    convolutions,
    embeddings,
    recurrences,
    weights,
)
from tests.foreign_programs.entries import PROGRAMS, Array, Entry, Program, abstract, drawn, energy

__all__ = ["PROGRAMS", "Array", "Entry", "Program", "abstract", "drawn", "energy"]
