"""Training on noisy labels beside DP-SGD on the bundled digits, at equal epsilon.

    python -m benchmarks run label_dp --update

Both start from the same public model and have the same private and test images. The epsilon of
noisy labels is for one label, that of DP-SGD for one whole image. Noise is fresh in every run."""

import functools
import json
import pathlib
import tempfile

from benchmarks import pages, timing
from configs import digits_dpsgd
from configs.finetune import labels
from launch import finetune

EPSILONS = (1.0, 2.0, 4.0, 8.0)
METHODS = ("none", "histogram", "public", "stages", "stages, not corrected", "DP-SGD")
FLAGS = {"runs": (2, "of each method and epsilon")}


def digits_config(epsilon: float):
    """Returns the config of DP-SGD on the digits, for its last accuracy alone."""
    config = digits_dpsgd.get_config()
    config.references = False
    config.private.evaluate_every = config.private.steps
    config.private.epsilon = epsilon
    return config


def result_of(config) -> dict:
    """Returns the result of one run of `launch.finetune`, with its "accuracy"."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "run"
        finetune.experiment(config, str(root))
        result = json.loads((root / "result.json").read_text())
    return {"accuracy": result.get("private")} | result


def row_of(runs: int, epsilon: float, method: str) -> dict:
    if method == "DP-SGD":
        config = digits_config(epsilon)
    else:
        config = labels.get_config()
        config.labels.prior = method.partition(",")[0]
        config.labels.corrected = "not corrected" not in method
        config.private.epsilon = epsilon
    found = [result_of(config) for _ in range(runs)]
    return {
        "method": method,
        "epsilon": epsilon,
        "accuracies": [result["accuracy"] for result in found],
        "answers": [result.get("answers") for result in found],
        "before": found[-1]["before"],
    }


def tables(report) -> dict:
    protected = {
        "what is protected": lambda row: (
            "image and label" if row["method"] == "DP-SGD" else "label"
        ),
    }
    head = "prior or method"
    return {"labels": pages.by_epsilon(report["rows"], "method", head, pages.accuracy, protected)}


def measure(flags) -> dict:
    return {"rows": timing.swept(functools.partial(row_of, flags.runs), EPSILONS, METHODS)}
