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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxdp.files import optional

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _VERMILION, _GREEN, _INK, _GREY = "#0072B2", "#D55E00", "#009E73", "#222222", "#6E6E6E"
_GAP = "#F2B591"  # vermilion on white, opaque to look the same on a bar
_REFERENCE_COLOURS = (_GREEN, _VERMILION, "#CC79A7", "#E69F00")
_CURVE_COLOURS = (_BLUE, _VERMILION, _GREEN, "#CC79A7", "#E69F00", "#56B4E9", _GREY)
_FONT = 11.5
_TEXT: dict[str, Any] = {"fontsize": _FONT, "color": _INK}
_DASHED: dict[str, Any] = {"linewidth": 1.6, "linestyle": (0, (5, 3)), "zorder": 2}
_PERCENT, _PERMILLE = "{x:.0%}", "{x:.1%}"

Curves = Mapping[str, Sequence[tuple[float, float]]]
Label = tuple[float, str, str]  # the height of a name, the name, its colour


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
    final_accuracy, final_epsilon = accuracy[-1][1], epsilon[-1][1]
    title = f"{dataset}: {_percent(final_accuracy)} accuracy at ε = {_number(final_epsilon)}"
    gaps = (f", {_gap(final_accuracy - value)} {name}" for name, value in references.items())
    subtitle = f"Private training at δ = {_power(delta)}{''.join(gaps)}"
    grid = {"top": 0.825, "bottom": 0.095, "height_ratios": [2.0, 1.0], "hspace": 0.24}
    figure, ((upper,), (lower,)) = _page(title, subtitle, (7.6, 6.6), 2, 1, grid)

    labels = [(final_accuracy, f"private  {_percent(final_accuracy)}", _BLUE)]
    for (name, value), colour in zip(
        references.items(), itertools.cycle(_REFERENCE_COLOURS), strict=False
    ):
        labels.append((value, f"{name}  {_percent(value)}", colour))
    values = _progress(upper, accuracy, labels)
    shown = [value for value in (*values, *references.values()) if math.isfinite(value)]
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    margin = max(0.08 * (high - low), 0.01)
    upper.set_ylim(max(0.0, low - margin), min(1.0, high + margin) + 0.004)
    _round_marks(upper.yaxis, 6, _PERCENT if high - low > 0.05 else _PERMILLE)
    _finish(upper, "Test accuracy", labels)

    labels = [
        (final_epsilon, f"spent  {_number(final_epsilon)}", _BLUE),
        (budget, f"budget  {_number(budget)}", _INK),
    ]
    values = _progress(lower, epsilon, labels)
    lower.fill_between([step for step, _ in epsilon], values, color=_BLUE, alpha=0.12, linewidth=0)
    if not any(map(math.isfinite, values)):
        place = {"transform": lower.transAxes, "ha": "center", "va": "center"}
        lower.text(0.5, 0.5, "no finite ε holds for this run", color=_GREY, fontsize=_FONT, **place)
    top = max(filter(math.isfinite, (*values, budget)), default=1.0)
    lower.set_ylim(0, 1.12 * top if top > 0 else 1.0)
    _round_marks(lower.yaxis, 4)
    _round_marks(lower.xaxis, 6, integer=True)
    lower.set_xlim(0, max(accuracy[-1][0], epsilon[-1][0], 1))
    lower.set_xlabel("step", **_TEXT)
    _finish(lower, f"Privacy spent: ε at δ = {_power(delta)}", labels)
    return _save(figure, path)


