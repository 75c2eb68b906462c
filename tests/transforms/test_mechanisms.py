"""What is the same for every mechanism of noise: its law, its keys, its shapes and its refusals.

The rows of tests/transforms/mechanisms.py are the mechanisms. Each check has a broken twin.

Statistical tests use fixed keys, so they are deterministic. Over the choice of key, a right
mechanism fails a check of its law with probability 1e-6, and one of independence with probability
below 1e-5. A scale that is off by 0.7 or 1.3 is rejected with a p-value below 1e-12."""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp.transforms import chacha, noise
from tests.compilations import compilations
from tests.transforms.mechanisms import LAWS, REFUSED, ROWS, Rounded, is_of_integers, p_value

KEY = noise.stream(bytes(range(16)), "test")
SAMPLES = 40_000
# So few that discrete noise alone has its short program. Together they have the long one.
FEW = 32
ACCEPT, REJECT = 1e-6, 1e-12

# One of each kind, and of each class of strategies, for what does not depend on the scale.
KINDS = list({name.split(", ")[0]: name for name in reversed(ROWS)}.values())
KINDS += ["correlated, blt", "correlated, inverse"]
# Sums have the program of discrete Laplace noise.
KINDS.remove("sums, epsilon 1")
ONE = jnp.int32(1)


@functools.cache
def row_of(name):
    return ROWS[name]()


TRACED = [name for name in KINDS if row_of(name).is_traced]


def flat(drawn):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(drawn)])


