"""Hilbert augmentation and patch retrieval against sums written out in float64.

Statistical tests use fixed keys. Over the choice of key a correct implementation fails a comparison
with probability 0.001."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.data import bundled
from jaxdp.split.augment import (
    amplitude_exchange,
    augmented_batch,
    hilbert_augment,
    patch_augment,
    retrieve_neighbors,
)

# --- Hilbert transform ---------------------------------------------------------------------------


def some_images() -> dict[str, np.ndarray]:
    """Returns real images of even height and random images of odd height."""
    digits = np.asarray(bundled("digits").gather(np.arange(3))["image"], np.float32)
    return {
        "digits": digits,
        "random": np.random.default_rng(0).uniform(size=(2, 5, 6, 2)).astype(np.float32),
    }


def dft(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Its matrix, and the frequency xi of every row, in -size/2 < xi <= size/2."""
    k = np.arange(size)
    return np.exp(-2j * np.pi * np.outer(k, k) / size), np.where(k > size / 2, k - size, k)


def signed(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns HT of one channel [H, W] along the height, and its part of frequency 0 or Nyquist."""
    matrix, xi = dft(len(image))
    removed = (xi == 0) | (2 * xi == len(image))
    spectrum = matrix @ image
    inverse = matrix.conj() / len(image)
    transformed = inverse @ ((-1j * np.sign(xi) * ~removed)[:, None] * spectrum)
    assert np.abs(transformed.imag).max() < 1e-12
    return transformed.real, (inverse @ (removed[:, None] * spectrum)).real


def exchanged(transformed: np.ndarray, image: np.ndarray, threshold: float) -> np.ndarray:
    """Combines amplitudes of one channel [H, W] with phases of the other, complex."""
    spectrum = np.fft.fft2(transformed)
    phase = np.where(abs(spectrum) > threshold * abs(spectrum).max(), np.angle(spectrum), 0)
    return np.fft.ifft2(abs(np.fft.fft2(image)) * np.exp(1j * phase))


def figure(image: np.ndarray, threshold: float = 1e-5) -> np.ndarray:
    transformed, removed = signed(image)
    return exchanged(np.sqrt((image - removed) ** 2 + transformed**2) / 2, image, threshold)


def eq5(image: np.ndarray) -> np.ndarray:
    """Computes the literal exchange: HT(I) + IFFT2(|F2 I| where xi is 0 or Nyquist)."""
    xi = dft(len(image))[1]
    removed = (xi == 0) | (2 * xi == len(image))
    return signed(image)[0] + np.fft.ifft2(abs(np.fft.fft2(image)) * removed[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "random"])
@pytest.mark.parametrize("mode", [figure, eq5])
def test_hilbert_augment_is_the_formula(name, mode):
    images = some_images()[name]
    outputs = hilbert_augment(images, mode=mode.__name__, output="real", clip=None)
    expected = np.stack(
        [[mode(np.float64(c)) for c in np.moveaxis(image, -1, 0)] for image in images]
    )
    assert outputs.dtype == jnp.float32 and outputs.shape == images.shape
    np.testing.assert_allclose(np.moveaxis(outputs, -1, 1), expected.real, atol=1e-5)


def test_the_figure_differs_from_the_letter_and_both_from_the_image():
    images = some_images()["digits"]
    by_figure, by_letter = hilbert_augment(images), hilbert_augment(images, mode="eq5")
    for one, other in itertools.combinations([images, by_figure, by_letter], 2):
        assert np.abs(one - other).max() > 0.1


def test_default_output_is_the_magnitude_within_the_range_of_images():
    images = some_images()["digits"]
    real = np.asarray(hilbert_augment(images, output="real", clip=None))
    assert real.min() < -0.01 and real.max() > 1.01
    np.testing.assert_allclose(hilbert_augment(images), np.clip(abs(real), 0, 1), atol=1e-6)
    np.testing.assert_allclose(
        hilbert_augment(images, output="real", clip=(-0.5, 0.75)), real.clip(-0.5, 0.75), atol=1e-6
    )


def test_along_the_width_is_along_the_height_of_the_turned_image():
    images = some_images()["random"]
    turned = hilbert_augment(images.swapaxes(1, 2)).swapaxes(1, 2)
    np.testing.assert_allclose(hilbert_augment(images, axis=-2), turned, atol=1e-6)
    assert np.abs(turned - hilbert_augment(images)).max() > 0.01


def test_amplitudes_are_those_of_the_image():
    images = some_images()["random"]
    outputs = hilbert_augment(images, output="real", clip=None)
    kept = [abs(np.fft.fft2(np.float64(x), axes=(1, 2))) for x in (images, outputs)]
    np.testing.assert_allclose(*kept, atol=1e-5)


def test_an_image_without_edges_gets_phase_zero_not_that_of_rounding_errors():
    row = np.random.default_rng(1).uniform(size=(1, 1, 6, 1)).astype(np.float32)
    images = np.broadcast_to(row, (1, 7, 6, 1))
    expected = np.fft.ifft(abs(np.fft.fft(np.float64(row), axis=2)), axis=2).real
    outputs = hilbert_augment(images, output="real", clip=None)
    np.testing.assert_allclose(outputs, np.broadcast_to(expected, images.shape), atol=1e-5)
    assert np.abs(outputs - images).max() > 0.1
    flat = np.full((1, 7, 6, 1), 0.3, np.float32)
    np.testing.assert_allclose(hilbert_augment(flat), flat, atol=1e-6)
    np.testing.assert_array_equal(hilbert_augment(0 * flat), 0 * flat)


def test_what_counts_as_zero_depends_on_the_precision():
    """Checks waves whose envelope varies by 1e-5. That is zero in float32 and a phase in
    float64."""
    y, x = np.meshgrid(*2 * [2 * np.pi * np.arange(8) / 8], indexing="ij")
    wave = 0.5 + 0.3 * (1 + 1.2e-5 * np.sin(x)) * np.cos(y)
    images = (wave + 0.2 * np.cos(x))[None, :, :, None]
    np.testing.assert_allclose(hilbert_augment(images.astype(np.float32)), images, atol=2e-5)
    with jax.enable_x64(True):
        outputs = hilbert_augment(images)
    assert outputs.dtype == np.float64
    np.testing.assert_allclose(outputs[0, :, :, 0], wave + 0.2 * np.sin(x), atol=2e-5)
    np.testing.assert_allclose(
        outputs[0, :, :, 0], abs(figure(images[0, :, :, 0], threshold=1e-8)), atol=1e-12
    )


def test_hilbert_augment_keeps_the_dtype():
    for dtype in (jnp.float16, jnp.bfloat16):
        shape = jax.eval_shape(hilbert_augment, jax.ShapeDtypeStruct((1, 4, 4, 1), dtype))
        assert shape.dtype == dtype


def test_hilbert_augment_refuses_what_is_no_image():
    images = some_images()["digits"]
    with pytest.raises(
        ValueError, match=r"images must be \[n, H, W, C\], got shape \(8, 8, 1\). Give one image as"
    ):
        hilbert_augment(images[0])
    with pytest.raises(
        TypeError, match=r"images must be floating point in .* got uint8. Divide uint8 by 255"
    ):
        hilbert_augment(images.astype(np.uint8))
    with pytest.raises(ValueError, match=r"axis must be -3 \(height\) or -2 \(width\), got -1"):
        hilbert_augment(images, axis=-1)
    with pytest.raises(ValueError, match="mode must be 'figure' or 'eq5', got 'eq6'"):
        hilbert_augment(images, mode="eq6")
    with pytest.raises(ValueError, match="output must be 'abs' or 'real', got 'imag'"):
        hilbert_augment(images, output="imag")


# --- Amplitude exchange -------------------------------------------------------------------------


def donated(image: np.ndarray, donor: np.ndarray, share: float) -> np.ndarray:
    """Computes the exchange of one channel [H, W] in float64, by matrices of the transform."""
    rows, columns = (dft(size)[0] for size in image.shape)
    spectra = [rows @ np.float64(channel) @ columns.T for channel in (image, donor)]
    amplitude = (1 - share) * abs(spectra[0]) + share * abs(spectra[1])
    mixed = amplitude * np.exp(1j * np.angle(spectra[0]))
    back = rows.conj().T @ mixed @ columns.conj() / image.size
    assert np.abs(back.imag).max() < 1e-12
    return back.real


@pytest.mark.parametrize(("name", "share"), [("digits", 1.0), ("random", 1.0), ("random", 0.3)])
def test_amplitude_exchange_is_the_formula(name, share):
    images = some_images()[name]
    donors = np.roll(images, 1, axis=0)
    outputs = amplitude_exchange(images, donors, share=share, clip=None)
    channels = [np.moveaxis(x, -1, 1).reshape(-1, *x.shape[1:3]) for x in (images, donors)]
    expected = np.stack([donated(*pair, share) for pair in zip(*channels, strict=True)])
    ours = np.moveaxis(outputs, -1, 1).reshape(expected.shape)
    assert outputs.dtype == jnp.float32
    np.testing.assert_allclose(ours, expected, atol=2e-5)
    # The twins: the phases of the donor, and another share.
    swapped = [donated(b, a, share) for a, b in zip(*channels, strict=True)]
    assert np.abs(ours - np.stack(swapped)).max() > 0.05
    other = [donated(*pair, share - 0.1) for pair in zip(*channels, strict=True)]
    assert np.abs(ours - np.stack(other)).max() > 0.005


def test_an_image_is_its_own_donor_and_results_stay_in_the_range_of_images():
    images = some_images()["digits"]
    np.testing.assert_allclose(amplitude_exchange(images, images), images, atol=1e-5)
    outputs = np.asarray(amplitude_exchange(images, images[::-1]))
    free = np.asarray(amplitude_exchange(images, images[::-1], clip=None))
    assert free.min() < -0.01
    np.testing.assert_array_equal(outputs, free.clip(0, 1))


def test_amplitude_exchange_refuses_what_does_not_fit():
    images = some_images()["digits"]
    with pytest.raises(ValueError, match=r"donors must have the shape \(3, 8, 8, 1\) of images"):
        amplitude_exchange(images, images[:1])
    with pytest.raises(TypeError, match="donors must be float32 as images are, got float16"):
        amplitude_exchange(images, images.astype(np.float16))
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got 1.5"):
        amplitude_exchange(images, images, share=1.5)


# --- Neighbours ---------------------------------------------------------------------------------


def vectors(n: int = 6, tokens: int = 5, width: int = 3, seed: int = 0) -> np.ndarray:
    """Returns tokens of very different lengths, so that the nearest is not the most similar one."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, tokens, width)) * np.exp(rng.normal(size=(n, tokens, 1)))).astype(
        np.float32
    )


