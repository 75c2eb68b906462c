"""Reads a program that XLA has compiled, and counts the work of one device in it.

The work is operations, bytes and collectives.

XLA's own cost analysis counts the body of a loop once. Here it counts as often as it runs. Of the
branches of a conditional the dearest counts.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

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
# Instructions that move, but do not compute by themselves.
_MOVES = {
    "broadcast",
    "reshape",
    "transpose",
    "copy",
    "slice",
    "dynamic-slice",
    "dynamic-update-slice",
    "concatenate",
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
        collectives = dict(self.collectives)
        for kind, (number, size) in other.collectives.items():
            number_here, size_here = collectives.get(kind, (0.0, 0.0))
            collectives[kind] = (number_here + times * number, size_here + times * size)
        return Count(
            flops=self.flops + times * other.flops,
            bytes=self.bytes + times * other.bytes,
            collectives=collectives,
        )

    @property
    def messages(self) -> float:
        """The number of collectives."""
        return sum(number for number, _ in self.collectives.values())

    @property
    def moved(self) -> float:
        """The bytes that a ring of many devices sends from one device: twice for an all-reduce."""
        sizes = {kind: size for kind, (_, size) in self.collectives.items()}
        return sum(sizes.values()) + sizes.get("all-reduce", 0.0)


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
    """A loop of a program: the JAX operation from which it comes, and its turns.

    The turns are None where they depend on data.
    """

    source: str
    turns: int | None


Constants = Mapping[str, int]  # by the name of an instruction


class Assumed(NamedTuple):
    """What the text of a program does not tell of its run.

    Attributes:
      open_turns: The turns of a loop in no other one, where they depend on data.
      cheapest_branches: Whether the cheapest branch of a conditional runs, as where the other one
        is for data that are not finite. Otherwise the dearest one does.
    """

    open_turns: int = 1
    cheapest_branches: bool = False


ASSUMED = Assumed()


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
            head = _COMPUTATION.match(line)
            if head:
                is_entry, name = head.groups()
                current = computations.setdefault(name, [])
                if is_entry:
                    entry = name
            elif line.startswith("}"):
                current = None
            elif current is not None:
                match = _LINE.match(line)
                if match:
                    is_root, name, definition = match.groups()
                    current.append(_instruction(name, definition, root=bool(is_root)))
        return cls(computations, entry)

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by name."""
        return {name: {i.name: i for i in body} for name, body in self.computations.items()}

    def operands(self, step: Step) -> list[str]:
        """Returns the shapes of the operands of a step."""
        inside = self.by_name[step.computation]
        return [inside[name].shape for name in step.instruction.operands if name in inside]

    def steps(
        self, weigh: Callable[[Instruction], float], assumed: Assumed = ASSUMED
    ) -> tuple[list[Step], dict[str, Loop]]:
        """Returns what a device starts, and the loops by name.

        Args:
          weigh: The cost of an instruction. Of the branches of a conditional only one is returned.
          assumed: Which branch, and the turns of loops that depend on data.
        """
        loops: dict[str, Loop] = {}

        def weight(steps: Iterable[Step]) -> float:
            return sum(step.times * weigh(step.instruction) for step in steps)

        def walk(
            name: str,
            times: float,
            around: tuple[str, ...],
            values: Mapping[int, int],
        ) -> list[Step]:
            steps: list[Step] = []
            constants = self._constants(name, values)
            for instruction in self.computations[name]:
                if instruction.opcode == "while":
                    start = self._start(name, instruction, constants)
                    turns = self._turns(instruction, start)
                    loops[instruction.name] = Loop(instruction.source, turns)
                    unchanged = self._unchanged(instruction.called("body")[0], start)
                    inner = (*around, instruction.name)
                    if turns is None:
                        turns = 1 if around else assumed.open_turns
                    runs = times * turns
                    for body in instruction.called("body") + instruction.called("condition"):
                        steps += walk(body, runs, inner, unchanged)
                elif instruction.opcode == "conditional":
                    branches = [
                        walk(branch, times, around, {}) for branch in _branches(instruction)
                    ]
                    taken = min if assumed.cheapest_branches else max
                    steps += taken(branches, key=weight)
                elif instruction.opcode in ("call", "async-start"):
                    for called in instruction.called("(?:calls|to_apply)"):
                        steps += walk(called, times, around, {})
                else:
                    steps.append(Step(instruction, name, times, around))
            return steps

        return walk(self.entry, 1.0, (), {}), loops

    def _constants(self, computation: str, values: Mapping[int, int]) -> dict[str, int]:
        """Returns the integers of a computation, by the names of their instructions.

        `values` are the known elements of its parameter, by their places.
        """
        inside = self.by_name[computation]
        known: dict[str, int] = {}
        for instruction in self.computations[computation]:
            value = None
            first = inside.get(instruction.operands[0]) if instruction.operands else None
            if instruction.opcode == "constant":
                if re.fullmatch(r"-?\d+", instruction.argument):
                    value = int(instruction.argument)
            elif first is None:
                continue
            elif instruction.opcode in ("copy", "bitcast", "convert", "reshape"):
                value = known.get(first.name)
            elif instruction.opcode == "get-tuple-element":
                place = _index(instruction)
                if first.opcode == "parameter":
                    value = values.get(place)
                elif first.opcode == "tuple":
                    value = known.get(first.operands[place])
            if value is not None:
                known[instruction.name] = value
        return known

    def _start(self, computation: str, loop: Instruction, constants: Constants) -> dict[int, int]:
        """Returns the integers of the tuple from which a loop starts, by their places."""
        packed = self.by_name[computation][loop.operands[0]]
        names = packed.operands if packed.opcode == "tuple" else []
        return {place: constants[name] for place, name in enumerate(names) if name in constants}

    def _unchanged(self, body: str, start: Mapping[int, int]) -> dict[int, int]:
        """Returns those integers that no turn of a loop changes, by their places."""
        inside = self.by_name[body]
        root = next(i for i in self.computations[body] if i.root)
        unchanged: dict[int, int] = {}
        if root.opcode != "tuple":
            return unchanged
        for place, name in enumerate(root.operands):
            element = inside[name]
            while element.opcode == "copy":
                element = inside[element.operands[0]]
            if place not in start or element.opcode != "get-tuple-element":
                continue
            of_parameter = inside[element.operands[0]].opcode == "parameter"
            if of_parameter and _index(element) == place:
                unchanged[place] = start[place]
        return unchanged

    def _turns(self, loop: Instruction, start: Mapping[int, int]) -> int | None:
        """Returns the turns of a loop that counts up by one, or None where they depend on data."""
        known = _trip_count(loop)
        if known is not None:
            return known
        condition = loop.called("condition")[0]
        constants = self._constants(condition, start)
        test = next(i for i in self.computations[condition] if i.root)
        names = test.operands
        if test.opcode == "fusion":  # of the comparison alone, with a convert
            test, names = self._unfused(test, constants)
        if test.opcode != "compare" or "direction=LT" not in test.rest:
            return None
        counter, bound = names
        counted = self.by_name[condition].get(counter)
        if counted is None or counted.opcode != "get-tuple-element" or bound not in constants:
            return None
        first = start.get(_index(counted))
        if first is None:
            return None
        return max(0, constants[bound] - first)

    def _unfused(
        self, fusion: Instruction, constants: dict[str, int]
    ) -> tuple[Instruction, list[str]]:
        """Returns the root of a fusion, and its operands by their names outside.

        It adds the constants inside the fusion to `constants`.
        """
        inside = self.computations[fusion.called("calls")[0]]
        outside = {}
        for instruction in inside:
            if instruction.opcode == "parameter":
                outside[instruction.name] = fusion.operands[int(instruction.argument)]
            elif instruction.opcode == "constant" and instruction.argument.isdigit():
                constants[instruction.name] = int(instruction.argument)
        root = next(i for i in inside if i.root)
        return root, [outside.get(name, name) for name in root.operands]


