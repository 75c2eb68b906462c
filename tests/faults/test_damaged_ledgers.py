"""Ledgers damaged at random: an answer is the true one, or an error that names the path.

The environment variable JAXDP_FAULTS is the number of damages. Each test writes its counts to the
properties of its report (`--junitxml`), which `python -m tests.faults` reads."""

import importlib.util
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

from jaxdp.privacy import Ledger, PureDpEvent

ROOT = pathlib.Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location(
    "ledgers", pathlib.Path(__file__).with_name("ledgers.py")
)
ledgers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ledgers)

DAMAGES = int(os.environ.get("JAXDP_FAULTS", "60"))

# Spends that are in the log alone, as of a process that dies between a commit and its checkpoint.
LATE = """
import os, sys
from jaxdp.privacy import Ledger, PureDpEvent
ledger = Ledger(sys.argv[1])
class Unchecked:
    def __init__(self, db): self.db = db
    def __getattr__(self, name): return getattr(self.db, name)
    def execute(self, text, *values): return self.db.execute("SELECT 1" if "checkpoint" in text else text, *values)
ledger._store.db = Unchecked(ledger._store.db)
for number in range(8):
    with ledger.spend("data", PureDpEvent(0.1), token=f"late {number}"):
        pass
os._exit(0)
"""  # noqa: E501


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Makes two folders with a ledger, one of them with a log, and returns what the ledgers say."""
    found = {}
    for kind in ("database", "log"):
        path = tmp_path_factory.mktemp(kind) / "ledger.sqlite"
        ledgers.make(path)
        if kind == "log":
            subprocess.run([sys.executable, "-c", LATE, str(path)], check=True, cwd=ROOT)
        kept = path.with_name("kept")
        kept.mkdir()
        for suffix in ("", ".head", "-wal"):
            if pathlib.Path(f"{path}{suffix}").exists():
                shutil.copyfile(f"{path}{suffix}", kept / f"{path.name}{suffix}")
        with Ledger(path) as ledger:
            found[kind] = kept, ledgers.answers(ledger)
    return found


def damage(path, rng):
    """Changes one file and returns the kind of change."""
    kind = rng.choice(["bit", "bits", "block", "cut", "gone"])
    data = bytearray(path.read_bytes())
    if kind == "gone":
        path.unlink()
        return kind
    if kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "block":
        start = rng.randrange(len(data))
        data[start : start + 64] = bytes(len(data[start : start + 64]))
    else:
        for _ in range(1 if kind == "bit" else 20):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return kind


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["", ".head", "-wal"], ids=["database", "head", "log"])
def test_no_damage_under_counts(whole, tmp_path, record_property, victim):
    folder, said = whole["log" if victim == "-wal" else "database"]
    rng = random.Random(f"ledger {victim}")
    count = {
        "": DAMAGES // 2,
        ".head": DAMAGES // 5,
        "-wal": DAMAGES - DAMAGES // 2 - DAMAGES // 5,
    }[victim]
    refused = 0
    for number in range(count):
        copy = tmp_path / f"{number}" / "ledger.sqlite"
        shutil.copytree(folder, copy.parent)
        kind = damage(pathlib.Path(f"{copy}{victim}"), rng)
        try:
            with Ledger(copy) as ledger:
                assert ledgers.answers(ledger) == said, (number, kind)
                ledger.spend("data", PureDpEvent(0.001))
        except (ValueError, OSError) as error:
            assert str(copy) in str(error), (number, kind, error)
            refused += 1
        shutil.rmtree(copy.parent)
    record_property("damaged", count)
    record_property("refused", refused)
    # About half of the bytes of a database are free space, which nobody reads.
    assert refused > count / 4


@pytest.mark.slow
def test_without_the_checks_damage_would_be_believed(whole, tmp_path, monkeypatch):
    """Tests the broken twin: a ledger opened as in the first release says less than was spent."""
    folder, said = whole["log"]
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "ledger.sqlite-wal").unlink()
    (tmp_path / "copy" / "ledger.sqlite.head").unlink()
    with Ledger(tmp_path / "copy" / "ledger.sqlite", read_only=True) as ledger:
        assert ledgers.answers(ledger)["data"]["epsilon"] < said["data"]["epsilon"] - 0.5
