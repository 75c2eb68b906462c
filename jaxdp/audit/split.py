"""Attacks on the private upload of split adaptation: what features and labels tell about one image.

    terms = {"projection": projection, "trials": 2000, "delta": 1e-5}
    print(audit_upload(release, representations, labels, part="features", **terms).describe())

Features and labels of an upload have noise of their own and are audited apart: an attack on both together is held
against the sum of their epsilons, which thousands of trials cannot reach. Rows of an upload get independent noise, so
that one upload of many rows is as many trials.
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
    """Audits features or labels of uploads in which a canary is one of two images, by 2 `trials` scores.

    It compares with the ledger's epsilon of the part, for replacing one image with its label. Every other image of an
    upload is the canary or its neighbour. The attacker knows the image before it, and so its noise or its answer.

    Args:
      release, projection: what the client uploads, with noise, and where to, as in `PrivateRelease.release`.
      representations: floating point [N, T, D] of images that may be the canary or its neighbour, N >= 2; public or
        made up, since the audit charges nothing.
      labels: integers [N] in [0, num_classes), with two different ones for part="labels".
      part: which part of the upload is attacked.
      trials: canaries of either kind that are judged, at least 2; as many before them train the attacker.
      delta, confidence: of the bounds; delta is in (0, 1) for Gaussian features, 0 for all that is pure.
      seed: 16 secret bytes of the noise; drawn from the operating system unless given for tests.

    Formal guarantees:
      As `bounds.multi_run`, with the Gaussian claim for Gaussian features. Under the claim rows are released
      independently, so that scores are independent. Other uploads fix the score. Features: the likelihood ratio of the
      noise, minus what the noise of the row before foretells. Labels: the ratio of the frequencies of what was seen
      with what is known, with Laplace's rule.

    Raises:
      ValueError: an argument is out of range, or as `PrivateRelease.check`.
    """
    one_of(get_args(Part), part=part)
    at_least(2, trials=trials)
    release.check(representations, labels=labels, projection=projection)
    x, y, seed = np.asarray(representations), np.asarray(labels), new_seed() if seed is None else seed
    gaussian = part == "features" and release.mechanism == "gaussian"
    law: bounds.Claim = "gaussian" if gaussian else "approximate"
    features, answers = release.event.events
    upper = claim(features if part == "features" else answers, adjacency="replace_one", delta=delta)
    bounds.check(upper, delta, confidence, law)
    noiseless = dataclasses.replace(release, noise_multiplier=0.0)
    exact = np.asarray(noiseless.release(stream(seed, "no noise"), x, labels=y, projection=projection).features)

    order = 2 if release.mechanism == "gaussian" else 1
    apart = np.linalg.norm(exact[:, None] - exact, ord=order, axis=-1) if part == "features" else y[:, None] != y
    canary, other = map(int, np.unravel_index(np.argmax(apart), apart.shape))
    if not apart[canary, other] > 0:
        raise ValueError(f"representations and labels must hold two images that differ in their {part}; these do not")

    def upload(image: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
        """What is known of the image before, and seen of `image`: [trials, ...] each."""
        rows = np.tile([other, image], trials)
        released = release.release(stream(seed, purpose), x[rows], labels=y[rows], projection=projection)
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
            """How much more often the two came together with the canary."""
            return table[known, seen]

    else:
        known, seen = before[1]
        foretold = np.vdot(known, seen - exact[other]) / (np.vdot(known, known) or 1.0)

        def score(known: Any, seen: Any) -> np.ndarray:
            """The logarithm of the likelihood ratio of the noise but for its scale."""
            rest = seen - foretold * known
            if gaussian:
                return rest @ (exact[canary] - exact[other])
            return np.abs(rest - exact[other]).sum(1) - np.abs(rest - exact[canary]).sum(1)

    scores = [score(*upload(image, f"judged, {image}")) for image in (canary, other)]
    return bounds.multi_run(*scores, upper=upper, delta=delta, confidence=confidence, claim=law)
