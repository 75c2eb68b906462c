"""Another model's backend, emulators of random layers, and amplitude exchange, beside Split
Adaptation.

    python -m launch.split --config configs/split/backends.py --workdir A ...
    python -m launch.split --config configs/split/backends.py:digits --workdir B
    python -m benchmarks run split_backends --update --workdir A --digits B

The docstring of the config has the whole commands. The last one keeps the rows of both finished
workdirs. All images are public benchmarks."""

import pathlib
from collections.abc import Mapping, Sequence

from benchmarks import pages
from benchmarks.evidence_split import Lines, by_seed, kept_rows
from configs.split import backends
from launch import results
from launch.split_runs import AUXILIARY, OT_RANDOM, SA

TESTBEDS = {"cifar100": "A", "digits": "B, 8 blocks"}
AMPLITUDE = "amplitude exchange for Hilbert"
# The last method of each comparison is the one that the others are compared with.
BACKENDS = ("Linear probing", SA, "Quantised frontend", "Original frontend", AUXILIARY)
EMULATORS = ("Offsite tuning", OT_RANDOM)
AUGMENTED = (SA, "without Hilbert augmentation", AMPLITUDE)
SHOTS = backends.get_config().ablation.shots


def tables(found, paper) -> dict:
    """Returns the three comparisons, and the augmentations beside each other."""
    augmented = []
    for testbed, title in TESTBEDS.items():
        for row in results.select(found[testbed]["rows"], part="augmentations"):
            augmented.append({"testbed": title} | row)
    columns = {
        "testbed": "{testbed}",
        "images": "{name}",
        "recognised by the server's model": lambda row: results.percent(row["accuracy"]),
        "distance to the original": "{distance:.3f}",
        "SSIM to the original": "{ssim:.3f}",
    }
    return {
        "backends: frontend": _compared(found, BACKENDS, paper["table 3"]),
        "backends: offsite": _compared(found, EMULATORS),
        "backends: augmentations": _compared(found, AUGMENTED),
        "backends: figure 3": pages.lines(augmented, columns),
    }


def _compared(found, methods: Sequence[str], published: Mapping[str, float] | None = None) -> Lines:
    """Returns a line for each method, with its gain over the last one on the same draws."""
    lines = []
    runs = {"part": "runs", "shots": SHOTS, "laplace": 1.0}
    for method in methods:
        line = {"method": method}
        for testbed, title in TESTBEDS.items():
            rows = results.select(found[testbed]["rows"], part="runs")
            mine, last = (by_seed(rows, method=of, **runs) for of in (method, methods[-1]))
            if not mine:
                continue
            gains = [mine[seed] - last[seed] for seed in mine]
            line[title] = pages.mean(mine.values())
            line[f"{title}: less the last"] = pages.mean(gains, "+.1f") if any(gains) else None
        if published is not None:
            line["paper"] = published.get(method)
        lines.append(line)
    return lines


FLAGS = {
    "workdir": {"required": True, "type": pathlib.Path, "help": "finished, of CIFAR"},
    "digits": {"required": True, "type": pathlib.Path, "help": "finished, of digits"},
}


def measure(flags) -> dict:
    parts = ("tuning", "runs", "augmentations")
    folders = {"cifar100": flags.workdir, "digits": flags.digits}
    found = {name: kept_rows(folder) for name, folder in folders.items()}
    return {name: {"rows": results.select(rows, part=parts)} for name, rows in found.items()}
