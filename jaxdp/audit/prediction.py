"""Audits of private answers to one query.

    def ask(data, queries, **terms):
        bounds = train_with_bounds(loss_fn, params, data, ks=20, clip=0.1, learning_rate=0.5, batch_size=n, epochs=1)
        return private_predict(bounds, apply_fn, queries, epsilon=0.5, **terms)

    print(audit_answers(ask, event(1, epsilon=0.5), query, data, records, trials=5000).describe())

A trial is one answer. One call of the stage answers the query many times, each time with fresh
noise. A model is trained with each candidate, and half of its answers choose the canary. The canary
is the record that changes the probability of an answer most. It flips the label, the vote of an
ensemble, or the distance to the next flip.

The canary sits anywhere among the records, so all records behind it have other positions than
without it. This shows batches or parts that follow from positions.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp import release
from jaxdp.audit import bounds
from jaxdp.prediction.checks import count_rows
from jaxdp.privacy import DpEvent, Ledger
from jaxdp.privacy.accounting import Adjacency

# Numeric answers are cut into this many ranges of equal frequency.
_RANGES = 32


def audit_answers(
    ask: Callable[..., np.ndarray],
    event: DpEvent,
    query: Any,
    data: Any,
    candidates: Any,
    *,
    trials: int,
    delta: float = 0.0,
    claim: bounds.Claim = "approximate",
    adjacency: Adjacency = "add_remove",
    confidence: float = 0.95,
    seed: bytes | None = None,
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
        trials: The number of judged answers of either kind, at least 2. As many others choose
            canary and score.
        delta, claim: As in `jaxdp.audit.multi_run`. PATE is audited at delta > 0 by the "gaussian"
            claim.
        adjacency: "add_remove" compares the canary with no record, "replace_one" with another
            candidate in its place.
        confidence: In (0.5, 1).
        seed: 16 secret bytes of the noise and of the places, for tests. The default is OS entropy.

    Returns:
        The `Audit` of 2 `trials` answers, for one record, with the ledger's epsilon of one answer.

    Formal guarantees:
        As `jaxdp.audit.multi_run`. Given the models, the answers of a call have independent noise,
        and so the judged scores are independent. Canary and score are learnt from other answers.
        The score is the log ratio of the frequencies of an answer with and without the canary.

    Raises:
        ValueError: An argument is out of range. Nothing runs. Otherwise as in `ask`.
    """
    if adjacency not in ("add_remove", "replace_one"):
        raise ValueError(f"adjacency must be 'add_remove' or 'replace_one', got {adjacency!r}.")
    if trials < 2:
        raise ValueError(f"trials must be at least 2, got {trials}.")
    upper = release.claim(event, adjacency=adjacency, delta=delta)
    bounds.check(upper, delta, confidence, claim)
    count, least = count_rows(candidates, "candidates"), 2 if adjacency == "replace_one" else 1
    if count < least:
        raise ValueError(
            f"candidates must hold at least {least} records under {adjacency!r}, got {count}."
        )
    seed = release.new_seed() if seed is None else seed
    sets = [
        jax.tree.map(
            lambda leaf, some, i=i, place=place: np.insert(leaf, place, some[i], axis=0),
            data,
            candidates,
        )
        for i, place in enumerate(_places(seed, count_rows(data, "data"), count, adjacency))
    ]
    neighbours = range(count)
    if adjacency == "add_remove":
        sets, neighbours = [*sets, data], range(count, count + 1)

    queries = jax.tree.map(
        lambda leaf: np.repeat(np.asarray(leaf)[None], 2 * trials, axis=0), query
    )
    with Ledger.in_memory() as ledger:
        ledger.register("audited", adjacency=adjacency, unit="record")
        account = ledger.account("audited", label="audit")
        # With one seed, equal models are one release.
        seeds = [release.derive(seed, f"model {i}") for i in range(len(sets))]
        heard = [
            ask(one, queries, account=account, seed=own)
            for one, own in zip(sets, seeds, strict=True)
        ]
    tried = np.stack(heard)[:, :trials]
    levels = np.unique(tried)
    if len(levels) > _RANGES:
        levels = np.unique(np.quantile(tried, np.arange(_RANGES) / _RANGES))
    cells = [np.searchsorted(levels, answers, side="right") for answers in heard]
    # Laplace's rule gives unseen answers a positive probability.
    rates = np.log([np.bincount(cell[:trials], minlength=len(levels) + 1) + 1 for cell in cells])
    pairs = itertools.product(range(count), neighbours)
    canary, neighbour = max(pairs, key=lambda pair: np.abs(rates[pair[0]] - rates[pair[1]]).max())
    present, absent = (
        (rates[canary] - rates[neighbour])[cells[i][trials:]] for i in (canary, neighbour)
    )
    return bounds.multi_run(
        present, absent, upper=upper, delta=delta, confidence=confidence, claim=claim
    )


def _places(seed: bytes, records: int, candidates: int, adjacency: Adjacency) -> np.ndarray:
    """Returns the position of each candidate among the records. A record and its replacement have
    one position.
    """
    key = int.from_bytes(release.derive(seed, "places"), "little")
    places = np.random.Generator(np.random.Philox(key=key)).integers(records + 1, size=candidates)
    return np.full_like(places, places[0]) if adjacency == "replace_one" else places
