"""Metrics files: strict JSON lines that survive crashes and resumption."""

import json
import math
import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.report import MetricsWriter, read_metrics
from tests import forked


def without_time(records):
    return [
        {key: value for key, value in record.items() if key not in ("time", "seconds")}
        for record in records
    ]


def test_lines_come_back_as_written(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    before = time.time()
    with MetricsWriter(path) as metrics:
        metrics.write(0, loss=0.1, note="start", nothing=None, flag=True, nested={"a": [1, 2.5]})
        metrics.write(
            np.int64(3), accuracy=jnp.asarray(0.5), count=np.int32(7), half=np.float32(0.25)
        )
    records = read_metrics(path)
    assert all(before - 1 <= record["time"] <= time.time() + 1 for record in records)
    assert without_time(records) == [
        {
            "step": 0,
            "loss": 0.1,
            "note": "start",
            "nothing": None,
            "flag": True,
            "nested": {"a": [1, 2.5]},
        },
        {"step": 3, "accuracy": 0.5, "count": 7, "half": 0.25},
    ]


def test_lines_are_strict_json_and_non_finite_numbers_survive(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, a=math.nan, b=math.inf, c=jnp.asarray(-jnp.inf), d=[math.inf, 1.0])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    (line,) = path.read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["b"] == "Infinity"
    (record,) = read_metrics(path)
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf
    assert record["d"] == [math.inf, 1.0]


def test_opening_again_appends(tmp_path):
    path = tmp_path / "m.jsonl"
    for step in range(3):
        with MetricsWriter(path, fsync=True) as metrics:
            metrics.write(step, x=step)
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_ignored_by_readers_and_repaired_by_writers(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(0, x=1.0)
        metrics.write(1, x=2.0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [record["step"] for record in read_metrics(path)] == [0]
    with MetricsWriter(path) as metrics:
        metrics.write(1, x=3.0)
    assert [record.get("x") for record in read_metrics(path)] == [1.0, 3.0]


def test_truncate_after_drops_later_steps_and_keeps_writing(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as metrics:
        for step in (0, 5, 10, 10, 15):
            metrics.write(step, x=step)
        assert metrics.truncate_after(10) == 1
        assert metrics.truncate_after(10) == 0
        metrics.write(15, x=-1)
        assert metrics.truncate_after(-1) == 5
        metrics.write(0, x=7)
    assert without_time(read_metrics(path)) == [{"step": 0, "x": 7}]
    assert os.listdir(tmp_path) == ["m.jsonl"]


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_it_reported(tmp_path):
    path = tmp_path / "m.jsonl"
    code = """
import os, signal, sys
from jaxdp.report.metrics import MetricsWriter
metrics = MetricsWriter(sys.argv[1])
for step in range(100):
    metrics.write(step, x=step / 3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = forked.run(code, path, modules=forked.LEDGERS)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert without_time(read_metrics(path)) == [
        {"step": step, "x": step / 3} for step in range(100)
    ]


@pytest.mark.parametrize("line", ["garbage", "[1, 2]", '{"x": 1}', '{"step": "one"}'])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, line):
    path = tmp_path / "m.jsonl"
    content = f'{line}\n{{"step": 1}}\n'
    path.write_text(content)
    for attempt in (MetricsWriter, read_metrics):
        with pytest.raises(ValueError, match=r"line 1 of .* is not a metrics line"):
            attempt(path)
    assert path.read_text() == content


def test_what_has_no_json_form_is_refused_and_not_half_written(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as metrics:
        with pytest.raises(ValueError, match=r"'x' is an array of shape \(3,\)"):
            metrics.write(0, x=np.zeros(3))
        with pytest.raises(TypeError, match="'x'"):
            metrics.write(0, x=object())
        with pytest.raises(TypeError, match="'x'"):
            metrics.write(0, x=1j)
        with pytest.raises(ValueError, match="time"):
            metrics.write(0, time=1.0)
    assert read_metrics(path) == []
    with pytest.raises(ValueError, match="closed"):
        metrics.write(0, x=1.0)


@pytest.mark.slow
def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="Start the run first"):
        read_metrics(tmp_path / "none.jsonl")


def test_times_are_those_of_the_steps_and_go_on_after_a_pause(tmp_path, monkeypatch):
    path, clock = tmp_path / "m.jsonl", [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    for start in (1000.0, 5000.0):  # the second process begins long after the first one
        clock[0] = start
        with MetricsWriter(path) as metrics:
            metrics.truncate_after(2)
            for step in (1, 2, 3) if start == 1000.0 else (3, 4):
                clock[0] += 10
                ended, clock[0] = clock[0], clock[0] + 5  # an evaluation takes five seconds
                metrics.write(step, ended, x=step)
    rows = [(row["step"], row["time"], row["seconds"]) for row in read_metrics(path)]
    # A row of the first process after the checkpoint is written again, and its time is not counted
    # twice.
    assert rows == [(1, 1010, 10), (2, 1025, 25), (3, 5010, 35), (4, 5025, 50)]
