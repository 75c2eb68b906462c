"""The recalibration methods: their questions, sensitivities and use of the answers.

The order is the paper's: `NllT`, `EceT`, `HistogramBinning` (Sections 3.3 and C.2), `AccT` (Section
4, Algorithm 1). `AccBisection` and `LogisticBinning` go beyond the paper. Sensitivities are for one
record added or removed, as in the paper, or for one record replaced by another. Zeroing out a
record costs as much as removing it if the null record is invalid, such as label -1.
"""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.files import check_choice, check_numbers
from jaxdp.privacy.accounting import Adjacency
from jaxdp.recalibration.metrics import equal_width_bin
from jaxdp.recalibration.protocol import Method, Records
from jaxdp.recalibration.search import (
    Bisection,
    Bracket,
    FoundTemperature,
    GoldenSection,
    GridSearch,
    Observation,
)

Form = Literal["split", "published"]
Search = Literal["golden", "grid", "bisection"]
_SEARCHES: dict[str, Any] = {"golden": GoldenSection, "grid": GridSearch, "bisection": Bisection}


def confidence(logits: jax.Array, temperature: jax.Array | float = 1.0) -> jax.Array:
    """Computes p_T(x), the largest softmax probability of logits [n, m] / T (Equation 3).

    The result is float32 [n] in [1 / m, 1].
    """
    below_largest = logits - logits.max(1, keepdims=True)
    return 1 / jnp.exp(below_largest / temperature).sum(1)


def _in_one_bin(adjacency: Adjacency) -> float:
    """Returns the sensitivity of bins if a record changes one bin by at most 1.

    A replacement may change two bins.
    """
    return 2.0 if adjacency == "replace_one" else 1.0


