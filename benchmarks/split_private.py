"""What a client with few images can release under a real epsilon: accuracy for n images per class.

    python -m benchmarks run split_private --checkpoint FILE --data_dir DIR

The client has features of a public SqueezeNet for n images of each of the ten classes of CIFAR-10.
CIFAR-100 is public, without labels. Every way is (epsilon, delta)-DP for replacing one image with
its label. The numbers n are public.

    images      the private mode of jaxdp.split: each image on public directions with noise, and randomised labels
    means       the sum of the clipped coordinates of each class, with Gaussian noise
    prototypes  how many images of a class are nearest to each of 50 public cluster centres, with Gaussian noise
    votes       the client labels public images by noisy votes of disjoint teachers (Papernot et al. 2018, GNMax)

The server predicts by the nearest class mean."""  # noqa: E501

import functools
import itertools
import math
import pathlib
import time
from collections.abc import Mapping

import jax
import numpy as np

from benchmarks import finetune_methods, pages, timing
from jaxdp import split
from jaxdp.models import Features
from jaxdp.privacy import GaussianDpEvent, SelfComposedDpEvent, calibrate_noise
from jaxdp.report import plot_curves
from launch import results

Array = np.ndarray
Generator = np.random.Generator
CLASSES = 10
DELTA = 1e-5
DRAWS = 5
EPSILONS = (1.0, 2.0, 4.0, 8.0, 32.0, math.inf)
PER_CLASS = (10, 50, 200)
DIMENSIONS = 16
CENTRES = 50
QUERIES = 100
WAYS = ("images", "means", "prototypes", "votes")


@functools.cache
def multiplier(epsilon: float, sensitivity: float, count: int = 1) -> float:
    """Returns the noise over which `count` Gaussian answers of a sensitivity are (epsilon,
    DELTA)-DP."""
    if epsilon == math.inf:
        return 0.0

    def answers(noise_multiplier):
        return SelfComposedDpEvent(GaussianDpEvent(noise_multiplier), count)

    return sensitivity * calibrate_noise(answers, epsilon=epsilon, delta=DELTA)


def nearest(x: Array, points: Array) -> Array:
    """Returns the index of the nearest point [m, r] for each row of x [n, r]."""
    # The squares of x are the same for all points.
    distances = np.square(points).sum(axis=1) - 2 * x @ points.T
    return distances.argmin(axis=1)


def clipped(x: Array, norm: float) -> Array:
    """Returns the rows of x, shortened to an L2 norm."""
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x * np.minimum(1, norm / np.maximum(norms, 1e-12))


def class_means(x: Array, y: Array) -> Array:
    """Returns the mean of each class. A class without rows has a mean that is never nearest."""
    never_nearest = np.full((CLASSES, x.shape[1]), 1e6)
    return means_of(x, y, never_nearest)


def means_of(x: Array, group: Array, otherwise: Array) -> Array:
    """Returns the mean of each group of rows, or its row of `otherwise` without rows."""
    means = []
    for number, empty in enumerate(otherwise):
        rows = x[group == number]
        means.append(rows.mean(0) if len(rows) else empty)
    return np.stack(means)


