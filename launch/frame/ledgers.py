"""Which ledger counts for a run: one for each private data set, whatever the workdir.

The ledger of a run is, in this order:

1. that of `--ledger` or `config.ledger`
2. that which the workdir used before
3. that of the environment variable JAXDP_LEDGER
4. that which counts these records already, as the registry knows
5. ledger.sqlite in the workdir for records that everybody has, and a file of `home()` with the
   name of the data set for others

Before anything is computed the registry (`jaxdp.privacy.Registry`) is asked whether another ledger,
or another name, stands for the same records. The run is then refused, unless --new_ledger was
given. Public records are looked up only where the user named a ledger.

Environment variables: JAXDP_HOME is the folder of the registry and of the default ledgers.
JAXDP_RECORD_DIGESTS=0 keeps no hashes of records. Then no record is recognised, and the ledger of
a run is in its workdir unless the user names another.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data import record_digests
from jaxdp.files import check_folder, shown
from jaxdp.privacy import Claim, CountedElsewhere, Ledger, Registry

from ..study import PrivateSet
from .workdir import bound_to, file_name

NAME = "ledger.sqlite"
_REGISTRY = "registry.sqlite"
NEW = (
    "With --new_ledger the records are counted here too. What is known about a record is then "
    "bounded by the sum of the ledgers, which no ledger shows."
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the command line says about the ledger.

    Attributes:
      path: The path of --ledger, or None.
      count_anew: Whether --new_ledger is given.
    """

    path: pathlib.Path | None = None
    count_anew: bool = False


DEFAULT = Choice()


def home() -> pathlib.Path:
    """Returns the folder of the user's registry and default ledgers."""
    if folder := os.environ.get("JAXDP_HOME"):
        return pathlib.Path(folder)
    data = os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local" / "share"
    return pathlib.Path(data) / "jaxdp"


def registry_path() -> pathlib.Path:
    """Returns the file of the user's registry, which may be missing."""
    return home() / _REGISTRY


def of_workdir(root: pathlib.Path) -> pathlib.Path | None:
    """Returns the ledger that a workdir has used, or None."""
    stored = bound_to(root) or {}
    if stored.get("ledger"):
        return pathlib.Path(stored["ledger"])
    inside = root / NAME
    return inside if inside.exists() else None


def chosen(choice: Choice, config: Any, root: pathlib.Path | None) -> pathlib.Path | None:
    """Returns the ledger that the user or the workdir names, or None.

    Raises:
      ValueError: The user names another ledger than the one that paid for the workdir.
    """
    named = choice.path or (pathlib.Path(config.ledger) if config.get("ledger") else None)
    before = None if root is None else of_workdir(root)
    is_gone = before is not None and not before.exists()
    if is_gone and not (named and named.exists()):
        raise ValueError(
            f"{shown(before)} pays for this workdir, and is gone. Restore it from a copy, or say "
            "with --ledger where it is now."
        )
    is_other = before and os.path.realpath(choice.path or before) != os.path.realpath(before)
    if is_other and not is_gone:
        raise ValueError(
            f"--ledger must be {shown(before)}, which pays for this workdir, got "
            f"{shown(choice.path)}. Leave it out, or use a new workdir."
        )
    # A lifecycle settles its charges when its config names another ledger.
    path = named or before or os.environ.get("JAXDP_LEDGER")
    return pathlib.Path(path) if path else None


def settled(
    choice: Choice, config: Any, root: pathlib.Path, private: Sequence[PrivateSet]
) -> pathlib.Path:
    """Returns the ledger of a run, and notes in the registry that it counts the private sets.

    Args:
      choice: What the command line says.
      config: The config.
      root: The workdir.
      private: The private sets of the run.

    Raises:
      ValueError: Another ledger or another name stands for the same records. Or as `chosen`.
    """
    named = chosen(choice, config, root)
    watched = _watched(choice, config, private)
    path = named or root / NAME
    if watched:
        registry = Registry(registry_path())
        digests = _digests(registry, watched)
        path = named or _known(registry, digests, choice) or _default(watched)
        check_folder("--ledger", path)
        for name, records in digests.items():
            try:
                registry.claim(path, name, records, count_anew=choice.count_anew)
            except CountedElsewhere as error:
                raise ValueError(f"{error} {NEW}") from error
        if named is None:
            print(f"{path} counts what is released about {', '.join(digests)}.", flush=True)
    if path != root / NAME:
        Ledger(path).close()  # One that is missing later was lost.
    return path


def asked(
    choice: Choice, config: Any, root: pathlib.Path | None, private: Sequence[PrivateSet]
) -> pathlib.Path | None:
    """Returns the ledger that `settled` would return, and writes nothing.

    None is a new ledger in the workdir.

    Raises:
      ValueError: As `settled`, but for records that another ledger than the named one counts.
    """
    named = chosen(choice, config, root)
    watched = _watched(choice, config, private)
    if named is not None or not watched:
        return named
    if not registry_path().exists():
        return _default(watched)
    registry = Registry(registry_path())
    return _known(registry, _digests(registry, watched), choice) or _default(watched)


def _watched(choice: Choice, config: Any, private: Sequence[PrivateSet]) -> list[PrivateSet]:
    """Returns the private sets that the registry is asked about."""
    if os.environ.get("JAXDP_RECORD_DIGESTS") == "0":
        return []
    is_named = choice != DEFAULT or bool(config.get("ledger"))
    return [records for records in private if is_named or not records.is_public]


def _digests(registry: Registry, private: Sequence[PrivateSet]) -> dict[str, np.ndarray]:
    """Returns the digests of private sets by name. Reads all their records."""
    return {records.name: record_digests(records.records, key=registry.key) for records in private}


def _default(private: Sequence[PrivateSet]) -> pathlib.Path:
    """Returns the path of a ledger for private sets that no ledger counts yet."""
    (first, *_) = private
    return home() / f"{file_name(first.name.partition('/')[0])}.sqlite"


def _known(
    registry: Registry, digests: Mapping[str, np.ndarray], choice: Choice
) -> pathlib.Path | None:
    """Returns the ledger that counts most of the records, or None.

    Raises:
      ValueError: The ledger is gone.
    """
    claims: list[Claim] = []
    for records in digests.values():
        claims += registry.claims(records)
    if not claims or choice.count_anew:
        return None
    path = pathlib.Path(claims[0].ledger)
    if not path.exists():
        raise ValueError(
            f"{shown(path)} counts these records as {claims[0].dataset!r}, and is gone. Restore it "
            f"from a copy, or say with --ledger where it is now. {NEW}"
        )
    return path
