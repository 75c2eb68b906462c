"""Times simulated recalibrations per second: `launch.simulation` beside a plain NumPy loop over
trials.

    python -m benchmarks run recalibration

The sweep is one shift of the paper's CIFAR-10 sweep: 10,000 labelled logits of 10 classes
(synthetic, over-confident), three factors of 10 settings, six methods. The NumPy loop follows the
paper, vectorised over records. For every trial and method it draws a random split, computes softmax
at every temperature that the search asks about, adds Laplace noise of every source, and computes
the ECE of the test split. It runs on a sample of the trials, between runs of ours. Times per trial
are means over settings and medians over shifts after the first, which compiles. The whole sweep is
`--shifts 15`."""

import math
import resource
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from jaxdp.memory import keep_freed_memory
from jaxdp.recalibration import AccT, Bracket, EceT, HistogramBinning, NllT, Records
from launch.simulation import Order, Setting, simulate, unchanged

RECORDS = 10_000
CLASSES = 10
BINS = 15
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
    """Returns the largest probability of each record."""
    scaled = logits / temperature
    exponentials = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities.max(axis=1)


def numpy_bin_of(confidence: np.ndarray) -> np.ndarray:
    number = (confidence * BINS).astype(int)
    return np.minimum(number, BINS - 1)


