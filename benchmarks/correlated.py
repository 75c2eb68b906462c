"""Correlated noise beside DP-SGD on two bundled sets, at equal epsilon, and the cost of its step.

    python -m benchmarks run correlated --update

The privacy of all methods is for one example, add/remove. DP-SGD has Poisson samples, whose
amplification its epsilon has. The others have the batches of a fixed order. Learning rates are the
best of two for each cell by the mean accuracy of the runs, which favours no method."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import pages, problems, timing
from jaxdp import data, finetune
from jaxdp.transforms import losses
from launch import results

EPSILONS = (1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
RATES = (0.5, 2.0)
# By method: the options of the noise of a fixed order, None for DP-SGD.
METHODS = {
    "DP-SGD, Poisson": None,
    "fixed order, independent": {"bands": 1},
    "fixed order, banded": {},
    "fixed order, BLT": {"strategy": "blt"},
}
FLAGS = {"runs": (3, "of each method, epsilon and rate")}
# By name: the size of a batch, the epochs and the width of the hidden layer.
TASKS = {"digits": (60, 4, 32), "breast_cancer": (16, 2, 8)}


@functools.cache
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


def logits(params, features: jax.Array) -> jax.Array:
    hidden = jnp.tanh(features @ params["in"] + params["shift"])
    return hidden @ params["out"]


def loss(params, example: Mapping[str, jax.Array]) -> jax.Array:
    return losses.softmax_cross_entropy(logits(params, example["features"]), example["label"])


def start(inputs: int, width: int, classes: int, seed: int):
    rng = np.random.default_rng(seed)
    return {
        "in": jnp.asarray(rng.normal(size=(inputs, width)) / np.sqrt(inputs), jnp.float32),
        "shift": jnp.zeros(width),
        "out": jnp.zeros((width, classes)),
    }


@functools.cache
def noise_of(task: str, method: str) -> tuple[Any, Any, int]:
    """Returns the sampler of a method, its noise, or None for DP-SGD, and the steps of a run."""
    batch_size, epochs, _ = TASKS[task]
    order = data.FixedOrderSampler(len(examples(task)[0]), batch_size)
    steps = epochs * order.steps_per_epoch
    options = METHODS[method]
    if options is None:
        share = order.expected_batch_size / order.num_examples
        return data.PoissonSampler(order.num_examples, share), None, steps
    return order, finetune.optimal_noise(order, steps=steps, **options), steps


def row_of(runs: int, task: str, method: str, epsilon: float) -> dict:
    """Returns the row of a cell: accuracies [runs] at the best rate."""
    sampler, noise, steps = noise_of(task, method)
    target = {"epsilon": epsilon, "delta": DELTA} | ({} if noise else {"steps": steps})
    row, trainer = best_row(task, runs, steps, sampler=sampler, noise=noise, **target)
    row = {"task": task, "method": method, "epsilon": epsilon, "steps": steps} | row
    return row | {"buffers": noise.buffers if noise else 0, "error": error(trainer, steps)}


def best_row(task: str, runs: int, steps: int, /, **options) -> tuple[dict, Any]:
    """Returns the best rate, its accuracies [runs] and what a run spends, and the last trainer."""
    private, test = examples(task)
    inputs, width = test["features"].shape[1], TASKS[task][2]
    by_rate = {}
    for rate in RATES:
        trainer = finetune.dp_sgd(loss, optax.sgd(rate), clip_norm=1.0, **options)
        accuracies = []
        for seed in range(runs):
            ledger = jaxdp.Ledger.in_memory()
            ledger.register(task, adjacency="add_remove", unit="example", delta=DELTA)
            state = finetune.fit(
                trainer,
                start(inputs, width, private.num_classes, seed),
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
    return {"rate": best, "accuracies": by_rate[best], "spent": ledger.epsilon(task)}, trainer


def error(trainer: finetune.PrivateTrainer, steps: int) -> float:
    privatizer = trainer.privatizer
    return problems.noise_error(privatizer.multiplier_at(0), privatizer.noise, steps)


def costs(rounds: int = 30) -> dict[str, float]:
    """Returns the least processor time of a step of an MLP 64-512-512-10, in ms, batches of 256.

    Rounds of the methods take turns. Processor time counts all threads, and no other process.
    """
    rng = np.random.default_rng(0)
    features = rng.normal(size=(1024, 64)).astype(np.float32)
    labels = rng.integers(10, size=1024)
    source = data.from_arrays(features=features, label=labels, num_classes=10)

    def wide(params, example):
        hidden = jnp.tanh(example["features"] @ params["in"])
        hidden = jnp.tanh(hidden @ params["hidden"])
        return losses.softmax_cross_entropy(hidden @ params["out"], example["label"])

    shapes = {"in": (64, 512), "hidden": (512, 512), "out": (512, 10)}
    params = {name: 0.05 * rng.normal(size=shape) for name, shape in shapes.items()}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)

    def repeated(trainer):
        def step(state):
            after, _ = trainer.step(state, source, meanwhile=lambda: None)
            return [after]

        return problems.stateful(step, trainer.init(params))

    steps = 10_000
    sampler = data.FixedOrderSampler(1024, 256)
    strategies = {"independent": np.ones(1)}
    for bands in (4, 16):
        strategies[f"{bands} bands"] = np.geomspace(1, 0.1, bands)
    steps_of = {}
    for name, strategy in strategies.items():
        noise = jaxdp.correlated(strategy, steps=steps, participations=2500, min_separation=4)
        trainer = finetune.dp_sgd(
            wide,
            optax.sgd(0.1),
            sampler=sampler,
            noise=noise,
            clip_norm=1.0,
            noise_multiplier=1.0,
            physical_batch_size=256,
        )
        steps_of[name] = repeated(trainer)
    _, cpu = timing.interleaved(steps_of, 2 + rounds, warm=False)
    return {name: 1e3 * min(taken[2:]) for name, taken in cpu.items()}


def cell(row: Mapping) -> str:
    return f"{pages.accuracy(row)}, {row['error']:.3g}"


def tables(report) -> dict:
    markdown = {}
    for task in TASKS:
        rows = results.select(report["rows"], task=task)
        markdown[task] = pages.by_epsilon(rows, "method", "noise", cell, {"buffers": "{buffers}"})
    independent = report["costs"]["independent"]
    columns = {
        "noise": lambda item: item[0],
        "processor ms a step": lambda item: f"{item[1]:.2f}",
        "over independent": lambda item: f"{item[1] / independent:.2f}",
    }
    return markdown | {"costs": pages.lines(report["costs"].items(), columns)}


def measure(flags) -> dict:
    taken = costs()
    print(json.dumps(taken), flush=True)
    run = functools.partial(row_of, flags.runs)
    return {"costs": taken, "rows": timing.swept(run, TASKS, METHODS, EPSILONS)}
