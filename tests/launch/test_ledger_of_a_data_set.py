"""One ledger counts for a private data set, whatever the workdir and the name."""

import dataclasses
import json
import os
import pathlib
import re
from typing import NamedTuple

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import digits_dpsgd, lifecycle_digits
from configs.recalibration import hospitals as hospital_configs
from configs.tta import digits as tta_digits
from jaxdp.data import DataSpec
from jaxdp.privacy import BudgetExceeded, Ledger, PrivacyWarning, PureDpEvent
from jaxdp.privacy.events import to_json
from jaxdp.release import Release, Till, mark_again
from jaxdp.report import MetricsWriter
from launch import adapt, data, finetune, frame, hospitals, run_report
from launch.frame.charges import lacking
from launch.lifecycle import life
from tests.launch.settling import charges, restore

CONFIGS = pathlib.Path(digits_dpsgd.__file__).parent
RECORDS = 96
BUDGET = 1.0


class Cell(NamedTuple):
    """A query that costs its epsilon."""

    epsilon: float


def ask(cell, work):
    terms = {**data.terms(work.config.data), "records": RECORDS, "epsilon": BUDGET, "delta": 0.0}
    (records,) = work.study.private(work.shared)
    with (
        work.account(records.name, label="queries", **terms) as account,
        account.spend(PureDpEvent(cell.epsilon)),
    ):
        return {"answer": 1}


def private_sets(opened):
    spec, records = opened
    return [frame.PrivateSet(records.name, records, spec.is_public)]


def opened(config, root):
    (spec,) = data.specs(config.data, "private").values()
    (records,) = data.parts(config.data, "private").values()
    return spec, records


