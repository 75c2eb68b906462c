"""The private mode: directions, clipping, noise, labels, what it costs, and who pays.

Statistical tests use fixed seeds, so they are deterministic. Over the choice of seed a correct
implementation fails one with probability below 1e-6, and noise or an epsilon that is 0.7 or 1.3
times right is rejected as surely."""

import decimal
import fractions
import math
import os
import shutil
import signal

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from jaxdp import privacy
from jaxdp.privacy import GaussianDpEvent, Ledger, PureDpEvent
from jaxdp.privacy.events import composition
from jaxdp.split import noisy_upload
from jaxdp.split.noisy_upload import (
    PrivateRelease,
    clip_representation,
    label_noise_matrix,
    lift,
    project,
    public_projection,
    published_event,
    randomized_response,
    release_privately,
)
from jaxdp.transforms import noise
from tests import forked

SEED = bytes(range(16))
KEY = noise.stream(SEED, "test")
TOKENS, WIDTH, K = 3, 4, 5


def public(count, seed=0):
    """Representations that vary differently in different directions."""
    rng = np.random.default_rng(seed)
    mixing = (
        rng.normal(size=(TOKENS * WIDTH, TOKENS * WIDTH))
        * 0.6 ** np.arange(TOKENS * WIDTH)[:, None]
    )
    x = rng.normal(size=(count, TOKENS * WIDTH)) @ mixing + rng.normal(size=TOKENS * WIDTH)
    return x.reshape(count, TOKENS, WIDTH).astype(np.float32)


@pytest.fixture(scope="module")
def projection():
    return public_projection(public(40), K)


# --- Public directions --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, 12, 40])  # fewer images than numbers, as many, more
def test_directions_are_the_principal_components(count):
    x = public(count)
    fitted = public_projection(jnp.asarray(x), K)
    mean, directions = (
        np.asarray(fitted.mean, np.float64),
        np.asarray(fitted.directions, np.float64),
    )
    assert fitted.mean.dtype == fitted.directions.dtype == jnp.float32
    flat = x.reshape(count, -1).astype(np.float64)
    np.testing.assert_allclose(mean, x.mean(0, dtype=np.float64), atol=1e-6)
    np.testing.assert_allclose(directions.T @ directions, np.eye(K), atol=1e-6)
    _, _, right = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    # in this order; the sign is free
    for mine, theirs in zip(directions.T, right[:K], strict=True):
        assert abs(mine @ theirs) == pytest.approx(1, abs=1e-6)


def test_coordinates_and_back_are_the_best_approximation_of_rank_k(projection):
    x = public(40)
    flat = x.reshape(40, -1).astype(np.float64)
    mean = flat.mean(0)
    left, sizes, right = np.linalg.svd(flat - mean, full_matrices=False)
    coordinates = np.asarray(project(projection, x))
    assert coordinates.shape == (40, K) and coordinates.dtype == np.float32
    np.testing.assert_allclose(
        np.abs(coordinates), np.abs(left[:, :K] * sizes[:K]), rtol=1e-3, atol=1e-4
    )
    lifted = np.asarray(lift(projection, coordinates))
    assert lifted.shape == x.shape and lifted.dtype == np.float32
    best = mean + left[:, :K] * sizes[:K] @ right[:K]
    np.testing.assert_allclose(lifted.reshape(40, -1), best, atol=1e-5)
    assert np.linalg.norm(flat - best) > 1  # rank K is not everything
    np.testing.assert_allclose(project(projection, lifted), coordinates, atol=1e-5)


