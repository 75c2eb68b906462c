"""Training on noisy labels beside DP-SGD on the bundled digits, at equal epsilon.

    python -m benchmarks run label_dp --update

Both start from the same public model and have the same private and test images. The epsilon of
noisy labels is for one label, that of DP-SGD for one whole image. Noise is fresh in every run."""

import argparse
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import timing
from configs import digits_dpsgd
from configs.finetune import labels
from launch import finetune

EPSILONS = (1.0, 2.0, 4.0, 8.0)
METHODS = (
    "none",
    "histogram",
    "public",
    "stages",
    "stages, not corrected",
    "DP-SGD",
)


def experiment(method: str, epsilon: float, folder: pathlib.Path) -> dict[str, Any]:
    """Returns the result of one run of `launch.finetune`."""
    if method == "DP-SGD":
        config = digits_dpsgd.get_config()
        config.references = False
        config.private.evaluate_every = config.private.steps
    else:
        config = labels.get_config()
        config.labels.prior = method.partition(",")[0]
        config.labels.corrected = "not corrected" not in method
    config.private.epsilon = epsilon
    finetune.experiment(config, str(folder))
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def row_of(method: str, epsilon: float, runs: int) -> dict[str, Any]:
    accuracies, answers = [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            result = experiment(method, epsilon, pathlib.Path(folder) / "run")
        accuracies.append(result.get("accuracy", result.get("private")))
        answers.append(result.get("answers"))
    return {
        "method": method,
        "epsilon": epsilon,
        "accuracies": accuracies,
        "answers": answers,
        "before": result["before"],
    }


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of a report."""
    lines = []
    for method in METHODS:
        rows = [row for row in report["rows"] if row["method"] == method]
        protects = "image and label" if method == "DP-SGD" else "label"
        by_epsilon = sorted(rows, key=lambda row: row["epsilon"])
        lines.append([method, protects, *map(timing.accuracy, by_epsilon)])
    header = ["prior or method", "what is protected", *(f"epsilon {e:g}" for e in EPSILONS)]
    return {"labels": timing.page_table(header, lines)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=2, help="of each method and epsilon")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    rows: list[Mapping[str, Any]] = []
    for epsilon in EPSILONS:
        for method in METHODS:
            rows.append(row_of(method, epsilon, flags.runs))
            _show(rows)
    return {"rows": rows}


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(json.dumps(rows[-1]), flush=True)
