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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import Trials
from jaxdp.data import Source, from_arrays, take
from jaxdp.finetune.trainer import PrivateTrainer, TrainState
from jaxdp.privacy import GaussianDpEvent
from jaxdp.privacy.events import composition
from jaxdp.release import claim as claimed
from jaxdp.release import new_seed, stream
from jaxdp.report import progress_bar
from jaxdp.transforms.noise import PrivatizeState

# The number of runs per compiled call, and of draws from which the attack learns the variance of
# the noise.
_RUNS = 256
# Relative to the mean square of a tensor's noise. A residual below it is rounding error.
_LEAST_VARIANCE = 1e-12


def audit_step(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    rows: Sequence[int] | np.ndarray | None = None,
    others: Sequence[int] | np.ndarray = (),
    step: int = 1,
    **terms: Any,
) -> bounds.Audit:
    """Audits the Gaussian of one step by many noisy sums over a batch with a canary and as many
    over one without it.

    The batch is given. The claim is therefore the epsilon of the inner Gaussian, larger than the
    epsilon of the sampled step. `audit_sampling` audits the sampling. Sums and noise are the
    trainer's own. Every run has its own key.

    Args:
      trainer: A trainer from `dp_sgd` or another method.
      params: The parameters at which training starts.
      source: Examples for the trainer, public or synthetic, since the audit charges nothing. For a
        trainer with `group=True` they are of `by_group`, and the canary is a user with its records.
      rows: The examples of `source` that may be the canary, by default all. At least 2 for
          "replace_one".
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
    runs = Trials(
        charge=trainer.privatizer.event_at(step), allowed=("add_remove", "replace_one"), **terms
    )
    rows = np.arange(len(source)) if rows is None else np.asarray(rows)
    runs.check_candidates("rows must name", len(rows), "examples")

    state = _started(trainer, params, runs.seed, "steps before", "views")
    others = np.asarray(others, np.int64)
    for _ in range(step):
        state = trainer.refreshed(state)
        state, _ = trainer.update(state, trainer.sums(state, source, others))
    state = trainer.refreshed(state)
    base = trainer.sums(state, source, others)
    tried = [trainer.sums(state, source, np.append(others, row)) for row in rows]

    privatizer = trainer.privatizer
    observe = functools.partial(
        _observe, privatizer.update, privatizer.divisor, state.noise.step, base
    )
    variances, foretold = _noise(observe, base, stream(runs.seed, "what the noise is like"))
    distance = functools.partial(_distance, variances)
    present, absent = runs.farthest(tried, [base], distance)
    if not distance(present, absent) > 0:
        raise ValueError(
            "rows must name an example that changes the sum. The gradients of these are equal or "
            "zero."
        )
    weights = [
        (x - y) / v for x, y, v in zip(_leaves(present), _leaves(absent), variances, strict=True)
    ]
    largest = max((np.abs(leaf).max(initial=0) for leaf in weights), default=0) or 1.0
    weights = [np.float32(leaf / largest) for leaf in weights]

    def scores(sums: Any, purpose: str) -> np.ndarray:
        return _runs(observe, sums, weights, foretold, stream(runs.seed, purpose), runs.trials)[0]

    return runs.judge(scores, present, absent)


def audit_sampling(
    trainer: PrivateTrainer, *, trials: int, confidence: float = 0.95, seed: bytes | None = None
) -> bounds.Audit:
    """Audits the sampling of batches. A step that reveals its batch is (0, q)-DP for one example
    added or removed.

    With the canary in the data, a batch has it with probability q, otherwise never. The distance of
    the two is q, the delta at epsilon 0. Amplification by sampling rests on it.

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
    delta = trainer.sampler.sampling_probability
    if delta == 1:
        raise ValueError(
            "trainer must have a sampling probability below 1, got 1. Such a trainer does not "
            "sample."
        )
    if trials < 2:
        raise ValueError(f"trials must be at least 2, got {trials}.")
    bounds.check(0.0, delta, confidence)
    key = stream(new_seed() if seed is None else seed, "batches")
    everybody = np.arange(trainer.sampler.num_examples)
    before, scores = everybody[:0], np.zeros(0)
    for step in itertools.count():
        at = jnp.int32(step)
        batch = trainer.drawn(
            TrainState(at, None, None, None, None, None, PrivatizeState(key, at), key)
        )
        wanted = np.append(before, np.setdiff1d(everybody, before))[
            : max(1, int(trainer.sampler.expected_batch_size))
        ]
        scores = np.append(scores, np.isin(wanted, batch))
        if len(scores) >= trials:
            break
        before = batch
    scores = scores[:trials]
    return bounds.multi_run(
        scores, np.zeros_like(scores), upper=0.0, delta=delta, confidence=confidence
    )


