"""Noise: right law, right scale, independent streams, and `privatize` as a private optimizer.

Statistical tests use fixed keys, so they are deterministic. Over the choice of key, a correct
implementation fails a test with probability below 1e-5. A scale that is off by 0.7 or 1.3 is
rejected with a p-value below 1e-12."""

import functools
import hashlib
import hmac
import math
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import dp_event
from jax.experimental.pallas import tpu as pltpu
from scipy import stats

import jaxdp
from jaxdp.transforms import chacha, forms, noise, shards
from jaxdp.transforms.kernels import normals as kernel
from jaxdp.transforms.normals import pair
from tests.transforms.mechanisms import LAWS

SEED = bytes(range(16))
KEY = noise.stream(SEED, "test")
SAMPLES = 40_000
ZEROS = np.zeros(SAMPLES, np.float32)
ACCEPT, REJECT = 1e-6, 1e-12


class Clipped:
    """Stands in for `jaxdp.clipped_grad(...)`."""

    def __init__(self, clip_norm):
        self.clip_norm = clip_norm

    def sensitivity(self, adjacency):
        return self.clip_norm * (2.0 if adjacency == "replace_one" else 1.0)


def p_value(values, law, scale):
    """Computes the Kolmogorov-Smirnov p-value of `values` against the scaled law in float64."""
    return stats.kstest(np.asarray(values, np.float64).ravel(), law(scale=scale).cdf).pvalue


@functools.cache
def many(draw, scale, keys=25):
    """Draws a million values under 25 keys, by the program that draws SAMPLES."""
    like = jax.ShapeDtypeStruct((SAMPLES,), jnp.float32)
    return np.concatenate([draw(jax.random.fold_in(KEY, t), like, scale) for t in range(keys)])


def correlation(a, b):
    return abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])


# --- seeds and keys ------------------------------------------------------------------------------


def test_new_seeds_are_128_bits_and_differ():
    seeds = {noise.new_seed() for _ in range(100)}
    assert len(seeds) == 100 and {len(seed) for seed in seeds} == {16}


def test_stream_is_hmac_sha256_of_the_purpose():
    digest = hmac.new(
        SEED, b"jaxdp stream v1\x00chacha12\x00gradient noise", hashlib.sha256
    ).digest()
    expected = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 32, 4)]
    key = noise.stream(SEED, "gradient noise")
    assert key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert jax.random.key_data(key).tolist() == expected


def test_streams_differ_in_every_word_per_purpose_seed_and_impl():
    words = [
        jax.random.key_data(noise.stream(seed, purpose, impl=impl)).tolist()
        for seed in (SEED, SEED[::-1])
        for purpose in ("noise", "sampling", "noise ")
        for impl in ("chacha12", "threefry2x32")
    ]
    flat = [word for key in words for word in key]
    assert sorted(map(len, words)) == [2] * 6 + [8] * 6
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (("0" * 16, "x"), TypeError, "new_seed"),
        ((b"short", "x"), ValueError, "at least 16 bytes, got 5"),
        ((SEED, ""), ValueError, "purpose is empty"),
        ((SEED, b"x"), TypeError, "purpose must be a string"),
    ],
)
def test_stream_refuses_weak_arguments(args, error, match):
    with pytest.raises(error, match=match):
        noise.stream(*args)


def test_stream_refuses_an_unknown_generator():
    with pytest.raises(ValueError, match="'chacha12', 'threefry2x32'"):
        noise.stream(SEED, "x", impl="mersenne")


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_other_generators_give_noise_of_their_own(impl):
    one, two = (
        noise.gaussian(jax.random.key(seed, impl=impl), ZEROS[:1000], 1.0) for seed in (0, 1)
    )
    assert p_value(one, stats.norm, 1.0) > ACCEPT and correlation(one, two) < 5 / math.sqrt(1000)


@pytest.mark.slow
def test_noise_of_many_values_under_vmap_is_that_of_each_key():
    """The conformance suite draws few values, whose words take another path.

    Fails for "rbg" keys, whose bits under `vmap` are those of the first key.
    """
    keys = jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(lambda key: noise.gaussian(key, ZEROS, 1.0)))(keys)
    alone = np.stack([noise.gaussian(key, ZEROS, 1.0) for key in keys])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)


# --- the three mechanisms ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_tails_follow_the_law_far_out(name):
    """Tests tail cells of equal probability out to 1e-4 by chi-square, which detects a coarse
    sampler."""
    draw, law = LAWS[name]
    values = np.abs(many(draw, 1.0).astype(np.float64))
    edges = law.isf(np.array([1e-3, 3e-4, 1e-4]) / 2)
    observed = np.histogram(values, [0, *edges, np.inf])[0]
    expected = np.array([1 - 1e-3, 7e-4, 2e-4, 1e-4]) * values.size
    assert stats.chisquare(observed, expected).pvalue > ACCEPT


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_scale_may_be_traced_and_zero_means_none(name):
    draw, scale = LAWS[name][0], jnp.asarray(2.5, jnp.bfloat16)
    compiled = jax.jit(lambda scale: draw(KEY, ZEROS, scale)).lower(scale).compile()
    np.testing.assert_allclose(compiled(scale), draw(KEY, ZEROS, 2.5), rtol=1e-5, atol=1e-5)
    assert (np.asarray(draw(KEY, ZEROS, 0.0)) == 0).all()
    # The noise of a constant key is computed when a program runs. XLA folds constants, which took
    # 7 s for the noise of a ViT.
    assert " xor(" in compiled.as_text()


