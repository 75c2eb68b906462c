"""Tables for terminals and for Markdown documents."""

import itertools
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal

from jaxdp.files import shown


def format_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str] | Mapping[str, str] | None = None,
    *,
    style: Literal["plain", "markdown"] = "plain",
    digits: int = 4,
) -> str:
    """Lays out rows as a table with aligned columns: text to the left, numbers to the right.

    Args:
        rows: One mapping per row, from column key to value. A missing key or None is an empty cell.
        columns: The keys in order. A mapping also gives their headings. None takes all in order of
            first appearance.
        style: "plain" for terminals, "markdown" for a pipe table that also reads well as plain
            text.
        digits: The significant digits of floats. Integers are written in full, and booleans as yes
            or no.

    Returns:
        Lines without a final newline.

    Raises:
        ValueError: `style` is unknown or there is no column.
    """
    if style not in ("plain", "markdown"):
        raise ValueError(f"style={style!r} is unknown. Use 'plain' or 'markdown'.")
    if columns is None:
        columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    if isinstance(columns, Mapping):
        headings = dict(columns)
    else:
        headings = {key: key for key in columns}
    if not headings:
        raise ValueError("the table has no columns. Name them in columns.")
    lines = [list(map(shown, headings.values()))]
    for row in rows:
        lines.append([_cell(row.get(key), digits) for key in headings])
    if style == "markdown":
        lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    widths = [max(3, *map(len, cells)) for cells in zip(*lines, strict=True)]
    numeric = [bool(rows) and all(_is_number(row.get(key)) for row in rows) for key in headings]

    def layout(cells: Sequence[str]) -> str:
        aligned = []
        for cell, width, right in zip(cells, widths, numeric, strict=True):
            if right:
                aligned.append(cell.rjust(width))
            else:
                aligned.append(cell.ljust(width))
        if style == "markdown":
            return f"| {' | '.join(aligned)} |"
        return "  ".join(aligned).rstrip()

    rule = []
    for width, right in zip(widths, numeric, strict=True):
        # In Markdown a colon aligns the column to the right.
        end = ":" if right and style == "markdown" else "-"
        rule.append("-" * (width - 1) + end)
    heading, *body = map(layout, lines)
    return "\n".join([heading, layout(rule), *body])


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, Real) and not isinstance(value, bool))


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Real) and not isinstance(value, Integral):
        return f"{float(value):.{digits}g}"
    return shown(str(value).replace("\n", " "))
