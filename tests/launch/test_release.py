"""`jaxdp release` knows every study: what it publishes, or why it publishes nothing."""

import json

import pytest

from launch import published, release, studies


def test_every_study_is_released_or_refused_with_a_reason():
    names = {study.name for study in studies.known()}
    assert published.MAKERS.keys() | published.REFUSED.keys() == names
    assert not published.MAKERS.keys() & published.REFUSED.keys()


@pytest.mark.parametrize("study", [*sorted(published.REFUSED), "a study from elsewhere"])
def test_a_study_without_a_network_is_refused_by_name(study, tmp_path):
    bound = {"study": study, "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(bound))
    (tmp_path / "result.json").write_text("{}")
    reason = published.REFUSED.get(study, "It saves no network")
    with pytest.raises(ValueError, match=f"of the study '{study}'\\. {reason}"):
        release.write(tmp_path)
    assert not (tmp_path / "release").exists()
