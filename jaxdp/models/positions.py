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
    old = _side(positions.shape[1] - prefix_tokens)
    new = _side(tokens - prefix_tokens)
    in_front = positions[:, :prefix_tokens]
    grid = positions[0, prefix_tokens:].astype(np.float64).reshape(old, old, -1)
    weights = _cubic_weights(old, new)
    resized = np.einsum("ai,bj,ijd->abd", weights, weights, grid, optimize=True)
    patches = resized.reshape(1, new * new, -1).astype(positions.dtype)
    return np.concatenate([in_front, patches], axis=1)


def _side(patches: int) -> int:
    side = math.isqrt(max(patches, 0))
    if side * side != patches or not side:
        raise ValueError(f"positions need a square grid of patches, got {patches} patches.")
    return side


def _cubic_weights(old: int, new: int) -> np.ndarray:
    """Returns the matrix [new, old] from old samples on a line to new ones."""
    # Samples are at the centres of intervals of equal length.
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(centres).astype(int) - 1
    weights = np.zeros((new, old))
    for k in range(4):
        sample = first + k
        weight = _cubic(np.abs(centres - sample))
        # A sample outside the grid has the value of the nearest one inside.
        inside = np.clip(sample, 0, old - 1)
        np.add.at(weights, (np.arange(new), inside), weight)
    return weights


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Returns the weight of a sample at a distance below 2."""
    near = ((_KEYS + 2) * distance - (_KEYS + 3)) * distance**2 + 1
    far = _KEYS * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, far)
