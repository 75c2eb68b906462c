"""The audits of patterns of participation: balls in bins, and b-min-sep."""

import dataclasses

import numpy as np

from jaxdp.audit import Audit
from jaxdp.audit.participation import audit_participation
from jaxdp.data import BallsInBinsSampler, BMinSepSampler

from . import case
from .case import Case, Run, under

SIGMA = 0.8
DELTA = 0.03
SEED = bytes(range(16))
BINS = BallsInBinsSampler(num_examples=8, bins=4, steps=4, draws=2**14)
SEPARATED = BMinSepSampler(
    num_examples=8, sampling_probability=0.3, separation=4, steps=4, draws=2**14
)


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


def runs(sampler: BallsInBinsSampler | BMinSepSampler, noise_multiplier: float = SIGMA) -> Run:
    """Returns the audit of a sampler."""

    def audit(trials: int, seed: bytes) -> Audit:
        return audit_participation(
            sampler,
            noise_multiplier=noise_multiplier,
            trials=trials,
            seed=seed,
            delta=DELTA,
            confidence=case.CONFIDENCE,
        )

    return audit


def held(run: Run, claimed: Run) -> Run:
    """Returns a run under the claim of another one."""
    return lambda trials, seed: under(run(trials, seed), claimed(trials, seed).upper)


def pattern(
    name: str,
    sampler: BallsInBinsSampler | BMinSepSampler,
    broken: BallsInBinsSampler | BMinSepSampler,
    rarer: BallsInBinsSampler | BMinSepSampler,
) -> Case:
    """Returns the case of a pattern, of a sampler that breaks it, and of a too cheap account."""
    honest = runs(sampler)
    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: held(runs(sampler, SIGMA / 2), honest),
        case.NO_CLIPPING: held(runs(sampler, SIGMA / 50), honest),
        case.SENSITIVITY_OFF_BY_TWO: held(runs(sampler, SIGMA / 2), honest),
        case.REUSED_KEY: "the noise is that of DP-SGD, whose row has this twin",
        case.ADD_REMOVE_FOR_REPLACE_ONE: "there is no account for replace-one, and it is refused",
        "a record takes part too often": held(runs(broken), honest),
        "an account of rarer participation": held(honest, runs(rarer)),
    }
    return Case(
        name,
        f"{sampler.steps} steps of multiplier {SIGMA}, add/remove, by simulation",
        "arXiv:2410.06266, arXiv:2602.09338; `jaxdp.privacy.participation`",
        honest,
        twins,
        trials=6000,
    )


CASES = (
    pattern(
        "balls in bins",
        BINS,
        TwiceInACycle(num_examples=8, bins=4, steps=4, draws=2**14),
        dataclasses.replace(BINS, bins=64, steps=64),
    ),
    pattern(
        "b-min-sep",
        SEPARATED,
        NoSeparation(num_examples=8, sampling_probability=0.9, separation=4, steps=4, draws=2**14),
        dataclasses.replace(SEPARATED, sampling_probability=0.003),
    ),
)
