"""Swin Transformer (Liu et al. 2021, arXiv:2103.14030)."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.layers import Conv, Dense, GivenShapes, LayerNorm, gelu
from jaxdp.models.vit import Block, attend

_init = nn.initializers.truncated_normal(0.02)


def _side(x: jax.Array) -> int:
    """Returns the side of the square grid of tokens [B, T, D]."""
    side = math.isqrt(x.shape[1])
    if side**2 != x.shape[1]:
        raise ValueError(
            f"x must have the tokens of a square grid, got {x.shape[1]}. Start with square images."
        )
    return side


def _relative_positions(window: int) -> np.ndarray:
    """Returns the row of the table of biases for each query and key of a window.

    The result is [T, T] with T = window**2.
    """
    line = np.arange(window)
    offset = line[:, None] - line[None] + window - 1  # query minus key, counted from 0
    rows = offset[:, None, :, None]
    columns = offset[None, :, None, :]
    return (rows * (2 * window - 1) + columns).reshape(window**2, window**2)


def _neighbours(side: int, window: int, shift: int) -> np.ndarray:
    """Returns which pairs of tokens in a window are near in the image, bool [windows, T, T].

    The roll by `shift` also brings tokens of opposite edges into one window (section 3.2).
    """
    # The rows of the image in each row of windows. Columns are alike.
    line = np.roll(np.arange(side), -shift).reshape(-1, window)
    near = np.abs(line[:, :, None] - line[:, None]) < window
    rows = near[:, None, :, None, :, None]
    columns = near[None, :, None, :, None, :]
    return (rows & columns).reshape(-1, window**2, window**2)


class WindowAttention(GivenShapes):
    """Multi-head self-attention within windows, with a bias for each relative position (Eq. 4).

    It computes softmax(Q K^T / sqrt(d) + bias) V.

    Attributes:
      window: The side of the windows.
      shift: The shift of the windows, down and to the right. Windows are cut at the edge of the
          image.
    """

    num_heads: int
    window: int
    shift: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens [B, T, D] of a square grid to [B, T, D]."""
        batch, _, width = x.shape
        side = _side(x)
        area = self.window**2
        per_side = side // self.window

        def project(name: str, x: jax.Array) -> jax.Array:
            return Dense(width, dtype=self.dtype, kernel_init=_init, name=name)(x)

        def bias(scores: jax.Array) -> jax.Array:
            shape = scores.shape
            scores = scores.reshape(batch, per_side**2, self.num_heads, area, area)
            offsets = (2 * self.window - 1) ** 2  # of two tokens of a window
            table = self.param("position_bias", _init, (offsets, self.num_heads))
            places = _relative_positions(self.window)
            biases = table[places].transpose(2, 0, 1)
            scores = scores + biases[None, None]
            if self.shift:
                near = _neighbours(side, self.window, self.shift)
                # The authors' constant stands for minus infinity.
                mask = np.where(near, np.float32(0), np.float32(-100))
                scores = scores + mask[None, :, None]
            return scores.reshape(shape)

        x = x.reshape(batch, side, side, width)
        x = jnp.roll(x, -self.shift, (1, 2))
        x = x.reshape(batch, per_side, self.window, per_side, self.window, width)
        x = x.swapaxes(2, 3)
        x = x.reshape(batch, side**2, width)  # window after window
        query = project("query", x).reshape(-1, area, width)
        key = project("key", x).reshape(-1, area, width)
        value = project("value", x).reshape(-1, area, width)
        mixed = attend(query, key, value, self.num_heads, bias)
        y = project("out", mixed.reshape(batch, side**2, width))
        y = y.reshape(batch, per_side, per_side, self.window, self.window, width)
        y = y.swapaxes(2, 3)
        y = y.reshape(batch, side, side, width)
        y = jnp.roll(y, self.shift, (1, 2))
        return y.reshape(batch, side**2, width)


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
                f"the grid must have an even side before patches are merged, got {side}x{side}. "
                "Use images whose side is a multiple of patch_size * 2 for every merging."
            )
        x = x.reshape(batch, side // 2, 2, side // 2, 2, width)
        # Public checkpoints have the neighbours in this order: (0, 0), (1, 0), (0, 1), (1, 1).
        neighbours = x.transpose(0, 1, 3, 4, 2, 5)
        x = neighbours.reshape(batch, tokens // 4, 4 * width)
        x = LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name="norm")(x)
        reduction = Dense(
            2 * width, use_bias=False, dtype=self.dtype, kernel_init=_init, name="reduction"
        )
        return reduction(x)


class Swin(nn.Module):
    """Swin Transformer on square images, with attention in windows that every second block shifts.

    The resolution halves between stages. A stage whose grid is not larger than the window has one
    window of the grid's size, never shifted. Otherwise the window must divide the grid, since
    nothing is padded. Stochastic depth is left out.

    Attributes:
      patch_size: The side of the square patches, which must divide the image.
      window: The side of the windows, in tokens.
      width: The token dimension D of the first stage. Every further stage doubles it.
      depths: The number of blocks of each stage.
      num_heads: The heads of each stage, of 32 dimensions each in the published sizes.
      mlp_ratio: The hidden width of the MLPs over the width of the tokens.
      norm_epsilon: The number added to the variance in every LayerNorm.
      activation: The activation in the MLPs. The default is the exact GELU.
      head_hidden: The width of a hidden layer in front of the head, with that activation. 0 is
          none.
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
        """The number of blocks in all stages. The model can be cut after each but the last."""
        return sum(self.depths)

    @property
    def prefix_tokens(self) -> int:
        """The number of learned tokens in front of the patches."""
        return 0

    @nn.compact
    def __call__(self, x: jax.Array, start: int = 0, stop: int | None = None) -> jax.Array:
        """Maps images [B, S, S, C] to float32 logits [B, num_classes], or does a part of that.

        The merging of patches between two stages belongs to the block before it, which returns [B,
        T / 4, 2 D].

        Args:
          x: Images if `start` is 0, otherwise the output tokens [B, T, D] of block start - 1, row
              by row.
          start, stop: The blocks to run, counted through all stages. With `stop`, the call returns
            the output tokens [B, T, D] of block stop - 1. `init` makes the parameters of these
            blocks only.

        Raises:
          ValueError: Images are not square or patch_size does not divide them. window does not
            divide a larger grid. A merging meets an odd grid. depths and num_heads differ in
            length. Some num_heads does not divide the width.
        """
        if len(self.depths) != len(self.num_heads):
            raise ValueError(
                f"depths and num_heads must have one entry per stage, got {self.depths} and "
                f"{self.num_heads}."
            )
        if start == 0:
            x = self._embed(x)
        common = {"dtype": self.dtype, "norm_epsilon": self.norm_epsilon}
        block = {**common, "activation": self.activation, "kernel_init": _init}
        for stage, k in self._blocks()[start:stop]:
            window, shift = self._window(stage, _side(x))
            # Windows are shifted in every second block (Eq. 3).
            if k % 2 == 0:
                shift = 0
            attention = functools.partial(WindowAttention, window=window, shift=shift)
            mlp_width = self.mlp_ratio * x.shape[-1]
            name = f"stage_{stage}_block_{k}"
            x = Block(self.num_heads[stage], mlp_width, **block, attention=attention, name=name)(x)
            is_last_of_stage = k + 1 == self.depths[stage]
            if is_last_of_stage and stage + 1 < len(self.depths):
                x = PatchMerging(name=f"stage_{stage + 1}_merge", **common)(x)
        if stop is not None:
            return x
        x = LayerNorm(epsilon=self.norm_epsilon, dtype=jnp.float32, name="norm")(x)
        y = jnp.mean(x, axis=1)
        head = {"dtype": jnp.float32, "kernel_init": _init}
        if self.head_hidden:
            hidden = Dense(self.head_hidden, name="head_hidden", **head)(y)
            y = self.activation(hidden)
        return Dense(self.num_classes, name="head", **head)(y)

    def _blocks(self) -> list[tuple[int, int]]:
        """Returns (stage, number in the stage) of every block."""
        blocks: list[tuple[int, int]] = []
        for stage, depth in enumerate(self.depths):
            blocks += [(stage, k) for k in range(depth)]
        return blocks

    def _embed(self, x: jax.Array) -> jax.Array:
        """Maps images [B, S, S, C] to tokens [B, T, D], row by row."""
        batch, height, width, _ = x.shape
        if height != width:
            raise ValueError(f"images must be square, got {height}x{width}. Resize or crop them.")
        if height % self.patch_size:
            raise ValueError(
                f"patch_size must divide the image {height}x{width}, got {self.patch_size}."
            )
        size = (self.patch_size, self.patch_size)
        common = {"strides": size, "padding": "VALID", "dtype": self.dtype, "kernel_init": _init}
        patches = Conv(self.width, size, name="embed", **common)(x)
        x = patches.reshape(batch, -1, self.width)
        return LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name="embed_norm")(x)

    def _window(self, stage: int, side: int) -> tuple[int, int]:
        """Returns side and shift of the windows on a grid of `side` tokens."""
        if side <= self.window:  # one window
            return side, 0
        if side % self.window:
            raise ValueError(
                f"window must divide the {side}x{side} grid of stage {stage}, got {self.window}. "
                "Resize the images or choose another window (published: 7 for 224x224, 12 for "
                "384x384)."
            )
        return self.window, self.window // 2