def plot_curves(
    path: str | os.PathLike[str],
    curves: Curves,
    *,
    title: str,
    subtitle: str,
    xlabel: str,
    ylabel: str,
    xscale: Literal["linear", "log"] = "linear",
    yscale: Literal["linear", "log"] = "linear",
    percent: bool = True,
    xticks: Mapping[float, str] | None = None,
    references: Mapping[str, float] | None = None,
) -> Path:
    """Draws named curves in one panel, each with its name at its right end.

    Args:
        path, title, subtitle: As above.
        curves: Name to (x, y) pairs in the order of x. Non-finite y leave a gap, and so do y <= 0
          on a log scale. The first curve is the thickest. With more than seven the colours repeat,
          with dashes.
        xlabel, ylabel: The names of the axes. The name of y is above the panel.
        xscale, yscale: "linear" or "log".
        percent: Whether a linear y axis has percentages.
        xticks: x to the text of the marks on the x axis. Long texts are slanted. None chooses them.
        references: Name to y of dashed horizontal lines.

    Raises:
        ValueError: There is no curve or an empty one.
    """
    if not curves or not all(curves.values()):
        raise ValueError("curves needs at least one curve and at least one (x, y) pair in each.")
    figure, ((axes,),) = _page(title, subtitle)
    axes.set_xscale(xscale)
    if xscale == "log":
        marked = [x for points in curves.values() for x, _ in points]
        _log_marks(axes.xaxis, min(marked), max(marked))
    labels = list(_curves(axes, curves, list(curves), yscale).values())
    for name, value in (references or {}).items():
        axes.axhline(value, color=_INK, **_DASHED)
        labels.append((value, name, _INK))
    axes.set_xlabel(xlabel, **_TEXT)
    if xticks is not None:
        axes.set_xticks(list(xticks), list(xticks.values()))
        axes.set_xticks([], minor=True)
        if max(map(len, xticks.values())) > 6:
            for mark in axes.get_xticklabels():
                mark.set(rotation=35, ha="right", rotation_mode="anchor")
    _y_marks(axes, percent=percent)
    _finish(axes, ylabel, labels)
    return _save(figure, path)


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
    """Draws panels of named curves side by side over one y axis, with the names at the right of the
    last panel.

    A name has the same colour in every panel.

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
    if not panels or not all(curves and all(curves.values()) for _, curves in panels.values()):
        raise ValueError(
            "panels needs at least one panel, one curve in each and one (x, y) pair in each curve."
        )
    names = list(dict.fromkeys(name for _, curves in panels.values() for name in curves))
    grid = {"top": 0.755, "bottom": 0.135, "wspace": 0.09}
    figure, (row,) = _page(title, subtitle, (1.6 + 3.6 * len(panels), 4.6), 1, len(panels), grid)
    labels: dict[str, Label] = {}
    for axes, (panel, (xlabel, curves)) in zip(row, panels.items(), strict=True):
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
    if not points or not all(points.values()):
        raise ValueError("points needs at least one group and at least one point in each.")
    figure, ((axes,),) = _page(title, subtitle)
    labels = []
    for (name, group), colour in zip(points.items(), itertools.cycle(_CURVE_COLOURS), strict=False):
        x, y, dx, dy = zip(*group, strict=True)
        bars = {"xerr": np.nan_to_num(dx), "yerr": np.nan_to_num(dy)}
        axes.errorbar(
            x, y, **bars, fmt="o", color=colour, markersize=7, elinewidth=1.3, capsize=2.5, zorder=3
        )
        labels.append((y[-1], name, colour))
    axes.xaxis.set_major_formatter(_PERCENT)
    axes.set_xlabel(xlabel, **_TEXT)
    _y_marks(axes, percent=True)
    _finish(axes, ylabel, labels)
    return _save(figure, path)


def plot_reliability(
    path: str | os.PathLike[str], diagrams: Mapping[str, Any], *, title: str, subtitle: str
) -> Path:
    """Draws reliability diagrams side by side: accuracy against confidence above, shares of the
    examples below.

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
        used = np.asarray(diagram.counts) > 0
        if not used.any():
            raise ValueError(f"diagrams[{name!r}] counts no examples. Leave it out.")
        counts, confidence, accuracy = (
            np.asarray(values, np.float64)[used]
            for values in (diagram.counts, diagram.confidence, diagram.accuracy)
        )
        share, gap = counts / counts.sum(), confidence - accuracy
        middle, width = (np.flatnonzero(used) + 0.5) / len(used), 0.92 / len(used)
        bars = {"x": middle, "width": width, "linewidth": 0}
        above.bar(height=accuracy, color=_BLUE, **bars)
        above.bar(height=gap, bottom=accuracy, color=_GAP, **bars)
        above.hlines(accuracy, middle - width / 2, middle + width / 2, color=_BLUE, linewidth=2.4)
        above.plot((0, 1), (0, 1), color=_INK, linewidth=1.4, linestyle=(0, (5, 3)))
        below.bar(height=share, color=_GREY, **bars)
        below.set_xlabel("confidence", **_TEXT)
        _finish(above, f"{name}\nECE {np.sum(share * np.abs(gap)):.3f}")
    for axes, ylabel, count in ((upper[0], "accuracy", 6), (lower[0], "examples", 3)):
        axes.set_ylabel(ylabel, **_TEXT)
        _round_marks(axes.yaxis, count, _PERCENT)
    upper[0].set(xlim=(0, 1), ylim=(0, 1))
    upper[0].set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    names = [(accuracy[-1], "accuracy", _BLUE), (accuracy[-1] + gap[-1] / 2, "gap", _VERMILION)]
    _label_right(upper[-1], [*names, (1.0, "calibrated", _INK)])
    figure.align_ylabels()
    return _save(figure, path)


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
    shapes = {value.shape for value in images.values()}
    shape = next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) != 4 or shape[3] not in (1, 3) or 0 in shape:
        raise ValueError(
            "rows needs images [n, H, W, C] of one shape, n > 0 and C 1 or 3, got "
            f"{sorted(shapes)}."
        )
    for name, value in images.items():
        if not np.issubdtype(value.dtype, np.floating) or not (
            value.min() >= 0 and value.max() <= 1
        ):
            raise ValueError(f"rows[{name!r}] must be floating point in [0, 1]. Clip other values.")
    if unknown := sorted(set(notes or {}) - set(rows)):
        raise ValueError(f"notes has {', '.join(map(repr, unknown))}, but rows does not.")

    count, height, width, _ = shape
    step = 1.08 * width / height  # from image to image, in units of their height
    across = (count - 1) * step + width / height
    inches = min(0.95, 9.0 / across)  # the height of an image
    bottom, top = 0.1, 0.95 if subtitle else 0.64
    size = (inches * across, bottom + top + inches * (1.08 * len(rows) - 0.08))
    grid = {
        "left": 0,
        "right": 1,
        "bottom": bottom / size[1],
        "top": 1 - top / size[1],
        "hspace": 0.08,
    }
    figure, panels = _page(title, subtitle, size, len(rows), 1, grid)
    label = {
        "fontsize": _FONT,
        "va": "center",
        "annotation_clip": False,
        "textcoords": "offset points",
    }
    for (axes,), (name, value) in zip(panels, images.items(), strict=True):
        for k, image in enumerate(value):
            extent = (k * step, k * step + width / height, 0, 1)
            axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=extent)
        axes.set(xlim=(0, across), ylim=(0, 1), aspect="auto")
        axes.set_axis_off()
        axes.annotate(
            name, (0, 0.5), xytext=(-10, 0), ha="right", color=_INK, fontweight="bold", **label
        )
        note = (notes or {}).get(name, "")
        axes.annotate(note, (across, 0.5), xytext=(10, 0), ha="left", color=_GREY, **label)
    return _save(figure, path)


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
    """Returns a figure with two lines at a fixed distance from its top, and its panels
    [rows][columns].
    """
    check_figures()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=160, facecolor="white")
    grid = {"left": 0.085, "right": 0.97, "top": 0.79, "bottom": 0.12, **grid}
    panels = figure.subplots(
        rows, columns, sharex=rows > 1, sharey="row", squeeze=False, gridspec_kw=grid
    )
    figure.text(
        grid["left"],
        1 - 0.286 / size[1],
        title,
        fontsize=17,
        fontweight="bold",
        color=_INK,
        va="center",
    )
    figure.text(
        grid["left"], 1 - 0.598 / size[1], subtitle, fontsize=_FONT, color=_GREY, va="center"
    )
    for axes in panels.flat:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color("#B0B0B0")
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.9)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, labelsize=_FONT - 1, labelcolor=_GREY, pad=5)
    return figure, panels


