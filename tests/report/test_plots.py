"""The training figure: it shows what it was given, and touches no global state."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from jaxdp.report import plot_curves, plot_training
from jaxdp.report.plots import _number

CURVES = {
    "accuracy": [(0, 0.5), (100, 0.8), (200, 0.9)],
    "epsilon": [(0, 0.0), (100, 2.0), (200, 3.0)],
    "budget": 4.0,
    "delta": 1e-5,
    "dataset": "digits",
    "references": {"no privacy": 0.97, "no pre-training": 0.85},
}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw and return the figure, intercepted at the moment it is saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])

    def draw(**changes):
        path = plot_training(tmp_path / "deep" / "figure.png", **{**CURVES, **changes})
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
        return figures[-1]

    return draw


def texts(figure):
    return [t.get_text() for t in figure.texts] + [t.get_text() for axes in figure.axes for t in axes.texts]


def test_the_figure_holds_the_curves_the_references_and_the_budget(drawn):
    figure = drawn()
    upper, lower = figure.axes
    assert [list(line.get_ydata()) for line in upper.lines] == [[0.97, 0.97], [0.85, 0.85], [0.5, 0.8, 0.9]]
    assert [list(line.get_ydata()) for line in lower.lines] == [[4.0, 4.0], [0.0, 2.0, 3.0]]
    assert list(upper.lines[-1].get_xdata()) == [0, 100, 200]
    found = texts(figure)
    assert found[0] == "digits: 90.0% accuracy at ε = 3"
    assert found[1] == ("Private training at δ = 1e-5, 7.0 points below no privacy, 5.0 points above no pre-training")
    assert set(found[2:]) == {
        "private  90.0%",
        "no privacy  97.0%",
        "no pre-training  85.0%",
        "spent  3",
        "budget  4",
    }


def test_names_of_close_lines_do_not_overlap_and_keep_their_order(drawn):
    figure = drawn(references={"a": 0.9, "b": 0.901, "c": 0.899, "d": 0.9})
    upper = figure.axes[0]
    boxes = sorted((t.get_window_extent() for t in upper.texts), key=lambda box: box.y0)
    assert len(boxes) == 5
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))
    by_height = [t.get_text()[0] for t in sorted(upper.texts, key=lambda t: t.get_position()[1])]
    assert by_height[0] == "c" and by_height[-1] == "b"


def test_runs_without_a_finite_epsilon_or_comparison_are_drawn(drawn):
    figure = drawn(epsilon=[(0, 0.0), (200, math.inf)], budget=math.inf, references=None)
    assert "ε = ∞" in texts(figure)[0] and texts(figure)[1] == "Private training at δ = 1e-5"
    figure = drawn(epsilon=[(200, math.inf)], budget=math.inf, accuracy=[(200, math.nan)], references={})
    assert "no finite ε holds for this run" in texts(figure)


def test_one_point_and_zero_epsilon_are_drawn(drawn):
    drawn(accuracy=[(0, 1.0)], epsilon=[(0, 0.0)])


@pytest.mark.parametrize("name", ["accuracy", "epsilon"])
def test_an_empty_curve_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="did the run log any"):
        plot_training(tmp_path / "f.png", **{**CURVES, name: []})


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.0, "4"), (3.9801, "3.99"), (3.98, "3.98"), (0.12341, "0.124"), (123.2, "124"), (0.0, "0"), (math.inf, "∞")],
)
def test_epsilons_are_rounded_up(value, text):
    assert _number(value) == text


def test_the_suffix_chooses_the_format(tmp_path):
    root = ElementTree.parse(plot_training(tmp_path / "f.svg", **CURVES)).getroot()
    assert re.search("svg$", root.tag)


def test_drawing_needs_no_display_and_leaves_pyplot_alone(tmp_path, run_in_subprocess):
    code = f"""
import sys
from jaxdp.report import plot_curves, plot_training
assert "matplotlib" not in sys.modules
plot_training({str(tmp_path / "f.png")!r}, **{CURVES!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    run_in_subprocess(code, env={"DISPLAY": None, "MPLBACKEND": None})


CURVES_OF_A_PANEL = {"ours": [(1.0, 0.9), (10.0, 0.8), (100.0, 0.1)], "theirs": [(1.0, 0.7), (100.0, math.nan)]}
NAMES = {"title": "t", "subtitle": "s", "xlabel": "x", "ylabel": "y"}


@pytest.fixture
def drawn_curves(monkeypatch, tmp_path):
    """Draw named curves and return the figure."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])

    def draw(curves=CURVES_OF_A_PANEL, **options):
        path = plot_curves(tmp_path / "deep" / "curves.png", curves, **NAMES, **options)
        assert path.read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def test_curves_are_drawn_with_their_names_and_references(drawn_curves):
    figure = drawn_curves(xscale="log", references={"best": 0.95})
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines[:1]] == [[0.9, 0.8, 0.1]]
    assert list(axes.lines[2].get_ydata()) == [0.95, 0.95]
    assert axes.get_xscale() == "log" and axes.get_yscale() == "linear"
    assert texts(figure)[:2] == ["t", "s"] and set(texts(figure)[2:]) == {"ours", "theirs", "best"}
    assert [tick.get_text() for tick in axes.get_yticklabels()][-1].endswith("%")


@pytest.mark.parametrize("yscale", ["linear", "log"])
def test_names_stand_at_the_ends_of_their_curves(drawn_curves, yscale):
    figure = drawn_curves(
        {"high": [(0, 0.5), (1, 0.5)], "low": [(0, 0.5), (1, 1e-6)], "middle": [(0, 0.5), (1, 1e-3)]}, yscale=yscale
    )
    (axes,) = figure.axes
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    ends = {"high": 0.5, "middle": 1e-3, "low": 1e-6}
    if yscale == "log":  # far apart, so nothing has to be moved
        for name, value in ends.items():
            assert abs(axes.transLimits.transform((0, math.log10(value)))[1] - heights[name]) < 1e-6
    assert heights["low"] < heights["middle"] < heights["high"]


def test_percentages_end_at_0_and_100_unless_there_are_others(drawn_curves):
    def ticks(values):
        (axes,) = drawn_curves({"one": list(enumerate(values))}).axes
        bottom, top = axes.get_ylim()
        return [tick for tick in axes.get_yticks() if bottom <= tick <= top]

    assert max(ticks([1.0, 1.0])) == pytest.approx(1.0)
    assert (min(ticks([0.0, 1.0])), max(ticks([0.0, 1.0]))) == pytest.approx((0, 1))
    assert max(ticks([0.0, 3.0])) >= 3


def test_zero_has_no_place_on_a_logarithmic_scale_and_leaves_a_gap(drawn_curves):
    figure = drawn_curves({"one": [(0, 0.5), (1, 0.0), (2, math.inf)]}, yscale="log", percent=False)
    assert [math.isnan(y) for y in figure.axes[0].lines[0].get_ydata()] == [False, True, True]


@pytest.mark.parametrize("curves", [{}, {"one": []}])
def test_a_figure_without_curves_is_refused(tmp_path, curves):
    with pytest.raises(ValueError, match="at least one"):
        plot_curves(tmp_path / "curves.png", curves, **NAMES)
