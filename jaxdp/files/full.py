"""The error of a full disk, in a sentence with path, free bytes and remedy."""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Iterator

from jaxdp.files.text import shown

# EDQUOT is a user's quota, and EFBIG the largest size of a file (`ulimit -f`).
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """A file cannot be written because its disk is full. `errno` is the system's number."""

    def __str__(self) -> str:
        # Without "[Errno 28]" before the sentence.
        return str(self.strerror)


@contextlib.contextmanager
def explained_if_full(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of a full disk, while the body writes `path`, into `DiskFull`.

    Other errors pass unchanged. Orbax and TensorStore raise errors of their own, which have the
    system's words in their text.

    Args:
      path: The file or folder, which need not exist.

    Raises:
      DiskFull: The disk, a quota or the largest size of a file leaves no room.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:  # TensorStore raises ValueError
        code = _code(error)
        if not code:
            raise
        free = free_bytes(path)
        message = (
            f"{shown(path)} cannot be written: {os.strerror(code)}, with {free} bytes free on its "
            "disk. Free space and start the same command again: what was paid is not paid again."
        )
        raise DiskFull(code, message) from error


def _code(error: BaseException | None) -> int:
    """Returns the number of a full disk that an error or its cause has, or 0."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error.errno
        for code in _FULL:
            # An OSError with another number may have a path with these words in its text.
            if getattr(error, "errno", None) is None and os.strerror(code) in str(error):
                return code
        error = error.__cause__
    return 0


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Returns the bytes that this user may still write on the disk of a path."""
    nearest = pathlib.Path(path).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    return shutil.disk_usage(nearest).free
