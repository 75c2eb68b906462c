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
from .case import Case, Run, under

DELTA = 1e-5
CLIP = 0.01
SIGMA = 1.0
FAR = 1e4  # times the clip norm: what a forgotten clip lets through
CLASSES = 4
WIDTH = 6
SIDE = 4
OPTIMIZER = optax.sgd(1.0)

_random = np.random.default_rng(0)
IMAGES = _random.normal(size=(36, SIDE, SIDE, 3)).astype(np.float32)
PARAMS: Mapping[str, Any] = {
    "embed": jnp.asarray(_random.normal(size=(SIDE * SIDE * 3, WIDTH)) / 7, jnp.float32),
    "head": jnp.asarray(_random.normal(size=(WIDTH, CLASSES)), jnp.float32),
    **{
        f"block_{i}": {"norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}}
        for i in range(2)
    },
}


def apply_fn(params: Mapping[str, Any], images: jax.Array) -> jax.Array:
    """Returns logits [B, CLASSES] of two blocks. Each has a LayerNorm, and the first a tanh after
    it.
    """
    h = images.reshape(len(images), -1) @ params["embed"]
    h = jnp.tanh(_norm(h, **params["block_0"]["norm"]))
    return _norm(h, **params["block_1"]["norm"]) @ params["head"]


def _norm(h: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return h * scale[None] + bias[None]


class OneKey(tta.Adapter):
    """An adapter that draws the noise of every stream from one key."""

    def init(self, key: jax.Array | None = None) -> tta.AdaptState:
        assert key is not None
        same = 0 * jax.random.key_data(key)
        return super().init(jax.random.wrap_key_data(same, impl=jax.random.key_impl(key)))


def updates(
    method: tta.Method, *, accumulate: int = 1, **options: Any
) -> tuple[Run, dict[str, Run | str]]:
    """Returns the audit of an update by the private form of a method, and of its twins."""
    claimed = claim(GaussianDpEvent(SIGMA), adjacency="zero_out", delta=DELTA)

    def audit(
        clip: float = CLIP,
        sigma: float = SIGMA,
        *,
        adjacency: Adjacency = "zero_out",
        kind: type[tta.Adapter] = tta.Adapter,
    ) -> Run:
        def run(trials: int, seed: bytes) -> Audit:
            private = tta.private(method, clip_norm=clip, noise_multiplier=sigma, **options)
            return audit_stream(
                kind(apply_fn, PARAMS, private, OPTIMIZER, accumulate=accumulate),
                IMAGES[:4],
                IMAGES[4:],
                trials=trials,
                delta=DELTA,
                adjacency=adjacency,
                confidence=case.CONFIDENCE,
                seed=seed,
            )

        return run

    def held(run: Run) -> Run:
        """Returns the run under the claim of the honest method."""
        return lambda trials, seed: under(run(trials, seed), claimed)

    unclipped: Run | str = "int32 has no room for gradients that are not clipped"
    if not options.get("exact"):
        unclipped = held(audit(FAR * CLIP, SIGMA / FAR))
    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: held(audit(sigma=SIGMA / 2)),
        case.NO_CLIPPING: unclipped,
        case.SENSITIVITY_OFF_BY_TWO: held(audit(2 * CLIP, SIGMA / 2)),
        case.REUSED_KEY: held(audit(kind=OneKey)),
        case.ADD_REMOVE_FOR_REPLACE_ONE: held(audit(adjacency="replace_one")),
    }
    return audit(), twins


# C is the matrix of partial sums, so a row of noise takes all of the row before away again.
NOISE = jaxdp.correlated(np.ones(3), steps=3)
FORGETS = "the sensitivity of independent noise"


def periods() -> tuple[Run, dict[str, Run | str]]:
    """Returns the audit of a period of correlated noise, and of its twins."""
    claimed = claim(GaussianDpEvent(SIGMA), adjacency="zero_out", delta=DELTA)

    def audit(
        share: float = 1.0,
        clip: float = CLIP,
        *,
        adjacency: Adjacency = "zero_out",
        kind: type[tta.Adapter] = tta.Adapter,
    ) -> Run:
        def run(trials: int, seed: bytes) -> Audit:
            sigma = share * SIGMA * NOISE.sensitivity
            private = tta.private(tta.Tent(), clip_norm=clip, noise_multiplier=sigma, noise=NOISE)
            seen = audit_stream(
                kind(apply_fn, PARAMS, private, OPTIMIZER),
                IMAGES[:4],
                IMAGES[4:],
                trials=trials,
                delta=DELTA,
                adjacency=adjacency,
                confidence=case.CONFIDENCE,
                seed=seed,
            )
            return under(seen, claimed)

        return run

    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: audit(0.5),
        case.NO_CLIPPING: audit(1 / FAR, FAR * CLIP),
        case.SENSITIVITY_OFF_BY_TWO: audit(0.5, 2 * CLIP),
        case.REUSED_KEY: audit(kind=OneKey),
        case.ADD_REMOVE_FOR_REPLACE_ONE: audit(adjacency="replace_one"),
        FORGETS: audit(1 / NOISE.sensitivity),
    }
    return audit(), twins


def _cases() -> Iterator[Case]:
    eata = tta.EATA(CLASSES, fisher=tta.fisher(apply_fn, PARAMS, [IMAGES[:4]]))
    methods: dict[str, tuple[tta.Method, dict[str, Any]]] = {
        "Tent": (tta.Tent(), {}),
        "Tent, two batches an update": (tta.Tent(), {"accumulate": 2}),
        "Tent, exact noise": (tta.Tent(), {"exact": True}),
        "EATA": (eata, {}),
        "EATA, filters kept": (eata, {"filters": "keep", "kept_fraction": 0.5}),
        "SAR": (tta.SAR(CLASSES), {}),
        "DeYO": (tta.DeYO(CLASSES), {}),
        "COME over Tent": (tta.COME(tta.Tent(), CLASSES), {}),
        "COME over DeYO": (tta.COME(tta.DeYO(CLASSES), CLASSES), {}),
    }
    for name, (method, options) in methods.items():
        run, twins = updates(method, **options)
        yield Case(
            f"private {name}",
            f"an update: a Gaussian of multiplier {SIGMA:g} for an image that is replaced by "
            "padding",
            "1/sigma-GDP: the clipped sum moves by at most C, the noise is sigma C "
            "(arXiv:2606.01908); `jaxdp.tta.private`",
            run,
            twins,
        )
    run, twins = periods()
    yield Case(
        "private Tent, correlated noise",
        f"a period of {NOISE.steps} updates: a Gaussian of multiplier {SIGMA:g} for an image that "
        "is replaced by padding",
        "C (G + C^-1 Z) = C G + Z, and an image is in one row of G (Denisov et al. 2022, theorem "
        "2.1); `jaxdp.tta.private`",
        run,
        twins,
        trials=600,
    )


CASES = tuple(_cases())
