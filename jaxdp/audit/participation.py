"""The audit of runs with a pattern of participation, such as balls in bins.

    sampler = jaxdp.data.BallsInBinsSampler(num_examples=1000, bins=4, steps=8)
    print(audit_participation(sampler, noise_multiplier=1.0, trials=2000, delta=1e-2).describe())

A trial is the noisy sums of one run, in the direction of a canary whose contribution always has the
largest norm. Records take part independently, so the records of one sampler are the canaries of
all trials. With truncated batches a canary displaces other records. So a trial has all records of
its sampler, and the others contribute the opposite of the canary.
"""

import dataclasses
from typing import Unpack

import numpy as np
from scipy import special

from jaxdp.audit import bounds
from jaxdp.data import BallsInBinsSampler, BMinSepSampler
from jaxdp.files import check_count, shows_keywords
from jaxdp.privacy import GaussianDpEvent
from jaxdp.release import claim as claimed
from jaxdp.release import derive, new_seed

# Histories that stand for the law of the pattern in the score.
_HISTORIES = 512


@shows_keywords(bounds.ConfidenceTerms, vars(bounds.Terms))
def audit_participation(
    sampler: BallsInBinsSampler | BMinSepSampler,
    *,
    noise_multiplier: float,
    trials: int,
    seed: bytes | None = None,
    **terms: Unpack[bounds.ConfidenceTerms],
) -> bounds.Audit:
    """Audits sampling and account of a pattern by many runs with and without a canary.

    Args:
      sampler: The sampler. Its `num_examples` has an effect with truncated batches only.
      noise_multiplier: The noise of a step over the clip norm.
      trials: The number of runs of either kind, at least 2.
      seed: 16 secret bytes, of the noise and of who takes part. The default is OS entropy.
      terms: delta and confidence, as in `jaxdp.audit.multi_run`.

    Returns:
      The `Audit` of 2 `trials` runs, with the epsilon of `sampler.run_event`, add/remove.

    Formal guarantees:
      As `jaxdp.audit.multi_run`. The score is the likelihood ratio of the run, where 512 drawn
      histories stand for the law of the pattern, with the canary and without. Any score gives a
      valid bound.

    Raises:
      ValueError: An argument is out of range.
    """
    check_count("trials", trials, 2)
    bound = bounds.Terms(**terms)
    event = sampler.run_event(GaussianDpEvent(noise_multiplier), sampler.steps)
    upper = claimed(event, adjacency="add_remove", delta=bound.delta)
    bound.check(upper)
    root = new_seed() if seed is None else seed
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(root, "little")))

    def drawn(count: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        included = _histories(sampler, count, derive(root, purpose))
        with_canary = _sums(sampler, included, derive(root, f"{purpose}, truncation"))
        included[:, 0] = 0.0
        without = _sums(sampler, included, derive(root, f"{purpose}, truncation without"))
        return with_canary / noise_multiplier, without / noise_multiplier

    law = drawn(_HISTORIES, "law")
    present, absent = drawn(trials, "canaries")

    def scores(shift: np.ndarray) -> np.ndarray:
        values = shift + rng.standard_normal((trials, sampler.steps))
        ratio: np.ndarray = _log_density(values, law[0]) - _log_density(values, law[1])
        return ratio

    return bounds.multi_run(
        scores(present), scores(absent), upper=upper, **dataclasses.asdict(bound)
    )


def _log_density(values: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Returns log E_h N(h, I) / N(0, I) [trials] at values [trials, steps].

    The h are the shifts, [histories, steps].
    """
    exponents = values @ shifts.T - np.square(shifts).sum(axis=1) / 2
    density: np.ndarray = special.logsumexp(exponents, axis=1)
    return density


def _histories(sampler: BallsInBinsSampler | BMinSepSampler, count: int, seed: bytes) -> np.ndarray:
    """Returns who takes part in which step of `count` runs, without truncation.

    It is 0 or 1, float64 [count, records, steps]. Record 0 is the canary.
    """
    records = 1 if sampler.truncated_batch_size is None else sampler.num_examples
    untruncated = dataclasses.replace(
        sampler, num_examples=count * records, truncated_batch_size=None
    )
    of_trials = untruncated.of_run(seed)
    included = np.zeros((count * records, sampler.steps))
    for step in range(sampler.steps):
        included[of_trials.batch(step), step] = 1.0
    return included.reshape(count, records, sampler.steps)


def _sums(
    sampler: BallsInBinsSampler | BMinSepSampler, included: np.ndarray, seed: bytes
) -> np.ndarray:
    """Returns the sums of the steps of runs, float64 [count, steps].

    The canary contributes 1, and every other record -1.
    """
    taking_part = included.copy()
    for run, step in np.argwhere(included.sum(axis=1) > sampler.largest_batch):
        of_run = sampler.of_run(derive(seed, f"run {run}"))
        batch = np.flatnonzero(included[run, :, step])
        taking_part[run, :, step] = 0.0
        taking_part[run, of_run.truncated(batch, int(step)), step] = 1.0
    sums: np.ndarray = taking_part[:, 0] - taking_part[:, 1:].sum(axis=1)
    return sums
