"""What audits by many runs share: terms that are checked first, a pair to tell apart, keys, and a verdict."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from jaxdp.audit import bounds
from jaxdp.privacy import Account, DpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim, new_seed, stream

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Trials:
    """The terms of an audit by `count` runs with a canary and as many with its neighbour.

    Attributes:
      count: at least 2.
      upper: the ledger's epsilon of one run.
      delta, confidence, claim: as in `bounds.multi_run`.
      seed: 16 secret bytes.
    """

    count: int
    upper: float
    delta: float
    confidence: float
    claim: bounds.Claim
    seed: bytes

    @classmethod
    def of(
        cls,
        charge: DpEvent | Callable[[Account], None],
        *,
        trials: int,
        delta: float,
        adjacency: Adjacency,
        confidence: float,
        claimed: bounds.Claim,
        seed: bytes | None,
    ) -> "Trials":
        """Returns checked terms; the ledger's epsilon is that of `charge` alone, as in `jaxdp.release.claim`."""
        if trials < 2:
            raise ValueError(f"trials must be at least 2, got {trials}.")
        upper = claim(charge, adjacency=adjacency, delta=delta)
        bounds.check(upper, delta, confidence, claimed)
        return cls(trials, upper, delta, confidence, claimed, new_seed() if seed is None else seed)

    def keys(self, purpose: str, count: int) -> jax.Array:
        """Returns a key for each of so many runs [count], of a kind that is independent under `jax.vmap`."""
        return jax.random.split(stream(self.seed, purpose, impl="threefry2x32"), count)

    def judge(self, scores: Callable[[T, str], Any], canary: T, neighbour: T) -> bounds.Audit:
        """Returns the `Audit` of `scores(data, purpose) -> [count]` of the two data."""
        present, absent = scores(canary, "with the canary"), scores(neighbour, "without the canary")
        terms: dict[str, Any] = {"delta": self.delta, "confidence": self.confidence, "claim": self.claim}
        return bounds.multi_run(present, absent, upper=self.upper, **terms)


def check_candidates(field: str, count: int, adjacency: Adjacency, *, what: str) -> None:
    """Raises ValueError for too few candidates; under "replace_one" a canary's neighbour is another one."""
    if count < (least := 2 if adjacency == "replace_one" else 1):
        raise ValueError(f"{field} at least {least} {what} under {adjacency!r}, got {count}.")


def farthest(canaries: Iterable[T], neighbours: Iterable[T], distance: Callable[[T, T], float]) -> tuple[T, T]:
    """Returns the canary and the neighbour that are farthest apart."""
    return max(itertools.product(canaries, neighbours), key=lambda pair: distance(*pair))
