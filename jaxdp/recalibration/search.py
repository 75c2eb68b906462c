"""Searches for a temperature by one value of a function in each round.

`GoldenSection` finds a minimum (section C.1), `GridSearch` too, at positions that are fixed in
advance (section D.1), and `Bisection` finds a change of sign. A search is an immutable pytree:
`search.position()` is where the function is evaluated next, and `search.observed(k, observation)`
is the search after that. Positions are temperatures or their logarithms (`Bracket`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.files import check_choice

Spacing = Literal["log", "linear"]
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bracket:
    """The public range of temperatures of a search.

    Attributes:
      low, high: The ends.
      spacing: "log" searches over log T, "linear" over T as published.
    """

    low: float = 0.5
    high: float = 3.0
    spacing: Spacing = "log"

    def __post_init__(self) -> None:
        if not 0 < np.float32(self.low) < np.float32(self.high) < np.inf:
            raise ValueError(
                "bracket must be (low, high) with 0 < low < high in float32, got "
                f"{(self.low, self.high)}."
            )
        check_choice("spacing", self.spacing, Spacing)

    @classmethod
    def of(cls, ends: "Bracket | Sequence[Any]", spacing: Spacing = "log") -> "Bracket":
        """Returns the bracket of (low, high) and a spacing.

        A config may hold both as (low, high, spacing).
        """
        if isinstance(ends, Bracket):
            return ends
        try:
            if isinstance(ends[-1], str):
                *ends, spacing = ends
            low, high = map(float, ends)
        except (IndexError, TypeError, ValueError):
            raise ValueError(
                f"bracket must be two temperatures (low, high), got {ends!r}."
            ) from None
        return cls(low=low, high=high, spacing=spacing)

    @property
    def ends(self) -> tuple[jax.Array, jax.Array]:
        """Positions of the ends, float32 []."""
        return self._position(self.low), self._position(self.high)

    @property
    def unchanged(self) -> jax.Array:
        """The position of T = 1, which changes no confidence, float32 [].

        It may be outside of the bracket.
        """
        return self._position(1.0)

    def _position(self, temperature: float) -> jax.Array:
        if self.spacing == "log":
            temperature = math.log(temperature)
        return jnp.float32(temperature)

    def temperature(self, position: jax.Array) -> jax.Array:
        """Returns the temperature at a position between the ends."""
        return position if self.spacing == "linear" else jnp.exp(position)


class Observation(NamedTuple):
    """What an answer says about a position.

    Attributes:
      value: The objective, float32 [].
      lean: The number that decides a tie, float32 []. It is > 0 if T is too high, < 0 if it is too
        low, and 0 if the answer does not tell.
    """

    value: jax.Array
    lean: jax.Array


class FoundTemperature(NamedTuple):
    """The result of a search.

    Attributes:
      temperature: The middle of the last bracket, float32 [].
      low, high: Whether the last bracket still has the lower or upper end of the first one, bool
        []. The best T may then be outside.
    """

    temperature: jax.Array
    low: jax.Array
    high: jax.Array


class GoldenSection(NamedTuple):
    """Golden-section search (C.1) for the minimum of a function that falls and then rises.

    Positions are float32 []. It reduces the bracket K times with exactly K + 1 values. The
    published loop takes one more value and never reads it (Algorithm 1, k = K - 1).

    A tie of both probes says that the minimum is between them, or that the objective is flat.
    Either part of the bracket holds what is between them. The published loop always keeps the upper
    part (line 5), so that a flat objective ends at the highest temperature. Here
    `Observation.lean` decides, and without a lean the search keeps the part that is nearer to T =
    1.
    """

    unchanged: jax.Array  # the position of T = 1
    low: jax.Array  # ends of the current bracket
    high: jax.Array
    probes: jax.Array  # two positions inside the bracket, [2]
    values: jax.Array  # the function at the probes, [2]
    probe: jax.Array  # index of the probe to evaluate next

    @classmethod
    def start(cls, bracket: Bracket, iterations: int) -> "GoldenSection":
        """Runs Algorithm 1, line 2, for any number of iterations."""
        low, high = bracket.ends
        return cls(
            unchanged=bracket.unchanged,
            low=low,
            high=high,
            probes=_probes(low, high),
            values=jnp.zeros(2),
            probe=jnp.int32(0),
        )

    def position(self) -> jax.Array:
        """Returns the position to evaluate next."""
        return self.probes[self.probe]

    def observed(self, k: int, observation: Observation) -> "GoldenSection":
        """Returns the search after the value at `position()`, the k-th from 0.

        All values but the first shrink the bracket. These are lines 5 to 11, with the new ends in
        lines 6 and 9. With the old ends both probes would coincide.
        """
        values = self.values.at[self.probe].set(observation.value)
        if k == 0:
            return self._replace(values=values, probe=jnp.int32(1))
        # Without records an objective is flat, and both values are equal.
        tied = values[0] == values[1]
        # Line 5: the minimum is not left of the left probe.
        upper = jnp.where(tied, _keeps_upper(self, observation), values[0] > values[1])
        low = jnp.where(upper, self.probes[0], self.low)
        high = jnp.where(upper, self.high, self.probes[1])
        # By the golden ratio the remaining probe is exactly at the other probe's new position.
        remaining = jnp.where(upper, self.probes[1], self.probes[0])
        value = jnp.where(upper, values[1], values[0])
        probe = upper.astype(jnp.int32)
        probes = _probes(low, high).at[1 - probe].set(remaining)
        return GoldenSection(self.unchanged, low, high, probes, jnp.full(2, value), probe)


def _keeps_upper(search: "GoldenSection | Bisection", observation: Observation) -> jax.Array:
    """Returns whether a search keeps the upper part of its bracket by the lean, bool []."""
    nearer_to_one = search.unchanged > (search.low + search.high) / 2
    return jnp.where(observation.lean == 0, nearer_to_one, observation.lean < 0)


def _probes(low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.stack([high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)])


class GridSearch(NamedTuple):
    """Search of a grid for the minimum of a function: the baseline of section D.1.

    The grid has the middles of K + 1 equal parts of the bracket. So it needs the K + 1 values of
    `GoldenSection`, and its answer is within 1 / (2 (K + 1)) of the bracket of the best position.
    No position depends on an earlier value, so all of them could be evaluated at once. Positions
    are float32 []. Ties are decided as in `GoldenSection`.
    """

    unchanged: jax.Array  # the position of T = 1
    edges: jax.Array  # of the parts of the bracket, [K + 2]
    next: jax.Array  # index of the part to evaluate next
    best: jax.Array  # index of the part with the smallest value so far
    value: jax.Array  # that value

    @classmethod
    def start(cls, bracket: Bracket, iterations: int) -> "GridSearch":
        """Divides the bracket into `iterations` + 1 parts."""
        low, high = bracket.ends
        parts_below = jnp.arange(1, iterations + 1)
        width = (high - low) / (iterations + 1)
        inner = low + width * parts_below
        first = jnp.int32(0)
        return cls(
            unchanged=bracket.unchanged,
            edges=jnp.concatenate([low[None], inner, high[None]]),
            next=first,
            best=first,
            value=jnp.float32(jnp.inf),
        )

    @property
    def low(self) -> jax.Array:
        """The lower end of the best part."""
        return self.edges[self.best]

    @property
    def high(self) -> jax.Array:
        """The upper end of the best part."""
        return self.edges[self.best + 1]

    def position(self) -> jax.Array:
        """Returns the middle of the next part."""
        low = self.edges[self.next]
        high = self.edges[self.next + 1]
        return (low + high) / 2

    def observed(self, k: int, observation: Observation) -> "GridSearch":
        """Returns the search after the value at `position()`, the k-th from 0."""
        between = (self.edges[self.best] + self.edges[self.next + 1]) / 2  # the two positions
        nearer_to_one = self.unchanged > between
        tied = observation.value == self.value
        higher = jnp.where(observation.lean == 0, nearer_to_one, observation.lean < 0)
        better = jnp.where(tied, higher, observation.value < self.value)
        return self._replace(
            next=self.next + 1,
            best=jnp.where(better, self.next, self.best),
            value=jnp.where(better, observation.value, self.value),
        )


class Bisection(NamedTuple):
    """Search for the sign change of a rising function.

    K values halve the bracket K times. Positions are float32 []. A value of 0 says that the middle
    is right, or that no answer tells anything. The search then keeps the half that is nearer to T =
    1.
    """

    unchanged: jax.Array
    low: jax.Array
    high: jax.Array

    @classmethod
    def start(cls, bracket: Bracket, iterations: int) -> "Bisection":
        """Starts with the whole bracket, for any number of iterations."""
        return cls(bracket.unchanged, *bracket.ends)

    def position(self) -> jax.Array:
        """Returns the middle."""
        return (self.low + self.high) / 2

    def observed(self, k: int, observation: Observation) -> "Bisection":
        """Returns the search after the value in the middle, whose sign is the lean."""
        middle = self.position()
        upper = _keeps_upper(self, observation)
        low = jnp.where(upper, middle, self.low)
        high = jnp.where(upper, self.high, middle)
        return self._replace(low=low, high=high)
