"""Secrets, noise on pytrees, and `privatize`, which is the Gaussian mechanism as an optax
transformation.

**Keys.** All randomness behind a guarantee starts from 128 bits of operating-system entropy
(`new_seed`). `stream` derives one key per purpose from them. Noise keys are "chacha12" keys of 256
bits (`jaxdp.transforms.chacha`), so `jax.random` and this module draw from ChaCha12 under them.
They are independent under `jax.vmap`. A key is for the calls of one function of this module, each
with a `number` of its own, and for nothing else. The number is part of the cipher's nonce. Keys of
JAX's own generators are accepted. The noise is then as strong as their generator and has its traps:
under `jax.vmap`, the bits of "rbg" keys depend on the first key only. "threefry2x32" keys, of 64
bits, are for augmentation and dropout.

**Threat model.** Noise is pseudo-random if ChaCha12 and HMAC-SHA256 are pseudo-random functions.
ChaCha12 is the cipher of RFC 8439 with 12 rounds instead of 20. The best published attacks reach 7
rounds and a little more, and are far from practical (Aumasson, "Too much crypto", 2019). Rust's
standard generator has 12 rounds too. They cost two thirds of 20. The seed has 128 bits, so a search
for it takes about 2**127 trials. Noise is computed in floating point, which the (epsilon, delta) of
the ledger does not cover:

* *Sampling.* A float32 normal from one uniform takes at most 2**23 values and stops at 5.4 standard
  deviations. So an output can be impossible under one data set and possible under its neighbour
  (Mironov, "On significance of the least significant bits", CCS 2012). Noise is safer if each value
  combines several draws of high resolution (Holohan and Braghin, "Secure random sampling in
  differential privacy", ESORICS 2021). Here a pair of normals is (r cos t, r sin t) with a radius
  of 64 bits and an angle of 67 (Box and Muller, 1958). Both are computed to the relative precision
  of a float near zero, and so are the normals. Rounded to float32, radius and angle still have more
  than 2**46 combinations for the 2**32 floats. Normals end at 9.49 standard deviations. The delta
  of the ledger does not count the tail beyond, at most 2**-65 per value. Laplace noise ends at 5678
  scales. A claim of delta = 0 omits the mass beyond, at most 2**-8190 per value. Cauchy noise ends
  at the largest float.
* *Addition.* `value + noise` is rounded to a float whose last bits depend on `value` (Mironov 2012;
  Haney et al., "Precision-based attacks and interval refining", 2022; Jin et al., "Are we there
  yet? Timing and floating-point attacks", 2022). This is NOT mitigated. A proof needs values that
  are first rounded to a grid, which raises the sensitivity with the square root of the number of
  parameters. Publish at reduced precision if the adversary reads raw bits. `discrete_laplace` is
  the exception, because it adds integers to integers. Its logarithms are float32. An enumeration of
  them at the largest scale gives each integer within 6 scales its probability to a relative 2**-14.
* *Summation.* When one example changes, a float32 sum of clipped gradients can move by a rounding
  error more than the clip norm (Casacuberta et al., "Widespread underestimation of sensitivity",
  CCS 2022).
* *Time.* Noise takes the same operations for every key, except one more draw when 32 bits of a
  Laplace or Cauchy value are all zero. Nothing else about timing is promised.

**Cost.** All leaves of a dtype are slices of one vector, so a tree compiles one program. The
normals of a vector are functions of the key and their index only. A block of the cipher gives two
pairs of float32 normals, or one of float64. On a CPU, XLA fuses the cipher with them. What a block
gives is one complex number there, because XLA would compute the cipher once for each vector.
`CPU_OPTIONS` makes it quicker.

**Several values, one key.** Equal noise on two values reveals their difference. So noise is refused
where the values differ and neither key nor number does: along an axis of `jax.vmap`, and between
devices inside `jax.shard_map`. Equal noise is right for a sum that devices share, such as the
result of `jax.lax.psum`. Inside `jax.shard_map` with `check_vma=False` and inside `jax.pmap`, JAX
does not record what differs, so noise is refused there. A loop repeats what its body says: give
each turn a number of its own.

**Compiler.** The options of XLA that flush subnormal numbers, reorder sums or approximate functions
change the last digits of noise. They do not make it smaller. `jaxdp.transforms.compiler` names the
options that are refused.
"""

import contextlib
import functools
import hmac
import itertools
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import dp_event
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp.transforms import chacha, forms, normals, opaque, shards
from jaxdp.transforms.compiler import check_options
from jaxdp.transforms.kernels import normals as kernel

_GENERATORS: dict[str, tuple[Any, int]] = {
    "chacha12": (chacha.CHACHA12, 8),
    "threefry2x32": ("threefry2x32", 2),
}
_SEED_BYTES = 16
LARGEST_DISCRETE_SCALE = 2.0**18
# Options of XLA for a program with noise on a CPU: `jax.jit(..., compiler_options=CPU_OPTIONS)`.
# Where the CPU has vectors of 512 bits, the cipher takes two thirds of the time with them. Bits are
# the same.
CPU_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
# The charge of a schedule is a float64 and its noise a float32. This exceeds the rounding of the
# noise and its scale.
_ROUNDED_UP = 1 + 2.0**-22
# The steps that a compiled update knows of a schedule whose number of steps is not given, and of
# one that calls JAX, where a step takes about half a millisecond.
_STEPS, _STEPS_OF_JAX = 2**16, 2**12
# The steps whose multipliers are stored together.
_BLOCK_OF_STEPS = 2**10
# Between the scale of noise and the smallest or largest float of its dtype, in powers of two. With
# less room, underflow or overflow visibly changes the distribution.
_ROOM_BELOW, _ROOM_ABOVE = 26, 28
# The largest number of 32-bit words that are drawn until one is not zero.
_MOST_WORDS = 256
# The most values of one vector of noise, which bounds the memory beside the leaves to 128 MiB or
# one leaf.
_LARGEST_VECTOR = 2**25
# XLA-CPU computes blocks of the cipher one by one, which takes five times as long, unless their
# number is a multiple.
_TOGETHER = 8
# So few blocks take no time, and the small code of `chacha.block` is traced and compiled sooner.
_FEW = 2**8
# Positions in a vector of whole blocks are int32.
_LARGEST_LEAF = 2**31 - 4 * _TOGETHER


