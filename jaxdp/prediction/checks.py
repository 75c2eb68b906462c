"""Argument checks that the files of this stage share. No message contains a value of a record."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np


def positive(
    name: str,
    value: Any,
    meaning: str = "",
) -> float:
    """Returns `value` as a float. Raises ValueError, with `meaning`, unless finite and > 0."""
    # NaN fails the comparison.
    if not hasattr(value, "__float__") or np.ndim(value) or not 0 < value < math.inf:
        explanation = ""
        if meaning:
            explanation = f" It is {meaning}."
        raise ValueError(f"{name} must be finite and > 0, got {value!r}.{explanation}")
    return float(value)


def whole(name: str, value: Any) -> int:
    """Returns `value` as an int. Raises ValueError unless it is an integer >= 1."""
    if not _is_integer(value) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")
    return int(value)


def _is_integer(value: Any) -> TypeGuard[int]:
    # True is an int in Python, and no number of records.
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def distances(ks: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the distances to certify: all of 0..ks for an int."""
    if _is_integer(ks) and ks >= 0:
        ks = range(ks + 1)
    values: list[Any] = [ks]
    if isinstance(ks, Iterable):
        values = [*ks]
    if not all(map(_is_integer, values)):
        raise TypeError(f"ks={values} must be integers.")
    if not values or min(values) < 0:
        raise ValueError(f"ks={values} must hold at least one distance, and none below 0.")
    # Rows of bounds are searched in this order, and a distance twice would be counted twice.
    if sorted(set(values)) != values:
        raise ValueError(f"ks={values} must increase.")
    return tuple(int(k) for k in values)


def count_rows(tree: Any, name: str) -> int:
    """Returns n of a pytree of arrays [n, ...]. Raises ValueError for lengths that differ."""
    lengths = set()
    for leaf in jax.tree.leaves(tree):
        if np.ndim(leaf):
            lengths.add(np.shape(leaf)[0])
        else:
            lengths.add(-1)  # a number has no first axis
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            f"{name} must be a pytree of arrays with one first axis, found leaves of different "
            "lengths."
        )
    return lengths.pop()


def check_data(
    data: Any,
    name: str,
    *,
    may_be_empty: bool = False,
) -> int:
    """Returns the number of records.

    Raises:
      ValueError: There is none, or a value is not finite.
      TypeError: A leaf has no numbers. The error has no value of it.
    """
    n = count_rows(data, name)
    if n == 0 and not may_be_empty:
        raise ValueError(f"{name} has no records.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        where = jax.tree_util.keystr(path, simple=True, separator="/") or "array"
        try:
            is_floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        except TypeError:  # which shows the values
            raise TypeError(
                f"{name} leaf {where} must be an array of numbers, got {type(leaf).__name__}. "
                "Number the classes of texts. Give source.gather(range(len(source))) for a source."
            ) from None
        if is_floating and not np.isfinite(np.asarray(leaf)).all():
            raise ValueError(
                f"{name} leaf {where} has NaN or infinite entries. Impute or drop these records "
                "first."
            )
    return n


def one_of(data: Any) -> Any:
    """Returns the shapes and dtypes of one record."""

    def first_row(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x)[1:], jnp.result_type(x))

    return jax.tree.map(first_row, data)


def check_queries(
    apply_fn: Callable[[Any, Any], Any],
    params: Any,
    queries: Any,
    *,
    may_be_empty: bool = False,
) -> tuple[int, int]:
    """Returns the number of queries, and of the logits of each.

    Raises:
      ValueError: The queries are none, or not finite, or `apply_fn` has another shape.
      TypeError: The queries are no numbers, or the logits are not floating point.
    """
    count = check_data(queries, "queries", may_be_empty=may_be_empty)
    # By shapes, because nothing private may be computed before it is paid.
    out = jax.eval_shape(apply_fn, params, one_of(queries))
    shape = getattr(out, "shape", None)
    if shape is None or len(shape) > 1 or shape == (0,):
        shapes = jax.tree.map(lambda x: x.shape, out)
        raise ValueError(
            f"apply_fn must return the logits [] or [C] of ONE query, got {shapes}."
            " For a model of batches pass lambda params, x: model(params, x[None])[0]."
        )
    if not jnp.issubdtype(out.dtype, jnp.floating):
        # A class would be the only logit of its query.
        raise TypeError(
            f"apply_fn must return floating-point logits, got dtype {out.dtype}. Give the logits "
            "of all classes, not classes."
        )
    if not shape:
        return count, 1
    return count, shape[0]
