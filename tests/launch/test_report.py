"""The report of a single run: its numbers are the ledger's, it hides nothing, and every value of a
file is text."""

import hashlib
import html
import json
import re

import pytest

from jaxdp.files import write_json
from jaxdp.privacy import GaussianDpEvent, Ledger, unproven
from jaxdp.report import guess_rate, intervals, round_down, verdicts
from launch import document, report, studies
from tests.launch.forgery import forgeries
from tests.report.pages import Page, texts

FORGED = """"'><script>alert(1)</script>"""
CURVE = [[2, 0.5], [4, 0.75]]
SOURCE = {"name": "digits", "fingerprint": "abc", "examples": 40}
# The results of a run of each study.
RESULTS = {
    "finetune": {
        **{
            "before": 0.633,
            "after": 0.648,
            "gained": 15,
            "lost": 10,
            "tested": 327,
            "steps": 4,
            "method": "dp_sgd",
        },
        **{
            "epsilon": 3.4,
            "delta": 1e-5,
            "noise_multiplier": 1.5,
            "dataset": "digits",
            "no privacy": 0.98765,
        },
        "curves": {"accuracy": CURVE, "epsilon": CURVE},
    },
    "predict": {
        **{
            "dataset": "digits",
            "queries": 30,
            "tested": 40,
            "epsilon": 2.5,
            "delta": 1e-5,
            "epsilon_per_query": 0.1,
        },
        **{"released": {"per_query": 0.5, "student": 0.75}, "rows": [{"expected": 0.98765}]},
    },
    "pretrain": {"accuracy": 0.5, "method": "sam", "provenance": {"train": SOURCE, "test": SOURCE}},
    "split client": {"mode": "private", "bytes": 96, "queries": 0, "accuracy": 0.98765},
    "split server": {"mode": "private", "bytes": 96, "queries": 0},
    "adapt": {},
}


def workdir(root, study):
    """Makes the workdir of a finished run with two accounts."""
    config = {"public_benchmark": study == "adapt", "references": True}
    versions = {"jaxdp": "1", "jax": "2"}
    write_json(
        root / "config.json", {"study": study, "format": 2, "versions": versions, "config": config}
    )
    write_json(root / "result.json", RESULTS[study])
    if study == "adapt":
        write_json(
            root / "tables.json",
            {"Accuracy": [{"method": "Tent", "clean": 0.123456}], "Note": "A paragraph."},
        )
    (root / "params.safetensors").write_bytes(b"a model")
    with Ledger(root / "ledger.sqlite") as ledger:
        terms = {
            "adjacency": "add_remove",
            "unit": "scan",
            "epsilon": 4.0,
            "delta": 1e-5,
            "records": 1234,
        }
        ledger.register("digits", **terms)
        ledger.register(
            "queries",
            **terms | {"allow_unproven": True, "records": None, "adjacency": "replace_one"},
        )
        with ledger.spend("digits", GaussianDpEvent(1.7), label="training"):
            pass
        with ledger.spend("queries", unproven("noise"), label="asking"):
            pass
    return root


def differences(page, ledger):
    """Returns where the first screen of a page and the JSON of a ledger disagree, or where it
    understates a risk."""
    with Ledger(ledger, read_only=True) as opened:
        entries = json.loads(json.dumps(opened.report()))["datasets"]
    rows = texts(Page(page.read_bytes()).titled("What was protected"))
    shown, found = {row["data set"]: row for row in rows}, []
    text = html.unescape(re.sub("<[^>]*>", "", page.read_text()))
    for entry in entries:
        if (row := shown.pop(entry["name"], None)) is None:
            found.append(f"{entry['name']} is missing")
            continue
        proven = "inf" not in entry["headline"]
        epsilon = entry["proven_epsilon"] if proven else float("inf")
        said = float(row["epsilon"].replace("infinite / empirical only", "inf"))
        most = 1.01 * epsilon
        if not epsilon <= said <= most:
            found.append(f"epsilon of {entry['name']} is {epsilon}, not {said}")
        if proven and not entry["remaining"] * 0.99 <= float(row["left"]) <= entry["remaining"]:
            found.append(f"{entry['remaining']} is left of {entry['name']}, not {row['left']}")
        if not entry["delta"] <= float(row["delta"]) or float(row["budget"]) != entry["budget"]:
            found.append(f"the terms of {entry['name']}")
        records = entry["records"]
        if row["scans"] != ("unknown" if records is None else str(records)):
            found.append(f"the records of {entry['name']}")
        if records is not None and not records * entry["delta"] <= float(row["delta × scans"]):
            found.append(f"delta times the records of {entry['name']}")
        (rate,) = re.findall(
            rf"{entry['name']}\..*?right in up to ([\d.]+) %", text, flags=re.DOTALL
        ) or ["100"]
        if float(rate) < 100 * guess_rate(epsilon, entry["delta"]):
            found.append(f"the rate of right guesses about {entry['name']}")
    return found + [f"{name} is not in the ledger" for name in shown]


