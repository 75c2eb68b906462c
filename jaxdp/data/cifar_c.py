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
from collections.abc import Callable, Iterator, Sequence
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
_BROWN = np.array([63, 42, 20]) / 255
_TURQUOISE = np.array([175, 238, 238])
# A filter that lights edges from one side.
_EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])

# One thread at a time: NumPy's generator is global.
_global_state = threading.Lock()
Pixels = np.ndarray
Rng = np.random.Generator
_Corruption = Callable[[Pixels, Any, Rng], Pixels]
_TABLE: dict[str, tuple[_Corruption, tuple[Any, ...]]] = {}


@contextmanager
def numpy_seeded(rng: Rng) -> Iterator[None]:
    """Seeds NumPy's global generator from `rng`, for code that draws from it.

    The state of the global generator is restored afterwards. Other threads must not draw from it
    meanwhile. They see the seeded generator.
    """
    with _global_state:
        state = np.random.get_state()
        np.random.seed(rng.integers(2**32, size=4, dtype=np.uint32))
        try:
            yield
        finally:
            np.random.set_state(state)


def apply(
    image: Pixels,
    name: str,
    severity: int,
    rng: Rng,
) -> Pixels:
    """Returns the corrupted image, uint8 [H, W, 3]. Fractions are dropped as in CIFAR-10-C."""
    corruption, constants = _TABLE[name]
    corrupted = corruption(image / 255, constants[severity - 1], rng)
    return (255 * np.clip(corrupted, 0, 1)).astype(np.uint8)


def _severities(*constants: Any) -> Callable[[_Corruption], _Corruption]:
    """Registers `_name` as the corruption "name", with its constants for severities 1 to 5."""

    def register(corruption: _Corruption) -> _Corruption:
        _TABLE[corruption.__name__[1:]] = (corruption, constants)
        return corruption

    return register


# Below, x is an image, float64 [H, W, 3] in [0, 1]. The argument after it has the constants of one
# severity. Results may leave [0, 1].


@_severities(0.04, 0.06, 0.08, 0.09, 0.10)
def _gaussian_noise(x: Pixels, sigma: float, rng: Rng) -> Pixels:
    return x + rng.normal(scale=sigma, size=x.shape)


@_severities(500, 250, 100, 75, 50)
def _shot_noise(x: Pixels, photons: float, rng: Rng) -> Pixels:
    return rng.poisson(photons * x) / photons


@_severities(0.01, 0.02, 0.03, 0.05, 0.07)
def _impulse_noise(x: Pixels, amount: float, rng: Rng) -> Pixels:
    chance = rng.random(x.shape)
    is_changed = chance < amount
    is_black = chance < amount / 2
    with_white = np.where(is_changed, 1, x)
    return np.where(is_black, 0, with_white)


@_severities(0.06, 0.1, 0.12, 0.16, 0.2)
def _speckle_noise(x: Pixels, sigma: float, rng: Rng) -> Pixels:
    factor = 1 + rng.normal(scale=sigma, size=x.shape)
    return x * factor


@_severities(0.4, 0.6, 0.7, 0.8, 1)
def _gaussian_blur(x: Pixels, sigma: float, rng: Rng) -> Pixels:
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")


@_severities(
    (0.3, 0.4),
    (0.4, 0.5),
    (0.5, 0.6),
    (1, 0.2),
    (1.5, 0.1),
)
def _defocus_blur(x: Pixels, constants: tuple[float, float], rng: Rng) -> Pixels:
    radius, antialias = constants
    kernel = disk(radius=radius, alias_blur=antialias)
    return cv2.filter2D(x, -1, kernel)


@_severities(
    (0.05, 1, 1),
    (0.25, 1, 1),
    (0.4, 1, 1),
    (0.25, 1, 2),
    (0.4, 1, 2),
)
def _glass_blur(x: Pixels, constants: tuple[float, int, int], rng: Rng) -> Pixels:
    """Copies nearby pixels one after the other from the lower right, between two blurs."""
    sigma, reach, rounds = constants
    height, width, _ = x.shape
    # The published code stores the blurred image as uint8 before it copies pixels.
    levels = np.floor(255 * _gaussian_blur(x, sigma, rng))
    row, column = np.mgrid[height - reach : reach : -1, width - reach : reach : -1]
    places = row * width + column
    target = np.tile(places.ravel(), rounds)
    # The upper end is exclusive, as in the published code.
    down, right = rng.integers(-reach, reach, size=(2, target.size))
    neighbour = target + down * width + right
    # A pixel that has been overwritten is copied as it is now, so the order counts.
    origin = list(range(height * width))
    for overwritten, copied in zip(target.tolist(), neighbour.tolist(), strict=True):
        origin[overwritten] = origin[copied]
    pixels = levels.reshape(-1, 3) / 255
    copies = pixels[origin].reshape(x.shape)
    return _gaussian_blur(copies, sigma, rng)


