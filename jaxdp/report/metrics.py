"""Metrics of a run as JSON lines: one object per line, appended, safe to kill at any instant.

A line is an object with "step" (integer), "time" (the end of the step in seconds since the epoch),
"seconds" (the same since the start of the run, without the time in which no process worked on it)
and the metrics. Lines are strict JSON (RFC 8259). The strings "NaN", "Infinity" and "-Infinity"
stand for the floats that JSON lacks. `read_metrics` converts them.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import tree

from jaxdp.files import explained_if_full, parse_json, shown, sync_folder, write_durably

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsWriter:
    """Appends metrics to a JSON-lines file.

        with MetricsWriter(workdir / "metrics.jsonl") as metrics:
            metrics.truncate_after(restored_step)  # on resume: drops rows after the checkpoint
            metrics.write(step, accuracy=0.93, epsilon=1.2)

    Opening removes a last line that a crash left incomplete. "seconds" continues from the last
    line. A file has one writer at a time.
    """

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False):
        """Opens `path` for appending and creates it and its folder if needed.

        Args:
            path: The file.
            fsync: Whether to force each line to the disk, so that it also survives a power failure.

        Raises:
            ValueError: A line other than the last is not a JSON object with a step. Such a file is
                not repaired.
        """
        self.path = Path(path)
        self._fsync = fsync
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = list(_lines(self.path))
        self._file = self._open()
        self._file.truncate(sum(len(line) for line, _ in lines))
        self._start_clock(lines)
        if fsync:
            sync_folder(self.path.parent)

    def write(self, step: int, ended: float | None = None, /, **metrics: Any) -> None:
        """Appends one line.

        Args:
            step: The step of the run.
            ended: The end of the step, as `time.time()`. The default is now.
            **metrics: Numbers, strings, booleans, None, scalar arrays, or lists and dicts of them.

        Raises:
            DiskFull: There is no room for the line.
            TypeError: A value has no JSON form.
            ValueError: A metric is called "step", "time" or "seconds", or an array is not a scalar.
        """
        reserved = {"step", "time", "seconds"} & set(metrics)
        if reserved:
            raise ValueError(
                f"metrics must not be named {sorted(reserved)}, which every line has. Rename them."
            )
        if ended is None:
            ended = time.time()
        seconds = self._before + ended - self._opened
        record: dict[str, Any] = {"step": int(step), "time": ended, "seconds": seconds}
        record |= tree.map_structure_with_path(_to_json, metrics)
        # One write per line: a crash leaves at most the last line incomplete, and the next opening
        # removes it.
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with explained_if_full(self.path):
            self._file.write(line)
            self._file.flush()
            if self._fsync:
                os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> int:
        """Drops the lines of later steps, which a resumed run writes again. Returns their number.

        "seconds" continues from the last line that stays. The file is replaced in one rename. A
        crash leaves the old file or the new one.
        """
        lines = list(_lines(self.path))
        earlier = [(line, record) for line, record in lines if record["step"] <= step]
        if len(earlier) == len(lines):
            return 0
        self._file.close()
        write_durably(self.path, b"".join(line for line, _ in earlier))
        self._file = self._open()
        self._start_clock(earlier)
        return len(lines) - len(earlier)

    def _start_clock(self, lines: Sequence[tuple[bytes, dict[str, Any]]]) -> None:
        self._opened = time.time()
        self._before = 0.0
        if lines:
            _, last = lines[-1]
            self._before = last.get("seconds", 0.0)  # lines of earlier releases have none

    def _open(self) -> BinaryIO:
        return open(self.path, "ab")

    def close(self) -> None:
        """Closes the file. A later write raises ValueError."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the lines of a metrics file in order.

    An incomplete last line, of a run that was killed or still writes, is left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Another line is not a JSON object with a step.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no metrics at {shown(path)}. Start the run first.")
    return [tree.map_structure(_from_json, record) for _, record in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each complete line and its record. Stops before an incomplete last line."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = parse_json(line)
                if not isinstance(record["step"], int):
                    raise TypeError("step is not an integer.")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {shown(path)} is not a metrics line ({shown(error)}). Move "
                    "the file away or repair the line."
                ) from error
            yield line, record


def _to_json(path: tuple[Any, ...], value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if not isinstance(value, float):
        array = np.asarray(value)
        name = ".".join(map(str, path))
        if array.ndim != 0:
            raise ValueError(
                f"metric {name!r} is an array of shape {array.shape}. Reduce it or pass a list."
            )
        value = array.item()
        if not isinstance(value, (bool, int, float)):
            raise TypeError(f"metric {name!r} is a {type(value).__name__}, which has no JSON form.")
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # a key of `_NON_FINITE`
    return value


def _from_json(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
