"""Audits of private test-time adaptation: the Gaussian of one update of every method.

The model is small and random. Its gradients are about ten times as long as the clip norm, so every
image is clipped. Twins have the noise of the honest method unless they say otherwise.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import tta
from jaxdp.audit import Audit
from jaxdp.audit.tta import audit_stream
from jaxdp.privacy import GaussianDpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim

from . import case
from .case import Audits, Case, Run, Twin, held, standard_twins

DELTA = 1e-5
CLIP = 0.01
SIGMA = 1.0
FAR = 1e4  # times the clip norm: what a forgotten clip lets through
CLAIMED = claim(GaussianDpEvent(SIGMA), adjacency="zero_out", delta=DELTA)
CLASSES = 4
WIDTH = 6
SIDE = 4
OPTIMIZER = optax.sgd(1.0)

_random = np.random.default_rng(0)
IMAGES = _random.normal(size=(36, SIDE, SIDE, 3)).astype(np.float32)
_embed = _random.normal(size=(SIDE * SIDE * 3, WIDTH)) / 7
_head = _random.normal(size=(WIDTH, CLASSES))
_norm_params = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
PARAMS: Mapping[str, Any] = {
    "embed": jnp.asarray(_embed, jnp.float32),
    "head": jnp.asarray(_head, jnp.float32),
    "block_0": {"norm": _norm_params},
    "block_1": {"norm": _norm_params},
}


def apply_fn(params: Mapping[str, Any], images: jax.Array) -> jax.Array:
    """Returns logits [B, CLASSES] of two blocks. Each has a LayerNorm, and the first a tanh after
    it.
    """
    pixels = images.reshape(len(images), -1)
    h = pixels @ params["embed"]
    h = _norm(h, **params["block_0"]["norm"])
    h = jnp.tanh(h)
    h = _norm(h, **params["block_1"]["norm"])
    return h @ params["head"]


def _norm(h: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = h.mean(-1, keepdims=True)
    variance = h.var(-1, keepdims=True)
    h = (h - mean) * jax.lax.rsqrt(variance + 1e-5)
    return h * scale[None] + bias[None]


class OneKey(tta.Adapter):
    """An adapter that draws the noise of every stream from one key."""

    def init(self, key: jax.Array | None = None) -> tta.AdaptState:
        assert key is not None
        return super().init(case.one_key(key))


def updates(
    method: tta.Method, *, accumulate: int = 1, sensitivity: float = 1.0, **options: Any
) -> Audits:
    """Returns the audit of an update by the private form of a method, and of its twins.

    The noise has `sensitivity` times the multiplier of the claim.
    """

    def audit(
        clip: float = CLIP,
        sigma: float = SIGMA,
        *,
        adjacency: Adjacency = "zero_out",
        kind: type[tta.Adapter] = tta.Adapter,
    ) -> Run:
        def seen(**terms: Any) -> Audit:
            scaled = sigma * sensitivity
            private = tta.private(method, clip_norm=clip, noise_multiplier=scaled, **options)
            adapter = kind(apply_fn, PARAMS, private, OPTIMIZER, accumulate=accumulate)
            return audit_stream(adapter, IMAGES[:4], IMAGES[4:], **terms)

        return case.run_of(seen, delta=DELTA, adjacency=adjacency)

    def twin(*noise: float, **changes: Any) -> Run:
        return held(audit(*noise, **changes), CLAIMED)

    unclipped: Twin = "int32 has no room for gradients that are not clipped"
    if not options.get("exact"):
        unclipped = twin(FAR * CLIP, SIGMA / FAR)
    twins = standard_twins(
        half_the_noise=twin(sigma=SIGMA / 2),
        no_clipping=unclipped,
        sensitivity_off_by_two=twin(2 * CLIP, SIGMA / 2),
        reused_key=twin(kind=OneKey),
        add_remove_for_replace_one=twin(adjacency="replace_one"),
    )
    if sensitivity != 1:
        twins[FORGETS] = twin(sigma=SIGMA / sensitivity)
    return audit(), twins


# C is the matrix of partial sums, so a row of noise takes all of the row before away again.
NOISE = jaxdp.correlated(np.ones(3), steps=3)
TENT = tta.Tent()  # one object, so that all its adapters share their compiled steps
FORGETS = "the sensitivity of independent noise"


def _cases() -> Iterator[Case]:
    fisher = tta.fisher(apply_fn, PARAMS, [IMAGES[:4]])
    eata = tta.EATA(CLASSES, fisher=fisher)
    deyo = tta.DeYO(CLASSES)
    audits = {
        "Tent": updates(TENT),
        "Tent, two batches an update": updates(TENT, accumulate=2),
        "Tent, exact noise": updates(TENT, exact=True),
        "EATA": updates(eata),
        "EATA, filters kept": updates(eata, filters="keep", kept_fraction=0.5),
        "SAR": updates(tta.SAR(CLASSES)),
        "DeYO": updates(deyo),
        "COME over Tent": updates(tta.COME(TENT, CLASSES)),
        "COME over DeYO": updates(tta.COME(deyo, CLASSES)),
    }
    for name, (run, twins) in audits.items():
        yield Case(
            f"private {name}",
            f"an update: a Gaussian of multiplier {SIGMA:g} for an image that is replaced by "
            "padding",
            "1/sigma-GDP: the clipped sum moves by at most C, the noise is sigma C "
            "(arXiv:2606.01908); `jaxdp.tta.private`",
            run,
            twins,
        )
    run, twins = updates(TENT, sensitivity=NOISE.sensitivity, noise=NOISE)
    yield Case(
        "private Tent, correlated noise",
        f"a period of {NOISE.steps} updates: a Gaussian of multiplier {SIGMA:g} for an image that "
        "is replaced by padding",
        "C (G + C^-1 Z) = C G + Z, and an image is in one row of G (Denisov et al. 2022, theorem "
        "2.1); `jaxdp.tta.private`",
        held(run, CLAIMED),
        twins,
        trials=600,
    )


CASES = tuple(_cases())
