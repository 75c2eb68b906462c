"""The figures of test-time adaptation, drawn from the result of `launch.adapt`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.report import plot_curves

from . import frame, results
from .adapt_settings import INDEPENDENT, SOURCE

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
    names = list(source["per_corruption"])
    ticks: dict[float, str] = {k: name.replace("_", " ") for k, name in enumerate(names)}

    def curves(shown: Sequence[frame.Row], less: Mapping[str, float]) -> Curves:
        points = Curves()
        for cell in shown:
            gains = [cell["per_corruption"][name] - less.get(name, 0.0) for name in names]
            points[cell["method"]] = list(enumerate(gains))
        return points

    for setting in settings:
        mine = results.select(cells, setting=setting)
        file = f"{frame.file_name(setting)}.png"
        plot_curves(
            work.root / f"stream_{file}",
            curves([*mine, source], {}),
            title=f"Accuracy over the stream, {setting}",
            subtitle=about,
            xlabel="",
            xticks=ticks,
            ylabel="accuracy on the corruption",
        )
        plot_curves(
            work.root / f"gain_{file}",
            curves(mine, source["per_corruption"]),
            title=f"What adaptation gains over the stream, {setting}",
            subtitle=about,
            xlabel="",
            xticks=ticks,
            ylabel="accuracy on the corruption less that of the source model",
            references={SOURCE: 0.0},
        )


def draw_epsilons(result: Mapping[str, Any], work: frame.Work, about: str) -> None:
    """Draws the accuracy over the epsilon of a sample, if a setting is private."""
    *cells, source = result["cells"]
    private = [cell for cell in cells if "visits" in cell]
    if not private:
        return
    curves, ticks = Curves(), {}
    for cell in private:
        epsilon = cell["epsilon_sample"]
        filters = ", filters kept" if cell["filters"] == "keep" else ""
        # Results of earlier versions are of independent noise.
        noise = cell.get("noise", INDEPENDENT)
        correlation = "" if noise == INDEPENDENT else f", {noise} noise"
        curve = f"{cell['method']}{filters}{correlation}"
        curves.setdefault(curve, []).append((epsilon, cell["mean"]))
        ticks[epsilon] = f"{cell['target']:g}"
    plot_curves(
        work.root / "by_epsilon.png",
        {name: sorted(points) for name, points in curves.items()},
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
        curves = Curves()
        for row in results.select(rows, setting=setting):
            mean, _ = row["over_original"]
            curves.setdefault(row["method"], []).append((row["images"], mean))
        plot_curves(
            work.root / f"by_length_{frame.file_name(setting)}.png",
            {method: sorted(points) for method, points in curves.items()},
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
        curves = Curves()
        for row in results.select(moved, method=method):
            curves.setdefault(row["setting"], []).append((row["length"], row["accuracy"]))
        plot_curves(
            work.root / f"stability_{method}.png",
            {setting: sorted(points) for setting, points in curves.items()},
            title=f"{method}: accuracy against the length of an update",
            subtitle="held-out corruptions, one point per learning rate",
            xlabel="mean L2 norm of an update (log scale)",
            ylabel=_MEAN_ACCURACY,
            xscale="log",
        )
