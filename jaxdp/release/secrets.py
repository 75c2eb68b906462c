"""Secrets of a run.

They are drawn, kept while a paid release is unfinished, and deleted. Keys derive from them.
"""

import contextlib
import hmac
import pathlib

import numpy as np

from jaxdp.files import shown, sync_folder, write_durably
from jaxdp.transforms.noise import new_seed, stream

__all__ = ["FILE", "check_seed", "derive", "forget", "generator", "new_seed", "stored", "stream"]

FILE = "secret_seed"
_BYTES = 16


def derive(seed: bytes, purpose: str) -> bytes:
    """Returns 16 bytes for one purpose. They reveal nothing about the seed or other purposes."""
    return hmac.digest(seed, purpose.encode(), "sha256")[:_BYTES]


def generator(seed: bytes) -> np.random.Generator:
    """Returns NumPy's generator of all bits of a seed. Equal seeds give equal draws."""
    # The key of Philox has 128 bits, all of the seed. `default_rng` would hash it first.
    bits = np.random.Philox(key=int.from_bytes(seed, "little"))
    return np.random.Generator(bits)


def check_seed(seed: bytes | None) -> None:
    """Raises TypeError or ValueError unless `seed` is a secret seed or None."""
    # A text of 16 characters has a length too, so the type is compared first.
    if seed is not None and not isinstance(seed, bytes):
        raise TypeError(
            f"seed must be {_BYTES} bytes, got {type(seed).__name__}. Leave it out to draw them."
        )
    if seed is not None and len(seed) != _BYTES:
        raise ValueError(
            f"seed must be {_BYTES} bytes, got {len(seed)}. Leave it out to draw them."
        )


def stored(path: pathlib.Path, seed: bytes | None = None) -> bytes:
    """Returns the seed in a file that only its owner may read.

    A new file gets `seed`, or a new one.

    Raises:
      ValueError: The file holds no seed, or one that differs from `seed`.
    """
    # On the disk before it is used, because a release that was paid needs it after a crash.
    if not path.exists():
        write_durably(path, (seed or new_seed()).hex().encode(), mode=0o600)
    try:
        stored_seed = bytes.fromhex(path.read_text())
    except ValueError:
        stored_seed = b""
    if len(stored_seed) != _BYTES:
        raise ValueError(
            f"{shown(path)} does not hold a seed of {_BYTES} bytes. It was damaged. Delete it. The "
            "interrupted release is then computed and charged once more with fresh noise."
        )
    if seed is not None and stored_seed != seed:
        raise ValueError(
            f"seed differs from the one of the unfinished release in {shown(path.parent)}. Resume "
            "without seed=."
        )
    return stored_seed


def forget(path: pathlib.Path) -> None:
    """Deletes a seed, because anyone who knows it can subtract the noise."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        # Otherwise a crash could bring it back.
        sync_folder(path.parent)
