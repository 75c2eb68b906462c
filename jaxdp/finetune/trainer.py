"""The trainer that all methods share.

One step:

    1. L_t: every example joins with probability q, independently                `PoissonSampler`
       (or another pattern of participation, `jaxdp.data.participation`)
    2. each example contributes a vector of L2 norm at most S, summed over L_t   `Query.sums`
    3. add noise sigma S N(0, I), divide by the public number q n                `privatize`
    4. read the gradient from the noisy mean                                     `Query.read`
    5. theta <- optimizer(theta, gradient); moving average of theta

A step is the event PoissonSampled(q, Gaussian(sigma)) for every query. Steps 4 and 5 are
post-processing.

`Query` is in `jaxdp.finetune.query`, the arithmetic of steps 2 to 5 in `jaxdp.finetune.step`. The
sampled batch is cut in `jaxdp.data.physical` and read in `jaxdp.finetune.batches`. The programs are
listed and compiled in `jaxdp.finetune.programs`.
"""

import collections
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data import FixedOrderSampler, Groups, Owners, PhysicalSizes, Source
from jaxdp.data.physical import Sampler
from jaxdp.data.protocol import check_members
from jaxdp.data.storage import on_device
from jaxdp.files import check_count, shows_keywords
from jaxdp.finetune.batches import PhysicalBatch, put, read_ahead, row_bytes
from jaxdp.finetune.options import (
    OPTION_DEFAULTS,
    Options,
    calibrated,
    check_clip_norm,
    check_optimizer,
    check_optimizer_state,
    check_sampler,
    event,
    noise_and_options,
)
from jaxdp.finetune.programs import Programs, step_programs
from jaxdp.finetune.query import Query, moving_params, wide
from jaxdp.finetune.step import StepFunctions, TrainState, apart
from jaxdp.privacy import DpEvent, NoOpDpEvent
from jaxdp.privacy.events import compose
from jaxdp.release import Hosts, derive, digest, new_seed, stream
from jaxdp.transforms import meshes
from jaxdp.transforms.clipping import ClippedGrad, check_params, clipped_grad, paths_of
from jaxdp.transforms.meshes import Layout, ParamSharding
from jaxdp.transforms.noise import CorrelatedNoise, NoiseSchedule, PrivatizeState, privatize