def test_the_numbers_are_those_of_the_ledger(tmp_path):
    root = workdir(tmp_path, "finetune")
    page = report.write(root)
    assert differences(page, root / "ledger.sqlite") == []
    # The copy that the page was made from says the same without the ledger.
    text = page.read_bytes()
    (root / "ledger.sqlite").rename(root / "away.sqlite")
    (root / "ledger.sqlite.head").rename(root / "away.sqlite.head")
    (root / ".ledger.sqlite.anchor").rename(root / ".away.sqlite.anchor")
    assert report.write(root).read_bytes() == text


def test_the_page_of_a_launcher_is_verified(tmp_path):
    root = workdir(tmp_path, "finetune")
    page = report.write(root)
    with Ledger(root / "ledger.sqlite") as ledger, ledger.spend("digits", GaussianDpEvent(9.0)):
        pass
    answer = report.verify(page)
    assert answer.is_true and "1 spend(s) have come since" in answer.text
    (root / "params.safetensors").write_bytes(b"another model")
    answer = report.verify(page)
    assert not answer.is_true and "below 'Released files'" in answer.text


def test_the_page_says_whose_noise_was_exact(tmp_path):
    """By the field of each study. Recalibration has none, because its noise always is."""
    exact = "The noise of {} is exact. Sums and noise are integers"
    rounded = "The noise of {} is rounded: it is added in floating point"
    training = "private training in this run"
    root = workdir(tmp_path, "finetune")
    bound = json.loads((root / "config.json").read_text())
    bound["config"]["private"] = {"exact": False}
    write_json(root / "config.json", bound)
    assert rounded.format(training) in report.write(root).read_text()
    sentences = studies.named("finetune").report.noise
    (told,) = sentences({"private": {"exact": True}})
    assert told.startswith(exact.format(training))
    assert len(sentences({"private": {"exact": True, "scaler_noise_multiplier": 2.0}})) == 2
    assert sentences({}) == []
    for name, releases in (("adapt", "private adaptation"), ("recalibrate", "recalibration")):
        sentences = studies.named(name).report.noise
        (told,) = sentences({"privacy": {"exact": True}})
        assert told.startswith(exact.format(releases))
    (told,) = studies.named("adapt").report.noise({})
    assert told.startswith(rounded.format("private adaptation"))


def test_a_twin_that_rounds_down_is_caught(tmp_path, monkeypatch):
    root = workdir(tmp_path, "finetune")
    monkeypatch.setattr(verdicts, "round_up", round_down)
    found = differences(report.write(root), root / "ledger.sqlite")
    assert (
        any(words.startswith("epsilon of digits") for words in found)
        and "delta times the records of digits" in found
    )


def test_a_twin_that_drops_an_account_is_caught(tmp_path, monkeypatch):
    root = workdir(tmp_path, "finetune")
    groups = document.Books.groups.fget
    monkeypatch.setattr(document.Books, "groups", property(lambda books: groups(books)[1:]))
    assert differences(report.write(root), root / "ledger.sqlite") == ["digits is missing"]


