"""The figures of test-time adaptation, drawn from the result of `launch.adapt`."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.report import plot_curves

from . import frame, results
from .adapt_settings import FILTERS, INDEPENDENT, SOURCE

_MEAN_ACCURACY = "mean accuracy over the stream"
Curves = dict[str, list[tuple[float, float]]]


def draw_streams(
    result: Mapping[str, Any],
    work: frame.Work,
    about: str,
    settings: Iterable[str],
) -> None:
    """Draws the accuracy over the stream in each setting, and its difference to the source
    model.
    """
    *cells, source = result["cells"]
    of_source = source["per_corruption"]
    names = list(of_source)
    ticks: dict[float, str] = {k: name.replace("_", " ") for k, name in enumerate(names)}
    draw = functools.partial(plot_curves, subtitle=about, xlabel="", xticks=ticks)

    def curves(shown: Sequence[frame.Row], less: Mapping[str, float]) -> Curves:
        points = Curves()
        for cell in shown:
            accuracy = cell["per_corruption"]
            gains = [accuracy[name] - less.get(name, 0.0) for name in names]
            points[cell["method"]] = list(enumerate(gains))
        return points

    for setting in settings:
        mine = results.select(cells, setting=setting)
        file = f"{frame.file_name(setting)}.png"
        draw(
            work.root / f"stream_{file}",
            curves([*mine, source], {}),
            title=f"Accuracy over the stream, {setting}",
            ylabel="accuracy on the corruption",
        )
        draw(
            work.root / f"gain_{file}",
            curves(mine, of_source),
            title=f"What adaptation gains over the stream, {setting}",
            ylabel="accuracy on the corruption less that of the source model",
            references={SOURCE: 0.0},
        )


def _curves(points: Iterable[tuple[str, float, float]]) -> Curves:
    """Returns curves from points (name of the curve, x, y). Those of a curve are in order of x."""
    curves = Curves()
    for name, x, y in points:
        curves.setdefault(name, []).append((x, y))
    return {name: sorted(of_curve) for name, of_curve in curves.items()}


def draw_epsilons(result: Mapping[str, Any], work: frame.Work, about: str) -> None:
    """Draws the accuracy over the epsilon of a sample, if a setting is private."""
    *cells, source = result["cells"]
    private = [cell for cell in cells if "visits" in cell]
    if not private:
        return
    points = []
    ticks = {}
    for cell in private:
        epsilon = cell["epsilon_sample"]
        # Results of earlier versions are of independent noise.
        noise = cell.get("noise", INDEPENDENT)
        correlation = "" if noise == INDEPENDENT else f", {noise} noise"
        name = cell["method"] + FILTERS[cell["filters"]] + correlation
        points.append((name, epsilon, cell["mean"]))
        ticks[epsilon] = f"{cell['target']:g}"
    plot_curves(
        work.root / "by_epsilon.png",
        _curves(points),
        title="Accuracy under corruption against ε of a sample",
        subtitle=f"{about}, δ = {result['delta']:g}",
        xlabel="ε of one visit (log scale)",
        xticks=ticks,
        references={SOURCE: source["mean"]},
        ylabel=_MEAN_ACCURACY,
        xscale="log",
    )


def draw_lengths(rows: Sequence[frame.Row], work: frame.Work) -> None:
    """Draws what each setting changes over the photographs of a domain, if that varies."""
    for setting in dict.fromkeys(row["setting"] for row in rows):
        points = []
        for row in results.select(rows, setting=setting):
            mean, _ = row["over_original"]
            points.append((row["method"], row["images"], mean))
        plot_curves(
            work.root / f"by_length_{frame.file_name(setting)}.png",
            _curves(points),
            title=f"Accuracy by the length of the stream, {setting}",
            subtitle="rates of the longest stream",
            xlabel="photographs of a domain (log scale)",
            xscale="log",
            ylabel="accuracy less that of the original method",
            references={"original": 0.0},
        )


def draw_stability(result: Mapping[str, Any], work: frame.Work) -> None:
    """Draws the accuracy of each tried learning rate against the length of its updates."""
    moved = [row for row in result["tried"] if row["length"] > 0]
    for method in dict.fromkeys(row["method"] for row in moved):
        points = []
        for row in results.select(moved, method=method):
            points.append((row["setting"], row["length"], row["accuracy"]))
        plot_curves(
            work.root / f"stability_{method}.png",
            _curves(points),
            title=f"{method}: accuracy against the length of an update",
            subtitle="held-out corruptions, one point per learning rate",
            xlabel="mean L2 norm of an update (log scale)",
            ylabel=_MEAN_ACCURACY,
            xscale="log",
        )
