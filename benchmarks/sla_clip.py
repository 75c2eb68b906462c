"""Clip norms that adapt, from a good and a bad start: SlaClip, AdpClip and a fixed norm.

    python -m benchmarks run sla_clip --update

All have the same noise multiplier, so the same epsilon, on the bundled digits. The network and the
splits are those of `benchmarks.clip_parts`. Learning rates are chosen for each method and start."""

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax

from benchmarks import clip_parts, timing
from jaxdp import finetune
from jaxdp.data import PoissonSampler
from jaxdp.privacy import calibrate_noise

STARTS = (0.1, 1.0, 10.0)
RATES = (0.0625, 0.125, 0.25, 0.5, 1.0)
METHODS: Mapping[str, Callable[..., Any]] = {
    "a fixed norm": finetune.dp_sgd,
    "AdpClip": finetune.adp_clip,
    "SlaClip": finetune.sla_clip,
}


def trainer(method: str, start: float, records: int) -> Any:
    """Returns a trainer whose learning rate, for a gradient of norm 1, is in its state."""
    sampler = PoissonSampler(records, clip_parts.RATE)
    event = functools.partial(finetune.event, sampler=sampler, steps=clip_parts.STEPS)
    sigma = calibrate_noise(event, epsilon=clip_parts.EPSILON, delta=clip_parts.DELTA)
    scale = optax.scale(1 / start) if method == "a fixed norm" else optax.identity()
    sgd = functools.partial(optax.sgd, momentum=0.9)
    return METHODS[method](
        clip_parts.loss,
        optax.inject_hyperparams(lambda learning_rate: optax.chain(scale, sgd(learning_rate)))(1.0),
        sampler=sampler,
        clip_norm=start,
        noise_multiplier=sigma,
        physical_batch_size=math.ceil(1.5 * sampler.expected_batch_size),
    )


def row_of(method: str, start: float, splits: Mapping[int, clip_parts.Split]) -> dict[str, Any]:
    training = trainer(method, start, len(splits[0].private))
    tuned = {}
    for rate in RATES:
        runs = [clip_parts.accuracy(training, rate, splits[seed]) for seed in clip_parts.TUNING]
        tuned[rate] = statistics.mean(runs)
    best = max(tuned, key=lambda rate: tuned[rate])
    tests = [split for seed, split in splits.items() if seed not in clip_parts.TUNING]
    accuracies = [clip_parts.accuracy(training, best, split) for split in tests]
    return {"method": method, "start": start, "rate": best, "accuracies": accuracies}


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of a report."""
    lines = []
    for method in METHODS:
        cells = [method]
        for row in report["rows"]:
            if row["method"] == method:
                values = 100 * np.asarray(row["accuracies"])
                error = values.std(ddof=1) / math.sqrt(len(values))
                cells.append(f"{values.mean():.1f} ({error:.1f}), {row['rate']:g}")
        lines.append(cells)
    header = ["method", *(f"first norm {start:g}" for start in STARTS)]
    return {"sla_clip": timing.page_table(header, lines)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=8, help="runs of each method")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    seeds = [*range(flags.seeds), *clip_parts.TUNING]
    splits = {seed: clip_parts.split("digits", seed) for seed in seeds}
    rows = []
    for method in METHODS:
        for start in STARTS:
            rows.append(row_of(method, start, splits))
            print(rows[-1], flush=True)
    return {"rows": rows}