def test_wrong_leaves_are_refused():
    with pytest.raises(TypeError, match="complex"):
        noise.gaussian(KEY, jnp.zeros(3, jnp.complex64), 1.0)
    with pytest.raises(TypeError, match="bool"):
        noise.gaussian(KEY, jnp.zeros(3, bool), 1.0)
    with pytest.raises(ValueError, match="A leaf has 2147483648 values"):
        noise.gaussian(KEY, jax.ShapeDtypeStruct((2**31,), jnp.float32), 1.0)


# --- the same normals, in NumPy and float64 ------------------------------------------------------

NOISE, SPLIT = 3, 1  # word 15 of the cipher's input


def cipher_blocks(key, counters, numbers, purpose):
    """Computes blocks [16, n] of ChaCha12, one quarter round after the other as in RFC 8439."""
    start = np.empty((16, len(counters)), np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", "<u4")[:, None]
    start[4:12] = np.asarray(key)[:, None]
    start[12:] = np.stack(np.broadcast_arrays(counters, numbers, 0, purpose))
    x = start.copy()

    def add_xor_rotate(a, b, c, bits):
        x[a] += x[b]
        x[c] ^= x[a]
        x[c] = x[c] << np.uint32(bits) | x[c] >> np.uint32(32 - bits)

    for _ in range(6):
        columns = [(i, i + 4, i + 8, i + 12) for i in range(4)]
        diagonals = [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
        for a, b, c, d in columns + diagonals:
            add_xor_rotate(a, b, d, 16)
            add_xor_rotate(c, d, b, 12)
            add_xor_rotate(a, b, d, 8)
            add_xor_rotate(c, d, b, 7)
    return x + start


def normals(high, low, high_angle, low_angle, octant):
    """Computes pairs of normals [2, n] of words [n]."""
    uniform = lambda high, low: np.ldexp(high.astype(float), -32) + np.ldexp(low + 0.5, -64)  # noqa: E731
    small = uniform(np.where(high < 2**31, high, ~high), low)
    minus_log = -np.where(high < 2**31, np.log(small), np.log1p(-small))
    angle = uniform(high_angle, low_angle) * math.pi / 4
    x, y = np.cos(angle), np.sin(angle)
    x, y = np.where(octant & 1, (x, y), (y, x))
    signs = np.where([octant & 2, octant & 4], -1, 1)
    return np.sqrt(2 * minus_log) * signs * (x, y)


def vector(key, size, pairs=2, number=0):
    """Computes the normals of one dtype, block by block."""
    words = cipher_blocks(key, np.arange(math.ceil(size / (2 * pairs))), number, NOISE)
    found = [normals(*words[5 * k : 5 * k + 5]) for k in range(pairs)]
    return np.stack(found).transpose(2, 0, 1).ravel()[:size]


def test_gaussian_noise_is_that_of_an_independent_computation():
    """Fails if leaves share noise, blocks are read twice, or a value loses relative precision."""
    tree = {
        "a": np.zeros((3, 7), np.float32),
        "b": None,
        "c": np.zeros(SAMPLES - 22, jnp.bfloat16),
        "d": np.zeros((), np.float32),
    }
    drawn = noise.gaussian(KEY, tree, 1.0)
    expected = vector(jax.random.key_data(KEY), SAMPLES)
    found = np.concatenate([np.ravel(drawn[name]) for name in "acd"])
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert 3.9 < abs(expected).max() < 5.5 and len(np.unique(expected)) == SAMPLES
    with jax.enable_x64(True):
        wide = noise.gaussian(
            KEY, {"a": np.zeros(5), "b": np.zeros(101, np.float32), "c": np.zeros(6)}, 1.0
        )
    both = np.concatenate([wide["a"], wide["c"]])
    assert both.dtype == np.float64
    first, second = cipher_blocks(jax.random.key_data(KEY), np.arange(2), 0, SPLIT)[:8].T
    np.testing.assert_allclose(both, vector(first, 11, pairs=1), rtol=1e-14)
    np.testing.assert_allclose(wide["b"], vector(second, 101), rtol=2e-6)


def test_draws_of_different_numbers_read_different_blocks():
    """Fails if few or many values forget the number, or if a traced number is another than a
    constant."""
    few, many = ZEROS[:101], ZEROS
    for like, number in ((few, 2**32 - 1), (few, jnp.int32(7)), (many, 7)):
        drawn = noise.gaussian(KEY, like, 1.0, number=number)
        expected = vector(jax.random.key_data(KEY), like.size, number=np.uint32(number))
        np.testing.assert_allclose(drawn, expected, rtol=2e-6)
        assert np.isclose(drawn, vector(jax.random.key_data(KEY), like.size)).mean() < 0.01
    for number in (-1, 2**32, jnp.zeros(2)):
        with pytest.raises(ValueError, match="number must be"):
            noise.gaussian(KEY, few, 1.0, number=number)
    for fraction in (0.5, jnp.float32(1), True):
        with pytest.raises(TypeError, match="number must be an integer"):
            noise.gaussian(KEY, few, 1.0, number=fraction)


def looped_block(key, inputs):
    """Returns the words of `chacha.unrolled_block` by `chacha.block`.

    test_chacha proves that they are equal.
    """
    columns = jnp.broadcast_arrays(*(jnp.asarray(word, jnp.uint32) for word in inputs))
    words = chacha.block(jnp.stack(key), [column.ravel() for column in columns])
    return [word.reshape(columns[0].shape) for word in words]


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "kernels"), [("cuda", True), ("tpu", True), ("tpu", False)])
def test_every_platform_draws_the_same_normals(monkeypatch, platform, kernels):
    """Fails if a block is computed at another place, or if the last step of a kernel's grid is left
    out."""

    def chosen(*args, default, kernels=kernels, **own):
        available = own | (kernels if given else {})
        return available.get(platform, default)(*args)

    given = kernels
    monkeypatch.setattr(forms, "by_platform", chosen)
    # No other test draws as many, so none meets this program in JAX's cache.
    shapes = {"a": (3, 7), "b": kernel.VALUES_PER_STEP + 4321 + kernels}
    tree = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    if not kernels:
        # XLA-CPU would compute the unrolled cipher once for each of its readers, and compiles 3 s.
        monkeypatch.setattr(chacha, "unrolled_block", looped_block)
    with pltpu.force_tpu_interpret_mode():
        drawn = noise.gaussian(KEY, tree, 1.0, number=5)
    found = np.concatenate([np.ravel(drawn[name]) for name in "ab"])
    np.testing.assert_allclose(
        found, vector(jax.random.key_data(KEY), found.size, number=5), rtol=2e-6
    )


