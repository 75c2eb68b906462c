"""A model's whole life: every stage once, one ledger, one report.

    python -m launch.lifecycle --config configs/lifecycle_digits.py --workdir workdir/lifecycle

`stages` says what is done and charged, `life` in which order and whether, `cache` what is kept, `parts` who holds which
data, `document` writes the report.
"""

from .life import Interrupted, run

__all__ = ["Interrupted", "run"]
