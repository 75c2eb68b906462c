"""Lemma A.1 and Theorem 1 of Wang et al. 2024 beside what training does, on bundled digits.

    python -m benchmarks run dpadapter_theory --update

The lemma stands beside four pre-trained networks (configs/pretrain/digits.py). The theorem stands
beside softmax regression with weight decay, whose constants are known: the features x of an image
are its pixels and a one, so that f is linear in theta, rho = max ||x|| and beta = 0. Weight decay
gives a PL constant of 1 / (2 lambda). Nothing is private."""

import contextlib
import functools
import io
import itertools
import math
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs.pretrain import digits
from jaxdp import pretrain
from jaxdp.data import FixedBatchSampler, bundled
from jaxdp.privacy import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    calibrate_noise,
    epsilon,
)
from jaxdp.report import format_table, plot_panels
from launch import frame, results
from launch import pretrain as study

METHODS = ("standard", "sam", "dpadapter", "amp")
SIZES = ((50, 50), (500, 50), (50, 500), (275, 275))
STEPS, SEEDS = 1000, 3
DECAY = 0.05
MARKS = tuple(sorted({round(10 ** (k / 8)) for k in range(8 * 3 + 1)}))
ROUNDS = (1000, 1e-5)  # examples and delta of Algorithm 2
SHOWN = 0.5  # the length of the changes in the table
PIXEL = 16  # the digits have 16 levels. Features of 0 to 16 are another unit of the same problem.


def lemma(method: str) -> list[dict]:
    """Returns the changes of a pre-trained network, and what the lemma allows."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        result = frame.run(study.STUDY, digits.get_config(method), pathlib.Path(folder, "run"))
    return [{"method": method, **row} for row in result["changes"]]


class Regression:
    """Softmax regression with weight decay on the digits, in float64 where it is judged."""

    def __init__(self):
        source = bundled("digits")
        rows = source.gather(np.arange(len(source)))
        pixels = rows["image"].reshape(len(source), -1).astype(np.float64)
        self.x = np.concatenate([pixels, np.ones((len(pixels), 1))], 1)
        self.labels = np.eye(10)[rows["label"]]
        rho = float(np.linalg.norm(self.x, axis=1).max())
        self.smoothness = pretrain.loss_constants(rho, 0.0).smoothness + DECAY
        self.start = np.zeros((self.x.shape[1], 10))
        theta = self.start
        for _ in range(3500):  # contracts by 1 - decay / smoothness a step
            theta = theta - self.gradients(theta).mean(0).T / self.smoothness
        self.least = self.loss(theta)
        self.gap = self.loss(self.start) - self.least

    def errors(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns losses [n] without decay, and p - e_y [n, 10]."""
        logits = self.x @ theta
        logits -= logits.max(1, keepdims=True)
        normal = np.log(np.exp(logits).sum(1, keepdims=True))
        losses = -np.sum(self.labels * (logits - normal), 1)
        return losses, np.exp(logits - normal) - self.labels

    def loss(self, theta: np.ndarray) -> float:
        """Returns the mean loss."""
        return float(self.errors(theta)[0].mean() + DECAY / 2 * np.sum(theta**2))

    def gradients(self, theta: np.ndarray) -> np.ndarray:
        """Returns the mean gradient [1, 10, 65]."""
        _, errors = self.errors(theta)
        return (errors.T @ self.x / len(self.x) + DECAY * theta.T)[None]

    def variance(self, theta: np.ndarray) -> float:
        """Returns E ||grad L_i - grad L||^2."""
        _, errors = self.errors(theta)
        squares = np.sum(errors**2, 1) * np.sum(self.x**2, 1)
        mean = errors.T @ self.x / len(self.x)
        return float(squares.mean() - np.sum(mean**2))


def batch_loss(theta, batch) -> jax.Array:
    losses = optax.softmax_cross_entropy(batch["x"] @ theta, batch["label"])
    return losses.mean() + DECAY / 2 * jnp.sum(theta**2)


def run(problem: Regression, sizes: tuple[int, int], seed: int) -> tuple[np.ndarray, float]:
    """Returns the excess losses of theta_0 to theta_{T-1}, and the largest variance on the way."""
    rate = 1 / (4 * problem.smoothness)
    sgd = optax.sgd(rate)
    trainer = pretrain.dpadapter(batch_loss, sgd, gamma=math.inf, ascent_rate=rate)  # Eq. 6
    samplers = [
        FixedBatchSampler(len(problem.x), size, seed=bytes([seed, k]) + bytes(14))
        for k, size in enumerate(sizes)
    ]
    state, excess, variance = trainer.init(np.float32(problem.start)), [], 0.0
    for step in range(STEPS):
        theta = np.asarray(state.params, np.float64)
        excess.append(problem.loss(theta) - problem.least)
        batches = []
        for sampler in samplers:
            rows = sampler.batch(step)
            x, labels = np.float32(problem.x[rows]), np.float32(problem.labels[rows])
            batches.append({"x": x, "label": labels})
        state, _ = trainer.step(state, *batches)
        if step % 10 == 0:
            ascended = theta + np.asarray(state.perturbation, np.float64)
            variance = max(variance, problem.variance(theta), problem.variance(ascended))
    return np.array(excess), variance


