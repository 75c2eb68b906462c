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


def _methods(result: Result) -> list[str]:
    return [cost["method"] for cost in result["costs"]]


def _overall(result: Result, *factors: str) -> Lines:
    """Returns rows of Table 1."""
    shifts = _shifted(result)
    rows = []
    for name in _methods(result):
        cells = [result["cells"][shift][name] for shift in shifts]
        row = {"method": name}
        for score, heading in (("ece", "ECE"), ("brier", "Brier")):
            values: list[float] = []
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
        row = {"shift": _words(shift)}
        row["accuracy"] = f"{result['accuracy'][shift]:.4f}"
        for name, cell in cells.items():
            (error,) = cell[part]["ece"]
            row[name] = f"{error:.4f}"
        rows.append(row)
    return rows


def _words(shift: str) -> str:
    return shift.replace("_", " ")


def _mean_of(cells: Rows) -> list[float]:
    """Returns the mean ECE over shifts of each setting, from one part of the cells."""
    errors = [cell["ece"] for cell in cells]
    return np.mean(errors, 0).tolist()


def _mean_by_method(cells: Row, shifts: Sequence[str], part: str) -> dict[str, list[float]]:
    """Returns the mean ECE over some shifts of each setting, by method."""
    errors = {}
    for name in cells[shifts[0]]:
        errors[name] = _mean_of([cells[shift][name][part] for shift in shifts])
    return errors


def by_division(result: Result) -> dict[str, list[float]]:
    """Returns the mean ECE over shifts of each method, by number of sources of the same records."""
    return _mean_by_method(result["cells"], _shifted(result), DIVISION)


def by_option(result: Result, option: str, part: str) -> dict[str, list[float]]:
    """Returns the mean ECE over shifts of each method, by value of an option."""
    cells = result["options"][option]["cells"]
    return _mean_by_method(cells, _shifted(result), part)


def by_severity(result: Result) -> dict[str, dict[int, float]]:
    """Returns the mean ECE at the centre of each method, by severity of the shifts."""
    by_level: dict[int, list[str]] = {}
    for shift in _shifted(result):
        level = result["severities"][shift]
        by_level.setdefault(level, []).append(shift)
    errors: dict[str, dict[int, float]] = {name: {} for name in _methods(result)}
    for level, shifts in sorted(by_level.items()):
        means = _mean_by_method(result["cells"], shifts, CENTRE)
        for name, of_level in errors.items():
            (of_level[level],) = means[name]
    return errors


def _settings(result: Result, part: str) -> list[Setting]:
    return [Setting(*point) for point in result["settings"][part]]


def _sweeps(result: Result) -> Fields:
    """Returns tables of the sweeps that a config may leave out, rows by title."""
    count = len(_shifted(result))
    over = f"Mean ECE over {count} shifts by"
    centre = _centre(result)
    tables: Fields = {}
    for option, swept in result["options"].items():
        rows = []
        for part, suffix in ((CENTRE, ""), (NO_PRIVACY, ", no privacy")):
            for name, errors in by_option(result, option, part).items():
                rows.append(_row(f"{name}{suffix}", option, swept["values"], errors))
        tables[f"{over} {option}, with {centre}"] = rows
    if DIVISION in result["settings"]:
        points = _settings(result, DIVISION)
        counts = [point.sources for point in points]
        records = points[0].sources * points[0].samples
        by_count = by_division(result)
        rows = [_row(name, "sources", counts, errors) for name, errors in by_count.items()]
        tables[f"{over} division of {records} records among sources"] = rows
    by_level = by_severity(result)
    rows = [_row(name, "severity", errors, errors.values()) for name, errors in by_level.items()]
    if max(map(len, by_level.values())) > 1:
        tables[f"{over} severity, with {centre}"] = rows
    return tables


def _row(name: str, factor: str, values: Iterable[Any], errors: Iterable[float]) -> Row:
    row = {"method": name}
    for value, error in zip(values, errors, strict=True):
        row[f"{factor} {value}"] = f"{error:.4f}"
    return row


def _centre(result: Result) -> str:
    sources, samples, epsilon = result["settings"][CENTRE][0]
    return f"{sources} sources of {samples} samples at epsilon = {epsilon:g}"


_CONSTANT = (
    "A small ECE alone does not make a confidence useful. Suppose that the confidence of all "
    "images is their accuracy: the ECE is nearly 0, so binning with a single bin would win. The "
    "Brier score is the mean squared difference between confidence and whether the prediction is "
    "right. It is lower only for confidences that tell images apart."
)


def tables(result: Result, work: frame.Work) -> Fields:
    """Returns Tables 1 and 4, and the costs."""
    centre = _centre(result)
    count = len(_shifted(result))
    over = f"Calibration over {count} shifts"
    per_shift = "ECE under each shift"
    tables: Fields = {}
    everywhere = _overall(result, *FACTORS)
    tables[f"{over} and all numbers of sources, samples and epsilon"] = everywhere
    tables["trials"] = _trials(result)
    tables["constant"] = _CONSTANT
    tables[f"{over} with {centre}"] = _overall(result, CENTRE)
    tables[f"{per_shift} with {centre}"] = _per_shift(result, CENTRE)
    without_privacy = _per_shift(result, NO_PRIVACY)
    tables[f"{per_shift} without privacy, with the same sources and samples"] = without_privacy
    tables |= _sweeps(result)
    tables[f"What {centre} cost, pure epsilon, {result['adjacency']}"] = _costs(result)
    return tables


