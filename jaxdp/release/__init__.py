"""The till: one protocol by which everything private is released, and what it rests on."""

from jaxdp.release.claims import claim
from jaxdp.release.identity import digest, program
from jaxdp.release.secrets import derive, new_seed, stream
from jaxdp.release.till import Payment, Release, Till, load_arrays, notes, release, settle
from jaxdp.release.workdir import (
    alone,
    bind,
    check_same_config,
    finished_result,
    locked,
    sync_folder,
    write_durably,
    write_json,
)

__all__ = [
    "Payment",
    "Release",
    "Till",
    "alone",
    "bind",
    "check_same_config",
    "claim",
    "derive",
    "digest",
    "finished_result",
    "load_arrays",
    "locked",
    "new_seed",
    "notes",
    "program",
    "release",
    "settle",
    "stream",
    "sync_folder",
    "write_durably",
    "write_json",
]
