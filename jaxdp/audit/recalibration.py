"""Audits of recalibration: the noisy answers of a source.

    print(audit_source(AccT(), logits, labels, epsilon=1.0, trials=1000).describe())

A trial is a conversation of the source, with a record or its neighbour, and a calibrator that keeps
the answers. All pairs of records are tried without noise. The pair with the farthest answers is the
canary and its neighbour.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import Trials
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

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        return self.method.sensitivity(k, adjacency, num_classes)

    def init(self, variance: float | jax.Array) -> tuple[jax.Array, ...]:
        return ()

    def question(self, k: int, state: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.float32(self.temperature)

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        return self.method.summand(k, records, temperature)

    def update(
        self, k: int, state: tuple[jax.Array, ...], answer: jax.Array
    ) -> tuple[jax.Array, ...]:
        return (*state, answer)

    def finish(self, state: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.concatenate(state)

    def confidence(self, parameters: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.full(len(logits), jnp.nan)  # An audit does not recalibrate.


def audit_source(
    method: Method,
    logits: Any,
    labels: Any,
    *,
    epsilon: float,
    candidates: tuple[Any, Any] | None = None,
    temperature: float = 1.0,
    **terms: Any,
) -> bounds.Audit:
    """Audits a source's answers by many conversations with a canary among its records and as many
    without it.

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
      ValueError, TypeError: As in `recalibrate`.
    """
    runs = Trials(charge=event(epsilon), delta=0.0, claim="approximate", **terms)
    logits, labels = np.asarray(logits, np.float32), np.asarray(labels, np.int32)
    canaries = (
        _extremes(logits.shape[1]) if candidates is None else list(zip(*candidates, strict=True))
    )
    absent: Any = (
        (np.zeros(logits.shape[1], np.float32), -1) if runs.adjacency == "zero_out" else None
    )
    calibrator = _Transcript(method, temperature)

    def answers(record: Any, epsilon: float, purpose: str, count: int) -> np.ndarray:
        """Returns all answers of each of `count` conversations, float64 [count, numbers]."""
        more = (logits, labels)
        if (
            record is not None
        ):  # among the others, so that half of them have another position than without it
            place = len(labels) // 2
            more = np.insert(logits, place, record[0], axis=0), np.insert(labels, place, record[1])
        parties, talk = (
            [Party(*more)],
            functools.partial(converse, epsilon=epsilon, adjacency=runs.adjacency),
        )
        talks = jax.vmap(lambda key: talk(calibrator, parties, key))
        return np.asarray(talks(runs.keys(purpose, count)), np.float64)

    exact, without = (
        [(answers(record, math.inf, "no noise", 1)[0], record) for record in records]
        for records in (canaries, [absent])
    )
    pair = runs.farthest(exact, without, lambda one, other: np.abs(one[0] - other[0]).sum())
    (one, canary), (other, neighbour) = pair

    def scores(record: Any, purpose: str) -> np.ndarray:
        heard = answers(record, epsilon, purpose, runs.trials)
        return np.abs(heard - other).sum(1) - np.abs(heard - one).sum(1)

    return runs.judge(scores, canary, neighbour)


def _extremes(num_classes: int) -> list[tuple[np.ndarray, int]]:
    """Returns records far inside the first class and undecided records, each with a right and with
    a wrong label.
    """
    return [
        (scale * np.eye(num_classes, dtype=np.float32)[0], label)
        for scale in (50.0, 0.0)
        for label in (0, 1)
    ]
