"""Workdirs that earlier versions wrote go on in this one.

The archives hold workdirs of the first version with this layout (commit 0d4d19dc) and of the last
one before workdirs named their run and their ledger (9b2b6ec3), without figures, locks, reports and
the older checkpoint. Both were made by

    python -m launch.finetune --config configs/digits_dpsgd.py --workdir ...

with the fields of `CONFIG`.
"""

import json
import pathlib
import tarfile

import pytest

from jaxdp.privacy import Ledger
from jaxdp.privacy.events import composition
from launch import finetune, frame, report
from tests.launch import tiny

WORKDIRS = pathlib.Path(__file__).resolve().parents[1] / "golden" / "workdirs"
VERSIONS = sorted(WORKDIRS.glob("finetune_*.tar.xz"))
CONFIG = tiny.finetune(model__options__widths=(2,), private__checkpoint_every=3, references=True)


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name.removesuffix(".tar.xz"))
def workdir(request, tmp_path):
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def charged(workdir):
    with Ledger(workdir / "ledger.sqlite") as ledger:
        return composition(ledger.events("digits/private")[None])


def row_of(workdir):
    return json.loads((workdir / "cells" / "private" / "row.json").read_text())


def test_two_versions_are_kept():
    assert len(VERSIONS) == 2


@pytest.mark.filterwarnings("ignore:.*has no anchor")
def test_a_finished_run_is_shown_and_reported(workdir, capsys):
    before = charged(workdir)
    result = frame.run(finetune.STUDY, CONFIG, workdir, stale="keep")
    assert "There is nothing to do" in capsys.readouterr().out
    assert result == json.loads((workdir / "result.json").read_text())
    page = report.write(workdir).read_text()
    assert f"{row_of(workdir)['epsilon']:.3g}" in page
    assert charged(workdir) == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no anchor")
def test_an_unfinished_run_continues_and_pays_nothing_twice(workdir):
    before, row = charged(workdir), row_of(workdir)
    for name in ("result.json", "rows.jsonl", "cells/private/row.json"):
        (workdir / name).unlink()
    frame.compute(tiny.undrawn(finetune.STUDY), CONFIG, workdir)
    after = row_of(workdir)
    assert after["accuracy"] == row["accuracy"]  # the checkpoint of the last step was read
    assert charged(workdir) == before
    # The same events. The accounting of this version bounds their epsilon a little lower.
    assert after["epsilon"] == pytest.approx(row["epsilon"], rel=1e-3)


def test_another_value_of_an_added_field_is_another_experiment(workdir):
    config = CONFIG.copy_and_resolve_references()
    config.private.truncated_batch_size = 100
    with pytest.raises(ValueError, match=r"another private\.truncated_batch_size"):
        frame.check_same_config("finetune", config, workdir)


def test_a_workdir_of_another_layout_is_refused(workdir):
    path = workdir / "config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "format": 2}))
    with pytest.raises(ValueError, match="another release of jaxdp with another layout"):
        frame.check_same_config("finetune", CONFIG, workdir)
