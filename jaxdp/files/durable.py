"""Durable files. They appear whole or not at all, and are on the disk when the function returns."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, BinaryIO

from jaxdp.files.full import explained_if_full


def write_durably(
    path: pathlib.Path, data: bytes | Callable[[BinaryIO], Any], *, mode: int = 0o666
) -> None:
    """Replaces `path` by a whole new file. File and folder are on the disk when this returns.

    `data` may be a function that writes to an open binary file. The folder must exist, and only one
    process may write a file at a time. A process that dies leaves the old file. It may also leave
    `<name>.tmp`, which the next writer replaces.

    Raises:
        DiskFull: There is no room for the new file.
    """
    with explained_if_full(path):
        _write(path, data, mode)


def _write(path: pathlib.Path, data: bytes | Callable[[BinaryIO], Any], mode: int) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    # An old one may have another mode.
    temporary.unlink(missing_ok=True)
    try:
        # O_EXCL refuses a link that somebody else has put there.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                data(file)
            # Before the rename. Otherwise a power failure could leave an empty file of this name.
            to_disk(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` durably as indented JSON. It makes the folder if needed.

    Numbers of NumPy and JAX are written as those of Python.
    """
    text = json.dumps(value, indent=2, default=_plain)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, f"{text}\n".encode())


def _plain(number: Any) -> Any:
    """Returns a number of NumPy or JAX as one of Python, and raises TypeError for all else."""
    if getattr(number, "shape", None) == ():
        return number.item()
    raise TypeError(f"JSON has no {type(number).__name__}, such as {number!r}.")


def to_disk(file: Any) -> None:
    """Makes the content of an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path) -> None:
    """Makes new and deleted names in a folder durable, where the system supports that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: pathlib.Path) -> None:
    """Makes all files and names in and below a folder durable, after another library wrote them."""
    for root, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(pathlib.Path(root))
