"""COME (Zhang et al. 2025, arXiv:2410.10894): conservative minimisation of entropy.

It works over any other method.

A prediction with logits f is an opinion of belief b and uncertainty mass u, with Dirichlet evidence
exp(logit):

    l_k = f_k sg(||f||) / ||f||
    b_k = exp(l_k) / S,  u = K / S,  S = sum_k exp(l_k) + K
    loss = -sum_k b_k log b_k - u log u,  with 1e-7 added to every b_k and u

l has the value of f, but no gradient along f, so the loss cannot reward larger logits.
This loss replaces the entropy in losses, weights and filters. K is the number of classes. The
public code uses 1000 for every data set. The exponentials here are shifted. In the public code
logits above 88 give NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxdp.tta.method import Method, check_constants


def COME(base_method: Method, num_classes: int) -> Method:
    """Returns `base_method` with COME's uncertainty: `COME(Tent(), 10)`, `COME(DeYO(10), 10)`.

    Args:
      base_method: Tent, EATA, SAR or DeYO.
      num_classes: K.

    Raises:
      TypeError: base_method is not a `Method`.
      ValueError: num_classes is below 2 or differs from base_method's. When stepping: apply_fn has
          fewer classes.
    """
    check_constants(num_classes)
    if not isinstance(base_method, Method):
        raise TypeError(
            f"base_method must be a method such as Tent(), got {type(base_method).__name__}. For "
            "the private form call private(COME(Tent(), num_classes), ...)."
        )
    declared = getattr(base_method, "num_classes", num_classes)
    if declared != num_classes:
        raise ValueError(f"num_classes={num_classes}, but base_method has num_classes={declared}.")
    return dataclasses.replace(
        base_method, uncertainty=functools.partial(opinion_entropy, num_classes=num_classes)
    )


def opinion_entropy(logits: jax.Array, *, num_classes: int) -> jax.Array:
    """Computes COME's entropy of the opinion (b, u)."""
    # apply_fn may return more logits, with some of them masked by -inf.
    if logits.shape[-1] < num_classes:
        raise ValueError(
            f"num_classes={num_classes}, but apply_fn returns {logits.shape[-1]} logits."
        )
    masked = jnp.isneginf(logits)  # masked classes have no evidence
    f = jnp.where(masked, 0, logits.astype(jnp.float32))
    squared = jnp.vdot(f, f)
    # The root of 0 has an infinite gradient, and the outer select would make it NaN.
    norm = jnp.sqrt(jnp.where(squared > 0, squared, 1))
    l = f * (jax.lax.stop_gradient(norm) / norm)  # noqa: E741
    # Evidence and K are both divided by exp(shift), so that no exponential overflows.
    shift = jax.lax.stop_gradient(jnp.maximum(l.max(), 0))
    evidence = jnp.where(masked, 0, jnp.exp(l - shift))
    prior = num_classes * jnp.exp(-shift)
    opinion = jnp.append(evidence, prior) / (evidence.sum() + prior) + 1e-7
    return -jnp.vdot(opinion, jnp.log(opinion))
