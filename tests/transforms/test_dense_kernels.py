"""Kernels of dense layers, run by JAX on the CPU, against products in float64.

Blocks that go beyond an array hold NaN there, and a TPU has arbitrary values there.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.transforms import dense
from jaxdp.transforms.kernels import formed, gram, tiles, weighted

# (B, T, p, q): positions that end within a tile, with several blocks of 128 and with one.
# Matrices of more than 256 positions are written.
CASES = [
    (2, 197, 96, 64),
    (2, 13, 64, 72),
    (1, 261, 64, 64),
]


def few_examples_share_a_step(patch, most=2):
    """Each has code of its own there, so that little is compiled. Costs stay."""
    examples, blocks, cycles = gram._examples, weighted._blocks, gram.cycles
    patch.setattr(gram, "_examples", lambda *shape: min(most, examples(*shape)))

    def real_cycles(*shape):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(gram, "_examples", examples)
            return cycles(*shape)

    patch.setattr(gram, "cycles", real_cycles)

    def few(*shape):
        found = blocks(*shape)
        return found._replace(examples=min(most, found.examples))

    patch.setattr(weighted, "_blocks", few)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Runs kernels as plain JAX."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    few_examples_share_a_step(monkeypatch)


interpreted = pytest.mark.usefixtures("on_the_cpu")


def pair(size, positions, rows, cols):
    """Returns u and w in bfloat16."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(size, positions, n)) for n in (rows, cols)]
    return tuple(x.astype(jnp.bfloat16) for x in arrays)


def exact(u, w):
    """Returns u_i^T w_i in float64."""
    return np.einsum("itp,itq->ipq", np.float64(u), np.float64(w))


def exact_norms(u, w):
    return np.square(exact(u, w)).sum((1, 2))


def exact_gram_norms(u, w):
    (gram_u, gram_w) = (np.einsum("itp,isp->its", np.float64(x), np.float64(x)) for x in (u, w))
    pairs = ((gram_u, gram_w), (gram_u, gram_u), (gram_w, gram_w))
    sums = [(x * y).sum((1, 2)) for x, y in pairs]
    length_u, length_w = (np.sqrt(np.square(np.float64(x)).sum(2)) for x in (u, w))
    rows = (length_u**2, length_w**2, length_u * length_w, length_u, length_w)
    return *sums, *(row.sum(1) for row in rows)


def assert_close(found, expected):
    """Asserts that arrays are equal to 1e-5 of their largest entry."""
    assert found.dtype == jnp.float32
    scale = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)


def assert_all_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


def compiled(kernel, **options):
    """Returns one program of a kernel. Eager calls compile each operation around it by itself."""
    return jax.jit(functools.partial(kernel, **options))


def gram_norms(u, w, **options):
    sums, _ = gram.gram_norms(u, w, **options)
    return sums


@jax.jit
def norms(u, w):
    return gram_norms(u, w), formed.formed_norms(u, w)


def everything(u, w, factors):
    return *norms(u, w), weighted.weighted_sum(u, w, factors)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("case", CASES)
def test_norms(case):
    u, w = pair(*case)
    assert gram.suits(*case[1:]) and formed.suits(*case[1:])
    of_grams, of_formed = norms(u, w)
    assert_all_close(of_grams, exact_gram_norms(u, w))
    assert_close(of_formed, exact_norms(u, w))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("across", [(True, False), (False, True)])
