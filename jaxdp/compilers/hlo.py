"""Reads a program that XLA has compiled, and counts the work of one device in it: operations, bytes
and collectives.

XLA's own cost analysis counts the body of a loop once. Here it counts as often as it runs. Of the
branches of a conditional the dearest counts.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_SIZES = {"pred": 1, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8, "c128": 16}
_SHAPE = re.compile(r"\b(pred|bf16|[sufc]\d+|f8e\w+)\[([\d,]*)\]")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
# Instructions that neither compute nor move.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
}
_MOVES = {
    "broadcast",
    "reshape",
    "transpose",
    "copy",
    "slice",
    "dynamic-slice",
    "dynamic-update-slice",
    "concatenate",
}
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
        pairs = {
            kind: (self.collectives.get(kind, (0, 0)), other.collectives.get(kind, (0, 0)))
            for kind in kinds
        }
        added = {kind: (a[0] + times * b[0], a[1] + times * b[1]) for kind, (a, b) in pairs.items()}
        return Count(self.flops + times * other.flops, self.bytes + times * other.bytes, added)

    @property
    def messages(self) -> float:
        """The number of collectives."""
        return sum(number for number, _ in self.collectives.values())

    @property
    def moved(self) -> float:
        """The bytes that a ring of many devices sends from one device: twice for an all-reduce."""
        return sum(
            (2 if kind == "all-reduce" else 1) * size
            for kind, (_, size) in self.collectives.items()
        )


@dataclasses.dataclass
class Instruction:
    """An instruction of a computation.

    Attributes:
      name: Its name, without the percent sign.
      shape: The text of its shape, in parentheses for a tuple.
      opcode: What it does, such as "fusion".
      argument: The text between its parentheses.
      operands: The names of the instructions that it reads.
      rest: The text of its attributes.
      root: Whether its value is that of the computation.
    """

    name: str
    shape: str
    opcode: str
    argument: str
    operands: list[str]
    rest: str
    root: bool = False

    def called(self, attribute: str) -> list[str]:
        """Returns the names of the computations of an attribute such as "calls"."""
        if braces := re.search(rf"\b{attribute}=\{{([^}}]*)\}}", self.rest):
            return re.findall(r"[\w.-]+", braces[1])
        return re.findall(rf"\b{attribute}=%?([\w.-]+)", self.rest)

    @property
    def source(self) -> str:
        """The JAX operation from which it comes, with "#" for numbers, or "" if it is not known."""
        name = re.search(r'op_name="([^"]*)"', self.rest)
        return re.sub(r"\d+", "#", name[1]) if name else ""


class Step(NamedTuple):
    """An instruction that a device starts, not one inside of a fusion.

    Attributes:
      instruction: The instruction.
      computation: The name of its computation.
      times: How often it runs, as far as the turns of the loops around it are known.
      loops: The names of the loops around it, the outermost first.
    """

    instruction: Instruction
    computation: str
    times: float
    loops: tuple[str, ...]


@dataclasses.dataclass
class Loop:
    """A loop of a program: the JAX operation from which it comes, and its turns, None where they
    depend on data.
    """

    source: str
    turns: int | None


Constants = Mapping[str, int]  # by the name of an instruction


@dataclasses.dataclass
class Program:
    """A compiled program.

    Attributes:
      computations: The instructions of each computation, in their order.
      entry: The name of the computation that runs.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    @classmethod
    def parsed(cls, text: str) -> "Program":
        """Returns the program of a text such as of `jax.jit(f).lower(...).compile().as_text()`."""
        computations: dict[str, list[Instruction]] = {}
        entry, current = "", None
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := _LINE.match(line)):
                current.append(_instruction(found[2], found[3], root=bool(found[1])))
        return cls(computations, entry)

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by name."""
        return {name: {i.name: i for i in body} for name, body in self.computations.items()}

    def operands(self, step: Step) -> list[str]:
        """Returns the shapes of the operands of a step."""
        inside = self.by_name[step.computation]
        return [inside[name].shape for name in step.instruction.operands if name in inside]

    def steps(self, weigh: Callable[[Instruction], float]) -> tuple[list[Step], dict[str, Loop]]:
        """Returns what a device starts, and the loops by name.

        Args:
          weigh: The cost of an instruction. Of the branches of a conditional only the dearest is
              returned.
        """
        loops: dict[str, Loop] = {}

        def walk(
            name: str, times: float, around: tuple[str, ...], values: Mapping[int, int]
        ) -> list[Step]:
            steps: list[Step] = []
            constants = self._constants(name, values)
            for instruction in self.computations[name]:
                if instruction.opcode == "while":
                    start = self._start(name, instruction, constants)
                    turns = self._turns(instruction, start)
                    loops[instruction.name] = Loop(instruction.source, turns)
                    kept = self._kept(instruction.called("body")[0], start)
                    inner = (*around, instruction.name)
                    for body in instruction.called("body") + instruction.called("condition"):
                        steps += walk(body, times * (1 if turns is None else turns), inner, kept)
                elif instruction.opcode == "conditional":
                    branches = instruction.called("branch_computations")
                    branches += instruction.called("(?:true|false)_computation")
                    ways = [walk(branch, times, around, {}) for branch in branches]
                    steps += max(
                        ways, key=lambda way: sum(s.times * weigh(s.instruction) for s in way)
                    )
                elif instruction.opcode in ("call", "async-start"):
                    for called in instruction.called("(?:calls|to_apply)"):
                        steps += walk(called, times, around, {})
                else:
                    steps.append(Step(instruction, name, times, around))
            return steps

        return walk(self.entry, 1.0, (), {}), loops

    def _constants(self, computation: str, values: Mapping[int, int]) -> dict[str, int]:
        """Returns the integers of a computation, some elements of whose parameter are known."""
        inside, known = self.by_name[computation], dict[str, int]()
        for instruction in self.computations[computation]:
            first = inside.get(instruction.operands[0]) if instruction.operands else None
            if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.argument):
                known[instruction.name] = int(instruction.argument)
            elif (
                instruction.opcode in ("copy", "bitcast", "convert", "reshape")
                and first
                and first.name in known
            ):
                known[instruction.name] = known[first.name]
            elif instruction.opcode == "get-tuple-element" and first:
                place = _index(instruction)
                if first.opcode == "parameter" and place in values:
                    known[instruction.name] = values[place]
                elif first.opcode == "tuple" and first.operands[place] in known:
                    known[instruction.name] = known[first.operands[place]]
        return known

    def _start(self, computation: str, loop: Instruction, constants: Constants) -> dict[int, int]:
        """Returns the integers of the tuple from which a loop starts, by their places."""
        packed = self.by_name[computation][loop.operands[0]]
        names = packed.operands if packed.opcode == "tuple" else []
        return {place: constants[name] for place, name in enumerate(names) if name in constants}

    def _kept(self, body: str, start: Mapping[int, int]) -> dict[int, int]:
        """Returns those integers that no turn of a loop changes."""
        inside = self.by_name[body]
        root = next(i for i in self.computations[body] if i.root)
        kept = {}
        for place, name in enumerate(root.operands if root.opcode == "tuple" else ()):
            element = inside[name]
            while element.opcode == "copy":
                element = inside[element.operands[0]]
            passed = (
                element.opcode == "get-tuple-element"
                and inside[element.operands[0]].opcode == "parameter"
            )
            if passed and _index(element) == place and place in start:
                kept[place] = start[place]
        return kept

    def _turns(self, loop: Instruction, start: Mapping[int, int]) -> int | None:
        """Returns the turns of a loop that counts up by one, or None where they depend on data."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        condition = loop.called("condition")[0]
        constants = self._constants(condition, start)
        inside = self.by_name[condition]
        test = next(i for i in self.computations[condition] if i.root)
        names = test.operands
        if test.opcode == "fusion":  # of the comparison alone, with a convert
            fused = self.computations[test.called("calls")[0]]
            test = next(i for i in fused if i.root)
            places = {i.name: int(i.argument) for i in fused if i.opcode == "parameter"}
            constants |= {
                i.name: int(i.argument)
                for i in fused
                if i.opcode == "constant" and i.argument.isdigit()
            }
            names = [names[places[name]] if name in places else name for name in test.operands]
        counted = (
            inside.get(names[0])
            if test.opcode == "compare" and "direction=LT" in test.rest
            else None
        )
        if counted is None or counted.opcode != "get-tuple-element" or names[1] not in constants:
            return None
        first = start.get(_index(counted))
        return None if first is None else max(0, constants[names[1]] - first)


