"""Abstract Gradient Training: bounds on all parameters that training on a neighbouring data set
could give.

The module follows Algorithm 1 of Wicker et al., "Certification for Differentially Private
Prediction in Gradient-Based Training" (ICML 2025, arXiv:2406.13433). A compiled step covers all
distances k.

1. `_Gradients` bounds every record's clipped gradient over the box of parameters reached so far.
2. `_DESCENT` bounds the mean gradient when up to k records change, by Theorem 4.6 or by T4.
3. `_advance_box` makes a step of the optimizer for both ends of the box.
4. `_train` runs all batches, for all k.
5. `certify` finds the predictions that no parameters in the box change (Lemma 4.4).

docs/design/prediction.md has the derivations T1 to T10 and the proof that the stable distance is
1-Lipschitz.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.data import Records
from jaxdp.prediction.checks import check_queries, distances, one_of
from jaxdp.prediction.plan import Layout, Plan, Threat, Trainable, Training, make_plan
from jaxdp.prediction.sums import SHIFT, Total, add_units, add_up, carry, public_rows
from jaxdp.report import progress_bar
from jaxdp.transforms import forms
from jaxdp.transforms.boxes import Interval, lower, outward, slack, unchecked, upper
from jaxdp.transforms.interval_rules import certain_argmax
from jaxdp.transforms.intervals import bound, stage
from jaxdp.transforms.meshes import check_mesh, rounded_up
from jaxdp.transforms.precision import in_full_precision

# Halvings of the interval that contains the threshold of the largest entries (T6).
_HALVINGS = 8
_QUERIES = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bounds:
    """Nominal parameters and a box around them for each distance.

    Attributes:
      params: The parameters that training on the given data returns, a pytree.
      lower, upper: Pytrees like `params` with leaves [len(ks), ...]. Row i contains every parameter
        vector that training on a data set within distance ks[i] returns. Frozen leaves are repeated
        without copies.
      ks: The distances, increasing.
      threat, product: As in `train_with_bounds`.
      trainable: Whether each leaf was trained, in the order of `jax.tree.leaves(params)`.
    """

    params: Any
    lower: Any
    upper: Any
    ks: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    threat: Threat = dataclasses.field(metadata={"static": True})
    trainable: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    product: str = dataclasses.field(default="tight", metadata={"static": True})

    @property
    def layout(self) -> Layout:
        """The trained and the frozen leaves of `params`."""
        return Layout(jax.tree.structure(self.params), self.trainable)


class Certificates(NamedTuple):
    """Certified facts about predictions. They are PRIVATE: distances and logits depend on the
    training data.

    Attributes:
      label: int32 [Q], the class of the largest logit. For one logit: 1 if it is positive, else 0.
        It is the common label of all parameter vectors in the first row of the bounds if they
        agree, else the nominal label.
      distance: int32 [Q], the stable distance k'. No data set within distance k' changes the label.
        The k' of neighbouring data sets differ by at most 1. With a sparse grid of ks it counts
        certified grid points.
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
    threat: Threat = "add_remove",
    batches: int | None = None,
    order: np.ndarray | None = None,
    product: str = "tight",
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    lr_min: float = 0.0,
    trainable: Trainable | None = None,
    group: bool = False,
    mesh: Mesh | None = None,
    data_axes: Sequence[str] = ("data",),
) -> Bounds:
    """Trains with per-record clipped gradients and bounds the results of all data sets within
    distance k.

        bounds = train_with_bounds(loss_fn, params, data, ks=9, clip=0.1, learning_rate=0.5, batch_size=900, epochs=1)
        certify(bounds, apply_fn, queries).distance

    Step t with batch S (Algorithm 1):

        D = 1/batch_size sum_{i in S} clip(grad loss(theta, i), -clip, clip)    (see "very large batch")
        v = momentum v + D + weight_decay theta
        theta = theta - max(learning_rate / (1 + lr_decay t), lr_min) (v, or D + weight_decay theta + momentum v)

    Args:
      loss_fn: `loss_fn(params, example) -> scalar`, the deterministic loss of one example. Losses
        of `jaxdp.losses` have tight bounds. Bounds of other losses are sound but looser.
      params: The initial parameters, public.
      data: A pytree of arrays [n, ...], one row per record. With `group` the `jaxdp.data.Records`
          of n owners.
      ks: The distances. An int means all of 0..ks, as private mechanisms need. A sparse grid is
          allowed.
      clip: The bound of each coordinate of each record's gradient, which is clamped to [-clip,
          clip].
      learning_rate, lr_decay, lr_min, momentum, nesterov, weight_decay: Options of the optimizer,
      see the equations. batch_size: The public divisor of sums, except under "replace_per_batch".
      Choose about the number of records in a batch. Under "add_remove" do not compute it from their
      private number. epochs: The number of passes over the data. threat: The changes of the data
      set that the bounds cover. One change is one step of distance. "add_remove":
        records are added or removed, and each shifts a sum by at most `clip` (T4). "replace_one":
        records are replaced, and batches keep their size. "replace_per_batch": k records are
        replaced in EVERY batch, and sums are divided by the number of records in the batch (Theorem
        4.6). With product="rump" it is the published algorithm.
      batches: The public number of batches per epoch. The batch of a record is the same in every
        epoch and does not depend on other records. Under "add_remove" it is a hash of the record's
        contents, that is, of its row in every leaf of `data`. Equal records share a batch. A leaf
        with a stable id spreads them, and `loss_fn` may ignore it. Where records are replaced, the
        batch is the position modulo `batches`. None means 1 under "add_remove", because the number
        of records is private. Under "replace_one" it means round(n / batch_size), at least 1. Under
        "replace_per_batch" it means consecutive full batches, as published.
      order: int [steps, batch], the rows of records of each step, -1 for none. It replaces
        `batches` and `epochs`. It is refused under "add_remove": rows are positions, and a record
        that leaves changes the positions of others.
      product: "tight" or "rump", see `jaxdp.interval`.
      trainable: `trainable(path, leaf) -> bool` with paths such as "Dense_0/kernel". Other leaves
        are frozen, and values that depend on them alone are computed once per batch.
      group: Whether a row is an owner with all of its records:
        `patients.gather(np.arange(len(patients)))` of `jaxdp.data.by_group`. The loss of an owner
        is the mean of `loss_fn` over its records. Everything here that is said of a record then
        holds for an owner: `clip`, `batch_size` and ks count owners.
      mesh: The devices that share the distances. Each holds all records. The bounds are those of
        one device up to rounding, and rounded outward too. None is one device.
      data_axes: The axes of the mesh along which the distances are divided.

    Returns:
      `Bounds`, computed for all ks at once (compiled once per loss function, shapes and settings).

    Raises:
      ValueError: An argument is out of range or cannot be certified. Raised before any computation.
      TypeError: ks or order are not integers, a trained leaf is not floating point, or mesh is not
          a mesh.

    Formal guarantees:
      *Containment.* Let data' be within distance ks[i] of `data`, with batches assigned by the same
      rule. Training on data' by the equations above in real arithmetic ends inside row i. So does
      training in floating point, unless logits cancel almost completely. Changes count over the
      whole data set: the batches of an epoch share the budget (T8), except where the table says
      otherwise.

      *Stable distance.* If data and data' are neighbours, the box of data' at distance k - 1 lies
      inside the box of data at distance k. So the k' of `certify` is 1-Lipschitz, which mechanisms
      need. For product="tight" and threat "add_remove" or "replace_one" this holds in floating
      point too. Sums over records are exact integer sums of outward-rounded gradients, and other
      operations are monotone. It holds in real arithmetic only for tanh, erf and softmax inside the
      network (XLA's are not monotone in the last digits), and for momentum with weight decay.

      Nominal parameters and boxes are private. Only mechanisms in `jaxdp.prediction` release them.
      Hyperparameters and `order` must not be chosen by looking at the data.

      ============================  =================================================================================
      case                          behaviour
      ============================  =================================================================================
      k == 0                        the box is the rounding of the arithmetic
      gradient NaN or infinite      counts as anything in [-clip, clip]
      no record, or an empty batch  under "add_remove" a normal batch whose sum is zero
      very large batch              under "add_remove" each coordinate of the sum is clipped to M clip, where M is the
                                    multiple of 256 from 4 batch_size on, but at most 2^19 in float32 (M records or
                                    fewer never reach it)
      order repeats a record        budgets start again before the batch that repeats a record
      momentum and weight_decay     k changes in every batch, an error if a step's influence on the result changes sign
      "replace_per_batch"           k replacements in every batch
      ============================  =================================================================================
    """
    training = Training(
        clip=clip,
        learning_rate=learning_rate,
        batch_size=batch_size,
        epochs=epochs,
        threat=threat,
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
    check_mesh(mesh, data_axes, None)
    if group:
        if not isinstance(data, Records):
            raise TypeError(
                f"data must be jaxdp.data.Records with group=True, got {type(data).__name__}."
            )
        loss_fn = _MeanLoss(loss_fn)
    plan, arrays = make_plan(loss_fn, params, data, distances(ks), training)
    if mesh is not None:
        plan = dataclasses.replace(plan, mesh=mesh, data_axes=tuple(data_axes))
        arrays = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))
    nominal, low, high = _train(loss_fn, plan, *arrays)
    frozen = plan.layout.split(params)[1]
    rows = [np.broadcast_to(np.asarray(leaf), (len(plan.ks), *np.shape(leaf))) for leaf in frozen]
    trees = (
        plan.layout.join(nominal, frozen),
        plan.layout.join(low, rows),
        plan.layout.join(high, rows),
    )
    return Bounds(*trees, plan.ks, threat, plan.layout.trainable, product)


