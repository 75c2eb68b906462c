"""The checks and the plan of `train_with_bounds`: settings, the records of each batch, shapes of
the sums.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdp.prediction.checks import check_data, one_of, positive, whole
from jaxdp.prediction.ensembles import partition_by_hash
from jaxdp.prediction.sums import BLOCK, Grid, public_rows

Threat = Literal["add_remove", "replace_one", "replace_per_batch"]
Trainable = Callable[[str, Any], bool]

# Gradients of more than _LARGE parameters are summed 8 records at a time, because XLA unrolls and
# vectorises that on a processor. It is six times faster than 12 at a time. Smaller gradients gain
# from fewer, longer fragments.
_LARGE, _UNROLLED, _FRAGMENT = 2**14, 8, 128
# The salt of the hash that assigns batches. It must be the same for every data set.
_SALT = b"jaxdp batches"
_RANDOM = {
    "random_bits",
    "random_seed",
    "random_split",
    "random_fold_in",
    "threefry2x32",
    "rng_bit_generator",
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Training:
    """The options of `train_with_bounds`, which explains them.

    A training is checked before records exist. Call `train_with_bounds(..., ks=ks,
    **vars(training))` to use it.

    Raises:
      ValueError: A field is out of range, or two fields contradict each other.
    """

    clip: float
    learning_rate: float
    batch_size: int
    epochs: int
    threat: Threat = "add_remove"
    batches: int | None = None
    order: np.ndarray | None = None
    product: str = "tight"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    lr_min: float = 0.0
    trainable: Trainable | None = None

    def __post_init__(self) -> None:
        positive("clip", self.clip, "the bound of each coordinate of a record's gradient")
        if not 1e-30 <= self.clip <= 1e30:  # so that its grid of 2^21 units has room in float32
            raise ValueError(f"clip must be in [1e-30, 1e30], got {self.clip!r}. Scale the loss.")
        positive("learning_rate", self.learning_rate)
        whole("batch_size", self.batch_size)
        whole("epochs", self.epochs)
        if self.threat not in get_args(Threat):
            raise ValueError(
                f"threat must be one of {', '.join(map(repr, get_args(Threat)))}, got "
                f"{self.threat!r}."
            )
        if self.product not in ("tight", "rump"):
            raise ValueError(f"product must be 'tight' or 'rump', got {self.product!r}.")
        if self.batches is not None and whole("batches", self.batches) and self.order is not None:
            raise ValueError(
                f"batches={self.batches} and order exclude each other, because order assigns "
                "records to batches."
                " Give one of them."
            )
        if self.order is not None and self.threat == "add_remove":
            raise ValueError(
                f"order must be None under threat='add_remove', got {type(self.order).__name__}. "
                "It names records by"
                " their positions, and a record that leaves moves all later ones to other "
                "batches. Use batches=2 or"
                " more, which assigns each record by its own contents, or threat='replace_one'."
            )
        for name in ("weight_decay", "lr_decay", "lr_min"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)!r}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0.")


class Layout(NamedTuple):
    """The trained and the frozen leaves of a pytree."""

    structure: Any
    trainable: tuple[bool, ...]

    def join(self, moving: Sequence[Any], frozen: Sequence[Any]) -> Any:
        """Returns the pytree of trained and frozen leaves."""
        parts = {True: iter(moving), False: iter(frozen)}
        return jax.tree.unflatten(self.structure, [next(parts[moves]) for moves in self.trainable])

    def split(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """Returns trained and frozen leaves."""
        pairs = list(zip(self.trainable, jax.tree.leaves(tree), strict=True))
        return [leaf for moves, leaf in pairs if moves], [
            leaf for moves, leaf in pairs if not moves
        ]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a run. Equal plans share one compiled program."""

    ks: tuple[int, ...]
    grid: Grid
    threat: Threat
    product: str
    momentum: float
    nesterov: bool
    weight_decay: float
    layout: Layout
    blocks: tuple[
        int, int, int
    ]  # of a batch: outer blocks, fragments in each, records in a fragment
    groups: tuple[
        int, ...
    ]  # lengths of runs of steps in which no record occurs twice, which share a budget
    shared_budget: bool
    mesh: Mesh | None = None  # whose devices share the distances
    data_axes: tuple[str, ...] = ()


