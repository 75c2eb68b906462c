"""Attacks on whole runs with correlated noise, which are one release.

    print(audit_whole_run(trainer, params, public_examples, trials=1000, delta=1e-5).describe())

The attacker sees the noisy sums of all steps, and knows in which of them the canary may be.
"""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import NoiseTerms, Trials
from jaxdp.data import Source
from jaxdp.files import shows_keywords
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.release import stream
from jaxdp.transforms.noise import Privatizer, PrivatizeState

# Of the mean variance. Noise of less variance in some direction hides nothing there.
_LEAST_VARIANCE = 1e-8


@shows_keywords(NoiseTerms, vars(Trials))
def audit_whole_run(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    row: int = 0,
    **terms: Unpack[NoiseTerms],
) -> bounds.Audit:
    """Audits a run with correlated noise by many runs with and without a canary.

    The steps are those in which the trainer's sampler has the canary. Its clipped gradient is that
    at `params` in all of them, as for a linear loss. All other examples are left out: a known sum
    can be subtracted. Sums and noise are the trainer's own.

    Args:
      trainer: A trainer of `dp_sgd` with `noise=jaxdp.correlated(...)`.
      params: The parameters of all steps.
      source: Examples for the trainer, public or synthetic, since the audit charges nothing.
      row: The example of `source` that is the canary.
      terms: trials, delta > 0, adjacency ("add_remove" or "replace_one", whose other record has the
        opposite gradient), confidence and seed, as in `jaxdp.audit.trials.Trials`.

    Returns:
      The `Audit` of 2 `trials` runs, with the ledger's epsilon of `trainer.event(0, steps)`.

    Formal guarantees:
      As `bounds.multi_run` with the Gaussian claim. The attack is fixed before the runs. For
      Gaussian noise of the covariance that separate draws show it is the likelihood ratio.

    Raises:
      ValueError: The noise is not correlated, or a term is out of range.
    """
    noise = trainer.privatizer.noise
    if noise is None:
        raise ValueError(
            "trainer must have noise=jaxdp.correlated(...). Audit a step of independent noise with "
            "jaxdp.audit.finetune.audit_step."
        )
    event = trainer.event(0, noise.steps)
    runs = Trials(charge=event, allowed=("add_remove", "replace_one"), **terms)
    state = trainer.refreshed(trainer.init(params))
    nobody = trainer.sums(state, source, np.arange(0))
    canary = trainer.sums(state, source, np.array([row]))
    present = [
        canary if row in trainer.sampler.batch(step) else nobody for step in range(noise.steps)
    ]
    with_canary = jax.tree.map(lambda *x: jnp.stack(x), *present)
    neighbour = -1.0 if runs.adjacency == "replace_one" else 0.0
    without = jax.tree.map(lambda x: neighbour * x, with_canary)

    def released(sums: Any, purpose: str) -> np.ndarray:
        keys = jax.random.split(stream(runs.seed, purpose), runs.trials)
        noisy = _runs(trainer.privatizer, sums, keys)
        return np.asarray(jax.device_get(noisy), np.float64)

    nothing = jax.tree.map(jnp.zeros_like, with_canary)
    draws = released(nothing, "what the noise is like")
    moved = _flat(with_canary) - _flat(without)
    weights = _weights(draws, moved)

    def scores(sums: Any, purpose: str) -> np.ndarray:
        seen = released(sums, purpose)
        # The likelihood ratio of noisy sums, [runs, steps, values].
        of_runs: np.ndarray = np.tensordot(seen, weights, axes=2)
        return of_runs

    return runs.judge(scores, with_canary, without)


@functools.partial(jax.jit, static_argnums=0)
def _runs(privatizer: Privatizer, sums: Any, keys: jax.Array) -> jax.Array:
    """Returns the noisy sums of runs under their keys, [runs, steps, values]."""
    first = jax.tree.map(lambda x: x[0], sums)

    def step(state: PrivatizeState, own: Any) -> tuple[PrivatizeState, jax.Array]:
        mean, state = privatizer.update(own, state)
        leaves = [x.reshape(-1) for x in jax.tree.leaves(mean)]
        return state, privatizer.divisor * jnp.concatenate(leaves)

    def run(key: jax.Array) -> jax.Array:
        start = PrivatizeState(key, jnp.int32(0), privatizer.init_buffers(first))
        _, noisy = jax.lax.scan(step, start, sums)
        return noisy

    return jax.lax.map(run, keys)


def _flat(sums: Any) -> np.ndarray:
    """Returns the sums of all steps, float64 [steps, values]."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(sums)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def _weights(draws: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Returns the direction of the attack, [steps, values].

    The noise has one covariance over the steps for all values. `draws` of it are [runs, steps,
    values], and `moved` is the difference of the two sums.
    """
    steps = draws.shape[1]
    rows = np.moveaxis(draws, 1, 0).reshape(steps, -1)
    covariance = rows @ rows.T / rows.shape[1]
    least = _LEAST_VARIANCE * np.trace(covariance) / steps
    weights: np.ndarray = np.linalg.solve(covariance + least * np.eye(steps), moved)
    return weights / np.abs(weights).max()
