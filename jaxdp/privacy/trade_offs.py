"""Trade-off curves (f-DP) of compositions, and the Gaussian DP that they satisfy.

An attacker decides from the releases whether a record was in the data. alpha is the rate of false
alarms, and beta the rate of misses. A mechanism is f-DP if beta >= f(alpha) for every test (Dong,
Roth, Su 2019, arXiv 1905.02383). (epsilon, delta)-DP is f-DP with two lines, proposition 2.5:

    f(alpha) = max(0, 1 - delta - exp(epsilon) alpha, exp(-epsilon) (1 - delta - alpha)).

Formal guarantees: a curve is the maximum of these lines for many epsilons with the upper bounds on
their delta, so that it never lies above the trade-off function. Its points are the corners of the
maximum. Straight lines between them are exactly the maximum, and as sound.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from jaxdp.files import shown
from jaxdp.files.text import finite, indented, up
from jaxdp.privacy.events import (
    Counts,
    DpEvent,
    GaussianDpEvent,
    OwnedGaussianDpEvent,
    PoissonSampledDpEvent,
)
from jaxdp.privacy.explanations import compositions_of, terms_of
from jaxdp.privacy.relations import Adjacency, distance_factor
from jaxdp.privacy.rules import is_boundless, leaf_pure_epsilon, pure_epsilon
from jaxdp.privacy.spent_epsilon import deltas_of, epsilon_of
from jaxdp.privacy.terms import Dataset

# Of a curve. Their lines touch the trade-off function.
_LINES = 200
# The rates of false alarms in the text.
_SHOWN = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
# exp overflows near 709.
_MOST_EPSILON = 600.0
# The smallest delta of a curve, unless the dataset's own is smaller.
_LEAST = 1e-12
# Corners are computed to a few units of float64, and then moved down.
_DOWN = 2.0**-48
_UP = 1 + 1e-9


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """A lower bound on the errors of every attacker, as `Ledger.trade_off` returns it.

    Attributes:
        dataset: The name of the dataset.
        alpha: Rates of false alarms, ascending from 0 to 1 [N].
        beta: The least rates of misses [N]. Between points they are linear.
        mu: A mu of Gaussian DP that the releases satisfy (dominated everywhere). It is the smallest
            one for Gaussians. It is infinite if none is proven.
        slack: The delta of `mu_up_to_slack`.
        mu_up_to_slack: The smallest mu for which beta >= G_mu(alpha + slack) - slack everywhere on
            this curve. It leaves out events of a probability of about `slack`.
    """

    dataset: str
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    mu: float
    slack: float
    mu_up_to_slack: float

    def at(self, alpha: float) -> float:
        """Returns the least rate of misses of an attacker with a rate of false alarms in [0, 1].

        Raises:
            ValueError: `alpha` is not in [0, 1].
        """
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {alpha!r}.")
        beta = float(np.interp(alpha, self.alpha, self.beta))
        return max(0.0, beta - _DOWN)

    def rows(self) -> list[dict[str, float]]:
        """Returns the points as rows with "alpha" and "beta", for CSV."""
        points = zip(self.alpha, self.beta, strict=True)
        return [{"alpha": alpha, "beta": beta} for alpha, beta in points]

    def text(self) -> str:
        """Returns mu and some points for people."""
        lines = [
            f"{shown(self.dataset)}: mu {up(self.mu)}, and {up(self.mu_up_to_slack)} up to a slack "
            f"of {self.slack:g}"
        ]
        table = [["false alarms", "misses at least"]]
        for alpha in _SHOWN:
            table.append([f"{alpha:g}", f"{math.floor(1e4 * self.at(alpha)) / 1e4:.4f}"])
        lines += indented(table)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns the curve as plain data for JSON, with None for infinity."""
        return dict(finite(dataclasses.asdict(self)))


def trade_off_of(dataset: Dataset, compositions: Sequence[Counts], slack: float) -> TradeOff:
    """Returns the curve of the worst of several compositions of a dataset."""
    least = min(_LEAST, slack / 100) if slack > 0 else _LEAST
    epsilons = _epsilons(dataset, compositions, least)
    deltas = np.zeros(len(epsilons))
    for counts in compositions:
        bounds = deltas_of(dataset, counts, epsilons, least)
        # The curve must hold for the units of every part.
        deltas = np.maximum(deltas, bounds)
    alpha, beta = corners(epsilons, deltas)
    exact_mu = max(total_mu(dataset, counts) for counts in compositions)
    # If some mass stays beyond every epsilon, no mu covers it.
    needed = needed_mu(alpha, beta, 0.0) if deltas[-1] == 0 else math.inf
    mu = min(exact_mu, needed)
    mu_up_to_slack = mu
    if slack > 0 and deltas[-1] < 1:
        mu_up_to_slack = min(mu, needed_mu(alpha, beta, slack))
    return TradeOff(
        dataset=dataset.name,
        alpha=tuple(map(float, alpha)),
        beta=tuple(map(float, np.maximum(beta - _DOWN, 0.0))),
        mu=mu,
        slack=slack,
        mu_up_to_slack=mu_up_to_slack,
    )


