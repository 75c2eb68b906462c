"""The life of a tiny model: what is run, what is kept, what is paid, and what happens when something goes wrong."""

import contextlib
import dataclasses
import importlib
import itertools
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import launch.lifecycle
import launch.report
from jaxdp import finetune
from jaxdp.lifecycle import Interrupted, cache, document, experiment, parts, stages
from jaxdp.models import load_params
from jaxdp.privacy import BudgetExceeded, Ledger, PureDpEvent
from jaxdp.privacy import ledger as ledger_module
from jaxdp.report import MetricsWriter, read_metrics
from jaxdp.report.workdir import alone

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parents[2]

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


def test_what_is_not_private_can_be_left_out_for_nothing(copied, ran):
    config = tiny()
    config.certificates.show = False
    before = spent(copied)
    experiment.run(config, copied)
    assert ran == ["certificates"] and spent(copied) == before
    text = (copied / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 4 and "not private" not in text.lower()
    assert "certificates.show=False" not in text and "without noise it" not in text.lower()


def test_changed_data_is_noticed(finished):
    root, states = finished
    done = {name: cache.find(root / state["folder"]) for name, state in states.items()}
    keys = [
        {stage.name: stage.key(config, parts.load(config.data), done) for stage in stages.STAGES}
        for config in (tiny(), tiny(data__stream_shifts=("contrast",)), tiny(data__split_seed=1))
    ]
    assert {name for name in NAMES if keys[0][name] != keys[1][name]} == {"adapt", "deploy", "audit_adapt"}
    assert all(keys[0][name] != keys[2][name] for name in NAMES)


def test_a_changed_stage_fails_and_is_tried_again_with_what_depends_on_it_only(copied, ran, monkeypatch, capsys):
    def fail(job):
        raise RuntimeError("the line to <hospital> 3 is dead")

    before, changed = spent(copied), tiny(recalibrate__epsilon=0.5)
    shutil.rmtree(copied / "audit_finetune")
    with monkeypatch.context() as patch:
        replaced(patch, "recalibrate", fail)
        states = experiment.run(changed, copied)
    skipped = ["deploy", "audit_recalibrate"]
    assert states["recalibrate"]["status"] == "failed"
    assert [name for name in NAMES if states[name]["status"] == "skipped"] == skipped
    assert all(states[name]["status"] == "done" for name in NAMES if name not in ("recalibrate", *skipped))
    printed = capsys.readouterr().out
    assert "recalibrate: failed, RuntimeError: the line to <hospital> 3 is dead" in printed
    assert "deploy: skipped, it builds on recalibrate" in printed and "audit_finetune: running" in printed
    assert "Not done: recalibrate, deploy, audit_recalibrate." in printed
    report = (copied / "report.html").read_text()
    assert "RuntimeError; error.txt in its folder says more" in report
    assert "hospital&gt; 3" not in report and "<hospital>" not in report  # it may depend on what hospitals have
    (written,) = copied.glob("recalibrate/*/error.txt")
    assert "the line to <hospital> 3 is dead" in written.read_text()
    assert spent(copied) == before

    states = experiment.run(changed, copied)
    assert {state["status"] for state in states.values()} == {"done"} and not written.exists()
    assert ran == ["recalibrate", *skipped]
    after = spent(copied)
    assert after["hospital 0"] == 1.5 and after["stream"] == before["stream"]
    experiment.run(tiny(), copied)  # what was made with the first config is still there, and paid for
    assert len(ran) == 3 and spent(copied) == after


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


@pytest.fixture
def job(tmp_path):
    """A stage's, with an account that two releases of epsilon 1 fit into."""
    folder = tmp_path / "stage" / "key"
    folder.mkdir(parents=True)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("a", adjacency="add_remove", unit="image", epsilon=2.0, delta=0.0)
        yield cache.Job(None, None, {}, folder, ledger)


def release(job, compute):
    return job.release([("a", PureDpEvent(1.0))], compute, label="test")


def test_a_release_on_another_machine_or_by_another_program_has_other_noise_and_is_charged(job, monkeypatch):
    secrets = []

    def stopped(secret):
        secrets.append(secret)
        raise KeyboardInterrupt

    for program in ("one", "one", "two"):
        monkeypatch.setattr(cache, "_program", lambda program=program: program)
        with pytest.raises(KeyboardInterrupt):
            release(job, stopped)
    assert secrets[0] == secrets[1] != secrets[2] and job.ledger.epsilon("a") == 2
    for change in ("_program", "processor"):
        with monkeypatch.context() as patch, pytest.raises(BudgetExceeded):
            patch.setattr(cache, change, lambda: ["three"])
            release(job, stopped)
    with monkeypatch.context() as patch, pytest.raises(BudgetExceeded):
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        release(job, stopped)
    assert len(secrets) == 3


def test_what_was_released_is_kept_whatever_comes_after(job):
    values = iter([np.float32(1), np.float32(2)])
    for _ in range(2):
        assert float(release(job, lambda secret: {"x": np.asarray(next(values))})["x"]) == 1
    assert job.ledger.epsilon("a") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["ctrl-c", "full"])
