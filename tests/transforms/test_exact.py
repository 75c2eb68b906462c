"""Exact noise: integers against rational numbers, the law of the noise, and sums in any order.

Statistical tests use fixed keys. Over the choice of key, a correct sampler fails with probability
below 1e-6."""

import dataclasses
import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from jaxdp import data, finetune
from jaxdp.privacy import Ledger
from jaxdp.transforms import grids, noise
from jaxdp.transforms.noise import geometric, rounded

KEY = noise.stream(bytes(range(16)), "exact noise")
SAMPLES = 40_000
ACCEPT, REJECT = 1e-6, 1e-12
BITS = 4


def number_of(words):
    """Returns the integers of rows of words, uint32 [W, K], the highest word first."""
    total = 0
    for word in np.asarray(words).astype(object):
        total = total * 2**32 + word
    return total


# Eager calls compile each of their operations by itself.


def total_of(grid, grads, factors):
    """Returns the sum of one leaf on a grid."""
    (total,) = jax.jit(lambda *pair: grid.at().total([pair[0]], [pair[1]]))(grads, factors)
    return np.asarray(total)


def short_rows_of(grid, rows):
    """Returns the rows that are not too long, and zeros for the others."""
    is_short = np.asarray(jax.jit(lambda x: grid.at()._is_short([x]))(rows))
    return rows * is_short[:, None]


@jax.jit
def squared_norms(leaves):
    return jnp.stack(grids.squared_norms(leaves))


# --- The sampler ---------------------------------------------------------------------------------


def test_the_exponent_is_the_rational_number_of_the_docstring():
    rng = np.random.default_rng(0)
    words = rng.integers(2**32, size=(2, 500), dtype=np.uint32)
    words[:, :3] = [[0, 2**32 - 1, 0], [0, 2**32 - 1, 2**32 - 1]]
    slabs = rng.integers(256, size=500).astype(np.uint32)
    slabs[:3] = [0, 255, 255]
    computed = number_of(jax.jit(rounded.exponent)(slabs, *words))
    for slab, high, low, value in zip(slabs, *words, computed, strict=True):
        place = int(high) << 10 | int(low) >> 22  # 42 bits
        d = fractions.Fraction(2 * place + 1, 2**47)
        y = d * (2 * fractions.Fraction(int(slab), 16) + d) / 2
        assert 0 < y < 1
        assert y * 2**96 == value


def test_thresholds_are_those_of_an_independent_series():
    def exp(x):  # the Taylor series of e^-x, whose rest is below its first term that is left out
        total, term = 0, 2**500
        for n in range(1, 560):
            total += term
            term = -term * x.numerator // (x.denominator * n)
        return fractions.Fraction(total, 2**500)

    weights = [exp(fractions.Fraction(j * j, 512)) for j in range(256)]
    total, below = sum(weights), fractions.Fraction(0)
    thresholds = number_of(rounded.slab_thresholds().T)
    for weight, threshold in zip(weights[:-1], thresholds, strict=True):
        below += weight
        assert 0 <= below / total * 2**128 - threshold < 1 + fractions.Fraction(1, 2**60)


def by_python(words):
    """Returns the doubled magnitude at `BITS` bits that turns of words lead to, or None."""
    thresholds = number_of(rounded.slab_thresholds().T).tolist()
    last = even = magnitude = None
    is_fresh = True
    for turn in words:
        if is_fresh:
            slab_number = int(number_of(turn[:4]))
            slab = sum(threshold <= slab_number for threshold in thresholds)
            place = int(turn[4]) << 10 | int(turn[5]) >> 22
            d = fractions.Fraction(2 * place + 1, 2**47)
            size = fractions.Fraction(slab, 16) + d
            last, even = (size**2 - fractions.Fraction(slab, 16) ** 2) / 2, True
            magnitude = math.floor(size * 2**BITS + fractions.Fraction(1, 2))
        is_fresh = False
        for start in (6, 9, 12):
            u = fractions.Fraction(int(number_of(turn[start : start + 3])), 2**96)
            if u >= last:
                is_fresh = True
                break
            last, even = u, not even
        if is_fresh and even:
            return magnitude
    return None