def count(compiled: Any) -> Count:
    """Returns the work of one device in a function that `jax.jit(f).lower(...).compile()` made."""
    program = Program.parsed(compiled.as_text())
    totals: dict[str, Count] = {}

    def total(name: str, fused: bool = False) -> Count:
        if name not in totals:
            shapes = {i.name: i.shape for i in program.computations[name]}
            work = Count()
            for instruction in program.computations[name]:
                work = work.plus(work_of(instruction, shapes, fused))
            totals[name] = work
        return totals[name]

    def work_of(instruction: Instruction, shapes: dict[str, str], fused: bool) -> Count:
        opcode = instruction.opcode
        operands = [shapes[operand] for operand in instruction.operands if operand in shapes]
        work = Count(flops=_flops(instruction, operands))
        kind = opcode.removesuffix("-start")
        if kind == "reduce-scatter":  # its result is one device's part
            work.collectives[kind] = (1.0, sum(map(byte_size, operands)))
        elif kind in COLLECTIVES:
            work.collectives[kind] = (1.0, byte_size(instruction.shape))
        if not fused and opcode not in FREE:
            work.bytes = _moved(instruction, operands)
        if opcode == "while":
            trips = _trip_count(instruction)
            for called in instruction.called("(?:body|condition)"):
                work = work.plus(total(called), 1.0 if trips is None else trips)
        elif opcode == "conditional":
            costs = [total(name) for name in _branches(instruction)]
            work = work.plus(max(costs, key=lambda c: (c.messages, c.flops, c.bytes)))
        elif opcode in ("fusion", "call"):
            for called in instruction.called("(?:calls|to_apply)"):
                work = work.plus(total(called, fused=opcode == "fusion"))
        return work

    return total(program.entry)


