"""Locks of folders for one process at a time."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

_LOCK = "lock"


@contextlib.contextmanager
def locked(path: pathlib.Path, *, wait: bool = False) -> Iterator[None]:
    """Holds a file that only one process can hold. The system releases it when the process dies.

    Args:
        path: The file. It is made if needed, with its folder, and stays behind, empty.
        wait: Whether to wait until another process releases it.

    Raises:
        BlockingIOError: Another process holds it, and `wait` is False.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


@contextlib.contextmanager
def alone(workdir: pathlib.Path) -> Iterator[None]:
    """Refuses a workdir in which another process is running. The workdir is made if needed.

    Raises:
        ValueError: Another process is running there.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(workdir / _LOCK))
        except BlockingIOError as error:
            raise ValueError(f"another process is running in {workdir}. Wait for it or use a new workdir.") from error
        yield
