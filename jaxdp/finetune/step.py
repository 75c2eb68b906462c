"""The arithmetic of a step, as functions of arrays that JAX compiles.

Each physical batch of a step goes through `part_sum`. The sums are added up by `add`. One `update`
adds the noise and moves the parameters:

    sums = functools.reduce(add, (part_sum(state, *physical).total for physical in batch))
    state, metrics = update(state, sums)

`jaxdp.finetune.trainer` draws the batch and calls these functions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxdp.data import Records
from jaxdp.files import check_count, check_function, check_numbers
from jaxdp.finetune.query import Query, QuerySums, is_floating, moving_params
from jaxdp.transforms.exact_scaling import tree_in_units
from jaxdp.transforms.meshes import Layout, platform_of
from jaxdp.transforms.noise import CPU_OPTIONS, Privatizer, PrivatizeState


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
      buffers: What correlated noise keeps of earlier steps, or None. Secret, as the key of `noise`
          is.
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
    buffers: Any = None


class Large(NamedTuple):
    """The large arrays of a state, of which an update makes new ones, in the order of `TrainState`.

    JAX gives the buffers of donated arrays to results of the same shape in their order. In another
    order the new parameters would take the buffers of the optimizer, and XLA would copy both first.
    """

    params: Any
    opt_state: Any
    ema: Any
    buffers: Any


def apart(state: TrainState) -> tuple[Large, TrainState]:
    """Returns the large arrays of a state, and the state without them."""
    large = Large(state.params, state.opt_state, state.ema, state.buffers)
    return large, state._replace(params=None, opt_state=None, ema=None, buffers=None)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StepFunctions:
    """The compiled functions of a step. `dp_sgd` documents the arguments.

    Attributes:
      zeros: `zeros(params, layout=None)`, the sum over no examples.
      part_sum: `part_sum(state, examples, mask, number)`, the `QuerySums` of one physical batch,
          without noise.
      add: `add(sums, others)`. It writes into the buffers of `sums`.
      update: `update(state, sums) -> (state, metrics)`, the noise and the step of the optimizer.
      update_in_place: `update_in_place(*apart(state), sums)`. It writes into the buffers of the
          large arrays.
    """

    query: Query
    privatizer: Privatizer
    optimizer: optax.GradientTransformation
    augment: Callable[[jax.Array, Any], Any] | None = None
    augmult: int = 1
    ema_decay: float | None = None
    ascent_radius: float = 0.0
    stochastic: bool = False
    group: bool = False
    mesh: jax.sharding.Mesh | None = None
    zeros: Any = dataclasses.field(init=False)
    part_sum: Any = dataclasses.field(init=False)
    add: Any = dataclasses.field(init=False)
    update: Any = dataclasses.field(init=False)
    update_in_place: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.augment is not None:
            check_function("augment", self.augment, "augment(key, example) -> example")
        check_count("augmult", self.augmult, 1)
        check_numbers(ema_decay=self.ema_decay or 0, ascent_radius=self.ascent_radius)
        if self.augment is None and self.augmult != 1:
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
        # The names of the functions are in the text of the programs, and so in the token of a
        # release. A new name would charge an interrupted chunk again.
        compiled = functools.partial(repeatable, platform=platform_of(self.mesh))
        object.__setattr__(self, "zeros", compiled(self._zeros))
        object.__setattr__(self, "part_sum", compiled(self._part_sum))
        object.__setattr__(self, "add", _addition(platform_of(self.mesh)))
        object.__setattr__(self, "update", compiled(self._update))
        in_place = compiled(self._update_in_place, donate=(0,), cpu_options=CPU_OPTIONS)
        object.__setattr__(self, "update_in_place", in_place)

    def shardings(self, params: Any, layout: Layout | None, tree: Any) -> Any:
        """Returns how the leaves of a tree lie, which may have parts like the parameters.

        Without a layout it returns None.
        """
        if layout is None:
            return None
        return layout.shardings(tree, params, moving_params(self.query.gradient, params))

    def _laid_out(self, params: Any, layout: Layout | None, tree: Any) -> Any:
        """Constrains the leaves of a tree, inside a program, to lie as `shardings` says."""
        if layout is None:
            return tree
        return layout.constrained(tree, params, moving_params(self.query.gradient, params))

    def _zeros(self, params: Any, layout: Layout | None = None) -> Any:
        return self._laid_out(params, layout, self.query.zeros(params))

    def _part_sum(
        self,
        state: TrainState,
        examples: Any,
        mask: jax.Array,
        number: jax.Array,
    ) -> QuerySums:
        """Sums the contributions of the physical batch with this number within the step."""
        # The number is folded into the key, so that no two physical batches share random views.
        key = jax.random.fold_in(state.key, state.step)
        key = jax.random.fold_in(key, number)
        augment_key, loss_key = jax.random.split(key)
        if self.group:
            if not isinstance(examples, Records):
                raise ValueError(
                    "source must be of jaxdp.data.by_group, because the trainer has group=True."
                )
            mask = mask[:, None] & examples.present  # padding, and places without a record
            examples = examples.records
        if self.augment is not None:
            keys = jax.random.split(augment_key, len(mask))
            examples = jax.vmap(self._views)(keys, examples)
            if self.group:
                mask = jnp.repeat(mask, self.augmult, axis=1)
        params = state.params
        if self.ascent_radius:
            params = _ascended(params, state.released, self.ascent_radius)
        loss_key = loss_key if self.stochastic else None
        query = self.query.at(state.noise.step)
        if state.layout is None:
            return query.sums(params, state.carried, examples, mask, loss_key)
        # Each device clips whole gradients, so it needs whole parameters. The sums are divided
        # again afterwards.
        whole = state.layout.whole()
        with jax.sharding.use_abstract_mesh(whole.mesh.abstract_mesh):
            params = self._laid_out(params, whole, params)
            sums = query.sums(params, state.carried, examples, mask, loss_key)
            total = self._laid_out(params, whole, sums.total)
        # `dropped` stays where its examples are: a count would be one more exchange in every step.
        return QuerySums(self._laid_out(state.params, state.layout, total), sums.dropped)

    def _views(self, key: jax.Array, example: Any) -> Any:
        """Returns the K views of an example, [K, ...], or of a user's k records, [k K, ...]."""
        if not self.group:
            return self._record_views(key, example)
        keys = jax.random.split(key, len(jax.tree.leaves(example)[0]))
        views = jax.vmap(self._record_views)(keys, example)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), views)

    def _record_views(self, key: jax.Array, record: Any) -> Any:
        assert self.augment is not None
        keys = jax.random.split(key, self.augmult)
        return jax.vmap(self.augment, in_axes=(0, None))(keys, record)

    def _update_in_place(
        self, large: Large, rest: TrainState, sums: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        return self._update(rest._replace(**large._asdict()), sums)

    def _update(self, state: TrainState, sums: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        sum_shardings = self.shardings(state.params, state.layout, sums)
        before = state.noise._replace(buffers=state.buffers)
        noisy_mean, noise = self.privatizer.update(sums, before, shardings=sum_shardings)
        return self.read(state, noisy_mean, noise)

    def read(
        self, state: TrainState, noisy_mean: Any, noise: PrivatizeState
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the state and metrics after a step with this noisy mean.

        It is post-processing. `noise` is the state of the noise after the step.
        """
        gradient, carried, metrics = self.query.read(state.params, state.carried, noisy_mean)
        moving = moving_params(self.query.gradient, state.params)
        try:
            updates, opt_state = self.optimizer.update(gradient, state.opt_state, moving)
        except TypeError as error:
            if "keyword-only argument" in str(error):
                raise TypeError(
                    f"optimizer must work with the noisy gradient alone, but {error}. Losses of "
                    "private examples are not released. Choose another optimizer, such as "
                    "optax.adamw."
                ) from error
            raise
        params = jax.tree.map(_apply, state.params, updates, is_leaf=lambda x: x is None)
        chex.assert_trees_all_equal_shapes(
            params, state.params, custom_message="optimizer must keep the shapes of params."
        )
        ema = self._averaged(state, params)
        metrics = {"released_gradient_norm": optax.tree.norm(gradient), **metrics}
        after = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            ema=ema,
            carried=carried,
            released=gradient if self.ascent_radius else None,
            noise=noise._replace(buffers=None),
            key=state.key,
            layout=state.layout,
            buffers=noise.buffers,
        )
        return self._laid_out(params, state.layout, after), metrics

    def _averaged(self, state: TrainState, params: Any) -> Any:
        """Returns the moving average after a step to `params`."""
        if self.ema_decay is None:
            return state.ema
        # De et al. 2022, appendix C: decay_t = min(decay, (1 + t) / (10 + t)) gives the start
        # little weight.
        t = state.step.astype(jnp.float32)
        decay = jnp.minimum(self.ema_decay, (1 + t) / (10 + t))

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            # In this form the average of a frozen parameter keeps its bits.
            return old + (1 - decay) * (new - old) if is_floating(new) else new

        return jax.tree.map(average, state.ema, params)


def repeatable(
    function: Callable[..., Any],
    *,
    platform: str,
    donate: Sequence[int] = (),
    cpu_options: dict[str, Any] | None = None,
) -> Any:
    """Compiles a function so that a repeated step has the same bits.

    With other bits, one noise would fall on two gradients. The result may take the buffers of the
    arguments whose numbers are in `donate`. They are invalid after the call. XLA's GPU backend
    promises equal bits only on request. The other backends always do. On a GPU, and with
    `cpu_options` of XLA, the result cannot be called inside another compiled function.
    """
    on_gpu = {"xla_gpu_deterministic_ops": True}
    options = {"cuda": on_gpu, "rocm": on_gpu, "cpu": cpu_options}
    return jax.jit(function, compiler_options=options.get(platform), donate_argnums=donate)


@functools.cache
def _addition(platform: str) -> Any:
    """Returns the compiled `_add`. Its program depends on shapes only, so all trainers share it."""
    return repeatable(_add, platform=platform, donate=(0,))


def _add(sums: Any, others: Any) -> Any:
    return jax.tree.map(jnp.add, sums, others)


def _ascended(params: Any, direction: Any, radius: float) -> Any:
    """Returns params + radius * direction / ||direction||. A zero direction changes nothing.

    DP-SAT (Park et al. 2023, "Differentially private sharpness-aware training"): the direction was
    released one step ago, so the ascent costs no privacy and no second gradient. Before the first
    step the direction is zero.
    """
    # Squares of a direction of any length neither overflow nor vanish in these units.
    units, _ = tree_in_units(direction)
    norm = optax.tree.norm(units)
    scale = radius / jnp.where(norm > 0, norm, 1)

    def moved(param: jax.Array, unit: jax.Array | None) -> jax.Array:
        return param if unit is None else (param + scale * unit).astype(param.dtype)

    return jax.tree.map(moved, params, units, is_leaf=lambda x: x is None)


def _apply(param: Any, update: Any) -> Any:
    """Returns a parameter after its update, which is None for a frozen one."""
    return param if update is None else (param + update).astype(jnp.result_type(param))
