"""Weights whose Jacobian is a factor of each channel plus terms of low rank.

Weight standardisation maps a kernel w [n, C] of n rows and C channels to the weight
V = (w - mean) * scale, where mean and scale are statistics of a channel. So in each channel

    J = s I + sum_r p_r q_r^T

with vectors p_r and q_r that depend on w only, such as the ones and the centred kernel. Let
dV = sum_t u_t w_t^T be the gradient of one example, and b_r = <p_r, dV>. Its gradient by the leaves
is J^T dV = s dV + sum_r b_r q_r, and

    ||J^T dV||^2 = ||s dV||^2 + sum over channels of (2 sum_r b_r <q_r, s dV> + sum_rs b_r b_s
                   <q_r, q_s>).

Here s dV is the gradient of the cotangents times s, whose norm a kernel computes without writing
it. Inner products with dV are sums over positions: <p, dV> = sum_t (p^T u_t) w_t, where p^T u_t is
the convolution of the data with p.

`of_program` finds s, p and q by evaluating the program of a weight with its derivative in this
form. An operation that leaves the form ends the search, so what is found is right.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import exact_scaling, jaxprs, products, rounding
from jaxdp.transforms.convolutions import Conv


class _Unknown(Exception):
    """An operation leaves the form."""


class Vector(NamedTuple):
    """A vector of each channel, [n, C]: `number` [1, C] times `base`, which is None for ones."""

    number: Any
    base: Any

    def times(self, other: "Vector") -> "Vector":
        """Returns the product entry by entry."""
        base = self.base
        if base is None:
            base = other.base
        elif other.base is not None:
            base = base * other.base
        return Vector(self.number * other.number, base)


class Functional(NamedTuple):
    """A number of each channel that is linear in the derivative of a leaf.

    For the kernel it is the inner product with `base`, which is None for ones. For a leaf [C] it is
    the derivative itself.
    """

    leaf: int
    base: Any


class _Value(NamedTuple):
    """A value and its derivative.

    Attributes:
      primal: Its numbers, [n, C], or [1, C] if it is one number of each channel, or a scalar.
      is_full: Whether it has rows.
      shape: The shape that it has in the program, whose last axis is C.
      diagonal: The factor of the kernel's derivative, or None.
      terms: (p, q) of each further term.
    """

    primal: Any
    is_full: bool
    shape: tuple[int, ...]
    diagonal: Vector | None = None
    terms: tuple[tuple[Vector, Functional], ...] = ()

    @property
    def as_vector(self) -> Vector:
        """The value as a factor of another one."""
        if self.is_full:
            return Vector(1.0, self.primal)
        return Vector(self.primal, None)

    def with_derivative(self, primal: Any, factor: Vector) -> "_Value":
        """Returns a function of each entry of the value, whose derivative is `factor`."""
        # The product has rows, and a value without rows has no place for them.
        if factor.base is not None and not self.is_full:
            raise _Unknown
        diagonal = None if self.diagonal is None else self.diagonal.times(factor)
        terms = tuple((p.times(factor), q) for p, q in self.terms)
        return self._replace(primal=primal, diagonal=diagonal, terms=terms)


class Term(NamedTuple):
    """A term p q^T of a Jacobian, by the places of its vectors in `Form.bases`.

    Attributes:
      number: [1, C], a factor of the term.
      place: The place of p.
      leaf: The number of the leaf of q.
      own: The place of q, or None if the leaf is [C].
    """

    number: jax.Array
    place: int
    leaf: int
    own: int | None


@dataclasses.dataclass(frozen=True)
class Form:
    """The Jacobian of a weight [n, C], in each channel.

    Attributes:
      kernel: The number of the leaf [n, C].
      scale: s, [1, C].
      bases: The vectors [n, C] of which p and q of the kernel are multiples. None is ones. The
        largest entry of each channel is in [1, 2), or all are 0.
      terms: The further terms.
      rows: n.
    """

    kernel: int
    scale: jax.Array
    bases: tuple[Any, ...]
    terms: tuple[Term, ...]
    rows: int

    @property
    def full_bases(self) -> jax.Array:
        """The bases that are no ones, float32 [number, n, C]."""
        return jnp.stack([base for base in self.bases if base is not None])

    def with_terms(self, products: Sequence[jax.Array]) -> "LowRank":
        """Returns the terms of J^T dV beside s dV.

        Args:
          products: The inner products [B, C] of each base with dV.
        """
        zero = jnp.zeros_like(products[0])
        of_kernel = [zero for _ in self.bases]
        of_leaves: dict[int, jax.Array] = {}
        for number, place, leaf, own in self.terms:
            term = number * products[place]
            if own is None:
                of_leaves[leaf] = of_leaves.get(leaf, zero) + term
            else:
                of_kernel[own] = of_kernel[own] + term
        return LowRank(of_kernel, of_leaves)


def of_program(
    weights: jex.ClosedJaxpr,
    leaves: Sequence[Any],
    members: Sequence[int],
) -> Form | None:
    """Returns the form of the only weight of a program, or None if it has none.

    Args:
      weights: The program from all trainable leaves to the weight [..., C].
      leaves: The values of all trainable leaves, or their shapes.
      members: The numbers of the leaves on which it depends: a kernel of the shape of the weight,
        and leaves [C].
    """
    (result,) = weights.jaxpr.outvars
    shape = result.aval.shape
    own_channels = shape[-1:]
    kernels = [k for k in members if leaves[k].shape == shape]
    others = [k for k in members if leaves[k].shape == own_channels]
    # Two kernels would have a diagonal each, and the form has one.
    if len(shape) < 2 or len(kernels) != 1:
        return None
    if len(others) != len(members) - 1:
        return None
    # Units, bounds and sums here are those of float32.
    if any(leaves[k].dtype != jnp.float32 for k in members):
        return None
    (kernel,) = kernels
    inputs = []
    for number, leaf in enumerate(leaves):
        if number == kernel:
            # The derivative of the kernel by itself is the identity: the diagonal of ones.
            value = _Value(_as_rows(leaf), True, shape, Vector(1.0, None))
        elif number in others:
            own = Functional(number, None)
            value = _Value(_as_rows(leaf), False, leaf.shape, None, ((Vector(1.0, None), own),))
        else:
            value = None
        inputs.append(value)
    try:
        (weight,) = _evaluated(weights, inputs, kernel)
        return _form(weight, kernel)
    except _Unknown:
        return None


def _as_rows(x: Any) -> jax.Array:
    return jnp.reshape(x, (-1, x.shape[-1]))


def _form(weight: _Value, kernel: int) -> Form:
    diagonal = weight.diagonal
    if diagonal is None or not weight.is_full:
        raise _Unknown
    # s has to be one number of each channel.
    if diagonal.base is not None:
        raise _Unknown
    of_channel = (1, weight.primal.shape[-1])
    bases: list[Any] = []
    terms = []
    for p, q in weight.terms:
        place = _place(bases, p.base)
        # J^T dV has multiples of q, so its base needs a place too.
        own = _place(bases, q.base) if q.leaf == kernel else None
        number = jnp.broadcast_to(p.number, of_channel)
        terms.append(Term(number, place, q.leaf, own))
    scale = jnp.broadcast_to(diagonal.number, of_channel)
    return _in_units(Form(kernel, scale, tuple(bases), tuple(terms), len(weight.primal)))


def _in_units(form: Form) -> Form:
    """Returns the form with bases of entries up to 2, whose inner products keep all bits.

    The powers of two that their channels had are part of the numbers.
    """
    units: list[Any] = []
    powers: list[Any] = []
    for base in form.bases:
        unit, power = (None, 0) if base is None else exact_scaling.in_units(base, 0)
        units.append(unit)
        powers.append(power)
    terms = []
    for term in form.terms:
        # p q^T has one base of each side, so the powers of both are part of its number.
        power = powers[term.place]
        if term.own is not None:
            power = power + powers[term.own]
        number = exact_scaling.times_power(term.number, jnp.asarray(power))
        terms.append(term._replace(number=number))
    return dataclasses.replace(form, bases=tuple(units), terms=tuple(terms))


def _place(bases: list[Any], base: Any) -> int:
    """Returns the place of a base, which is added if it is new."""
    # Identity is enough. One vector in two places costs time only.
    for place, known in enumerate(bases):
        if known is base:
            return place
    bases.append(base)
    return len(bases) - 1


# --- The program of a weight, with its derivative ---


def _evaluated(
    program: jex.ClosedJaxpr,
    inputs: Sequence[_Value | None],
    kernel: int,
) -> list[_Value]:
    """Evaluates a program. None stands for a value that it must not read."""
    jaxpr = program.jaxpr
    values: dict[Any, _Value | None] = {}
    for variable, constant in zip(jaxpr.constvars, program.consts, strict=True):
        # The program may have arrays of the loss among its constants, which no weight reads.
        values[variable] = None if jnp.ndim(constant) else _constant(constant)
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> _Value:
        if isinstance(variable, jex.Literal):
            return _constant(variable.val)
        value = values[variable]
        if value is None:
            raise _Unknown
        return value

    for eqn in jaxpr.eqns:
        operands = [read(variable) for variable in eqn.invars]
        name = eqn.primitive.name
        if name in jaxprs.CALLS:
            body = jaxprs.called_program(eqn.params)
            results = _evaluated(body, operands, kernel)
        else:
            results = [_applied(eqn, operands, kernel)]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _constant(x: Any) -> _Value:
    if jnp.ndim(x):
        raise _Unknown
    return _Value(x, False, ())


def _applied(
    eqn: Any,
    operands: list[_Value],
    kernel: int,
) -> _Value:
    """Returns the result of an equation."""
    name = eqn.primitive.name
    shape = tuple(eqn.outvars[0].aval.shape)
    # A cast to bfloat16 leaves the form: models of bfloat16 keep the gradients.
    if eqn.outvars[0].aval.dtype != jnp.float32:
        raise _Unknown
    if name == "integer_pow" and eqn.params["y"] == 2:
        name = "square"
    if name in _LINEAR:
        value = _linear(_LINEAR[name], *operands)
    elif name == "mul":
        value = _product(*operands)
    elif name == "div":
        x, y = operands
        # x / y is x times the inverse of y, so one rule of products serves both.
        inverse = _entrywise(y, lambda v: 1 / v, lambda v: -1 / jnp.square(v))
        value = _product(x, inverse)
    elif name in _ENTRYWISE:
        value = _entrywise(operands[0], *_ENTRYWISE[name])
    elif name == "max":
        value = _maximum(*operands)
    elif name == "reduce_sum":
        value = _sum(eqn, operands[0], kernel)
    elif name in ("broadcast_in_dim", "reshape", "squeeze"):
        value = operands[0]
        # Values are [n, C] or [1, C] in every shape that passes this check, so nothing moves.
        _check_move(eqn, value, shape)
    else:
        raise _Unknown
    return value._replace(shape=shape)


def _check_move(eqn: Any, x: _Value, shape: tuple[int, ...]) -> None:
    """Raises `_Unknown` unless a value gets a shape in which the axis of channels is the last."""
    if x.shape == shape or not x.shape:
        return
    channels = x.shape[-1]
    # Rows of a kernel would be mixed with its channels.
    if x.is_full or not shape:
        raise _Unknown
    if shape[-1] != channels or math.prod(x.shape) != channels:
        raise _Unknown
    if eqn.primitive.name == "broadcast_in_dim":
        dimensions = eqn.params["broadcast_dimensions"]
        # Another axis of the same length would become that of channels.
        if dimensions[-1] != len(shape) - 1:
            raise _Unknown
    elif math.prod(shape) != channels:
        raise _Unknown


def _sum(eqn: Any, x: _Value, kernel: int) -> _Value:
    """Returns the sums of the channels."""
    axes = tuple(eqn.params["axes"])
    # A sum over some rows only, or over channels, leaves the form.
    if not x.is_full or axes != tuple(range(len(x.shape) - 1)):
        raise _Unknown
    terms = []
    if x.diagonal is not None:
        # The sum over rows of d * dw is the inner product of dw with the base of d.
        functional = Functional(kernel, x.diagonal.base)
        terms.append((Vector(x.diagonal.number, None), functional))
    rows = len(x.primal)
    for p, q in x.terms:
        # A vector without a base has ones in all rows.
        total = rows if p.base is None else p.base.sum(0, keepdims=True)
        vector = Vector(p.number * total, None)
        terms.append((vector, q))
    total = x.primal.sum(0, keepdims=True)
    return _Value(total, False, x.shape[-1:], None, tuple(terms))


def _linear(
    signs: tuple[int, int],
    x: _Value,
    y: _Value | None = None,
) -> _Value:
    """Returns x or -x, or the sum or difference of two values."""
    sign_x, sign_y = signs
    x = x.with_derivative(sign_x * x.primal, Vector(float(sign_x), None))
    if y is None:
        return x
    y = y.with_derivative(sign_y * y.primal, Vector(float(sign_y), None))
    # The sum of two diagonals with different bases is no multiple of one base.
    if x.diagonal is not None and y.diagonal is not None:
        raise _Unknown
    diagonal = x.diagonal if y.diagonal is None else y.diagonal
    is_full = x.is_full or y.is_full
    return _Value(x.primal + y.primal, is_full, x.shape, diagonal, x.terms + y.terms)


def _product(x: _Value, y: _Value) -> _Value:
    primal = x.primal * y.primal
    of_x = _full_like(x, y).with_derivative(primal, y.as_vector)
    of_y = _full_like(y, x).with_derivative(primal, x.as_vector)
    if of_x.diagonal is not None and of_y.diagonal is not None:
        raise _Unknown
    diagonal = of_x.diagonal if of_y.diagonal is None else of_y.diagonal
    return of_x._replace(diagonal=diagonal, terms=of_x.terms + of_y.terms)


def _full_like(x: _Value, y: _Value) -> _Value:
    """Returns a number of each channel as rows, where the other value has rows."""
    if x.is_full or not y.is_full:
        return x
    return x._replace(primal=jnp.broadcast_to(x.primal, y.primal.shape), is_full=True)


def _entrywise(
    x: _Value, function: Callable[[Any], Any], derivative: Callable[[Any], Any]
) -> _Value:
    if x.is_full and function is jnp.square:
        # The derivative has the value itself as its base, which other terms have too.
        return x.with_derivative(jnp.square(x.primal), Vector(2.0, x.primal))
    slope = derivative(x.primal)
    # [n, C] is a base, and [1, C] a number.
    factor = Vector(1.0, slope) if x.is_full else Vector(slope, None)
    return x.with_derivative(function(x.primal), factor)


def _maximum(x: _Value, y: _Value) -> _Value:
    """Returns the larger of a value and a constant."""
    # With a derivative on both sides, each entry would choose its own side.
    if y.terms or y.diagonal is not None:
        raise _Unknown
    constant = y.primal
    # Half of the derivative belongs to each of two equal values, as in JAX.
    half = jnp.float32(0.5)
    return _entrywise(
        x,
        lambda v: jnp.maximum(v, constant),
        lambda v: jnp.where(v == constant, half, (v > constant).astype(v.dtype)),
    )


_LINEAR: Mapping[str, tuple[int, int]] = {
    "add": (1, 1),
    "add_any": (1, 1),
    "sub": (1, -1),
    "neg": (-1, 1),
    "copy": (1, 1),
}
_ENTRYWISE: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "square": (jnp.square, lambda v: 2 * v),
    "rsqrt": (lax.rsqrt, lambda v: -0.5 * lax.rsqrt(v) / v),
    "sqrt": (jnp.sqrt, lambda v: 0.5 * lax.rsqrt(v)),
}


# --- Norms and sums of J^T dV ---


class LowRank(NamedTuple):
    """The terms of J^T dV beside s dV, of each example.

    Attributes:
      of_kernel: [B, C] for each base: J^T dV has the sum of these multiples of the bases.
      of_leaves: [B, C], the gradient of each other leaf by its number.
    """

    of_kernel: list[jax.Array]
    of_leaves: dict[int, jax.Array]


def scaled(form: Form, rule: Conv, g: jax.Array) -> jax.Array:
    """Returns cotangents [B, ...] times s, whose gradient is s dV.

    They are bfloat16 where the platform multiplies no more bits, which takes half of the memory.
    """
    shape = [1] * g.ndim
    # The axis of the outputs. Axis 0 is the batch.
    shape[1 + rule.numbers.out_spec[1]] = -1
    scale = form.scale.reshape(shape)
    product = products.wide(g) * scale
    if products.multiplied_bits() == products.BFLOAT16_BITS:
        return _multiplied(product).astype(jnp.bfloat16)
    return product


def low_rank(
    form: Form,
    rule: Conv,
    record: jax.Array,
    g: jax.Array,
    scaled_g: jax.Array,
) -> tuple[LowRank, jax.Array, jax.Array, jax.Array]:
    """Returns the terms of J^T dV beside s dV, and what they add to the squared norm of s dV.

    Args:
      form: The Jacobian of the weight.
      rule: The rule of the convolution where the weight meets data.
      record, g: The data and the cotangents, [B, ...].
      scaled_g: The cotangents times s.

    Returns:
      The terms, and [B] each: what they add, E, and the error of the sum, as in `rounding`.
    """
    # [B, H, W, channels] and [B, OH, OW, C]
    x, cotangents = rule.pictures(record, products.wide(g))
    _, of_scaled = rule.pictures(record, scaled_g)
    # The norm of s dV is that of factors with the bits that are multiplied.
    x, of_scaled = _multiplied(x), _multiplied(of_scaled)
    outputs = [_applied_to(rule, x, base) for base in form.bases]
    terms = form.with_terms([(output * cotangents).sum((1, 2)) for output in outputs])
    eps = rounding.eps(jnp.float32)
    rows = form.rows
    # M of `rounding` for each channel: sum_t |u_t||w_t|, with |u_t| from a window of squares.
    squares = jnp.square(x).sum(3, keepdims=True)
    windows = _window_sums(rule, squares)
    products_of_lengths = rounding.root(windows) * jnp.abs(of_scaled)
    lengths = products_of_lengths.sum((1, 2))  # [B, C]
    # Only accelerators have norms of this form. They add several axes in blocks too.
    additions = rounding.additions(rows) + rounding.additions(rule.positions)
    crossed = []
    errors = []
    for output, base in zip(outputs, form.bases, strict=True):
        crossed.append((output * of_scaled).sum((1, 2)))
        rounded = additions * eps
        if base is not None:
            rounded += _rounding_of_base()
        # By Cauchy and Schwarz, <p, s dV> is off by at most |p| M for each rounding.
        errors.append(rounded * rounding.root(_inner(base, base, rows)) * lengths)
    return terms, *_added_squares(form, terms, crossed, errors)


def of_column_sums(
    form: Form,
    sums: jax.Array,
) -> tuple[LowRank, jax.Array, jax.Array, jax.Array]:
    """Returns the terms of J^T dV beside s dV, and its squared norm.

    Args:
      form: The Jacobian of the weight.
      sums: [2 + n, B, C]. The sums over the rows of dV^2, of dV, and of dV times the bases that are
        no ones, all of one dV.

    Returns:
      The terms, and [B] each: the squared norm, E, and the error of the sum, as in `rounding`.
    """
    squares, of_ones, *others = sums
    of_bases = iter(others)
    products = [of_ones if base is None else next(of_bases) for base in form.bases]
    terms = form.with_terms(products)
    # ||s dV||^2 of each channel, [B, C].
    squares = jnp.square(form.scale) * squares
    lengths = rounding.root(squares)
    # A kernel adds the rows one after the other, and then parts of them.
    rounded = (form.rows + 64) * rounding.eps(jnp.float32)
    crossed = [form.scale * product for product in products]
    errors = []
    for base in form.bases:
        length = rounding.root(_inner(base, base, form.rows))
        # The absolute terms of <p, s dV> add up to at most |p| |s dV|.
        errors.append(rounded * length * lengths)
    added, spread, error = _added_squares(form, terms, crossed, errors)
    of_scaled = squares.sum(1)
    return terms, of_scaled + added, spread + rounded * of_scaled, error


def _added_squares(
    form: Form,
    terms: LowRank,
    crossed: Sequence[jax.Array],
    errors: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what terms add to the squared norm of s dV, E of it, and the error of the sum, [B].

    Args:
      form: The Jacobian of the weight.
      terms: The terms of J^T dV beside s dV.
      crossed: The inner products of the bases with s dV, [B, C] each.
      errors: Bounds on their errors, [B, C] each.
    """
    eps = rounding.eps(jnp.float32)
    added = spread = longest = jnp.zeros(len(crossed[0]), jnp.float32)
    for j, (multiple, base) in enumerate(zip(terms.of_kernel, form.bases, strict=True)):
        length = rounding.root(_inner(base, base, form.rows))
        size = jnp.abs(multiple) * length
        summands = [2 * multiple * crossed[j]]
        # The sum over r and s is symmetric, so each pair stands once, twice as large.
        for k, other in enumerate(form.bases[: j + 1]):
            twice = 1 if k == j else 2
            product = multiple * terms.of_kernel[k]
            summands.append(twice * product * _inner(base, other, form.rows))
        # An error of <q, s dV> enters through 2 b <q, s dV>.
        of_products = 2 * jnp.abs(multiple) * errors[j]
        spread = spread + of_products.sum(1)
        for summand in summands:
            added = added + summand.sum(1)
            spread = spread + _EVALUATED * eps * jnp.abs(summand).sum(1)
        # The triangle inequality over all terms.
        longest = longest + rounding.root(jnp.square(size).sum(1))
    # Other leaves are other coordinates of the gradient, so their squares add up.
    for term in terms.of_leaves.values():
        squares = jnp.square(term).sum(1)
        added = added + squares
        longest = longest + rounding.root(squares)
    return added, spread, rounding.of_sum(1, jnp.float32) * longest


