"""The two parties of Section 3.2: a calibrator and private sources.

The calibrator sees only noisy answers. A source answers on its own data.

A `Method` is the calibrator: its questions in each round, and its use of the answers. `play` runs
the conversation. A `Party` is a private source. It sums a bounded number per record, adds discrete
Laplace noise, and pays from its own account. The calibrator learns nothing else of a source: no
size, no label, and no error that depends on them. This holds if every source itself checks that it
has at most the public limit of records. Over a network:

    # at each source
    talk = party.begin(method, epsilon=1.0, workdir=its_folder)
    # at the calibrator
    scale = noise_scale(method, epsilon=1.0, adjacency="add_remove", num_classes=10)
    ask = lambda k, t: sum(talk.answer(t, round=k) for talk in talks)
    parameters = play(method, ask, scale.variance * len(talks))
"""

import dataclasses
import fractions
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

from jaxdp.data.ids import owners_of
from jaxdp.data.labels import check_labelled, judge
from jaxdp.data.storage import immutable
from jaxdp.privacy import Account, DpEvent, NonPrivateDpEvent, PureDpEvent
from jaxdp.privacy.accounting import LABELS, RELATIONS, Adjacency
from jaxdp.release import Release, Till, digest, marked, program, stream
from jaxdp.transforms import noise

# Answers are exact integers in units of a step, a power of two between these. So no rounding of
# floats shows which records were added. A step is at most a thousandth of the noise, unless the
# range has no finer one.
_FINEST, _COARSEST = 2.0**-10, 2.0**-4
_STEPS_PER_SCALE = 2.0**10
# Both limits together keep a source's sum with its noise below 2**31.
_MOST_RECORDS, _LARGEST_CONTRIBUTION = 2**17, 2.0**13


class Records(NamedTuple):
    """Labelled logits of people: float32 [n, m] and int32 [n]."""

    logits: jax.Array
    labels: jax.Array

    @property
    def valid(self) -> jax.Array:
        """Bool [n], whether the logits are finite and the label is in [0, m)."""
        judged = judge(self.logits, self.labels)
        return judged.finite & judged.labelled

    @property
    def correct(self) -> jax.Array:
        """Bool [n], phi(x) = y: whether the first largest logit is at the label.

        An invalid record is wrong.
        """
        return judge(self.logits, self.labels).correct


class Method(Protocol):
    """An algorithm of the calibrator, a frozen dataclass of public constants.

    Rounds k count from 0.
    """

    @property
    def rounds(self) -> int:
        """The number of releases of every source."""

    def sensitivity(self, k: int, adjacency: Adjacency, num_classes: int) -> float:
        """Returns the L1 sensitivity of the sum of `summand` over a source's records.

        It must hold for summands rounded to any power of two up to 2^-4. It must also cover the 0
        that an invalid record adds. So either all s numbers are whole, or at most one of them is
        not 0. The range of that one must contain 0 and must start or end at a whole number.
        """

    def init(self, variance: float | jax.Array) -> Any:
        """Returns the state before the first round, a pytree.

        `variance` is the variance of the noise in an answer.
        """

    def question(self, k: int, state: Any) -> jax.Array:
        """Returns the temperature that the round asks about, float32 []."""

    def summand(self, k: int, records: Records, temperature: jax.Array) -> jax.Array:
        """Returns what each record adds to the answer, float32 [n, s]. All records are valid."""

    def update(self, k: int, state: Any, answer: jax.Array) -> Any:
        """Returns the state after the answer, float32 [s], summed over the sources."""

    def finish(self, state: Any) -> Any:
        """Returns the public parameters of the recalibrated confidence, a pytree of arrays."""

    def confidence(self, parameters: Any, logits: jax.Array) -> jax.Array:
        """Returns the recalibrated confidence in the largest of logits [n, m], float32 [n]."""


