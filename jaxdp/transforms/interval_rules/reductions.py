"""Rules of sums, products over axes, and max pooling."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms.boxes import (
    Box,
    Equation,
    Interval,
    Operand,
    at_least_float32,
    inflate,
    is_float,
    is_nonnegative,
    lower,
    register_rule,
    upper,
    widen,
)
from jaxdp.transforms.interval_rules.endpoints import (
    Ends,
    NoRuleError,
    axes_last,
    corner_products,
    most,
    narrow,
    summable,
)

# --- Sums and products --------------------------------------------------------------------------


@register_rule("reduce_sum", "cumsum", "reduce_window_sum")
def _sum(eqn: Equation, x: Operand) -> Operand:
    """Bounds sums of entries, which may repeat entries. Integers are exact."""
    if not is_float(x):
        return Box(*eqn.ends(x))
    if eqn.name == "reduce_window_sum":
        terms = math.prod(eqn.params["window_dimensions"])
    elif eqn.name == "reduce_sum":
        terms = math.prod(x.shape[axis] for axis in eqn.params["axes"])
    else:
        terms = x.shape[eqn.params["axis"]]
    # An entry of a sum passes at most as many additions as there are terms.
    summands = x
    if eqn.name != "reduce_sum" and jnp.finfo(x.dtype).bits < 32:
        # XLA rounds each of these sums to 16 bits after every addition.
        summands = inflate(x, terms + 2)
    summands = inflate(at_least_float32(summands), terms + 2)
    nonnegative = is_nonnegative(x)
    # Without a negative term a part of a sum is at most the sum.
    low, high = eqn.ends(summands if nonnegative else summable(summands, terms))
    return narrow(eqn, low, high, nonnegative=nonnegative, underflows=terms + 1)


def _check_float(x: Operand) -> None:
    if not is_float(x):
        raise NoRuleError("It does not support products over an interval of integers.")


@register_rule("reduce_prod")
def _reduce_prod(eqn: Equation, x: Operand) -> Operand:
    """Multiplies the first half of the factors with the second half, until one is left."""
    _check_float(x)
    nonnegative = is_nonnegative(x)
    factors = axes_last(at_least_float32(x), eqn.params["axes"])
    low = lower(factors)
    high = upper(factors)
    while low.shape[-1] > 1:
        half = low.shape[-1] // 2
        first = Box(low[..., :half], high[..., :half], nonnegative=nonnegative)
        second = slice(half, 2 * half)
        others = Box(low[..., second], high[..., second], nonnegative=nonnegative)
        # Each multiplication bounds its own rounding and underflow.
        below, above = widen(*corner_products(first, others))
        # An odd number of factors leaves one for the next round.
        low_left = low[..., 2 * half :]
        low = jnp.concatenate([below, low_left], -1)
        high_left = high[..., 2 * half :]
        high = jnp.concatenate([above, high_left], -1)
    return narrow(eqn, low[..., 0], high[..., 0], nonnegative=nonnegative)


@register_rule("cumprod")
def _cumprod(eqn: Equation, x: Operand) -> Operand:
    """Multiplies neighbours, then pairs of them, and so on."""
    _check_float(x)
    nonnegative = is_nonnegative(x)
    x = at_least_float32(x)

    def multiply(a: Ends, b: Ends) -> Ends:
        first = Box(*a, nonnegative=nonnegative)
        second = Box(*b, nonnegative=nonnegative)
        return widen(*corner_products(first, second))

    reverse = eqn.params["reverse"]
    axis = eqn.params["axis"]
    ends = (lower(x), upper(x))
    # Corners of corners are corners, so any order of the products gives the same ends.
    low, high = lax.associative_scan(multiply, ends, reverse=reverse, axis=axis)
    return narrow(eqn, low, high, nonnegative=nonnegative)


# --- The derivative of max pooling --------------------------------------------------------------


@register_rule("select_and_scatter_add")
def _select_and_scatter_add(
    eqn: Equation,
    source: Operand,
    x: Operand,
) -> Operand:
    """Bounds the derivative of max pooling, given the cotangents `source` of the windows.

    A cotangent may go to any entry that can be the largest of its window. All windows are treated
    at once, one place in the window after the other.
    """
    # A minimum of x is selected as a maximum of -x is.
    if eqn.params["select_prim"].name == "le":  # min pooling
        if isinstance(x, Interval):
            x = Box(-upper(x), -lower(x))
        else:
            x = -x
    strides = eqn.params["window_strides"]
    padding = [(int(before), int(behind), 0) for before, behind in eqn.params["padding"]]
    crop = [(-before, -behind, 0) for before, behind, _ in padding]
    windows = source.shape
    places = list(np.ndindex(*eqn.params["window_dimensions"]))

    def padded(end: jax.Array) -> jax.Array:
        # No entry is below the padding, so it wins only where nothing is larger.
        smallest = jnp.asarray(-jnp.inf, x.dtype)
        return lax.pad(end, smallest, padding)

    lows = padded(lower(x))
    highs = padded(upper(x))
    # Entries may be -inf, as the padding is.
    entries = lax.pad(jnp.ones(x.shape, bool), jnp.zeros((), bool), padding)
    low_entries = [_entries_at(lows, place, windows, strides) for place in places]
    high_entries = [_entries_at(highs, place, windows, strides) for place in places]
    is_entry = [_entries_at(entries, place, windows, strides) for place in places]
    # Sums of cotangents in the padded shape. The padding is cut off at the end.
    low = jnp.zeros_like(lows)
    high = jnp.zeros_like(lows)
    zero = jnp.zeros((), low.dtype)
    # An entry is in at most as many windows as a window has places.
    cotangents = inflate(source, len(places) + 1)
    nothing = jnp.full_like(low_entries[0], -jnp.inf)
    none = jnp.zeros_like(is_entry[0])
    x_is_interval = isinstance(x, Interval)

    def selection(i: int) -> tuple[jax.Array, jax.Array]:
        """Returns whether windows certainly, and possibly, select their entry i."""
        entry = low_entries[i]
        earlier = most([nothing, *low_entries[:i]])
        later = most([nothing, *low_entries[i + 1 :]])
        if not x_is_interval:  # ties select the first entry of the window
            certain = (entry > earlier) & (entry >= later)
            # In a window of -inf the padding before the first entry may be selected in its place,
            # as it is on a CPU.
            is_lost = jnp.isneginf(most([entry, earlier, later]))
            is_first = is_entry[i] & ~most([none, *is_entry[:i]])
            possible = certain | (is_lost & is_first)
            return (possible if i == 0 else certain), possible
        rivals = most([nothing, *high_entries[:i], *high_entries[i + 1 :]])
        certain = entry > rivals
        possible = ~(high_entries[i] < jnp.maximum(earlier, later))
        return certain, possible

    for i, place in enumerate(places):
        certain, possible = selection(i)
        # The cotangent may go elsewhere, so 0 is possible too.
        negative = jnp.minimum(cotangents.lower, 0)
        if_possible = jnp.where(possible, negative, 0)
        share_low = jnp.where(certain, cotangents.lower, if_possible)
        positive = jnp.maximum(cotangents.upper, 0)
        if_possible = jnp.where(possible, positive, 0)
        share_high = jnp.where(certain, cotangents.upper, if_possible)
        spread = _spread_of(place, windows, strides, low.shape)
        # Windows that overlap send their cotangents to one entry, which adds them.
        low = low + lax.pad(share_low, zero, spread)
        high = high + lax.pad(share_high, zero, spread)
    low = lax.pad(low, zero, crop)
    high = lax.pad(high, zero, crop)
    low, high = widen(low, high)
    return Box(low, high)


def _entries_at(
    x: jax.Array,
    place: tuple[int, ...],
    windows: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Returns the entry at one place of every window."""
    limits = []
    for start, count, stride in zip(place, windows, strides, strict=True):
        last = start + (count - 1) * stride
        limits.append(last + 1)
    return lax.slice(x, place, limits, strides)


def _spread_of(
    place: tuple[int, ...],
    windows: Sequence[int],
    strides: Sequence[int],
    shape: Sequence[int],
) -> list[tuple[int, int, int]]:
    """Returns the padding that puts one value per window at a place of the windows of an array."""
    padding = []
    for start, count, stride, size in zip(place, windows, strides, shape, strict=True):
        last = start + (count - 1) * stride
        padding.append((start, size - last - 1, stride - 1))
    return padding
