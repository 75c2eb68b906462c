"""Attacks on a private search: what the best of its runs tells about one record.

    print(audit_search(RandomRuns(10), noise_multiplier=2.0, trials=2000, delta=1e-2).describe())

Each run is the cheapest training there is, a noisy sum of one step. Its score is the sum, so the
search prefers the runs whose noise looks like the canary. The draws of the number of runs and of
candidates, the comparison of scores and the accounting are those of `jaxdp.tune`.
"""

import dataclasses
import pathlib
from typing import Any, Unpack

import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import NoiseTerms, Trials
from jaxdp.files import shows_keywords
from jaxdp.finetune import PublicScore, RandomRuns
from jaxdp.finetune.tune import Search
from jaxdp.privacy import GaussianDpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import derive, generator

_CANDIDATES = ("a", "b")  # of equal noise, so that the candidate tells nothing


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NoisySums(Search):
    """A search whose runs add noise to a sum. `audit_search` documents the attributes."""

    total: float
    noise_multiplier: float

    def trained(self, name: str, workdir: pathlib.Path | None, secret: bytes) -> list[np.ndarray]:
        """Returns the noisy sum of one run."""
        noise = self.noise_multiplier * generator(secret).normal()
        return [np.asarray(self.total + noise, np.float32)]


@shows_keywords(NoiseTerms, vars(Trials))
def audit_search(
    runs: RandomRuns,
    *,
    noise_multiplier: float,
    search: type[NoisySums] = NoisySums,
    **terms: Unpack[NoiseTerms],
) -> bounds.Audit:
    """Audits the best of a random number of noisy sums, with and without a canary of norm 1.

    Args:
      runs: The distribution of the number of runs.
      noise_multiplier: The noise of one run over the norm of the canary.
      search: A class of searches, for broken twins.
      terms: trials, delta > 0, adjacency, confidence and seed, as in `jaxdp.audit.trials.Trials`.

    Returns:
      The `Audit` of 2 `trials` searches, with the ledger's epsilon of one search.

    Formal guarantees:
      As `jaxdp.audit.multi_run` with the approximate claim, because the best of several runs is no
      Gaussian. Each search has a secret of its own. Its score is its released sum, which rises with
      the likelihood ratio of the canary where the number of runs is secret.

    Raises:
      ValueError: An argument is out of range.
    """
    event = runs.event(GaussianDpEvent(noise_multiplier))
    allowed: tuple[Adjacency, ...] = ("add_remove", "zero_out")
    judged = Trials(charge=event, claim="approximate", allowed=allowed, **terms)
    score = PublicScore(float)  # the noisy sum of a run

    def sums(total: float, purpose: str) -> np.ndarray:
        """Returns the released sums [trials] of as many searches."""
        nothing: Any = None  # no trainer, records or ledger take part
        one = search(
            trainers=dict.fromkeys(_CANDIDATES, nothing),
            account=nothing,
            params=np.float32(0),
            source=nothing,
            steps=1,
            runs=runs,
            score=score,
            workdir=None,
            checkpoint_every=1,
            total=total,
            noise_multiplier=noise_multiplier,
        )
        released = []
        for trial in range(judged.trials):
            arrays = one.compute(derive(judged.seed, f"{purpose}, search {trial}"))
            released.append(float(arrays["leaf 0"]))
        return np.array(released)

    return judged.judge(sums, 1.0, 0.0)
