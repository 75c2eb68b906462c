import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import clipped_grad
from jaxdp.data import Examples, PoissonSampler, bundled, from_arrays, pad_to_physical


def pixels(count: int = 12) -> Examples:
    image = np.random.default_rng(0).integers(0, 256, (count, 4, 5, 3), dtype=np.uint8)
    return from_arrays(image=image, label=np.arange(count) % 3, num_classes=3, name="pixels")


def test_images_are_stored_as_uint8_and_gathered_as_floats():
    source = pixels()
    assert source.arrays["image"].dtype == np.uint8
    indices = np.array([3, 0, 3])
    batch = source.gather(indices)
    assert batch["image"].dtype == np.float32 and batch["image"].shape == (3, 4, 5, 3)
    assert batch["label"].dtype == np.int32
    np.testing.assert_allclose(batch["image"], source.arrays["image"][indices] / 255, rtol=1e-6)
    np.testing.assert_array_equal(batch["label"], indices % 3)
    assert source.gather(np.arange(12))["image"].max() <= 1


def test_take_composes_and_copies_nothing():
    source = pixels()
    part = source.take([9, 4, 7]).take([2, 0], name="part")
    assert part.name == "part" and len(part) == 2 and part.num_classes == 3
    assert all(part.arrays[key] is column for key, column in source.arrays.items())
    np.testing.assert_array_equal(part.gather([0, 1])["image"], source.gather([7, 9])["image"])


def test_splits_are_disjoint_and_depend_on_positions_alone():
    source = pixels(10)
    parts = source.split([0.5, 0.3], seed=1)
    assert [len(part) for part in parts] == [5, 3]
    assert [part.name for part in parts] == ["pixels[0]", "pixels[1]"]
    rows = np.concatenate([part.rows for part in parts])
    assert len(np.unique(rows)) == 8
    other = from_arrays(features=np.zeros((10, 2)), label=np.ones(10, int), num_classes=2)
    for mine, theirs in zip(parts, other.split([0.5, 0.3], seed=1), strict=True):
        np.testing.assert_array_equal(mine.rows, theirs.rows)
    assert not np.array_equal(source.split([0.5], seed=2)[0].rows, parts[0].rows)
    assert [len(part) for part in source.split([1 / 3, 1 / 3, 1 / 3], seed=0)] == [3, 4, 3]


def test_splits_never_change():
    """Known answer: a split that moved with a library version would leak test examples into
    training."""
    assert pixels(10).split([1.0], seed=0)[0].rows.tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]


def test_a_split_is_uniform():
    source = pixels(6)
    counts = np.zeros((6, 6))
    for seed in range(600):
        counts[np.arange(6), source.split([1.0], seed=seed)[0].rows] += 1
    # chi-square, 25 degrees of freedom, 0.1 %
    assert np.sum((counts - 100) ** 2 / 100) * 5 / 6 < 52.6


@pytest.mark.parametrize(
    "fractions",
    [[], [0.5, 0.0], [-0.1], [0.8, 0.3], [0.5, np.nan], 0.5, "ab", np.array([0.8, 0.3])],
)
def test_impossible_splits_are_refused(fractions):
    with pytest.raises(ValueError, match="fractions must be positive and sum to at most 1"):
        pixels().split(fractions, seed=0)


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (None, TypeError, "seed must be an int, got NoneType None"),
        (-1, ValueError, "seed must be at least 0, got -1"),
        (2**128, ValueError, r"seed must be below 2\*\*128, got"),
    ],
)
def test_a_split_without_a_public_seed_is_refused(seed, error, message):
    with pytest.raises(error, match=message):
        pixels().split([0.5], seed=seed)


def test_the_fingerprint_is_of_the_content():
    source = pixels()
    assert source.fingerprint == pixels().fingerprint
    image, label = source.arrays["image"], source.arrays["label"]
    changed = image.copy()
    changed[-1, -1, -1, -1] ^= 1
    prints = {
        source.fingerprint,
        from_arrays(image=changed, label=label, num_classes=3).fingerprint,
        from_arrays(image=image, label=(label + 1) % 3, num_classes=3).fingerprint,
        from_arrays(image=image, label=label, num_classes=4).fingerprint,
        from_arrays(image=image.transpose(0, 2, 1, 3), label=label, num_classes=3).fingerprint,
        source.take(np.arange(11)).fingerprint,
        source.take(np.arange(12)[::-1]).fingerprint,
    }
    assert len(prints) == 7
    assert (
        from_arrays(image=image, label=label, num_classes=3, name="other").fingerprint
        == source.fingerprint
    )
    assert source.take(np.arange(12)).fingerprint == source.fingerprint


