"""Components: sets of leaves and sites whose gradients belong together.

A site's gradient dV belongs to one leaf or, where a weight is computed from several leaves, to all
of them. A leaf that meets data at several sites joins them. The norm of a component is the norm of
J^T dV, where J is the Jacobian of the weights of its sites with respect to its leaves. A component
computes it by one of three methods:

* "factors": dV is not formed. Its norm follows from Gram matrices of its factors, or from the rows
  that a lookup reads.
* "keep": the gradients of all examples are formed, and kept for the sum.
* "drop": they are formed for the norm only, and the sum is one contraction.
"""

import collections
import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms import (
    channel_weights,
    dense,
    forms,
    jaxprs,
    products,
    rounding,
    sites,
    walker,
)
from jaxdp.transforms.grids import Outer


class Asked(NamedTuple):
    """A component whose method is to be chosen.

    Attributes:
      sites: Its sites.
      size: The number of entries of its leaves.
      has_kernel: Whether a kernel forms its gradients.
      has_form: Whether its weight has the form of `channel_weights`, whose norm needs no gradient
        of the leaves.
    """

    sites: list[sites.Site]
    size: int
    has_kernel: bool
    has_form: bool


# The method, "factors", "keep" or "drop".
Choice = Callable[[Asked], str]


# Platforms where a sum of kept gradients leaves out those of the factor 0.
_FUSED_SUMS = ("cuda", "tpu")


class LeftOut(NamedTuple):
    """Arrays [B, ...] of which a sum leaves out the rows of the factor 0, whatever they hold."""

    arrays: Any


class TappedSite(NamedTuple):
    """A site with what a pass over a batch found there.

    Attributes:
      site: Where a weight meets data.
      record: The other operand, [B, ...].
      cotangent: The cotangent of the tap, [B, ...].
    """

    site: sites.Site
    record: Any
    cotangent: jax.Array

    def settled(self, method: str, *, alone: bool) -> "TappedSite":
        """Returns the site with values as the norm and the sum read them."""
        site = self.site
        record, cotangent = site.settled(method, self.record, self.cotangent, alone=alone)
        return self._replace(record=record, cotangent=cotangent)

    def with_distinct_rows(self) -> "TappedSite":
        """Adds up the equal rows of a lookup.

        The sum then has one term of an example in each row of the table. The values of other rules
        stay.
        """
        if not isinstance(self.site.rule, sites.Lookup):
            return self
        summed = sites.summed_rows(self.site, self.record, self.cotangent)
        return TappedSite(*summed)

    def factors(self) -> sites.Pair:
        """Returns the factors of dV of every example, (parts of u, w)."""
        return self.site.factors(self.record, self.cotangent)

    @property
    def forms_by_convolution(self) -> bool:
        """Whether a kernel of convolutions forms the gradients for their norms."""
        norm_kernel, _ = self.site.kernels("drop", self.record, self.cotangent)
        return norm_kernel == "convolution"


def connected(all_sites: Sequence[sites.Site]) -> list[list[int]]:
    """Groups the numbers of sites so that no leaf belongs to two groups.

    Sites without entries are left out. For example, sites of the leaves {0}, {1}, {0, 2} and {1}
    are in the groups [0, 2] and [1, 3].
    """
    met = [(number, site) for number, site in enumerate(all_sites) if not site.empty]
    group_of: dict[int, int] = {}  # each leaf's group, named by its first leaf
    for _, site in met:
        # The groups that this site makes one.
        joined = {group_of.get(leaf, leaf) for leaf in site.leaves}
        name = min(joined)
        for leaf, group in group_of.items():
            if group in joined:
                group_of[leaf] = name
        for leaf in site.leaves:
            group_of[leaf] = name
    members = collections.defaultdict(list)
    for number, site in met:
        members[group_of[min(site.leaves)]].append(number)
    return list(members.values())


def leaves_of(component: Sequence[sites.Site]) -> list[int]:
    """Returns the numbers of the leaves of a component, ascending."""
    of_sites = [site.leaves for site in component]
    return sorted(frozenset[int]().union(*of_sites))


def spans_parts(component: Sequence[sites.Site], part_of: Sequence[int]) -> bool:
    """Returns whether leaves of a component are in different parts.

    Its gradients are then kept, because a norm by factors is that of all of its leaves.
    """
    leaves = leaves_of(component)
    numbers = {part_of[leaf] for leaf in leaves}
    return len(numbers) > 1


