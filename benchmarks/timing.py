"""Shared parts of the benchmarks: timing side by side, XLA's allocations, and the report."""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import jaxdp

Seconds = dict[str, list[float]]


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[Seconds, Seconds]:
    """Returns wall and processor seconds of every call in every round, each after an untimed call
    of it.

    Processor time counts all threads. A busy machine distorts it less than wall time.
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
    """Returns what XLA allocates for a compiled function beyond its arguments: temporaries and
    outputs."""
    memory = compiled.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6


def missing(*modules: str) -> list[str]:
    """Returns the modules that are not installed."""
    import importlib.util

    return [name for name in modules if importlib.util.find_spec(name) is None]


def arguments(doc: str | None, *, output: str) -> argparse.ArgumentParser:
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


def write(report: dict[str, Any], path: str) -> None:
    """Writes the report as JSON."""
    output = pathlib.Path(path)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nWritten to {output}")
