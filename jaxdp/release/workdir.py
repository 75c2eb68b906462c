"""Folders and objects for one process at a time."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from jaxdp.files import shown

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
    # The file is never deleted. Otherwise two processes could hold two files of this name.
    with path.open("w") as file:
        # Unlike `lockf`, it also refuses a second open file of this process, as of another till.
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
            raise ValueError(
                f"another process is running in {shown(workdir)}. Wait for it or use a new workdir."
            ) from error
        yield


class OwnProcess:
    """The process that made an object. A copy of the object in a forked process is not to be used.

    It would release with the secret of the first process, or count without it. JAX has no threads
    in a forked process, and nobody there releases the locks that other threads held, so it might
    also wait forever.
    """

    def __init__(self) -> None:
        # A forked process has another number.
        self._number = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is another one."""
        return self._number != os.getpid()

    def check(self, what: str) -> None:
        """Raises RuntimeError in another process. `what` names the object."""
        if self.forked:
            raise RuntimeError(
                f"{what} belongs to the process from which this one was forked. Go on with it "
                "there. For work of its own, start the new process by 'spawn' and make everything "
                "there."
            )
