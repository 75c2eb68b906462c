r"""What Table 2 and section D.1 of Luo et al. 2020 say in words: more data, iterations and bins.

    python -m launch.recalibrate --config configs/recalibration/digits.py:sweeps --workdir W/digits
    python -m launch.recalibrate --config configs/recalibration/cifar10.py:wrn --workdir W/wrn ...
    python -m benchmarks run recalibration_sweeps --update --workdirs W/digits --recipe W/wrn
    python -m benchmarks.evidence results/recalibration.md

docs/results/recalibration.md has the whole second command. It trains a small network by the paper's
recipe. W/resnet20 of configs/recalibration/cifar10.py:sweeps may be added to the workdirs."""

import argparse
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.report import format_table, plot_panels
from launch import results
from launch.calibration import CENTRE, DIVISION, NO_PRIVACY, by_severity

NOT_PRIVATE = ("isotonic, not private", "Platt, not private", "one source", "none")
PAIRS = {"Acc-T wide": "Acc-T grid", "NLL-T wide": "NLL-T grid", "ECE-T wide": "ECE-T grid"}
GRIDS = set(PAIRS.values())  # in a table of their own
CONSTANT = ("isotonic, not private", "Platt, not private", "none")  # whoever has the records
DRAWN = ("Acc-T wide", "NLL-T wide", "ECE-T wide", "HB split", "logistic binning", "one source")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdirs", required=True, help="finished workdirs, separated by commas")
    parser.add_argument("--recipe", required=True, help="a finished workdir of the variant wrn")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns what the page needs of the workdirs."""
    folders = list(map(pathlib.Path, flags.workdirs.split(",")))
    recipe = _read(pathlib.Path(flags.recipe))["accuracy"]
    return {
        "runs": {folder.name: _summary(_read(folder)) for folder in folders},
        "recipe": {name: round(accuracy, 5) for name, accuracy in recipe.items()},
    }


def _summary(result: Any) -> dict[str, Any]:
    shifts = [shift for shift in result["cells"] if shift != "clean"]
    methods = {}
    for cost in result["costs"]:
        cells = [result["cells"][shift][cost["method"]] for shift in shifts]
        scores = {part: _scores(cells, part, "ece") for part in (CENTRE, NO_PRIVACY, DIVISION)}
        methods[cost["method"]] = scores | {"brier": _scores(cells, CENTRE, "brier")}
    options: dict[str, Any] = {}
    for option, swept in result["options"].items():
        scores = {}
        for name in swept["cells"][shifts[0]]:
            cells = [swept["cells"][shift][name] for shift in shifts]
            scores[name] = {part: _scores(cells, part, "ece") for part in (CENTRE, NO_PRIVACY)}
        options[option] = {"values": swept["values"], "methods": scores}
    severity = {}
    for name, of_level in by_severity(result).items():
        severity[name] = {str(level): round(error, 5) for level, error in of_level.items()}
    return {
        "images": result["images"],
        "trials": result["trials"],
        "shifts": shifts,
        "centre": result["settings"][CENTRE][0],
        "division": [point[0] for point in result["settings"][DIVISION]],
        "methods": methods,
        "options": options,
        "severity": severity,
    }


def _read(folder: pathlib.Path) -> Any:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def _scores(cells: Sequence[Any], part: str, score: str) -> list[list[float]]:
    """Returns a score as [shift][setting], with five decimals."""
    return [[round(value, 5) for value in cell[part][score]] for cell in cells]


# --- The page -----------------------------------------------------------------------------------


def tables(report: Any) -> dict[str, str]:
    """Returns the tables of docs/results/recalibration.md."""
    recipe = []
    for name, accuracy in report["recipe"].items():
        recipe.append({"images": name, "accuracy in percent": results.percent(accuracy)})
    rows = {"recipe": recipe}
    for network, run in report["runs"].items():
        for title, lines in _tables_of(run).items():
            rows[f"{title}, {network}"] = lines
    return {title: format_table(lines, style="markdown") for title, lines in rows.items()}


def _tables_of(run: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    severity = []
    for name, of_level in run["severity"].items():
        errors = {f"severity {level}": f"{error:.4f}" for level, error in of_level.items()}
        severity.append({"method": name} | errors)
    division = []
    for name, scores in run["methods"].items():
        if name in GRIDS or name in CONSTANT:
            continue
        division.append(_row(name, "sources", run["division"], scores[DIVISION]))
    tables = {
        "baselines": _baselines(run["methods"]),
        "grid": [_pair(run["methods"], *pair) for pair in PAIRS.items()],
        "severity": severity,
        "division": division,
    }
    for option, swept in run["options"].items():
        tables[option] = _option_rows(option, swept)
    return tables


def _baselines(methods: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = []
    for name, scores in methods.items():
        row = {"method": name, "ECE": _error(scores[CENTRE])}
        row["Brier"] = f"{np.mean(scores['brier']):.4f}"
        if name not in NOT_PRIVATE:
            row["ECE, no privacy"] = _error(scores[NO_PRIVACY])
        rows.append(row)
    return rows


def _pair(methods: Mapping[str, Any], golden: str, grid: str) -> dict[str, str]:
    """Returns how much larger the error of a grid is, paired within shifts."""
    row = {"grid search, less golden-section search": golden.removesuffix(" wide")}
    for part, title in ((CENTRE, "ECE, epsilon 1"), (NO_PRIVACY, "ECE, no privacy")):
        row[title] = _error(np.subtract(methods[grid][part], methods[golden][part]))
    return row


def _option_rows(option: str, swept: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = []
    for part, suffix in ((CENTRE, ""), (NO_PRIVACY, ", no privacy")):
        for name, scores in swept["methods"].items():
            if name in GRIDS:
                continue
            rows.append(_row(f"{name}{suffix}", option, swept["values"], scores[part]))
    return rows


def _row(name: str, factor: str, values: Sequence[Any], scores: Any) -> dict[str, str]:
    errors = zip(*scores, strict=True)
    pairs = zip(values, errors, strict=True)
    return {"method": name} | {f"{factor} {value}": _error(each) for value, each in pairs}


def _error(values: Iterable[Any]) -> str:
    """Returns a mean over shifts with its standard error."""
    mean, _, error = results.moments(np.ravel(list(values)))
    return f"{mean:.4f} ({error:.4f})"


def draw(network: str, report: Any, path: pathlib.Path) -> None:
    """Draws mean errors over iterations, bins and numbers of sources of the same records."""
    run, panels = report["runs"][network], {}
    for option, swept in run["options"].items():
        drawn = [name for name in swept["methods"] if name not in GRIDS]
        scores = {name: swept["methods"][name][CENTRE] for name in drawn}
        panels[f"{option}, epsilon 1"] = option, _curves(swept["values"], scores)
    scores = {name: of[DIVISION] for name, of in run["methods"].items() if name in DRAWN}
    records = run["centre"][0] * run["centre"][1]
    counts = np.log10(run["division"]).tolist()
    panels[f"{records} records in all"] = "log10 of the sources", _curves(counts, scores)
    plot_panels(
        path,
        panels,
        title="More iterations, more bins, and more sources of the same records",
        subtitle=f"Means over {len(run['shifts'])} shifts of {network}, one factor varied",
        ylabel="ECE",
    )


def _curves(at: Sequence[float], scores: Mapping[str, Any]) -> dict[str, Any]:
    curves = {}
    for name, of_shift in scores.items():
        means = np.mean(of_shift, 0).tolist()
        curves[name] = list(zip(at, means, strict=True))
    return curves
