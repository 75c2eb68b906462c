"""Hashes of records recognise equal records in any order, and tell different ones apart."""

import hashlib

import numpy as np
import pytest

from jaxdp.data import from_arrays, record_digests

KEY = bytes(range(32))


def source(image, label, **options):
    return from_arrays(image=image, label=label, num_classes=4, **options)


@pytest.fixture
def records(rng):
    # more than are in memory at once
    return rng.integers(0, 256, (1500, 2, 2, 1), np.uint8), rng.integers(0, 4, 1500)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_digests_are_those_of_an_independent_computation():
    image, label = np.arange(4, dtype=np.float32).reshape(1, 2, 2, 1) / 4, np.array([3])
    batch = source(image, label).gather(np.array([0]))
    dtype = np.asarray(batch["label"]).dtype
    header = repr([("<f4", (2, 2, 1)), (dtype.str, ())]).encode()
    content = header + np.asarray(batch["image"]).tobytes() + np.array(3, dtype).tobytes()
    expected = hashlib.blake2b(content, digest_size=8, key=KEY).digest()
    (digest,) = record_digests(source(image, label), key=KEY)
    assert int(digest) == int.from_bytes(expected, "little")


def test_order_name_and_repetition_do_not_matter(records, rng):
    image, label = records
    whole = record_digests(source(image, label, name="a"), key=KEY)
    rows = rng.permutation(np.arange(3000) % 1500)
    again = record_digests(source(image[rows], label[rows], name="b"), key=KEY)
    np.testing.assert_array_equal(whole, again)
    part = record_digests(source(image[:100], label[:100]), key=KEY)
    assert np.isin(part, whole).all()


def test_other_records_labels_and_keys_have_other_digests(records):
    image, label = records
    image = image.copy()
    image[:, 0, 0, 0] = np.arange(1500) % 251
    image[:, 0, 1, 0] = np.arange(1500) // 251  # so no two images are equal
    whole = record_digests(source(image, label), key=KEY)
    assert len(whole) == 1500
    for other in (
        record_digests(source(image ^ 1, label), key=KEY),
        record_digests(source(image, (label + 1) % 4), key=KEY),
        record_digests(source(image, label), key=bytes(32)),
    ):
        assert len(np.intersect1d(whole, other)) < 1500 * 0.7
    assert not np.isin(record_digests(source(image, label), key=bytes(32)), whole).any()


def test_a_short_key_is_refused(records):
    with pytest.raises(ValueError, match="key must have 16 to 64 bytes, got 3"):
        record_digests(source(*records), key=b"abc")
