"""Secrets of a run: drawn, kept while a paid release is unfinished, derived from, deleted."""

import contextlib
import hmac
import pathlib

from jaxdp.files import sync_folder, write_durably
from jaxdp.transforms.noise import new_seed, stream

__all__ = ["FILE", "check_seed", "derive", "forget", "new_seed", "stored", "stream"]

FILE = "secret_seed"
_BYTES = 16


def derive(seed: bytes, purpose: str) -> bytes:
    """Returns 16 bytes for one purpose, which tell nothing about the seed or other purposes."""
    return hmac.digest(seed, purpose.encode(), "sha256")[:_BYTES]


def check_seed(seed: bytes | None) -> None:
    """Raises TypeError or ValueError unless `seed` is a secret seed, or None."""
    if seed is not None and not isinstance(seed, bytes):
        raise TypeError(f"seed must be {_BYTES} bytes, got {type(seed).__name__}; leave it out to draw them.")
    if seed is not None and len(seed) != _BYTES:
        raise ValueError(f"seed must be {_BYTES} bytes, got {len(seed)}; leave it out to draw them.")


def stored(path: pathlib.Path, seed: bytes | None = None) -> bytes:
    """Returns the seed in a file that only its owner may read; a new file gets `seed`, or a new one.

    Raises:
      ValueError: the file holds another seed than `seed`, or none.
    """
    if not path.exists():
        write_durably(path, (seed or new_seed()).hex().encode(), mode=0o600)
    try:
        found = bytes.fromhex(path.read_text())
    except ValueError:
        found = b""
    if len(found) != _BYTES:
        raise ValueError(
            f"{path} does not hold a seed of {_BYTES} bytes. It was damaged: delete it, and the release that was "
            "interrupted is made, and charged, once more with fresh noise."
        )
    if seed is not None and found != seed:
        raise ValueError(f"seed differs from that of the unfinished release in {path.parent}; resume without seed=.")
    return found


def forget(path: pathlib.Path) -> None:
    """Deletes a seed: whoever learns it could subtract the noise."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_folder(path.parent)