QUERIES = frame.Study(
    name="queries",
    open=opened,
    private=private_sets,
    cells=lambda config: map(Cell, config.epsilons),
    run=ask,
    result=lambda rows, work: {"queries": len(rows)},
    summary=str,
    report=frame.Report(title="queries"),
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The folder of the user's registry and ledgers."""
    monkeypatch.setenv("JAXDP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JAXDP_RECORD_DIGESTS")
    return tmp_path / "home"


@pytest.fixture
def files(tmp_path):
    """Made-up patients of a hospital, as .npz files."""
    rng = np.random.default_rng(0)
    for name, count in (("train", RECORDS), ("test", 16)):
        np.savez(
            tmp_path / f"{name}.npz",
            image=rng.integers(0, 255, (count, 8, 8, 1), np.uint8),
            label=rng.integers(0, 2, count),
        )
    return tmp_path


def own_data(files, train="train.npz", name="patients"):
    return {
        "source": "npz",
        "path": str(files),
        "name": name,
        "num_classes": 2,
        "parts": {"public": "", "private": train, "test": "test.npz"},
        "crop_padding": 0,
        "flip": False,
    }


def queries(files, *epsilons, **fields):
    return ConfigDict({"data": own_data(files, **fields), "epsilons": epsilons or (0.6,)})


class Place(NamedTuple):
    """A release whose note lies in a folder."""

    folder: str


def account_of(cell, work):
    terms = {**data.terms(work.config.data), "records": RECORDS, "epsilon": BUDGET, "delta": 0.0}
    (records,) = work.study.private(work.shared)
    return work.account(records.name, label=cell.folder, **terms)


def release(cell, work):
    own = work.folder(cell)
    folders = {"own": own, "deleted": own / "scratch" / "1", "shared": work.root / "shared"}
    what = {"label": "release", "facts": lambda: [cell.folder], "compute": lambda secret: None}
    with account_of(cell, work) as account, Till(folders[cell.folder]) as till:
        till.release(Release(charges=[(account, PureDpEvent(0.3))], **what))
        assert (own / "code.json").exists()
    return {"answer": 1}


RELEASES = dataclasses.replace(
    QUERIES,
    name="releases",
    cells=lambda config: map(Place, ("own", "deleted", "shared")),
    account=account_of,
    run=release,
)


def spends(path):
    with Ledger(path, read_only=True) as ledger:
        return len(ledger.history())


def test_a_second_workdir_spends_from_the_same_budget(files, home):
    """The promise of README: epsilon is that of all runs, and the second run has no room."""
    frame.run(QUERIES, queries(files), files / "a")
    with pytest.raises(BudgetExceeded) as error:
        frame.run(QUERIES, queries(files), files / "b")
    (note,) = error.value.__notes__
    assert "counts for all runs" in note and "delete" not in note
    frame.run(QUERIES, queries(files, 0.3), files / "c")
    assert spends(home / "patients.sqlite") == 2
    assert not (files / "b" / "result.json").exists()


def test_ledgers_of_workdirs_do_not_see_each_other(files, home, monkeypatch):
    """The twin: without digests of records nobody notices the second budget."""
    monkeypatch.setenv("JAXDP_RECORD_DIGESTS", "0")
    for workdir in ("a", "b"):
        frame.run(QUERIES, queries(files), files / workdir)
        assert spends(files / workdir / "ledger.sqlite") == 1
    assert not home.exists()


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("is_registered", [True, False])
def test_a_restored_ledger_is_charged_for_cells_that_are_done(
    files, capsys, is_registered, is_finished
):
    path, workdir = files / "patients.sqlite", files / "a"
    choice = frame.Choice(path)
    if is_registered:
        frame.run(QUERIES, queries(files, 0.05), files / "earlier", choice=choice)
    Ledger(path).backup(files / "backup.sqlite")
    result = frame.run(RELEASES, queries(files), workdir, choice=choice)
    before = charges(path)
    assert len(before) == 3 + is_registered and not list(workdir.rglob("scratch"))
    restore(files / "backup.sqlite", path)
    assert charges(path) != before
    if not is_finished:
        (workdir / "result.json").unlink()
    assert frame.run(RELEASES, queries(files), workdir) == result
    assert charges(path) == before
    assert capsys.readouterr().out.count("has been charged for what") == 3
    # The twin: nothing is lacking now, so nothing is read or written.
    kept = {file: file.read_bytes() for file in files.rglob("*") if file.is_file()}
    assert frame.run(dataclasses.replace(RELEASES, open=None), queries(files), workdir) == result
    assert "There is nothing to do" in capsys.readouterr().out
    assert kept == {file: file.read_bytes() for file in files.rglob("*") if file.is_file()}


def test_a_restored_ledger_without_room_ends_a_finished_run(files):
    path, workdir = files / "patients.sqlite", files / "a"
    choice = frame.Choice(path)
    Ledger(path).backup(files / "backup.sqlite")
    frame.run(RELEASES, queries(files), workdir, choice=choice)
    restore(files / "backup.sqlite", path)
    frame.run(QUERIES, queries(files, 0.9), files / "other", choice=choice)
    kept = {file: file.read_bytes() for file in workdir.rglob("*") if file.is_file()}
    with pytest.raises(BudgetExceeded) as error:
        frame.run(RELEASES, queries(files), workdir)
    assert "lacks and has no room for" in error.value.__notes__[-1]
    assert spends(path) == 1
    assert kept == {file: file.read_bytes() for file in workdir.rglob("*") if file.is_file()}


def test_cells_that_were_set_aside_are_charged_too(files):
    """What a cell released stays released when the cell is computed again."""
    path, workdir = files / "patients.sqlite", files / "a"
    Ledger(path).backup(files / "backup.sqlite")
    study = dataclasses.replace(RELEASES, cells=lambda config: [Place("own")])
    frame.run(study, queries(files), workdir, choice=frame.Choice(path))
    (workdir / "cells" / "own" / "code.json").unlink()  # as of an earlier version
    frame.run(study, queries(files), workdir, stale="redo_all")
    assert spends(path) == 2 and (workdir / "stale").exists()
    before = charges(path)
    restore(files / "backup.sqlite", path)
    frame.run(study, queries(files), workdir)
    assert charges(path) == before


def test_a_mark_that_a_ledger_lacks_is_missed(tmp_path):
    """A finished run marks its chunks again, so that no copy of it goes on for free."""
    event = PureDpEvent(0.1)
    rows = [
        {"token": "first", "charges": [["data", to_json(event)]], "first_step": 0, "next_step": 2},
        {"token": "second", "charges": [], "first_step": 2, "next_step": 4},
    ]
    with MetricsWriter(tmp_path / "cells" / "private" / "charges.jsonl") as writer:
        for row in rows:
            writer.write(0, **row)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        assert lacking(tmp_path, path) == [tmp_path / "cells" / "private"]
        ledger.register("data", adjacency="add_remove", unit="example")
        with ledger.spend("data", event, token="first"):
            pass
        assert lacking(tmp_path, path) == [tmp_path / "cells" / "private"]
        mark_again(rows, ledger.account("data"))
    assert lacking(tmp_path, path) == []


PEOPLE = {"owner": "Cardiology", "contact": "data@clinic.example"}


@pytest.mark.slow
def test_the_config_says_whom_to_ask_and_the_ledger_keeps_it(files, home):
    """Twins: the first run says nothing, so nothing is in the ledger. The third says another name,
    which the ledger does not take.
    """
    config = queries(files, 0.1)
    frame.run(QUERIES, config, files / "a")
    with Ledger(home / "patients.sqlite") as ledger:
        assert not any(ledger.contacts("patients/train.npz").values())
    config.data.update(PEOPLE)
    frame.run(QUERIES, config, files / "b")
    config.data.owner = "Radiology"
    with pytest.warns(PrivacyWarning, match="has owner 'Cardiology' in its ledger"):
        frame.run(QUERIES, config, files / "c")
    with Ledger(home / "patients.sqlite") as ledger:
        described = ledger.contacts("patients/train.npz")
        assert PEOPLE.items() <= described.items()
        assert len(ledger.contact_history()) == 1  # one row for both fields, none for another name


def test_a_workdir_from_before_goes_on_with_whom_to_ask(files):
    config = queries(files, 0.1)
    with frame.bind("queries", config, files / "a"):
        (files / "a" / "file").touch()
    config.data.update(PEOPLE)
    frame.check_same_config("queries", config, files / "a")
    config.data.path = "elsewhere"
    with pytest.raises(ValueError, match=r"another data\.path\. Use"):
        frame.check_same_config("queries", config, files / "a")


def test_whom_to_ask_is_one_line(files, home):
    config = queries(files)
    config.data.owner = "Cardiology\nWard 3"
    with pytest.raises(ValueError, match=r"config\.data\.owner must be one line of at most 500"):
        frame.run(QUERIES, config, files / "a")
    assert not (files / "a").exists() and not home.exists()


@pytest.mark.slow
def test_the_private_set_of_a_lifecycle_says_whom_to_ask():
    config = lifecycle_digits.get_config()
    config.data.update(PEOPLE)
    named = life.accounts(config)
    assert PEOPLE.items() <= named.pop("digits/private").items()
    assert not any(PEOPLE.keys() & terms.keys() for terms in named.values())  # of other parties


def test_every_config_of_a_private_set_asks_whom_to_ask():
    for path in CONFIGS.rglob("*.py"):
        if re.search(r'^ +"unit": "example"', path.read_text(), re.MULTILINE):
            assert "**PEOPLE" in path.read_text(), path


@pytest.mark.slow
def test_fine_tuning_twice_does_not_fit_one_budget(files, home):
    config = digits_dpsgd.get_config()
    config.data = own_data(files)
    config.references = False
    config.model.options.widths = (4,)
    config.pretrain.steps = 0
    config.private.update({"steps": 2, "batch_size": 24, "physical_batch_size": 48, "augmult": 0})
    finetune.experiment(config, files / "a")
    with pytest.raises(BudgetExceeded):
        finetune.experiment(config, files / "b")
    assert spends(home / "patients.sqlite") == 1
    assert not (files / "a" / "ledger.sqlite").exists()


def test_another_name_or_a_part_of_the_records_is_recognised(files, home):
    frame.run(QUERIES, queries(files), files / "a")
    with np.load(files / "train.npz") as arrays:
        np.savez(files / "some.npz", **{name: array[10:40] for name, array in arrays.items()})
    config = queries(files, train="some.npz", name="others")
    for choice in (frame.DEFAULT, frame.Choice(files / "own.sqlite")):
        with pytest.raises(ValueError, match="30 of these 30 records") as error:
            frame.run(QUERIES, config, files / "b", choice=choice)
        assert "patients/train.npz" in str(error.value) and "--new_ledger" in str(error.value)
    assert not (files / "b").exists() and not (files / "own.sqlite").exists()
    assert spends(home / "patients.sqlite") == 1


def test_a_name_does_not_stand_for_other_records(files, home):
    frame.run(QUERIES, queries(files, 0.3), files / "a")
    rng = np.random.default_rng(1)
    np.savez(
        files / "train.npz",
        image=rng.integers(0, 255, (RECORDS, 8, 8, 1), np.uint8),
        label=rng.integers(0, 2, RECORDS),
    )
    with pytest.raises(ValueError, match="stands for other records"):
        frame.run(QUERIES, queries(files, 0.3), files / "b")
    assert spends(home / "patients.sqlite") == 1


def test_a_set_that_grows_keeps_its_ledger(files, home):
    frame.run(QUERIES, queries(files, 0.3), files / "a")
    with np.load(files / "train.npz") as arrays:
        image, label = arrays["image"], arrays["label"]
    new = np.zeros((1, *image.shape[1:]), np.uint8)
    np.savez(
        files / "train.npz",
        image=np.concatenate([image, new]),
        label=np.concatenate([label, label[:1]]),
    )
    frame.run(QUERIES, queries(files, 0.3), files / "b")
    assert spends(home / "patients.sqlite") == 2


def test_a_resumed_run_looks_at_its_records_again(files, home):
    """Added records are claimed too. Records that were replaced are refused, and nothing is
    spent."""
    with np.load(files / "train.npz") as arrays:
        before = dict(arrays)

    def interrupted(cell, work):
        if cell.epsilon == 0.2:
            raise KeyboardInterrupt
        return ask(cell, work)

    study = dataclasses.replace(QUERIES, run=interrupted)
    with pytest.raises(KeyboardInterrupt):
        frame.run(study, queries(files, 0.3, 0.2), files / "a")
    rng = np.random.default_rng(1)
    added = {name: rng.integers(0, 2, array.shape, np.uint8) for name, array in before.items()}
    np.savez(files / "train.npz", **added)
    with pytest.raises(ValueError, match="stands for other records"):
        frame.run(QUERIES, queries(files, 0.3, 0.2), files / "a")
    assert spends(home / "patients.sqlite") == 1
    grown = {name: np.concatenate([before[name], added[name]]) for name in before}
    np.savez(files / "train.npz", **grown)
    frame.run(QUERIES, queries(files, 0.3, 0.2), files / "a")
    assert spends(home / "patients.sqlite") == 2
    np.savez(files / "added.npz", **added)
    with pytest.raises(ValueError, match="96 of these 96 records are"):
        frame.run(QUERIES, queries(files, train="added.npz", name="others"), files / "b")


def test_records_are_counted_anew_where_the_user_says_so(files, home):
    frame.run(QUERIES, queries(files), files / "a")
    choice = frame.Choice(files / "own.sqlite", count_anew=True)
    frame.run(QUERIES, queries(files), files / "b", choice=choice)
    assert spends(files / "own.sqlite") == spends(home / "patients.sqlite") == 1


def test_a_report_says_which_ledger_counts_and_whether_others_spent(files, home):
    home.mkdir()
    with Ledger(home / "patients.sqlite") as ledger:  # by the owner, with a larger budget
        ledger.register(
            "patients/train.npz", adjacency="add_remove", unit="example", epsilon=8.0, delta=0.0
        )
    frame.run(QUERIES, queries(files), files / "a")
    page = (files / "a" / "report.html").read_text()
    assert str(home / "patients.sqlite") in page and "No other run spent" in page
    frame.run(QUERIES, queries(files, 0.7), files / "b")
    books = json.loads((files / "a" / "config.json").read_text())
    assert books["ledger"] == str(home / "patients.sqlite")
    (files / "a" / "config.json").write_text(json.dumps(books | {"study": "finetune"}))
    assert (
        "1 other run spent from" in run_report.write(files / "a", report=QUERIES.report).read_text()
    )
    kept = json.loads((files / "a" / "ledger.json").read_text())
    assert [entry["budget"] for entry in kept["datasets"]] == [8.0]


def test_a_workdir_keeps_its_ledger(files, monkeypatch):
    first, config = files / "first.sqlite", queries(files)
    frame.run(QUERIES, config, files / "a", choice=frame.Choice(first))
    with pytest.raises(ValueError, match=r"first\.sqlite.*pays for this workdir"):
        frame.run(QUERIES, config, files / "a", choice=frame.Choice(files / "second.sqlite"))
    monkeypatch.setenv("JAXDP_LEDGER", str(files / "third.sqlite"))
    frame.run(QUERIES, config, files / "a")
    assert not (files / "second.sqlite").exists() and not (files / "third.sqlite").exists()


def test_a_ledger_that_is_gone_is_not_made_again(files, home):
    frame.run(QUERIES, queries(files), files / "a")
    for path in home.glob("patients.sqlite*"):
        path.unlink()
    for workdir in ("a", "b"):
        with pytest.raises(ValueError, match="gone"):
            frame.run(QUERIES, queries(files), files / workdir)
    assert not (home / "patients.sqlite").exists()


def test_a_folder_that_is_not_there_is_refused_before_anything_is_noted(files, home):
    with pytest.raises(ValueError, match="--ledger must be in a folder that exists"):
        frame.run(
            QUERIES,
            queries(files),
            files / "a",
            choice=frame.Choice(files / "no" / "ledger.sqlite"),
        )
    frame.run(QUERIES, queries(files), files / "a")
    assert spends(home / "patients.sqlite") == 1


def test_an_environment_variable_names_the_ledger(files, monkeypatch):
    monkeypatch.setenv("JAXDP_LEDGER", str(files / "office.sqlite"))
    frame.run(QUERIES, queries(files), files / "a")
    assert spends(files / "office.sqlite") == 1
    assert not (files / "a" / "ledger.sqlite").exists()


def test_public_records_are_counted_in_the_workdir(files, home):
    config = queries(files)
    config.data = digits_dpsgd.get_config().data
    config.data.parts = {"private": RECORDS}
    for workdir in ("a", "b", "a"):
        frame.run(QUERIES, config, files / workdir)
        assert spends(files / workdir / "ledger.sqlite") == 1
    assert not home.exists()


def test_the_registry_is_for_its_owner_only(files, home):
    frame.run(QUERIES, queries(files), files / "a")
    assert os.stat(home / "registry.sqlite").st_mode & 0o077 == 0


def test_a_study_with_ledgers_of_its_own_refuses_one(files):
    with pytest.raises(ValueError, match="--ledger"):
        frame.run(
            adapt.STUDY,
            tta_digits.get_config(),
            files / "a",
            choice=frame.Choice(files / "x.sqlite"),
        )


def test_which_records_are_public():
    assert DataSpec(source="bundled").is_public
    for name in ("cifar10", "cifar10_corrupted/fog_5", "cifar10:3.0.2"):
        assert DataSpec(source="tfds", name=name).is_public
    assert not DataSpec(source="tfds", name="chest_scans/small").is_public
    assert not any(DataSpec(source=source).is_public for source in ("npz", "folder", "hf", "a:b"))


def hospital_file(path, count=RECORDS):
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=(RECORDS, 5)), rng.integers(0, 5, RECORDS)
    np.savez(path, logits=logits[:count], labels=labels[:count])
    return path