def theorem(problem: Regression, sizes: tuple[int, int]) -> dict:
    """Returns the mean excess loss and the bounds for some numbers of steps."""
    runs = [run(problem, sizes, seed) for seed in range(SEEDS)]
    variance = max(variance for _, variance in runs)
    means = np.mean([np.cumsum(excess) / np.arange(1, STEPS + 1) for excess, _ in runs], 0)
    first, second = sizes
    points = []
    for steps in MARKS:
        corrected = pretrain.excess_loss_bound(
            steps,
            smoothness=problem.smoothness,
            pl_constant=1 / (2 * DECAY),
            variance=variance,
            gap=problem.gap,
            perturbation_batch_size=first,
            update_batch_size=second,
        )
        # Theorem 1 as printed. In pixels of 0 to 16 lambda, sigma^2 and beta^ are 256 times as
        # large, and training is the same.
        noise = variance * (1 / first + 1 / second) / (16 * problem.smoothness)
        printed = (problem.gap / steps + noise) / (2 * DECAY)
        points.append(
            {
                "steps": steps,
                "measured": float(means[steps - 1]),
                "corrected": corrected,
                "printed": printed,
                "printed, pixels of 0 to 16": printed / PIXEL**2,
            }
        )
    return {"m1": first, "m2": second, "variance": variance, "points": points}


def rounds(target: float) -> dict[str, float]:
    """Returns what all n^2 rounds of Algorithm 2 spend with the noise of Eq. 9 for an epsilon, and
    with the missing factor 1 / epsilon^2.
    """
    n, delta = ROUNDS
    printed = 2 * math.sqrt(math.log(3 * n / delta) * math.log(2 / delta))

    def all_rounds(noise):
        return SelfComposedDpEvent(PoissonSampledDpEvent(1 / n, GaussianDpEvent(noise)), n**2)

    def spent(noise):
        return epsilon(all_rounds(noise), delta=delta)

    meant = calibrate_noise(all_rounds, epsilon=target, delta=delta)
    return {
        "epsilon": target,
        "spent as printed": spent(printed),
        "spent with 1 / epsilon^2": spent(printed / target),
        "noise as printed": printed,
        "noise that is needed": meant,
    }


def measure(flags) -> dict:
    problem = Regression()
    changes = itertools.chain.from_iterable(map(lemma, METHODS))
    return {
        "lemma": list(changes),
        "smoothness": problem.smoothness,
        "gap": problem.gap,
        "theorem": [theorem(problem, sizes) for sizes in SIZES],
        "rounds": [rounds(target) for target in (0.05, 0.1, 1.0, 4.0)],
    }


def tables(report) -> dict:
    lines = []
    for method, direction in dict.fromkeys((r["method"], r["direction"]) for r in report["lemma"]):
        mine = results.select(report["lemma"], method=method, direction=direction)
        row = min(mine, key=lambda row: abs(row["length"] - SHOWN))
        line = {name: row[name] for name in ("method", "direction", "rho", "beta")}
        for of in ("loss", "gradient"):
            line |= {of: row[of], f"{of} bound": row[f"{of}_bound"]}
        lines.append(line)
    bounds = []
    for case in report["theorem"]:
        for point in case["points"]:
            if point["steps"] in (1, 10, 100, STEPS):
                bounds.append({"m1": case["m1"], "m2": case["m2"], **point})
    three_digits = functools.partial(format_table, style="markdown", digits=3)
    return {
        "lemma": three_digits(lines),
        "theorem": three_digits(bounds),
        "rounds": three_digits(report["rounds"]),
    }


def draw_lemma(report, path: pathlib.Path):
    """Draws the measured changes of the loss as shares of the bound of the lemma."""
    panels = {}
    for direction in ("gradient", "noise"):
        curves = {}
        for row in report["lemma"]:
            if row["direction"] == direction:
                share = row["loss"] / row["loss_bound"]
                curves.setdefault(row["method"], []).append((row["length"], share))
        panels[f"along {'the ' * (direction == 'gradient')}{direction}"] = ("norm(Delta)", curves)
    plot_panels(
        path,
        panels,
        title="Lemma A.1 beside pre-trained networks on digits",
        subtitle="The largest change of an example's loss, as a share of the bound",
        ylabel="share of the bound",
        yscale="log",
    )


def draw(report, path: pathlib.Path):
    """Draws the bounds of the theorem beside the measured mean."""
    panels = {}
    for case in report["theorem"]:
        curves = {}
        for name in filter(lambda name: name != "steps", case["points"][0]):
            curves[name] = [(math.log10(point["steps"]), point[name]) for point in case["points"]]
        panels[f"m1 = {case['m1']}, m2 = {case['m2']}"] = ("log10 of the steps T", curves)
    plot_panels(
        path,
        panels,
        title="Theorem 1 beside softmax regression on digits",
        subtitle=f"Mean excess loss over the steps, {SEEDS} seeds, and its bounds",
        ylabel="mean excess loss",
        yscale="log",
    )