def play(
    method: Method, ask: Callable[[int, jax.Array], jax.Array], variance: float | jax.Array
) -> Any:
    """Runs the framework of Section 3.2 and returns the parameters of `method.confidence`.

    Args:
      method: The calibrator.
      ask: `ask(k, temperature)` returns the sum of the answers in round k, float32 [s]. The paper
        takes the mean, but no method depends on the factor.
      variance: Variance of the noise in each number of an answer: `Scale.variance` times the number
          of sources, or 0.
    """
    state = method.init(variance)
    for k in range(method.rounds):
        state = method.update(k, state, ask(k, method.question(k, state)))  # steps 3 (a) and 3 (b)
    return method.finish(state)  # step 4


class Scale(NamedTuple):
    """The scale of the noise that a source adds in every round."""

    step: float  # contributions are rounded to multiples of the step
    noise: float  # scale of the discrete Laplace noise, in steps, a float32

    @property
    def variance(self) -> float:
        """Variance of one source's noise in one number, in the method's units.

        It is exact up to a relative 1 / (12 noise^2).
        """
        return 2 * (self.noise * self.step) ** 2


def noise_scale(
    method: Method,
    *,
    epsilon: float,
    adjacency: Adjacency,
    num_classes: int,
) -> Scale | None:
    """Returns the smallest noise that makes all answers of a source together epsilon-DP.

    It is None for epsilon = inf.

    The scale is the same in all rounds: the sum of their sensitivities over epsilon. A round is
    then (its sensitivity over that scale)-DP for any earlier answers. The rounds add up to epsilon,
    also if questions depend on earlier answers (adaptive composition, Dwork and Roth 2014, appendix
    B).

    Raises:
      ValueError: epsilon is not positive, or the noise or a sensitivity leaves the range of exact
          sums.
    """
    of_examples = sorted(RELATIONS.keys() - {LABELS})
    if adjacency not in of_examples:
        raise ValueError(f"adjacency must be one of {of_examples}, got {adjacency!r}.")
    if isinstance(event(epsilon), NonPrivateDpEvent):
        return None
    sensitivities = [method.sensitivity(k, adjacency, num_classes) for k in range(method.rounds)]
    largest = _LARGEST_CONTRIBUTION * _COARSEST
    if max(sensitivities) > largest:
        raise ValueError(
            f"{method!r} has a sensitivity of {max(sensitivities)!r}. Exact sums hold at most "
            f"{largest:g}."
        )
    smallest = sum(math.ceil(s / _COARSEST) for s in sensitivities) / noise.LARGEST_DISCRETE_SCALE
    if epsilon < smallest:
        raise ValueError(
            f"epsilon={epsilon!r} needs more noise than exact sums hold. Use at least {smallest!r}."
        )
    fine_enough = math.floor(math.log2(sum(sensitivities) / epsilon / _STEPS_PER_SCALE))
    coarse_enough = math.ceil(math.log2(max(sensitivities) / _LARGEST_CONTRIBUTION))
    step = min(max(2.0**fine_enough, 2.0**coarse_enough, _FINEST), _COARSEST)
    # Rounding is monotone, and ranges of contributions start or end at a whole number of steps. So
    # contributions at most s apart stay at most ceil(s / step) steps apart.
    steps = sum(math.ceil(s / step) for s in sensitivities)
    # Of fractions, since a rounded quotient could be too small.
    return Scale(step, noise.upward(fractions.Fraction(steps) / fractions.Fraction(float(epsilon))))


