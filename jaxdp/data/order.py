"""The one seeded order of rows. It divides a set into parts, and chooses a few of its rows."""

import numpy as np

from jaxdp.files.arguments import check_count


def shuffled(count: int, *, seed: int) -> np.ndarray:
    """Returns the rows 0..count-1 in a random order, int64 [count].

    The order depends on the count and the public seed only, and is the same for all versions of
    NumPy.

    Args:
      count: The number of rows.
      seed: A public non-negative int below 2**128.

    Raises:
      TypeError, ValueError: The seed is no such int. NumPy draws another order for None each time,
        so parts of a set would overlap.
    """
    check_count("seed", seed, 0)
    # NumPy never changes the raw stream of a bit generator. It may change what
    # Generator.permutation makes of the same stream.
    words = np.random.Philox(key=seed).random_raw(count)
    return np.argsort(words, kind="stable")
