"""The life of a tiny model: what is run, what is kept, what is paid, and what happens when something goes wrong."""

import dataclasses
import importlib
import itertools
import pathlib
import re
import shutil

import numpy as np
import pytest

from jaxdp import recalibration
from jaxdp.lifecycle import Interrupted, cache, document, experiment, parts, stages
from jaxdp.privacy import BudgetExceeded, Ledger, PureDpEvent
from jaxdp.report.workdir import alone

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = {
    "data.parts.public": 60,
    "data.parts.private": 60,
    "data.parts.sources": 20,
    "data.parts.stream": 16,
    "data.parts.test": 40,
    "data.sources": 2,
    "model.options.widths": (8,),
    "pretrain.steps": 4,
    "pretrain.checkpoint_every": 4,
    "pretrain.perturbation_batch_size": 32,
    "finetune.steps": 4,
    "finetune.checkpoint_every": 2,
    "finetune.batch_size": 16,
    "finetune.physical_batch_size": 24,
    "finetune.augmult": 0,
    "adapt.batch_size": 8,
    "adapt.epsilon": 4.0,
    "predict.queries": 4,
    "predict.max_distance": 4,
    "audit_finetune.canaries": 40,
    "audit_recalibrate.trials": 10,
    "audit_predict.images": 8,
    "audit_predict.candidates": 2,
    "audit_predict.trials": 10,
    "audit_adapt.candidates": 2,
    "audit_adapt.trials": 10,
}


NAMES = [stage.name for stage in stages.STAGES]
PAID = ("digits/private", "hospital 0", "hospital 1", "stream")


def tiny(**changes):
    """The bundled lifecycle at a size that a test can pay for; `a__b` in `changes` is the field a.b."""
    config = importlib.import_module("configs.lifecycle_digits").get_config()
    config.update_from_flattened_dict({**TINY, **{name.replace("__", "."): value for name, value in changes.items()}})
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("lifecycle") / "run"
    return root, experiment.run(tiny(), root)


@pytest.fixture
def copied(finished, tmp_path):
    """The finished workdir, to be spoilt."""
    return pathlib.Path(shutil.copytree(finished[0], tmp_path / "run"))


@pytest.fixture
def ran(monkeypatch):
    """Names of the stages that are run."""
    names = []

    def watched(stage):
        return dataclasses.replace(stage, run=lambda job: (names.append(stage.name), stage.run(job))[1])

    monkeypatch.setattr(experiment, "STAGES", tuple(map(watched, stages.STAGES)))
    return names


def replaced(monkeypatch, name, run):
    wanted = [dataclasses.replace(stage, run=run) if stage.name == name else stage for stage in stages.STAGES]
    monkeypatch.setattr(experiment, "STAGES", tuple(wanted))


def spent(root):
    with Ledger(root / "ledger.sqlite") as ledger:
        return {name: ledger.epsilon(name) for name in PAID}


def unfinished(root):
    with Ledger(root / "ledger.sqlite") as ledger:
        return sum(len(entry["open"]) for entry in ledger.report()["datasets"])


def test_every_stage_is_done_and_pays_what_the_config_says(finished):
    root, states = finished
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
    config = tiny().data
    cut = parts._parts(config)
    rows = np.concatenate([source.rows for source in cut.values()])
    assert len(set(rows.tolist())) == len(rows) == sum(config.parts.values())
    loaded = parts.load(config)
    assert [source.name for source in loaded.sources] == ["hospital 0", "hospital 1"]
    assert [len(source) for source in loaded.sources] == [10, 10]
    for one, other in itertools.combinations([loaded.public, loaded.private, loaded.test], 2):
        assert one.fingerprint != other.fingerprint


def test_a_second_run_does_nothing(copied, ran, capsys):
    before = spent(copied), (copied / "report.html").read_bytes(), (copied / "lifecycle.json").read_bytes()
    experiment.run(tiny(), copied)
    assert ran == []
    assert before == (spent(copied), (copied / "report.html").read_bytes(), (copied / "lifecycle.json").read_bytes())
    assert capsys.readouterr().out.count("nothing to do") == len(NAMES)


