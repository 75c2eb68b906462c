"""Causal transformers for language in the forms of GPT-2 and Llama, and generation.

GPT-2: Radford et al. 2019. Llama: Touvron et al. 2023, arXiv:2302.13971, with rotary positions (Su
et al. 2021, arXiv:2104.09864) and grouped queries (Ainslie et al. 2023, arXiv:2305.13245).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.files import check_choice
from jaxdp.models.layers import Dense, Embed, GivenShapes, LayerNorm, RMSNorm
from jaxdp.models.vit import attend

Params = Any
PADDING = -1  # fills the rows of shorter texts


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What the parts of a `LanguageModel` know of its attributes."""

    form: str
    depth: int
    num_heads: int
    kv_heads: int
    mlp_width: int
    norm_epsilon: float
    rotary_base: float
    dtype: Any

    def norm(self, name: str) -> Any:
        """Returns a normalisation of the form."""
        norm_class = LayerNorm if self.form == "gpt2" else RMSNorm
        return norm_class(epsilon=self.norm_epsilon, dtype=self.dtype, name=name)

    def dense(self, features: int, name: str, branches: int = 1) -> Dense:
        """Returns a dense layer, the last one of one of so many residual branches."""
        return Dense(
            features,
            dtype=self.dtype,
            use_bias=self.form == "gpt2",
            kernel_init=_normal(branches),
            name=name,
        )


class LanguageModel(GivenShapes):
    """A causal transformer.

    Its layers are one scan. Their parameters are stacked along a first axis.

    Attributes:
      num_classes: The number of tokens in the vocabulary.
      positions: The largest length of a sequence.
      width: The token dimension D.
      depth: The number of blocks.
      num_heads: The number of heads, of width / num_heads dimensions each.
      mlp_width: The hidden width of the MLPs.
      form: "gpt2" has learned positions, LayerNorm, the approximate GELU and biases. "llama" has
        rotary positions, RMSNorm, a gated MLP with SiLU, and no biases.
      kv_heads: The number of heads of keys and values, which divides num_heads. Every num_heads /
        kv_heads heads of queries share one.
      tied: Whether the output layer is the transposed embedding. Otherwise its name is "unembed".
      norm_epsilon: The number added to variances in the normalisations.
      rotary_base: The base of the wavelengths of rotary positions.
      remat: Whether the backward pass computes the inside of each block again, which saves memory
          and costs time.
    """

    num_classes: int
    positions: int = 128
    width: int = 128
    depth: int = 4
    num_heads: int = 4
    mlp_width: int = 512
    form: Literal["gpt2", "llama"] = "gpt2"
    kv_heads: int | None = None
    tied: bool = True
    norm_epsilon: float = 1e-5
    rotary_base: float = 10_000.0
    remat: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens, integers [B, T], to float32 logits of the next ones, [B, T, num_classes].

        A negative token is padding. A token of num_classes or more gives NaN.

        Raises:
          ValueError: The tokens are no integers, there are more than `positions` of them, or the
              form is unknown.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens must be integers [B, T], got {tokens.dtype} {tokens.shape}. Encode texts "
                "first."
            )
        if tokens.shape[1] > self.positions:
            raise ValueError(
                f"tokens must have at most positions={self.positions} columns, got "
                f"{tokens.shape[1]}. Cut the texts, or take a model with more positions."
            )
        check_choice("form", self.form, ("gpt2", "llama"))
        embed = Embed(
            self.num_classes, self.width, embedding_init=_normal(1), dtype=self.dtype, name="embed"
        )
        x = embed(jnp.maximum(tokens, 0))  # padding reads row 0: positions before it do not see it
        if self.form == "gpt2":
            positions = self.param("positions", _normal(1), (self.positions, self.width))
            used = positions[None, : tokens.shape[1]]
            x = x + used.astype(x.dtype)
        # Inside a scan XLA does not merge the two computations of a block.
        block = nn.remat(_Block, prevent_cse=False) if self.remat else _Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            length=self.depth,
        )
        layout = _Layout(
            form=self.form,
            depth=self.depth,
            num_heads=self.num_heads,
            kv_heads=self.kv_heads or self.num_heads,
            mlp_width=self.mlp_width,
            norm_epsilon=self.norm_epsilon,
            rotary_base=self.rotary_base,
            dtype=self.dtype,
        )
        x, _ = layers(layout, name="blocks")(x)
        x = layout.norm("norm")(x)
        if self.tied:
            kernel = embed.embedding.T
        else:
            kernel = _Kernel((self.width, self.num_classes), name="unembed")()
        return jnp.einsum(
            "btd,dv->btv", x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
        )


class _Kernel(GivenShapes):
    shape: tuple[int, int]

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", _normal(1), self.shape)


class _Block(nn.Module):
    layout: _Layout

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        """Maps tokens [B, T, D] to [B, T, D]."""
        layout = self.layout
        branches = 2 * layout.depth  # two of each block
        attention = _Attention(layout, name="attention")
        y = layout.norm("norm_0")(x)
        x = x + attention(y)
        y = layout.norm("norm_1")(x)
        hidden = layout.dense(layout.mlp_width, "mlp_0")(y)
        if layout.form == "gpt2":
            hidden = nn.gelu(hidden, approximate=True)
        else:
            gate = layout.dense(layout.mlp_width, "mlp_gate")(y)
            hidden = nn.silu(gate) * hidden
        y = layout.dense(x.shape[-1], "mlp_1", branches)(hidden)
        return x + y, None


