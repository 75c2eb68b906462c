"""Figures: they show what they were given, and touch no global state."""

import itertools
import math
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxdp.report import plot_curves, plot_training
from jaxdp.report.plots import plot_images, plot_panels, plot_reliability

CURVES = {
    "accuracy": [(0, 0.5), (100, 0.8), (200, 0.9)],
    "epsilon": [(0, 0.0), (100, 2.0), (200, 3.0)],
    "budget": 4.0,
    "delta": 1e-5,
    "dataset": "digits",
    "references": {"no privacy": 0.97, "no pre-training": 0.85},
}


@pytest.fixture
def saved(monkeypatch):
    """The figures saved so far."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1]
    )
    return figures


@pytest.fixture
def drawn(saved, tmp_path):
    """Draw and return the figure, intercepted at the moment it is saved."""

    def draw(**changes):
        path = plot_training(tmp_path / "deep" / "figure.png", **{**CURVES, **changes})
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
        return saved[-1]

    return draw


def texts(figure):
    return [t.get_text() for t in figure.texts] + [
        t.get_text() for axes in figure.axes for t in axes.texts
    ]


def test_the_figure_holds_the_curves_the_references_and_the_budget(drawn):
    figure = drawn()
    upper, lower = figure.axes
    assert [list(line.get_ydata()) for line in upper.lines] == [
        [0.97, 0.97],
        [0.85, 0.85],
        [0.5, 0.8, 0.9],
    ]
    assert [list(line.get_ydata()) for line in lower.lines] == [[4.0, 4.0], [0.0, 2.0, 3.0]]
    assert list(upper.lines[-1].get_xdata()) == [0, 100, 200]
    found = texts(figure)
    assert found[0] == "digits: 90.0% accuracy at ε = 3"
    assert found[1] == (
        "Private training at δ = 1e-5, 7.0 points below no privacy, 5.0 points above no "
        "pre-training"
    )
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
    figure = drawn(
        epsilon=[(200, math.inf)], budget=math.inf, accuracy=[(200, math.nan)], references={}
    )
    assert "no finite ε holds for this run" in texts(figure)


def test_one_point_and_zero_epsilon_are_drawn(drawn):
    drawn(accuracy=[(0, 1.0)], epsilon=[(0, 0.0)])


@pytest.mark.parametrize("name", ["accuracy", "epsilon"])
def test_an_empty_curve_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="Log both during the run"):
        plot_training(tmp_path / "f.png", **{**CURVES, name: []})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4.0, "4"),
        (3.9801, "3.99"),
        (3.98, "3.98"),
        (0.12341, "0.124"),
        (123.2, "124"),
        (0.0, "0"),
        (math.inf, "∞"),
    ],
)
def test_epsilons_are_rounded_up(drawn, value, text):
    assert texts(drawn(epsilon=[(200, value)]))[0] == f"digits: 90.0% accuracy at ε = {text}"


def test_the_suffix_chooses_the_format(tmp_path):
    root = ElementTree.parse(plot_training(tmp_path / "f.svg", **CURVES)).getroot()
    assert re.search("svg$", root.tag)


@pytest.mark.slow
def test_drawing_needs_no_display_and_leaves_pyplot_alone(tmp_path, run_in_subprocess):
    code = f"""
