"""The client's side of Split Adaptation (Wang et al., CVPR 2025, arXiv:2503.00441), in the paper's order.

    model_key, key = jax.random.split(key)
    params = perturb_params(model_key, frontend.params)                # section 3.4: Eq. 12
    x = represent(backbone, frontend, params, images)
    copies = augment_then_noise(key, x, laplace_scale=0.8)             # section 3.5: Eq. 13, then Laplace on every copy
    copies = noise_then_augment(key, x, laplace_scale=0.8)             # what we advise: one noisy copy, augmented

Neither has a privacy guarantee (BUILD_NOTES.md, "Split adaptation"); `jaxdp.split.private` has one.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.split.backbone import Backbone, Params
from jaxdp.split.quantization import QuantizedFrontend, quantized_front
from jaxdp.transforms import noise

NoiseMode = Literal["rel", "abs", "var", "rms"]


def perturb_params(key: jax.Array, params: Params, *, alpha: float = 0.01, mode: NoiseMode = "rel") -> Any:
    """theta' = n_x theta + n_+ with n_x ~ N(1, s), n_+ ~ N(0, s), drawn once for every parameter (Eq. 12).

    The paper writes s = alpha theta, which no variance and no standard deviation can be; `mode` is what we read.

    Args:
      key: typed PRNG key of shape (), of the client's secret seed; not batched by `jax.vmap`.
      params: dequantised parameters of the frontend, a pytree of floating-point arrays.
      alpha: degree of the noise, finite and >= 0.
      mode: the standard deviation is "rel" alpha |theta|, "abs" alpha, "var" sqrt(alpha |theta|), "rms" alpha times the
        root mean square of the tensor.

    Returns:
      float32 pytree like `params`. No guarantee: one draw is shared by all uploads and its distribution is known.

    Raises:
      ValueError: alpha is negative or not finite, or the mode unknown.
    """
    if mode not in ("rel", "abs", "var", "rms"):
        raise ValueError(f"mode must be 'rel', 'abs', 'var' or 'rms', got {mode!r}")
    if not (np.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha must be finite and at least 0, got {alpha!r}")
    noise.check_key(key)
    return _perturbed(mode, key, params, alpha)


@functools.partial(jax.jit, static_argnums=0)
def _perturbed(mode: NoiseMode, key: jax.Array, params: Params, alpha: float) -> Any:
    theta, unravel = ravel_pytree(params)

    def rms() -> jax.Array:
        return ravel_pytree(jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.sqrt(jnp.mean(leaf**2))), params))[0]

    std = {
        "rel": lambda: alpha * jnp.abs(theta),
        "abs": lambda: alpha * jnp.ones_like(theta),
        "var": lambda: jnp.sqrt(alpha * jnp.abs(theta)),
        "rms": lambda: alpha * rms(),
    }[mode]()
    factor, term = noise.gaussian(key, (theta, theta), 1.0)
    return unravel((1 + std * factor) * theta + std * term)  # Eq. 12


def represent(
    backbone: Backbone, frontend: QuantizedFrontend, params: Params, images: jax.Array, *, batch_size: int = 128
) -> jax.Array:
    """The representations of images under a frontend, batch by batch.

    Args:
      backbone: the model and where it is cut.
      frontend: as shipped, for the scales of its activations.
      params: of the frontend: `perturb_params(key, frontend.params)`, or `frontend.params` as they are.
      images: float32 [n, S, S, C] in [0, 1].
      batch_size: images per call of the compiled program.

    Returns:
      float32 [n, T, D].

    Raises:
      ValueError: images of another shape, outside [0, 1] or none at all; batches without images.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size!r}")
    check_images(backbone, images)
    size = min(batch_size, len(images))
    parts = []
    for start in range(0, len(images), size):
        batch = np.asarray(images[start : start + size], np.float32)
        padded = np.concatenate([batch, np.zeros((size - len(batch), *batch.shape[1:]), np.float32)])
        parts.append(_represent(backbone, frontend, params, padded)[: len(batch)])
    return jnp.concatenate(parts)


@functools.partial(jax.jit, static_argnums=0)
def _represent(backbone: Backbone, frontend: QuantizedFrontend, params: Params, images: jax.Array) -> jax.Array:
    return quantized_front(backbone, frontend, images, params=params)


def check_images(backbone: Backbone, images: Any) -> None:
    """ValueError unless images are [n, S, S, C] in [0, 1] for this backbone, n >= 1; tells not what they show."""
    images = np.asarray(images)
    expected = backbone.images.shape[1:]
    if images.ndim != 4 or images.shape[1:] != expected or not len(images):
        raise ValueError(f"images must be [n, {', '.join(map(str, expected))}] with n >= 1, got {list(images.shape)}")
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"images must be floating point in [0, 1], got {images.dtype}; divide by the largest value")
    if not (images.min() >= 0 and images.max() <= 1):
        raise ValueError("images must be in [0, 1], and some are not; divide by the largest possible value")
