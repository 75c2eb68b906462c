"""Tables and figures of grids of cells (`jaxdp.finetune.table`): means, deviations, paired differences over seeds."""

import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.files import write_json
from jaxdp.report import format_table, plot_curves, plot_points

Row = Mapping[str, Any]
Point = tuple[float, float, float, float]
_FAMILIES = {"standard": "standard", "sam": "SAM", "amp": "SAM (AMP)", "dpadapter": "DPAdapter"}
_COORDINATES = ("upstream", "method", "epsilon", "dataset", "seed")


def write_summary(
    config: Any, root: pathlib.Path, results: Sequence[Row], upstreams: Mapping[tuple[str, int], Row]
) -> str:
    """Writes GRID.md and GRID.json for every grid, and figures for those that ask for them.

    Args:
      config: of the table.
      root: its workdir.
      results: one row per cell.
      upstreams: results of pre-training, by upstream and seed.

    Returns:
      The tables, for the terminal.
    """
    known = _upstream_rows(config, upstreams)
    texts = []
    for name, grid in config.grids.items():
        rows = [row for row in results if _belongs(row, grid)]
        table, differences = layout(rows, grid), _differences(rows, grid)
        text = f"{name}: accuracy, mean ± standard deviation over {len(config.seeds)} seeds\n\n"
        text += format_table(table, style="markdown") + "\n" + "".join(f"\n* {line}" for line in differences) + "\n"
        (root / f"{name}.md").write_text(text)
        write_json(root / f"{name}.json", {"cells": rows, "table": table, "differences": differences})
        texts.append(text)
        if grid.get("figures", False) and known:
            _figures(config, root / name, grid, rows, known)
    write_json(root / "upstreams.json", known)
    return "\n".join([*texts, _upstream_table(known)] if known else texts)


def layout(rows: Sequence[Row], grid: Any) -> list[dict[str, str]]:
    """The layout of Table 1: a line per method and upstream, a column per data set and epsilon, averages last."""
    table = []
    for method in grid.methods:
        for upstream in grid.upstreams:
            line = {"method": method, "upstream": upstream}
            mine = [row for row in rows if (row["method"], row["upstream"]) == (method, upstream)]
            for epsilon in grid.epsilons:
                found = [row for row in mine if row["epsilon"] == float(epsilon)]
                for dataset in grid.sets:
                    line[f"{dataset} ε={epsilon:g}"] = _over_seeds(row for row in found if row["dataset"] == dataset)
                line[f"average ε={epsilon:g}"] = _over_seeds(found)
            table.append(line)
    return table


def paired_difference(rows: Sequence[Row], key: str, first: Any, second: Any) -> tuple[float, float, int, int]:
    """How much accuracy changes when one coordinate goes from `first` to `second` and all others stay.

    Cells of one seed share an upstream model: differences are averaged per seed first; the error is that over seeds.

    Args:
      rows: of cells.
      key: the coordinate.

    Returns:
      (mean difference, its standard error over seeds or NaN for one, pairs in which `second` is higher, pairs).

    Raises:
      ValueError: there is no pair.
    """
    others = [name for name in _COORDINATES if name != key]
    accuracy = {(row[key], *(row[name] for name in others)): row["accuracy"] for row in rows}
    by_seed: dict[Any, list[float]] = {}
    for (value, *place), before in accuracy.items():
        if value == first and (second, *place) in accuracy:
            by_seed.setdefault(place[-1], []).append(accuracy[second, *place] - before)
    if not by_seed:
        raise ValueError(f"no cell has a partner in which {key} is {second!r} instead of {first!r}.")
    mean, error = _mean_and_error(statistics.fmean(values) for values in by_seed.values())
    signs = [difference > 0 for values in by_seed.values() for difference in values]
    return mean, error, sum(signs), len(signs)


def _mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return statistics.fmean(found), error


def _belongs(row: Row, grid: Any) -> bool:
    names = row["upstream"] in grid.upstreams and row["method"] in grid.methods and row["dataset"] in grid.sets
    return names and row["epsilon"] in map(float, grid.epsilons)


def _over_seeds(rows: Iterable[Row]) -> str:
    """Mean and standard deviation over seeds, each the mean of its rows."""
    by_seed: dict[int, list[float]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], []).append(row["accuracy"])
    values = [statistics.fmean(accuracies) for accuracies in by_seed.values()]
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def _differences(rows: Sequence[Row], grid: Any) -> list[str]:
    lines = []
    for key, first, second in grid.comparisons:
        mean, error, higher, pairs = paired_difference(rows, key, first, second)
        lines.append(f"{second} over {first}: {mean:+.4f} (standard error {error:.4f}), higher in {higher} of {pairs}")
    return lines


