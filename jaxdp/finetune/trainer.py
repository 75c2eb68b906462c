"""The training step that all methods share, and `Query`, the part in which they differ.

One step:

    1. L_t: every example joins with probability q, independently                  `PoissonSampler`
    2. each example contributes a vector of L2 norm at most S, summed over L_t     `Query.sums`
    3. add noise sigma S N(0, I), divide by the public number q n                  `privatize`
    4. read the gradient from the noisy mean                                       `Query.read`, post-processing
    5. theta <- optimizer(theta, gradient); moving average of theta                post-processing

A step is the event PoissonSampled(q, Gaussian(sigma)) for every query.
"""

import abc
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data import Groups, PhysicalSizes, PoissonSampler, Records, Source, check_batch
from jaxdp.data.protocol import check_members
from jaxdp.data.storage import on_device
from jaxdp.privacy import DpEvent, GaussianDpEvent, SelfComposedDpEvent, calibrate_noise
from jaxdp.privacy.accounting import Adjacency, Method
from jaxdp.privacy.cautions import warn_if_weak
from jaxdp.privacy.events import compose
from jaxdp.release import Hosts, derive, digest, new_seed, stream
from jaxdp.report import counting
from jaxdp.transforms.clipping import ClippedGrad, Engine, check_params, clipped_grad, paths_of
from jaxdp.transforms.lengths import tree_in_units
from jaxdp.transforms.meshes import (
    Layout,
    ParamSharding,
    check_mesh,
    data_devices,
    platform_of,
    put,
    rounded_up,
)
from jaxdp.transforms.noise import CPU_OPTIONS, NoiseSchedule, Privatizer, PrivatizeState, privatize
from jaxdp.transforms.walker import forward_bytes

