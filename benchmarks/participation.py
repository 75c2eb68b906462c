"""Who takes part, beside DP-SGD, at equal epsilon on two bundled sets.

    python -m benchmarks run participation --update

Tasks, models and learning rates are those of `benchmarks.correlated`. All patterns have batches of
one expected size, and equal steps. The groups of cyclic Poisson sampling are the power of two with
the least error of the sums of noise."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import correlated, pages, problems, timing
from benchmarks.correlated import DELTA, EPSILONS, TASKS
from jaxdp import data, finetune
from jaxdp.finetune.strategies import amplified_plans
from launch import results

FLAGS = {"runs": (3, "of each method, epsilon and rate")}
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


METHODS = {
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
    errors = [problems.noise_error(sigma, noise, steps) for _, noise, sigma in plans]
    sampler, _, _ = plans[int(np.argmin(errors))]
    return sampler.cycle_length


def row_of(runs: int, task: str, method: str, epsilon: float) -> dict:
    """Returns the row of a cell: accuracies [runs] at the best rate."""
    batch_size, epochs, _ = TASKS[task]
    order = data.FixedOrderSampler(len(correlated.examples(task)[0]), batch_size)
    steps = epochs * order.steps_per_epoch
    sampler, noise = METHODS[method](order, steps, epsilon)
    options = {"sampler": sampler, "noise": noise}
    target = {"epsilon": epsilon, "delta": DELTA, "steps": steps}
    sigma = finetune.options.calibrated(**options, **target)
    options |= {"noise_multiplier": sigma, "physical_batch_size": 2 * batch_size}
    row, trainer = correlated.best_row(task, runs, steps, **options)
    row = {"task": task, "method": method, "epsilon": epsilon, "steps": steps} | row
    row |= {"bands": "BLT" if method.endswith("BLT") else noise.buffers + 1 if noise else 1}
    row |= {"separation": sampler.participation(steps)[1] if noise else 1}
    return row | {"noise_multiplier": sigma, "error": correlated.error(trainer, steps)}


def cell(row: Mapping) -> str:
    return f"{correlated.cell(row)}, b = {row['separation']}"


def tables(report) -> dict:
    markdown = {}
    for task in TASKS:
        rows = results.select(report["rows"], task=task)
        markdown[task] = pages.by_epsilon(rows, "method", "who takes part, noise", cell)
    return markdown


def measure(flags) -> dict:
    run = functools.partial(row_of, flags.runs)
    return {"rows": timing.swept(run, TASKS, METHODS, EPSILONS)}
