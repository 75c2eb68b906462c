"""Mechanisms of noise, one row each, for test_mechanisms: how a mechanism draws, and its law.

The noise of a row is drawn on zeros. A new mechanism is one entry of `ROWS`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy.matrix_factorization import buffered_toeplitz
from scipy import stats

import jaxdp
from jaxdp.prediction import mechanisms
from jaxdp.recalibration import HistogramBinning
from jaxdp.recalibration.protocol import noise_scale, with_noise
from jaxdp.transforms import noise, responses

# What refused calls would draw for. Nothing else draws as much.
REFUSED = np.zeros(7, np.float32)
STEPS = 8
BANDED = np.array([1.0, 0.6, 0.45, 0.2])
STRATEGIES = {
    "banded": BANDED,
    "blt": buffered_toeplitz.BufferedToeplitz.build((0.9, 0.4), (0.3, 0.25), dtype=jnp.float32),
    "one band": np.array([2.0]),
    "more bands than steps": np.linspace(1, 0.1, 2 * STEPS),
    "signs": np.array([1.0, -0.5, 0.75]),
    "inverse": np.array([1.0, -0.5, -0.125, -0.0625]),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism with its scale.

    Attributes:
      draw: `draw(key, zeros, number)`, which returns the noise on a pytree or an array of zeros.
      law: `law(scale)`, a law of scipy in float64.
      scale: The right scale. For answers it is what decides how often they are wrong.
      refused: Calls that take a key, with the error and its words. The key is a right one.
      wrong: Factors of the scale that are told apart.
      dtype: The dtype of what is drawn.
      takes_trees: Whether it draws for a pytree. Otherwise it draws for an array.
      reads_values: Whether a shape without values is too little.
      is_traced: Whether it may be part of a program. Otherwise it draws for [n] by NumPy.
      has_float64: Whether noise on float64 is float64.
      checks_key: Whether it refuses a key that is none.
    """

    draw: Callable[[jax.Array, Any, Any], Any]
    law: Callable[[float], Any]
    scale: float
    refused: tuple[tuple[Callable[[jax.Array], Any], type[Exception], str], ...] = ()
    wrong: tuple[float, ...] = (0.7, 1.3)
    dtype: Any = np.float32
    takes_trees: bool = True
    reads_values: bool = False
    is_traced: bool = True
    has_float64: bool = False
    checks_key: bool = True


class Rounded:
    """The law of a rounded value."""

    def __init__(self, law: Any):
        self.law = law

    def cdf(self, k: Any) -> Any:
        return self.law.cdf(np.floor(k) + 0.5)

    def ppf(self, p: Any) -> Any:
        return np.round(self.law.ppf(p))


def is_of_integers(law: Any) -> bool:
    return isinstance(law, Rounded) or hasattr(getattr(law, "dist", law), "pmf")


def cell_p_value(values: Any, law: Any, cells: int = 40) -> float:
    """Computes the chi-square p-value of integers against a law, in cells of about equal
    probability."""
    # cells (-inf, e0], (e0, e1], ..., (e_last, inf)
    edges = np.unique(law.ppf(np.arange(1, cells) / cells))
    probabilities = np.diff([0.0, *law.cdf(edges), 1.0])
    observed = np.bincount(np.searchsorted(edges, np.ravel(values)), minlength=len(probabilities))
    used = probabilities > 1e-12  # laws of few values leave a cell empty
    if observed[~used].any():
        return 0.0
    expected = probabilities[used] / probabilities[used].sum() * observed.sum()
    return float(stats.chisquare(observed[used], expected).pvalue)


def p_value(values: Any, law: Any) -> float:
    """Computes the p-value of values against a law: by cells for integers, else by
    Kolmogorov-Smirnov."""
    values = np.asarray(values, np.float64).ravel()
    if is_of_integers(law):
        return cell_p_value(values, law)
    return float(stats.kstest(values, law.cdf).pvalue)


# --- Noise on trees ------------------------------------------------------------------------------