@runtime_checkable
class HasSensitivity(Protocol):
    """An object that reports its L2 sensitivity, such as `jaxdp.clipped_grad(...)`."""

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> Any:
        """Returns the L2 sensitivity under `adjacency`."""


def new_seed() -> bytes:
    """Returns 16 bytes (128 bits) from the operating system's entropy pool.

    Anyone who learns the seed can subtract the noise. Protect the seed at least as well as the
    private data.
    """
    return secrets.token_bytes(_SEED_BYTES)


def stream(seed: bytes, purpose: str, *, impl: str = "chacha12") -> jax.Array:
    """Derives the typed key [] of one purpose from a seed.

    The key words are the first bytes of HMAC-SHA256(seed, domain || impl || purpose). That is one
    block of HKDF-Expand (RFC 5869) with the seed as its pseudo-random key. If the seed is from
    `new_seed` and HMAC-SHA256 is pseudo-random, streams of different purposes are independent, and
    a key reveals neither another key nor the seed.

    Args:
        seed: At least 16 bytes of full entropy, such as `new_seed()`.
        purpose: The use of the stream, e.g. "gradient noise". Choose a different purpose for each
            use.
        impl: "chacha12" (256 bits, for noise) or "threefry2x32" (64 bits, cheaper for many keys of
            few bits each, for augmentation and dropout).

    Raises:
        TypeError: `seed` is not bytes or `purpose` is not a string.
        ValueError: `seed` is too short, `purpose` is empty, or `impl` is unknown.
    """
    if not isinstance(seed, bytes):
        raise TypeError(
            f"seed must be bytes, got {type(seed).__name__}. Use jaxdp.transforms.noise.new_seed()."
        )
    if len(seed) < _SEED_BYTES:
        raise ValueError(
            f"seed must have at least {_SEED_BYTES} bytes, got {len(seed)}. Use new_seed()."
        )
    if not isinstance(purpose, str):
        raise TypeError(f"purpose must be a string, got {type(purpose).__name__}.")
    if not purpose:
        raise ValueError("purpose is empty. Name the use of the stream, e.g. 'gradient noise'.")
    if impl not in _GENERATORS:
        raise ValueError(f"impl must be one of {sorted(_GENERATORS)}, got {impl!r}.")
    generator, size = _GENERATORS[impl]
    message = b"\0".join([b"jaxdp stream v1", impl.encode(), purpose.encode()])
    words = np.frombuffer(hmac.digest(seed, message, "sha256"), dtype="<u4")[:size]
    key: jax.Array = jax.random.wrap_key_data(
        jax.device_put(words.astype(np.uint32)), impl=generator
    )
    return key


def gaussian(
    key: jax.Array,
    tree: Any,
    std: float | jax.Array,
    *,
    number: int | jax.Array = 0,
    shardings: Any = None,
) -> Any:
    """Draws noise N(0, std**2) shaped like `tree`.

    Args:
        key: Typed key of shape ().
        tree: Pytree of real arrays or `jax.ShapeDtypeStruct`s. None leaves stay None. Values are
            not read.
        std: Standard deviation, 0 or a scalar from 2**-100 to 2**100 (2**-996 to 2**996 for float64
            noise). A traced value is not checked.
        number: Integer scalar from 0 to 2**32 - 1. It is part of the nonce of the cipher, so draws
            of different numbers under one key are independent. It saves a program a key for each
            step. A traced number has at most 32 bits, and negative ones stand for those from 2**31.
        shardings: Pytree like `tree` of `jax.sharding.NamedSharding`s of one mesh with Auto axes.
            Each device then computes its part of the noise, equal up to rounding to what it is
            without shardings, and sends none. None, the default, leaves the division to XLA, and
            devices exchange what they have computed.

    Returns:
        A pytree like `tree` in float32, or float64 for float64 leaves. The noise of a leaf depends
        on the sizes and dtypes of all leaves.

    Raises:
        TypeError: `key` is an old-style uint32 key, or a leaf is not real, or `number` is not an
            integer or is traced with 64 bits.
        ValueError: `key`, `std` or `number` is not a scalar or outside its range, or a leaf has
            almost 2**31 values. A leaf or `std` differs along an axis of `jax.vmap` where neither
            `key` nor `number` does. Inside `jax.shard_map`: a leaf varies over a mesh axis and
            `key` does not, or `check_vma=False`. Inside `jax.pmap`.
        RuntimeError: `XLA_FLAGS` has options that `jaxdp.transforms.compiler` refuses.
    """
    number, layout = _check_number_of_draw(number), jax.tree.leaves(shardings)
    divided = any(not sharding.is_fully_replicated for sharding in layout)
    draw = (
        functools.partial(_normals_in_parts, number, layout)
        if divided
        else functools.partial(_normals, number)
    )
    return _scaled(key, number, tree, "std", std, draw)


def laplace(
    key: jax.Array, tree: Any, scale: float | jax.Array, *, number: int | jax.Array = 0
) -> Any:
    """Draws Laplace noise of density exp(-|x| / scale) / (2 scale) shaped like `tree`.

    Arguments, result and errors are as in `gaussian`. Each value is the difference of two
    independent exponentials -log(u). The uniform u is drawn in words of 32 bits until one word is
    not zero, and one more word follows. So u has full relative precision. Each exponential ends
    where 8192 bits in a row are zero. So in exact arithmetic a mechanism that draws n values has a
    delta of at most n 2**-8190 in addition to its pure epsilon.
    """
    number = _check_number_of_draw(number)
    return _scaled(
        key, number, tree, "scale", scale, _cut(functools.partial(_standard_laplace, number))
    )


