"""The report of a run of `fit` that no launcher made, of a ledger alone, and words by unit."""

import html
import json
import re

import pytest

import jaxdp
from jaxdp.files.text import up
from jaxdp.privacy import GaussianDpEvent, Ledger, unit_words
from jaxdp.report import MetricsWriter, intervals, runs

TERMS = {"adjacency": "add_remove", "epsilon": 3.0, "delta": 1e-4, "records": 455}
PEOPLE = {"owner": "Cardiology", "contact": "data@clinic", "approver": "Ethics board 7"}


def workdir(root, unit="patient"):
    """Makes what `fit` leaves: a ledger beside the workdir, its notes and metrics."""
    with Ledger(root / "ledger.sqlite", run="mine") as ledger:
        ledger.register("patients", unit=unit, **TERMS, **PEOPLE)
        with ledger.spend("patients", GaussianDpEvent(4.0), label="training, steps 0..9"):
            pass
        epsilon = ledger.epsilon("patients")
    run = root / "run"
    with_settings = {"method": "DP-SGD", "clip norm": 1.0, "noise multiplier": 4.0}
    jaxdp.files.write_json(
        run / "run.json",
        {
            **{"kind": "fit", "ledger": "../ledger.sqlite", "dataset": "patients"},
            **{"runs": ["mine"], "settings": with_settings, "versions": {"jaxdp": "1"}},
        },
    )
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.write(9, loss=0.2468)
        metrics.write(10, epsilon=epsilon, accuracy=0.9375)
    return run, epsilon


def plain(page):
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page.read_text())).split())


@pytest.mark.parametrize("pair", [(96.0, 114), (-0.1, 114), (0.96, 0)])
def test_a_measured_share_is_a_share_of_some_cases(pair):
    with pytest.raises(ValueError, match=r"a measured share must be in \[0, 1\] and of at least"):
        runs.statements({"test accuracy": pair})


def test_a_run_of_fit_has_a_report(tmp_path):
    run, epsilon = workdir(tmp_path)
    page = jaxdp.report.write(run, metrics={"test accuracy": (0.96, 114)}, facts={"Model": "MLP"})
    assert page == run / "report.html"
    text = plain(page)
    assert "patients. Strong protection : a coin toss over whether a certain patient was" in text
    assert f"{intervals.interval(0.96, 114)}, 114 cases" in text and "MLP" in text
    assert "DP-SGD" in text and "0.9375" in text and up(epsilon) in text
    assert "seconds" not in text and "0.2468" not in text  # a step that is no checkpoint
    for word in PEOPLE.values():
        assert word in text
    assert "No other run spent from the same data" in text
    # The copy that the page was made from says the same without the ledger.
    again = jaxdp.report.write(run)
    content = again.read_bytes()
    for path in tmp_path.glob("*ledger.sqlite*"):
        path.unlink()
    (tmp_path / ".ledger.sqlite.anchor").unlink(missing_ok=True)
    assert jaxdp.report.write(run).read_bytes() == content
    (run / "ledger.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"ledger of the run, .*ledger\.sqlite, is gone"):
        jaxdp.report.write(run)


def test_another_run_is_counted(tmp_path):
    run, _ = workdir(tmp_path)
    with Ledger(tmp_path / "ledger.sqlite", run="other") as ledger:
        ledger.spend("patients", GaussianDpEvent(9.0))
    assert "1 other run spent from the same data" in plain(jaxdp.report.write(run))


def test_a_ledger_alone_has_a_report(tmp_path):
    workdir(tmp_path)
    page = jaxdp.report.write(tmp_path / "ledger.sqlite", tmp_path / "page.html")
    assert page == tmp_path / "page.html" and "Cardiology" in plain(page)
    assert not (tmp_path / "ledger.json").exists()


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json does not exist\. Give the workdir"):
        jaxdp.report.write(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist\. Give that of a run"):
        jaxdp.report.write(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is of a launcher, whose report `jaxdp report"):
        jaxdp.report.write(tmp_path)
    run, _ = workdir(tmp_path)
    run_json = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(run_json | {"runs": 3}))
    with pytest.raises(ValueError, match=r"run\.json is damaged: .*Restore it from a copy"):
        jaxdp.report.write(run)
    # Public pre-training writes a file of this name, too.
    (run / "run.json").write_text(json.dumps({"gamma": 2.0}))
    with pytest.raises(ValueError, match=r"run\.json is not of jaxdp\.finetune\.fit"):
        jaxdp.report.write(run)


SENTENCES = {
    "patient": "A patient who is in the data under two names. The unit is one patient.",
    "device": "A person with several devices. The unit is one device.",
    "hospital": "A person with records in several hospitals. The unit is one hospital.",
}


@pytest.mark.parametrize("unit", SENTENCES)
def test_sentences_fit_the_unit(tmp_path, unit):
    run, _ = workdir(tmp_path, unit)
    text = plain(runs.write(run))
    assert SENTENCES[unit] in text
    assert f"the number of {unit}s, the settings" in text and "number of records" not in text
    with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        lines = ledger.report_text().splitlines()
    assert any(line.split() == [f"{unit}s", "455", "as", "declared"] for line in lines)
    assert not any(line.startswith("  records") for line in lines)


def test_plurals_are_english():
    many = {
        unit: unit_words(unit).many for unit in ("person", "study", "chest X-ray", "box", "day")
    }
    assert list(many.values()) == ["people", "studies", "chest X-rays", "boxes", "days"]
    rows = {unit: unit_words(unit).rows for unit in ("patient", "device", "hospital", "example")}
    assert rows == {
        "patient": "records of patients",
        "device": "records of devices",
        "hospital": "records of hospitals",
        "example": "examples",
    }
    assert unit_words("image").a == "An image" and unit_words("user").a == "A user"


def test_the_page_says_whether_noise_was_exact(tmp_path):
    run, _ = workdir(tmp_path)
    notes = json.loads((run / "run.json").read_text())
    words = {True: "noise of the releases of this run is exact.", False: "is rounded: it is added"}
    # Notes of earlier versions do not say it.
    assert not any(text in plain(jaxdp.report.write(run)) for text in words.values())
    for exact, text in words.items():
        jaxdp.files.write_json(run / "run.json", notes | {"exact": exact})
        page = plain(jaxdp.report.write(run))
        assert text in page
        assert words[not exact] not in page
