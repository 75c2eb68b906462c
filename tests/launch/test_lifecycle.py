"""The life of a tiny model: which stages run, what is kept and paid, and what happens after a
failure."""

import contextlib
import dataclasses
import hashlib
import html
import importlib.util
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import time

import numpy as np
import pytest
from safetensors import safe_open

import launch.report
from jaxdp import finetune
from jaxdp.models import load_params, load_released
from jaxdp.privacy import BudgetExceeded, Ledger, LedgerDamaged, PrivacyWarning, PureDpEvent
from jaxdp.privacy.events import composition, from_json
from jaxdp.release import Release, Till, alone, kept_arrays, load_arrays, secrets
from jaxdp.report import document as parts_of_reports
from jaxdp.report import round_down, round_up
from launch import data, frame, models, release
from launch.frame import running
from launch.lifecycle import Interrupted, cache, document, life, parts, references, stages
from launch.lifecycle.__main__ import experiment
from launch.lifecycle.recalibrate import restored
from tests import forked
from tests.launch import golden, patients, program, tiny

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]

STAGES = stages.known()
NAMES = [stage.name for stage in STAGES]
PAID = ("digits/private", "hospital 0", "hospital 1", "stream", "clinic")
CURVES = 4  # accounts with a trade-off curve in the report
CHARTS = 5 + CURVES


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("lifecycle") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # The noise differs between commits. An audit at this confidence gives a false alarm less
        # often than five standard deviations are exceeded.
        for name in ("adapt", "finetune", "predict", "recalibrate", "split"):
            patch.setattr(f"launch.lifecycle.{name}.CONFIDENCE", 1 - 1e-7)
        return root, life.run(tiny.lifecycle(), root)


def test_what_no_noise_is_in_is_what_it_was(finished):
    root, states = finished
    folders = {name: root / states[name]["folder"] for name in ("pretrain", "finetune")}
    found = {
        name: json.loads((folder / "row.json").read_text())["result"]
        for name, folder in folders.items()
    }
    assert golden.differences("lifecycle", found) == []


def test_the_model_in_use_is_released_with_its_confidence_and_the_accounts_behind_it(
    finished, tmp_path
):
    root, states = finished
    folder = release.write(root, tmp_path / "release")
    served = load_released(folder)
    names = [row["name"] for row in served.card["guarantees"]]
    assert sorted(names) == ["digits/private", "hospital 0", "hospital 1", "stream"]
    assert "clinic" not in (folder / "report.html").read_text()
    assert launch.report.verify(folder / "report.html", root).is_true
    saved = load_params(root / states["deploy"]["folder"] / "deployed.safetensors")
    test = parts.load(tiny.lifecycle().data).test
    images = test.gather(np.arange(len(test)))["image"]
    network = models.network(tiny.lifecycle().model, 10)
    logits = np.asarray(network.apply_fn(saved["params"], images))
    answers = served(images)
    np.testing.assert_array_equal(answers.argmax(axis=1), logits.argmax(axis=1))
    confidence = restored(saved["confidence"]).apply(logits)
    np.testing.assert_allclose(answers.max(axis=1), confidence, atol=1e-6)
    assert ((answers > 0).sum(axis=1) == 1).all()


def test_what_may_be_published_has_no_hash_of_records(finished):
    """The page and the files that it names as released. The name of a stage's folder is a hash of
    its records, and so is the check in a file of the till, whose salt is beside it.
    """
    root, states = finished
    page = html.unescape((root / "report.html").read_text())
    keys = {pathlib.Path(state["folder"]).name for state in states.values()}
    assert len(keys) == len(STAGES) and not [key for key in keys if key in page]
    named = set(re.findall(r"cells/\w+/\*/[\w.]+", page))
    assert named == {f"cells/{stage.name}/*/{name}" for stage in STAGES for name in stage.released}
    for pattern in named:
        (path,) = root.glob(pattern)
        assert hashlib.sha256(path.read_bytes()).hexdigest() in page
        with safe_open(path, framework="numpy") as file:
            assert not {"salt", "check"} & (file.metadata() or {}).keys()
    (kept,) = root.glob("cells/predict/*/released.safetensors")
    (published,) = root.glob("cells/predict/*/answers.safetensors")
    np.testing.assert_array_equal(load_params(published)["answers"], load_arrays(kept)["answers"])


@pytest.fixture
def copied(finished, tmp_path):
    """Copies the finished workdir, so that a test can damage it."""
    return pathlib.Path(shutil.copytree(finished[0], tmp_path / "run"))


@pytest.fixture
def ran(monkeypatch):
    """Returns the names of the stages that run."""
    names = []

    def watched(stage):
        return dataclasses.replace(
            stage, run=lambda job: (names.append(stage.name), stage.run(job))[1]
        )

    monkeypatch.setattr(life, "stages", lambda: tuple(map(watched, STAGES)))
    return names


def replaced(monkeypatch, name, run):
    wanted = [
        dataclasses.replace(stage, run=run) if stage.name == name else stage for stage in STAGES
    ]
    monkeypatch.setattr(life, "stages", lambda: tuple(wanted))


def spent(root):
    with Ledger(root / "ledger.sqlite") as ledger:
        return {name: ledger.epsilon(name) for name in PAID}


