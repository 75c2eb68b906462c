"""Ginver: a generator whose images have the uploaded representations (Yin et al. 2023).

    attackers = {"Ginver": Ginver(backbone.front, shipped, steps=2000)}
    attack(key, attackers, uploads, references, public=public, prefix_tokens=1, ...)

The attacker has the frontend f that the server shipped, and the uploads z. It needs no image. The
generator G has the form of the decoders of `launch.representation_attacks`, with pixels in (0, 1).
Adam minimises the distance between the representation of a generated image and the upload that it
was generated from, and the differences between neighbouring pixels:

    mean (f(G(z)) - z)^2 / var z + smoothness (mean dx^2 + mean dy^2).

The authors train on some representations and reconstruct from others. Here the server trains on the
uploads themselves, which are at hand before an image is needed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.models.training import Loss, check_positive, fit_in_memory

from .representation_attacks import Decoder, Extract, decoder_for, initial_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ginver:
    """An attacker of `launch.representation_attacks.attack`.

    Attributes:
      extract: `extract(front, images [B, S, S, C]) -> [B, T, D]`, which must have a gradient. The
          same function of two attackers shares compiled programs.
      front: The parameters that the server attributes to the client's frontend.
      copies: The number of copies whose median is attacked.
      steps: The number of steps of Adam, rounded up to whole passes over the uploads.
      learning_rate: The learning rate of Adam.
      smoothness: The weight of the differences between neighbouring pixels.

    Raises:
      ValueError: copies, steps or learning_rate is not positive, or smoothness is negative.
    """

    extract: Extract
    front: Any
    copies: int = 1
    steps: int
    learning_rate: float = 1e-3
    smoothness: float = 1.0

    def __post_init__(self) -> None:
        check_positive(copies=self.copies, steps=self.steps, learning_rate=self.learning_rate)
        if not self.smoothness >= 0:
            raise ValueError(f"smoothness must be at least 0, got {self.smoothness!r}.")

    def simulated(self, key: jax.Array, images: jax.Array) -> jax.Array:
        """Returns representations [B, T, D] of images [B, S, S, C] without noise."""
        return self.extract(self.front, images)

    def learn(
        self,
        key: jax.Array,
        attacked: np.ndarray,
        public: np.ndarray,
        *,
        prefix_tokens: int,
        batch_size: int,
        **of_decoders: Any,
    ) -> Callable[[Any], jax.Array]:
        """Trains the generator on the attacked representations, float32 [n, T, D].

        Only the shape of the public images is read. Other options belong to decoders.

        Returns:
          A function that maps representations [n, T, D] to images float32 [n, S, S, C] in (0, 1).
        """
        generator = decoder_for(public.shape[1:], attacked.shape[1:], prefix_tokens)
        init_key, key = jax.random.split(key)
        initial = initial_params(generator, init_key, attacked.shape[1:])
        size = min(batch_size, len(attacked))
        passes = -(-self.steps * size // len(attacked))
        frozen = self.front, np.var(attacked), np.float32(self.smoothness)
        params = fit_in_memory(
            _loss(self.extract, generator),
            initial,
            attacked,
            key=key,
            learning_rate=self.learning_rate,
            epochs=passes,
            batch_size=size,
            frozen=frozen,
        )
        return functools.partial(_generate, generator, params)


@functools.partial(jax.jit, static_argnums=0)
def _generate(generator: Decoder, params: Any, representations: Any) -> jax.Array:
    """Maps representations [B, T, D] to images [B, S, S, C]."""
    logits: Any = generator.apply({"params": params}, representations)
    return jax.nn.sigmoid(logits)


@functools.lru_cache
def _loss(extract: Extract, generator: Decoder) -> Loss:
    """Returns the loss of the module's docstring per upload.

    Equal arguments give one object, so that it compiles once.
    """

    def loss(params: Any, frozen: Any, uploads: jax.Array, key: jax.Array) -> jax.Array:
        front, variance, smoothness = frozen
        images = _generate(generator, params, uploads)
        distance = jnp.mean((extract(front, images) - uploads) ** 2, axis=(1, 2))
        down = jnp.diff(images, axis=1)
        right = jnp.diff(images, axis=2)
        variation = jnp.mean(down**2, axis=(1, 2, 3)) + jnp.mean(right**2, axis=(1, 2, 3))
        return distance / variance + smoothness * variation

    return loss
