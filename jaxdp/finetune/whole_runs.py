"""Runs with correlated noise: what their chunks pay, and what must not change between two of them.

The steps of such a run are one Gaussian mechanism on C G (`jaxdp.transforms.noise.correlation`). So
the first chunk pays for all steps, before anything is released, and a run that stops early has paid
for steps that it may still take. A later chunk pays nothing.

A chunk that a crash interrupted runs again with equal rows of noise and equal gradients, which
releases nothing new. If its program or seed differs, it goes on from the same buffers with other
rows of Z. The rows of Z before it are shared with the first attempt. So the second attempt adds to
what is known only the entries of C G' + Z' from its first step on, which move by no more than those
of a whole run. It pays for one. This needs equal steps of every unit, and an equal C and scale of
the noise, in both attempts. They are compared (`identity`), and a run does not go on with others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import Source
from jaxdp.finetune.step import TrainState
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.release import digest

Rows = Sequence[Mapping[str, Any]]


def identity(trainer: PrivateTrainer, source: Source) -> np.ndarray:
    """Returns a hash of what all chunks of a run share, uint8 [32]: data, steps of units, noise.

    It depends on private data, and lies in checkpoints beside buffers that are secret too.
    """
    privatizer = trainer.privatizer
    facts = [
        source.fingerprint,
        repr(trainer.sampler),
        repr(privatizer.noise),
        repr((privatizer.noise_multiplier, privatizer.clip_norm, privatizer.divisor)),
        repr(trainer.query.gradient.clip_norm),
        trainer.unit,
    ]
    return np.frombuffer(bytes.fromhex(digest(facts)), np.uint8)


def check_identity(saved: Any, own: np.ndarray) -> None:
    """Raises ValueError if a run goes on with other data, steps of units, or noise."""
    if not np.array_equal(saved, own):
        raise ValueError(
            "workdir holds a run with correlated noise on another source, or with another sampler, "
            "clip norm, noise multiplier, noise or unit. Its steps are one release, whose proof "
            "needs them unchanged. Nothing is spent. Restore them, or begin a new run in a new "
            "workdir."
        )


def without_secrets(state: TrainState) -> TrainState:
    """Returns a state whose buffers are zeros."""
    return state._replace(buffers=jax.tree.map(jnp.zeros_like, state.buffers))


def is_paid(rows: Rows) -> bool:
    """Returns whether the notes of a workdir have the payment for the run."""
    return any(row.get("first_step") == 0 for row in rows)


def earlier(rows: Rows, first: int) -> list[str]:
    """Returns the tokens of the attempts at the chunk that begins at a step."""
    return [row["token"] for row in rows if row.get("first_step") == first]