FILES = ("ledger.sqlite", "ledger.sqlite.head", ".ledger.sqlite.anchor")


def lose(root):
    """Deletes the ledger."""
    for name in FILES:
        (root / name).unlink(missing_ok=True)


def unfinished(root):
    with Ledger(root / "ledger.sqlite") as ledger:
        return sum(len(entry["open"]) for entry in ledger.report()["datasets"])


def test_every_stage_is_done_and_pays_what_the_config_says(finished):
    """Compares every event and epsilon with golden_charges.json. The events were written before the
    till existed."""
    root, states = finished
    golden = json.loads((ROOT / "tests" / "release" / "golden_charges.json").read_text())[
        "lifecycle"
    ]
    with Ledger(root / "ledger.sqlite") as ledger:
        assert {name: ledger.epsilon(name) for name in golden} == pytest.approx(
            {name: entry["epsilon"] for name, entry in golden.items()}, rel=1e-6
        )
        for name, entry in golden.items():
            charged, expected = (
                composition(ledger.events(name)[None]),
                composition(from_json(json.dumps(entry["event"]))),
            )
            assert list(charged.values()) == list(expected.values())
            assert [type(leaf) for leaf in charged] == [type(leaf) for leaf in expected]
        assert all(not entry["holds"] for entry in ledger.report()["datasets"])
    assert [state["status"] for state in states.values()] == ["done"] * len(NAMES)
    paid = spent(root)
    assert paid["hospital 0"] == paid["hospital 1"] == 1.0
    assert 3.9 < paid["stream"] <= 4.0
    assert 6 < paid["digits/private"] < 10  # 4 for fine-tuning and 6 for the answers, composed
    assert unfinished(root) == 0
    for state in states.values():
        assert cache.find(root / state["folder"]) is not None
    assert not list(root.rglob("secret_seed"))
    assert (root / states["finetune"]["folder"] / "metrics.jsonl").exists()
    assert (root / states["deploy"]["folder"] / "deployed.safetensors").exists()


def test_no_record_is_in_two_parts():
    config = tiny.lifecycle().data
    cut = data.parts(config, *parts.ROLES)
    rows = np.concatenate([source.rows for source in cut.values()])
    assert len(set(rows.tolist())) == len(rows) == sum(config.parts.values())
    loaded = parts.load(config)
    assert [source.name for source in loaded.sources] == ["hospital 0", "hospital 1"]
    assert [len(source) for source in loaded.sources] == [10, 10]
    for one, other in itertools.combinations([loaded.public, loaded.private, loaded.test], 2):
        assert one.fingerprint != other.fingerprint


def test_a_second_run_does_nothing(copied, ran, capsys):
    before = (
        spent(copied),
        (copied / "report.html").read_bytes(),
        (copied / "result.json").read_bytes(),
    )
    life.run(tiny.lifecycle(), copied)
    assert ran == []
    assert before == (
        spent(copied),
        (copied / "report.html").read_bytes(),
        (copied / "result.json").read_bytes(),
    )
    assert capsys.readouterr().out.count("done before with this config and data") == len(NAMES)


def test_what_is_not_private_is_shown_on_request_in_a_file_of_its_own(copied, ran):
    plain, before, apart = (
        (copied / "report.html").read_text(),
        spent(copied),
        copied / "certificates.html",
    )
    assert (
        plain.count('class="chart"') == CHARTS
        and "certificates.html" not in plain
        and not apart.exists()
    )

    config = tiny.lifecycle(certificates__show=True)
    states = life.run(config, copied)
    assert ran == ["certificates"] and spent(copied) == before
    text = apart.read_text()
    body = re.sub(r"<[^>]*>", "", text.partition("<body>")[2]).strip()
    assert re.match(
        r"This page is NOT private\. .* no ledger paid for it\. "
        "Do not give it to people who may not see",
        body,
    )
    found = cache.find(copied / states["certificates"]["folder"]).result
    assert f"right on {100 * found['without_noise']:.1f} % of the test images" in text
    assert text.count('class="chart"') == 1 and "src=" not in text
    assert "http:" not in text and "https:" not in text

    # The report says only that the file exists and what it is.
    report = (copied / "report.html").read_text()
    said = re.findall("<li>(?:<strong>)?[^<]*certificates.html.*?</li>", report)
    assert len(said) == 2 and not any(re.search("[0-9]", words) for words in said)
    for words in said:
        report = report.replace(f"{words}\n", "")
    show = ("show&#34;: true", "show&#34;: false")
    assert report.replace(*show) == plain.replace(*show)
    assert document.write(copied).name == "report.html" and apart.read_text() == text

    life.run(tiny.lifecycle(), copied)
    assert (
        not apart.exists()
        and (copied / "report.html").read_text() == plain
        and spent(copied) == before
    )


