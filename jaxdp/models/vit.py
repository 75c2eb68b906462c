"""Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929)."""

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

_EPSILON = 1e-6


class Attention(nn.Module):
    """Multi-head self-attention; each head has width / num_heads dimensions.

    Attributes:
      num_heads: number of heads; must divide the width.
      dtype: computation dtype; scores and softmax are float32.
    """

    num_heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens [B, T, D] to [B, T, D]."""
        batch, tokens, width = x.shape
        if width % self.num_heads:
            raise ValueError(f"num_heads must divide the width {width}, got {self.num_heads}")
        head_dim = width // self.num_heads

        def project(name: str) -> jax.Array:
            y = nn.Dense(width, dtype=self.dtype, kernel_init=nn.initializers.xavier_uniform(), name=name)(x)
            return y.reshape(batch, tokens, self.num_heads, head_dim)

        query, key, value = project("query"), project("key"), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * head_dim**-0.5, axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)
        y = y.reshape(batch, tokens, width)
        return nn.Dense(width, dtype=self.dtype, kernel_init=nn.initializers.xavier_uniform(), name="out")(y)


class Block(nn.Module):
    """Pre-norm encoder block: x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)) with the exact GELU.

    Attributes:
      num_heads: number of heads.
      mlp_width: hidden width of the MLP.
      dtype: computation dtype.
    """

    num_heads: int
    mlp_width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens [B, T, D] to [B, T, D]."""
        dense = {"dtype": self.dtype, "kernel_init": nn.initializers.xavier_uniform()}
        y = nn.LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name="norm_0")(x)
        x = x + Attention(self.num_heads, self.dtype, name="attention")(y)
        y = nn.LayerNorm(epsilon=_EPSILON, dtype=self.dtype, name="norm_1")(x)
        y = nn.gelu(nn.Dense(self.mlp_width, name="mlp_0", **dense)(y), approximate=False)
        return x + nn.Dense(x.shape[-1], name="mlp_1", **dense)(y)


class ViT(nn.Module):
    """Pre-norm Vision Transformer with learned positions.

    Attributes:
      num_classes: number of logits.
      patch_size: side of the square patches; must divide height and width of the image.
      width: token dimension D.
      depth: number of encoder blocks.
      num_heads: heads of width / num_heads dimensions each (64 in the sizes Ti, S, B and L).
      mlp_width: hidden width of the MLPs, usually 4 * width.
      pool: "token" classifies a learned class token in front of the patches, "mean" the mean of the patch
        tokens.
      dtype: computation dtype; None is float32. Parameters and logits are float32.
    """

    num_classes: int
    patch_size: int = 16
    width: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_width: int = 768
    pool: Literal["token", "mean"] = "token"
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to float32 logits [B, num_classes]."""
        if self.pool not in ("token", "mean"):
            raise ValueError(f"pool must be 'token' or 'mean', got {self.pool!r}")
        if x.shape[1] % self.patch_size or x.shape[2] % self.patch_size:
            raise ValueError(f"patch_size must divide the image {x.shape[1]}x{x.shape[2]}, got {self.patch_size}")
        x = self._embed(x)
        for k in range(self.depth):
            x = Block(self.num_heads, self.mlp_width, self.dtype, name=f"block_{k}")(x)
        x = nn.LayerNorm(epsilon=_EPSILON, dtype=jnp.float32, name="norm")(x)
        x = x[:, 0] if self.pool == "token" else jnp.mean(x, axis=1)
        return nn.Dense(self.num_classes, dtype=jnp.float32, name="head")(x)

    def _embed(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to tokens [B, T, D] with positions; patches in row-major order."""
        size = (self.patch_size, self.patch_size)
        x = nn.Conv(self.width, size, strides=size, padding="VALID", dtype=self.dtype, name="embed")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        extra = int(self.pool == "token")
        init = nn.initializers.normal(0.02)
        positions = self.param("positions", init, (1, x.shape[1] + extra, self.width))
        if extra:
            # A zero row in front, to which position and class token are added: the weights meet the data in
            # one sum.
            token = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
            positions = positions + jnp.pad(token, ((0, 0), (0, x.shape[1]), (0, 0)))
            x = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
        return x + positions.astype(x.dtype)