class Server:
    """What is public: coordinates of public images, their clip norm and their cluster centres."""

    def __init__(self, public: Array):
        self.map = Features.from_public(public, dimensions=DIMENSIONS, whiten=0.5)
        self.public = self.map(public)
        self.clip = float(np.median(np.linalg.norm(self.public, axis=1)))
        self.centres = self.public[:CENTRES]
        for _ in range(20):  # Lloyd's algorithm
            cluster = nearest(self.public, self.centres)
            self.centres = means_of(self.public, cluster, self.centres)

    # A way maps features [n, r], labels [n], an epsilon and a generator to class means.

    def images(self, x: Array, y: Array, epsilon: float, random: Generator) -> Array:
        release = split.PrivateRelease.calibrated(
            epsilon=epsilon, delta=DELTA, clip_norm=self.clip, num_classes=CLASSES
        )
        # The coordinates are on public directions already.
        zero = np.zeros((1, DIMENSIONS), np.float32)
        same = split.Projection(zero, np.eye(DIMENSIONS, dtype=np.float32))
        seed = int(random.integers(2**31))
        key = jax.random.key(seed, impl="threefry2x32")
        sent = release.release(key, x[:, None], labels=y, projection=same)
        return class_means(np.asarray(sent.features), np.asarray(sent.labels))

    def means(self, x: Array, y: Array, epsilon: float, random: Generator) -> Array:
        inside = clipped(x, self.clip)
        sums = np.stack([inside[y == label].sum(axis=0) for label in range(CLASSES)])
        # A replaced image leaves one sum and joins another, or moves one by twice the clip norm.
        noise = multiplier(epsilon, 2 * self.clip) * random.normal(size=sums.shape)
        return (sums + noise) * CLASSES / len(y)

    def prototypes(self, x: Array, y: Array, epsilon: float, random: Generator) -> Array:
        counts = np.zeros((CLASSES, CENTRES))
        np.add.at(counts, (y, nearest(x, self.centres)), 1)
        noise = multiplier(epsilon, math.sqrt(2)) * random.normal(size=counts.shape)
        sums = (counts + noise) @ self.centres
        return sums * CLASSES / len(y)

    def votes(self, x: Array, y: Array, epsilon: float, random: Generator) -> Array:
        queries = self.public[random.choice(len(self.public), QUERIES, replace=False)]
        teachers = max(2, len(y) // (5 * CLASSES))  # about five images of a class each
        part = random.permutation(len(y)) % teachers
        tally = np.zeros((QUERIES, CLASSES))
        for teacher in range(teachers):
            mine = part == teacher
            answers = nearest(queries, class_means(x[mine], y[mine]))
            tally[np.arange(QUERIES), answers] += 1
        noise = multiplier(epsilon, math.sqrt(2), QUERIES) * random.normal(size=tally.shape)
        return class_means(queries, (tally + noise).argmax(axis=1))


def run(arrays: Mapping[str, Array]) -> list[dict]:
    """Returns the accuracy of every way, epsilon, number of images per class and draw of them."""
    server = Server(arrays["public"])
    private = server.map(arrays["private"])
    test = server.map(arrays["test"])
    label = arrays["private_label"]
    rows = []
    for draw in range(DRAWS):
        random = np.random.default_rng(draw)
        for count in PER_CLASS:
            few = _few_shots(label, count, random)
            for way, epsilon in itertools.product(WAYS, EPSILONS):
                release = getattr(server, way)
                means = release(private[few], label[few], epsilon, random)
                right = nearest(test, means) == arrays["test_label"]
                row = {"way": way, "epsilon": epsilon, "per_class": count}
                rows.append(row | {"seed": draw, "accuracy": float(right.mean())})
    return rows


def _few_shots(label: Array, count: int, random: Generator) -> Array:
    """Returns the rows of `count` random images of each class."""
    rows = []
    for number in range(CLASSES):
        shuffled = random.permutation(np.flatnonzero(label == number))
        rows.append(shuffled[:count])
    return np.concatenate(rows)


def _accuracies(report: Mapping, **cell) -> list[float]:
    """Returns the accuracies of a cell over its draws."""
    return [row["accuracy"] for row in results.select(report["rows"], **cell)]


def tables(report) -> dict:
    """Returns the accuracy of each release by epsilon."""
    titles = {epsilon: f"epsilon {epsilon:g}" for epsilon in EPSILONS}
    titles[math.inf] = "no privacy"
    lines = []
    for count, way in itertools.product(PER_CLASS, WAYS):
        line = {"images per class": str(count), "release": way}
        for epsilon, title in titles.items():
            cell = {"way": way, "per_class": count, "epsilon": epsilon}
            line[title] = pages.mean(_accuracies(report, **cell))
        lines.append(line)
    return {"private": lines}


def draw(found: Mapping, path: pathlib.Path, count: int = 50):
    """Draws accuracy over epsilon for one number of images per class."""
    finite = EPSILONS[:-1]
    curves = {way: [] for way in WAYS}
    for way, epsilon in itertools.product(WAYS, finite):
        accuracies = _accuracies(found, way=way, per_class=count, epsilon=epsilon)
        curves[way].append((epsilon, results.moments(accuracies).mean))
    plot_curves(
        path,
        curves,
        title=f"{count} private images per class of CIFAR-10",
        subtitle=f"mean of {DRAWS} draws, delta = {DELTA:g}",
        xlabel="epsilon",
        ylabel="test accuracy",
        xscale="log",
        xticks={epsilon: f"{epsilon:g}" for epsilon in finite},
        references={"chance": 1 / CLASSES},
    )


FLAGS = finetune_methods.FLAGS  # the features are the same


def measure(flags) -> dict:
    began = time.process_time()
    rows = run(finetune_methods.features(flags))
    seconds = round(time.process_time() - began)
    report = {"cpu_seconds": seconds, "rows": rows}
    timing.show("private", tables(report)["private"])
    return report
