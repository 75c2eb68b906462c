"""DPAdapter (Wang et al. 2024, Algorithm 1) and its special cases SAM and AMP.

SAM is by Foret et al. 2021 (arXiv:2010.01412), AMP by Zheng et al. 2021 (arXiv:2010.04925). All
three train theta so that the loss stays low in a ball around it: min over theta, max over ||Delta||
<= gamma of L(theta + Delta) (Eq. 2). One step, with the lines of Algorithm 1:

    2-3.  draw a large batch B1 and a small batch B2, independently
    4-5.  Delta <- eta1 * grad L_B1(theta)                            (Eq. 6: one step of ascent)
    6-8.  Delta <- gamma Delta / ||Delta||  if  ||Delta|| > gamma     (Eq. 1, around 0 as in Eq. 2)
    9-10. g <- grad L_B2(theta + Delta)                               (Eq. 4)
    11-12. theta <- optimizer(theta, g)                               (Eq. 5)

In lines 11 and 12 Delta is removed, and weight decay acts on theta. AMP uses one batch as B1 and
B2. SAM does so too and always puts Delta on the sphere.

Everything here trains on PUBLIC data and charges no ledger. On private data the model is an
uncharged release.

Line 5 as printed is a multiple of the maximiser in the ball, which leaves lines 6 to 8 without
effect, and its ball is centred at theta. The code follows Eq. 6, Eq. 2 and Eq. 4 instead. Norms are
over all parameters (Eq. 1). AMP's public code projects every tensor separately, which is
`ball="per_tensor"`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.data.storage import on_device
from jaxdp.files import check_choice, check_count, shows_keywords
from jaxdp.transforms.exact_scaling import times_power, tree_in_units
from jaxdp.transforms.meshes import Layout, ParamSharding, automatic, check_mesh, data_devices

Ball = Literal["global", "per_tensor"]
Rule = Literal["project", "normalise"]


class SharpnessState(NamedTuple):
    """The state that a step changes.

    Attributes:
      step: int32 scalar, the number of finished steps.
      params: theta without any perturbation, the model to use.
      opt_state: The state of the optimizer.
      perturbation: Delta of the last ascent, like params but float32 or wider. It is zero before
          the first ascent.
      stats: The running statistics of the model (BatchNorm), or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    perturbation: Any
    stats: Any


class _Point(NamedTuple):
    """Where a gradient is taken, theta + Delta, with the running statistics there."""

    params: Any
    perturbation: Any
    stats: Any


class TrainerOptions(TypedDict, total=False):
    """The keyword arguments of all methods. `dpadapter` documents them."""

    microbatch_size: int | None
    stateful: bool
    mesh: jax.sharding.Mesh | None
    data_axes: Sequence[str]
    param_sharding: ParamSharding | None


