"""Runs the demo several times, and keeps the range of each result and the gain of each stage. The
noise of every run is new.

    python -m benchmarks run demo_ranges [--runs 10]

The documentation states these ranges, and `tests/test_demo_ranges.py` compares them."""

import contextlib
import io
import json
import pathlib
import statistics
import tempfile

from benchmarks import pages, timing
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


def tables(report) -> dict:
    """Returns the tables of docs/howto/whole_life.md: ranges, and gains of stages within a run."""

    def range_of(item):
        name, ends = item
        return span(ends, percent=not name.endswith("ECE"))

    heading = f"range over {report['runs']} runs"
    ranges = pages.lines(
        report["ranges"].items(), {"result": lambda item: item[0], heading: range_of}
    )
    columns = {
        "stage": "{stage}",
        "mean gain in points": "{mean:.1f}",
        "standard deviation": "{standard_deviation:.1f}",
        "range": "{least:.1f} to {most:.1f}",
    }
    gains = [{"stage": stage} | points for stage, points in report["gains"].items()]
    return {"ranges": ranges, "gains": pages.lines(gains, columns)}


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

        def result(stage):
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


FLAGS = {"runs": 10}


def measure(flags) -> dict:
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
    for title, table in tables(report).items():
        timing.show(title, table)
    return report
