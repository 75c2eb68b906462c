"""The neighbouring relations and the methods of accounting."""

from collections.abc import Mapping
from typing import Literal, get_args

from dp_accounting import NeighboringRelation

Adjacency = Literal["add_remove", "replace_one", "zero_out", "replace_label"]
Method = Literal["auto", "pld", "rdp"]

RELATIONS: Mapping[str, NeighboringRelation] = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    # For `LabelDpEvent` only. All relations of dp_accounting are the same for pure events.
    "replace_label": NeighboringRelation.REPLACE_ONE,
}
LABELS: Adjacency = "replace_label"
# What a claim of an adjacency protects, in the words of errors and reports.
PROTECTED: Mapping[str, str] = {
    "add_remove": "whole examples",
    "replace_one": "whole examples",
    "zero_out": "whole examples",
    "replace_label": "labels only",
}
METHODS = get_args(Method)


def distance_factor(adjacency: Adjacency) -> int:
    """Returns how many norms of one record a sum moves between neighbours: 2 for "replace_one"."""
    return 2 if adjacency == "replace_one" else 1
