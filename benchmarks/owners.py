"""Records with several owners: accuracy by the bound on an owner's records, at equal epsilon.

    python -m benchmarks run owners --update

Who owns which of the bundled digits is made up and public: each image has one to three of 300
owners. The network, the splits and the tuned learning rates are those of `benchmarks.clip_parts`.
Epsilon is for what all images of one owner contain. "one image" is DP-SGD on all images, whose
epsilon is for one image only: its last column is the epsilon of the owner with the most images."""

import functools
import math

import numpy as np
import optax

from benchmarks import clip_parts, pages, timing
from jaxdp import finetune
from jaxdp.data import PoissonSampler, by_owners
from jaxdp.privacy import OwnedGaussianDpEvent, SelfComposedDpEvent
from jaxdp.privacy import epsilon as epsilon_of

BOUNDS = (1, 2, 4, 8)
OWNERS, OF_ONE = 300, 3
EPSILON, DELTA, STEPS = 8.0, 1e-4, 60
RATES = (0.0625, 0.125, 0.25, 0.5)
FLAGS = {"seeds": (8, "runs of each bound")}


def owners_of(records: int) -> list[list[int]]:
    """Returns the made-up owners of each image."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, OF_ONE + 1, size=records)
    return [random.choice(OWNERS, size=size, replace=False).tolist() for size in sizes]


def trainer(sampler: PoissonSampler, **target):
    """Returns a trainer whose learning rate is in its state."""
    return finetune.dp_sgd(
        clip_parts.loss,
        optax.inject_hyperparams(optax.sgd)(1.0, momentum=0.9),
        sampler=sampler,
        clip_norm=clip_parts.CLIP,
        epsilon=EPSILON,
        delta=DELTA,
        steps=STEPS,
        physical_batch_size=math.ceil(1.5 * sampler.expected_batch_size),
        **target,
    )


def row_of(splits: clip_parts.Splits, bound: int) -> dict:
    """Returns the row of a bound, or of one image for a bound of 0."""
    count = len(splits[0].private)
    owners = owners_of(count)
    if bound:
        owned = {}
        for seed, split in splits.items():
            private = by_owners(split.private, owners, max_records=bound)
            owned[seed] = split._replace(private=private)
        splits = owned
        sampler = splits[0].private.sampler(clip_parts.RATE)
        training = trainer(sampler, unit="person", adjacency="zero_out")
    else:
        sampler = PoissonSampler(count, clip_parts.RATE)
        training = trainer(sampler)
    noise, cost = training.privatizer.noise_multiplier, EPSILON
    if not bound:
        largest = int(np.bincount(np.concatenate(owners)).max())
        step = OwnedGaussianDpEvent(clip_parts.RATE, noise, largest)
        cost = epsilon_of(SelfComposedDpEvent(step, STEPS), delta=DELTA, adjacency="zero_out")
    rate, _, accuracies = clip_parts.tuned(training, RATES, splits)
    row = {"bound": bound, "images": sampler.num_examples, "noise": noise}
    return row | {"rate": rate, "epsilon": cost, "accuracies": accuracies}


def tables(report) -> dict:
    columns = {
        "images of an owner": lambda row: str(row["bound"] or "one image"),
        "images": "{images}",
        "noise": "{noise:.2f}",
        "learning rate": "{rate:g}",
        "accuracy, %": lambda row: pages.mean(row["accuracies"]),
        "epsilon": "{epsilon:.3g}",
    }
    return {"owners": pages.lines(report["rows"], columns)}


def measure(flags) -> dict:
    splits = clip_parts.splits("digits", flags.seeds)
    return {"rows": timing.swept(functools.partial(row_of, splits), (*BOUNDS, 0))}
