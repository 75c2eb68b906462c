"""Runs the demo several times, and keeps the range of each result and the gain of each stage. The
noise of every run is new.

    python -m benchmarks run demo_ranges [--runs 10]

The documentation states these ranges, and `tests/test_demo_ranges.py` compares them. `python -m
benchmarks.evidence howto/whole_life.md` writes the table."""

import argparse
import contextlib
import io
import json
import pathlib
import statistics
import tempfile
from typing import Any

from benchmarks import timing
from configs.lifecycle_digits import get_config
from launch.lifecycle import life

# The accuracy before and after a stage, of one run. Their difference is the stage's gain.
STAGES = {
    "fine-tuning": ("accuracy after public pre-training", "accuracy after private fine-tuning"),
    "adaptation": (
        "brightened images, fine-tuned: accuracy",
        "brightened images, deployed: accuracy",
    ),
}
_TRIALS = 20  # of each audit, whose results are not kept


def span(ends: list[float], percent: bool) -> str:
    """Returns a range as the documentation states it."""
    low, high = (f"{100 * end:.1f}" if percent else f"{end:.3f}" for end in ends)
    return (low if low == high else f"{low} to {high}") + (" %" if percent else "")


def table(report: Any) -> str:
    """Returns the table of docs/howto/whole_life.md."""
    rows = []
    for name, ends in report["ranges"].items():
        percent = not name.endswith("ECE")
        rows.append([name, span(ends, percent)])
    return timing.page_table(["result", f"range over {report['runs']} runs"], rows)


def gains(report: Any) -> str:
    """Returns the table of what each stage gains within a run."""
    rows = []
    for stage, points in report["gains"].items():
        ends = f"{points['least']:.1f} to {points['most']:.1f}"
        deviation = f"{points['standard_deviation']:.1f}"
        rows.append([stage, f"{points['mean']:.1f}", deviation, ends])
    headings = ["stage", "mean gain in points", "standard deviation", "range"]
    return timing.page_table(headings, rows)


def gained(before: list[float], after: list[float]) -> dict[str, float]:
    """Returns mean, standard deviation and range of paired gains, in percentage points."""
    points = [100 * (late - early) for early, late in zip(before, after, strict=True)]
    return {
        "mean": statistics.mean(points),
        "standard_deviation": statistics.stdev(points),
        "least": min(points),
        "most": max(points),
    }


def one() -> dict[str, float]:
    """Returns the results of one run."""
    config = get_config()
    for part in config:
        if part.startswith("audit_"):
            config[part].trials = _TRIALS
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        states = life.run(config, folder)

        def result(stage: str) -> Any:
            path = pathlib.Path(folder, states[stage]["folder"], "row.json")
            return json.loads(path.read_text(encoding="utf-8"))["result"]

        tuned, references = result("finetune"), result("references")
        ((shift, models),) = result("deploy")["models"].items()
        return {
            "accuracy after public pre-training": result("pretrain")["accuracy"],
            "accuracy after private fine-tuning": tuned["after"],
            "accuracy after fine-tuning without privacy": references["finetune"],
            "brightened images, adapted without privacy: accuracy": references["adapt"][shift],
            "certified answers that are right": result("predict")["accuracy"],
            **{
                f"brightened images, {name}: {what}": row[key]
                for name, row in models.items()
                for key, what in (("accuracy", "accuracy"), ("ece", "ECE"))
            },
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=10)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    runs = [one() for _ in range(flags.runs)]
    ranges = {}
    for name in runs[0]:
        results = [run[name] for run in runs]
        ranges[name] = [min(results), max(results)]
    steps = {}
    for stage, (before, after) in STAGES.items():
        steps[stage] = gained([run[before] for run in runs], [run[after] for run in runs])
    report = {"runs": flags.runs, "test_images": get_config().data.parts.test}
    report |= {"ranges": ranges, "gains": steps}
    print(table(report), gains(report), sep="\n\n")
    return report