class _Attention(nn.Module):
    """Causal attention. A position attends to itself and to those before it."""

    layout: _Layout

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layout = self.layout
        _, length, width = x.shape
        heads = layout.num_heads
        kv_heads = layout.kv_heads
        if width % heads or heads % kv_heads:
            raise ValueError(
                f"num_heads must divide the width {width}, and kv_heads must divide num_heads, got "
                f"num_heads={heads} and kv_heads={kv_heads}."
            )
        kv_width = kv_heads * (width // heads)
        query = layout.dense(width, "query")(x)
        key = layout.dense(kv_width, "key")(x)
        value = layout.dense(kv_width, "value")(x)
        if layout.form == "llama":
            query = _rotated(query, heads, layout.rotary_base)
            key = _rotated(key, kv_heads, layout.rotary_base)
        if kv_heads < heads:
            key = _repeated(key, kv_heads, heads)
            value = _repeated(value, kv_heads, heads)
        is_past = jnp.tril(jnp.ones((length, length), bool))

        # A row keeps its diagonal, so no softmax is over infinities alone.
        def causal(scores: jax.Array) -> jax.Array:
            return jnp.where(is_past[None], scores, -jnp.inf)

        mixed = attend(query, key, value, heads, causal)
        return layout.dense(width, "out", 2 * layout.depth)(mixed)


def _repeated(x: jax.Array, kv_heads: int, heads: int) -> jax.Array:
    """Repeats the heads of keys or values, [B, T, kv_heads d] to [B, T, heads d]."""
    batch, length, _ = x.shape
    by_head = x.reshape(batch, length, kv_heads, -1)
    repeated = jnp.repeat(by_head, heads // kv_heads, axis=2)
    return repeated.reshape(batch, length, -1)


def _normal(branches: int) -> Callable[..., jax.Array]:
    """Returns the initialiser of GPT-2, whose residual branches add up to the variance of one."""
    return nn.initializers.normal(0.02 / math.sqrt(branches))


def _rotated(x: jax.Array, heads: int, base: float) -> jax.Array:
    """Rotates the halves of every head of [B, T, heads d] by angles that grow with the position."""
    batch, length, width = x.shape
    half = width // heads // 2
    # In NumPy's float64: the angles of late positions have too many turns for float32.
    frequencies = base ** (-np.arange(half) / half)
    positions = np.arange(length)
    angles = positions[:, None] * frequencies
    cos = jnp.asarray(np.cos(angles), jnp.float32)[None, :, None, :]
    sin = jnp.asarray(np.sin(angles), jnp.float32)[None, :, None, :]
    by_head = x.astype(jnp.float32).reshape(batch, length, heads, -1)
    first, second = jnp.split(by_head, 2, axis=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    turned = jnp.concatenate([turned_first, turned_second], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _continued(
    predict: Callable[[Params, jax.Array], jax.Array],
    params: Params,
    tokens: jax.Array,
    key: jax.Array,
    start: int,
    temperature: jax.Array,
) -> jax.Array:
    """Returns the tokens with those from `start` on filled in."""

    def add(place: jax.Array, tokens: jax.Array) -> jax.Array:
        # What follows `place - 1` is padding, which causal attention does not see.
        logits = predict(params, tokens[None])[0, place - 1]
        tempered = logits / jnp.maximum(temperature, 1e-6)  # 0 takes the argmax below
        own_key = jax.random.fold_in(key, place)
        drawn = jax.random.categorical(own_key, tempered)
        token = jnp.where(temperature > 0, drawn, logits.argmax())
        return tokens.at[place].set(token.astype(tokens.dtype))

    return jax.lax.fori_loop(start, len(tokens), add, tokens)


def generate(
    predict: Callable[[Params, jax.Array], jax.Array],
    params: Params,
    prompt: Sequence[int],
    *,
    length: int,
    seed: int,
    temperature: float = 1.0,
) -> np.ndarray:
    """Continues a prompt token by token.

    The result is post-processing of the parameters and of the prompt. Every token costs one
    evaluation of the whole sequence. No keys and values are kept between tokens.

    Args:
      predict: `predict(params, tokens [1, T]) -> logits [1, T, V]`, such as `Pretrained.apply_fn`.
        Make it once: each function is compiled once.
      params: The parameters for `predict`.
      prompt: Token ids, at least one.
      length: The number of tokens with the prompt, at most the positions of the model.
      seed: The seed of the choice of tokens.
      temperature: The divisor of the logits. 0 takes the most probable token.

    Returns:
      int32 [length]. It starts with the prompt.

    Raises:
      ValueError: The prompt is empty or has a token that the model lacks, or length or temperature
        is out of range.
      TypeError: A token of the prompt is no int.
    """
    start = len(prompt)
    if not 1 <= start < length:
        raise ValueError(f"prompt must have 1 to length - 1 = {length - 1} tokens, got {start}.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}.")
    tokens = np.full(length, PADDING, np.int32)
    shape = jax.eval_shape(predict, params, tokens[None]).shape
    given = np.asarray(prompt)
    if given.dtype.kind not in "iu":
        raise TypeError(f"prompt must have token ids, which are whole numbers, got {prompt!r}.")
    # A lookup outside of the table is NaN, from which any token would follow.
    if given.min() < 0 or given.max() >= shape[-1]:
        raise ValueError(f"prompt must have tokens in [0, {shape[-1]}), got {prompt!r}.")
    tokens[:start] = given
    key = jax.random.key(seed)
    continued = _continued(predict, params, tokens, key, start, np.float32(temperature))
    return np.asarray(continued)
