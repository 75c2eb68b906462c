"""The secret number of runs of a search (Papernot and Steinke 2022, arXiv:2110.03620, section 3).

    P[K = 1] = eta (1 - gamma) / (gamma^-eta - 1)
    P[K = k+1] / P[K = k] = (1 - gamma) (k + eta) / (k + 1)

    P[K = 0] = exp(-mean)
    P[K = k+1] / P[K = k] = mean / (k + 1)

The first pair is Definition 1 for eta > 0, the truncated negative binomial. Its limit at eta = 0
is the logarithmic distribution, and eta = 1 is the geometric one. The second pair is Poisson, which
this module calls eta = inf.
"""

import dataclasses
import decimal
import math
from collections.abc import Callable
from decimal import Decimal

from jaxdp.files import check_numbers
from jaxdp.privacy import DpEvent, RepeatAndSelectDpEvent
from jaxdp.privacy.events import compose, composition
from jaxdp.privacy.selection import stopping_probability

_SEED_BITS = 128
# More digits than the 39 of a seed, so that the drawn number has its distribution up to 2^-128.
_DIGITS = 70
_MOST = 10_000
# Below it 1 - gamma^-eta would lose digits that the distribution needs.
_LEAST_SHAPE = 1e-9


@dataclasses.dataclass(frozen=True)
class RandomRuns:
    """How many runs a search has: a secret number with a public distribution.

        runs = RandomRuns(mean=10)
        runs.quantile(0.95)  # runs to have time for

    Attributes:
      mean: The mean number of runs, > 1 and at most 10000.
      eta: The shape, 0 or at least 1e-9. 0 is logarithmic and cheapest, with many short searches
        and a few long ones. 1, the default, is geometric. `math.inf` is Poisson, which varies
        least. A Poisson number may be 0: the search then ends with the first parameters.

    Raises:
      TypeError, ValueError: mean or eta is no number in its range, or no float is the stopping
        probability of both, as for mean=2 and eta=1e17. For other distributions, and for a fixed
        number of runs, the accountant has no bound.
    """

    mean: float
    eta: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(mean=self.mean, eta=self.eta)
        if not 1 < self.mean <= _MOST:
            raise ValueError(
                f"mean must be above 1 and at most {_MOST}, got {self.mean!r}. One run needs no "
                "search: call jaxdp.finetune.fit."
            )
        if not self.eta >= 0:
            raise ValueError(
                f"eta must be at least 0, or math.inf for a Poisson number, got {self.eta!r}. The "
                "ledger has no rule for another distribution."
            )
        if 0 < self.eta < _LEAST_SHAPE:
            raise ValueError(
                f"eta must be 0 or at least {_LEAST_SHAPE:g}, got {self.eta!r}. The distribution "
                "of eta=0 is the same up to rounding."
            )
        # A probability of 1 has one run always, of which no ratio can be drawn.
        if self.eta < math.inf and stopping_probability(self.mean, self.eta) == 1:
            raise ValueError(
                f"eta must be smaller for mean={self.mean!r}, got {self.eta!r}: its stopping "
                "probability is 1 up to rounding. Give eta=math.inf for a Poisson number."
            )

    def event(self, run: DpEvent) -> DpEvent:
        """Returns the event of the best of these runs, each of which has the event `run`."""
        search = RepeatAndSelectDpEvent(run, float(self.mean), float(self.eta))
        return compose(composition(search))

    def draw(self, secret: bytes) -> int:
        """Returns the number of runs, which is as secret as its 16 uniform bytes.

        The total variation distance to the exact distribution is below 2^-127.

        Raises:
          ValueError: secret has another length.
        """
        if len(secret) != _SEED_BITS // 8:
            raise ValueError(f"secret must be {_SEED_BITS // 8} bytes, got {len(secret)}.")
        with decimal.localcontext(prec=_DIGITS):  # of 28 digits a seed would be cut
            uniform = Decimal(int.from_bytes(secret, "little")) / 2**_SEED_BITS
        return self._inverse(uniform)

    def quantile(self, share: float) -> int:
        """Returns a number of runs that a search exceeds with a probability of at most 1 - share.

        Args:
          share: A number in [0, 1).
        """
        if not 0 <= share < 1:
            raise ValueError(f"share must be in [0, 1), got {share!r}.")
        return self._inverse(Decimal(share))

    def _inverse(self, uniform: Decimal) -> int:
        """Returns the least k whose cumulative probability exceeds `uniform`."""
        with decimal.localcontext(prec=_DIGITS):
            k, probability, ratio = self._distribution()
            cumulative = probability
            # Inversion in decimal: float64 would stop to move when 1 - cumulative is below its
            # rounding, and the tail of K would be lost.
            while cumulative <= uniform:
                probability *= ratio(k)
                cumulative += probability
                k += 1
        return k

    def _distribution(self) -> tuple[int, Decimal, Callable[[int], Decimal]]:
        """Returns the least number of runs, its probability, and P[K = k + 1] / P[K = k] of k."""
        mean = Decimal(float(self.mean))  # a number of NumPy has no conversion
        if self.eta == math.inf:
            return 0, (-mean).exp(), lambda k: mean / (k + 1)
        gamma = Decimal(stopping_probability(float(self.mean), float(self.eta)))
        eta = Decimal(float(self.eta))
        log_gamma = gamma.ln()
        if eta == 0:
            # Definition 1 as eta -> 0: gamma^-eta - 1 -> -eta ln(gamma).
            first = (1 - gamma) / -log_gamma
        else:
            first = eta * (1 - gamma) / ((-eta * log_gamma).exp() - 1)  # P[K = 1]
        return 1, first, lambda k: (1 - gamma) * (k + eta) / (k + 1)