def test_impossible_directions_are_refused():
    x = public(6)
    for k in (0, 6):
        with pytest.raises(
            ValueError, match=rf"k={k} must be in \[1, 5\]: 6 centred representations of 12 numbers"
        ):
            public_projection(x, k)
    with pytest.raises(ValueError, match=r"k=13 must be in \[1, 12\]"):
        public_projection(public(40), 13)
    with pytest.raises(ValueError, match="k=3: public representations vary in fewer directions"):
        public_projection(np.repeat(x[:3], 5, axis=0), 3)
    assert public_projection(np.repeat(x[:3], 5, axis=0), 2).directions.shape == (12, 2)
    with pytest.raises(
        ValueError, match=r"representations must be \[N, T, D\], got shape \(6, 12\)"
    ):
        public_projection(x.reshape(6, -1), 2)
    x[2, 0, 0] = math.nan
    with pytest.raises(ValueError, match="representations must be finite"):
        public_projection(x, 2)


# --- Bounded rows -------------------------------------------------------------------------------


def norms(x, order):
    return np.linalg.norm(np.asarray(x, np.longdouble), ord=order, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
def test_long_rows_are_scaled_and_short_ones_kept(order):
    x = (
        np.random.default_rng(0).normal(size=(60, 7)).astype(np.float32)
        * np.logspace(-3, 3, 60, dtype="f4")[:, None]
    )
    lengths = norms(x, order)
    expected = x.astype(np.float64) * np.minimum(1, 2.5 / lengths)[:, None].astype(np.float64)
    clipped = clip_representation(x, 2.5, order=order)
    assert clipped.dtype == jnp.float32
    np.testing.assert_allclose(clipped, expected, rtol=5e-6)
    np.testing.assert_array_equal(clipped[lengths < 2.49], x[lengths < 2.49])
    assert norms(clipped, order).max() > 2.5 * (1 - 5e-6)


# Whole exponents and mantissas: also infinite, NaN, subnormal.
anything = hypothesis.extra.numpy.arrays(np.uint32, (8, 6), elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)
near = hypothesis.extra.numpy.arrays(np.float32, (8, 6), elements=st.floats(-2, 2, width=32))


@pytest.mark.slow
@hypothesis.settings(max_examples=60)
@hypothesis.given(
    x=anything | near,
    order=st.sampled_from([1, 2]),
    clip_norm=st.sampled_from([1e-30, 1e-3, 1.0, 3.7, 1e30]),
)
def test_no_row_is_longer_than_the_clip_norm(x, order, clip_norm):
    clipped = np.asarray(clip_representation(x, clip_norm, order=order))
    assert (norms(clipped, order) <= np.longdouble(clip_norm)).all()
    assert (clipped[~np.isfinite(x).all(1)] == 0).all()
    finite = np.isfinite(x).all(1)
    short = finite & (norms(np.where(finite[:, None], x, 0), order) < 0.999 * clip_norm)
    np.testing.assert_allclose(clipped[short], x[short], atol=2e-38)  # subnormals may be flushed


@pytest.mark.parametrize("order", [1, 2])
def test_rows_whose_squares_leave_float32_are_scaled_too(order):
    x = np.random.default_rng(1).normal(size=(60, 7)).astype(np.float32)
    for size, clip_norm in ((1e30, 2.0), (1e30, 1e-3), (1e-20, 1e-25), (1e-22, 1e-30)):
        clipped = np.asarray(
            clip_representation(x * np.float32(size), clip_norm, order=order), np.float64
        )
        expected = x / norms(x, order)[:, None].astype(np.float64) * clip_norm
        np.testing.assert_allclose(clipped / clip_norm, expected / clip_norm, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_wide_rows_of_equal_entries_stay_below_the_clip_norm(order):
    x = np.full((1, 50_000), 0.1, np.float32)  # where sums in float32 drift most
    clipped = clip_representation(x, 1.0, order=order)
    assert 0.99 < norms(clipped, order)[0] <= 1


NARROW = [np.float32, np.float16, jnp.float16, jnp.bfloat16]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("scalar", NARROW)
def test_no_row_is_longer_than_a_clip_norm_of_few_digits(scalar, order):
    # In 16 bits the room below the clip norm would be rounded away.
    x = np.random.default_rng(2).normal(size=(2000, 7)).astype(np.float32)
    clipped = clip_representation(x, scalar(0.25), order=order)
    assert (norms(clipped, order) <= 0.25).all()


def test_one_bad_number_empties_its_row_only():
    x = np.ones((4, 3), np.float64)
    x[0, 1], x[1, 2], x[2, 0] = math.nan, -math.inf, 1e300  # the last is infinite in float32
    assert np.asarray(clip_representation(x, 10.0)).tolist() == [[0] * 3] * 3 + [[1] * 3]


def test_impossible_clipping_is_refused():
    x = np.ones((2, 3), np.float32)
    for bad in (0.0, -1.0, 1e-31, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"clip_norm must be in \[1e-30, 1e\+30\], got {bad}"):
            clip_representation(x, bad)
    with pytest.raises(ValueError, match="order must be 1 or 2, got 3"):
        clip_representation(x, 1.0, order=3)
    with pytest.raises(
        ValueError, match=r"x must be \[n, k\] with k in \[1, 1048576\], got shape \(3,\)"
    ):
        clip_representation(x[0], 1.0)
    with pytest.raises(ValueError, match=r"got shape \(0, 1048577\)"):
        clip_representation(np.zeros((0, 2**20 + 1), np.float32), 1.0)


# --- Noisy labels -------------------------------------------------------------------------------

DRAWS = 200_000


def ideal_matrix(num_classes, epsilon):
    others = np.full((num_classes, num_classes), 1 / (math.exp(epsilon) + num_classes - 1))
    return others + np.eye(num_classes) * (math.exp(epsilon) - 1) / (
        math.exp(epsilon) + num_classes - 1
    )


@pytest.mark.parametrize(("num_classes", "epsilon"), [(2, 0.8), (5, 1.5), (10, 4.0)])
def test_labels_are_kept_and_exchanged_as_often_as_stated(num_classes, epsilon):
    labels = np.arange(DRAWS) % num_classes
    observed = randomized_response(KEY, labels, num_classes=num_classes, epsilon=epsilon)
    assert observed.dtype == np.int32 and observed.shape == labels.shape
    counts = np.zeros((num_classes, num_classes))
    np.add.at(counts, (labels, observed), 1)

    def p_value(matrix):
        expected = matrix * counts.sum(1, keepdims=True)
        # Every row sums to its number of labels.
        return scipy.stats.chi2.sf(
            ((counts - expected) ** 2 / expected).sum(), num_classes * (num_classes - 1)
        )

    assert p_value(ideal_matrix(num_classes, epsilon)) > 1e-6
    for wrong in (0.7, 1.3):
        assert p_value(ideal_matrix(num_classes, wrong * epsilon)) < 1e-6
    np.testing.assert_allclose(
        label_noise_matrix(num_classes, epsilon), ideal_matrix(num_classes, epsilon), rtol=1e-6
    )


def test_labels_do_not_share_their_draws():
    observed = randomized_response(KEY, np.zeros(DRAWS, int), num_classes=2, epsilon=0.5)
    again = randomized_response(
        jax.random.fold_in(KEY, 1), np.zeros(DRAWS, int), num_classes=2, epsilon=0.5
    )
    for one, other in ((observed[1:], observed[:-1]), (observed, again)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(DRAWS)


@pytest.mark.parametrize("num_classes", [2, 3, 10, 1000, 2**16])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, math.log(3), 8.0, 40.0, 60.0, 1000.0])
def test_the_distribution_that_is_sampled_satisfies_epsilon_exactly(num_classes, epsilon):
    rare = noisy_upload.response_threshold(num_classes, epsilon)
    own = 2**64 - (num_classes - 1) * rare
    with decimal.localcontext(prec=500):
        factor = fractions.Fraction(decimal.Decimal(epsilon).exp())
    assert rare >= 1 and own <= factor * rare and rare <= factor * own
    ideal = 2**64 / (factor + num_classes - 1)
    assert rare <= ideal * (1 + fractions.Fraction(1, 2**49)) + 1  # and is hardly less accurate


def test_the_answer_uses_all_64_bits(monkeypatch):
    rare = noisy_upload.response_threshold(4, 2.0)
    ends = [0, rare - 1, rare, 2 * rare - 1, 2 * rare, 3 * rare - 1, 3 * rare, 2**64 - 1]
    words = jnp.asarray(
        [[end >> 32 for end in ends], [end & 0xFFFFFFFF for end in ends]], jnp.uint32
    )
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: words)
    observed = randomized_response(KEY, np.full(8, 2), num_classes=4, epsilon=2.0)
    assert observed.tolist() == [3, 3, 0, 0, 1, 1, 2, 2]


