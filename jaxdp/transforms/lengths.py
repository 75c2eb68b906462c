"""The old name of `exact_scaling`."""

from jaxdp.transforms.exact_scaling import finite, in_units, times_power, tree_in_units

__all__ = ["finite", "in_units", "times_power", "tree_in_units"]