def test_the_terminal_shows_accuracy_before_after_and_without_privacy(finished):
    """Broken twins: references of private records, and a report that shows those of public ones."""
    root, states = finished
    results = {}
    for name in ("finetune", "adapt", "references"):
        results[name] = cache.find(root / states[name]["folder"]).result
    result = json.loads((root / "result.json").read_text())
    tuned, (adapted,) = results["finetune"], results["adapt"]["accuracy"].values()
    reference, (moved,) = results["references"]["finetune"], results["references"]["adapt"].values()
    shown = [
        [f"{share:.1%}" for share in (tuned["before"], tuned["after"], reference)],
        [f"{share:.1%}" for share in (adapted["before"], adapted["after"], moved)],
    ]
    names = ("before", "after", "without privacy")
    assert [[row[name] for name in names] for row in result["accuracy"]] == shown
    text = life.STUDY.summary(result)
    assert all(re.search(" +".join(row), text) for row in shown)
    assert "without privacy" not in (root / "report.html").read_text()
    config = tiny.lifecycle()
    with pytest.raises(ValueError, match=r"--config\.references\.show=False"):
        references.check(config, is_public=False)
    config.references.show = False
    references.check(config, is_public=False)


def test_changed_data_is_noticed(finished):
    root, states = finished
    done = {name: cache.find(root / state["folder"]) for name, state in states.items()}
    configs = (
        tiny.lifecycle(),
        tiny.lifecycle(data__stream_shifts=("contrast",)),
        tiny.lifecycle(data__split_seed=1),
    )
    keys = []
    for config in configs:
        loaded = parts.load(config.data)
        keys.append({stage.name: stage.key(config, loaded, done) for stage in STAGES})
    assert {name for name in NAMES if keys[0][name] != keys[1][name]} == {
        "adapt",
        "deploy",
        "references",
        "audit_adapt",
    }
    assert all(keys[0][name] != keys[2][name] for name in NAMES)
    # A config from before `clip_parts` pays for nothing again.
    earlier = tiny.lifecycle()
    with earlier.unlocked():
        del earlier.finetune.clip_parts
    divided = tiny.lifecycle(finetune__clip_parts="uniform")
    loaded = parts.load(earlier.data)
    tuning = next(stage for stage in STAGES if stage.name == "finetune")
    assert tuning.key(earlier, loaded, done) == keys[0]["finetune"]
    assert tuning.key(divided, loaded, done) != keys[0]["finetune"]


def test_a_changed_stage_fails_and_is_tried_again_with_what_depends_on_it_only(
    copied, ran, monkeypatch, capsys
):
    def fail(job):
        raise RuntimeError("the line to <hospital> 3 is dead")

    before, changed = spent(copied), tiny.lifecycle(recalibrate__epsilon=0.5)
    shutil.rmtree(copied / "cells" / "audit_finetune")
    with monkeypatch.context() as patch:
        replaced(patch, "recalibrate", fail)
        states = life.run(changed, copied)
    skipped = ["deploy", "audit_recalibrate"]
    assert states["recalibrate"]["status"] == "failed"
    assert [name for name in NAMES if states[name]["status"] == "skipped"] == skipped
    assert all(
        states[name]["status"] == "done" for name in NAMES if name not in ("recalibrate", *skipped)
    )
    printed = capsys.readouterr().out
    assert "recalibrate: failed, RuntimeError: the line to <hospital> 3 is dead" in printed
    assert (
        "deploy: skipped, it builds on recalibrate" in printed
        and "audit_finetune: running" in printed
    )
    assert "Not done: recalibrate, deploy, audit_recalibrate." in printed
    report = (copied / "report.html").read_text()
    assert "RuntimeError: error.txt in its folder has the message for the owners" in report
    # it may depend on what hospitals have
    assert "hospital&gt; 3" not in report and "<hospital>" not in report
    (written,) = copied.glob("cells/recalibrate/*/error.txt")
    assert "the line to <hospital> 3 is dead" in written.read_text()
    assert spent(copied) == before

    states = life.run(changed, copied)
    assert {state["status"] for state in states.values()} == {"done"} and not written.exists()
    assert ran == ["recalibrate", *skipped]
    after = spent(copied)
    assert after["hospital 0"] == 1.5 and after["stream"] == before["stream"]
    # what was made with the first config is still there, and paid for
    life.run(tiny.lifecycle(), copied)
    assert len(ran) == 3 and spent(copied) == after


def test_two_lifecycles_share_a_ledger(copied, tmp_path):
    shared = str(copied / "ledger.sqlite")
    second = tmp_path / "second"
    shutil.copytree(copied / "cells" / "pretrain", second / "cells" / "pretrain")
    before = spent(copied)
    with pytest.raises(BudgetExceeded, match="digits/private"):
        life.run(tiny.lifecycle(ledger=shared), second)
    assert spent(copied) == before and not (second / "ledger.sqlite").exists()
    second = pathlib.Path(
        shutil.copytree(copied, tmp_path / "third", ignore=shutil.ignore_patterns("ledger.sqlite*"))
    )
    life.run(tiny.lifecycle(ledger=shared), second)  # of which the shared ledger knows every charge
    assert spent(copied) == before and not (second / "ledger.sqlite").exists()
    assert round_up(before["digits/private"]) in (second / "report.html").read_text()
    with pytest.raises(
        ValueError, match=r"'stream' is already registered with epsilon 8\.0, not 9\.0"
    ):
        life.run(tiny.lifecycle(ledger=shared, budgets__stream__epsilon=9.0), second)
    for name in FILES:
        (copied / name).rename(tmp_path / name)  # the report can still be read, and made
    text = (second / "report.html").read_bytes()
    assert document.write(second).read_bytes() == text
    Ledger(shared).close()
    with pytest.raises(ValueError, match="is not the ledger of this run"):
        document.write(second)


