"""The command `jaxdp ledger`: what it prints, that it writes nothing, and what it refuses."""

import csv
import datetime
import importlib.util
import io
import json
import pathlib
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys

import pytest

import jaxdp
from jaxdp import compilers
from jaxdp.command import main
from jaxdp.files.text import down, up
from jaxdp.privacy import (
    GaussianDpEvent,
    Ledger,
    PoissonSampledDpEvent,
    PrivacyWarning,
    PureDpEvent,
    Registry,
    SelfComposedDpEvent,
    epsilon,
    store,
)
from jaxdp.privacy.events import describe, parse
from launch import catalogue, document, plans, studies, usage
from launch.lifecycle import stages as lifecycle_stages
from tests.forked import PYTHON

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, run="run 1") as ledger:
        ledger.register(
            "train", adjacency="add_remove", unit="example", epsilon=2.0, delta=1e-5, records=50_000
        )
        for number in range(3):
            ledger.register(
                f"hospital {number}", adjacency="add_remove", unit="image", epsilon=1.0, delta=0.0
            )
            with ledger.spend(f"hospital {number}", PureDpEvent(0.5), label="temperature"):
                pass
        with ledger.spend("train", SelfComposedDpEvent(STEP, 100), label="=cmd \x1b[31mred"):
            pass
    return path


def said(capsys, *arguments):
    main(["ledger", *map(str, arguments)])
    return capsys.readouterr().out


def test_the_account_is_shown(path, capsys):
    text = said(capsys, "show", path)
    assert "3 datasets with equal accounts: hospital 0, hospital 1, hospital 2" in text
    assert text.count("Pure(0.5)") == 1
    assert "examples     50000 as declared" in text and "images       not declared" in text
    assert "run 1" in text and "who " in text and "version" in text
    assert "\x1b" not in text and r"\x1b[31mred" in text
    report = json.loads(said(capsys, "show", path, "--json"))
    assert report["datasets"][-1]["runs"][0]["spends"] == 1 and report["head"]["spend"] == 4
    hour = said(capsys, "show", path), said(capsys, "show", path, "--timezone", "Asia/Kolkata")
    assert "times in Asia/Kolkata" in hour[1] and hour[0] != hour[1]


def test_what_each_release_adds_is_explained(path, capsys):
    text = said(capsys, "explain", path, "train")
    assert "PoissonSampled(0.01, Gaussian(1.1)) x 100" in text and "remaining without" in text
    assert "hospital 2: epsilon 0.5 at delta 0, budget 1" in said(capsys, "explain", path)
    (train,) = json.loads(said(capsys, "explain", path, "train", "--by", "type", "--json"))
    (cost,) = train["costs"]
    with Ledger(path, read_only=True) as ledger:
        assert cost["marginal"] == cost["alone"] == ledger.epsilon("train")
    assert (cost["group"], cost["releases"]) == ("PoissonSampled(Gaussian)", 100)
    assert (cost["without"], cost["remaining_without"]) == (0.0, 2.0)


def test_the_trade_off_curve_is_printed(path, capsys):
    with Ledger(path, read_only=True) as ledger:
        curve = ledger.trade_off("hospital 1")
    text = said(capsys, "curve", path, "hospital 1")
    assert f"mu {up(curve.mu)}, and {up(curve.mu)} up to a slack of 0" in text
    assert re.search(r"0\.1 +0\.8351", text)  # 1 - 0.1 exp(0.5), rounded down
    points = list(csv.DictReader(io.StringIO(said(capsys, "curve", path, "hospital 1", "--csv"))))
    assert [float(row["alpha"]) for row in points] == list(curve.alpha)
    assert [float(row["beta"]) for row in points] == list(curve.beta)
    answer = json.loads(said(capsys, "curve", path, "hospital 1", "--json", "--slack", "1e-4"))
    assert answer["slack"] == 1e-4 and answer["mu_up_to_slack"] < answer["mu"] == curve.mu


