"""Reading files that may be damaged, or come from somebody else: sizes first, and one sentence for every failure."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

AGAIN = "Restore it from a copy, or delete it: the same command then makes it again."
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a file or package may declare; more is refused before it is allocated. Raise a limit for trusted files.

    Attributes:
      bytes: of all arrays that are read; 8 GiB by default.
      arrays: their number.
      pixels: height times width of one image before it is decoded; by default that of Pillow. Also bounds the
        positions and windows of a packaged model.
      blocks: of a packaged model.
      num_classes: of a package.
      copies: of every representation in a package.
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
        """Raises ValueError if `declared` is more than the limit called `name`; `what` says whose number it is."""
        if declared > getattr(self, name):
            raise ValueError(
                f"{what} declares {declared} {name}, more than the limit of {getattr(self, name)}; raise "
                f"Limits({name}=...) if you trust its writer."
            )


@contextlib.contextmanager
def understood(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Turns an error of code that reads a file into a ValueError with path and remedy; a missing file keeps its own."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and os.fspath(path) in str(error):
            raise
        what = " ".join(str(error).split())[:200]
        raise ValueError(f"{os.fspath(path)} is damaged: {type(error).__name__}, {what}. {remedy}") from error


def read_json(path: pathlib.Path, *, remedy: str = AGAIN, kind: type[Any] = dict, keys: Iterable[str] = ()) -> Any:
    """Reads a JSON file of this library: a value of type `kind`, with `keys` if it is a dict.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: no JSON, another type or no such key; the message has the path and the sentence `remedy`.
    """
    with understood(path, remedy):
        found = json.loads(path.read_bytes())
        if not isinstance(found, kind):
            raise TypeError(f"it holds {type(found).__name__} instead of {kind.__name__}")
        if missing := [key for key in keys if key not in found]:
            raise TypeError(f"it lacks {', '.join(missing)}")
    return found


def read_npz(
    path: str | os.PathLike[str],
    names: Sequence[str] | None = None,
    *,
    optional: Sequence[str] = (),
    remedy: str = AGAIN,
    limits: Limits | None = None,
) -> dict[str, np.ndarray]:
    """Reads arrays from an .npz file; names, dtypes and sizes are checked before anything is decompressed.

    Args:
      path: the file.
      names: arrays that it must have; None reads all.
      optional: arrays that are read if they are there.
      remedy: a sentence for the error of a damaged file.
      limits: on what is read; `Limits()` by default.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a damaged file, a missing array, Python objects or an exceeded limit; the message has the path.
    """
    limits = limits or Limits()
    with understood(path, remedy), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if missing := [name for name in names or () if name not in members]:
            has = ", ".join(sorted(members)[:20])
            raise ValueError(f"{path} has no array {', '.join(missing)}; it has {has}. {remedy}")
        wanted = list(members) if names is None else [*names, *(name for name in optional if name in members)]
        limits.check("arrays", len(wanted), str(path))
        total, found = 0, {}
        for name in wanted:
            with archive.open(members[name]) as file:
                total += _declared_bytes(file, members[name].file_size)
            limits.check("bytes", total, f"{path}, up to array {name!r},")
        for name in wanted:
            with archive.open(members[name]) as file:
                found[name] = np.lib.format.read_array(file, allow_pickle=False)
        return found


def read_npy(path: pathlib.Path, *, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Reads an .npy file whose header and size are those of the array that it should hold.

    Raises:
      ValueError, SyntaxError, tokenize.TokenError: another array, or a header that is no Python.
    """
    with path.open("rb") as file:
        if _header(file) != (shape, dtype) or path.stat().st_size - file.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError("another array")
    return np.load(path, allow_pickle=False)


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"another version of .npy, {version}")
    shape, _, dtype = _HEADERS[version](file)
    return shape, dtype


def _declared_bytes(file: Any, size: int) -> int:
    """Bytes of the array whose .npy file is open; `size` is that of the file."""
    shape, dtype = _header(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    declared = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or declared != size - file.tell():
        raise ValueError(f"an array of shape {shape} does not have {size - file.tell()} bytes")
    return declared


def check_finite(arrays: Mapping[str, Any], path: str | os.PathLike[str], remedy: str) -> None:
    """Raises ValueError that names the first array with a NaN or an infinity."""
    for name, array in arrays.items():
        if array.dtype.kind in "fcV" and not np.isfinite(np.asarray(array)).all():  # bfloat16 and its like are "V"
            raise ValueError(f"{os.fspath(path)} has NaN or infinite values in {name!r}. {remedy}")


def check_image(data: bytes, *, shape: Sequence[int | None], what: str, limits: Limits) -> None:
    """Raises ValueError unless the header of an encoded image has the declared size, before it is decoded.

    Args:
      data: a file of a format that Pillow reads.
      shape: (height, width, ...) as declared; None is any up to the limit.
      what: names the image in errors.
      limits: on its pixels.
    """
    from PIL import Image

    with understood(what, "Prepare the data set again."), Image.open(io.BytesIO(data)) as image:
        width, height = image.size
    limits.check("pixels", height * width, what)
    if any(stated not in (None, found) for stated, found in zip(shape, (height, width), strict=False)):
        raise ValueError(f"{what} is {height}x{width}, declared {shape[0]}x{shape[1]}; prepare the data set again.")