@pytest.mark.slow
def test_the_slow_path_follows_its_words(monkeypatch):
    """Every outcome of a turn against rational numbers: accepted, refused, and gone on."""
    rng = np.random.default_rng(1)
    turns = rng.integers(2**32, size=(12, 16, 64), dtype=np.uint32)
    turns[0, [6, 9, 12], :40] = np.array([[2**10], [2**9], [2**8]])  # falls three times
    turns[0, 9, :20] = 2**31  # stops at the second u: refused
    turns[0, 0, :40] |= 2**31  # a slab far enough out
    monkeypatch.setattr(
        rounded.chacha,
        "block",
        lambda key, inputs: jnp.asarray(turns)[inputs[2].astype(int) - 1],
    )
    first = turns[0][np.array([0, 4, 6, 15])]
    slow = jax.jit(
        lambda first: rounded._slow(
            jnp.uint32(BITS), None, 0, first, jnp.arange(64), jnp.ones(64, bool)
        )
    )(first)
    expected = [by_python(turns[:, :, lane]) for lane in range(64)]
    assert slow.tolist() == expected
    refused = [by_python(turns[:1, :, lane]) is None for lane in range(40)]
    assert all(refused)


@pytest.mark.slow
def test_what_the_first_words_accept_all_words_accept():
    """The quick path may only decide what further words cannot change: here all 0 or all 1."""
    rng = np.random.default_rng(2)
    first = rng.integers(2**32, size=(4, 3000), dtype=np.uint32)
    tops = rounded.slab_thresholds()[:, 0]
    first[0, :255], first[0, 255:510], first[0, 510:765] = tops, tops - 1, tops + 1
    is_sure, magnitude = map(np.asarray, jax.jit(rounded._quick)(np.uint32(BITS), first))
    assert 0.9 < np.mean(is_sure[765:]) < 0.99
    assert not is_sure[:200].any()
    after_turn = jax.jit(rounded._after_turn)
    for rest in (0, 2**32 - 1):
        words = np.full((16, 3000), rest, np.uint32)
        words[[0, 4, 6]] = first[:3]
        state = rounded._Lanes(
            turn=np.uint32(1),
            is_open=np.ones(3000, bool),
            is_fresh=np.ones(3000, bool),
            is_even=np.ones(3000, bool),
            last=np.zeros((3, 3000), np.uint32),
            magnitude=np.zeros(3000, np.int32),
        )
        after = jax.device_get(after_turn(np.uint32(BITS), state, words))
        assert not (is_sure & after.is_open).any()
        assert (after.magnitude[is_sure] == magnitude[is_sure]).all()


# --- Discrete Laplace noise ----------------------------------------------------------------------


def geometric_of(words, t):
    """Algorithms 1 and 2 of the paper in Python: returns u and v."""
    words = iter(words)

    def uniform(limit):
        while True:
            word = int(next(words))
            if word // limit < (2**32 - 1) // limit:
                return word % limit

    def bernoulli(n, k):
        while uniform(t * k) < n:
            k += 1
        return k % 2 == 1

    u = uniform(t)
    while not bernoulli(u, 1):
        u = uniform(t)
    v = 0
    while bernoulli(t, 2):
        v += 1
    return u, v


@pytest.mark.parametrize("t", [1, 3, 700_001, 2**24 - 1])
def test_geometrics_are_those_of_the_paper_for_the_same_words(t):
    rng = np.random.default_rng(t)
    words = rng.integers(2**32, size=(64, 200), dtype=np.uint32)
    words[rng.random(words.shape) < 0.05] = 2**32 - 1  # which no limit may take
    zeros = jnp.zeros(200, jnp.uint32)
    lanes = geometric._Lanes(zeros == 0, zeros == 1, zeros, zeros, zeros)
    after = jax.jit(geometric._after_block)(jnp.uint32(t), lanes, words)
    closed = ~np.asarray(after.is_open)
    assert closed.mean() > 0.9
    for lane in np.flatnonzero(closed):
        assert (after.u[lane], after.v[lane]) == geometric_of(words[:, lane], t)