@dataclasses.dataclass(frozen=True, eq=False)
class SharpnessTrainer:
    """Sharpness-aware training as pure steps.

    `dpadapter`, `sam` and `amp` make it and document its fields. `zeros`, `gradient`, `ascend` and
    `descend` are compiled.
    """

    batch_loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    gamma: float
    ascent_rate: float
    ascent_steps: int
    ball: Ball
    rule: Rule
    microbatch_size: int | None = None
    stateful: bool = False
    mesh: jax.sharding.Mesh | None = None
    data_axes: Sequence[str] = ("data",)
    param_sharding: ParamSharding | None = None
    zeros: Any = dataclasses.field(init=False, repr=False)
    gradient: Any = dataclasses.field(init=False, repr=False)
    ascend: Any = dataclasses.field(init=False, repr=False)
    descend: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ValueError(
                f"gamma must be at least 0, got {self.gamma}. 0 trains without perturbation."
            )
        if self.rule == "normalise" and math.isinf(self.gamma):
            raise ValueError(
                f"gamma must be finite with rule='normalise', got {self.gamma}. Use rule='project'."
            )
        if not 0 < self.ascent_rate < math.inf:
            raise ValueError(
                f"ascent_rate must be positive and finite, got {self.ascent_rate}. gamma=0 turns "
                "the perturbation off."
            )
        if self.ascent_steps < 1:
            raise ValueError(
                f"ascent_steps must be at least 1, got {self.ascent_steps}. gamma=0 turns ascent "
                "off."
            )
        check_choice("ball", self.ball, Ball)
        check_choice("rule", self.rule, Rule)
        if self.microbatch_size is not None:
            check_count("microbatch_size", self.microbatch_size, 1)
        check_mesh(self.mesh, self.data_axes, self.param_sharding)
        if self.mesh is not None:  # Batches must lie on the mesh of the layout.
            object.__setattr__(self, "mesh", automatic(self.mesh))
        object.__setattr__(self, "zeros", jax.jit(_zeros))
        object.__setattr__(self, "gradient", jax.jit(self._gradient, static_argnames="parts"))
        # Trainers with equal balls and shapes share its program.
        ball = _Ball(float(self.gamma), float(self.ascent_rate), self.ball, self.rule)
        object.__setattr__(self, "ascend", functools.partial(_ascend, ball))
        object.__setattr__(self, "descend", jax.jit(self._descend))

    def init(self, params: Any, stats: Any = None) -> SharpnessState:
        """Returns the state before the first step.

        Args:
          params: The pytree of floating-point arrays to start from.
          stats: A pytree of arrays if the trainer is stateful, otherwise None.

        Raises:
          ValueError: stats are missing or superfluous, or params do not suit the mesh.
        """
        if (stats is not None) != self.stateful:
            raise ValueError(
                f"stats must be {'given' if self.stateful else 'None'} with "
                f"stateful={self.stateful}."
            )
        # Weak types compile the step twice.
        params, stats = jax.tree.map(lambda x: on_device(x, jnp.result_type(x)), (params, stats))
        layout = None
        if self.mesh is not None:
            layout = Layout.of(params, self.mesh, self.data_axes, self.param_sharding)
            params = jax.device_put(params, layout.shardings(params, params, params))
        wide = _wide(params)
        opt_state = self.optimizer.init(wide)
        state = SharpnessState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            perturbation=self.zeros(wide),
            stats=stats,
        )
        if layout is None:
            return state
        return jax.device_put(state, layout.shardings(state, params, params))

    def step(
        self, state: SharpnessState, perturbation_batch: Any, update_batch: Any
    ) -> tuple[SharpnessState, dict[str, jax.Array]]:
        """Takes one step of Algorithm 1.

        Args:
          state: The state from `init` or from the last step.
          perturbation_batch: B1, a pytree of arrays [m1, ...]. SAM and AMP pass B2. None makes no
            ascent and keeps the last perturbation, which is zero before the first ascent. Use None
            for a plain warm-up.
          update_batch: B2, a pytree of arrays [m2, ...].

        Returns:
          The next state and metrics, float32 scalars. "loss" is the mean loss on B2 at theta +
          Delta. "perturbation_norm" is ||Delta|| over all parameters. After an ascent
          "ascent_gradient_norm" is the norm of the last gradient on B1.

        Raises:
          ValueError: A batch is empty, its arrays differ in length, or microbatch_size does not
            divide it. The devices that share a perturbation batch do not divide it.
        """
        perturbation = state.perturbation
        stats = state.stats
        metrics: dict[str, jax.Array] = {}
        if perturbation_batch is not None and self.gamma > 0:
            perturbation = self.zeros(perturbation)  # line 4
            for _ in range(self.ascent_steps):
                point = _Point(state.params, perturbation, stats)
                _, gradient, stats = self._mean("perturbation_batch", point, perturbation_batch)
                perturbation, norm = self.ascend(perturbation, gradient)  # lines 5-8
                metrics["ascent_gradient_norm"] = norm
        point = _Point(state.params, perturbation, stats)
        loss, gradient, stats = self._mean("update_batch", point, update_batch)  # lines 9-10
        state = state._replace(perturbation=perturbation, stats=stats)
        state, norm = self.descend(state, gradient, self.layout(state))  # lines 11-12
        return state, {"loss": loss, "perturbation_norm": norm, **metrics}

    def microbatches(self, name: str, size: int) -> int:
        """Returns the number of microbatches in a batch of this size, which an error calls `name`.

        Raises:
          ValueError: microbatch_size does not divide a larger size.
        """
        micro = min(size, self.microbatch_size or size)
        if size % micro:
            raise ValueError(
                f"microbatch_size must divide the {size} examples of {name}, got {micro}."
            )
        return size // micro

    def check_devices(self, name: str, size: int) -> None:
        """Raises ValueError if the devices of the mesh cannot share a batch of this size.

        The error calls the batch `name`.
        """
        count = data_devices(self.mesh, self.data_axes)
        if size % count:
            raise ValueError(
                f"{name} must have a multiple of {count} examples, one part for each device, got "
                f"{size}."
            )

    def placed(self, batch: Any) -> Any:
        """Returns a batch on the devices.

        The devices share the batch where their number divides it. Otherwise each has a copy.
        """
        size = len(jax.tree.leaves(batch)[0])
        if self.mesh is None or size % data_devices(self.mesh, self.data_axes):
            return self.everywhere(batch)
        shared = NamedSharding(self.mesh, PartitionSpec(tuple(self.data_axes)))
        return jax.device_put(batch, shared)

    def everywhere(self, tree: Any) -> Any:
        """Returns arrays with a copy on every device of the mesh, or on the default device."""
        replicated = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.device_put(tree, replicated)

    def layout(self, state: SharpnessState | _Point) -> Layout | None:
        """Returns where the arrays of a state lie on the mesh, None without a mesh."""
        if self.mesh is None:
            return None
        return Layout.of(state.params, self.mesh, self.data_axes, None)

    def _mean(self, name: str, point: _Point, batch: Any) -> tuple[jax.Array, Any, Any]:
        """Returns mean loss, gradient and statistics over a batch, one microbatch at a time."""
        lengths = {len(x) for x in jax.tree.leaves(batch)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"{name} must be arrays [m, ...] of one length m >= 1, got lengths "
                f"{sorted(lengths)}."
            )
        count = self.microbatches(name, *lengths)
        if name == "perturbation_batch":
            self.check_devices(name, *lengths)
        layout = self.layout(point)
        # Once, not with every microbatch. A caller may fill the arrays with the next batch.
        batch = self.placed(jax.tree.map(on_device, batch))

        def microbatch(number: int) -> tuple[jax.Array, Any, Any]:
            placed = self.everywhere(np.int32(number))
            return self.gradient(*point, batch, placed, layout, parts=count)

        # A loop in Python: XLA runs convolutions inside a compiled loop several times slower on
        # CPUs.
        total = microbatch(0)
        for number in range(1, count):
            total = _add(total, microbatch(number))
        return total if count == 1 else _divide(total, count)

    def _gradient(
        self,
        params: Any,
        perturbation: Any,
        stats: Any,
        batch: Any,
        number: jax.Array,
        layout: Layout | None = None,
        *,
        parts: int,
    ) -> tuple[jax.Array, Any, Any]:
        """Returns mean loss, gradient at theta + Delta and statistics of one microbatch.

        The batch has `parts` microbatches.
        """
        # A microbatch takes every parts-th example, so that each device cuts only its own share of
        # a batch that the devices share.

        def cut(x: jax.Array) -> jax.Array:
            return x.reshape(-1, parts, *x.shape[1:])[:, number]

        batch = jax.tree.map(cut, batch)
        if layout is not None:  # Each device computes with whole parameters.
            whole = layout.whole()
            params, perturbation = whole.constrained((params, perturbation), params, params)
        point = jax.tree.map(lambda p, d: (p + d).astype(p.dtype), params, perturbation)
        if self.stateful:
            value_and_grad = jax.value_and_grad(self.batch_loss_fn, has_aux=True)
            (loss, new_stats), gradient = value_and_grad(point, stats, batch)
            chex.assert_trees_all_equal_shapes(
                new_stats, stats, custom_message="batch_loss_fn must keep the shapes of stats."
            )
            # Statistics of a perturbed model are not those of the model that is used.
            clean = optax.tree.norm(perturbation) == 0
            stats = jax.tree.map(functools.partial(jnp.where, clean), new_stats, stats)
        else:
            loss, gradient = jax.value_and_grad(self.batch_loss_fn)(point, batch)
        if layout is not None:
            gradient = layout.whole().constrained(gradient, params, params)
            gradient = layout.constrained(gradient, params, params)
        return loss, _wide(gradient), stats

    def _descend(
        self, state: SharpnessState, gradient: Any, layout: Layout | None = None
    ) -> tuple[SharpnessState, jax.Array]:
        """Runs lines 11 and 12. The optimizer sees theta and the gradient at theta + Delta."""
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, _wide(state.params))
        params = optax.apply_updates(state.params, updates)
        chex.assert_trees_all_equal_shapes(
            params, state.params, custom_message="optimizer must keep the shapes of params."
        )
        state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
        if layout is not None:
            state = layout.constrained(state, params, params)
        return state, optax.tree.norm(state.perturbation)


