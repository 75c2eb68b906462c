"""The choice of the parameters that adapt: by default those of normalisation layers.

They are found in the program of the model (`jaxdp.transforms.normalisation`). Names decide only
where the program hides what a layer does, and a warning lists what they chose.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxdp.transforms.clipping import paths_of
from jaxdp.transforms.normalisation import normalisation_leaves

Adapted = Callable[[str, Any], bool]

_AFFINE = ("scale", "offset", "bias", "weight", "gamma", "beta")
# The words of names such as "BatchNorm2d", "layernorm_before" and "ln_1".
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# A word that ends in "norm", but none such as "denorm" or "weightnorm". Or an abbreviation.
_NORMALISATION = re.compile(
    r"(?!(?:de|un|weight|spectral)?norm$)[a-z]*norms?|norm|normali[sz]ation|ln|bn|gn|rms"
)
_OF_WEIGHTS = {"weight", "spectral"}  # what weight and spectral normalisation normalise
_BLOCK = re.compile(r"(?:^|[/.])(?:block|layer|encoderblock)s?[/._](\d+)(?=[/.]|$)", re.IGNORECASE)

_UNTIL = "suggested by its name, until the first batch or `prepare` looks at the program"
_HIDDEN = "by its name, because an operation hides what is computed"
_UNSEEN = "by its name, because the program shows no normalisation"


class AdaptedLeaf(NamedTuple):
    """A parameter that adapts, and how it was found."""

    path: str
    shape: tuple[int, ...]
    reason: str


def normalisation(path: str, leaf: Any) -> bool:
    """Returns whether a path is named like the scale or offset of a normalisation layer.

    "block_0/norm_1/scale" is one. As `adapted` of an `Adapter` or of `fisher` it is the default,
    which does not go by names.
    """
    *modules, name = re.split("[/.]", path)
    # Haiku has modules named "~", and lists of layers have numbers.
    modules = [module for module in modules if module.strip("~0123456789")]
    if name.lower() not in _AFFINE or not modules:
        return False
    words = [word.lower() for word in _WORD.findall(modules[-1])]
    return any(map(_NORMALISATION.fullmatch, words)) and _OF_WEIGHTS.isdisjoint(words)


@dataclasses.dataclass(frozen=True)
class LowerBlocks:
    """The rule of `lower_blocks`."""

    count: int | None  # of the blocks that adapt, None for all layers

    def __call__(self, path: str, leaf: Any) -> bool:
        """Returns whether a path names a normalisation layer in a lower block."""
        return self.holds(path) and normalisation(path, leaf)

    def holds(self, path: str) -> bool:
        """Returns whether a parameter lies in a lower block."""
        block = _BLOCK.search(path)
        return self.count is None or (block is not None and int(block[1]) < self.count)


def lower_blocks(params: Any) -> LowerBlocks:
    """Returns the rule of SAR and DeYO: normalisation layers in the lower blocks.

    These are the lower three quarters of the blocks.

    The public code skips blocks 9 to 11 and the final LayerNorm of a 12-block ViT by name. A
    network without one flat list of blocks ("block_0", "blocks/0", "layer.0", ...), such as a
    ConvNeXt with stages, keeps all its layers. As `adapted` of an `Adapter` or of `fisher` the rule
    takes blocks by names, and their layers from the program.
    """
    matches = [_BLOCK.search(path) for path, _ in paths_of(params)]
    blocks = [match for match in matches if match is not None]
    lists = {match.string[: match.start()] for match in blocks}
    # Several lists of blocks have no common depth.
    if len(lists) != 1:
        return LowerBlocks(None)
    depth = 1 + max(int(match[1]) for match in blocks)
    return LowerBlocks(depth - (depth + 2) // 4)  # without a quarter, rounded half up


def leaves_by_name(
    params: Any, adapted: Adapted | None, reason: str = _UNTIL
) -> tuple[AdaptedLeaf, ...]:
    """Returns the parameters that a rule takes by their paths."""
    rule = adapted or normalisation
    return tuple(
        AdaptedLeaf(path, jnp.shape(leaf), reason)
        for path, leaf in paths_of(params)
        if _is_floating(leaf) and rule(path, leaf)
    )


def selected(params: Any, adapted: Adapted | None) -> frozenset[str]:
    """Returns the paths of the parameters that a rule takes by their paths.

    Raises ValueError if there are none.
    """
    paths = frozenset(leaf.path for leaf in leaves_by_name(params, adapted))
    if not paths:
        raise ValueError(_nothing(params))
    return paths


def goes_by_structure(adapted: Adapted | None) -> bool:
    """Returns whether the parameters of a rule depend on the program of the model."""
    return adapted is None or adapted is normalisation or isinstance(adapted, LowerBlocks)


def traced(apply_fn: Callable[..., Any], params: Any, images: Any) -> tuple[jex.ClosedJaxpr, Any]:
    """Returns the program of a model for two images like `images`, and the form of its result."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    # With one image the axis of the batch would look like any other axis of length 1.
    two = jax.ShapeDtypeStruct((2, *images.shape[1:]), images.dtype)
    result: tuple[jex.ClosedJaxpr, Any] = jax.make_jaxpr(apply_fn, return_shape=True)(shapes, two)
    return result


