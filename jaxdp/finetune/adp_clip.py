"""AdpClip: DP-SGD whose clip norm follows a quantile of the gradient norms.

This is Algorithm 1 of Andrew et al. 2021. z is the noise multiplier of a step, sigma_b the noise of
the count, B = q n, and C_t the clip norm:

    z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)
    g~ = (sum_i clip(g_i, C_t) + z_Delta C_t N(0, I)) / B
    b~ = (sum_i (1[||g_i|| <= C_t] - 1/2) + sigma_b N(0, 1)) / B + 1/2
    C_{t+1} = C_t exp(-eta_C (b~ - gamma))

Gradient and count are ONE Gaussian release with noise multiplier z. An example contributes a
gradient of norm at most C_t and a count of plus or minus 1/2. Divided by z_Delta C_t and by
sigma_b, this contribution has norm at most 1/z.

The count is centred and divided by the public B. A count (sum_i b_i + noise) / m with the realised
batch size m has sensitivity 1 instead of 1/2, and it tells how large the batch was.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxdp.data import PoissonSampler
from jaxdp.finetune.options import CLIP_NORMS, Options, noise_and_options
from jaxdp.finetune.query import Query, QuerySums, moving_params
from jaxdp.finetune.trainer import PrivateTrainer, make_trainer


class _Contribution(NamedTuple):
    """What an example contributes, or a sum of that: a weighted gradient and a weighted count."""

    grads: Any
    below: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QuantileClipping(Query):
    """The query of AdpClip. It carries C_t, a float32 scalar.

    An example contributes (a g_i min(1, C_t / ||g_i||) / C_t, 2 c (b_i - 1/2)). With
    a = z / z_Delta and c = z / (2 sigma_b), a^2 + c^2 = 1, so that the norm of the contribution is
    at most 1.
    """

    noise_multiplier: float
    count_noise: float
    quantile: float
    clip_learning_rate: float
    unit_norm: bool

    @property
    def count_weight(self) -> float:
        """The weight c of the count in the contribution."""
        return self.noise_multiplier / (2 * self.count_noise)

    @property
    def gradient_weight(self) -> float:
        """The weight a of the gradient in the contribution."""
        return math.sqrt(1 - self.count_weight**2)

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """Returns 1, by the choice of the weights."""
        return 1.0

    def init(self, params: Any) -> jax.Array:
        """Returns C_0."""
        return jnp.float32(self.gradient.clip_norm)

    def zeros(self, params: Any) -> _Contribution:
        """Returns the sum over no examples."""
        grads = jax.tree.map(jnp.zeros_like, moving_params(self.gradient, params))
        return _Contribution(grads, jnp.float32(0))

    def sums(
        self,
        params: Any,
        carried: jax.Array,
        batch: Any,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> QuerySums:
        """Sums the weighted clipped gradients and the centred indicators."""
        gradient = dataclasses.replace(self.gradient, clip_norm=carried)
        out = gradient(params, batch, mask, key=key)
        scale = self.gradient_weight / self.gradient.clip_rule.bound(carried)
        is_example = mask.any(1) if mask.ndim == 2 else mask  # A mask of groups is [B, k].
        # b_i - 1/2. A norm that is not finite is not below C_t.
        below = jnp.where(is_example, (out.norms <= carried) - 0.5, 0.0)
        grads = jax.tree.map(lambda g: g * scale, out.grads)
        total = _Contribution(grads, 2 * self.count_weight * below.sum())
        return QuerySums(total, out.nonfinite)

    def read(
        self, params: Any, carried: jax.Array, mean: _Contribution
    ) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
        """Returns g~ (g~ / C_t with `unit_norm`), C_{t+1} and metrics."""
        length = 1.0 if self.unit_norm else self.gradient.clip_rule.bound(carried)
        scale = length / self.gradient_weight
        gradient = jax.tree.map(lambda g: g * scale, mean.grads)  # g~
        fraction = jnp.clip(mean.below / (2 * self.count_weight) + 0.5, 0, 1)  # b~
        # C_{t+1} = C_t exp(-eta_C (b~ - gamma)), within the range in which float32 can clip.
        updated = carried * jnp.exp(-self.clip_learning_rate * (fraction - self.quantile))
        clip_norm = jnp.clip(updated, *CLIP_NORMS)
        metrics = {"clip_norm": carried, "fraction_below": fraction}
        return gradient, clip_norm, metrics


def adp_clip(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    noise_multiplier: float | None = None,
    quantile: float = 0.5,
    clip_learning_rate: float = 0.2,
    count_noise: float | None = None,
    unit_norm: bool = True,
    sampler: PoissonSampler,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """Returns a trainer for AdpClip, whose clip norm follows a quantile of the gradient norms.

    The quantile costs no extra privacy. Each argument is one of the paper's, or of `dp_sgd`.

    Args:
      loss_fn, optimizer, sampler, options: As in `dp_sgd`.
      clip_norm: C_0, the first clip norm. The clip norm stays between 1e-8 and 1e8.
      noise_multiplier: z, for the whole step. The gradient gets the larger z_Delta, which makes
          room for the count.
      quantile: gamma in [0, 1], the target fraction of examples whose gradients stay unclipped.
      clip_learning_rate: eta_C, in (0, 100].
      count_noise: sigma_b > z / 2, the standard deviation of the noise on the count. The default is
          B / 20.
      unit_norm: Whether to divide the gradient by C_t, so that a changing clip norm does not change
        the step size. The learning rate of the optimizer is then the step for a gradient of norm 1.
        False is the published method.

    Raises:
      ValueError: An argument is out of range, or the count alone uses up the budget of a step.

    Formal guarantees:
      As `dp_sgd`: every step is PoissonSampled(q, Gaussian(z)). The clip norm is a function of
      released counts and C_0 only. Under replace-one the sensitivities of gradient and count both
      double, as the accountant assumes.
    """
    noise_multiplier, others = noise_and_options(noise_multiplier, options, sampler)
    batch_size = sampler.expected_batch_size
    if callable(noise_multiplier) or not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier}.")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}. 0.5 is the median.")
    if not 0 < clip_learning_rate <= 100:
        raise ValueError(
            f"clip_learning_rate must be in (0, 100], got {clip_learning_rate}. 0.2 is usual."
        )
    sigma_b = batch_size / 20 if count_noise is None else count_noise
    if not noise_multiplier < 2 * sigma_b < math.inf:
        raise ValueError(
            "count_noise must be finite and above noise_multiplier / 2 = "
            f"{noise_multiplier / 2:g}, got {sigma_b:g}: the count alone uses up the budget of a "
            "step. Raise count_noise, or use its default with an expected batch size above "
            f"{10 * noise_multiplier:.0f} (now {batch_size:g})."
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
        **others,
    )
