"""SqueezeNet 1.0 and 1.1 (Iandola et al. 2016, arXiv:1602.07360). It has no normalisation layer."""

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.models.layers import Conv, Dense, max_pool

# (width of the first convolution, its side, the fire modules in front of which the map is pooled)
_VERSIONS = {
    "1.0": (96, 7, (2, 5, 9)),
    "1.1": (64, 3, (2, 4, 6)),
}


class SqueezeNet(nn.Module):
    """SqueezeNet: a convolution, fire modules 2 to 9, a 1x1 convolution to classes, an average.

    Attributes:
      version: "1.0", or "1.1", which pools earlier and costs 2.4 times less.
      pool: "logits" averages the ReLU of the logits of all pixels, as published. "features"
        averages the pixels in front of the head, which is then a linear classifier. A new head
        needs it: where a ReLU is zero, so is its gradient.
      head_padding: The zero pixels around the map in front of the published head. The first Caffe
          models have 1.
    """

    num_classes: int
    version: Literal["1.0", "1.1"] = "1.0"
    pool: Literal["logits", "features"] = "logits"
    head_padding: int = 0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C], at least 21x21, to float32 logits [B, num_classes]."""
        if self.version not in _VERSIONS or self.pool not in ("logits", "features"):
            raise ValueError(
                "version must be '1.0' or '1.1' and pool 'logits' or 'features', got "
                f"version={self.version!r}, pool={self.pool!r}."
            )
        width, size, pooled = _VERSIONS[self.version]
        _, height, length, _ = x.shape

        def conv(
            name: str,
            width: int,
            size: int,
            x: jax.Array,
            **options: Any,
        ) -> jax.Array:
            options |= {
                "dtype": self.dtype,
                "kernel_init": nn.initializers.he_normal(),
                "name": name,
            }
            return nn.relu(Conv(width, (size, size), **options)(x))

        x = conv("conv", width, size, x, strides=(2, 2), padding="VALID")
        for k in range(2, 10):
            if k in pooled:
                if min(x.shape[1:3]) < 2:
                    raise ValueError(
                        f"the image must be at least 21x21, got {height}x{length}. Resize it."
                    )
                x = max_pool(x, 3, 2, ceil=True)
            squeezed = conv(f"fire_{k}_squeeze", 16 * (k // 2), 1, x)  # 16, 16, 32, 32, 48, ...
            width = 64 * (k // 2)
            expanded_1 = conv(f"fire_{k}_expand_1", width, 1, squeezed, padding="SAME")
            expanded_3 = conv(f"fire_{k}_expand_3", width, 3, squeezed, padding="SAME")
            x = jnp.concatenate([expanded_1, expanded_3], axis=-1)
        head = Dense(self.num_classes, dtype=jnp.float32, name="head")
        x = x.astype(jnp.float32)
        if self.pool == "features":
            return head(jnp.mean(x, axis=(1, 2)))
        edge = (self.head_padding, self.head_padding)
        padded = jnp.pad(x, ((0, 0), edge, edge, (0, 0)))
        return jnp.mean(nn.relu(head(padded)), axis=(1, 2))
