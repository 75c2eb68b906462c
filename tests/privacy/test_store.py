"""The ledger's file against damage and loss: nothing under-counts, every refusal names the path."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import sqlite3
import stat
import tempfile
import time
import warnings

import pytest

from jaxdp.privacy import (
    BudgetExceeded,
    Head,
    Ledger,
    LedgerDamaged,
    PureDpEvent,
    Registry,
    chain,
    database,
    store,
)
from jaxdp.privacy.store import accept, anchor_of
from tests import forked

ROOT = pathlib.Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("ledgers", ROOT / "tests" / "faults" / "ledgers.py")
_ledgers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ledgers)
make, answers = _ledgers.make, _ledgers.answers
GOLDEN = ROOT / "tests" / "golden" / "ledger_v1.sqlite"
TENTH = PureDpEvent(0.1)


def execute(path, statement, *values):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(statement, values)
        db.commit()
        # The test edits what the file holds, not its log.
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def copied(path, to, *suffixes):
    to.mkdir(parents=True)
    for suffix in suffixes:
        shutil.copyfile(f"{path}{suffix}", to / f"{path.name}{suffix}")
    return to / path.name


# --- What was taken or changed ------------------------------------------------------------------

HOLD = "INSERT INTO holds VALUES ('a', 1, {}, 'key', 'label', 'run', 1.0, 1e12)"
EDITS = {
    "a total": ("UPDATE totals SET spends = 1 WHERE dataset = 1", "totals of dataset 'data'"),
    "a total's row": (
        "DELETE FROM totals WHERE dataset = 2 AND partition = 'part 0'",
        "totals of dataset 'other'",
    ),
    "a total's label": (
        "UPDATE totals SET last_label = 'x' WHERE dataset = 1",
        "totals of dataset 'data'",
    ),
    "a spend's event": (
        "UPDATE spends SET event = 1 WHERE id = 6",
        "spend 6 or an earlier one was changed",
    ),
    "a spend's token": (
        "UPDATE spends SET token = 'x' WHERE id = 3",
        "spend 3 or an earlier one was changed",
    ),
    "a spend's author": (
        "UPDATE spends SET who = 'x' WHERE id = 4",
        "spend 4 or an earlier one was changed",
    ),
    "an event": (
        """UPDATE events SET json = '{"epsilon":0.01,"type":"Pure"}' WHERE id = 1""",
        "spend 1 or an earlier",
    ),
    "a budget": (
        "UPDATE datasets SET epsilon = 400.0 WHERE name = 'data'",
        "terms of dataset 'data'",
    ),
    "the number of records": (
        "UPDATE datasets SET records = 10 WHERE name = 'data'",
        "terms of dataset 'data'",
    ),
    "a dataset": ("DELETE FROM datasets WHERE name = 'data'", "unknown dataset"),
    "the name": ("UPDATE meta SET value = 'x' WHERE key = 'id'", "terms of dataset"),
    "a hold that nests deeply": (
        HOLD.format("'" + "[" * 10**5 + "'"),
        "ValueError, values are nested more than 100",
    ),
    "a hold of a huge number": (
        HOLD.format("""'{"type":"Pure","epsilon":1""" + "0" * 400 + "}'"),
        "is damaged: ValueError, PureDpEvent.epsilon: must be at most inf, got an integer beyond "
        "float64",
    ),
    "a hold with two types": (
        HOLD.format("""'{"type":"Pure","epsilon":1,"type":"NoOp"}'"""),
        "is damaged: ValueError, an object has the key 'type' twice",
    ),
    "a spend in the middle": ("DELETE FROM spends WHERE id = 5", "spend 5 is missing"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "words"), EDITS.values(), ids=EDITS)
def test_what_was_edited_is_refused(path, statement, words):
    make(path)
    execute(path, statement)
    with pytest.raises(LedgerDamaged, match=re.escape(words)) as error:
        Ledger(path)
    assert str(path) in str(error.value)
    with pytest.raises(LedgerDamaged, match=re.escape(words)):
        Ledger(path, read_only=True)


