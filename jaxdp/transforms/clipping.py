"""Per-example gradient clipping as a transformation of a loss function.

`clipped_grad(loss_fn, clip_norm=C)` turns a per-example loss into a function of a batch. The
function returns the sum of the per-example gradients, each scaled to an L2 norm of at most C:

    sum_i g_i * min(1, C / ||g_i||_2),   g_i = grad loss_fn(params, example_i)

(Abadi et al. 2016, Algorithm 1). Three engines compute the same sum:

* "vmap" forms per-example gradients by `jax.vmap(jax.grad)`. It supports every loss and needs B x P
  memory.
* "bookkeeping" adds zero taps where weights meet data (`jaxdp.transforms.walker`) and runs one
  backward pass to them. It computes norms layer by layer, then one weighted weight gradient per
  layer. It needs no B x P memory.
* "auto" is bookkeeping that may keep the per-example gradients of a layer. It does so where
  operation and byte counts say that reuse is cheaper than a second contraction.

A call passes through these modules of `jaxdp.transforms`:

1. `clip_arguments` checks the arguments of the call, and splits params into trained leaves and
   others. `clip_parts` finds the part of each leaf, if parts have clip norms of their own.
2. `example_loss` turns the user's `loss_fn` into a function of the trained leaves and one example.
3. `loss_programs` traces it once, and `loss_checks` refuses what one example must not do.
4. `clipped_sums` goes over the batch in chunks, and turns norms into factors by a clipping rule
   (`clip_rules`).
5. `engines` computes norms and weighted sums, for each set of leaves in `components`, by the method
   that `method_costs` finds cheapest.

`leaf_plans` reports what step 5 would do.
"""

import dataclasses
import functools
import numbers
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxdp.transforms import engines, forms, leaf_plans, shards, sites
from jaxdp.transforms.clip_arguments import (
    ParamsTree,
    check_batch,
    check_params,
    paths_of,
    row_spec,
    split_params,
    trainable_leaves,
)
from jaxdp.transforms.clip_parts import (
    check_patterns,
    part_numbers,
    split_clip_norm,
    total_norm,
)
from jaxdp.transforms.clip_rules import CLIP_RULES, ClipRule, check_clip_rule, find_rule
from jaxdp.transforms.clipped_sums import ClipLimits, SumInputs, SumOptions, clipped_sums
from jaxdp.transforms.compiler import check_options
from jaxdp.transforms.engines import Engine
from jaxdp.transforms.example_loss import BatchedLoss, LossFunction, batched_loss
from jaxdp.transforms.grids import Grid, GridAt, GridSchedule
from jaxdp.transforms.leaf_plans import LeafPlan
from jaxdp.transforms.loss_programs import trace_loss

__all__ = [
    "CLIP_RULES",
    "Adjacency",
    "ClipRule",
    "ClippedGrad",
    "ClippedSum",
    "Engine",
    "LeafPlan",
    "PerExampleGrads",
    "check_clip_rule",
    "check_params",
    "clipped_grad",
    "paths_of",
    "split_clip_norm",
]

Adjacency = Literal["add_remove", "zero_out", "replace_one"]
_REMEDY = (
    "Give its sum of gradients, `grads`, to the update of jaxdp.privatize(...) first, and what "
    "that returns to an optimizer."
)
# How often one example counts in the L2 sensitivity of a sum of gradients of a bounded norm.
_CONTRIBUTIONS = {"add_remove": 1, "zero_out": 1, "replace_one": 2}