def _progress(
    axes: "Axes", points: Sequence[tuple[int, float]], labels: Sequence[Label]
) -> list[float]:
    """Draws the curve of a run, labelled first, and lines at the other labels. Returns its values,
    or NaN.
    """
    for value, _, colour in labels[1:]:
        if math.isfinite(value):
            axes.axhline(value, color=colour, **_DASHED)
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    marker = "o" if len(points) <= 40 else None
    look: dict[str, Any] = {
        "color": _BLUE,
        "linewidth": 2.4,
        "marker": marker,
        "markersize": 4.5,
        "zorder": 3,
    }
    axes.plot([step for step, _ in points], values, clip_on=False, **look)
    return values


def _curves(axes: "Axes", curves: Curves, names: Sequence[str], yscale: str) -> dict[str, Label]:
    """Draws each curve in the style of its place among all names. Returns labels at the last finite
    values.
    """
    axes.set_yscale(yscale)
    labels = {}
    for name, points in curves.items():
        drawable = [
            (x, y if math.isfinite(y) and (y > 0 or yscale == "linear") else math.nan)
            for x, y in points
        ]
        i = names.index(name)
        colour, dashed = _CURVE_COLOURS[i % len(_CURVE_COLOURS)], i >= len(_CURVE_COLOURS)
        look: dict[str, Any] = {
            "linestyle": "--" if dashed else "-",
            "linewidth": 1.9 if i else 2.8,
            "zorder": 3 if i else 4,
        }
        axes.plot(*zip(*drawable, strict=True), color=colour, **look)
        if numbers := [y for _, y in drawable if not math.isnan(y)]:
            labels[name] = (numbers[-1], f"– – {name}" if dashed else name, colour)
    axes.margins(x=0)
    return labels