def count(compiled: Any) -> Count:
    """Returns the work of one device in a compiled function, such as of
    `jax.jit(f).lower(...).compile()`.
    """
    program = Program.parsed(compiled.as_text())
    known: dict[str, Count] = {}

    def total(name: str, fused: bool = False) -> Count:
        if name not in known:
            shapes = {i.name: i.shape for i in program.computations[name]}
            found = Count()
            for instruction in program.computations[name]:
                found = found.plus(one(instruction, shapes, fused))
            known[name] = found
        return known[name]

    def one(instruction: Instruction, shapes: dict[str, str], fused: bool) -> Count:
        opcode = instruction.opcode
        inside = [shapes[operand] for operand in instruction.operands if operand in shapes]
        found = Count(flops=_flops(instruction, inside))
        if opcode.removesuffix("-start") in COLLECTIVES:
            kind = opcode.removesuffix("-start")
            size = (
                byte_size(instruction.shape)
                if kind != "reduce-scatter"
                else sum(map(byte_size, inside))
            )
            found.collectives[kind] = (1.0, size)
        if not fused and opcode not in FREE:
            found.bytes = _moved(instruction, inside)
        if opcode == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.rest)
            for called in instruction.called("(?:body|condition)"):
                found = found.plus(total(called), float(trips[1]) if trips else 1.0)
        elif opcode == "conditional":
            branches = instruction.called("branch_computations") + instruction.called(
                "(?:true|false)_computation"
            )
            costs = [total(name) for name in branches]
            found = found.plus(max(costs, key=lambda c: (c.messages, c.flops, c.bytes)))
        elif opcode in ("fusion", "call"):
            for called in instruction.called("(?:calls|to_apply)"):
                found = found.plus(total(called, fused=opcode == "fusion"))
        return found

    return total(program.entry)


