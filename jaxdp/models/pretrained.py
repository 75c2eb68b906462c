"""Parameters on disk (safetensors, never pickle) and from a public backbone into a fresh model."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.files import Limits, check_finite, understood, write_durably

Params = Mapping[str, Any]


def _flatten(params: Params, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise ValueError(f"keys of params must be non-empty strings without '/', got {key!r} under {prefix!r}")
        path = prefix + key
        if isinstance(value, Mapping):
            flat.update(_flatten(value, path + "/"))
        elif isinstance(value, jax.Array | np.ndarray):
            flat[path] = value
        else:
            raise TypeError(f"params must be nested dicts of arrays, got {type(value).__name__} at {path!r}")
    return flat


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def save_params(path: str | os.PathLike[str], params: Params) -> None:
    """Writes parameters to one safetensors file, each under its path such as "conv/kernel".

    The file appears whole or not at all, and is on the disk when this returns. Collections are just another level:
    {"params": ..., "batch_stats": ...} works.

    Args:
      path: the file.
      params: nested dicts of arrays.

    Raises:
      TypeError, ValueError: if params is not nested dicts of arrays with string keys without "/".
    """
    from safetensors.flax import save

    flat = {key: jax.numpy.asarray(value) for key, value in _flatten(params).items()}
    write_durably(pathlib.Path(path), save(flat))


def load_params(path: str | os.PathLike[str], *, limits: Limits | None = None) -> dict[str, Any]:
    """Reads a safetensors file as nested dicts of JAX arrays; names are split at "/".

    Args:
      path: the file.
      limits: on its bytes; `Limits()` by default.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is damaged or larger than the limit, or a value is NaN or infinite.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no parameter file at {os.fspath(path)!r}")
    remedy = "Restore it from a copy, or have whoever made it make it again."
    tensors = load_tensors(path, remedy=remedy, limits=limits)
    with understood(path, remedy):
        return _unflatten(tensors)


def load_tensors(path: str | os.PathLike[str], *, remedy: str, limits: Limits | None = None) -> dict[str, jax.Array]:
    """Reads a safetensors file as JAX arrays, since NumPy lacks some number formats; errors as `load_params`."""
    from safetensors.flax import load_file

    with understood(path, remedy):
        (limits or Limits()).check("bytes", os.path.getsize(path), os.fspath(path))
        tensors = load_file(os.fspath(path))
    check_finite(tensors, path, remedy)
    return tensors


def merge_pretrained(params: Params, pretrained: Params, *, exclude: Sequence[str] = ("head",)) -> dict[str, Any]:
    """Takes every parameter from `pretrained`, except those under `exclude`, which stay as freshly
    initialised.

    This is how a public backbone gets a new head: `merge_pretrained(model.init(key, x)["params"], backbone)`.

    Args:
      params: freshly initialised parameters; fix structure, shapes and dtypes.
      pretrained: parameters of the same model, possibly with another head. Must come from public data only,
        or have been charged to the ledger.
      exclude: paths such as "head" or "block_0/mlp_1/bias"; everything at or below them keeps its value in
        `params`, whether `pretrained` has it or not.

    Returns:
      Nested dicts like `params`; pre-trained arrays are cast to the dtypes in `params`.

    Raises:
      ValueError: if an excluded path is not in `params`, or a remaining parameter is missing, superfluous or
        of another shape in `pretrained`; the message lists them all.
    """
    fresh, given = _flatten(params), _flatten(pretrained)

    def excluded(path: str) -> bool:
        return any(path == entry or path.startswith(entry + "/") for entry in exclude)

    for entry in exclude:
        if not any(path == entry or path.startswith(entry + "/") for path in fresh):
            raise ValueError(f"exclude has {entry!r}, which is not in params; the top levels are {sorted(params)}")
    problems = [f"{path}: missing in pretrained" for path in fresh if path not in given and not excluded(path)]
    problems += [f"{path}: not in params" for path in given if path not in fresh and not excluded(path)]
    problems += [
        f"{path}: shape {tuple(given[path].shape)} in pretrained, {tuple(fresh[path].shape)} in params"
        for path in fresh
        if path in given and not excluded(path) and fresh[path].shape != given[path].shape
    ]
    if problems:
        raise ValueError(
            "pretrained does not fit params; exclude what is to be trained afresh, or build the matching model:\n  "
            + "\n  ".join(problems)
        )
    merged = {
        path: value if excluded(path) else jax.numpy.asarray(given[path], value.dtype) for path, value in fresh.items()
    }
    return _unflatten(merged)
