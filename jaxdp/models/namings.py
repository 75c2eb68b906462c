"""The names of tensors in the files of each publisher.

Each naming is a section of namings.toml, a table from our modules to the names in the file. The
table is complete: a tensor that is missing, superfluous or of another shape is an error when
`jaxdp.models.checkpoints` reads a file.
"""

import dataclasses
import importlib.resources
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Two tensors of "augreg", from which the number of heads and the size of images are read.
QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
POSITIONS = "Transformer/posembed_input/pos_embedding"
Names = Mapping[str, str]
# Our name of a module's parameter to the end of its name in the file.
LEAVES: Mapping[str, Names] = {
    "torch": {"kernel": ".weight", "bias": ".bias", "scale": ".weight"},
    "batch_norm": {
        "kernel": ".weight",
        "bias": ".bias",
        "scale": ".weight",
        "mean": ".running_mean",
        "var": ".running_var",
    },
    "language": {
        "kernel": ".weight",
        "bias": ".bias",
        "scale": ".weight",
        "embedding": ".weight",
    },
}


def _from_torch(path: str, array: np.ndarray) -> np.ndarray:
    """Moves PyTorch's axes (out, in, *spatial) to ours, (*spatial, in, out)."""
    if not path.endswith("/kernel"):
        return array
    return np.moveaxis(array, (0, 1), (-1, -2))


def _from_convolution(path: str, array: np.ndarray) -> np.ndarray:
    """Converts as `_from_torch`. The head, a 1x1 convolution in the file, is a matrix."""
    if path == "head/kernel":
        return array[:, :, 0, 0].T
    return _from_torch(path, array)


def _from_caffe(path: str, array: np.ndarray) -> np.ndarray:
    """Converts as `_from_convolution`.

    The first convolution of the file takes the colours in the order blue, green, red.
    """
    if path == "conv/kernel":
        array = array[:, ::-1]
    return _from_convolution(path, array)


def _as_it_is(path: str, array: np.ndarray) -> np.ndarray:
    return array


def _from_flax(path: str, array: np.ndarray) -> np.ndarray:
    """Merges the axis of heads in attention, (D, heads, D / heads).

    All else is in the original Flax files as it is here.
    """
    if path.endswith("attention/out/kernel"):
        return array.reshape(-1, array.shape[-1])
    if re.search("attention/(query|key|value)/", path):
        if path.endswith("/kernel"):
            return array.reshape(len(array), -1)
        return array.ravel()
    return array


CONVERSIONS: Mapping[str, Callable[[str, np.ndarray], np.ndarray]] = {
    "torch": _from_torch,
    "head_as_convolution": _from_convolution,
    "caffe": _from_caffe,
    "flax": _from_flax,
    "none": _as_it_is,
}


class TensorPart(NamedTuple):
    """The place of a variable in a file.

    Attributes:
      name: The name of the tensor.
      part: "query", "key" or "value" of a tensor that stacks them, or "" for the whole tensor.
    """

    name: str
    part: str


@dataclasses.dataclass(frozen=True)
class Naming:
    """A publisher's names of tensors, a section of namings.toml, which explains the attributes."""

    signature: str
    names: Names
    ignored: Sequence[str] = ()
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    leaves: Names = dataclasses.field(default_factory=lambda: LEAVES["torch"])
    outputs_axis: int = 0
    convert: Callable[[str, np.ndarray], np.ndarray] = _from_torch
    resizes_positions: bool = False

    def find(self, path: str) -> TensorPart | None:
        """Returns where the file holds the variable of ours at `path`, or None."""
        leaf_pattern = f"(?:/({'|'.join(self.leaves)}))?"
        for our_name, file_name in self.names.items():
            match = re.fullmatch(pattern(our_name) + leaf_pattern, path)
            if match is None:
                continue
            *stars, leaf = match.groups()
            starred = file_name.replace("*", "{}").format(*stars)
            name, _, part = starred.partition("[")
            ending = self.leaves.get(leaf, "")
            return TensorPart(name + ending, part.removesuffix("]"))
        return None

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor of the file takes no part in classification."""
        return any(re.fullmatch(pattern(ignored), name) for ignored in self.ignored)


def pattern(starred: str) -> str:
    """Returns the regular expression of a name, in which a star stands for one number or word."""
    return re.escape(starred).replace(r"\*", "([^_/.]+)")


def naming_of(section: Mapping[str, Any]) -> Naming:
    """Returns the naming of a section. A key that it lacks has the default of its attribute.

    Raises:
      KeyError: The section names leaves or a conversion that do not exist.
      TypeError: The section has a key that no naming has.
    """
    attributes = dict(section)
    leaves = attributes.get("leaves")
    if isinstance(leaves, str):
        attributes["leaves"] = LEAVES[leaves]
    if "convert" in attributes:
        attributes["convert"] = CONVERSIONS[attributes["convert"]]
    return Naming(**attributes)


def _read() -> dict[str, Naming]:
    table = importlib.resources.files("jaxdp.models") / "namings.toml"
    sections = tomllib.loads(table.read_text(encoding="utf-8"))
    return {name: naming_of(section) for name, section in sections.items()}


# "auto" takes the first naming whose signature is in the file.
NAMINGS: Mapping[str, Naming] = _read()