def test_a_set_that_grew_keeps_its_number_and_its_other_terms():
    terms = {"adjacency": "add_remove", "unit": "patient", "epsilon": 1.0, "delta": 1e-5}
    with Ledger.in_memory() as ledger:
        life._register(ledger, "ward", 100, terms)
        life._register(ledger, "ward", 100, terms)  # a resumed run
        with pytest.warns(PrivacyWarning, match="declares 100 patients, and there are 105"):
            life._register(ledger, "ward", 105, terms)
        assert ledger.records("ward") == 100
        with pytest.raises(ValueError, match="already registered with epsilon"):
            life._register(ledger, "ward", 105, terms | {"epsilon": 2.0})


# --- Everything is asked for together -----------------------------------------------------------


def refused(config, root, words):
    with pytest.raises((BudgetExceeded, ValueError), match=words) as error:
        life.run(config, root)
    if (root / "ledger.sqlite").exists():
        with Ledger(root / "ledger.sqlite") as ledger:
            assert all(not ledger.events(name) for name in PAID)
    assert not list(root.glob("cells/*/*/charges.jsonl"))
    return error


def test_a_plan_that_does_not_fit_spends_nothing(tmp_path, finished, ran, monkeypatch):
    root = tmp_path / "run"
    error = refused(
        tiny.lifecycle(budgets__private__epsilon=5.0),
        root,
        "dataset 'digits/private', budget epsilon 5",
    )
    assert 6 < error.value.would_spend < 10  # of fine-tuning and the answers together
    refused(
        tiny.lifecycle(budgets__private__epsilon=5.0, finetune__epsilon=1.0), root, "digits/private"
    )
    assert ran == []
    leave_out_audits(monkeypatch)
    shutil.copytree(finished[0] / "cells" / "pretrain", root / "cells" / "pretrain")
    states = life.run(
        tiny.lifecycle(budgets__private__epsilon=5.0, finetune__epsilon=0.5, predict__epsilon=0.5),
        root,
    )
    assert {state["status"] for state in states.values()} == {"done"} and spent(root)[
        "digits/private"
    ] < 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetune__epsilon": -1.0}, "epsilon"),
        ({"finetune__method": "sgd"}, "method"),
        ({"finetune__batch_size": 10**6}, "config.finetune.batch_size must be at most 60"),
        ({"recalibrate__epsilon": 0.0}, "epsilon"),
        ({"adapt__clip_norm": 0.0}, "clip_norm"),
        ({"adapt__batch_size": 1000}, "batch_size"),
        ({"predict__epsilon": -2.0}, "epsilon"),
        ({"predict__clip": 0.0}, "clip"),
        ({"predict__learning_rate": float("nan")}, "learning_rate"),
        ({"predict__max_distance": -1}, "max_distance"),
    ],
)
def test_a_wrong_config_of_any_stage_spends_nothing_in_any_other(tmp_path, ran, changes, words):
    refused(tiny.lifecycle(**changes), tmp_path / "run", words)
    assert ran == []


def test_after_a_private_stage_has_failed_nothing_more_is_spent(tmp_path, finished, monkeypatch):
    def fail(job):
        raise RuntimeError("no memory left")

    root = tmp_path / "run"
    shutil.copytree(finished[0] / "cells" / "pretrain", root / "cells" / "pretrain")
    with monkeypatch.context() as patch:
        replaced(patch, "finetune", fail)
        states = life.run(tiny.lifecycle(), root)
    assert states["finetune"]["status"] == "failed"
    assert states["predict"] == {
        "status": "skipped",
        "message": "nothing more is spent until finetune can be done",
        "folder": "",
    }
    assert set(spent(root).values()) == {0.0}
    with Ledger(root / "ledger.sqlite") as ledger:
        # the room is given back
        assert all(not entry["holds"] for entry in ledger.report()["datasets"])


def test_a_lifecycle_goes_on_with_a_budget_that_is_all_reserved(tmp_path, finished, monkeypatch):
    """Tests that an interrupted stage needs no room for its paid events. The budget is exactly the
    plan's."""
    exact = {name: epsilon * (1 + 1e-9) for name, epsilon in spent(finished[0]).items()}
    changes = {
        "budgets__private__epsilon": exact["digits/private"],
        "budgets__sources__epsilon": 1.0,
        "budgets__stream__epsilon": exact["stream"],
    }
    root = tmp_path / "run"
    shutil.copytree(finished[0] / "cells" / "pretrain", root / "cells" / "pretrain")

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    leave_out_audits(monkeypatch)
    for place in (
        (finetune.loop._Files, "save"),
        (kept_arrays, "save_arrays"),
        (cache, "described"),
    ):
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(*place, stop)
            life.run(tiny.lifecycle(**changes), root)
    states = life.run(tiny.lifecycle(**changes), root)
    assert {state["status"] for state in states.values()} == {"done"}
    assert spent(root) == pytest.approx(spent(finished[0])) and not list(root.rglob("secret_seed"))


