"""Augmentation of one image as pure functions of a key: random crops and flips.

This is the recipe of De et al. 2022 (arXiv:2204.13650, section 3.2). Every example is seen in
several augmented views. Their gradients are averaged BEFORE clipping, so the views cost no privacy.
Each function maps one image [H, W, C] to one of the same shape and dtype, for use under `jax.vmap`
and `jax.jit`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def random_crop(
    key: jax.Array,
    image: jax.Array,
    *,
    padding: int = 4,
) -> jax.Array:
    """Pads by reflection and cuts a window of the original size at a uniformly random place.

    Args:
      key: A typed PRNG key.
      image: [H, W, C].
      padding: The number of pixels added on every side, in [0, min(H, W)).

    Raises:
      ValueError: An argument is not as above.
    """
    if image.ndim != 3:
        raise ValueError(
            f"image must be one image [H, W, C], got shape {image.shape}. Use jax.vmap for a batch."
        )
    height, width, channels = image.shape
    if not 0 <= padding < min(height, width):  # the most that a reflection pads
        raise ValueError(
            f"padding must be in [0, {min(height, width)}) for a {height}x{width} image, got "
            f"{padding}."
        )
    edge = (padding, padding)
    padded = jnp.pad(image, (edge, edge, (0, 0)), mode="reflect")
    row, column = jax.random.randint(key, (2,), 0, 2 * padding + 1)
    return jax.lax.dynamic_slice(padded, (row, column, 0), (height, width, channels))


def random_flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Mirrors the image [H, W, C] left to right with probability one half."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def augment(key: jax.Array, image: jax.Array, *, padding: int = 4) -> jax.Array:
    """Crops as `random_crop`, then flips as `random_flip`, with independent randomness."""
    crop_key, flip_key = jax.random.split(key)
    return random_flip(flip_key, random_crop(crop_key, image, padding=padding))


def augmentation(config: Any) -> Callable[[jax.Array, Any], Any] | None:
    """Returns the augmentation of one example, from the `data` part of an experiment's config.

    Args:
      config: An `ml_collections.ConfigDict` with crop_padding, pixels as in `random_crop`, and
        flip, whether a mirrored image means the same.

    Returns:
      `augment(key, example) -> example`, which changes the "image" of an example, or None without
      augmentation.
    """
    if not (config.crop_padding or config.flip):
        return None
    crop = augment if config.flip else random_crop

    def augment_example(key: jax.Array, example: Any) -> Any:
        return {**example, "image": crop(key, example["image"], padding=config.crop_padding)}

    return augment_example


def normalise(
    image: jax.Array, mean: float | Sequence[float], std: float | Sequence[float]
) -> jax.Array:
    """Returns (image - mean) / std per channel, in the image's dtype.

    `mean` and `std` must be PUBLIC constants (of a public data set, or 0.5 and 0.5). The mean and
    standard deviation of a private training set are an uncharged release.

    Args:
      image: [..., C].
      mean, std: One number, or C numbers. Those of std are positive.

    Raises:
      ValueError: A standard deviation is not positive.
    """
    deviations = [std] if isinstance(std, int | float) else list(std)
    if not all(value > 0 for value in deviations):
        raise ValueError(f"std must be positive in every channel, got {std}.")
    shift = jnp.broadcast_to(jnp.asarray(mean, image.dtype), image.shape)
    centred = image - shift
    return centred / jnp.broadcast_to(jnp.asarray(std, image.dtype), image.shape)
