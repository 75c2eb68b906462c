"""Readers of files that may be damaged or untrusted.

They check sizes first and explain failures in one sentence.
"""

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.files.extras import optional
from jaxdp.files.text import parse_json, shown

AGAIN = "Restore it from a copy, or delete it. The same command then makes it again."
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper limits on what a file or package may declare, refused before it is allocated.

    Raise one for trusted files.

    Attributes:
      bytes: The bytes of all arrays that are read, by default 8 GiB.
      arrays: The number of arrays.
      pixels: Height times width of one image before it is decoded. The default is Pillow's. It also
          bounds the positions and windows of a packaged model.
      blocks: The blocks of a packaged model.
      num_classes: The classes of a package.
      copies: The copies of every representation in a package.
    """

    bytes: int = 2**33
    arrays: int = 100_000
    pixels: int = 89_478_485
    blocks: int = 1000
    num_classes: int = 1_000_000
    copies: int = 10_000

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"limits need a positive integer for {name}, got {value!r}.")

    def check(self, name: str, declared: Any, what: str) -> None:
        """Raises ValueError if `declared` exceeds the limit called `name`.

        `what` names its source.
        """
        if declared > getattr(self, name):
            raise ValueError(
                f"{shown(what)} declares {declared} {name}, more than the limit of "
                f"{getattr(self, name)}. Raise Limits({name}=...) if you trust its writer."
            )


@contextlib.contextmanager
def understood(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Turns an error of a file reader into a ValueError with path and remedy.

    A missing file keeps its error.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        name = shown(path)
        # An error of this library that says all that is needed.
        if isinstance(error, ValueError) and name in str(error):
            raise
        # One line, without its full stop, and without the address of a file in memory.
        text = re.sub(r" ?<\S+ object at 0x[0-9a-f]+>", "", " ".join(str(error).split()))
        cause = shown(text[:200]).removesuffix(".")
        raise ValueError(f"{name} is damaged: {type(error).__name__}, {cause}. {remedy}") from error


def read_json(
    path: pathlib.Path, *, remedy: str = AGAIN, kind: type[Any] = dict, keys: Iterable[str] = ()
) -> Any:
    """Reads a JSON file of this library: a value of type `kind`, with `keys` if it is a dict.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The file is not JSON, has another type or lacks a key. The message has the path
          and `remedy`.
    """
    with understood(path, remedy):
        value = parse_json(path.read_bytes(), finite=False)
        if not isinstance(value, kind):
            raise TypeError(f"it holds {type(value).__name__} instead of {kind.__name__}.")
        missing = [key for key in keys if key not in value]
        if missing:
            raise TypeError(f"it lacks {', '.join(missing)}.")
    return value


def read_npz(
    path: str | os.PathLike[str],
    names: Sequence[str] | None = None,
    *,
    optional: Sequence[str] = (),
    remedy: str = AGAIN,
    limits: Limits | None = None,
) -> dict[str, np.ndarray]:
    """Reads arrays from an .npz file.

    It checks names, dtypes and sizes before it decompresses anything.

    Args:
      path: The file.
      names: The arrays that it must have. None reads all.
      optional: The arrays that are read if they exist.
      remedy: A sentence for the error of a damaged file.
      limits: The limits on what is read, by default `Limits()`.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The file is damaged, lacks an array, has Python objects or exceeds a limit. The
          message has the path.
    """
    limits = limits or Limits()
    with _archive(path, remedy) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        missing = [name for name in names or () if name not in members]
        if missing:
            has = ", ".join(map(shown, sorted(members)[:20]))
            lacks = ", ".join(map(shown, missing))
            raise ValueError(f"{shown(path)} has no array {lacks}. It has {has}. {remedy}")
        if names is None:
            names_read = list(members)
        else:
            names_read = [*names, *(name for name in optional if name in members)]
        limits.check("arrays", len(names_read), str(path))
        # All headers are read before the first array is allocated.
        total = 0
        for name in names_read:
            with archive.open(members[name]) as file:
                total += _declared_bytes(file, members[name].file_size)
            limits.check("bytes", total, f"{path}, up to array {name!r},")
        arrays = {}
        for name in names_read:
            with archive.open(members[name]) as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
        return arrays


def npz_names(path: str | os.PathLike[str], *, remedy: str = AGAIN) -> list[str]:
    """Returns the names of the arrays of an .npz file.

    It reads no array. Raises the errors of `read_npz`.
    """
    with _archive(path, remedy) as archive:
        return [info.filename.removesuffix(".npy") for info in archive.infolist()]


@contextlib.contextmanager
def _archive(path: str | os.PathLike[str], remedy: str) -> Iterator[zipfile.ZipFile]:
    """Opens an .npz file. The error of another kind of file says what it is."""
    where = shown(os.fspath(path))
    if os.path.isdir(path):
        raise ValueError(f"{where} is a folder, not an .npz file. Give the path of a file.")
    with open(path, "rb") as file:
        start = file.read(len(np.lib.format.MAGIC_PREFIX))
    if start == np.lib.format.MAGIC_PREFIX:
        raise ValueError(
            f"{where} is an .npy file with one array, not an .npz file. Give "
            "jaxdp.data.from_arrays its numpy.load(path, mmap_mode='r')."
        )
    if start and not start.startswith(b"PK"):
        raise ValueError(f"{where} is not an .npz file, which is a ZIP archive of arrays. {remedy}")
    with understood(path, remedy), zipfile.ZipFile(path) as archive:
        yield archive


def _declared_bytes(file: Any, size: int) -> int:
    """Returns the bytes of an .npy file's array, after a comparison with the size of the file."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"its .npy version {version} is unknown.")
    shape, _, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects.")
    if dtype.itemsize == 0:
        raise ValueError(
            f"an array of shape {shape} has the dtype {dtype}, whose entries have no bytes."
        )
    declared = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or declared != size - file.tell():
        raise ValueError(f"an array of shape {shape} does not have {size - file.tell()} bytes.")
    # An array of shape (10**13, 0) has no bytes either, and its rows are counted by whoever reads
    # it.
    return math.prod(max(1, extent) for extent in shape) * dtype.itemsize


