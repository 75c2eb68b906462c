"""The gate against slower steps, and the table of all benchmarks."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks import bench_estimate, bench_scale, hospitals, run


def gated(*arguments):
    """Runs the gate in a process without the compiler options of the tests."""
    dropped = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [sys.executable, "-m", "benchmarks.gate", *arguments]
    return subprocess.run(command, env=environment, cwd=run.ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_steps_are_not_slower_than_their_limits():
    result = gated()
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_gate_notices_per_example_gradients():
    result = gated("vmap")
    assert result.returncode == 1
    assert re.search(r"dense clipped takes \d+.\d+ times its base, above 1.6\.", result.stderr)


@pytest.mark.parametrize("suite", run.SUITES)
def test_every_benchmark_of_a_suite_has_rows_in_the_table(suite):
    results = {job.name: job.path(suite) for job in run.SUITES[suite] if job.path(suite).exists()}
    rows = run.table(suite)
    for name, path in results.items():
        mine = [row for row in rows if row["benchmark"] == name]
        assert mine, name
        assert all(0 < row["ratio"] < 1e5 for row in mine)
        assert json.loads(path.read_text())


def test_the_page_of_speed_has_the_table():
    page = (run.ROOT / "docs" / "results" / "speed.md").read_text()
    assert run.markdown(run.table("cpu")) in page


def test_the_page_of_scale_has_the_tables():
    page = (run.ROOT / "docs" / "design" / "scale.md").read_text()
    counts, estimate = (json.loads((run.RESULTS / f"scale_{name}.json").read_text()) for name in ("cpu", "estimate"))
    assert bench_scale.markdown(counts["steps"]) in page
    assert bench_estimate.markdown(estimate) in page


@pytest.mark.slow
def test_fifty_hospitals_exchange_what_the_page_states(tmp_path):
    """Without Flower's engine, which needs Ray."""
    page = (run.ROOT / "docs" / "design" / "network.md").read_text()
    stated = json.loads((run.RESULTS / "hospitals.json").read_text())
    hospitals.write_records(tmp_path, 50)
    with contextlib.ExitStack() as opened:
        found = hospitals.calibrate(hospitals.InProcess(tmp_path, 50, opened), tmp_path)
    for name in ("hospitals", "questions", "bytes_to_a_hospital", "bytes_from_a_hospital", "epsilon"):
        assert found[name] == stated[name], name
    for value in (stated["bytes_to_a_hospital"], stated["bytes_from_a_hospital"], stated["seconds"]):
        assert f"| {value:,} |" in page, value
