"""Abstract Gradient Training: bounds on everything that training on a neighbouring data set could give.

Wicker et al., "Certification for Differentially Private Prediction in Gradient-Based Training" (ICML 2025,
arXiv:2406.13433), in the order of its Algorithm 1, for all distances k in one compiled program:

1. bounds of every record's gradient over the box of parameters reached so far (`jaxdp.interval`), clipped;
2. bounds of their sum when up to k records change: `_Descent`, the paper's Theorem 4.6 or the rule of T4;
3. a step of the optimizer for both ends of the box;
4. `certify`: which predictions no parameters in the box change (Lemma 4.4).

T1..T10 are derivations in BUILD_NOTES.md, with the proofs of soundness and of the 1-Lipschitz stable distance.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.prediction.checks import Plan, check_data, distances, make_plan, positive
from jaxdp.prediction.sums import Grid, add_units, add_up, carry, mean, public_rows
from jaxdp.transforms.boxes import Interval, lower, slack, unchecked, upper, widen
from jaxdp.transforms.interval_rules import certain_argmax
from jaxdp.transforms.intervals import bound, stage

Adjacency = Literal["add_remove", "replace", "reference"]

# Halvings of the interval in which the threshold of the largest entries is searched (T6).
_HALVINGS = 8
_QUERIES = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bounds:
    """Nominal parameters and a box around them for each distance.

    Attributes:
      params: what training on the data as they are gives, a pytree.
      lower, upper: pytrees like `params`; leaves [len(ks), ...]. Row i contains every parameter vector that training
        on a data set within distance ks[i] gives. Frozen leaves are repeated without copies.
      ks: distances, increasing.
      adjacency: what one step of distance is: "add_remove", "replace" or "reference".
      product: how products were bounded, "tight" or "rump".
      trainable: whether each leaf was trained, in the order of `jax.tree.leaves(params)`.
    """

    params: Any
    lower: Any
    upper: Any
    ks: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    adjacency: str = dataclasses.field(metadata={"static": True})
    trainable: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    product: str = dataclasses.field(default="tight", metadata={"static": True})

    def box(self, k: int) -> Any:
        """Returns the box at distance k: `params` with an `Interval` for each trained leaf.

        Raises:
          ValueError: if k is not one of `ks`.
        """
        if k not in self.ks:
            raise ValueError(f"k={k} is not one of the distances {self.ks} of these bounds")
        row = self.ks.index(k)
        leaves, structure = jax.tree.flatten(self.params)
        ends = zip(leaves, jax.tree.leaves(self.lower), jax.tree.leaves(self.upper), self.trainable, strict=True)
        boxes = [unchecked(low[row], high[row]) if moves else leaf for leaf, low, high, moves in ends]
        return jax.tree.unflatten(structure, boxes)


class Certificates(NamedTuple):
    """What is certain about predictions. PRIVATE: distances and logits depend on the training data.

    Attributes:
      label: int32 [Q], the largest logit, or for one logit whether it is positive: of every parameter vector in the
        first row of the bounds where that is certain, else of the nominal parameters.
      distance: int32 [Q], the stable distance k': no data set within distance k' changes the label, and neighbouring
        data sets have k' that differ by at most 1. With a sparse grid of ks it counts certified grid points.
      logits: `Interval` with ends [len(ks), Q, C].
    """

    label: jax.Array
    distance: jax.Array
    logits: Interval


def train_with_bounds(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    *,
    ks: int | Sequence[int],
    clip: float,
    learning_rate: float,
    batch_size: int,
    epochs: int,
    adjacency: Adjacency = "add_remove",
    batches: int | None = None,
    order: np.ndarray | Callable[[int], np.ndarray] | None = None,
    product: str = "tight",
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    lr_min: float = 0.0,
    trainable: Callable[[str, Any], bool] | None = None,
) -> Bounds:
    """Trains with per-record clipped gradients and bounds what any data set within distance k could have given.

        bounds = train_with_bounds(loss_fn, params, data, ks=9, clip=0.1, learning_rate=0.5, batch_size=900, epochs=1)
        certify(bounds, apply_fn, queries).distance

    Step t with batch S (Algorithm 1):

        D = 1/batch_size sum_{i in S} clip(grad loss(theta, i), -clip, clip)    (see "a very large batch")
        v = momentum v + D + weight_decay theta
        theta = theta - max(learning_rate / (1 + lr_decay t), lr_min) (v, or D + weight_decay theta + momentum v)

    Args:
      loss_fn: `loss_fn(params, example) -> scalar`, the deterministic loss of one example. Losses of `jaxdp.losses`
        have tight bounds; any other is sound, only looser.
      params: initial parameters, public.
      data: pytree of arrays [n, ...], one row per record.
      ks: distances; an int means all of 0..ks, which is what a private mechanism wants. A sparse grid is allowed.
      clip: each coordinate of each record's gradient is clamped to [-clip, clip]; positive, finite.
      learning_rate: of step 0; positive.
      batch_size: public. The constant that sums are divided by (except "reference"); about the number of records in a
        batch, but under "add_remove" not computed from their private number.
      epochs: passes over the data.
      adjacency: what distance counts, and what the sum of gradients is divided by.
        "add_remove": records added or removed, the normaliser is `batch_size`; one record shifts the sum by at most
        `clip` (T4). "replace": records replaced, batches keep their size; normaliser `batch_size`. "reference": the
        published rule (Theorem 4.6), normaliser the number of records in the batch, k replacements in EVERY batch;
        with product="rump" the published algorithm.
      batches: public number of batches per epoch. Records are assigned to them by a hash of their content, under
        "replace" and "reference" by position; the same in every epoch and whatever the other records are. None is a
        number that neighbours share. Under "add_remove" it is 1, because the number of records is private. Under
        "replace" it is round(n / batch_size), at least 1. Under "reference" the batches are consecutive and full, an
        incomplete one is dropped, as published.
      order: int [steps, batch] rows of records per step, -1 for none, or a function of n that returns it, instead of
        `batches` and `epochs`.
      product: "tight" or "rump", see `jaxdp.interval`.
      momentum, nesterov, weight_decay: of the optimizer; see the equations.
      lr_decay, lr_min: of the learning rate.
      trainable: `trainable(path, leaf) -> bool` with paths such as "Dense_0/kernel"; other leaves are frozen, and what
        depends on them alone is computed once per batch.

    Returns:
      `Bounds`, computed for all ks by one compiled program (compiled once per loss function, shapes and settings).

    Formal guarantees:
      *Containment.* Let data' be within distance ks[i] of `data`, each added record being assigned to one batch per
      epoch by a rule that does not look at other records. Training on data' by the equations above in real arithmetic
      ends inside row i; so does training in floating point, unless logits cancel almost completely. Changes count
      over the whole data set: an epoch of several batches shares the budget between them (T8), except where the
      cases below say "every batch".

      *Stable distance.* The box of data' at distance k - 1 lies inside that of data at distance k whenever data and
      data' are neighbours. So the k' of `certify` is 1-Lipschitz, which mechanisms need. For product="tight" and
      adjacency "add_remove" or "replace" it holds in floating point too: sums over records are exact integer sums of
      outward-rounded gradients, and other operations are monotone. Exceptions, in real arithmetic only: tanh, erf and
      softmax inside the network (XLA's are not monotone in the last digits), momentum together with weight decay.

      The nominal parameters and the boxes are private values; only mechanisms in `jaxdp.prediction` make them public.
      Hyperparameters and `order` must not be chosen by looking at the data.

      ============================  =================================================================================
      case                          behaviour
      ============================  =================================================================================
      k == 0                        the box is the rounding of the arithmetic
      gradient NaN or infinite      counts as anything in [-clip, clip]
      no record, or an empty batch  under "add_remove" a batch like any other, whose sum is zero
      a very large batch            under "add_remove" the sum is clipped coordinate-wise to M clip, with M the multiple
                                    of 256 from 4 batch_size on, but at most 2^19 in float32; M records or fewer never
                                    reach it
      order repeats a record        budgets start again before the batch that repeats one
      momentum and weight_decay     k changes in every batch; an error if a step's influence on the result changes sign
      "reference"                   k replacements in every batch
      ============================  =================================================================================

    Raises:
      ValueError: for anything that cannot be certified or is out of range; before any computation.
      TypeError: if ks or order are not integers, or a trained leaf is not floating point.
    """
    plan, arrays = make_plan(
        loss_fn,
        params,
        data,
        ks=distances(ks),
        clip=positive("clip", clip, "the per-coordinate bound of a record's gradient"),
        learning_rate=positive("learning_rate", learning_rate, "the step size"),
        batch_size=batch_size,
        epochs=epochs,
        adjacency=adjacency,
        batches=batches,
        order=order,
        product=product,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        lr_decay=lr_decay,
        lr_min=lr_min,
        trainable=trainable,
    )
    nominal, low, high = _train(loss_fn, plan, *arrays)
    leaves, structure = jax.tree.flatten(params)
    lowers, uppers = [], []
    trained = iter(zip(nominal, low, high, strict=True))
    for i, moves in enumerate(plan.trainable):
        if moves:
            leaves[i], a, b = next(trained)
        else:
            a = b = np.broadcast_to(np.asarray(leaves[i]), (len(plan.ks), *np.shape(leaves[i])))
        lowers.append(a)
        uppers.append(b)
    nominal, low, high = (jax.tree.unflatten(structure, x) for x in (leaves, lowers, uppers))
    return Bounds(nominal, low, high, plan.ks, adjacency, plan.trainable, product)


# --- the algorithm ---------------------------------------------------------------------------------------------------

Leaves = list[jax.Array]
Box = tuple[Leaves, Leaves]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _train(
    loss_fn: Any, plan: Plan, moving: Leaves, frozen: Leaves, data: Any, order: Any, rates: jax.Array
) -> tuple[Leaves, Leaves, Leaves]:
    """Algorithm 1 for all ks. Returns nominal, lower and upper leaves; the ends have a first axis [len(ks)]."""
    dtype = jnp.result_type(*moving)
    grid = Grid.of(dtype)

    def gradient(moving: Leaves, record: Any) -> Leaves:
        example, weight = record

        def loss(moving: Leaves) -> jax.Array:
            parts = iter(moving), iter(frozen)
            leaves = [next(parts[0]) if moves else next(parts[1]) for moves in plan.trainable]
            value = loss_fn(jax.tree.unflatten(plan.structure, leaves), example)
            return value * weight.astype(value.dtype)

        return jax.grad(loss)(moving)

    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)
    record = (example, jax.ShapeDtypeStruct((), dtype))
    first, second, third = stage(gradient, moving, record, product=plan.product)

    def batch_of(rows: jax.Array) -> Any:
        """Records in blocks [outer, records, ...], and weight 0 for places without a record."""
        rows = rows.reshape(plan.blocks[0], -1)
        return jax.tree.map(lambda x: x[jnp.maximum(rows, 0)], data), (rows >= 0).astype(dtype)

    def kept_of(batch: Any) -> Any:
        """What bounds need of the records: computed once for all k (frozen layers are in here); and the weights."""
        return lax.map(jax.vmap(first), batch), batch[1]

    def factors_of(box: Box, kept: Any) -> Any:
        """Lines 6 and 7 of Algorithm 1 up to outer products: bounds for a block of records over the box."""
        boxes = [unchecked(low, high) for low, high in zip(*box, strict=True)]
        return jax.vmap(lambda one: second(boxes, one))(kept[0]), kept[1]

    def record_bounds(factors: Any) -> tuple[Leaves, Leaves]:
        """Bounds of each record's gradient, leaves [records, ...]."""
        ends = jax.vmap(third)(factors[0])
        return [low for low, _ in ends], [high for _, high in ends]

    def whole(bits: jax.Array) -> jax.Array:
        """Sums over the records of a fragment, without the bits of `magic`."""
        return jnp.sum(bits, axis=0, dtype=grid.ints) - bits.shape[0] * grid.zero

    def nominal_sums(moving: Leaves, batch: Any) -> list[Any]:
        def summands(fragment: Any) -> Leaves:
            grads = jax.vmap(lambda one: gradient(moving, one))(fragment)
            return [whole(grid.bits(g.astype(dtype), plan.clip, 0)) for g in grads]

        return add_up(plan, grid, batch, lambda block: block, summands)

    descent = _Descent(plan, grid, dtype, factors_of, record_bounds, whole)

    def advance(params: Leaves, velocity: Leaves, grads: Leaves, rate: jax.Array) -> tuple[Leaves, Leaves]:
        pushes = [g + plan.weight_decay * p for g, p in zip(grads, params, strict=True)]
        if plan.momentum == 0:
            return [p - rate * g for p, g in zip(params, pushes, strict=True)], velocity
        velocity = [plan.momentum * v + g for v, g in zip(velocity, pushes, strict=True)]
        steps = [g + plan.momentum * v if plan.nesterov else v for g, v in zip(pushes, velocity, strict=True)]
        return [p - rate * s for p, s in zip(params, steps, strict=True)], velocity

    def advance_end(end: Leaves, velocity: Leaves, grads: Leaves, rate: jax.Array, sign: int) -> tuple[Leaves, Leaves]:
        """`advance` for one end of the box, with the gradients that push it outward; every result rounded outward."""
        if plan.weight_decay and not plan.momentum:
            decay, worst = rate * plan.weight_decay, jnp.minimum if sign < 0 else jnp.maximum
            error = slack(dtype, 4) * decay  # which may be large beside what decay leaves
            least, most = jnp.maximum(1 - decay - error, 0), 1 - decay + error
            kept = [_out(worst(p * least, p * most), sign, 3) for p in end]
            return [_out(p - _out(rate * g, -sign), sign) for p, g in zip(kept, grads, strict=True)], velocity

        def add(grads: Leaves, factor: float, xs: Leaves) -> Leaves:
            """g + factor x; terms may cancel, so the product is rounded by itself."""
            return [_out(g + _out(factor * x, -sign, 2), -sign) for g, x in zip(grads, xs, strict=True)]

        if plan.weight_decay:
            # The end's own decay: exact, because the influence of no gradient changes sign (`_check_influence`).
            grads = add(grads, plan.weight_decay, end)
        steps = grads
        if plan.momentum:
            steps = velocity = add(grads, plan.momentum, velocity)
        if plan.nesterov:
            steps = add(grads, plan.momentum, velocity)
        return [_out(p - _out(rate * s, -sign), sign) for p, s in zip(end, steps, strict=True)], velocity

    def advance_box(line: Any, grads: Box, rate: jax.Array) -> Any:
        low, high, v_low, v_high = line
        # A lower parameter comes from a higher gradient, so velocities cross.
        low, v_high = advance_end(low, v_high, grads[1], rate, -1)
        high, v_low = advance_end(high, v_low, grads[0], rate, +1)
        return low, high, v_low, v_high

    def each(f: Callable[[Any], Any], xs: Any) -> Any:
        """Over lines: one after the other in a processor's cache, side by side on an accelerator."""
        return lax.map(f, xs) if jax.default_backend() == "cpu" else jax.vmap(f)(xs)

    def step(state: Any, rows: jax.Array, rate: jax.Array, changes: Any, used: Any) -> Any:
        """One batch for the nominal parameters and all lines; a line is a box that `changes` records may widen.

        Before the first step all lines are one point, whose gradients are bounded once (T5). With `used`, lines are
        told apart by the changes used so far in this epoch, and the batch may have had any number of them (T8).
        """
        params, velocity, lines = state
        batch = batch_of(rows)
        kept, count = kept_of(batch), jnp.sum(batch[1])
        grads = [mean(plan, grid, total, dtype, 0) for total in nominal_sums(params, batch)]
        if plan.adjacency == "reference":
            grads = [g * (plan.divisor / count) for g in grads]
        if lines is None:
            point = (params, params, velocity, velocity)
            shared = descent.prepare(point[:2], kept)
            lines = each(lambda k: advance_box(point, descent.finish(shared, k, kept, count), rate), changes)
        else:

            def move(now: Any) -> Any:
                k, line = now
                return advance_box(line, descent.finish(descent.prepare(line[:2], kept), k, kept, count), rate)

            lines = each(move, (changes, lines))
        if used is not None:
            lines = _share(plan, grid, dtype, lines, used, rate)
        return (*advance(params, velocity, grads, rate), lines)

    def steps(state: Any, rows: jax.Array, rates: jax.Array, changes: Any, used: Any, starts: Any = None) -> Any:
        """Several batches. `starts`: (flags [steps], rows of lines): where flagged, each line goes on from another."""

        def body(state: Any, now: Any) -> tuple[Any, None]:
            rows, rate, start = now
            params, velocity, lines = state
            if starts is not None:
                lines = jax.tree.map(lambda x: jnp.where(start, x[starts[1]], x), lines)
            return step((params, velocity, lines), rows, rate, changes, used), None

        flags = jnp.zeros(len(rows), bool) if starts is None else starts[0]
        return lax.scan(body, state, (rows, rates, flags))[0]

    order, ks = jnp.asarray(order), np.asarray(plan.ks)
    state = (moving, [jnp.zeros_like(x) for x in moving] if plan.momentum else [], None)
    if not plan.shared_budget:
        changes = jnp.asarray(ks)
        state = step(state, order[0], rates[0], changes, None)
        params, _, lines = steps(state, order[1:], rates[1:], changes, None)
        return params, lines[0], lines[1]
    # First epoch: lines of j = 0..K changes so far. Later: for each k, which widened the box before, lines of j = 0..k.
    first_epoch = plan.groups[0]
    used = jnp.arange(ks[-1] + 1)
    none = jnp.zeros_like(used)
    state = step(state, order[0], rates[0], none, used)
    state = steps(state, order[1:first_epoch], rates[1:first_epoch], none, used)
    ends = ks
    if len(plan.groups) > 1:
        pairs = [(k, j) for k in plan.ks for j in range(k + 1)]
        ends = np.cumsum(ks + 1) - 1  # the lines with j == k
        begin = np.zeros(len(order) - first_epoch, bool)
        begin[np.cumsum((0, *plan.groups[1:-1]))] = True
        begin[0] = False
        params, velocity, lines = state
        lines = jax.tree.map(lambda x: x[np.asarray([k for k, _ in pairs])], lines)
        used = jnp.asarray([j for _, j in pairs])
        last = np.repeat(ends, ks + 1)
        state = (params, velocity, lines)
        rest = slice(first_epoch, None)
        state = steps(state, order[rest], rates[rest], jnp.zeros_like(used), used, (jnp.asarray(begin), last))
    params, _, lines = state
    return params, *(jax.tree.map(lambda x: x[ends], end) for end in lines[:2])


def _out(x: jax.Array, sign: int, roundings: int = 1) -> jax.Array:
    """Rounds a computed value outward, down for sign -1 and up for +1."""
    return widen(x, x, roundings)[(sign + 1) // 2]


def _share(plan: Plan, grid: Grid, dtype: Any, lines: Any, used: jax.Array, rate: jax.Array) -> Any:
    """Lets the changes used so far include some of this batch's (T8).

    L^(j) = min_i (base L^(j-i) - i shift): a running minimum over the lines of one k, in which each further change
    shifts the mean gradient by at most clip / batch_size (twice that if it is a replacement).
    """
    # In whole units of `mean`; and what the roundings of the two sums, not of one difference, may make of it.
    whole, records = 2**grid.shift, 2 if plan.adjacency == "replace" else 1
    units = math.ceil(records * grid.charge / whole) * whole / grid.one
    units += slack(dtype, 8) * public_rows(plan.divisor) / (1 - plan.momentum)
    charge = units * (1 + 8 * slack(dtype, 1)) * plan.clip / plan.divisor
    amounts = [charge * (1 + plan.momentum * plan.nesterov) * rate] * 2 + [jnp.asarray(charge, dtype)] * 2

    def line(previous: Any, current: Any) -> Any:
        j, base = current
        merged = []
        for part, before, sign, amount in zip(base, previous, (-1, 1, -1, 1), amounts, strict=True):
            worst = jnp.minimum if sign < 0 else jnp.maximum
            reached = [worst(x, _out(y + sign * amount, sign, 6)) for x, y in zip(part, before, strict=True)]
            merged.append([jnp.where(j == 0, x, y) for x, y in zip(part, reached, strict=True)])
        return tuple(merged), tuple(merged)

    return lax.scan(line, jax.tree.map(lambda x: x[0], lines), (used, lines))[1]


@dataclasses.dataclass(frozen=True)
class _Descent:
    """Bounds of the mean clipped gradient when k records of a batch change."""

    plan: Plan
    grid: Grid
    dtype: Any
    factors_of: Callable[[Box, Any], Any]
    record_bounds: Callable[[Any], tuple[Leaves, Leaves]]
    whole: Callable[[jax.Array], jax.Array]

    def prepare(self, box: Box, kept: Any) -> Any:
        """What does not depend on k."""
        if self.plan.adjacency != "add_remove":
            return box
        return self._total(box, kept, lambda factors: [*map(self.whole, self._bits(factors))])

    def finish(self, prepared: Any, k: jax.Array, kept: Any, count: jax.Array) -> Box:
        """Lower and upper bounds of the mean; `count` is the number of records in the batch."""
        if self.plan.adjacency == "add_remove":
            return self._shifted(prepared, k)
        if self.plan.adjacency == "replace":
            return self._replaced(prepared, k, kept, count)
        return self._published(prepared, k, kept, count)

    def _total(self, box: Box, kept: Any, summands: Callable[[Any], Leaves]) -> list[Any]:
        return add_up(self.plan, self.grid, kept, functools.partial(self.factors_of, box), summands)

    def _bits(self, factors: Any) -> Leaves:
        def bits(x: jax.Array, sign: int) -> jax.Array:
            # A place without a record adds nothing: neither a unit of rounding nor the NaN of 0 * inf.
            return jnp.where(_rows(factors[1], x) > 0, self.grid.bits(x.astype(self.dtype), self.plan.clip, sign), zero)

        zero = self.grid.zero
        lows, highs = self.record_bounds(factors)
        return [bits(x, -1) for x in lows] + [bits(x, +1) for x in highs]

    def _ends(self, totals: list[Any]) -> Box:
        half = len(totals) // 2
        low = [mean(self.plan, self.grid, t, self.dtype, -1) for t in totals[:half]]
        return low, [mean(self.plan, self.grid, t, self.dtype, +1) for t in totals[half:]]

    def _shifted(self, totals: list[Any], k: jax.Array) -> Box:
        """D_L = (sum d_L - k clip) / batch_size: a record that comes or goes moves the sum by at most clip (T4)."""
        half, charge = len(totals) // 2, self.grid.charge
        low = [add_units(self.grid, t, -k, charge) for t in totals[:half]]
        return self._ends(low + [add_units(self.grid, t, k, charge) for t in totals[half:]])

    def _replaced(self, box: Box, k: jax.Array, kept: Any, count: jax.Array) -> Box:
        """D_L = (sum of the b - k smallest d_L - k clip) / batch_size (Theorem 4.6), streaming (T6).

        The k largest sum to min_tau k tau + sum max(d - tau, 0). Any tau gives a bound. The minimum over a fixed grid
        of tau is found by bisection, since the function is convex; so the bound is isotonic.
        """
        grid, charge = self.grid, self.grid.charge

        def entries(factors: Any) -> Leaves:
            """Integers whose k largest leave: d_L, and -d_U; the least where there is no record."""
            bits, weights = self._bits(factors), factors[1]
            units = [b - grid.zero for b in bits[: len(bits) // 2]] + [grid.zero - b for b in bits[len(bits) // 2 :]]
            return [jnp.where(_rows(weights, x) > 0, x, -charge) for x in units]

        def add(xs: Leaves) -> Leaves:
            return [jnp.sum(x, axis=0, dtype=grid.ints) for x in xs]

        def above(taus: Leaves, factors: Any) -> Leaves:
            gaps = [e - tau[None] for e, tau in zip(entries(factors), taus, strict=True)]
            return add([jnp.maximum(g, 0) for g in gaps]) + add([(g > 0).astype(grid.ints) for g in gaps])

        size = math.prod(self.plan.blocks)
        absent = size - count.astype(grid.ints)
        sums = self._total(box, kept, lambda factors: add(entries(factors)))
        sums = [add_units(grid, total, absent, charge) for total in sums]
        below = [jnp.full(high.shape, -charge, grid.ints) for high, _ in sums]
        # (tau, sum of what exceeds it) at both ends of the search: everything, and nothing.
        start = (
            [(tau, add_units(grid, total, size - absent, charge)) for tau, total in zip(below, sums, strict=True)],
            [(-tau, (jnp.zeros_like(tau), jnp.zeros_like(tau))) for tau in below],
        )

        def halve(_: Any, ends: Any) -> Any:
            taus = [(a + b) >> 1 for (a, _), (b, _) in zip(*ends, strict=True)]
            totals = self._total(box, kept, functools.partial(above, taus))
            excesses, counts = totals[: len(taus)], totals[len(taus) :]
            middle = list(zip(taus, excesses, strict=True))
            rising = [(high << grid.shift) + low <= k for high, low in counts]
            left = [_choose(r, old, new) for r, old, new in zip(rising, ends[0], middle, strict=True)]
            return left, [_choose(r, new, old) for r, old, new in zip(rising, ends[1], middle, strict=True)]

        left, right = lax.fori_loop(0, _HALVINGS, halve, start)
        totals = []
        for total, a, b in zip(sums, left, right, strict=True):
            (h1, l1), (h2, l2) = (self._line(tau, excess, k) for tau, excess in (a, b))
            less = (h1 < h2) | ((h1 == h2) & (l1 < l2))
            largest = jnp.where(less, h1, h2), jnp.where(less, l1, l2)
            rest = carry(grid, total[0] - largest[0], total[1] - largest[1])
            totals.append(add_units(grid, rest, -k, charge))
        half = len(totals) // 2
        return self._ends(totals[:half] + [carry(grid, -high, -low) for high, low in totals[half:]])

    def _line(self, tau: jax.Array, excess: tuple[jax.Array, jax.Array], k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """k tau + excess."""
        shift = self.grid.shift
        return carry(self.grid, excess[0] + k * (tau >> shift), excess[1] + k * (tau & (2**shift - 1)))

    def _published(self, box: Box, k: jax.Array, kept: Any, count: jax.Array) -> Box:
        """D_L = (SEMin_{b-k} d_L - k clip) / b, D_U = (SEMax_{b-k} d_U + k clip) / b (Theorem 4.6), by sorting."""
        clip, most = self.plan.clip, self.plan.ks[-1]
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)
        size = math.prod(self.plan.blocks)
        present = rows[1] > 0
        error = slack(self.dtype, size + most + 8) * clip * (1 + 2 * k / count)

        def end(x: jax.Array, sign: int) -> jax.Array:
            flat = jnp.clip(jnp.where(jnp.isnan(x), sign * clip, x), -clip, clip).reshape(size, -1).T * -sign
            shown = present[None]
            total = jnp.sum(jnp.where(shown, flat, 0), axis=1)
            largest = lax.top_k(jnp.where(shown, flat, -jnp.inf), most)[0]
            leaving = jnp.pad(jnp.cumsum(largest, axis=1), ((0, 0), (1, 0)))
            mean = (total - jnp.take(leaving, k, axis=1) - k * clip) / count - error
            return (mean * -sign).reshape(x.shape[1:])

        lows, highs = self.record_bounds(self.factors_of(box, rows))
        return [end(x, -1) for x in lows], [end(x, +1) for x in highs]


def _rows(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Weights [records], shaped for x [records, ...]."""
    return weights.reshape(-1, *(1,) * (x.ndim - 1))


def _choose(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


# --- predictions -----------------------------------------------------------------------------------------------------


def certify(
    bounds: Bounds, apply_fn: Callable[[Any, Any], jax.Array], queries: Any, *, product: str = "tight"
) -> Certificates:
    """Finds how far the training data may change before a prediction does (Lemma 4.4).

    The label is stable at distance k if for every parameter vector in row k the same logit is the largest. Differences
    of logits are bounded as differences of the last layer's weights (T2), never by comparing their intervals only.

    Args:
      bounds: of `train_with_bounds`.
      apply_fn: `apply_fn(params, query) -> logits` of ONE query, [] or [1] (label 1 if positive) or [C].
      queries: pytree of arrays [Q, ...].
      product: see `jaxdp.interval`.

    Returns:
      `Certificates`. The distance is the largest k in bounds.ks up to which the label is certified without a gap. If
      the ks do not run over all integers, it counts the certified ks above 0 instead: k itself would jump by more
      than 1 between neighbouring data sets, and a mechanism calibrated to it would not be private. Mechanisms want 0
      among the ks: then neighbours agree on the label also where nominal logits differ by rounding only.

    Raises:
      ValueError: if apply_fn does not return the logits of one query, or queries are empty or not finite.
    """
    if not isinstance(bounds, Bounds):
        raise TypeError(f"bounds must come from train_with_bounds, got {type(bounds).__name__}")
    size = check_data(queries, "queries")
    query = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x)[1:], jnp.result_type(x)), queries)
    out = jax.eval_shape(apply_fn, bounds.params, query)
    shape = getattr(out, "shape", None)
    if shape is None or len(shape) > 1 or shape == (0,):
        shapes = jax.tree.map(lambda x: x.shape, out)
        raise ValueError(
            f"apply_fn must map one query to logits [] or [C], got {shapes}; for a model of batches:"
            " lambda params, x: model(params, x[None])[0]"
        )
    leaves, low, high = (jax.tree.leaves(x) for x in (bounds.params, bounds.lower, bounds.upper))
    moving = [[x for x, moves in zip(xs, bounds.trainable, strict=True) if moves] for xs in (leaves, low, high)]
    frozen = [x for x, moves in zip(leaves, bounds.trainable, strict=True) if not moves]
    structure = jax.tree.structure(bounds.params)
    queries = jax.tree.map(jnp.asarray, queries)
    label, certified, ends = _certify(apply_fn, product, structure, bounds.trainable, *moving, frozen, queries)
    counted = np.asarray(bounds.ks) > 0
    distance = jnp.sum(jnp.cumprod(certified, axis=0)[counted], axis=0, dtype=jnp.int32)
    assert distance.shape == (size,)
    below, above = (jnp.where(jnp.isnan(end), sign * jnp.inf, end) for end, sign in zip(ends, (-1, 1), strict=True))
    return Certificates(label, distance, unchecked(below, above))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _certify(
    apply_fn: Any,
    product: str,
    structure: Any,
    trainable: tuple[bool, ...],
    moving: Leaves,
    low: Leaves,
    high: Leaves,
    frozen: Leaves,
    queries: Any,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """(labels [Q], whether certified [K, Q], ends of logits [K, Q, C])."""

    def params_of(moving: Sequence[Any]) -> Any:
        parts = iter(moving), iter(frozen)
        return jax.tree.unflatten(structure, [next(parts[0]) if m else next(parts[1]) for m in trainable])

    def nominal(query: Any) -> jax.Array:
        logits = apply_fn(params_of(moving), query).reshape(-1)
        return (logits[0] > 0 if logits.size == 1 else jnp.argmax(logits)).astype(jnp.int32)

    def one(box: Box, query: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The label that is certain, or -1, and the ends of the logits."""
        boxes = [unchecked(a, b) for a, b in zip(*box, strict=True)]
        (logits,), _ = bound(apply_fn, (params_of(boxes), query), product=product)
        a, b = (jnp.asarray(end).reshape(-1) for end in (lower(logits), upper(logits)))
        if a.size == 1:
            return jnp.where(a[0] > 0, 1, jnp.where(b[0] <= 0, 0, -1)).astype(jnp.int32), (a, b)
        return certain_argmax(logits, product), (a, b)

    def at(box: Box) -> Any:
        return lax.map(functools.partial(one, box), queries, batch_size=_QUERIES)

    certain, ends = lax.map(at, (low, high))
    # Rounding may give nominal logits another order than every logit in the box has.
    labels = jnp.where(certain[0] >= 0, certain[0], lax.map(nominal, queries, batch_size=_QUERIES))
    return labels, certain == labels[None], ends
