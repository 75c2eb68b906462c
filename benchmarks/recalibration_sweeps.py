r"""What Table 2 and section D.1 of Luo et al. 2020 say in words: more data, iterations and bins.

    python -m launch.recalibrate --config configs/recalibration/digits.py:sweeps --workdir W/digits
    python -m launch.recalibrate --config configs/recalibration/cifar10.py:wrn --workdir W/wrn ...
    python -m benchmarks run recalibration_sweeps --update --workdirs W/digits --recipe W/wrn
    python -m benchmarks.evidence results/recalibration.md

docs/results/recalibration.md has the whole second command. It trains a small network by the paper's
recipe. W/resnet20 of configs/recalibration/cifar10.py:sweeps may be added to the workdirs."""

import functools
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.evidence_recalibration import curves, result_of, rounded
from benchmarks.evidence_recalibration import error as error_of
from jaxdp.report import plot_panels
from launch import results
from launch.calibration import CENTRE, DIVISION, NO_PRIVACY, by_severity

NOT_PRIVATE = ("isotonic, not private", "Platt, not private", "one source", "none")
PAIRS = {"Acc-T wide": "Acc-T grid", "NLL-T wide": "NLL-T grid", "ECE-T wide": "ECE-T grid"}
GRIDS = set(PAIRS.values())  # in a table of their own
CONSTANT = ("isotonic, not private", "Platt, not private", "none")  # whoever has the records
DRAWN = ("Acc-T wide", "NLL-T wide", "ECE-T wide", "HB split", "logistic binning", "one source")


FLAGS = {
    "workdirs": {"required": True, "help": "finished workdirs, separated by commas"},
    "recipe": {"required": True, "help": "a finished workdir of the variant wrn"},
}
error = functools.partial(error_of, form=".4f")


def measure(flags) -> dict:
    """Returns what the page needs of the workdirs."""
    folders = list(map(pathlib.Path, flags.workdirs.split(",")))
    recipe = result_of(pathlib.Path(flags.recipe))["accuracy"]
    return {
        "runs": {folder.name: _summary(result_of(folder)) for folder in folders},
        "recipe": {name: round(accuracy, 5) for name, accuracy in recipe.items()},
    }


def _summary(result) -> dict:
    shifts = [shift for shift in result["cells"] if shift != "clean"]

    def scores(cells, name, *parts):
        mine = [cells[shift][name] for shift in shifts]
        found = {part: rounded(mine, part) for part in (CENTRE, NO_PRIVACY, *parts)}
        return found | ({"brier": rounded(mine, CENTRE, "brier")} if parts else {})

    methods = {}
    for cost in result["costs"]:
        methods[cost["method"]] = scores(result["cells"], cost["method"], DIVISION)
    options = {}
    for option, swept in result["options"].items():
        cells = swept["cells"]
        of_methods = {name: scores(cells, name) for name in cells[shifts[0]]}
        options[option] = {"values": swept["values"], "methods": of_methods}
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


# --- The page -----------------------------------------------------------------------------------


def tables(report) -> dict:
    recipe = []
    for name, accuracy in report["recipe"].items():
        recipe.append({"images": name, "accuracy in percent": results.percent(accuracy)})
    rows = {"recipe": recipe}
    for network, run in report["runs"].items():
        for title, lines in _tables_of(run).items():
            rows[f"{title}, {network}"] = lines
    return rows


def _tables_of(run: Mapping) -> dict[str, list[dict[str, str]]]:
    severity, baselines, division, grid = [], [], [], []
    for name, of_level in run["severity"].items():
        errors = {f"severity {level}": f"{error:.4f}" for level, error in of_level.items()}
        severity.append({"method": name} | errors)
    for name, scores in run["methods"].items():
        row = {"method": name, "ECE": error(scores[CENTRE])}
        row["Brier"] = f"{np.mean(scores['brier']):.4f}"
        if name not in NOT_PRIVATE:
            row["ECE, no privacy"] = error(scores[NO_PRIVACY])
        baselines.append(row)
        if name not in GRIDS and name not in CONSTANT:
            division.append(_row(name, "sources", run["division"], scores[DIVISION]))
    for golden, of_grid in PAIRS.items():  # how much larger the error of a grid is, within shifts
        row = {"grid search, less golden-section search": golden.removesuffix(" wide")}
        ours, theirs = (run["methods"][name] for name in (golden, of_grid))
        for part, title in ((CENTRE, "ECE, epsilon 1"), (NO_PRIVACY, "ECE, no privacy")):
            row[title] = error(np.subtract(theirs[part], ours[part]))
        grid.append(row)
    tables = {"baselines": baselines, "grid": grid, "severity": severity, "division": division}
    for option, swept in run["options"].items():
        tables[option] = []
        for part, suffix in ((CENTRE, ""), (NO_PRIVACY, ", no privacy")):
            for name, scores in swept["methods"].items():
                if name not in GRIDS:
                    row = _row(f"{name}{suffix}", option, swept["values"], scores[part])
                    tables[option].append(row)
    return tables


def _row(name: str, factor: str, values: Sequence, scores) -> dict[str, str]:
    pairs = zip(values, zip(*scores, strict=True), strict=True)
    return {"method": name} | {f"{factor} {value}": error(errors) for value, errors in pairs}


def draw(report, path: pathlib.Path, network: str = "digits"):
    """Draws mean errors over iterations, bins and numbers of sources of the same records."""
    run, panels = report["runs"][network], {}
    for option, swept in run["options"].items():
        drawn = [name for name in swept["methods"] if name not in GRIDS]
        scores = {name: swept["methods"][name][CENTRE] for name in drawn}
        panels[f"{option}, epsilon 1"] = option, curves(swept["values"], scores)
    scores = {name: of[DIVISION] for name, of in run["methods"].items() if name in DRAWN}
    records = run["centre"][0] * run["centre"][1]
    counts = np.log10(run["division"]).tolist()
    panels[f"{records} records in all"] = "log10 of the sources", curves(counts, scores)
    plot_panels(
        path,
        panels,
        title="More iterations, more bins, and more sources of the same records",
        subtitle=f"Means over {len(run['shifts'])} shifts of {network}, one factor varied",
        ylabel="ECE",
    )