# Roundings of a term of the quadratic form: its inner products and their sums over channels.
_EVALUATED = 128


def _rounding_of_base() -> float:
    """Returns the relative rounding of a base to the bits that are multiplied. Ones have none."""
    bits = products.multiplied_bits()
    # Half a unit of the last stored bit, relative to a significand of at least 1.
    return 0.0 if bits is None else 2.0 ** -(1 + bits)


def _inner(base: Any, other: Any, rows: int) -> Any:
    """Returns the inner products [C] of two bases."""
    if base is None and other is None:
        return jnp.float32(rows)
    if base is None or other is None:
        return (other if base is None else base).sum(0, keepdims=True)
    return (base * other).sum(0, keepdims=True)


def scaled_sum(form: Form, of_weight: jax.Array) -> jax.Array:
    """Returns a sum of dV, in the shape of the weight, times s."""
    rows = form.scale * _as_rows(of_weight)
    return rows.reshape(of_weight.shape)


def weighted_sum(
    form: Form,
    of_scaled: jax.Array,
    sums: LowRank,
) -> dict[int, jax.Array]:
    """Returns the gradients of the leaves by their numbers.

    Args:
      form: The Jacobian of the weight.
      of_scaled: The sum of s dV times factors, in the shape of the weight.
      sums: The sums of the other terms times factors, [C] each.
    """
    shape = of_scaled.shape
    grad = of_scaled.reshape(-1, shape[-1])
    for multiples, base in zip(sums.of_kernel, form.bases, strict=True):
        multiple = multiples.reshape(1, -1)
        if base is not None:
            # b_r q_r, [n, C]. A base of ones is the same number in all rows.
            multiple = multiple * base
        grad = grad + multiple
    return {form.kernel: grad.reshape(shape), **sums.of_leaves}


