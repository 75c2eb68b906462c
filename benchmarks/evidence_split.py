"""The claims of Split Adaptation (arXiv:2503.00441) with a public ViT of CIFAR-10 and five classes of CIFAR-100.

    python -m benchmarks.evidence_split --checkpoint vit_tiny_patch4_cifar10.npz
    python -m benchmarks.evidence results/split_adaptation.md

The first command runs the accuracies of configs/split/cifar100.py, whose docstring has the data, one by one. It writes
each to benchmarks/results/split_cifar100.json at once and leaves out those that the file has. `--minutes` stops it
after so much processor time, and the same command goes on. The second command writes the page. All images are public
benchmarks. `python -m launch.split` also has the attacks and sweeps of the config.
"""

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from configs.split import cifar100
from jaxdp.files import write_json
from jaxdp.report import format_table
from launch import frame, results, split
from launch.split_runs import SA, VARIANTS, Bench

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "split_cifar100.json"
# Rows of the paper's Table 4 beside ours. It seems to swap the names of the two rows on tuning.
PAPER_ROWS = {
    "without Hilbert augmentation": "without Hilbert augmentation",
    "backend tuned with F_0 only": "without quantisation-aware tuning",
    "backend not tuned": "without OOD quantisation-aware tuning",
    "fresh noise on all copies, no retrieval": "without patch retrieval",
}


def cells_of(config: Any) -> Iterator[tuple[Any, ...]]:
    """Yields ("rates", method, rate) and ("runs", method, shots, seed), the most important first, some twice."""

    def of_method(method: str, *counts: int) -> Iterator[tuple[Any, ...]]:
        if method in config.methods:
            yield from (("rates", method, rate) for rate in config.learning_rates)
        yield from (("runs", method, count, seed) for count in counts for seed in config.seeds)

    compared = (SA, "Linear probing", "Fine-tuning")
    rows = config.ablation.rows
    for method in (*compared[:2], *rows[-2:], *compared[2:], *reversed(rows)):
        yield from of_method(method, config.ablation.shots)
    for method in (*compared, *config.methods):
        yield from of_method(method, *config.shots)


def accuracy(cell: tuple[Any, ...], config: Any, bench: Bench, rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the accuracy of a cell. A variant of Split Adaptation has its learning rate."""
    part, method, *where = cell
    if part == "rates":
        client = split.client_of(bench.tuning, config.ablation.shots, config.tuning.seeds[0], *where)
    else:
        tried = [row["cell"][2] for row in ranked(rows, SA if method in VARIANTS else method)]
        client = split.client_of(bench.client, *where, tried[0])
    return bench.accuracy(method, client)["accuracy"]


def ranked(rows: Sequence[Mapping[str, Any]], method: str) -> list[Mapping[str, Any]]:
    """Returns the learning rates that were tried for a method, the best first."""
    mine = [row for row in rows if row["cell"][:2] == ["rates", method]]
    return sorted(mine, key=lambda row: -row["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--minutes", type=float, default=1e9, help="processor time after which no run begins")
    options = parser.parse_args()
    config, began = cifar100.get_config(), time.process_time()
    config.model.checkpoint = options.checkpoint
    frame.keep_compiled()
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cpu minutes": 0.0, "rows": []}
    rows, earlier = report["rows"], report["cpu minutes"]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, pathlib.Path(folder))
        for cell in cells_of(config):
            if time.process_time() - began > 60 * options.minutes:
                break
            if not any(row["cell"] == list(cell) for row in rows):
                rows.append({"cell": list(cell), "accuracy": accuracy(cell, config, bench, rows)})
                report["cpu minutes"] = round(earlier + (time.process_time() - began) / 60, 1)
                write_json(RESULTS, report)
                print(rows[-1], flush=True)


# --- The page ---------------------------------------------------------------------------------------------------------


def tables(found: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of the run, beside the paper's numbers."""
    runs: dict[tuple[str, int], dict[int, float]] = {}
    for part, method, *where, value in ((*row["cell"], row["accuracy"]) for row in found["rows"]):
        if part == "runs":
            runs.setdefault((method, where[0]), {})[where[1]] = value
    theirs = {row["method"]: row["5 shots"] for row in paper["table 1"]}
    gain = {name: float(theirs[SA].split()[0]) - float(value.split()[0]) for name, value in theirs.items()}
    ablated = paper["table 4, 5 shots"]
    gain |= {name: ablated[SA] - ablated[row] for name, row in PAPER_ROWS.items()}
    methods, variants = [], []
    for method, shots in sorted(runs, key=lambda key: (key[0] in VARIANTS, -key[1])):
        mine, ours = runs[method, shots], runs.get((SA, shots), {})
        row = {"shots": str(shots), "draws": str(len(mine)), "accuracy": _mean(mine.values())}
        if method in theirs:
            methods.append({"method": method} | row | {"paper": theirs[method] if shots == 5 else None})
        if method != SA:
            less = [ours[seed] - value for seed, value in mine.items() if seed in ours]
            shown = f"{gain[method]:+.2f}" if method in gain and shots == 5 else None
            variants.append({"Split Adaptation less": method} | row | {"difference": _mean(less, "+"), "paper": shown})
    tried = [
        {"method": name} | {f"rate {rate:g}": f"{100 * value:.1f}" for rate, value in sorted(_rates(found, name))}
        for name in dict.fromkeys(row["cell"][1] for row in found["rows"] if row["cell"][0] == "rates")
    ]
    return {"accuracy": _markdown(methods), "variants": _markdown(variants), "rates": _markdown(tried)}


def _rates(found: Mapping[str, Any], method: str) -> Iterable[tuple[float, float]]:
    return ((row["cell"][2], row["accuracy"]) for row in ranked(found["rows"], method))


def earlier_tables(found: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of earlier runs and of the paper's accuracies, which are kept as text."""
    earlier = {f"earlier: {name}": _markdown(rows) for name, rows in found.items() if isinstance(rows, list)}
    return earlier | {"paper: accuracy": _markdown(paper["table 1"])}


def _mean(values: Iterable[float], sign: str = "") -> str:
    """Returns a mean in percent with its standard error."""
    found = list(values)
    mean, _, error = results.moments(found)
    return f"{100 * mean:{sign}.1f}" + (f" ({100 * error:.1f})" if len(found) > 1 else "")


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    return format_table(rows, style="markdown")


if __name__ == "__main__":
    main()
