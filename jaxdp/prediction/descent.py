"""The set of descent directions of a batch: bounds of the mean clipped gradient.

1. `Gradients` bounds every record's gradient over a box of parameters (lines 6 and 7 of Algorithm 1
   of arXiv:2406.13433).
2. `DESCENT` has, for each threat, bounds of the mean when up to k records change, by Theorem 4.6
   or by T4, T11 and T12 of docs/design/prediction.md.

The code computes lower ends only. An upper end is the negative of the lower end of negated
gradients.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.prediction.checks import one_of
from jaxdp.prediction.plan import Plan, Threat
from jaxdp.prediction.sums import SHIFT, Total, add_to, add_units, add_up, carry, cut_up, narrow
from jaxdp.transforms.boxes import lower, slack, unchecked, upper
from jaxdp.transforms.intervals import bound, stage
from jaxdp.transforms.precision import in_full_precision

# Halvings of the interval that contains the threshold of the largest entries (T6).
_HALVINGS = 8

Leaves = list[jax.Array]
LeafBounds = tuple[Leaves, Leaves]  # lower and upper ends of leaves


class Descent(NamedTuple):
    """Bounds of the mean gradient of a batch over a box of parameters.

    Attributes:
      sums: `sums(box)` returns a pytree of arrays that all k share.
      bounds: `bounds(sums, box, k)` bounds the mean gradient when k records change.
    """

    sums: Callable[[LeafBounds], Any]
    bounds: Callable[[Any, LeafBounds, jax.Array], LeafBounds]


# --- Gradients and their bounds -----------------------------------------------------------------


class Batch(NamedTuple):
    """A batch in blocks [outer, records, ...]. A place without a record has weight 0.

    Attributes:
      records: The examples, and their weights.
      fixed: The values that do not depend on the box of parameters, the weights, and whether a
        place has a record that may change.
      size: The number of records.
      changeable: The number of records that may change.
    """

    records: Any
    fixed: Any
    size: jax.Array
    changeable: jax.Array

    def at_most(self, k: jax.Array) -> jax.Array:
        """Returns how many of k changes this batch can have."""
        return jnp.minimum(k, self.changeable)


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of single records, their bounds over a box, and sums of both over a batch.

    Attributes:
      plan: The static part of the run.
      gradient: `gradient(moving, record) -> leaves`.
      stages: The bounds in three stages: the part without the box (frozen layers), the part with
        it, and the final outer products.
    """

    plan: Plan
    gradient: Callable[[Leaves, Any], Leaves]
    stages: Sequence[Callable[..., Any]]

    @classmethod
    def of(
        cls,
        loss_fn: Any,
        plan: Plan,
        moving: Leaves,
        frozen: Leaves,
        data: Any,
    ) -> "Gradients":
        """Returns the gradients of `loss_fn` with respect to the trained leaves."""

        def gradient(moving: Leaves, record: Any) -> Leaves:
            example, weight = record

            def loss(moving: Leaves) -> jax.Array:
                value = loss_fn(plan.layout.join(moving, frozen), example)
                return value * weight.astype(value.dtype)

            return jax.grad(loss)(moving)

        record = one_of(data), jax.ShapeDtypeStruct((), plan.grid.dtype)
        stages = stage(gradient, moving, record, product=plan.product)
        # The boxes contain training in the precision of its dtype, and a TPU multiplies in bfloat16
        # by default.
        return cls(plan, in_full_precision(gradient), stages)

    def batch(self, data: Any, rows: jax.Array) -> Batch:
        """Returns the records of `rows` of `Arrays.order`."""
        rows = rows.reshape(self.plan.blocks[0], -1)
        may_change = rows >= 0
        is_public = rows < -1
        # `Arrays.order` has -2 - row for a public record.
        places = jnp.where(is_public, -2 - rows, rows)
        weights = (places >= 0).astype(self.plan.grid.dtype)
        # A place without a record reads row 0, with the weight 0.
        first_for_none = jnp.maximum(places, 0)
        examples = jax.tree.map(lambda x: x[first_for_none], data)
        records = examples, weights
        # Once for the batch, and not once for each k.
        values = lax.map(jax.vmap(self.stages[0]), records)
        fixed = values, weights, may_change
        size = jnp.sum(weights)
        changeable = jnp.sum(may_change)
        return Batch(records, fixed, size, changeable)

    def mean(self, params: Leaves, batch: Batch) -> Leaves:
        """Returns the mean clipped gradient, D of `train_with_bounds`."""
        grid = self.plan.grid

        def summands(records: Any) -> Leaves:
            grads = jax.vmap(lambda record: self.gradient(params, record))(records)
            sums = []
            for grad in grads:
                bits = grid.bits(grad, nearest=True)
                sums.append(grid.sum(bits, nearest=True))
            return sums

        totals = add_up(grid, self.plan.blocks, params, batch.records, lambda x: x, summands)
        grads = [grid.mean(total, nearest=True) for total in totals]
        if self.plan.threat == "replace_per_batch":
            # Here a mean is over the records of the batch, as published.
            return [g * (grid.divisor / batch.size) for g in grads]
        return grads

    def factors(self, box: LeafBounds, fixed: Any) -> Any:
        """Computes lines 6 and 7 of Algorithm 1 up to outer products, for a block of records."""
        boxes = [unchecked(low, high) for low, high in zip(*box, strict=True)]
        values, weights, may_change = fixed

        def of_record(value: Any) -> Any:
            return self.stages[1](boxes, value)

        return jax.vmap(of_record)(values), weights, may_change

    def bounds(self, factors: Any) -> Leaves:
        """Returns lower bounds of each record's gradient, then of its negative.

        The leaves are [records, ...].
        """
        ends = jax.vmap(self.stages[2])(factors[0])
        lows = []
        negated_highs = []
        for low, high in ends:
            lows.append(low)
            negated_highs.append(-high)
        return lows + negated_highs

    def bits(self, factors: Any) -> Leaves:
        """Returns `bounds`, clipped and rounded down to the grid."""
        grid = self.plan.grid
        weights = factors[1]
        bits = []
        for x in self.bounds(factors):
            # A place without a record adds neither a unit of rounding nor the NaN of 0 * inf.
            is_record = _per_record(weights, x) > 0
            bits.append(jnp.where(is_record, grid.bits(x), grid.bias()))
        return bits

    def changed(
        self,
        box: LeafBounds,
        records: Any,
        unchanged: Leaves,
    ) -> Leaves:
        """Returns the least integer contributions of a block's records once they change."""
        plan = self.plan
        poisoning = plan.poisoning
        # A removed record contributes 0 (T11).
        if poisoning is None:
            return [jnp.zeros_like(x) for x in unchanged]
        bias = plan.grid.bias()
        boxes = [unchecked(low, high) for low, high in zip(*box, strict=True)]

        def of_result(result: Any, weight: jax.Array) -> Leaves:
            arguments = boxes, (result, weight)
            ends, _ = bound(self.gradient, arguments, product=plan.product)
            lows = [lower(x) for x in ends]
            lows += [-upper(x) for x in ends]
            return [plan.grid.bits(x) for x in lows]

        def of_record(example: Any, weight: jax.Array) -> Leaves:
            results = poisoning.results(example)
            bits = jax.vmap(of_result, (0, None))(results, weight)
            # The worst of all labels that the record can get (T12).
            least = [jnp.min(x, axis=0) for x in bits]
            return [x - bias for x in least]

        return jax.vmap(of_record)(*records)

    def total(
        self,
        box: LeafBounds,
        batch: Batch,
        summands: Callable[[Any], Leaves],
        copies: int = 1,
    ) -> list[Total]:
        """Returns sums over the batch of `summands(factors)`, which has `copies` of all ends."""
        like = [*box[0], *box[1]] * copies
        factors = functools.partial(self.factors, box)
        return add_up(self.plan.grid, self.plan.blocks, like, batch.fixed, factors, summands)


