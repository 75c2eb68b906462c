"""DP-AdamBC (Tang, Shpilevskiy and Lecuyer 2024, Algorithm 1; arXiv:2312.14334).

The second moment of a noisy gradient has the mean E[g^2] + Phi. Phi = (sigma C / B)^2 is the
variance of the noise, which is public. Adam divides by a root in which the noise outweighs the
gradient. The correction subtracts Phi:

    m_t = beta_1 m_{t-1} + (1 - beta_1) g~_t          m^ = m_t / (1 - beta_1^t)
    v_t = beta_2 v_{t-1} + (1 - beta_2) g~_t^2        v^ = v_t / (1 - beta_2^t)
    theta_t = theta_{t-1} - eta m^ / sqrt(max(v^ - Phi, gamma'))
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdp.files import check_numbers

# gamma' of the paper. It is needed without noise only, where Phi cannot be the floor.
_PAPERS_FLOOR = 5e-8


def dp_adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    *,
    noise_std: float,
    b1: float = 0.9,
    b2: float = 0.999,
    floor: float | None = None,
) -> optax.GradientTransformation:
    """Returns Adam whose second moment lacks the variance of the noise.

        sigma = jaxdp.privacy.calibrate_noise(
            lambda z: jaxdp.finetune.event(z, sampler, steps), epsilon=4.0, delta=1e-6
        )
        optimizer = jaxdp.finetune.dp_adam_bc(
            1e-3, noise_std=sigma * clip_norm / sampler.expected_batch_size
        )
        trainer = jaxdp.finetune.dp_sgd(
            loss_fn, optimizer, sampler=sampler, clip_norm=clip_norm, noise_multiplier=sigma
        )

    Its input is the noisy mean gradient of `dp_sgd`, or of `jaxdp.privatize`. The moments are
    float32 or wider, for inputs of any dtype.

    Args:
      learning_rate: eta, a number or a schedule of optax.
      noise_std: sigma C / B, the standard deviation of the noise of an entry of the mean, with the
        expected batch size B. With parts, C is `clipped_grad(...).sensitivity()`. The noise must be
        constant.
      b1: beta_1 in [0, 1), the decay of the mean.
      b2: beta_2 in [0, 1), the decay of the second moment.
      floor: gamma' > 0, the smallest second moment. An entry whose corrected moment is below it
        takes steps of eta m^ / sqrt(gamma'). None takes Phi, or 5e-8 without noise. The paper's
        5e-8 lost 5 points of accuracy on digits (docs/results/clip_parts.md): where Phi outweighs
        the gradient, the estimate of its moment is noise of either sign, and a step is then as
        long as the floor permits.

    Raises:
      TypeError: An argument is no number, or the learning rate is no schedule either.
      ValueError: An argument is out of range.

    Formal guarantees:
      It is post-processing: its input is released, and `noise_std` is public. The corrected moment
      v^ - Phi has the mean E[g^2] of the clipped gradient.
    """
    if not callable(learning_rate):
        check_numbers(learning_rate=learning_rate)
    check_numbers(noise_std=noise_std, b1=b1, b2=b2)
    if not 0 <= noise_std < math.inf:
        raise ValueError(
            "noise_std must be finite and not negative, the noise multiplier times the clip norm "
            f"over the expected batch size, got {noise_std}."
        )
    for name, value in {"b1": b1, "b2": b2}.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}.")
    variance = noise_std**2  # Phi
    # Where v^ - Phi is below Phi, it is mostly noise. A smaller floor makes such steps huge.
    smallest = variance or _PAPERS_FLOOR
    if floor is not None:
        check_numbers(floor=floor)
        if not 0 < floor < math.inf:
            raise ValueError(f"floor must be positive and finite, got {floor}.")
        smallest = floor

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x)), params)
        count = jnp.zeros((), jnp.int32)
        return optax.ScaleByAdamState(count, zeros, jax.tree.map(jnp.zeros_like, zeros))

    def update(
        updates: Any, state: optax.ScaleByAdamState, params: Any = None
    ) -> tuple[Any, optax.ScaleByAdamState]:
        # In bfloat16 the difference v^ - Phi would be lost in the rounding of v^.
        gradient = jax.tree.map(lambda x: x.astype(_wide(x)), updates)
        mu = optax.tree.update_moment(gradient, state.mu, b1, 1)  # m_t
        nu = optax.tree.update_moment(gradient, state.nu, b2, 2)  # v_t
        count = optax.safe_increment(state.count)
        mean = optax.tree.bias_correction(mu, b1, count)  # m^
        square = optax.tree.bias_correction(nu, b2, count)  # v^

        def step(m: jax.Array, v: jax.Array) -> jax.Array:
            return m / jnp.sqrt(jnp.maximum(v - variance, smallest))  # v^ - Phi may be negative

        return jax.tree.map(step, mean, square), optax.ScaleByAdamState(count, mu, nu)

    scale = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(optax.GradientTransformation(init, update), scale)


def _wide(x: Any) -> Any:
    return jnp.promote_types(jnp.float32, x.dtype)
