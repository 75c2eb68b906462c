"""The options that all methods share, and the noise that meets a target."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import jax
import optax

from jaxdp.data import FixedOrderSampler
from jaxdp.data.participation import SimulatedSampler
from jaxdp.data.physical import Sampler
from jaxdp.files import check_numbers
from jaxdp.privacy import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    calibrate_noise,
)
from jaxdp.privacy.accounting import Adjacency, Method
from jaxdp.privacy.privacy_warnings import warn_if_weak
from jaxdp.report import counting
from jaxdp.transforms.clipping import Engine
from jaxdp.transforms.meshes import ParamSharding
from jaxdp.transforms.noise import CorrelatedNoise

CLIP_NORMS = (1e-8, 1e8)  # far from where float32 squares underflow or overflow


# Other draws of a simulation find an epsilon that is some percent larger.
_MORE_NOISE = 1.02


class Target(TypedDict, total=False):
    """What the noise is calibrated to if it is not given. `dp_sgd` documents it."""

    epsilon: float
    delta: float
    steps: int
    adjacency: Adjacency
    accountant: Method
    besides: DpEvent | None


class Options(Target, total=False):
    """The keyword arguments that every method passes on. `dp_sgd` documents them."""

    physical_batch_size: int | None
    augment: Callable[[jax.Array, Any], Any] | None
    augmult: int
    ema_decay: float | None
    ascent_radius: float
    stochastic: bool
    group: bool
    unit: str
    mesh: jax.sharding.Mesh | None
    data_axes: Sequence[str]
    param_sharding: ParamSharding | None
    engine: Engine
    clip_rule: Any
    trainable: Callable[[str, Any], bool] | None
    exact: bool


OPTION_DEFAULTS: Mapping[str, Any] = {
    "epsilon": None,
    "delta": None,
    "steps": None,
    "adjacency": "add_remove",
    "accountant": "auto",
    "besides": None,
    "physical_batch_size": None,
    "augment": None,
    "augmult": 1,
    "ema_decay": None,
    "ascent_radius": 0.0,
    "stochastic": False,
    "group": False,
    "unit": "example",
    "mesh": None,
    "data_axes": ("data",),
    "param_sharding": None,
    "engine": "auto",
    "clip_rule": "global",
    "trainable": None,
    "exact": False,
}


def noise_and_options(
    noise_multiplier: Any,
    options: Mapping[str, Any],
    sampler: Sampler,
    calibrate: Callable[..., float] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Returns the noise multiplier, and the options without the target of the noise.

    A noise multiplier that is not given is calibrated to the target among the options, by
    `calibrate(sampler, steps=, epsilon=, delta=, adjacency=, method=, besides=)`. The default is
    constant noise.

    Raises:
      ValueError: Both noise and target are given, or neither, or only a part of the target. No
          noise meets the target.
    """
    target: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in options.items():
        if name not in Target.__annotations__:
            others[name] = value
        elif value is not None:
            target[name] = value
    if noise_multiplier is not None:
        if target:
            raise ValueError(
                f"noise_multiplier must be left out, or {' and '.join(target)}, got "
                f"{noise_multiplier}."
            )
        return noise_multiplier, others
    if missing := [name for name in ("epsilon", "delta", "steps") if name not in target]:
        raise ValueError(
            "noise_multiplier must be given, or epsilon, delta and steps to calibrate it. "
            f"Missing: {missing}."
        )
    steps = target["steps"]
    if not isinstance(steps, numbers.Integral) or steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, got {steps!r}.")
    check_numbers(epsilon=target["epsilon"], delta=target["delta"])
    warn_if_weak(epsilon=target["epsilon"], delta=target["delta"], records=sampler.num_examples)
    if "accountant" in target:
        target["method"] = target.pop("accountant")
    return (calibrate or calibrated)(sampler, **target), others


def calibrated(
    sampler: Sampler,
    *,
    steps: int,
    besides: DpEvent | None = None,
    noise: CorrelatedNoise | None = None,
    **target: Any,
) -> float:
    """Returns the smallest noise multiplier with which steps and `besides` meet a target.

    Raises:
      ValueError: `steps` are not those of correlated noise.
    """
    if noise is not None and steps != noise.steps:
        raise ValueError(
            f"steps must be {noise.steps}, as in correlated(..., steps={noise.steps}), got {steps}."
        )
    # The search repeats public draws, so that a resumed run finds the same noise. Its result is
    # only a noise multiplier: the charged event has draws of its own.
    seed = bytes(16)

    def whole(noise_multiplier: float) -> DpEvent:
        return beside(event(noise_multiplier, sampler, steps, noise, seed=seed), besides)

    with counting(whole, label="noise", unit="trial") as tried:
        noise_multiplier = calibrate_noise(tried, **target)
    is_simulated = isinstance(sampler, SimulatedSampler)
    return noise_multiplier * _MORE_NOISE if is_simulated else noise_multiplier


