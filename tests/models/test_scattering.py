"""Scattering coefficients against sums in float64, pixel by pixel, without any Fourier
transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import models


def convolved(signal, kernel):
    """Returns the circular convolution: every pixel spreads the kernel around itself."""
    out = np.zeros(signal.shape, np.result_type(signal, kernel))
    for (row, column), value in np.ndenumerate(signal):
        out += value * np.roll(kernel, (row, column), (0, 1))
    return out


def wavelet(size, scale, angle, angles):
    """Returns the definition, summed over copies of the plane."""
    out, envelope = np.zeros((size, size), complex), np.zeros((size, size))
    deviation = 0.8 * 2**scale
    for row in range(-3 * size, 3 * size):
        for column in range(-3 * size, 3 * size):
            along = row * np.cos(angle) + column * np.sin(angle)
            across = column * np.cos(angle) - row * np.sin(angle)
            g = np.exp(-(along**2 + (4 / angles * across) ** 2) / (2 * deviation**2))
            g *= 4 / angles / (2 * np.pi * deviation**2)
            envelope[row % size, column % size] += g
            out[row % size, column % size] += g * np.exp(1j * along * 3 * np.pi / 4 / 2**scale)
    return out - envelope * out.sum() / envelope.sum()


def expected(image, scales, angles):
    """Returns the coefficients [K, n, n] of one channel."""
    pad = 2**scales
    x = np.pad(image, pad, "reflect")
    size = len(x)
    psi = [
        [wavelet(size, j, np.pi * k / angles, angles) for k in range(angles)] for j in range(scales)
    ]
    # the Gaussian is 0 beyond half the torus
    distance = np.minimum(np.arange(size), size - np.arange(size))
    gauss = np.exp(-(distance**2) / (2 * (0.8 * 2 ** (scales - 1)) ** 2))
    gauss /= np.sqrt(2 * np.pi) * 0.8 * 2 ** (scales - 1)
    low = np.outer(gauss, gauss)

    def coarse(signal, every):  # moduli are known at every 2**j pixels
        held = np.zeros_like(signal)
        held[::every, ::every] = signal[::every, ::every]
        return every**2 * held

    def average(signal):
        return convolved(signal, low)[pad:-pad:pad, pad:-pad:pad]

    first = [[coarse(np.abs(convolved(x, p)), 2**j) for p in psi[j]] for j in range(scales)]
    found = [average(x), *(average(u) for row in first for u in row)]
    for j in range(scales):
        for k in range(j + 1, scales):
            found += [
                average(coarse(np.abs(convolved(u, p)), 2**k)) for u in first[j] for p in psi[k]
            ]
    return np.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "scales", "angles"), [(8, 2, 3), (8, 1, 2)])
def test_coefficients_are_those_of_the_definition(side, scales, angles):
    """Catches a wrong wave number, width, angle, order of paths, padding, offset, or scale of a
    sampled signal."""
    images = np.random.default_rng(0).random((2, side, side, 2))
    scattering = jax.jit(functools.partial(models.scattering, scales=scales, angles=angles))
    found = np.asarray(scattering(jnp.asarray(images, jnp.float32)))
    for b, c in ((0, 1), (1, 0)):
        np.testing.assert_allclose(
            np.moveaxis(found[b, ..., c, :], -1, 0),
            expected(images[b, ..., c], scales, angles),
            atol=3e-4,
        )


def test_a_wavelet_has_sum_zero_and_turns_with_its_angle():
    upright, turned = (
        models.morlet(12, scale=1, angle=angle, angles=8) for angle in (0.0, np.pi / 2)
    )
    np.testing.assert_allclose(upright.sum(), 0, atol=1e-12)
    np.testing.assert_allclose(turned, upright.T, atol=1e-12)
    assert np.abs(upright - upright.T).max() > 0.01


@pytest.mark.slow
def test_the_model_normalises_groups_of_each_image_and_has_only_a_head():
    model = models.create("scattering", num_classes=3, scales=1, angles=2, groups=3)
    images = jnp.asarray(np.random.default_rng(1).random((3, 4, 4, 1)), jnp.float32)
    params = jax.jit(model.init)(jax.random.key(0), images)["params"]
    assert list(params) == ["head"] and params["head"]["kernel"].shape == (2 * 2 * 3, 3)
    public = models.Pretrained(model, params, models.Preprocessing(size=4, mean=(0.0,), std=(1.0,)))
    inputs = jax.jit(functools.partial(models.head_inputs, public))
    features = np.asarray(inputs(images))
    scattering = jax.jit(functools.partial(models.scattering, scales=1, angles=2))
    coefficients = np.asarray(scattering(images)).reshape(3, 4, 3).astype(np.float64)
    wanted = coefficients - coefficients.mean(1, keepdims=True)
    wanted /= np.sqrt((wanted**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(features, wanted.reshape(3, -1) / np.sqrt(12), atol=1e-5)
    assert (np.linalg.norm(features, axis=1) <= 1).all()
    np.testing.assert_allclose(inputs(images[1:2])[0], features[1], atol=1e-6)


def test_images_and_groups_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match="images must be square with a side that 4 divides, got 6x6"
    ):
        models.scattering(jnp.zeros((1, 6, 6, 1)))
    with pytest.raises(ValueError, match="groups must divide 3, the number of channels, got 2"):
        models.create("scattering", num_classes=3, scales=1, angles=2, groups=2).init(
            jax.random.key(0), jnp.zeros((1, 4, 4, 1))
        )
