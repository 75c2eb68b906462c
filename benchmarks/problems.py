"""What several benchmarks train: losses, a peer's clipped gradient, and steps with their state."""

from collections.abc import Callable
from typing import Any

import jax

import jaxdp

# A small ViT of images of 32 x 32.
VIT = {
    "patch_size": 4,
    "width": 192,
    "depth": 6,
    "num_heads": 3,
    "mlp_width": 768,
    "pool": "mean",
}


def classifier_loss(model: Any) -> Callable[[Any, Any], jax.Array]:
    """Returns the loss of one example, a pair of image and label."""

    def loss(params: Any, example: Any) -> jax.Array:
        image, label = example
        logits = model.apply({"params": params}, image[None])[0]
        return jaxdp.losses.softmax_cross_entropy(logits, label)

    return loss


def named_classifier_loss(model: Any) -> Callable[[Any, Any], jax.Array]:
    """Returns the loss of one example, a dict of image "x" and "label"."""
    loss = classifier_loss(model)
    return lambda params, example: loss(params, (example["x"], example["label"]))


def jax_privacy_grad(
    loss: Callable[..., jax.Array],
    clip_norm: float,
    batch_argnums: tuple[int, ...],
    microbatch_size: int | None = None,
) -> Callable[..., Any]:
    """Returns the clipped gradient of the peer jax_privacy."""
    from jax_privacy import clipping

    return clipping.clipped_grad(
        loss,
        l2_clip_norm=clip_norm,
        batch_argnums=batch_argnums,
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )


def stateful(update: Callable[..., Any], *state: Any) -> Callable[[], Any]:
    """Returns a call that replaces its own state by the results of `update`."""
    current = list(state)

    def step() -> Any:
        current[:] = update(*current)
        return current

    return step