def _multiplied(x: jax.Array) -> jax.Array:
    """Returns x in float32, rounded to the bits that the platform multiplies."""
    x = x.astype(jnp.float32)
    bits = products.multiplied_bits()
    if bits is None:
        return x
    rounded: jax.Array = lax.reduce_precision(x, products.EXPONENT_BITS, bits)
    return rounded


def _applied_to(rule: Conv, x: jax.Array, base: Any) -> jax.Array:
    """Returns p^T u_t of all positions, [B, OH, OW, C], or [B, OH, OW, 1] for ones."""
    if base is None:
        # The product with ones is the sum over the channels and the window.
        return _window_sums(rule, x.sum(3, keepdims=True))
    kernel = rule.window_first(base.reshape(rule.weight_shape))
    return lax.conv_general_dilated(
        x,
        _multiplied(kernel),
        rule.strides,
        rule.padding,
        rhs_dilation=rule.kernel_dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=products.settled_precision(),
    )


def _window_sums(rule: Conv, x: jax.Array) -> jax.Array:
    """Returns the sums of the windows of a picture [B, H, W, 1]."""
    sums: jax.Array = lax.reduce_window(
        x,
        jnp.zeros((), x.dtype),
        lax.add,
        window_dimensions=(1, *rule.window, 1),
        window_strides=(1, *rule.strides, 1),
        padding=((0, 0), *rule.padding, (0, 0)),
        window_dilation=(1, *rule.kernel_dilation, 1),
    )
    return sums
