"""Per-example gradient clipping as a transformation of a loss function.

`clipped_grad(loss_fn, clip_norm=C)` turns a per-example loss into a function of a batch. The
function returns the sum of the per-example gradients, each scaled to an L2 norm of at most C:

    sum_i g_i * min(1, C / ||g_i||_2),   g_i = grad loss_fn(params, example_i)        (Abadi et al. 2016, Alg. 1)

Three engines compute the same sum:

* "vmap" forms per-example gradients by `jax.vmap(jax.grad)`. It supports every loss and needs B x P
  memory.
* "bookkeeping" adds zero taps where weights meet data (`jaxdp.transforms.walker`) and runs one
  backward pass to them. It computes norms layer by layer, then one weighted weight gradient per
  layer. It needs no B x P memory.
* "auto" is bookkeeping that may keep the per-example gradients of a layer. It does so where
  operation and byte counts say that reuse is cheaper than a second contraction.

`jaxdp.transforms.clip_rules` holds the clipping rules and the protocol for a new one.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp.transforms import dense, draws, forms, rounding, shards, sites, walker
from jaxdp.transforms.clip_rules import (
    CLIP_RULES,
    ClipRule,
    check_clip_rule,
    clip_factors,
    find_rule,
)
from jaxdp.transforms.compiler import check_options

__all__ = [
    "CLIP_RULES",
    "ClipRule",
    "ClippedGrad",
    "ClippedSum",
    "Engine",
    "LeafPlan",
    "PerExampleGrads",
]
__all__ += ["check_clip_rule", "clipped_grad", "paths_of"]

Engine = Literal["auto", "bookkeeping", "vmap"]
Adjacency = Literal["add_remove", "zero_out", "replace_one"]
# The loss of one example: (trainable leaves, example, mask of the group's members, key) -> (value,
# aux).
Loss = Callable[..., tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """The result of a clipped gradient function. Only `grads` has bounded sensitivity. Other fields
    are unprotected.

    Attributes:
      grads: Pytree like params, float32 or wider. The SUM of clipped per-example gradients, None at
          frozen leaves.
      norms: [B]. The L2 norm of each per-example gradient before clipping, 0 where masked.
      losses: [B]. The loss of each example, 0 where masked.
      aux: The auxiliary output of `loss_fn`, stacked along a leading axis [B, ...], or None without
          `has_aux`.
      nonfinite: int32. The number of unmasked examples that are left out of `grads`, because their
        loss or gradient is NaN or infinite.
    """

    grads: Any
    norms: jax.Array
    losses: jax.Array
    aux: Any
    nonfinite: jax.Array


class PerExampleGrads(NamedTuple):
    """The result of `ClippedGrad.per_example`: private gradients without any bound.

    Attributes:
      grads: Pytree like params with a leading axis B, float32 or wider. None at frozen leaves. Zero
        where an example is masked or its loss or gradient is not finite.
      nonfinite: int32. The number of unmasked examples with a NaN or infinite loss or gradient.
    """

    grads: Any
    nonfinite: jax.Array


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


class _Rows(NamedTuple):
    """The arrays [B, ...] that a weighted sum reads.

    Attributes:
      read: Arrays whose rows must be finite. None stands for an array in `left_out`.
      left_out: Arrays of which the sum leaves out the rows of the factor 0, whatever they hold.
    """

    read: Any
    left_out: Any = None


class _PerExample(NamedTuple):
    """The result of one engine's pass over a batch, before the clip factors are known."""

    losses: jax.Array
    aux: Any
    squared_norms: jax.Array
    rows: _Rows
    weighted_sum: Callable[[Any, jax.Array], list[jax.Array]]  # (rows, factors [B]) -> sum per leaf
    grads: list[jax.Array] | None  # [B, ...] per leaf, if all were formed

    @property
    def finite(self) -> jax.Array:
        """Whether the loss and the gradient of each example are finite, [B]."""
        return jnp.isfinite(self.squared_norms) & jnp.isfinite(self.losses)


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

    def sensitivity(self, adjacency: Adjacency = "add_remove") -> Any:
        """Returns the L2 sensitivity of `grads` to one example (one group with `group=True`).

        It is `clip_rule.bound(clip_norm)` if an example is added or removed ("add_remove") or is
        replaced by one that contributes zero ("zero_out"). It is twice that if any example may
        replace it ("replace_one"). The bound of the rules "global" and "automatic" is clip_norm.
        """
        factors = {"add_remove": 1, "zero_out": 1, "replace_one": 2}
        if adjacency not in factors:
            raise ValueError(f"adjacency must be one of {sorted(factors)}, got {adjacency!r}.")
        return factors[adjacency] * self.clip_rule.bound(self.clip_norm)

    def trainable_params(self, params: Any) -> Any:
        """Returns `params` with None in place of frozen leaves. Initialise the optimizer of `grads`
        with it.
        """
        leaves, structure = jax.tree.flatten(params)
        kept = (
            leaf if t else None for leaf, t in zip(leaves, self._trainable(params), strict=True)
        )
        return jax.tree.unflatten(structure, kept)

    def per_example(
        self,
        params: Any,
        batch: Any,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> PerExampleGrads:
        """Computes per-example gradients without clipping, in B x P memory, for rules that
        `clipped_grad` lacks.

        Arguments and errors are as in `__call__`. `clip_rule` and `microbatch_size` have no effect.
        """
        result: PerExampleGrads = _per_example_grads(*self._arguments(params, batch, mask, key))
        return result

    def plan(self, params: Any, batch: Any, *, key: jax.Array | None = None) -> list[LeafPlan]:
        """Returns how each leaf of params is treated, by counts that do not depend on values.
        Nothing is computed.

        Arguments and errors are as in `__call__`.
        """
        static, *arguments = self._arguments(params, batch, None, key)
        loss, moving, batch, _ = _prepared(static, *arguments)
        treated = iter(_leaf_treatments(self, loss, moving, batch))
        return [
            LeafPlan(
                path,
                jnp.shape(leaf),
                _kind_of(leaf),
                *(next(treated) if trained else ((), "frozen", 0.0, 0)),
            )
            for (path, leaf), trained in zip(paths_of(params), static.trainable, strict=True)
        ]

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
          ValueError: B differs between leaves of batch and mask, or no leaf of params is trainable.
          TypeError: mask is not boolean, or key is not a typed key, or a trainable leaf is complex.
          RuntimeError: `XLA_FLAGS` has options that `jaxdp.transforms.compiler` refuses.
        """
        arguments = self._arguments(params, batch, mask, key)
        result: ClippedSum = _clipped_sum(
            *arguments, self.clip_norm, self.clip_rule.bound(self.clip_norm)
        )
        return result

    def _arguments(self, params: Any, batch: Any, mask: Any, key: Any) -> tuple[Any, ...]:
        """Checks the arguments of a call and converts them for the compiled functions, the static
        one first.
        """
        check_options()
        self._check(batch, mask, key)
        check_params(params)
        trainable = self._trainable(params)
        if not any(trainable):
            first = paths_of(params)[:3]
            kinds = {path: _kind_of(x) for path, x in first}
            raise ValueError(
                f"params has no trainable leaf of floating dtype. Its first leaves are {kinds}. To "
                "train a Python scalar, convert it with jnp.asarray, and check that `trainable` "
                "accepts such paths."
            )
        mask = jnp.ones(len(jax.tree.leaves(batch)[0]), bool) if mask is None else mask
        leaves, structure = jax.tree.flatten(params)
        arrays = [x if _is_array(x) else None for x in leaves]
        settings = tuple(None if _is_array(x) else x for x in leaves)
        return _Static(self, structure, settings, tuple(trainable)), arrays, batch, mask, key

    def _trainable(self, params: Any) -> list[bool]:
        predicate = self.trainable or (lambda path, leaf: True)
        chosen = []
        for path, leaf in paths_of(params):
            kind = jnp.result_type(leaf) if _is_array(leaf) else np.dtype(object)
            chosen.append(jnp.issubdtype(kind, jnp.inexact) and bool(predicate(path, leaf)))
            if chosen[-1] and jnp.issubdtype(kind, jnp.complexfloating):
                raise TypeError(
                    f"params has the complex leaf {path!r} of dtype {kind}, which cannot be "
                    "trained. Store its real and imaginary part as two leaves and join them in "
                    "loss_fn with jax.lax.complex, or freeze it with trainable=lambda path, leaf: "
                    f"path != {path!r}."
                )
        return chosen

    def _check(self, batch: Any, mask: Any, key: Any) -> None:
        lead = 2 if self.group else 1
        shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
        if not shapes or any(len(s) < lead for s in shapes) or len({s[:lead] for s in shapes}) != 1:
            axes = "two leading axes [B, G]" if self.group else "a leading axis [B]"
            raise ValueError(
                f"Every leaf of batch must have {axes} of the same size, got shapes {shapes}."
            )
        front = shapes[0][:lead]
        if mask is not None and jnp.result_type(mask) != jnp.bool_:
            raise TypeError(
                f"mask must be boolean, got {jnp.result_type(mask)}. Convert it with "
                "mask.astype(bool). If an example has several parts, pass them as one pytree, "
                "batch=(x, y)."
            )
        if mask is not None and jnp.shape(mask) not in {front, front[:1]}:
            raise ValueError(f"mask must have shape {front}, got {jnp.shape(mask)}.")
        if key is not None and not jnp.issubdtype(
            getattr(key, "dtype", np.float32), jax.dtypes.prng_key
        ):
            raise TypeError(
                f"key must be a typed key such as jax.random.key(seed), got {type(key).__name__}."
            )


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
        NaN traced value counts as 0.
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
      or better and that XLA's reductions are trees. The sum of the terms of a batch is rounded like
      any sum.

      A term is a function of params and of its own example only. An example whose loss or gradient
      is NaN or infinite contributes exactly zero. A factor that would exceed the bound is reduced
      to bound/||g||. So adding, removing or zeroing out one example moves `grads` by at most bound,
      and replacing it by at most 2 * bound. The sum is not divided. The divisor must be public and
      is the caller's.

      A loss that could see other examples is refused: a collective on a named axis of an enclosing
      `jax.vmap`, `jax.pmap` or `jax.shard_map`, also in a custom derivative, and a call to Python
      or to a foreign function that takes a whole batch. A `jax.custom_batching.custom_vmap` is
      replaced by its function of one example. Values on which `loss_fn` closes are public, and a
      Python function that it calls must not keep examples.

      The derivatives of a call are those of the sum over the examples that contribute.

      The bound holds for parameters and compute in bfloat16 and float16, tied or not, because the
      norms are computed
      from the values that are summed. Complex values that a loss computes from parameters carry gradients as in
      `jax.grad`. A `jax.custom_vjp` is applied to each example separately, so its backward pass
      need not be linear.

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
    | NaN or inf in an example, its loss or its gradient | contributes zero, counted in `nonfinite` |
    | no positions, or an axis of length zero | the gradient is zero |
    | gradient norm 0 | contributes zero |
    | squared norm overflows float32 | counts as non-finite |
    | float32 on a GPU that multiplies in TF32 | factors are rounded as in a plain step, and their products are exact |
    | bf16, float16 parameters or compute | norms, clipping and sum in float32; overflow counts as non-finite |
    | integer and boolean leaves of params | frozen |
    | weights that become complex in the loss or enter a `jax.custom_vjp` | their gradients are formed: B x P memory |
    | weights that are computed from params and not only moved | gradients of these params are kept: B x P memory |
    | `jax.lax.ragged_dot` | a product over all groups with masked rows, since JAX cannot batch the primitive |
    | leaves of params that are not arrays (Python scalars, functions) | frozen, and static: a new value recompiles |
    """
    if not isinstance(clip_norm, (int, float, np.ndarray, np.generic, jax.Array)):
        raise TypeError(
            f"clip_norm must be one number for the whole gradient, got {type(clip_norm).__name__} "
            f"{clip_norm!r}. To clip parts of params to different norms, call clipped_grad once "
            "per part with `trainable`."
        )
    if jnp.shape(clip_norm) != ():
        raise ValueError(
            f"clip_norm must be one number for all examples, got shape {jnp.shape(clip_norm)}."
        )
    if not isinstance(clip_norm, jax.core.Tracer) and not np.all(np.asarray(clip_norm) >= 0):
        raise ValueError(
            f"clip_norm must be at least 0, got {clip_norm}. Use float('inf') for no clipping."
        )
    if engine not in ("auto", "bookkeeping", "vmap"):
        raise ValueError(f"engine must be 'auto', 'bookkeeping' or 'vmap', got {engine!r}.")
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1 or None, got {microbatch_size}.")
    return ClippedGrad(
        loss_fn, clip_norm, engine, find_rule(clip_rule), trainable, has_aux, group, microbatch_size
    )


def paths_of(params: Any) -> list[tuple[str, Any]]:
    """Returns (path, leaf) of every leaf, with paths such as "Dense_0/kernel", as `trainable`
    receives them.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(params)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


# A model where its parameters belong: (module, class) to (name, remedy).
_MODELS = {
    ("flax.nnx", "Module"): (
        "an NNX module",
        "Split it by graph, params, rest = nnx.split(model, nnx.Param, ...), and merge it in "
        "loss_fn by nnx.merge(graph, params, rest, copy=True).",
    ),
    ("flax.linen", "Module"): (
        "a Linen module",
        "Pass model.init(key, inputs)['params'], and call model.apply({'params': params}, inputs) "
        "in loss_fn.",
    ),
    ("haiku", "Transformed"): (
        "a pair of Haiku functions",
        "Pass transformed.init(key, inputs), and call transformed.apply(params, key, inputs) in "
        "loss_fn.",
    ),
    ("haiku", "TransformedWithState"): (
        "a pair of Haiku functions",
        "Pass the first result of transformed.init(key, inputs), and call "
        "transformed.apply(params, state, key, inputs) in loss_fn.",
    ),
}


@functools.cache
def _model_kind(cls: type[Any]) -> tuple[str, str] | None:
    for base in cls.__mro__:
        for (module, name), kind in _MODELS.items():
            if base.__name__ == name and base.__module__.startswith(module):
                return kind
    return None


def check_params(params: Any) -> None:
    """Raises TypeError if params is or contains a model of Flax or Haiku in place of its
    parameters.
    """
    for node in jax.tree.leaves(params, is_leaf=lambda x: _model_kind(x.__class__) is not None):
        if kind := _model_kind(node.__class__):
            what, remedy = kind
            raise TypeError(
                f"params must be a pytree of arrays, got {what}, {type(node).__name__}. {remedy}"
            )


def _kind_of(leaf: Any) -> str:
    return str(jnp.result_type(leaf)) if _is_array(leaf) else type(leaf).__name__


def _is_array(x: Any) -> bool:
    # Python scalars are settings, not parameters: Equinox stores dropout rates and flags as leaves
    # of a module.
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


class _Static(NamedTuple):
    f: ClippedGrad
    structure: Any  # of params
    settings: tuple[Any, ...]  # leaves of params that are not arrays
    trainable: tuple[bool, ...]

    def tree(self, values: Sequence[Any], others: Sequence[Any] | None = None) -> Any:
        """Builds a tree like params from one value per trainable leaf. Other leaves come from
        `others`, or are None.
        """
        rest = iter(values)
        others = others or (None,) * len(self.trainable)
        leaves = [next(rest) if t else x for t, x in zip(self.trainable, others, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    def specs(self, arrays: list[Any], batch: Any) -> tuple[Any, PartitionSpec]:
        """Returns how gradients are divided over Explicit mesh axes, like the leaves, and values of
        examples.
        """
        moving = [x for x, t in zip(arrays, self.trainable, strict=True) if t]
        rows = shards.spec_of(jax.tree.leaves(batch)[0])[:1]
        return self.tree([shards.spec_of(x) for x in moving]), PartitionSpec(*rows)


@functools.partial(jax.jit, static_argnums=0)
def _clipped_sum(static: _Static, arrays: list[Any], batch: Any, *others: Any) -> ClippedSum:
    leaves, rows = static.specs(arrays, batch)
    specs: Any = (leaves, rows, rows, rows, PartitionSpec())
    summed = shards.automatic(functools.partial(_summed, static), ClippedSum(*specs))
    result: ClippedSum = summed(arrays, batch, *others)
    return result


def _summed(
    static: _Static,
    arrays: list[Any],
    batch: Any,
    mask: jax.Array,
    key: Any,
    clip_norm: Any,
    bound: Any,
) -> ClippedSum:
    loss, moving, batch, unmasked = _prepared(static, arrays, batch, mask, key)
    program, consts = _traced(loss, moving, batch)
    sums, per_example, nonfinite = _sums(
        static.f, program, consts, moving, batch, unmasked, clip_norm, bound
    )
    return ClippedSum(static.tree(sums), *per_example[:3], nonfinite)


class _Program(NamedTuple):
    """The traced loss of one example.

    Attributes:
      jaxpr: The program from weights and the leaves of an example to the loss and the leaves of
          aux.
      value: The shape and dtype of the loss.
      aux: Those of the auxiliary output, a pytree.
    """

    jaxpr: Any
    value: jax.ShapeDtypeStruct
    aux: Any

    def evaluate(self, consts: list[Any]) -> Callable[..., list[Any]]:
        """Returns the program as a function. Its constants, on which `loss_fn` closes, are separate
        arguments.
        """
        function: Callable[..., list[Any]] = jax.extend.core.jaxpr_as_fun(self.closed(consts))
        return function

    def closed(self, consts: list[Any]) -> jax.extend.core.ClosedJaxpr:
        return jax.extend.core.ClosedJaxpr(self.jaxpr, consts)

    def with_aux(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self.aux), leaves)


# (sums per leaf, (norms, losses, aux, whether it contributes) per example, number of non-finite
# examples)
Sums = tuple[list[jax.Array], tuple[jax.Array, jax.Array, Any, jax.Array], jax.Array]


def _sums_of(f: ClippedGrad, program: _Program, *arguments: Any) -> Sums:
    """Returns `_sums_on_platform`, in the forms of the platform that the program is compiled
    for.
    """
    sums: Sums = forms.for_platform(functools.partial(_sums_on_platform, f, program), *arguments)
    return sums


def _sums_on_platform(
    f: ClippedGrad,
    program: _Program,
    consts: list[Any],
    moving: list[Any],
    batch: Any,
    unmasked: jax.Array,
    clip_norm: Any,
    bound: Any,
) -> Sums:
    """Computes the clipped sums of a batch, by chunks of the size that `f` asks for."""
    step = functools.partial(_chunk_sum, f, program, consts, moving, clip_norm, bound)
    if f.microbatch_size is None or f.microbatch_size >= len(unmasked):
        return step(batch, unmasked)
    axes = shards.varying_axes(*jax.tree.leaves((moving, batch, unmasked, clip_norm, bound)))
    return _in_chunks(step, batch, unmasked, f.microbatch_size, axes)


_sums = jax.custom_jvp(_sums_of, nondiff_argnums=(0, 1))


@_sums.defjvp
def _sums_jvp(f: ClippedGrad, program: _Program, primals: Any, tangents: Any) -> tuple[Sums, Sums]:
    """Differentiates the sum over the examples that contribute. 0 * NaN is NaN, so others must not
    be computed.
    """
    result = _sums(f, program, *primals)
    contributes = result[1][3]
    if len(contributes) == 0:
        return result, jax.tree.map(_zero_tangent, result)

    def of_contributing(consts: Any, moving: Any, batch: Any, *rest: Any) -> Sums:
        first = jnp.argmax(contributes)

        def shown(x: jax.Array) -> jax.Array:
            return jnp.where(contributes.reshape(-1, *(1,) * (x.ndim - 1)), x, x[first])

        _, *others = rest
        sums: Sums = _sums_of(
            f, program, consts, moving, jax.tree.map(shown, batch), contributes, *others
        )
        return sums

    def nothing(*arguments: Any) -> Sums:
        shapes: Sums = jax.eval_shape(of_contributing, *arguments)
        zeros: Sums = jax.tree.map(
            lambda x: shards.vary(jnp.zeros(x.shape, x.dtype), shards.varying_axes(x)), shapes
        )
        return zeros

    def differentiated(*arguments: Any) -> Sums:
        sums: Sums = lax.cond(contributes.any(), of_contributing, nothing, *arguments)
        return sums

    return result, jax.jvp(differentiated, primals, tangents)[1]


def _zero_tangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


@functools.partial(jax.jit, static_argnums=0)
def _per_example_grads(
    static: _Static, arrays: list[Any], batch: Any, *others: Any
) -> PerExampleGrads:
    specs: Any = (static.specs(arrays, batch)[1], PartitionSpec())
    formed = shards.automatic(functools.partial(_formed, static), PerExampleGrads(*specs))
    result: PerExampleGrads = formed(arrays, batch, *others)
    return result


def _formed(
    static: _Static, arrays: list[Any], batch: Any, mask: jax.Array, key: Any
) -> PerExampleGrads:
    loss, moving, batch, unmasked = _prepared(static, arrays, batch, mask, key)
    grads, finite = (
        [jnp.zeros((0, *x.shape), sites.wide_dtype(x)) for x in moving],
        jnp.ones(0, bool),
    )
    if len(unmasked):
        # Layer by layer is faster than `vmap` for convolutions.
        engine = (
            _vmap
            if static.f.engine == "vmap"
            else functools.partial(_bookkeeping, choose=lambda *_: "keep")
        )
        program, consts = _traced(loss, moving, batch)

        def formed(
            consts: list[Any], moving: list[Any], batch: Any
        ) -> tuple[list[jax.Array], jax.Array]:
            result = engine(program, consts, moving, batch)
            assert result.grads is not None
            return result.grads, result.finite

        grads, finite = forms.for_platform(formed, consts, moving, batch)
    grads = [sites.rows_kept(g, unmasked & finite) for g in grads]
    return PerExampleGrads(static.tree(grads), (unmasked & ~finite).sum(dtype=jnp.int32))


def _prepared(
    static: _Static, arrays: list[Any], batch: Any, mask: jax.Array, key: jax.Array | None
) -> tuple[Loss, list[Any], Any, jax.Array]:
    """Returns (loss of one example as a function of the trainable leaves, these leaves, batch with
    keys, [B] mask).
    """
    leaves = [s if a is None else a for s, a in zip(static.settings, arrays, strict=True)]
    moving = [x for x, t in zip(leaves, static.trainable, strict=True) if t]

    def loss(
        moving: Sequence[Any], example: Any, present: Any, key: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        params = static.tree(moving, leaves)
        if static.f.group:
            return _group_loss(static.f, params, example, present, key)
        return _loss(static.f, params, example, key)

    keys = None if key is None else _folded(key, len(mask))
    unmasked = mask.any(1) if mask.ndim == 2 else mask
    batch = (batch, mask if mask.ndim == 2 else None, keys)
    if shards.manual_axes():
        moving = _on_this_shard(
            loss, moving, batch, shards.varying_axes(*jax.tree.leaves((arrays, batch, mask)))
        )
    return loss, moving, batch, unmasked


def _folded(key: jax.Array, count: int) -> jax.Array:
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))


def _on_this_shard(loss: Loss, moving: list[Any], batch: Any, axes: frozenset[str]) -> list[Any]:
    """Types shared weights as values of this shard. Otherwise JAX sums their gradients over shards
    before clipping.
    """
    program, _ = _traced(loss, [shards.vary(x, axes) for x in moving], batch)
    axes |= shards.varying_axes(program.value)  # loss_fn may close over values of this shard
    return [shards.vary(x, axes) for x in moving]


_OWN_KEY = (
    "Let loss_fn take key=, pass key= in every call (stochastic=True in jaxdp.finetune), and "
)
# Errors of model libraries inside a loss, by the names of their classes.
_REMEDIES = {
    "TraceContextError": (  # Flax NNX
        "changes the state of an NNX module, such as the count of Dropout or the average of "
        "BatchNorm. Merge a copy: nnx.merge(graph, params, rest, copy=True). For Dropout: "
        f"{_OWN_KEY[0].lower()}{_OWN_KEY[1:]}call nnx.reseed(model, default=key)."
    ),
    "ModifyScopeVariableError": (  # Flax Linen
        "updates a collection of a Linen module, such as the averages of BatchNorm. Use GroupNorm "
        "or LayerNorm, or freeze the statistics (use_running_average=True)."
    ),
    # Flax Linen
    "InvalidRngError": f"needs random numbers. {_OWN_KEY}call model.apply(..., "
    f"rngs={{'dropout': key}}).",
    # Haiku
    "MissingRNGError": f"needs random numbers. {_OWN_KEY}call transformed.apply(params, key, ...).",
}


def _loss(
    f: ClippedGrad, params: Any, example: Any, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    keys = {} if key is None else {"key": key}
    _check_signature(f.loss_fn, params, example, **keys)
    try:
        out = f.loss_fn(params, example, **keys)
    except Exception as error:
        if remedy := _REMEDIES.get(type(error).__name__):
            raise ValueError(f"loss_fn {remedy}") from error
        raise
    pair = isinstance(out, tuple) and len(out) == 2
    value, aux = out if f.has_aux and pair else (out, None)
    shapes = jax.tree.map(jnp.shape, value)
    if f.has_aux > pair or shapes != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise ValueError(
            f"loss_fn must return a floating scalar{' and aux' if f.has_aux else ''} for ONE "
            f"example, got shapes {shapes}. It receives one element of the batch without its "
            "leading axis. Add the axis that a model expects with x[None], or pass has_aux=True "
            "if it returns more than the loss."
        )
    return value, aux


def _check_signature(loss_fn: Callable[..., Any], *args: Any, **keys: Any) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a builtin has no signature
        return
    try:
        signature.bind(*args, **keys)
    except TypeError as error:
        raise TypeError(
            f"loss_fn must take (params, example{', *, key' if keys else ''}), got the signature "
            f"{signature}: {error}. Pass an example of several parts as one pytree: "
            "loss_fn(params, (x, y)). Pass key= in every call if the loss takes a key."
        ) from None


def _group_loss(
    f: ClippedGrad, params: Any, group: Any, present: jax.Array | None, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    members = jnp.arange(len(jax.tree.leaves(group)[0]))
    keys = None if key is None else _folded(key, len(members))
    if present is not None:  # 0 * NaN is NaN: put a True member in place of padding
        shown = jnp.where(present, members, jnp.argmax(present))
        group = jax.tree.map(lambda x: x[shown], group)
    losses, aux = jax.vmap(functools.partial(_loss, f, params))(group, keys)
    if present is None:
        return losses.mean(), aux
    return jnp.where(present, losses, 0).sum() / jnp.maximum(present.sum(), 1).astype(
        losses.dtype
    ), aux


def _chunk_sum(
    f: ClippedGrad,
    program: _Program,
    consts: list[Any],
    moving: list[Any],
    clip_norm: Any,
    bound: Any,
    batch: Any,
    unmasked: jax.Array,
) -> Sums:
    """Returns the sums of one chunk."""
    if len(unmasked) == 0:
        empty = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), program.aux)
        sums = [jnp.zeros(x.shape, sites.wide_dtype(x)) for x in moving]
        norms, losses = jnp.zeros(0, sites.wide_dtype(*moving)), jnp.zeros(0, program.value.dtype)
        return sums, (norms, losses, empty, unmasked), jnp.zeros((), jnp.int32)
    if f.engine == "vmap":
        result = _vmap(program, consts, moving, batch)
    else:

        def choose(component: list[sites.Site], size: int, has_kernel: bool) -> str:
            # A kernel takes a tenth of the time in which XLA forms the gradients of a convolution.
            return "drop" if has_kernel else choose_method(component, size, f.engine == "auto")

        result = _bookkeeping(program, consts, moving, batch, choose)
    finite = result.finite
    norms = rounding.root(result.squared_norms)
    keep = unmasked & finite
    factors = jnp.where(keep, clip_factors(f.clip_rule, norms, clip_norm, bound), 0)
    rows = result.rows
    if forms.platform() != "tpu":  # where sums leave out rows of the factor 0
        # XLA would compute the factors again for each of their readers, if they did not pass the
        # loop too.
        needed = ~finite.all()
        read, factors = _without_rows((rows.read, factors), keep, needed)
        rows = rows._replace(read=read)
    sums = result.weighted_sum(rows, factors)
    losses = jnp.where(unmasked, result.losses, 0)
    hidden = (jnp.where(unmasked, norms, 0), losses, result.aux, keep)
    return sums, hidden, (unmasked & ~finite).sum(dtype=jnp.int32)


def _in_chunks(
    step: Callable[..., Sums], batch: Any, unmasked: jax.Array, chunk: int, axes: frozenset[str]
) -> Sums:
    """Applies `step` to one chunk of the batch after the other. Masked copies of example 0 pad the
    batch.

    Chunk k has the rows k, k + n, k + 2 n, ... of n chunks. So where devices have blocks of rows,
    all work on each.
    """
    size = len(unmasked)
    n_chunks = math.ceil(size / chunk)

    def padded(x: jax.Array) -> jax.Array:
        extra = n_chunks * chunk - size
        x = jnp.concatenate([x, jnp.broadcast_to(x[:1], (extra, *x.shape[1:]))]) if extra else x
        return x.reshape(chunk, n_chunks, *x.shape[1:])

    inside = (jnp.arange(n_chunks * chunk) < size).reshape(chunk, n_chunks)
    rows = jax.tree.map(padded, (batch, unmasked))

    def picked(number: Any) -> tuple[Any, jax.Array]:
        examples, present, valid = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number, 1, keepdims=False), (*rows, inside)
        )
        return examples, present & valid

    def body(total: Any, number: jax.Array) -> tuple[Any, Any]:
        sums, per_example, nonfinite = step(*picked(number))
        return jax.tree.map(jnp.add, total, (sums, nonfinite)), per_example

    shapes = jax.eval_shape(step, *picked(0))
    zero = jax.tree.map(
        lambda s: shards.vary(jnp.zeros(s.shape, s.dtype), axes), (shapes[0], shapes[2])
    )
    (sums, nonfinite), per_example = lax.scan(body, zero, jnp.arange(n_chunks))
    per_example = jax.tree.map(
        lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[:size], per_example
    )
    return sums, per_example, nonfinite


def _without_rows(rows: Any, keep: jax.Array, needed: jax.Array) -> Any:
    """Applies `sites.rows_kept` to a pytree, where that is `needed`: it costs a pass over all
    activations.
    """
    leaves, treedef = jax.tree.flatten(rows)
    # XLA copies an array that a loop carries twice, such as the input of several layers.
    each = {id(x): x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)}
    found = dict(zip(each, _kept_in_place(list(each.values()), keep, needed), strict=True))
    return jax.tree.unflatten(treedef, [found.get(id(x), x) for x in leaves])


@jax.custom_jvp
def _kept_in_place(xs: list[jax.Array], keep: jax.Array, needed: jax.Array) -> list[jax.Array]:
    """Applies `sites.rows_kept` in a loop of at most one turn. A conditional would have copies of
    all.
    """

    def turn(state: Any) -> Any:
        needed, xs = state
        return needed & False, [sites.rows_kept(x, keep) for x in xs]

    kept: list[jax.Array] = lax.while_loop(lambda state: state[0], turn, (needed, xs))[1]
    return kept


@_kept_in_place.defjvp
def _kept_in_place_jvp(primals: Any, tangents: Any) -> Any:
    # JAX cannot reverse such a loop. A row that is not kept has a factor of zero, so its tangent is
    # zero.
    return _kept_in_place(*primals), [sites.rows_kept(x, primals[1]) for x in tangents[0]]


# Platforms where a sum of kept gradients leaves out those of the factor 0.
_FUSED_SUMS = ("cuda", "tpu")


def _contract_read(rows: _Rows, factors: jax.Array) -> list[jax.Array]:
    return _contract_rows(rows.read, factors)


def _contract_rows(xs: list[jax.Array], factors: jax.Array) -> list[jax.Array]:
    """Computes sum_b factors_b x_b for every array [B, ...]."""

    # On CPU one contraction is many times faster than a product and a sum over the batch axis.
    def contract(x: jax.Array) -> jax.Array:
        # On accelerators this is part of the kernel that multiplies.
        x = sites.rows_kept(x, factors != 0) if forms.platform() in _FUSED_SUMS else x
        return lax.dot_general(
            factors.astype(x.dtype), x, (((0,), (0,)), ((), ())), precision=sites.PRECISION
        )

    return [contract(x) for x in xs]


def _total(terms: Sequence[jax.Array], kind: Any) -> jax.Array:
    return sum((x.astype(kind) for x in terms), jnp.zeros((), kind))


def _sum_of_squares(grads: Sequence[jax.Array]) -> jax.Array:
    """Computes the squared norms [B] of gradients [B, ...] in the widest of their dtypes."""
    return _total(
        [jnp.square(g).sum(tuple(range(1, g.ndim))) for g in grads], sites.wide_dtype(*grads)
    )


def _one_example(batch: Any) -> Any:
    def one(x: jax.Array) -> Any:
        if shards.varying_axes(x) and len(x):  # keeps the mesh axes in the type
            return jax.eval_shape(lambda x: x[0], x)
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    return jax.tree.map(one, batch)


def _traced(loss: Loss, moving: list[Any], batch: Any) -> tuple[_Program, list[Any]]:
    """Traces the loss of one example. Returns its program and the constants of it."""
    program, shapes = jax.make_jaxpr(loss, return_shape=True)(moving, *_one_example(batch))
    _refuse_batch_norm(program.jaxpr)
    if draws.has_fixed_draw(
        program.jaxpr, [i >= len(moving) for i in range(len(program.jaxpr.invars))]
    ):
        raise ValueError(
            "loss_fn draws random numbers with a key that depends neither on the example nor on "
            "key=. All examples and calls would share them, such as one dropout mask. "
            f"{_OWN_KEY}derive all randomness from it (NNX: nnx.reseed(model, default=key), with "
            "the names of its streams). Draw numbers that are meant to be fixed outside of "
            "loss_fn."
        )
    program = _batchable(program)
    return _Program(program.jaxpr, *shapes), list(program.consts)


def _batchable(program: jax.extend.core.ClosedJaxpr) -> jax.extend.core.ClosedJaxpr:
    """Returns a program of one example that can be applied to a batch without a view of other
    examples.

    Raises:
      ValueError: It combines values along a named axis, or hands a batch to a function that JAX
          does not batch.
    """
    if found := shards.collectives(program.jaxpr):
        names, axes = (sorted(set(parts)) for parts in zip(*found, strict=True))
        raise ValueError(
            f"loss_fn calls {names} on the axis {', '.join(map(repr, axes))} of an enclosing "
            "jax.vmap, jax.pmap or jax.shard_map, so its value for one example depends on other "
            "examples, or on its place among them, and clipping bounds nothing. Return the loss "
            "of ONE example, and call jax.lax.psum on the clipped sum. Use jax.jit with shardings "
            "for parameters that are split over devices."
        )
    for eqn in walker.every_equation(program.jaxpr):
        method = eqn.params.get("vmap_method")
        if isinstance(method, str) and not method.startswith("sequential"):
            raise ValueError(
                f"loss_fn calls {eqn.primitive.name} with vmap_method={method!r}, which hands the "
                "examples of a batch to one call outside of JAX. The value of one example may "
                "then depend on others, and clipping bounds nothing. Use "
                "vmap_method='sequential', one call for each example."
            )
    return jax.extend.core.ClosedJaxpr(walker.batchable(program.jaxpr), program.consts)


def _batched_gradient(function: Callable[..., Any], weights: Any, examples: list[Any]) -> Any:
    """Computes `jax.value_and_grad` of a function of (weights, example), with an auxiliary output,
    for each example.

    The program of one gradient is traced before it is batched. So the backward passes of custom
    rules are checked too.
    """
    gradient = jax.value_and_grad(function, has_aux=True)
    program, shapes = jax.make_jaxpr(gradient, return_shape=True)(weights, _one_example(examples))
    evaluate = jax.extend.core.jaxpr_as_fun(_batchable(program))

    def one(weights: Any, example: list[Any]) -> Any:
        results = evaluate(*jax.tree.leaves((weights, example)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return jax.vmap(one, in_axes=(None, 0))(weights, examples)


def _vmap(program: _Program, consts: list[Any], moving: list[Any], batch: Any) -> _PerExample:
    evaluate = program.evaluate(consts)

    def value(moving: list[Any], example: list[Any]) -> tuple[jax.Array, Any]:
        value, *aux = evaluate(*moving, *example)
        return value, program.with_aux(aux)

    (losses, aux), grads = _batched_gradient(value, moving, jax.tree.leaves(batch))
    grads = [sites.settled(g).astype(sites.wide_dtype(g)) for g in grads]
    return _PerExample(losses, aux, _sum_of_squares(grads), _Rows(grads), _contract_read, grads)


def _planned(program: _Program, consts: list[Any], moving: list[Any]) -> walker.Plan:
    """Returns where the weights of the loss of one example meet data."""
    weights = [
        walker.Value(False, frozenset({i}), tuple(range(jnp.ndim(x)))) for i, x in enumerate(moving)
    ]
    inputs = weights + [walker.Value(data=True)] * (len(program.jaxpr.invars) - len(moving))
    return walker.make_plan(program.jaxpr, consts, inputs, close=(0,))


# (sites of a component, entries of its leaves, whether a kernel forms it) -> "factors", "keep" or
# "drop".
Choice = Callable[[list[sites.Site], int, bool], str]


def _bookkeeping(
    program: _Program, consts: list[Any], moving: list[Any], batch: Any, choose: Choice
) -> _PerExample:
    """Computes losses, norms and weighted sums from one backward pass to the taps."""
    plan = _planned(program, consts, moving)
    examples = jax.tree.leaves(batch)

    def tapped(taps: list[jax.Array], example: list[Any]) -> tuple[jax.Array, Any]:
        (value, *aux), records = plan.forward([*moving, *example], taps)
        return value, (aux, records)

    axes = shards.varying_axes(*moving)
    taps = [shards.vary(site.zero_tap(), axes) for site in plan.sites]
    (losses, (aux, records)), by_tap = _batched_gradient(tapped, taps, examples)
    cotangents = [
        g.reshape(len(g), *site.tap.shape) for site, g in zip(plan.sites, by_tap, strict=True)
    ]
    wide = [x.astype(sites.wide_dtype(x)) for x in moving]
    weights = plan.weights_program(wide)
    met = list(zip(plan.sites, records, cotangents, strict=True))
    components = [
        _Component([met[j] for j in indices], walker.restricted(weights, indices), wide, choose)
        for indices in _connected(plan.sites)
    ]
    # Many small contractions take long to compile, and one of all their columns takes as long as
    # the largest.
    small = [c.kept for c in components if c.kept is not None and c.size <= _SMALL]
    large = [c for c in components if c.kept is None or c.size > _SMALL]
    kind = sites.wide_dtype(*moving)
    columns = {
        i: g.reshape(len(losses), -1).astype(kind) for kept in small for i, g in kept.items()
    }
    packed = jnp.concatenate([jnp.zeros((len(losses), 0), kind), *columns.values()], 1)
    squared = _total([_sum_of_squares([packed]), *(c.squared_norms for c in large)], kind)

    def by_leaf(values: dict[int, jax.Array], lead: tuple[int, ...] = ()) -> list[jax.Array]:
        # The gradient of a leaf that meets no data is zero.
        return [
            values[i] if i in values else jnp.zeros((*lead, *x.shape), x.dtype)
            for i, x in enumerate(wide)
        ]

    def weighted_sum(rows: _Rows, factors: jax.Array) -> list[jax.Array]:
        packed, read = rows.read
        (total,) = _contract_rows([packed], factors)
        cuts = itertools.accumulate(g.shape[1] for g in columns.values())
        parts = zip(columns, jnp.split(total, list(cuts)), strict=False)
        values = {i: part.reshape(wide[i].shape).astype(wide[i].dtype) for i, part in parts}
        for c, its_read, left_out in zip(large, read, rows.left_out, strict=True):
            values |= c.weighted_sum(_Rows(its_read, left_out), factors)
        return by_leaf(values)

    kept = [c.kept for c in components if c.kept is not None]
    every = {i: g for grads in kept for i, g in grads.items()}
    grads = by_leaf(every, (len(losses),)) if len(kept) == len(components) else None
    return _PerExample(
        losses,
        program.with_aux(aux),
        squared,
        _Rows((packed, [c.rows.read for c in large]), [c.rows.left_out for c in large]),
        weighted_sum,
        grads,
    )


def _connected(all_sites: Sequence[sites.Site]) -> list[list[int]]:
    """Groups the indices of sites so that no leaf belongs to two groups. Sites without entries are
    left out.
    """
    met = [(index, site) for index, site in enumerate(all_sites) if not site.empty]
    group: dict[int, int] = {}
    for _, site in met:
        joined = {group.get(leaf, leaf) for leaf in site.leaves}
        for leaf in [leaf for leaf, g in group.items() if g in joined] + list(site.leaves):
            group[leaf] = min(joined)
    members = collections.defaultdict(list)
    for index, site in met:
        members[group[min(site.leaves)]].append(index)
    return list(members.values())


# Kept gradients of at most this many entries are contracted together.
_SMALL = 4096


class _Component:
    """A set of leaves and sites that share a gradient.

    Attributes:
      size: The number of entries of the leaves.
      squared_norms: [B]. The squared norms of the per-example gradients of the leaves.
      kept: The gradients [B, ...] by leaf, or None if they are not kept.
    """

    def __init__(
        self,
        columns: list[tuple[sites.Site, Any, Any]],
        program: Any,
        leaves: list[Any],
        choose: Choice,
    ):
        own = [site for site, _, _ in columns]
        self._members = sorted(frozenset[int]().union(*(site.leaves for site in own)))
        self.kept: dict[int, jax.Array] | None = None
        self.size = sum(leaves[i].size for i in self._members)
        self._pull = pull = _pull_back(program, leaves, self._members)
        alone = len(columns) == 1
        has_kernel = alone and own[0].kernels("drop", *columns[0][1:])[0] == "convolution"
        method = _applied(choose(own, self.size, has_kernel), program)
        # Site, record and cotangent.
        self._columns = [(site, *site.settled(method, r, g, alone=alone)) for site, r, g in columns]
        if method != "keep":
            self._columns = [_ordered(*column) for column in self._columns]
        if method == "factors":
            self.squared_norms = sites.squared_norms(self._oriented_factors(), own[0].rule.lanes)
            return
        if method == "drop":
            self.squared_norms = self._formed_twice(pull)
            return
        dvs = [site.per_example(r, g) for site, r, g in self._columns]
        grads = jax.vmap(pull)(dvs)
        self.squared_norms = _sum_of_squares(grads)
        self.kept = dict(zip(self._members, grads, strict=True))

    def _formed_twice(self, pull: Callable[[list[jax.Array]], list[jax.Array]]) -> jax.Array:
        """Returns squared norms of gradients that are formed for them, and again for the sum."""
        if len(self._columns) == 1:  # `pull` only moves entries
            ((site, record, g),) = self._columns
            squares, spread, apart = site.norm_of_formed(record, g)
        else:
            dvs = [site.per_example(r, g) for site, r, g in self._columns]
            squares = _sum_of_squares(jax.vmap(pull)(dvs))
            spread = jnp.zeros_like(squares)
            apart = _total(
                [site.without_cancellation(r, g) for site, r, g in self._columns], squares.dtype
            )
        terms = (
            max(site.terms for site, _, _ in self._columns)
            + len(self._columns)
            + sites.lost_in_parts()
        )
        return rounding.covered(squares, spread, 2 * rounding.of_sum(terms, squares.dtype) * apart)

    def _oriented_factors(self) -> list[Any]:
        """Returns the factors of all sites, swapped where a site applies the transposed weight."""
        pairs = [site.factors(record, g) for site, record, g in self._columns]
        if len(pairs) == 1:
            return pairs
        axes = [_axes(site) for site, _, _ in self._columns]
        return [
            (parts, w) if own == axes[0] else ((w,), parts[0])
            for own, (parts, w) in zip(axes, pairs, strict=True)
        ]

    @property
    def rows(self) -> _Rows:
        """The arrays that the weighted sum reads: kept gradients, or records and cotangents."""
        if self.kept is not None:
            grads = list(self.kept.values())
            return _Rows(None, grads) if forms.platform() in _FUSED_SUMS else _Rows(grads)
        read = []
        left_out = []
        for site, record, g in self._columns:
            without_record, without_cotangent = site.leaves_out
            read.append((None if without_record else record, None if without_cotangent else g))
            left_out.append((record if without_record else None, g if without_cotangent else None))
        return _Rows(read, left_out)

    def weighted_sum(self, rows: _Rows, factors: jax.Array) -> dict[int, jax.Array]:
        if self.kept is not None:
            grads = rows.left_out if rows.read is None else rows.read
            return dict(zip(self._members, _contract_rows(grads, factors), strict=True))
        dvs = []
        for (site, _, _), read, left_out in zip(
            self._columns, rows.read, rows.left_out, strict=True
        ):
            record, g = (b if a is None else a for a, b in zip(read, left_out, strict=True))
            dvs.append(site.contract(record, g, factors))
        return dict(zip(self._members, self._pull(dvs), strict=True))


def _pull_back(
    program: Any, leaves: list[Any], members: list[int]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns J^T, the map from the gradients of the V_j of `program` to the gradients of the
    leaves `members`.
    """

    def weights(values: list[Any]) -> list[jax.Array]:
        given = dict(zip(members, values, strict=True))
        found: list[jax.Array] = jax.extend.core.jaxpr_as_fun(program)(
            *(given.get(i, x) for i, x in enumerate(leaves))
        )
        return found

    values, pull = jax.vjp(weights, [leaves[i] for i in members])

    def pulled(dvs: list[jax.Array]) -> list[jax.Array]:
        grads: list[jax.Array] = pull(
            [dv.astype(v.dtype) for dv, v in zip(dvs, values, strict=True)]
        )[0]
        return grads

    return pulled


# Primitives whose transpose moves entries and lengthens no gradient, if they keep all entries or a
# part of them.
_SHORT = frozenset({"slice", "split", "dynamic_slice", "convert_element_type", *walker.MOVES})


def _only_moves(program: Any) -> bool:
    """Returns whether J^T only moves entries, in float32 or wider. Then it lengthens no rounding
    error.

    Otherwise a gradient is not formed twice. J^T might multiply the difference of the two by any
    number, and no single example bounds the rounding of a sum to bfloat16.
    """
    eqns = list(walker.every_equation(program.jaxpr))
    if any(eqn.primitive.name not in _SHORT for eqn in eqns):
        return False
    if any(eqn.outvars[0].aval.size > eqn.invars[0].aval.size for eqn in eqns):  # a broadcast
        return False
    variables = [*program.jaxpr.outvars, *(v for eqn in eqns for v in eqn.outvars)]
    kinds = [v.aval.dtype for v in variables]
    return not any(jnp.issubdtype(kind, jnp.floating) and kind.itemsize < 4 for kind in kinds)


def _applied(method: str, program: Any) -> str:
    """Returns the method for a component of the weight-only program. What cannot be formed twice is
    kept.
    """
    return "keep" if method == "drop" and not _only_moves(program) else method


def _ordered(site: sites.Site, record: Any, g: jax.Array) -> tuple[sites.Site, Any, jax.Array]:
    """Adds up the equal rows of a lookup, so that the sum has one term of an example in each row of
    the table.
    """
    return (
        sites.summed_rows(site, record, g)
        if isinstance(site.rule, sites.Lookup)
        else (site, record, g)
    )


def _axes(site: sites.Site) -> tuple[Any, Any]:
    """Returns the axes of the leaf that u and w of a site cover."""
    source = site.source or ()
    return tuple(source[d] for d in site.rule.row_dims), tuple(
        source[d] for d in site.rule.col_dims
    )


def can_factor(component: list[sites.Site]) -> bool:
    """Returns whether dV has the norm of the leaf's gradient and its factors are available."""
    if any(
        s.source is None or isinstance(s.rule, sites.OnWeight) or len(s.leaves) != 1
        for s in component
    ):
        return False
    if len(component) == 1:
        return True
    if not all(
        s.source and s.rule.row_dims and s.rule.groups == 1 and not s.lengths for s in component
    ):
        return False
    first = _axes(component[0])
    return all(_axes(s) in (first, first[::-1]) for s in component)


# Where factors are possible, gradients of more bytes per example are kept only if the factors take
# about as many. One of an embedding of 50,000 tokens takes 150 MB.
_ROOM = 2.0**24
# The number of floating-point operations that take as long as moving one byte. Only orders of
# magnitude matter.
_BALANCE = {"cpu": 4.0, "cuda": 20.0, "rocm": 20.0, "tpu": 50.0}


def method_costs(
    component: list[sites.Site], leaf_size: int, keep: bool
) -> tuple[dict[str, float], float]:
    """Returns (cost of each possible method, cost of the ordinary gradient), in bytes that take the
    same time.

    The methods are "factors", "keep" (per-example gradients) and "drop" (form them twice).
    """
    balance = _BALANCE[forms.platform()]
    activations = factors = contract = form = gram = 0.0
    formed = math.inf  # by a kernel that writes no gradients
    lookups = sum(isinstance(site.rule, sites.Lookup) for site in component)
    lookups_only = lookups == len(component)
    for site in component:
        rule = site.rule
        t, s = rule.positions * site.repeats, rule.groups * site.slices
        activations += 4.0 * math.prod(site.tap.shape)
        if isinstance(rule, sites.OnWeight):  # the cotangent is dV and is only scaled and summed
            contract += 8.0 * s * t * rule.cols
            continue
        lookup = isinstance(rule, sites.Lookup)
        work = 2.0 * s * t * rule.cols * (1 if lookup else rule.rows) / balance
        factors += 4.0 * s * t * (rule.cols + (1 if lookup else rule.rows))
        kernels: dict[str, float] = {}
        if rule.is_dense and forms.platform() == "tpu":
            kernels = dense.costs(t, rule.rows, rule.cols)
        contract += s * kernels["weighted"] if "weighted" in kernels else work
        form += work + 8.0 * s * rule.rows * rule.cols
        if len(component) == 1 and "formed" in kernels:
            formed = s * kernels["formed"]
        if len(component) == 1 and "gram" in kernels:
            gram = s * kernels["gram"]
        elif lookup and lookups_only:
            gram += 2 * work + 8.0 * s * t * rule.cols
        elif t == 1:
            gram += 4.0 * s * (rule.rows + rule.cols)
        else:
            share = (1 + sites.gram_rows(t) / t) / 2  # of the blocks that are computed
            gram += (
                share
                * s
                * t
                * t
                * (2.0 * (rule.cols + (0 if lookup else rule.rows)) / balance + 8.0)
            )
    reuse = 4.0 * leaf_size * (1 + 2 / balance)
    if not lookups_only:
        gram *= max(
            1, len(component) - lookups
        )  # a product with rows of an identity matrix costs next to nothing
    options = {"drop": min(form, formed) + contract}
    factorable, room = can_factor(component), activations
    if keep:
        room = max(_ROOM, 1.25 * factors) if factorable else math.inf
    if 4.0 * leaf_size <= room:
        options["keep"] = form + reuse
    if factorable:
        options["factors"] = gram + contract
    return options, contract


def choose_method(component: list[sites.Site], leaf_size: int, keep: bool) -> str:
    """Selects the cheapest method for a component."""
    options, _ = method_costs(component, leaf_size, keep)
    return min(options, key=lambda name: options[name])


_RULE_NAMES = {
    sites.Dot: "dot_general",
    sites.Conv: "convolution",
    sites.Lookup: "embedding",
    sites.OnWeight: "direct",
}


def _leaf_treatments(
    f: ClippedGrad, loss: Loss, moving: list[Any], batch: Any
) -> list[tuple[tuple[str, ...], str, float, int]]:
    """Returns (rules, method, work, bytes) of every trainable leaf, as in `LeafPlan`."""
    sizes = [math.prod(jnp.shape(x)) for x in moving]
    if f.engine == "vmap":
        program = _traced(loss, moving, batch)[0].jaxpr
        read = {id(v) for eqn in program.eqns for v in eqn.invars} | {
            id(v) for v in program.outvars
        }
        used = (id(v) in read for v in program.invars)
        return [
            ((), "vmap", math.nan, 4 * n) if u else ((), "no gradient", 0.0, 0)
            for n, u in zip(sizes, used, strict=False)
        ]
    plan = _planned(*_traced(loss, moving, batch), moving)
    weights = plan.weights_program(
        [jax.ShapeDtypeStruct(jnp.shape(x), sites.wide_dtype(x)) for x in moving]
    )
    treated: list[tuple[tuple[str, ...], str, float, int]] = [((), "no gradient", 0.0, 0)] * len(
        moving
    )
    for indices in _connected(plan.sites):
        component = [plan.sites[j] for j in indices]
        members = sorted(frozenset[int]().union(*(site.leaves for site in component)))
        leaf_size, keep = sum(sizes[i] for i in members), f.engine == "auto"
        method = _applied(
            choose_method(component, leaf_size, keep), walker.restricted(weights, indices)
        )
        options, ordinary = method_costs(component, leaf_size, keep)
        rules = tuple(sorted({_RULE_NAMES[type(site.rule)] for site in component}))
        positions = [site.rule.positions * site.repeats for site in component]
        groups = [site.rule.groups * site.slices for site in component]
        gram = sum(
            8 * s * sites.gram_rows(t) ** 2 for s, t in zip(groups, positions, strict=True) if t > 1
        )
        if all(isinstance(site.rule, sites.Lookup) for site in component):
            gram = sum(4 * math.prod(site.tap.shape) for site in component)
        for i in members:
            extra = gram // len(members) if method == "factors" else 4 * sizes[i]
            treated[i] = (
                rules,
                method,
                max(1.0, options.get(method, options["drop"]) / max(ordinary, 1.0)),
                extra,
            )
    return treated


def _refuse_batch_norm(jaxpr: Any) -> None:
    """Raises ValueError if a jaxpr computes BatchNorm statistics (Flax Linen, NNX or Haiku)."""
    for eqn in walker.every_equation(jaxpr):
        traceback = eqn.source_info.traceback
        names = [frame.function_name for frame in traceback.frames] if traceback else []
        if any(
            a in ("_compute_stats", "mean") and b == "BatchNorm.__call__"
            for a, b in itertools.pairwise(names)
        ):
            raise ValueError(
                "loss_fn uses BatchNorm in batch mode. Its output for one example depends on the "
                "whole batch, so a per-example gradient does not exist and clipping bounds "
                "nothing. Use GroupNorm or LayerNorm, or freeze the statistics (Flax: "
                "use_running_average=True, Haiku: is_training=False)."
            )
