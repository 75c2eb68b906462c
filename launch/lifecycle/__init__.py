"""A model's whole life: every stage once, one ledger, one report.

    python -m launch.lifecycle --config configs/lifecycle_digits.py --workdir workdir/lifecycle

    life       the study: the order of the stages, and the ledger's permission
    stages     the list of the stages; `stage` says what one is
    pretrain, finetune, recalibrate, adapt, split, deploy, predict     the stages, with their audits
    cache      how finished stages are found, and what is kept
    parts      who holds which data
    networks   the networks that several stages use
    document   the report

A stage is one file. The lifecycle finds it by the list of studies (`launch.studies`).
"""

from .life import STUDY, Interrupted, run, show_plan

__all__ = ["STUDY", "Interrupted", "run", "show_plan"]
