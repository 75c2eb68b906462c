"""DP-SGD (Abadi et al. 2016, Algorithm 1) with Poisson sampling and the image recipe of De et al. 2022.

One step, in the order of the algorithm:

    1. L_t: every example joins with probability q, independently              `PoissonSampler`
    2. g_i = grad of the loss of example i (mean over K augmented views)       `clipped_grad`, `group`
    3. g_i <- g_i * min(1, C / ||g_i||_2), summed over L_t                     `clipped_grad`
    4. g~ = (sum_i g_i + sigma C N(0, I)) / (q n)                              `privatize`
    5. theta <- optimizer(theta, g~); moving average of theta                  post-processing
"""

import dataclasses
import hmac
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data import PoissonSampler, Source, pad_to_physical
from jaxdp.privacy import ComposedDpEvent, DpEvent, SelfComposedDpEvent
from jaxdp.transforms.clipping import ClippedGrad, Engine, clipped_grad
from jaxdp.transforms.noise import Privatizer, PrivatizeState, new_seed, privatize, stream


class TrainState(NamedTuple):
    """Everything a step changes.

    Attributes:
      step: int32 scalar, steps done.
      params: current parameters.
      opt_state: of the optimizer.
      ema: moving average of params, in float32 or wider; or None.
      noise: key and step of the noise stream, from which batches are drawn too. Secret: who learns the key can
        subtract the noise.
      key: of augmentation and stochastic losses.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any
    noise: PrivatizeState
    key: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateTrainer:
    """DP-SGD as pure steps; made by `dp_sgd`, which documents it."""

    gradient: ClippedGrad
    privatizer: Privatizer
    optimizer: optax.GradientTransformation
    sampler: PoissonSampler
    physical_batch_size: int
    augment: Callable[[jax.Array, Any], Any] | None
    augmult: int
    ema_decay: float | None
    stochastic: bool
    zeros: Any = dataclasses.field(init=False)  # compiled `_zeros`, `_accumulate` and `_update`
    accumulate: Any = dataclasses.field(init=False)
    update: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # A repeated step must give the same bits, or the same noise would fall on another gradient. XLA's GPU backend
        # promises that on request only; the others always do.
        options = {"xla_gpu_deterministic_ops": True} if jax.default_backend() == "gpu" else None
        object.__setattr__(self, "zeros", jax.jit(self._zeros))
        object.__setattr__(self, "accumulate", jax.jit(self._accumulate, compiler_options=options))
        object.__setattr__(self, "update", jax.jit(self._update, compiler_options=options))

    def init(self, params: Any) -> TrainState:
        """The state before the first step, with noise and augmentation keys from OS entropy.

        Raises:
          TypeError: a leaf of params is not an array.
        """
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise TypeError(
                    f"params must be a pytree of arrays, got {type(leaf).__name__} at {name!r}; close loss_fn over it "
                    "instead (Equinox: eqx.partition(model, eqx.is_array), NNX: nnx.split)."
                )
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)  # no weak types: they would retrace
        moving = self._moving(params)
        ema = jax.tree.map(_wide, params) if self.ema_decay is not None else None
        key = stream(new_seed(), "augmentation", impl="threefry2x32")
        step = jnp.zeros((), jnp.int32)
        return TrainState(step, params, self.optimizer.init(moving), ema, self.privatizer.init(moving), key)

    def drawn(self, state: TrainState) -> np.ndarray:
        """The examples of the next step, [B] indices; private.

        They depend on the run's noise key and the step only, not on the sampler's own seed: two runs that shared their
        batches would cost more than the ledger's composition of independently sampled steps.
        """
        step, words = jax.device_get((state.step, jax.random.key_data(state.noise.key)))
        seed = hmac.digest(words.tobytes(), b"jaxdp sampling", "sha256")[:16]
        return dataclasses.replace(self.sampler, seed=seed).batch(int(step))

    def step(self, state: TrainState, source: Source) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step of DP-SGD on a batch of `source`.

        The metrics are functions of the released gradient: they cost nothing beyond the step's event.
        """
        indices, masks = pad_to_physical(self.drawn(state), self.physical_batch_size)
        sums = self.zeros(state.params)
        for part, (rows, mask) in enumerate(zip(indices, masks, strict=True)):
            batch = jax.device_put((source.gather(rows), mask, np.uint32(part)))
            sums = self.accumulate(state, sums, *batch)
        return self.update(state, sums)

    def event(self, first: int, last: int) -> DpEvent:
        """The privacy event of steps first, ..., last - 1."""
        if not 0 <= first <= last:
            raise ValueError(f"event needs 0 <= first <= last, got first={first}, last={last}.")
        if not callable(self.privatizer.noise_multiplier):
            return SelfComposedDpEvent(self.sampler.event(self.privatizer.event), last - first)
        return ComposedDpEvent([self.sampler.event(self.privatizer.event_at(t)) for t in range(first, last)])

    def lowered_text(self, state: TrainState, source: Source) -> str:
        """The compiled steps as StableHLO: equal text, data and keys give equal results on equal devices."""
        rows, masks = pad_to_physical(np.zeros(0, np.int64), self.physical_batch_size)
        batch = (source.gather(rows[0]), masks[0], np.uint32(0))
        sums = jax.eval_shape(self.zeros, state.params)
        return self.accumulate.lower(state, sums, *batch).as_text() + self.update.lower(state, sums).as_text()

    def _moving(self, params: Any) -> Any:
        """What the optimizer sees of the parameters: those that are trained, as wide as their gradients."""
        return jax.tree.map(_wide, self.gradient.trainable_params(params))

    def _zeros(self, params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, self._moving(params))

    def _accumulate(self, state: TrainState, sums: Any, batch: Any, mask: jax.Array, part: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), part)
        augment_key, loss_key = jax.random.split(key)
        if self.augment is not None:
            batch = jax.vmap(self._views)(jax.random.split(augment_key, len(mask)), batch)
        added = self.gradient(state.params, batch, mask, key=loss_key if self.stochastic else None).grads
        return jax.tree.map(jnp.add, sums, added)

    def _views(self, key: jax.Array, example: Any) -> Any:
        assert self.augment is not None
        return jax.vmap(self.augment, in_axes=(0, None))(jax.random.split(key, self.augmult), example)

    def _update(self, state: TrainState, sums: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        mean, noise = self.privatizer.update(sums, state.noise)
        updates, opt_state = self.optimizer.update(mean, state.opt_state, self._moving(state.params))
        params = jax.tree.map(_apply, state.params, updates, is_leaf=lambda x: x is None)
        ema = state.ema
        if self.ema_decay is not None:
            # De et al. 2022, appendix C: the average forgets its start, decay_t = min(decay, (1 + t) / (10 + t)).
            t = state.step.astype(jnp.float32)
            decay = jnp.minimum(self.ema_decay, (1 + t) / (10 + t))
            # In this form frozen parameters stay as they are, to the bit.
            ema = jax.tree.map(lambda old, new: old + (1 - decay) * (new - old) if _floating(new) else new, ema, params)
        metrics = {"released_gradient_norm": optax.tree.norm(mean)}
        return TrainState(state.step + 1, params, opt_state, ema, noise, state.key), metrics


def _apply(param: Any, update: Any) -> Any:
    return param if update is None else (param + update).astype(jnp.result_type(param))


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype)) if _floating(x) else x


