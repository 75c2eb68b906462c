"""The client's side of Split Adaptation (Wang et al. 2025), in the paper's order.

    model_key, key = jax.random.split(key)
    params = perturb_params(model_key, frontend.params)       # section 3.4: Eq. 12
    x = represent(backbone, frontend, params, images)
    # section 3.5: Eq. 13, then Laplace noise on every copy
    copies = augment_then_noise(key, x, laplace_scale=0.8)
    # our advice: one noisy copy, augmented
    copies = noise_then_augment(key, x, laplace_scale=0.8)

Neither order has a privacy guarantee (docs/design/split.md). `jaxdp.split.noisy_upload` has one.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxdp.files import check_choice
from jaxdp.split.backbone import Backbone, Params, in_batches
from jaxdp.split.checks import not_negative
from jaxdp.split.quantization import QuantizedFrontend, quantized_front
from jaxdp.transforms import noise

NoiseMode = Literal["rel", "abs", "var", "rms"]


def perturb_params(
    key: jax.Array,
    params: Params,
    *,
    alpha: float = 0.01,
    mode: NoiseMode = "rel",
) -> Any:
    """Draws noise on every parameter: theta' = n_x theta + n_+ (Eq. 12).

    The factor is n_x ~ N(1, s), and the term is n_+ ~ N(0, s). Both are drawn once for every
    parameter.

    The paper writes s = alpha theta, which can be neither a variance nor a standard deviation.
    `mode` selects a reading.

    Args:
      key: Typed PRNG key of shape (), from the client's secret seed. `jax.vmap` must not batch it.
      params: Dequantised parameters of the frontend, a pytree of floating-point arrays.
      alpha: Degree of the noise, finite and >= 0.
      mode: The standard deviation: "rel" is alpha |theta|, "abs" is alpha, "var" is sqrt(alpha
        |theta|). "rms" is alpha times the root mean square of the tensor.

    Returns:
      float32 pytree like `params`. It has no guarantee: all uploads share one draw, and its
      distribution is known.

    Raises:
      ValueError: alpha is negative or not finite, or the mode is unknown.
    """
    check_choice("mode", mode, NoiseMode)
    not_negative(alpha=alpha)
    noise.check_key(key)
    return _perturbed(mode, key, params, alpha)


@functools.partial(jax.jit, static_argnums=0)
def _perturbed(
    mode: NoiseMode,
    key: jax.Array,
    params: Params,
    alpha: float,
) -> Any:
    theta, unravel = ravel_pytree(params)
    match mode:
        case "rel":
            std = alpha * jnp.abs(theta)
        case "abs":
            std = alpha * jnp.ones_like(theta)
        case "var":
            std = jnp.sqrt(alpha * jnp.abs(theta))
        case "rms":
            means, _ = ravel_pytree(jax.tree.map(_root_mean_squares, params))
            std = alpha * means
    # The noise acts on dequantised weights. 1 % of a code would be rounded away.
    factor, term = noise.gaussian(key, (theta, theta), 1.0)
    return unravel((1 + std * factor) * theta + std * term)  # Eq. 12


def _root_mean_squares(leaf: jax.Array) -> jax.Array:
    return jnp.full_like(leaf, jnp.sqrt(jnp.mean(leaf**2)))


def represent(
    backbone: Backbone,
    frontend: QuantizedFrontend,
    params: Params,
    images: jax.Array,
    *,
    batch_size: int = 128,
) -> jax.Array:
    """Computes the representations of images under a frontend, float32 [n, T, D], batch by batch.

    Args:
      backbone: The model and the position of its cut.
      frontend: The frontend as shipped. It gives the scales of the activations.
      params: Parameters of the frontend: `perturb_params(key, frontend.params)`, or
          `frontend.params` without noise.
      images: float32 [n, S, S, C] in [0, 1].
      batch_size: Images per call of the compiled program.

    Raises:
      ValueError: Images are empty, of another shape or outside [0, 1], or batch_size is less than
          1.
    """
    backbone.check_images(images)
    run = functools.partial(_front, backbone, frontend, params=params)
    return in_batches(run, images, batch_size)


_front = jax.jit(quantized_front, static_argnums=0)
