"""Times simulated recalibrations per second: `launch.simulation` beside a plain NumPy loop over
trials.

    python -m benchmarks run recalibration --output .bench/recalibration.json

The sweep is one shift of the paper's CIFAR-10 sweep: 10,000 labelled logits of 10 classes
(synthetic, over-confident), three factors of 10 settings, six methods. The NumPy loop follows the
paper, vectorised over records. For every trial and method it draws a random split, computes softmax
at every temperature that the search asks about, adds Laplace noise of every source, and computes
the ECE of the test split. It runs on a sample of the trials, between runs of ours. Times per trial
are means over settings and medians over shifts after the first, which compiles. The whole sweep is
`--shifts 15`."""

import argparse
import math
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp.memory import keep_freed_memory
from jaxdp.recalibration import AccT, Bracket, EceT, HistogramBinning, NllT, Records
from launch.simulation import Order, Setting, simulate, unchanged

RECORDS, CLASSES, BINS = 10_000, 10, 15
PUBLISHED = Bracket(spacing="linear")
SETTINGS = [
    *(Setting(sources, 10, 1.0) for sources in range(25, 251, 25)),
    *(Setting(50, samples, 1.0) for samples in range(5, 51, 5)),
    *(Setting(50, 30, round(0.2 * k, 1)) for k in range(1, 11)),
]
METHODS = {
    "Acc-T": AccT(bracket=PUBLISHED),
    "NLL-T": NllT(bracket=PUBLISHED),
    "ECE-T": EceT(bracket=PUBLISHED),
    "histogram binning": HistogramBinning(form="published"),
}
NAMES = ("none", "one source", *METHODS)