def test_a_changed_stage_is_run_again_with_what_depends_on_it_only(copied, ran):
    before = spent(copied)
    experiment.run(tiny(recalibrate__epsilon=0.5), copied)
    assert ran == ["recalibrate", "deploy", "audit_recalibrate"]
    after = spent(copied)
    assert after["hospital 0"] == 1.5 and after["stream"] == before["stream"]
    experiment.run(tiny(), copied)  # what was made with the first config is still there, and paid for
    assert len(ran) == 3 and spent(copied) == after


def test_changed_data_is_noticed(finished):
    root, states = finished
    done = {name: cache.find(root / state["folder"]) for name, state in states.items()}
    keys = [
        {stage.name: stage.key(config, parts.load(config.data), done) for stage in stages.STAGES}
        for config in (tiny(), tiny(data__stream_shifts=("fog",)), tiny(data__split_seed=1))
    ]
    assert {name for name in NAMES if keys[0][name] != keys[1][name]} == {"adapt", "deploy", "audit_adapt"}
    assert all(keys[0][name] != keys[2][name] for name in NAMES)


def test_a_failing_stage_leaves_the_others_usable_and_is_tried_again(copied, monkeypatch, capsys):
    def fail(job):
        raise RuntimeError("the line to <hospital> 3 is dead")

    shutil.rmtree(copied / "recalibrate")
    shutil.rmtree(copied / "audit_predict")
    (copied / "ledger.sqlite").unlink()  # a lifecycle that has not come this far yet
    with monkeypatch.context() as patch:
        replaced(patch, "recalibrate", fail)
        states = experiment.run(tiny(), copied)
    skipped = ["deploy", "audit_recalibrate"]
    assert states["recalibrate"]["status"] == "failed"
    assert [name for name in NAMES if states[name]["status"] == "skipped"] == skipped
    assert all(states[name]["status"] == "done" for name in NAMES if name not in ("recalibrate", *skipped))
    printed = capsys.readouterr().out
    assert "recalibrate: failed, RuntimeError: the line to <hospital> 3 is dead" in printed
    assert (
        "deploy: skipped, it builds on recalibrate" in printed
        and "Not done: recalibrate, deploy, audit_recalibrate." in printed
    )
    report = (copied / "report.html").read_text()
    assert "the line to &lt;hospital&gt; 3 is dead" in report and "<hospital>" not in report
    assert spent(copied)["hospital 0"] == 0
    states = experiment.run(tiny(), copied)
    assert {state["status"] for state in states.values()} == {"done"} and spent(copied)["hospital 0"] == 1


def test_a_budget_that_runs_out_in_the_middle_of_a_stage(tmp_path, finished):
    root = tmp_path / "run"
    shutil.copytree(finished[0] / "pretrain", root / "pretrain")
    shutil.copytree(finished[0] / "audit_finetune", root / "audit_finetune")
    states = experiment.run(tiny(budgets__private__epsilon=3.5), root)  # two of the four steps fit
    assert states["finetune"]["status"] == states["predict"]["status"] == "failed"
    assert re.search(
        r"BudgetExceeded: dataset 'digits/private', budget epsilon 3.5 .* would", states["finetune"]["message"]
    )
    assert states["recalibrate"]["status"] == states["adapt"]["status"] == "skipped"
    assert 0 < spent(root)["digits/private"] <= 3.5 and unfinished(root) == 0
    report = (root / "report.html").read_text()
    assert "BudgetExceeded: dataset 'digits/private'" in report and f"{spent(root)['digits/private']:.6g}" in report


