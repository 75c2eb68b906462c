"""Audits of private answers: one answer of every mechanism, by a linear model with one weight.

A record (x, y, part) moves the weight up for y = 1 and down for y = 0. Its gradient is clipped, so
it moves the weight by one unit for all x > 0. The weight is the surplus of records with y = 1, in
these units. The answer is whether the weight is positive, or its value. An ensemble trains a member
for every part.

Twins have the noise of the honest mechanism unless they say otherwise. Each twin has data that
expose its mistake.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import Audit
from jaxdp.audit.prediction import audit_answers
from jaxdp.prediction import (
    METHODS,
    Bounds,
    certify,
    ensembles,
    event,
    mechanisms,
    pate_predict,
    private_predict,
    private_values,
    train_with_bounds,
)
from jaxdp.prediction import answers as answering
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim
from jaxdp.transforms import losses, noise

from . import case
from .case import Case, Run, under

Data = Mapping[str, np.ndarray]
Train = Callable[[Data], Any]

ROWS, CLIP = 16, 0.1
UNIT = CLIP / ROWS
DELTA, TRIALS = 1e-5, 20_000
# A twin of each of these shows in rare answers only.
RARE = {
    "randomised response of a certified vote",
    "Cauchy noise on values",
    "Laplace noise on votes",
}
QUERY = np.float32(1.0)
# Keys of this kind give the same noise on all devices.
KEY = jax.random.key(38, impl="threefry2x32")


def records(surpluses: Sequence[int]) -> Data:
    """Returns data with a given surplus of y = 1 over y = 0 in each part.

    A part has `ROWS` records, or one fewer if its surplus is odd.
    """
    rows = [ROWS - surplus % 2 for surplus in surpluses]
    ones = [(n + surplus) // 2 for n, surplus in zip(rows, surpluses, strict=True)]
    labels = [np.repeat([1, 0], [m, n - m]) for m, n in zip(ones, rows, strict=True)]
    return _records(np.concatenate(labels), np.repeat(np.arange(len(surpluses)), rows))


def _records(y: Any, part: Any, x: float = 1.0) -> Data:
    y = np.asarray(y, np.float32)
    return {"x": np.full(len(y), x, np.float32), "y": y, "part": np.asarray(part, np.int32)}


def loss(params: Any, example: Any) -> jax.Array:
    return losses.sigmoid_cross_entropy(params["w"] * example["x"], example["y"])


def label(params: Any, query: jax.Array) -> jax.Array:
    """Returns a logit from the weight."""
    return params["w"] * query


def value(params: Any, query: jax.Array) -> jax.Array:
    """Returns the surplus."""
    return params["w"] * query / UNIT


# --- Training -----------------------------------------------------------------------------------


@functools.cache
def _trained(y: bytes, x: bytes, clip: float) -> Bounds:
    data = {"x": np.frombuffer(x, np.float32), "y": np.frombuffer(y, np.float32)}
    options: dict[str, Any] = {"learning_rate": 1.0, "batch_size": ROWS, "epochs": 1}
    return train_with_bounds(loss, {"w": jnp.zeros(())}, data, ks=10, clip=clip, **options)


def one_model(data: Data, *, clip: float = CLIP) -> Bounds:
    """Trains on all parts together, in one step."""
    return _trained(data["y"].tobytes(), data["x"].tobytes(), clip)


def forgetful(data: Data) -> Bounds:
    """Returns bounds for clipped gradients, moved to a model that was trained without the clip."""
    clipped = one_model(data)
    unclipped = one_model(data, clip=20.0)

    def moved(end: Any) -> Any:
        return {"w": end["w"] - clipped.params["w"] + unclipped.params["w"]}

    return dataclasses.replace(
        clipped,
        params=unclipped.params,
        lower=moved(clipped.lower),
        upper=moved(clipped.upper),
    )


def ensemble(parts: int, one: Train = one_model) -> Train:
    """Returns a training function with a member for every part."""
    return lambda data: [one(_part(data, data["part"] == t)) for t in range(parts)]


def overlapping(parts: int, one: Train = one_model) -> Train:
    """Returns `ensemble`, but the last member but one also trains on the canary of the last part.

    Without a canary, half of the `ROWS` records of that part have y = 1. All of these are equal.
    """

    def train(data: Data) -> Any:
        ones = (data["part"] == parts - 1) & (data["y"] == 1)
        canary = ones & (np.cumsum(ones) > ROWS // 2)
        members = []
        for t in range(parts):
            rows = data["part"] == t
            if t == parts - 2:
                rows |= canary
            members.append(one(_part(data, rows)))
        return members

    return train


def _part(data: Data, rows: np.ndarray) -> Data:
    return {name: leaf[rows] for name, leaf in data.items()}


def voter(data: Data) -> Any:
    """Returns a member of PATE, which needs no certificates."""
    return {"w": np.float32(UNIT * (2 * data["y"] - 1).sum())}


# --- Broken mechanisms --------------------------------------------------------------------------


def half_the_noise(name: str) -> Any:
    """Returns a patch that halves the noise of this name."""
    whole = getattr(noise, name)
    return mock.patch.object(noise, name, lambda key, tree, scale: whole(key, tree, scale / 2))


def answered_by(
    name: str, broken: Callable[[Callable[..., Any]], Callable[..., Any]], field: str = "answer"
) -> Any:
    """Returns a patch of how a mechanism answers."""
    row = METHODS[name]
    changed: Any = {field: broken(getattr(row, field))}
    return mock.patch.dict(METHODS, {name: dataclasses.replace(row, **changed)})


def with_one_key(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a mechanism that answers all queries of all calls with the noise of one answer, from
    one key.

    With much noise an answer would say nothing about the votes behind it. The noise of this key is
    small.
    """

    def broken(key: jax.Array, *arrays: Any, **options: Any) -> np.ndarray:
        first = [np.asarray(array)[..., :1] for array in arrays]
        return np.repeat(whole(KEY, *first, **options), np.shape(arrays[0])[-1])

    return broken


