"""How close reconstructed images are to the originals: SSIM and PSNR, per image."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

_GAUSSIAN = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
# One-dimensional weights, and the factor of variances: 49 / 48 makes those of 49 equal weights unbiased.
_WINDOWS = {"gaussian11": (_GAUSSIAN / _GAUSSIAN.sum(), 1.0), "uniform7": (np.full(7, 1 / 7), 49 / 48)}
_C1, _C2 = 0.01**2, 0.03**2


@functools.partial(jax.jit, static_argnames="window")
def ssim(
    images: jax.Array, references: jax.Array, *, window: Literal["gaussian11", "uniform7"] = "gaussian11"
) -> jax.Array:
    """Structural similarity (Wang et al. 2004, Eq. 13), the mean over windows and channels; data range 1.

    Only windows that lie inside the image count.

    Args:
      images: floating point [n, H, W, C] in [0, 1].
      references: of the same shape and range.
      window: "gaussian11", the paper's 11x11 Gaussian of standard deviation 1.5, or "uniform7", scikit-image's default,
        7x7 equal weights and unbiased variances.

    Returns:
      [n] in [-1, 1], 1 for equal images; float32, float64 for float64.

    Raises:
      TypeError: images or references are not floating point.
      ValueError: not [n, H, W, C] both, of one shape; unknown window; images smaller than the window.
    """
    x, y = _pair(images, references)
    if window not in _WINDOWS:
        raise ValueError(f"window must be one of {tuple(_WINDOWS)}, got {window!r}")
    weights, unbiased = _WINDOWS[window]
    height, width = x.shape[1:3]
    if min(height, width) < len(weights):
        smaller = [name for name, (taps, _) in _WINDOWS.items() if len(taps) <= min(height, width)]
        remedy = f"use window={smaller[0]!r}" if smaller else "SSIM needs at least 7x7 pixels; use psnr"
        raise ValueError(f"images of {height}x{width} pixels are smaller than window={window!r}; {remedy}")
    rows, columns = (jnp.asarray(_band(weights, size), x.dtype) for size in (height, width))
    moments = jnp.einsum(
        "ih,snhwc,jw->snijc", rows, jnp.stack([x, y, x * x, y * y, x * y]), columns, precision="highest"
    )
    mean_x, mean_y = moments[:2]
    variance_x, variance_y, covariance = unbiased * (
        moments[2:] - jnp.stack([mean_x * mean_x, mean_y * mean_y, mean_x * mean_y])
    )
    similarity = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    similarity *= (2 * covariance + _C2) / (variance_x + variance_y + _C2)
    return similarity.mean((1, 2, 3))


@jax.jit
def psnr(images: jax.Array, references: jax.Array) -> jax.Array:
    """Peak signal-to-noise ratio in decibels for a peak of 1: -10 log10 of the mean squared error of an image.

    Args:
      images: floating point [n, H, W, C] in [0, 1].
      references: of the same shape and range.

    Returns:
      [n], infinite for equal images; float32, float64 for float64.

    Raises:
      TypeError: images or references are not floating point.
      ValueError: not [n, H, W, C] both, of one shape.
    """
    x, y = _pair(images, references)
    return -10 * jnp.log10(jnp.mean((x - y) ** 2, axis=(1, 2, 3)))


def _pair(images: jax.Array, references: jax.Array) -> tuple[jax.Array, jax.Array]:
    if images.ndim != 4 or references.shape != images.shape:
        raise ValueError(
            f"images and references must both be [n, H, W, C] of one shape, got {images.shape} and {references.shape}"
        )
    for name, value in (("images", images), ("references", references)):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point in [0, 1], got {value.dtype}; divide uint8 by 255")
    dtype = jnp.promote_types(jnp.promote_types(images.dtype, references.dtype), jnp.float32)
    return images.astype(dtype), references.astype(dtype)


def _band(weights: np.ndarray, size: int) -> np.ndarray:
    """[size - taps + 1, size]: row i weighs the window that starts at i."""
    return sum(weight * np.eye(size - len(weights) + 1, size, k) for k, weight in enumerate(weights))
