"""Identifiers of people: two people never become one, in any adapter, account or party."""

import unicodedata

import hypothesis
import hypothesis.strategies as st
import numpy as np
import PIL.Image
import pytest

from jaxdp import data, recalibration, tta
from jaxdp.data import identifiers
from jaxdp.privacy import GaussianDpEvent, Ledger
from tests.data import adapters
from tests.data.real_files import NO_COLUMNS, NO_PEOPLE, PEOPLE, TEXTS

COUNT = len(TEXTS)
NUMBERS = np.arange(2 * COUNT, dtype=np.float32)[:, None]


def merged(identify):
    """Returns the pairs of people whom a function takes for one, and the people whom it takes for
    several."""
    names = {person: {identify(value) for value in values} for person, values in enumerate(PEOPLE)}
    pairs = [(a, b) for a in names for b in range(a) if names[a] & names[b]]
    return pairs, [person for person, found in names.items() if len(found) > 1]


def test_people_are_told_apart():
    assert merged(lambda value: identifiers([value])[0]) == ([], [])


def test_the_check_finds_identifiers_that_are_read_as_numbers():
    """Broken twins: int() drops zeros and underscores, float() drops digits, str() has several
    texts of one person."""

    def number(read):
        def identify(value):
            try:
                return read(value)
            except (TypeError, ValueError):
                return value

        return identify

    for read, (one, other) in (
        (int, ("1_23", "12_3")),
        (float, ("12345678901234567890", "12345678901234567891")),
    ):
        pairs, _ = merged(number(read))
        assert (TEXTS.index(other), TEXTS.index(one)) in pairs
    assert merged(number(lambda value: str(value)))[1]


@pytest.mark.parametrize(("value", "error", "message"), NO_PEOPLE)
def test_what_is_no_identifier_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        identifiers(["P1", value])


@pytest.mark.parametrize("column", NO_COLUMNS, ids=lambda column: str(column.dtype))
def test_columns_that_merge_people_are_refused(column):
    records = data.from_arrays(features=np.zeros((2, 1)), name="scans")
    with pytest.raises(TypeError, match="identifiers, which are texts or whole numbers"):
        data.by_group(records, column, max_records=1)


texts = st.text(st.sampled_from("ae\u0301\u00e9 \t0170_.\ufb01"), max_size=4).filter(str.strip)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.lists(texts, min_size=1, max_size=6))
def test_groups_are_those_of_the_bytes(owners):
    """The right value is by the definition: equal bytes after NFC and without outer blanks."""
    keys = [unicodedata.normalize("NFC", owner).strip().encode() for owner in owners]
    expected = [
        [row for row, key in enumerate(keys) if key == wanted] for wanted in dict.fromkeys(keys)
    ]
    records = data.from_arrays(features=np.zeros((len(owners), 1), np.float32))
    found = data.by_group(records, owners, max_records=6).rows
    assert [[row for row in rows if row >= 0] for rows in found.tolist()] == expected


def folder(tmp_path, **options):
    PIL.Image.fromarray(np.zeros((2, 2), np.uint8)).save(tmp_path / "0.png")
    rows = "".join(f"0.png,{k},{text}\n" for k, text in enumerate(2 * TEXTS))
    (tmp_path / "labels.csv").write_text(f"path,number,patient\n{rows}", encoding="utf-8")
    return data.from_folder(tmp_path, texts=("patient",), **options)


def of_columns(adapter):
    """Returns a function that makes a source of a folder, as `folder` does."""
    columns = {"features": NUMBERS}
    return lambda tmp_path: adapter(tmp_path, columns, {"patient": 2 * TEXTS})


WITH_TEXTS = [
    adapters.texts_as_bytes,
    *(x for x in adapters.ADAPTERS.values() if x != adapters.own),
]


@pytest.mark.parametrize("make", [folder, *map(of_columns, WITH_TEXTS)])
@pytest.mark.parametrize("loaded", [False, True])
def test_every_adapter_keeps_people_apart(tmp_path, make, loaded):
    """Broken twin: the first release read the column as numbers, or left it out."""
    source = make(tmp_path)
    source = source.load() if loaded else source
    people = data.by_group(source, "patient", max_records=2)
    np.testing.assert_array_equal(
        people.rows, np.stack([np.arange(COUNT), np.arange(COUNT) + COUNT], 1)
    )
    assert "patient" not in people.gather(np.array([0])).records
    part = data.by_group(source.take(np.arange(COUNT)[::-1]), "patient", max_records=1)
    assert len(part) == COUNT
    assert [str(text) for text in data.read_column(source.take([3]), "patient")] in (
        [TEXTS[3]],
        [str(b"007")],
    )
    with pytest.raises(ValueError, match="no column 'person'"):
        data.by_group(source, "person", max_records=1)


