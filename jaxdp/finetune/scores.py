"""What a search chooses by: a score on public data, or a charged one on private records."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxdp.data import Source
from jaxdp.files import check_function, check_numbers
from jaxdp.finetune.evaluate import (
    Predict,
    charge_of_count,
    check_count,
    check_predict,
    count_correct,
    noisy_fraction,
    program_of_count,
)
from jaxdp.finetune.procedures import check_facts
from jaxdp.privacy import Account, DpEvent
from jaxdp.release import stream
from jaxdp.transforms import noise


@dataclasses.dataclass(frozen=True, eq=False)
class PublicScore:
    """A score that reads PUBLIC data only, which the caller declares by this class.

        score = PublicScore(
            lambda params: jaxdp.finetune.accuracy(predict, params, public),
            facts=["accuracy of predict, version 1", public.fingerprint],
        )

    A score of the private records that this class hides from the ledger makes the guarantee false.

    Attributes:
      function: `function(params) -> number`, larger is better. NaN is worst.
      facts: Numbers, texts and arrays that say which function it is, such as a name and the
        fingerprint of the public records. No hash sees what a Python function computes. So equal
        facts are the caller's word that the scores of equal parameters are equal: change them with
        the function. A search in a workdir goes on after a crash, and answers from there, only if
        they are the same. None, the default, says nothing: a search that is killed pays again.
    """

    function: Callable[[Any], float]
    facts: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        check_function("function", self.function, "function(params) -> 0.9")
        check_facts(self.facts)

    @property
    def is_known(self) -> bool:
        """Whether facts say which score it is."""
        return self.facts is not None

    def check(self, params: Any) -> None:
        """Raises before a charge if the function returns no number for the first parameters."""
        check_numbers(score=self.function(params))

    def charges(self, account: Account) -> list[tuple[Account, DpEvent]]:
        """Returns no charge."""
        return []

    def identity(self) -> list[Any]:
        """Returns the facts of a score, for the token of its search."""
        return ["public", self.facts]

    def programs(self, params: Any) -> list[str]:
        """Returns no program. The facts stand for the function."""
        return []

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
      unit: What one record of `source` is, or one owner, in the words of the ledger.
      account: The account of the records of `source`, in the ledger of the search. None, the
        default, is the account of the search: it pays for training and score, whichever of both
        reads a record.
    """

    predict: Predict
    source: Source
    noise_multiplier: float
    account: Account | None = None
    batch_size: int = 500
    unit: str = "example"

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier must be positive and finite, got {self.noise_multiplier!r}. A "
                "score without noise is for public data: use PublicScore."
            )
        noise.check_product("noise_multiplier", self.noise_multiplier, 1.0)
        check_count(self.source, self.batch_size)

    @property
    def is_known(self) -> bool:
        """Whether facts say which score it is. The program of `predict` does."""
        return True

    def check(self, params: Any) -> None:
        """Raises before a charge if `predict` returns logits of another shape."""
        check_predict(self.predict, params, self.source, self.batch_size)

    def charges(self, account: Account) -> list[tuple[Account, DpEvent]]:
        """Returns the account and the event of one score, which are those of `charged_accuracy`.

        Raises ValueError if the account has another unit.
        """
        pays = self.account or account
        return [charge_of_count(pays, self.source, self.noise_multiplier, self.unit)]

    def identity(self) -> list[Any]:
        """Returns the facts of a score, for the token of its search."""
        return ["charged", self.source.fingerprint, self.noise_multiplier, self.batch_size]

    def programs(self, params: Any) -> list[str]:
        """Returns the program of the count for parameters of such shapes."""
        shapes = check_predict(self.predict, params, self.source, self.batch_size)
        return [program_of_count(self.predict, params, shapes)]

    def of(self, params: Any, secret: bytes) -> float:
        """Returns the noisy accuracy of parameters, with noise from 16 secret bytes."""
        count = count_correct(self.predict, params, self.source, batch_size=self.batch_size)
        key = stream(secret, "accuracy")
        return float(noisy_fraction(key, count, len(self.source), self.noise_multiplier))


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
