"""Rules of indexing, selection and order: gather, scatter, where, argmax, sort and top_k."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms.boxes import (
    Box,
    Equation,
    Interval,
    Operand,
    are_nonnegative,
    at_least_float32,
    inflate,
    is_float,
    is_nonnegative,
    lower,
    moved,
    register_rule,
    upper,
)
from jaxdp.transforms.interval_rules.endpoints import (
    NoRuleError,
    check_positions,
    empty_hull,
    hull_of_cases,
    narrow,
    summable,
    without_nan,
)
from jaxdp.transforms.interval_rules.exact import at_both_ends

# --- Reading and writing at known positions -----------------------------------------------------


@register_rule("gather", "dynamic_slice")
def _read_at(
    eqn: Equation,
    x: Operand,
    *positions: Operand,
) -> list[Box]:
    check_positions(positions)
    return at_both_ends(eqn, x, *positions, nonnegative=is_nonnegative(x))


@register_rule("dynamic_update_slice", "scatter")
def _write_at(eqn: Equation, *operands: Operand) -> list[Box]:
    # scatter(x, indices, updates), but dynamic_update_slice(x, update, *starts)
    if eqn.name == "scatter":
        positions = operands[1:2]
    else:
        positions = operands[2:]
    check_positions(positions)
    return at_both_ends(eqn, *operands, nonnegative=are_nonnegative(*operands))


@register_rule("scatter-add")
def _scatter_add(
    eqn: Equation,
    x: Operand,
    indices: Operand,
    updates: Operand,
) -> Operand:
    check_positions([indices])
    # An entry receives at most one update per index.
    terms = math.prod(indices.shape[:-1]) + 1
    if is_float(x):
        x = summable(_inflated(x, terms + 1), terms)
        updates = summable(_inflated(updates, terms + 1), terms)
    low = _added(eqn, lower(x), indices, lower(updates))
    high = _added(eqn, upper(x), indices, upper(updates))
    if not is_float(x):
        return Box(low, high)
    return narrow(eqn, low, high, underflows=terms)  # one for each addition


def _inflated(x: Operand, roundings: int) -> Operand:
    """Widens a term for a sum in float32, and for one that XLA rounds to 16 bits as it goes."""
    if jnp.finfo(x.dtype).bits < 32:
        x = inflate(x, roundings)
    return inflate(at_least_float32(x), roundings)


def _added(eqn: Equation, x: Any, indices: Any, updates: Any) -> jax.Array:
    """Adds updates as a scatter-add does, in the dtype of `x`.

    The equation has a program that adds numbers of its own dtype, and takes no others.
    """
    params = dict(eqn.params)
    for of_dtype in ("update_jaxpr", "update_consts"):
        params.pop(of_dtype)
    numbers = params.pop("dimension_numbers")
    return lax.scatter_add(x, indices, updates, numbers, **params)


@register_rule("select_n")
def _select(
    eqn: Equation,
    predicate: Operand,
    *cases: Operand,
) -> list[Box]:
    if isinstance(predicate, Interval):
        return [hull_of_cases(predicate, cases)]
    return at_both_ends(eqn, predicate, *cases, nonnegative=are_nonnegative(*cases))


# --- Order --------------------------------------------------------------------------------------


@register_rule("argmax", "argmin")
def _argmax(eqn: Equation, x: Operand) -> Operand:
    """Bounds the index by the first and the last entry that can be the largest."""
    (axis,) = eqn.params["axes"]
    if eqn.name == "argmax":
        low = lower(x)
        high = upper(x)
    else:
        low = -upper(x)
        high = -lower(x)
    largest_low = jnp.max(low, axis, keepdims=True)
    # A NaN compares as False, so it may win.
    may_win = ~(high < largest_low)
    first, last = _first_and_last(may_win, axis)
    dtype = eqn.outputs[0].dtype
    first = first.astype(dtype)
    last = last.astype(dtype)
    return Box(first, last)


def _first_and_last(
    flags: jax.Array,
    axis: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the first and of the last True along an axis."""
    # `argmax` of booleans is the first True.
    first = jnp.argmax(flags, axis)
    backwards = jnp.flip(flags, axis)
    last = flags.shape[axis] - 1 - jnp.argmax(backwards, axis)
    return first, last


