"""DPAdapter (Wang et al. 2024, Algorithm 1), and what it generalises: SAM (Foret et al. 2021, arXiv:2010.01412) and AMP
(Zheng et al. 2021, arXiv:2010.04925).

All three train theta so that the loss stays low in a ball around it: min over theta, max over ||Delta|| <= gamma of
L(theta + Delta) (Eq. 2). One step, with the lines of Algorithm 1:

    2-3.  draw a large batch B1 and a small batch B2, independently
    4-5.  Delta <- eta1 * grad L_B1(theta)                            (Eq. 6: one step of ascent)
    6-8.  Delta <- gamma Delta / ||Delta||  if  ||Delta|| > gamma     (the ball of Eq. 1 around 0, as in Eq. 2)
    9-10. g <- grad L_B2(theta + Delta)                               (Eq. 4)
    11-12. theta <- optimizer(theta, g)                               (Eq. 5; Delta is removed, decay acts on theta)

With one batch for both this is AMP; if moreover Delta is always put on the sphere it is SAM.

Everything here trains on PUBLIC data and no ledger is asked: a model trained on private data in this way is an
uncharged release.

Where the paper leaves a choice: line 5 as printed, a multiple of the maximiser in the ball, would leave lines 6 to 8
without effect, and its ball is centred at theta; Eq. 6, Eq. 2 and Eq. 4 decide. Norms are over all parameters (Eq. 1);
AMP's public code projects every tensor by itself, which is `ball="per_tensor"`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Ball = Literal["global", "per_tensor"]
Rule = Literal["project", "normalise"]


class SharpnessState(NamedTuple):
    """Everything a step changes.

    Attributes:
      step: int32 scalar, steps done.
      params: theta, without any perturbation: the model to use.
      opt_state: of the optimizer.
      perturbation: Delta of the last ascent, like params but float32 or wider; zero before the first.
      stats: running statistics of the model (BatchNorm), or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    perturbation: Any
    stats: Any


