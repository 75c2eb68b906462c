"""The tables of docs/results/dpadapter.md from the results of configs/dpadapter_usps.py and of an
earlier run.

python -m benchmarks.evidence results/dpadapter.md
"""

import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.report import format_table, plot_panels, plot_points
from launch import results

FAMILIES = ("standard", "SAM", "AMP", "DPAdapter")
_ROBUST = "robust: under noise of 0.4 of each tensor"
DIFFERENCE = r"(.+): ([+-]\d+\.\d+) \(standard error (\d+\.\d+)\), higher in (.+)"


def merged(report: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the run on USPS with the models of a later run of more lengths, in order of their
    lengths.
    """
    grids = dict(report["grids"])
    for name, grid in added["grids"].items():
        rows = [*grids[name]["table"], *grid["table"]]
        grids[name] = {**grids[name], "table": sorted(rows, key=_place)}
    return {
        **report,
        "grids": grids,
        "upstreams": [*report["upstreams"], *added["upstreams"]],
        "upstream_means": [*report["upstream_means"], *added["upstream_means"]],
    }


def _place(row: Mapping[str, str]) -> tuple[int, float]:
    """Returns where an upstream model stands in a table of lengths."""
    family, _, gamma = row["upstream"].partition(" γ=")
    return FAMILIES.index(family), float(gamma or 0)


def tables(report: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the run on USPS."""
    report = merged(report, added)
    grids = report["grids"]
    markdown = {}
    for name in ("order", "order_4"):
        markdown[name] = _markdown(_without_method(grids[name]["table"]))
        markdown[f"{name}: differences"] = _markdown(map(_difference, grids[name]["differences"]))
    markdown["transfer"] = _markdown(_without_method(grids["order"]["robust_accuracy"]))
    markdown["upstreams"] = _markdown(_upstreams(report, grids["order"]["table"]))
    markdown["rates"] = _markdown(_rates(grids["tuning"]["table"]))
    for name in ("gamma_1", "gamma_4", "amp", "batches"):
        markdown[name] = _beside_upstream(report, name)
    markdown["family"] = _markdown(grids["family"]["table"])
    markdown["family: differences"] = _markdown(map(_difference, grids["family"]["differences"]))
    return markdown


def _means(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the means of the upstream models by name."""
    return {row["upstream"]: row for row in report["upstream_means"]}


def _upstreams(report: Mapping[str, Any], grid: Sequence[Mapping[str, str]]) -> list[Any]:
    """Returns a line for each upstream model of a grid, in its order."""
    means = _means(report)
    lines = []
    for row in grid:
        name = row["upstream"]
        if name in means:
            mean = means[name]
            line = {
                "upstream": name,
                "accuracy": f"{mean['accuracy']:.3f}",
                "robust accuracy": f"{mean['robust_accuracy']:.3f}",
                "rho": f"{mean['rho']:.1f}",
                "norm of Delta": f"{mean['perturbation_norm']:.2f}",
            }
            lines.append(line)
    return lines


def _rates(tuning: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns a line for each upstream model with a column for each learning rate."""
    lines: dict[str, dict[str, str]] = {}
    for row in tuning:
        name = row["upstream"]
        rate = row["method"].replace("DP-SGD at", "rate")
        line = lines.setdefault(name, {"upstream": name})
        line[rate] = row["average ε=1"]
    return list(lines.values())


def _beside_upstream(report: Mapping[str, Any], grid: str) -> str:
    """Returns a grid with the accuracies of its upstream models."""
    means = _means(report)
    rows = _without_method(report["grids"][grid]["table"])
    for row in rows:
        upstream = means[row["upstream"]]
        row["upstream accuracy"] = f"{upstream['accuracy']:.3f}"
        row["robust"] = f"{upstream['robust_accuracy']:.3f}"
    return _markdown(rows)


def draw_lengths(
    grid: str, report: Mapping[str, Any], added: Mapping[str, Any], path: pathlib.Path
) -> None:
    """Draws Figures 1, 5 and 7 against gamma, a panel for each family."""
    report = merged(report, added)
    means = _means(report)
    panels: dict[str, tuple[str, dict[str, list[tuple[float, float]]]]] = {}
    rows = _without_method(report["grids"][grid]["table"])
    for family in FAMILIES[1:]:
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            name = row["upstream"]
            if name.startswith((FAMILIES[0], family)):
                _, gamma = _place(row)
                values = _numbers(row)
                values["upstream"] = means[name]["accuracy"]
                values["upstream, robust"] = means[name]["robust_accuracy"]
                for label, value in values.items():
                    curves.setdefault(label, []).append((gamma, value))
        if len(curves["upstream"]) > 1:
            panels[family] = ("γ (0 is standard pre-training)", curves)
    plot_panels(
        path,
        panels,
        title="Perturbation magnitude",
        subtitle=f"DP-SGD{_epsilon(rows)}, means of seeds; {_ROBUST}",
        ylabel="accuracy",
        percent=True,
    )


def draw_robustness(
    grid: str, report: Mapping[str, Any], added: Mapping[str, Any], path: pathlib.Path
) -> None:
    """Draws Figures 6 and 7: private models against the robust accuracy of their upstream model."""
    report = merged(report, added)
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    rows = report["grids"][grid]["table"]
    for row in rows:
        number, _ = _place(row)
        upstreams = results.select(report["upstreams"], upstream=row["upstream"])
        robust = results.over_seeds(upstreams, "robust_accuracy")
        (average,) = (text for key, text in row.items() if key.startswith("average"))
        mean, _, deviation = average.partition(" ± ")
        error = float(deviation or math.nan) / math.sqrt(len(upstreams))
        point = (robust.mean, float(mean), robust.error, error)
        points.setdefault(FAMILIES[number], []).append(point)
    plot_points(
        path,
        points,
        title="Robustness of the upstream model, and private accuracy",
        subtitle=f"DP-SGD{_epsilon(rows)}; {_ROBUST}; bars: standard error over seeds",
        xlabel="robust accuracy of the upstream model",
        ylabel="private accuracy, mean of the data sets",
    )


def _epsilon(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the epsilon of the columns of a table, as in ", ε = 1"."""
    (average,) = (key for key in rows[0] if key.startswith("average"))
    return f", {average.removeprefix('average ').replace('=', ' = ')}"


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    """Returns the mean accuracies of a row by data set."""
    means = {}
    for key, text in row.items():
        name, _, epsilon = key.partition(" ε=")
        if epsilon and name != "average":
            means[name] = float(text.split(" ± ")[0])
    return means


def earlier_tables(ours: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the earlier run, whose rows are kept as text, and the paper's Table
    1."""
    names = ("table1", "upstream models", "three times the length", "beyond")
    markdown = {name: _markdown(ours[name]) for name in names}
    markdown["paper"] = _markdown(paper["table1"])
    return markdown


def table_again(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the run with an upstream of CIFAR-10."""
    markdown = {}
    for name in ("order", "order_4"):
        grid = report["grids"][name]
        markdown[f"again: {name}"] = _markdown(_without_method(grid["table"]))
        markdown[f"again: {name}: differences"] = _markdown(map(_difference, grid["differences"]))
    return markdown


def figures_again(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of Figures 1, 3, 5 and 7 from digits."""
    grids = ("amp", "batches", "gamma", "gamma_4")
    return {f"again: {name}": _beside_upstream(report, name) for name in grids}


def _without_method(rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "method"} for row in rows]


def _difference(text: str) -> dict[str, str]:
    match = re.fullmatch(DIFFERENCE, text)
    if match is None:
        raise ValueError(f"a difference must match {DIFFERENCE}, got {text!r}.")
    name, mean, error, higher = match.groups()
    return {
        "difference": name,
        "mean": f"{float(mean):+.3f}",
        "standard error": f"{float(error):.3f}",
        "higher in": higher,
    }


def _markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    lines: Sequence[Mapping[str, Any]] = list(rows)
    return format_table(lines, style="markdown")