def test_one_process_draws_noise_for_every_platform():
    """Fails if the form is that of the process, which is a CPU's, and not that of the program."""
    traced = jax.jit(lambda key: noise.gaussian(key, ZEROS[:4322], 1.0)).trace(KEY)
    text = {
        name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")
    }
    assert [name for name in text if "tpu_custom_call" in text[name]] == ["tpu"]
    assert [name for name in text if "complex<f64>" in text[name]] == ["cpu"]
    assert [name for name in text if "complex<f32>" in text[name]] == ["cpu", "cuda"]


def test_every_edge_of_the_words_gives_finite_normals_of_both_signs():
    """Fails if a word of zeros or ones gives 0, infinity or NaN, or if a sign is more frequent."""
    edges = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    words = [
        part.ravel()
        for part in np.meshgrid(*[edges] * 4, np.arange(8, dtype=np.uint32), indexing="ij")
    ]
    found = np.stack(pair([jnp.asarray(word) for word in words], jnp.dtype(jnp.float32)))
    np.testing.assert_allclose(found, normals(*words), rtol=2e-6)
    assert np.isfinite(found).all() and abs(found).min() > 2.0**-98
    assert 9.4 < abs(found).max() < 9.5
    octants = found.reshape(2, -1, 8)
    assert (np.sort(octants, axis=2) == np.sort(-octants, axis=2)).all()


# --- discrete Laplace ----------------------------------------------------------------------------


@pytest.mark.slow
def test_discrete_laplace_tails_follow_the_law_far_out():
    values = np.abs(many(noise.discrete_laplace, 1000.0, keys=6))
    law = stats.dlaplace(1 / 1000.0)
    edges = law.isf(np.array([1e-3, 3e-4, 1e-4]) / 2)
    tails = 2 * law.sf(edges)
    expected = -np.diff([1.0, *tails, 0.0])
    observed = np.histogram(values, [0, *(edges + 0.5), np.inf])[0]
    assert stats.chisquare(observed, expected * values.size).pvalue > ACCEPT


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1000.0, 0.9 * noise.LARGEST_DISCRETE_SCALE])
def test_every_integer_keeps_its_probability(scale):
    """Counts residues, since a float that is too coarse favours multiples of powers of two."""
    residues = np.bincount(many(noise.discrete_laplace, scale, keys=6) % 16)
    expected = np.cosh((np.arange(16) - 8) / scale)
    assert stats.chisquare(residues, expected / expected.sum() * residues.sum()).pvalue > ACCEPT


TOP = 2**32 - 1
BLOCK = 32 * math.log(2)


# Where words take turns, each operation is compiled for the shape of what is drawn, so all tests
# draw as much.
WORDS = np.zeros(500, np.float32)


def equal(drawn):
    """Returns the value that all that was drawn has."""
    (value,) = np.unique(drawn)
    return value.item()


