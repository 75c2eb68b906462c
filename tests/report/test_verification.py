"""Whether a page is the one of its ledger and workdir: a changed digit anywhere is caught."""

import pathlib
import re
import shutil
import subprocess

import pytest

import jaxdp
from jaxdp.files import read_json, write_json
from jaxdp.privacy import GaussianDpEvent, Ledger, reports
from jaxdp.report import MetricsWriter, books, document, runs, signatures, verification
from launch import report

TERMS = {"adjacency": "add_remove", "unit": "patient", "epsilon": 3.0, "delta": 1e-4}
DIGIT = re.compile(r"\d")
ORIGIN = re.compile('<meta name="jaxdp-report" content="(.*)">')


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A workdir of `fit` with one unfinished payment and a ledger beside it."""
    root = tmp_path_factory.mktemp("once")
    with Ledger(root / "ledger.sqlite", run="mine") as ledger:
        ledger.register("patients", **TERMS, owner="Cardiology")
        ledger.register("others", **TERMS)
        with ledger.spend("patients", GaussianDpEvent(4.0), label="training"):
            pass
        ledger.spend("patients", GaussianDpEvent(40.0), label="training")
        epsilon = ledger.epsilon("patients")
    run = root / "run"
    notes = {"kind": "fit", "ledger": "../ledger.sqlite", "dataset": "patients", "runs": ["mine"]}
    write_json(run / "run.json", notes | {"settings": {"clip": 1.0}, "versions": {"jaxdp": "1"}})
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.write(10, epsilon=epsilon)
    jaxdp.report.write(run, metrics={"accuracy": (0.96, 114)}, facts={"model": "MLP"})
    return root


@pytest.fixture
def root(once, tmp_path):
    return shutil.copytree(once, tmp_path / "here")


def page_of(root):
    return root / "run" / "report.html"


def test_a_page_is_the_one_of_its_ledger(root):
    before = {path: path.read_bytes() for path in root.rglob("*.json*")}
    answer = report.verify(page_of(root))
    assert answer.is_true and answer.text.endswith("its ledger and workdir make.")
    assert {path: path.read_bytes() for path in root.rglob("*.json*")} == before
    # A page that was sent elsewhere, and a ledger that moved with its head.
    sent = root.parent / "sent.html"
    shutil.copy(page_of(root), sent)
    with pytest.raises(ValueError, match=r"cannot tell: .* is not in the workdir of a run"):
        report.verify(sent)
    away = root / "away"
    away.mkdir()
    for path in (*root.glob("ledger.sqlite*"), *root.glob(".ledger.sqlite*")):
        path.rename(away / path.name)
    assert report.verify(sent, root / "run", ledger=away / "ledger.sqlite").is_true
    with pytest.raises(ValueError, match=r"cannot tell: the ledger .* does not exist\. Name it"):
        report.verify(sent, root / "run")
    # The page of a run is not that of its ledger alone.
    alone = report.verify(sent, ledger=away / "ledger.sqlite")
    assert not alone.is_true and alone.text.endswith("--verify PAGE --ledger LEDGER.")


def test_a_page_stays_true_when_more_is_spent(root):
    with Ledger(root / "ledger.sqlite", run="other") as ledger:
        with ledger.spend("patients", GaussianDpEvent(5.0)):
            pass
        ledger.spend("others", GaussianDpEvent(5.0))
        ledger.register("later", **TERMS)
        ledger.describe("patients", owner="Oncology")
    answer = report.verify(page_of(root))
    assert answer.is_true, answer.text
    assert "2 spend(s) have come since" in answer.text and "Write the report again" in answer.text
    text = page_of(root).read_text()
    page_of(root).write_text(text.replace("Cardiology", "Oncology"))
    answer = report.verify(page_of(root))
    assert not answer.is_true and "Oncology" in answer.text and "Who answers for" in answer.text


def test_a_page_without_who_when_and_where_is_verified(root):
    """The twin of a public page names who spent."""
    whole = jaxdp.report.write(root / "run").read_text()
    page = jaxdp.report.write(root / "run", public=True)
    text = page.read_text()
    assert "Run by" in whole and "Run by" not in text
    assert report.verify(page).is_true
    (origin,), (other,) = ORIGIN.findall(whole), ORIGIN.findall(text)
    page.write_text(whole.replace(origin, other))
    assert not report.verify(page).is_true


def changed_digits(text):
    """Yields the page with one digit changed, for one digit of each line that has some."""
    for line in text.split("\n"):
        if match := DIGIT.search(line):
            other = str((int(match[0]) + 1) % 10)
            twin = line[: match.start()] + other + line[match.end() :]
            yield line, text.replace(line, twin, 1)


@pytest.mark.slow
def test_a_changed_digit_is_caught(root):
    page = page_of(root)
    text = page.read_text()
    (origin,) = ORIGIN.findall(text)
    twins = list(changed_digits(text))
    assert len(twins) > 30
    # Every seventh digit of what the page says about its ledger, also in links and digests.
    for match in list(DIGIT.finditer(origin))[::7]:
        other = str((int(match[0]) + 1) % 10)
        twin = origin[: match.start()] + other + origin[match.end() :]
        twins.append((match.start(), text.replace(origin, twin)))
    for where, twin in twins:
        page.write_text(twin)
        assert not report.verify(page).is_true, where
    page.write_text(text)
    assert report.verify(page).is_true


def test_a_difference_is_named_with_its_section(root):
    text = page_of(root).read_text()
    assert "<td>0.96" not in text and "114 cases" in text
    page_of(root).write_text(text.replace("114 cases", "115 cases"))
    answer = report.verify(page_of(root))
    assert not answer.is_true
    assert "below 'Results, as the writer of this page gave them" in answer.text
    assert "115 cases" in answer.text and "114 cases" in answer.text
    # The twin that changes what the workdir keeps instead is another page.
    page_of(root).write_text(text)
    said = root / "run" / "report.json"
    write_json(said, read_json(said, remedy="") | {"told": [["model", "CNN"]]})
    assert "CNN" not in text and "CNN" in report.verify(page_of(root)).text
    said.write_text('{"measured": 3, "told": []}')
    with pytest.raises(ValueError, match=r"report\.json is damaged: .* give metrics and facts"):
        report.verify(page_of(root))
    said.unlink()
    # The command writes the page with the metrics that were kept, unless none are asked for.
    jaxdp.report.write(root / "run", metrics={"accuracy": (0.96, 114)}, facts={"model": "MLP"})
    content = page_of(root).read_bytes()
    report.main(["report", str(root / "run")])
    assert b"114 cases" in content and page_of(root).read_bytes() == content
    jaxdp.report.write(root / "run", metrics={}, facts={})
    assert "114 cases" not in page_of(root).read_text() and report.verify(page_of(root)).is_true


def test_another_ledger_is_named(root):
    other = root / "other.sqlite"
    with Ledger(other) as ledger:
        ledger.register("patients", **TERMS)
    answer = report.verify(page_of(root), ledger=other)
    assert not answer.is_true and "has the identity" in answer.text
    # An older copy of the ledger lacks the head.
    with Ledger(root / "ledger.sqlite") as ledger:
        ledger.backup(root / "older.sqlite")
        ledger.spend("patients", GaussianDpEvent(5.0))
    jaxdp.report.write(root / "run")
    answer = report.verify(page_of(root), ledger=root / "older.sqlite")
    assert not answer.is_true and "older copy of the ledger" in answer.text


def test_a_ledger_alone_has_a_page_too(root):
    page = jaxdp.report.write(root / "ledger.sqlite", root / "page.html", facts={"by": "me"})
    assert report.verify(page, ledger=root / "ledger.sqlite").is_true
    # A payment that was unfinished may commit later. A committed one stays so.
    with Ledger(root / "ledger.sqlite") as ledger, ledger.spend("others", GaussianDpEvent(9.0)):
        page = jaxdp.report.write(root / "ledger.sqlite", root / "page.html")
    answer = report.verify(page, root / "ledger.sqlite")
    assert answer.is_true and "1 payment(s) committed" in answer.text


def test_a_page_that_hides_an_account_is_caught(root, monkeypatch):
    """The page agrees with itself, as a program of its writer could make it."""
    ledger = root / "ledger.sqlite"
    with Ledger(ledger) as opened:
        opened.spend("others", GaussianDpEvent(5.0))
    accounts = books._chosen
    with monkeypatch.context() as patched:
        patched.setattr(books, "_chosen", lambda *options: list(accounts(*options))[1:])
        page = jaxdp.report.write(ledger, root / "page.html")
    assert "others" not in page.read_text()
    answer = report.verify(page, ledger)
    assert not answer.is_true and "others" in answer.text


def test_records_may_be_declared_later(root):
    with Ledger(root / "ledger.sqlite") as ledger:
        ledger.register("patients", **TERMS, records=455)
    assert report.verify(page_of(root)).is_true
    page = jaxdp.report.write(root / "run")
    assert report.verify(page).is_true and "455" in page.read_text()


def test_a_page_without_a_head_cannot_be_told(root):
    text = page_of(root).read_text()
    page_of(root).write_text(text.replace("jaxdp-report", "other"))
    with pytest.raises(
        ValueError, match=r"names no head of a ledger.*ledger show --html`, which is not"
    ):
        report.verify(page_of(root))


# --- The command and signatures -----------------------------------------------------------------


def test_the_command_has_exit_statuses(root, capsys):
    page = page_of(root)
    report.main(["report", "--verify", str(page)])
    page.write_text(page.read_text().replace("114 cases", "115 cases"))
    with pytest.raises(SystemExit, match=r"^1$"):
        report.main(["report", "--verify", str(page)])
    assert "is NOT the page" in capsys.readouterr().out
    for arguments, words in (
        ([], "give the workdir"),
        (["run", "--identity", "me"], "belong to --verify"),
        (["--verify", "page", "--sign", "key"], "Leave out"),
        (["--verify", "page", "--identity", "me"], "must be given together"),
    ):
        with pytest.raises(ValueError, match=words):
            report.main(["report", *arguments])


def test_a_signature_is_of_one_page_and_one_signer(root, capsys):
    tool = shutil.which("ssh-keygen")
    if tool is None:
        pytest.skip("ssh-keygen is not installed")
    key = root / "key"
    subprocess.run([tool, "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers = root / "signers"
    signers.write_text(f"dpo@clinic {pathlib.Path(f'{key}.pub').read_text()}")
    report.main(["report", str(root / "run"), "--sign", str(key)])
    page = page_of(root)
    check = ["report", "--verify", str(page), "--signers", str(signers), "--identity"]
    report.main([*check, "dpo@clinic"])
    assert 'Good "jaxdp-report" signature for dpo@clinic' in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^1$"):
        report.main([*check, "another@clinic"])
    page.write_text(page.read_text() + "\n")
    is_signed, words = signatures.verify(page, signers, "dpo@clinic")
    assert not is_signed and "is NOT a signature of dpo@clinic" in words


def test_what_a_signature_needs_is_named(root, monkeypatch):
    page = page_of(root)
    with pytest.raises(FileNotFoundError, match=r"--sign .*nokey is not a file\. Give a key"):
        signatures.sign(page, root / "nokey")
    with pytest.raises(FileNotFoundError, match=r"\.sig is not a file\. Sign with `jaxdp report"):
        signatures.verify(page, page, "me")
    if shutil.which("ssh-keygen"):
        with pytest.raises(ValueError, match=r"did not sign .* Give a private SSH key"):
            signatures.sign(page, page)
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(FileNotFoundError, match=r"ssh-keygen is not installed\. Install"):
        signatures.sign(page, page)


def test_lists_that_end_say_that_there_are_more(monkeypatch, tmp_path):
    """The limit is 1000 spends, and 22 here."""
    monkeypatch.setattr(reports, "_OPEN_SPENDS", reports._OPEN_SPENDS.replace("1000", "22"))
    monkeypatch.setattr(document, "LISTED", 22)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.register("patients", **TERMS | {"epsilon": 50.0})
        for _ in range(25):
            ledger.spend("patients", GaussianDpEvent(40.0))
        [entry] = ledger.report()["datasets"]
        assert len(entry["open"]) == 22 and entry["unfinished"] == 25
        assert "... 5 more not committed" in ledger.report_text()
    page = jaxdp.report.write(path, output=tmp_path / "page.html")
    assert "22 or more payment(s) for releases that did not finish" in page.read_text()
    assert report.verify(page, path).is_true


def test_a_page_of_some_accounts_has_the_unfinished_payments_of_these_only(root):
    """Others of the same ledger may be paying while the page of a release is written."""
    ledger = root / "ledger.sqlite"
    with Ledger(ledger, run="other") as opened:
        opened.spend("others", GaussianDpEvent(9.0))
    both = books.Books.read(root, {"": ledger}, remedy="")
    for name in ("patients", "others"):
        page = root / f"{name}.html"
        runs.write_page(page, ledger, both.only([name]).anonymous(), {}, {})

        def rewrite(output, past, name=name):
            runs.rewrite(ledger, output, past, {}, [name])

        answer = verification.verify(page, rewrite, ledger=ledger)
        assert answer.is_true, answer.text
