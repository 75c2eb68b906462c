"""Weights whose Jacobian is a factor of each channel plus terms of low rank, against JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.models import layers
from jaxdp.transforms import channel_weights
from tests.transforms import test_tpu_forms as tpu_forms

ROWS = (3, 3, 4)
CHANNELS = 5


def standard(kernel, gain):
    """Weight standardisation in one expression."""
    rows = kernel.size // kernel.shape[-1]
    centred = kernel - kernel.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(centred).mean((0, 1, 2), keepdims=True)
    return centred * (gain.reshape(1, 1, 1, -1) * jax.lax.rsqrt(jnp.maximum(rows * variance, 1e-4)))


def of_the_model(kernel, gain):
    """The weight of `jaxdp.models.layers.WSConv`: its outputs where one pixel has one channel."""
    layer = layers.WSConv(CHANNELS, ROWS[:2], padding="VALID")
    params = {"kernel": kernel, "gain": gain, "bias": jnp.zeros(CHANNELS)}
    pixels = jnp.eye(kernel.size // CHANNELS).reshape(-1, *ROWS)
    return layer.apply({"params": params}, pixels).reshape(kernel.shape)


def centred(kernel, gain):
    return kernel - kernel.mean((0, 1, 2), keepdims=True)


def weighted(kernel, gain):
    return -kernel / jnp.sqrt(jnp.square(kernel).sum((0, 1, 2), keepdims=True) + 1)


def leaves():
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(*ROWS, CHANNELS)).astype(np.float32)
    gain = rng.normal(size=CHANNELS).astype(np.float32)
    gain[0] = 0.0  # no part of the form divides by it
    return jnp.asarray(kernel), jnp.asarray(gain)


def form_of(function):
    arguments = leaves()
    program = jax.make_jaxpr(function)(*arguments)
    return channel_weights.of_program(program, arguments, [0, 1])


@pytest.mark.parametrize("function", [standard, centred, weighted])
def test_the_form_is_the_jacobian(function):
    form = form_of(function)
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.normal(size=(*ROWS, CHANNELS)), jnp.float32)
    _, transpose = jax.vjp(function, *leaves())
    of_kernel, of_gain = transpose(cotangent)

    rows = cotangent.reshape(-1, CHANNELS)
    found_kernel, found_gain = form.scale * rows, jnp.zeros((1, CHANNELS))
    for number, place, functional in form.numbers:
        base = form.bases[place]
        product = rows if base is None else base * rows
        term = number * product.sum(0, keepdims=True)
        if functional.leaf == 1:
            found_gain += term
        else:
            ones = jnp.ones_like(rows)
            found_kernel += term * (ones if functional.base is None else functional.base)
    np.testing.assert_allclose(found_kernel.reshape(cotangent.shape), of_kernel, atol=1e-5)
    np.testing.assert_allclose(found_gain[0], of_gain, atol=1e-5)


def test_the_weights_of_the_models_have_the_form():
    np.testing.assert_allclose(of_the_model(*leaves()), standard(*leaves()), atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda kernel, gain: jnp.sin(kernel),  # an unknown operation
        lambda kernel, gain: kernel * kernel,  # a factor of each entry
        lambda kernel, gain: kernel - kernel.mean(),  # channels that depend on each other
        lambda kernel, gain: kernel - kernel.mean((0, 1), keepdims=True),  # part of the rows
        lambda kernel, gain: kernel.transpose(1, 0, 2, 3),  # moved entries
        lambda kernel, gain: kernel * gain.reshape(1, 1, 1, -1)[..., ::-1],  # of another channel
        lambda kernel, gain: kernel.astype(jnp.bfloat16) * jnp.bfloat16(2),  # rounded sums
    ],
)
def test_other_weights_are_refused(function):
    assert form_of(function) is None


@pytest.mark.slow
def test_a_gradient_that_the_weight_takes_away_keeps_its_bound(monkeypatch):
    """The data are the kernel itself, so only the gradient of the gain is left.

    The twin leaves out what the standardisation takes away. Its norm is many times as long.
    """
    rng = np.random.default_rng(0)
    kernel = 0.01 * jnp.asarray(rng.normal(size=(3, 3, 8, 16)), jnp.float32)
    params = {"gain": jnp.ones(16), "kernel": kernel}
    own = kernel[..., 0] - kernel[..., 0].mean()
    picture = jnp.zeros((16, 24, 8)).at[4:7, 4:7].set(100 * own)
    batch = jnp.stack([picture, jnp.ones_like(picture)])

    def loss(params, x):
        return tpu_forms.standardised_outputs(params, x)[0, 5, 2, 0]

    clipped = jaxdp.clipped_grad(loss, clip_norm=0.5)
    with tpu_forms.on_a_tpu():
        result = clipped(params, batch, mask=jnp.arange(2) == 0)
        low_rank = channel_weights.low_rank

        def without_squares(*arguments):
            terms, added, *bounds = low_rank(*arguments)
            return terms, 0 * added, *bounds

        monkeypatch.setattr(channel_weights, "low_rank", without_squares)
        twin = jaxdp.clipped_grad(lambda *args: loss(*args), clip_norm=0.5)
        too_long = twin(params, batch, mask=jnp.arange(2) == 0).norms[0]
    exact = np.linalg.norm(tpu_forms.gradients(loss, params, batch), axis=1)[0]
    # What is taken away was multiplied with eight bits, and the norm covers what they lack.
    assert 0.97 * exact < result.norms[0] < 2 * exact
    assert 0.25 < np.linalg.norm(tpu_forms.flat(result.grads)) <= 0.5 * (1 + 2**-8)
    assert too_long > 5 * exact
