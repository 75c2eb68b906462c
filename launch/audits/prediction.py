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
from typing import Any
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
from jaxdp.privacy import DpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim
from jaxdp.transforms import losses, noise

from . import case
from .case import Audits, Case, Run, Twin, patched, standard_twins, under

Data = Mapping[str, np.ndarray]
Train = Callable[[Data], Any]
Patch = Callable[[], Any]

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


def records(surpluses: Sequence[int]) -> Data:
    """Returns data with a given surplus of y = 1 over y = 0 in each part.

    A part has `ROWS` records, or one fewer if its surplus is odd.
    """
    labels, numbers = [], []
    for part, surplus in enumerate(surpluses):
        rows = ROWS - surplus % 2
        ones = (rows + surplus) // 2
        labels += [1] * ones + [0] * (rows - ones)
        numbers += [part] * rows
    return _records(labels, numbers)


def _records(y: Any, part: Any, x: float = 1.0) -> Data:
    y = np.asarray(y, np.float32)
    features = np.full(len(y), x, np.float32)
    return {"x": features, "y": y, "part": np.asarray(part, np.int32)}


def loss(params: Any, example: Any) -> jax.Array:
    logit = params["w"] * example["x"]
    return losses.sigmoid_cross_entropy(logit, example["y"])


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


def half_the_noise(name: str) -> Patch:
    """Returns a patch that halves the noise of this name."""
    whole = getattr(noise, name)

    def halved(key: jax.Array, tree: Any, scale: float) -> Any:
        return whole(key, tree, scale / 2)

    return patched(noise, name, halved)


def answered_by(
    name: str, broken: Callable[[Callable[..., Any]], Callable[..., Any]], field: str = "answer"
) -> Patch:
    """Returns a patch of how a mechanism answers."""
    row = METHODS[name]
    changed: Any = {field: broken(getattr(row, field))}
    broken_row = dataclasses.replace(row, **changed)
    return lambda: mock.patch.dict(METHODS, {name: broken_row})


