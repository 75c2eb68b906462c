r"""Certificates against poisoned records and for unlearning, on three data sets.

    python -m benchmarks run evidence_poisoning --update --data_dir DIR \
        --workdir workdir/evidence_poisoning

It runs `launch.poisoning` with the variants of configs/predict/poisoning.py. Numbers are shares of
test inputs whose right label no k changes of the training records alter. Each kind of change has
ten models that are retrained on as many random changes as the largest k."""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any

from configs.predict import poisoning as configs
from jaxdp.report import format_table
from launch import frame, poisoning

VARIANTS = {"blobs": "Blobs", "digits": "digits", "pneumonia": "PneumoniaMNIST"}
# Changes of the digits config. Labels change, and training has three steps.
_THREE_STEPS = {"training.epochs": 3, "training.learning_rate": 3.0, "changes.kinds": ("labels",)}
OPTIONS = {
    "three steps": {},
    "momentum 0.9": {"training.momentum": 0.9},
    "momentum 0.9, dampening 0.3": {"training.momentum": 0.9, "training.dampening": 0.3},
    "l1 0.003": {"training.l1": 0.003},
    "98 % of the records public": {"changes.public": 0.98},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data_dir", default="", help="the directory of TFDS")
    parser.add_argument("--workdir", default="workdir/evidence_poisoning")
    parser.add_argument("--variants", default=",".join(VARIANTS))


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    sets = {}
    for variant in flags.variants.split(","):
        config = configs.get_config(variant)
        if "data_dir" in config.data:
            config.data.data_dir = flags.data_dir
        root = pathlib.Path(flags.workdir) / variant
        sets[VARIANTS[variant]] = frame.run(poisoning.STUDY, config, root)
    options = {}
    for name, changes in OPTIONS.items():
        config = configs.get_config("digits")
        config.update_from_flattened_dict(_THREE_STEPS | changes)
        root = pathlib.Path(flags.workdir) / frame.file_name(name)
        options[name] = frame.run(poisoning.STUDY, config, root)
    return {"sets": sets, "options": options}


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of docs/results/agt.md."""
    lines = []
    for name, result in report["sets"].items():
        for row in result["rows"]:
            lines.append(
                {
                    "data": f"{name}, {result['records']} records",
                    "k": str(len(row["certified"]) - 1),
                    "change": row["kind"],
                }
                | _cells(row)
            )
    options = []
    for name, result in report["options"].items():
        (row,) = result["rows"]
        options.append({"training": name} | _cells(row))
    return {
        "poisoning": format_table(lines, style="markdown"),
        "poisoning options": format_table(options, style="markdown"),
    }


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    certified = row["certified"]
    most = len(certified) - 1
    return {
        "accuracy": _percent(row["accuracy"]),
        "certified at k / 2": _percent(certified[most // 2]),
        "certified at k": _percent(certified[most]),
        "mean distance": f"{row['distance']:.1f}",
        "width of the box": f"{row['width']:.2g}",
        "least accuracy retrained": _percent(min(row["retrained"])),
        "outside": f"{row['outside']} of {len(row['retrained'])}",
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