def discrete_laplace(
    key: jax.Array, tree: Any, scale: float | jax.Array, *, number: int | jax.Array = 0
) -> Any:
    """Draws int32 noise with P(k) proportional to exp(-|k| / scale), shaped like `tree`.

    Added to integers of L1 sensitivity s, it gives (s / scale)-DP (Ghosh, Roughgarden, Sundararajan
    2009). It leaves no trace of the exact value in the last digits, unlike floating-point Laplace
    noise (Mironov 2012). Each value is the difference of two independent geometrics, which are the
    integer parts of exponentials as in `laplace`.

    Args:
        key, tree, number: As in `gaussian`.
        scale: Positive and at most `LARGEST_DISCRETE_SCALE`. Every integer within 22 scales is then
            a float32 and every geometric an int32.

    Raises:
        TypeError, ValueError: As in `gaussian`. Also ValueError if scale is outside its range.
    """
    if not isinstance(scale, jax.core.Tracer) and not 0 < scale <= LARGEST_DISCRETE_SCALE:
        raise ValueError(f"scale must be in (0, {LARGEST_DISCRETE_SCALE:g}], got {scale!r}.")
    number = _check_number_of_draw(number)
    return _drawn(
        key, number, scale, tree, _cut(functools.partial(_discrete_laplace, number, scale))
    )


def cauchy(
    key: jax.Array, tree: Any, scale: float | jax.Array, *, number: int | jax.Array = 0
) -> Any:
    """Draws Cauchy noise of density scale / (pi (scale**2 + x**2)) shaped like `tree`.

    Arguments, result and errors are as in `gaussian`. Each value is the mean of two independent
    Cauchy draws, which is again Cauchy (a 1-stable law). `scale` is half of the interquartile
    range. The variance is infinite. A value that exceeds the largest float becomes infinite.
    """
    number = _check_number_of_draw(number)
    return _scaled(
        key, number, tree, "scale", scale, _cut(functools.partial(_standard_cauchy, number))
    )


class PrivatizeState(NamedTuple):
    """State of `privatize`: the noise key of the run and the number of updates made (int32
    scalar).
    """

    key: jax.Array
    step: jax.Array


