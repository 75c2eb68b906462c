"""Audits of private answers to one query.

    def ask(data, queries, **terms):
        options = {"clip": 0.1, "learning_rate": 0.5, "batch_size": n, "epochs": 1}
        bounds = train_with_bounds(loss_fn, params, data, ks=20, **options)
        return private_predict(bounds, apply_fn, queries, epsilon=0.5, **terms)

    print(audit_answers(ask, event(1, epsilon=0.5), query, data, records, trials=5000).describe())

A trial is one answer. One call of the stage answers the query many times, each time with fresh
noise. A model is trained with each candidate, and half of its answers choose the canary. The canary
is the record that changes the probability of an answer most. It flips the label, the vote of an
ensemble, or the distance to the next flip.

The canary sits anywhere among the records, so all records behind it have other positions than
without it. This shows batches or parts that follow from positions.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from jaxdp import release
from jaxdp.audit import bounds
from jaxdp.audit.trials import NeighbourTerms, Trials
from jaxdp.files import shows_keywords
from jaxdp.prediction.checks import count_rows
from jaxdp.privacy import DpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release.claims import audited

# Numeric answers are cut into this many ranges of equal frequency.
_RANGES = 32


@shows_keywords(NeighbourTerms, vars(Trials))
def audit_answers(
    ask: Callable[..., np.ndarray],
    event: DpEvent,
    query: Any,
    data: Any,
    candidates: Any,
    *,
    delta: float = 0.0,
    claim: bounds.Claim = "approximate",
    **terms: Unpack[NeighbourTerms],
) -> bounds.Audit:
    """Audits the private answers to one query by models of data with and without a canary.

    Args:
        ask: `ask(data, queries, account=, seed=) -> answers [Q]`, which trains on `data` and calls
            `private_predict`, `private_values` or `pate_predict`. It is called once for `data` and
            once for `data` with each candidate at a random place.
        event: The event of one answer, `jaxdp.prediction.event(1, ...)` or `ConfidentGNMax.event(1,
            max_answers=1)`.
        query: A pytree of arrays [...], ONE query.
        data: A pytree of arrays [n, ...], the training set without the canary.
        candidates: A pytree of arrays [N, ...], records that may be the canary, N >= 1, for
            "replace_one" N >= 2.
        delta, claim: As in `jaxdp.audit.multi_run`. PATE is audited at delta > 0 by the "gaussian"
            claim.
        terms: trials, adjacency ("add_remove" or "replace_one"), confidence and seed, as in
            `jaxdp.audit.trials.Trials`. `trials` answers of either kind are judged. As many others
            choose canary and score. Under "replace_one" another candidate is in the canary's place.
            The seed is that of the noise and of the places.

    Returns:
        The `Audit` of 2 `trials` answers, for one record, with the ledger's epsilon of one answer.

    Formal guarantees:
        As `jaxdp.audit.multi_run`. Given the models, the answers of a call have independent noise,
        and so the judged scores are independent. Canary and score are learnt from other answers.
        The score is the log ratio of the frequencies of an answer with and without the canary.

    Raises:
        ValueError: An argument is out of range. Nothing runs. Otherwise as in `ask`.
    """
    runs = Trials(
        charge=event, delta=delta, claim=claim, allowed=("add_remove", "replace_one"), **terms
    )
    count = count_rows(candidates, "candidates")
    runs.check_candidates("candidates must hold", count, "records")
    sets = []
    records = count_rows(data, "data")
    places = _places(runs.seed, records, count, runs.adjacency)
    for i, place in enumerate(places):
        insert = functools.partial(_with_candidate, i, place)
        sets.append(jax.tree.map(insert, data, candidates))
    if runs.adjacency == "add_remove":
        sets.append(data)
    answers = _answers(ask, sets, query, runs)
    cells = _cells(answers, runs.trials)
    # Half of the answers choose canary and score, the others are judged.
    choosing = [cell[: runs.trials] for cell in cells]
    kinds = max(cell.max() for cell in cells) + 1
    # Laplace's rule gives unseen answers a positive probability.
    counts = [np.bincount(cell, minlength=kinds) + 1 for cell in choosing]
    rates = np.log(counts)

    def distance(one: int, other: int) -> float:
        return float(np.abs(rates[one] - rates[other]).max())

    # The last model of "add_remove" is without a candidate.
    without = len(sets) - 1
    canary, neighbour = runs.farthest(list(range(count)), [without], distance)
    ratio = rates[canary] - rates[neighbour]

    def scores(model: int, purpose: str) -> np.ndarray:
        return ratio[cells[model][runs.trials :]]

    return runs.judge(scores, canary, neighbour)


def _with_candidate(
    i: int,
    place: int,
    data: Any,
    candidates: Any,
) -> np.ndarray:
    return np.insert(data, place, candidates[i], axis=0)


def _answers(
    ask: Callable[..., np.ndarray],
    sets: Sequence[Any],
    query: Any,
    runs: Trials,
) -> list[np.ndarray]:
    """Returns the answers [2 trials] of the model of each data set to one query."""

    def repeated(leaf: Any) -> np.ndarray:
        return np.repeat(np.asarray(leaf)[None], 2 * runs.trials, axis=0)

    queries = jax.tree.map(repeated, query)
    answers = []
    account = audited(runs.adjacency)
    for i, data in enumerate(sets):
        # Each model has a seed of its own. With one seed, equal models are one release.
        seed = release.derive(runs.seed, f"model {i}")
        answers.append(ask(data, queries, account=account, seed=seed))
    return answers


def _cells(answers: Sequence[np.ndarray], trials: int) -> list[np.ndarray]:
    """Returns answers as integers: the number of their value, or of their range of equal frequency.

    The first `trials` answers of each model choose values and ranges.
    """
    choosing = np.stack(answers)[:, :trials]
    levels = np.unique(choosing)
    if len(levels) > _RANGES:
        shares = np.arange(_RANGES) / _RANGES
        levels = np.unique(np.quantile(choosing, shares))
    return [np.searchsorted(levels, of_model, side="right") for of_model in answers]


def _places(
    seed: bytes,
    records: int,
    candidates: int,
    adjacency: Adjacency,
) -> np.ndarray:
    """Returns the position of each candidate among the records.

    A record and its replacement have one position.
    """
    rng = release.generator(release.derive(seed, "places"))
    places = rng.integers(records + 1, size=candidates)
    if adjacency == "replace_one":
        return np.full_like(places, places[0])
    return places
