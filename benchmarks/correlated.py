"""Correlated noise beside DP-SGD on two bundled sets, at equal epsilon, and the cost of its step.

    python -m benchmarks run correlated --update

The privacy of all methods is for one example, add/remove. DP-SGD has Poisson samples, whose
amplification its epsilon has. The others have the batches of a fixed order. Learning rates are the
best of two for each cell by the mean accuracy of the runs, which favours no method."""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import timing
from jaxdp import data, finetune
from jaxdp.transforms import losses

EPSILONS = (1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
RATES = (0.5, 2.0)
METHODS = ("DP-SGD, Poisson", "fixed order, independent", "fixed order, banded", "fixed order, BLT")
# By name: the size of a batch, the epochs and the width of the hidden layer.
TASKS = {"digits": (60, 4, 32), "breast_cancer": (16, 2, 8)}


def examples(name: str) -> tuple[data.Examples, Mapping[str, np.ndarray]]:
    """Returns private examples and a test batch of a bundled set, three quarters and a quarter."""
    source = data.bundled(name)
    order = np.random.default_rng(0).permutation(len(source))
    cut = len(source) * 3 // 4
    batch = source.gather(order)
    (field,) = set(batch) - {"label"}
    values = np.asarray(batch[field], np.float32).reshape(len(source), -1)
    if name == "breast_cancer":
        # The ranges of the columns are public here: the set is.
        values = values / np.abs(values).max(axis=0)
    arrays = {"features": values, "label": np.asarray(batch["label"])}
    private = {key: value[:cut] for key, value in arrays.items()}
    test = {key: value[cut:] for key, value in arrays.items()}
    return data.from_arrays(**private, num_classes=source.num_classes), test


def logits(params: Any, features: jax.Array) -> jax.Array:
    hidden = jnp.tanh(features @ params["in"] + params["shift"])
    return hidden @ params["out"]


def loss(params: Any, example: Mapping[str, jax.Array]) -> jax.Array:
    return losses.softmax_cross_entropy(logits(params, example["features"]), example["label"])


def start(inputs: int, width: int, classes: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "in": jnp.asarray(rng.normal(size=(inputs, width)) / np.sqrt(inputs), jnp.float32),
        "shift": jnp.zeros(width),
        "out": jnp.zeros((width, classes)),
    }


def noise_of(method: str, sampler: data.FixedOrderSampler, steps: int) -> Any:
    """Returns the noise of a method, or None for DP-SGD."""
    match method:
        case "DP-SGD, Poisson":
            return None
        case "fixed order, independent":
            return finetune.optimal_noise(sampler, steps=steps, bands=1)
        case "fixed order, banded":
            return finetune.optimal_noise(sampler, steps=steps)
    return finetune.optimal_noise(sampler, steps=steps, strategy="blt")


def trainer_of(
    method: str, records: int, batch_size: int, steps: int, rate: float, noise: Any, **target: Any
) -> finetune.PrivateTrainer:
    sampler: Any = data.FixedOrderSampler(records, batch_size)
    if noise is None:
        sampler = data.PoissonSampler(records, sampler.expected_batch_size / records)
        if "epsilon" in target:
            target["steps"] = steps
    return finetune.dp_sgd(
        loss, optax.sgd(rate), sampler=sampler, noise=noise, clip_norm=1.0, **target
    )


def rows_of(task: str, method: str, runs: int) -> list[dict[str, Any]]:
    """Returns a row for each epsilon: accuracies [runs] at the best rate."""
    batch_size, epochs, width = TASKS[task]
    private, test = examples(task)
    sampler = data.FixedOrderSampler(len(private), batch_size)
    steps = epochs * sampler.steps_per_epoch
    noise = noise_of(method, sampler, steps)
    classes, inputs = private.num_classes, test["features"].shape[1]
    rows = []
    for epsilon in EPSILONS:
        by_rate = {}
        for rate in RATES:
            trainer = trainer_of(
                method, len(private), batch_size, steps, rate, noise, epsilon=epsilon, delta=DELTA
            )
            accuracies = []
            for seed in range(runs):
                ledger = jaxdp.Ledger.in_memory()
                ledger.register(task, adjacency="add_remove", unit="example", delta=DELTA)
                state = finetune.fit(
                    trainer,
                    start(inputs, width, classes, seed),
                    private,
                    steps=steps,
                    account=ledger.account(task),
                    progress=False,
                    checkpoint_every=steps,
                )
                guesses = logits(state.params, test["features"]).argmax(axis=1)
                accuracies.append(float((guesses == test["label"]).mean()))
            by_rate[rate] = accuracies
        best = max(by_rate, key=lambda rate: np.mean(by_rate[rate]))
        row = {"task": task, "method": method, "epsilon": epsilon, "steps": steps}
        row |= {"rate": best, "accuracies": by_rate[best], "spent": ledger.epsilon(task)}
        row |= {"buffers": noise.buffers if noise else 0, "error": error(trainer, steps)}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def error(trainer: finetune.PrivateTrainer, steps: int) -> float:
    """Returns the root mean squared error of the sum of noise until a step, in clip norms."""
    privatizer = trainer.privatizer
    sigma = privatizer.multiplier_at(0)
    if privatizer.noise is None:
        return float(sigma * np.sqrt((steps + 1) / 2))
    multiplier = sigma / privatizer.noise.sensitivity
    return float(multiplier * np.sqrt(privatizer.noise.error().mean()))


def costs(rounds: int = 30) -> dict[str, float]:
    """Returns the least processor time of a step of an MLP 64-512-512-10, in ms, batches of 256.

    Rounds of the methods take turns. Processor time counts all threads, and no other process.
    """
    rng = np.random.default_rng(0)
    features = rng.normal(size=(1024, 64)).astype(np.float32)
    labels = rng.integers(10, size=1024)
    source = data.from_arrays(features=features, label=labels, num_classes=10)

    def wide(params: Any, example: Mapping[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(example["features"] @ params["in"])
        hidden = jnp.tanh(hidden @ params["hidden"])
        return losses.softmax_cross_entropy(hidden @ params["out"], example["label"])

    shapes = {"in": (64, 512), "hidden": (512, 512), "out": (512, 10)}
    params = {name: 0.05 * rng.normal(size=shape) for name, shape in shapes.items()}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    steps = 10_000
    sampler = data.FixedOrderSampler(1024, 256)
    strategies = {"independent": np.ones(1)}
    for bands in (4, 16):
        strategies[f"{bands} bands"] = np.geomspace(1, 0.1, bands)
    states, trainers, times = {}, {}, {}
    for name, strategy in strategies.items():
        noise = jaxdp.correlated(strategy, steps=steps, participations=2500, min_separation=4)
        trainers[name] = finetune.dp_sgd(
            wide,
            optax.sgd(0.1),
            sampler=sampler,
            noise=noise,
            clip_norm=1.0,
            noise_multiplier=1.0,
            physical_batch_size=256,
        )
        states[name] = trainers[name].init(params)
        times[name] = []
    for _ in range(rounds + 2):
        for name, trainer in trainers.items():
            begun = time.process_time()
            states[name], _ = trainer.step(states[name], source, meanwhile=lambda: None)
            jax.block_until_ready(states[name].params)
            times[name].append(1e3 * (time.process_time() - begun))
    return {name: min(taken[2:]) for name, taken in times.items()}


def tables_of_tasks(
    rows: Sequence[Mapping[str, Any]],
    methods: Iterable[str],
    head: Sequence[str],
    line_of: Callable[[str, Sequence[Mapping[str, Any]]], Sequence[str]],
) -> dict[str, str]:
    """Returns a table for each task, with the line `line_of(method, rows)` for each method.

    The rows of a method ascend with epsilon, and so do the columns after those of `head`.
    """
    header = [*head, *(f"epsilon {e:g}" for e in EPSILONS)]
    ascending = sorted(rows, key=lambda row: row["epsilon"])
    pages = {}
    for task in TASKS:
        lines = []
        for method in methods:
            own = [row for row in ascending if (row["task"], row["method"]) == (task, method)]
            lines.append(line_of(method, own))
        pages[task] = timing.page_table(header, lines)
    return pages


def _line(method: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [f"{timing.accuracy(row)}, {row['error']:.3g}" for row in rows]
    return [method, f"{rows[0]['buffers']}", *cells]


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of a report."""
    pages = tables_of_tasks(report["rows"], METHODS, ["noise", "buffers"], _line)
    costs = report["costs"]
    lines = [
        [name, f"{taken:.2f}", f"{taken / costs['independent']:.2f}"]
        for name, taken in costs.items()
    ]
    pages["costs"] = timing.page_table(["noise", "processor ms a step", "over independent"], lines)
    return pages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=3, help="of each method, epsilon and rate")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    taken = costs()
    print(json.dumps(taken), flush=True)
    rows: list[Mapping[str, Any]] = []
    for task in TASKS:
        for method in METHODS:
            rows += rows_of(task, method, flags.runs)
    return {"costs": taken, "rows": rows}
