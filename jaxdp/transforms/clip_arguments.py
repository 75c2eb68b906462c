"""The arguments of a clipped gradient: params split into trained and other leaves, and checks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxdp.transforms import shards

Trainable = Callable[[str, Any], bool]


@dataclasses.dataclass(frozen=True)
class ParamsTree:
    """What a compiled call knows of params besides its arrays. It is hashable, for `jax.jit`.

    Attributes:
      structure: The structure of the pytree.
      settings: The leaves that are not arrays, None in place of arrays.
      trainable: Whether each leaf is trained.
      part_of: The number of the part of each trainable leaf, all 0 if the whole gradient is
        clipped.
    """

    structure: Any
    settings: tuple[Any, ...]
    trainable: tuple[bool, ...]
    part_of: tuple[int, ...]

    def all_leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns all leaves, from the arrays with None in place of settings."""
        pairs = zip(self.settings, arrays, strict=True)
        return [setting if array is None else array for setting, array in pairs]

    def trained(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the trainable ones of all leaves."""
        return [leaf for leaf, trains in zip(leaves, self.trainable, strict=True) if trains]

    def tree(
        self,
        trained: Sequence[Any],
        others: Sequence[Any] | None = None,
    ) -> Any:
        """Builds a pytree like params from one value per trainable leaf.

        Args:
          trained: The values of the trainable leaves.
          others: All leaves, of which the frozen ones are read. None puts None at frozen leaves.
        """
        # Both lists have the order of the leaves of the pytree.
        values = iter(trained)
        if others is None:
            others = [None] * len(self.trainable)
        pairs = zip(self.trainable, others, strict=True)
        leaves = [next(values) if trains else other for trains, other in pairs]
        return jax.tree.unflatten(self.structure, leaves)

    def specs(self, arrays: Sequence[Any]) -> Any:
        """Returns how gradients are divided over Explicit mesh axes: each like its leaf."""
        return self.tree([shards.spec_of(leaf) for leaf in self.trained(arrays)])


def row_spec(batch: Any) -> PartitionSpec:
    """Returns how values of examples are divided over Explicit mesh axes: like the batch."""
    # A value of an example has the leading axis only.
    axes = shards.spec_of(jax.tree.leaves(batch)[0])[:1]
    return PartitionSpec(*axes)


def paths_of(params: Any) -> list[tuple[str, Any]]:
    """Returns (path, leaf) of every leaf, with paths such as "Dense_0/kernel".

    `trainable` of `clipped_grad` receives these paths.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(params)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf of params is an array."""
    # Python scalars are settings, not parameters: Equinox stores dropout rates and flags as leaves
    # of a module.
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def dtype_name(leaf: Any) -> str:
    """Returns the name of the dtype of an array, or of the type of any other leaf."""
    if is_array(leaf):
        return str(jnp.result_type(leaf))
    return type(leaf).__name__


def trainable_leaves(params: Any, predicate: Trainable | None) -> list[bool]:
    """Returns whether each leaf of params is trained: floating arrays that the predicate accepts.

    Raises:
      TypeError: The predicate accepts a complex leaf.
    """
    trainable = []
    for path, leaf in paths_of(params):
        if is_array(leaf):
            dtype = jnp.result_type(leaf)
        else:
            dtype = np.dtype(object)
        trains = jnp.issubdtype(dtype, jnp.inexact)  # integers and keys have no gradient
        if trains and predicate is not None:
            trains = bool(predicate(path, leaf))
        if trains and jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(
                f"params has the complex leaf {path!r} of dtype {dtype}, which cannot be "
                "trained. Store its real and imaginary part as two leaves and join them in "
                "loss_fn with jax.lax.complex, or freeze it with trainable=lambda path, leaf: "
                f"path != {path!r}."
            )
        trainable.append(trains)
    return trainable


def split_params(
    params: Any,
    predicate: Trainable | None,
) -> tuple[ParamsTree, list[Any]]:
    """Splits params into what is static and a list of arrays, with None in place of settings.

    Raises:
      TypeError: params is a model, or a leaf that is to be trained is complex.
      ValueError: No leaf is trained.
    """
    check_params(params)
    trainable = trainable_leaves(params, predicate)
    if not any(trainable):
        # A large model has thousands of leaves, so the error shows three.
        first = {path: dtype_name(leaf) for path, leaf in paths_of(params)[:3]}
        raise ValueError(
            f"params has no trainable leaf of floating dtype. Its first leaves are {first}. To "
            "train a Python scalar, convert it with jnp.asarray, and check that `trainable` "
            "accepts such paths."
        )
    leaves, structure = jax.tree.flatten(params)
    arrays = [leaf if is_array(leaf) else None for leaf in leaves]
    settings = tuple(None if is_array(leaf) else leaf for leaf in leaves)
    # A caller with parts replaces it, because patterns need the paths of params.
    part_of = (0,) * sum(trainable)
    return ParamsTree(structure, settings, tuple(trainable), part_of), arrays


# Models that users pass where their parameters belong: (module, class) to (name, remedy).
_MODELS = {
    ("flax.nnx", "Module"): (
        "an NNX module",
        "Split it by graph, params, rest = nnx.split(model, nnx.Param, ...), and merge it in "
        "loss_fn by nnx.merge(graph, params, rest, copy=True).",
    ),
    ("flax.linen", "Module"): (
        "a Linen module",
        "Pass model.init(key, inputs)['params'], and call model.apply({'params': params}, inputs) "
        "in loss_fn.",
    ),
    ("haiku", "Transformed"): (
        "a pair of Haiku functions",
        "Pass transformed.init(key, inputs), and call transformed.apply(params, key, inputs) in "
        "loss_fn.",
    ),
    ("haiku", "TransformedWithState"): (
        "a pair of Haiku functions",
        "Pass the first result of transformed.init(key, inputs), and call "
        "transformed.apply(params, state, key, inputs) in loss_fn.",
    ),
}


# Every leaf of every call is asked, so the answers are kept by class.
@functools.cache
def _model_kind(cls: type[Any]) -> tuple[str, str] | None:
    """Returns (name, remedy) for the class of a model. Flax and Haiku need not be installed."""
    for base in cls.__mro__:
        for (module, name), kind in _MODELS.items():
            # The classes are in submodules, such as `flax.nnx.module`.
            if base.__name__ == name and base.__module__.startswith(module):
                return kind
    return None


def check_params(params: Any) -> None:
    """Raises TypeError if params is or contains a model of Flax or Haiku, not its parameters."""
    # A model may be a pytree itself, so it is looked for before its leaves are.
    nodes = jax.tree.leaves(params, is_leaf=lambda node: _model_kind(node.__class__) is not None)
    for node in nodes:
        kind = _model_kind(node.__class__)
        if kind is not None:
            name, remedy = kind
            raise TypeError(
                f"params must be a pytree of arrays, got {name}, {type(node).__name__}. {remedy}"
            )


def check_batch(
    batch: Any,
    mask: Any,
    key: Any,
    *,
    group: bool,
) -> None:
    """Checks the shapes of a batch and its mask, and the type of a key.

    Raises:
      ValueError: Leaves of batch and mask differ in their leading axes.
      TypeError: mask is not boolean, or key is not a typed key.
    """
    n_leading = 2 if group else 1
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    # A batch without leaves has no leading axes at all, and is refused with those that differ.
    leading = {shape[:n_leading] for shape in shapes}
    too_short = any(len(shape) < n_leading for shape in shapes)
    if len(leading) != 1 or too_short:
        axes = "two leading axes [B, G]" if group else "a leading axis [B]"
        raise ValueError(
            f"Every leaf of batch must have {axes} of the same size, got shapes {shapes}."
        )
    (batch_shape,) = leading
    if mask is not None:
        _check_mask(mask, batch_shape)
    # A seed that is a Python number has no dtype, and is no typed key.
    key_dtype = getattr(key, "dtype", np.float32)
    if key is not None and not jnp.issubdtype(key_dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"key must be a typed key such as jax.random.key(seed), got {type(key).__name__}."
        )


def _check_mask(mask: Any, batch_shape: tuple[int, ...]) -> None:
    if not hasattr(mask, "dtype"):
        raise TypeError(
            f"mask must be a boolean array, got {type(mask).__name__}. Convert it with "
            "jax.numpy.asarray(mask, bool)."
        )
    dtype = jnp.result_type(mask)
    if dtype != jnp.bool_:
        raise TypeError(
            f"mask must be boolean, got {dtype}. Convert it with "
            "mask.astype(bool). If an example has several parts, pass them as one pytree, "
            "batch=(x, y)."
        )
    # The mask of a group may also be one value for all of its members.
    if jnp.shape(mask) not in {batch_shape, batch_shape[:1]}:
        raise ValueError(f"mask must have shape {batch_shape}, got {jnp.shape(mask)}.")