@dataclasses.dataclass(frozen=True)
class _Ball:
    """The ball or sphere in which an ascent ends. `dpadapter` documents the fields."""

    gamma: float
    ascent_rate: float
    ball: Ball
    rule: Rule

    def scaled(self, moved: Any) -> Any:
        """Scales a tree to the ball (project) or the sphere (normalise). Zero stays zero."""
        # In these units squares neither overflow nor vanish.
        units, power = tree_in_units(moved)
        norm = optax.tree.norm(units)
        scale = jnp.where(norm > 0, self.gamma / norm, 0)
        if self.rule == "normalise":
            return jax.tree.map(lambda u: scale * u, units)
        long = times_power(norm, power) > self.gamma
        return jax.tree.map(lambda d, u: jnp.where(long, scale * u, d), moved, units)


@functools.partial(jax.jit, static_argnums=0)
def _ascend(ball: _Ball, perturbation: Any, gradient: Any) -> tuple[Any, jax.Array]:
    """Returns Delta after lines 5 to 8 and the norm of the gradient."""
    moved = jax.tree.map(lambda d, g: d + ball.ascent_rate * g, perturbation, gradient)  # Eq. 6
    norm = optax.tree.norm(gradient)
    if ball.ball == "global":
        return ball.scaled(moved), norm
    return jax.tree.map(ball.scaled, moved), norm


