"""The two parties of Section 3.2: a calibrator who sees noisy answers only, and sources who answer on their own data.

A `Method` is the calibrator: what it asks in each round, and what it makes of the answers; `play` is the conversation.
A `Party` is a private source: it sums a bounded number per record, adds discrete Laplace noise, and pays from its own
account. Nothing else of a source reaches the calibrator: no size, no label, no error that depends on them, as long as
every source checks for itself that it has no more records than the public limit. Over a network:

    talks = [party.begin(method, epsilon=1.0, workdir=its_folder) for party in parties]  # at each source
    scale = noise_scale(method, epsilon=1.0, adjacency="add_remove", num_classes=10)
    found = play(method, lambda k, t: sum(talk.answer(t, round=k) for talk in talks), scale.variance * len(talks))
"""

import dataclasses
import functools
import math
import operator
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.privacy import Account, DpEvent, NonPrivateDpEvent, PureDpEvent
from jaxdp.privacy.accounting import RELATIONS, Adjacency
from jaxdp.release import Release, Till, program, stream
from jaxdp.transforms import noise

# Answers are exact integers in units of a step, a power of two between these: no rounding of floats tells which
# records were added. A step is at most a thousandth of the noise, unless the noise is itself that small.
_FINEST, _COARSEST = 2.0**-10, 2.0**-4
_STEPS_PER_SCALE = 2.0**10
# Together they keep a source's sum with its noise below 2**31.
_MOST_RECORDS, _LARGEST_CONTRIBUTION = 2**17, 2.0**13


class Records(NamedTuple):
    """Labelled logits of some people: float32 [n, m] and int32 [n]."""

    logits: jax.Array
    labels: jax.Array

    @property
    def valid(self) -> jax.Array:
        """Bool [n]: finite logits and a label in [0, m)."""
        labelled = (self.labels >= 0) & (self.labels < self.logits.shape[1])
        return jnp.isfinite(self.logits).all(1) & labelled

    @property
    def correct(self) -> jax.Array:
        """Bool [n]: phi(x) = y, whether the (first) largest logit is that of the label."""
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
    """How much noise a source adds in every round."""

    step: float  # contributions are rounded to multiples of it
    noise: float  # scale of the discrete Laplace noise, in steps

    @property
    def variance(self) -> float:
        """Of the noise of one source in one number, in the method's units (relatively to 1 / (12 noise^2))."""
        return 2 * (self.noise * self.step) ** 2


def noise_scale(method: Method, *, epsilon: float, adjacency: Adjacency, num_classes: int) -> Scale | None:
    """The smallest noise that makes a source's answers in all rounds together epsilon-DP; None for epsilon = inf.

    It is the same in all rounds, the sum of their sensitivities over epsilon. A round is then (its sensitivity over
    that scale)-DP whatever was answered before, and these add up to epsilon, also where questions depend on earlier
    answers (adaptive composition; Dwork and Roth 2014, appendix B). ValueError where epsilon is not positive, or the
    noise or a sensitivity leaves the range of exact sums.
    """
    if adjacency not in RELATIONS:
        raise ValueError(f"adjacency must be one of {sorted(RELATIONS)}, got {adjacency!r}.")
    if isinstance(event(epsilon), NonPrivateDpEvent):
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


def event(epsilon: float) -> DpEvent:
    """What a source is charged for all its answers in one conversation; ValueError unless epsilon is positive."""
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0 (math.inf for no noise), got {epsilon!r}.")
    return NonPrivateDpEvent() if math.isinf(epsilon) else PureDpEvent(epsilon)


def summands(method: Method, k: int, records: Records, temperature: jax.Array) -> jax.Array:
    """What each record adds to the answer of a round, float32 [n, s].

    A record that is not valid adds zero: an error would tell the calibrator that there is one. A summand that is not a
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


def with_noise(key: jax.Array, exact: jax.Array, scale: Scale | None) -> jax.Array:
    """Adds the noise of one round to exact answers in steps; float32, in the method's units."""
    if scale is None:
        return exact
    return (exact + noise.discrete_laplace(key, exact, scale.noise)).astype(jnp.float32) * scale.step