@dataclasses.dataclass(frozen=True)
class _MeanLoss:
    """The mean loss over an owner's records. Equal ones share a compiled program."""

    loss_fn: Callable[[Any, Any], jax.Array]

    def __call__(self, params: Any, owned: Records) -> jax.Array:
        each = jax.vmap(self.loss_fn, (None, 0))(params, owned.records)
        count = jnp.maximum(jnp.sum(owned.present), 1).astype(
            each.dtype
        )  # an unused row has no record
        return jnp.sum(jnp.where(owned.present, each, 0)) / count


# --- Gradients and their bounds -----------------------------------------------------------------

Leaves = list[jax.Array]
Box = tuple[Leaves, Leaves]
Descent = Callable[[jax.Array], Box]


class _Batch(NamedTuple):
    """A batch in blocks [outer, records, ...]. A place without a record has weight 0."""

    records: Any  # examples, and their weights
    kept: Any  # the part of the bounds that does not depend on the box, and the weights
    size: jax.Array  # number of records


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """The gradients of single records, their bounds over a box, and sums of both over a batch."""

    plan: Plan
    gradient: Callable[[Leaves, Any], Leaves]
    # The bounds in three steps: the part without the box (frozen layers), the part with it, the
    # final outer products.
    stages: Sequence[Callable[..., Any]]

    @classmethod
    def of(
        cls, loss_fn: Any, plan: Plan, moving: Leaves, frozen: Leaves, data: Any
    ) -> "_Gradients":
        def gradient(moving: Leaves, record: Any) -> Leaves:
            example, weight = record

            def loss(moving: Leaves) -> jax.Array:
                value = loss_fn(plan.layout.join(moving, frozen), example)
                return value * weight.astype(value.dtype)

            return jax.grad(loss)(moving)

        record = one_of(data), jax.ShapeDtypeStruct((), plan.grid.dtype)
        # The boxes hold training in the precision of its dtype, and a TPU multiplies in bfloat16 by
        # default.
        return cls(
            plan, in_full_precision(gradient), stage(gradient, moving, record, product=plan.product)
        )

    def batch(self, data: Any, rows: jax.Array) -> _Batch:
        """Returns the records of `rows`, -1 for none."""
        rows = rows.reshape(self.plan.blocks[0], -1)
        weights = (rows >= 0).astype(self.plan.grid.dtype)
        records = jax.tree.map(lambda x: x[jnp.maximum(rows, 0)], data), weights
        return _Batch(
            records, (lax.map(jax.vmap(self.stages[0]), records), weights), jnp.sum(weights)
        )

    def mean(self, params: Leaves, batch: _Batch) -> Leaves:
        """Returns the mean clipped gradient, D of `train_with_bounds`."""
        grid = self.plan.grid

        def summands(records: Any) -> Leaves:
            grads = jax.vmap(lambda record: self.gradient(params, record))(records)
            return [grid.sum(grid.bits(g, nearest=True), nearest=True) for g in grads]

        totals = add_up(
            grid, self.plan.blocks, params, batch.records, lambda block: block, summands
        )
        grads = [grid.mean(total, nearest=True) for total in totals]
        if self.plan.threat == "replace_per_batch":
            return [g * (grid.divisor / batch.size) for g in grads]
        return grads

    def factors(self, box: Box, kept: Any) -> Any:
        """Computes lines 6 and 7 of Algorithm 1 up to outer products, for a block of records."""
        boxes = [unchecked(low, high) for low, high in zip(*box, strict=True)]
        return jax.vmap(lambda one: self.stages[1](boxes, one))(kept[0]), kept[1]

    def bounds(self, factors: Any) -> Leaves:
        """Returns lower bounds of each record's gradient, then of its negative: leaves [records,
        ...].
        """
        ends = jax.vmap(self.stages[2])(factors[0])
        return [low for low, _ in ends] + [-high for _, high in ends]

    def bits(self, factors: Any) -> Leaves:
        """Returns `bounds`, clipped and rounded down to the grid."""
        grid, weights = self.plan.grid, factors[1]
        # A place without a record adds neither a unit of rounding nor the NaN of 0 * inf.
        return [
            jnp.where(_rows(weights, x) > 0, grid.bits(x), grid.bias())
            for x in self.bounds(factors)
        ]

    def total(
        self, box: Box, batch: _Batch, summands: Callable[[Any], Leaves], copies: int = 1
    ) -> list[Total]:
        """Returns sums over the batch of what `summands` makes from `factors`: `copies` times one
        per end of a leaf.
        """
        like, factors = [*box[0], *box[1]] * copies, functools.partial(self.factors, box)
        return add_up(self.plan.grid, self.plan.blocks, like, batch.kept, factors, summands)