def test_a_scale_is_a_fraction_that_is_not_smaller():
    scales = [2.0**-30, 0.3, 1.0, 7.3, 63.99, 64.0, 1000.1, 2.0**18]
    for scale in map(geometric.upward, scales):
        t, shift = geometric._fraction(jnp.float32(scale))
        ratio = fractions.Fraction(int(t), 2 ** int(shift))
        assert scale <= ratio <= scale + 2.0**-18
        assert 0 < int(t) < 2**24
        assert int(shift) <= 18
        assert (int(t) >> int(shift)) * geometric._MOST_WHOLE < 2**31
    third = fractions.Fraction(1, 3)
    assert third < geometric.upward(third) < third * (1 + fractions.Fraction(1, 2**23))
    assert geometric.upward(0.5) == 0.5


# --- The grid ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_squared_norms_are_exact_at_the_ends_of_their_range():
    rng = np.random.default_rng(3)
    most = 2**24 - 1
    rows = rng.integers(-most, most + 1, size=(8, 700))
    rows[0], rows[1], rows[2, 1:] = most, -most, 0
    rows = rows.astype(np.int32)
    computed = number_of(squared_norms([rows[:, :300].reshape(8, 3, 100), rows[:, 300:]]))
    assert computed.tolist() == [sum(int(k) ** 2 for k in row) for row in rows]


@pytest.mark.slow
def test_the_longest_row_passes_and_one_step_more_does_not():
    grid = grids.Grid(1.0, 0.7, 8, 100)
    longest = grid.longest
    assert longest <= (2**8 / fractions.Fraction(0.7)) ** 2 < longest + 1
    side = math.isqrt(longest)
    rest = longest - side**2
    short = np.zeros((3, 2000), np.int32)
    short[:, 0] = side
    short[0, 1 : 1 + rest] = 1
    short[1, 1 : 2 + rest] = 1  # a longer one, by one
    passed = short_rows_of(grid, short)
    assert (passed[0] == short[0]).all()
    assert not passed[1].any()
    assert (passed[2] == short[2]).all()


