"""Correlated noise: matrix factorisation mechanisms as a recurrence over the steps of one run.

A run of T steps releases the clipped sums G [T, parameters] with the noise C^-1 Z. C is a lower
triangular matrix, the strategy, and the rows of Z are independent Gaussians (Denisov et al. 2022,
"Improved differential privacy for SGD via optimal private linear operators on adaptive streams").
The noise of a step cancels a part of the noise of earlier steps, so their sum, which moves the
parameters, has less of it.

    C (G + C^-1 Z) = C G + Z

so the whole run is ONE Gaussian mechanism on C G. Its sensitivity is the most that C G moves, in
clip norms, if one unit takes part in at most k steps that are at least b apart (Choquette-Choo et
al. 2023, "(Amplified) banded matrix factorization"). The steps may be chosen adaptively, because C
is lower triangular (Denisov et al., theorem 2.1).

Row t of C^-1 Z follows from row t of Z and from what the recurrence keeps, the *buffers*:

* banded Toeplitz C with coefficients c_0, ..., c_m (algorithm 9 of Choquette-Choo et al.): the last
  m rows x of C^-1 Z,

      x_t = (z_t - sum_j c_j x_{t-j}) / c_0

* buffered linear Toeplitz C (algorithm 3 of McMahan et al. 2024, "A hassle-free algorithm for
  private learning in practice"): m sums with decays theta and scales omega,

      x_t = z_t - sum_i omega_i s_i,    s_i <- theta_i s_i + x_t

* banded C^-1 with coefficients d_0, ..., d_m (Kalinin et al. 2025, "Back to square roots"): the
  last m rows of Z,

      x_t = sum_j d_j z_{t-j}

Strategies, their optimisers and their sensitivities are those of
`jax_privacy.matrix_factorization`. Buffers are secret: a row of noise follows from them.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from dp_accounting import dp_event

# It exceeds the rounding of a sensitivity in float64.
_ROUNDED_UP = 1 + 2.0**-40
# jax_privacy bounds the sensitivity of a general strategy in O(steps^2) memory.
_MOST_GENERAL_STEPS = 4096


@dataclasses.dataclass(frozen=True)
class _Strategy(abc.ABC):
    """A lower triangular Toeplitz matrix C, as the recurrence of C^-1.

    Its numbers are those of float32, which programs compute with. So the sensitivity is that of the
    matrix whose noise is released.
    """

    @property
    @abc.abstractmethod
    def buffers(self) -> int:
        """The number of arrays like the parameters that the recurrence keeps."""

    @abc.abstractmethod
    def coefficients(self, steps: int) -> np.ndarray:
        """Returns the first column of C, float64 [steps]."""

    @abc.abstractmethod
    def next(self, step: jax.Array, kept: jax.Array, fresh: jax.Array) -> tuple[Any, Any]:
        """Returns row `step` of C^-1 Z from that of Z, and the new buffers [buffers, ...]."""


@dataclasses.dataclass(frozen=True)
class _OfBands(_Strategy):
    """A strategy of which one buffer is kept for each band but the first."""

    bands: tuple[float, ...]

    @property
    def buffers(self) -> int:
        return len(self.bands) - 1


class _Banded(_OfBands):
    """A banded Toeplitz strategy with the coefficients c_0, ..., c_m."""

    def coefficients(self, steps: int) -> np.ndarray:
        column = np.zeros(steps)
        used = self.bands[:steps]
        column[: len(used)] = used
        return column

    def next(self, step: jax.Array, kept: jax.Array, fresh: jax.Array) -> tuple[Any, Any]:
        first = jnp.asarray(self.bands[0], fresh.dtype)
        if not self.buffers:
            return fresh / first, kept
        # x_t = (z_t - sum_j c_j x_{t-j}) / c_0
        row = (fresh - _weighted_past(self.bands[1:], step, kept)) / first
        return row, _with_newest(step, kept, row)


class _BandedInverse(_OfBands):
    """A strategy whose inverse is banded Toeplitz with the coefficients d_0, ..., d_m."""

    def coefficients(self, steps: int) -> np.ndarray:
        first, *rest = self.bands
        reversed_rest = np.array(rest[::-1])
        # Zeros before the first coefficient, for the products with all of the bands.
        column = np.zeros(self.buffers + steps)
        # C C^-1 = 1: c_0 = 1 / d_0, and c_i = -sum_j d_j c_{i-j} / d_0.
        column[self.buffers] = 1 / first
        for i in range(1, steps):
            past = column[i : i + self.buffers]
            column[self.buffers + i] = -(reversed_rest @ past) / first
        return column[self.buffers :]

    def next(self, step: jax.Array, kept: jax.Array, fresh: jax.Array) -> tuple[Any, Any]:
        row = jnp.asarray(self.bands[0], fresh.dtype) * fresh
        if not self.buffers:
            return row, kept
        # x_t = sum_j d_j z_{t-j}
        row += _weighted_past(self.bands[1:], step, kept)
        return row, _with_newest(step, kept, fresh)


@dataclasses.dataclass(frozen=True)
class _Buffered(_Strategy):
    """A buffered linear Toeplitz strategy with decays theta and scales omega."""

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    @property
    def buffers(self) -> int:
        return len(self.decays)

    def coefficients(self, steps: int) -> np.ndarray:
        # c_0 = 1, and c_t = sum_i omega_i theta_i^(t-1).
        powers = np.array(self.decays) ** np.arange(steps - 1)[:, None]
        return np.concatenate([[1.0], powers @ np.array(self.scales)])

    def next(self, step: jax.Array, kept: jax.Array, fresh: jax.Array) -> tuple[Any, Any]:
        # x_t = z_t - sum_i omega_i s_i
        row = fresh - _weighted(jnp.asarray(self.scales, fresh.dtype), kept)
        decays = jnp.asarray(self.decays, fresh.dtype)
        # [m, 1, ..., 1], to meet the buffers [m, ...].
        decays = decays.reshape(-1, *[1] * fresh.ndim)
        # s_i <- theta_i s_i + x_t
        return row, decays * kept + row[None]


def _weighted_past(coefficients: Sequence[float], step: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns sum_j c_j y_{t-j} of the last m values y, of which y_t lies in buffer t mod m.

    So a step writes one buffer and moves none.
    """
    buffers = len(coefficients)
    places = jnp.arange(buffers, dtype=step.dtype)
    # Buffer p has the value of the last step s < t with s = p modulo m, so its coefficient is
    # number t - s.
    ages = (step - places - 1) % buffers
    return _weighted(jnp.asarray(coefficients, kept.dtype)[ages], kept)