def event(epsilon: float) -> DpEvent:
    """Returns the charge of a source for all its answers in one conversation.

    Raises ValueError unless epsilon > 0.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0 (math.inf for no noise), got {epsilon!r}.")
    return NonPrivateDpEvent() if math.isinf(epsilon) else PureDpEvent(epsilon)


def summands(
    method: Method,
    k: int,
    records: Records,
    temperature: jax.Array,
) -> jax.Array:
    """Computes what each record adds to the answer of a round, float32 [n, s].

    An invalid record adds zero, since an error would tell the calibrator about it. A summand that
    is not a number becomes zero too. A forged temperature can cause one.
    """
    valid = records.valid
    logits = jnp.where(valid[:, None], records.logits, 0.0)
    labels = jnp.where(valid, records.labels, 0)
    added = method.summand(k, Records(logits, labels), temperature)
    return jnp.where(valid[:, None] & jnp.isfinite(added), added, 0.0)


def exact_sums(
    added: jax.Array,
    source: jax.Array,
    sources: int,
    scale: Scale | None,
    owner: jax.Array | None = None,
) -> jax.Array:
    """Sums float32 [n, s] per source: int32 [sources, s] in steps, or float32 without noise.

    Args:
      added: What each record adds.
      source: int32 [n], the source of each record. With `owner` int32 [u], the source of each
          owner.
      sources: The number of sources.
      scale: The scale of the noise.
      owner: int32 [n] in [0, u), the owner of each record. An owner adds the mean of what its
        records add, rounded to whole steps towards 0.
    """
    if scale is not None:
        added = jnp.round(added / scale.step).astype(jnp.int32)
    if owner is not None:
        total = jax.ops.segment_sum(added, owner, len(source))  # at most 2^17 records of 2^13 steps
        count = jax.ops.segment_sum(jnp.ones_like(owner), owner, len(source))
        # A record adds at most s steps. So a mean of records is at most s steps, also after
        # rounding towards 0.
        count = jnp.broadcast_to(count[:, None], total.shape).astype(total.dtype)
        added = jax.lax.div(total, count)
    return jax.ops.segment_sum(added, source, sources)


def with_noise(
    key: jax.Array,
    exact: jax.Array,
    scale: Scale | None,
    number: Any = 0,
) -> jax.Array:
    """Adds the noise of round `number` to exact answers in steps.

    The result is float32 in the method's units.
    """
    if scale is None:
        return exact
    return in_units(exact + round_noise(key, exact.shape, scale, number), scale)


def round_noise(key: jax.Array, shape: tuple[int, ...], scale: Scale, number: Any) -> jax.Array:
    """Returns the noise of round `number` in steps, int32."""
    like = jax.ShapeDtypeStruct(shape, jnp.int32)
    return noise.discrete_laplace(key, like, scale.noise, number=number)


def in_units(noisy_sum: jax.Array, scale: Scale) -> jax.Array:
    """Returns float32 in the method's units of answers in steps."""
    return noisy_sum.astype(jnp.float32) * scale.step


