"""Swin Transformer (Liu et al. 2021, arXiv:2103.14030)."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.layers import gelu
from jaxdp.models.vit import Block, attend

_init = nn.initializers.truncated_normal(0.02)


def _side(x: jax.Array) -> int:
    """Of the square grid that tokens [B, T, D] come from."""
    side = math.isqrt(x.shape[1])
    if side**2 != x.shape[1]:
        raise ValueError(f"x must have the tokens of a square grid, got {x.shape[1]}; give square images to block 0")
    return side


def _relative_positions(window: int) -> np.ndarray:
    """For each query and key of a window [T, T], T = window**2: which row of the table of biases is theirs."""
    offset = np.arange(window)[:, None] - np.arange(window)[None] + window - 1  # query minus key, from 0
    rows, columns = offset[:, None, :, None], offset[None, :, None, :]
    return (rows * (2 * window - 1) + columns).reshape(window**2, window**2)


def _neighbours(side: int, window: int, shift: int) -> np.ndarray:
    """Which tokens of each window [windows, T, T] are near each other in the image, and not only since the grid was
    rolled by `shift`: section 3.2, "efficient batch computation"."""
    line = np.roll(np.arange(side), -shift).reshape(-1, window)  # the rows, or columns, in each row of windows
    near = np.abs(line[:, :, None] - line[:, None]) < window
    rows, columns = near[:, None, :, None, :, None], near[None, :, None, :, None, :]
    return (rows & columns).reshape(-1, window**2, window**2)


class WindowAttention(nn.Module):
    """Multi-head self-attention within windows, with a learned bias for each relative position:
    softmax(Q K^T / sqrt(d) + bias) V (equation 4).

    Attributes:
      window: side of the windows.
      shift: of the windows, down and to the right; those that reach over the edge of the image are cut there.
    """

    num_heads: int
    window: int
    shift: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens [B, T, D] of a square grid to [B, T, D]."""
        batch, _, width = x.shape
        side, area = _side(x), self.window**2
        per_side = side // self.window

        def project(name: str, x: jax.Array) -> jax.Array:
            return nn.Dense(width, dtype=self.dtype, kernel_init=_init, name=name)(x)

        def bias(scores: jax.Array) -> jax.Array:
            shape = scores.shape
            scores = scores.reshape(batch, per_side**2, self.num_heads, area, area)
            table = self.param("position_bias", _init, ((2 * self.window - 1) ** 2, self.num_heads))
            scores = scores + table[_relative_positions(self.window)].transpose(2, 0, 1)[None, None]
            if self.shift:
                # The authors' constant: as good as minus infinity.
                mask = np.where(_neighbours(side, self.window, self.shift), np.float32(0), np.float32(-100))
                scores = scores + mask[None, :, None]
            return scores.reshape(shape)

        x = jnp.roll(x.reshape(batch, side, side, width), -self.shift, (1, 2))
        x = x.reshape(batch, per_side, self.window, per_side, self.window, width).swapaxes(2, 3)
        x = x.reshape(batch, side**2, width)  # window after window
        query, key, value = (project(name, x).reshape(-1, area, width) for name in ("query", "key", "value"))
        y = project("out", attend(query, key, value, self.num_heads, bias).reshape(batch, side**2, width))
        y = y.reshape(batch, per_side, per_side, self.window, self.window, width).swapaxes(2, 3)
        return jnp.roll(y.reshape(batch, side, side, width), self.shift, (1, 2)).reshape(batch, side**2, width)


