"""The audit of `charged_scaler`, noisy sums of the columns of a table.

    terms = {"noise_multiplier": 5.0, "trials": 2000, "delta": 1e-5}
    print(audit_scaler(source, {"age": (0, 120)}, **terms).describe())

A trial is one release of the sums, of data with a canary or with its neighbour. The canary is the
row or owner that moves the sums farthest.
"""

from collections.abc import Mapping, Sequence
from typing import Unpack

import jax
import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import NoiseTerms, Trials
from jaxdp.data import Examples, Groups, take
from jaxdp.files import shows_keywords
from jaxdp.finetune.scaler import column_sums, columns_of, draw, step_of
from jaxdp.privacy import GaussianDpEvent


@shows_keywords(NoiseTerms, vars(Trials))
def audit_scaler(
    source: Examples | Groups,
    ranges: Mapping[str, tuple[float, float]],
    *,
    noise_multiplier: float,
    rows: Sequence[int] | np.ndarray | None = None,
    **terms: Unpack[NoiseTerms],
) -> bounds.Audit:
    """Audits `charged_scaler` by many releases with and without a canary.

    Args:
      source: Public or synthetic rows, or owners of rows, since the audit charges nothing.
      ranges, noise_multiplier: As in `charged_scaler`.
      rows: The rows or owners that may be the canary, by default all. "replace_one" needs at least
        2.
      terms: trials, delta > 0, adjacency, confidence and seed, as in `jaxdp.audit.trials.Trials`.

    Returns:
      The `Audit` of 2 `trials` releases, with the ledger's epsilon of one release.

    Formal guarantees:
      As `jaxdp.audit.multi_run` with the Gaussian claim. Every release has its own key. The score
      is the product of the noisy sums with the canary's change of them, which rises with the
      likelihood ratio. The keys are of the kind "threefry2x32", which are independent under
      `jax.vmap`. `charged_scaler` draws "chacha12" keys.

    Raises:
      ValueError: An argument is out of range, or no candidate moves the sums.
    """
    runs = Trials(charge=GaussianDpEvent(noise_multiplier), **terms)
    everything = np.arange(len(source))
    rows = everything if rows is None else np.asarray(rows)
    runs.check_candidates("rows must name", len(rows), "rows")
    measured = columns_of(source, ranges)
    step = step_of(measured, noise_multiplier, len(source))
    without = []
    for row in rows:
        others = take(source, np.delete(everything, row))
        without.append(column_sums(others, measured, step))
    whole = [column_sums(source, measured, step)]
    # With two candidates, the data without one of them contain the other.
    canaries = without if runs.adjacency == "replace_one" else whole

    def distance(first: np.ndarray, second: np.ndarray) -> float:
        return float(np.linalg.norm(first - second))

    refusal = "rows must name a row that moves the sums. Name some with a cell."
    canary, neighbour = runs.farthest(canaries, without, distance, refusal)
    change = canary - neighbour

    def scores(sums: np.ndarray, purpose: str) -> np.ndarray:
        keys = runs.keys(purpose, runs.trials)
        draw_sums = jax.vmap(lambda key: draw(key, sums.shape))
        noise = np.asarray(draw_sums(keys), np.float64)
        noisy = sums + noise
        return (noisy * change).sum(axis=(1, 2))

    return runs.judge(scores, canary, neighbour)
