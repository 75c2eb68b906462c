"""The plan of `train_with_bounds`: options, shapes of the sums, and what makes bounds sound.

Everything is checked here, before any computation.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdp.data.storage import on_device
from jaxdp.files import check_choice
from jaxdp.prediction.batches import cut_batch, rows_of_batches, runs_without_repeats
from jaxdp.prediction.checks import check_data, one_of, positive, whole
from jaxdp.prediction.poisoning import Poisoning
from jaxdp.prediction.sums import BLOCK, Grid, public_rows
from jaxdp.transforms.jaxprs import every_equation

Threat = Literal["add_remove", "replace_one", "replace_per_batch", "remove", "poison"]
# Threats under which a change moves a sum by an amount that depends on the record.
BY_RECORD: tuple[Threat, ...] = ("remove", "poison")
Trainable = Callable[[str, Any], bool]

# Primitives of a loss that is stochastic.
_RANDOM = {
    "random_bits",
    "random_seed",
    "random_split",
    "random_fold_in",
    "threefry2x32",
    "rng_bit_generator",
}


# --- Options ------------------------------------------------------------------------------------


class TrainingKeywords(TypedDict, total=False):
    """The fields of `Training` as keywords, for editors and type checkers."""

    clip: float
    learning_rate: float
    batch_size: int
    epochs: int
    threat: Threat
    batches: int | None
    order: np.ndarray | None
    product: str
    momentum: float
    nesterov: bool
    weight_decay: float
    lr_decay: float
    lr_min: float
    trainable: Trainable | None
    dampening: float
    l1: float
    public: np.ndarray | None
    poisoning: Poisoning | None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Training:
    """The options of `train_with_bounds`. They are checked before records exist.

    Use `train_with_bounds(..., ks=ks, training=training)`.

    Attributes:
      clip: The bound of each coordinate of each record's gradient, which is clamped to [-clip,
        clip].
      learning_rate, lr_decay, lr_min, momentum, nesterov, weight_decay: Options of the optimizer,
        see the equations of `train_with_bounds`.
      batch_size: The public divisor of sums, except under "replace_per_batch". Choose about the
        number of records in a batch. Under "add_remove" do not compute it from their private
        number.
      epochs: The number of passes over the data.
      threat: The changes of the data set that the bounds cover. One change is one step of distance.
        "add_remove": records are added or removed, and each shifts a sum by at most `clip` (T4).
        "replace_one": records are replaced, and batches keep their size.
        "replace_per_batch": k records are replaced in EVERY batch, and sums are divided by the
        number of records in the batch (Theorem 4.6). With product="rump" it is the published
        algorithm.
        "remove": up to k records are removed, which certifies unlearning. The others stay in their
        batches, and the divisor stays.
        "poison": up to k records become what `poisoning` allows. Batches keep their size.
        The last two are no neighbourhoods of differential privacy, so private answers refuse them.
      batches: The public number of batches per epoch. The batch of a record is the same in every
        epoch and does not depend on other records. Under "add_remove" and "remove" it is a hash of
        the record's contents, that is, of its row in every leaf of `data`. Equal records share a
        batch. A leaf with a stable id spreads them, and `loss_fn` may ignore it. Where records are
        replaced or poisoned, the batch is the position modulo `batches`. None means 1 under
        "add_remove" and "remove", because the number of records may change. Under "replace_one" and
        "poison" it means round(n / batch_size), at least 1. Under "replace_per_batch" it means
        consecutive full batches, as published.
      order: int [steps, batch], the rows of records of each step, -1 for none. It replaces
        `batches` and `epochs`. It is refused under "add_remove": rows are positions, and a record
        that leaves changes the positions of others.
      product: "tight" or "rump", see `jaxdp.interval`.
      trainable: `trainable(path, leaf) -> bool` with paths such as "Dense_0/kernel". Other leaves
        are frozen, and values that depend on them alone are computed once per batch.
      dampening: Scales new gradients by 1 - dampening in the momentum, except at the first step, as
        published.
      l1: The weight of an l1 penalty. Each step ends with its proximal map, which moves every
        trained coordinate by learning rate times l1 towards 0 and stops there.
      public: bool [n], the records that nobody can change. None for no record. A batch has at most
        as many changes as other records. Under "add_remove" this changes no bound, because a record
        may be added to any batch.
      poisoning: What a changed record may become under the threat "poison".

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
    dampening: float = 0.0
    l1: float = 0.0
    public: np.ndarray | None = None
    poisoning: Poisoning | None = None

    def __post_init__(self) -> None:
        positive("clip", self.clip, "the bound of each coordinate of a record's gradient")
        if not 1e-30 <= self.clip <= 1e30:  # so that its grid of 2^21 units has room in float32
            raise ValueError(f"clip must be in [1e-30, 1e30], got {self.clip!r}. Scale the loss.")
        positive("learning_rate", self.learning_rate)
        whole("batch_size", self.batch_size)
        whole("epochs", self.epochs)
        if self.batches is not None:
            whole("batches", self.batches)
        self._check_names()
        self._check_order()
        self._check_optimizer()

    def _check_names(self) -> None:
        threats = get_args(Threat)
        if self.threat not in threats:
            names = ", ".join(map(repr, threats))
            raise ValueError(f"threat must be one of {names}, got {self.threat!r}.")
        check_choice("product", self.product, ("tight", "rump"))
        # Neither is silently ignored without the other.
        if (self.threat == "poison") != isinstance(self.poisoning, Poisoning):
            raise ValueError(
                f"poisoning={self.poisoning!r} does not fit threat={self.threat!r}. Give "
                "poisoning=Poisoning(radius=0.1), for example, with threat='poison' and only there."
            )

    def _check_order(self) -> None:
        if self.order is None:
            return
        if self.batches is not None:
            raise ValueError(
                f"batches={self.batches} and order exclude each other, because order assigns "
                "records to batches. Give one of them."
            )
        if self.threat == "add_remove":
            raise ValueError(
                f"order must be None under threat='add_remove', got {type(self.order).__name__}. "
                "It names records by their positions, and a record that leaves moves all later "
                "ones to other batches. Use batches=2 or more, which assigns each record by its "
                "own contents, or threat='replace_one'."
            )

    def _check_optimizer(self) -> None:
        for name in ("weight_decay", "lr_decay", "lr_min", "l1"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)!r}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0.")
        if not 0 <= self.dampening < 1:
            raise ValueError(f"dampening must be in [0, 1), got {self.dampening!r}.")
        # As in PyTorch, whose Nesterov momentum has no dampening.
        if self.dampening and (self.momentum == 0 or self.nesterov):
            raise ValueError(
                f"dampening={self.dampening} needs momentum > 0 and nesterov=False, got "
                f"{self.momentum} and {self.nesterov}."
            )
        if self.l1 and self.momentum and self.weight_decay:
            # The proximal map is not linear, so the sign of a gradient's influence is not known.
            raise ValueError(
                f"l1={self.l1} with momentum={self.momentum} and weight_decay={self.weight_decay} "
                "cannot be bounded. Drop one of the three."
            )


