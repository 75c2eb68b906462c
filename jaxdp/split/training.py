"""The options that the trainings of split adaptation take as keywords."""

from typing import TypedDict

from jaxdp.models.training import Training

__all__ = ["EpochKeywords", "RateKeywords", "Training", "TrainingKeywords"]


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
