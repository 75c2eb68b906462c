"""Abstract Gradient Training: bounds on all parameters that training on a neighbouring data set
could give.

The module follows Algorithm 1 of Wicker et al., "Certification for Differentially Private
Prediction in Gradient-Based Training" (ICML 2025, arXiv:2406.13433). A compiled step covers all
distances k.

1. `_train` runs all batches, for all k.
2. `_step` runs one batch. `descent.Gradients` bounds every record's clipped gradient over the box
   of parameters reached so far, and `descent.DESCENT` bounds the mean gradient when up to k records
   change, by Theorem 4.6 or by T4.
3. `optimizer.advance_box` makes a step of the optimizer for both ends of the box.
4. `certificates.certify` finds the predictions that no parameters in the box change (Lemma 4.4).

docs/design/prediction.md has the derivations T1 to T13 and the proof that the stable distance is
1-Lipschitz.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp.data import Records
from jaxdp.files import shows_keywords
from jaxdp.prediction.certificates import Bounds, Certificates, certify
from jaxdp.prediction.checks import distances
from jaxdp.prediction.descent import DESCENT, Descent, Gradients, Leaves
from jaxdp.prediction.optimizer import Line, advance, advance_box, out
from jaxdp.prediction.plan import BY_RECORD, Arrays, Plan, Training, TrainingKeywords, make_plan
from jaxdp.prediction.sums import SHIFT, public_rows
from jaxdp.report import progress_bar
from jaxdp.transforms import forms
from jaxdp.transforms.boxes import slack
from jaxdp.transforms.meshes import check_mesh, rounded_up

__all__ = ["Bounds", "Certificates", "certify", "train_with_bounds", "training_programs"]

# A compiled function, arguments for its `lower`, and the number of its calls.
Call = tuple[Any, tuple[Any, ...], int]


@shows_keywords(TrainingKeywords, dict.fromkeys(TrainingKeywords.__annotations__) | vars(Training))
def train_with_bounds(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    *,
    ks: int | Sequence[int],
    training: Training | None = None,
    group: bool = False,
    mesh: Mesh | None = None,
    data_axes: Sequence[str] = ("data",),
    **options: Unpack[TrainingKeywords],
) -> Bounds:
    """Trains with per-record clipped gradients and bounds the results of all data sets within
    distance k.

        bounds = train_with_bounds(
            loss_fn, params, data, ks=9, clip=0.1, learning_rate=0.5, batch_size=900, epochs=1
        )
        certify(bounds, apply_fn, queries).distance

    Step t with batch S (Algorithm 1):

        D = 1/batch_size sum_{i in S} clip(grad loss(theta, i), -clip, clip)
        v = momentum v + D + weight_decay theta
        theta = theta - max(learning_rate / (1 + lr_decay t), lr_min) v

    With `nesterov` the last line has D + weight_decay theta + momentum v in place of v. `dampening`
    scales D + weight_decay theta by 1 - dampening in the second line after the first step. `l1`
    ends a step with the proximal map of its penalty. The table has the sum of a very large batch.

    Args:
      loss_fn: `loss_fn(params, example) -> scalar`, the deterministic loss of one example. Losses
        of `jaxdp.losses` have tight bounds. Bounds of other losses are sound but looser.
      params: The initial parameters, public.
      data: A pytree of arrays [n, ...], one row per record. With `group` the `jaxdp.data.Records`
          of n owners.
      ks: The distances. An int means all of 0..ks, as private mechanisms need. A sparse grid is
          allowed.
      training: The options of the training.
      group: Whether a row is an owner with all of its records:
        `patients.gather(np.arange(len(patients)))` of `jaxdp.data.by_group`. The loss of an owner
        is the mean of `loss_fn` over its records. Everything here that is said of a record then
        holds for an owner: `clip`, `batch_size` and ks count owners.
      mesh: The devices that share the distances. Each holds all records. The bounds are those of
        one device up to rounding, and rounded outward too. None is one device.
      data_axes: The axes of the mesh along which the distances are divided.
      **options: The fields of `Training` as keywords, in place of `training`: clip, learning_rate,
        batch_size, epochs, threat, batches, order, product, momentum, nesterov, weight_decay,
        lr_decay, lr_min, trainable, dampening, l1, public, poisoning.

    Returns:
      `Bounds`, computed for all ks at once (compiled once per loss function, shapes and settings).

    Raises:
      ValueError: An argument is out of range or cannot be certified. Raised before any computation.
      TypeError: An option is unknown, is missing or is given twice, ks or order are not integers, a
          trained leaf is not floating point, or mesh is not a mesh.

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
      network (XLA's are not monotone in the last digits), and for momentum with weight decay. For
      the threats "remove" and "poison" containment is all that is claimed.

      Nominal parameters and boxes are private. Only mechanisms in `jaxdp.prediction` release them.
      Hyperparameters and `order` must not be chosen by looking at the data.

      ============================  ==============================================================
      case                          behaviour
      ============================  ==============================================================
      k == 0                        the box is the rounding of the arithmetic
      gradient NaN or infinite      counts as anything in [-clip, clip]
      no record, or an empty batch  under "add_remove" a normal batch whose sum is zero
      very large batch              under "add_remove" each coordinate of the sum is clipped to
                                    M clip, where M is the multiple of 256 from 4 batch_size on,
                                    but at most 2^19 in float32 (M records or fewer never reach it)
      order repeats a record        budgets start again before the batch that repeats a record
      momentum and weight_decay     k changes in every batch, an error if a step's influence on the
                                    result changes sign
      "replace_per_batch"           k replacements in every batch
      more changes than records     under "remove" and "poison" all records of a batch may change
      ============================  ==============================================================
    """
    training = _one_training(training, options)
    check_mesh(mesh, data_axes, None)
    if group:
        _check_records(data)
        loss_fn = _MeanLoss(loss_fn)
    plan, arrays = make_plan(loss_fn, params, data, distances(ks), training)
    if mesh is not None:
        plan = dataclasses.replace(plan, mesh=mesh, data_axes=tuple(data_axes))
        on_every_device = NamedSharding(mesh, PartitionSpec())
        # Once, because every step reads them.
        arrays = jax.device_put(arrays, on_every_device)
    nominal, low, high = _train(loss_fn, plan, arrays)
    layout = plan.layout
    rows = [_in_rows(leaf, len(plan.ks)) for leaf in arrays.frozen]
    return Bounds(
        params=layout.join(nominal, arrays.frozen),
        lower=layout.join(low, rows),
        upper=layout.join(high, rows),
        ks=plan.ks,
        threat=training.threat,
        trainable=layout.trainable,
        product=training.product,
    )


@shows_keywords(TrainingKeywords, dict.fromkeys(TrainingKeywords.__annotations__) | vars(Training))
def training_programs(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    *,
    ks: int | Sequence[int],
    training: Training | None = None,
    **options: Unpack[TrainingKeywords],
) -> Mapping[str, Call]:
    """Returns the compiled functions of `train_with_bounds`, each with arguments for its `lower`
    and the number of its calls.

    "first batch" is called once, "batch" for others of its epoch, and "later batch" in later
    epochs, which have more boxes. The first two are mostly one program, which JAX compiles once.
    What is never called is left out. Nothing is computed.

    Args:
      loss_fn, params, data, ks, training, **options: As in `train_with_bounds`, for one device.

    Raises:
      ValueError, TypeError: As `train_with_bounds`.
    """
    training = _one_training(training, options)
    plan, arrays = make_plan(loss_fn, params, data, distances(ks), training)
    # The number of epochs is no part of a program, as in `_train`.
    step_plan = dataclasses.replace(plan, groups=())
    frozen = arrays.frozen
    records = arrays.data
    rows = arrays.order[0]
    rate = arrays.rates[0]
    batches = len(arrays.order)
    boundary = _first_batches(plan)
    functions: dict[str, Call] = {}

    def add(name: str, count: int, state: _State, used: Any) -> _State:
        """Adds a function, and returns the state after its first call."""
        inputs = loss_fn, step_plan, frozen, records, state, rows, rate, used
        if count:
            functions[name] = _batch_step, inputs, count
        after: _State = _batch_step.eval_shape(*inputs)
        return after

    state, used = _start(plan, arrays)
    state = add("first batch", 1, state, used)
    state = add("batch", boundary - 1, state, used)
    if batches > boundary:
        results = np.asarray(plan.ks)
        new_budget = functools.partial(_with_new_budget, plan, results=results)
        state, used = jax.eval_shape(new_budget, state)
        rest = batches - boundary
        add("later batch", rest, state, used)
    return functions


def _check_records(data: Any) -> None:
    if not isinstance(data, Records):
        raise TypeError(
            f"data must be jaxdp.data.Records with group=True, got {type(data).__name__}."
        )


def _one_training(training: Training | None, options: TrainingKeywords) -> Training:
    """Returns the options, which are one `Training` or its fields."""
    if training is None:
        return Training(**options)
    if options:
        names = ", ".join(sorted(options))
        raise TypeError(
            f"training and {names} exclude each other. Use"
            " dataclasses.replace(training, ...) to change a field."
        )
    return training


@dataclasses.dataclass(frozen=True)
class _MeanLoss:
    """The mean loss over an owner's records. Equal ones share a compiled program."""

    loss_fn: Callable[[Any, Any], jax.Array]

    def __call__(self, params: Any, owned: Records) -> jax.Array:
        # [rows of an owner]
        losses = jax.vmap(self.loss_fn, (None, 0))(params, owned.records)
        # An unused row has no record.
        count = jnp.maximum(jnp.sum(owned.present), 1).astype(losses.dtype)
        # Not a product with 0, because the loss of an unused row may be NaN.
        present_losses = jnp.where(owned.present, losses, 0)
        return jnp.sum(present_losses) / count


# --- All batches (Algorithm 1) ------------------------------------------------------------------


class _State(NamedTuple):
    """Nominal parameters, and the lines.

    Before the first step all lines are one point, whose gradients are bounded once (T5).

    Attributes:
      params, velocity: The nominal parameters and their velocities.
      lines: The lines. None before a first step that has a program of its own.
      first: Whether the next step is the first one, of a program that it shares with others. None
        in other programs.
    """

    params: Leaves
    velocity: Leaves
    lines: Any
    first: Any = None


def _train(
    loss_fn: Any,
    plan: Plan,
    arrays: Arrays,
) -> tuple[Leaves, Leaves, Leaves]:
    """Runs Algorithm 1 for all ks.

    Returns:
      Nominal, lower and upper leaves. The ends have a first axis [len(ks)].
    """
    ks = np.asarray(plan.ks)
    state, used = _start(plan, arrays)
    # The line of each k, at the end.
    results = ks if plan.shared_budget else np.arange(len(ks))
    first_steps = np.cumsum(plan.groups)  # of later groups of batches, such as epochs
    step_plan = dataclasses.replace(plan, groups=())  # any number of epochs has the same programs
    schedule = zip(arrays.order, np.asarray(arrays.rates), strict=True)
    with progress_bar(total=len(arrays.order), label="bounds", unit="batch") as bar:
        for step, (rows, rate) in enumerate(schedule):
            if used is not None and step in first_steps:  # T8: an epoch counts anew
                state, used = _with_new_budget(plan, state, results)
                results = np.cumsum(ks + 1) - 1  # the line j = k of each k
            inputs = arrays.frozen, arrays.data, state, rows, rate, used
            state = _batch_step(loss_fn, step_plan, *inputs)
            # Otherwise batches queue up, and the bar runs ahead of them.
            state = jax.block_until_ready(state)
            bar.update()
    low, high = _at(state.lines[:2], results)
    return state.params, low, high


def _start(plan: Plan, arrays: Arrays) -> tuple[_State, np.ndarray | None]:
    """Returns the state before the first batch, and the changes so far of each line (T8)."""
    velocity: list[Any] = []
    if plan.momentum:
        velocity = [np.zeros(x.shape, x.dtype) for x in arrays.moving]  # compiles nothing
    # One line for each number of changes up to the largest k. All ks share them in the first epoch.
    used = np.arange(plan.ks[-1] + 1) if plan.shared_budget else None
    lines = first = None
    if _shares_program(plan):
        count = len(plan.ks) if used is None else len(used)
        point = arrays.moving, arrays.moving, velocity, velocity
        # All lines are the initial parameters.
        lines = jax.tree.map(lambda x: _in_rows(x, count), point)
        first = np.asarray(True)
    return _State(arrays.moving, velocity, lines, first), used


def _in_rows(x: Any, count: int) -> np.ndarray:
    """Returns an array that is `count` times x, without copies."""
    return np.broadcast_to(np.asarray(x), (count, *np.shape(x)))


def _shares_program(plan: Plan) -> bool:
    """Returns whether the first batch and the next ones are one program.

    A program of its own would take as long to compile as that of all others.
    """
    if plan.threat in BY_RECORD and plan.shared_budget:
        return False  # `_spend` needs lines of different numbers of changes
    return _first_batches(plan) > 1


def _first_batches(plan: Plan) -> int:
    """Returns the number of batches before the number of lines grows."""
    if plan.shared_budget:
        return plan.groups[0]
    return sum(plan.groups)


def _with_new_budget(plan: Plan, state: _State, results: np.ndarray) -> tuple[_State, np.ndarray]:
    """Returns the state and the changes so far of each line at the start of an epoch.

    The k changed records are in every epoch. So an epoch starts from the box of all k changes and
    counts its own from 0: each k has k + 1 lines, one for each j = 0..k.
    """
    counts = np.asarray(plan.ks) + 1
    from_last = np.repeat(results, counts)
    lines = _at(state.lines, from_last)  # the box of all k changes
    used = np.concatenate([np.arange(count) for count in counts])
    return state._replace(lines=lines, first=None), used


def _at(lines: Any, rows: np.ndarray) -> Any:
    """Returns rows of all arrays of lines."""
    every_row = np.arange(len(jax.tree.leaves(lines)[0]))
    return lines if np.array_equal(rows, every_row) else _take(lines, rows)


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
    """Runs one batch.

    There is a program for the first epoch, and one for later epochs, because their numbers of lines
    differ.
    """

    def step(
        frozen: Leaves,
        data: Any,
        state: _State,
        rows: jax.Array,
        rate: Any,
        used: Any,
    ) -> _State:
        gradients = Gradients.of(loss_fn, plan, state.params, frozen, data)
        return _step(gradients, data, rows, state, rate, used)

    result: _State = forms.for_platform(step, frozen, data, state, rows, rate, used)
    return result


def _step(
    gradients: Gradients,
    data: Any,
    rows: jax.Array,
    state: _State,
    rate: jax.Array,
    used: jax.Array | None,
) -> _State:
    """Runs one batch for the nominal parameters and all lines, a step of Algorithm 1."""
    plan = gradients.plan
    params, velocity, lines, first = state
    if lines is None:
        plan = dataclasses.replace(plan, dampening=0.0)  # the first step is not dampened
    # Without a shared budget k records of this batch change. With it none does at first, and
    # `_share_budget` adds the changes that may be in this batch.
    by_record = plan.threat in BY_RECORD
    if used is None:
        changes = jnp.asarray(plan.ks)
    elif by_record:
        changes = used  # line j may spend all of its changes in the first batch
    else:
        changes = jnp.zeros_like(used)
    batch = gradients.batch(data, rows)
    descent = DESCENT[plan.threat](gradients, batch)
    grads = gradients.mean(params, batch)  # D of `train_with_bounds`
    if lines is None:
        point = params, params, velocity, velocity
        sums_of_point = descent.sums(point[:2])  # once for all lines (T5)

        def advance_point(k: jax.Array) -> Line:
            grads = descent.bounds(sums_of_point, point[:2], k)
            return advance_box(plan, point, grads, rate)

        each = functools.partial(_each, advance_point)
        lines = _for_lines(plan, each, changes)
    # A change moves a sum by as much as its record allows, so each line has its own.
    elif by_record and used is not None:
        lines = _spend(plan, descent, lines, used, rate)
    else:

        def advance_line(sums: Any, k_and_line: tuple[jax.Array, Line]) -> Line:
            k, line = k_and_line
            grads = descent.bounds(sums, line[:2], k)
            return advance_box(plan, line, grads, rate, first)

        def sums_of(k_and_line: tuple[jax.Array, Line]) -> Any:
            _, line = k_and_line
            return descent.sums(line[:2])

        each = functools.partial(_each_of_lines, sums_of, advance_line, first)
        lines = _for_lines(plan, each, (changes, lines))
    if used is not None and not by_record:
        lines = _share_budget(plan, lines, used, rate, batch.changeable, first)
    params, velocity = advance(plan, params, velocity, grads, rate, first=first)
    if first is not None:
        first = jnp.zeros_like(first)
    return _State(params, velocity, lines, first)


def _each(function: Callable[[Any], Line], xs: Any) -> Line:
    """Returns `function` of every line."""
    # A processor runs the lines in sequence, for its cache. An accelerator runs them in parallel.
    if forms.platform() == "cpu":
        lines: Line = lax.map(function, xs)
        return lines
    return jax.vmap(function)(xs)


def _each_of_lines(
    sums_of: Callable[[Any], Any],
    advance_line: Callable[[Any, Any], Line],
    first: jax.Array | None,
    xs: Any,
) -> Line:
    """Returns `advance_line(sums_of(x), x)` of every line.

    If `first` is true, all lines are one point and share its sums (T5).
    """

    def alone(x: Any) -> Line:
        return advance_line(sums_of(x), x)

    if first is None:
        return _each(alone, xs)
    start = jax.tree.map(lambda x: x[0], xs)

    def of_point(xs: Any) -> Line:
        sums = sums_of(start)
        advance_point = functools.partial(advance_line, sums)
        return _each(advance_point, xs)

    if forms.platform() != "cpu":
        of_boxes = functools.partial(_each, alone)
        lines: Line = lax.cond(first, of_point, of_boxes, xs)
        return lines

    # In sequence the program has the sums once: a line takes over those of the line before.
    def one(sums: Any, position_and_x: tuple[jax.Array, Any]) -> tuple[Any, Line]:
        position, x = position_and_x
        is_again = first & (position > 0)
        sums = lax.cond(is_again, lambda: sums, lambda: sums_of(x))
        return sums, advance_line(sums, x)

    # The first line always computes its sums, so these zeros are never used.
    shapes = jax.eval_shape(sums_of, start)
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    k_of_lines, _ = xs
    positions = jnp.arange(len(k_of_lines))
    _, lines = lax.scan(one, none, (positions, xs))
    return lines


def _for_lines(
    plan: Plan,
    run: Callable[[Any], Line],
    xs: Any,
) -> Line:
    """Returns `run(xs)` for an `xs` of all lines. The devices of a mesh share the lines."""
    if plan.mesh is None:
        return run(xs)
    count = len(jax.tree.leaves(xs)[0])
    # Each device gets equally many lines.
    (size,) = rounded_up((count,), plan.mesh, plan.data_axes)
    by_device = PartitionSpec(plan.data_axes)
    shared = jax.shard_map(
        run, mesh=plan.mesh, in_specs=by_device, out_specs=by_device, check_vma=False
    )
    rows = np.minimum(np.arange(size), count - 1)  # the last line pads them
    padded = jax.tree.map(lambda x: x[rows], xs)
    return jax.tree.map(lambda x: x[:count], shared(padded))


# --- One budget for all batches of an epoch (T8) ------------------------------------------------


def _share_budget(
    plan: Plan,
    lines: Line,
    used: jax.Array,
    rate: jax.Array,
    changeable: jax.Array,
    first: jax.Array | None,
) -> Line:
    """Widens each line by the changes that may be in this batch (T8).

    L^(j) = min_i (base L^(j-i) - i shift) is a running minimum over the lines of one k, where
    base L has no change in this batch. The line before, already widened, has the minimum over
    i >= 1.
    """
    # New gradients enter the velocity by this share, and so does one more change.
    share = 1 - plan.dampening
    shift_of_mean = _shift_of_mean(plan)
    charge = jnp.asarray(share * shift_of_mean, plan.grid.dtype)
    if first is not None:
        undampened = jnp.asarray(shift_of_mean, plan.grid.dtype)
        charge = jnp.where(first, undampened, charge)
    if plan.threat == "replace_one":
        charge = jnp.where(changeable > 0, charge, 0)  # all records of this batch may be public
    of_params = charge * (1 + plan.momentum * plan.nesterov) * rate  # nesterov: D enters twice
    of_velocity = charge

    def widen_line(previous: Line, current: tuple[jax.Array, Line]) -> tuple[Line, Line]:
        j, base = current

        def widen(
            part: int,
            sign: int,
            shift: jax.Array,
        ) -> Leaves:
            outermost = jnp.minimum if sign < 0 else jnp.maximum
            reached = []
            for x, before in zip(base[part], previous[part], strict=True):
                # Roundings of the sum, and of the products that make the shift.
                shifted = out(before + sign * shift, sign, 6)
                reached.append(outermost(x, shifted))
            # j = 0 is the first line of a k, and no line of this k is before it.
            return [jnp.where(j == 0, x, y) for x, y in zip(base[part], reached, strict=True)]

        low = widen(0, -1, of_params)
        high = widen(1, +1, of_params)
        v_low = widen(2, -1, of_velocity)
        v_high = widen(3, +1, of_velocity)
        line = low, high, v_low, v_high
        return line, line

    start = jax.tree.map(lambda x: x[0], lines)
    _, widened = lax.scan(widen_line, start, (used, lines))
    return widened


def _spend(
    plan: Plan,
    descent: Descent,
    lines: Line,
    used: jax.Array,
    rate: jax.Array,
) -> Line:
    """Runs one batch in which each line makes some of its changes (T8 for T11 and T12).

    Line j + i of a k contains what line j reaches with i changes in this batch. How far a change
    moves a sum depends on the line, so a running minimum does not do.
    """
    count = len(used)
    # No line makes more changes than the largest k.
    most = plan.ks[-1]
    low, high, v_low, v_high = (_filled(ends, jnp.inf) for ends in lines)  # the hull of nothing
    nothing = low, _filled(high, -jnp.inf), v_low, _filled(v_high, -jnp.inf)

    def spend_line(reached: Line, row_of_line: tuple[jax.Array, Line]) -> tuple[Line, None]:
        row, line = row_of_line
        sums = descent.sums(line[:2])

        def spend(changes: jax.Array, reached: Line) -> Line:
            target = row + changes
            # A target behind the last line is no line, and is left out below.
            place = jnp.minimum(target, count - 1)
            # Lines of one k are consecutive and count their changes from 0.
            is_of_this_k = used[place] == used[row] + changes
            is_line = (target < count) & is_of_this_k
            grads = descent.bounds(sums, line[:2], changes)
            advanced = advance_box(plan, line, grads, rate)
            return _hull_at(reached, place, advanced, is_line)

        widened = lax.fori_loop(0, most + 1, spend, reached)
        return widened, None

    rows = jnp.arange(count)
    reached: Line
    reached, _ = lax.scan(spend_line, nothing, (rows, lines))
    return reached


def _filled(xs: Leaves, value: float) -> Leaves:
    return [jnp.full_like(x, value) for x in xs]


def _hull_at(
    lines: Line,
    place: jax.Array,
    line: Line,
    condition: jax.Array,
) -> Line:
    """Widens the line at a place so that it contains another one, if a condition holds."""

    def widened(part: int, sign: int) -> Leaves:
        ends = []
        for x, y in zip(lines[part], line[part], strict=True):
            # Infinity leaves the end as it is: +inf in a minimum, -inf in a maximum.
            new = jnp.where(condition, y, -sign * jnp.inf)
            end = x.at[place]
            ends.append(end.min(new) if sign < 0 else end.max(new))
        return ends

    return widened(0, -1), widened(1, +1), widened(2, -1), widened(3, +1)


def _shift_of_mean(plan: Plan) -> float:
    """Returns how much one more change in a batch shifts the mean gradient, at most.

    It is clip / batch_size for a record that comes or goes, and twice as much for a replacement.
    Added are the units of `Grid.mean` and the roundings of both sums.
    """
    grid, dtype = plan.grid, plan.grid.dtype
    records = 2 if plan.threat == "replace_one" else 1
    whole_unit = 2**SHIFT  # `mean` drops the lower part of a total
    in_clips = math.ceil(records * grid.charge / whole_unit) * whole_unit * grid.unit / grid.clip
    # The rounding of a sum of so many records, and of a velocity of 1 / (1 - momentum) such sums.
    in_clips += slack(dtype, 8) * public_rows(grid.divisor) / (1 - plan.momentum)
    # Rounded up, because the charge is used in floats of this dtype.
    return in_clips * (1 + 8 * slack(dtype, 1)) * grid.clip / grid.divisor
