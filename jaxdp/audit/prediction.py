"""Canaries for private answers: what the answers to one query tell about one training record.

    def train(data):
        return train_with_bounds(loss_fn, params, data, ks=20, clip=0.1, learning_rate=0.5, batch_size=n, epochs=1)

    print(canaries.audit_answers(train, apply_fn, query, data, records, epsilon=0.5, trials=5000).describe())

A trial is one answer. Which record is the canary, is found by training with each and asking: the one that changes the
probability of an answer most, because it flips the label, or the vote of an ensemble, or the distance to the next flip.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp.audit import bounds
from jaxdp.prediction.ensembles import count_rows
from jaxdp.prediction.private import ApplyFn, private_predict
from jaxdp.privacy import Account
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim, derive, new_seed


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
    adjacency: Adjacency = "add_remove",
    confidence: float = 0.95,
    seed: bytes | None = None,
) -> bounds.Audit:
    """Audits the answers of `private_predict` for training with a canary and without it.

    Args:
        train: `train(data) -> bounds`, or a sequence of bounds, as `private_predict` takes them; called once for `data`
            and once for `data` with each candidate after its last record.
        apply_fn: as in `private_predict`.
        query: pytree of arrays [...], ONE query.
        data: pytree of arrays [n, ...], the training set without the canary.
        candidates: pytree of arrays [N, ...], records that may be the canary, N >= 1, for "replace_one" N >= 2.
        epsilon: of each answer.
        trials: answers of either kind that are judged, at least 2; as many before them choose canary and score.
        mechanism: as in `private_predict`.
        adjacency: under "add_remove" the canary's neighbour is no record, under "replace_one" another candidate.
        confidence: in (0.5, 1).
        seed: 16 secret bytes of the noise; drawn from the operating system unless given for tests.

    Returns:
        The `Audit` at delta 0, for one record, with the ledger's epsilon of one answer.

    Raises:
        ValueError: an argument is out of range, or as `private_predict`.
    """
    if adjacency not in ("add_remove", "replace_one"):
        raise ValueError(f"adjacency must be 'add_remove' or 'replace_one', got {adjacency!r}")
    if trials < 2:
        raise ValueError(f"trials must be at least 2, got {trials}")
    bounds.check(math.inf, 0.0, confidence)
    count, least = count_rows(candidates, "candidates"), 2 if adjacency == "replace_one" else 1
    if count < least:
        raise ValueError(f"candidates must hold at least {least} records under {adjacency!r}, got {count}")
    rows = [jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i : i + 1], candidates) for i in range(count)]
    sets = [jax.tree.map(lambda leaf, one: np.concatenate([leaf, one]), data, row) for row in rows]
    trained = [train(one) for one in (sets if adjacency == "replace_one" else [*sets, data])]
    queries = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], trials, axis=0), query)
    seed = new_seed() if seed is None else seed
    calls, heard = itertools.count(), list[np.ndarray]()

    def attack(account: Account) -> None:
        def answers(bounds: Any) -> np.ndarray:
            noise = derive(seed, f"call {next(calls)}")  # else two calls with one model would be one release
            return private_predict(
                bounds, apply_fn, queries, account=account, epsilon=epsilon, mechanism=mechanism, seed=noise
            )

        tried = [answers(bounds) for bounds in trained]
        labels = range(max(int(given.max()) for given in tried) + 1)
        # Laplace's rule keeps answers that were not heard from being impossible.
        rates = np.log([[np.sum(given == label) + 1 for label in labels] for given in tried])
        neighbours = range(len(sets)) if adjacency == "replace_one" else [len(sets)]
        pairs = itertools.product(range(len(sets)), neighbours)
        canary, neighbour = max(pairs, key=lambda pair: np.abs(rates[pair[0]] - rates[pair[1]]).max())
        score = np.append(rates[canary] - rates[neighbour], 0.0)  # a label not heard before tells nothing
        heard.extend(score[np.minimum(answers(trained[i]), len(labels))] for i in (canary, neighbour))

    # Pure epsilons add up at delta 0.
    upper = claim(attack, adjacency=adjacency, delta=0.0) / (next(calls) * trials)
    return bounds.multi_run(*heard, upper=upper, delta=0.0, confidence=confidence)
