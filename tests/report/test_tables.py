"""Text tables."""

import numpy as np
import pytest

from jaxdp.report import format_table

ROWS = [
    {"engine": "vmap", "ms": 12.345678, "equal": True},
    {"engine": "book-keeping", "ms": 3, "note": "fast | small"},
]


def test_plain_table():
    assert format_table(ROWS).splitlines() == [
        "engine           ms  equal  note",
        "------------  -----  -----  ------------",
        "vmap          12.35  yes",
        "book-keeping      3         fast | small",
    ]


def test_markdown_table_with_chosen_columns_and_headings():
    table = format_table(ROWS, {"note": "Note", "ms": "time [ms]"}, style="markdown", digits=2)
    assert table.splitlines() == [
        "| Note          | time [ms] |",
        "| ------------- | --------: |",
        "|               |        12 |",
        r"| fast \| small |         3 |",
    ]


def test_numpy_numbers_and_empty_tables():
    assert format_table([{"n": np.float32(0.5)}, {"n": np.int64(10)}]).splitlines()[2:] == [
        "0.5",
        " 10",
    ]
    assert format_table([], ["a"]).splitlines() == ["a", "---"]


def test_a_line_break_in_a_cell_does_not_break_the_table():
    assert len(format_table([{"a": "x\ny"}]).splitlines()) == 3


@pytest.mark.slow
def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="'plain' or 'markdown'"):
        format_table(ROWS, style="html")
    with pytest.raises(ValueError, match="Name them in columns"):
        format_table([])
