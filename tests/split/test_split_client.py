"""What a client does: noise on parameters, representations, copies of them with noise.

Statistical tests use fixed keys, so they are deterministic. Over the choice of key a correct
implementation fails one with probability below 1e-5, and noise that is scaled by 0.7 or 1.3 is
rejected as surely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxdp.split.augment import retrieve_neighbors
from jaxdp.split.client import perturb_params, represent
from jaxdp.split.copies import augment_then_noise, noise_then_augment
from jaxdp.transforms import noise

SEED = bytes(range(16))
KEY = noise.stream(SEED, "test")
ALPHA = 0.05

# --- Noise on parameters -------------------------------------------------------------------------

SIZE = 4000
MAGNITUDES = np.array([-30.0, -1.0, -0.02, 0.0, 0.02, 1.0, 30.0])
# In the smallest both noises are as large as each other, and in the other leaf the root mean square
# is another one.
PARAMS = {
    "kernel": np.repeat(MAGNITUDES[:, None], SIZE, axis=1).astype(np.float32),
    "bias": np.full(SIZE, 0.5, np.float32),
}


def expected_std(mode, leaf):
    theta = leaf.astype(np.float64)
    std = {
        "rel": ALPHA * abs(theta),
        "abs": ALPHA * np.ones_like(theta),
        "var": np.sqrt(ALPHA * abs(theta)),
        "rms": ALPHA * np.sqrt(np.mean(theta**2)) * np.ones_like(theta),
    }[mode]
    return std * np.sqrt(theta**2 + 1)  # of std n theta + std m, n and m independent


def is_standard_normal(z):
    return scipy.stats.kstest(z, "norm").pvalue > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rel", "abs", "var", "rms"])
def test_parameters_get_both_noises_of_eq_12(mode):
    noisy = perturb_params(KEY, PARAMS, alpha=ALPHA, mode=mode)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), noisy) == jax.tree.map(
        lambda x: (x.shape, x.dtype), PARAMS
    )
    for name, leaf in PARAMS.items():
        differences = np.asarray(noisy[name], np.float64) - leaf
        for difference, std in zip(
            np.atleast_2d(differences), np.atleast_2d(expected_std(mode, leaf)), strict=True
        ):
            if std[0] == 0:
                assert not difference.any()
                continue
            z = difference / std
            assert is_standard_normal(z)
            assert not is_standard_normal(0.7 * z) and not is_standard_normal(1.3 * z)


@pytest.mark.slow
def test_every_parameter_has_noise_of_its_own_and_every_key_another():
    noisy = perturb_params(KEY, PARAMS, alpha=ALPHA)
    again, other = (
        perturb_params(KEY, PARAMS, alpha=ALPHA),
        perturb_params(jax.random.key(1), PARAMS, alpha=ALPHA),
    )
    assert all(np.array_equal(noisy[name], again[name]) for name in PARAMS)
    rows = [np.asarray(tree[name]) - PARAMS[name] for tree in (noisy, other) for name in PARAMS]
    rows = np.concatenate([np.atleast_2d(row) for row in rows])
    rows = rows[rows.any(1)]
    assert len(rows) == 14
    correlation = np.corrcoef(rows) - np.eye(14)
    assert abs(correlation).max() < 6 / np.sqrt(SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rel", "abs", "var", "rms"])
def test_no_noise_changes_nothing(mode):
    same = perturb_params(KEY, PARAMS, alpha=0.0, mode=mode)
    assert all(np.array_equal(same[name], PARAMS[name]) for name in PARAMS)


def test_impossible_parameter_noise_is_refused():
    for alpha in (-0.01, np.inf, np.nan):
        with pytest.raises(ValueError, match=f"alpha must be finite and at least 0, got {alpha}"):
            perturb_params(KEY, PARAMS, alpha=alpha)
    with pytest.raises(ValueError, match="mode must be 'rel', 'abs', 'var' or 'rms', got 'std'"):
        perturb_params(KEY, PARAMS, mode="std")
    with pytest.raises(TypeError, match="key must be a typed key"):
        perturb_params(jnp.zeros(2, jnp.uint32), PARAMS)


# --- Representations ----------------------------------------------------------------------------


@pytest.mark.slow
def test_representations_do_not_depend_on_the_batch(vit):
    vit = vit.cut_after(1)
    frontend = vit.quantized(8)
    params = perturb_params(KEY, frontend.params)
    # one row of padding
    found = np.asarray(represent(vit.backbone, frontend, params, vit.images[:5], batch_size=3))
    assert found.shape == (5, 17, 8) and found.dtype == np.float32
    steps = abs(found - vit.represent_quantized(frontend, params, vit.images[:5])) / float(
        frontend.scales.output
    )
    # float32 may round a code to its neighbour.
    assert steps.max() < 1.01 and np.mean(steps > 0.01) < 0.01
    # In the same program, an image does not depend on what stands beside it, another image or
    # padding.
    assert np.array_equal(
        found[3:], represent(vit.backbone, frontend, params, vit.images[2:5], batch_size=3)[1:]
    )
    assert np.array_equal(
        found[:3], represent(vit.backbone, frontend, params, vit.images[:3], batch_size=100)
    )


def test_impossible_images_are_refused(vit):
    good = vit.images
    for bad, message in [
        (good[..., 0], r"images must be \[n, 8, 8, 1\] with n >= 1, got \[9, 8, 8\]"),
        (good[:, :6], r"images must be \[n, 8, 8, 1\] with n >= 1, got \[9, 6, 8, 1\]"),
        (good[:0], r"images must be \[n, 8, 8, 1\] with n >= 1, got \[0, 8, 8, 1\]"),
        (
            (good * 16).astype(np.uint8),
            "images must be floating point in .* got uint8. Divide by the largest",
        ),
        (good - 0.01, r"images must be in \[0, 1\]. Some are outside"),
        (good * 1.01, r"images must be in \[0, 1\]. Some are outside"),
        (good * np.nan, r"images must be in \[0, 1\]. Some are outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            vit.backbone.check_images(bad)
    vit.backbone.check_images(good)
    with pytest.raises(ValueError, match=r"images must be in \[0, 1\]. Some are outside"):
        represent(vit.backbone, vit.quantized(8), vit.front, good * 2)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        represent(vit.backbone, vit.quantized(8), vit.front, good, batch_size=0)


# --- Copies -------------------------------------------------------------------------------------

N, TOKENS, WIDTH, COPIES = 5, 9, 40, 7
B = 0.8
X = jnp.asarray(np.random.default_rng(1).normal(size=(N, TOKENS, WIDTH)), jnp.float32)
OPTIONS = {"copies": COPIES, "n_patches": 3, "prefix_tokens": 2}


@jax.jit
def batch(made, images, numbers):
    return made.batch(images, numbers)


def all_copies(made):
    """Returns every copy [n, 1 + copies, T, D]."""
    return np.asarray(batch(made, *made.index())).reshape(N, 1 + COPIES, TOKENS, WIDTH)


def is_laplace(x):
    """Checks noise of scale B: |x| / B is exponential, with mean and standard deviation 1."""
    x = np.ravel(x).astype(np.float64) / B
    assert x.size >= 1800
    return scipy.stats.kstest(x, "laplace").pvalue > 1e-6 and abs(abs(x).mean() - 1) < 5 / np.sqrt(
        x.size
    )


def test_copies_are_indexed_by_image_and_number():
    images, numbers = augment_then_noise(KEY, X, laplace_scale=B, **OPTIONS).index()
    assert images.dtype == numbers.dtype == jnp.int32
    assert list(zip(images.tolist(), numbers.tolist(), strict=True)) == [
        (i, c) for i in range(N) for c in range(1 + COPIES)
    ]


@pytest.mark.slow
def test_patches_come_from_exact_representations_and_noise_afterwards():
    """Checks Eq. 13 on exact representations, then noise on the original and on every copy."""
    made = augment_then_noise(KEY, X, laplace_scale=B, **OPTIONS)
    assert np.array_equal(made.neighbors, retrieve_neighbors(X))
    clean = all_copies(augment_then_noise(KEY, X, laplace_scale=0.0, **OPTIONS))
    assert np.array_equal(clean[:, 0], X)
    replaced = (clean != np.asarray(X)[:, None]).any(-1)
    assert np.all(replaced[:, 1:].sum(-1) == 3) and not replaced[:, :, :2].any()
    neighbours = np.asarray(X)[np.asarray(made.neighbors).T, np.arange(TOKENS)[None]]
    expected = np.where(replaced[..., None], neighbours[:, None], np.asarray(X)[:, None])
    assert np.array_equal(clean, expected)
    assert len({row.tobytes() for row in replaced[:, 1:].reshape(-1, TOKENS)}) > 5  # drawn anew

    fresh = all_copies(made) - clean
    for x in (fresh[:, 0], fresh[:, 1:]):  # the original has it too
        assert is_laplace(x) and not is_laplace(0.7 * x) and not is_laplace(1.3 * x)
    # Its own for every copy and every image.
    rows = fresh.reshape(N * (1 + COPIES), -1)
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert abs(correlation).max() < 6 / np.sqrt(rows.shape[1])


@pytest.mark.slow
def test_a_copy_is_the_same_whenever_it_is_asked_for():
    made = augment_then_noise(KEY, X, laplace_scale=B, **OPTIONS)
    whole = all_copies(made)
    rng = np.random.default_rng(0)
    images, numbers = (
        rng.integers(0, N, N * (1 + COPIES)),
        rng.integers(0, 1 + COPIES, N * (1 + COPIES)),
    )
    found = batch(made, images.astype(np.int32), numbers.astype(np.int32))
    assert np.array_equal(found, whole[images, numbers])
    other = augment_then_noise(noise.stream(SEED, "other"), X, laplace_scale=B, **OPTIONS)
    assert np.all(all_copies(other) != whole)


@pytest.mark.slow
def test_noise_comes_once_when_it_comes_first():
    made = noise_then_augment(KEY, X, laplace_scale=B, **OPTIONS)
    copies = all_copies(made)
    noisy = copies[:, 0]
    difference = noisy - np.asarray(X)
    assert (
        is_laplace(difference)
        and not is_laplace(0.7 * difference)
        and not is_laplace(1.3 * difference)
    )
    assert abs(np.corrcoef(difference.reshape(N, -1)) - np.eye(N)).max() < 6 / np.sqrt(
        TOKENS * WIDTH
    )
    # Nothing else is in the object that is sent.
    assert np.array_equal(made.representations, noisy)
    assert np.array_equal(made.neighbors, retrieve_neighbors(made.representations))
    untouched = (copies == noisy[:, None]).all(-1)
    assert np.all(untouched[:, 1:].sum(-1) == TOKENS - 3)
    # Every token of every copy is one of the noisy tokens at its position: no exact value, no other
    # noise.
    assert (copies[:, :, None] == noisy[None, None]).all(-1).any(2).all()


@pytest.mark.slow
@pytest.mark.parametrize("make", [augment_then_noise, noise_then_augment])
def test_impossible_copies_are_refused(make):
    for scale in (-0.1, np.inf, np.nan):
        with pytest.raises(
            ValueError, match=f"laplace_scale must be finite and at least 0, got {scale}"
        ):
            make(KEY, X, laplace_scale=scale, **OPTIONS)
    with pytest.raises(ValueError, match="copies must be at least 0, got -1"):
        make(KEY, X, laplace_scale=B, **{**OPTIONS, "copies": -1})
    with pytest.raises(ValueError, match="n_patches=8 is more than the 7 patch positions"):
        make(KEY, X, laplace_scale=B, **{**OPTIONS, "n_patches": 8})
    with pytest.raises(
        ValueError, match="n_patches=3 needs a neighbour, but there is only one image"
    ):
        make(KEY, X[:1], laplace_scale=B, **OPTIONS)
    assert make(KEY, X[:1], laplace_scale=B, copies=2, n_patches=0, prefix_tokens=0).index()[
        1
    ].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="key must be a typed key"):
        make(jnp.zeros(2, jnp.uint32), X, laplace_scale=B, **OPTIONS)
