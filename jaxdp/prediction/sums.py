"""Exact sums of clipped gradients: outward-rounded integers, whose sums do not depend on order or
machine (T7).

A total is a pair of integers (high, low) with the value high 2**10 + low, where 0 <= low < 2**10.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms.boxes import outward

# The number of records whose quantised gradients fit half of an int32.
BLOCK = 256
SHIFT = 10

Total = tuple[jax.Array, jax.Array]


class Grid(NamedTuple):
    """The integer grid of clipped gradients: multiples of `unit`, a power of two, so that no
    product is rounded.
    """

    clip: float
    divisor: int  # of a sum, in a mean
    clipped: (
        bool  # whether a sum is clipped to the largest sum of min(`public_rows`, `most`) records
    )
    dtype: Any
    ints: Any
    unit: float
    one: int  # clip in units, rounded up
    magic: float  # adding it rounds to a unit in the last bit of the mantissa
    most: int  # a total has room for so many records, and for half as many changes

    @classmethod
    def of(cls, dtype: Any, clip: float, divisor: int, *, clipped: bool = False) -> "Grid":
        """Returns the grid for gradients of a dtype."""
        double = jnp.dtype(dtype) == jnp.float64
        kind, ints, bits, most = (
            (np.float64, np.int64, 46, 2**26) if double else (np.float32, np.int32, 21, 2**19)
        )
        unit = 2.0 ** (math.frexp(clip)[1] - bits)  # clip is from 2^(bits - 1) to 2^bits units
        magic = 1.5 * 2 ** np.finfo(kind).nmant * unit
        return cls(clip, divisor, clipped, kind, ints, unit, math.ceil(clip / unit), magic, most)

    def bits(self, x: jax.Array, *, nearest: bool = False) -> jax.Array:
        """Clips and rounds to the grid, to nearest or down by 0.5 to 1.5 units. Returns integers
        plus `bias`.
        """
        x, end = x.astype(self.dtype), self.one * self.unit
        if nearest:
            x = jnp.clip(jnp.where(jnp.isnan(x), 0, x), -self.clip, self.clip)
        else:  # a NaN becomes the least possible gradient
            x = jnp.where(x > -end, x, -end)
            x = jnp.where(x < end, x, end)
        return lax.bitcast_convert_type(x + self.magic, self.ints)

    def bias(self, *, nearest: bool = False) -> jax.Array:
        """Returns the `bits` of zero, plus one unit if rounded down, because `bits` rounds to
        nearest.
        """
        return lax.bitcast_convert_type(jnp.asarray(self.magic, self.dtype), self.ints) + (
            not nearest
        )

    @property
    def charge(self) -> int:
        """The largest move of a sum by one record: clip, and the units that rounding may add."""
        return self.one + 2

    def sum(self, bits: jax.Array, *, nearest: bool = False) -> jax.Array:
        """Adds up over the first axis, without the bias."""
        return jnp.sum(bits, axis=0, dtype=self.ints) - bits.shape[0] * self.bias(nearest=nearest)

    def mean(self, total: Total, *, nearest: bool = False) -> jax.Array:
        """Returns the total over the divisor as a float, rounded down or to nearest."""
        high, low = (part.astype(self.dtype) for part in total)
        scale = self.unit * 2**SHIFT / self.divisor
        return (high + low / 2**SHIFT) * scale if nearest else outward(high * scale, -1, 3)


def carry(high: jax.Array, low: jax.Array, shift: int = SHIFT) -> Total:
    """Returns the same total with 0 <= low < 2**shift."""
    return high + (low >> shift), low & (2**shift - 1)


def add_units(total: Total, count: Any, units: Any) -> Total:
    """Adds `count`, of either sign, times a number of units."""
    return carry(total[0] + count * (units >> SHIFT), total[1] + count * (units & (2**SHIFT - 1)))


def public_rows(batch_size: int) -> int:
    """Returns the public number of records that a batch has room for. It bounds the rounding of
    every batch's sum.
    """
    return math.ceil(4 * batch_size / BLOCK) * BLOCK


def add_up(
    grid: Grid,
    cut: tuple[int, int, int],
    like: list[jax.Array],
    blocks: Any,
    factors: Callable[[Any], Any],
    summands: Callable[[Any], list[jax.Array]],
) -> list[Total]:
    """Adds up integers over a batch in blocks [outer, records, ...]. Memory does not grow with the
    batch.

    `factors` is evaluated for one block at a time, `summands` for one fragment that fits a cache.
    `cut` is (outer blocks, fragments in each, records in a fragment). The sums have the shapes of
    `like`.
    """
    zeros = [jnp.zeros(x.shape, grid.ints) for x in like]

    def fragments(block: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(*cut[1:], *x.shape[1:]), factors(block))

    def add(sums: Any, fragment: Any) -> tuple[Any, None]:
        return [a + b for a, b in zip(sums, summands(fragment), strict=True)], None

    def outer(totals: Any, block: Any) -> tuple[Any, None]:
        sums, _ = lax.scan(add, zeros, fragments(block))
        pairs = zip(totals, sums, strict=True)
        return [
            carry(high, low + s, 2 * SHIFT) for (high, low), s in pairs
        ], None  # has room for any batch

    def narrow(high: jax.Array, low: jax.Array) -> Total:
        if grid.clipped:
            end = min(public_rows(grid.divisor), grid.most) * grid.one >> 2 * SHIFT
            low = jnp.where((high < -end) | (high >= end), 0, low)
            high = jnp.clip(high, -end, end)
        return carry(high << SHIFT, low)

    totals, _ = lax.scan(outer, [(z, z) for z in zeros], blocks)
    return [narrow(high, low) for high, low in totals]
