"""The figures of `launch.adapt`, from its result. The last cell of a result is the source model."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.report import plot_curves

from . import frame, results

_Curve = list[tuple[float, float]]
_ON_LOG: Any = {"ylabel": "mean accuracy over the stream", "xscale": "log"}


def _about(result: Mapping[str, Any]) -> str:
    *_, source = result["cells"]
    return (
        f"{len(source['per_corruption'])} corruptions, {result['seeds']} streams of "
        f"{result['images']} photographs"
    )


def draw_streams(result: Mapping[str, Any], root: pathlib.Path, settings: Iterable[str]) -> None:
    """Draws accuracies, and what adaptation gains, over the corruptions of a stream."""
    *cells, source = result["cells"]
    unadapted = source["per_corruption"]
    over_stream: Any = {
        "subtitle": _about(result),
        "xlabel": "",
        "xticks": {k: name.replace("_", " ") for k, name in enumerate(unadapted)},
    }

    def curves(shown: Sequence[frame.Row], less: Mapping[str, float]) -> dict[str, _Curve]:
        return {cell["method"]: _over_corruptions(cell, unadapted, less) for cell in shown}

    for setting in settings:
        mine = results.select(cells, setting=setting)
        file = f"{frame.file_name(setting)}.png"
        plot_curves(
            root / f"stream_{file}",
            curves([*mine, source], {}),
            title=f"Accuracy over the stream, {setting}",
            ylabel="accuracy on the corruption",
            **over_stream,
        )
        plot_curves(
            root / f"gain_{file}",
            curves(mine, unadapted),
            title=f"What adaptation gains over the stream, {setting}",
            ylabel="accuracy on the corruption less that of the source model",
            references={source["method"]: 0.0},
            **over_stream,
        )


def _over_corruptions(
    cell: frame.Row, corruptions: Iterable[str], less: Mapping[str, float]
) -> _Curve:
    """Returns the accuracies of a cell over corruptions, less some others. None is less by 0."""
    accuracy = cell["per_corruption"]
    return [(k, accuracy[name] - less.get(name, 0.0)) for k, name in enumerate(corruptions)]


def draw_by_epsilon(result: Mapping[str, Any], root: pathlib.Path, methods: Iterable[str]) -> None:
    """Draws the mean accuracy of the private settings over their epsilon."""
    *cells, source = result["cells"]
    noisy = sorted((c for c in cells if "visits" in c), key=lambda c: c["epsilon_sample"])
    if not noisy:
        return
    curves: dict[str, _Curve] = {}
    for method in methods:
        mine = results.select(noisy, method=method)
        curves[method] = [(cell["epsilon_sample"], cell["mean"]) for cell in mine]
    plot_curves(
        root / "by_epsilon.png",
        curves,
        title="Accuracy under corruption against ε of a sample",
        subtitle=f"{_about(result)}, δ = {result['delta']:g}",
        xlabel="ε of one visit (log scale)",
        xticks={c["epsilon_sample"]: c["setting"].removeprefix("epsilon ") for c in noisy},
        references={source["method"]: source["mean"]},
        **_ON_LOG,
    )


def draw_stability(result: Mapping[str, Any], root: pathlib.Path) -> None:
    """Draws the accuracy of the tried hyper-parameters over the length of their updates."""
    moved = [row for row in result["tried"] if row["length"] > 0]
    for method in dict.fromkeys(row["method"] for row in moved):
        lengths: dict[str, _Curve] = {}
        for row in results.select(moved, method=method):
            lengths.setdefault(row["setting"], []).append((row["length"], row["accuracy"]))
        plot_curves(
            root / f"stability_{method}.png",
            {setting: sorted(points) for setting, points in lengths.items()},
            title=f"{method}: accuracy against the length of an update",
            subtitle="held-out corruptions, one point per learning rate",
            xlabel="mean L2 norm of an update (log scale)",
            **_ON_LOG,
        )
