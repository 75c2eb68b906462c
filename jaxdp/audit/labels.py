"""Attacks on one label of a release of noisy labels.

    print(audit_labels(release_labels, num_classes=10, epsilon=2.0, trials=2000).describe())

The answers of a release have bits of their own, so one release of many records gives as many
trials.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.audit import bounds
from jaxdp.audit.split import Seen, label_score
from jaxdp.data import from_arrays
from jaxdp.labels import NoisyLabels
from jaxdp.privacy import Account, LabelDpEvent, Ledger
from jaxdp.release import claim, derive, new_seed


def audit_labels(
    release: Callable[..., NoisyLabels],
    *,
    num_classes: int,
    epsilon: float,
    prior: Any = None,
    pair: tuple[int, int] = (0, 1),
    trials: int,
    seed: bytes | None = None,
    confidence: float = 0.95,
) -> bounds.Audit:
    """Tells from released labels which of two labels a record had, and bounds epsilon from below.

    Every other label of a release is the canary or its neighbour. The attacker knows the label
    before it, and so the bits of that answer.

    Args:
      release: `jaxdp.labels.release_labels`, or a function with its arguments.
      num_classes, epsilon, prior: As in `release_labels`, with a prior [K].
      pair: The two labels that the canary may have.
      trials: The number of judged canaries of either kind, at least 2. As many before them train
        the attacker.
      seed: 16 secret bytes of the noise, for tests. The default is OS entropy.
      confidence: As in `jaxdp.audit.multi_run`. delta is 0.

    Formal guarantees:
      As `bounds.multi_run`, for the claim `LabelDpEvent(epsilon)`. The score is the ratio of the
      frequencies of the pair of answers, with Laplace's rule, from other releases.

    Raises:
      ValueError: trials is below 2, or an argument is out of range.
    """
    if trials < 2:
        raise ValueError(f"trials must be at least 2, got {trials}.")
    canary, other = pair
    root = new_seed() if seed is None else seed
    bound = bounds.Terms(delta=0.0, confidence=confidence)
    upper = claim(LabelDpEvent(epsilon), adjacency="replace_label", delta=0.0)
    bound.check(upper)

    def answers(label: int, purpose: str) -> Seen:
        """Returns the answers about `label`, each with that about the known label before it."""
        labels = np.tile(np.array([other, label], np.int32), trials)
        records = from_arrays(
            features=np.zeros((2 * trials, 1), np.float32), label=labels, num_classes=num_classes
        )
        noisy = release(
            records,
            account=_account(),
            epsilon=epsilon,
            prior=prior,
            seed=derive(root, f"{purpose}, {label}"),
        )
        return Seen(noisy.labels[::2], noisy.labels[1::2])

    score = label_score(answers(canary, "before"), answers(other, "before"), num_classes)
    present = score(answers(canary, "judged"))
    absent = score(answers(other, "judged"))
    return bounds.multi_run(present, absent, upper=upper, **dataclasses.asdict(bound))


def _account() -> Account:
    """Returns an account of canaries, which nobody else spends from."""
    ledger = Ledger.in_memory()
    ledger.register("audited", adjacency="replace_label", unit="record")
    return ledger.account("audited", label="audit")
