"""`jaxdp release` knows every study: what it publishes, or why it publishes nothing."""

import json

import pytest
from ml_collections import ConfigDict

from launch import published, release, studies
from launch.frame.workdir import lacking, note_released


def test_every_study_is_released_or_refused_with_a_reason():
    names = {study.name for study in studies.known()}
    assert published.MAKERS.keys() | published.REFUSED.keys() == names
    assert not published.MAKERS.keys() & published.REFUSED.keys()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ("0", "1")),
        ({"class_names": ("ill", "well")}, ("ill", "well")),
        ({"classes": (3, 8)}, ("3", "8")),  # labels that were renumbered
        ({"class_names": ("ill", "well"), "classes": (1, 0)}, ("well", "ill")),
        ({"server": {}}, ()),
    ],
)
def test_the_classes_have_the_names_of_the_labels(fields, names):
    assert published._classes(ConfigDict({"data": fields}), 2) == names


@pytest.mark.parametrize("study", [*sorted(published.REFUSED), "a study from elsewhere"])
def test_a_study_without_a_network_is_refused_by_name(study, tmp_path):
    bound = {"study": study, "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(bound))
    reason = published.REFUSED.get(study, "It saves no network")
    with pytest.raises(ValueError, match=f"of the study '{study}'\\. {reason}"):
        release.write(tmp_path)
    assert not (tmp_path / "release").exists()


def test_a_file_that_the_run_did_not_write_is_refused(tmp_path):
    run = published.Run(root=tmp_path, config={}, result={})
    path = tmp_path / "params.safetensors"
    assert run.file(path.name) == path  # of an earlier version, which noted no digests
    path.write_bytes(b"of this run")
    note_released(tmp_path, ["*.safetensors"], tmp_path / "cells" / "private" / "row.json")
    assert run.file(path.name) == path and not lacking(tmp_path)
    path.write_bytes(b"of another run")
    with pytest.raises(ValueError, match="is not the file that the run wrote"):
        run.file(path.name)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"delete result\.json and cells/private/row\.json"):
        run.file(path.name)
    assert "params.safetensors is not in the workdir" in lacking(tmp_path)
