"""Sums of clipped gradients in integers, on a public grid.

`jaxdp.privatize(..., exact=True)` makes the `Grid` of its noise, and
`clipped_grad(...).on_grid(grid)` sums multiples of its step. The steps of an example:

    1. g <- its clipped gradient over the step, cut to +- (2^24 - 1)    in float32
    2. k <- g rounded towards 0, coordinate by coordinate               int32
    3. k <- 0 unless sum_i k_i^2 <= `longest`                           by integers alone
    4. the sum of all k                                                 int32

The noise has a standard deviation of 2^bits steps, which is sigma C, and `longest` is the integer
part of (2^bits / sigma)^2. So step 3 alone proves that an example moves the sum by at most C in L2
norm. No rounding of a norm, of a product or of a sum matters for it.

**Why towards 0.** It makes every coordinate shorter, so the norm stays below C and the rounding has
no price in sensitivity. Rounding to the nearest integer lengthens a vector of d coordinates by up
to sqrt(d) / 2, and stochastic rounding needs a bound that holds with a probability, or has to be
repeated (Kairouz, Liu, Steinke 2021, arXiv:2102.06387). The price is a bias of less than a step for
each example and coordinate, a share 2^-bits of the standard deviation of the noise. Step 1 takes
C (1 - 2^-16) for C, so that float32 errors of a norm make no example fail step 3.

**Overflow.** All coordinates of a k are at most R = 2^bits / sigma, and the noise is at most 16
2^bits. So `most_examples` examples and the noise stay below 2^31. A batch with more can only
overflow if almost all of its gradients lie along one coordinate. Its sum is then wrong by a
multiple of 2^32. That is a function of the right sum, hence post-processing: an overflow costs
accuracy and no privacy.

**Dense layers.** Where a weight meets one row of data of an example, its gradient is u w^T, and is
not formed. The factors are rounded instead, to integers a and b:

    1. a <- U u / ||u|| to the nearest integers, with U near the root of 2^bits / sigma
    2. b <- w times what makes ||a|| ||b|| the length of the gradient in steps, towards 0
    3. the gradient is a b^T, whose squares have the sum ||a||^2 ||b||^2, by integers
    4. the sum is one product of integers

So the proof is that of other gradients. The gradient changes by about one part in U.

**Schedules.** Where sigma depends on the step, so does the grid (`GridSchedule`). The bits are the
same in all steps, and the schedule is public, so each step has a public grid.

**Which bits a gradient has** is the one assumption. A contribution must be a function of its own
example and of released values. The rows of a batch are computed by one program, and the sum would
move by more than C if the other rows of a batch decided the last bits of a row.
"""

import dataclasses
import fractions
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms.products import along_batch

# Noise of a standard deviation of 2^bits steps is at most LARGEST 2^bits, for bits up to MOST_BITS.
LARGEST = 16
MOST_BITS = 24
# Fewer steps of a standard deviation would make the bias of rounding towards 0 more than 2^-8 of
# it.
_LEAST_BITS = 8
_MOST_SUM = 2**31 - 1
_MOST_COORDINATE = 2**24 - 1  # every integer up to it is a float32
# The room for float32 errors of a norm.
_ROOM = 1 - 2.0**-16
# 256 squares of numbers below 2^12 have a sum below 2^32.
_BLOCK = 256
_HALF = 12
# Larger sums of squares of a factor count as too long, and the product of smaller ones has words.
_MOST_SQUARES = 2**26
_MOST_UNIT = 12
# Larger upper words of a sum of squares are cut to this one, which exceeds every `longest`.
_ENDLESS = 2**30