def test_what_a_family_loses_is_printed(path, capsys):
    with Ledger(path, read_only=True) as ledger:
        table = ledger.group_privacy("train", (2, 4))
    words = ("group", path, "train", "--sizes", "4", "2")
    assert said(capsys, *words).startswith("train: several")
    rows = list(csv.DictReader(io.StringIO(said(capsys, *words, "--csv"))))
    assert [float(row["epsilon"]) for row in rows] == [row.epsilon for row in table.groups]
    answer = json.loads(said(capsys, *words, "--json"))
    assert [row["size"] for row in answer["groups"]] == [2, 4]
    assert "train: several" in said(capsys, "show", path)


def test_renyi_dp_is_printed_for_other_accountants(path, capsys):
    with Ledger(path, read_only=True) as ledger:
        statement = ledger.renyi("train")
    assert f"zCDP rho {up(statement.rho)}, adjacency add" in said(capsys, "renyi", path, "train")
    rows = list(csv.DictReader(io.StringIO(said(capsys, "renyi", path, "train", "--csv"))))
    assert [float(row["order"]) for row in rows] == list(statement.orders)
    assert [float(row["rdp"]) for row in rows] == list(statement.rdp)
    answer = json.loads(said(capsys, "renyi", path, "train", "--json"))
    assert answer["rho"] == statement.rho and answer["rdp"] == list(statement.rdp)


def test_datasets_whose_accounts_differ_are_shown_apart(path, capsys):
    with Ledger(path) as ledger, ledger.spend("hospital 1", PureDpEvent(0.25)):
        pass
    assert "2 datasets with equal accounts: hospital 0, hospital 2" in said(capsys, "show", path)


@pytest.mark.parametrize(
    ("event", "verdict"),
    [("10 * Gaussian(20)", "allows it"), ("Gaussian(0.5) x 3", "does not allow it")],
)
def test_what_if(path, capsys, event, verdict):
    before = path.read_bytes()
    text = said(capsys, "show", path, "--if", f"train: {event}")
    with Ledger(path, read_only=True) as ledger:
        after = ledger.would_cost("train", parse(event))
    assert f"epsilon {up(after)} at delta 1e-05" in text and verdict in text
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "event",
    [
        PureDpEvent(0.1),
        SelfComposedDpEvent(STEP, 500),
        parse("Laplace(2) + 3 * Gaussian(1.5)"),
        parse("Unproven('nobody knows')"),
        parse("Truncated" + "SubsampledGaussian(100, 0.1, 20, 1.5)"),
        parse("RepeatAndSelect(Gaussian(2), 3, inf)"),
    ],
    ids=describe,
)
def test_events_are_read_as_they_are_written(event):
    text = describe(event) if "nobody" not in describe(event) else "Unproven('nobody knows')"
    assert parse(text) == parse(text.replace(" x ", " * ")) == event


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Gauss(1)", "cannot be read"),
        ("Gaussian(1", "cannot be read"),
        ("Gaussian(1, 2)", "takes 1 arguments"),
        ("Gaussian(-1)", "cannot be read"),
        ("__import__('os').getcwd()", "cannot be read"),
        ("Pure(1) ** 2", "cannot be read"),
        ("3", "Event"),
    ],
)
def test_what_is_no_event_is_refused(text, words):
    with pytest.raises((ValueError, TypeError), match=words):
        parse(text)


