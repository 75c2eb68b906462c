"""The linear map: a function of public vectors, applied to one record at a time."""

import numpy as np
import pytest

from jaxdp.prediction.features import FeatureMap


# more and fewer vectors than coordinates: two ways to find the axes
@pytest.mark.parametrize("count", [400, 12])
def test_a_whitened_public_sample_has_unit_covariance_and_zero_mean(count):
    public = (
        np.random.default_rng(0).normal(size=(count, 20)) @ np.diag(np.linspace(0.1, 3, 20)) + 5.0
    )
    found = FeatureMap.from_public(public, whiten=1.0)
    mapped = (public - found.mean) @ found.matrix
    np.testing.assert_allclose(mapped.mean(axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(mapped.T @ mapped / count, np.eye(min(20, count - 1)), atol=1e-8)


def test_the_leading_axes_are_those_of_the_covariance_scaled_by_a_power_of_their_deviation():
    public = np.random.default_rng(1).normal(size=(300, 6)) * np.array(
        [9.0, 5.0, 3.0, 2.0, 1.0, 0.5]
    )
    found = FeatureMap.from_public(public, dimensions=2, whiten=0.5)
    variances, axes = np.linalg.eigh(np.cov(public.T, bias=True))
    expected = axes[:, ::-1][:, :2] / variances[::-1][:2] ** 0.25
    np.testing.assert_allclose(np.abs(found.matrix), np.abs(expected), rtol=1e-6)


def test_weights_count_like_repeated_vectors():
    public = np.random.default_rng(2).normal(size=(30, 4))
    times = np.arange(30) % 3
    weighted = FeatureMap.from_public(public, weights=times)
    repeated = FeatureMap.from_public(np.repeat(public, times, axis=0))
    np.testing.assert_allclose(weighted.mean, repeated.mean, rtol=1e-12)
    np.testing.assert_allclose(np.abs(weighted.matrix), np.abs(repeated.matrix), rtol=1e-8)


def test_every_result_has_the_radius_except_for_a_vector_without_a_direction():
    public = np.random.default_rng(3).normal(size=(50, 4))
    found = FeatureMap.from_public(public, radius=2.5)
    mapped = found(np.concatenate([public, found.mean[None]]))
    assert mapped.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(mapped[:-1], axis=1), 2.5, rtol=1e-6)
    assert (mapped[-1] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("public", "options", "message"),
    [
        (np.zeros((1, 3)), {}, "at least two vectors"),
        (np.zeros(3), {}, r"got shape \(3,\)"),
        (np.eye(4), {"dimensions": 4}, "dimensions=4 exceeds the 3"),
        # Before, these were maps to no number, and to all numbers but the last.
        (np.ones((5, 3)), {}, "got 0 axes with any variance"),
        (np.eye(4), {"dimensions": -1}, "got 3 axes with any variance and dimensions=-1"),
    ],
)
def test_a_sample_that_determines_no_map_is_refused(public, options, message):
    with pytest.raises(ValueError, match=message):
        FeatureMap.from_public(public, **options)