@pytest.fixture
def words_in_turn(monkeypatch):
    """Replaces the cipher by words: `words_in_turn(*draws)`. A draw has rows, and a row one word or
    those of values."""

    def filled(word, shape):
        if isinstance(word, tuple):
            return np.stack([filled(row, shape[1:]) for row in word])
        return np.broadcast_to(np.asarray(word, np.uint32), shape)

    def replace(*draws):
        rest = iter(draws)

        def block(key, inputs):
            draw = next(rest)
            words = filled(draw, (len(draw), 2, WORDS.size)).ravel()
            return jnp.asarray(
                np.append(words, np.zeros(-words.size % 16, np.uint32)).reshape(16, -1)
            )

        monkeypatch.setattr(chacha, "block", block)

    with jax.disable_jit():
        yield replace


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "uniform"),
    [
        ((0, 0, 1), 2.0**-64),
        ((1, 0), 2.0**-32),
        ((1, TOP), 2.0**-31),
        ((2**31, 0), 0.5),
        ((TOP, TOP), 1.0),
    ],
)
def test_uniforms_are_positive_at_most_one_and_precise_near_zero(words_in_turn, words, uniform):
    # two equal draws of tan(pi / 4 * uniform)
    words_in_turn((*words[:2], 0), *((word, 0, 0) for word in words[2:]))
    value = equal(noise.cauchy(KEY, WORDS, 1.0))
    assert 0 < value <= 1
    np.testing.assert_allclose(math.atan(value) * 4 / math.pi, uniform, rtol=2**-22)


NONE = (TOP, 0)  # an exponential of about 2**-65
UNIFORM = np.random.default_rng(5).integers(2**32, size=(4, 500), dtype=np.uint32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "exponential"), [(1, BLOCK), (TOP - 1, 2.0**-32), (2**31, math.log(2))]
)
def test_an_exponential_is_that_of_its_bits(words_in_turn, word, exponential):
    words_in_turn(((word, NONE[0]), (0, NONE[1])))
    value = equal(noise.laplace(KEY, WORDS, 1.0))
    np.testing.assert_allclose(value, exponential, rtol=2.0**-22, atol=2.0**-64)


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [1, 2, 3, 100])
def test_zero_bits_are_drawn_further(words_in_turn, zeros):
    """Checks that each word of zeros adds 32 log 2 and that the rest has the law of an
    exponential."""
    first, last = ((0, NONE[0]), (0, NONE[1])), (UNIFORM[1], UNIFORM[0])
    words_in_turn(first, *[(0, 0)] * (zeros - 1), last)
    values = np.asarray(noise.laplace(KEY, WORDS, 1.0), np.float64)
    assert p_value(values - zeros * BLOCK, stats.expon, 1.0) > ACCEPT


@pytest.mark.slow
def test_a_broken_generator_ends_far_out_and_does_not_hang(words_in_turn):
    words_in_turn(((0, NONE[0]), (0, NONE[1])), *[(0, 0)] * 255)
    assert equal(noise.laplace(KEY, WORDS, 1.0)) == pytest.approx(256 * BLOCK)


@pytest.mark.slow
def test_laplace_noise_reaches_beyond_44_scales(words_in_turn):
    """Puts three words of zeros first in one of the two exponentials, an event of probability
    2**-96."""
    words_in_turn(((0, UNIFORM[0]), (0, UNIFORM[2])), (0, 0), (0, 0), (UNIFORM[3], UNIFORM[1]))
    unit = 2.0
    values = np.asarray(noise.laplace(KEY, WORDS, unit), np.float64)
    middle = 3 * BLOCK * unit
    assert (values > 44 * unit).all()
    assert p_value(values - middle, stats.laplace, unit) > ACCEPT


@pytest.mark.slow
@pytest.mark.parametrize("word", [3 * 2**16, TOP])
@pytest.mark.parametrize("zeros", [0, 1, 3, 4])
def test_cauchy_noise_reaches_as_far_as_floats_do(words_in_turn, zeros, word):
    """Uses a uniform with `zeros` words of zeros first, and the choice of 1 / tan. Fails if each
    block has its tan."""
    far = [0] * zeros + [word]
    # The second draw is almost zero.
    words_in_turn(((far[0], 1), 0, (1, 0)), *((word, 0, (1, 0)) for word in far[1:]))
    exact = 1 / math.tan(math.pi / 4 * word * 2.0 ** (-32 * (zeros + 1)))
    expected = exact if exact < 2.0**128 else math.inf
    np.testing.assert_allclose(2 * equal(noise.cauchy(KEY, WORDS, 1.0)), expected, rtol=1e-5)


@pytest.mark.slow
def test_discrete_laplace_takes_a_traced_scale():
    draw = lambda scale: noise.discrete_laplace(KEY, ZEROS, scale)  # noqa: E731
    assert (np.asarray(jax.jit(draw)(7.0)) == np.asarray(draw(7.0))).all()


# --- privatize -----------------------------------------------------------------------------------

