"""Multi-layer perceptron."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.models.layers import Dense


class MLP(nn.Module):
    """Dense layers with an activation in between. The input is flattened per example.

    Attributes:
      hidden: The widths of the hidden layers.
      activation: The activation after every hidden layer.
    """

    num_classes: int
    hidden: Sequence[int] = (512, 512)
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, ...] to float32 logits [B, num_classes]."""
        x = x.reshape(x.shape[0], -1)
        for k, width in enumerate(self.hidden):
            x = self.activation(Dense(width, dtype=self.dtype, name=f"dense_{k}")(x))
        return Dense(self.num_classes, dtype=jnp.float32, name="head")(x.astype(jnp.float32))
