"""Runs that are one release: what their chunks pay, and what must not change between two of them.

A run is one release (`PrivateTrainer.is_whole`) if its noise is correlated
(`jaxdp.transforms.noise.correlation`), or if its steps share who takes part
(`jaxdp.data.participation`), or both. The first chunk pays for all steps, before anything is
released, and a run that stops early has paid for steps that it may still take. A later chunk pays
nothing. Checkpoints hold the secrets that the rest of the run needs: earlier noise, and the seed of
the pattern. The last one holds none.

A chunk that a crash interrupted runs again with equal batches, rows of noise and gradients, which
releases nothing new. If its program or seed differs, the rest of the run would be released twice:

    public order     The second attempt goes on from the same buffers with other rows of Z. The rows
                     of Z before it are shared with the first attempt. So it adds to what is known
                     only the entries of C G' + Z' from its first step on, which move by no more
                     than those of a whole run. It pays for one. This needs equal steps of every
                     unit, and an equal C and scale of the noise, in both attempts. They are
                     compared (`identity`), and a run does not go on with others.
    secret pattern   Both attempts would depend on one draw of who takes part, and two charges are
                     for two independent draws. So the run does not go on. An attempt at the first
                     chunk draws all secrets anew, and pays for a whole run.

A simulated event has draws of its own, and a new process would draw another event. So the workdir
keeps the first one, with a hash of the public facts that it is the event of.

A workdir may be copied or restored, and its notes with it. So the ledger knows of later chunks too:
a chunk charges a `jaxdp.release.Mark`, an event without cost, whose token all copies share. The
first attempt that makes the mark goes on for free. An attempt of any other copy is a second one, as
above.
"""

import copy
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import Source
from jaxdp.data.participation import SimulatedSampler
from jaxdp.files import read_json, write_json
from jaxdp.finetune.step import TrainState
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy.events import describe, from_json, to_json
from jaxdp.release import Hosts, derive, digest

EVENT = "event.json"
_NO_SEED = np.zeros(16, np.uint8)


# --- The event of the run -----------------------------------------------------------------------


def with_event(
    trainer: PrivateTrainer, workdir: pathlib.Path | None, hosts: Hosts
) -> PrivateTrainer:
    """Returns the trainer with the simulated event of its run, which all processes share.

    Raises:
      ValueError: The workdir has the event of other noise, steps or sampling.
    """
    if not isinstance(trainer.sampler, SimulatedSampler):
        return trainer
    text = hosts.first(lambda: _event_text(trainer, workdir))
    # A copy shares the compiled functions.
    own = copy.copy(trainer)
    object.__setattr__(own, "simulated_event", from_json(text))
    return own


def _event_text(trainer: PrivateTrainer, workdir: pathlib.Path | None) -> str:
    """Returns the JSON of the event in the workdir, which is written if there is none."""
    path = None if workdir is None else workdir / EVENT
    facts = digest(_public_facts(trainer))
    if path is not None and path.exists():
        saved = read_json(path)
        text: str = saved["event"]
        if saved.get("facts") != facts:
            raise ValueError(
                f"workdir holds the run {describe(from_json(text))}, which has other noise, steps "
                "or sampling than the trainer. Use a new workdir for another run."
            )
        return text
    text = to_json(trainer.event(0, trainer.whole_steps))
    if path is not None:
        write_json(path, {"event": text, "facts": facts})
    return text


def _public_facts(trainer: PrivateTrainer) -> list[str]:
    """Returns what decides the event of a run, and whose steps take part in it."""
    privatizer = trainer.privatizer
    noise = (privatizer.noise_multiplier, privatizer.clip_norm, privatizer.divisor)
    return [repr(trainer.sampler), repr(privatizer.noise), repr(noise)]


# --- What lies in checkpoints -------------------------------------------------------------------


@dataclasses.dataclass
class WholeRun:
    """What a checkpoint holds besides the state of a run that is one release.

    Attributes:
      steps: The steps of the release.
      identity: A hash of what all chunks share, uint8 [32]: data, steps of units, noise. It depends
        on private data, and lies beside secrets.
      is_amplified: Whether who takes part is a secret that all steps share.
      seed: The seed of that secret, uint8 [16], zeros before the first step and after the last.
    """

    steps: int
    identity: np.ndarray
    is_amplified: bool
    seed: np.ndarray = dataclasses.field(default_factory=_NO_SEED.copy)

    @classmethod
    def of(cls, trainer: PrivateTrainer, source: Source) -> "WholeRun":
        """Returns that of a run before its first step."""
        clip_norm = repr(trainer.query.gradient.clip_norm)
        facts = [source.fingerprint, *_public_facts(trainer), clip_norm, trainer.unit]
        hashed = np.frombuffer(bytes.fromhex(digest(facts)), np.uint8)
        return cls(trainer.whole_steps, hashed, trainer.is_amplified)

    def draw(self, secret: bytes) -> None:
        """Draws who takes part from the secret of the first chunk."""
        if self.is_amplified:  # a public order has no secret
            self.seed = np.frombuffer(derive(secret, "who takes part"), np.uint8)

    @property
    def sampling_seed(self) -> bytes | None:
        """The seed of the batches of all chunks, or None for a public order."""
        return self.seed.tobytes() if self.is_amplified else None

    def is_end(self, state: TrainState) -> bool:
        """Returns whether a state is that after the last step."""
        return int(state.step) == self.steps

    def content(self, state: TrainState) -> dict[str, np.ndarray]:
        """Returns what a checkpoint of a state holds, by name."""
        secrets = {"identity": self.identity}
        if self.is_amplified:
            secrets["pattern"] = self.seed
        if self.is_end(state):
            # Zeros, so that all checkpoints of a run have one structure.
            secrets = {name: np.zeros_like(value) for name, value in secrets.items()}
        return secrets

    def take(self, saved: dict[str, Any], step: int) -> None:
        """Takes its own content out of a checkpoint before the last step.

        Raises:
          ValueError: The checkpoint is of other data, steps of units, or noise.
        """
        identity, seed = saved.pop("identity"), saved.pop("pattern", _NO_SEED)
        if step >= self.steps:  # the last checkpoint has zeros only
            return
        if not np.array_equal(identity, self.identity):
            raise ValueError(
                "workdir holds a run on another source, or with another sampler, clip norm, noise "
                "multiplier, noise or unit. Its steps are one release, whose proof needs them "
                "unchanged. Nothing is spent. Restore them, or begin a new run in a new workdir."
            )
        self.seed = np.asarray(seed)


def without_secrets(state: TrainState) -> TrainState:
    """Returns a state whose buffers are zeros."""
    return state._replace(buffers=jax.tree.map(jnp.zeros_like, state.buffers))


# --- What a repeated chunk pays -----------------------------------------------------------------


def check_fork(run: WholeRun, first: int) -> None:
    """Raises ValueError if a chunk that is not the first cannot be released a second time."""
    if run.is_amplified:
        raise ValueError(
            f"workdir holds a run whose step {first} was begun before with another program, "
            "checkpoint_every, secret seed or environment, or it has lost the notes of its "
            "charges, or this workdir is a copy of another one that went on. Its steps share a "
            "secret draw of who takes part, so they cannot be released twice. Nothing is spent. "
            "Restore what changed, go on in the other workdir, or begin a new run in a new workdir."
        )
