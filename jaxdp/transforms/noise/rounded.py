"""Normals rounded to a grid, from the words of the cipher by integers alone.

A value is round(2^s Z) for Z ~ N(0, 1). So an integer plus a value is the rounding of the integer
plus 2^s Z, and a sum of integers with such noise is post-processing of the Gaussian mechanism. No
float decides a value, so every platform draws the same bits.

|Z| = c + d is drawn by rejection, like the exact normals of Karney 2016 (arXiv:1303.6257):

    1. a slab [c, c + w), w = 1/16, c = w j, with probability proportional to exp(-c^2 / 2)
    2. d uniform in the slab
    3. accept with probability exp(-y), y = d (2 c + d) / 2 in [0, 1)

Step 3 compares uniform numbers (von Neumann 1951): with the first n for which y > u_1 > ... > u_n
ends, n is even with probability exp(-y). About 97 % of all values are accepted.

**How exact.** The words of the cipher are taken for uniform. Then a value differs in total
variation by at most 2^-94 from round(2^s Z). The terms, for each try of step 1:

* Slabs have integer weights out of 2^128, each at most 1 off: 2^-121 for 256 of them.
* d is the middle of one of 2^42 cells of width h = 2^-46. For the density p of Z, the middle times
  h differs from the integral over the cell by at most h^3 max |p''| / 24, and p'' = (x^2 - 1) p. So
  all cells differ by less than 2 h^2 / 24, which is 2^-95.5, and half of that in total variation.
* y has 95 bits and is exact. A comparison of two u of 96 bits takes equal ones for not less. The
  two are compared with probability y, so this is below 2^-96 times the mean of y, 1/38.
* |Z| >= 16 has a probability of 2^-187.

They add up to less than 2^-96.2 for each try, and the acceptance divides by 0.97.

**Speed.** The first words of each number decide almost all values: `_quick` draws four words for a
value. About one of 35 values stays open. These are gathered, and `_slow` decides them with all
words, the first ones included.
"""

import decimal
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms import chacha
from jaxdp.transforms.grids import LARGEST
from jaxdp.transforms.noise.words import cipher_key

# Slabs of width 1/16 up to LARGEST.
_SLABS = 16 * LARGEST
# Slabs below 3 standard deviations, which `_quick` tells apart. One of 370 values is beyond.
_NEAR_SLABS = 48
# y and u have 96 bits each, see the text above.
_COMPARED_WORDS = 3
# Comparisons that a block of the cipher has words for, besides a slab and a place in it.
_COMPARISONS = 3
# With fewer bits, `_magnitude` would shift a word by all of its 32 bits.
LEAST_BITS = 4


class _Lanes(NamedTuple):
    """The state of values that are drawn in turns. All arrays are [K].

    Attributes:
      turn: uint32 scalar.
      is_open: Whether a value is not yet accepted.
      is_fresh: Whether the next turn begins with a slab.
      is_even: Whether the number of falling u so far is even.
      last: uint32 [3, K], y or the last u.
      magnitude: int32, the rounded size of the value of this try.
    """

    turn: jax.Array
    is_open: jax.Array
    is_fresh: jax.Array
    is_even: jax.Array
    last: jax.Array
    magnitude: jax.Array


@functools.cache
def slab_thresholds() -> np.ndarray:
    """Returns uint32 [255, 4], the words of 2^128 P(slab <= j), rounded down.

    A uniform number of 128 bits belongs to the slab whose number is the count of thresholds that
    are not above it.
    """
    # 2^128 has 39 digits.
    with decimal.localcontext(prec=80):
        weights = [(-decimal.Decimal(j * j) / 512).exp() for j in range(_SLABS)]
        total = sum(weights)
        below = decimal.Decimal(0)
        rows = []
        # What is above all of these thresholds is in the last slab.
        for weight in weights[:-1]:
            below += weight
            share = below / total
            whole = int(share * 2**128)
            words = [whole >> shift & 0xFFFFFFFF for shift in (96, 64, 32, 0)]
            rows.append(words)
    return np.array(rows, np.uint32)


@functools.partial(jax.jit, static_argnums=(3, 4))
def rounded_normals(
    bits: int | jax.Array,
    number: jax.Array,
    key: jax.Array,
    size: int,
    dtype: Any = None,
) -> jax.Array:
    """Draws int32 [size] values round(2^bits Z), each at most 16 2^bits, for bits from 4 to 24.

    They are functions of the key, the number, the index and the size. `dtype` has no effect.
    """
    log_std = jnp.asarray(bits, jnp.uint32)
    key_words = cipher_key(key)
    first = _first_words(key_words, number, size)
    is_sure, magnitude = _quick(log_std, first)
    magnitude = _settled(log_std, key_words, number, first, ~is_sure, magnitude)
    is_negative = first[3] >> 31 == 1
    return jnp.where(is_negative, -magnitude, magnitude)


