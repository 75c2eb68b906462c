"""Runs the benchmarks of the suite one after the other, and writes one table and one picture of
their ratios.

    python -m benchmarks suite cpu                     # hours
    python -m benchmarks suite cpu --only steps,noise
    python -m benchmarks suite cpu --table       # only the table, from the committed results

Every benchmark writes `benchmarks/results/<name>_cpu.json`. `python -m benchmarks.evidence
results/speed.md` puts the table and the picture into the page. Peers that are not installed have no
rows."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import pages, timing
from benchmarks.registry import BENCHMARKS, ROOT

# The work, the step, its base, the ratio of their times, and milliseconds of the step where they
# are known.
Line = tuple[str, str, str, float, float | None]
COLUMNS = ("work", "step", "over", "ratio", "ms")
Row = dict[str, Any]


def _of_cases(report) -> Iterator[tuple[str, str, Row]]:
    """Yields the case, the name and the row of each step."""
    for case, rows in report["cases"].items():
        for name, row in rows.items():
            yield case, name, row


def _steps(report) -> Iterator[Line]:
    for case, name, row in _of_cases(report):
        if name in ("clipped", "private", "jax_privacy"):
            yield case, name, "plain", row["over_plain"], row["wall_ms"]
        if name.startswith("Opacus"):
            private = report["cases"][case]["private"]["wall_ms"]
            yield case, "private", name, private / row["wall_ms"], private


def _clipping(report) -> Iterator[Line]:
    for case, name, row in _of_cases(report):
        if name in ("auto", "jax_privacy"):
            yield case, f"{name}, gradient only", "plain", row["wall_ratio"], row["wall_ms"]


def _training(report) -> Iterator[Line]:
    for case, name, row in _of_cases(report):
        base = "Opacus DP-SGD" if name.startswith(("torch", "Opacus")) else "DP-SGD"
        compared = "over_dp_sgd" in row and name not in ("plain", "torch plain", base)
        if compared and "fine-tuning" in case:
            yield case, name, base, row["over_dp_sgd"], row["wall_ms"]


def _adaptation(report) -> Iterator[Line]:
    for case, name, row in _of_cases(report):
        if "over_plain" in row and "private" in name:
            yield case, name, "plain", row["over_plain"], row.get("wall_ms")


def _recalibration(report) -> Iterator[Line]:
    for row in report["methods"]:
        milliseconds = row["ours, us per trial"] / 1e3
        yield "a trial", row["method"], "NumPy", 1 / row["ratio"], milliseconds


def _split(report) -> Iterator[Line]:
    search = report["search"]
    milliseconds = 1e3 * search["wall_seconds"]["search_scales"]
    yield "scales of a block", "search_scales", "a loop", search["wall_ratio"], milliseconds


def _prediction(report) -> Iterator[Line]:
    step = f"certificates of {report['ks']} distances"
    for case, name, row in _of_cases(report):
        if name == "bounds":
            yield case, step, "a run", row["wall_over_streamed"], row["wall_ms"]


def _ops(report) -> Iterator[Line]:
    for operation, forms in report["operations"].items():
        times = {form["form"]: form["backward_cpu_ms"] for form in forms}
        ours = next((form for form in times if form.startswith("ours")), None)
        if ours is not None and "PyTorch" in times:
            ratio = times[ours] / times["PyTorch"]
            yield operation, f"{ours}, with gradients", "PyTorch", ratio, None


def _noise(report) -> Iterator[Line]:
    times = {name: row["cpu_ns_per_value"] for name, row in report["vector"].items()}
    ours = times.pop("chacha12")
    for name, theirs in times.items():
        yield "a vector", "ChaCha12 noise", name, ours / theirs, None


# The benchmarks of the suite, and what makes lines of a report.
LINES = {
    "steps": _steps,
    "clipping": _clipping,
    "noise": _noise,
    "training": _training,
    "recalibration": _recalibration,
    "prediction": _prediction,
    "ops": _ops,
    "adaptation": _adaptation,
    "split": _split,
}
FLAGS_OF = {"steps": "--rounds 15 --peers", "training": "--peers", "adaptation": "--peers"}


def path_of(name: str) -> pathlib.Path:
    return ROOT / BENCHMARKS[name].output


def reports() -> list:
    """Returns the report of each benchmark, None for one that did not run."""
    paths = map(path_of, LINES)
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def rows_of(reports: Iterable) -> list[Row]:
    """Returns the rows of the reports of all benchmarks."""
    rows = []
    for (name, lines_of), report in zip(LINES.items(), reports, strict=True):
        for line in lines_of(report) if report is not None else ():
            rows.append({"benchmark": name} | dict(zip(COLUMNS, line, strict=True)))
    return rows


def tables(*reports) -> dict:
    columns = {name: f"{{{name}}}" for name in ("benchmark", "work", "step", "over")}
    columns |= {"ratio of times": "{ratio:.3g}", "ms": "{ms:.3g}"}
    return {"suite": pages.lines(rows_of(reports), columns)}


def draw(*reports_and_path):
    """Draws the ratios of whole steps as bars."""
    from matplotlib.figure import Figure

    *reports, path = reports_and_path
    steps = [row for row in rows_of(reports) if row["benchmark"] == "steps"]
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
    title = "A whole private step on two CPU cores"
    axes.set(xlim=(0, 4.5), xlabel="ratio of times (bars end at 4)", title=title)
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


FLAGS = {"only": ("", "names of benchmarks, with commas"), "table": (False, "run nothing")}


def main(given: Sequence[str]):
    parser = timing.parser(__doc__, FLAGS)
    parser.add_argument("suite", choices=["cpu"])
    flags = parser.parse_args(given)
    names = flags.only.split(",") if flags.only else list(LINES)
    if unknown := sorted(set(names) - set(LINES)):
        parser.error(f"--only has {unknown}, not of {list(LINES)}.")
    for name in () if flags.table else names:
        # A process of its own, so that no benchmark finds the caches of another one.
        command = [sys.executable, "-m", "benchmarks", "run", name, "--update"]
        subprocess.run([*command, *FLAGS_OF.get(name, "").split()], check=True)
    timing.show("ratios of times", rows_of(reports()))
