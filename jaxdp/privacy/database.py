"""The files of a ledger: connections, new and copied databases, and the lock of writers."""

import concurrent.futures
import contextlib
import errno
import fcntl
import os
import pathlib
import secrets
import sqlite3
import stat
import threading
from collections.abc import Iterator

from jaxdp.files import sync_folder
from jaxdp.privacy import schema
from jaxdp.privacy.damage import damaged

BUSY_SECONDS = 60.0
MOUNTS = pathlib.Path("/proc/self/mounts")  # Linux
# File systems between machines. SQLite's log needs memory that only one machine has, and flock may
# hold on one machine only.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "glusterfs"),
    *("beegfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone"),
}


def connect(path: str) -> sqlite3.Connection:
    """Opens a database, or ":memory:", with the settings of a ledger."""
    db = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        # Transactions begin and end where the text says so.
        isolation_level=None,
        # Threads share a connection under the lock of the store.
        check_same_thread=False,
        uri=path.startswith("file:"),
    )
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA foreign_keys = ON")
    # A commit is on the disk when it returns, also if the power fails.
    db.execute("PRAGMA synchronous = FULL")
    return db


def existing(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of an existing ledger. Raises ValueError if it is no file."""
    if not pathlib.Path(path).is_file():
        raise ValueError(f"path {os.fspath(path)!r} is not a file. Give the ledger of a run.")
    check_size(pathlib.Path(path))
    return pathlib.Path(path)


def check_size(path: pathlib.Path) -> None:
    """Refuses an empty file, which SQLite would open as a new database.

    Only SQLite may open a ledger. Closing it otherwise would drop the locks of all connections of
    this process.
    """
    if path.stat().st_size == 0:
        raise damaged(path, "is empty", gone=True)


def create(path: pathlib.Path) -> None:
    """Makes a new ledger, which appears whole. Another process may have made it first."""
    try:
        with _appearing(path) as temporary, contextlib.closing(connect(os.fspath(temporary))) as db:
            # This pragma ignores the busy timeout, so it runs while nobody else has the file.
            db.execute("PRAGMA journal_mode = WAL")
            schema.fill(db)
            share_with_group(temporary)
    except (OSError, sqlite3.Error):
        # If the file exists, another process made it first and removed the temporary file.
        if not path.exists():
            raise


def share_with_group(*paths: pathlib.Path) -> None:
    """Makes files writable for their group if their folder has the setgid bit.

    Such a folder belongs to a team. SQLite gives `-wal` and `-shm` the mode of the database.
    """
    if not paths[0].absolute().parent.stat().st_mode & stat.S_ISGID:
        return
    for path in paths:
        about = path.stat()
        # Only the owner may change a mode. Another member finds the files as the owner left them.
        if about.st_uid == os.geteuid() and not about.st_mode & stat.S_IWGRP:
            path.chmod(stat.S_IMODE(about.st_mode) | stat.S_IRGRP | stat.S_IWGRP)


def check_writable(*paths: pathlib.Path) -> None:
    """Raises PermissionError for the first file that exists and that this user cannot write.

    SQLite would open a readable ledger, and leave a log of this user that locks out its owner.
    """
    for path in paths:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def rights_missing(path: str | os.PathLike[str], *, read_only: bool = False) -> str:
    """Returns which files of a ledger this user cannot write, with the remedy, or "".

    With `read_only` it is those that this user cannot read.
    """
    right = os.R_OK if read_only else os.W_OK
    ledger = pathlib.Path(path)
    files = [ledger.absolute().parent]
    files += [pathlib.Path(f"{ledger}{suffix}") for suffix in ("", "-wal", "-shm", ".head")]
    files.append(ledger.with_name(f".{ledger.name}.anchor"))
    closed = []
    for file in files:
        if file.exists() and not os.access(file, right):
            about = file.stat()
            mode = stat.filemode(about.st_mode)
            closed.append(f"{os.fspath(file)!r} has mode {mode} and belongs to user {about.st_uid}")
    if not closed:
        return ""
    if read_only:
        return f"You cannot read here: {'; '.join(closed)}. Ask the owner for read access."
    return (
        f"You cannot write here: {'; '.join(closed)}. Ask the owner for write access. In a folder "
        "with the setgid bit (chmod g+ws) a new ledger is writable for the group."
    )


def network_disk(path: pathlib.Path, mounts: pathlib.Path = MOUNTS) -> str:
    """Returns the type of the network file system on which a file lies, or "".

    It is "" too where the system does not tell.
    """
    if not mounts.exists():
        return ""
    place = path.absolute().parent.resolve()
    longest, kind = pathlib.Path("/"), ""
    for line in mounts.read_text(errors="replace").splitlines():
        _, where, mounted, *_ = line.split(" ")
        # The file writes a blank in a name as an octal number.
        point = pathlib.Path(where.replace("\\040", " "))
        # A later line covers an earlier one at the same place.
        if place.is_relative_to(point) and len(point.parts) >= len(longest.parts):
            longest, kind = point, mounted
    return kind if kind in _NETWORK else ""


def copy_database(db: sqlite3.Connection, path: pathlib.Path, mode: int = 0o644) -> None:
    """Copies a database durably to a new file, which appears whole.

    `mode` is that of the file, without the bits of the umask.
    """
    with _appearing(path) as temporary:
        # It has its mode before it has any content.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode))
        with contextlib.closing(sqlite3.connect(temporary)) as copy:
            db.backup(copy)


def check_new(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if a backup cannot be at a path."""
    if pathlib.Path(path).exists():
        raise ValueError(
            f"path {os.fspath(path)!r} exists. A backup replaces nothing. Choose another path."
        )
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise ValueError(
            f"path {os.fspath(path)!r} lies in a directory that does not exist. Create it first."
        )


def remove_unfinished(path: pathlib.Path) -> None:
    """Removes the temporary files of processes that died while they made the ledger."""
    for temporary in path.parent.glob(f".{path.name}.new-*"):
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _appearing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path and renames its finished file to `path`.

    Raises FileExistsError if `path` exists.
    """
    # A random name, because several processes may make the ledger at once.
    temporary = path.with_name(f".{path.name}.new-{secrets.token_hex(8)}")
    try:
        yield temporary
        try:
            # A link fails if the path exists. A rename would replace the other ledger.
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if path.exists():
                raise FileExistsError(os.fspath(path)) from None
            os.rename(temporary, path)
    finally:
        for suffix in ("", "-wal", "-shm"):
            pathlib.Path(f"{temporary}{suffix}").unlink(missing_ok=True)
    sync_folder(path.absolute().parent)


def acquire(path: pathlib.Path) -> int:
    """Opens a file and waits until this process alone holds it.

    The system queues waiting processes. SQLite's own lock polls instead. With 8 writers it gave one
    of them 21 of 200 turns.
    """
    # Opened anew each time, so that forked children share no lock.
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        pass
    except OSError as error:
        os.close(file)
        raise OSError(
            f"{os.fspath(path)!r} cannot be locked: {error}. Two programs could then spend one "
            "budget twice. Keep the ledger on a local disk."
        ) from error
    # flock has no timeout, so another thread waits. It closes a lock that arrives too late.
    acquired: concurrent.futures.Future[None] = concurrent.futures.Future()

    def wait() -> None:
        fcntl.flock(file, fcntl.LOCK_EX)
        acquired.set_result(None)

    threading.Thread(target=wait, daemon=True).start()
    try:
        acquired.result(BUSY_SECONDS)
        return file
    except BaseException as error:  # also an interrupt
        acquired.add_done_callback(lambda _: os.close(file))
        if not isinstance(error, TimeoutError):
            raise
    raise OSError(
        f"{os.fspath(path)!r} is held by another process for {BUSY_SECONDS:g} seconds, so its "
        "ledger cannot be written. Everything that was reserved in it still counts. Wait for that "
        "process, and try again."
    )


def release(file: int) -> None:
    """Ends the lock of `acquire`."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
