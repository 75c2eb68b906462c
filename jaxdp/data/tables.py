"""CSV files as people have them: read whole, or refused with the file, the line and the remedy.

Every cell stays text, so that "007" and "7" are two patients. `numbers` makes features of the
columns of numbers.
"""

import csv
import dataclasses
import io
import os
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jaxdp.data.numbers import check_digits, check_whole
from jaxdp.files import shown

_SAVE = "Save the table as CSV with commas, in UTF-8."
# NUL is a byte of each ASCII letter of UTF-16 and UTF-32.
_WIDE = (b"\xff\xfe", b"\xfe\xff")
_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Table:
    """The cells of a CSV file.

    Attributes:
      path: The file.
      columns: {name: the cells of the rows}, in the order of the file.
      lines: The number of the line of each row, for messages.
    """

    path: pathlib.Path
    columns: Mapping[str, tuple[str, ...]] = dataclasses.field(repr=False)
    lines: tuple[int, ...] = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.lines)

    def error(self, what: str, row: int) -> ValueError:
        """Returns an error about a row, with the file and the line."""
        return ValueError(f"line {self.lines[row]} of {shown(os.fspath(self.path))} {what}")


def read_table(path: str | os.PathLike[str], *, needed: Collection[str] = ()) -> Table:
    """Reads a CSV file: UTF-8, commas, a header, and rows of as many cells.

    Names and cells lose no character, except that names lose outer blanks. Empty lines are left
    out.

    Args:
      path: The file.
      needed: The columns that it must have.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The file is not such a table. The message has the file, the line and the remedy,
          and no cell.
    """
    path = pathlib.Path(path)
    where = shown(os.fspath(path))
    rows = _rows(path, where)
    if not rows:
        raise ValueError(
            f"{where} must have rows, and a header with {', '.join(map(repr, needed)) or 'names'}."
        )
    first_line, header = rows.pop(0)
    names = [name.strip() for name in header]
    for mark, marks in ((";", "semicolons"), ("\t", "tabs")):
        if mark in "".join(names) and not set(needed) <= set(names):
            raise ValueError(
                f"line {first_line} of {where} has {marks} between its columns. {_SAVE}"
            )
    for number, name in enumerate(names, 1):
        if not name:
            raise ValueError(
                f"column {number} of {where} has no name. Name it or remove it (pandas: "
                "index=False)."
            )
        if names.count(name) > 1:
            raise ValueError(f"{where} has two columns {name!r}. Rename or remove one of them.")
    missing = [name for name in needed if name not in names]
    if missing or not rows:
        has = shown(", ".join(names))
        raise ValueError(
            f"{where} must have rows, and a header with {', '.join(map(repr, needed))}. It has "
            f"{has}."
        )
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(
                f"line {line} of {where} has {len(row)} cells, and the header {len(names)}. Put a "
                "cell that has a comma into quotation marks, and give every row all cells."
            )
    cells = zip(*(row for _, row in rows), strict=True)
    columns = dict(zip(names, cells, strict=True))
    return Table(path, columns, lines=tuple(line for line, _ in rows))


def _rows(path: pathlib.Path, where: str) -> list[tuple[int, list[str]]]:
    """Returns the rows of a file that are not empty, each with the number of its last line."""
    content = path.read_bytes()
    if content.startswith(_WIDE) or b"\0" in content[:1000]:
        raise ValueError(f"{where} is not UTF-8, but UTF-16, UTF-32 or no text at all. {_SAVE}")
    try:
        text = content.decode("utf-8-sig")  # drops a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line} of {where} is not UTF-8, but perhaps Latin-1. {_SAVE}"
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        for row in reader:
            if row:
                rows.append((reader.line_num, row))
    except csv.Error as error:
        raise ValueError(
            f"line {reader.line_num} of {where} is no line of a CSV file: {error}. {_SAVE}"
        ) from error
    return rows


def numbers(table: Table, *, texts: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Returns the columns of numbers: int32 if all cells are whole numbers, else float32.

    A number is written with ASCII digits, a point and an exponent. A column without any number is
    text and left out.

    Args:
      table: The cells.
      texts: Columns that are text, whatever their cells are, and left out.

    Raises:
      ValueError: A column has numbers, and a blank or a text in another row. Or a whole number does
        not fit into 32 bits. The message has the file, the line and the remedy, and no cell.
    """
    features = {}
    for name, cells in table.columns.items():
        if name in texts:
            continue
        column = _numbers(table, name, [cell.strip() for cell in cells])
        if column is not None:
            features[name] = column
    return features


def _numbers(table: Table, name: str, cells: Sequence[str]) -> np.ndarray | None:
    """Returns the numbers of a column, or None if no cell is a number."""
    not_numbers = [row for row, cell in enumerate(cells) if not _DECIMAL.fullmatch(cell)]
    if len(not_numbers) == len(cells):
        return None
    if not_numbers:
        content = "text" if cells[not_numbers[0]] else "nothing"
        raise table.error(
            f"has {content} in the column {name!r}, whose other cells are numbers. Write a number, "
            "such as a public constant, leave the row or the column out, or give "
            f"texts=({name!r},) if the column is text.",
            not_numbers[0],
        )
    where = f"column {name!r} of {shown(os.fspath(table.path))}"
    if all(map(_WHOLE.fullmatch, cells)):
        integers = [int(cell) for cell in cells]
        fits = [-(2**63) <= number < 2**63 for number in integers]
        if not all(fits):
            raise table.error(
                f"has a whole number of more than 64 bits in the column {name!r}. Give "
                f"texts=({name!r},) if it is an identifier, or leave the column out.",
                fits.index(False),
            )
        array = np.array(integers, np.int64)
        check_whole(array, f"{where} (texts=({name!r},) keeps identifiers)")
        fits_32_bits = not array.size or np.abs(array).max() < 2**31
        return array.astype(np.int32) if fits_32_bits else array
    array = np.array([float(cell) for cell in cells])
    check_digits(array, where)
    return array.astype(np.float32)
