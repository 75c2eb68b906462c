"""The cost of each method of a component, by counted operations and bytes.

Costs are in bytes: an operation counts as the share of a byte that is moved in the same time.
"""

import math
from typing import NamedTuple

from jaxdp.transforms import dense, forms, sites
from jaxdp.transforms.components import can_factor

# Where factors are possible, per-example gradients of more bytes than this are kept only if the
# factors take about as many. The gradient of an embedding of 50,000 tokens takes 150 MB for each
# example.
_ROOM = 2.0**24
# The number of floating-point operations that take as long as moving one byte. Only orders of
# magnitude matter.
_BALANCE = {"cpu": 4.0, "cuda": 20.0, "rocm": 20.0, "tpu": 50.0}
_FLOAT = 4.0  # bytes
# How often J^T of weight standardisation reads a gradient on an H100, beside the norm.
_READS_OF_FORM = 2
# A result is written and read again.
_WRITTEN_AND_READ = 2 * _FLOAT


class _SiteCosts(NamedTuple):
    """What the steps of all methods cost at one site, for one example.

    Attributes:
      activations: The bytes of the result of the site.
      factors: The bytes of u and w.
      contract: The weighted sum, which costs as much as the ordinary gradient.
      form: To form the gradient.
      form_for_norm: To form it for its norm alone.
      gram: The norm from factors.
    """

    activations: float
    factors: float
    contract: float
    form: float
    form_for_norm: float
    gram: float


def choose_method(
    component: list[sites.Site],
    leaf_size: int,
    keep: bool,
    has_form: bool = False,
) -> str:
    """Returns the cheapest method for a component. Arguments as in `method_costs`."""
    options, _ = method_costs(component, leaf_size, keep, has_form)
    return min(options, key=lambda name: options[name])


def method_costs(
    component: list[sites.Site], leaf_size: int, keep: bool, has_form: bool = False
) -> tuple[dict[str, float], float]:
    """Returns (cost of each possible method, cost of the ordinary gradient).

    Args:
      component: Its sites.
      leaf_size: The number of entries of its leaves.
      keep: Whether gradients of up to 16 MB may be kept. Otherwise they may take no more memory
        than activations do.
      has_form: Whether its weight has the form of `channel_weights`.
    """
    n_lookups = sum(isinstance(site.rule, sites.Lookup) for site in component)
    lookups_only = n_lookups == len(component)
    alone = len(component) == 1
    costs = [_site_costs(site, alone=alone, lookups_only=lookups_only) for site in component]
    contract = sum(cost.contract for cost in costs)
    form = sum(cost.form for cost in costs)
    options = {"drop": sum(cost.form_for_norm for cost in costs) + contract}

    factorable = has_form or can_factor(component)
    if not keep:
        room = sum(cost.activations for cost in costs)
    # Factors take this memory anyway, so gradients of about their size cost no more of it.
    elif factorable:
        room = max(_ROOM, 1.25 * sum(cost.factors for cost in costs))
    else:
        # There is no other way than to form the gradients.
        room = math.inf
    if _FLOAT * leaf_size <= room:
        # The sum multiplies and adds each entry of a gradient that is kept.
        read_again = _FLOAT * leaf_size * (1 + 2 / _BALANCE[forms.platform()])
        if has_form:  # J^T reads the gradients for its sums, and once more for the norm
            read_again += _READS_OF_FORM * _FLOAT * leaf_size
        options["keep"] = form + read_again
    if factorable:
        gram = sum(cost.gram for cost in costs)
        if not lookups_only:
            # Each site has a product with each other one. A product with rows of an identity
            # matrix costs next to nothing.
            gram *= max(1, len(component) - n_lookups)
        options["factors"] = gram + contract
    return options, contract


def _site_costs(
    site: sites.Site,
    *,
    alone: bool,
    lookups_only: bool,
) -> _SiteCosts:
    """Returns the costs at one site.

    Args:
      site: The site.
      alone: Whether its component has no other site. Only then a kernel forms gradients for norms.
      lookups_only: Whether all sites of its component are lookups.
    """
    rule = site.rule
    positions = site.positions
    slices = site.blocks
    activations = _FLOAT * math.prod(site.tap.shape)
    if isinstance(rule, sites.OnWeight):  # the cotangent is dV, and is only scaled and summed
        contract = _WRITTEN_AND_READ * slices * positions * rule.cols
        return _SiteCosts(activations, 0.0, contract, 0.0, 0.0, 0.0)
    # u of a lookup is an index, so nothing is multiplied by its entries.
    width_u = 1 if isinstance(rule, sites.Lookup) else rule.rows
    operations = 2.0 * slices * positions * rule.cols * width_u
    work = operations / _BALANCE[forms.platform()]
    form = work + _WRITTEN_AND_READ * slices * rule.rows * rule.cols
    kernels: dict[str, float] = {}
    if rule.is_dense and forms.platform() == "tpu":
        kernels = dense.costs(positions, rule.rows, rule.cols)
    contract = slices * kernels["weighted"] if "weighted" in kernels else work
    form_for_norm = form
    if alone and "formed" in kernels:  # the kernel writes no gradient
        form_for_norm = min(form, slices * kernels["formed"])
    if "gram" in kernels:
        gram = slices * kernels["gram"]
    elif lookups_only:
        gram = 2 * work + _WRITTEN_AND_READ * slices * positions * rule.cols
    else:
        gram = _gram_cost(site)
    factors = _FLOAT * slices * positions * (rule.cols + width_u)
    return _SiteCosts(activations, factors, contract, form, form_for_norm, gram)


def _gram_cost(site: sites.Site) -> float:
    """Returns the cost of the norm by Gram matrices, or by two norms at a single position."""
    rule = site.rule
    positions = site.positions
    slices = site.blocks
    if positions == 1:
        return _FLOAT * slices * (rule.rows + rule.cols)  # the product of two squared norms
    # Of symmetric matrices, the blocks on and above the diagonal are computed.
    computed = (1 + sites.gram_rows(positions) / positions) / 2
    width_u = 0 if isinstance(rule, sites.Lookup) else rule.rows
    operations = 2.0 * (rule.cols + width_u)  # for one entry of both matrices
    entry = operations / _BALANCE[forms.platform()] + _WRITTEN_AND_READ
    return computed * slices * positions * positions * entry