def test_two_lifecycles_share_a_ledger(copied, tmp_path):
    shared = str(copied / "ledger.sqlite")
    second = tmp_path / "second"
    shutil.copytree(copied / "pretrain", second / "pretrain")
    before = spent(copied)
    states = experiment.run(tiny(ledger=shared), second)
    assert "BudgetExceeded" in states["finetune"]["message"] and "BudgetExceeded" in states["predict"]["message"]
    assert spent(copied) == before and not (second / "ledger.sqlite").exists()
    assert f"{before['digits/private']:.6g}" in (second / "report.html").read_text()
    with pytest.raises(ValueError, match=r"'stream' is already registered with epsilon 8\.0, not 9\.0"):
        experiment.run(tiny(ledger=shared, budgets__stream__epsilon=9.0), second)
    pathlib.Path(shared).rename(tmp_path / "away")  # the report can still be read, and made
    text = (second / "report.html").read_bytes()
    assert document.write(second).read_bytes() == text
    Ledger(shared).close()
    with pytest.raises(ValueError, match="is not the ledger of this lifecycle"):
        document.write(second)


def test_an_interrupted_release_goes_on_and_is_paid_once(copied, monkeypatch):
    shutil.rmtree(copied / "recalibrate")
    (copied / "ledger.sqlite").unlink()
    keys, real = [], recalibration.logistic_binning

    def interrupted(sources, *, epsilon, key):
        keys.append(key)
        raise KeyboardInterrupt

    def watched(sources, *, epsilon, key):
        keys.append(key)
        return real(sources, epsilon=epsilon, key=key)

    monkeypatch.setattr(recalibration, "logistic_binning", interrupted)
    with pytest.raises(Interrupted, match=r"Interrupted in stage 'recalibrate'.*pays nothing twice"):
        experiment.run(tiny(), copied)
    (seed,) = copied.rglob("secret_seed")
    assert seed.stat().st_mode & 0o777 == 0o600
    assert spent(copied)["hospital 0"] == 1 and unfinished(copied) == 2  # it counts
    assert "interrupted" in (copied / "report.html").read_text()
    monkeypatch.setattr(recalibration, "logistic_binning", watched)
    states = experiment.run(tiny(), copied)
    assert {state["status"] for state in states.values()} == {"done"}
    assert keys[0] == keys[1]  # the same noise on the same answers
    assert spent(copied)["hospital 0"] == 1 and unfinished(copied) == 0 and not seed.exists()


def test_a_release_of_another_program_has_other_noise_and_is_charged(tmp_path, monkeypatch):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("a", adjacency="add_remove", unit="image", epsilon=2.0, delta=0.0)
        job = cache.Job(None, None, {}, tmp_path / "stage" / "key", ledger)
        job.folder.mkdir(parents=True)
        secrets = []

        def stopped(secret):
            secrets.append(secret)
            raise KeyboardInterrupt

        for program in ("one", "one", "two"):
            monkeypatch.setattr(cache, "_program", lambda program=program: program)
            with pytest.raises(KeyboardInterrupt):
                job.release([("a", PureDpEvent(1.0))], stopped, label="test")
        assert secrets[0] == secrets[1] != secrets[2] and ledger.epsilon("a") == 2
        monkeypatch.setattr(cache, "_program", lambda: "three")
        with pytest.raises(BudgetExceeded):
            job.release([("a", PureDpEvent(1.0))], stopped, label="test")
        assert len(secrets) == 3


