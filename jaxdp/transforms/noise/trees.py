"""Noise of four laws, shaped like a pytree.

All leaves of a dtype are slices of one vector of noise, so a tree compiles one program.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.transforms.compiler import check_options
from jaxdp.transforms.grids import MOST_BITS
from jaxdp.transforms.noise.cauchy import standard_cauchy
from jaxdp.transforms.noise.geometric import discrete_values, upward
from jaxdp.transforms.noise.keys import check_key, number_of_draw
from jaxdp.transforms.noise.laplace import standard_laplace
from jaxdp.transforms.noise.normal import BLOCKS_TOGETHER, pieces_of, standard_normals
from jaxdp.transforms.noise.normal_on_mesh import divided_normals
from jaxdp.transforms.noise.reuse import check_shards, check_vmap
from jaxdp.transforms.noise.rounded import LEAST_BITS, rounded_normals
from jaxdp.transforms.noise.scales import check_carried, check_scale

# A geometric of this scale is an int32 (`geometric._MOST_WHOLE`).
LARGEST_DISCRETE_SCALE = 2.0**18
# The most values of one vector of noise, which bounds the memory beside the leaves to 128 MiB or
# one leaf.
_LARGEST_VECTOR = 2**25
# Positions in a vector of whole blocks are int32.
_LARGEST_LEAF = 2**31 - 4 * BLOCKS_TOGETHER


@dataclasses.dataclass
class _LeafGroup:
    """Leaves of one dtype of noise that are slices of one vector."""

    dtype: Any
    indices: list[int] = dataclasses.field(default_factory=list)
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    size: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)


# Draws the noise of a group's leaves under a key: an array for each leaf, or one vector of all.
_Draw = Callable[[jax.Array, _LeafGroup], Sequence[jax.Array] | jax.Array]


def gaussian(
    key: jax.Array,
    tree: Any,
    std: float | jax.Array,
    *,
    number: int | jax.Array = 0,
    shardings: Any = None,
) -> Any:
    """Draws noise N(0, std**2) shaped like `tree`.

    Args:
        key: Typed key of shape ().
        tree: Pytree of real arrays or `jax.ShapeDtypeStruct`s. None leaves stay None. Values are
            not read.
        std: Standard deviation, 0 or a scalar from 2**-100 to 2**100 (2**-996 to 2**996 for float64
            noise). A traced value is not checked.
        number: Integer scalar from 0 to 2**32 - 1. It is part of the nonce of the cipher, so draws
            of different numbers under one key are independent. It saves a program a key for each
            step. A traced number has at most 32 bits, and negative ones stand for those from 2**31.
        shardings: Pytree like `tree` of `jax.sharding.NamedSharding`s of one mesh with Auto axes.
            Each device then computes its part of the noise, equal up to rounding to what it is
            without shardings, and sends none. None, the default, leaves the division to XLA, and
            devices exchange what they have computed.

    Returns:
        A pytree like `tree` in float32, or float64 for float64 leaves. The noise of a leaf depends
        on the sizes and dtypes of all leaves.

    Raises:
        TypeError: `key` is an old-style uint32 key, or a leaf is not real, or `number` is not an
            integer or is traced with 64 bits.
        ValueError: `key`, `std` or `number` is not a scalar or outside its range, or a leaf has
            almost 2**31 values. A leaf or `std` differs along an axis of `jax.vmap` where neither
            `key` nor `number` does. Inside `jax.shard_map`: a leaf varies over a mesh axis and
            `key` does not, or `check_vma=False`. Inside `jax.pmap`.
        RuntimeError: `XLA_FLAGS` has options that `jaxdp.transforms.compiler` refuses.
    """
    number = number_of_draw(number)
    layout = jax.tree.leaves(shardings)

    def draw(key: jax.Array, group: _LeafGroup) -> Sequence[jax.Array]:
        # Without shardings this is true of none.
        if all(sharding.is_fully_replicated for sharding in layout):
            vectors: list[jax.Array] = standard_normals(number, key, group.sizes, group.dtype)
            return vectors
        shardings = [layout[i] for i in group.indices]
        return divided_normals(number, key, group.shapes, group.dtype, shardings)

    return _scaled(key, number, tree, "std", std, draw)


def laplace(
    key: jax.Array,
    tree: Any,
    scale: float | jax.Array,
    *,
    number: int | jax.Array = 0,
) -> Any:
    """Draws Laplace noise of density exp(-|x| / scale) / (2 scale) shaped like `tree`.

    Arguments, result and errors are as in `gaussian`. Each value is the difference of two
    independent exponentials -log(u). The uniform u is drawn in words of 32 bits until one word is
    not zero, and one more word follows. So u has full relative precision. Each exponential ends
    where 8192 bits in a row are zero. So in exact arithmetic a mechanism that draws n values has a
    delta of at most n 2**-8190 in addition to its pure epsilon.
    """
    number = number_of_draw(number)
    draw = _of_one_vector(functools.partial(standard_laplace, number))
    return _scaled(key, number, tree, "scale", scale, draw)


def discrete_laplace(
    key: jax.Array,
    tree: Any,
    scale: float | jax.Array,
    *,
    number: int | jax.Array = 0,
) -> Any:
    """Draws int32 noise with P(k) proportional to exp(-|k| / scale), shaped like `tree`.

    Added to integers of L1 sensitivity s, it gives (s / scale)-DP (Ghosh, Roughgarden, Sundararajan
    2009). It leaves no trace of the exact value in the last digits, unlike floating-point Laplace
    noise (Mironov 2012). Each value is drawn by integers alone (Canonne, Kamath and Steinke 2020).
    `jaxdp.transforms.noise.geometric` has the sampler and its proof.

    Args:
        key, tree, number: As in `gaussian`.
        scale: Positive and at most `LARGEST_DISCRETE_SCALE`. The noise has the next float32 that is
            not smaller, and below 64 the next multiple of 2**-18. A traced scale is a float32.

    Raises:
        TypeError, ValueError: As in `gaussian`. Also ValueError if scale is outside its range.
    """
    if not isinstance(scale, jax.core.Tracer) and not 0 < scale <= LARGEST_DISCRETE_SCALE:
        raise ValueError(f"scale must be in (0, {LARGEST_DISCRETE_SCALE:g}], got {scale!r}.")
    if not isinstance(scale, jax.core.Tracer):
        # Rounding may enlarge noise, but never lessen it.
        scale = upward(scale)
    number = number_of_draw(number)
    draw = _of_one_vector(functools.partial(discrete_values, number, scale))
    return _drawn(key, number, tree, scale, draw)


def rounded_gaussian(
    key: jax.Array,
    tree: Any,
    bits: int,
    *,
    number: int | jax.Array = 0,
) -> Any:
    """Draws int32 noise round(2**bits Z), Z ~ N(0, 1), shaped like `tree`, by integers alone.

    Added to integers of L2 sensitivity 2**bits / sigma, it is the Gaussian mechanism of multiplier
    sigma, rounded. So it is post-processing of that mechanism, for vectors and sampled batches
    alike. `jaxdp.transforms.noise.rounded` has the sampler and its proof.

    Args:
        key, tree, number: As in `gaussian`.
        bits: An integer from 4 to 24.

    Raises:
        TypeError, ValueError: As in `gaussian`. Also ValueError if bits is outside its range.
    """
    if not isinstance(bits, int) or not LEAST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"bits must be an integer from 4 to 24, got {bits!r}.")
    number = number_of_draw(number)
    draw = _of_one_vector(functools.partial(rounded_normals, bits, number))
    return _drawn(key, number, tree, bits, draw)


def cauchy(
    key: jax.Array,
    tree: Any,
    scale: float | jax.Array,
    *,
    number: int | jax.Array = 0,
) -> Any:
    """Draws Cauchy noise of density scale / (pi (scale**2 + x**2)) shaped like `tree`.

    Arguments, result and errors are as in `gaussian`. Each value is the mean of two independent
    Cauchy draws, which is again Cauchy (a 1-stable law). `scale` is half of the interquartile
    range. The variance is infinite. A value that exceeds the largest float becomes infinite.
    """
    number = number_of_draw(number)
    draw = _of_one_vector(functools.partial(standard_cauchy, number))
    return _scaled(key, number, tree, "scale", scale, draw)


def noise_dtype(leaf: Any) -> Any:
    """Returns float64 for a real leaf of 64 bits and float32 for a smaller one."""
    dtype = jnp.result_type(leaf)
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(
            f"Noise needs real leaves, got dtype {dtype}. Split a complex leaf into two real "
            "leaves."
        )
    return jnp.dtype(jnp.float64 if dtype.itemsize > 4 else jnp.float32)


def _scaled(
    key: jax.Array,
    number: jax.Array,
    tree: Any,
    name: str,
    scale: float | jax.Array,
    draw: _Draw,
) -> Any:
    """Returns the standard noise of `draw` times the scale, which errors call `name`."""
    check_key(key)
    if jnp.ndim(scale) != 0:
        raise ValueError(
            f"{name} must be one scalar for the whole tree, got shape {jnp.shape(scale)}."
        )
    if not isinstance(scale, jax.core.Tracer):
        scale = check_scale(name, scale)
        dtypes = {noise_dtype(leaf) for leaf in jax.tree.leaves(tree)}
        # In an order of its own, so that one tree always raises one error.
        for dtype in sorted(dtypes, key=str):
            check_carried(name, scale, dtype)
    return _drawn(key, number, tree, scale, draw, is_standard=True)


def _drawn(
    key: jax.Array,
    number: jax.Array,
    tree: Any,
    scale: Any,
    draw: _Draw,
    *,
    is_standard: bool = False,
) -> Any:
    """Returns `tree` with the noise of `draw` in place of its leaves.

    It is multiplied by the scale if it is that of scale 1. Otherwise the scale is only checked,
    because noise of different scales must not be equal up to a factor.
    """
    check_key(key)
    check_options()
    leaves, treedef = jax.tree.flatten(tree)
    for value in (*leaves, scale):
        check_shards(key, value)
    # The scale too: one noise times two scales tells the noise.
    key = check_vmap(key, number, [*leaves, scale])
    groups = _groups(leaves)
    # One group has the key itself, and several have its children.
    keys = jax.random.split(key, len(groups)) if len(groups) > 1 else [key] * len(groups)
    for group, group_key in zip(groups, keys, strict=True):
        drawn = draw(group_key, group)
        # The scale of integers is a part of their law, and not a factor.
        factor = jnp.asarray(scale, group.dtype) if is_standard else None
        arrays = _leaves_of(drawn, factor, tuple(group.shapes))
        for i, noise in zip(group.indices, arrays, strict=True):
            leaves[i] = noise
    return jax.tree.unflatten(treedef, leaves)


def _of_one_vector(draw: Callable[[jax.Array, int, Any], jax.Array]) -> _Draw:
    """Returns a draw of all leaves of a group by `draw(key, size, dtype)`."""
    return lambda key, group: draw(key, group.size, group.dtype)


# One program for all leaves. It is apart from the draw, so groups of one size share the program of
# the draw, and the values of the draw are rounded before they are multiplied.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def _leaves_of(
    drawn: Sequence[jax.Array] | jax.Array,
    factor: jax.Array | None,
    shapes: tuple[tuple[int, ...], ...],
) -> list[jax.Array]:
    """Returns the arrays of a draw in the shapes of the leaves, times the factor."""
    if isinstance(drawn, jax.Array):
        drawn = pieces_of(drawn, [math.prod(shape) for shape in shapes])
    leaves = [piece.reshape(shape) for piece, shape in zip(drawn, shapes, strict=True)]
    return leaves if factor is None else [leaf * factor for leaf in leaves]


def _groups(leaves: list[Any]) -> list[_LeafGroup]:
    """Groups leaves by dtype of noise, each group of at most `_LARGEST_VECTOR` values or one leaf.

    Leaves of 20 M, 10 M and 20 M float32 values make the groups [0, 1] and [2].
    """
    groups: list[_LeafGroup] = []
    newest: dict[Any, _LeafGroup] = {}
    for i, leaf in enumerate(leaves):
        dtype = noise_dtype(leaf)
        shape = jnp.shape(leaf)
        size = math.prod(shape)
        if size > _LARGEST_LEAF:
            raise ValueError(
                f"A leaf has {size} values, but noise has at most {_LARGEST_LEAF}. Split the leaf."
            )
        # Only the newest group of a dtype takes a leaf, so its leaves are in the order of the tree.
        group = newest.get(dtype)
        if group is None or group.size + size > _LARGEST_VECTOR:
            group = newest[dtype] = _LeafGroup(dtype)
            groups.append(group)
        group.indices.append(i)
        group.shapes.append(shape)
        group.size += size
    return groups