# --- The plan -----------------------------------------------------------------------------------


class Layout(NamedTuple):
    """The trained and the frozen leaves of a pytree."""

    structure: Any
    trainable: tuple[bool, ...]

    def join(self, moving: Sequence[Any], frozen: Sequence[Any]) -> Any:
        """Returns the pytree of trained and frozen leaves."""
        trained = iter(moving)
        others = iter(frozen)
        leaves = []
        for is_trained in self.trainable:
            source = trained if is_trained else others
            leaves.append(next(source))
        return jax.tree.unflatten(self.structure, leaves)

    def split(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """Returns trained and frozen leaves."""
        pairs = list(zip(self.trainable, jax.tree.leaves(tree), strict=True))
        trained = [leaf for flag, leaf in pairs if flag]
        frozen = [leaf for flag, leaf in pairs if not flag]
        return trained, frozen


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a run. Equal plans share one compiled program.

    Attributes:
      ks: The distances.
      grid: The grid on which clipped gradients are summed.
      threat, product, momentum, nesterov, weight_decay, dampening, l1, poisoning: As in `Training`.
      has_public: Whether some records are public, for "replace_one", whose program differs then.
      layout: The trained and the frozen leaves.
      blocks: The cut of a batch: outer blocks, fragments in each, records in a fragment.
      groups: The lengths of runs of steps in which no record occurs twice, which share a budget.
      shared_budget: Whether the batches of a group share a budget (T8).
      mesh: The devices that share the distances.
      data_axes: The axes of the mesh along which they are divided.
    """

    ks: tuple[int, ...]
    grid: Grid
    threat: Threat
    product: str
    momentum: float
    nesterov: bool
    weight_decay: float
    layout: Layout
    blocks: tuple[int, int, int]
    groups: tuple[int, ...]
    shared_budget: bool
    dampening: float = 0.0
    l1: float = 0.0
    poisoning: Poisoning | None = None
    has_public: bool = False
    mesh: Mesh | None = None
    data_axes: tuple[str, ...] = ()


class Arrays(NamedTuple):
    """The arrays of a run.

    Attributes:
      moving, frozen: The trained and the frozen leaves.
      data: The records, with unused rows at the end.
      order: [steps, places], the rows of the records of each batch, -1 for none, and -2 - row for a
        public record.
      rates: [steps], the learning rates.
    """

    moving: list[jax.Array]
    frozen: list[jax.Array]
    data: Any
    order: np.ndarray
    rates: jax.Array


def make_plan(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    ks: tuple[int, ...],
    training: Training,
) -> tuple[Plan, Arrays]:
    """Checks options, parameters and records together."""
    if ks[-1] > training.batch_size:
        raise ValueError(
            f"ks reaches {ks[-1]}, more than batch_size={training.batch_size}. No batch has so "
            "many records to change."
        )
    is_add_remove = training.threat == "add_remove"
    records = check_data(data, "data", may_be_empty=is_add_remove)
    rows = rows_of_batches(data, records, training)
    # max(learning_rate / (1 + lr_decay t), lr_min).
    slowdown = 1 + training.lr_decay * np.arange(len(rows))
    rates = training.learning_rate / slowdown
    rates = np.maximum(rates, training.lr_min)
    _check_influence(rates, training)
    is_trained = _check_leaves(params, training.trainable)
    layout = Layout(jax.tree.structure(params), is_trained)
    _check_loss(loss_fn, params, data)
    if training.poisoning is not None:
        training.poisoning.check(one_of(data))
    moving, frozen = jax.tree.map(on_device, layout.split(params))
    # A grid of 2^21 units has no room in a mantissa of 16 bits.
    moving = [_at_least_float32(x) for x in moving]
    dtype = jnp.result_type(*moving)
    # A sum under "add_remove" is clipped, because an error would tell the number of records.
    grid = Grid.of(dtype, float(training.clip), int(training.batch_size), clipped=is_add_remove)
    _check_sizes(rows, ks[-1], training.threat, grid.most)

    blocks = cut_batch(rows.shape[1], sum(x.size for x in moving))
    # Places behind the records of a batch have none.
    order = np.full((len(rows), math.prod(blocks)), -1, np.int32)
    encoded = _with_public(rows, records, training.public)
    order[:, : rows.shape[1]] = encoded
    groups = _groups(rows, training)
    shared_budget = _shares_budget(groups, training)
    # T8 charges the rounding of so many records. A sum under "add_remove" is clipped to them.
    if shared_budget and not is_add_remove and order.shape[1] > public_rows(training.batch_size):
        raise ValueError(
            f"a batch has {rows.shape[1]} records, far more than the public "
            f"batch_size={training.batch_size}. Raise batch_size, or use more batches."
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
        shared_budget=shared_budget,
        dampening=float(training.dampening),
        l1=float(training.l1),
        poisoning=training.poisoning,
        has_public=training.threat == "replace_one" and training.public is not None,
    )
    padded = jax.tree.map(_whole_blocks, data)
    # Rounded once, so training and its bounds make steps of equal rates.
    device_rates = jax.device_put(rates.astype(dtype))
    return plan, Arrays(moving, frozen, padded, order, device_rates)


def _with_public(
    rows: np.ndarray,
    records: int,
    public: np.ndarray | None,
) -> np.ndarray:
    """Returns the rows with -2 - row in place of the rows of public records."""
    if public is None:
        return rows
    is_public = np.asarray(public)
    if is_public.shape != (records,) or is_public.dtype != bool:
        raise ValueError(
            f"public must be booleans [{records}], one for each record, got {is_public.dtype} "
            f"{list(is_public.shape)}."
        )
    with_none = np.append(is_public, False)  # -1 is no record
    of_public = with_none[rows]
    return np.where(of_public, -2 - rows, rows)


def _at_least_float32(x: jax.Array) -> jax.Array:
    if jnp.finfo(x.dtype).bits >= 32:
        return x
    return x.astype(jnp.float32)


def _groups(rows: np.ndarray, training: Training) -> tuple[int, ...]:
    """Returns the lengths of the groups of batches that may share a budget."""
    # Rows are public here, as positions are no contents of records.
    if training.order is not None:
        return runs_without_repeats(rows)
    # An epoch may start with a batch that is empty here but not in a neighbour. So the groups are
    # not found by looking at the records.
    return (len(rows) // training.epochs,) * training.epochs


def _shares_budget(groups: tuple[int, ...], training: Training) -> bool:
    # With momentum and weight decay the ends of a box do not evolve separately (T8).
    decayed = training.momentum > 0 and training.weight_decay > 0
    return max(groups) > 1 and training.threat != "replace_per_batch" and not decayed


def _whole_blocks(x: Any) -> jax.Array:
    """Adds unused rows up to a multiple of `BLOCK`, at least one block.

    So data sets of similar size, and an empty one, share one compiled program.
    """
    pad = jnp.pad if isinstance(x, jax.Array) else np.pad
    unused = BLOCK
    if len(x):
        unused = -len(x) % BLOCK
    widths = [(0, unused)]
    widths += [(0, 0)] * (np.ndim(x) - 1)
    return jax.device_put(pad(x, widths))


# --- Checks: sizes, optimizer, parameters, loss -------------------------------------------------


def _check_sizes(
    rows: np.ndarray,
    most_changed: int,
    threat: Threat,
    room: int,
) -> None:
    """Refuses batches that an exact sum has no room for."""
    if threat == "add_remove":
        # The number of records is private. A sum of too many is clipped instead.
        # A total has room for half as many changes as records.
        if most_changed > room // 2:
            raise ValueError(
                f"ks reaches {most_changed}, but exact sums have room for {room // 2} changes. "
                "Lower ks."
            )
        return
    if threat in ("replace_one", "poison"):
        room //= 2  # a replacement is twice as large
    if rows.shape[1] + most_changed > room:
        raise ValueError(
            f"a batch of {rows.shape[1]} records and {most_changed} changes exceed the {room} that "
            "exact sums have room for. Use several batches, or float64 parameters."
        )
    if threat in BY_RECORD:
        return  # more changes than records change no more than all of them
    # Theorem 4.6 leaves b - k records of a batch of b.
    least = (rows >= 0).sum(axis=1).min()
    if most_changed > least:
        raise ValueError(
            f"ks reaches {most_changed}, but a batch has {least} records. Lower ks or use fewer "
            "batches."
        )


def _check_influence(rates: np.ndarray, training: Training) -> None:
    """Refuses options by which a gradient's influence on the result changes sign (T10).

    If none does, the ends of the box evolve separately.
    """
    if training.weight_decay == 0:
        return
    steps = len(rates)
    # Column s is the response of theta to a unit gradient at step s, the last one to a unit change
    # of theta itself.
    theta = np.zeros(steps + 1)
    theta[-1] = 1
    velocity = np.zeros(steps + 1)
    for t, rate in enumerate(rates):
        gradient = training.weight_decay * theta
        gradient[t] -= 1  # the sign with which a step moves theta
        # The first step is not dampened.
        new = 1 - training.dampening if t else 1
        velocity = training.momentum * velocity + new * gradient
        step = velocity
        if training.nesterov:
            step = gradient + training.momentum * velocity
        theta = theta - rate * step
        # A larger gradient at that step would then end in a larger theta.
        if (theta < 0).any():
            raise ValueError(
                f"weight_decay={training.weight_decay} with momentum={training.momentum} and a "
                f"learning rate of {rate:g} makes the influence of a gradient change sign by step "
                f"{t}. Bounds of the ends would be unsound. Lower one of the three."
            )


def _check_leaves(params: Any, trainable: Trainable | None) -> tuple[bool, ...]:
    """Returns whether each leaf is trained."""
    # A list, because two leaves may have one path: {"a/b": x, "a": {"b": y}}.
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    flags = [trainable is None or bool(trainable(name, leaf)) for name, leaf in leaves]
    if not any(flags):
        names = [name for name, _ in leaves[:3]]
        raise ValueError(
            f"trainable selects no leaf of params. It is called with paths such as {names}."
        )
    for (name, leaf), flag in zip(leaves, flags, strict=True):
        dtype = jnp.result_type(leaf)
        # A key of a frozen leaf, or an index, has no NaN to look for.
        is_floating = jnp.issubdtype(dtype, jnp.floating)
        if flag and not is_floating:
            raise TypeError(f"params leaf {name} is {dtype}. Train floating-point leaves only.")
        if is_floating and not np.isfinite(np.asarray(leaf)).all():
            raise ValueError(f"params leaf {name} has NaN or infinite entries.")
    return tuple(flags)


def _check_loss(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
) -> None:
    # Traced and not run, so no record is read.
    closed, out = jax.make_jaxpr(loss_fn, return_shape=True)(params, one_of(data))
    shapes = jax.tree.map(lambda x: x.shape, out)
    if shapes != () or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"loss_fn must return one floating-point number for ONE example, got shapes {shapes}. "
            "It gets a row of the data without the leading axis. Add that axis with x[None] if a "
            "model needs it."
        )
    # Also those inside of calls and loops.
    primitives = {eqn.primitive.name for eqn in every_equation(closed.jaxpr)}
    random = primitives & _RANDOM
    if random:
        raise ValueError(
            f"loss_fn is stochastic (it uses {', '.join(sorted(random))}). Two runs would differ "
            "without any change of the data. Turn off dropout and augmentation."
        )
