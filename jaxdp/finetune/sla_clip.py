"""SlaClip: DP-SGD whose clip norm follows the slack that clipping leaves (Zou et al., ICML 2026).

z is the noise multiplier of a step, B = q n, C_t the clip norm and K the number of slots. The slack
of example i is a share u of C_t, and fills slots of a capacity lambda one after the other:

    u_i = max(0, 1 - ||g_i|| / C_t),  lambda = C_t / sqrt(K)                         (6), (7)
    s_ij = lambda min(max(K u_i - (j - 1), 0), 1),  j = 1..K                         (8)
    (g~, s~) = (sum_i (clip(g_i, C_t), s_i) + z C_t N(0, I)) / B                     (9), (10)
    F_j = s~_j / lambda                                                              (11)
    r_t = [F_K / C_t],  gamma_t = [1 - (1 - r_t) / 2],  [.] = cut to [0, 1]          (28), (29)
    C_{t+1} = C_t exp(eta (gamma_t - F_1)), cut to [C_min, C_max]                    (30)

F_j is a noisy share of examples with a norm below about (1 - j / K) C_t. The authors' program
(github.com/ZsyRock/SlaClip) numbers these equations.

Gradient and slots are ONE Gaussian release with noise multiplier z, as in DP-SGD. Let a be the
whole part of K u and f the rest. Then

    ||s_i||^2 = lambda^2 (a + f^2) <= lambda^2 K u = C_t^2 u,
    ||clip(g_i, C_t)||^2 + ||s_i||^2 <= C_t^2 ((1 - u)^2 + u) = C_t^2 (1 - u (1 - u)) <= C_t^2.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxdp.data.physical import Sampler
from jaxdp.files import check_count, check_numbers, shows_keywords
from jaxdp.finetune.options import (
    OPTION_DEFAULTS,
    Options,
    check_clip_norm,
    check_one_noise,
    noise_and_options,
)
from jaxdp.finetune.query import Query, QuerySums, is_example, moving_params, root_of_squares
from jaxdp.finetune.trainer import PrivateTrainer, make_trainer
from jaxdp.transforms.clip_rules import clip_factors

# The 99.5 % quantile of the normal distribution, in the rule for K (equation 36).
_QUANTILE = 2.576


class _Contribution(NamedTuple):
    """What an example contributes over C_t, or a sum of that: a gradient and K slots."""

    grads: Any
    slots: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SlackClipping(Query):
    """The query of SlaClip. It carries C_t, a float32 scalar.

    An example contributes (g_i min(1, C_t / ||g_i||), s_i) / C_t, of norm at most 1.
    """

    slots: int
    clip_learning_rate: float
    least: float
    most: float
    unit_norm: bool

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """Returns 1, the norm that no contribution exceeds."""
        return 1.0

    def init(self, params: Any) -> jax.Array:
        """Returns C_0."""
        return jnp.float32(self.gradient.clip_norm)

    def zeros(self, params: Any) -> _Contribution:
        """Returns the sum over no examples."""
        moving = moving_params(self.gradient, params)
        return self.as_sums(_Contribution(moving, jnp.zeros(self.slots)))

    def filled(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
        """Returns s_i / C_t, float32 [B, K], of gradients with these norms [B].

        A norm that is not finite has no slack.
        """
        slack = 1 - norms / clip_norm
        slack = jnp.where(jnp.isfinite(slack), jnp.maximum(slack, 0), 0)  # (6)
        full = jnp.clip(self.slots * slack[:, None] - jnp.arange(self.slots)[None], 0, 1)  # (8)
        return full / math.sqrt(self.slots)  # lambda / C_t

    def sums(
        self,
        params: Any,
        carried: jax.Array,
        batch: Any,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> QuerySums:
        """Sums the clipped gradients and the slots, both over C_t."""
        if self.grid is not None:
            return self._integer_sums(params, carried, batch, mask, key)
        gradient = dataclasses.replace(self.gradient, clip_norm=carried)
        out = gradient(params, batch, mask, key=key)
        present = is_example(mask)
        # Padding has norm 0, and would fill all slots. An example without a finite loss
        # contributes nothing at all.
        counts = present & jnp.isfinite(out.losses)
        slots = jnp.where(counts[:, None], self.filled(out.norms, carried), 0)
        grads = jax.tree.map(lambda g: g / carried, out.grads)
        return QuerySums.of(_Contribution(grads, slots.sum(axis=0)), out)

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
        norms = root_of_squares(grads, [0] * len(grads), 0)
        factors = clip_factors(self.gradient.clip_rule, norms, carried, carried) / carried
        counts = of_examples.contributes
        rows = _Contribution(of_examples.grads, self.filled(norms, carried))
        of_leaves = [jnp.where(counts, factors, 0)] * len(grads)
        total = self.rounded(rows, _Contribution(of_leaves, counts.astype(jnp.float32)))
        return QuerySums(total, of_examples.nonfinite)

    def read(
        self, params: Any, carried: jax.Array, mean: _Contribution
    ) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
        """Returns g~ (g~ / C_t with `unit_norm`), C_{t+1} and metrics."""
        length = 1.0 if self.unit_norm else carried
        gradient = jax.tree.map(lambda g: g * length, mean.grads)
        shares = mean.slots * math.sqrt(self.slots)  # F  # (11), of s / C_t
        near_zero = jnp.clip(shares[-1] / carried, 0, 1)  # r_t  # (28)
        target = jnp.clip(1 - (1 - near_zero) / 2, 0, 1)  # gamma_t  # (29)
        updated = carried * jnp.exp(self.clip_learning_rate * (target - shares[0]))  # (30)
        clip_norm = jnp.clip(updated, self.least, self.most)
        metrics = {
            "clip_norm": carried,
            "fraction_below": jnp.clip(shares[0], 0, 1),
            "target_below": target,
        }
        return gradient, clip_norm, metrics


def slots_of(batch_size: float, noise_multiplier: float) -> int:
    """Returns the published number of slots, max(1, floor((B / (2 * 2.576 z))^(2/3))) (36).

    With it, the noise of a share is below half a slot with a probability of 99 %.
    """
    return max(1, math.floor((batch_size / (2 * _QUANTILE * noise_multiplier)) ** (2 / 3)))


@shows_keywords(Options, OPTION_DEFAULTS)
def sla_clip(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    noise_multiplier: float | None = None,
    slots: int | None = None,
    clip_learning_rate: float = 0.5,
    clip_range: tuple[float, float] = (0.1, 50.0),
    unit_norm: bool = True,
    sampler: Sampler,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """Returns a trainer for SlaClip, whose clip norm follows the slack of the gradient norms.

    The step has the noise and the cost of DP-SGD. Each argument is one of the paper's, or of
    `dp_sgd`.

    Args:
      loss_fn, optimizer, sampler, options: As in `dp_sgd`. `clip_rule` is "global".
      clip_norm: C_0, the first clip norm, within `clip_range`. It is one number for all parameters.
      noise_multiplier: z, for the whole step and for the gradient.
      slots: K, the number of slots. None, the default, is the published rule (`slots_of`).
      clip_learning_rate: eta, in (0, 100].
      clip_range: (C_min, C_max), the published bounds of the clip norm by default.
      unit_norm: Whether to divide the gradient by C_t, so that a changing clip norm does not change
        the step size. The learning rate of the optimizer is then the step for a gradient of norm 1.
        False is the published method.

    Raises:
      ValueError: An argument is out of range, or another `clip_rule` is given: a gradient that is
        not its own below the clip norm leaves less room than the slack says.
      TypeError: clip_norm has several norms, or slots is no whole number.

    Formal guarantees:
      As `dp_sgd`: every step is PoissonSampled(q, Gaussian(z)). The module has the proof that a
      gradient with its slots is no longer than C_t. The clip norm is a function of released slots
      and C_0 only. Under replace-one the sensitivity doubles, as the accountant assumes.
    """
    noise_multiplier, others = noise_and_options(noise_multiplier, options, sampler)
    check_one_noise(noise_multiplier)
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, numbers.Real):
        raise TypeError(
            f"clip_norm must be one number, got {type(clip_norm).__name__}. The slack is that of "
            "the whole gradient. adp_clip takes a norm for each part."
        )
    least, most = clip_range
    check_numbers(clip_learning_rate=clip_learning_rate, least=least, most=most)
    check_clip_norm("clip_range[0]", least)
    check_clip_norm("clip_range[1]", most)
    if not least <= clip_norm <= most:
        raise ValueError(f"clip_norm must be in clip_range={clip_range}, got {clip_norm}.")
    if not 0 < clip_learning_rate <= 100:
        raise ValueError(
            f"clip_learning_rate must be in (0, 100], got {clip_learning_rate}. 0.5 is published."
        )
    if others.get("clip_rule", "global") != "global":
        raise ValueError(
            f"clip_rule must be 'global' for SlaClip, got {others['clip_rule']!r}: other rules "
            "lengthen short gradients into the room of the slack."
        )
    if slots is None:
        slots = slots_of(sampler.expected_batch_size, noise_multiplier)
    check_count("slots", slots, 1)
    return make_trainer(
        lambda gradient: SlackClipping(
            gradient=gradient,
            slots=slots,
            clip_learning_rate=clip_learning_rate,
            least=least,
            most=most,
            unit_norm=unit_norm,
        ),
        loss_fn,
        optimizer,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampler=sampler,
        **others,
    )
