"""Discrete Laplace noise from the words of the cipher, by integers alone.

This is Canonne, Kamath and Steinke 2020 (arXiv:2004.00010), Algorithms 1 and 2. A scale is a
fraction t / 2^s of integers. A value is the difference of two geometrics, each drawn like this:

    1. u uniform in 0, ..., t - 1, until Bernoulli(exp(-u / t)) is 1
    2. v = the number of times that Bernoulli(exp(-1)) is 1 before it is 0
    3. the geometric is floor((u + t v) / 2^s)

u + t v has a probability proportional to exp(-(u + t v) / t). So P(geometric >= k) is
exp(-k 2^s / t), and the difference is k with a probability proportional to exp(-|k| 2^s / t). The
paper draws a sign instead of a second geometric, which is the same law.

Bernoulli(exp(-n / t)) with n <= t compares integers: A_k is 1 with probability n / (t k), for k =
1, 2, ... until A_k is 0. The last k is odd with probability exp(-n / t). A_k is whether a uniform
integer below t k is below n. Such an integer is a word w modulo t k. A word at or above the last
multiple of t k is left out and another one drawn, so no integer is preferred.

**How exact.** The words of the cipher are taken for uniform. Then every probability is as above,
but for two ends: k stops at 255, and v at 8191. So a value differs in total variation from its law
by at most 2^-1600, without a logarithm or a float. A pure epsilon omits that mass.

**Time.** Turns depend on words alone, and so do not tell the value that gets the noise.
"""

import fractions
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms import chacha
from jaxdp.transforms.noise.words import cipher_key

# t is below 2^24, and s at most 18. With k up to 255, t k is a word.
_SIGNIFICANT = 24
_MOST_SHIFT = 18
_LAST = 255
# v (t mod 2^s) + u is then a word, and v (t >> s) an int32.
_MOST_WHOLE = 2**13 - 1
_TOP = 2**32 - 1
_BIAS = 127  # of the exponent of a float32


class _Lanes(NamedTuple):
    """The state of geometrics that are drawn in turns. All arrays are [K].

    Attributes:
      is_open: Whether the geometric is not yet drawn.
      is_counting: Whether u is drawn, and v is counted.
      k: uint32, the number of the next comparison, or 0 where u is to be drawn.
      u: uint32.
      v: uint32.
    """

    is_open: jax.Array
    is_counting: jax.Array
    k: jax.Array
    u: jax.Array
    v: jax.Array


def upward(scale: Any) -> float:
    """Returns a float32 that is not below a number or a fraction, and near it."""
    exact = scale if isinstance(scale, fractions.Fraction) else fractions.Fraction(float(scale))
    narrow = np.float32(float(exact))
    if fractions.Fraction(float(narrow)) < exact:
        narrow = np.nextafter(narrow, np.float32(math.inf))
    return float(narrow)