@pytest.mark.slow
def test_rounding_never_lengthens_and_rounding_to_the_nearest_would():
    """Gradients that a rounding to the nearest integer lengthens most."""
    grid = grids.Grid(1.0, 1.0, 8, 100)
    size = 10_000
    length = 0.51 * math.sqrt(size)  # of entries just above a half
    grads = np.full((1, size), 0.51 * grid.step, np.float32)
    grads[0, 0] = math.sqrt(2**16 - length**2) * grid.step
    one = np.ones(1, np.float32)
    total = total_of(grid, grads, one)
    assert (total.astype(np.int64) ** 2).sum() <= grid.longest
    nearest = np.round(grads.astype(np.float64) / grid.step)
    assert (nearest**2).sum() > 1.1 * grid.longest
    # The check by integers catches it.
    assert not short_rows_of(grid, nearest.astype(np.int32)).any()
    # So it does where a clip is forgotten, and where a gradient is not finite.
    for bad in (7.0, np.inf, np.nan):
        total = total_of(grid, grads * np.float32(bad), one)
        assert (total.astype(np.int64) ** 2).sum() <= grid.longest


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "divisor"), [(0.5, 100), (1.0, 4096), (3.0, 1e6), (100, 8)])
def test_no_sum_overflows_at_the_bound(sigma, divisor):
    grid = grids.Grid.of(2.0, sigma, divisor)
    side = math.isqrt(grid.longest)
    largest = grid.most_examples * side + grids.LARGEST * 2**grid.bits
    assert largest < 2**31
    if grid.bits < 24 and side < 2**23:  # no finer grid fits
        assert 2 * largest > 2**31 * 0.99
    assert stats.poisson(divisor).sf(grid.most_examples) < 2.0**-64
    # All examples along one coordinate, without noise: the sum is right.
    examples = np.zeros((64, 3), np.int32)
    examples[:, 0] = side
    total = int(short_rows_of(grid, examples).sum(0)[0])
    assert total == 64 * side
    assert total * (grid.most_examples // 64) < 2**31


@pytest.mark.slow
def test_integers_have_one_sum_in_every_order_and_floats_do_not():
    rng = np.random.default_rng(4)
    grid = grids.Grid.of(1.0, 1.0, 256)
    grads = rng.normal(size=(256, 40)).astype(np.float32)
    grads /= np.linalg.norm(grads, axis=1, keepdims=True)
    order = rng.permutation(256)
    factors = np.ones(256, np.float32)
    total, again = (total_of(grid, x, factors) for x in (grads, grads[order]))
    halves = [total_of(grid, x, factors[:128]) for x in np.split(grads[order], 2)]
    assert (total == again).all()
    assert (total == halves[0] + halves[1]).all()
    in_floats = [np.add.reduce(x, axis=0) for x in (grads, grads[order])]
    assert (in_floats[0] != in_floats[1]).any()
    np.testing.assert_allclose(total * grid.step, grads.sum(0), atol=256 * grid.step + 2e-3)


@pytest.mark.slow
def test_products_of_factors_have_exact_squared_norms():
    rng = np.random.default_rng(8)
    u = rng.integers(-400, 401, size=(6, 300))
    w = rng.integers(-4000, 4001, size=(6, 2))
    u[0], w[0] = 0, 1
    u[1, 1:] = 0
    u[2], w[2] = 1, 8191  # a factor whose squares have too large a sum
    computed = number_of(
        jax.jit(lambda *pair: jnp.stack(grids.squared_norms([grids.Outer(*pair, jnp.asarray)])))(
            u.astype(np.int32), w.astype(np.int32)
        )
    )
    squares = [(x.astype(object) ** 2).sum(1) for x in (u, w)]
    is_long = (squares[0] >= 2**26) | (squares[1] >= 2**26)
    assert is_long[2] and not is_long[:2].any()
    assert (computed[~is_long] == (squares[0] * squares[1])[~is_long]).all()
    assert (computed[is_long] > 2**61).all()


@pytest.mark.slow
def test_dense_layers_are_summed_by_rounded_factors():
    """The gradients of the first layer are not formed. Its leaf is the transposed weight."""
    rng = np.random.default_rng(9)
    params = {
        "first": rng.normal(size=(64, 100)).astype(np.float32),
        "second": rng.normal(size=(64, 3)).astype(np.float32),
    }
    rows = rng.normal(size=(40, 100)) * np.geomspace(1e-3, 10, 40)[:, None]
    rows[7] = np.nan
    rows = rows.astype(np.float32)
    everyone = np.ones(40, bool)

    def dense(params, row):
        return (jnp.tanh(params["first"] @ row) @ params["second"]).sum()

    privatizer = jaxdp.privatize(0.5, noise_multiplier=1.3, divisor=32, exact=True)
    in_floats = jaxdp.clipped_grad(dense, clip_norm=0.5)
    by_factors = in_floats.on_grid(privatizer.grid)
    formed = jaxdp.clipped_grad(dense, clip_norm=0.5, engine="vmap").on_grid(privatizer.grid)
    grid = privatizer.grid
    unit = float(grid.at().unit)
    total, of_formed = (
        jax.device_get(sums(params, rows, everyone).grads) for sums in (by_factors, formed)
    )
    for name, leaf in in_floats(params, rows).grads.items():
        assert total[name].dtype == np.int32
        assert total[name].shape == leaf.shape
        lengths = 0.5 * 40 * (1 / unit if name == "first" else 2.0**-16)
        for sums in (total, of_formed):
            bound = lengths + 40 * grid.step
            np.testing.assert_allclose(sums[name] * grid.step, leaf, atol=bound)
    # Nearer than the bound, as roundings do not add up, but not equal to formed gradients.
    error = (total["first"] - of_formed["first"]) * grid.step
    assert 0 < np.linalg.norm(error) < 0.5 * 40 / unit
    longest = grid.longest
    for row in (0, 7, 39):
        one = np.arange(40) == row
        alone, without = (
            jax.device_get(by_factors(params, rows, mask).grads) for mask in (one, ~one)
        )
        squares = 0
        for name, leaf in alone.items():
            assert (leaf + without[name] == total[name]).all()
            squares += int((leaf.astype(object) ** 2).sum())
        assert squares <= longest
    assert squares > 0.97 * longest  # the last gradient is clipped


def test_settings_without_a_grid_are_refused():
    with pytest.raises(ValueError, match="noise_multiplier must be positive and finite"):
        jaxdp.privatize(1.0, noise_multiplier=0.0, divisor=8, exact=True)
    schedule = jaxdp.privatize(1.0, noise_multiplier=lambda t: 1.0, divisor=8, exact=True)
    with pytest.raises(ValueError, match="steps must be planned for exact noise"):
        schedule.grid.at(0)
    with pytest.raises(ValueError, match="is too large for exact noise"):
        jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=1e8, exact=True)
    privatizer = jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=8, exact=True, key=KEY)
    with pytest.raises(TypeError, match=r"int32 sums of a grid.*float32"):
        privatizer.update(jnp.zeros(3), privatizer.init(None))
    with pytest.raises(ValueError, match=r"clip norm 2.0, got 1.0"):
        jaxdp.clipped_grad(loss, clip_norm=2.0).on_grid(privatizer.grid)


