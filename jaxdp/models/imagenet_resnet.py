"""ResNet for ImageNet (He et al. 2016, arXiv:1512.03385, table 1).

The stride of a bottleneck is in its 3x3 convolution.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.models.layers import Dense, Norm, max_pool, normalised_conv


class ImageNetResNet(nn.Module):
    """Residual network of four stages, as torchvision and timm publish it.

    Attributes:
      depths: The number of blocks of each stage.
      bottleneck: Whether a block is 1x1, 3x3 and 1x1 convolutions of four times the width, as in
        ResNet-50, and not two 3x3 convolutions.
      norm: "frozen_batch" (for public BatchNorm models), "group" or None.
      groups: The groups of the GroupNorm.
      width: The width of the first stage. Every further stage doubles it.
    """

    num_classes: int
    depths: Sequence[int] = (2, 2, 2, 2)
    bottleneck: bool = False
    norm: Norm = "frozen_batch"
    groups: int = 32
    width: int = 64
    dtype: Any = None

    def _branch(
        self,
        name: str,
        width: int,
        stride: int,
        x: jax.Array,
    ) -> jax.Array:
        """Returns the residual branch of a block."""
        if not self.bottleneck:
            y = nn.relu(normalised_conv(self, f"{name}_conv_0", width, 3, stride, x))
            return normalised_conv(self, f"{name}_conv_1", width, 3, 1, y)
        y = nn.relu(normalised_conv(self, f"{name}_conv_0", width, 1, 1, x))
        y = nn.relu(normalised_conv(self, f"{name}_conv_1", width, 3, stride, y))
        return normalised_conv(self, f"{name}_conv_2", 4 * width, 1, 1, y)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to float32 logits [B, num_classes]."""
        x = nn.relu(normalised_conv(self, "conv", self.width, 7, 2, x))
        x = max_pool(x, 3, 2, padding=1)
        for stage, depth in enumerate(self.depths):
            for block in range(depth):
                name = f"stage_{stage}_block_{block}"
                is_halved = stage > 0 and block == 0
                stride = 2 if is_halved else 1
                y = self._branch(name, self.width * 2**stage, stride, x)
                if y.shape != x.shape:
                    x = normalised_conv(self, f"{name}_shortcut", y.shape[-1], 1, stride, x)
                x = nn.relu(x + y)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        return Dense(self.num_classes, dtype=jnp.float32, name="head")(x)
