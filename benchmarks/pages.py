"""Lines and cells of the tables of pages: columns by their formats, and means with their errors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.report import format_table
from launch import results

Row = Mapping[str, Any]
Column = str | Callable[[Any], Any]


def lines(rows: Iterable, columns: Mapping[str, Column]) -> list[dict]:
    """Returns a line for each row. A column is a format such as "{ms:.2f}", or a function of a row.

    A format whose value the row lacks, or has as None, is an empty cell.
    """
    return [{name: _cell(row, column) for name, column in columns.items()} for row in rows]


def _cell(row, column: Column):
    if callable(column):
        return column(row)
    try:
        return column.format_map(row)
    except (KeyError, TypeError):  # TypeError: a None has no digits
        return ""


def page_table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table whose headings may repeat."""
    text = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    text += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(text)


def markdown(table: str | Sequence[Row]) -> str:
    """Returns the text of a table. Some tables are text already."""
    return table if isinstance(table, str) else format_table(table, style="markdown")


def accuracy(row: Row) -> str:
    """Returns the mean "accuracies" of a row in percent, and in brackets their deviation."""
    percent = 100 * np.asarray(row["accuracies"])
    return f"{percent.mean():.1f} ({percent.std(ddof=1):.1f})"


def mean(values: Iterable[float | None], form: str = ".1f", scale: float = 100.0) -> str:
    """Returns a mean, by default in percent, and in brackets its standard error.

    One value has no error. There is no text without a value.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    mean, _, error = results.moments(numbers)
    text = format(scale * mean, form)
    return f"{text} ({scale * error:{form.lstrip('+z')}})" if len(numbers) > 1 else text


def by_epsilon(
    rows: Iterable[Row],
    key: str,
    head: str,
    cell: Callable,
    more: Mapping[str, Column] | None = None,
) -> list[dict]:
    """Returns a table with a line for each value of a key, and a column for each epsilon.

    Args:
      rows: The rows, in the order of the lines.
      key, head: The key, and its heading.
      cell: Maps a row to its cell.
      more: Columns after the first, of the first row of each line.
    """
    ascending = sorted(rows, key=lambda row: row["epsilon"])
    table = []
    for name in dict.fromkeys(row[key] for row in rows):
        own = results.select(ascending, **{key: name})
        line = {head: str(name)} | lines(own[:1], more or {})[0]
        table.append(line | {f"epsilon {row['epsilon']:g}": cell(row) for row in own})
    return table
