"""How many instruction bundles the Pallas kernels of a program take on a TPU.

A compiler writes schedules of all operations of a program or of none, and writing all of a network
takes it many times as long as compiling (the gradient of a small CNN: 11 s, with schedules 188 s).
So the kernels are compiled again, each different one alone, with schedules. That takes a
second a kernel. A process of its own does it, since the compiler reads its options as it loads.
"""

import glob
import json
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import jax

from jaxdp.compilers import hlo, targets

_OPTIONS = (
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    "--xla_jf_emit_annotations=true",
)
# What the compiler writes into the configuration of a kernel that it has placed.
_PLACED = ("used_scoped_memory_configs", "retry_config", "aliasing_operands")


def of_kernels(target: str, text: str) -> dict[str, float]:
    """Returns the bundles of the kernels of a compiled program, by `targets.body`.

    A kernel that the compiler refuses alone is left out.
    """
    if targets.PALLAS not in text:
        return {}
    program = hlo.Program.parsed(text)
    steps, _ = program.steps(lambda instruction: 0.0)
    kernels = {}
    for step in steps:
        if targets.target_of(step.instruction) == targets.PALLAS:
            kernels[targets.body(step.instruction)] = _kernel(program, step)
    with tempfile.TemporaryDirectory() as folder:
        question = {"target": target, "kernels": list(kernels.values())}
        bundles = _in_process(folder, question)
    return {body: n for body, n in zip(kernels, bundles, strict=True) if n is not None}


def _kernel(program: hlo.Program, step: hlo.Step) -> dict[str, Any]:
    """Returns the operands, the results and the configuration of a kernel, for JSON."""
    _, _, text = step.instruction.rest.partition("backend_config=")
    config, _ = json.JSONDecoder().raw_decode(text)
    operands = ", ".join(program.operands(step))
    return {
        "operands": list(hlo.arrays_of(operands)),
        "results": list(hlo.arrays_of(step.instruction.shape)),
        "several": step.instruction.shape.startswith("("),
        "config": {name: value for name, value in config.items() if name not in _PLACED},
    }


def _in_process(folder: str, question: Mapping[str, Any]) -> list[float | None]:
    """Returns the bundles of kernels, None for those that were not compiled."""
    pathlib.Path(folder, targets.QUESTION).write_text(json.dumps(question))
    environment = targets.environment(question["target"])
    options = [f"--xla_jf_dump_to={folder}", *_OPTIONS]
    environment["LIBTPU_INIT_ARGS"] = " ".join(options)
    answer = targets.answered("jaxdp.compilers.schedules", folder, environment)
    bundles: list[float | None] = answer.get("bundles", [None] * len(question["kernels"]))
    return bundles


def scheduled(folder: str) -> list[float | None]:
    """Returns the bundles of the kernels in a folder. It runs in the other process."""
    question = json.loads(pathlib.Path(folder, targets.QUESTION).read_text())
    bundles = []
    for kernel in question["kernels"]:
        try:
            _compile(question["target"], kernel)
            bundles.append(read(folder))
        except jax.errors.JaxRuntimeError:
            bundles.append(None)
        for path in _schedules(folder):  # so that the next one finds its own
            os.remove(path)
    return bundles


def _compile(target: str, kernel: Mapping[str, Any]) -> None:
    operands = [_shape(*array) for array in kernel["operands"]]
    results = [_shape(*array) for array in kernel["results"]]
    call = jax.ffi.ffi_call(
        targets.PALLAS,
        results if kernel["several"] else results[0],
        custom_call_api_version=1,
        legacy_backend_config=json.dumps(kernel["config"]),
    )
    targets.compile_for(target, call, operands)


def _shape(kind: str, dims: list[int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, hlo.dtype(kind))


def _schedules(folder: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), "*final_bundles.txt"))


def read(folder: str) -> float | None:
    """Returns the bundles of the kernel whose schedule lies in a folder, None without one."""
    for path in _schedules(folder):
        if "schedule-analysis" in path:
            continue
        text = pathlib.Path(path).read_text()
        if re.search(r"/\* entry bundle: %[\w.-]+ = custom-call\(", text):
            return bundles(text)
    return None


_EXIT = re.compile(
    r"(%\w+) = scmp\.\w+\.\w+\.totalorder (?:\(!?%\w+\), )?%\w+, (%?\w+) /\* loop exit test \*/"
)
_BRANCH = re.compile(r"sbr\.rel \(!?(%\w+)\) target")


def bundles(text: str) -> float:
    """Returns the bundles that a schedule runs: those of a loop count as often as it turns.

    A schedule has a line for each bundle. The first one of the body of a loop says "LB". The body
    ends with a branch on the result of a test, which compares with the number of turns. A loop
    whose number is no constant counts once. A bundle takes a cycle where nothing stalls, so this is
    a lower bound, except for the first and the last turn of a pipeline, where some parts of the
    body are skipped.
    """
    times: list[float] = []
    open_loops: list[int] = []
    turns: dict[str, float] = {}
    for line in text.splitlines():
        bundle = re.match(r"^\s*(?:0x[0-9a-f]+|0)\s*(\w*)\s*:", line)
        if bundle is None:
            continue
        if bundle[1] == "LB":
            open_loops.append(len(times))
        times.append(1.0)
        for predicate, bound in _EXIT.findall(line):
            turns[predicate] = float(bound) if bound.isdigit() else 1.0
        for predicate in _BRANCH.findall(line):
            if predicate in turns and open_loops:
                first = open_loops.pop()
                times[first:] = [turns[predicate] * n for n in times[first:]]
    return math.fsum(times)


if __name__ == "__main__":
    [dumped] = sys.argv[1:]
    answer = {"bundles": scheduled(dumped)}
    pathlib.Path(dumped, targets.ANSWER).write_text(json.dumps(answer))
