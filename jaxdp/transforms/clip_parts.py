"""Parts of params that are clipped to norms of their own.

With a clip norm C_k for each part, an example contributes the vector of its clipped parts. The
norm of that vector is at most sqrt(sum_k C_k^2), which is the sensitivity of the sum (McMahan et
al. 2018, arXiv:1812.06210, section 3.1).
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxdp.transforms.clip_arguments import paths_of, trainable_leaves
from jaxdp.transforms.noise.scales import real_number

Split = Literal["uniform", "dimension"]


def split_clip_norm(
    params: Any,
    total: float,
    *,
    by: Split = "uniform",
    depth: int | None = None,
    trainable: Callable[[str, Any], bool] | None = None,
) -> dict[str, float]:
    """Returns clip norms of parts of params whose squares add up to total^2.

        clip_norm = jaxdp.split_clip_norm(params, 1.0, depth=1)  # a part for each layer
        f = jaxdp.clipped_grad(loss_fn, clip_norm=clip_norm)
        f.sensitivity()  # 1.0, up to rounding

    Args:
      params: Pytree of arrays.
      total: C > 0, the bound on the whole clipped gradient.
      by: "uniform" gives each of m parts C / sqrt(m). "dimension" gives a part of d_k of the d
        trained entries C sqrt(d_k / d), the share of the noise that it gets.
      depth: How many names of a path, from the first on, parts have in common. None, the default,
        makes each leaf a part.
      trainable: As in `clipped_grad`. Other leaves are in no part.

    Returns:
      The clip norm of each part, by the regular expression of its paths.

    Raises:
      TypeError: total is no number.
      ValueError: An argument is out of range, or no leaf is trained.
    """
    total = real_number("total", total)
    if not 0 < total < math.inf:
        raise ValueError(f"total must be positive and finite, got {total!r}.")
    if by not in ("uniform", "dimension"):
        raise ValueError(f"by must be 'uniform' or 'dimension', got {by!r}.")
    if depth is not None and (not isinstance(depth, int) or depth < 1):
        raise ValueError(f"depth must be an integer of at least 1, or None, got {depth!r}.")
    sizes: dict[str, int] = collections.defaultdict(int)
    pairs = zip(paths_of(params), trainable_leaves(params, trainable), strict=True)
    for (path, leaf), trains in pairs:
        if trains:
            pattern = _pattern(path, depth)
            shape = jnp.shape(leaf)
            sizes[pattern] += math.prod(shape)
    # Without an entry there is nothing to divide `total` by.
    if not any(sizes.values()):
        raise ValueError("params must have a trainable leaf with entries to divide `total` among.")
    if by == "uniform":
        # m squares of it add up to C^2.
        each = total / math.sqrt(len(sizes))
        return dict.fromkeys(sizes, each)
    entries = sum(sizes.values())
    norms = {}
    for pattern, size in sizes.items():
        share = size / entries
        norms[pattern] = total * math.sqrt(share)
    return norms


def _pattern(path: str, depth: int | None) -> str:
    """Returns the regular expression of the paths that share the first names of a path."""
    names = path.split("/")
    # A shorter path is a part of its own. A pattern with "/.*" would not match it.
    if depth is None or depth >= len(names):
        return re.escape(path)
    shared = "/".join(names[:depth])
    return re.escape(shared) + "/.*"


def total_norm(norms: Iterable[Any]) -> Any:
    """Returns sqrt(sum_k C_k^2), in Python's floats unless a norm is traced."""
    norms = list(norms)
    # A traced clip norm, such as one that is adapted, makes the sensitivity a traced value.
    if any(isinstance(norm, jax.core.Tracer) for norm in norms):
        squares = map(jnp.square, norms)
        return jnp.sqrt(sum(squares))
    # `hypot` scales its arguments, so squares neither overflow nor vanish.
    numbers = map(float, norms)
    return math.hypot(*numbers)


def check_patterns(norms: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError unless the keys are regular expressions."""
    if not norms:
        raise ValueError("clip_norm must have at least one part, got {}.")
    for pattern in norms:
        if not isinstance(pattern, str):
            raise TypeError(
                "clip_norm must map regular expressions of paths to norms, got the key "
                f"{pattern!r} of type {type(pattern).__name__}."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"clip_norm must map regular expressions of paths to norms, got {pattern!r} "
                f"({error}). Write .* for any text, as in 'backbone/.*'."
            ) from error


def part_numbers(
    norms: Mapping[str, Any],
    params: Any,
    trainable: Sequence[bool],
) -> tuple[int, ...]:
    """Returns the number of the part of each trainable leaf, in the order of the patterns.

    Raises:
      ValueError: A trainable leaf matches no pattern or several, or a pattern matches none.
    """
    # Frozen leaves need no part, since they have no gradient.
    paths = []
    for (path, _), trains in zip(paths_of(params), trainable, strict=True):
        if trains:
            paths.append(path)
    patterns = tuple(norms)
    return _part_numbers(patterns, tuple(paths))


@functools.lru_cache(maxsize=64)  # every call asks, and a large model has thousands of pairs
def _part_numbers(patterns: tuple[str, ...], paths: tuple[str, ...]) -> tuple[int, ...]:
    numbers = []
    for path in paths:
        own = []
        for number, pattern in enumerate(patterns):
            # The whole path, because "head" would also match a part of "overhead/kernel".
            if re.fullmatch(pattern, path):
                own.append(number)
        # A leaf in no part would have no bound, and one in two parts would have two.
        if len(own) != 1:
            matches = [patterns[n] for n in own] or "none"
            raise ValueError(
                f"clip_norm must have exactly one pattern for the parameter {path!r}, which "
                f"matches {matches} of {list(patterns)}. A pattern is a regular expression for a "
                "whole path, such as 'backbone/.*'. Freeze what is not trained with `trainable`."
            )
        numbers += own
    idle = set(range(len(patterns))) - set(numbers)
    if idle:
        first = patterns[min(idle)]
        names = ", ".join(paths[:8])
        more = ", ..." if len(paths) > 8 else ""
        raise ValueError(
            f"clip_norm has {first!r}, which matches no trained parameter and would only add "
            f"noise. Leave it out, or mend it. There are {names}{more}."
        )
    return tuple(numbers)