class Work(NamedTuple):
    """What one instruction of a GPU's program reads and writes in bytes, and its operations.

    Products count by the type of their operands, such as "bf16". What else computes is "other".
    """

    bytes: float
    flops: dict[str, float]


def work(program: Program, step: Step) -> Work:
    """Returns the work of one run of a step."""
    instruction, shapes = step.instruction, program.operands(step)
    if instruction.opcode != "fusion":
        moved = (
            _moved(instruction, shapes)
            if instruction.opcode != "custom-call"
            else _used(instruction, shapes)
        )
        return Work(moved, _by_type(instruction, shapes))
    name = instruction.called("calls")[0]
    inside = program.by_name[name]
    flops = collections.Counter[str]()
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for one in program.computations[name]:
        flops.update(
            _by_type(one, [inside[operand].shape for operand in one.operands if operand in inside])
        )
        for operand in one.operands:
            users[operand].append(one)
    moved = 0.0
    for one in program.computations[name]:
        if one.opcode == "parameter":
            moved += (
                sum(_read(one, user, inside) for user in users[one.name][:1])
                if len(users[one.name]) == 1
                else (byte_size(one.shape))
            )
        if one.root:
            results = (
                [inside[operand] for operand in one.operands] if one.opcode == "tuple" else [one]
            )
            moved += sum(_written(result, inside) for result in results)
    return Work(moved, dict(flops))


def _read(array: Instruction, user: Instruction, inside: Mapping[str, Instruction]) -> float:
    """Returns the bytes that a fusion reads of an array with one user. A slice is not the array."""
    first = bool(user.operands) and user.operands[0] == array.name
    if first and user.opcode in ("slice", "dynamic-slice", "gather"):
        return byte_size(user.shape)
    if first and user.opcode == "dynamic-update-slice":  # in place
        return 0.0
    return byte_size(array.shape)


