"""The choice of the parameters that adapt. The default is scale and bias of the normalisation layers."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.transforms.clipping import paths_of

Adapted = Callable[[str, Any], bool]

_NORMALISATION = re.compile(r"norm|^ln(_|\d|$)", re.IGNORECASE)
_BLOCK = re.compile(r"(?:^|[/.])(?:block|layer|encoderblock)s?[/._](\d+)(?=[/.]|$)", re.IGNORECASE)


def normalisation(path: str, leaf: Any) -> bool:
    """Returns whether a path such as "block_0/norm_1/scale" is the scale or bias of a normalisation layer."""
    *modules, name = re.split("[/.]", path)
    affine = name.lower() in ("scale", "bias", "weight", "gamma", "beta")
    return affine and bool(modules) and bool(_NORMALISATION.search(modules[-1]))


def lower_blocks(params: Any) -> Adapted:
    """Returns the rule of SAR and DeYO: normalisation layers in the lower three quarters of the blocks.

    The public code skips blocks 9 to 11 and the final LayerNorm of a 12-block ViT by name. A network without one flat
    list of blocks ("block_0", "blocks/0", "layer.0", ...), such as a ConvNeXt with stages, keeps all its layers.
    """
    blocks = [found for path, _ in paths_of(params) if (found := _BLOCK.search(path))]
    flat = len({found.string[: found.start()] for found in blocks}) == 1
    depth = 1 + max(int(found[1]) for found in blocks) if flat else 0
    excluded = (depth + 2) // 4  # a quarter, rounded half up

    def adapted(path: str, leaf: Any) -> bool:
        block = _BLOCK.search(path)
        lower = not flat or (block is not None and int(block[1]) < depth - excluded)
        return lower and normalisation(path, leaf)

    return adapted


def selected(params: Any, adapted: Adapted | None) -> frozenset[str]:
    """Returns the paths of the parameters that adapt. Raises ValueError if there are none."""
    rule, leaves = adapted or normalisation, paths_of(params)
    floating = [(path, leaf) for path, leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
    if paths := frozenset(path for path, leaf in floating if rule(path, leaf)):
        return paths
    raise ValueError(
        "adapted selects no parameter. The default selects normalisation layers, this model has paths such "
        f"as {[path for path, _ in leaves][:3]}. Pass adapted=lambda path, leaf: ... for other layers."
    )


def trainable_part(params: Any, paths: frozenset[str]) -> Any:
    """Returns `params` with None in place of parameters that do not adapt."""
    leaves, structure = jax.tree.flatten(params)
    kept = [leaf if path in paths else None for (path, _), leaf in zip(paths_of(params), leaves, strict=True)]
    return jax.tree.unflatten(structure, kept)


def merge(moving: Any, params: Any) -> Any:
    """Returns `params` with the leaves of `moving` wherever `moving` is not None."""
    return jax.tree.map(lambda new, old: old if new is None else new, moving, params, is_leaf=lambda x: x is None)
