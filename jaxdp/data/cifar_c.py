"""CIFAR-10-C's nineteen corruptions, each a function of one image, for images of CIFAR's size.

Definitions and constants follow Hendrycks and Dietterich (ICLR 2019, arXiv:1903.12261;
make_cifar_c.py). Their lengths for 32 x 32 pixels grow with the image. Two slips of the published
images are kept: glass blur overwrites pixels instead of swapping them, and frost uses five of the
six pictures. The motion blur follows ImageMagick's definition.

This module needs the extra "corruptions". `jaxdp.data.corrupt` imports it on first use.
"""

import functools
import importlib.resources
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cv2
import numpy as np
from imagecorruptions.corruptions import clipped_zoom, disk, plasma_fractal
from PIL import Image
from scipy import ndimage
from skimage import color

# Weights of red, green and blue in a pixel's brightness (ITU-R BT.601).
_LUMA = np.array([0.299, 0.587, 0.114])

_global_state = threading.Lock()
_Corruption = Callable[[np.ndarray, Any, np.random.Generator], np.ndarray]
_TABLE: dict[str, tuple[_Corruption, tuple[Any, ...]]] = {}


@contextmanager
def numpy_seeded(rng: np.random.Generator) -> Iterator[None]:
    """Seeds NumPy's global generator from `rng`, for code that draws from it, and restores its
    state.

    Other threads must not draw from the global generator meanwhile. They see the seeded generator.
    """
    with _global_state:
        state = np.random.get_state()
        np.random.seed(rng.integers(2**32, size=4, dtype=np.uint32))
        try:
            yield
        finally:
            np.random.set_state(state)


