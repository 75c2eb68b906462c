"""A sample of `tests/faults/kills.py`: jobs that are killed inside paid work pay once, and the
checks can fail."""

import json
import pathlib

import pytest

from tests import forked
from tests.faults import network
from tests.faults.__main__ import deaths
from tests.launch import program

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
TWINS = ("late", "rolled_back", "unnoted")

# One process that forks, for all of them: its imports take longer than a kill.
SAMPLE = """
import pathlib, sys, warnings
from tests.faults import kills
warnings.simplefilter("default")  # as in a launcher
folder = pathlib.Path(sys.argv[1])
kills.warm()
kills.campaign(["fit", "accuracy"], 6, folder / "right.json")
for twin in sys.argv[2:]:
    kills.campaign(["accuracy"], 4, folder / f"{twin}.json", twin=twin, until="under")
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    files = [folder / "stdout", folder / "stderr"]
    process = forked.start(SAMPLE, folder, *TWINS, modules=program.MODULES, files=files)
    assert process.wait(300) == 0, "".join(file.read_text() for file in files)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_a_killed_job_ends_and_pays_once(sample):
    rows = sample["right"]["rows"]
    assert sum(row["killed"] for row in rows) >= 6
    assert all(row["status"] == 0 and row["problems"].keys() <= {"temporary"} for row in rows), rows


@pytest.mark.parametrize("twin", TWINS)
def test_a_library_that_forgets_what_it_charged_is_noticed(sample, twin):
    assert any("under" in row["problems"] for row in sample[twin]["rows"]), sample[twin]["rows"]


def test_the_operations_inside_paid_work_are_seen(sample):
    for name in ("fit", "accuracy"):
        operations = {operation for operation, _ in sample["right"]["sites"][name]}
        assert {
            *(
                "BEGIN IMMEDIATE",
                "INSERT INTO spends",
                "COMMIT",
                "pwrite ledger.sqlite.head",
                "PRAGMA wal_checkpoint",
            ),
            *(
                "flock ledger.sqlite.head",
                "write charges.jsonl",
                "fsync charges.jsonl",
                "replace secret_seed",
            ),
            *("unlink secret_seed", "UPDATE spends"),
        } <= operations


def test_the_page_has_the_deaths_over_a_network():
    rows = json.loads((ROOT / "benchmarks" / "results" / "network_deaths.json").read_text())
    assert deaths(network.summary(rows)) in (ROOT / "docs" / "design" / "faults.md").read_text()
