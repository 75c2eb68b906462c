"""TFDS sources: a tiny data set prepared on the spot, and the real ones where a directory is
given."""

import io
import logging
import os
import socket
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxdp.data import check_disjoint, from_tfds, read_column
from jaxdp.data.apart import check_sets_apart
from jaxdp.files import Limits
from launch.data import ROLES, parts, whole

EXPECTED = {
    ("fashion_mnist", "train"): (60000, 10, (28, 28, 1)),
    ("cifar10", "test"): (10000, 10, (32, 32, 3)),
    ("cifar100_subset", "train"): (8000, 100, (32, 32, 3)),
    ("usps", "test"): (2007, 10, (16, 16, 1)),
    ("pneumonia_mnist", "val"): (524, 2, (28, 28, 1)),
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
    """A TFDS directory with the data sets tiny_image, tiny_slices, tiny_text, ..., prepared without
    TensorFlow."""
    import PIL.Image
    import tensorflow_datasets as tfds

    directory = str(tmp_path_factory.mktemp("tfds"))
    label = tfds.features.ClassLabel(num_classes=3)

    def picture(height, width, value):
        return PIL.Image.fromarray(np.full((height, width, 3), value, np.uint8))

    def prepare(name, features, examples, **others):
        class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                return tfds.core.DatasetInfo(
                    builder=self, features=tfds.features.FeaturesDict(features)
                )

            def _split_generators(self, dl_manager):
                return {
                    "train": enumerate(examples),
                    **{split: enumerate(rows) for split, rows in others.items()},
                }

            def _generate_examples(self):
                raise AssertionError("never called")

        Builder.name = name
        # Within a package TFDS 4.9.10 imports importlib_resources to write, which it does not
        # depend on.
        Builder.__module__ = "__main__"
        Builder(data_dir=directory, file_format="array_record").download_and_prepare()

    image = tfds.features.Image(shape=(4, 5, 3))
    prepare(
        "tiny_image",
        {"image": image, "label": label, "id": tfds.features.Text()},
        [{"image": picture(4, 5, 10 * k), "label": k % 3, "id": str(k)} for k in range(7)],
    )
    prepare(
        "tiny_slices",
        {"image": image, "label": label},
        [{"image": picture(4, 5, k), "label": 0} for k in range(40)],
        test=[{"image": picture(4, 5, 100 + k), "label": 1} for k in range(10)],
    )
    prepare(
        "tiny_unlabelled",
        {"image": image, "label": label},
        [{"image": picture(4, 5, 0), "label": -1}],
    )
    prepare(
        "tiny_text",
        {"sentence": tfds.features.Text(), "label": label},
        [{"sentence": "a", "label": 0}],
    )
    ragged = tfds.features.Image(shape=(None, None, 3))
    prepare(
        "tiny_ragged",
        {"image": ragged, "label": label},
        [{"image": picture(2 + k, 5, 0), "label": 0} for k in range(2)],
    )

    def bomb():
        file = io.BytesIO()
        PIL.Image.new("1", (9000, 9000)).save(file, "PNG")  # 10 kB, which decode to 243 MB of RGB
        return io.BytesIO(file.getvalue())

    prepare(
        "tiny_bomb",
        {"image": image, "label": label},
        [{"image": picture(4, 5, 0), "label": 0}, {"image": bomb(), "label": 0}],
    )
    prepare("tiny_large", {"image": ragged, "label": label}, [{"image": bomb(), "label": 0}])
    prepare(
        "tiny_damaged",
        {"image": image, "label": label},
        [{"image": io.BytesIO(b"no picture"), "label": 0}],
    )
    return directory


@pytest.mark.slow
def test_a_prepared_image_data_set_is_read_without_tensorflow(data_dir):
    source = from_tfds("tiny_image", "train", data_dir=data_dir)
    assert (len(source), source.num_classes, source.name) == (7, 3, "tiny_image/train")
    assert source.arrays["image"].dtype == np.uint8
    batch = source.gather(np.arange(7))
    values = np.rint(batch["image"] * 255)
    np.testing.assert_array_equal(values, np.broadcast_to(values[:, :1, :1, :1], (7, 4, 5, 3)))
    order = values[:, 0, 0, 0] / 10
    assert sorted(order) == list(range(7))
    np.testing.assert_array_equal(batch["label"], order % 3)
    assert len(from_tfds("tiny_image", "train[:3]", data_dir=data_dir)) == 3
    assert "tensorflow" not in sys.modules


def test_images_on_demand_are_those_in_memory(data_dir):
    whole = from_tfds("tiny_slices", "train", data_dir=data_dir)
    lazy = from_tfds("tiny_slices", "train", data_dir=data_dir, in_memory=False)
    assert (len(lazy), lazy.num_classes, lazy.name) == (40, 3, "tiny_slices/train")
    rows = np.array([7, 3, 3, 39])
    for key, expected in whole.gather(rows).items():
        read = lazy.gather(rows)[key]
        assert read.dtype == expected.dtype
        np.testing.assert_array_equal(read, expected)
    np.testing.assert_array_equal(read_column(lazy.take(rows), "label"), np.zeros(4))
    assert lazy.fingerprint == whole.fingerprint


def test_an_error_of_an_image_on_demand_names_the_record(data_dir):
    options = {"data_dir": data_dir, "in_memory": False}
    with pytest.raises(ValueError, match=r"image 0 of tiny_damaged/train in .* is damaged"):
        from_tfds("tiny_damaged", "train", **options)
    bomb = from_tfds("tiny_bomb", "train", **options)  # its first image is a small one
    with pytest.raises(ValueError, match=r"image 1 of tiny_bomb/train in .* is 9000x9000"):
        bomb.gather(np.array([1]))
    unlabelled = from_tfds("tiny_unlabelled", "train", **options)
    with pytest.raises(ValueError, match=r"tiny_unlabelled/train in .* has no label"):
        unlabelled.gather(np.array([0]))


@pytest.mark.slow
def test_the_directory_comes_from_the_environment(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", data_dir)
    assert len(from_tfds("tiny_image", "train")) == 7


@pytest.mark.slow
def test_download_keeps_what_is_prepared(data_dir):
    assert len(from_tfds("tiny_image", "train", data_dir=data_dir, download=True)) == 7


@pytest.mark.parametrize("name", ["cifar10", "usps"])
def test_a_data_set_that_is_not_there_is_a_clear_error(name, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(FileNotFoundError) as caught:
        from_tfds(name, "train", data_dir=str(tmp_path))
    message = str(caught.value)
    assert f"'{name}' is not prepared" in message and str(tmp_path) in message
    assert f"tfds build {name} --file_format=array_record --data_dir={tmp_path}" in message
    own = (
        "does not list" in message
        and "jaxdp.data.from_npz" in message
        and "source='npz'" in message
    )
    assert own == (name != "cifar10")  # TFDS cannot build what its catalogue lacks
    assert "data_dir=" in message and "TFDS_DATA_DIR" in message
    assert not list(tmp_path.iterdir())


def test_a_download_that_lacks_tensorflow_says_how_to_prepare_elsewhere(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    def lacks_tensorflow(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'tensorflow'")

    monkeypatch.setattr(tfds, "data_source", lacks_tensorflow)
    with pytest.raises(FileNotFoundError, match="pip install tensorflow-datasets tensorflow"):
        from_tfds("cifar10", "train", data_dir=str(tmp_path), download=True)


def test_an_unknown_split_is_refused(data_dir):
    with pytest.raises(ValueError, match=r"split 'test' of data set 'tiny_image' .* \['train'\]"):
        from_tfds("tiny_image", "test", data_dir=data_dir)


OVERLAPS = {  # of 40 records to train on and 10 to test on: what two slices share
    ("train[:20]", "train[15:30]"): "5 records, [15:20] of 'train'",
    ("train", "train[39:]"): "1 record, [39:40] of 'train'",
    ("train[:50%]", "train[45%:]"): "2 records, [18:20] of 'train'",
    ("train[-10%:]", "train[35:]"): "4 records, [36:40] of 'train'",
    ("train[:10]+test", "test[5:]"): "5 records, [5:10] of 'test'",
    ("all", "test[:1]"): "1 record, [0:1] of 'test'",
    ("train[0shard]", "train[:1]"): "1 record, [0:1] of 'train'",
}


@pytest.mark.parametrize("splits", OVERLAPS)
def test_parts_that_share_records_are_refused(data_dir, splits):
    parts = dict(
        zip(
            ("private", "stream"),
            (("tiny_slices", split, data_dir) for split in splits),
            strict=True,
        )
    )
    with pytest.raises(ValueError) as caught:
        check_disjoint(parts)
    first, second = (
        f"{part}=tiny_slices/{split}" for part, split in zip(parts, splits, strict=True)
    )
    assert f"{first} and {second} share {OVERLAPS[splits]}" in str(caught.value)
    pixels = [
        {*from_tfds("tiny_slices", split, data_dir=data_dir).arrays["image"][:, 0, 0, 0]}
        for split in splits
    ]
    assert len(pixels[0] & pixels[1]) == int(OVERLAPS[splits].split()[0])


def test_a_part_that_repeats_records_is_refused(data_dir):
    with pytest.raises(
        ValueError,
        match=r"a=tiny_slices/train\[:5\]\+train\[3:\] repeats 2 records, \[3:5\] of 'train'",
    ):
        check_disjoint({"a": ("tiny_slices", "train[:5]+train[3:]", data_dir)})


def test_parts_that_share_no_record_pass(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", data_dir)
    splits = ("train[:20]", "train[50%:60%]", "train[24:-5]", "train[-5:]", "test[:5]", "test[5:]")
    check_disjoint({split: ("tiny_slices", split, None) for split in splits})
    check_disjoint(
        {"a": ("tiny_slices", "train", data_dir), "b": ("tiny_image", "train", data_dir)}
    )


def test_parts_that_cannot_be_read_are_refused(data_dir):
    for split in ("valid", "train[:41]", "all[:3]"):
        with pytest.raises(
            ValueError,
            match=r"of data set 'tiny_slices' cannot be read. There are \['test', 'train'\]",
        ):
            check_disjoint({"a": ("tiny_slices", split, data_dir)})
    with pytest.raises(FileNotFoundError, match="'no_such_data_set' is not prepared"):
        check_disjoint({"a": ("no_such_data_set", "train", data_dir)})


def test_parts_that_share_a_record_are_refused(data_dir):
    config = {"source": "tfds", "name": "tiny_slices", "data_dir": data_dir}
    roles = {
        "public": "test",
        "private": "train[:20]",
        "sources": "tiny_slices/train[19:30]",
        "test": "train[30:]",
    }
    with pytest.raises(
        ValueError, match=r"parts.private=.* and config.data.parts.sources=.* share 1 record"
    ):
        parts(ConfigDict({**config, "parts": roles}), "public", "private")
    roles["sources"] = ""
    found = parts(ConfigDict({**config, "parts": roles}), *ROLES)
    assert {role: len(source) for role, source in found.items()} == {
        **{"public": len(found["public"]), "private": 20, "test": len(found["test"])}
    }


def check_apart(config, *others):
    sets = {name: whole(config[name], f"config.data.{name}") for name in ("client", *others)}
    check_sets_apart(sets["client"], *(sets[name] for name in others))


@pytest.mark.parametrize("name", ["server", "tuning", "client_test"])
def test_the_client_of_split_adaptation_shares_no_image(data_dir, name):
    def images(split, *classes):
        known = {"source": "tfds", "name": "tiny_slices", "data_dir": data_dir}
        return {**known, "split": split, "classes": classes}

    others = {
        "server": images("test"),
        "tuning": images("test"),
        "client_test": images("train[20:]"),
    }
    config = ConfigDict(
        {**others, "client": images("train[:20]", 0, 1), name: images("train[19:25]", 1, 2)}
    )
    with pytest.raises(
        ValueError, match=rf"config.data.client=.* and config.data.{name}=.* share 1 record,"
    ):
        check_apart(config, *others)
    others[name] = images("train", 2)  # other classes, other images
    check_apart(ConfigDict({**config, **others}), *others)
    others[name] = {**images("train"), "source": "bundled"}
    check_apart(ConfigDict({**config, **others}), *others)


def test_data_sets_that_are_not_handled_are_refused(data_dir):
    with pytest.raises(
        ValueError,
        match=r"features \['label', 'sentence'\].*Encode other records and use from_arrays",
    ):
        from_tfds("tiny_text", "train", data_dir=data_dir)
    with pytest.raises(ValueError, match=r"of one shape are handled. Pass prepare="):
        from_tfds("tiny_ragged", "train", data_dir=data_dir)
    with pytest.raises(ValueError, match="has no labels"):
        from_tfds("tiny_unlabelled", "train", data_dir=data_dir)


def test_images_of_differing_sizes_are_prepared(data_dir):
    def corners(images):
        return np.stack([image[:2, :2] for image in images]) / 255

    source = from_tfds("tiny_ragged", "train", data_dir=data_dir, prepare=corners)
    assert source.arrays["image"].dtype == np.uint8 and source.arrays["image"].shape[1:] == (
        2,
        2,
        3,
    )
    whole = from_tfds("tiny_image", "train", data_dir=data_dir)
    cut = from_tfds("tiny_image", "train", data_dir=data_dir, prepare=corners)
    np.testing.assert_array_equal(cut.arrays["image"], whole.arrays["image"][:, :2, :2])
    np.testing.assert_array_equal(cut.arrays["label"], whole.arrays["label"])


def test_the_size_of_an_image_is_read_before_it_is_decoded(data_dir):
    tracemalloc.start()
    with pytest.raises(
        ValueError,
        match=r"image 1 of tiny_bomb/train in .*1\.0\.0 is 9000x9000, but declared 4x5. Prepare",
    ):
        from_tfds("tiny_bomb", "train", data_dir=data_dir)
    limited = {
        "prepare": lambda images: np.zeros((len(images), 2, 2, 3)),
        "limits": Limits(pixels=10**6),
    }
    with pytest.raises(
        ValueError,
        match=r"image 0 of tiny_large/train in .* declares 81000000 pixels, more than the",
    ):
        from_tfds("tiny_large", "train", data_dir=data_dir, **limited)
    with pytest.raises(
        ValueError, match=r"image 0 of tiny_damaged/train in .* is damaged: UnidentifiedImageError"
    ):
        from_tfds("tiny_damaged", "train", data_dir=data_dir)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e7


def test_harmless_log_lines_are_dropped_and_others_kept(caplog, data_dir):
    logger = logging.getLogger("absl")

    def prepare(images):  # called while TFDS reads
        logger.error("File %s was created with group size %s", "a", 64)
        logger.error("something else")
        return np.stack(images) / 255

    from_tfds("tiny_image", "train", data_dir=data_dir, prepare=prepare)
    logger.error("File %s was created with group size %s", "b", 64)
    assert [record.getMessage() for record in caplog.records] == [
        "something else",
        "File b was created with group size 64",
    ]


@pytest.mark.download
@pytest.mark.parametrize(("name", "split"), EXPECTED)
def test_real_image_data_sets(name, split):
    directory = os.environ["JAXDP_DATA_DIR"]
    if not (Path(directory) / name).is_dir():
        pytest.skip(f"{name} is not in JAXDP_DATA_DIR")
    size, classes, shape = EXPECTED[name, split]
    source = from_tfds(name, split, data_dir=directory)
    assert (len(source), source.num_classes) == (size, classes)
    example = source[size - 1]
    assert (
        example["image"].shape == shape
        and 0 <= example["image"].min() <= example["image"].max() <= 1
    )


@pytest.mark.slow
@pytest.mark.download
def test_adult_is_encoded_with_public_constants():
    from sklearn.linear_model import LogisticRegression

    directory = os.environ["JAXDP_DATA_DIR"]
    if not (Path(directory) / "adult").is_dir():
        pytest.skip("adult is not in JAXDP_DATA_DIR")
    train, test = (
        from_tfds("adult", split, data_dir=directory) for split in ("train[:8000]", "test[:4000]")
    )
    fit, held_out = train.gather(np.arange(8000)), test.gather(np.arange(4000))
    features = fit["features"]
    assert features.shape == (8000, 107)
    assert features.min() >= 0 and features.max() <= 1
    np.testing.assert_array_equal(features[:, 5:].sum(axis=1), 8)
    model = LogisticRegression(max_iter=2000).fit(features, fit["label"])
    assert model.score(held_out["features"], held_out["label"]) > 0.83
