"""Attacks on one step of private training, on the sampling of its batches, and on a whole run.

A step is charged as a Gaussian on a Poisson sample. Its two parts are audited separately, because
an attack on both together has the canary in few batches and finds little. `audit_step` attacks the
Gaussian, on a batch with the canary. It sees the noisy sum, and the trained model is
post-processing of noisy sums. `audit_sampling` attacks the sampling and sees the batch. `audit_run`
attacks a whole run with many canaries. Its ceiling is a few units of epsilon.

    trainer = dp_sgd(loss_fn, optax.sgd(1.0), sampler=PoissonSampler(2000, 0.1), clip_norm=1.0,
                     noise_multiplier=1.0, physical_batch_size=256)
    print(audit_step(trainer, params, public_examples, trials=1000, delta=1e-5).describe())

Any trainer, parameters and examples work, for example mislabelled examples. `worst_case` makes
canaries for `loss`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import NoiseTerms, Trials
from jaxdp.data import PoissonSampler, Source, from_arrays, take
from jaxdp.files import shows_keywords
from jaxdp.finetune.trainer import PrivateTrainer, TrainState
from jaxdp.privacy import GaussianDpEvent
from jaxdp.privacy.events import composition
from jaxdp.release import claim as claimed
from jaxdp.release import new_seed, stream
from jaxdp.report import progress_bar
from jaxdp.transforms.noise import PrivatizeState

# The number of runs at a time, and of draws from which the attack learns the variance of the noise.
_RUNS = 256
# The most values of noise that are drawn together, unless one run has more.
_VALUES = 2**22
# Parameters of more leaves are updated by one program. Operations on few leaves compile sooner, and
# audits of equal shapes share them.
_MOST_APART = 4
# Relative to the mean square of a tensor's noise. A residual below it is rounding error.
_LEAST_VARIANCE = 1e-12


@shows_keywords(NoiseTerms, vars(Trials))
def audit_step(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    rows: Sequence[int] | Sequence[Sequence[int]] | np.ndarray | None = None,
    others: Sequence[int] | np.ndarray = (),
    step: int = 1,
    **terms: Unpack[NoiseTerms],
) -> bounds.Audit:
    """Audits the Gaussian of one step by many noisy sums with and without a canary.

    The batch is given. The claim is therefore the epsilon of the inner Gaussian, larger than the
    epsilon of the sampled step. `audit_sampling` audits the sampling. Sums and noise are the
    trainer's own. Every run has its own key.

    Args:
      trainer: A trainer from `dp_sgd` or another method.
      params: The parameters at which training starts.
      source: Examples for the trainer, public or synthetic, since the audit charges nothing. For a
        trainer with `group=True` they are of `by_group`, and the canary is a user with its records.
      rows: The examples of `source` that may be the canary, by default all. At least 2 for
        "replace_one". With `sampler.records_per_owner` each is a list of the examples of one owner,
        all of which are in the batch. A sampler for k examples claims k times the norm.
      others: The examples that are in every batch, before the canary. The place in a batch names
        the key of its views only. Keys are independent, so the law of the views of the others does
        not depend on the canary.
      step: The audited step, >= 1. Earlier steps use the batch without the canary.
      terms: trials, delta > 0, adjacency ("add_remove" or "replace_one"), confidence and seed, as
        in `jaxdp.audit.trials.Trials`.

    Returns:
      The `Audit` of 2 `trials` runs, with the ledger's epsilon of
      `trainer.privatizer.event_at(step)`.

    Formal guarantees:
      As `bounds.multi_run` with the Gaussian claim. Scores of runs with different keys are
      independent. The attack, a canary and weights, is fixed before the runs. It depends on what
      the candidates add to the sum and on separate draws of the noise. The draws show the variance
      of every tensor's noise and how far the noise of the step before predicts it. Tensors with
      little noise count more, and repeated noise is subtracted. For noise of one variance the score
      is the likelihood ratio of the two sums.

    Raises:
      ValueError: An argument is out of range.
    """
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}.")
    _check_independent(trainer)
    privatizer = trainer.privatizer
    event = privatizer.event_at(step)
    if trainer.records_per_owner is not None:
        # All records of the owner are in the batch, which is the worst one.
        event = GaussianDpEvent(event.noise_multiplier / trainer.records_per_owner)
    runs = Trials(charge=event, allowed=("add_remove", "replace_one"), **terms)
    if rows is None:
        rows = np.arange(len(source))
    rows = np.asarray(rows)
    runs.check_candidates("rows must name", len(rows), "examples")

    state = _started(trainer, params, runs.seed, "steps before", "views")
    others = np.asarray(others, np.int64)
    read = trainer.read
    if len(jax.tree.leaves(params)) > _MOST_APART:
        read = jax.jit(read)
    for _ in range(step):
        state = trainer.refreshed(state)
        sums = trainer.sums(state, source, others)
        state, _ = read(state, *_drawn_once(trainer, state, sums))
    # The sums of the audited step, without and with each candidate.
    state = trainer.refreshed(state)
    base = trainer.sums(state, source, others)
    batches = [np.append(others, row) for row in rows]
    candidates = [trainer.sums(state, source, batch) for batch in batches]

    divisor = privatizer.divisor
    if privatizer.grid is not None:  # sums are in steps, and means are not
        divisor /= float(privatizer.grid.at(step).step)
    noisy = _NoisySums(update=privatizer.update, divisor=divisor, step=step, base=base)
    noise = _noise(noisy, stream(runs.seed, "what the noise is like"))
    distance = functools.partial(_distance, noise.variances)
    refusal = (
        "rows must name an example that changes the sum. The gradients of these are equal or zero."
    )
    present, absent = runs.farthest(candidates, [base], distance, refusal)
    weights = _weights(present, absent, noise.variances)

    def scores(sums: Any, purpose: str) -> np.ndarray:
        key = stream(runs.seed, purpose)
        of_runs, _ = noisy.of(sums, weights, noise.predicted, key, runs.trials)
        return of_runs

    return runs.judge(scores, present, absent)


def _drawn_once(
    trainer: PrivateTrainer,
    state: TrainState,
    sums: Any,
) -> tuple[Any, PrivatizeState]:
    """Returns the noisy mean and the next state of a step, by the compiled draws of the audit.

    Programs of the audit have `_at_once` keys, so the draw has as many, which are equal.
    """
    keys = jnp.broadcast_to(state.noise.key, _at_once(sums))
    step = int(jax.device_get(state.step))
    states = _states(keys, step)
    released = _released(trainer.privatizer.update, sums, states)
    mean, noise = jax.tree.map(lambda leaf: leaf[0], released)
    return mean, noise


def _check_independent(trainer: PrivateTrainer) -> None:
    """Raises ValueError for correlated noise, whose steps have no events of their own."""
    if trainer.privatizer.noise is not None:
        raise ValueError(
            "trainer must have independent noise. Audit a run with correlated noise by "
            "jaxdp.audit.whole_runs.audit_whole_run."
        )


def _weights(
    present: Any,
    absent: Any,
    variances: np.ndarray,
) -> list[np.ndarray]:
    """Returns the direction of the attack, float32, with 1 as its largest entry.

    For noise of one variance the score is the likelihood ratio of the two sums. Tensors with little
    noise count more.
    """
    weights = []
    for one, other, variance in zip(_leaves(present), _leaves(absent), variances, strict=True):
        weights.append((one - other) / variance)
    sizes = [np.abs(leaf).max(initial=0) for leaf in weights]
    largest = max(sizes, default=0) or 1.0
    return [(leaf / largest).astype(np.float32) for leaf in weights]


def audit_sampling(
    trainer: PrivateTrainer,
    *,
    trials: int,
    confidence: float = 0.95,
    seed: bytes | None = None,
) -> bounds.Audit:
    """Audits the sampling of batches.

    A step that reveals its batch is (0, q)-DP for one example added or removed. With the canary in
    the data, a batch has it with probability q, otherwise never. The distance of the two is q, the
    delta at epsilon 0. Amplification by sampling rests on it.

    Args:
      trainer: A trainer from `dp_sgd` or another method, with a sampling probability below 1.
      trials: The number of canaries that are looked for in batches, at least 2.
      confidence, seed: As in `jaxdp.audit.trials.Trials`. The seed is the seed of the batches.

    Returns:
      The `Audit` of 2 `trials` scores at delta q, with upper = 0.

    Formal guarantees:
      As `bounds.multi_run`. In each of several steps of one run the audit looks for about q n
      examples, first for the examples of the batch before. They depend on earlier batches only.
      Under the claim the scores are therefore independent, and each is 1 with probability q. The
      audit detects batches that are used twice.

    Raises:
      ValueError: An argument is out of range.
    """
    _check_independent(trainer)
    sampler = trainer.sampler
    assert isinstance(sampler, PoissonSampler), "other samplers need correlated noise"
    delta = sampler.sampling_probability
    if delta == 1:
        raise ValueError(
            "trainer must have a sampling probability below 1, got 1. Such a trainer does not "
            "sample."
        )
    if trials < 2:
        raise ValueError(f"trials must be at least 2, got {trials}.")
    bounds.Terms(delta, confidence).check(0.0)
    if seed is None:
        seed = new_seed()
    key = stream(seed, "batches")
    everybody = np.arange(sampler.num_examples)
    per_step = max(1, int(sampler.expected_batch_size))
    before = everybody[:0]
    scores = np.zeros(0)
    for step in itertools.count():
        batch = trainer.drawn(_state_at(step, key))
        # Examples of the batch before come first, so that a batch that is used twice shows.
        rest = np.setdiff1d(everybody, before)
        canaries = np.append(before, rest)[:per_step]
        is_drawn = np.isin(canaries, batch)
        scores = np.append(scores, is_drawn)
        if len(scores) >= trials:
            break
        before = batch
    scores = scores[:trials]
    return bounds.multi_run(
        scores, np.zeros_like(scores), upper=0.0, delta=delta, confidence=confidence
    )


def _state_at(step: int, key: jax.Array) -> TrainState:
    """Returns a state that suffices to draw the batch of a step."""
    at = jnp.int32(step)
    noise = PrivatizeState(key, at)
    return TrainState(at, None, None, None, None, None, noise, key)


def loss(params: Any, example: Any) -> jax.Array:
    """Computes a loss for `worst_case`.

    Its gradient is the example's first feature in the direction of its label.
    """
    return example["features"][0] * params["direction"][example["label"]]


def worst_case(count: int, *, norm: float) -> tuple[dict[str, jax.Array], Source]:
    """Returns `count` parameters and canaries for `loss`.

    Their gradients are orthogonal and of one norm. No canary hides another. A norm far above the
    clip norm reveals missing clipping.
    """
    features = np.full((count, 1), norm)
    canaries = from_arrays(features=features, label=np.arange(count), num_classes=count)
    return {"direction": jnp.zeros(count)}, canaries


@shows_keywords(bounds.BoundTerms, vars(bounds.Terms))
def audit_run(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    steps: int,
    rows: Sequence[int] | np.ndarray | None = None,
    seed: bytes | None = None,
    **terms: Unpack[bounds.BoundTerms],
) -> bounds.Audit:
    """Audits private training by one run with many canaries.

    Args:
      trainer: A trainer from `dp_sgd` or another method, not `stochastic`. The number of examples
        of its sampler is public and may differ from `len(source)`.
      params: The parameters at which training starts.
      source: The training set with all canaries.
      steps: The number of steps of the run.
      rows: The examples that are canaries, by default all.
      seed: As in `jaxdp.audit.trials.Trials`, for coins, batches and noise.
      terms: delta, confidence and claim, as in `jaxdp.audit.one_run`. "gaussian" needs a sampling
        probability of 1.

    Returns:
      The `Audit`, for one example added or removed, with the ledger's epsilon of `trainer.event(0,
      steps)`.

    Raises:
      ValueError: An argument is out of range.
    """
    _check_independent(trainer)
    if trainer.stochastic:
        raise ValueError(
            "trainer must not be stochastic. The score of a canary needs a loss without a key."
        )
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    bound = bounds.Terms(**terms)
    event = trainer.event(0, steps)
    gaussian = all(isinstance(leaf, GaussianDpEvent) for leaf in composition(event))
    if bound.claim == "gaussian" and not gaussian:
        raise ValueError(
            "claim='gaussian' needs noise and a sampling probability of 1. Use claim='approximate'."
        )
    upper = claimed(event, adjacency="add_remove", delta=bound.delta)
    bound.check(upper)
    if seed is None:
        seed = new_seed()
    everything = np.arange(len(source))
    rows = everything if rows is None else np.asarray(rows)
    number = int.from_bytes(seed, "little")
    generator = np.random.default_rng(number)
    coins = generator.random(len(rows)) < 0.5
    left_out = rows[~coins]
    members = take(source, np.setdiff1d(everything, left_out))
    canaries = source.gather(rows)
    # Batches are drawn from the members. The divisor stays the trainer's.
    sampler = dataclasses.replace(trainer.sampler, num_examples=len(members))
    trainer = dataclasses.replace(trainer, sampler=sampler)
    state = _started(trainer, params, seed, "noise one run", "views one run")
    for _ in progress_bar(range(steps), label="audited run", unit="step"):
        state, _ = trainer.step(state, members)
    losses = jax.vmap(functools.partial(_loss, trainer), in_axes=(None, 0))
    before = losses(params, canaries)
    after = losses(state.params, canaries)
    scores = np.asarray(before - after)
    inside = scores[coins]
    outside = scores[~coins]
    return bounds.one_run(inside, outside, upper=upper, **dataclasses.asdict(bound))


def _loss(
    trainer: PrivateTrainer,
    params: Any,
    example: Any,
) -> jax.Array:
    """Returns the loss of an example, or the mean loss of a user's records."""
    loss_fn = trainer.query.gradient.loss_fn
    if not trainer.group:
        return loss_fn(params, example)
    of_records = jax.vmap(loss_fn, in_axes=(None, 0))(params, example.records)
    return jnp.mean(of_records, where=example.present)


def _started(
    trainer: PrivateTrainer,
    params: Any,
    seed: bytes,
    noise: str,
    views: str,
) -> TrainState:
    """Returns the state before the first step, with keys from the seed."""
    state = trainer.init(params)
    noise_state = state.noise._replace(key=stream(seed, noise))
    key_of_views = stream(seed, views, impl="threefry2x32")
    return state._replace(noise=noise_state, key=key_of_views)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NoisySums:
    """Runs that release noisy sums twice: over `base`, and over sums of the audited step.

    The privatizer's update runs outside of `jax.jit`, for many keys at once. So privatizers that
    differ in numbers only share the compiled draws of their noise.

    Attributes:
      update: The privatizer's own update.
      divisor: What makes a noisy mean a noisy sum.
      step: The number of the audited step.
      base: The sums of the step before.
    """

    update: Callable[..., Any]
    divisor: float
    step: int
    base: Any

    def release(self, sums: Any, noise: PrivatizeState) -> tuple[list[np.ndarray], PrivatizeState]:
        """Returns noisy sums minus `base`, a list of float64 [R, ...], and the next states."""
        noisy, noise = _released(self.update, sums, noise)
        residuals = []
        for mean, known in zip(_leaves(noisy), _leaves(self.base), strict=True):
            residuals.append(self.divisor * mean - known)
        return residuals, noise

    def observe(
        self, sums: Any, weights: list[np.ndarray], predicted: np.ndarray, keys: jax.Array
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns for every key [R] the score [R] of the noisy sums, and moments of their noise.

        `predicted` [leaves] is the share of the first noise that is subtracted from the second. The
        moments [R, leaves, 3] are the mean squares of the two noises and the mean of their product.
        """
        states = _states(keys, self.step - 1)
        first, noise = self.release(self.base, states)
        second, _ = self.release(sums, noise)
        scores = np.zeros(len(keys))
        moments = []
        for weight, before, now, share in zip(weights, first, second, predicted, strict=True):
            news = _flat(now - share * before)
            scores += news @ weight.ravel()
            products = before * before, now * now, before * now
            means = [_flat(product).mean(1) for product in products]
            moments.append(np.stack(means, axis=1))
        return scores, np.stack(moments, axis=1)

    def of(
        self,
        sums: Any,
        weights: list[np.ndarray],
        predicted: np.ndarray,
        key: jax.Array,
        runs: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores [runs] and mean moments [leaves, 3]."""
        scores = []
        moments = []
        for i in progress_bar(range(0, runs, _RUNS), label="audited step", unit=f"{_RUNS} runs"):
            keys = jax.random.split(jax.random.fold_in(key, i), _RUNS)
            size = _at_once(self.base)
            for start in range(0, _RUNS, size):
                some = keys[start : start + size]
                some_scores, some_moments = self.observe(sums, weights, predicted, some)
                scores.append(some_scores)
                moments.append(some_moments)
        mean: np.ndarray = np.concatenate(moments).mean(0)
        return np.concatenate(scores)[:runs], mean


def _released(
    update: Callable[..., Any], sums: Any, noise: PrivatizeState
) -> tuple[Any, PrivatizeState]:
    """Returns the noisy means of sums under states [R], and the next states."""
    return jax.vmap(update, in_axes=(None, 0))(sums, noise)


def _states(keys: jax.Array, step: int) -> PrivatizeState:
    """Returns the states of a step under keys [R]. Steps are an array, as in compiled training."""
    steps = np.full(len(keys), step, np.int32)
    return PrivatizeState(keys, jnp.asarray(steps))


def _at_once(sums: Any) -> int:
    """Returns the number of runs whose noise is drawn together, a divisor of `_RUNS`."""
    values = sum(leaf.size for leaf in jax.tree.leaves(sums))
    runs = _RUNS
    while runs > 1 and runs * values > _VALUES:
        runs //= 2
    return runs


def _flat(leaf: np.ndarray) -> np.ndarray:
    """Returns the values of each run, [R, values]."""
    return leaf.reshape(len(leaf), -1)


class _Noise(NamedTuple):
    """What separate draws show of the noise of each tensor, [leaves].

    `predicted` is the share of the noise of the step before that is in the noise of a step.
    `variances` are those of the rest.
    """

    variances: np.ndarray
    predicted: np.ndarray


def _noise(noisy: _NoisySums, key: jax.Array) -> _Noise:
    leaves = _leaves(noisy.base)
    no_weights = [np.zeros(leaf.shape, np.float32) for leaf in leaves]
    no_shares = np.zeros(len(leaves), np.float32)
    _, moments = noisy.of(noisy.base, no_weights, no_shares, key, _RUNS)
    before, now, both = moments.T
    predicted = np.divide(both, before, out=np.zeros_like(both), where=before > 0)
    variances = np.maximum(now - predicted * both, _LEAST_VARIANCE * now)
    # A tensor without noise would divide by 0.
    variances = np.where(variances > 0, variances, np.finfo(np.float32).tiny)
    return _Noise(variances, predicted.astype(np.float32))


def _distance(
    variances: np.ndarray,
    one: Any,
    other: Any,
) -> float:
    """Returns the squared distance of two sums in standard deviations of the noise."""
    distance = 0.0
    for x, y, variance in zip(_leaves(one), _leaves(other), variances, strict=True):
        squares = np.square(x - y)
        distance += float(squares.sum() / variance)
    return distance


def _leaves(sums: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(sums)]
