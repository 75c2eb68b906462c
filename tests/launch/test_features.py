"""Features of private prediction: each depends on one record, for data of every kind."""

import dataclasses
import os
import pathlib
from collections import Counter

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxdp import data
from jaxdp.data import apart as checks
from jaxdp.models import save_params
from jaxdp.prediction.features import FeatureMap
from launch import data as studies
from launch import features, models, teachers

FEATURES = {"dimensions": 0, "whiten": 1.0, "radius": 1.0}


def rows(source):
    return source.gather(np.arange(len(source)))


def load(config, network="nowhere.safetensors"):
    return features.read(config).compute(pathlib.Path(network))


# --- Blobs --------------------------------------------------------------------------------------


def test_blobs_are_the_two_gaussians_with_their_powers():
    config = ConfigDict(
        {"kind": "blobs", "separation": 1.25, "std": 0.35, "train": 20_000, "test": 1000, "seed": 0}
    )
    task = load(config)
    features, label = rows(task.train)["features"].astype(np.float64), rows(task.train)["label"]
    assert features.shape == (20_000, 6) and task.train.num_classes == 2 and len(task.test) == 1000
    for value, sign in ((0, -1), (1, 1)):
        points = features[label == value, :2]
        # Standard errors are 0.0035 and 0.0025: five of them.
        np.testing.assert_allclose(points.mean(axis=0), sign * 1.25, atol=0.018)
        np.testing.assert_allclose(points.std(axis=0), 0.35, atol=0.013)
    np.testing.assert_allclose(features[:, 2:4], features[:, :2] ** 2, rtol=1e-5)
    np.testing.assert_allclose(features[:, 4:], features[:, :2] ** 3, rtol=1e-5)
    assert not np.isin(rows(task.test)["features"][:, 0], features[:, 0].astype(np.float32)).any()


# --- Images -------------------------------------------------------------------------------------


def digits_config(**changes):
    config = {
        "kind": "images",
        "source": "bundled",
        "name": "digits",
        "split_seed": 0,
        "parts": {"public": 0.1, "private": 0.6, "test": 0.3},
        "classes": (),
        "keep": (),
        "features": {"dimensions": 16, "whiten": 0.5, "radius": 1.0},
    }
    return ConfigDict({**config, **changes})


def test_digits_are_split_and_mapped_on_public_images_only():
    task = load(digits_config())
    assert (len(task.train), len(task.test), task.train.num_classes) == (1078, 539, 10)
    public, private, test = data.bundled("digits").split([0.1, 0.6, 0.3], seed=0)
    pixels = [rows(part)["image"].reshape(len(part), -1) for part in (public, private, test)]
    expected = FeatureMap.from_public(pixels[0], dimensions=16, whiten=0.5)
    np.testing.assert_array_equal(rows(task.train)["features"], expected(pixels[1]))
    np.testing.assert_array_equal(rows(task.test)["features"], expected(pixels[2]))
    np.testing.assert_array_equal(rows(task.train)["label"], rows(private)["label"])
    assert "180 public images without their labels" in task.provenance


def medmnist(path, *, leave_out=()):
    generator = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 600), ("val", 60), ("test", 50)):
        arrays[f"{split}_images"] = generator.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{split}_labels"] = generator.integers(0, 4, (count, 1), np.uint8)
    np.savez(path, **{name: array for name, array in arrays.items() if name not in leave_out})
    return arrays


def medmnist_config(path, **changes):
    fields = {
        "path": str(path),
        "num_classes": 4,
        "parts": {"public": "val", "private": "train", "test": "test"},
        "features": {"dimensions": 8, "whiten": 1.0, "radius": 1.0},
    }
    return digits_config(source="npz", name="octmnist", **{**fields, **changes})


@pytest.mark.slow
def test_two_classes_of_a_medmnist_file(tmp_path):
    arrays = medmnist(tmp_path / "octmnist.npz")
    task = load(medmnist_config(tmp_path / "octmnist.npz", classes=(3, 2)))
    kept = arrays["train_labels"][:, 0] >= 2
    assert task.train.num_classes == 2 and len(task.train) == kept.sum()
    np.testing.assert_array_equal(rows(task.train)["label"], arrays["train_labels"][kept, 0] == 2)


