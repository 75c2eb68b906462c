"""The recalibration methods: what they ask, how sensitive that is, and what they make of the answers.

In the paper's order: `NllT`, `EceT`, `HistogramBinning` (Sections 3.3 and C.2), `AccT` (Section 4, Algorithm 1); beyond
the paper `AccBisection` and `LogisticBinning`. Sensitivities are for one record added or removed, as in the paper
(zeroed out is the same, if the null record is an invalid one such as label -1), or for one replaced by another.
"""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.privacy.accounting import Adjacency
from jaxdp.recalibration.metrics import equal_width_bin
from jaxdp.recalibration.protocol import Method, Records

Spacing = Literal["log", "linear"]
Form = Literal["split", "published"]
_GOLDEN = (math.sqrt(5) - 1) / 2


def confidence(logits: jax.Array, temperature: jax.Array | float = 1.0) -> jax.Array:
    """Equation 3: p_T(x), the largest softmax probability of logits [n, m] / T; float32 [n] in [1 / m, 1]."""
    above = logits - logits.max(1, keepdims=True)
    return 1 / jnp.exp(above / temperature).sum(1)


def _in_one_bin(adjacency: Adjacency) -> float:
    """The sensitivity of bins of which a record changes one, by at most 1; its replacement may change another."""
    return 2.0 if adjacency == "replace_one" else 1.0


# --- Temperatures ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bracket:
    """The public range of temperatures that is searched.

    Attributes:
      low, high: its ends.
      spacing: "log" searches over log T, "linear" over T as published.
    """

    low: float = 0.5
    high: float = 3.0
    spacing: Spacing = "log"

    def __post_init__(self) -> None:
        if not 0 < np.float32(self.low) < np.float32(self.high) < np.inf:
            ends = (self.low, self.high)
            raise ValueError(f"bracket must be (low, high) with 0 < low < high in float32, got {ends}.")
        if self.spacing not in get_args(Spacing):
            raise ValueError(f"spacing must be 'log' or 'linear', got {self.spacing!r}.")

    @classmethod
    def of(cls, ends: "Bracket | Sequence[Any]", spacing: Spacing = "log") -> "Bracket":
        """Returns the bracket of (low, high) and a spacing, or of (low, high, spacing), as a config has it."""
        if isinstance(ends, Bracket):
            return ends
        try:
            *temperatures, spacing = ends if isinstance(ends[-1], str) else (*ends, spacing)
            low, high = map(float, temperatures)
        except (IndexError, TypeError, ValueError):
            raise ValueError(f"bracket must be two temperatures (low, high), got {ends!r}.") from None
        return cls(low=low, high=high, spacing=spacing)

    @property
    def ends(self) -> tuple[jax.Array, jax.Array]:
        """Positions of the ends, float32 []."""
        ends = (self.low, self.high) if self.spacing == "linear" else (math.log(self.low), math.log(self.high))
        return jnp.float32(ends[0]), jnp.float32(ends[1])

    def temperature(self, position: jax.Array) -> jax.Array:
        """The temperature at a position between the ends."""
        return position if self.spacing == "linear" else jnp.exp(position)


class Found(NamedTuple):
    """Where a search ended."""

    temperature: jax.Array  # the middle of what is left of the bracket, float32 []
    low: jax.Array  # whether that still has the first bracket's lower end, bool []: the best may be outside
    high: jax.Array