def test_every_spend_as_csv(path, capsys):
    rows = list(csv.DictReader(io.StringIO(said(capsys, "history", path, "--csv"))))
    assert [row["spend"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[3]["event"] == "PoissonSampled(0.01, Gaussian(1.1)) x 100"
    assert rows[3]["label"].startswith("'=cmd")  # no formula in a table calculation
    assert {row["run"] for row in rows} == {"run 1"} and all(len(row["link"]) == 64 for row in rows)
    assert len(said(capsys, "history", path, "--dataset", "train").splitlines()) == 2


def test_epsilon_by_the_day(path, capsys):
    (row,) = csv.DictReader(
        io.StringIO(said(capsys, "history", path, "--by-day", "--dataset", "train", "--csv"))
    )
    assert float(row["epsilon"]) == pytest.approx(
        epsilon(SelfComposedDpEvent(STEP, 100), delta=1e-5), rel=1e-5
    )
    assert len(said(capsys, "history", path, "--by-day").splitlines()) == 5


def test_days_and_parts(path, monkeypatch):
    """Two days, two parts: epsilon at a day's end is that of the worst part until then."""
    with Ledger(path) as ledger:
        ledger.register("parts", adjacency="add_remove", unit="image", delta=0.0)
        times = (
            "2026-01-01T23:30:00.000+00:00",
            "2026-01-01T23:40:00.000+00:00",
            "2026-01-02T00:30:00.000+00:00",
        )
        for time, part, cost in zip(times, "abb", (0.5, 0.25, 0.5), strict=True):
            monkeypatch.setattr(store, "now", lambda time=time: time)
            ledger.spend("parts", PureDpEvent(cost), partition=part)
        days = ledger.by_day("parts")
    assert [(day["day"], day["spends"], day["epsilon"]) for day in days] == [
        ("2026-01-01", 2, 0.5),
        ("2026-01-02", 1, 0.75),
    ]


def test_a_clock_that_was_set_back_gives_no_day_twice(path, monkeypatch):
    with Ledger(path) as ledger:
        ledger.register("clock", adjacency="add_remove", unit="image", delta=0.0)
        for day, cost in ((2, 0.5), (1, 0.25), (2, 1.0)):
            monkeypatch.setattr(store, "now", lambda day=day: f"2026-01-0{day}T12:00:00.000+00:00")
            ledger.spend("clock", PureDpEvent(cost))
        days = ledger.by_day("clock")
    assert [(day["day"], day["spends"], day["epsilon"]) for day in days] == [
        ("2026-01-01", 1, 0.25),
        ("2026-01-02", 2, 1.75),
    ]


def test_a_file_is_verified_and_copied(path, tmp_path, capsys, monkeypatch):
    text = said(capsys, "verify", path)
    assert "4 spend(s)" in text and "head beside it agrees" in text
    assert "4 spend(s), verified" in said(capsys, "backup", path, tmp_path / "copy.sqlite")
    monkeypatch.setenv("JAXDP_HOME", str(tmp_path / "home"))
    key = Registry(tmp_path / "home" / "registry.sqlite").key
    copies = ("second.sqlite", "--registry", tmp_path / "registry.sqlite")
    assert "as secret as records" in said(capsys, "backup", path, tmp_path / copies[0], *copies[1:])
    assert Registry(tmp_path / "registry.sqlite").key == key
    with pytest.raises(SystemExit):  # before the ledger is copied
        said(capsys, "backup", path, tmp_path / "third.sqlite", *copies[1:])
    assert not (tmp_path / "third.sqlite").exists()
    alone = tmp_path / "alone.sqlite"
    shutil.copyfile(path, alone)
    assert "No head lies beside it" in said(capsys, "verify", alone)
    assert "valid up to its spend 4" in said(capsys, "accept", alone)
    Ledger(alone).close()


def test_a_monitor_reads_gauges_and_an_exit_status(path, tmp_path, capsys):
    with Ledger(path) as ledger:
        epsilon, budget = ledger.epsilon("train"), ledger.report()["datasets"][-1]["budget"]
    file = tmp_path / "jaxdp.prom"
    assert said(capsys, "show", path, "--metrics", file) == ""
    with pytest.raises(SystemExit, match="2"):
        main(["ledger", "show", str(path), "--metrics", str(tmp_path / "none" / "jaxdp.prom")])
    assert "--metrics must be in a folder that exists" in capsys.readouterr().err
    *lines, end = file.read_text().splitlines()
    labels = f'{{ledger="{path}",dataset="train",unit="example"}}'
    assert f"jaxdp_ledger_epsilon{labels} {epsilon:.12g}" in lines
    with Ledger(path) as ledger:
        last = max(run["last_at"] for run in ledger.report()["datasets"][-1]["runs"])
    seconds = round(datetime.datetime.fromisoformat(last).timestamp())
    # Nine digits would be ten seconds.
    (line,) = (
        line for line in lines if line.startswith(f"jaxdp_ledger_last_spend_seconds{labels}")
    )
    assert float(line.split()[-1]) == pytest.approx(seconds, abs=1), (line, last)
    assert f"jaxdp_ledger_remaining{labels} {budget - epsilon:.9g}"[:-6] in file.read_text()
    assert end == "# EOF" and len(lines) == 6 * (2 + 4)
    assert "train" in said(capsys, "show", path, "--alert", 1)
    with pytest.raises(SystemExit, match="3"):  # the hospitals have spent half of it
        main(["ledger", "show", str(path), "--alert", "0.5"])
    assert "ALERT hospital 0: epsilon 0.5 of a budget of 1\n" in capsys.readouterr().err


def test_metrics_count_what_the_lists_of_a_report_leave_out(tmp_path, capsys):
    file = tmp_path / "jaxdp.prom"
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("stream", adjacency="zero_out", unit="visit", delta=1e-5)
        requests = [("stream", GaussianDpEvent(1000.0 + place)) for place in range(1001)]
        ledger.spend_all(requests)
        (entry,) = ledger.report()["datasets"]
        assert len(entry["spends"]) == len(entry["open"]) == 1000
    said(capsys, "show", ledger.path, "--metrics", file)
    for gauge in ("spends", "open"):
        assert re.search(rf"^jaxdp_ledger_{gauge}{{.*}} 1001$", file.read_text(), re.MULTILINE)


def test_a_page_shows_the_account_and_whether_the_file_is_whole(path, tmp_path, capsys):
    before, page = path.read_bytes(), tmp_path / "page.html"
    assert "page.html: the page of" in said(
        capsys, "show", path, "--html", page, "--timezone", "Asia/Kolkata"
    )
    assert (
        "<strong>Verified.</strong>" in page.read_text()
        and "Times are in Asia/Kolkata." in page.read_text()
    )
    head = pathlib.Path(f"{path}.head")
    head.rename(tmp_path / "kept")
    said(capsys, "show", path, "--html", page)
    assert (
        "<strong>Head missing.</strong>" in page.read_text() and "Verified." not in page.read_text()
    )
    (tmp_path / "kept").rename(head)
    assert path.read_bytes() == before


def test_the_page_of_a_damaged_ledger_says_so_and_replaces_an_older_one(path, tmp_path, capsys):
    page = tmp_path / "page.html"
    said(capsys, "show", path, "--html", page)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE spends SET label = 'another' WHERE id = 2")
    with pytest.raises(SystemExit, match="2"):
        main(["ledger", "show", str(path), "--html", str(page)])
    assert "spend 2 or an earlier one was changed" in capsys.readouterr().err
    text = page.read_text()
    assert (
        "DAMAGED. Do not rely on this ledger." in text
        and "spend 2 or an earlier one was changed" in text
    )
    assert "Verified." not in text and "<table" not in text  # its numbers would be too small


LEAVE_OUT = " is spent, .* Leave one of them out"
MISTAKES = [
    ("show DIR/missing.sqlite", "is not a file"),
    ("show DIR/missing.sqlite --html DIR/page.html", "is not a file"),
    ("show DIR/text.html --html DIR/page.html", "cannot be opened as a ledger"),
    ("show LEDGER --html LEDGER", "must name a new page that ends in .html"),
    ("show DIR/text.html --html DIR/text.html", "must name a new page"),
    ("show LEDGER --html DIR/none/page.html", "--html must be in a folder that exists"),
    ("show LEDGER --html DIR/folder.html", "cannot be written: Is a directory. Choose"),
    ("show LEDGER --html DIR/page.html --if 'train: Gaussian(1)'", "--html shows what" + LEAVE_OUT),
    (
        "show LEDGER --metrics DIR/file --if 'train: Gaussian(1)'",
        "--metrics shows what" + LEAVE_OUT,
    ),
    ("show LEDGER --html DIR/page.html --json", "not allowed with argument"),
    ("verify DIR/missing.sqlite", "is not a file"),
    ("accept DIR/missing.sqlite", "is not a file"),
    ("show LEDGER --if Gaussian(1)", "--if takes"),
    ("show LEDGER --if 'nobody: Gaussian(1)'", "not registered"),
    ("show LEDGER --if 'train: Gauss(1)'", "cannot be read"),
    ("history LEDGER --dataset nobody", "not registered"),
    ("explain LEDGER nobody", "not registered"),
    ("curve LEDGER nobody", "not registered"),
    ("curve LEDGER train --slack 2", r"slack must be in \[0, 1\), got 2.0"),
    ("group LEDGER nobody", "not registered"),
    ("group LEDGER train --sizes 0", "sizes must be whole numbers from 1"),
    ("explain LEDGER --by day", "invalid choice: 'day'"),
    ("explain LEDGER --delta 2", r"delta must be in \[0, 1\), got 2.0"),
    ("show LEDGER --alert 1.5", r"--alert must be in \(0, 1\]"),
    ("show LEDGER --metrics DIR/no/file", "--metrics must be in a folder that exists"),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES)
def test_mistakes_are_sentences(path, tmp_path, capsys, command, words):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "text.html").write_text("a page")
    places = {"LEDGER": str(path), "DIR": str(tmp_path)}
    arguments = [re.sub("LEDGER|DIR", lambda m: places[m[0]], w) for w in shlex.split(command)]
    with pytest.raises(SystemExit, match="2"):
        main(["ledger", *arguments])
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "missing.sqlite").exists() and not (tmp_path / "page.html").exists()
    assert (tmp_path / "text.html").read_text() == "a page"