def test_which_images_of_a_class_are_kept_depends_on_each_image_alone(tmp_path):
    arrays = medmnist(tmp_path / "file.npz")
    config = medmnist_config(tmp_path / "file.npz", classes=(2, 1), keep=(0.25, 1.0))
    config.parts = {"public": "val", "private": "test", "test": "train"}  # the largest
    kept = rows(load(config).test)
    counts, renamed = (
        Counter(arrays["train_labels"][:, 0].tolist()),
        Counter(kept["label"].tolist()),
    )
    assert renamed[1] == counts[1]
    # About 150 coins of probability 1/4: six standard deviations are 32.
    assert abs(renamed[0] - 0.25 * counts[2]) < 32
    for name in ("train_images", "train_labels"):
        arrays[name] = arrays[name][1:]
    np.savez(tmp_path / "fewer.npz", **arrays)
    config.path = str(tmp_path / "fewer.npz")
    fewer = rows(load(config).test)
    first = len(kept["label"]) - len(fewer["label"])
    assert first in (0, 1)
    np.testing.assert_array_equal(fewer["features"], kept["features"][first:])


def test_as_many_shares_as_classes(tmp_path):
    medmnist(tmp_path / "file.npz")
    with pytest.raises(
        ValueError, match=r"config\.data\.keep must have a share for each of 2 classes"
    ):
        load(medmnist_config(tmp_path / "file.npz", classes=(2, 1), keep=(0.25,)))


def test_a_part_of_a_file_has_one_role(tmp_path):
    medmnist(tmp_path / "file.npz")
    parts = {"public": "val", "private": "train", "test": "val"}
    with pytest.raises(ValueError, match=r"config\.data\.parts has 'val' for several roles"):
        load(medmnist_config(tmp_path / "file.npz", parts=parts))


def test_a_file_that_is_not_there_or_lacks_arrays_is_named_with_the_remedy(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"File .* does not exist.*val_images, .*--config.data.path="
    ):
        load(medmnist_config(tmp_path / "octmnist.npz"))
    medmnist(tmp_path / "octmnist.npz", leave_out=("val_labels",))
    with pytest.raises(
        ValueError, match=r"has no array val_labels. It has .*\. Make it again with val_images, "
    ):
        load(medmnist_config(tmp_path / "octmnist.npz"))


