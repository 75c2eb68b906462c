"""Certified predictions: the distance up to which no change of the data changes a label.

Lemma 4.4 of arXiv:2406.13433.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.data.storage import on_device
from jaxdp.prediction.checks import check_queries
from jaxdp.prediction.plan import Layout, Threat
from jaxdp.report import progress_bar
from jaxdp.transforms.boxes import Interval, lower, unchecked, upper
from jaxdp.transforms.interval_rules import certain_argmax
from jaxdp.transforms.intervals import bound
from jaxdp.transforms.precision import in_full_precision

# Queries that are certified at the same time.
_QUERIES = 256

Leaves = list[jax.Array]
Ends = tuple[Any, Any]  # lower and upper ends


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bounds:
    """Nominal parameters and a box around them for each distance.

    Attributes:
      params: The parameters that training on the given data returns, a pytree.
      lower, upper: Pytrees like `params` with leaves [len(ks), ...]. Row i contains every parameter
        vector that training on a data set within distance ks[i] returns. Frozen leaves are repeated
        without copies.
      ks: The distances, increasing.
      threat, product: As in `train_with_bounds`.
      trainable: Whether each leaf was trained, in the order of `jax.tree.leaves(params)`.
    """

    params: Any
    lower: Any
    upper: Any
    ks: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    threat: Threat = dataclasses.field(metadata={"static": True})
    trainable: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    product: str = dataclasses.field(default="tight", metadata={"static": True})

    @property
    def layout(self) -> Layout:
        """The trained and the frozen leaves of `params`."""
        return Layout(jax.tree.structure(self.params), self.trainable)


class Certificates(NamedTuple):
    """Certified facts about predictions.

    They are PRIVATE: distances and logits depend on the training data.

    Attributes:
      label: int32 [Q], the class of the largest logit. For one logit: 1 if it is positive, else 0.
        It is the common label of all parameter vectors in the first row of the bounds if they
        agree, else the nominal label.
      distance: int32 [Q], the stable distance k'. No data set within distance k' changes the label.
        The k' of neighbouring data sets differ by at most 1. With a sparse grid of ks it counts
        certified grid points.
      logits: `Interval` with ends [len(ks), Q, C].
    """

    label: jax.Array
    distance: jax.Array
    logits: Interval


def certify(
    bounds: Bounds,
    apply_fn: Callable[[Any, Any], jax.Array],
    queries: Any,
    *,
    product: str = "tight",
) -> Certificates:
    """Finds the distances up to which changes of the data do not change a prediction (Lemma 4.4).

    The label is stable at distance k if the same logit is the largest for every parameter vector in
    row k. Differences of logits are bounded as differences of the last layer's weights (T2), which
    is tighter than comparing intervals.

    Args:
      bounds: The result of `train_with_bounds`.
      apply_fn: `apply_fn(params, query) -> logits` of ONE query, [] or [1] (label 1 if positive) or
          [C].
      queries: A pytree of arrays [Q, ...], Q >= 1, finite.
      product: See `jaxdp.interval`.

    Returns:
      `Certificates`. The distance is the largest k in bounds.ks up to which the label is certified
      without a gap. If the ks skip integers, it is the number of certified ks above 0, because k
      itself would jump by more than 1 between neighbouring data sets. Mechanisms need 0 among the
      ks. Then neighbours agree on the label even if their nominal logits differ by rounding.

    Raises:
      TypeError, ValueError: bounds, logits or queries are not as above.
    """
    if not isinstance(bounds, Bounds):
        raise TypeError(f"bounds must come from train_with_bounds, got {type(bounds).__name__}.")
    check_queries(apply_fn, bounds.params, queries)
    layout = bounds.layout
    moving, frozen = layout.split(bounds.params)
    low, _ = layout.split(bounds.lower)
    high, _ = layout.split(bounds.upper)
    box = low, high
    queries = jax.tree.map(on_device, queries)
    rows = []
    for k in progress_bar(range(len(bounds.ks)), label="certificates", unit="distance"):
        # An array, so that all distances share one program.
        row = _certain(apply_fn, product, layout, box, np.int32(k), frozen, queries)
        # One row at a time is in memory, and the bar keeps up.
        rows.append(jax.block_until_ready(row))
    return _certificates(apply_fn, layout, bounds.ks, moving, frozen, queries, rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _certain(
    apply_fn: Any,
    product: str,
    layout: Layout,
    box: Ends,
    row: jax.Array,
    frozen: Leaves,
    queries: Any,
) -> tuple[jax.Array, Ends]:
    """Returns the certain labels [Q] in a row of the box, or -1, and the ends of logits [Q, C]."""
    # Cut inside of the program, so that no copy of a row is made outside of it.
    boxes = [unchecked(low[row], high[row]) for low, high in zip(*box, strict=True)]
    params = layout.join(boxes, frozen)

    def certify_one(query: Any) -> tuple[jax.Array, Ends]:
        (logits,), _ = bound(apply_fn, (params, query), product=product)
        low = jnp.asarray(lower(logits)).reshape(-1)
        high = jnp.asarray(upper(logits)).reshape(-1)
        ends = low, high
        if low.size > 1:
            # With what is known of their differences, which share the last layer's inputs (T2).
            return certain_argmax(logits, product), ends
        is_one = low[0] > 0
        # As for a nominal logit, 0 itself gives the label 0. A NaN end gives -1.
        zero_or_unknown = jnp.where(high[0] <= 0, 0, -1)
        label = jnp.where(is_one, 1, zero_or_unknown)
        return label.astype(jnp.int32), ends

    return lax.map(certify_one, queries, batch_size=_QUERIES)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _certificates(
    apply_fn: Any,
    layout: Layout,
    ks: tuple[int, ...],
    moving: Leaves,
    frozen: Leaves,
    queries: Any,
    rows: list[tuple[jax.Array, Ends]],
) -> Certificates:
    """Returns the certificates from the certain labels and the ends of logits of every row."""
    certain, (low, high) = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    # A NaN end tells nothing.
    low = jnp.where(jnp.isnan(low), -jnp.inf, low)
    high = jnp.where(jnp.isnan(high), jnp.inf, high)
    params = layout.join(moving, frozen)

    def nominal_label(query: Any) -> jax.Array:
        logits = in_full_precision(apply_fn)(params, query).reshape(-1)
        if logits.size == 1:
            label = logits[0] > 0
        else:
            label = jnp.argmax(logits)
        return label.astype(jnp.int32)

    # Rounding may order nominal logits differently from all logits in the box.
    is_certain = certain[0] >= 0
    certain_labels = certain[0]
    nominal_labels = lax.map(nominal_label, queries, batch_size=_QUERIES)
    labels = jnp.where(is_certain, certain_labels, nominal_labels)
    # A gap ends the count: row i counts if all rows up to it are certain.
    is_stable = jnp.cumprod(certain == labels[None], axis=0)
    # A label that is certain at k = 0 is at the distance 0.
    is_distance = np.asarray(ks) > 0
    distance = jnp.sum(is_stable[is_distance], axis=0, dtype=jnp.int32)
    return Certificates(labels, distance, unchecked(low, high))