# The sizes are those of the independent computation above, whose program draws their noise.
SHAPES = {"b": (3, 7), "w": (SAMPLES - 22,), "x": ()}
GRADS = {name: np.full(shape, 2, np.float32) for name, shape in SHAPES.items()} | {"frozen": None}
# For what does not depend on the size, because a program of few values compiles sooner.
FEW_GRADS = {"w": np.full(5, 2, np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("first", [Clipped(0.5), 0.5, np.float32(0.5), jnp.asarray(0.5)])
def test_privatize_adds_the_configured_noise_then_divides(first):
    privatizer = noise.privatize(first, noise_multiplier=3.0, divisor=20.0, key=KEY)
    out, state = privatizer.update(GRADS, privatizer.init(GRADS))
    assert out["frozen"] is None and int(state.step) == 1
    added = noise.gaussian(KEY, GRADS, 1.5)
    for name in SHAPES:
        np.testing.assert_allclose(out[name], (2 + np.float64(added[name])) / 20, rtol=1e-5)


def test_privatize_carries_its_event_and_numbers():
    privatizer = jaxdp.privatize(Clipped(0.5), noise_multiplier=3.0, divisor=20)
    assert privatizer.event == dp_event.GaussianDpEvent(3.0) == privatizer.event_at(7)
    assert (privatizer.noise_multiplier, privatizer.clip_norm, privatizer.divisor) == (
        3.0,
        0.5,
        20.0,
    )
    with pytest.raises(AttributeError):
        privatizer.noise_multiplier = 0.0


def test_noise_is_the_same_under_every_adjacency():
    """Checks that the noise is not doubled for replace_one, since the accountant doubles the
    sensitivity."""
    asked = []

    class Recording(Clipped):
        def sensitivity(self, adjacency):
            asked.append(adjacency)
            return super().sensitivity(adjacency)

    assert noise.privatize(Recording(2.0), noise_multiplier=1.0, divisor=1.0).clip_norm == 2.0
    assert asked == ["add_remove"]


def test_zero_multiplier_is_exact_and_non_private_even_without_clipping():
    privatizer = noise.privatize(Clipped(math.inf), noise_multiplier=0.0, divisor=4.0)
    out, _ = privatizer.update(GRADS, privatizer.init(GRADS))
    assert (out["w"] == 0.5).all()
    assert privatizer.event == dp_event.NonPrivateDpEvent()


def test_a_pickled_state_goes_on_with_the_same_programs():
    optimizer = optax.chain(
        noise.privatize(1.0, noise_multiplier=1.0, divisor=1.0), optax.trace(0.9)
    )
    update = jax.jit(optimizer.update)
    _, state = update(GRADS, optimizer.init(GRADS))
    restored = pickle.loads(pickle.dumps(state))
    expected, _ = update(GRADS, state)
    again, _ = update(GRADS, restored)
    assert (again["w"] == expected["w"]).all()
    assert update._cache_size() == 1


def test_without_a_key_every_init_draws_its_own_entropy():
    privatizer = noise.privatize(1.0, noise_multiplier=1.0, divisor=1.0)
    words = [tuple(jax.random.key_data(privatizer.init(GRADS).key).tolist()) for _ in range(20)]
    assert len(set(words)) == 20 and {len(w) for w in words} == {8}


def test_init_under_jit_needs_a_key():
    with pytest.raises(ValueError, match="Call init outside jit"):
        jax.jit(noise.privatize(1.0, noise_multiplier=1.0, divisor=1.0).init)(GRADS)
    state = jax.jit(noise.privatize(1.0, noise_multiplier=1.0, divisor=1.0, key=KEY).init)(GRADS)
    assert (jax.random.key_data(state.key) == jax.random.key_data(KEY)).all()


@pytest.mark.parametrize("transform", [jax.jit, lambda fun: lambda x: jax.lax.map(fun, x[None])])
def test_init_of_closed_over_parameters_under_jit_needs_a_key(transform):
    privatizer = noise.privatize(1.0, noise_multiplier=1.0, divisor=1.0)
    params = np.zeros(3, np.float32)

    def release(total):  # params are no argument, and so not traced
        return privatizer.update(total, privatizer.init(params))[0]

    with pytest.raises(ValueError, match="Call init outside jit"):
        transform(release)(jnp.ones(3))


def test_one_key_is_no_key_of_two_parts_of_a_tree():
    privatizer = noise.privatize(1.0, noise_multiplier=1.0, divisor=1.0, key=KEY)
    optimizer = optax.multi_transform(
        {"slow": optax.chain(privatizer, optax.scale(0.5)), "fast": privatizer},
        {"w": "slow", "v": "fast"},
    )
    grads = {"w": ZEROS, "v": ZEROS}
    out, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads))
    assert correlation(out["w"], out["v"]) < 5 / math.sqrt(ZEROS.size)
    again, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads))
    assert (again["w"] == out["w"]).all() and (again["v"] == out["v"]).all()


def test_low_precision_sums_come_out_in_float32_with_float32_noise():
    privatizer = noise.privatize(1.0, noise_multiplier=1.0, divisor=8.0, key=KEY)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), GRADS)
    out, _ = privatizer.update(half, privatizer.init(half))
    full, _ = privatizer.update(GRADS, privatizer.init(GRADS))
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype("float32")}
    chex.assert_trees_all_equal(out, full)