def scaled(draw: Any, law: Any, scale: float) -> Mechanism:
    """Returns the row of noise that is a standard law times a scale."""
    name = "std" if draw is noise.gaussian else "scale"
    at = lambda scale: lambda key: draw(key, REFUSED, scale)  # noqa: E731
    outside = rf"{name} must be 0 or from 7.9e-31 to 1.3e.30 for float32 noise"
    return Mechanism(
        draw=lambda key, zeros, number: draw(key, zeros, scale, number=number),
        law=lambda scale: law(scale=scale),
        scale=scale,
        refused=(
            (at(-1.0), ValueError, f"{name} must be at least 0, got -1.0"),
            (at(math.nan), ValueError, f"{name} must be at least 0, got nan"),
            (at(math.inf), ValueError, f"{name} must be finite, got inf"),
            *((at(lost), ValueError, outside) for lost in (1e-50, 1e-38, 1e38, 1e39)),
            (at(np.ones(3)), ValueError, rf"{name} must be one scalar .* got shape \(3,\)"),
        ),
        has_float64=True,
    )


def discrete(scale: float) -> Mechanism:
    at = lambda scale: lambda key: noise.discrete_laplace(key, REFUSED, scale)  # noqa: E731
    bad = (0.0, -1.0, math.nan, math.inf, 1.001 * noise.LARGEST_DISCRETE_SCALE)
    return Mechanism(
        draw=lambda key, zeros, number: noise.discrete_laplace(key, zeros, scale, number=number),
        law=lambda scale: stats.dlaplace(1 / scale),
        scale=scale,
        refused=tuple(
            (at(x), ValueError, rf"scale must be in \(0, 262144\], got {x}") for x in bad
        ),
        dtype=np.int32,
    )


def rounded(bits: int) -> Mechanism:
    at = lambda bits: lambda key: noise.rounded_gaussian(key, REFUSED, bits)  # noqa: E731
    return Mechanism(
        draw=lambda key, zeros, number: noise.rounded_gaussian(key, zeros, bits, number=number),
        law=lambda scale: Rounded(stats.norm(scale=scale)),
        scale=2.0**bits,
        refused=tuple(
            (at(x), ValueError, f"bits must be an integer from 4 to 24, got {x}")
            for x in (3, 25, 4.0, -1, math.nan)
        ),
        wrong=(0.9, 1.1),
        dtype=np.int32,
    )


def privatized() -> Mechanism:
    privatizer = jaxdp.privatize(0.5, noise_multiplier=3.0, divisor=1.0)

    def draw(key: jax.Array, zeros: Any, number: Any) -> Any:
        return privatizer.update(zeros, noise.PrivatizeState(key, jnp.asarray(number)))[0]

    return Mechanism(
        draw=draw, law=lambda scale: stats.norm(scale=scale), scale=1.5, reads_values=True
    )


# --- Correlated noise ----------------------------------------------------------------------------


def toeplitz_of(strategy: Any, steps: int) -> np.ndarray:
    if isinstance(strategy, buffered_toeplitz.BufferedToeplitz):
        decays, scales = (
            np.asarray(x, np.float64) for x in (strategy.buf_decay, strategy.output_scale)
        )
        column = [1.0] + [float(np.sum(scales * decays**k)) for k in range(steps - 1)]
    else:
        column = np.asarray(strategy, np.float32).astype(np.float64)[:steps]
    matrix = np.zeros((steps, steps))
    for row, col in itertools.product(range(steps), repeat=2):
        if 0 <= row - col < len(column):
            matrix[row, col] = column[row - col]
    return matrix


def matrix_of(strategy: Any, steps: int = STEPS) -> np.ndarray:
    """C in float64, from the definition of each strategy."""
    if strategy is STRATEGIES["inverse"]:
        return np.linalg.inv(toeplitz_of(strategy, steps))
    return toeplitz_of(strategy, steps)


def correlated(name: str) -> Mechanism:
    """Returns the row of the last step of a run."""
    strategy = STRATEGIES[name]
    run = noise.correlated(strategy, steps=STEPS, inverse=name == "inverse")
    privatizer = jaxdp.privatize(2.0, noise_multiplier=1.5, divisor=1.0, noise=run)

    def update(_: Any, run: Any) -> Any:
        zeros, state, _ = run
        mean, state = privatizer.update(zeros, state)
        return zeros, state, mean

    @jax.jit
    def draw(key: jax.Array, zeros: Any, number: Any) -> Any:
        state = noise.PrivatizeState(
            numbered(key, number), jnp.int32(0), privatizer.init_buffers(zeros)
        )
        # The first step makes buffers that vary as the key does.
        started = update(0, (zeros, state, None))
        return jax.lax.fori_loop(1, STEPS, update, started)[-1]

    row = np.linalg.inv(matrix_of(strategy))[-1]
    return Mechanism(
        draw=draw,
        law=lambda scale: stats.norm(scale=scale),
        scale=3.0 * float(np.linalg.norm(row)),
        reads_values=True,
    )


