"""Norms of per-example gradients of convolutions by a kernel, in interpret mode, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxdp.transforms.kernels import cells, convolution, lanes

SAME = ((1, 1), (1, 1))
NONE = ((0, 0), (0, 0))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels run on the CPU, one example in a turn of their loops, so that little is compiled."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(cells.Plan, "unrolled", 1)


def numbers(shape, seed=0, dtype=np.float32):
    """Normals that bfloat16 holds exactly."""
    drawn = np.random.default_rng(seed).normal(size=shape)
    return drawn.astype(jnp.bfloat16).astype(dtype)


def arrays(
    batch,
    size,
    channels,
    outputs,
    window=(3, 3),
    strides=(1, 1),
    padding=SAME,
    dilation=(1, 1),
    dtype=np.float32,
):
    """Data, cotangents, and the geometry of a convolution."""
    padded = [n + low + high for n, (low, high) in zip(size, padding, strict=True)]
    spans = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    out = [(n - span) // s + 1 for n, span, s in zip(padded, spans, strides, strict=True)]
    x = numbers((batch, *size, channels), 1, dtype)
    g = numbers((batch, *out, outputs), 2, dtype)
    return x, g, cells.Geometry(window, strides, padding, dilation)


def by_numpy(x, g, geometry, factors=None):
    """Squared norms in float64, or the weighted sum of the gradients, one kernel position at a
    time."""
    window, strides, padding, kernel_dilation = geometry
    x, g = np.asarray(x, np.float64), np.asarray(g, np.float64)
    x = np.pad(x, [(0, 0), *padding, (0, 0)])
    rows, columns = g.shape[1:3]
    results = []
    for i, j in np.ndindex(*window):
        seen = x[:, i * kernel_dilation[0] :: strides[0], j * kernel_dilation[1] :: strides[1]]
        gradient = np.einsum("bhwc,bhwk->bck", seen[:, :rows, :columns], g)
        norms = np.square(gradient).sum((1, 2))
        results.append(norms if factors is None else np.einsum("bck,b->ck", gradient, factors))
    return (
        np.sum(results, 0) if factors is None else np.reshape(results, (*window, *results[0].shape))
    )


# One program for equal shapes. Eager calls compile each operation around the kernel by itself.
@functools.partial(jax.jit, static_argnames="geometry")
def norms_of(x, g, geometry):
    return convolution.norms_and_bounds(x, g, geometry)[0]


def arrays_of_form(by_cells, sides, on_lanes, *args, **kwargs):
    """Returns `arrays(...)`, and tells if they no longer take the form that a test is for."""
    x, g, geometry = arrays(*args, **kwargs)
    plan = cells.Plan.of(geometry, x, g)
    assert (plan.by_cells, plan.sides, lanes.batch_on_lanes(plan, len(x))) == (
        by_cells,
        sides,
        on_lanes,
    )
    assert convolution.suits(x, g, geometry)
    return x, g, geometry


BFLOAT16 = {"dtype": jnp.bfloat16}
FIRST = {"window": (7, 7), "strides": (2, 2), "padding": ((3, 3), (2, 3)), **BFLOAT16}
DILATED = {"window": (2, 3), "strides": (1, 2), "padding": ((4, 1), (0, 2)), "dilation": (2, 1)}
POINTWISE = {"window": (1, 1), "strides": (2, 2), "padding": NONE}
HALVED = {"strides": (2, 2), "padding": ((0, 1), (1, 1)), **BFLOAT16}
CASES = {
    # 90 cells: one example at a time, and neither cells nor channels fill a tile.
    "odd": (False, 1, False, 3, (10, 9), 5, 6, {}),
    # Four examples on the lanes of one group and one in the next. 30 cells do not fill their 32
    # lanes.
    "shared": (True, 4, False, 5, (5, 6), 20, 33, BFLOAT16),
    # The first layer of a ResNet: four phases of 3 channels.
    "first": (False, 1, False, 2, (23, 22), 3, 8, FIRST),
    # Unequal strides, an even window, dilation, and more padding than the window reaches.
    "dilated": (False, 1, False, 3, (12, 14), 4, 6, DILATED),
    "pointwise": (True, 4, False, 3, (9, 9), 4, 6, POINTWISE),
    # 128 examples on the lanes of the arrays.
    "lanes": (False, 1, True, 128, (32, 16), 3, 16, HALVED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_norms_equal_those_of_numpy(name):
    """Fails if a cell beside the grid counts, a phase meets another's channels, or an example
    another's cells."""
    *form, batch, size, channels, outputs, options = CASES[name]
    x, g, geometry = arrays_of_form(*form, batch, size, channels, outputs, **options)
    norms = norms_of(x, g, geometry)
    assert norms.dtype == jnp.float32
    np.testing.assert_allclose(norms, by_numpy(x, g, geometry), rtol=3e-6)


