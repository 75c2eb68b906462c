"""Exact sums of clipped gradients: quantised outward to integers, which add up alike in any order on any machine."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms.boxes import widen

# Records whose quantised gradients fit half of an int32.
BLOCK = 256


class Grid(NamedTuple):
    """Clipped gradients as integers: clip = `one` units. Sums of integers are exact, in any order, on any machine."""

    one: int
    shift: int  # totals are kept as high << shift | low
    ints: Any
    magic: float  # adding it rounds to an integer, which is then in the low bits of the mantissa
    most: int  # records of which a total has room, and for half as many changes

    @classmethod
    def of(cls, dtype: Any) -> "Grid":
        """Returns the grid for gradients of a dtype."""
        if jnp.dtype(dtype) == jnp.float64:
            return cls(2**46, 10, jnp.int64, 1.5 * 2**52, 2**26)
        return cls(2**21, 10, jnp.int32, 1.5 * 2**23, 2**19)

    def bits(self, x: jax.Array, clip: float, direction: int) -> jax.Array:
        """Clips and rounds to the grid, down, to nearest or up (-1, 0, 1); returns integers plus those of `magic`."""
        x = x * (self.one / clip)
        if direction < 0:  # a NaN becomes the least, or the largest, possible gradient
            x = jnp.minimum(jnp.where(x > -self.one, x, -self.one), self.one) - 0.75
        elif direction > 0:
            x = jnp.maximum(jnp.where(x < self.one, x, self.one), -self.one) + 0.75
        else:
            x = jnp.clip(jnp.where(jnp.isnan(x), 0, x), -self.one, self.one)
        return lax.bitcast_convert_type(x + self.magic, self.ints)

    @property
    def zero(self) -> jax.Array:
        """The `bits` of zero: those of `magic`."""
        kind = jnp.dtype(self.ints)
        return lax.bitcast_convert_type(jnp.asarray(self.magic, f"float{8 * kind.itemsize}"), kind)

    @property
    def charge(self) -> int:
        """The most that one record moves a sum: clip, and the units that rounding may add."""
        return self.one + 2


def add_up(
    plan: Any, grid: Grid, blocks: Any, factors: Callable[[Any], Any], summands: Callable[[Any], list[jax.Array]]
) -> list[tuple[jax.Array, jax.Array]]:
    """Adds up integers over a batch in blocks [outer, records, ...] (T7).

    `factors` is evaluated for a block at a time, `summands` for the fragments that fit a cache. Memory does not grow
    with the batch. Returns (high, low) with sum = high 2**shift + low, 0 <= low < 2**shift; under "add_remove" of the
    sum clipped to the clip of as many records as `public_rows` and the grid allow.
    """
    _, inner, size = plan.blocks

    def fragments(block: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(inner, size, *x.shape[1:]), factors(block))

    first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], fragments(jax.tree.map(lambda x: x[0], blocks))))
    zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(summands, first)]
    wide = grid._replace(shift=2 * grid.shift)  # has room for any batch

    def add(sums: Any, fragment: Any) -> tuple[Any, None]:
        return [a + b for a, b in zip(sums, summands(fragment), strict=True)], None

    def outer(totals: Any, block: Any) -> tuple[Any, None]:
        sums, _ = lax.scan(add, zeros, fragments(block))
        pairs = zip(totals, sums, strict=True)
        return [carry(wide, high, low + s) for (high, low), s in pairs], None

    def narrow(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
        if plan.adjacency == "add_remove":
            end = min(public_rows(plan.divisor), grid.most) * grid.one >> wide.shift
            low = jnp.where((high < -end) | (high >= end), 0, low)
            high = jnp.clip(high, -end, end)
        return carry(grid, high << grid.shift, low)

    totals, _ = lax.scan(outer, [(z, z) for z in zeros], blocks)
    return [narrow(high, low) for high, low in totals]


def public_rows(batch_size: int) -> int:
    """The records that a batch has room for: a bound on the rounding of its sum that no record changes."""
    return math.ceil(4 * batch_size / BLOCK) * BLOCK


def carry(grid: Grid, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the same total with 0 <= low < 2**shift."""
    return high + (low >> grid.shift), low & (2**grid.shift - 1)


def add_units(grid: Grid, total: tuple[jax.Array, jax.Array], count: Any, units: int) -> tuple[jax.Array, jax.Array]:
    """Adds `count`, of either sign, times a number of units."""
    part = 2**grid.shift
    return carry(grid, total[0] + count * (units // part), total[1] + count * (units % part))


def mean(plan: Any, grid: Grid, total: tuple[jax.Array, jax.Array], dtype: Any, direction: int) -> jax.Array:
    """The total over the divisor as a float, rounded outward in `direction`."""
    high, low = total
    whole = high + (low > 0).astype(high.dtype) if direction > 0 else high
    scale = plan.clip / grid.one * 2**grid.shift / plan.divisor
    if direction == 0:
        return (high.astype(dtype) + low.astype(dtype) / 2**grid.shift) * scale
    ends = widen(whole.astype(dtype) * scale, whole.astype(dtype) * scale, 3)
    return ends[0] if direction < 0 else ends[1]
