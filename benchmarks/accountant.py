"""The epsilon of random histories beside a second accountant's.

    python -m benchmarks run accountant --update

A long history has 1,000 releases of up to 20 kinds under one of three adjacencies, at a delta from
1e-15 to 1e-2. The second accountant inverts characteristic functions on a line
(`tests.privacy.second_accountant`). It shares no code and no method with ours. Short histories have
a few releases, whose exact epsilon follows from direct convolution. The histories are those of
tests/privacy/test_histories.py."""

import statistics
from collections.abc import Iterable

import numpy as np

from benchmarks import pages
from jaxdp import privacy
from jaxdp.privacy.events import compose
from tests.privacy import test_histories

LONG = "1,000 releases"
SHORT = "a few releases"


# The kind of a history, its adjacency, and the share by which ours is above the exact epsilon.
Excess = tuple[str, str, float]


def excess(ours: float, exact: float) -> float:
    """Returns the share by which ours is above the exact epsilon."""
    return ours / exact - 1 if exact > 0 else 0.0


def long_history(seed: int) -> Excess:
    """Returns the comparison of the long history of a seed."""
    leaves, adjacency, delta, unit = test_histories.history(seed)
    ours = privacy.epsilon(compose(leaves), delta=delta, adjacency=adjacency)
    exact = test_histories.exact(leaves, adjacency, delta, unit, ours)
    return LONG, adjacency, excess(ours, exact)


def short_histories(count: int) -> Iterable[Excess]:
    """Yields the comparisons of short histories, all of one seed."""
    rng = np.random.default_rng(49)
    for _ in range(count):
        leaves, delta, unit = test_histories.short_history(rng)
        ours = privacy.epsilon(compose(leaves), delta=delta, adjacency="replace_one")
        exact = test_histories.exact(leaves, "replace_one", delta, unit, None)
        yield SHORT, "replace_one", excess(ours, exact)


def summary(compared: Iterable[Excess]) -> list[dict]:
    """Returns a row for each kind of history and adjacency."""
    groups = {}
    for kind, adjacency, share in compared:
        groups.setdefault((kind, adjacency), []).append(share)
    rows = []
    for (kind, adjacency), excesses in sorted(groups.items()):
        row = {"kind": kind, "adjacency": adjacency, "histories": len(excesses)}
        row |= {"least": min(excesses), "median": statistics.median(excesses)}
        rows.append(row | {"most": max(excesses)})
    return rows


def tables(report) -> dict:
    columns = {"histories of": "{kind}", "adjacency": "{adjacency}", "number": "{histories}"}
    columns |= {name: f"{{{name}:.1e}}" for name in ("least", "median", "most")}
    return {"accountant": pages.lines(report["rows"], columns)}


FLAGS = {"long": (1000, "histories of 1,000 releases"), "short": (1000, "of a few releases")}


def measure(flags) -> dict:
    compared = [*map(long_history, range(flags.long)), *short_histories(flags.short)]
    return {"rows": summary(compared)}
