"""ConvNeXt (Liu et al. 2022, arXiv:2201.03545)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.models.layers import Conv, Dense, GivenShapes, LayerNorm, gelu

_EPSILON = 1e-6
_init = nn.initializers.truncated_normal(0.02)


class ConvNeXtBlock(GivenShapes):
    """x + scale * MLP(LayerNorm(depthwise 7x7 convolution of x)).

    The MLP has the hidden width 4 C and the exact GELU.
    """

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H, W, C]."""
        width = x.shape[-1]
        common = {"dtype": self.dtype, "kernel_init": _init}
        y = Conv(width, (7, 7), padding=3, feature_group_count=width, name="conv", **common)(x)
        y = LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name="norm")(y)
        hidden = Dense(4 * width, name="mlp_0", **common)(y)
        y = Dense(width, name="mlp_1", **common)(gelu(hidden))
        # 1e-6 is the paper's.
        scale = self.param("layer_scale", nn.initializers.constant(1e-6), (width,))
        scale = scale.astype(y.dtype)
        return x + y * scale.reshape(1, 1, 1, -1)


class ConvNeXt(nn.Module):
    """ConvNeXt: a 4x4 stem, stages with 2x2 downsampling in between, pooling, LayerNorm, head.

    Every normalisation is a LayerNorm over the channels of one pixel (epsilon 1e-6). Stochastic
    depth is left out.

    Attributes:
      widths: The channels of each stage.
      depths: The number of blocks of each stage.
    """

    num_classes: int
    widths: Sequence[int] = (96, 192, 384, 768)
    depths: Sequence[int] = (3, 3, 9, 3)
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to float32 logits [B, num_classes].

        Pixels that a stride leaves over are dropped.
        """
        if len(self.widths) != len(self.depths):
            raise ValueError(
                f"widths and depths must have one entry per stage, got {self.widths} and "
                f"{self.depths}."
            )
        reduction = 4 * 2 ** (len(self.widths) - 1)
        height, width = x.shape[1:3]
        if min(height, width) < reduction:
            raise ValueError(
                f"the image must be at least {reduction}x{reduction}, got {height}x{width}."
            )

        def norm(name: str, x: jax.Array) -> jax.Array:
            return LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name=name)(x)

        def reduce(
            name: str,
            stride: int,
            width: int,
            x: jax.Array,
        ) -> jax.Array:
            size = (stride, stride)
            common = {"padding": "VALID", "dtype": self.dtype, "kernel_init": _init}
            return Conv(width, size, strides=size, name=name, **common)(x)

        x = norm("stem_norm", reduce("stem", 4, self.widths[0], x))
        for stage, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            if stage > 0:
                x = norm(f"stage_{stage}_downsample_norm", x)
                x = reduce(f"stage_{stage}_downsample", 2, width, x)
            for k in range(depth):
                x = ConvNeXtBlock(self.dtype, name=f"stage_{stage}_block_{k}")(x)
        x = jnp.mean(x.astype(jnp.float32), axis=(1, 2))
        x = LayerNorm(epsilon=_EPSILON, dtype=jnp.float32, name="norm")(x)
        return Dense(self.num_classes, dtype=jnp.float32, kernel_init=_init, name="head")(x)
