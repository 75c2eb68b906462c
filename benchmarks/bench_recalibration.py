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

import functools
import itertools
import math
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

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


def numpy_bin_of(confidence: np.ndarray) -> np.ndarray:
    return np.minimum((confidence * BINS).astype(int), BINS - 1)


def numpy_bins(confidence: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.bincount(numpy_bin_of(confidence), values, minlength=BINS)


def numpy_golden(objective: Callable, low: float, high: float, iterations: int) -> float:
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


ITERATIONS = 5  # of the search, which asks once more than that
OBJECTIVES = {"one source": "nll", "Acc-T": "acc", "NLL-T": "nll", "ECE-T": "ece"}


def numpy_trial(name: str, logits: np.ndarray, labels: np.ndarray, setting: Setting, rng) -> float:
    """Returns the ECE of the test split after one recalibration."""
    order = rng.permutation(len(labels))
    used, sources = setting.sources * setting.samples, setting.sources
    test, calibration = order[used:], order[:used]
    if name == "one source":  # which alone adds no noise
        calibration, sources = order[: setting.samples], 0
    trial = NumpyTrial(logits[calibration], labels[calibration], sources, setting.epsilon, rng)
    temperature = 1.0
    if name in OBJECTIVES:
        objective = getattr(trial, OBJECTIVES[name])
        temperature = numpy_golden(objective, 0.5, 3.0, ITERATIONS)
    confidence = numpy_confidence(logits[test], temperature)
    if name == "histogram binning":
        confidence = trial.binned(confidence)
    correct = logits[test].argmax(1) == labels[test]
    return float(np.abs(numpy_bins(confidence, correct - confidence)).sum() / len(test))


class NumpyTrial(NamedTuple):
    """The noisy objectives of the calibration records of one trial."""

    logits: np.ndarray
    labels: np.ndarray
    sources: int
    epsilon: float
    rng: np.random.Generator

    @property
    def right(self) -> np.ndarray:
        return (self.logits.argmax(1) == self.labels).astype(float)

    def noise(self, size: int, sensitivity: float) -> np.ndarray:
        """Returns the sum of the Laplace noise of all sources."""
        scale = sensitivity / self.epsilon
        return self.rng.laplace(scale=scale, size=(self.sources, size)).sum(0)

    def acc(self, temperature: float) -> float:
        gap = (self.right - numpy_confidence(self.logits, temperature)).sum()
        return abs(float(gap + self.noise(1, ITERATIONS + 1)[0]))

    def nll(self, temperature: float) -> float:
        scaled = self.logits / temperature
        top = scaled.max(1)
        normaliser = np.log(np.exp(scaled - top[:, None]).sum(1)) + top
        losses = normaliser - scaled[np.arange(len(scaled)), self.labels]
        noise = self.noise(1, 10.0 * (ITERATIONS + 1))[0]  # each loss is clipped to 10
        return float(np.clip(losses, 0, 10).sum() + noise)

    def ece(self, temperature: float) -> float:
        confidence = numpy_confidence(self.logits, temperature)
        gaps = numpy_bins(confidence, self.right - confidence)
        return float(np.abs(gaps + self.noise(BINS, ITERATIONS + 1)).sum())

    def binned(self, test_confidence: np.ndarray) -> np.ndarray:
        """Returns the noisy accuracy of the bin of each test record."""
        confidence = numpy_confidence(self.logits, 1.0)
        noise = self.noise(2 * BINS, 2.0)
        hits = numpy_bins(confidence, self.right) + noise[:BINS]
        total = numpy_bins(confidence, np.ones(len(confidence))) + noise[BINS:]
        middle = (np.arange(BINS) + 0.5) / BINS
        filled = total > 0
        accuracy = np.clip(hits / np.where(filled, total, 1), 0, 1)
        return np.where(filled, accuracy, middle)[numpy_bin_of(test_confidence)]


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


FLAGS = {
    "trials": 500,
    "sample": (2, "trials per setting and method of the plain loop"),
    "shifts": (3, "ours runs this many, after one that compiles"),
}


def row_of(seconds: dict, means: dict) -> dict[str, float]:
    """Returns the row of a method, from seconds per trial and mean ECEs of both sides."""
    return {
        "ours, us per trial": 1e6 * float(np.median(seconds["ours"])),
        "NumPy, us per trial": 1e6 * float(np.median(seconds["numpy"])),
        "ratio": float(np.median(np.divide(seconds["numpy"], seconds["ours"]))),
        "mean ECE, ours": float(np.mean(means["ours"])),
        "mean ECE, numpy": float(np.mean(means["numpy"])),
    }


def measure(flags) -> dict:
    keep_freed_memory()
    order = Order.draw(0, records=RECORDS, trials=flags.trials, settings=SETTINGS)
    rng = np.random.default_rng(0)
    seconds = {name: {"ours": [], "numpy": []} for name in NAMES}
    means = {name: {"ours": [], "numpy": []} for name in NAMES}
    first_shift = all_shifts = 0.0
    for shift in range(flags.shifts + 1):
        logits, labels = logits_of(shift)
        records = Records(jnp.asarray(logits), jnp.asarray(labels))
        for name in NAMES:

            def plain(name=name, logits=logits, labels=labels):
                trials = itertools.product(SETTINGS, range(flags.sample))
                return [numpy_trial(name, logits, labels, setting, rng) for setting, _ in trials]

            key = jax.random.key(shift)
            sides = {"ours": functools.partial(ours, name, records, order, key), "numpy": plain}
            for side, call in sides.items():
                if shift == 0 and side == "numpy":
                    continue
                start = time.perf_counter()
                eces = call()
                elapsed = time.perf_counter() - start
                if side == "ours" and shift < flags.shifts:
                    all_shifts += elapsed
                if shift == 0:  # it compiles
                    first_shift += elapsed
                else:
                    seconds[name][side].append(elapsed / np.size(eces))
                    means[name][side].append(float(np.mean(eces)))
    rows = [{"method": name} | row_of(seconds[name], means[name]) for name in NAMES]
    totals = [sum(row[f"{side}, us per trial"] for row in rows) for side in ("ours", "NumPy")]
    trials = len(SETTINGS) * flags.trials * flags.shifts
    summary = {
        "ratio of all methods, compiled": totals[1] / totals[0],
        "ratio of all methods, with compilation": totals[1] / 1e6 * trials / all_shifts,
        "first shift, with compilation, seconds": first_shift,
        "as many shifts, with compilation, seconds": all_shifts,
        "peak memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(jaxdp.report.format_table(rows, digits=3))
    for name, value in summary.items():
        print(f"{name}: {value:.4g}")
    return vars(flags) | {"methods": rows} | summary
