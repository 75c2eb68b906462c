"""The kernel distance of two samples, which FORA minimises (`launch.representation_attacks`)."""

import jax
import jax.numpy as jnp


def discrepancy(x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes the squared maximum mean discrepancy of samples [n, ...] and [m, ...], biased.

    They are Gaussian, with 1/8, 1/4, 1/2, 1 and 2 times the mean squared distance of all pairs as
    their width.
    """
    x = x.reshape(len(x), -1)
    y = y.reshape(len(y), -1)
    both = jnp.concatenate([x, y])
    squares = jnp.square(both).sum(1)
    products = jnp.matmul(both, both.T, precision="highest")
    # Rounding can make the squared distance of equal rows negative.
    distance = squares[:, None] + squares[None] - 2 * products
    distance = jnp.maximum(distance, 0)
    width = jax.lax.stop_gradient(distance.mean())
    widths = [width * 2.0**k for k in range(-3, 2)]
    kernel = sum(jnp.exp(-distance / w) for w in widths)
    of_x = jnp.full(len(x), 1 / len(x))
    of_y = jnp.full(len(y), -1 / len(y))
    sign = jnp.concatenate([of_x, of_y])
    return jnp.einsum("i,ij,j->", sign, kernel, sign, precision="highest")