def test_the_fingerprint_follows_its_description():
    source = from_arrays(features=np.array([[1.5, -2.0]]), label=np.array([1]), num_classes=2)
    text = b'["features", "<f4", [1, 2], 2]\n' + np.array([1.5, -2.0], "<f4").tobytes()
    text += b'["label", "<i4", [1], 2]\n' + np.array([1], "<i4").tobytes()
    assert source.fingerprint == hashlib.sha256(text).hexdigest()


def test_fingerprints_never_change():
    """Known answers: runs that were started by an older version must be able to resume."""
    assert (
        bundled("digits").fingerprint
        == "dcbc855b7df83ee0106bd9549a50b65504a552ba7e5ed4a57159b37ffe1b25cb"
    )
    assert (
        bundled("blobs").take(np.arange(7, 90, 3)).fingerprint
        == "4c97d85fcc01dce0f35048c1490dc92a9aebc90a642e604550f87275af16ebf9"
    )


def test_a_fingerprint_spans_chunks():
    many = from_arrays(
        features=np.arange(9000.0)[:, None], label=np.zeros(9000, int), num_classes=2
    )
    swapped = np.arange(9000)
    swapped[[4095, 4096]] = swapped[[4096, 4095]]
    assert many.take(swapped).fingerprint != many.fingerprint
    assert many.take(np.arange(9000)).fingerprint == many.fingerprint


def test_grey_images_get_a_channel_and_floats_stay():
    image = np.linspace(0, 1, 24).reshape(2, 3, 4)
    source = from_arrays(image=image, label=np.array([0, 1]), num_classes=2)
    assert source[1]["image"].shape == (3, 4, 1) and source[1]["image"].dtype == np.float32
    np.testing.assert_allclose(source[1]["image"][..., 0], image[1], rtol=1e-6)


def test_the_stored_arrays_are_read_only_and_the_callers_stay_writable():
    image = np.zeros((2, 3, 3, 1), np.uint8)
    source = from_arrays(image=image, label=np.array([0, 1]), num_classes=2)
    assert not source.arrays["image"].flags.writeable
    assert image.flags.writeable


class Pair(NamedTuple):
    query: np.ndarray
    answer: dict[str, np.ndarray]


def pairs(count: int = 40, seed: int = 0) -> Examples:
    """Records of two levels: a dict of a named tuple that holds another dict, and of a tuple."""
    rng = np.random.default_rng(seed)
    query, answer, weight = (
        rng.normal(size=(count, *shape)).astype(np.float32) for shape in ((3,), (2,), ())
    )
    return Examples(
        {"pair": Pair(query, {"y": answer}), "extra": (weight, np.arange(count))}, 2, "pairs"
    )


def test_records_of_any_nesting_are_gathered_taken_and_split():
    source = pairs()
    batch, one = source.gather([5, 0, 5]), source[5]
    assert isinstance(batch["pair"], Pair) and batch["pair"].answer["y"].shape == (3, 2)
    assert (
        one["extra"][1] == 5 and isinstance(one["pair"], Pair) and one["pair"].query.shape == (3,)
    )
    np.testing.assert_array_equal(batch["pair"].query[2], source.arrays["pair"].query[5])
    assert len(source) == 40 and source.gather([])["extra"][0].shape == (0,)
    parts = source.split([0.5, 0.5], seed=1)
    seen = np.concatenate([part.gather(np.arange(len(part)))["extra"][1] for part in parts])
    assert sorted(seen) == list(range(40))
    np.testing.assert_array_equal(source.take([9, 4]).take([1]).gather([0])["extra"][1], [4])
    assert len(Examples(np.arange(6), 2, "one array").take([1, 2])) == 2


def test_the_fingerprint_of_nested_records_is_of_all_of_them():
    source, weight = pairs(), pairs().arrays["extra"][0].copy()
    weight[-1] += 1
    others = [
        {**source.arrays, "extra": (weight, np.arange(40))},
        {**source.arrays, "extra": (np.arange(40), source.arrays["extra"][0])},
        {
            **source.arrays,
            "pair": Pair(source.arrays["pair"].query, {"z": source.arrays["pair"].answer["y"]}),
        },
    ]
    prints = {source.fingerprint, *(Examples(other, 2, "pairs").fingerprint for other in others)}
    assert len(prints) == 4 and pairs().fingerprint == source.fingerprint
    assert source.take(np.arange(40)).fingerprint == source.fingerprint
    nested, flat = Examples({"a": {"b": weight}}, 2, "nested"), Examples({"a/b": weight}, 2, "flat")
    assert nested.fingerprint != flat.fingerprint


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"a": (np.zeros(3), np.zeros(2))},
            "a/0 and a/1 of source 'mine' must have one length, got 3 and 2",
        ),
        ({}, "arrays of source 'mine' must have one length, got no array"),
    ],
)
def test_records_of_different_lengths_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        Examples(arrays, 2, "mine")


