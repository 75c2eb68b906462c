"""Position embeddings for another number of patches: the bicubic interpolation of DINOv2."""

import math

import numpy as np

_KEYS = -0.75  # PyTorch's coefficient of the cubic of Keys (1981). JAX and Pillow have -0.5.


def resize_positions(positions: np.ndarray, tokens: int, *, prefix_tokens: int) -> np.ndarray:
    """Returns the position embeddings of another square grid of patches.

    The published networks of DINOv2 (Oquab et al. 2024, arXiv:2304.07193) are trained on 37x37
    patches and used with 16x16. Their code interpolates as
    `torch.nn.functional.interpolate(mode="bicubic", align_corners=False)`, without antialiasing.

    Args:
      positions: Floating point [1, T, D], the prefix tokens first, then the patches row by row.
      tokens: The number T' of tokens after the change, prefix tokens included.
      prefix_tokens: The number of tokens in front of the patches. Their positions stay.

    Returns:
      [1, T', D] of the same dtype. The computation is in float64.

    Raises:
      ValueError: The old or the new patches are no square grid of at least one patch.
    """
    _, old_tokens, width = positions.shape
    old = _side(old_tokens - prefix_tokens)
    new = _side(tokens - prefix_tokens)
    in_front = positions[:, :prefix_tokens]
    patches = positions[0, prefix_tokens:]
    grid = patches.astype(np.float64)
    grid = grid.reshape(old, old, width)
    weights = _cubic_weights(old, new)
    rows = np.tensordot(weights, grid, axes=(1, 0))
    resized = np.tensordot(weights, rows, axes=(1, 1))  # [new columns, new rows, D]
    resized = resized.swapaxes(0, 1)
    resized = resized.reshape(1, new * new, width)
    resized = resized.astype(positions.dtype)
    return np.concatenate([in_front, resized], axis=1)


def _side(patches: int) -> int:
    side = math.isqrt(max(patches, 0))
    if side * side != patches or not side:
        raise ValueError(f"positions need a square grid of patches, got {patches} patches.")
    return side


def _cubic_weights(old: int, new: int) -> np.ndarray:
    """Returns the matrix [new, old] from old samples on a line to new ones."""
    weights = np.zeros((new, old))
    rows = np.arange(new)
    # Samples are at the centres of intervals of equal length.
    centres = (rows + 0.5) * old / new
    centres = centres - 0.5
    below = np.floor(centres).astype(int)
    last = old - 1
    for offset in (-1, 0, 1, 2):
        sample = below + offset
        distance = np.abs(centres - sample)
        # A sample outside the grid has the value of the nearest one inside.
        inside = np.clip(sample, 0, last)
        np.add.at(weights, (rows, inside), _cubic(distance))
    return weights


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Returns the weight of a sample at a distance of at most 2."""
    square = distance**2
    cube = distance**3
    near = (_KEYS + 2) * cube - (_KEYS + 3) * square + 1
    far = _KEYS * cube - 5 * _KEYS * square
    far = far + 8 * _KEYS * distance - 4 * _KEYS
    return np.where(distance <= 1, near, far)