@functools.cache
def sample(row, draw_key=0, number=0):
    """Returns SAMPLES values, those of two leaves where the row takes trees."""
    key = jax.random.fold_in(KEY, draw_key) if draw_key else KEY
    zeros = np.zeros(SAMPLES, np.float32)
    if row.takes_trees:
        zeros = {"a": zeros[: SAMPLES // 2], "b": zeros[: SAMPLES // 2]}
    return flat(row.draw(key, zeros, number))


def check_law(row):
    values = sample(row)
    law = row.law(row.scale)
    assert p_value(values, law) > ACCEPT
    if is_of_integers(law):
        assert (values == np.round(values)).all()
    for factor in row.wrong:
        assert p_value(values, row.law(factor * row.scale)) < REJECT


def check_keys(row):
    """Checks that equal keys and numbers give equal bits, others independent ones, and that no
    further draw compiles."""
    drawn = sample(row)
    np.testing.assert_array_equal(drawn, sample.__wrapped__(row))
    with compilations() as programs:
        sample(row, 0, 1)
    assert not programs
    uniform = lambda values: row.law(row.scale).cdf(values.astype(float))  # noqa: E731
    this, other, later = map(uniform, (drawn, sample(row, 1), sample(row, 0, 1)))
    half = SAMPLES // 2
    pairs = [(this, other), (this, later), (this[:half], this[half:])]
    pairs += [(this[lag:], this[:-lag]) for lag in (1, 2, 4, 100)]
    for x, y in pairs:
        assert (x != y).any()
        for f in (lambda u: u, lambda u: abs(u - 0.5)):
            if np.ptp(f(x)) > 1e-9:
                assert abs(np.corrcoef(f(x), f(y))[0, 1]) < 5 / math.sqrt(x.size)


def check_shapes(row):
    tree = {
        "half": jnp.zeros((2, 3), jnp.bfloat16),
        "count": jnp.zeros((), jnp.int32),
        # With it the tree has as many values as `check_programs` draws, by the same program.
        "abstract": jax.ShapeDtypeStruct((FEW - 7,), jnp.float32),
        "empty": jnp.zeros((0, 5)),
        "none": None,
    }
    if row.reads_values:
        del tree["abstract"]
    arrays = [np.zeros(0), np.zeros(5)] + [np.zeros((0, 5)), np.zeros((2, 3))] * row.is_traced
    for like in [tree, {"empty": tree["empty"]}] if row.takes_trees else arrays:
        drawn = row.draw(KEY, like, 0)
        assert jax.tree.structure(drawn) == jax.tree.structure(like)
        for leaf, zeros in zip(jax.tree.leaves(drawn), jax.tree.leaves(like), strict=True):
            assert leaf.dtype == row.dtype and leaf.shape == zeros.shape
    if row.has_float64:
        with jax.enable_x64(True):
            wide = row.draw(KEY, jnp.zeros(SAMPLES, jnp.float64), 0)
        assert wide.dtype == np.float64
        assert p_value(wide, row.law(row.scale)) > ACCEPT


def on_devices(draw, *args):
    """Runs `draw` on each device for its own rows of the arguments."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    return jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=rows, out_specs=rows))(*args)


def check_programs(row):
    """Checks that a draw of a program, for each device and key and number, is the draw alone.

    Each device maps over two keys, and for each over two numbers with one value, whose several
    noises are the caller's choice. Floats are equal up to rounding.
    """
    count = 2 * jax.device_count()
    keys, zeros = jax.random.split(KEY, count), np.zeros((count, FEW), np.float32)
    numbers = np.arange(count, dtype=np.int32)
    of_numbers = jax.vmap(row.draw, in_axes=(None, None, 0))
    together = on_devices(jax.vmap(of_numbers, in_axes=(0, 0, None)), keys, zeros, numbers)
    alone = [
        [row.draw(keys[i], zeros[i], number) for number in numbers[i - i % 2 :][:2]]
        for i in range(count)
    ]
    equal = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6 * row.scale)
    if is_of_integers(row.law(row.scale)):
        equal = np.testing.assert_array_equal
    equal(together, np.array(alone))


SAME = "key and number are the same for 2 values along an axis of jax.vmap"
SHARED = {
    "values": lambda draw: jax.vmap(lambda x: draw(KEY, x, ONE))(jnp.zeros((2, 3))),
    "values of a compiled function": lambda draw: jax.vmap(jax.jit(lambda x: draw(KEY, x, ONE)))(
        jnp.zeros((2, 3))
    ),
    "one of two axes": lambda draw: jax.vmap(
        jax.vmap(lambda x, key: draw(key, x, ONE)), in_axes=(0, None)
    )(jnp.zeros((2, 2, 3)), jax.random.split(KEY, 2)),
}


def check_reuse(row):
    """Checks that one noise for several values is refused, whose difference would have none."""
    for share in SHARED.values():
        with refused(ValueError, SAME):
            share(row.draw)
    with refused(ValueError, r"(?s)mesh axes \('data',\) and key does not.*psum.*axis_index"):
        on_devices(lambda x: row.draw(KEY, x, ONE), np.zeros((jax.device_count(), 3), np.float32))


@contextlib.contextmanager
def refused(error, words):
    """Raises AssertionError where `pytest.raises` calls the test failed."""
    try:
        with pytest.raises(error, match=words):
            yield
    except pytest.fail.Exception as failure:
        raise AssertionError(str(failure)) from failure


@contextlib.contextmanager
def words_drawn():
    """Yields a list that grows where a draw of a new size asks for words of the cipher."""
    calls, block = [], chacha.block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chacha, "block", lambda *args: calls.append(args) or block(*args))
        yield calls


def check_refusals(row):
    """Checks that wrong arguments are refused by name and value before words are drawn."""
    pair = jax.random.split(KEY)
    cases = [(lambda key, call=call: call(key), *rest) for call, *rest in row.refused]
    if row.checks_key:
        cases += [
            (lambda _: row.draw(jax.random.PRNGKey(0), REFUSED, 0), TypeError, "typed key"),
            (lambda _: row.draw(pair, REFUSED, 0), ValueError, r"shape \(\), got \(2,\)"),
        ]
    with words_drawn() as words:
        for call, error, text in cases:
            with refused(error, text):
                call(KEY)
        assert not words


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_noise_has_its_law_and_scale_and_no_other(name):
    check_law(row_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_keys_and_numbers_decide_the_bits(name):
    check_keys(row_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_noise_is_shaped_like_the_tree(name):
    check_shapes(row_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_programs_draw_what_a_draw_alone_has(name):
    check_programs(row_of(name))


@pytest.mark.parametrize("name", TRACED)
def test_one_key_for_several_values_is_refused(name):
    check_reuse(row_of(name))


@pytest.mark.parametrize("name", KINDS)
def test_wrong_arguments_are_refused_before_the_draw(name):
    check_refusals(row_of(name))


# --- Broken twins --------------------------------------------------------------------------------


def normals(key, zeros, number):
    return 37.5 * jax.random.normal(jax.random.fold_in(key, number), zeros.shape)


def of_other_bits_under_vmap(key, zeros, number):
    """The bits of "rbg" under `vmap` are those of the first key."""
    words = jax.random.key_data(jax.random.fold_in(key, number))[:4]
    return 37.5 * jax.random.normal(jax.random.wrap_key_data(words, impl="rbg"), zeros.shape)


def recompiling(key, zeros, number):
    return jax.jit(lambda tree: jax.tree.map(jnp.negative, tree))(gaussian(key, zeros, number))


def sharing(key, zeros, number):
    drawn = gaussian(key, zeros, number)
    return dict.fromkeys(drawn, drawn["a"])


def drawing_first(key):
    noise.gaussian(key, np.zeros(9), 1.0)
    noise.gaussian(key, np.zeros(9), -1.0)


def gaussian(key, zeros, number):
    return noise.gaussian(key, zeros, 37.5, number=number)


BROKEN = {
    "floats for integers": (
        check_law,
        {"law": lambda scale: Rounded(stats.norm(scale=scale)), "wrong": ()},
    ),
    "another law": (check_law, {"law": lambda scale: stats.laplace(scale=scale)}),
    "another mean": (
        check_law,
        {"draw": lambda *args: jax.tree.map(lambda x: x + 2, gaussian(*args))},
    ),
    "a key that is forgotten": (check_keys, {"draw": lambda key, *args: gaussian(KEY, *args)}),
    "a number that is forgotten": (check_keys, {"draw": lambda key, x, n: gaussian(key, x, 0)}),
    "a program for each draw": (check_keys, {"draw": recompiling}),
    "leaves that share noise": (check_keys, {"draw": sharing}),
    "small floats": (
        check_shapes,
        {"draw": lambda *a: jax.tree.map(lambda x: x.astype(jnp.bfloat16), gaussian(*a))},
    ),
    "bits of the first key": (check_programs, {"draw": of_other_bits_under_vmap}),
    "one key for all values": (check_reuse, {"draw": normals}),
    "a draw before the refusal": (
        check_refusals,
        {"refused": ((drawing_first, ValueError, "std must be at least 0, got -1.0"),)},
    ),
    "a scale that is accepted": (
        check_refusals,
        {"refused": ((lambda key: None, ValueError, "std must be"),)},
    ),
    "a key without a type": (check_refusals, {"draw": lambda key, x, n: x}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_mechanism_is_found(how):
    check, changes = BROKEN[how]
    with pytest.raises(AssertionError):
        check(dataclasses.replace(row_of("gaussian"), **changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_the_laws_of_the_table_are_told_apart(name):
    row = row_of(name)
    for other, (_, law) in LAWS.items():
        if other != name:
            assert p_value(sample(row), law(scale=row.scale)) < REJECT


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if "discrete_laplace" in name])
def test_discrete_noise_is_symmetric_and_not_rounded_noise(name):
    row = row_of(name)
    assert p_value(-sample(row), row.law(row.scale)) > ACCEPT
    if row.scale < 1:
        assert p_value(sample(row), Rounded(stats.laplace(scale=row.scale))) < REJECT


@pytest.mark.slow
def test_the_grid_of_rounded_normals_does_not_show():
    residues = np.bincount(sample(row_of("rounded_gaussian, 20 bits")) % 16, minlength=16)
    assert stats.chisquare(residues).pvalue > ACCEPT
