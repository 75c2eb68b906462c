"""Figures, drawn without a display and without matplotlib's global state.

Every function writes one figure to `path`, makes its folder if needed, and returns the path. The
suffix of `path` chooses the format (.png, .pdf, .svg). `title` and `subtitle` are two lines above
the panels. matplotlib loads on use. Colours are from Okabe and Ito's palette, which colour-blind
readers can tell apart. Every line is named beside it.
"""

import itertools
import math
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import numpy as np

from jaxdp.files import explained_if_full, optional, shows_keywords
from jaxdp.report.curve_axes import AxesKeywords, CurveAxes
from jaxdp.report.html import round_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE = "#0072B2"
_VERMILION = "#D55E00"
_GREEN = "#009E73"
_INK = "#222222"
_GREY = "#6E6E6E"
_GAP = "#F2B591"  # vermilion on white, opaque to look the same on a bar
_REFERENCE_COLOURS = (_GREEN, _VERMILION, "#CC79A7", "#E69F00")
_CURVE_COLOURS = (_BLUE, _VERMILION, _GREEN, "#CC79A7", "#E69F00", "#56B4E9", _GREY)
_FONT = 11.5
_TEXT: dict[str, Any] = {"fontsize": _FONT, "color": _INK}
_DASHED: dict[str, Any] = {"linewidth": 1.6, "linestyle": (0, (5, 3)), "zorder": 2}
_PERCENT = "{x:.0%}"
_PERMILLE = "{x:.1%}"

Curves = Mapping[str, Sequence[tuple[float, float]]]


class Label(NamedTuple):
    """A name at the right of a panel, at the height of a value."""

    height: float
    text: str
    colour: str


def plot_training(
    path: str | os.PathLike[str],
    *,
    accuracy: Sequence[tuple[int, float]],
    epsilon: Sequence[tuple[int, float]],
    budget: float,
    delta: float,
    dataset: str,
    references: Mapping[str, float] | None = None,
) -> Path:
    """Draws one private training run over steps: accuracy above, spent privacy below.

    Args:
        path: As above.
        accuracy: (step, accuracy in 0..1) pairs in step order. Non-finite values leave a gap.
        epsilon: (step, epsilon spent so far) pairs in step order. Non-finite values leave a gap.
        budget: The largest permitted epsilon. `math.inf` draws no line.
        delta: The delta of every epsilon.
        dataset: The data set in the title.
        references: Name to final accuracy of other runs, e.g. {"no privacy": 0.98}.

    Raises:
        ValueError: One of the two curves is empty.
    """
    if not accuracy or not epsilon:
        raise ValueError(
            "accuracy and epsilon need at least one (step, value) pair each. Log both during the "
            "run."
        )
    references = dict(references or {})
    last_step, final_accuracy = accuracy[-1]
    last_spend, final_epsilon = epsilon[-1]
    title = f"{dataset}: {_percent(final_accuracy)} accuracy at ε = {_number(final_epsilon)}"
    gaps = [f", {_gap(final_accuracy - value)} {name}" for name, value in references.items()]
    subtitle = f"Private training at δ = {_power(delta)}{''.join(gaps)}"
    grid = {"top": 0.825, "bottom": 0.095, "height_ratios": [2.0, 1.0], "hspace": 0.24}
    figure, panels = _page(title, subtitle, (7.6, 6.6), 2, 1, grid)
    upper, lower = panels[:, 0]
    _accuracy_panel(upper, accuracy, references)
    _epsilon_panel(lower, epsilon, budget)
    _round_marks(lower.xaxis, 6, integer=True)
    lower.set_xlim(0, max(last_step, last_spend, 1))
    lower.set_xlabel("step", **_TEXT)
    labels = [
        Label(final_epsilon, f"spent  {_number(final_epsilon)}", _BLUE),
        Label(budget, f"budget  {_number(budget)}", _INK),
    ]
    _finish(lower, f"Privacy spent: ε at δ = {_power(delta)}", labels)
    return _save(figure, path)


