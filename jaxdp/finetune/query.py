"""`Query`: the part of a step in which the methods differ.

A method says what an example contributes to the sum of a batch, how long that contribution can be,
and how it reads the noisy sum. `jaxdp.finetune.step` does everything else for all methods.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.transforms.clipping import ClippedGrad, ClippedSum


class QuerySums(NamedTuple):
    """The sum of the contributions of a batch. Private, and without noise.

    Attributes:
      total: The sum.
      dropped: bool [B]. Which unmasked examples contribute nothing, because their loss or gradient
        is NaN or infinite. Or int32, the number of such examples.
    """

    total: Any
    dropped: jax.Array

    @classmethod
    def of(cls, total: Any, out: ClippedSum) -> "QuerySums":
        """Returns a sum with the examples that the clipped sum leaves out.

        Masked examples have zeros, which are finite.
        """
        is_finite = jnp.isfinite(out.norms) & jnp.isfinite(out.losses)
        return cls(total, ~is_finite)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Query(abc.ABC):
    """The sum that a method computes on every batch, and how it reads the noisy sum.

    A method's guarantee rests on the total of `sums` alone. It has one term of L2 norm at most
    `sensitivity("add_remove")` per unmasked example. Each term is a function of that example, the
    parameters and `carried`. Other methods see only released or public values.

    Attributes:
      gradient: The clipped gradient function of the query.
      public: The pytree of public arrays that `refresh` reads, or None.
      refresh_every: The number of steps between calls of `refresh`, which begin with step 0. 0 is
          never. Public.
      copies: The number of per-example gradients that `sums` holds for each example.
      on_grids: Whether the method can sum integers for exact noise.
    """

    on_grids: ClassVar[bool] = False
    gradient: ClippedGrad
    public: Any = None
    refresh_every: int = 0
    copies: int = 0

    @abc.abstractmethod
    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """Returns the L2 norm that no example's contribution exceeds."""

    def init(self, params: Any) -> Any:
        """Returns the first `carried`, a function of released values and public data, or None."""
        return None

    def refresh(
        self,
        params: Any,
        carried: Any,
        step: Any,
        public: Any,
    ) -> Any:
        """Returns a new `carried`."""
        return carried

    @abc.abstractmethod
    def zeros(self, params: Any) -> Any:
        """Returns the sum over no examples."""

    @abc.abstractmethod
    def sums(
        self,
        params: Any,
        carried: Any,
        batch: Any,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> QuerySums:
        """Returns the sum of the contributions of the unmasked examples of a batch."""

    @abc.abstractmethod
    def read(self, params: Any, carried: Any, mean: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Returns (gradient, the new `carried`, metrics) from the noisy mean.

        The gradient is like the trainable parameters.
        """


def is_example(mask: jax.Array) -> jax.Array:
    """Returns which rows [B] of a mask [B], or [B, k] of groups, are examples and no padding."""
    return mask.any(1) if mask.ndim == 2 else mask


def moving_params(gradient: ClippedGrad, params: Any) -> Any:
    """Returns the trained parameters in float32 or wider, as the optimizer sees them."""
    return jax.tree.map(wide, gradient.trainable_params(params))


def wide(x: jax.Array) -> jax.Array:
    """Returns floating-point numbers in float32 or wider, and other numbers as they are."""
    if not is_floating(x):
        return x
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))


def is_floating(x: jax.Array) -> bool:
    """Returns whether an array holds floating-point numbers."""
    return jnp.issubdtype(x.dtype, jnp.floating)