def doubled_distances() -> Any:
    """Returns a patch that doubles the distances to the next flip, so that a record changes them by
    two.
    """

    def broken(*args: Any) -> Any:
        certificates = certify(*args)
        return certificates._replace(distance=2 * certificates.distance)

    return mock.patch.object(answering, "certify", broken)


def replacement_as_one_step() -> Any:
    """Returns a patch that counts a replaced record as one change. It is two: one removed and one
    added.
    """
    return mock.patch.dict(answering._STEPS, {("add_remove", "replace_one"): 1})


def flips_of_half_the_noise(epsilon: float) -> Callable[..., Any]:
    """Returns rounded Cauchy noise of half the scale."""

    def broken(whole: Callable[..., Any]) -> Callable[..., Any]:
        def answer(key: jax.Array, labels: Any, distances: Any, **options: Any) -> np.ndarray:
            flips = mechanisms.flip_probability_cauchy(distances, epsilon=epsilon)
            halved = np.arctan(np.tan(math.pi * flips) / 2) / math.pi
            flipped = np.asarray(jax.random.uniform(key, np.shape(labels))) < halved
            return np.where(flipped, 1 - np.asarray(labels), labels).astype(np.int32)

        return answer

    return broken


# --- The cases ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answers:
    """The audit of one answer under the claim of an epsilon. It is a `case.Run`.

    Attributes:
      mechanism: A key of `METHODS`.
      claimed: The epsilon that is claimed.
      surpluses: The data without a canary, see `records`.
      candidates: The canaries.
      epsilon: The epsilon of the noise, by default `claimed`.
      train: Returns a model, or the members of an ensemble, from data.
      apply_fn: Returns the output of a model.
      output_range: The range of values. None asks for labels.
      adjacency: The relation of the two data sets.
      patch: What breaks the mechanism of a twin.
    """

    mechanism: str
    _: dataclasses.KW_ONLY
    claimed: float
    surpluses: Sequence[int]
    candidates: Data
    epsilon: float | None = None
    train: Train = one_model
    apply_fn: Any = label
    output_range: tuple[float, float] | None = None
    adjacency: Adjacency = "add_remove"
    patch: Callable[[], Any] = contextlib.nullcontext

    def __call__(self, trials: int, seed: bytes) -> Audit:
        cost = event(1, epsilon=self._epsilon, mechanism=self.mechanism)
        with self.patch():
            audit = audit_answers(
                self._ask,
                cost,
                QUERY,
                records(self.surpluses),
                self.candidates,
                trials=trials,
                adjacency=self.adjacency,
                confidence=case.CONFIDENCE,
                seed=seed,
            )
        return under(audit, self.claimed)

    @property
    def _epsilon(self) -> float:
        return self.epsilon or self.claimed

    def _ask(self, data: Any, queries: Any, **terms: Any) -> np.ndarray:
        terms |= {"epsilon": self._epsilon, "mechanism": self.mechanism}
        model = self.train(data)
        if self.output_range is None:
            return private_predict(model, self.apply_fn, queries, **terms)
        terms["output_range"] = self.output_range
        return private_values(model, self.apply_fn, queries, **terms)


