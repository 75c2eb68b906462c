"""A model's whole life: every stage once, one ledger, one report.

    python -m launch.lifecycle --config configs/lifecycle_digits.py --workdir workdir/lifecycle

`stages` computes and charges, `life` orders the stages, `cache` keeps results, `parts` divides the
data, and `document` writes the report.
"""

from ..study import Program
from .life import Interrupted, run, show_plan

STUDY = Program(
    name="lifecycle",
    about="every stage of a model's life under one ledger, and a report",
    needs=("budgets",),
)

__all__ = ["STUDY", "Interrupted", "run", "show_plan"]
