"""Reconstruction of images from uploads: FORA (Xu et al. 2024) in the form of Split Adaptation (section A.2).

The server owns the frontend that it shipped, so that it needs no substitute for it: it draws representations of PUBLIC
images such as a client might upload, trains a decoder to return the images, and applies it to what a client did upload.
How well that works depends on what the attacker knows and cares to simulate, and a weak attacker looks like protection.
So there are five, of `standard_attackers` and `attack`:

- "noise-unaware" trains on representations without noise;
- "noise-aware" draws both noises afresh in every batch, the client's secret frontend and the noise of one copy;
- "aggregating" is noise-aware and takes the median over all uploaded copies of an image;
- "oracle" is noise-aware and knows the client's noisy frontend, but takes one copy;
- "mean image" ignores the uploads and answers with the mean of the public images, a floor for the others.

"aggregating" and "oracle" differ from "noise-aware" in one thing each, so that the differences say what copies give
away and what a secret frontend hides; other combinations are an `Attacker` of one's own. That copies of one image are
known as such is no assumption: the paper uploads them by image and copy, over which the server sums (Eq. 14).

An attack that fails proves nothing: its result is evidence about these attackers. LPIPS, the third metric of the paper,
needs pretrained networks and is not offered.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.vit import Block
from jaxdp.split.metrics import psnr, ssim
from jaxdp.split.training import minimise

Represent = Callable[[Any, jax.Array, jax.Array], jax.Array]

_WINDOWS = {"gaussian11": 11, "uniform7": 7}
_BATCH = 64


class Decoder(nn.Module):
    """Encoder blocks on the tokens of a representation, then one linear map from every patch token to its pixels.

    Attributes:
      side: height and width S of the images.
      channels: C of the images.
      prefix_tokens: tokens in front of the patches, of which no pixels are made.
      num_heads: of the attention; must divide D.
      depth: number of encoder blocks.
    """

    side: int
    channels: int
    prefix_tokens: int = 0
    num_heads: int = 1
    depth: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps representations [B, T, D] to images [B, S, S, C], whose values may leave [0, 1].

        The patches are those of a grid of g x g tokens, g^2 = T - prefix_tokens, in row-major order.

        Raises:
          ValueError: the tokens are no such grid, or g does not divide S.
        """
        batch, tokens, width = x.shape
        grid = math.isqrt(max(tokens - self.prefix_tokens, 0))
        if not grid or grid**2 != tokens - self.prefix_tokens or self.side % grid:
            raise ValueError(
                f"{tokens} tokens with prefix_tokens={self.prefix_tokens} are no square grid of patches of images of "
                f"{self.side}x{self.side} pixels; is prefix_tokens that of the backbone?"
            )
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, tokens, width))
        for k in range(self.depth):
            x = Block(self.num_heads, 4 * width, name=f"block_{k}")(x)
        x = nn.LayerNorm(name="norm")(x[:, self.prefix_tokens :])
        patch = self.side // grid
        x = nn.Dense(patch * patch * self.channels, name="pixels")(x)
        x = x.reshape(batch, grid, grid, patch, patch, self.channels).swapaxes(2, 3)
        return x.reshape(batch, self.side, self.side, self.channels)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """How an attacker draws representations of public images such as a client might upload; hashable.

    Two simulations of equal attributes share their compiled programs, so give the same functions to both.

    Attributes:
      extract: `extract(front, images [B, S, S, C]) -> [B, T, D]`, for example `backbone.front` of one backbone.
      model_noise: `model_noise(key, front) -> front`, the client's noise on its frontend (Eq. 12), drawn once per
        batch; None for none.
      release: `release(key, representations [B, T, D], copy) -> [B, T, D]`, what the client uploads as copy number
        `copy` (int32, from 0) of these images: Laplace noise, and patch retrieval if the client does it. Every copy has
        a key of its own. None for the representations themselves.
      copies: the median is taken over so many copies; 1 is copy 0 alone.
    """

    extract: Callable[[Any, jax.Array], jax.Array]
    model_noise: Callable[[jax.Array, Any], Any] | None = None
    release: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.copies, int) and self.copies >= 1):
            raise ValueError(f"copies must be an integer of at least 1, got {self.copies!r}")

    def __call__(self, front: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        """Draws representations [B, T, D] of images [B, S, S, C] with a frontend of parameters `front`."""
        model_key, release_key = jax.random.split(key)
        if self.model_noise is not None:
            front = self.model_noise(model_key, front)
        representations = self.extract(front, images)
        release = self.release
        if release is None:
            return representations
        numbers = jnp.arange(self.copies)
        copies = jax.lax.map(lambda k: release(jax.random.fold_in(release_key, k), representations, k), numbers)
        return _median(copies) if self.copies > 1 else copies[0]


class Inversion(NamedTuple):
    """A trained decoder.

    Attributes:
      decoder: the module.
      params: its parameters.
    """

    decoder: Decoder
    params: Any

    def __call__(self, representations: Any) -> jax.Array:
        """Maps representations [n, T, D] to images float32 [n, S, S, C] in [0, 1]."""
        return _decode(self.decoder, self.params, jnp.asarray(representations))


def train_decoder(
    key: jax.Array,
    represent: Represent,
    front: Any,
    images: Any,
    *,
    prefix_tokens: int,
    epochs: int,
    batch_size: int,
    learning_rate: float = 1e-3,
) -> Inversion:
    """Trains a decoder by Adam to invert representations, which are drawn afresh in every batch.

    It minimises the mean squared error of pixels in [0, 1]. Calls with equal `represent`, shapes and batch size compile
    once.

    Args:
      key: typed PRNG key.
      represent: `represent(front, key, images [B, S, S, C]) -> [B, T, D]`, a `Simulation` or any hashable function.
      front: pytree of arrays for `represent`, the parameters of a frontend.
      images: PUBLIC, floating point [m, S, S, C] in [0, 1].
      prefix_tokens: of the representations, `Backbone.prefix_tokens`.
      epochs: passes over the images.
      batch_size: images per step.
      learning_rate: of Adam.

    Raises:
      ValueError: images that are not square and in [0, 1], tokens that are no grid of patches of theirs, or epochs,
        batch size or learning rate that are not positive.
    """
    images = _checked_images("images", images)
    init_key, key = jax.random.split(key)
    drawn = jax.eval_shape(represent, front, key, images[:batch_size])
    if drawn.ndim != 3:
        raise ValueError(f"represent must return representations [B, T, D], got shape {drawn.shape}")
    tokens, width = drawn.shape[1:]
    # Heads of 64 dimensions, as the ViTs of the paper have them, or more where that does not come out even.
    heads = math.gcd(width, max(width // 64, 1))
    decoder = Decoder(images.shape[1], images.shape[3], prefix_tokens, heads)
    params = minimise(
        _Loss(represent, decoder),
        _init(decoder, tokens, width, init_key),
        images,
        key=key,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        frozen=front,
    )
    return Inversion(decoder, params)


class Attacker(NamedTuple):
    """What a server knows and does.

    Attributes:
      simulation: how it draws representations to train on. With `copies` above 1 it takes the median over the first so
        many copies of the uploads as well.
      front: the parameters of the frontend that it takes for the client's, for `simulation`.
    """

    simulation: Simulation
    front: Any


def standard_attackers(
    extract: Callable[[Any, jax.Array], jax.Array],
    *,
    shipped: Any,
    true: Any,
    model_noise: Callable[[jax.Array, Any], Any] | None,
    release: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None,
    copies: int,
) -> dict[str, Attacker]:
    """The attackers of the module's docstring that train a decoder.

    Args:
      extract, model_noise, release: what the client does, as in `Simulation`; the server knows the algorithms.
      shipped: parameters of the frontend that the server gave away.
      true: parameters of the client's noisy frontend, which only the oracle knows.
      copies: how many copies of an image are uploaded.
    """
    aware = Simulation(extract, model_noise, release)
    return {
        "noise-unaware": Attacker(Simulation(extract), shipped),
        "noise-aware": Attacker(aware, shipped),
        "aggregating": Attacker(dataclasses.replace(aware, copies=copies), shipped),
        "oracle": Attacker(dataclasses.replace(aware, model_noise=None), true),
    }


class Estimate(NamedTuple):
    """A mean over images and its standard error, NaN where there is none (one image, infinite values)."""

    mean: float
    error: float


class Reconstruction(NamedTuple):
    """What an attacker made of the uploads, and how close that is.

    Attributes:
      images: float32 [n, S, S, C] in [0, 1].
      ssim: by window that fits into the images, float [n].
      psnr: in decibels, float [n].
    """

    images: np.ndarray
    ssim: dict[str, np.ndarray]
    psnr: np.ndarray

    def summary(self) -> dict[str, Estimate]:
        """Means over the images: "psnr", and "ssim_" with the name of each window."""
        values = {"psnr": self.psnr, **{f"ssim_{window}": value for window, value in self.ssim.items()}}
        return {name: _estimate(value) for name, value in values.items()}


def attack(
    key: jax.Array,
    attackers: Mapping[str, Attacker],
    uploads: Any,
    references: Any,
    *,
    public: Any,
    prefix_tokens: int,
    epochs: int,
    batch_size: int,
    learning_rate: float = 1e-3,
) -> dict[str, Reconstruction]:
    """Lets every attacker reconstruct the images behind a client's uploads.

    Args:
      key: typed PRNG key; all attackers have the same one, so that they differ in what they know alone.
      attackers: by name, for example `standard_attackers(...)`.
      uploads: floating point [c, n, T, D], c copies of the representations of n images.
      references: the client's images, floating point [n, S, S, C] in [0, 1]; to measure with, no attacker sees them.
      public: the attackers' own images, floating point [m, S, S, C] in [0, 1].
      prefix_tokens, epochs, batch_size, learning_rate: as in `train_decoder`.

    Returns:
      By name of the attacker, and for "mean image", the floor.

    Raises:
      ValueError: shapes that do not fit together, an attacker who wants more copies than there are, and as
        `train_decoder`; before anything is trained where uploads, images or copies are wrong.
    """
    references, public = _checked_images("references", references), _checked_images("public", public)
    if uploads.ndim != 4 or uploads.shape[1] != len(references):
        raise ValueError(
            f"uploads must be [c, {len(references)}, T, D], copies of as many images as references, got {uploads.shape}"
        )
    if public.shape[1:] != references.shape[1:]:
        raise ValueError(f"public images {public.shape[1:]} and references {references.shape[1:]} differ in shape")
    for name, (simulation, front) in attackers.items():
        if simulation.copies > len(uploads):
            raise ValueError(f"attackers[{name!r}] wants {simulation.copies} copies, but uploads has {len(uploads)}")
        drawn = jax.eval_shape(simulation, front, key, public[:batch_size]).shape[1:]
        if drawn != uploads.shape[2:]:
            raise ValueError(f"attackers[{name!r}] simulates [T, D] = {drawn}, but uploads has {uploads.shape[2:]}")
    wanted = {attacker.simulation.copies for attacker in attackers.values()}
    observed = {copies: median_of_copies(uploads[:copies]) for copies in wanted}
    mean_image = np.broadcast_to(public.mean(0, keepdims=True), references.shape)
    found = {"mean image": _measure(mean_image, references)}
    for name, (simulation, front) in attackers.items():
        inversion = train_decoder(
            key,
            simulation,
            front,
            public,
            prefix_tokens=prefix_tokens,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
        )
        found[name] = _measure(np.asarray(inversion(observed[simulation.copies])), references)
    return found


def median_of_copies(copies: Any) -> np.ndarray:
    """The median over the copies of every image, coordinate by coordinate, on the host.

    It is the maximum likelihood estimate of what Laplace noise was added to, and hardly moves when fewer than half of
    the copies have another token in a place. One image at a time, so that `copies` may be an `np.memmap`.

    Args:
      copies: floating point [c, n, T, D].

    Returns:
      [n, T, D] of the same dtype; of an even number of copies, the mean of the two in the middle.
    """
    copies = np.asarray(copies)
    medians = np.empty(copies.shape[1:], copies.dtype)
    for image in range(copies.shape[1]):
        medians[image] = np.median(copies[:, image], axis=0)
    return medians


@dataclasses.dataclass(frozen=True)
class _Loss:
    """Mean squared error of every image of a batch; equal ones share compiled programs."""

    represent: Represent
    decoder: Decoder

    def __call__(self, params: Any, front: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        decoded: Any = self.decoder.apply({"params": params}, self.represent(front, key, images))
        return jnp.mean((decoded - images) ** 2, axis=(1, 2, 3))


def _median(copies: jax.Array) -> jax.Array:
    """The median over the first axis, to 2^-24 of the range; by bisection, since sorting is slow on a CPU."""
    values = jnp.moveaxis(copies, 0, -1)
    count = values.shape[-1]

    def smallest(rank: int) -> jax.Array:
        def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends
            middle = (low + high) / 2
            enough = jnp.sum(values <= middle[..., None], axis=-1) >= rank
            return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        return jax.lax.fori_loop(0, 24, halve, (values.min(-1), values.max(-1)))[1]

    ranks = {(count + 1) // 2, count // 2 + 1}  # two for an even number
    return jnp.mean(jnp.stack([smallest(rank) for rank in ranks]), axis=0)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _init(decoder: Decoder, tokens: int, width: int, key: jax.Array) -> Any:
    return decoder.init(key, jnp.zeros((1, tokens, width)))["params"]


@functools.partial(jax.jit, static_argnums=0)
def _decode(decoder: Decoder, params: Any, representations: jax.Array) -> jax.Array:
    def one(representation: jax.Array) -> Any:
        return jnp.clip(decoder.apply({"params": params}, representation[None])[0], 0, 1)

    return jax.lax.map(one, representations, batch_size=_BATCH)


def _measure(images: np.ndarray, references: np.ndarray) -> Reconstruction:
    fitting: Any = [window for window, taps in _WINDOWS.items() if taps <= references.shape[1]]
    similarity = {window: np.asarray(ssim(images, references, window=window)) for window in fitting}
    return Reconstruction(images, similarity, np.asarray(psnr(images, references)))


def _estimate(values: np.ndarray) -> Estimate:
    values = np.asarray(values, np.float64)
    known = len(values) > 1 and bool(np.isfinite(values).all())
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)) if known else math.nan)


def _checked_images(name: str, images: Any) -> np.ndarray:
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1] != images.shape[2] or not len(images):
        raise ValueError(f"{name} must be square images [n, S, S, C], at least one, got shape {images.shape}")
    if not np.issubdtype(images.dtype, np.floating) or not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(f"{name} must be floating point in [0, 1], got {images.dtype} or values outside")
    return images.astype(np.float32, copy=False)