def test_records_without_the_column_that_is_needed_are_refused():
    with pytest.raises(
        ValueError, match=r"source 'pairs' has no column 'label'\. It has extra, pair"
    ):
        pairs().of_classes([0, 1])
    with pytest.raises(ValueError, match=r"source 'tuple' has no column 'label'\. It has tuple"):
        Examples((np.zeros(2), np.zeros(2)), 2, "tuple").of_classes([0, 1])


@pytest.mark.slow
def test_nested_records_are_sampled_and_clipped():
    """Poisson batches of nested records, padded and masked, give the sum that one record after the
    other gives."""
    source, sampler = pairs(), PoissonSampler(40, 0.2, seed=bytes(16))

    def loss(params, record):
        residual = params @ record["pair"].query - record["pair"].answer["y"]
        return record["extra"][0] * jnp.vdot(residual, residual)

    params = jax.random.normal(jax.random.key(0), (2, 3))
    clipped = clipped_grad(loss, clip_norm=1.0)
    for step in range(3):
        indices = sampler.batch(step)
        (rows,), (mask,) = pad_to_physical(indices, 24)
        found = clipped(params, source.gather(rows), mask=mask).grads
        alone = [jax.grad(loss)(params, source[i]) for i in indices]
        expected = sum(g / jnp.maximum(1.0, jnp.linalg.norm(g)) for g in alone)
        assert len(indices) and np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


LABEL = np.array([0, 1])


def test_labels_that_are_whole_numbers_are_cast_with_a_warning():
    for labels in (np.array([0.0, 1.0]), np.array([False, True])):
        with pytest.warns(
            UserWarning, match=f"label has dtype {labels.dtype} and is cast to int32"
        ):
            source = from_arrays(features=np.zeros((2, 1)), label=labels, num_classes=2)
        assert source.column("label").dtype == np.int32 and source.column("label").tolist() == [
            0,
            1,
        ]


ROWS = np.zeros((2, 1))


@pytest.mark.parametrize(
    ("label", "columns", "error", "message"),
    [
        (LABEL, {"features": np.zeros(2)}, ValueError, r"features must have shape \[n, d\]"),
        (LABEL, {"features": np.array([["a"], ["b"]])}, TypeError, "features must be real numbers"),
        (LABEL, {"image": np.zeros((2, 3))}, ValueError, "image must have shape"),
        (LABEL, {"image": np.zeros((2, 3, 3), int)}, TypeError, "image must be uint8"),
        (LABEL, {"image": np.full((2, 3, 3), 255.0)}, ValueError, "Divide by the largest possible"),
        ([0, 7], {"features": ROWS}, ValueError, r"label must be in \[0, 2\)"),
        ([-1, 0], {"features": ROWS}, ValueError, r"label must be in \[0, 2\)"),
        ([0.5, 1.0], {"features": ROWS}, TypeError, "label must be integers"),
        ([np.inf, np.nan], {"features": ROWS}, TypeError, "label must be integers"),
        ([[0], [0]], {"features": ROWS}, ValueError, "label must have shape"),
        (LABEL, {"features": np.zeros((3, 1))}, ValueError, "must have one length, got 3 and 2"),
    ],
)
def test_unusable_arrays_are_refused(label, columns, error, message):
    with pytest.raises(error, match=message):
        from_arrays(num_classes=2, label=np.array(label), **columns)


def test_refusals_do_not_show_records():
    with pytest.raises(ValueError) as caught:
        from_arrays(features=np.zeros((2, 1)), label=np.array([0, 987654]), num_classes=2)
    assert "987654" not in str(caught.value)
    assert "array(" not in repr(pixels())


def test_num_classes_is_declared():
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        from_arrays(features=np.zeros((2, 1)), label=np.zeros(2, int), num_classes=1)


@pytest.mark.parametrize(
    ("name", "size", "classes", "key", "shape"),
    [
        ("digits", 1797, 10, "image", (8, 8, 1)),
        ("breast_cancer", 569, 2, "features", (30,)),
        ("blobs", 1000, 4, "features", (2,)),
    ],
)
def test_bundled_data_sets(name, size, classes, key, shape):
    source = bundled(name)
    assert (len(source), source.num_classes, source.name) == (size, classes, name)
    batch = source.gather(np.arange(size))
    assert batch[key].shape == (size, *shape) and batch[key].dtype == np.float32
    assert set(np.unique(batch["label"])) == set(range(classes))
    assert bundled(name).fingerprint == source.fingerprint


