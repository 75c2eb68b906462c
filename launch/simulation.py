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
    nobody = Records(jnp.zeros((1, 2)), jnp.zeros(1, jnp.int32))
    width = jax.eval_shape(lambda: method.summand(0, nobody, jnp.float32(1))).shape[1]

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.vmap, in_axes=(None, 0, 0))
    def played(rounds: range, state: Any, script: jax.Array) -> tuple[list[jax.Array], Any]:
        asked = []
        for i, k in enumerate(rounds):
            asked.append(method.question(k, state))
            state = method.update(k, state, jnp.full(width, script[i]))
        return asked, state

    states, asked = (
        jax.tree.map(lambda x: np.asarray(x)[None], method.init(0.0)),
        list[np.ndarray](),
    )
    for start in range(
        0, method.rounds, 3
    ):  # three rounds at a time, because each program takes a while to compile
        rounds = range(start, min(start + 3, method.rounds))
        sizes = [
            [-(10.0**-k), -(10.0**k), 10.0**-k, 10.0**k]
            for k in range(3 + rounds.start, 3 + rounds.stop)
        ]
        scripts = np.asarray(list(itertools.product(*sizes)), np.float32)
        count = len(jax.tree.leaves(states)[0])
        every = jax.tree.map(lambda x, scripts=scripts: np.repeat(x, len(scripts), axis=0), states)
        temperatures, states = jax.device_get(played(rounds, every, np.tile(scripts, (count, 1))))
        asked += map(np.unique, temperatures)
        rows = [x.reshape(len(x), -1).view(np.uint8) for x in jax.tree.leaves(states)]
        _, first = np.unique(np.concatenate(rows, 1), axis=0, return_index=True)
        states = jax.tree.map(lambda x, first=first: x[first], states)
    ends = getattr(jax.jit(jax.vmap(method.finish))(states), "temperature", None)
    return asked, np.zeros(0, np.float32) if ends is None else np.unique(ends)


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
        ends = sorted({n for s in settings for n in (s.samples, s.sources * s.samples)})
        if ends[-1] >= records:
            raise ValueError(
                f"sources x samples must be below {records}, the number of records, got {ends[-1]}."
            )
        generator = np.random.Generator(np.random.Philox(seed))
        rows = np.stack([generator.permutation(records)[: ends[-1]] for _ in range(trials)]).astype(
            np.int32
        )
        rank = np.full((trials, records), records, np.int32)
        np.put_along_axis(rank, rows, np.arange(ends[-1], dtype=np.int32)[None], 1)
        return cls(jax.device_put(rows), jax.device_put(rank), tuple(ends))