def begin(records, workdir, choice=frame.DEFAULT):
    config = hospital_configs.get_config()
    config.client.records = str(records)
    with hospitals.Hospital(config, workdir, choice=choice):
        return config


def test_a_hospital_has_one_ledger_for_its_records(tmp_path, home):
    records = hospital_file(tmp_path / "ward.npz")
    (tmp_path / "copies").mkdir()
    begin(records, tmp_path / "a")
    begin(records, tmp_path / "b")
    with Ledger(home / "ward.sqlite", read_only=True) as ledger:
        assert [entry["name"] for entry in ledger.report()["datasets"]] == ["ward"]
    assert not list(tmp_path.glob("[ab]/*.sqlite"))
    copy = hospital_file(tmp_path / "copies" / "others.npz", count=40)
    for choice in (frame.DEFAULT, frame.Choice(tmp_path / "own.sqlite")):
        with pytest.raises(ValueError, match="40 of these 40 records"):
            begin(copy, tmp_path / "c", choice)
    assert not (tmp_path / "c").exists() and not (tmp_path / "own.sqlite").exists()
    begin(copy, tmp_path / "c", frame.Choice(tmp_path / "own.sqlite", count_anew=True))
    bound = json.loads((tmp_path / "c" / "config.json").read_text())
    assert bound["ledger"] == str(tmp_path / "own.sqlite")


def test_the_dry_run_of_a_hospital_names_the_ledger(tmp_path, home):
    records = hospital_file(tmp_path / "ward.npz")
    config = begin(records, tmp_path / "a")
    (charge,) = hospitals.charges(config, tmp_path / "b")
    assert charge.ledger == str(home / "ward.sqlite") and charge.dataset == "ward"