def test_without_a_finite_epsilon_labels_stay():
    labels = np.array([3, 0, 1], np.uint8)
    assert randomized_response(KEY, labels, num_classes=4, epsilon=math.inf).tolist() == [3, 0, 1]
    np.testing.assert_array_equal(label_noise_matrix(4, math.inf), np.eye(4))


def test_impossible_labels_are_refused_without_showing_them():
    for labels in ([0, 7], [-3, 1]):
        with pytest.raises(ValueError, match=r"labels must be in \[0, 4\)") as error:
            randomized_response(KEY, labels, num_classes=4, epsilon=1.0)
        assert not {"7", "-3"} & set(str(error.value).replace("[", " ").split())
    with pytest.raises(TypeError, match="labels must be integers, got dtype float64"):
        randomized_response(KEY, [0.0], num_classes=4, epsilon=1.0)
    with pytest.raises(TypeError, match="labels must be integers, got dtype bool"):
        randomized_response(KEY, [True], num_classes=4, epsilon=1.0)
    with pytest.raises(ValueError, match=r"labels must be \[n\].* got shape \[n, 1\]"):
        randomized_response(KEY, [[0]], num_classes=4, epsilon=1.0)
    with pytest.raises(TypeError, match="typed key"):
        randomized_response(jnp.zeros(2, jnp.uint32), [0], num_classes=4, epsilon=1.0)
    for classes in (1, 2.0, True, 2**16 + 1):
        with pytest.raises(ValueError, match="num_classes must be an integer in"):
            label_noise_matrix(classes, 1.0)
    for epsilon in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"the epsilon of labels must be > 0 \(math.inf for"):
            label_noise_matrix(3, epsilon)
    for epsilon, classes in ((1e-17, 3), (1e-12, 65531)):
        with pytest.raises(
            ValueError, match=rf"epsilon={epsilon} is too small for {classes} classes and 64 random"
        ):
            randomized_response(KEY, [0], num_classes=classes, epsilon=epsilon)