def apply(image: np.ndarray, name: str, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the corrupted image, uint8 [H, W, 3]. Fractions are dropped as in CIFAR-10-C."""
    function, constants = _TABLE[name]
    corrupted = function(image / 255, constants[severity - 1], rng)
    return (255 * np.clip(corrupted, 0, 1)).astype(np.uint8)


def _severities(*constants: Any) -> Callable[[_Corruption], _Corruption]:
    """Registers the function `_name` as the corruption "name" with its constants for severities 1
    to 5.
    """

    def register(function: _Corruption) -> _Corruption:
        _TABLE[function.__name__[1:]] = (function, constants)
        return function

    return register


# Below, x is float64 [H, W, 3] in [0, 1] and c has the constants of one severity. Results may leave
# [0, 1].


@_severities(0.04, 0.06, 0.08, 0.09, 0.10)
def _gaussian_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return x + rng.normal(scale=c, size=x.shape)


@_severities(500, 250, 100, 75, 50)
def _shot_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return rng.poisson(c * x) / c


@_severities(0.01, 0.02, 0.03, 0.05, 0.07)
def _impulse_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    chance = rng.random(x.shape)
    return np.where(chance < c / 2, 0, np.where(chance < c, 1, x))


@_severities(0.06, 0.1, 0.12, 0.16, 0.2)
def _speckle_noise(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return x * (1 + rng.normal(scale=c, size=x.shape))


@_severities(0.4, 0.6, 0.7, 0.8, 1)
def _gaussian_blur(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return ndimage.gaussian_filter(x, (c, c, 0), mode="nearest")


@_severities((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
def _defocus_blur(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    radius, antialias = c
    return cv2.filter2D(x, -1, disk(radius=radius, alias_blur=antialias))


@_severities((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
def _glass_blur(x: np.ndarray, c: tuple[float, int, int], rng: np.random.Generator) -> np.ndarray:
    """Copies nearby pixels one after the other from the lower right, between two blurs."""
    sigma, reach, rounds = c
    height, width, _ = x.shape
    blurred = np.floor(255 * _gaussian_blur(x, sigma, rng)) / 255
    row, column = np.mgrid[height - reach : reach : -1, width - reach : reach : -1].reshape(2, -1)
    here = np.tile(row * width + column, rounds)
    down, right = rng.integers(-reach, reach, size=(2, here.size))
    source = list(range(height * width))
    for a, b in zip(here.tolist(), (here + down * width + right).tolist(), strict=True):
        source[a] = source[b]
    return _gaussian_blur(blurred.reshape(-1, 3)[source].reshape(x.shape), sigma, rng)


@_severities((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
def _motion_blur(x: np.ndarray, c: tuple[int, float], rng: np.random.Generator) -> np.ndarray:
    return _blur_along(x, *c, rng.uniform(-45, 45))


def _blur_along(x: np.ndarray, radius: int, sigma: float, degrees: float) -> np.ndarray:
    """Averages 2 radius + 1 pixels ahead in one direction with half a Gaussian as weights. x is [H,
    W(, C)].
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    angle = np.deg2rad(degrees)
    down, right = np.ceil(np.outer([np.sin(angle), np.cos(angle)], steps) - 0.5).astype(int)
    kernel = np.zeros((4 * radius + 1, 4 * radius + 1))
    np.add.at(kernel, (2 * radius + down, 2 * radius + right), weights / weights.sum())
    return cv2.filter2D(x, -1, kernel, borderType=cv2.BORDER_REPLICATE)


@_severities(1.06, 1.11, 1.16, 1.21, 1.26)
def _zoom_blur(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    height, width, _ = x.shape
    zoomed = [clipped_zoom(x, factor)[:height, :width] for factor in np.arange(1, c, 0.01)]
    return np.mean([x, *zoomed], axis=0)


@_severities(
    (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
def _snow(x: np.ndarray, c: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
    mean, deviation, zoom, threshold, radius, sigma, keep = c
    height, width, _ = x.shape
    flakes = clipped_zoom(rng.normal(mean, deviation, (height, width, 1)), zoom)[:height, :width, 0]
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))
    flakes = _blur_along(flakes, int(radius), sigma, rng.uniform(-135, -45))[..., None]
    whitened = np.maximum(x, 1.5 * (x @ _LUMA)[..., None] + 0.5)
    return keep * x + (1 - keep) * whitened + flakes + flakes[::-1, ::-1]


@functools.cache
def _frost_pictures(side: int) -> list[np.ndarray]:
    """Returns the library's frost pictures for images of this side, at a fifth of their size for 32
    pixels.
    """
    folder = importlib.resources.files("imagecorruptions") / "frost"
    pictures = []
    for name in ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"):
        with Image.open(io.BytesIO((folder / name).read_bytes())) as picture:
            rgb = np.asarray(picture.convert("RGB"))
        pictures.append(cv2.resize(rgb, None, fx=0.2 * side / 32, fy=0.2 * side / 32) / 255)
    return pictures


@_severities((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
def _frost(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    height, width, _ = x.shape
    pictures = _frost_pictures(max(height, width))
    picture = pictures[rng.integers(len(pictures))]
    top, left = rng.integers(picture.shape[0] - height), rng.integers(picture.shape[1] - width)
    return c[0] * x + c[1] * picture[top : top + height, left : left + width]


@_severities((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
def _fog(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    amount, decay = c
    height, width, _ = x.shape
    with numpy_seeded(rng):
        cloud = plasma_fractal(
            mapsize=1 << (max(height, width) - 1).bit_length(), wibbledecay=decay
        )
    return (x + amount * cloud[:height, :width, None]) * x.max() / (x.max() + amount)


@_severities(0.05, 0.1, 0.15, 0.2, 0.3)
def _brightness(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    return color.hsv2rgb(np.clip(color.rgb2hsv(x) + np.array([0, 0, c]), 0, 1))


@_severities((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))
def _saturate(x: np.ndarray, c: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    return color.hsv2rgb(
        np.clip(color.rgb2hsv(x) * np.array([1, c[0], 1]) + np.array([0, c[1], 0]), 0, 1)
    )


@_severities(0.75, 0.5, 0.4, 0.3, 0.15)
def _contrast(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    mean = x.mean(axis=(0, 1), keepdims=True)
    return mean + c * (x - mean)


@_severities(
    (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
)
def _elastic_transform(x: np.ndarray, c: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
    """Applies an affine map that moves three points at random, then smooth random shifts of every
    pixel.
    """
    height, width, _ = x.shape
    side = min(height, width)
    strength, sigma, jitter = np.multiply(c, side)
    points = np.array([width // 2, height // 2]) + side // 3 * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = points + rng.uniform(-jitter, jitter, points.shape)
    affine = cv2.getAffineTransform(points.astype(np.float32), moved.astype(np.float32))
    x = cv2.warpAffine(x, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    shifts = [
        strength
        * ndimage.gaussian_filter(
            rng.uniform(-1, 1, (height, width)), sigma, mode="reflect", truncate=3
        )
        for _ in range(2)
    ]
    target = np.mgrid[:height, :width] + shifts
    return np.stack(
        [ndimage.map_coordinates(x[..., k], target, order=1, mode="reflect") for k in range(3)],
        axis=-1,
    )


@_severities(0.95, 0.9, 0.85, 0.75, 0.65)
def _pixelate(x: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    height, width, _ = x.shape
    small = _picture(x).resize((int(width * c), int(height * c)), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX)) / 255


@_severities(80, 65, 58, 50, 40)
def _jpeg_compression(x: np.ndarray, c: int, rng: np.random.Generator) -> np.ndarray:
    file = io.BytesIO()
    _picture(x).save(file, "JPEG", quality=c)
    return np.asarray(Image.open(file)) / 255


def _picture(x: np.ndarray) -> Image.Image:
    return Image.fromarray(np.rint(255 * x).astype(np.uint8))


@_severities(
    (0.62, 0.1, 0.7, 0.7, 0.5, 0),
    (0.65, 0.1, 0.8, 0.7, 0.5, 0),
    (0.65, 0.3, 1, 0.69, 0.5, 0),
    (0.65, 0.1, 0.7, 0.69, 0.6, 1),
    (0.65, 0.1, 0.5, 0.68, 0.6, 1),
)
def _spatter(x: np.ndarray, c: tuple[float, ...], rng: np.random.Generator) -> np.ndarray:
    """Adds drops of water lit from one side (pale turquoise), or of mud (brown) where the constants
    end in 1.
    """
    mean, deviation, sigma, threshold, strength, mud = c
    liquid = ndimage.gaussian_filter(
        rng.normal(mean, deviation, x.shape[:2]), sigma, mode="nearest"
    )
    if mud:
        amount = ndimage.gaussian_filter(
            np.where(liquid > threshold, 1.0, 0.0), strength, mode="nearest"
        )
        amount = np.where(amount < 0.8, 0, amount)[..., None]
        return x * (1 - amount) + amount * np.array([63, 42, 20]) / 255
    liquid = (255 * np.clip(np.where(liquid < threshold, 0, liquid), 0, 1)).astype(np.uint8)
    to_edge = cv2.distanceTransform(255 - cv2.Canny(liquid, 50, 150), cv2.DIST_L2, 5)
    light = cv2.equalizeHist(cv2.blur(np.minimum(to_edge, 20), (3, 3)).astype(np.uint8))
    relief = cv2.filter2D(light, cv2.CV_8U, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]))
    amount = liquid * cv2.blur(relief, (3, 3)).astype(float)
    return (
        x + strength * (amount / max(amount.max(), 1))[..., None] * np.array([175, 238, 238]) / 255
    )
