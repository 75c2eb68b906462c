"""The page of a ledger: its numbers are the ledger's, on the safe side, of every account, and its
texts stay text."""

import decimal
import json
import re
import sqlite3

import pytest

from jaxdp.privacy import GaussianDpEvent, Ledger, NonPrivateDpEvent, PureDpEvent, store, unproven
from jaxdp.report import html, write
from jaxdp.report.ledger import CHARTS, NEWEST, ROWS, ledger_facts, ledger_page
from tests.report.pages import Page

ACCOUNTS = "What is spent on each"


@pytest.fixture
def path(tmp_path):
    """A ledger with equal, unlimited and unused accounts, a release without a proof, and an open
    one."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, run="run 1") as ledger:
        for name in ("site 1", "site 2"):
            ledger.register(
                name, adjacency="replace_one", unit="patient", epsilon=3.0, delta=0.0, records=10
            )
        ledger.register(
            "train", adjacency="add_remove", unit="image", epsilon=4.0, delta=1e-5, records=1234
        )
        ledger.register("free", adjacency="zero_out", unit="user")
        ledger.register(
            "pilot",
            adjacency="add_remove",
            unit="image",
            epsilon=1.0,
            delta=1e-5,
            allow_unproven=True,
        )
        ledger.register("idle", adjacency="add_remove", unit="image", epsilon=0.3, delta=1e-6)
        ledger.register("open", adjacency="add_remove", unit="image")
        for step in range(3):
            with ledger.spend("train", GaussianDpEvent(4.0 + step), label=f"step {step}"):
                pass
        for name in ("site 1", "site 2"):
            for _ in range(3):
                with ledger.spend(name, PureDpEvent(0.1)):
                    pass
        with ledger.spend("pilot", unproven("no proof"), label="demo"):
            pass
        with ledger.spend("pilot", PureDpEvent(0.123456)):
            pass
        with ledger.spend("free", GaussianDpEvent(7.0), partition="part a"):
            pass
        ledger.spend("free", GaussianDpEvent(7.0), partition="part b")
        with ledger.spend("open", NonPrivateDpEvent()):
            pass
    return path


def disagreements(page, path):
    """Returns what the accounts on a page get wrong about a ledger: names that lack, and numbers
    that differ."""
    with Ledger(path, read_only=True) as ledger:
        entries = json.loads(json.dumps(ledger.report()))["datasets"]
    wrong, accounts = [], page.titled(ACCOUNTS)
    for entry in entries:
        found = [
            row for row in accounts if entry["name"] in re.split(r", | \(", row["data set"][0])
        ]
        if len(found) != 1:
            wrong.append(entry["name"])
            continue
        (row,) = found
        times = entry["records"] and entry["delta"] * entry["records"]
        proven = None if entry["headline"].startswith("inf") else entry["proven_epsilon"]
        for heading, exact, sign in (
            ("epsilon spent", proven, 1),
            ("budget", entry["budget"], 1),
            ("left", None if entry["budget"] is None else entry["remaining"], -1),
            ("delta", entry["delta"], 1),
            ("delta times units", times, 1),
        ):
            text, numbers = row[heading]
            shown = [float(text)] if numbers else []
            if numbers != ([] if exact is None else [exact]):
                wrong.append((entry["name"], heading, numbers))
            elif (
                shown
                and not 0
                <= sign * (shown[0] - exact) + 1e-12 * exact
                <= 0.01 * exact + 2e-12 * exact
            ):
                wrong.append((entry["name"], heading, text))
    return wrong


def test_the_numbers_are_the_ledgers_and_on_the_safe_side(path):
    page, damage = ledger_page(path)
    assert damage is None and not disagreements(Page(page), path)
    rows = {row["data set"][0]: row for row in Page(page).titled(ACCOUNTS)}
    assert rows["pilot"]["epsilon spent"][0] == "inf (empirical only)"
    assert rows["open"]["epsilon spent"][0] == "infinite"
    assert rows["idle"]["epsilon spent"][0] == "0" and rows["idle"]["left"][0] == "0.3"
    assert (
        rows["free"]["left"][0] == "no budget"
        and rows["free"]["delta times units"][0] == "not declared"
    )
    (sites,) = (row for name, row in rows.items() if name.startswith("site 1, site 2 (2 data sets"))
    assert sites["epsilon spent"][0] == "0.3" and sites["left"][0] == "2.7"


@pytest.mark.slow
def test_the_check_of_numbers_can_fail(path, monkeypatch):
    """Twins: rounding down, rounding what is left up, and an account that is dropped."""
    up, down = decimal.ROUND_CEILING, decimal.ROUND_FLOOR
    monkeypatch.setattr(decimal, "ROUND_CEILING", down)
    wrong = disagreements(Page(ledger_page(path)[0]), path)
    assert {(name, heading) for name, heading, _ in wrong} == {
        *(("train", heading) for heading in ("epsilon spent", "delta times units")),
        ("free", "epsilon spent"),
    }
    monkeypatch.setattr(decimal, "ROUND_CEILING", up)
    monkeypatch.setattr(decimal, "ROUND_FLOOR", up)
    assert ("train", "left") in {row[:2] for row in disagreements(Page(ledger_page(path)[0]), path)}
    monkeypatch.setattr(decimal, "ROUND_FLOOR", down)
    page = Page(ledger_page(path)[0])
    page.titled(ACCOUNTS).pop()
    assert len(disagreements(page, path)) == 1


def test_who_spent_what_and_when(path):
    page, facts = Page(ledger_page(path)[0]), ledger_facts(path)
    with Ledger(path, read_only=True) as ledger:
        assert facts["report"] == ledger.report()
        history = ledger.history()
    newest = page.titled("The newest 14 of 14 spends")
    for row, spend in zip(newest, reversed(history), strict=True):
        assert row["spend"][0] == str(spend["spend"]) and row["status"][0] == spend["status"]
        assert (
            row["time"][0] == spend["reserved_at"][:19].replace("T", " ")
            and row["mechanism"][0] == spend["event"]
        )
        assert row["by"][0] == f"{spend['who']}, run run 1"
    (who,) = page.tables["Who spent on train, the newest first."]
    assert (
        who["run"][0] == "run 1"
        and who["spends"][0] == "3"
        and who["host"][0] == history[0]["host"]
    )
    (first, second) = page.tables["What was released about free."]
    assert {first["part"][0], second["part"][0]} == {"part a", "part b"}
    assert [row["not committed"][0] for row in (first, second)] in (["0", "1"], ["1", "0"])
    assert "1 spend not committed" in page.text and "No epsilon holds for pilot." in page.text
    assert history[-1]["link"] in page.text and "Verified." in page.text


def test_what_each_mechanism_adds_is_the_ledgers(path):
    page = Page(ledger_page(path)[0])
    rows = page.tables["What each mechanism adds to the epsilon of train."]
    with Ledger(path, read_only=True) as ledger:
        costs = ledger.explain("train").costs
    exact = [
        (cost.group, cost.alone, cost.marginal, cost.without, cost.remaining_without)
        for cost in costs
    ]
    columns = ("epsilon alone", "epsilon it adds", "epsilon without it", "left without it")
    numbers = [(row["mechanism"][0], *(row[name][1][0] for name in columns)) for row in rows]
    assert numbers == exact and len(exact) == 3
    pilot = page.tables["What each mechanism adds to the epsilon of pilot."]
    assert [row["epsilon it adds"][0] for row in pilot] == ["infinite", "0"]


def test_the_trade_off_curve_is_the_ledgers_and_on_the_safe_side(path):
    page = Page(ledger_page(path)[0])
    captions = [name for name in page.tables if "What an attacker must miss on train" in name]
    (rows,) = (page.tables[caption] for caption in captions)
    with Ledger(path, read_only=True) as ledger:
        curve = ledger.trade_off("train")
    for row in rows:
        exact = curve.at(float(row["false alarms"][0]))
        proven = row["proven for every attacker"][0]
        if proven:
            shown = float(proven.removesuffix(" %")) / 100
            assert shown - 1e-12 <= exact <= shown + 1e-3
    assert len(rows) == 23 and "What an attacker must miss on pilot" not in page.text


def test_what_a_family_loses_is_the_ledgers(path):
    page = Page(ledger_page(path)[0])
    (rows,) = (table for name, table in page.tables.items() if "several images together" in name)
    with Ledger(path, read_only=True) as ledger:
        groups = ledger.group_privacy("train").groups
    exact = [(str(row.size), [row.epsilon]) for row in groups]
    assert [(row["images"][0], row["epsilon"][1]) for row in rows] == exact
    # A broken twin: the epsilon of one unit times their number.
    assert exact[0][1][0] > 2 * ledger_epsilon(path)


def test_a_report_says_what_a_family_loses(path, tmp_path):
    page = Page(write(path, tmp_path / "report.html").read_bytes())
    rows = page.titled("Epsilon for sev")
    (row,) = (row for row in rows if row["data set"][0] == "train")
    with Ledger(path, read_only=True) as ledger:
        groups = ledger.group_privacy("train").groups
    assert [row[f"{of.size} records"][0] for of in groups] == [
        html.round_up(of.epsilon) for of in groups
    ]
    assert "pilot" not in {row["data set"][0] for row in rows}  # without a proof


def ledger_epsilon(path):
    with Ledger(path, read_only=True) as ledger:
        return ledger.epsilon("train")


def test_the_growth_ends_at_epsilon(path, monkeypatch):
    """Every row counts what was spent until its end. A row of several spends stands for the last of
    them."""
    with Ledger(path) as ledger:
        rows = ledger.growth("train", points=40)
        assert [row["spends"] for row in rows] == [1, 1, 1] and rows[-1][
            "epsilon"
        ] == ledger.epsilon("train")
        assert rows[0]["epsilon"] < rows[1]["epsilon"] < rows[2]["epsilon"]
        (row,) = ledger.growth("train", points=1)
        assert row["spends"] == 3 and row["epsilon"] == ledger.epsilon("train")
        assert row["first_at"] == rows[0]["first_at"] and row["last_at"] == rows[2]["last_at"]
        assert ledger.growth("idle") == []
        assert [row["spends"] for row in ledger.growth("train", points=2)] == [2, 1]
        with pytest.raises(ValueError, match="points must be at least 1, got 0"):
            ledger.growth("train", points=0)


def test_a_figure_shows_the_budget_and_the_table_of_its_numbers(path, monkeypatch):
    times = iter(f"2099-01-{day:02}T12:00:00.000+00:00" for day in range(1, 29))
    with Ledger(path) as ledger:
        monkeypatch.setattr(store, "now", lambda: next(times))
        for _ in range(2):
            ledger.spend("train", GaussianDpEvent(9.0))
    source, _ = ledger_page(path)
    page = Page(source)
    numbers = page.tables[
        "The numbers of the figure: Epsilon spent on train over time, at delta 1e-05."
    ]
    with Ledger(path, read_only=True) as ledger:
        assert numbers[-1]["spent"][0] == html.round_up(ledger.epsilon("train"))
    text = source.decode()
    assert "budget 4</li>" in text and "A dashed line shows the budget of 4." in text
    # The alternative text tells what the caption does not.
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions and not set(captions) & set(re.findall('aria-label="(.*?)"', text))


@pytest.mark.slow
def test_a_long_ledger_makes_a_short_page(tmp_path):
    """Tables hold the newest rows and say how many are missing. The number of points is bounded."""
    path = tmp_path / "ledger.sqlite"
    memory = Ledger.in_memory()
    for account in range(14):
        memory.register(
            f"site {account:02}",
            adjacency="add_remove",
            unit="patient",
            epsilon=5.0 + account,
            delta=0.0,
        )
        for spend in range(12):
            memory.spend(f"site {account:02}", PureDpEvent(0.01 * (1 + spend)))
    memory.backup(path)
    source, _ = ledger_page(path)
    page, facts = Page(source), ledger_facts(path)
    assert not disagreements(page, path) and len(source) < 450_000  # 100 kB are points as CSV
    assert len(page.tables["What was released about site 07."]) == ROWS
    assert "2 more mechanisms are not listed here" in page.text
    assert len(page.tables[f"The newest {NEWEST} of 168 spends."]) == NEWEST
    grown = [group["names"] for group in facts["groups"] if group["growth"]]
    assert grown == [[f"site {number:02}"] for number in range(CHARTS)]  # those with the least left
    assert sum(len(group["growth"]) for group in facts["groups"]) <= 120


FORGED = """"'><script>alert(1)</script>{{ 7 * 7 }}"""


