"""Recalibrations without privacy, as references: all records of all sources are in one place.

`fit(score, correct)` returns the recalibrated confidence as a function of the score, float64 [n],
which is the log-odds of the confidence. `jaxdp.recalibration` has the private form of both:
`HistogramBinning(monotone=True)` of isotonic regression, and `LogisticBinning` of Platt scaling.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from scipy import optimize, special

from jaxdp.recalibration import LogisticBinning, Records, ece

from .simulation import Order, Outcome, Setting

Curve = Callable[[np.ndarray], np.ndarray]


class Refit(Protocol):
    """A recalibration that reads records, and not noisy sums of them."""

    def fit(self, score: np.ndarray, correct: np.ndarray) -> Curve:
        """Returns the recalibrated confidence as a function of the score."""


@dataclasses.dataclass(frozen=True)
class Isotonic:
    """Isotonic regression: the ascending function of least squared error (Zadrozny and Elkan
    2002).
    """

    def fit(self, score: np.ndarray, correct: np.ndarray) -> Curve:
        """Fits a value at each distinct score. Values between two of them are interpolated."""
        at, which, counts = np.unique(score, return_inverse=True, return_counts=True)
        accuracy = np.bincount(which, correct) / counts
        fitted = optimize.isotonic_regression(accuracy, weights=counts).x
        return lambda score: np.interp(score, at, fitted)


@dataclasses.dataclass(frozen=True)
class Platt:
    """Platt scaling: sigmoid(a score + b) of least cross entropy to smoothed targets (Platt
    1999).
    """

    def fit(self, score: np.ndarray, correct: np.ndarray) -> Curve:
        """Fits a and b. The smoothing keeps them finite if all records are right."""
        right = correct.sum()
        wrong = len(correct) - right
        target = np.where(correct, (right + 1) / (right + 2), 1 / (wrong + 2))
        design = np.stack([score, np.ones(len(score))], 1)

        def loss(line: np.ndarray) -> tuple[float, np.ndarray]:
            logit = design @ line
            entropy = np.logaddexp(0, logit) - target * logit
            residual = special.expit(logit) - target
            return entropy.mean(), design.T @ residual / len(score)

        line = optimize.minimize(loss, np.array([1.0, 0.0]), jac=True).x
        return lambda score: special.expit(line[0] * score + line[1])


REFITS: Mapping[str, Callable[[], Refit]] = {"isotonic": Isotonic, "platt": Platt}


def outcomes(
    refit: Refit, records: Records, order: Order, settings: Sequence[Setting]
) -> list[Outcome]:
    """Refits in every trial of every setting, and judges on the records that the trial did not use.

    Settings with equally many records share their outcome, since no noise tells them apart.
    """
    log_odds = LogisticBinning().score(records.logits)
    score = np.asarray(log_odds, np.float64)
    correct = np.asarray(records.correct)
    orders = np.asarray(order.rows)
    used = [setting.sources * setting.samples for setting in settings]
    of_count = {}
    for count in set(used):
        trials = [_judged(refit, score, correct, rows[:count]) for rows in orders]
        of_count[count] = Outcome(*np.array(trials, np.float32).T)
    return [of_count[count] for count in used]


def _judged(
    refit: Refit, score: np.ndarray, correct: np.ndarray, rows: np.ndarray
) -> tuple[float, float]:
    """Returns ECE and Brier score on all records but those of some rows, which it is fitted to."""
    tested = np.ones(len(score), bool)
    tested[rows] = False
    curve = refit.fit(score[rows], correct[rows])
    confidence = curve(score).astype(np.float32)
    errors = (confidence - correct)[tested]
    calibration = ece(confidence, correct, mask=tested)
    return float(calibration), float(np.mean(errors**2))
