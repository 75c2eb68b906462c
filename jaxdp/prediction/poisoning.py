"""What a poisoned record may become, for the threat "poison" of `train_with_bounds`.

The bounds are those of Sosnin et al., "Certified Robustness to Data Poisoning in Gradient-Based
Training" (arXiv:2406.05670), for an adversary who changes up to k records.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.transforms.boxes import outward, outward_in, unchecked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisoning:
    """What a poisoned record may become: features in a box, and another label.

    Attributes:
      radius: The l_inf distance by which the features may move.
      label_radius: The distance by which a label of regression may move.
      labels: The labels that the record may get, for example (0, 1). Empty for its own label only.
      features, label: The paths of these leaves in a record, such as "x" or "0".

    Raises:
      ValueError: A field is out of range, or nothing can change.
    """

    radius: float = 0.0
    label_radius: float = 0.0
    labels: tuple[float, ...] = ()
    features: str = "features"
    label: str = "label"

    def __post_init__(self) -> None:
        for name in ("radius", "label_radius"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}.")
        if not isinstance(self.labels, tuple) or not all(map(math.isfinite, self.labels)):
            raise ValueError(f"labels must be a tuple of finite numbers, got {self.labels!r}.")
        if self.labels and self.label_radius:
            raise ValueError(
                f"labels={self.labels} and label_radius={self.label_radius} exclude each other. "
                "Classes have labels, regression has a radius."
            )
        if not self.radius and not self.label_radius and not self.labels:
            raise ValueError(
                "radius=0, label_radius=0 and labels=() change no record. Set one of them."
            )
        if self.features == self.label:
            raise ValueError(
                f"features={self.features!r} and label={self.label!r} are one leaf, which cannot "
                "move as both. Name another leaf for the one that stays."
            )

    def check(self, record: Any) -> None:
        """Raises ValueError unless a record, of arrays or shapes, has the leaves that change."""
        leaves = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(record):
            leaves[_name(path)] = leaf
        moving = {}
        if self.radius:
            moving["features"] = self.features
        if self.label_radius:
            moving["label"] = self.label
        if self.labels and self.label not in leaves:
            raise ValueError(f"label={self.label!r} must be one of the leaves {sorted(leaves)}.")
        if self.labels:
            dtype = leaves[self.label].dtype
            # A label of 0.5 would be cut to 0, another label than the one that was asked for.
            is_whole = jnp.issubdtype(dtype, jnp.integer)
            if is_whole and any(label % 1 for label in self.labels):
                raise ValueError(f"labels={self.labels} must be integers, as the leaf is {dtype}.")
        for field, name in moving.items():
            if name not in leaves:
                raise ValueError(f"{field}={name!r} must be one of the leaves {sorted(leaves)}.")
            if not jnp.issubdtype(leaves[name].dtype, jnp.floating):
                raise ValueError(
                    f"the leaf {name} is {leaves[name].dtype}. Only floating-point leaves can "
                    "move within a box. Convert it, or use labels."
                )

    def results(self, record: Any) -> Any:
        """Returns all that a record can become: a pytree with a first axis, and `Interval`s.

        The first entry has the label of the record.
        """
        radii = {self.features: self.radius, self.label: self.label_radius}
        # Labels are alternatives, and a box for each is tighter than their hull.
        count = 1 + len(self.labels)

        def all_results(path: Any, x: jax.Array) -> Any:
            repeated = jnp.broadcast_to(x, (count, *x.shape))
            if self.labels and _name(path) == self.label:
                others = jnp.asarray(self.labels)
                others = others.astype(x.dtype)
                ones = (1,) * x.ndim
                # Entry 0 keeps the label of the record.
                return repeated.at[1:].set(others.reshape(-1, *ones))
            radius = radii.get(_name(path), 0.0)
            if not radius:
                return repeated
            # Rounded up by itself: where the sum is almost 0, its own rounding is far smaller.
            reach = outward_in(radius, x.dtype, +1)
            # Outward, since both sums are rounded.
            low = outward(repeated - reach, -1)
            high = outward(repeated + reach, +1)
            return unchecked(low, high)

        return jax.tree_util.tree_map_with_path(all_results, record)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
