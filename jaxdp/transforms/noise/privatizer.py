"""The Gaussian mechanism of DP-SGD as an optax transformation."""

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import dp_event

from jaxdp.transforms.grids import Grid, GridSchedule
from jaxdp.transforms.noise import trees
from jaxdp.transforms.noise.correlation import CorrelatedNoise
from jaxdp.transforms.noise.keys import check_key, is_traced, new_seed, stream
from jaxdp.transforms.noise.reuse import check_shards
from jaxdp.transforms.noise.scales import check_number, check_product, check_scale
from jaxdp.transforms.noise.schedule import NoiseSchedule

# Options of XLA for a program with noise on a CPU: `jax.jit(..., compiler_options=CPU_OPTIONS)`.
# Where the CPU has vectors of 512 bits, the cipher takes two thirds of the time with them. Bits are
# the same.
CPU_OPTIONS = {"xla_cpu_prefer_vector_width": 512}


@runtime_checkable
class HasSensitivity(Protocol):
    """An object that reports its L2 sensitivity, such as `jaxdp.clipped_grad(...)`."""

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> Any:
        """Returns the L2 sensitivity under `adjacency`."""


class PrivatizeState(NamedTuple):
    """The noise key of a run, the number of updates made (int32 scalar), and the buffers.

    The buffers are those of correlated noise, None without. They are secret, as the key is.
    """

    key: jax.Array
    step: jax.Array
    buffers: Any = None


class Privatizer(optax.GradientTransformationExtraArgs):
    """The result of `privatize`: an (init, update) pair with its privacy event."""

    clip_norm: float  # L2 bound on one example's contribution to the sum
    # Standard deviation over the clip norm, or its public schedule.
    noise_multiplier: "float | NoiseSchedule"
    divisor: float  # public, divides the noisy sum
    noise: CorrelatedNoise | None  # None is independent noise
    # The grid of sums in integers with exact noise, or None.
    grid: Grid | GridSchedule | None
    _key: jax.Array | None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A Privatizer is frozen. Call privatize again to change {name}.")

    @property
    def event(self) -> dp_event.DpEvent:
        """The event of one update, without sampling.

        Wrap it in `PoissonSampledDpEvent` for sampled batches.

        Raises:
            ValueError: The noise multiplier is a schedule, or the noise is correlated.
        """
        if callable(self.noise_multiplier):
            raise ValueError(
                "noise_multiplier is a schedule, so the event depends on the step. Use "
                "event_at(step)."
            )
        return self.event_at(0)

    def event_at(self, step: int) -> dp_event.DpEvent:
        """Returns the event of update number `step` (from 0), without sampling.

        Raises:
            ValueError: `step` is negative, or the schedule returns a multiplier that `privatize`
                would refuse. Or the noise is correlated.
        """
        if self.noise is not None:
            raise ValueError(
                "noise is correlated, so an update has no event of its own. Charge the whole run: "
                "noise.event(noise_multiplier)."
            )
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}. Updates are numbered from 0.")
        value = self.multiplier_at(step)
        # Without noise epsilon is infinite, as this event says.
        return dp_event.GaussianDpEvent(value) if value else dp_event.NonPrivateDpEvent()

    def multiplier_at(self, step: int) -> float:
        """Returns the noise multiplier of update number `step` (from 0).

        Raises ValueError for one that `privatize` would refuse.
        """
        multiplier = self.noise_multiplier
        return multiplier(step) if isinstance(multiplier, NoiseSchedule) else multiplier

    def planned(self, steps: int) -> "Privatizer":
        """Returns the privatizer of a plan of `steps` updates, as `privatize(..., steps=steps)`."""
        return privatize(
            self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            divisor=self.divisor,
            key=self._key,
            steps=steps,
            noise=self.noise,
            exact=self.grid is not None,
        )

    def init_buffers(self, sums: Any) -> Any:
        """Returns the buffers before the first update for sums of these shapes, or None."""
        if self.noise is None:
            return None
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), trees.noise_dtype(leaf)), sums
        )
        return self.noise.zeros(shapes)

    def check_step(self, step: int) -> None:
        """Raises ValueError for an update that a compiled program does not know the noise of."""
        if self.noise is not None:
            self.noise.check_step(step)
        if isinstance(self.noise_multiplier, NoiseSchedule) and step >= self.noise_multiplier.steps:
            raise ValueError(
                f"step must be below {self.noise_multiplier.steps}, got {step}, because the "
                "schedule of the noise was evaluated for that many steps. Plan more of them: "
                "planned(steps)."
            )


