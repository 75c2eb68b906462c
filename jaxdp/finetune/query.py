"""`Query`: the part of a step in which the methods differ.

A method says what an example contributes to the sum of a batch, how long that contribution can be,
and how it reads the noisy sum. `jaxdp.finetune.step` does everything else for all methods.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast

import jax
import jax.numpy as jnp

from jaxdp.transforms.clipping import ClippedGrad, ClippedSum
from jaxdp.transforms.grids import Grid, GridAt, GridSchedule

Tree = TypeVar("Tree")


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
        return cls(total, ~is_finite)  # as `clipped_grad` leaves it out


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
      grids: The grid of each step, for exact noise, or None. Then `sums` and `zeros` are int32.
      grid: The grid of the step whose batch is summed, which `at` sets.
    """

    gradient: ClippedGrad
    public: Any = None
    refresh_every: int = 0
    copies: int = 0
    grids: Grid | GridSchedule | None = None
    grid: GridAt | None = None

    def at(self, step: jax.Array) -> Self:
        """Returns the query of one step, which has its grid."""
        if self.grids is None:
            return self
        return dataclasses.replace(self, grid=self.grids.at(step))

    def rounded(self, rows: Tree, factors: Any) -> Tree:
        """Sums contributions of examples in steps of the grid.

        Args:
          rows: A pytree of arrays [B, ...], all that an example contributes.
          factors: Factors [B] for each leaf, 0 for an example that contributes nothing.

        Returns:
          int32 sums like a row. An example of a norm above `sensitivity("add_remove")` counts as
          zero.
        """
        assert self.grid is not None
        leaves, structure = jax.tree.flatten(rows)
        sums = self.grid.total(leaves, jax.tree.leaves(factors))
        return cast(Tree, jax.tree.unflatten(structure, sums))

    def as_sums(self, tree: Tree) -> Tree:
        """Returns zeros like a tree, integers on a grid."""
        dtype = None if self.grids is None else jnp.int32
        return cast(Tree, jax.tree.map(lambda x: jnp.zeros_like(x, dtype), tree))

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

    def refresh_programs(
        self, params: Any, carried: Any, step: Any, public: Any
    ) -> list[jax.stages.Lowered]:
        """Returns the programs that `refresh` runs, for the token of a release."""
        return [jax.jit(self.refresh).lower(params, carried, step, public)]

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


def root_of_squares(rows: Sequence[jax.Array], parts: Sequence[int], part: int) -> jax.Array:
    """Returns the norms [B] of the leaves [B, ...] of one part."""
    squares = []
    for leaf, own in zip(rows, parts, strict=True):
        if own == part:
            flat = leaf.reshape(len(leaf), -1)
            squares.append(jnp.square(flat).sum(1))
    return jnp.sqrt(functools.reduce(jnp.add, squares))


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