def last_bits(exact, value):
    """Returns how many noisy values near 0 have last bits that 1 + noise cannot have."""
    privatizer = jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=1.0, key=KEY, exact=exact)
    # Far below the last bit of a float32 near 1, and the last bit of the grid.
    unit, dtype = 2.0**-26, np.float32
    if exact:
        unit, dtype = privatizer.grid.step, np.int32
        value = value * math.isqrt(privatizer.grid.longest)
    sums = np.full(SAMPLES, value, dtype)
    noisy, _ = privatizer.update(sums, privatizer.init(None))
    noisy = np.asarray(noisy, np.float64)
    near = noisy[np.abs(noisy) < 2.0**-5]
    return np.count_nonzero(near / unit % 2)


@pytest.mark.slow
def test_last_bits_tell_a_sum_in_floats_and_no_sum_in_integers():
    """Mironov's attack (2012). Near 0, 1 + noise is a multiple of the last bit of a number near 1,
    and noise alone is not. The sensitivity is 1, and a delta of 1e-2 could not explain it."""
    assert last_bits(exact=False, value=0.0) > 0.02 * SAMPLES
    assert last_bits(exact=False, value=1.0) == 0
    without, present = (last_bits(exact=True, value=value) for value in (0, 1))
    # phi(0) and phi(1), times the width, times a half.
    for count, density in ((without, 0.399), (present, 0.242)):
        expected = SAMPLES * density * 2.0**-5
        assert abs(count - expected) < 6 * math.sqrt(expected)


# --- Training ------------------------------------------------------------------------------------

CLASSES = 10
PARAMS = {"kernel": np.zeros((64, CLASSES), np.float32), "bias": np.zeros(CLASSES, np.float32)}


def loss(params, example):
    logits = example["row"] @ params["kernel"] + params["bias"]
    return jaxdp.losses.softmax_cross_entropy(logits, example["label"])


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = (digits.data[:300] / 16).astype(np.float32)
    return data.from_arrays(row=rows, label=digits.target[:300], num_classes=CLASSES)


@pytest.fixture(scope="module")
def trainer():
    sampler = data.PoissonSampler(300, 0.1)
    return finetune.dp_sgd(
        loss, optax.sgd(1.0), sampler=sampler, clip_norm=0.5, noise_multiplier=1.3, exact=True
    )


@pytest.mark.slow
def test_a_step_is_the_integers_of_its_examples_and_the_noise_of_its_key(trainer, digits):
    state = trainer.init(PARAMS)
    rows = np.arange(0, 300, 11)
    total = trainer.sums(state, digits, rows)
    grid = trainer.privatizer.grid
    gradient = jaxdp.clipped_grad(loss, clip_norm=0.5)
    batch = digits.gather(rows)
    expected = gradient(PARAMS, batch).grads
    for name, leaf in total.items():
        assert leaf.dtype == jnp.int32
        bias = len(rows) * grid.step + 0.5 * len(rows) * 2.0**-16
        np.testing.assert_allclose(np.asarray(leaf) * grid.step, expected[name], atol=bias + 1e-5)
    # The order of a batch does not matter, bit for bit.
    shuffled = trainer.sums(state, digits, np.random.default_rng(0).permutation(rows))
    total, shuffled = jax.device_get((total, shuffled))
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), total, shuffled))
    drawn = noise.rounded_gaussian(state.noise.key, total, grid.bits, number=state.noise.step)
    mean, _ = trainer.privatizer.update(total, state.noise)
    steps = jax.tree.map(lambda x, y: (x + np.asarray(y)) * grid.step / 30, total, drawn)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), mean, steps)
    # The whole step pays what a step with float noise pays.
    assert trainer.event(0, 7) == finetune.dp_sgd(
        loss, optax.sgd(1.0), sampler=trainer.sampler, clip_norm=0.5, noise_multiplier=1.3
    ).event(0, 7)
    assert len(trainer.physical(state, digits).sizes) == 1


