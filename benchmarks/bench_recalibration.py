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

import math
import resource
import time
from collections.abc import Callable

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


def numpy_trial(
    name: str, logits: np.ndarray, labels: np.ndarray, setting: Setting, rng: np.random.Generator
) -> float:
    """Returns the ECE of the test split after one recalibration."""
    order = rng.permutation(len(labels))
    used = setting.sources * setting.samples
    test = order[used:]
    calibration = order[:used]
    sources = setting.sources
    if name == "one source":
        calibration = order[: setting.samples]
        sources = 0  # a source alone adds no noise
    trial = NumpyTrial(logits[calibration], labels[calibration], sources, setting.epsilon, rng)
    if name == "histogram binning":
        confidence = trial.binned(numpy_confidence(logits[test], 1.0))
    else:
        temperature = 1.0
        if name != "none":
            objectives = {
                "one source": trial.nll,
                "Acc-T": trial.acc,
                "NLL-T": trial.nll,
                "ECE-T": trial.ece,
            }
            temperature = numpy_golden(objectives[name], 0.5, 3.0, ITERATIONS)
        confidence = numpy_confidence(logits[test], temperature)
    correct = logits[test].argmax(1) == labels[test]
    return float(np.abs(numpy_bins(confidence, correct - confidence)).sum() / len(test))


ITERATIONS = 5  # of the search, which asks once more than that


class NumpyTrial:
    """The noisy objectives of the calibration records of one trial."""

    def __init__(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        sources: int,
        epsilon: float,
        rng: np.random.Generator,
    ):
        self.logits = logits
        self.labels = labels
        self.right = (logits.argmax(1) == labels).astype(float)
        self.sources = sources
        self.epsilon = epsilon
        self.rng = rng

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
        values = np.where(filled, accuracy, middle)
        index = np.minimum((test_confidence * BINS).astype(int), BINS - 1)
        return values[index]


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


class Sweep:
    """Seconds per trial and mean ECEs of a method, of ours and of the NumPy loop."""

    def __init__(self):
        self.seconds = {side: [] for side in SIDES}
        self.means = {side: [] for side in SIDES}

    def add(self, side: str, seconds: float, eces):
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


def measure(flags) -> dict:
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
