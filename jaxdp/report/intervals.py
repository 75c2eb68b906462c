"""How sure an accuracy is, and whether its change is more than chance, for pages."""

import math
import statistics
from collections.abc import Mapping
from typing import Any


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of the probability behind a share of `count` independent
    cases.
    """
    z = statistics.NormalDist().inv_cdf(0.975)
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    variance = share * (1 - share) / count + z * z / (4 * count * count)
    half = z / scale * math.sqrt(variance)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def mcnemar(gained: int, lost: int) -> float:
    """Returns the two-sided p of McNemar's exact test: that so unequal numbers of changed answers
    arise by chance.
    """
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


def interval(share: float, count: int) -> str:
    """Returns an accuracy with its 95 % interval, for a page."""
    low, high = wilson(share, count)
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def measured(value: Any) -> str:
    """Returns a number that was measured, for a page. A pair of a share and the number of cases has
    its interval.

    Raises:
      ValueError: A share is not in [0, 1], or there are no cases.
    """
    if isinstance(value, tuple | list):
        share, cases = value
        if share < 0 or share > 1 or cases < 1:
            raise ValueError(
                f"a measured share must be in [0, 1] and of at least one case, got {share!r} of "
                f"{cases!r} cases. Write 96 % of 50 cases as (0.96, 50)."
            )
        return f"{interval(share, cases)}, {cases} cases"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def chance(changes: Mapping[str, Any]) -> str:
    """Returns what the change of an accuracy on the same inputs means, for a page."""
    gained, lost = changes["gained"], changes["lost"]
    p = mcnemar(gained, lost)
    counts = f"{gained} answers became right and {lost} became wrong"
    if p >= 0.05:
        return (
            f"This change is inside the noise: {counts}, which chance alone explains (McNemar's "
            f"exact p = {p:.2g})."
        )
    better = "improvement" if gained > lost else "loss"
    return f"This {better} is larger than chance explains: {counts} (McNemar's exact p = {p:.1g})."
