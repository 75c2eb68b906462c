"""Which parameters scale and shift a normalised value. The program of the model shows them, names
do not count.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.extend.core as jex

from jaxdp.transforms.jaxprs import inner_program, scan_parts

Role = Literal["scale", "offset"]
Statistics = Literal["own", "stored"]

# Primitives that keep every number, at its place or at another.
_MOVES = {
    *(
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
    ),
    *(
        "rev",
        "neg",
        "real",
        "stop_gradient",
        "reduce_precision",
        "optimization_barrier",
        "sharding_constraint",
    ),
    *("device_put", "pvary", "layout_constraint"),
}
_PARTS = {"slice", "dynamic_slice", "gather", "pad", "concatenate", "dynamic_update_slice"}
_SUMS = {"reduce_sum", "reduce_window_sum", "psum"}
_ELEMENTWISE = {
    *(
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
    ),
    *("log1p", "tanh", "logistic", "sqrt", "rsqrt", "square", "integer_pow", "pow"),
}
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5}
# Primitives whose inside is not visible here.
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
    """An elementwise function of one leaf, or of a slice of it."""

    leaf: int
    own: tuple[int, ...]  # its dimensions before it was broadcast, without those of length one


class _Stored(NamedTuple):
    """A power of the root of a stored statistic."""

    power: int  # 1 or -1
    scale: _Parameter | None = None  # the parameter that multiplies it
    shifted: bool = False  # whether another vector, such as a stored mean, multiplies it


@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """A value that does not depend on data."""

    shape: tuple[int, ...]
    leaves: frozenset[int] = frozenset()
    parameter: _Parameter | None = None
    plain: bool = True  # an elementwise function of a leaf or a constant, not a statistic of one
    number: float | None = None  # if all entries are known to be this number
    stored: _Stored | None = None

    @property
    def is_vector(self) -> bool:
        return math.prod(self.shape) > 1 and self.plain


class _Fact(NamedTuple):
    """What a value is to an earlier one, its origin x: a product of powers of x and of statistics
    of x.
    """

    degree: float  # it grows with this power of x
    pointwise: bool  # whether x is a factor itself, and not only statistics of x
    rooted: bool = False  # whether a root of a sum of squares is a factor
    scale: _Parameter | None = None
    offset: _Parameter | None = None
    centred: bool = True  # False while a value with stored statistics lacks its mean
    statistics: Statistics = "own"

    @property
    def is_normalised(self) -> bool:
        return self.degree == 0 and self.rooted


_Facts = Mapping[object, _Fact]


class _Data:
    """A value that depends on data. It is the origin of what is computed from it."""

    def __init__(
        self,
        facts: _Facts | None = None,
        *,
        last: frozenset[int] = frozenset(),
        centred: bool = False,
    ):
        self.facts = {**(facts or {}), self: _Fact(1, pointwise=True)}
        self.last = last  # the leaves of the last layer
        self.centred = centred  # whether a vector without data was subtracted


_Value = _Constant | _Data


def normalisation_leaves(program: jex.ClosedJaxpr, count: int) -> Affine:
    """Returns the parameters of normalisation layers, from the program of a model.

    Args:
      program: `jax.make_jaxpr(apply_fn)(params, images)`.
      count: The number of leaves of params, which are the first inputs. The others are data.
    """
    shapes = [v.aval.shape for v in program.jaxpr.invars]
    leaves = [_leaf(number, shape) for number, shape in enumerate(shapes[:count])]
    walk = _Walk({}, set())
    outputs = walk.evaluate(program, [*leaves, *(_Data() for _ in shapes[count:])])
    last = outputs[0].last if outputs and isinstance(outputs[0], _Data) else frozenset[int]()
    return Affine(walk.uses, last, frozenset(walk.opaque))


def _leaf(number: int, shape: Sequence[int]) -> _Constant:
    return _Constant(tuple(shape), frozenset([number]), _Parameter(number, _long(shape)))


def _long(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


@dataclasses.dataclass
class _Walk:
    uses: dict[int, Use]
    opaque: set[int]

    def evaluate(self, program: jex.ClosedJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        """Follows the equations of a program and of the programs inside."""
        jaxpr = program.jaxpr
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {v: _Constant(tuple(v.aval.shape)) for v in jaxpr.constvars}

        def value(variable: Any) -> _Value:
            return _literal(variable) if isinstance(variable, jex.Literal) else known[variable]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [value(v) for v in eqn.invars])
            for result in results:
                self._note(result)
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _note(self, value: _Value) -> None:
        """Notes the scale and the offset of a normalised value."""
        for fact in () if isinstance(value, _Constant) else value.facts.values():
            if fact.is_normalised and fact.pointwise and fact.centred:
                for role, parameter in (("scale", fact.scale), ("offset", fact.offset)):
                    if parameter is not None:
                        self.uses.setdefault(parameter.leaf, Use(role, fact.statistics))  # type: ignore[arg-type]

    def _results(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        name, shapes = eqn.primitive.name, [tuple(v.aval.shape) for v in eqn.outvars]
        if any(known in name for known in _OPAQUE):
            self.opaque.update(*(x.leaves for x in operands if isinstance(x, _Constant)))
            return [_Data() for _ in shapes]
        if (body := inner_program(name, eqn.params)) is not None:
            return self.evaluate(body, operands)
        if name == "scan":
            return self._loop(eqn.params["jaxpr"], scan_parts(eqn, operands), shapes)
        if name == "while":
            first = eqn.params["cond_nconsts"]
            start = first + eqn.params["body_nconsts"]
            return self._loop(
                eqn.params["body_jaxpr"], (operands[first:start], operands[start:], []), shapes
            )
        if name == "cond":
            every = [self.evaluate(branch, operands[1:]) for branch in eqn.params["branches"]]
            return [_Data(last=_last(*results)) for results in zip(*every, strict=True)]
        if all(isinstance(x, _Constant) for x in operands):
            return [_constant(eqn, operands, shape) for shape in shapes]  # type: ignore[arg-type]
        results = [_data(eqn, operands)] if len(shapes) == 1 else [_Data() for _ in shapes]
        return list(results)

    def _loop(
        self, body: jex.ClosedJaxpr, parts: Sequence[list[_Value]], shapes: Any
    ) -> list[_Value]:
        """Follows one iteration of a loop with (constants, carry, scanned arrays)."""
        constants, carry, scanned = parts
        if all(isinstance(x, _Constant) for part in parts for x in part):
            leaves = frozenset[int]().union(*(x.leaves for part in parts for x in part))  # type: ignore[union-attr]
            return [_Constant(shape, leaves, plain=False) for shape in shapes]
        slices = [_slice(x) if isinstance(x, _Constant) else _Data() for x in scanned]
        results = self.evaluate(body, [*constants, *(_Data() for _ in carry), *slices])
        return [_Data(last=_last(x)) for x in results]


def _literal(variable: Any) -> _Constant:
    shape = tuple(variable.aval.shape)
    return _Constant(
        shape, number=float(variable.val) if not shape and _is_real(variable) else None
    )


def _is_real(variable: Any) -> bool:
    return getattr(variable.aval.dtype, "kind", "V") in "fiu"


def _slice(x: _Constant) -> _Constant:
    """Returns a slice of a stacked array."""
    parameter = x.parameter and _Parameter(x.parameter.leaf, _long(x.shape[1:]))
    return dataclasses.replace(x, shape=x.shape[1:], parameter=parameter)


def _last(*values: _Value) -> frozenset[int]:
    return frozenset[int]().union(*(x.last for x in values if isinstance(x, _Data)))


# --- Values without data ---


def _constant(eqn: jex.JaxprEqn, operands: list[_Constant], shape: tuple[int, ...]) -> _Constant:
    name, leaves = eqn.primitive.name, frozenset[int]().union(*(x.leaves for x in operands))
    if name in _MOVES:
        return dataclasses.replace(operands[0], shape=shape)
    if name in _PARTS and operands:
        own = operands[0].parameter
        moved = own and _Parameter(own.leaf, _long(shape))
        return _Constant(shape, leaves, moved, plain=operands[0].plain)
    if name not in _ELEMENTWISE:
        return _Constant(shape, leaves, plain=not leaves)
    with_leaves = [x for x in operands if x.leaves]
    parameter = with_leaves[0].parameter if len(with_leaves) == 1 else None
    stored = _stored(name, _exponent(eqn, operands), operands)
    if stored is not None and stored.shifted and name in ("add", "sub"):
        # offset - mean * r
        (parameter,) = [x.parameter for x in operands if x.stored is None]
    return _Constant(shape, leaves, parameter, all(x.plain for x in operands), stored=stored)


def _exponent(eqn: jex.JaxprEqn, operands: Sequence[_Value]) -> float | None:
    """Returns e for an operation x**e."""
    name = eqn.primitive.name
    if name == "pow":
        exponent = operands[1]
        return exponent.number if isinstance(exponent, _Constant) else None
    return float(eqn.params["y"]) if name == "integer_pow" else _POWERS.get(name)


def _stored(name: str, exponent: float | None, operands: list[_Constant]) -> _Stored | None:
    """Returns what the result of an elementwise operation is to the root of a stored statistic."""
    first, second = operands[0], operands[-1]
    if exponent is not None:
        if first.stored is not None:
            return _Stored(-first.stored.power) if exponent == -1 else None
        return _Stored(int(2 * exponent)) if abs(exponent) == 0.5 and first.is_vector else None
    powers = [x for x in (first, second) if x.stored is not None]
    if len(operands) != 2 or len(powers) != 1:
        return None
    known, other = powers[0], second if powers[0] is first else first
    stored = known.stored
    assert stored is not None
    if name in ("add", "sub"):
        if stored.shifted:
            return stored if other.parameter is not None else None
        return stored if stored.power == 1 and not other.leaves else None  # root + epsilon
    if name == "div" and known is second and stored.power == 1:
        stored = _Stored(-1)
    elif name == "max" and not other.leaves:
        return stored
    elif name != "mul":
        return None
    if not other.is_vector:
        return stored
    if other.parameter is not None and stored.scale is None and not stored.shifted:
        return stored._replace(scale=other.parameter)
    return stored._replace(shifted=True)


# --- Values with data ---


def _data(eqn: jex.JaxprEqn, operands: list[_Value]) -> _Value:
    name, first = eqn.primitive.name, operands[0]
    data = [x for x in operands if isinstance(x, _Data)]
    constants = [x for x in operands if isinstance(x, _Constant)]
    if name in _MOVES:
        return data[0]
    if name in _SUMS:
        return _reduced(data[0])
    if name in _PARTS:
        return _Data({k: f for k, f in data[0].facts.items() if not f.pointwise}, last=_last(*data))
    if (exponent := _exponent(eqn, operands)) is not None and isinstance(first, _Data):
        return _Data(_powers(first.facts, exponent))
    if name == "abs":
        return _Data(_powers(data[0].facts, 1))
    if name in ("dot_general", "conv_general_dilated"):
        return _contracted(eqn, data, constants)
    if name in ("mul", "div"):
        if len(data) == 2:
            return _product(data[0], data[1], 1 if name == "mul" else -1)
        if name == "div" and isinstance(first, _Constant):
            return _scaled(_Data(_powers(data[0].facts, -1)), first, name="mul")
        return _scaled(data[0], constants[0], name=name)
    if name in ("add", "sub", "add_any"):
        return _sum(*data) if len(data) == 2 else _shifted(data[0], constants[0])
    if name in ("max", "min", "clamp", "select_n"):
        return _chosen(
            data if name != "select_n" else [x for x in data if x is not first], constants
        )
    return _Data()


def _powers(facts: _Facts, exponent: float) -> dict[object, _Fact]:
    """Returns the facts about a power. A root of a sum of squares makes them rooted."""

    def power(fact: _Fact) -> _Fact:
        root = abs(exponent) == 0.5 and fact.degree == 2 and not fact.pointwise
        return fact._replace(degree=fact.degree * exponent, rooted=fact.rooted or root)

    bare = {
        origin: fact for origin, fact in facts.items() if fact.scale is None and fact.offset is None
    }
    return {origin: power(fact) for origin, fact in bare.items()}


def _reduced(x: _Data) -> _Data:
    """Returns a sum over axes of a value."""
    bare = {k: f for k, f in x.facts.items() if f.scale is None and f.offset is None and f.degree}
    return _Data({k: f._replace(pointwise=False) for k, f in bare.items()}, last=x.last)


def _contracted(eqn: jex.JaxprEqn, data: list[_Data], constants: list[_Constant]) -> _Data:
    """Returns a product of matrices or a convolution."""
    if len(data) == 2:
        return _reduced(_product(data[0], data[1], 1))
    factor = constants[0]
    if not factor.leaves:
        return _reduced(data[0])
    if eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][0][0]:
        return _scaled(data[0], factor, name="mul")
    return _Data(last=factor.leaves)


def _product(a: _Data, b: _Data, sign: int) -> _Data:
    """Returns a b, or a / b with sign -1."""
    facts: dict[object, _Fact] = {}
    for origin in a.facts.keys() & b.facts.keys():
        one, other = a.facts[origin], b.facts[origin]
        scales = [f.scale for f in (one, other) if f.scale is not None]
        if (
            one.offset is not None
            or other.offset is not None
            or len(scales) > 1
            or (other.scale and sign < 0)
        ):
            continue
        facts[origin] = one._replace(
            degree=one.degree + sign * other.degree,
            pointwise=one.pointwise or other.pointwise,
            rooted=one.rooted or other.rooted,
            scale=scales[0] if scales else None,
        )
    normalised = [f for f in facts.values() if f.is_normalised and f.scale is not None]
    return _Data(facts, last=frozenset(f.scale.leaf for f in normalised if f.scale is not None))


def _sum(a: _Data, b: _Data) -> _Data:
    facts: dict[object, _Fact] = {}
    for origin in a.facts.keys() & b.facts.keys():
        one, other = a.facts[origin], b.facts[origin]
        offsets = [f.offset for f in (one, other) if f.offset is not None]
        if (
            one.degree != other.degree
            or _leaf_of(one.scale) != _leaf_of(other.scale)
            or len(offsets) > 1
        ):
            continue
        facts[origin] = one._replace(
            pointwise=one.pointwise or other.pointwise,
            rooted=one.rooted and other.rooted,
            offset=offsets[0] if offsets else None,
        )
    return _Data(facts, last=a.last | b.last)


def _leaf_of(parameter: _Parameter | None) -> int | None:
    return None if parameter is None else parameter.leaf


def _scaled(x: _Data, factor: _Constant, *, name: str) -> _Data:
    """Returns x times a value without data, or x divided by it."""
    last = x.last | factor.leaves
    stored = factor.stored
    if stored is not None and not stored.shifted and stored.power == (-1 if name == "mul" else 1):
        made = _Fact(0, True, True, scale=stored.scale, centred=x.centred, statistics="stored")
        return _Data({x: made}, last=last)
    if not factor.leaves or (factor.parameter is not None and not factor.parameter.own):
        return _Data(x.facts, last=last, centred=x.centred)
    if factor.parameter is None or name == "div":
        return _Data(last=last)
    free = {k: f for k, f in x.facts.items() if f.scale is None and f.offset is None}
    facts = {k: f._replace(scale=factor.parameter) for k, f in free.items()}
    return _Data(facts, last=last, centred=x.centred)


def _shifted(x: _Data, term: _Constant) -> _Data:
    """Returns x plus or minus a value without data."""
    if term.number == 0:
        return x
    folded = term.stored is not None and term.stored.shifted  # offset - mean * r
    facts: dict[object, _Fact] = {}
    for origin, fact in x.facts.items():
        if fact.is_normalised:
            if _fits(fact, term.parameter):
                facts[origin] = fact._replace(offset=term.parameter, centred=fact.centred or folded)
        elif not term.leaves and (not fact.pointwise or (fact.degree >= 2 and not term.shape)):
            facts[origin] = fact  # a small number under a root
    return _Data(facts, last=x.last | term.leaves, centred=term.is_vector and term.stored is None)


def _fits(fact: _Fact, offset: _Parameter | None) -> bool:
    """Returns whether a parameter can be the offset: it has the size of the scale, or is a
    vector.
    """
    if offset is None or fact.offset is not None:
        return False
    if fact.scale is None:
        return len(offset.own) == 1
    return math.prod(offset.own) == math.prod(fact.scale.own)


def _chosen(data: Sequence[_Data], constants: Sequence[_Constant]) -> _Data:
    """Returns one of several values at each place, such as a variance or the smallest that is
    allowed.
    """
    if not data or any(x.leaves for x in constants):
        return _Data(last=_last(*data))
    shared = set(data[0].facts).intersection(*(x.facts for x in data[1:]))
    alike = {k for k in shared if len({x.facts[k] for x in data}) == 1}
    facts = {k: data[0].facts[k] for k in alike if not data[0].facts[k].pointwise}
    return _Data(facts, last=_last(*data))