CLIP_NORMS = (1e-8, 1e8)  # far from where float32 squares underflow or overflow
# Steps that take the largest physical size alone, so that a run starts before the programs of the
# others are compiled.
FIRST_STEPS = 8
_FIRST_PROGRAMS = 3  # the sum of the largest size, the addition of two sums, and the update
_CACHED_SECONDS = 0.5  # in which they are read from JAX's cache, if they are there
# How many batches, and of how many bytes, are read ahead.
MOST_AHEAD, _BYTES_AHEAD = 16, 2**24
# What a physical batch may take, by the rough count of `PrivateTrainer.physical`, where a device
# does not tell its own.
_MEMORY = 2**31


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Query(abc.ABC):
    """The sum that a method computes on every batch, and how it reads the noisy sum.

    A method's guarantee rests on `sums` alone. It adds one term of L2 norm at most
    `sensitivity("add_remove")` per unmasked example. Each term is a function of that example, the
    parameters and `carried`. Other methods see only released or public values.

    Attributes:
      gradient: The clipped gradient function of the query.
      public: The pytree of public arrays that `refresh` reads, or None.
      refresh_every: The number of steps between calls of `refresh`, which begin with step 0. 0 is
          never. Public.
      copies: The number of per-example gradients that `sums` holds for each example.
    """

    gradient: ClippedGrad
    public: Any = None
    refresh_every: int = 0
    copies: int = 0

    @abc.abstractmethod
    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """Returns the L2 norm that no example's contribution exceeds."""

    def init(self, params: Any) -> Any:
        """Returns the first `carried`, a function of released values and public data, or None."""
        return None

    def refresh(self, params: Any, carried: Any, step: Any, public: Any) -> Any:
        """Returns a new `carried`."""
        return carried

    @abc.abstractmethod
    def zeros(self, params: Any) -> Any:
        """Returns the sum over no examples."""

    @abc.abstractmethod
    def sums(
        self, params: Any, carried: Any, batch: Any, mask: jax.Array, key: jax.Array | None
    ) -> Any:
        """Returns the sum of the contributions of the unmasked examples of a batch."""

    @abc.abstractmethod
    def read(self, params: Any, carried: Any, mean: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Returns the gradient like the trainable parameters, the new `carried` and metrics, from
        the noisy mean.
        """


class TrainState(NamedTuple):
    """The state that a step changes.

    Attributes:
      step: int32 scalar, the number of finished steps.
      params: The current parameters.
      opt_state: The state of the optimizer.
      ema: The moving average of params in float32 or wider, or None.
      carried: The value that the query carries from step to step, or None.
      released: The gradient of the last step, the direction of the ascent, or None.
      noise: The key and step of the stream of noise and batches. Secret: with the key anyone can
          subtract the noise.
      key: The key of augmentation and stochastic losses.
      layout: Where the arrays lie on the trainer's mesh, static, or None without a mesh.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any
    carried: Any
    released: Any
    noise: PrivatizeState
    key: jax.Array
    layout: Layout | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PrivateTrainer:
    """Private training as pure steps. `dp_sgd` and the other methods make it. `dp_sgd` documents
    the fields.
    """

    query: Query
    privatizer: Privatizer
    optimizer: optax.GradientTransformation
    sampler: PoissonSampler
    physical_batch_size: int | None = None
    augment: Callable[[jax.Array, Any], Any] | None = None
    augmult: int = 1
    ema_decay: float | None = None
    ascent_radius: float = 0.0
    stochastic: bool = False
    group: bool = False
    unit: str = "example"
    mesh: jax.sharding.Mesh | None = None
    data_axes: Sequence[str] = ("data",)
    param_sharding: ParamSharding | None = None
    zeros: Any = dataclasses.field(
        init=False
    )  # compiled `_zeros`, `_part_sum`, `_add` and `_update`
    part_sum: Any = dataclasses.field(init=False)
    add: Any = dataclasses.field(init=False)  # writes into the buffers of its first sum
    update: Any = dataclasses.field(init=False)
    update_in_place: Any = dataclasses.field(
        init=False
    )  # of `apart(state)`, writes into the buffers of the large part
    _sizes: dict[Any, PhysicalSizes] = dataclasses.field(
        init=False, default_factory=dict, repr=False
    )
    _plans: dict[int, "PrivateTrainer"] = dataclasses.field(
        init=False, default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        if self.augmult < 1 or (self.augment is None and self.augmult != 1):
            raise ValueError(
                f"augmult must be at least 1, and 1 without augment, got {self.augmult}."
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1) or None, got {self.ema_decay}.")
        if not 0 <= self.ascent_radius < math.inf:
            raise ValueError(
                f"ascent_radius must be at least 0 and finite, got {self.ascent_radius}. 0 turns "
                "the ascent off."
            )
        if self.group and self.unit == "example":
            raise ValueError(
                "unit must name what group=True protects, for example unit='patient', got "
                "'example'."
            )
        check_mesh(self.mesh, self.data_axes, self.param_sharding, processes=True)
        compiled = functools.partial(repeatable, platform=platform_of(self.mesh))
        object.__setattr__(self, "zeros", compiled(self._zeros))
        object.__setattr__(self, "part_sum", compiled(self._part_sum))
        object.__setattr__(self, "add", compiled(self._add, donate=(0,)))
        object.__setattr__(self, "update", compiled(self._update))
        in_place = compiled(self._update_in_place, donate=(0,), cpu_options=CPU_OPTIONS)
        object.__setattr__(self, "update_in_place", in_place)

    def init(self, params: Any) -> TrainState:
        """Returns the state before the first step, with noise and augmentation keys from OS
        entropy.

        All processes of the mesh call it. They share the keys of process 0.

        Raises:
          TypeError: A leaf of params is not an array.
          ValueError: params do not suit the method's query or the mesh, or processes have different
              params.
        """
        check_params(params)
        for path, leaf in paths_of(params):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                raise TypeError(
                    f"params must be a pytree of arrays, got {type(leaf).__name__} at {path!r}. "
                    "Convert a number that is trained with jnp.asarray. Close loss_fn over "
                    "everything else. For an Equinox module: params, static = "
                    "eqx.partition(model, eqx.is_inexact_array), and eqx.combine(params, static) "
                    "in loss_fn."
                )
        params = jax.tree.map(
            lambda x: on_device(x, jnp.result_type(x)), params
        )  # weak types retrace
        layout, hosts = None, Hosts(self.mesh)
        hosts.agree(
            lambda: {
                "params": digest([x for x in jax.tree.leaves(params) if x.is_fully_addressable])
            }
        )
        seed = bytes.fromhex(hosts.first(lambda: new_seed().hex()))
        if self.mesh is not None:
            layout = Layout.of(params, self.mesh, self.data_axes, self.param_sharding)
            params = jax.device_put(params, layout.shardings(params, params, params))
        moving = moving_params(self.query.gradient, params)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.init(moving),
            ema=jax.tree.map(_wide, params) if self.ema_decay is not None else None,
            carried=self.query.init(params),
            released=jax.tree.map(jnp.zeros_like, moving) if self.ascent_radius else None,
            noise=PrivatizeState(stream(seed, "gradient noise"), jnp.zeros((), jnp.int32)),
            key=stream(seed, "augmentation", impl="threefry2x32"),
            layout=layout,
        )
        return self.placed(state, copy=True)

    def placed(self, state: TrainState, *, copy: bool = False) -> TrainState:
        """Returns a state whose arrays, or NumPy arrays, all lie as its layout says.

        With `copy`, no array shares memory with another, so that `fit` may write into all of them.
        """
        return put(state, self._shardings(state.params, state.layout, state), copy=copy)

    def _shardings(self, params: Any, layout: Layout | None, tree: Any) -> Any:
        """Returns the shardings of a pytree that has parts like the parameters, or None without a
        layout.
        """
        return (
            None
            if layout is None
            else layout.shardings(tree, params, moving_params(self.query.gradient, params))
        )

    def _laid_out(self, params: Any, layout: Layout | None, tree: Any) -> Any:
        if layout is None:
            return tree
        return layout.constrained(tree, params, moving_params(self.query.gradient, params))

    def planned(self, steps: int) -> "PrivateTrainer":
        """Returns the trainer for a run of `steps` steps. Only a trainer with a schedule of noise
        differs.

        The schedule is then evaluated for each step, once, and the compiled steps have its values.

        Raises:
          ValueError: The noise of one of the steps is not positive or not finite. The message has
              the step.
        """
        if not steps or not isinstance(self.privatizer.noise_multiplier, NoiseSchedule):
            return self
        if steps not in self._plans:  # each has programs of its own
            self._plans[steps] = dataclasses.replace(
                self, privatizer=self.privatizer.planned(steps)
            )
        return self._plans[steps]

    def check(self, source: Source) -> None:
        """Raises TypeError if `source` is no `Source`, ValueError if it does not fit sampler and
        unit.
        """
        check_members(source)
        if isinstance(source, Groups) and not self.group and self.unit == "example":
            raise ValueError(
                "source is of jaxdp.data.by_group, but the trainer protects one 'example'. Give "
                "the trainer group=True and unit=..., such as 'patient', or unit=... alone if "
                "loss_fn takes the `jaxdp.data.Records` of an owner."
            )
        if len(source) != self.sampler.num_examples:
            raise ValueError(
                f"source has {len(source)} examples, but the sampler draws from "
                f"{self.sampler.num_examples}. Its event does not describe training on this "
                "source. Make the sampler from len(source)."
            )

    def drawn(self, state: TrainState) -> np.ndarray:
        """Returns the private indices [B] of the examples of the next step.

        They depend only on the run's noise key and the step, not on the sampler's own seed. Two
        runs that share their batches cost more than the ledger's composition of independently
        sampled steps.
        """
        step, words = jax.device_get((state.step, jax.random.key_data(state.noise.key)))
        return self._drawn(words.tobytes(), int(step))

    def _drawn(self, key: bytes, step: int) -> np.ndarray:
        return dataclasses.replace(self.sampler, seed=derive(key, "jaxdp sampling")).batch(step)

    def step(
        self,
        state: TrainState,
        source: Source,
        batch: list[Any] | None = None,
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
            step = int(jax.device_get(state.step))
            self.privatizer.check_step(step)
            batch = self.load(state, source, self.drawn(state), step=step)
        sums = self.total(state, batch)
        if meanwhile is None:
            return self.update(state, sums)
        meanwhile()
        return self.update_in_place(*apart(state), sums)

    @contextlib.contextmanager
    def batches(
        self, state: TrainState, source: Source, steps: int
    ) -> Iterator[Iterator[list[Any]]]:
        """Yields the iterator of the batches of the next `steps` steps, for `step`.

        A thread draws and reads the next batch while the device computes. It reads several small
        ones at once, while its code is in the processor's cache. The batches are those of `drawn`.

        Raises:
          ValueError: A schedule of noise is not known for these steps, as in `step`.
        """
        first, words = jax.device_get((state.step, jax.random.key_data(state.noise.key)))
        self.privatizer.check_step(int(first) + steps - 1)

        def load(step: int) -> list[Any]:
            return self.load(state, source, self._drawn(words.tobytes(), step), step=step)

        with concurrent.futures.ThreadPoolExecutor(1, "jaxdp batches") as reader:

            def ahead() -> Iterator[list[Any]]:
                left, coming = iter(range(int(first), int(first) + steps)), collections.deque[Any]()
                count = 2
                while True:
                    if len(coming) < 2:
                        coming.extend(
                            reader.submit(load, step) for step in itertools.islice(left, count)
                        )
                    if not coming:
                        return
                    batch = coming.popleft().result()
                    if len(coming) < 2:
                        size = sum(
                            x.nbytes for x in jax.tree.leaves(batch)
                        )  # of arrays on the device
                        count = max(1, min(MOST_AHEAD, _BYTES_AHEAD // size))
                    yield batch

            try:
                yield ahead()
            finally:
                reader.shutdown(cancel_futures=True)

    def refreshed(self, state: TrainState) -> TrainState:
        """Returns the state with a refreshed `carried` if that is due."""
        every = self.query.refresh_every
        if not every or int(jax.device_get(state.step)) % every:
            return state
        return state._replace(
            carried=self.query.refresh(state.params, state.carried, state.step, self.query.public)
        )

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
            return PhysicalSizes(rounded_up((self.physical_batch_size,), self.mesh, self.data_axes))
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(state.params))
        known = (memory, shapes)  # `load` asks in every step
        if known not in self._sizes:
            limit = memory or (jax.local_devices()[0].memory_stats() or {}).get(
                "bytes_limit", 4 * _MEMORY
            )
            forward, moving = self._row_bytes(state, source)
            held = self.query.copies + (self.query.gradient.engine == "vmap")
            largest = max(1, int(limit / 4 / max(1, 2 * forward + held * moving)))
            largest *= data_devices(self.mesh, self.data_axes)
            # A call reads and writes arrays like the parameters four times, and a row its values
            # some six times.
            overhead = 4 * moving / max(1, 6 * forward)
            # The launches of a call take a GPU as long for a few rows as for many.
            if memory is not None or platform_of(self.mesh) != "cpu":
                overhead = max(overhead, min(largest, self.sampler.expected_batch_size) / 8)
            chosen = PhysicalSizes.choose(self.sampler, largest=largest, overhead=overhead)
            sizes = rounded_up(chosen.sizes, self.mesh, self.data_axes)
            self._sizes[known] = dataclasses.replace(chosen, sizes=sizes)
        return self._sizes[known]

    def _row_bytes(self, state: TrainState, source: Source) -> tuple[int, int]:
        """Returns the bytes of the values of an example's forward pass, and of its gradient."""
        gradient, row = self.query.gradient, source.gather(np.zeros(1, np.int64))
        records = jax.tree.map(lambda x: x[0], row.records if isinstance(row, Records) else row)
        views = self.augmult * (len(row.present[0]) if isinstance(row, Records) else 1)
        example = jax.tree.map(lambda x: x[0], records) if isinstance(row, Records) else records
        key = {"key": state.key} if self.stochastic else {}
        moving = sum(
            x.size * x.dtype.itemsize
            for x in jax.tree.leaves(moving_params(gradient, state.params))
        )
        forward = forward_bytes(
            jax.make_jaxpr(gradient.loss_fn)(state.params, example, **key).jaxpr
        )
        return views * forward, moving

    def load(
        self, state: TrainState, source: Source, rows: np.ndarray, *, step: int | None = None
    ) -> list[Any]:
        """Cuts `rows`, [B >= 0] indices into `source`, into physical batches, and reads what this
        process needs.

        The first `FIRST_STEPS` steps take the largest size only. Without `step`, all sizes are
        used.
        """
        sizes = self.physical(state, source)
        if step is not None and step < FIRST_STEPS:
            sizes = dataclasses.replace(sizes, sizes=sizes.sizes[:1])
        return [self._put(state, source, *cut, part) for part, cut in enumerate(sizes.cut(rows))]

    def _put(
        self, state: TrainState, source: Source, rows: np.ndarray, mask: np.ndarray, part: int
    ) -> Any:
        if (layout := state.layout) is None:
            return jax.device_put((check_batch(source.gather(rows)), mask, np.uint32(part)))
        own, number = layout.own_rows(len(rows)), np.uint32(part)
        batch, mask = layout.batch((check_batch(source.gather(rows[own])), mask[own]), len(rows))
        return batch, mask, jax.make_array_from_process_local_data(layout.everywhere, number, ())

    def sums(self, state: TrainState, source: Source, rows: np.ndarray) -> Any:
        """Sums the contributions of the examples at `rows`, [B >= 0] indices into `source`.
        Private, without noise.
        """
        return self.total(state, self.load(state, source, rows))

    def total(self, state: TrainState, parts: list[Any]) -> Any:
        """Sums the contributions of the examples of a batch from `batches` or `load`. Private,
        without noise.
        """
        return functools.reduce(self.add, (self.part_sum(state, *part) for part in parts))

    def event(self, first: int, last: int) -> DpEvent:
        """Returns the privacy event of steps first, ..., last - 1."""
        if not 0 <= first <= last:
            raise ValueError(
                f"first and last must satisfy 0 <= first <= last, got first={first}, last={last}."
            )
        if not isinstance(self.privatizer.noise_multiplier, NoiseSchedule):
            return SelfComposedDpEvent(self.sampler.event(self.privatizer.event), last - first)
        counts = collections.Counter(map(self.privatizer.event_at, range(first, last)))
        return compose({self.sampler.event(event): count for event, count in counts.items()})

    def settings_text(self, state: TrainState, source: Source) -> str:
        """Returns what the programs do not tell of how they are called, such as how a batch is
        cut.
        """
        cut = f"first steps={FIRST_STEPS}\n{self.physical(state, source)}"
        return f"refresh_every={self.query.refresh_every}\n{cut}\n{state.layout}\n"

    def lowered(
        self, state: TrainState, source: Source, last: int | None = None
    ) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Yields the programs of steps up to `last`, excluded, by the names of `programs`, and
        traces one at a time.
        """
        for name, (function, args) in self.programs(state, source, last).items():
            yield name, function.lower(*args)

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
        an earlier function computes are `jax.ShapeDtypeStruct`s. Those of the first step come
        first. With `last`, the programs are those of the steps before it. With `memory`, they are
        those for an accelerator that is not there, with so many bytes, as
        `jaxdp.compilers.estimate` takes them.
        """
        sums = self._shapes(state, jax.eval_shape(self.zeros, state.params, state.layout))
        found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        if self.query.refresh_every:
            args = (state.params, state.carried, state.step, self.query.public)
            found["refresh"] = (jax.jit(self.query.refresh), args)
            state = state._replace(carried=jax.eval_shape(self.query.refresh, *args))
        every = self.physical(state, source, memory=memory).sizes
        for size in every if last is None or last > FIRST_STEPS else every[:1]:
            batch = self._put(state, source, np.zeros(size, np.int64), np.zeros(size, bool), 0)
            found[f"sum {size}"] = (self.part_sum, (state, *batch))
            found.setdefault("add", (self.add, (sums, sums)))
            found.setdefault("update", (self.update_in_place, (*apart(state), sums)))
        return found

    def _shapes(self, state: TrainState, tree: Any) -> Any:
        """Returns shapes with the shardings that the steps give them."""
        if state.layout is None:
            return tree
        lie = self._shardings(state.params, state.layout, tree)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, lie
        )

    def compile(self, source: Source) -> "Programs":
        """Returns programs that are compiled side by side, in the background. Close them.

        Without it, a step compiles what it needs first.
        """
        return Programs(self, source)

    def _zeros(self, params: Any, layout: Layout | None = None) -> Any:
        return self._laid_out(params, layout, self.query.zeros(params))

    def _part_sum(self, state: TrainState, batch: Any, mask: jax.Array, part: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), part)
        augment_key, loss_key = jax.random.split(key)
        if self.group:
            if not isinstance(batch, Records):
                raise ValueError(
                    "source must be of jaxdp.data.by_group, because the trainer has group=True."
                )
            batch, mask = batch.records, mask[:, None] & batch.present
        if self.augment is not None:
            batch = jax.vmap(self._views)(jax.random.split(augment_key, len(mask)), batch)
            mask = jnp.repeat(mask, self.augmult, axis=1) if self.group else mask
        params = (
            _ascended(state.params, state.released, self.ascent_radius)
            if self.ascent_radius
            else state.params
        )
        whole = None if state.layout is None else state.layout.whole()
        mesh = (
            contextlib.nullcontext()
            if whole is None
            else jax.sharding.use_abstract_mesh(whole.mesh.abstract_mesh)
        )
        with mesh:
            params = self._laid_out(params, whole, params)
            sums = self.query.sums(
                params, state.carried, batch, mask, loss_key if self.stochastic else None
            )
            sums = self._laid_out(params, whole, sums)
        return self._laid_out(state.params, state.layout, sums)

    def _add(self, sums: Any, others: Any) -> Any:
        return jax.tree.map(jnp.add, sums, others)

    def _views(self, key: jax.Array, example: Any) -> Any:
        """Returns the views of an example, [K, ...], or of the k records of a user, [k K, ...]."""
        if self.group:
            keys = jax.random.split(key, len(jax.tree.leaves(example)[0]))
            views = jax.vmap(self._record_views)(keys, example)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), views)
        return self._record_views(key, example)

    def _record_views(self, key: jax.Array, record: Any) -> Any:
        assert self.augment is not None
        return jax.vmap(self.augment, in_axes=(0, None))(
            jax.random.split(key, self.augmult), record
        )

    def _update_in_place(
        self, large: "Large", rest: TrainState, sums: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        return self._update(rest._replace(**large._asdict()), sums)

    def _update(self, state: TrainState, sums: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        mean, noise = self.privatizer.update(
            sums, state.noise, shardings=self._shardings(state.params, state.layout, sums)
        )
        gradient, carried, metrics = self.query.read(state.params, state.carried, mean)
        moving = moving_params(self.query.gradient, state.params)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, moving)
        params = jax.tree.map(_apply, state.params, updates, is_leaf=lambda x: x is None)
        ema = state.ema
        if self.ema_decay is not None:
            # De et al. 2022, appendix C: decay_t = min(decay, (1 + t) / (10 + t)) gives the start
            # little weight.
            t = state.step.astype(jnp.float32)
            decay = jnp.minimum(self.ema_decay, (1 + t) / (10 + t))
            # This form keeps frozen parameters bit for bit.
            ema = jax.tree.map(
                lambda old, new: old + (1 - decay) * (new - old) if _floating(new) else new,
                ema,
                params,
            )
        released = gradient if self.ascent_radius else None
        metrics = {"released_gradient_norm": optax.tree.norm(gradient), **metrics}
        after = TrainState(
            state.step + 1,
            params,
            opt_state,
            ema,
            carried,
            released,
            noise,
            state.key,
            state.layout,
        )
        return self._laid_out(params, state.layout, after), metrics


class Programs:
    """The programs of a run, which are compiled in the background.

    Those of the first step come first. The others are traced while these are compiled, and the rest
    after the first step. They are compiled while earlier steps run. So an error of the compiler may
    come in a chunk that is paid, which a later call repeats.

    Attributes:
      text: What determines the results of the steps, once `start` has been called: the programs of
        the first step as StableHLO, and the sizes of all physical batches. Equal text, data and
        keys give equal results on equal devices. The programs of the other sizes come from the same
        functions, and every token has the source of jaxdp.
    """

    def __init__(self, trainer: PrivateTrainer, source: Source):
        self.trainer, self.source = trainer, source
        self.text = ""
        # Python waits for running threads when it ends.
        self._pool = concurrent.futures.ThreadPoolExecutor(
            os.cpu_count(), thread_name_prefix="jaxdp compiler"
        )
        self._coming: Iterator[tuple[str, jax.stages.Lowered]] = iter(())
        self._lowered: list[jax.stages.Lowered] = []
        self._compiling: list[concurrent.futures.Future[Any]] = []

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, state: TrainState, steps: range) -> None:
        """Traces the programs of the first of these steps, and starts to compile them. A second
        call is free.
        """
        if self.text:
            return
        texts = [self.trainer.settings_text(state, self.source)]
        self._coming = self.trainer.lowered(state, self.source, steps.stop)
        for name, program in self._coming:
            texts.append(program.as_text())
            if name != "refresh" and steps:  # "refresh" is compiled where it is called
                self._lowered.append(program)
                self._compile(_FIRST_PROGRAMS)
            if name == "update":
                break
        self.text = "".join(texts)

    def wait(self, step: int) -> None:
        """Returns when the programs of a step are compiled, or raises the error of one. Call it
        before every step.
        """
        first = self._compiling[:_FIRST_PROGRAMS]
        if not step:
            concurrent.futures.wait(first, timeout=_CACHED_SECONDS)
        while step or not all(compiling.done() for compiling in first):
            if (coming := next(self._coming, None)) is None:
                break
            self._lowered.append(coming[1])
        # On few cores the first step would wait for what it does not need.
        self._compile(len(self._lowered) if step else _FIRST_PROGRAMS)
        for compiling in self._compiling[: None if step >= FIRST_STEPS else _FIRST_PROGRAMS]:
            compiling.result()

    def _compile(self, count: int) -> None:
        for program in self._lowered[len(self._compiling) : count]:
            self._compiling.append(self._pool.submit(program.compile))


