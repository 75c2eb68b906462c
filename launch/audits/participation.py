"""The audits of patterns of participation: balls in bins, and b-min-sep."""

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxdp.audit.participation import audit_participation
from jaxdp.data import BallsInBinsSampler, BMinSepSampler
from jaxdp.privacy import GaussianDpEvent
from jaxdp.release import claim

from .case import Case, Run, run_of, standard_twins, under

Sampler = BallsInBinsSampler | BMinSepSampler

SIGMA = 0.8
DELTA = 0.03
SEED = bytes(range(16))
BINS = BallsInBinsSampler(num_examples=8, bins=4, steps=4, draws=2**14)
SEPARATED = BMinSepSampler(
    num_examples=8, sampling_probability=0.3, separation=4, steps=4, draws=2**14
)


# A batch has 1.3 records on average, and more than six with a probability of 3e-5.
TRUNCATED = dataclasses.replace(SEPARATED, truncated_batch_size=6)


class Unpriced(BMinSepSampler):
    """A sampler that truncates most batches, with the account of one that truncates none."""

    @property
    def truncation_probability(self) -> float:
        return 0.0


class TwiceInACycle(BallsInBinsSampler):
    """Bins of which every step takes two, so that a record takes part twice."""

    def batch(self, step: int) -> np.ndarray:
        after = super().batch((step + 1) % self.steps)
        return np.union1d(super().batch(step), after)


class NoSeparation(BMinSepSampler):
    """A sampler that forgets who took part."""

    def batch(self, step: int) -> np.ndarray:
        self._past._free_from[:] = 0
        return super().batch(step)


def runs(sampler: Sampler, noise_multiplier: float = SIGMA) -> Run:
    """Returns the audit of a sampler."""
    return run_of(audit_participation, sampler, noise_multiplier=noise_multiplier, delta=DELTA)


@functools.cache
def claim_of(sampler: Sampler) -> float:
    """Returns the epsilon of all runs of a case. Each simulation of an account has its own."""
    event = sampler.run_event(GaussianDpEvent(SIGMA), sampler.steps, seed=SEED)
    return claim(event, adjacency="add_remove", delta=DELTA)


def pattern(
    name: str, sampler: Sampler, broken: Sampler, denser: Sampler, **further: Sampler
) -> Case:
    """Returns the case of a pattern, with a sampler that breaks it and one that costs more.

    `further` twins are samplers under the account of the pattern, by name.
    """

    def held(run: Run) -> Run:
        return lambda trials, seed: under(run(trials, seed), claim_of(sampler))

    cited = "arXiv:2602.09338"
    if sampler.truncated_batch_size is not None:
        cited += ", arXiv:2411.04205"
    twins = standard_twins(
        half_the_noise=held(runs(sampler, SIGMA / 2)),
        no_clipping=held(runs(sampler, SIGMA / 50)),
        sensitivity_off_by_two=held(runs(sampler, SIGMA / 2)),
        reused_key="the noise is that of DP-SGD, whose row has this twin",
        add_remove_for_replace_one="there is no account for replace-one, and it is refused",
    )
    twins["a record takes part too often"] = held(runs(broken))
    twins["an account of rarer participation"] = held(runs(denser))
    for twin, other in further.items():
        twins[twin] = held(runs(other))
    return Case(
        name,
        f"{sampler.steps} steps of multiplier {SIGMA}, add/remove, by simulation",
        f"arXiv:2410.06266, {cited}; `jaxdp.privacy.participation`",
        held(runs(sampler)),
        twins,
        trials=6000,
    )


_FEW: dict[str, Any] = {"num_examples": 8, "separation": 4, "steps": 4, "draws": 2**14}
# Batches of ten lose two. A canary that stays takes the place of another record.
UNPRICED = Unpriced(
    num_examples=64,
    sampling_probability=0.3,
    separation=4,
    steps=4,
    draws=2**14,
    truncated_batch_size=8,
)

CASES = (
    pattern(
        "balls in bins",
        BINS,
        TwiceInACycle(num_examples=8, bins=4, steps=4, draws=2**14),
        dataclasses.replace(BINS, bins=1),
    ),
    pattern(
        "b-min-sep",
        SEPARATED,
        NoSeparation(sampling_probability=0.9, **_FEW),
        dataclasses.replace(SEPARATED, sampling_probability=0.9, separation=1),
    ),
    pattern(
        "b-min-sep, truncated batches",
        TRUNCATED,
        NoSeparation(sampling_probability=0.9, truncated_batch_size=6, **_FEW),
        dataclasses.replace(
            TRUNCATED, sampling_probability=0.9, separation=1, truncated_batch_size=8
        ),
        **{"truncation without its price": UNPRICED},
    ),
)
