"""Which part of a public model is trained: leaves by name, LoRA, or a new head on features that
never change.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.models.checkpoints import HEADS, Pretrained

Params = Mapping[str, Any]
LORA = "lora"


def trainable(choice: str, params: Params) -> Callable[[str, Any], bool]:
    """Returns the argument `trainable` of `jaxdp.clipped_grad` and `jaxdp.finetune.dp_sgd`.

    Args:
      choice: "all". "head", the last layer. "norms", the scales and biases of normalisation layers,
        and the head. "lora", the factors of `with_lora`, and the head. Or a regular expression that
        matches whole paths, such as "head/.*|block_11/.*" or ".*/bias|head/.*".
      params: The parameters of the model, nested dicts.

    Raises:
      ValueError: Nothing is chosen, or the regular expression is not valid. The message lists all
          paths.
    """
    paths = list(flatten_dict(dict(params), sep="/"))
    norms = {path.rpartition("/")[0] for path in paths if path.endswith("/scale")}
    head = {path for path in paths if path.split("/")[0] in HEADS}
    groups: dict[str, set[str]] = {
        "all": set(paths),
        "head": head,
        "norms": {path for path in paths if path.rpartition("/")[0] in norms},
        LORA: {path for path in paths if path.startswith(f"{LORA}/")},
    }
    try:
        chosen = (
            groups[choice]
            if choice in groups
            else {path for path in paths if re.fullmatch(choice, path)}
        )
    except re.error as error:
        raise ValueError(
            f"trainable must be a regular expression, got {choice!r} ({error})."
        ) from error
    if not chosen:
        raise ValueError(
            f"trainable={choice!r} matches no parameter. Give {', '.join(map(repr, groups))}, or a "
            f"regular expression for whole paths among {', '.join(sorted(paths))}."
        )
    kept = chosen | head if choice in groups else chosen
    return lambda path, leaf: path in kept


class _WithLoRA(Pretrained):
    def apply_fn(self, params: Params, inputs: jax.Array) -> jax.Array:
        rest = {name: part for name, part in params.items() if name != LORA}

        def add(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            y, layer = call(*args, **kwargs), context.module
            if context.method_name != "__call__" or not layer.has_variable(LORA, "down"):
                return y
            down, up = layer.get_variable(LORA, "down"), layer.get_variable(LORA, "up")
            x = args[0].astype(layer.dtype or down.dtype)
            return y + (x @ down.astype(x.dtype) @ up.astype(x.dtype)).astype(y.dtype)

        # The factors are a collection, so that a scan over layers divides them like the weights.
        with nn.intercept_methods(add):
            return self._applied({"params": rest, LORA: params[LORA]}, inputs)


def with_lora(
    pretrained: Pretrained, *, rank: int, layers: str = ".*attention/(query|value)", seed: int
) -> Pretrained:
    """Returns the model with x W + x A B in place of x W in some dense layers (Hu et al. 2021,
    arXiv:2106.09685).

    Args:
      pretrained: A model with parameters.
      rank: r, the number of columns of A [inputs, r], which is random, and of rows of B [r,
          outputs], which is zero.
      layers: A regular expression that matches the whole paths of dense layers.
      seed: The seed of A.

    Returns:
      A model whose `params` also have "lora/PATH/down", which is A, and "lora/PATH/up", which is B.

    Raises:
      ValueError: The rank is below 1, or no dense layer matches. The message lists them.
    """
    flat = flatten_dict(dict(pretrained.params), sep="/")
    dense = {
        path.removesuffix("/kernel"): leaf
        for path, leaf in flat.items()
        if path.endswith("/kernel")
        and leaf.ndim in (2, 3)
        and path != "unembed/kernel"  # 3 is a stack of layers
    }
    chosen = [path for path in dense if re.fullmatch(layers, path)]
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}.")
    if not chosen:
        raise ValueError(
            f"layers must match a dense layer, got {layers!r}. There are "
            f"{', '.join(sorted(dense))}."
        )
    factors = {}
    for path, key in zip(chosen, jax.random.split(jax.random.key(seed), len(chosen)), strict=True):
        *layers_of, inputs, outputs = dense[path].shape
        factors[f"{path}/down"] = jax.random.normal(key, (*layers_of, inputs, rank)) / math.sqrt(
            inputs
        )
        factors[f"{path}/up"] = jnp.zeros((*layers_of, rank, outputs))
    fields = {
        field.name: getattr(pretrained, field.name) for field in dataclasses.fields(pretrained)
    }
    params = {**pretrained.params, LORA: unflatten_dict(factors, sep="/")}
    return _WithLoRA(**(fields | {"params": params}))


def merge_lora(params: Params) -> dict[str, Any]:
    """Returns parameters of the plain model, W + A B in place of W, A and B, to save and serve."""
    flat = flatten_dict({name: part for name, part in params.items() if name != LORA}, sep="/")
    factors = flatten_dict(dict(params.get(LORA, {})), sep="/")
    for path in factors:
        if path.endswith("/down"):
            layer = path.removesuffix("/down")
            flat[f"{layer}/kernel"] = (
                flat[f"{layer}/kernel"] + factors[path] @ factors[f"{layer}/up"]
            )
    return unflatten_dict(flat, sep="/")


@dataclasses.dataclass(frozen=True)
class Features:
    """A linear map of the inputs of a model's head, from PUBLIC features. It maps one record at a
    time.

    A head that is trained on mapped features is folded back by `fold`, so that the plain model has
    the same logits.

    Attributes:
      mean: float64 [d].
      matrix: float64 [d, r].
    """

    mean: np.ndarray
    matrix: np.ndarray

    @classmethod
    def from_public(
        cls, public: np.ndarray, *, dimensions: int = 0, whiten: float = 0.5
    ) -> "Features":
        """Returns principal components about the mean, divided by std**whiten, of mean squared
        length 1 on `public`.

        Args:
          public: float [m, d], features of PUBLIC images.
          dimensions: r, the number of components with the largest variances. 0 is all with a
            standard deviation above 1e-4 of the largest.
          whiten: 0 keeps the variances, 1 makes them equal.

        Raises:
          ValueError: There are fewer than two features, or `dimensions` exceeds what they span.
        """
        if len(public) < 2:
            raise ValueError(
                f"public must hold at least two features [m, d], got shape {public.shape}."
            )
        mean = public.mean(axis=0, dtype=np.float64)
        _, values, rows = np.linalg.svd(
            (public - mean) / math.sqrt(len(public)), full_matrices=False
        )
        available = int(np.sum(values > 1e-4 * values[0]))
        if dimensions > available:
            raise ValueError(
                f"dimensions must be at most {available}, the rank of the public features, got "
                f"{dimensions}."
            )
        kept = values[: dimensions or available]
        lengths = kept ** (1 - whiten)
        return cls(mean, rows[: len(kept)].T / kept**whiten / np.linalg.norm(lengths))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Maps [n, d] to float32 [n, r]."""
        return ((features - self.mean) @ self.matrix).astype(np.float32)

    def fold(self, head: Params) -> dict[str, jax.Array]:
        """Returns {"kernel": [d, C], "bias": [C]} for plain features, from the same for mapped
        ones.
        """
        kernel = self.matrix @ np.asarray(head["kernel"], np.float64)
        bias = np.asarray(head["bias"], np.float64) - self.mean @ kernel
        return {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}


def head_inputs(pretrained: Pretrained, images: jax.Array) -> jax.Array:
    """Returns what the model hands to its last layer, float32 [B, d], for images as
    `Pretrained.apply_fn` takes.

    Raises:
      ValueError: The model has not one linear head on one vector per image.
    """
    found: list[jax.Array] = []

    def keep(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.module.path in [(name,) for name in HEADS]:
            found.append(args[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(keep):
        pretrained.apply_fn(pretrained.params, images)
    if len(found) != 1 or found[0].ndim != 2:
        raise ValueError(
            "the model must have one linear head on one vector per image to keep its inputs, got "
            f"{len(found)} heads on {[x.shape[1:] for x in found]}. A SqueezeNet needs "
            "pool='features', a distilled model distilled_head=False. Or do not keep features."
        )
    return found[0].astype(jnp.float32)
