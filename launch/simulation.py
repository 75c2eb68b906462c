"""Hundreds of simulated recalibrations at once: trials x sources x samples x epsilon, one program
per method.

A search of K steps can ask about some 2^K temperatures only, for any answers. So one table holds
each record's contribution to every question. A trial's exact answers are sums of its rows. All
settings of a trial take records in the same order, so these are sums over the beginnings of that
order. The test split is the rest: its sums are the sums of all records minus the trial's. Only
noise and a few comparisons remain per trial.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.privacy.accounting import Adjacency
from jaxdp.recalibration.methods import confidence
from jaxdp.recalibration.metrics import equal_width_bin
from jaxdp.recalibration.protocol import Method, Records, Scale, noise_scale, play, summands
from jaxdp.report import progress_bar

_ECE_BINS = 15
_ROUNDS_AT_ONCE = 3  # of `reach`, because each program takes a while to compile


class Setting(NamedTuple):
    """One point of a sweep: the number of sources, the records of each, and its epsilon
    (`math.inf`: no privacy).
    """

    sources: int
    samples: int
    epsilon: float


class Outcome(NamedTuple):
    """How well the confidences of each trial fit its test split, float32 [trials].

    Attributes:
      ece: The expected calibration error in 15 equally wide bins.
      brier: The mean squared difference between the confidence and whether the prediction is right.
    """

    ece: np.ndarray
    brier: np.ndarray


@functools.cache
def reach(method: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns all temperatures that a method can ask about in each round, and all that it can end
    with, ascending.

    Each answer has either sign, and is smaller or larger than all earlier ones. So any comparison
    of a search comes out either way. States that are equal after a round have one future and are
    followed once, so that a search of K steps follows some K 2^K states and not 4^K scripts of
    answers. A method that ends with bins has no final temperatures.
    """
    one_record = Records(jnp.zeros((1, 2)), jnp.zeros(1, jnp.int32))
    answer = jax.eval_shape(lambda: method.summand(0, one_record, jnp.float32(1)))
    _, width = answer.shape

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.vmap, in_axes=(None, 0, 0))
    def played(rounds: range, state: Any, script: jax.Array) -> tuple[list[jax.Array], Any]:
        questions = []
        for i, k in enumerate(rounds):
            questions.append(method.question(k, state))
            answer = jnp.full(width, script[i])
            state = method.update(k, state, answer)
        return questions, state

    states = jax.tree.map(lambda x: np.asarray(x)[None], method.init(0.0))
    questions: list[np.ndarray] = []
    for start in range(0, method.rounds, _ROUNDS_AT_ONCE):
        stop = min(start + _ROUNDS_AT_ONCE, method.rounds)
        rounds = range(start, stop)
        scripts = _scripts(rounds)
        # Each state is played with each script.
        repeat = functools.partial(np.repeat, repeats=len(scripts), axis=0)
        count = len(jax.tree.leaves(states)[0])
        every_state = jax.tree.map(repeat, states)
        every_script = np.tile(scripts, (count, 1))
        results = played(rounds, every_state, every_script)
        temperatures, ends = jax.device_get(results)
        questions += map(np.unique, temperatures)
        states = _distinct(ends)
    finished = jax.jit(jax.vmap(method.finish))(states)
    ends = getattr(finished, "temperature", np.zeros(0, np.float32))
    return questions, np.unique(ends)


def _scripts(rounds: range) -> np.ndarray:
    """Returns all sequences of answers in some rounds, float32 [4^rounds, rounds].

    An answer has either sign, and is smaller or larger than all answers of the rounds before.
    """
    answers = []
    for k in rounds:
        exponent = 3 + k
        small, large = 10.0**-exponent, 10.0**exponent
        answers.append([-small, -large, small, large])
    scripts = list(itertools.product(*answers))
    return np.asarray(scripts, np.float32)