class PatchMerging(nn.Module):
    """Half the resolution at twice the width: a linear map of the LayerNorm of four neighbours."""

    dtype: Any = None
    norm_epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens [B, T, D] of a square grid to [B, T / 4, 2 D]."""
        batch, tokens, width = x.shape
        side = _side(x)
        if side % 2:
            raise ValueError(
                f"the grid must have an even side before patches are merged, got {side}x{side}; give images whose side "
                "is a multiple of patch_size * 2 for every merging"
            )
        x = x.reshape(batch, side // 2, 2, side // 2, 2, width)
        # Public checkpoints have the neighbours in this order: (0, 0), the one below, the one beside, (1, 1).
        x = x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, tokens // 4, 4 * width)
        x = nn.LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name="norm")(x)
        return nn.Dense(2 * width, use_bias=False, dtype=self.dtype, kernel_init=_init, name="reduction")(x)


class Swin(nn.Module):
    """Swin Transformer on square images: attention in windows that every second block shifts, and stages in between
    which the resolution halves.

    A stage whose grid is not larger than the window has one window of the grid's size, never shifted. Nothing is
    padded: otherwise the window must divide the grid. There is no stochastic depth, which does nothing at inference.

    Attributes:
      patch_size: side of the square patches; must divide the image.
      window: side of the windows, in tokens.
      width: token dimension D of the first stage; every further stage doubles it.
      depths: blocks of each stage.
      num_heads: heads of each stage; 32 dimensions each in the published sizes.
      mlp_ratio: hidden width of the MLPs over the width of the tokens.
      norm_epsilon: added to the variance in every LayerNorm.
      activation: in the MLPs; the exact GELU.
      head_hidden: width of a hidden layer in front of the head, with that activation; 0 is none.
    """

    num_classes: int
    patch_size: int = 4
    window: int = 7
    width: int = 96
    depths: Sequence[int] = (2, 2, 6, 2)
    num_heads: Sequence[int] = (3, 6, 12, 24)
    mlp_ratio: int = 4
    dtype: Any = None
    norm_epsilon: float = 1e-5
    activation: Callable[[jax.Array], jax.Array] = gelu
    head_hidden: int = 0

    @property
    def num_blocks(self) -> int:
        """Where the model can be cut: after 1, ..., num_blocks - 1 of its blocks, counted through all stages."""
        return sum(self.depths)

    @property
    def prefix_tokens(self) -> int:
        """How many learned tokens stand in front of the patches."""
        return 0

    @nn.compact
    def __call__(self, x: jax.Array, start: int = 0, stop: int | None = None) -> jax.Array:
        """Maps images [B, S, S, C] to float32 logits [B, num_classes], or does a part of that.

        The merging of patches between two stages belongs to the block before it, which returns [B, T / 4, 2 D].

        Args:
          x: images if `start` is 0, otherwise tokens [B, T, D] that have left block start - 1, row by row.
          start, stop: the blocks to run, counted through all stages; with `stop`, the tokens [B, T, D] that leave
            block stop - 1 are returned. `init` makes the parameters of these blocks only.

        Raises:
          ValueError: images are not square or patch_size does not divide them; window does not divide the larger grid
            of a stage; a merging meets an odd grid; depths and num_heads differ in length; a number of heads does not
            divide the width.
        """
        if len(self.depths) != len(self.num_heads):
            raise ValueError(
                f"depths and num_heads must have one entry per stage, got {self.depths} and {self.num_heads}"
            )
        if start == 0:
            x = self._embed(x)
        common = {"dtype": self.dtype, "norm_epsilon": self.norm_epsilon}
        block = {**common, "activation": self.activation, "kernel_init": _init}
        places = [(stage, k) for stage, depth in enumerate(self.depths) for k in range(depth)]
        for stage, k in places[start:stop]:
            window, shift = self._window(stage, _side(x))
            attention = functools.partial(WindowAttention, window=window, shift=shift if k % 2 else 0)
            width, name = self.mlp_ratio * x.shape[-1], f"stage_{stage}_block_{k}"
            x = Block(self.num_heads[stage], width, **block, attention=attention, name=name)(x)
            if k + 1 == self.depths[stage] and stage + 1 < len(self.depths):
                x = PatchMerging(name=f"stage_{stage + 1}_merge", **common)(x)
        if stop is not None:
            return x
        x = nn.LayerNorm(epsilon=self.norm_epsilon, dtype=jnp.float32, name="norm")(x)
        y = jnp.mean(x, axis=1)
        if self.head_hidden:
            y = self.activation(nn.Dense(self.head_hidden, dtype=jnp.float32, kernel_init=_init, name="head_hidden")(y))
        return nn.Dense(self.num_classes, dtype=jnp.float32, kernel_init=_init, name="head")(y)

    def _embed(self, x: jax.Array) -> jax.Array:
        """Maps images [B, S, S, C] to tokens [B, T, D], row by row."""
        if x.shape[1] != x.shape[2]:
            raise ValueError(f"images must be square, got {x.shape[1]}x{x.shape[2]}; resize or crop them")
        if x.shape[1] % self.patch_size:
            raise ValueError(f"patch_size must divide the image {x.shape[1]}x{x.shape[2]}, got {self.patch_size}")
        size = (self.patch_size, self.patch_size)
        common = {"strides": size, "padding": "VALID", "dtype": self.dtype, "kernel_init": _init}
        x = nn.Conv(self.width, size, name="embed", **common)(x).reshape(x.shape[0], -1, self.width)
        return nn.LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name="embed_norm")(x)

    def _window(self, stage: int, side: int) -> tuple[int, int]:
        """Side and shift of the windows on a grid of `side` tokens."""
        if side <= self.window:
            return side, 0
        if side % self.window:
            raise ValueError(
                f"window must divide the {side}x{side} grid of stage {stage}, got {self.window}; resize the images or "
                "choose another window (published: 7 for 224x224, 12 for 384x384)"
            )
        return self.window, self.window // 2
