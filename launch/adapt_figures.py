"""The figures of test-time adaptation, drawn from the result of `launch.adapt`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.report import plot_curves

from . import frame, results

NO_ADAPTATION = "no adaptation"
_MEAN_ACCURACY = "mean accuracy over the stream"
Curves = dict[str, list[tuple[float, float]]]


def draw_streams(
    result: Mapping[str, Any],
    work: frame.Work,
    about: str,
    settings: Sequence[str],
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
            references={NO_ADAPTATION: 0.0},
        )


def draw_epsilons(result: Mapping[str, Any], work: frame.Work, about: str) -> None:
    """Draws the accuracy over the epsilon of a sample, if a setting is private."""
    *cells, source = result["cells"]
    private = [cell for cell in cells if "visits" in cell]
    if not private:
        return
    curves = {name: list[tuple[float, float]]() for name in work.config.methods}
    ticks = {}
    for cell in sorted(private, key=lambda cell: cell["epsilon_sample"]):
        epsilon = cell["epsilon_sample"]
        curves[cell["method"]].append((epsilon, cell["mean"]))
        ticks[epsilon] = cell["setting"].removeprefix("epsilon ")
    plot_curves(
        work.root / "by_epsilon.png",
        curves,
        title="Accuracy under corruption against ε of a sample",
        subtitle=f"{about}, δ = {result['delta']:g}",
        xlabel="ε of one visit (log scale)",
        xticks=ticks,
        references={NO_ADAPTATION: source["mean"]},
        ylabel=_MEAN_ACCURACY,
        xscale="log",
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
