"""Programs of a loss that clipping refuses, because one example could see others."""

import itertools

import jax.extend.core as jex

from jaxdp.transforms import jaxprs, shards
from jaxdp.transforms.shared_draws import has_shared_draw

# The start of the remedies for random numbers.
OWN_KEY = "Let loss_fn take key=, pass key= in every call (stochastic=True in jaxdp.finetune), and "


def refuse_batch_norm(jaxpr: jex.Jaxpr) -> None:
    """Raises ValueError if a jaxpr computes BatchNorm statistics (Flax Linen, NNX or Haiku)."""
    for eqn in jaxprs.every_equation(jaxpr):
        traceback = eqn.source_info.traceback
        callers = [frame.function_name for frame in traceback.frames] if traceback else []
        # The program of one example shows a mean over its own entries only, so BatchNorm is known
        # by the functions that traced it.
        for function, caller in itertools.pairwise(callers):
            # Flax calls `_compute_stats`, and Haiku `mean`.
            if function in ("_compute_stats", "mean") and caller == "BatchNorm.__call__":
                raise ValueError(
                    "loss_fn uses BatchNorm in batch mode. Its output for one example depends on "
                    "the whole batch, so a per-example gradient does not exist and clipping "
                    "bounds nothing. Use GroupNorm or LayerNorm, or freeze the statistics (Flax: "
                    "use_running_average=True, Haiku: is_training=False)."
                )


def refuse_shared_draws(jaxpr: jex.Jaxpr, n_leaves: int) -> None:
    """Raises ValueError if a loss draws numbers that all examples and calls would share.

    Args:
      jaxpr: The program of the loss of one example.
      n_leaves: The number of trainable leaves, its first inputs. The others are the example's.
    """
    is_of_example = [number >= n_leaves for number in range(len(jaxpr.invars))]
    if has_shared_draw(jaxpr, is_of_example):
        raise ValueError(
            "loss_fn draws random numbers with a key that depends neither on the example nor on "
            "key=. All examples and calls would share them, such as one dropout mask. "
            f"{OWN_KEY}derive all randomness from it (NNX: nnx.reseed(model, default=key), with "
            "the names of its streams). Draw numbers that are meant to be fixed outside of "
            "loss_fn."
        )


def refuse_collectives(jaxpr: jex.Jaxpr) -> None:
    """Raises ValueError if a program combines values along a named axis of an enclosing map."""
    collectives = shards.collectives(jaxpr)
    if not collectives:
        return
    names = sorted({name for name, _ in collectives})
    axes = sorted({axis for _, axis in collectives})
    raise ValueError(
        f"loss_fn calls {names} on the axis {', '.join(map(repr, axes))} of an enclosing "
        "jax.vmap, jax.pmap or jax.shard_map, so its value for one example depends on other "
        "examples, or on its place among them, and clipping bounds nothing. Return the loss "
        "of ONE example, and call jax.lax.psum on the clipped sum. Use jax.jit with shardings "
        "for parameters that are split over devices."
    )


def refuse_calls_of_a_batch(jaxpr: jex.Jaxpr) -> None:
    """Raises ValueError if a program hands a batch to a function that JAX does not batch."""
    for eqn in jaxprs.every_equation(jaxpr):
        method = eqn.params.get("vmap_method")  # of a callback or of a foreign function
        # "sequential" and "sequential_unrolled" call the function once for each example.
        if isinstance(method, str) and not method.startswith("sequential"):
            raise ValueError(
                f"loss_fn calls {eqn.primitive.name} with vmap_method={method!r}, which hands the "
                "examples of a batch to one call outside of JAX. The value of one example may "
                "then depend on others, and clipping bounds nothing. Use "
                "vmap_method='sequential', one call for each example."
            )
