"""No claim of a paper is without a verdict or a reason, and the page of claims is the generated
one."""

import re

import pytest

from benchmarks import claims
from benchmarks.claims import Verdict

LISTED = claims.read_claims()
PAPERS = LISTED["papers"]
ROWS = {key: claims.read_verdicts(paper["pages"]) for key, paper in PAPERS.items()}


def without_verdict(listed, rows):
    """Returns the claims that have neither a row of a table of verdicts nor a reason."""
    return [
        claim["claim"]
        for claim in listed
        if not claims.row_of(claim, rows) and not claim.get("without")
    ]


@pytest.mark.parametrize("key", PAPERS)
def test_every_claim_has_a_verdict_or_a_reason(key):
    mine = LISTED[key]
    assert len(mine) >= 20 and without_verdict(mine, ROWS[key]) == []
    assert len({claim["claim"] for claim in mine}) == len(mine)
    # The twin: a page that loses its rows, and a claim that names no row and no reason.
    assert len(without_verdict(mine, [])) > 5
    assert without_verdict([{"claim": "new", "row": "no such row"}], ROWS[key]) == ["new"]


def test_the_page_is_that_of_the_list_and_of_the_verdicts():
    text = claims.PAGE.read_text()
    assert claims.page_of(LISTED, ROWS) == text, "run: python -m benchmarks.claims"
    changed = {key: [row._replace(verdict="changed") for row in rows] for key, rows in ROWS.items()}
    assert claims.page_of(LISTED, changed) != text


def test_the_evidence_of_a_claim_exists():
    named = {
        (one, key)
        for key, paper in PAPERS.items()
        for claim in [paper, *LISTED[key]]
        for one in claim.get("evidence", ())
    }
    assert len(named) > 8
    for one, key in sorted(named):
        file = re.search(r"tests/[\w/]+\.py|configs/[\w/]+\.py", one)
        path = f"benchmarks/results/{one}"
        if one.startswith("python -m"):
            path = file[0] if file else f"launch/{one.rpartition('.')[2]}.py"
        assert (claims.ROOT / path).is_file(), (key, one)


TABLE = """## Verdicts

| claim of the paper | ours, epsilon 1 | verdict |
|---|---|---|
| it helps | .5 | holds |
| it helps much | .6 | [no](#below) |

| claim | in this run |
|---|---|
| it is fast | yes |

| method | verdict |
|---|---|
| it | holds |
"""


def test_tables_of_verdicts_are_read_and_rows_are_found_by_their_beginning():
    rows = list(claims.verdicts("page.md", TABLE))
    place = "page.md#verdicts"
    assert rows == [
        Verdict(place, "Verdicts", "it helps", ".5", "holds"),
        Verdict(place, "Verdicts", "it helps much", ".6", "[no](#below)"),
        Verdict(place, "Verdicts", "it is fast", "", "yes"),
    ]
    assert claims.row_of({"row": "it helps"}, rows) == rows[0]
    assert claims.row_of({"row": "it is"}, rows) == rows[2]
    assert claims.row_of({"row": "it fails"}, rows) is None and claims.row_of({}, rows) is None
    with pytest.raises(ValueError, match="2 rows of verdicts begin with 'it h'"):
        claims.row_of({"row": "it h"}, rows)
