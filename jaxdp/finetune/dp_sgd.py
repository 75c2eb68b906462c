"""DP-SGD (Abadi et al. 2016, Algorithm 1) with Poisson sampling and the image recipe of De et al. 2022.

One step, in the order of the algorithm (steps 1, 4 and 5 are those of `jaxdp.finetune.trainer`, for every method):

    1. L_t: every example joins with probability q, independently              `PoissonSampler`
    2. g_i = grad of the loss of example i (mean over K augmented views)       `clipped_grad`, `group`
    3. g_i <- g_i * min(1, C / ||g_i||_2), summed over L_t                     `clipped_grad`
    4. g~ = (sum_i g_i + sigma C N(0, I)) / (q n)                              `privatize`
    5. theta <- optimizer(theta, g~); moving average of theta                  post-processing
"""

from collections.abc import Callable
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxdp.data import PoissonSampler
from jaxdp.finetune.trainer import Options, PrivateTrainer, Query, make_trainer, moving_params


class GradientSum(Query):
    """The query of DP-SGD: each example contributes its clipped gradient."""

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """The clip norm."""
        return self.gradient.sensitivity(adjacency)

    def zeros(self, params: Any) -> Any:
        """Zeros like the trainable parameters."""
        return jax.tree.map(jnp.zeros_like, moving_params(self.gradient, params))

    def sums(self, params: Any, carried: None, batch: Any, mask: jax.Array, key: jax.Array | None) -> Any:
        """Clipped gradients, summed."""
        return self.gradient(params, batch, mask, key=key).grads

    def read(self, params: Any, carried: None, mean: Any) -> tuple[Any, None, dict[str, jax.Array]]:
        """The noisy mean is the gradient."""
        return mean, None, {}


def dp_sgd(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    noise_multiplier: float | Callable[[Any], Any],
    sampler: PoissonSampler,
    **options: Unpack[Options],
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
      clip_norm: C, the L2 norm to which each example's gradient is clipped.
      noise_multiplier: sigma, the noise standard deviation over C; or a public schedule step -> sigma.
      sampler: how batches are drawn, and their event; its expected batch size q * n is the divisor. Its own seed is
        not used: every run draws its batches from its own secret (`PrivateTrainer.drawn`).
      physical_batch_size: examples per compiled call. A sampled batch of any size is cut into as many calls as it
        needs and padded: nothing is truncated and nothing recompiles.
      augment: `augment(key, example) -> example`, jittable, of one example; default None.
      augmult: K >= 1 (default 1), augmented views per example; their mean loss is what is differentiated and clipped
        (De et al. 2022).
      ema_decay: decay of a moving average of the parameters, kept in `state.ema`; None (the default) for none.
      ascent_radius: rho; gradients are taken at params + rho g / ||g||, with g the gradient released one step before:
        DP-SAT (Park et al. 2023), sharpness-aware at no cost in privacy or time. 0 (the default) is off.
      stochastic: `loss_fn` takes `key=` (dropout); default False.
      engine, clip_rule, trainable: as in `jaxdp.clipped_grad`, with its defaults.

    Raises:
      ValueError: an argument is out of range; see also `clipped_grad` and `privatize`.

    Formal guarantees:
      Step t satisfies `trainer.event(t, t + 1)` with respect to the sampler's data set for every adjacency for which
      that event has a meaning: PoissonSampled(q, Gaussian(sigma)), since the clipped sum moves by at most C when one
      example joins or leaves the batch, noise of standard deviation sigma * C is added whatever the batch (the empty
      one included), and the divisor is public. Steps compose adaptively. The whole state except `noise` and `key` is
      post-processing of what was released.
    """
    return make_trainer(
        lambda gradient: GradientSum(gradient=gradient),
        loss_fn,
        optimizer,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampler=sampler,
        **options,
    )
