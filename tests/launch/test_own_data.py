"""Studies on a user's own data: each kind of `data.source`, unit and adjacency in the ledger."""

import csv
import dataclasses
import importlib
import json
import sys
import types
import warnings

import jax
import numpy as np
import PIL.Image
import pytest
from ml_collections import ConfigDict
from scipy import special

from jaxdp.data import bundled, read_column
from jaxdp.data import open as open_spec
from jaxdp.finetune import Scaler
from jaxdp.models import load_params, load_released
from jaxdp.privacy import BudgetExceeded, ComposedDpEvent, GaussianDpEvent, Ledger, epsilon
from jaxdp.privacy.events import composition
from launch import data, finetune, frame, predict, release
from tests.launch import tiny

SIZES = {
    **{"public": 60, "private": 60, "client": 12, "test": 40, "stream_0": 8, "stream_1": 8},
    **{f"site_{k}": 5 for k in range(5)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes digits as a user has them: images and a CSV file per site, part of the stream, and
    role."""
    root, source, start = tmp_path_factory.mktemp("digits"), bundled("digits"), 0
    for name, size in SIZES.items():
        with (root / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", "label"])
            for k in range(start, start + size):
                pixels = np.rint(255 * source[k]["image"][..., 0]).astype(np.uint8)
                PIL.Image.fromarray(pixels).save(root / f"{k}.png")
                table.writerow([f"{k}.png", source[k]["label"]])
        start += size
    return root


def config(**fields):
    return ConfigDict(
        {
            "name": "digits",
            "num_classes": 10,
            "parts": {"private": "site_0.csv", "test": "test.csv"},
            **fields,
        }
    )


def check(found, folder):
    """Checks that the parts are site_0.csv and test.csv."""
    images = {role: len(source) for role, source in found.items()}
    assert images == {"private": 5, "test": 40}
    for role, start in (("private", 60 + 60 + 12 + 40 + 16), ("test", 60 + 60 + 12)):
        rows = np.arange(start, start + len(found[role]))
        expected = bundled("digits").gather(rows)
        np.testing.assert_array_equal(found[role].gather(rows - start)["label"], expected["label"])
        np.testing.assert_allclose(
            found[role].gather(rows - start)["image"], expected["image"], atol=0.5 / 255 + 1e-6
        )


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_folder(folder, in_memory):
    found = data.parts(
        config(source="folder", path=str(folder), in_memory=in_memory), "private", "test"
    )
    check(found, folder)
    assert found["private"].name == "digits/site_0.csv"
    assert isinstance(found["test"].arrays["image"], np.ndarray) == in_memory


def test_parts_that_share_an_image_are_refused(folder, tmp_path):
    (tmp_path / "b.csv").write_text("path,label\n1.png,1\n./0.png,0\n")
    (tmp_path / "a.csv").write_text("path,label\n0.png,0\n")
    given = config(source="folder", path=str(tmp_path), parts={"private": "a.csv", "test": "b.csv"})
    with pytest.raises(
        ValueError, match=r"parts\.private and config\.data\.parts\.test share an image"
    ):
        data.parts(given, "test")


def test_files_of_numpy(folder, tmp_path):
    for name, source in data.parts(
        config(source="folder", path=str(folder)), "private", "test"
    ).items():
        columns = source.load().arrays
        np.savez(tmp_path / f"{name}.npz", x=columns["image"], label=columns["label"])
    parts, columns = (
        {"private": "private.npz", "test": "test.npz"},
        {"image": "x", "label": "label"},
    )
    check(
        data.parts(
            config(source="npz", path=str(tmp_path), parts=parts, columns=columns),
            "private",
            "test",
        ),
        folder,
    )


@pytest.mark.parity
def test_hugging_face(folder, tmp_path):
    """A config whose records are a data set of Hugging Face on disk."""
    import datasets

    found = data.parts(config(source="folder", path=str(folder)), "private", "test")
    splits = {
        name: datasets.Dataset.from_dict(
            {
                "img": [
                    PIL.Image.fromarray(image[..., 0]) for image in source.load().arrays["image"]
                ],
                "label": source.arrays["label"].tolist(),
            }
        ).cast_column("img", datasets.Image())
        for name, source in found.items()
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    given = config(
        source="hf", path=str(tmp_path / "saved"), parts={"private": "private", "test": "test"}
    )
    given.columns = {"image": "img", "label": "label"}
    check(data.parts(given, "private", "test"), folder)
    given.parts.test = "test[:5]"
    with pytest.raises(ValueError, match="must have whole splits for 'hf'"):
        data.parts(given, "private", "test")


def test_a_function(folder, monkeypatch):
    module = types.ModuleType("hospital")
    module.images = lambda part, scale: (
        data.parts(config(source="folder", path=str(folder)), part)[part] if scale else 3
    )
    monkeypatch.setitem(sys.modules, "hospital", module)
    given = config(
        source="hospital:images", parts={"private": "private", "test": "test"}, options={"scale": 1}
    )
    check(data.parts(given, "private", "test"), folder)
    given.options.scale = 0
    with pytest.raises(
        TypeError, match=r"'hospital:images' must return jaxdp\.data\.Examples, .* got int"
    ):
        data.parts(given, "private")
    given.source = "hospital:nothing"
    with pytest.raises(ValueError, match=r"'hospital:nothing' cannot be imported"):
        data.parts(given, "private")


@pytest.mark.slow
def test_unit_and_adjacency_of_the_config_reach_the_ledger(tmp_path):
    """Broken twin: with the unit fixed to "example", or with the noise of "add_remove", the run
    exceeds its budget."""
    study = tiny.finetune()
    study.data.unit, study.data.adjacency = "scan", "replace_one"
    result = frame.run(finetune.STUDY, study, tmp_path)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (entry,) = ledger.report()["datasets"]
        assert (entry["unit"], entry["adjacency"]) == ("scan", "replace_one")
    assert 0.9 * study.private.epsilon < result["epsilon"] <= study.private.epsilon
    assert finetune.STUDY.summary(result).count("(replacing one scan)") == 1


# --- A table ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Writes the bundled table as a clinic exports it, two rows of a patient, and its columns."""
    root = tmp_path_factory.mktemp("table")
    rows = bundled("breast_cancer").gather(np.arange(300))
    with (root / "patients.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["patient", "outcome", *(f"mean.{k}" for k in range(4))])
        for k, (features, label) in enumerate(zip(rows["features"], rows["label"], strict=True)):
            writer.writerow([f"P{k // 2:03}", ("ill", "well")[label], *features[:4]])
    ranges = {f"mean.{k}": (-1, 1) for k in range(4)}
    (root / "columns.json").write_text(json.dumps({"ranges": ranges, "delimiter": ";"}))
    return root


def table_config(table, **fields):
    config = importlib.import_module("configs.finetune.csv").get_config(str(table / "columns.json"))
    changes = {"data.path": str(table / "patients.csv"), "data.label": "outcome"}
    changes |= {"data.class_names": ("ill", "well"), "private.steps": 20}
    changes |= {"private.checkpoint_every": 20, "model.options.hidden": ()}
    config.update_from_flattened_dict(changes | fields)
    return config


GROUP = {"data.group": "patient", "data.unit": "patient", "data.max_records": 2}


def test_the_parts_of_a_table_share_no_patient(table):
    parts = data.specs(
        table_config(table, **GROUP).data, "private", "test", grouped=True, tables=True
    )
    sources = {role: open_spec(spec) for role, spec in parts.items()}
    owners = {role: set(read_column(source, "patient")) for role, source in sources.items()}
    assert (len(owners["private"]), len(owners["test"])) == (120, 30)
    assert not owners["private"] & owners["test"]
    alone = {"data.options.drop": ("patient",)}
    rows = data.specs(table_config(table, **alone).data, "private", "test", tables=True)
    assert [len(open_spec(spec)) for spec in rows.values()] == [240, 60]


NO_CLASSES = {"data.class_names": ()}
IS_TEXT = r"'outcome' of .* is text.* config classes= is config\.data\.class_names"
TWICE_OR_TEXT = "'mean.0' is declared twice|'patient' of .* is text"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"data.path": "nowhere.csv"}, FileNotFoundError, "--config.data.path="),
        ({"data.parts.private": 0.9}, ValueError, "config.data.parts must be shares of the file"),
        ({"data.label": "result"}, ValueError, "header with 'result'"),
        (NO_CLASSES | GROUP, ValueError, IS_TEXT),
        (NO_CLASSES | {"data.label": "mean.0"}, ValueError, TWICE_OR_TEXT),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_a_workdir_is_bound(
    table, tmp_path, fields, error, message
):
    with pytest.raises(error, match=message):
        finetune.experiment(table_config(table, **fields), str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_a_table_is_fine_tuned_under_a_budget_of_patients(table, tmp_path):
    given = table_config(table, **GROUP)
    finetune.experiment(given, None, dry_run=True)
    result = finetune.experiment(given, str(tmp_path / "run"))
    assert (result["unit"], result["dataset"]) == ("patient", "table/private")
    assert 2.9 < result["epsilon"] <= 3
    # The noise depends on the machine and on the library, as the token of the release does. 60 runs
    # had 49.3 of 60 test records right, with a standard deviation of 1.4. The limit is five
    # deviations below. Without training 32 are right.
    assert round(60 * result["before"]) == 32 and round(60 * result["private"]) >= 42


def test_a_study_of_images_names_the_launchers_of_tables(table):
    """Before it asks for a field that a config of images lacks."""
    images = config(source="csv", path=str(table / "patients.csv"))
    message = "'csv' is a table.* launch.finetune .* launch.predict .* launch.recalibrate_client"
    with pytest.raises(ValueError, match=rf"config\.data\.source={message}"):
        data.specs(images, "private")
    with pytest.raises(ValueError, match=rf"config\.data\.client\.source={message}"):
        data.whole(images, "config.data.client")


@pytest.mark.slow
def test_a_scaler_and_the_training_share_one_budget_and_one_release(table, tmp_path):
    """The noise of the training leaves room: `tests/finetune/test_scaler.py` has the twin."""
    charged = {"private.scaler_noise_multiplier": 8.0}
    given = table_config(table, **GROUP, **charged)
    opened = finetune.STUDY.open(given, tmp_path)
    plan = list(finetune.STUDY.plan(given, lambda: opened))
    scaler, training = (item.event for item in plan)
    assert scaler == GaussianDpEvent(8.0)
    assert 2.99 < epsilon(ComposedDpEvent([scaler, training]), delta=1e-4) <= 3
    result = finetune.experiment(given, str(tmp_path / "run"))
    assert 2.99 < result["epsilon"] <= 3
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        spent = composition(ledger.events("table/private")[None])
    assert spent == composition(ComposedDpEvent([scaler, training]))
    # Another run finds no room for both, and pays for neither.
    with pytest.raises(BudgetExceeded):
        again = frame.Choice(tmp_path / "run" / "ledger.sqlite")
        finetune.experiment(given, str(tmp_path / "again"), choice=again)
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert composition(ledger.events("table/private")[None]) == spent
    # What is published takes rows as from_csv reads them, and scales them itself.
    folder = release.write(tmp_path / "run")
    released = Scaler.load(tmp_path / "run" / "scaler.json")
    rows = opened.task.test.gather(np.arange(5))["features"]
    task = opened.task.scaled(released)
    params = load_params(tmp_path / "run" / "params.safetensors")
    expected = special.softmax(jax.jit(task.network.apply_fn)(params, rows), axis=-1)
    np.testing.assert_allclose(load_released(folder)(rows), expected, atol=1e-5)
    # Its user can make the inputs: the features by name, and what their columns mean.
    meaning = json.loads((folder / "card.json").read_text())["inputs"]
    assert "in this order: mean.0, mean.1, mean.2, mean.3" in meaning and '"ranges"' in meaning
    with pytest.raises(ValueError, match="scaler_noise_multiplier must be 0 without columns"):
        no_ranges = table_config(table, **GROUP, **charged, **{"data.options.ranges": ()})
        finetune.STUDY.open(no_ranges, tmp_path)
    with pytest.raises(ValueError, match="scaler_noise_multiplier must be 0, for no scaler, or"):
        given.private.scaler_noise_multiplier = -1.0
        finetune.STUDY.open(given, tmp_path)


@pytest.mark.slow
def test_rows_of_a_table_get_certified_answers(table, tmp_path):
    """The ledger knows the rows themselves, as a training counts them."""
    module = importlib.import_module("configs.predict.csv")
    given = module.get_config(str(table / "columns.json"))
    changes = {"data.path": str(table / "patients.csv"), "data.label": "outcome"}
    changes |= {"data.class_names": ("ill", "well"), "data.options.drop": ("patient",)}
    changes |= {"training.records": 180, "prediction.queries": 20, "student.repetitions": 1}
    given.update_from_flattened_dict(changes)
    result = frame.run(predict.STUDY, given, tmp_path / "run")
    assert result["dataset"] == "table/private" and 9.9 < result["epsilon"] <= 10
    assert result["tested"] == 90 and len(result["released"]) == 2
    bench = predict.STUDY.open(given, tmp_path)
    (private,) = predict.STUDY.private(bench)
    source = open_spec(data.specs(given.data, "private", tables=True)["private"])
    assert private.records.fingerprint == source.fingerprint
    with pytest.raises(ValueError, match=r"parts\.public must name rows that are public"):
        given.data.parts.public = 0.0
        predict.STUDY.open(given, tmp_path)


@pytest.mark.parametrize("bad", [np.nan, 0.0])
def test_a_dry_run_warns_of_numbers_that_are_not_finite(folder, tmp_path, bad):
    parts = data.parts(config(source="folder", path=str(folder)), "private", "test")
    for name, source in parts.items():
        columns = source.load().arrays
        image = np.array(columns["image"], np.float32) / 255
        image[[1, 3], 0, 0] = bad
        np.savez(tmp_path / f"{name}.npz", image=image, label=columns["label"])

    def plan(config, opened):
        opened()
        return []

    study = dataclasses.replace(
        finetune.STUDY,
        open=lambda config, root: data.parts(config.data, "private")["private"],
        private=lambda source: [frame.PrivateSet(source.name, source, False)],
        cells=lambda config: [],
        plan=plan,
    )
    files = {"private": "private.npz", "test": "test.npz"}
    given = config(source="npz", path=str(tmp_path), parts=files)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame.run(study, ConfigDict({"data": given}), None, dry_run=True)
    messages = [str(warning.message) for warning in caught]
    counts = "2 of the first 5 examples hold NaN or an infinity (2 in 'image')"
    assert any(counts in message for message in messages) == np.isnan(bad)


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"delimiter": ";",}', "must be JSON in UTF-8"), ("[]", "must be an object of JSON")],
)
def test_a_damaged_file_of_columns_is_named(tmp_path, content, message):
    path = tmp_path / "columns.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        importlib.import_module("configs.tables").columns_of(str(path))
    # The reader of flags makes an error of the same class from one text.
    assert type(caught.value) is ValueError
