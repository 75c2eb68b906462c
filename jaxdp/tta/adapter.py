"""`Adapter`, which adapts a model to a stream of batches by any method, private or not.

It checks the model, chooses the parameters that adapt, and runs the compiled step of
`jaxdp.tta.step`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdp.data.storage import on_device
from jaxdp.files import check_choice
from jaxdp.release import new_seed, stream
from jaxdp.release import program as program_text
from jaxdp.transforms.meshes import Layout, ParamSharding, check_mesh, rounded_up
from jaxdp.transforms.noise.keys import is_traced
from jaxdp.tta.clipped import Clipped
from jaxdp.tta.method import Method
from jaxdp.tta.private import Private
from jaxdp.tta.select import (
    Adapted,
    AdaptedLeaf,
    adapted_leaves,
    goes_by_structure,
    leaves_by_name,
    lower_blocks,
    merge,
    traced,
    trainable_part,
)
from jaxdp.tta.step import (
    AdaptState,
    ApplyFn,
    Predict,
    StepConstants,
    StepProgram,
    compiled_step,
    fresh_state,
    widened,
)


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
    # All that a step reads besides its arguments.
    constants: StepConstants = dataclasses.field(init=False, repr=False)
    # All parameters as they lie on the devices, and how.
    _source: tuple[Any, Layout | None] = dataclasses.field(init=False, repr=False)
    _leaves: tuple[AdaptedLeaf, ...] = dataclasses.field(init=False, repr=False)
    _program: StepProgram = dataclasses.field(init=False, repr=False)
    # Where the structure decides what adapts: the form of states, and of those from before
    # `prepare`, when only names had been looked at.
    _form: Any = dataclasses.field(init=False, repr=False, default=None)
    _form_by_name: Any = dataclasses.field(init=False, repr=False, default=None)
    # Shape and dtype of the images for which apply_fn was checked.
    _checked: set[Any] = dataclasses.field(init=False, repr=False, default_factory=set)
    # The texts of lowered steps, by the kind of their arguments.
    _texts: dict[Any, str] = dataclasses.field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._check_fields()
        params = jax.tree.map(lambda x: on_device(x, jnp.result_type(x)), self.params)
        check_mesh(self.mesh, self.data_axes, self.param_sharding)
        layout = None
        if self.mesh is not None:
            layout = Layout.of(params, self.mesh, self.data_axes, self.param_sharding)
            params = jax.device_put(params, layout.shardings(params, params, params))
        self._set(_source=(params, layout))
        if goes_by_structure(self._rule):
            # The program of apply_fn decides when images are known. Until then names suggest.
            self._settle(leaves_by_name(params, self._rule))
            self._set(_form_by_name=self._form)
        else:
            self._settle(adapted_leaves(params, self._rule, None))
        if self.images is not None:
            self.prepare(self.images)

    def _check_fields(self) -> None:
        if not isinstance(self._method, Method):
            raise TypeError(
                "method must be a jaxdp.tta.Method, or private(...) or clipped(...) of one, got "
                f"{type(self._method).__name__}."
            )
        private = isinstance(self.method, Private)
        if self.accumulate < 1 or (self.accumulate > 1 and not private):
            raise ValueError(
                "accumulate must be at least 1, and 1 for a method that is not private, got "
                f"{self.accumulate}. Without noise, optax.MultiSteps(optimizer, "
                "A).gradient_transformation() averages the gradients of A batches."
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
        check_choice("predict", self.predict, Predict)

    def _set(self, **fields: Any) -> None:
        """Sets fields that `__init__` does not take. The dataclass is frozen for users."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def _method(self) -> Method:
        if isinstance(self.method, Private | Clipped):
            return self.method.method
        return self.method

    @property
    def _rule(self) -> Adapted | None:
        if self.adapted is None and self._method.lower_blocks_only:
            return lower_blocks(self.params)
        return self.adapted

    def _settle(self, leaves: tuple[AdaptedLeaf, ...]) -> None:
        """Fixes the parameters that adapt, the program of a step, and its constants."""
        params, layout = self._source
        paths = frozenset(leaf.path for leaf in leaves)
        moving = trainable_part(params, paths)
        program = StepProgram(
            apply_fn=self.apply_fn,
            method=self._method,
            update=self.optimizer.update,
            adapted=paths,
            accumulate=self.accumulate,
            reset_every=self.reset_every,
            predict=self.predict,
            private=isinstance(self.method, Private),
            clipped=self.method.unit if isinstance(self.method, Clipped) else None,
            layout=layout,
        )
        # The optimizer sees float32 or wider, as in every step.
        constants = StepConstants(params, moving, self.optimizer.init(widened(moving)))
        constants = constants._replace(opt_state=self._placed(constants.opt_state, constants))
        if isinstance(self.method, Clipped):
            constants = constants._replace(clip_norm=self.method.clip_norm)
        elif isinstance(self.method, Private):
            program = program._replace(
                noisy=self.method.noise_multiplier > 0,
                filters=self.method.filters,
                clip_rule=self.method.clip_rule,
                grid=self.method.grid,
                noise=self.method.noise,
            )
            constants = constants._replace(
                clip_norm=self.method.clip_norm,
                noise_std=self.method.noise_std,
                divisor_scale=self.method.kept_fraction,
            )
        self._set(_program=program, constants=constants, _leaves=leaves)
        if goes_by_structure(self._rule):
            nothing = jnp.zeros(())
            self._set(_form=_form(fresh_state(program, constants, nothing, nothing)))

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
        if kind in self._checked:
            return
        params, _ = self._source
        program, logits = traced(self.apply_fn, params, images)
        if not isinstance(logits, jax.ShapeDtypeStruct) or logits.ndim != 2 or len(logits) != 2:
            shapes = jax.tree.map(jnp.shape, logits)
            raise ValueError(
                f"apply_fn must return logits [B, num_classes], but returned {shapes} for a batch "
                "of 2."
            )
        # Raises the method's own errors about the number of classes.
        jax.eval_shape(self._method, jax.ShapeDtypeStruct(logits.shape[1:], logits.dtype))
        # Only the first images decide: later ones must not change which parameters adapt.
        if self._form_by_name is not None and not self._checked:
            leaves = adapted_leaves(params, self._rule, program)
            if {leaf.path for leaf in leaves} != self._program.adapted:
                self._settle(leaves)
            self._set(_leaves=leaves)
        if _mixes(self.apply_fn, self.params, *kind):
            raise ValueError(
                "apply_fn mixes the images of a batch: the logits of one image changed with its "
                "neighbour, as with BatchNorm in batch mode. Private steps need a loss of each "
                "single image. Use frozen statistics (jaxdp.models.FrozenBatchNorm), LayerNorm or "
                "GroupNorm."
            )
        self._checked.add(kind)

    @property
    def adapted_paths(self) -> tuple[str, ...]:
        """The paths of the parameters that adapt.

        Before the first batch or `prepare` names suggest them.
        """
        return tuple(sorted(leaf.path for leaf in self._leaves))

    def describe(self) -> str:
        """Returns text with the path and shape of each parameter that adapts, and why it does."""
        total = len(jax.tree.leaves(self.params))
        lines = [f"{type(self._method).__name__} adapts {len(self._leaves)} of {total} parameters"]
        lines += [f"  {path} {list(shape)}: {reason}" for path, shape, reason in self._leaves]
        return "\n".join(lines)

    def init(self, key: jax.Array | None = None) -> AdaptState:
        """Returns the state before the first batch.

        The typed `key` of noise and second views is for tests. The default has 128 bits of OS
        entropy. Two runs with one key share their noise, so the difference of their updates has
        none. Raises ValueError inside jit and vmap without it.
        """
        step = jnp.zeros((), jnp.int32)
        if key is None:
            if is_traced(self.params):
                raise ValueError(
                    "init draws its key from the operating system, but all runs of a program under "
                    "jit or vmap would share one key. Call init outside jit, or pass key."
                )
            key = stream(new_seed(), "test-time adaptation")
        return self._source_state(step, _typed(key))

    def reset(self, state: AdaptState) -> AdaptState:
        """Returns the state of the source model. Step and key stay.

        With correlated noise a new period begins, since no parameter holds the earlier noise.
        """
        return self._source_state(state.step, state.key)

    def release_name(self, state: AdaptState) -> int:
        """Returns the `release` that `StreamAccount.spend` needs for the next batch of a loop.

        It is the number of the first update of the noisy sum that the batch enters. With correlated
        noise the sum is a period, and every reset begins one.

        Args:
          state: The newest state. If the batch comes after `reset`, the state that it returned.
        """
        return int(state.step) // self.accumulate - next_row(self, state)

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
        batch = on_device(batch)
        if batch.ndim < 2 or not len(batch):
            raise ValueError(
                "batch must be images [B, ...] with B at least 1, the public divisor, got shape "
                f"{batch.shape}. For a batch without records pass padding and a mask of False."
            )
        if mask is None:
            mask = on_device(np.ones(len(batch), bool))
        elif jnp.result_type(mask) != jnp.bool_ or jnp.shape(mask) != batch.shape[:1]:
            raise ValueError(
                f"mask must be boolean of shape {batch.shape[:1]}, got {jnp.result_type(mask)} "
                f"{jnp.shape(mask)}."
            )
        if isinstance(self.method, Private) and jax.tree.leaves(state.memory):
            raise ValueError(
                "state comes from a method that is not private. It holds a memory of raw images, "
                "and its parameters were not paid for. Begin with init(), or with reset(state)."
            )
        if (state.rows is None) != (self._program.noise is None):
            raise ValueError(
                "state comes from an adapter with other noise: only one of the two has "
                "private(noise=...). Begin with init(), or with reset(state)."
            )
        self.prepare(batch)
        key = _typed(state.key if key is None else key)
        arguments = self._arguments(state, batch, on_device(mask), key)
        moving, logits = compiled_step(self._program, len(batch), self.constants, *arguments)
        return self._whole(moving), logits

    def lowered_text(self, state: AdaptState, batch: jax.typing.ArrayLike) -> str:
        """Returns the text of the program of `step` for a batch.

        Each kind of batch is lowered once.
        """
        function, arguments = self.programs(state, on_device(batch))["step"]
        _, size, _, *changing = arguments
        kind = size, *map(_kind_of, jax.tree.leaves(changing))
        if kind not in self._texts:
            self._texts[kind] = program_text(function, *arguments)
        return self._texts[kind]

    def programs(
        self, state: AdaptState, batch: jax.Array | jax.ShapeDtypeStruct
    ) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Returns the compiled function of a step by its name, "step", with arguments for its
        `lower`.

        `jaxdp.compilers.estimate` takes them too, for an accelerator that is not there. Nothing is
        computed.

        Args:
          state: A state from `init`, `step` or `reset`.
          batch: Images [B, ...]. Without a mesh a `jax.ShapeDtypeStruct` of them will do.

        Raises:
          ValueError: As `prepare`.
        """
        self.prepare(batch)
        present = on_device(np.ones(len(batch), bool))
        arguments = self._arguments(state, batch, present, state.key)
        return {"step": (compiled_step, (self._program, len(batch), self.constants, *arguments))}

    def parts(self, state: AdaptState) -> tuple[Any, ...]:
        """Returns the parts of a state that must be kept to resume: all but the key."""
        *parts, _ = self._moving(state)
        return tuple(parts)

    def whole(self, parts: tuple[Any, ...], key: jax.Array) -> AdaptState:
        """Returns the state of these parts."""
        state = AdaptState._make((*parts, _typed(key)))
        return self._whole(self._placed(state, self.constants))

    def _source_state(self, step: jax.Array, key: jax.Array) -> AdaptState:
        state = fresh_state(self._program, self.constants, step, key)
        return self._whole(self._placed(state, self.constants))

    def _completed(self, state: AdaptState) -> AdaptState:
        """Returns a state that fits the parameters that adapt.

        A state from before `prepare` fits those that names suggested. No step has changed it, since
        a step prepares first. So it has no momentum that would be lost.
        """
        fits = self._form_by_name is None or self._form_by_name == self._form
        if fits or self._form_by_name != _form(state):
            return state
        fresh = self._source_state(state.step, state.key)
        return fresh._replace(params=state.params, memory=state.memory)

    def _placed(self, tree: Any, constants: StepConstants) -> Any:
        """Returns a pytree whose arrays lie on the mesh, if there is one."""
        _, layout = self._source
        if layout is None:
            return tree
        return jax.device_put(tree, layout.shardings(tree, constants.params, constants.moving))

    def _arguments(
        self, state: AdaptState, batch: Any, mask: jax.Array, key: jax.Array
    ) -> tuple[Any, ...]:
        """Returns the arrays of a step.

        Copies of image 0, which do not count, pad a batch that devices share.
        """
        layout = self._program.layout
        if layout is not None:
            (size,) = rounded_up((len(batch),), layout.mesh, layout.data_axes)
            present = np.arange(size) < len(batch)
            rows = np.where(present, np.arange(size), 0)
            batch = jax.device_put(batch[rows], layout.rows)
            mask = jax.device_put(mask[rows] & present, layout.rows)
            key = jax.device_put(key, layout.everywhere)
        return self._moving(state), batch, mask, key

    def _moving(self, state: AdaptState) -> AdaptState:
        """Returns a state with None in place of the parameters that do not adapt."""
        state = self._completed(state)
        moving = jax.tree.map(
            lambda source, new: None if source is None else new,
            self.constants.moving,
            state.params,
            is_leaf=lambda x: x is None,
        )
        return state._replace(params=moving)

    def _whole(self, state: AdaptState) -> AdaptState:
        # A compiled step would copy arrays that it only passes on, so frozen ones stay outside.
        return state._replace(params=merge(state.params, self.constants.params))


def next_row(adapter: Any, state: Any) -> int:
    """Returns the row of correlated noise of the next update.

    0 begins a release. It is 0 for independent noise.
    """
    rows = getattr(state, "rows", None)
    if rows is None:
        return 0
    step = int(state.step)
    every = adapter.reset_every
    # The step itself resets before its update, so that the state still has the old row.
    is_reset = every is not None and step > 0 and step % every == 0
    return 0 if is_reset else int(rows.number)


def _form(state: AdaptState) -> Any:
    """Returns the structure of what depends on the parameters that adapt."""
    return jax.tree.structure((state.opt_state, state.released, state.pending, state.rows))


def _kind_of(array: Any) -> tuple[Any, ...]:
    """Returns the facts about an argument on which a program depends. A key has no weak_type."""
    facts = [getattr(array, fact, None) for fact in ("weak_type", "sharding", "committed")]
    return (array.shape, array.dtype, *facts)


def _typed(key: jax.Array) -> jax.Array:
    dtype = getattr(key, "dtype", type(key).__name__)
    if isinstance(dtype, str) or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"key must be a typed key such as jax.random.key(seed) makes, got {dtype}.")
    return key


def _mixes(apply_fn: ApplyFn, params: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    """Returns whether a row of logits depends on another image of the batch, on random images."""
    scale = 1 if jnp.issubdtype(dtype, jnp.floating) else 256  # integers are pixels
    # NumPy draws them. XLA would compute random bits of a constant key while it compiles.
    uniform = np.random.default_rng(0).random((5, *shape), np.float32)
    images = (scale * uniform).astype(dtype)
    # The statistics of two values say only which one is larger.
    beside_one = _first_row(apply_fn, params, images[[0, 1, 2]])
    beside_other = _first_row(apply_fn, params, images[[0, 3, 4]])
    return not jnp.allclose(beside_one, beside_other, rtol=1e-3, atol=1e-3, equal_nan=True)


@functools.partial(jax.jit, static_argnums=0)
def _first_row(apply_fn: ApplyFn, params: Any, images: Any) -> jax.Array:
    return apply_fn(params, images)[0]