# --- What a release costs -----------------------------------------------------------------------


def config(**changes):
    return PrivateRelease(
        **{
            "clip_norm": 2.0,
            "noise_multiplier": 3.0,
            "label_epsilon": 0.5,
            "num_classes": 4,
            **changes,
        }
    )


def gaussian_delta(epsilon, shift, std):
    """Computes Theorem 8 of Balle and Wang 2018 (arXiv:1805.06530)."""
    a, b = shift / (2 * std), epsilon * std / shift
    return scipy.stats.norm.cdf(a - b) - math.exp(epsilon) * scipy.stats.norm.cdf(-a - b)


def exact_epsilon(clip_norm, std, label_epsilon, delta):
    """Composes Gaussian noise on rows that move by 2 C with the worst label mechanism, of loss +-
    label_epsilon."""
    likely = 1 / (1 + math.exp(-label_epsilon))

    def excess(epsilon):
        first, second = (
            gaussian_delta(epsilon + sign * label_epsilon, 2 * clip_norm, std) for sign in (-1, 1)
        )
        return likely * first + (1 - likely) * second - delta

    return scipy.optimize.brentq(excess, 0, 100)


@pytest.mark.parametrize(("multiplier", "label_epsilon"), [(3.0, 0.5), (1.2, 2.0)])
def test_gaussian_epsilon_is_exact(multiplier, label_epsilon):
    release = config(noise_multiplier=multiplier, label_epsilon=label_epsilon)
    stated = privacy.epsilon(release.event, delta=1e-5, adjacency="replace_one")
    exact = exact_epsilon(release.clip_norm, release.noise_scale, label_epsilon, 1e-5)
    assert exact <= stated <= exact + 2e-3
    features = scipy.optimize.brentq(
        lambda e: gaussian_delta(e, 2 * 2.0, release.noise_scale) - 1e-5, 0, 100
    )
    assert features < stated <= features + label_epsilon + 2e-3


