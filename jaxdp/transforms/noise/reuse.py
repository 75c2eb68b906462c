"""Refuses equal noise on different values, whose difference would have none.

One key and number give one noise. They meet several values along an axis of `jax.vmap`, and on the
devices of a `jax.shard_map` or `jax.pmap`.
"""

from typing import Any

import jax

from jaxdp.transforms import shards


def check_shards(
    key: jax.Array,
    leaf: Any,
    *,
    shared: bool = False,
) -> None:
    """Raises ValueError where devices add equal noise to values that differ.

    With `shared`, also where devices add different noise to one shared sum.
    """
    # A shape or a number of the host is the same on all devices.
    if not isinstance(leaf, jax.Array):
        return
    if untracked := tuple(sorted(shards.untracked_axes())):
        raise ValueError(
            f"JAX does not record which values differ between devices along the axes {untracked} "
            "of a jax.pmap, or of a jax.shard_map with check_vma=False. So equal noise on "
            "different values would be no error. Sum with jax.lax.psum there, and add noise to the "
            "total outside, or use jax.shard_map with check_vma=True."
        )
    value_axes = shards.varying_axes(leaf)
    key_axes = shards.varying_axes(key)
    if value_axes - key_axes:
        axes = tuple(sorted(value_axes - key_axes))
        raise ValueError(
            f"A leaf differs between devices along the mesh axes {axes} and key does not, so all "
            f"get the same noise. Sum first with jax.lax.psum(tree, {axes}) and add noise to the "
            "total. For independent noise on each device use "
            f"key=jax.random.fold_in(key, jax.lax.axis_index({axes}))."
        )
    if shared and key_axes - value_axes:
        axes = tuple(sorted(key_axes - value_axes))
        raise ValueError(
            f"key differs between devices along the mesh axes {axes} and the sum does not. Each "
            "device would add different noise to the same sum, and their mean would have less "
            "noise. Use one key for all devices."
        )


def check_vmap(
    key: jax.Array,
    number: jax.Array,
    values: list[Any],
) -> jax.Array:
    """Returns the key, to be used for the noise of the values.

    A later `jax.vmap` raises ValueError if it maps a value and neither the key nor the number.
    """
    # What is not traced now cannot be mapped later.
    # `custom_vmap` has no derivative.
    traced = [
        jax.lax.stop_gradient(value) for value in values if isinstance(value, jax.core.Tracer)
    ]
    return _key_of(key, number, traced) if traced else key


# JAX calls the rule below when it maps this function, and so tells what an axis differs in.
@jax.custom_batching.custom_vmap
def _key_of(
    key: jax.Array,
    number: jax.Array,
    values: list[jax.Array],
) -> jax.Array:
    return key


@_key_of.def_vmap
def _key_of_mapped(
    size: int,
    mapped: Any,
    key: jax.Array,
    number: jax.Array,
    values: list[jax.Array],
) -> tuple[jax.Array, bool]:
    key_mapped, number_mapped, values_mapped = mapped
    if any(values_mapped) and not (key_mapped or number_mapped):
        raise ValueError(
            f"key and number are the same for {size} values along an axis of jax.vmap, so all get "
            "the same noise, and the difference of two results has none. Map over keys too, such "
            "as jax.random.split(key, size), or over numbers. To release a sum over the axis, sum "
            "before the noise."
        )
    # Once more, so that an outer `jax.vmap` is checked too.
    return _key_of(key, number, values), key_mapped
