"""Clipped gradients of convolutions in the forms of a GPU, run by JAX on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.transforms import channel_weights, clipped_sums, convolutions, forms, sites
from tests.transforms.small_net import factors_of_other_parts
from tests.transforms.test_tpu_forms import flat, gradients, standardised_picture

B = 4
CLIP = 0.5
LAST = ("NHWC", "HWIO", "NHWC")

# Name: (shape of an example, of the kernel, settings of the convolution).
GEOMETRIES = {
    "split windows": ((9, 7, 4), (3, 3, 4, 4), {"window_strides": (1, 1), "padding": "SAME"}),
    "split, dilated": (
        (9, 8, 3),
        (3, 2, 3, 2),
        {"window_strides": (1, 2), "padding": "SAME", "rhs_dilation": (2, 1)},
    ),
    "gradients of many entries": (
        (4, 3, 8),
        (3, 3, 8, 8),
        {"window_strides": (1, 1), "padding": "SAME"},
    ),
    "strides": ((9, 8, 3), (3, 3, 3, 5), {"window_strides": (2, 3), "padding": "VALID"}),
    "dilated data": (
        (5, 4, 3),
        (3, 2, 3, 4),
        {"window_strides": (1, 1), "padding": ((2, 1), (0, 1)), "lhs_dilation": (2, 1)},
    ),
    "negative padding": (
        (9, 7, 2),
        (2, 3, 2, 2),
        {"window_strides": (1, 1), "padding": ((-1, 1), (1, -1))},
    ),
    "groups": (
        (6, 5, 4),
        (3, 3, 2, 6),
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
    ),
    "patches that do not overlap": (
        (6, 4, 3),
        (2, 2, 3, 4),
        {"window_strides": (2, 2), "padding": "VALID"},
    ),
}
# "bookkeeping" is computed where it treats the kernels in another way than "auto".
ENGINES = ("auto", "bookkeeping")
SPLIT = ("split windows", "split, dilated", "negative padding")


def standardised(kernel):
    """Centres a kernel, so that the gradient of a leaf is another one than that of the kernel."""
    return kernel - kernel.mean((0, 1, 2), keepdims=True)


def problem(geometry, dtype=jnp.float32):
    """Returns (loss, params, batch) of a convolution, and of the same one of a centred kernel."""
    shape, kernel, settings = GEOMETRIES[geometry]

    def loss(params, x):
        total = jnp.zeros((), x.dtype)
        for name, change in (("plain", lambda k: k), ("centred", standardised)):
            out = jax.lax.conv_general_dilated(
                x[None], change(params[name]), dimension_numbers=LAST, **settings
            )
            total += jnp.square(jnp.tanh(out)).sum()
        return total

    rng = np.random.default_rng(0)
    params = {name: 0.3 * rng.normal(size=kernel) for name in ("plain", "centred")}
    batch = rng.normal(size=(B, *shape))
    params, batch = jax.tree.map(lambda x: x.astype(dtype), (params, batch))
    return loss, params, batch


def with_a_bad_example(geometry):
    """Returns a problem whose second example is NaN."""
    loss, params, batch = problem(geometry)
    batch[1] = np.nan
    return loss, params, batch


def on_a_gpu(loss, params, batch, mask=None, clip_norm=CLIP, **options):
    """Returns the clipped sum by the forms of a GPU. The CPU multiplies all bits of float32."""
    clipped = jaxdp.clipped_grad(loss, clip_norm=clip_norm, **options)
    with forms.traced_for("cuda"), jax.default_matmul_precision("highest"):
        return jax.device_get(clipped(params, batch, mask=mask))


def clipped_sum(exact, clip_norm=CLIP):
    norms = np.linalg.norm(exact, axis=1)
    return norms, (exact * np.minimum(1, clip_norm / norms)[:, None]).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_clipped_sums_and_norms(geometry, oracle, monkeypatch):
    """An example that is NaN, and one that is masked, contribute nothing."""
    loss, params, batch = with_a_bad_example(geometry)
    split = []
    grads = convolutions.Conv._grads_by_split_windows
    monkeypatch.setattr(
        convolutions.Conv,
        "_grads_by_split_windows",
        lambda *args: split.append(True) or grads(*args),
    )
    arguments = params, batch, np.arange(B) != 2
    with forms.traced_for("cuda"), jax.default_matmul_precision("highest"):
        results = oracle.every_method(loss, ENGINES, *arguments, clip_norm=CLIP)
    assert bool(split) == (geometry in SPLIT)
    counted = np.array([0, 3])
    norms, expected = clipped_sum(gradients(loss, params, batch[counted]))
    for result in map(jax.device_get, results.values()):
        np.testing.assert_allclose(result.norms[counted], norms, rtol=1e-4)
        np.testing.assert_allclose(flat(result.grads), expected, atol=1e-5)
        assert result.nonfinite == 1


# Shape of an example, of the kernel, and strides. The costs choose factors for few positions.
STANDARDISED = {
    "few positions": ((4, 3, 24), (3, 3, 24, 32), (1, 1)),
    "strides": ((7, 6, 24), (3, 3, 24, 32), (2, 2)),
    "one entry of the kernel": ((4, 3, 64), (1, 1, 64, 96), (1, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("geometry", STANDARDISED)
def test_norms_of_standardised_kernels_follow_from_factors(geometry, monkeypatch):
    """The twin forgets what the weight takes away from the norm."""
    shape, kernel, strides = STANDARDISED[geometry]
    by_factors = []
    norm = sites.Site.norm_by_factors
    monkeypatch.setattr(
        sites.Site, "norm_by_factors", lambda *args: by_factors.append(args) or norm(*args)
    )

    def loss(params, x):
        return jnp.square(jnp.tanh(standardised_picture(params, x[None], strides))).sum()

    rng = np.random.default_rng(0)
    params = {"gain": rng.normal(size=kernel[-1:]), "kernel": rng.normal(size=kernel)}
    params = jax.tree.map(np.float32, params)
    batch = rng.normal(size=(B, *shape)).astype(np.float32)
    batch[1] = np.nan
    counted = np.array([0, 3])
    norms, expected = clipped_sum(gradients(loss, params, batch[counted]))
    result = on_a_gpu(loss, params, batch, mask=np.arange(B) != 2)
    assert len(by_factors) == 1
    np.testing.assert_allclose(result.norms[counted], norms, rtol=1e-4)
    np.testing.assert_allclose(flat(result.grads), expected, atol=1e-5)

    low_rank = channel_weights.low_rank

    def forgetful(*arguments):
        terms, added, *bounds = low_rank(*arguments)
        return terms, 0 * added, *bounds

    monkeypatch.setattr(channel_weights, "low_rank", forgetful)
    twin = on_a_gpu(lambda *args: loss(*args), params, batch, mask=np.arange(B) != 2)
    assert not np.allclose(twin.norms[counted], norms, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_twin", [False, True])
def test_each_part_has_its_norm(is_twin, monkeypatch):
    """The twin applies the factors of one part to the other."""
    loss, params, batch = with_a_bad_example("split windows")
    if is_twin:
        monkeypatch.setattr(clipped_sums, "_engine_result", factors_of_other_parts)
    norms = {"centred": 0.1, "plain": 0.5}  # in the order of the leaves
    result = on_a_gpu(loss, params, batch, mask=np.arange(B) != 2, clip_norm=norms)
    counted = np.array([0, 3])
    exact = gradients(loss, params, batch[counted])
    for (name, norm), of_part in zip(norms.items(), np.split(exact, 2, axis=1), strict=True):
        lengths, expected = clipped_sum(of_part, norm)
        np.testing.assert_allclose(result.part_norms[name][counted], lengths, rtol=1e-4)
        is_close = np.allclose(flat(result.grads[name]), expected, atol=1e-5)
        assert is_close != is_twin


@pytest.mark.slow
def test_bfloat16():
    loss, params, batch = problem("split windows", jnp.bfloat16)
    result = on_a_gpu(loss, params, batch)
    norms, expected = clipped_sum(gradients(loss, params, batch))
    np.testing.assert_allclose(result.norms, norms, rtol=0.03)
    assert np.linalg.norm(flat(result.grads) - expected) < 0.03 * np.linalg.norm(expected)
    for i in range(B):  # the norm is that of the gradient in the sum
        alone = on_a_gpu(loss, params, batch, mask=np.arange(B) == i)
        assert np.linalg.norm(flat(alone.grads)) <= CLIP * (1 + 2.0**-8)


@pytest.mark.slow
def test_factors_in_tf32():
    """The norm and the sum have the same factors, so the bound holds to more digits than TF32."""
    loss, params, batch = problem("split windows")
    with forms.traced_for("cuda"):
        clipped = jaxdp.clipped_grad(loss, clip_norm=CLIP)
        grads = [clipped(params, batch, mask=np.arange(B) == i).grads for i in range(B)]
    for alone in grads:
        np.testing.assert_allclose(np.linalg.norm(flat(alone)), CLIP, rtol=1e-4)


def test_an_empty_batch():
    loss, params, batch = problem("split windows")
    result = on_a_gpu(loss, params, batch[:0])
    assert not flat(result.grads).any() and result.norms.shape == (0,)


TWINS = {
    "no row is left out": (sites, "rows_kept", lambda x, keep: x),
    "cotangents are not shifted": (
        convolutions.Conv,
        "_shifted_cotangents",
        lambda rule, g: jnp.concatenate([jnp.pad(g, ((0, 0), (0, 2), (0, 0), (0, 0)))] * 3, -1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_form_is_caught(twin, monkeypatch):
    loss, params, batch = with_a_bad_example("split windows")
    _, expected = clipped_sum(gradients(loss, params, batch[[0, 2, 3]]))
    owner, name, broken = TWINS[twin]
    monkeypatch.setattr(owner, name, broken)
    assert not np.allclose(flat(on_a_gpu(loss, params, batch).grads), expected, atol=1e-3)