@_severities(
    (6, 1),
    (6, 1.5),
    (6, 2),
    (8, 2),
    (9, 2.5),
)
def _motion_blur(x: Pixels, constants: tuple[int, float], rng: Rng) -> Pixels:
    radius, sigma = constants
    degrees = rng.uniform(-45, 45)
    return _blur_along(x, radius, sigma, degrees)


def _blur_along(
    x: Pixels,
    radius: int,
    sigma: float,
    degrees: float,
) -> Pixels:
    """Averages 2 radius + 1 pixels ahead in one direction, with half a Gaussian as weights.

    x is [H, W, C] or [H, W].
    """
    reach = 2 * radius
    steps = np.arange(reach + 1)
    gaussian = np.exp(-(steps**2) / (2 * sigma**2))
    weights = gaussian / gaussian.sum()
    angle = np.deg2rad(degrees)
    direction = [np.sin(angle), np.cos(angle)]
    offsets = np.ceil(np.outer(direction, steps) - 0.5)
    row, column = reach + offsets.astype(int)
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    np.add.at(kernel, (row, column), weights)
    return cv2.filter2D(x, -1, kernel, borderType=cv2.BORDER_REPLICATE)


@_severities(1.06, 1.11, 1.16, 1.21, 1.26)
def _zoom_blur(x: Pixels, most: float, rng: Rng) -> Pixels:
    factors = np.arange(1, most, 0.01)
    zoomed = [_zoomed(x, factor) for factor in factors]
    return np.mean([x, *zoomed], axis=0)


def _zoomed(x: Pixels, factor: float) -> Pixels:
    """Zooms into the middle, [H, W, C]. The library's result may be a pixel larger."""
    height, width, _ = x.shape
    return clipped_zoom(x, factor)[:height, :width]