def dp_sgd(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    sampler: PoissonSampler,
    clip_norm: float,
    noise_multiplier: float | Callable[[Any], Any],
    physical_batch_size: int,
    augment: Callable[[jax.Array, Any], Any] | None = None,
    augmult: int = 1,
    ema_decay: float | None = None,
    stochastic: bool = False,
    engine: Engine = "auto",
    trainable: Callable[[str, Any], bool] | None = None,
) -> PrivateTrainer:
    """DP-SGD for a per-example loss, any optimizer and any Poisson sampler.

        sampler = jaxdp.data.PoissonSampler(len(source), 256 / len(source))
        trainer = jaxdp.finetune.dp_sgd(loss_fn, optax.sgd(0.5), sampler=sampler, clip_norm=1.0,
                                        noise_multiplier=1.1, physical_batch_size=256)
        state = trainer.init(params)
        with ledger.spend("my data", trainer.event(0, 100), label="dp-sgd"):
            for _ in range(100):
                state, metrics = trainer.step(state, source)

    `jaxdp.finetune.fit` is this loop with the ledger, checkpoints, crash recovery and evaluation.

    Args:
      loss_fn: `loss_fn(params, example) -> scalar`; called with `key=` if `stochastic`.
      optimizer: any optax optimizer, with any schedule; it sees the noisy mean gradient: post-processing. Its state is
        float32 or wider, whatever the parameters are.
      sampler: how batches are drawn, and their event; its expected batch size q * n is the divisor. Its own seed is
        not used: every run draws its batches from its own secret (`PrivateTrainer.drawn`).
      clip_norm: C, the L2 norm to which each example's gradient is clipped.
      noise_multiplier: sigma, the noise standard deviation over C; or a public schedule step -> sigma.
      physical_batch_size: examples per compiled call. A sampled batch of any size is cut into as many calls as it
        needs and padded: nothing is truncated and nothing recompiles.
      augment: `augment(key, example) -> example`, jittable, of one example.
      augmult: K, augmented views per example; their mean loss is what is differentiated and clipped (De et al. 2022).
      ema_decay: decay of a moving average of the parameters, kept in `state.ema`; None for none.
      stochastic: `loss_fn` takes `key=` (dropout).
      engine, trainable: as in `jaxdp.clipped_grad`.

    Raises:
      ValueError: an argument is out of range; see also `clipped_grad` and `privatize`.

    Formal guarantees:
      Step t satisfies `trainer.event(t, t + 1)` with respect to the sampler's data set for every adjacency for which
      that event has a meaning: PoissonSampled(q, Gaussian(sigma)), since the clipped sum moves by at most C when one
      example joins or leaves the batch, noise of standard deviation sigma * C is added whatever the batch (the empty
      one included), and the divisor is public. Steps compose adaptively. The whole state except `noise` and `key` is
      post-processing of what was released.
    """
    if physical_batch_size < 1:
        raise ValueError(f"physical_batch_size must be at least 1, got {physical_batch_size}.")
    if augmult < 1 or (augment is None and augmult != 1):
        raise ValueError(f"augmult must be at least 1, and 1 without augment; got {augmult}.")
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(f"ema_decay must be in [0, 1) or None, got {ema_decay}.")
    if not math.isfinite(clip_norm):
        raise ValueError(f"clip_norm must be finite, got {clip_norm}: noise cannot hide an unbounded gradient.")
    gradient = clipped_grad(loss_fn, clip_norm=clip_norm, engine=engine, trainable=trainable, group=augment is not None)
    privatizer = privatize(gradient, noise_multiplier=noise_multiplier, divisor=sampler.expected_batch_size)
    return PrivateTrainer(
        gradient, privatizer, optimizer, sampler, physical_batch_size, augment, augmult, ema_decay, stochastic
    )
