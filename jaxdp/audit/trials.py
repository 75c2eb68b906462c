"""The shared parts of audits by many runs.

They are checked terms, a pair to tell apart, keys, and a verdict.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Required, TypedDict, TypeVar

import jax
import numpy as np

from jaxdp.audit import bounds
from jaxdp.files import check_choice, check_count
from jaxdp.privacy import Account, DpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim, new_seed, stream

T = TypeVar("T")


class Exact(NamedTuple):
    """Data of a run, and the result of the run without noise."""

    data: Any
    result: np.ndarray


class RunTerms(TypedDict, total=False):
    """The terms of every audit by many runs. `Trials` documents them."""

    trials: Required[int]
    confidence: float
    seed: bytes


class DeltaTerms(RunTerms, total=False):
    """The terms of an audit whose caller chooses delta. `Trials` documents them."""

    delta: Required[float]


class NeighbourTerms(RunTerms, total=False):
    """The terms of an audit whose caller chooses the neighbour. `Trials` documents them."""

    adjacency: Adjacency


class NoiseTerms(NeighbourTerms, total=False):
    """The terms of an audit of Gaussian noise. `Trials` documents them."""

    delta: Required[float]


class StreamTerms(DeltaTerms, total=False):
    """The terms of an audit of a stream. `Trials` documents them."""

    claim: bounds.Claim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """The terms of an audit by many runs with a canary and as many with its neighbour.

    Attributes:
      charge: The charge of one run, as in `jaxdp.release.claim`.
      trials: The number of runs of either kind, at least 2.
      delta, confidence, claim: As in `jaxdp.audit.multi_run`.
      adjacency: The canary's neighbour is no record under "add_remove", a record that adds nothing
        under "zero_out", and another candidate under "replace_one".
      allowed: The adjacencies that the audit supports.
      seed: 16 secret bytes of the noise, for tests. The default is OS entropy.
      upper: The ledger's epsilon of one run.

    Raises:
      ValueError: A term is out of range.
    """

    charge: DpEvent | Callable[[Account], None]
    trials: int
    delta: float
    adjacency: Adjacency = "add_remove"
    allowed: Sequence[Adjacency] = ("add_remove", "zero_out", "replace_one")
    confidence: float = 0.95
    claim: bounds.Claim = "gaussian"
    seed: bytes = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]
    upper: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        check_choice("adjacency", self.adjacency, self.allowed)
        check_count("trials", self.trials, 2)
        upper = claim(self.charge, adjacency=self.adjacency, delta=self.delta)
        object.__setattr__(self, "upper", upper)
        self.terms.check(upper)
        object.__setattr__(self, "seed", self.seed or new_seed())

    @property
    def terms(self) -> bounds.Terms:
        """The terms of the bound."""
        return bounds.Terms(self.delta, self.confidence, self.claim)

    def check_candidates(
        self,
        field: str,
        count: int,
        what: str,
    ) -> None:
        """Raises ValueError for too few candidates."""
        least = 2 if self.adjacency == "replace_one" else 1
        if count < least:
            raise ValueError(
                f"{field} at least {least} {what} under {self.adjacency!r}, got {count}."
            )

    def keys(self, purpose: str, count: int) -> jax.Array:
        """Returns a key for each of `count` runs [count].

        The keys are of a kind that is independent under `jax.vmap`.
        """
        key = stream(self.seed, purpose, impl="threefry2x32")
        return jax.random.split(key, count)

    def farthest(
        self,
        canaries: Sequence[T],
        absent: Sequence[T],
        distance: Callable[[T, T], float],
        refusal: str = "",
    ) -> tuple[T, T]:
        """Returns the canary and the neighbour that are farthest apart.

        Args:
          canaries: The candidates.
          absent: The neighbours, unless they are other candidates ("replace_one").
          distance: How far two of them are apart.
          refusal: The text of the error if no pair is apart. Without one such a pair is returned.

        Raises:
          ValueError: No pair is apart, so that the audit would find nothing in any mechanism.
        """
        neighbours = canaries if self.adjacency == "replace_one" else absent
        pairs = itertools.product(canaries, neighbours)
        farthest = max(pairs, key=lambda pair: distance(*pair))
        if refusal and not distance(*farthest) > 0:
            raise ValueError(refusal)
        return farthest

    def judge(
        self,
        scores: Callable[[Any, str], Any],
        canary: Any,
        neighbour: Any,
    ) -> bounds.Audit:
        """Returns the `Audit` of `scores(data, purpose) -> [trials]` for the two data."""
        present = scores(canary, "with the canary")
        absent = scores(neighbour, "without the canary")
        return bounds.multi_run(present, absent, upper=self.upper, **dataclasses.asdict(self.terms))
