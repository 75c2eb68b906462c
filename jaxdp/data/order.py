"""The one seeded order of rows. It divides a set into parts, and chooses a few of its rows."""

import numpy as np

from jaxdp.files import check_count


def shuffled(count: int, *, seed: int) -> np.ndarray:
    """Returns the rows 0..count-1 in a random order, int64 [count].

    The order depends on the count and the public seed only, and is the same for all versions of
    NumPy.

    Args:
      count: The number of rows.
      seed: A public non-negative int below 2**128.

    Raises:
      ValueError: seed is out of range.
      TypeError: seed is no int.
    """
    check_count("seed", seed, 0)  # None would be another order each time
    if seed >= 2**128:
        raise ValueError(f"seed must be below 2**128, got {seed}.")
    # NumPy never changes the raw stream of a bit generator. It may change what
    # Generator.permutation makes of the same stream.
    words = np.random.Philox(key=seed).random_raw(count)
    return np.argsort(words, kind="stable")
