"""What a monitor reads of a ledger: gauges in the OpenMetrics text format, and whom to alert."""

import datetime
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdp.files.text import up

_GAUGES = {
    "jaxdp_ledger_epsilon": "Epsilon that was spent, at the delta of the data set.",
    "jaxdp_ledger_budget": "The budget of epsilon. +Inf without a budget.",
    "jaxdp_ledger_remaining": "Epsilon that is left. +Inf without a budget.",
    "jaxdp_ledger_spends": "Number of charges.",
    "jaxdp_ledger_open": "Number of charges whose release did not end, which count in full.",
    "jaxdp_ledger_last_spend_seconds": "Time of the last charge, in seconds since 1970.",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def text(report: Mapping[str, Any]) -> str:
    """Returns the gauges of all data sets of `Ledger.report`.

    The format is OpenMetrics 1.0, which the text-file collector of Prometheus reads.
    """
    lines = []
    values_of = {}
    for entry in report["datasets"]:
        values_of[_labels(report["path"], entry)] = _values(entry)
    for name, meaning in _GAUGES.items():
        lines.append(f"# TYPE {name} gauge")
        lines.append(f"# HELP {name} {meaning}")
        for labels, values in values_of.items():
            if name in values:
                lines.append(f"{name}{{{labels}}} {_number(values[name])}")
    lines.append("# EOF\n")
    return "\n".join(lines)


def alerts(report: Mapping[str, Any], share: float) -> Iterator[str]:
    """Yields a sentence for each data set that has spent at least a share of its budget, and for
    each with a release without a proof.
    """
    for entry in report["datasets"]:
        values = _values(entry)
        spent = values["jaxdp_ledger_epsilon"]
        budget = values["jaxdp_ledger_budget"]
        if math.isinf(spent):
            yield f"{entry['name']}: a release has no proof of privacy"
        elif spent >= share * budget:
            yield f"{entry['name']}: epsilon {up(spent)} of a budget of {budget:g}"


def _labels(path: str, entry: Mapping[str, Any]) -> str:
    labels = {"ledger": path, "dataset": entry["name"], "unit": entry["unit"]}
    return ",".join(f'{key}="{value.translate(_ESCAPES)}"' for key, value in labels.items())


def _values(entry: Mapping[str, Any]) -> dict[str, float]:
    proven = None if entry["headline"].startswith("inf") else entry["proven_epsilon"]
    values = {
        "jaxdp_ledger_epsilon": _or_infinite(proven),
        "jaxdp_ledger_budget": _or_infinite(entry["budget"]),
        "jaxdp_ledger_remaining": _or_infinite(entry["remaining"]),
        "jaxdp_ledger_spends": entry["charges"],
        "jaxdp_ledger_open": entry["unfinished"],
    }
    times = [run["last_at"] for run in entry["runs"]]
    if times:
        last = datetime.datetime.fromisoformat(max(times))
        values["jaxdp_ledger_last_spend_seconds"] = last.timestamp()
    return values


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _number(value: float) -> str:
    return "+Inf" if math.isinf(value) else f"{value:.12g}"
