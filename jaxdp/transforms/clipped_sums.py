"""The sum of clipped gradients of a batch, from the traced loss of one example.

`clipped_sums` goes over a batch in chunks (`_in_chunks`). For each chunk an engine computes the
norms, the clipping rule turns them into factors, and the engine computes the sum of the gradients
times their factors (`_chunk_sums`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.transforms import engines, forms, rounding, shards, sites
from jaxdp.transforms.clip_rules import ClipRule, clip_factors
from jaxdp.transforms.components import Asked, LeftOut
from jaxdp.transforms.grids import GridAt
from jaxdp.transforms.loss_programs import Program
from jaxdp.transforms.method_costs import choose_method
from jaxdp.transforms.products import along_batch


class SumOptions(NamedTuple):
    """How a clipped sum is computed."""

    engine: engines.Engine
    clip_rule: ClipRule
    microbatch_size: int | None
    part_of: tuple[int, ...]  # the number of the part of each trainable leaf


class ClipLimits(NamedTuple):
    """What an example may contribute, see `SumInputs`."""

    clip_norms: tuple[Any, ...]
    bounds: tuple[Any, ...]
    grid: GridAt | None


class SumInputs(NamedTuple):
    """The values that a clipped sum is a function of.

    Attributes:
      consts: The constants of the program of the loss.
      leaves: The trainable leaves.
      batch: A pytree with a leading axis B.
      unmasked: [B] bool.
      clip_norms: C of each part.
      bounds: The norm that no clipped gradient of a part exceeds, `clip_rule.bound(C)`.
      grid: The grid of sums in integers, or None.
    """

    consts: list[Any]
    leaves: list[Any]
    batch: Any
    unmasked: jax.Array
    clip_norms: tuple[Any, ...]
    bounds: tuple[Any, ...]
    grid: GridAt | None = None


class ExampleValues(NamedTuple):
    """Values of examples.

    Attributes:
      norms: [B]. The norms of the gradients before clipping, 0 where masked.
      losses: [B]. 0 where masked.
      aux: The auxiliary output, [B, ...].
      contributes: [B] bool. Whether the gradient is part of the sum.
      part_norms: The norms [B] of each part, 0 where masked. Empty with one part.
    """

    norms: jax.Array
    losses: jax.Array
    aux: Any
    contributes: jax.Array
    part_norms: list[jax.Array]


class ClippedSums(NamedTuple):
    """The clipped sums of the trainable leaves.

    Attributes:
      leaves: The sum for each leaf.
      examples: Values of examples.
      nonfinite: int32. The number of unmasked examples with a NaN or infinite loss or gradient.
    """

    leaves: list[jax.Array]
    examples: ExampleValues
    nonfinite: jax.Array


def _sums_of(
    options: SumOptions,
    program: Program,
    inputs: SumInputs,
) -> ClippedSums:
    """Computes clipped sums in the forms of the platform that the program is compiled for."""
    on_platform = functools.partial(_sums_on_platform, options, program)
    sums: ClippedSums = forms.for_platform(on_platform, inputs)
    return sums


# The options and the program hold functions and shapes, which have no derivatives.
clipped_sums = jax.custom_jvp(_sums_of, nondiff_argnums=(0, 1))


@clipped_sums.defjvp
def _clipped_sums_jvp(
    options: SumOptions, program: Program, primals: Any, tangents: Any
) -> tuple[ClippedSums, ClippedSums]:
    """Differentiates the sum over the examples that contribute.

    The factor of any other example is 0, but its derivatives may be NaN, and 0 * NaN is NaN. So
    the derivatives are those of a batch in which it is replaced by an example that contributes.
    """
    (inputs,) = primals
    result = clipped_sums(options, program, inputs)
    contributes = result.examples.contributes
    # `argmax` refuses an axis without entries.
    if len(contributes) == 0:
        return result, jax.tree.map(_zero_tangent, result)

    def of_contributing(inputs: SumInputs) -> ClippedSums:
        # Examples that do not contribute are replaced by one that does: the derivative of a NaN is
        # NaN also behind a factor of 0.
        first = jnp.argmax(contributes)

        def shown(x: jax.Array) -> jax.Array:
            return jnp.where(along_batch(contributes, x.ndim), x, x[first])

        batch = jax.tree.map(shown, inputs.batch)
        replaced = inputs._replace(batch=batch, unmasked=contributes)
        return _sums_of(options, program, replaced)

    def zeros_like(x: Any) -> jax.Array:
        return _zeros(x, shards.varying_axes(x))

    def of_none(inputs: SumInputs) -> ClippedSums:
        shapes = jax.eval_shape(of_contributing, inputs)
        sums: ClippedSums = jax.tree.map(zeros_like, shapes)
        return sums

    def differentiated(inputs: SumInputs) -> ClippedSums:
        # `argmax` would choose example 0 if none contributes, whose derivatives may be NaN.
        sums: ClippedSums = lax.cond(contributes.any(), of_contributing, of_none, inputs)
        return sums

    _, derivatives = jax.jvp(differentiated, primals, tangents)
    return result, derivatives


def _zeros(x: Any, axes: frozenset[str]) -> jax.Array:
    """Returns zeros of the shape and dtype of `x` that vary over mesh axes."""
    return shards.vary(jnp.zeros(x.shape, x.dtype), axes)


def _zero_tangent(x: jax.Array) -> Any:
    # JAX demands tangents of float0 for bools and integers, such as `contributes`.
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


# --- Chunks ---


def _sums_on_platform(
    options: SumOptions,
    program: Program,
    inputs: SumInputs,
) -> ClippedSums:
    def sums(batch: Any, unmasked: jax.Array) -> ClippedSums:
        chunk = inputs._replace(batch=batch, unmasked=unmasked)
        return _chunk_sums(options, program, chunk)

    size = options.microbatch_size
    if size is None or size >= len(inputs.unmasked):
        return sums(inputs.batch, inputs.unmasked)
    # `_on_this_shard` has typed the leaves like the loss, which reads the constants.
    values = jax.tree.leaves(inputs._replace(consts=[]))
    axes = shards.varying_axes(*values)
    return _in_chunks(sums, inputs.batch, inputs.unmasked, size, axes)


def _in_chunks(
    sums: Callable[..., ClippedSums],
    batch: Any,
    unmasked: jax.Array,
    chunk: int,
    axes: frozenset[str],
) -> ClippedSums:
    """Applies `sums` to one chunk of the batch after the other, and adds up the results.

    Chunk k of n has the rows k, k + n, k + 2 n, ..., so that every device that has a block of rows
    works on every chunk. Copies of example 0 pad the batch. They are masked.

    Args:
      sums: A function of (batch, unmasked).
      batch, unmasked: The whole batch, of B rows.
      chunk: The number of rows of a chunk.
      axes: The mesh axes over which the results vary.
    """
    size = len(unmasked)
    n_chunks = math.ceil(size / chunk)

    def in_columns(x: jax.Array) -> jax.Array:
        """Reshapes [B, ...] to [chunk, n, ...]. Column k has the rows of chunk k."""
        n_padding = n_chunks * chunk - size
        # A copy has a finite loss where example 0 has one. Zeros could give NaN, for which each
        # chunk clears its rows.
        if n_padding:
            padding = jnp.broadcast_to(x[:1], (n_padding, *x.shape[1:]))
            x = jnp.concatenate([x, padding])
        return x.reshape(chunk, n_chunks, *x.shape[1:])

    # The padding copies the mask of example 0 too, so its rows need a mask of their own.
    is_in_batch = jnp.arange(n_chunks * chunk) < size
    is_in_batch = is_in_batch.reshape(chunk, n_chunks)
    batch_columns, mask_columns = jax.tree.map(in_columns, (batch, unmasked))
    columns = (batch_columns, mask_columns, is_in_batch)

    def chunk_at(number: Any) -> tuple[Any, jax.Array]:
        def column(x: jax.Array) -> jax.Array:
            row: jax.Array = lax.dynamic_index_in_dim(x, number, 1, keepdims=False)
            return row

        examples, present, valid = jax.tree.map(column, columns)
        return examples, present & valid

    def add(total: Any, number: jax.Array) -> tuple[Any, ExampleValues]:
        result = sums(*chunk_at(number))
        # Sums of P entries are carried. Values of examples are stacked, [n, chunk, ...].
        of_chunk = (result.leaves, result.nonfinite)
        added = jax.tree.map(jnp.add, total, of_chunk)
        return added, result.examples

    shapes = jax.eval_shape(sums, *chunk_at(0))
    zeros_of = functools.partial(_zeros, axes=axes)
    # A carry must vary over the mesh axes of what the body returns.
    start = jax.tree.map(zeros_of, (shapes.leaves, shapes.nonfinite))
    (leaves, nonfinite), by_chunk = lax.scan(add, start, jnp.arange(n_chunks))

    def in_rows(x: jax.Array) -> jax.Array:
        """Reshapes [n, chunk, ...] to [B, ...], without the padding."""
        rest = x.shape[2:]
        rows = x.swapaxes(0, 1).reshape(-1, *rest)
        return rows[:size]

    examples = jax.tree.map(in_rows, by_chunk)
    return ClippedSums(leaves, examples, nonfinite)


def _chunk_sums(
    options: SumOptions,
    program: Program,
    inputs: SumInputs,
) -> ClippedSums:
    """Computes the clipped sums of examples that are in memory together."""
    unmasked = inputs.unmasked
    # The engines reshape to [B, -1], which has no answer for B = 0.
    if len(unmasked) == 0:
        return _empty_sums(options, program, inputs)
    result = _engine_result(options, program, inputs)
    finite = result.finite
    part_norms = list(map(rounding.root, result.squared_norms))
    examples = _example_values(result, part_norms, unmasked, finite)
    nonfinite = (unmasked & ~finite).sum(dtype=jnp.int32)
    contributes = examples.contributes
    factors = []
    for norms, clip_norm, bound in zip(part_norms, inputs.clip_norms, inputs.bounds, strict=True):
        of_part = clip_factors(options.clip_rule, norms, clip_norm, bound)
        # One part that is not finite takes the example out of all parts.
        factors.append(jnp.where(contributes, of_part, 0))
    if inputs.grid is not None:
        of_leaves = [factors[part] for part in options.part_of]
        # `by_vmap` and the choice `outer_or_keep` know the gradients of all leaves.
        assert result.grads is not None
        total = inputs.grid.total(result.grads, of_leaves)
        return ClippedSums(total, examples, nonfinite)
    rows = result.rows
    # On a TPU the sums themselves leave out the rows of the factor 0.
    if forms.platform() != "tpu":
        # The factors pass the loop too. Otherwise XLA computes them again for each reader.
        needed = ~finite.all()
        rows, factors = _without_rows((rows, factors), contributes, needed)
    rows = jax.tree.map(_arrays_of, rows, is_leaf=_is_left_out)
    return ClippedSums(result.weighted_sum(rows, factors), examples, nonfinite)


def _is_left_out(rows: Any) -> bool:
    return isinstance(rows, LeftOut)


def _arrays_of(rows: Any) -> Any:
    return rows.arrays if _is_left_out(rows) else rows


def _example_values(
    result: engines.EngineResult,
    part_norms: list[jax.Array],
    unmasked: jax.Array,
    finite: jax.Array,
) -> ExampleValues:
    """Returns the values of examples, with zeros where they are masked."""
    # A NaN of an unmasked example stays in its loss and norm, so the caller sees which one it was.
    losses = jnp.where(unmasked, result.losses, 0)
    norms, part_norms = _with_total([jnp.where(unmasked, own, 0) for own in part_norms])
    return ExampleValues(norms, losses, result.aux, unmasked & finite, part_norms)


def _with_total(part_norms: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the norms [B] of whole gradients, and those of parts if there are several."""
    if len(part_norms) == 1:
        return part_norms[0], []
    squares = map(jnp.square, part_norms)
    total = functools.reduce(jnp.add, squares)
    return rounding.root(total), part_norms


