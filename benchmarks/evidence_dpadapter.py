"""The tables of docs/results/dpadapter.md from the results of configs/dpadapter_usps.py and of an
earlier run.

python -m benchmarks.evidence results/dpadapter.md
"""

import functools
import math
import pathlib
import re
from collections.abc import Iterable, Mapping

from benchmarks import pages
from jaxdp.report import plot_panels, plot_points
from launch import results

FAMILIES = ("standard", "SAM", "AMP", "DPAdapter")
_ROBUST = "robust: under noise of 0.4 of each tensor"
DIFFERENCE = r"(.+): ([+-]\d+\.\d+) \(standard error (\d+\.\d+)\), higher in (.+)"


def merged(report: Mapping, added: Mapping) -> dict:
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


def tables(report, added) -> dict:
    report = merged(report, added)
    grids = report["grids"]
    markdown = {}
    for name in ("order", "order_4"):
        markdown |= _with_differences(name, grids[name])
    markdown["transfer"] = _without_method(grids["order"]["robust_accuracy"])
    markdown["upstreams"] = _upstreams(report, grids["order"]["table"])
    tuning = []
    for row in grids["tuning"]["table"]:
        rate = row["method"].replace("DP-SGD at", "rate")
        tuning.append(row | {"rate": rate})
    markdown["rates"] = results.pivot(
        tuning, "upstream", "rate", lambda rows: rows[0]["average ε=1"]
    )
    for name in ("gamma_1", "gamma_4", "amp", "batches"):
        markdown[name] = _beside_upstream(report, name)
    markdown["family"] = grids["family"]["table"]
    markdown["family: differences"] = _differences(grids["family"])
    return markdown


def _with_differences(name: str, grid) -> dict:
    return {name: _without_method(grid["table"]), f"{name}: differences": _differences(grid)}


def _means(report: Mapping) -> dict:
    """Returns the means of the upstream models by name."""
    return {row["upstream"]: row for row in report["upstream_means"]}


def _upstreams(report, grid) -> list:
    """Returns a line for each upstream model of a grid, in its order."""
    means = _means(report)
    named = [means[row["upstream"]] for row in grid if row["upstream"] in means]
    columns = {
        "upstream": "{upstream}",
        "accuracy": "{accuracy:.3f}",
        "robust accuracy": "{robust_accuracy:.3f}",
        "rho": "{rho:.1f}",
        "norm of Delta": "{perturbation_norm:.2f}",
    }
    return pages.lines(named, columns)


def _beside_upstream(report, grid: str) -> list[dict]:
    """Returns a grid with the accuracies of its upstream models."""
    means = _means(report)
    rows = _without_method(report["grids"][grid]["table"])
    for row in rows:
        upstream = means[row["upstream"]]
        row["upstream accuracy"] = f"{upstream['accuracy']:.3f}"
        row["robust"] = f"{upstream['robust_accuracy']:.3f}"
    return rows


def draw_lengths(grid: str, report, added, path: pathlib.Path):
    """Draws Figures 1, 5 and 7 against gamma, a panel for each family."""
    report = merged(report, added)
    means = _means(report)
    panels = {}
    rows = _without_method(report["grids"][grid]["table"])
    for family in FAMILIES[1:]:
        curves = {}
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


def draw_robustness(grid: str, report, added, path: pathlib.Path):
    """Draws Figures 6 and 7: private models against the robust accuracy of their upstream model."""
    report = merged(report, added)
    points = {}
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


draw_gamma = functools.partial(draw_lengths, "gamma_1")
draw_gamma_4 = functools.partial(draw_lengths, "gamma_4")
draw_amp = functools.partial(draw_lengths, "amp")
draw_robust = functools.partial(draw_robustness, "gamma_1")
draw_robust_4 = functools.partial(draw_robustness, "gamma_4")


def _epsilon(rows) -> str:
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


def earlier_tables(ours, paper) -> dict:
    """Returns the tables of the earlier run, whose rows are kept as text, and the paper's Table
    1."""
    names = ("table1", "upstream models", "three times the length", "beyond")
    return results.only(ours, *names) | {"paper": paper["table1"]}


def table_again(report) -> dict:
    """Returns the tables of the run with an upstream of CIFAR-10."""
    markdown = {}
    for name in ("order", "order_4"):
        markdown |= _with_differences(f"again: {name}", report["grids"][name])
    return markdown


def figures_again(report) -> dict:
    """Returns the tables of Figures 1, 3, 5 and 7 from digits."""
    grids = ("amp", "batches", "gamma", "gamma_4")
    return {f"again: {name}": _beside_upstream(report, name) for name in grids}


def _without_method(rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "method"} for row in rows]


def _differences(grid) -> list[dict]:
    lines = []
    for text in grid["differences"]:
        match = re.fullmatch(DIFFERENCE, text)
        if match is None:
            raise ValueError(f"a difference must match {DIFFERENCE}, got {text!r}.")
        name, mean, error, higher = match.groups()
        line = {"difference": name, "mean": f"{float(mean):+.3f}"}
        lines.append(line | {"standard error": f"{float(error):.3f}", "higher in": higher})
    return lines