def make_plan(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    ks: tuple[int, ...],
    training: Training,
) -> tuple[Plan, tuple[Any, ...]]:
    """Checks settings, parameters and records together. Returns the plan, and the arguments of the
    program.
    """
    if ks[-1] > training.batch_size:
        raise ValueError(
            f"ks reaches {ks[-1]}, more than batch_size={training.batch_size}. No batch has so "
            "many records to change."
        )
    n = check_data(data, "data", may_be_empty=training.threat == "add_remove")
    rows = (
        _default_order(data, n, training)
        if training.order is None
        else _check_order(training.order, n)
    )
    rates = np.maximum(
        training.learning_rate / (1 + training.lr_decay * np.arange(len(rows))), training.lr_min
    )
    _check_influence(rates, training)
    layout = Layout(jax.tree.structure(params), _check_leaves(params, training.trainable))
    _check_loss(loss_fn, params, data)
    moving, frozen = jax.device_put(layout.split(params))  # compiles nothing, unlike jnp.asarray
    moving = [x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32) for x in moving]
    dtype = jnp.result_type(*moving)
    add_remove = training.threat == "add_remove"
    grid = Grid.of(dtype, float(training.clip), int(training.batch_size), clipped=add_remove)
    _check_sizes(rows, ks[-1], training.threat, grid.most)

    blocks = cut_batch(rows.shape[1], sum(x.size for x in moving))
    padded = np.full((len(rows), math.prod(blocks)), -1, np.int32)
    padded[:, : rows.shape[1]] = rows
    # An epoch of the default order may start with a batch that is empty here but not in a
    # neighbour.
    epoch = len(rows) // training.epochs
    groups = (epoch,) * training.epochs if training.order is None else _groups(rows)
    decayed = (
        training.momentum and training.weight_decay
    )  # then the ends of a box do not evolve separately (T8)
    shared = max(groups) > 1 and training.threat != "replace_per_batch" and not decayed
    if shared and not add_remove and padded.shape[1] > public_rows(training.batch_size):
        raise ValueError(
            f"a batch has {rows.shape[1]} records, far more than the public "
            f"batch_size={training.batch_size}."
            " Raise batch_size, or use more batches."
        )
    plan = Plan(
        ks=ks,
        grid=grid,
        threat=training.threat,
        product=training.product,
        momentum=float(training.momentum),
        nesterov=bool(training.nesterov),
        weight_decay=float(training.weight_decay),
        layout=layout,
        blocks=blocks,
        groups=groups,
        shared_budget=shared,
    )
    return plan, (
        moving,
        frozen,
        jax.tree.map(_whole_blocks, data),
        padded,
        jax.device_put(rates.astype(dtype)),
    )


def _whole_blocks(x: Any) -> jax.Array:
    """Adds unused rows, so that data sets of similar size, and an empty one, share one compiled
    program.
    """
    pad = jnp.pad if isinstance(x, jax.Array) else np.pad
    return jax.device_put(
        pad(x, [(0, -len(x) % BLOCK if len(x) else BLOCK)] + [(0, 0)] * (np.ndim(x) - 1))
    )


def cut_batch(batch: int, parameters: int) -> tuple[int, int, int]:
    """Returns the cut of a batch: (outer blocks, fragments in each, records in a fragment).

    All blocks of all batches have one size. A matrix product of another shape would sum in another
    order, and a record's bounds would depend on the number of other records.
    """
    fragment = _UNROLLED if parameters > _LARGE else _FRAGMENT
    return math.ceil(batch / BLOCK), BLOCK // fragment, fragment


def _check_sizes(rows: np.ndarray, most_changed: int, threat: Threat, most: int) -> None:
    """Refuses batches that a total has no room for. Ignores the records under "add_remove", where
    `sums` clips.
    """
    if threat == "add_remove":
        if most_changed > most // 2:
            raise ValueError(
                f"ks reaches {most_changed}, but exact sums have room for {most // 2} changes. "
                "Lower ks."
            )
        return
    most = most // 2 if threat == "replace_one" else most  # a replacement is twice as large
    if rows.shape[1] + most_changed > most:
        raise ValueError(
            f"a batch of {rows.shape[1]} records and {most_changed} changes exceed the {most} "
            "that exact sums have room"
            " for. Use several batches, or float64 parameters."
        )
    if most_changed > (least := (rows >= 0).sum(axis=1).min()):
        raise ValueError(
            f"ks reaches {most_changed}, but a batch has {least} records. Lower ks or use fewer "
            "batches."
        )


# --- Which records are in which batch -----------------------------------------------------------


