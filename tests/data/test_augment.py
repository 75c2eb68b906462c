import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.data import augment, normalise, random_crop, random_flip


def image(height: int = 5, width: int = 6, channels: int = 2) -> np.ndarray:
    return np.arange(height * width * channels, dtype=np.float32).reshape(height, width, channels)


def crops(x: np.ndarray, padding: int) -> list[np.ndarray]:
    padded = np.pad(x, ((padding, padding), (padding, padding), (0, 0)), mode="reflect")
    height, width, _ = x.shape
    starts = range(2 * padding + 1)
    return [padded[r : r + height, c : c + width] for r in starts for c in starts]


def frequencies(outputs: np.ndarray, candidates: list[np.ndarray]) -> np.ndarray:
    """How often each candidate occurs; every output must be one of them."""
    equal = np.stack(
        [(outputs == candidate).all(axis=(1, 2, 3)) for candidate in candidates], axis=1
    )
    assert (equal.sum(axis=1) == 1).all()
    return equal.sum(axis=0)


def test_random_crop_is_uniform_over_the_windows_of_the_mirrored_image():
    x, draws = image(), 4000
    keys = jax.random.split(jax.random.key(0), draws)
    outputs = jax.jit(jax.vmap(lambda key: random_crop(key, x, padding=2)))(keys)
    assert outputs.dtype == jnp.float32
    counts = frequencies(np.asarray(outputs), crops(x, 2))
    statistic = np.sum((counts - draws / 25) ** 2) / (draws / 25)
    assert statistic < 51.2  # chi-square with 24 degrees of freedom, 0.1 %


def test_random_flip_mirrors_half_of_the_time():
    x, draws = image(), 2000
    keys = jax.random.split(jax.random.key(1), draws)
    outputs = jax.jit(jax.vmap(lambda key: random_flip(key, x)))(keys)
    counts = frequencies(np.asarray(outputs), [x, x[:, ::-1]])
    assert abs(counts[0] - draws / 2) < 3.3 * np.sqrt(draws / 4)


def test_augment_crops_and_flips_independently():
    x, draws = image(), 4000
    keys = jax.random.split(jax.random.key(2), draws)
    outputs = jax.jit(jax.vmap(lambda key: augment(key, x, padding=1)))(keys)
    windows = crops(x, 1)
    counts = frequencies(np.asarray(outputs), windows + [window[:, ::-1] for window in windows])
    statistic = np.sum((counts - draws / 18) ** 2) / (draws / 18)
    assert statistic < 40.8  # chi-square with 17 degrees of freedom, 0.1 %


def test_no_padding_keeps_the_image():
    x = image()
    np.testing.assert_array_equal(random_crop(jax.random.key(0), x, padding=0), x)


def test_augment_refuses_batches_and_too_much_padding():
    with pytest.raises(ValueError, match="for a batch"):
        augment(jax.random.key(0), np.zeros((2, 8, 8, 3), np.float32))
    with pytest.raises(ValueError, match=r"padding must be in \[0, 5\)"):
        random_crop(jax.random.key(0), image(), padding=5)


@pytest.mark.slow
def test_normalise_per_channel_and_with_one_number():
    x = image()
    expected = (x - np.array([1.0, 2.0])) / np.array([0.5, 4.0])
    np.testing.assert_allclose(normalise(x, [1.0, 2.0], [0.5, 4.0]), expected, rtol=1e-6)
    np.testing.assert_allclose(normalise(x, 0.5, 0.25), (x - 0.5) / 0.25, rtol=1e-6)
    assert normalise(jnp.asarray(x, jnp.bfloat16), 0.5, 0.5).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="std must be positive"):
        normalise(x, 0.0, [1.0, 0.0])