def _per_record(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Reshapes weights [records] so that they broadcast to x [records, ...]."""
    ones = (1,) * (x.ndim - 1)
    return weights.reshape(-1, *ones)


def _from_lower_ends(lows: Leaves) -> LeafBounds:
    """Returns bounds, from lower ends of the leaves and then of their negatives."""
    half = len(lows) // 2
    return lows[:half], [-low for low in lows[half:]]


# --- Records are added or removed (T4) ----------------------------------------------------------


def _add_remove(gradients: Gradients, batch: Batch) -> Descent:
    """Returns D_L = (sum d_L - k clip) / batch_size.

    The divisor is constant. So a record that comes or goes moves the sum by at most clip. Theorem
    4.6 as published does not cover it. Its bound for two gradients of -clip and k = 1 is -2 clip,
    but a third one makes the sum -3 clip.
    """
    grid = gradients.plan.grid

    def summands(factors: Any) -> Leaves:
        return [grid.sum(bits) for bits in gradients.bits(factors)]

    def sums(box: LeafBounds) -> list[Total]:
        return gradients.total(box, batch, summands)

    def bounds(totals: Any, box: LeafBounds, k: jax.Array) -> LeafBounds:
        lows = []
        for total in totals:
            least = add_units(total, -k, grid.charge)  # sum d_L - k clip (T4)
            lows.append(grid.mean(least))
        return _from_lower_ends(lows)

    return Descent(sums, bounds)


# --- Records are replaced (Theorem 4.6 without sorting, T6) -------------------------------------


class _Point(NamedTuple):
    """A threshold tau, and the sum of the excesses max(d - tau, 0) over it."""

    tau: jax.Array
    excess: Total


def _replace_one(gradients: Gradients, batch: Batch) -> Descent:
    """Returns D_L = (sum of the b - k smallest d_L - k clip) / batch_size (Theorem 4.6).

    The k largest sum to min_tau k tau + sum max(d - tau, 0). Any tau gives a bound. The function is
    convex, so bisection finds its minimum over a fixed grid of tau. A grid that followed the
    entries would not be isotonic.
    """
    grid = gradients.plan.grid
    charge = gradients.plan.grid.charge
    places = math.prod(gradients.plan.blocks)

    def sums_of_entries(factors: Any) -> Leaves:
        _, weights, may_change = factors
        every = _entries(gradients, factors, weights > 0)
        sums = _add_records(grid, every)
        if gradients.plan.has_public:
            candidates = _entries(gradients, factors, may_change)
            sums += _add_records(grid, candidates)
        return sums

    copies = 1 + gradients.plan.has_public
    # A place without a record has the least entry, which is taken off again.
    absent = places - batch.size.astype(grid.ints)
    changeable = batch.changeable.astype(grid.ints)
    unchangeable = places - changeable

    def sums(box: LeafBounds) -> tuple[list[Total], list[Total]]:
        both = gradients.total(box, batch, sums_of_entries, copies)
        ends = len(both) // copies
        of_records = [add_units(total, absent, charge) for total in both[:ends]]
        of_changeable = [add_units(total, unchangeable, charge) for total in both[-ends:]]
        return of_records, of_changeable

    def bounds(totals: Any, box: LeafBounds, k: jax.Array) -> LeafBounds:
        of_records, of_changeable = totals
        # A batch has no more changes than records that may change (T13).
        k = batch.at_most(k)
        # At one end of the search all entries exceed tau, at the other end none does.
        left = []
        for total in of_changeable:
            least_tau = 0 * total[0] - charge
            left.append(_Point(least_tau, add_units(total, changeable, charge)))
        right = []
        for point in left:
            largest_tau = -point.tau
            right.append(_Point(largest_tau, jax.tree.map(lambda x: 0 * x, point.excess)))
        halve = functools.partial(_halve, gradients, batch, box, k)
        left, right = lax.fori_loop(0, _HALVINGS, halve, (left, right))
        lows = []
        for total, a, b in zip(of_records, left, right, strict=True):
            # k tau + sum max(d - tau, 0), at both ends of the last interval (T6).
            at_left = add_units(a.excess, k, a.tau)
            at_right = add_units(b.excess, k, b.tau)
            largest = _smaller(at_left, at_right)
            rest = _minus(total, largest)
            # The k records that take their places may have the gradient -clip.
            least = add_units(rest, -k, charge)
            lows.append(grid.mean(least))
        return _from_lower_ends(lows)

    return Descent(sums, bounds)


def _entries(
    gradients: Gradients,
    factors: Any,
    is_candidate: jax.Array,
) -> Leaves:
    """Returns the integers of which the k largest leave, and the least one for others."""
    grid = gradients.plan.grid
    entries = []
    bias = grid.bias()
    for bits in gradients.bits(factors):
        counts = _per_record(is_candidate, bits)
        entry = jnp.where(counts, bits - bias, -grid.charge)
        entries.append(entry)
    return entries


def _add_records(grid: Any, xs: Leaves) -> Leaves:
    return [jnp.sum(x, axis=0, dtype=grid.ints) for x in xs]


def _halve(
    gradients: Gradients,
    batch: Batch,
    box: LeafBounds,
    k: jax.Array,
    _: Any,
    ends: tuple[list[_Point], list[_Point]],
) -> tuple[list[_Point], list[_Point]]:
    """Keeps the half of each search interval that contains the minimum over tau."""
    grid = gradients.plan.grid
    left, right = ends
    taus = [(a.tau + b.tau) >> 1 for a, b in zip(left, right, strict=True)]

    def excesses_and_counts(factors: Any) -> Leaves:
        entries = _entries(gradients, factors, factors[2])
        gaps = [e - tau[None] for e, tau in zip(entries, taus, strict=True)]
        positive = [jnp.maximum(gap, 0) for gap in gaps]
        excesses = _add_records(grid, positive)
        exceeds = [(gap > 0).astype(grid.ints) for gap in gaps]
        counts = _add_records(grid, exceeds)
        return excesses + counts

    totals = gradients.total(box, batch, excesses_and_counts, copies=2)
    excesses = totals[: len(taus)]
    counts = totals[len(taus) :]
    middle = [_Point(*pair) for pair in zip(taus, excesses, strict=True)]
    is_rising = []
    for high, low in counts:
        count = (high << SHIFT) + low
        # If at most k entries exceed tau, the minimum is not above it.
        is_rising.append(count <= k)
    next_left = [_choose(*x) for x in zip(is_rising, left, middle, strict=True)]
    next_right = [_choose(*x) for x in zip(is_rising, middle, right, strict=True)]
    return next_left, next_right


def _smaller(a: Total, b: Total) -> Total:
    a_high, a_low = a
    b_high, b_low = b
    is_smaller = (a_high < b_high) | ((a_high == b_high) & (a_low < b_low))
    smaller: Total = _choose(is_smaller, a, b)
    return smaller


def _minus(a: Total, b: Total) -> Total:
    return carry(a[0] - b[0], a[1] - b[1])


def _choose(
    condition: jax.Array,
    yes: Any,
    no: Any,
) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


# --- Records of every batch are replaced (Theorem 4.6 as published) -----------------------------


def _replace_per_batch(gradients: Gradients, batch: Batch) -> Descent:
    """Returns the bounds of Theorem 4.6, by sorting.

    D_L = (SEMin_{b-k} d_L - k clip) / b,   D_U = (SEMax_{b-k} d_U + k clip) / b
    """
    plan = gradients.plan
    clip = plan.grid.clip
    most = plan.ks[-1]
    fixed = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.fixed)
    weights, may_change = fixed[1:]
    is_record = weights[None] > 0
    places = weights.size

    def sums(box: LeafBounds) -> Any:
        return gradients.factors(box, fixed)[0]

    def bounds(factors: Any, box: LeafBounds, k: jax.Array) -> LeafBounds:
        # A batch has no more changes than records that may change (T13).
        k = batch.at_most(k)
        relative_error = slack(plan.grid.dtype, places + most + 8)
        error = relative_error * clip * (1 + 2 * k / batch.size)

        def smallest_mean(x: jax.Array) -> jax.Array:
            # A NaN may be any gradient, so its lower bound is -clip.
            numbers = jnp.where(jnp.isnan(x), -clip, x)
            clipped = jnp.clip(numbers, -clip, clip)
            columns = clipped.reshape(places, -1).T
            present = jnp.where(is_record, columns, 0)
            total = jnp.sum(present, axis=1)
            candidates = jnp.where(may_change[None], columns, -jnp.inf)
            largest = lax.top_k(candidates, most)[0]
            # Column j is the sum of the j largest, which leave.
            leaving = jnp.pad(jnp.cumsum(largest, axis=1), ((0, 0), (1, 0)))
            remaining = total - jnp.take(leaving, k, axis=1)
            # (SEMin_{b-k} d_L - k clip) / b of Theorem 4.6.
            mean = (remaining - k * clip) / batch.size - error
            return mean.reshape(x.shape[1:])

        lows = gradients.bounds((factors, weights, may_change))
        return _from_lower_ends([smallest_mean(x) for x in lows])

    return Descent(sums, bounds)


# --- Records are removed or poisoned (T11, T12) -------------------------------------------------


def _by_record(gradients: Gradients, batch: Batch) -> Descent:
    """Returns D_L = (sum d_L - the k largest d_L - c_L) / batch_size.

    c_L is the least contribution of a record once it changes: 0 if it is removed (T11), and the
    least gradient over all that it can become if it is poisoned (T12). One pass serves every k.
    """
    plan = gradients.plan
    grid = plan.grid
    bias = grid.bias()
    most = plan.ks[-1]

    def sums(box: LeafBounds) -> tuple[list[Total], list[Total]]:
        like = [*box[0], *box[1]]
        zeros = [jnp.zeros(x.shape, grid.ints) for x in like]
        no_differences = [jnp.zeros((most, *x.shape), grid.ints) for x in zeros]

        def add_fragment(carried: Any, fragment: Any) -> tuple[Any, None]:
            added, largest = carried
            factors, records = fragment
            may_change = factors[2]
            unchanged = [bits - bias for bits in gradients.bits(factors)]
            changed = gradients.changed(box, records, unchanged)
            differences = []
            for d, c in zip(unchanged, changed, strict=True):
                # A change that would raise the sum is not made.
                gains = jnp.maximum(d - c, 0)
                counts = _per_record(may_change, d)
                differences.append(jnp.where(counts, gains, 0))
            of_fragment = _add_records(grid, unchanged)
            added = [x + y for x, y in zip(added, of_fragment, strict=True)]
            largest, _ = lax.scan(_insert, largest, differences)
            return (added, largest), None

        def add_block(carried: Any, block: Any) -> tuple[Any, None]:
            totals, largest = carried
            records, fixed = block
            whole = gradients.factors(box, fixed), records
            fragments = cut_up(plan.blocks, whole)
            (added, largest), _ = lax.scan(add_fragment, (zeros, largest), fragments)
            return (add_to(totals, added), largest), None

        start = [(z, z) for z in zeros], no_differences
        blocks = batch.records, batch.fixed
        (wide, largest), _ = lax.scan(add_block, start, blocks)
        totals = [narrow(grid, total) for total in wide]
        return totals, [_sums_of_first(x) for x in largest]

    def bounds(totals: Any, box: LeafBounds, k: jax.Array) -> LeafBounds:
        of_records, taken_off = totals
        lows = []
        for total, (high, low) in zip(of_records, taken_off, strict=True):
            # Each coordinate loses its own k records, which only lowers the bound.
            rest = _minus(total, (high[k], low[k]))
            lows.append(grid.mean(rest))
        return _from_lower_ends(lows)

    return Descent(sums, bounds)


def _insert(largest: Leaves, xs: Leaves) -> tuple[Leaves, None]:
    """Inserts an integer into each list of the largest, [most, ...] in falling order."""
    inserted = []
    for tops, x in zip(largest, xs, strict=True):
        # new[i] = max(old[i], min(old[i - 1], x)): a place keeps its integer, gets x, or gets what
        # x pushes down.
        first = jnp.full_like(tops[:1], jnp.iinfo(tops.dtype).max)
        above = jnp.concatenate([first, tops])[:-1]
        pushed = jnp.minimum(above, x[None])
        inserted.append(jnp.maximum(tops, pushed))
    return inserted, None


def _sums_of_first(x: jax.Array) -> Total:
    """Returns the sums of the first 0, 1, ... integers along the first axis."""
    lower_part = x & (2**SHIFT - 1)
    zero = jnp.zeros((1, *x.shape[1:]), x.dtype)
    upper_part = x >> SHIFT
    highs = jnp.concatenate([zero, upper_part])
    lows = jnp.concatenate([zero, lower_part])
    high = jnp.cumsum(highs, axis=0)
    low = jnp.cumsum(lows, axis=0)
    return high, low


DESCENT: dict[Threat, Callable[[Gradients, Batch], Descent]] = {
    "add_remove": _add_remove,
    "replace_one": _replace_one,
    "replace_per_batch": _replace_per_batch,
    "remove": _by_record,
    "poison": _by_record,
}