@dataclasses.dataclass(frozen=True)
class Votes:
    """The audit of one answer of Confident-GNMax under the claim for another. It is a `case.Run`.

    Attributes:
      honest: The mechanism whose cost is claimed.
      mechanism: The mechanism that answers, by default `honest`.
      surpluses, candidates, train, adjacency, patch: As in `Answers`.
    """

    honest: ensembles.ConfidentGNMax
    _: dataclasses.KW_ONLY
    surpluses: Sequence[int]
    candidates: Data
    train: Train
    mechanism: ensembles.ConfidentGNMax | None = None
    adjacency: Adjacency = "add_remove"
    patch: Callable[[], Any] = contextlib.nullcontext

    def __call__(self, trials: int, seed: bytes) -> Audit:
        cost = self._mechanism.event(1, max_answers=1)
        with self.patch():
            audit = audit_answers(
                self._ask,
                cost,
                QUERY,
                records(self.surpluses),
                self.candidates,
                trials=trials,
                claim="gaussian",
                adjacency=self.adjacency,
                delta=DELTA,
                confidence=case.CONFIDENCE,
                seed=seed,
            )
        claimed = claim(self.honest.event(1, max_answers=1), adjacency="add_remove", delta=DELTA)
        return under(audit, claimed)

    @property
    def _mechanism(self) -> ensembles.ConfidentGNMax:
        return self.mechanism or self.honest

    def _ask(self, data: Any, queries: Any, **terms: Any) -> np.ndarray:
        terms |= {"mechanism": self._mechanism, "max_answers": len(queries)}
        return pate_predict(self.train(data), label, queries, **terms)


ANY_LABEL = "any other label costs the same: there is no distance or norm to be wrong about"
ONE_FROM = _records([0, 1], [0, 0])
ONE_TO = _records([1], [0])
OUTLIER = _records([1], [0], x=50.0)


def certified(mechanism: str, epsilon: float, *, half: Run | str, loose: str | None = None) -> Any:
    """Returns audits of answers at certified distances.

    At distance 0 the label flips. Further away only changes in the distance show. `loose` says why
    two changes for one are within the claim.
    """
    audit = functools.partial(Answers, mechanism, claimed=epsilon)
    twins: Mapping[str, Run | str] = {
        case.HALF_THE_NOISE: half,
        case.NO_CLIPPING: audit(surpluses=[-8], candidates=OUTLIER, train=forgetful),
        case.SENSITIVITY_OFF_BY_TWO: loose
        or audit(surpluses=[2], candidates=ONE_TO, patch=doubled_distances),
        case.REUSED_KEY: audit(
            surpluses=[0], candidates=ONE_TO, patch=lambda: answered_by(mechanism, with_one_key)
        ),
        case.ADD_REMOVE_FOR_REPLACE_ONE: loose
        or audit(
            surpluses=[4],
            candidates=ONE_FROM,
            adjacency="replace_one",
            patch=replacement_as_one_step,
        ),
    }
    return audit(surpluses=[0], candidates=ONE_TO), twins


