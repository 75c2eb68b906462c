"""The shared parts of audits by many runs: checked terms, a pair to tell apart, keys, and a
verdict.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jaxdp.audit import bounds
from jaxdp.privacy import Account, DpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim, new_seed, stream

T = TypeVar("T")


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
        if self.adjacency not in self.allowed:
            *others, last = map(repr, self.allowed)
            raise ValueError(
                f"adjacency must be {', '.join(others)} or {last}, got {self.adjacency!r}."
            )
        if self.trials < 2:
            raise ValueError(f"trials must be at least 2, got {self.trials}.")
        object.__setattr__(
            self, "upper", claim(self.charge, adjacency=self.adjacency, delta=self.delta)
        )
        bounds.check(self.upper, self.delta, self.confidence, self.claim)
        object.__setattr__(self, "seed", self.seed or new_seed())

    def check_candidates(self, field: str, count: int, what: str) -> None:
        """Raises ValueError for too few candidates."""
        if count < (least := 2 if self.adjacency == "replace_one" else 1):
            raise ValueError(
                f"{field} at least {least} {what} under {self.adjacency!r}, got {count}."
            )

    def keys(self, purpose: str, count: int) -> jax.Array:
        """Returns a key for each of `count` runs [count], of a kind that is independent under
        `jax.vmap`.
        """
        return jax.random.split(stream(self.seed, purpose, impl="threefry2x32"), count)

    def farthest(
        self, canaries: Sequence[T], absent: Sequence[T], distance: Callable[[T, T], float]
    ) -> tuple[T, T]:
        """Returns the canary and neighbour that are farthest apart. `absent` has the neighbours but
        candidates.
        """
        neighbours = canaries if self.adjacency == "replace_one" else absent
        return max(itertools.product(canaries, neighbours), key=lambda pair: distance(*pair))

    def judge(self, scores: Callable[[Any, str], Any], canary: Any, neighbour: Any) -> bounds.Audit:
        """Returns the `Audit` of `scores(data, purpose) -> [trials]` for the two data."""
        present, absent = scores(canary, "with the canary"), scores(neighbour, "without the canary")
        terms: dict[str, Any] = {
            "delta": self.delta,
            "confidence": self.confidence,
            "claim": self.claim,
        }
        return bounds.multi_run(present, absent, upper=self.upper, **terms)
