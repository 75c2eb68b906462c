"""What `train_with_bounds` checks and decides before any work: settings, order of batches, shape of the sums."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from jaxdp.prediction.ensembles import partition_by_hash
from jaxdp.prediction.sums import BLOCK, Grid, public_rows

# Gradients of more parameters than this are summed 8 records at a time, which XLA unrolls and vectorises on a
# processor: six times faster than 12 at a time. Smaller ones gain from fewer, longer fragments.
_LARGE, _UNROLLED, _FRAGMENT = 2**14, 8, 128
# Batches are assigned by a hash of the record; the salt only has to be the same for every data set.
_SALT = b"jaxdp batches"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a run; equal plans share one compiled program."""

    ks: tuple[int, ...]
    clip: float
    divisor: int
    adjacency: str
    product: str
    momentum: float
    nesterov: bool
    weight_decay: float
    trainable: tuple[bool, ...]
    structure: Any
    blocks: tuple[int, int, int]  # of a batch: outer blocks, fragments in each, records in a fragment
    groups: tuple[int, ...]  # number of steps in which no record occurs twice, in turn; budgets are shared within
    shared_budget: bool


def distances(ks: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the distances to certify: all of 0..ks for an int."""
    if isinstance(ks, int | np.integer) and not isinstance(ks, bool):
        if ks < 0:
            raise ValueError(f"ks={ks} is negative; a distance counts changed records")
        return tuple(range(int(ks) + 1))
    values = [*ks] if isinstance(ks, Iterable) else [ks]
    if not all(isinstance(k, int | np.integer) and not isinstance(k, bool) for k in values):
        raise TypeError(f"ks={values} must be integers")
    if not values or min(values) < 0:
        raise ValueError(f"ks={values} must hold at least one distance, and none below 0")
    if sorted(set(values)) != values:
        raise ValueError(f"ks={values} must increase")
    return tuple(int(k) for k in values)


def positive(name: str, value: Any, meaning: str) -> float:
    """Returns `value` as a float, or raises ValueError if it is not positive and finite."""
    if value is None or not (np.ndim(value) == 0 and math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value} must be positive and finite: {meaning}; without it nothing can be bounded")
    return float(value)


def make_plan(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    *,
    ks: tuple[int, ...],
    clip: float,
    learning_rate: float,
    batch_size: int,
    epochs: int,
    adjacency: str,
    batches: int | None,
    order: Any,
    product: str,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    lr_decay: float,
    lr_min: float,
    trainable: Callable[[str, Any], bool] | None,
) -> tuple[Plan, tuple[Any, ...]]:
    """Checks the arguments of `train_with_bounds`; returns the plan, and the arrays that the program takes."""
    if adjacency not in ("add_remove", "replace", "reference"):
        raise ValueError(f"adjacency={adjacency!r} is unknown; use 'add_remove', 'replace' or 'reference'")
    if product not in ("tight", "rump"):
        raise ValueError(f"product={product!r} is unknown; use 'tight' or 'rump'")
    for name, value in (("batch_size", batch_size), ("epochs", epochs), ("batches", 1 if batches is None else batches)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    if batches is not None and order is not None:
        raise ValueError(
            f"batches={batches} and order exclude one another: order says which records are in which batch; give one"
        )
    for name, number in (("weight_decay", weight_decay), ("lr_decay", lr_decay), ("lr_min", lr_min)):
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name}={number} must be finite and not negative")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must be in [0, 1)")
    if nesterov and momentum == 0:
        raise ValueError("nesterov=True needs momentum > 0")
    if ks[-1] > batch_size:
        raise ValueError(
            f"ks reaches {ks[-1]}, more than batch_size={batch_size}: no batch has so many records to change"
        )
    n = check_data(data, "data", may_be_empty=adjacency == "add_remove")
    if order is None:
        rows = _default_order(data, n, batch_size, batches, epochs, adjacency)
    else:
        rows = _check_order(order, n, adjacency)
    _check_sizes(rows, ks[-1], adjacency, Grid.of(jnp.result_type(*jax.tree.leaves(params))).most)
    steps = len(rows)
    rates = np.maximum(learning_rate / (1 + lr_decay * np.arange(steps)), lr_min)
    _check_influence(rates, momentum, nesterov, weight_decay)

    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    flags = tuple(
        bool(trainable is None or trainable(name, leaf)) for name, (_, leaf) in zip(names, paths, strict=True)
    )
    if not any(flags):
        raise ValueError(f"no leaf of params is trainable; `trainable` is called with paths such as {names[:3]}")
    leaves = [leaf for _, leaf in paths]
    for name, leaf, flag in zip(names, leaves, flags, strict=True):
        if flag and not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"params leaf {name} is {jnp.result_type(leaf)}, only floating-point leaves can be trained")
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and not np.isfinite(np.asarray(leaf)).all():
            raise ValueError(f"params leaf {name} has NaN or infinite entries")
    _check_loss(loss_fn, params, data)

    moving = [_at_least_float32(x) for x, flag in zip(leaves, flags, strict=True) if flag]
    frozen = [jnp.asarray(x) for x, flag in zip(leaves, flags, strict=True) if not flag]
    blocks = blocks_of(rows.shape[1], sum(x.size for x in moving))
    padded = np.full((steps, math.prod(blocks)), -1, np.int32)
    padded[:, : rows.shape[1]] = rows
    # An epoch of the default order may start with a batch that is empty now and not in a neighbour.
    groups = _groups(rows) if order is not None else (steps // epochs,) * epochs
    shared = max(groups) > 1 and adjacency != "reference" and not (momentum and weight_decay)
    if shared and adjacency != "add_remove" and len(padded[0]) > public_rows(batch_size):
        raise ValueError(f"a batch has {rows.shape[1]} records, far more than the public batch_size={batch_size}")
    plan = Plan(
        ks=ks,
        clip=clip,
        divisor=int(batch_size),
        adjacency=adjacency,
        product=product,
        momentum=float(momentum),
        nesterov=bool(nesterov),
        weight_decay=float(weight_decay),
        trainable=flags,
        structure=structure,
        blocks=blocks,
        groups=groups,
        shared_budget=shared,
    )
    kind = jnp.result_type(*moving)
    return plan, (moving, frozen, jax.tree.map(_whole_blocks, data), padded, jnp.asarray(rates, kind))


def _whole_blocks(x: Any) -> jax.Array:
    """Adds rows that no batch uses, so that data sets of similar size, none included, share one compiled program."""
    x = jnp.asarray(x)
    return jnp.pad(x, [(0, -len(x) % BLOCK if len(x) else BLOCK)] + [(0, 0)] * (x.ndim - 1))


def _at_least_float32(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def check_data(data: Any, what: str, *, may_be_empty: bool = False) -> int:
    """Returns the number of records; raises ValueError if a value is not finite, or there is none and has to be."""
    leaves = jax.tree_util.tree_leaves_with_path(data)
    sizes = {np.shape(leaf)[:1] for _, leaf in leaves}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(f"{what} must be arrays with one first axis, the records; got first axes {sorted(sizes)}")
    ((n,),) = sizes
    if n == 0 and not may_be_empty:
        raise ValueError(f"{what} has no records")
    for path, leaf in leaves:
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and not np.isfinite(np.asarray(leaf)).all():
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "array"
            raise ValueError(f"{what} leaf {name} has NaN or infinite entries; impute or drop these records first")
    return n


def _check_sizes(rows: np.ndarray, most_changed: int, adjacency: str, most: int) -> None:
    """Refuses what a total has no room for; under "add_remove" without a look at the records, which `sums` clips."""
    if adjacency == "add_remove":
        if most_changed > most // 2:
            raise ValueError(f"ks reaches {most_changed}, but exact sums have room for {most // 2} changes; lower ks")
        return
    most = most // 2 if adjacency == "replace" else most  # a replacement is twice as large
    if rows.shape[1] + most_changed > most:
        raise ValueError(
            f"a batch of {rows.shape[1]} records and {most_changed} changes do not fit the exact sums, {most}; use"
            " several batches, or float64 parameters"
        )
    if most_changed > (least := (rows >= 0).sum(axis=1).min()):
        raise ValueError(f"ks reaches {most_changed}, but a batch has {least} records; lower ks or use fewer batches")


def _check_order(order: Any, n: int, adjacency: str) -> np.ndarray:
    """Returns rows [steps, batch] of records, -1 for none."""
    if callable(order):
        rows = _integers(order(n))
        if adjacency == "add_remove" and n > 1:
            _check_same_batches(rows, _integers(order(n - 1)), n)
    else:
        rows = _integers(order)
    if rows.min() < -1 or rows.max() >= n:
        raise ValueError(f"order must hold rows in [0, {n}) of the data, or -1 for none; some entries are outside")
    if (rows < 0).all(axis=1).any():
        raise ValueError("order has a batch without records")
    for batch in rows:
        kept = batch[batch >= 0]
        if len(np.unique(kept)) != len(kept):
            raise ValueError("order has a record twice in one batch; its influence on the sum would be twice the clip")
    unused = n - len(np.unique(rows[rows >= 0]))
    if adjacency == "add_remove" and unused:
        raise ValueError(
            f"order never uses {unused} of the {n} records. Under adjacency='add_remove' whether a record is used must"
            " not depend on how many there are, as it does if an incomplete batch is dropped: fill the last batch"
            " with -1, pass the data without those records, or use adjacency='replace'"
        )
    if adjacency == "add_remove" and not _in_epochs(rows, n):
        raise ValueError(
            "order uses some records more often than others between two uses of one record. Under"
            " adjacency='add_remove' every epoch must use every record once, or a record that is added could count"
            " twice; fill epochs with -1, or use adjacency='replace'"
        )
    return rows


def _in_epochs(rows: np.ndarray, n: int) -> bool:
    """Whether every group of batches without a repetition has all records."""
    ends = np.cumsum(_groups(rows))
    return all((rows[end - size : end] >= 0).sum() == n for size, end in zip(_groups(rows), ends, strict=True))


def _integers(order: Any) -> np.ndarray:
    rows = np.asarray(order)
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"order must have shape [steps, batch], got {list(rows.shape)}")
    if not np.issubdtype(rows.dtype, np.integer):
        raise TypeError(f"order must be integers, got {rows.dtype}")
    return rows.astype(np.int64)


def _check_same_batches(rows: np.ndarray, fewer: np.ndarray, n: int) -> None:
    """Without record n - 1 every other record must stay in its batches."""
    if len(rows) == len(fewer):
        batches = ({*batch[(batch >= 0) & (batch != n - 1)]} for batch in rows)
        if all(a == {*b[b >= 0]} for a, b in zip(batches, fewer, strict=True)):
            return
    raise ValueError(
        f"order(n) puts records into other batches when one of {n} is removed; adjacency='add_remove' needs an"
        " assignment by the record's own index, such as i mod (number of batches). Or use adjacency='replace'"
    )


def _default_order(data: Any, n: int, batch_size: int, batches: int | None, epochs: int, adjacency: str) -> np.ndarray:
    """Returns rows [steps, batch]. The number of batches never depends on how many records "add_remove" has."""
    if adjacency == "reference" and batches is None:
        size = min(batch_size, n)
        return np.tile(np.arange(n - n % size).reshape(-1, size), (epochs, 1))
    if batches is None:
        batches = 1 if adjacency == "add_remove" else max(1, round(n / batch_size))
    if adjacency != "add_remove" and batches > n:
        raise ValueError(f"batches={batches} must be at most {n}, the number of records; some would be empty")
    if batches == 1:
        part = np.zeros(n, np.int64)
    elif adjacency == "add_remove":  # positions shift when a record leaves, its content does not
        part = partition_by_hash(data, batches, salt=_SALT)
    else:  # a replacement keeps its position
        part = np.arange(n) % batches
    members = [np.flatnonzero(part == i) for i in range(batches)]
    rows = np.full((batches, max(1, *map(len, members))), -1)
    for row, member in zip(rows, members, strict=True):
        row[: len(member)] = member
    return np.tile(rows, (epochs, 1))


def _groups(rows: np.ndarray) -> tuple[int, ...]:
    """Lengths of the longest runs of batches in which no record occurs twice (T8)."""
    lengths: list[int] = []
    seen: set[int] = set()
    for batch in rows:
        members = {*batch[batch >= 0].tolist()}
        if not lengths or seen & members:
            lengths.append(0)
            seen = set()
        lengths[-1] += 1
        seen |= members
    return tuple(lengths)


def _check_influence(rates: np.ndarray, momentum: float, nesterov: bool, weight_decay: float) -> None:
    """Ends of the box evolve on their own only if no gradient's influence on the result changes sign (T10, P3)."""
    if weight_decay == 0:
        return
    steps = len(rates)
    # Column s: the response of theta to a unit gradient at step s; last column: to a unit change of theta itself.
    theta, velocity = np.zeros(steps + 1), np.zeros(steps + 1)
    theta[-1] = 1
    for t, rate in enumerate(rates):
        gradient = weight_decay * theta
        gradient[t] -= 1
        velocity = momentum * velocity + gradient
        theta = theta - rate * (gradient + momentum * velocity if nesterov else velocity)
        if (theta < 0).any():
            raise ValueError(
                f"weight_decay={weight_decay} with momentum={momentum} and a learning rate of {rate:g} makes the"
                f" influence of a gradient change sign by step {t}: bounds of the ends would be unsound. Lower one of"
                " the three"
            )


_RANDOM = {"random_bits", "random_seed", "random_split", "random_fold_in", "threefry2x32", "rng_bit_generator"}


def _check_loss(loss_fn: Callable[[Any, Any], jax.Array], params: Any, data: Any) -> None:
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x)[1:], jnp.result_type(x)), data)
    closed, out = jax.make_jaxpr(loss_fn, return_shape=True)(params, example)
    shapes = jax.tree.map(lambda x: x.shape, out)
    if shapes != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn must return one floating-point number for ONE example, got shapes {shapes}. It is given a row"
            " of the data without its leading axis: add the axis a model wants with x[None]"
        )
    if random := _primitives(closed.jaxpr) & _RANDOM:
        raise ValueError(
            f"loss_fn is stochastic (it uses {', '.join(sorted(random))}): two runs would differ without any change of"
            " the data. Turn off dropout and augmentation"
        )


def _primitives(jaxpr: Any) -> set[str]:
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            names |= _primitives(inner)
    return names


def blocks_of(batch: int, parameters: int) -> tuple[int, int, int]:
    """How a batch is cut: (outer blocks, fragments in each, records in a fragment).

    All blocks have one size whatever the batch, so that a record's bounds do not depend on how many others there are
    through the order in which a matrix product of another shape would be summed.
    """
    fragment = _UNROLLED if parameters > _LARGE else _FRAGMENT
    return math.ceil(batch / BLOCK), BLOCK // fragment, fragment
