import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxdp.models import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

IMAGENET = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
PHOTO = np.random.default_rng(0).integers(0, 256, (13, 21, 3), np.uint8)


def test_the_shorter_side_is_resized_and_the_centre_cut_out():
    prepared = Preprocessing(size=8, **IMAGENET, resize=10).prepare(
        [PHOTO, PHOTO.transpose(1, 0, 2)]
    )
    assert prepared.dtype == np.float32 and prepared.shape == (2, 8, 8, 3)
    resized = np.asarray(Image.fromarray(PHOTO).resize((16, 10), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(prepared[0], resized[1:9, 4:12] / 255, atol=1e-7)
    # Pillow rounds to bytes between the two axes, so turning the image may change a byte.
    np.testing.assert_allclose(
        prepared[1], resized[1:9, 4:12].transpose(1, 0, 2) / 255, atol=2.01 / 255
    )


def test_a_pair_ignores_the_aspect_ratio():
    preprocessing = Preprocessing(size=8, **IMAGENET, resize=(9, 9), interpolation="bilinear")
    resized = np.asarray(Image.fromarray(PHOTO).resize((9, 9), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(preprocessing.prepare([PHOTO])[0], resized[:8, :8] / 255, atol=1e-7)


def test_floats_give_what_bytes_give_and_stay_in_the_unit_interval():
    preprocessing = Preprocessing(size=8, **IMAGENET, resize=10)
    smooth = PHOTO // 4 + 96  # where no filter leaves the range, only rounding differs
    np.testing.assert_allclose(
        preprocessing.prepare([smooth / 255]), preprocessing.prepare([smooth]), atol=1.51 / 255
    )
    blocks = np.kron(np.array([[0.0, 1.0], [1.0, 0.0]]), np.ones((4, 4)))[..., None].repeat(
        3, axis=2
    )
    # the cubic filter overshoots at every edge
    prepared = Preprocessing(size=32, **IMAGENET).prepare([blocks])
    assert prepared.min() == 0 and prepared.max() == 1


def test_images_of_the_right_size_stay_bit_for_bit():
    image = PHOTO[:8, :8]
    preprocessing = Preprocessing(size=8, **IMAGENET, resize=9)
    assert np.abs(preprocessing.prepare([image])[0] - image / np.float32(255)).max() > 0.01
    untouched = dataclasses.replace(preprocessing, resize=None)
    np.testing.assert_array_equal(untouched.prepare([image])[0], image / np.float32(255))
    np.testing.assert_array_equal(
        untouched.prepare(image[None] / np.float32(255))[0], image / np.float32(255)
    )
    assert untouched.prepare([]).shape == (0, 8, 8, 3)


def test_normalisation():
    images = np.random.default_rng(1).random((2, 4, 4, 3), np.float32)
    preprocessing = Preprocessing(size=4, **IMAGENET)
    expected = (images - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    np.testing.assert_allclose(
        preprocessing.normalise(jnp.asarray(images)), expected, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(
        ValueError, match=r"images must be \[B, 4, 4, 3\], got shape \(2, 4, 4, 1\)"
    ):
        preprocessing.normalise(jnp.zeros((2, 4, 4, 1)))
    with pytest.raises(TypeError, match=r"floats in \[0, 1\], got dtype uint8"):
        preprocessing.normalise(jnp.zeros((2, 4, 4, 3), jnp.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"std": (0.5, 0.5)}, "std must be positive and as long as mean"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be positive and as long as mean"),
        ({"resize": 7}, r"size must be in \[1, resize\], got size=8, resize=7"),
        ({"size": 0}, r"size must be in \[1, resize\], got size=0"),
        ({"interpolation": "cubic"}, "interpolation must be one of nearest, .* got 'cubic'"),
    ],
)
def test_impossible_constants_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**({"size": 8, **IMAGENET} | change))


@pytest.mark.slow
def test_images_of_other_kinds_are_refused():
    preprocessing = Preprocessing(size=8, **IMAGENET)
    with pytest.raises(
        ValueError,
        match=r"every image must be \[H, W, 3\], got shape \(9, 9, 1\). Make a grey image",
    ):
        preprocessing.prepare([np.zeros((9, 9, 1), np.uint8)])
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]. Give 0..255 as uint8"):
        preprocessing.prepare([PHOTO.astype(np.float32)])
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        preprocessing.prepare([np.full((9, 9, 3), np.nan)])
    with pytest.raises(TypeError, match=r"uint8 or floating point in .* got dtype int64"):
        preprocessing.prepare([PHOTO.astype(np.int64)])
