"""Private training in several processes of `jax.distributed`: equal results, one ledger, and what
is left of a kill."""

import json
import re
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import forked
from tests.finetune import host_jobs
from tests.launch import program

# Unoptimised code compiles faster.
PROGRAM = """
import json, os, pathlib, sys
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
from tests.finetune import host_jobs
host_jobs.main(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))
"""
CHAIN = [
    # the job, its processes, who dies where, then what the ledger has charged
    (["four_steps", 2, [1, "compile"]], 0),  # before a payment
    (["four_steps", 2, [0, "batches"]], 2),  # paid, before the first step
    # The chunk is repeated and not paid again. The launcher's process dies between its steps.
    # After the last step of the second chunk, before its commit
    (["four_steps", 2, [0, "save"]], 4),
    # One process restores the first chunk, which two have saved. Its program is another: the second
    # chunk is paid again. The third is paid for the first time.
    (["six_steps", 1, None], 8),
]
JOBS = {
    **{f"same{count}": [["same_steps", count, None]] for count in (1, 2, 4)},
    "chain": [job for job, _ in CHAIN],
    "refused": [["refused", 2, None]],
    "launched2": [["launcher", 2, [1, "step"]], ["launcher", 2, None]],
    "launched1": [["launcher", 1, None]],
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of each group of jobs, and what its jobs ended with."""
    folder = tmp_path_factory.mktemp("hosts")
    files = [folder / "stdout", folder / "stderr"]
    process = forked.start(PROGRAM, folder, json.dumps(JOBS), modules=program.MODULES, files=files)
    assert process.wait(900) == 0, files[1].read_text()
    return {
        name: (folder / name, json.loads((folder / name / "results.json").read_text()))
        for name in JOBS
    }


def test_processes_compute_what_one_computes_with_the_same_noise_and_read_only_their_rows(ran):
    one, two, four = (dict(np.load(ran[f"same{count}"][0] / "result.npz")) for count in (1, 2, 4))
    ran_by = [{name.split("/")[0] for name in found} for found in (one, two, four)]
    assert ran_by == [ran_by[1] | ran_by[2], {"gep"}, {"adp_clip", "noise", "read"}]
    assert four.pop("read") * 4 == one["read"]
    for many in (two, four):
        for name, value in many.items():
            if name.startswith("noise"):
                np.testing.assert_array_equal(value, one[name])
            np.testing.assert_allclose(value, one[name], atol=1e-6)


def test_a_process_that_dies_leaves_what_is_charged_and_the_run_goes_on(ran):
    for (job, charged), result in zip(CHAIN, ran["chain"][1], strict=True):
        assert result["charged"] == charged, result["said"]
        dead = job[2] and job[2][0]
        for process, (status, said) in enumerate(
            zip(result["statuses"], result["said"], strict=True)
        ):
            if dead is None:
                assert status == 0, said
            elif process == dead:
                assert status == -signal.SIGKILL
            elif status == 1:  # A collective has failed.
                assert "If another process has died" in said
            else:  # JAX ends a process whose coordinator has died, or that waits for a dead one.
                assert status == -signal.SIGABRT and "another task died" in said


def test_errors_reach_all_processes_and_what_disagrees_spends_nothing(ran):
    folder, (result,) = ran["refused"]
    assert result["statuses"] == [0, 0], result["said"]
    first, second = (
        json.loads((folder / f"said{process}.json").read_text()) for process in range(2)
    )
    # Only these have paid, for one chunk, which a later run repeats for free.
    assert result["charged"] == 2
    inside = {
        "callback": (0, "OSError", "the disk is full"),
        "read": (1, "OSError", "the network drive is gone"),
        "evaluate": (1, "ZeroDivisionError", "division by zero"),
    }
    for name, (failed, kind, text) in inside.items():
        said = [first.pop(name), second.pop(name)]
        assert said[failed] == [kind, text]
        assert said[1 - failed] == ["HostFailed", f"process {failed} failed: {kind}: {text}"]
    del first["own seeds"], second["own seeds"]
    assert first == second
    expected = {
        "steps": "process 1 has another config than",
        "noise": "process 1 has another config and program than",
        "clip norm": "process 1 has another program than",
        "data": "process 1 has another data than",
        "params": "process 1 has another params than",
        "workdir": "Use a folder that all share",
        "size": "source has 39 examples",
        "account": "account must be",
        "budget": "would make it",
    }
    assert first.keys() == expected.keys()
    assert all(text in first[name][1] for name, text in expected.items()), first
    assert first["budget"][0] == "BudgetExceeded"


def test_processes_that_do_not_follow_the_first_are_caught(ran):
    folder, _ = ran["refused"]
    said = [json.loads((folder / f"said{process}.json").read_text()) for process in range(2)]
    assert all("not the same on each process" in each["own seeds"][1] for each in said)
    assert host_jobs.charged(folder / "twice") != 2


def test_the_launcher_of_several_processes_ends_as_one_process_does(ran):
    (one, [alone]), (two, [killed, resumed]) = ran["launched1"], ran["launched2"]
    assert killed["statuses"][1] == -signal.SIGKILL and killed["statuses"][0] != 0
    assert alone["statuses"] == [0] and resumed["statuses"] == [0, 0], (
        alone["said"],
        resumed["said"],
    )
    assert killed["charged"] == resumed["charged"] == alone["charged"] == 3
    results = [json.loads((folder / "run" / "result.json").read_text()) for folder in (one, two)]
    assert results[0].keys() == results[1].keys()
    assert results[0]["epsilon"] == results[1]["epsilon"]
    assert results[0]["private"] == pytest.approx(
        results[1]["private"], abs=2 / results[0]["tested"]
    )
    params = [load_file(folder / "run" / "params.safetensors") for folder in (one, two)]
    assert params[0].keys() == params[1].keys()
    for name, value in params[0].items():
        np.testing.assert_allclose(params[1][name], value, atol=1e-5)
    # Process 0 alone has the files and the terminal. Orbax writes the arrays of a checkpoint
    # together.
    first, second = (
        set(json.loads((two / f"wrote{process}.json").read_text())) for process in range(2)
    )
    assert {"config.json", "ledger.sqlite"} <= {
        re.sub(r"[.?](tmp|mode).*", "", name) for name in first
    }, first
    assert {name for name in second if "/checkpoints/" not in name} == set()
    assert "The ledger recomputes" in resumed["said"][0] and "private" not in resumed["said"][1]
