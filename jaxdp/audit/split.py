"""Attacks on the private upload of split adaptation: what features and labels tell about one image.

    terms = {"projection": projection, "trials": 2000}
    found = audit_upload(release, representations, labels, part="features", delta=1e-5, **terms)
    print(found.describe())

An upload is one release of features and of labels, with noise of their own. The two are audited apart: an attack on
both together is held against the sum of their epsilons, which thousands of trials cannot reach. Rows of an upload get
independent noise, so that one upload of many rows is as many trials.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxdp.audit import bounds
from jaxdp.privacy import ComposedDpEvent
from jaxdp.release import claim as claimed
from jaxdp.release import new_seed, stream
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
    """Audits features or labels of uploads in which a canary is one of two images.

    In an upload every other image is the canary or its neighbour. The image before it is known to the attacker, who
    knows all images but one, and with it what its noise or its answer was.

    Args:
      release: what the client uploads, with noise.
      representations: floating point [N, T, D] of images that may be the canary or its neighbour, N >= 2; public or
        made up, since the audit charges nothing.
      labels: integers [N] in [0, num_classes), with two different ones for part="labels".
      projection: as in `PrivateRelease.release`.
      part: which part of the upload is attacked.
      trials: canaries of either kind that are judged, at least 2; as many before them show the attacker how what is
        known of an image and what is seen of the next go together.
      delta: of both bounds; in (0, 1) for Gaussian features, 0 for all that is pure.
      confidence: in (0.5, 1).
      seed: 16 secret bytes of the noise; drawn from the operating system unless given for tests.

    Returns:
      The `Audit` of 2 `trials` scores, for replacing one image with its label, with the ledger's epsilon of the part.

    Formal guarantees:
      As `bounds.multi_run`, with the Gaussian claim for Gaussian features. Under the claim rows are released
      independently, so that scores are independent; the score is fixed by other uploads. Features: the likelihood ratio
      of the noise, minus what the noise of the row before foretells. Labels: the ratio of the frequencies of what was
      seen with what is known, with Laplace's rule.

    Raises:
      ValueError: an argument is out of range, or as `PrivateRelease.check`.
    """
    if part not in ("features", "labels"):
        raise ValueError(f"part must be 'features' or 'labels', got {part!r}")
    if trials < 2:
        raise ValueError(f"trials must be at least 2, got {trials}")
    release.check(representations, labels=labels, projection=projection)
    x, y = np.asarray(representations), np.asarray(labels)
    gaussian = part == "features" and release.mechanism == "gaussian"
    claim: bounds.Claim = "gaussian" if gaussian else "approximate"
    event = release.event
    assert isinstance(event, ComposedDpEvent)
    features, answers = event.events
    upper = claimed(features if part == "features" else answers, adjacency="replace_one", delta=delta)
    bounds.check(upper, delta, confidence, claim)
    seed = new_seed() if seed is None else seed
    noiseless = dataclasses.replace(release, noise_multiplier=0.0)
    exact = np.asarray(noiseless.release(stream(seed, "no noise"), x, labels=y, projection=projection).features)

    def distance(pair: tuple[int, int]) -> float:
        moved = np.linalg.norm(exact[pair[0]] - exact[pair[1]], ord=2 if release.mechanism == "gaussian" else 1)
        return float(y[pair[0]] != y[pair[1]]) if part == "labels" else float(moved)

    canary, other = max(itertools.combinations(range(len(x)), 2), key=distance, default=(0, 0))
    if not distance((canary, other)) > 0:
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
        score = _ratio_of_frequencies(before, release.num_classes)
    else:
        known, seen = before[1]
        foretold = np.vdot(known, seen - exact[other]) / (np.vdot(known, known) or 1.0)
        score = functools.partial(_ratio_of_noise, foretold, exact[canary], exact[other], gaussian)
    scores = [score(*upload(image, f"judged, {image}")) for image in (canary, other)]
    return bounds.multi_run(*scores, upper=upper, delta=delta, confidence=confidence, claim=claim)


def _ratio_of_noise(
    foretold: float, canary: np.ndarray, other: np.ndarray, gaussian: bool, known: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """[trials], the logarithm of the likelihood ratio of the noise but for its scale."""
    seen = seen - foretold * known
    if gaussian:
        return seen @ (canary - other)
    return np.abs(seen - other).sum(1) - np.abs(seen - canary).sum(1)


def _ratio_of_frequencies(
    before: Sequence[tuple[np.ndarray, np.ndarray]], num_classes: int
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """`score(known, seen) -> [trials]`: how much more often the two came together with the canary."""
    counts = np.ones((2, num_classes, num_classes))
    for count, (known, seen) in zip(counts, before, strict=True):
        np.add.at(count, (known, seen), 1)
    table = np.log(counts[0] / counts[1])
    return lambda known, seen: table[known, seen]