def _accuracy_panel(
    axes: "Axes",
    accuracy: Sequence[tuple[int, float]],
    references: Mapping[str, float],
) -> None:
    _, final = accuracy[-1]
    labels = [Label(final, f"private  {_percent(final)}", _BLUE)]
    colours = itertools.cycle(_REFERENCE_COLOURS)
    for (name, value), colour in zip(references.items(), colours, strict=False):
        labels.append(Label(value, f"{name}  {_percent(value)}", colour))
        _reference_line(axes, value, colour)
    values = [*_progress(axes, accuracy), *references.values()]
    finite = list(filter(math.isfinite, values))
    low = min(finite, default=0.0)
    high = max(finite, default=1.0)
    margin = max(0.08 * (high - low), 0.01)
    axes.set_ylim(max(0.0, low - margin), min(1.0, high + margin) + 0.004)
    _round_marks(axes.yaxis, 6, _PERCENT if high - low > 0.05 else _PERMILLE)
    _finish(axes, "Test accuracy", labels)


def _epsilon_panel(
    axes: "Axes",
    epsilon: Sequence[tuple[int, float]],
    budget: float,
) -> None:
    _reference_line(axes, budget, _INK)
    values = _progress(axes, epsilon)
    steps = [step for step, _ in epsilon]
    axes.fill_between(steps, values, color=_BLUE, alpha=0.12, linewidth=0)
    if not any(map(math.isfinite, values)):
        place: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "no finite ε holds for this run", color=_GREY, fontsize=_FONT, **place)
    top = max(filter(math.isfinite, (*values, budget)), default=1.0)
    axes.set_ylim(0, 1.12 * top if top > 0 else 1.0)
    _round_marks(axes.yaxis, 4)


@shows_keywords(AxesKeywords, vars(CurveAxes))
def plot_curves(
    path: str | os.PathLike[str],
    curves: Curves,
    *,
    title: str,
    subtitle: str,
    references: Mapping[str, float] | None = None,
    **axes: Unpack[AxesKeywords],
) -> Path:
    """Draws named curves in one panel, each with its name at its right end.

    Args:
        path, title, subtitle: As above.
        curves: Name to (x, y) pairs in the order of x. Non-finite y leave a gap, and so do y <= 0
          on a log scale. The first curve is the thickest. With more than seven the colours repeat,
          with dashes.
        references: Name to y of dashed horizontal lines.
        axes: The attributes of `CurveAxes`, such as xlabel and ylabel.

    Raises:
        ValueError: There is no curve or an empty one.
    """
    if not _has_points(curves):
        raise ValueError("curves needs at least one curve and at least one (x, y) pair in each.")
    described = CurveAxes(**axes)
    figure, ((panel,),) = _page(title, subtitle)
    panel.set_xscale(described.xscale)
    if described.xscale == "log":
        places = [x for x, _ in itertools.chain.from_iterable(curves.values())]
        _log_marks(panel.xaxis, min(places), max(places))
    labels = list(_curves(panel, curves, list(curves), described.yscale).values())
    for name, value in (references or {}).items():
        panel.axhline(value, color=_INK, **_DASHED)
        labels.append(Label(value, name, _INK))
    panel.set_xlabel(described.xlabel, **_TEXT)
    if described.xticks is not None:
        _named_marks(panel, described.xticks)
    _y_marks(panel, percent=described.percent)
    _finish(panel, described.ylabel, labels)
    return _save(figure, path)


def _has_points(curves: Mapping[str, Sequence[Any]]) -> bool:
    return bool(curves) and all(curves.values())


def _named_marks(axes: "Axes", xticks: Mapping[float, str]) -> None:
    axes.set_xticks(list(xticks), list(xticks.values()))
    axes.set_xticks([], minor=True)
    if max(map(len, xticks.values())) <= 6:
        return
    for mark in axes.get_xticklabels():
        mark.set(rotation=35, ha="right", rotation_mode="anchor")