@jax.jit
def _add(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


@functools.partial(jax.jit, static_argnums=1)
def _divide(total: Any, count: int) -> Any:
    return jax.tree.map(lambda x: (x / count).astype(x.dtype), total)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


def _wide(tree: Any) -> Any:
    """Returns the tree in float32 or wider, as wide as its norms."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(jnp.float32, x.dtype)), tree)


_DEFAULTS = {name: getattr(SharpnessTrainer, name) for name in TrainerOptions.__annotations__}


@shows_keywords(TrainerOptions, _DEFAULTS)
def dpadapter(
    batch_loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    gamma: float = 2.0,
    ascent_rate: float = 1.0,
    ascent_steps: int = 1,
    ball: Ball = "global",
    rule: Rule = "project",
    **options: Unpack[TrainerOptions],
) -> SharpnessTrainer:
    """Returns a trainer for DPAdapter, which perturbs by a large batch and updates by a small one.

        trainer = jaxdp.pretrain.dpadapter(batch_loss_fn, optax.sgd(0.1, momentum=0.9), gamma=2.0)
        state = trainer.init(params)
        state, metrics = trainer.step(state, perturbation_batch, update_batch)
        state.params

    `jaxdp.pretrain.fit` is this loop with batches, warm-up and checkpoints. A step computes the
    gradients of m1 + m2 examples, (m1 + m2) / m2 times plain training: 101 times with the paper's
    m1 = 5000 and m2 = 50.

    Args:
      batch_loss_fn: `batch_loss_fn(params, batch) -> scalar`, the MEAN loss over the batch. With
        `stateful`, `batch_loss_fn(params, stats, batch) -> (scalar, stats)`.
      optimizer: Any optax optimizer. It sees the gradient at theta + Delta and the parameters
        theta, so that `optax.add_decayed_weights` decays theta. A penalty in batch_loss_fn also
        changes the perturbation.
      gamma: The radius of the ball. 0 trains without perturbation. Infinity is Eq. 6 without
          projection.
      ascent_rate: eta1.
      ascent_steps: The number of ascent steps. A projection follows each step.
      ball: "global" bounds one norm over all parameters. "per_tensor" bounds the norm of every
        array by gamma, so that T arrays reach a norm of gamma sqrt(T).
      rule: "project" scales Delta to the ball if it is outside. "normalise" always scales it to the
        sphere, for every ascent_rate. A zero gradient gives Delta = 0 under both.
      microbatch_size: The number of examples per compiled call. It must divide every larger batch.
          None is no division.
      stateful: Whether the model has running statistics. Only passes at theta update them, never
        passes at theta + Delta: passes on B1 if there is an ascent, on B2 in plain training. They
        get the mean over microbatches. Prefer GroupNorm before private training, which cannot use
        BatchNorm.
      mesh: The devices. They share B1, and they share B2 if their number divides m2. Otherwise each
        computes all of B2. Results are those of one device up to rounding. None is one device, or
        where the arrays are.
      data_axes: The axes of the mesh along which batches are divided.
      param_sharding: `param_sharding(path, leaf) -> PartitionSpec`, how each parameter lies on the
        mesh, with what the optimizer and the perturbation keep for it. None keeps the shardings
        that the parameters have.

    Raises:
      TypeError, ValueError: An argument is out of range or does not describe a mesh.
    """
    return SharpnessTrainer(
        batch_loss_fn, optimizer, gamma, ascent_rate, ascent_steps, ball, rule, **options
    )


@shows_keywords(TrainerOptions, _DEFAULTS)
def sam(
    batch_loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    gamma: float = 0.05,
    ball: Ball = "global",
    **options: Unpack[TrainerOptions],
) -> SharpnessTrainer:
    """Returns a trainer for SAM (Foret et al. 2021), in which Delta = gamma g / ||g||.

    Pass one batch as both, `trainer.step(state, batch, batch)`.

    Args:
      gamma: The paper's rho.
      batch_loss_fn, optimizer, ball, options: As in `dpadapter`.
    """
    return dpadapter(
        batch_loss_fn,
        optimizer,
        gamma=gamma,
        ball=ball,
        rule="normalise",
        **options,
    )


@shows_keywords(TrainerOptions, _DEFAULTS)
def amp(
    batch_loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    gamma: float = 0.5,
    ascent_rate: float = 1.0,
    ascent_steps: int = 1,
    ball: Ball = "global",
    **options: Unpack[TrainerOptions],
) -> SharpnessTrainer:
    """Returns a trainer for AMP (Zheng et al. 2021), the "vanilla SAM" of DPAdapter.

    Pass one batch as both, `trainer.step(state, batch, batch)`. Inside the ball Delta is the raw
    gradient times ascent_rate. AMP's public code has ball="per_tensor" and Nesterov momentum. It
    clips the gradient of the update to norm 50 (`optax.clip_by_global_norm`). DPAdapter compares
    with gamma = 1.

    Args:
      gamma, ascent_rate, ascent_steps: The paper's epsilon, zeta and N.
      batch_loss_fn, optimizer, ball, options: As in `dpadapter`.
    """
    return dpadapter(
        batch_loss_fn,
        optimizer,
        gamma=gamma,
        ascent_rate=ascent_rate,
        ascent_steps=ascent_steps,
        ball=ball,
        **options,
    )


# SAM and AMP ascend on the batch of the update. Standard training does not ascend.
METHODS: Mapping[str, Callable[..., SharpnessTrainer]] = {
    "standard": functools.partial(dpadapter, gamma=0.0),
    "sam": sam,
    "amp": amp,
    "dpadapter": dpadapter,
}
