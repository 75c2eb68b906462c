"""The arguments that each method of `finetune.METHODS` needs beside those that all take.

Suites over all methods take them from here. A method without a row here fails each of them."""

from collections.abc import Mapping
from typing import Any

from jaxdp import finetune


def own_options(anchors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the arguments by the name of the method. `anchors` are the public examples of GEP."""
    subspace = {"anchors": anchors, "basis_size": 4, "groups": 1, "residual_clip_norm": 0.5}
    options: dict[str, dict[str, Any]] = {
        "dp_sgd": {},
        "adp_alloc": {"schedule": finetune.exponential_noise(0.2)},
        "adp_clip": {"count_noise": 1.5},
        "sla_clip": {"slots": 3},
        "gep": subspace,
    }
    assert options.keys() == finetune.METHODS.keys(), "a method lacks a row in own_options"
    return options
