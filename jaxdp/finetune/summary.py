"""Tables and figures of a grid of cells (`jaxdp.finetune.table`): means, deviations and paired differences over seeds."""

import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxdp.report import format_table, plot_curves
from jaxdp.report.plots import plot_points
from jaxdp.report.workdir import write_json

Row = Mapping[str, Any]
Upstreams = Mapping[tuple[str, int], Mapping[str, Any]]


def write_summary(config: Any, root: pathlib.Path, results: Sequence[Row], upstreams: Upstreams) -> str:
    """Writes GRID.md and GRID.json for every grid, and the figures; returns the text for the terminal.

    Args:
      config: of the table.
      root: its workdir.
      results: one row per cell.
      upstreams: results of pre-training by upstream and seed.
    """
    texts = []
    for name, grid in config.grids.items():
        rows = [row for row in results if _belongs(row, grid)]
        table, differences = _table(rows, grid), _differences(rows, grid)
        text = f"{name} ({len(config.seeds)} seeds, {len(rows)} cells)\n\n"
        text += format_table(table, style="markdown") + "\n\n" + "\n".join(f"* {line}" for line in differences) + "\n"
        (root / f"{name}.md").write_text(text)
        write_json(root / f"{name}.json", {"cells": list(rows), "table": table, "differences": differences})
        texts.append(text)
    robust = _robust_column(config, upstreams)
    write_json(root / "upstreams.json", [{"upstream": u, "seed": s, **row} for (u, s), row in robust.items()])
    _figures(config, root, results, robust)
    return "\n".join([*texts, _upstream_table(robust)])


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Mean, and the standard error of the mean (NaN for one value)."""
    found = list(values)
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return statistics.fmean(found), error


def paired_difference(
    rows: Sequence[Row], key: str, first: Any, second: Any, value: str = "accuracy"
) -> tuple[float, float, int, int]:
    """Compares two values of one coordinate, all others being equal.

    Cells of one seed share an upstream model and are not independent: differences are averaged per seed first, and the
    error is that over seeds.

    Returns:
      (mean difference second - first, its standard error over seeds, pairs in which second is larger, pairs).
    """
    others = [name for name in ("upstream", "method", "epsilon", "dataset", "seed") if name != key]
    cells = {(tuple(row[name] for name in others), row[key]): row[value] for row in rows}
    pairs = {
        place: cells[place, second] - cells[place, first]
        for place, at in cells
        if at == first and (place, second) in cells
    }
    if not pairs:
        return math.nan, math.nan, 0, 0
    seeds: dict[Any, list[float]] = {}
    for place, difference in pairs.items():
        seeds.setdefault(place[-1], []).append(difference)
    mean, error = mean_and_error(statistics.fmean(values) for values in seeds.values())
    return mean, error, sum(difference > 0 for difference in pairs.values()), len(pairs)


def _belongs(row: Row, grid: Any) -> bool:
    return (
        row["upstream"] in grid.upstreams
        and row["method"] in grid.methods
        and row["dataset"] in grid.sets
        and row["epsilon"] in [float(epsilon) for epsilon in grid.epsilons]
    )


def _table(rows: Sequence[Row], grid: Any) -> list[dict[str, str]]:
    """The layout of Table 1: a row per method and upstream, a column per data set and epsilon, averages last."""
    table = []
    for method in grid.methods:
        for upstream in grid.upstreams:
            line = {"method": method, "upstream": upstream}
            for dataset in [*grid.sets, "average"]:
                for epsilon in grid.epsilons:
                    picked = [
                        row
                        for row in rows
                        if (row["method"], row["upstream"], row["epsilon"]) == (method, upstream, float(epsilon))
                        and dataset in (row["dataset"], "average")
                    ]
                    line[f"{dataset} ε={epsilon:g}"] = _mean_and_deviation(picked)
            table.append(line)
    return table


def _mean_and_deviation(rows: Sequence[Row]) -> str:
    """Over seeds, of the mean over data sets."""
    seeds = sorted({row["seed"] for row in rows})
    values = [statistics.fmean(row["accuracy"] for row in rows if row["seed"] == seed) for seed in seeds]
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def _differences(rows: Sequence[Row], grid: Any) -> list[str]:
    """Each upstream against the one before it, as the paper orders them; each method against the first."""
    compared = [("upstream", a, b) for a, b in zip(grid.upstreams, grid.upstreams[1:], strict=False)]
    compared += [("method", grid.methods[0], other) for other in grid.methods[1:]]
    lines = []
    for key, first, second in compared:
        mean, error, higher, pairs = paired_difference(rows, key, first, second)
        lines.append(
            f"{second} over {first}: {mean:+.4f} ± {error:.4f} (standard error), higher in {higher} of {pairs}"
        )
    return lines


def _robust_column(config: Any, upstreams: Upstreams) -> dict[tuple[str, int], dict[str, Any]]:
    """What the figures need of every upstream model: family, gamma, accuracy, robust accuracy, ||Delta||."""
    kind = "relative" if config.robust.relative else "absolute"
    found = {}
    for place, result in upstreams.items():
        method, sweep = result["method"], result["robust_accuracy"][kind]
        options = result["provenance"]["config"]["method"][method]
        found[place] = {
            "family": method,
            "gamma": options.get("gamma", 0.0),
            "accuracy": result["accuracy"],
            "robust_accuracy": statistics.fmean(sweep["draws"][sweep["std"].index(config.robust.std)]),
            "rho": result["rho"]["local"],
            "perturbation_norm": result["perturbation_norm"]["last"],
        }
    return found


def _upstream_table(robust: Mapping[tuple[str, int], Row]) -> str:
    names = dict.fromkeys(name for name, _ in robust)
    columns = ("accuracy", "robust_accuracy", "rho", "perturbation_norm")
    rows = []
    for name in names:
        found = [row for (other, _), row in robust.items() if other == name]
        rows.append({"upstream": name} | {key: statistics.fmean(row[key] for row in found) for key in columns})
    return "Upstream models, means over seeds\n\n" + format_table(rows)


def _figures(config: Any, root: pathlib.Path, results: Sequence[Row], robust: Mapping[tuple[str, int], Row]) -> None:
    noise = f"{'relative ' if config.robust.relative else ''}parameter noise {config.robust.std:g}"
    for name, grid in config.grids.items():
        if not grid.get("figures", False):
            continue
        rows = [row for row in results if _belongs(row, grid)]
        epsilon, method = grid.epsilons[0], grid.methods[0]
        rows = [row for row in rows if row["epsilon"] == float(epsilon) and row["method"] == method]
        subtitle = f"{method}, ε = {epsilon:g}; robust accuracy under {noise}; bars: standard error over seeds"
        plot_points(  # Fig. 6
            root / f"{name}_robustness.png",
            _families(grid, robust, lambda u: [r["accuracy"] for r in rows if r["upstream"] == u]),
            title="Robustness of the upstream model and private accuracy",
            subtitle=subtitle,
            xlabel="robust accuracy of the upstream model",
            ylabel="accuracy after private fine-tuning, mean of the data sets",
        )
        plot_points(  # Fig. 2
            root / f"{name}_transfer.png",
            {
                dataset: [
                    _point(_of(robust, upstream, "robust_accuracy"), values)
                    for upstream in grid.upstreams
                    if (upstream, config.seeds[0]) in robust
                    and (
                        values := [
                            r["robust_accuracy"] for r in rows if (r["upstream"], r["dataset"]) == (upstream, dataset)
                        ]
                    )
                ]
                for dataset in grid.sets
            },
            title="Robustness before and after private fine-tuning",
            subtitle=subtitle,
            xlabel="robust accuracy of the upstream model",
            ylabel="robust accuracy of the private model",
        )
        by_gamma = {
            _of(robust, upstream, "gamma")[0]: upstream
            for upstream in grid.upstreams
            if (upstream, config.seeds[0]) in robust and _of(robust, upstream, "family")[0] in ("standard", "dpadapter")
        }
        if len(by_gamma) > 2:  # Fig. 5
            order = sorted(by_gamma.items())
            curves = {"upstream": "accuracy", "upstream, robust": "robust_accuracy"}
            plot_curves(
                root / f"{name}_gamma.png",
                {
                    dataset: [
                        (
                            g,
                            statistics.fmean(
                                r["accuracy"] for r in rows if (r["upstream"], r["dataset"]) == (u, dataset)
                            ),
                        )
                        for g, u in order
                    ]
                    for dataset in grid.sets
                }
                | {
                    label: [(g, statistics.fmean(_of(robust, u, key))) for g, u in order]
                    for label, key in curves.items()
                },
                title="Perturbation magnitude of DPAdapter",
                subtitle=subtitle,
                xlabel="γ (0 is standard pre-training)",
                ylabel="accuracy",
            )


def _families(
    grid: Any, robust: Mapping[tuple[str, int], Row], values: Callable[[str], list[float]]
) -> dict[str, list[tuple[float, float, float, float]]]:
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for upstream in grid.upstreams:
        found = _of(robust, upstream, "robust_accuracy")
        if found:
            points.setdefault(_of(robust, upstream, "family")[0], []).append(_point(found, values(upstream)))
    return points


def _of(robust: Mapping[tuple[str, int], Row], upstream: str, key: str) -> list[Any]:
    return [row[key] for (name, _), row in robust.items() if name == upstream]


def _point(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float, float]:
    (x_mean, x_error), (y_mean, y_error) = mean_and_error(x), mean_and_error(y)
    return x_mean, y_mean, x_error, y_error