def _first_words(
    key_words: jax.Array,
    number: jax.Array,
    size: int,
) -> jax.Array:
    """Draws uint32 [4, size]: the first words of slab, place and u_1, and one for the sign."""
    count = -(-size // 4)
    counters = lax.iota(jnp.uint32, count)
    words = chacha.block(key_words, (counters, number, 0, chacha.NOISE))
    # A block serves four values, which lie `count` apart.
    of_blocks = words.reshape(4, 4, count)
    of_values = of_blocks.swapaxes(0, 1).reshape(4, -1)
    # XLA-CPU would compute the cipher again for each reader.
    first: jax.Array = lax.optimization_barrier(of_values[:, :size])
    return first


def _quick(
    bits: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns which values the first words accept for sure, and their magnitudes."""
    slab, is_tied = _slab_of_first(first[0])
    place = first[1]
    # d is below (d16 + 1) 2^-20, so 2^32 y is below d16 + 1 times (j 2^8 + (d16 + 1) 2^-9).
    d = place >> 16
    d = d + 1
    # d / 2, rounded up. The square of d itself, 2^32, would be no word.
    half = d + 1
    half = half >> 1
    # At most 2^16 times 48 times 2^8, so below 2^30.
    linear = d * slab << 8
    square = half * half >> 7
    most = linear + square + 1
    # With u_1 at least y the sequence ends at n = 0, which is even.
    is_sure = ~is_tied & (first[2] >= most)
    return is_sure, _magnitude(bits, slab, place)


def _slab_of_first(
    word: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the slab of a first word, and whether it may be another one.

    Comparisons with constants are quicker than a search on a CPU, which gathers thresholds.
    """
    slab = jnp.zeros_like(word)
    is_tied = jnp.zeros(word.shape, bool)
    for threshold in slab_thresholds()[:_NEAR_SLABS, 0]:
        slab += (word > threshold).astype(jnp.uint32)
        is_tied |= word == threshold
    return slab, is_tied | (slab == _NEAR_SLABS)


def _magnitude(
    bits: jax.Array,
    slab: jax.Array,
    place: jax.Array,
) -> jax.Array:
    """Returns round(2^bits (c + d)), int32. `place` has the first 32 bits of d."""
    # Twice the magnitude, without what is behind the point.
    of_slab = slab << (bits - 3)
    of_place = place >> (35 - bits)
    doubled = of_slab + of_place
    nearest = doubled + 1 >> 1
    return nearest.astype(jnp.int32)


def _settled(
    bits: jax.Array,
    key_words: jax.Array,
    number: jax.Array,
    first: jax.Array,
    is_open: jax.Array,
    magnitude: jax.Array,
) -> jax.Array:
    """Returns magnitudes with those that are open drawn by all words."""
    size = len(is_open)
    # One of 35 is open, so one round is enough, except for bad luck.
    most = size // 16 + 64
    room = min(size, most)

    def any_open(
        state: tuple[jax.Array, jax.Array],
    ) -> jax.Array:
        return state[0].any()

    def settle(
        state: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        is_open, magnitude = state
        # The places of open values, [room]. `size` stands for no value.
        (lanes,) = jnp.nonzero(is_open, size=room, fill_value=size)
        own_words = first[:, lanes]
        is_value = lanes < size
        drawn = _slow(bits, key_words, number, own_words, lanes, is_value)
        magnitude = magnitude.at[lanes].set(drawn, mode="drop")
        return is_open.at[lanes].set(False, mode="drop"), magnitude

    return lax.while_loop(any_open, settle, (is_open, magnitude))[1]


def _slow(
    bits: jax.Array,
    key_words: jax.Array,
    number: jax.Array,
    first: jax.Array,
    lanes: jax.Array,
    is_open: jax.Array,
) -> jax.Array:
    """Draws the magnitudes [K] of the values with these indices, whatever it takes."""
    counters = lanes.astype(jnp.uint32)
    # The first words of the slab, the place and u_1.
    places = jnp.array([0, 4, 6])

    def turn(
        state: _Lanes,
    ) -> _Lanes:
        words = chacha.block(key_words, (counters, number, state.turn, chacha.NOISE))
        # In the first turn, the words that `_quick` has seen are the first ones. One body for all
        # turns compiles in half the time.
        with_seen = words.at[places].set(first[:3])
        is_first = state.turn == 1
        words = jnp.where(is_first, with_seen, words)
        return _after_turn(bits, state, words)

    # From the words, so that the carry varies over the same mesh axes as what the loop returns.
    zeros = first[2] * 0
    start = _Lanes(
        turn=jnp.uint32(1),
        is_open=is_open,
        is_fresh=zeros == 0,
        is_even=zeros == 0,
        last=jnp.stack([zeros] * _COMPARED_WORDS),
        magnitude=zeros.astype(jnp.int32),
    )
    return lax.while_loop(lambda state: state.is_open.any(), turn, start).magnitude


def _after_turn(
    bits: jax.Array,
    state: _Lanes,
    words: jax.Array,
) -> _Lanes:
    """Returns the state after a turn with one block, uint32 [16, K].

    Words 0 to 3 are for the slab, 4 and 5 for the place, and 6 to 14 for three u.
    """
    slab = _slab(words[:4])
    fresh_magnitude = _magnitude(bits, slab, words[4])
    magnitude = jnp.where(state.is_fresh, fresh_magnitude, state.magnitude)
    fresh_y = exponent(slab, words[4], words[5])
    last = jnp.where(state.is_fresh, fresh_y, state.last)
    is_even = state.is_even | state.is_fresh
    has_ended = jnp.zeros_like(is_even)
    for start in range(6, 6 + _COMPARISONS * _COMPARED_WORDS, _COMPARED_WORDS):
        u = words[start : start + _COMPARED_WORDS]
        is_less = _is_less(u, last)
        falls = ~has_ended & is_less
        last = jnp.where(falls, u, last)
        is_even = is_even ^ falls
        has_ended = ~falls
    # A chain that goes on uses the u of the next turn, and leaves its slab and place.
    is_accepted = has_ended & is_even
    # A value that was accepted keeps its magnitude.
    return _Lanes(
        turn=state.turn + 1,
        is_open=state.is_open & ~is_accepted,
        is_fresh=has_ended,
        is_even=is_even,
        last=last,
        magnitude=jnp.where(state.is_open, magnitude, state.magnitude),
    )


def _slab(
    words: jax.Array,
) -> jax.Array:
    """Returns the slab of uniform numbers, uint32 [4, K]: the thresholds that are not above."""
    thresholds = jnp.asarray(slab_thresholds())
    half = jnp.uint32(_SLABS // 2)
    halvings = jnp.uint32(_SLABS.bit_length() - 1)

    def halved(i: jax.Array, slab: jax.Array) -> jax.Array:
        # The slab is at least `middle` if the threshold before that is not above.
        step = half >> i
        middle = slab + step
        # [4, K], the first word of each in row 0.
        threshold = thresholds[middle - 1].T
        is_below = _is_less(words, threshold)
        return jnp.where(is_below, slab, middle)

    # Computed from the words, so that slabs vary over the same mesh axes.
    zeros = words[0] * 0
    slab: jax.Array = lax.fori_loop(jnp.uint32(0), halvings, halved, zeros)
    return slab


def _is_less(
    words: jax.Array,
    others: jax.Array,
) -> jax.Array:
    """Returns whether numbers are less than others, uint32 [W, K] with the highest word first."""
    less = jnp.zeros(words.shape[1:], bool)
    # From the lowest word up, so the highest word that differs decides.
    for word, other in zip(words[::-1], others[::-1], strict=True):
        is_below = word < other
        is_equal = word == other
        less = is_below | (is_equal & less)
    return less


def exponent(
    slab: jax.Array,
    high: jax.Array,
    low: jax.Array,
) -> jax.Array:
    """Returns 2^96 y, uint32 [3, K], exactly.

    With D the first 42 bits of the place and X = 2 D + 1, d is X 2^-47, the middle of its cell. So
    y = 2 X (j 2^44 + X) 2^-96.
    """
    # D is `high` and the 10 highest bits of `low`. Limbs have 16 bits, the lowest first.
    rest = low >> 22
    end = (high & 0xF) << 12
    lowest = (rest << 2) + 2 | end
    middle = high >> 4 & 0xFFFF
    highest = high >> 20
    # 4 D + 2.
    twice_x = (lowest, middle, highest)
    end = (high & 0x1F) << 11
    lowest = (rest << 1) + 1 | end
    middle = high >> 5 & 0xFFFF
    end = (slab & 0xF) << 12
    upper = high >> 21 | end
    highest = slab >> 4
    # j 2^44 + 2 D + 1.
    factor = (lowest, middle, upper, highest)
    limbs = _product(twice_x, factor)
    # y is below 1, so the seventh limb is 0.
    words = [high << 16 | low for high, low in zip(limbs[5::-2], limbs[4::-2], strict=False)]
    return jnp.stack(words)


def _product(
    left: tuple[jax.Array, ...],
    right: tuple[jax.Array, ...],
) -> list[jax.Array]:
    """Returns the limbs of a product of numbers in limbs of 16 bits, the lowest first."""
    # At most six parts of 16 bits meet in a column, which is a word.
    columns = [jnp.zeros_like(left[0]) for _ in range(len(left) + len(right))]
    for i, x in enumerate(left):
        for k, y in enumerate(right):
            partial = x * y
            place = i + k
            columns[place] += partial & 0xFFFF
            columns[place + 1] += partial >> 16
    limbs = []
    carry = jnp.zeros_like(left[0])
    for column in columns:
        column = column + carry
        limbs.append(column & 0xFFFF)
        carry = column >> 16
    return limbs
