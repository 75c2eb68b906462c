"""Which part of a public model is trained: leaves by name, LoRA, or a new head on features.

The features are inputs of an image model's head, or hidden states of a language model.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.files import check_choice, check_count
from jaxdp.models.checkpoints import HEADS, Pretrained
from jaxdp.models.language import LanguageModel

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
    module_of = {path: path.rpartition("/")[0] for path in paths}
    norms = {module_of[path] for path in paths if path.endswith("/scale")}
    head = {path for path in paths if path.split("/")[0] in HEADS}
    groups: dict[str, set[str]] = {
        "all": set(paths),
        "head": head,
        "norms": {path for path in paths if module_of[path] in norms},
        LORA: {path for path in paths if path.startswith(f"{LORA}/")},
    }
    try:
        matches = {path for path in paths if re.fullmatch(choice, path)}
    except re.error as error:
        raise ValueError(
            f"trainable must be a regular expression, got {choice!r} ({error})."
        ) from error
    if choice in groups:
        matches = groups[choice]
    if not matches:
        raise ValueError(
            f"trainable={choice!r} matches no parameter. Give {', '.join(map(repr, groups))}, or a "
            f"regular expression for whole paths among {', '.join(sorted(paths))}."
        )
    if choice in groups:
        matches = matches | head

    def is_trained(path: str, leaf: Any) -> bool:
        return path in matches

    return is_trained


class _WithLoRA(Pretrained):
    """A model whose dense layers with factors add x A B."""

    def apply_fn(self, params: Params, inputs: jax.Array) -> jax.Array:
        weights = {name: subtree for name, subtree in params.items() if name != LORA}

        def add(
            call: Callable[..., Any],
            args: Any,
            kwargs: Any,
            context: Any,
        ) -> Any:
            y = call(*args, **kwargs)
            layer = context.module
            is_call = context.method_name == "__call__"  # other methods are intercepted too
            if not is_call or not layer.has_variable(LORA, "down"):
                return y
            down = layer.get_variable(LORA, "down")
            up = layer.get_variable(LORA, "up")
            dtype = layer.dtype or down.dtype
            x = args[0].astype(dtype)
            projected = x @ down.astype(dtype)
            added = projected @ up.astype(dtype)
            return y + added.astype(y.dtype)

        # The factors are a collection, so that a scan over layers divides them like the weights.
        variables = {"params": weights, LORA: params[LORA]}
        with nn.intercept_methods(add):
            return self._applied(variables, inputs)


def with_lora(
    pretrained: Pretrained,
    *,
    rank: int,
    layers: str = ".*attention/(query|value)",
    seed: int,
) -> Pretrained:
    """Returns the model with x W + x A B in place of x W in some dense layers.

    This is LoRA (Hu et al. 2021, arXiv:2106.09685).

    Args:
      pretrained: A model with parameters.
      rank: r, the number of columns of A [inputs, r], which is random, and of rows of B [r,
          outputs], which is zero.
      layers: A regular expression that matches the whole paths of dense layers.
      seed: The seed of A.

    Returns:
      A model whose `params` also have "lora/PATH/down", which is A, and "lora/PATH/up", which is B.

    Raises:
      ValueError: The rank is below 1, or no dense layer matches. The message lists them. Or the
        model has such factors already.
      TypeError: The rank is no int.
    """
    check_count("rank", rank, 1)
    if LORA in pretrained.params:
        raise ValueError(
            "pretrained must have no factors of LoRA, which would be lost. Merge them first: "
            "Pretrained(pretrained.model, merge_lora(pretrained.params), pretrained.preprocessing, "
            "pretrained.constants)."
        )
    dense = _dense_kernels(pretrained.params)
    paths = [path for path in dense if re.fullmatch(layers, path)]
    if not paths:
        raise ValueError(
            f"layers must match a dense layer, got {layers!r}. There are "
            f"{', '.join(sorted(dense))}."
        )
    factors = {}
    key = jax.random.key(seed)
    keys = jax.random.split(key, len(paths))
    for path, key in zip(paths, keys, strict=True):
        *stack, inputs, outputs = dense[path].shape
        down = jax.random.normal(key, (*stack, inputs, rank))
        factors[f"{path}/down"] = down / math.sqrt(inputs)
        # B = 0: the model starts as the public one.
        factors[f"{path}/up"] = jnp.zeros((*stack, rank, outputs))
    params = {**pretrained.params, LORA: unflatten_dict(factors, sep="/")}
    return _WithLoRA(
        model=pretrained.model,
        params=params,
        preprocessing=pretrained.preprocessing,
        constants=pretrained.constants,
    )


def _dense_kernels(params: Params) -> dict[str, Any]:
    """Returns the kernels of dense layers by path, [d, e] or a stack [L, d, e]."""
    kernels = {}
    for path, leaf in flatten_dict(dict(params), sep="/").items():
        layer, _, name = path.rpartition("/")
        # The output layer of a language model is no module that could add the factors.
        if layer == "unembed":
            continue
        if name == "kernel" and leaf.ndim in (2, 3):
            kernels[layer] = leaf
    return kernels


def merge_lora(params: Params) -> dict[str, Any]:
    """Returns parameters of the plain model, W + A B in place of W, A and B, to save and serve."""
    weights = {name: subtree for name, subtree in params.items() if name != LORA}
    flat = flatten_dict(weights, sep="/")
    factors = flatten_dict(dict(params.get(LORA, {})), sep="/")
    for path, down in factors.items():
        layer, _, name = path.rpartition("/")
        if name == "down":
            product = down @ factors[f"{layer}/up"]
            kernel = flat[f"{layer}/kernel"]
            flat[f"{layer}/kernel"] = kernel + product
    return unflatten_dict(flat, sep="/")


@dataclasses.dataclass(frozen=True)
class Features:
    """A linear map of the inputs of a model's head, made from PUBLIC features.

    It maps one record at a time. A head that is trained on mapped features is folded back by
    `fold`, so that the plain model has the same logits.

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
        """Returns the map to principal components about the mean, divided by std**whiten.

        The mapped public features have the mean squared length 1.

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
        centred = (public - mean) / math.sqrt(len(public))
        _, deviations, components = np.linalg.svd(centred, full_matrices=False)
        available = int(np.sum(deviations > 1e-4 * deviations[0]))
        if dimensions > available:
            raise ValueError(
                f"dimensions must be at most {available}, the rank of the public features, got "
                f"{dimensions}."
            )
        largest = deviations[: dimensions or available]
        lengths = largest ** (1 - whiten)
        principal = components[: len(largest)]
        whitened = principal.T / largest**whiten
        matrix = whitened / np.linalg.norm(lengths)  # mean squared length 1
        return cls(mean, matrix)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Maps [n, d] to float32 [n, r]."""
        centred = features - self.mean
        mapped = centred @ self.matrix
        return mapped.astype(np.float32)

    def fold(self, head: Params) -> dict[str, jax.Array]:
        """Returns the head for plain features from the head for mapped ones.

        It is {"kernel": [d, C], "bias": [C]}.
        """
        head_kernel = np.asarray(head["kernel"], np.float64)
        head_bias = np.asarray(head["bias"], np.float64)
        kernel = self.matrix @ head_kernel
        bias = head_bias - self.mean @ kernel
        return {
            "kernel": jnp.asarray(kernel, jnp.float32),
            "bias": jnp.asarray(bias, jnp.float32),
        }


