import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.audit.representations import psnr, ssim
from jaxdp.data import bundled


def pairs(height: int = 13, width: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Three colour images and what noise of growing strength makes of them; the last pair is unrelated."""
    rng = np.random.default_rng(0)
    references = rng.uniform(size=(3, height, width, 2))
    noise = rng.normal(size=references.shape) * np.array([0.01, 0.1, 1.0])[:, None, None, None]
    images = np.clip(references + noise, 0, 1)
    images[2] = 1 - references[2]
    return images.astype(np.float32), references.astype(np.float32)


def by_windows(x: np.ndarray, y: np.ndarray, window: str) -> float:
    """SSIM of two images [H, W, C], one window after the other, in float64."""
    if window == "uniform7":
        weights, unbiased = np.full((7, 7), 1 / 49), 49 / 48
    else:
        square = np.add.outer(np.arange(-5, 6) ** 2, np.arange(-5, 6) ** 2)
        weights, unbiased = np.exp(-square / 4.5) / np.exp(-square / 4.5).sum(), 1.0
    taps = len(weights)
    height, width, channels = x.shape
    found = []
    for i, j, c in np.ndindex(height - taps + 1, width - taps + 1, channels):
        a, b = (np.float64(z[i : i + taps, j : j + taps, c]) for z in (x, y))
        mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
        variance_a, variance_b = ((weights * (z - m) ** 2).sum() * unbiased for z, m in ((a, mean_a), (b, mean_b)))
        covariance = (weights * (a - mean_a) * (b - mean_b)).sum() * unbiased
        found.append(
            (2 * mean_a * mean_b + 1e-4)
            * (2 * covariance + 9e-4)
            / ((mean_a**2 + mean_b**2 + 1e-4) * (variance_a + variance_b + 9e-4))
        )
    return float(np.mean(found))


@pytest.mark.parametrize("window", ["gaussian11", "uniform7"])
def test_ssim_is_the_formula_in_every_window(window):
    images, references = pairs()
    expected = [by_windows(x, y, window) for x, y in zip(images, references, strict=True)]
    assert expected[0] > 0.99 > expected[1] > 0.5 > 0 > expected[2]
    found = ssim(images, references, window=window)
    assert found.shape == (3,) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_ssim_agrees_with_scikit_image():
    from skimage import metrics

    images, references = pairs()
    gaussian = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    for window, options in (("gaussian11", gaussian), ("uniform7", {})):
        expected = [
            metrics.structural_similarity(np.float64(x), np.float64(y), data_range=1, channel_axis=-1, **options)
            for x, y in zip(images, references, strict=True)
        ]
        np.testing.assert_allclose(ssim(images, references, window=window), expected, atol=1e-5)


def test_ssim_of_digits_has_small_windows_only():
    digits = np.asarray(bundled("digits").gather(np.arange(4))["image"], np.float32)
    np.testing.assert_allclose(ssim(digits, digits, window="uniform7"), 1, rtol=1e-6)
    expected = [by_windows(x, y, "uniform7") for x, y in zip(digits, digits[::-1], strict=True)]
    np.testing.assert_allclose(ssim(digits, digits[::-1], window="uniform7"), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"images of 8x8 .* window='gaussian11'. Use window='uniform7'"):
        ssim(digits, digits)
    with pytest.raises(ValueError, match=r"images of 6x8 .* window='uniform7'. SSIM needs at least 7x7 pixels"):
        ssim(digits[:, 2:], digits[:, 2:], window="uniform7")


def test_psnr_is_the_formula_and_infinite_for_equal_images():
    images, references = pairs()
    images[1] = references[1]
    squares = (np.float64(images) - references) ** 2
    found = psnr(images, references)
    assert found.shape == (3,) and found.dtype == jnp.float32
    np.testing.assert_allclose(found[::2], -10 * np.log10(squares.mean((1, 2, 3))[::2]), rtol=1e-5)
    assert found[1] == np.inf
    np.testing.assert_allclose(psnr(0 * images, 0 * images + np.float32(0.1)), 20, rtol=1e-5)


@pytest.mark.parametrize("metric", [ssim, psnr])
def test_metrics_refuse_what_are_no_two_batches_of_images(metric):
    images, references = pairs()
    with pytest.raises(ValueError, match=r"both be \[n, H, W, C\] of one shape, got \(13, 12, 2\)"):
        metric(images[0], references[0])
    with pytest.raises(ValueError, match=r"of one shape, got \(3, 13, 12, 2\) and \(3, 13, 12, 1\)"):
        metric(images, references[..., :1])
    with pytest.raises(TypeError, match=r"references must be floating point in .* got uint8. Divide uint8 by 255"):
        metric(images, references.astype(np.uint8))


def test_ssim_refuses_an_unknown_window():
    with pytest.raises(ValueError, match=r"window must be one of \('gaussian11', 'uniform7'\), got 'gaussian'"):
        ssim(*pairs(), window="gaussian")


def test_a_second_call_compiles_nothing(caplog):
    images, references = pairs()
    ssim(images, references)
    psnr(images, references)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        ssim(references, images)
        psnr(references, images)
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
