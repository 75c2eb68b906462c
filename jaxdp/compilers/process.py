"""Compiles a program for a machine that is not there, in a process of its own.

This process traces the program and writes it into a file by `jax.export`. The other one loads the
compiler, which reads its options from the environment as it loads, compiles the file, and writes
what it found. If a compiler ends its process, this process goes on.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jaxdp.compilers import hlo, schedules, targets
from jaxdp.transforms import layouts

PROGRAM = "program.bin"
# What the compiler of a TPU says of a program that does not fit: "Used 17.90G of 15.75G hbm", or
# that the memory "required for HLO temporaries (640.00G) exceeds" what there is.
_REFUSED = re.compile(
    r"(?:Used |required for HLO temporaries \()"
    r"([\d.]+)([KMGT]?)"
    r"(?: of [\d.]+[KMGT]? hbm|\) exceeds)"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


# The file lives as long as the process that reads it, so no later version has to understand it.
_LAYOUTS = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]


class NotCompiled(RuntimeError):
    """The compiler of a target took too long, or refused a program, but not for its memory."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a compiler says about one call of a program. None of it was measured.

    Attributes:
      target: The name of the target.
      memory: The bytes of a chip for arguments, results and temporaries.
      seconds: The time of a call, None for a program that does not fit. For a TPU it is the cycles
        that the compiler expects, over the clock. For a GPU it is the time in which each kernel
        would read and write its bytes, or do its operations, at the peak of the card.
      details: The numbers behind it by name, such as "cycles", "bytes" and "kernels", the
        "costliest" operations, and the "compile_s" seconds of the compiler.
    """

    target: str
    memory: int
    seconds: float | None
    details: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        """Whether a chip has the memory."""
        return self.seconds is not None and self.memory <= targets.TARGETS[self.target].memory


def estimate(
    target: str,
    function: Callable[..., Any],
    *args: Any,
    seconds: float | None = None,
    assumed: hlo.Assumed = hlo.ASSUMED,
) -> Estimate:
    """Returns what the compiler of a target says about `function(*args)` on one chip.

    Args:
      target: A name of `TARGETS`.
      function: A function of pytrees of arrays. What `jax.jit` has compiled keeps its donated
          arguments.
      args: Arrays or `jax.ShapeDtypeStruct`s of any shape and type, typed keys included. They are
          not computed with.
      seconds: How long the compiler may take.
      assumed: What the program does not tell of its run: turns of loops, and branches.

    Raises:
      ValueError: There is no such target, or an argument is divided among devices.
      ImportError: The compiler of the target is not installed.
      NotCompiled: The compiler refused the program, or it took too long. The message has what it
          said.
    """
    machine = targets.require(target)
    program, donated = exported(target, function, args)
    answer = _answer(target, program, donated, seconds, assumed)
    if "error" in answer:
        needed = needed_memory(answer["error"])
        if needed is None:
            raise NotCompiled(
                f"the compiler of {target} refused the program: {answer['error'][:400]}."
            )
        return Estimate(target, needed, None, {})
    sizes = answer["memory"]
    memory = sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]
    # `total` is in cycles for a TPU, and in seconds for a GPU.
    time = answer["total"] / machine.clock if machine.clock else answer["total"]
    return Estimate(target, memory, time, answer)


def exported(
    target: str, function: Callable[..., Any], args: Sequence[Any]
) -> tuple[bytes, tuple[int, ...]]:
    """Returns a program of flat arrays for a target, and the numbers of donated arguments.

    The program is as `jax.export` writes it. Keys become their words, since a file knows only the
    kinds of keys of JAX. The form is that of the target.
    """
    if any(_devices(x) > 1 for x in jax.tree.leaves(args)):
        raise ValueError("args must be for one device, got an array that is divided among several.")
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    traced = jitted.trace(*args)
    run = jaxpr_as_fun(traced.jaxpr)
    shapes = traced.jaxpr.in_avals
    arguments = jax.tree.leaves(traced.args_info)
    donated = tuple(i for i, argument in enumerate(arguments) if argument.donated)

    def flat(*words: Any) -> list[Any]:
        arguments = [_key(x, shape.dtype) for x, shape in zip(words, shapes, strict=True)]
        results = run(*arguments)
        return [jax.random.key_data(x) if _is_key(x.dtype) else x for x in results]

    platform = targets.TARGETS[target].platform
    # What the step does not read lies on the chip all the same.
    program = jax.jit(flat, keep_unused=True)
    export = jax.export.export(program, platforms=[platform], disabled_checks=_LAYOUTS)
    with layouts.in_exports():
        file = export(*map(_words, shapes))
    return bytes(file.serialize()), donated


def compiled(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what the compiler says about the program in a folder, or its error.

    It runs in the other process.
    """
    root = pathlib.Path(folder)
    question = json.loads((root / targets.QUESTION).read_text())
    target = question["target"]
    donated = question["donated"]
    program = jax.export.deserialize(bytearray((root / PROGRAM).read_bytes()))
    try:
        executable, seconds = targets.compile_for(target, program.call, program.in_avals, donated)
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error)}
    bundles = schedules.of_kernels(target, executable.as_text())
    assumed = hlo.Assumed(*question["assumed"])
    return {**targets.estimate(target, executable, bundles, assumed), "compile_s": seconds}


def needed_memory(message: str) -> int | None:
    """Returns the bytes that a refused program takes, by the message of the compiler.

    It is None if the message is about something else.
    """
    refused = _REFUSED.search(message)
    if refused is None:
        return None
    number, unit = refused.groups()
    return int(float(number) * _UNITS[unit])


@functools.cache  # several parts of a run have the same program
def _answer(
    target: str,
    program: bytes,
    donated: tuple[int, ...],
    seconds: float | None,
    assumed: hlo.Assumed,
) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = targets.environment(target)
        question = json.dumps({"target": target, "donated": donated, "assumed": assumed})
        pathlib.Path(folder, PROGRAM).write_bytes(program)
        pathlib.Path(folder, targets.QUESTION).write_text(question)
        return targets.answered("jaxdp.compilers", folder, environment, seconds)


def _devices(x: Any) -> int:
    """Returns the number of devices that hold an array."""
    sharding = getattr(x, "sharding", None)
    return 1 if sharding is None else len(sharding.device_set)


def _is_key(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _words(shape: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array, or of the words of keys."""
    if not _is_key(shape.dtype):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype)
    keys = jax.ShapeDtypeStruct(shape.shape, shape.dtype)
    words = jax.eval_shape(jax.random.key_data, keys)
    return jax.ShapeDtypeStruct(words.shape, words.dtype)


def _key(words: Any, dtype: Any) -> Any:
    """Returns keys of a type from their words, and other arrays as they are."""
    if not _is_key(dtype):
        return words
    kinds: list[Any] = []

    def note(key: jax.Array) -> None:
        kinds.append(jax.random.key_impl(key))

    # Only a key knows its kind, and tracing makes one of a type.
    jax.eval_shape(note, jax.ShapeDtypeStruct((), dtype))
    return jax.random.wrap_key_data(words, impl=kinds[0])