def test_the_first_screen_answers_the_first_questions(tmp_path):
    text = report.write(workdir(tmp_path, "finetune")).read_text()
    first, _, _ = text.partition("<h2>What was bought</h2>")
    plain = " ".join(html.unescape(re.sub("<[^>]*>", " ", first)).split())
    assert "digits. Weak protection : a coin toss over whether a certain scan was in it" in plain
    assert "queries. No guarantee : a release about it has no proof of privacy." in plain
    assert "jaxdp 1, jax 2" in plain and " UTC" in plain and "Last spend of the ledger: 2" in plain
    assert "From whom:" in plain and "Not protected" in plain and "Signature" in plain
    digest = hashlib.sha256(b"a model").hexdigest()
    assert f"fine-tuned model params.safetensors {digest}" in plain


@pytest.mark.parametrize("study", RESULTS)
def test_nothing_is_shown_that_is_not_accounted(tmp_path, study):
    text = report.write(workdir(tmp_path, study)).read_text()
    assert "0.98765" not in text and "98.8" not in text and "98.7" not in text
    if study in ("finetune", "predict"):
        assert "The run also made references" in text
    assert ("public benchmark" in text) == (study == "adapt")


def test_a_change_inside_the_noise_is_called_so(tmp_path):
    text = report.write(workdir(tmp_path, "finetune")).read_text()
    assert (
        "63.3 % (57.9 to 68.3) before and 64.8 % (59.5 to 69.8) after, on 327 test scans." in text
    )
    assert (
        "This change is inside the noise: 15 answers became right and 10 became wrong"
        in html.unescape(text)
    )
    assert intervals.mcnemar(24, 5) < 0.001 and intervals.mcnemar(0, 0) == 1.0
    low, high = intervals.wilson(0.5, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert intervals.wilson(0.0, 10)[0] == pytest.approx(0.0) and intervals.wilson(1.0, 10)[
        1
    ] == pytest.approx(1.0)


def test_tables_and_charts_have_their_numbers(tmp_path):
    page = Page(report.write(workdir(tmp_path, "adapt")).read_bytes())
    assert texts(page.tables["Accuracy"]) == [{"method": "Tent", "clean": "0.1235"}]
    (tmp_path / "tuned").mkdir()
    page = Page(report.write(workdir(tmp_path / "tuned", "finetune")).read_bytes())
    (rows,) = (texts(rows) for name, rows in page.tables.items() if "Test accuracy" in name)
    assert rows[0] == {"step": "0", "accuracy": "63.3 %"} and rows[-1] == {
        "step": "4",
        "accuracy": "75 %",
    }


@pytest.mark.parametrize(
    "study",
    [
        "finetune",
        *(pytest.param(name, marks=pytest.mark.slow) for name in RESULTS if name != "finetune"),
    ],
)
def test_nothing_that_is_forged_becomes_markup(tmp_path, study):
    """Forges all texts of every file at once, and then each value alone. A number must stay a
    number."""
    root = workdir(tmp_path, study)
    report.write(root)  # writes ledger.json
    for name in ("ledger.sqlite", "ledger.sqlite.head"):
        (root / name).unlink()
    shown = refused = 0
    for path in sorted(root.glob("*.json")):
        for where, value in forgeries(path, FORGED):
            try:
                page = report.write(root).read_text()
            except ValueError as error:
                refused += 1
                assert str(root) in str(error) and "Restore it from a copy" in str(error)
            else:
                shown += not isinstance(value, int | float)
                assert "<script" not in page and "'><" not in page, (path, where)
    assert shown > 10 and refused > 10


def test_names_of_files_and_headings_are_text_too(tmp_path):
    root = workdir(tmp_path, "adapt")
    write_json(root / "tables.json", {FORGED: [{FORGED: FORGED}]})
    page = report.write(root).read_text()
    assert "<script" not in page and page.count("&lt;script") >= 3


def test_a_workdir_without_a_finished_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist\. Give the workdir"):
        report.write(tmp_path)
    workdir(tmp_path, "finetune")
    (tmp_path / "result.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"result\.json does not exist"):
        report.write(tmp_path)
    write_json(tmp_path / "result.json", RESULTS["finetune"] | {"tested": 0})
    with pytest.raises(ValueError, match="is damaged: ZeroDivisionError"):
        report.write(tmp_path)
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json is damaged"):
        report.write(tmp_path)
