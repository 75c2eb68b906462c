"""Sizes on a TPU, which kernels of dense layers share.

Costs are in cycles of a TPU v5e. Its four matrix units hold 128 x 128 weights each and multiply one
row by them in a cycle. Its memory moves 546 bytes in a cycle.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SUBLANES = 8
LANES = 128
# Rows of bfloat16 that one instruction multiplies.
PACKED = 16
# Bytes of an entry of bfloat16.
ITEMSIZE = 2
PRODUCTS_PER_CYCLE = 4 * LANES * LANES
BYTES_PER_CYCLE = 546
# Fewer rows or columns than this leave more than half of the lanes empty.
_LEAST = 64
MEBIBYTE = 2**20
# What the compiler grants a kernel unless it asks for more, and what a kernel asks for at most.
VMEM_GRANTED = 16 * MEBIBYTE
VMEM_MOST = 48 * MEBIBYTE


def padded(size: int, to: int = LANES) -> int:
    """Returns the least multiple of `to` that is at least `size`."""
    return -(-size // to) * to


def parts(size: int, most: int = 2048) -> list[int]:
    """Returns lengths of equal parts of an axis, of at most `most`.

    They are multiples of 128, and the whole axis.
    """
    multiples = range(LANES, min(size, most) + 1, LANES)
    lengths = [length for length in multiples if size % length == 0]
    if size <= most and size not in lengths:
        lengths.append(size)
    return lengths


def serves(rows: int, cols: int) -> bool:
    """Returns whether the kernels multiply layers of so many rows and columns."""
    return min(rows, cols) >= _LEAST


def fits(vmem: float) -> bool:
    """Returns whether a kernel may hold this many bytes of blocks on the chip."""
    return _limit(vmem) <= VMEM_MOST


def _limit(vmem: float) -> int:
    return max(VMEM_GRANTED, int(1.25 * vmem))


def product(
    x: jax.Array,
    y: jax.Array,
    over: Sequence[int],
) -> jax.Array:
    """Multiplies two matrices of bfloat16 inside of a kernel, and adds in float32.

    Args:
      x, y: The matrices.
      over: The axis of x and the axis of y that are contracted.
    """
    contracted = ((over[0],), (over[1],))
    return lax.dot_general(
        x,
        y,
        (contracted, ((), ())),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def compiler_params(vmem: float, *, parallel: int) -> Any:
    """Returns the parameters of a kernel that holds `vmem` bytes of blocks on the chip.

    The steps along `parallel` axes of the grid do not depend on each other. Two more axes follow.
    """
    from jax.experimental.pallas import tpu as pltpu

    semantics = [pltpu.PARALLEL] * parallel + [pltpu.ARBITRARY] * 2
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=_limit(vmem))