@pytest.mark.slow
def test_a_public_schedule_sets_noise_and_event_per_step():
    schedule = lambda step: jnp.where(step < 1, 1.0, 4.0)  # noqa: E731
    privatizer = noise.privatize(2.0, noise_multiplier=schedule, divisor=1.0, key=KEY, steps=3)
    assert privatizer.event_at(0) == dp_event.GaussianDpEvent(1.0)
    assert privatizer.event_at(1) == dp_event.GaussianDpEvent(4.0)
    with pytest.raises(ValueError, match=r"event_at\(step\)"):
        _ = privatizer.event
    state, zeros = privatizer.init(GRADS), jax.tree.map(np.zeros_like, GRADS)
    for scale in (2.0, 8.0, 8.0):
        out, state = privatizer.update(zeros, state)
        assert p_value(out["w"], stats.norm, scale) > ACCEPT
        assert p_value(out["w"], stats.norm, 0.7 * scale) < REJECT
    bad = noise.privatize(2.0, noise_multiplier=lambda step: -1.0, divisor=1.0)
    with pytest.raises(ValueError, match=r"noise_multiplier\(3\)"):
        bad.event_at(3)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        privatizer.event_at(-1)


@pytest.mark.parametrize(
    ("first", "options", "error", "match"),
    [
        (
            1e-30,
            {"noise_multiplier": 1e-9},
            ValueError,
            "noise_multiplier=1e-09 times the clip norm 1e-30 is 1",
        ),
        (
            Clipped(1e-46),
            {},
            ValueError,
            "(?s)clip norm 1e-46.*Multiply the loss by a public constant",
        ),
        (Clipped(5e-324), {"noise_multiplier": 0.1}, ValueError, "is 0.0, but float32 noise needs"),
        (
            1e30,
            {"noise_multiplier": 1e30},
            ValueError,
            "float32 noise needs a standard deviation from",
        ),
        (-1.0, {}, ValueError, "clipped_or_sensitivity must be at least 0, got -1.0"),
        (Clipped(-1.0), {}, ValueError, "sensitivity"),
        (math.nan, {}, ValueError, "got nan"),
        (math.inf, {}, ValueError, "finite norm"),
        ("1", {}, TypeError, "real number"),
        (
            1.0,
            {"noise_multiplier": -0.1},
            ValueError,
            "noise_multiplier must be at least 0, got -0.1",
        ),
        (1.0, {"noise_multiplier": math.inf}, ValueError, "finite"),
        (1.0, {"noise_multiplier": math.nan}, ValueError, "got nan"),
        (math.inf, {"noise_multiplier": lambda step: 1.0}, ValueError, "finite norm"),
        (1.0, {"divisor": 0.0}, ValueError, "expected batch size"),
        (1.0, {"divisor": -2.0}, ValueError, "divisor must be at least 0, got -2.0"),
        (1.0, {"divisor": math.inf}, ValueError, "expected batch size"),
        (1.0, {"divisor": None}, TypeError, "divisor must be a real number"),
        (1.0, {"key": 0}, TypeError, "typed key"),
        (1.0, {"key": jax.random.PRNGKey(0)}, TypeError, "typed key"),
    ],
)
def test_privatize_refuses_what_has_no_guarantee(first, options, error, match):
    with pytest.raises(error, match=match):
        noise.privatize(first, **{"noise_multiplier": 1.0, "divisor": 1.0, **options})


def test_a_constant_sum_needs_no_noise():
    privatizer = noise.privatize(0.0, noise_multiplier=2.0, divisor=4.0, key=KEY)
    out, _ = privatizer.update(GRADS, privatizer.init(GRADS))
    assert (out["w"] == 0.5).all() and privatizer.event == dp_event.GaussianDpEvent(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [0.0, 1e-20, 1e10])
def test_a_schedule_whose_noise_float32_loses_gives_nan_and_no_event(clip_norm):
    schedule = [1.0, 1e-25, 1e30, *[0.0] * 2**16].__getitem__
    privatizer = noise.privatize(clip_norm, noise_multiplier=schedule, divisor=1.0, key=KEY)
    state, update = privatizer.init(FEW_GRADS), jax.jit(privatizer.update)
    for step, std in enumerate((clip_norm, 1e-25 * clip_norm, 1e30 * clip_norm, 0.0)):
        out, state = update(FEW_GRADS, state)
        lost = std != 0 and not 2.0**-100 <= std <= 2.0**100
        assert bool(jnp.isnan(out["w"]).all()) == lost and bool(jnp.isnan(out["w"]).any()) == lost
        if lost:
            with pytest.raises(ValueError, match=rf"noise_multiplier\({step}\)"):
                privatizer.event_at(step)
        elif std == 0:
            assert (out["w"] == 2.0).all()


ROWS_OF_DEVICES = np.arange(8 * 500, dtype=np.float32).reshape(8, 500)