def test_sums_over_gram_matrices_of_features_in_parts(monkeypatch, across):
    """Fails if a part replaces the sum, if the sum is read before it is set, or if an axis is
    mistaken."""
    parts = gram._Parts(128, 128, 3)
    monkeypatch.setattr(gram, "_parts", lambda *_: parts)
    u, w = pair(2, 140, 128 * (1 + across[1]), 384)
    found = compiled(gram_norms, u_across=across[0], w_across=across[1])(u, w)
    assert_all_close(found, exact_gram_norms(u, w))


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 133])
def test_sums_of_many_examples_share_blocks(size, monkeypatch):
    """Eight examples share a step, and 128 a block of the result. The last ones are not full."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    u, w = pair(size, 9, 64, 64)
    assert gram._examples(9, 64, 64) == 8
    found, rows = gram.gram_norms(u, w, u_across=True, w_across=True, with_rows=True)
    assert_all_close(found, exact_gram_norms(u, w))
    assert_all_close(rows, [np.square(np.float64(x)).sum(2) for x in (u, w)])


@pytest.mark.slow
@interpreted
def test_norms_of_gradients_that_are_formed_in_blocks(monkeypatch):
    monkeypatch.setattr(formed, "_blocks", lambda *_: formed._Blocks(128, 128, 0.0))
    u, w = pair(2, 21, 256, 384)
    assert_close(compiled(formed.formed_norms)(u, w), exact_norms(u, w))


def exact_weighted(u, w, factors):
    return np.einsum("i,ipq->pq", np.float64(factors), exact(u, w))


FACTORS = np.float32([0.25, 3.0, 0.7, 1e-3, 2.0])


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("across", [(False, False), (True, False), (False, True), (True, True)])
def test_weighted_sums(across):
    """Five examples at two a step: the last step goes beyond them."""
    assert weighted._blocks(61, 64, 72).examples == 2
    u, w = pair(5, 61, 64, 72)
    kernel = compiled(weighted.weighted_sum, u_across=across[0], w_across=across[1])
    assert_close(kernel(u, w, FACTORS), exact_weighted(u, w, FACTORS))


@pytest.mark.slow
@interpreted
def test_weighted_sums_of_blocks_that_go_beyond_the_axes(monkeypatch):
    blocks = weighted._Blocks(128, 256, 128, 1, 0.0)
    monkeypatch.setattr(weighted, "_blocks", lambda *_: blocks)
    u, w = pair(3, 256, 200, 300)
    found = compiled(weighted.weighted_sum)(u, w, FACTORS[:3])
    assert_close(found, exact_weighted(u, w, FACTORS[:3]))


@pytest.mark.slow
@interpreted
def test_bad_rows_of_one_example_do_not_reach_another():
    """A good example shares a step with a bad one, whose rows the kernel multiplies too."""
    u, w = pair(4, 50, 64, 64)
    factors, good = np.float32([1, 0, 0, 0.5]), np.array([0, 3])
    expected = exact_gram_norms(u, w)
    total = exact_weighted(u, w, factors)
    u[1, 3, 5], w[2] = np.nan, np.inf
    of_grams, of_formed, found = jax.device_get(jax.jit(everything)(u, w, factors))
    assert_all_close([x[good] for x in of_grams], [x[good] for x in expected])
    assert_close(of_formed[good], expected[0][good])
    assert not np.isfinite([of_grams.products[1:3], of_formed[1:3]]).any()
    assert np.isnan(of_grams.trace_u[1]) and np.isinf(of_grams.trace_w[2])
    assert_close(found, total)


@pytest.mark.slow
@interpreted
def test_a_sum_of_factors_zero_is_zero():
    """No step multiplies anything, so the first one must clear the sum."""
    u, w = pair(2, 48, 70, 64)
    nothing = compiled(weighted.weighted_sum)(np.full_like(u, np.nan), w, np.zeros(2, np.float32))
    np.testing.assert_array_equal(nothing, np.zeros((70, 64)))


@interpreted
def test_no_examples_have_no_norms_and_the_sum_zero():
    u, w = pair(0, 64, 64, 80)
    found = compiled(gram_norms)(u, w)
    assert [x.shape for x in found] == [(0,)] * 8
    assert compiled(formed.formed_norms)(u, w).shape == (0,)
    total = compiled(weighted.weighted_sum)(u, w, np.zeros(0, np.float32))
    np.testing.assert_array_equal(total, np.zeros((64, 80)))


@pytest.mark.slow
@interpreted
def test_kernels_under_vmap():
    u, w = pair(6, 17, 64, 64)
    u, w, factors = (x.reshape(3, 2, *x.shape[1:]) for x in (u, w, np.float32([*FACTORS, 0])))
    sums, norms, totals = jax.device_get(jax.jit(jax.vmap(everything))(u, w, factors))
    for k in range(3):
        assert_all_close([x[k] for x in sums], exact_gram_norms(u[k], w[k]))
        assert_close(norms[k], exact_norms(u[k], w[k]))
        assert_close(totals[k], exact_weighted(u[k], w[k], factors[k]))


def in_shards(check):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def shard(u, w, factors):
        sums, norms, total = everything(u, w, factors)
        return sums, norms, total[None]

    return jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check)


@pytest.mark.slow
@interpreted
def test_kernels_inside_of_shards():
    u, w = pair(4, 17, 64, 64)
    sums, norms, totals = jax.device_get(jax.jit(in_shards(check=False))(u, w, FACTORS[:4]))
    assert_all_close(sums, exact_gram_norms(u, w))
    assert_close(norms, exact_norms(u, w))
    for k in range(2):
        part = slice(2 * k, 2 * k + 2)
        assert_close(totals[k], exact_weighted(u[part], w[part], FACTORS[part]))


@pytest.mark.slow
def test_kernels_inside_of_shards_lower_for_a_tpu_with_checked_types():
    """The factors are equal on all devices, and the result varies."""
    u, w = pair(4, 64, 64, 64)
    traced = jax.jit(in_shards(check=True)).trace(u, w, jnp.ones(4))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("across", [False, True])
def test_the_last_part_of_an_axis_goes_beyond_it(monkeypatch, across):
    """What lies there is NaN in this test, and anything on a TPU."""
    monkeypatch.setattr(gram, "_parts", lambda *_: gram._Parts(64, 128, 3))
    u, w = pair(2, 13, 64, 300)
    found = compiled(gram_norms, w_across=across)(u, w)
    assert_all_close(found, exact_gram_norms(u, w))
    assert gram.additions(13, 64, 300) == (65, 131)


def test_the_positions_of_narrow_rows_are_on_the_lanes():
    """[65, 64] is padded to [72, 128], and [64, 65] to [64, 128]."""
    assert dense.pads_less(65, 64) and dense.pads_less(512, 96)
    assert not dense.pads_less(48, 64) and not dense.pads_less(65, 256)
    assert not dense.pads_less(512, 128)


SERVED = {  # (T, p, q): served by gram_norms, formed_norms, weighted_sum; formed is cheaper
    (197, 768, 3072): (True, True, True, False),
    (512, 768, 3072): (True, True, True, False),
    (1024, 768, 768): (True, True, True, True),
    (2048, 2048, 8192): (False, True, True, True),
    (65, 192, 768): (True, True, True, False),
    (512, 4096, 11008): (True, True, True, False),
    (512, 768, 50257): (True, False, True, False),  # the head of a language model
    (1, 768, 3072): (False, False, False, False),
    (197, 768, 10): (False, False, False, False),
    (5000, 768, 768): (False, False, False, False),
}


@pytest.mark.parametrize(("shape", "served"), SERVED.items())
def test_shapes_that_are_served(shape, served):
    found = tuple(kernel.suits(*shape) for kernel in (gram, formed, weighted))
    costs = dense.costs(*shape)
    cheaper = costs.get("formed", math.inf) < costs.get("gram", math.inf)
    assert (*found, cheaper) == served


@pytest.mark.parametrize("shape", [shape for shape, served in SERVED.items() if served[2]])
def test_blocks_cover_the_axes_within_the_memory_of_a_chip(shape):
    positions, rows, cols = shape
    blocks = weighted._blocks(*shape)
    assert positions % blocks.positions == 0
    assert tiles.fits(weighted._vmem(blocks))
    sides = formed._blocks(*shape)
    if formed.suits(*shape):
        assert rows % sides.rows == 0 and cols % sides.cols == 0


# Instruction bundles of one example, as libtpu 0.0.52 schedules the kernels for a TPU v5e.
BUNDLES = {
    gram: {
        (197, 768, 768): 1104,
        (512, 768, 3072): 8420,
        (512, 768, 768): 3552,
        (1024, 768, 768): 14844,
        (1024, 768, 2304): 29220,
    },
    formed: {
        (512, 768, 768): 5007,
        (512, 768, 3072): 19788,
        (1024, 768, 768): 9552,
        (1024, 768, 2304): 28692,
        (2048, 2048, 8192): 568832,
    },
    weighted: {
        (197, 768, 768): 2464,
        (197, 768, 3072): 9658,
        (512, 768, 3072): 16488,
        (1024, 768, 2304): 27918,
    },
}


@pytest.mark.parametrize("kernel", BUNDLES)
def test_costs_are_near_the_schedules_of_a_compiler(kernel):
    """The schedule of a long example has more products in a cycle than the units compute, so a cost
    may be above."""
    for shape, bundles in BUNDLES[kernel].items():
        assert 0.95 < kernel.cycles(*shape) / bundles < 1.25
