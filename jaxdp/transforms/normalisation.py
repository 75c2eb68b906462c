"""Which parameters scale and shift a normalised value, by the program of the model, not by names.

A value is normalised if it is n = (x - a) r in one of two ways:

* by its own statistics: r is the inverse root of a sum of squares of x, and a is a linear statistic
  of x or absent. LayerNorm, GroupNorm, InstanceNorm and RMSNorm do this.
* by stored statistics: a is a vector without data, and r is the inverse root of one, as in a frozen
  BatchNorm.

The scale is the first vector of parameters that multiplies n, and the offset is the first that is
added then. The order of the factors does not matter: r may meet the scale before x does, and the
sum may be x r + (offset - a r).

What is not found, and why:

* A factor of one element is a temperature.
* Standardised or spectrally normalised weights have a root of statistics of a parameter, not of
  data.
* A norm after which a product of matrices or a nonlinear function comes first. So the temperature
  of an attention with normalised queries and keys is not found, but the scales of a LayerNorm of
  queries and keys are.

The walk follows how each value depends on earlier ones. It reads no number except literals.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.extend.core as jex

from jaxdp.transforms.jaxprs import inner_program, scan_parts

Role = Literal["scale", "offset"]
Statistics = Literal["own", "stored"]

# Primitives that keep every number, up to its sign, at its place or at another.
_MOVES = {
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "rev",
    "neg",
    "real",
    "stop_gradient",
    "reduce_precision",
    "optimization_barrier",
    "sharding_constraint",
    "device_put",
    "pvary",
    "layout_constraint",
}
# Primitives whose result has a part of the numbers, or others beside them.
_PARTS = {"slice", "dynamic_slice", "gather", "pad", "concatenate", "dynamic_update_slice"}
_SUMS = {"reduce_sum", "reduce_window_sum", "psum"}
_ELEMENTWISE = {
    "add",
    "add_any",
    "sub",
    "mul",
    "div",
    "max",
    "min",
    "clamp",
    "select_n",
    "abs",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "tanh",
    "logistic",
    "sqrt",
    "rsqrt",
    "square",
    "integer_pow",
    "pow",
}
# The exponents e of primitives that compute x**e.
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5}
# Primitives whose inside is not visible here, by a part of their names.
_OPAQUE = ("pallas_call", "ffi_call", "custom_call", "callback")


class Use(NamedTuple):
    """How a parameter meets a normalised value."""

    role: Role
    statistics: Statistics


class Affine(NamedTuple):
    """The result of `normalisation_leaves`. Leaves are counted from 0.

    Attributes:
      uses: {leaf: how it meets a normalised value}.
      last: The leaves after which no other operation than sums and moves comes before the first
          output.
      opaque: The leaves that enter an operation whose inside is not visible, such as a kernel.
    """

    uses: dict[int, Use]
    last: frozenset[int]
    opaque: frozenset[int]


class _Parameter(NamedTuple):
    """An elementwise function of one leaf, or of a slice of it.

    Attributes:
      leaf: The number of the leaf.
      own: Its dimensions before it was broadcast, without those of length one.
    """

    leaf: int
    own: tuple[int, ...]


class _Stored(NamedTuple):
    """A power of the root of a stored statistic, such as 1 / sqrt(variance + epsilon).

    Attributes:
      power: 1 or -1.
      scale: The parameter that multiplies it.
      shifted: Whether another vector, such as a stored mean, multiplies it.
    """

    power: int
    scale: _Parameter | None = None
    shifted: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """A value that does not depend on data.

    Attributes:
      shape: Its shape.
      leaves: The leaves that it depends on.
      parameter: The one leaf of which it is an elementwise function.
      plain: Whether it is an elementwise function of leaves and constants, not a statistic of one.
      number: The number that all entries are known to be.
      stored: What it is to the root of a stored statistic.
    """

    shape: tuple[int, ...]
    leaves: frozenset[int] = frozenset()
    parameter: _Parameter | None = None
    plain: bool = True
    number: float | None = None
    stored: _Stored | None = None

    @property
    def is_vector(self) -> bool:
        return math.prod(self.shape) > 1 and self.plain


class _Fact(NamedTuple):
    """What a value is to an earlier one, its origin x.

    It is a product of powers of x and of statistics of x, times a scale, plus an offset.

    Attributes:
      degree: It grows with this power of x.
      pointwise: Whether x is a factor itself, and not only statistics of x.
      rooted: Whether a root of a sum of squares is a factor.
      scale, offset: The parameters, if there are any.
      centred: False while a value with stored statistics lacks its mean.
      statistics: Whether it is normalised by its own statistics or by stored ones.
    """

    degree: float
    pointwise: bool
    rooted: bool = False
    scale: _Parameter | None = None
    offset: _Parameter | None = None
    centred: bool = True
    statistics: Statistics = "own"

    @property
    def is_normalised(self) -> bool:
        return self.degree == 0 and self.rooted

    @property
    def is_bare(self) -> bool:
        """Whether it has neither a scale nor an offset."""
        return self.scale is None and self.offset is None


_Facts = Mapping[object, _Fact]


class _Data:
    """A value that depends on data. It is the origin of what is computed from it.

    Attributes:
      facts: What it is to each origin. To itself it is x^1.
      last: The leaves of the last layer before it.
      centred: Whether a vector without data was subtracted.
    """

    def __init__(
        self,
        facts: _Facts | None = None,
        *,
        last: frozenset[int] = frozenset(),
        centred: bool = False,
    ):
        self.facts = {**(facts or {}), self: _Fact(1, pointwise=True)}
        self.last = last
        self.centred = centred


_Value = _Constant | _Data


def normalisation_leaves(program: jex.ClosedJaxpr, count: int) -> Affine:
    """Returns the parameters of normalisation layers, from the program of a model.

    Args:
      program: `jax.make_jaxpr(apply_fn)(params, images)`.
      count: The number of leaves of params, which are the first inputs. The others are data.
    """
    inputs: list[_Value] = []
    for number, variable in enumerate(program.jaxpr.invars):
        is_leaf = number < count
        inputs.append(_leaf(number, variable.aval.shape) if is_leaf else _Data())
    walk = _Walk({}, set())
    outputs = walk.evaluate(program, inputs)
    # The first output is the prediction, and the others are state.
    last = _last(*outputs[:1])
    return Affine(walk.uses, last, frozenset(walk.opaque))


def _leaf(number: int, shape: Sequence[int]) -> _Constant:
    parameter = _Parameter(number, _long(shape))
    return _Constant(tuple(shape), frozenset([number]), parameter)


def _long(shape: Iterable[int]) -> tuple[int, ...]:
    """Returns the dimensions that are longer than one."""
    return tuple(n for n in shape if n != 1)


@dataclasses.dataclass
class _Walk:
    """A walk over the equations of a program, which collects the `uses` of leaves."""

    uses: dict[int, Use]
    opaque: set[int]

    def evaluate(
        self,
        program: jex.ClosedJaxpr,
        inputs: Sequence[_Value],
    ) -> list[_Value]:
        """Follows the equations of a program and of the programs inside."""
        jaxpr = program.jaxpr
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {v: _Constant(tuple(v.aval.shape)) for v in jaxpr.constvars}

        def value(variable: Any) -> _Value:
            if isinstance(variable, jex.Literal):
                return _literal(variable)
            return known[variable]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [value(v) for v in eqn.invars])
            for result in results:
                if isinstance(result, _Data):
                    self._note(result)
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _note(self, value: _Data) -> None:
        """Notes the scale and the offset of a normalised value."""
        for fact in value.facts.values():
            if not (fact.is_normalised and fact.pointwise and fact.centred):
                continue
            # A leaf that meets several values counts by its first one.
            if fact.scale is not None:
                self.uses.setdefault(fact.scale.leaf, Use("scale", fact.statistics))
            if fact.offset is not None:
                self.uses.setdefault(fact.offset.leaf, Use("offset", fact.statistics))

    def _results(
        self,
        eqn: Any,
        operands: list[_Value],
    ) -> list[_Value]:
        """Returns the values of the results of an equation."""
        name = eqn.primitive.name
        shapes = [tuple(v.aval.shape) for v in eqn.outvars]
        constants = [x for x in operands if isinstance(x, _Constant)]
        if any(known in name for known in _OPAQUE):
            self.opaque.update(*(x.leaves for x in constants))
            return [_Data() for _ in shapes]
        body = inner_program(name, eqn.params)
        if body is not None:
            return self.evaluate(body, operands)
        if name == "scan":
            return self._loop(eqn.params["jaxpr"], scan_parts(eqn, operands), shapes)
        if name == "while":
            first = eqn.params["cond_nconsts"]
            start = first + eqn.params["body_nconsts"]
            constants_and_state = (operands[first:start], operands[start:], list[_Value]())
            return self._loop(eqn.params["body_jaxpr"], constants_and_state, shapes)
        if name == "cond":  # which branch is taken is not known, so no fact is kept
            branches = [self.evaluate(branch, operands[1:]) for branch in eqn.params["branches"]]
            return [_Data(last=_last(*results)) for results in zip(*branches, strict=True)]
        if len(constants) == len(operands):
            return [_constant(eqn, constants, shape) for shape in shapes]
        if len(shapes) == 1:
            return [_data(eqn, operands)]
        return [_Data() for _ in shapes]

    def _loop(
        self,
        body: jex.ClosedJaxpr,
        parts: Sequence[list[_Value]],
        shapes: Any,
    ) -> list[_Value]:
        """Follows one iteration of a loop with (constants, carry, scanned arrays)."""
        constants, carry, scanned = parts
        operands = [*constants, *carry, *scanned]
        without_data = [x for x in operands if isinstance(x, _Constant)]
        if len(without_data) == len(operands):
            leaves = frozenset[int]().union(*(x.leaves for x in without_data))
            return [_Constant(shape, leaves, plain=False) for shape in shapes]
        # A carry is data, also if its first value is not. Later turns give it others.
        slices = [_slice(x) if isinstance(x, _Constant) else _Data() for x in scanned]
        carries = [_Data() for _ in carry]
        results = self.evaluate(body, [*constants, *carries, *slices])
        return [_Data(last=_last(x)) for x in results]


def _literal(variable: Any) -> _Constant:
    shape = tuple(variable.aval.shape)
    is_number = not shape and _is_real(variable)
    return _Constant(shape, number=float(variable.val) if is_number else None)


def _is_real(variable: Any) -> bool:
    return getattr(variable.aval.dtype, "kind", "V") in "fiu"


def _slice(x: _Constant) -> _Constant:
    """Returns a slice of a stacked array."""
    shape = x.shape[1:]
    parameter = x.parameter and _Parameter(x.parameter.leaf, _long(shape))
    return dataclasses.replace(x, shape=shape, parameter=parameter)


def _last(*values: _Value) -> frozenset[int]:
    """Returns the leaves of the last layers before values."""
    of_data = [x.last for x in values if isinstance(x, _Data)]
    return frozenset[int]().union(*of_data)


# --- Values without data ---


def _constant(
    eqn: jex.JaxprEqn,
    operands: list[_Constant],
    shape: tuple[int, ...],
) -> _Constant:
    """Returns the result of an equation without data."""
    name = eqn.primitive.name
    leaves = frozenset[int]().union(*(x.leaves for x in operands))
    if name in _MOVES:
        return dataclasses.replace(operands[0], shape=shape)
    if name in _PARTS and operands:
        whole = operands[0].parameter
        part = whole and _Parameter(whole.leaf, _long(shape))
        return _Constant(shape, leaves, part, plain=operands[0].plain)
    if name not in _ELEMENTWISE:
        # What mixes entries of a leaf, such as a sum, is a statistic of it.
        return _Constant(shape, leaves, plain=not leaves)
    stored = _stored(name, _exponent(eqn, operands), operands)
    if stored is not None and stored.shifted and name in ("add", "sub"):
        # offset - mean * r
        (offset,) = [x for x in operands if x.stored is None]
        parameter = offset.parameter
    else:
        with_leaves = [x for x in operands if x.leaves]
        parameter = with_leaves[0].parameter if len(with_leaves) == 1 else None
    plain = all(x.plain for x in operands)
    return _Constant(shape, leaves, parameter, plain, stored=stored)


def _exponent(eqn: jex.JaxprEqn, operands: Sequence[_Value]) -> float | None:
    """Returns e for an operation x**e."""
    name = eqn.primitive.name
    if name == "pow":
        exponent = operands[1]
        if isinstance(exponent, _Constant):
            return exponent.number
        return None
    if name == "integer_pow":
        return float(eqn.params["y"])
    return _POWERS.get(name)


def _stored(
    name: str,
    exponent: float | None,
    operands: list[_Constant],
) -> _Stored | None:
    """Returns what the result of an elementwise operation is to the root of a stored statistic."""
    if exponent is not None:
        return _stored_power(operands[0], exponent)
    if len(operands) != 2:
        return None
    first, second = operands
    if first.stored is not None and second.stored is None:
        root = first
        other = second
    elif second.stored is not None and first.stored is None:
        root = second
        other = first
    else:
        return None
    stored = root.stored
    assert stored is not None
    if name in ("add", "sub"):
        if stored.shifted:  # offset - mean * r
            if other.parameter is not None:
                return stored
            return None
        if stored.power == 1 and not other.leaves:  # root + epsilon
            return stored
        return None
    if name == "max" and not other.leaves:  # the smallest root that is allowed
        return stored
    if name == "div" and root is second and stored.power == 1:
        stored = _Stored(-1)
    elif name != "mul":
        return None
    if not other.is_vector:
        return stored
    if other.parameter is not None and stored.scale is None and not stored.shifted:
        return stored._replace(scale=other.parameter)
    # A second vector, which is the mean if the offset is added later.
    return stored._replace(shifted=True)


def _stored_power(x: _Constant, exponent: float) -> _Stored | None:
    """Returns what x**exponent is to the root of a stored statistic.

    For example, 1 / sqrt(variance) is the power -1, and so is the reciprocal of sqrt(variance).
    """
    if x.stored is not None:
        if exponent == -1:
            return _Stored(-x.stored.power)
        return None
    # A root of a vector without data is taken for that of a stored variance.
    is_root = abs(exponent) == 0.5 and x.is_vector
    if is_root:
        return _Stored(int(2 * exponent))
    return None


# --- Values with data ---


def _data(eqn: jex.JaxprEqn, operands: list[_Value]) -> _Value:
    """Returns the result of an equation with data."""
    name = eqn.primitive.name
    first = operands[0]
    data = [x for x in operands if isinstance(x, _Data)]
    constants = [x for x in operands if isinstance(x, _Constant)]
    if name in _MOVES:
        return data[0]
    if name in _SUMS:
        return _reduced(data[0])
    if name in _PARTS:
        # Statistics of x are those of all of x, so they are not moved.
        facts = data[0].facts.items()
        statistics = {k: fact for k, fact in facts if not fact.pointwise}
        return _Data(statistics, last=_last(*data))
    exponent = _exponent(eqn, operands)
    if exponent is not None and isinstance(first, _Data):
        return _Data(_powers(first.facts, exponent))
    if name == "abs":
        return _Data(_powers(data[0].facts, 1))
    if name in ("dot_general", "conv_general_dilated"):
        return _contracted(eqn, data, constants)
    if name in ("mul", "div"):
        if len(data) == 2:
            return _product(data[0], data[1], 1 if name == "mul" else -1)
        if name == "div" and isinstance(first, _Constant):
            reciprocal = _Data(_powers(data[0].facts, -1))
            return _scaled(reciprocal, first, name="mul")
        return _scaled(data[0], constants[0], name=name)
    if name in ("add", "sub", "add_any"):
        if len(data) == 2:
            return _sum(*data)
        return _shifted(data[0], constants[0])
    if name == "select_n":  # the first operand selects among the others
        return _one_of([x for x in data if x is not first], constants)
    if name in ("max", "min", "clamp"):
        return _one_of(data, constants)
    return _Data()


def _bare(facts: _Facts) -> dict[object, _Fact]:
    """Returns the facts without a scale and an offset."""
    return {origin: fact for origin, fact in facts.items() if fact.is_bare}


def _powers(facts: _Facts, exponent: float) -> dict[object, _Fact]:
    """Returns the facts about a power. A root of a sum of squares makes them rooted."""

    def power(fact: _Fact) -> _Fact:
        # Of degree 2 without x itself: a sum of squares, such as a variance.
        is_root = abs(exponent) == 0.5 and fact.degree == 2 and not fact.pointwise
        return fact._replace(degree=fact.degree * exponent, rooted=fact.rooted or is_root)

    return {origin: power(fact) for origin, fact in _bare(facts).items()}


def _reduced(x: _Data) -> _Data:
    """Returns a sum over axes of a value."""
    statistics = {}
    for origin, fact in _bare(x.facts).items():
        # A statistic of degree 0, such as a sum of normalised values, tells nothing of the scale of
        # x.
        if fact.degree:
            statistics[origin] = fact._replace(pointwise=False)
    return _Data(statistics, last=x.last)


def _contracted(
    eqn: jex.JaxprEqn,
    data: list[_Data],
    constants: list[_Constant],
) -> _Data:
    """Returns a product of matrices or a convolution."""
    if len(data) == 2:
        # A product of two values with data is a sum of their products, such as x^T x.
        return _reduced(_product(data[0], data[1], 1))
    factor = constants[0]
    if not factor.leaves:  # a constant matrix adds up entries, such as those of a group
        return _reduced(data[0])
    is_product = eqn.primitive.name == "dot_general"
    if is_product and not eqn.params["dimension_numbers"][0][0]:  # nothing is contracted
        return _scaled(data[0], factor, name="mul")
    # Weights mix the entries, so nothing is known of the result by what came before.
    return _Data(last=factor.leaves)


def _product(
    a: _Data,
    b: _Data,
    sign: int,
) -> _Data:
    """Returns a b, or a / b with sign -1."""
    facts: dict[object, _Fact] = {}
    for origin, one, other in _shared(a, b):
        has_offset = one.offset is not None or other.offset is not None
        two_scales = one.scale is not None and other.scale is not None
        divides_by_scale = sign < 0 and other.scale is not None
        if has_offset or two_scales or divides_by_scale:
            continue
        facts[origin] = one._replace(
            degree=one.degree + sign * other.degree,
            pointwise=one.pointwise or other.pointwise,
            rooted=one.rooted or other.rooted,
            scale=one.scale or other.scale,
        )
    last = set()
    for fact in facts.values():
        if fact.is_normalised and fact.scale is not None:
            last.add(fact.scale.leaf)
    return _Data(facts, last=frozenset(last))


def _sum(a: _Data, b: _Data) -> _Data:
    """Returns a + b, or a - b."""
    facts: dict[object, _Fact] = {}
    for origin, one, other in _shared(a, b):
        scales_differ = _leaf_of(one.scale) != _leaf_of(other.scale)
        two_offsets = one.offset is not None and other.offset is not None
        if one.degree != other.degree or scales_differ or two_offsets:
            continue
        facts[origin] = one._replace(
            pointwise=one.pointwise or other.pointwise,
            rooted=one.rooted and other.rooted,
            offset=one.offset or other.offset,
        )
    return _Data(facts, last=a.last | b.last)


def _shared(
    a: _Data,
    b: _Data,
) -> Iterator[tuple[object, _Fact, _Fact]]:
    """Yields (origin, fact of a, fact of b) for the origins of both."""
    for origin, fact in a.facts.items():
        if origin in b.facts:
            yield origin, fact, b.facts[origin]


def _leaf_of(parameter: _Parameter | None) -> int | None:
    if parameter is None:
        return None
    return parameter.leaf


def _scaled(
    x: _Data,
    factor: _Constant,
    *,
    name: str,
) -> _Data:
    """Returns x times a value without data ("mul"), or x divided by it ("div")."""
    last = x.last | factor.leaves
    stored = factor.stored
    power = -1 if name == "mul" else 1
    if stored is not None and not stored.shifted and stored.power == power:
        fact = _Fact(
            degree=0,
            pointwise=True,
            rooted=True,
            scale=stored.scale,
            centred=x.centred,
            statistics="stored",
        )
        return _Data({x: fact}, last=last)
    is_temperature = factor.parameter is not None and not factor.parameter.own
    if not factor.leaves or is_temperature:
        return _Data(x.facts, last=last, centred=x.centred)
    # A scale multiplies. What divides by parameters is another layer.
    if factor.parameter is None or name == "div":
        return _Data(last=last)
    facts = {}
    for origin, fact in _bare(x.facts).items():
        facts[origin] = fact._replace(scale=factor.parameter)
    return _Data(facts, last=last, centred=x.centred)


def _shifted(x: _Data, term: _Constant) -> _Data:
    """Returns x plus or minus a value without data."""
    if term.number == 0:
        return x
    has_mean = term.stored is not None and term.stored.shifted  # offset - mean * r
    facts: dict[object, _Fact] = {}
    for origin, fact in x.facts.items():
        if fact.is_normalised:
            if _fits(fact, term.parameter):
                centred = fact.centred or has_mean
                facts[origin] = fact._replace(offset=term.parameter, centred=centred)
            continue
        # A small number under a root, such as epsilon, keeps what the root is.
        is_square = fact.degree >= 2 and not term.shape
        if not term.leaves and (is_square or not fact.pointwise):
            facts[origin] = fact
    is_mean = term.is_vector and term.stored is None
    return _Data(facts, last=x.last | term.leaves, centred=is_mean)


def _fits(fact: _Fact, offset: _Parameter | None) -> bool:
    """Returns whether a parameter can be the offset.

    It has the size of the scale, or is a vector if there is no scale.
    """
    if offset is None or fact.offset is not None:
        return False
    if fact.scale is None:
        return len(offset.own) == 1
    return math.prod(offset.own) == math.prod(fact.scale.own)


def _one_of(data: Sequence[_Data], constants: Sequence[_Constant]) -> _Data:
    """Returns one of several values at each place.

    An example is the larger one of a variance and the smallest that is allowed. What all values
    are to an origin, the result is too.
    """
    if not data or any(x.leaves for x in constants):
        return _Data(last=_last(*data))
    first = data[0]
    facts: dict[object, _Fact] = {}
    for origin, fact in first.facts.items():
        is_shared = all(x.facts.get(origin) == fact for x in data)
        if is_shared and not fact.pointwise:
            facts[origin] = fact
    return _Data(facts, last=_last(*data))