def test_digits_are_the_real_ones_in_the_unit_interval():
    from sklearn.datasets import load_digits

    digits = load_digits()
    batch = bundled("digits").gather(np.arange(1797))
    np.testing.assert_array_equal(batch["image"][..., 0] * 16, digits.images)
    np.testing.assert_array_equal(batch["label"], digits.target)


def test_breast_cancer_is_scaled_by_public_constants():
    """Each feature is an affine map of the raw one with round constants: no statistic of the rows,
    no clipping."""
    from sklearn.datasets import load_breast_cancer

    raw = load_breast_cancer().data
    scaled = bundled("breast_cancer").gather(np.arange(569))["features"].astype(np.float64)
    assert np.all(np.abs(scaled) <= 1)
    for k in range(30):
        slope, intercept = np.polyfit(raw[:, k], scaled[:, k], 1)
        np.testing.assert_allclose(scaled[:, k], slope * raw[:, k] + intercept, atol=1e-5)
        low, high = (-1 - intercept) / slope, (1 - intercept) / slope
        for bound in (low, high):
            # Two significant digits at most: not read off the rows.
            assert bound == pytest.approx(float(f"{bound:.2g}"), rel=1e-3, abs=1e-4)


def test_bundled_features_are_worth_learning_from():
    """A linear model reaches the usual accuracy, so rows and labels belong together."""
    from sklearn.linear_model import LogisticRegression

    for name, accuracy in (("breast_cancer", 0.93), ("blobs", 0.93)):
        train, test = bundled(name).split([0.7, 0.3], seed=0)
        fit, held_out = train.gather(np.arange(len(train))), test.gather(np.arange(len(test)))
        model = LogisticRegression(C=10.0, max_iter=1000).fit(fit["features"], fit["label"])
        assert model.score(held_out["features"], held_out["label"]) > accuracy


def test_an_unknown_bundled_name_is_refused():
    with pytest.raises(ValueError, match="'digits', 'breast_cancer', 'blobs', got 'mnist'"):
        bundled("mnist")


@pytest.mark.slow
def test_importing_the_package_is_light(run_in_subprocess):
    code = (
        "import sys, jaxdp.data\n"
        "heavy = {'tensorflow', 'tensorflow_datasets', 'sklearn', 'jax_privacy', 'dp_accounting', "
        "'flax'}\n"
        "heavy |= {'cv2', 'numba', 'imagecorruptions'}  # of corruptions, optional\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    run_in_subprocess(code)


def test_classes_are_selected_and_renumbered():
    source = pixels().take(np.arange(1, 12))
    part = source.of_classes([2, 0], name="two")
    assert len(part) == 7 and part.num_classes == 2 and part.name == "two"
    batch = part.gather(np.arange(7))
    np.testing.assert_array_equal(batch["label"], [0, 1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(batch["image"], pixels().gather([2, 3, 5, 6, 8, 9, 11])["image"])
    assert part.arrays["image"] is source.arrays["image"]


def test_records_without_a_class_are_in_no_choice_of_classes():
    """Broken twin: -1 counted from the end, and took the last class."""
    source = Examples({"label": np.array([0, 2, -1, 1, -1])}, num_classes=3)
    part = source.of_classes([0, 2])
    np.testing.assert_array_equal(part.gather(np.arange(len(part)))["label"], [0, 1])


@pytest.mark.parametrize("classes", [[1], [1, 1], [0, 3], [-1, 0]])
def test_classes_that_are_not_there_are_refused(classes):
    with pytest.raises(ValueError, match="classes must be"):
        pixels().of_classes(classes)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "shape"), [("image", (3, 2, 2, 1)), ("features", (3, 2))])
def test_records_without_a_finite_number_are_refused_and_single_ones_are_not(key, shape):
    values = np.full(shape, np.nan, np.float32)
    with pytest.raises(
        ValueError, match=f"{key} of source 'mine' has no finite number. The file is damaged"
    ):
        from_arrays(**{key: values}, label=np.zeros(3, int), num_classes=2, name="mine")
    values[0] = 0.5  # private training zeroes the gradients of the others
    assert len(from_arrays(**{key: values}, label=np.zeros(3, int), num_classes=2)) == 3
    assert len(from_arrays(**{key: values[:0]}, label=np.zeros(0, int), num_classes=2)) == 0