def _engine_result(
    options: SumOptions, program: Program, inputs: SumInputs
) -> engines.EngineResult:
    arguments = (program, inputs.consts, inputs.leaves, inputs.batch, options.part_of)
    if options.engine == "vmap":
        return engines.by_vmap(*arguments)
    if inputs.grid is not None:  # each gradient is rounded by itself
        return engines.by_bookkeeping(*arguments, engines.outer_or_keep)
    may_keep = options.engine == "auto"

    def choose(asked: Asked) -> str:
        # A kernel takes a tenth of the time in which XLA forms the gradients of a convolution.
        if asked.has_kernel:
            return "drop"
        return choose_method(asked.sites, asked.size, may_keep, asked.has_form)

    return engines.by_bookkeeping(*arguments, choose)


def _empty_sums(
    options: SumOptions,
    program: Program,
    inputs: SumInputs,
) -> ClippedSums:
    """Returns the sums of no examples."""
    n_parts = len(inputs.clip_norms)
    leaves = [jnp.zeros(x.shape, sites.wide_dtype(x)) for x in inputs.leaves]
    if inputs.grid is not None:
        # A sum on a grid counts steps.
        leaves = [x.astype(jnp.int32) for x in leaves]
    dtype = sites.wide_dtype(*inputs.leaves)
    no_norms = jnp.zeros(0, dtype)
    norms, part_norms = _with_total([no_norms] * n_parts)
    losses = jnp.zeros(0, program.value.dtype)

    def no_rows(x: Any) -> jax.Array:
        return jnp.zeros((0, *x.shape), x.dtype)

    aux = jax.tree.map(no_rows, program.aux)
    examples = ExampleValues(norms, losses, aux, inputs.unmasked, part_norms)
    nonfinite = jnp.zeros((), jnp.int32)
    return ClippedSums(leaves, examples, nonfinite)