@pytest.mark.slow
def test_a_run_is_paid_and_resumes_bit_for_bit(trainer, digits, tmp_path):
    def run(steps, folder, name):
        ledger = Ledger(tmp_path / f"{name}.sqlite")
        if name not in ledger.names():
            ledger.register(name, adjacency="add_remove", unit="example", epsilon=50.0, delta=1e-5)
        return finetune.fit(
            trainer,
            PARAMS,
            digits,
            steps=steps,
            account=ledger.account(name),
            workdir=tmp_path / folder,
            checkpoint_every=2,
            seed=bytes(16),
        )

    whole = run(4, "whole", "one")
    run(2, "parts", "two")
    parts = run(4, "parts", "two")
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), whole.params, parts.params))


@pytest.mark.slow
def test_a_gradient_does_not_depend_on_the_row_of_its_example():
    """The assumption of the grid, on this platform, for convolutions."""

    def of_image(params, image):
        out = jax.lax.conv_general_dilated(
            image[None], params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.square(jax.nn.relu(out)).sum()

    rng = np.random.default_rng(5)
    images = rng.normal(size=(21, 9, 9, 3)).astype(np.float32)
    params = jnp.asarray(rng.normal(size=(3, 3, 3, 8)), jnp.float32)
    privatizer = jaxdp.privatize(1.0, noise_multiplier=1.0, divisor=20, exact=True)
    total = jaxdp.clipped_grad(of_image, clip_norm=1.0).on_grid(privatizer.grid)
    order = rng.permutation(21)
    one = total(params, images, jnp.ones(21, bool)).grads
    assert (one == total(params, images[order], jnp.ones(21, bool)).grads).all()
    # Without an example, and with zeros in its place, the others add what they added.
    present = np.arange(21) != 4
    without = total(params, images * present[:, None, None, None], jnp.asarray(present)).grads
    alone = total(params, images, jnp.asarray(~present)).grads
    assert (one == without + alone).all()


LINEAR = {"kernel": np.ones((6, 2), np.float32), "bias": np.zeros(2, np.float32)}


def linear_loss(params, example):
    """The gradient of an example is the example, long or short."""
    products = params["kernel"] * example["row"][:, None]
    return (products.sum() + params["bias"].sum()) * example["length"]


@pytest.fixture(scope="module")
def lengths(digits):
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(40, 6)).astype(np.float32)
    return data.from_arrays(row=rows, length=np.geomspace(1e-3, 10, 40).astype(np.float32))


EXACT = {
    "adp_alloc": {"schedule": finetune.step_noise(0.5, 1)},
    "adp_clip": {"count_noise": 4.0},
    "adp_clip, parts": {"count_noise": 4.0},
    "sla_clip": {"slots": 3},
    "gep": {"basis_size": 2, "groups": 1, "residual_clip_norm": 0.5},
}


def method_of(name, source, **changes):
    kind, _, parts = name.partition(", ")
    options = {"sampler": data.PoissonSampler(40, 0.5), "clip_norm": 0.5, "noise_multiplier": 1.3}
    if parts:
        options["clip_norm"] = {"kernel": 0.3, "bias": 0.4}
    if kind == "gep":
        options["anchors"] = source.gather(np.arange(4))
    make = getattr(finetune, kind)
    trainer = make(linear_loss, optax.sgd(1.0), **options, **EXACT[name], **changes)
    return trainer.planned(4)


