"""A pre-trained transformer cut in two: a frontend and a backend (section 3.3)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models import Preprocessing
from jaxdp.split.checks import at_least

Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A model and the position of its cut. Parameters are arguments of the methods.

    Attributes:
      model: A `ViT` (a DeiT is one) or a `Swin`, with `num_blocks`, `prefix_tokens` and
          `__call__(x, start, stop)`.
      preprocessing: The preprocessing of the model's images.
      cut: K, the number of blocks of the frontend, in [1, num_blocks - 1].
      head_hidden: Width of the hidden layer in the heads of `with_head`. 0 makes the head one
          linear map.
    """

    model: Any
    preprocessing: Preprocessing
    cut: int
    head_hidden: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.model, "num_blocks"):
            raise ValueError(f"model must be a ViT, DeiT or Swin, got {type(self.model).__name__}.")
        blocks = self.model.num_blocks
        if type(self.cut) is not int or not 1 <= self.cut < blocks:
            raise ValueError(
                f"cut must be in [1, {blocks - 1}] for a model of {blocks} blocks, got "
                f"{self.cut!r}. The paper cuts after two thirds of the blocks, here "
                f"{two_thirds(self.model)}."
            )

    @property
    def prefix_tokens(self) -> int:
        """The number of tokens in front of the patches."""
        return self.model.prefix_tokens

    @property
    def head_tokens(self) -> int:
        """The number of leading tokens that the head reads. 0 is all tokens."""
        return getattr(self.model, "head_tokens", self.prefix_tokens)

    @property
    def num_classes(self) -> int:
        """The number of classes of the head."""
        return self.model.num_classes

    @property
    def images(self) -> jax.ShapeDtypeStruct:
        """One image as a batch: float32 [1, S, S, C]."""
        side = self.preprocessing.size
        channels = len(self.preprocessing.mean)
        return jax.ShapeDtypeStruct((1, side, side, channels), jnp.float32)

    @property
    def tokens(self) -> tuple[int, int]:
        """The shape [T, D] of the representation of one image at the cut."""
        representations, _ = self._front_shapes
        return representations.shape[1:]

    def front(self, params: Params, images: jax.Array) -> jax.Array:
        """Maps images [B, S, S, C] in [0, 1] to representations [B, T, D].

        It needs the parameters of the frontend.
        """
        normalised = self.preprocessing.normalise(images)
        representations: Any = self.model.apply({"params": params}, normalised, 0, self.cut)
        return representations

    def back(self, params: Params, representations: jax.Array) -> jax.Array:
        """Maps representations [B, T, D] to float32 logits [B, num_classes].

        It needs the parameters of the backend.
        """
        logits: Any = self.model.apply({"params": params}, representations, self.cut)
        return logits

    def divide(self, params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divides the parameters of the model.

        The first result is for the frontend, the second for backend and head.

        Raises:
          ValueError: Parameters of the frontend are missing.
        """
        _, variables = self._front_shapes
        names = variables["params"].keys()
        missing = sorted(set(names) - set(params))
        if missing:
            raise ValueError(
                f"params have no {', '.join(map(repr, missing))}. Give the parameters of this "
                "model."
            )
        front = {name: params[name] for name in names}
        back = {name: leaf for name, leaf in params.items() if name not in names}
        return front, back

    def with_head(
        self, key: jax.Array, back: Params, num_classes: int
    ) -> tuple["Backbone", dict[str, Any]]:
        """Returns the backbone for another task, and `back` with a new random head.

        Raises:
          ValueError: `num_classes` is less than 2.
        """
        at_least(2, num_classes=num_classes)
        model = self.model.clone(num_classes=num_classes, head_hidden=self.head_hidden)
        backbone = dataclasses.replace(self, model=model)
        blocks = {name: value for name, value in back.items() if not name.startswith("head")}
        return backbone, {**blocks, **_draw_head(backbone, key)}

    def check_images(self, images: Any) -> None:
        """Raises ValueError unless images are floating point [n, S, S, C] in [0, 1] with n >= 1.

        It shows no pixel.
        """
        images = np.asarray(images)
        expected = self.images.shape[1:]
        if images.ndim != 4 or images.shape[1:] != expected or not len(images):
            raise ValueError(
                f"images must be [n, {', '.join(map(str, expected))}] with n >= 1, got "
                f"{list(images.shape)}."
            )
        if not np.issubdtype(images.dtype, np.floating):
            raise ValueError(
                f"images must be floating point in [0, 1], got {images.dtype}. Divide by the "
                "largest possible value."
            )
        if not (images.min() >= 0 and images.max() <= 1):
            raise ValueError(
                "images must be in [0, 1]. Some are outside. Divide by the largest possible value."
            )

    @functools.cached_property
    def _front_shapes(self) -> tuple[Any, Params]:
        """The shapes of an image's representation and of the frontend's variables.

        They are kept because tracing takes long.
        """
        begin = functools.partial(nn.Module.init_with_output, self.model, start=0, stop=self.cut)
        return jax.eval_shape(begin, jax.random.key(0), self.images)


@functools.partial(jax.jit, static_argnums=0)  # under jit only the head is drawn
def _draw_head(backbone: Backbone, key: jax.Array) -> dict[str, Any]:
    representation = jnp.zeros((1, *backbone.tokens))
    params = backbone.model.init(key, representation, backbone.cut)["params"]
    return {name: value for name, value in params.items() if name.startswith("head")}


def two_thirds(model: Any) -> int:
    """Returns how many blocks precede the paper's cut.

    These are 16 of 24 in ViT-L, 8 of 12 in DeiT-B, and stages 1-3 of Swin-L.
    """
    if hasattr(model, "depths"):
        *before, last = model.depths
        # A Swin of one stage has no stages before the last.
        return sum(before) or round(2 * last / 3)
    return round(2 * model.num_blocks / 3)


def in_batches(run: Callable[[Any], jax.Array], x: Any, batch_size: int) -> jax.Array:
    """Applies `run` to float32 rows [n, ...] batch by batch.

    Zeros pad the last batch, so that `run` compiles once.

    Raises:
      ValueError: `batch_size` is less than 1.
    """
    at_least(1, batch_size=batch_size)
    size = min(batch_size, len(x))
    results = []
    for start in range(0, len(x), size):
        batch = np.asarray(x[start : start + size], np.float32)
        missing = size - len(batch)  # one program for all batches
        padding = np.zeros((missing, *batch.shape[1:]), np.float32)
        padded = np.concatenate([batch, padding])
        results.append(run(padded)[: len(batch)])
    return jnp.concatenate(results)
