"""The gate against slower steps, and the table of all benchmarks."""

import json

import pytest

from benchmarks import gate, run


@pytest.mark.slow
def test_steps_are_not_slower_than_their_limits():
    assert gate.failures(gate.calls()) == []


@pytest.mark.slow
def test_the_gate_notices_per_example_gradients():
    (sentence,) = gate.failures({"dense clipped": gate.calls("vmap")["dense clipped"]}, rounds=1)
    assert sentence.startswith("dense clipped takes ") and sentence.endswith("times its base, above 1.6.")


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
    page = (run.RESULTS.parents[1] / "docs" / "results" / "speed.md").read_text()
    assert run.markdown(run.table("cpu")) in page
