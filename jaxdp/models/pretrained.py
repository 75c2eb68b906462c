"""Parameters on disk (safetensors, never pickle), and a public backbone in a fresh model."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxdp.data.storage import on_device
from jaxdp.files import Limits, check_finite, shown, understood, write_durably
from jaxdp.transforms.clipping import paths_of

# The entry in the metadata of a file whose names are not those of nested dicts.
_STRUCTURE = "jaxdp_structure"
# What `load_params` reads.
_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
}


def flatten(params: Any) -> dict[str, Any]:
    """Returns arrays by their paths, such as "conv/kernel", in the order of the leaves.

    Raises:
      TypeError: A leaf is not an array.
      ValueError: Two leaves have the same path.
    """
    flat: dict[str, Any] = {}
    for path, leaf in paths_of(params):
        if path in flat:
            raise ValueError(f"params has two leaves with the path {path!r}. Rename a key.")
        is_key = _is_key(leaf)
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
        if is_key or not is_array:
            content = type(leaf).__name__
            if is_key:
                content = "a random key"
            raise TypeError(
                f"params must be a pytree of arrays, got {content} at {path!r}. Keep what is no "
                "parameter apart (NNX: nnx.split(model, nnx.Param, ...), Equinox: "
                "eqx.partition(model, eqx.is_array))."
            )
        flat[path] = leaf
    return flat


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key != "" and "/" not in key


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", np.dtype(object))
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def save_params(path: str | os.PathLike[str], params: Any) -> None:
    """Writes parameters to one safetensors file, each under its path such as "conv/kernel".

    The write is atomic and durable. Collections are another level: {"params": ..., "batch_stats":
    ...} works.

    Args:
      path: The file.
      params: Any pytree of arrays: nested dicts, lists, named tuples, registered dataclasses, a
        state of NNX, the arrays of an Equinox module. The file has the arrays and their paths. Only
        of nested dicts with string keys without "/" do the paths tell the structure. Everything
        else needs `like` in `load_params`.

    Raises:
      TypeError: A leaf is not an array, or `load_params` cannot read its dtype, such as float8.
      ValueError: Two leaves have the same path, or one has the path "__metadata__".
    """
    from safetensors.flax import save

    # `jnp.asarray` compiles a program for each shape of a NumPy array.
    flat = {key: jax.device_put(value) for key, value in flatten(params).items()}
    if "__metadata__" in flat:  # the format has another use for it
        raise ValueError("params must have no leaf '__metadata__'. Rename the key.")
    for key, value in flat.items():
        if str(value.dtype) not in _DTYPES:
            raise TypeError(
                f"params has the dtype {value.dtype} at {key!r}, which no file of parameters has. "
                "Cast it, for example to bfloat16."
            )
    metadata = None
    if not _is_nested_dicts(params):
        metadata = {_STRUCTURE: type(params).__name__}
    write_durably(pathlib.Path(path), save(flat, metadata))


def _is_nested_dicts(params: Any) -> bool:
    """Returns whether the paths of the leaves tell the structure of the parameters."""
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        for key in path:
            if not (isinstance(key, jax.tree_util.DictKey) and _is_name(key.key)):
                return False
    return True


def load_params(
    path: str | os.PathLike[str], *, like: Any = None, limits: Limits | None = None
) -> Any:
    """Reads parameters that `save_params` wrote.

    Args:
      path: The file.
      like: A pytree of arrays or of `jax.ShapeDtypeStruct` with the structure, shapes and dtypes of
        the saved one, such as freshly initialised parameters. None reads nested dicts, whose names
        are split at "/".
      limits: The limit on the bytes of the file. The default is `Limits()`.

    Returns:
      JAX arrays in the structure of `like`, or in nested dicts.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: The file is damaged or larger than the limit, or a value is NaN or infinite. The
        file does not fit `like` (the message lists every leaf), or it needs `like`.
      TypeError: A leaf of `like` is not an array.
    """
    from safetensors import safe_open

    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no parameter file at {os.fspath(path)!r}.")
    remedy = "Restore it from a copy, or make it again."
    tensors = load_tensors(path, remedy=remedy, limits=limits)
    if like is not None:
        return _fitted(tensors, like, os.fspath(path))
    with understood(path, remedy):
        with safe_open(os.fspath(path), framework="numpy") as file:
            structure = (file.metadata() or {}).get(_STRUCTURE)
        if structure is None:
            return unflatten_dict(tensors, sep="/")
    raise ValueError(
        f"{shown(path)} holds a {structure}, whose structure is not in the file. Pass like=, a "
        "pytree of the same structure, such as freshly initialised parameters."
    )


def _fitted(tensors: dict[str, jax.Array], like: Any, path: str) -> Any:
    """Returns the tensors in the structure of `like`."""
    expected = flatten(like)
    problems = []
    for name in expected | tensors:
        if name not in tensors:
            problems.append(f"{shown(name)}: missing in the file")
            continue
        if name not in expected:
            problems.append(f"{shown(name)}: not in like")
            continue
        saved = f"{tensors[name].dtype} {tensors[name].shape}"
        stated = f"{expected[name].dtype} {expected[name].shape}"
        if saved != stated:
            problems.append(f"{shown(name)}: {saved} in the file, {stated} in like")
    if problems:
        raise ValueError(
            f"{shown(path)} does not fit like. Build the model that was saved:\n  "
            + "\n  ".join(problems)
            + "."
        )
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in expected])


def load_tensors(
    path: str | os.PathLike[str], *, remedy: str, limits: Limits | None = None
) -> dict[str, jax.Array]:
    """Reads a safetensors file as JAX arrays.

    Errors are those of `load_params`.
    """
    # The reader for Flax compiles a program for each shape, which takes longer than to read it.
    from safetensors.numpy import load_file

    with understood(path, remedy):
        (limits or Limits()).check("bytes", os.path.getsize(path), os.fspath(path))
        on_host = load_file(os.fspath(path))
    tensors: dict[str, jax.Array] = jax.device_put(on_host)
    check_finite(tensors, path, remedy)
    return tensors


def merge_pretrained(params: Any, pretrained: Any, *, exclude: Sequence[str] = ("head",)) -> Any:
    """Takes every parameter from `pretrained`, except those under `exclude`, which stay fresh.

    A public backbone gets a new head by `merge_pretrained(model.init(key, x)["params"], backbone)`.

    Args:
      params: Freshly initialised parameters, which fix structure, shapes and dtypes.
      pretrained: Parameters of the same model, possibly with another head. They must come from
        public data only, or be charged to the ledger.
      exclude: Paths such as "head" or "block_0/mlp_1/bias". Parameters at or below them come from
        `params`, also if `pretrained` has them.

    Returns:
      A pytree like `params`. Pre-trained arrays are cast to the dtypes in `params`.

    Raises:
      ValueError: An excluded path is not in `params`, or a remaining parameter is missing,
        superfluous or of another shape in `pretrained`. The message lists them all.
    """
    fresh = flatten(params)
    public = flatten(pretrained)
    for entry in exclude:
        if not any(_is_below(path, entry) for path in fresh):
            top = sorted({path.split("/")[0] for path in fresh})
            raise ValueError(
                f"exclude has {entry!r}, which is not in params. The top levels are {top}."
            )
    merged = dict(fresh)
    problems = []
    for path in fresh | public:
        if any(_is_below(path, entry) for entry in exclude):
            continue
        if path not in public:
            problems.append(f"{path}: missing in pretrained")
        elif path not in fresh:
            problems.append(f"{path}: not in params")
        elif fresh[path].shape != public[path].shape:
            problems.append(
                f"{path}: shape {public[path].shape} in pretrained, {fresh[path].shape} in params"
            )
        else:
            merged[path] = on_device(public[path], fresh[path].dtype)
    if problems:
        raise ValueError(
            "pretrained does not fit params. Exclude the parameters to train afresh, or build the "
            "matching model:\n  " + "\n  ".join(problems)
        )
    return jax.tree.unflatten(jax.tree.structure(params), list(merged.values()))


def _is_below(path: str, entry: str) -> bool:
    """Returns whether a path is an entry of `exclude` or below it."""
    return f"{path}/".startswith(f"{entry}/")  # "head" is not above "head_2/bias"
