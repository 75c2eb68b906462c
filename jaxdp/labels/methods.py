"""`METHODS`, the table of the ways in which labels are released, and what each costs."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxdp.labels.noisy import release_labels
from jaxdp.labels.stages import release_labels_in_stages
from jaxdp.privacy import ComposedDpEvent, DpEvent, LabelDpEvent

METHODS: Mapping[str, Callable[..., Any]] = {
    "labels": release_labels,
    "stages": release_labels_in_stages,
}


def event(epsilon: float, *, prior_epsilon: float = 0.0) -> DpEvent:
    """Returns what a method of `METHODS` charges for each record, with a charged prior before it.

    Args:
      epsilon: The epsilon of the labels.
      prior_epsilon: The epsilon of `release_label_prior`, or 0 without one.
    """
    return ComposedDpEvent([LabelDpEvent(epsilon), LabelDpEvent(prior_epsilon)])
