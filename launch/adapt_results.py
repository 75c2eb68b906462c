"""What `launch.adapt` reports: means over streams, paired differences, costs, tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp import tta
from jaxdp.privacy import GaussianDpEvent
from jaxdp.report import format_table

from . import frame, results
from .adapt_settings import ORIGINAL, SOURCE, lengths, settings, usual


def result_of(rows: Sequence[frame.Row], work: frame.Work) -> dict[str, Any]:
    """Returns means and standard deviations over the seeds, per method, setting and corruption."""
    config, tried = work.config, []
    tuning = results.select(rows, part="tuning")
    chosen = {(row["method"], row["setting"]): row["chosen"] for row in tuning}
    for row in tuning:
        tried += [_name(row) | candidate for candidate in row["tried"]]
    streams = [
        {"images": images, "cells": _summaries(results.select(rows, part=part), chosen, work)}
        for part, images in lengths(config).items()
    ]
    whole, *shorter = streams
    return {
        "cells": whole["cells"],
        "shorter": shorter,
        "seeds": config.protocol.seeds,
        "images": config.data.images,
        **{name: config.privacy[name] for name in ("delta", "adjacency", "unit")},
        "tried": tried,
    }


def _summaries(
    runs: Sequence[frame.Row], chosen: Mapping[Any, Any], work: frame.Work
) -> list[dict[str, Any]]:
    """Returns the cells of a part: a method and a setting, over the seeds."""
    config, cells = work.config, []
    ways = settings(config)
    for method, setting in dict.fromkeys((row["method"], row["setting"]) for row in runs):
        mine = results.select(runs, method=method, setting=setting)
        mean, deviation, _ = results.over_seeds(mine, "mean")
        others = {
            "over_source": {"method": SOURCE},
            "over_original": {"method": method, "setting": ORIGINAL},
            "over_usual": {"method": method, "setting": usual(ways, setting)},
        }
        cell = {
            "method": method,
            "setting": setting,
            **chosen.get((method, setting), {}),
            "mean": mean,
            "std": deviation,
        }
        for name, coordinates in others.items():
            other = results.select(runs, **coordinates)
            if other:
                cell[name] = _over(mine, other, config)
        for name in ("length", "taken"):
            if all(name in row for row in mine):
                cell[name] = results.moments(row[name] for row in mine).mean
        cell["per_corruption"] = {
            name: results.moments(row["accuracy"][name] for row in mine).mean
            for name in mine[0]["accuracy"]
        }
        sigma = work.shared.noise.get(setting)
        if sigma:
            way = {name: getattr(ways[setting], name) for name in ("filters", "noise")}
            way["target"] = ways[setting].epsilon
            cell |= {"noise_multiplier": sigma, **way, **_costs(sigma, mine, config)}
        cells.append(cell)
    return cells


def _over(mine: Sequence[frame.Row], other: Sequence[frame.Row], config: Any) -> list[float]:
    """Returns mean and standard error of the difference to what was run on the same streams."""
    others = {row["seed"]: row["mean"] for row in other}
    differences = {row["seed"]: row["mean"] - others[row["seed"]] for row in mine}
    return list(crossed(differences, config.protocol.sources))


def _costs(sigma: float, mine: Sequence[frame.Row], config: Any) -> dict[str, Any]:
    """Returns what runs at a noise multiplier cost a photograph at most."""
    visits = max(row["visits"] for row in mine)
    paid = tta.epsilons(
        GaussianDpEvent(sigma),
        visits=visits,
        delta=config.privacy.delta,
        adjacency=config.privacy.adjacency,
    )
    return {"epsilon_sample": paid.sample, "epsilon_unit": paid.unit, "visits": visits}


def crossed(values: Mapping[int, float], sources: int) -> tuple[float, float]:
    """Returns the mean over runs, and a standard error for streams and source models that are both
    samples.

    Args:
      values: One number per run, by seed. Run s has source model s % sources and stream s //
          sources.
      sources: The number of source models.

    Returns:
      The mean, and the root of the sum of the squared standard errors of the means per source model
      and per stream. This counts the variation of single runs twice, so it is rather too large.
    """
    by_source: dict[int, list[float]] = {}
    by_stream: dict[int, list[float]] = {}
    for seed, value in values.items():
        by_source.setdefault(seed % sources, []).append(value)
        by_stream.setdefault(seed // sources, []).append(value)
    errors = []
    for groups in (by_source, by_stream):
        if len(groups) > 1:
            means = [results.moments(group).mean for group in groups.values()]
            errors.append(results.moments(means).error)
    mean = results.moments(values.values()).mean
    error = math.hypot(*errors) if errors else math.nan
    return mean, error


def _accuracies(cells: Sequence[frame.Row]) -> list[dict[str, str]]:
    """Returns a line per method with a column per setting."""

    def accuracy(rows: Sequence[frame.Row]) -> str:
        return results.percent(rows[0]["mean"], rows[0]["std"])

    return results.pivot(cells, "method", "setting", accuracy)


def _private(cells: Sequence[frame.Row]) -> list[frame.Row]:
    """Returns the cells of the first method that have an epsilon. Other methods have the same
    epsilons.
    """
    first = results.select(cells, method=cells[0]["method"])
    return [cell for cell in first if "visits" in cell]


def tables(result: Mapping[str, Any], work: frame.Work) -> dict[str, Any]:
    *cells, source = result["cells"]
    changed = [cell for cell in cells if cell["setting"] != ORIGINAL]
    ablated = [cell for cell in cells if "over_usual" in cell]
    tables = {
        "Accuracy in percent over all corruptions, mean ± standard deviation of "
        f"{result['seeds']} streams": _accuracies([source, *cells]),
        "Difference to no adaptation on the same streams ± standard error": _differences(
            "over_source", cells
        ),
        "Difference to the original method on the same streams ± standard error": _differences(
            "over_original", changed
        ),
        "Difference of kept filters to removed ones, of clipped batches to clipped images, and of "
        "correlated noise to independent noise": _differences("over_usual", ablated),
        "Difference to the original method, by photographs of a domain": _by_length(result),
        "Diagnostics, functions of the records: mean length of an update, and percent of images "
        "that took part": [_name(cell) | _step_length(cell) for cell in cells],
        f"What it costs at delta = {result['delta']:g}, {result['adjacency']}": [
            _cost(cell, result["unit"]) for cell in _private(cells)
        ],
        "Accuracy in percent per corruption": [
            _name(cell) | _per_corruption(cell) for cell in [*cells, source]
        ],
        "Hyper-parameters": [_name(cell) | _hyper_parameters(cell) for cell in cells],
    }
    return {title: table for title, table in tables.items() if table}


def by_length(result: Mapping[str, Any]) -> list[frame.Row]:
    """Returns the cells that are not original with the photographs of a domain, if that varies."""
    if not result["shorter"]:
        return []
    whole = {"images": result["images"], "cells": result["cells"]}
    rows: list[frame.Row] = []
    for length in [*result["shorter"], whole]:
        for cell in length["cells"]:
            if cell["setting"] != ORIGINAL:
                run = f"{cell['method']}, {cell['setting']}"
                rows.append({**cell, "run": run, "images": length["images"]})
    return rows


def _by_length(result: Mapping[str, Any]) -> list[dict[str, str]]:
    return results.pivot(
        by_length(result),
        "run",
        "images",
        lambda found: results.percent(*found[0]["over_original"], sign="+"),
        heading="{} photographs",
    )


def _name(cell: frame.Row) -> dict[str, Any]:
    return {"method": cell["method"], "setting": cell["setting"]}


def _differences(over: str, cells: Sequence[frame.Row]) -> list[dict[str, str]]:
    return results.pivot(
        cells, "method", "setting", lambda found: results.percent(*found[0][over], sign="+")
    )


def _hyper_parameters(cell: frame.Row) -> dict[str, Any]:
    return {"learning rate": cell["learning_rate"], "clip norm": cell.get("clip_norm")}


def _step_length(cell: frame.Row) -> dict[str, Any]:
    taken = results.percent(cell["taken"]) if "taken" in cell else None
    return {"length": cell["length"], "took part": taken}


def _cost(cell: frame.Row, unit: str) -> dict[str, Any]:
    return {
        "setting": cell["setting"],
        "noise multiplier": cell["noise_multiplier"],
        "epsilon of a sample": cell["epsilon_sample"],
        f"epsilon of a {unit}": cell["epsilon_unit"],
        "visits": cell["visits"],
    }


def _per_corruption(cell: frame.Row) -> dict[str, str]:
    return {name: results.percent(value) for name, value in cell["per_corruption"].items()}


def summary(result: Mapping[str, Any]) -> str:
    at = f"at delta = {result['delta']:g}, {result['adjacency']}"
    costs = [
        f"{cell['setting']}: epsilon = {cell['epsilon_sample']:.4g} for a sample, "
        f"{cell['epsilon_unit']:.4g} for a {result['unit']} (seen {cell['visits']} times), {at}.\n"
        for cell in _private(result["cells"])
    ]
    return (
        f"{format_table(_accuracies(result['cells']))}\n\n{''.join(costs)}"
        "Each epsilon is of one run alone. These runs shared streams and labels. Publish all of "
        "them, as here, for public benchmarks only."
    )
