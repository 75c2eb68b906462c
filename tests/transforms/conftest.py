"""An independent float64 reference for the clipping tests, and comparisons with it."""

import dataclasses
import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest

from jaxdp.transforms import clipped_sums, clipping
from jaxdp.transforms.components import can_factor
from jaxdp.transforms.method_costs import choose_method
from tests.transforms import small_net

# Many small programs are compiled once each: LLVM's expensive passes would be most of the time.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# XLA's older code for fusions, which tests/conftest.py chooses, computes the bounds of a scatter in
# the dtype of its indices. With int8 and 140 rows it writes before and after the array. With uint8
# and 300 rows it drops updates.
NEWER_FUSIONS = (
    {"xla_cpu_use_fusion_emitters": True} if "emitters=false" in os.environ["XLA_FLAGS"] else {}
)


def compiler_options(arguments: Any) -> dict[str, Any]:
    """Returns options that compile quickly, and that index rightly by the integers of the arguments
    of a program."""
    leaves = [x for x in jax.tree.leaves(arguments) if hasattr(x, "dtype")]
    longest = max((n for x in leaves for n in x.shape), default=0)
    narrow = any(
        jax.dtypes.issubdtype(x.dtype, np.integer) and np.iinfo(x.dtype).max < longest
        for x in leaves
    )
    return QUICK_COMPILE | (NEWER_FUSIONS if narrow else {})


@dataclasses.dataclass(frozen=True)
class Reference:
    """Gradients of one example at a time in float64, [B, ...] at trainable leaves and None at
    others."""

    losses: np.ndarray
    grads: list[np.ndarray | None]
    norms: np.ndarray

    def clipped_sum(
        self, clip_norm: float, keep: np.ndarray | None = None
    ) -> list[np.ndarray | None]:
        factors = np.where(
            self.norms > clip_norm, clip_norm / np.where(self.norms > 0, self.norms, 1), 1
        )
        factors = factors * (1 if keep is None else keep)
        return [None if g is None else np.einsum("b,b...->...", factors, g) for g in self.grads]


def _float64(tree: Any) -> Any:
    def cast(x: Any) -> Any:
        if not hasattr(x, "dtype") or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return (
            np.asarray(x, np.float64)
            if jax.dtypes.issubdtype(x.dtype, np.floating)
            else np.asarray(x)
        )

    return jax.tree.map(cast, tree)


