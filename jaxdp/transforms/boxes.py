"""Interval values, outward rounding and the registry of rules for `jaxdp.interval`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_pytree_with_keys_class
class Interval:
    """The set of all x with lower <= x <= upper, entry by entry.

    It is a pytree of two endpoints. `lower` and `upper` are arrays of one shape and dtype, or
    pytrees of such arrays.

    Raises:
      ValueError: Structures, shapes or dtypes differ, an endpoint is NaN, or lower > upper
        somewhere. Traced values are not checked.
    """

    __slots__ = ("lower", "upper")

    lower: Any
    upper: Any

    def __init__(self, lower: Any, upper: Any):
        # As text, because the error shows it.
        lower_tree = str(jax.tree.structure(lower))
        upper_tree = str(jax.tree.structure(upper))
        if lower_tree != upper_tree:
            raise ValueError(
                "lower and upper must have the same tree structure, got "
                f"{lower_tree} and {upper_tree}."
            )
        self.lower = jax.tree.map(lambda x: _outward(x, -1), lower)
        self.upper = jax.tree.map(lambda x: _outward(x, +1), upper)
        jax.tree.map(_check_endpoints, self.lower, self.upper)

    @classmethod
    def point(cls, value: Any) -> "Interval":
        """Returns the interval that contains only `value` (an array or pytree)."""
        return cls(value, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the endpoints."""
        shape: tuple[int, ...] = self.lower.shape
        return shape

    @property
    def dtype(self) -> Any:
        """Dtype of the endpoints."""
        return self.lower.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions of the endpoints."""
        return len(self.shape)

    @property
    def width(self) -> Any:
        """The pytree `upper - lower`."""
        return jax.tree.map(lambda low, high: high - low, self.lower, self.upper)

    def contains(self, value: Any) -> Any:
        """Returns a boolean []: whether every entry of `value`, shaped like `lower`, is inside."""

        def is_inside(
            x: Any,
            low: Any,
            high: Any,
        ) -> jax.Array:
            return jnp.all((x >= low) & (x <= high))

        leaves = jax.tree.leaves(jax.tree.map(is_inside, value, self.lower, self.upper))
        return jnp.all(jnp.stack(leaves))

    def __getitem__(self, index: Any) -> "Interval":
        lower = jax.tree.map(lambda x: x[index], self.lower)
        upper = jax.tree.map(lambda x: x[index], self.upper)
        return unchecked(lower, upper)

    def __repr__(self) -> str:
        return f"Interval(lower={self.lower}, upper={self.upper})"

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """Flattens the interval for `jax.tree`."""
        key = jax.tree_util.GetAttrKey
        return ((key("lower"), self.lower), (key("upper"), self.upper)), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Interval":
        """Rebuilds the interval for `jax.tree`."""
        return unchecked(*children)  # transformations put arbitrary objects into leaves


def unchecked(lower: Any, upper: Any) -> Interval:
    """Returns an `Interval` without the checks of its constructor."""
    interval = object.__new__(Interval)
    interval.lower = lower
    interval.upper = upper
    return interval


def _outward(value: Any, direction: int) -> jax.Array:
    """Converts `value` to an array, and rounds it outward where that loses digits.

    JAX without x64 converts float64 to float32, to nearest. Direction -1 gives the next number
    below where the nearest one is above, +1 the reverse.
    """
    # An array of JAX is not converted, and integers are not rounded.
    is_host_number = isinstance(value, np.ndarray | np.floating | float)
    if not is_host_number or not jnp.issubdtype(np.result_type(value), jnp.floating):
        return jnp.asarray(value)
    original = np.asarray(value)
    dtype = jax.dtypes.canonicalize_dtype(original.dtype)
    converted = outward_in(original, dtype, direction)
    # Unlike `jnp.asarray`, `device_put` compiles nothing.
    array: jax.Array = jax.device_put(converted)
    return array


def outward_in(value: Any, dtype: Any, direction: int) -> np.ndarray:
    """Returns numbers in a floating dtype, rounded to the side of a direction.

    Args:
      value: A float or an array of NumPy, of at most 64 bits.
      dtype: The dtype.
      direction: -1 rounds down, +1 up.
    """
    with np.errstate(over="ignore"):  # a number too large becomes infinite
        converted = np.asarray(value).astype(dtype)
    # Both fit into float64, so the comparison is exact.
    rounded = np.asarray(converted, np.float64)
    exact = np.asarray(value, np.float64)
    is_inward = rounded > exact if direction < 0 else rounded < exact
    outermost = np.asarray(direction * np.inf, converted.dtype)
    # Rounding to nearest is off by less than the distance to the next number.
    moved_out = np.nextafter(converted, outermost)
    return np.where(is_inward, moved_out, converted)


def _check_endpoints(lower: jax.Array, upper: jax.Array) -> None:
    if lower.shape != upper.shape or lower.dtype != upper.dtype:
        raise ValueError(
            "lower and upper must have the same shape and dtype, got"
            f" {lower.dtype}{list(lower.shape)} and {upper.dtype}{list(upper.shape)}."
        )
    if isinstance(lower, jax.core.Tracer) or isinstance(upper, jax.core.Tracer):
        return
    is_wrong = ~(np.asarray(lower) <= np.asarray(upper))  # also where an end is NaN
    if is_wrong.any():
        raise ValueError(
            "lower must be at most upper and neither may be NaN, which fails in "
            f"{is_wrong.sum()} of {is_wrong.size} entries. For a single point set lower == upper."
        )


class Box(Interval):
    """An `Interval` inside the interpreter, with facts that are known while it traces.

    Facts follow from the structure of the function. None comes from looking at endpoints.

    Attributes:
      nonnegative: Whether every point is >= 0.
      zero_sum: Whether the entries of every point sum to zero along the last axis.
      differences: Computes upper bounds [..., K, K] of z_j - z_c over all points z [..., K]. None
        if they are not better than differences of endpoints.
    """

    __slots__ = ("differences", "nonnegative", "zero_sum")

    nonnegative: bool
    zero_sum: bool
    differences: Callable[[], jax.Array] | None

    def __init__(
        self,
        lower: Any,
        upper: Any,
        *,
        nonnegative: bool = False,
        zero_sum: bool = False,
    ) -> None:
        # Outward rounding may have moved an end below 0, where there is no point.
        self.lower = jnp.maximum(lower, 0) if nonnegative else lower
        self.upper = upper
        self.nonnegative = nonnegative
        self.zero_sum = zero_sum
        self.differences = None


Operand = jax.Array | Interval  # an array is an exactly known point


def lower(x: Operand) -> jax.Array:
    """Returns the lower endpoint of an interval, or an exact array unchanged."""
    return x.lower if isinstance(x, Interval) else x


def upper(x: Operand) -> jax.Array:
    """Returns the upper endpoint of an interval, or an exact array unchanged."""
    return x.upper if isinstance(x, Interval) else x


def both(
    f: Callable[[jax.Array], jax.Array],
    x: Operand,
) -> tuple[jax.Array, jax.Array]:
    """Returns (f(lower), f(upper))."""
    return f(lower(x)), f(upper(x))


def moved(
    f: Callable[[jax.Array], jax.Array],
    x: Operand,
) -> Operand:
    """Applies an `f` that only moves, repeats or exactly converts entries. Keeps a known sign."""
    if not isinstance(x, Interval):
        return f(x)
    # `zero_sum` is not kept: `f` may move entries along the last axis.
    return Box(f(x.lower), f(x.upper), nonnegative=is_nonnegative(x))


def magnitude(x: Operand) -> jax.Array:
    """Returns the largest |x| in the interval."""
    if not isinstance(x, Interval):
        return jnp.abs(x)
    return jnp.maximum(jnp.abs(x.lower), jnp.abs(x.upper))


def is_nonnegative(x: Operand) -> bool:
    """Returns whether x >= 0 is known while tracing."""
    if isinstance(x, Box):
        return x.nonnegative
    # A box of a caller has no facts. A sign read from its ends would make a rule that is not
    # inclusion-isotonic.
    if isinstance(x, Interval):
        return False
    if isinstance(x, np.ndarray | np.generic | float | int):  # a constant of the program
        return bool(np.all(np.asarray(x) >= 0))
    return is_unsigned(x.dtype)


def is_unsigned(dtype: Any) -> bool:
    """Returns whether all numbers of a dtype are >= 0."""
    return bool(jnp.issubdtype(dtype, jnp.unsignedinteger) or dtype == jnp.bool_)


def are_nonnegative(*operands: Operand) -> bool:
    """Returns whether all operands are known to be >= 0."""
    return all(map(is_nonnegative, operands))


def is_float(x: Any) -> bool:
    """Returns whether an operand has a floating-point dtype."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def slack(dtype: Any, roundings: float) -> float:
    """Returns an upper bound on the relative error of `roundings` operations rounded to nearest.

    Each operation is off by at most u = eps/2. So n roundings change a result by a factor 1 +- g
    with g = n u / (1 - n u) (Higham 2002, Lemma 3.1). The slack s >= g / (1 - g) satisfies
    (1 + s)(1 - g) >= 1, so it also covers the error of terms that it has enlarged. Two more eps
    cover the rounding when the slack itself is applied.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    if roundings * unit >= 0.25:  # beyond 1/2 the bound has no meaning
        return math.inf
    return roundings * unit / (1 - 2 * roundings * unit) + 4 * unit


def tiny(dtype: Any) -> float:
    """Returns the smallest normal number.

    It bounds the error of underflow, even if subnormals are flushed to zero.
    """
    return float(jnp.finfo(dtype).tiny)


def widen(
    low: jax.Array,
    high: jax.Array,
    roundings: float = 1,
) -> tuple[jax.Array, jax.Array]:
    """Moves endpoints outward by the error of `roundings` operations and by `tiny`.

    The computed result is monotone in the endpoints.
    """
    return outward(low, -1, roundings), outward(high, 1, roundings)


def outward(
    end: jax.Array,
    sign: int,
    roundings: float = 1,
) -> jax.Array:
    """Moves one endpoint as `widen` does: a lower one for sign -1, an upper one for sign 1."""
    error = slack(end.dtype, roundings)
    outermost = jnp.minimum if sign < 0 else jnp.maximum
    # Which of the two factors moves an end outward depends on its sign.
    scaled = outermost(end * (1 - error), end * (1 + error))
    return _end_without_overflow(scaled + sign * tiny(end.dtype), sign)


def without_overflow(
    low: jax.Array,
    high: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Replaces an endpoint that overflowed inward by the largest finite number."""
    return _end_without_overflow(low, -1), _end_without_overflow(high, 1)