def plot_panels(
    path: str | os.PathLike[str],
    panels: Mapping[str, tuple[str, Curves]],
    *,
    title: str,
    subtitle: str,
    ylabel: str,
    yscale: Literal["linear", "log"] = "linear",
    percent: bool = False,
) -> Path:
    """Draws panels of named curves side by side over one y axis.

    Names are at the right of the last panel. A name has the same colour in every panel.

    Args:
        path, title, subtitle: As above.
        panels: Title of a panel to the name of its x axis and its curves, as in `plot_curves`. The
          first curve of the first panel is the thickest in all of them. With more than seven names
          the colours repeat, with dashes.
        ylabel: The name of the y axis, beside the first panel.
        yscale: "linear" or "log".
        percent: Whether a linear y axis has percentages.

    Raises:
        ValueError: There is no panel, or one without curves or with an empty one.
    """
    if not panels or not all(_has_points(curves) for _, curves in panels.values()):
        raise ValueError(
            "panels needs at least one panel, one curve in each and one (x, y) pair in each curve."
        )
    names: list[str] = []
    for _, curves in panels.values():
        names += [name for name in curves if name not in names]
    grid = {"top": 0.755, "bottom": 0.135, "wspace": 0.09}
    size = (1.6 + 3.6 * len(panels), 4.6)
    figure, (row,) = _page(title, subtitle, size, 1, len(panels), grid)
    labels: dict[str, Label] = {}
    for axes, (panel, described) in zip(row, panels.items(), strict=True):
        xlabel, curves = described
        # A curve without a number in the last panel is named at the height of its last number.
        labels |= _curves(axes, curves, names, yscale)
        _round_marks(axes.xaxis, 5)
        axes.set_xlabel(xlabel, **_TEXT)
        _finish(axes, panel)
    row[0].set_ylabel(ylabel, **_TEXT)
    _y_marks(row[0], percent=percent)
    _finish(row[-1], panel, list(labels.values()))
    return _save(figure, path)


def plot_points(
    path: str | os.PathLike[str],
    points: Mapping[str, Sequence[tuple[float, float, float, float]]],
    *,
    title: str,
    subtitle: str,
    xlabel: str,
    ylabel: str,
) -> Path:
    """Draws named groups of points with error bars in one panel. Both axes are percentages.

    Args:
        path, title, subtitle, xlabel, ylabel: As in `plot_curves`.
        points: Name to (x, y, error of x, error of y). A NaN error draws no bar. A group has one
          colour, and its name is to the right, at the height of its last point.

    Raises:
        ValueError: There is no group or an empty one.
    """
    if not _has_points(points):
        raise ValueError("points needs at least one group and at least one point in each.")
    figure, ((axes,),) = _page(title, subtitle)
    labels = []
    look = {"fmt": "o", "markersize": 7, "elinewidth": 1.3, "capsize": 2.5, "zorder": 3}
    colours = itertools.cycle(_CURVE_COLOURS)
    for (name, group), colour in zip(points.items(), colours, strict=False):
        x, y, dx, dy = zip(*group, strict=True)
        bars = {"xerr": np.nan_to_num(dx), "yerr": np.nan_to_num(dy)}
        axes.errorbar(x, y, **bars, **look, color=colour)
        labels.append(Label(y[-1], name, colour))
    axes.xaxis.set_major_formatter(_PERCENT)
    axes.set_xlabel(xlabel, **_TEXT)
    _y_marks(axes, percent=True)
    _finish(axes, ylabel, labels)
    return _save(figure, path)


def plot_reliability(
    path: str | os.PathLike[str],
    diagrams: Mapping[str, Any],
    *,
    title: str,
    subtitle: str,
) -> Path:
    """Draws reliability diagrams side by side.

    Accuracy against confidence is above, shares of the examples are below.

    A bar ends in a blue line at the accuracy of its bin. The gap between it and the mean confidence
    of the bin, next to the diagonal, is what the expected calibration error (ECE) averages. The ECE
    stands on top.

    Args:
        path, title, subtitle: As above.
        diagrams: One to four entries, name to an object with arrays `counts`, `confidence` and
          `accuracy`, [bins] each, over bins of equal width in [0, 1], such as
          `jaxdp.recalibration.metrics.reliability` returns. Bins without examples are not drawn.

    Raises:
        ValueError: There are no diagrams, more than four, or one without examples.
    """
    if not 1 <= len(diagrams) <= 4:
        raise ValueError(
            f"diagrams needs one to four entries, got {len(diagrams)}. Draw several figures."
        )
    grid = {
        "top": 0.745,
        "bottom": 0.105,
        "height_ratios": [3.0, 1.0],
        "hspace": 0.12,
        "wspace": 0.1,
    }
    size = (1.0 + 3.1 * len(diagrams), 5.6)
    figure, (upper, lower) = _page(title, subtitle, size, 2, len(diagrams), grid)
    for above, below, (name, diagram) in zip(upper, lower, diagrams.items(), strict=True):
        if not np.any(diagram.counts):
            raise ValueError(f"diagrams[{name!r}] counts no examples. Leave it out.")
        labels = _diagram(above, below, name, diagram)
    upper[0].set_ylabel("accuracy", **_TEXT)
    lower[0].set_ylabel("examples", **_TEXT)
    _round_marks(upper[0].yaxis, 6, _PERCENT)
    _round_marks(lower[0].yaxis, 3, _PERCENT)
    upper[0].set(xlim=(0, 1), ylim=(0, 1))
    upper[0].set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    # Names are at the bars of the last diagram.
    _label_right(upper[-1], [*labels, Label(1.0, "calibrated", _INK)])
    figure.align_ylabels()
    return _save(figure, path)


