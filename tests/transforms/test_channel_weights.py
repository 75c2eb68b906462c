"""Weights whose Jacobian is a factor of each channel plus terms of low rank, against JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.models import layers
from jaxdp.transforms import channel_weights, clipped_sums, forms
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
    return kernel, gain


def form_of(function, arguments):
    program = jax.make_jaxpr(function)(*leaves())
    return channel_weights.of_program(program, arguments, [0, 1])


@pytest.mark.parametrize("function", [standard, centred, weighted])
def test_the_form_is_the_jacobian(function):
    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=(*ROWS, CHANNELS)).astype(np.float32)

    def by_form(cotangent, *arguments):
        form = form_of(function, arguments)
        rows = cotangent.reshape(-1, CHANNELS)
        of_kernel, of_gain = form.scale * rows, jnp.zeros((1, CHANNELS))
        for number, place, leaf, own in form.terms:
            base = form.bases[place]
            product = rows if base is None else base * rows
            term = number * product.sum(0, keepdims=True)
            if leaf == 1:
                of_gain += term
            else:
                own_base = form.bases[own]
                of_kernel += term if own_base is None else term * own_base
        return of_kernel.reshape(cotangent.shape), of_gain[0]

    def by_jax(cotangent, *arguments):
        return jax.vjp(function, *arguments)[1](cotangent)

    found, expected = jax.jit(lambda *args: (by_form(*args), by_jax(*args)))(cotangent, *leaves())
    for leaf, of_jax in zip(found, expected, strict=True):
        np.testing.assert_allclose(leaf, of_jax, atol=1e-5)


def test_the_weights_of_the_models_have_the_form():
    found, expected = jax.jit(lambda *pair: (of_the_model(*pair), standard(*pair)))(*leaves())
    np.testing.assert_allclose(found, expected, atol=1e-6)


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
    assert form_of(function, leaves()) is None


def by_factors(monkeypatch):
    """Traces the forms of a GPU, where norms follow from factors."""
    monkeypatch.setattr(clipped_sums, "choose_method", lambda *_: "factors")
    return forms.traced_for("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_gradient_that_the_weight_takes_away_keeps_its_bound(platform, monkeypatch):
    """The data are the kernel itself, so only the gradient of the gain is left.

    The twin leaves out what the standardisation takes away. Its norm is many times as long.
    """
    rng = np.random.default_rng(0)
    kernel = np.float32(0.01 * rng.normal(size=(3, 3, 8, 16)))
    params = {"gain": np.ones(16, np.float32), "kernel": kernel}
    batch = np.ones((2, 16, 24, 8), np.float32)
    batch[0] = 0
    batch[0, 4:7, 4:7] = 100 * (kernel[..., 0] - kernel[..., 0].mean())

    def loss(params, x):
        return tpu_forms.standardised_outputs(params, x)[0, 5, 2, 0]

    clipped = jaxdp.clipped_grad(loss, clip_norm=0.5)
    with tpu_forms.on_a_tpu() if platform == "tpu" else by_factors(monkeypatch):
        result = jax.device_get(clipped(params, batch, mask=np.arange(2) == 0))
        low_rank = channel_weights.low_rank

        def without_squares(*arguments):
            terms, added, *bounds = low_rank(*arguments)
            return terms, 0 * added, *bounds

        monkeypatch.setattr(channel_weights, "low_rank", without_squares)
        twin = jaxdp.clipped_grad(lambda *args: loss(*args), clip_norm=0.5)
        too_long = twin(params, batch, mask=np.arange(2) == 0).norms
    exact = np.linalg.norm(tpu_forms.gradients(loss, params, batch), axis=1)[0]
    # What is taken away was multiplied with eight or eleven bits, and the norm covers what they
    # lack.
    assert 0.97 * exact < result.norms[0] < 2 * exact
    assert 0.25 < np.linalg.norm(tpu_forms.flat(result.grads)) <= 0.5 * (1 + 2**-8)
    assert too_long[0] > 5 * exact


# The size of the kernel's entries, the constant of the weight, the size of the data, and the bound.
SIZES = [(1e-19, 1e20, 1e10, 1e-6), (1e15, 1e-35, 1e-3, 1e-6)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "constant", "of_data", "clip_norm"), SIZES)
def test_vectors_of_any_size_are_part_of_the_norm(size, constant, of_data, clip_norm, monkeypatch):
    """The squares of the kernel, or of its multiple in the gradient, leave the range of float32."""
    rng = np.random.default_rng(1)
    units = rng.normal(size=(*ROWS, 1))
    data = np.stack([units[..., 0], rng.normal(size=ROWS)])
    params = {"kernel": np.float32(size * units)}
    batch = np.float32(of_data * data)

    def loss(params, x):
        kernel = params["kernel"]
        squares = jnp.square(kernel).sum((0, 1, 2), keepdims=True)
        numbers = ("NHWC", "HWIO", "NHWC")
        weight = kernel * (constant * squares)
        return jax.lax.conv_general_dilated(
            x[None], weight, (1, 1), "VALID", dimension_numbers=numbers
        ).sum()

    clipped = jaxdp.clipped_grad(loss, clip_norm=clip_norm)
    with by_factors(monkeypatch), jax.default_matmul_precision("highest"):
        results = [clipped(params, batch, mask=np.arange(2) == i) for i in range(2)]
    for result in results:
        length = np.linalg.norm(tpu_forms.flat(result.grads))
        np.testing.assert_allclose(length, clip_norm, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_channels_that_are_not_those_of_the_outputs(platform, monkeypatch):
    """The last axis of the kernel is that of the inputs, of the same length."""
    rng = np.random.default_rng(1)
    params = {"kernel": np.float32(rng.normal(size=(3, 3, 8, 8)))}
    batch = np.float32(rng.normal(size=(2, 5, 4, 8)))

    def loss(params, x):
        numbers = ("NHWC", "HWOI", "NHWC")
        weight = weighted(params["kernel"], None)
        out = jax.lax.conv_general_dilated(
            x[None], weight, (1, 1), "SAME", dimension_numbers=numbers
        )
        return jnp.square(jnp.tanh(out)).sum()

    clipped = jaxdp.clipped_grad(loss, clip_norm=0.5)
    choose = clipped_sums.choose_method
    monkeypatch.setattr(
        clipped_sums,
        "choose_method",
        lambda *args: "factors" if args[-1] else choose(*args),  # the last one is `has_form`
    )
    with tpu_forms.on_a_tpu() if platform == "tpu" else forms.traced_for("cuda"):
        result = clipped(params, batch)
    exact = tpu_forms.gradients(loss, params, batch)
    norms = np.linalg.norm(exact, axis=1)
    np.testing.assert_allclose(result.norms, norms, rtol=0.02)
    expected = (exact * (0.5 / norms)[:, None]).sum(0)
    np.testing.assert_allclose(tpu_forms.flat(result.grads), expected, atol=0.01)


@pytest.mark.slow
def test_bfloat16_under_strict_promotion(monkeypatch):
    """A kernel of float32 is standardised, and multiplied in bfloat16."""
    rng = np.random.default_rng(1)
    kernel, gain = leaves()
    params = {"gain": gain, "kernel": kernel}
    batch = jnp.asarray(rng.normal(size=(2, 5, 4, ROWS[-1])), jnp.bfloat16)

    def loss(params, x):
        weight = standard(params["kernel"], params["gain"]).astype(x.dtype)
        numbers = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(
            x[None], weight, (1, 1), "SAME", dimension_numbers=numbers
        )
        return jnp.square(jnp.tanh(out)).sum()

    clipped = jaxdp.clipped_grad(loss, clip_norm=0.5)
    with by_factors(monkeypatch), jax.numpy_dtype_promotion("strict"):
        result = clipped(params, batch)
    norms = np.linalg.norm(tpu_forms.gradients(loss, params, batch), axis=1)
    np.testing.assert_allclose(result.norms, norms, rtol=0.03)


@pytest.mark.slow
def test_a_constant_of_the_loss_leaves_the_form(monkeypatch):
    """The weight does not read the array by which the outputs are multiplied."""
    kernel, gain = leaves()
    params = {"gain": gain, "kernel": kernel}
    rng = np.random.default_rng(1)
    batch = np.float32(rng.normal(size=(2, *ROWS)))
    of_outputs = np.float32(rng.normal(size=CHANNELS))
    traced = []
    low_rank = channel_weights.low_rank
    monkeypatch.setattr(
        channel_weights, "low_rank", lambda *args: traced.append(args) or low_rank(*args)
    )

    def loss(params, x):
        weight = standard(params["kernel"], params["gain"])
        numbers = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(
            x[None], weight, (1, 1), "VALID", dimension_numbers=numbers
        )
        return (out * jnp.broadcast_to(of_outputs.astype(out.dtype), out.shape)).sum()

    clipped = jaxdp.clipped_grad(loss, clip_norm=0.5)
    with by_factors(monkeypatch), jax.default_matmul_precision("highest"):
        result = clipped(params, batch)
    norms = np.linalg.norm(tpu_forms.gradients(loss, params, batch), axis=1)
    np.testing.assert_allclose(result.norms, norms, rtol=1e-4)
    assert len(traced) == 1
