"""The gate against slower steps, and the table of all benchmarks."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks import device, hospitals, run

# The gate as `python -m` runs it, for each of several arguments. One process imports JAX for all of
# them.
GATES = """
import json, runpy, sys
ended = []
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        runpy.run_module("benchmarks.gate", run_name="__main__")
    except SystemExit as end:
        ended.append(end.code)
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def gates():
    """What the gate and its twin end with, in a process without the compiler options of the
    tests."""
    dropped = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [sys.executable, "-c", GATES, json.dumps([[], ["vmap"]])]
    result = subprocess.run(command, env=environment, cwd=run.ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *printed, ended = result.stdout.splitlines()
    return printed, json.loads(ended)


@pytest.mark.slow
def test_steps_are_not_slower_than_their_limits(gates):
    printed, (status, _) = gates
    assert status == 0, (status, printed)


@pytest.mark.slow
def test_the_gate_notices_per_example_gradients(gates):
    _, (_, status) = gates
    assert re.fullmatch(r"dense clipped takes \d+.\d+ times its base, above 1\.6\.", str(status))


@pytest.mark.parametrize("suite", run.SUITES)
def test_every_benchmark_of_a_suite_has_rows_in_the_table(suite):
    results = {job.name: job.path(suite) for job in run.SUITES[suite] if job.path(suite).exists()}
    rows = run.rows_of(suite, run.reports(suite))
    for name, path in results.items():
        mine = [row for row in rows if row["benchmark"] == name]
        assert mine, name
        assert all(0 < row["ratio"] < 1e5 for row in mine)
        assert json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm")  # of jax_privacy
def test_a_device_is_measured_and_a_case_that_fails_leaves_the_others(tmp_path, monkeypatch):
    """The case of a language model with LoRA at tiny shapes stands for all: they share their
    steps."""
    tiny = device.cases(tiny=True)

    def too_large():
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    chosen = {"too large": too_large, "lora": tiny["GPT-2 small, lora, bfloat16"]}
    monkeypatch.setattr(device, "cases", lambda tiny: chosen)
    monkeypatch.setattr(device, "torch_steps_of", lambda *_: {"torch": too_large})
    output = tmp_path / "device.json"
    report = device.main(
        [
            "--tiny",
            "--rounds",
            "1",
            "--cases",
            "lora,large",
            "--minutes",
            "5",
            "--output",
            str(output),
        ]
    )
    assert json.loads(output.read_text()).keys() == report.keys()
    assert report["cases"]["too large"]["error"] == "MemoryError: RESOURCE_EXHAUSTED: out of memory"
    steps = report["cases"]["lora"]["steps"]
    assert "out of memory" in steps.pop("torch")["error"]
    assert (
        set(steps) == {"plain", "clipped", "private", "jax_privacy"}
        and steps["plain"]["over_plain"] == 1
    )
    assert all(row["ms"] > 0 and row["memory_mb"] > 0 for row in steps.values())
    late = device.measured({"plain": too_large}, deadline=0, rounds=1)
    assert "no time left" in late["steps"]["plain"]["error"]
    assert list(report["cases"]) == ["lora", "too large"]


def test_the_cases_of_a_device_are_those_of_its_page():
    names = set(device.cases(tiny=False))
    assert names == set(device.cases(tiny=True))
    assert [
        part in " ".join(names) for part in ("ViT-B/16", "wrn_16_4", "wrn_40_4", "lora", "full")
    ] == [True] * 5


@pytest.mark.slow
def test_fifty_hospitals_exchange_what_the_page_states(tmp_path):
    """Without Flower's engine, which needs Ray."""
    page = (run.ROOT / "docs" / "design" / "network.md").read_text()
    stated = json.loads((run.RESULTS / "hospitals.json").read_text())
    hospitals.write_records(tmp_path, 50)
    with contextlib.ExitStack() as opened:
        found = hospitals.calibrate(hospitals.InProcess(tmp_path, 50, opened), tmp_path)
    for name in (
        "hospitals",
        "questions",
        "bytes_to_a_hospital",
        "bytes_from_a_hospital",
        "epsilon",
    ):
        assert found[name] == stated[name], name
    for value in (
        stated[name]
        for name in ("bytes_to_a_hospital", "bytes_from_a_hospital", "seconds", "cpu_seconds")
    ):
        assert f"| {value:,} |" in page, value
