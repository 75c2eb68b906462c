"""The trade-off curve (f-DP) of an account on a page: its figure, and its points as CSV."""

import math
import urllib.parse

from jaxdp.privacy import TradeOff
from jaxdp.report.html import Chart

CURVES = 6  # accounts of a page with a curve, of about 0.5 s each
_ALARMS = (0.0, 0.01, 0.02, 0.05, *(k / 20 for k in range(2, 21)))


def trade_off_chart(curve: TradeOff | None) -> Chart | None:
    """Returns the chart of a trade-off curve. It is None without a curve, or if it is 0."""
    if curve is None or not any(curve.beta):
        return None
    # Rounded down to the digits that are shown.
    points = [(alpha, math.floor(1000 * curve.at(alpha)) / 1000) for alpha in _ALARMS]
    return Chart(
        curves={
            "proven for every attacker": points,
            "guessing": [(0.0, 1.0), (1.0, 0.0)],
        },
        xlabel="false alarms",
        ylabel="misses at least",
        top=1.0,
        percent=True,
    )


def csv_link(curve: TradeOff) -> str:
    """Returns the exact points of a curve as the address of a CSV file inside of the page.

    A page has no files beside it. A browser saves this address as a file, without a request.
    """
    lines = ["alpha,beta"]
    for row in curve.rows():
        lines.append(f"{row['alpha']!r},{row['beta']!r}")
    content = "\n".join([*lines, ""])
    return f"data:text/csv;charset=utf-8,{urllib.parse.quote(content, safe=',.-')}"