@dataclasses.dataclass(frozen=True, eq=False)
class Party:
    """A private source: logits of a public model on its records, and their labels.

    Attributes:
      logits: floating point [n, m]; n may be 0, and is at most 131,072.
      labels: integers [n].
      account: `ledger.account(name)` of its data set, which pays; None records nothing.
    """

    logits: np.ndarray = dataclasses.field(repr=False)
    labels: np.ndarray = dataclasses.field(repr=False)
    account: Account | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.account, Account | None):
            raise TypeError(f"account must be ledger.account(name) or None, got {type(self.account).__name__}.")
        name = "a source" if self.account is None else repr(self.account.name)
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

    def check_adjacency(self, adjacency: Adjacency) -> None:
        """ValueError if the account is registered with another adjacency."""
        if self.account is not None and self.account.adjacency != adjacency:
            raise ValueError(
                f"adjacency={adjacency!r}, but {self.account.name!r} is registered with {self.account.adjacency!r}."
            )

    def begin(
        self,
        method: Method,
        *,
        epsilon: float,
        adjacency: Adjacency = "add_remove",
        workdir: str | os.PathLike[str] | None = None,
    ) -> "Conversation":
        """Pays for a conversation with a calibrator who is reached over a network, and begins it.

        Args:
          method: the calibrator's, agreed upon beforehand.
          epsilon: of all answers together, pure.
          adjacency: of this source's data set.
          workdir: a folder for this conversation. It holds the answers, and the secret seed of the noise until all
            rounds are answered. A conversation that begins again there after a crash is not charged again: it repeats
            the answers that it gave, and goes on. None keeps nothing: what a crash interrupts is paid again.

        Raises:
          ValueError: as `noise_scale`, for an account with another adjacency, or for a workdir that is in use or keeps
            another conversation; before anything is spent.
          BudgetExceeded: nothing is spent, nothing answered.
        """
        scale = noise_scale(method, epsilon=epsilon, adjacency=adjacency, num_classes=self.logits.shape[1])
        self.check_adjacency(adjacency)
        records = Records(jnp.asarray(self.logits), jnp.asarray(self.labels))
        what = Release(
            label=type(method).__name__,
            charges=[] if self.account is None else [(self.account, event(epsilon))],
            facts=lambda: [self.logits, self.labels, epsilon, adjacency, list(scale or ())],
            programs=lambda: _programs(method, records, scale),
            compute=lambda secret: stream(secret, "recalibration"),
        )
        till = Till(workdir, forget="run")  # the answers of all rounds share the secret
        try:
            kept = till.kept(what) or {}
            key = None if len(kept) == 2 * method.rounds else till.release(what)
            return Conversation(method, records, scale, key, till, till.keeper(what), kept)
        except BaseException:
            till.close(failed=True)
            raise


class Conversation:
    """What a source answers in one conversation: every round once, in order, with noise of its own.

    It is a context manager. One process may have a conversation with a workdir open; its threads may share it.
    """

    def __init__(
        self,
        method: Method,
        records: Records,
        scale: Scale | None,
        key: jax.Array | None,
        till: Till,
        keep: Callable[[dict[str, Any]], None],
        kept: Mapping[str, np.ndarray],
    ):
        self._method, self._records, self._scale, self._key = method, records, scale, key
        self._till, self._keep, self._kept = till, keep, dict(kept)
        self._lock = threading.RLock()
        if self.answered == method.rounds:
            self.close()

    @property
    def answered(self) -> int:
        """How many rounds are answered: the number of the next round."""
        return len(self._kept) // 2

    def answer(self, temperature: Any, *, round: int | None = None) -> np.ndarray:
        """The noisy sum of one round, float32 [s], at the temperature that the calibrator asks about.

        Args:
          temperature: the question.
          round: its number from 0; by default the next one that is not answered. A round that is answered gives the
            same answer to the same question again.

        Raises:
          RuntimeError: all rounds that were paid for are answered, or the conversation was closed.
          ValueError: the round was answered at another temperature, or an earlier one was not answered.
        """
        asked = np.asarray(jnp.float32(temperature))
        with self._lock:
            k = self.answered if round is None else operator.index(round)
            if 0 <= k < self.answered:
                if self._kept[f"question {k}"].tobytes() != asked.tobytes():
                    raise ValueError(
                        f"round={k} is answered at temperature {self._kept[f'question {k}']}, not at {asked}: every "
                        "round is answered once."
                    )
                return self._kept[f"answer {k}"].copy()
            if k >= self._method.rounds:
                raise RuntimeError(
                    f"all {self._method.rounds} rounds are answered; begin, and pay for, another conversation."
                )
            if k != self.answered:
                raise ValueError(f"round={k} cannot be answered before round {self.answered}; ask in order.")
            if self._key is None:
                raise RuntimeError("the conversation was closed; begin it again with the same workdir to go on.")
            found = _answer(self._method, k, self._records, asked, self._key, self._scale)
            now = {**self._kept, f"question {k}": asked, f"answer {k}": found}
            self._keep(now)  # before anybody hears of it
            self._kept = now
            if self.answered == self._method.rounds:
                self.close()
            return found.copy()

    def close(self) -> None:
        """Lets go of the workdir. The secret is deleted if all rounds are answered, and kept to go on with if not."""
        with self._lock:
            self._key = None
            self._till.close(failed=self.answered < self._method.rounds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _answer(
    method: Method, k: int, records: Records, temperature: np.ndarray, key: jax.Array, scale: Scale | None
) -> np.ndarray:
    exact = _exact(method, k, records, temperature, scale)
    # Two questions in one round, as from a workdir that was restored from a copy, must not share noise.
    key = jax.random.fold_in(jax.random.fold_in(key, k), int(temperature.view(np.uint32)))
    return np.array(_noisy(key, exact, scale))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _exact(method: Method, k: int, records: Records, temperature: Any, scale: Scale | None) -> jax.Array:
    added = summands(method, k, records, temperature)
    return exact_sums(added, jnp.zeros(len(added), jnp.int32), 1, scale)[0]


_noisy = jax.jit(with_noise)  # apart, so that it is compiled once for all rounds


def _programs(method: Method, records: Records, scale: Scale | None) -> list[str]:
    """Texts of all that `_answer` runs in any round."""
    rounds = [(method, k, records, jnp.float32(1), scale) for k in range(method.rounds)]
    sums = {(x.shape, x.dtype): x for x in (_exact.eval_shape(*one) for one in rounds)}.values()
    key = jax.random.key(0, impl="rbg")
    return [program(_exact, *one) for one in rounds] + [program(_noisy, key, exact, scale) for exact in sums]