def _upstream_rows(config: Any, upstreams: Mapping[tuple[str, int], Row]) -> list[dict[str, Any]]:
    """What tables and figures need to know of every upstream model."""
    kind, std = ("relative" if config.robust.relative else "absolute"), config.robust.std
    rows = []
    for (name, seed), result in upstreams.items():
        method, sweep = result["method"], result["robust_accuracy"][kind]
        rows.append(
            {
                "upstream": name,
                "seed": seed,
                "family": method,
                "gamma": result["provenance"]["config"]["method"][method].get("gamma", 0.0),
                "accuracy": result["accuracy"],
                "robust_accuracy": statistics.fmean(sweep["draws"][sweep["std"].index(std)]),
                "rho": result["rho"]["local"],
                "perturbation_norm": result["perturbation_norm"]["last"],
            }
        )
    return rows


def _upstream_table(known: Sequence[Row]) -> str:
    columns = ("accuracy", "robust_accuracy", "rho", "perturbation_norm")
    rows = [
        {"upstream": name, **{key: _mean(known, key, upstream=name) for key in columns}}
        for name in dict.fromkeys(row["upstream"] for row in known)
    ]
    return "upstream models: means over seeds\n\n" + format_table(rows)


def _values(rows: Sequence[Row], key: str, **where: Any) -> list[Any]:
    return [row[key] for row in rows if all(row[name] == value for name, value in where.items())]


def _mean(rows: Sequence[Row], key: str, **where: Any) -> float:
    return statistics.fmean(_values(rows, key, **where))


def _figures(config: Any, stem: pathlib.Path, grid: Any, rows: Sequence[Row], known: Sequence[Row]) -> None:
    """Figures 2, 5 and 6, at the grid's first method and epsilon."""
    method, epsilon = grid.methods[0], float(grid.epsilons[0])
    rows = [row for row in rows if (row["method"], row["epsilon"]) == (method, epsilon)]
    noise = f"noise of {config.robust.std:g}{' of each tensor' if config.robust.relative else ' on every parameter'}"
    text = f"{method}, ε = {epsilon:g}; robust: under {noise}; {len(config.seeds)} seeds"
    families = {row["upstream"]: row["family"] for row in known if row["upstream"] in grid.upstreams}

    def point(upstream: str, key: str, sets: Sequence[str]) -> Point:
        x = _values(known, "robust_accuracy", upstream=upstream)
        y = [
            statistics.fmean(v for name in sets for v in _values(rows, key, upstream=upstream, dataset=name, seed=seed))
            for seed in config.seeds
        ]
        (x_mean, x_error), (y_mean, y_error) = _mean_and_error(x), _mean_and_error(y)
        return x_mean, y_mean, x_error, y_error

    plot_points(  # Fig. 6
        stem.with_name(f"{stem.name}_robustness.png"),
        {
            _FAMILIES[family]: [point(name, "accuracy", grid.sets) for name in families if families[name] == family]
            for family in dict.fromkeys(families.values())
        },
        title="Robustness of the upstream model, and private accuracy",
        subtitle=f"{text}, bars: standard error",
        xlabel="robust accuracy of the upstream model",
        ylabel="private accuracy, mean of the data sets",
    )
    plot_points(  # Fig. 2
        stem.with_name(f"{stem.name}_transfer.png"),
        {dataset: [point(name, "robust_accuracy", [dataset]) for name in families] for dataset in grid.sets},
        title="Robustness before and after private fine-tuning",
        subtitle=f"{text}, bars: standard error",
        xlabel="robust accuracy of the upstream model",
        ylabel="robust accuracy of the private model",
    )
    swept = sorted(
        (_values(known, "gamma", upstream=name)[0], name)
        for name in families
        if families[name] in ("standard", "dpadapter")
    )
    curves = {
        dataset: [(gamma, _mean(rows, "accuracy", upstream=name, dataset=dataset)) for gamma, name in swept]
        for dataset in grid.sets
    }
    for label, key in {"upstream": "accuracy", "upstream, robust": "robust_accuracy"}.items():
        curves[label] = [(gamma, _mean(known, key, upstream=name)) for gamma, name in swept]
    plot_curves(  # Fig. 5
        stem.with_name(f"{stem.name}_gamma.png"),
        curves,
        title="Perturbation magnitude of DPAdapter",
        subtitle=text,
        xlabel="γ (0 is standard pre-training)",
        ylabel="accuracy",
    )
