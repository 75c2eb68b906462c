"""The time that the kernels of a step take on a GPU or a TPU, by the JAX names that they come from.

JAX's profiler sees a graph of CUDA as a whole. `XLA_FLAGS=--xla_gpu_enable_command_buffer=` lets
XLA launch kernels one by one."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxdp.compilers import hlo

# The planes of devices in a trace, and the lines that have one event for each kernel.
PLANES = ("/device:GPU", "/device:TPU")
LINES = ("Stream", "XLA Ops")
NUMBER = re.compile(r"[._]\d+$")  # behind the name of a kernel of XLA
TURNS = 3
MOST = 30  # kernels of a step in a report


def events(trace: Any) -> Iterator[tuple[str, str, float]]:
    """Yields the HLO instruction, the kernel and the milliseconds of each event of a device.

    `trace` is a `jax.profiler.ProfileData`.
    """
    for plane in trace.planes:
        if not plane.name.startswith(PLANES):
            continue
        for line in plane.lines:
            if not line.name.startswith(LINES):
                continue
            for event in line.events:
                instruction = dict(event.stats).get("hlo_op", "")
                yield str(instruction), event.name, event.duration_ns / 1e6


def by_source(trace: Any, text: str, turns: int) -> list[dict]:
    """Returns rows of a trace of `turns` equal calls, the longest kernels first.

    Kernels of equal layers have one JAX name, and differ in a number behind their own. They are one
    row.

    Args:
      trace: As in `events`.
      text: The compiled program, as `compiled.as_text()` returns it.
      turns: The number of calls.

    Returns:
      The JAX name, the kernel, one of its HLO instructions, "ms" and "launches" of one call, and
      the share of all kernels.
    """
    program = hlo.Program.parsed(text)
    sources = {}
    for body in program.computations.values():
        for instruction in body:
            sources[instruction.name] = instruction.source
    seconds: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    instructions = {}
    for instruction, kernel, ms in events(trace):
        row = sources.get(instruction, ""), NUMBER.sub("", kernel)
        seconds[row].append(ms)
        instructions.setdefault(row, instruction)
    total = sum(map(sum, seconds.values()))
    rows = []
    for (source, kernel), times in seconds.items():
        rows.append(
            {
                "source": source,
                "kernel": kernel[:100],
                "instruction": instructions[source, kernel],
                "ms": sum(times) / turns,
                "launches": len(times) / turns,
                "share": sum(times) / total,
            }
        )
    rows.sort(key=lambda row: -row["ms"])
    return rows


def profiled(call: Callable, text: str) -> list[dict]:
    """Returns the longest kernels of a call, as `by_source` does. A CPU has none."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would be most of a trace, and are not read
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(TURNS):
                jax.block_until_ready(call())
        traces = pathlib.Path(folder).rglob("*.xplane.pb")
        trace = jax.profiler.ProfileData.from_file(str(next(traces)))
        return by_source(trace, text, TURNS)[:MOST]
