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
        kind = LayerNorm if self.form == "gpt2" else RMSNorm
        return kind(epsilon=self.norm_epsilon, dtype=self.dtype, name=name)

    def dense(self, features: int, name: str, parts: int = 1) -> Dense:
        bias = self.form == "gpt2"
        return Dense(
            features, dtype=self.dtype, use_bias=bias, kernel_init=_normal(parts), name=name
        )


class LanguageModel(GivenShapes):
    """A causal transformer. Its layers are one scan, with parameters that are stacked along a first
    axis.

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
        if self.form not in ("gpt2", "llama"):
            raise ValueError(f"form must be 'gpt2' or 'llama', got {self.form!r}.")
        embed = Embed(
            self.num_classes, self.width, embedding_init=_normal(1), dtype=self.dtype, name="embed"
        )
        x = embed(jnp.maximum(tokens, 0))
        if self.form == "gpt2":
            positions = self.param("positions", _normal(1), (self.positions, self.width))
            x = x + positions[None, : tokens.shape[1]].astype(x.dtype)
        block = nn.remat(_Block, prevent_cse=False) if self.remat else _Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            length=self.depth,
        )
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Layout)}
        layout = _Layout(**fields | {"kv_heads": self.kv_heads or self.num_heads})
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
        its = self.layout
        x = x + _Attention(its, name="attention")(its.norm("norm_0")(x))
        y = its.norm("norm_1")(x)
        hidden = its.dense(its.mlp_width, "mlp_0")(y)
        if its.form == "gpt2":
            hidden = nn.gelu(hidden, approximate=True)
        else:
            hidden = nn.silu(its.dense(its.mlp_width, "mlp_gate")(y)) * hidden
        return x + its.dense(x.shape[-1], "mlp_1", 2 * its.depth)(hidden), None


class _Attention(nn.Module):
    """Causal attention. A position attends to itself and to those before it."""

    layout: _Layout

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        its, length, width = self.layout, x.shape[1], x.shape[2]
        heads, shared = its.num_heads, its.kv_heads
        if width % heads or heads % shared:
            raise ValueError(
                f"num_heads must divide the width {width}, and kv_heads must divide num_heads, got "
                f"num_heads={heads} and kv_heads={shared}."
            )
        query = its.dense(width, "query")(x)
        key, value = (its.dense(shared * (width // heads), name)(x) for name in ("key", "value"))
        if its.form == "llama":
            query, key = (
                _rotated(query, heads, its.rotary_base),
                _rotated(key, shared, its.rotary_base),
            )
        if shared < heads:
            key, value = (
                jnp.repeat(y.reshape(*y.shape[:2], shared, -1), heads // shared, axis=2).reshape(
                    x.shape
                )
                for y in (key, value)
            )
        before = jnp.tril(jnp.ones((length, length), bool))
        mixed = attend(
            query, key, value, heads, lambda scores: jnp.where(before[None], scores, -jnp.inf)
        )
        return its.dense(width, "out", 2 * its.depth)(mixed)


def _normal(parts: int) -> Callable[..., jax.Array]:
    """Returns the initialiser of GPT-2, whose last layers of `parts` residual branches add up to
    one.
    """
    return nn.initializers.normal(0.02 / math.sqrt(parts))


def _rotated(x: jax.Array, heads: int, base: float) -> jax.Array:
    """Rotates the two halves of every head of [B, T, heads d] by angles that grow with the
    position.
    """
    batch, length, width = x.shape
    half = width // heads // 2
    angles = np.arange(length)[:, None] * base ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[None, :, None, :] for f in (np.cos, np.sin))
    first, second = jnp.split(x.astype(jnp.float32).reshape(batch, length, heads, -1), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
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
    def add(place: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = predict(params, tokens[None])[0, place - 1]
        drawn = jax.random.categorical(
            jax.random.fold_in(key, place), logits / jnp.maximum(temperature, 1e-6)
        )
        return tokens.at[place].set(
            jnp.where(temperature > 0, drawn, logits.argmax()).astype(tokens.dtype)
        )

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
    """Continues a prompt token by token. What it returns is post-processing of the parameters and
    of the prompt.

    Every token costs one evaluation of the whole sequence. No keys and values are kept between
    tokens.

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
      ValueError: The prompt is empty, or length or temperature is out of range.
    """
    start = len(prompt)
    if not 1 <= start < length:
        raise ValueError(f"prompt must have 1 to length - 1 = {length - 1} tokens, got {start}.")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}.")
    tokens = np.full(length, PADDING, np.int32)
    tokens[:start] = prompt
    chosen = _continued(
        predict, params, jnp.asarray(tokens), jax.random.key(seed), start, jnp.float32(temperature)
    )
    return np.asarray(chosen)