def certified_vote(epsilon: float) -> Any:
    """Returns audits of the answers of an ensemble of three at the certified distance of its
    vote.
    """
    train = ensemble(3)
    audit = functools.partial(Answers, "randomised_response", claimed=epsilon, train=train)
    flip: dict[str, Any] = {"surpluses": [2, -2, 0], "candidates": _records([1], [2])}
    twins: Mapping[str, Run | str] = {
        case.HALF_THE_NOISE: audit(**flip, epsilon=2 * epsilon),
        case.NO_CLIPPING: audit(
            surpluses=[-8, 8, -8], candidates=OUTLIER, train=ensemble(3, forgetful)
        ),
        case.SENSITIVITY_OFF_BY_TWO: audit(
            surpluses=[2, 8, -4], candidates=ONE_TO, patch=doubled_distances
        ),
        case.REUSED_KEY: audit(
            **flip, patch=lambda: answered_by("randomised_response", with_one_key)
        ),
        case.ADD_REMOVE_FOR_REPLACE_ONE: audit(
            surpluses=[4, 10, -4],
            candidates=ONE_FROM,
            adjacency="replace_one",
            patch=replacement_as_one_step,
        ),
    }
    return audit(**flip), twins


def laplace_vote(epsilon: float) -> Any:
    """Returns audits of the noisy votes of an ensemble of five. A clear vote shows the most of
    epsilon.
    """
    audit = functools.partial(Answers, "global_laplace", claimed=epsilon, train=ensemble(5))
    last = _records([1], [4])
    clear: dict[str, Any] = {"surpluses": [2, 2, 2, 2, 0], "candidates": last}
    twins: Mapping[str, Run | str] = {
        case.HALF_THE_NOISE: audit(**clear, patch=lambda: half_the_noise("laplace")),
        case.NO_CLIPPING: "a member has one vote: there is no clip",
        case.SENSITIVITY_OFF_BY_TWO: audit(
            surpluses=[2, 2, 2, 0, 0], candidates=last, train=overlapping(5)
        ),
        case.REUSED_KEY: audit(
            surpluses=[2, 2, -2, -2, 0],
            candidates=last,
            patch=lambda: answered_by("global_laplace", with_one_key, "vote"),
        ),
        case.ADD_REMOVE_FOR_REPLACE_ONE: audit(
            surpluses=[2, 2, 2, 1, 0],
            candidates=_records([0, 1], [3, 4]),
            adjacency="replace_one",
            patch=replacement_as_one_step,
        ),
    }
    return audit(**clear), twins


def global_labels(mechanism: str, epsilon: float) -> Any:
    """Returns audits of answers that have the same noise at every distance."""
    audit = functools.partial(Answers, mechanism, claimed=epsilon, surpluses=[0], candidates=ONE_TO)
    twins: Mapping[str, Run | str] = {
        case.HALF_THE_NOISE: audit(epsilon=2 * epsilon),
        case.NO_CLIPPING: ANY_LABEL,
        case.SENSITIVITY_OFF_BY_TWO: ANY_LABEL,
        case.REUSED_KEY: audit(patch=lambda: answered_by(mechanism, with_one_key)),
        case.ADD_REMOVE_FOR_REPLACE_ONE: ANY_LABEL,
    }
    return audit(), twins


def cauchy_values(epsilon: float) -> Any:
    """Returns audits of values between -1 and 1. A record moves them by half of the range."""
    range_: dict[str, Any] = {"apply_fn": value, "output_range": (-1.0, 1.0)}
    audit = functools.partial(Answers, "cauchy_values", claimed=epsilon, **range_)
    moved: dict[str, Any] = {"surpluses": [0], "candidates": ONE_TO}

    def halved(
        *args: Any, whole: Any = mechanisms.smooth_sensitivity, **options: Any
    ) -> np.ndarray:
        return whole(*args, **options) / 2

    twins: Mapping[str, Run | str] = {
        case.HALF_THE_NOISE: audit(**moved, patch=lambda: half_the_noise("cauchy")),
        case.NO_CLIPPING: audit(surpluses=[-8], candidates=OUTLIER, train=forgetful),
        case.SENSITIVITY_OFF_BY_TWO: audit(
            **moved, patch=lambda: mock.patch.object(mechanisms, "smooth_sensitivity", halved)
        ),
        case.REUSED_KEY: audit(**moved, patch=lambda: answered_by("cauchy_values", with_one_key)),
        case.ADD_REMOVE_FOR_REPLACE_ONE: audit(
            surpluses=[0],
            candidates=ONE_FROM,
            adjacency="replace_one",
            patch=replacement_as_one_step,
        ),
    }
    return audit(**moved), twins


