"""Clip norms that adapt, from a good and a bad start: SlaClip, AdpClip and a fixed norm.

    python -m benchmarks run sla_clip --update

All have the same noise multiplier, so the same epsilon, on the bundled digits. The network and the
splits are those of `benchmarks.clip_parts`. Learning rates are chosen for each method and start."""

import functools
import math

import optax

from benchmarks import clip_parts, pages, timing
from jaxdp import finetune
from jaxdp.data import PoissonSampler
from launch import results

STARTS = (0.1, 1.0, 10.0)
RATES = (0.0625, 0.125, 0.25, 0.5, 1.0)
METHODS = {
    "a fixed norm": finetune.dp_sgd,
    "AdpClip": finetune.adp_clip,
    "SlaClip": finetune.sla_clip,
}
FLAGS = {"seeds": (8, "runs of each method")}


def trainer(method: str, start: float, records: int):
    """Returns a trainer whose learning rate, for a gradient of norm 1, is in its state."""
    sampler = PoissonSampler(records, clip_parts.RATE)
    scale = optax.scale(1 / start) if method == "a fixed norm" else optax.identity()
    sgd = functools.partial(optax.sgd, momentum=0.9)
    return METHODS[method](
        clip_parts.loss,
        optax.inject_hyperparams(lambda learning_rate: optax.chain(scale, sgd(learning_rate)))(1.0),
        sampler=sampler,
        clip_norm=start,
        noise_multiplier=clip_parts.noise_multiplier(sampler),
        physical_batch_size=math.ceil(1.5 * sampler.expected_batch_size),
    )


def row_of(splits: clip_parts.Splits, method: str, start: float) -> dict:
    training = trainer(method, start, len(splits[0].private))
    rate, _, accuracies = clip_parts.tuned(training, RATES, splits)
    return {"method": method, "start": start, "rate": rate, "accuracies": accuracies}


def tables(report) -> dict:

    def cell(rows):
        (row,) = rows
        return f"{pages.mean(row['accuracies'])}, {row['rate']:g}"

    rows = report["rows"]
    return {"sla_clip": results.pivot(rows, "method", "start", cell, heading="first norm {:g}")}


def measure(flags) -> dict:
    splits = clip_parts.splits("digits", flags.seeds)
    return {"rows": timing.swept(functools.partial(row_of, splits), METHODS, STARTS)}
