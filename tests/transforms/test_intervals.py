"""`jaxdp.interval`: rounding, tightness, losses, models, composition and errors."""

import functools
import itertools
import math
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxdp
from jaxdp.models.layers import WSConv
from jaxdp.transforms import boxes, interval_rules, intervals, losses


def _quick_compile():
    """Options for programs that run once: fusing them and optimising the result would be most of
    the time."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    }
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(1.0).compile()
    except jax.errors.JaxRuntimeError:  # another release of XLA
        return {}
    return options


QUICK = _quick_compile()
UNIT = 2.0**-24  # half of the machine epsilon of float32
TINY = float(np.finfo(np.float32).tiny)


def box(lower, upper):
    return jaxdp.Interval(np.asarray(lower, np.float32), np.asarray(upper, np.float32))


def around(tree, radius):
    """Returns the box of numbers within `radius` of a tree of arrays."""
    return jaxdp.Interval(
        jax.tree.map(lambda x: np.asarray(x - radius, x.dtype), tree),
        jax.tree.map(lambda x: np.asarray(x + radius, x.dtype), tree),
    )


def is_interval(x):
    return isinstance(x, jaxdp.Interval)


def sample(box_, count, seed=0):
    """Samples `count` points of a box in float64, half of them corners, as a tree of [count,
    ...]."""
    rng = np.random.default_rng(seed)

    def points(lower, upper):
        low, high = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
        where = rng.random((count, *low.shape))
        where[: count // 2] = where[: count // 2] > 0.5
        return np.clip(low + where * (high - low), low, high)

    return jax.tree.map(points, box_.lower, box_.upper)


def in_float64(fun, *args):
    """Evaluates `jax.jit(fun)` in float64 and returns a tree of NumPy arrays."""
    # Flax mixes float32 into float64
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
    ):
        return jax.tree.map(np.asarray, jax.jit(fun, compiler_options=QUICK)(*args))


def bounded(fun, **kwargs):
    """Returns `jax.jit(jaxdp.interval(fun))`, compiled quickly, with NumPy arrays as results.

    What a test does with these compiles nothing."""
    compiled = jax.jit(jaxdp.interval(fun, **kwargs), compiler_options=QUICK)
    return lambda *args, **kwargs: jax.device_get(compiled(*args, **kwargs))


def assert_inside(bounds, values, lead=1):
    """Checks that every value, with `lead` leading axes of samples, lies in its interval."""
    found = jax.tree.leaves(bounds, is_leaf=is_interval)
    for x, value in zip(found, jax.tree.leaves(values), strict=True):
        assert np.isfinite(value).all()
        assert value.shape[lead:] == x.shape
        low, high = ends(x)
        assert ((value >= low) & (value <= high)).all(), np.abs(
            value - np.clip(value, low, high)
        ).max()


def ends(result):
    """Endpoints in float64: comparing float32 with a Python float would round the latter."""
    return np.asarray(result.lower, np.float64), np.asarray(result.upper, np.float64)


def contains(result, value):
    low, high = ends(result)
    return bool((low <= value).all() and (value <= high).all())


def width(bounds):
    every = (ends(x) for x in jax.tree.leaves(bounds, is_leaf=is_interval))
    return max(float(np.max(high - low)) for low, high in every)


# --- rounding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16])
def test_slack_exceeds_the_error_of_any_order_of_operations(dtype):
    unit = Fraction(float(jnp.finfo(dtype).eps)) / 2
    for roundings in (1, 2, 10, 1000, 10**4, 10**5, 10**6, 3 * 10**6):
        slack = boxes.slack(dtype, roundings)
        if roundings * unit >= Fraction(1, 4):
            assert slack == math.inf
            continue
        gamma = roundings * unit / (1 - roundings * unit)
        # What the slack adds to terms, (1 + s), survives an error of gamma, and two more roundings
        # when it is applied.
        assert (1 + Fraction(slack) * (1 - unit)) * (1 - gamma) * (1 - unit) >= 1
        assert slack < 2.1 * gamma + 8 * unit or roundings * unit > 0.04


def every_float(count, seed):
    """Draws normal float32 numbers of all exponents."""
    bits = np.random.default_rng(seed).integers(0, 2**32, 2 * count, dtype=np.uint32)
    x = bits.view(np.float32)
    return x[np.isfinite(x) & (np.abs(x) >= TINY)][:count]


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
def test_arithmetic_contains_the_exact_result_at_all_magnitudes(name):
    x, y = every_float(200_000, 0), every_float(200_000, 1)
    y[:1000] = -x[:1000] * np.float32(1 + 1e-7)
    result = jax.device_get(jax.jit(jaxdp.interval(getattr(jnp, name)))(x, y))
    exact = getattr(np, name)(x.astype(np.float64), y.astype(np.float64))
    assert_inside(result, exact, lead=0)
    ordinary = (np.abs(exact) > 1e-30) & (np.abs(exact) < 1e38)
    assert (result.width[ordinary] <= 32 * UNIT * np.abs(exact[ordinary])).all()


# Functions, and the range in which each is asked.
ELEMENTARY = {
    "exp": (-100, 89),
    "exp2": (-140, 129),
    "expm1": (-50, 89),
    "log": (1e-37, 1e38),
    "log1p": (-0.9999, 1e6),
    "tanh": (-20, 20),
    "logistic": (-100, 100),
    "erf": (-7, 7),
    "erfc": (-7, 10),
    "sinh": (-90, 90),
    "rsqrt": (1e-37, 1e38),
    "sin": (-1000, 1000),
    "cos": (-1e6, 1e6),
}


@pytest.mark.slow
def test_elementary_functions_are_as_accurate_as_assumed():
    from scipy import special

    def inputs(low, high):
        spaced = np.geomspace if low > 0 else np.linspace
        return spaced(low, high, 100_001).astype(np.float32)

    x = {name: inputs(*ends) for name, ends in ELEMENTARY.items()}
    found = jax.jit(jaxdp.interval(lambda x: {name: getattr(lax, name)(x[name]) for name in x}))(x)
    others = {"logistic": special.expit, "erf": special.erf, "erfc": special.erfc}
    others["rsqrt"] = lambda v: 1 / np.sqrt(v)
    for name in ELEMENTARY:
        reference = others.get(name) or getattr(np, name)
        assert_inside(found[name], reference(x[name].astype(np.float64)), lead=0)


def hard_sums(n):
    rng = np.random.default_rng(n)
    big = rng.normal(size=n // 4) * 1e6
    return {
        "cancels": rng.permutation(np.concatenate([big, -big, rng.normal(size=n - 2 * (n // 4))])),
        "one large": np.concatenate([[2.0**24], np.ones(n - 1)]),
        "one accumulator stalls": np.concatenate([[1.0], np.full(n - 1, UNIT * 0.99)]),
        "decreasing": 1.0 / np.arange(1, n + 1) ** 2,
        "magnitudes": np.exp(rng.uniform(-30, 30, n)) * rng.choice([-1, 1], n),
    }


@pytest.mark.slow
def test_long_sums_contain_the_exact_sum():
    n = 250_000
    cases = {name: x.astype(np.float32) for name, x in hard_sums(n).items()}
    together = np.stack(list(cases.values()))
    both = jaxdp.interval(lambda x: (jnp.sum(x, axis=1), jnp.cumsum(x, axis=1)[:, -1]))
    sums, running = jax.device_get(jax.jit(both)(together))
    for row, (name, x) in enumerate(cases.items()):
        exact, size = math.fsum(x.tolist()), math.fsum(np.abs(x).tolist())
        for result in (sums, running):
            assert contains(result[row], exact), name
            assert float(result.width[row]) <= 2.5 * n * UNIT * size, name
    # Rounding is not negligible here: a single accumulator would be off by more than half of the
    # largest entry.
    stalls = cases["one accumulator stalls"]
    assert abs(np.cumsum(stalls)[-1] - math.fsum(stalls.tolist())) > 0.9 * UNIT * (n - 1)


@pytest.mark.slow
def test_long_dot_products_contain_the_exact_value():
    n = 20_000
    weights = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    weights[:, 2] = 1
    x = np.stack([v.astype(np.float32) for v in hard_sums(n).values()])
    radius = np.abs(weights) * np.float32(1e-4)
    low, high = weights - radius, weights + radius
    matmul = jaxdp.interval(jnp.matmul)

    def products(x, x_box, weights, box_):
        return matmul(x, weights), matmul(x, box_), matmul(x_box, box_)

    found = jax.jit(products)(x, box(x, x), weights, box(low, high))
    points, bounds, both = jax.device_get(found)
    length = interval_rules.dot_product((((1,), (0,)), ((), ())), n)[0]
    assert length < 200
    for i, j in itertools.product(range(len(x)), range(3)):
        row, exact = (
            x[i].astype(np.float64),
            math.fsum((x[i].astype(np.float64) * weights[:, j]).tolist()),
        )
        size = math.fsum(np.abs(row * weights[:, j]).tolist())
        assert contains(points[i, j], exact)
        assert points.width[i, j] <= 2.5 * (length + 20) * UNIT * size
        least, most = (
            math.fsum(np.where((row > 0) == s, row * low[:, j], row * high[:, j]).tolist())
            for s in (True, False)
        )
        for result in (bounds, both):
            (lower, upper), allowed = ends(result[i, j]), 2.5 * (length + 20) * UNIT * size
            assert least - allowed <= lower <= least <= most <= upper <= most + allowed


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 8), (16, 8), (16, 128)])
def test_compiled_programs_keep_the_blocks_of_long_dot_products(rows, columns):
    for n in (784, 20_000):
        length, multiply = interval_rules.dot_product((((1,), (0,)), ((), ())), n)
        x = np.ones((rows, n), np.float32)
        x[:, 0] = 2.0**24  # every further 1 is lost by the accumulator that holds it
        exact = 2.0**24 + n - 1
        y = np.ones((n, columns), np.float32)
        compiled = jax.jit(multiply).lower(x, y).compile()
        products = [
            compiled(x, y),
            jax.jit(jax.vmap(multiply, (0, None)))(np.stack([x, x]), y),
        ]
        for product in products:
            assert (np.abs(np.asarray(product, np.float64) - exact) <= length).all()
        lines = compiled.as_text().splitlines()
        assert all("lhs_batch_dims" in line for line in lines if " dot(" in line)


@pytest.mark.slow
def test_numbers_beyond_the_largest_and_below_the_smallest():
    def beyond(x):
        return (
            x * x,
            -x * x,
            jnp.log(x * x),
            jnp.square(x),
            x**3,
            jnp.sum(x * jnp.ones(9)),
            jnp.atan(jnp.log(x * x)),
        )

    logarithm = 60 * math.log(10)
    values = [1e60, -1e60, logarithm, 1e60, 1e90, 9e30, math.atan(logarithm)]
    for result, value in zip(
        jax.jit(jaxdp.interval(beyond))(np.float32(1e30)), values, strict=True
    ):
        assert contains(result, value)
    largest = float(np.finfo(np.float32).max)
    sums = jax.jit(jaxdp.interval(lambda x: (jnp.sum(x), jnp.dot(x, x))))(
        np.full(8, largest, np.float32)
    )
    assert contains(sums[0], 8 * largest) and contains(sums[1], 8 * largest**2)
    # A relative slack that underflows is replaced. Intermediate products that underflow do not make
    # the result zero.
    small, large = np.full(2, 1.1e-35, np.float32), np.array([1.1e30, 1.3e30], np.float32)
    exact = float(np.dot(small.astype(np.float64), large.astype(np.float64)))
    assert contains(bounded(jnp.dot)(box(small, small), large), exact)
    assert contains(bounded(jnp.prod)(np.array([1e-30, 1e-30, 1e30, 1e30], np.float32)), 1.0)


SIGNS = np.float32([1, -1, 2, -2, 1, 1, -1, 0.5])
SUMS = {
    "sum": jnp.sum,
    "cumulative": lambda x: jnp.cumsum(x)[-1],
    "scattered": lambda x: jnp.zeros(1).at[np.zeros(8, int)].add(x)[0],
    "dot": lambda x: jnp.dot(x, SIGNS),
    "convolution": lambda x: jnp.convolve(x, SIGNS, mode="valid")[0],
    "short": lambda x: jnp.dot(x[:4], x[4:] / 2e38),
    "long": lambda x: jnp.dot(jnp.tile(x[:4], 5), jnp.tile(x[4:] / 3e38, 5) / 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("product", ["tight", "rump"])
@pytest.mark.parametrize("name", SUMS)
def test_a_part_of_a_sum_that_overflows_is_no_bound_of_the_sum(name, product):
    rng = np.random.default_rng(3)
    x = (3.2e38 * rng.uniform(-1, 1, (300, 8))).astype(np.float32)
    radius = 1e37 * rng.uniform(0, 1, (300, 1)).astype(np.float32)
    function = SUMS[name]
    bounds = jax.jit(jax.vmap(jaxdp.interval(function, product=product)), compiler_options=QUICK)
    values = in_float64(jax.vmap(function), x.astype(np.float64))
    inner = bounds(jaxdp.Interval.point(x))
    outer = bounds(box(x - radius, x + radius))
    assert contains(inner, values) and contains(outer, values)
    # Most sums stay finite, although their parts exceed the largest float for many.
    assert np.mean(np.abs(values) < 3.4e38) > 0.2
    if product == "tight":
        assert (outer.lower <= inner.lower).all() and (inner.upper <= outer.upper).all()


@pytest.mark.parametrize("divisor", [2.0**126, 2.0**127, -(2.0**127), np.full(4, 2.0**127)])
def test_quotients_whose_reciprocal_would_be_flushed(divisor):
    x = np.float32([2.0**127, -(2.0**127), 3.4e38, 1.0])
    for program in (jaxdp.interval, lambda f: jax.jit(jaxdp.interval(f))):
        result = program(lambda x: x / np.asarray(divisor, np.float32))(jaxdp.Interval.point(x))
        assert contains(result, x.astype(np.float64) / divisor)
        # Half of an infinite box keeps its other end.
        half = program(lambda x: x / 2)(box(np.float32([1.0]), np.float32([np.inf])))
        assert 0.499 < float(half.lower[0]) <= 0.5 and float(half.upper[0]) == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("reducer", ["max", "min"])
@pytest.mark.parametrize(
    ("window", "stride", "padding"), [(2, 2, "VALID"), (3, 2, "SAME"), (2, 1, ((1, 1),))]
)
def test_derivatives_of_pooling_where_all_of_a_window_is_infinite(reducer, window, stride, padding):
    worst = -np.inf if reducer == "max" else np.inf
    function = getattr(lax, reducer)

    def pooled(x):
        return lax.reduce_window(x, np.float32(worst), function, (window,), (stride,), padding)

    def derivative(x):
        result, pull = jax.vjp(pooled, x)
        return pull(jnp.arange(1.0, 1.0 + len(result)))[0]

    rng = np.random.default_rng(0)
    x = rng.choice(np.float32([worst, worst, worst, 1, 2, -5]), (30, 7))
    values = jax.jit(jax.vmap(derivative))(x)
    bounds = jax.jit(jax.vmap(jaxdp.interval(derivative)))
    for result in (bounds(x), bounds(jaxdp.Interval.point(x))):
        assert contains(result, np.asarray(values, np.float64))


@pytest.mark.slow
def test_numbers_that_are_not_finite_never_give_a_wrong_finite_bound():
    def functions(x, y):
        return {
            "difference": x - y,
            "product": x * y,
            "quotient": x / y,
            "dot": jnp.dot(x[None], y[None]),
            "sorted": jnp.sort(jnp.stack([x - y, x * 0, y])),
            "largest": jnp.max(jnp.stack([x - y, x])),
            "softmax": jax.nn.softmax(jnp.stack([x, y, x])),
            "sum": jnp.sum(jnp.stack([x, -x, y])),
            "relu": jax.nn.relu(x - y),
            "clipped": jnp.clip(x - y, -1, 1),
            "gradient": jax.grad(lambda z: losses.softmax_cross_entropy(z, jnp.int32(0)))(
                jnp.stack([x, y])
            ),
            "integer": (x - y).astype(jnp.int32),
            "where": jnp.where(x - y > 0, x, y),
        }

    bounds = jax.jit(jax.vmap(jaxdp.interval(functions)), compiler_options=QUICK)
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0, 3e38, -3e38], np.float32)
    x, y = (v.ravel() for v in np.meshgrid(specials, specials))
    values = jax.jit(jax.vmap(functions), compiler_options=QUICK)(x, y)
    nan = np.isnan(x) | np.isnan(y)
    for name, result in bounds(x, y).items():
        value, (low, high) = np.asarray(values[name], np.float64), ends(result)
        # NaN of a NaN, not of numbers too large
        lost = nan.reshape(-1, *(1,) * (value.ndim - 1)) & np.isnan(value)
        assert (np.isinf(low) | np.isinf(high) | ~lost).all(), name
        if name == "integer":
            sure = np.isfinite(x) & np.isfinite(y)
            value = np.clip(
                np.where(sure, x, 0).astype(np.float64) - np.where(sure, y, 0), -(2**31), 2**31 - 1
            )
        # An infinite value of the function in floating point may stand for a number too large.
        low, high = (
            np.where(end > 3.4e38, np.inf, np.where(end < -3.4e38, -np.inf, end))
            for end in (low, high)
        )
        assert (((low <= value) & (value <= high)) | np.isnan(value)).all(), name


# --- tightness ----------------------------------------------------------------------------------


def exact_products(a, b):
    """Computes the smallest and largest a @ b in float64 for boxes of matrices with independent
    entries."""
    corners = [
        np.asarray(x, np.float64)[:, :, None] * np.asarray(y, np.float64)[None]
        for x in a
        for y in b
    ]
    return np.min(corners, axis=0).sum(1), np.max(corners, axis=0).sum(1)


@pytest.mark.slow
def test_products_are_exact_where_they_claim_to_be():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return np.sort(rng.normal(size=(2, *shape)), axis=0).astype(np.float32)

    short = draw(3, 4), draw(4, 5)
    long = draw(3, 40), draw(40, 5)
    outer = draw(6, 1), draw(1, 7)

    def check(result, expected, rtol=2e-5):
        scale = np.abs(expected).max()
        for end, exact in zip(ends(result), expected, strict=True):
            np.testing.assert_allclose(end, exact, rtol=0, atol=rtol * scale)

    rectified = exact_products(np.maximum(long[0], 0), long[1])
    reversed_ = tuple(v.T for v in rectified)
    cases = [
        (jnp.matmul, box(*short[0]), box(*short[1]), exact_products(*short)),
        (jnp.matmul, long[0][0], box(*long[1]), exact_products((long[0][0],), long[1])),
        (jnp.matmul, box(*long[0]), long[1][0], exact_products(long[0], (long[1][0],))),
        (jnp.matmul, box(*outer[0]), box(*outer[1]), exact_products(*outer)),
        (lambda h, w: jax.nn.relu(h) @ w, box(*long[0]), box(*long[1]), rectified),
        (lambda w, h: w.T @ jax.nn.relu(h).T, box(*long[1]), box(*long[0]), reversed_),
    ]

    def products(operands):
        return [jaxdp.interval(f)(*pair) for (f, *_), pair in zip(cases, operands, strict=True)]

    found = jax.jit(products)([case[1:3] for case in cases])
    for result, (*_, expected) in zip(found, cases, strict=True):
        check(result, expected)
    # The smallest product of each entry, by trying every corner of the box.
    entries = [(short[0][:, 1, k], short[1][:, k, 2]) for k in range(4)]
    every = [
        sum(
            float(a[i]) * float(b[j])
            for (a, b), i, j in zip(entries, corner[:4], corner[4:], strict=True)
        )
        for corner in itertools.product((0, 1), repeat=8)
    ]
    np.testing.assert_allclose(
        [min(every), max(every)], [end[1, 2] for end in exact_products(*short)], rtol=1e-12
    )


def test_other_products_are_at_most_twice_as_wide_and_midpoint_radius_at_most_half_wider():
    rng = np.random.default_rng(1)
    trials = [
        [
            np.sort(rng.normal(size=(2, *shape)) + rng.normal() * (t % 3), axis=0)
            for shape in ((3, 40), (40, 3))
        ]
        for t in range(20)
    ]
    trials.append([np.stack([-np.ones(shape), np.ones(shape)]) for shape in ((3, 40), (40, 3))])
    a, b = (np.stack(v).astype(np.float32) for v in zip(*trials, strict=True))
    exact = [exact_products(x, y) for x, y in zip(a, b, strict=True)]
    low, high = (np.stack(v) for v in zip(*exact, strict=True))
    for product, factor in (("tight", 2), ("rump", 1.5)):
        multiply = jax.jit(jax.vmap(jaxdp.interval(jnp.matmul, product=product)))
        result = jax.device_get(multiply(box(a[:, 0], a[:, 1]), box(b[:, 0], b[:, 1])))
        assert contains(result, low) and contains(result, high)
        ratio = np.asarray(result.width) / (high - low)
        assert ratio.max() <= factor * (1 + 1e-4)
        if product == "tight":
            # all entries cross zero: the bound is reached
            np.testing.assert_allclose(ratio[-1], 2, rtol=1e-4)


@pytest.mark.slow
def test_monotone_functions_are_exact_at_both_ends():
    low, high = np.float32(-1.5), np.float32(0.25)
    functions = [
        jnp.exp,
        jnp.tanh,
        jax.nn.sigmoid,
        jax.nn.relu,
        jnp.expm1,
        lambda x: jnp.maximum(x, -1),
        jnp.atan,
    ]
    functions += [
        lambda x: jnp.sqrt(x + 2),
        lambda x: jnp.log(x + 2),
        lambda x: x**3,
        lambda x: -lax.erf(x),
    ]
    together = lambda x: [fun(x) for fun in functions]  # noqa: E731
    at_ends = jax.jit(together, compiler_options=QUICK)(np.stack([low, high]))
    for result, values in zip(bounded(together)(box(low, high)), at_ends, strict=True):
        np.testing.assert_allclose(
            [result.lower, result.upper], np.sort(values), rtol=1e-5, atol=1e-6
        )
    squared = bounded(lambda x: x * x)(box(low, high))
    np.testing.assert_allclose([squared.lower, squared.upper], [0, 2.25], rtol=1e-6, atol=1e-30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rectify",
    [
        jax.nn.relu,
        lambda x: jnp.maximum(x, 0),
        lambda x: jnp.maximum(0, x),
        lambda x: -jnp.minimum(-x, 0),
        lambda x: jnp.where(x > 0, x, 0.0),
        lambda x: jax.nn.leaky_relu(x, 0.0),
    ],
)
def test_derivative_of_relu_is_exact(rectify):
    x = box([-2.0, -1.0, 1.0, -1.0], [-1.0, 1.0, 2.0, 0.5])
    result = bounded(jax.vmap(jax.grad(rectify)))(x)
    np.testing.assert_allclose(result.lower, [0, 0, 1, 0], atol=1e-6)
    np.testing.assert_allclose(result.upper, [0, 1, 1, 1], atol=1e-6)


@pytest.mark.slow
def test_derivative_of_the_larger_of_two_intervals():
    first, second = box([0.0, 2.0, 0.0], [1.0, 3.0, 2.0]), box([2.0, 0.0, 1.0], [3.0, 1.0, 3.0])
    result = bounded(jax.vmap(jax.grad(jnp.maximum)))(first, second)
    np.testing.assert_allclose([result.lower, result.upper], [[0, 1, 0], [0, 1, 1]], atol=1e-6)


def test_derivative_of_tanh_vanishes_where_it_saturates():
    x = box([-6.001, 5.999], [-5.999, 6.001])
    result = bounded(jax.vmap(jax.grad(jnp.tanh)))(x)
    exact = 1 - np.tanh(6.0) ** 2
    assert (np.asarray(result.upper) < 1.2 * exact).all() and (
        np.asarray(result.lower) > 0.8 * exact
    ).all()


@pytest.mark.slow
def test_softmax_gradient_uses_differences_of_logits():
    rng = np.random.default_rng(2)
    hidden = np.abs(rng.normal(size=(2, 5))).astype(np.float32)
    hidden.sort(axis=0)
    weights = rng.normal(size=(5, 3)).astype(np.float32) * 0.1 + rng.normal(size=(5, 1)).astype(
        np.float32
    )
    bias = np.zeros(3, np.float32)

    def gradient(b, w, h):
        return jax.grad(
            lambda b: losses.softmax_cross_entropy(jax.nn.relu(h) @ w + b, jnp.int32(1))
        )(b)

    given = around(bias, 0.01), around(weights, 0.01), box(*hidden)
    tight = bounded(gradient)(*given)
    logits = bounded(lambda b, w, h: jax.nn.relu(h) @ w + b)(*given)
    boxed = bounded(jax.grad(lambda z: losses.softmax_cross_entropy(z, jnp.int32(1))))(logits)
    loose = bounded(gradient, product="rump")(*given)
    points = [sample(x, 500, seed) for seed, x in enumerate(given)]
    assert_inside(tight, in_float64(jax.vmap(gradient), *points))
    assert (np.asarray(tight.width) < 0.5 * np.asarray(boxed.width)).all()
    assert (np.asarray(boxed.width) <= np.asarray(loose.width) * (1 + 1e-5)).all()
    # Columns of weights that are equal: probabilities are known exactly, whatever the hidden layer
    # does.
    same = bounded(gradient)(bias, np.ones((5, 3), np.float32), box(*hidden))
    np.testing.assert_allclose(same.lower, [1 / 3, -2 / 3, 1 / 3], atol=1e-5)
    np.testing.assert_allclose(same.upper, [1 / 3, -2 / 3, 1 / 3], atol=1e-5)


@pytest.mark.slow
def test_gradients_use_that_probabilities_sum_to_one(monkeypatch):
    rng = np.random.default_rng(3)
    params = {
        "a": rng.normal(size=(4, 6)),
        "w": rng.normal(size=(6, 3)) + 3 * rng.normal(size=(6, 1)),
    }
    params = jax.tree.map(lambda v: v.astype(np.float32), params)
    x = rng.normal(size=4).astype(np.float32)

    def gradient(params, x):
        def loss(params):
            return 0.5 * losses.softmax_cross_entropy(
                jax.nn.relu(x @ params["a"]) @ params["w"], jnp.int32(0)
            )

        return jax.grad(loss)(params)["a"]

    given = around(params, 0.02)
    tight = bounded(gradient)(given, x)
    assert_inside(tight, in_float64(jax.vmap(gradient, (0, None)), sample(given, 500), x))
    monkeypatch.setattr(interval_rules.products, "use_zero_sum", lambda *args: None)
    loose = bounded(lambda *args: gradient(*args))(given, x)
    active = np.asarray(loose.width) > 1e-3
    assert (
        active.any()
        and (np.asarray(tight.width)[active] < 0.7 * np.asarray(loose.width)[active]).all()
    )
    assert contains(loose, np.asarray(tight.lower, np.float64)) and contains(
        loose, np.asarray(tight.upper, np.float64)
    )


# --- losses -------------------------------------------------------------------------------------

SOFT = np.array([0.2, 0.0, 0.5, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], np.float32)


def labels_of(loss, classes):
    """Returns every kind of label that a loss accepts for a number of logits. None means a scalar
    logit."""
    if loss is losses.sigmoid_cross_entropy:
        return (
            [0, 1, 0.3]
            if classes is None
            else [SOFT[:classes], np.eye(10, dtype=np.float32)[0, :classes]]
        )
    if loss in (losses.squared_error, losses.absolute_error):
        return [0.7] if classes is None else [SOFT[:classes] - 1]
    if loss is losses.hinge and (classes is None or classes == 1):
        return [0, 1, -1] if classes is None else [np.array([1.0], np.float32), 0]
    one_hot = np.eye(classes, dtype=np.float32)[classes // 2]
    kinds = [0, np.uint8(classes - 1), one_hot]
    if loss is losses.softmax_cross_entropy:
        smooth = 0.9 * one_hot + np.float32(0.1 / classes)
        kinds += [smooth, 2.5 * SOFT[:classes]]
    return kinds


LOSSES = [
    *((losses.softmax_cross_entropy, k) for k in (1, 3, 10)),
    *((losses.sigmoid_cross_entropy, k) for k in (None, 1, 3)),
    *((losses.squared_error, k) for k in (None, 1, 3)),
    (losses.absolute_error, 3),
    *((losses.hinge, k) for k in (None, 1, 2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "classes"), LOSSES, ids=[f"{f.__name__}-{k}" for f, k in LOSSES])
def test_losses_and_their_gradients_contain_every_point(loss, classes):
    shape = () if classes is None else (classes,)
    labels = labels_of(loss, classes)
    apart, together = labels, []
    if loss is losses.softmax_cross_entropy:  # whose distributions share a program
        apart, together = labels[:2], [np.stack(labels[2:])]

    def everything(of, z):
        found = [of(z, jnp.asarray(label)) for label in apart]
        return found + [jax.vmap(lambda label: of(z, label))(stack) for stack in together]

    value_and_gradient = jax.value_and_grad(loss)
    bounds_of = functools.partial(everything, jaxdp.interval(value_and_gradient))
    values_of = functools.partial(everything, value_and_gradient)
    rng = np.random.default_rng(classes or 0)
    scales = np.array([0.0, 1e-5, 1e-2, 0.3, 3.0, 30.0, 0.3, 3.0]).reshape(-1, *(1,) * len(shape))
    centre = rng.normal(size=(8, *shape)) * np.array([1, 1, 1, 1, 1, 1, 30, 100]).reshape(
        scales.shape
    )
    low = centre - scales * rng.random((8, *shape))
    given = box(low, np.maximum(low, centre + scales * rng.random((8, *shape))))
    bounds = jax.device_get(jax.jit(jax.vmap(bounds_of), compiler_options=QUICK)(given))
    points = sample(given, 60)  # [60, 8, ...]
    values = in_float64(jax.vmap(jax.vmap(values_of)), points)
    assert_inside(bounds, values)
    for x, value in zip(
        jax.tree.leaves(bounds, is_leaf=is_interval), jax.tree.leaves(values), strict=True
    ):
        assert (
            np.asarray(x.width)[0] <= 3e-5 * (1 + np.abs(value[0, 0]))
        ).all()  # the first box is a point
    # Bounds of a batch, not a batch of bounds, once for each loss.
    if classes in (None, 3):
        batch = bounded(lambda z: jax.vmap(jax.grad(lambda z: loss(z, jnp.asarray(labels[0]))))(z))(
            given
        )
        assert_inside(batch, values[0][1])


@pytest.mark.slow
def test_classes_of_probability_zero():
    def masked(z):
        z = jnp.where(np.array([True, True, False, False]), z, -jnp.inf)
        return jax.value_and_grad(losses.softmax_cross_entropy)(z, jnp.int32(1)), jax.nn.softmax(z)

    given = around(np.array([0.3, -0.2, 5.0, 7.0], np.float32), 0.1)
    (value, gradient), probabilities = bounded(masked)(given)
    (exact, exact_gradient), exact_probabilities = in_float64(jax.vmap(masked), sample(given, 50))
    assert_inside([value, gradient, probabilities], [exact, exact_gradient, exact_probabilities])
    np.testing.assert_allclose(ends(gradient)[0][2:], 0, atol=1e-30)
    np.testing.assert_allclose(ends(gradient)[1][2:], 0, atol=1e-30)
    assert np.max(gradient.width) < 0.15 and np.max(probabilities.width) < 0.15


# --- models -------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A residual block with weight standardisation and GroupNorm, max and average pooling."""

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.GroupNorm(num_groups=2)(WSConv(4, (3, 3))(x)))
        y = nn.max_pool(nn.relu(x + WSConv(2, (3, 3))(y)), (2, 2), (2, 2))
        return nn.Dense(3)(nn.avg_pool(y, (2, 2), (1, 1)).reshape(x.shape[0], -1))


