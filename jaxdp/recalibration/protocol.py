"""The two parties of Section 3.2: a calibrator who sees noisy answers only, and sources who answer on their own data.

A `Method` is the calibrator: what it asks in each round, and what it makes of the answers; `play` is the conversation.
A `Source` is the other party: it sums a bounded number per record, adds discrete Laplace noise, and pays from its own
account. Nothing else of a source reaches the calibrator: no size, no label, no error that depends on them, as long as
every source checks for itself that it has no more records than the public limit. Over a network:

    talks = [source.begin(method, epsilon=1.0, ledger=its_ledger) for source in sources]  # at each source
    scale = noise_scale(method, epsilon=1.0, adjacency="add_remove", num_classes=10)
    found = play(method, lambda k, t: sum(talk.answer(t) for talk in talks), scale.variance * len(talks))
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.privacy import Ledger, NonPrivateDpEvent, PureDpEvent
from jaxdp.privacy.accounting import RELATIONS, Adjacency
from jaxdp.transforms import noise

# Answers are exact integers in units of a step, a power of two between these: no rounding of floats tells which
# records were added. A step is at most a thousandth of the noise, unless the noise is itself that small.
_FINEST, _COARSEST = 2.0**-10, 2.0**-4
_STEPS_PER_SCALE = 2.0**10
# Together they keep a source's sum with its noise below 2**31.
_MOST_RECORDS, _LARGEST_CONTRIBUTION = 2**17, 2.0**13


class Records(NamedTuple):
    """Labelled logits of some people.

    Attributes:
      logits: float32 [n, m].
      labels: int32 [n].
    """

    logits: jax.Array
    labels: jax.Array

    @property
    def valid(self) -> jax.Array:
        """Bool [n]: finite logits and a label in [0, m)."""
        labelled = (self.labels >= 0) & (self.labels < self.logits.shape[1])
        return jnp.isfinite(self.logits).all(1) & labelled

    @property
    def correct(self) -> jax.Array:
        """Bool [n]: phi(x) = y, whether the largest logit is that of the label; of equal ones the first counts."""
        return jnp.argmax(self.logits, 1) == self.labels


class Method(Protocol):
    """An algorithm of the calibrator, a frozen dataclass of public constants; rounds k are counted from 0."""

    @property
    def rounds(self) -> int:
        """How many releases every source makes."""

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """L1 sensitivity of the sum of `summand` over a source's records.

        It must hold for summands rounded to any power of two up to 2^-4, with 0, what an invalid record adds, among
        them: either all s numbers are whole, or at most one of them is not 0 and its range, which has 0 in it, starts
        or ends at a whole number.
        """

    def init(self, variance: float | jax.Array) -> Any:
        """What the calibrator knows before the first round, a pytree; `variance` is that of the noise in an answer."""

    def question(self, k: int, state: Any) -> jax.Array:
        """The temperature that the round asks about, float32 []."""

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """What each record contributes to the answer, float32 [n, s]; records are valid."""

    def update(self, k: int, state: Any, answer: jax.Array) -> Any:
        """Takes in the answer, float32 [s], summed over the sources."""

    def finish(self, state: Any) -> Any:
        """The public parameters of the recalibrated confidence, a pytree of arrays."""

    def confidence(self, parameters: Any, logits: jax.Array) -> jax.Array:
        """The recalibrated confidence in the largest logit, float32 [n], for logits [n, m]."""


def play(method: Method, ask: Callable[[int, jax.Array], jax.Array], variance: float | jax.Array) -> Any:
    """The framework of Section 3.2, however the sources are reached.

    Args:
      method: the calibrator.
      ask: `ask(k, temperature) -> float32 [s]`, the sum over sources of their answers in round k. The paper takes the
        mean; no method depends on the factor.
      variance: of the noise in each number of an answer, `Scale.variance` times the number of sources; 0 without noise.

    Returns:
      The parameters of `method.confidence`.
    """
    state = method.init(variance)
    for k in range(method.rounds):
        state = method.update(k, state, ask(k, method.question(k, state)))  # steps 3 (a) and 3 (b)
    return method.finish(state)  # step 4


class Scale(NamedTuple):
    """How much noise a source adds in every round.

    Attributes:
      step: contributions are rounded to multiples of it.
      noise: scale of the discrete Laplace noise, in steps.
    """

    step: float
    noise: float

    @property
    def variance(self) -> float:
        """Of the noise of one source in one number, in the method's units (relatively to 1 / (12 noise^2))."""
        return 2 * (self.noise * self.step) ** 2