def logits_of(shift: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns over-confident logits, worse for later shifts."""
    rng = np.random.default_rng(shift)
    labels = rng.integers(0, CLASSES, RECORDS)
    logits = rng.normal(size=(RECORDS, CLASSES)).astype(np.float32)
    logits[np.arange(RECORDS), labels] += 2 - 0.1 * shift
    return 3 * logits, labels.astype(np.int32)


# --- The plain loop -----------------------------------------------------------------------------


def numpy_confidence(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits / temperature
    exponentials = np.exp(scaled - scaled.max(1, keepdims=True))
    return (exponentials / exponentials.sum(1, keepdims=True)).max(1)


def numpy_bins(confidence: np.ndarray, values: np.ndarray) -> np.ndarray:
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return np.bincount(index, values, minlength=BINS)


def numpy_golden(
    objective: Callable[[float], float], low: float, high: float, iterations: int
) -> float:
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = objective(left), objective(right)
    for k in range(iterations):
        if at_left >= at_right:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = objective(right) if k < iterations - 1 else math.nan
        else:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = objective(left) if k < iterations - 1 else math.nan
    return (low + high) / 2


def numpy_trial(
    name: str, logits: np.ndarray, labels: np.ndarray, setting: Setting, rng: np.random.Generator
) -> float:
    order = rng.permutation(len(labels))
    used = setting.sources * setting.samples
    mine, test = order[: setting.samples if name == "one source" else used], order[used:]
    sources = 0 if name == "one source" else setting.sources
    own, right = logits[mine], (logits[mine].argmax(1) == labels[mine]).astype(float)
    iterations = 5

    def noise(size: int, sensitivity: float) -> np.ndarray:
        return rng.laplace(scale=sensitivity / setting.epsilon, size=(sources, size)).sum(0)

    def acc(t: float) -> float:
        return abs(float((right - numpy_confidence(own, t)).sum() + noise(1, iterations + 1)[0]))

    def nll(t: float) -> float:
        scaled = own / t
        top = scaled.max(1)
        losses = (
            np.log(np.exp(scaled - top[:, None]).sum(1))
            + top
            - scaled[np.arange(len(own)), labels[mine]]
        )
        return float(np.clip(losses, 0, 10).sum() + noise(1, 10.0 * (iterations + 1))[0])

    def ece(t: float) -> float:
        p = numpy_confidence(own, t)
        return float(np.abs(numpy_bins(p, right - p) + noise(BINS, iterations + 1)).sum())

    if name == "histogram binning":
        p = numpy_confidence(own, 1.0)
        counts = noise(2 * BINS, 2.0)
        hits, total = (
            numpy_bins(p, right) + counts[:BINS],
            numpy_bins(p, np.ones(len(p))) + counts[BINS:],
        )
        middle = (np.arange(BINS) + 0.5) / BINS
        values = np.where(total > 0, np.clip(hits / np.where(total > 0, total, 1), 0, 1), middle)
        index = np.minimum((numpy_confidence(logits[test], 1.0) * BINS).astype(int), BINS - 1)
        confidence = values[index]
    else:
        objectives = {"one source": nll, "Acc-T": acc, "NLL-T": nll, "ECE-T": ece}
        t = 1.0 if name == "none" else numpy_golden(objectives[name], 0.5, 3.0, iterations)
        confidence = numpy_confidence(logits[test], t)
    correct = logits[test].argmax(1) == labels[test]
    return float(np.abs(numpy_bins(confidence, correct - confidence)).sum() / len(test))


# --- Side by side -------------------------------------------------------------------------------


def ours(name: str, records: Records, order: Order, key: jax.Array) -> np.ndarray:
    """Returns ECE [settings, trials]."""
    if name == "none":
        outcomes = unchanged(records, order, SETTINGS)
    elif name == "one source":
        outcomes = simulate(METHODS["NLL-T"], records, order, SETTINGS, key=None)
    else:
        outcomes = simulate(METHODS[name], records, order, SETTINGS, key=key)
    return np.stack([outcome.ece for outcome in outcomes])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument(
        "--sample", type=int, default=2, help="trials per setting and method of the plain loop"
    )
    parser.add_argument(
        "--shifts", type=int, default=3, help="ours runs this many, after one that compiles"
    )


class Sweep:
    """Seconds per trial and mean ECEs of a method, of ours and of the NumPy loop."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        self.means: dict[str, list[float]] = {side: [] for side in SIDES}

    def add(self, side: str, seconds: float, eces: Any) -> None:
        self.seconds[side].append(seconds / np.size(eces))
        self.means[side].append(float(np.mean(eces)))

    def median(self, side: str) -> float:
        return float(np.median(self.seconds[side]))

    def row(self) -> dict[str, float]:
        ratios = np.divide(self.seconds["numpy"], self.seconds["ours"])
        return {
            "ours, us per trial": 1e6 * self.median("ours"),
            "NumPy, us per trial": 1e6 * self.median("numpy"),
            "ratio": float(np.median(ratios)),
            "mean ECE, ours": float(np.mean(self.means["ours"])),
            "mean ECE, numpy": float(np.mean(self.means["numpy"])),
        }


SIDES = ("ours", "numpy")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()
    order = Order.draw(0, records=RECORDS, trials=flags.trials, settings=SETTINGS)
    rng = np.random.default_rng(0)
    sweeps = {name: Sweep() for name in NAMES}
    first_shift = all_shifts = 0.0
    for shift in range(flags.shifts + 1):
        logits, labels = logits_of(shift)
        records = Records(jnp.asarray(logits), jnp.asarray(labels))
        for name in NAMES:
            start = time.perf_counter()
            eces = ours(name, records, order, jax.random.key(shift))
            elapsed = time.perf_counter() - start
            if shift < flags.shifts:
                all_shifts += elapsed
            if shift == 0:  # it compiles
                first_shift += elapsed
                continue
            sweeps[name].add("ours", elapsed, eces)
            start = time.perf_counter()
            plain = numpy_trials(name, logits, labels, flags.sample, rng)
            sweeps[name].add("numpy", time.perf_counter() - start, plain)
    rows = [{"method": name} | sweep.row() for name, sweep in sweeps.items()]
    ours_total = sum(sweep.median("ours") for sweep in sweeps.values())
    numpy_total = sum(sweep.median("numpy") for sweep in sweeps.values())
    trials = len(SETTINGS) * flags.trials * flags.shifts
    summary = {
        "ratio of all methods, compiled": numpy_total / ours_total,
        "ratio of all methods, with compilation": numpy_total * trials / all_shifts,
        "first shift, with compilation, seconds": first_shift,
        "as many shifts, with compilation, seconds": all_shifts,
        "peak memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(jaxdp.report.format_table(rows, digits=3))
    for name, value in summary.items():
        print(f"{name}: {value:.4g}")
    return vars(flags) | {"methods": rows} | summary


def numpy_trials(
    name: str, logits: np.ndarray, labels: np.ndarray, sample: int, rng: np.random.Generator
) -> list[float]:
    """Returns the ECE of a sample of trials of every setting."""
    eces = []
    for setting in SETTINGS:
        for _ in range(sample):
            eces.append(numpy_trial(name, logits, labels, setting, rng))
    return eces
