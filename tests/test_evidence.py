"""The tables of the result pages are those of the committed JSON files."""

import json
from pathlib import Path

import pytest

from benchmarks.evidence import ROOT, TABLES, place

RESULTS = ROOT / "benchmarks" / "results"


def shifted(found, changed=None):
    """Returns results in which every accuracy, bound and size is higher: no table may stay as it is."""
    if isinstance(found, dict):
        return {k: shifted(v, k) for k, v in found.items()}
    if isinstance(found, list):
        return [shifted(v, changed) for v in found]
    if isinstance(found, int) and found > 1e6:
        return 2 * found
    return found + 0.02 if isinstance(found, float) and changed not in ("epsilon", "upper") else found


@pytest.mark.parametrize(("page", "name", "file", "make"), TABLES, ids=[name for _, name, _, _ in TABLES])
def test_a_table_is_that_of_the_runs(page, name, file, make):
    text = Path(ROOT / "docs" / "results" / page).read_text(encoding="utf-8")
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    assert place(text, name, make(found)) == text
    assert place(text, name, make(shifted(found))) != text