# --- Plans and configs --------------------------------------------------------------------------

PLAN = {
    "--records": 1168,
    "--batch-size": 192,
    "--noise-multiplier": 2.01469,
    "--steps": 100,
    "--epsilon": 4.0,
}


def planned(capsys, *arguments, **changes):
    given = {
        **PLAN,
        "--delta": 1e-5,
        **{f"--{name.replace('_', '-')}": value for name, value in changes.items()},
    }
    main(
        [
            "plan",
            *(f"{name}={value}" for name, value in given.items() if value is not None),
            *arguments,
        ]
    )
    return dict(
        re.findall(r"^(\S+(?: \S+)*?)  +(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    )


@pytest.mark.slow
def test_a_plan_finds_what_is_left_out(capsys):
    """The four agree with each other, and with the config of the digits."""
    assert planned(capsys, noise_multiplier=None)["noise multiplier"].startswith("2.014")
    assert planned(capsys, steps=None)["steps"] == "100"
    assert planned(capsys, batch_size=None)["batch size"].startswith(
        "192 expected, sampling probability 0.164384"
    )
    rows = planned(capsys, "--every=25", epsilon=None)
    assert rows["epsilon"].startswith("3.99996") and rows["epsilon"].endswith(
        " at delta 1e-05, add_remove"
    )
    assert rows["delta * records"] == "0.01168"
    assert re.fullmatch(r"25: 1\.99, 50: 2\.795, 75: 3\.\d+, 100: 4", rows["epsilon after steps"])


def test_a_plan_says_what_a_ledger_has_left(path, capsys):
    rows = planned(
        capsys,
        f"--ledger={path}",
        "--dataset=train",
        records=None,
        delta=None,
        steps=10,
        epsilon=None,
    )
    assert rows["examples"] == "50000" and rows["delta * examples"] == "0.5"
    with Ledger(path) as ledger:
        event = SelfComposedDpEvent(
            PoissonSampledDpEvent(192 / 50_000, GaussianDpEvent(2.01469)), 10
        )
        before, after = ledger.epsilon("train"), ledger.would_cost("train", event)
    said = f"epsilon {up(before, 4)} is spent at delta 1e-05, {up(after, 4)} afterwards"
    assert f"{said}, {down(2 - after, 4)} left" in rows["ledger"]
    more = {"records": None, "batch_size": 2000, "noise_multiplier": 0.5, "epsilon": None}
    rows = planned(capsys, f"--ledger={path}", "--dataset=train", **more)
    assert "REFUSES" in rows["ledger"]


@pytest.mark.parametrize(
    ("unit", "units"),
    [
        ("patient", "patients"),
        ("device", "devices"),
        ("hospital", "hospitals"),
        ("example", "examples"),
    ],
)
def test_a_plan_counts_units_by_their_name(tmp_path, capsys, unit, units):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.register("train", adjacency="add_remove", unit=unit, delta=1e-5, records=2000)
    rows = planned(capsys, f"--ledger={path}", records=None, steps=1, epsilon=None)
    assert rows[units] == "2000" and rows[f"delta * {units}"] == "0.02"
    assert "records" not in rows
    # The dry run of a charge that is no training.
    charge = plans.Item("x", "train", GaussianDpEvent(9), {"unit": unit, "delta": 1e-5})
    charge = charge._replace(terms={**charge.terms, "records": 2000})
    plans.show([charge], None)
    assert re.search(rf"delta \* {units} +0.02", capsys.readouterr().out)


EXACTLY_ONE = "exactly one of batch_size, noise_multiplier, steps, epsilon must be left out, got "


@pytest.mark.parametrize(
    ("left_out", "changes", "words"),
    [
        ("", {}, EXACTLY_ONE + "none left out"),
        ("epsilon steps", {}, EXACTLY_ONE + r"\['steps', 'epsilon'\] left out"),
        (
            "epsilon",
            {"batch_size": 5000},
            r"batch_size must be in \(0, 1168\], .* records, got 5000",
        ),
        ("epsilon", {"noise_multiplier": -1}, "noise_multiplier must be > 0 and finite, got -1"),
        ("epsilon records", {}, "--records must be given"),
        ("epsilon", {"every": -1}, "--every must be at least 1, got -1"),
        ("epsilon", {"every": 0}, "--every must be at least 1, got 0"),
        (
            "epsilon",
            {"target": "v5e"},
            "--target=v5e compiles the private steps of a config. Give its --config",
        ),
        (
            "steps",
            {"epsilon": 0.01},
            "epsilon=0.01 must be at least .*, the cost of one step. Use more noise",
        ),
        (
            "batch_size",
            {"steps": 10**6, "noise_multiplier": 0.5},
            "the cost of one record in a batch",
        ),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(capsys, left_out, changes, words):
    with pytest.raises(SystemExit, match="2"):
        planned(capsys, **dict.fromkeys(left_out.split()), **changes)
    assert re.search(words, capsys.readouterr().err)


def test_an_empty_name_is_no_data_set(path, capsys):
    with pytest.raises(SystemExit, match="2"):
        planned(capsys, f"--ledger={path}", "--dataset=", epsilon=None)
    assert re.search(r"--dataset must be one of .*train", capsys.readouterr().err)


def test_a_plan_that_promises_little_warns(capsys):
    with pytest.warns(PrivacyWarning) as caught:
        assert planned(capsys, batch_size=None, noise_multiplier=500)["batch size"].startswith(
            "1168 expected"
        )
        assert planned(capsys, steps=None, noise_multiplier=9e4, batch_size=1)["steps"] == "1000000"
        planned(capsys, epsilon=None, noise_multiplier=0.6, delta=1e-3)
    texts = [str(warning.message) for warning in caught]
    assert [text.split()[0] for text in texts] == ["sampling_probability", "epsilon", "delta"]


def test_configs_are_listed_and_copied(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["configs", "list"])
    listed = capsys.readouterr().out
    assert re.search(
        r"^recalibration/digits +recalibrate +Private recalibration on", listed, flags=re.MULTILINE
    )
    assert "method_options" not in listed  # is a part of configs, not a config
    main(["configs", "copy", "digits_dpsgd"])
    assert (tmp_path / "digits_dpsgd.py").read_text() == (
        ROOT / "configs" / "digits_dpsgd.py"
    ).read_text()
    main(["configs", "copy", "finetune/csv"])  # csv.py would hide Python's own module
    main(["configs", "copy", str(ROOT / "configs" / "split" / "digits.py")])
    names = {"digits_dpsgd.py", "finetune_csv.py", "split_digits.py"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name, words in (
        ("digits_dpsgd", "digits_dpsgd.py exists. Give another file: jaxdp configs copy"),
        ("digits", "--config=digits is neither a file nor one of"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["configs", "copy", name])
        assert words in capsys.readouterr().err


def test_a_config_is_found_by_its_name_and_the_other_arguments_stay():
    path = str(ROOT / "configs" / "digits_dpsgd.py")
    words = ["--workdir", "digits_dpsgd", "--config.data.name=digits_dpsgd"]
    for given, resolved in (
        (["--config", "digits_dpsgd"], ["--config", path]),
        (["-config=digits_dpsgd"], [f"-config={path}"]),
    ):
        assert catalogue.resolve([*given, *words]) == [*resolved, *words]
        assert catalogue.resolve([*words, *given]) == [*words, *resolved]
    assert catalogue.resolve(["--workdir", "here", "--config"]) == ["--workdir", "here", "--config"]


def test_the_parts_of_a_config_name_the_launchers_that_its_docstring_names():
    for config in catalogue.known():
        text = pathlib.Path(catalogue.find(config.name)).read_text()
        commands = re.findall(r"-m launch\.(\w+) --config", text)
        assert config.launchers == tuple(dict.fromkeys(commands)), config.name


def test_what_the_list_of_studies_names_exists():
    known = studies.known()
    assert len({study.name for study in known}) == len(known) == len(studies.STUDIES)
    for listed, study in zip(studies.STUDIES, known, strict=True):
        assert importlib.util.find_spec(f"launch.{listed.launcher}"), study.name
        assert study.report is None or (document.PAGES / study.report.page).exists()
    stages = lifecycle_stages.known()
    assert all((document.PAGES / stage.page).exists() for stage in stages)
    names = [stage.name for stage in stages]
    for number, stage in enumerate(stages):
        assert set(stage.after) <= set(names[:number]), stage.name  # they are run in this order
        assert (stage.charges is None) == (stage.accounts is None), stage.name


LOADED = '"jax" in sys.modules or "scipy" in sys.modules'
HELP = f"""
import contextlib, io, sys
from jaxdp.command import main
for words in ("--help", "configs --help", "finetune --help --config=cifar10_dpsgd"):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(words.split())
    print(said.getvalue())
with contextlib.redirect_stdout(io.StringIO()):
    main(["configs", "list"])
print({LOADED})
"""


@pytest.mark.slow
def test_help_and_lists_import_neither_jax_nor_scipy():
    """The twin: this process has imported both."""
    command = [sys.executable, "-c", HELP]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.endswith("False\n") and eval(LOADED)
    assert "private fine-tuning, and the table of DPAdapter" in said.stdout
    assert "Private fine-tuning" in said.stdout and "--[no]dry_run" in said.stdout
    assert "  dpadapter_table1 " in said.stdout and "Fields of cifar10_dpsgd:" in said.stdout
    assert "recalibration/digits" not in said.stdout


def test_the_help_of_a_plan_has_its_config(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--config CONFIG" in capsys.readouterr().out


def test_the_help_names_every_target():
    assert f"One of {', '.join(compilers.TARGETS)}." in usage._TARGET


def test_a_config_belongs_to_the_study_that_needs_most_of_its_parts(tmp_path):
    def owners(*parts):
        return {study.launcher for study in studies.recognised(dict.fromkeys(parts))}

    assert owners("private") == {"finetune"}
    assert owners("private", "generation") == {"lm"}
    assert owners("server", "client") == {"split_server", "split_client"}
    assert owners("private", "server", "client", "ablation") == {"split"}
    assert owners("method") == set()
    path = tmp_path / "mine.py"
    path.write_text("def get_config():\n    return {'steps': 1}\n")
    with pytest.raises(ValueError, match="has the parts of no study, so its launcher is not known"):
        catalogue.launcher(str(path))


def test_the_version_is_said(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"jaxdp {jaxdp.__version__}\n"


@pytest.mark.slow
def test_the_command_is_installed(path):
    command = pathlib.Path(sys.executable).with_name("jaxdp")
    start = [str(command)] if command.exists() else [sys.executable, "-m", "jaxdp.command"]
    done = subprocess.run(
        [*start, "ledger", "verify", str(path)], capture_output=True, text=True, check=True
    )
    assert "4 spend(s)" in done.stdout


# Each command is a fork that ends as Python does, so that one process imports for all of them.
READERS = """
import json, os, runpy, sys
import launch.catalogue, launch.studies, launch.usage

for module, *arguments in json.loads(sys.argv[1]):
    unread, printed = os.pipe()
    os.close(unread)
    read, said = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        os.dup2(printed, 1)
        os.dup2(said, 2)
        os.close(said)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()
    os.close(printed)
    os.close(said)
    with open(read) as errors:
        text = errors.read()
    _, status = os.waitpid(pid, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), text]), flush=True)
"""


@pytest.mark.slow
def test_a_reader_that_stops_reading_is_no_error():
    """As in `jaxdp --help | head -1`. A shell reports 141 of a program that ends so."""
    commands = [
        ["jaxdp.command", "--version"],
        ["jaxdp.command", "finetune", "--help"],
        ["jaxdp.command", "audit", "--help"],
        ["launch.command", "configs", "list"],
    ]
    command = [*PYTHON, "-c", READERS, json.dumps(commands)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[141, ""]] * len(commands)