def _diagram(
    above: "Axes",
    below: "Axes",
    name: str,
    diagram: Any,
) -> list[Label]:
    """Draws one reliability diagram, and returns the names at the height of its last bar."""
    used = np.asarray(diagram.counts) > 0
    counts = np.asarray(diagram.counts, np.float64)[used]
    confidence = np.asarray(diagram.confidence, np.float64)[used]
    accuracy = np.asarray(diagram.accuracy, np.float64)[used]
    share = counts / counts.sum()
    gap = confidence - accuracy
    middle = (np.flatnonzero(used) + 0.5) / len(used)
    width = 0.92 / len(used)
    bars: dict[str, Any] = {"x": middle, "width": width, "linewidth": 0}
    above.bar(height=accuracy, color=_BLUE, **bars)
    above.bar(height=gap, bottom=accuracy, color=_GAP, **bars)
    left = middle - width / 2
    right = middle + width / 2
    above.hlines(accuracy, left, right, color=_BLUE, linewidth=2.4)
    diagonal: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (5, 3))}
    above.plot((0, 1), (0, 1), color=_INK, **diagonal)
    below.bar(height=share, color=_GREY, **bars)
    below.set_xlabel("confidence", **_TEXT)
    _finish(above, f"{name}\nECE {np.sum(share * np.abs(gap)):.3f}")
    return [
        Label(accuracy[-1], "accuracy", _BLUE),
        Label(accuracy[-1] + gap[-1] / 2, "gap", _VERMILION),
    ]


