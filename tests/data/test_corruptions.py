"""Corruptions: pixels a function of position and arguments, strengths as published, ImageNet-R's
classes.

Statistical tests use fixed seeds and bounds of five standard deviations (a right implementation
fails one draw in 1.7 million) and state that scales off by 0.7 and 1.3 are outside."""

import functools
import sys
import types

import imagecorruptions
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import stats

from jaxdp.data import (
    CORRUPTIONS,
    HELD_OUT_CORRUPTIONS,
    Source,
    bundled,
    cifar_c,
    corrupt,
    corrupted_tfds,
    from_arrays,
    imagenet_r_classes,
    restrict_classes,
)

ALL = CORRUPTIONS + HELD_OUT_CORRUPTIONS
RANDOM = {
    *(
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "speckle_noise",
        "glass_blur",
        "motion_blur",
    ),
    *("snow", "frost", "fog", "elastic_transform", "spatter"),
}
BLURS = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur")
SIDES = {"cifar": 32, "imagenet": 64}
# Where a larger severity need not be farther from the clean image, by the published constants:
# saturate turns from less to more colour at severity 3; glass blur and spatter change kind; frost
# keeps less of the image as it adds more ice; fog and CIFAR's elastic_transform trade one strength
# for another.
NOT_MONOTONE = {
    "cifar": {"saturate", "glass_blur", "spatter", "frost", "elastic_transform"},
    "imagenet": {"saturate", "glass_blur", "frost", "fog"},
}

each_corruption = pytest.mark.parametrize("name", ALL)
each_scale = pytest.mark.parametrize("scale", SIDES)


@functools.cache
def photographs(side: int, count: int = 8) -> Source:
    """Overlapping parts of the two photographs that scikit-learn brings, at the size asked for."""
    from sklearn.datasets import load_sample_images

    pictures = [Image.fromarray(image) for image in load_sample_images().images]
    boxes = [(20 * k, 10 * k, 20 * k + 300, 10 * k + 300) for k in range(count)]
    parts = [
        pictures[k % 2].crop(box).resize((side, side), Image.Resampling.BOX)
        for k, box in enumerate(boxes)
    ]
    return from_arrays(
        image=np.stack(parts), label=np.arange(count) % 3, num_classes=3, name="photographs"
    )


def uniform(value: int, side: int, count: int = 1) -> Source:
    image = np.full((count, side, side, 3), value, np.uint8)
    return from_arrays(image=image, label=np.zeros(count, int), num_classes=2)


def pixels(source: Source) -> np.ndarray:
    return np.rint(255 * source.gather(np.arange(len(source)))["image"]).astype(np.uint8)


def test_names_are_the_published_ones_in_order():
    assert list(CORRUPTIONS) == imagecorruptions.get_corruption_names("common")
    assert sorted(HELD_OUT_CORRUPTIONS) == sorted(
        imagecorruptions.get_corruption_names("validation")
    )


@pytest.mark.slow
@each_scale
@each_corruption
def test_pixels_depend_on_position_and_seed_alone(name, scale):
    source = photographs(SIDES[scale], 2)
    everything = pixels(corrupt(source, name, seed=7, scale=scale))
    assert everything.shape == (2, SIDES[scale], SIDES[scale], 3)

    np.random.seed(1)
    before = np.random.get_state()
    again = corrupt(source, name, seed=7, scale=scale)
    np.testing.assert_array_equal(pixels(again.take([1])), everything[[1]])
    np.testing.assert_array_equal(
        pixels(corrupt(source.take([1]), name, seed=7, scale=scale)), everything[1:]
    )
    for kept, expected in zip(np.random.get_state(), before, strict=True):
        np.testing.assert_array_equal(kept, expected)

    # Only a random corruption depends on the seed and on where the same photograph stands.
    other_seed = pixels(corrupt(source.take([0]), name, seed=8, scale=scale))
    assert np.array_equal(other_seed, everything[:1]) == (name not in RANDOM)
    twice = from_arrays(image=source.arrays["image"][[0, 0]], label=np.zeros(2, int), num_classes=2)
    first, second = pixels(corrupt(twice, name, seed=7, scale=scale))
    np.testing.assert_array_equal(first, everything[0])
    assert np.array_equal(first, second) == (name not in RANDOM)