# An end that one operation rounds to infinity is beyond the largest number. Inward, that number is
# a bound, and infinity is none. A sum of several terms needs `summable` besides.
def _end_without_overflow(end: jax.Array, sign: int) -> jax.Array:
    largest = float(jnp.finfo(end.dtype).max)
    if sign < 0:
        return jnp.minimum(end, largest)
    return jnp.maximum(end, -largest)


def inflate(
    x: Operand,
    roundings: float,
    *,
    keep_sign: bool = False,
) -> Interval:
    """Widens an operand so that a product with it covers the rounding of `roundings` operations.

    Let |b| be the magnitude, s the slack and b' = [b - s|b|, b + s|b|]. The endpoints of
    sum_n a_n b'_n lie outside of those of sum_n a_n b_n by s sum_n |a_n||b_n|, which bounds the
    rounding of the sum. Zeros stay zero.
    """
    size = magnitude(x)
    # The second term covers an underflow of the first.
    reach = slack(x.dtype, roundings) * size
    # At most the size, so that the zeros of a padding or a mask stay zeros.
    reach = reach + jnp.minimum(size, tiny(x.dtype))
    low = lower(x) - reach
    high = upper(x) + reach
    nonnegative = keep_sign and is_nonnegative(x)
    return Box(low, high, nonnegative=nonnegative)