def test_an_identifier_of_digits_is_a_feature_and_text(tmp_path):
    """`007` and `7` are equal as features. As owners they are two people."""
    PIL.Image.fromarray(np.zeros((2, 2), np.uint8)).save(tmp_path / "0.png")
    (tmp_path / "labels.csv").write_text("path,patient\n0.png,007\n0.png,7\n0.png, 7\n")
    source = data.from_folder(tmp_path)
    assert source.gather(np.arange(3))["patient"].tolist() == [7, 7, 7]
    assert data.by_group(source, "patient", max_records=2).rows.tolist() == [[0, -1], [1, 2]]


def test_wide_integers_are_identifiers_where_they_are_named(tmp_path):
    wide = np.array([1_700_000_000_123, 1_700_000_000_124, 1_700_000_000_123])
    np.savez(tmp_path / "scans.npz", features=np.zeros((3, 1), np.float32), patient=wide)
    source = data.from_npz(tmp_path / "scans.npz", texts=("patient",))
    assert data.by_group(source, "patient", max_records=2).rows.tolist() == [[0, 2], [1, -1]]
    with pytest.raises(
        ValueError,
        match=r"patient of source 'scans' has whole numbers outside of .* give it as text",
    ):
        data.from_npz(tmp_path / "scans.npz")


def test_texts_are_in_the_fingerprint():
    one, other = (
        data.from_arrays(features=NUMBERS[:2], patient=ids) for ids in (["7", "8"], ["007", "8"])
    )
    plain = data.from_arrays(features=NUMBERS[:2])
    assert len({one.fingerprint, other.fingerprint, plain.fingerprint}) == 3
    assert one.take([0, 1]).fingerprint == one.fingerprint != one.take([1, 0]).fingerprint


# --- Accounts and parties -----------------------------------------------------------------------


def account(**options):
    ledger = Ledger.in_memory()
    ledger.register("ward", adjacency="replace_one", unit="patient")
    return tta.StreamAccount(ledger.account("ward"), event=GaussianDpEvent(1.0), **options)


def test_a_stream_charges_one_person_for_all_spellings():
    """Broken twin: 1 and "1" were two people, whose second visit was free. By hand: k visits cost
    k^2 in one sum."""
    for values in PEOPLE:
        mine = account()
        with mine.spend(values, release=0):
            pass
        assert mine.worst == len(values) ** 2
    mine = account()
    with mine.spend([values[-1] for values in PEOPLE], release=0):
        pass
    assert mine.worst == 1


def test_earlier_visits_of_one_person_add_up():
    charged = account()
    with charged.spend([7, "7", " 7"], release=0):
        pass
    seen = charged.visits
    seen.counts = {7: {0: 2}, "7": {0: 1}, "8": {1: 1}}
    again = tta.StreamAccount(charged._account, event=charged.event, visits=seen)
    assert again.visits.counts == {"7": {0: 3}, "8": {1: 1}} and again.worst == 9


def test_a_stream_refuses_what_is_no_identifier_before_it_charges():
    mine = account()
    with (
        pytest.raises(TypeError, match="units must have identifiers"),
        mine.spend([200001.01], release=0),
    ):
        pass
    assert mine.ledger.events("ward") == {} and mine.worst == 0
    images = data.from_arrays(image=np.zeros((2, 2, 2, 1), np.uint8))
    with pytest.raises(TypeError, match="units must have identifiers"):
        tta.Stream({"a": images}, batch_size=1, seed=0, units=[1.0, 2.0])
    with pytest.raises(ValueError, match="units lacks a value"):
        tta.Stream({"a": images}, batch_size=1, seed=0, units={"a": ["", "1"]})


def test_a_party_of_recalibration_keeps_people_apart():
    party = recalibration.Party(
        np.zeros((2 * COUNT, 2), np.float32), np.zeros(2 * COUNT, int), group=2 * TEXTS
    )
    assert party.units == COUNT
