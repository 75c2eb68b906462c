"""The loss of one example, or of one group, as a function of the trainable leaves of params.

The functions here call the user's `loss_fn`, and turn what goes wrong there into errors with a
remedy.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.transforms import shards
from jaxdp.transforms.clip_arguments import ParamsTree
from jaxdp.transforms.loss_checks import OWN_KEY
from jaxdp.transforms.loss_programs import Loss, trace_loss


class LossFunction(NamedTuple):
    """The user's loss, and how `clipped_grad` was told to call it."""

    function: Callable[..., Any]
    has_aux: bool
    group: bool


class BatchedLoss(NamedTuple):
    """The loss of one example, and the values that it is applied to.

    Attributes:
      loss: (trainable leaves, example, mask of the group's members, key) -> (value, aux).
      leaves: The trainable leaves.
      batch: (examples, masks of members or None, keys or None), each with a leading axis B.
      unmasked: [B] bool. Whether each example counts.
    """

    loss: Loss
    leaves: list[Any]
    batch: Any
    unmasked: jax.Array


def batched_loss(
    loss_fn: LossFunction,
    tree: ParamsTree,
    arrays: Sequence[Any],
    batch: Any,
    mask: jax.Array,
    key: jax.Array | None,
) -> BatchedLoss:
    """Returns the loss of one example with the leaves, the batch and the mask of a call."""
    all_leaves = tree.all_leaves(arrays)
    leaves = tree.trained(all_leaves)

    def loss(
        leaves: Sequence[Any],
        example: Any,
        present: Any,
        key: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        params = tree.tree(leaves, all_leaves)
        if loss_fn.group:
            return _group_loss(loss_fn, params, example, present, key)
        return one_loss(loss_fn, params, example, key)

    keys = None if key is None else _folded(key, len(mask))
    has_member_mask = mask.ndim == 2
    # A group without a member counts as padding.
    unmasked = mask.any(1) if has_member_mask else mask
    batch = (batch, mask if has_member_mask else None, keys)
    if shards.manual_axes():
        axes = shards.varying_axes(*jax.tree.leaves((arrays, batch, mask)))
        leaves = _on_this_shard(loss, leaves, batch, axes)
    return BatchedLoss(loss, leaves, batch, unmasked)


def _folded(key: jax.Array, count: int) -> jax.Array:
    """Returns a key for each of `count` examples."""
    fold_in = functools.partial(jax.random.fold_in, key)
    return jax.vmap(fold_in)(jnp.arange(count))


def _on_this_shard(
    loss: Loss,
    leaves: list[Any],
    batch: Any,
    axes: frozenset[str],
) -> list[Any]:
    """Types shared leaves as values of this shard.

    Otherwise JAX sums their gradients over the shards, before they are clipped.
    """
    varied = [shards.vary(x, axes) for x in leaves]
    # Traced once for the axes over which the loss varies.
    program, _ = trace_loss(loss, varied, batch)
    axes |= shards.varying_axes(program.value)  # loss_fn may close over values of this shard
    return [shards.vary(x, axes) for x in leaves]


def _group_loss(
    loss_fn: LossFunction,
    params: Any,
    group: Any,
    present: jax.Array | None,
    key: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Returns the mean loss of the members of a group that are present, and the aux of all."""
    members = jnp.arange(len(jax.tree.leaves(group)[0]))
    keys = None if key is None else _folded(key, len(members))
    if present is not None:  # 0 * NaN is NaN: put a True member in place of padding
        shown = jnp.where(present, members, jnp.argmax(present))
        group = jax.tree.map(lambda x: x[shown], group)
    member_loss = functools.partial(one_loss, loss_fn, params)
    losses, aux = jax.vmap(member_loss)(group, keys)
    if present is None:
        return losses.mean(), aux
    total = jnp.where(present, losses, 0).sum()
    # A group without a member is masked. Its loss is 0, and not 0 / 0.
    count = jnp.maximum(present.sum(), 1).astype(losses.dtype)
    return total / count, aux


# Errors that model libraries raise inside of a loss, by the names of their classes. The libraries
# need not be installed.
_REMEDIES = {
    "TraceContextError": (  # Flax NNX
        "changes the state of an NNX module, such as the count of Dropout or the average of "
        "BatchNorm. Merge a copy: nnx.merge(graph, params, rest, copy=True). For Dropout: "
        f"{OWN_KEY[0].lower()}{OWN_KEY[1:]}call nnx.reseed(model, default=key)."
    ),
    "ModifyScopeVariableError": (  # Flax Linen
        "updates a collection of a Linen module, such as the averages of BatchNorm. Use GroupNorm "
        "or LayerNorm, or freeze the statistics (use_running_average=True)."
    ),
    "InvalidRngError": (  # Flax Linen
        f"needs random numbers. {OWN_KEY}call model.apply(..., rngs={{'dropout': key}})."
    ),
    "MissingRNGError": (  # Haiku
        f"needs random numbers. {OWN_KEY}call transformed.apply(params, key, ...)."
    ),
}


def one_loss(
    loss_fn: LossFunction,
    params: Any,
    example: Any,
    key: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Returns (loss, aux) of one example, with None in place of an aux that `loss_fn` lacks.

    Raises:
      TypeError: `loss_fn` takes other arguments.
      ValueError: It returns no scalar, or draws or changes what a model library does not allow.
    """
    # A loss without randomness has no parameter `key`.
    keys = {} if key is None else {"key": key}
    _check_signature(loss_fn.function, params, example, **keys)
    try:
        result = loss_fn.function(params, example, **keys)
    # The classes are known by name only, so any exception is looked up.
    except Exception as error:
        remedy = _REMEDIES.get(type(error).__name__)
        if remedy is None:
            if isinstance(error, KeyError) and isinstance(example, Mapping):
                names = ", ".join(map(repr, example))
                error.add_note(f"The example has {names}. Text is in no example: give its numbers.")
            raise
        raise ValueError(f"loss_fn {remedy}") from error
    is_pair = isinstance(result, tuple) and len(result) == 2
    if loss_fn.has_aux and is_pair:
        value, aux = result
    else:
        value, aux = result, None
    shapes = jax.tree.map(jnp.shape, value)
    lacks_aux = loss_fn.has_aux and not is_pair
    # Only an array has a dtype, so shapes are compared first.
    if lacks_aux or shapes != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise ValueError(
            f"loss_fn must return a floating scalar{' and aux' if loss_fn.has_aux else ''} for ONE "
            f"example, got shapes {shapes}. It receives one element of the batch without its "
            "leading axis. Add the axis that a model expects with x[None], or pass has_aux=True "
            "if it returns more than the loss."
        )
    return value, aux


def _check_signature(
    function: Callable[..., Any],
    *args: Any,
    **keys: Any,
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin has no signature
        return
    try:
        signature.bind(*args, **keys)
    except TypeError as error:
        raise TypeError(
            f"loss_fn must take (params, example{', *, key' if keys else ''}), got the signature "
            f"{signature}: {error}. Pass an example of several parts as one pytree: "
            "loss_fn(params, (x, y)). Pass key= in every call if the loss takes a key "
            "(stochastic=True in jaxdp.finetune)."
        ) from None