@dataclasses.dataclass(frozen=True, eq=False)
class SharpnessTrainer:
    """Sharpness-aware training as pure steps; made by `dpadapter`, `sam` and `amp`, which document it."""

    batch_loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    gamma: float
    ascent_rate: float
    ascent_steps: int
    ball: Ball
    rule: Rule
    microbatch_size: int | None
    stateful: bool
    zeros: Any = dataclasses.field(init=False, repr=False)  # compiled functions of these names
    gradient: Any = dataclasses.field(init=False, repr=False)
    ascend: Any = dataclasses.field(init=False, repr=False)
    descend: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ValueError(f"gamma must be at least 0, got {self.gamma}; 0 is training without perturbation.")
        if self.rule == "normalise" and math.isinf(self.gamma):
            raise ValueError(f"gamma must be finite with rule='normalise', got {self.gamma}; use rule='project'.")
        if not 0 < self.ascent_rate < math.inf:
            raise ValueError(
                f"ascent_rate must be positive and finite, got {self.ascent_rate}; gamma=0 turns the perturbation off."
            )
        if self.ascent_steps < 1:
            raise ValueError(f"ascent_steps must be at least 1, got {self.ascent_steps}; gamma=0 is training without.")
        if self.ball not in ("global", "per_tensor"):
            raise ValueError(f"ball must be 'global' or 'per_tensor', got {self.ball!r}.")
        if self.rule not in ("project", "normalise"):
            raise ValueError(f"rule must be 'project' or 'normalise', got {self.rule!r}.")
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"microbatch_size must be at least 1 or None, got {self.microbatch_size}.")
        object.__setattr__(self, "zeros", jax.jit(_zeros))
        object.__setattr__(self, "gradient", jax.jit(self._gradient, static_argnames="parts"))
        object.__setattr__(self, "ascend", jax.jit(self._ascend))
        object.__setattr__(self, "descend", jax.jit(self._descend))

    def init(self, params: Any, stats: Any = None) -> SharpnessState:
        """The state before the first step.

        Args:
          params: pytree of floating-point arrays.
          stats: pytree of arrays, given exactly if the trainer is stateful.

        Raises:
          ValueError: stats are missing or superfluous.
        """
        if (stats is not None) != self.stateful:
            raise ValueError(f"stats must be {'given' if self.stateful else 'None'}: stateful={self.stateful}.")
        # No weak types: they would compile the step twice.
        params, stats = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), (params, stats))
        wide = _wide(params)
        return SharpnessState(jnp.zeros((), jnp.int32), params, self.optimizer.init(wide), self.zeros(wide), stats)

    def step(
        self, state: SharpnessState, perturbation_batch: Any, update_batch: Any
    ) -> tuple[SharpnessState, dict[str, jax.Array]]:
        """One step of Algorithm 1.

        Args:
          state: of `init` or of the step before.
          perturbation_batch: B1, pytree of arrays [m1, ...]. The same batch as B2 in SAM and AMP. None makes no ascent
            and keeps the perturbation of the last one, zero before the first: plain training to warm up, and ascent
            every few steps later.
          update_batch: B2, pytree of arrays [m2, ...].

        Returns:
          The next state, and metrics (float32 scalars): "loss", the mean loss on B2 at theta + Delta;
          "perturbation_norm", ||Delta|| over all parameters; after an ascent "ascent_gradient_norm", that of the
          last gradient on B1.

        Raises:
          ValueError: a batch is empty or its arrays differ in length, or microbatch_size does not divide it.
        """
        perturbation, stats, metrics = state.perturbation, state.stats, {}
        if perturbation_batch is not None and self.gamma > 0:
            perturbation = self.zeros(perturbation)  # line 4
            for _ in range(self.ascent_steps):
                _, gradient, stats = self._mean(
                    "perturbation_batch", state.params, perturbation, stats, perturbation_batch
                )
                perturbation, metrics["ascent_gradient_norm"] = self.ascend(perturbation, gradient)  # lines 5-8
        loss, gradient, stats = self._mean("update_batch", state.params, perturbation, stats, update_batch)  # 9-10
        state, norm = self.descend(state._replace(perturbation=perturbation, stats=stats), gradient)  # lines 11-12
        return state, {"loss": loss, "perturbation_norm": norm, **metrics}

    def microbatches(self, name: str, size: int) -> int:
        """Into how many microbatches a batch of this size is cut; the name is for the error.

        Raises:
          ValueError: microbatch_size does not divide a larger size.
        """
        micro = min(size, self.microbatch_size or size)
        if size % micro:
            raise ValueError(f"microbatch_size must divide the {size} examples of {name}, got {micro}.")
        return size // micro

    def _mean(self, name: str, params: Any, perturbation: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any, Any]:
        """Mean loss, gradient and statistics over a batch, a microbatch at a time."""
        lengths = {len(x) for x in jax.tree.leaves(batch)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"{name} must be arrays [m, ...] of one length m >= 1, got lengths {sorted(lengths)}.")
        parts = self.microbatches(name, *lengths)
        batch = jax.device_put(batch)  # once, not with every microbatch
        # A loop in Python: XLA runs convolutions inside a compiled loop several times slower on CPUs.
        total = self.gradient(params, perturbation, stats, batch, jax.device_put(np.int32(0)), parts=parts)
        for part in range(1, parts):
            number = jax.device_put(np.int32(part))
            total = _add(total, self.gradient(params, perturbation, stats, batch, number, parts=parts))
        return total if parts == 1 else _divide(total, parts)

    def _gradient(
        self, params: Any, perturbation: Any, stats: Any, batch: Any, part: jax.Array, *, parts: int
    ) -> tuple[jax.Array, Any, Any]:
        """Mean loss and gradient at theta + Delta over one part of a batch, and what becomes of the statistics."""
        # Every parts-th example: each device cuts its own share of a batch that lies over several.
        batch = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:])[:, part], batch)
        point = jax.tree.map(lambda p, d: (p + d).astype(p.dtype), params, perturbation)
        if self.stateful:
            (loss, seen), gradient = jax.value_and_grad(self.batch_loss_fn, has_aux=True)(point, stats, batch)
            clean = optax.tree.norm(perturbation) == 0
            stats = jax.tree.map(functools.partial(jnp.where, clean), seen, stats)
        else:
            loss, gradient = jax.value_and_grad(self.batch_loss_fn)(point, batch)
        return loss, _wide(gradient), stats

    def _ascend(self, perturbation: Any, gradient: Any) -> tuple[Any, jax.Array]:
        """Lines 5 to 8: a step along the gradient, back to the ball; and the gradient's norm."""
        moved = jax.tree.map(lambda d, g: d + self.ascent_rate * g, perturbation, gradient)  # Eq. 6
        if self.ball == "global":
            scale = self._scale(optax.tree.norm(moved))
            moved = jax.tree.map(lambda d: scale * d, moved)
        else:
            moved = jax.tree.map(lambda d: self._scale(optax.tree.norm(d)) * d, moved)
        return moved, optax.tree.norm(gradient)

    def _scale(self, norm: jax.Array) -> jax.Array:
        """What takes a vector of this norm to the ball (project) or the sphere (normalise); zero stays zero."""
        if self.rule == "project":
            return jnp.where(norm > self.gamma, self.gamma / norm, 1)
        return jnp.where(norm > 0, self.gamma / norm, 0)

    def _descend(self, state: SharpnessState, gradient: Any) -> tuple[SharpnessState, jax.Array]:
        """Lines 11 and 12: the optimizer sees the gradient at theta + Delta, and theta."""
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, _wide(state.params))
        params = optax.apply_updates(state.params, updates)
        state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, optax.tree.norm(state.perturbation)


