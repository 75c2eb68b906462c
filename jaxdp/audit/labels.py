"""Attacks on one label of a release of noisy labels.

    print(audit_labels(release_labels, num_classes=10, epsilon=2.0, trials=2000).describe())

The answers of a release have bits of their own, so one release of many records gives as many
trials.
"""

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.split import Seen, label_score
from jaxdp.audit.trials import RunTerms, Trials
from jaxdp.data import from_arrays
from jaxdp.files import shows_keywords
from jaxdp.labels import NoisyLabels
from jaxdp.privacy import LabelDpEvent
from jaxdp.release import derive
from jaxdp.release.claims import audited


@shows_keywords(RunTerms, vars(Trials))
def audit_labels(
    release: Callable[..., NoisyLabels],
    *,
    num_classes: int,
    epsilon: float,
    prior: Any = None,
    pair: tuple[int, int] = (0, 1),
    **terms: Unpack[RunTerms],
) -> bounds.Audit:
    """Tells from released labels which of two labels a record had, and bounds epsilon from below.

    Every other label of a release is the canary or its neighbour. The attacker knows the label
    before it, and so the bits of that answer.

    Args:
      release: `jaxdp.labels.release_labels`, or a function with its arguments.
      num_classes, epsilon, prior: As in `release_labels`, with a prior [K].
      pair: The two different labels that the canary may have.
      terms: trials, confidence and seed, as in `jaxdp.audit.trials.Trials`. `trials` canaries of
        either kind are judged, and as many before them train the attacker. delta is 0.

    Formal guarantees:
      As `bounds.multi_run`, for the claim `LabelDpEvent(epsilon)`. The score is the ratio of the
      frequencies of the pair of answers, with Laplace's rule, from other releases.

    Raises:
      ValueError: An argument is out of range.
    """
    runs = Trials(
        charge=LabelDpEvent(epsilon),
        delta=0.0,
        adjacency="replace_label",
        allowed=["replace_label"],
        claim="approximate",
        **terms,
    )
    canary, other = pair
    if canary == other or not {canary, other} <= set(range(num_classes)):
        raise ValueError(f"pair must be two labels of the {num_classes} classes, got {pair}.")

    def answers(label: int, purpose: str) -> Seen:
        """Returns the answers about `label`, each with that about the known label before it."""
        labels = np.tile(np.array([other, label], np.int32), runs.trials)
        features = np.zeros((len(labels), 1), np.float32)
        records = from_arrays(features=features, label=labels, num_classes=num_classes)
        noisy = release(
            records,
            account=audited("replace_label"),
            epsilon=epsilon,
            prior=prior,
            seed=derive(runs.seed, f"{purpose}, {label}"),
        )
        return Seen(noisy.labels[::2], noisy.labels[1::2])

    score = label_score(answers(canary, "before"), answers(other, "before"), num_classes)
    return runs.judge(lambda label, purpose: score(answers(label, "judged")), canary, other)