def noise_scale(method: Method, *, epsilon: float, adjacency: Adjacency, num_classes: int) -> Scale | None:
    """The smallest noise that makes a source's answers in all rounds together epsilon-DP; None for epsilon = inf.

    It is the same in all rounds, the sum of their sensitivities over epsilon. A round is then (its sensitivity over
    that scale)-DP whatever was answered before, and these add up to epsilon, also where questions depend on earlier
    answers (adaptive composition; Dwork and Roth 2014, appendix B).

    Raises:
      ValueError: epsilon is not positive, or so small that the noise leaves the range of exact sums, or a sensitivity
        does.
    """
    if adjacency not in RELATIONS:
        raise ValueError(f"adjacency must be one of {sorted(RELATIONS)}, got {adjacency!r}.")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0 (math.inf for no noise), got {epsilon!r}.")
    if math.isinf(epsilon):
        return None
    sensitivities = [method.sensitivity(k, adjacency, num_classes) for k in range(method.rounds)]
    largest = _LARGEST_CONTRIBUTION * _COARSEST
    if max(sensitivities) > largest:
        raise ValueError(
            f"{method!r} has a sensitivity of {max(sensitivities)!r}; exact sums hold at most {largest:g}."
        )
    smallest = sum(math.ceil(s / _COARSEST) for s in sensitivities) / noise.LARGEST_DISCRETE_SCALE
    if epsilon < smallest:
        raise ValueError(f"epsilon={epsilon!r} needs more noise than exact sums hold; use at least {smallest!r}.")
    wanted = math.floor(math.log2(sum(sensitivities) / epsilon / _STEPS_PER_SCALE))
    needed = math.ceil(math.log2(max(sensitivities) / _LARGEST_CONTRIBUTION))
    step = min(max(2.0**wanted, 2.0**needed, _FINEST), _COARSEST)
    # Rounding is monotone, and ranges of contributions start or end at a whole number of steps: those at most s apart
    # stay at most ceil(s / step) steps apart.
    return Scale(step, sum(math.ceil(s / step) for s in sensitivities) / epsilon)


def summands(method: Method, k: int, records: Records, temperature: jax.Array) -> jax.Array:
    """What each record adds to the answer of a round, float32 [n, s].

    A record that is not valid adds zero, silently: an error would tell the calibrator that there is one. What is not a
    number, as a made-up temperature can cause, becomes zero too.
    """
    valid = records.valid
    safe = Records(jnp.where(valid[:, None], records.logits, 0.0), jnp.where(valid, records.labels, 0))
    added = method.summand(k, safe, temperature)
    return jnp.where(valid[:, None] & jnp.isfinite(added), added, 0.0)


def exact_sums(added: jax.Array, source: jax.Array, sources: int, scale: Scale | None) -> jax.Array:
    """Per source, the sum of float32 [n, s]: int32 [sources, s] in steps, or float32 if there is no noise."""
    if scale is not None:
        added = jnp.round(added / scale.step).astype(jnp.int32)
    return jax.ops.segment_sum(added, source, sources)