import sys
from jaxdp.report import plot_curves, plot_training
assert "matplotlib" not in sys.modules
plot_training({str(tmp_path / "f.png")!r}, **{CURVES!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    run_in_subprocess(code, env={"DISPLAY": None, "MPLBACKEND": None})


CURVES_OF_A_PANEL = {
    "ours": [(1.0, 0.9), (10.0, 0.8), (100.0, 0.1)],
    "theirs": [(1.0, 0.7), (100.0, math.nan)],
}
NAMES = {"title": "t", "subtitle": "s", "xlabel": "x", "ylabel": "y"}


@pytest.fixture
def drawn_curves(saved, tmp_path):
    """Draw named curves and return the figure."""

    def draw(curves=CURVES_OF_A_PANEL, **options):
        path = plot_curves(tmp_path / "deep" / "curves.png", curves, **NAMES, **options)
        assert path.read_bytes().startswith(b"\x89PNG")
        return saved[-1]

    return draw


def test_curves_are_drawn_with_their_names_and_references(drawn_curves):
    figure = drawn_curves(xscale="log", references={"best": 0.95})
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines[:1]] == [[0.9, 0.8, 0.1]]
    assert list(axes.lines[2].get_ydata()) == [0.95, 0.95]
    assert axes.get_xscale() == "log" and axes.get_yscale() == "linear"
    assert texts(figure)[:2] == ["t", "s"] and set(texts(figure)[2:]) == {"ours", "theirs", "best"}
    assert [tick.get_text() for tick in axes.get_yticklabels()][-1].endswith("%")


@pytest.mark.slow
@pytest.mark.parametrize("yscale", ["linear", "log"])
def test_names_stand_at_the_ends_of_their_curves(drawn_curves, yscale):
    figure = drawn_curves(
        {
            "high": [(0, 0.5), (1, 0.5)],
            "low": [(0, 0.5), (1, 1e-6)],
            "middle": [(0, 0.5), (1, 1e-3)],
        },
        yscale=yscale,
    )
    (axes,) = figure.axes
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    ends = {"high": 0.5, "middle": 1e-3, "low": 1e-6}
    if yscale == "log":  # far apart, so nothing has to be moved
        for name, value in ends.items():
            assert abs(axes.transLimits.transform((0, math.log10(value)))[1] - heights[name]) < 1e-6
    assert heights["low"] < heights["middle"] < heights["high"]


@pytest.mark.slow
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


PANELS = {
    "first": ("sources", {"ours": [(10, 0.04), (20, 0.02)], "gone": [(10, 0.3), (20, 0.9)]}),
    "second": ("epsilon", {"theirs": [(0.2, 0.5), (2.0, 0.4)], "ours": [(0.2, 0.1), (2.0, 0.03)]}),
}
HEADLINE = {"title": "t", "subtitle": "s"}


def test_panels_share_the_y_axis_and_one_set_of_names_and_colours(saved, tmp_path):
    path = plot_panels(tmp_path / "deep" / "panels.png", PANELS, ylabel="error", **HEADLINE)
    assert path.read_bytes().startswith(b"\x89PNG")
    left, right = saved[-1].axes
    assert [(axes.get_title(loc="left"), axes.get_xlabel()) for axes in (left, right)] == [
        ("first", "sources"),
        ("second", "epsilon"),
    ]
    assert (left.get_ylabel(), right.get_ylabel()) == ("error", "")
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[1] > 0.9
    lines = {
        "ours": (left.lines[0], right.lines[1]),
        "gone": (left.lines[1],),
        "theirs": (right.lines[0],),
    }
    for panel, (_, curves) in zip(saved[-1].axes, PANELS.values(), strict=True):
        assert [list(zip(*line.get_data(), strict=True)) for line in panel.lines] == list(
            curves.values()
        )
    colours = {name: {line.get_color() for line in same} for name, same in lines.items()}
    assert (
        all(len(same) == 1 for same in colours.values()) and len(set.union(*colours.values())) == 3
    )
    assert not left.texts
    assert {(text.get_text(), text.get_color()) for text in right.texts} == {
        (name, colour) for name, same in colours.items() for colour in same
    }
    heights = {text.get_text(): text.get_position()[1] for text in right.texts}
    # gone: where it was last seen
    for name, end in (
        ("ours", 0.03),
        ("theirs", 0.4),
        ("gone", 0.9),
    ):
        assert heights[name] == pytest.approx(right.transLimits.transform((0, end))[1])


def test_many_close_names_stay_beside_the_panel_without_overlap(saved, tmp_path):
    curves = {f"method {i}": [(0, 0.5), (1, 0.001 * i)] for i in range(9)}
    plot_panels(tmp_path / "panels.png", {"": ("x", curves)}, ylabel="y", **HEADLINE)
    (axes,) = saved[-1].axes
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 9 and all(
        below.y1 <= above.y0 for below, above in itertools.pairwise(boxes)
    )
    assert all(-1e-9 <= text.get_position()[1] <= 1 + 1e-9 for text in axes.texts)
    # Two names have a colour that was there before: dashes tell them apart, on the line and beside
    # the name.
    assert [line.get_linestyle() for line in axes.lines] == ["-"] * 7 + ["--"] * 2
    assert sorted(text.get_text() for text in axes.texts if text.get_text() not in curves) == [
        "– – method 7",
        "– – method 8",
    ]


@pytest.mark.slow
def test_marks_suit_the_values_of_all_panels(saved, tmp_path):
    def marks(*ys, **options):
        panels = {str(i): ("x", {"one": [(0, y), (1, y)]}) for i, y in enumerate(ys)}
        plot_panels(tmp_path / "panels.png", panels, ylabel="y", **HEADLINE, **options)
        axes = saved[-1].axes[0]
        low, high = axes.get_ylim()
        return [
            text.get_text()
            for at, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
            if low <= at <= high
        ]

    assert set(marks(0.03, 0.4, yscale="log")) == {"0.05", "0.1", "0.2"}
    assert "$\\mathdefault{10^{-3}}$" in marks(1e-6, 1.0, yscale="log")
    assert marks(0.1, 0.9, percent=True)[-1].endswith("%") and not any(
        "." in text for text in marks(0.1, 0.9, percent=True)
    )


@pytest.mark.parametrize(
    "panels", [{}, {"a": ("x", {})}, {"a": ("x", {"one": [(0, 1)]}), "b": ("x", {"one": []})}]
)
def test_panels_without_curves_are_refused(tmp_path, panels):
    with pytest.raises(ValueError, match="at least one panel, one curve in each"):
        plot_panels(tmp_path / "panels.png", panels, ylabel="y", **HEADLINE)


# Four bins: empty, over-confident, calibrated, under-confident.
DIAGRAM = SimpleNamespace(
    counts=np.array([0, 10, 20, 70]),
    confidence=np.array([np.nan, 0.4, 0.6, 0.8]),
    accuracy=np.array([np.nan, 0.1, 0.6, 0.9]),
)


def test_a_reliability_diagram_shows_accuracy_gap_shares_and_error(saved, tmp_path):
    path = plot_reliability(
        tmp_path / "deep" / "r.png", {"none": DIAGRAM, "other": DIAGRAM}, **HEADLINE
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    first, second, *shares = saved[-1].axes
    error = 0.1 * 0.3 + 0.2 * 0.0 + 0.7 * 0.1
    assert first.get_title(loc="left") == f"none\nECE {error:.3f}" and second.get_title(
        loc="left"
    ).startswith("other")
    assert (first.get_xlim(), first.get_ylim(), second.get_ylim()) == ((0, 1), (0, 1), (0, 1))
    bars, gaps = first.containers
    middles = [0.375, 0.625, 0.875]
    assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == pytest.approx(middles)
    assert [bar.get_height() for bar in bars] == pytest.approx([0.1, 0.6, 0.9])
    ends = [(gap.get_y(), gap.get_y() + gap.get_height()) for gap in gaps]
    assert np.ravel(ends) == pytest.approx(np.ravel([(0.1, 0.4), (0.6, 0.6), (0.9, 0.8)]))
    (caps,) = first.collections
    assert [segment[0, 1] for segment in caps.get_segments()] == pytest.approx([0.1, 0.6, 0.9])
    for axes in shares:
        assert [bar.get_height() for bar in axes.containers[0]] == pytest.approx([0.1, 0.2, 0.7])
    assert not first.texts and {text.get_text() for text in second.texts} == {
        "accuracy",
        "gap",
        "calibrated",
    }


EMPTY = SimpleNamespace(**dict.fromkeys(("counts", "confidence", "accuracy"), np.zeros(2)))


@pytest.mark.parametrize(
    ("diagrams", "message"),
    [
        ({}, "one to four entries, got 0"),
        ({str(i): DIAGRAM for i in range(5)}, "one to four entries, got 5. Draw several"),
        ({"a": EMPTY}, "'a'. counts no"),
    ],
)
def test_diagrams_that_cannot_be_drawn_are_refused(tmp_path, diagrams, message):
    with pytest.raises(ValueError, match=message):
        plot_reliability(tmp_path / "r.png", diagrams, **HEADLINE)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 8, 8, 1), (3, 6, 9, 3), (40, 4, 4, 1)])
