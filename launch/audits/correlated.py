"""Audits of whole runs with correlated noise, by a banded and by a buffered strategy.

A run has three epochs of four steps, and the canary is in three of them.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.matrix_factorization.buffered_toeplitz import BufferedToeplitz

import jaxdp
from jaxdp import finetune
from jaxdp.audit.whole_runs import audit_whole_run
from jaxdp.data import FixedOrderSampler
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.release import claim

from . import case
from .case import Case, Run, under
from .finetune import CLIP, DELTA, EXAMPLES, PARAMS, doubled, loss, unclipped, with_one_key

SIGMA = 1.0  # of the one Gaussian that a run is
SAMPLER = FixedOrderSampler(len(EXAMPLES), 3)
EPOCHS = 3
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


def _case(words: str, strategy: Any, proof: str) -> Case:
    honest = _trainer(strategy)
    whole = honest.event(0, _PATTERN["steps"])
    claimed = claim(whole, adjacency="add_remove", delta=DELTA)

    def audit(trainer: PrivateTrainer, **options: Any) -> Run:
        terms: dict[str, Any] = {"delta": DELTA, "confidence": case.CONFIDENCE}

        def run(trials: int, seed: bytes) -> Any:
            found = audit_whole_run(
                trainer, PARAMS, EXAMPLES, trials=trials, seed=seed, **terms, **options
            )
            return found if trainer is honest and not options else under(found, claimed)

        return run

    single = jaxdp.correlated(strategy, steps=_PATTERN["steps"])
    needed = jaxdp.correlated(strategy, **_PATTERN)
    forgets = single.sensitivity / needed.sensitivity
    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: audit(_trainer(strategy, 0.5)),
        case.NO_CLIPPING: audit(unclipped(honest)),
        case.SENSITIVITY_OFF_BY_TWO: audit(doubled(honest)),
        case.REUSED_KEY: audit(with_one_key(honest)),
        case.ADD_REMOVE_FOR_REPLACE_ONE: audit(honest, adjacency="replace_one"),
        f"the sensitivity of one of {EPOCHS} participations": audit(_trainer(strategy, forgets)),
    }
    return Case("correlated noise", words, proof, audit(honest), twins)


def _cases() -> Iterator[Case]:
    claimed = f"a run of {_PATTERN['steps']} steps, {{}}: one Gaussian of multiplier {SIGMA:g}"
    yield _case(
        claimed.format("four bands"),
        np.array([1.0, 0.5, 0.375, 0.3125]),
        "C (G + C^-1 Z) = C G + Z (Denisov et al. 2022, theorem 2.1; Choquette-Choo et al. 2023); "
        "`jaxdp.transforms.noise.correlation`",
    )
    yield _case(
        claimed.format("two buffers"),
        BufferedToeplitz.build([0.9, 0.4], [0.3, 0.2], dtype=jnp.float32),
        "the same with a buffered linear Toeplitz C (McMahan et al. 2024, algorithm 3); "
        "`jaxdp.transforms.noise.correlation`",
    )


CASES = tuple(_cases())