def by_search(x: np.ndarray) -> np.ndarray:
    """Computes Eq. 13 pair by pair in float64."""
    n, tokens, _ = x.shape
    found = np.zeros((tokens, n), int)
    for j, i in np.ndindex(tokens, n):
        similarity = {}
        for k in set(range(n)) - {i}:
            a, b = np.float64(x[i, j]), np.float64(x[k, j])
            lengths = np.linalg.norm(a) * np.linalg.norm(b)
            similarity[k] = a @ b / lengths if lengths else 0.0
        # max takes the first of equal ones
        found[j, i] = max(sorted(similarity), key=similarity.__getitem__)
    return found


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_neighbors_are_the_most_similar_other_tokens_at_the_position(shift):
    x = vectors() + np.float32(shift)
    neighbors = retrieve_neighbors(x)
    assert neighbors.dtype == jnp.int32 and neighbors.shape == (5, 6)
    np.testing.assert_array_equal(neighbors, by_search(x))


def test_neighbors_do_not_depend_on_the_length_of_tokens():
    x = vectors()
    expected = retrieve_neighbors(x)
    for factor in (0.0123, 1e-30, 1e30):
        np.testing.assert_array_equal(retrieve_neighbors(x * np.float32(factor)), expected)
    lengths = np.random.default_rng(1).uniform(0.1, 10, size=(6, 5, 1)).astype(np.float32)
    np.testing.assert_array_equal(retrieve_neighbors(x * lengths), expected)