class Large(NamedTuple):
    """The large arrays of a state, of which an update makes new ones, in the order of `TrainState`.

    JAX gives the buffers of donated arrays to results of the same shape in their order. In another
    order the new parameters would take the buffers of the optimizer, and XLA would copy both first.
    """

    params: Any
    opt_state: Any
    ema: Any


def apart(state: TrainState) -> tuple[Large, TrainState]:
    """Returns the large arrays of a state, and the state without them."""
    large = Large(state.params, state.opt_state, state.ema)
    return large, state._replace(params=None, opt_state=None, ema=None)


def event(noise_multiplier: float, sampler: PoissonSampler, steps: int) -> DpEvent:
    """Returns the event of `steps` steps of any method, before there is a trainer.

    A schedule of noise needs `PrivateTrainer.event` or `calibrate_schedule`.
    """
    return SelfComposedDpEvent(sampler.event(GaussianDpEvent(noise_multiplier)), steps)


class Target(TypedDict, total=False):
    """What the noise is calibrated to if it is not given. `dp_sgd` documents it."""

    epsilon: float
    delta: float
    steps: int
    adjacency: Adjacency
    accountant: Method


class Options(Target, total=False):
    """The keyword arguments that every method passes on. `dp_sgd` documents them."""

    physical_batch_size: int | None
    augment: Callable[[jax.Array, Any], Any] | None
    augmult: int
    ema_decay: float | None
    ascent_radius: float
    stochastic: bool
    group: bool
    unit: str
    mesh: jax.sharding.Mesh | None
    data_axes: Sequence[str]
    param_sharding: ParamSharding | None
    engine: Engine
    clip_rule: Any
    trainable: Callable[[str, Any], bool] | None


