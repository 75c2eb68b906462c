"""Choices of records: the one seeded order, a few of each class, and pieces of a source."""

import numpy as np
import pytest

from jaxdp import tta
from jaxdp.data import bundled, from_arrays, read_column
from jaxdp.data.order import shuffled
from jaxdp.data.selection import at_most, choose, cut, few_shots, held, load_pixels, units
from jaxdp.data.shifts import CLEAN, Shift, shifted

ORDER = [6, 1, 8, 5, 2, 7, 9, 4, 3, 0]  # of seed 3


def test_the_seeded_order_never_changes():
    """Broken twin: NumPy's Generator.permutation, whose output NumPy may change."""
    assert shuffled(10, seed=3).tolist() == ORDER
    assert sorted(shuffled(1000, seed=2**127)) == list(range(1000))
    assert choose(10, 4, seed=3).tolist() == ORDER[:4]


@pytest.mark.parametrize("seed", [None, 1.5, -1])
def test_an_order_needs_a_seed(seed):
    """Before, None divided a set otherwise at each call."""
    with pytest.raises((TypeError, ValueError), match="seed must be"):
        bundled("digits").split([0.5, 0.5], seed=seed)


def test_divisions_choices_and_streams_have_the_same_order():
    source = bundled("digits").take(np.arange(50))
    order = shuffled(50, seed=9).tolist()
    (part,) = source.split([1.0], seed=9)
    assert part.positions.tolist() == at_most(source, 0, seed=9).positions.tolist() == order
    (batch,) = tta.Stream({"a": source}, batch_size=50, seed=9)
    assert list(batch.units) == order


def test_a_few_of_each_class():
    digits = bundled("digits")
    labels = read_column(digits, "label")
    first = few_shots(digits, 3, seed=None)
    rows = np.concatenate([np.flatnonzero(labels == k)[:3] for k in range(10)])
    np.testing.assert_array_equal(first["image"], digits.gather(rows)["image"])
    drawn = few_shots(digits, 3, seed=1)
    np.testing.assert_array_equal(drawn["label"], first["label"])
    assert (drawn["image"] != first["image"]).any()
    for seed in (None, 1):
        with pytest.raises(ValueError, match=r"shots must be at most 174, .* got 175"):
            few_shots(digits, 175, seed=seed)


def test_pieces_without_owners_differ_by_one():
    pieces = cut(from_arrays(x=np.arange(7)), 3)
    assert [piece.positions.tolist() for piece in pieces] == [[0, 1, 2], [3, 4], [5, 6]]


def test_features_have_the_owners_of_their_records():
    scans = from_arrays(x=np.arange(5), patient=np.array(["b", "a", "b", "b", "a"]))
    features = from_arrays(features=np.eye(5))
    people = units(scans, "patient", max_records=2, computed=features)
    assert people.source is features and people.rows.tolist() == [[0, 2], [1, 4]]
    records, owners = held(people)
    assert records.positions.tolist() == [0, 1, 2, 4] and owners.tolist() == [0, 1, 0, 1]


def test_a_shift_is_computed_published_or_none(tmp_path):
    source = bundled("digits").take(np.arange(3))
    assert shifted(source, Shift(CLEAN)) is source
    assert shifted(source, Shift("rotation", strength=30.0)).name == "digits/rotation"
    with pytest.raises(ValueError, match="must have the images for the shift 'fog', got none"):
        shifted(None, Shift("fog"))
    published = Shift("fog", published="cifar10_corrupted", data_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="cifar10_corrupted/fog_5"):
        shifted(None, published)


def test_pixels_are_loaded_once_with_progress():
    source = bundled("digits").take(np.arange(300))
    batches = []
    loaded = load_pixels(source, name="copy", progress=lambda all_: batches.extend(all_) or all_)
    assert [len(rows) for rows in batches] == [256, 44] and loaded.name == "copy"
    assert loaded.arrays["image"].dtype == np.uint8
    np.testing.assert_allclose(
        loaded.gather(np.arange(300))["image"], source.gather(np.arange(300))["image"], atol=0.002
    )
