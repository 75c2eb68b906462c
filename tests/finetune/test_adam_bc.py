"""DP-AdamBC: steps in float64, and a second moment without the variance of the noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import finetune
from jaxdp.transforms import noise


def stepped(gradients, optimizer):
    """Returns the updates, and the state after the last."""
    params = jnp.zeros(gradients.shape[1])
    update = jax.jit(optimizer.update)
    state, updates = optimizer.init(params), []
    for gradient in gradients:
        step, state = update(jnp.asarray(gradient, jnp.float32), state)
        updates.append(np.asarray(step))
    return updates, state


def test_steps_equal_float64():
    rate, std, b1, b2, floor = 0.3, 0.5, 0.8, 0.9, 1e-3
    gradients = np.random.default_rng(0).normal(size=(6, 50))
    optimizer = finetune.dp_adam_bc(rate, noise_std=std, b1=b1, b2=b2, floor=floor)
    updates, _ = stepped(gradients, optimizer)
    m, v, floored = np.zeros(50), np.zeros(50), 0
    for t, (g, update) in enumerate(zip(gradients, updates, strict=True), 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        corrected = v / (1 - b2**t) - std**2
        floored += int((corrected < floor).sum())
        expected = -rate * m / (1 - b1**t) / np.sqrt(np.maximum(corrected, floor))
        np.testing.assert_allclose(update, expected, rtol=1e-3)
    assert floored  # the floor is at work


@pytest.mark.slow
def test_the_corrected_moment_is_unbiased_and_a_wrong_scale_is_not():
    """With 40,000 entries the mean of z^2 has a standard error of 0.003 Phi."""
    size, steps, sigma, clip, batch = 40_000, 3, 1.3, 0.7, 32.0
    true = 0.03
    privatizer = jaxdp.privatize(
        clip, noise_multiplier=sigma, divisor=batch, key=noise.stream(bytes(16), "test")
    )
    std = sigma * clip / batch
    state, gradients = privatizer.init(jnp.zeros(size)), []
    for _ in range(steps):
        gradient, state = privatizer.update(jnp.full(size, true * batch), state)
        gradients.append(np.asarray(gradient, np.float64))

    def error(scale):
        """Returns the mean of v^ - Phi - g^2 over Phi, read from the step that the moment takes."""
        optimizer = finetune.dp_adam_bc(1.0, noise_std=scale * std, b1=0.0, b2=0.9, floor=1e-12)
        updates, (moments, _) = stepped(np.array(gradients), optimizer)
        square = np.asarray(moments.nu, np.float64) / (1 - 0.9**steps)
        corrected = np.square(gradients[-1] / updates[-1])
        held = square - (scale * std) ** 2 > 1e-12
        np.testing.assert_allclose(
            corrected[held], (square - (scale * std) ** 2)[held], rtol=1e-2, atol=1e-8
        )
        return ((square - (scale * std) ** 2).mean() - true**2) / std**2

    tolerance = 0.02
    assert abs(error(1.0)) < tolerance
    for wrong in (0.0, 0.7, 1.3):
        assert abs(error(wrong)) > 10 * tolerance


def test_the_default_floor_is_the_variance_of_the_noise():
    """The broken twin has the paper's floor."""
    gradients = np.random.default_rng(0).normal(0, 0.5, (4, 50))

    def steps(**options):
        return stepped(gradients, finetune.dp_adam_bc(0.1, noise_std=0.5, **options))[0]

    np.testing.assert_array_equal(steps(), steps(floor=0.25))
    assert np.abs(steps()).max() < 0.1 * np.abs(steps(floor=5e-8)).max()


def test_bfloat16_and_frozen_leaves():
    optimizer = finetune.dp_adam_bc(optax.constant_schedule(0.1), noise_std=0.0)
    params = {"w": jnp.ones(3, jnp.bfloat16), "frozen": None}
    updates, state = optimizer.update(params, optimizer.init(params))
    assert updates["w"].dtype == jnp.float32
    assert state[0].nu["w"].dtype == jnp.float32
    assert updates["frozen"] is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"noise_std": -1.0}, "noise_std must be"),
        ({"noise_std": float("nan")}, "noise_std must be"),
        ({"b1": 1.0}, "b1 must be"),
        ({"b2": -0.1}, "b2 must be"),
        ({"floor": 0.0}, "floor must be"),
    ],
)
def test_wrong_arguments_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        finetune.dp_adam_bc(0.1, **{"noise_std": 1.0, **change})
