"""The contract of the frame: a toy study is kept, resumed and shared, and every study refuses
mistakes."""

import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import sys
import time
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxdp import memory, tta
from jaxdp.compilers import targets
from jaxdp.privacy import BudgetExceeded, GaussianDpEvent, Ledger
from launch import adapt, dpadapter, finetune, frame, predict, pretrain, recalibrate, split
from launch.frame import code
from launch.frame import program as frame_program
from tests import forked
from tests.launch import program, tiny


class Sum(NamedTuple):
    kind: str
    number: float


def config(**changes):
    return ConfigDict(
        {
            "kinds": ("a b", "c"),
            "numbers": (1.0, 2.5),
            "public_benchmark": True,
            "steps": 3,
            **changes,
        }
    )


def opened(config, root):
    frame.known("kinds", config.kinds, ("a b", "c", "slow", "spends", "a_b"))
    return {"runs": []}


def run_one(cell, work):
    work.shared["runs"].append(cell)
    if cell.kind == "slow":
        (work.root / "started").touch()
        time.sleep(60)
    if cell.kind == "spends":
        account = frame.account(work.root / "ledger.sqlite", "toy", epsilon=1e-3, delta=1e-5)
        with account as pays, pays.spend(GaussianDpEvent(1.0)):
            pass
    (work.folder(cell) / "scratch").mkdir()
    shared = work.arrays(
        f"arrays/{frame.file_name(cell.kind)}.npz", lambda: {"factor": np.array(2.0)}
    )
    return {"value": float(shared["factor"]) * cell.number}


STUDY = frame.Study(
    name="toy",
    open=opened,
    cells=lambda config: (Sum(kind, number) for kind in config.kinds for number in config.numbers),
    run=run_one,
    result=lambda rows, work: {"total": sum(row["value"] for row in rows)},
    summary=lambda result: f"total {result['total']}",
    tables=lambda result, work: {
        "Total": [{"name": "50 % & more", "total": result["total"]}],
        "note": "A note.",
    },
    figures=lambda result, work: (work.root / "figure.png").touch(),
    benchmark="Use another function for private data.",
)


def contents(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_run_leaves_rows_tables_and_its_result(tmp_path, capsys):
    result = frame.run(STUDY, config(), tmp_path)
    assert result == {"total": 14.0} == json.loads((tmp_path / "result.json").read_text())
    assert json.loads((tmp_path / "cells" / "a_b" / "2.5" / "row.json").read_text()) == {
        **{"kind": "a b", "number": 2.5, "value": 5.0}
    }
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["value"]) for row in rows] == [
        ("a b", 2),
        ("a b", 5),
        ("c", 2),
        ("c", 5),
    ]
    assert (
        "## Total" in (tmp_path / "tables.md").read_text()
        and "A note." in (tmp_path / "tables.md").read_text()
    )
    latex = (tmp_path / "tables.tex").read_text()
    assert r"50 \% \& more & 14" in latex and "A note" not in latex
    assert (tmp_path / "figure.png").exists() and not list(tmp_path.rglob("scratch"))
    assert "total 14.0" in capsys.readouterr().out


def test_a_finished_run_does_nothing(tmp_path, capsys):
    frame.run(STUDY, config(), tmp_path)
    before = contents(tmp_path)
    assert frame.run(STUDY, config(), tmp_path) == {"total": 14.0}
    assert "holds a finished run. There is nothing to do.\n\ntotal 14.0" in capsys.readouterr().out
    assert contents(tmp_path) == before


def test_an_interrupted_run_goes_on_with_the_next_cell(tmp_path):
    runs = []

    def interrupted(cell, work):
        runs.append(cell)
        if len(runs) == 3:
            raise KeyboardInterrupt
        return run_one(cell, work)

    study = dataclasses.replace(STUDY, run=interrupted)
    with pytest.raises(KeyboardInterrupt):
        frame.run(study, config(), tmp_path)
    assert not (tmp_path / "result.json").exists()
    kept = contents(tmp_path / "cells" / "a_b") | contents(tmp_path / "arrays")
    assert tmp_path / "arrays" / "a_b.npz" in kept
    assert frame.run(study, config(), tmp_path) == {"total": 14.0}
    assert kept.items() <= contents(tmp_path).items()
    assert runs == [
        *frame.distinct(STUDY.cells(config()))[:3],
        *frame.distinct(STUDY.cells(config()))[2:],
    ]