class Sums(NamedTuple):
    """Sums of s numbers at T temperatures, over P beginnings of the trials' orders, and over all
    records.

    Attributes:
      temperatures: float32 [T].
      beginnings: float32 [trials, P, T, s].
      everyone: float32 [T, s].
    """

    temperatures: jax.Array
    beginnings: jax.Array
    everyone: jax.Array

    @classmethod
    def of(cls, summand: Any, records: Records, temperatures: np.ndarray, order: Order) -> "Sums":
        """Returns the sums of `summand(records, temperature) -> [N, s]`."""
        at = jax.device_put(np.asarray(temperatures, np.float32))
        return cls(at, *_sums(summand, records, at, order.rows, order.ends))

    def of_first(self, count: int, order: Order) -> "Sums":
        """Returns the sums over the first `count` records of each trial, without the axis P."""
        return self._replace(beginnings=self.beginnings[:, order.ends.index(count)])

    def at(self, temperature: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the sums [s] of a trial and beginning, the sums [s] of all records, and whether T
        is in the table.
        """
        nearest = jnp.argmin(jnp.abs(self.temperatures - temperature))
        there = jnp.abs(self.temperatures[nearest] / temperature - 1) < 1e-4
        return self.beginnings[nearest], self.everyone[nearest], there


_ONE_TRIAL = Sums(None, 0, None)  # type: ignore[arg-type]  # axes for jax.vmap


@functools.partial(jax.jit, static_argnums=(0, 4))
def _sums(
    summand: Any, records: Records, temperatures: jax.Array, rows: jax.Array, ends: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums over beginnings and over everyone, with one trial's rows in memory."""
    table = jax.vmap(summand, in_axes=(None, 0), out_axes=1)(records, temperatures)
    part = np.repeat(np.arange(len(ends)), np.diff([0, *ends]))

    def one(order: jax.Array) -> jax.Array:
        return jnp.cumsum(
            jax.ops.segment_sum(table[order], part, len(ends), indices_are_sorted=True), 0
        )

    return jax.lax.map(one, rows), table.sum(0)


def _fit_at(records: Records, temperature: jax.Array) -> jax.Array:
    """Returns what records [N] add to the ECE's bins and to the Brier score at a temperature,
    float32 [N, 16].
    """
    p = confidence(records.logits, temperature)
    bins, gap = equal_width_bin(p, _ECE_BINS), records.correct.astype(jnp.float32) - p
    return jnp.concatenate(
        [jax.nn.one_hot(bins, _ECE_BINS) * gap[:, None], (gap * gap)[:, None]], 1
    )


def _outcome(fit: jax.Array, tested: int) -> Outcome:
    """Returns the scores from the sums [trials, 16] over test splits of `tested` records."""
    sums = np.asarray(fit)
    return Outcome(np.abs(sums[:, :-1]).sum(1) / tested, sums[:, -1] / tested)


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
    asked, ends = reach(method)
    answers = [Sums.of(_Asked(method, k), records, at, order) for k, at in enumerate(asked)]
    fits = Sums.of(_fit_at, records, ends, order) if ends.size else None
    shape = (len(order.rows), method.rounds, answers[0].everyone.shape[1])
    outcomes = []
    bar = progress_bar(settings, label=type(method).__name__, unit="setting")
    for index, (sources, samples, epsilon) in enumerate(bar):
        drawn, variance, used = jnp.zeros(shape), 0.0, sources * samples
        if key is not None:
            scale = noise_scale(
                method, epsilon=epsilon, adjacency=adjacency, num_classes=records.logits.shape[1]
            )
            if scale is not None:
                drawn = noise_of_sources(jax.random.fold_in(key, index), shape, sources, scale)
                variance = scale.variance * sources
        heard = samples if key is None else used
        found = _play(
            method, tuple(sums.of_first(heard, order) for sums in answers), drawn, variance
        )
        if fits is not None:
            fit = _rest(fits.of_first(used, order), found.temperature)
        else:
            fit = _curve_fits(method, found, records, order.rank >= used)
        outcomes.append(_outcome(fit, len(records.labels) - used))
    return outcomes


def unchanged(records: Records, order: Order, settings: Sequence[Setting]) -> list[Outcome]:
    """Returns the outcomes without recalibration."""
    fits, outcomes = Sums.of(_fit_at, records, np.ones(1), order), []
    for setting in settings:
        used = setting.sources * setting.samples
        fit = _rest(fits.of_first(used, order), jnp.ones(len(order.rows)))
        outcomes.append(_outcome(fit, len(records.labels) - used))
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
        uniform = 1 - jax.random.uniform(jax.random.fold_in(key, i), (5, 2, *shape))
        there = (5 * i + jnp.arange(5) < sources).reshape(5, *[1] * (1 + len(shape)))
        plus, minus = -jnp.log(jnp.where(there, uniform, 1.0).prod(0))
        return total + plus - minus

    rounds = (sources + 4) // 5
    return jax.lax.fori_loop(0, rounds, five, jnp.zeros(shape)) * (scale.noise * scale.step)


@functools.partial(jax.jit, static_argnums=0)
def _play(
    method: Method, answers: tuple[Sums, ...], drawn: jax.Array, variance: float | jax.Array
) -> Any:
    """Plays the conversations of all trials."""

    def one(answers: tuple[Sums, ...], drawn: jax.Array) -> Any:
        tabulated = []

        def ask(k: int, temperature: jax.Array) -> jax.Array:
            exact, _, there = answers[k].at(temperature)
            tabulated.append(there)
            return exact + drawn[k]

        found = play(method, ask, variance)
        # If a method asks for a temperature that `reach` did not find, its results become NaN.
        known = jnp.stack(tabulated).all()
        return jax.tree.map(
            lambda x: jnp.where(known, x, jnp.nan) if x.dtype == jnp.float32 else x, found
        )

    return jax.vmap(one, in_axes=(tuple(_ONE_TRIAL for _ in answers), 0))(answers, drawn)


@jax.jit
def _rest(fits: Sums, temperatures: jax.Array) -> jax.Array:
    """Returns sums over all records but the trials' [trials, 16], at final temperatures
    [trials].
    """

    def one(fits: Sums, temperature: jax.Array) -> jax.Array:
        beginning, everyone, there = fits.at(temperature)
        return jnp.where(there, everyone - beginning, jnp.nan)

    return jax.vmap(one, in_axes=(_ONE_TRIAL, 0))(fits, temperatures)


@functools.partial(jax.jit, static_argnums=0)
def _curve_fits(method: Any, found: Any, records: Records, tested: jax.Array) -> jax.Array:
    """Returns the fits [trials, 16] on the test splits. The confidences are a curve over a
    score.
    """
    score, right = method.score(records.logits), records.correct.astype(jnp.float32)

    def one(trial: tuple[Any, jax.Array]) -> jax.Array:
        parameters, tested = trial
        p = method.curve(parameters, score)
        gap = (right - p) * tested.astype(jnp.float32)
        return jnp.append(
            jax.ops.segment_sum(gap, equal_width_bin(p, _ECE_BINS), _ECE_BINS), gap @ gap
        )

    return jax.lax.map(one, (found, tested))