@pytest.mark.slow
def test_column_sums_equal_those_of_numpy():
    """Fails where a base meets another row or column of the gradient, or a phase is left out."""
    x, g, geometry = arrays_of_form(False, 1, True, 128, (32, 16), 3, 16, **HALVED)
    assert convolution.column_sums_suit(x, g, geometry)
    bases = numbers((2, *geometry.window, 3, 16), 4)
    compiled = jax.jit(convolution.column_sums, static_argnums=3)
    sums, apart = map(np.asarray, compiled(x, g, bases, geometry))
    for example in (0, 77):
        one = slice(example, example + 1)
        exact = by_numpy(x[one], g[one], geometry, np.ones(1))
        terms = [exact**2, exact, *(np.float64(base) * exact for base in bases)]
        expected = np.stack(terms).sum((1, 2, 3))
        np.testing.assert_allclose(sums[:, example], expected, atol=1e-5 * np.abs(expected).max())
        assert apart[example] ** 2 >= np.square(exact).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "on_lanes"), [(6, False), (256, True)])
def test_nan_of_one_example_does_not_reach_another(batch, on_lanes):
    """Fails if a product with zeros takes the place of a mask where examples share the lanes."""
    x, g, geometry = arrays_of_form(True, 2, on_lanes, batch, (8, 8), 16, 16)
    clean = by_numpy(x, g, geometry)
    np.testing.assert_allclose(norms_of(x, g, geometry), clean, rtol=3e-6)
    x[1], g[4, -1] = np.nan, np.inf
    norms = np.asarray(norms_of(x, g, geometry))
    dirty = np.isin(np.arange(batch), [1, 4])
    assert not np.isfinite(norms[dirty]).any()
    np.testing.assert_allclose(norms[~dirty], clean[~dirty], rtol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "size", "outputs", "options"),
    [
        (256, (8, 8), 16, {}),
        # The phases of the kernel's columns are 1, 0, 1.
        (128, (16, 16), 6, {"strides": (1, 2), **BFLOAT16}),
    ],
    ids=["shared", "strided"],
)
def test_a_weighted_sum_equals_that_of_numpy(batch, size, outputs, options):
    """Fails if a factor meets another example, an example without weight counts, or kernel
    positions change places."""
    x, g, geometry = arrays(batch, size, 5, outputs, **options)
    factors = np.random.default_rng(3).uniform(size=batch).astype(np.float32)
    factors[[3, -2]] = 0
    want = by_numpy(x, g, geometry, factors=factors)
    assert convolution.sums_suit(x, g, geometry)
    x[3] = np.nan
    total = jax.jit(functools.partial(convolution.weighted_sum, geometry=geometry))(x, g, factors)
    assert (total.dtype, total.shape) == (jnp.float32, (3, 3, 5, outputs))
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=2e-6 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "size"),
    [((False, 1, False), (12, 9)), ((True, 4, False), (5, 6))],
    ids=["gradient", "cells"],
)
def test_bounds_cover_the_norm_whose_terms_cancel(form, size):
    """Fails if E is less than what rounding takes from a norm, or M less than the norm of absolute
    terms."""
    x, g, geometry = arrays_of_form(*form, 5, size, 4, 4)
    # Rows of equal data, whose cotangents nearly cancel.
    x[:, 1:] = x[:, :1]
    g[:, 1::2] = -g[:, : g.shape[1] // 2 * 2 : 2]
    bounds = jax.jit(functools.partial(convolution.norms_and_bounds, geometry=geometry))
    norms, apart, spread = map(np.asarray, bounds(x, g))
    want = by_numpy(x, g, geometry)
    assert (np.abs(norms - want) <= spread + 1e-6 * want).all()
    lengths = (np.sqrt(np.square(y).sum((1, 2, 3))) for y in (x, g))
    assert (apart >= np.sqrt(by_numpy(np.abs(x), np.abs(g), geometry)) * (1 - 1e-6)).all()
    assert (apart <= 3 * np.prod(list(lengths), 0) * (1 + 1e-6)).all()
    assert (spread < 1e-2 * want).all()
    assert (spread > 0).all() == form[0]


@pytest.mark.slow
def test_numbers_between_those_of_bfloat16_are_rounded():
    """Fails if the lower half of a number is cut off, which makes all numbers smaller, or reaches
    its neighbour."""
    x, g, geometry = arrays(256, (8, 8), 16, 16)
    x = x + np.abs(x) * np.float32(0.003)
    want = by_numpy(x.astype(jnp.bfloat16), g, geometry)
    np.testing.assert_allclose(norms_of(x, g, geometry), want, rtol=3e-6)


def test_an_empty_batch_has_no_norms():
    x, g, geometry = arrays(0, (5, 6), 3, 4)
    assert norms_of(x, g, geometry).shape == (0,)


@pytest.mark.slow
def test_a_mapped_axis_is_part_of_the_batch():
    """Fails if an argument that is not mapped is not repeated, or if rows change places."""
    x, g, geometry = arrays(6, (5, 4), 3, 4)
    norms = functools.partial(norms_of, geometry=geometry)
    pairs = jax.jit(jax.vmap(norms, in_axes=(None, 0)))(x[:3], g.reshape(2, 3, *g.shape[1:]))
    want = [by_numpy(x[:3], g[first : first + 3], geometry) for first in (0, 3)]
    np.testing.assert_allclose(pairs, want, rtol=3e-6)


def sharded(function, check_vma):
    """Returns `function` of arrays whose examples are divided over two devices."""
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    return jax.jit(jax.shard_map(function, mesh=mesh, check_vma=check_vma, **specs))


@pytest.mark.slow
def test_each_device_computes_the_norms_of_its_examples():
    """Fails if the kernel meets examples of another device. The interpreter does not track what
    varies."""
    x, g, geometry = arrays(4, (5, 4), 3, 4)
    norms = functools.partial(norms_of, geometry=geometry)
    np.testing.assert_allclose(
        sharded(norms, check_vma=False)(x, g), by_numpy(x, g, geometry), rtol=3e-6
    )


@pytest.mark.parametrize(
    ("x", "g", "window", "served"),
    [
        ((256, 32, 32, 16), (256, 32, 32, 16), (3, 3), True),
        ((64, 56, 56, 64), (64, 56, 56, 64), (3, 3), True),
        ((64, 7, 7, 2048), (64, 7, 7, 512), (1, 1), True),
        ((2, 2048, 2048, 64), (2, 2048, 2048, 64), (3, 3), False),
        ((2, 8, 8, 4), (2, 8, 8, 4), (3, 3, 3), False),
        ((2, 8, 8, 0), (2, 8, 8, 4), (3, 3), False),
    ],
)
def test_the_kernel_says_which_shapes_it_serves(x, g, window, served):
    x, g = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, g))
    ones = (1,) * len(window)
    padding = tuple((n // 2, n // 2) for n in window)
    answer = convolution.suits(x, g, cells.Geometry(window, ones, padding, ones))
    assert answer is served


def test_other_types_are_refused():
    x, g, geometry = arrays(2, (5, 4), 3, 4)
    assert not convolution.suits(x.astype(jnp.float16), g, geometry)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 256], ids=["blocks", "lanes"])
def test_the_kernel_is_lowered_for_several_tpus(monkeypatch, batch):
    """Fails if a TPU lacks an operation of it, or if JAX does not see that its result varies as its
    arguments do."""
    monkeypatch.undo()
    x, g, geometry = arrays(batch, (16, 8), 16, 16)

    def both(x, g):
        norms = norms_of(x, g, geometry)
        if not convolution.sums_suit(x, g, geometry):
            return norms
        return norms + convolution.weighted_sum(x, g, norms, geometry).sum()

    text = sharded(both, check_vma=True).trace(x, g).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1 + (batch == 256)


@pytest.mark.slow
def test_a_mapped_axis_of_a_weighted_sum_is_a_loop():
    """Fails if factors of one mapped row meet another."""
    x, g, geometry = arrays(128, (8, 16), 4, 4)
    factors = np.random.default_rng(3).uniform(size=(2, 128)).astype(np.float32)
    total = functools.partial(convolution.weighted_sum, geometry=geometry)
    sums = jax.jit(jax.vmap(total, in_axes=(None, None, 0)))(x, g, factors)
    for found, own in zip(sums, factors, strict=True):
        want = by_numpy(x, g, geometry, factors=own)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=2e-6 * np.abs(want).max())
