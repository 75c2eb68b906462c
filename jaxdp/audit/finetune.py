"""Canaries for private training: what a trained model tells about examples that were, or were not, in its data.

In one run many canaries are in or out by the toss of a coin each; in many runs one canary is in every other run. Either
way a canary's score is by how much its loss fell, which for the worst case, `worst_case`, is what the released
gradients say about it:

    trainer = dp_sgd(canaries.loss, optax.sgd(1.0), sampler=PoissonSampler(2000, 0.1), clip_norm=1.0,
                     noise_multiplier=1.0, physical_batch_size=256)
    print(canaries.one_run(trainer, *canaries.worst_case(2000, norm=10.0), steps=100, delta=1e-5).describe())

Any trainer, parameters and examples will do, mislabelled examples of one's own model for instance.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import bounds
from jaxdp.data import Source, from_arrays
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import GaussianDpEvent
from jaxdp.privacy.events import composition
from jaxdp.release import claim as claimed
from jaxdp.release import new_seed, stream


def loss(params: Any, example: Any) -> jax.Array:
    """A loss whose gradient is the example's first feature in the direction of its label; for `worst_case`."""
    return example["features"][0] * params["direction"][example["label"]]


def worst_case(count: int, *, norm: float) -> tuple[dict[str, jax.Array], Source]:
    """Parameters and canaries for `loss`: orthogonal gradients, all of one norm, so that no canary hides another.

    Args:
      count: number of canaries and of parameters, at least 2.
      norm: of each gradient. Far above the clip norm, it shows a clip that is forgotten.
    """
    canaries = from_arrays(features=np.full((count, 1), norm), label=np.arange(count), num_classes=count)
    return {"direction": jnp.zeros(count)}, canaries


def one_run(
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
      trainer: of `dp_sgd` or another method; its sampler's number of examples is the public one, which need not be that
        of `source`. Without `stochastic`.
      params: at which training starts.
      source: the training set, all canaries included.
      steps: of the run.
      delta: of both bounds, in [0, 1).
      rows: which examples are canaries; by default all.
      confidence, claim: as in `jaxdp.audit.one_run`. "gaussian" needs a sampling probability of 1.
      seed: 16 secret bytes of coins, batches and noise; drawn from the operating system unless given for tests.

    Returns:
      The `Audit`, for one example added or removed, with the ledger's epsilon of `trainer.event(0, steps)`.

    Raises:
      ValueError: an argument is out of range.
    """
    upper = _charged(trainer, steps, delta, claim)
    bounds.check(upper, delta, confidence, claim)
    seed = new_seed() if seed is None else seed
    rows = np.arange(len(source)) if rows is None else np.asarray(rows)
    coins = np.random.default_rng(int.from_bytes(seed, "little")).random(len(rows)) < 0.5
    members = source.take(np.setdiff1d(np.arange(len(source)), rows[~coins]))
    examples = source.gather(rows)
    trained = _training(trainer, params, members, steps, seed)("one run")
    losses = jax.vmap(trainer.query.gradient.loss_fn, in_axes=(None, 0))
    scores = np.asarray(losses(params, examples) - losses(trained, examples))
    return bounds.one_run(scores[coins], scores[~coins], upper=upper, delta=delta, confidence=confidence, claim=claim)


def multi_run(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    steps: int,
    trials: int,
    delta: float,
    row: int = 0,
    confidence: float = 0.95,
    claim: bounds.Claim = "approximate",
    seed: bytes | None = None,
) -> bounds.Audit:
    """Audits private training by many runs with one canary and as many without it.

    Args:
      row: which example of `source` is the canary.
      trials: runs of either kind, at least 2.
      trainer, params, source, steps, delta, confidence, claim, seed: as in `one_run`.

    Returns:
      The `Audit`, as of `one_run`.

    Raises:
      ValueError: an argument is out of range.
    """
    upper = _charged(trainer, steps, delta, claim)
    seed = new_seed() if seed is None else seed
    present = _training(trainer, params, source, steps, seed)
    absent = _training(trainer, params, source.take(np.delete(np.arange(len(source)), row)), steps, seed)
    canary, loss_fn = source[row], jax.jit(trainer.query.gradient.loss_fn)
    before = loss_fn(params, canary)
    return bounds.audit_mechanism(
        lambda i: present(f"with the canary, {i}"),
        lambda i: absent(f"without the canary, {i}"),
        lambda trained: before - loss_fn(trained, canary),
        trials=trials,
        upper=upper,
        delta=delta,
        confidence=confidence,
        claim=claim,
    )


def _training(trainer: PrivateTrainer, params: Any, source: Source, steps: int, seed: bytes) -> Callable[[str], Any]:
    """`run(name) -> parameters` after training on `source`, with keys of the run's own."""
    # Batches are drawn from the examples that there are; the divisor stays the trainer's.
    trainer = dataclasses.replace(trainer, sampler=dataclasses.replace(trainer.sampler, num_examples=len(source)))
    start = trainer.init(params)

    def run(name: str) -> Any:
        noise = start.noise._replace(key=stream(seed, f"noise {name}"))
        state = start._replace(noise=noise, key=stream(seed, f"views {name}", impl="threefry2x32"))
        for _ in range(steps):
            state, _ = trainer.step(state, source)
        return state.params

    return run


def _charged(trainer: PrivateTrainer, steps: int, delta: float, claim: bounds.Claim) -> float:
    """The ledger's epsilon after it has been charged for a run."""
    if trainer.stochastic:
        raise ValueError("trainer must not be stochastic: the loss of a canary would depend on a key of its own.")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    event = trainer.event(0, steps)
    if claim == "gaussian" and not all(isinstance(leaf, GaussianDpEvent) for leaf in composition(event)):
        raise ValueError("claim='gaussian' needs noise and a sampling probability of 1; use claim='approximate'.")
    return claimed(event, adjacency="add_remove", delta=delta)
