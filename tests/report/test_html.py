"""Pages: facts are text, the policy allows the style alone, numbers are rounded to the safe side,
charts are right."""

import math
import re

import jinja2
import pytest

from jaxdp.report import Chart, render_page, round_down, round_up
from tests.report.pages import allows_only_its_style

PAGE = """{% extends "page.html.jinja" %}
{% from "parts.html.jinja" import bar, figure, small, table %}
{% block body %}
<h1>{{ title }}</h1>
{{ table(title, [title, title], [[title, bar(0.5, title)]]) }}
{{ small(title) }}{{ figure(chart, title, title) }}
{% endblock %}
"""
FORGED = """"'><script>alert(1)</script>"""


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "mine.html.jinja"
    path.write_text(PAGE)
    return path


def chart(**options):
    return Chart(
        **{"curves": {"a": [(0, 0.0), (10, 3.7)]}, "xlabel": "step", "ylabel": "epsilon"} | options
    )


def test_every_fact_of_every_macro_is_text(template):
    forged = chart(
        curves={FORGED: [(0, 1.0)]},
        xlabel=FORGED,
        ylabel=FORGED,
        limits={FORGED: 2.0},
        text=lambda x: FORGED,
    )
    page = render_page(template, title=FORGED, chart=forged).decode()
    assert "<script" not in page and page.count("&lt;script") >= 15
    # Forged text cannot end an attribute either.
    assert not re.search('="[^"]*"\'>', page)


def test_a_missing_fact_is_an_error(template):
    with pytest.raises(jinja2.UndefinedError, match="'chart' is undefined"):
        render_page(template, title="page")


def test_the_policy_allows_the_style_and_nothing_else(template):
    """The twins: an attribute, and another style than that of the policy."""
    text = render_page(template, title="page", chart=chart()).decode()
    assert allows_only_its_style(text) and "http:" not in text and "https:" not in text
    for twin in (
        text.replace("<h1", '<h1 style="color: red"'),
        text.replace("</style>", "x</style>"),
    ):
        assert twin != text and not allows_only_its_style(twin)


@pytest.mark.parametrize(
    ("value", "up", "down"),
    [
        (3.98123, "3.99", "3.98"),
        (1e-5, "1e-05", "1e-05"),
        (1.0001e-5, "1.01e-05", "1e-05"),
        (4.0, "4", "4"),
        (3 * 0.1, "0.3", "0.3"),
        (0.0, "0", "0"),
        (9.9999, "10", "9.99"),
        (123.4, "124", "123"),
        (12345.6, "12346", "12345"),
        (1e27, f"{1e27:.0f}", f"{1e27:.0f}"),
        (-1.5e29, f"{-1.5e29:.0f}", f"{-1.5e29:.0f}"),
        (1e300, f"{1e300:.0f}", f"{1e300:.0f}"),
        (math.inf, "infinite", "infinite"),
    ],
)
def test_numbers_are_rounded_to_the_safe_side(value, up, down):
    assert (round_up(value), round_down(value)) == (up, down)


@pytest.mark.parametrize(
    ("value", "digits", "up", "down"),
    [
        (123.4, 2, "124", "123"),
        (99.5, 2, "100", "99"),
        (0.0123, 2, "0.013", "0.012"),
        (12.3, 1, "13", "12"),
        (1234.5, 4, "1235", "1234"),
        (12345.6, 4, "12346", "12345"),
    ],
)
def test_whole_numbers_keep_their_digits_whatever_the_precision(value, digits, up, down):
    assert (round_up(value, digits), round_down(value, digits)) == (up, down)


def test_a_chart_begins_at_zero_and_shows_its_numbers():
    drawn = chart(
        curves={"a": [(0, 2.0), (10, 3.001)], "b": [(10, math.inf)]},
        limits={"budget": 4.0, "none": math.inf},
    )
    assert [text for _, text in drawn.ymarks] == ["0", "1", "2", "3", "4"] and drawn.ymarks[0][
        0
    ] == drawn.bottom
    assert list(drawn.lines) == ["budget"]
    assert drawn.paths[0].startswith(f"M{drawn.left:.1f} ")
    assert drawn.paths[1] == ""  # an infinite value has no place
    assert drawn.headings == ["step", "a", "b"]
    assert drawn.rows == [["0", "2", ""], ["10", "3.01", "infinite"]]
    assert "H" in chart(steps=True).paths[0] and "L" in chart().paths[0]


def test_a_chart_of_one_point_or_of_zeros_is_drawn():
    for points in ([(5, 1.0)], [(0, 0.0), (1, 0.0)], [(0, math.nan)]):
        drawn = chart(curves={"a": points})
        assert drawn.ymarks and drawn.xmarks


def test_marks_of_an_axis_of_time_are_short_and_inside():
    drawn = chart(
        curves={"a": [(0, 0.0), (1, 1.0), (2, 1.5), (1000, 2.0)]},
        text=lambda x: f"day {x}",
        mark=lambda x: f"{x:09.0f}",
    )
    assert [text for _, text in drawn.xmarks] == [
        "000000000",
        "000000250",
        "000000500",
        "000000750",
        "000001000",
    ]
    assert max(x for x, _ in drawn.xmarks) + 4 * 9 <= drawn.width and drawn.rows[1][0] == "day 1"
    assert [text for _, text in chart(mark=lambda x: "today").xmarks] == ["today"]  # each text once
