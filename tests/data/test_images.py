"""Images in the shape of another data set."""

import numpy as np
import pytest

from jaxdp import data
from jaxdp.data import resize_images

RNG = np.random.default_rng(0)


def source(shape, dtype=np.uint8, n=5):
    image = RNG.integers(0, 256, (n, *shape), dtype=np.uint8)
    image = image if dtype == np.uint8 else (image / 255).astype(dtype)
    return data.from_arrays(image=image, label=np.arange(n) % 2, num_classes=2, name="made")


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_grey_images_grow_and_become_rgb(dtype):
    given = source((16, 16, 1), dtype)
    fitted = resize_images(given, 32, 3)
    assert fitted.arrays["image"].shape == (5, 32, 32, 3) and fitted.arrays["image"].dtype == dtype
    assert (fitted.name, fitted.num_classes, len(fitted)) == ("made", 2, 5)
    image = fitted[2]["image"]
    assert np.array_equal(image[..., 0], image[..., 1]) and np.array_equal(
        image[..., 0], image[..., 2]
    )
    np.testing.assert_array_equal(fitted.gather(np.arange(5))["label"], np.arange(5) % 2)
    # Twice the size: new pixels lie a quarter of an old one from its centre.
    old = np.pad(given[2]["image"][..., 0].astype(np.float64), 1, mode="edge")
    rows = 0.75 * np.repeat(old[1:-1], 2, axis=0) + 0.25 * np.stack([old[:-2], old[2:]], 1).reshape(
        32, 18
    )
    both = 0.75 * np.repeat(rows[:, 1:-1], 2, axis=1) + 0.25 * np.stack(
        [rows[:, :-2], rows[:, 2:]], 2
    ).reshape(32, 32)
    np.testing.assert_allclose(
        image[..., 0], both, atol=(0.5001 if dtype == np.uint8 else 1e-4) / 255
    )


def test_shrinking_averages_over_the_area():
    flat = np.zeros((1, 32, 32, 1), np.float32)
    flat[:, ::2] = 1.0  # stripes of one pixel, which sampling would miss or double
    fitted = resize_images(data.from_arrays(image=flat, label=np.zeros(1, int), num_classes=2), 8)
    np.testing.assert_allclose(fitted[0]["image"], 0.5, atol=0.08)


def test_a_part_of_a_source_is_fitted_and_no_more():
    given = source((6, 4, 3), n=2000)
    part = given.take(np.array([7, 1500, 3]))
    fitted = resize_images(part, 6)
    assert len(fitted) == len(fitted.arrays["image"]) == 3
    np.testing.assert_array_equal(
        fitted.gather(np.arange(3))["label"], part.gather(np.arange(3))["label"]
    )
    np.testing.assert_allclose(fitted[1]["image"].mean(), given[1500]["image"].mean(), atol=0.05)
    assert len(resize_images(given, 3).gather(np.arange(2000))["image"]) == 2000


def test_nothing_to_do_is_nothing_done():
    given = source((6, 6, 3))
    assert resize_images(given) is given and resize_images(given, 6, 3) is given


@pytest.mark.slow
def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="channels must be 3 or 0 for source 'made'"):
        resize_images(source((6, 6, 3)), 0, 1)
    with pytest.raises(ValueError, match="size and channels must be at least 0, got -1 and 0"):
        resize_images(source((6, 6, 3)), -1)
    with pytest.raises(
        ValueError, match=r"source 'blobs' has no column 'image'\. It has features, label"
    ):
        resize_images(data.bundled("blobs"), 8)