# --- Examples that are not finite ---


def _without_rows(
    rows: Any,
    keep: jax.Array,
    needed: jax.Array,
) -> Any:
    """Sets the rows of examples that are not kept to zero, in all floating arrays of a pytree.

    Args:
      rows: A pytree of arrays [B, ...]. Those of `LeftOut` stay.
      keep: [B] bool.
      needed: [] bool. Whether there is an example that is not finite. Otherwise nothing is done:
        a pass over all activations takes 13 % of the step of a ViT on a CPU.
    """
    leaves, treedef = jax.tree.flatten(rows, is_leaf=_is_left_out)
    # The sum zeroes the rows of `LeftOut` where it reads them.
    arrays = [x for x in leaves if not _is_left_out(x)]
    # XLA copies an array that a loop carries twice, such as the input of several layers.
    distinct = {id(x): x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)}
    cleared = _cleared_in_place(list(distinct.values()), keep, needed)
    by_id = dict(zip(distinct, cleared, strict=True))
    cleared_leaves = [by_id.get(id(x), x) for x in leaves]
    return jax.tree.unflatten(treedef, cleared_leaves)


@jax.custom_jvp
def _cleared_in_place(
    xs: list[jax.Array],
    keep: jax.Array,
    needed: jax.Array,
) -> list[jax.Array]:
    """Applies `sites.rows_kept` in a loop of one turn if it is needed, and of none otherwise.

    XLA would copy all arrays that the branches of a conditional read.
    """

    def is_needed(state: tuple[jax.Array, Any]) -> jax.Array:
        needed, _ = state
        return needed

    def clear(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        needed, xs = state
        still_needed = needed & False
        # This False varies over the same mesh axes as `needed`.
        return still_needed, [sites.rows_kept(x, keep) for x in xs]

    _, cleared = lax.while_loop(is_needed, clear, (needed, xs))
    result: list[jax.Array] = cleared
    return result


@_cleared_in_place.defjvp
def _cleared_in_place_jvp(primals: Any, tangents: Any) -> Any:
    # JAX reverses no such loop. The factor of a row that is not kept is 0, so its tangent is 0.
    _, keep, _ = primals
    of_xs = tangents[0]
    cleared = _cleared_in_place(*primals)
    return cleared, [sites.rows_kept(x, keep) for x in of_xs]
