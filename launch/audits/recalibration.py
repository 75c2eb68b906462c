"""Audits of private recalibration: all answers of one source in a conversation of every method.

The source has one record besides the canary. The canary's neighbour is an invalid record, which
adds nothing. Twins have the noise of the honest method unless they say otherwise.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxdp.audit import Audit
from jaxdp.audit import recalibration as auditing
from jaxdp.privacy.accounting import Adjacency
from jaxdp.recalibration import AccBisection, AccT, EceT, HistogramBinning, LogisticBinning, NllT
from jaxdp.recalibration.protocol import Method, Records

from . import case
from .case import Case, Run, under

EPSILON = 2.0
CLASSES = 10
BOUND = 10.0  # of a loss
TRIALS = 10_000
# Surely right, surely wrong and undecided. The loss of the second is a hundred times the bound.
CANDIDATES = (
    (1000 * np.eye(CLASSES, dtype=np.float32)[[0, 0, 1]] * [[1], [1], [0]]),
    np.array([0, 1, 0]),
)
OTHERS = np.zeros((1, CLASSES), np.float32), np.zeros(1, np.int32)


class UnboundedNllT(NllT):
    """NLL-T that does not clip losses, with the noise for clipped losses."""

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        return NllT(iterations=self.iterations, bound=1e4).summand(k, records, temperature)


def conversations(
    method: Method, *, unclipped: Method | str, replaced: str | None = None
) -> tuple[Run, Any]:
    """Returns the audit of a method's conversations with a source, and of its twins.

    `unclipped` is the method without its clip, or why there is none. `replaced` says why the
    sensitivity is the same if a record is replaced.
    """
    kind = type(method)
    whole = kind.sensitivity

    def audit(
        method: Method,
        *,
        epsilon: float = EPSILON,
        adjacency: Adjacency = "zero_out",
        **broken: Any,
    ) -> Run:
        def run(trials: int, seed: bytes) -> Audit:
            with contextlib.ExitStack() as stack:
                for target, name in ((kind, "sensitivity"), (auditing, "converse")):
                    if name in broken:
                        stack.enter_context(mock.patch.object(target, name, broken[name]))
                audit = auditing.audit_source(
                    method,
                    *OTHERS,
                    epsilon=epsilon,
                    trials=trials,
                    candidates=CANDIDATES,
                    adjacency=adjacency,
                    confidence=case.CONFIDENCE,
                    seed=seed,
                )
            return under(audit, EPSILON)

        return run

    def halved(self: Method, k: int, adjacency: Adjacency, num_classes: int) -> float:
        return whole(self, k, adjacency, num_classes) / 2

    def of_added_records(self: Method, k: int, adjacency: Adjacency, num_classes: int) -> float:
        return whole(self, k, "add_remove", num_classes)

    twins: Mapping[str, Run | str] = {
        case.HALF_THE_NOISE: audit(method, epsilon=2 * EPSILON),
        case.NO_CLIPPING: unclipped if isinstance(unclipped, str) else audit(unclipped),
        case.SENSITIVITY_OFF_BY_TWO: audit(method, sensitivity=halved),
        case.REUSED_KEY: audit(method, converse=_with_one_key(auditing.converse)),
        case.ADD_REMOVE_FOR_REPLACE_ONE: replaced
        or audit(method, adjacency="replace_one", sensitivity=of_added_records),
    }
    return audit(method), twins


def _with_one_key(converse: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a conversation that draws its noise from one key, whatever key it is given."""

    def broken(method: Method, parties: Any, key: jax.Array, **options: Any) -> Any:
        same = jax.random.wrap_key_data(0 * jax.random.key_data(key), impl=jax.random.key_impl(key))
        return converse(method, parties, same, **options)

    return broken


def _cases() -> Iterator[Case]:
    count = "a record adds a count of 1: there is no clip"
    gap = "a record adds the gap of two numbers in [0, 1]: there is no clip"
    proof = (
        "Laplace noise on sums of bounded numbers, drawn by integers, composed over rounds; Luo et "
        "al., {}; `jaxdp.recalibration.protocol`, `jaxdp.transforms.noise.geometric`"
    )
    methods: dict[str, tuple[Method, Any, str | None, str]] = {
        "NLL-T": (
            NllT(iterations=1, bound=BOUND),
            UnboundedNllT(iterations=1, bound=BOUND),
            "a clipped loss is in [0, bound]: whether a record is added or replaced, a sum moves "
            "by at most the bound",
            "Section C.2.1",
        ),
        "ECE-T": (EceT(iterations=1), gap, None, "Section C.2.2"),
        "Acc-T": (AccT(iterations=1), gap, None, "Section 4, Algorithm 1"),
        "Acc-T by bisection": (AccBisection(iterations=2), gap, None, "Algorithm 1"),
        "histogram binning": (HistogramBinning(), count, None, "Section C.2.3"),
        "histogram binning as published": (
            HistogramBinning(form="published"),
            count,
            None,
            "Section C.2.3",
        ),
        "logistic binning": (LogisticBinning(), count, None, "Section C.2.3"),
    }
    for name, (method, unclipped, replaced, where) in methods.items():
        run, twins = conversations(method, unclipped=unclipped, replaced=replaced)
        rounds = f"{method.rounds} round{'s' if method.rounds > 1 else ''}"
        claim = (
            f"all answers of a source in {rounds}: pure epsilon {EPSILON:g}, for a record made "
            "invalid"
        )
        yield Case(name, claim, proof.format(where), run, twins, trials=TRIALS)


CASES = tuple(_cases())
