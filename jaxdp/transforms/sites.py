"""The sites where a weight meets data, with norms and sums of per-example gradients.

At a site, `out = primitive(record, V) + tap`. From the record and the cotangent g of the tap, a
site computes the norm of each example's gradient dV with respect to the weight, and the sum of all
dV times a factor of each example. Bu et al. (2023, arXiv:2210.00038) keep records and cotangents in
this way instead of a second backward pass.

A rule says what dV is for one primitive: `weight_rules`, and `convolutions` for that of
convolutions. `factored_norms` has norms that form no gradient. This module knows loops and the
batch, and chooses the form that a platform runs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import dense, factored_norms, forms, products
from jaxdp.transforms.convolutions import Conv
from jaxdp.transforms.factored_norms import (
    gram_rows,
    lost_in_parts,
    squared_norms,
)
from jaxdp.transforms.kernels import convolution
from jaxdp.transforms.products import (
    PRECISION,
    along_batch,
    multiplied_bits,
    settled,
    wide,
    wide_dtype,
)
from jaxdp.transforms.weight_rules import (
    Dot,
    Factors,
    Lookup,
    OneHot,
    OnWeight,
    Pair,
    Rows,
    Rule,
)

__all__ = [
    "PRECISION",
    "Conv",
    "Dot",
    "Factors",
    "Lookup",
    "OnWeight",
    "OneHot",
    "Pair",
    "Rows",
    "Rule",
    "Site",
    "gram_rows",
    "lost_in_parts",
    "multiplied_bits",
    "rows_kept",
    "settled",
    "settled_at",
    "squared_norms",
    "summed_rows",
    "wide_dtype",
]

# ||dV||^2 of every example, and E and M of `rounding`, [B] each.
FormedNorm = tuple[jax.Array, jax.Array, jax.Array]


def settled_at(
    rule: Rule,
    record: Any,
    g: Any,
    *,
    by_kernels: bool = False,
) -> Any:
    """Rounds the record and the cotangent of a site to what is multiplied there.

    A plain step rounds factors of float32 where the platform multiplies fewer bits. Here they are
    rounded before, so the norm and the sum have the same factors. All products of these factors are
    exact. Where kernels compute the norm and the sum (`by_kernels`), both read one array of
    bfloat16 in memory, which is settled. Of factors of float32, XLA multiplies the same array by
    the weight. A form without kernels settles it again.
    """
    # Gradients of other rules are sums of cotangents, without a product.
    bits = multiplied_bits() if isinstance(rule, (Dot, Conv)) else None

    def rounded(x: jax.Array) -> jax.Array:
        if x.dtype != jnp.float32:
            # A kernel reads the array as it is in memory, where no digit is left beyond its dtype.
            if by_kernels:
                return x
            return settled(x)
        if bits is None:
            return x
        is_bfloat16 = bits == products.BFLOAT16_BITS
        # The cast to bfloat16 alone rounds for kernels, because both read its result from memory.
        # XLA could skip a cast that it fuses.
        if not (by_kernels and is_bfloat16):
            x = lax.reduce_precision(x, products.EXPONENT_BITS, bits)
        if is_bfloat16:  # it takes half of the memory
            return x.astype(jnp.bfloat16)
        return x

    return jax.tree.map(rounded, (record, g))


def _exact_parts(
    x: jax.Array,
    rule: Rule,
    record: Any,
) -> list[jax.Array]:
    """Returns arrays that add up to `x`. The device multiplies each with `record` exactly.

    `x` is a cotangent times a factor in float32. Two parts have 16 of its 24 bits in bfloat16, and
    22 in TF32. `rounding.of_sum` counts what they lack.
    """
    if not isinstance(rule, (Dot, Conv)) or x.dtype != jnp.float32:
        return [x]
    dtype: Any = jnp.float32
    bits = multiplied_bits()
    # Two products of bfloat16 take less time than one of float32.
    record_is_bfloat16 = isinstance(rule, Dot) and record.dtype == jnp.bfloat16
    if record_is_bfloat16 and products.multiplies_bfloat16():
        bits = products.BFLOAT16_BITS
        dtype = jnp.bfloat16
    if bits is None:
        return [x]
    first = lax.reduce_precision(x, products.EXPONENT_BITS, bits)
    # What the first part has rounded away, rounded again.
    second = lax.reduce_precision(x - first, products.EXPONENT_BITS, bits)
    first = first.astype(dtype)
    second = second.astype(dtype)
    return [first, second]


def rows_kept(x: jax.Array, keep: jax.Array) -> jax.Array:
    """Sets the rows of examples that are not kept to zero, since 0 * NaN is NaN."""
    if not x.size:
        return x
    # `jnp.where` has twice as many operations. Each array of each layer passes here.
    keep_rows = lax.broadcast_in_dim(keep, x.shape, (0,))
    return lax.select(keep_rows, x, jnp.zeros_like(x))


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One meeting point of a weight and data.

    Attributes:
      rule: What its primitive does to one example in one iteration of each loop.
      leaves: The trainable leaves on which the weight depends.
      source: `walker.Value.source` of the weight.
      lengths: The lengths of the enclosing scans, the outermost first.
      sliced: For each scan, whether the weight changes between iterations.
      tap: The shape of its tap, with the loop axes in front.
    """

    rule: Rule
    leaves: frozenset[int]
    source: tuple[int, ...] | None
    lengths: tuple[int, ...]
    sliced: tuple[bool, ...]
    tap: jax.ShapeDtypeStruct

    @property
    def empty(self) -> bool:
        """Whether the result or the weight has no entry, so that the gradient is zero."""
        return 0 in self.tap.shape or 0 in self.rule.weight_shape

    def zero_tap(self) -> jax.Array:
        """Returns a tap of zeros [*loops, 1, ...].

        Its shape differs from that of the records. XLA shares equal zeros, in which loops collect
        records and cotangents. Zeros of a forward loop that nothing else reads are never written on
        a TPU.
        """
        loops = len(self.lengths)
        shape = self.tap.shape
        return jnp.zeros((*shape[:loops], 1, *shape[loops:]), self.tap.dtype)

    @property
    def _sliced_loops(self) -> tuple[int, ...]:
        """The lengths of the loops whose iterations apply slices of the weight."""
        loops = zip(self.lengths, self.sliced, strict=True)
        return tuple(length for length, sliced in loops if sliced)

    @property
    def slices(self) -> int:
        """The number of slices of the weight that loops apply."""
        return math.prod(self._sliced_loops)

    @property
    def repeats(self) -> int:
        """The number of loop iterations that apply the same weight."""
        loops = zip(self.lengths, self.sliced, strict=True)
        return math.prod(length for length, sliced in loops if not sliced)

    @property
    def positions(self) -> int:
        """The positions of all iterations that apply the same weight."""
        return self.rule.positions * self.repeats

    @property
    def blocks(self) -> int:
        """The number of blocks of the weight that have factors of their own."""
        return self.rule.groups * self.slices

    @property
    def terms(self) -> int:
        """The number of terms that are added up in an entry of dV of one example."""
        if isinstance(self.rule, Rows):
            return 1
        return self.positions

    # --- Loops ---

    def _by_slice(self, tree: Any) -> Any:
        """Reshapes [B, *loops, ...] to [B, slices, repeats, ...]."""
        # Loops over slices come first. The sort is stable, so loops of one kind keep their order.
        order = sorted(range(len(self.sliced)), key=lambda i: not self.sliced[i])
        loops = len(order)

        def arrange(x: jax.Array) -> jax.Array:
            loop_axes = [1 + i for i in order]
            x = x.transpose((0, *loop_axes, *range(1 + loops, x.ndim)))
            rest = x.shape[1 + loops :]
            return x.reshape(x.shape[0], self.slices, self.repeats, *rest)

        return jax.tree.map(arrange, tree)

    def _loops_in_front(self, grad: jax.Array) -> jax.Array:
        """Reshapes [..., slices, *weight] to [..., *sliced loops, *weight]."""
        weight = self.rule.weight_shape
        lead_ndim = grad.ndim - len(weight) - 1
        lead = grad.shape[:lead_ndim]
        return grad.reshape(*lead, *self._sliced_loops, *weight)

    def factors(self, record: Any, g: jax.Array) -> Factors:
        """Returns factors of every example, with loops in S and T.

        They are parts [B, S, T, rows_k] and w [B, S, T, cols].
        """
        record, g = self._multiplied(record, g)
        # Outside of loops, the axes of slices and repeats would be a third of the operations.
        if not self.lengths:
            factors: Factors = jax.vmap(self.rule.factors)(record, g)
            return factors
        # Three maps: over examples, over slices, and over the repeats of a slice.
        record, g = self._by_slice((record, g))
        of_examples = jax.vmap(jax.vmap(jax.vmap(self.rule.factors)))
        parts, w = of_examples(record, g)

        def merge(x: jax.Array) -> jax.Array:
            """Reshapes [B, slices, repeats, S, T, ...] to [B, slices * S, repeats * T, ...]."""
            b, slices, repeats, s, t, *rest = x.shape
            x = x.swapaxes(2, 3)
            return x.reshape(b, slices * s, repeats * t, *rest)

        merged: Factors = jax.tree.map(merge, (parts, w))
        return merged

    def without_cancellation(self, record: Any, g: jax.Array) -> jax.Array:
        """Returns the norms [B] that dV would have if its terms had one direction.

        They are M in `rounding`.
        """
        return factored_norms.without_cancellation(self.factors(record, g))

    # --- The choice of kernels ---

    @property
    def _of_pictures(self) -> bool:
        """Whether it is a convolution of one picture of each example, outside of loops."""
        rule = self.rule
        return isinstance(rule, Conv) and not self.lengths and rule.of_pictures(self.tap.shape)

    @property
    def factors_channels(self) -> bool:
        """Whether the form of `channel_weights` has a norm by factors here.

        On a TPU its kernels are cheaper. The forms of a CPU keep gradients.
        """
        return self._of_pictures and forms.platform() == "cuda"

    @property
    def lanes(self) -> dense.Lanes:
        """Whether XLA lays u, and w, with the positions on the lanes of a TPU.

        Beside those of the rule, it does so where the last axis of the leaf is contracted. A head
        that applies the transposed table of an embedding is one case.
        """
        u_across, w_across = self.rule.lanes
        if isinstance(self.rule, Dot) and self.source:
            # The dimension of the weight that is the last axis of the leaf.
            last_axis = self.source.index(max(self.source))
            w_across = w_across or last_axis in self.rule.row_dims
        return u_across, w_across

    def kernels(
        self,
        method: str,
        record: Any,
        g: jax.Array,
    ) -> tuple[str, str]:
        """Returns which kernels compute the norm and the sum of its own weight on a TPU.

        They are "dense", "convolution", or "" for products of XLA. Kernels of convolutions round by
        themselves. `method` is one of `clipping`.
        """
        rule = self.rule
        if forms.platform() != "tpu" or not isinstance(rule, (Dot, Conv)):
            return "", ""
        multiplied = {jnp.dtype(jnp.bfloat16)}
        # Kernels multiply bfloat16. Where a plain step multiplies float32 in full, they would
        # round.
        if multiplied_bits() == products.BFLOAT16_BITS:
            multiplied.add(jnp.dtype(jnp.float32))  # as XLA rounds float32
        if not {record.dtype, g.dtype} <= multiplied:
            return "", ""
        norm = total = ""
        if self._of_pictures:
            assert isinstance(rule, Conv)
            x, cotangents = jax.eval_shape(rule.pictures, record, g)
            if convolution.sums_suit(x, cotangents, rule.geometry):
                total = "convolution"
            # Patches that do not overlap are rows of the data, which XLA multiplies at once. The
            # kernel would bring them onto the lanes, and spread out their cotangents.
            has_patches = rule.is_dense and math.prod(rule.window) > 1
            if convolution.suits(x, cotangents, rule.geometry) and (total or not has_patches):
                norm = "convolution"
        # Where the batch is on the lanes, the arrays of a dense layer would be copied.
        if rule.is_dense and not total:
            served = dense.costs(self.positions, rule.rows, rule.cols)
            # "keep" needs the gradients in memory, which no kernel writes.
            of_method = {"factors": "gram", "drop": "formed"}.get(method)
            if of_method in served:
                norm = "dense"
            if "weighted" in served:
                total = "dense"
        # Kernels of convolutions form gradients for their norms, as only "drop" does.
        if method != "drop" and norm != "dense":
            norm = ""
        return norm, total

    @property
    def settles_itself(self) -> bool:
        """Whether factors, gradients and sums settle the record and the cotangent themselves.

        On a GPU it is part of the kernels that form patches or scale cotangents.
        """
        return isinstance(self.rule, Conv) and forms.platform() == "cuda"

    @property
    def leaves_out(self) -> tuple[bool, bool]:
        """Whether sums leave out rows of the factor 0 of the record, and of the cotangent.

        A GPU does so where it writes what is multiplied: scaled cotangents, and what
        `settles_itself`.
        """
        if forms.platform() == "tpu":  # where a product reads the rows
            return True, True
        return self.settles_itself, forms.platform() == "cuda"

    def _multiplied(self, record: Any, g: jax.Array) -> Any:
        """Returns the record and the cotangent as they are multiplied."""
        if self.settles_itself:
            return settled_at(self.rule, record, g)
        return (record, g)

    def settled(
        self,
        method: str,
        record: Any,
        g: jax.Array,
        *,
        alone: bool,
    ) -> Any:
        """Returns the record and the cotangent as the norm and the sum read them.

        Args:
          method: The method of its component.
          alone: Whether its component has no other site.
        """
        # With several sites the norm is that of a sum of gradients, which no kernel of one site
        # has.
        norm, total = self.kernels(method, record, g) if alone else ("", "")
        if norm == total == "convolution":
            return record, g
        if self.settles_itself:
            # The norm and the sum settle the same bits, where XLA does not compute them twice.
            return lax.optimization_barrier((record, g))
        record, g = settled_at(self.rule, record, g, by_kernels=bool(norm and total))
        _, g_is_across = self.lanes
        if forms.platform() == "tpu" and g_is_across and method == "factors" and not alone:
            # XLA would compute it once for each kernel, in 4.6 M cycles for GPT-2's vocabulary.
            g = lax.optimization_barrier(g)
        return record, g

    # --- Sums ---

    def contract(
        self,
        record: Any,
        g: jax.Array,
        factors: jax.Array,
    ) -> jax.Array:
        """Computes sum_b factors_b dV_b, [*sliced loops, *weight].

        Args:
          record, g: [B, *loops, ...].
          factors: [B]. An example of the factor 0 contributes 0, whatever its rows in `leaves_out`
            hold.
        """
        # The kernel of the sum does not depend on the method of the norm.
        _, kernel = self.kernels("", record, g)
        if not kernel:
            return self._contract(record, g, factors)

        def by_xla(
            record: Any,
            g: jax.Array,
            factors: jax.Array,
        ) -> jax.Array:
            record, g = settled_at(self.rule, record, g)
            return self._contract(record, g, factors)

        by_kernel = self._contract_dense if kernel == "dense" else self._contract_pictures
        kernels = {"tpu": by_kernel}
        grad: jax.Array = forms.by_platform(record, g, factors, default=by_xla, kernels=kernels)
        return grad

    def _contract_dense(
        self,
        record: Any,
        g: jax.Array,
        factors: jax.Array,
    ) -> jax.Array:
        (u,), w = self.factors(record, g)
        grads = dense.weighted_sum(u, w, factors, self.lanes)
        by_slice = grads.reshape(self.slices, self.rule.groups, *grads.shape[1:])
        # [slices, groups, p, q] to [slices, *weight]
        of_slices = jax.vmap(self.rule.as_weight)(by_slice)
        return self._loops_in_front(of_slices)

    def _contract_pictures(
        self,
        record: Any,
        g: jax.Array,
        factors: jax.Array,
    ) -> jax.Array:
        assert isinstance(self.rule, Conv)
        pictures, cotangents = self.rule.pictures(record, g)
        grad = convolution.weighted_sum(pictures, cotangents, factors, self.rule.geometry)
        return self.rule.as_weight(grad)

    def _contract(
        self,
        record: Any,
        g: jax.Array,
        factors: jax.Array,
    ) -> jax.Array:
        record, g = self._multiplied(record, g)
        without_record, without_cotangent = self.leaves_out
        if without_record:

            def without_zero(x: jax.Array) -> jax.Array:
                return rows_kept(x, factors != 0)

            record = jax.tree.map(without_zero, record)
        if without_cotangent:
            g = rows_kept(g, factors != 0)
        # The product with a factor has more bits than bfloat16.
        kind = wide_dtype(g)
        g = g.astype(kind)
        g = g * along_batch(factors.astype(kind), g.ndim)
        weight_grad = self.rule.weight_grad
        # In a conditional or a loop, XLA on CPU runs a convolution many times slower than the same
        # dot products.
        if isinstance(self.rule, Conv) and forms.platform() != "cpu":
            weight_grad = self.rule.weight_grad_by_primitive
        if self.lengths:
            record, g = self._by_slice((record, g))
        terms = _exact_parts(g, self.rule, record)
        if not self.lengths:
            # Products with a part are exact, so two sums lose only the bits that the parts lack.
            sums = [weight_grad(record, term) for term in terms]
            return functools.reduce(jnp.add, sums)

        def together(x: jax.Array) -> jax.Array:
            """Reshapes [B, slices, repeats, ...] to [slices, B * repeats, ...]."""
            rest = x.shape[3:]
            return x.swapaxes(0, 1).reshape(self.slices, -1, *rest)

        of_slices = _vmap_or_squeeze(weight_grad)
        record, terms = jax.tree.map(together, (record, terms))
        sums = [of_slices(record, term) for term in terms]
        total = functools.reduce(jnp.add, sums)
        return self._loops_in_front(total)

    # --- Gradients of examples ---

    def per_example(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV of every example, [B, *sliced loops, *weight]."""
        record, g = self._multiplied(record, g)
        if not self.lengths:
            # `weight_grads` sums over the repeats of an example, [B, N, ...], of which there is one
            # here.
            once = jax.tree.map(lambda x: x[:, None], (record, g))
            return self.rule.weight_grads(*once)
        record, g = self._by_slice((record, g))

        def merged(x: jax.Array) -> jax.Array:
            """Reshapes [B, slices, ...] to [B * slices, ...]."""
            return x.reshape(-1, *x.shape[2:])

        batch = len(g)
        record, g = jax.tree.map(merged, (record, g))
        grads = self.rule.weight_grads(record, g)
        by_example = grads.reshape(batch, self.slices, *grads.shape[1:])
        return self._loops_in_front(by_example)

    def norm_of_formed(self, record: Any, g: jax.Array) -> FormedNorm:
        """Returns ||dV||^2 of every example, which is formed for it, and E and M of `rounding`."""
        kernel, _ = self.kernels("drop", record, g)
        if not kernel:
            return self._norm_by_xla(record, g)
        by_kernel = self._norm_by_dense if kernel == "dense" else self._norm_of_pictures
        by_xla = self._norm_by_xla
        kernels = {"tpu": by_kernel}
        norm: FormedNorm = forms.by_platform(record, g, default=by_xla, kernels=kernels)
        return norm

    def norm_by_factors(self, record: Any, g: jax.Array) -> FormedNorm:
        """Returns ||dV||^2 of every example from its factors, and E and M of `rounding`."""
        return factored_norms.norm_of_pair(self.factors(record, g))

    def has_column_sums(self, record: Any, g: jax.Array) -> bool:
        """Returns whether a kernel of a TPU computes `column_sums`."""
        kernel, _ = self.kernels("drop", record, g)
        if kernel != "convolution":
            return False
        assert isinstance(self.rule, Conv)
        x, cotangents = jax.eval_shape(self.rule.pictures, record, g)
        return convolution.column_sums_suit(x, cotangents, self.rule.geometry)

    def column_sums(
        self,
        record: Any,
        g: jax.Array,
        bases: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns sums over the rows of dV in each feature, [2 + n, B, features], and M [B].

        The sums are those of dV^2, of dV, and of dV times each base [n, *weight]. The features are
        the last axis of the weight.
        """
        kernels = {"tpu": self._column_sums_of_pictures}
        sums: tuple[jax.Array, jax.Array] = forms.by_platform(
            record, g, bases, default=self._column_sums_by_xla, kernels=kernels
        )
        return sums

    def _column_sums_of_pictures(
        self, record: Any, g: jax.Array, bases: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        assert isinstance(self.rule, Conv)
        pictures = self.rule.pictures(record, g)
        in_order = jax.vmap(self.rule.window_first)(bases)
        return convolution.column_sums(*pictures, in_order, self.rule.geometry)

    def _column_sums_by_xla(
        self, record: Any, g: jax.Array, bases: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # The kernels round by themselves, so the default form has to do so here.
        record, g = settled_at(self.rule, record, g)
        grads = self.per_example(record, g)
        axes = tuple(range(1, grads.ndim - 1))
        terms = [jnp.square(grads), grads, *(grads * base[None] for base in bases)]
        sums = jnp.stack([term.sum(axes) for term in terms])
        return sums, self.without_cancellation(record, g)

    def _norm_by_xla(self, record: Any, g: jax.Array) -> FormedNorm:
        record, g = settled_at(self.rule, record, g)
        grads = self.per_example(record, g)
        squares = products.squared_lengths(grads)
        # A formed gradient has no E: its entries are rounded as M tells.
        spread = jnp.zeros_like(squares)
        apart = self.without_cancellation(record, g)
        return squares, spread, apart

    def _norm_by_dense(self, record: Any, g: jax.Array) -> FormedNorm:
        # A dense site has one part, [B, S, T, p], with loops in S and T.
        (u,), w = self.factors(record, g)
        squares = dense.formed_squares(u, w)
        spread = jnp.zeros_like(squares)
        apart = self.without_cancellation(record, g)
        return squares, spread, apart

    def _norm_of_pictures(self, record: Any, g: jax.Array) -> FormedNorm:
        assert isinstance(self.rule, Conv)
        pictures = self.rule.pictures(record, g)
        squares, apart, spread = convolution.norms_and_bounds(*pictures, self.rule.geometry)
        return squares, spread, apart


def _vmap_or_squeeze(
    fn: Callable[[Any, jax.Array], jax.Array],
) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns `jax.vmap(fn)`, without a batched contraction for a mapped axis of length one."""

    def mapped(record: Any, g: jax.Array) -> jax.Array:
        if len(g) == 1:
            only_record = jax.tree.map(lambda x: x[0], record)
            grad = fn(only_record, g[0])
            return grad[None]
        return jax.vmap(fn)(record, g)

    return mapped


def summed_rows(
    site: Site,
    record: Any,
    g: jax.Array,
) -> tuple[Site, Any, jax.Array]:
    """Adds up equal rows of a lookup, in each example apart.

    Returns a site of the rule `Rows`, its record and its cotangent. They have at most one term for
    each entry of the table, so no sum over the batch rounds the terms of one example one by one.
    """
    rule = site.rule
    # Repeats of a slice are among its rows now, so only loops over slices are left.
    loops = site._sliced_loops
    (u,), w = site.factors(record, g)
    index, total = factored_norms.sums_of_equal_rows(u.index, wide(w))
    rows = Rows(
        weight_shape=rule.weight_shape,
        positions=w.shape[2],
        rows=rule.rows,
        cols=rule.cols,
        row_dims=rule.row_dims,
        col_dims=rule.col_dims,
    )
    tap = jax.ShapeDtypeStruct((*loops, *w.shape[2:]), total.dtype)
    sliced = (True,) * len(loops)
    summed = dataclasses.replace(site, rule=rows, lengths=loops, sliced=sliced, tap=tap)
    lead = (len(g), *loops)
    index = index.reshape(*lead, *index.shape[2:])
    total = total.reshape(*lead, *total.shape[2:])
    return summed, index, total