def test_neighbors_of_integer_codes_are_those_of_their_values():
    codes = np.random.default_rng(2).integers(-128, 128, size=(6, 5, 3)).astype(np.int8)
    expected = by_search(codes)
    np.testing.assert_array_equal(retrieve_neighbors(codes), expected)
    np.testing.assert_array_equal(retrieve_neighbors(codes * np.float32(0.037)), expected)


def test_ties_go_to_the_first_image_and_an_equal_image_is_another_one():
    a, b = vectors(2)
    x = np.stack([a, b, a, b, a, 2 * b])
    expected = [[2, 3, 0, 1, 0, 1]] * 5
    np.testing.assert_array_equal(retrieve_neighbors(x), expected)


def test_tokens_of_zeros_have_similarity_zero():
    x = vectors()
    x[2, 1] = 0
    x[:, 3] = 0
    x[:, 4] = [1, 0, 0]
    x[1:, 4] *= -1
    x[:, 0] = x[:, 4]
    x[3, 4] = 0  # is better for the first image than the opposite direction
    neighbors = retrieve_neighbors(x)
    np.testing.assert_array_equal(neighbors, by_search(x))
    assert neighbors[1, 2] == 0 and neighbors[4, 0] == 3 and neighbors[0, 0] == 1
    np.testing.assert_array_equal(neighbors[3], [1, 0, 0, 0, 0, 0])


