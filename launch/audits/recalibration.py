"""Audits of private recalibration: all answers of one source in a conversation of every method.

The source has one record besides the canary. The canary's neighbour is an invalid record, which
adds nothing. Twins have the noise of the honest method unless they say otherwise.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from jaxdp.audit import Audit
from jaxdp.audit import recalibration as auditing
from jaxdp.privacy.accounting import Adjacency
from jaxdp.recalibration import AccBisection, AccT, EceT, HistogramBinning, LogisticBinning, NllT
from jaxdp.recalibration.protocol import Method, Records

from . import case
from .case import Audits, Case, Run, Twin, held, standard_twins

EPSILON = 2.0
CLASSES = 10
BOUND = 10.0  # of a loss
TRIALS = 10_000
# Surely right, surely wrong and undecided. The loss of the second is a hundred times the bound.
_LOGITS = np.zeros((3, CLASSES))
_LOGITS[:2, 0] = 1000
CANDIDATES = (_LOGITS, np.array([0, 1, 0]))
OTHERS = np.zeros((1, CLASSES), np.float32), np.zeros(1, np.int32)


class UnboundedNllT(NllT):
    """NLL-T that does not clip losses, with the noise for clipped losses."""

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        unbounded = NllT(iterations=self.iterations, bound=1e4)
        return unbounded.summand(k, records, temperature)


def conversations(
    method: Method, *, unclipped: Method | str, replaced: str | None = None
) -> Audits:
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
        def seen(**terms: Any) -> Audit:
            with contextlib.ExitStack() as stack:
                for target, name in ((kind, "sensitivity"), (auditing, "converse")):
                    if name in broken:
                        stack.enter_context(mock.patch.object(target, name, broken[name]))
                return auditing.audit_source(method, *OTHERS, candidates=CANDIDATES, **terms)

        return held(case.run_of(seen, epsilon=epsilon, adjacency=adjacency), EPSILON)

    def halved(self: Method, k: int, adjacency: Adjacency, num_classes: int) -> float:
        return whole(self, k, adjacency, num_classes) / 2

    def of_added_records(self: Method, k: int, adjacency: Adjacency, num_classes: int) -> float:
        return whole(self, k, "add_remove", num_classes)

    without_clip: Twin = unclipped if isinstance(unclipped, str) else audit(unclipped)
    one_key = _with_one_key(auditing.converse)
    of_replaced = audit(method, adjacency="replace_one", sensitivity=of_added_records)
    twins = standard_twins(
        half_the_noise=audit(method, epsilon=2 * EPSILON),
        no_clipping=without_clip,
        sensitivity_off_by_two=audit(method, sensitivity=halved),
        reused_key=audit(method, converse=one_key),
        add_remove_for_replace_one=replaced or of_replaced,
    )
    return audit(method), twins


def _with_one_key(converse: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a conversation that draws its noise from one key, whatever key it is given."""

    def broken(method: Method, parties: Any, key: jax.Array, **options: Any) -> Any:
        return converse(method, parties, case.one_key(key), **options)

    return broken


class _Audited(NamedTuple):
    """A method, where it is described, and the arguments of `conversations`."""

    method: Method
    section: str
    unclipped: Method | str
    replaced: str | None = None


def _methods() -> dict[str, _Audited]:
    count = "a record adds a count of 1: there is no clip"
    gap = "a record adds the gap of two numbers in [0, 1]: there is no clip"
    nll = _Audited(
        NllT(iterations=1, bound=BOUND),
        "Section C.2.1",
        UnboundedNllT(iterations=1, bound=BOUND),
        "a clipped loss is in [0, bound]: whether a record is added or replaced, a sum moves by "
        "at most the bound",
    )
    published = HistogramBinning(form="published")
    return {
        "NLL-T": nll,
        "ECE-T": _Audited(EceT(iterations=1), "Section C.2.2", gap),
        "Acc-T": _Audited(AccT(iterations=1), "Section 4, Algorithm 1", gap),
        "Acc-T by bisection": _Audited(AccBisection(iterations=2), "Algorithm 1", gap),
        "histogram binning": _Audited(HistogramBinning(), "Section C.2.3", count),
        "histogram binning as published": _Audited(published, "Section C.2.3", count),
        "logistic binning": _Audited(LogisticBinning(), "Section C.2.3", count),
    }


def _cases() -> Iterator[Case]:
    for name, (method, section, unclipped, replaced) in _methods().items():
        run, twins = conversations(method, unclipped=unclipped, replaced=replaced)
        rounds = f"{method.rounds} round{'s' if method.rounds > 1 else ''}"
        claim = (
            f"all answers of a source in {rounds}: pure epsilon {EPSILON:g}, for a record made "
            "invalid"
        )
        proof = (
            "Laplace noise on sums of bounded numbers, drawn by integers, composed over rounds; "
            f"Luo et al., {section}; `jaxdp.recalibration.protocol`, "
            "`jaxdp.transforms.noise.geometric`"
        )
        yield Case(name, claim, proof, run, twins, trials=TRIALS)


CASES = tuple(_cases())