def laplace_values(epsilon: float) -> Any:
    """Returns audits of values between -1 and 1. A record moves them from end to end."""

    def far(params: Any, query: jax.Array) -> jax.Array:
        """Returns a value beyond the ends of the range."""
        return 1000 * (value(params, query) - 0.5)

    whole = mechanisms.laplace_values

    def unclipped(
        key: jax.Array, values: Any, *, epsilon: float, output_range: tuple[float, float]
    ) -> np.ndarray:
        ends = 1000 * output_range[0], 1000 * output_range[1]
        return whole(key, values, epsilon=1000 * epsilon, output_range=ends)

    def halved(
        key: jax.Array, values: Any, *, epsilon: float, output_range: tuple[float, float]
    ) -> np.ndarray:
        return whole(key, values, epsilon=2 * epsilon, output_range=output_range)

    def by(broken: Callable[..., Any]) -> Run:
        return audit(patch=lambda: answered_by("laplace_values", lambda whole: broken))

    range_: dict[str, Any] = {
        "apply_fn": far,
        "output_range": (-1.0, 1.0),
        "surpluses": [0],
        "candidates": ONE_TO,
    }
    audit = functools.partial(Answers, "laplace_values", claimed=epsilon, **range_)
    twins: Mapping[str, Run | str] = {
        case.HALF_THE_NOISE: audit(patch=lambda: half_the_noise("laplace")),
        case.NO_CLIPPING: by(unclipped),
        case.SENSITIVITY_OFF_BY_TWO: by(halved),
        case.REUSED_KEY: by(with_one_key(whole)),
        case.ADD_REMOVE_FOR_REPLACE_ONE: "the noise hides the whole range, whatever changes in "
        "the data",
    }
    return audit(), twins


def pate(gnmax: ensembles.ConfidentGNMax) -> Any:
    """Returns audits of Confident-GNMax on a vote that is nearly even. The vote always passes the
    threshold.
    """
    last = _records([1], [4])
    audit = functools.partial(
        Votes, gnmax, surpluses=[2, 2, -2, -2, 0], candidates=last, train=ensemble(5, voter)
    )
    whole = ensembles.ConfidentGNMax.answer

    def one_key(
        self: Any, key: jax.Array, votes: np.ndarray, *, num_classes: int, max_answers: int
    ) -> np.ndarray:
        return with_one_key(functools.partial(whole, self))(
            key, votes, num_classes=num_classes, max_answers=1
        )

    half = dataclasses.replace(
        gnmax, sigma_threshold=gnmax.sigma_threshold / 2, sigma_votes=gnmax.sigma_votes / 2
    )
    twins: Mapping[str, Run | str] = {
        case.HALF_THE_NOISE: audit(mechanism=half),
        case.NO_CLIPPING: "a member has one vote: there is no clip",
        case.SENSITIVITY_OFF_BY_TWO: audit(
            surpluses=[2, -2, -2, 0, 0], train=overlapping(5, voter)
        ),
        case.REUSED_KEY: audit(
            patch=lambda: mock.patch.object(ensembles.ConfidentGNMax, "answer", one_key)
        ),
        case.ADD_REMOVE_FOR_REPLACE_ONE: audit(
            surpluses=[2, -2, -2, 1, 0],
            candidates=_records([0, 1], [3, 4]),
            adjacency="replace_one",
        ),
    }
    return audit(), twins


