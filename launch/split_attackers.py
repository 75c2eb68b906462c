"""The attackers of Tables 5 and 6, from what the server of Split Adaptation knows of a client."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import split
from jaxdp.transforms import noise

from . import representation_attacks as attacks
from .ginver import Ginver

# FORA aligns the shipped frontend with the uploads, and then reads one copy or the median of all.
FORA = {"FORA": "noise-aware", "FORA, aggregating": "aggregating"}
# Ginver knows the shipped frontend and no image.
GINVER = {"Ginver": "noise-aware", "Ginver, aggregating": "aggregating"}
STRONGEST = ("noise-aware", "aggregating")  # every table of attacks has these
STANDARD = ("noise-unaware", "noise-aware", "aggregating", "oracle")
ATTACKERS = (*STANDARD, *FORA, *GINVER)

SCORES = {
    "ssim_gaussian11": "SSIM (11, Gaussian)",
    "ssim_uniform7": "SSIM (7, uniform)",
    "psnr": "PSNR",
    "lpips": "LPIPS (AlexNet)",
}


class Knowledge(NamedTuple):
    """What the server knows.

    Attributes:
      backbone: The server's model.
      extract: The quantised frontend, `extract(params, images)`.
      shipped: The parameters of the frontend that the server gave away.
      public: The server's images, float32 [m, S, S, C] in [0, 1].
      options: config.attack.
      model_noise, release: What the client does, as in `representation_attacks.Simulation`.
    """

    backbone: split.Backbone
    extract: attacks.Extract
    shipped: Any
    public: np.ndarray
    options: Any
    model_noise: attacks.ModelNoise | None = None
    release: attacks.Release | None = None


def attackers_of(
    knowledge: Knowledge,
    names: Sequence[str],
    uploads: np.ndarray,
    *,
    true: Any,
    key: jax.Array,
) -> dict[str, attacks.Learner]:
    """Returns those of `ATTACKERS` that have a name in `names`.

    One copy has no median, so its aggregating attackers are left out.

    Args:
      knowledge: What the server knows.
      names: Names of `ATTACKERS`.
      uploads: float32 [c, n, T, D], c copies of the representations of n images.
      true: The parameters of the client's noisy frontend, for "oracle".
      key: A typed PRNG key of FORA.
    """
    standard = attacks.standard_attackers(
        knowledge.extract,
        shipped=knowledge.shipped,
        true=true,
        model_noise=knowledge.model_noise,
        release=knowledge.release,
        copies=len(uploads),
    )
    attackers: dict[str, attacks.Learner] = {**standard}
    if not FORA.keys().isdisjoint(names):
        attackers |= _fora(knowledge, uploads, standard, key)
    for name, like in GINVER.items():
        attackers[name] = _ginver(knowledge, standard[like].copies)
    known = [name for name in names if name in attackers]
    if len(uploads) == 1:
        known = [name for name in known if "aggregating" not in name]
    return {name: attackers[name] for name in known}


def _fora(
    knowledge: Knowledge,
    uploads: np.ndarray,
    standard: Mapping[str, attacks.Attacker],
    key: jax.Array,
) -> dict[str, attacks.Attacker]:
    """Returns the attackers of FORA. Their frontend is not quantised, because rounding has no
    gradient.
    """
    simulation = attacks.Simulation(knowledge.backbone.front, release=knowledge.release)
    front = attacks.align(
        key,
        simulation,
        knowledge.shipped,
        uploads,
        public=knowledge.public,
        steps=knowledge.options.fora_steps,
        batch_size=knowledge.options.batch_size,
    )
    aligned = {}
    for name, like in FORA.items():
        several = dataclasses.replace(simulation, copies=standard[like].copies)
        aligned[name] = attacks.Attacker(several, front)
    return aligned


def _ginver(knowledge: Knowledge, copies: int) -> Ginver:
    """Returns Ginver. Its frontend is not quantised, as that of FORA."""
    return Ginver(
        extract=knowledge.backbone.front,
        front=knowledge.shipped,
        copies=copies,
        steps=knowledge.options.ginver_steps,
    )


# Equal arguments give one object, so that decoders compile once.
@functools.cache
def perturbed(**noise_of_model: Any) -> Callable[[jax.Array, Any], Any]:
    """Returns the noise on the frontend, as attackers simulate it."""
    return functools.partial(split.perturb_params, **noise_of_model)


@functools.cache
def simulated(order: str, **copying: Any) -> attacks.Release:
    """Returns a function that draws a copy of a client's upload of a batch of images, as attackers
    simulate it.
    """

    def release(key: jax.Array, x: jax.Array, copy: jax.Array) -> jax.Array:
        if order == "once":
            return x + noise.laplace(key, x, copying["laplace_scale"])
        images = jnp.arange(len(x), dtype=jnp.int32)
        return split.augment_then_noise(key, x, **{**copying, "copies": 1}).batch(
            images, jnp.full_like(images, copy)
        )

    return release