def _default_order(data: Any, n: int, training: Training) -> np.ndarray:
    """Returns rows [steps, batch]. Under "add_remove" the number of batches never depends on the
    records.
    """
    batches, threat = training.batches, training.threat
    if threat == "replace_per_batch" and batches is None:
        size = min(training.batch_size, n)
        return np.tile(np.arange(n - n % size).reshape(-1, size), (training.epochs, 1))
    if batches is None:
        batches = 1 if threat == "add_remove" else max(1, round(n / training.batch_size))
    if threat != "add_remove" and batches > n:
        raise ValueError(
            f"batches={batches} must be at most {n}, the number of records. No batch may be empty."
        )
    if (
        threat == "add_remove" and batches > 1
    ):  # positions shift when a record leaves, its content does not
        part = partition_by_hash(data, batches, salt=_SALT)
    else:  # a replacement keeps its position
        part = np.arange(n) % batches
    members = [np.flatnonzero(part == i) for i in range(batches)]
    rows = np.full((batches, max(1, *map(len, members))), -1)
    for row, member in zip(rows, members, strict=True):
        row[: len(member)] = member
    return np.tile(rows, (training.epochs, 1))


def _check_order(order: np.ndarray, n: int) -> np.ndarray:
    """Checks rows [steps, batch] of a data set of n records. n is public, because records are
    replaced.
    """
    rows = np.asarray(order)
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"order must have shape [steps, batch], got {list(rows.shape)}.")
    if not np.issubdtype(rows.dtype, np.integer):
        raise TypeError(f"order must be integers, got {rows.dtype}.")
    rows = rows.astype(np.int64)
    if rows.min() < -1 or rows.max() >= n:
        raise ValueError(
            f"order must hold rows in [0, {n}) of the data, or -1 for none. Some entries are "
            "outside."
        )
    if (rows < 0).all(axis=1).any():
        raise ValueError("order has a batch without records.")
    for batch in rows:
        members = batch[batch >= 0]
        if len(np.unique(members)) != len(members):
            raise ValueError(
                "order has a record twice in one batch. Its influence on the sum would be twice "
                "the clip."
            )
    return rows


def _groups(rows: np.ndarray) -> tuple[int, ...]:
    """Returns the lengths of the longest runs of batches in which no record occurs twice (T8)."""
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


# --- Optimizer, parameters and loss -------------------------------------------------------------


def _check_influence(rates: np.ndarray, training: Training) -> None:
    """Checks that no gradient's influence on the result changes sign. Then ends of the box evolve
    separately (T10).
    """
    if training.weight_decay == 0:
        return
    steps = len(rates)
    # Column s is the response of theta to a unit gradient at step s, the last one to a unit change
    # of theta itself.
    theta, velocity = np.zeros(steps + 1), np.zeros(steps + 1)
    theta[-1] = 1
    for t, rate in enumerate(rates):
        gradient = training.weight_decay * theta
        gradient[t] -= 1
        velocity = training.momentum * velocity + gradient
        theta = theta - rate * (
            gradient + training.momentum * velocity if training.nesterov else velocity
        )
        if (theta < 0).any():
            raise ValueError(
                f"weight_decay={training.weight_decay} with momentum={training.momentum} and a "
                "learning rate of"
                f" {rate:g} makes the influence of a gradient change sign by step {t}. Bounds of "
                "the ends would be"
                " unsound. Lower one of the three."
            )


def _check_leaves(params: Any, trainable: Trainable | None) -> tuple[bool, ...]:
    paths = jax.tree_util.tree_leaves_with_path(params)
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths
    ]
    flags = tuple(bool(trainable is None or trainable(name, leaf)) for name, leaf in leaves)
    if not any(flags):
        names = [name for name, _ in leaves[:3]]
        raise ValueError(
            f"trainable selects no leaf of params. It is called with paths such as {names}."
        )
    for (name, leaf), flag in zip(leaves, flags, strict=True):
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        if flag and not floating:
            raise TypeError(
                f"params leaf {name} is {jnp.result_type(leaf)}. Train floating-point leaves only."
            )
        if floating and not np.isfinite(np.asarray(leaf)).all():
            raise ValueError(f"params leaf {name} has NaN or infinite entries.")
    return flags


def _check_loss(loss_fn: Callable[[Any, Any], jax.Array], params: Any, data: Any) -> None:
    closed, out = jax.make_jaxpr(loss_fn, return_shape=True)(params, one_of(data))
    shapes = jax.tree.map(lambda x: x.shape, out)
    if shapes != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn must return one floating-point number for ONE example, got shapes {shapes}. "
            "It gets a row of the"
            " data without the leading axis. Add that axis with x[None] if a model needs it."
        )
    if random := _primitives(closed.jaxpr) & _RANDOM:
        raise ValueError(
            f"loss_fn is stochastic (it uses {', '.join(sorted(random))}). Two runs would differ "
            "without any change of"
            " the data. Turn off dropout and augmentation."
        )


def _primitives(jaxpr: Any) -> set[str]:
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    inner = (jaxpr for eqn in jaxpr.eqns for jaxpr in jax.extend.core.jaxprs_in_params(eqn.params))
    return names.union(*map(_primitives, inner))