@pytest.mark.parametrize(
    "statement", [None, "CREATE TABLE 'a\x1b[31mb' (x)", "UPDATE meta SET key = 'i' || key"]
)
def test_a_message_shows_no_control_character(tmp_path, statement):
    path = tmp_path / "a\x1b[31mb\u202e.sqlite"
    make(path)
    if statement is None:
        pathlib.Path(f"{path}.head").write_text("[[]")
    else:
        execute(path, statement)
    with pytest.raises(LedgerDamaged, match=r"a\\x1b\[31mb\\u202e\.sqlite") as error:
        Ledger(path)
    assert str(error.value).isprintable()


def test_an_end_that_was_cut_off_is_refused(path):
    """The last spends and their totals are taken out with care; only the head tells."""
    said = make(path)
    with Ledger(path) as ledger, ledger.spend("data", TENTH, label="step 11 again"):
        pass
    execute(path, "DELETE FROM spends WHERE id = 17")
    execute(path, "UPDATE totals SET spends = spends - 1, last_label = 'step 11' WHERE dataset = 1")
    at = (
        sqlite3.connect(path)
        .execute("SELECT reserved_at FROM spends WHERE label = 'step 11'")
        .fetchone()[0]
    )
    execute(path, "UPDATE totals SET last_at = ? WHERE dataset = 1", at)
    with pytest.raises(LedgerDamaged, match="ends with spend 16, and its head has seen spend 17"):
        Ledger(path)
    os.remove(f"{path}.head")
    with pytest.raises(LedgerDamaged, match="its anchor has seen spend 17"):
        Ledger(path, read_only=True)
    # Without head and anchor nothing else would have told.
    os.remove(anchor_of(path))
    with Ledger(path, read_only=True) as ledger:
        assert answers(ledger) == said
    with pytest.raises(LedgerDamaged, match="no head beside it"):
        Ledger(path)


def test_a_copy_of_the_database_alone_is_complete(path, tmp_path):
    """Without -wal, while another process has the ledger open."""
    with Ledger(path) as ledger:
        ledger.register("data", adjacency="add_remove", unit="example")
        for _ in range(5):
            with ledger.spend("data", TENTH):
                pass
        whole = copied(path, tmp_path / "whole", "", ".head")
        with Ledger(whole) as copy:
            assert (
                copy.epsilon("data", delta=0.0) == pytest.approx(0.5) and copy.head == ledger.head
            )
        alone = copied(path, tmp_path / "alone", "")
    with pytest.raises(LedgerDamaged, match="no head beside it"):
        Ledger(alone)


