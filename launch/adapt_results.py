"""What `launch.adapt` reports: means over streams, paired differences, costs, tables."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxdp import tta
from jaxdp.privacy import GaussianDpEvent
from jaxdp.report import format_table

from . import frame, results
from .adapt_settings import ORIGINAL, SOURCE, lengths, settings, usual
from .study import Lines, Rows


def result_of(rows: Rows, work: frame.Work) -> dict[str, Any]:
    """Returns means and standard deviations over the seeds, per method, setting and corruption."""
    config = work.config
    tuning = results.select(rows, part="tuning")
    choices = {(row["method"], row["setting"]): row["chosen"] for row in tuning}
    tried = []
    for row in tuning:
        tried += [_name(row) | candidate for candidate in row["tried"]]
    streams = []
    for part, images in lengths(config).items():
        runs = results.select(rows, part=part)
        streams.append({"images": images, "cells": _summaries(runs, choices, work)})
    whole, *shorter = streams
    return {
        "cells": whole["cells"],
        "shorter": shorter,
        "seeds": config.protocol.seeds,
        "images": config.data.images,
        **results.only(config.privacy, "delta", "adjacency", "unit"),
        "tried": tried,
    }


def _summaries(runs: Rows, choices: Mapping[Any, Any], work: frame.Work) -> Lines:
    """Returns the cells of a part: a method and a setting, over the seeds."""
    ways = settings(work.config)
    cells = []
    names = dict.fromkeys((row["method"], row["setting"]) for row in runs)
    for method, setting in names:
        mine = results.select(runs, method=method, setting=setting)
        scores = results.over_seeds(mine, "mean")
        cell = {"method": method, "setting": setting}
        cell |= choices.get((method, setting), {})
        cell |= {"mean": scores.mean, "std": scores.deviation}
        others = {
            "over_source": {"method": SOURCE},
            "over_original": {"method": method, "setting": ORIGINAL},
            "over_usual": {"method": method, "setting": usual(ways, setting)},
        }
        for name, coordinates in others.items():
            other = results.select(runs, **coordinates)
            if other:
                cell[name] = _over(mine, other, work.config)
        for name in ("length", "taken"):
            if all(name in row for row in mine):
                cell[name] = _mean([row[name] for row in mine])
        accuracies = [row["accuracy"] for row in mine]
        cell["per_corruption"] = {}
        for name in accuracies[0]:
            cell["per_corruption"][name] = _mean([accuracy[name] for accuracy in accuracies])
        if setting in work.shared.noise:
            cell |= _costs(work, setting, mine)
        cells.append(cell)
    return cells


def _mean(values: Iterable[float]) -> float:
    return results.moments(values).mean


def _over(mine: Rows, other: Rows, config: Any) -> list[float]:
    """Returns mean and standard error of the difference to what was run on the same streams."""
    others = {row["seed"]: row["mean"] for row in other}
    differences = {}
    for row in mine:
        seed = row["seed"]
        differences[seed] = row["mean"] - others[seed]
    return list(crossed(differences, config.protocol.sources))


def _costs(work: frame.Work, setting: str, mine: Rows) -> dict[str, Any]:
    """Returns what runs of a private setting cost a photograph at most."""
    privacy = work.config.privacy
    way = settings(work.config)[setting]
    sigma = work.shared.noise[setting]
    visits = max(row["visits"] for row in mine)
    paid = tta.epsilons(
        GaussianDpEvent(sigma), visits=visits, delta=privacy.delta, adjacency=privacy.adjacency
    )
    return {
        "noise_multiplier": sigma,
        "target": way.epsilon,
        "filters": way.filters,
        "noise": way.noise,
        "epsilon_sample": paid.sample,
        "epsilon_unit": paid.unit,
        "visits": visits,
    }


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
            means = map(_mean, groups.values())
            errors.append(results.moments(means).error)
    error = math.hypot(*errors) if errors else math.nan
    return _mean(values.values()), error


def _accuracies(cells: Rows) -> Lines:
    """Returns a line per method with a column per setting."""

    def accuracy(rows: Rows) -> str:
        (cell,) = rows
        return results.percent(cell["mean"], cell["std"])

    return results.pivot(cells, "method", "setting", accuracy)


def _private(cells: Rows) -> list[frame.Row]:
    """Returns the cells of the first method that have an epsilon. Other methods have the same
    epsilons.
    """
    first = results.select(cells, method=cells[0]["method"])
    return [cell for cell in first if "visits" in cell]


def tables(result: Mapping[str, Any], work: frame.Work) -> dict[str, Any]:
    *cells, source = result["cells"]
    changed = [cell for cell in cells if cell["setting"] != ORIGINAL]
    ablated = [cell for cell in cells if "over_usual" in cell]
    tables: dict[str, Any] = {}
    tables[
        "Accuracy in percent over all corruptions, mean ± standard deviation of "
        f"{result['seeds']} streams"
    ] = _accuracies([source, *cells])
    tables["Difference to no adaptation on the same streams ± standard error"] = _differences(
        "over_source", cells
    )
    tables["Difference to the original method on the same streams ± standard error"] = _differences(
        "over_original", changed
    )
    tables[
        "Difference of kept filters to removed ones, of clipped batches to clipped images, and of "
        "correlated noise to independent noise"
    ] = _differences("over_usual", ablated)
    tables["Difference to the original method, by photographs of a domain"] = _by_length(result)
    tables[
        "Diagnostics, functions of the records: mean length of an update, and percent of images "
        "that took part"
    ] = _each(cells, _step_length)
    costs = [_cost(cell, result["unit"]) for cell in _private(cells)]
    tables[f"What it costs at delta = {result['delta']:g}, {result['adjacency']}"] = costs
    tables["Accuracy in percent per corruption"] = _each([*cells, source], _per_corruption)
    tables["Hyper-parameters"] = _each(cells, _hyper_parameters)
    return {title: table for title, table in tables.items() if table}


def by_length(result: Mapping[str, Any]) -> list[frame.Row]:
    """Returns the cells that are not original with the photographs of a domain, if that varies."""
    if not result["shorter"]:
        return []
    rows: list[frame.Row] = []
    for length in [*result["shorter"], result]:
        for cell in length["cells"]:
            if cell["setting"] != ORIGINAL:
                run = f"{cell['method']}, {cell['setting']}"
                rows.append({**cell, "run": run, "images": length["images"]})
    return rows


def _by_length(result: Mapping[str, Any]) -> Lines:
    rows = by_length(result)
    difference = _difference("over_original")
    return results.pivot(rows, "run", "images", difference, heading="{} photographs")


def _name(cell: frame.Row) -> dict[str, Any]:
    return results.only(cell, "method", "setting")


def _each(cells: Rows, columns: Callable[[frame.Row], dict[str, Any]]) -> Lines:
    """Returns a line per cell: its name, and the columns that are made of it."""
    return [_name(cell) | columns(cell) for cell in cells]


def _differences(over: str, cells: Rows) -> Lines:
    return results.pivot(cells, "method", "setting", _difference(over))


def _difference(over: str) -> Callable[[Rows], str]:
    """Returns the entry of the one cell in a place: a difference and its error."""

    def entry(rows: Rows) -> str:
        (cell,) = rows
        return results.percent(*cell[over], sign="+")

    return entry


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
    cells = result["cells"]
    lines = [format_table(_accuracies(cells)), ""]
    at = f"at delta = {result['delta']:g}, {result['adjacency']}"
    for cell in _private(cells):
        of_sample, of_unit = cell["epsilon_sample"], cell["epsilon_unit"]
        lines.append(
            f"{cell['setting']}: epsilon = {of_sample:.4g} for a sample, "
            f"{of_unit:.4g} for a {result['unit']} (seen {cell['visits']} times), {at}."
        )
    lines.append(
        "Each epsilon is of one run alone. These runs shared streams and labels. Publish all of "
        "them, as here, for public benchmarks only."
    )
    return "\n".join(lines)
