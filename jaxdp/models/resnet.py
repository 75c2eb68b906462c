"""ResNet for CIFAR-sized images (He et al. 2016, arXiv:1512.03385, section 4.2)."""

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.files import check_choice
from jaxdp.models.layers import Conv, Dense, Norm, WSConv, normalise_channels


class ResNet(nn.Module):
    """Residual network of depth 6 n + 2 with widths 16, 32 and 64.

    Depth 20 has 0.27 million parameters.

    Attributes:
      depth: 6 n + 2, for example 20, 32, 44 or 56.
      norm: "group", "frozen_batch" (for a public pre-trained BatchNorm model) or None.
      groups: The groups of the GroupNorm, which must divide 16.
      shortcut: The shortcut where the shape changes. "pad" subsamples and pads the channels with
        zeros, half on either side (the paper's option A). "conv" is a 1x1 convolution with its own
        normalisation (option B).
      standardise: Whether to use weight-standardised convolutions (`WSConv`), for private training
          (De et al. 2022).
    """

    num_classes: int
    depth: int = 20
    norm: Norm = "group"
    groups: int = 8
    shortcut: Literal["pad", "conv"] = "pad"
    standardise: bool = False
    dtype: Any = None

    def _conv(
        self,
        name: str,
        width: int,
        size: int,
        stride: int,
        x: jax.Array,
    ) -> jax.Array:
        # The paper pads symmetrically. "SAME" pads a strided convolution on one side only.
        common: Any = {
            "strides": (stride, stride),
            "padding": size // 2,
            "dtype": self.dtype,
            "name": name,
        }
        if self.standardise:
            return WSConv(width, (size, size), **common)(x)
        common |= {"use_bias": self.norm is None, "kernel_init": nn.initializers.he_normal()}
        return Conv(width, (size, size), **common)(x)

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return normalise_channels(self.norm, self.groups, self.dtype, name, x)

    def _shortcut(
        self,
        name: str,
        width: int,
        stride: int,
        x: jax.Array,
    ) -> jax.Array:
        if x.shape[-1] == width:
            return x
        if self.shortcut == "conv":
            x = self._conv(f"{name}_shortcut", width, 1, stride, x)
            return self._norm(f"{name}_shortcut_norm", x)
        # Option A of the paper: every second pixel, and zeros for the new channels.
        x = jax.lax.slice(x, (0, 0, 0, 0), x.shape, (1, stride, stride, 1))
        added = width - x.shape[-1]
        channels = (added // 2, added - added // 2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), channels))

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to float32 logits [B, num_classes]."""
        if self.depth < 8 or (self.depth - 2) % 6:
            raise ValueError(f"depth must be 6 n + 2 with n >= 1, got {self.depth}.")
        check_choice("shortcut", self.shortcut, ("pad", "conv"))
        x = self._conv("conv", 16, 3, 1, x)
        x = nn.relu(self._norm("norm", x))
        for stage, width in enumerate((16, 32, 64)):
            for block in range((self.depth - 2) // 6):
                name = f"stage_{stage}_block_{block}"
                is_halved = stage > 0 and block == 0
                stride = 2 if is_halved else 1
                y = self._conv(f"{name}_conv_0", width, 3, stride, x)
                y = self._norm(f"{name}_norm_0", y)
                y = self._conv(f"{name}_conv_1", width, 3, 1, nn.relu(y))
                y = self._norm(f"{name}_norm_1", y)
                shortcut = self._shortcut(name, width, stride, x)
                x = nn.relu(y + shortcut)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        return Dense(self.num_classes, dtype=jnp.float32, name="head")(x)
