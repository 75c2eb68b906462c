"""Measures how long a step waits for its examples, with and without reading ahead.

    python -m benchmarks.bench_reading --output benchmarks/results/reading_cpu.json

A source either opens a file for each example, or sleeps for a part of a step, as one does that waits for a network.
"ahead" takes the batches of `PrivateTrainer.batches`, as `fit` does. "inline" reads a batch when its step is due. The
wait of a step is the wall time until its batch is on the device.
"""

import contextlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import bench_growth, timing
from jaxdp.report import format_table

STEPS, UNITS, BATCH = 40, 512, 512
SHARES = (0.3, 0.7, 1.5)


class Slow:
    """A source whose reads take longer.

    Args:
      source: The examples.
      read: `read(indices)` is called before each read.
    """

    def __init__(self, source: Any, read: Callable[[np.ndarray], Any]):
        self._source, self._read = source, read
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def gather(self, indices: np.ndarray) -> Any:
        """Returns the examples after the call of `read`."""
        self._read(indices)
        return self._source.gather(indices)


@contextlib.contextmanager
def on_disk(source: Any) -> Iterator[Slow]:
    """Yields a source that reads a file for each example."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for index in range(len(source)):
            row = source.gather(np.array([index]))
            np.save(root / f"{index}.npy", row["x"])

        def read(indices: np.ndarray) -> None:
            for index in indices:
                np.load(root / f"{index}.npy")

        yield Slow(source, read)


def inline(trainer: Any, state: Any, source: Any) -> Iterator[Any]:
    """Yields the batches that `trainer.batches` yields, each read when it is asked for."""
    for step in range(STEPS):
        yield trainer.load(state, source, trainer.drawn(state._replace(step=np.int32(step))))


def measured(trainer: Any, params: Any, source: Any, *, ahead: bool) -> dict[str, float]:
    """Returns the medians of the milliseconds of a step, and of its wait for the batch, without the first two steps."""
    state = trainer.init(params)
    trainer.compile(state, source)
    waits, steps = [], []
    reading = trainer.batches(state, source, STEPS) if ahead else contextlib.nullcontext(inline(trainer, state, source))
    with reading as batches:
        for _ in range(STEPS):
            start = time.perf_counter()
            batch = jax.block_until_ready(next(batches))
            waits.append(time.perf_counter() - start)
            state, row = trainer.step(state, source, batch, meanwhile=lambda: None)
            jax.block_until_ready(row)
            steps.append(time.perf_counter() - start)
    return {"wait_ms": 1e3 * statistics.median(waits[2:]), "step_ms": 1e3 * statistics.median(steps[2:])}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table of a page."""
    lines = [
        "| reading a batch | ms of a step, inline | ahead | ms of it that the device waits, inline | ahead |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        both = [row["inline"], row["ahead"]]
        cells = [f"{found[key]:.0f}" for key in ("step_ms", "wait_ms") for found in both]
        lines.append(f"| {row['reading']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    flags = timing.arguments(__doc__, output=".bench/reading.json").parse_args()
    trainer, params, source, _ = bench_growth.training(UNITS, BATCH, 1)
    own = measured(trainer, params, source, ahead=False)
    alone = own["step_ms"] - own["wait_ms"]

    def both(reading: str, slow: Any) -> dict[str, Any]:
        return {"reading": reading} | {
            name: measured(trainer, params, slow, ahead=name == "ahead") for name in ("inline", "ahead")
        }

    rows = [both("arrays in memory", source)]
    for share in SHARES:
        seconds = share * alone / 1e3
        slow = Slow(source, lambda indices, seconds=seconds: time.sleep(seconds))  # type: ignore[misc]
        rows.append(both(f"a delay of {share:g} of a step without reading", slow))
    with on_disk(source) as slow:
        rows.append(both(f"{BATCH} files", slow))
    print(format_table([{"reading": row["reading"], **row["inline"], **row["ahead"]} for row in rows], digits=4))
    timing.write(timing.machine() | {"steps": STEPS, "rows": rows}, flags.output)
    print(markdown(rows))


if __name__ == "__main__":
    main()
