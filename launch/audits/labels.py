"""Audits of noisy labels: with all classes as answers, and with the few of a prior."""

from typing import Any
from unittest import mock

import numpy as np

from jaxdp.audit.labels import audit_labels
from jaxdp.labels import NoisyLabels, noisy, release_labels
from jaxdp.transforms.responses import Response

from . import case
from .case import Case, Run, Twin, run_of

CLASSES = 4
EPSILON = 1.5
PRIOR = np.array([0.45, 0.05, 0.4, 0.1])  # two answers, 0 and 2


def _twice(*records: Any, epsilon: float, **options: Any) -> NoisyLabels:
    """Returns labels of twice the epsilon."""
    return release_labels(*records, epsilon=2 * epsilon, **options)


def _one_number(*records: Any, **options: Any) -> NoisyLabels:
    """Returns labels of which two answers in a row come from the same bits."""
    drawn = noisy.numbers

    def repeated(key: Any, count: int) -> np.ndarray:
        every_other = drawn(key, count)[::2]
        return np.repeat(every_other, 2)[:count]

    with mock.patch.object(noisy, "numbers", repeated):
        return release_labels(*records, **options)


class _Kept(Response):
    """A response that leaves a label outside of the answers as it is."""

    def answer(self, numbers: np.ndarray, labels: np.ndarray) -> np.ndarray:
        answers = super().answer(numbers, labels)
        inside = np.isin(labels, self.order[0, : self.sizes[0]])
        return np.where(inside, answers, labels).astype(np.int32)


def _outside_kept(*records: Any, **options: Any) -> NoisyLabels:
    """Returns labels of which those outside of the answers are not noisy."""
    honest = noisy.with_prior

    def kept(*prior: Any, **terms: Any) -> Response:
        return _Kept(*honest(*prior, **terms))

    with mock.patch.object(noisy, "with_prior", kept):
        return release_labels(*records, **options)


def _private_prior(*records: Any, prior: Any, **options: Any) -> NoisyLabels:
    """Returns labels whose answers are chosen by the private labels."""
    (source,) = records
    truth = source.gather(np.arange(len(source)))["label"]
    of_the_truth = 0.1 + 0.6 * np.eye(CLASSES)[truth]
    return release_labels(source, prior=of_the_truth, **options)


def _audit(release: Any, prior: Any, pair: tuple[int, int]) -> Run:
    return run_of(
        audit_labels, release, num_classes=CLASSES, epsilon=EPSILON, prior=prior, pair=pair
    )


_REASONS: dict[str, Twin] = {
    case.NO_CLIPPING: "a label has no norm",
    case.SENSITIVITY_OFF_BY_TWO: "randomised response has no sensitivity",
    case.REUSED_KEY: "equal bits for a label outside and for one inside tell little",
    case.ADD_REMOVE_FOR_REPLACE_ONE: "labels are charged for the replacement of a label only",
}


def _case(words: str, prior: Any, pair: tuple[int, int], **twins: Any) -> Case:
    audits = {name: _audit(twin, prior, pair) for name, twin in twins.items()}
    return Case(
        "noisy labels",
        f"{words}: epsilon {EPSILON:g}, replace-label",
        "64 random bits against exact integers; Ghazi et al. 2021, arXiv:2102.06062; "
        "`jaxdp.transforms.responses`",
        _audit(release_labels, prior, pair),
        _REASONS | audits,
        trials=4000,
    )


_COMMON: dict[str, Any] = {case.HALF_THE_NOISE: _twice, case.REUSED_KEY: _one_number}
_OF_OUTSIDE: dict[str, Any] = {
    case.HALF_THE_NOISE: _twice,
    "a label outside of the answers stays": _outside_kept,
    "a prior from the private labels": _private_prior,
}
CASES = (
    _case(f"{CLASSES}-ary randomised response", None, (0, 1), **_COMMON),
    _case("two answers of a prior", PRIOR, (0, 2), **_COMMON),
    _case("two answers of a prior, for a label outside", PRIOR, (0, 1), **_OF_OUTSIDE),
)