def with_one_key(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a mechanism that answers all queries of all calls with the noise of one answer, from
    one key.

    With much noise an answer would say nothing about the votes behind it. The answer in the middle
    of equal queries has little.
    """

    def broken(key: jax.Array, *arrays: Any, **options: Any) -> np.ndarray:
        answers = np.asarray(whole(case.one_key(key), *arrays, **options))
        middle = np.sort(answers)[len(answers) // 2]
        return np.full_like(answers, middle)

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
            quantiles = np.tan(math.pi * flips)
            halved = np.arctan(quantiles / 2) / math.pi
            uniform = jax.random.uniform(key, np.shape(labels))
            flipped = np.asarray(uniform) < halved
            return np.where(flipped, 1 - np.asarray(labels), labels).astype(np.int32)

        return answer

    return broken


# --- The cases ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OneAnswer:
    """The audit of one answer.

    Attributes:
      surpluses: The data without a canary, see `records`.
      candidates: The canaries.
      train: Returns a model, or the members of an ensemble, from data.
      adjacency: The relation of the two data sets.
      patch: What breaks the mechanism of a twin.
    """

    surpluses: Sequence[int]
    candidates: Data
    train: Train = one_model
    adjacency: Adjacency = "add_remove"
    patch: Patch = contextlib.nullcontext

    def audited(self, cost: DpEvent, claimed: float, **terms: Any) -> Audit:
        """Returns the audit of answers that are charged as `cost`, under a claim."""
        data = records(self.surpluses)
        terms |= {"adjacency": self.adjacency, "confidence": case.CONFIDENCE}
        with self.patch():
            audit = audit_answers(self.ask, cost, QUERY, data, self.candidates, **terms)
        return under(audit, claimed)

    def ask(self, data: Any, queries: Any, **terms: Any) -> np.ndarray:
        """Returns the answers of a model of the data."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers(_OneAnswer):
    """The audit of one answer under the claim of an epsilon. It is a `case.Run`.

    Attributes:
      mechanism: A key of `METHODS`.
      claimed: The epsilon that is claimed.
      epsilon: The epsilon of the noise, by default `claimed`.
      apply_fn: Returns the output of a model.
      output_range: The range of values. None asks for labels.
    """

    mechanism: str
    claimed: float
    epsilon: float | None = None
    apply_fn: Any = label
    output_range: tuple[float, float] | None = None

    def __call__(self, trials: int, seed: bytes) -> Audit:
        cost = event(1, **self._terms)
        return self.audited(cost, self.claimed, trials=trials, seed=seed)

    @property
    def _terms(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon or self.claimed, "mechanism": self.mechanism}

    def ask(self, data: Any, queries: Any, **terms: Any) -> np.ndarray:
        terms |= self._terms
        model = self.train(data)
        if self.output_range is None:
            return private_predict(model, self.apply_fn, queries, **terms)
        terms["output_range"] = self.output_range
        return private_values(model, self.apply_fn, queries, **terms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Votes(_OneAnswer):
    """The audit of one answer of Confident-GNMax under the claim for another. It is a `case.Run`.

    Attributes:
      honest: The mechanism whose cost is claimed.
      mechanism: The mechanism that answers.
    """

    honest: ensembles.ConfidentGNMax
    mechanism: ensembles.ConfidentGNMax

    def __call__(self, trials: int, seed: bytes) -> Audit:
        cost = self.mechanism.event(1, max_answers=1)
        honest_cost = self.honest.event(1, max_answers=1)
        claimed = claim(honest_cost, adjacency="add_remove", delta=DELTA)
        terms: dict[str, Any] = {"claim": "gaussian", "delta": DELTA}
        return self.audited(cost, claimed, trials=trials, seed=seed, **terms)

    def ask(self, data: Any, queries: Any, **terms: Any) -> np.ndarray:
        terms |= {"mechanism": self.mechanism, "max_answers": len(queries)}
        members = self.train(data)
        return pate_predict(members, label, queries, **terms)


ANY_LABEL = "any other label costs the same: there is no distance or norm to be wrong about"
NO_CLIP_OF_VOTES = "a member has one vote: there is no clip"
ONE_FROM = _records([0, 1], [0, 0])
ONE_TO = _records([1], [0])
OUTLIER = _records([1], [0], x=50.0)
# A twin whose data differ by a replaced record, which the account counts as one change.
REPLACED: dict[str, Any] = {"adjacency": "replace_one", "patch": replacement_as_one_step}


def certified(mechanism: str, epsilon: float, *, half: Twin, loose: str | None = None) -> Audits:
    """Returns audits of answers at certified distances.

    At distance 0 the label flips. Further away only changes in the distance show. `loose` says why
    two changes for one are within the claim.
    """
    honest = Answers(mechanism=mechanism, claimed=epsilon, surpluses=[0], candidates=ONE_TO)
    twin = functools.partial(dataclasses.replace, honest)
    doubled = twin(surpluses=[2], patch=doubled_distances)
    replaced = twin(surpluses=[4], candidates=ONE_FROM, **REPLACED)
    twins = standard_twins(
        half_the_noise=half,
        no_clipping=twin(surpluses=[-8], candidates=OUTLIER, train=forgetful),
        sensitivity_off_by_two=loose or doubled,
        reused_key=twin(patch=answered_by(mechanism, with_one_key)),
        add_remove_for_replace_one=loose or replaced,
    )
    return honest, twins


def certified_vote(epsilon: float) -> Audits:
    """Returns audits of the answers of an ensemble of three at the certified distance of its
    vote.
    """
    mechanism = "randomised_response"
    honest = Answers(
        mechanism=mechanism,
        claimed=epsilon,
        train=ensemble(3),
        surpluses=[2, -2, 0],
        candidates=_records([1], [2]),
    )
    twin = functools.partial(dataclasses.replace, honest)
    unclipped = ensemble(3, forgetful)
    twins = standard_twins(
        half_the_noise=twin(epsilon=2 * epsilon),
        no_clipping=twin(surpluses=[-8, 8, -8], candidates=OUTLIER, train=unclipped),
        sensitivity_off_by_two=twin(
            surpluses=[2, 8, -4], candidates=ONE_TO, patch=doubled_distances
        ),
        reused_key=twin(patch=answered_by(mechanism, with_one_key)),
        add_remove_for_replace_one=twin(surpluses=[4, 10, -4], candidates=ONE_FROM, **REPLACED),
    )
    return honest, twins


def laplace_vote(epsilon: float) -> Audits:
    """Returns audits of the noisy votes of an ensemble of five. A clear vote shows the most of
    epsilon.
    """
    mechanism = "global_laplace"
    honest = Answers(
        mechanism=mechanism,
        claimed=epsilon,
        train=ensemble(5),
        surpluses=[2, 2, 2, 2, 0],
        candidates=_records([1], [4]),
    )
    twin = functools.partial(dataclasses.replace, honest)
    one_key = answered_by(mechanism, with_one_key, "vote")
    twins = standard_twins(
        half_the_noise=twin(patch=half_the_noise("laplace")),
        no_clipping=NO_CLIP_OF_VOTES,
        sensitivity_off_by_two=twin(surpluses=[2, 2, 2, 0, 0], train=overlapping(5)),
        reused_key=twin(surpluses=[2, 2, -2, -2, 0], patch=one_key),
        add_remove_for_replace_one=twin(
            surpluses=[2, 2, 2, 1, 0], candidates=_records([0, 1], [3, 4]), **REPLACED
        ),
    )
    return honest, twins


def global_labels(mechanism: str, epsilon: float) -> Audits:
    """Returns audits of answers that have the same noise at every distance."""
    honest = Answers(mechanism=mechanism, claimed=epsilon, surpluses=[0], candidates=ONE_TO)
    one_key = answered_by(mechanism, with_one_key)
    twins = standard_twins(
        half_the_noise=dataclasses.replace(honest, epsilon=2 * epsilon),
        no_clipping=ANY_LABEL,
        sensitivity_off_by_two=ANY_LABEL,
        reused_key=dataclasses.replace(honest, patch=one_key),
        add_remove_for_replace_one=ANY_LABEL,
    )
    return honest, twins


def cauchy_values(epsilon: float) -> Audits:
    """Returns audits of values between -1 and 1. A record moves them by half of the range."""
    honest = Answers(
        mechanism="cauchy_values",
        claimed=epsilon,
        apply_fn=value,
        output_range=(-1.0, 1.0),
        surpluses=[0],
        candidates=ONE_TO,
    )
    twin = functools.partial(dataclasses.replace, honest)
    whole = mechanisms.smooth_sensitivity

    def halved(*args: Any, **options: Any) -> np.ndarray:
        return whole(*args, **options) / 2

    twins = standard_twins(
        half_the_noise=twin(patch=half_the_noise("cauchy")),
        no_clipping=twin(surpluses=[-8], candidates=OUTLIER, train=forgetful),
        sensitivity_off_by_two=twin(patch=patched(mechanisms, "smooth_sensitivity", halved)),
        reused_key=twin(patch=answered_by("cauchy_values", with_one_key)),
        add_remove_for_replace_one=twin(candidates=ONE_FROM, **REPLACED),
    )
    return honest, twins


def laplace_values(epsilon: float) -> Audits:
    """Returns audits of values between -1 and 1. A record moves them from end to end."""

    def far(params: Any, query: jax.Array) -> jax.Array:
        """Returns a value beyond the ends of the range."""
        return 1000 * (value(params, query) - 0.5)

    whole = mechanisms.laplace_values

    def unclipped(
        key: jax.Array, values: Any, *, epsilon: float, output_range: tuple[float, float]
    ) -> np.ndarray:
        low, high = output_range
        ends = (1000 * low, 1000 * high)
        return whole(key, values, epsilon=1000 * epsilon, output_range=ends)

    def halved(key: jax.Array, values: Any, *, epsilon: float, **options: Any) -> np.ndarray:
        return whole(key, values, epsilon=2 * epsilon, **options)

    honest = Answers(
        mechanism="laplace_values",
        claimed=epsilon,
        apply_fn=far,
        output_range=(-1.0, 1.0),
        surpluses=[0],
        candidates=ONE_TO,
    )

    def by(broken: Callable[..., Any]) -> Run:
        patch = answered_by("laplace_values", lambda whole: broken)
        return dataclasses.replace(honest, patch=patch)

    twins = standard_twins(
        half_the_noise=dataclasses.replace(honest, patch=half_the_noise("laplace")),
        no_clipping=by(unclipped),
        sensitivity_off_by_two=by(halved),
        reused_key=by(with_one_key(whole)),
        add_remove_for_replace_one="the noise hides the whole range, whatever changes in the data",
    )
    return honest, twins


def pate(gnmax: ensembles.ConfidentGNMax) -> Audits:
    """Returns audits of Confident-GNMax on a vote that is nearly even. The vote always passes the
    threshold.
    """
    honest = Votes(
        honest=gnmax,
        mechanism=gnmax,
        surpluses=[2, 2, -2, -2, 0],
        candidates=_records([1], [4]),
        train=ensemble(5, voter),
    )
    twin = functools.partial(dataclasses.replace, honest)
    whole = ensembles.ConfidentGNMax.answer

    def one_key(
        self: Any, key: jax.Array, votes: np.ndarray, *, num_classes: int, max_answers: int
    ) -> np.ndarray:
        answer = with_one_key(functools.partial(whole, self))
        return answer(key, votes, num_classes=num_classes, max_answers=max_answers)

    half = dataclasses.replace(
        gnmax, sigma_threshold=gnmax.sigma_threshold / 2, sigma_votes=gnmax.sigma_votes / 2
    )
    twins = standard_twins(
        half_the_noise=twin(mechanism=half),
        no_clipping=NO_CLIP_OF_VOTES,
        sensitivity_off_by_two=twin(surpluses=[2, -2, -2, 0, 0], train=overlapping(5, voter)),
        reused_key=twin(patch=patched(ensembles.ConfidentGNMax, "answer", one_key)),
        add_remove_for_replace_one=twin(
            surpluses=[2, -2, -2, 1, 0],
            candidates=_records([0, 1], [3, 4]),
            adjacency="replace_one",
        ),
    )
    return honest, twins


def _pure(mechanism: str, epsilon: float, audits: Audits, proof: str) -> Case:
    """Returns the case of a mechanism with a pure epsilon."""
    run, twins = audits
    trials = TRIALS
    if mechanism in RARE:
        trials = 4 * TRIALS
    claimed = f"an answer: pure epsilon {epsilon:g}, add/remove"
    return Case(mechanism, claimed, proof, run, twins, trials)


def _labels() -> Iterator[Case]:
    """Yields the cases of answers at certified distances, with the noise of each."""
    family = "`jaxdp.prediction.mechanisms`, proof for {}"
    doubled = Answers(
        mechanism="randomised_response",
        surpluses=[0],
        candidates=ONE_TO,
        claimed=1.0,
        epsilon=2.0,
    )
    response = certified("randomised_response", 1.0, half=doubled)
    yield _pure("randomised response", 1.0, response, family.format("the family"))

    half = Answers(
        mechanism="smooth_cauchy",
        surpluses=[0],
        candidates=ONE_TO,
        claimed=0.8,
        patch=answered_by("smooth_cauchy", flips_of_half_the_noise(0.8)),
    )
    cauchy = certified("smooth_cauchy", 0.8, half=half)
    yield _pure("rounded Cauchy noise", 0.8, cauchy, family.format("Cauchy noise"))

    nissim = (
        "its constants leave room: half the noise, or two changes for one, cost less than epsilon"
    )
    published = certified("paper_cauchy", 3.0, half=nissim, loose=nissim)
    yield _pure(
        "rounded Cauchy noise as published",
        3.0,
        published,
        "Nissim, Raskhodnikova and Smith 2007, Corollary 2.4; `jaxdp.prediction.mechanisms`",
    )


def _votes_and_values() -> Iterator[Case]:
    """Yields the cases of ensembles, of answers with the noise of any label, and of values."""
    family = "`jaxdp.prediction.mechanisms`, proof for the family"
    vote = certified_vote(1.0)
    yield _pure(
        "randomised response of a certified vote",
        1.0,
        vote,
        "arXiv:2406.13433, Theorem 5.3; `jaxdp.prediction.ensembles.vote`",
    )
    laplace = global_labels("global_laplace", 1.0)
    yield _pure("rounded Laplace noise", 1.0, laplace, family)
    response = global_labels("global_response", 1.0)
    yield _pure("k-ary randomised response", 1.0, response, family)
    laplace = laplace_vote(1.0)
    yield _pure(
        "Laplace noise on votes",
        1.0,
        laplace,
        "Dwork and Roth 2014, Theorem 3.6; `jaxdp.prediction.ensembles.laplace_vote`",
    )
    cauchy = cauchy_values(1.0)
    yield _pure(
        "Cauchy noise on values",
        1.0,
        cauchy,
        "`jaxdp.prediction.mechanisms.cauchy_values`, by (**) of the module",
    )
    laplace = laplace_values(1.0)
    yield _pure(
        "Laplace noise on values",
        1.0,
        laplace,
        "Dwork and Roth 2014, Theorem 3.6; `jaxdp.prediction.mechanisms.laplace_values`",
    )


def _gnmax() -> Case:
    root_two = math.sqrt(2)
    gnmax = ensembles.ConfidentGNMax(
        threshold=-50.0, sigma_threshold=3 * root_two, sigma_votes=root_two
    )
    run, twins = pate(gnmax)
    return Case(
        mechanism="PATE's Confident-GNMax",
        claim="a query and its answer: Gaussians of multipliers 4.243 and 1, add/remove",
        proof="Papernot et al. 2018, arXiv:1802.08908, Algorithm 1; "
        "`jaxdp.prediction.ConfidentGNMax`",
        run=run,
        twins=twins,
        trials=TRIALS,
    )


CASES = (*_labels(), *_votes_and_values(), _gnmax())