LATE = """
import functools, os, sqlite3, sys
from jaxdp.privacy import Ledger, PureDpEvent
class NoCheckpoint(sqlite3.Connection):
    def execute(self, text, *values):
        return super().execute("SELECT 1" if "checkpoint" in text else text, *values)
sqlite3.connect = functools.partial(sqlite3.connect, factory=NoCheckpoint)
ledger = Ledger(sys.argv[1])
for _ in range(3):
    with ledger.spend("data", PureDpEvent(0.1)):
        pass
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["deleted", "a bit"])
def test_a_log_that_was_lost_is_noticed(path, damage):
    """A process that dies before its checkpoint leaves its last spends in -wal."""
    make(path)
    assert forked.run(LATE, path, modules=forked.LEDGERS).returncode == 0
    wal = pathlib.Path(f"{path}-wal")
    data = bytearray(wal.read_bytes())
    assert len(data) > 4000
    if damage == "deleted":
        wal.unlink()
    else:
        data[4000] ^= 1
        wal.write_bytes(data)
    with pytest.raises(LedgerDamaged, match=r"its head has seen spend 19"):
        Ledger(path)
    # What SQLite could not read is kept for whoever wants to look.
    kept = pathlib.Path(f"{path}-wal.kept")
    assert kept.read_bytes() == bytes(data) if damage == "a bit" else not kept.exists()


def test_a_running_program_notices_a_loss(path, tmp_path):
    make(path)
    older = copied(path, tmp_path / "older", "")
    with Ledger(path) as ledger:
        spend = ledger.spend("data", TENTH)
        with (
            contextlib.closing(sqlite3.connect(older)) as source,
            contextlib.closing(sqlite3.connect(path)) as target,
        ):
            source.backup(target)
        with pytest.raises(LedgerDamaged, match="has lost history"):
            ledger.spend("data", TENTH)
        with pytest.raises(LedgerDamaged), spend:
            pass


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 256, b"[1, 2]", b'[["x", 99, "y"], "z"]'], ids=len
)
def test_a_damaged_head_is_refused(path, content):
    make(path)
    pathlib.Path(f"{path}.head").write_bytes(content)
    with pytest.raises(LedgerDamaged, match="head") as error:
        Ledger(path)
    assert str(path) in str(error.value)


def test_a_head_of_another_ledger_is_refused(path, tmp_path):
    make(path)
    make(tmp_path / "b.sqlite")
    shutil.copyfile(tmp_path / "b.sqlite.head", f"{path}.head")
    with pytest.raises(LedgerDamaged, match="does not belong to the head beside it"):
        Ledger(path)


@pytest.mark.parametrize("what", ["empty", "gone", "no tables"])
def test_a_ledger_that_is_gone_is_no_new_one(path, what):
    make(path)
    for suffix in ("-wal", "-shm", ""):
        pathlib.Path(f"{path}{suffix}").unlink(missing_ok=True)
    if what == "empty":
        path.touch()
    elif what == "no tables":
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA journal_mode = WAL")
    before = sorted(path.parent.iterdir())
    with pytest.raises(LedgerDamaged, match=re.escape(str(path))):
        Ledger(path)
    assert sorted(path.parent.iterdir()) == before


def test_a_ledger_that_another_process_makes_meanwhile_is_not_taken_for_a_lost_one(
    path, monkeypatch
):
    """Its database and its head appear just after this process found no database."""
    original, made = pathlib.Path.exists, []

    def exists(file):
        found = original(file)
        if file == path and not made:
            made.append(file)
            Ledger(path).close()
        return found

    monkeypatch.setattr(pathlib.Path, "exists", exists)
    with Ledger(path) as ledger:
        assert made and ledger.head.spend == 0


# --- Reading, backing up, accepting -------------------------------------------------------------


def test_a_ledger_is_read_without_a_trace(path, tmp_path):
    said = make(path)
    for suffix in ("-wal", "-shm"):
        pathlib.Path(f"{path}{suffix}").unlink(missing_ok=True)
    folder = tmp_path / "storage"
    copy = copied(path, folder, "", ".head")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    try:
        with Ledger(copy, read_only=True) as ledger:
            assert answers(ledger) == said
            with pytest.raises(ValueError, match="read_only=True"):
                ledger.spend("data", TENTH)
            with pytest.raises(ValueError, match="read_only=True"):
                ledger.register("new", adjacency="add_remove", unit="example")
    finally:
        folder.chmod(0o755)
    assert {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name in before
    } == before
    with pytest.raises(ValueError, match="is not a file"):
        Ledger(tmp_path / "missing.sqlite", read_only=True)


def test_a_reader_sees_what_a_writer_spends(path):
    make(path)
    with Ledger(path) as writer, Ledger(path, read_only=True) as reader:
        before = reader.epsilon("data")
        with writer.spend("data", TENTH):
            assert reader.epsilon("data") == pytest.approx(before + 0.1)


def test_a_backup_is_a_ledger(path, tmp_path):
    said = make(path)
    with Ledger(path) as ledger:
        ledger.backup(tmp_path / "backup.sqlite")
        head = ledger.head
        with ledger.spend("data", TENTH):
            pass
        with pytest.raises(ValueError, match=r"exists\. A backup replaces nothing"):
            ledger.backup(tmp_path / "backup.sqlite")
        with pytest.raises(ValueError, match="does not exist"):
            ledger.backup(tmp_path / "missing" / "backup.sqlite")
        later = ledger.head
    with Ledger(tmp_path / "backup.sqlite") as backup:
        assert answers(backup) == said and backup.head == head
        assert backup.contains(head) is True
        assert backup.contains(later) is False  # It has lost what came later, and can tell.
        assert backup.contains(dataclasses.replace(head, link="0" * 64)) is False
        assert backup.contains(Head("another.0", 1, "0" * 64)) is None
    anchors = {anchor_of(path), anchor_of(tmp_path / "backup.sqlite")}
    assert {file for file in tmp_path.iterdir() if file.name.startswith(".")} == anchors


def test_a_restored_backup_is_noticed(path, tmp_path):
    """Whoever restores both files and spends again would otherwise spend the same room twice."""
    make(path)
    with Ledger(path) as ledger:
        ledger.backup(tmp_path / "backup.sqlite")
        with ledger.spend("data", TENTH):
            pass
    for suffix in ("", ".head"):
        shutil.copy(f"{tmp_path / 'backup.sqlite'}{suffix}", f"{path}{suffix}")
    for options in ({}, {"read_only": True}):
        with pytest.raises(LedgerDamaged, match=r"its anchor has seen spend 17\. An older copy"):
            Ledger(path, **options)
    accept(path)
    with Ledger(path) as ledger, ledger.spend("data", TENTH):
        pass


def test_a_program_notices_that_all_files_were_restored_below_it(tmp_path):
    """The anchor is restored too, and only the memory of the process has seen the spend."""
    folder = tmp_path / "run"
    folder.mkdir()
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.register("data", adjacency="add_remove", unit="example", epsilon=0.25, delta=0.0)
        ledger.spend("data", TENTH)
        shutil.copytree(folder, tmp_path / "copy")
        ledger.spend("data", TENTH)
        for file in (tmp_path / "copy").iterdir():
            shutil.copyfile(file, folder / file.name)  # into the files that are open
        with pytest.raises(LedgerDamaged, match=r"this process has seen spend 2\. An older copy"):
            ledger.spend("data", TENTH)


MOVING = """
import os, sys
from jaxdp.privacy import Ledger, PureDpEvent
first, *others = sys.argv[1:]
os.chdir(first)
ledger = Ledger("ledger.sqlite")
for folder in others:
    os.chdir(folder)
    with ledger.spend("data", PureDpEvent(0.1)):
        pass
