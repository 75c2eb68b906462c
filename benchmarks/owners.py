"""Records with several owners: accuracy by the bound on an owner's records, at equal epsilon.

    python -m benchmarks run owners --update

Who owns which of the bundled digits is made up and public: each image has one to three of 300
owners. The network, the splits and the tuned learning rates are those of `benchmarks.clip_parts`.
Epsilon is for what all images of one owner contain. "one image" is DP-SGD on all images, whose
epsilon is for one image only: its last column is the epsilon of the owner with the most images."""

import argparse
import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax

from benchmarks import clip_parts, timing
from jaxdp import finetune
from jaxdp.data import PoissonSampler, by_owners
from jaxdp.privacy import OwnedGaussianDpEvent, SelfComposedDpEvent
from jaxdp.privacy import epsilon as epsilon_of

BOUNDS = (1, 2, 4, 8)
OWNERS, OF_ONE = 300, 3
EPSILON, DELTA, STEPS = 8.0, 1e-4, 60
RATES = (0.0625, 0.125, 0.25, 0.5)


def owners_of(records: int) -> list[list[int]]:
    """Returns the made-up owners of each image."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, OF_ONE + 1, size=records)
    return [random.choice(OWNERS, size=size, replace=False).tolist() for size in sizes]


def trainer(sampler: PoissonSampler, **target: Any) -> Any:
    """Returns a trainer whose learning rate is in its state."""
    optimizer = optax.inject_hyperparams(optax.sgd)(1.0, momentum=0.9)
    return finetune.dp_sgd(
        clip_parts.loss,
        optimizer,
        sampler=sampler,
        clip_norm=clip_parts.CLIP,
        epsilon=EPSILON,
        delta=DELTA,
        steps=STEPS,
        physical_batch_size=math.ceil(1.5 * sampler.expected_batch_size),
        **target,
    )


def row_of(bound: int, splits: Mapping[int, clip_parts.Split]) -> dict[str, Any]:
    """Returns the row of a bound, or of one image for a bound of 0."""
    owners = owners_of(len(splits[0].private))
    largest = int(np.bincount(np.concatenate(owners)).max())
    if bound:
        some = {}
        for seed, split in splits.items():
            private = by_owners(split.private, owners, max_records=bound)
            some[seed] = split._replace(private=private)
        sampler = some[0].private.sampler(clip_parts.RATE)
        training = trainer(sampler, unit="person", adjacency="zero_out")
        cost = EPSILON
    else:
        some = dict(splits)
        sampler = PoissonSampler(len(some[0].private), clip_parts.RATE)
        training = trainer(sampler)
        noise = training.privatizer.noise_multiplier
        step = OwnedGaussianDpEvent(clip_parts.RATE, noise, largest)
        whole = SelfComposedDpEvent(step, STEPS)
        cost = epsilon_of(whole, delta=DELTA, adjacency="zero_out")
    tuned = {}
    for rate in RATES:
        runs = [clip_parts.accuracy(training, rate, some[seed]) for seed in clip_parts.TUNING]
        tuned[rate] = statistics.mean(runs)
    best = max(tuned, key=lambda rate: tuned[rate])
    tests = [split for seed, split in some.items() if seed not in clip_parts.TUNING]
    return {
        "bound": bound,
        "images": sampler.num_examples,
        "noise": training.privatizer.noise_multiplier,
        "rate": best,
        "epsilon": cost,
        "accuracies": [clip_parts.accuracy(training, best, split) for split in tests],
    }


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of a report."""
    lines = []
    for row in report["rows"]:
        values = 100 * np.asarray(row["accuracies"])
        error = values.std(ddof=1) / math.sqrt(len(values))
        lines.append(
            [
                str(row["bound"] or "one image"),
                str(row["images"]),
                f"{row['noise']:.2f}",
                f"{row['rate']:g}",
                f"{values.mean():.1f} ({error:.1f})",
                f"{row['epsilon']:.3g}",
            ]
        )
    header = ["images of an owner", "images", "noise", "learning rate", "accuracy, %", "epsilon"]
    return {"owners": timing.page_table(header, lines)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=8, help="runs of each bound")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    seeds = [*range(flags.seeds), *clip_parts.TUNING]
    splits = {seed: clip_parts.split("digits", seed) for seed in seeds}
    rows = []
    for bound in (*BOUNDS, 0):
        rows.append(row_of(bound, splits))
        print(rows[-1], flush=True)
    return {"rows": rows}