def _distinct(states: Any) -> Any:
    """Returns the states [n, ...] without repetitions. States are compared byte by byte."""
    leaf_bytes = []
    for leaf in jax.tree.leaves(states):
        rows = leaf.reshape(len(leaf), -1)
        leaf_bytes.append(rows.view(np.uint8))
    state_bytes = np.concatenate(leaf_bytes, 1)
    _, first = np.unique(state_bytes, axis=0, return_index=True)
    return jax.tree.map(lambda leaf: leaf[first], states)


def _ends(settings: Sequence[Setting]) -> tuple[int, ...]:
    """Returns how many records the first source has, and all sources, ascending."""
    first_source = {setting.samples for setting in settings}
    all_sources = {setting.sources * setting.samples for setting in settings}
    return tuple(sorted(first_source | all_sources))


class Order(NamedTuple):
    """The order in which each trial hands records to sources.

    Attributes:
      rows: int32 [trials, longest], the records that come first.
      rank: int32 [trials, N], the place of each record in the order, N for the others.
      ends: The lengths of the used beginnings, ascending.
    """

    rows: jax.Array
    rank: jax.Array
    ends: tuple[int, ...]

    @classmethod
    def draw(cls, seed: int, *, records: int, trials: int, settings: Sequence[Setting]) -> "Order":
        """Returns independent random orders. Raises ValueError if a setting leaves no record for
        the test split.
        """
        ends = _ends(settings)
        longest = ends[-1]
        if longest >= records:
            raise ValueError(
                f"sources x samples must be below {records}, the number of records, got {longest}."
            )
        # This is not `jaxdp.data.order.shuffled`: one generator serves all trials, and results on
        # record have its draws.
        generator = np.random.Generator(np.random.Philox(seed))
        orders = [generator.permutation(records)[:longest] for _ in range(trials)]
        rows = np.stack(orders).astype(np.int32)
        rank = np.full((trials, records), records, np.int32)
        places = np.arange(longest, dtype=np.int32)
        np.put_along_axis(rank, rows, places[None], 1)
        return cls(jax.device_put(rows), jax.device_put(rank), ends)

    def only(self, settings: Sequence[Setting]) -> "Order":
        """Returns the beginnings that some settings use."""
        ends = _ends(settings)
        longest = ends[-1]
        return self._replace(rows=self.rows[:, :longest], ends=ends)