def _calls(
    pretrained: Pretrained, inputs: jax.Array, is_watched: Callable[[tuple[str, ...]], bool]
) -> list[tuple[Any, Any]]:
    """Returns arguments and output of each call of the modules whose path is watched."""
    calls: list[tuple[Any, Any]] = []

    def keep(
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        context: Any,
    ) -> Any:
        output = call(*args, **kwargs)
        if is_watched(context.module.path):
            calls.append((args, output))
        return output

    with nn.intercept_methods(keep):
        pretrained.apply_fn(pretrained.params, inputs)
    return calls


def head_inputs(pretrained: Pretrained, images: jax.Array) -> jax.Array:
    """Returns the inputs of the model's last layer, float32 [B, d].

    The images are as `Pretrained.apply_fn` takes them.

    Raises:
      ValueError: The model has not one linear head on one vector per image.
    """
    heads = _calls(pretrained, images, lambda path: len(path) == 1 and path[0] in HEADS)
    inputs = [args[0] for args, _ in heads]
    shapes = [x.shape[1:] for x in inputs]
    if len(shapes) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            "the model must have one linear head on one vector per image to keep its inputs, got "
            f"{len(inputs)} heads on {shapes}. A SqueezeNet needs "
            "pool='features', a distilled model distilled_head=False. Or do not keep features."
        )
    return inputs[0].astype(jnp.float32)


def text_embeddings(
    pretrained: Pretrained, tokens: jax.Array, *, pooling: Literal["last", "mean"] = "last"
) -> jax.Array:
    """Returns a vector for each text, float32 [B, D], from the last hidden layer.

    The layer is the output of the last normalisation, which the output layer reads. Attention is
    causal, so padding behind a text changes nothing. A text without a token has the vector 0.

    Args:
      pretrained: A language model with parameters.
      tokens: int [B, T], each text followed by -1.
      pooling: "last" takes the state at the last token, as Wicker et al. 2025
        (arXiv:2406.13433) do with GPT-2. "mean" takes the mean over the tokens.

    Raises:
      ValueError: The model is no language model, or the pooling is unknown.
    """
    if not isinstance(pretrained.model, LanguageModel):
        name = type(pretrained.model).__name__
        raise ValueError(f"pretrained must be a language model, got {name}. See head_inputs.")
    check_choice("pooling", pooling, ("last", "mean"))
    (_, states), *_ = _calls(pretrained, tokens, lambda path: path == ("norm",))
    hidden = states.astype(jnp.float32)
    is_token = tokens >= 0
    # Padding fills the end of a row. A text without tokens gets zeros below.
    lengths = is_token.sum(axis=1)
    if pooling == "mean":
        counts = jnp.maximum(lengths, 1)
        weights = is_token / counts[:, None]
    else:
        places = jnp.arange(tokens.shape[1])
        last = lengths - 1
        weights = places[None] == last[:, None]
    return jnp.einsum("bt,btd->bd", weights.astype(jnp.float32), hidden)