def test_every_cell_makes_room_for_its_programs_first(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(memory, "make_room_for_programs", lambda: order.append("room"))
    study = dataclasses.replace(STUDY, run=lambda *cell: order.append("cell") or run_one(*cell))
    frame.run(study, config(), tmp_path)
    assert order == ["room", "cell"] * 4


def test_a_study_that_grows_takes_more_cells(tmp_path):
    def grows(config):
        part = ConfigDict(config.to_dict())
        del part.numbers
        return part

    growing = dataclasses.replace(STUDY, grows=grows)
    frame.run(growing, config(), tmp_path)
    kept = contents(tmp_path / "cells")
    assert frame.run(growing, config(numbers=(1.0, 2.5, 10.0)), tmp_path) == {"total": 54.0}
    assert kept.items() <= contents(tmp_path / "cells").items()
    with pytest.raises(ValueError, match=r"another steps\. Use a new workdir"):
        frame.run(growing, config(steps=4), tmp_path)


METHOD = """
from helper import factor
'''A method.'''
class Mine:
    # of two numbers
    def apply(self, number):
        '''doubled'''
        return factor * number
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes the module of a registered method and the module that this one imports, and loads
    them as a new process would."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def edit(method=METHOD, helper="factor = 2\n"):
        (folder / "mine.py").write_text(method)
        (folder / "helper.py").write_text(helper)
        for name in ("mine", "helper"):
            sys.modules.pop(name, None)
            importlib.invalidate_caches()
        module = importlib.import_module("mine")
        monkeypatch.setitem(tta.METHODS, "Mine", module.Mine)

    edit()
    yield edit
    for name in ("mine", "helper"):
        sys.modules.pop(name, None)


def _applied(cell, work):
    work.shared["runs"].append(cell.kind)
    method = tta.METHODS["Mine"]() if cell.kind == "Mine" else None
    return {"value": method.apply(cell.number) if method else cell.number}


def _of_methods(root, stale="", numbers=(1.0,), tables=None, **options):
    """Returns the values of a study of a registered method and a plain one, and what it ran."""
    runs = []
    study = dataclasses.replace(
        STUDY,
        open=lambda config, root: {"runs": runs},
        run=_applied,
        result=lambda rows, work: {row["kind"]: row["value"] for row in rows},
        summary=str,
        tables=lambda result, work: tables or {},
    )
    terms = config(kinds=("Mine", "plain"), numbers=numbers)
    return frame.run(study, terms, root, stale=stale, **options), runs


def test_an_edited_method_is_not_taken_for_the_one_that_made_the_results(tmp_path, mine, capsys):
    root = tmp_path / "run"
    assert _of_methods(root) == ({"Mine": 2.0, "plain": 1.0}, ["Mine", "plain"])
    mine()  # The same text is the same code.
    assert _of_methods(root)[1] == []
    mine(METHOD.replace("# of two numbers", "# of three").replace("doubled", "tripled"))
    assert _of_methods(root)[1] == []
    for edited in ({"method": METHOD.replace("factor * n", "3 * n")}, {"helper": "factor = 3\n"}):
        mine(**edited)
        name = "mine" if "method" in edited else "helper"
        before = contents(root)
        for dry_run in (True, False):
            with pytest.raises(ValueError, match=rf"1 of 2 cells .* before {name} changed.*redo"):
                _of_methods(root, dry_run=dry_run)
        assert _of_methods(root, "keep") == ({"Mine": 2.0, "plain": 1.0}, [])
        assert contents(root) == before and "1 of 2 cells are of other code" in str(
            capsys.readouterr()
        )
    assert _of_methods(root, "redo") == ({"Mine": 3.0, "plain": 1.0}, ["Mine"])
    assert json.loads((root / "stale/1/cells/Mine/1/row.json").read_text())["value"] == 2.0
    assert json.loads((root / "stale/1/result.json").read_text())["Mine"] == 2.0
    assert _of_methods(root)[1] == []


def test_an_edited_function_that_the_config_names_is_noticed_by_the_next_process(tmp_path, mine):
    """The next process has not imported its module when it compares the code."""
    terms = config(kinds=("plain",), numbers=(1.0,))
    with terms.unlocked():
        terms.source = "mine:factor"
    study = dataclasses.replace(
        STUDY,
        open=lambda config, root: importlib.import_module("mine"),
        run=lambda cell, work: {"value": work.shared.factor * cell.number},
    )

    def run_in_the_next_process():
        for name in ("mine", "helper"):
            sys.modules.pop(name, None)
        return frame.run(study, terms, tmp_path / "run")

    for _ in range(2):
        assert run_in_the_next_process() == {"total": 2.0}
    for edited in ({"method": METHOD.replace("factor * n", "3 * n")}, {"helper": "factor = 3\n"}):
        mine(**edited)
        with pytest.raises(ValueError, match=r"1 of 1 cells .* changed.*redo"):
            run_in_the_next_process()


def test_results_that_were_set_aside_stay_although_older_ones_are_deleted(tmp_path, mine):
    root = tmp_path / "run"
    _of_methods(root)
    for factor in (3, 4):
        mine(helper=f"factor = {factor}\n")
        _of_methods(root, "redo")
    shutil.rmtree(root / "stale" / "1")
    mine(helper="factor = 5\n")
    assert _of_methods(root, "redo")[0]["Mine"] == 5.0
    for number, value in ((2, 3.0), (3, 4.0)):
        aside = root / "stale" / str(number)
        assert json.loads((aside / "cells/Mine/1/row.json").read_text())["value"] == value
        assert json.loads((aside / "result.json").read_text())["Mine"] == value


def test_rows_of_different_code_are_named_in_the_tables(tmp_path, mine):
    root = tmp_path / "run"
    _of_methods(root, numbers=(1.0, 2.0))
    shutil.rmtree(root / "cells" / "Mine" / "2")
    (root / "result.json").unlink()
    mine(helper="factor = 3\n")
    assert not (root / "tables.md").exists()
    assert _of_methods(root, "keep", numbers=(1.0, 2.0))[1] == ["Mine"]
    assert "of different code: helper changed between them" in (root / "tables.md").read_text()


def test_rows_that_are_all_of_earlier_code_say_so_in_their_tables(tmp_path, mine):
    """The sentence goes when the code is again what it was."""
    root = tmp_path / "run"
    tables = {"values": [{"kind": "Mine", "value": 2.0}]}
    assert _of_methods(root, tables=tables)[1] == ["Mine", "plain"]
    before = (root / "tables.md").read_text()
    assert "code" not in before
    mine(helper="factor = 3\n")
    assert _of_methods(root, "keep", tables=tables)[1] == []
    assert "of earlier code: helper changed after them" in (root / "tables.md").read_text()
    mine()
    assert _of_methods(root, "keep", tables=tables)[1] == []
    assert (root / "tables.md").read_text() == before


def test_a_method_that_the_config_names_by_a_label_counts_for_its_cells_only(mine):
    """Its twin has no entries for the cells, so every method of the config counts for every
    cell."""
    terms = config(kinds=("ours", "plain"))
    with terms.unlocked():
        terms.methods = {"ours": {"method": "Mine"}, "plain": {}}
    cells = list(STUDY.cells(terms))
    codes = code.of(STUDY, terms, cells)
    assert {cell.kind for cell in cells if "mine" in codes[cell].modules} == {"ours"}
    with terms.unlocked():
        terms.methods = {"another": {"method": "Mine"}}
    codes = code.of(STUDY, terms, cells)
    assert all("mine" in codes[cell].modules for cell in cells)
    table = tiny.dpadapter()
    cells = list(dpadapter.STUDY.cells(table))
    codes = code.of(dpadapter.STUDY, table, cells)
    older = {cell.method for cell in cells if "jaxdp.finetune.gep" in codes[cell].modules}
    assert older == {"GEP"} and {cell.method for cell in cells} == {"DP-SGD", "GEP"}


def test_another_source_of_jaxdp_is_told_and_older_cells_say_that_they_do_not_know(
    tmp_path, mine, capsys, monkeypatch
):
    root = tmp_path / "run"
    _of_methods(root)
    (root / "cells" / "plain" / "1" / "code.json").unlink()  # as earlier versions left it
    monkeypatch.setattr(frame.code, "_library", lambda: ["0.0", "of another source"])
    capsys.readouterr()
    assert _of_methods(root)[1] == []
    told = capsys.readouterr().out
    assert "1 of 2 cells do not say which code computed them" in told
    assert "1 of 2 cells were computed by another source of jaxdp" in told
    assert _of_methods(root, "redo_all")[1] == ["Mine", "plain"]
    assert {path.name for path in (root / "stale" / "1").iterdir()} >= {"cells", "rows.jsonl"}
    with pytest.raises(ValueError, match="--stale must be one of keep, redo, redo_all, got 'no'"):
        _of_methods(root, "no")


def test_what_is_computed_again_pays_the_ledger_of_the_workdir_again(tmp_path, mine):
    def pays(cell, work):
        with (
            frame.account(work.root / "ledger.sqlite", "toy", epsilon=9.0, delta=1e-5) as account,
            account.spend(GaussianDpEvent(1.0)),
        ):
            return {"value": tta.METHODS["Mine"]().apply(cell.number)}

    study = dataclasses.replace(STUDY, open=lambda config, root: None, run=pays)
    terms = config(kinds=("Mine",), numbers=(1.0,))
    frame.run(study, terms, tmp_path / "run")
    mine(helper="factor = 3\n")
    with pytest.raises(ValueError, match="which pays again"):
        frame.run(study, terms, tmp_path / "run")
    assert frame.run(study, terms, tmp_path / "run", stale="redo") == {"total": 3.0}
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        (toy,) = ledger.report()["datasets"]
    assert [row["spends"] for row in toy["spends"]] == [2]


@pytest.mark.parametrize(
    ("library", "extra"),
    [("matplotlib", "plots"), ("jinja2", "report"), ("tensorboardX", "tensorboard")],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_library_that_is_needed_at_the_end_is_missed_at_the_start(
    tmp_path, monkeypatch, library, extra, dry_run
):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library} is needed here .*\[{extra}\]"):
        frame.run(STUDY, config(watch="tensorboard"), tmp_path / "run", dry_run=dry_run)
    assert not (tmp_path / "run").exists()


def test_a_watch_of_none_watches_nothing(tmp_path):
    frame.check_watch(config(watch=None))
    with frame.watching(config(watch=None), tmp_path) as writers:
        assert writers == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "config.steps must be an integer of at least 1, got 0"),
        ({"kinds": ("d",)}, "config.kinds has 'd', which is not one of a b, c"),
        ({"kinds": ("a b", "a_b")}, "two cells with the same folder name"),
        (
            {"public_benchmark": False},
            "config.public_benchmark must be True .* Use another function",
        ),
    ],
)
def test_a_refused_config_leaves_no_trace(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        frame.run(STUDY, config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_workdir_belongs_to_one_study_config_and_release(tmp_path):
    frame.run(STUDY, config(), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"another numbers, steps\. Use a new workdir"):
        frame.run(STUDY, config(numbers=(3.0,), steps=4), tmp_path)
    with pytest.raises(ValueError, match="belongs to the study 'toy', not to 'finetune'"):
        frame.check_same_config("finetune", config(), tmp_path)
    assert contents(tmp_path) == before
    # as the first releases wrote it
    (tmp_path / "config.json").write_text(json.dumps(config().to_dict()))
    with pytest.raises(ValueError, match="was made by another release of jaxdp"):
        frame.run(STUDY, config(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        frame.run(STUDY, config(), tmp_path)


def test_a_workdir_of_before_parts_goes_on_without_them(tmp_path):
    with frame.bind("toy", config(private={"clip_norm": 1.0}), tmp_path):
        (tmp_path / "row.json").touch()
    later = config(private={"clip_norm": 1.0, "clip_parts": ""})
    frame.check_same_config("toy", later, tmp_path)
    later.private.clip_parts = "uniform"
    with pytest.raises(ValueError, match=r"another private\.clip_parts"):
        frame.check_same_config("toy", later, tmp_path)


def test_a_late_mistake_can_be_corrected_in_the_same_workdir(tmp_path):
    def fails(cell, work):
        raise ValueError("the model does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        frame.run(dataclasses.replace(STUDY, run=fails), config(), tmp_path)
    assert frame.run(STUDY, config(steps=4), tmp_path) == {"total": 14.0}


def test_a_workdir_in_which_nothing_was_made_is_free_again(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match="does not fit"), frame.bind("toy", config(), tmp_path):
        assert path.exists()
        (tmp_path / "lock").touch()
        (tmp_path / "empty").mkdir()
        raise ValueError("the model does not fit the images")
    assert not path.exists()
    with pytest.raises(KeyboardInterrupt), frame.bind("toy", config(), tmp_path):
        (tmp_path / "source.safetensors").touch()
        raise KeyboardInterrupt
    (tmp_path / "source.safetensors").unlink()
    with pytest.raises(ValueError, match="later"), frame.bind("toy", config(), tmp_path):
        raise ValueError("later")
    assert path.exists()  # it was bound before


def test_what_cannot_be_paid_says_what_to_do(tmp_path):
    with pytest.raises(BudgetExceeded) as caught:
        frame.run(STUDY, config(kinds=("spends",)), tmp_path)
    assert any("delete the folder" in note for note in caught.value.__notes__)
    assert not (tmp_path / "result.json").exists()


def _other(root):
    frame.run(STUDY, config(kinds=("slow", "c"), numbers=(1.0,)), root)


@pytest.mark.slow
def test_a_cell_that_another_process_holds_is_left_to_it_and_a_killed_one_is_run_again(
    tmp_path, monkeypatch
):
    other = multiprocessing.get_context("spawn").Process(target=_other, args=(tmp_path,))
    other.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    order, row = [], frame.Work.row

    def watched(work, cell, *, wait=True):
        found = row(work, cell, wait=wait)
        order.append(cell.kind)
        if cell.kind == "c":
            os.kill(other.pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(frame.Work, "row", watched)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    result = frame.run(STUDY, config(kinds=("slow", "c"), numbers=(1.0,)), tmp_path)
    other.join()
    assert result == {"total": 4.0} and order[:2] == ["c", "slow"]


# --- All studies --------------------------------------------------------------------------------

STUDIES = {
    "finetune": (finetune.STUDY, tiny.finetune),
    "table": (dpadapter.STUDY, tiny.dpadapter),
    "pretrain": (pretrain.STUDY, tiny.pretrain),
    "adapt": (adapt.STUDY, tiny.adapt),
    "predict": (predict.STUDY, tiny.predict),
    "recalibrate": (recalibrate.STUDY, tiny.recalibrate),
    "split": (split.STUDY, tiny.split),
}


def changed(config, fields):
    for name, value in fields.items():
        *parents, last = name.split(".")
        part = config
        for parent in parents:
            part = part[parent]
        with config.unlocked(), part.unlocked(), part.ignore_type():
            part[last] = value
    return config


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_data(name):
    study, make = STUDIES[name]
    assert isinstance(study, frame.Study) and study.name == name
    cells = frame.distinct(study.cells(make()))
    assert cells and all(cell._asdict() for cell in cells)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_refuses_another_config_in_its_workdir(name, tmp_path):
    study, make = STUDIES[name]
    with frame.bind(study.name, study.grows(make()) if study.grows else make(), tmp_path):
        pass
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"another unknown\. Use a new workdir"):
        frame.run(study, changed(make(), {"unknown": 1}), tmp_path)
    assert contents(tmp_path) == before


TFDS_OR_NPZ = (
    "config.data.source must be 'bundled', 'tfds', .* or 'package.module:function', got 'web'"
)
UNEVEN = {"records": 40, "epsilon": 1.0, "sources": (3,)}
GRID = r"config\.grids\.small\.{} has '{}', which is not one of"
# By study: a field, its value, and the message. Before a blank or a point it names the field.
MISTAKES = {
    "finetune": [
        (
            "private.schedule",
            "staircase",
            " has 'staircase', which is not one of constant, cosine, linear, warmup",
        ),
        ("private.batch_size", 2000, " must be at most 1168, .* examples, got 2000"),
        ("private.accountant", "moments", " must be one of .*, got 'moments'"),
        ("private.clip_norm", 0.0, " must be between 1e-08 and 1e.08"),
        ("pretrain.steps", 0, " must be at least 1 with public examples"),
        ("data.parts.test", 1e-5, " must have at least one record"),
        ("data.source", "web", TFDS_OR_NPZ),
        (
            "data.name",
            "breast_cancer",
            "'breast_cancer/p.*' has no column 'image'. It has features",
        ),
        (
            "data.crop_padding",
            0,
            "config.private.augmult must be at least 1, and 1 without augment",
        ),
    ],
    "table": [
        ("grids.small.upstreams", ("nothing",), GRID.format("upstreams", "nothing")),
        ("grids.small.methods", ("SGD",), GRID.format("methods", "SGD")),
        ("grids.small.sets", ("digits", "letters"), GRID.format("sets", "letters")),
        (
            "grids.small.comparisons",
            (("method", "GEP", "DP-SDG"),),
            GRID.format("comparisons", "DP-SDG"),
        ),
    ],
    "pretrain": [
        ("method.name", "dp", " has 'dp', which is not one of standard, sam, amp, dpadapter"),
        ("train.schedule", "linear", " has 'linear', which is not one of cosine, steps"),
        ("ascent.batch_size", 91, " must be in 1..90, .*, got 91"),
        ("ascent.microbatch_size", 7, " must divide the 20 examples of the"),
        ("ascent.warmup_steps", 7, " must be in 0..6"),
        ("data.name", "blobs", "'blobs/public' has no column 'image'"),
        ("data.parts.public", 1.5, "parts.public must be a share in"),
        ("data.parts.public", 2000.0, "parts must add up to at most 1797 records"),
        ("watch", "board", " has 'board', which is not one of tensorboard, wandb"),
    ],
    "adapt": [
        ("methods", ("Tent", "Tempt"), " has 'Tempt', which is not one of Tent, EATA"),
        ("methods", (), " must have at least one entry"),
        ("data.corruptions", (), " must have at least one entry"),
        ("tuning.corruptions", (), " must have at least one entry"),
        ("data.images", 600, "together need 1200 photographs, but digits/test"),
        (
            "data.parts",
            {"public": 0.6, "test": None},
            "config.data.parts.test must name the images",
        ),
        ("model.preprocessing", None, " must be given"),
        ("privacy.adjacency", "add_remove", " must be 'replace_one' or 'zero_out'"),
        ("protocol.sources", 3, "seeds must be a multiple of config.protocol.sources"),
        ("protocol.domain_order", "any", " must be 'given'"),
        ("protocol.lengths", (1024,), " must be at least .* got 1024"),
        ("protocol.lengths", (1,), " must be at least .* got 1"),
        ("clipping", ("stream",), " has 'stream', which is not one of image, batch"),
        ("privacy.filters", ("drop",), " has 'drop', which is not one of remove, keep"),
        ("privacy.noise", ("pink",), " has 'pink', which is not one of independent"),
        ("privacy.noise", ("banded",), "exact must be False with config"),
    ],
    "predict": [
        ("prediction.queries", 539, r"config.prediction.queries=539 must lie in \[1, 539\)"),
        ("dp_sgd.batch_size", 2000, r"config.dp_sgd.batch_size=2000 must lie in \[1, 1078\]"),
        ("mechanisms", ("global", "smooth"), " has 'smooth', which answers 2 classes, not 10"),
        ("mechanisms", ("theirs",), " has 'theirs', which is not one of global, smooth, ours"),
        ("mechanisms", (), " must have some of global, smooth, ours"),
        ("data.features.dimensions", 65, "dimensions=65 exceeds"),
        ("training.threat", "replace_per_batch", " has 'replace_per_batch'"),
        ("data.kind", "sound", " has 'sound', which is not one of blobs, images"),
        ("data.source", "web", TFDS_OR_NPZ),
    ],
    "recalibrate": [
        (
            "methods",
            ("Acc-T", "Acc-U"),
            "config.method_options.Acc-U.kind has None, which is not one of none, acc_t",
        ),
        ("method_options.Acc-T.kind", "acc", "kind has 'acc', which is not one of none, acc_t"),
        (
            "method_options.Acc-T.bins",
            3,
            "config.method_options.Acc-T has 'bins', which is not one of bracket",
        ),
        (
            "method_options.Acc-T.bracket",
            (3.0, 0.5),
            r"bracket must be \(low, high\) with 0 < low < high",
        ),
        ("method_options.none.bins", 3, "config.method_options.none has 'bins'"),
        ("data.corruptions", ("clean", "rain"), " has 'rain', which is not one of clean"),
        ("figures.methods", ("Acc-T", "ECE-T"), " has 'ECE-T', which is not one of Acc-T"),
        ("figures.reliability_shift", "snow", " has 'snow'"),
        ("figures.reliability_methods", ("none",), " has 'none', which"),
        ("figures.reliability_methods", (), " must be one to three, got 0"),
        ("sweep.adjacency", "remove", "adjacency must be one of .*, got 'remove'"),
        ("sweep.samples.values", (), "config.sweep.samples must have values"),
        (
            "sweep.samples.samples",
            3,
            "samples must have values, the samples to try, and fix the other two",
        ),
        ("sweep.epsilon.values", (math.inf,), " must be positive"),
        ("sweep.epsilon.values", (1e-12,), "epsilon=1e-12 needs more noise than exact sums hold"),
        (
            "sweep.centre.samples",
            500,
            "sources x samples must be below 1078, the number of records, got 2000",
        ),
        (
            "sweep.centre.factor",
            3,
            "config.sweep.centre must fix sources, samples, epsilon, but it names",
        ),
        (
            "data.parts",
            {"test": 0.6},
            "config.data.parts.public must name images to train the classifier on",
        ),
        ("sweep.options", {"bound": (1.0,)}, r"\.bound must be an attribute of some"),
        ("sweep.options", {"rounds": (1,)}, r"\.rounds must be an attribute of some"),
        ("sweep.options", {"bins": (0,)}, r"\.bins must be an integer of at least 1, got 0"),
        ("sweep.division", UNEVEN, r"\.sources must divide the 40 records, got 3"),
    ],
    "split": [
        ("ablation.shots", 7, " has 7, which is not one of 3"),
        ("ablation.rows", ("without Hilbert",), " has 'without Hilbert', which is not one of"),
        ("ablation.rows", ("no noise",), " must have Split Adaptation, got"),
        ("attack.attackers", ("oracle",), " must have aggregating and noise-aware, got"),
        ("seeds", (), " must have at least one"),
        ("client.laplace", 0.0, " must be positive, got 0"),
        ("model.num_classes", 4, "num_classes must be 5"),
        ("data.pretrain_fraction", 1.0, "pretrain_fraction must be in"),
        ("private.shots", (), " must have at least one entry"),
        ("private.dimensions", (), " must have at least one entry"),
        ("private.epsilons", (), " must have at least one entry"),
        ("augmentations", ("Fourier",), " has 'Fourier', which is not one of original"),
    ],
}
BENCHMARKS = {
    "adapt": r"jaxdp\.tta\.serve",
    "recalibrate": r"recalibration\.recalibrate",
    "split": r"split_client\.py",
}
for benchmark, remedy in BENCHMARKS.items():
    MISTAKES[benchmark].append(("public_benchmark", False, f" must be True .* Use .*{remedy}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_every_study_refuses_a_mistake_before_it_writes_anything(
    tmp_path, name, field, value, message
):
    study, make = STUDIES[name]
    named = rf"config\.{re.escape(field)}" if message.startswith((" ", r"\.")) else ""
    with pytest.raises(ValueError, match=named + message):
        frame.run(study, changed(make(), {field: value}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- The programs -------------------------------------------------------------------------------


def said(*arguments, run=program.call):
    process = run([*program.PYTHON, "-m", "launch.finetune", *arguments])
    return process.returncode, process.stdout + process.stderr


@pytest.mark.slow
def test_a_program_prints_mistakes_as_sentences(tmp_path):
    run = ("--config", "configs/digits_dpsgd.py", "--workdir", str(tmp_path / "run"))
    # In processes of their own, since absl writes tracebacks to the first stderr of a process.
    code, text = said(*run, "--config.private.steps=0", run=program.run)
    assert (code, text.count("\n")) == (
        2,
        1,
    ) and "config.private.steps must be an integer of at least 1, got 0" in text
    code, text = said(*run, "--config.private.steps=0", "--verbosity=1", run=program.run)
    assert code == 2 and "Traceback" in text and "check_numbers" in text
    code, text = said(*run, "digits")
    assert code == 2 and "unexpected arguments ['digits']" in text
    code, text = said(*run, "--devices=2")
    assert code == 2 and "--devices must be one, local, cluster or HOST:PORT,I,N, got '2'" in text
    code, text = said(*run, "--devices=cluster", run=program.run)
    assert code == 2 and "--devices=cluster finds no SLURM" in text
    code, text = said("--config", "configs/dpadapter_table1.py:digits", *run[2:], "--devices=local")
    assert code == 2 and "--devices must be one for a table or a curve" in text
    process = program.call(
        [*program.command("adapt", "configs/tta/digits.py", run[3], {}), "--devices=local"]
    )
    assert process.returncode == 2 and "Only launch.finetune divides its work" in process.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_target_is_for_plans_of_a_training(tmp_path, monkeypatch):
    config = ("--config", "configs/digits_dpsgd.py")
    code, text = said(*config, "--dry_run", "--target=v2")
    assert code == 2 and "target must be one of v5e, v6e, v5p, h100, got 'v2'" in text
    monkeypatch.setattr(targets, "COMPILERS", {"tpu": "no_compiler_of_this_name"})
    code, text = said(*config, "--dry_run", "--target=v5e")
    assert (
        code == 2
        and "no_compiler_of_this_name is not installed" in text
        and 'pip install ".[compilers]"' in text
    )
    monkeypatch.setattr(targets, "COMPILERS", {"tpu": "jax"})
    code, text = said(*config, "--workdir", str(tmp_path / "run"), "--target=v5e")
    assert code == 2 and "--target=v5e only plans. Give --dry_run too" in text
    dry = program.command(
        "recalibrate_client", "configs/recalibration/hospitals.py", tmp_path / "run", {}
    )
    process = program.call([*dry, "--dry_run", "--target=v5e"])
    assert process.returncode == 2 and "this launcher has none" in process.stderr
    process = program.call(
        [
            *program.command("pretrain", "configs/pretrain/digits.py", tmp_path, {}),
            "--dry_run",
            "--target=v5e",
        ]
    )
    assert (
        process.returncode == 2 and "--target compiles the private steps of a run" in process.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_launcher_keeps_compiled_programs_where_only_its_user_reads_them(tmp_path):
    code = """
import sys
import jax
from launch import frame
jax.config.update("jax_compilation_cache_dir", sys.argv.pop(1) or None)  # as JAX_COMPILATION_CACHE_DIR does
frame.start(lambda argv: print(jax.jit(lambda x: x + 1)(1.0)))
"""  # noqa: E501

    def start(own):
        done = forked.run(code, own, modules=program.MODULES, env={"XDG_CACHE_HOME": str(tmp_path)})
        assert done.returncode == 0, done.stderr

    start(tmp_path / "own")
    assert not (tmp_path / "jaxdp").exists()
    start("")
    (folder,) = (tmp_path / "jaxdp").iterdir()
    assert any(folder.iterdir()) and folder.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def no_cache_of_programs():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_oldest_compiled_programs_are_deleted(tmp_path, monkeypatch, no_cache_of_programs):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(frame.program, "LARGEST_CACHE", 25)
    frame.keep_compiled()
    folder = pathlib.Path(jax.config.values["jax_compilation_cache_dir"])
    for day, name in enumerate(("old", "new", "middle")):
        (folder / name).write_bytes(bytes(10))
        os.utime(folder / name, (day, day + 10 * (name == "new")))
    jax.config.update("jax_compilation_cache_dir", None)
    frame.keep_compiled()
    assert {path.name for path in folder.iterdir()} == {"new", "middle"}


def test_a_home_that_cannot_be_used_costs_no_run(tmp_path, monkeypatch, no_cache_of_programs):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    frame.keep_compiled()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        pathlib.Path,
        "home",
        mock.Mock(side_effect=RuntimeError("Could not determine home directory.")),
    )
    frame.keep_compiled()
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.mark.slow
def test_a_program_asks_for_what_is_missing():
    for arguments, missing in (
        ([], "--config"),
        (["--config", "configs/digits_dpsgd.py"], "--workdir"),
    ):
        code, text = said(*arguments)
        assert code == 2 and f"{missing} must be given" in text


@pytest.mark.slow
def test_help_lists_configs_and_fields_with_their_defaults():
    code, text = said("--help")
    assert code == 0 and "--[no]dry_run" in text and "Private fine-tuning" in text
    assert "  dpadapter_table1 " in text and "Fields of digits_dpsgd:" in text
    assert "  --config.private.epsilon=4.0\n" in text and "recalibration/digits" not in text


@pytest.mark.parametrize(("is_read", "status"), [(False, 141), (True, 2)])
def test_a_closed_pipe_ends_a_launcher_silently(monkeypatch, capsys, is_read, status):
    """As in `... | head -1`. A broken connection is said, because stdout is read."""
    reader, writer = os.pipe()
    if not is_read:
        os.close(reader)

    def broken():
        raise BrokenPipeError(32, "Broken pipe")

    with os.fdopen(writer, "w") as stdout, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", stdout)
        frame_program.tell(broken)
    assert ended.value.code == status
    assert ("Broken pipe" in capsys.readouterr().err) is is_read
    if is_read:
        os.close(reader)
