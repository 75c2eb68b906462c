"""Numbers that a device holds as they are: what is refused, converted, or loses digits.

JAX has numbers of at most 32 bits, unless `jax_enable_x64` is set. It converts wider ones without a
word: the time 1700000000123 becomes -807049093. So every column and every batch goes through this
module.

| dtype | treatment |
|---|---|
| bool, integers of up to 32 bits, floats of up to 32 bits | as they are |
| 64-bit integers | kept if every number fits into 32 bits, refused by name otherwise |
| float64 | kept; a warning by name where float32 merges numbers or rounds a whole one |
| float64 that is infinite in float32 | refused by name |
| big-endian | the same numbers in the order of the machine |
| long double, records, texts, objects, masked arrays | refused by name |
"""

import warnings
from typing import Any

import jax
import numpy as np

_NUMBERS_AT_ONCE = 2**20
# A column whose numbers differ by less than this many steps of float32 has lost its digits.
_STEPS = 1024
_AS_ID = "If it is an identifier, give it as text."


def native(array: np.ndarray, where: str) -> np.ndarray:
    """Returns an array in the byte order of the machine, the same object if it has that order.

    Raises:
      TypeError: The array does not hold numbers of at most 64 bits, or is masked. `where` names it.
    """
    check_mask(array, where)
    dtype = array.dtype
    numeric = jax.dtypes.issubdtype(dtype, np.number) or dtype == np.bool_
    if dtype.hasobject or not numeric:
        raise TypeError(
            f"{where} must be an array [n, ...] of numbers, got dtype {dtype} and shape "
            f"{array.shape}. Encode text and dates as numbers, and pad lists to one length."
        )
    if dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise TypeError(
            f"{where} has the dtype {dtype}, which no device has. Convert it with "
            "astype(np.float32)."
        )
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def check_mask(array: Any, where: str) -> None:
    """Raises TypeError for a masked array. NumPy would return what is under the mask."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{where} is a masked array, whose mask would be lost. Put a public constant where it "
            "is masked: array.filled(0)."
        )


def _keeps_64_bits() -> bool:
    """Returns whether JAX keeps numbers of 64 bits."""
    return bool(jax.config.read("jax_enable_x64"))


def check_whole(array: Any, where: str) -> None:
    """Raises ValueError if 64-bit integers do not fit into the 32 bits that JAX keeps.

    The message has no number.
    """
    is_wide = array.dtype.kind in "iu" and array.dtype.itemsize >= 8
    if not is_wide or not array.size or _keeps_64_bits():
        return
    narrow = np.iinfo(f"{array.dtype.kind}4")
    if array.min() < narrow.min or array.max() > narrow.max:
        raise ValueError(
            f"{where} has whole numbers outside of [{narrow.min}, {narrow.max}], which a device "
            "would wrap around. Subtract a public constant or divide by one, such as milliseconds "
            f"by 1000, and store {narrow.dtype}. {_AS_ID}"
        )


def check_digits(array: np.ndarray, where: str) -> None:
    """Warns if float32 loses more of float64 numbers than its usual rounding.

    It warns if a whole number is another one in float32, or if the numbers of a position, such as a
    feature, differ by less than 1024 steps of float32 around them.

    Raises:
      ValueError: A number is infinite in float32.
    """
    if array.dtype != np.float64 or not array.size or _keeps_64_bits():
        return
    # In pieces, since a copy of all numbers may not fit into memory.
    rows = 1
    if array.ndim:
        rows = max(1, _NUMBERS_AT_ONCE // max(1, array[0].size))
    low: Any = np.inf
    high: Any = -np.inf
    rounded = False
    for start in range(0, len(array), rows):
        wide = array[start : start + rows]
        finite = np.isfinite(wide)
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        if not np.isfinite(narrow[finite]).all():
            raise ValueError(
                f"{where} has numbers that are infinite in float32. Divide by a public constant."
            )
        # A whole number that float32 changes may be an identifier or a time.
        is_whole = finite & (wide == np.rint(wide))
        rounded = rounded or bool(np.any(is_whole & (wide != narrow)))
        low = np.minimum(low, np.min(wide, axis=0, initial=np.inf, where=finite))
        high = np.maximum(high, np.max(wide, axis=0, initial=-np.inf, where=finite))
    with np.errstate(invalid="ignore"):
        largest = np.maximum(np.abs(low), np.abs(high))
        step = np.spacing(largest.astype(np.float32))
    merged = (high > low) & (high - low < _STEPS * step)
    if rounded or np.any(merged):
        warnings.warn(
            f"{where} is float64, and float32 loses its last digits. Subtract a public constant, "
            f"or store whole numbers as integers. {_AS_ID}",
            stacklevel=2,
        )


def check_batch(batch: Any, argument: str = "source") -> Any:
    """Returns a gathered batch, whose numbers a device holds as they are.

    Raises:
      TypeError, ValueError: As `native` and `check_whole`. The message names the column, for the
          owner of the data.
    """

    def checked(path: Any, leaf: Any) -> Any:
        column = jax.tree_util.keystr(path, simple=True, separator="/") or "the root"
        where = f"{column!r} of {argument}"
        if isinstance(leaf, np.ndarray):
            leaf = native(leaf, where)
            check_whole(leaf, where)
        return leaf

    return jax.tree_util.tree_map_with_path(checked, batch)
