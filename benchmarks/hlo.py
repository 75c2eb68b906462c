"""Counts of one device's work in a program that XLA has compiled and divided: operations, bytes and collectives.

XLA's own cost analysis counts the body of a loop once. Here it counts as often as it runs. Of the branches of a
conditional the dearest counts.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_SIZES = {"pred": 1, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8, "c128": 16}
_SHAPE = re.compile(r"\b(pred|bf16|[sufc]\d+|f8e\w+)\[([\d,]*)\]")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
# Instructions that neither compute nor move.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
_MOVES = {"broadcast", "reshape", "transpose", "copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate"}
_MOVES |= {"pad", "reverse", "gather", "scatter", "iota", "convert", "select", "fusion", "custom-call"}
_MOVES |= {
    "pad",
    "reverse",
    "gather",
    "scatter",
    "iota",
    "convert",
    "select",
    "fusion",
    "custom-call",
    "rng-bit-generator",
}


@dataclasses.dataclass
class Count:
    """The work of one device.

    Attributes:
      flops: The floating-point operations.
      bytes: The bytes that instructions read and write.
      collectives: (number, bytes of results) of the collectives of each kind.
    """

    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def plus(self, other: "Count", times: float = 1) -> "Count":
        """Returns this work and `times` the other."""
        kinds = collections.ChainMap(self.collectives, other.collectives)
        pairs = {kind: (self.collectives.get(kind, (0, 0)), other.collectives.get(kind, (0, 0))) for kind in kinds}
        added = {kind: (a[0] + times * b[0], a[1] + times * b[1]) for kind, (a, b) in pairs.items()}
        return Count(self.flops + times * other.flops, self.bytes + times * other.bytes, added)

    @property
    def messages(self) -> float:
        """The number of collectives."""
        return sum(number for number, _ in self.collectives.values())

    @property
    def moved(self) -> float:
        """The bytes that a ring of many devices sends from one device: twice for an all-reduce."""
        return sum((2 if kind == "all-reduce" else 1) * size for kind, (_, size) in self.collectives.items())


@dataclasses.dataclass
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str


def count(compiled: Any) -> Count:
    """Returns the work of one device in a compiled function, such as of `jax.jit(f).lower(...).compile()`."""
    computations, entry = _parsed(compiled.as_text())
    known: dict[str, Count] = {}

    def total(name: str, fused: bool = False) -> Count:
        if name not in known:
            shapes = {i.name: i.shape for i in computations[name]}
            found = Count()
            for instruction in computations[name]:
                found = found.plus(one(instruction, shapes, fused))
            known[name] = found
        return known[name]

    def one(instruction: _Instruction, shapes: dict[str, str], fused: bool) -> Count:
        opcode, rest = instruction.opcode, instruction.rest
        inside = [shapes[operand] for operand in instruction.operands if operand in shapes]
        found = Count(flops=_flops(instruction, inside))
        if opcode.removesuffix("-start") in COLLECTIVES:
            kind = opcode.removesuffix("-start")
            size = _bytes(instruction.shape) if kind != "reduce-scatter" else sum(map(_bytes, inside))
            found.collectives[kind] = (1.0, size)
        if not fused and opcode not in _FREE:
            found.bytes = _moved(instruction, inside)
        if opcode == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
            for called in re.findall(r"(?:body|condition)=%?([\w.-]+)", rest):
                found = found.plus(total(called), float(trips[1]) if trips else 1.0)
        elif opcode == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", rest)
            branches = names[1].split(",") if names else re.findall(r"(?:true|false)_computation=%?([\w.-]+)", rest)
            costs = [total(name.strip().lstrip("%")) for name in branches]
            found = found.plus(max(costs, key=lambda c: (c.messages, c.flops, c.bytes)))
        elif opcode in ("fusion", "call"):
            for called in re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", rest):
                found = found.plus(total(called, fused=opcode == "fusion"))
        return found

    return total(entry)


def _parsed(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None and (found := _LINE.match(line)):
            current.append(_instruction(found[1], found[2]))
    return computations, entry


def _instruction(name: str, text: str) -> _Instruction:
    # A shape is one word, or a tuple in parentheses.
    end = text.index(" ") if not text.startswith("(") else _closing(text) + 1
    opcode, _, rest = text[end:].strip().partition("(")
    close = _closing("(" + rest) - 1
    operands = re.findall(r"%([\w.-]+)", rest[:close])
    return _Instruction(name, text[:end], opcode, operands, rest[close:])


def _closing(text: str) -> int:
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    return len(text)


def _shapes(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind, dims in _SHAPE.findall(text):
        yield kind, tuple(int(n) for n in dims.split(",") if n)


def _bytes(text: str) -> float:
    return float(sum(_width(kind) * math.prod(dims) for kind, dims in _shapes(text)))


def _moved(instruction: _Instruction, operands: list[str]) -> float:
    """Returns the bytes that an instruction reads and writes. A slice of an array is not the array."""
    out, sizes = _bytes(instruction.shape), list(map(_bytes, operands))
    if "dynamic-update-slice" in instruction.name:
        return 2 * sum(size for size in sizes if size != out)
    if "dynamic-slice" in instruction.name:
        sizes = [min(size, out) for size in sizes]
    return out + sum(sizes)


def _width(kind: str) -> float:
    return _SIZES.get(kind) or int(kind.strip("bsufc")) / 8


def _flops(instruction: _Instruction, operands: list[str]) -> float:
    opcode, (kind, out) = instruction.opcode, next(_shapes(instruction.shape), ("s32", ()))
    if opcode in _FREE | _MOVES or opcode.startswith(COLLECTIVES) or not kind.startswith(("f", "bf", "c")):
        return 0.0
    dims = [shape for text in operands for _, shape in _shapes(text)]
    if opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        assert contracted
        return 2.0 * math.prod(out) * math.prod(dims[0][int(d)] for d in contracted[1].split(",") if d)
    if opcode == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
        assert labels
        return 2.0 * math.prod(out) * math.prod(dims[1]) / dims[1][labels[1].index("o")]
    return float(max(math.prod(out), math.prod(dims[0]) if opcode.startswith("reduce") and dims else 0))
