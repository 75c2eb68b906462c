"""Tables and figures of a recalibration study, computed from its result."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.data.shifts import CLEAN
from jaxdp.recalibration.metrics import Reliability
from jaxdp.report import format_table, plot_panels, plot_reliability

from . import frame
from .simulation import Setting

# The factor that varies, its name in figures, and the fixed factors.
FACTORS = {
    "sources": ("number of sources", "{samples} samples each, ε = {epsilon:g}"),
    "samples": ("samples of each source", "{sources} sources, ε = {epsilon:g}"),
    "epsilon": ("ε of each source", "{sources} sources of {samples} samples"),
}
CENTRE, NO_PRIVACY = "centre", "no privacy"


def _paid(cost: Mapping[str, Any]) -> float:
    return math.inf if cost["epsilon"] is None else cost["epsilon"]


def _shifted(result: Mapping[str, Any]) -> list[str]:
    """Returns the shifts for medians and means: no clean images, since row 1 of Table 1 is a mean
    of Table 4.
    """
    return [shift for shift in result["cells"] if shift != CLEAN] or [CLEAN]


def _overall(result: Mapping[str, Any], *factors: str) -> list[dict[str, str]]:
    """Returns rows of Table 1."""
    rows = []
    for name in (cost["method"] for cost in result["costs"]):
        row, cells = {"method": name}, [result["cells"][shift][name] for shift in _shifted(result)]
        for score, heading in (("ece", "ECE"), ("brier", "Brier")):
            values = [
                value for cell in cells for factor in factors for value in cell[factor][score]
            ]
            row |= {
                f"median {heading}": f"{np.median(values):.4f}",
                f"mean {heading}": f"{np.mean(values):.4f}",
            }
        rows.append(row)
    return rows


def _per_shift(result: Mapping[str, Any], part: str) -> list[dict[str, str]]:
    """Returns rows of Table 4, with the accuracies of Table 3."""
    return [
        {"shift": shift.replace("_", " "), "accuracy": f"{result['accuracy'][shift]:.4f}"}
        | {name: f"{cell[part]['ece'][0]:.4f}" for name, cell in cells.items()}
        for shift, cells in result["cells"].items()
    ]


def _centre(result: Mapping[str, Any]) -> str:
    return "{} sources of {} samples at epsilon = {:g}".format(*result["settings"][CENTRE][0])


_CONSTANT = (
    "A small ECE alone does not make a confidence useful. Suppose that the confidence of all "
    "images is their accuracy: the ECE is nearly 0, so binning with a single bin would win. The "
    "Brier score is the mean squared difference between confidence and whether the prediction is "
    "right. It is lower only for confidences that tell images apart."
)


def tables(result: Mapping[str, Any], work: frame.Work) -> dict[str, Any]:
    """Returns Tables 1 and 4, and the costs."""
    centre, over = _centre(result), f"Calibration over {len(_shifted(result))} shifts"
    cells = [cell for cells in result["cells"].values() for cell in cells.values()]
    error = max(error for cell in cells for part in cell.values() for error in part["ece_error"])
    costs = [
        {
            "method": cost["method"],
            "releases of a source": cost["releases"],
            "noise in the sum over sources, standard deviation": cost["noise"],
            "what a source pays": _paid(cost),
        }
        for cost in result["costs"]
    ]
    trials = f"Scores are means of {result['trials']} trials. The standard error of an ECE is at most {error:.2g}."
    return {
        f"{over} and all numbers of sources, samples and epsilon": _overall(result, *FACTORS),
        "trials": trials,
        "constant": _CONSTANT,
        f"{over} with {centre}": _overall(result, CENTRE),
        f"ECE under each shift with {centre}": _per_shift(result, CENTRE),
        "ECE under each shift without privacy, with the same sources and samples": _per_shift(
            result, NO_PRIVACY
        ),
        f"What {centre} cost, pure epsilon, {result['adjacency']}": costs,
    }


def figures(result: Mapping[str, Any], work: frame.Work) -> None:
    """Draws the error against each factor, under each shift and under all, and the reliability
    diagrams.
    """

    def panel(factor: str, shifts: Sequence[str]) -> tuple[str, tuple[str, Any]]:
        """Returns the mean ECE over some shifts against a factor, by method."""
        (label, fixed), settings = (
            FACTORS[factor],
            [Setting(*point) for point in result["settings"][factor]],
        )
        axis, curves = [getattr(setting, factor) for setting in settings], {}
        for name in work.config.figures.methods:
            means = np.mean([result["cells"][shift][name][factor]["ece"] for shift in shifts], 0)
            curves[name] = list(zip(axis, means.tolist(), strict=True))
        return fixed.format(**settings[0]._asdict()), (label, curves)

    for file, shifts in {
        **{shift: [shift] for shift in result["cells"]},
        "all_shifts": _shifted(result),
    }.items():
        where = (
            "clean images" if shifts == [CLEAN] else f"images under {shifts[0].replace('_', ' ')}"
        )
        plot_panels(
            work.root / "figures" / f"{file}.png",
            dict(panel(factor, shifts) for factor in FACTORS),
            title="Calibration under all shifts"
            if file == "all_shifts"
            else f"Calibration on {where}",
            subtitle=f"{result['images']} test images, means of {result['trials']} trials",
            ylabel="expected calibration error",
        )
    plot_reliability(
        work.root / "figures" / "reliability.png",
        {name: Reliability(**diagram) for name, diagram in result["example"]["diagrams"].items()},
        title=f"Reliability under {result['example']['shift'].replace('_', ' ')}",
        subtitle=f"One recalibration by each method: {_centre(result)}",
    )


def summary(result: Mapping[str, Any]) -> str:
    """Returns the text for the terminal."""
    shown, rows = ("median ECE", "mean ECE", "mean Brier"), []
    for cost, all_, centre in zip(
        result["costs"], _overall(result, *FACTORS), _overall(result, CENTRE), strict=True
    ):
        row = {"method": cost["method"], "releases": cost["releases"], "epsilon": _paid(cost)}
        rows.append(
            row
            | {name: all_[name] for name in shown}
            | {f"centre: {name}": centre[name] for name in shown}
        )
    return (
        f"{format_table(rows)}\n\n"
        f"The centre is {_centre(result)}. The other scores are over all settings and shifts. "
        "Every source pays "
        f"PureDpEvent(epsilon) for one record ({result['adjacency']}), for any number of sources. "
        "With epsilon = inf "
        "it has no privacy. The classifier, the settings and the noisy answers are public. Scores "
        "and diagrams read "
        "test labels without noise, so they are for public benchmarks only."
    )