def _log_marks(axis: Any, low: float, high: float) -> None:
    """Writes marks between powers of ten in full if there are few powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    if 0 < high < 1000 * low:
        axis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        axis.set_major_formatter("{x:g}")


def _round_marks(axis: Any, count: int, form: str = "", *, integer: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10], integer=integer))
    if form:
        axis.set_major_formatter(form)


def _y_marks(axes: "Axes", *, percent: bool) -> None:
    """Sets round marks on the y axis. Percentages end at 0 and 100% unless values exceed them."""
    limits = [panel.dataLim.intervaly for panel in axes.get_shared_y_axes().get_siblings(axes)]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    if axes.get_yscale() == "log":
        _log_marks(axes.yaxis, low, high)
        return
    _round_marks(axes.yaxis, 6, "" if not percent else _PERCENT if high - low > 0.05 else _PERMILLE)
    if percent:
        bottom, top = axes.get_ylim()
        axes.set_ylim(
            max(bottom, -0.015) if low >= 0 else bottom, min(top, 1.015) if high <= 1 else top
        )


def _save(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # "tight" widens the page to hold the names to the right of the panels.
    figure.savefig(path, bbox_inches="tight", pad_inches=0.3)
    return path


def _finish(axes: "Axes", title: str, labels: Sequence[Label] = ()) -> None:
    """Writes a panel's title and the names at its right. The y axis must be final."""
    axes.set_title(title, loc="left", fontsize=_FONT + 0.5, color=_INK, pad=9)
    _label_right(axes, labels)


def _label_right(axes: "Axes", labels: Sequence[Label]) -> None:
    """Names each line at its right end and moves overlapping names apart, inside the panel's height
    if they fit.
    """
    labels = sorted(
        (label for label in labels if math.isfinite(label[0])), key=lambda label: label[0]
    )
    scale = axes.yaxis.get_transform().transform
    bottom, top, *places = (
        float(scale(value)) for value in (*axes.get_ylim(), *(value for value, _, _ in labels))
    )
    heights = [(place - bottom) / (top - bottom) for place in places]
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    gap, left = 1.5 * _FONT / (72 * box.height), 1 + 0.17 / box.width
    for _ in range(100):
        for i in range(1, len(heights)):
            overlap = gap - (heights[i] - heights[i - 1])
            if overlap > 0:
                heights[i - 1] -= overlap / 2
                heights[i] += overlap / 2
        if gap * (len(heights) - 1) <= 1:
            heights = [min(max(height, 0.0), 1.0) for height in heights]
    for height, (_, text, colour) in zip(heights, labels, strict=True):
        name = axes.text(left, height, text, transform=axes.transAxes, va="center")
        name.set(color=colour, fontsize=_FONT, fontweight="bold")


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else "unknown"


def _number(value: float) -> str:
    """Returns epsilon with three significant digits, rounded up, so that a report does not
    understate the cost.
    """
    if not math.isfinite(value):
        return "∞" if value == math.inf else "unknown"
    if value <= 0:
        return f"{value:g}"
    scale = 10.0 ** (2 - math.floor(math.log10(value)))
    return f"{math.ceil(round(value * scale, 6)) / scale:g}"


def _gap(difference: float) -> str:
    points = round(100 * difference, 1)
    if points == 0:
        return "level with"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"


def _power(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
