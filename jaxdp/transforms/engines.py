"""The engines: per-example norms, and sums of per-example gradients times factors.

An engine returns the norms first, because the factors of the sum follow from them, and a function
that computes the sum.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.transforms import jaxprs, shards, sites, walker
from jaxdp.transforms.components import (
    Asked,
    Choice,
    Component,
    TappedSite,
    connected,
    contract_rows,
    is_outer,
    spans_parts,
    sum_of_squares,
    total,
)
from jaxdp.transforms.grids import Outer
from jaxdp.transforms.loss_programs import Program, batched_gradient

Engine = Literal["auto", "bookkeeping", "vmap"]

# Kept gradients of components of at most this many entries are contracted together.
_SMALL = 4096


class EngineResult(NamedTuple):
    """The result of one engine's pass over a batch, before the clip factors are known.

    Attributes:
      losses: [B].
      aux: The auxiliary output, [B, ...].
      squared_norms: The squared norms [B] of the per-example gradients of each part.
      rows: The arrays [B, ...] that `weighted_sum` reads, with `LeftOut` around some.
      weighted_sum: (rows without `LeftOut`, factors [B] of each part) -> the sum of gradients times
        factors, for each leaf.
      grads: The per-example gradients [B, ...] for each leaf, or their factors where each is an
        outer product. None if not all are known.
    """

    losses: jax.Array
    aux: Any
    squared_norms: list[jax.Array]
    rows: Any
    weighted_sum: Callable[[Any, list[jax.Array]], list[jax.Array]]
    grads: list[Any] | None

    @property
    def finite(self) -> jax.Array:
        """Whether the loss and the gradient of each example are finite, [B]."""
        of_parts = map(jnp.isfinite, self.squared_norms)
        gradient_is_finite = functools.reduce(jnp.logical_and, of_parts)
        # A loss may be infinite where its gradient is finite, such as a weight plus infinity.
        return gradient_is_finite & jnp.isfinite(self.losses)


def by_vmap(
    program: Program,
    consts: list[Any],
    leaves: list[Any],
    batch: Any,
    part_of: Sequence[int],
) -> EngineResult:
    """Forms the gradients of all examples. Arguments as in `by_bookkeeping`."""
    evaluate = program.evaluate(consts)

    def loss(
        leaves: list[Any],
        example: list[Any],
    ) -> tuple[jax.Array, Any]:
        value, *aux = evaluate(*leaves, *example)
        return value, program.with_aux(aux)

    examples = jax.tree.leaves(batch)
    (losses, aux), grads = batched_gradient(loss, leaves, examples)
    # XLA may keep more digits of a bfloat16 gradient for its norm than for the sum.
    grads = [sites.settled(g).astype(sites.wide_dtype(g)) for g in grads]
    # Each part has a leaf, since a pattern that matches none is refused.
    by_part: list[list[jax.Array]] = [[] for _ in range(max(part_of) + 1)]
    for grad, part in zip(grads, part_of, strict=True):
        by_part[part].append(grad)
    squared_norms = [sum_of_squares(own) for own in by_part]

    def weighted_sum(rows: list[jax.Array], factors: list[jax.Array]) -> list[jax.Array]:
        of_leaves = [factors[part] for part in part_of]
        return contract_rows(rows, of_leaves)

    return EngineResult(losses, aux, squared_norms, grads, weighted_sum, grads)


def tap_plan(
    program: Program,
    consts: list[Any],
    leaves: Sequence[Any],
) -> walker.Plan:
    """Returns where the trainable leaves meet data in the loss of one example."""
    inputs = []
    for number, leaf in enumerate(leaves):
        # A leaf itself has every axis at its own place, as `Value.source` says.
        axes = tuple(range(jnp.ndim(leaf)))
        weight = walker.Value(data=False, leaves=frozenset({number}), source=axes)
        inputs.append(weight)
    # The first inputs of the program are the leaves. The others are the leaves of an example.
    n_of_example = len(program.jaxpr.invars) - len(leaves)
    inputs += [walker.Value(data=True)] * n_of_example
    # The loss itself must not be a weight: it gets a tap if it does not depend on data.
    return walker.make_plan(program.jaxpr, consts, inputs, close=(0,))


def by_bookkeeping(
    program: Program,
    consts: list[Any],
    leaves: list[Any],
    batch: Any,
    part_of: Sequence[int],
    choose: Choice,
) -> EngineResult:
    """Computes losses, norms and weighted sums from one backward pass to the taps.

    Args:
      program, consts, leaves: The traced loss, its constants and its trainable leaves.
      batch: A pytree with a leading axis B.
      part_of: The number of the part of each leaf, in 0..K-1. Each part has norms and factors
        of its own.
      choose: Which method computes the gradients of a component.
    """
    plan = tap_plan(program, consts, leaves)
    # Gradients are taken with respect to the taps and never to the leaves, which needs no B x P
    # memory.
    examples = jax.tree.leaves(batch)
    losses, aux, met = _tap_gradients(program, plan, leaves, examples)
    # J^T adds up gradients in float32 or wider, whatever the dtype of the leaves.
    wide = [x.astype(sites.wide_dtype(x)) for x in leaves]
    weights = plan.weights_program(wide)
    by_part: list[list[Component]] = [[] for _ in range(max(part_of) + 1)]
    for members in connected(plan.sites):
        own_sites = [met[number] for number in members]
        # The whole program would be evaluated again for each component.
        own_weights = jaxprs.restricted(weights, members)
        spans = spans_parts([one.site for one in own_sites], part_of)
        # Each part has a norm of its own, so a gradient in several parts has to be formed.
        choice = keep_all if spans else choose
        component = Component(own_sites, own_weights, wide, choice)
        pieces = component.in_parts(part_of)
        for part, piece in pieces.items():
            by_part[part].append(piece)
    sums = [_ComponentSums(components, wide, len(losses)) for components in by_part]

    def weighted_sum(rows: list[Any], factors: list[jax.Array]) -> list[jax.Array]:
        by_leaf: dict[int, jax.Array] = {}
        for part, own_rows, own_factors in zip(sums, rows, factors, strict=True):
            # No leaf is in two parts, so nothing is overwritten.
            by_leaf |= part.weighted_sum(own_rows, own_factors)
        return _for_each_leaf(by_leaf, wide)

    return EngineResult(
        losses=losses,
        aux=program.with_aux(aux),
        squared_norms=[part.squared_norms for part in sums],
        rows=[part.rows for part in sums],
        weighted_sum=weighted_sum,
        grads=_kept(sums, wide, len(losses)),
    )


def keep_all(asked: Asked) -> str:
    """Returns "keep": the choice under which the gradients of all examples are formed."""
    return "keep"


def outer_or_keep(asked: Asked) -> str:
    """Returns the choice under which `EngineResult.grads` are known, the large ones as factors."""
    if asked.size > _SMALL and is_outer(asked.sites, asked.size):
        return "factors"
    return "keep"


def _kept(
    sums: list["_ComponentSums"],
    leaves: list[jax.Array],
    n_examples: int,
) -> list[Any] | None:
    """Returns the per-example gradients of each leaf, or None if some are not known."""
    grads: dict[int, jax.Array | Outer] = {}
    for part in sums:
        for component in part.components:
            known = component.kept or component.outer
            if known is None:
                return None
            grads |= known
    return _for_each_leaf(grads, leaves, (n_examples,))


def _for_each_leaf(
    values: Mapping[int, Any],
    leaves: list[jax.Array],
    lead: tuple[int, ...] = (),
) -> list[Any]:
    """Returns the values in the order of leaves. A leaf that meets no data has zeros."""
    result = []
    for number, leaf in enumerate(leaves):
        if number in values:
            result.append(values[number])
            continue
        shape = (*lead, *leaf.shape)
        result.append(jnp.zeros(shape, leaf.dtype))
    return result


def _tap_gradients(
    program: Program,
    plan: walker.Plan,
    leaves: list[Any],
    examples: list[Any],
) -> tuple[jax.Array, list[Any], list[TappedSite]]:
    """Runs the forward pass, and the backward pass to the taps, of every example.

    Returns:
      The losses [B], the leaves of aux [B, ...], and each site with its record and cotangent.
    """

    def tapped(
        taps: list[jax.Array],
        example: list[Any],
    ) -> tuple[jax.Array, Any]:
        outputs, records = plan.forward([*leaves, *example], taps)
        value, *aux = outputs
        return value, (aux, records)

    # Taps vary over mesh axes as the leaves do. Otherwise JAX sums their cotangents over shards.
    axes = shards.varying_axes(*leaves)
    taps = [shards.vary(site.zero_tap(), axes) for site in plan.sites]
    (losses, (aux, records)), gradients = batched_gradient(tapped, taps, examples)
    cotangents = []
    for site, gradient in zip(plan.sites, gradients, strict=True):
        # A tap has an axis of length one behind its loops, see `Site.zero_tap`.
        shape = (len(gradient), *site.tap.shape)
        cotangents.append(gradient.reshape(shape))
    met = zip(plan.sites, records, cotangents, strict=True)
    tapped_sites = [TappedSite(*values) for values in met]
    return losses, aux, tapped_sites


class _ComponentSums:
    """Norms and sums of all components of a part.

    Small gradients that are kept lie side by side in one array: many small contractions take long
    to compile. A contraction of all columns would take as long as that of the largest gradient, so
    large ones are contracted one by one.

    Attributes:
      components: The components.
      squared_norms: [B].
      rows: What `weighted_sum` reads: the array of small gradients, and the rows of each large
        component.
    """

    def __init__(
        self,
        components: list[Component],
        leaves: list[jax.Array],
        n_examples: int,
    ):
        self.components = components
        self._leaves = leaves
        dtype = sites.wide_dtype(*leaves)
        self._columns: dict[int, jax.Array] = {}
        self._large: list[Component] = []
        for component in components:
            # What is not kept reads records and cotangents, which have no columns.
            if component.kept is None or component.size > _SMALL:
                self._large.append(component)
                continue
            for leaf, grads in component.kept.items():
                columns = grads.reshape(n_examples, -1)
                self._columns[leaf] = columns.astype(dtype)
        # Concatenation needs an array, also in a part without small gradients.
        no_column = jnp.zeros((n_examples, 0), dtype)
        all_columns = list(self._columns.values()) or [no_column]
        side_by_side = jnp.concatenate(all_columns, 1)
        norms = [sum_of_squares([side_by_side])]
        norms += [component.squared_norms for component in self._large]
        self.squared_norms = total(norms, dtype)
        self.rows = (side_by_side, [component.rows for component in self._large])

    def weighted_sum(
        self,
        rows: Any,
        factors: jax.Array,
    ) -> dict[int, jax.Array]:
        """Returns the sum of gradients times factors, by leaf."""
        side_by_side, of_large = rows
        # One contraction of [B, all columns], whatever number of small leaves there is.
        (small_sums,) = contract_rows([side_by_side], [factors])
        sums = self._cut(small_sums)
        for component, own_rows in zip(self._large, of_large, strict=True):
            sums |= component.weighted_sum(own_rows, factors)
        return sums

    def _cut(self, small_sums: jax.Array) -> dict[int, jax.Array]:
        """Cuts one sum of all columns into sums of leaves."""
        if not self._columns:
            return {}
        # Dicts keep their order, which is that of the columns.
        widths = [grads.shape[1] for grads in self._columns.values()]
        cuts = list(itertools.accumulate(widths))
        parts = jnp.split(small_sums, cuts[:-1])
        sums = {}
        for number, part in zip(self._columns, parts, strict=True):
            leaf = self._leaves[number]
            sums[number] = part.reshape(leaf.shape).astype(leaf.dtype)
        return sums