def _trip_count(loop: Instruction) -> int | None:
    """Returns the turns of a loop that XLA knows."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
    return int(known[1]) if known else None


def _branches(conditional: Instruction) -> list[str]:
    branches = conditional.called("branch_computations")
    return branches + conditional.called("(?:true|false)_computation")


class Work(NamedTuple):
    """What one instruction of a GPU's program reads and writes in bytes, and its operations.

    Products count by the type of their operands, such as "bf16". What else computes is "other".
    """

    bytes: float
    flops: dict[str, float]


def work(program: Program, step: Step) -> Work:
    """Returns the work of one run of a step."""
    instruction = step.instruction
    operands = program.operands(step)
    if instruction.opcode == "fusion":
        return _work_of_fusion(program, instruction.called("calls")[0])
    if instruction.opcode == "custom-call":
        return Work(_used(instruction, operands), _by_type(instruction, operands))
    return Work(_moved(instruction, operands), _by_type(instruction, operands))


def _work_of_fusion(program: Program, computation: str) -> Work:
    inside = program.by_name[computation]
    flops = collections.Counter[str]()
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for instruction in program.computations[computation]:
        operands = [inside[name].shape for name in instruction.operands if name in inside]
        flops.update(_by_type(instruction, operands))
        for operand in instruction.operands:
            users[operand].append(instruction)
    moved = 0.0
    for instruction in program.computations[computation]:
        if instruction.opcode == "parameter":
            moved += _read(instruction, users[instruction.name])
        if instruction.root:
            results = [instruction]
            if instruction.opcode == "tuple":
                results = [inside[operand] for operand in instruction.operands]
            moved += sum(_written(result, inside) for result in results)
    return Work(moved, dict(flops))


def _read(array: Instruction, users: Sequence[Instruction]) -> float:
    """Returns the bytes that a fusion reads of an array. A slice is not the array."""
    if len(users) != 1:
        return byte_size(array.shape)
    (user,) = users
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
    """Returns the operations of an instruction, by the type of the operands of a product."""
    if instruction.opcode == "custom-call":
        flops = _library_flops(instruction, operands)
    else:
        flops = _flops(instruction, operands)
    if not flops:
        return {}
    if instruction.opcode not in ("custom-call", "dot", "convolution"):
        return {"other": flops}
    kind, _ = next(itertools.chain.from_iterable(map(arrays_of, operands)))
    return {kind: flops}


def _library_flops(call: Instruction, operands: list[str]) -> float:
    """Returns the operations of a product or a convolution by cuBLAS or cuDNN."""
    arrays = []
    for text in (call.shape, *operands):
        # The first element of a tuple is the result, the others are scratch memory.
        arrays += [dims for _, dims in itertools.islice(arrays_of(text), 1)]
    contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.rest)
    if contracted:
        out, left, *_ = arrays
        sizes = [left[int(d)] for d in re.findall(r"\d+", contracted[1])]
        return 2.0 * math.prod(out) * math.prod(sizes)
    labels = re.search(r"dim_labels=\w+_(\w+)->", call.rest)
    if labels is None or "conv" not in call.rest:
        return 0.0
    # The operands are (images, kernel), for the gradient of the kernel (images, gradient of the
    # result), and for that of the images (gradient of the result, kernel).
    out, first, second, *_ = arrays
    kernel = second
    result = out
    if "convBackwardFilter" in call.rest:
        kernel = out
        result = second
    elif "convBackwardInput" in call.rest:
        result = first
    return _convolution_flops(result, kernel, labels[1])


def _convolution_flops(result: Sequence[int], kernel: Sequence[int], kernel_labels: str) -> float:
    """Returns two operations for each element of the result and each one of the kernel behind it.

    The label "o" marks the axis of the result's features.
    """
    features = kernel[kernel_labels.index("o")]
    return 2.0 * math.prod(result) * math.prod(kernel) / features


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
        name=name,
        shape=text[:end],
        opcode=opcode,
        argument=argument,
        operands=re.findall(r"%([\w.-]+)", argument),
        rest=rest[close:],
        root=root,
    )


def _closing(text: str) -> int:
    """Returns the place of the parenthesis that closes the first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    return len(text)


