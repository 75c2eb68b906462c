"""A linear head on the scattering coefficients of Bruna and Mallat 2013, arXiv:1203.1513.

The coefficients are averages of moduli of Morlet wavelets. Nothing in them is learned, so they need
no public images. Tramer and Boneh 2021 (arXiv:2011.11660) train their head with DP-SGD.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.layers import Dense


def morlet(
    size: int,
    *,
    scale: int,
    angle: float,
    angles: int,
) -> np.ndarray:
    """Returns the wavelet g(u) (exp(i k.u) - beta) on a torus, complex128 [size, size], with sum 0.

    The Gaussian g has the standard deviation 0.8 * 2**scale along the wave and angles / 4 times
    that across it. The wave number is 3 pi / 4 / 2**scale. The origin is at [0, 0].
    """
    deviation = 0.8 * 2**scale
    slant = 4 / angles
    # The points of the torus with their copies up to two periods away.
    coordinates = np.arange(-2 * size, 3 * size, dtype=np.float64)
    rows = coordinates[:, None]
    columns = coordinates[None, :]
    along = rows * math.cos(angle) + columns * math.sin(angle)
    across = columns * math.cos(angle) - rows * math.sin(angle)
    squares = along**2 + slant**2 * across**2
    variance = deviation**2
    heights = np.exp(-squares / (2 * variance))
    gaussian = heights * slant / (2 * math.pi * variance)
    wave_number = 0.75 * math.pi / 2**scale
    carrier = np.exp(1j * wave_number * along)
    wave = _wrapped(gaussian * carrier)
    envelope = _wrapped(gaussian)
    beta = wave.sum() / envelope.sum()  # makes the sum 0
    return wave - beta * envelope


def _wrapped(values: np.ndarray) -> np.ndarray:
    """Adds up the copies of each point of the torus, [5 n, 5 n] to [n, n]."""
    size = len(values) // 5
    return values.reshape(5, size, 5, size).sum((0, 2))


@functools.cache
def _averages(side: int, padding: int, scales: int) -> np.ndarray:
    """Returns the matrix of Gaussian averages along an axis.

    It is [side / 2**scales, side + 2 padding].
    """
    size = side + 2 * padding
    stride = 2**scales
    deviation = 0.8 * 2 ** (scales - 1)
    units = np.arange(-2 * size, 3 * size) / deviation
    heights = np.exp(-(units**2) / 2)
    gaussian = heights / (math.sqrt(2 * math.pi) * deviation)
    kernel = gaussian.reshape(5, size).sum(0)  # on the circle
    centres = padding + stride * np.arange(side // stride)
    distances = centres[:, None] - np.arange(size)
    return kernel[distances % size]


@functools.cache
def _wavelets(size: int, scale: int, angles: int) -> np.ndarray:
    """Returns the Fourier transforms [angles, size, size] of the wavelets of a scale."""
    transforms = []
    for k in range(angles):
        angle = np.pi * k / angles
        wavelet = morlet(size, scale=scale, angle=angle, angles=angles)
        transform = np.fft.fft2(wavelet)
        transforms.append(transform.real)  # The imaginary part is zero.
    return np.stack(transforms)


def scattering(images: jax.Array, *, scales: int = 2, angles: int = 8) -> jax.Array:
    """Returns the scattering coefficients of order 0, 1 and 2 of each channel.

    Args:
      images: float32 [B, N, N, C]. 2**scales divides N. Edges are reflected by 2**scales pixels.
      scales: J, the number of scales of the wavelets.
      angles: L, the number of their directions.

    Returns:
      float32 [B, N / 2**J, N / 2**J, C, K] with K = 1 + J L + J (J - 1) / 2 L**2. Order 0 is the
      average of the image, order 1 that of |x * psi_1|, and order 2 that of ||x * psi_1| * psi_2|
      with a coarser psi_2. Averages are Gaussian with a standard deviation of 0.8 * 2**(J - 1)
      pixels. Coefficients of order 1 and 2 are sampled at every 2**j pixels before the modulus, at
      the scale j of their last wavelet.

    Raises:
      ValueError: The images are not square, or 2**scales does not divide their side.
    """
    _, side, width, _ = images.shape
    pad = 2**scales
    if width != side or side % pad:
        raise ValueError(
            f"images must be square with a side that {pad} divides, got {side}x{width}. Resize "
            "them, or choose fewer scales."
        )
    channels_first = jnp.moveaxis(images, -1, 1)
    edges = ((0, 0), (0, 0), (pad, pad), (pad, pad))
    padded = jnp.pad(channels_first, edges, "reflect")
    zeroth = padded[:, :, None]  # [B, C, paths, pixels, pixels]
    first = [_modulus(zeroth, 0, scale, angles) for scale in range(scales)]
    second = []
    for scale in range(scales):
        for coarser in range(scale + 1, scales):
            moduli = _modulus(first[scale], scale, coarser, angles)
            second.append(moduli)
    averaged = [_average(paths, side, pad, scales) for paths in (zeroth, *first, *second)]
    coefficients = jnp.concatenate(averaged, 2)
    return jnp.moveaxis(coefficients, (1, 2), (3, 4))


def _modulus(
    signal: jax.Array,
    sampled: int,
    scale: int,
    angles: int,
) -> jax.Array:
    """Returns |signal * psi| at every 2**scale pixels, for each path and angle.

    The signal has every 2**sampled pixels.
    """
    size = signal.shape[-1]
    # Sampling every n-th pixel folds a Fourier transform n times, that of a wavelet too.
    fold = 2**sampled
    step = 2 ** (scale - sampled)
    wavelets = _wavelets(size * fold, scale, angles)
    copies = wavelets.reshape(angles, fold, size, fold, size)
    multipliers = jnp.asarray(copies.sum((1, 3)), jnp.float32)
    transform = jnp.fft.fft2(signal)[:, :, :, None]
    spectrum = transform * multipliers[None, None, None]
    new_size = size // step
    *leading, _, _ = spectrum.shape
    folds = spectrum.reshape(*leading, step, new_size, step, new_size)
    folded = folds.sum((-4, -2)) / step**2
    samples = jnp.fft.ifft2(folded)
    moduli = jnp.abs(samples)
    batch, channels, *_ = moduli.shape
    return moduli.reshape(batch, channels, -1, new_size, new_size)


def _average(
    paths: jax.Array,
    side: int,
    padding: int,
    scales: int,
) -> jax.Array:
    """Returns Gaussian averages of sampled paths at every 2**scales pixels of the image."""
    step = (side + 2 * padding) // paths.shape[-1]
    averages = _averages(side, padding, scales)
    # Sums over every step-th pixel, with step times the weights, stand for those over all pixels.
    sampled = step * averages[:, ::step]
    matrix = jnp.asarray(sampled, jnp.float32)
    return jnp.einsum("ih,bcphw,jw->bcpij", matrix, paths, matrix)


class Scattering(nn.Module):
    """A linear head on scattering coefficients, with groups of channels normalised in each image.

    The input of the head has an L2 norm of at most 1.

    Attributes:
      num_classes: The number of logits.
      scales, angles: As in `scattering`.
      groups: The number of groups, a divisor of the number of channels C K. 27 is that of Tramer
          and Boneh.
      dtype: The computation dtype of the head. None is float32, as that of the coefficients.
    """

    num_classes: int
    scales: int = 2
    angles: int = 8
    groups: int = 27
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, N, N, C] to logits [B, num_classes]."""
        coefficients = scattering(x, scales=self.scales, angles=self.angles)
        *positions, image_channels, kinds = coefficients.shape
        channels = image_channels * kinds
        if channels % self.groups:
            raise ValueError(
                f"groups must divide {channels}, the number of channels, got {self.groups}. "
                "Choose a divisor."
            )
        grouped = coefficients.reshape(*positions, self.groups, -1)
        mean = jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
        var = jnp.var(grouped, axis=(1, 2, 4), keepdims=True)
        standardised = (grouped - mean) * jax.lax.rsqrt(var + 1e-5)
        features = standardised.reshape(len(x), -1)
        # The features have mean square 1 at most, so this bounds their norm by 1.
        features /= math.sqrt(features.shape[-1])
        head = Dense(self.num_classes, dtype=self.dtype, name="head")
        return head(features).astype(jnp.float32)
