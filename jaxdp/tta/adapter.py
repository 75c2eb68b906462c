"""The step of test-time adaptation: predict a batch, then adapt to it. It runs every method,
private or not.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdp.data.storage import on_device
from jaxdp.release import new_seed, stream
from jaxdp.release import program as program_text
from jaxdp.transforms.clipping import clipped_grad
from jaxdp.transforms.meshes import Layout, ParamSharding, check_mesh, rounded_up
from jaxdp.transforms.noise import gaussian
from jaxdp.tta.clipped import Clipped
from jaxdp.tta.finite import all_finite, without_bad_rows
from jaxdp.tta.method import Method, Sample, check_name
from jaxdp.tta.private import Private
from jaxdp.tta.select import (
    Adapted,
    Chosen,
    chosen,
    goes_by_structure,
    lower_blocks,
    merge,
    suggested,
    traced,
    trainable_part,
)

ApplyFn = Callable[[Any, jax.Array], jax.Array]
Predict = Literal["before", "after"]


class AdaptState(NamedTuple):
    """The state that a step changes.

    Attributes:
      step: int32 scalar, the number of batches seen. A reset does not rewind it, because noise keys
          derive from it.
      params: All parameters. Parameters that do not adapt are the source model's own arrays.
      opt_state: The state of the optimizer.
      memory: A raw function of the images seen, for a method that is not private. () for a private
          method.
      released: The previous private gradient, for methods with an ascent step. None for other
          methods.
      pending: The clipped sum of the batches of an unfinished update, without noise. It is as
        secret as `key`. None unless `accumulate` > 1.
      key: The key of noise and second views in a custom loop. With it the noise can be subtracted.
        `serve` draws other keys and uses this one only to name the state.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    memory: Any
    released: Any
    pending: Any
    key: jax.Array

    def __repr__(self) -> str:
        """Returns text without arrays, so that no log or notebook shows the key or an unfinished
        sum.
        """
        return f"{type(self).__name__}(step={self.step}, ...)"


class _Program(NamedTuple):
    """The static part of a step. The clip norm, the noise and learning rates in opt_state do not
    recompile it.
    """

    apply_fn: ApplyFn
    method: Method
    update: Callable[..., Any]
    adapted: frozenset[str]
    accumulate: int
    reset_every: int | None
    predict: Predict
    private: bool
    clipped: bool
    layout: Layout | None
    noisy: bool = False
    filters: str = "keep"
    clip_rule: Any = "global"


