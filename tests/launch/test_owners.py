"""Tables and images with several owners: the parts of a file, the account and what is refused."""

import json
import shutil

import numpy as np
import PIL.Image
import pytest

from configs.finetune import csv
from configs.finetune import folder as folder_of_images
from jaxdp.data import Owners, bundled
from launch import data, finetune, tasks

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


# --- Folders of images --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes digits of twelve families of three, each image in a subfolder named by its owners."""
    root = tmp_path_factory.mktemp("scans")
    random = np.random.default_rng(0)
    digits = bundled("digits")
    lines = ["path,label,people"]
    for number in range(60):
        family = number % 12
        members = random.choice(3, size=random.integers(1, 3), replace=False)
        owners = ";".join(f"{family}-{member}" for member in members)
        (root / owners).mkdir(exist_ok=True)
        image = np.rint(255 * digits[number]["image"][..., 0]).astype(np.uint8)
        PIL.Image.fromarray(image).save(root / owners / f"{number}.png")
        lines.append(f"{owners}/{number}.png,{int(digits[number]['label'])},{owners}")
    (root / "labels.csv").write_text("\n".join(lines))
    return root


def folder_config(folder, **fields):
    config = folder_of_images.get_config()
    with config.ignore_type():
        config.data.update({"path": str(folder), "num_classes": 10} | SEPARATED | fields)
    config.model.options.widths = (2,)
    config.private.update({"steps": 2, "checkpoint_every": 2, "batch_size": 8})
    return config


@pytest.mark.parametrize("group", ["subfolder", "people"])
def test_images_of_a_folder_have_owners_by_column_or_subfolder(folder, group, tmp_path):
    task = tasks.open_task(folder_config(folder, group=group), tmp_path)
    assert isinstance(task.units, Owners) and max(task.units.records_of) == 3
    families = []
    for source in (task.records, task.test):
        names = ";".join(source.text(group)).split(";")
        families.append({name.partition("-")[0] for name in names})
    assert families[0].isdisjoint(families[1]) and len(families[0] | families[1]) == 12
    assert len(families[1]) == 2  # a fifth of twelve families
    assert set(task.units.gather(np.arange(2))) == {"image", "label"}
    # The twin: one owner of each image, "0-1;0-2", is no family.
    alone = folder_config(folder, group=group, separator="", adjacency="add_remove")
    task = tasks.open_task(alone, tmp_path)
    names = [{*source.text(group)} for source in (task.records, task.test)]
    assert names[0].isdisjoint(names[1])
    shared = [";".join(owners).split(";") for owners in names]
    assert not {*shared[0]}.isdisjoint(shared[1])


def test_a_folder_without_owners_is_refused(folder, tmp_path):
    flat = tmp_path / "flat"
    shutil.copytree(folder, flat)
    header, first, *others = (flat / "labels.csv").read_text().splitlines()
    moved = first.partition("/")[2]
    (flat / "labels.csv").write_text("\n".join([header, moved, *others]))
    wrong = [
        (flat, {"group": "subfolder"}, r"line 2 of .* must have an image in a folder"),
        (folder, {"group": "patient"}, r"'patient'"),
        (folder, {"parts": {"public": "", "private": 0.8, "test": "a.csv"}}, "must be shares"),
        (folder / "none", {}, "does not exist"),
    ]
    for path, fields, error in wrong:
        with pytest.raises((ValueError, FileNotFoundError), match=error):
            tasks.open_task(folder_config(path, **fields), tmp_path)


@pytest.mark.slow
def test_a_run_on_a_folder_reports_every_kind_of_owner(folder, tmp_path):
    config = folder_config(folder, group="subfolder")
    finetune.experiment(config, str(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "zeroing out one person" in page or "blanking out one person" in page
    assert "people with up to 3 records that count" in page
    assert "people with up to 1 records that count" in page
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 7.9 < result["epsilon"] <= 8.0 and result["unit"] == "person"
    # The twin: each image protected by itself needs less noise.
    single = folder_config(folder, group="", separator="", unit="image")
    trainer = tasks.open_task(single, tmp_path).trainer(single.private)
    assert trainer.privatizer.multiplier_at(0) < 0.9 * result["noise_multiplier"]