def in_shards(step, *, check_vma=True):
    """Runs `step(key, values)` on eight devices with one row of `values` each. Returns one row per
    device."""
    if len(jax.devices()) < 8:
        pytest.skip("fewer than eight devices")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    return jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(everywhere, rows), out_specs=rows, check_vma=check_vma
        )
    )(KEY, ROWS_OF_DEVICES)


@pytest.mark.slow
def test_privatize_in_shards_is_for_a_sum_that_all_devices_share(monkeypatch):
    privatizer = noise.privatize(1.0, noise_multiplier=3.0, divisor=2.0, key=KEY)

    def noisy(key, x, fold=False, total=True):
        state = noise.PrivatizeState(
            jax.random.fold_in(key, jax.lax.axis_index("data")) if fold else key,
            jnp.zeros((), jnp.int32),
        )
        x = jax.lax.psum(x, "data") if total else x
        out = jax.lax.pcast(privatizer.update(x, state)[0], "data", to="varying") if not fold else x
        return privatizer.update(x, state)[0] if fold else out

    shared = np.asarray(in_shards(noisy))
    assert (shared == shared[0]).all()
    single, _ = privatizer.update(ROWS_OF_DEVICES.sum(0), privatizer.init(None))
    np.testing.assert_allclose(shared[0], single, rtol=1e-5)
    with pytest.raises(ValueError, match="Use one key for all devices"):
        in_shards(lambda key, x: noisy(key, x, fold=True))

    def apart(key, x):
        return privatizer.update(x, noise.PrivatizeState(key, jnp.zeros((), jnp.int32)))[0]

    with pytest.raises(ValueError, match="all get the same noise"):
        in_shards(apart)
    for check in ("varying_axes", "untracked_axes"):  # The twin adds one noise eight times.
        monkeypatch.setattr(shards, check, lambda *values: frozenset())
    added = 2 * in_shards(lambda key, x: apart(key, x)) - ROWS_OF_DEVICES
    np.testing.assert_allclose(added, np.tile(added[0], (8, 1)), atol=1e-2)


@pytest.mark.slow
def test_noise_is_refused_where_jax_does_not_record_what_differs():
    privatizer = noise.privatize(1.0, noise_multiplier=3.0, divisor=2.0, key=KEY)
    state, refused = (
        noise.PrivatizeState(KEY, jnp.zeros((), jnp.int32)),
        r"axes \('\w+',\) of a jax.pmap.*psum",
    )
    with pytest.raises(ValueError, match=refused):
        in_shards(
            lambda key, x: privatizer.update(jax.lax.psum(x, "data"), state)[0], check_vma=False
        )
    for options in ({}, {"axis_name": "data"}):
        for step in (
            lambda x: privatizer.update(x, state)[0],
            lambda x: x + noise.laplace(KEY, x, 1.0),
        ):
            with pytest.raises(ValueError, match=refused):
                jax.pmap(step, **options)(jnp.ones((2, 3)))
    # The sum of all devices may get its noise outside.
    total = jax.pmap(lambda x: jax.lax.psum(x, "data"), axis_name="data")(jnp.ones((2, 3)))[0]
    assert privatizer.update(total, state)[0].shape == (3,)


def test_one_key_for_several_scales_of_a_vmap_is_refused():
    with pytest.raises(ValueError, match="key and number are the same for 2 values"):
        jax.vmap(lambda std: noise.gaussian(KEY, jnp.ones(3), std))(jnp.ones(2))


def test_numbers_of_draws_are_checked_by_value_and_by_type():
    draw = lambda number: noise.gaussian(KEY, jnp.ones(3), 1.0, number=number)  # noqa: E731
    with jax.enable_x64(True):
        for number in (2**32, np.int64(2**32), jnp.asarray(2**32), jnp.asarray(-1)):
            with pytest.raises(
                ValueError, match=r"number must be from 0 to 2\*\*32 - 1, got (4294967296|-1)"
            ):
                draw(number)
        with pytest.raises(TypeError, match="at most 32 bits where it is traced, got dtype int64"):
            jax.jit(draw)(jnp.asarray(5))


# --- Schedules: one value for charge and noise --------------------------------------------------


def overflowing(step):
    """A schedule that overflows int32 from step 46,341, where a device computes it."""
    return 1 + step**2 / 1e10


@pytest.mark.slow
def test_charge_and_noise_of_a_schedule_are_one_number():
    calls = []

    def schedule(step):
        calls.append(step)
        return overflowing(step) + 1e-3 * len(calls)  # also of a schedule that changes its mind

    privatizer = noise.privatize(2.0, noise_multiplier=schedule, divisor=1.0, key=KEY)
    zeros, compiled = ZEROS[:3], jax.jit(privatizer.update)
    for step in (0, 1, 46_341, 60_000):
        state = noise.PrivatizeState(KEY, jnp.int32(step))
        normal = noise.gaussian(KEY, zeros, 1.0, number=step)
        claimed = privatizer.event_at(step).noise_multiplier
        assert claimed >= overflowing(step)
        for update in (privatizer.update, compiled):
            ratio = np.float64(update(zeros, state)[0]) / np.float64(normal) / (2.0 * claimed)
            assert (ratio >= 1).all() and (ratio < 1 + 1e-6).all()
    assert len(calls) == len(set(calls)) and {type(step) for step in calls} == {int}