def sha256_of(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits. The file is not read into memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_finite(arrays: Mapping[str, Any], path: str | os.PathLike[str], remedy: str) -> None:
    """Raises ValueError that names the first array with a NaN or an infinity."""
    for name, array in arrays.items():
        may_be_infinite = array.dtype.kind in "fcV"  # "V" includes bfloat16
        if may_be_infinite and not np.isfinite(np.asarray(array)).all():
            raise ValueError(f"{shown(path)} has NaN or infinite values in {name!r}. {remedy}")


def check_image(
    data: bytes,
    *,
    shape: Sequence[int | None],
    what: str,
    limits: Limits,
    remedy: str = "Prepare the data set again.",
) -> None:
    """Raises ValueError unless the header of an encoded image has the declared size.

    The image is not decoded.

    Args:
      data: A file of a format that Pillow reads.
      shape: The declared (height, width, ...). None is any size up to the limit.
      what: The name of the image in errors.
      limits: The limits on its pixels.
      remedy: A sentence for the error of a damaged file.
    """
    pillow = optional("PIL.Image", "images")
    if not data:
        raise ValueError(f"{what} is an empty file. {remedy}".strip())
    with understood(what, remedy), pillow.open(io.BytesIO(data)) as image:
        width, height = image.size
    limits.check("pixels", height * width, what)
    # What is not declared has any size.
    declared_height, declared_width = (*shape, None, None)[:2]
    if declared_height not in (None, height) or declared_width not in (None, width):
        declared = f"{declared_height}x{declared_width}"
        raise ValueError(f"{shown(what)} is {height}x{width}, but declared {declared}. {remedy}")
