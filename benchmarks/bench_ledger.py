"""Times the ledger: writers in parallel, spends of very many different events, questions, and
opening a large file.

    python -m benchmarks run ledger [--distinct 100000] [--seconds 3]

There is no peer, because other accountants keep no file. The ratios compare parts of one run: 8
writers with 1, the last spends with the first ones, and the best served writer with the worst."""

import os
import pathlib
import statistics
import tempfile
import time

from jaxdp.privacy import (
    ComposedDpEvent,
    GaussianDpEvent,
    Ledger,
    PoissonSampledDpEvent,
    PureDpEvent,
    epsilon,
)


def writers(count: int, seconds: float) -> dict[str, float]:
    """Times processes that spend as fast as they can."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "ledger.sqlite"
        with Ledger(path) as ledger:
            ledger.register("data", adjacency="add_remove", unit="example", epsilon=1e6, delta=0.0)
        start = time.time() + 0.5
        read, write = os.pipe()
        pids = []
        for _ in range(count):
            pids.append(os.fork())
            if not pids[-1]:
                _write_until(path, start, start + seconds, write)
        for pid in pids:
            os.waitpid(pid, 0)
        os.close(write)
        with os.fdopen(read) as lines:
            served, waits = zip(*(map(float, line.split()) for line in lines), strict=True)
    return {
        "spends/s": sum(served) / seconds,
        "worst wait, ms": 1e3 * max(waits),
        "best / worst served": max(served) / min(served),
    }


def _write_until(path: pathlib.Path, start: float, end: float, pipe: int):
    worst, served = 0.0, 0
    with Ledger(path) as ledger:
        time.sleep(max(0.0, start - time.time()))
        while time.time() < end:
            began = time.perf_counter()
            with ledger.spend("data", PureDpEvent(0.001)):
                pass
            worst, served = max(worst, time.perf_counter() - began), served + 1
    os.write(pipe, f"{served} {worst}\n".encode())
    os._exit(0)


def distinct(make, count: int) -> dict[str, float]:
    """Times spends of different events in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "ledger.sqlite"
        took = []
        with Ledger(path) as ledger:
            ledger.register("data", adjacency="add_remove", unit="example", epsilon=1e3, delta=1e-5)
            for number in range(count):
                began = time.perf_counter()
                with ledger.spend("data", make(number)):
                    pass
                took.append(time.perf_counter() - began)
            began = time.perf_counter()
            ledger.epsilon("data")
            epsilon_s = time.perf_counter() - began
        began = time.perf_counter()
        with Ledger(path):
            opened = time.perf_counter() - began
    part = max(1, count // 100)
    first, last = (1e3 * statistics.median(times) for times in (took[:part], took[-part:]))
    return {
        "first spends, ms": first,
        "last spends, ms": last,
        "worst of the last, ms": 1e3 * max(took[-part:]),
        "ratio": last / first,
        "epsilon(), s": epsilon_s,
        "opening and verifying, s": opened,
    }


def sampled(count: int) -> dict[str, float]:
    """Times epsilon of different Poisson-sampled Gaussians, each composed ten times, and of one
    more."""
    took = []
    for extra in (0, 1):
        events = [
            PoissonSampledDpEvent(0.01, GaussianDpEvent(1 + 0.01 * i)) for i in range(count + extra)
        ]
        began = time.perf_counter()
        epsilon(ComposedDpEvent([event for event in events for _ in range(10)]), delta=1e-5)
        took.append(time.perf_counter() - began)
    return {"epsilon(), s": took[0], "of one more, s": took[1]}


FLAGS = {
    "distinct": (100_000, "different events of one account"),
    "seconds": (3.0, "duration of the writers"),
}


def measure(flags) -> dict:
    few = flags.distinct // 10  # composing the PLD of more leaves would take minutes
    rows = {
        "1 writers": writers(1, flags.seconds),
        "8 writers": writers(8, flags.seconds),
        f"{flags.distinct} different Gaussians": distinct(
            lambda i: GaussianDpEvent(1e4 + 0.01 * i), flags.distinct
        ),
        f"{few} different pure events": distinct(lambda i: PureDpEvent(1e-7 * (1 + 1e-4 * i)), few),
        "100 different sampled Gaussians": sampled(100),
    }
    for name, row in rows.items():
        print(name, *(f"{key} {value:.4g}" for key, value in row.items()), sep=", ")
    return {"ledger": rows}