class _WithRemedy(type):
    """The type of `ClippedSum`, which JAX and optax show where two pytrees do not fit."""

    def __repr__(cls) -> str:
        return f"<class {cls.__qualname__!r}, private and without noise. {_REMEDY}>"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedSum(metaclass=_WithRemedy):
    """The result of a clipped gradient function.

    Only `grads` has bounded sensitivity. Other fields are unprotected.

    A jitted function returns it, so that its leaves are arrays. An optimizer without state, such as
    `optax.sgd`, therefore scales all of its fields and returns a `ClippedSum`.
    `optax.apply_updates` and optimizers with state refuse it. Their error has the remedy.

    Attributes:
      grads: Pytree like params, float32 or wider. The SUM of clipped per-example gradients, None at
        frozen leaves.
      norms: [B]. The L2 norm of each per-example gradient before clipping, 0 where masked.
      losses: [B]. The loss of each example, 0 where masked.
      aux: The auxiliary output of `loss_fn`, stacked along a leading axis [B, ...], or None without
        `has_aux`.
      nonfinite: int32. The number of unmasked examples that are left out of `grads`, because their
        loss or gradient is NaN or infinite.
      part_norms: The norms [B] of each part before clipping, 0 where masked, by its pattern. None
        if clip_norm is one number.
    """

    grads: Any
    norms: jax.Array
    losses: jax.Array
    aux: Any
    nonfinite: jax.Array
    part_norms: Any = None

    # A pytree reaches optax and JAX, whose errors about its structure show this text. It holds no
    # private value.
    def __repr__(self) -> str:
        return f"a ClippedSum, which is private and has no noise. {_REMEDY}"

    # JAX would otherwise say only that the type is no array, and NumPy would make an array of one
    # object.
    def __jax_array__(self) -> jax.Array:
        raise TypeError(f"the argument of a JAX function must be an array, got {self!r}")

    def __array__(self, *_: Any) -> np.ndarray:
        raise TypeError(f"the argument of a NumPy function must be an array, got {self!r}")


class PerExampleGrads(NamedTuple):
    """The result of `ClippedGrad.per_example`: private gradients without any bound.

    Attributes:
      grads: Pytree like params with a leading axis B, float32 or wider. None at frozen leaves. Zero
        where an example is masked or its loss or gradient is not finite.
      nonfinite: int32. The number of unmasked examples with a NaN or infinite loss or gradient.
      contributes: [B] bool. Whether an example is unmasked, and its loss and gradient are finite.
    """

    grads: Any
    nonfinite: jax.Array
    contributes: jax.Array


class _Values(NamedTuple):
    """The checked values of a call. The first are the arrays of params."""

    arrays: list[Any]
    batch: Any
    mask: jax.Array
    key: Any