def loss(params: Any, example: Any) -> jax.Array:
    """Computes a loss whose gradient is the example's first feature in the direction of its label,
    for `worst_case`.
    """
    return example["features"][0] * params["direction"][example["label"]]


def worst_case(count: int, *, norm: float) -> tuple[dict[str, jax.Array], Source]:
    """Returns `count` parameters and canaries for `loss`. Their gradients are orthogonal and of one
    norm.

    No canary hides another. A norm far above the clip norm reveals missing clipping.
    """
    canaries = from_arrays(
        features=np.full((count, 1), norm), label=np.arange(count), num_classes=count
    )
    return {"direction": jnp.zeros(count)}, canaries


def audit_run(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    steps: int,
    delta: float,
    rows: Sequence[int] | np.ndarray | None = None,
    confidence: float = 0.95,
    claim: bounds.Claim = "approximate",
    seed: bytes | None = None,
) -> bounds.Audit:
    """Audits private training by one run with many canaries.

    Args:
      trainer: A trainer from `dp_sgd` or another method, not `stochastic`. The number of examples
        of its sampler is public and may differ from `len(source)`.
      params: The parameters at which training starts.
      source: The training set with all canaries.
      steps: The number of steps of the run.
      rows: The examples that are canaries, by default all.
      delta, confidence, claim: As in `jaxdp.audit.one_run`. "gaussian" needs a sampling probability
          of 1.
      seed: As in `jaxdp.audit.trials.Trials`, for coins, batches and noise.

    Returns:
      The `Audit`, for one example added or removed, with the ledger's epsilon of `trainer.event(0,
      steps)`.

    Raises:
      ValueError: An argument is out of range.
    """
    if trainer.stochastic:
        raise ValueError(
            "trainer must not be stochastic. The score of a canary needs a loss without a key."
        )
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    event = trainer.event(0, steps)
    if claim == "gaussian" and not all(
        isinstance(leaf, GaussianDpEvent) for leaf in composition(event)
    ):
        raise ValueError(
            "claim='gaussian' needs noise and a sampling probability of 1. Use claim='approximate'."
        )
    upper = claimed(event, adjacency="add_remove", delta=delta)
    bounds.check(upper, delta, confidence, claim)
    seed = new_seed() if seed is None else seed
    rows = np.arange(len(source)) if rows is None else np.asarray(rows)
    coins = np.random.default_rng(int.from_bytes(seed, "little")).random(len(rows)) < 0.5
    members, examples = (
        take(source, np.setdiff1d(np.arange(len(source)), rows[~coins])),
        source.gather(rows),
    )
    # Batches are drawn from the members. The divisor stays the trainer's.
    trainer = dataclasses.replace(
        trainer, sampler=dataclasses.replace(trainer.sampler, num_examples=len(members))
    )
    state = _started(trainer, params, seed, "noise one run", "views one run")
    for _ in progress_bar(range(steps), label="audited run", unit="step"):
        state, _ = trainer.step(state, members)
    losses = jax.vmap(functools.partial(_loss, trainer), in_axes=(None, 0))
    scores = np.asarray(losses(params, examples) - losses(state.params, examples))
    return bounds.one_run(
        scores[coins], scores[~coins], upper=upper, delta=delta, confidence=confidence, claim=claim
    )


