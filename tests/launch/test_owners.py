"""Tables whose rows have several owners: the parts of a file, the account and what is refused."""

import numpy as np
import pytest

from configs.finetune import csv
from jaxdp.data import Owners
from launch import data, tasks

SEPARATED = {
    "group": "people",
    "separator": ";",
    "max_records": 3,
    "unit": "person",
    "adjacency": "zero_out",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Writes a table of twenty families of three, in which each row is of one family."""
    path = tmp_path_factory.mktemp("mails") / "mails.csv"
    random = np.random.default_rng(0)
    rows = ["people,length,outcome"]
    for _ in range(200):
        family = random.integers(20)
        members = random.choice(3, size=random.integers(1, 4), replace=False)
        names = ";".join(f"{family}-{member}" for member in members)
        rows.append(f"{names},{random.normal():.3f},{random.integers(2)}")
    path.write_text("\n".join(rows))
    return path


def config_of(file, **fields):
    config = csv.get_config()
    config.data.update({"path": str(file), "label": "outcome", "num_classes": 2} | fields)
    return config


def test_a_config_trains_on_owners_and_keeps_families_together(file, tmp_path):
    config = config_of(file, **SEPARATED)
    task = tasks.open_task(config, tmp_path)
    assert isinstance(task.units, Owners) and max(task.units.records_of) == 3
    families = []
    for source in (task.records, task.test):
        names = ";".join(source.text("people")).split(";")
        families.append({name.partition("-")[0] for name in names})
    assert families[0].isdisjoint(families[1]) and len(families[0] | families[1]) == 20
    terms = task.terms(config.private)
    assert (terms["records"], terms["adjacency"]) == (task.units.owners, "zero_out")
    trainer = task.trainer(config.private)
    assert trainer.sampler.records_per_owner == 3
    assert trainer.sampler.num_examples == len(task.units) < len(task.records)
    _, blank = task.blank()
    trainer.check(blank)


def test_what_does_not_fit_several_owners_is_refused(file, tmp_path):
    wrong = [
        ({"adjacency": "add_remove"}, r"config\.data\.adjacency must be 'zero_out' with"),
        ({"group": ""}, r"config\.data\.adjacency must be 'zero_out' with .* a column"),
        ({"unit": "example"}, r"config\.data\.unit must name an owner"),
    ]
    for fields, error in wrong:
        with pytest.raises(ValueError, match=error):
            tasks.open_task(config_of(file, **SEPARATED | fields), tmp_path)
    scaled = config_of(file, **SEPARATED, options={"ranges": {"length": (-3, 3)}})
    scaled.private.scaler_noise_multiplier = 5.0
    with pytest.raises(ValueError, match="scaler_noise_multiplier must be 0 with config"):
        tasks.open_task(scaled, tmp_path)
    # A study of single owners.
    with pytest.raises(ValueError, match=r"config\.data\.separator must be '' for this study"):
        data.specs(config_of(file, **SEPARATED).data, "private", grouped=True, tables=True)


def test_one_family_cannot_be_divided(tmp_path):
    file = tmp_path / "one.csv"
    file.write_text("people,length,outcome\n" + "a;b,1.5,0\n" * 9 + "b;c,2.5,1\n" * 9)
    with pytest.raises(ValueError, match="has no row: owners who share records"):
        tasks.open_task(config_of(file, **SEPARATED), tmp_path)
