"""Times what a user waits for before the first result: a first private step, and the demo, with and
without a cache.

    python -m benchmarks run start --cases mlp,cnn,resnet20,vit,lm,demo --rounds 3

A run is a new process. "cold" begins with an empty folder of compiled programs, "warm" with that of
the cold run, as the second run of a launcher does. The time is that from the start of the process
to the end of the first private step of a case of `benchmarks.bench_steps`, whose parameters it
makes. "import" ends before the first computation. "demo" is `make demo` as a whole, so it has the
computation of all stages in both runs."""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import pages
from benchmarks.registry import ROOT

DEMO = ["-m", "launch.lifecycle", "--config", "configs/lifecycle_digits.py", "--workdir"]
# What a launcher does before it computes, and one step. It prints the seconds since the epoch
# before and after.
STEP = """
import contextlib, sys, time
import jax
from benchmarks import bench_steps, problems
from jaxdp.memory import keep_freed_memory

keep_freed_memory()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(time.time())
with contextlib.ExitStack() as running:
    steps = bench_steps.our_steps(problems.cases()[sys.argv[1]], False, running)
    jax.block_until_ready(steps["private"]())
    print(time.time(), flush=True)
"""


def started(case: str, cache: pathlib.Path, workdir: pathlib.Path) -> dict[str, float]:
    """Returns seconds from the start of a process."""
    demo = case == "demo"
    command = [sys.executable, *([*DEMO, str(workdir)] if demo else ["-c", STEP, case])]
    folder = "XDG_CACHE_HOME" if demo else "JAX_COMPILATION_CACHE_DIR"
    begun = time.time()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, folder: str(cache)},
        check=True,
        capture_output=True,
        text=True,
    )
    if demo:
        return {"end": time.time() - begun}
    ends = [float(line) - begun for line in done.stdout.splitlines()[-2:]]
    return dict(zip(("import", "end"), ends, strict=True))


def measured(case: str, rounds: int) -> dict[str, float]:
    """Returns medians over rounds of a cold run and a warm one."""
    seconds = {"import": [], "cold": [], "warm": [], "ratio": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            places = pathlib.Path(folder)
            cold, warm = (
                started(case, places / "cache", places / name) for name in ("cold", "warm")
            )
        seconds["import"] += [cold["import"]] if "import" in cold else []
        seconds["cold"].append(cold["end"])
        seconds["warm"].append(warm["end"])
        seconds["ratio"].append(warm["end"] / cold["end"])
    return {name: statistics.median(values) for name, values in seconds.items() if values}


def tables(report) -> dict:
    rows = [{"process": case} | row for case, row in report["cases"].items()]
    columns = {"process": "{process}"}
    columns |= {name: f"{{{name}:.3g}}" for name in ("import", "cold", "warm", "ratio")}
    return {"start": pages.lines(rows, columns)}


FLAGS = {"cases": "mlp,cnn,resnet20,vit,lm,demo", "rounds": 3}


def measure(flags) -> dict:
    cases = {}
    for case in flags.cases.split(","):
        cases[case] = measured(case, flags.rounds)
        print(case, {name: round(value, 2) for name, value in cases[case].items()}, flush=True)
    return {"rounds": flags.rounds, "cases": cases}