def numpy_bins(confidence: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.bincount(numpy_bin_of(confidence), values, minlength=BINS)


GOLDEN = (math.sqrt(5) - 1) / 2


def numpy_golden(objective: Callable, low: float, high: float, iterations: int) -> float:
    """Returns the minimum by golden-section search. It asks once more than it iterates."""
    left = high - GOLDEN * (high - low)
    right = low + GOLDEN * (high - low)
    at_left = objective(left)
    at_right = objective(right)
    for k in range(iterations):
        is_last = k == iterations - 1
        if at_left >= at_right:
            low = left
            left, at_left = right, at_right
            right = low + GOLDEN * (high - low)
            at_right = math.nan if is_last else objective(right)
        else:
            high = right
            right, at_right = left, at_left
            left = high - GOLDEN * (high - low)
            at_left = math.nan if is_last else objective(left)
    return (low + high) / 2


ITERATIONS = 5  # of the search, which asks once more than that
CLIP = 10.0  # of each negative log likelihood
OBJECTIVES = {"one source": "nll", "Acc-T": "acc", "NLL-T": "nll", "ECE-T": "ece"}


def numpy_trial(name: str, logits: np.ndarray, labels: np.ndarray, setting: Setting, rng) -> float:
    """Returns the ECE of the test split after one recalibration."""
    order = rng.permutation(len(labels))
    sources = setting.sources
    calibration, test = np.split(order, [sources * setting.samples])
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
    correct = logits[test].argmax(axis=1) == labels[test]
    gaps = numpy_bins(confidence, correct - confidence)
    return float(np.abs(gaps).sum() / len(test))


def numpy_trials(name: str, logits: np.ndarray, labels: np.ndarray, sample: int, rng) -> list:
    """Returns the errors of `sample` trials of each setting."""
    settings = [setting for setting in SETTINGS for _ in range(sample)]
    return [numpy_trial(name, logits, labels, setting, rng) for setting in settings]


class NumpyTrial(NamedTuple):
    """The noisy objectives of the calibration records of one trial."""

    logits: np.ndarray
    labels: np.ndarray
    sources: int
    epsilon: float
    rng: np.random.Generator

    @property
    def right(self) -> np.ndarray:
        guesses = self.logits.argmax(axis=1)
        return (guesses == self.labels).astype(float)

    def noise(self, size: int, sensitivity: float) -> np.ndarray:
        """Returns the sum of the Laplace noise of all sources."""
        scale = sensitivity / self.epsilon
        return self.rng.laplace(scale=scale, size=(self.sources, size)).sum(0)

    def acc(self, temperature: float) -> float:
        gaps = self.right - numpy_confidence(self.logits, temperature)
        (noise,) = self.noise(1, ITERATIONS + 1)
        return abs(float(gaps.sum() + noise))

    def nll(self, temperature: float) -> float:
        scaled = self.logits / temperature
        top = scaled.max(axis=1)
        sums = np.exp(scaled - top[:, None]).sum(axis=1)
        normaliser = np.log(sums) + top
        losses = normaliser - scaled[np.arange(len(scaled)), self.labels]
        clipped = np.clip(losses, 0, CLIP)
        (noise,) = self.noise(1, CLIP * (ITERATIONS + 1))
        return float(clipped.sum() + noise)

    def ece(self, temperature: float) -> float:
        confidence = numpy_confidence(self.logits, temperature)
        gaps = numpy_bins(confidence, self.right - confidence)
        noisy = gaps + self.noise(BINS, ITERATIONS + 1)
        return float(np.abs(noisy).sum())

    def binned(self, test_confidence: np.ndarray) -> np.ndarray:
        """Returns the noisy accuracy of the bin of each test record."""
        confidence = numpy_confidence(self.logits, 1.0)
        of_hits, of_total = np.split(self.noise(2 * BINS, 2.0), 2)
        hits = numpy_bins(confidence, self.right) + of_hits
        total = numpy_bins(confidence, np.ones(len(confidence))) + of_total
        middle = (np.arange(BINS) + 0.5) / BINS
        filled = total > 0
        accuracy = np.clip(hits / np.where(filled, total, 1), 0, 1)
        curve = np.where(filled, accuracy, middle)
        return curve[numpy_bin_of(test_confidence)]


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


class Timed(NamedTuple):
    """The seconds of a call and of each of its trials, and the mean of the errors it returns."""

    seconds: float
    per_trial: float
    error: float


def timed(call: Callable, *args) -> Timed:
    start = time.perf_counter()
    errors = call(*args)
    seconds = time.perf_counter() - start
    return Timed(seconds, seconds / np.size(errors), float(np.mean(errors)))


def row_of(name: str, runs: Sequence[tuple[Timed, Timed]]) -> dict:
    """Returns the row of a method from the runs of both sides."""
    seconds = np.array([[side.per_trial for side in pair] for pair in runs])
    errors = np.array([[side.error for side in pair] for pair in runs])
    ours, plain = np.median(seconds, axis=0)
    our_error, plain_error = errors.mean(axis=0)
    return {
        "method": name,
        "ours, us per trial": 1e6 * float(ours),
        "NumPy, us per trial": 1e6 * float(plain),
        "ratio": float(np.median(seconds[:, 1] / seconds[:, 0])),
        "mean ECE, ours": float(our_error),
        "mean ECE, numpy": float(plain_error),
    }


def measure(flags) -> dict:
    keep_freed_memory()
    order = Order.draw(0, records=RECORDS, trials=flags.trials, settings=SETTINGS)
    rng = np.random.default_rng(0)
    runs = {name: [] for name in NAMES}
    by_shift = []
    for shift in range(flags.shifts + 1):
        logits, labels = logits_of(shift)
        records = Records(jnp.asarray(logits), jnp.asarray(labels))
        total = 0.0
        for name in NAMES:
            mine = timed(ours, name, records, order, jax.random.key(shift))
            total += mine.seconds
            if shift > 0:  # the first one compiles
                theirs = timed(numpy_trials, name, logits, labels, flags.sample, rng)
                runs[name].append((mine, theirs))
        by_shift.append(total)
    rows = [row_of(name, of_method) for name, of_method in runs.items()]
    ours_us = sum(row["ours, us per trial"] for row in rows)
    numpy_us = sum(row["NumPy, us per trial"] for row in rows)
    trials = len(SETTINGS) * flags.trials * flags.shifts
    with_compilation = sum(by_shift[: flags.shifts])
    summary = {
        "ratio of all methods, compiled": numpy_us / ours_us,
        "ratio of all methods, with compilation": numpy_us / 1e6 * trials / with_compilation,
        "first shift, with compilation, seconds": by_shift[0],
        "as many shifts, with compilation, seconds": with_compilation,
        "peak memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    timing.show("a trial", rows)
    for name, value in summary.items():
        print(f"{name}: {value:.4g}")
    return vars(flags) | {"methods": rows} | summary
