"""Sets of compositions: the largest ones, sums over datasets, and their proven parts."""

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence

from jaxdp.privacy.events import Counts, UnprovenDpEvent

# `combinations` enumerates at most this many combinations of parts. Beyond them it uses an upper
# bound.
COMBINATIONS = 1000


def maximal(compositions: Iterable[Counts]) -> list[Counts]:
    """Returns the compositions that no other one covers. Equal ones are returned once."""
    maximal: list[Counts] = []
    # Only a larger composition covers another one, so those come first.
    for counts in sorted(compositions, key=Counter.total, reverse=True):
        if not any(counts <= larger for larger in maximal):
            maximal.append(counts)
    return maximal


def combinations(datasets: Iterable[Sequence[Counts]]) -> list[Counts]:
    """Returns the maximal sums of one composition of every dataset.

    Where they are very many, it returns compositions that cover all sums.

    Parts {a, b} of one dataset and {c} of another one give {a + c, b + c}.
    """
    sums: list[Counts] = [Counter()]
    for counts_of_parts in datasets:
        if len(sums) * len(counts_of_parts) > COMBINATIONS:
            # The union of the parts covers each of them.
            counts_of_parts = [functools.reduce(operator.or_, counts_of_parts)]
        longer_sums = []
        for counts in sums:
            longer_sums += [counts + part for part in counts_of_parts]
        # Reduced after each dataset, which keeps the sums few.
        sums = maximal(longer_sums)
    return sums


def is_proven(counts: Counts) -> bool:
    """Returns whether every release has a proof."""
    return not any(isinstance(leaf, UnprovenDpEvent) for leaf in counts)


def proven(counts: Counts) -> Counts:
    """Returns a composition without the releases that have no proof."""
    return Counter(
        {leaf: count for leaf, count in counts.items() if not isinstance(leaf, UnprovenDpEvent)}
    )