def _rows(weights: jax.Array, x: jax.Array) -> jax.Array:
    return weights.reshape(-1, *(1,) * (x.ndim - 1))


def _box(lows: Leaves) -> Box:
    """Returns the box, from lower bounds of the leaves and of their negatives."""
    half = len(lows) // 2
    return lows[:half], [-low for low in lows[half:]]


# --- The set of descent directions (Theorem 4.6): `k -> bounds of the mean clipped gradient` ----
# The code has lower ends only. An upper end is the negative of the lower end of negated gradients.


def _add_remove(gradients: _Gradients, batch: _Batch, box: Box) -> Descent:
    """Returns D_L = (sum d_L - k clip) / batch_size. An added or removed record moves the sum by at
    most clip (T4).
    """
    grid = gradients.plan.grid
    totals = gradients.total(
        box, batch, lambda factors: [grid.sum(bits) for bits in gradients.bits(factors)]
    )
    return lambda k: _box([grid.mean(add_units(total, -k, grid.charge)) for total in totals])


def _replace_one(gradients: _Gradients, batch: _Batch, box: Box) -> Descent:
    """Returns D_L = (sum of the b - k smallest d_L - k clip) / batch_size (Theorem 4.6), streaming
    (T6).

    The k largest sum to min_tau k tau + sum max(d - tau, 0). Any tau gives a bound. The function is
    convex, so bisection finds its minimum over a fixed grid of tau. Hence the bound is isotonic.
    """
    grid, charge = gradients.plan.grid, gradients.plan.grid.charge

    def entries(factors: Any) -> Leaves:
        """Returns the integers of which the k largest leave. Places without a record get the least
        value.
        """
        return [
            jnp.where(_rows(factors[1], x) > 0, x - grid.bias(), -charge)
            for x in gradients.bits(factors)
        ]

    def add(xs: Leaves) -> Leaves:
        return [jnp.sum(x, axis=0, dtype=grid.ints) for x in xs]

    def above(taus: Leaves, factors: Any) -> Leaves:
        """Returns the sum of the excesses over tau, and the number of entries above it."""
        gaps = [e - tau[None] for e, tau in zip(entries(factors), taus, strict=True)]
        return add([jnp.maximum(g, 0) for g in gaps]) + add(
            [(g > 0).astype(grid.ints) for g in gaps]
        )

    size = math.prod(gradients.plan.blocks)
    absent = size - batch.size.astype(grid.ints)
    sums = gradients.total(box, batch, lambda factors: add(entries(factors)))
    sums = [add_units(total, absent, charge) for total in sums]

    def descent(k: jax.Array) -> Box:
        # (tau, sum of the excesses over it) at both ends of the search, where all entries or none
        # exceed tau.
        left = [(0 * total[0] - charge, add_units(total, size - absent, charge)) for total in sums]
        right = [(-tau, jax.tree.map(lambda x: 0 * x, excess)) for tau, excess in left]

        def halve(_: Any, ends: Any) -> Any:
            taus = [(a + b) >> 1 for (a, _), (b, _) in zip(*ends, strict=True)]
            totals = gradients.total(box, batch, functools.partial(above, taus), copies=2)
            middle = list(zip(taus, totals[: len(taus)], strict=True))
            # If at most k entries exceed tau, the minimum is not above it.
            rising = [(high << SHIFT) + low <= k for high, low in totals[len(taus) :]]
            left = [
                _choose(r, old, new) for r, old, new in zip(rising, ends[0], middle, strict=True)
            ]
            return left, [
                _choose(r, new, old) for r, old, new in zip(rising, ends[1], middle, strict=True)
            ]

        lows = []
        for total, *ends in zip(
            sums, *lax.fori_loop(0, _HALVINGS, halve, (left, right)), strict=True
        ):
            one, other = (add_units(excess, k, tau) for tau, excess in ends)
            less = (one[0] < other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
            largest = _choose(less, one, other)
            rest = carry(total[0] - largest[0], total[1] - largest[1])
            lows.append(grid.mean(add_units(rest, -k, charge)))
        return _box(lows)

    return descent


def _choose(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _replace_per_batch(gradients: _Gradients, batch: _Batch, box: Box) -> Descent:
    """Returns D_L = (SEMin_{b-k} d_L - k clip) / b, D_U = (SEMax_{b-k} d_U + k clip) / b (Theorem
    4.6), by sorting.
    """
    plan, clip, most = gradients.plan, gradients.plan.grid.clip, gradients.plan.ks[-1]
    kept = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.kept)
    shown, size = kept[1][None] > 0, kept[1].size

    def descent(k: jax.Array) -> Box:
        error = slack(plan.grid.dtype, size + most + 8) * clip * (1 + 2 * k / batch.size)

        def least(x: jax.Array) -> jax.Array:
            flat = jnp.clip(jnp.where(jnp.isnan(x), -clip, x), -clip, clip).reshape(size, -1).T
            total = jnp.sum(jnp.where(shown, flat, 0), axis=1)
            largest = lax.top_k(jnp.where(shown, flat, -jnp.inf), most)[0]
            leaving = jnp.pad(jnp.cumsum(largest, axis=1), ((0, 0), (1, 0)))
            mean = (total - jnp.take(leaving, k, axis=1) - k * clip) / batch.size - error
            return mean.reshape(x.shape[1:])

        return _box([least(x) for x in gradients.bounds(gradients.factors(box, kept))])

    return descent


_DESCENT: dict[Threat, Callable[[_Gradients, _Batch, Box], Descent]] = {
    "add_remove": _add_remove,
    "replace_one": _replace_one,
    "replace_per_batch": _replace_per_batch,
}


# --- The optimizer ------------------------------------------------------------------------------

Line = tuple[Leaves, Leaves, Leaves, Leaves]  # ends of the parameters and of the velocities


def _advance_box(plan: Plan, line: Line, grads: Box, rate: jax.Array) -> Line:
    """Makes one step of both ends. A lower parameter comes from a higher gradient, so velocities
    cross.
    """
    low, high, v_low, v_high = line
    low, v_high = _advance(plan, low, v_high, grads[1], rate, -1)
    high, v_low = _advance(plan, high, v_low, grads[0], rate, +1)
    return low, high, v_low, v_high


def _advance(
    plan: Plan, params: Leaves, velocity: Leaves, grads: Leaves, rate: jax.Array, sign: int = 0
) -> tuple[Leaves, Leaves]:
    """Makes one step of the nominal parameters (sign 0) or of an end of the box, with results
    rounded to that sign.
    """
    if sign and plan.weight_decay and not plan.momentum:
        decay, worst = rate * plan.weight_decay, jnp.minimum if sign < 0 else jnp.maximum
        error = slack(plan.grid.dtype, 4) * decay  # it may be large compared with 1 - decay
        least, most = jnp.maximum(1 - decay - error, 0), 1 - decay + error
        kept = [_out(worst(p * least, p * most), sign, 3) for p in params]
        return [
            _out(p - _out(rate * g, -sign), sign) for p, g in zip(kept, grads, strict=True)
        ], velocity

    def add(grads: Leaves, factor: float, xs: Leaves) -> Leaves:
        # The terms may cancel, so the product is rounded separately.
        return [_out(g + _out(factor * x, -sign, 2), -sign) for g, x in zip(grads, xs, strict=True)]

    if plan.weight_decay:
        # Each end decays by itself. This is exact, because no gradient's influence changes sign
        # (T10).
        grads = add(grads, plan.weight_decay, params)
    steps = grads
    if plan.momentum:
        steps = velocity = add(grads, plan.momentum, velocity)
    if plan.nesterov:
        steps = add(grads, plan.momentum, velocity)
    return [
        _out(p - _out(rate * s, -sign), sign) for p, s in zip(params, steps, strict=True)
    ], velocity


def _out(x: jax.Array, sign: int, roundings: int = 1) -> jax.Array:
    """Rounds a computed value outward, down for sign -1 and up for +1."""
    return outward(x, sign, roundings) if sign else x


# --- All batches --------------------------------------------------------------------------------


class _State(NamedTuple):
    """Nominal parameters, and lines: boxes that are trained in parallel, with a first axis.

    Before the first step `lines` is None: all lines are one point, whose gradients are bounded once
    (T5).
    """

    params: Leaves
    velocity: Leaves
    lines: Any


def _train(
    loss_fn: Any,
    plan: Plan,
    moving: Leaves,
    frozen: Leaves,
    data: Any,
    order: np.ndarray,
    rates: jax.Array,
) -> tuple[Leaves, Leaves, Leaves]:
    """Runs Algorithm 1 for all ks. Returns nominal, lower and upper leaves, the ends with a first
    axis [len(ks)].
    """
    ks = np.asarray(plan.ks)
    state, used = (
        _State(moving, [jnp.zeros_like(x) for x in moving] if plan.momentum else [], None),
        None,
    )
    ends, starts = np.arange(len(ks)), np.cumsum(plan.groups)
    if plan.shared_budget:
        # The first epoch has a line for each number j = 0..K of changes so far (T8).
        ends, used = ks, np.arange(ks[-1] + 1)
    step_plan = dataclasses.replace(plan, groups=())  # any number of epochs has the same programs
    with progress_bar(total=len(order), label="bounds", unit="batch") as bar:
        for step, (rows, rate) in enumerate(zip(order, np.asarray(rates), strict=True)):
            if used is not None and step in starts:
                # Later epochs have lines j = 0..k for each k that widened the box before. They
                # start from the line j = k.
                state = state._replace(lines=_take(state.lines, np.repeat(ends, ks + 1)))
                ends, used = np.cumsum(ks + 1) - 1, np.concatenate([np.arange(k + 1) for k in ks])
            state = jax.block_until_ready(
                _batch_step(loss_fn, step_plan, frozen, data, state, rows, rate, used)
            )
            bar.update()
    low, high, *_ = _take(state.lines, ends)
    return state.params, low, high


@jax.jit
def _take(lines: Any, rows: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[rows], lines)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batch_step(
    loss_fn: Any,
    plan: Plan,
    frozen: Leaves,
    data: Any,
    state: _State,
    rows: jax.Array,
    rate: jax.Array,
    used: jax.Array | None,
) -> _State:
    """Runs one batch. The first batch, the other ones of the first epoch, and those of later epochs
    are programs.
    """

    def step(
        frozen: Leaves, data: Any, state: _State, rows: jax.Array, rate: Any, used: Any
    ) -> _State:
        gradients = _Gradients.of(loss_fn, plan, state.params, frozen, data)
        changes = jnp.asarray(plan.ks) if used is None else jnp.zeros_like(used)
        return _step(gradients, gradients.batch(data, rows), state, rate, changes, used)

    result: _State = forms.for_platform(step, frozen, data, state, rows, rate, used)
    return result


def _step(
    gradients: _Gradients,
    batch: _Batch,
    state: _State,
    rate: jax.Array,
    changes: jax.Array,
    used: jax.Array | None,
) -> _State:
    """Runs one batch for the nominal parameters and all lines, a step of Algorithm 1.

    A line is a box that `changes` records of the batch may widen. With `used`, each line is for a
    number of changes so far in this epoch, and any number of them may be in this batch (T8).
    """
    plan, (params, velocity, lines) = gradients.plan, state
    descent = functools.partial(_DESCENT[plan.threat], gradients, batch)
    each = functools.partial(_each, plan)
    grads = gradients.mean(params, batch)
    if lines is None:
        point, at_point = (params, params, velocity, velocity), descent((params, params))
        lines = each(lambda k: _advance_box(plan, point, at_point(k), rate), changes)
    else:

        def move(now: Any) -> Line:
            k, line = now
            return _advance_box(plan, line, descent(line[:2])(k), rate)

        lines = each(move, (changes, lines))
    if used is not None:
        lines = _share(plan, lines, used, rate)
    return _State(*_advance(plan, params, velocity, grads, rate), lines)


def _each(plan: Plan, function: Callable[[Any], Line], xs: Any) -> Line:
    """Returns `function` of every line. The devices of a mesh share the lines, the last of which
    pads them.
    """

    def run(xs: Any) -> Line:
        # A processor runs the lines in sequence, for its cache. An accelerator runs them in
        # parallel.
        lines: Line = lax.map(function, xs) if forms.platform() == "cpu" else jax.vmap(function)(xs)
        return lines

    if plan.mesh is None:
        return run(xs)
    count = len(jax.tree.leaves(xs)[0])
    (size,) = rounded_up((count,), plan.mesh, plan.data_axes)
    divided = PartitionSpec(plan.data_axes)
    shared = jax.shard_map(
        run, mesh=plan.mesh, in_specs=divided, out_specs=divided, check_vma=False
    )
    padded = jax.tree.map(lambda x: x[np.minimum(np.arange(size), count - 1)], xs)
    return jax.tree.map(lambda x: x[:count], shared(padded))


def _share(plan: Plan, lines: Line, used: jax.Array, rate: jax.Array) -> Line:
    """Widens each line by the changes that may be in this batch (T8).

    L^(j) = min_i (base L^(j-i) - i shift) is a running minimum over the lines of one k. Each
    further change shifts the mean gradient by at most clip / batch_size, a replacement by twice as
    much.
    """
    grid, dtype = plan.grid, plan.grid.dtype
    # In whole units of `mean`, plus the roundings of both sums.
    records, one = 2 if plan.threat == "replace_one" else 1, 2**SHIFT
    units = math.ceil(records * grid.charge / one) * one * grid.unit / grid.clip
    units += slack(dtype, 8) * public_rows(grid.divisor) / (1 - plan.momentum)
    charge = units * (1 + 8 * slack(dtype, 1)) * grid.clip / grid.divisor
    amounts = [charge * (1 + plan.momentum * plan.nesterov) * rate] * 2 + [
        jnp.asarray(charge, dtype)
    ] * 2

    def line(previous: Any, current: Any) -> Any:
        j, base = current
        merged = []
        for part, before, sign, amount in zip(base, previous, (-1, 1, -1, 1), amounts, strict=True):
            worst = jnp.minimum if sign < 0 else jnp.maximum
            reached = [
                worst(x, _out(y + sign * amount, sign, 6))
                for x, y in zip(part, before, strict=True)
            ]
            merged.append([jnp.where(j == 0, x, y) for x, y in zip(part, reached, strict=True)])
        return tuple(merged), tuple(merged)

    return lax.scan(line, jax.tree.map(lambda x: x[0], lines), (used, lines))[1]


# --- Predictions (Lemma 4.4) --------------------------------------------------------------------


def certify(
    bounds: Bounds,
    apply_fn: Callable[[Any, Any], jax.Array],
    queries: Any,
    *,
    product: str = "tight",
) -> Certificates:
    """Finds the distance up to which changes of the training data do not change a prediction (Lemma
    4.4).

    The label is stable at distance k if the same logit is the largest for every parameter vector in
    row k. Differences of logits are bounded as differences of the last layer's weights (T2), which
    is tighter than comparing intervals.

    Args:
      bounds: The result of `train_with_bounds`.
      apply_fn: `apply_fn(params, query) -> logits` of ONE query, [] or [1] (label 1 if positive) or
          [C].
      queries: A pytree of arrays [Q, ...], Q >= 1, finite.
      product: See `jaxdp.interval`.

    Returns:
      `Certificates`. The distance is the largest k in bounds.ks up to which the label is certified
      without a gap. If the ks skip integers, it is the number of certified ks above 0, because k
      itself would jump by more than 1 between neighbouring data sets. Mechanisms need 0 among the
      ks. Then neighbours agree on the label even if their nominal logits differ by rounding.

    Raises:
      TypeError, ValueError: bounds, logits or queries are not as above.
    """
    if not isinstance(bounds, Bounds):
        raise TypeError(f"bounds must come from train_with_bounds, got {type(bounds).__name__}.")
    check_queries(apply_fn, bounds.params, queries)
    (moving, frozen), (low, _), (high, _) = map(
        bounds.layout.split, (bounds.params, bounds.lower, bounds.upper)
    )
    queries = jax.tree.map(jnp.asarray, queries)
    found = []
    for k in progress_bar(range(len(bounds.ks)), label="certificates", unit="distance"):
        certain = _certain(
            apply_fn, product, bounds.layout, (low, high), np.int32(k), frozen, queries
        )
        found.append(jax.block_until_ready(certain))
    return _certificates(apply_fn, bounds.layout, bounds.ks, moving, frozen, queries, found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _certain(
    apply_fn: Any,
    product: str,
    layout: Layout,
    box: Box,
    row: jax.Array,
    frozen: Leaves,
    queries: Any,
) -> tuple[jax.Array, Box]:
    """Returns the certain labels [Q] in a row of the box, or -1, and the ends of logits [Q, C]."""
    boxes = [unchecked(low[row], high[row]) for low, high in zip(*box, strict=True)]

    def one(query: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        (logits,), _ = bound(apply_fn, (layout.join(boxes, frozen), query), product=product)
        a, b = (jnp.asarray(end).reshape(-1) for end in (lower(logits), upper(logits)))
        if a.size == 1:
            return jnp.where(a[0] > 0, 1, jnp.where(b[0] <= 0, 0, -1)).astype(jnp.int32), (a, b)
        return certain_argmax(logits, product), (a, b)

    return lax.map(one, queries, batch_size=_QUERIES)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _certificates(
    apply_fn: Any,
    layout: Layout,
    ks: tuple[int, ...],
    moving: Leaves,
    frozen: Leaves,
    queries: Any,
    found: list[tuple[jax.Array, Box]],
) -> Certificates:
    """Returns the certificates from the certain labels [Q] and the ends of logits [Q, C] of every
    row.
    """
    certain, ends = jax.tree.map(lambda *rows: jnp.stack(rows), *found)
    below, above = (
        jnp.where(jnp.isnan(end), sign * jnp.inf, end)
        for end, sign in zip(ends, (-1, 1), strict=True)
    )

    def nominal(query: Any) -> jax.Array:
        logits = in_full_precision(apply_fn)(layout.join(moving, frozen), query).reshape(-1)
        return (logits[0] > 0 if logits.size == 1 else jnp.argmax(logits)).astype(jnp.int32)

    # Rounding may order nominal logits differently from all logits in the box.
    labels = jnp.where(certain[0] >= 0, certain[0], lax.map(nominal, queries, batch_size=_QUERIES))
    counted = np.asarray(ks) > 0
    distance = jnp.sum(
        jnp.cumprod(certain == labels[None], axis=0)[counted], axis=0, dtype=jnp.int32
    )
    return Certificates(labels, distance, unchecked(below, above))