# A daemon forks, and then works in the last folder.
child = os.fork()
if not child:
    ledger.spend("data", PureDpEvent(0.1))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert ledger.head.spend == 4
"""


def test_a_relative_path_stays_that_of_the_first_folder(tmp_path):
    """A program changes its folder, to one with a copy of its files or with none."""
    first, copy, empty = (tmp_path / name for name in ("first", "copy", "empty"))
    for folder in (first, copy, empty):
        folder.mkdir()
    with Ledger(first / "ledger.sqlite") as ledger:
        ledger.register("data", adjacency="add_remove", unit="example", epsilon=1.0, delta=0.0)
        ledger.spend("data", TENTH)
        ledger.backup(copy / "ledger.sqlite")
    done = forked.run(MOVING, first, copy, empty, modules=forked.LEDGERS)
    assert done.returncode == 0, done.stderr
    assert not list(empty.iterdir())
    for folder, spends in ((first, 4), (copy, 1)):
        with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.head.spend == spends


@pytest.mark.parametrize("spent", [False, True])
def test_a_ledger_without_an_anchor_says_so_once(path, spent):
    with Ledger(path) as ledger:
        ledger.register("data", adjacency="add_remove", unit="example")
        if spent:
            with ledger.spend("data", TENTH):
                pass
    os.remove(anchor_of(path))
    for is_first in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Ledger(path).close()
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (spent and is_first)
        assert all("no anchor beside it" in text and "accept" in text for text in texts)


def test_a_reader_leaves_nothing_behind(path):
    """SQLite would leave files that belong to the reader, and lock out the owner."""
    make(path)
    before = {file: file.stat().st_mtime_ns for file in path.parent.iterdir()}
    with Ledger(path, read_only=True) as ledger:
        assert answers(ledger)
    assert {file: file.stat().st_mtime_ns for file in path.parent.iterdir()} == before
    # The twin: SQLite's own way to read.
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        db.execute("SELECT count(*) FROM spends").fetchone()
        assert {*path.parent.iterdir()} > {*before}


def modes(path):
    files = (path, pathlib.Path(f"{path}.head"), anchor_of(path), pathlib.Path(f"{path}-wal"))
    return [stat.S_IMODE(file.stat().st_mode) for file in files if file.exists()]


@pytest.mark.parametrize(("folder", "expected"), [(0o2775, 0o664), (0o775, 0o644)])
def test_a_ledger_in_the_folder_of_a_team_is_writable_for_the_group(path, folder, expected):
    path.parent.chmod(folder)
    before = os.umask(0o022)
    try:
        with Ledger(path) as ledger:
            ledger.register("data", adjacency="add_remove", unit="example")
            assert modes(path) == [expected] * 4
        for file in (path, pathlib.Path(f"{path}.head"), anchor_of(path)):
            file.chmod(0o644)  # as a restored copy
        accept(path)
        assert modes(path)[:3] == [expected] * 3
    finally:
        os.umask(before)


MOUNTS = """/dev/sda / ext4 rw 0 0
server:/home {folder} nfs4 rw 0 0
/dev/sdb {folder}/a\\040disk ext4 rw 0 0
"""


@pytest.mark.parametrize(("place", "kind"), [("", "nfs4"), ("a disk", "")])
def test_a_ledger_on_a_network_disk_warns(tmp_path, monkeypatch, place, kind):
    mounts, folder = tmp_path / "mounts", tmp_path / place
    mounts.write_text(MOUNTS.format(folder=tmp_path))
    folder.mkdir(exist_ok=True)
    path = folder / "ledger.sqlite"
    assert database.network_disk(path, mounts) == kind
    assert database.network_disk(path, tmp_path / "none") == ""
    monkeypatch.setattr(database.network_disk, "__defaults__", (mounts,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Ledger(path).close()
    assert ["(nfs4)" in str(warning.message) for warning in caught] == [True] * bool(kind)


def test_a_file_that_this_user_cannot_write_is_named():
    # pytest's folders are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        names = ["ledger.sqlite", "ledger.sqlite.head", ".ledger.sqlite.anchor"]
        for index, name in enumerate(names):
            os.mkdir(f"{folder}/{index}")
            make(f"{folder}/{index}/ledger.sqlite")
            os.chmod(f"{folder}/{index}/{name}", 0o444)
            os.chmod(f"{folder}/{index}", 0o777)
        Registry(f"{folder}/registry.sqlite")
        make(f"{folder}/closed.sqlite")
        os.chmod(f"{folder}/closed.sqlite", 0o600)
        os.chmod(folder, 0o777)
        code = f"""
