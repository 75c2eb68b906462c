"""`jaxdp release` knows every study: what it publishes, or why it publishes nothing."""

import json

import pytest
from ml_collections import ConfigDict

from launch import published, release, studies


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