class Transformer(nn.Module):
    """A block of our Vision Transformer: LayerNorm, attention, GELU."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(jaxdp.models.vit.Block(num_heads=2, mlp_width=3)(x).mean(axis=1))


class Perceptron(nn.Module):
    """Two hidden layers."""

    @nn.compact
    def __call__(self, x):
        x = jax.nn.silu(nn.Dense(3)(x))
        return nn.Dense(3)(jnp.maximum(nn.Dense(2)(x), 0))


@functools.cache
def task(model, shape):
    """Returns value and gradient of the loss of an example, their bounds, drawn parameters and an
    example."""
    rng = np.random.default_rng(538)  # with it all units of Perceptron are alive
    x = rng.normal(size=shape).astype(np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x[None])["params"]

    def leaf(path, p):
        name, deviation = path[-1].key, 1 / np.sqrt(max(1, np.prod(p.shape[:-1])))
        drawn = rng.normal(size=p.shape) * (deviation if name == "kernel" else 0.1)
        return np.asarray(drawn + (name in ("scale", "gain")), np.float32)

    params = jax.tree_util.tree_map_with_path(leaf, shapes)

    def loss(params, x):
        return losses.softmax_cross_entropy(
            model.apply({"params": params}, x[None])[0], jnp.int32(1)
        )

    fun = jax.value_and_grad(loss)
    return fun, bounded(fun), params, x


MODELS = [
    (Perceptron(), (4,), (1e-4, 0.1)),
    (Residual(), (4, 4, 2), (1e-5, 0.02)),
    (Transformer(), (3, 4), (1e-6, 0.01)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape", "radii"), MODELS, ids=[type(case[0]).__name__ for case in MODELS]
)
def test_gradients_of_models_contain_every_point(model, shape, radii):
    with jax.numpy_dtype_promotion("standard"):  # Flax's GroupNorm
        fun, bounds_of, params, x = task(model, shape)
        boxes_ = [around(params, radius) for radius in radii]
        results = [(given, bounds_of(given, x)) for given in boxes_]
    points = [sample(given, 40) for given, _ in results]
    both = jax.tree.map(lambda a, b: np.concatenate([a, b]), *points)
    values = in_float64(jax.vmap(fun, (0, None)), both, x)
    for part, (_, bounds) in enumerate(results):
        found = jax.tree.map(lambda v, part=part: v[40 * part : 40 * (part + 1)], values)
        for bound, value in zip(
            jax.tree.leaves(bounds, is_leaf=is_interval), jax.tree.leaves(found), strict=True
        ):
            low, high = ends(bound)
            assert ((low <= value) & (value <= high)).all()
    small = results[0][1]
    spread = max(float(np.ptp(v[:40], axis=0).max()) for v in jax.tree.leaves(values))
    assert np.isfinite(width(small)) and width(small) < 1e4 * spread + 1


@pytest.mark.slow
def test_gradient_ascent_inside_the_box_stays_inside_the_bounds():
    with jax.numpy_dtype_promotion("standard"):  # as above: the same program
        fun, bounds_of, params, x = task(Perceptron(), (4,))
        given = around(params, 0.02)
        bounds = bounds_of(given, x)

    def flat(params):
        return jnp.concatenate([jnp.ravel(v) for v in jax.tree.leaves(fun(params, x))])

    low, high = (
        jax.tree.map(lambda v: np.asarray(v, np.float64), end) for end in (given.lower, given.upper)
    )

    def ascend(direction):
        """Returns the best of its steps for the output in a direction."""

        def step(params, size):
            slope = jax.grad(lambda p: flat(p) @ direction)(params)
            moved = jax.tree.map(
                lambda p, g, a, b: jnp.clip(p + size * (b - a) * jnp.sign(g), a, b),
                params,
                slope,
                low,
                high,
            )
            return moved, flat(moved)

        start = jax.tree.map(lambda a, b: (a + b) / 2, low, high)
        return lax.scan(step, start, 0.5 ** jnp.arange(8.0))[1]

    count = sum(v.size for v in jax.tree.leaves(params)) + 1
    chosen = np.random.default_rng(0).permutation(count)[:12]
    directions = np.eye(count)[chosen]
    # [24, 8, count]
    reached = in_float64(jax.vmap(ascend), np.concatenate([directions, -directions]))
    lower, upper = (
        np.concatenate([np.ravel(ends(v)[i]) for v in jax.tree.leaves(bounds, is_leaf=is_interval)])
        for i in (0, 1)
    )
    assert ((reached >= lower) & (reached <= upper)).all()
    # The ascent is worth its name: eight steps of it span most of what 400 random corners do, in
    # every direction.
    corners = in_float64(jax.vmap(flat), sample(given, 400))
    gained = reached.max(axis=(0, 1)) - reached.min(axis=(0, 1))
    assert (gained[chosen] >= 0.7 * np.ptp(corners, axis=0)[chosen]).all()
    assert (
        gained[chosen] > 0.05 * (upper - lower)[chosen]
    ).mean() > 0.7  # and the bounds are not vacuous


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("cnn", {"norm": "group"}),
        ("resnet20", {"depth": 8, "standardise": True, "shortcut": "conv"}),
        ("vit_tiny", {"depth": 1, "dtype": jnp.bfloat16}),
    ],
)
def test_gradients_of_the_models_of_the_registry_have_rules(name, settings):
    model = jaxdp.models.create(name, num_classes=10, **settings)

    def gradient(params, x):
        return jax.grad(
            lambda p: losses.softmax_cross_entropy(
                model.apply({"params": p}, x[None])[0], jnp.int32(1)
            )
        )(params)

    x = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        params = jax.eval_shape(
            model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
        )["params"]
        bounds = jax.eval_shape(
            lambda p, x: jaxdp.interval(gradient)(boxes.unchecked(p, p), x), params, x
        )
    found = jax.tree.leaves(bounds, is_leaf=is_interval)
    assert [v.shape for v in found] == [v.shape for v in jax.tree.leaves(params)]


# --- composition --------------------------------------------------------------------------------


def perceptron(params, example):
    x, y = example
    hidden = jax.nn.relu(x @ params["a"] + params["b"])
    return losses.softmax_cross_entropy(hidden @ params["w"], y)


def perceptron_case():
    rng = np.random.default_rng(5)
    params = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=4), "w": rng.normal(size=(4, 3))}
    examples = rng.normal(size=(5, 3)).astype(np.float32), np.array([0, 1, 2, 1, 0], np.int32)
    return jax.tree.map(lambda v: v.astype(np.float32), params), examples


@pytest.mark.slow
def test_vmap_scan_and_stage_agree_with_one_box_and_one_example_at_a_time():
    params, examples = perceptron_case()
    radii = np.array([0.0, 1e-3, 0.1], np.float32)
    gradient = jax.grad(perceptron)

    def one(radius, example):
        low, high = (
            jax.tree.map(lambda p: p - radius, params),
            jax.tree.map(lambda p: p + radius, params),
        )
        return jaxdp.interval(gradient)(jaxdp.Interval(low, high), example)

    def scanned(radius):
        return lax.scan(lambda c, example: (c, one(radius, example)), 0, examples)[1]

    single = jax.jit(one, compiler_options=QUICK)
    loop = [
        [single(r, jax.tree.map(lambda v, i=i: v[i], examples)) for i in range(5)] for r in radii
    ]
    expected = jax.tree.map(
        lambda *v: np.stack(v).reshape(3, 5, *v[0].shape), *itertools.chain(*loop)
    )
    over_scan = jax.jit(jax.vmap(scanned), compiler_options=QUICK)(radii)

    first, second, third = intervals.stage(gradient, params, jax.tree.map(lambda v: v[0], examples))

    def staged(radius):
        moving = [jaxdp.Interval(p - radius, p + radius) for p in jax.tree.leaves(params)]
        kept = jax.vmap(first)(examples)
        return jax.vmap(lambda k: third(second(moving, k)))(kept)

    inside = jaxdp.interval(jax.vmap(gradient, (None, 0)))
    of_batch = jax.jit(inside, compiler_options=QUICK)(around(params, radii[2]), examples)
    by_parts = [jaxdp.Interval(*pair) for pair in jax.jit(staged, compiler_options=QUICK)(radii[2])]
    for a, b in zip(jax.tree.leaves(over_scan), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    whole = jax.tree.leaves(jax.tree.map(lambda v: v[2], expected), is_leaf=is_interval)
    for found in (by_parts, jax.tree.leaves(of_batch, is_leaf=is_interval)):
        for a, b in zip(found, whole, strict=True):
            np.testing.assert_allclose(ends(a), ends(b), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_loops_and_calls_inside_and_gradients_of_them():
    @jax.custom_vjp
    def scaled(x):
        return jnp.sin(x) * 2

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (2 * g * jnp.cos(x),))

    @jax.custom_jvp
    def soft(x):
        return jnp.log1p(jnp.exp(x))

    soft.defjvp(
        lambda primals, tangents: (soft(*primals), jax.nn.sigmoid(primals[0]) * tangents[0])
    )

    def fun(w, x):
        def body(carry, row):
            carry = jax.checkpoint(lambda c: jnp.tanh(row @ c + w["b"]))(carry)
            return carry, scaled(carry).sum()

        carry, outs = lax.scan(body, x, w["a"])
        carry = lax.fori_loop(0, 2, lambda i, c: soft(c) + i, carry)
        carry = lax.cond(x[0] > 0, lambda c: c * 2, lambda c: c, carry)
        return (carry.sum() + outs.sum()) ** 2

    rng = np.random.default_rng(6)
    params = {
        "a": rng.normal(size=(2, 3, 3)).astype(np.float32),
        "b": rng.normal(size=3).astype(np.float32),
    }
    x = np.array([0.5, -1.0, 0.3], np.float32)
    given = around(params, 1e-3)
    bounds = bounded(jax.value_and_grad(fun))(given, x)
    assert_inside(
        bounds,
        in_float64(jax.vmap(jax.value_and_grad(fun), (0, None)), sample(given, 100), np.float64(x)),
    )
    assert width(bounds) < 50


def test_carries_of_a_scan_are_as_tight_as_their_terms():
    def fun(w, x):
        return lax.scan(lambda carry, t: (carry * 0.5 + w * t, carry), x, jnp.arange(1.0, 4.0))

    final, states = bounded(fun)(box(-1.0, 2.0), np.float32(1))
    np.testing.assert_allclose(ends(final), (0.125 - 4.25, 0.125 + 8.5), rtol=1e-5)
    np.testing.assert_allclose(states.upper, [1.0, 2.5, 5.25], rtol=1e-5)


def test_predicates_that_are_known_choose_a_branch_exactly():
    def fun(x, flag):
        return lax.cond(flag, lambda v: v + 1, lambda v: v * jnp.nan, x), lax.switch(
            2, [jnp.sin, jnp.cos, jnp.abs], x
        )

    first, second = jax.jit(lambda x: jaxdp.interval(fun)(x, True), compiler_options=QUICK)(
        box([-1.0, 2.0], [0.5, 3.0])
    )
    np.testing.assert_allclose([first.lower, first.upper], [[0, 3], [1.5, 4]], atol=1e-5)
    np.testing.assert_allclose([second.lower, second.upper], [[0, 2], [1, 3]], atol=1e-5)


@pytest.mark.slow
def test_patterns_are_recognised_only_where_they_are_what_they_seem():
    square = np.array([[0.0, 1.0], [5.0, -3.0]], np.float32)

    def transposed(x):  # divides by the sums of the other rows
        e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return e / jnp.broadcast_to(jnp.sum(e, axis=-1), (2, 2))

    def shifted(x):  # subtracts something that is not constant along the row
        e = jnp.exp(x - x[::-1])
        return e / jnp.sum(e, axis=-1, keepdims=True)

    def partial(x):  # the sum is over the other axis
        e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return e / jnp.sum(e, axis=0, keepdims=True)

    def compared(x, y):  # equality with a maximum of other things
        return x == jnp.maximum(x + 1, y), x == jnp.maximum(y, x), x + (x * y) * y

    for fun in (transposed, shifted, partial):
        given = around(square, 0.05)
        assert_inside(bounded(fun)(given), in_float64(jax.vmap(fun), sample(given, 50)))
    given = around(square, 0.5), around(square[::-1].copy(), 0.5)
    points = [sample(x, 50, seed) for seed, x in enumerate(given)]
    for x, value in zip(
        bounded(compared)(*given), in_float64(jax.vmap(compared), *points), strict=True
    ):
        assert ((value >= np.asarray(x.lower)) & (value <= np.asarray(x.upper))).all()


# --- dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.reduce_window(x, 0.0, lax.add, (6, 6), (1, 1), "VALID"),
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: jnp.zeros((3, 24), x.dtype).at[np.arange(24) % 3].add(x),
    ],
)
def test_sums_that_16_bits_round_after_every_addition_are_contained(function, dtype):
    rng = np.random.default_rng(0)
    for x in (rng.uniform(0.5, 1.0, (24, 24)), rng.normal(size=(24, 24))):
        x = jnp.asarray(x, dtype)
        box = jax.jit(jaxdp.interval(function))(jaxdp.Interval.point(x))
        assert np.isfinite(np.asarray(box.upper, np.float32)).all()
        assert box.contains(jax.jit(function)(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_sound(dtype):
    def fun(params, x):
        hidden = jax.nn.gelu(x @ params["a"] + params["b"])
        logits = (jax.nn.softmax(hidden) @ params["w"]).astype(jnp.float32)
        return (
            losses.softmax_cross_entropy(logits, jnp.int32(1)),
            jnp.mean(hidden),
            hidden * 0.3 - x[0],
        )

    params, (x, _) = perceptron_case()
    params, x = jax.tree.map(lambda v: v.astype(dtype), (params, x[0]))
    given = around(params, np.asarray(0.03, dtype))
    bounds = bounded(fun)(given, x)
    assert [v.dtype for v in jax.tree.leaves(bounds)] == [jnp.float32] * 2 + [dtype] * 4
    exact = jax.vmap(fun, (0, None))
    assert_inside(bounds, in_float64(exact, sample(given, 100), np.asarray(x, np.float64)))
    assert width(bounds) < 4


@pytest.mark.slow
def test_float64_is_as_tight_as_float64():
    with jax.enable_x64(True):
        params, examples = perceptron_case()
        params = jax.tree.map(lambda v: v.astype(np.float64), params)
        example = examples[0][0].astype(np.float64), examples[1][0]
        fun = jax.value_and_grad(perceptron)
        bounds_of = bounded(fun)
        point, wide = (
            bounds_of(jaxdp.Interval.point(params), example),
            bounds_of(around(params, 1e-9), example),
        )
        value = jax.jit(fun)(params, example)
        point, wide, value = jax.tree.map(np.asarray, (point, wide, value))
        assert all(v.dtype == jnp.float64 for v in jax.tree.leaves(point))
        for x, around_it, exact in zip(
            jax.tree.leaves(point, is_leaf=is_interval),
            jax.tree.leaves(wide, is_leaf=is_interval),
            jax.tree.leaves(value),
            strict=True,
        ):
            np.testing.assert_allclose(x.lower, exact, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(x.upper, exact, rtol=1e-12, atol=1e-12)
            assert ((around_it.lower <= x.lower) & (x.upper <= around_it.upper)).all()
        assert width(wide) < 1e-6


# --- interface ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_of_every_kind():
    def fun(tree, scale, *, index):
        a, b = tree["a"], tree["b"]
        return {
            "float": a * scale + b,
            "positive": a > 0,
            "finite": jnp.isfinite(a),
            "best": jnp.argmax(a),
            "count": jnp.sum(a > 0, dtype=jnp.int32),
            "taken": a[index],
            "nothing": None,
            "known": index + 1,
            "given": b,
        }

    tree = {"a": box([-1.0, 0.5, 2.0], [1.0, 1.0, 3.0]), "b": np.ones(3, np.float32)}
    found = bounded(fun)(tree, 2.0, index=np.int32(1))
    assert found["nothing"] is None
    np.testing.assert_allclose(ends(found["float"]), [[-1, 2, 5], [3, 3, 7]], atol=5e-6)
    assert found["positive"].lower.tolist() == [False, True, True]
    assert found["positive"].upper.tolist() == [True, True, True]
    assert (
        found["positive"].dtype == bool and found["best"].dtype == found["count"].dtype == jnp.int32
    )
    assert (int(found["best"].lower), int(found["best"].upper)) == (2, 2)
    assert (int(found["count"].lower), int(found["count"].upper)) == (2, 3)
    assert (float(found["taken"].lower), float(found["taken"].upper)) == (0.5, 1.0)
    assert int(found["known"].lower) == int(found["known"].upper) == 2
    assert np.array_equal(found["given"].lower, [1, 1, 1]) and np.array_equal(
        found["given"].upper, [1, 1, 1]
    )


def test_an_interval_of_trees_is_a_tree_of_intervals():
    low, high = (
        {"a": np.zeros(2, np.float32), "b": [np.float32(1)]},
        {"a": np.ones(2, np.float32), "b": [np.float32(2)]},
    )
    together = jaxdp.Interval(low, high)
    apart = {"a": box(low["a"], high["a"]), "b": [box(low["b"][0], high["b"][0])]}
    fun = bounded(lambda tree: tree["a"] * tree["b"][0])
    for x in (fun(together), fun(apart)):
        np.testing.assert_allclose([x.lower, x.upper], [[0, 0], [2, 2]], atol=1e-6)
    assert together.contains({"a": np.array([0.5, 1], np.float32), "b": [np.float32(1.5)]})
    assert not together.contains({"a": np.array([0.5, 1], np.float32), "b": [np.float32(2.5)]})
    assert jax.tree.structure(together) == jax.tree.structure(
        jax.tree.map(lambda v: v + 1, together)
    )
    assert apart["a"][1].shape == () and apart["a"].ndim == 1 and "Interval" in repr(together)
    restored = jax.tree.unflatten(jax.tree.structure(together), jax.tree.leaves(together))
    assert restored.contains(low) and np.all(jax.tree.leaves(restored.width)[0] == 1)


@pytest.mark.slow
def test_points_are_points():
    assert jaxdp.Interval.point(3.0).contains(jnp.float32(3))
    exact = bounded(lambda x: (jnp.sort(x[::-1]), jnp.maximum(x, 2).reshape(3, 1), x > 1, x[1]))(
        np.arange(3, dtype=np.float32)
    )
    assert all(np.array_equal(v.lower, v.upper) for v in exact)
    counted = bounded(lambda n: (n * 3).astype(jnp.float32))(
        jaxdp.Interval(np.int32(1), np.int32(2))
    )
    assert (float(counted.lower), float(counted.upper)) == (3.0, 6.0)
    large = bounded(lambda n: n.astype(jnp.float32))(np.int32(2**24 + 1))
    assert contains(large, 2.0**24 + 1)


WRAPS = {
    "add": lambda x: x + x[::-1],
    "sub": lambda x: x - x[::-1],
    "mul": lambda x: x * x[::-1],
    "scaled": lambda x: x * jnp.asarray(3, x.dtype),
    "square": lambda x: x * x,
    "power": lambda x: x**3,
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "sum": lambda x: jnp.sum(x, dtype=x.dtype),
    "cumsum": lambda x: jnp.cumsum(x, dtype=x.dtype),
    "scatter": lambda x: x.at[np.array([0, 0])].add(x),
    "conversion": lambda x: (x.astype(jnp.float32) * 1.5).astype(x.dtype),
}


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int32"])
def test_integers_may_wrap_around(dtype):
    """Each point of a box is inside, and a box far from the limits stays exact."""
    limits = np.iinfo(dtype)
    ends = ((0, 1), (1, 4), (limits.min, limits.min + 2), (limits.max - 2, limits.max))
    ends += ((limits.max // 2, limits.max // 2 + 2), (limits.min // 2, limits.min // 2 + 2))
    found = jax.jit(lambda x: {name: jaxdp.interval(f)(x) for name, f in WRAPS.items()})
    values = jax.jit(jax.vmap(lambda x: {name: f(x) for name, f in WRAPS.items()}))
    for (first, last), (other, end) in itertools.product(ends, ends):
        box_of_two = jaxdp.Interval(np.array([first, other], dtype), np.array([last, end], dtype))
        axes = ([first, first + 1, last], [other, other + 1, end])
        points = np.array(list(itertools.product(*axes)), dtype)
        bounds, at_points = jax.device_get((found(box_of_two), values(points)))
        for name, point in at_points.items():
            assert np.all(bounds[name].lower <= point), name
            assert np.all(point <= bounds[name].upper), name
    small = found(jaxdp.Interval(np.array([1, 2], dtype), np.array([2, 4], dtype)))
    assert (small["square"].lower.tolist(), small["square"].upper.tolist()) == ([1, 4], [4, 16])
    assert (int(small["sum"].lower), int(small["sum"].upper)) == (3, 6)


@pytest.mark.slow
def test_what_cannot_be_bounded_is_refused():
    x = box([1.0, 2.0], [2.0, 3.0])
    refusals = [
        (lambda x: jnp.abs(jnp.fft.fft(x)), "complex numbers"),
        (lambda x: lax.erf_inv(x / 4), r"'erf_inv'.*test_intervals\.py:\d+, in .*lambda"),
        (lambda x: lax.erf_inv(x / 4), r"register_rule\('erf_inv'\)"),
        (lambda x: jnp.linalg.inv(jnp.outer(x, x) + jnp.eye(2)), "no interval rule"),
        (lambda x: x.astype(jnp.int32) & 1, "bitwise"),
        (lambda x: x.astype(jnp.int32) // 2, "integer division|no interval rule"),
        (lambda x: jnp.prod(x.astype(jnp.int32)), "products over an interval of integers"),
        (lambda x: x.astype(jnp.int32) @ x.astype(jnp.int32), "products over an interval of int"),
        (lambda x: lax.sort((x, x), num_keys=2), "does not sort by several keys"),
        (lambda x: jnp.zeros(4)[x.astype(jnp.int32)], "depends on an interval"),
        (
            lambda x: lax.dynamic_update_slice(x, x[:1], (x[0].astype(jnp.int32),)),
            "depends on an interval",
        ),
        (
            lambda x: lax.while_loop(lambda v: v[0] < 3.0, lambda v: v * 2.0, x),
            "The condition of the loop depends on an interval",
        ),
    ]
    for fun, message in refusals:
        with pytest.raises(intervals.UnsupportedPrimitive, match=message):
            jax.eval_shape(jaxdp.interval(fun), x)
    with pytest.raises(ValueError, match="product must be 'tight' or 'rump', got 'exact'"):
        jaxdp.interval(jnp.sin, product="exact")


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        (1.0, 0.0, "lower must be at most upper"),
        (float("nan"), 1.0, "neither may be NaN"),
        (np.zeros(2, np.float32), np.ones(3, np.float32), "same shape and dtype"),
        (np.zeros(2, np.float32), np.ones(2, np.int32), "same shape and dtype"),
        ({"a": 1.0}, {"b": 1.0}, "same tree structure"),
    ],
)
def test_what_is_no_interval_is_refused(lower, upper, message):
    with pytest.raises(ValueError, match=message):
        jaxdp.Interval(lower, upper)


@pytest.mark.slow
def test_endpoints_of_numpy_float64_are_rounded_outward():
    tenth = np.asarray(0.1)
    interval = jaxdp.Interval(tenth, tenth)
    assert float(interval.lower) <= 0.1 <= float(interval.upper)
    assert interval.lower.dtype == jnp.float32
    assert float(jaxdp.Interval(-np.inf, np.inf).upper) == np.inf


@pytest.mark.slow
def test_a_registered_rule_takes_points_and_intervals(monkeypatch):
    monkeypatch.setattr(boxes, "RULES", dict(boxes.RULES))
    monkeypatch.setattr(intervals, "RULES", boxes.RULES)

    @intervals.register_rule("erf_inv")
    def _erf_inv(eqn, x):
        ends = (eqn.bind(end(x))[0] for end in (intervals.lower, intervals.upper))
        return jaxdp.Interval(*intervals.widen(*ends, roundings=64))

    from scipy import special

    point, wide = bounded(lambda x, y: (lax.erf_inv(x), lax.erf_inv(y) * 2))(
        np.float32(0.3), box(-0.5, 0.9)
    )
    assert contains(point, special.erfinv(np.float64(np.float32(0.3)))) and width(point) < 1e-5
    np.testing.assert_allclose([wide.lower, wide.upper], 2 * special.erfinv([-0.5, 0.9]), rtol=1e-4)


def test_losses_of_optax_have_tight_bounds(monkeypatch):
    """Without the rules for what these losses use twice, the bounds are sound and say nothing."""
    z, y = np.array([0.3, -1.0, 2.0, 0.7], np.float32), np.array([0.0, 1.0, 0.0, 1.0], np.float32)

    def ctc(z):
        logits = jnp.outer(np.arange(1, 4, dtype=np.float32), z)[None]
        return optax.ctc_loss(logits, jnp.zeros((1, 3)), jnp.array([[1]]), jnp.zeros((1, 1)))[0]

    def widths():
        bounds = jaxdp.interval(
            lambda z: (
                jax.value_and_grad(lambda z: optax.sigmoid_binary_cross_entropy(z, y).sum())(z),
                optax.softmax_cross_entropy(z, y / 2),
                optax.log_cosh(z, y),
                ctc(z),
            )
        )
        found = jax.device_get(jax.jit(bounds)(around(z, 1e-4)))
        return [float(x.width.max()) for x in jax.tree.leaves(found, is_leaf=is_interval)]

    assert max(widths()) < 3e-3
    rules = {
        "logaddexp": boxes.RULES["custom_jvp_call"],
        "ne_itself": lambda eqn, x: boxes.RULES["ne"](eqn, x, x),
    }
    for name, rule in rules.items():
        monkeypatch.setitem(boxes.RULES, name, rule)
    value, _, _, cosh, ctc_width = widths()
    assert min(value, cosh, ctc_width) > 1
