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
# The first bytes of files that are no text, and what to do.
_NOT_TEXT = {
    b"\x1f\x8b": "a gzip file. Unpack it.",
    b"PK\x03\x04": "a zip archive or a workbook of Excel, or an .npz file for jaxdp.data.from_npz. "
    "Unpack it, or save the sheet as CSV.",
    b"\xd0\xcf\x11\xe0": "a workbook of Excel. Save the sheet as CSV.",
    b"PAR1": "a Parquet file. Write it as CSV, or give its columns to jaxdp.data.from_arrays.",
    b"ARROW1": "an Arrow file. Write it as CSV, or give its columns to jaxdp.data.from_arrays.",
    b"\x93NUMPY": "an .npy file of NumPy. Give its array to jaxdp.data.from_arrays.",
    b"\x89HDF": "an HDF5 file. Write it as CSV, or give its columns to jaxdp.data.from_arrays.",
}
# NUL is a byte of each ASCII letter of UTF-16 and UTF-32.
_WIDE = (b"\xff\xfe", b"\xfe\xff")
# Latin-1 has control characters where the cp1252 of Windows has quotation marks and dashes.
_CONTROL = re.compile("[\x80-\x84\x86-\x9f]")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]", re.ASCII)
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)
# Numbers with a decimal comma or marks of thousands. Points may be those of dates.
_OTHER_MARKS = re.compile("[+-]?([0-9]+,[0-9]+|[0-9]{1,3}([,'’   ][0-9]{3})+([.,][0-9]+)?)")
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

    def where(self, column: str) -> str:
        """Returns what an error calls a column."""
        return f"column {column!r} of {shown(os.fspath(self.path))}"

    def error(self, what: str, row: int) -> ValueError:
        """Returns an error about a row, with the file and the line."""
        return ValueError(f"line {self.lines[row]} of {shown(os.fspath(self.path))} {what}")


def read_table(
    path: str | os.PathLike[str],
    *,
    needed: Collection[str] = (),
    delimiter: str = "",
    encoding: str = "",
) -> Table:
    """Reads a CSV file: a header, and rows of as many cells.

    Names and cells lose no character, except that names lose outer blanks. Empty lines are left
    out.

    Args:
      path: The file.
      needed: The columns that it must have.
      delimiter, encoding: The separator of the cells, and a codec of Python. "" is a comma, or
        UTF-8, for a caller whose user cannot give others.

    Raises:
      FileNotFoundError: The file does not exist.
      ValueError: The file is not such a table. The message has the file, the line and the remedy,
          and no cell.
    """
    where = shown(os.fspath(path))
    if "://" in os.fspath(path):
        raise ValueError(f"{where} is an address. Download the file, and give its path.")
    path = pathlib.Path(path)
    if path.is_dir():
        raise ValueError(f"{where} is a folder. Give the path of a CSV file.")
    if not path.exists():
        raise FileNotFoundError(f"{where} does not exist. Give the path of a table.")
    text = _text(path.read_bytes(), where, encoding)
    rows = _rows(text, where, delimiter or ",")
    needed_names = ", ".join(map(repr, needed)) or "names"
    must_have = f"{where} must have rows, and a header with {needed_names}."
    if not rows:
        raise ValueError(must_have)
    first_line, header = rows.pop(0)
    names = [name.strip() for name in header]
    missing = [name for name in needed if name not in names]
    # Such a header may be one that has another separator.
    if missing or len(names) == 1:
        _check_separator("".join(names), f"line {first_line} of {where}", delimiter)
    _check_names(names, where)
    if missing or not rows:
        raise ValueError(f"{must_have} It has {shown(', '.join(names))}.")
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(
                f"line {line} of {where} has {len(row)} cells, and the header {len(names)}. Put a "
                "cell that has a separator into quotation marks, and give every row all cells."
            )
    cells = zip(*(row for _, row in rows), strict=True)
    columns = dict(zip(names, cells, strict=True))
    return Table(path, columns, lines=tuple(line for line, _ in rows))


def _check_separator(header: str, where: str, delimiter: str) -> None:
    """Raises ValueError if a header has another separator. It lacks a name that it must have."""
    for mark, marks in _SEPARATORS.items():
        if mark in header and mark != (delimiter or ","):
            remedy = f"Give delimiter={mark!r}." if delimiter else _SAVE
            raise ValueError(f"{where} has {marks} between its columns. {remedy}")


def _check_names(names: Sequence[str], where: str) -> None:
    """Raises ValueError unless each column has a name of its own."""
    for number, name in enumerate(names, 1):
        if not name:
            raise ValueError(
                f"column {number} of {where} has no name. Name it or remove it (pandas: "
                "index=False)."
            )
        if names.count(name) > 1:
            raise ValueError(f"{where} has two columns {name!r}. Rename or remove one of them.")