def test_what_was_released_is_kept_whatever_comes_after(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("a", adjacency="add_remove", unit="image", epsilon=1.0, delta=0.0)
        job = cache.Job(None, None, {}, tmp_path / "stage" / "key", ledger)
        job.folder.mkdir(parents=True)
        values = iter([np.float32(1), np.float32(2)])
        for _ in range(2):
            released = job.release(
                [("a", PureDpEvent(1.0))], lambda secret: {"x": np.asarray(next(values))}, label="test"
            )
            assert float(released["x"]) == 1
        assert ledger.epsilon("a") == 1


def test_a_lost_ledger_is_told_everything_again(copied, ran):
    before = spent(copied)
    (copied / "ledger.sqlite").unlink()
    experiment.run(tiny(), copied)
    assert ran == [] and spent(copied) == pytest.approx(before)
    (copied / "ledger.sqlite").unlink()
    with pytest.raises(BudgetExceeded, match="hospital 0"):
        experiment.run(tiny(budgets__sources__epsilon=0.5), copied)


def test_spoilt_parameters_are_not_taken_for_a_finished_stage(copied):
    (path,) = copied.glob("pretrain/*/backbone.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert cache.find(path.parent) is None


def test_what_cannot_be_run_says_so_before_anything_is_spent(tmp_path):
    root = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="is not prepared"):
        names = {f"data__parts__{name}": "cifar10/test" for name in parts.PARTS}
        config = tiny()
        config.data.parts = {name.rpartition("__")[2]: value for name, value in names.items()}
        config.data.update({"source": "tfds", "data_dir": str(tmp_path)})
        experiment.run(config, root)
    with pytest.raises(ValueError, match="add up to at most 1797"):
        experiment.run(tiny(data__parts__public=1797), root)
    with pytest.raises(ValueError, match=r"config\.data\.source must be"):
        experiment.run(tiny(data__source="cloud"), root)
    with pytest.raises(ValueError, match="every one needs an image"):
        experiment.run(tiny(data__sources=21), root)
    assert not root.exists()
    with alone(root), pytest.raises(ValueError, match="another process is running"):
        experiment.run(tiny(), root)
    assert not (root / "ledger.sqlite").exists()


# --- The report -----------------------------------------------------------------------------------------------------


def test_the_report_has_every_section_and_the_numbers_of_the_ledger(finished):
    root, _ = finished
    text = (root / "report.html").read_text()
    for title in (
        *("In plain words", "What each data set paid", "What spent it", "What attacks found", "What came of it"),
        *("What is not protected", "Stages"),
    ):
        assert f"<h2>{title}</h2>" in text
    with Ledger(root / "ledger.sqlite") as ledger:
        entries = ledger.report()["datasets"]
    rows = [re.sub(r"<[^>]*>", "|", row) for row in re.findall(r"<tr>.*?</tr>", text, flags=re.DOTALL)]
    for entry in entries:
        assert any(
            entry["name"] in row and f"|{entry['headline']}|" in row and entry["adjacency"] in row for row in rows
        )
        for spend in entry["spends"]:
            assert f"{spend['spends']} × {spend['description']}" in text
    life = document._Life(root)
    assert {account for audit in life.audits for account in audit["accounts"]} >= {"digits/private", "stream"}
    for audit in life.audits:
        assert not audit["violated"]
        assert any(audit["release"] in row and f"|{audit['lower']:.3g}|" in row for row in rows)
    assert life.audited("nobody") is None
    assert text.count("data:image/png;base64,") == 5
    assert "not private" in text.lower() and "show_certificates=False" in text


def test_the_report_needs_nothing_but_itself(finished):
    text = (finished[0] / "report.html").read_text()
    assert "<script" not in text and "http" not in text and "url(" not in text and "@import" not in text
    references = re.findall(r"(?:src|href|srcset|poster|action)\s*=\s*[\"']([^\"']{0,22})", text)
    assert references and set(references) == {"data:image/png;base64,"}


def test_the_report_is_made_again_byte_for_byte_anywhere(copied, tmp_path):
    text = (copied / "report.html").read_bytes()
    moved = pathlib.Path(shutil.move(copied, tmp_path / "elsewhere"))
    (moved / "report.html").unlink()
    assert document.write(moved).read_bytes() == text
    with pytest.raises(FileNotFoundError, match="give the workdir"):
        document.write(tmp_path)


def test_words_for_the_guarantee():
    entry = {"adjacency": "add_remove", "unit": "image", "delta": 0.0, "headline": "1", "proven_epsilon": 1.0}
    assert "guesses right in at most 73.2 % of cases" in document._in_words(entry, 0.5)  # e / (1 + e), rounded up
    assert "at least 0.5" in document._in_words(entry, 0.5)
    assert "no guarantee" in document._in_words({**entry, "headline": "inf", "proven_epsilon": None}, None)
    assert "nothing was released" in document._in_words({**entry, "headline": "0", "proven_epsilon": 0.0}, None)
    large = {**entry, "headline": "800", "proven_epsilon": 800.0}
    assert "at most 100 %" in document._in_words(large, None)