def arrays_of(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields type and dimensions of each array: ("f32", (2, 3)) for "f32[2,3]"."""
    for kind, dims in _SHAPE.findall(text):
        yield kind, tuple(int(n) for n in dims.split(",") if n)


_TYPES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def dtype(kind: str) -> np.dtype:
    """Returns the type of an array from its name in a program: float32 for "f32"."""
    if kind == "pred":
        return np.dtype(bool)
    letters = kind.rstrip("0123456789")
    return jnp.dtype(_TYPES[letters] + kind.removeprefix(letters))


def byte_size(text: str) -> float:
    """Returns the bytes of a shape as a program writes it, of all elements of a tuple."""
    sizes = [_width(kind) * math.prod(dims) for kind, dims in arrays_of(text)]
    return float(sum(sizes))


def _moved(instruction: Instruction, operands: list[str]) -> float:
    """Returns the bytes that an instruction reads and writes.

    A slice of an array is not the array.
    """
    out = byte_size(instruction.shape)
    sizes = list(map(byte_size, operands))
    if "dynamic-update-slice" in instruction.name:
        return 2 * sum(size for size in sizes if size != out)
    if "dynamic-slice" in instruction.name:
        sizes = [min(size, out) for size in sizes]
    return out + sum(sizes)


def _width(kind: str) -> float:
    return _SIZES.get(kind) or int(kind.strip("bsufc")) / 8


def _flops(instruction: Instruction, operands: list[str]) -> float:
    opcode = instruction.opcode
    kind, out = next(arrays_of(instruction.shape), ("s32", ()))
    if opcode in FREE | _MOVES or opcode.startswith(COLLECTIVES):
        return 0.0
    if not kind.startswith(("f", "bf", "c")):  # integers are not counted
        return 0.0
    arrays = []
    for text in operands:
        arrays += [dims for _, dims in arrays_of(text)]
    if opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        assert contracted
        sizes = [arrays[0][int(d)] for d in contracted[1].split(",") if d]
        return 2.0 * math.prod(out) * math.prod(sizes)
    if opcode == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
        assert labels
        return _convolution_flops(out, arrays[1], labels[1])
    if opcode.startswith("reduce") and arrays:
        return float(max(math.prod(out), math.prod(arrays[0])))
    return float(math.prod(out))
