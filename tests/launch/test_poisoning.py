"""Certificates against changed records: the study retrains, and its bounds contain the results."""

import numpy as np
import pytest

from configs.predict import poisoning as config_of
from launch import frame, poisoning
from tests.launch import tiny

pytestmark = pytest.mark.slow


def config(**changes):
    result = config_of.get_config()
    small = {"data.train": 90, "data.test": 40, "data.std": 1.0, "model.hidden": ()}
    small |= {"training.records": 90, "training.epochs": 1, "changes.most": 3}
    small |= {"changes.kinds": ("remove", "both"), "changes.witnesses": 2, "changes.radius": 0.2}
    result.update_from_flattened_dict(small | {f"changes.{k}": v for k, v in changes.items()})
    return result


def test_a_run_certifies_and_retrains(tmp_path):
    result = frame.run(tiny.undrawn(poisoning.STUDY), config(public=0.5), tmp_path)
    assert result["records"] == 90 and result["public"] == 45
    for row in result["rows"]:
        certified = row["certified"]
        assert len(certified) == 4 and certified == sorted(certified, reverse=True)
        assert certified[0] == row["accuracy"] > 0.8
        assert row["outside"] == 0 and len(row["retrained"]) == 2
    removed, both = poisoning.table(result)
    assert removed["outside"] == both["outside"] == "0 of 2" and "k = 3" in both

    opened = poisoning.Opened(config(public=0.5), tmp_path)
    changed = opened.changed("both", 0)
    moved = np.flatnonzero((changed["features"] != opened.train["features"]).any(axis=1))
    assert len(moved) == 3 and not opened.public[moved].any()
    # The twin: the retrained models have more changes than the bounds cover.
    opened.config.changes.most = 40
    work = frame.Work(poisoning.STUDY, config(public=0.5), tmp_path, opened)
    assert poisoning._run(poisoning.Cell("both"), work)["outside"] == 2


def test_bad_configs(tmp_path):
    with pytest.raises(ValueError, match=r"config\.changes\.kinds"):
        frame.run(poisoning.STUDY, config(kinds=("added",)), tmp_path)
    with pytest.raises(ValueError, match=r"config\.changes\.public must be in \[0, 1\), got 1\.0"):
        frame.run(poisoning.STUDY, config(public=1.0), tmp_path)