@pytest.mark.parametrize("scalar", NARROW)
def test_noise_is_what_is_charged_for_numbers_of_few_digits(scalar):
    # In 16 bits the product of multiplier and clip norm would be rounded.
    for name, value in (("clip_norm", 3.1), ("noise_multiplier", 1.2345)):
        settings = {"clip_norm": 2.0, "noise_multiplier": 1.2345, name: scalar(value)}
        release = config(**settings)
        multiplier, clip_norm = settings["noise_multiplier"], settings["clip_norm"]
        assert release.noise_scale == float(multiplier) * float(clip_norm)
        gaussian, _ = release.event.events
        assert gaussian == GaussianDpEvent(release.noise_multiplier)
    laplace = noisy_upload.event(scalar(1.3), 1.0, mechanism="laplace")
    assert laplace.events[0] == PureDpEvent(2 / float(scalar(1.3)))


def test_laplace_epsilon_is_the_sum():
    release = config(mechanism="laplace")
    assert privacy.epsilon(release.event, delta=0, adjacency="replace_one") == pytest.approx(
        2 / 3 + 0.5, rel=1e-12
    )


def test_without_noise_there_is_no_epsilon():
    for changes in ({"noise_multiplier": 0.0}, {"label_epsilon": math.inf}):
        event = config(**changes).event
        assert privacy.epsilon(event, delta=1e-5, adjacency="replace_one") == math.inf
        # the other part is recorded
        assert {type(part) for part in event.events} & {
            GaussianDpEvent,
            PureDpEvent,
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "epsilon", "delta", "share"),
    [
        ("gaussian", 8.0, 1e-5, 0.5),
        ("gaussian", 1.0, 1e-6, 0.2),
        ("laplace", 2.0, 0.0, 0.25),
        ("laplace", 2.0, 1e-5, 0.5),
    ],
)
def test_calibrated_noise_meets_the_target_and_hardly_more(mechanism, epsilon, delta, share):
    release = PrivateRelease.calibrated(
        epsilon=epsilon,
        delta=delta,
        clip_norm=2.0,
        num_classes=4,
        label_share=share,
        mechanism=mechanism,
    )
    assert release.label_epsilon == share * epsilon and release.mechanism == mechanism
    assert (
        0.999 * epsilon
        < privacy.epsilon(release.event, delta=delta, adjacency="replace_one")
        <= epsilon
    )
    if mechanism == "gaussian":
        exact = exact_epsilon(2.0, release.noise_scale, release.label_epsilon, delta)
        assert 0.998 * epsilon < exact <= epsilon
    elif delta == 0:
        assert release.noise_multiplier == pytest.approx(2 / ((1 - share) * epsilon), rel=1e-3)


def test_no_noise_is_calibrated_to_an_infinite_epsilon():
    release = PrivateRelease.calibrated(epsilon=math.inf, delta=1e-5, clip_norm=2.0, num_classes=4)
    assert release.noise_scale == 0 and release.label_epsilon == math.inf


