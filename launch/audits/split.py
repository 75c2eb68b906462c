"""Audits of the private upload of split adaptation: Gaussian and Laplace features, and labels.

The projection is the identity on four numbers. The images lie far outside the clip norm on all
sides.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit.split import Part, audit_upload
from jaxdp.privacy import DpEvent, GaussianDpEvent, PureDpEvent
from jaxdp.release import claim
from jaxdp.split.noisy_upload import PrivateRelease, Projection, Released

from . import case
from .case import Case, Run, under

DELTA = 1e-5
CLIP = 0.5
CLASSES = 3
FAR = 1e4  # times the clip norm: what a forgotten clip lets through
PROJECTION = Projection(jnp.zeros((2, 2)), jnp.eye(4))
IMAGES = 100 * CLIP * np.concatenate([np.eye(4), -np.eye(4)]).reshape(8, 2, 2).astype(np.float32)
LABELS = np.arange(8) % CLASSES

GAUSSIAN = PrivateRelease(
    clip_norm=CLIP, noise_multiplier=2.0, label_epsilon=1.5, num_classes=CLASSES
)
LAPLACE = dataclasses.replace(GAUSSIAN, mechanism="laplace")


class OneKey(PrivateRelease):
    """A release that draws the noise and answer of every image from one key."""

    def release(
        self, key: jax.Array, representations: Any, *, labels: Any, projection: Projection
    ) -> Released:
        """Returns the honest release, with the noise and answer of the first image for all
        images.
        """
        rest = {"labels": labels, "projection": projection}
        drawn = super().release(key, representations, **rest)
        noiseless = PrivateRelease(**{**_fields(self), "noise_multiplier": 0.0})
        features = noiseless.release(key, representations, **rest).features
        answers = (labels + drawn.labels[0] - labels[0]) % self.num_classes
        return Released(features + drawn.features[:1] - features[:1], answers.astype(np.int32))


def _fields(release: PrivateRelease) -> dict[str, Any]:
    return {field.name: getattr(release, field.name) for field in dataclasses.fields(release)}


def uploads(part: Part, delta: float) -> Callable[[PrivateRelease], Run]:
    """Returns `audit(release) -> Run`, the audit of one part of a release."""
    terms: dict[str, Any] = {
        "projection": PROJECTION,
        "part": part,
        "delta": delta,
        "confidence": case.CONFIDENCE,
    }

    def audit(release: PrivateRelease) -> Run:
        return lambda trials, seed: audit_upload(
            release, IMAGES, LABELS, trials=trials, seed=seed, **terms
        )

    return audit


def _features(honest: PrivateRelease, event: DpEvent, claim_in_words: str, proof: str) -> Case:
    """Returns the case of features with Gaussian or Laplace noise."""
    sigma, delta = honest.noise_multiplier, DELTA if honest.mechanism == "gaussian" else 0.0
    audit = uploads("features", delta)
    twins: dict[str, PrivateRelease] = {
        case.HALF_THE_NOISE: dataclasses.replace(honest, noise_multiplier=sigma / 2),
        case.NO_CLIPPING: dataclasses.replace(
            honest, clip_norm=FAR * CLIP, noise_multiplier=sigma / FAR
        ),
        case.SENSITIVITY_OFF_BY_TWO: dataclasses.replace(
            honest, clip_norm=2 * CLIP, noise_multiplier=sigma / 2
        ),
        case.REUSED_KEY: OneKey(**_fields(honest)),
        # The noise is for a move of C. A replacement moves the features by 2 C.
        case.ADD_REMOVE_FOR_REPLACE_ONE: dataclasses.replace(honest, noise_multiplier=sigma / 2),
    }
    claimed = claim(event, adjacency="replace_one", delta=delta)
    held = {name: _held(audit(twin), claimed) for name, twin in twins.items()}
    mechanism = f"Split upload, {honest.mechanism} features"
    return Case(mechanism, claim_in_words, proof, audit(honest), held, trials=4000)


def _labels() -> Case:
    audit, epsilon = uploads("labels", 0.0), GAUSSIAN.label_epsilon
    claimed = claim(PureDpEvent(epsilon), adjacency="replace_one", delta=0.0)
    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: _held(
            audit(dataclasses.replace(GAUSSIAN, label_epsilon=2 * epsilon)), claimed
        ),
        case.NO_CLIPPING: "a label has no norm",
        case.SENSITIVITY_OFF_BY_TWO: "randomised response has no sensitivity",
        case.REUSED_KEY: _held(audit(OneKey(**_fields(GAUSSIAN))), claimed),
        case.ADD_REMOVE_FOR_REPLACE_ONE: "randomised response is charged for the replacement of a "
        "label only",
    }
    return Case(
        "Split upload, labels",
        f"{CLASSES}-ary randomised response of epsilon {epsilon:g}, replace-one",
        "64 random bits against an exact integer threshold; "
        "`jaxdp.split.noisy_upload.randomized_response`",
        audit(GAUSSIAN),
        twins,
        trials=4000,
    )


def _held(run: Run, claimed: float) -> Run:
    return lambda trials, seed: under(run(trials, seed), claimed)


CASES = (
    _features(
        GAUSSIAN,
        GaussianDpEvent(GAUSSIAN.noise_multiplier),
        f"a Gaussian of multiplier {GAUSSIAN.noise_multiplier:g}, replace-one",
        "L2 sensitivity 2 C (Dwork and Roth 2014, appendix A); "
        "`jaxdp.split.noisy_upload.PrivateRelease.release`",
    ),
    _features(
        LAPLACE,
        PureDpEvent(2 / LAPLACE.noise_multiplier),
        f"Laplace noise of {LAPLACE.noise_multiplier:g} C, replace-one",
        "L1 sensitivity 2 C (Dwork et al. 2006); `jaxdp.split.noisy_upload.PrivateRelease.release`",
    ),
    _labels(),
)
