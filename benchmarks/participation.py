"""Who takes part, beside DP-SGD, at equal epsilon on two bundled sets.

    python -m benchmarks run participation --update

Tasks, models and learning rates are those of `benchmarks.correlated`. All patterns have batches of
one expected size, and equal steps. The groups of cyclic Poisson sampling are the power of two with
the least error of the sums of noise."""

import argparse
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax

import jaxdp
from benchmarks import correlated, timing
from benchmarks.correlated import DELTA, EPSILONS, RATES, TASKS, logits
from jaxdp import data, finetune
from jaxdp.finetune.strategies import amplified_plans

# Simulated accounts of a few seconds. More draws would need a little less noise.
_DRAWS_OF_BINS = 2**14
_DRAWS_OF_RENEWALS = 2**13
# Of b-min-sep. The bound of its simulation is loose where a record can be in many steps.
_SEPARATION = 16
Choice = tuple[Any, Any]  # a sampler, and its correlated noise or None


def poisson(order: data.FixedOrderSampler, steps: int, epsilon: float) -> Choice:
    share = order.expected_batch_size / order.num_examples
    return data.PoissonSampler(order.num_examples, share), None


def cyclic_poisson(order: data.FixedOrderSampler, steps: int, epsilon: float) -> Choice:
    groups = best_groups(order, steps, epsilon)
    share = groups * order.expected_batch_size / order.num_examples
    sampler = data.CyclicPoissonSampler(order.num_examples, share, cycle_length=groups)
    return sampler, finetune.optimal_noise(sampler, steps=steps, bands=groups)


def balls_in_bins(order: data.FixedOrderSampler, steps: int, epsilon: float) -> Choice:
    sampler = data.BallsInBinsSampler(
        num_examples=order.num_examples,
        bins=order.steps_per_epoch,
        steps=steps,
        draws=_DRAWS_OF_BINS,
    )
    return sampler, finetune.optimal_noise(sampler, steps=steps, strategy="blt")


def b_min_sep(order: data.FixedOrderSampler, steps: int, epsilon: float) -> Choice:
    share = order.expected_batch_size / order.num_examples
    # The p with which a record is in that share of the steps.
    p = share / (1 - (_SEPARATION - 1) * share)
    sampler = data.BMinSepSampler(
        num_examples=order.num_examples,
        sampling_probability=min(1.0, p),
        separation=_SEPARATION,
        steps=steps,
        draws=_DRAWS_OF_RENEWALS,
    )
    return sampler, finetune.optimal_noise(sampler, steps=steps, bands=_SEPARATION)


def fixed_order(order: data.FixedOrderSampler, steps: int, epsilon: float) -> Choice:
    return order, finetune.optimal_noise(order, steps=steps)


METHODS: Mapping[str, Callable[[data.FixedOrderSampler, int, float], Choice]] = {
    "Poisson, independent (DP-SGD)": poisson,
    "cyclic Poisson, banded": cyclic_poisson,
    "balls in bins, BLT": balls_in_bins,
    "b-min-sep, banded": b_min_sep,
    "fixed order, banded": fixed_order,
}


@functools.cache
def best_groups(order: data.FixedOrderSampler, steps: int, epsilon: float) -> int:
    """Returns the number of groups whose sums of noise have the least error at an epsilon."""
    plans = amplified_plans(order, steps=steps, epsilon=epsilon, delta=DELTA)
    errors = [
        sigma / noise.sensitivity * np.sqrt(noise.error().mean()) for _, noise, sigma in plans
    ]
    sampler, _, _ = plans[int(np.argmin(errors))]
    return sampler.cycle_length


def row_of(task: str, method: str, epsilon: float, runs: int) -> dict[str, Any]:
    """Returns the row of a cell: accuracies [runs] at the best rate."""
    batch_size, epochs, width = TASKS[task]
    private, test = correlated.examples(task)
    order = data.FixedOrderSampler(len(private), batch_size)
    steps = epochs * order.steps_per_epoch
    sampler, noise = METHODS[method](order, steps, epsilon)
    target = {"epsilon": epsilon, "delta": DELTA, "steps": steps}
    sigma = finetune.options.calibrated(sampler, noise=noise, **target)
    classes, inputs = private.num_classes, test["features"].shape[1]
    by_rate = {}
    for rate in RATES:
        trainer = finetune.dp_sgd(
            correlated.loss,
            optax.sgd(rate),
            sampler=sampler,
            noise=noise,
            clip_norm=1.0,
            noise_multiplier=sigma,
            physical_batch_size=2 * batch_size,
        )
        accuracies = []
        for seed in range(runs):
            ledger = jaxdp.Ledger.in_memory()
            ledger.register(task, adjacency="add_remove", unit="example", delta=DELTA)
            start = correlated.start(inputs, width, classes, seed)
            account = ledger.account(task)
            state = finetune.fit(
                trainer, start, private, steps=steps, account=account, progress=False
            )
            guesses = logits(state.params, test["features"]).argmax(axis=1)
            accuracies.append(float((guesses == test["label"]).mean()))
        by_rate[rate] = accuracies
    best = max(by_rate, key=lambda rate: np.mean(by_rate[rate]))
    row = {"task": task, "method": method, "epsilon": epsilon, "steps": steps, "rate": best}
    row |= {"accuracies": by_rate[best], "spent": ledger.epsilon(task)}
    row |= {"bands": "BLT" if method.endswith("BLT") else noise.buffers + 1 if noise else 1}
    row |= {"separation": sampler.participation(steps)[1] if noise else 1}
    row |= {"noise_multiplier": sigma, "error": correlated.error(trainer, steps)}
    print(json.dumps(row), flush=True)
    return row


def _line(method: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for row in rows:
        cells.append(f"{timing.accuracy(row)}, {row['error']:.3g}, b = {row['separation']}")
    return [method, *cells]


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of a report."""
    head = ["who takes part, noise"]
    return correlated.tables_of_tasks(report["rows"], METHODS, head, _line)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=3, help="of each method, epsilon and rate")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for task in TASKS:
        for method in METHODS:
            rows += [row_of(task, method, epsilon, flags.runs) for epsilon in EPSILONS]
    return {"rows": rows}
