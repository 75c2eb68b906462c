"""Runs all benchmarks of a suite one after the other, and writes one table and one picture of their
ratios.

    python -m benchmarks suite cpu                     # hours
    python -m benchmarks suite cpu --only steps,noise
    python -m benchmarks suite cpu --table       # only the table, from the committed results

Every benchmark writes `benchmarks/results/<name>_<suite>.json`. `python -m benchmarks.evidence
results/speed.md` puts the table and the picture of the suite cpu into the page. Peers that are not
installed have no rows."""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks import timing
from jaxdp.report import format_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# A row: the work, the step, its base, the ratio of their times, and milliseconds of the step where
# they are known.
Row = dict[str, Any]


def _row(work: str, step: str, base: str, ratio: float, wall_ms: float | None = None) -> Row:
    return {"work": work, "step": step, "over": base, "ratio": ratio, "ms": wall_ms}


def _steps(report: Any) -> Iterator[Row]:
    for case, rows in report["cases"].items():
        for name in ("clipped", "private", "jax_privacy"):
            if name in rows:
                yield _row(case, name, "plain", rows[name]["over_plain"], rows[name]["wall_ms"])
        for name in rows:
            if name.startswith("Opacus"):
                ratio = rows["private"]["wall_ms"] / rows[name]["wall_ms"]
                yield _row(case, "private", name, ratio, rows["private"]["wall_ms"])


def _clipping(report: Any) -> Iterator[Row]:
    for case, rows in report["cases"].items():
        for name in ("auto", "jax_privacy"):
            if name in rows:
                yield _row(
                    case,
                    f"{name}, gradient only",
                    "plain",
                    rows[name]["wall_ratio"],
                    rows[name]["wall_ms"],
                )


def _training(report: Any) -> Iterator[Row]:
    for case, rows in report["cases"].items():
        for name, row in rows.items():
            if (
                "fine-tuning" in case
                and "over_dp_sgd" in row
                and name not in ("plain", "DP-SGD", "torch plain")
            ):
                base = "Opacus DP-SGD" if name.startswith(("torch", "Opacus")) else "DP-SGD"
                if name != base:
                    yield _row(case, name, base, row["over_dp_sgd"], row["wall_ms"])


def _adaptation(report: Any) -> Iterator[Row]:
    for case, rows in report["cases"].items():
        for name, row in rows.items():
            if "over_plain" in row and "private" in name:
                yield _row(case, name, "plain", row["over_plain"], row.get("wall_ms"))


def _recalibration(report: Any) -> Iterator[Row]:
    for row in report["methods"]:
        yield _row(
            "a trial", row["method"], "NumPy", 1 / row["ratio"], row["ours, us per trial"] / 1e3
        )


def _split(report: Any) -> Iterator[Row]:
    seconds = report["search"]["wall_seconds"]["search_scales"]
    yield _row(
        "scales of a block",
        "search_scales",
        "a loop",
        report["search"]["wall_ratio"],
        1e3 * seconds,
    )


def _prediction(report: Any) -> Iterator[Row]:
    for case, rows in report["cases"].items():
        row, step = rows["bounds"], f"certificates of {report['ks']} distances"
        yield _row(case, step, "a run", row["wall_over_streamed"], row["wall_ms"])


def _ops(report: Any) -> Iterator[Row]:
    for operation, forms in report["operations"].items():
        times = {form["form"]: form["backward_cpu_ms"] for form in forms}
        ours = next((form for form in times if form.startswith("ours")), None)
        if ours is not None and "PyTorch" in times:
            yield _row(
                operation, f"{ours}, with gradients", "PyTorch", times[ours] / times["PyTorch"]
            )


def _noise(report: Any) -> Iterator[Row]:
    ours = report["vector"]["chacha12"]
    for name, row in report["vector"].items():
        if name != "chacha12":
            yield _row(
                "a vector",
                "ChaCha12 noise",
                name,
                ours["cpu_ns_per_value"] / row["cpu_ns_per_value"],
            )


@dataclasses.dataclass(frozen=True)
class Job:
    """A benchmark of a suite: `python -m benchmarks run <name> <flags>`, and the rows of its
    report."""

    name: str
    rows: Callable[[Any], Iterator[Row]]
    flags: str = ""

    def path(self, suite: str) -> pathlib.Path:
        return RESULTS / f"{self.name}_{suite}.json"