def privatize(
    clipped_or_sensitivity: HasSensitivity | float,
    *,
    noise_multiplier: float | Callable[[Any], Any],
    divisor: float,
    key: jax.Array | None = None,
    steps: int | None = None,
    noise: CorrelatedNoise | None = None,
    exact: bool = False,
) -> Privatizer:
    """Builds an optax transformation that adds Gaussian noise to a clipped SUM of gradients.

    It then divides the sum.

    One update maps the sum `g` over the batch to

        (g + noise_multiplier * clip_norm * N(0, I)) / divisor

    This is the step of DP-SGD (Abadi et al. 2016, Algorithm 1) with an explicit division by the
    expected batch size. In `optax.chain(privatize(...), optax.adam(1e-3))` everything after
    `privatize` is post-processing.

        grad_fn = jaxdp.clipped_grad(loss_fn, clip_norm=1.0)
        privatizer = jaxdp.privatize(grad_fn, noise_multiplier=1.1, divisor=expected_batch_size)
        optimizer = optax.chain(privatizer, optax.sgd(0.1))
        updates, state = optimizer.update(grad_fn(params, batch).grads, state, params)

    Args:
        clipped_or_sensitivity: A `jaxdp.clipped_grad(...)`, or the L2 bound on the contribution of
            one example to the sum, or any object whose `sensitivity("add_remove")` is that bound.
        noise_multiplier: Noise standard deviation over the clip norm, or a PUBLIC schedule that
            maps the step, a Python int, to it. A schedule that reads private data has no guarantee.
            Python evaluates it once for each step, and charge and noise have the same value. The
            noise is larger than the charge by a relative 2**-22.
        divisor: Public and positive, normally the expected batch size. Never the size of a
            Poisson-sampled batch.
        key: Typed noise key. With None, `init` draws 128 bits of OS entropy. Pass a key such as
            `stream(seed, "gradient noise")` to reproduce a run. Two runs on different gradients
            must never share a key, because the noise cancels in the difference of their outputs.
            Anyone can guess `jax.random.key(0)`. Where `optax.masked` or `optax.multi_transform`
            leaves out leaves, `init` derives the key of the others from it and their paths. So the
            parts of one tree have independent noise.
        steps: The number of updates of the plan, for a schedule. It is then evaluated for all of
            them here, and each multiplier must be positive. None, the default, plans 65,536 updates
            (4,096 of a schedule that returns JAX arrays) and does not check them. `update` under
            `jax.jit` knows the planned updates only, and its noise is NaN after them.
        noise: `jaxdp.correlated(...)`. Update t then adds noise_multiplier * clip_norm times row t
            of C^-1 Z, and `init` takes a pytree like the sums. All updates together are one
            release, `noise.event(noise_multiplier)`, and none has an event of its own. After
            `noise.steps` updates it raises ValueError, and under `jax.jit` the noise is NaN. None,
            the default, is independent noise.
        exact: Whether sums are int32 on the grid `privatizer.grid`, and the noise is a normal
            rounded to it, drawn by integers (`rounded_gaussian`). Sums come from
            `grad_fn.on_grid(privatizer.grid)`. The event is the same, and no rounding of floats
            is left out of it. A schedule needs `steps`, and `on_grid` the number of the update.

    Returns:
        A `Privatizer`. `update(updates, state, shardings=...)` takes the `shardings` of `gaussian`.
        `init` must run outside jit unless `key` is given. The state holds the key and a step
        counter. Step t draws `gaussian(key, ..., number=t)`, so no two of the first 2**32 steps of
        a run share noise. A run from a restored checkpoint replays the noise of the steps after it.
        Such a run must see the same gradients bit for bit, or use a new key and be charged again.
        Updates are float32 (float64 for float64 sums) whatever the dtype of the sum.

    Formal guarantees:
        Let one example change the sum by at most `clip_norm` in L2 norm. Then update t satisfies
        `event_at(t)`, up to the floating-point limits in the module docstring. That event is the
        Gaussian mechanism with the noise multiplier of step t (Dwork and Roth 2014, appendix A).
        Balle and Wang (2018) give its exact trade-off curve. The noise is `noise_multiplier *
        clip_norm` under EVERY adjacency. The accountant knows that replacing a record moves the sum
        by up to `2 * clip_norm`. With `exact`, the update is a rounding of that mechanism, and
        `jaxdp.transforms.grids` and `jaxdp.transforms.noise.rounded` have the proof. Delta grows by
        at most (1 + e^epsilon) 2^-94 for each value of each update.

        ============================  =============================================================
        case                          behaviour
        ============================  =============================================================
        noise_multiplier == 0         no noise; event is `NonPrivateDpEvent`
        clip_norm == 0                the sum is constant and needs no noise; event as configured
        noise outside of float32      ValueError unless noise_multiplier * clip_norm is from
                                      2**-100 to 2**100; `update` under jit returns NaN where a
                                      schedule gives another product
        inside `jax.vmap`             ValueError if sums differ along the axis and neither key nor
                                      step does
        inside `jax.shard_map`        ValueError unless sum and key vary over the same mesh axes:
                                      `jax.lax.psum` the sum first
        `check_vma=False`, `pmap`     ValueError, because JAX does not record what differs between
                                      devices
        clip_norm infinite            ValueError, unless noise_multiplier == 0
        NaN or inf in the sum         passed on: zero them per example before summing
                                      (`clipped_grad` does)
        None or masked leaves         passed on unchanged
        integer leaves                float32 noise; complex and boolean leaves raise TypeError
        ============================  =============================================================

    Raises:
        TypeError: `key` is an old-style uint32 key, or the clip norm, multiplier or divisor is
            traced or not real.
        ValueError: One of these numbers is negative or NaN, or `divisor` is zero or infinite. Or
            the multiplier is infinite, or the noise is not zero and the clip norm is infinite or
            takes the noise outside of float32. Or `steps` is not positive, or a multiplier of a
            planned step is one of these or 0: the message has the step. Or the noise is correlated
            and the multiplier a schedule. With `exact`: the multiplier or the clip norm is 0, the
            noise is correlated, or the divisor is so large that int32 sums would have fewer than 8
            bits for a standard deviation. `update` raises it for a schedule without `steps`.
    """
    clip_norm = _clip_norm_of(clipped_or_sensitivity)
    if not callable(noise_multiplier):
        noise_multiplier = check_scale("noise_multiplier", noise_multiplier)
    divisor = _check_divisor(divisor)
    if math.isinf(clip_norm) and noise_multiplier != 0:
        raise ValueError(
            "The clip norm is infinite, so no finite noise hides one example. Clip to a finite "
            "norm."
        )
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(
            f"steps must be an integer and at least 1, got {steps!r}. Leave it out for a constant."
        )
    multiplier = _multiplier_of(noise_multiplier, clip_norm, steps)
    _check_noise(noise, multiplier, exact)
    grid = _grid_of(clip_norm, multiplier, divisor, steps) if exact else None
    if key is not None:
        check_key(key)

    def init(params: Any) -> PrivatizeState:
        noise_key = _new_key(params) if key is None else _key_of_part(key, params)
        buffers = privatizer.init_buffers(params)
        return PrivatizeState(noise_key, jnp.zeros((), jnp.int32), buffers)

    def update(
        updates: Any,
        state: PrivatizeState,
        params: Any = None,
        *,
        shardings: Any = None,
        **extra_args: Any,
    ) -> Any:
        check_key(state.key)
        _check_sum(updates)
        if grid is not None:
            mean = _exact_mean(grid, divisor, updates, state, shardings)
            return mean, PrivatizeState(state.key, state.step + 1)
        # In float32 at least: a sum in 16 bits would round the noise away.
        total = jax.tree.map(lambda leaf: jnp.asarray(leaf, trees.noise_dtype(leaf)), updates)
        noise, buffers = _noise_of_step(privatizer, total, state, shardings)
        mean = jax.tree.map(functools.partial(_noisy_mean, divisor), total, *noise)
        return mean, PrivatizeState(state.key, state.step + 1, buffers)

    # `init` and `update` read the fields below, once they are called.
    privatizer = Privatizer(init, update)
    # Past __setattr__, which refuses changes.
    privatizer.__dict__.update(
        clip_norm=clip_norm,
        noise_multiplier=multiplier,
        divisor=divisor,
        noise=noise,
        grid=grid,
        _key=key,
    )
    return privatizer