def test_a_plan_has_noise_in_every_step():
    bad = {
        "noise_multiplier(2) must be positive, got 0.0": lambda step: 1.0 - 0.5 * step,
        "noise_multiplier(3) must be finite, got inf": lambda step: 1.0 if step < 3 else math.inf,
        "noise_multiplier(4) must be at least 0, got nan": lambda step: (
            1.0 if step < 4 else math.nan
        ),
        "noise_multiplier(0) must be at least 0, got -1.0": lambda step: -1.0,
        "noise_multiplier(1)=1e-40 times the clip norm 1.0": lambda step: 10.0 ** (-40 * step),
    }
    for message, schedule in bad.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            noise.privatize(1.0, noise_multiplier=schedule, divisor=1.0, steps=10)
        unplanned = noise.privatize(1.0, noise_multiplier=schedule, divisor=1.0)
        with pytest.raises(ValueError, match=re.escape(message)):
            unplanned.planned(10)
    for steps in (0, -1, 2.0):
        with pytest.raises(ValueError, match="steps must be an integer and at least 1"):
            noise.privatize(1.0, noise_multiplier=1.0, divisor=1.0, steps=steps)


@pytest.mark.slow
def test_a_compiled_update_knows_the_steps_of_its_plan_only():
    privatizer = noise.privatize(
        1.0, noise_multiplier=[1.0, 2.0].__getitem__, divisor=1.0, key=KEY, steps=2
    )
    update = jax.jit(privatizer.update)
    for step, known in ((0, True), (1, True), (2, False), (-1, False)):
        noisy, _ = update(ZEROS[:3], noise.PrivatizeState(KEY, jnp.int32(step)))
        assert np.isfinite(noisy).all() == known and np.isnan(noisy).all() != known
    with pytest.raises(ValueError, match=r"step must be below 2, got 2.*planned\(steps\)"):
        privatizer.check_step(2)
    with pytest.raises(IndexError):
        privatizer.planned(3)


def test_privatize_refuses_traced_privacy_parameters():
    build = lambda clip: noise.privatize(clip, noise_multiplier=1.0, divisor=1.0).clip_norm  # noqa: E731
    with pytest.raises(TypeError, match="traced"):
        jax.jit(build)(1.0)


def test_divisor_and_multiplier_have_no_defaults():
    with pytest.raises(TypeError, match="divisor"):
        noise.privatize(1.0, noise_multiplier=1.0)
    with pytest.raises(TypeError, match="noise_multiplier"):
        noise.privatize(1.0, divisor=1.0)


def test_chain_with_sgd_is_dp_sgd_computed_by_hand():
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    grads = jax.tree.map(lambda x: x + 1.0, params)
    privatizer = noise.privatize(2.0, noise_multiplier=0.5, divisor=10.0, key=KEY)
    optimizer = optax.chain(privatizer, optax.sgd(0.1))
    state = optimizer.init(params)
    for step in range(3):
        expected = jax.tree.map(
            lambda p, g, n: np.float64(p) - 0.1 * (np.float64(g) + np.float64(n)) / 10.0,
            params,
            grads,
            noise.gaussian(KEY, params, 1.0, number=step),
        )
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(params, jax.tree.map(np.float32, expected), rtol=1e-6)


@pytest.mark.slow
def test_chain_with_adam_compiles_once_under_a_transfer_guard():
    with jax.numpy_dtype_promotion("standard"):  # optax.adam mixes int32 counts with floats
        params = {"w": jnp.ones((8, 3)), "b": jnp.zeros(3)}
        optimizer = optax.chain(
            noise.privatize(1.0, noise_multiplier=1.0, divisor=4.0), optax.adam(1e-3)
        )

        @jax.jit
        @chex.assert_max_traces(n=1)
        def step(params, state):
            updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
            return optax.apply_updates(params, updates), state

        state = optimizer.init(params)
        with jax.transfer_guard("disallow"):
            for _ in range(3):
                params, state = step(params, state)
        assert int(state[0].step) == 3
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_masked_leaves_are_left_alone():
    privatizer = optax.masked(
        noise.privatize(1.0, noise_multiplier=1.0, divisor=2.0, key=KEY), {"w": True, "b": False}
    )
    grads = {"w": ZEROS + 1, "b": np.ones(3, np.float32)}
    out, _ = privatizer.update(grads, privatizer.init(grads))
    assert (out["b"] == 1.0).all() and (out["w"] != 0.5).all()


@pytest.mark.slow
def test_non_finite_sums_are_passed_on_not_hidden():
    privatizer = noise.privatize(1.0, noise_multiplier=1.0, divisor=2.0, key=KEY)
    grads = np.zeros(SAMPLES, np.float32)
    grads[:2] = np.nan, np.inf
    out = np.asarray(privatizer.update(grads, privatizer.init(grads))[0])
    assert np.isnan(out[0]) and np.isinf(out[1]) and np.isfinite(out[2:]).all()
