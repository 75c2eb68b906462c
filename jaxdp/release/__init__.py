"""The till, the one protocol for every private release.

Notes, secrets, locks and checkpoints belong to it.
"""

from jaxdp.release.charge_notes import check_history, notes, settle
from jaxdp.release.checkpoints import Checkpoints
from jaxdp.release.claims import claim
from jaxdp.release.hosts import HostFailed, Hosts
from jaxdp.release.identity import digest, program
from jaxdp.release.kept_arrays import load_arrays
from jaxdp.release.marks import Mark, mark_again, marked
from jaxdp.release.secrets import derive, generator, new_seed, stream
from jaxdp.release.till import Payment, Release, Till
from jaxdp.release.workdir import OwnProcess, alone, locked

__all__ = [
    "Checkpoints",
    "HostFailed",
    "Hosts",
    "Mark",
    "OwnProcess",
    "Payment",
    "Release",
    "Till",
    "alone",
    "check_history",
    "claim",
    "derive",
    "digest",
    "generator",
    "load_arrays",
    "locked",
    "mark_again",
    "marked",
    "new_seed",
    "notes",
    "program",
    "settle",
    "stream",
]