def _with_newest(step: jax.Array, kept: jax.Array, value: jax.Array) -> jax.Array:
    """Returns the buffers with the value of a step in place of the oldest."""
    place = step % len(kept)
    after: jax.Array = jax.lax.dynamic_update_index_in_dim(kept, value, place, axis=0)
    return after


def _weighted(weights: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns the weighted sum of the buffers, in full precision on every platform."""
    return jnp.tensordot(weights, kept, axes=1, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class CorrelatedNoise:
    """The noise C^-1 Z of a run of `steps` steps. `correlated` documents the fields."""

    strategy: _Strategy
    steps: int
    participations: int
    min_separation: int

    @functools.cached_property
    def sensitivity(self) -> float:
        """The L2 norm by which C G moves at most, in clip norms, if one unit joins or leaves."""
        column = self.strategy.coefficients(self.steps)
        pattern = {
            "min_sep": self.min_separation,
            "max_participations": self.participations,
        }
        return _sensitivity(column, pattern) * _ROUNDED_UP

    @property
    def buffers(self) -> int:
        """The number of arrays like the parameters that a run keeps."""
        return self.strategy.buffers

    def event(self, noise_multiplier: float) -> dp_event.DpEvent:
        """Returns the event of the whole run, one Gaussian mechanism.

        `jaxdp.finetune.event` has that of a run whose secret pattern of participation amplifies.

        Args:
          noise_multiplier: The standard deviation of an entry of Z over the clip norm.
        """
        if not noise_multiplier:
            return dp_event.NonPrivateDpEvent()
        # A Gaussian of a sensitivity other than 1 is that of sensitivity 1 with less noise.
        return dp_event.GaussianDpEvent(noise_multiplier / self.sensitivity)

    @functools.cached_property
    def column(self) -> np.ndarray:
        """The first column of C, rounded up, float64 [steps]."""
        column: np.ndarray = self.strategy.coefficients(self.steps) * _ROUNDED_UP
        return column

    def error(self) -> np.ndarray:
        """Returns the expected squared errors of the sums of the noise of 1 to `steps` steps.

        They are float64 [steps], for noise that costs as much as a Gaussian of standard deviation
        1. `jax_privacy` has the same number as `toeplitz.per_query_error` times the squared
        sensitivity.
        """
        column = self.strategy.coefficients(self.steps)
        with jax.enable_x64(True):
            errors = _program("per_query_error")(strategy_coef=column)
        return self.sensitivity**2 * np.asarray(errors)

    def zeros(self, tree: Any) -> Any:
        """Returns the buffers before the first step for sums like `tree`, [buffers, ...] each."""

        def of(leaf: Any) -> jax.Array:
            return jnp.zeros((self.buffers, *leaf.shape), leaf.dtype)

        return jax.tree.map(of, tree)

    def next(self, step: jax.Array, kept: Any, fresh: Any) -> tuple[Any, Any]:
        """Returns row `step` of C^-1 Z, and the buffers after it.

        Args:
          step: The number of the step, an int32 scalar.
          kept: The buffers after the step before.
          fresh: Row `step` of Z.
        """
        rows, buffers = [], []
        leaves, structure = jax.tree.flatten(fresh)
        for leaf, own in zip(leaves, jax.tree.leaves(kept), strict=True):
            row, after = self.strategy.next(step, own, leaf)
            rows.append(row)
            buffers.append(after)
        return jax.tree.unflatten(structure, rows), jax.tree.unflatten(structure, buffers)

    def check_step(self, step: int) -> None:
        """Raises ValueError for a step that the event of the run does not have."""
        if step >= self.steps:
            raise ValueError(
                f"step must be below {self.steps}, got {step}: noise=correlated(..., "
                f"steps={self.steps}) is one mechanism of that many steps. Make it for more."
            )

    def check_sampler(self, sampler: Any) -> None:
        """Raises ValueError for a sampler in which a unit may take part more than is stated.

        Or its pattern has no proof for the strategy.
        """
        # A sampler without a bound, such as a plain Poisson one, has no such method.
        participation = getattr(sampler, "participation", None)
        if participation is None:
            raise ValueError(
                f"sampler must bound how often an example takes part for noise=correlated(...), "
                f"got {type(sampler).__name__}, in which it may be in any step. Use "
                "jaxdp.data.CyclicPoissonSampler(num_examples, q, cycle_length=), or another "
                "pattern of jaxdp.data, or FixedOrderSampler(num_examples, batch_size)."
            )
        own_steps = getattr(sampler, "steps", self.steps)  # simulated ones have theirs
        if own_steps != self.steps:
            raise ValueError(
                f"sampler has steps={own_steps}, but correlated was given steps={self.steps}. "
                "They are of one run. Give both the same number."
            )
        most, separation = participation(self.steps)
        if most > self.participations:
            raise ValueError(
                f"sampler has an example take part in {most} of {self.steps} steps, but "
                f"correlated was given participations={self.participations}. Give it "
                f"participations={most}, min_separation={separation}."
            )
        # A unit that takes part once has no distance to keep.
        if most > 1 and separation < self.min_separation:
            raise ValueError(
                f"sampler has an example take part again after {separation} steps, but correlated "
                f"was given min_separation={self.min_separation}. Give it "
                f"min_separation={separation}."
            )
        sampler.check_strategy(self.column)


def correlated(
    strategy: Any,
    *,
    steps: int,
    participations: int = 1,
    min_separation: int | None = None,
    inverse: bool = False,
) -> CorrelatedNoise:
    """Returns correlated noise for a run of `steps` steps, for `jaxdp.finetune.dp_sgd`.

        from jax_privacy.matrix_factorization import toeplitz

        sampler = jaxdp.data.FixedOrderSampler(len(source), 64)
        steps = 4 * sampler.steps_per_epoch
        bands = toeplitz.optimize_banded_toeplitz(steps, bands=8)
        noise = jaxdp.correlated(
            bands, steps=steps, participations=4, min_separation=sampler.steps_per_epoch
        )
        trainer = jaxdp.finetune.dp_sgd(
            loss_fn, optax.sgd(0.1), sampler=sampler, clip_norm=1.0, noise=noise,
            epsilon=4.0, delta=1e-6,
        )

    Args:
      strategy: The matrix C. Either the coefficients [bands] of a banded Toeplitz matrix, such as
        those of `jax_privacy.matrix_factorization.toeplitz.optimize_banded_toeplitz`, or a
        `jax_privacy.matrix_factorization.buffered_toeplitz.BufferedToeplitz`. It is rounded to
        float32. `np.ones(1)` is independent noise.
      steps: T, the number of steps of the run. The whole run is charged at its start.
      participations: k, the most steps in which one unit takes part. 1, the default, is a single
        epoch.
      inverse: Whether `strategy` has the coefficients of C^-1. Those of
        `toeplitz.optimal_max_error_noising_coefs` of jax_privacy are the banded inverse square root
        (BISR). The default is False.
      min_separation: b, the least number of steps from one participation to the next. The default
        is 1, or `steps` if `participations` is 1.

    Raises:
      TypeError: `strategy` is neither.
      ValueError: A number is out of range, or C has no inverse. Or C is no non-increasing sequence
        of non-negative coefficients and `steps` is above 4096, where no bound on its sensitivity is
        computed.

    Formal guarantees:
      A run whose units take part in at most `participations` steps, `min_separation` or more apart,
      satisfies `event(noise_multiplier)` as a whole, for "zero_out". It holds for "add_remove" if
      the steps of a unit do not depend on the other units. Under "replace_one" the accountant
      doubles the norm. A trainer whose sampler draws the steps of a unit in secret has a smaller
      event (`jaxdp.finetune.event`). A single step has no event of its own. Sensitivities are those
      of `jax_privacy`: exact for non-increasing non-negative coefficients (theorem 2 of McMahan et
      al. 2024, "A hassle-free algorithm"), and otherwise the upper bound of algorithm 4 of
      Choquette-Choo et al. 2023.
    """
    _check_count("steps", steps)
    _check_count("participations", participations)
    if min_separation is None:
        # A unit that takes part once is never near itself.
        min_separation = steps if participations == 1 else 1
    _check_count("min_separation", min_separation)
    matrix = _strategy(strategy, inverse)
    noise = CorrelatedNoise(matrix, steps, participations, min_separation)
    # A strategy without a bound must not reach a trainer.
    _ = noise.sensitivity
    return noise


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def _strategy(strategy: Any, inverse: bool) -> _Strategy:
    """Returns a strategy of jax_privacy with the numbers of float32."""
    # By its fields, because importing jax_privacy takes 1.4 s.
    if not inverse and hasattr(strategy, "buf_decay") and hasattr(strategy, "output_scale"):
        decays = _float32("strategy.buf_decay", strategy.buf_decay)
        scales = _float32("strategy.output_scale", strategy.output_scale)
        return _Buffered(decays, scales)
    is_array = isinstance(strategy, jax.Array | np.ndarray | list | tuple)
    if not is_array:
        raise TypeError(
            "strategy must be the coefficients [bands] of a banded Toeplitz matrix, or a "
            "BufferedToeplitz of jax_privacy.matrix_factorization.buffered_toeplitz, got "
            f"{type(strategy).__name__}."
        )
    bands = _float32("strategy", strategy)
    # A matrix whose diagonal is 0 has no inverse.
    if not bands or bands[0] <= 0:
        raise ValueError(
            f"strategy must begin with a positive coefficient, got {bands[:1]}. Otherwise the "
            "matrix has no inverse, or only one with noise of the other sign."
        )
    return _BandedInverse(bands) if inverse else _Banded(bands)


def _float32(name: str, values: Any) -> tuple[float, ...]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} must be a one-dimensional array of real numbers, got shape {array.shape} and "
            f"dtype {array.dtype}."
        )
    # The recurrence computes with these, so the sensitivity must be theirs too.
    rounded = array.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError(f"{name} must be finite in float32, got {array}.")
    return tuple(rounded.tolist())


@functools.cache
def _program(name: str, **options: int) -> Any:
    """Returns a function of `toeplitz` of jax_privacy as one program.

    Its checks read values. Callers make the same ones.
    """
    from jax_privacy.matrix_factorization import toeplitz

    return jax.jit(functools.partial(getattr(toeplitz, name), skip_checks=True, **options))


def _sensitivity(column: np.ndarray, pattern: dict[str, int]) -> float:
    """Returns the sensitivity of a Toeplitz matrix, or an upper bound on it, by jax_privacy."""
    from jax_privacy.matrix_factorization import sensitivity

    steps = len(column)
    # More than all steps apart is as good as all steps.
    pattern = pattern | {"min_sep": min(pattern["min_sep"], steps)}
    # jax_privacy knows the exact sensitivity of such a column, and of others an upper bound.
    is_decreasing = (column >= 0).all() and (np.diff(column) <= 0).all()
    if not is_decreasing and steps > _MOST_GENERAL_STEPS:
        raise ValueError(
            f"strategy must have non-negative coefficients that do not increase for steps="
            f"{steps}. Others have a bound on their sensitivity for at most "
            f"{_MOST_GENERAL_STEPS} steps."
        )
    with jax.enable_x64(True):
        if is_decreasing:
            squared = _program("minsep_sensitivity_squared", **pattern)
            return math.sqrt(squared(strategy_coef=column))
        matrix = jax.device_put(scipy.linalg.toeplitz(column, np.zeros(steps)))
        gram = matrix.T @ matrix
        bound = math.inf
        if np.isfinite(gram).all():
            bound = sensitivity.get_min_sep_sensitivity_upper_bound_for_X(gram, **pattern)
    if not math.isfinite(bound):
        raise ValueError(
            f"strategy must have a finite sensitivity, got {bound} over {steps} steps. Choose "
            "coefficients whose matrix does not grow from step to step."
        )
    return bound
