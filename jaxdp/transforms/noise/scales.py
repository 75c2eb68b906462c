"""Checks of the public numbers of noise: scales, multipliers, clip norms and divisors."""

import math
from typing import Any

import jax
import numpy as np

# Powers of two between the scale of noise and the smallest or largest float of its dtype. With
# less room, underflow or overflow visibly changes the distribution.
_ROOM_BELOW = 26
_ROOM_ABOVE = 28


def range_of(dtype: Any) -> tuple[float, float]:
    """Returns the smallest and the largest scale of noise of a dtype."""
    limits = np.finfo(dtype)
    smallest = 2.0 ** (int(limits.minexp) + _ROOM_BELOW)
    largest = 2.0 ** (int(limits.maxexp) - _ROOM_ABOVE)
    return smallest, largest


def check_product(
    name: str,
    noise_multiplier: float,
    clip_norm: float,
) -> None:
    """Raises ValueError for a standard deviation that float32 noise cannot have.

    Zero passes: it means no noise, or a constant sum that needs none.
    """
    # In float64. Either factor may be outside of float32 if their product is not.
    std = noise_multiplier * clip_norm
    low, high = range_of(np.float32)
    if noise_multiplier and clip_norm and not low <= std <= high:
        raise ValueError(
            f"{name}={noise_multiplier} times the clip norm {clip_norm} is {std}, but float32 "
            f"noise needs a standard deviation from {low:.2g} to {high:.2g}. Multiply the loss by "
            "a public constant so that it can be clipped to a norm of about 1."
        )


def check_carried(
    name: str,
    scale: float,
    dtype: Any,
) -> None:
    """Raises ValueError for a scale that is not 0 and outside of `range_of(dtype)`."""
    low, high = range_of(dtype)
    if scale and not low <= scale <= high:
        raise ValueError(
            f"{name} must be 0 or from {low:.2g} to {high:.2g} for {dtype} noise, got {scale!r}. "
            "Otherwise noise vanishes or overflows. Multiply the values by a public constant "
            "first."
        )


def real_number(name: str, value: Any) -> float:
    """Returns a public number as a float. Raises TypeError if it is traced or not one number."""
    if type(value) in (float, int):
        return float(value)
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is traced, but privacy parameters are public constants. Call privatize "
            "outside jit."
        )
    # An explicit transfer, because training runs under jax_transfer_guard="disallow".
    value = jax.device_get(value)
    numeric = isinstance(value, (int, float, np.ndarray, np.generic))
    if not numeric or np.ndim(value) or np.iscomplexobj(value):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}.")
    return float(value)


def check_number(name: str, value: Any) -> float:
    """Returns a public number that is at least 0, possibly infinite."""
    number = real_number(name, value)
    if math.isnan(number) or number < 0:
        raise ValueError(f"{name} must be at least 0, got {number}.")
    return number


def check_scale(name: str, value: Any) -> float:
    """Returns a public number that is at least 0 and finite."""
    number = check_number(name, value)
    if math.isinf(number):
        raise ValueError(f"{name} must be finite, got {number}.")
    return number
