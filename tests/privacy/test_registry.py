"""The registry names the ledger that counts records, also under another name."""

import concurrent.futures
import os
import sqlite3
import threading

import numpy as np
import pytest

from jaxdp.privacy import CountedElsewhere, Registry


def digests(*numbers):
    return np.unique(np.array(numbers, np.uint64))


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "home" / "registry.sqlite")


def test_a_key_is_drawn_once_and_the_file_is_private(registry):
    assert len(registry.key) == 32
    assert Registry(registry.path).key == registry.key
    assert os.stat(registry.path).st_mode & 0o077 == 0
    assert os.stat(os.path.dirname(registry.path)).st_mode & 0o077 == 0


def test_a_backup_knows_the_same_records_and_is_private_too(registry, tmp_path):
    registry.claim(tmp_path / "a.sqlite", "x", digests(*range(100)))
    registry.backup(tmp_path / "copy.sqlite")
    assert os.stat(tmp_path / "copy.sqlite").st_mode & 0o777 == 0o600
    copy = Registry(tmp_path / "copy.sqlite")
    assert copy.key == registry.key
    assert copy.claims(digests(*range(90))) == registry.claims(digests(*range(90))) != []
    with pytest.raises(ValueError, match=r"exists\. A backup replaces nothing"):
        registry.backup(tmp_path / "copy.sqlite")
    with pytest.raises(ValueError, match="directory that does not exist"):
        registry.backup(tmp_path / "missing" / "copy.sqlite")


def test_claims_name_the_ledger_with_most_of_the_records(registry, tmp_path):
    registry.claim(tmp_path / "a.sqlite", "x", digests(*range(100)))
    registry.claim(tmp_path / "b.sqlite", "y", digests(*range(99, 200)))
    first, second = registry.claims(digests(*range(90, 102)))
    assert (first.dataset, first.shared, first.records) == ("x", 10, 100)
    assert (second.dataset, second.shared, second.records) == ("y", 3, 101)
    assert registry.claims(digests(1000)) == []


@pytest.mark.parametrize(("shared", "is_same"), [(4, False), (5, True)])
def test_a_few_shared_records_are_chance(registry, tmp_path, shared, is_same):
    """Of 100 records 5 % are the limit."""
    registry.claim(tmp_path / "a.sqlite", "x", digests(*range(100)))
    others = digests(*range(shared), *range(1000, 1100 - shared))
    if is_same:
        with pytest.raises(CountedElsewhere, match="5 of these 100 records"):
            registry.claim(tmp_path / "b.sqlite", "x", others)
        assert len(registry.claims(others)) == 1
    else:
        registry.claim(tmp_path / "b.sqlite", "x", others)


def test_a_sample_of_many_sets_is_counted_there(registry, tmp_path):
    """It shares 4 % with each of 25 sets, and all of its records are counted."""
    starts = range(0, 2500, 100)
    for start in starts:
        registry.claim(tmp_path / f"{start}.sqlite", "x", digests(*range(start, start + 100)))
    sample = [start + place for start in starts for place in range(4)]
    with pytest.raises(CountedElsewhere, match=r"100 of these 100 records .* and 24 more"):
        registry.claim(tmp_path / "all.sqlite", "y", digests(*sample))
    # Four of 100 records are chance, also if two sets have two each.
    few = [0, 1, 100, 101, *range(5000, 5096)]
    registry.claim(tmp_path / "all.sqlite", "y", digests(*few))
    # A set grows into those of others step by step.
    with pytest.raises(CountedElsewhere, match="6 of these 102 records"):
        registry.claim(tmp_path / "all.sqlite", "y", digests(*few, 200, 201))
    assert len(registry.claims(digests(200))) == 1


def test_an_earlier_claim_stays_when_others_share_a_few_of_its_records_later(registry, tmp_path):
    first = digests(*range(100))
    registry.claim(tmp_path / "first.sqlite", "x", first)
    for k in range(2):
        later = digests(*range(3 * k, 3 * k + 3), *range(1000 * (k + 1), 1000 * (k + 1) + 97))
        registry.claim(tmp_path / f"{k}.sqlite", "y", later)
    registry.claim(tmp_path / "first.sqlite", "x", first)
    with pytest.raises(CountedElsewhere, match="7 of these 101 records"):
        registry.claim(tmp_path / "first.sqlite", "x", digests(*range(100), 1050))


def test_names_and_records_belong_together(registry, tmp_path):
    ledger = tmp_path / "a.sqlite"
    registry.claim(ledger, "x", digests(1, 2, 3))
    registry.claim(ledger, "x", digests(1, 2, 3, 4))  # it has grown
    registry.claim(ledger, "x", digests(4))  # and the claim covers what is new
    with pytest.raises(CountedElsewhere, match="Use the name 'x'"):
        registry.claim(ledger, "z", digests(3, 4))
    with pytest.raises(CountedElsewhere, match="stands for other records"):
        registry.claim(ledger, "x", digests(7, 8))
    registry.claim(tmp_path / "b.sqlite", "z", digests(3, 4), count_anew=True)
    assert [claim.dataset for claim in registry.claims(digests(3))] == ["x", "z"]


def test_a_link_to_a_ledger_is_the_ledger(registry, tmp_path):
    (tmp_path / "link.sqlite").symlink_to(tmp_path / "a.sqlite")
    registry.claim(tmp_path / "a.sqlite", "x", digests(1, 2))
    registry.claim(tmp_path / "link.sqlite", "x", digests(1, 2))
    assert len(registry.claims(digests(1))) == 1


def test_of_two_who_claim_at_once_one_counts(tmp_path):
    path, barrier = tmp_path / "registry.sqlite", threading.Barrier(4)

    def claim(ledger):
        registry = Registry(path)
        barrier.wait()
        try:
            registry.claim(ledger, "x", digests(1, 2, 3))
        except CountedElsewhere:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(claim, [tmp_path / f"{k}.sqlite" for k in range(4)]))
    assert sorted(outcomes) == [False, False, False, True]


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(ValueError, match="of another program"):
        Registry(other)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no database" * 1000)
    with pytest.raises(OSError, match="cannot be read or written"):
        Registry(garbage)
