"""Clean and shifted images of an experiment."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxdp.data import bundled, shifts

CONFIG = ConfigDict({"source": "bundled", "name": "digits", "test_fraction": 0.4, "severity": 5, "corrupted_name": ""})


def unused(images):
    raise AssertionError("digits need no preparation")


def test_clean_images_are_no_test_images():
    clean, test = shifts.clean_images(CONFIG, unused), shifts.shifted_images(CONFIG, "clean", unused)
    assert len(clean) == 1078 and len(test) == 719
    assert sorted([*clean.rows, *test.rows]) == list(range(1797))
    whole = bundled("digits")
    np.testing.assert_array_equal(test.gather(np.arange(5))["image"], whole.gather(test.rows[:5])["image"])


def test_a_shift_changes_pixels_only():
    test, shifted = (shifts.shifted_images(CONFIG, shift, unused) for shift in ("clean", "contrast"))
    first, second = (source.gather(np.arange(50)) for source in (test, shifted))
    np.testing.assert_array_equal(first["label"], second["label"])
    assert second["image"].std() < 0.5 * first["image"].std()


def test_an_unknown_shift_is_refused():
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'rain'"):
        shifts.shifted_images(CONFIG, "rain", unused)


def test_sets_that_are_corrupted_already_and_clean_ones_are_read(monkeypatch):
    asked = []
    monkeypatch.setattr(shifts, "corrupted_tfds", lambda *args, **kwargs: asked.append(("corrupted", args, kwargs)))
    monkeypatch.setattr(shifts, "check_disjoint", lambda parts: None)
    monkeypatch.setattr(shifts, "from_tfds", lambda *args, **kwargs: asked.append(("tfds", args, kwargs)))
    config = ConfigDict(
        {
            "source": "tfds",
            "name": "imagenet2012",
            "test_split": "validation",
            "public_name": "imagenet2012",
            "public_split": "train",
            "data_dir": "somewhere",
            "prepare": True,
            "corrupted_name": "imagenet2012_corrupted",
            "severity": 3,
        }
    )
    shifts.shifted_images(config, "fog", unused)
    shifts.shifted_images(config, "clean", unused)
    shifts.shifted_images(config, "clean", unused)  # is not read again
    shifts.clean_images(config, unused)
    assert asked == [
        ("corrupted", ("imagenet2012_corrupted", "fog", 3), {"data_dir": "somewhere"}),
        ("tfds", ("imagenet2012", "validation"), {"data_dir": "somewhere", "prepare": unused}),
        ("tfds", ("imagenet2012", "train"), {"data_dir": "somewhere", "prepare": unused}),
    ]
    shifts._read.cache_clear()
