"""The audit of `charged_accuracy`, a noisy count of right answers.

    terms = {"noise_multiplier": 5.0, "trials": 2000, "delta": 1e-5}
    print(audit_accuracy(predict, params, source, **terms).describe())

A trial is one estimate, of data with a canary or with its neighbour. The canary is an example that
changes the count.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import NoiseTerms, Trials
from jaxdp.data import Source, take
from jaxdp.files import shows_keywords
from jaxdp.finetune.evaluate import Predict, count_correct, noisy_fraction
from jaxdp.privacy import GaussianDpEvent


@shows_keywords(NoiseTerms, vars(Trials))
def audit_accuracy(
    predict: Predict,
    params: Any,
    source: Source,
    *,
    noise_multiplier: float,
    rows: Sequence[int] | np.ndarray | None = None,
    **terms: Unpack[NoiseTerms],
) -> bounds.Audit:
    """Audits `charged_accuracy` by many estimates with and without a canary.

    Args:
      predict, params, noise_multiplier: As in `charged_accuracy`.
      source: Public or synthetic examples, since the audit charges nothing. An accuracy near 0 or 1
          hides the noise.
      rows: The examples that may be the canary, by default all. "replace_one" needs at least 2.
      terms: trials, delta > 0, adjacency, confidence and seed, as in `jaxdp.audit.trials.Trials`.
        The number of examples is public: both counts have the same divisor.

    Returns:
      The `Audit` of 2 `trials` estimates, with the ledger's epsilon of one estimate.

    Formal guarantees:
      As `jaxdp.audit.multi_run` with the Gaussian claim. Every estimate has its own key, so that
      scores are independent. An estimate is its own score, because it rises with the likelihood
      ratio of the two counts. The keys are of the kind "threefry2x32", which are independent under
      `jax.vmap`. `charged_accuracy` draws "chacha12" keys.

    Raises:
      ValueError: An argument is out of range, or no candidate changes the count.
    """
    runs = Trials(charge=GaussianDpEvent(noise_multiplier), **terms)
    rows = np.arange(len(source)) if rows is None else np.asarray(rows)
    runs.check_candidates("rows must name", len(rows), "examples")
    everything = np.arange(len(source))
    without = []
    for row in rows:
        others = take(source, np.delete(everything, row))
        without.append(count_correct(predict, params, others))
    replaced = runs.adjacency == "replace_one"
    fewer = min(without)
    # With two candidates, the data without one of them contain the other.
    more = max(without) if replaced else count_correct(predict, params, source)
    if more <= fewer:
        raise ValueError(
            "rows must name an example that changes the count. Name some that are answered right."
        )
    total = len(source) - replaced

    # An estimate rises with the likelihood ratio of the two counts, so it is its own score.
    def scores(count: int, purpose: str) -> np.ndarray:
        keys = runs.keys(purpose, runs.trials)
        return noisy_fraction(keys, count, total, noise_multiplier)

    return runs.judge(scores, more, fewer)
