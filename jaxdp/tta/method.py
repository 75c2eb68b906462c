"""What a test-time adaptation method is made of: one hook per operator, all of them functions of one image at a time
or plainly marked as what looks across images.

A method overrides the hooks it has; `Adapter` runs them and `private` decides, hook by hook, what may stay. The first
line of a hook's docstring is what `describe()` says of it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Uncertainty = Callable[[jax.Array], jax.Array]


class Sample(NamedTuple):
    """What weights and filters may read of one image, all at the same parameters and without gradient.

    Attributes:
      logits: [C].
      uncertainty: scalar, the method's loss before weighting: entropy in nats, or what COME puts in its place.
      drop: scalar in [-1, 1], by how much the second view lowers the probability of the predicted class (PLPD); 0
        for methods without a second view.
    """

    logits: jax.Array
    uncertainty: jax.Array
    drop: jax.Array


def entropy(logits: jax.Array) -> jax.Array:
    """entropy H = -sum_k p_k log p_k of the prediction, in nats"""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    p = jnp.exp(log_p)
    return -jnp.vdot(p, jnp.where(p > 0, log_p, 0))  # classes masked by -inf count nothing, in the gradient too


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A method as its public constants and operators; here those that do nothing.

    Hooks on one image: `uncertainty`, `weight`, `reliable`, `augment`. Hooks across images or steps: `start`, `novel`,
    `remember`, `lost`. Hooks on parameters only: `radius`, `pull`.

    Attributes:
      uncertainty: `uncertainty(logits [C]) -> scalar`, what adaptation minimises.
    """

    uncertainty: Uncertainty = dataclasses.field(default=entropy, kw_only=True)

    lower_blocks_only = False  # adapt the normalisation layers of the lower three quarters of the blocks only
    skips_empty = True  # a batch from which nothing is selected makes no step at all

    def weight(self, sample: Sample) -> jax.Array:
        """factor of an image's uncertainty in the loss; no gradient flows through it"""
        return jnp.ones_like(sample.uncertainty)

    def reliable(self, sample: Sample) -> jax.Array:
        """filter on one image: whether it takes part"""
        return jnp.ones((), bool)

    def augment(self, key: jax.Array, common_key: jax.Array, image: jax.Array) -> jax.Array | None:
        """second view of an image, from randomness of its own or common to its batch"""
        return None

    radius = 0.0  # rho: the gradient is taken at theta + rho g / ||g||

    def pull(self, displacement: Any) -> Any:
        """gradient of a regulariser in theta - theta_0"""
        return None

    def start(self) -> Any:
        """memory before the first batch: a pytree of arrays"""
        return ()

    def novel(self, memory: Any, sample: Sample) -> jax.Array:
        """filter on the memory of earlier images: whether this one is new"""
        return jnp.ones((), bool)

    def remember(self, memory: Any, samples: Sample, kept: jax.Array) -> Any:
        """memory after a batch, from its samples [B] and which of them took part [B]"""
        return memory

    def lost(self, memory: Any) -> jax.Array:
        """reset triggered by what is in memory"""
        return jnp.zeros((), bool)

    def overrides(self, hook: str) -> bool:
        """Whether this method has its own `hook`."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    def explain(self, hook: str) -> str:
        """What this method's own `hook` is, in a few words."""
        operator = self.uncertainty if hook == "uncertainty" else getattr(type(self), hook)
        if isinstance(operator, functools.partial):
            operator = operator.func
        documented = None if isinstance(operator, (int, float)) else inspect.getdoc(operator)
        return (documented or hook).splitlines()[0]

    def __call__(self, logits: jax.Array, view_logits: jax.Array | None = None) -> Sample:
        """Looks at one image.

        Args:
          logits: [C] of the image, through whose `uncertainty` gradients flow.
          view_logits: [C] of its second view at the same parameters.
        """
        declared = getattr(self, "num_classes", logits.shape[-1])
        if logits.shape[-1] != declared:
            raise ValueError(f"num_classes={declared}, but apply_fn returns {logits.shape[-1]} logits.")
        drop = jnp.zeros((), jnp.float32)
        if view_logits is not None:
            before, after = (jax.nn.softmax(x.astype(jnp.float32)) for x in (logits, view_logits))
            drop = before.max() - after[jnp.argmax(before)]
        return Sample(jax.lax.stop_gradient(logits), self.uncertainty(logits), jax.lax.stop_gradient(drop))


def check_fraction(name: str, value: float) -> float:
    """Checks a threshold given as a fraction of ln(num_classes), the largest entropy there is."""
    if not 0 < value <= 1:
        raise ValueError(
            f"{name} is a fraction of ln(num_classes) and must be in (0, 1], got {value}; a threshold of t nats is "
            f"{name}=t / ln(num_classes)."
        )
    return value


def check_classes(num_classes: int) -> int:
    """Checks the number of classes of a method."""
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}.")
    return num_classes