def test_nothing_that_is_forged_becomes_markup(tmp_path, monkeypatch):
    """Every text that a person or a program can put into a ledger stays text, in cells, sentences
    and attributes."""
    monkeypatch.setattr(store, "_author", lambda: (FORGED, FORGED))
    monkeypatch.setattr(store, "__version__", FORGED)
    folder = tmp_path / FORGED.replace("/", "")
    folder.mkdir()
    path = folder / "ledger.sqlite"
    with Ledger(path, run=FORGED) as ledger:
        ledger.register(
            FORGED, adjacency="add_remove", unit=FORGED, epsilon=9.0, delta=0.0, allow_unproven=True
        )
        ledger.spend(FORGED, PureDpEvent(0.5), label=FORGED, partition=FORGED)
        ledger.spend(FORGED, unproven(FORGED), label=FORGED)
        ledger.hold([(FORGED, PureDpEvent(0.5))], label=FORGED)
        ledger.hold([(FORGED, PureDpEvent(0.5))], key=FORGED)
    page = ledger_page(path)[0].decode()
    assert "<script" not in page and "49" not in re.findall("alert.*?{{ (7 . 7) }}", page)
    assert page.count("&lt;script") > 25 and not re.search('="[^"]*"\'>', page)
    with sqlite3.connect(path) as db:  # terms that no register lets in
        db.execute("UPDATE datasets SET adjacency = ?", (FORGED,))
    page, damage = ledger_page(path)
    assert damage is not None and b"<script" not in page and b"&lt;script" in page