def adapting(
    apply_fn: Callable[..., Any], params: Any, adapted: Adapted | None, images: Any
) -> frozenset[str]:
    """Returns the paths of the parameters that adapt. Raises the errors of `adapted_leaves`."""
    program = None
    if goes_by_structure(adapted):
        program, _ = traced(apply_fn, params, images)
    return frozenset(leaf.path for leaf in adapted_leaves(params, adapted, program))


def adapted_leaves(
    params: Any, adapted: Adapted | None, program: jex.ClosedJaxpr | None
) -> tuple[AdaptedLeaf, ...]:
    """Returns the parameters that adapt.

    Args:
      params: All parameters.
      adapted: The rule of the caller. None, `normalisation` and `lower_blocks` take normalisation
          layers.
      program: `jax.make_jaxpr(apply_fn)(params, images)`. None for a rule that does not go by
          structure.

    Raises:
      ValueError: There are none, or the layer that returns the logits is among them.
    """
    if program is None:
        selected(params, adapted)  # refuses a rule that takes nothing
        return leaves_by_name(params, adapted, "by adapted=")
    leaves = paths_of(params)
    layers = normalisation_leaves(program, len(leaves))
    adapting = []
    heads = []
    by_name = []
    for number, (path, leaf) in enumerate(leaves):
        if isinstance(adapted, LowerBlocks) and not adapted.holds(path):
            continue
        if not _is_floating(leaf):
            continue
        if number in layers.uses:
            role, statistics = layers.uses[number]
            reason = f"{role} of a normalisation by {statistics} statistics"
        elif normalisation(path, leaf) and (number in layers.opaque or not layers.uses):
            # The program does not show what this leaf does, so its name decides.
            reason = _HIDDEN if number in layers.opaque else _UNSEEN
            by_name.append(path)
        else:
            continue
        adapting.append(AdaptedLeaf(path, jnp.shape(leaf), reason))
        if number in layers.last:
            heads.append(path)
    if not adapting:
        raise ValueError(_nothing(params))
    if heads:
        raise ValueError(
            f"adapted selects {heads}, whose results are the logits, so adaptation could answer "
            "every image by one class. Pass adapted=lambda path, leaf: ... without them, or with "
            "them if that is meant."
        )
    if by_name:
        warnings.warn(
            f"{by_name} adapt because of their names only: apply_fn does not show that they "
            "follow a normalisation. Pass adapted=lambda path, leaf: ... to choose the layers.",
            stacklevel=2,
        )
    return tuple(adapting)


def _nothing(params: Any) -> str:
    paths = [path for path, _ in paths_of(params)]
    return (
        "adapted selects no parameter. The default selects scale and offset of normalisation "
        f"layers, this model has paths such as {paths[:3]}. Pass adapted=lambda path, leaf: ... "
        "for other layers."
    )


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def trainable_part(params: Any, paths: frozenset[str]) -> Any:
    """Returns `params` with None in place of parameters that do not adapt."""
    structure = jax.tree.structure(params)
    moving = [leaf if path in paths else None for path, leaf in paths_of(params)]
    return jax.tree.unflatten(structure, moving)


def merge(moving: Any, params: Any) -> Any:
    """Returns `params` with the leaves of `moving` wherever `moving` is not None."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, moving, params, is_leaf=lambda x: x is None
    )
