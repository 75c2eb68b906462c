"""A model's whole life: all stages, one ledger, one report."""

from jaxdp.lifecycle.experiment import Interrupted, run

__all__ = ["Interrupted", "run"]