def test_one_image_is_its_own_neighbor_and_is_not_augmented():
    x = vectors(1)
    neighbors = retrieve_neighbors(x)
    np.testing.assert_array_equal(neighbors, np.zeros((5, 1)))
    np.testing.assert_array_equal(patch_augment(jax.random.key(0), x, neighbors, 0), x)
    with pytest.raises(
        ValueError, match=r"n_patches=2 needs a neighbour, .* Use n_patches=0, or more images"
    ):
        patch_augment(jax.random.key(0), x, neighbors, 2)


def test_retrieval_needs_no_more_memory_than_similarities_of_one_position():
    n, tokens = 128, 16
    compiled = retrieve_neighbors.lower(jax.ShapeDtypeStruct((n, tokens, 2), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 4 * n * n < 4 * tokens * n * n


# --- Copies -------------------------------------------------------------------------------------

N, TOKENS = 4, 7


@pytest.fixture(scope="module")
def task():
    """Tokens that tell where they come from, and neighbours at random."""
    x = np.stack(np.meshgrid(np.arange(N), np.arange(TOKENS), indexing="ij"), axis=-1).astype(
        np.float32
    )
    others = np.random.default_rng(3).integers(1, N, size=(TOKENS, N))
    return x, ((np.arange(N) + others) % N).astype(np.int32)


def replaced(outputs: np.ndarray, rows: np.ndarray, neighbors: np.ndarray) -> np.ndarray:
    """Finds the neighbour's tokens, bool [B, tokens]. Checks that all others are the image's, all
    in place."""
    outputs = np.asarray(outputs).astype(int)
    np.testing.assert_array_equal(
        outputs[..., 1], np.broadcast_to(np.arange(TOKENS), outputs.shape[:2])
    )
    own = outputs[..., 0] == rows[:, None]
    assert (own | (outputs[..., 0] == neighbors[:, rows].T)).all()
    return ~own


def chi_square(chosen: np.ndarray, cells: int) -> float:
    expected = len(chosen) / cells
    return float(((np.bincount(chosen, minlength=cells) - expected) ** 2).sum() / expected)


@pytest.fixture(scope="module")
def many(task):
    """Copies 1..2000 of two images, which patches are replaced: bool [2000, 2, tokens]."""
    x, neighbors = task
    copies, rows = (
        grid.ravel().astype(np.int32)
        for grid in np.meshgrid(np.arange(1, 2001), [0, 1], indexing="ij")
    )
    outputs = augmented_batch(jax.random.key(4), x, neighbors, rows, copies, n_patches=2)
    assert outputs.shape == (4000, TOKENS, 2) and outputs.dtype == jnp.float32
    return replaced(outputs, rows, neighbors).reshape(2000, 2, TOKENS)


def test_every_set_of_positions_is_as_likely(many):
    assert not many[..., 0].any() and (many.sum(-1) == 2).all()
    sets = [set(pair) for pair in itertools.combinations(range(1, TOKENS), 2)]
    chosen = np.array(
        [sets.index(set(np.flatnonzero(mask))) for mask in many.reshape(-1, TOKENS)]
    ).reshape(2000, 2)
    assert chi_square(chosen.ravel(), 15) < 36.1  # 14 degrees of freedom, 0.1 %
    # Independent between images, between copies of one image, and between copies of two.
    first, second = chosen.T
    for one, other in ((first, second), (first[:-1], first[1:]), (first[1:], second[:-1])):
        assert chi_square(15 * one + other, 225) < 295.1  # 224 degrees of freedom, 0.1 %


@pytest.fixture(scope="module")
def all_copies():
    """Returns image and copy of every row of a batch: copies 0..4 of all images."""
    return tuple(
        grid.ravel().astype(np.int32)
        for grid in np.meshgrid(np.arange(N), np.arange(5), indexing="ij")
    )


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_copy_is_the_same_in_every_order(task, all_copies, impl):
    """Checks also keys whose bits under vmap depend on the first key of the batch."""
    key = jax.random.key(6, impl=impl)
    whole = np.asarray(augmented_batch(key, *task, *all_copies, n_patches=2))
    order = np.random.default_rng(7).permutation(len(whole))
    rows, copies = (column[order] for column in all_copies)
    np.testing.assert_array_equal(
        augmented_batch(key, *task, rows, copies, n_patches=2), whole[order]
    )
    other = augmented_batch(jax.random.key(8, impl=impl), *task, *all_copies, n_patches=2)
    assert (np.asarray(other) != whole).any()


@pytest.mark.slow
def test_a_copy_is_the_same_in_a_batch_of_another_size(task, all_copies):
    x, neighbors = task
    x = x + np.random.default_rng(5).normal(size=x.shape).astype(np.float32)
    key, (rows, copies) = jax.random.key(6), all_copies
    whole = np.asarray(augmented_batch(key, x, neighbors, rows, copies, n_patches=2))
    for b in ([0, 7, 12, 19], [19, 3, 3, 1]):
        np.testing.assert_array_equal(
            augmented_batch(key, x, neighbors, rows[b], copies[b], n_patches=2), whole[b]
        )
    np.testing.assert_array_equal(whole[copies == 0], x)
    np.testing.assert_array_equal(patch_augment(key, x, neighbors, 2), whole[copies == 1])


@pytest.mark.slow
@pytest.mark.parametrize("prefix_tokens", [0, 2])
def test_prefix_tokens_are_never_replaced_and_all_others_can_be(task, prefix_tokens):
    x, neighbors = task
    patches = TOKENS - prefix_tokens
    mask = replaced(
        patch_augment(jax.random.key(9), x, neighbors, patches, prefix_tokens=prefix_tokens),
        np.arange(N),
        neighbors,
    )
    np.testing.assert_array_equal(
        mask, np.broadcast_to(np.arange(TOKENS) >= prefix_tokens, mask.shape)
    )


def test_no_patches_are_the_identity_and_codes_stay_codes(task):
    x, neighbors = task
    codes = x.astype(np.int8)
    outputs = patch_augment(jax.random.key(10), codes, neighbors, 0)
    assert outputs.dtype == jnp.int8
    np.testing.assert_array_equal(outputs, codes)


def test_a_batch_needs_no_more_memory_than_itself():
    n, tokens, width = 32, 8, 512
    shapes = [(n, tokens, width), (tokens, n), (n,), (n,)]
    args = [
        jax.ShapeDtypeStruct(s, t)
        for s, t in zip(shapes, [jnp.float32] + 3 * [jnp.int32], strict=True)
    ]
    compiled = augmented_batch.lower(jax.random.key(0), *args, n_patches=2).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * tokens * width / 4


def test_bad_arguments_of_augmentation_are_named(task):
    x, neighbors = task
    key = jax.random.key(0)
    rows = np.arange(2, dtype=np.int32)
    with pytest.raises(
        ValueError, match=r"representations must be \[n, tokens, d\], got shape \(4, 7\)"
    ):
        retrieve_neighbors(x[..., 0])
    with pytest.raises(
        ValueError, match=r"representations must be \[n, tokens, d\], got shape \(4, 7\)"
    ):
        patch_augment(key, x[..., 0], neighbors, 2)
    with pytest.raises(ValueError, match=r"of shape \(0, 7, 2\) have no image"):
        retrieve_neighbors(x[:0])
    with pytest.raises(
        ValueError, match=r"n_patches=7 is more than the 6 patch positions of 7 tokens .* at most 6"
    ):
        patch_augment(key, x, neighbors, 7)
    with pytest.raises(ValueError, match="n_patches must be an integer of at least 0, got -1"):
        patch_augment(key, x, neighbors, -1)
    with pytest.raises(ValueError, match=r"n_patches must be an integer of at least 0, got 1\.5"):
        patch_augment(key, x, neighbors, 1.5)
    with pytest.raises(ValueError, match=r"prefix_tokens must be in \[0, 7\] for 7 tokens, got 8"):
        patch_augment(key, x, neighbors, 0, prefix_tokens=8)
    with pytest.raises(
        ValueError, match=r"neighbors has shape \(4, 7\), .* \(7, 4\). Use retrieve_neighbors"
    ):
        patch_augment(key, x, neighbors.T, 2)
    with pytest.raises(TypeError, match="neighbors must be integers, got float32"):
        patch_augment(key, x, neighbors.astype(np.float32), 2)
    with pytest.raises(TypeError, match="key must be a typed key"):
        patch_augment(jax.random.PRNGKey(0), x, neighbors, 2)
    with pytest.raises(
        ValueError, match=r"rows and copies must both be \[B\], got shapes \(2,\) and \(1,\)"
    ):
        augmented_batch(key, x, neighbors, rows, rows[:1], n_patches=2)


@pytest.mark.slow
def test_a_second_call_compiles_nothing(task, nothing_compiles):
    x, neighbors = task
    images = some_images()["digits"]
    rows = np.arange(N, dtype=np.int32)

    def call(seed: int) -> None:
        hilbert_augment(images * np.float32(1 / seed))
        retrieve_neighbors(x * np.float32(seed))
        augmented_batch(jax.random.key(seed), x, neighbors, rows, rows + seed, n_patches=2)
        patch_augment(jax.random.key(seed), x, neighbors, 2)

    call(1)
    with nothing_compiles():
        call(2)