def of_account(account: Mapping[str, Any]) -> TradeOff | None:
    """Returns the curve of one dataset of `Ledger.report`, with its delta as slack.

    It returns None if the report leaves out rows, if nothing was spent, or if a release is unproven
    or not private.
    """
    compositions = compositions_of(account)
    if not any(compositions) or any(map(is_boundless, compositions)):
        return None
    return trade_off_of(terms_of(account), compositions, account["delta"])


def _epsilons(dataset: Dataset, compositions: Sequence[Counts], least: float) -> np.ndarray:
    """Returns the epsilons of the lines, from 0 to that of the smallest delta."""
    ends = []
    for counts in compositions:
        ends.append(epsilon_of(dataset, counts, least))
        if dataset.accounting != "renyi_filter":
            # At the pure epsilon delta is 0.
            ends.append(pure_epsilon(counts, dataset.adjacency))
    inside = [end for end in ends if end <= _MOST_EPSILON]
    return np.linspace(0.0, max(inside, default=0.0), _LINES)


# --- Lines --------------------------------------------------------------------------------------


def corners(epsilons: np.ndarray, deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the corners of the maximum of the lines of (epsilon, delta)-DP.

    Args:
        epsilons: Ascending from 0 [N].
        deltas: Upper bounds on their deltas [N].

    Returns:
        alpha, ascending from 0 to 1, and beta, descending from at most 1 to 0.
    """
    heights = 1 - deltas
    slopes = np.exp(epsilons)
    # The curve is symmetric. It meets the diagonal where the first line does.
    middle = float(np.max(heights / (1 + slopes)))
    lines: list[tuple[float, float, float]] = []  # where a line begins to be the largest, and it
    # The steepest line is the largest one near alpha = 0.
    for height, slope in sorted(zip(heights, slopes, strict=True), key=lambda line: -line[1]):
        begin = 0.0
        while lines:
            top_begin, top_height, top_slope = lines[-1]
            if top_slope == slope:
                begin = 0.0 if height >= top_height else math.inf
            else:
                begin = max((top_height - height) / (top_slope - slope), 0.0)
            if begin > top_begin:
                break
            lines.pop()
        else:
            begin = 0.0
        if begin < middle or not lines:
            lines.append((begin, float(height), float(slope)))
    left = [(begin, height - slope * begin) for begin, height, slope in lines if begin < middle]
    left.append((middle, middle))
    # The mirror image, because the curve is its own inverse.
    right = [(beta, alpha) for alpha, beta in reversed(left[:-1])]
    points = np.array([*left, *right, (1.0, 0.0)])
    return points[:, 0], points[:, 1]


# --- Gaussian DP --------------------------------------------------------------------------------


def needed_mu(alpha: np.ndarray, beta: np.ndarray, slack: float) -> float:
    """Returns the smallest mu with beta >= G_mu(alpha + slack) - slack on a curve, rounded up.

    G_mu(alpha) is Phi(Phi^-1(1 - alpha) - mu). It is convex, so that it lies below a curve of
    straight lines if it does so at the corners. At alpha 0 without slack the caller decides.
    """
    alarms = alpha + slack
    misses = beta + slack
    inside = (alarms > 0) & (misses > 0) & (alarms < 1) & (misses < 1)
    mus = -special.ndtri(alarms[inside]) - special.ndtri(misses[inside])
    return max(0.0, float(np.max(mus, initial=0.0))) * _UP


def total_mu(dataset: Dataset, counts: Counts) -> float:
    """Returns the mu of a composition whose releases all are Gaussian DP, or infinity.

    Mus compose by the root of the sum of squares (corollary 3.3). The events must be fixed in
    advance, so that a Renyi filter has none.
    """
    if dataset.accounting == "renyi_filter" and counts:
        return math.inf
    mus = [math.sqrt(count) * leaf_mu(leaf, dataset.adjacency) for leaf, count in counts.items()]
    return math.hypot(*mus) * (1 + 1e-12)


def leaf_mu(leaf: DpEvent, adjacency: Adjacency) -> float:
    """Returns the mu of a leaf, or infinity.

    A pure release has the mu whose curve touches its own at the diagonal. A sample of a Gaussian
    has that of the whole, because sampling never lowers a trade-off curve.
    """
    match leaf:
        case GaussianDpEvent(noise_multiplier=sigma):
            return distance_factor(adjacency) / float(sigma)
        case PoissonSampledDpEvent(event=GaussianDpEvent() as whole):
            return leaf_mu(whole, adjacency)
        case OwnedGaussianDpEvent(noise_multiplier=sigma, records=records):
            return records / float(sigma)
    loss = leaf_pure_epsilon(leaf, adjacency)
    return -2 * float(special.ndtri(special.expit(-loss))) * _UP