_EVERYWHERE = [
    Job("steps", _steps, "--rounds 15 --peers"),
    Job("clipping", _clipping),
    Job("noise", _noise),
    Job("training", _training, "--peers"),
    Job("recalibration", _recalibration),
    Job("prediction", _prediction),
    Job("ops", _ops),
]
SUITES = {
    "cpu": [*_EVERYWHERE, Job("adaptation", _adaptation, "--peers"), Job("split", _split)],
    "gpu": [
        *_EVERYWHERE,
        Job("adaptation", _adaptation, "--shapes vit_b16 --batch-sizes 64 --peers"),
    ],
}


def reports(suite: str) -> list[Any]:
    """Returns the report of each job of a suite, None for one that did not run."""
    paths = [job.path(suite) for job in SUITES[suite]]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def rows_of(suite: str, reports: Iterable[Any]) -> list[Row]:
    """Returns the rows of all reports of a suite."""
    pairs = zip(SUITES[suite], reports, strict=True)
    return [
        {"benchmark": job.name, **row}
        for job, report in pairs
        if report is not None
        for row in job.rows(report)
    ]


def markdown(rows: list[Row]) -> str:
    """Returns the rows as a table of a page."""
    lines = []
    for row in rows:
        milliseconds = "" if row["ms"] is None else f"{row['ms']:.3g}"
        names = [row["benchmark"], row["work"], row["step"], row["over"]]
        lines.append([*names, f"{row['ratio']:.3g}", milliseconds])
    header = ["benchmark", "work", "step", "over", "ratio of times", "ms"]
    return timing.page_table(header, lines)


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Draws the ratios of whole steps as bars."""
    from matplotlib.figure import Figure

    steps = [row for row in rows if row["benchmark"] == "steps"]
    works = list(dict.fromkeys(row["work"] for row in steps))
    figure = Figure(figsize=(8, 0.8 + 0.9 * len(works)), layout="constrained")
    axes = figure.subplots()
    for series, (step, base) in enumerate(_BARS):
        for place, work in enumerate(works):
            ratio = _bar(steps, work, step, base)
            if ratio is None:
                continue
            y = place + 0.2 * series
            label = f"{step} / {'best Opacus mode' if base == 'best' else base}"
            shown = label if place == 0 else None  # one entry of the legend for a series
            width = min(ratio, 4)
            axes.barh(y, width, 0.18, color=f"C{series}", label=shown)
            text = f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"
            axes.text(width + 0.03, y, text, va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([place + 0.3 for place in range(len(works))], works)
    axes.set(
        xlim=(0, 4.5),
        xlabel="ratio of times (bars end at 4)",
        title="A whole private step on two CPU cores",
    )
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=4)
    figure.savefig(path, dpi=110)


_BARS = [("clipped", "plain"), ("private", "plain"), ("jax_privacy", "plain"), ("private", "best")]


def _bar(steps: list[Row], work: str, step: str, base: str) -> float | None:
    """Returns the ratio of a bar. The largest one is over the best mode of the peer."""
    rows = [row for row in steps if row["work"] == work and row["step"] == step]
    if base == "best":
        return max((row["ratio"] for row in rows if row["over"] != "plain"), default=None)
    return next((row["ratio"] for row in rows if row["over"] == base), None)


def main(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--only", default="", help="names of benchmarks, with commas")
    parser.add_argument("--table", action="store_true", help="run nothing")
    flags = parser.parse_args(given)
    jobs = {job.name: job for job in SUITES[flags.suite]}
    names = flags.only.split(",") if flags.only else list(jobs)
    if unknown := sorted(set(names) - set(jobs)):
        parser.error(f"--only has {unknown}, not of {list(jobs)}.")
    for name, job in jobs.items():
        if name in names and not flags.table:
            # A process of its own, so that no benchmark finds the caches of another one.
            command = [sys.executable, "-m", "benchmarks", "run", name, *job.flags.split()]
            subprocess.run([*command, "--output", str(job.path(flags.suite))], check=True)
    print(format_table(rows_of(flags.suite, reports(flags.suite)), digits=3))
