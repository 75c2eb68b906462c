"""DeYO (Lee et al. 2024, arXiv:2403.07366): a filter on the shape of the object.

It keeps images whose confidence depends on the object's shape.

    S1 = {i: H_i < tau_ent}
    PLPD_i = p_i[y] - p'_i[y],  y = argmax p_i,  p' of the transformed image    (their Eq. 5)
    S2 = {i in S1: PLPD_i > tau}
    loss = 1/|S2| sum_{S2} (exp(E0 - H_i) + exp(PLPD_i)) H_i                  (their Eq. 6-8)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdp.files import check_choice
from jaxdp.tta.method import Method, Sample, check_constants

Destruction = Literal["patch", "pixel", "occlusion"]
# Numbers of channels, by which images of the other form are recognised.
_CHANNELS = (1, 3)


@dataclasses.dataclass(frozen=True, eq=False)
class DeYO(Method):
    """Entropy minimisation of the lower blocks, filtered and weighted by entropy and PLPD.

    Attributes:
      num_classes: C.
      entropy_margin: tau_ent as a fraction of ln C.
      plpd_margin: tau. The paper uses 0.2 for ViT and in all wild settings, 0.3 for ResNet-50 in
          the mild setting.
      margin: E0 as a fraction of ln C.
      augmentation: "patch" permutes a grid of patches, independently for each image. "pixel"
        permutes all pixels, alike for the whole batch. "occlusion" fills the middle quarter of the
        image with its mean colour. A function `augmentation(key, image) -> image` is allowed too.
      patches: The side of the grid of "patch".
      channel_axis: -1 for images [H, W, C], 0 for images [C, H, W]. Named augmentations need it.

    Raises:
      ValueError: A field is out of range. When stepping: images are not of this form, or look like
          the other one.
    """

    num_classes: int
    entropy_margin: float = 0.5
    plpd_margin: float = 0.2
    margin: float = 0.4
    augmentation: Destruction | Callable[[jax.Array, jax.Array], jax.Array] = "patch"
    patches: int = 4
    channel_axis: int = -1

    lower_blocks_only = True

    def __post_init__(self) -> None:
        check_constants(self.num_classes, entropy_margin=self.entropy_margin, margin=self.margin)
        if not callable(self.augmentation):
            check_choice("augmentation", self.augmentation, Destruction, " or a function")
        if self.patches < 2:
            raise ValueError(
                f"patches must be at least 2, got {self.patches}. One patch cannot be permuted."
            )
        if self.channel_axis not in (0, -1):
            raise ValueError(
                "channel_axis must be -1 for images [H, W, C] or 0 for [C, H, W], got "
                f"{self.channel_axis}."
            )

    def weight(self, sample: Sample) -> jax.Array:
        """Weighs images by exp(E0 - H) + exp(PLPD)."""
        threshold = self.margin * math.log(self.num_classes)
        return jnp.exp(threshold - sample.uncertainty) + jnp.exp(sample.drop)

    def reliable(self, sample: Sample) -> jax.Array:
        """Keeps images with entropy H < tau_ent and PLPD > tau."""
        certain = sample.uncertainty < self.entropy_margin * math.log(self.num_classes)
        return certain & (sample.drop > self.plpd_margin)

    def augment(self, key: jax.Array, common_key: jax.Array, image: jax.Array) -> jax.Array:
        """Destroys the object's shape in a second view, for PLPD."""
        if callable(self.augmentation):
            return self.augmentation(key, image)
        axis = self.channel_axis
        other = -1 - axis
        fits = image.ndim == 3
        if fits:
            # An image is refused only if its other end looks like channels and the declared one
            # does not.
            fits = image.shape[axis] in _CHANNELS or image.shape[other] not in _CHANNELS
        if not fits:
            raise ValueError(
                f"channel_axis={axis} does not suit images of shape {image.shape}. Give images [H, "
                "W, C], images [C, H, W] with channel_axis=0, or an augmentation of your own."
            )
        image = jnp.moveaxis(image, axis, -1)
        if self.augmentation == "pixel":
            flat = image.reshape(-1, image.shape[-1])
            # One permutation for all images of a batch, as in the public code.
            view = flat[jax.random.permutation(common_key, len(flat))].reshape(image.shape)
        elif self.augmentation == "occlusion":
            view = _occlude(image)
        else:
            view = _permute_patches(key, image, self.patches)
        return jnp.moveaxis(view, -1, axis)


def _permute_patches(key: jax.Array, image: jax.Array, grid: int) -> jax.Array:
    height, width, channels = image.shape
    h = height // grid
    w = width // grid
    if not h or not w:
        raise ValueError(
            f"patches={grid} does not fit an image of {height}x{width}. Use fewer patches."
        )
    # The size that the grid divides.
    exact = (h * grid, w * grid, channels)
    resized = exact != image.shape
    x = jax.image.resize(image, exact, "bilinear") if resized else image
    by_row = x.reshape(grid, h, grid, w, channels)
    patches = by_row.transpose(0, 2, 1, 3, 4).reshape(grid * grid, h, w, channels)
    patches = patches[jax.random.permutation(key, grid * grid)]
    by_place = patches.reshape(grid, grid, h, w, channels)
    x = by_place.transpose(0, 2, 1, 3, 4).reshape(exact)
    return jax.image.resize(x, image.shape, "bilinear") if resized else x


def _occlude(image: jax.Array) -> jax.Array:
    """Returns an image whose middle half of rows and columns has its mean colour."""
    height, width, _ = image.shape
    rows = slice(height // 4, height // 4 + height // 2)
    columns = slice(width // 4, width // 4 + width // 2)
    return image.at[rows, columns].set(image.mean((0, 1), keepdims=True))
