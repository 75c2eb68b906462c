"""The epsilon of random histories beside a second accountant's.

    python -m benchmarks run accountant --update

A long history has 1,000 releases of up to 20 kinds under one of three adjacencies, at a delta from
1e-15 to 1e-2. The second accountant inverts characteristic functions on a line
(`tests.privacy.second_accountant`). It shares no code and no method with ours. Short histories have
a few releases, whose exact epsilon follows from direct convolution. The histories are those of
tests/privacy/test_histories.py."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from benchmarks import pages
from jaxdp import privacy
from jaxdp.privacy.events import compose
from tests.privacy import test_histories

LONG = "1,000 releases"
SHORT = "a few releases"


class Compared(NamedTuple):
    """A history, and its epsilon by both accountants."""

    kind: str
    adjacency: str
    ours: float
    exact: float

    @property
    def excess(self) -> float:
        """The share by which ours is above the exact epsilon."""
        return self.ours / self.exact - 1 if self.exact > 0 else 0.0


def long_history(seed: int) -> Compared:
    """Returns the comparison of the long history of a seed."""
    leaves, adjacency, delta, unit = test_histories.history(seed)
    ours = privacy.epsilon(compose(leaves), delta=delta, adjacency=adjacency)
    exact = test_histories.exact(leaves, adjacency, delta, unit, ours)
    return Compared(LONG, adjacency, ours, exact)


def short_histories(count: int) -> Iterable[Compared]:
    """Yields the comparisons of short histories, all of one seed."""
    rng = np.random.default_rng(49)
    for _ in range(count):
        leaves, delta, unit = test_histories.short_history(rng)
        ours = privacy.epsilon(compose(leaves), delta=delta, adjacency="replace_one")
        exact = test_histories.exact(leaves, "replace_one", delta, unit, None)
        yield Compared(SHORT, "replace_one", ours, exact)


def summary(compared: Iterable[Compared]) -> list[dict]:
    """Returns a row for each kind of history and adjacency."""
    groups = {}
    for history in compared:
        groups.setdefault((history.kind, history.adjacency), []).append(history.excess)
    rows = []
    for (kind, adjacency), excesses in sorted(groups.items()):
        row = {"kind": kind, "adjacency": adjacency, "histories": len(excesses)}
        for name, share in (("least", np.min), ("median", np.median), ("most", np.max)):
            row[name] = float(share(excesses))
        rows.append(row)
    return rows


def tables(report) -> dict:
    columns = {"histories of": "{kind}", "adjacency": "{adjacency}", "number": "{histories}"}
    columns |= {name: f"{{{name}:.1e}}" for name in ("least", "median", "most")}
    return {"accountant": pages.lines(report["rows"], columns)}


FLAGS = {"long": (1000, "histories of 1,000 releases"), "short": (1000, "of a few releases")}


def measure(flags) -> dict:
    compared = [*map(long_history, range(flags.long)), *short_histories(flags.short)]
    return {"rows": summary(compared)}
