"""What a client makes of the frontend alone (section 4.3 and Table 3 of Split Adaptation).

    options = {"num_classes": 5, "learning_rate": 1e-3, "key": key}
    adapted = adapt(probe_quantized_frontend, backbone, frontend, images, labels, **options)

Each attack has the form of a baseline of `jaxdp.split.baselines`, whose `adapt` runs it.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxdp.split.backbone import Backbone, Params
from jaxdp.split.baselines import (
    Baseline,
    Blocks,
    FirstTokens,
    RecipeAndParams,
    is_head,
    recipe_for,
)
from jaxdp.split.quantization import QuantizedFrontend, quantized_front


@dataclasses.dataclass(frozen=True)
class Quantized:
    """The quantised frontend in params["frontend"], from images to [B, T, D].

    It quantises activations.
    """

    backbone: Backbone

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Runs the frontend."""
        return quantized_front(self.backbone, params["frontend"], x)


@dataclasses.dataclass(frozen=True)
class Pool:
    """The first token, or the mean of all tokens of a model without a class token.

    A LayerNorm without parameters comes before, which suffices for a linear head.
    """

    prefix_tokens: int

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, D]."""
        tokens = x[:, :1] if self.prefix_tokens else x
        norm = nn.LayerNorm(use_bias=False, use_scale=False)
        normalised: Any = norm.apply({}, tokens)
        return jnp.mean(normalised, axis=1)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear head for pooled representations."""

    num_classes: int

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Maps [B, D] to logits [B, num_classes]."""
        logits: Any = nn.Dense(self.num_classes).apply({"params": params["head"]}, x)
        return logits


def probe_quantized_frontend(
    backbone: Backbone, frontend: Any, *, num_classes: int, key: jax.Array
) -> RecipeAndParams:
    """Trains a head on the quantised frontend: "Quant. Frontend" of Table 3."""
    params = {"frontend": _checked(frontend), "head": _linear_head(backbone, num_classes, key)}
    features = (Quantized(backbone), Pool(backbone.prefix_tokens))
    return recipe_for(params, (Linear(num_classes),), is_head, features=features)


def probe_original_frontend(
    backbone: Backbone, params: Params, *, num_classes: int, key: jax.Array
) -> RecipeAndParams:
    """Trains a head on the original frontend: "Original Frontend" of Table 3.

    No client has that frontend.
    """
    front, _ = backbone.divide(params)
    params = {**front, "head": _linear_head(backbone, num_classes, key)}
    features = (Blocks(backbone, 0, backbone.cut), Pool(backbone.prefix_tokens))
    return recipe_for(params, (Linear(num_classes),), is_head, features=features)


def tune_quantized_frontend(
    backbone: Backbone, frontend: Any, *, num_classes: int, key: jax.Array
) -> RecipeAndParams:
    """Trains a head and all weights of the dequantised frontend.

    This is stronger than the paper's test.

    Activations are not rounded here, since a client need not round them.
    """
    params = {**_checked(frontend).params, "head": _linear_head(backbone, num_classes, key)}
    front = Blocks(backbone, 0, backbone.cut)
    pieces = (front, Pool(backbone.prefix_tokens), Linear(num_classes))
    return recipe_for(params, pieces, lambda path: True)


def probe_auxiliary_backend(auxiliary: Backbone, auxiliary_params: Params) -> Baseline:
    """Trains the head of another model behind the frontend: "Auxiliary Backend" of Table 3.

    The last blocks of the other model follow the frontend. Its cut is where its backend begins. The
    paper takes the last third of DINOv2-L. `auxiliary_params` belong to the whole model. The
    baseline raises ValueError if the tokens of the two models do not fit together.
    """

    def baseline(
        backbone: Backbone, frontend: Any, *, num_classes: int, key: jax.Array
    ) -> RecipeAndParams:
        returned = (backbone.tokens[1], backbone.prefix_tokens)
        expected = (auxiliary.tokens[1], auxiliary.prefix_tokens)
        if returned != expected:
            raise ValueError(
                f"auxiliary must take tokens of width {returned[0]} with {returned[1]} in front of "
                f"the patches, as the frontend returns, got width {expected[0]} with "
                f"{expected[1]}. Choose another model or another cut."
            )
        _, back = auxiliary.divide(auxiliary_params)
        other, back = auxiliary.with_head(key, back, num_classes)
        last = other.model.num_blocks
        params = {"frontend": _checked(frontend), **back}
        features = (
            Quantized(backbone),
            Blocks(other, other.cut, last),
            FirstTokens(other.head_tokens),
        )
        return recipe_for(params, (Blocks(other, last, None),), is_head, features=features)

    return baseline


def _linear_head(backbone: Backbone, num_classes: int, key: jax.Array) -> Any:
    _, width = backbone.tokens
    return nn.Dense(num_classes).init(key, jnp.zeros((1, width)))["params"]


def _checked(frontend: Any) -> QuantizedFrontend:
    if not isinstance(frontend, QuantizedFrontend):
        raise ValueError(
            f"params must be the client's QuantizedFrontend, got {type(frontend).__name__}."
        )
    return frontend