@jax.jit
def _add(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


@functools.partial(jax.jit, static_argnums=1)
def _divide(total: Any, parts: int) -> Any:
    return jax.tree.map(lambda x: (x / parts).astype(x.dtype), total)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


def _wide(tree: Any) -> Any:
    """As wide as norms are: float32 at least."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(jnp.float32, x.dtype)), tree)


def dpadapter(
    batch_loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    gamma: float = 2.0,
    ascent_rate: float = 1.0,
    ascent_steps: int = 1,
    ball: Ball = "global",
    rule: Rule = "project",
    microbatch_size: int | None = None,
    stateful: bool = False,
) -> SharpnessTrainer:
    """DPAdapter: the perturbation from a large batch, the update from a small one.

        trainer = jaxdp.pretrain.dpadapter(batch_loss_fn, optax.sgd(0.1, momentum=0.9), gamma=2.0)
        state = trainer.init(params)
        state, metrics = trainer.step(state, perturbation_batch, update_batch)
        state.params

    `jaxdp.pretrain.fit` is this loop with batches, warm-up and checkpoints. A step costs the gradients of m1 + m2
    examples, (m1 + m2) / m2 of plain training: 101 times with the paper's m1 = 5000 and m2 = 50. A batch may lie over
    several devices along its first axis (a `jax.sharding.Mesh`), with the state copied to each; results agree up to
    rounding.

    Args:
      batch_loss_fn: `batch_loss_fn(params, batch) -> scalar`, the MEAN loss over the batch. With `stateful`,
        `batch_loss_fn(params, stats, batch) -> (scalar, stats)`.
      optimizer: any optax optimizer. It sees the gradient at theta + Delta and the parameters theta, so that
        `optax.add_decayed_weights` in it decays theta. A penalty in batch_loss_fn would also tilt the perturbation.
      gamma: radius of the ball; 0 is training without perturbation, infinity Eq. 6 without projection.
      ascent_rate: eta1.
      ascent_steps: steps of ascent, each followed by the projection.
      ball: "global", one norm over all parameters; "per_tensor", every array within gamma by itself, so that T of them
        reach a norm of gamma sqrt(T).
      rule: "project" scales Delta to the ball if it is outside; "normalise" always scales it to the sphere, whatever
        ascent_rate. A zero gradient gives Delta = 0 under both.
      microbatch_size: examples per compiled call; must divide every larger batch. None takes a batch at once.
      stateful: the model has running statistics. They are updated by passes at theta itself, never by those at
        theta + Delta: from B1 where there is an ascent, from B2 in plain training; from the mean over microbatches.
        Prefer GroupNorm where private training follows, which cannot use BatchNorm.

    Raises:
      ValueError: an argument is out of range.
    """
    return SharpnessTrainer(
        batch_loss_fn, optimizer, gamma, ascent_rate, ascent_steps, ball, rule, microbatch_size, stateful
    )


def sam(
    batch_loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    gamma: float = 0.05,
    ball: Ball = "global",
    microbatch_size: int | None = None,
    stateful: bool = False,
) -> SharpnessTrainer:
    """SAM (Foret et al. 2021): Delta = gamma g / ||g||; pass one batch as both, `trainer.step(state, batch, batch)`.

    Args:
      gamma: their rho.
      batch_loss_fn, optimizer, ball, microbatch_size, stateful: as in `dpadapter`.
    """
    return dpadapter(
        batch_loss_fn,
        optimizer,
        gamma=gamma,
        ball=ball,
        rule="normalise",
        microbatch_size=microbatch_size,
        stateful=stateful,
    )


def amp(
    batch_loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    gamma: float = 0.5,
    ascent_rate: float = 1.0,
    ascent_steps: int = 1,
    ball: Ball = "global",
    microbatch_size: int | None = None,
    stateful: bool = False,
) -> SharpnessTrainer:
    """AMP (Zheng et al. 2021), DPAdapter's "vanilla SAM": pass one batch as both, `trainer.step(state, batch, batch)`.

    Inside the ball Delta is the raw gradient times ascent_rate. AMP's public code has ball="per_tensor", Nesterov
    momentum, and clips the gradient of the update to norm 50 (`optax.clip_by_global_norm`); DPAdapter compares with
    gamma = 1.

    Args:
      gamma, ascent_rate, ascent_steps: their epsilon, zeta and N.
      batch_loss_fn, optimizer, ball, microbatch_size, stateful: as in `dpadapter`.
    """
    return dpadapter(
        batch_loss_fn,
        optimizer,
        gamma=gamma,
        ascent_rate=ascent_rate,
        ascent_steps=ascent_steps,
        ball=ball,
        microbatch_size=microbatch_size,
        stateful=stateful,
    )


# SAM and AMP ascend on the batch of the update; standard training has no ball to ascend in.
METHODS: Mapping[str, Callable[..., SharpnessTrainer]] = {
    "standard": functools.partial(dpadapter, gamma=0.0),
    "sam": sam,
    "amp": amp,
    "dpadapter": dpadapter,
}