class Sums(NamedTuple):
    """Sums of s numbers at T temperatures, over P beginnings of the trials' orders, and over all
    records.

    Attributes:
      temperatures: float32 [T].
      beginnings: P times float32 [trials, T, s].
      everyone: float32 [T, s].
    """

    temperatures: jax.Array
    beginnings: Any
    everyone: jax.Array

    @classmethod
    def of(cls, summand: Any, records: Records, temperatures: np.ndarray, order: Order) -> "Sums":
        """Returns the sums of `summand(records, temperature) -> [N, s]`."""
        points = jax.device_put(np.asarray(temperatures, np.float32))
        beginnings, everyone = _sums(summand, records, points, order.rows, order.ends)
        return cls(points, beginnings, everyone)

    def of_first(self, count: int, order: Order) -> "Sums":
        """Returns the sums over the first `count` records of each trial, without the axis P."""
        place = order.ends.index(count)
        return self._replace(beginnings=self.beginnings[place])

    def at(self, temperature: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the sums [s] of a trial and beginning, the sums [s] of all records, and whether T
        is in the table.
        """
        distances = jnp.abs(self.temperatures - temperature)
        nearest = jnp.argmin(distances)
        ratio = self.temperatures[nearest] / temperature
        # Programs that compute the same temperature may round it differently.
        is_known = jnp.abs(ratio - 1) < 1e-4
        return self.beginnings[nearest], self.everyone[nearest], is_known


_ONE_TRIAL = Sums(None, 0, None)  # type: ignore[arg-type]  # axes for jax.vmap


@functools.partial(jax.jit, static_argnums=(0, 4))
def _sums(
    summand: Any, records: Records, temperatures: jax.Array, rows: jax.Array, ends: tuple[int, ...]
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the sums over beginnings and over everyone, with one trial's rows in memory."""
    by_temperature = jax.vmap(summand, in_axes=(None, 0), out_axes=1)
    table = by_temperature(records, temperatures)
    count = len(ends)
    lengths = np.diff([0, *ends])
    segment = np.repeat(np.arange(count), lengths)

    def beginnings(order: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(table[order], segment, count, indices_are_sorted=True)
        return jnp.cumsum(sums, 0)

    of_trials = jax.lax.map(beginnings, rows)
    return [of_trials[:, place] for place in range(count)], table.sum(0)


def _fit_at(records: Records, temperature: jax.Array) -> jax.Array:
    """Returns what records [N] add to the ECE's bins and to the Brier score at a temperature,
    float32 [N, 16].
    """
    p = confidence(records.logits, temperature)
    bins = jax.nn.one_hot(equal_width_bin(p, _ECE_BINS), _ECE_BINS)
    right = records.correct.astype(jnp.float32)
    gap = (right - p)[:, None]
    return jnp.concatenate([bins * gap, gap * gap], 1)


def _outcome(fit: jax.Array, tested: int) -> Outcome:
    """Returns the scores from the sums [trials, 16] over test splits of `tested` records."""
    sums = np.asarray(fit)
    gaps = np.abs(sums[:, :-1])
    squares = sums[:, -1]
    return Outcome(ece=gaps.sum(1) / tested, brier=squares / tested)


# --- Methods over all settings ------------------------------------------------------------------


def simulate(
    method: Any,
    records: Records,
    order: Order,
    settings: Sequence[Setting],
    *,
    key: jax.Array | None,
    adjacency: Adjacency = "add_remove",
) -> list[Outcome]:
    """Recalibrates in every trial of every setting, and judges on the records that the trial did
    not use.

    Args:
      method: A search for a temperature, or a `Binning`.
      records: N labelled logits, all valid.
      order: The order of these records, drawn for these settings.
      settings: The settings to simulate.
      key: Typed key of the noise. The noise is continuous: answers are not rounded to its steps.
        None is the baseline of the first source that recalibrates for itself, without noise.
      adjacency: As in `recalibrate`.

    Returns:
      One outcome per setting.
    """
    questions, ends = reach(method)
    answers = []
    for k, temperatures in enumerate(questions):
        summand = _Asked(method, k)
        answers.append(Sums.of(summand, records, temperatures, order))
    fits = None
    if ends.size:
        fits = Sums.of(_fit_at, records, ends, order)
    _, width = answers[0].everyone.shape
    shape = (len(order.rows), method.rounds, width)
    _, num_classes = records.logits.shape
    scale_of = functools.partial(noise_scale, method, adjacency=adjacency, num_classes=num_classes)
    outcomes = []
    bar = progress_bar(settings, label=type(method).__name__, unit="setting")
    for index, (sources, samples, epsilon) in enumerate(bar):
        used = sources * samples
        scale = None if key is None else scale_of(epsilon=epsilon)
        if key is None or scale is None:  # no privacy has no scale
            drawn, variance = np.zeros(shape, np.float32), 0.0
        else:
            setting_key = jax.random.fold_in(key, index)
            drawn = noise_of_sources(setting_key, shape, sources, scale)
            variance = scale.variance * sources
        # Without a key the first source recalibrates for itself.
        heard = samples if key is None else used
        sums = tuple(of_round.of_first(heard, order) for of_round in answers)
        parameters = _play(method, sums, drawn, variance)
        if fits is not None:
            fit = _rest(fits.of_first(used, order), parameters.temperature)
        else:
            fit = _curve_fits(method, parameters, records, order.rank >= used)
        tested = len(records.labels) - used
        outcomes.append(_outcome(fit, tested))
    return outcomes


def unchanged(records: Records, order: Order, settings: Sequence[Setting]) -> list[Outcome]:
    """Returns the outcomes without recalibration."""
    fits = Sums.of(_fit_at, records, np.ones(1), order)
    ones = np.ones(len(order.rows), np.float32)
    outcomes = []
    for setting in settings:
        used = setting.sources * setting.samples
        fit = _rest(fits.of_first(used, order), ones)
        tested = len(records.labels) - used
        outcomes.append(_outcome(fit, tested))
    return outcomes


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What records add in a round. The objects of equal methods are equal, and so compiled once."""

    method: Any
    k: int

    def __call__(self, records: Records, temperature: jax.Array) -> jax.Array:
        return summands(self.method, self.k, records, temperature)


@functools.partial(jax.jit, static_argnums=1)
def noise_of_sources(
    key: jax.Array, shape: tuple[int, ...], sources: jax.Array, scale: Scale
) -> jax.Array:
    """Returns the sum of the Laplace noise of all sources, each the difference of two exponentials.

    A sum of exponentials is minus the logarithm of a product of uniforms. Products of five do not
    underflow.
    """

    def five(i: jax.Array, total: jax.Array) -> jax.Array:
        five_key = jax.random.fold_in(key, i)
        # 1 - uniform is in (0, 1], whose logarithm is finite.
        uniform = 1 - jax.random.uniform(five_key, (5, 2, *shape))
        numbers = 5 * i + jnp.arange(5)
        inner_axes = tuple(range(1, uniform.ndim))
        exists = jnp.expand_dims(numbers < sources, inner_axes)
        products = jnp.where(exists, uniform, 1.0).prod(0)
        plus, minus = -jnp.log(products)
        return total + plus - minus

    rounds = (sources + 4) // 5
    total = jax.lax.fori_loop(0, rounds, five, jnp.zeros(shape))
    return total * (scale.noise * scale.step)


@functools.partial(jax.jit, static_argnums=0)
def _play(
    method: Method, answers: tuple[Sums, ...], drawn: jax.Array, variance: float | jax.Array
) -> Any:
    """Plays the conversations of all trials."""

    def conversation(answers: tuple[Sums, ...], drawn: jax.Array) -> Any:
        known = []

        def ask(k: int, temperature: jax.Array) -> jax.Array:
            exact, _, is_known = answers[k].at(temperature)
            known.append(is_known)
            return exact + drawn[k]

        parameters = play(method, ask, variance)
        # If a method asks for a temperature that `reach` did not find, its results become NaN.
        all_known = jnp.stack(known).all()

        def or_nan(leaf: jax.Array) -> jax.Array:
            is_result = leaf.dtype == jnp.float32
            return jnp.where(all_known, leaf, jnp.nan) if is_result else leaf

        return jax.tree.map(or_nan, parameters)

    of_trials = tuple(_ONE_TRIAL for _ in answers)
    return jax.vmap(conversation, in_axes=(of_trials, 0))(answers, drawn)


@jax.jit
def _rest(fits: Sums, temperatures: jax.Array) -> jax.Array:
    """Returns sums over all records but the trials' [trials, 16], at final temperatures
    [trials].
    """

    def rest(fits: Sums, temperature: jax.Array) -> jax.Array:
        beginning, everyone, is_known = fits.at(temperature)
        return jnp.where(is_known, everyone - beginning, jnp.nan)

    return jax.vmap(rest, in_axes=(_ONE_TRIAL, 0))(fits, temperatures)


@functools.partial(jax.jit, static_argnums=0)
def _curve_fits(method: Any, parameters: Any, records: Records, tested: jax.Array) -> jax.Array:
    """Returns the fits [trials, 16] on the test splits. The confidences are a curve over a
    score.
    """
    score = method.score(records.logits)
    right = records.correct.astype(jnp.float32)

    def fit(trial: tuple[Any, jax.Array]) -> jax.Array:
        parameters, tested = trial
        p = method.curve(parameters, score)
        gap = (right - p) * tested.astype(jnp.float32)
        segment = equal_width_bin(p, _ECE_BINS)
        bins = jax.ops.segment_sum(gap, segment, _ECE_BINS)
        return jnp.append(bins, gap @ gap)

    return jax.lax.map(fit, (parameters, tested))