def numbered(key: jax.Array, number: Any) -> jax.Array:
    """Returns the key of a number, where a mechanism takes none. It gets a wrong key as it is."""
    return jax.random.fold_in(key, number) if jnp.shape(key) == () else key


# --- Answers and sums ----------------------------------------------------------------------------


def labelled(mechanism: Any, flips: Any, classes: int, distance: int, epsilon: float) -> Mechanism:
    """Returns the row of answers to a label, whose scale is the probability of a wrong one."""

    def ask(key: jax.Array, zeros: Any, epsilon: float = epsilon, **changes: Any) -> Any:
        given = {"distances": np.full(zeros.shape, distance), "num_classes": classes, **changes}
        return mechanism(key, zeros.astype(int), epsilon=epsilon, **given)

    def law(flip: float) -> Any:
        flip = min(flip, 0.999)
        others = [flip / (classes - 1)] * (classes - 1)
        return stats.rv_discrete(values=(range(classes), [1 - flip, *others]))

    few = REFUSED
    return Mechanism(
        draw=lambda key, zeros, number: ask(numbered(key, number), zeros),
        law=law,
        scale=float(flips(np.int64(distance), epsilon=epsilon)),
        refused=(
            (lambda key: ask(key, few, 0.0), ValueError, "epsilon must be .*got 0.0"),
            (lambda key: ask(key, few, -1.0), ValueError, "epsilon must be .*got -1.0"),
            (lambda key: ask(key, few, math.nan), ValueError, "epsilon must be .*got nan"),
            (lambda key: ask(key, few, math.inf), ValueError, "epsilon must be .*got inf"),
            (lambda key: ask(key, few, 1e-18), ValueError, "epsilon=1e-18 is too small"),
        ),
        dtype=np.int32,
        takes_trees=False,
        is_traced=False,
    )


def with_prior(label: int) -> Mechanism:
    """Returns the row of RRTop-k with three of four classes, whose scale is the epsilon."""
    order = [1, 3, 2]
    response = responses.with_prior(np.array([0.05, 0.5, 0.1, 0.35]), num_classes=4, epsilon=1.5)
    response = response._replace(sizes=np.array([3], np.int32))

    def draw(key: jax.Array, zeros: Any, number: Any) -> Any:
        numbers = responses.numbers(numbered(key, number), len(zeros))
        return response.answer(numbers, np.full(len(zeros), label))

    def law(epsilon: float) -> Any:
        rates = np.where(np.array(order) == label, math.exp(epsilon), 1.0)
        return stats.rv_discrete(values=(order, rates / rates.sum()))

    def at(epsilon: float) -> Any:
        return lambda key: responses.with_prior(None, num_classes=4, epsilon=epsilon)

    return Mechanism(
        draw=draw,
        law=law,
        scale=1.5,
        refused=tuple(
            (at(x), ValueError, "epsilon") for x in (0.0, -1.0, math.nan, math.inf, 1e-18)
        ),
        wrong=(0.7, 1.3) if label in order else (),
        dtype=np.int32,
        takes_trees=False,
        is_traced=False,
        checks_key=False,
    )