def noise_and_options(
    noise_multiplier: Any,
    options: Mapping[str, Any],
    sampler: PoissonSampler,
    calibrate: Callable[..., float] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Returns the noise multiplier, given or calibrated to the target among the options, and the
    other options.

    `calibrate(sampler, steps=, epsilon=, delta=, adjacency=, method=)` is by default that of
    constant noise.

    Raises:
      ValueError: Both noise and target are given, or neither, or only a part of the target. No
          noise meets the target.
    """
    others = {name: value for name, value in options.items() if name not in Target.__annotations__}
    target = {
        name: value for name, value in options.items() if name not in others and value is not None
    }
    if noise_multiplier is not None:
        if target:
            raise ValueError(
                f"noise_multiplier must be left out where {' and '.join(target)} are given, got "
                f"{noise_multiplier}."
            )
        return noise_multiplier, others
    if missing := [name for name in ("epsilon", "delta", "steps") if name not in target]:
        raise ValueError(
            "noise_multiplier must be given, or epsilon, delta and steps to calibrate it. "
            f"Missing: {missing}."
        )
    warn_if_weak(epsilon=target["epsilon"], delta=target["delta"], records=sampler.num_examples)
    if "accountant" in target:
        target["method"] = target.pop("accountant")
    return (calibrate or _constant_noise)(sampler, **target), others


def _constant_noise(sampler: PoissonSampler, *, steps: int, **target: Any) -> float:
    with counting(lambda z: event(z, sampler, steps), label="noise", unit="trial") as tried:
        return calibrate_noise(tried, **target)


def make_trainer(
    make_query: Callable[[ClippedGrad], Query],
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    noise_multiplier: float | Callable[[Any], Any] | None,
    sampler: PoissonSampler,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """Returns a trainer for the query that a method makes from a clipped gradient. Arguments as in
    `dp_sgd`.
    """
    check_clip_norm("clip_norm", clip_norm)
    noise_multiplier, rest = noise_and_options(noise_multiplier, options, sampler)
    if (size := rest.get("physical_batch_size")) is not None and size < 1:
        raise ValueError(
            f"physical_batch_size must be at least 1, got {size}. Leave it out, and the library "
            "chooses sizes."
        )
    how = {name: rest.pop(name) for name in ("engine", "clip_rule", "trainable") if name in rest}
    grouped = rest.get("augment") is not None or rest.get("group", False)
    query = make_query(clipped_grad(loss_fn, clip_norm=clip_norm, group=grouped, **how))
    privatizer = privatize(
        query, noise_multiplier=noise_multiplier, divisor=sampler.expected_batch_size
    )
    return PrivateTrainer(
        query=query, privatizer=privatizer, optimizer=optimizer, sampler=sampler, **rest
    )


def check_clip_norm(name: str, value: float) -> None:
    """Raises ValueError for a clip norm by which float32 cannot divide a contribution."""
    least, most = CLIP_NORMS
    if not least <= value <= most:
        raise ValueError(
            f"{name} must be between {least:g} and {most:g}, got {value}. Noise cannot hide an "
            "unbounded gradient, and float32 squares must neither overflow nor underflow."
        )


def repeatable(
    function: Callable[..., Any],
    *,
    platform: str,
    donate: Sequence[int] = (),
    cpu_options: dict[str, Any] | None = None,
) -> Any:
    """Compiles a function so that a repeated step has the same bits. Otherwise one noise falls on
    two gradients.

    The result may take the buffers of the arguments whose numbers are in `donate`. They are invalid
    after the call. XLA's GPU backend promises this only on request. The other backends always do.
    On a GPU, and with `cpu_options` of XLA, the result cannot be called inside another compiled
    function.
    """
    on_gpu = {"xla_gpu_deterministic_ops": True}
    options = {"cuda": on_gpu, "rocm": on_gpu, "cpu": cpu_options}
    return jax.jit(function, compiler_options=options.get(platform), donate_argnums=donate)


def moving_params(gradient: ClippedGrad, params: Any) -> Any:
    """Returns the trained parameters, each at least as wide as float32, as the optimizer sees
    them.
    """
    return jax.tree.map(_wide, gradient.trainable_params(params))


def _ascended(params: Any, direction: Any, radius: float) -> Any:
    """Returns params + radius * direction / ||direction||. A zero direction, as before the first
    step, changes nothing.

    DP-SAT (Park et al. 2023, "Differentially private sharpness-aware training"): the direction was
    released one step ago, so the ascent costs no privacy and no second gradient.
    """
    units, _ = tree_in_units(
        direction
    )  # squares of a direction of any length neither overflow nor vanish
    norm = optax.tree.norm(units)
    scale = radius / jnp.where(norm > 0, norm, 1)
    return jax.tree.map(
        lambda p, d: p if d is None else (p + scale * d).astype(p.dtype),
        params,
        units,
        is_leaf=lambda x: x is None,
    )


def _apply(param: Any, update: Any) -> Any:
    return param if update is None else (param + update).astype(jnp.result_type(param))


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype)) if _floating(x) else x