def test_impossible_settings_are_refused():
    for multiplier in (-1.0, math.nan, math.inf, 1e-39, 1e31):
        with pytest.raises(
            ValueError,
            match=r"noise_multiplier=.* times clip_norm=2.0 must be 0 or in the normal range",
        ):
            config(noise_multiplier=multiplier)
    with pytest.raises(
        ValueError, match=r"noise_multiplier=1e-10 times clip_norm=1e-30 must be 0 or in"
    ):
        config(noise_multiplier=1e-10, clip_norm=1e-30)
    with pytest.raises(ValueError, match=r"clip_norm must be in .* got 0.0"):
        config(clip_norm=0.0)
    with pytest.raises(ValueError, match="mechanism must be 'gaussian' or 'laplace', got 'cauchy'"):
        config(mechanism="cauchy")
    with pytest.raises(ValueError, match="num_classes must be an integer"):
        config(num_classes=1)
    with pytest.raises(ValueError, match="the epsilon of labels must be > 0"):
        config(label_epsilon=0.0)
    target = {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 2.0, "num_classes": 4}
    for changes, match in [
        ({"delta": 0.0}, "delta=0 needs mechanism='laplace'"),
        ({"delta": 1.0}, "delta must be in"),
        ({"epsilon": 0.0}, "epsilon must be finite and > 0"),
        ({"label_share": 1.0}, r"label_share must be in \(0, 1\), got 1.0"),
        ({"mechanism": "none"}, "mechanism must be"),
    ]:
        with pytest.raises(ValueError, match=match):
            PrivateRelease.calibrated(**{**target, **changes})


# --- The release --------------------------------------------------------------------------------


def images(count, projection, seed=3):
    """Returns representations, most of them longer than the clip norm, and labels."""
    rng = np.random.default_rng(seed)
    coordinates = rng.normal(size=(count, K)).astype(np.float32) * 4
    return np.array(lift(projection, coordinates)), rng.integers(0, 4, count)


def reference(x, projection, clip_norm, order):
    """Computes clipped coordinates in float64."""
    centred = (np.asarray(x, np.float64) - np.asarray(projection.mean, np.float64)).reshape(
        len(x), -1
    )
    z = centred @ np.asarray(projection.directions, np.float64)
    return z * np.minimum(1, clip_norm / np.linalg.norm(z, ord=order, axis=1))[:, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "order", "law"),
    [("gaussian", 2, scipy.stats.norm), ("laplace", 1, scipy.stats.laplace)],
)
def test_released_features_are_clipped_coordinates_plus_noise_of_the_stated_law(
    projection, mechanism, order, law
):
    release = config(mechanism=mechanism, noise_multiplier=0.3)
    x, y = images(6000, projection)
    released = release.release(KEY, x, labels=y, projection=projection)
    assert released.features.shape == (6000, K) and released.features.dtype == jnp.float32
    added = np.asarray(released.features, np.float64) - reference(x, projection, 2.0, order)

    def p_value(scale):
        return scipy.stats.kstest(added.ravel(), law(scale=scale).cdf).pvalue

    assert p_value(0.6) > 1e-6
    assert p_value(0.7 * 0.6) < 1e-6 and p_value(1.3 * 0.6) < 1e-6
    between = np.corrcoef(added.T) - np.eye(K)  # columns, rows and labels have noise of their own
    assert np.abs(between).max() < 5 / math.sqrt(6000)
    assert abs(np.corrcoef(added[1:].ravel(), added[:-1].ravel())[0, 1]) < 5 / math.sqrt(
        added[1:].size
    )
    kept = released.labels == y
    assert all(abs(np.corrcoef(column, kept)[0, 1]) < 5 / math.sqrt(6000) for column in added.T)
    assert kept.mean() == pytest.approx(
        math.exp(0.5) / (math.exp(0.5) + 3), abs=5 * math.sqrt(0.25 / 6000)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "order"), [("gaussian", 2), ("laplace", 1)])