class Privatizer(optax.GradientTransformationExtraArgs):
    """The result of `privatize`: an (init, update) pair with its privacy event."""

    clip_norm: float  # L2 bound on one example's contribution to the sum
    noise_multiplier: (
        "float | NoiseSchedule"  # standard deviation over the clip norm, or its public schedule
    )
    divisor: float  # public, divides the noisy sum
    _key: jax.Array | None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A Privatizer is frozen. Call privatize again to change {name}.")

    @property
    def event(self) -> dp_event.DpEvent:
        """The event of one update, without sampling. Wrap it in `PoissonSampledDpEvent` for sampled
        batches.

        Raises:
            ValueError: The noise multiplier is a schedule.
        """
        if callable(self.noise_multiplier):
            raise ValueError(
                "noise_multiplier is a schedule, so the event depends on the step. Use "
                "event_at(step)."
            )
        return self.event_at(0)

    def event_at(self, step: int) -> dp_event.DpEvent:
        """Returns the event of update number `step` (from 0), without sampling, for a constant or a
        schedule.

        Raises:
            ValueError: `step` is negative, or the schedule returns a multiplier that `privatize`
                would refuse.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}. Updates are numbered from 0.")
        multiplier = self.noise_multiplier
        value = multiplier(step) if isinstance(multiplier, NoiseSchedule) else multiplier
        return dp_event.GaussianDpEvent(value) if value else dp_event.NonPrivateDpEvent()

    def planned(self, steps: int) -> "Privatizer":
        """Returns the privatizer of a plan of `steps` updates, as `privatize(..., steps=steps)`."""
        return privatize(
            self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            divisor=self.divisor,
            key=self._key,
            steps=steps,
        )

    def check_step(self, step: int) -> None:
        """Raises ValueError for an update that a compiled program does not know the noise of."""
        if isinstance(self.noise_multiplier, NoiseSchedule) and step >= self.noise_multiplier.steps:
            raise ValueError(
                f"step must be below {self.noise_multiplier.steps}, got {step}, because the "
                "schedule of the noise was evaluated for that many steps. Plan more of them: "
                "planned(steps)."
            )


class NoiseSchedule:
    """A public schedule of noise multipliers. Charge and noise of a step have one value, which
    Python computes once.

    A program that computed it too could differ: `1 + t**2 / 1e10` overflows int32 at t = 46,341.

    """

    def __init__(self, multiplier: Callable[[int], Any], clip_norm: float, steps: int | None):
        self._multiplier, self._clip_norm, self._steps = multiplier, clip_norm, steps
        self._blocks: dict[
            int, np.ndarray
        ] = {}  # evaluated values by number of the block, NaN where not evaluated
        self._calls_jax = False  # as far as it is evaluated

    @property
    def steps(self) -> int:
        """The number of steps that compiled programs know."""
        if self._steps is None:
            self._values(range(1))
            self._steps = _STEPS_OF_JAX if self._calls_jax else _STEPS
        return self._steps

    def planned(self, clip_norm: float, steps: int) -> "NoiseSchedule":
        """Returns a schedule for a clip norm and a number of steps, with the values that are
        known.
        """
        planned = NoiseSchedule(self._multiplier, clip_norm, steps)
        planned._blocks = self._blocks
        return planned

    def __call__(self, step: int) -> float:
        """Returns the multiplier of a step in float64. Raises ValueError for one that `privatize`
        refuses.
        """
        name = f"noise_multiplier({step})"
        value = _check_scale(name, float(self._values(range(step, step + 1))[0]))
        check_product(name, value, self._clip_norm)
        return value

    def check(self) -> None:
        """Raises ValueError unless every step has noise."""
        lost = np.flatnonzero(~(self._values(range(self.steps)) > 0) | np.isnan(self.table()[:-1]))
        if lost.size and not self(step := int(lost[0])):
            raise ValueError(
                f"noise_multiplier({step}) must be positive, got 0.0: a schedule has noise in "
                f"every step of its plan of {self.steps}. Plan fewer steps, or give "
                "noise_multiplier=0 for a run without privacy."
            )

    def std(self, step: int) -> np.float32:
        """Returns the standard deviation of the noise of a step, a little more than the charge."""
        return np.float32(self(step) * self._clip_norm * _ROUNDED_UP)

    def table(self) -> np.ndarray:
        """Returns float32 [steps + 1] standard deviations of all steps, NaN for unusable ones and
        behind the end.
        """
        values = np.append(self._values(range(self.steps)), math.nan)
        low, high = range_of(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            stds = values * self._clip_norm
            lost = (values != 0) & (self._clip_norm != 0) & ~((stds >= low) & (stds <= high))
            usable = (values >= 0) & np.isfinite(values) & ~lost
            return np.where(usable, stds * _ROUNDED_UP, math.nan).astype(np.float32)

    def _values(self, steps: range) -> np.ndarray:
        """Returns the multipliers of steps in float64, as the schedule gives them."""
        blocks = []
        for number in range(
            steps.start // _BLOCK_OF_STEPS, (steps.stop - 1) // _BLOCK_OF_STEPS + 1
        ):
            if number not in self._blocks:
                self._blocks[number] = np.full(_BLOCK_OF_STEPS, math.nan)
            blocks.append(self._blocks[number])
            first = number * _BLOCK_OF_STEPS
            places = range(max(0, steps.start - first), min(_BLOCK_OF_STEPS, steps.stop - first))
            missing = [place for place in places if math.isnan(blocks[-1][place])]
            if missing:
                with (
                    jax.ensure_compile_time_eval()
                ):  # a schedule may call JAX, and an update may be traced
                    for place in missing:
                        value = self._multiplier(first + place)
                        self._calls_jax |= isinstance(value, jax.Array)
                        blocks[-1][place] = _real(f"noise_multiplier({first + place})", value)
        start = steps.start % _BLOCK_OF_STEPS
        return np.concatenate(blocks)[start : start + len(steps)]


def privatize(
    clipped_or_sensitivity: HasSensitivity | float,
    *,
    noise_multiplier: float | Callable[[Any], Any],
    divisor: float,
    key: jax.Array | None = None,
    steps: int | None = None,
) -> Privatizer:
    """Builds an optax transformation that adds Gaussian noise to a clipped SUM of gradients and
    divides it.

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
            Anyone can guess `jax.random.key(0)`.
        steps: The number of updates of the plan, for a schedule. It is then evaluated for all of
            them here, and each multiplier must be positive. None, the default, plans 65,536 updates
            (4,096 of a schedule that returns JAX arrays) and does not check them. `update` under
            `jax.jit` knows the planned updates only, and its noise is NaN after them.

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
        by up to `2 * clip_norm`.

        ============================  ==================================================================
        case                          behaviour
        ============================  ==================================================================
        noise_multiplier == 0         no noise; event is `NonPrivateDpEvent`
        clip_norm == 0                the sum is constant and needs no noise; event as configured
        noise outside of float32      ValueError unless noise_multiplier * clip_norm is from 2**-100 to 2**100; `update`
                                      under jit returns NaN where a schedule gives another product
        inside `jax.vmap`             ValueError if sums differ along the axis and neither key nor step does
        inside `jax.shard_map`        ValueError unless sum and key vary over the same mesh axes: `jax.lax.psum` the
                                      sum first
        `check_vma=False`, `pmap`     ValueError, because JAX does not record what differs between devices
        clip_norm infinite            ValueError, unless noise_multiplier == 0
        NaN or inf in the sum         passed on: zero them per example before summing (`clipped_grad` does)
        None or masked leaves         passed on unchanged
        integer leaves                float32 noise; complex and boolean leaves raise TypeError
        ============================  ==================================================================

    Raises:
        TypeError: `key` is an old-style uint32 key, or the clip norm, multiplier or divisor is
            traced or not real.
        ValueError: One of these numbers is negative or NaN, or `divisor` is zero or infinite. Or
            the multiplier is infinite, or the noise is not zero and the clip norm is infinite or
            takes the noise outside of float32. Or `steps` is not positive, or a multiplier of a
            planned step is one of these or 0: the message has the step.
    """
    if isinstance(clipped_or_sensitivity, HasSensitivity):
        clip_norm = _check_number(
            "sensitivity('add_remove')", clipped_or_sensitivity.sensitivity("add_remove")
        )
    else:
        clip_norm = _check_number("clipped_or_sensitivity", clipped_or_sensitivity)
    if not callable(noise_multiplier):
        noise_multiplier = _check_scale("noise_multiplier", noise_multiplier)
    divisor = _check_number("divisor", divisor)
    if divisor == 0 or math.isinf(divisor):
        raise ValueError(
            f"divisor must be positive and finite, got {divisor}. Use the expected batch size."
        )
    if math.isinf(clip_norm) and noise_multiplier != 0:
        raise ValueError(
            "The clip norm is infinite, so no finite noise hides one example. Clip to a finite "
            "norm."
        )
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(
            f"steps must be an integer and at least 1, got {steps!r}. Leave it out for a constant."
        )
    multiplier: float | NoiseSchedule
    if not callable(noise_multiplier):
        check_product("noise_multiplier", noise_multiplier, clip_norm)
        multiplier = noise_multiplier
    elif isinstance(noise_multiplier, NoiseSchedule):
        multiplier = noise_multiplier.planned(clip_norm, steps or noise_multiplier.steps)
    else:
        multiplier = NoiseSchedule(noise_multiplier, clip_norm, steps)
    if steps is not None and isinstance(multiplier, NoiseSchedule):
        multiplier.check()
    if key is not None:
        check_key(key)

    def init(params: Any) -> PrivatizeState:
        if key is None and any(
            isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)
        ):
            raise ValueError(
                "privatize.init draws its key from the operating system, and under tracing the "
                "key would be a constant"
                " of the program. Call init outside jit, or pass key=stream(seed, 'gradient "
                "noise')."
            )
        own = stream(new_seed(), "gradient noise") if key is None else key
        return PrivatizeState(own, jnp.zeros((), jnp.int32))

    def std_at(step: jax.Array) -> Any:
        if not isinstance(multiplier, NoiseSchedule):
            return multiplier * clip_norm
        if not isinstance(step, jax.core.Tracer):
            return multiplier.std(int(jax.device_get(step)))
        known = (step >= 0) & (step < multiplier.steps)
        return jnp.asarray(multiplier.table())[jnp.where(known, step, multiplier.steps)]

    def update(
        updates: Any,
        state: PrivatizeState,
        params: Any = None,
        *,
        shardings: Any = None,
        **extra_args: Any,
    ) -> Any:
        check_key(state.key)
        total = jax.tree.map(lambda leaf: jnp.asarray(leaf, _noise_dtype(leaf)), updates)
        if isinstance(multiplier, NoiseSchedule) or multiplier > 0:
            for leaf in jax.tree.leaves(total):
                _check_shards(state.key, leaf, shared=True)
            noise = gaussian(
                state.key, total, std_at(state.step), number=state.step, shardings=shardings
            )
            total = jax.tree.map(jnp.add, total, noise)
        return jax.tree.map(lambda leaf: leaf / divisor, total), PrivatizeState(
            state.key, state.step + 1
        )

    privatizer = Privatizer(init, update)
    privatizer.__dict__.update(
        clip_norm=clip_norm, noise_multiplier=multiplier, divisor=divisor, _key=key
    )
    return privatizer


Draw = Callable[
    [jax.Array, list[Any], list[int]], Sequence[jax.Array]
]  # of (key, all leaves, indices of a group)


def _drawn(key: jax.Array, number: jax.Array, scale: Any, tree: Any, draw: Draw) -> Any:
    """Draws one group of leaves after the other. One group has the key itself, and several have its
    children.
    """
    check_key(key)
    check_options()
    leaves, treedef = jax.tree.flatten(tree)
    for value in (*leaves, scale):
        _check_shards(key, value)
    key = _of_one_value(key, number, [*leaves, scale])
    groups = _groups(leaves)
    for group, own_key in zip(
        groups, jax.random.split(key, len(groups)) if len(groups) > 1 else [key], strict=False
    ):
        for i, part in zip(group, draw(own_key, leaves, group), strict=True):
            leaves[i] = part
    return jax.tree.unflatten(treedef, leaves)


def _cut(draw: Callable[[jax.Array, int, Any], jax.Array]) -> Draw:
    """Draws one vector for a group by `draw(key, size, dtype)` and cuts it into leaves, because a
    draw is compiled.
    """

    def cut(key: jax.Array, leaves: list[Any], group: list[int]) -> list[jax.Array]:
        shapes = [jnp.shape(leaves[i]) for i in group]
        sizes = [math.prod(shape) for shape in shapes]
        vector = draw(key, sum(sizes), _noise_dtype(leaves[group[0]]))
        return _shaped(_pieces(vector, sizes), shapes)

    return cut


def _pieces(vector: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Cuts a vector into vectors of the given sizes. What is left is dropped."""
    # Without the barrier XLA may compute the vector once for each piece.
    whole = lax.optimization_barrier(vector)
    ends = np.cumsum(sizes).tolist()
    return [lax.slice(whole, (end - size,), (end,)) for end, size in zip(ends, sizes, strict=True)]