__all__ = ["PrivateTrainer", "Query", "TrainState", "event", "make_trainer"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PrivateTrainer(StepFunctions):
    """Private training as pure steps. `dp_sgd` and the other methods make it.

    `dp_sgd` documents the fields, `StepFunctions` the compiled functions.
    """

    sampler: Sampler
    physical_batch_size: int | None = None
    unit: str = "example"
    data_axes: Sequence[str] = ("data",)
    param_sharding: ParamSharding | None = None
    simulated_event: DpEvent | None = None
    # The sizes by what they depend on, beside the source that they are for, which they do not keep.
    _sizes: dict[Any, tuple[Callable[[], Source | None], PhysicalSizes]] = dataclasses.field(
        init=False, default_factory=dict, repr=False
    )
    _plans: dict[int, "PrivateTrainer"] = dataclasses.field(
        init=False, default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        if self.group and self.unit == "example":
            raise ValueError(
                "unit must name what group=True protects, for example unit='patient', got "
                "'example'."
            )
        has_no_owner = self.group or self.unit == "example"
        if self.records_per_owner is not None and has_no_owner:
            raise ValueError(
                "unit must name an owner of records with sampler.records_per_owner, for example "
                f"unit='person', without group, got {self.unit!r} with group={self.group}."
            )
        if self.is_whole and isinstance(self.privatizer.noise_multiplier, NoiseSchedule):
            raise ValueError(
                f"noise_multiplier must be one number with {type(self.sampler).__name__}, whose "
                "event is that of equal steps. Use PoissonSampler with a schedule."
            )
        meshes.check_mesh(self.mesh, self.data_axes, self.param_sharding, processes=True)
        super().__post_init__()

    @property
    def records_per_owner(self) -> int | None:
        """The most records of an owner in the sampler, None without owners, as in most samplers."""
        most: int | None = getattr(self.sampler, "records_per_owner", None)
        return most

    # --- The state ------------------------------------------------------------------------------

    def init(self, params: Any) -> TrainState:
        """Returns the state before the first step.

        The keys of noise and augmentation come from OS entropy. All processes of the mesh call it.
        They share the keys of process 0.

        Raises:
          TypeError: A leaf of params is not an array.
          ValueError: params do not suit the method's query or the mesh, or processes have different
              params.
        """
        check_params(params)
        _check_arrays(params)
        # An array of a weak type would trace the second step again.
        params = jax.tree.map(lambda x: on_device(x, jnp.result_type(x)), params)
        hosts = Hosts(self.mesh)
        hosts.agree(lambda: {"params": digest(_addressable(params))})
        seed = bytes.fromhex(hosts.first(lambda: new_seed().hex()))  # equal in all processes
        layout = None
        if self.mesh is not None:
            layout = Layout.of(params, self.mesh, self.data_axes, self.param_sharding)
            params = jax.device_put(params, layout.shardings(params, params, params))
        moving = moving_params(self.query.gradient, params)
        noise_key = stream(seed, "gradient noise")
        opt_state = self.optimizer.init(moving)
        check_optimizer_state(opt_state)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            ema=jax.tree.map(wide, params) if self.ema_decay is not None else None,
            carried=self.query.init(params),
            released=jax.tree.map(jnp.zeros_like, moving) if self.ascent_radius else None,
            noise=PrivatizeState(noise_key, jnp.zeros((), jnp.int32)),
            key=stream(seed, "augmentation", impl="threefry2x32"),
            layout=layout,
            buffers=self._first_buffers(params, layout),
        )
        return self.placed(state, copy=True)

    def _first_buffers(self, params: Any, layout: Layout | None) -> Any:
        """Returns the buffers of correlated noise before the first step, or None."""
        if self.privatizer.noise is None:
            return None
        sums = jax.eval_shape(self.query.zeros, params)
        shapes = jax.eval_shape(lambda: self.privatizer.init_buffers(sums))
        shardings = self.shardings(params, layout, shapes)
        if shardings is None:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def zeros(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
            # Each device makes its own part.
            return jnp.zeros(x.shape, x.dtype, device=sharding)

        return jax.tree.map(zeros, shapes, shardings)

    def placed(self, state: TrainState, *, copy: bool = False) -> TrainState:
        """Returns a state whose arrays, or NumPy arrays, all lie as its layout says.

        With `copy`, no array shares memory with another, so that `fit` may write into all of them.
        """
        shardings = self.shardings(state.params, state.layout, state)
        return meshes.put(state, shardings, copy=copy)

    def refreshed(self, state: TrainState) -> TrainState:
        """Returns the state with a refreshed `carried` if that is due."""
        every = self.query.refresh_every
        if not every or int(jax.device_get(state.step)) % every:
            return state
        query = self.query
        carried = query.refresh(state.params, state.carried, state.step, query.public)
        return state._replace(carried=carried)

    # --- The plan of a run ----------------------------------------------------------------------

    def planned(self, steps: int) -> "PrivateTrainer":
        """Returns the trainer for a run of `steps` steps.

        Only a trainer with a schedule of noise differs. The schedule is evaluated once for each
        step, and the compiled steps hold its values.

        Raises:
          ValueError: The noise of one of the steps is not positive or not finite. The message
              names the step. Or the run is one release of fewer steps.
        """
        if self.is_whole:
            self._check_whole(steps)
        if not steps or not isinstance(self.privatizer.noise_multiplier, NoiseSchedule):
            return self
        if steps not in self._plans:  # Each has programs of its own, to be compiled once.
            privatizer = self.privatizer.planned(steps)
            query = self.query
            if privatizer.grid is not None:
                query = dataclasses.replace(query, grids=privatizer.grid)
            self._plans[steps] = dataclasses.replace(self, privatizer=privatizer, query=query)
        return self._plans[steps]

    def check(self, source: Source) -> None:
        """Raises TypeError if `source` is no `Source`, ValueError if sampler or unit do not fit."""
        check_members(source)
        if isinstance(source, Groups) and not self.group and self.unit == "example":
            raise ValueError(
                "source is of jaxdp.data.by_group, but the trainer protects one 'example'. Give "
                "the trainer group=True and unit=..., such as 'patient', or unit=... alone if "
                "loss_fn takes the `jaxdp.data.Records` of an owner."
            )
        most = source.max_records if isinstance(source, Owners) else None
        if most != self.records_per_owner:
            raise ValueError(
                f"sampler.records_per_owner must be {most} for this source, got "
                f"{self.records_per_owner}. It is the max_records of jaxdp.data.by_owners, "
                "whose source.sampler(q) sets it, and None for other sources."
            )
        if len(source) != self.sampler.num_examples:
            raise ValueError(
                f"source has {len(source)} examples, but the sampler draws from "
                f"{self.sampler.num_examples}. Its event does not describe training on this "
                "source. Make the sampler from len(source)."
            )

    # --- Steps ----------------------------------------------------------------------------------

    def drawn(self, state: TrainState) -> np.ndarray:
        """Returns the private indices [B] of the examples of the next step.

        They depend only on the run's noise key and the step, not on the sampler's own seed. Two
        runs that share their batches cost more than the ledger's composition of independently
        sampled steps.
        """
        step, sampler = self._sampler_of(state)
        return sampler.batch(step)

    def _sampler_of(self, state: TrainState) -> tuple[int, Sampler]:
        """Returns the step of a state, and the sampler with the secret seed of its run."""
        step, words = jax.device_get((state.step, jax.random.key_data(state.noise.key)))
        # The noise key is secret and new in every chunk, so the batches are secret too. Another
        # name makes another stream than that of the noise.
        seed = derive(words.tobytes(), "jaxdp sampling")
        return int(step), self.sampler.of_run(seed)

    def step(
        self,
        state: TrainState,
        source: Source,
        batch: list[PhysicalBatch] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Takes one step on a batch of `source`.

        The metrics are functions of the released values and cost nothing beyond the step's event.
        Every process of the mesh takes the step, and reads its own part of the batch.

        Args:
          state: The state, whose buffers stay valid without `meanwhile`.
          source: The private examples.
          batch: The batch of this step from `batches`. None, the default, draws and reads it now.
          meanwhile: A function that is called while the device computes the sum of the batch. The
            step then writes the new state into the buffers of `state`. Its arrays are deleted, and
            JAX raises if they are used again.

        Raises:
          TypeError, ValueError: As in `check`.
          ValueError: A schedule of noise is not known for this step. `planned` evaluates it for
              more.
        """
        self.check(source)
        state = self.refreshed(state)
        if batch is None:
            step, sampler = self._sampler_of(state)
            self.privatizer.check_step(step)
            batch = self.load(state, source, sampler.batch(step), step=step)
        sums = self.total(state, batch)
        # Without `meanwhile` a caller holds `state`, whose arrays must not be donated.
        if meanwhile is None:
            return self.update(state, sums)
        meanwhile()  # before `state` is donated
        return self.update_in_place(*apart(state), sums)

    @contextlib.contextmanager
    def batches(
        self, state: TrainState, source: Source, steps: int, *, seed: bytes | None = None
    ) -> Iterator[Iterator[list[PhysicalBatch]]]:
        """Yields the iterator of the batches of the next `steps` steps, for `step`.

        A thread draws and reads the next batch while the device computes. It reads several small
        ones at once. The batches are those of `drawn`, or of the sampler with a secret seed.

        Raises:
          ValueError: A schedule of noise is not known for these steps, as in `step`.
        """
        first, sampler = self._sampler_of(state)
        if seed is not None:
            sampler = self.sampler.of_run(seed)
        self.privatizer.check_step(first + steps - 1)

        def load(step: int) -> list[PhysicalBatch]:
            return self.load(state, source, sampler.batch(step), step=step)

        with read_ahead(load, range(first, first + steps)) as batches:
            yield batches

    def sums(self, state: TrainState, source: Source, rows: np.ndarray) -> Any:
        """Sums the contributions of the examples at `rows`, [B >= 0] indices into `source`.

        The sums are private and without noise.
        """
        return self.total(state, self.load(state, source, rows))

    def total(self, state: TrainState, batch: list[PhysicalBatch]) -> Any:
        """Sums the contributions of the examples of a batch from `batches` or `load`.

        The sums are private and without noise.
        """
        sums = (self.part_sum(state, *physical).total for physical in batch)
        return functools.reduce(self.add, sums)

    # --- Physical batches -----------------------------------------------------------------------

    def physical(
        self, state: TrainState, source: Source, *, memory: int | None = None
    ) -> PhysicalSizes:
        """Returns the sizes of the physical batches into which the batches of `source` are cut.

        They are `physical_batch_size`, if that is given. Otherwise they suit the sampler
        (`PhysicalSizes.choose`), and the largest takes about 2 GiB, or a quarter of the memory of a
        device that tells its own. The memory of an example is counted as twice the values of its
        forward pass, and the per-example gradients that the method holds. With `memory`, the sizes
        are those on an accelerator that is not there, with so many bytes.
        """
        if self.physical_batch_size is not None:
            size = (self.physical_batch_size,)
            return PhysicalSizes(meshes.rounded_up(size, self.mesh, self.data_axes))
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(state.params))
        known = (memory, shapes)
        planned_for, sizes = self._sizes.get(known, (None, None))
        # `load` asks in every step. Examples of another source may be longer.
        if planned_for is None or sizes is None or planned_for() is not source:
            there = memory is not None or meshes.platform_of(self.mesh) != "cpu"
            stats = jax.local_devices()[0].memory_stats() or {}
            sizes = PhysicalSizes.for_memory(
                self.sampler,
                memory=memory or stats.get("bytes_limit"),
                row_bytes=row_bytes(self, state, source),
                devices=meshes.data_devices(self.mesh, self.data_axes),
                launches_cost=there,
            )
            if self.privatizer.grid is not None:
                # The size may decide the last bits of a gradient, and the batch decides the size.
                sizes = dataclasses.replace(sizes, sizes=sizes.sizes[:1])
            rounded = meshes.rounded_up(sizes.sizes, self.mesh, self.data_axes)
            sizes = dataclasses.replace(sizes, sizes=rounded)
            self._sizes[known] = _reference(source), sizes
        return sizes

    def load(
        self,
        state: TrainState,
        source: Source,
        rows: np.ndarray,
        *,
        step: int | None = None,
    ) -> list[PhysicalBatch]:
        """Cuts a batch into physical batches, and reads what this process needs of them.

        Args:
          state: The state, whose layout says where the arrays lie.
          source: The private examples.
          rows: The batch, [B >= 0] indices into `source`.
          step: The step of the batch. The first `FIRST_STEPS` steps take the largest size only.
              None, the default, takes all sizes.
        """
        sizes = self.physical(state, source)
        if step is not None:
            sizes = sizes.of_step(step)
        return [
            put(state.layout, source, indices, mask, number)
            for number, (indices, mask) in enumerate(sizes.cut(rows))
        ]

    # --- Events and programs --------------------------------------------------------------------

    def event(self, first: int, last: int) -> DpEvent:
        """Returns the privacy event of steps first, ..., last - 1.

        If the run is one release (`is_whole`), that is the event of all its steps, whatever `last`
        is, and later steps have none of their own.

        Raises:
          ValueError: `first` exceeds `last`. Or the run is one release, and `first` is not 0 or
              `last` exceeds its steps.
        """
        if not 0 <= first <= last:
            raise ValueError(
                f"first and last must satisfy 0 <= first <= last, got first={first}, last={last}."
            )
        if self.is_whole and last:
            self._check_whole(last)
            if first:
                raise ValueError(
                    f"first must be 0, got {first}. All {self.whole_steps} steps of the run are "
                    "one release, which is charged before the first step: event(0, steps)."
                )
            return self.simulated_event or self._whole_event
        if not isinstance(self.privatizer.noise_multiplier, NoiseSchedule):
            if first == last:
                return NoOpDpEvent()
            return self.sampler.run_event(self.privatizer.event, last - first)
        counts = collections.Counter(map(self.privatizer.event_at, range(first, last)))
        return compose({self.sampler.event(event): count for event, count in counts.items()})

    @property
    def whole_steps(self) -> int:
        """The steps of a run that have an event together only, or 0.

        These are the steps of correlated noise, or of a pattern that they share.
        """
        if self.privatizer.noise is not None:
            return self.privatizer.noise.steps
        return getattr(self.sampler, "steps", 0)

    @property
    def is_whole(self) -> bool:
        """Whether only all steps of a run together have an event."""
        return self.whole_steps > 0

    @property
    def is_amplified(self) -> bool:
        """Whether the event of a whole run rests on a secret pattern that its steps share."""
        return self.is_whole and not isinstance(self.sampler, FixedOrderSampler)

    def _check_whole(self, last: int) -> None:
        """Raises ValueError for more steps than the event of a whole run has."""
        if last > self.whole_steps:
            raise ValueError(
                f"steps must be at most {self.whole_steps}, got {last}: all steps of the run are "
                "one release, whose event has that many. Make noise and sampler for more."
            )

    @functools.cached_property
    def _whole_event(self) -> DpEvent:
        """The event of a whole run, from one simulation for all calls."""
        noise_multiplier = self.privatizer.multiplier_at(0)
        return event(noise_multiplier, self.sampler, self.whole_steps, self.privatizer.noise)

    def programs(
        self,
        state: TrainState,
        source: Source,
        last: int | None = None,
        *,
        memory: int | None = None,
    ) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Returns the compiled functions of a step by name, each with arguments for its `lower`.

        "refresh" is called every `query.refresh_every` steps, "sum M" for each physical batch of M
        examples, "add" for each but the first of a step, and "update" once per step. Arguments that
        an earlier function computes are `jax.ShapeDtypeStruct`s. The programs of the first step
        come first.

        Args:
          state, source: As in `step`.
          last: With a number, the programs are those of the steps before it. None is all.
          memory: With a number, the programs are those for an accelerator that is not there, with
              so many bytes, as `jaxdp.compilers.estimate` takes them.
        """
        return step_programs(self, state, source, last, memory=memory)

    def compile(self, source: Source) -> Programs:
        """Returns programs that are compiled side by side, in the background. Close them.

        Without it, a step compiles what it needs first.
        """
        return Programs(self, source)


def _reference(source: Source) -> Callable[[], Source | None]:
    """Returns a weak reference to a source, or one that keeps it if its class allows no other."""
    try:
        return weakref.ref(source)
    except TypeError:  # a class with __slots__
        return lambda: source


def _check_arrays(params: Any) -> None:
    """Raises TypeError for a leaf that is no array."""
    for path, leaf in paths_of(params):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                f"params must be a pytree of arrays, got {type(leaf).__name__} at {path!r}. "
                "Convert a number that is trained with jnp.asarray. Close loss_fn over "
                "everything else. For an Equinox module: params, static = "
                "eqx.partition(model, eqx.is_inexact_array), and eqx.combine(params, static) "
                "in loss_fn."
            )


def _addressable(params: Any) -> list[jax.Array]:
    """Returns the leaves that this process holds as a whole, which it can compare with others."""
    return [leaf for leaf in jax.tree.leaves(params) if leaf.is_fully_addressable]


@shows_keywords(Options, OPTION_DEFAULTS)
def make_trainer(
    make_query: Callable[[ClippedGrad], Query],
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float | Mapping[str, float],
    noise_multiplier: float | Callable[[Any], Any] | None,
    sampler: Sampler,
    noise: CorrelatedNoise | None = None,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """Returns a trainer for the query that a method makes from a clipped gradient.

    The other arguments are those of `dp_sgd`.
    """
    check_clip_norm("clip_norm", clip_norm)
    check_optimizer(optimizer)
    check_sampler(sampler, noise)
    calibrate = None
    if noise is not None:
        calibrate = functools.partial(calibrated, noise=noise)
        if options.get("epsilon") is not None:
            options.setdefault("steps", noise.steps)
    noise_multiplier, fields = noise_and_options(noise_multiplier, options, sampler, calibrate)
    size = fields.get("physical_batch_size")
    if size is not None:
        check_count("physical_batch_size", size, 1)
    clipping = {
        name: fields.pop(name) for name in ("engine", "clip_rule", "trainable") if name in fields
    }
    exact = fields.pop("exact", False)
    # The views of an example, or the records of a user, are a group: its mean gradient is clipped.
    grouped = fields.get("augment") is not None or fields.get("group", False)
    gradient = clipped_grad(loss_fn, clip_norm=clip_norm, group=grouped, **clipping)
    query = make_query(gradient)
    batch_size = sampler.expected_batch_size
    privatizer = privatize(
        query,
        noise_multiplier=noise_multiplier,
        divisor=batch_size,
        noise=noise,
        exact=exact,
    )
    if exact:
        # A gradient and its rounding are held for each example.
        copies = max(2, 2 * query.copies)
        query = dataclasses.replace(query, grids=privatizer.grid, copies=copies)
    return PrivateTrainer(
        query=query, privatizer=privatizer, optimizer=optimizer, sampler=sampler, **fields
    )