def _trials(result: Result) -> str:
    """Returns what the scores are, and their largest standard error."""
    standard_errors: list[float] = []
    for cells in result["cells"].values():
        for cell in cells.values():
            for part in cell.values():
                standard_errors += part["ece_error"]
    if result["trials"] == 1:
        return "Scores are of one trial, which has no standard error."
    largest = max(standard_errors)
    return (
        f"Scores are means of {result['trials']} trials. The standard error of an ECE is at most "
        f"{largest:.2g}."
    )


def _costs(result: Result) -> Lines:
    lines = []
    for cost in result["costs"]:
        line = {"method": cost["method"]}
        line["releases of a source"] = cost["releases"]
        line["noise in the sum over sources, standard deviation"] = cost["noise"]
        line["what a source pays"] = _paid(cost)
        lines.append(line)
    return lines


def figures(result: Result, work: frame.Work) -> None:
    """Draws the error against each factor, under each shift and under all, and the reliability
    diagrams.
    """
    folder = work.root / "figures"
    methods = work.config.figures.methods
    ylabel = "expected calibration error"
    drawn = {shift: (_title(shift), [shift]) for shift in result["cells"]}
    drawn["all_shifts"] = "Calibration under all shifts", _shifted(result)
    for file, (title, shifts) in drawn.items():
        plot_panels(
            folder / f"{file}.png",
            dict(_panel(result, factor, shifts, methods) for factor in FACTORS),
            title=title,
            subtitle=f"{result['images']} test images, means of {result['trials']} trials",
            ylabel=ylabel,
        )
    count = len(_shifted(result))
    centre = _centre(result)
    for file, panels in _sweep_panels(result, methods).items():
        plot_panels(
            folder / f"{file}.png",
            panels,
            title=f"Calibration by {file}",
            subtitle=f"Means over {count} shifts. {centre}, if not varied",
            ylabel=ylabel,
        )
    example = result["example"]
    diagrams = {name: Reliability(**diagram) for name, diagram in example["diagrams"].items()}
    plot_reliability(
        folder / "reliability.png",
        diagrams,
        title=f"Reliability under {_words(example['shift'])}",
        subtitle=f"One recalibration by each method: {centre}",
    )


Panel = tuple[str, Fields]  # the label of its x axis, and points by method


def _panel(
    result: Result, factor: str, shifts: Sequence[str], names: Sequence[str]
) -> tuple[str, Panel]:
    """Returns the mean ECE over some shifts against a factor, by method, below a title."""
    label, fixed = FACTORS[factor]
    settings = _settings(result, factor)
    axis = [getattr(setting, factor) for setting in settings]
    errors = _mean_by_method(result["cells"], shifts, factor)
    curves = {name: list(zip(axis, errors[name], strict=True)) for name in names}
    title = fixed.format(**settings[0]._asdict())
    return title, (label, curves)


def _sweep_panels(result: Result, names: Sequence[str]) -> Fields:
    """Returns panels of the sweeps that a config may leave out, by the name of their figure."""

    def curves(axis: Sequence[Any], errors: Mapping[str, Sequence[float]]) -> Fields:
        drawn = [name for name in errors if name in names] or list(errors)
        return {name: list(zip(axis, errors[name], strict=True)) for name in drawn}

    (centre,) = _settings(result, CENTRE)
    private = f"ε = {centre.epsilon:g}"
    figures: Fields = {}
    for option, swept in result["options"].items():
        panels = {}
        for part, title in ((CENTRE, private), (NO_PRIVACY, NO_PRIVACY)):
            errors = by_option(result, option, part)
            panels[title] = option, curves(swept["values"], errors)
        figures[option] = panels
    if DIVISION in result["settings"]:
        points = _settings(result, DIVISION)
        logarithms = [math.log10(point.sources) for point in points]
        panel = "log10 of the number of sources", curves(logarithms, by_division(result))
        figures[DIVISION] = {"the same records": panel}
    by_level = by_severity(result)
    levels = list(next(iter(by_level.values())))
    if len(levels) > 1:
        errors = {name: list(of_level.values()) for name, of_level in by_level.items()}
        panel = "severity", curves(levels, errors)
        figures["severity"] = {_centre(result): panel}
    return figures


def _title(shift: str) -> str:
    if shift == CLEAN:
        return "Calibration on clean images"
    return f"Calibration on images under {_words(shift)}"


def summary(result: Result) -> str:
    """Returns the text for the terminal."""
    overall = _overall(result, *FACTORS)
    at_centre = _overall(result, CENTRE)
    scores = ("median ECE", "mean ECE", "mean Brier")
    rows = []
    for cost, everywhere, centre in zip(result["costs"], overall, at_centre, strict=True):
        row = {"method": cost["method"], "releases": cost["releases"]}
        row["epsilon"] = _paid(cost)
        row |= {name: everywhere[name] for name in scores}
        row |= {f"centre: {name}": centre[name] for name in scores}
        rows.append(row)
    table = format_table(rows)
    return (
        f"{table}\n\n"
        f"The centre is {_centre(result)}. The other scores are over all settings and shifts. "
        f"Every source pays PureDpEvent(epsilon) for one record ({result['adjacency']}), for any "
        "number of sources. With epsilon = inf it has no privacy. The classifier, the settings "
        "and the noisy answers are public. Scores and diagrams read test labels without noise, so "
        "they are for public benchmarks only."
    )
