"""Wide-ResNet (Zagoruyko and Komodakis 2016) as De et al. 2022 (arXiv:2204.13650) train it."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.models.layers import Dense, WSConv, normalise_channels


class WideResNet(nn.Module):
    """Pre-activation Wide-ResNet with weight-standardised convolutions and GroupNorm.

    Every residual branch is twice activation -> GroupNorm -> 3x3 WSConv, in this order. The first
    block of a stage has a skip branch: activation -> GroupNorm -> 1x1 WSConv. After the last stage
    come activation -> GroupNorm -> mean over the map -> dense layer.

    Attributes:
      depth: 6 n + 4, for example 16, 28 or 40.
      width: The widening factor. The stages have 16, 32 and 64 times this many channels.
      groups: The groups of the GroupNorm, which must divide 16.
    """

    num_classes: int
    depth: int = 16
    width: int = 4
    groups: int = 16
    dtype: Any = None

    def _branch(
        self,
        name: str,
        channels: int,
        size: int,
        stride: int,
        x: jax.Array,
    ) -> jax.Array:
        x = normalise_channels("group", self.groups, self.dtype, f"{name}_norm", nn.relu(x))
        kernel = (size, size)
        conv = WSConv(channels, kernel, (stride, stride), dtype=self.dtype, name=f"{name}_conv")
        return conv(x)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to float32 logits [B, num_classes]."""
        if self.depth < 10 or (self.depth - 4) % 6:
            raise ValueError(f"depth must be 6 n + 4 with n >= 1, got {self.depth}.")
        x = WSConv(16, (3, 3), dtype=self.dtype, name="conv")(x)
        for stage in range(3):
            channels = 16 * self.width * 2**stage
            for block in range((self.depth - 4) // 6):
                name = f"stage_{stage}_block_{block}"
                is_halved = stage > 0 and block == 0
                stride = 2 if is_halved else 1
                skip = x if block else self._branch(f"{name}_skip", channels, 1, stride, x)
                x = self._branch(f"{name}_0", channels, 3, stride, x)
                x = skip + self._branch(f"{name}_1", channels, 3, 1, x)
        x = normalise_channels("group", self.groups, self.dtype, "norm", nn.relu(x))
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        return Dense(self.num_classes, dtype=jnp.float32, kernel_init=init, name="head")(x)