@pytest.mark.slow
def test_the_frozen_network_falls_back_on_the_digits_and_looks_at_one_image_at_a_time(
    tmp_path, capsys
):
    medmnist(tmp_path / "file.npz")
    network = {"steps": 3, "batch_size": 8, "learning_rate": 1e-3, "seed": 0}
    parts = {"upstream": "fashion_mnist/train", "public": "val", "private": "train", "test": "test"}
    config = medmnist_config(
        tmp_path / "file.npz", network=network, parts=parts, data_dir=str(tmp_path / "nowhere")
    )
    task = load(config)
    assert "fashion_mnist/train is missing" in capsys.readouterr().out
    assert "trained on digits" in task.provenance and sorted(task.network) == ["conv_0", "conv_1"]
    save_params(tmp_path / "network.safetensors", task.network)
    config.network.steps = 10**6  # it is there, and not trained
    np.testing.assert_array_equal(
        rows(load(config, tmp_path / "network.safetensors").train)["features"],
        rows(task.train)["features"],
    )

    images = np.random.default_rng(0).random((11, 28, 28, 1), np.float32)

    apply = jax.jit(features.Convolutions(0).apply)

    def extract(images):
        return np.asarray(apply({"params": task.network}, images))

    found = extract(images)
    assert found.shape == (11, 3200)
    np.testing.assert_allclose(found[-1:], extract(images[-1:]), rtol=1e-4, atol=1e-5)
    # Brightness and contrast of an image do not matter, what it shows does.
    np.testing.assert_allclose(extract(0.5 * images[:2] + 0.2), found[:2], atol=0.05 * found.max())
    assert np.abs(found[0] - found[1]).max() > 0.1 * found.max()
    np.testing.assert_allclose(
        extract(np.repeat(images[:2], 3, axis=3)), found[:2], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_the_published_network_goes_on_from_its_own_dense_layers(tmp_path):
    medmnist(tmp_path / "file.npz")
    network = {"steps": 2, "batch_size": 8, "learning_rate": 1e-2, "seed": 0}
    network |= {"classes": ((3,), (0, 1)), "dense": True}
    parts = {"upstream": "val", "private": "train", "test": "test"}
    options = {"network": network, "parts": parts, "classes": (3, 2), "features": {}}
    task = load(medmnist_config(tmp_path / "file.npz", **options))
    assert task.train.num_classes == 2 and sorted(task.network) == NETWORK
    spec = data.DataSpec(source="npz", path=str(tmp_path / "file.npz"), part="test", num_classes=4)
    images = rows(data.open(spec).of_classes((3, 2)))["image"]
    logits = jax.jit(features.Convolutions(2).apply)({"params": task.network}, images)
    model = models.Dense(3200, 2, hidden=(100,), bias=True, init_seed=0)
    single = model._batched(task.start, rows(task.test)["features"])
    np.testing.assert_allclose(single, logits[:, 1] - logits[:, 0], rtol=1e-3, atol=1e-4)
    assert np.std(single) > 0
    # Another number of classes has a new last layer.
    others = features._dense_layers(task.network, 3)
    assert others["dense_1"]["kernel"].shape == (100, 3) and not others["dense_1"]["kernel"].any()
    with pytest.raises(ValueError, match=r"config.data.network.dense needs .* hidden=\(100,\)"):
        teachers._start(dataclasses.replace(model, hidden=(50,)), task.start)


NETWORK = ["conv_0", "conv_1", "dense", "head"]


# --- Text ---------------------------------------------------------------------------------------


TREEBANK = "i do n't think it 's well-made ... great ! ! ca n't , `` no ''"


def test_tokens_are_split_as_the_treebank_does():
    assert (
        " ".join(features.tokenize("I don't think it's WELL-made... <br />Great!! can't, ``no''"))
        == TREEBANK
    )
    assert " ".join(features.tokenize(TREEBANK)) == TREEBANK


def test_words_after_a_negation_change_sign_up_to_the_end_of_the_clause():
    tokens = features.tokenize("a good film , not a good one at all , never good")
    assert features.signs(tokens, 3) == [1, 1, 1, 1, 1, -1, -1, -1, 1, 1, 1, 1, -1]
    assert features.signs(["not", "good", ",", "good"], 3) == [1, -1, -1, 1]
    assert features.signs(tokens, 0) == [1] * len(tokens)


WORDS = ["good", "bad", "film", "the", "not"]


@pytest.fixture
def text_config(tmp_path, monkeypatch):
    """Returns a text task of five known words, whose sentences a test chooses."""
    vectors = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float16)
    counts = np.array([50.0, 40.0, 100.0, 1000.0, 10.0])
    np.savez(tmp_path / "vectors.npz", words=np.array(WORDS, "S10"), vectors=vectors, counts=counts)
    config = {
        "kind": "text",
        "name": "sentences",
        "data_dir": "",
        "field": "sentence",
        "parts": {"private": "train", "test": "test"},
        "word_vectors": str(tmp_path / "vectors.npz"),
        "weight": 0.01,
        "negation": 3,
        "features": FEATURES,
    }

    def load(sentences):
        read = {"train": sentences, "test": ["good film", "bad"]}
        monkeypatch.setattr(
            studies,
            "texts",
            lambda spec, field: (
                read[spec.part],
                np.arange(len(read[spec.part]), dtype=np.int32) % 2,
            ),
        )
        apart = []
        monkeypatch.setattr(checks, "check_disjoint", lambda parts: apart.append(list(parts)))
        found = rows(features.read(ConfigDict(config)).compute(tmp_path / "none").train)["features"]
        assert apart == [["config.data.parts.private", "config.data.parts.test"]]
        return found

    return load, vectors.astype(np.float64), counts / counts.sum()


