"""Parameters on disk (safetensors, never pickle), and a public backbone in a fresh model."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.files import Limits, check_finite, understood, write_durably

Params = Mapping[str, Any]


def _flatten(params: Params) -> dict[str, Any]:
    """Returns arrays by their paths, such as "conv/kernel"."""
    for keys, value in flatten_dict(dict(params)).items():
        for key in keys:
            if not isinstance(key, str) or not key or "/" in key:
                raise ValueError(f"keys of params must be non-empty strings without '/', got {key!r} in {keys}.")
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"params must be nested dicts of arrays, got {type(value).__name__} at {'/'.join(keys)!r}.")
    return flatten_dict(dict(params), sep="/")


def save_params(path: str | os.PathLike[str], params: Params) -> None:
    """Writes parameters to one safetensors file, each under its path such as "conv/kernel".

    The write is atomic and durable. Collections are another level: {"params": ..., "batch_stats": ...} works.

    Raises:
      TypeError, ValueError: params is not nested dicts of arrays with string keys without "/".
    """
    from safetensors.flax import save

    flat = {key: jax.numpy.asarray(value) for key, value in _flatten(params).items()}
    write_durably(pathlib.Path(path), save(flat))


def load_params(path: str | os.PathLike[str], *, limits: Limits | None = None) -> dict[str, Any]:
    """Reads a safetensors file as nested dicts of JAX arrays. Names are split at "/".

    Args:
      path: The file.
      limits: The limit on its bytes. The default is `Limits()`.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: The file is damaged or larger than the limit, or a value is NaN or infinite.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no parameter file at {os.fspath(path)!r}.")
    remedy = "Restore it from a copy, or make it again."
    tensors = load_tensors(path, remedy=remedy, limits=limits)
    with understood(path, remedy):
        return unflatten_dict(tensors, sep="/")


def load_tensors(path: str | os.PathLike[str], *, remedy: str, limits: Limits | None = None) -> dict[str, jax.Array]:
    """Reads a safetensors file as JAX arrays, since NumPy lacks some number formats. Errors as in `load_params`."""
    from safetensors.flax import load_file

    with understood(path, remedy):
        (limits or Limits()).check("bytes", os.path.getsize(path), os.fspath(path))
        tensors = load_file(os.fspath(path))
    check_finite(tensors, path, remedy)
    return tensors


def merge_pretrained(params: Params, pretrained: Params, *, exclude: Sequence[str] = ("head",)) -> dict[str, Any]:
    """Takes every parameter from `pretrained`, except those under `exclude`, which keep their fresh values.

    A public backbone gets a new head by `merge_pretrained(model.init(key, x)["params"], backbone)`.

    Args:
      params: Freshly initialised parameters, which fix structure, shapes and dtypes.
      pretrained: Parameters of the same model, possibly with another head. They must come from public data only, or be
        charged to the ledger.
      exclude: Paths such as "head" or "block_0/mlp_1/bias". Parameters at or below them come from `params`, also if
        `pretrained` has them.

    Returns:
      Nested dicts like `params`. Pre-trained arrays are cast to the dtypes in `params`.

    Raises:
      ValueError: An excluded path is not in `params`, or a remaining parameter is missing, superfluous or of another
        shape in `pretrained`. The message lists them all.
    """
    fresh, given = _flatten(params), _flatten(pretrained)
    for entry in exclude:
        if not any(f"{path}/".startswith(f"{entry}/") for path in fresh):
            raise ValueError(f"exclude has {entry!r}, which is not in params. The top levels are {sorted(params)}.")
    merged, problems = dict(fresh), []
    for path in fresh | given:
        if any(f"{path}/".startswith(f"{entry}/") for entry in exclude):
            continue
        if path not in given:
            problems.append(f"{path}: missing in pretrained")
        elif path not in fresh:
            problems.append(f"{path}: not in params")
        elif fresh[path].shape != given[path].shape:
            problems.append(f"{path}: shape {given[path].shape} in pretrained, {fresh[path].shape} in params")
        else:
            merged[path] = jax.numpy.asarray(given[path], fresh[path].dtype)
    if problems:
        raise ValueError(
            "pretrained does not fit params. Exclude the parameters to train afresh, or build the matching model:\n  "
            + "\n  ".join(problems)
        )
    return unflatten_dict(merged, sep="/")