def _text(content: bytes, where: str, encoding: str) -> str:
    """Returns the text of a file, without a byte order mark.

    Raises:
      ValueError: The file is no text, or has another encoding.
    """
    for start, kind in _NOT_TEXT.items():
        if content.startswith(start):
            raise ValueError(f"{where} is {kind}")
    own = _decoded(content, "utf-8-sig")
    if encoding.lower().replace("_", "-") in ("", "utf-8", "utf8", "utf-8-sig"):
        return _utf8(content, own, where, encoding)
    try:
        text = content.decode(encoding)
    except LookupError as error:
        raise ValueError(
            f"encoding must be a codec of Python, such as 'utf-8', 'cp1252' or 'utf-16', got "
            f"{encoding!r}."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not {encoding}. Give the encoding= with which it was saved."
        ) from error
    # Latin-1 and its relatives decode any bytes, and so UTF-8 too.
    if own is not None and own != text and "\0" not in own:  # UTF-16 has NULs
        raise ValueError(f"{where} is UTF-8, which {encoding} would garble. Leave out encoding=.")
    text = text.removeprefix("\ufeff")
    if _CONTROL.search(text):
        raise ValueError(
            f"{where} has control characters as {encoding}. Perhaps it is of Windows: "
            "encoding='cp1252'."
        )
    return text


def _utf8(content: bytes, text: str | None, where: str, encoding: str) -> str:
    """Returns the text of a file, None if it is no UTF-8. The errors say what it may be."""
    if content.startswith(_WIDE) or b"\0" in content[:1000]:
        remedy = "Give encoding='utf-16'." if encoding else _SAVE
        raise ValueError(f"{where} is not UTF-8, but UTF-16, UTF-32 or no text at all. {remedy}")
    if text is None:
        # No sequence of UTF-8 has a line break in it.
        lines = enumerate(content.split(b"\n"), 1)
        line = next(number for number, part in lines if _decoded(part, "utf-8") is None)
        remedy = "Give encoding='cp1252' (Windows) or 'latin-1'." if encoding else _SAVE
        raise ValueError(f"line {line} of {where} is not UTF-8, but perhaps Latin-1. {remedy}")
    return text


def _decoded(content: bytes, encoding: str) -> str | None:
    """Returns the text of bytes, or None."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        return None


def _rows(text: str, where: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """Returns the rows of a file that are not empty, each with the number of its last line."""
    # Quoted cells may have line breaks.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = []
    try:
        for row in reader:
            if row:
                rows.append((reader.line_num, row))
    except csv.Error as error:
        raise ValueError(
            f"line {reader.line_num} of {where} is no line of a CSV file: {error}. Close each "
            f"quotation mark. {_SAVE}"
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
      ValueError: A column has numbers, and a blank or a text in another row. Or all its numbers
        have a decimal comma or marks of thousands, or one does not fit into 32 bits. The message
        has the file, the line and the remedy, and no cell.
    """
    features = {}
    for name, cells in table.columns.items():
        if name in texts:
            continue
        stripped = [cell.strip() for cell in cells]
        if all(map(_OTHER_MARKS.fullmatch, stripped)):
            raise table.error(
                f"has a decimal comma or a mark of thousands in the column {name!r}, as all rows "
                "have. Write its numbers with a decimal point and without other marks, or give "
                f"texts=({name!r},) if the column is text.",
                0,
            )
        column = number_column(table, name, stripped)
        if column is not None:
            features[name] = column
    return features


def has_leading_zero(cell: str) -> bool:
    """Returns whether a number is written as 007."""
    return bool(_LEADING_ZERO.match(cell))


def places(
    table: Table,
    name: str,
    cells: Sequence[str],
    values: Sequence[str],
    *,
    kind: str,
) -> np.ndarray:
    """Returns the position of each cell in public values, int32 [n].

    Args:
      table: The table, for messages.
      name: The column.
      cells: Its cells.
      values: The values that are declared.
      kind: What the values are, in messages: "classes".

    Raises:
      ValueError: A cell is none of the values. The message has the line and no cell.
    """
    place_of = {value: place for place, value in enumerate(values)}
    for row, cell in enumerate(cells):
        if cell not in place_of:
            raise table.error(
                f"must have one of the {kind} {shown(', '.join(values))} in the column {name!r}.",
                row,
            )
    return np.array([place_of[cell] for cell in cells], np.int32)


def check_classes(table: Table, name: str, labels: np.ndarray, num_classes: int) -> None:
    """Raises ValueError for a number of a class, int32 [n], outside of [0, num_classes)."""
    outside = np.flatnonzero((labels < 0) | (labels >= num_classes)).tolist()
    if outside:
        raise table.error(
            f"has a label in the column {name!r} that must be in [0, {num_classes}). Correct it, "
            "or declare num_classes to fit.",
            outside[0],
        )


def other_than_numbers(cells: Sequence[str]) -> list[int]:
    """Returns the rows whose cells are no numbers."""
    return [row for row, cell in enumerate(cells) if not _DECIMAL.fullmatch(cell)]


def number_column(table: Table, name: str, cells: Sequence[str]) -> np.ndarray | None:
    """Returns the numbers of a column, or None if no cell is a number. The errors are those of
    `numbers`.
    """
    not_numbers = other_than_numbers(cells)
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
    where = table.where(name)
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
        fits_32_bits = all(-(2**31) < number < 2**31 for number in integers)
        return array.astype(np.int32) if fits_32_bits else array
    array = real(table, name, cells)
    check_digits(array, where)
    return array.astype(np.float32)


def real(table: Table, name: str, cells: Sequence[str]) -> np.ndarray:
    """Returns the numbers of a column whose cells are all numbers, float64 [n].

    Raises:
      ValueError: A number is infinite in float64.
    """
    array = np.array([float(cell) for cell in cells])
    if infinite := np.flatnonzero(np.isinf(array)).tolist():
        raise table.error(
            f"has a number in the column {name!r} that is infinite in float64. Correct it.",
            infinite[0],
        )
    return array