def _check_sum(updates: Any) -> None:
    """Raises TypeError where the updates are a `ClippedSum` in place of its sum."""
    if hasattr(updates, "grads") and hasattr(updates, "losses"):
        raise TypeError(
            f"updates must be the sum of gradients, got {type(updates).__name__} with the "
            "private values of examples. Give its field: update(out.grads, state)."
        )


@functools.partial(jax.jit, inline=True)
def _noisy_mean(divisor: float, total: jax.Array, *noise: jax.Array) -> jax.Array:
    """Returns the noisy sum of a leaf over the divisor, which is public: post-processing."""
    return functools.reduce(jnp.add, noise, total) / divisor


def _noise_of_step(
    privatizer: Privatizer, total: Any, state: PrivatizeState, shardings: Any
) -> tuple[list[Any], Any]:
    """Returns the noise of this step, nothing or one tree, and the buffers of correlated noise."""
    multiplier = privatizer.noise_multiplier
    noise = privatizer.noise
    if not isinstance(multiplier, NoiseSchedule) and multiplier == 0:
        return [], state.buffers
    # Equal noise on several devices is right for a sum that they share.
    for leaf in jax.tree.leaves(total):
        check_shards(state.key, leaf, shared=True)
    std = _std_at(multiplier, privatizer.clip_norm, state.step)
    if noise is not None:
        std = _std_of_run(noise, std, state.step)
    added = trees.gaussian(state.key, total, std, number=state.step, shardings=shardings)
    buffers = state.buffers
    if noise is not None:
        added, buffers = noise.next(state.step, buffers, added)
    return [added], buffers


