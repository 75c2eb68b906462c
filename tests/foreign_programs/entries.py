"""How a program of another library is registered, drawn and sized."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a program: normal numbers, or integers below `high`."""

    shape: tuple[int, ...]
    high: int | None = None

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, F32 if self.high is None else jnp.int32)

    def draw(self, rng: np.random.Generator, lead: tuple[int, ...] = ()) -> np.ndarray:
        if self.high is not None:
            return rng.integers(0, self.high, (*lead, *self.shape), np.int32)
        fan_in = math.prod(self.shape[:-1]) if len(self.shape) > 1 and not lead else 1
        return rng.normal(size=(*lead, *self.shape)) / math.sqrt(max(1, min(fan_in, 16)))


@dataclasses.dataclass(frozen=True)
class Program:
    """The loss of one example, with its weights and its example.

    `plain` is an equal loss that JAX can differentiate for a batch, where it cannot differentiate
    `loss`."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    example: Any
    plain: Callable[[Any, Any], jax.Array] | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program with its sizes and its budgets: operations and bytes of the clipped gradient over
    the plain one."""

    build: Callable[..., Program]
    small: tuple[int, ...]
    large: tuple[int, ...]
    flops: float
    bytes: float
    batch: int


PROGRAMS: dict[str, Entry] = {}


def program(
    small: tuple[int, ...], large: tuple[int, ...], *, flops: float, bytes: float, batch: int = 32
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Registers a function of sizes that makes a program."""

    def register(build: Callable[..., Program]) -> Callable[..., Program]:
        PROGRAMS[build.__name__] = Entry(build, small, large, flops, bytes, batch)
        return build

    return register


def energy(x: Any) -> Any:
    """Returns a scalar that no symmetry of a layer makes constant."""
    return jnp.mean(jnp.sin(x) + x.dtype.type(0.3) * jnp.square(x))


def arrays(shapes: Any) -> Any:
    """Returns the arrays of a tree of shapes."""
    return jax.tree.map(lambda x: Array(tuple(x.shape)), shapes)


def norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + x.dtype.type(0.1))


def abstract(tree: Any, lead: tuple[int, ...] = ()) -> Any:
    """Returns the shapes of a tree of `Array`, with leading axes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.abstract.dtype), tree)


def drawn(tree: Any, seed: int, lead: tuple[int, ...] = ()) -> Any:
    """Draws a tree of `Array`, with leading axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x.draw(rng, lead), tree)
