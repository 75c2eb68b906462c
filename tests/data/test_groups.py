"""Users as examples: who has which records, which of them count, and what a batch of users
holds."""

import datetime

import numpy as np
import pytest

from jaxdp import data

OWNERS = ["b", "a", "b", "c", "b", "a", "b"]
ROWS = [[0, 2, 4], [1, 5, -1], [3, -1, -1]]  # of b, a and c, at most three each


def records(n=7, **columns):
    values = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    return data.from_arrays(
        features=values, label=np.arange(n) % 2, num_classes=2, name="scans", **columns
    )


def test_a_batch_has_the_first_records_of_each_user_and_says_which_are_padding():
    users = data.by_group(records(), OWNERS, max_records=3)
    assert (len(users), users.name, users.num_classes) == (3, "scans", 2)
    np.testing.assert_array_equal(users.rows, ROWS)
    batch = users.gather(np.array([2, 0, 2]))
    np.testing.assert_array_equal(
        batch.present, [[True, False, False], [True] * 3, [True, False, False]]
    )
    np.testing.assert_array_equal(
        batch.records["features"][..., 0], [[6, 6, 6], [0, 4, 8], [6, 6, 6]]
    )
    np.testing.assert_array_equal(batch.records["label"], [[1, 1, 1], [0, 0, 0], [1, 1, 1]])
    assert users.gather(np.zeros(0, np.int64)).records["features"].shape == (0, 3, 2)


@pytest.mark.parametrize(
    "owner",
    [
        str,
        ord,
        lambda x: (x, 1),
        lambda x: x.encode(),
        lambda x: datetime.date(2026, 1, ord(x) - 96),
        lambda x: 2**80 + ord(x),
    ],
)
def test_owners_may_be_texts_whole_numbers_dates_and_tuples(owner):
    values = [owner(x) for x in OWNERS]
    np.testing.assert_array_equal(data.by_group(records(), values, max_records=3).rows, ROWS)


@pytest.mark.parametrize("dtype", ["U1", "S1", object])
def test_owners_may_be_an_array(dtype):
    np.testing.assert_array_equal(
        data.by_group(records(), np.array(OWNERS, dtype), max_records=3).rows, ROWS
    )


def test_a_column_names_the_owners_and_does_not_reach_the_examples():
    owners = np.array([ord(x) for x in OWNERS])
    users = data.by_group(records(patient=owners), "patient", max_records=3)
    np.testing.assert_array_equal(users.rows, ROWS)
    assert sorted(users.gather(np.array([0])).records) == ["features", "label"]
    part = data.by_group(
        records(patient=owners).take(np.array([6, 3, 1, 0])), "patient", max_records=2
    )
    np.testing.assert_array_equal(part.rows, [[0, 3], [1, -1], [2, -1]])
    with pytest.raises(ValueError, match="no column 'person'"):
        data.by_group(records(), "person", max_records=3)


def test_the_other_users_do_not_change_the_records_of_a_user():
    """The number of users is public, not their records: without a user, the others have the same
    examples."""
    whole = data.by_group(records(), OWNERS, max_records=2)
    for user, owner in enumerate("bac"):
        kept = [row for row in range(7) if OWNERS[row] != owner]
        rest = data.by_group(
            records().take(np.array(kept)), [OWNERS[row] for row in kept], max_records=2
        )
        expected = data.take(whole, np.delete(np.arange(3), user)).gather(np.arange(2))
        found = rest.gather(np.arange(2))
        np.testing.assert_array_equal(found.records["features"], expected.records["features"])
        np.testing.assert_array_equal(found.present, expected.present)


def test_the_fingerprint_covers_the_records_and_their_owners():
    prints = {
        data.by_group(source, owners, max_records=k).fingerprint
        for source, owners, k in [
            (records(), OWNERS, 3),
            (records(), OWNERS, 4),
            (records(), [*OWNERS[:-2], "b", "a"], 3),
            (records().take(np.arange(7)[::-1]), OWNERS, 3),
        ]
    }
    assert len(prints) == 4
    renamed = [x.upper() for x in OWNERS]
    assert data.by_group(records(), renamed, max_records=3).fingerprint in prints


IDENTIFIERS = "identifiers, which are texts or whole numbers"


@pytest.mark.parametrize(
    ("owners", "k", "error", "message"),
    [
        (OWNERS, 0, ValueError, "max_records must be at least 1, got 0"),
        (OWNERS[:-1], 3, ValueError, "one value for each of the 7 records, got 6"),
        ([*OWNERS[:-1], None], 3, ValueError, "group lacks a value"),
        ([*OWNERS[:-1], ""], 3, ValueError, "group lacks a value"),
        (np.array([1.0] * 6 + [np.nan]), 3, TypeError, f"{IDENTIFIERS}, got float64"),
        (np.zeros((7, 2), int), 3, TypeError, f"{IDENTIFIERS}, got list"),
    ],
)
def test_bad_groups_are_refused(owners, k, error, message):
    """A blank owner would join the records of several people, whose own groups then do not hold all
    they have."""
    with pytest.raises(error, match=message):
        data.by_group(records(), owners, max_records=k)


def test_a_part_is_of_users_and_repeats_none():
    source = data.from_arrays(x=np.arange(6))
    whole = data.by_group(source, list("aabbbc"), max_records=2)
    part = data.take(whole, np.array([2, 0]))
    assert isinstance(part, data.Groups) and len(part) == 2
    np.testing.assert_array_equal(part[0].records["x"], whole[2].records["x"])
    assert part.fingerprint != whole.fingerprint
    shared = data.by_owners(source, list("aabbbc"), max_records=2)
    half = data.take(shared, np.array([3, 1]))
    assert isinstance(half, data.Owners) and half.max_records == 2
    expected = shared.gather(np.array([3, 1]))["x"]
    np.testing.assert_array_equal(half.gather(np.arange(2))["x"], expected)
    for units in (whole, shared):
        with pytest.raises(ValueError, match="indices must differ"):
            data.take(units, np.array([1, 1]))
