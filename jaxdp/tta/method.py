"""The parts of a test-time adaptation method: one hook per operator.

`Adapter` runs the hooks. `private` keeps, moves or removes each of them. `describe()` quotes the
docstring of a hook.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.files import check_numbers

Uncertainty = Callable[[jax.Array], jax.Array]


class Sample(NamedTuple):
    """The values of one image that weights and filters read.

    They are taken at the same parameters and without gradient.
    """

    logits: jax.Array  # [C]
    # scalar, the method's loss before weighting, such as the entropy in nats
    uncertainty: jax.Array
    # scalar, by how much the second view lowers the probability of the predicted class (PLPD), or 0
    drop: jax.Array


def entropy(logits: jax.Array) -> jax.Array:
    """Computes the entropy H = -sum_k p_k log p_k of the prediction, in nats.

    Raises:
      ValueError: There is one logit, whose softmax is 1 whatever it is.
    """
    check_logits(logits)
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    p = jnp.exp(log_p)
    # Classes masked by -inf add nothing, in the gradient too.
    return -jnp.vdot(p, jnp.where(p > 0, log_p, 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A method: its public constants, and the hooks that it overrides.

    The hooks of this class do nothing.

    Hooks on one image are `uncertainty`, `weight`, `reliable`, `augment`. Hooks across images or
    steps are `start`, `novel`, `remember`, `lost`. Hooks on parameters only are `radius`, `pull`.

    Attributes:
      uncertainty: `uncertainty(logits [C]) -> scalar`, the loss of one image that adaptation
          minimises.
    """

    uncertainty: Uncertainty = dataclasses.field(default=entropy, kw_only=True)

    # Whether only the normalisation layers of the lower three quarters of the blocks adapt.
    lower_blocks_only = False
    # Whether a batch from which nothing is selected makes no step.
    skips_empty = True

    def weight(self, sample: Sample) -> jax.Array:
        """Returns the factor of an image's uncertainty in the loss, without gradient."""
        return jnp.ones_like(sample.uncertainty)

    def reliable(self, sample: Sample) -> jax.Array:
        """Returns whether an image takes part, by itself."""
        return jnp.ones((), bool)

    def augment(self, key: jax.Array, common_key: jax.Array, image: jax.Array) -> jax.Array | None:
        """Returns a second view of an image, by its own key or by the common key of its batch."""
        return None

    radius = 0.0  # rho: the gradient is taken at theta + rho g / ||g||

    def pull(self, displacement: Any) -> Any:
        """Returns the gradient of a regulariser in theta - theta_0."""
        return None

    def start(self) -> Any:
        """Returns the memory before the first batch, a pytree of arrays."""
        return ()

    def novel(self, memory: Any, sample: Sample) -> jax.Array:
        """Returns whether an image is new, by the memory of earlier images."""
        return jnp.ones((), bool)

    def remember(self, memory: Any, samples: Sample, kept: jax.Array) -> Any:
        """Returns the memory after a batch, from its samples [B] and whether each took part [B]."""
        return memory

    def lost(self, memory: Any) -> jax.Array:
        """Returns whether the memory calls for a reset."""
        return jnp.zeros((), bool)

    def overrides(self, hook: str) -> bool:
        """Returns whether this method has its own `hook`."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    def explain(self, hook: str) -> str:
        """Returns the first line of a hook's docstring without its full stop.

        It is the hook's name if there is no docstring.
        """
        operator = self.uncertainty if hook == "uncertainty" else getattr(type(self), hook)
        operator = getattr(operator, "func", operator)  # of a partial
        if isinstance(operator, float):  # radius may be a number
            return hook
        summary, *_ = (inspect.getdoc(operator) or hook).splitlines()
        return summary.removesuffix(".")

    def __call__(self, logits: jax.Array, view_logits: jax.Array | None = None) -> Sample:
        """Returns the sample of one image, from the logits [C] of its views at the same parameters.

        Gradients flow through `uncertainty` of `logits` only.
        """
        declared = getattr(self, "num_classes", logits.shape[-1])
        if logits.shape[-1] != declared:
            raise ValueError(
                f"num_classes={declared}, but apply_fn returns {logits.shape[-1]} logits."
            )
        drop = jnp.zeros((), jnp.float32)
        if view_logits is not None:
            before = jax.nn.softmax(logits.astype(jnp.float32))
            after = jax.nn.softmax(view_logits.astype(jnp.float32))
            drop = before.max() - after[jnp.argmax(before)]  # PLPD of DeYO, Eq. 5
        return Sample(
            logits=jax.lax.stop_gradient(logits),
            uncertainty=self.uncertainty(logits),
            drop=jax.lax.stop_gradient(drop),
        )


Average = tuple[jax.Array, jax.Array]  # the average, and whether anything is in it


def moving_average(memory: Average, values: jax.Array, kept: jax.Array) -> Average:
    """Returns 0.9 average + 0.1 mean of the kept values [B, ...].

    The first average is the first mean.
    """
    average, started = memory
    count = kept.sum()
    weights = kept.reshape(-1, *[1] * (values.ndim - 1))
    mean = jnp.where(weights, values, 0).sum(0) / jnp.maximum(count, 1)
    # The first mean starts the average.
    updated = jnp.where(started, 0.9 * average + 0.1 * mean, mean)
    return jnp.where(count > 0, updated, average), started | (count > 0)


def check_logits(logits: jax.Array) -> None:
    """Raises ValueError for a single logit, on which a softmax learns nothing."""
    if logits.shape[-1] < 2:
        raise ValueError(
            f"apply_fn must return at least two logits, got {logits.shape[-1]}. The softmax of a "
            "single logit z is 1, so its entropy is 0 and nothing adapts. Return "
            "jnp.concatenate([jnp.zeros_like(z), z], axis=-1), whose softmax is sigmoid(z)."
        )


def check_constants(num_classes: int, **fractions: float) -> None:
    """Checks a method's number of classes, and its thresholds.

    Thresholds are fractions of ln(num_classes), the largest entropy.
    """
    check_numbers(num_classes=num_classes, **fractions)
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
    for name, value in fractions.items():
        if not 0 < value <= 1:
            raise ValueError(
                f"{name} is a fraction of ln(num_classes) and must be in (0, 1], got {value}. "
                "Choose t / ln(num_classes) for a threshold of t nats."
            )
