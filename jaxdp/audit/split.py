"""Attacks on one image in the private upload of split adaptation.

    terms = {"projection": projection, "trials": 2000, "delta": 1e-5}
    print(audit_upload(release, representations, labels, part="features", **terms).describe())

Features and labels of an upload have separate noise and are audited separately. An attack on both
together must beat the sum of their epsilons, which thousands of trials cannot reach. Rows of an
upload get independent noise, so one upload with many rows gives as many trials.
"""

import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from jaxdp.audit import bounds
from jaxdp.release import claim, new_seed, stream
from jaxdp.split.checks import at_least, one_of
from jaxdp.split.noisy_upload import PrivateRelease, Projection

Part = Literal["features", "labels"]


def audit_upload(
    release: PrivateRelease,
    representations: Any,
    labels: Any,
    *,
    projection: Projection,
    part: Part,
    trials: int,
    delta: float,
    confidence: float = 0.95,
    seed: bytes | None = None,
) -> bounds.Audit:
    """Audits features or labels of uploads in which a canary is one of two images, by 2 `trials`
    scores.

    It compares with the ledger's epsilon of the part, for replacing one image with its label. Every
    other image of an upload is the canary or its neighbour. The attacker knows the image before it,
    and so its noise or its answer.

    Args:
      release, projection: The client's release and projection, as in `PrivateRelease.release`.
      representations: Floating point [N, T, D] of images that may be the canary or its neighbour, N
        >= 2. They are public or synthetic, since the audit charges nothing.
      labels: Integers [N] in [0, num_classes), with at least two classes for part="labels".
      part: The part of the upload that is attacked.
      trials: The number of judged canaries of either kind, at least 2. As many before them train
          the attacker.
      delta, confidence: The terms of the bounds. delta is in (0, 1) for Gaussian features and 0 for
          pure mechanisms.
      seed: 16 secret bytes of the noise, for tests. The default is OS entropy.

    Formal guarantees:
      As `bounds.multi_run`, with the Gaussian claim for Gaussian features. Under the claim rows are
      released independently, so that scores are independent. Other uploads fix the score. For
      features it is the likelihood ratio of the noise, after subtraction of what the noise of the
      row before predicts. For labels it is the ratio of the frequencies of the pair of answers,
      with Laplace's rule.

    Raises:
      ValueError: An argument is out of range, or as in `PrivateRelease.check`.
    """
    one_of(get_args(Part), part=part)
    at_least(2, trials=trials)
    release.check(representations, labels=labels, projection=projection)
    x, y, seed = (
        np.asarray(representations),
        np.asarray(labels),
        new_seed() if seed is None else seed,
    )
    gaussian = part == "features" and release.mechanism == "gaussian"
    law: bounds.Claim = "gaussian" if gaussian else "approximate"
    features, answers = release.event.events
    upper = claim(features if part == "features" else answers, adjacency="replace_one", delta=delta)
    bounds.check(upper, delta, confidence, law)
    noiseless = dataclasses.replace(release, noise_multiplier=0.0)
    exact = np.asarray(
        noiseless.release(stream(seed, "no noise"), x, labels=y, projection=projection).features
    )

    order = 2 if release.mechanism == "gaussian" else 1
    apart = (
        np.linalg.norm(exact[:, None] - exact, ord=order, axis=-1)
        if part == "features"
        else y[:, None] != y
    )
    canary, other = map(int, np.unravel_index(np.argmax(apart), apart.shape))
    if not apart[canary, other] > 0:
        raise ValueError(
            f"representations and labels must hold two images that differ in their {part}."
        )

    def upload(image: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the known value before and the seen value of `image`, [trials, ...] each."""
        rows = np.tile([other, image], trials)
        released = release.release(
            stream(seed, purpose), x[rows], labels=y[rows], projection=projection
        )
        if part == "labels":
            return released.labels[::2], released.labels[1::2]
        seen = np.asarray(released.features, np.float64)
        return seen[::2] - exact[other], seen[1::2]

    before = [upload(image, f"before, {image}") for image in (canary, other)]
    if part == "labels":
        counts = np.ones((2, release.num_classes, release.num_classes))
        for count, pair in zip(counts, before, strict=True):
            np.add.at(count, pair, 1)
        table = np.log(counts[0] / counts[1])

        def score(known: Any, seen: Any) -> np.ndarray:
            """Returns the log ratio of how often the two answers come together with and without the
            canary.
            """
            return table[known, seen]

    else:
        known, seen = before[1]
        foretold = np.vdot(known, seen - exact[other]) / (np.vdot(known, known) or 1.0)

        def score(known: Any, seen: Any) -> np.ndarray:
            """Returns the log likelihood ratio of the noise up to its scale."""
            rest = seen - foretold * known
            if gaussian:
                return rest @ (exact[canary] - exact[other])
            return np.abs(rest - exact[other]).sum(1) - np.abs(rest - exact[canary]).sum(1)

    scores = [score(*upload(image, f"judged, {image}")) for image in (canary, other)]
    return bounds.multi_run(*scores, upper=upper, delta=delta, confidence=confidence, claim=law)
