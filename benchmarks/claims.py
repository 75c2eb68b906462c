"""Writes the page of the papers' claims from their list and from the tables of verdicts.

    python -m benchmarks.claims

`benchmarks/claims.toml` has the claims. A claim names the row of its verdict by the first cell of
that row, so a page of results may gain rows and change numbers. Then this command is run again.
`tests/test_claims.py` compares the page, and finds a claim that has neither a verdict nor a reason.
"""

import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.pages import page_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLAIMS = ROOT / "benchmarks" / "claims.toml"
RESULTS = ROOT / "docs" / "results"
PAGE = RESULTS / "claims.md"
_INTRO = """# Claims of the papers

Each row is a claim of a paper, in our words. It has the verdict of our runs, the page with the
whole table, and the JSON file or the command behind the numbers.
[How to read the numbers](index.md#how-to-read-the-numbers) says what "holds" means.
`python -m benchmarks.claims` writes this page from `benchmarks/claims.toml` and from the pages."""


class Verdict(NamedTuple):
    """A row of a table of verdicts.

    Attributes:
      place: The page and the anchor of the section.
      section: The heading of the section.
      claim, ours, verdict: Cells of the row, "" where the table has none.
    """

    place: str
    section: str
    claim: str
    ours: str
    verdict: str


def verdicts(page: str, text: str) -> Iterator[Verdict]:
    """Yields the rows of all tables of verdicts of a page: those whose first column is "claim"."""
    section = ""
    header = []
    for line in text.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = [_column(name) for name in cells]
        elif header[0] == "claim" and set(line) - set("|- "):
            row = dict(zip(header, cells, strict=True))
            place = f"{page}#{_anchor(section)}"
            verdict = row.get("verdict", cells[-1])
            yield Verdict(place, section, row["claim"], row.get("ours", ""), verdict)


def _column(name: str) -> str:
    """Returns "claim" for "claim of the paper", and "ours" for "ours, epsilon 1"."""
    return re.split(r"[ ,]", name.lower())[0]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def row_of(claim: Mapping, rows: Sequence[Verdict]) -> Verdict | None:
    """Returns the verdict of a claim, None if its row is not there. The first of equal rows counts.

    Raises:
      ValueError: Several rows begin as the claim says, and none is exactly that.
    """
    name = claim.get("row")
    if name is None:
        return None
    same = [row for row in rows if row.claim == name]
    begin = [row for row in rows if row.claim.startswith(name)]
    matching = same[:1] or begin
    if len(matching) > 1:
        raise ValueError(f"{len(matching)} rows of verdicts begin with {name!r}.")
    return next(iter(matching), None)


def read_claims() -> dict:
    """Returns the papers, and the claims of each under its key."""
    return tomllib.loads(CLAIMS.read_text(encoding="utf-8"))


def read_verdicts(pages: Sequence[str]) -> list[Verdict]:
    """Returns the rows of verdicts of some pages of results."""
    rows = []
    for page in pages:
        rows += verdicts(page, (RESULTS / page).read_text(encoding="utf-8"))
    return rows


def page_of(listed: Mapping, rows_by_paper: Mapping[str, Sequence[Verdict]]) -> str:
    """Returns the text of the page."""
    sections = [_INTRO]
    for key, paper in listed["papers"].items():
        rows = rows_by_paper[key]
        header = ["claim", "in the paper", "ours", "verdict", "from"]
        lines = [_line(claim, paper, rows) for claim in listed[key]]
        sections.append(f"## {paper['title']}\n\n{page_table(header, lines)}")
        named = {row_of(claim, rows) for claim in listed[key]}
        others = [f"[{row.claim}]({row.place})" for row in rows if row not in named]
        if others:
            sections.append(f"Further verdicts: {'. '.join(others)}.")
    return "\n\n".join(sections) + "\n"


def _line(claim: Mapping, paper: Mapping, rows: Sequence[Verdict]) -> list[str]:
    """Returns the cells of a claim."""
    row = row_of(claim, rows)
    evidence = [f"`{one}`" for one in claim.get("evidence", paper["evidence"])]
    if row is None:
        sources = ", ".join(evidence if "evidence" in claim else [])
        return [claim["claim"], claim["where"], "", claim["without"], sources]
    page = row.place.partition("#")[0]
    ours, verdict = (cell.replace("](#", f"]({page}#") for cell in (row.ours, row.verdict))
    sources = ", ".join([f"[{row.section}]({row.place})", *evidence])
    return [claim["claim"], claim["where"], ours, verdict, sources]


def main():
    listed = read_claims()
    rows = {key: read_verdicts(paper["pages"]) for key, paper in listed["papers"].items()}
    PAGE.write_text(page_of(listed, rows), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
