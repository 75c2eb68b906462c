"""Studies that protect patients with several images: the config's group, the ledger, and the words of the report."""

import csv

import numpy as np
import PIL.Image
import pytest
from ml_collections import ConfigDict

from jaxdp.data import bundled
from jaxdp.privacy import Ledger
from jaxdp.privacy.events import composition
from launch import data, finetune, frame
from launch.lifecycle import life, parts
from tests.launch import tiny

# Images and images per patient of each part. Patients have one to `most` images, and the last one what is left.
SIZES = {
    **{"public": (60, 1), "private": (90, 3), "client": (24, 2), "test": (40, 1), "stream_0": (16, 2)},
    **{"stream_1": (16, 2), **{f"site_{k}": (10, 2) for k in range(5)}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes digits as images with a CSV file per part, which names the patient of each image."""
    root, source, start = tmp_path_factory.mktemp("patients"), bundled("digits"), 0
    for name, (size, most) in SIZES.items():
        owners = [f"{name} {k}" for k in range(size) for _ in range(1 + k % most)][:size]
        with (root / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", "label", "patient"])
            for k, owner in enumerate(owners, start):
                pixels = np.rint(255 * source[k]["image"][..., 0]).astype(np.uint8)
                PIL.Image.fromarray(pixels).save(root / f"{k}.png")
                table.writerow([f"{k}.png", source[k]["label"], owner])
        start += size
    return root


GROUP = {"group": "patient", "max_records": 2, "unit": "patient"}


def config(folder, **fields):
    given = {"source": "folder", "name": "digits", "path": str(folder), "num_classes": 10, **GROUP}
    return ConfigDict(given | {"parts": {"private": "private.csv", "test": "test.csv"}} | fields)


def patients(folder, part):
    with (folder / f"{part}.csv").open() as file:
        return [row["patient"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_patients_of_a_folder(folder, in_memory):
    given, owners = config(folder, in_memory=in_memory), patients(folder, "private")
    found = data.parts(given, "private", "test", grouped=True)
    units, first = data.units(given, found["private"]), data.one_each(given, found["private"])
    assert len(units) == len(first) == len(set(owners)) == 45
    starts = [owners.index(owner) for owner in dict.fromkeys(owners)]
    np.testing.assert_array_equal(units.rows[:, 0], starts)
    np.testing.assert_array_equal(data.labels(first), data.labels(found["private"])[starts])
    assert sorted(units.gather(np.array([1])).records) == ["image", "label"]
    given.group = ""
    assert data.units(given, found["private"]) is data.one_each(given, found["private"]) is found["private"]


def test_the_patients_of_hugging_face_and_of_numpy(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = data.parts(config(folder), "private", "test", grouped=True)
    expected = data.units(config(folder), found["private"]).rows
    splits, numbers = {}, {}
    for name, source in found.items():
        columns, owners = source.load().arrays, patients(folder, name)
        image, label = columns["image"], columns["label"]
        splits[name] = datasets.Dataset.from_dict({"image": image.tolist(), "label": label, "patient": owners})
        codes = {owner: k for k, owner in enumerate([*patients(folder, "test"), *patients(folder, "private")])}
        numbers[name] = [codes[owner] for owner in owners]
        np.savez(tmp_path / f"{name}.npz", image=image, label=label, patient=numbers[name])
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    saved, files = (
        config(folder, source="hf", path=str(tmp_path / "saved")),
        config(folder, source="npz", path=str(tmp_path)),
    )
    saved.parts, files.parts = [ConfigDict({r: r + end for r in ("private", "test")}) for end in ("", ".npz")]
    for given in (saved, files):
        again = data.parts(given, "private", "test", grouped=True)["private"]
        np.testing.assert_array_equal(data.units(given, again).rows, expected)


def test_bad_groups_of_a_config_are_refused(folder, tmp_path):
    for fields, message in (
        ({"unit": "image"}, r"config\.data\.unit must name an owner of records, such as 'patient'"),
        ({"max_records": 0}, r"config\.data\.max_records must be at least 1"),
        ({"group": "person"}, "has no owner"),
        ({"source": "bundled", "parts": {"private": 50}}, r"group='patient' needs other data: no bundled set says"),
    ):
        with pytest.raises(ValueError, match=message):
            data.parts(config(folder, **fields), "private", grouped=True)
    with pytest.raises(
        ValueError, match=r"config\.data\.group must be '' for this study, which protects single records"
    ):
        data.parts(config(folder), "private")
    (tmp_path / "a.csv").write_text("path,label,patient\n0.png,0,x\n")
    (tmp_path / "b.csv").write_text("path,label,patient\n1.png,1,x\n")
    for k in (0, 1):
        (tmp_path / f"{k}.png").write_bytes((folder / f"{k}.png").read_bytes())
    with pytest.raises(ValueError, match=r"parts\.private and config\.data\.parts\.test share a patient"):
        data.parts(config(tmp_path, parts={"private": "a.csv", "test": "b.csv"}), "private", "test", grouped=True)


@pytest.mark.slow
def test_fine_tuning_protects_patients(folder, tmp_path):
    """Broken twin: with batches of images, the ledger has 90 records and a batch of images for its noise."""
    study = tiny.finetune(private__batch_size=16)
    study.data = config(folder, crop_padding=1, flip=False)
    study.data.parts.public = "public.csv"
    result = frame.run(finetune.STUDY, study, tmp_path)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (entry,) = ledger.report()["datasets"]
        ((event, steps),) = composition(ledger.events(entry["name"])[None]).items()
    assert (entry["unit"], entry["records"]) == ("patient", 45)
    assert (event.sampling_probability, steps) == (16 / 45, study.private.steps)
    assert finetune.STUDY.summary(result).count("(adding or removing one patient)") == 1


def test_stages_that_protect_one_image_read_one_of_each_patient(folder):
    """Broken twin: parts with all images, of which a patient has two, under an account of patients."""
    study = tiny.lifecycle_own(folder)
    study.data.update(GROUP)
    loaded = parts.load(study.data)
    private = {"private": loaded.private, "client": loaded.client, "site_0": loaded.sources[0]}
    private |= {name.replace(" ", "_"): source for name, source in loaded.stream.items()}
    for name, source in private.items():
        owners = patients(folder, name)
        whole = data.parts(config(folder, parts={"private": f"{name}.csv"}), "private", grouped=True)["private"]
        first = [owners.index(owner) for owner in dict.fromkeys(owners)]
        np.testing.assert_array_equal(data.labels(source), data.labels(whole)[first])
    assert loaded.fingerprints("private") == [f"xrays/private {loaded.units.fingerprint}"]


@pytest.mark.slow
def test_a_whole_life_on_images_of_five_sites_protects_patients(folder, tmp_path, capsys):
    study = tiny.lifecycle_own(folder)
    study.data.update(GROUP)
    states = life.run(study, tmp_path / "life")
    assert {state["status"] for state in states.values()} == {"done"}, capsys.readouterr().out
    with Ledger(tmp_path / "life" / "ledger.sqlite") as ledger:
        entries = {entry["name"]: entry for entry in ledger.report()["datasets"]}
    assert set(entries) == {"xrays/private", "stream", "clinic", *(f"hospital {k}" for k in range(5))}
    assert {entry["unit"] for entry in entries.values()} == {"patient"}
    assert all(entry["spends"] for entry in entries.values())
    count = {part: len(set(patients(folder, part))) for part in SIZES}
    assert entries["xrays/private"]["records"] == count["private"] == 45
    assert entries["hospital 0"]["records"] == count["site_0"] < 10
    assert entries["stream"]["records"] == count["stream_0"] + count["stream_1"]
    text = (tmp_path / "life" / "report.html").read_text()
    for words in (
        "reveal about any single patient.",
        "adding or removing one patient",
        "They hold for one patient with all of its images in one data set.",
        "A patient with images in several data sets.",
        "A patient counts once, with up to 2 images.",
        "one step of fine-tuning, if the patient is in its batch",
        "which patients are in a batch of fine-tuning",
        "5 sources answered with noise",
        "Accuracy under stream 1: ",
    ):
        assert words in text
    assert "The unit is one image" not in text and "under clean" not in text
