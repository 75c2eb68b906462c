"""How each leaf of params is treated by a clipped gradient, and what that costs."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxdp.transforms import jaxprs, sites
from jaxdp.transforms.clip_arguments import dtype_name
from jaxdp.transforms.components import (
    applied,
    channel_form,
    connected,
    leaves_of,
    spans_parts,
)
from jaxdp.transforms.engines import Engine, tap_plan
from jaxdp.transforms.example_loss import BatchedLoss
from jaxdp.transforms.loss_programs import Program, trace_loss
from jaxdp.transforms.method_costs import choose_method, method_costs


class LeafPlan(NamedTuple):
    """How `clipped_grad` treats one leaf of params.

    Attributes:
      path: The path of the leaf, such as "Dense_0/kernel".
      shape: Its shape.
      dtype: The name of its dtype.
      rules: How the leaf meets data: "dot_general", "convolution", "embedding" (lookups and slices
        at places that depend on data), or "direct" (scales, biases, and operations without a rule).
      method: "factors" (norms by Gram matrices, or by looked-up rows), "keep" (per-example
        gradients, kept for the sum), "drop" (per-example gradients, formed a second time for the
        sum), "vmap", "frozen" or "no gradient".
      work: The cost of norm and clipped sum over that of an ordinary gradient, by counted
          operations and bytes.
      bytes: The bytes per example that clipping needs beyond an ordinary gradient.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    rules: tuple[str, ...]
    method: str
    work: float
    bytes: int


class Treatment(NamedTuple):
    """The part of a `LeafPlan` that depends on the loss."""

    rules: tuple[str, ...]
    method: str
    work: float
    bytes: int


FROZEN = Treatment((), "frozen", 0.0, 0)
_NO_GRADIENT = Treatment((), "no gradient", 0.0, 0)

_RULE_NAMES = {
    sites.Dot: "dot_general",
    sites.Conv: "convolution",
    sites.Lookup: "embedding",
    sites.OnWeight: "direct",
}


def leaf_plan(
    path: str,
    leaf: Any,
    treatment: Treatment,
) -> LeafPlan:
    """Returns the plan of a leaf that is treated so."""
    return LeafPlan(path, jnp.shape(leaf), dtype_name(leaf), *treatment)


def treatments(
    engine: Engine,
    batched: BatchedLoss,
    part_of: Sequence[int],
) -> list[Treatment]:
    """Returns how an engine treats each trainable leaf, whose parts have these numbers."""
    program, consts = trace_loss(batched.loss, batched.leaves, batched.batch)
    if engine == "vmap":
        return _by_vmap(program, batched.leaves)
    may_keep = engine == "auto"
    return _by_bookkeeping(program, consts, batched.leaves, part_of, may_keep=may_keep)


def _by_vmap(program: Program, leaves: Sequence[Any]) -> list[Treatment]:
    # A leaf can be a result itself.
    read = {id(variable) for variable in program.jaxpr.outvars}
    for eqn in program.jaxpr.eqns:
        read.update(map(id, eqn.invars))
    result = []
    # The first inputs are the leaves, the others those of an example.
    for leaf, variable in zip(leaves, program.jaxpr.invars, strict=False):
        if id(variable) in read:
            size = math.prod(jnp.shape(leaf))
            # The engine counts no work. A gradient is float32, of 4 bytes an entry.
            result.append(Treatment((), "vmap", math.nan, 4 * size))
        else:
            result.append(_NO_GRADIENT)
    return result


def _by_bookkeeping(
    program: Program,
    consts: list[Any],
    leaves: list[Any],
    part_of: Sequence[int],
    *,
    may_keep: bool,
) -> list[Treatment]:
    # This repeats the choices of `engines.by_bookkeeping`, on shapes.
    plan = tap_plan(program, consts, leaves)
    # Gradients are float32 or wider, whatever the leaves are.
    wide = [jax.ShapeDtypeStruct(jnp.shape(x), sites.wide_dtype(x)) for x in leaves]
    weights = plan.weights_program(wide)
    result = [_NO_GRADIENT] * len(leaves)
    for numbers in connected(plan.sites):
        component = [plan.sites[number] for number in numbers]
        members = leaves_of(component)
        leaf_size = sum(math.prod(wide[leaf].shape) for leaf in members)
        # A norm by factors would be that of all parts together.
        choice = "keep"
        own_weights = jaxprs.restricted(weights, numbers)
        has_form = _has_form(component, own_weights, wide)
        if not spans_parts(component, part_of):
            choice = choose_method(component, leaf_size, may_keep, has_form)
        # A weight with a form may be dropped although J^T does more than move entries.
        method = choice if has_form else applied(choice, own_weights)
        options, ordinary = method_costs(component, leaf_size, may_keep, has_form)
        # A "keep" in place of a "drop" has no entry of its own if it takes too much memory.
        cost = options.get(method, options["drop"])
        # Counts may say less than an ordinary gradient, which the sum computes in any case.
        work = max(1.0, cost / max(ordinary, 1.0))
        rules = tuple(sorted({_RULE_NAMES[type(site.rule)] for site in component}))
        for leaf in members:
            if method == "factors":
                # The arrays of a norm belong to the component, so its leaves share them.
                extra = _norm_bytes(component) // len(members)
            else:
                extra = 4 * math.prod(wide[leaf].shape)
            result[leaf] = Treatment(rules, method, work, extra)
    return result


def _has_form(component: list[sites.Site], weights: jex.ClosedJaxpr, shapes: Sequence[Any]) -> bool:
    """Returns whether norms of the component may use the form of `channel_weights`."""
    has_form = False

    def look(leaves: list[Any]) -> None:
        nonlocal has_form
        has_form = channel_form(component, weights, leaves, has_kernel=False) is not None

    jax.eval_shape(look, list(shapes))
    return has_form


def _norm_bytes(component: Sequence[sites.Site]) -> int:
    """Returns the bytes that a norm by factors needs, for one example."""
    # Their sums of equal rows are as large as the cotangents.
    if all(isinstance(site.rule, sites.Lookup) for site in component):
        return sum(4 * math.prod(site.tap.shape) for site in component)
    total = 0
    for site in component:
        if site.positions > 1:  # two blocks of Gram matrices
            total += 8 * site.blocks * sites.gram_rows(site.positions) ** 2
    return total
