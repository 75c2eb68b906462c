"""Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) and DeiT.

DeiT is by Touvron et al. 2021, arXiv:2012.12877.
"""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.files import check_choice
from jaxdp.models.layers import Conv, Dense, GivenShapes, LayerNorm, gelu

_init = nn.initializers.xavier_uniform()


class Product(nn.Module):
    """Product of two activations.

    It is a module without parameters, so that `nn.intercept_methods` sees it.

    Attributes:
      equation: The equation of `jnp.einsum`. The first axis n is images times heads, heads fastest.
      dtype: The dtype of the sums. None is the dtype of the operands.
    """

    equation: str
    num_heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns the product."""
        return jnp.einsum(self.equation, a, b, preferred_element_type=self.dtype)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    num_heads: int,
    bias: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Returns softmax(bias(Q K^T / sqrt(d))) V of every head, [n, T, D] from [n, T, D] each.

    It is called inside a compact module. Scores and softmax are float32. `bias` maps scores [n
    num_heads, T, T] to scores.

    Raises:
      ValueError: num_heads does not divide D.
    """
    n, tokens, width = query.shape
    if width % num_heads:
        raise ValueError(f"num_heads must divide the width {width}, got {num_heads}.")

    def heads(x: jax.Array) -> jax.Array:
        x = x.reshape(n, tokens, num_heads, -1).swapaxes(1, 2)
        # Images and heads share one axis. With two axes XLA on CPU transposes whole score matrices
        # under vmap.
        return x.reshape(n * num_heads, tokens, -1)

    product = Product("nqd,nkd->nqk", num_heads, jnp.float32, name="scores")
    scores = product(heads(query), heads(key)) * (width // num_heads) ** -0.5
    if bias is not None:
        scores = bias(scores)
    weights = jax.nn.softmax(scores, axis=-1)
    mixture = Product("nqk,nkd->nqd", num_heads, name="mixture")
    y = mixture(weights.astype(value.dtype), heads(value))
    y = y.reshape(n, num_heads, tokens, -1).swapaxes(1, 2)
    return y.reshape(n, tokens, width)


class Attention(nn.Module):
    """Multi-head self-attention."""

    num_heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens [B, T, D] to [B, T, D]."""

        def project(name: str, x: jax.Array) -> jax.Array:
            return Dense(x.shape[-1], dtype=self.dtype, kernel_init=_init, name=name)(x)

        query = project("query", x)
        key = project("key", x)
        value = project("value", x)
        return project("out", attend(query, key, value, self.num_heads))


class Block(GivenShapes):
    """Encoder block: self-attention and an MLP, each with a residual connection and a LayerNorm.

    Attributes:
      norm_order: "pre" is x + f(LayerNorm(x)) for both parts f, "post" is LayerNorm(x + f(x)).
      kernel_init: The initialiser of the layers of the MLP.
      attention: `attention(num_heads, dtype=, name=)` makes the module.
      layer_scale: The initial factor of each channel of both branches. 0 is no factor.
    """

    num_heads: int
    mlp_width: int
    dtype: Any = None
    norm_order: Literal["pre", "post"] = "pre"
    norm_epsilon: float = 1e-6
    activation: Callable[[jax.Array], jax.Array] = gelu
    kernel_init: Callable[..., jax.Array] = _init
    attention: Callable[..., Any] = Attention
    layer_scale: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens [B, T, D] to [B, T, D]."""
        norm = {"epsilon": self.norm_epsilon, "dtype": self.dtype}
        norms = [LayerNorm(name="norm_0", **norm), LayerNorm(name="norm_1", **norm)]
        dense = {"dtype": self.dtype, "kernel_init": self.kernel_init}
        attention = self.attention(self.num_heads, dtype=self.dtype, name="attention")

        def mlp(x: jax.Array) -> jax.Array:
            y = self.activation(Dense(self.mlp_width, name="mlp_0", **dense)(x))
            return Dense(x.shape[-1], name="mlp_1", **dense)(y)

        def scaled(name: str, y: jax.Array) -> jax.Array:
            if not self.layer_scale:
                return y
            initial = nn.initializers.constant(self.layer_scale)
            width = y.shape[-1]
            factor = self.param(name, initial, (width,))
            factor = factor.astype(y.dtype)
            return y * factor.reshape(1, 1, width)

        for k, branch in enumerate((attention, mlp)):
            name = f"layer_scale_{k}"
            if self.norm_order == "post":
                x = norms[k](x + scaled(name, branch(x)))
            else:
                x = x + scaled(name, branch(norms[k](x)))
        return x


class ViT(GivenShapes):
    """Vision Transformer with learned positions.

    Attributes:
      patch_size: The side of the square patches, which must divide height and width of the image.
      width: The token dimension D.
      num_heads: The number of heads, of width / num_heads dimensions each (64 in the sizes Ti, S, B
          and L).
      mlp_width: The hidden width of the MLPs, usually 4 * width.
      pool: "token" classifies a learned class token in front of the patches, "mean" the mean of the
          patch tokens. "token_and_mean" concatenates both, as the linear heads of DINOv2 do.
      norm_order: "pre" as in the paper, or "post" as in the first Transformer (Vaswani et al.,
        arXiv:1706.03762). See `Block`. Both end in a LayerNorm before the classification.
      norm_epsilon: The number added to the variance in every LayerNorm. Hugging Face's ViT and DeiT
          have 1e-12.
      activation: The activation in the MLPs. The default is the exact GELU.
      distilled: Whether a second learned token follows the class token, as in DeiT. It needs
          pool="token".
      distilled_head: Whether that token has its own head, "head_distilled". The logits are then the
        mean of the two heads, DeiT's classifier at inference (section 3 of its paper). DeiT's
        training, in which each head has its own target, is not built in. False classifies the class
        token alone.
      head_hidden: The width of a hidden layer in front of the head, with the activation of the
          MLPs. 0 is none.
      layer_scale: The initial value of a learned factor for each channel of every branch (Touvron
          et al. 2021, arXiv:2103.17239). 0 is no factor. DINOv2 has it.
    """

    num_classes: int
    patch_size: int = 16
    width: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_width: int = 768
    pool: Literal["token", "mean", "token_and_mean"] = "token"
    dtype: Any = None
    norm_order: Literal["pre", "post"] = "pre"
    norm_epsilon: float = 1e-6
    activation: Callable[[jax.Array], jax.Array] = gelu
    distilled: bool = False
    distilled_head: bool = True
    head_hidden: int = 0
    layer_scale: float = 0.0

    @property
    def num_blocks(self) -> int:
        """The number of blocks. The model can be cut after block 1, ..., num_blocks - 1."""
        return self.depth

    @property
    def prefix_tokens(self) -> int:
        """The number of learned tokens in front of the patches."""
        return (self.pool != "mean") + self.distilled

    @property
    def head_tokens(self) -> int:
        """The number of leading tokens that the head reads. 0 is all tokens."""
        return self.prefix_tokens if self.pool == "token" else 0

    @nn.compact
    def __call__(self, x: jax.Array, start: int = 0, stop: int | None = None) -> jax.Array:
        """Maps images [B, H, W, C] to float32 logits [B, num_classes], or does a part of that.

        Args:
          x: Images if `start` is 0, otherwise the output tokens [B, T, D] of block start - 1.
          start, stop: The blocks to run. With `stop`, the call returns the output tokens [B, T, D]
            of block stop - 1. `init` makes the parameters of these blocks only.
        """
        check_choice("pool", self.pool, ("token", "mean", "token_and_mean"))
        check_choice("norm_order", self.norm_order, ("pre", "post"))
        if self.distilled and self.pool != "token":
            raise ValueError(f"distilled=True needs pool='token', got pool={self.pool!r}.")
        if start == 0:
            x = self._embed(x)
        for k in range(self.depth)[start:stop]:
            x = Block(
                num_heads=self.num_heads,
                mlp_width=self.mlp_width,
                dtype=self.dtype,
                norm_order=self.norm_order,
                norm_epsilon=self.norm_epsilon,
                activation=self.activation,
                layer_scale=self.layer_scale,
                name=f"block_{k}",
            )(x)
        if stop is not None:
            return x
        x = LayerNorm(epsilon=self.norm_epsilon, dtype=jnp.float32, name="norm")(x)
        if self.pool == "token":
            y = x[:, 0]
        else:
            patches = x[:, self.prefix_tokens :]
            y = jnp.mean(patches, axis=1)
        if self.pool == "token_and_mean":
            y = jnp.concatenate([x[:, 0], y], axis=1)
        if self.head_hidden:
            hidden = Dense(self.head_hidden, dtype=jnp.float32, name="head_hidden")
            y = self.activation(hidden(y))
        logits = Dense(self.num_classes, dtype=jnp.float32, name="head")(y)
        if not (self.distilled and self.distilled_head):
            return logits
        distilled_head = Dense(self.num_classes, dtype=jnp.float32, name="head_distilled")
        return (logits + distilled_head(x[:, 1])) / 2

    def _embed(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to tokens [B, T, D] with positions, patches row by row."""
        if x.shape[1] % self.patch_size or x.shape[2] % self.patch_size:
            raise ValueError(
                f"patch_size must divide the image {x.shape[1]}x{x.shape[2]}, got "
                f"{self.patch_size}."
            )
        size = (self.patch_size, self.patch_size)
        x = Conv(self.width, size, strides=size, padding="VALID", dtype=self.dtype, name="embed")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        names = []
        if self.pool != "mean":
            names.append("class_token")
        if self.distilled:
            names.append("distillation_token")
        init = nn.initializers.normal(0.02)
        tokens_in_all = x.shape[1] + len(names)
        positions = self.param("positions", init, (1, tokens_in_all, self.width))
        if names:
            # Learned tokens are added to zero rows in front, so that the weights meet the data in
            # one sum.
            zeros = nn.initializers.zeros
            tokens = [self.param(name, zeros, (1, 1, self.width)) for name in names]
            in_front = jnp.concatenate(tokens, axis=1)
            positions = positions + jnp.pad(in_front, ((0, 0), (0, x.shape[1]), (0, 0)))
            x = jnp.pad(x, ((0, 0), (len(names), 0), (0, 0)))
        return x + positions.astype(x.dtype)
