"""The audit of runs with a pattern of participation, such as balls in bins.

    sampler = jaxdp.data.BallsInBinsSampler(num_examples=1000, bins=4, steps=8)
    print(audit_participation(sampler, noise_multiplier=1.0, trials=2000, delta=1e-2).describe())

A trial is the noisy sums of one run, in the direction of a canary whose contribution always has the
largest norm. Records take part independently, so the records of one sampler are the canaries of
all trials. With truncated batches a canary displaces other records. So a trial has all records of
its sampler then, of which the others contribute the opposite of the canary.
"""

import dataclasses
from typing import Any, Unpack

import numpy as np
from scipy import special

from jaxdp.audit import bounds
from jaxdp.audit.trials import DeltaTerms, Trials
from jaxdp.data import BallsInBinsSampler, BMinSepSampler
from jaxdp.files import shows_keywords
from jaxdp.privacy import GaussianDpEvent
from jaxdp.release import derive, generator

# Histories that stand for the law of the pattern in the score.
_HISTORIES = 512


@shows_keywords(DeltaTerms, vars(Trials))
def audit_participation(
    sampler: BallsInBinsSampler | BMinSepSampler,
    *,
    noise_multiplier: float,
    **terms: Unpack[DeltaTerms],
) -> bounds.Audit:
    """Audits sampling and account of a pattern by many runs with and without a canary.

    Args:
      sampler: The sampler. Its `num_examples` has an effect with truncated batches only.
      noise_multiplier: The noise of a step over the clip norm.
      terms: trials, delta, confidence and seed, as in `jaxdp.audit.trials.Trials`. The seed is
        that of the noise and of who takes part.

    Returns:
      The `Audit` of 2 `trials` runs, with the epsilon of `sampler.run_event`, add/remove.

    Formal guarantees:
      As `jaxdp.audit.multi_run`. The score is the likelihood ratio of the run, where 512 drawn
      histories stand for the law of the pattern. Any score gives a valid bound. The attack knows
      how many other records are sampled, which hides nothing of the canary.

    Raises:
      ValueError: An argument is out of range.
    """
    event = sampler.run_event(GaussianDpEvent(noise_multiplier), sampler.steps)
    runs = Trials(charge=event, claim="approximate", **terms)
    rng = generator(runs.seed)
    drawn = _shifts(sampler, _HISTORIES, derive(runs.seed, "law")) / noise_multiplier
    # Most histories of a few steps are alike.
    shifts, counts = np.unique(drawn, axis=0, return_counts=True)
    present = _shifts(sampler, runs.trials, derive(runs.seed, "canaries")) / noise_multiplier

    def scores(shift: Any, purpose: str) -> np.ndarray:
        values = shift + rng.standard_normal((runs.trials, sampler.steps))
        exponents = values @ shifts.T - np.square(shifts).sum(axis=1) / 2
        return special.logsumexp(exponents, axis=1, b=counts)

    return runs.judge(scores, present, 0.0)


def _shifts(sampler: BallsInBinsSampler | BMinSepSampler, count: int, seed: bytes) -> np.ndarray:
    """Returns what the canaries of `count` runs add to the sums, float64 [count, steps]."""
    steps = sampler.steps
    if sampler.truncated_batch_size is None:
        return histories(sampler, steps, count, seed)
    most = sampler.truncated_batch_size
    records = sampler.num_examples
    untruncated = dataclasses.replace(sampler, truncated_batch_size=None)
    of_all = histories(untruncated, steps, count * records, seed)
    sampled = of_all.reshape(count, records, steps)
    # Record 0 is the canary, which adds 1 and may take the place of a record that adds -1.
    shifts = sampled[:, 0].copy()
    sizes = sampled.sum(axis=1)
    is_cut = (sizes > most) & (shifts > 0)
    for run, step in np.argwhere(is_cut):
        secret = derive(seed, f"run {run}")
        of_run = sampler.of_run(secret)
        batch = np.flatnonzero(sampled[run, :, step])
        first, *_ = of_run.truncated(batch, int(step))
        shifts[run, step] = 2.0 if first == 0 else 0.0
    return shifts


def histories(sampler: Any, steps: int, count: int, seed: bytes) -> np.ndarray:
    """Returns who of `count` records takes part in which step, 0 or 1, float64 [count, steps].

    Args:
      sampler: A sampler whose records take part independently.
      steps: The number of steps.
      count: The number of records, in place of the sampler's own.
      seed: 16 secret bytes of the sampler.
    """
    of_trials = dataclasses.replace(sampler, num_examples=count).of_run(seed)
    included = np.zeros((count, steps))
    for step in range(steps):
        included[of_trials.batch(step), step] = 1.0
    return included