def _check_noise(
    noise: CorrelatedNoise | None, multiplier: "float | NoiseSchedule", exact: bool
) -> None:
    """Raises TypeError or ValueError for noise that is not correlated, or has a schedule."""
    if noise is None:
        return
    if not isinstance(noise, CorrelatedNoise):
        raise TypeError(
            f"noise must be jaxdp.correlated(strategy, steps=...), got {type(noise).__name__}."
        )
    if isinstance(multiplier, NoiseSchedule):
        raise ValueError(
            "noise_multiplier must be a number with correlated noise, whose event is that of equal "
            "noise in all steps. Got a schedule."
        )
    if exact:
        raise ValueError(
            "exact must be False with correlated noise, whose rows are sums of floats. Got True."
        )


def _clip_norm_of(clipped_or_sensitivity: HasSensitivity | float) -> float:
    if isinstance(clipped_or_sensitivity, HasSensitivity):
        # Under every adjacency, because the accountant doubles it for "replace_one".
        sensitivity = clipped_or_sensitivity.sensitivity("add_remove")
        return check_number("sensitivity('add_remove')", sensitivity)
    return check_number("clipped_or_sensitivity", clipped_or_sensitivity)


def _check_divisor(divisor: float) -> float:
    divisor = check_number("divisor", divisor)
    if divisor == 0 or math.isinf(divisor):
        raise ValueError(
            f"divisor must be positive and finite, got {divisor}. Use the expected batch size."
        )
    return divisor


def _grid_of(
    clip_norm: float,
    noise_multiplier: "float | NoiseSchedule",
    divisor: float,
    steps: int | None,
) -> Grid | GridSchedule:
    if not isinstance(noise_multiplier, NoiseSchedule):
        return Grid.of(clip_norm, noise_multiplier, divisor)
    if steps is None:  # the plan of the run makes the grids
        return GridSchedule(clip_norm)
    # One program has the grids of all steps, because a step is traced.
    multipliers = [noise_multiplier(step) for step in range(steps)]
    return GridSchedule.of(clip_norm, multipliers, divisor)


