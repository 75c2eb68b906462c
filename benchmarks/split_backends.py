"""Another model's backend, emulators of random layers, and amplitude exchange, beside Split
Adaptation.

    python -m launch.split --config configs/split/backends.py --workdir A ...
    python -m launch.split --config configs/split/backends.py:digits --workdir B
    python -m benchmarks run split_backends --update --workdir A --digits B

The docstring of the config has the whole commands. The last one keeps the rows of both finished
workdirs. All images are public benchmarks."""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from configs.split import backends
from jaxdp.report import format_table
from launch import results
from launch.split_runs import AUXILIARY, OT_RANDOM, SA

Rows = Sequence[Mapping[str, Any]]
TESTBEDS = {"cifar100": "A", "digits": "B, 8 blocks"}
AMPLITUDE = "amplitude exchange for Hilbert"
# The last method of each comparison is the one that the others are compared with.
BACKENDS = ("Linear probing", SA, "Quantised frontend", "Original frontend", AUXILIARY)
EMULATORS = ("Offsite tuning", OT_RANDOM)
AUGMENTED = (SA, "without Hilbert augmentation", AMPLITUDE)
SHOTS = backends.get_config().ablation.shots


def tables(found: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the three comparisons, and the augmentations beside each other."""
    published = paper["table 3"]
    parts = {
        "backends: frontend": _compared(found, BACKENDS, published),
        "backends: offsite": _compared(found, EMULATORS),
        "backends: augmentations": _compared(found, AUGMENTED),
        "backends: figure 3": _augmentation_rows(found),
    }
    return {name: format_table(lines, style="markdown") for name, lines in parts.items()}


def _compared(
    found: Mapping[str, Any],
    methods: Sequence[str],
    published: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Returns a line for each method, with its gain over the last one on the same draws."""
    lines = []
    for method in methods:
        line: dict[str, Any] = {"method": method}
        for testbed, title in TESTBEDS.items():
            mine, last = (_by_seed(found[testbed]["rows"], name) for name in (method, methods[-1]))
            if not mine:
                continue
            gains = [mine[seed] - last[seed] for seed in mine]
            line[title] = _percent(list(mine.values()))
            line[f"{title}: less the last"] = _percent(gains, "+") if any(gains) else None
        if published is not None:
            line["paper"] = published.get(method)
        lines.append(line)
    return lines


def _by_seed(rows: Rows, method: str) -> dict[int, float]:
    runs = results.select(rows, part="runs", method=method, shots=SHOTS, laplace=1.0)
    return {row["seed"]: row["accuracy"] for row in runs}


def _percent(values: Sequence[float], sign: str = "") -> str:
    mean, _, error = results.moments(values)
    return f"{100 * mean:{sign}.1f} ({100 * error:.1f})"


def _augmentation_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for testbed, title in TESTBEDS.items():
        for row in results.select(found[testbed]["rows"], part="augmentations"):
            lines.append(
                {
                    "testbed": title,
                    "images": row["name"],
                    "recognised by the server's model": results.percent(row["accuracy"]),
                    "distance to the original": f"{row['distance']:.3f}",
                    "SSIM to the original": f"{row['ssim']:.3f}",
                }
            )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="finished, of CIFAR")
    parser.add_argument("--digits", required=True, type=pathlib.Path, help="finished, of digits")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    folders = {"cifar100": flags.workdir, "digits": flags.digits}
    return {name: {"rows": _rows(folder)} for name, folder in folders.items()}


def _rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the accuracies and augmentations of a finished workdir."""
    if not (workdir / "result.json").exists():
        raise SystemExit(f"{workdir} has no result.json. Run launch.split to its end.")
    rows = []
    for path in sorted(workdir.glob("cells/**/row.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["part"] in ("tuning", "runs", "augmentations"):
            rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
            rows.append(rounded)
    return rows
