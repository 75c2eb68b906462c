"""Locks of folders: one process at a time."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

_LOCK = "lock"


@contextlib.contextmanager
def locked(path: pathlib.Path, *, wait: bool = False) -> Iterator[None]:
    """Holds a file that only one process can hold; the system lets go of it when the process dies.

    Args:
        path: the file, made if needed, as is its folder; it stays behind, empty.
        wait: until another process lets go of it.

    Raises:
        BlockingIOError: another process holds it, without `wait`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


@contextlib.contextmanager
def alone(workdir: pathlib.Path) -> Iterator[None]:
    """Refuses a workdir, made if needed, in which another process is running.

    Raises:
        ValueError: there is one.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(workdir / _LOCK))
        except BlockingIOError as error:
            raise ValueError(f"another process is running in {workdir}; wait for it or use a new workdir.") from error
        yield
