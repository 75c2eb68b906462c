"""The arrays of a single release that a workdir keeps, in one safetensors file.

The metadata of the file holds a random salt and a check: a hash of the release, keyed by the salt.
A release whose check differs is another one. Without the salt, a reader could test guesses of
private data.
"""

import hmac
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdp.files import understood, write_durably
from jaxdp.release import secrets

FILE = "released.safetensors"
_DAMAGED = (
    "Restore it from a copy, or delete it. The release is then computed with fresh noise and "
    "charged once more."
)


def new_metadata(digest: str) -> dict[str, str]:
    """Returns metadata for the arrays of a release of this digest."""
    salt = secrets.new_seed()
    return {"salt": salt.hex(), "check": _check(salt, digest)}


def is_of(path: pathlib.Path, digest: str) -> bool:
    """Returns whether a file holds the arrays of a release of this digest."""
    from safetensors import safe_open

    # Only the header is read, and no array.
    with understood(path, _DAMAGED), safe_open(path, framework="numpy") as file:
        metadata: dict[str, str] = file.metadata() or {}
        salt = bytes.fromhex(metadata.get("salt", ""))
    # A file without metadata is of no release.
    return _check(salt, digest) == metadata.get("check", "")


def save_arrays(path: pathlib.Path, arrays: Mapping[str, Any], metadata: dict[str, str]) -> None:
    """Writes arrays durably, in place of earlier ones."""
    from safetensors.numpy import save

    # safetensors needs arrays whose rows are contiguous.
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    write_durably(path, save(contiguous, metadata))


def load_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `Till.once` kept in a workdir's file."""
    from safetensors.numpy import load_file

    with understood(path, _DAMAGED):
        return load_file(path)


def _check(salt: bytes, digest: str) -> str:
    return hmac.digest(salt, digest.encode(), "sha256").hex()
