"""Audits of recalibration: the noisy answers of a source.

    print(audit_source(AccT(), logits, labels, epsilon=1.0, trials=1000).describe())

A trial is a conversation of the source, with a record or its neighbour, and a calibrator that keeps
the answers. All pairs of records are tried without noise. The pair with the farthest answers is the
canary and its neighbour.
"""

import dataclasses
import itertools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import Exact, NeighbourTerms, Trials
from jaxdp.files import shows_keywords
from jaxdp.privacy.accounting import Adjacency
from jaxdp.recalibration.protocol import Method, Party, Records, event
from jaxdp.recalibration.recalibrate import converse


@dataclasses.dataclass(frozen=True)
class _Transcript:
    """A `Method` that asks another method's questions at one temperature and keeps every answer.

    Attributes:
      method: The method whose questions are asked.
      temperature: The temperature in every round, for all answers.
    """

    method: Method
    temperature: float

    @property
    def rounds(self) -> int:
        return self.method.rounds

    def sensitivity(
        self,
        k: int,
        adjacency: Adjacency,
        num_classes: int,
    ) -> float:
        return self.method.sensitivity(k, adjacency, num_classes)

    def init(self, variance: float | jax.Array) -> tuple[jax.Array, ...]:
        return ()

    def question(self, k: int, state: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.float32(self.temperature)

    def summand(
        self,
        k: int,
        records: Records,
        temperature: jax.Array,
    ) -> jax.Array:
        return self.method.summand(k, records, temperature)

    def update(
        self,
        k: int,
        state: tuple[jax.Array, ...],
        answer: jax.Array,
    ) -> tuple[jax.Array, ...]:
        return (*state, answer)

    def finish(self, state: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.concatenate(state)

    def confidence(self, parameters: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.full(len(logits), jnp.nan)  # An audit does not recalibrate.


@shows_keywords(NeighbourTerms, vars(Trials))
def audit_source(
    method: Method,
    logits: Any,
    labels: Any,
    *,
    epsilon: float,
    candidates: tuple[Any, Any] | None = None,
    temperature: float = 1.0,
    **terms: Unpack[NeighbourTerms],
) -> bounds.Audit:
    """Audits a source's answers by many conversations with and without a canary.

    Args:
      method: The method of the calibrator.
      logits, labels: The source's other records, floating point [n, m] and integer [n]. n may be 0.
      epsilon: The finite epsilon of all answers of a conversation.
      candidates: (logits [N, m], labels [N]) of records that may be the canary. The default has
        records that are surely right, surely wrong and undecided.
      temperature: The temperature of every question.
      terms: trials, adjacency, confidence and seed, as in `jaxdp.audit.trials.Trials`. Under
        "zero_out" the canary's neighbour is an invalid record.

    Returns:
      The `Audit` at delta 0 of 2 `trials` conversations, for one record, with the ledger's epsilon
      of one conversation.

    Formal guarantees:
      As `jaxdp.audit.multi_run`. Every conversation has its own key, so that scores are
      independent. The score is the log likelihood ratio of Laplace noise up to its scale. It is
      fixed before any noise is drawn. The keys are of the kind "threefry2x32", which are
      independent under `jax.vmap`. `recalibrate` draws keys of the kind "chacha12".

    Raises:
      ValueError, TypeError: As in `recalibrate`, or no candidate changes the answers.
    """
    runs = Trials(charge=event(epsilon), delta=0.0, claim="approximate", **terms)
    logits = np.asarray(logits, np.float32)
    labels = np.asarray(labels, np.int32)
    if candidates is None:
        canaries = _extremes(logits.shape[1])
    else:
        canaries = list(zip(*candidates, strict=True))
    absent: Any = None
    num_classes = logits.shape[1]
    if runs.adjacency == "zero_out":
        absent = (np.zeros(num_classes, np.float32), -1)  # an invalid record
    calibrator = _Transcript(method, temperature)

    def answers(
        record: Any,
        epsilon: float,
        purpose: str,
        count: int,
    ) -> np.ndarray:
        """Returns all answers of each of `count` conversations, float64 [count, numbers]."""
        party = Party(logits, labels)
        if record is not None:
            # Among the others, so that half of them have another position than without it.
            place = len(labels) // 2
            record_logits, label = record
            with_logits = np.insert(logits, place, record_logits, axis=0)
            party = Party(with_logits, np.insert(labels, place, label))

        def talk(key: jax.Array) -> jax.Array:
            return converse(calibrator, [party], key, epsilon=epsilon, adjacency=runs.adjacency)

        keys = runs.keys(purpose, count)
        return np.asarray(jax.vmap(talk)(keys), np.float64)

    def without_noise(record: Any) -> Exact:
        (result,) = answers(record, math.inf, "no noise", 1)
        return Exact(record, result)

    def distance(one: Exact, other: Exact) -> float:
        return float(np.abs(one.result - other.result).sum())

    exact = [without_noise(record) for record in canaries]
    refusal = (
        "candidates must hold a record that changes the answers. These change nothing, or the same."
    )
    canary, neighbour = runs.farthest(exact, [without_noise(absent)], distance, refusal)

    def scores(record: Any, purpose: str) -> np.ndarray:
        noisy = answers(record, epsilon, purpose, runs.trials)
        from_neighbour = np.abs(noisy - neighbour.result).sum(1)
        from_canary = np.abs(noisy - canary.result).sum(1)
        return from_neighbour - from_canary

    return runs.judge(scores, canary.data, neighbour.data)


def _extremes(num_classes: int) -> list[tuple[np.ndarray, int]]:
    """Returns a record far inside the first class, and an undecided one.

    Each comes with a right and with a wrong label.
    """
    first_class = np.eye(num_classes, dtype=np.float32)[0]
    logits = (50.0 * first_class, 0.0 * first_class)
    return [(row, label) for row, label in itertools.product(logits, (0, 1))]