def _may_stand(x: Operand, places: Any) -> jax.Array:
    """Returns whether entry n of the last axis may be at place p in ascending order.

    The result is a boolean [..., P, N]. For the entries [0, 1], [2, 3] and [2, 5], place 0 allows
    the first one, and the places 1 and 2 allow the two others.
    """

    def count_below(
        side: str,
        entries: jax.Array,
        bounds: jax.Array,
    ) -> jax.Array:
        """Returns how many entries of a row are below each bound (side "left"), or at most it."""
        rows = jnp.sort(entries)
        size = entries.shape[-1]
        find = jax.vmap(functools.partial(jnp.searchsorted, side=side))
        counts = find(rows.reshape(-1, size), bounds.reshape(-1, size))
        return counts.reshape(*bounds.shape[:-1], 1, size)

    # An entry stands behind those that are certainly smaller, and before those that are certainly
    # larger.
    first = count_below("left", upper(x), lower(x))
    behind = count_below("right", lower(x), upper(x))
    lead = (1,) * (x.ndim - 1)
    place = np.asarray(places).reshape(*lead, -1, 1)
    return (first <= place) & (place < behind)


def _axis_last(x: Operand, axis: int) -> Operand:
    return moved(lambda v: jnp.moveaxis(v, axis, -1), x)


@register_rule("top_k")
def _top_k(eqn: Equation, x: Operand) -> list[Box]:
    """Bounds the k largest entries, and the indices that each of them can have."""
    x = without_nan(x)
    axis = eqn.params.get("axis", x.ndim - 1)
    # The k-th largest entry rises with every entry, so its ends are those of all lower and of all
    # upper ends.
    low = eqn.bind(lower(x))[0]
    high = eqn.bind(upper(x))[0]
    index_dtype = eqn.outputs[1].dtype
    rows = _axis_last(x, axis)
    # Place 0 of `top_k` is the last one of an ascending order.
    descending = rows.shape[-1] - 1 - np.arange(low.shape[axis])
    may_stand = _may_stand(rows, descending)
    first, last = _first_and_last(may_stand, -1)
    first = jnp.moveaxis(first, -1, axis).astype(index_dtype)
    last = jnp.moveaxis(last, -1, axis).astype(index_dtype)
    return [Box(low, high), Box(first, last)]


@register_rule("sort")
def _sort(eqn: Equation, *operands: Operand) -> list[Box]:
    """Bounds sorted entries. Others that are sorted by them may stand wherever their key can."""
    keys = operands[: eqn.params["num_keys"]]
    axis = eqn.params["dimension"]
    is_uncertain = any(isinstance(key, Interval) for key in keys)
    if not is_uncertain:  # both ends have one order
        return at_both_ends(eqn, *operands, nonnegative=False)
    if len(keys) > 1:
        raise NoRuleError("It does not sort by several keys of which one is an interval.")
    key = _axis_last(without_nan(operands[0]), axis)
    others = [_axis_last(x, axis) for x in operands[1:]]
    # As in `top_k`: the entry at a place rises with every entry.
    results = [(jnp.sort(lower(key)), jnp.sort(upper(key)))]
    if others:
        may_stand = _may_stand(key, np.arange(key.shape[-1]))
    for x in others:
        # The hull of all entries that may stand at a place.
        largest, smallest = (jnp.asarray(end, x.dtype) for end in empty_hull(x.dtype))
        low = lower(x)[..., None, :]
        high = upper(x)[..., None, :]
        hull_low = jnp.where(may_stand, low, largest).min(-1)
        hull_high = jnp.where(may_stand, high, smallest).max(-1)
        results.append((hull_low, hull_high))

    def in_place(end: jax.Array) -> jax.Array:
        return jnp.moveaxis(end, -1, axis)

    return [Box(in_place(low), in_place(high)) for low, high in results]
