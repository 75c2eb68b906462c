"""Shared parts of the benchmarks: timing side by side, XLA's allocations, and the report."""

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

import jaxdp
from benchmarks.registry import Benchmark
from jaxdp.report import format_table

Seconds = dict[str, list[float]]


def interleaved(
    calls: Mapping[Any, Callable], rounds: int, *, warm: bool = True
) -> tuple[Seconds, Seconds]:
    """Returns wall and processor seconds of every call in every round.

    An untimed call comes before each timed one, unless `warm` is False. Processor time counts all
    threads. A busy machine distorts it less than wall time.
    """
    wall = {name: [] for name in calls}
    cpu = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if warm:  # the other call has emptied the caches
                jax.block_until_ready(call())
            start, start_cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - start_cpu)
    return wall, cpu


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Returns the median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(seconds, base, strict=True))


def median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def base_of(name: str) -> str:
    """Returns the plain step that a step is over: that in PyTorch for its peers."""
    return "torch plain" if name.startswith(("torch", "Opacus", "fastDP")) else "plain"


def ratios(name: str, wall: Seconds, cpu: Seconds, bases: Mapping[str, str]) -> dict[str, float]:
    """Returns the times of a call over others, by the names of columns."""
    row = {}
    for column, base in bases.items():
        row[f"over_{column}"] = median_ratio(wall[name], wall[base])
        row[f"cpu_over_{column}"] = median_ratio(cpu[name], cpu[base])
    return row


class Compiled(NamedTuple):
    """A compiled program and its arguments, and the seconds of tracing and of both."""

    program: Any
    arguments: tuple
    trace_s: float
    compile_s: float
    compile_cpu_s: float

    def __call__(self):
        return self.program(*self.arguments)

    @property
    def memory_mb(self) -> float:
        """Returns the megabytes that XLA allocates for temporaries and outputs."""
        return allocated_mb(self.program)


def compiled(function: Callable, *arguments, static: tuple = (), **options) -> Compiled:
    """Compiles a function for these arguments, after those of `static`, with options of `jit`."""
    jitted = function if hasattr(function, "lower") else jax.jit(function, **options)
    start, start_cpu = time.perf_counter(), time.process_time()
    lowered = jitted.lower(*static, *arguments)
    traced = time.perf_counter() - start
    program = lowered.compile()
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return Compiled(program, arguments, traced, seconds, cpu)


class Step(NamedTuple):
    """A call that is timed, and what its row has without timing."""

    call: Callable
    row: dict


def step_rows(
    steps: Mapping[str, Step],
    rounds: int,
    bases: Callable,
    derive: Callable = lambda rows, seconds: None,
) -> dict[str, dict]:
    """Returns a row for each step: medians, and ratios to the steps that `bases` names by column.

    `derive(rows, seconds)` may add steps whose times follow from the measured ones.
    """
    wall, cpu = interleaved({name: step.call for name, step in steps.items()}, rounds)
    rows = {name: dict(step.row) for name, step in steps.items()}
    derive(rows, (wall, cpu))
    for name, row in rows.items():
        row["wall_ms"], row["cpu_ms"] = median_ms(wall[name]), median_ms(cpu[name])
        there = {column: base for column, base in bases(name).items() if base in wall}
        row |= ratios(name, wall, cpu, there)
    return rows


def allocated_mb(compiled) -> float:
    """Returns the megabytes that XLA allocates for temporaries and outputs."""
    memory = compiled.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6


def held_bytes(compiled) -> int:
    """Returns the bytes of arguments, results and temporary arrays on one device."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes + memory.temp_size_in_bytes
    return memory.argument_size_in_bytes + results


def missing(*modules: str) -> list[str]:
    """Returns the modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def peers(requested: bool, *modules: str) -> tuple[bool, bool | str]:
    """Returns whether the peers run, and the entry of the report about them."""
    absent = missing(*modules) if requested else []
    if not absent:
        return requested, requested
    reason = f"not installed: {', '.join(absent)}"
    print(f"Peers are left out, {reason}.")
    return False, reason


def show(title: str, rows: Mapping[str, Mapping] | Iterable[Mapping]):
    """Prints a line for each row, without its lists and dicts. The rows of steps have names."""
    if isinstance(rows, Mapping):
        rows = [{"step": step} | row for step, row in rows.items()]
    table = []
    for row in rows:
        table.append({k: value for k, value in row.items() if not isinstance(value, list | dict)})
    print(f"\n{title}\n{format_table(table, digits=3)}", flush=True)


def each(names: Iterable[str], rows_of: Callable) -> dict:
    """Returns the rows of each case, and prints them at once."""
    cases = {}
    for name in names:
        cases[name] = rows_of(name)
        show(name, cases[name])
    return cases


def chosen(names: Iterable[str], parts: str) -> list[str]:
    """Returns the names that have one of several parts, which semicolons separate."""
    return [name for name in names if any(part in name for part in parts.split(";"))]


def parser(doc: str | None, flags: Mapping) -> argparse.ArgumentParser:
    """Returns a parser of flags, with a module's docstring as its help.

    A flag is the options of argparse, or a default, or a default and a help. The type of the
    default is the flag's. A False is a switch.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, flag in flags.items():
        options = flag
        if not isinstance(flag, dict):
            default, text = flag if isinstance(flag, tuple) else (flag, None)
            options = {"type": type(default), "default": default, "help": text}
            if default is False:
                options = {"action": "store_true", "help": text}
        parser.add_argument(f"--{name}", **options)
    return parser


def machine() -> dict:
    """Returns the machine and the versions of the run."""
    return {
        "device": jax.devices()[0].device_kind,
        "platform": platform.platform(),
        "jax": jax.__version__,
        "jaxdp": jaxdp.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def run(benchmark: Benchmark, given: Sequence[str]):
    """Measures as the flags say, and writes the report."""
    module = benchmark.load()
    flags = parser_of(benchmark).parse_args(given)
    flags.output = flags.output or benchmark.place(update=flags.update)
    report = module.measure(flags)
    if report is None:  # a process that measures one point for another one
        return
    if benchmark.with_machine:
        report = machine() | report
    write(report, flags.output)


def parser_of(benchmark: Benchmark) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark's flags."""
    module = benchmark.load()
    text = f"write {benchmark.output}, from which pages are made, and not a copy in .bench"
    flags = {"output": {}, "update": (False, text)} | getattr(module, "FLAGS", {})
    result = parser(module.__doc__, flags)
    name = benchmark.module.removeprefix("bench_")
    result.prog = " ".join(["python -m benchmarks", "run", name])
    return result


def swept(measure: Callable, *factors: Iterable) -> list:
    """Returns the row of each combination of the factors, and prints it at once."""
    rows = []
    for point in itertools.product(*factors):
        rows.append(measure(*point))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def earlier(path: str) -> dict:
    """Returns the report that the file already has. Studies are added to it one by one."""
    file = pathlib.Path(path)
    if not file.exists():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


def rounded(found, rule: Callable[[float], float]):
    """Returns results with rounded floats, which keeps their file small."""
    if isinstance(found, dict):
        return {key: rounded(value, rule) for key, value in found.items()}
    if isinstance(found, list):
        return [rounded(value, rule) for value in found]
    return rule(found) if isinstance(found, float) else found


def write(report: dict, path: str):
    """Writes the report as JSON."""
    output = pathlib.Path(path)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nWritten to {output}")
