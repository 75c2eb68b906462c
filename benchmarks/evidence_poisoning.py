r"""Certificates against poisoned records and for unlearning, on three data sets.

    python -m benchmarks run evidence_poisoning --update --data_dir DIR \
        --workdir workdir/evidence_poisoning

It runs `launch.poisoning` with the variants of configs/predict/poisoning.py. Numbers are shares of
test inputs whose right label no k changes of the training records alter. Each kind of change has
ten models that are retrained on as many random changes as the largest k."""

import pathlib

from benchmarks import pages
from configs.predict import poisoning as configs
from launch import frame, poisoning, results

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


FLAGS = {
    "data_dir": ("", "the directory of TFDS"),
    "workdir": "workdir/evidence_poisoning",
    "variants": ",".join(VARIANTS),
}


def measure(flags) -> dict:
    root = pathlib.Path(flags.workdir)
    sets = {}
    for variant in flags.variants.split(","):
        config = configs.get_config(variant)
        if "data_dir" in config.data:
            config.data.data_dir = flags.data_dir
        sets[VARIANTS[variant]] = frame.run(poisoning.STUDY, config, root / variant)
    options = {}
    for name, changes in OPTIONS.items():
        config = configs.get_config("digits")
        config.update_from_flattened_dict(_THREE_STEPS | changes)
        options[name] = frame.run(poisoning.STUDY, config, root / frame.file_name(name))
    return {"sets": sets, "options": options}


def tables(report) -> dict:
    sets, options = [], []
    for name, result in report["sets"].items():
        data = {"data": f"{name}, {result['records']} records"}
        sets += [data | _with_shares(row) for row in result["rows"]]
    for name, result in report["options"].items():
        (row,) = result["rows"]
        options.append({"training": name} | _with_shares(row))
    changes = {"data": "{data}", "k": "{most}", "change": "{kind}"}
    return {
        "poisoning": pages.lines(sets, changes | COLUMNS),
        "poisoning options": pages.lines(options, {"training": "{training}"} | COLUMNS),
    }


COLUMNS = {
    "accuracy": lambda row: results.percent(row["accuracy"]),
    "certified at k / 2": lambda row: results.percent(row["certified"][row["most"] // 2]),
    "certified at k": lambda row: results.percent(row["certified"][row["most"]]),
    "mean distance": "{distance:.1f}",
    "width of the box": "{width:.2g}",
    "least accuracy retrained": lambda row: results.percent(min(row["retrained"])),
    "outside": "{outside} of {models}",
}


def _with_shares(row) -> dict:
    return row | {"most": len(row["certified"]) - 1, "models": len(row["retrained"])}