@pytest.mark.parametrize(
    ("place", "charged"),
    [
        ((cache, "stored_seed"), 0),
        ((ledger_module, "_insert"), 0),
        ((MetricsWriter, "write"), 1),
        ((cache, "save_params"), 1),
        ((Ledger, "_finish"), 1),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_release_that_stops_anywhere_is_the_same_later_and_paid_once(job, monkeypatch, error, place, charged):
    secrets = []

    def compute(secret):
        secrets.append(secret)
        return {"x": np.frombuffer(secret, np.uint8)}

    def stop(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*place, stop)
        with pytest.raises(type(error)) as raised:
            release(job, compute)
        assert raised.value is error
    assert job.ledger.epsilon("a") == charged == len(job.ledger.report()["datasets"][0]["open"])
    cache.settle(job.folder.parents[1], job.ledger, "a")  # as every run does first
    assert release(job, compute)["x"].tobytes() == secrets[0] == secrets[-1]
    assert job.ledger.epsilon("a") == 1 and job.ledger.report()["datasets"][0]["open"] == []
    assert (job.folder / "secret_seed").stat().st_mode & 0o777 == 0o600


def test_a_lost_ledger_is_told_everything_again(copied, ran):
    before = spent(copied)
    (copied / "ledger.sqlite").unlink()
    experiment.run(tiny(), copied)
    assert ran == [] and spent(copied) == pytest.approx(before)
    (copied / "ledger.sqlite").unlink()
    with pytest.raises(BudgetExceeded, match="hospital 0"):
        experiment.run(tiny(budgets__sources__epsilon=0.5), copied)


def test_a_spoilt_folder_is_not_taken_for_a_finished_stage(copied):
    (path,) = copied.glob("pretrain/*/backbone.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert cache.find(path.parent) is None
    (figure,) = copied.glob("finetune/*/training.png")
    assert cache.find(figure.parent) is not None
    figure.unlink()
    assert cache.find(figure.parent) is None


def test_what_cannot_be_run_says_so_before_anything_is_spent(tmp_path):
    root = tmp_path / "run"

    def refused(config, words):
        with pytest.raises(SystemExit, match=words) as stopped:
            launch.lifecycle.experiment(config, str(root))
        assert "Traceback" not in str(stopped.value) and "the same command goes on" in str(stopped.value)
        assert not root.exists()

    config = tiny()
    config.data.parts = {name: "cifar10/test" for name in parts.PARTS}
    config.data.update({"source": "tfds", "data_dir": str(tmp_path)})  # neither the data nor a network: none is asked
    refused(config, r"FileNotFoundError: data set 'cifar10' is not prepared(.|\n)*tfds build cifar10")
    refused(tiny(data__source="tfds"), r"ValueError: config\.data\.parts must name TFDS splits")
    refused(tiny(data__parts__public=1797), "ValueError: .*add up to at most 1797")
    refused(tiny(data__source="cloud"), r"ValueError: config\.data\.source must be 'bundled' or 'tfds', got 'cloud'\.")
    refused(tiny(data__sources=21), "ValueError: .*every one needs an image")
    with alone(root), pytest.raises(SystemExit, match="ValueError: another process is running"):
        launch.lifecycle.experiment(tiny(), str(root))
    with pytest.raises(SystemExit, match=r"ValueError: path .* does not exist; create the directory first"):
        launch.lifecycle.experiment(tiny(ledger=str(tmp_path / "nowhere" / "ledger.sqlite")), str(root))
    assert not (root / "ledger.sqlite").exists()


# --- Ctrl-C, kill -9, full disks, and two at once ---------------------------------------------------------------------


def command(workdir, **changes):
    """The launcher's, for a process of its own."""
    fields = {**TINY, **{name.replace("__", "."): value for name, value in changes.items()}}
    arguments = ["--config", "configs/lifecycle_digits.py", "--workdir", str(workdir)]
    # A process in the background of a shell would ignore Ctrl-C.
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('launch.lifecycle', run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code, *arguments, *(f"--config.{name}={value}" for name, value in fields.items())]


def start(arguments):
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path, process):
    deadline = time.monotonic() + 300
    while not (path() and path()[0].stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def first_stages(monkeypatch, number):
    monkeypatch.setattr(experiment, "STAGES", stages.STAGES[:number])


def pays(job):
    """In place of `deploy`: a release about a hospital."""
    job.release([("hospital 0", PureDpEvent(1.0))], lambda secret: {"x": np.zeros(1)}, label="test")
    return {"ece": {}}


@contextlib.contextmanager
def full_disk():
    """No file of this process can grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_ctrl_c_in_any_stage(copied, monkeypatch):
    before, loaded = spent(copied), parts.load(tiny().data)
    monkeypatch.setattr(parts, "load", lambda config: loaded)

    def interrupted(job):
        raise KeyboardInterrupt

    for name in NAMES:
        with monkeypatch.context() as patch:
            (copied / name).rename(copied / "away")
            replaced(patch, name, interrupted)
            with pytest.raises(Interrupted, match=rf"Interrupted in stage '{name}'.*pays nothing twice"):
                experiment.run(tiny(), copied)
            report = (copied / "report.html").read_text()
            assert "interrupted" in report and "stopped by the user; the next run goes on" in report
            shutil.rmtree(copied / name)
            (copied / "away").rename(copied / name)
    assert {state["status"] for state in experiment.run(tiny(), copied).values()} == {"done"}
    assert spent(copied) == before and unfinished(copied) == 0


@pytest.mark.parametrize(
    "place", [(Ledger, "register"), (cache, "settle"), (experiment, "write_json"), (document, "_page"), (os, "replace")]
)
def test_ctrl_c_between_stages(copied, monkeypatch, place):
    before = spent(copied), (copied / "report.html").read_bytes()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*place, interrupted)
        experiment.run(tiny(), copied)
    assert before == (spent(copied), (copied / "report.html").read_bytes())  # whole, if old
    with alone(copied):  # nothing holds it any more
        pass


def test_ctrl_c_at_the_launcher_and_the_same_command_again(tmp_path, finished, monkeypatch):
    root = tmp_path / "run"
    shutil.copytree(finished[0] / "pretrain", root / "pretrain")
    running = start(command(root))
    wait_for(lambda: list(root.glob("finetune/*/charges.jsonl")), running)
    running.send_signal(signal.SIGINT)
    printed, errors = running.communicate(timeout=300)
    assert running.returncode == 130, errors
    assert "pretrain: done" in printed and "Traceback" not in errors
    assert "Interrupted in stage 'finetune'" in errors and "The same command goes on from here" in errors
    assert "interrupted" in (root / "report.html").read_text()
    assert spent(root)["digits/private"] > 0
    first_stages(monkeypatch, 2)
    states = experiment.run(tiny(), root)
    assert {state["status"] for state in states.values()} == {"done"} and not list(root.rglob("secret_seed"))
    assert spent(root)["digits/private"] == pytest.approx(document._Life(root).result("finetune")["epsilon"])
    assert unfinished(root) == 0


KILLED = """
import importlib, os, shutil, signal, sys
import jax
from jaxdp.lifecycle import cache, experiment
workdir, seen, *fields = sys.argv[1:]
jax.config.update("jax_numpy_rank_promotion", "raise")  # as the tests do: another setting would be another release
save = cache.save_params

def killed(path, released):
    if path.parent.parent.name == "recalibrate":
        save(seen, released)
        os.kill(os.getpid(), signal.SIGKILL)
    save(path, released)

cache.save_params = killed
config = importlib.import_module("configs.lifecycle_digits").get_config()
config.update_from_flattened_dict(eval(fields[0]))
experiment.run(config, workdir)
"""


def test_kill_9_in_the_middle_of_a_release(copied, tmp_path, monkeypatch):
    shutil.rmtree(copied / "recalibrate")
    (copied / "ledger.sqlite").unlink()
    killed = start([sys.executable, "-c", KILLED, str(copied), str(tmp_path / "seen"), repr(TINY)])
    _, errors = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, errors
    assert spent(copied)["hospital 0"] == spent(copied)["hospital 1"] == 1 and unfinished(copied) == 2  # it counts
    (seed,) = copied.rglob("secret_seed")
    first_stages(monkeypatch, 3)
    states = experiment.run(tiny(), copied)
    assert {state["status"] for state in states.values()} == {"done"}
    assert spent(copied)["hospital 0"] == 1 and unfinished(copied) == 0 and not seed.exists()
    (path,) = copied.glob("recalibrate/*/released.safetensors")
    seen, released = load_params(tmp_path / "seen"), load_params(path)
    assert seen.keys() == released.keys()
    for name, value in seen.items():
        assert np.array_equal(value, released[name])


def test_a_disk_that_is_full_when_the_ledger_is_written(copied, monkeypatch, capsys):
    seed = cache.stored_seed
    replaced(monkeypatch, "deploy", pays)
    shutil.rmtree(copied / "deploy")
    with contextlib.ExitStack() as full, monkeypatch.context() as patch:
        patch.setattr(cache, "stored_seed", lambda path: (seed(path), full.enter_context(full_disk()))[0])
        with pytest.raises(SystemExit, match=r"OSError: (.|\n)*the ledger counts all that was reserved") as stopped:
            launch.lifecycle.experiment(tiny(), str(copied))
    assert "Traceback" not in str(stopped.value)
    assert re.search(r"deploy: failed, OSError: ledger '.*' cannot be read or written", capsys.readouterr().out)
    assert spent(copied)["hospital 0"] == 1 and unfinished(copied) == 0  # not charged, as nothing was computed
    assert "What each data set paid" in document.write(copied).read_text()
    experiment.run(tiny(), copied)
    assert spent(copied)["hospital 0"] == 2 and unfinished(copied) == 0


def test_a_disk_that_is_full_when_a_release_ends(copied, monkeypatch):
    save = cache.save_params
    replaced(monkeypatch, "deploy", pays)
    shutil.rmtree(copied / "deploy")
    with contextlib.ExitStack() as full, monkeypatch.context() as patch:
        patch.setattr(cache, "save_params", lambda *args: (save(*args), full.enter_context(full_disk())))
        with pytest.raises(SystemExit, match="OSError"):
            launch.lifecycle.experiment(tiny(), str(copied))
    assert spent(copied)["hospital 0"] == 2 and unfinished(copied) == 1
    experiment.run(tiny(), copied)
    assert spent(copied)["hospital 0"] == 2 and unfinished(copied) == 0


def test_a_budget_that_another_lifecycle_spends_in_the_middle_of_a_stage(tmp_path, finished, monkeypatch):
    """Two processes with a workdir each share a ledger, in which three of their eight steps have room."""
    first, second, shared = tmp_path / "first", tmp_path / "second", tmp_path / "ledger.sqlite"
    changes = {"ledger": str(shared), "budgets__private__epsilon": 3.8, "finetune__checkpoint_every": 1}
    for root in (first, second):
        shutil.copytree(finished[0] / "pretrain", root / "pretrain")
    others, accuracy = [], finetune.accuracy

    def once_started(*args):
        if not others and list(first.glob("finetune/*/charges.jsonl")):
            others.append(start(command(second, **changes)))
            wait_for(lambda: list(second.glob("finetune/*/charges.jsonl")), others[0])
        return accuracy(*args)

    monkeypatch.setattr(finetune, "accuracy", once_started)
    states = experiment.run(tiny(**changes), first)
    printed, errors = others[0].communicate(timeout=300)
    assert others[0].returncode == 1 and "Traceback" not in errors, errors
    assert states["finetune"]["status"] == states["predict"]["status"] == "failed"
    assert states["recalibrate"]["status"] == states["adapt"]["status"] == "skipped"
    refused = r"BudgetExceeded: dataset 'digits/private', budget epsilon 3\.8 .* would"
    assert re.match(refused, states["finetune"]["message"]) and re.search(refused, printed)
    charges = [len(read_metrics(path)) for path in tmp_path.glob("*/finetune/*/charges.jsonl")]
    assert min(charges) >= 1 and len(charges) == 2
    with Ledger(shared) as ledger:
        (entry,) = [entry for entry in ledger.report()["datasets"] if entry["name"] == "digits/private"]
        assert [row["spends"] for row in entry["spends"]] == [sum(charges)] and entry["open"] == []
        assert entry["proven_epsilon"] <= 3.8
        step = ledger_module.from_json(read_metrics(next(first.glob("finetune/*/charges.jsonl")))[0]["event"])
        with pytest.raises(BudgetExceeded), ledger.spend("digits/private", step):  # no step was refused in vain
            pass
    for root in (first, second):
        report = document.write(root).read_text()
        assert "BudgetExceeded: dataset 'digits/private'" in report and entry["headline"] in report


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
        assert any(audit["release"] in row and f"|{document._floor(audit['lower'])}|" in row for row in rows)
    assert life.audited("nobody") is None
    assert text.count("data:image/png;base64,") == 5
    assert "not private" in text.lower() and "certificates.show=False" in text


def test_the_report_needs_nothing_but_itself(finished):
    text = (finished[0] / "report.html").read_text()
    assert "<script" not in text and "http" not in text and "url(" not in text and "@import" not in text
    references = re.findall(r"(?:src|href|srcset|poster|action)\s*=\s*[\"']([^\"']{0,22})", text)
    assert references and set(references) == {"data:image/png;base64,"}


def test_the_report_is_made_again_byte_for_byte_anywhere(copied, tmp_path):
    text = (copied / "report.html").read_bytes()
    moved = pathlib.Path(shutil.move(copied, tmp_path / "elsewhere"))
    (moved / "report.html").unlink()
    # ml_collections is not asked here, so nothing may warn.
    arguments = [sys.executable, "-W", "error", "-m", "launch.report", str(moved)]
    process = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0 and process.stdout.strip() == str(moved / "report.html"), process.stderr
    assert (moved / "report.html").read_bytes() == text
    with pytest.raises(SystemExit, match=r"there is no .*lifecycle\.json; give the workdir that launch\.lifecycle"):
        launch.report.main(["launch.report", str(tmp_path)])


def test_a_refuted_claim_is_said_first(copied):
    (path,) = copied.glob("audit_adapt/*/stage.json")
    path.write_text(path.read_text().replace('"violated": false', '"violated": true'))
    plain, _, rest = document.write(copied).read_text().partition("<h2>What each data set paid</h2>")
    assert "An attack on adaptation told more than it should" in plain and "VIOLATED" in rest


def test_words_for_the_guarantee():
    entry = {"adjacency": "add_remove", "unit": "image", "delta": 0.0, "headline": "1", "proven_epsilon": 1.0}
    assert "guesses right in at most 73.2 % of cases" in document._in_words(entry, 0.5)  # e / (1 + e), rounded up
    assert "at least 0.99." in document._in_words(entry, 0.999)  # rounded down
    assert "found no leak" in document._in_words(entry, 0.0) and "attack" not in document._in_words(entry, None)
    # The best test that (epsilon, delta)-DP allows with equal error rates x has 1 - delta - x = e^epsilon x.
    error = (1 - 0.1) / (1 + np.e)
    assert f"at most {np.ceil(1000 * (1 - error)) / 10:g} %" in document._in_words({**entry, "delta": 0.1}, None)
    assert "no guarantee" in document._in_words({**entry, "headline": "inf", "proven_epsilon": None}, None)
    assert "nothing was released" in document._in_words({**entry, "headline": "0", "proven_epsilon": 0.0}, None)
    large = {**entry, "headline": "800", "proven_epsilon": 800.0}
    assert "at most 100 %" in document._in_words(large, None)
