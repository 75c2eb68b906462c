"""Attacks on one image in the private upload of split adaptation.

    terms = {"projection": projection, "trials": 2000, "delta": 1e-5}
    print(audit_upload(release, representations, labels, part="features", **terms).describe())

Features and labels of an upload have separate noise and are audited separately. An attack on both
together must beat the sum of their epsilons, which thousands of trials cannot reach. Rows of an
upload get independent noise, so one upload with many rows gives as many trials.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.trials import DeltaTerms, Trials
from jaxdp.files import check_choice, shows_keywords
from jaxdp.release import stream
from jaxdp.split.noisy_upload import PrivateRelease, Projection

Part = Literal["features", "labels"]


@shows_keywords(DeltaTerms, vars(Trials))
def audit_upload(
    release: PrivateRelease,
    representations: Any,
    labels: Any,
    *,
    projection: Projection,
    part: Part,
    **terms: Unpack[DeltaTerms],
) -> bounds.Audit:
    """Audits features or labels of uploads, by 2 `trials` scores.

    A canary is one of two images.

    It compares with the ledger's epsilon of the part, for replacing one image with its label. Every
    other image of an upload is the canary or its neighbour. The attacker knows the image before it,
    and so its noise or its answer.

    Args:
      release, projection: The client's release and projection, as in `PrivateRelease.release`.
      representations: Floating point [N, T, D] of images that may be the canary or its neighbour, N
        >= 2. They are public or synthetic, since the audit charges nothing.
      labels: Integers [N] in [0, num_classes), with at least two classes for part="labels".
      part: The part of the upload that is attacked.
      terms: trials, delta, confidence and seed, as in `jaxdp.audit.trials.Trials`. `trials`
        canaries of either kind are judged, and as many before them train the attacker. delta is in
        (0, 1) for Gaussian features and 0 for pure mechanisms.

    Formal guarantees:
      As `bounds.multi_run`, with the Gaussian claim for Gaussian features. Under the claim rows are
      released independently, so that scores are independent. Other uploads fix the score. For
      features it is the likelihood ratio of the noise, after subtraction of what the noise of the
      row before predicts. For labels it is the ratio of the frequencies of the pair of answers,
      with Laplace's rule.

    Raises:
      ValueError: An argument is out of range, or as in `PrivateRelease.check`.
    """
    check_choice("part", part, Part)
    release.check(representations, labels=labels, projection=projection)
    x = np.asarray(representations)
    y = np.asarray(labels)
    gaussian = part == "features" and release.mechanism == "gaussian"
    law: bounds.Claim = "gaussian" if gaussian else "approximate"
    feature_event, label_event = release.event.events
    charge = feature_event if part == "features" else label_event
    runs = Trials(charge=charge, adjacency="replace_one", claim=law, **terms)
    # The attacker knows projection and clip norm, and so the coordinates of any image.
    noiseless = dataclasses.replace(release, noise_multiplier=0.0)
    key = stream(runs.seed, "no noise")
    released = noiseless.release(key, x, labels=y, projection=projection)
    exact = np.asarray(released.features)

    if part == "features":
        order = 2 if release.mechanism == "gaussian" else 1
        differences = exact[:, None] - exact
        distances = np.linalg.norm(differences, ord=order, axis=-1)
    else:
        distances = y[:, None] != y
    farthest = np.argmax(distances)
    canary, other = map(int, np.unravel_index(farthest, distances.shape))
    if not distances[canary, other] > 0:
        raise ValueError(
            f"representations and labels must hold two images that differ in their {part}."
        )

    def upload(image: int, purpose: str) -> Seen:
        """Returns what `trials` uploads show of `image`, and of the known image before it."""
        # A known image before each attacked one shows whether noise or answers repeat.
        rows = np.tile([other, image], runs.trials)
        key = stream(runs.seed, purpose)
        released = release.release(key, x[rows], labels=y[rows], projection=projection)
        if part == "labels":
            return Seen(released.labels[::2], released.labels[1::2])
        features = np.asarray(released.features, np.float64)
        return Seen(features[::2] - exact[other], features[1::2])

    with_canary = upload(canary, f"before, {canary}")
    with_other = upload(other, f"before, {other}")
    if part == "labels":
        score = label_score(with_canary, with_other, release.num_classes)
    else:
        score = _feature_score(with_other, exact[canary], exact[other], gaussian=gaussian)

    def scores(image: int, purpose: str) -> np.ndarray:
        return score(upload(image, f"judged, {image}"))

    return runs.judge(scores, canary, other)


class Seen(NamedTuple):
    """What uploads show: the known noise or answer before an image, and the row of that image.

    Both have one entry for each upload.
    """

    known: np.ndarray
    seen: np.ndarray


_Score = Callable[[Seen], np.ndarray]


def label_score(with_canary: Seen, with_other: Seen, num_classes: int) -> _Score:
    """Returns the log ratio of how often two answers come together with and without the canary."""
    counts = np.ones((2, num_classes, num_classes))  # Laplace's rule
    np.add.at(counts[0], with_canary, 1)
    np.add.at(counts[1], with_other, 1)
    table = np.log(counts[0] / counts[1])
    return lambda uploads: table[uploads.known, uploads.seen]


def _feature_score(
    before: Seen,
    canary: np.ndarray,
    other: np.ndarray,
    *,
    gaussian: bool,
) -> _Score:
    """Returns the log likelihood ratio of the noise up to its scale.

    What the noise of the row before predicts is subtracted. Under the claim it predicts nothing.
    """
    square = np.vdot(before.known, before.known) or 1.0
    slope = np.vdot(before.known, before.seen - other) / square

    def score(uploads: Seen) -> np.ndarray:
        rest = uploads.seen - slope * uploads.known
        if gaussian:
            return rest @ (canary - other)
        from_other = np.abs(rest - other).sum(1)
        from_canary = np.abs(rest - canary).sum(1)
        return from_other - from_canary

    return score