import os
from jaxdp.privacy import Ledger, Registry
from jaxdp.privacy.store import accept
if os.geteuid() == 0:
    os.setuid(65534)  # root may write everything
for index, name in enumerate({names!r}):
    folder = f"{folder}/{{index}}"
    before = sorted(os.listdir(folder))
    for use in (Ledger, accept):
        try:
            use(f"{{folder}}/ledger.sqlite")
        except ValueError as error:
            assert f"{{name}}' has mode -r--r--r--" in str(error), error
        else:
            raise AssertionError("it was opened")
    Ledger(f"{{folder}}/ledger.sqlite", read_only=True).close()  # who may read may look
    # A log of this user would lock out the owner.
    assert sorted(os.listdir(folder)) == before
if os.stat("{folder}/registry.sqlite").st_uid != os.geteuid():
    try:
        Ledger("{folder}/closed.sqlite", read_only=True)
    except ValueError as error:
        assert "closed.sqlite' has mode -rw-------" in str(error), error
        assert "Ask the owner for read access" in str(error) and "write" not in str(error), error
    else:
        raise AssertionError("it was read")
    try:
        Registry("{folder}/registry.sqlite")
    except OSError as error:
        assert "has mode -rw-------" in str(error) and "chmod 660" in str(error), error
    else:
        raise AssertionError("the registry was opened")
