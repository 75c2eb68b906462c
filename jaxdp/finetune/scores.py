"""What a search chooses by: a score on public data, or a charged one on private records."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.data import Source
from jaxdp.files import check_function, check_numbers
from jaxdp.finetune.evaluate import (
    Predict,
    charge_of_count,
    check_count,
    check_predict,
    count_correct,
    noisy_fraction,
)
from jaxdp.privacy import Account, DpEvent
from jaxdp.release import stream
from jaxdp.transforms import noise


@dataclasses.dataclass(frozen=True, eq=False)
class PublicScore:
    """A score that reads PUBLIC data only, which the caller declares by this class.

        score = PublicScore(lambda params: jaxdp.finetune.accuracy(predict, params, public))

    A score of the private records that this class hides from the ledger makes the guarantee false.

    Attributes:
      function: `function(params) -> number`, larger is better. NaN is worst.
    """

    function: Callable[[Any], float]

    def __post_init__(self) -> None:
        check_function("function", self.function, "function(params) -> 0.9")

    def check(self, params: Any) -> None:
        """Raises before a charge if the function returns no number for the first parameters."""
        check_numbers(score=self.function(params))

    def charges(self, account: Account) -> list[tuple[Account, DpEvent]]:
        """Returns no charge."""
        return []

    def facts(self) -> list[Any]:
        """Returns what the identity of a search has of its score."""
        return ["public"]

    def of(self, params: Any, secret: bytes) -> float:
        """Returns the score of parameters. NaN counts as minus infinity."""
        score = float(self.function(params))
        # NaN has no order: a comparison with it would depend on which run came first.
        return -math.inf if math.isnan(score) else score


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ChargedScore:
    """The accuracy on private records by a noisy count, which the search pays for.

    Attributes:
      predict, source, noise_multiplier, batch_size: As in `jaxdp.finetune.charged_accuracy`. Each
        run draws its own noise. A unit of the account has one record in `source`, or at most
        `max_records` if `source` is of `jaxdp.data.by_owners`.
      account: The account of the records of `source`, in the ledger of the search. None, the
        default, is the account of the search: it pays for training and score, whichever of both
        reads a record.
    """

    predict: Predict
    source: Source
    noise_multiplier: float
    account: Account | None = None
    batch_size: int = 500

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier must be positive and finite, got {self.noise_multiplier!r}. A "
                "score without noise is for public data: use PublicScore."
            )
        noise.check_product("noise_multiplier", self.noise_multiplier, 1.0)
        check_count(self.source, self.batch_size)

    def check(self, params: Any) -> None:
        """Raises before a charge if `predict` returns logits of another shape."""
        check_predict(self.predict, params, self.source, self.batch_size)

    def charges(self, account: Account) -> list[tuple[Account, DpEvent]]:
        """Returns the account and the event of one score, which are those of `charged_accuracy`."""
        pays = self.account or account
        return [charge_of_count(pays, self.source, self.noise_multiplier)]

    def facts(self) -> list[Any]:
        """Returns what the identity of a search has of its score."""
        return ["charged", self.source.fingerprint, self.noise_multiplier, self.batch_size]

    def of(self, params: Any, secret: bytes) -> float:
        """Returns the noisy accuracy of parameters, with noise from 16 secret bytes."""
        count = count_correct(self.predict, params, self.source, batch_size=self.batch_size)
        key = stream(secret, "accuracy")
        score = noisy_fraction(key, count, len(self.source), self.noise_multiplier)
        return float(np.asarray(score))


Score = PublicScore | ChargedScore


def check_score(score: Any) -> None:
    """Raises TypeError for a score of which nobody has said whether its data is public."""
    if isinstance(score, PublicScore | ChargedScore):
        return
    raise TypeError(
        "score must say whether its data is public: PublicScore(function) reads public data only, "
        "and ChargedScore(predict=, source=, noise_multiplier=) pays for private records. Got "
        f"{getattr(score, '__qualname__', repr(score))}. A score of private records that nobody "
        "pays for has no epsilon."
    )