class _Pure(NamedTuple):
    """A mechanism with a pure epsilon, its audit and the audits of its twins, and the proof."""

    mechanism: str
    epsilon: float
    audits: tuple[Run, Mapping[str, Run | str]]
    proof: str


def _pure() -> Iterator[_Pure]:
    family = "`jaxdp.prediction.mechanisms`, proof for {}"
    doubled = Answers(
        "randomised_response", surpluses=[0], candidates=ONE_TO, claimed=1.0, epsilon=2.0
    )
    yield _Pure(
        mechanism="randomised response",
        epsilon=1.0,
        audits=certified("randomised_response", 1.0, half=doubled),
        proof=family.format("the family"),
    )
    half = functools.partial(answered_by, "smooth_cauchy", flips_of_half_the_noise(0.8))
    cauchy = Answers("smooth_cauchy", surpluses=[0], candidates=ONE_TO, claimed=0.8, patch=half)
    yield _Pure(
        mechanism="rounded Cauchy noise",
        epsilon=0.8,
        audits=certified("smooth_cauchy", 0.8, half=cauchy),
        proof=family.format("Cauchy noise"),
    )
    nissim = (
        "its constants leave room: half the noise, or two changes for one, cost less than epsilon"
    )
    yield _Pure(
        mechanism="rounded Cauchy noise as published",
        epsilon=3.0,
        audits=certified("paper_cauchy", 3.0, half=nissim, loose=nissim),
        proof="Nissim, Raskhodnikova and Smith 2007, Corollary 2.4; `jaxdp.prediction.mechanisms`",
    )
    yield _Pure(
        mechanism="randomised response of a certified vote",
        epsilon=1.0,
        audits=certified_vote(1.0),
        proof="arXiv:2406.13433, Theorem 5.3; `jaxdp.prediction.ensembles.vote`",
    )
    yield _Pure(
        mechanism="rounded Laplace noise",
        epsilon=1.0,
        audits=global_labels("global_laplace", 1.0),
        proof=family.format("the family"),
    )
    yield _Pure(
        mechanism="k-ary randomised response",
        epsilon=1.0,
        audits=global_labels("global_response", 1.0),
        proof=family.format("the family"),
    )
    yield _Pure(
        mechanism="Laplace noise on votes",
        epsilon=1.0,
        audits=laplace_vote(1.0),
        proof="Dwork and Roth 2014, Theorem 3.6; `jaxdp.prediction.ensembles.laplace_vote`",
    )
    yield from _pure_values()


def _pure_values() -> Iterator[_Pure]:
    yield _Pure(
        mechanism="Cauchy noise on values",
        epsilon=1.0,
        audits=cauchy_values(1.0),
        proof="`jaxdp.prediction.mechanisms.cauchy_values`, by (**) of the module",
    )
    yield _Pure(
        mechanism="Laplace noise on values",
        epsilon=1.0,
        audits=laplace_values(1.0),
        proof="Dwork and Roth 2014, Theorem 3.6; `jaxdp.prediction.mechanisms.laplace_values`",
    )


def _cases() -> Iterator[Case]:
    for pure in _pure():
        run, twins = pure.audits
        yield Case(
            mechanism=pure.mechanism,
            claim=f"an answer: pure epsilon {pure.epsilon:g}, add/remove",
            proof=pure.proof,
            run=run,
            twins=twins,
            trials=4 * TRIALS if pure.mechanism in RARE else TRIALS,
        )
    root_two = math.sqrt(2)
    gnmax = ensembles.ConfidentGNMax(
        threshold=-50.0, sigma_threshold=3 * root_two, sigma_votes=root_two
    )
    run, twins = pate(gnmax)
    yield Case(
        mechanism="PATE's Confident-GNMax",
        claim="a query and its answer: Gaussians of multipliers 4.243 and 1, add/remove",
        proof="Papernot et al. 2018, arXiv:1802.08908, Algorithm 1; "
        "`jaxdp.prediction.ConfidentGNMax`",
        run=run,
        twins=twins,
        trials=TRIALS,
    )


CASES = tuple(_cases())
