"""Exact sums of clipped gradients (T7).

Gradients are rounded outward to integers. Sums of integers do not depend on order or machine. A
total is a pair of integers (high, low) with the value high 2**10 + low, where 0 <= low < 2**10.
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
    """The integer grid of clipped gradients.

    It has the multiples of `unit`, a power of two, so that no product is rounded.

    Attributes:
      clip: The bound of a coordinate of a gradient.
      divisor: The divisor of a sum, in a mean.
      clipped: Whether a sum is clipped to the largest sum of min(`public_rows`, `most`) records.
      dtype: The dtype of gradients.
      ints: The dtype of integers.
      unit: The distance of two points of the grid.
      one: `clip` in units, rounded up.
      magic: Adding it rounds to a unit in the last bit of the mantissa.
      most: A total has room for so many records, and for half as many changes.
    """

    clip: float
    divisor: int
    clipped: bool
    dtype: Any
    ints: Any
    unit: float
    one: int
    magic: float
    most: int

    @classmethod
    def of(
        cls,
        dtype: Any,
        clip: float,
        divisor: int,
        *,
        clipped: bool = False,
    ) -> "Grid":
        """Returns the grid for gradients of a dtype."""
        floats: Any
        ints: Any
        # `clip` is from 2^(clip_bits - 1) to 2^clip_bits units.
        if jnp.dtype(dtype) == jnp.float64:
            floats = np.float64
            ints = np.int64
            clip_bits = 46
            most = 2**26
        else:
            floats = np.float32
            ints = np.int32
            clip_bits = 21
            most = 2**19
        unit = 2.0 ** (math.frexp(clip)[1] - clip_bits)
        mantissa = np.finfo(floats).nmant
        return cls(
            clip=clip,
            divisor=divisor,
            clipped=clipped,
            dtype=floats,
            ints=ints,
            unit=unit,
            one=math.ceil(clip / unit),
            # With 1.5 a sum stays between 2^m and 2^(m + 1) units for both signs of x, where a unit
            # is the last bit of the mantissa.
            magic=1.5 * 2**mantissa * unit,
            most=most,
        )

    def bits(self, x: jax.Array, *, nearest: bool = False) -> jax.Array:
        """Clips and rounds to the grid, to nearest or down by 0.5 to 1.5 units.

        Returns integers plus `bias`.
        """
        x = x.astype(self.dtype)
        if nearest:
            numbers = jnp.where(jnp.isnan(x), 0, x)
            x = jnp.clip(numbers, -self.clip, self.clip)
        else:
            end = self.one * self.unit
            x = jnp.where(x > -end, x, -end)  # a NaN becomes the least possible gradient
            x = jnp.where(x < end, x, end)
        # In that range the bits of a float count units.
        return lax.bitcast_convert_type(x + self.magic, self.ints)

    def bias(self, *, nearest: bool = False) -> jax.Array:
        """Returns the `bits` of zero, plus the unit by which rounding down lowers a sum."""
        magic = jnp.asarray(self.magic, self.dtype)
        zero = lax.bitcast_convert_type(magic, self.ints)
        return zero + (not nearest)  # `bits` itself rounds to nearest

    @property
    def charge(self) -> int:
        """The largest move of a sum by one record: clip, and the units that rounding may add."""
        return self.one + 2

    def sum(self, bits: jax.Array, *, nearest: bool = False) -> jax.Array:
        """Adds up over the first axis, without the bias."""
        count = bits.shape[0]
        # Each of `count` integers has the bias once.
        biased = jnp.sum(bits, axis=0, dtype=self.ints)
        return biased - count * self.bias(nearest=nearest)

    def mean(self, total: Total, *, nearest: bool = False) -> jax.Array:
        """Returns the total over the divisor as a float, rounded down or to nearest."""
        high = total[0].astype(self.dtype)
        low = total[1].astype(self.dtype)
        scale = self.unit * 2**SHIFT / self.divisor
        if nearest:
            return (high + low / 2**SHIFT) * scale
        return outward(high * scale, -1, 3)  # `low` is not negative, so a lower end may drop it


def carry(
    high: jax.Array,
    low: jax.Array,
    shift: int = SHIFT,
) -> Total:
    """Returns the same total with 0 <= low < 2**shift."""
    return high + (low >> shift), low & (2**shift - 1)


def add_units(
    total: Total,
    count: Any,
    units: Any,
) -> Total:
    """Adds `count`, of either sign, times a number of units."""
    high = total[0] + count * (units >> SHIFT)
    low = total[1] + count * (units & (2**SHIFT - 1))
    return carry(high, low)


def public_rows(batch_size: int) -> int:
    """Returns the public number of records that a batch has room for.

    It bounds the rounding of every batch's sum.
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
    """Adds up integers over a batch in blocks. Memory does not grow with the batch.

    Args:
      grid: The grid of the integers.
      cut: (outer blocks, fragments in each, records in a fragment).
      like: Arrays with the shapes of the sums.
      blocks: A pytree of arrays [outer, records, ...].
      factors: A function of one block, evaluated for one block at a time.
      summands: A function of one fragment of the factors, which fits a cache. It returns integers.
    """
    zeros = [jnp.zeros(x.shape, grid.ints) for x in like]

    def add_fragment(sums: Any, fragment: Any) -> tuple[Any, None]:
        pairs = zip(sums, summands(fragment), strict=True)
        return [a + b for a, b in pairs], None

    def add_block(totals: Any, block: Any) -> tuple[Any, None]:
        fragments = cut_up(cut, factors(block))
        sums, _ = lax.scan(add_fragment, zeros, fragments)
        return add_to(totals, sums), None

    totals, _ = lax.scan(add_block, [(z, z) for z in zeros], blocks)
    return [narrow(grid, total) for total in totals]


def cut_up(cut: tuple[int, int, int], block: Any) -> Any:
    """Returns arrays [fragments, records, ...] from arrays of a block [records, ...]."""
    return jax.tree.map(lambda x: x.reshape(*cut[1:], *x.shape[1:]), block)


def add_to(totals: list[Total], sums: list[jax.Array]) -> list[Total]:
    """Adds sums of a block to totals with a lower part of 2 SHIFT bits."""
    next_totals = []
    for (high, low), block_sum in zip(totals, sums, strict=True):
        # A lower part of 2 SHIFT bits has room for any batch.
        next_totals.append(carry(high, low + block_sum, 2 * SHIFT))
    return next_totals


def narrow(grid: Grid, total: Total) -> Total:
    """Returns a total with a lower part of SHIFT bits, from one of 2 SHIFT bits."""
    high, low = total
    if grid.clipped:
        # In units of the upper part. An error instead would tell the number of records.
        records = min(public_rows(grid.divisor), grid.most)
        # Rounded down, so that all data sets have the same end.
        end = records * grid.one >> 2 * SHIFT
        is_clipped = (high < -end) | (high >= end)
        low = jnp.where(is_clipped, 0, low)
        high = jnp.clip(high, -end, end)
    return carry(high << SHIFT, low)
