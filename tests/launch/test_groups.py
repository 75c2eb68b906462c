"""Studies that protect patients with several images: the config's group, the ledger, and the words
of the report."""

import shutil

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxdp.data import read_column
from jaxdp.data.selection import cut, held, one_each, units
from jaxdp.privacy import Ledger, epsilon
from jaxdp.privacy.events import composition
from launch import data, finetune, frame
from launch.lifecycle import life, parts
from tests.launch import patients, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("patients")
    patients.write(root)
    return root


def config(folder, **fields):
    given = {"source": "folder", "name": "digits", "path": str(folder), "num_classes": 10}
    given |= patients.GROUP
    return ConfigDict(given | {"parts": {"private": "private.csv", "test": "test.csv"}} | fields)


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_patients_of_a_folder(folder, in_memory):
    given, owners = config(folder, in_memory=in_memory), patients.owners(folder, "private")
    found = data.parts(given, "private", "test", grouped=True)
    people = units(found["private"], "patient", max_records=2)
    first = one_each(found["private"], "patient")
    assert len(people) == len(first) == len(set(owners)) == 45
    starts = [owners.index(owner) for owner in dict.fromkeys(owners)]
    np.testing.assert_array_equal(people.rows[:, 0], starts)
    labels = read_column(found["private"], "label")
    np.testing.assert_array_equal(read_column(first, "label"), labels[starts])
    assert sorted(people.gather(np.array([1])).records) == ["image", "label"]
    assert units(found["private"], "", max_records=2) is found["private"]
    assert one_each(found["private"], "") is found["private"]


def read_again(folder, source, path, end):
    """Asserts that a copy of the folder has the same patients."""
    found = data.parts(config(folder), "private", "test", grouped=True)
    parts = {role: role + end for role in found}
    given = config(folder, source=source, path=str(path), parts=ConfigDict(parts))
    again = data.parts(given, "private", "test", grouped=True)["private"]
    expected = units(found["private"], "patient", max_records=2)
    np.testing.assert_array_equal(units(again, "patient", max_records=2).rows, expected.rows)


def test_the_patients_of_numpy(folder, tmp_path):
    every = [*patients.owners(folder, "test"), *patients.owners(folder, "private")]
    codes = {owner: k for k, owner in enumerate(every)}
    for name, source in data.parts(config(folder), "private", "test", grouped=True).items():
        columns, owners = source.load().arrays, patients.owners(folder, name)
        numbers = [codes[owner] for owner in owners]
        np.savez(
            tmp_path / f"{name}.npz",
            image=columns["image"],
            label=columns["label"],
            patient=numbers,
        )
    read_again(folder, "npz", tmp_path, ".npz")


@pytest.mark.parity
def test_the_patients_of_hugging_face(folder, tmp_path):
    """Patients, named by a column of a data set of Hugging Face."""
    import datasets

    splits = {}
    for name, source in data.parts(config(folder), "private", "test", grouped=True).items():
        columns, owners = source.load().arrays, patients.owners(folder, name)
        columns = {"image": columns["image"].tolist(), "label": columns["label"], "patient": owners}
        splits[name] = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    read_again(folder, "hf", tmp_path / "saved", "")


def test_bad_groups_of_a_config_are_refused(folder, tmp_path):
    for fields, message in (
        ({"unit": "image"}, r"config\.data\.unit must name an owner of records, such as 'patient'"),
        ({"max_records": 0}, r"config\.data\.max_records must be at least 1"),
        ({"group": "person"}, "source 'digits/private.csv' has no column 'person'"),
        (
            {"source": "bundled", "parts": {"private": 50}},
            r"group='patient' needs other data: no bundled set says",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            data.parts(config(folder, **fields), "private", grouped=True)
    with pytest.raises(
        ValueError,
        match=r"config\.data\.group must be '' for this study, which protects single records",
    ):
        data.parts(config(folder), "private")
    (tmp_path / "a.csv").write_text("path,label,patient\n0.png,0,x\n")
    (tmp_path / "b.csv").write_text("path,label,patient\n1.png,1,x\n")
    for k in (0, 1):
        (tmp_path / f"{k}.png").write_bytes((folder / f"{k}.png").read_bytes())
    with pytest.raises(
        ValueError, match=r"parts\.private and config\.data\.parts\.test share a patient"
    ):
        data.parts(
            config(tmp_path, parts={"private": "a.csv", "test": "b.csv"}),
            "private",
            "test",
            grouped=True,
        )


@pytest.mark.slow
def test_fine_tuning_protects_patients(folder, tmp_path):
    """Broken twin: with batches of images, the ledger has 90 records and a batch of images for its
    noise."""
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


def test_parts_hold_patients_and_the_upload_has_one_image_of_each(folder):
    """Broken twin: an upload with all images, of which a patient has two, under an account of
    patients."""
    loaded = parts.load(patients.lifecycle(folder).data)
    people = {"private": loaded.units, "site_0": loaded.sources[0]}
    people |= {name.replace(" ", "_"): source for name, source in loaded.stream.items()}
    for name, source in people.items():
        images, numbers = held(source)
        owners = patients.owners(folder, name)
        count = [k for k, owner in enumerate(owners) if owners[:k].count(owner) < 2]
        known = list(dict.fromkeys(owners))
        assert numbers.tolist() == [known.index(owners[k]) for k in count]
        whole = data.parts(
            config(folder, parts={"private": f"{name}.csv"}), "private", grouped=True
        )["private"]
        np.testing.assert_array_equal(
            read_column(images, "label"), read_column(whole, "label")[count]
        )
    uploaded = len(set(patients.owners(folder, "client")))
    assert len(loaded.client) == loaded.records("clinic") == uploaded < 24
    assert loaded.fingerprints("private") == [f"xrays/private {loaded.units.fingerprint}"]


def test_parties_of_one_part_share_no_patient(folder):
    whole = data.parts(config(folder, parts={"sources": "private.csv"}), "sources", grouped=True)[
        "sources"
    ]
    pieces = [
        set(read_column(piece, "patient").tolist()) for piece in cut(whole, 4, group="patient")
    ]
    assert [len(piece) for piece in pieces] == [12, 11, 11, 11] and len(set.union(*pieces)) == 45


def test_the_noise_of_a_stream_is_for_all_images_of_a_patient(folder):
    """Broken twin: the noise of one visit, for which a patient with two images would owe more than
    epsilon."""
    study = patients.lifecycle(folder)
    (adapt,) = (stage for stage in life.stages() if stage.name == "adapt")
    charge, how = adapt.charges(study, parts.load(study.data))["stream"], study.adapt
    assert (
        0.99 * how.epsilon
        < epsilon(charge, delta=how.delta, adjacency="replace_one")
        <= how.epsilon
    )


def test_two_streams_whose_files_have_one_name_are_two(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    given = patients.lifecycle(tmp_path).data
    expected = [len(source) for source in parts.load(given).stream.values()]
    files = []
    for number, place in enumerate(("north", "south")):
        file = tmp_path / place / "week.csv"
        file.parent.mkdir()
        (tmp_path / f"stream_{number}.csv").rename(file)
        files.append(f"{place}/week.csv")
    given.parts.stream = tuple(files)
    stream = parts.load(given).stream
    assert list(stream) == files
    assert [len(source) for source in stream.values()] == expected
