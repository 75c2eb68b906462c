"""Shared parts of the benchmarks: timing side by side, XLA's allocations, and the report."""

import argparse
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import jaxdp
from benchmarks.registry import Benchmark
from jaxdp.report import format_table

Seconds = dict[str, list[float]]


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[Seconds, Seconds]:
    """Returns wall and processor seconds of every call in every round.

    An untimed call comes before each timed one. Processor time counts all threads. A busy machine
    distorts it less than wall time.
    """
    wall: Seconds = {name: [] for name in calls}
    cpu: Seconds = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            jax.block_until_ready(call())  # the other call has emptied the caches
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


def allocated_mb(compiled: Any) -> float:
    """Returns the megabytes that XLA allocates for temporaries and outputs."""
    memory = compiled.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6


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


def show(
    title: str, rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str] | None = None
) -> None:
    """Prints a line for each step of a case."""
    table = []
    for step, row in rows.items():
        names = row if columns is None else columns
        table.append({"step": step} | {name: row.get(name) for name in names})
    print(f"\n{title}\n{format_table(table, digits=3)}", flush=True)


def accuracy(row: Mapping[str, Any]) -> str:
    """Returns the mean "accuracies" of a row in percent, and in brackets their deviation."""
    percent = 100 * np.asarray(row["accuracies"])
    return f"{percent.mean():.1f} ({percent.std(ddof=1):.1f})"


def page_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of a page from cells that are text already."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def arguments(doc: str | None, *, output: str | None) -> argparse.ArgumentParser:
    """Returns a parser with `--output`, and the module's docstring as its help."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default=output)
    return parser


def machine() -> dict[str, Any]:
    """Returns the machine and the versions of the run."""
    return {
        "device": jax.devices()[0].device_kind,
        "platform": platform.platform(),
        "jax": jax.__version__,
        "jaxdp": jaxdp.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def run(benchmark: Benchmark, given: Sequence[str]) -> None:
    """Measures as the flags say, and writes the report."""
    module = benchmark.load()
    parser = parser_of(benchmark)
    flags = parser.parse_args(given)
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
    parser = arguments(module.__doc__, output=None)
    name = benchmark.module.removeprefix("bench_")
    parser.prog = " ".join(["python -m benchmarks", "run", name])
    parser.add_argument(
        "--update",
        action="store_true",
        help=f"write {benchmark.output}, from which pages are made, and not a copy in .bench",
    )
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def earlier(path: str) -> dict[str, Any]:
    """Returns the report that the file already has. Studies are added to it one by one."""
    file = pathlib.Path(path)
    if not file.exists():
        return {}
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report


def write(report: dict[str, Any], path: str) -> None:
    """Writes the report as JSON."""
    output = pathlib.Path(path)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nWritten to {output}")