def _fraction(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns t and s, uint32, with t / 2^s at least the scale: float32, above 0, at most 2^18.

    It is the scale itself, or the next multiple of 2^-18 for one below 64.
    """
    # The scale is positive, so there is no sign before the exponent.
    exponent = lax.bitcast_convert_type(scale, jnp.int32) >> 23
    # t then has 24 bits, as many as a float32.
    shift = jnp.minimum(_SIGNIFICANT - 1 - (exponent - _BIAS), _MOST_SHIFT)
    factor = lax.bitcast_convert_type(shift + _BIAS << 23, jnp.float32)
    # The product with a power of two is exact.
    steps = jnp.ceil(scale * factor)
    return jnp.maximum(steps.astype(jnp.uint32), 1), shift.astype(jnp.uint32)


@functools.partial(jax.jit, static_argnums=(3, 4))
def discrete_values(
    number: jax.Array,
    scale: float | jax.Array,
    key: jax.Array,
    size: int,
    dtype: Any = None,
) -> jax.Array:
    """Draws int32 [size] values k of probability proportional to exp(-|k| / scale).

    The scale is a float32, and a multiple of 2^-18, or the next one above. `dtype` has no effect.
    """
    t, shift = _fraction(jnp.asarray(scale, jnp.float32))
    lanes = _drawn(t, cipher_key(key), number, 2 * size)
    # floor((u + t v) / 2^s) with t = (t >> s) 2^s + below, so that no product exceeds a word.
    whole = lanes.v * (t >> shift)
    below = t & ((jnp.uint32(1) << shift) - 1)
    rest = lanes.v * below + lanes.u >> shift
    geometric = (whole + rest).astype(jnp.int32)
    values: jax.Array = geometric[:size] - geometric[size:]
    return values


class _Cells(NamedTuple):
    """What the geometrics are drawn from. All arrays end with the axis of the lanes, [K].

    Attributes:
      t: uint32.
      keys: uint32 [8, K], the cipher's keys.
      counters, numbers: uint32, words of the cipher's nonce.
    """

    t: jax.Array
    keys: jax.Array
    counters: jax.Array
    numbers: jax.Array


def _drawn(t: jax.Array, key_words: jax.Array, number: jax.Array, size: int) -> _Lanes:
    """Returns the lanes of `size` geometrics, all closed."""
    counters = lax.iota(jnp.uint32, size)
    lanes: _Lanes = _of_cells(
        _Cells(
            jnp.broadcast_to(t, (size,)),
            jnp.broadcast_to(key_words[:, None], (8, size)),
            counters,
            jnp.broadcast_to(jnp.asarray(number, jnp.uint32), (size,)),
        )
    )
    return lanes


@jax.custom_batching.custom_vmap
def _of_cells(cells: _Cells) -> _Lanes:
    """Returns the closed lanes of cells. A lane depends on its own cell only."""
    size = cells.counters.shape[0]
    # One of 14 is open after a turn, so one round of these is enough, except for bad luck.
    room = size // 8 + 64
    # Computed from the cells, so that the lanes vary over the same mesh axes as the words.
    nonce = cells.counters + cells.numbers
    zeros = 0 * (cells.t + cells.keys[0] + nonce)
    start = _Lanes(zeros == 0, zeros == 1, zeros, zeros, zeros)
    first_turn = zeros[:1].sum()
    if size <= room:
        return _after_turns(cells, start, first_turn)
    lanes = _after_block(cells.t, start, _words(cells, 0))

    def settle(lanes: _Lanes) -> _Lanes:
        (places,) = jnp.nonzero(lanes.is_open, size=room, fill_value=size)
        inside = jnp.minimum(places, size - 1)
        own = jax.tree.map(lambda x: x[inside], lanes)
        own = own._replace(is_open=own.is_open & (places < size))
        own_cells = jax.tree.map(lambda x: x[..., inside], cells)
        # These lanes are all closed then, so the turns of the others begin at 1 too.
        own = _after_turns(own_cells, own, first_turn + 1)
        put = lambda x, y: x.at[places].set(y, mode="drop")  # noqa: E731
        settled: _Lanes = jax.tree.map(put, lanes, own)
        return settled

    closed: _Lanes = lax.while_loop(_is_open, settle, lanes)
    return closed


def _after_turns(cells: _Cells, lanes: _Lanes, first_turn: jax.Array) -> _Lanes:
    """Returns the lanes, all closed, after turns from the first one on."""

    def again(state: tuple[jax.Array, _Lanes]) -> tuple[jax.Array, _Lanes]:
        turn, lanes = state
        words = _words(cells, turn)
        return turn + 1, _after_block(cells.t, lanes, words)

    start = (first_turn, lanes)
    closed: _Lanes
    _, closed = lax.while_loop(lambda state: _is_open(state[1]), again, start)
    return closed


@_of_cells.def_vmap
def _of_batched_cells(size: int, is_batched: Sequence[Any], cells: _Cells) -> tuple[_Lanes, _Lanes]:
    """Returns the lanes of many calls, drawn as one call's.

    A loop that is mapped goes on for all calls until the last one is done: 20 times the time for
    12,000 conversations of an audit.
    """

    def joined(x: jax.Array, is_mapped: bool) -> jax.Array:
        if not is_mapped:
            x = jnp.broadcast_to(x, (size, *x.shape))
        rows = jnp.moveaxis(x, 0, -2)
        return rows.reshape(*rows.shape[:-2], -1)

    lanes = _of_cells(jax.tree.map(joined, cells, is_batched[0]))
    divided = jax.tree.map(lambda x: x.reshape(size, -1), lanes)
    all_mapped = jax.tree.map(lambda _: True, divided)
    return divided, all_mapped


def _words(cells: _Cells, turn: Any) -> jax.Array:
    """Returns the words of a turn, uint32 [16, K]."""
    return chacha.block(cells.keys, (cells.counters, cells.numbers, turn, chacha.NOISE))


def _is_open(lanes: _Lanes) -> jax.Array:
    return lanes.is_open.any()


def _after_block(t: jax.Array, lanes: _Lanes, words: jax.Array) -> _Lanes:
    """Returns the lanes after a turn for each row of words, uint32 [16, K]."""

    def turn(i: jax.Array, lanes: _Lanes) -> _Lanes:
        return after_word(t, lanes, words[i])

    after: _Lanes = lax.fori_loop(0, len(words), turn, lanes)
    return after


def after_word(t: jax.Array, lanes: _Lanes, word: jax.Array) -> _Lanes:
    """Returns the lanes after one word each, uint32 [K]."""
    k, u = lanes.k, lanes.u
    limit = t * jnp.maximum(k, 1)  # t itself for u, at k = 0
    uniform = word % limit
    # Whether the word is below the last multiple of the limit, without a second division.
    is_fair = word - uniform <= jnp.uint32(_TOP) - limit
    draws = is_fair & (k == 0)
    compares = is_fair & (k > 0)
    # exp(-t / t) = exp(-1) for v, and exp(-u / t) for u.
    n = jnp.where(lanes.is_counting, t, u)
    goes_on = compares & (uniform < n)  # A_k is 1
    ends = compares & ~goes_on
    is_one = ends & (k & 1 == 1)
    is_zero = ends & ~is_one
    counts = is_one & lanes.is_counting
    # For v, A_1 is 1 without a comparison.
    next_k = jnp.where(goes_on, jnp.minimum(k + 1, _LAST), k)
    next_k = jnp.where(draws, 1, next_k)
    next_k = jnp.where(is_one, 2, next_k)
    next_k = jnp.where(is_zero, 0, next_k)
    is_open = lanes.is_open & ~(is_zero & lanes.is_counting)
    v = jnp.minimum(lanes.v + counts.astype(jnp.uint32), _MOST_WHOLE)
    return _Lanes(
        is_open,
        lanes.is_counting | (is_one & lanes.is_open),
        next_k,
        jnp.where(lanes.is_open & draws, uniform, u),
        jnp.where(lanes.is_open, v, lanes.v),
    )
