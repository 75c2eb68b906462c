"""Measures how long a step waits for its examples, with and without reading ahead.

    python -m benchmarks run reading --update

A source either opens a file for each example, or sleeps for a part of a step, as one does that
waits for a network. "ahead" takes the batches of `PrivateTrainer.batches`, as `fit` does. "inline"
reads a batch when its step is due. The wait of a step is the wall time until its batch is on the
device. "exchange" is what two processes of this machine take to tell each other that both have
read."""

import contextlib
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from benchmarks import bench_growth, pages
from jaxdp.release import Hosts

EXCHANGES = 300
ROUNDS, STEPS, UNITS, BATCH = 5, 20, 512, 512
SHARES = (0.3, 0.7, 1.5)


class Slow:
    """A source whose reads take longer.

    Args:
      source: The examples.
      read: `read(indices)` is called before each read.
    """

    def __init__(self, source, read: Callable):
        self._source, self._read = source, read
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def gather(self, indices: np.ndarray):
        """Returns the examples after the call of `read`."""
        self._read(indices)
        return self._source.gather(indices)


@contextlib.contextmanager
def on_disk(source) -> Iterator[Slow]:
    """Yields a source that reads a file for each example."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for index in range(len(source)):
            row = source.gather(np.array([index]))
            np.save(root / f"{index}.npy", row["x"])

        def read(indices):
            for index in indices:
                np.load(root / f"{index}.npy")

        yield Slow(source, read)


def inline(trainer, state, source) -> Iterator:
    """Yields the batches that `trainer.batches` yields, each read when it is asked for."""
    for step in range(STEPS):
        yield trainer.load(state, source, trainer.drawn(state._replace(step=np.int32(step))))


def timed(trainer, params, source, *, ahead: bool) -> list[tuple[float, float]]:
    """Returns the seconds of each step's wait for the batch, and of the whole step, without the
    first two steps."""
    state, seconds = trainer.init(params), []
    reading = (
        trainer.batches(state, source, STEPS)
        if ahead
        else contextlib.nullcontext(inline(trainer, state, source))
    )
    with reading as batches:
        for _ in range(STEPS):
            start = time.perf_counter()
            batch = jax.block_until_ready(next(batches))
            wait = time.perf_counter() - start
            state, row = trainer.step(state, source, batch, meanwhile=lambda: None)
            jax.block_until_ready(row)
            seconds.append((wait, time.perf_counter() - start))
    return seconds[2:]


def measured(trainer, params, source) -> dict:
    """Returns medians of milliseconds "inline" and "ahead", of rounds that take turns."""
    pairs_of = {"inline": [], "ahead": []}
    for _ in range(ROUNDS):
        for name, pairs in pairs_of.items():
            pairs += timed(trainer, params, source, ahead=name == "ahead")
    middle = {
        name: [1e3 * statistics.median(times) for times in zip(*pairs, strict=True)]
        for name, pairs in pairs_of.items()
    }
    return {name: {"wait_ms": wait, "step_ms": step} for name, (wait, step) in middle.items()}


def exchanged(address: str, process: int) -> float:
    """Returns the median of the milliseconds of an exchange, in one of two processes."""
    jax.distributed.initialize(address, 2, process)
    hosts, times = Hosts(jax.make_mesh((jax.device_count(),), ("data",))), []
    for _ in range(EXCHANGES):
        start = time.perf_counter()
        hosts.each(lambda: None)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def exchange() -> float:
    """Returns what `exchanged` returns in the first of two new processes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks", "run", "reading", "--exchange", address]
    started = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    return float(json.loads(said[0].splitlines()[-1]))


def tables(report) -> dict:
    waits = "ms of it that the device waits, inline"
    header = ["reading a batch", "ms of a step, inline", "ahead", waits, "ahead"]
    lines = []
    for row in report["rows"]:
        times = [row[way][key] for key in ("step_ms", "wait_ms") for way in ("inline", "ahead")]
        lines.append([row["reading"], *(f"{ms:.0f}" for ms in times)])
    return {"reading": pages.page_table(header, lines)}


FLAGS = {
    "exchange": {
        "nargs": 2,
        "help": "an address and the number of this process: measure the exchange",
    }
}


def measure(flags) -> dict | None:
    if flags.exchange:
        address, process = flags.exchange
        print(json.dumps(exchanged(address, int(process))))
        return None
    trainer, params, source, _ = bench_growth.training(UNITS, BATCH, 1)
    rows = [{"reading": "arrays in memory", **measured(trainer, params, source)}]
    alone = rows[0]["inline"]["step_ms"] - rows[0]["inline"]["wait_ms"]
    for share in SHARES:
        seconds = share * alone / 1e3
        slow = Slow(source, lambda indices, seconds=seconds: time.sleep(seconds))
        reading = f"a delay of {share:g} of a step's own time"
        rows.append({"reading": reading, **measured(trainer, params, slow)})
    with on_disk(source) as slow:
        rows.append({"reading": f"{BATCH} files", **measured(trainer, params, slow)})
    exchange_ms = exchange()
    print(f"An exchange between two processes takes {exchange_ms:.2g} ms.")
    report = {"steps": ROUNDS * STEPS, "rows": rows, "exchange_ms": exchange_ms}
    print(tables(report)["reading"])
    return report