def _exact_mean(
    grid: Grid | GridSchedule,
    divisor: float,
    updates: Any,
    state: PrivatizeState,
    shardings: Any,
) -> Any:
    """Returns the noisy mean of sums of a grid, float32."""
    for leaf in jax.tree.leaves(updates):
        if jnp.result_type(leaf) != jnp.int32:
            raise TypeError(
                f"updates must be int32 sums of a grid with exact=True, got {leaf.dtype}. Sum "
                "with grad_fn.on_grid(privatizer.grid)."
            )
        check_shards(state.key, leaf, shared=True)
    # It has no form for a mesh, unlike noise of floats, so XLA divides the whole vector.
    noise = trees.rounded_gaussian(state.key, updates, grid.bits, number=state.step)
    if shardings is not None:
        noise = jax.lax.with_sharding_constraint(noise, shardings)
    # An overflow is modulo 2^32, which is post-processing.
    total = jax.tree.map(jnp.add, updates, noise)
    # The floats below are post-processing of integers.
    numbers = grid.at(state.step)
    return jax.tree.map(lambda leaf: numbers.read(leaf) / divisor, total)


def _new_key(params: Any) -> jax.Array:
    """Returns a random key. Raises ValueError under tracing."""
    if is_traced(params):
        raise ValueError(
            "privatize.init draws its key from the operating system, and under tracing the "
            "key would be a constant of the program. Call init outside jit, or pass "
            "key=stream(seed, 'gradient noise')."
        )
    return stream(new_seed(), "gradient noise")


def _key_of_part(key: jax.Array, params: Any) -> jax.Array:
    """Returns the key of the leaves that optax does not mask, `key` itself if it masks none.

    `optax.multi_transform` gives each part to a transformation of its own. With one key, leaves of
    two parts would have equal noise, and their difference none.
    """

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_masked)
    own_paths = [jax.tree_util.keystr(path) for path, node in nodes if not is_masked(node)]
    if len(own_paths) == len(nodes):
        return key
    digest = hashlib.sha256("\n".join(own_paths).encode()).digest()
    # `fold_in` takes 32 bits. With 128 of them no two parts meet by chance.
    for start in range(0, 16, 4):
        word = int.from_bytes(digest[start : start + 4], "little")
        key = jax.random.fold_in(key, jax.device_put(np.uint32(word)))
    return key


def _multiplier_of(
    noise_multiplier: float | Callable[[Any], Any],
    clip_norm: float,
    steps: int | None,
) -> "float | NoiseSchedule":
    """Returns a checked multiplier, or the schedule of a plan of `steps`."""
    if not callable(noise_multiplier):
        check_product("noise_multiplier", noise_multiplier, clip_norm)
        return noise_multiplier
    if isinstance(noise_multiplier, NoiseSchedule):
        schedule = noise_multiplier.planned(clip_norm, steps or noise_multiplier.steps)
    else:
        schedule = NoiseSchedule(noise_multiplier, clip_norm, steps)
    if steps is not None:
        schedule.check()
    return schedule


def _std_of_run(noise: CorrelatedNoise, std: float, step: jax.Array) -> Any:
    """Returns the standard deviation of a step, NaN for a traced step after the run.

    Raises ValueError for one that is not traced.
    """
    if isinstance(step, jax.core.Tracer):
        # A traced step can raise nothing, and NaN shows that the run is over.
        return jnp.where(step < noise.steps, std, math.nan)
    noise.check_step(int(jax.device_get(step)))
    return std


def _std_at(
    multiplier: "float | NoiseSchedule",
    clip_norm: float,
    step: jax.Array,
) -> Any:
    """Returns the standard deviation of a step, NaN for a traced step outside of the plan."""
    if not isinstance(multiplier, NoiseSchedule):
        return multiplier * clip_norm
    if not isinstance(step, jax.core.Tracer):
        return multiplier.std(int(jax.device_get(step)))
    is_planned = (step >= 0) & (step < multiplier.steps)
    # The row behind the planned steps is NaN.
    return jnp.asarray(multiplier.table())[jnp.where(is_planned, step, multiplier.steps)]