class GoldenSection(NamedTuple):
    """Golden-section search (C.1) for the least value of a function that falls and then rises; positions float32 [].

    It reduces the bracket K times with exactly K + 1 values. The published loop takes one more, which it never reads
    (Algorithm 1, k = K - 1).
    """

    low: jax.Array  # ends of what is left
    high: jax.Array
    probes: jax.Array  # the two positions inside, [2]
    values: jax.Array  # the function there, [2]
    asked: jax.Array  # which of the two is to be evaluated next

    @classmethod
    def start(cls, low: jax.Array, high: jax.Array) -> "GoldenSection":
        """Algorithm 1, line 2."""
        return cls(low, high, _probes(low, high), jnp.zeros(2), jnp.int32(0))

    def position(self) -> jax.Array:
        """Where to evaluate next."""
        return self.probes[self.asked]

    def tell(self, k: int, value: jax.Array) -> "GoldenSection":
        """Takes the value at `position()`, the k-th from 0; all but the first shrink the bracket.

        Lines 5 to 11, with the new ends in lines 6 and 9: the old ones would make both probes coincide.
        """
        values = self.values.at[self.asked].set(value)
        if k == 0:
            return self._replace(values=values, asked=jnp.int32(1))
        rise_is_right = values[0] >= values[1]  # line 5: the minimum is not left of the left probe
        low = jnp.where(rise_is_right, self.probes[0], self.low)
        high = jnp.where(rise_is_right, self.high, self.probes[1])
        # The probe that is left takes the other's place, exactly where the golden section wants it.
        kept = jnp.where(rise_is_right, self.probes[1], self.probes[0])
        value = jnp.where(rise_is_right, values[1], values[0])
        asked = rise_is_right.astype(jnp.int32)
        return GoldenSection(low, high, _probes(low, high).at[1 - asked].set(kept), jnp.full(2, value), asked)


def _probes(low: jax.Array, high: jax.Array) -> jax.Array:
    return jnp.stack([high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)])