@pytest.mark.slow
@each_scale
@each_corruption
def test_severity_moves_images_away(name, scale):
    source = photographs(SIDES[scale])
    clean = pixels(source).astype(float)
    distances = [
        np.mean((pixels(corrupt(source, name, severity=severity, scale=scale)) - clean) ** 2)
        for severity in range(1, 6)
    ]
    assert min(distances) > 1
    if name not in NOT_MONOTONE[scale]:
        assert np.all(np.diff(distances) > 0), distances


def test_a_corrupted_source_is_a_source():
    source = photographs(32, 5)
    corrupted = corrupt(source, "fog", severity=3)
    assert (
        corrupted.name == "photographs/fog_3" and corrupted.num_classes == 3 and len(corrupted) == 5
    )
    example, batch = corrupted[4], corrupted.gather([4, 0])
    assert example["image"].dtype == np.float32 and example["label"] == source[4]["label"]
    np.testing.assert_array_equal(batch["image"][0], example["image"])
    np.testing.assert_array_equal(batch["label"], source.gather([4, 0])["label"])
    assert corrupted.gather([])["image"].shape == (0, 32, 32, 3)
    stored = np.asarray(corrupted.arrays["image"])
    assert stored.dtype == np.uint8
    np.testing.assert_array_equal(stored, pixels(corrupted))

    kept = from_arrays(image=stored, label=source.arrays["label"], num_classes=3)
    assert (
        kept.fingerprint == corrupted.fingerprint == corrupt(source, "fog", severity=3).fingerprint
    )
    others = [
        source,
        corrupt(source, "fog"),
        corrupt(source, "fog", severity=3, seed=1),
        corrupt(source, "snow"),
    ]
    assert len({corrupted.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_auto_is_cifar_up_to_64_pixels():
    for side, scale in ((32, "cifar"), (64, "cifar"), (65, "imagenet")):
        source = photographs(side, 1)
        by_scale = {scale: pixels(corrupt(source, "contrast", scale=scale)) for scale in SIDES}
        np.testing.assert_array_equal(pixels(corrupt(source, "contrast")), by_scale[scale])
        assert not np.array_equal(by_scale["cifar"], by_scale["imagenet"])


@pytest.mark.slow
@pytest.mark.parametrize("severity", [1, 3, 5])
@each_corruption
def test_small_grey_floating_point_images_are_handled(name, severity):
    digits = bundled("digits").take(np.arange(3))
    corrupted = pixels(corrupt(digits, name, severity=severity))
    assert corrupted.shape == (3, 8, 8, 1)
    # The same as a colour image with three equal channels, of which the green one is kept.
    colour = np.rint(255 * np.repeat(digits.arrays["image"][:3], 3, axis=3)).astype(np.uint8)
    colour = from_arrays(image=colour, label=np.zeros(3, int), num_classes=2)
    np.testing.assert_array_equal(
        corrupted, pixels(corrupt(colour, name, severity=severity))[..., 1:2]
    )


@pytest.mark.slow
@each_corruption
def test_sides_may_differ(name):
    image = photographs(64, 1).arrays["image"][:, :40, :57]
    source = from_arrays(image=image, label=np.zeros(1, int), num_classes=2)
    for scale in SIDES:
        assert pixels(corrupt(source, name, scale=scale)).shape == (1, 40, 57, 3)


@pytest.mark.parametrize(
    ("scale", "constants"),
    [("cifar", (0.04, 0.06, 0.08, 0.09, 0.10)), ("imagenet", (0.08, 0.12, 0.18, 0.26, 0.38))],
)
def test_gaussian_noise_has_the_published_deviation(scale, constants):
    source = uniform(128, 32, 10)
    for severity, constant in enumerate(constants, start=1):
        noisy = pixels(corrupt(source, "gaussian_noise", severity=severity, scale=scale))
        # About one deviation above the mean nothing is clipped: the count of larger pixels is
        # binomial.
        threshold = 128 + round(255 * constant)
        count, trials = np.sum(noisy >= threshold), noisy.size

        def z_score(scaled, count=count, trials=trials, threshold=threshold, constant=constant):
            chance = stats.norm.sf((threshold - 128) / (255 * constant * scaled))
            return abs(count - trials * chance) / np.sqrt(trials * chance * (1 - chance))

        assert z_score(1) < 5
        assert min(z_score(0.7), z_score(1.3)) > 5


@pytest.mark.parametrize(
    ("scale", "constants"), [("cifar", (500, 250, 100, 75, 50)), ("imagenet", (60, 25, 12, 5, 3))]
)
def test_shot_noise_has_the_mean_and_variance_of_scaled_poisson_counts(scale, constants):
    source = uniform(128, 32, 10)

    def moments(constant):
        counts = np.arange(10 * constant)
        values = np.floor(255 * np.minimum(counts / constant, 1) + 1e-9)
        chances = stats.poisson.pmf(counts, 128 / 255 * constant)
        mean = chances @ values
        return mean, chances @ (values - mean) ** 2, chances @ (values - mean) ** 4

    for severity, constant in enumerate(constants, start=1):
        noisy = pixels(corrupt(source, "shot_noise", severity=severity, scale=scale)).astype(float)
        mean, variance, fourth = moments(constant)
        spread = 5 * np.sqrt((fourth - variance**2) / noisy.size)
        assert abs(noisy.mean() - mean) < 5 * np.sqrt(variance / noisy.size)
        assert abs(noisy.var() - variance) < spread
        assert min(abs(noisy.var() - 0.7 * variance), abs(noisy.var() - 1.3 * variance)) > spread


@pytest.mark.parametrize(
    ("scale", "constants"),
    [("cifar", (0.01, 0.02, 0.03, 0.05, 0.07)), ("imagenet", (0.03, 0.06, 0.09, 0.17, 0.27))],
)
def test_impulse_noise_sets_the_published_share_to_black_and_white(scale, constants):
    for severity, constant in enumerate(constants, start=1):
        noisy = pixels(
            corrupt(uniform(128, 32, 30), "impulse_noise", severity=severity, scale=scale)
        )
        for value in (0, 255):
            low, high = stats.binom.interval(1 - 2 * stats.norm.sf(5), noisy.size, constant / 2)
            assert low <= np.sum(noisy == value) <= high
            assert low > 0.7 * noisy.size * constant / 2 and high < 1.3 * noisy.size * constant / 2
        assert np.isin(noisy, (0, 128, 255)).all()


@pytest.mark.slow
@each_scale
@pytest.mark.parametrize(
    "name", (*BLURS, "elastic_transform", "pixelate", "jpeg_compression", "contrast")
)
def test_an_image_of_one_colour_has_nothing_to_blur(name, scale):
    for severity in range(1, 6):
        blurred = pixels(corrupt(uniform(100, 64), name, severity=severity, scale=scale))
        np.testing.assert_allclose(blurred.astype(int), 100, atol=2)


@pytest.mark.parametrize(
    ("name", "severity", "same_as"),
    [
        *(("brightness", ours, theirs) for ours, theirs in ((2, 1), (4, 2), (5, 3))),
        *(("contrast", ours, theirs) for ours, theirs in ((3, 1), (4, 2))),
        *(("saturate", k, k) for k in (1, 2)),
        ("gaussian_blur", 5, 1),
    ],
)
def test_scales_agree_where_their_constants_do(name, severity, same_as):
    source = photographs(32)
    ours = pixels(corrupt(source, name, severity=severity, scale="cifar"))
    theirs = pixels(corrupt(source, name, severity=same_as, scale="imagenet"))
    np.testing.assert_allclose(ours.astype(int), theirs, atol=1)


@pytest.mark.parametrize("degrees", [-45.0, -20.0, 0.0, 33.0, -90.0, -135.0])
def test_motion_blur_is_the_shifted_sum_of_the_library(degrees):
    photograph = photographs(32, 1).arrays["image"][0]
    theirs = imagecorruptions.corruptions._motion_blur(photograph / 255, 9, 2.5, degrees)
    ours = cifar_c.apply(
        photograph, "motion_blur", 5, types.SimpleNamespace(uniform=lambda low, high: degrees)
    )
    np.testing.assert_allclose(ours, 255 * theirs, atol=1 + 1e-3)  # fractions are dropped


def test_glass_blur_takes_every_pixel_from_nearby():
    position = np.indices((32, 32))
    image = np.stack([*(8 * position + 4), np.zeros((32, 32), int)], axis=-1).astype(np.uint8)
    # blurs by 0.05 pixels: not at all
    shuffled = cifar_c.apply(image, "glass_blur", 1, np.random.default_rng(0))
    moved = shuffled[..., :2] // 8 - np.moveaxis(position, 0, -1)
    edge = np.ones((32, 32), bool)
    edge[2:, 2:] = False
    assert not moved[edge].any()
    # A shift per axis is -1 or 0; a pixel that was overwritten before is never a source (those lie
    # behind).
    shares = [
        np.mean(np.all(moved[2:, 2:] == shift, axis=-1))
        for shift in ((0, 0), (-1, 0), (0, -1), (-1, -1))
    ]
    np.testing.assert_allclose(shares, 0.25, atol=0.075)


@each_scale
def test_weather_and_light_change_brightness(scale):
    dark = uniform(20, SIDES[scale], 4)
    for name in ("snow", "frost", "brightness"):
        assert pixels(corrupt(dark, name, severity=5, scale=scale)).mean() > 30, name
    # Fog mixes with grey: what is black rises, what is white falls, and the brightest pixel stays
    # in range.
    halves = np.zeros((4, 32, 32, 3), np.uint8)
    halves[:, :16] = 255
    foggy = pixels(
        corrupt(
            from_arrays(image=halves, label=np.zeros(4, int), num_classes=2), "fog", scale=scale
        )
    )
    assert foggy[:, :16].mean() < 225 and foggy[:, 16:].mean() > 30
    step = {"cifar": 0.3, "imagenet": 0.5}[scale]
    np.testing.assert_allclose(
        pixels(corrupt(dark, "brightness", scale=scale)), int(20 + 255 * step), atol=1
    )


@each_scale
def test_contrast_shrinks_differences_about_the_mean(scale):
    image = np.full((1, 32, 32, 3), 40, np.uint8)
    image[:, 16:] = 200
    source = from_arrays(image=image, label=np.zeros(1, int), num_classes=2)
    factor = {"cifar": 0.15, "imagenet": 0.05}[scale]
    lowered = pixels(corrupt(source, "contrast", scale=scale))[0]
    np.testing.assert_allclose(lowered[0], 120 - 80 * factor, atol=1)
    np.testing.assert_allclose(lowered[-1], 120 + 80 * factor, atol=1)


def test_what_cannot_be_corrupted_is_refused():
    source = photographs(32, 1)
    with pytest.raises(ValueError, match=r"name must be one of gaussian_noise, .*, got 'rain'"):
        corrupt(source, "rain")
    for severity in (0, 6, 2.5):
        with pytest.raises(ValueError, match="severity must be one of 1, 2, 3, 4, 5"):
            corrupt(source, "fog", severity=severity)
    with pytest.raises(ValueError, match="seed must be a non-negative int, got -1"):
        corrupt(source, "fog", seed=-1)
    with pytest.raises(ValueError, match="scale must be one of auto, cifar, imagenet, got 'tiny'"):
        corrupt(source, "fog", scale="tiny")
    with pytest.raises(ValueError, match=r"has no column 'image'\. It has features, label"):
        corrupt(bundled("blobs"), "fog")
    for side, scale in ((31, "imagenet"), (7, "auto")):
        with pytest.raises(
            ValueError, match=rf"sides of at least \d+ pixels, got shape \({side}, {side}, 3\)"
        ):
            corrupt(photographs(side, 1), "fog", scale=scale)


@pytest.mark.slow
def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[corruptions\]"'):
        corrupt(photographs(32, 1), "fog")


def test_numpys_global_state_survives_an_exception():
    before = np.random.get_state()[1].copy()
    with pytest.raises(ZeroDivisionError), cifar_c.numpy_seeded(np.random.default_rng(0)):
        np.random.random()
        raise ZeroDivisionError
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize(
    ("name", "corruption", "configuration"),
    [
        ("cifar10_corrupted", "glass_blur", "cifar10_corrupted/frosted_glass_blur_5"),
        ("cifar10_corrupted", "elastic_transform", "cifar10_corrupted/elastic_5"),
        ("cifar10_corrupted", "fog", "cifar10_corrupted/fog_5"),
        ("imagenet2012_corrupted", "glass_blur", "imagenet2012_corrupted/glass_blur_5"),
    ],
)
def test_a_corrupted_set_that_is_not_prepared_is_a_clear_error(
    name, corruption, configuration, tmp_path
):
    with pytest.raises(
        FileNotFoundError, match=f"tfds build {configuration} --file_format=array_record"
    ):
        corrupted_tfds(name, corruption, 5, data_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["cifar10_corrupted", "imagenet2012_corrupted"])
def test_every_configuration_is_one_that_tfds_knows(name, monkeypatch):
    import tensorflow_datasets as tfds

    from jaxdp.data import corruptions

    monkeypatch.setattr(corruptions, "from_tfds", lambda full_name, split, **_: full_name)
    known = {f"{name}/{config}" for config in tfds.builder_cls(name).builder_configs}
    asked = {
        corrupted_tfds(name, corruption, severity) for corruption in ALL for severity in range(1, 6)
    }
    assert asked == known


def test_unknown_corrupted_sets_are_refused():
    with pytest.raises(
        ValueError, match="name must be one of cifar10_corrupted, imagenet2012_corrupted"
    ):
        corrupted_tfds("mnist_corrupted", "fog", 5)
    with pytest.raises(ValueError, match="corruption must be one of"):
        corrupted_tfds("cifar10_corrupted", "frosted_glass_blur", 5)
    with pytest.raises(ValueError, match="severity must be one of 1, 2, 3, 4, 5, got 0"):
        corrupted_tfds("cifar10_corrupted", "fog", 0)


def test_imagenet_r_has_200_classes_of_imagenet():
    classes = imagenet_r_classes()
    assert classes.shape == (200,) and np.issubdtype(classes.dtype, np.integer)
    assert np.all(np.diff(classes) > 0) and classes[0] >= 0 and classes[-1] < 1000
    # Goldfish, great white shark, hammerhead, stingray, hen are in it; tench, tiger shark, ostrich
    # are 0, 3, 9.
    assert classes[:5].tolist() == [1, 2, 4, 6, 8]
    assert not {0, 3} & set(classes.tolist())


@pytest.mark.slow
def test_restricted_classes_leave_a_classifier_of_those_alone():
    def apply_fn(params, images):
        return images @ params

    params, images = (
        jnp.arange(20.0).reshape(2, 10),
        jnp.array([[1.0, 0.5], [0.0, -1.0], [2.0, 1.0]]),
    )
    restricted = restrict_classes(apply_fn, [7, 2, 3])
    np.testing.assert_array_equal(
        restricted(params, images), apply_fn(params, images)[:, jnp.array([7, 2, 3])]
    )
    assert restrict_classes(lambda params, images: images, imagenet_r_classes())(
        {}, jnp.ones((4, 1000))
    ).shape == (
        4,
        200,
    )
    for classes in ([1, 1], [0.5], [[1]]):
        with pytest.raises(ValueError, match="classes must be distinct integers"):
            restrict_classes(apply_fn, classes)
    for classes in ([10], [-1]):
        with pytest.raises(ValueError, match=r"classes must be in \[0, 10\)"):
            restrict_classes(apply_fn, classes)(params, images)