def test_replacing_an_image_moves_its_row_alone_by_twice_the_clip_norm_at_most(
    projection, mechanism, order
):
    release = config(mechanism=mechanism)
    x, y = images(20, projection)
    directions = np.asarray(projection.directions)[:, 0].reshape(TOKENS, WIDTH)
    x[7] = np.asarray(projection.mean) + 100 * directions
    first = release.release(KEY, x, labels=y, projection=projection)
    others = []
    for replacement in (
        np.asarray(projection.mean) - 100 * directions,
        x[3],
        np.full_like(x[7], np.nan),
    ):
        other = x.copy()
        other[7] = replacement
        second = release.release(
            KEY, other, labels=np.where(np.arange(20) == 7, 0, y), projection=projection
        )
        difference = np.asarray(second.features, np.float64) - np.asarray(
            first.features, np.float64
        )
        others.append(np.linalg.norm(difference[7], ord=order))
        assert (np.delete(difference, 7, axis=0) == 0).all()
        assert (np.delete(second.labels, 7) == np.delete(first.labels, 7)).all()
    assert others[0] == pytest.approx(4.0, rel=1e-4) and others[1] < 4.0  # opposite rows, 2 C apart
    assert others[2] == pytest.approx(2.0, rel=1e-4)  # NaN counts as zero


def registered(**changes):
    ledger = Ledger.in_memory()
    ledger.register(
        "scans",
        **{"adjacency": "replace_one", "unit": "image", "epsilon": 4.0, "delta": 1e-5, **changes},
    )
    return ledger


def call(ledger, fitted, **changes):
    x, y = images(20, fitted)
    arguments = {
        "release": config(),
        "representations": x,
        "labels": y,
        "projection": fitted,
        **changes,
    }
    return release_privately(ledger.account("scans"), **arguments)


def charges(ledger):
    """Counts the releases that the ledger was charged for."""
    found = ledger.events("scans")
    return max(composition(found[None]).values()) if found else 0


@pytest.mark.slow
def test_the_order_of_the_images_is_not_released(projection):
    x, y = images(20, projection)
    order = np.argsort(y, kind="stable")
    # so that rows can be told apart
    open_release = config(noise_multiplier=1e-6, label_epsilon=50.0)
    places = []
    for k in range(30):
        with registered(epsilon=None) as ledger:
            seed = bytes([k]) * 16
            released = call(
                ledger,
                projection,
                representations=x[order],
                labels=y[order],
                release=open_release,
                seed=seed,
            )
        plain = clip_representation(project(projection, x[order]), open_release.clip_norm)
        nearest = (
            np.abs(np.asarray(released.features)[:, None] - np.asarray(plain)[None])
            .sum(-1)
            .argmin(1)
        )
        np.testing.assert_array_equal(np.sort(nearest), np.arange(20))
        # features and labels stay together
        np.testing.assert_array_equal(released.labels, y[order][nearest])
        places.append(np.flatnonzero(nearest == 0)[0])
    assert len(set(places)) > 8  # of 20 places in 30 draws, about 15.7


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "order"), [("gaussian", 2), ("laplace", 1)])
def test_no_released_row_is_longer_than_the_clip_norm_before_noise(projection, mechanism, order):
    """Checks the whole program, where the compiler might compute a row twice and large numbers
    cancel."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, TOKENS, WIDTH)) * 10.0 ** rng.uniform(-3, 6, (500, 1, 1)) + 1e4
    release = config(mechanism=mechanism, noise_multiplier=0.0)
    released = release.release(
        KEY, x.astype(np.float32), labels=np.zeros(500, int), projection=projection
    )
    norms = np.linalg.norm(np.asarray(released.features, np.float64), ord=order, axis=1)
    assert (norms <= release.clip_norm).all() and (norms > 0.999 * release.clip_norm).mean() > 0.9


# --- After a crash ------------------------------------------------------------------------------


def assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


KILLED = """
import os, pathlib, signal, sys
import numpy as np
from jaxdp.privacy import Ledger
from jaxdp.release import Release
from jaxdp.split import noisy_upload
from jaxdp.split.noisy_upload import PrivateRelease, Projection, release_privately