def release(key: jax.Array, exact: jax.Array, scale: Scale | None) -> jax.Array:
    """Adds the noise of one round to exact answers in steps; float32, in the method's units."""
    if scale is None:
        return exact
    return (exact + noise.discrete_laplace(key, exact, scale.noise)).astype(jnp.float32) * scale.step


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One private source: logits of a public model on its records, and their labels.

    Attributes:
      logits: floating point [n, m]; n may be 0, and is at most 131,072.
      labels: integers [n].
      account: its data set in the ledger, if there is one.
    """

    logits: np.ndarray = dataclasses.field(repr=False)
    labels: np.ndarray = dataclasses.field(repr=False)
    account: str | None = None

    def __post_init__(self) -> None:
        name = repr(self.account) if self.account else "a source"
        logits, labels = np.asarray(self.logits), np.asarray(self.labels)
        if logits.ndim != 2 or logits.shape[1] < 2 or labels.shape != logits.shape[:1]:
            raise ValueError(f"{name} must have logits [n, m] with m >= 2 classes and labels [n] of as many records.")
        if len(labels) == 0:
            labels = labels.astype(np.int32)  # an empty list has no integers
        if not jnp.issubdtype(logits.dtype, jnp.floating) or not np.issubdtype(labels.dtype, np.integer):
            raise TypeError(
                f"{name} must have floating-point logits and integer labels, got {logits.dtype} and {labels.dtype}."
            )
        if len(labels) > _MOST_RECORDS:
            raise ValueError(f"{name} has more than {_MOST_RECORDS} records; divide it into several sources.")
        with np.errstate(over="ignore"):  # A logit beyond float32 becomes infinite, so that its record is not valid.
            logits = logits.astype(np.float32, copy=False)
        labels = np.clip(labels.astype(np.int64), -1, logits.shape[1])  # A label beyond int32 must not become a class.
        object.__setattr__(self, "logits", logits)
        object.__setattr__(self, "labels", labels.astype(np.int32))

    def check_account(self, ledger: Ledger, adjacency: Adjacency) -> None:
        """ValueError if the source has no account in the ledger, or one with another adjacency."""
        if self.account is None:
            raise ValueError("a Source needs an account to pay from a ledger; give Source(..., account=...).")
        if (registered := ledger.adjacency(self.account)) != adjacency:
            raise ValueError(f"adjacency={adjacency!r}, but {self.account!r} is registered with {registered!r}.")

    def begin(
        self,
        method: Method,
        *,
        epsilon: float,
        adjacency: Adjacency = "add_remove",
        ledger: Ledger | None = None,
        key: jax.Array | None = None,
    ) -> "Conversation":
        """Pays for a conversation with a calibrator who is reached over a network, and begins it.

        Args:
          method: the calibrator's, agreed upon beforehand.
          epsilon: of all answers together, pure.
          adjacency: of this source's data set.
          ledger: this source's own, where it has its account; None records nothing.
          key: typed key of the noise, never to be used again; drawn from the operating system's entropy if None.

        Raises:
          ValueError: as `noise_scale`, or for an account that does not fit; before anything is spent.
          BudgetExceeded: nothing is spent, nothing answered.
        """
        scale = noise_scale(method, epsilon=epsilon, adjacency=adjacency, num_classes=self.logits.shape[1])
        key = noise.stream(noise.new_seed(), "recalibration") if key is None else key
        noise.check_key(key)
        if ledger is not None:
            self.check_account(ledger, adjacency)
            event = NonPrivateDpEvent() if scale is None else PureDpEvent(epsilon)
            with ledger.spend(str(self.account), event, label=type(method).__name__):
                pass  # paid as a whole, before the first answer
        return Conversation(self, method, scale, key)


class Conversation:
    """What a source answers in one conversation: every round once, in order, with noise of its own."""

    def __init__(self, source: Source, method: Method, scale: Scale | None, key: jax.Array):
        self._source, self._method, self._scale, self._key = source, method, scale, key
        self._round = 0

    def answer(self, temperature: Any) -> np.ndarray:
        """The noisy sum of the next round, float32 [s], at the temperature that the calibrator asks about.

        Raises:
          RuntimeError: all rounds that were paid for are answered.
        """
        k, self._round = self._round, self._round + 1
        if k >= self._method.rounds:
            raise RuntimeError(
                f"all {self._method.rounds} rounds are answered; begin, and pay for, another conversation."
            )
        records = Records(jnp.asarray(self._source.logits), jnp.asarray(self._source.labels))
        added = summands(self._method, k, records, jnp.float32(temperature))
        exact = exact_sums(added, jnp.zeros(len(added), jnp.int32), 1, self._scale)
        return np.asarray(release(jax.random.fold_in(self._key, k), exact, self._scale)[0])