def at_least_float32(x: Operand) -> Operand:
    """Converts floats narrower than 32 bits to float32, which is exact."""
    # In its own dtype XLA may round after every operation, and a slack for that would be too wide.
    if is_float(x) and jnp.finfo(x.dtype).bits < 32:
        return moved(lambda v: lax.convert_element_type(v, jnp.float32), x)
    return x


# --- The registry of rules ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Equation:
    """One equation of a jaxpr, as a rule receives it.

    Attributes:
      name: The name of the primitive, or of the pattern that the rule is for.
      params: The parameters of the primitive.
      outputs: The shape and dtype of each result.
      product: "tight" or "rump", the setting of `jaxdp.interval`.
      bind: Evaluates the primitive on arrays.
      evaluate: Bounds an inner program: `evaluate(closed_jaxpr, operands)`.
    """

    name: str
    params: dict[str, Any]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    product: str
    bind: Callable[..., list[jax.Array]]
    evaluate: Callable[[Any, Sequence[Operand]], list[Operand]]

    def ends(self, *operands: Operand) -> tuple[jax.Array, jax.Array]:
        """Evaluates a primitive of one result at all lower endpoints and at all upper endpoints."""
        low = self.bind(*map(lower, operands))[0]
        high = self.bind(*map(upper, operands))[0]
        return low, high


Rule = Callable[..., Operand | Sequence[Operand]]

# The rule of each primitive, which the modules of `interval_rules` register.
RULES: dict[str, Rule] = {}


def register_rule(*primitive_names: str) -> Callable[[Rule], Rule]:
    """Registers how a primitive acts on intervals. A later rule replaces an earlier one.

        @register_rule("erf_inv")
        def _erf_inv(eqn, x):
            return Interval(*widen(*eqn.ends(x), roundings=16))

    Args:
      primitive_names: The names of primitives, as `jax.make_jaxpr` prints them.

    Returns:
      A decorator for `rule(eqn, *operands)`. `eqn` is an `Equation`. An operand is an array if its
      value is known exactly. Otherwise it is an `Interval`, even if only its rounding is uncertain.
      `lower` and `upper` accept both. The rule returns one result or a sequence of results.

      Results must contain the exact value at every point of the operands. Results must be
      inclusion-isotonic: smaller operands must not give a larger result.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(primitive_names, rule))
        return rule

    return register