def test_a_sentence_is_the_whitened_weighted_mean_of_its_words(text_config):
    load, vectors, frequency = text_config
    found = load(["the good film unknown", "nothing known", "not bad"])
    table = vectors * (0.01 / (0.01 + frequency))[:, None]
    mean = frequency @ table
    covariance = sum(
        p * np.outer(v - mean, v - mean) for p, v in zip(frequency, table, strict=True)
    )
    variances, axes = np.linalg.eigh(covariance)
    for row, vector in ((0, table[[3, 0, 2]].mean(axis=0)), (2, (table[4] - table[1]) / 2)):
        mapped = ((vector - mean) @ axes / np.sqrt(variances))[::-1]
        np.testing.assert_allclose(
            np.abs(found[row]), np.abs(mapped) / np.linalg.norm(mapped), rtol=1e-4
        )
    assert (found[1] == 0).all()


def test_a_sentence_more_or_less_changes_no_other_feature(text_config):
    load, *_ = text_config
    sentences = ["the good film", "bad bad film", "not the film"]
    np.testing.assert_array_equal(load(sentences)[1:], load(sentences[1:]))


def test_text_is_read_from_tfds_without_tensorflow(tmp_path):
    import tensorflow_datasets as tfds

    examples = [{"sentence": "good — film", "label": 1}, {"sentence": "bad", "label": 0}]

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            label = tfds.features.ClassLabel(num_classes=2)
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(
                    {"sentence": tfds.features.Text(), "label": label}
                ),
            )

        def _split_generators(self, dl_manager):
            return {
                "train": enumerate(examples),
                "unlabelled": enumerate([{"sentence": "film", "label": -1}]),
            }

        def _generate_examples(self):
            raise AssertionError("never called")

    Builder.name = "tiny_reviews"
    # Within a package TFDS 4.9.10 imports importlib_resources to write, which it does not depend
    # on.
    Builder.__module__ = "__main__"
    Builder(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
    spec = data.DataSpec(source="tfds", name="tiny_reviews", part="train", data_dir=str(tmp_path))
    sentences, label = studies.texts(spec, "sentence")
    assert sorted(zip(sentences, label.tolist(), strict=True)) == [("bad", 0), ("good — film", 1)]
    with pytest.raises(
        ValueError, match="split 'unlabelled' of data set 'tiny_reviews' has no labels"
    ):
        studies.texts(dataclasses.replace(spec, part="unlabelled"), "sentence")


# --- Embeddings ---------------------------------------------------------------------------------


def test_embeddings_come_from_a_file_with_a_public_part(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {
        f"{part}_features": generator.normal(size=(40, 5)) for part in ("train", "test", "public")
    }
    labels = {f"{part}_labels": generator.integers(0, 3, 40) for part in ("train", "test")}
    np.savez(tmp_path / "file.npz", **arrays, **labels)
    config = {
        "kind": "embeddings",
        "name": "texts",
        "path": str(tmp_path / "file.npz"),
        "num_classes": 3,
    }
    task = load(ConfigDict({**config, "features": FEATURES}))
    expected = FeatureMap.from_public(arrays["public_features"])(arrays["test_features"])
    np.testing.assert_array_equal(rows(task.test)["features"], expected)
    assert task.train.num_classes == 3 and task.train.name == "texts/train"


@pytest.mark.slow
@pytest.mark.download
def test_the_real_texts_and_images(tmp_path):
    directory = os.environ["JAXDP_DATA_DIR"]
    sentences, label = studies.texts("glue/sst2", "validation", "sentence", data_dir=directory)
    assert len(sentences) == 872 and label.sum() == 444
    fields = {"parts": {"public": "val", "private": "train", "test": "test"}, "data_dir": directory}
    task = load(digits_config(source="tfds", name="pneumonia_mnist", **fields))
    assert (len(task.train), len(task.test), task.train.num_classes) == (4708, 624, 2)
