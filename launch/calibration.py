"""Tables and figures of a recalibration study, computed from its result."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data.shifts import CLEAN
from jaxdp.recalibration.metrics import Reliability
from jaxdp.report import format_table, plot_panels, plot_reliability

from . import frame
from .simulation import Setting
from .study import Fields, Lines, Result, Row, Rows

# The factor that varies, its name in figures, and the fixed factors.
FACTORS = {
    "sources": ("number of sources", "{samples} samples each, ε = {epsilon:g}"),
    "samples": ("samples of each source", "{sources} sources, ε = {epsilon:g}"),
    "epsilon": ("ε of each source", "{sources} sources of {samples} samples"),
}
CENTRE, NO_PRIVACY = "centre", "no privacy"
DIVISION = "division"  # of the same records among few or many sources


def _paid(cost: Row) -> float:
    return math.inf if cost["epsilon"] is None else cost["epsilon"]


def _shifted(result: Result) -> list[str]:
    """Returns the shifts for medians and means: no clean images, since row 1 of Table 1 is a mean
    of Table 4.
    """
    return [shift for shift in result["cells"] if shift != CLEAN] or [CLEAN]


def _overall(result: Result, *factors: str) -> Lines:
    """Returns rows of Table 1."""
    rows = []
    for cost in result["costs"]:
        name = cost["method"]
        cells = [result["cells"][shift][name] for shift in _shifted(result)]
        row = {"method": name}
        for score, heading in (("ece", "ECE"), ("brier", "Brier")):
            values = list[float]()
            for cell, factor in itertools.product(cells, factors):
                values += cell[factor][score]
            row[f"median {heading}"] = f"{np.median(values):.4f}"
            row[f"mean {heading}"] = f"{np.mean(values):.4f}"
        rows.append(row)
    return rows


def _per_shift(result: Result, part: str) -> Lines:
    """Returns rows of Table 4, with the accuracies of Table 3."""
    rows = []
    for shift, cells in result["cells"].items():
        errors = {name: f"{cell[part]['ece'][0]:.4f}" for name, cell in cells.items()}
        accuracy = f"{result['accuracy'][shift]:.4f}"
        rows.append({"shift": shift.replace("_", " "), "accuracy": accuracy, **errors})
    return rows


def _mean_of(cells: Rows) -> list[float]:
    """Returns the mean ECE over shifts of each setting, from one part of the cells."""
    return np.mean([cell["ece"] for cell in cells], 0).tolist()


def by_division(result: Result) -> dict[str, list[float]]:
    """Returns the mean ECE over shifts of each method, by number of sources of the same records."""
    shifts = _shifted(result)
    errors = {}
    for cost in result["costs"]:
        cells = [result["cells"][shift][cost["method"]][DIVISION] for shift in shifts]
        errors[cost["method"]] = _mean_of(cells)
    return errors


def by_option(result: Result, option: str, part: str) -> dict[str, list[float]]:
    """Returns the mean ECE over shifts of each method, by value of an option."""
    cells = result["options"][option]["cells"]
    shifts = _shifted(result)
    errors = {}
    for name in cells[shifts[0]]:
        errors[name] = _mean_of([cells[shift][name][part] for shift in shifts])
    return errors


def by_severity(result: Result) -> dict[str, dict[int, float]]:
    """Returns the mean ECE at the centre of each method, by severity of the shifts."""
    levels = sorted({result["severities"][shift] for shift in _shifted(result)})
    errors: dict[str, dict[int, float]] = {cost["method"]: {} for cost in result["costs"]}
    for name, level in itertools.product(errors, levels):
        shifts = [shift for shift in _shifted(result) if result["severities"][shift] == level]
        cells = [result["cells"][shift][name][CENTRE] for shift in shifts]
        (errors[name][level],) = _mean_of(cells)
    return errors


def _sweeps(result: Result) -> Fields:
    """Returns tables of the sweeps that a config may leave out, rows by title."""
    over, centre = f"over {len(_shifted(result))} shifts", _centre(result)
    tables: Fields = {}
    for option, swept in result["options"].items():
        rows = []
        for part, suffix in ((CENTRE, ""), (NO_PRIVACY, ", no privacy")):
            for name, errors in by_option(result, option, part).items():
                rows.append(_row(f"{name}{suffix}", option, swept["values"], errors))
        tables[f"Mean ECE {over} by {option}, with {centre}"] = rows
    if DIVISION in result["settings"]:
        points = [Setting(*point) for point in result["settings"][DIVISION]]
        counts, records = [point.sources for point in points], points[0].sources * points[0].samples
        tables[f"Mean ECE {over} by division of {records} records among sources"] = [
            _row(name, "sources", counts, errors) for name, errors in by_division(result).items()
        ]
    by_level = by_severity(result)
    if max(map(len, by_level.values())) > 1:
        tables[f"Mean ECE {over} by severity, with {centre}"] = [
            _row(name, "severity", errors, errors.values()) for name, errors in by_level.items()
        ]
    return tables


def _row(name: str, factor: str, values: Iterable[Any], errors: Iterable[float]) -> dict[str, str]:
    pairs = zip(values, errors, strict=True)
    return {"method": name} | {f"{factor} {value}": f"{error:.4f}" for value, error in pairs}


def _centre(result: Result) -> str:
    return "{} sources of {} samples at epsilon = {:g}".format(*result["settings"][CENTRE][0])


_CONSTANT = (
    "A small ECE alone does not make a confidence useful. Suppose that the confidence of all "
    "images is their accuracy: the ECE is nearly 0, so binning with a single bin would win. The "
    "Brier score is the mean squared difference between confidence and whether the prediction is "
    "right. It is lower only for confidences that tell images apart."
)


def tables(result: Result, work: frame.Work) -> Fields:
    """Returns Tables 1 and 4, and the costs."""
    centre, over = _centre(result), f"Calibration over {len(_shifted(result))} shifts"
    standard_errors = list[float]()
    for cells in result["cells"].values():
        for cell in cells.values():
            standard_errors += itertools.chain(*(part["ece_error"] for part in cell.values()))
    costs = [
        {
            "method": cost["method"],
            "releases of a source": cost["releases"],
            "noise in the sum over sources, standard deviation": cost["noise"],
            "what a source pays": _paid(cost),
        }
        for cost in result["costs"]
    ]
    trials = (
        f"Scores are means of {result['trials']} trials. The standard error of an ECE is at most "
        f"{max(standard_errors):.2g}."
    )
    return {
        f"{over} and all numbers of sources, samples and epsilon": _overall(result, *FACTORS),
        "trials": trials,
        "constant": _CONSTANT,
        f"{over} with {centre}": _overall(result, CENTRE),
        f"ECE under each shift with {centre}": _per_shift(result, CENTRE),
        "ECE under each shift without privacy, with the same sources and samples": _per_shift(
            result, NO_PRIVACY
        ),
        **_sweeps(result),
        f"What {centre} cost, pure epsilon, {result['adjacency']}": costs,
    }


def figures(result: Result, work: frame.Work) -> None:
    """Draws the error against each factor, under each shift and under all, and the reliability
    diagrams.
    """

    def panel(factor: str, shifts: Sequence[str]) -> tuple[str, tuple[str, Any]]:
        """Returns the mean ECE over some shifts against a factor, by method."""
        label, fixed = FACTORS[factor]
        settings = [Setting(*point) for point in result["settings"][factor]]
        axis = [getattr(setting, factor) for setting in settings]
        curves = {}
        for name in work.config.figures.methods:
            errors = [result["cells"][shift][name][factor]["ece"] for shift in shifts]
            curves[name] = list(zip(axis, np.mean(errors, 0).tolist(), strict=True))
        return fixed.format(**settings[0]._asdict()), (label, curves)

    drawn = {shift: (_title(shift), [shift]) for shift in result["cells"]}
    drawn["all_shifts"] = "Calibration under all shifts", _shifted(result)
    for file, (title, shifts) in drawn.items():
        plot_panels(
            work.root / "figures" / f"{file}.png",
            dict(panel(factor, shifts) for factor in FACTORS),
            title=title,
            subtitle=f"{result['images']} test images, means of {result['trials']} trials",
            ylabel="expected calibration error",
        )
    for file, panels in _sweep_panels(result, work.config.figures.methods).items():
        plot_panels(
            work.root / "figures" / f"{file}.png",
            panels,
            title=f"Calibration by {file}",
            subtitle=f"Means over {len(_shifted(result))} shifts. {_centre(result)}, if not varied",
            ylabel="expected calibration error",
        )
    plot_reliability(
        work.root / "figures" / "reliability.png",
        {name: Reliability(**diagram) for name, diagram in result["example"]["diagrams"].items()},
        title=f"Reliability under {result['example']['shift'].replace('_', ' ')}",
        subtitle=f"One recalibration by each method: {_centre(result)}",
    )


def _sweep_panels(result: Result, names: Sequence[str]) -> Fields:
    """Returns panels of the sweeps that a config may leave out, by the name of their figure."""

    def curves(at: Sequence[Any], errors: Mapping[str, Sequence[float]]) -> Fields:
        drawn = [name for name in errors if name in names] or list(errors)
        return {name: list(zip(at, errors[name], strict=True)) for name in drawn}

    figures: Fields = {}
    for option, swept in result["options"].items():
        panels = {}
        titles = {
            CENTRE: "ε = {2:g}".format(*result["settings"][CENTRE][0]),
            NO_PRIVACY: NO_PRIVACY,
        }
        for part, title in titles.items():
            errors = by_option(result, option, part)
            panels[title] = option, curves(swept["values"], errors)
        figures[option] = panels
    if DIVISION in result["settings"]:
        counts = [math.log10(point[0]) for point in result["settings"][DIVISION]]
        panel = "log10 of the number of sources", curves(counts, by_division(result))
        figures[DIVISION] = {"the same records": panel}
    by_level = by_severity(result)
    levels = list(next(iter(by_level.values())))
    if len(levels) > 1:
        errors = {name: list(of_level.values()) for name, of_level in by_level.items()}
        figures["severity"] = {_centre(result): ("severity", curves(levels, errors))}
    return figures


def _title(shift: str) -> str:
    if shift == CLEAN:
        return "Calibration on clean images"
    return f"Calibration on images under {shift.replace('_', ' ')}"


def summary(result: Result) -> str:
    """Returns the text for the terminal."""
    overall, at_centre = _overall(result, *FACTORS), _overall(result, CENTRE)
    rows = []
    for cost, everywhere, centre in zip(result["costs"], overall, at_centre, strict=True):
        row = {"method": cost["method"], "releases": cost["releases"], "epsilon": _paid(cost)}
        scores = ("median ECE", "mean ECE", "mean Brier")
        row |= {name: everywhere[name] for name in scores}
        row |= {f"centre: {name}": centre[name] for name in scores}
        rows.append(row)
    return (
        f"{format_table(rows)}\n\n"
        f"The centre is {_centre(result)}. The other scores are over all settings and shifts. "
        f"Every source pays PureDpEvent(epsilon) for one record ({result['adjacency']}), for any "
        "number of sources. With epsilon = inf it has no privacy. The classifier, the settings "
        "and the noisy answers are public. Scores and diagrams read test labels without noise, so "
        "they are for public benchmarks only."
    )