# --- Temperature scaling ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemperatureSearch:
    """Temperature scaling by a search for the best temperature.

    Attributes:
      bracket: Public range of temperatures, a `Bracket` or an argument of `Bracket.of`.
      iterations: K, the number of reductions of the bracket. Each leaves 0.618 of it, or a half
          with bisection. A grid has K + 1 temperatures.
      search: "golden" chooses each temperature by the earlier answers (section C.1). "grid" asks
          about temperatures that are fixed in advance (section D.1). Both release K + 1 answers
          under the same noise.
    """

    bracket: Any = dataclasses.field(default_factory=Bracket)
    iterations: int = 5
    search: Search = "golden"

    searches: ClassVar[tuple[str, ...]] = ("golden", "grid")
    split = False  # whether the first round asks for a number that all later answers need

    def __post_init__(self) -> None:
        object.__setattr__(self, "bracket", Bracket.of(self.bracket))
        _check_count("iterations", self.iterations)
        if self.search not in self.searches:
            allowed = " or ".join(map(repr, self.searches))
            raise ValueError(f"search must be {allowed}, got {self.search!r}.")

    @property
    def rounds(self) -> int:
        """K + 1, or K with bisection, and one more for `split`."""
        return self.iterations + (self.search != "bisection") + self.split

    def objective(self, answer: jax.Array) -> jax.Array:
        """Returns the number to minimise, from the sum over sources [s]."""
        raise NotImplementedError

    def lean(self, answer: jax.Array) -> jax.Array:
        """Returns the number that decides a tie, see `Observation`.

        It is post-processing of the answer.
        """
        return jnp.float32(0)

    def init(self, variance: float | jax.Array) -> Any:
        """Returns the search of the whole bracket, and the answer that later ones need: 0."""
        search = _SEARCHES[self.search].start(self.bracket, self.iterations)
        return search, jnp.float32(0)

    def question(self, k: int, state: Any) -> jax.Array:
        """Returns the temperature at the next position."""
        search, _ = state
        return self.bracket.temperature(search.position())

    def update(self, k: int, state: Any, answer: jax.Array) -> Any:
        """Runs lines 4 to 12."""
        search, needed = state
        if k < self.split:
            return search, answer[0]
        total = needed + answer
        observation = Observation(self.objective(total), self.lean(total))
        return search.observed(k - self.split, observation), needed

    def finish(self, state: Any) -> FoundTemperature:
        """Runs line 13."""
        search, _ = state
        first_low, first_high = self.bracket.ends
        temperature = self.bracket.temperature((search.low + search.high) / 2)
        return FoundTemperature(temperature, search.low == first_low, search.high == first_high)

    def confidence(self, parameters: FoundTemperature, logits: jax.Array) -> jax.Array:
        """Computes p_T(x)."""
        return confidence(logits, parameters.temperature)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NllT(TemperatureSearch):
    """NLL-T (Section 3.3, C.2.1): the temperature of least negative log likelihood.

    The published method has no bound and scales its noise to the largest observed value. Here every
    record's loss is clipped to a public bound. The sum of clipped losses may have several minima.

    Attributes:
      bound: The clip bound on one record's negative log likelihood, in nats.
    """

    bound: float = 10.0  # public. The largest value seen, as published, is no bound.

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "bound")

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """Returns the bound, under every adjacency, since losses are in [0, bound]."""
        return self.bound

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """Returns clipped -log softmax(l / T)_y, [n, 1]."""
        # At most 0, so exp is safe.
        logits = (records.logits - records.logits.max(1, keepdims=True)) / temperature
        of_label = jnp.take_along_axis(logits, records.labels[:, None], 1)
        loss = jnp.log(jnp.exp(logits).sum(1, keepdims=True)) - of_label
        return jnp.clip(loss, 0, self.bound)

    def objective(self, answer: jax.Array) -> jax.Array:
        """Returns the sum of losses."""
        return answer[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EceT(TemperatureSearch):
    """ECE-T (Section 3.3, C.2.2): the temperature of least error in bins of equal width.

    The objective may have several minima, since records change bins with T.

    Attributes:
      bins: The number of bins.
    """

    bins: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("bins", self.bins)

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """Returns 1, since a record is in one bin, or 2 for a replacement."""
        return _in_one_bin(adjacency)

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """Returns 1[phi(x) = y] - p_T(x) in the record's bin, [n, bins]."""
        p = confidence(records.logits, temperature)
        bin_of_record = jax.nn.one_hot(equal_width_bin(p, self.bins), self.bins)
        return bin_of_record * (records.correct - p)[:, None]

    def objective(self, answer: jax.Array) -> jax.Array:
        """Returns Equation 6 times the number of records: the sum over bins of absolute values."""
        return jnp.abs(answer).sum()

    def lean(self, answer: jax.Array) -> jax.Array:
        """Returns accuracy less mean confidence, times the number of records.

        It rises with T (Proposition 2).
        """
        return answer.sum()


# --- Histogram binning --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binning:
    """A confidence that is a function of one public score.

    It comes from one release of noisy counts in bins of that score. A method has `cells`, the
    number of bins, and `score(logits)`, float32 [n]. `cell(score)` is the bin of each score, int32
    [n]. `curve(parameters, score)` is the recalibrated confidence at scores [n].
    """

    rounds = 1

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """Returns 1, since a record is in one count, or 2 for a replacement."""
        return _in_one_bin(adjacency)

    def init(self: Any, variance: float | jax.Array) -> Any:
        """Returns the variance of the noise, and counts of zero."""
        return jnp.float32(variance), jnp.zeros(2 * self.cells)

    def question(self, k: int, state: Any) -> jax.Array:
        """Returns 1. The temperature has no effect."""
        return jnp.float32(1)

    def update(self, k: int, state: Any, answer: jax.Array) -> Any:
        """Stores the noisy counts."""
        variance, _ = state
        return variance, answer

    def summand(
        self: Any,
        k: int,
        records: Records,
        temperature: jax.Array,
    ) -> jax.Array:
        """Returns one-hot counts [n, 2 cells] of correct records, then of incorrect ones."""
        score = self.score(records.logits)
        cell = jax.nn.one_hot(self.cell(score), self.cells)
        correct = records.correct[:, None]
        return jnp.concatenate([cell * correct, cell * ~correct], 1)

    def confidence(self: Any, parameters: Any, logits: jax.Array) -> jax.Array:
        """Evaluates the curve at the score."""
        return self.curve(parameters, self.score(logits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistogramBinning(Binning):
    """Histogram binning (Section 3.3, C.2.3): the confidence of every bin becomes its accuracy.

    Attributes:
      bins: The number of bins of equal width.
      form: "split" asks for the correct and the incorrect records of each bin, "published" for the
        correct ones and all. Both give the same information. A record counts once in "split", so it
        needs half the noise.
      monotone: Whether the accuracy may not fall from a bin to the next. It is then the isotonic
        regression of the noisy bins (Zadrozny and Elkan 2002), which needs no further release.
    """

    bins: int = 15
    form: Form = "split"
    monotone: bool = False

    def __post_init__(self) -> None:
        _check_count("bins", self.bins)
        check_choice("form", self.form, Form)

    @property
    def cells(self) -> int:
        """The number of bins."""
        return self.bins

    def score(self, logits: jax.Array) -> jax.Array:
        """Computes p_1(x)."""
        return confidence(logits)

    def cell(self, score: jax.Array) -> jax.Array:
        """Finds the bin of equal width."""
        return equal_width_bin(score, self.bins)

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """Returns the number of counts that hold a record, doubled for a replacement."""
        counts = 1 if self.form == "split" else 2
        return _in_one_bin(adjacency) * counts

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """Returns one-hot counts [n, 2 bins] of correct records, then of incorrect or of all."""
        counts = super().summand(k, records, temperature)
        if self.form == "split":
            return counts
        correct, incorrect = jnp.split(counts, 2, axis=1)
        return jnp.concatenate([correct, correct + incorrect], 1)

    def finish(self, state: Any) -> jax.Array:
        """Returns the accuracy per bin [bins], in [0, 1].

        A bin without (noisy) records gets its middle.
        """
        _, counts = state
        correct, other = jnp.split(counts, 2)
        total = correct + other if self.form == "split" else other
        middle = (jnp.arange(self.bins) + 0.5) / self.bins
        present = total > 0
        accuracy = jnp.clip(correct / jnp.where(total > 0, total, 1), 0, 1)
        accuracy = jnp.where(present, accuracy, middle)
        return isotonic(accuracy, jnp.maximum(total, 1)) if self.monotone else accuracy

    def curve(self, parameters: jax.Array, score: jax.Array) -> jax.Array:
        """Returns the accuracy of the score's bin."""
        return parameters[self.cell(score)]


def isotonic(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the ascending numbers of least weighted squared distance from values, float32 [n].

    Number j is the maximum over i <= j of the minimum over k >= j of the weighted mean of values i
    to k (Robertson, Wright and Dykstra 1988, theorem 1.4.4). Weights are positive. Memory is n^2.
    """
    order = jnp.arange(len(values))
    is_range = order[:, None] <= order[None, :]  # from row i to column k
    in_row = jnp.where(is_range, weights[None, :], 0)
    masses = jnp.cumsum(in_row, 1)  # row by row, since a difference of two sums would cancel
    sums = jnp.cumsum(in_row * values[None, :], 1)
    divisors = jnp.where(is_range, masses, 1)
    means = jnp.where(is_range, sums / divisors, jnp.inf)
    smallest = jax.lax.cummin(means, axis=1, reverse=True)  # [i, j], over k >= j
    return jnp.where(is_range, smallest, -jnp.inf).max(0)


# --- Accuracy temperature scaling ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccT(TemperatureSearch):
    """Acc-T (Section 4, Algorithm 1): the temperature at which mean confidence equals accuracy.

    Attributes:
      split: Whether one round asks for accuracy and the others for confidence. The objective then
        has the noise of two answers, but each answer needs less noise. For "replace_one" an
        answer's noise is ((K + 1) (1 - 1/m) + 1) / epsilon instead of (K + 1) (2 - 1/m) / epsilon.
        For "add_remove" it is (K + 2) (1 - 1/m) / epsilon instead of (K + 1) / epsilon.
    """

    split: bool = False

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """Returns the range of the summand for replacements, else its largest size.

        1[phi(x) = y] - p_T(x) is in [-1, 1 - 1/m]. With `split`, 1[phi(x) = y] - 1/m is in [-1/m, 1
        - 1/m], and 1/m - p_T(x) in [-(1 - 1/m), 0].
        """
        replace = adjacency == "replace_one"
        if not self.split:
            return 2 - 1 / num_classes if replace else 1.0
        return 1.0 if k == 0 and replace else 1 - 1 / num_classes

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """Computes line 3, [n, 1].

        With `split` both parts are less 1/m, which cancels, so both ranges contain 0.
        """
        correct = records.correct.astype(jnp.float32)
        p = confidence(records.logits, temperature)
        if not self.split:
            return (correct - p)[:, None]
        chance = 1 / records.logits.shape[1]
        part = correct - chance if k == 0 else chance - p
        return part[:, None]

    def objective(self, answer: jax.Array) -> jax.Array:
        """Returns |v|, which line 5 compares."""
        return jnp.abs(answer[0])

    def lean(self, answer: jax.Array) -> jax.Array:
        """Returns v, which rises with T (Proposition 2)."""
        return answer[0]


# --- Beyond the paper ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccBisection(AccT):
    """Acc-T by bisection.

    By Proposition 2, accuracy less mean confidence rises with T, so its sign shows the side. K
    releases halve the bracket K times. Golden-section search needs K + 1 releases to leave
    0.618^K of it, and compares two noisy values instead of one.
    """

    search: Search = "bisection"

    searches = ("bisection",)

    def objective(self, answer: jax.Array) -> jax.Array:
        """Returns v. Too little confidence, v > 0, means a temperature that is too high."""
        return answer[0]


class Logistic(NamedTuple):
    """The confidence sigmoid(slope s + shift) at log-odds s. Both numbers are float32 []."""

    slope: jax.Array
    shift: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticBinning(Binning):
    """The confidence sigmoid(a s + b) of the log-odds s, with a and b fitted to noisy bins.

    The fit is by penalised quasi-likelihood. Histogram binning treats every bin separately. Here
    all bins fit one straight line in log-odds (Platt 1999). The weight of a bin follows from two
    known variances of its counts, of Laplace noise and of sampling. Log-odds have no upper end, so
    their bins can separate the records of an over-confident model.

    Attributes:
      edges: Public ascending edges between the bins of the log-odds.
      slope_sd, shift_sd: Standard deviations of the Gaussian priors of a around 1 and of b around
          0.
      steps: The number of steps of Fisher scoring.
    """

    edges: tuple[float, ...] = (-1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 8.0)
    slope_sd: float = 0.5
    shift_sd: float = 1.0
    steps: int = 30

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", tuple(map(float, self.edges)))
        ascending = all(low < high for low, high in itertools.pairwise(self.edges))
        if not self.edges or not ascending or not all(map(math.isfinite, self.edges)):
            raise ValueError(
                f"edges must be finite log-odds in ascending order, got {self.edges!r}."
            )
        _check_positive(self, "slope_sd", "shift_sd")
        _check_count("steps", self.steps)

    @property
    def cells(self) -> int:
        """The number of bins, one more than the edges."""
        return len(self.edges) + 1

    @property
    def places(self) -> tuple[float, ...]:
        """The log-odds that represent each bin.

        They are the middle of a bin, or a point a little beyond the first or last edge.
        """
        middles = [(low + high) / 2 for low, high in itertools.pairwise(self.edges)]
        return (self.edges[0] - 0.7, *middles, self.edges[-1] + 2.0)

    def score(self, logits: jax.Array) -> jax.Array:
        """Computes log p_1(x) / (1 - p_1(x)), without cancellation for p_1(x) close to 1."""
        largest = jnp.argmax(logits, 1)
        top = jax.nn.one_hot(largest, logits.shape[1], dtype=bool)
        below_largest = logits - logits.max(1, keepdims=True)
        others = jnp.where(top, -jnp.inf, below_largest)
        return -jax.nn.logsumexp(jnp.maximum(others, -1e4), 1)

    def cell(self, score: jax.Array) -> jax.Array:
        """Finds the bin [low, high) between edges."""
        edges = np.asarray(self.edges, np.float32)
        return jnp.searchsorted(edges, score, side="right", method="compare_all").astype(jnp.int32)

    def finish(self, state: Any) -> Logistic:
        """Runs Fisher scoring from a = 1, b = 0.

        In a bin of confidence q the residual (1 - q) right - q wrong has mean 0 and variance
        variance ((1 - q)^2 + q^2) + total q (1 - q).
        """
        variance, counts = state
        right, wrong = jnp.split(counts, 2)
        total = jnp.maximum(right + wrong, 0)
        design = jnp.stack([jnp.array(self.places), jnp.ones(self.cells)], 1)
        prior = jnp.array([1.0, 0.0])
        precision = jnp.diag(jnp.array([self.slope_sd, self.shift_sd]) ** -2)

        def step(_: int, line: jax.Array) -> jax.Array:
            q = jax.nn.sigmoid(design @ line)
            slope = total * q * (1 - q)  # derivative of the expected residual in the log-odds
            weight = slope / jnp.maximum(variance * ((1 - q) ** 2 + q**2) + slope, 1e-6)
            gradient = design.T @ (weight * ((1 - q) * right - q * wrong))
            gradient -= precision @ (line - prior)
            curvature = (design * (weight * slope)[:, None]).T @ design + precision
            # Damped, since full steps may circle.
            return line + 0.7 * jnp.clip(_solve(curvature, gradient), -1, 1)

        return Logistic(*jax.lax.fori_loop(0, self.steps, step, prior))

    def curve(self, parameters: Logistic, score: jax.Array) -> jax.Array:
        """Computes sigmoid(a s + b)."""
        return jax.nn.sigmoid(parameters.slope * score + parameters.shift)


def _solve(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """Solves a positive definite 2 x 2 system."""
    (a, b), (_, d) = matrix
    first = d * vector[0] - b * vector[1]
    second = a * vector[1] - b * vector[0]
    return jnp.stack([first, second]) / (a * d - b * b)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be an integer and at least 1, got {value!r}.")


def _check_positive(method: Any, *names: str) -> None:
    for name in names:
        value = getattr(method, name)
        check_numbers(**{name: value})
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be finite and > 0, got {value!r}.")


METHODS: dict[str, Callable[..., Method]] = {
    "acc_t": AccT,
    "nll_t": NllT,
    "ece_t": EceT,
    "histogram_binning": HistogramBinning,
    "acc_bisection": AccBisection,
    "logistic_binning": LogisticBinning,
}
