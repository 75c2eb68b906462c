"""Audits of private answers: what the answers to one query tell about one training record.

    def train(data):
        return train_with_bounds(loss_fn, params, data, ks=20, clip=0.1, learning_rate=0.5, batch_size=n, epochs=1)

    print(audit_answers(train, apply_fn, query, data, records, epsilon=0.5, trials=5000).describe())

A trial is one answer. One call of the stage answers the query many times, with noise of its own each time. A model is
trained with each candidate, and half of its answers are heard. The canary is the record that changes the probability of
an answer most: it flips the label, or the vote of an ensemble, or the distance to the next flip.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp.audit import bounds
from jaxdp.prediction.ensembles import ConfidentGNMax, count_rows
from jaxdp.prediction.private import ApplyFn, answers_event, pate_predict, private_predict, private_values
from jaxdp.privacy import Account, DpEvent, Ledger
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim, derive, new_seed

# `ask(trained, queries, account, seed) -> answers [Q]`
Ask = Callable[[Any, Any, Account, bytes], np.ndarray]

# Answers that are numbers are told apart by as many ranges, each of which is heard equally often.
_RANGES = 32


def audit_answers(
    train: Callable[[Any], Any],
    apply_fn: ApplyFn,
    query: Any,
    data: Any,
    candidates: Any,
    *,
    epsilon: float,
    trials: int,
    mechanism: str = "randomised_response",
    output_range: tuple[float, float] | None = None,
    adjacency: Adjacency = "add_remove",
    confidence: float = 0.95,
    seed: bytes | None = None,
) -> bounds.Audit:
    """Audits the private answers to one query by models of data with and without a canary.

    Args:
        train: `train(data) -> bounds`, one model's or an ensemble's, as `private_predict` takes them; called once for
            `data` and once for `data` with each candidate after its last record.
        apply_fn: as in `private_predict` or `private_values`.
        query: pytree of arrays [...], ONE query.
        data: pytree of arrays [n, ...], the training set without the canary.
        candidates: pytree of arrays [N, ...], records that may be the canary, N >= 1, for "replace_one" N >= 2.
        epsilon: of each answer.
        trials: answers of either kind that are judged, at least 2; as many before them choose canary and score.
        mechanism: as in `private_predict`, or with `output_range` as in `private_values`.
        output_range: of a regression model, as in `private_values`; None for labels.
        adjacency: under "add_remove" the canary's neighbour is no record, under "replace_one" another candidate.
        confidence: in (0.5, 1).
        seed: 16 secret bytes of the noise; drawn from the operating system unless given for tests.

    Returns:
        The `Audit` at delta 0 of 2 `trials` answers, for one record, with the ledger's epsilon of one answer.

    Formal guarantees:
        As `jaxdp.audit.multi_run`. Given the models, the answers of a call have independent noise, and so have the
        scores that are judged. Canary and score, the log ratio of how often an answer is heard with and without the
        canary, are learnt from other answers.

    Raises:
        ValueError: an argument is out of range, or as `private_predict`.
    """

    def ask(trained: Any, queries: Any, account: Account, seed: bytes) -> np.ndarray:
        terms: dict[str, Any] = {"account": account, "epsilon": epsilon, "mechanism": mechanism, "seed": seed}
        if output_range is None:
            return private_predict(trained, apply_fn, queries, **terms)
        return private_values(trained, apply_fn, queries, output_range=output_range, **terms)

    event = answers_event(1, epsilon=epsilon, mechanism=mechanism)
    return _audit(ask, event, train, query, data, candidates, trials, 0.0, "approximate", adjacency, confidence, seed)


def audit_pate(
    train: Callable[[Any], Any],
    apply_fn: ApplyFn,
    query: Any,
    data: Any,
    candidates: Any,
    *,
    mechanism: ConfidentGNMax,
    trials: int,
    delta: float,
    adjacency: Adjacency = "add_remove",
    confidence: float = 0.95,
    seed: bytes | None = None,
) -> bounds.Audit:
    """Audits PATE's answers to one query, by the Gaussian claim, as `audit_answers` those of `private_predict`.

    Args:
        train: `train(data) -> members`, the parameters of the models, as `pate_predict` takes them.
        mechanism: threshold and noise. A threshold that all queries pass leaves the vote to be told.
        delta: of both bounds, in (0, 1).
        apply_fn, query, data, candidates, trials, adjacency, confidence, seed: as in `audit_answers`.

    Returns:
        The `Audit`, with the ledger's epsilon of one query and its answer.

    Raises:
        ValueError, TypeError: an argument is out of range, or as `pate_predict`.
    """

    def ask(trained: Any, queries: Any, account: Account, seed: bytes) -> np.ndarray:
        count = count_rows(queries, "queries")
        terms: dict[str, Any] = {"account": account, "mechanism": mechanism, "max_answers": count, "seed": seed}
        return pate_predict(trained, apply_fn, queries, **terms)

    event = mechanism.event(1, max_answers=1)
    return _audit(ask, event, train, query, data, candidates, trials, delta, "gaussian", adjacency, confidence, seed)


def _audit(
    ask: Ask,
    event: DpEvent,
    train: Callable[[Any], Any],
    query: Any,
    data: Any,
    candidates: Any,
    trials: int,
    delta: float,
    kind: bounds.Claim,
    adjacency: Adjacency,
    confidence: float,
    seed: bytes | None,
) -> bounds.Audit:
    if adjacency not in ("add_remove", "replace_one"):
        raise ValueError(f"adjacency must be 'add_remove' or 'replace_one', got {adjacency!r}")
    if trials < 2:
        raise ValueError(f"trials must be at least 2, got {trials}")
    upper = claim(event, adjacency=adjacency, delta=delta)
    bounds.check(upper, delta, confidence, kind)
    count, least = count_rows(candidates, "candidates"), 2 if adjacency == "replace_one" else 1
    if count < least:
        raise ValueError(f"candidates must hold at least {least} records under {adjacency!r}, got {count}")
    rows = [jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i : i + 1], candidates) for i in range(count)]
    sets = [jax.tree.map(lambda leaf, one: np.concatenate([leaf, one]), data, row) for row in rows]
    trained = [train(one) for one in (sets if adjacency == "replace_one" else [*sets, data])]
    seed = new_seed() if seed is None else seed

    queries = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], 2 * trials, axis=0), query)
    with Ledger.in_memory() as ledger:
        ledger.register("audited", adjacency=adjacency, unit="record")
        account = ledger.account("audited", label="audit")
        # Under one seed, equal models would be one release.
        heard = [ask(one, queries, account, derive(seed, f"model {i}")) for i, one in enumerate(trained)]
    tried = np.stack(heard)[:, :trials]
    levels = np.unique(tried)
    if len(levels) > _RANGES:
        levels = np.unique(np.quantile(tried, np.arange(_RANGES) / _RANGES))
    cells = [np.searchsorted(levels, answers, side="right") for answers in heard]
    # Laplace's rule keeps answers that were not heard from being impossible.
    rates = np.log([np.bincount(cell[:trials], minlength=len(levels) + 1) + 1 for cell in cells])
    neighbours = range(len(sets)) if adjacency == "replace_one" else [len(sets)]
    pairs = itertools.product(range(len(sets)), neighbours)
    canary, neighbour = max(pairs, key=lambda pair: np.abs(rates[pair[0]] - rates[pair[1]]).max())
    present, absent = ((rates[canary] - rates[neighbour])[cells[i][trials:]] for i in (canary, neighbour))
    return bounds.multi_run(present, absent, upper=upper, delta=delta, confidence=confidence, claim=kind)
