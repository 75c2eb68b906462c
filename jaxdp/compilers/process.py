"""Compiles a program for a machine that is not there, in a process with the environment that its
compiler needs.

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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jaxdp.compilers import targets

PROGRAM, QUESTION, ANSWER = "program.bin", "question.json", "answer.json"
# What the compiler of a TPU says of a program that does not fit: "Used 17.90G of 15.75G hbm", or
# that the memory "required for HLO temporaries (640.00G) exceeds" what there is.
_REFUSED = re.compile(
    r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT]?)(?: of [\d.]+[KMGT]? hbm|\) exceeds)"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class NotCompiled(RuntimeError):
    """The compiler of a target refused a program for another reason than its memory, or it took too
    long.
    """


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
    target: str, function: Callable[..., Any], *args: Any, seconds: float | None = None
) -> Estimate:
    """Returns what the compiler of a target says about `function(*args)` on one chip.

    Args:
      target: A name of `TARGETS`.
      function: A function of pytrees of arrays. What `jax.jit` has compiled keeps its donated
          arguments.
      args: Arrays or `jax.ShapeDtypeStruct`s of any shape and type, typed keys included. They are
          not computed with.
      seconds: How long the compiler may take.

    Raises:
      ValueError: There is no such target, or an argument is divided among devices.
      ImportError: The compiler of the target is not installed.
      NotCompiled: The compiler refused the program, or it took too long. The message has what it
          said.
    """
    chosen = targets.require(target)
    answer = _answer(target, *exported(target, function, args), seconds)
    if "error" in answer:
        if (needed := needed_memory(answer["error"])) is None:
            raise NotCompiled(
                f"the compiler of {target} refused the program: {answer['error'][:400]}."
            )
        return Estimate(target, needed, None, {})
    sizes = answer["memory"]
    memory = sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]
    # `total` is in cycles for a TPU, and in seconds for a GPU.
    taken = answer["total"] / chosen.clock if chosen.clock else answer["total"]
    return Estimate(target, memory, taken, answer)


def exported(
    target: str, function: Callable[..., Any], args: Sequence[Any]
) -> tuple[bytes, tuple[int, ...]]:
    """Returns a program of flat arrays for a target, as `jax.export` writes it, and the numbers of
    donated arguments.

    Keys become their words, since a file knows only the kinds of keys of JAX. The form is that of
    the target.
    """
    if any(_devices(x) > 1 for x in jax.tree.leaves(args)):
        raise ValueError("args must be for one device, got an array that is divided among several.")
    traced = (function if hasattr(function, "trace") else jax.jit(function)).trace(*args)
    run = jaxpr_as_fun(traced.jaxpr)
    shapes = traced.jaxpr.in_avals
    arguments = jax.tree.leaves(traced.args_info)
    donated = tuple(i for i, argument in enumerate(arguments) if argument.donated)

    def flat(*words: Any) -> list[Any]:
        results = run(*(_key(x, shape.dtype) for x, shape in zip(words, shapes, strict=True)))
        return [jax.random.key_data(x) if _is_key(x.dtype) else x for x in results]

    words = [_words(shape) for shape in shapes]
    platform = targets.TARGETS[target].platform
    # What the step does not read lies on the chip all the same.
    file = jax.export.export(jax.jit(flat, keep_unused=True), platforms=[platform])(*words)
    return bytes(file.serialize()), donated


def compiled(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what the compiler says about the program in a folder, or its error. Runs in the
    process of `estimate`.
    """
    root = pathlib.Path(folder)
    question = json.loads((root / QUESTION).read_text())
    target, donated = question["target"], question["donated"]
    program = jax.export.deserialize(bytearray((root / PROGRAM).read_bytes()))
    try:
        found, _, taken = targets.compile_for(
            target, program.call, program.in_avals, donated, keep_unused=True
        )
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error)}
    return {**targets.estimate(target, found, str(root)), "compile_s": taken}


def needed_memory(message: str) -> int | None:
    """Returns the bytes that a refused program takes, from the message of the compiler, None if it
    is about others.
    """
    refused = _REFUSED.search(message)
    return int(float(refused[1]) * _UNITS[refused[2]]) if refused else None


@functools.cache  # several parts of a run have the same program
def _answer(
    target: str, program: bytes, donated: tuple[int, ...], seconds: float | None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = targets.environment(target, folder)
        pathlib.Path(folder, PROGRAM).write_bytes(program)
        pathlib.Path(folder, QUESTION).write_text(
            json.dumps({"target": target, "donated": donated})
        )
        return _asked(folder, environment, seconds)


def _asked(folder: str, environment: Mapping[str, str], seconds: float | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxdp.compilers", folder]
    package = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    how: dict[str, Any] = {"env": {**environment, "PYTHONPATH": path}, "timeout": seconds}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, **how)
    except subprocess.TimeoutExpired:
        return {"error": f"it was not compiled in {seconds:g} s"}
    answer = pathlib.Path(folder, ANSWER)
    if ended.returncode or not answer.exists():
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"its process ended with {ended.returncode}"}
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _devices(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    return 1 if sharding is None else len(sharding.device_set)


def _is_key(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _words(shape: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array, or of the words of keys."""
    if not _is_key(shape.dtype):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape.shape, shape.dtype))
    return jax.ShapeDtypeStruct(words.shape, words.dtype)


def _key(words: Any, dtype: Any) -> Any:
    """Returns keys of a type from their words, and other arrays as they are."""
    if not _is_key(dtype):
        return words
    kinds: list[Any] = []
    jax.eval_shape(
        lambda key: kinds.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype)
    )
    return jax.random.wrap_key_data(words, impl=kinds[0])
