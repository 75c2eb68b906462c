"""Statistics over the rows of a study, and tables of them."""

import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdp.files import write_durably
from jaxdp.report import format_table

Row = Mapping[str, Any]


class Moments(NamedTuple):
    """Mean, sample standard deviation and standard error of some numbers; NaN for what one number does not have."""

    mean: float
    deviation: float
    error: float

    def as_json(self) -> dict[str, float | None]:
        """Returns mean and standard error, None where there is none."""
        return {"mean": self.mean, "error": None if math.isnan(self.error) else self.error}


def moments(values: Iterable[float]) -> Moments:
    """Returns the moments of at least one number."""
    found = [float(value) for value in values]
    deviation = statistics.stdev(found) if len(found) > 1 else math.nan
    return Moments(statistics.fmean(found), deviation, deviation / math.sqrt(len(found)))


def select(rows: Iterable[Row], **coordinates: Any) -> list[Row]:
    """Returns the rows with these coordinates; a tuple of values allows any of them."""

    def fits(row: Row) -> bool:
        return all(row[k] in v if isinstance(v, tuple) else row[k] == v for k, v in coordinates.items())

    return [row for row in rows if fits(row)]


def over_seeds(rows: Iterable[Row], value: str | Callable[[Row], float] = "accuracy") -> Moments:
    """Returns the moments over seeds, each seed being the mean of its rows.

    Rows of one seed share an upstream model or a stream. So seeds are independent, and rows are not.
    """
    by_seed: dict[Any, list[float]] = {}
    for row in rows:
        by_seed.setdefault(row.get("seed"), []).append(value(row) if callable(value) else row[value])
    return moments(statistics.fmean(values) for values in by_seed.values())


class Difference(NamedTuple):
    """A paired difference: mean and standard error over seeds, pairs in which the second is higher, and pairs."""

    mean: float
    error: float
    higher: int
    pairs: int


def paired_difference(
    rows: Sequence[Row], key: str, first: Any, second: Any, *, coordinates: Sequence[str], value: str = "accuracy"
) -> Difference:
    """Returns how much a value changes when one coordinate goes from `first` to `second` and all others stay.

    Differences are averaged per seed first. The error is that over seeds.

    Args:
      rows: of cells.
      key: the coordinate.
      coordinates: all coordinates of a cell.
      value: what is compared.

    Raises:
      ValueError: there is no pair.
    """
    others = [name for name in coordinates if name != key]
    found = {(row[key], *(row[name] for name in others)): row for row in rows}
    gaps = []
    for (at, *place), row in found.items():
        if at == first and (second, *place) in found:
            gaps.append({"seed": row.get("seed"), "gap": found[second, *place][value] - row[value]})
    if not gaps:
        raise ValueError(f"no cell has a partner in which {key} is {second!r} instead of {first!r}.")
    mean, _, error = over_seeds(gaps, "gap")
    return Difference(mean, error, sum(row["gap"] > 0 for row in gaps), len(gaps))


def best(rows: Iterable[Row], by: str = "accuracy") -> Row:
    """Returns the first of the rows that are best on tuning data."""
    return max(rows, key=lambda row: row[by])


def pivot(
    rows: Sequence[Row], index: str, columns: str, cell: Callable[[Sequence[Row]], Any], *, heading: str = "{}"
) -> list[dict[str, Any]]:
    """Returns a table with a line per value of `index` and a column per value of `columns`, in order of appearance.

    Args:
      rows: of cells.
      index, columns: coordinates.
      cell: of the rows that share both; a place without a row is left empty.
      heading: of a column, with its value in place of {}.
    """
    headings = {row[columns]: heading.format(row[columns]) for row in rows}
    table = []
    for name in dict.fromkeys(row[index] for row in rows):
        line = {index: name}
        for at, title in headings.items():
            if here := select(rows, **{index: name, columns: at}):
                line[title] = cell(here)
        table.append(line)
    return table


def percent(mean: float, spread: float | None = None, *, sign: str = "") -> str:
    """Returns "81.2 ± 0.4" for shares; without the second part where the spread is None or NaN."""
    known = spread is not None and math.isfinite(spread)
    return f"{100 * mean:{sign}.1f}" + (f" ± {100 * spread:.1f}" if known and spread is not None else "")


def number(mean: float, spread: float | None = None) -> str:
    """Returns "20.8 ± 0.12"; without the second part where the spread is None or NaN."""
    known = spread is not None and math.isfinite(spread)
    return f"{mean:.3g}" + (f" ± {spread:.2g}" if known else "")


def markdown(tables: Mapping[str, Any]) -> str:
    """Returns a document with a section per table; a str among the tables is a paragraph as it is."""
    parts = []
    for title, rows in tables.items():
        parts.append(rows if isinstance(rows, str) else f"## {title}\n\n{format_table(rows, style='markdown')}")
    return "\n\n".join(parts) + "\n"


def write_tables(root: pathlib.Path, tables: Mapping[str, Any]) -> None:
    """Writes tables.md and tables.tex, a `tabular` per table; nothing for no tables."""
    if not tables:
        return
    write_durably(root / "tables.md", markdown(tables).encode())
    latex = [f"% {title}\n{_tabular(rows)}\n" for title, rows in tables.items() if not isinstance(rows, str)]
    write_durably(root / "tables.tex", "\n".join(latex).encode())


_SYMBOLS = {"\\": r"\textbackslash{}", "±": r"$\pm$", "ε": r"$\epsilon$", "γ": r"$\gamma$"}
_ESCAPED = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | _SYMBOLS)


def _tabular(rows: Sequence[Row]) -> str:
    """The cells as in Markdown, which rounds the numbers."""
    lines = [line.strip("|").split(" | ") for line in format_table(rows, style="markdown").splitlines()]
    head, _, *body = ([cell.strip().replace(r"\|", "|").translate(_ESCAPED) for cell in line] for line in lines)
    written = [" & ".join(line) + r" \\" for line in (head, *body)]
    inside = "\n".join([r"\toprule", written[0], r"\midrule", *written[1:], r"\bottomrule"])
    return f"\\begin{{tabular}}{{{'l' * len(head)}}}\n{inside}\n\\end{{tabular}}"