class GridAt(NamedTuple):
    """The numbers of a grid at one step, which a program takes as arguments. All are scalars.

    Attributes:
      scale: float32, the steps of a unit of the gradient, a little fewer.
      step: float32, the distance of two points of the grid.
      high, low: uint32, the words of `longest`.
      unit: float32, U, a power of two.
    """

    scale: Any
    step: Any
    high: Any
    low: Any
    unit: Any

    def total(
        self,
        grads: "Sequence[jax.Array | Outer]",
        factors: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Sums the rounded gradients of a batch.

        Args:
          grads: The gradients [B, ...] of each leaf, or their factors.
          factors: The clip factors [B] of each leaf, 0 for an example that contributes nothing.

        Returns:
          The sum for each leaf, int32.
        """
        steps: list[Any] = []
        for g, factor in zip(grads, factors, strict=True):
            if isinstance(g, Outer):
                steps.append(self._factor_steps(g, factor))
            else:
                steps.append(self._steps(g, factor))
        # Over all leaves together: `longest` bounds the whole gradient of an example.
        is_short = self._is_short(steps)
        return [_summed(x, is_short) for x in steps]

    def _factor_steps(
        self,
        outer: "Outer",
        factors: jax.Array,
    ) -> "Outer":
        """Returns the integer factors of clipped gradients in steps."""
        # [B, p] and [B, q]
        u = outer.u.astype(jnp.float32)
        w = outer.w.astype(jnp.float32)
        length = jnp.sqrt(jnp.square(u).sum(1))
        is_finite = jnp.isfinite(length) & jnp.isfinite(w).all(1)
        # A gradient that is not finite has the factor 0, and 0 * NaN is NaN.
        is_number = is_finite & (length > 0) & (factors > 0)
        along_unit = u * (self.unit / jnp.where(is_number, length, 1))[:, None]
        a = _integers(jnp.round(along_unit), self.unit, is_number)
        own_length = jnp.sqrt(jnp.square(a.astype(jnp.float32)).sum(1))
        # ||a|| ||b|| is then the clipped length in steps.
        # Entries of a long u may all round to 0. Then a is 0, and so is the contribution.
        per_entry = factors * self.scale * length / jnp.maximum(own_length, 1)
        b = _integers(w * per_entry[:, None], _MOST_COORDINATE, is_number)
        return Outer(a, b, outer.place)

    def _steps(
        self,
        grads: jax.Array,
        factors: jax.Array,
    ) -> jax.Array:
        """Returns clipped gradients in steps, int32 [B, ...], rounded towards 0."""
        factors = along_batch(factors, grads.ndim)
        clipped = grads * factors
        clipped = clipped.astype(jnp.float32)
        steps = clipped * self.scale
        # A gradient that is not finite has the factor 0, and 0 * NaN is NaN.
        is_number = (factors > 0) & jnp.isfinite(steps)
        steps = jnp.where(is_number, steps, 0)
        # Cut first, because platforms differ in the integer that a larger float becomes.
        cut = jnp.clip(steps, -_MOST_COORDINATE, _MOST_COORDINATE)
        return cut.astype(jnp.int32)  # towards 0

    def _is_short(
        self,
        steps: "Sequence[jax.Array | Outer]",
    ) -> jax.Array:
        """Returns whether the contribution of each example is not longer than `longest`, [B]."""
        high, low = squared_norms(steps)
        # The order of two numbers of two words each.
        is_below = high < self.high
        is_equal = high == self.high
        fits = low <= self.low
        is_short: jax.Array = is_below | (is_equal & fits)
        return is_short

    def read(
        self,
        total: jax.Array,
    ) -> jax.Array:
        """Returns a noisy sum of steps in the units of the gradient, float32."""
        values: jax.Array = total.astype(jnp.float32) * self.step
        return values


@dataclasses.dataclass(frozen=True, eq=False)
class Outer:
    """The gradients u_i w_i^T of examples with respect to a leaf, by their factors.

    Attributes:
      u: [B, p].
      w: [B, q].
      place: The map from [p, q] to the leaf, which moves entries.
    """

    u: jax.Array
    w: jax.Array
    place: Callable[[jax.Array], jax.Array]

    def summed(self) -> jax.Array:
        """Returns the sum of all u_i w_i^T like the leaf."""
        rows_with_rows = (((0,), (0,)), ((), ()))
        total = lax.dot_general(self.u, self.w, rows_with_rows, preferred_element_type=jnp.int32)
        return self.place(total)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The public grid of a sum with exact noise. `Grid.of` makes it.

    Attributes:
      clip_norm: C, in the units of the gradient.
      noise_multiplier: sigma.
      bits: The standard deviation of the noise is 2^bits steps.
      most_examples: The number of examples whose sum with noise cannot overflow.
    """

    clip_norm: float
    noise_multiplier: float
    bits: int
    most_examples: int

    @classmethod
    def of(
        cls,
        clip_norm: float,
        noise_multiplier: float,
        divisor: float,
    ) -> "Grid":
        """Returns the finest grid on which batches of about `divisor` examples do not overflow.

        A Poisson-sampled batch with the mean `divisor` has more examples than `most_examples` with
        a probability below 2^-64 (Bernstein's inequality).

        Raises:
          ValueError: A number is not positive and finite, or so many examples leave fewer than 8
            bits.
        """
        for name, value in (("clip_norm", clip_norm), ("noise_multiplier", noise_multiplier)):
            if not 0 < value < math.inf:
                raise ValueError(
                    f"{name} must be positive and finite for exact noise, got {value!r}."
                )
        # P(N >= mu + t) <= exp(-t^2 / (2 mu + 2 t / 3)), and 64 ln 2 = 44.4. So it suffices that
        # t^2 >= 88.8 (mu + t / 3).
        deviation = math.sqrt(92 * divisor)
        most = math.ceil(divisor + deviation + 64)
        # The finest grid first.
        for bits in range(MOST_BITS, _LEAST_BITS - 1, -1):
            grid = cls(clip_norm, noise_multiplier, bits, most)
            # No coordinate of a contribution is longer than the contribution.
            largest = math.isqrt(grid.longest)
            of_examples = most * largest
            of_noise = LARGEST * 2**bits
            fits = of_examples + of_noise <= _MOST_SUM
            # Steps are computed in float32, which has all integers up to this one.
            if fits and largest <= _MOST_COORDINATE:
                return grid
        raise ValueError(
            f"divisor={divisor:g} with noise_multiplier={noise_multiplier:g} is too large for "
            f"exact noise: sums of int32 would have a grid of fewer than {_LEAST_BITS} bits for a "
            "standard deviation. Take smaller batches, or noise that is not exact."
        )

    @property
    def step(self) -> float:
        """The distance of two points of the grid, in the units of the gradient."""
        return self.noise_multiplier * self.clip_norm * 2.0**-self.bits

    @property
    def longest(self) -> int:
        """The squared norm in steps that no contribution exceeds, at most (2^bits / sigma)^2."""
        # In rational numbers, so that no rounding lengthens the radius.
        sigma = fractions.Fraction(self.noise_multiplier)
        radius = 2**self.bits / sigma
        steps: int = math.floor(radius**2)
        return steps

    def at(self, step: Any = 0) -> GridAt:
        """Returns the numbers of the grid, which are those of every step."""
        # `longest` is up to 2^48, and programs have no integers of 64 bits without x64.
        high, low = divmod(self.longest, 2**32)
        scale = np.float32(_ROOM / self.step)
        # The root of the radius, so that both factors of a dense layer have about as many digits.
        # `longest` is the square of the radius.
        root = math.log2(max(1, self.longest)) / 4  # of the longest contribution
        unit = np.float32(2.0 ** min(_MOST_UNIT, round(root)))
        return GridAt(scale, np.float32(self.step), np.uint32(high), np.uint32(low), unit)


@dataclasses.dataclass(frozen=True, eq=False)
class GridSchedule:
    """The public grids of a schedule of noise. `GridSchedule.of` makes it.

    Attributes:
      clip_norm: C, in the units of the gradient.
      grids: A grid for each multiplier, all with one number of bits.
      places: int32 [steps], the grid of each step. Empty before the steps are planned.
    """

    clip_norm: float
    grids: tuple[Grid, ...] = ()
    places: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def of(cls, clip_norm: float, multipliers: Sequence[float], divisor: float) -> "GridSchedule":
        """Returns the grids of steps with these noise multipliers.

        Raises:
          ValueError: As `Grid.of`, for one of the multipliers.
        """
        # Equal multipliers share a grid, so a program holds a table of the different ones.
        values, places = np.unique(np.asarray(multipliers, np.float64), return_inverse=True)
        grids = [Grid.of(clip_norm, sigma, divisor) for sigma in values.tolist()]
        bits = min(grid.bits for grid in grids)
        # The noise of all steps has one number of bits, that of the coarsest grid.
        coarse = [dataclasses.replace(grid, bits=bits) for grid in grids]
        return cls(clip_norm, tuple(coarse), places.astype(np.int32))

    @property
    def bits(self) -> int:
        """The standard deviation of the noise of a step is 2^bits of its steps."""
        self._check()
        return self.grids[0].bits

    def at(self, step: Any) -> GridAt:
        """Returns the numbers of the grid of a step, an int32 scalar that may be traced.

        After the plan, sums are 0 and means are NaN.

        Raises:
          ValueError: No steps are planned.
        """
        self._check()
        planned = len(self.places)
        nan = np.float32(math.nan)
        # A scale of 0 makes all contributions 0, and a step of NaN makes the mean NaN.
        nothing = GridAt(np.float32(0), nan, np.uint32(0), np.uint32(0), np.float32(1))
        numbers = [*(grid.at() for grid in self.grids), nothing]
        if not isinstance(step, jax.core.Tracer):
            number = int(jax.device_get(step))
            place = self.places[number] if 0 <= number < planned else len(self.grids)
            return GridAt(*map(jax.device_put, numbers[place]))
        is_planned = (step >= 0) & (step < planned)
        place = jnp.asarray(self.places)[jnp.where(is_planned, step, 0)]
        place = jnp.where(is_planned, place, len(self.grids))
        tables = [np.stack(column) for column in zip(*numbers, strict=True)]
        return GridAt(*[jnp.asarray(table)[place] for table in tables])

    def _check(self) -> None:
        if not self.grids:
            raise ValueError(
                "steps must be planned for exact noise of a schedule, because each noise "
                "multiplier has a grid of its own. Use jaxdp.privatize(..., steps=steps), "
                "trainer.planned(steps), or `fit`, which plans its steps."
            )


def _integers(x: jax.Array, most: Any, is_number: jax.Array) -> jax.Array:
    """Returns rows [B, n] rounded towards 0 and cut to +- `most`, 0 where they are no numbers."""
    # A product of infinity and 0 is no number, and platforms differ in the integer that it becomes.
    x = jnp.where(is_number[:, None] & ~jnp.isnan(x), x, 0)
    return jnp.clip(x, -most, most).astype(jnp.int32)


def _kept(x: jax.Array, is_short: jax.Array) -> jax.Array:
    return jnp.where(along_batch(is_short, x.ndim), x, 0)


def _summed(x: jax.Array | Outer, is_short: jax.Array) -> jax.Array:
    """Returns the sum of the short rows, int32."""
    if isinstance(x, Outer):
        # A row of zeros in w is enough, since the other factor multiplies it.
        return dataclasses.replace(x, w=_kept(x.w, is_short)).summed()
    return jnp.sum(_kept(x, is_short), axis=0, dtype=jnp.int32)


def squared_norms(
    steps: Sequence[jax.Array | Outer],
) -> tuple[jax.Array, jax.Array]:
    """Returns the exact squared norms of rows, as an upper and a lower word.

    Args:
      steps: int32 [B, ...] of each leaf, from -(2^24 - 1) to 2^24 - 1, or factors of such integers.

    Returns:
      uint32 [B] each. An upper word of 2^30 stands for itself and all larger ones.
    """
    words = [_product_words(x) if isinstance(x, Outer) else _square_words(x) for x in steps]
    high = jnp.concatenate([high for high, _ in words], axis=1)
    low = jnp.concatenate([low for _, low in words], axis=1)
    zero = jnp.uint32(0)
    # XLA chooses the order. Sums of integers are equal in any, and one that is cut stays too long.
    sums: tuple[jax.Array, jax.Array] = lax.reduce((high, low), (zero, zero), _add_words, (1,))
    return sums


def _product_words(
    outer: Outer,
) -> tuple[jax.Array, jax.Array]:
    """Returns ||u||^2 ||w||^2 of rows, uint32 [B, 1], in two words."""
    of_u, of_w = (squared_norms([x]) for x in (outer.u, outer.w))
    is_long = jnp.zeros(len(outer.u), bool)
    halves = []
    for high, low in (of_u, of_w):
        is_long = is_long | (high > 0) | (low >= _MOST_SQUARES)
        # Halves of 13 bits, of numbers below 2^26. No product of two overflows a word.
        halves.append((low >> 13, low & 0x1FFF))
    (upper_u, lower_u), (upper_w, lower_w) = halves
    # (upper_u 2^13 + lower_u) (upper_w 2^13 + lower_w), with the powers 2^26, 2^13 and 1.
    of_upper = upper_u * upper_w
    of_both = upper_u * lower_w + lower_u * upper_w
    first = (of_upper >> 6, of_upper << 26)
    second = (of_both >> 19, of_both << 13)
    third = (jnp.zeros_like(of_both), lower_u * lower_w)
    high, low = _add_words(_add_words(first, second), third)
    # A factor of more than 26 bits has no halves of 13 bits, and its product counts as too long.
    high = jnp.where(is_long, jnp.uint32(_ENDLESS), high)
    return high[:, None], low[:, None]


def _square_words(
    steps: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of squares of blocks of a row, uint32 [B, blocks], in two words each."""
    size = math.prod(steps.shape[1:])
    rows = steps.reshape(len(steps), size)
    rows = jnp.abs(rows).astype(jnp.uint32)
    # Zeros add nothing to a sum of squares.
    rows = jnp.pad(rows, ((0, 0), (0, -size % _BLOCK)))
    blocks = rows.reshape(len(steps), -1, _BLOCK)
    # Both are below 2^12, since steps are cut to 24 bits.
    upper = blocks >> _HALF
    lower = blocks & (2**_HALF - 1)
    # k^2 = upper^2 2^24 + upper lower 2^13 + lower^2
    of_upper = jnp.sum(upper * upper, 2, dtype=jnp.uint32)
    of_both = jnp.sum(upper * lower, 2, dtype=jnp.uint32)
    of_lower = jnp.sum(lower * lower, 2, dtype=jnp.uint32)
    first = (of_upper >> 8, of_upper << 24)
    second = (of_both >> 19, of_both << 13)
    third = (jnp.zeros_like(of_lower), of_lower)
    both = _add_words(first, second)
    return _add_words(both, third)


def _add_words(
    left: tuple[jax.Array, jax.Array],
    right: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    low = left[1] + right[1]
    # An unsigned sum that has wrapped is smaller than its summands.
    carry = (low < left[1]).astype(jnp.uint32)
    high = left[0] + right[0]
    # Words are cut at every addition, so the upper one cannot wrap.
    high = jnp.minimum(high + carry, jnp.uint32(_ENDLESS))
    return high, low
