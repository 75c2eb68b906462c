"""Records with several owners: which of them count, and what the choice may depend on."""

import numpy as np
import pytest

from jaxdp import data
from jaxdp.data.owners import families

PEOPLE = ["anna;ben", "ben", " ben ; carl", "anna", "carl;anna;carl", "dora"]


def records(people=PEOPLE, shift=0.0):
    values = np.arange(2 * len(people), dtype=np.float32).reshape(-1, 2) + np.float32(shift)
    source = data.from_arrays(features=values, label=np.arange(len(people)) % 2, num_classes=2)
    return source


def random_owners(seed, n=60, people=15):
    rng = np.random.default_rng(seed)
    return [rng.integers(people, size=rng.integers(1, 4)).tolist() for _ in range(n)]


def loads(owners, rows):
    """How many of some records each owner has, counted by hand."""
    counts = {}
    for row in rows:
        for owner in set(owners[row]):
            counts[owner] = counts.get(owner, 0) + 1
    return counts


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_no_owner_has_more_records_and_none_is_left_out_without_a_reason(seed, k):
    owners = random_owners(seed)
    some = data.by_owners(records(owners), owners, max_records=k, seed=seed)
    counts = loads(owners, some.rows)
    assert max(counts.values()) == k == some.max_records
    assert sorted(some.records_of[some.records_of > 0]) == sorted(counts.values())
    for row in set(range(len(owners))) - set(some.rows.tolist()):
        assert any(counts.get(owner, 0) == k for owner in owners[row])
    # A broken twin, which bounds the first owner of each record only.
    firsts = [names[:1] for names in owners]
    twin = data.by_owners(records(owners), firsts, max_records=k, seed=seed)
    assert max(loads(owners, twin.rows).values()) > k


def test_the_choice_depends_on_owners_and_seed_only():
    owners = random_owners(0)
    one = data.by_owners(records(owners), owners, max_records=2)
    other = data.by_owners(records(owners, shift=7.0), owners, max_records=2)
    np.testing.assert_array_equal(one.rows, other.rows)
    assert one.fingerprint != other.fingerprint
    seeded = data.by_owners(records(owners), owners, max_records=2, seed=1)
    assert one.rows.tolist() != seeded.rows.tolist()


def test_why_owners_are_public():
    """To remove one owner of one record may change many records of others: a chain of pairs."""
    owners = [[k, k + 1] for k in range(8)]
    changed = []
    for seed in range(40):
        whole = data.by_owners(records(owners), owners, max_records=1, seed=seed)
        # The first record is nobody's but of owner 1 when owner 0 has left with it.
        without = data.by_owners(records(owners[1:]), owners[1:], max_records=1, seed=seed)
        changed.append(len(set(whole.rows.tolist()) ^ {row + 1 for row in without.rows}))
    assert max(changed) > 4


def test_a_column_names_the_owners_and_does_not_reach_the_examples(tmp_path):
    file = tmp_path / "mails.csv"
    rows = [f"{names},{k}" for k, names in enumerate(PEOPLE)]
    file.write_text("\n".join(["people,length", *rows]))
    mails = data.from_csv(file, group="people")
    some = data.by_owners(mails, "people", max_records=2)
    split = [[name.strip() for name in names.split(";")] for names in PEOPLE]
    assert some.rows.tolist() == data.by_owners(mails, split, max_records=2).rows.tolist()
    assert (some.owners, max(some.records_of)) == (4, 2)
    assert set(some.gather(np.array([0, 1]))) == {"features"}
    np.testing.assert_array_equal(some.gather(np.arange(len(some)))["features"][:, 0], some.rows)
    np.testing.assert_array_equal(families(mails, "people", ";"), [0, 0, 0, 0, 0, 1])
    sampler = some.sampler(0.5)
    assert (sampler.num_examples, sampler.records_per_owner) == (len(some), 2)


@pytest.mark.parametrize(
    ("owners", "options", "error"),
    [
        (["a"], {}, "one value for each of the 6 records, got 1"),
        (["a;", *PEOPLE[1:]], {}, "owners lacks a value"),
        ([[], *PEOPLE[1:]], {}, "owners lacks a value: a record without any owner"),
        (PEOPLE, {"max_records": 0}, "max_records must be at least 1, got 0"),
        (PEOPLE, {"separator": ""}, "separator must be a text such as ';', got ''"),
        ("nobody", {}, "nobody"),
    ],
)
def test_wrong_owners_are_refused(owners, options, error):
    with pytest.raises(ValueError, match=error):
        data.by_owners(records(), owners, **{"max_records": 1} | options)


def test_identifiers_that_merge_people_are_refused():
    with pytest.raises(TypeError, match="owners must have identifiers"):
        data.by_owners(records(), [[1.5]] * 6, max_records=1)