folder, file = pathlib.Path(sys.argv[1]), sys.argv[2]

def dying(**fields):
    def compute(secret):
        np.savez(folder / file, **fields["compute"](secret))
        os.kill(os.getpid(), signal.SIGKILL)
    return Release(**{**fields, "compute": compute})

if file == "lost.npz":
    noisy_upload.Release = dying
rng = np.random.default_rng(0)
# All images are equal, so that their order is nothing.
x = np.broadcast_to(rng.normal(size=(1, 8, 32)), (64, 8, 32)).astype(np.float32)
directions = rng.normal(size=(256, 5)).astype(np.float32) / 16
projection = Projection(np.zeros((8, 32), np.float32), directions)
release = PrivateRelease(clip_norm=2.0, noise_multiplier=3.0, label_epsilon=0.5, num_classes=4)
with Ledger(folder / "ledger.sqlite") as ledger:
    ledger.register("scans", adjacency="replace_one", unit="image")
    released = release_privately(
        ledger.account("scans"), release=release, representations=x, labels=np.zeros(64, int),
        projection=projection, workdir=folder / "run", seed=bytes(range(16)),
    )
    np.savez(folder / file, **released._asdict())
"""


@pytest.mark.slow
def test_a_process_that_is_killed_is_repeated_under_the_same_flags_only(tmp_path):
    """Checks that other flags, which move the last bits of a result, get other noise."""
    flags = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=true".strip()
    }
    same, other = tmp_path / "same", tmp_path / "other"
    same.mkdir()
    killed = forked.run(KILLED, same, "lost.npz", modules=forked.PARTIES)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (same / "run" / "secret_seed").exists()
    shutil.copytree(same, other)
    found = []
    for folder, environment, paid in ((same, {}, 1), (other, flags, 2)):
        again = forked.run(KILLED, folder, "released.npz", modules=forked.PARTIES, env=environment)
        assert again.returncode == 0, again.stderr
        assert not (folder / "run" / "secret_seed").exists()
        with np.load(folder / "lost.npz") as lost, np.load(folder / "released.npz") as released:
            found.append([(lost[name], released[name]) for name in ("features", "labels")])
        with Ledger(folder / "ledger.sqlite") as ledger:
            assert charges(ledger) == paid
    assert_same(*zip(*found[0], strict=True))
    features, labels = found[1]
    one, two = (x.astype(np.float64) - x.mean() for x in features)
    assert (np.abs(one - two) > 1e-3).mean() > 0.95
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 / math.sqrt(one.size)
    assert (labels[0] != labels[1]).any()


def test_a_bare_release_needs_a_typed_key(projection):
    x, y = images(20, projection)
    with pytest.raises(TypeError, match="typed key"):
        config().release(jnp.zeros(2, jnp.uint32), x, labels=y, projection=projection)
    with pytest.raises(ValueError, match=r"labels must be in"):
        config().release(KEY, x, labels=y + 4, projection=projection)


# --- The published mode -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_published_mode_has_no_epsilon():
    with registered(allow_unproven=True) as ledger, ledger.spend("scans", published_event(0.8)):
        assert ledger.epsilon("scans") == math.inf and ledger.proven_epsilon("scans") == 0
    reason = published_event(0.8).reason
    assert "Laplace(0.8) noise is metric-DP at 1.25 per unit of L1 distance" in reason
    assert "augmented copies and labels have no guarantee" in reason
    assert (
        "representations have no noise; augmented copies and labels" in published_event(0.0).reason
    )
    for scale in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="laplace_scale must be finite and at least 0"):
            published_event(scale)
