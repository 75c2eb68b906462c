"""Streams: plans that depend on public numbers only, batches of one size, the orders of the
papers."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from jaxdp.data import from_arrays
from jaxdp.tta.streams import Stream

CLASSES = 5


def source(n, *, name="s", classes=CLASSES, seed=0):
    """Makes images filled with i / 1000, so that a batch shows its records."""
    labels = np.random.default_rng(seed).integers(0, classes, n)
    image = np.broadcast_to(
        np.arange(n, dtype=np.float32)[:, None, None, None] / 1000, (n, 2, 2, 1)
    )
    return from_arrays(image=image, label=labels, num_classes=classes, name=name)


def domains(*sizes):
    return {f"d{k}": source(n, seed=k) for k, n in enumerate(sizes)}


def samples(stream):
    return [batch.visitors("sample") for batch in stream]


def check(stream):
    """Checks fixed size, right images and labels, padding last, and no record twice."""
    seen = []
    assert len(list(stream)) == len(stream)
    for batch in stream:
        m = int(batch.mask.sum())
        assert (
            batch.images.shape == (stream.batch_size, 2, 2, 1) and batch.images.dtype == np.float32
        )
        assert batch.labels.shape == batch.mask.shape == (stream.batch_size,)
        assert batch.labels.dtype == np.int32 and batch.mask.dtype == bool
        assert (
            batch.mask[:m].all()
            and len(batch.positions) == len(batch.domains) == len(batch.units) == m > 0
        )
        for row, (domain, position) in enumerate(batch.visitors("sample")):
            example = stream.domains[domain][position]
            np.testing.assert_array_equal(batch.images[row], example["image"])
            assert batch.labels[row] == example["label"]
        assert (batch.images[m:] == 0).all() and (batch.labels[m:] == -1).all()
        seen += batch.visitors("sample")
    assert len(set(seen)) == len(seen)
    return seen


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("order", ["continual", "mixed", "label_shifted"])
def test_every_record_comes_at_most_once_in_batches_of_one_size(order, remainder):
    sizes = (23, 16, 9)
    stream = Stream(domains(*sizes), batch_size=8, order=order, seed=3, remainder=remainder)
    seen = check(stream)
    kept = [n if remainder == "pad" else n - n % 8 for n in sizes]
    if order == "mixed":
        assert len(stream) == 6 and len(seen) == 48
        assert any(len(set(batch.domains)) > 1 for batch in stream)
        return
    assert [sum(d == f"d{k}" for d, _ in seen) for k in range(3)] == kept
    assert all(len(set(batch.domains)) == 1 for batch in stream)
    assert [batch.domains[0] for batch in stream] == sorted(batch.domains[0] for batch in stream)


def test_batches_of_one():
    assert len(check(Stream(domains(7, 3), batch_size=1, seed=0))) == 10


def test_continual_domains_share_one_uniform_shuffle():
    stream = Stream(domains(40, 40), batch_size=10, seed=1)
    first, second = [[b.positions.tolist() for b in stream][k : k + 4] for k in (0, 4)]
    assert first == second
    assert np.concatenate(first).tolist() != list(range(40))
    assert samples(stream) == samples(Stream(domains(40, 40), batch_size=10, seed=1))
    assert samples(stream) != samples(Stream(domains(40, 40), batch_size=10, seed=2))
    # Frozen: the schedule must not change between versions, or published numbers could not be
    # repeated.
    assert Stream(domains(8), batch_size=8, seed=7).batch(0).positions.tolist() == [
        4,
        1,
        6,
        3,
        2,
        7,
        5,
        0,
    ]
    for order in ("continual", "mixed"):
        # Where each of 5 positions lands, over 600 seeds: chi-square at 1e-4 per order, which
        # sorted order must fail.
        counts = np.zeros((5, 5))
        for seed in range(600):
            positions = Stream(domains(5), batch_size=5, order=order, seed=seed).batch(0).positions
            counts[np.arange(5), positions] += 1
        # A random permutation matrix has (n - 1)^2 free entries, scaled by n / (n - 1).
        assert stats.chi2.sf(((counts - 120) ** 2 / 120).sum() * 4 / 5, 16) > 1e-4


def test_condition_9_contents_do_not_move_a_record():
    before = domains(30, 20)
    after = {
        name: from_arrays(
            image=np.ones((len(s), 2, 2, 1), np.float32),
            label=np.zeros(len(s), np.int32),
            num_classes=CLASSES,
        )
        for name, s in before.items()
    }
    for order in ("continual", "mixed"):
        for remainder in ("drop", "pad"):
            terms = {"batch_size": 8, "order": order, "seed": 5, "remainder": remainder}
            old, new = Stream(before, **terms), Stream(after, **terms)
            assert samples(old) == samples(new)
            assert [b.mask.tolist() for b in old] == [b.mask.tolist() for b in new]
    # The exception that the class names: this order is read off the labels.
    assert samples(Stream(before, batch_size=8, order="label_shifted", seed=5)) != samples(
        Stream(after, batch_size=8, order="label_shifted", seed=5)
    )


def test_condition_10_a_missing_record_shifts_all_later_batches():
    full = source(24)
    kept = full.take(
        np.delete(np.arange(24), Stream({"d": full}, batch_size=6, seed=0).batch(0).positions[0])
    )
    streams = [Stream({"d": s}, batch_size=6, seed=0) for s in (full, kept)]
    batches = [[set(batch.images[:, 0, 0, 0].tolist()) for batch in stream] for stream in streams]
    assert all(a != b for a, b in zip(*batches, strict=False))


def test_label_shift_is_strict_at_infinite_odds():
    stream = Stream(domains(100, 60), batch_size=10, order="label_shifted", seed=0)
    check(stream)
    for start, stop in ((0, 10), (10, 16)):
        labels = np.concatenate([stream.batch(i).labels for i in range(start, stop)])
        assert (np.diff(labels) >= 0).all() and len(set(labels.tolist())) == CLASSES


@pytest.mark.parametrize("odds", [1.0, 4.0, 20.0])
def test_label_shift_has_the_stated_odds(odds):
    classes, n = 4, 8000
    data = from_arrays(
        image=np.zeros((n, 1, 1, 1), np.float32),
        label=np.arange(n) % classes,
        num_classes=classes,
        name="balanced",
    )
    stream = Stream({"d": data}, batch_size=1, order="label_shifted", seed=11, imbalance=odds)
    labels = data.arrays["label"][[position for ((_, position),) in stream.visitors("sample")]]
    # Phase k holds n_k odds / (odds + 3) + 3 n_k / (odds + 3) = n / 4 records on average; look at
    # the middle of each.
    middle = labels.reshape(classes, -1)[:, 250:-250]
    own = np.array([(middle[k] == k).sum() for k in range(classes)])
    expected = odds / (odds + classes - 1)
    # Binomial at 1e-4 for each phase: wrong odds (0.7 and 1.3 of the stated ones) must fail in at
    # least one.
    assert all(stats.binomtest(int(k), middle.shape[1], expected).pvalue > 1e-4 for k in own)
    for wrong in (0.7, 1.3):
        other = wrong * odds / (wrong * odds + classes - 1)
        assert stats.binomtest(int(own.sum()), middle.size, other).pvalue < 1e-4
    strays = np.array(
        [[(middle[k] == j).sum() for j in range(classes) if j != k] for k in range(classes)]
    )
    assert all(stats.chisquare(row).pvalue > 1e-4 for row in strays)


def test_resets_of_the_protocols():
    def resets(reset, order="continual"):
        return [
            b.reset for b in Stream(domains(20, 10), batch_size=5, seed=0, reset=reset, order=order)
        ]

    assert resets("never") == [False] * 6
    assert resets("domain") == [True, False, False, False, True, False]
    assert resets("batch") == resets("batch", "mixed") == [True] * 6


def test_condition_8_units_tell_views_of_one_photograph_from_samples():
    stream = Stream(domains(10, 10), batch_size=5, seed=0)
    units, ids = (
        [u for b in stream for u in b.units],
        [s for b in stream for s in b.visitors("sample")],
    )
    assert len(set(ids)) == 20 and sorted(units) == sorted(2 * list(range(10)))
    patients = [f"patient {i // 5}" for i in range(10)]
    shared = Stream(domains(10, 10), batch_size=5, seed=0, units=patients)
    for batch in shared:
        assert list(batch.units) == [patients[i] for i in batch.positions]
    named = {"d0": [f"p{i}" for i in range(10)], "d1": [f"p{i // 3}" for i in range(10)]}
    for batch in Stream(domains(10, 10), batch_size=5, seed=0, units=named):
        assert list(batch.units) == [
            named[d][i] for d, i in zip(batch.domains, batch.positions, strict=True)
        ]


def test_images_are_read_with_their_batch_only():
    gathered = []

    class Watched(type(source(1))):
        def gather(self, indices):
            gathered.append(indices.tolist())
            return super().gather(indices)

    plain = source(40)
    stream = Stream({"d": Watched(plain.arrays, CLASSES, "watched")}, batch_size=8, seed=0)
    assert len(stream) == 5 and gathered == [[0, 39]]  # the check of the source
    batch = stream.batch(3)
    assert gathered[1:] == [batch.positions.tolist()]


def test_a_part_of_a_source_is_a_domain():
    part = source(40).take(np.arange(10, 30))
    for order in ("continual", "label_shifted"):
        check(Stream({"d": part}, batch_size=4, order=order, seed=0))
    labels = [b.labels for b in Stream({"d": part}, batch_size=4, order="label_shifted", seed=0)]
    assert (np.diff(np.concatenate(labels)) >= 0).all()


def test_a_single_class_has_one_phase():
    # The adapters refuse one class, and a source of one's own may have it.
    whole = source(6)
    arrays = {**whole.arrays, "label": np.zeros(6, np.int32)}
    one_class = dataclasses.replace(whole, arrays=arrays, num_classes=1)
    for odds in (1.0, 4.0, math.inf):
        stream = Stream(
            {"d": one_class}, batch_size=3, order="label_shifted", seed=0, imbalance=odds
        )
        assert sorted(np.concatenate([batch.positions for batch in stream])) == list(range(6))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (
            {"order": "sorted"},
            "order must be 'continual', 'mixed' or 'label_shifted', got 'sorted'",
        ),
        ({"reset": "nonsense"}, "reset must be 'never', 'domain' or 'batch', got 'nonsense'"),
        ({"remainder": "keep"}, "remainder must be 'drop' or 'pad', got 'keep'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 11}, "'d1' has too few records .* remainder='pad'"),
        ({"batch_size": 31, "order": "mixed"}, "'the stream' has too few records"),
        ({"seed": -1}, "seed must be in"),
        ({"imbalance": 0.5, "order": "label_shifted"}, "imbalance must be at least 1"),
        ({"imbalance": math.nan, "order": "label_shifted"}, "imbalance must be at least 1"),
        ({"imbalance": 2.0}, "imbalance=2.0 needs order='label_shifted'"),
        ({"order": "mixed", "reset": "domain"}, "reset='domain' has no meaning"),
        ({"units": range(10)}, "units must name each of the 20 positions, got 10"),
        (
            {"units": {"d0": range(20)}},
            "units must name each position of each domain, .*got {'d0': 20}",
        ),
        ({"domains": {}}, "at least one source"),
        (
            {"domains": {"a": source(20), "b": source(20, classes=3)}},
            "one image shape and number of classes",
        ),
        (
            {
                "domains": {
                    "a": from_arrays(
                        features=np.ones((20, 2)), label=np.zeros(20, int), num_classes=2
                    )
                }
            },
            "has no column 'image'",
        ),
    ],
)
def test_impossible_streams(terms, message):
    with pytest.raises(ValueError, match=message):
        Stream(**{"domains": domains(20, 10), "seed": 0, "batch_size": 5} | terms)


def test_batches_end():
    stream = Stream(domains(20), batch_size=5, seed=0)
    for index in (4, -1):
        with pytest.raises(IndexError, match="index must be in"):
            stream.batch(index)
    with pytest.raises(ValueError, match="unit must be 'photograph' or 'sample', got 'patient'"):
        stream.batch(0).visitors("patient")
    assert "images" not in repr(stream.batch(0)) and dataclasses.is_dataclass(stream)


@pytest.mark.slow
@pytest.mark.parametrize("column", ["units", "domains", "positions"])
def test_condition_8_every_record_of_a_batch_is_named(column):
    batch = Stream({"a": source(6)}, batch_size=4, seed=0, remainder="pad").batch(1)
    assert batch.mask.sum() == 2
    for wrong in (getattr(batch, column)[:1], ()):
        with pytest.raises(
            ValueError,
            match=f"{column} must name each of the 2 records under mask, got {len(wrong)}",
        ):
            dataclasses.replace(batch, **{column: wrong})
