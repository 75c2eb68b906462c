"""EfficientNet-Lite (Tan and Le 2019, arXiv:1905.11946).

It has ReLU6 and no squeeze-and-excitation.
"""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.models.layers import Dense, Norm, normalised_conv


class _Stage(NamedTuple):
    """A stage of blocks.

    Attributes:
      depth: The number of blocks.
      size: The side of the depthwise convolutions.
      stride: The stride of the first block.
      expansion: The factor of the channels inside a block.
      width: The channels of the output.
    """

    depth: int
    size: int
    stride: int
    expansion: int
    width: int


_STAGES = (
    _Stage(depth=1, size=3, stride=1, expansion=1, width=16),
    _Stage(depth=2, size=3, stride=2, expansion=6, width=24),
    _Stage(depth=2, size=5, stride=2, expansion=6, width=40),
    _Stage(depth=3, size=3, stride=2, expansion=6, width=80),
    _Stage(depth=3, size=5, stride=1, expansion=6, width=112),
    _Stage(depth=4, size=5, stride=2, expansion=6, width=192),
    _Stage(depth=1, size=3, stride=1, expansion=6, width=320),
)


class EfficientNetLite(nn.Module):
    """Inverted residual blocks between convolutions, 3x3 to 32 channels and 1x1 to 1280.

    Attributes:
      width: The factor of all widths between the first and the last convolution, rounded to
          multiples of 8.
      depth: The factor of the number of blocks of the stages between the first and the last,
          rounded up.
      norm: "frozen_batch" (for public BatchNorm models), "group" or None.
      groups: The groups of the GroupNorm.
      norm_epsilon: The number added to the variance of "frozen_batch". Google's weights have 1e-3.
      same_padding: Whether a strided convolution is padded as in TensorFlow, for Google's weights,
        which timm calls tf_efficientnet_lite*. False pads every side alike, as timm's
        efficientnet_lite* do.
    """

    num_classes: int
    width: float = 1.0
    depth: float = 1.0
    norm: Norm = "frozen_batch"
    groups: int = 8
    norm_epsilon: float = 1e-3
    same_padding: bool = True
    dtype: Any = None

    def _conv(
        self,
        name: str,
        width: int,
        size: int,
        x: jax.Array,
        stride: int = 1,
        groups: int = 1,
    ) -> jax.Array:
        options: Any = {"feature_group_count": groups, "epsilon": self.norm_epsilon}
        if self.same_padding:
            options["padding"] = "SAME"
        return normalised_conv(self, name, width, size, stride, x, **options)

    def _block(
        self,
        name: str,
        stage: _Stage,
        stride: int,
        x: jax.Array,
    ) -> jax.Array:
        """Returns the residual branch of an inverted residual block."""
        y = x
        if stage.expansion > 1:
            expanded = stage.expansion * x.shape[-1]
            y = self._conv(f"{name}_expand", expanded, 1, y)
            y = nn.relu6(y)
        channels = y.shape[-1]
        y = self._conv(f"{name}_depthwise", channels, stage.size, y, stride, channels)
        width = _rounded(stage.width * self.width)
        return self._conv(f"{name}_project", width, 1, nn.relu6(y))

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to float32 logits [B, num_classes]."""
        x = nn.relu6(self._conv("conv", 32, 3, x, stride=2))
        for number, stage in enumerate(_STAGES):
            # The first and the last stage are as deep in every size of the model.
            is_end = number in (0, len(_STAGES) - 1)
            depth = stage.depth
            if not is_end:
                depth = math.ceil(stage.depth * self.depth)
            for block in range(depth):
                stride = 1
                if block == 0:
                    stride = stage.stride
                y = self._block(f"stage_{number}_block_{block}", stage, stride, x)
                has_skip = stride == 1 and x.shape == y.shape
                x = x + y if has_skip else y
        x = nn.relu6(self._conv("conv_last", 1280, 1, x))
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        return Dense(self.num_classes, dtype=jnp.float32, name="head")(x)


def _rounded(width: float) -> int:
    """Rounds to a multiple of 8, at least 8 and at least 90 % of `width`."""
    near = max(8, int(width + 4) // 8 * 8)
    if near >= 0.9 * width:
        return near
    return near + 8
