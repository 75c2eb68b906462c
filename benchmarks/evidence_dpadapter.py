"""The tables of docs/results/dpadapter.md from the results of configs/dpadapter_usps.py and of an
earlier run.

python -m benchmarks.evidence results/dpadapter.md
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdp.report import format_table

DIFFERENCE = r"(.+): ([+-]\d+\.\d+) \(standard error (\d+\.\d+)\), higher in (.+)"


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the run on USPS."""
    grids, means = report["grids"], {row["upstream"]: row for row in report["upstream_means"]}
    markdown = {}
    for name in ("order", "order_4"):
        markdown[name] = _markdown(_without_method(grids[name]["table"]))
        markdown[f"{name}: differences"] = _markdown(map(_difference, grids[name]["differences"]))
    markdown["transfer"] = _markdown(_without_method(grids["order"]["robust_accuracy"]))
    markdown["upstreams"] = _markdown(
        {
            "upstream": name,
            "accuracy": f"{means[name]['accuracy']:.3f}",
            "robust accuracy": f"{means[name]['robust_accuracy']:.3f}",
            "rho": f"{means[name]['rho']:.1f}",
            "norm of Delta": f"{means[name]['perturbation_norm']:.2f}",
        }
        for name in (row["upstream"] for row in grids["order"]["table"])
        if name in means
    )
    rates: dict[str, dict[str, str]] = {}
    for row in grids["tuning"]["table"]:
        at = row["method"].replace("DP-SGD at", "rate")
        rates.setdefault(row["upstream"], {"upstream": row["upstream"]})[at] = row["average ε=1"]
    markdown["rates"] = _markdown(rates.values())
    for name in ("gamma_1", "gamma_4", "amp", "batches"):
        rows = []
        for row in _without_method(grids[name]["table"]):
            of = means[row["upstream"]]
            two = {"upstream accuracy": of["accuracy"], "robust": of["robust_accuracy"]}
            rows.append(row | {key: f"{value:.3f}" for key, value in two.items()})
        markdown[name] = _markdown(rows)
    markdown["family"] = _markdown(grids["family"]["table"])
    markdown["family: differences"] = _markdown(map(_difference, grids["family"]["differences"]))
    return markdown


def earlier_tables(ours: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the earlier run, whose rows are kept as text, and the paper's Table
    1."""
    names = ("table1", "upstream models", "three times the length", "beyond")
    return {name: _markdown(ours[name]) for name in names} | {"paper": _markdown(paper["table1"])}


def _without_method(rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "method"} for row in rows]


def _difference(text: str) -> dict[str, str]:
    match = re.fullmatch(DIFFERENCE, text)
    if match is None:
        raise ValueError(f"a difference must match {DIFFERENCE}, got {text!r}.")
    name, mean, error, higher = match.groups()
    return {
        "difference": name,
        "mean": f"{float(mean):+.3f}",
        "standard error": f"{float(error):.3f}",
        "higher in": higher,
    }


def _markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    lines: Sequence[Mapping[str, Any]] = list(rows)
    return format_table(lines, style="markdown")