def test_a_lost_ledger_is_told_everything_again(copied, ran):
    before = spent(copied)
    (copied / "ledger.sqlite").unlink()
    # nobody starts from 0 by accident
    with pytest.raises(LedgerDamaged, match="is missing, and"):
        life.run(tiny.lifecycle(), copied)
    (copied / "ledger.sqlite.head").unlink()
    with pytest.raises(LedgerDamaged, match="anchor` shows that it was in use"):
        life.run(tiny.lifecycle(), copied)
    (copied / ".ledger.sqlite.anchor").unlink()
    life.run(tiny.lifecycle(), copied)
    assert ran == [] and spent(copied) == pytest.approx(before)
    lose(copied)
    with pytest.raises(BudgetExceeded, match="hospital 0"):
        life.run(tiny.lifecycle(budgets__sources__epsilon=0.5), copied)


def test_a_spoilt_folder_is_not_taken_for_a_finished_stage(copied):
    (path,) = copied.glob("cells/pretrain/*/backbone.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert cache.find(path.parent) is None
    (figure,) = copied.glob("cells/finetune/*/metrics.jsonl")
    assert cache.find(figure.parent) is not None
    figure.unlink()
    assert cache.find(figure.parent) is None


def test_what_cannot_be_run_says_so_before_anything_is_spent(tmp_path, capsys):
    root = tmp_path / "run"

    def told(words, config):
        with pytest.raises(SystemExit, match="2"):
            frame.tell(experiment, config, str(root))
        error = capsys.readouterr().err
        assert re.search(words, error) and "Traceback" not in error, error

    def refused(config, words):
        told(words, config)
        assert not root.exists()

    config = tiny.lifecycle()
    config.data.parts = {name: "cifar10/test" for name in parts.ROLES}
    # neither the data nor a network: none is asked
    config.data.update({"source": "tfds", "data_dir": str(tmp_path)})
    refused(config, r"data set 'cifar10' is not prepared(.|\n)*tfds build cifar10")
    refused(tiny.lifecycle(data__source="tfds"), r"config\.data\.parts\.public must be a split")
    refused(tiny.lifecycle(data__parts__public=1797), r"add up to at most 1797")
    refused(
        tiny.lifecycle(data__source="cloud"),
        r"config\.data\.source must be 'bundled', 'tfds', .* or 'package.module:function', "
        r"got 'cloud'\.",
    )
    refused(tiny.lifecycle(data__sources=21), r"Every one needs an image")
    with alone(root):
        told("another process is running", tiny.lifecycle())
    ledger = str(tmp_path / "nowhere" / "ledger.sqlite")
    told(r"path .* does not exist. Create the directory first", tiny.lifecycle(ledger=ledger))
    assert not (root / "ledger.sqlite").exists()


def test_a_workdir_of_an_earlier_release_is_refused(tmp_path):
    (tmp_path / "lifecycle.json").write_text('{"version": "0.1.0", "config": {}, "stages": {}}')
    with pytest.raises(ValueError, match="made by another release of jaxdp"):
        life.run(tiny.lifecycle(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lifecycle.json"]


def test_a_workdir_of_an_earlier_release_that_was_killed_early_is_refused(tmp_path):
    """Its paid stages would not be found, and would pay once more."""
    notes = tmp_path / "finetune" / "0123456789abcdef" / "charges.jsonl"
    notes.parent.mkdir(parents=True)
    notes.write_text('{"token": "x", "charges": []}\n')
    with pytest.raises(ValueError, match="made by another release of jaxdp"):
        life.run(tiny.lifecycle(), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [notes]


# --- Ctrl-C, kill -9, full disks, and two at once -----------------------------------------------


def command(workdir, **changes):
    """Returns the command of the launcher."""
    fields = {
        **tiny.LIFECYCLE,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return program.command("lifecycle", "configs/lifecycle_digits.py", workdir, fields)


def wait_for(path, process):
    deadline = time.monotonic() + 300
    while (
        not (path() and path()[0].stat().st_size)
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)


def first_stages(monkeypatch, number):
    monkeypatch.setattr(life, "stages", lambda: STAGES[:number])


def leave_out_audits(monkeypatch):
    """Leaves out the audits, which read no private data and pay nothing."""
    monkeypatch.setattr(
        life,
        "stages",
        lambda: tuple(stage for stage in STAGES if not stage.is_audit),
    )


def pays(job):
    """Replaces `deploy` by a release about a hospital."""
    charges = [(job.account("hospital 0"), PureDpEvent(1.0))]
    what = Release(
        label="test", charges=charges, facts=lambda: [], compute=lambda secret: {"x": np.zeros(1)}
    )
    with Till(job.folder) as till:
        till.once(what)
    return {"tested": {}, "models": {}}


def paying(monkeypatch):
    """Puts `pays` in the place of `deploy`, with its charges."""
    replaced(monkeypatch, "deploy", pays)
    wanted = [
        dataclasses.replace(stage, charges=lambda config, data: {"hospital 0": PureDpEvent(1.0)})
        if stage.name == "deploy"
        else stage
        for stage in life.stages()
    ]
    monkeypatch.setattr(life, "stages", lambda: tuple(wanted))


@contextlib.contextmanager
def full_disk():
    """Makes every file of this process unable to grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_ctrl_c_in_any_stage(copied, monkeypatch):
    before, loaded = spent(copied), parts.load(tiny.lifecycle().data)
    monkeypatch.setattr(parts, "load", lambda config: loaded)

    def interrupted(job):
        raise KeyboardInterrupt

    # The first stage of each kind, since the others reach the same code.
    kinds = {
        (stage.charges is None, stage.is_audit, not stage.after): stage.name
        for stage in reversed(STAGES)
    }
    assert set(kinds.values()) == {"pretrain", "finetune", "deploy", "audit_finetune"}
    for name in kinds.values():
        (finished,) = copied.glob(f"cells/{name}/*/row.json")
        with monkeypatch.context() as patch:
            finished.rename(copied / "away")
            replaced(patch, name, interrupted)
            with pytest.raises(
                Interrupted, match=rf"Interrupted in stage '{name}'.*pays nothing twice"
            ):
                life.run(tiny.lifecycle(), copied)
            report = (copied / "report.html").read_text()
            assert (
                "interrupted" in report
                and "stopped by the user, and the next run continues" in report
            )
            (copied / "away").rename(finished)
    assert {state["status"] for state in life.run(tiny.lifecycle(), copied).values()} == {"done"}
    assert spent(copied) == before and unfinished(copied) == 0


def test_a_resumed_run_writes_a_report_for_stages_that_run_only(copied, monkeypatch):
    """What was done before is in the report before the next stage, which may take hours."""
    reports = []

    def write(root):
        stages = json.loads((root / "result.json").read_text())["stages"]
        reports.append({name: state["status"] for name, state in stages.items()})

    def interrupted(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(document, "write", write)
    life.run(tiny.lifecycle(), copied)
    assert reports == [dict.fromkeys(NAMES, "done")]
    (row,) = copied.glob("cells/split/*/row.json")
    row.unlink()
    replaced(monkeypatch, "split", interrupted)
    with pytest.raises(Interrupted):
        life.run(tiny.lifecycle(), copied)
    place = NAMES.index("split")
    later = dict.fromkeys(NAMES[place:], "waiting")
    before = dict.fromkeys(NAMES, "done") | later
    assert reports[1:] == [before, before | {"split": "interrupted"}]


@pytest.mark.parametrize(
    "place",
    [
        (Ledger, "register"),
        (cache, "settle"),
        (running, "write_json"),
        (parts_of_reports, "render_page"),
        (os, "replace"),
    ],
)
def test_ctrl_c_between_stages(copied, monkeypatch, place):
    before = spent(copied), (copied / "report.html").read_bytes()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*place, interrupted)
        life.run(tiny.lifecycle(), copied)
    assert before == (spent(copied), (copied / "report.html").read_bytes())  # whole, if old
    with alone(copied):  # nothing holds it any more
        pass


def test_ctrl_c_at_the_launcher_and_the_same_command_again(tmp_path, finished, monkeypatch):
    root = tmp_path / "run"
    shutil.copytree(finished[0] / "cells" / "pretrain", root / "cells" / "pretrain")
    changes = {"finetune__steps": 16, "finetune__checkpoint_every": 1}
    running, printed, errors = program.start(command(root, **changes), tmp_path)
    wait_for(lambda: list(root.glob("cells/finetune/*/charges.jsonl")), running)
    dropped = lambda: errors.read_text().count("Exception ignored in")  # noqa: E731
    # Python drops the exception where a destructor or JAX's callback of gc runs
    while running.poll() is None:
        before, end = dropped(), time.monotonic() + 5
        # a signal at its end would kill it
        if "stopped by the user" not in (root / "report.html").read_text():
            running.send_signal(signal.SIGINT)
        while running.poll() is None and dropped() == before and time.monotonic() < end:
            time.sleep(0.02)
    printed, errors = printed.read_text(), errors.read_text()
    assert running.returncode == 130, errors
    raised = re.sub(r"Exception ignored in.*?\nKeyboardInterrupt\b", "", errors, flags=re.DOTALL)
    assert "pretrain: done" in printed and "Traceback" not in raised
    assert (
        "Interrupted in stage 'finetune'" in errors
        and "The same command continues from here" in errors
    )
    assert "stopped by the user" in (root / "report.html").read_text()
    assert spent(root)["digits/private"] > 0
    first_stages(monkeypatch, 2)
    again = program.call(command(root, **changes))
    assert again.returncode == 0 and not list(root.rglob("secret_seed")), again.stderr
    with Ledger(root / "ledger.sqlite") as ledger:
        steps = [
            n
            for leaf, n in composition(ledger.events("digits/private")[None]).items()
            if "Sampled" in repr(leaf)
        ]
    assert steps == [16] and unfinished(root) == 0


KILLED = """
import importlib, os, pathlib, signal, sys
import jax
from launch.lifecycle import life
from jaxdp.release import kept_arrays
workdir, seen, *fields = sys.argv[1:]
options = {"jax_numpy_rank_promotion": "raise", "jax_cpu_enable_async_dispatch": False}
for name, value in options.items():
    jax.config.update(name, value)  # as the tests do: another setting would be another release
write = kept_arrays.write_durably

def killed(path, content):
    if path.name == "released.safetensors" and path.parent.parent.name == "recalibrate":
        write(pathlib.Path(seen), content)
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)

kept_arrays.write_durably = killed
config = importlib.import_module("configs.lifecycle_digits").get_config()
config.update_from_flattened_dict(eval(fields[0]))
life.run(config, workdir)
"""


def test_kill_9_in_the_middle_of_a_release(copied, tmp_path, monkeypatch):
    shutil.rmtree(copied / "cells" / "recalibrate")
    lose(copied)
    killed = forked.run(
        KILLED, copied, tmp_path / "seen", repr(tiny.LIFECYCLE), modules=program.MODULES
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # it counts
    assert (
        spent(copied)["hospital 0"] == spent(copied)["hospital 1"] == 1 and unfinished(copied) == 2
    )
    (seed,) = copied.rglob("secret_seed")
    first_stages(monkeypatch, 3)
    states = life.run(tiny.lifecycle(), copied)
    assert {state["status"] for state in states.values()} == {"done"}
    assert spent(copied)["hospital 0"] == 1 and unfinished(copied) == 0 and not seed.exists()
    (path,) = copied.glob("cells/recalibrate/*/released.safetensors")
    seen, released = load_arrays(tmp_path / "seen"), load_arrays(path)
    assert seen.keys() == released.keys() and released
    for name, value in seen.items():
        assert np.array_equal(value, released[name])


def test_a_disk_that_is_full_when_the_ledger_is_written(copied, monkeypatch, capsys):
    derive = secrets.stored
    paying(monkeypatch)
    shutil.rmtree(copied / "cells" / "deploy")
    with contextlib.ExitStack() as full, monkeypatch.context() as patch:
        patch.setattr(
            secrets, "stored", lambda *args: (derive(*args), full.enter_context(full_disk()))[0]
        )
        with pytest.raises(SystemExit, match="2"):
            frame.tell(experiment, tiny.lifecycle(), str(copied))
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert re.search(r"deploy: failed, OSError: ledger '.*' cannot be read or written", said.out)
    # not charged, as nothing was computed
    assert spent(copied)["hospital 0"] == 1 and unfinished(copied) == 0
    assert "What was protected" in document.write(copied).read_text()
    life.run(tiny.lifecycle(), copied)
    assert spent(copied)["hospital 0"] == 2 and unfinished(copied) == 0


def test_a_disk_that_is_full_when_a_release_ends(copied, monkeypatch, capsys):
    write = kept_arrays.write_durably
    paying(monkeypatch)
    shutil.rmtree(copied / "cells" / "deploy")
    with contextlib.ExitStack() as full, monkeypatch.context() as patch:

        def fills(path, content):
            write(path, content)
            if path.name == "released.safetensors":
                full.enter_context(full_disk())

        patch.setattr(kept_arrays, "write_durably", fills)
        with pytest.raises(SystemExit, match="2"):
            frame.tell(experiment, tiny.lifecycle(), str(copied))
    assert spent(copied)["hospital 0"] == 2 and unfinished(copied) == 1
    life.run(tiny.lifecycle(), copied)
    assert spent(copied)["hospital 0"] == 2 and unfinished(copied) == 0


def test_a_lifecycle_holds_its_room_against_another_one(tmp_path, finished, monkeypatch):
    """Tests two processes that share a ledger with room for one of them. The second spends
    nothing."""
    first, second, shared = tmp_path / "first", tmp_path / "second", tmp_path / "ledger.sqlite"
    changes = {"ledger": str(shared), "finetune__checkpoint_every": 1}
    for root in (first, second):
        shutil.copytree(finished[0] / "cells" / "pretrain", root / "cells" / "pretrain")
    leave_out_audits(monkeypatch)
    others, accuracy = [], finetune.accuracy

    def once_started(*args):
        if not others and list(first.glob("cells/finetune/*/charges.jsonl")):
            others.append(program.run(command(second, **changes)))
        return accuracy(*args)

    monkeypatch.setattr(finetune, "accuracy", once_started)
    states = life.run(tiny.lifecycle(**changes), first)
    errors = others[0].stderr
    assert others[0].returncode == 2 and "Traceback" not in errors, errors
    assert re.search(r"dataset 'digits/private', .* room that others hold", errors), errors
    assert not list(second.glob("cells/*/*/charges.jsonl"))
    assert {state["status"] for state in states.values()} == {"done"}
    with Ledger(shared) as ledger:
        assert {name: ledger.epsilon(name) for name in PAID} == pytest.approx(spent(finished[0]))


# --- Patients with several images ----------------------------------------------------------------


def test_a_whole_life_on_images_of_five_sites_protects_patients(tmp_path, capsys):
    # Here and not in test_groups.py, since it runs the programs of the life above.
    folder = tmp_path / "images"
    folder.mkdir()
    patients.write(folder)
    study = patients.lifecycle(folder)
    study.watch = "tensorboard" if importlib.util.find_spec("tensorboardX") else ""
    states = life.run(study, tmp_path / "life")
    said = capsys.readouterr().out
    assert {state["status"] for state in states.values()} == {"done"}, said
    assert "split: only the first image of each patient is uploaded" in said
    watched = {
        path.parent.parent.parent.name
        for path in (tmp_path / "life").glob("cells/*/*/tensorboard/events*")
    }
    assert watched == ({"pretrain", "finetune"} if study.watch else set())
    (adapted,) = (tmp_path / "life" / "cells" / "adapt").glob("*/row.json")
    # two images, in two batches or in one
    assert json.loads(adapted.read_text())["result"]["visits"] in (
        2,
        4,
    )
    with Ledger(tmp_path / "life" / "ledger.sqlite") as ledger:
        entries = {entry["name"]: entry for entry in ledger.report()["datasets"]}
    assert set(entries) == {
        "xrays/private",
        "stream",
        "clinic",
        *(f"hospital {k}" for k in range(5)),
    }
    assert {entry["unit"] for entry in entries.values()} == {"patient"}
    assert all(entry["spends"] for entry in entries.values())
    count = {part: len(set(patients.owners(folder, part))) for part in patients.SIZES}
    assert entries["xrays/private"]["records"] == count["private"] == 45
    assert entries["hospital 0"]["records"] == count["site_0"] < 10
    assert entries["stream"]["records"] == count["stream_0"] + count["stream_1"]
    text = (tmp_path / "life" / "report.html").read_text()
    for words in (
        "reveal about any single patient.",
        "adding or removing one patient",
        "They hold for one patient with all of its images in one data set.",
        "A patient with images in several data sets.",
        "A patient counts once, with up to 2 images.",
        "one step of fine-tuning, if the patient is in its batch",
        "which patients are in a batch of fine-tuning",
        "5 sources answered with noise",
        "Accuracy under stream 1: ",
        "so it has the first image of each patient only.",
        "with noise for all images of a patient together",
        "any change of k training patients",
    ):
        assert words in text
    assert "The unit is one image" not in text and "under clean" not in text


# --- The report ---------------------------------------------------------------------------------


def test_the_report_has_every_section_and_every_audit(finished):
    root, _ = finished
    text = (root / "report.html").read_text()
    for title in (
        *(
            "The verdict",
            "Not protected",
            "Sign-off",
            "What was bought",
            "How to read the verdict",
            "What spent it",
        ),
        *("What attacks found", "What is not protected", "Stages", "Settings"),
    ):
        assert f"<h2>{title}</h2>" in text
    rows = [
        html.unescape(re.sub("<[^>]*>", "|", row))
        for row in re.findall("<tr .*?</tr>", text, flags=re.DOTALL)
    ]
    life = document.Life(root)
    assert {account for audit in life.audits for account in audit["accounts"]} >= {
        "digits/private",
        "stream",
        "clinic",
    }
    for audit in life.audits:
        assert audit["verdict"] != "VIOLATED"
        numbers = [f"|{round_down(audit[bound])}|" for bound in ("lower", "ceiling")]
        assert any(
            audit["release"] in row and all(number in row for number in numbers) for row in rows
        )
    assert parts_of_reports.audited(life.audits, "nobody") == "none"
    assert text.count('class="chart"') == CHARTS and "not private" not in text.lower()


def test_the_deployed_model_is_beside_each_step(finished):
    root, states = finished
    found = cache.find(root / states["deploy"]["folder"]).result
    (models,) = found["models"].values()
    assert list(models) == ["fine-tuned", "only recalibrated", "only adapted", "deployed"]
    # confidences change no answer
    assert models["fine-tuned"]["accuracy"] == models["only recalibrated"]["accuracy"]
    assert models["only adapted"]["accuracy"] == models["deployed"]["accuracy"]
    assert models["fine-tuned"]["low"] == models["fine-tuned"]["high"] == 0.0
    assert cache.find(root / states["recalibrate"]["folder"]).result["ece"] == {
        "before": models["fine-tuned"]["ece"],
        "after": models["only recalibrated"]["ece"],
    }
    text = (root / "report.html").read_text()
    assert all(f"{row['ece']:.3f}</span>" in text for row in models.values())


def test_the_report_needs_nothing_but_itself(finished):
    text = (finished[0] / "report.html").read_text()
    assert (
        "<script" not in text and "://" not in text and "url(" not in text and "@import" not in text
    )
    references = re.findall(r"(?:src|href|srcset|poster|action)\s*=\s*[\"']([^\"']{0,22})", text)
    # The curve of an account is a file inside of the page.
    assert references == ["#unprotected", *["data:text/csv;charset="] * CURVES]


REPORTS = "from launch import frame, report; frame.start(report.main)"


def test_the_report_is_made_again_byte_for_byte_anywhere(copied, tmp_path):
    text = (copied / "report.html").read_bytes()
    moved = pathlib.Path(shutil.move(copied, tmp_path / "elsewhere"))
    (moved / "report.html").unlink()
    # ml_collections is not asked here, so nothing may warn.
    process = forked.run(REPORTS, moved, modules=program.MODULES)
    assert process.returncode == 0 and process.stdout.strip() == str(moved / "report.html"), (
        process.stderr
    )
    assert (moved / "report.html").read_bytes() == text
    with pytest.raises(
        FileNotFoundError,
        match=r"config\.json does not exist\. Give the workdir of a lifecycle, or",
    ):
        launch.report.main(["launch.report", str(tmp_path)])


def test_a_refuted_claim_is_said_first(copied):
    (path,) = copied.glob("cells/audit_adapt/*/row.json")
    path.write_text(re.sub('"verdict": "[^"]*"', '"verdict": "VIOLATED"', path.read_text()))
    plain, _, rest = document.write(copied).read_text().partition("<h2>What was bought</h2>")
    assert "An attack on adaptation told more than it should" in plain and "VIOLATED" in rest
    assert (
        '<strong>stream.</strong> <strong class="word no-proof">No guarantee</strong>: '
        "an attack refuted" in plain
    )
