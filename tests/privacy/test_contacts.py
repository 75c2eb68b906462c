"""Owner, purpose, contact and approver of a data set: set, corrected, kept, and linked."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from jaxdp.privacy import GaussianDpEvent, Ledger, LedgerDamaged, PrivacyWarning
from launch import command

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TERMS = {"adjacency": "add_remove", "unit": "patient", "epsilon": 3.0, "delta": 1e-4}


def test_they_are_set_corrected_and_kept(tmp_path):
    with Ledger(tmp_path / "a.sqlite") as ledger:
        ledger.register("p", **TERMS, owner="Cardiology", contact="a@b")
        ledger.register("q", **TERMS)
        with ledger.spend("p", GaussianDpEvent(4.0)):
            pass
        ledger.describe("p", contact="c@d", approver="Board")
        ledger.describe("p", approver="Board")  # no change, no row
        ledger.register("p", **TERMS, purpose="triage", owner="Cardiology")
        now = {"owner": "Cardiology", "purpose": "triage", "contact": "c@d", "approver": "Board"}
        assert ledger.contacts("p") == now and set(ledger.contacts("q").values()) == {""}
        history = ledger.contact_history("p")
        assert [row["contact"] for row in history] == ["a@b", "c@d", "c@d"]
        assert [row["spend"] for row in history] == [0, 1, 1]
        assert "  contact      c@d" in ledger.report_text()
        (first, _) = ledger.report()["datasets"]
        assert {field: first[field] for field in now} == now
        ledger.backup(tmp_path / "b.sqlite")
    with Ledger(tmp_path / "b.sqlite", read_only=True) as copy:
        assert copy.contacts("p") == now and len(copy.contact_history()) == 3


def test_a_field_that_differs_stays_and_is_named(tmp_path):
    with Ledger(tmp_path / "a.sqlite") as ledger:
        ledger.register("p", **TERMS, owner="Cardiology")
        with pytest.warns(PrivacyWarning, match=r"has owner 'Cardiology' .* and not 'Oncology'"):
            ledger.register("p", **TERMS, owner="Oncology")
        assert ledger.contacts("p")["owner"] == "Cardiology"
        with pytest.raises(TypeError, match="owner must be a text or None, got int 3"):
            ledger.describe("p", owner=3)
        with pytest.raises(ValueError, match="contact must be one line of at most 500"):
            ledger.register("r", **TERMS, contact="a\nb")
        with pytest.raises(ValueError, match="'nobody' is not registered"):
            ledger.describe("nobody", owner="x")


@pytest.mark.parametrize("change", ["owner", "missing"])
def test_a_changed_row_is_damage(tmp_path, change):
    path = tmp_path / "a.sqlite"
    with Ledger(path) as ledger:
        ledger.register("p", **TERMS, owner="Cardiology")
        ledger.describe("p", owner="Oncology")
    with sqlite3.connect(path) as db:
        if change == "missing":
            db.execute("DELETE FROM meta WHERE key = 'contact 1'")
        else:
            (text,) = db.execute("SELECT value FROM meta WHERE key = 'contact 1'").fetchone()
            forged = json.dumps(json.loads(text) | {"owner": "Nobody"})
            db.execute("UPDATE meta SET value = ? WHERE key = 'contact 1'", (forged,))
    with pytest.raises(LedgerDamaged, match="owners and contacts, or an earlier one, was changed"):
        Ledger(path, read_only=True)


@pytest.mark.parametrize("name", ["ledger_v1.sqlite", "ledger_v2.sqlite"])
def test_ledgers_of_earlier_versions_get_the_fields(tmp_path, name):
    for file in GOLDEN.glob(f"{name}*"):
        shutil.copy(file, tmp_path)
    with Ledger(tmp_path / name) as ledger:
        (first, *_) = ledger.report()["datasets"]
        assert first["owner"] == ""
        ledger.describe(first["name"], owner="Cardiology")
    with Ledger(tmp_path / name, read_only=True) as ledger:
        assert ledger.contacts(first["name"])["owner"] == "Cardiology"


def test_the_command_sets_and_lists_them(tmp_path, capsys):
    path = str(tmp_path / "a.sqlite")
    with Ledger(path) as ledger:
        ledger.register("p", **TERMS)
    command.main(["ledger", "describe", path, "p", "--owner", "Cardiology"])
    command.main(["ledger", "describe", path, "p", "--owner=", "--contact", "a@b"])
    capsys.readouterr()
    command.main(["ledger", "describe", path, "p"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "Cardiology" in lines[1] and "a@b" in lines[2]
    assert "Cardiology" not in lines[2]
    with pytest.raises(SystemExit):
        command.main(["ledger", "describe", str(tmp_path / "typo.sqlite"), "p", "--owner=x"])
    assert not (tmp_path / "typo.sqlite").exists()