"""
        done = forked.run(code, modules=forked.LEDGERS)
        assert done.returncode == 0, done.stderr


def test_an_older_copy_is_used_only_after_it_was_accepted(path, tmp_path):
    said = make(path)
    older = copied(path, tmp_path / "older", "")
    with Ledger(path) as ledger, ledger.spend("data", TENTH):
        later = ledger.head
    shutil.copyfile(f"{path}.head", f"{older}.head")
    with pytest.raises(LedgerDamaged, match=r"has lost history.*jaxdp ledger accept"):
        Ledger(older)
    store.accept(older)
    with Ledger(older) as ledger:
        assert answers(ledger) == said
        assert ledger.contains(later) is None  # another branch: who knows of it charges again
        with ledger.spend("data", TENTH):
            pass
    execute(older, "UPDATE totals SET spends = 1 WHERE dataset = 1")
    with pytest.raises(LedgerDamaged, match="totals"):
        store.accept(older)


# --- Version 1 ----------------------------------------------------------------------------------


def test_a_ledger_of_the_first_release_is_migrated_once_and_kept(path):
    path.write_bytes(GOLDEN.read_bytes())
    with Ledger(path, read_only=True) as ledger:
        said = answers(ledger)
    assert path.read_bytes() == GOLDEN.read_bytes() and not pathlib.Path(f"{path}.head").exists()
    with Ledger(path) as ledger:
        assert answers(ledger) == said
        head = ledger.head
    kept = pathlib.Path(f"{path}.version1")
    with (
        contextlib.closing(sqlite3.connect(kept)) as old,
        contextlib.closing(sqlite3.connect(GOLDEN)) as golden,
    ):
        assert list(old.iterdump()) == list(golden.iterdump())
    changed = kept.stat().st_mtime_ns
    with Ledger(path) as ledger:
        assert answers(ledger) == said and ledger.head == head
    assert kept.stat().st_mtime_ns == changed
    fresh = path.with_name("fresh.sqlite")
    Ledger(fresh).close()
    for table in ("meta", "datasets", "events", "spends", "totals", "holds"):
        columns = [
            sqlite3.connect(file)
            .execute(f"SELECT name, type, pk FROM pragma_table_info('{table}')")
            .fetchall()
            for file in (path, fresh)
        ]
        assert columns[0] == columns[1]


def test_a_damaged_ledger_of_the_first_release_is_refused(path):
    path.write_bytes(GOLDEN.read_bytes())
    execute(path, "UPDATE totals SET spends = 0")
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(LedgerDamaged, match="totals of dataset"):
            Ledger(path, read_only=read_only)
    assert path.read_bytes() == before


def test_a_program_of_the_first_release_cannot_write_any_more(path):
    path.write_bytes(GOLDEN.read_bytes())
    Ledger(path).close()
    with pytest.raises(sqlite3.IntegrityError, match="a newer jaxdp migrated this ledger"):
        execute(
            path,
            "INSERT INTO spends (dataset, partition, event, label, token, status, run, version, "
            "reserved_at) VALUES (1, '', 1, '', NULL, 'reserved', 'r', '0.1.0', '2026-01-01')",
        )


# --- Waiting ------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from jaxdp.privacy.store import Store
with Store(sys.argv[1]).transaction():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_process_that_holds_the_ledger_too_long_is_reported(path, tmp_path, monkeypatch):
    make(path)
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    with Ledger(path) as ledger:
        holder = forked.start(HOLDER, path, modules=forked.LEDGERS, files=[printed, errors])
        while not printed.exists() or printed.read_text() != "held\n":
            assert holder.poll() is None, errors.read_text()
            time.sleep(0.01)
        monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
        with pytest.raises(OSError, match=r"held by another process.*still counts"):
            ledger.spend("data", TENTH)
        assert ledger.epsilon("data") > 0  # questions need no turn
        holder.kill()
        monkeypatch.setattr(database, "BUSY_SECONDS", 60.0)
        with ledger.spend("data", TENTH):
            pass


def test_budgets_hold_after_every_reopening(path):
    make(path, spends=39)
    with Ledger(path) as ledger:
        with ledger.spend("data", TENTH):
            pass
        with pytest.raises(BudgetExceeded):
            ledger.spend("data", TENTH)


def test_a_head_is_one_line_of_json(path):
    make(path)
    fields, check = json.loads(pathlib.Path(f"{path}.head").read_text())
    with Ledger(path) as ledger:
        assert Head(*fields) == ledger.head and len(check) == 64


def test_golden_file_of_version_2_is_intact(path):
    for suffix in ("", ".head"):
        shutil.copyfile(f"{GOLDEN.with_name('ledger_v2.sqlite')}{suffix}", f"{path}{suffix}")
    with Ledger(path) as ledger:
        assert ledger.head.spend == len(ledger.history()) > 5
        assert {(row["who"], row["host"]) for row in ledger.history()} == {("someone", "somewhere")}


VISITOR = """
import sys
from jaxdp.privacy import Ledger, PureDpEvent
with open(sys.argv[1]) as orders, open(sys.argv[2], "w") as answers:
    for line in orders:
        order, path = line.split(maxsplit=1)
        with Ledger(path.strip(), read_only=order == "read") as ledger:
            if order == "spend":
                with ledger.spend("data", PureDpEvent(0.01)):
                    pass
        print("done", file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """Lets another process open and close a ledger: `visit(order, path)` returns what it says."""
    folder = tmp_path_factory.mktemp("visitor")
    orders, answers = pipes = [folder / "orders", folder / "answers"]
    for pipe in pipes:
        os.mkfifo(pipe)
    files = [folder / "printed", folder / "errors"]
    process = forked.start(VISITOR, *pipes, modules=forked.LEDGERS, files=files)
    with orders.open("w") as asked, answers.open() as said:

        def visit(order, path):
            print(order, path, file=asked, flush=True)
            return said.readline()

        yield visit
    process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("touch", [False, True], ids=["by jaxdp", "broken twin"])
def test_a_second_ledger_in_a_process_drops_no_locks_of_the_first(path, touch, visit):
    """POSIX locks belong to a process: whoever opens and closes the database by other means than
    SQLite drops them."""
    make(path)
    with Ledger(path) as first:
        broken = False
        for order in ("spend", "read") * 4:
            try:
                with first.spend("data", PureDpEvent(0.01)):
                    pass
                with Ledger(path, read_only=True), Ledger(path):
                    pass
            except (LedgerDamaged, OSError):
                broken = True
                break
            if touch:
                path.read_bytes()
            broken |= visit(order, path) != "done\n"
            # The last one who closes a database deletes its log; the visitor is never the last one.
            broken |= not pathlib.Path(f"{path}-wal").exists()
            if broken:
                break
        assert broken == touch


@pytest.mark.slow
def test_a_ledger_is_checked_as_of_one_instant(path, monkeypatch):
    """Another program registers a dataset and spends on it in the middle of the check."""
    make(path)
    original, calls = chain.terms_of, []

    def interrupted(row):
        calls.append(row["name"])
        if len(calls) == 4:  # seals are done, and the links are about to be read
            writer.register("new", adjacency="add_remove", unit="example")
            with writer.spend("new", TENTH):
                pass
        return original(row)

    # The writer has the file open. Otherwise a reader reads a copy.
    with Ledger(path) as writer, monkeypatch.context() as patched:
        patched.setattr(chain, "terms_of", interrupted)
        ledger = Ledger(path, read_only=True)
    with ledger:
        assert len(calls) > 4 and ledger.epsilon("new", delta=0.0) == 0.1