def beside(steps: DpEvent, besides: DpEvent | None) -> DpEvent:
    """Returns the event of steps and of what the same target pays besides."""
    return steps if besides is None else ComposedDpEvent([besides, steps])


def event(
    noise_multiplier: float,
    sampler: Sampler,
    steps: int,
    noise: CorrelatedNoise | None = None,
    *,
    seed: bytes | None = None,
) -> DpEvent:
    """Returns the event of `steps` steps of any method, before there is a trainer.

    A schedule of noise needs `PrivateTrainer.event` or `calibrate_schedule`.

    Args:
      noise_multiplier: The standard deviation of a row of independent noise over the clip norm.
      sampler, noise: As in `dp_sgd`. With correlated noise, the event is that of all its steps.
      steps: The number of steps.
      seed: Public randomness of a simulated event, 16 bytes. None draws it from the system.

    Raises:
      ValueError: The sampler's pattern has no proof for these steps or this noise.
    """
    if not noise_multiplier:
        return NonPrivateDpEvent()
    inner = GaussianDpEvent(noise_multiplier)
    options: dict[str, Any] = {"seed": seed} if isinstance(sampler, SimulatedSampler) else {}
    if noise is None:
        return sampler.run_event(inner, steps, **options)
    if isinstance(sampler, FixedOrderSampler):
        return noise.event(noise_multiplier)  # A public order amplifies nothing.
    # A secret pattern amplifies: `jaxdp.privacy.participation` has the proofs.
    options["strategy"] = noise.column
    return sampler.run_event(inner, noise.steps, **options)


_ACCUMULATES = (
    "optimizer must not be optax.MultiSteps or optax.apply_every: each of the gradients that it "
    "adds up has the noise of a batch of its own, so k of them have k times the noise of one "
    "batch. Give the sampler the whole batch size. Batches that exceed the memory are cut into "
    "physical ones before the noise is added."
)


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that adds up gradients whose noise is that of a part.

    `optax.MultiSteps` takes the mean of k noisy gradients. Each has the noise of a whole batch.

    Raises TypeError for what is no optimizer.
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer must be a transformation of optax, such as optax.sgd(0.1), got "
            f"{getattr(optimizer, '__qualname__', repr(optimizer))}."
        )
    # `MultiSteps` itself, and its `gradient_transformation()`, have bound methods of it.
    owner = getattr(optimizer.update, "__self__", None)
    if isinstance(owner, optax.MultiSteps):
        raise ValueError(_ACCUMULATES)


def check_sampler(sampler: Any, noise: CorrelatedNoise | None = None) -> None:
    """Raises TypeError for what samples no batches, such as the size of a batch.

    Raises ValueError for a sampler that does not fit the noise: in which a unit takes part more
    often than correlated noise assumes, or which needs correlated noise.
    """
    if not hasattr(sampler, "run_event"):
        raise TypeError(
            "sampler must be a jaxdp.data.PoissonSampler(len(source), batch_size / len(source)), "
            f"or one of another pattern of participation, got {sampler!r}."
        )
    if noise is not None:
        noise.check_sampler(sampler)
    elif isinstance(sampler, FixedOrderSampler):
        # It raises: no step has an event of its own.
        sampler.event(GaussianDpEvent(1.0))


def check_optimizer_state(state: Any) -> None:
    """Raises as `check_optimizer` for the state of an optimizer that has such a one inside."""

    def accumulates(node: Any) -> bool:
        # optax has no public name for the state of `apply_every`.
        return isinstance(node, optax.MultiStepsState) or type(node).__name__ == "ApplyEvery"

    if any(map(accumulates, jax.tree.leaves(state, is_leaf=accumulates))):
        raise ValueError(_ACCUMULATES)


def check_one_noise(noise_multiplier: Any) -> None:
    """Raises ValueError for a schedule of noise, or for a step without noise."""
    if callable(noise_multiplier) or not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier}.")


def check_clip_norm(name: str, value: float | Mapping[str, float]) -> None:
    """Raises ValueError for a clip norm by which float32 cannot divide a contribution.

    That of each part is checked, if they have norms of their own.
    """
    if isinstance(value, Mapping):
        for pattern, norm in value.items():
            check_clip_norm(f"{name}[{pattern!r}]", norm)
        return
    if isinstance(value, bool | str) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be a number, or map regular expressions of paths to numbers, got "
            f"{type(value).__name__} {value!r}."
        )
    least, most = CLIP_NORMS
    if not least <= float(value) <= most:
        raise ValueError(
            f"{name} must be between {least:g} and {most:g}, got {value}. Noise cannot hide an "
            "unbounded gradient, and float32 squares must neither overflow nor underflow."
        )
