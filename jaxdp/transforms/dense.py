"""Which kernels serve a dense layer on a TPU, and what they cost.

The kernels compute norms and weighted sums of per-example gradients u_i^T w_i without an array of T
x T, or of a gradient, for each example. `jaxdp.transforms.sites` has the same results by products
of XLA, for all other platforms, shapes, and programs that XLA divides among devices.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.transforms import forms, rounding
from jaxdp.transforms.kernels import formed, gram, tiles, weighted

# Whether XLA lays u, and w, with the positions on the lanes of a TPU. A wrong answer costs a copy.
Lanes = tuple[bool, bool]


class LengthSums(NamedTuple):
    """Sums over the lengths of the rows of u and w.

    Attributes:
      apart: [B, S]. The sums of |u_t| |w_t|.
      lengths_u, lengths_w: [B]. The sums of |u_t| and of |w_t|.
    """

    apart: jax.Array
    lengths_u: jax.Array
    lengths_w: jax.Array


def pads_less(positions: int, features: int) -> bool:
    """Returns whether an array of narrow rows takes less memory with the positions on the lanes.

    An array [65, 64] is padded to [72, 128], and [64, 65] to [64, 128].
    """
    # Of an array on the chip, the last axis is padded to 128 and the one before to 8.
    in_rows = tiles.padded(positions, tiles.SUBLANES) * tiles.LANES
    in_columns = tiles.padded(positions) * tiles.padded(features, tiles.SUBLANES)
    return features < tiles.LANES and in_columns < in_rows


def has_gram_norm(parts: Sequence[Any], w: Any) -> bool:
    """Returns whether `gram_norm` serves the factors of a site.

    It serves one array u [B, S, T, p], and w [B, S, T, q], in bfloat16.
    """
    # Parts of u are those of convolutions. The kernel reads one array.
    if forms.platform() != "tpu" or len(parts) != 1:
        return False
    (u,) = parts
    for factor in (u, w):
        if getattr(factor, "dtype", None) != jnp.bfloat16:  # the rows of a lookup have no dtype
            return False
    return gram.suits(w.shape[2], u.shape[3], w.shape[3])


def _merged(x: jax.Array) -> jax.Array:
    """Reshapes [B, S, ...] to [S * B, ...].

    Loops stack their iterations in front, so this moves nothing.
    """
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _apart(x: jax.Array, slices: int) -> jax.Array:
    """Reshapes [S * B, ...] to [B, S, ...]."""
    return x.reshape(slices, -1, *x.shape[1:]).swapaxes(0, 1)


def gram_norm(
    u: jax.Array,
    w: jax.Array,
    lanes: Lanes,
    *,
    with_rows: bool = False,
) -> tuple[jax.Array, jax.Array, LengthSums, list[jax.Array]]:
    """Returns ||sum_t u_t w_t^T||^2 and E of `rounding`, [B] each, and the sums of lengths.

    The last result has the lengths of u and w, [B, S, T] each, if `with_rows`.

    By Cauchy and Schwarz sum_ts a_t a_s |W_ts| is at most (sum_t a_t^2) ||W||, with the Frobenius
    norm.

    Args:
      u, w: bfloat16 [B, S, T, p] and [B, S, T, q].
      lanes: Whether the positions of each are on the lanes.
    """
    slices, positions = u.shape[1:3]
    u_across, w_across = lanes
    sums, rows = gram.gram_norms(
        _merged(u),
        _merged(w),
        u_across=u_across,
        w_across=w_across,
        with_rows=with_rows,
    )
    # ||U|| and ||W|| of every example and group, [S * B].
    frobenius_u = _frobenius(sums.squares_u, sums.trace_u, positions)
    frobenius_w = _frobenius(sums.squares_w, sums.trace_w, positions)
    additions_u, additions_w = gram.additions(positions, u.shape[-1], w.shape[-1])
    additions_of_products = 2 * positions + 64  # as `gram_norms` states
    # E of `rounding`, its three sums each bounded by Cauchy and Schwarz.
    error = additions_u * sums.trace_u * frobenius_w
    error += additions_w * frobenius_u * sums.trace_w
    error += additions_of_products * frobenius_u * frobenius_w
    error *= rounding.eps(jnp.float32)
    of_slices = (sums.products, error, sums.lengths_u, sums.lengths_w)
    # Squared norms of groups add up, and so do their bounds. M needs each group by itself.
    squares, spread, lengths_u, lengths_w = (_apart(x, slices).sum(1) for x in of_slices)
    apart = _apart(sums.apart, slices)
    lengths = [_apart(rounding.root(x), slices) for x in rows]
    return squares, spread, LengthSums(apart, lengths_u, lengths_w), lengths


def _frobenius(
    squares: jax.Array,
    trace: jax.Array,
    positions: int,
) -> jax.Array:
    """Returns a bound on the norms [B] of Gram matrices [T, T].

    It is the smaller of two: the root of the sum of squares, and the trace.

    Args:
      squares: [B]. The sums of the squares of all entries, which may under- or overflow.
      trace: [B]. The sums of the diagonals.
      positions: T.
    """
    # Each of the T x T squares may have been flushed.
    flushed = positions * positions * rounding.FLUSHED
    # A Gram matrix is positive semidefinite, so its trace bounds its Frobenius norm.
    return jnp.minimum(rounding.root(squares + flushed), trace)


def formed_squares(u: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the squared norms [B] of gradients that are formed block by block.

    Arguments are as in `gram_norm`.
    """
    squares = formed.formed_norms(_merged(u), _merged(w))
    return _apart(squares, u.shape[1]).sum(1)


def weighted_sum(
    u: jax.Array,
    w: jax.Array,
    factors: jax.Array,
    lanes: Lanes,
) -> jax.Array:
    """Returns sum_b factors_b u_bs^T w_bs, float32 [S, p, q]. Examples with the factor 0 are not
    read.

    Args:
      u, w, lanes: As in `gram_norm`.
      factors: float32 [B].
    """
    u_across, w_across = lanes
    kernel = functools.partial(weighted.weighted_sum, u_across=u_across, w_across=w_across)
    # Loops stack their iterations in front, so the swaps move nothing.
    u = u.swapaxes(0, 1)
    w = w.swapaxes(0, 1)
    return jax.vmap(kernel, in_axes=(0, 0, None))(u, w, factors)


def costs(
    positions: int,
    rows: int,
    cols: int,
) -> dict[str, float]:
    """Returns what the kernels that serve a shape cost for one example and slice.

    Costs are in bytes that take the same time, by the name of the kernel: "gram", "formed" and
    "weighted".
    """
    result = {}
    kernels = {"gram": gram, "formed": formed, "weighted": weighted}
    for name, kernel in kernels.items():
        if kernel.suits(positions, rows, cols):
            result[name] = tiles.BYTES_PER_CYCLE * kernel.cycles(positions, rows, cols)
    return result