def plot_images(
    path: str | os.PathLike[str],
    rows: Mapping[str, Any],
    *,
    title: str,
    subtitle: str = "",
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Draws rows of images below each other, such as originals and reconstructions.

    Every pixel is a square of one colour.

    Args:
        path, title, subtitle: As above.
        rows: Name, at the left of the row, to images, floating point [n, H, W, C] in [0, 1], all of
          one shape. C is 1 (grey) or 3 (RGB).
        notes: Name of a row to the text at its right.

    Raises:
        ValueError: There is no row or no image, shapes are not [n, H, W, 1 or 3] or differ, values
          are not in [0, 1], or a note has no row.
    """
    images = {name: np.asarray(value) for name, value in rows.items()}
    notes = notes or {}
    count, height, width = _checked_images(images)
    unknown = sorted(set(notes) - set(rows))
    if unknown:
        raise ValueError(f"notes has {', '.join(map(repr, unknown))}, but rows does not.")
    # Lengths within a row are in units of the height of an image.
    step = 1.08 * width / height
    row_width = (count - 1) * step + width / height
    inches = min(0.95, 9.0 / row_width)  # the height of an image
    bottom = 0.1
    top = 0.95 if subtitle else 0.64
    page_height = bottom + top + inches * (1.08 * len(rows) - 0.08)
    grid = {
        "left": 0,
        "right": 1,
        "bottom": bottom / page_height,
        "top": 1 - top / page_height,
        "hspace": 0.08,
    }
    size = (inches * row_width, page_height)
    figure, panels = _page(title, subtitle, size, len(rows), 1, grid)
    label = {
        "fontsize": _FONT,
        "va": "center",
        "annotation_clip": False,
        "textcoords": "offset points",
    }
    name_look = {**label, "ha": "right", "color": _INK, "fontweight": "bold"}
    note_look = {**label, "ha": "left", "color": _GREY}
    squares = {"cmap": "gray", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    for axes, (name, row) in zip(panels[:, 0], images.items(), strict=True):
        for k, image in enumerate(row):
            left = k * step
            axes.imshow(image, extent=(left, left + width / height, 0, 1), **squares)
        axes.set(xlim=(0, row_width), ylim=(0, 1), aspect="auto")
        axes.set_axis_off()
        axes.annotate(name, (0, 0.5), xytext=(-10, 0), **name_look)
        axes.annotate(notes.get(name, ""), (row_width, 0.5), xytext=(10, 0), **note_look)
    return _save(figure, path)


def _checked_images(rows: Mapping[str, np.ndarray]) -> tuple[int, int, int]:
    """Returns the number of images in a row, their height and their width."""
    shapes = {images.shape for images in rows.values()}
    shape = next(iter(shapes), ())
    fits = len(shape) == 4 and 0 not in shape and shape[3] in (1, 3)
    if len(shapes) != 1 or not fits:
        raise ValueError(
            "rows needs images [n, H, W, C] of one shape, n > 0 and C 1 or 3, got "
            f"{sorted(shapes)}."
        )
    for name, images in rows.items():
        floating = np.issubdtype(images.dtype, np.floating)
        if not (floating and images.min() >= 0 and images.max() <= 1):
            raise ValueError(f"rows[{name!r}] must be floating point in [0, 1]. Clip other values.")
    count, height, width, _ = shape
    return count, height, width


def check_figures() -> None:
    """Raises ImportError if figures cannot be drawn. The message names the extra."""
    optional("matplotlib", "plots")


def _page(
    title: str,
    subtitle: str,
    size: tuple[float, float] = (7.6, 5.2),
    rows: int = 1,
    columns: int = 1,
    grid: Mapping[str, Any] = types.MappingProxyType({}),
) -> tuple["Figure", Any]:
    """Returns a figure with a title and a subtitle, and its panels [rows][columns].

    The two lines are at a fixed distance from the top of the page.
    """
    check_figures()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=160, facecolor="white")
    grid = {"left": 0.085, "right": 0.97, "top": 0.79, "bottom": 0.12, **grid}
    panels = figure.subplots(
        rows, columns, sharex=rows > 1, sharey="row", squeeze=False, gridspec_kw=grid
    )
    _, height = size
    title_look: dict[str, Any] = {"fontsize": 17, "fontweight": "bold", "color": _INK}
    subtitle_look: dict[str, Any] = {"fontsize": _FONT, "color": _GREY}
    figure.text(grid["left"], 1 - 0.286 / height, title, va="center", **title_look)
    figure.text(grid["left"], 1 - 0.598 / height, subtitle, va="center", **subtitle_look)
    for axes in panels.flat:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color("#B0B0B0")
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.9)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, labelsize=_FONT - 1, labelcolor=_GREY, pad=5)
    return figure, panels


def _reference_line(
    axes: "Axes",
    value: float,
    colour: str,
) -> None:
    if math.isfinite(value):
        axes.axhline(value, color=colour, **_DASHED)


def _progress(axes: "Axes", points: Sequence[tuple[int, float]]) -> list[float]:
    """Draws the curve of a run. Returns its values, NaN for those that are not finite."""
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    look: dict[str, Any] = {
        "color": _BLUE,
        "linewidth": 2.4,
        "marker": "o" if len(points) <= 40 else None,  # more would merge
        "markersize": 4.5,
        "zorder": 3,
    }
    axes.plot([step for step, _ in points], values, clip_on=False, **look)
    return values


def _curves(
    axes: "Axes",
    curves: Curves,
    names: Sequence[str],
    yscale: str,
) -> dict[str, Label]:
    """Draws each curve in the style of its place among all names.

    Returns labels at the last values that can be drawn.
    """
    axes.set_yscale(yscale)
    labels = {}
    for name, points in curves.items():
        values = [_drawable(y, yscale) for _, y in points]
        i = names.index(name)
        colour = _CURVE_COLOURS[i % len(_CURVE_COLOURS)]
        dashed = i >= len(_CURVE_COLOURS)
        look: dict[str, Any] = {
            "color": colour,
            "linestyle": "--" if dashed else "-",
            "linewidth": 1.9 if i else 2.8,
            "zorder": 3 if i else 4,
        }
        axes.plot([x for x, _ in points], values, **look)
        numbers = [y for y in values if not math.isnan(y)]
        if numbers:
            labels[name] = Label(numbers[-1], f"– – {name}" if dashed else name, colour)
    axes.margins(x=0)
    return labels


def _drawable(y: float, yscale: str) -> float:
    """Returns y, or NaN if the axis has no place for it."""
    if not math.isfinite(y) or (yscale == "log" and y <= 0):
        return math.nan
    return y


def _log_marks(
    axis: Any,
    low: float,
    high: float,
) -> None:
    """Writes marks between powers of ten in full if there are few powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    if 0 < high < 1000 * low:
        axis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        axis.set_major_formatter("{x:g}")


def _round_marks(
    axis: Any,
    count: int,
    form: str = "",
    *,
    integer: bool = False,
) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10], integer=integer))
    if form:
        axis.set_major_formatter(form)


