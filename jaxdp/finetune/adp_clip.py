"""AdpClip: DP-SGD whose clip norm follows a quantile of the gradient norms (Andrew et al. 2021, Algorithm 1).

With z the noise multiplier of a step, sigma_b the noise of the count, B = q n and C_t the clip norm:

    z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)
    g~ = (sum_i clip(g_i, C_t) + z_Delta C_t N(0, I)) / B
    b~ = (sum_i (1[||g_i|| <= C_t] - 1/2) + sigma_b N(0, 1)) / B + 1/2
    C_{t+1} = C_t exp(-eta_C (b~ - gamma))

Gradient and count are ONE Gaussian release of multiplier z: scaled by 1 / z_Delta and 2 / (2 sigma_b), an example's
contribution (norm at most C_t, and plus or minus 1/2) has norm at most 1/z. The count is centred and divided by the
public B: (sum_i b_i + noise) / m with the realised m would move by 1, not 1/2, and tell how large the batch was.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxdp.data import PoissonSampler
from jaxdp.finetune.trainer import (
    CLIP_NORMS,
    Options,
    PrivateTrainer,
    Query,
    make_trainer,
    moving_params,
)


class _Contribution(NamedTuple):
    grads: Any
    below: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QuantileClipping(Query):
    """The query of AdpClip. Carried: C_t, a float32 scalar.

    An example contributes (a g_i min(1, C_t / ||g_i||) / C_t, 2 c (b_i - 1/2)) with a = z / z_Delta and
    c = z / (2 sigma_b), so that a^2 + c^2 = 1: its norm is at most 1.
    """

    noise_multiplier: float
    count_noise: float
    quantile: float
    clip_learning_rate: float
    unit_norm: bool

    @property
    def count_weight(self) -> float:
        """The part c of the contribution's norm that belongs to the count."""
        return self.noise_multiplier / (2 * self.count_noise)

    @property
    def gradient_weight(self) -> float:
        """The part a that belongs to the gradient."""
        return math.sqrt(1 - self.count_weight**2)

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """1, by the choice of the weights."""
        return 1.0

    def init(self, params: Any) -> jax.Array:
        """C_0."""
        return jnp.float32(self.gradient.clip_norm)

    def zeros(self, params: Any) -> _Contribution:
        """The sum over no examples."""
        return _Contribution(jax.tree.map(jnp.zeros_like, moving_params(self.gradient, params)), jnp.float32(0))

    def sums(
        self, params: Any, carried: jax.Array, batch: Any, mask: jax.Array, key: jax.Array | None
    ) -> _Contribution:
        """Weighted clipped gradients and centred indicators, summed."""
        out = dataclasses.replace(self.gradient, clip_norm=carried)(params, batch, mask, key=key)
        scale = self.gradient_weight / self.gradient.clip_rule.bound(carried)
        unmasked = mask.any(1) if mask.ndim == 2 else mask
        below = jnp.where(unmasked, (out.norms <= carried) - 0.5, 0.0)  # an example that is not finite is above
        return _Contribution(jax.tree.map(lambda g: g * scale, out.grads), 2 * self.count_weight * below.sum())

    def read(self, params: Any, carried: jax.Array, mean: _Contribution) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
        """g~, or g~ / C_t with `unit_norm`; and C_{t+1}."""
        scale = (1.0 if self.unit_norm else self.gradient.clip_rule.bound(carried)) / self.gradient_weight
        gradient = jax.tree.map(lambda g: g * scale, mean.grads)
        fraction = jnp.clip(mean.below / (2 * self.count_weight) + 0.5, 0, 1)  # b~
        updated = carried * jnp.exp(-self.clip_learning_rate * (fraction - self.quantile))
        metrics = {"clip_norm": carried, "fraction_below": fraction}
        return gradient, jnp.clip(updated, *CLIP_NORMS), metrics


def adp_clip(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    noise_multiplier: float,
    quantile: float = 0.5,
    clip_learning_rate: float = 0.2,
    count_noise: float | None = None,
    unit_norm: bool = True,
    sampler: PoissonSampler,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """DP-SGD whose clip norm follows a quantile of the gradient norms, at no extra charge.

    Args:
      loss_fn, optimizer, sampler, options: as in `dp_sgd`.
      clip_norm: C_0, where the clip norm starts; it stays between 1e-8 and 1e8.
      noise_multiplier: z, of the whole step; the gradient gets the larger z_Delta, which pays for the count.
      quantile: gamma in [0, 1], the fraction of examples whose gradients are to stay unclipped.
      clip_learning_rate: eta_C, in (0, 100].
      count_noise: sigma_b > z / 2, the standard deviation of the noise on the count; default B / 20.
      unit_norm: divide the gradient by C_t, so that a changing clip norm does not change the step size; the optimizer's
        learning rate then means a step per gradient of norm 1. False is the published method.

    Raises:
      ValueError: an argument is out of range, or the count alone would use up the step's budget.

    Formal guarantees:
      As `dp_sgd`: every step is PoissonSampled(q, Gaussian(z)). The clip norm is a function of released counts and of
      C_0 only. Under replace-one gradient and count move by twice as much, both, as the accountant assumes.
    """
    batch_size = sampler.expected_batch_size
    if callable(noise_multiplier) or not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be a positive finite number, got {noise_multiplier}.")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}; 0.5 is the median.")
    if not 0 < clip_learning_rate <= 100:
        raise ValueError(f"clip_learning_rate must be in (0, 100], got {clip_learning_rate}; 0.2 is usual.")
    sigma_b = batch_size / 20 if count_noise is None else count_noise
    if not noise_multiplier < 2 * sigma_b < math.inf:
        raise ValueError(
            f"count_noise={sigma_b:g} must be finite and above noise_multiplier / 2 = {noise_multiplier / 2:g}: the "
            "count alone would use up the privacy of a step. Take more noise for the count, or expected batches above "
            f"{10 * noise_multiplier:.0f} examples (now {batch_size:g}) with the default of a twentieth of them."
        )
    return make_trainer(
        lambda gradient: QuantileClipping(
            gradient=gradient,
            noise_multiplier=noise_multiplier,
            count_noise=sigma_b,
            quantile=quantile,
            clip_learning_rate=clip_learning_rate,
            unit_norm=unit_norm,
        ),
        loss_fn,
        optimizer,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampler=sampler,
        **options,
    )