def cauchy_values() -> Mechanism:
    epsilon, beta, ends = 4.0, 2.0, (-1e9, 1e9)
    width = np.linspace(0.5, 2.5, 20)[:, None]

    def ask(key: jax.Array, zeros: Any, **changes: Any) -> Any:
        given = {"epsilon": epsilon, "beta": beta, "output_range": ends} | changes
        return mechanisms.cauchy_values(key, zeros, zeros - width, zeros + width, **given)

    smooth = mechanisms.smooth_sensitivity(
        np.zeros(1), -width, width, beta=beta, output_range=ends
    ).item()
    return Mechanism(
        draw=lambda key, zeros, number: ask(numbered(key, number), zeros),
        law=lambda scale: stats.cauchy(scale=scale),
        scale=mechanisms.cauchy_multiplier(epsilon, beta) * smooth,
        refused=(
            (lambda key: ask(key, REFUSED, epsilon=-1.0), ValueError, "epsilon must be.*-1.0"),
            (lambda key: ask(key, REFUSED, epsilon=math.nan), ValueError, "epsilon must be"),
            (lambda key: ask(key, REFUSED, beta=4.0), ValueError, "beta=4.0 must lie in"),
        ),
        takes_trees=False,
        is_traced=False,
    )


def laplace_values() -> Mechanism:
    def ask(key: jax.Array, zeros: Any, epsilon: float) -> Any:
        return mechanisms.laplace_values(key, zeros, epsilon=epsilon, output_range=(-1.0, 1.0))

    return Mechanism(
        draw=lambda key, zeros, number: ask(numbered(key, number), zeros, 60.0),
        law=lambda scale: stats.laplace(scale=scale),
        scale=2 / 60,
        refused=tuple(
            (lambda key, x=x: ask(key, REFUSED, x), ValueError, f"epsilon must be.*got {x}")
            for x in (0.0, -1.0, math.nan, math.inf)
        ),
        takes_trees=False,
        is_traced=False,
    )


def sums(epsilon: float) -> Mechanism:
    """Returns the row of the sums of a source in steps."""
    scale = noise_scale(
        HistogramBinning(bins=1), epsilon=epsilon, adjacency="add_remove", num_classes=2
    )

    def draw(key: jax.Array, zeros: Any, number: Any) -> Any:
        return with_noise(key, jnp.asarray(zeros, jnp.int32), scale, number) / scale.step

    return Mechanism(
        draw=draw,
        law=lambda scale: stats.dlaplace(1 / scale),
        scale=scale.noise,
        takes_trees=False,
        reads_values=True,
    )


def rows_of_labels() -> dict[str, Callable[[], Mechanism]]:
    def response(classes: int, distance: int) -> Callable[[], Mechanism]:
        flips = functools.partial(mechanisms.flip_probability, num_classes=classes)
        return lambda: labelled(mechanisms.randomised_response, flips, classes, distance, 0.5)

    rounding = {
        "smooth_cauchy": (mechanisms.smooth_cauchy, mechanisms.flip_probability_cauchy),
        "global_laplace": (mechanisms.global_laplace, mechanisms.flip_probability_global_laplace),
    }
    return {
        f"randomised_response, {k} classes, distance {d}": response(k, d)
        for k, d in [(2, 0), (2, 5), (5, 2)]
    } | {
        f"{name}, distance {d}": functools.partial(labelled, draw, flips, 2, d, 0.6)
        for (name, (draw, flips)), d in itertools.product(rounding.items(), (0, 3))
    }


LAWS = {
    "gaussian": (noise.gaussian, stats.norm),
    "laplace": (noise.laplace, stats.laplace),
    "cauchy": (noise.cauchy, stats.cauchy),
}
# One strategy of each class.
CLASSES = ("banded", "blt", "inverse")
# By kind and by scale, since a scale of the same kind takes the same path.
ROWS: dict[str, Callable[[], Mechanism]] = {
    **{name: functools.partial(scaled, *of, 37.5) for name, of in LAWS.items()},
    **{
        f"discrete_laplace, {scale:g}": functools.partial(discrete, scale)
        for scale in (7.0, 0.5, 1000.0, noise.LARGEST_DISCRETE_SCALE)
    },
    **{f"rounded_gaussian, {bits} bits": functools.partial(rounded, bits) for bits in (4, 20)},
    "privatize": privatized,
    **{f"correlated, {name}": functools.partial(correlated, name) for name in CLASSES},
    **rows_of_labels(),
    **{f"with_prior, label {label}": functools.partial(with_prior, label) for label in (0, 1, 3)},
    "cauchy_values": cauchy_values,
    "laplace_values": laplace_values,
    **{f"sums, epsilon {e:g}": functools.partial(sums, e) for e in (1.0, 0.01, 50.0)},
}
