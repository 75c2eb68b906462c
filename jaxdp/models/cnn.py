"""A small convolutional network, in the style of Papernot et al. 2021 (arXiv:2007.14191)."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.models.layers import Conv, Dense, Norm, normalise_channels


def _halve(x: jax.Array) -> jax.Array:
    """Averages 2x2 pixels of [B, H, W, C]. An odd last row or column is dropped."""
    batch, height, width, channels = x.shape
    if min(height, width) < 2:
        raise ValueError(
            f"the image is too small to halve again at {height}x{width}. Use fewer widths."
        )
    rows = height // 2
    columns = width // 2
    x = x[:, : rows * 2, : columns * 2]
    return x.reshape(batch, rows, 2, columns, 2, channels).mean(axis=(2, 4))


class CNN(nn.Module):
    """Convolutions, each with normalisation, activation and 2x2 pooling, then dense layers.

    Attributes:
      widths: The channels of each 3x3 convolution. Each halves the image, rounding down.
      dense: The width of the hidden dense layer, 0 for none.
      norm: None, "group" or "frozen_batch".
      groups: The groups of the GroupNorm, which must divide every width.
      activation: The activation of convolutions and hidden dense layer. Bounded ones such as tanh
          clip better.
    """

    num_classes: int
    widths: Sequence[int] = (32, 64)
    dense: int = 128
    norm: Norm = None
    groups: int = 8
    activation: Callable[[jax.Array], jax.Array] = nn.tanh
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to float32 logits [B, num_classes]."""
        for k, width in enumerate(self.widths):
            x = Conv(width, (3, 3), dtype=self.dtype, name=f"conv_{k}")(x)
            x = normalise_channels(self.norm, self.groups, self.dtype, f"norm_{k}", x)
            x = _halve(self.activation(x))
        x = x.reshape(x.shape[0], -1)
        if self.dense:
            x = self.activation(Dense(self.dense, dtype=self.dtype, name="dense")(x))
        # The head computes in float32, whatever the dtype of the layers.
        return Dense(self.num_classes, dtype=jnp.float32, name="head")(x.astype(jnp.float32))