# Compiled functions by name, each with arguments for its `lower`.
Functions = Mapping[str, tuple[Any, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Party:
    """A private source: logits of a public model on its records, and their labels.

    Attributes:
      logits: Floating point [n, m], with n from 0 to 131,072.
      labels: Integers [n].
      account: `ledger.account(name)` of its data set, which pays. None records nothing.
      group: The owner of each record, n identifiers (`jaxdp.data.ids`) such as the patients of
        images: texts, compared as bytes after NFC and without outer blanks, or whole numbers. The
        source then protects owners with all of their records: an owner adds the mean of what its
        records add, under the same noise. None protects single records. Inside, it is kept as int32
        [n].
      unit: What one record is, or one owner with `group`, in the words of the ledger. It is
        compared with the account's. None compares nothing: a unit of the account must then have one
        record, or be an owner of `group`.

    The arrays are copied. A later change of the given ones does not reach the source.
    """

    logits: np.ndarray = dataclasses.field(repr=False)
    labels: np.ndarray = dataclasses.field(repr=False)
    account: Account | None = None
    group: Any = dataclasses.field(default=None, repr=False)
    unit: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.account, Account | None):
            raise TypeError(
                f"account must be ledger.account(name) or None, got {type(self.account).__name__}."
            )
        name = "a source" if self.account is None else repr(self.account.name)
        registered = None if self.account is None else self.account.unit
        if self.unit is not None and registered not in (None, self.unit):
            raise ValueError(
                f"unit of {name} must be that of its account, {registered!r}, got {self.unit!r}. "
                f"Give unit={registered!r} if a record is one, or group= if it has several records."
            )
        logits = np.asarray(self.logits)
        labels = np.asarray(self.labels)
        if labels.size == 0:
            labels = labels.astype(np.int32)  # NumPy reads an empty list as floats
        check_labelled(logits, labels, names=(f"logits of {name}", f"labels of {name}"), least=2)
        if len(labels) > _MOST_RECORDS:
            raise ValueError(
                f"{name} has more than {_MOST_RECORDS} records. Divide it into several sources."
            )
        # A logit beyond float32 becomes infinite and its record invalid.
        with np.errstate(over="ignore"):
            logits = logits.astype(np.float32)  # a copy, because rounds read it later
        # A label beyond int32 must not become a class.
        labels = np.clip(labels.astype(np.int64), -1, logits.shape[1])
        object.__setattr__(self, "logits", immutable(logits))
        object.__setattr__(self, "labels", immutable(labels.astype(np.int32)))
        if self.group is not None:
            object.__setattr__(self, "group", immutable(owners_of(self.group, len(labels))))

    @property
    def units(self) -> int:
        """The number of owners, or of records."""
        if self.group is None:
            return len(self.labels)
        return int(self.group.max(initial=-1)) + 1

    def check_adjacency(self, adjacency: Adjacency) -> None:
        """Raises ValueError for another adjacency than the account's, or none that owners have."""
        if self.group is not None and adjacency == "replace_one":
            raise ValueError(
                "group needs the adjacency 'add_remove' or 'zero_out', got 'replace_one', for "
                "which no sensitivity of an owner's mean is proven. Give one record of each "
                "owner, or another adjacency."
            )
        if self.account is not None and self.account.adjacency != adjacency:
            raise ValueError(
                f"adjacency={adjacency!r}, but {self.account.name!r} is registered with "
                f"{self.account.adjacency!r}. Give the registered adjacency."
            )

    def begin(
        self,
        method: Method,
        *,
        epsilon: float,
        adjacency: Adjacency = "add_remove",
        workdir: str | os.PathLike[str] | None = None,
    ) -> "Conversation":
        """Pays for a conversation with a calibrator over a network, and begins it.

        Args:
          method: The calibrator's method, agreed in advance.
          epsilon: epsilon of all answers together, pure.
          adjacency: The adjacency of this source's data set.
          workdir: A folder for this conversation. It holds the answers, and the secret seed of the
            noise until all rounds are answered. A conversation that begins again there after a
            crash is not charged again. It repeats its earlier answers and goes on. None keeps
            nothing, and an interrupted conversation is paid again.

        A workdir may be copied, and its secret with it. So every round leaves a mark in the ledger,
        an event without cost whose label has a hash of the question. A copy answers a round with
        the same bits to the same question, and to no other one. A copy whose ledger has none of
        these marks is not seen.

        Raises:
          ValueError: As `noise_scale`. Also if the account has another adjacency, or the workdir is
            in use or keeps another conversation, or a copy of it was asked another question.
            Nothing is spent.
          BudgetExceeded: Nothing is spent, nothing is answered.
        """
        answerer = self._answerer(method, epsilon, adjacency)
        self.check_adjacency(adjacency)
        _, *owners = answerer.units
        settings = [epsilon, adjacency, list(answerer.scale or ())]
        what = Release(
            label=type(method).__name__,
            charges=[] if self.account is None else [(self.account, event(epsilon))],
            facts=lambda: [self.logits, self.labels, *settings, *owners],
            programs=answerer.texts,
            compute=lambda secret: stream(secret, "recalibration"),
        )
        till = Till(workdir, forget="run")  # all rounds share one secret
        try:
            rounds = till.kept(what) or {}
            key = None
            if len(rounds) < 2 * method.rounds:  # a question and an answer for each
                key = till.release(what)
            conversation = Conversation(answerer, key, till, till.keeper(what), rounds)
            if key is not None and workdir is not None and self.account is not None:
                conversation.mark_rounds(self.account, till.token(what))
            return conversation
        except BaseException:
            till.close(failed=True)
            raise

    def programs(
        self,
        method: Method,
        *,
        epsilon: float,
        adjacency: Adjacency = "add_remove",
    ) -> Functions:
        """Returns the compiled functions of a conversation by name, each with arguments for its
        `lower`.

        "sum k" and "noise k" are each called once in round k. Some arguments are
        `jax.ShapeDtypeStruct`s. `jaxdp.compilers.estimate` takes them too, for an accelerator that
        is not there. Nothing is computed or paid.

        Args:
          method, epsilon, adjacency: As in `begin`.

        Raises:
          ValueError: As `noise_scale`.
        """
        return self._answerer(method, epsilon, adjacency).programs()

    def _answerer(
        self,
        method: Method,
        epsilon: float,
        adjacency: Adjacency,
    ) -> "_Answerer":
        scale = noise_scale(
            method, epsilon=epsilon, adjacency=adjacency, num_classes=self.logits.shape[1]
        )
        records = Records(*jax.device_put((self.logits, self.labels)))
        owners = () if self.group is None else (self.group,)
        source = np.zeros(self.units, np.int32)
        return _Answerer(method, records, scale, (source, *owners))


class _Answerer(NamedTuple):
    """A source that answers a method's questions.

    `units` are the source of each unit, and the owner of each record if it has owners, as for
    `exact_sums`.
    """

    method: Method
    records: Records
    scale: Scale | None
    units: tuple[np.ndarray, ...]

    def answer(self, k: int, temperature: np.ndarray, key: jax.Array) -> np.ndarray:
        """Returns the noisy sum of a round."""
        exact = _exact(self.method, k, self.records, temperature, self.scale, *self.units)
        # Two questions in one round, as from a workdir that was restored from a copy, must not
        # share noise.
        round_key = jax.random.fold_in(key, k)
        question_key = jax.random.fold_in(round_key, int(temperature.view(np.uint32)))
        return np.array(_noisy(question_key, exact, self.scale))

    def programs(self) -> Functions:
        """Returns the compiled functions of `answer` with arguments, "sum k" and "noise k" of each
        round k.
        """
        key = stream(bytes(16), "shapes")
        question = jnp.float32(1)
        functions = {}
        for k in range(self.method.rounds):
            arguments = (self.method, k, self.records, question, self.scale, *self.units)
            exact = _exact.eval_shape(*arguments)
            functions[f"sum {k}"] = _exact, arguments
            functions[f"noise {k}"] = _noisy, (key, exact, self.scale)
        return functions

    def texts(self) -> list[str]:
        """Returns the texts of all programs that `answer` runs in any round."""
        texts = []
        sums = {}
        for name, (function, arguments) in self.programs().items():
            if name.startswith("noise"):
                exact = arguments[1]
                sums[exact.shape, exact.dtype] = function, arguments
            else:
                texts.append(program(function, *arguments))
        for function, arguments in sums.values():
            texts.append(program(function, *arguments))
        return texts


@functools.partial(jax.jit, static_argnums=(0, 1))
def _exact(
    method: Method,
    k: int,
    records: Records,
    temperature: Any,
    scale: Scale | None,
    source: Any,
    owner: Any = None,
) -> jax.Array:
    added = summands(method, k, records, temperature)
    return exact_sums(added, source, 1, scale, owner)[0]


_noisy = jax.jit(with_noise)  # a separate program is compiled once for all rounds


class Conversation:
    """The answers of a source in one conversation: every round once, in order, with fresh noise.

    It is a context manager. Only one process at a time may have the conversation of a workdir open.
    Its threads may share it. A process that is forked from it may not, and gets a RuntimeError.
    """

    def __init__(
        self,
        answerer: _Answerer,
        key: jax.Array | None,
        till: Till,
        keep: Callable[[dict[str, Any]], None],
        rounds: Mapping[str, np.ndarray],
    ):
        self._answerer = answerer
        self._key = key
        self._till = till
        self._keep = keep
        self._rounds = dict(rounds)  # "question k" and "answer k" of each round k
        self._lock = threading.RLock()
        self._mark: Callable[[int, np.ndarray], None] = lambda k, question: None
        if self.answered == answerer.method.rounds:
            self.close()

    @property
    def answered(self) -> int:
        """The number of answered rounds, which is also the index of the next round."""
        return len(self._rounds) // 2

    def mark_rounds(self, account: Account, token: str) -> None:
        """Marks the answered rounds and each later one in the ledger of an account.

        Args:
          account: The account that pays.
          token: The token of the release, which all copies of the workdir share.

        Raises:
          ValueError: A copy of the workdir was asked another question in one of the rounds.
        """

        def mark(k: int, question: np.ndarray) -> None:
            refusal = (
                f"round {k} was asked at another temperature than {question} before, here or in a "
                "copy of this workdir. A round is answered once. Nothing is spent. Repeat that "
                "question, or begin and pay for another conversation in a new workdir."
            )
            words = {"label": f"{type(self._answerer.method).__name__}, round {k}"}
            attempt = digest(question.tobytes().hex())
            with marked(account, digest([token, k]), attempt=attempt, refusal=refusal, **words):
                pass

        self._mark = mark
        for k in range(self.answered):
            mark(k, self._rounds[f"question {k}"])

    def answer(self, temperature: Any, *, round: int | None = None) -> np.ndarray:
        """Returns the noisy sum of one round, float32 [s], at a temperature.

        Args:
          temperature: The question.
          round: Its index from 0, by default the next round. An answered round repeats its answer
              to the same question.

        Raises:
          RuntimeError: All paid rounds are answered, the conversation is closed, or another process
              began it.
          TypeError: temperature is text.
          ValueError: The round was answered at another temperature, here or by a copy of the
              workdir, or an earlier round is not answered.
        """
        # Before JAX and the lock, either of which would hang in a forked process.
        self._till.check_process()
        if isinstance(temperature, str | bytes):
            raise TypeError(f"temperature must be a number, got {temperature!r}. Send a float.")
        with np.errstate(over="ignore"):  # a temperature beyond float32 becomes infinite
            question = np.asarray(float(temperature), np.float32)
        with self._lock:
            k = self.answered if round is None else operator.index(round)
            if 0 <= k < self.answered:
                return self._repeated(k, question)
            if k >= self._answerer.method.rounds:
                raise RuntimeError(
                    f"all {self._answerer.method.rounds} rounds are answered. Begin and pay for "
                    "another conversation."
                )
            if k != self.answered:
                raise ValueError(
                    f"round={k} cannot be answered before round {self.answered}. Ask in order."
                )
            if self._key is None:
                raise RuntimeError(
                    "the conversation was closed. Begin it again with the same workdir to go on."
                )
            self._mark(k, question)  # before anything of the answer is known
            answer = self._answerer.answer(k, question, self._key)
            rounds = {**self._rounds, f"question {k}": question, f"answer {k}": answer}
            self._keep(rounds)  # before the answer is returned
            self._rounds = rounds
            if self.answered == self._answerer.method.rounds:
                self.close()
            return answer.copy()

    def _repeated(self, k: int, question: np.ndarray) -> np.ndarray:
        """Returns the answer of an earlier round to the same question."""
        earlier = self._rounds[f"question {k}"]
        if earlier.tobytes() != question.tobytes():
            raise ValueError(
                f"round={k} is answered at temperature {earlier}, not at {question}. A round is "
                "answered once. Repeat the same question, or ask the next round."
            )
        return self._rounds[f"answer {k}"].copy()

    def close(self) -> None:
        """Closes the workdir.

        It deletes the secret if all rounds are answered, and otherwise keeps it for later. In a
        forked process it closes nothing but the files of that process.
        """
        if self._till.forked:
            self._till.close()
            return
        with self._lock:
            self._key = None
            self._till.close(failed=self.answered < self._answerer.method.rounds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