def _loss(trainer: PrivateTrainer, params: Any, example: Any) -> jax.Array:
    """Returns the loss of an example, or the mean loss of a user's records."""
    loss_fn = trainer.query.gradient.loss_fn
    if not trainer.group:
        return loss_fn(params, example)
    each = jax.vmap(loss_fn, in_axes=(None, 0))(params, example.records)
    return jnp.mean(each, where=example.present)


def _started(
    trainer: PrivateTrainer, params: Any, seed: bytes, noise: str, views: str
) -> TrainState:
    """Returns the state before the first step, with keys from the seed."""
    state = trainer.init(params)
    key = stream(seed, views, impl="threefry2x32")
    return state._replace(noise=state.noise._replace(key=stream(seed, noise)), key=key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _observe(
    update: Callable[..., Any],
    divisor: float,
    step: jax.Array,
    base: Any,
    sums: Any,
    weights: list[jax.Array],
    foretold: jax.Array,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns for every key [R] the score [R] of the noisy sums, and moments [R, leaves, 3] of
    their noise.

    A run releases noisy sums twice: over `base` in the step before, over `sums` in the audited
    step. The moments are the mean squares of the two noises and the mean of their product.
    """

    def release(noise: PrivatizeState, sums: Any) -> tuple[PrivatizeState, Any]:
        noisy, noise = update(sums, noise)
        return noise, jax.tree.map(lambda seen, known: divisor * seen - known, noisy, base)

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A scan compiles the noise once for both steps.
        both = jax.tree.map(lambda x, y: jnp.stack([x, y]), base, sums)
        _, seen = jax.lax.scan(release, PrivatizeState(key, step - 1), both)
        first, second = zip(*jax.tree.leaves(seen), strict=True)
        parts = list(zip(weights, first, second, foretold, strict=True))
        score = jnp.stack([jnp.vdot(w, b - share * a) for w, a, b, share in parts]).sum()
        moments = [
            jnp.stack([jnp.mean(a * a), jnp.mean(b * b), jnp.mean(a * b)]) for _, a, b, _ in parts
        ]
        return score, jnp.stack(moments)

    return jax.lax.map(one, keys)


def _runs(
    observe: Any,
    sums: Any,
    weights: list[np.ndarray],
    foretold: np.ndarray,
    key: jax.Array,
    runs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores [runs] and mean moments [leaves, 3]."""
    found = []
    for i in progress_bar(range(0, runs, _RUNS), label="audited step", unit=f"{_RUNS} runs"):
        keys = jax.random.split(jax.random.fold_in(key, i), _RUNS)
        found.append(jax.device_get(observe(sums, weights, foretold, keys)))
    scores, moments = (np.concatenate(part).astype(np.float64) for part in zip(*found, strict=True))
    mean: np.ndarray = moments.sum(0) / len(moments)
    return scores[:runs], mean


def _noise(observe: Any, base: Any, key: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the variance [leaves] of tensors' noise given the step before, and prediction factors
    [leaves].
    """
    leaves = _leaves(base)
    nothing = (
        [np.zeros(leaf.shape, np.float32) for leaf in leaves],
        np.zeros(len(leaves), np.float32),
    )
    before, now, both = _runs(observe, base, *nothing, key, _RUNS)[1].T
    foretold = np.divide(both, before, out=np.zeros_like(both), where=before > 0)
    variances = np.maximum(now - foretold * both, _LEAST_VARIANCE * now)
    return np.where(variances > 0, variances, np.finfo(np.float32).tiny), foretold.astype(
        np.float32
    )


def _distance(variances: np.ndarray, one: Any, other: Any) -> float:
    """Returns the squared distance of two sums in standard deviations of the noise."""
    parts = zip(_leaves(one), _leaves(other), variances, strict=True)
    return float(sum(np.square(x - y).sum() / v for x, y, v in parts))


def _leaves(sums: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(sums)]
