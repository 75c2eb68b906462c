"""Attacks on whole runs with correlated noise, which are one release.

    print(audit_whole_run(trainer, params, public_examples, trials=1000, delta=1e-5).describe())

The attacker sees the noisy sums of all steps. It knows in which of them the canary is, or by which
law that is drawn.
"""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxdp.audit import bounds
from jaxdp.audit.participation import histories
from jaxdp.audit.trials import NoiseTerms, Trials
from jaxdp.data import Source
from jaxdp.files import shows_keywords
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import derive, stream
from jaxdp.transforms.noise import Privatizer, PrivatizeState

# Histories that stand for the law of a secret sampler in the score, draws for the covariance, and
# runs at a time.
_HISTORIES = 512
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

    The steps are those in which the trainer's sampler has the canary, drawn anew for every run if
    the sampler is secret. Its clipped gradient is that at `params` in all of them, as for a linear
    loss. All other examples are left out: a known sum can be subtracted. Sums and noise are the
    trainer's own.

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
      As `bounds.multi_run`, with the Gaussian claim for a public order. The attack is fixed before
      the runs. For Gaussian noise of the covariance that separate draws show it is the likelihood
      ratio, where 512 drawn histories stand for the law of a secret sampler.

    Raises:
      ValueError: The noise is not correlated, a term is out of range, or the canary changes no sum.
    """
    noise = trainer.privatizer.noise
    if noise is None:
        raise ValueError(
            "trainer must have noise=jaxdp.correlated(...). Audit a step of independent noise with "
            "jaxdp.audit.finetune.audit_step."
        )
    event = trainer.event(0, noise.steps)
    allowed: tuple[Adjacency, ...] = ("add_remove", "replace_one")
    # The claim of a mixture is not that of a Gaussian.
    shape: bounds.Claim = "approximate" if trainer.is_amplified else "gaussian"
    runs = Trials(charge=event, allowed=allowed, claim=shape, **terms)
    state = trainer.refreshed(trainer.init(params))
    nobody = trainer.sums(state, source, np.arange(0))
    canary = trainer.sums(state, source, np.array([row]))
    direction = _flat(canary) - _flat(nobody)
    neighbour = -1.0 if runs.adjacency == "replace_one" else 0.0

    def steps_of(count: int, purpose: str) -> np.ndarray:
        if not trainer.is_amplified:
            batches = map(trainer.sampler.batch, range(noise.steps))
            return np.array([[row in batch for batch in batches]], np.float64)
        return histories(trainer.sampler, noise.steps, count, derive(runs.seed, purpose))

    def released(share: float, purpose: str, count: int) -> np.ndarray:
        keys = jax.random.split(stream(runs.seed, purpose), count)
        is_in = steps_of(count, f"{purpose}, participation")
        shares = np.broadcast_to(share * is_in, (count, noise.steps))
        shares = shares.astype(np.float32)
        noisy = []
        for start in range(0, count, _HISTORIES):
            # Calls of one size compile the runs once, so the last one repeats some.
            rows = np.arange(start, start + _HISTORIES) % count
            of_call = _runs(trainer.privatizer, (nobody, canary), keys[rows], shares[rows])
            noisy.append(np.asarray(jax.device_get(of_call), np.float64))
        return np.concatenate(noisy)[:count]

    # Most histories of a few steps are alike.
    law, counts = np.unique(steps_of(_HISTORIES, "law"), axis=0, return_counts=True)
    if not (direction.any() and law.any()):
        raise ValueError(
            f"row must be an example that changes a sum, got {row}. Its gradient is zero, or no "
            "step has it."
        )
    covariance = _covariance(released(0.0, "what the noise is like", _HISTORIES))

    def log_ratio(values: np.ndarray, share: float) -> np.ndarray:
        """Returns the logarithm of the density ratio to no participation, [runs]."""
        shifts = share * law
        solved = np.linalg.solve(covariance, shifts.T)
        squares = (shifts.T * solved).sum(axis=0)
        moved = direction @ direction
        exponents = values @ solved - moved * squares / 2
        return special.logsumexp(exponents, axis=1, b=counts)

    def scores(share: float, purpose: str) -> np.ndarray:
        # The product with the contribution of the canary has all that the values tell.
        along = released(share, purpose, runs.trials) @ direction
        of_present = log_ratio(along, 1.0)
        of_absent = log_ratio(along, neighbour)
        return of_present - of_absent

    return runs.judge(scores, 1.0, neighbour)


@functools.partial(jax.jit, static_argnums=0)
def _runs(
    privatizer: Privatizer,
    sums: Any,
    keys: jax.Array,
    shares: jax.Array,
) -> jax.Array:
    """Returns the noisy sums of runs under their keys, [runs, steps, values].

    `sums` are those without and with the canary, of which a step has a share.
    """
    nobody, canary = sums

    def step(state: PrivatizeState, share: jax.Array) -> tuple[PrivatizeState, jax.Array]:
        own = jax.tree.map(lambda a, b: a + share * (b - a), nobody, canary)
        mean, state = privatizer.update(own, state)
        leaves = [x.reshape(-1) for x in jax.tree.leaves(mean)]
        return state, privatizer.divisor * jnp.concatenate(leaves)

    def run(key: jax.Array, first: jax.Array, of_steps: jax.Array) -> jax.Array:
        start = PrivatizeState(key, first, privatizer.init_buffers(nobody))
        _, noisy = jax.lax.scan(step, start, of_steps)
        return noisy

    # The first step is an array, so that runs with one key, a mistake, are audited too.
    return jax.vmap(run)(keys, jnp.zeros(len(shares), jnp.int32), shares)


def _flat(sums: Any) -> np.ndarray:
    """Returns a sum as float64 [values]."""
    leaves = []
    for leaf in jax.tree.leaves(sums):
        wide = np.asarray(leaf, np.float64)
        leaves.append(wide.ravel())
    return np.concatenate(leaves)


def _covariance(draws: np.ndarray) -> np.ndarray:
    """Returns the covariance of noise over the steps, [steps, steps].

    It is one for all values. `draws` of the noise are [runs, steps, values].
    """
    steps = draws.shape[1]
    rows = np.moveaxis(draws, 1, 0).reshape(steps, -1)
    covariance = rows @ rows.T / rows.shape[1]
    least = _LEAST_VARIANCE * np.trace(covariance) / steps
    return covariance + least * np.eye(steps)
