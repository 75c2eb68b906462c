"""`Training`, the options of `fit_until_steady` that every training of split adaptation takes."""

import dataclasses
from typing import TypedDict

from jaxdp.models.training import check_positive
from jaxdp.split.checks import at_least


class SteadyKeywords(TypedDict, total=False):
    """The fields of `Training` that every caller may choose."""

    batch_size: int
    patience: int


class EpochKeywords(SteadyKeywords, total=False):
    """The fields of `Training` without the learning rate."""

    epochs: int


class RateKeywords(SteadyKeywords, total=False):
    """The fields of `Training` without the number of epochs."""

    learning_rate: float


class TrainingKeywords(RateKeywords, total=False):
    """The fields of `Training` as keywords, for editors and type checkers."""

    epochs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The options of a training by Adam.

    Attributes:
      learning_rate: The constant learning rate.
      epochs: Passes over the images, or over all copies of them.
      batch_size: Images of a step.
      patience: Training stops early, after so many epochs in a row without a new smallest training
          loss: the rule of section A.2, with 1 read literally. 0 runs all epochs.

    Raises:
      ValueError: A number is not positive, or patience is negative.
    """

    learning_rate: float = 1e-5
    epochs: int = 100
    batch_size: int = 32
    patience: int = 0

    def __post_init__(self) -> None:
        check_positive(
            learning_rate=self.learning_rate, epochs=self.epochs, batch_size=self.batch_size
        )
        at_least(0, patience=self.patience)