# It is compared by identity, since functions cannot be compared. So each object compiles its own
# program.
@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """A clipped gradient function. Use `clipped_grad`, which documents it, to make one."""

    loss_fn: Callable[..., Any]
    clip_norm: Any
    engine: Engine
    clip_rule: ClipRule
    trainable: Callable[[str, Any], bool] | None
    has_aux: bool
    group: bool
    microbatch_size: int | None
    grid: GridAt | None = None

    def on_grid(
        self,
        grid: Grid | GridSchedule | None,
        step: Any = 0,
    ) -> "ClippedGrad":
        """Returns the function whose `grads` is int32, a sum of gradients in steps of a grid.

            privatizer = jaxdp.privatize(grad_fn, noise_multiplier=1.1, divisor=256, exact=True)
            exact_fn = grad_fn.on_grid(privatizer.grid)
            update, state = privatizer.update(exact_fn(params, batch, mask).grads, state)

        `jaxdp.transforms.grids` says how a gradient is rounded, and has the proof that one example
        moves the sum by at most the clip norm of the grid. Per-example gradients are formed, in
        B x P memory, but for dense layers with one row of data. None is the sum in floats. `step`
        is the number of the update, for the grid of a schedule.

        Raises:
          ValueError: The clip norm of the grid is not `sensitivity()`.
        """
        # The noise is calibrated to the clip norm of the grid, and so is the proof of rounding.
        if grid is not None and grid.clip_norm != self.sensitivity():
            raise ValueError(
                f"grid must have the clip norm {self.sensitivity()}, got {grid.clip_norm}. Take "
                "the grid of jaxdp.privatize(grad_fn, ..., exact=True)."
            )
        # The numbers of the grid are arguments of a program, so a new step does not change its
        # shapes.
        return dataclasses.replace(self, grid=None if grid is None else grid.at(step))

    def sensitivity(self, adjacency: Adjacency = "add_remove") -> Any:
        """Returns the L2 sensitivity of `grads` to one example (one group with `group=True`).

        It is `clip_rule.bound(clip_norm)` if an example is added or removed ("add_remove") or is
        replaced by one that contributes zero ("zero_out"). It is twice that if any example may
        replace it ("replace_one"). The bound of the rules "global" and "automatic" is clip_norm.
        With a clip norm C_k for each part, sqrt(sum_k bound(C_k)^2) takes the place of the bound.
        """
        if adjacency not in _CONTRIBUTIONS:
            raise ValueError(
                f"adjacency must be one of {sorted(_CONTRIBUTIONS)}, got {adjacency!r}."
            )
        if self.patterns is None:
            bound = self.bounds[0]
        else:
            bound = total_norm(self.bounds)
        return _CONTRIBUTIONS[adjacency] * bound

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """The patterns of the parts, or None if the whole gradient is clipped to one norm."""
        if isinstance(self.clip_norm, Mapping):
            return tuple(self.clip_norm)
        return None

    @property
    def clip_norms(self) -> tuple[Any, ...]:
        """The clip norms of the parts, in the order of `patterns`, or the one of all params."""
        if isinstance(self.clip_norm, Mapping):
            return tuple(self.clip_norm.values())
        return (self.clip_norm,)

    @property
    def bounds(self) -> tuple[Any, ...]:
        """The norm that no clipped gradient of each part exceeds."""
        return tuple(map(self.clip_rule.bound, self.clip_norms))

    def parts_of(self, params: Any) -> tuple[int, ...]:
        """Returns the number of the part of each trainable leaf, in the order of `patterns`.

        Raises:
          ValueError: As in `__call__`.
        """
        tree, _ = split_params(params, self.trainable)
        return part_numbers(self.clip_norm, params, tree.trainable)

    def trainable_params(self, params: Any) -> Any:
        """Returns `params` with None in place of frozen leaves, to initialise the optimizer."""
        leaves, structure = jax.tree.flatten(params)
        pairs = zip(leaves, trainable_leaves(params, self.trainable), strict=True)
        # JAX takes None for a pytree without leaves, so the optimizer has no state for it.
        return jax.tree.unflatten(structure, [leaf if trains else None for leaf, trains in pairs])

    def per_example(
        self,
        params: Any,
        batch: Any,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> PerExampleGrads:
        """Computes per-example gradients without clipping, in B x P memory.

        They are for rules that `clipped_grad` lacks. Arguments and errors are as in `__call__`.
        `clip_rule` and `microbatch_size` have no effect.
        """
        tree, values = self._checked(params, batch, mask, key)
        result: PerExampleGrads = self._compiled_grads(tree, values)
        return result

    def plan(
        self,
        params: Any,
        batch: Any,
        *,
        key: jax.Array | None = None,
    ) -> list[LeafPlan]:
        """Returns how each leaf of params is treated, by counts that do not depend on values.

        Nothing is computed. Arguments and errors are as in `__call__`.
        """
        tree, values = self._checked(params, batch, None, key)
        batched = _batched(self, tree, values)
        # It has an entry for each trainable leaf only.
        of_leaves = leaf_plans.treatments(self.engine, batched, tree.part_of)
        treatments = iter(of_leaves)
        plans = []
        pairs = zip(paths_of(params), tree.trainable, strict=True)
        for (path, leaf), trains in pairs:
            treatment = next(treatments) if trains else leaf_plans.FROZEN
            plans.append(leaf_plans.leaf_plan(path, leaf, treatment))
        return plans

    def __call__(
        self,
        params: Any,
        batch: Any,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> ClippedSum:
        """Sums clipped per-example gradients.

        Args:
          params: Pytree of arrays.
          batch: Pytree whose leaves have a leading axis B (B x G with `group=True`). B may be 0.
          mask: [B] bool. False marks padding, which contributes zero whatever its values are. With
            `group=True` also [B, G]. The loss of a group is then the mean over its True members.
          key: Typed key for a stochastic loss. Example i is evaluated with
            `key=jax.random.fold_in(key, i)`.

        Raises:
          ValueError: B differs between leaves of batch and mask, or no leaf of params is trainable,
            or one is not in exactly one part of clip_norm.
          TypeError: mask is not boolean, or key is not a typed key, or a trainable leaf is complex.
          RuntimeError: `XLA_FLAGS` has options that `jaxdp.transforms.compiler` refuses.
        """
        tree, values = self._checked(params, batch, mask, key)
        # Clip norms may be traced. So they are arguments of the program, and are not read from
        # `self`.
        limits = ClipLimits(self.clip_norms, self.bounds, self.grid)
        result: ClippedSum = self._compiled_sum(tree, values, limits)
        return result

    # Each object holds its own programs, which are freed with it. The cache of one `jax.jit` for
    # all would keep every object, and the arrays that its `loss_fn` closes over.
    @functools.cached_property
    def _compiled_sum(self) -> Any:
        return jax.jit(functools.partial(_clipped_sum, self), static_argnums=0)

    @functools.cached_property
    def _compiled_grads(self) -> Any:
        return jax.jit(functools.partial(_per_example_grads, self), static_argnums=0)

    def _checked(
        self,
        params: Any,
        batch: Any,
        mask: Any,
        key: Any,
    ) -> tuple[ParamsTree, _Values]:
        """Returns what a program is compiled for, and the values that it takes."""
        check_options()  # before anything is compiled
        check_batch(batch, mask, key, group=self.group)
        tree, arrays = split_params(params, self.trainable)
        if isinstance(self.clip_norm, Mapping):
            part_of = part_numbers(self.clip_norm, params, tree.trainable)
            tree = dataclasses.replace(tree, part_of=part_of)
        # With an array of ones, calls with and without a mask share a program.
        if mask is None:
            mask = jnp.ones(len(jax.tree.leaves(batch)[0]), bool)
        return tree, _Values(arrays, batch, mask, key)


def clipped_grad(
    loss_fn: Callable[..., Any],
    *,
    clip_norm: Any,
    engine: Engine = "auto",
    clip_rule: str | ClipRule = "global",
    trainable: Callable[[str, Any], bool] | None = None,
    has_aux: bool = False,
    group: bool = False,
    microbatch_size: int | None = None,
) -> ClippedGrad:
    """Transforms a per-example loss into a function that sums clipped per-example gradients.

    Args:
      loss_fn: `loss_fn(params, example) -> scalar`. With `has_aux` it returns `(scalar, aux)`. If a
        call passes `key=`, `loss_fn` receives `key=`. Any JAX function is valid: plain, Linen's
        `apply`, NNX `merge`, Equinox.
      clip_norm: C >= 0, in the units of the gradient. inf does not clip. 0 removes every gradient,
        and so does a value below 1e-12, where squares underflow. It may be traced: a negative or
        NaN traced value counts as 0. A mapping from regular expressions of paths to norms, such as
        {"backbone/.*": 0.1, "head/.*": 1.0}, clips each part of params to its own norm C_k. Each
        trainable leaf must match exactly one. `split_clip_norm` divides one norm.
      engine: "auto", "bookkeeping" or "vmap". Their results are equal. Their time and memory
        differ.
      clip_rule: A name in `CLIP_RULES` or a `ClipRule`. "global" scales by min(1, C/||g||).
        "automatic" scales by C/(||g|| + 0.01), so that examples count alike (Bu et al. 2023,
        arXiv:2206.07136).
      trainable: `trainable(path, leaf) -> bool` with paths such as "Dense_0/kernel". Other leaves
        are frozen: no gradient, no noise, no memory. Default: all leaves of floating or complex
        dtype. A complex leaf is an error.
      has_aux: Whether `loss_fn` also returns auxiliary output.
      group: Whether to clip groups (users, or views of one example). Leaves of the batch are then
        [B, G, ...], and the loss of a group is the mean of `loss_fn` over its members.
      microbatch_size: The number of examples (groups) in memory at a time. Results are equal up to
        the order of float32 summation. XLA on CPU runs convolutions in loops about three times
        slower, so prefer smaller batches there (`jaxdp.finetune.dp_sgd` accumulates over physical
        batches). Chunk k of n has the examples k, k + n, k + 2 n, ..., so that every device that
        holds a block of the batch works on every chunk.

    Returns:
      A compiled function `f(params, batch, mask=None, *, key=None) -> ClippedSum` with
      `f.sensitivity(adjacency)`.

    Raises:
      ValueError: An argument is out of range. When called: the loss uses BatchNorm in batch mode,
        it draws random numbers that all examples and calls would share, such as one dropout mask,
        or it combines values along a named axis of an enclosing map, or calls Python or a foreign
        function with the whole batch.
      TypeError: clip_norm is not a number or clip_rule is not a rule. When called: loss_fn takes
        other arguments, params is a model and not its parameters, or a trainable leaf is complex.
      NotImplementedError: When called: the loss uses a mutable array (`jax.new_ref`). Engine "vmap"
          supports it.

    Formal guarantees:
      `grads` is a sum with one term per unmasked example. The L2 norm of a term, as float32
      computes it in a batch of one, is at most (1 + 2**-8) bound for every input, with bound =
      `clip_rule.bound(clip_norm)`, which is clip_norm for "global" and "automatic". It exceeds
      bound by more than a relative 1e-5 or so only if the terms of one gradient almost cancel.
      `jaxdp.transforms.rounding` has the proof, which assumes that an addition is rounded to 2**-23
      or better and that XLA's reductions of one axis are trees. The sum of the terms of a batch is
      rounded like any sum.

      A term is a function of params and of its own example only. An example whose loss or gradient
      is NaN or infinite contributes exactly zero. A factor that would exceed the bound is reduced
      to bound/||g||. So adding, removing or zeroing out one example moves `grads` by at most bound,
      and replacing it by at most 2 * bound. The sum is not divided. The divisor must be public and
      is the caller's.

      With parts, all of the above holds for each part with its own bound. So a whole term has norm
      at most sqrt(sum_k bound_k^2) up to the same rounding, and `f.sensitivity` reports it. An
      example with one part that is not finite contributes zero to all parts.

      A loss that could see other examples is refused: a collective on a named axis of an enclosing
      `jax.vmap`, `jax.pmap` or `jax.shard_map`, also in a custom derivative, and a call to Python
      or to a foreign function that takes a whole batch. A `jax.custom_batching.custom_vmap` is
      replaced by its function of one example. Values on which `loss_fn` closes are public, and a
      Python function that it calls must not keep examples.

      The derivatives of a call are those of the sum over the examples that contribute.

      The bound holds for parameters and compute in bfloat16 and float16, tied or not, because the
      norms are computed from the values that are summed. Complex values that a loss computes from
      parameters carry gradients as in `jax.grad`. A `jax.custom_vjp` is applied to each example
      separately, so its backward pass need not be linear.

      Inside `jax.shard_map`, `grads` is the sum over the examples of one shard. The caller sums it
      over the shards with `jax.lax.psum`. One example then moves the total by at most bound. Under
      `check_vma=True`, shared parameters are made to vary over the mesh axes of the data, so that
      JAX does not sum gradients before the clipping. Under `check_vma=False` JAX adds no such sum.
      A loss that calls a collective on an axis of the `shard_map` is refused in both modes, because
      its value for one example depends on other examples.

      Under `jax.jit` with sharded arrays, the result is that of one device up to rounding. On a
      mesh with axes of type Explicit, `grads` has the shardings of params and values of examples
      have that of the batch. The axes are Auto inside of `loss_fn`.

    | edge case | result |
    |---|---|
    | empty batch, all-masked batch | grads are zero |
    | NaN or inf in an example, its loss or gradient | contributes zero, counted in `nonfinite` |
    | no positions, or an axis of length zero | the gradient is zero |
    | gradient norm 0 | contributes zero |
    | squared norm overflows float32 | counts as non-finite |
    | float32 on a GPU with TF32 | factors are rounded as in a plain step, products are exact |
    | bf16, float16 parameters or compute | norms and sum in float32; overflow is non-finite |
    | integer and boolean leaves of params | frozen |
    | weights that become complex in the loss | their gradients are formed: B x P memory |
    | weights that enter a `jax.custom_vjp` | their gradients are formed: B x P memory |
    | weights computed from params, not only moved | gradients of these are kept: B x P memory |
    | weights computed from leaves of several parts | gradients of these are kept: B x P memory |
    | `jax.lax.ragged_dot` | a product over all groups with masked rows: JAX cannot batch it |
    | leaves that are no arrays (Python scalars, functions) | frozen, static: a change recompiles |
    """
    if isinstance(clip_norm, Mapping):
        check_patterns(clip_norm)
        clip_norm = types.MappingProxyType(dict(clip_norm))  # a change would not reach the noise
        for pattern, norm in clip_norm.items():
            _check_clip_norm(f"clip_norm[{pattern!r}]", norm)
    else:
        _check_clip_norm("clip_norm", clip_norm)
    _check_function("loss_fn", loss_fn, "loss_fn(params, example) -> scalar")
    if trainable is not None:
        _check_function("trainable", trainable, "trainable(path, leaf) -> bool")
    if engine not in ("auto", "bookkeeping", "vmap"):
        raise ValueError(f"engine must be 'auto', 'bookkeeping' or 'vmap', got {engine!r}.")
    is_count = isinstance(microbatch_size, numbers.Integral) and microbatch_size >= 1
    if microbatch_size is not None and not is_count:
        raise ValueError(
            f"microbatch_size must be an integer of at least 1 or None, got {microbatch_size!r}."
        )
    return ClippedGrad(
        loss_fn, clip_norm, engine, find_rule(clip_rule), trainable, has_aux, group, microbatch_size
    )


def _check_function(name: str, value: Any, call: str) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, {call}, got {type(value).__name__} {value!r}.")


def _check_clip_norm(name: str, clip_norm: Any) -> None:
    # A tracer is a `jax.Array` too.
    if not isinstance(clip_norm, (int, float, np.ndarray, np.generic, jax.Array)):
        raise TypeError(
            f"{name} must be a number, got {type(clip_norm).__name__} {clip_norm!r}. To clip parts "
            "of params to norms of their own, map regular expressions of paths to numbers, such as "
            "{'backbone/.*': 0.1, 'head/.*': 1.0}."
        )
    if jnp.shape(clip_norm) != ():
        raise ValueError(
            f"{name} must be one number for all examples, got shape {jnp.shape(clip_norm)}."
        )
    # A traced value has no sign yet. `clip_factors` counts a negative one as 0.
    # NaN compares as False, so it is refused as well.
    if not isinstance(clip_norm, jax.core.Tracer) and not np.all(np.asarray(clip_norm) >= 0):
        raise ValueError(
            f"{name} must be at least 0, got {clip_norm}. Use float('inf') for no clipping."
        )


def _batched(f: ClippedGrad, tree: ParamsTree, values: _Values) -> BatchedLoss:
    loss_fn = LossFunction(f.loss_fn, f.has_aux, f.group)
    return batched_loss(loss_fn, tree, *values)


# The structure of params is static where this is compiled, because it decides the program.
def _clipped_sum(
    f: ClippedGrad,
    tree: ParamsTree,
    values: _Values,
    limits: ClipLimits,
) -> ClippedSum:
    # `_summed` has Auto axes only. Where an axis is Explicit, its result needs these specs.
    rows: Any = row_spec(values.batch)
    whole: Any = PartitionSpec()
    # By the order of the fields. All but the sum and the count have one row for each example.
    specs = ClippedSum(tree.specs(values.arrays), rows, rows, rows, whole, rows)
    summed = shards.automatic(functools.partial(_summed, f, tree), specs)
    result: ClippedSum = summed(values, limits)
    return result


def _summed(
    f: ClippedGrad,
    tree: ParamsTree,
    values: _Values,
    limits: ClipLimits,
) -> ClippedSum:
    """Computes a clipped sum. All mesh axes are Auto here, so that any loss can be divided."""
    batched = _batched(f, tree, values)
    # Both engines and the empty batch read this one trace.
    program, consts = trace_loss(batched.loss, batched.leaves, batched.batch)
    options = SumOptions(f.engine, f.clip_rule, f.microbatch_size, tree.part_of)
    inputs = SumInputs(consts, batched.leaves, batched.batch, batched.unmasked, *limits)
    sums = clipped_sums(options, program, inputs)
    examples = sums.examples
    # Each engine keeps the rows apart.
    chex.assert_equal_shape([examples.norms, examples.losses, batched.unmasked])
    part_norms = None
    if f.patterns is not None:
        # A single part has the norms of the whole gradient.
        of_parts = examples.part_norms or [examples.norms]
        pairs = zip(f.patterns, of_parts, strict=True)
        part_norms = dict(pairs)
    return ClippedSum(
        grads=tree.tree(sums.leaves),
        norms=examples.norms,
        losses=examples.losses,
        aux=examples.aux,
        nonfinite=sums.nonfinite,
        part_norms=part_norms,
    )


def _per_example_grads(f: ClippedGrad, tree: ParamsTree, values: _Values) -> PerExampleGrads:
    whole: Any = PartitionSpec()
    rows: Any = row_spec(values.batch)
    specs = PerExampleGrads(rows, whole, rows)
    formed = shards.automatic(functools.partial(_formed, f, tree), specs)
    result: PerExampleGrads = formed(values)
    return result


def _formed(f: ClippedGrad, tree: ParamsTree, values: _Values) -> PerExampleGrads:
    """Forms the gradients of all examples, and zeros for those that are not finite."""
    batched = _batched(f, tree, values)
    # The engines reshape to [B, -1], which has no answer for B = 0.
    grads = [jnp.zeros((0, *x.shape), sites.wide_dtype(x)) for x in batched.leaves]
    finite = jnp.ones(0, bool)
    if len(batched.unmasked):
        grads, finite = _formed_grads(f.engine, batched, tree.part_of)
    # NaN times 0 is NaN, so rows are replaced and not multiplied.
    contributes = batched.unmasked & finite
    grads = [sites.rows_kept(g, contributes) for g in grads]
    nonfinite = (batched.unmasked & ~finite).sum(dtype=jnp.int32)
    return PerExampleGrads(tree.tree(grads), nonfinite, contributes)


def _formed_grads(
    engine: Engine,
    batched: BatchedLoss,
    part_of: tuple[int, ...],
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the gradients [B, ...] of the leaves, and whether each example is finite."""
    program, consts = trace_loss(batched.loss, batched.leaves, batched.batch)

    def formed(
        consts: list[Any], leaves: list[Any], batch: Any
    ) -> tuple[list[jax.Array], jax.Array]:
        if engine == "vmap":
            result = engines.by_vmap(program, consts, leaves, batch, part_of)
        else:  # layer by layer is faster for convolutions
            result = engines.by_bookkeeping(
                program, consts, leaves, batch, part_of, engines.keep_all
            )
        assert result.grads is not None
        return result.grads, result.finite

    # The engines ask for the platform, which is known where the program is lowered.
    grads: tuple[list[jax.Array], jax.Array] = forms.for_platform(
        formed, consts, batched.leaves, batched.batch
    )
    return grads