def test_rows_of_images_show_every_pixel_under_their_names(saved, tmp_path, shape):
    rows = {
        name: np.random.default_rng(k).uniform(size=shape)
        for k, name in enumerate(("client", "attack"))
    }
    path = plot_images(
        tmp_path / "deep" / "images.png", rows, **HEADLINE, notes={"attack": "SSIM .23, PSNR 15.2"}
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    figure = saved[-1]
    assert [text.get_text() for text in figure.texts] == ["t", "s"]
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [
        ["client", ""],
        ["attack", "SSIM .23, PSNR 15.2"],
    ]
    for axes, images in zip(figure.axes, rows.values(), strict=True):
        assert [image.get_interpolation() for image in axes.images] == ["nearest"] * shape[0]
        assert all(
            image.get_clim() == (0, 1) and image.get_cmap().name == "gray" for image in axes.images
        )
        for drawn, image in zip(axes.images, images, strict=True):
            np.testing.assert_array_equal(np.reshape(drawn.get_array(), shape[1:]), image)
        boxes = [image.get_window_extent() for image in axes.images]
        assert all(box.width / box.height == pytest.approx(shape[2] / shape[1]) for box in boxes)
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
        name, note = axes.texts
        assert (
            name.get_window_extent().x1 < boxes[0].x0 and note.get_window_extent().x0 > boxes[-1].x1
        )
    above, below = figure.axes
    assert below.images[0].get_window_extent().y1 < above.images[0].get_window_extent().y0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({}, "rows needs images"),
        ({"a": np.zeros((0, 8, 8, 1))}, "n > 0 and C 1 or 3"),
        ({"a": np.zeros((2, 8, 8))}, r"got \[\(2, 8, 8\)\]"),
        ({"a": np.zeros((2, 8, 8, 2))}, "C 1 or 3"),
        ({"a": np.zeros((2, 8, 8, 1)), "b": np.zeros((3, 8, 8, 1))}, r"of one shape.*\(2, .*\(3, "),
        ({"a": np.full((2, 8, 8, 1), 1.5)}, r"rows\['a'\] must be .* in \[0, 1\]. Clip"),
        ({"a": np.full((2, 8, 8, 1), np.nan)}, r"rows\['a'\] must be"),
        ({"a": np.zeros((2, 8, 8, 1), np.uint8)}, r"rows\['a'\] must be floating point"),
        ({"b": np.zeros((2, 8, 8, 1))}, "notes has 'a', but rows does not"),
    ],
)
def test_images_that_cannot_be_drawn_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        plot_images(tmp_path / "images.png", rows, **HEADLINE, notes={"a": ""})