def sum_of_squares(grads: Sequence[jax.Array]) -> jax.Array:
    """Computes the squared norms [B] of gradients [B, ...] in the widest of their dtypes."""
    squares = list(map(products.squared_lengths, grads))
    dtype = sites.wide_dtype(*grads)
    return total(squares, dtype)


def total(terms: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Adds up arrays in a given dtype."""
    return functools.reduce(jnp.add, [x.astype(dtype) for x in terms])


class Component:
    """The gradients of a set of leaves, from all sites at which they meet data.

    Attributes:
      size: The number of entries of the leaves.
      squared_norms: [B]. The squared norms of the per-example gradients of the leaves.
      kept: The gradients [B, ...] by leaf, or None if they are not kept.
    """

    def __init__(
        self,
        tapped: list[TappedSite],
        weights: jex.ClosedJaxpr,
        leaves: list[Any],
        choose: Choice,
    ):
        """Computes the norms.

        Args:
          tapped: The sites of the component.
          weights: The program from all trainable leaves to the weights at these sites.
          leaves: All trainable leaves, in float32 or wider.
          choose: Which method is used.
        """
        all_sites = [one.site for one in tapped]
        self._members = leaves_of(all_sites)
        self.size = sum(leaves[number].size for number in self._members)
        self.kept: dict[int, jax.Array] | None = None
        self._pull = _pull_back(weights, leaves, self._members)
        alone = len(tapped) == 1
        # A kernel writes the norm of one dV, and a sum of several would need the gradients.
        has_kernel = alone and tapped[0].forms_by_convolution
        form = channel_form(all_sites, weights, leaves, has_kernel=has_kernel)
        preferred = choose(Asked(all_sites, self.size, has_kernel, form is not None))
        # What is kept are gradients of the leaves, formed by `_pull`.
        self._form = None if preferred == "keep" else form
        self._scales_sum = False  # whether sums are those of dV, to be multiplied by s
        if self._form is not None:
            self.squared_norms = self._norms_of_channels(tapped[0], preferred)
            return
        method = applied(preferred, weights)
        self._tapped = [one.settled(method, alone=alone) for one in tapped]
        # What is kept is a sum of the terms of one example already.
        if method != "keep":
            self._tapped = [one.with_distinct_rows() for one in self._tapped]
        if method == "factors":
            pairs, lanes = self._oriented_factors()
            self.squared_norms = sites.squared_norms(pairs, lanes)
        elif method == "drop":
            self.squared_norms = self._norms_of_dropped()
        else:
            grads = self._formed()
            self.squared_norms = sum_of_squares(grads)
            self.kept = dict(zip(self._members, grads, strict=True))

    def _formed(self) -> list[jax.Array]:
        """Forms the gradients [B, ...] of the leaves."""
        of_weights = [one.site.per_example(one.record, one.cotangent) for one in self._tapped]
        # J depends on the leaves only, so its transpose serves all examples.
        return jax.vmap(self._pull)(of_weights)

    def _norms_of_dropped(self) -> jax.Array:
        """Returns squared norms of gradients that are formed here, and a second time in the sum.

        The two may be rounded differently. So the result covers the longer one, as `rounding`
        explains.
        """
        if len(self._tapped) == 1:  # `_pull` only moves entries, so dV has the norm
            (one,) = self._tapped
            squares, spread, apart = one.site.norm_of_formed(one.record, one.cotangent)
        else:
            # Gradients of the leaf from several sites may cancel, so their sum is formed.
            squares = sum_of_squares(self._formed())
            spread = jnp.zeros_like(squares)
            lengths = []
            for one in self._tapped:
                lengths.append(one.site.without_cancellation(one.record, one.cotangent))
            # M of several sites is the sum of theirs.
            apart = total(lengths, squares.dtype)
        # Each site adds its gradient to that of the leaf, which is one more term.
        most = max(one.site.terms for one in self._tapped)
        terms = most + len(self._tapped) + sites.lost_in_parts()
        # Twice, for the gradients of the norm and those of the sum.
        error = 2 * rounding.of_sum(terms, squares.dtype) * apart
        return rounding.covered(squares, spread, error)

    def _norms_of_channels(self, tapped: TappedSite, method: str) -> jax.Array:
        """Returns squared norms where J is a factor of each channel plus terms of low rank."""
        assert self._form is not None
        rule, g = tapped.site.rule, tapped.cotangent
        assert isinstance(rule, sites.Conv)
        # Inner products with ones are window sums, which need no kernel.
        has_base = any(base is not None for base in self._form.bases)
        if has_base and tapped.site.has_column_sums(tapped.record, g):
            return self._norms_of_column_sums(tapped)
        # The gradient of the scaled cotangents is s dV.
        scaled = tapped._replace(cotangent=channel_weights.scaled(self._form, rule, g))
        one = scaled.settled(method, alone=True)
        self._tapped = [one]
        self._low_rank, added, spread, error = channel_weights.low_rank(
            self._form, rule, one.record, g, one.cotangent
        )
        by_factors = method == "factors"
        norm = one.site.norm_by_factors if by_factors else one.site.norm_of_formed
        squares, own_spread, apart = norm(one.record, one.cotangent)
        # One more term, because J^T adds a multiple of the bases to s dV.
        terms = one.site.terms + 1 + sites.lost_in_parts()
        error = error + 2 * rounding.of_sum(terms, squares.dtype) * apart
        return rounding.covered(squares + added, own_spread + spread, error)

    def _norms_of_column_sums(self, tapped: TappedSite) -> jax.Array:
        """Returns the same where a kernel forms dV and multiplies it with all that J reads."""
        assert self._form is not None
        one = tapped.settled("drop", alone=True)
        self._tapped = [one]
        self._scales_sum = True
        bases = self._form.full_bases.reshape(-1, *one.site.rule.weight_shape)
        sums, apart = one.site.column_sums(one.record, one.cotangent, bases)
        self._low_rank, squares, spread, error = channel_weights.of_column_sums(self._form, sums)
        terms = one.site.terms + 1 + sites.lost_in_parts()
        # What is summed here is dV, so its error is multiplied by s as well.
        longest = jnp.abs(self._form.scale).max()
        error = error + 2 * rounding.of_sum(terms, squares.dtype) * longest * apart
        return rounding.covered(squares, spread, error)

    def _oriented_factors(self) -> tuple[list[sites.Pair], list[dense.Lanes]]:
        """Returns the factors of all sites, and which of them have their positions on the lanes.

        Those of a site that applies the transposed weight are swapped.
        """
        pairs = [one.factors() for one in self._tapped]
        lanes = [one.site.lanes for one in self._tapped]
        if len(pairs) == 1:
            return pairs, lanes
        first_axes = _axes(self._tapped[0].site)
        for number, one in enumerate(self._tapped):
            if _axes(one.site) != first_axes:
                (u,), w = pairs[number]
                # (u w^T)^T = w u^T has the same norm, and lies like the gradients of the first
                # site.
                pairs[number] = ((w,), u)
                lanes[number] = lanes[number][::-1]
        return pairs, lanes

    def in_parts(self, part_of: Sequence[int]) -> dict[int, "Component"]:
        """Returns the component by the number of its part, cut where it spans several.

        Args:
          part_of: The number of the part of each trainable leaf. Gradients of a component
            that spans several are kept.
        """
        numbers = {part_of[leaf] for leaf in self._members}
        if len(numbers) == 1:
            return {numbers.pop(): self}
        assert self.kept is not None
        pieces = {}
        for number in numbers:
            # A piece shares the arrays. `size` decides whether its gradients join the small ones.
            piece = copy.copy(self)
            piece._members = [leaf for leaf in self._members if part_of[leaf] == number]
            piece.kept = {leaf: self.kept[leaf] for leaf in piece._members}
            grads = list(piece.kept.values())
            shapes = [g.shape[1:] for g in grads]
            piece.size = sum(map(math.prod, shapes))
            piece.squared_norms = sum_of_squares(grads)
            pieces[number] = piece
        return pieces

    @property
    def rows(self) -> Any:
        """The arrays [B, ...] that the sum reads: kept gradients, or records and cotangents.

        Their rows must be finite, but those of `LeftOut` may hold anything.
        """
        if self.kept is not None:
            grads = list(self.kept.values())
            return _marked(grads, forms.platform() in _FUSED_SUMS)
        rows = []
        for one in self._tapped:
            without_record, without_cotangent = one.site.leaves_out
            record = _marked(one.record, without_record)
            rows.append((record, _marked(one.cotangent, without_cotangent)))
        if self._form is not None:
            # `contract_rows` zeroes the rows of the factor 0, and only accelerators have a form.
            return rows, LeftOut(self._low_rank)
        return rows

    @property
    def outer(self) -> dict[int, Outer] | None:
        """The gradients by leaf as outer products, or None where they are none."""
        if not is_outer([one.site for one in self._tapped], self.size):
            return None
        (one,) = self._tapped
        rule, source = one.site.rule, one.site.source
        assert isinstance(rule, sites.Dot) and source is not None
        (u,), w = one.factors()
        axes = np.argsort(source).tolist()  # from the axes of the weight to those of the leaf

        def place(grad: jax.Array) -> jax.Array:
            of_weight = rule.as_weight(grad[None])
            return of_weight.transpose(axes)

        # [B, 1, 1, p] and [B, 1, 1, q]
        u, w = (x.reshape(len(x), -1) for x in (u, w))
        return {self._members[0]: Outer(u, w, place)}

    def weighted_sum(
        self,
        rows: Any,
        factors: jax.Array,
    ) -> dict[int, jax.Array]:
        """Returns the sum of gradients times factors [B], by leaf.

        Args:
          rows: The arrays of `rows`, or others in their place, without `LeftOut`.
          factors: [B].
        """
        if self.kept is not None:
            sums = contract_rows(rows, [factors] * len(rows))
            return dict(zip(self._members, sums, strict=True))
        if self._form is not None:
            rows, low_rank = rows
        of_weights = []
        for one, (record, cotangent) in zip(self._tapped, rows, strict=True):
            of_weights.append(one.site.contract(record, cotangent, factors))
        if self._form is None:
            # J^T is linear, so one application serves the whole batch.
            sums = self._pull(of_weights)
            return dict(zip(self._members, sums, strict=True))
        terms, structure = jax.tree.flatten(low_rank)
        contracted = contract_rows(terms, [factors] * len(terms))
        low_rank_sums = jax.tree.unflatten(structure, contracted)
        (of_scaled,) = of_weights
        if self._scales_sum:
            of_scaled = channel_weights.scaled_sum(self._form, of_scaled)
        return channel_weights.weighted_sum(self._form, of_scaled, low_rank_sums)


def _marked(arrays: Any, leaves_out: bool) -> Any:
    return LeftOut(arrays) if leaves_out else arrays


def contract_rows(
    xs: Sequence[jax.Array],
    factors: Sequence[jax.Array],
) -> list[jax.Array]:
    """Computes sum_b factors_b x_b for every array [B, ...] and its own factors [B]."""

    def contract(x: jax.Array, factors: jax.Array) -> jax.Array:
        if forms.platform() in _FUSED_SUMS:
            # XLA zeroes the rows where the product reads them. Elsewhere the caller has done so.
            x = sites.rows_kept(x, factors != 0)
        # On a CPU one contraction is 5 to 40 times faster than a product and a sum over the batch.
        factors_of_x = factors.astype(x.dtype)
        rows_with_rows = (((0,), (0,)), ((), ()))
        return lax.dot_general(factors_of_x, x, rows_with_rows, sites.PRECISION)

    return list(map(contract, xs, factors))


def _pull_back(
    weights: jex.ClosedJaxpr,
    leaves: list[Any],
    members: list[int],
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns J^T, the map from gradients of weights to gradients of leaves.

    Args:
      weights: The program from all trainable leaves to weights.
      leaves: The values of all trainable leaves.
      members: The numbers of the leaves whose gradients are returned.
    """
    results = weights.jaxpr.outvars
    if len(results) == 1 and results[0] in weights.jaxpr.invars:
        # The weight is the leaf, as most are. J is the identity, which needs no trace.
        (leaf,) = [leaves[number] for number in members]
        return lambda of_weights: [dv.astype(leaf.dtype) for dv in of_weights]
    evaluate = jex.jaxpr_as_fun(weights)

    def weights_of(values: list[Any]) -> list[jax.Array]:
        by_number = dict(zip(members, values, strict=True))
        # Other leaves are constants here. No weight of the component depends on them.
        arguments = [by_number.get(number, leaf) for number, leaf in enumerate(leaves)]
        results: list[jax.Array] = evaluate(*arguments)
        return results

    own_leaves = [leaves[number] for number in members]
    primals, transpose = jax.vjp(weights_of, own_leaves)

    def pull(of_weights: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(of_weights, primals, strict=True)
        grads: list[jax.Array]
        # `jax.vjp` takes cotangents in the dtype of the weights only.
        cotangents = [dv.astype(v.dtype) for dv, v in pairs]
        (grads,) = transpose(cotangents)
        return grads

    return pull


# --- Which methods are possible ---

# Primitives whose transpose moves entries and lengthens no gradient, if they keep all entries or a
# part of them.
_SHORT = frozenset({"slice", "split", "dynamic_slice", "convert_element_type", *walker.MOVES})


def applied(method: str, weights: jex.ClosedJaxpr) -> str:
    """Returns the method for a component: "keep" in place of a "drop" that is not possible.

    Gradients that are formed twice may be rounded differently. J^T must only move their entries,
    because it could multiply the difference by any number. Nor may J^T round the sum of a batch to
    bfloat16: that error depends on all examples, so the norm of no single example covers it.
    `Component` makes an exception for the form of `channel_weights`, where a factor and numbers of
    each example are computed once, for the norm and for the sum.
    """
    if method == "drop" and not _only_moves(weights):
        return "keep"
    return method


def channel_form(
    component: Sequence[sites.Site],
    weights: jex.ClosedJaxpr,
    leaves: Sequence[Any],
    *,
    has_kernel: bool,
) -> channel_weights.Form | None:
    """Returns the form of J^T where it does more than move entries and norms can use the form.

    Args:
      component: The sites of a component.
      weights: The program from all trainable leaves to the weights at these sites.
      leaves: All trainable leaves.
      has_kernel: Whether a kernel forms the gradients.
    """
    # With moves alone, the other methods need no form.
    if len(component) > 1 or _only_moves(weights):
        return None
    (site,) = component
    if not (has_kernel or site.factors_channels):
        return None
    # The channels of the form are the last axis of the weight. They must be those of the outputs.
    rule = site.rule
    if not isinstance(rule, sites.Conv) or not rule.has_features_last:
        return None
    return channel_weights.of_program(weights, leaves, leaves_of(component))


def _only_moves(weights: jex.ClosedJaxpr) -> bool:
    """Returns whether J^T only moves entries, in float32 or wider.

    Then it lengthens no rounding error.
    """
    eqns = list(jaxprs.every_equation(weights.jaxpr))
    if any(eqn.primitive.name not in _SHORT for eqn in eqns):
        return False
    variables = list(weights.jaxpr.outvars)
    for eqn in eqns:
        # Each of these primitives has its array first. Others, such as those of a slice, are
        # indices.
        operand = eqn.invars[0].aval
        result = eqn.outvars[0].aval
        if result.size > operand.size:  # the transpose of a broadcast sums
            return False
        variables += eqn.outvars
    # J^T would round the sum of a batch where a variable has fewer bits than float32.
    return not any(_is_narrow_float(variable.aval.dtype) for variable in variables)


def _is_narrow_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _axes(site: sites.Site) -> tuple[Any, Any]:
    """Returns the axes of the leaf that u and w of a site cover."""
    source = site.source or ()
    of_u = tuple(source[dim] for dim in site.rule.row_dims)
    of_w = tuple(source[dim] for dim in site.rule.col_dims)
    return of_u, of_w


def can_factor(component: list[sites.Site]) -> bool:
    """Returns whether dV has the norm of the leaf's gradient and its factors are available."""
    if not all(_is_moved_leaf(site) for site in component):
        return False
    if len(component) == 1:
        return True
    if not all(_has_plain_factors(site) for site in component):
        return False
    # Gram matrices of two sites need factors that cover the same axes of the leaf, swapped or not.
    first_axes = _axes(component[0])
    return all(_axes(site) in (first_axes, first_axes[::-1]) for site in component)


def is_outer(component: Sequence[sites.Site], size: int) -> bool:
    """Returns whether the gradient of each example is one outer product, for a whole leaf."""
    if len(component) != 1 or not can_factor(list(component)):
        return False
    (site,) = component
    rule, source = site.rule, site.source
    # Each axis of the leaf is one of the weight, so `place` can transpose it back.
    is_whole = sorted(source or ()) == list(range(len(rule.weight_shape)))
    is_dense = isinstance(rule, sites.Dot) and rule.groups == 1
    is_once = not site.lengths and rule.positions == 1
    return is_whole and is_dense and is_once and math.prod(rule.weight_shape) == size


def _is_moved_leaf(site: sites.Site) -> bool:
    """Returns whether the weight is one leaf with moved entries, which meets data by a rule."""
    if isinstance(site.rule, sites.OnWeight):
        return False
    return site.source is not None and len(site.leaves) == 1


def _has_plain_factors(site: sites.Site) -> bool:
    """Returns whether it is known which axes of the leaf the factors cover, without loops."""
    has_axes = bool(site.source) and bool(site.rule.row_dims)
    return has_axes and site.rule.groups == 1 and not site.lengths