def _shaped(pieces: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _groups(leaves: list[Any]) -> list[list[int]]:
    """Splits the indices of leaves by dtype, and where a vector would exceed `_LARGEST_VECTOR`
    values.
    """
    groups: list[list[int]] = []
    room: dict[Any, tuple[int, list[int]]] = {}
    for i, leaf in enumerate(leaves):
        dtype, size = _noise_dtype(leaf), math.prod(jnp.shape(leaf))
        if size > _LARGEST_LEAF:
            raise ValueError(
                f"A leaf has {size} values, but noise has at most {_LARGEST_LEAF}. Split the leaf."
            )
        left, group = room.get(dtype, (0, []))
        if not group or size > left:
            left, group = _LARGEST_VECTOR, []
            groups.append(group)
        group.append(i)
        room[dtype] = left - size, group
    return groups


def _of_one_value(key: jax.Array, number: jax.Array, values: list[Any]) -> jax.Array:
    """Returns the key. Raises ValueError where `jax.vmap` gives one key and number to several of
    the values.
    """
    traced = [
        jax.lax.stop_gradient(value) for value in values if isinstance(value, jax.core.Tracer)
    ]
    return _checked(key, number, traced) if traced else key


@jax.custom_batching.custom_vmap
def _checked(key: jax.Array, number: jax.Array, values: list[jax.Array]) -> jax.Array:
    return key


@_checked.def_vmap
def _checked_of_several(
    size: int, several: Any, key: jax.Array, number: jax.Array, values: list[jax.Array]
) -> tuple[jax.Array, bool]:
    own_key, own_number, differ = several
    if any(differ) and not (own_key or own_number):
        raise ValueError(
            f"key and number are the same for {size} values along an axis of jax.vmap, so all get "
            "the same noise, and the difference of two results has none. Map over keys too, such "
            "as jax.random.split(key, size), or over numbers. To release a sum over the axis, sum "
            "before the noise."
        )
    return _checked(key, number, values), own_key  # again, for an outer jax.vmap


def _scaled(
    key: jax.Array, number: jax.Array, tree: Any, name: str, scale: float | jax.Array, draw: Draw
) -> Any:
    check_key(key)
    if jnp.ndim(scale) != 0:
        raise ValueError(
            f"{name} must be one scalar for the whole tree, got shape {jnp.shape(scale)}."
        )
    if not isinstance(scale, jax.core.Tracer):
        scale = _check_scale(name, scale)
        for dtype in sorted({_noise_dtype(leaf) for leaf in jax.tree.leaves(tree)}, key=str):
            _check_carried(name, scale, dtype)
    return jax.tree.map(
        lambda x: x * jnp.asarray(scale, x.dtype), _drawn(key, number, scale, tree, draw)
    )


def _normals(
    number: jax.Array, key: jax.Array, leaves: list[Any], group: list[int]
) -> list[jax.Array]:
    shapes = [jnp.shape(leaves[i]) for i in group]
    sizes = tuple(math.prod(shape) for shape in shapes)
    return _shaped(_standard_normals(number, key, sizes, _noise_dtype(leaves[group[0]])), shapes)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _standard_normals(
    number: jax.Array, key: jax.Array, sizes: tuple[int, ...], dtype: Any
) -> list[jax.Array]:
    """Draws vectors of normals by Box and Muller's method, with 64 bits for the radius and 3 + 64
    for the angle.

    They are the pieces of one vector. Its value v is value v % n of block v // n of the cipher,
    where a block gives n. A form may return a longer vector than it is asked for, because cutting
    it to size would copy it once more.
    """

    def pieces_by(form: Callable[..., jax.Array], **options: Any) -> Callable[..., list[jax.Array]]:
        return lambda cipher_key, number: _pieces(
            form(cipher_key, number, sum(sizes), **options), sizes
        )

    platforms = {"cpu": pieces_by(_normals_on_cpu, dtype=dtype)}
    kernels = {}
    if dtype == jnp.float32:
        platforms["tpu"] = pieces_by(kernel.standard_normals_by_xla)
        kernels["tpu"] = pieces_by(kernel.standard_normals)
    by_xla = pieces_by(_normals_by_xla, dtype=dtype)
    pieces: list[jax.Array] = forms.by_platform(
        _cipher_key(key), number, default=by_xla, kernels=kernels, **platforms
    )
    return pieces


def _normals_on_cpu(
    cipher_key: jax.Array, number: jax.Array, size: int, *, dtype: Any
) -> jax.Array:
    blocks = _blocks(size, dtype)
    if blocks > _FEW:
        return _normals_by_xla(cipher_key, number, size, dtype=dtype, on_cpu=True)
    pairs = normals.PAIRS[dtype.itemsize]
    words = chacha.block(cipher_key, (lax.iota(jnp.uint32, blocks), number, 0, chacha.NOISE))
    words = words[: pairs * normals.WORDS].reshape(pairs, normals.WORDS, blocks)
    values = jnp.stack(normals.pair(list(words.swapaxes(0, 1)), dtype))  # [2, pairs, blocks]
    return values.transpose(2, 1, 0).reshape(-1)


def _normals_by_xla(
    cipher_key: jax.Array, number: jax.Array, size: int, *, dtype: Any, on_cpu: bool = False
) -> jax.Array:
    packs = on_cpu and dtype == jnp.float32
    once = _in_one_turn if on_cpu else _behind_barrier
    # XLA-CPU takes twice as long where it computes the counters and the cipher in one program.
    counters = lax.iota(jnp.uint32, _blocks(size, dtype))

    def draw(first: jax.Array) -> Any:
        words = chacha.unrolled_block(cipher_key, (counters + first, number, 0, chacha.NOISE))
        pairs = [
            lax.complex(*normals.pair(words[start : start + normals.WORDS], dtype))
            for start in range(0, normals.PAIRS[dtype.itemsize] * normals.WORDS, normals.WORDS)
        ]
        return _packed(pairs) if packs else pairs

    with jax.enable_x64(True) if packs else contextlib.nullcontext():
        return _flat(once(cipher_key, draw))


def _blocks(size: int, dtype: Any) -> int:
    """Returns the number of blocks that give `size` values, a multiple of `_TOGETHER`."""
    together = 2 * normals.PAIRS[dtype.itemsize] * _TOGETHER
    return _TOGETHER * max(1, -(-size // together))


def _behind_barrier(cipher_key: jax.Array, draw: Callable[[jax.Array], Any]) -> Any:
    """Returns `draw(0)`, which XLA computes once, and not again for each of its readers."""
    return lax.optimization_barrier(draw(jnp.uint32(0)))


def _in_one_turn(cipher_key: jax.Array, draw: Callable[[jax.Array], Any]) -> Any:
    """Does what `_behind_barrier` does by a loop of one turn, because XLA-CPU removes barriers
    before it fuses.

    XLA cannot know that the loop has one turn, and that `draw` is constant.
    """
    zero = opaque.zero(cipher_key)  # varies over the same mesh axes as the key
    shapes = jax.eval_shape(draw, jax.ShapeDtypeStruct((), jnp.uint32))
    none = jax.tree.map(lambda x: jnp.full(x.shape, zero.astype(x.dtype)), shapes)
    return lax.fori_loop(jnp.uint32(0), zero + 1, lambda first, _: draw(first), none)


def _packed(pairs: Sequence[jax.Array]) -> jax.Array:
    """Returns two complex64 arrays as one complex128 array of their bits.

    XLA-CPU computes the cipher once for each array that it fills.
    """

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.uint32).astype(jnp.uint64)

    halves = (bits(x.real) | (bits(x.imag) << jnp.uint64(32)) for x in pairs)
    return lax.complex(*(lax.bitcast_convert_type(half, jnp.float64) for half in halves))


def _flat(found: Any) -> jax.Array:
    """Returns the normals block by block."""
    if isinstance(found, jax.Array):
        pairs = [lax.bitcast_convert_type(half, jnp.float32) for half in (found.real, found.imag)]
    else:
        pairs = [jnp.stack([x.real, x.imag], axis=-1) for x in found]
    return jnp.stack(pairs, axis=1).reshape(-1)


def _cipher_key(key: jax.Array) -> jax.Array:
    own = jax.random.key_impl(key) == chacha.CHACHA12
    words = jax.random.key_data(key) if own else jax.random.bits(key, (8,), jnp.uint32)
    # XLA would compute the noise of a constant key as it compiles.
    kept: jax.Array = lax.optimization_barrier(words)
    return kept


def _normals_at(
    cipher_key: jax.Array,
    number: jax.Array,
    counters: jax.Array,
    own: jax.Array,
    *,
    dtype: Any,
    on_cpu: bool = False,
) -> jax.Array:
    """Returns value `own` of each block, [n] for uint32 counters and own [n]."""

    def of_words(words: Any) -> jax.Array:
        first = list(words[: normals.WORDS])
        if normals.PAIRS[dtype.itemsize] > 1:
            second = list(words[normals.WORDS : 2 * normals.WORDS])
            first = [jnp.where(own < 2, *both) for both in zip(first, second, strict=True)]
        x, y = normals.pair(first, dtype)
        return jnp.where(own % 2 == 0, x, y)

    def draw(first: jax.Array) -> jax.Array:
        inputs = (counters + first, number, 0, chacha.NOISE)
        return of_words(chacha.unrolled_block(cipher_key, inputs))

    if on_cpu and counters.size <= _FEW:
        return of_words(chacha.block(cipher_key, (counters, number, 0, chacha.NOISE)))
    values: jax.Array = (_in_one_turn if on_cpu else _behind_barrier)(cipher_key, draw)
    return values


def _normals_in_parts(
    number: jax.Array,
    layout: list[NamedSharding],
    key: jax.Array,
    every: list[Any],
    group: list[int],
) -> Sequence[jax.Array]:
    """Draws the vector of `_standard_normals`, cut into leaves. Each device computes the parts that
    it holds.

    A value is computed from its own position, so each costs a block.
    """
    leaves, shardings = [every[i] for i in group], [layout[i] for i in group]
    dtype, sizes = _noise_dtype(leaves[0]), [math.prod(jnp.shape(leaf)) for leaf in leaves]
    starts, each = np.cumsum([0, *sizes[:-1]]), 2 * normals.PAIRS[dtype.itemsize]

    def places(leaf: Any, sharding: NamedSharding, start: int) -> jax.Array:
        """Returns the positions in the vector of this device's part of a leaf."""
        shape, local = jnp.shape(leaf), sharding.shard_shape(jnp.shape(leaf))
        found = jnp.full(local, start, jnp.int32)
        for d, axes in itertools.zip_longest(range(len(shape)), sharding.spec):
            first = lax.axis_index(axes) * local[d] if axes else 0
            found += (first + lax.broadcasted_iota(jnp.int32, local, d)) * math.prod(shape[d + 1 :])
        return found.reshape(-1)

    local = [
        sharding.shard_shape(jnp.shape(leaf))
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    ends = np.cumsum([math.prod(shape) for shape in local])

    def part(number: jax.Array, cipher_key: jax.Array) -> tuple[jax.Array, ...]:
        place = jnp.concatenate(
            [places(*its) for its in zip(leaves, shardings, starts.tolist(), strict=True)]
        )
        place = jnp.pad(place, (0, -len(place) % _TOGETHER))
        counters, own = (x.astype(jnp.uint32) for x in jnp.divmod(place, each))

        values = forms.by_platform(
            cipher_key,
            number,
            counters,
            own,
            default=functools.partial(_normals_at, dtype=dtype),
            cpu=functools.partial(_normals_at, dtype=dtype, on_cpu=True),
        )
        parts = jnp.split(values[: ends[-1]], ends[:-1])
        return tuple(values.reshape(shape) for values, shape in zip(parts, local, strict=True))

    specs = tuple(sharding.spec for sharding in shardings)
    drawn = jax.shard_map(
        part, mesh=shardings[0].mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False
    )
    result: tuple[jax.Array, ...] = drawn(number, _cipher_key(key))
    return result


# -log(2**-32): a leading word of zeros adds this much to an exponential.
_BLOCK = 32 * math.log(2)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _standard_laplace(number: jax.Array, key: jax.Array, size: int, dtype: Any) -> jax.Array:
    blocks, rest = _exponentials(number, key, size, dtype)
    drawn: jax.Array = (blocks[0] - blocks[1]).astype(dtype) * _BLOCK + (rest[0] - rest[1])
    return drawn


@functools.partial(jax.jit, static_argnums=(3, 4))
def _discrete_laplace(
    number: jax.Array, scale: float | jax.Array, key: jax.Array, size: int, dtype: Any
) -> jax.Array:
    blocks, rest = _exponentials(number, key, size, jnp.float32)
    block = jnp.asarray(_BLOCK * scale, jnp.float32)
    whole = jnp.floor(block)
    # Whole numbers are added as integers because float32 does not represent all of them beyond
    # 2**24.
    rest = rest * scale + blocks.astype(jnp.float32) * (block - whole)
    geometric = blocks * whole.astype(jnp.int32) + jnp.floor(rest).astype(jnp.int32)
    drawn: jax.Array = geometric[0] - geometric[1]
    return drawn


@functools.partial(jax.jit, static_argnums=(2, 3))
def _standard_cauchy(number: jax.Array, key: jax.Array, size: int, dtype: Any) -> jax.Array:
    # |C| < 1 has probability 1/2, and 1/|C| has the law of |C|. So the draws are precise near zero
    # and far out.
    blocks, (high, low, choice) = _leading_bits(number, key, (3, 2, size))
    angle = normals.uniform(high, low, dtype) * (math.pi / 4)
    # Behind a word of zeros the tangent is the angle, to a relative 2**-64.
    small = jnp.where(blocks == 0, jnp.tan(angle), jnp.ldexp(angle, -32 * blocks))
    magnitude = jnp.where(choice & 1 == 0, small, 1 / small)
    drawn = jnp.where(choice & 2 == 0, magnitude, -magnitude)
    return drawn[0] * 0.5 + drawn[1] * 0.5


def _exponentials(
    number: jax.Array, key: jax.Array, size: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Draws blocks * _BLOCK + rest of int32 blocks and 0 <= rest <= _BLOCK, and returns both, each
    [2, size].
    """
    blocks, (high, low) = _leading_bits(number, key, (2, 2, size))
    return blocks, normals.minus_log(high, low, dtype)


def _leading_bits(
    number: jax.Array, key: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Draws words uint32 of `shape` until those of the first row are not zero.

    A value that was zero draws the words of all rows again, from blocks of their own.

    Returns:
        The number of zeros before the word of the first row, int32 [*shape[1:]], and the words.
    """
    cipher_key = _cipher_key(key)
    count = math.prod(shape)
    counters = lax.iota(jnp.uint32, -(-count // 16))

    def draw(turn: jax.Array | int) -> jax.Array:
        blocks = chacha.block(cipher_key, (counters, number, turn, chacha.NOISE))
        return blocks.reshape(-1)[:count].reshape(shape)

    def more(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        turn, words, _ = state
        return (turn < _MOST_WORDS) & (words[0] == 0).any()

    def draw_again(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        turn, words, zeros = state
        again = words[0] == 0
        return turn + 1, jnp.where(again, draw(turn), words), zeros + again.astype(jnp.int32)

    # The first draw is outside of the loop, which most calls never enter.
    words = draw(0)
    start = (jnp.uint32(1), words, (words[0] * 0).astype(jnp.int32))
    _, words, zeros = lax.while_loop(more, draw_again, start)
    return zeros, words.at[0].max(1)


def _noise_dtype(leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(
            f"Noise needs real leaves, got dtype {dtype}. Split a complex leaf into two real "
            "leaves."
        )
    return jnp.dtype(jnp.float64 if dtype.itemsize > 4 else jnp.float32)


def _check_shards(key: jax.Array, leaf: Any, *, shared: bool = False) -> None:
    """Refuses equal noise for values that differ. With `shared`, also refuses different noise for
    equal values.
    """
    if not isinstance(leaf, jax.Array):
        return
    if axes := tuple(sorted(shards.untracked_axes())):
        raise ValueError(
            f"JAX does not record which values differ between devices along the axes {axes} of a "
            "jax.pmap, or of a jax.shard_map with check_vma=False. So equal noise on different "
            "values would be no error. Sum with jax.lax.psum there, and add noise to the total "
            "outside, or use jax.shard_map with check_vma=True."
        )
    values, keys = shards.varying_axes(leaf), shards.varying_axes(key)
    if values - keys:
        axes = tuple(sorted(values - keys))
        raise ValueError(
            f"A leaf differs between devices along the mesh axes {axes} and key does not, so all "
            "get the same noise."
            f" Sum first with jax.lax.psum(tree, {axes}) and add noise to the total. For "
            "independent noise on each"
            f" device use key=jax.random.fold_in(key, jax.lax.axis_index({axes}))."
        )
    if shared and keys - values:
        axes = tuple(sorted(keys - values))
        raise ValueError(
            f"key differs between devices along the mesh axes {axes} and the sum does not. Each "
            "device would add"
            " different noise to the same sum, and their mean would have less noise. Use one key "
            "for all devices."
        )


def check_key(key: Any) -> None:
    """Raises TypeError if `key` is not a typed key, and ValueError if its shape is not ()."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(
            "key must be a typed key, because an old-style uint32 key does not record its "
            "generator."
            " Use stream(seed, purpose), jax.random.key, or jax.random.wrap_key_data."
        )
    if key.shape != ():
        raise ValueError(
            f"key must have shape (), got {key.shape}. Use jax.random.fold_in to derive one key "
            "per use."
        )


def _check_number_of_draw(number: Any) -> jax.Array:
    if jnp.ndim(number) != 0:
        raise ValueError(
            f"number must be one scalar for the whole tree, got shape {jnp.shape(number)}."
        )
    if not jnp.issubdtype(
        jnp.result_type(number), jnp.integer
    ):  # two fractions may be cut to one integer
        raise TypeError(
            f"number must be an integer, got dtype {jnp.result_type(number)}. Count the draws of "
            "the key."
        )
    if isinstance(number, jax.core.Tracer):
        if number.dtype.itemsize > 4:  # 2**32 would repeat the noise of 0
            raise TypeError(
                f"number must have at most 32 bits where it is traced, got dtype {number.dtype}, "
                "because a program cannot refuse a larger one. Count in int32 or uint32, such as "
                "jnp.uint32(0)."
            )
    elif not 0 <= (number := int(jax.device_get(number))) < 2**32:
        raise ValueError(f"number must be from 0 to 2**32 - 1, got {number!r}.")
    return jnp.asarray(number, jnp.uint32)


def _real(name: str, value: Any) -> float:
    if type(value) in (float, int):
        return float(value)
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is traced, but privacy parameters are public constants. Call privatize "
            "outside jit."
        )
    value = jax.device_get(value)
    if (
        not isinstance(value, (int, float, np.ndarray, np.generic))
        or np.ndim(value)
        or np.iscomplexobj(value)
    ):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}.")
    return float(value)


def _check_number(name: str, value: Any) -> float:
    number = _real(name, value)
    if math.isnan(number) or number < 0:
        raise ValueError(f"{name} must be at least 0, got {number}.")
    return number


def range_of(dtype: Any) -> tuple[float, float]:
    """Returns the smallest and the largest scale of noise of a dtype."""
    kind = np.finfo(dtype)
    return 2.0 ** (int(kind.minexp) + _ROOM_BELOW), 2.0 ** (int(kind.maxexp) - _ROOM_ABOVE)


def _check_carried(name: str, scale: float, dtype: Any) -> None:
    low, high = range_of(dtype)
    if scale and not low <= scale <= high:
        raise ValueError(
            f"{name} must be 0 or from {low:.2g} to {high:.2g} for {dtype} noise, got {scale!r}. "
            "Otherwise noise vanishes or overflows. Multiply the values by a public constant "
            "first."
        )


def check_product(name: str, noise_multiplier: float, clip_norm: float) -> None:
    """Raises ValueError for a standard deviation that float32 cannot carry, unless one of the
    factors is zero.
    """
    std, (low, high) = noise_multiplier * clip_norm, range_of(np.float32)
    if noise_multiplier and clip_norm and not low <= std <= high:
        raise ValueError(
            f"{name}={noise_multiplier} times the clip norm {clip_norm} is {std}, but float32 "
            "noise needs a standard"
            f" deviation from {low:.2g} to {high:.2g}. Multiply the loss by a public constant so "
            "that it can be clipped"
            " to a norm of about 1."
        )


def _check_scale(name: str, value: Any) -> float:
    number = _check_number(name, value)
    if math.isinf(number):
        raise ValueError(f"{name} must be finite, got {number}.")
    return number
