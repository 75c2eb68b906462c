"""Runs the demo several times, and keeps the range of each result. The noise of every run is new.

    python -m benchmarks run demo_ranges [--runs 5]

The documentation states these ranges, and `tests/test_demo_ranges.py` compares them. `python -m
benchmarks.evidence howto/whole_life.md` writes the table."""

import argparse
import contextlib
import io
import json
import pathlib
import tempfile
from typing import Any

from benchmarks import timing
from configs.lifecycle_digits import get_config
from launch.lifecycle import life


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


def one() -> dict[str, float]:
    """Returns the results of one run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        states = life.run(get_config(), folder)

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
    parser.add_argument("--runs", type=int, default=5)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    runs = [one() for _ in range(flags.runs)]
    ranges = {}
    for name in runs[0]:
        results = [run[name] for run in runs]
        ranges[name] = [min(results), max(results)]
    report = {"runs": flags.runs, "test_images": get_config().data.parts.test, "ranges": ranges}
    print(table(report))
    return report