@_severities(
    (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
    (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
)
def _snow(x: Pixels, constants: tuple[float, ...], rng: Rng) -> Pixels:
    mean, deviation, zoom, threshold, radius, sigma, keep = constants
    height, width, _ = x.shape
    noise = rng.normal(mean, deviation, (height, width, 1))
    zoomed = _zoomed(noise, zoom)[..., 0]
    flakes = np.where(zoomed < threshold, 0, np.clip(zoomed, 0, 1))
    degrees = rng.uniform(-135, -45)
    falling = _blur_along(flakes, int(radius), sigma, degrees)[..., None]
    turned = falling[::-1, ::-1]
    brightness = (x @ _LUMA)[..., None]
    whitened = np.maximum(x, 1.5 * brightness + 0.5)
    return keep * x + (1 - keep) * whitened + falling + turned


_FROST = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")


@functools.cache
def _frost_pictures(side: int) -> list[Pixels]:
    """Returns the library's frost pictures, at a fifth of their size for images of side 32."""
    folder = importlib.resources.files("imagecorruptions") / "frost"
    scale = 0.2 * side / 32
    pictures = []
    for name in _FROST:
        file = io.BytesIO((folder / name).read_bytes())
        with Image.open(file) as picture:
            rgb = np.asarray(picture.convert("RGB"))
        small = cv2.resize(rgb, None, fx=scale, fy=scale)
        pictures.append(small / 255)
    return pictures


@_severities(
    (1, 0.2),
    (1, 0.3),
    (0.9, 0.4),
    (0.85, 0.4),
    (0.75, 0.45),
)
def _frost(x: Pixels, constants: tuple[float, float], rng: Rng) -> Pixels:
    image_weight, frost_weight = constants
    height, width, _ = x.shape
    pictures = _frost_pictures(max(height, width))
    picture = pictures[rng.integers(len(pictures))]
    top = rng.integers(picture.shape[0] - height)
    left = rng.integers(picture.shape[1] - width)
    window = picture[top : top + height, left : left + width]
    return image_weight * x + frost_weight * window


@_severities(
    (0.2, 3),
    (0.5, 3),
    (0.75, 2.5),
    (1, 2),
    (1.5, 1.75),
)
def _fog(x: Pixels, constants: tuple[float, float], rng: Rng) -> Pixels:
    amount, decay = constants
    height, width, _ = x.shape
    longest = max(height, width)
    power_of_two = 1 << (longest - 1).bit_length()  # the sizes of `plasma_fractal`
    with numpy_seeded(rng):
        plasma = plasma_fractal(mapsize=power_of_two, wibbledecay=decay)
    cloud = plasma[:height, :width, None]
    foggy = x + amount * cloud
    return foggy * x.max() / (x.max() + amount)


@_severities(0.05, 0.1, 0.15, 0.2, 0.3)
def _brightness(x: Pixels, amount: float, rng: Rng) -> Pixels:
    return _with_hsv(x, (1, 1, 1), (0, 0, amount))


def _with_hsv(x: Pixels, factors: Sequence[float], shifts: Sequence[float]) -> Pixels:
    """Scales and shifts hue, saturation and value."""
    hsv = color.rgb2hsv(x) * np.array(factors) + np.array(shifts)
    return color.hsv2rgb(np.clip(hsv, 0, 1))


@_severities(
    (0.3, 0),
    (0.1, 0),
    (1.5, 0),
    (2, 0.1),
    (2.5, 0.2),
)
def _saturate(x: Pixels, constants: tuple[float, float], rng: Rng) -> Pixels:
    factor, shift = constants
    return _with_hsv(x, (1, factor, 1), (0, shift, 0))


@_severities(0.75, 0.5, 0.4, 0.3, 0.15)
def _contrast(x: Pixels, factor: float, rng: Rng) -> Pixels:
    mean = x.mean(axis=(0, 1), keepdims=True)
    return mean + factor * (x - mean)


@_severities(
    (0, 0, 0.08),
    (0.05, 0.2, 0.07),
    (0.08, 0.06, 0.06),
    (0.1, 0.04, 0.05),
    (0.1, 0.03, 0.03),
)
def _elastic_transform(x: Pixels, constants: tuple[float, ...], rng: Rng) -> Pixels:
    """Applies a random affine map, then smooth random shifts of every pixel."""
    height, width, _ = x.shape
    side = min(height, width)
    strength, sigma, jitter = np.multiply(constants, side)  # constants are shares of the side
    # The affine map moves three points at random.
    centre = np.array([width // 2, height // 2])
    corners = np.array([[1, 1], [1, -1], [-1, -1]])
    points = centre + side // 3 * corners
    moved = points + rng.uniform(-jitter, jitter, points.shape)
    affine = cv2.getAffineTransform(points.astype(np.float32), moved.astype(np.float32))
    mapped = cv2.warpAffine(x, affine, (width, height), borderMode=cv2.BORDER_REFLECT_101)

    def smooth_shift() -> Pixels:
        noise = rng.uniform(-1, 1, (height, width))
        smooth = ndimage.gaussian_filter(noise, sigma, mode="reflect", truncate=3)
        return strength * smooth

    shifts = [smooth_shift(), smooth_shift()]
    places = np.mgrid[:height, :width] + shifts
    channels = []
    for channel in np.moveaxis(mapped, -1, 0):
        moved_channel = ndimage.map_coordinates(channel, places, order=1, mode="reflect")
        channels.append(moved_channel)
    return np.stack(channels, axis=-1)


@_severities(0.95, 0.9, 0.85, 0.75, 0.65)
def _pixelate(x: Pixels, factor: float, rng: Rng) -> Pixels:
    height, width, _ = x.shape
    small_size = (int(width * factor), int(height * factor))
    small = _picture(x).resize(small_size, Image.Resampling.BOX)
    large = small.resize((width, height), Image.Resampling.BOX)
    return np.asarray(large) / 255


@_severities(80, 65, 58, 50, 40)
def _jpeg_compression(x: Pixels, quality: int, rng: Rng) -> Pixels:
    file = io.BytesIO()
    _picture(x).save(file, "JPEG", quality=quality)
    compressed = Image.open(file)
    return np.asarray(compressed) / 255


def _picture(x: Pixels) -> Image.Image:
    levels = np.rint(255 * x)
    return Image.fromarray(levels.astype(np.uint8))


@_severities(
    (0.62, 0.1, 0.7, 0.7, 0.5, 0),
    (0.65, 0.1, 0.8, 0.7, 0.5, 0),
    (0.65, 0.3, 1, 0.69, 0.5, 0),
    (0.65, 0.1, 0.7, 0.69, 0.6, 1),
    (0.65, 0.1, 0.5, 0.68, 0.6, 1),
)
def _spatter(x: Pixels, constants: tuple[float, ...], rng: Rng) -> Pixels:
    """Adds drops of water, or of mud where the constants end in 1."""
    mean, deviation, sigma, threshold, strength, is_mud = constants
    noise = rng.normal(mean, deviation, x.shape[:2])
    liquid = ndimage.gaussian_filter(noise, sigma, mode="nearest")
    if is_mud:
        return _with_mud(x, liquid > threshold, strength)
    drops = np.where(liquid < threshold, 0, liquid)
    return _with_water(x, drops, strength)


def _with_mud(x: Pixels, is_liquid: Pixels, sigma: float) -> Pixels:
    smooth = ndimage.gaussian_filter(is_liquid.astype(float), sigma, mode="nearest")
    amount = np.where(smooth < 0.8, 0, smooth)[..., None]
    return x * (1 - amount) + amount * _BROWN


def _with_water(x: Pixels, liquid: Pixels, strength: float) -> Pixels:
    """Adds pale turquoise drops that are lit from one side."""
    levels = 255 * np.clip(liquid, 0, 1)
    pixels = levels.astype(np.uint8)
    edges = cv2.Canny(pixels, 50, 150)
    to_edge = cv2.distanceTransform(255 - edges, cv2.DIST_L2, 5)
    near_edge = cv2.blur(np.minimum(to_edge, 20), (3, 3))
    light = cv2.equalizeHist(near_edge.astype(np.uint8))
    relief = cv2.filter2D(light, cv2.CV_8U, _EMBOSS)
    smooth_relief = cv2.blur(relief, (3, 3))
    amount = pixels * smooth_relief.astype(float)
    share = amount / max(amount.max(), 1)
    return x + strength * share[..., None] * _TURQUOISE / 255
