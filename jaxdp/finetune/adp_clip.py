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

With a clip norm for each of K parts, each part has a count and a C_t of its own, by its own norms.
The gradient gets noise z_Delta S_t with S_t = sqrt(sum_k C_{k,t}^2), and all K counts are paid for:

    z_Delta = (z^-2 - K (2 sigma_b)^-2)^(-1/2)

The count is centred and divided by the public B. A count (sum_i b_i + noise) / m with the realised
batch size m has sensitivity 1 instead of 1/2, and it tells how large the batch was.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxdp.data.physical import Sampler
from jaxdp.files import shows_keywords
from jaxdp.finetune.options import (
    CLIP_NORMS,
    OPTION_DEFAULTS,
    Options,
    check_one_noise,
    noise_and_options,
)
from jaxdp.finetune.query import Query, QuerySums, is_example, moving_params, root_of_squares
from jaxdp.finetune.trainer import PrivateTrainer, make_trainer
from jaxdp.transforms.clip_rules import clip_factors
from jaxdp.transforms.clipping import ClippedGrad


class _Contribution(NamedTuple):
    """What an example contributes, or a sum of that: a weighted gradient and a weighted count."""

    grads: Any
    below: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QuantileClipping(Query):
    """The query of AdpClip. It carries C_t, a float32 scalar, or [K] for K parts.

    An example contributes (a g_i min(1, C_t / ||g_i||) / C_t, 2 c (b_i - 1/2)). With
    a = z / z_Delta and c = z / (2 sigma_b), a^2 + c^2 = 1, so that the norm of the contribution is
    at most 1. With parts it contributes K counts, and the clipped parts over S_t. Then
    a^2 + K c^2 = 1.
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
        n_counts = len(self.gradient.clip_norms)
        return math.sqrt(1 - n_counts * self.count_weight**2)  # a^2 + K c^2 = 1

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """Returns 1, by the choice of the weights."""
        return 1.0

    def init(self, params: Any) -> jax.Array:
        """Returns C_0."""
        if self.gradient.patterns is None:
            return jnp.float32(self.gradient.clip_norm)
        return jnp.asarray(self.gradient.clip_norms, jnp.float32)

    def _clipped_to(self, carried: jax.Array) -> ClippedGrad:
        """Returns the clipped gradient with the clip norms C_t."""
        clip_norm: Any = carried
        if self.gradient.patterns is not None:
            clip_norm = dict(zip(self.gradient.patterns, carried, strict=True))
        return dataclasses.replace(self.gradient, clip_norm=clip_norm)

    def zeros(self, params: Any) -> _Contribution:
        """Returns the sum over no examples."""
        moving = moving_params(self.gradient, params)
        return self.as_sums(_Contribution(moving, self.init(params)))

    def sums(
        self,
        params: Any,
        carried: jax.Array,
        batch: Any,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> QuerySums:
        """Sums the weighted clipped gradients and the centred indicators."""
        if self.grid is not None:
            return self._integer_sums(params, carried, batch, mask, key)
        gradient = self._clipped_to(carried)
        out = gradient(params, batch, mask, key=key)
        scale = self.gradient_weight / gradient.sensitivity()  # g / C_t times a
        present = is_example(mask)
        norms, limits = out.norms, carried
        if gradient.patterns is not None:
            norms = jnp.stack([out.part_norms[part] for part in gradient.patterns], axis=1)
            present, limits = present[:, None], carried[None]
        # b_i - 1/2. A norm that is not finite is not below C_t.
        below = jnp.where(present, (norms <= limits) - 0.5, 0.0)
        grads = jax.tree.map(lambda g: g * scale, out.grads)
        total = _Contribution(grads, 2 * self.count_weight * below.sum(axis=0))  # 2 c (+-1/2) = +-c
        return QuerySums.of(total, out)

    def _integer_sums(
        self,
        params: Any,
        carried: jax.Array,
        batch: Any,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> QuerySums:
        """Sums what `sums` does on the grid, from the gradient of each example."""
        of_examples = self.gradient.per_example(params, batch, mask, key=key)
        grads = jax.tree.leaves(of_examples.grads)
        clipped = self._clipped_to(carried)
        parts: Sequence[int] = [0] * len(grads)
        if self.gradient.patterns is not None:
            parts = self.gradient.parts_of(params)
        norms = [root_of_squares(grads, parts, part) for part in range(len(clipped.bounds))]
        scale = self.gradient_weight / clipped.sensitivity()
        rule = self.gradient.clip_rule
        factors = []
        for of_part, limit, bound in zip(norms, clipped.clip_norms, clipped.bounds, strict=True):
            factor = scale * clip_factors(rule, of_part, limit, bound)
            factors.append(jnp.where(of_examples.contributes, factor, 0))
        is_below = [n <= limit for n, limit in zip(norms, clipped.clip_norms, strict=True)]
        # A gradient that is not finite is not below C_t.
        below = jnp.stack(is_below, 1) & of_examples.contributes[:, None]
        count = 2 * self.count_weight * (below.astype(jnp.float32) - 0.5)
        present = is_example(mask).astype(jnp.float32)
        rows = _Contribution(of_examples.grads, count if self.gradient.patterns else count[:, 0])
        total = self.rounded(rows, _Contribution([factors[part] for part in parts], present))
        return QuerySums(total, of_examples.nonfinite)

    def read(
        self, params: Any, carried: jax.Array, mean: _Contribution
    ) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
        """Returns g~ (g~ / C_t with `unit_norm`), C_{t+1} and metrics."""
        bound = self._clipped_to(carried).sensitivity()
        length = 1.0 if self.unit_norm else bound
        # The contribution was a g / C_t. With `unit_norm` C_t stays outside, so that the learning
        # rate does not need to follow it.
        scale = length / self.gradient_weight
        gradient = jax.tree.map(lambda g: g * scale, mean.grads)  # g~
        fraction = jnp.clip(mean.below / (2 * self.count_weight) + 0.5, 0, 1)  # b~
        # C_{t+1} = C_t exp(-eta_C (b~ - gamma)), within the range in which float32 can clip.
        updated = carried * jnp.exp(-self.clip_learning_rate * (fraction - self.quantile))
        clip_norm = jnp.clip(updated, *CLIP_NORMS)
        if self.gradient.patterns is None:
            return gradient, clip_norm, {"clip_norm": carried, "fraction_below": fraction}
        metrics = {"clip_norm": bound}  # S_t, the norm of all parts together
        for number, pattern in enumerate(self.gradient.patterns):
            metrics[f"clip_norm {pattern}"] = carried[number]
            metrics[f"fraction_below {pattern}"] = fraction[number]
        return gradient, clip_norm, metrics


@shows_keywords(Options, OPTION_DEFAULTS)
def adp_clip(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float | Mapping[str, float],
    noise_multiplier: float | None = None,
    quantile: float = 0.5,
    clip_learning_rate: float = 0.2,
    count_noise: float | None = None,
    unit_norm: bool = True,
    sampler: Sampler,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """Returns a trainer for AdpClip, whose clip norm follows a quantile of the gradient norms.

    The quantile costs no extra privacy. Each argument is one of the paper's, or of `dp_sgd`.

    Args:
      loss_fn, optimizer, sampler, options: As in `dp_sgd`.
      clip_norm: C_0, the first clip norm. The clip norm stays between 1e-8 and 1e8. With a mapping,
        as in `jaxdp.clipped_grad`, each part has a clip norm that follows the quantile of its own
        norms. A noisy count for each of K parts is paid from z.
      noise_multiplier: z, for the whole step. The gradient gets the larger z_Delta, which makes
          room for the count.
      quantile: gamma in [0, 1], the target fraction of examples whose gradients stay unclipped.
      clip_learning_rate: eta_C, in (0, 100].
      count_noise: sigma_b > sqrt(K) z / 2, the standard deviation of the noise on the count of each
        part. The default is B / 20.
      unit_norm: Whether to divide the gradient by C_t (S_t with parts), so that a changing clip
        norm does not change the step size. The learning rate of the optimizer is then the step for
        a gradient of norm 1. False is the published method.

    Raises:
      ValueError: An argument is out of range, or the count alone uses up the budget of a step.

    Formal guarantees:
      As `dp_sgd`: every step is PoissonSampled(q, Gaussian(z)). The clip norm is a function of
      released counts and C_0 only. Under replace-one the sensitivities of gradient and count both
      double, as the accountant assumes.
    """
    noise_multiplier, others = noise_and_options(noise_multiplier, options, sampler)
    batch_size = sampler.expected_batch_size
    check_one_noise(noise_multiplier)
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}. 0.5 is the median.")
    if not 0 < clip_learning_rate <= 100:
        raise ValueError(
            f"clip_learning_rate must be in (0, 100], got {clip_learning_rate}. 0.2 is usual."
        )
    sigma_b = batch_size / 20 if count_noise is None else count_noise  # Andrew et al. 2021: B / 20
    n_counts = len(clip_norm) if isinstance(clip_norm, Mapping) else 1
    # a is real only if the K counts leave budget for the gradient: K (2 sigma_b)^-2 < z^-2.
    least = math.sqrt(n_counts) * noise_multiplier / 2
    if not least < sigma_b < math.inf:
        counts = "the count alone uses" if n_counts == 1 else f"{n_counts} counts alone use"
        root = "" if n_counts == 1 else f"sqrt({n_counts}) "
        raise ValueError(
            f"count_noise must be finite and above {root}noise_multiplier / 2 = {least:g}, got "
            f"{sigma_b:g}: {counts} up the budget of a step. Raise count_noise, or use its default "
            f"with an expected batch size above {20 * least:.0f} (now {batch_size:g})."
        )
    return make_trainer(
        lambda gradient: QuantileClipping(
            gradient=gradient,
            noise_multiplier=float(noise_multiplier),  # an array of JAX would be traced
            count_noise=float(sigma_b),  # weights of 16 bits would let contributions exceed 1
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