def _y_marks(axes: "Axes", *, percent: bool) -> None:
    """Sets round marks on the y axis. Percentages end at 0 and 100% unless values exceed them."""
    limits = [panel.dataLim.intervaly for panel in axes.get_shared_y_axes().get_siblings(axes)]
    low = min(low for low, _ in limits)
    high = max(high for _, high in limits)
    if axes.get_yscale() == "log":
        _log_marks(axes.yaxis, low, high)
        return
    if not percent:
        _round_marks(axes.yaxis, 6)
        return
    _round_marks(axes.yaxis, 6, _PERCENT if high - low > 0.05 else _PERMILLE)
    bottom, top = axes.get_ylim()
    if low >= 0:
        bottom = max(bottom, -0.015)
    if high <= 1:
        top = min(top, 1.015)
    axes.set_ylim(bottom, top)


def _save(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # "tight" widens the page to hold the names to the right of the panels.
    with explained_if_full(path):
        figure.savefig(path, bbox_inches="tight", pad_inches=0.3)
    return path


def _finish(
    axes: "Axes",
    title: str,
    labels: Sequence[Label] = (),
) -> None:
    """Writes a panel's title and the names at its right. The y axis must be final."""
    axes.set_title(title, loc="left", fontsize=_FONT + 0.5, color=_INK, pad=9)
    _label_right(axes, labels)


def _label_right(axes: "Axes", labels: Sequence[Label]) -> None:
    """Names each line at its right end.

    Overlapping names are moved apart, inside the panel's height if they fit.
    """
    labels = [label for label in labels if math.isfinite(label.height)]
    labels = sorted(labels, key=lambda label: label.height)
    scale = axes.yaxis.get_transform().transform
    bottom, top = (float(scale(value)) for value in axes.get_ylim())
    # From 0 at the bottom of the panel to 1 at its top.
    heights = [(float(scale(label.height)) - bottom) / (top - bottom) for label in labels]
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    gap = 1.5 * _FONT / (72 * box.height)  # a line and a half, since an inch has 72 points
    left = 1 + 0.17 / box.width
    for _ in range(100):  # each pass moves overlapping neighbours half of their overlap
        for i in range(1, len(heights)):
            overlap = gap - (heights[i] - heights[i - 1])
            if overlap > 0:
                heights[i - 1] -= overlap / 2
                heights[i] += overlap / 2
        if gap * (len(heights) - 1) <= 1:
            heights = [min(max(height, 0.0), 1.0) for height in heights]
    for height, label in zip(heights, labels, strict=True):
        name = axes.text(left, height, label.text, transform=axes.transAxes, va="center")
        name.set(color=label.colour, fontsize=_FONT, fontweight="bold")


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else "unknown"


def _number(value: float) -> str:
    """Returns epsilon as pages show it, rounded up, so that no figure understates the cost."""
    if not math.isfinite(value):
        return "∞" if value == math.inf else "unknown"
    return round_up(value)


def _gap(difference: float) -> str:
    points = round(100 * difference, 1)
    if points == 0:
        return "level with"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"


def _power(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