def _written(result: Instruction, inside: Mapping[str, Instruction]) -> float:
    """Returns the bytes that a fusion writes for a result."""
    while result.opcode in ("bitcast", "copy") and result.operands[0] in inside:
        result = inside[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return byte_size(inside[result.operands[1]].shape)
    return byte_size(result.shape)


def _used(call: Instruction, operands: list[str]) -> float:
    """Returns the bytes of the arrays of a library's call, without its scratch memory."""
    results = re.findall(r"\b(?!s8|u8)\w+\[[\d,]*\]", call.shape)
    return sum(map(byte_size, [*operands, *results]))


def _by_type(instruction: Instruction, operands: list[str]) -> dict[str, float]:
    kinds = [kind for text in operands for kind, _ in _shapes(text)]
    if instruction.opcode == "custom-call":
        flops = _library_flops(instruction, operands)
        return {kinds[0]: flops} if flops else {}
    flops = _flops(instruction, operands)
    product = instruction.opcode in ("dot", "convolution")
    return {kinds[0] if product else "other": flops} if flops else {}


def _library_flops(call: Instruction, operands: list[str]) -> float:
    """Returns the operations of a product or a convolution by cuBLAS or cuDNN."""
    arrays = [dims for text in (call.shape, *operands) for _, dims in list(_shapes(text))[:1]]
    if contracted := re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.rest):
        out, left = arrays[:2]
        return (
            2.0
            * math.prod(out)
            * math.prod(left[int(d)] for d in re.findall(r"\d+", contracted[1]))
        )
    labels = re.search(r"dim_labels=\w+_(\w+)->", call.rest)
    if labels is None or "conv" not in call.rest:
        return 0.0
    out, first, second = arrays[:3]
    kernel, result = second, out
    if "convBackwardFilter" in call.rest:
        kernel, result = out, second
    elif "convBackwardInput" in call.rest:
        result = first
    return 2.0 * math.prod(result) * math.prod(kernel) / kernel[labels[1].index("o")]


def _index(instruction: Instruction) -> int:
    place = re.search(r"\bindex=(\d+)", instruction.rest)
    assert place
    return int(place[1])


def _instruction(name: str, text: str, *, root: bool) -> Instruction:
    # A shape is one word, or a tuple in parentheses.
    end = text.index(" ") if not text.startswith("(") else _closing(text) + 1
    opcode, _, rest = text[end:].strip().partition("(")
    close = _closing("(" + rest) - 1
    argument = rest[:close]
    return Instruction(
        name, text[:end], opcode, argument, re.findall(r"%([\w.-]+)", argument), rest[close:], root
    )


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


def byte_size(text: str) -> float:
    """Returns the bytes of a shape as a program writes it, of all elements of a tuple."""
    return float(sum(_width(kind) * math.prod(dims) for kind, dims in _shapes(text)))


def _moved(instruction: Instruction, operands: list[str]) -> float:
    """Returns the bytes that an instruction reads and writes. A slice of an array is not the
    array.
    """
    out, sizes = byte_size(instruction.shape), list(map(byte_size, operands))
    if "dynamic-update-slice" in instruction.name:
        return 2 * sum(size for size in sizes if size != out)
    if "dynamic-slice" in instruction.name:
        sizes = [min(size, out) for size in sizes]
    return out + sum(sizes)


def _width(kind: str) -> float:
    return _SIZES.get(kind) or int(kind.strip("bsufc")) / 8


def _flops(instruction: Instruction, operands: list[str]) -> float:
    opcode, (kind, out) = instruction.opcode, next(_shapes(instruction.shape), ("s32", ()))
    if (
        opcode in FREE | _MOVES
        or opcode.startswith(COLLECTIVES)
        or not kind.startswith(("f", "bf", "c"))
    ):
        return 0.0
    dims = [shape for text in operands for _, shape in _shapes(text)]
    if opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        assert contracted
        return (
            2.0 * math.prod(out) * math.prod(dims[0][int(d)] for d in contracted[1].split(",") if d)
        )
    if opcode == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
        assert labels
        return 2.0 * math.prod(out) * math.prod(dims[1]) / dims[1][labels[1].index("o")]
    return float(
        max(math.prod(out), math.prod(dims[0]) if opcode.startswith("reduce") and dims else 0)
    )