class _Constants(NamedTuple):
    """Public numbers and arrays of a step."""

    params: Any  # of the source model
    moving: Any  # the parameters that adapt, None elsewhere
    opt_state: Any
    clip_norm: float = 0.0
    noise_std: float = 0.0
    divisor_scale: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of a model to a stream of unlabelled batches.

        method = tta.private(tta.Tent(), clip_norm=1.0, noise_multiplier=0.6186)
        adapter = tta.Adapter(apply_fn, params, method, optax.sgd(1e-3, momentum=0.9))
        state = adapter.init()
        for images in batches:
            state, logits = adapter.step(state, images)

    `jaxdp.tta.serve` is this loop with the ledger, fresh noise for every batch, resets, the
    collapse monitor and recovery after a crash.

    A check on random images of each shape refuses an apply_fn that mixes the images of a batch. It
    can miss mixing that depends on the images. Privacy does not rest on it: private steps and their
    predictions pass one image at a time by `jax.vmap`. Under vmap only a callback or a custom
    batching rule could see two images.

    Attributes:
      apply_fn: `apply_fn(params, images [B, ...]) -> logits [B, C]`, without randomness. Each row
        of logits must be a function of one image only, so BatchNorm must use frozen statistics.
      params: The parameters of the source model. They never change, adapted parameters are copies.
      method: One of `jaxdp.tta.METHODS`, your `Method`, or `private(...)` or `clipped(...)` of it.
      optimizer: Any optax optimizer. For private methods it gets the noisy G_t, so its step is
          post-processing.
      adapted: `adapted(path, leaf) -> bool` with paths such as "block_0/norm_0/scale". The default
        is scale and offset of all normalisation layers. For SAR and DeYO it is the lower three
        quarters of the blocks (`lower_blocks`). The layers are found in the program of apply_fn: a
        parameter that multiplies a value after its normalisation by own or stored statistics, and
        one that is added then. `describe` lists them. Names count only where the program hides a
        layer, and a warning says so.
      accumulate: A, for private methods. The clipped gradients of A consecutive batches of one size
        B make one update, with one noise draw and divisor A * B. This reduces noise at the price of
        latency, at the same privacy.
      reset_every: The public number of batches between two resets to the source model. None never
          resets.
      predict: "before" (the methods' default) returns logits of the parameters before this batch.
        "after" returns logits of the parameters adapted to it. That takes another forward pass and
        costs no privacy: an image reaches the logits of other images only through the private
        gradient.
      mesh: The devices that share each batch, which is padded to a multiple of them. Results are
        those of one device up to rounding, and the noise has the same bits. None is one device.
      data_axes: The axes of the mesh along which batches are divided.
      param_sharding: `param_sharding(path, leaf) -> PartitionSpec`, how each parameter lies on the
        mesh. None keeps the shardings that the parameters have.
      images: Images [B, ...] or a `jax.ShapeDtypeStruct` of them, for `prepare`. Only shape and
        dtype are read. Without them the first batch prepares the adapter.

    Raises:
      TypeError, ValueError: An argument has the wrong type or is out of range, or the parameters do
        not suit the mesh. Also what `prepare` raises, which the first batch does without `images`.
    """

    apply_fn: ApplyFn
    params: Any
    method: Method | Private | Clipped
    optimizer: optax.GradientTransformation
    adapted: Adapted | None = None
    accumulate: int = 1
    reset_every: int | None = None
    predict: Predict = "before"
    mesh: Mesh | None = None
    data_axes: Sequence[str] = ("data",)
    param_sharding: ParamSharding | None = None
    images: Any = dataclasses.field(default=None, repr=False)
    _source: tuple[Any, Layout | None] = dataclasses.field(
        init=False, repr=False
    )  # all parameters on the devices
    _chosen: tuple[Chosen, ...] = dataclasses.field(init=False, repr=False)
    _suggested: Any = dataclasses.field(
        init=False, repr=False, default=None
    )  # the form of states before `prepare`
    _program: _Program = dataclasses.field(init=False, repr=False)
    constants: _Constants = dataclasses.field(
        init=False, repr=False
    )  # all that a step reads besides its arguments
    _separate: set[Any] = dataclasses.field(
        init=False, repr=False, default_factory=set
    )  # (shape, dtype) found good
    _texts: dict[Any, str] = dataclasses.field(
        init=False, repr=False, default_factory=dict
    )  # of lowered steps

    def __post_init__(self) -> None:
        form = self.method if isinstance(self.method, Private) else None
        if not isinstance(self._method, Method):
            raise TypeError(
                "method must be a jaxdp.tta.Method, or private(...) or clipped(...) of one, got "
                f"{type(self._method).__name__}."
            )
        if self.accumulate < 1 or (self.accumulate > 1 and form is None):
            raise ValueError(
                "accumulate must be at least 1, and 1 for a method that is not private, got "
                f"{self.accumulate}. Without noise, optax.MultiSteps(optimizer, "
                "every_k_schedule=A) averages the gradients of A batches."
            )
        if self.reset_every is not None and self.reset_every < 1:
            raise ValueError(f"reset_every must be at least 1 or None, got {self.reset_every}.")
        if self.reset_every is not None and self.reset_every % self.accumulate:
            raise ValueError(
                f"reset_every must be a multiple of accumulate={self.accumulate}, got "
                f"{self.reset_every}. Otherwise a reset would drop the paid batches of an "
                "unfinished update."
            )
        if not isinstance(self.optimizer, optax.GradientTransformation):
            raise TypeError(
                "optimizer must be one of optax, such as optax.sgd(1e-3), got "
                f"{type(self.optimizer).__name__}."
            )
        check_name("predict", self.predict, Predict)
        params = jax.tree.map(lambda x: on_device(x, jnp.result_type(x)), self.params)
        check_mesh(self.mesh, self.data_axes, self.param_sharding)
        layout = None
        if self.mesh is not None:
            layout = Layout.of(params, self.mesh, self.data_axes, self.param_sharding)
            params = jax.device_put(params, layout.shardings(params, params, params))
        object.__setattr__(self, "_source", (params, layout))
        if goes_by_structure(self._rule):
            self._settle(suggested(params, self._rule))
            object.__setattr__(self, "_suggested", self._form_of_states())
        else:
            self._settle(chosen(params, self._rule, None))
        if self.images is not None:
            self.prepare(self.images)

    @property
    def _method(self) -> Method:
        return self.method.method if isinstance(self.method, Private | Clipped) else self.method

    @property
    def _rule(self) -> Adapted | None:
        return self.adapted or (
            lower_blocks(self.params) if self._method.lower_blocks_only else None
        )

    def _settle(self, leaves: tuple[Chosen, ...]) -> None:
        """Fixes the parameters that adapt, the program of a step, and its constants."""
        (params, layout), paths = self._source, frozenset(leaf.path for leaf in leaves)
        moving = trainable_part(params, paths)
        form = self.method if isinstance(self.method, Private) else None
        static: tuple[Any, ...] = (self.apply_fn, self._method, self.optimizer.update, paths)
        static += (self.accumulate, self.reset_every, self.predict, form is not None)
        static += (isinstance(self.method, Clipped), layout)
        numbers: tuple[float, ...] = (
            (self.method.clip_norm,) if isinstance(self.method, Clipped) else ()
        )
        if form:
            static += (form.noise_multiplier > 0, form.filters, form.clip_rule)
            numbers = (form.clip_norm, form.noise_std, form.kept_fraction)
        object.__setattr__(self, "_program", _Program(*static))
        constants = _Constants(params, moving, self.optimizer.init(_wide(moving)), *numbers)
        constants = constants._replace(opt_state=self._placed(constants.opt_state, constants))
        object.__setattr__(self, "constants", constants)
        object.__setattr__(self, "_chosen", leaves)

    def prepare(self, images: jax.Array | jax.ShapeDtypeStruct) -> None:
        """Checks apply_fn on images of one shape and dtype, and chooses the parameters that adapt.

        `step` calls it, and `serve` does before it pays. Images of a kind that is known cost
        nothing.

        Args:
          images: Images [B, ...] or a `jax.ShapeDtypeStruct` of them. Only shape and dtype are
              read.

        Raises:
          ValueError: No parameter adapts by default, or the layer that returns the logits would.
            apply_fn returns no logits, one logit to a method that minimises entropy, another number
            of classes than the method has, or logits that depend on other images of the batch.
        """
        kind = (images.shape[1:], images.dtype)
        if kind in self._separate:
            return
        program, logits = traced(self.apply_fn, self._source[0], images)
        if not isinstance(logits, jax.ShapeDtypeStruct) or logits.ndim != 2 or len(logits) != 2:
            shapes = jax.tree.map(jnp.shape, logits)
            raise ValueError(
                f"apply_fn must return logits [B, num_classes], but returned {shapes} for a batch "
                "of 2."
            )
        jax.eval_shape(self._method, jax.ShapeDtypeStruct(logits.shape[1:], logits.dtype))
        if self._suggested is not None and not self._separate:
            leaves = chosen(self._source[0], self._rule, program)
            if {leaf.path for leaf in leaves} != self._program.adapted:
                self._settle(leaves)
            object.__setattr__(self, "_chosen", leaves)
        if _mixes(self.apply_fn, *kind, self.params):
            raise ValueError(
                "apply_fn mixes the images of a batch: the logits of one image changed with its "
                "neighbour, as with BatchNorm in batch mode. Private steps need a loss of each "
                "single image. Use frozen statistics (jaxdp.models.FrozenBatchNorm), LayerNorm or "
                "GroupNorm."
            )
        self._separate.add(kind)

    @property
    def adapted_paths(self) -> tuple[str, ...]:
        """The paths of the parameters that adapt. Before the first batch or `prepare` names suggest
        them.
        """
        return tuple(sorted(leaf.path for leaf in self._chosen))

    def describe(self) -> str:
        """Returns text with a line for each parameter that adapts: its path, its shape, and how it
        was found.
        """
        total = len(jax.tree.leaves(self._source[0]))
        lines = [f"{type(self._method).__name__} adapts {len(self._chosen)} of {total} parameters"]
        lines += [f"  {path} {list(shape)}: {reason}" for path, shape, reason in self._chosen]
        return "\n".join(lines)

    def init(self, key: jax.Array | None = None) -> AdaptState:
        """Returns the state before the first batch.

        The typed `key` of noise and second views is for tests. The default has 128 bits of OS
        entropy. Two runs with one key share their noise, so the difference of their updates has
        none. Raises ValueError inside jit without it.
        """
        step = jnp.zeros((), jnp.int32)
        if key is None:
            if isinstance(step, jax.core.Tracer):
                raise ValueError(
                    "init draws its key from the operating system, but under jit all runs of the "
                    "program would share one key. Call init outside jit, or pass key."
                )
            key = stream(new_seed(), "test-time adaptation")
        return self._begun(step, _typed(key))

    def reset(self, state: AdaptState) -> AdaptState:
        """Returns the source model's parameters, momentum, memory and previous gradient. Step and
        key stay.
        """
        return self._begun(state.step, state.key)

    def step(
        self,
        state: AdaptState,
        batch: jax.Array,
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[AdaptState, jax.Array]:
        """Predicts a batch and adapts to it.

        Args:
          state: A state from `init`, `step` or `reset`, to be used once. Two batches from one state
            would get the same noise, so the difference of their gradients would have none.
          batch: Images [B, ...]. B is public and, for a private method, part of the divisor.
          key: A typed key of this step's noise and second views, for `serve` and for tests. None
            for the state's key. It is folded with the step, so one key may serve all steps.
          mask: [B] bool, False for padding. Padding contributes nothing. The divisor of a private
              method stays B.

        Returns:
          The new state, and float logits [B, C].
        """
        batch = jnp.asarray(batch)
        if batch.ndim < 2 or not len(batch):
            raise ValueError(
                "batch must be images [B, ...] with B at least 1, the public divisor, got shape "
                f"{batch.shape}. For a batch without records pass padding and a mask of False."
            )
        if mask is not None and (
            jnp.result_type(mask) != jnp.bool_ or jnp.shape(mask) != batch.shape[:1]
        ):
            raise ValueError(
                f"mask must be boolean of shape {batch.shape[:1]}, got {jnp.result_type(mask)} "
                f"{jnp.shape(mask)}."
            )
        if isinstance(self.method, Private) and jax.tree.leaves(state.memory):
            raise ValueError(
                "state comes from a method that is not private. It holds a memory of raw images, "
                "and its parameters were not paid for. Begin with init(), or with reset(state)."
            )
        self.prepare(batch)
        key = _typed(state.key if key is None else key)
        moving, logits = _step(
            self._program, len(batch), self.constants, *self._arguments(state, batch, mask, key)
        )
        return self._whole(moving), logits

    def lowered_text(self, state: AdaptState, batch: jax.typing.ArrayLike) -> str:
        """Returns the text of the program of `step` for a batch. Each kind of batch is lowered
        once.
        """
        batch = jnp.asarray(batch)
        self.prepare(batch)
        arguments = (self.constants, *self._arguments(state, batch, None, state.key))
        facts = (
            "weak_type",
            "sharding",
            "committed",
        )  # a program depends on these too, keys lack the first
        leaves = jax.tree.leaves(arguments[1:])
        kind = tuple(
            (x.shape, x.dtype, *(getattr(x, fact, None) for fact in facts)) for x in leaves
        )
        if kind not in self._texts:
            self._texts[kind] = program_text(_step, self._program, len(batch), *arguments)
        return self._texts[kind]

    def parts(self, state: AdaptState) -> tuple[Any, ...]:
        """Returns the parts of a state that must be kept to resume: all that steps change, without
        the key.
        """
        return self._moving(state)[:-1]

    def whole(self, parts: tuple[Any, ...], key: jax.Array) -> AdaptState:
        """Returns the state of these parts."""
        return self._whole(self._placed(AdaptState._make((*parts, _typed(key))), self.constants))

    def _begun(self, step: jax.Array, key: jax.Array) -> AdaptState:
        """Returns the state of the source model."""
        return self._whole(
            self._placed(_fresh(self._program, self.constants, step, key), self.constants)
        )

    def _completed(self, state: AdaptState) -> AdaptState:
        """Returns a state that fits the parameters that adapt, from one that was made when names
        suggested others.
        """
        if (
            self._suggested is None
            or self._suggested == self._form_of_states()
            or self._suggested != _form(state)
        ):
            return state
        return self._begun(state.step, state.key)._replace(params=state.params, memory=state.memory)

    def _form_of_states(self) -> Any:
        nothing = jnp.zeros(())
        return _form(_fresh(self._program, self.constants, nothing, nothing))

    def _placed(self, tree: Any, constants: _Constants) -> Any:
        """Returns a pytree whose arrays lie on the mesh, if there is one."""
        layout = self._source[1]
        return (
            tree if layout is None else jax.device_put(tree, layout.shardings(tree, *constants[:2]))
        )

    def _arguments(
        self, state: AdaptState, batch: jax.Array, mask: Any, key: jax.Array
    ) -> tuple[Any, ...]:
        """Returns the arrays of a step. Copies of image 0, which do not count, pad a batch that
        devices share.
        """
        mask = jnp.ones(len(batch), bool) if mask is None else jnp.asarray(mask)
        layout = self._program.layout
        if layout is not None:
            (size,) = rounded_up((len(batch),), layout.mesh, layout.data_axes)
            rows = np.where(np.arange(size) < len(batch), np.arange(size), 0)
            batch, mask = batch[rows], mask[rows] & (np.arange(size) < len(batch))
            batch, mask, key = jax.device_put(
                (batch, mask, key), (layout.rows, layout.rows, layout.everywhere)
            )
        return self._moving(state), batch, mask, key

    def _moving(self, state: AdaptState) -> AdaptState:
        state = self._completed(state)
        kept = jax.tree.map(
            lambda old, x: None if old is None else x,
            self.constants.moving,
            state.params,
            is_leaf=lambda x: x is None,
        )
        return state._replace(params=kept)

    def _whole(self, state: AdaptState) -> AdaptState:
        # A compiled step would copy arrays that it only passes on, so frozen ones stay outside.
        return state._replace(params=merge(state.params, self.constants.params))


def _form(state: AdaptState) -> Any:
    """Returns the structure of what depends on the parameters that adapt."""
    return jax.tree.structure((state.opt_state, state.released, state.pending))


def _typed(key: jax.Array) -> jax.Array:
    dtype = getattr(key, "dtype", type(key).__name__)
    if isinstance(dtype, str) or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"key must be a typed key such as jax.random.key(seed) makes, got {dtype}.")
    return key


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _mixes(apply_fn: ApplyFn, shape: tuple[int, ...], dtype: Any, params: Any) -> jax.Array:
    """Returns whether a row of logits depends on another image of the batch, on random images."""
    scale = 1 if jnp.issubdtype(dtype, jnp.floating) else 256
    x, y, z = (scale * jax.random.uniform(jax.random.key(0), (3, *shape))).astype(dtype)
    by_y, by_z = (apply_fn(params, jnp.stack([x, other])) for other in (y, z))
    return ~jnp.allclose(by_y[0], by_z[0], rtol=1e-3, atol=1e-3, equal_nan=True)


# From here on the params of a state hold only the parameters that adapt, with None elsewhere.


def _fresh(program: _Program, constants: _Constants, step: jax.Array, key: jax.Array) -> AdaptState:
    zeros = jax.tree.map(jnp.zeros_like, _wide(constants.moving))
    memory = () if program.private else program.method.start()
    released = zeros if program.private and program.method.radius else None
    pending = zeros if program.accumulate > 1 else None
    return AdaptState(step, constants.moving, constants.opt_state, memory, released, pending, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(
    program: _Program,
    size: int,
    constants: _Constants,
    state: AdaptState,
    images: jax.Array,
    mask: jax.Array,
    key: jax.Array,
) -> tuple[AdaptState, jax.Array]:
    """Makes one step on a batch of `size` images, whose rows from `size` on are padding."""
    layout = program.layout
    if layout is None:
        return _advanced(program, size, constants, state, images, mask, key)
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        like = constants[:2]
        # Each device computes with whole parameters.
        constants, state = layout.whole().constrained((constants, state), *like)
        state, logits = _advanced(program, size, constants, state, images, mask, key)
        return layout.constrained(state, *like), logits[:size]


def _advanced(
    program: _Program,
    size: int,
    constants: _Constants,
    state: AdaptState,
    images: jax.Array,
    mask: jax.Array,
    key: jax.Array,
) -> tuple[AdaptState, jax.Array]:
    if program.reset_every is not None:
        due = (state.step > 0) & (state.step % program.reset_every == 0)
        state = _reset_where(due, program, constants, state)
    if not program.private:
        # Padding may be NaN, and zero times NaN in a loss has a NaN gradient.
        images = jnp.where(
            mask.reshape(-1, *[1] * (images.ndim - 1)) | jnp.isfinite(images), images, 0
        )
    # Keys of this kind stay independent under vmap, and reveal nothing about the noise.
    words = jax.random.bits(jax.random.fold_in(key, state.step), (2,), jnp.uint32)
    view_key = jax.random.wrap_key_data(words, impl="threefry2x32")
    own_keys, common_key = jax.random.split(view_key, size), jax.random.fold_in(view_key, size)
    if size < len(images):
        own_keys = own_keys[np.minimum(np.arange(len(images)), size - 1)]
    views = jax.vmap(program.method.augment, in_axes=(0, None, 0))(own_keys, common_key, images)
    if program.private:
        new, logits = _private_step(program, size, constants, state, (images, views), mask, key)
    else:
        new, logits = _plain_step(program, constants, state, images, views, mask)
    if program.predict == "after":
        logits = _predict(program, merge(new.params, constants.params), images)
    return new._replace(step=state.step + 1), logits


class _Seen(NamedTuple):
    """What a plain step sees of every image, without gradient."""

    logits: jax.Array
    sample: Sample
    finite: jax.Array  # whether logits, loss and weight are numbers
    kept: jax.Array  # whether the image takes part


def _plain_step(
    program: _Program,
    constants: _Constants,
    state: AdaptState,
    images: jax.Array,
    views: Any,
    mask: jax.Array,
) -> tuple[AdaptState, jax.Array]:
    """Makes one step of the method as published, or of its clipped form."""
    method = program.method

    def weighted(
        logits: jax.Array, again: jax.Array | None, candidate: jax.Array
    ) -> tuple[jax.Array, _Seen]:
        sample = method(logits, again)
        seen = jax.lax.stop_gradient(sample)
        weight = method.weight(seen)
        finite = _are_numbers(seen, weight)
        kept = candidate & finite & method.reliable(seen) & method.novel(state.memory, seen)
        return jnp.where(kept, weight * sample.uncertainty, 0), _Seen(logits, seen, finite, kept)

    def mean(
        moving: Any, images: jax.Array, views: Any, candidates: jax.Array
    ) -> tuple[jax.Array, _Seen]:
        params = merge(moving, constants.params)
        logits = program.apply_fn(params, images)
        again = None if views is None else program.apply_fn(jax.lax.stop_gradient(params), views)
        losses, seen = jax.vmap(weighted)(logits, again, candidates)
        return losses.sum() / jnp.maximum(seen.kept.sum(), 1), seen

    def published(moving: Any, candidates: jax.Array) -> tuple[Any, _Seen]:
        def compute(rows: Any, present: jax.Array) -> tuple[Any, jax.Array]:
            gradient, seen = jax.grad(mean, has_aux=True)(moving, *rows, present)
            return (gradient, seen), seen.finite

        (_, first), (gradient, seen), finite = without_bad_rows(
            compute, (images, views), candidates
        )
        return gradient, seen._replace(logits=first.logits, finite=finite)

    def one(params: Any, example: Any) -> tuple[jax.Array, _Seen]:
        return weighted(*_views_of_one(program, params, *example[:2]), example[2])

    def clipped(moving: Any, candidates: jax.Array) -> tuple[Any, _Seen]:
        examples = (images, views, candidates)
        result = _clipped(program, constants, one)(merge(moving, constants.params), examples)
        seen = result.aux._replace(kept=result.aux.kept & jnp.isfinite(result.norms))
        count = jnp.maximum(seen.kept.sum(), 1)
        return jax.tree.map(lambda x: x / count, result.grads), seen

    followed = clipped if program.clipped else published
    if method.radius:
        gradient, first = published(state.params, mask)
        ahead = _add(state.params, _ascent(method.radius, gradient))
        gradient, seen = followed(ahead, first.kept)
    else:
        gradient, seen = followed(state.params, mask)
        first = seen
    new = _update(program, constants, state, gradient)
    if method.skips_empty:
        new = _where(seen.kept.any(), new, state)
    memory = method.remember(state.memory, seen.sample, seen.kept)
    new = _reset_where(method.lost(memory), program, constants, new._replace(memory=memory))
    usable = (mask & first.finite).any() | ~mask.any()
    return _where(usable & all_finite(gradient), new, state), first.logits


def _are_numbers(sample: Sample, weight: jax.Array) -> jax.Array:
    """Returns whether an image has a loss. A logit of -inf masks a class."""
    known = (sample.logits < jnp.inf).all()  # False for NaN
    return (
        known
        & jnp.isfinite(sample.uncertainty)
        & jnp.isfinite(sample.drop)
        & jnp.isfinite(weight).all()
    )


def _private_step(
    program: _Program,
    size: int,
    constants: _Constants,
    state: AdaptState,
    examples: Any,
    mask: jax.Array,
    key: jax.Array,
) -> tuple[AdaptState, jax.Array]:
    """Makes one step of the private form by the equations in `jaxdp.tta.private`."""
    method, images = program.method, examples[0]

    def loss(params: Any, example: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        logits, again = _views_of_one(program, params, *example)
        sample = method(logits, again)
        seen = jax.lax.stop_gradient(sample)
        weight = method.weight(seen)
        if program.filters == "keep":
            weight = jnp.where(method.reliable(seen), weight, 0)
        return weight * sample.uncertainty, logits

    clipped = _clipped(program, constants, loss)
    params = merge(state.params, constants.params)
    if method.radius:
        ahead = merge(_add(state.params, _ascent(method.radius, state.released)), constants.params)
        result = clipped(ahead, examples, mask)
        logits = _predict(program, params, images)
    else:
        result = clipped(params, examples, mask)
        logits = result.aux
    total = result.grads if program.accumulate == 1 else _add(state.pending, result.grads)

    def release(total: Any) -> AdaptState:
        noisy = (
            _add(total, gaussian(key, total, constants.noise_std, number=state.step))
            if program.noisy
            else total
        )
        divisor = size * program.accumulate * constants.divisor_scale
        gradient = jax.tree.map(lambda x: x / divisor, noisy)
        return _update(program, constants, state, gradient)._replace(
            released=gradient if method.radius else None,
            pending=None if state.pending is None else jax.tree.map(jnp.zeros_like, total),
        )

    if program.accumulate == 1:
        return release(total), logits
    due = (state.step + 1) % program.accumulate == 0
    return jax.lax.cond(due, release, lambda total: state._replace(pending=total), total), logits


def _predict(program: _Program, params: Any, images: jax.Array) -> jax.Array:
    """Returns logits [B, C]. A private method passes each image alone, so that no image affects
    another's logits.
    """
    if program.private:
        return jax.vmap(functools.partial(_predict_one, program, params))(images)
    return program.apply_fn(params, images)


def _predict_one(program: _Program, params: Any, image: jax.Array) -> jax.Array:
    return program.apply_fn(params, image[None])[0]


def _views_of_one(
    program: _Program, params: Any, image: jax.Array, view: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits [C] of an image, and without gradient those of its second view if there is
    one.
    """
    again = None if view is None else _predict_one(program, jax.lax.stop_gradient(params), view)
    return _predict_one(program, params, image), again


def _clipped(
    program: _Program, constants: _Constants, loss: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the clipped sum of the gradients of a loss of one image, which returns more than the
    loss.
    """
    rule: dict[str, Any] = {"clip_norm": constants.clip_norm, "clip_rule": program.clip_rule}
    return clipped_grad(
        loss, trainable=functools.partial(_in, program.adapted), has_aux=True, **rule
    )


def _in(paths: frozenset[str], path: str, leaf: Any) -> bool:
    return path in paths


def _update(
    program: _Program, constants: _Constants, state: AdaptState, gradient: Any
) -> AdaptState:
    displacement = jax.tree.map(
        lambda new, old: (new - old).astype(jnp.float32), state.params, constants.moving
    )
    pull = program.method.pull(displacement)
    gradient = _wide(gradient) if pull is None else _add(_wide(gradient), pull)
    updates, opt_state = program.update(gradient, state.opt_state, state.params)
    return state._replace(params=_add(state.params, updates), opt_state=opt_state)


def _ascent(radius: float, gradient: Any) -> Any:
    scale = radius / (optax.tree.norm(gradient) + 1e-12)
    return jax.tree.map(lambda g: scale * g, gradient)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), a, b)


def _wide(tree: Any) -> Any:
    """Converts to float32 or wider. With bf16 gradients, momentum would change its type in the
    first step.
    """
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _where(condition: jax.Array, new: AdaptState, old: AdaptState) -> AdaptState:
    return jax.tree.map(functools.partial(jnp.where, condition), new, old)


def _reset_where(
    condition: jax.Array, program: _Program, constants: _Constants, state: AdaptState
) -> AdaptState:
    return _where(condition, _fresh(program, constants, state.step, state.key), state)
