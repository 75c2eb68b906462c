"""Statistics over the rows of a study, and tables of them."""

import math
import operator
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp.files import write_durably, write_json
from jaxdp.report import format_table

from .study import Row


class Moments(NamedTuple):
    """Mean, sample standard deviation and standard error of some numbers. One number has NaN for
    the last two.
    """

    mean: float
    deviation: float
    error: float

    def as_json(self) -> dict[str, float | None]:
        """Returns mean and standard error. A NaN error becomes None."""
        return {"mean": self.mean, "error": None if math.isnan(self.error) else self.error}


def moments(values: Iterable[float]) -> Moments:
    """Returns the moments of at least one number."""
    numbers = [float(value) for value in values]
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return Moments(statistics.fmean(numbers), deviation, deviation / math.sqrt(len(numbers)))


def select(rows: Iterable[Row], **coordinates: Any) -> list[Row]:
    """Returns the rows with these coordinates. A tuple of values allows any of them."""

    def fits(row: Row) -> bool:
        for name, value in coordinates.items():
            values = value if isinstance(value, tuple) else (value,)
            if row[name] not in values:
                return False
        return True

    return [row for row in rows if fits(row)]


def only(row: Row, *names: str) -> dict[str, Any]:
    """Returns the values of a row with these names."""
    return {name: row[name] for name in names}


def over_seeds(rows: Iterable[Row], value: str | Callable[[Row], float] = "accuracy") -> Moments:
    """Returns the moments over seeds. The value of a seed is the mean of its rows.

    Rows of one seed share an upstream model or a stream, so only seeds are independent.
    """
    by_seed: dict[Any, list[float]] = {}
    for row in rows:
        number = value(row) if callable(value) else row[value]
        by_seed.setdefault(row.get("seed"), []).append(number)
    return moments(map(statistics.fmean, by_seed.values()))


class Difference(NamedTuple):
    """A paired difference: mean and standard error over seeds, pairs in which the second is higher,
    and pairs.
    """

    mean: float
    error: float
    higher: int
    pairs: int


def paired_difference(
    rows: Sequence[Row],
    key: str,
    first: Any,
    second: Any,
    *,
    coordinates: Sequence[str],
    value: str = "accuracy",
) -> Difference:
    """Returns how much a value changes when one coordinate goes from `first` to `second` and all
    others stay.

    Differences are averaged per seed first. The error is the standard error over seeds.

    Args:
      rows: The rows of cells.
      key: The coordinate that changes.
      coordinates: All coordinates of a cell.
      value: The compared value.

    Raises:
      ValueError: No two rows form a pair.
    """
    others = [name for name in coordinates if name != key]

    def place(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in others)

    starts = {place(row): row for row in rows if row[key] == first}
    ends = {place(row): row for row in rows if row[key] == second}
    gaps = []
    for at, row in starts.items():
        if at in ends:
            gaps.append({"seed": row.get("seed"), "gap": ends[at][value] - row[value]})
    if not gaps:
        raise ValueError(
            f"no cell has a partner in which {key} is {second!r} instead of {first!r}."
        )
    mean, _, error = over_seeds(gaps, "gap")
    return Difference(mean, error, sum(row["gap"] > 0 for row in gaps), len(gaps))


def changes(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """Returns how many answers were right before and after, for the report.

    Args:
      before, after: Whether each answer is right, bool [n], of two models on the same inputs.

    Returns:
      The accuracies "before" and "after", and how many wrong answers became right ("gained") and
      the reverse ("lost").
    """
    return {
        "before": float(before.mean()),
        "after": float(after.mean()),
        "gained": int(np.sum(~before & after)),
        "lost": int(np.sum(before & ~after)),
    }


def best(rows: Iterable[Row]) -> Row:
    """Returns the row of the best accuracy on tuning data, the first one among equals."""
    return max(rows, key=operator.itemgetter("accuracy"))


def pivot(
    rows: Sequence[Row],
    index: str,
    columns: str,
    cell: Callable[[Sequence[Row]], Any],
    *,
    heading: str = "{}",
) -> list[dict[str, Any]]:
    """Returns a table with a line per value of `index` and a column per value of `columns`, in
    order of appearance.

    Args:
      rows: The rows of cells.
      index, columns: Coordinates.
      cell: Maps the rows that share both to an entry. A place without a row stays empty.
      heading: The heading of a column, with its value in place of {}.
    """
    headings = {row[columns]: heading.format(row[columns]) for row in rows}
    table = []
    for name in dict.fromkeys(row[index] for row in rows):
        line = {index: name}
        for column, title in headings.items():
            shared = select(rows, **{index: name, columns: column})
            if shared:
                line[title] = cell(shared)
        table.append(line)
    return table


def percent(mean: float, spread: float | None = None, *, sign: str = "") -> str:
    """Returns "81.2 ± 0.4" for shares, without the second part if the spread is None or NaN."""
    text = f"{100 * mean:{sign}.1f}"
    if spread is None or not math.isfinite(spread):
        return text
    return f"{text} ± {100 * spread:.1f}"


def number(mean: float, spread: float | None = None) -> str:
    """Returns "20.8 ± 0.12", without the second part if the spread is None or NaN."""
    text = f"{mean:.3g}"
    if spread is None or not math.isfinite(spread):
        return text
    return f"{text} ± {spread:.2g}"


def markdown(tables: Mapping[str, Any]) -> str:
    """Returns a document with a section per table. A str among the tables becomes a paragraph."""
    sections = []
    for title, rows in tables.items():
        if isinstance(rows, str):
            sections.append(rows)
        else:
            sections.append(f"## {title}\n\n{format_table(rows, style='markdown')}")
    return "\n\n".join(sections) + "\n"


def write_tables(root: pathlib.Path, tables: Mapping[str, Any]) -> None:
    """Writes tables.md, tables.json, and tables.tex with a `tabular` per table. Writes nothing
    without tables.
    """
    if not tables:
        return
    write_json(root / "tables.json", tables)
    write_durably(root / "tables.md", markdown(tables).encode())
    latex = [
        f"% {title}\n{_tabular(rows)}\n"
        for title, rows in tables.items()
        if not isinstance(rows, str)
    ]
    write_durably(root / "tables.tex", "\n".join(latex).encode())


_SYMBOLS = {"\\": r"\textbackslash{}", "±": r"$\pm$", "ε": r"$\epsilon$", "γ": r"$\gamma$"}
_ESCAPED = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | _SYMBOLS)


def _tabular(rows: Sequence[Row]) -> str:
    """Returns a LaTeX table. The cells come from the Markdown table, which rounds the numbers."""
    lines = format_table(rows, style="markdown").splitlines()
    del lines[1]  # the line of Markdown below the headings
    cells = [_latex_cells(line) for line in lines]
    head, *body = (" & ".join(row) + r" \\" for row in cells)
    inside = "\n".join([r"\toprule", head, r"\midrule", *body, r"\bottomrule"])
    return f"\\begin{{tabular}}{{{'l' * len(cells[0])}}}\n{inside}\n\\end{{tabular}}"


def _latex_cells(line: str) -> list[str]:
    r"""Returns the cells of a line of Markdown: "| a_b | 5 % |" gives [r"a\_b", r"5 \%"]."""
    cells = line.strip("|").split(" | ")
    return [cell.strip().replace(r"\|", "|").translate(_ESCAPED) for cell in cells]