def every_leaf(path: str, leaf: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss, with what its gradient is asked at."""

    loss: Callable[..., Any]
    params: Any
    batch: Any
    trainable: Callable[[str, Any], bool] = every_leaf


def _in_float64(problem: Any) -> tuple[list[Any], list[int], Callable[[list[Any], Any], Any]]:
    """Returns the leaves of params in float64, which of them are trainable, and the loss as a
    function of those."""
    paths, structure = jax.tree_util.tree_flatten_with_path(_float64(problem.params))
    leaves = [leaf for _, leaf in paths]
    moving = [
        i
        for i, (path, leaf) in enumerate(paths)
        if getattr(leaf, "dtype", None) == np.float64
        and problem.trainable(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
    ]

    def loss(values: list[Any], example: Any) -> Any:
        every = list(leaves)
        for i, value in zip(moving, values, strict=True):
            every[i] = value
        return problem.loss(jax.tree.unflatten(structure, every), example)

    return leaves, moving, loss


def micro_batches_of_one_each(problems: Sequence[Any]) -> list[Reference]:
    """Computes `jax.grad` of each loss for one example after the other in float64, and norms by
    NumPy.

    A problem has the fields of `Problem`. All have one size of a batch. They are one program, which
    compiles faster than one for each."""
    parts = [_in_float64(problem) for problem in problems]
    batches = [_float64(problem.batch) for problem in problems]
    size = len(jax.tree.leaves(batches)[0])
    given = [[leaves[i] for i in moving] for leaves, moving, _ in parts]

    def gradients(values: list[Any], examples: list[Any]) -> list[Any]:
        losses = (loss for _, _, loss in parts)
        return [
            jax.value_and_grad(loss)(*pair)
            for loss, *pair in zip(losses, values, examples, strict=True)
        ]

    # Flax mixes float32 into float64
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        options = compiler_options((given, batches))
        step = jax.jit(gradients, compiler_options=options)
        rows = [
            jax.device_get(step(given, jax.tree.map(lambda x, b=b: x[b], batches)))
            for b in range(size)
        ]
    return [
        _reference(leaves, moving, of_one)
        for (leaves, moving, _), of_one in zip(parts, zip(*rows, strict=True), strict=True)
    ]


def _reference(leaves: list[Any], moving: list[int], rows: Sequence[Any]) -> Reference:
    losses = np.array([float(value) for value, _ in rows])
    grads: list[np.ndarray | None] = [None] * len(leaves)
    squares = np.zeros(len(rows))
    for k, i in enumerate(moving):
        grads[i] = g = np.stack([np.asarray(row[k], np.float64) for _, row in rows])
        squares = squares + (g.reshape(len(rows), -1) ** 2).sum(1)
    return Reference(losses, grads, np.sqrt(squares))


def micro_batches_of_one(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    trainable: Callable[[str, Any], bool] = every_leaf,
) -> Reference:
    """Returns the reference of one loss, see `micro_batches_of_one_each`."""
    (found,) = micro_batches_of_one_each([Problem(loss_fn, params, batch, trainable)])
    return found


def assert_same_sum(
    params: Any, grads: Any, expected: list[np.ndarray | None], *, rtol: float = 1e-5, err: str = ""
) -> None:
    """Checks each entry to rtol, or to rtol/10 of the largest entry of the whole gradient."""
    atol = rtol / 10 * max(np.abs(e).max(initial=0) for e in expected if e is not None)
    for g, e in zip(jax.tree.structure(params).flatten_up_to(grads), expected, strict=True):
        if e is None:
            assert g is None, err
        else:
            assert g.shape == e.shape, err
            np.testing.assert_allclose(
                np.asarray(g, np.float64), e, rtol=rtol, atol=atol, err_msg=err
            )


def treatment(method: str, component: Any, size: int, keep: bool, has_form: bool = False) -> str:
    """Returns what `method` does with a component: "factors", "keep" or "drop". An engine chooses
    by itself."""
    has_factors = has_form or can_factor(component)
    if method in ("auto", "bookkeeping") or (method == "factors" and not has_factors):
        return choose_method(component, size, keep, has_form)
    return method


@contextmanager
def forced(method: str) -> Iterator[list[tuple[Any, int]]]:
    """Forces `method` for every component: "factors" (where factors exist), "keep" or "drop".
    Yields the components."""
    components: list[tuple[Any, int]] = []

    def pick(component: Any, size: int, keep: bool, has_form: bool) -> str:
        components.append((component, size))
        return treatment(method, component, size, keep, has_form)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipped_sums, "choose_method", pick)
        yield components


def every_method(
    loss_fn: Callable[..., Any], methods: Sequence[str], *args: Any, **settings: Any
) -> dict[str, clipping.ClippedSum]:
    """Returns the result of each method, an engine or a treatment of all components.

    All but "vmap" are one computation, which differs only in the treatment of components. A method
    that treats each component as an earlier one did is left out."""
    out: dict[str, clipping.ClippedSum] = {}
    done: list[list[str]] = []
    components: list[tuple[Any, int]] = []
    for method in methods:
        if (
            method != "vmap"
            and [treatment(method, *c, method != "bookkeeping") for c in components] in done
        ):
            continue
        engine: Any = method if method in ("vmap", "bookkeeping") else "auto"
        with forced(method) as seen:
            out[method] = clipping.clipped_grad(loss_fn, engine=engine, **settings)(*args)
        if method != "vmap":
            components = seen
            done.append([treatment(method, *c, method != "bookkeeping") for c in components])
    return out


@pytest.fixture(scope="session")
def oracle() -> types.SimpleNamespace:
    """Hands out the functions above, since test modules cannot import each other."""
    return types.SimpleNamespace(
        micro_batches_of_one=micro_batches_of_one,
        micro_batches_of_one_each=micro_batches_of_one_each,
        assert_same_sum=assert_same_sum,
        forced=forced,
        every_method=every_method,
        compiler_options=compiler_options,
    )


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Returns the reference of `small_net.batch_of(5)`."""
    return micro_batches_of_one(small_net.loss, small_net.PARAMS, small_net.batch_of(5))
