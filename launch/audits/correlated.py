"""Audits of whole runs with correlated noise, by a banded and by a buffered strategy.

A run has three epochs of four steps, and the canary is in three of them. The run with amplification
has two cycles of four steps, and the canary is in those of one group, with a probability each.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.matrix_factorization.buffered_toeplitz import BufferedToeplitz

import jaxdp
from jaxdp import finetune
from jaxdp.audit import Audit
from jaxdp.audit.whole_runs import audit_whole_run
from jaxdp.data import CyclicPoissonSampler, FixedOrderSampler, PoissonSampler
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import DpEvent, GaussianDpEvent
from jaxdp.release import claim

from . import case
from .case import Case, Run, standard_twins, under
from .finetune import CLIP, DELTA, EXAMPLES, PARAMS, doubled, loss, unclipped, with_one_key

SIGMA = 1.0  # of the one Gaussian that a run is
SAMPLER = FixedOrderSampler(len(EXAMPLES), 3)
EPOCHS = 3
FORGETS = f"the sensitivity of one of {EPOCHS} participations"
_PATTERN: dict[str, Any] = {
    "steps": EPOCHS * SAMPLER.steps_per_epoch,
    "participations": EPOCHS,
    "min_separation": SAMPLER.steps_per_epoch,
}


def _trainer(strategy: Any, share: float = 1.0) -> PrivateTrainer:
    """Returns a trainer with a share of the noise that its claim needs."""
    noise = jaxdp.correlated(strategy, **_PATTERN)
    return finetune.dp_sgd(
        loss,
        optax.sgd(0.1),
        noise=noise,
        noise_multiplier=share * SIGMA * noise.sensitivity,
        sampler=SAMPLER,
        clip_norm=CLIP,
        physical_batch_size=3,
    )


def _forgetful(strategy: Any) -> PrivateTrainer:
    """Returns a trainer whose noise is that of one participation."""
    single = jaxdp.correlated(strategy, steps=_PATTERN["steps"])
    needed = jaxdp.correlated(strategy, **_PATTERN)
    return _trainer(strategy, single.sensitivity / needed.sensitivity)


def _audit(
    make: Callable[[], PrivateTrainer],
    *,
    event: Callable[[], DpEvent],
    delta: float,
    **options: Any,
) -> Run:
    """Returns the audit of a trainer under the claim of an event.

    Trainers are made when an audit runs. The list of all cases needs none.
    """

    def seen(**terms: Any) -> Audit:
        claimed = claim(event(), adjacency="add_remove", delta=delta)
        return under(audit_whole_run(make(), PARAMS, EXAMPLES, **terms), claimed)

    return case.run_of(seen, delta=delta, **options)


def _case(mechanism: str, words: str, strategy: Any, proof: str) -> Case:
    @functools.cache  # its twins of other sums share its compiled noise
    def honest() -> PrivateTrainer:
        return _trainer(strategy)

    audit = functools.partial(_audit, event=lambda: GaussianDpEvent(SIGMA), delta=DELTA)
    twins = standard_twins(
        half_the_noise=audit(lambda: _trainer(strategy, 0.5)),
        no_clipping=audit(lambda: unclipped(honest())),
        sensitivity_off_by_two=audit(lambda: doubled(honest())),
        reused_key=audit(lambda: with_one_key(honest())),
        add_remove_for_replace_one=audit(honest, adjacency="replace_one"),
    )
    twins[FORGETS] = audit(lambda: _forgetful(strategy))
    return Case(mechanism, words, proof, audit(honest), twins, trials=400)


def _cases() -> Iterator[Case]:
    claimed = f"a run of {_PATTERN['steps']} steps, {{}}: one Gaussian of multiplier {SIGMA:g}"
    yield _case(
        "correlated noise",
        claimed.format("four bands"),
        np.array([1.0, 0.5, 0.375, 0.3125]),
        "C (G + C^-1 Z) = C G + Z (Denisov et al. 2022, theorem 2.1; Choquette-Choo et al. 2023); "
        "`jaxdp.transforms.noise.correlation`",
    )
    yield _case(
        "correlated noise of buffers",
        claimed.format("two buffers"),
        BufferedToeplitz.build([0.9, 0.4], [0.3, 0.2], dtype=jnp.float32),
        "the same with a buffered linear Toeplitz C (McMahan et al. 2024, algorithm 3); "
        "`jaxdp.transforms.noise.correlation`",
    )


class NoGroups(CyclicPoissonSampler):
    """Cyclic Poisson sampling that draws groups anew in every step."""

    def batch(self, step: int) -> np.ndarray:
        of_all = PoissonSampler(self.num_examples, self.sampling_probability, seed=self.seed)
        return of_all.batch(step)


CYCLIC = CyclicPoissonSampler(len(EXAMPLES), 0.8, cycle_length=4)
CYCLIC_STEPS = 2 * CYCLIC.cycle_length
CYCLIC_SIGMA = 1.8  # of the Gaussian of a group's step
CYCLIC_DELTA = 0.03
STEEP = np.array([1.0, 0.95, 0.9, 0.85])


def _amplified(share: float = 1.0, sampler: CyclicPoissonSampler = CYCLIC) -> PrivateTrainer:
    """Returns a trainer with a share of the noise that its claim needs."""
    participations, separation = CYCLIC.participation(CYCLIC_STEPS)
    pattern: dict[str, Any] = {"participations": participations, "min_separation": separation}
    noise = jaxdp.correlated(STEEP, steps=CYCLIC_STEPS, **pattern)
    return finetune.dp_sgd(
        loss,
        optax.sgd(0.1),
        noise=noise,
        noise_multiplier=share * CYCLIC_SIGMA * float(np.linalg.norm(STEEP)),
        sampler=sampler,
        clip_norm=CLIP,
        physical_batch_size=3,
    )


def _amplified_case() -> Case:
    @functools.cache
    def honest() -> PrivateTrainer:
        return _amplified()

    def event() -> DpEvent:
        return honest().event(0, CYCLIC_STEPS)

    audit = functools.partial(_audit, event=event, delta=CYCLIC_DELTA)
    of_the_same_lines = "sums and noise are those of correlated noise, whose row has this twin"
    of_one_band = 1 / float(np.linalg.norm(STEEP))
    no_groups = NoGroups(len(EXAMPLES), CYCLIC.sampling_probability, cycle_length=4)
    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: audit(lambda: _amplified(0.5)),
        case.NO_CLIPPING: of_the_same_lines,
        case.SENSITIVITY_OFF_BY_TWO: of_the_same_lines,
        case.REUSED_KEY: of_the_same_lines,
        case.ADD_REMOVE_FOR_REPLACE_ONE: audit(honest, adjacency="replace_one"),
        "an account as of one band": audit(lambda: _amplified(of_one_band)),
        "groups drawn anew in every step": audit(lambda: _amplified(sampler=no_groups)),
    }
    return Case(
        "amplified correlated noise",
        f"a run of {CYCLIC_STEPS} steps, four bands, cyclic Poisson: 2 sampled Gaussians of "
        f"probability 0.8 and multiplier {CYCLIC_SIGMA:g}",
        "with bands up to the separation, the steps of a record move disjoint rows of C G "
        "(Choquette-Choo et al. 2023, arXiv:2306.08153, theorem 4); `jaxdp.privacy.participation`",
        audit(honest),
        twins,
        trials=4000,
    )


CASES = (*_cases(), _amplified_case())
