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

from .case import Case, Run, held, run_of, standard_twins

DELTA = 1e-5
CLIP = 0.5
CLASSES = 3
FAR = 1e4  # times the clip norm: what a forgotten clip lets through
PROJECTION = Projection(jnp.zeros((2, 2)), jnp.eye(4))
_sides = np.concatenate([np.eye(4), -np.eye(4)])
IMAGES = 100 * CLIP * _sides.reshape(8, 2, 2).astype(np.float32)
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
        noisy = super().release(key, representations, labels=labels, projection=projection)
        noiseless = PrivateRelease(**_fields(self) | {"noise_multiplier": 0.0})
        exact = noiseless.release(key, representations, labels=labels, projection=projection)
        features = exact.features + noisy.features[:1] - exact.features[:1]
        shift = noisy.labels[0] - labels[0]
        answers = (labels + shift) % self.num_classes
        return Released(features, answers.astype(np.int32))


def _fields(release: PrivateRelease) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(release))
    return {name: getattr(release, name) for name in names}


def uploads(part: Part, delta: float) -> Callable[[PrivateRelease], Run]:
    """Returns `audit(release) -> Run`, the audit of one part of a release."""

    def audit(release: PrivateRelease) -> Run:
        terms: dict[str, Any] = {"projection": PROJECTION, "part": part, "delta": delta}
        return run_of(audit_upload, release, IMAGES, LABELS, **terms)

    return audit


def _features(honest: PrivateRelease, event: DpEvent, claim_in_words: str, proof: str) -> Case:
    """Returns the case of features with Gaussian or Laplace noise."""
    sigma = honest.noise_multiplier
    delta = 0.0
    if honest.mechanism == "gaussian":
        delta = DELTA
    audit = uploads("features", delta)
    claimed = claim(event, adjacency="replace_one", delta=delta)

    def twin(**changes: float) -> Run:
        broken = dataclasses.replace(honest, **changes)  # type: ignore[arg-type]
        return held(audit(broken), claimed)

    half = twin(noise_multiplier=sigma / 2)
    twins = standard_twins(
        half_the_noise=half,
        no_clipping=twin(clip_norm=FAR * CLIP, noise_multiplier=sigma / FAR),
        sensitivity_off_by_two=twin(clip_norm=2 * CLIP, noise_multiplier=sigma / 2),
        reused_key=held(audit(OneKey(**_fields(honest))), claimed),
        # The noise is for a move of C. A replacement moves the features by 2 C.
        add_remove_for_replace_one=half,
    )
    mechanism = f"Split upload, {honest.mechanism} features"
    return Case(mechanism, claim_in_words, proof, audit(honest), twins, trials=4000)


def _labels() -> Case:
    audit = uploads("labels", 0.0)
    epsilon = GAUSSIAN.label_epsilon
    claimed = claim(PureDpEvent(epsilon), adjacency="replace_one", delta=0.0)
    half = dataclasses.replace(GAUSSIAN, label_epsilon=2 * epsilon)
    one_key = OneKey(**_fields(GAUSSIAN))
    twins = standard_twins(
        half_the_noise=held(audit(half), claimed),
        no_clipping="a label has no norm",
        sensitivity_off_by_two="randomised response has no sensitivity",
        reused_key=held(audit(one_key), claimed),
        add_remove_for_replace_one="randomised response is charged for the replacement of a "
        "label only",
    )
    return Case(
        "Split upload, labels",
        f"{CLASSES}-ary randomised response of epsilon {epsilon:g}, replace-one",
        "64 random bits against an exact integer threshold; "
        "`jaxdp.split.noisy_upload.randomized_response`",
        audit(GAUSSIAN),
        twins,
        trials=4000,
    )


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