@pytest.fixture
def standard_promotion():
    """Query methods count indicators and places, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", EXACT)
def test_exact_sums_of_every_method_are_those_in_floats(name, lengths):
    exact, floats = (method_of(name, lengths, exact=exact) for exact in (True, False))
    state = exact.refreshed(exact.init(LINEAR))
    grid = exact.privatizer.grid.at(0)
    rows = np.arange(40)
    total = exact.sums(state, lengths, rows)
    expected = floats.sums(state, lengths, rows)
    assert jax.tree.structure(total) == jax.tree.structure(expected)
    for sums, in_floats in zip(*map(jax.tree.leaves, (total, expected)), strict=True):
        assert sums.dtype == jnp.int32
        bias = 40 * float(grid.step) + 40 * 2.0**-15
        np.testing.assert_allclose(np.asarray(sums) * float(grid.step), in_floats, atol=bias)
    # An example moves the sum by the integers that it has alone, which are short.
    longest = int(grid.high) * 2**32 + int(grid.low)
    for row in (0, 20, 39):
        without = exact.sums(state, lengths, np.delete(rows, row))
        alone = exact.sums(state, lengths, rows[[row]])
        squares = 0
        for whole, rest, own in zip(*map(jax.tree.leaves, (total, without, alone)), strict=True):
            assert (np.asarray(whole) == np.asarray(rest) + np.asarray(own)).all()
            squares += int(np.sum(np.asarray(own).astype(object) ** 2))
        assert squares <= longest
    assert squares > 0.98 * longest  # the last one is clipped, and uses what it may
    assert exact.event(0, 4) == floats.event(0, 4)


@pytest.mark.slow
def test_the_grid_of_a_schedule_is_that_of_each_step(lengths):
    trainer = method_of("adp_alloc", lengths, exact=True)
    grid = trainer.privatizer.grid
    state = trainer.init(LINEAR)
    key = state.noise.key
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.int32), LINEAR)

    for step in range(4):
        sigma = trainer.privatizer.multiplier_at(step)
        assert float(grid.at(step).step) == pytest.approx(sigma * 0.5 * 2.0**-grid.bits)
        at_step = noise.PrivatizeState(key, jnp.int32(step))
        mean, _ = trainer.privatizer.update(zeros, at_step)
        drawn = noise.rounded_gaussian(key, zeros, grid.bits, number=step)["kernel"]
        length = np.float32(sigma * 0.5 * 2.0**-grid.bits) / 20
        np.testing.assert_allclose(mean["kernel"], np.asarray(drawn) * length, rtol=1e-6)
        # A fit takes the noise of the step, and the sum on its grid.
        one = trainer.sums(state._replace(noise=at_step), lengths, np.array([39]))
        norm = np.linalg.norm(np.concatenate([np.ravel(x).astype(float) for x in one.values()]))
        assert norm == pytest.approx(2.0**grid.bits / sigma, rel=1e-4)
    after = noise.PrivatizeState(key, jnp.int32(4))
    assert np.isnan(trainer.privatizer.update(zeros, after)[0]["kernel"]).all()
    late = trainer.sums(state._replace(noise=after), lengths, np.array([39]))
    assert not np.asarray(late["kernel"]).any()
    with pytest.raises(ValueError, match="steps must be planned"):
        unplanned = finetune.adp_alloc(
            linear_loss,
            optax.sgd(1.0),
            sampler=trainer.sampler,
            clip_norm=0.5,
            noise_multiplier=1.3,
            exact=True,
            **EXACT["adp_alloc"],
        )
        unplanned.step(unplanned.init(LINEAR), lengths)


@pytest.mark.slow
def test_a_mesh_of_eight_has_the_sums_of_one_device(trainer, digits):
    """Each device has the rows that one device has in eight physical batches."""
    if jax.device_count() < 8:
        pytest.skip("fewer than eight devices")
    mesh = jax.make_mesh((8,), ("data",))
    one = dataclasses.replace(trainer, physical_batch_size=8)
    eight = dataclasses.replace(trainer, physical_batch_size=64, mesh=mesh)
    rows = np.arange(0, 300, 5)
    totals = [t.sums(t.init(PARAMS), digits, rows) for t in (one, eight)]
    for x, y in zip(*map(jax.tree.leaves, totals), strict=True):
        assert (np.asarray(x) == np.asarray(y)).all()