class Bisection(NamedTuple):
    """Search for the sign change of a rising function: K values halve the bracket K times; positions float32 []."""

    low: jax.Array
    high: jax.Array

    @classmethod
    def start(cls, low: jax.Array, high: jax.Array) -> "Bisection":
        """The whole bracket."""
        return cls(low, high)

    def position(self) -> jax.Array:
        """The middle."""
        return (self.low + self.high) / 2

    def tell(self, k: int, value: jax.Array) -> "Bisection":
        """Takes the value in the middle."""
        middle, too_high = self.position(), value > 0
        return Bisection(jnp.where(too_high, self.low, middle), jnp.where(too_high, middle, self.high))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemperatureSearch:
    """Temperature scaling by a search for the best temperature.

    Attributes:
      bracket: public range of temperatures, a `Bracket` or what `Bracket.of` takes.
      iterations: K, reductions of the bracket; each leaves 0.618 of it, with bisection a half.
    """

    bracket: Any = Bracket()
    iterations: int = 5

    search: ClassVar[Any] = GoldenSection
    split = False  # whether the first round asks for a number that is added to all answers

    def __post_init__(self) -> None:
        object.__setattr__(self, "bracket", Bracket.of(self.bracket))
        _check_count("iterations", self.iterations)

    @property
    def rounds(self) -> int:
        """K + 1, or K with bisection; and one for the number that is added."""
        return self.iterations + (self.search is GoldenSection) + self.split

    def objective(self, answer: jax.Array) -> jax.Array:
        """What is to be small, from the sum over sources [s]."""
        raise NotImplementedError

    def init(self, variance: float | jax.Array) -> Any:
        """The whole bracket."""
        return self.search.start(*self.bracket.ends), jnp.float32(0)

    def question(self, k: int, state: Any) -> jax.Array:
        """The next position."""
        return self.bracket.temperature(state[0].position())

    def update(self, k: int, state: Any, answer: jax.Array) -> Any:
        """Lines 4 to 12."""
        search, added = state
        if k < self.split:
            return search, answer[0]
        return search.tell(k - self.split, self.objective(added + answer)), added

    def finish(self, state: Any) -> Found:
        """Line 13."""
        (low, high, *_), (first, last) = state[0], self.bracket.ends
        return Found(self.bracket.temperature((low + high) / 2), low == first, high == last)

    def confidence(self, parameters: Found, logits: jax.Array) -> jax.Array:
        """p_T(x)."""
        return confidence(logits, parameters.temperature)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NllT(TemperatureSearch):
    """NLL-T (Section 3.3, C.2.1): the temperature of least negative log likelihood.

    The published method bounds nothing and scales its noise to the largest value that was seen. Here every record's
    loss is clipped to a public bound; the sum of clipped losses may have several minima.

    Attributes:
      bound: of one record's negative log likelihood, in nats.
    """

    bound: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "bound")

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """The bound, under every adjacency: losses are in [0, bound]."""
        return self.bound

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """-log softmax(l / T)_y, clipped; [n, 1]."""
        above = (records.logits - records.logits.max(1, keepdims=True)) / temperature  # at most 0: cannot overflow
        chosen = jnp.take_along_axis(above, records.labels[:, None], 1)
        return jnp.clip(jnp.log(jnp.exp(above).sum(1, keepdims=True)) - chosen, 0, self.bound)

    def objective(self, answer: jax.Array) -> jax.Array:
        """The sum of losses."""
        return answer[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EceT(TemperatureSearch):
    """ECE-T (Section 3.3, C.2.2): the temperature of least calibration error in equally wide bins.

    The objective may have several minima, since records change bins with T.

    Attributes:
      bins: number of bins.
    """

    bins: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("bins", self.bins)

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """1: a record is in one bin. A replacement may change two."""
        return _in_one_bin(adjacency)

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """1[phi(x) = y] - p_T(x) in the record's bin; [n, bins]."""
        p = confidence(records.logits, temperature)
        return jax.nn.one_hot(equal_width_bin(p, self.bins), self.bins) * (records.correct - p)[:, None]

    def objective(self, answer: jax.Array) -> jax.Array:
        """Equation 6 times the number of records: the sum over bins of absolute values."""
        return jnp.abs(answer).sum()


# --- Histogram binning -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binning:
    """A confidence that is a function of one public score, from noisy counts per bin of that score; one release.

    A method has `cells`, the number of bins; `score(logits)`, float32 [n]; `cell(score)`, the bin of each, int32 [n];
    and `curve(parameters, score)`, the recalibrated confidence at scores [n].
    """

    rounds = 1

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """1: a record is in one count. A replacement may change two."""
        return _in_one_bin(adjacency)

    def init(self: Any, variance: float | jax.Array) -> Any:
        """How noisy counts will be, and none of them."""
        return jnp.float32(variance), jnp.zeros(2 * self.cells)

    def question(self, k: int, state: Any) -> jax.Array:
        """Nothing is asked about a temperature."""
        return jnp.float32(1)

    def update(self, k: int, state: Any, answer: jax.Array) -> Any:
        """The noisy counts."""
        return state[0], answer

    def summand(self: Any, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """One-hot counts [n, 2 cells]: correct ones, then incorrect ones."""
        cell = jax.nn.one_hot(self.cell(self.score(records.logits)), self.cells)
        right = records.correct[:, None]
        return jnp.concatenate([cell * right, cell * ~right], 1)

    def confidence(self: Any, parameters: Any, logits: jax.Array) -> jax.Array:
        """The curve at the score."""
        return self.curve(parameters, self.score(logits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistogramBinning(Binning):
    """Histogram binning (Section 3.3, C.2.3): every bin's confidence becomes the accuracy in it.

    Attributes:
      bins: number of equally wide bins of the confidence.
      form: "split" asks for the correct and the incorrect records of each bin, "published" for the correct ones and
        for all. The two say the same, but a record counts once in the first, so that it needs half the noise.
    """

    bins: int = 15
    form: Form = "split"

    def __post_init__(self) -> None:
        _check_count("bins", self.bins)
        if self.form not in get_args(Form):
            raise ValueError(f"form must be 'split' or 'published', got {self.form!r}.")

    @property
    def cells(self) -> int:
        """`bins`."""
        return self.bins

    def score(self, logits: jax.Array) -> jax.Array:
        """p_1(x)."""
        return confidence(logits)

    def cell(self, score: jax.Array) -> jax.Array:
        """Equally wide bins."""
        return equal_width_bin(score, self.bins)

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """How many counts a record is in, twice that if it is replaced."""
        return _in_one_bin(adjacency) * (1 if self.form == "split" else 2)

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """One-hot counts [n, 2 bins]: correct ones, then incorrect ones or all."""
        counts = super().summand(k, records, temperature)
        if self.form == "split":
            return counts
        right, wrong = jnp.split(counts, 2, axis=1)
        return jnp.concatenate([right, right + wrong], 1)

    def finish(self, state: Any) -> jax.Array:
        """Accuracy per bin [bins], in [0, 1]; a bin without (noisy) records keeps its middle as its confidence."""
        right, other = jnp.split(state[1], 2)
        total = right + other if self.form == "split" else other
        middle = (jnp.arange(self.bins) + 0.5) / self.bins
        return jnp.where(total > 0, jnp.clip(right / jnp.where(total > 0, total, 1), 0, 1), middle)

    def curve(self, parameters: jax.Array, score: jax.Array) -> jax.Array:
        """What the score's bin says."""
        return parameters[self.cell(score)]


# --- Accuracy temperature scaling ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccT(TemperatureSearch):
    """Acc-T (Section 4, Algorithm 1): the temperature at which mean confidence equals accuracy.

    Attributes:
      split: whether accuracy is asked for once, in a round of its own, and confidence in the others. The noise of an
        answer is then ((K + 1) (1 - 1/m) + 1) / epsilon instead of (K + 1) (2 - 1/m) / epsilon if records are replaced,
        (K + 2) (1 - 1/m) / epsilon instead of (K + 1) / epsilon if they are added or removed; but the objective has the
        noise of two answers.
    """

    split: bool = False

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """1[phi(x) = y] - p_T(x) is in [-1, 1 - 1/m]; the two less 1/m are in [-1/m, 1 - 1/m] and [-(1 - 1/m), 0]."""
        if not self.split:
            return 2 - 1 / num_classes if adjacency == "replace_one" else 1.0
        return 1.0 if k == 0 and adjacency == "replace_one" else 1 - 1 / num_classes

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """Line 3; [n, 1]. Apart, both are less 1/m, which cancels: 0, an invalid record's, is then between others."""
        right, p = records.correct.astype(jnp.float32), confidence(records.logits, temperature)
        if not self.split:
            return (right - p)[:, None]
        chance = 1 / records.logits.shape[1]
        return (right - chance if k == 0 else chance - p)[:, None]

    def objective(self, answer: jax.Array) -> jax.Array:
        """Line 5 compares |v|."""
        return jnp.abs(answer[0])


# --- Beyond the paper ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccBisection(AccT):
    """Acc-T by bisection: accuracy less mean confidence only rises with T (Proposition 2), its sign tells the side.

    K releases halve the bracket K times; golden-section search needs K + 1 to leave 0.618^K of it, and compares two
    noisy values instead of one.
    """

    search = Bisection

    def objective(self, answer: jax.Array) -> jax.Array:
        """Too little confidence, v > 0, means too high a temperature."""
        return answer[0]


class Logistic(NamedTuple):
    """Confidence sigmoid(slope s + shift) at log-odds s, float32 []."""

    slope: jax.Array
    shift: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticBinning(Binning):
    """Two numbers fitted to noisy bins: sigmoid(a s + b) of the log-odds s, by penalised quasi-likelihood.

    Histogram binning takes every bin by itself. Here the bins vote on a straight line in log-odds (Platt 1999), each
    with the weight of what it knows: its counts carry Laplace noise of known variance besides that of sampling.
    Log-odds have no upper end, so that bins of them tell the records of an over-confident model apart.

    Attributes:
      edges: between the bins of the log-odds, ascending, public.
      slope_sd, shift_sd: standard deviations of the Gaussian priors of a around 1 and of b around 0.
      steps: of Fisher scoring.
    """

    edges: tuple[float, ...] = (-1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 8.0)
    slope_sd: float = 0.5
    shift_sd: float = 1.0
    steps: int = 30

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", tuple(map(float, self.edges)))
        ascending = all(low < high for low, high in itertools.pairwise(self.edges))
        if not self.edges or not ascending or not all(map(math.isfinite, self.edges)):
            raise ValueError(f"edges must be finite log-odds in ascending order, got {self.edges!r}.")
        _check_positive(self, "slope_sd", "shift_sd")
        _check_count("steps", self.steps)

    @property
    def cells(self) -> int:
        """One more than the edges."""
        return len(self.edges) + 1

    @property
    def places(self) -> tuple[float, ...]:
        """The log-odds that stand for each bin: its middle, or a little beyond the first or last edge."""
        middles = [(low + high) / 2 for low, high in itertools.pairwise(self.edges)]
        return (self.edges[0] - 0.7, *middles, self.edges[-1] + 2.0)

    def score(self, logits: jax.Array) -> jax.Array:
        """log p_1(x) / (1 - p_1(x)), without cancellation where p_1(x) is close to 1."""
        top = jax.nn.one_hot(jnp.argmax(logits, 1), logits.shape[1], dtype=bool)
        below = jnp.where(top, -jnp.inf, logits - logits.max(1, keepdims=True))
        return -jax.nn.logsumexp(jnp.maximum(below, -1e4), 1)

    def cell(self, score: jax.Array) -> jax.Array:
        """[low, high) between edges."""
        edges = np.asarray(self.edges, np.float32)
        return jnp.searchsorted(edges, score, side="right", method="compare_all").astype(jnp.int32)

    def finish(self, state: Any) -> Logistic:
        """Fisher scoring from a = 1, b = 0.

        In a bin of confidence q the residual (1 - q) right - q wrong has mean 0 and variance
        variance ((1 - q)^2 + q^2) + total q (1 - q).
        """
        variance, answer = state
        right, wrong = jnp.split(answer, 2)
        total = jnp.maximum(right + wrong, 0)
        design = jnp.stack([jnp.array(self.places), jnp.ones(self.cells)], 1)
        prior = jnp.array([1.0, 0.0])
        precision = jnp.diag(jnp.array([self.slope_sd, self.shift_sd]) ** -2)

        def step(_: int, line: jax.Array) -> jax.Array:
            q = jax.nn.sigmoid(design @ line)
            slope = total * q * (1 - q)  # of the expected residual, in the log-odds
            weight = slope / jnp.maximum(variance * ((1 - q) ** 2 + q**2) + slope, 1e-6)
            gradient = design.T @ (weight * ((1 - q) * right - q * wrong)) - precision @ (line - prior)
            curvature = (design * (weight * slope)[:, None]).T @ design + precision
            return line + 0.7 * jnp.clip(_solve(curvature, gradient), -1, 1)  # damped: full steps may circle

        return Logistic(*jax.lax.fori_loop(0, self.steps, step, prior))

    def curve(self, parameters: Logistic, score: jax.Array) -> jax.Array:
        """sigmoid(a s + b)."""
        return jax.nn.sigmoid(parameters.slope * score + parameters.shift)


def _solve(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """Of a positive definite 2 x 2 system."""
    (a, b), (_, d) = matrix
    return jnp.stack([d * vector[0] - b * vector[1], a * vector[1] - b * vector[0]]) / (a * d - b * b)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be an integer and at least 1, got {value!r}.")


def _check_positive(method: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(method, name) < math.inf:
            raise ValueError(f"{name} must be finite and > 0, got {getattr(method, name)!r}.")


METHODS: dict[str, Callable[..., Method]] = {
    "acc_t": AccT,
    "nll_t": NllT,
    "ece_t": EceT,
    "histogram_binning": HistogramBinning,
    "acc_bisection": AccBisection,
    "logistic_binning": LogisticBinning,
}
