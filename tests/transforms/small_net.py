"""A small net on a sequence of three rows, whose clipped gradients many tests share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxdp
from jaxdp.transforms import clipped_sums

ENGINES = ("vmap", "bookkeeping", "auto")
every_engine = pytest.mark.parametrize("engine", ENGINES)
# "bookkeeping" computes the clipped sum of `loss` exactly as "auto" does, which `test_clipping`
# checks.
both_computations = pytest.mark.parametrize("engine", ["vmap", "auto"])


def draws(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [
        np.random.default_rng([seed, i]).normal(size=s).astype(np.float32)
        for i, s in enumerate(shapes)
    ]


PARAMS = dict(zip(("w", "b", "v"), draws(0, (4, 6), (1, 6), (6, 3)), strict=True))


def loss(p: Any, example: Any) -> Any:
    """Evaluates a small net on a sequence of three rows."""
    x, y = example
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y))


def batch_of(size: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x, y = draws(seed, (size, 3, 4), (size, 3, 3))
    return x, y


@functools.cache
def clipped(engine: str, clip_norm: float = 0.5, **options: Any) -> Any:
    """Returns one function per set of options, so that tests share its compilation."""
    return jaxdp.clipped_grad(loss, clip_norm=clip_norm, engine=engine, **options)


def factors_of_other_parts(options: Any, program: Any, inputs: Any) -> Any:
    """Applies the factors of each part to the next one: a broken twin of `_engine_result`."""
    result = _HONEST(options, program, inputs)

    def weighted_sum(rows: Any, factors: Any) -> Any:
        return result.weighted_sum(rows, [factors[-1], *factors[:-1]])

    return result._replace(weighted_sum=weighted_sum)


_HONEST = clipped_sums._engine_result


def norm(tree: Any) -> float:
    return float(
        np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(tree)))
    )


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a: Any, b: Any, rtol: float = 1e-5) -> None:
    atol = rtol / 10 * max((float(np.abs(x).max(initial=0)) for x in jax.tree.leaves(b)), default=0)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@dataclasses.dataclass(frozen=True)
class Smooth:
    """Written outside of the package: C ||g|| / (||g|| + gamma) as norm, with a bound that is not
    C."""

    gamma: float = 0.3
    share: float = 0.5

    def factor(self, norms: Any, clip_norm: Any) -> Any:
        return self.share * clip_norm / (norms + self.gamma)

    def bound(self, clip_norm: Any) -> Any:
        return self.share * clip_norm


def dropout_loss(p: Any, example: Any, *, key: Any) -> Any:
    x, y = example
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return loss(p, (jnp.where(keep, 2 * x, 0), y)), {"kept": keep, "bits": jax.random.bits(key)}


def shard_mapped(
    step: Callable[..., Any], *, outputs: Any, check_vma: bool = True, shape: tuple[int, ...] = (8,)
) -> Any:
    """Compiles `step(params, batch, mask)` of one shard's examples for the eight devices."""
    if len(jax.devices()) < 8:
        pytest.skip("fewer than eight devices")
    names = ("data", "more")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    rows = PartitionSpec(names)
    outputs = jax.tree.map(lambda over: rows if over else PartitionSpec(), outputs)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows),
        out_specs=outputs,
        check_vma=check_vma,
    )
    return jax.jit(mapped, compiler_options={"xla_llvm_disable_expensive_passes": True})
