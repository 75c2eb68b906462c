"""Codes, and scales that a loss chooses: against a forward pass, gradients and searches in NumPy
float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.models import Preprocessing, Swin
from jaxdp.split.backbone import Backbone
from jaxdp.split.checks import check_labels
from jaxdp.split.quantization import (
    Scales,
    dequantize,
    describe_frontend,
    observe,
    quantize,
    quantize_frontend,
    quantized_front,
    search_scales,
)

# Few enough that roundings matter.
BITS = 4
CANDIDATES = 0.01 + 1.19 / 100 * np.arange(100)
PRODUCTS = ("scores", "mixture")


@functools.partial(jax.jit, static_argnums=0)
def represent(backbone, frontend, params, images):
    return quantized_front(backbone, frontend, images, params=params)


# --- Codes --------------------------------------------------------------------------------------


def test_halves_go_to_even_and_values_are_clamped():
    x = jnp.array([-9, -2.25, -1.75, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 9]) / 1.0
    codes = quantize(x, 0.5, 4)
    assert codes.dtype == jnp.int8
    assert codes.tolist() == [-8, -4, -4, -2, -2, 0, 0, 2, 2, 4, 7]
    assert quantize(x, 0.5, 2).tolist() == [-2, -2, -2, -2, -2, 0, 0, 1, 1, 1, 1]
    assert quantize(jnp.array([-1e9, 1e9]), 1.0).tolist() == [-128, 127]
    values = dequantize(codes, 0.5)
    assert values.dtype == jnp.float32
    assert values.tolist() == [-4, -2, -2, -1, -1, 0, 0, 1, 1, 2, 3.5]


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_an_error_is_at_most_half_a_unit(bits):
    x = np.linspace([-1, -2, 5], [1, 3, -5], 1000, dtype=np.float32)
    scale = (abs(x).max(0, keepdims=True) / (2 ** (bits - 1) - 0.5)).astype(np.float32)
    codes = quantize(jnp.asarray(x), jnp.asarray(scale), bits)
    assert codes.dtype == jnp.int8
    assert np.unique(codes[:, 2]).tolist() == list(range(-(2 ** (bits - 1)), 2 ** (bits - 1)))
    assert np.all(abs(dequantize(codes, jnp.asarray(scale)) - x) <= 0.5001 * scale)


@pytest.mark.parametrize("bits", [1, 9, 0, 8.0, None])
def test_impossible_bits_are_refused(vit, bits):
    message = rf"bits must be an integer in \[2, 8\], got {bits}"
    with pytest.raises(ValueError, match=message):
        quantize(jnp.ones(3), 1.0, bits)
    with pytest.raises(ValueError, match=message):
        quantize_frontend(vit.front, Scales({}, {}, jnp.ones(())), bits=bits)
    with pytest.raises(ValueError, match=message):
        search_scales(vit.backbone, vit.params, vit.images, vit.labels, bits=bits)


def test_only_one_label_per_image_within_the_classes_is_accepted():
    for good in ([0, 2, 1], np.array([2, 0, 0], np.uint8), jnp.array([1, 1, 1])):
        check_labels(good, 3, 3)
    for bad, message in [
        ([0, 1], r"labels must be \[n\], one class number .* of another n"),
        ([[0], [1], [2]], r"labels must be \[n\].* got shape \[n, 1\]"),
        ([0.0, 1.0, 2.0], "labels must be integers, got dtype float64"),
        ([0, 1, 3], r"labels must be in \[0, 3\), the classes. Some labels are outside"),
        ([0, -1, 2], r"labels must be in \[0, 3\)"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            check_labels(bad, 3, 3)
    with pytest.raises(ValueError, match="images must not be empty"):
        check_labels(np.zeros(0, int), 0, 3)


# --- One backward pass --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibration(vit):
    """Observes four images, two at a time."""
    return vit.images[:4], vit.labels[:4]


@pytest.fixture(scope="module")
def observed(vit, calibration):
    parts = [
        observe(vit.backbone, vit.params, *(x[i : i + 2] for x in calibration)) for i in (0, 2)
    ]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def losses(vit, calibration, taps):
    """Returns the loss of every image with taps added to outputs of sites, [..., B]."""
    representations = vit.reference.front(vit.exact, calibration[0], 2, vit.reference.tapped(taps))
    return vit.reference.cross_entropy(vit.logits(representations), calibration[1])


def by_images(path, x):
    """Reshapes [4 heads, T, d] of attention to [4, heads, T, d]."""
    return (
        x.reshape(4, -1, *x.shape[1:]) if path.endswith(PRODUCTS) else x.reshape(4, -1, x.shape[-1])
    )


def outputs(vit, calibration):
    """Returns the output of every site, without biases."""
    found = {}

    def hook(path, product, *operands):
        found[path] = product(*operands)
        return found[path]

    vit.reference.front(vit.exact, calibration[0], 2, hook)
    return found


@pytest.mark.slow
def test_sites_are_all_products_of_the_frontend(vit, observed):
    attention = [
        f"attention/{site}" for site in ("query", "key", "value", "scores", "mixture", "out")
    ]
    names = [
        "embed",
        *(f"block_{k}/{site}" for k in (0, 1) for site in (*attention, "mlp_0", "mlp_1")),
    ]
    assert list(describe_frontend(vit.backbone).sites) == names
    assert set(observed) == {*names, "output", "logits"}


def test_sites_are_found_after_jax_has_cached_the_frontend():
    model = Swin(
        num_classes=2, patch_size=4, window=2, width=2, depths=(2,), num_heads=(1,), mlp_ratio=1
    )
    backbone = Backbone(model, Preprocessing(size=8, mean=(0.5,), std=(0.5,)), 1)
    # held, so that their traces stay
    front, init = (
        backbone.front,
        functools.partial(backbone.model.init, stop=1),
    )
    jax.eval_shape(
        front, jax.eval_shape(init, jax.random.key(0), backbone.images)["params"], backbone.images
    )
    assert len(describe_frontend(backbone).sites) == 9


@pytest.mark.slow
def test_operands_are_those_of_the_forward_pass(vit, calibration, observed):
    expected = vit.reference.observe(vit.exact, calibration[0], 2)
    for path, operands in expected.items():
        if path == "output":
            np.testing.assert_allclose(observed[path][0][0], operands[0], atol=2e-5)
            continue
        seen = [by_images(path, x) for x in observed[path][0]]
        if path == "embed":
            assert observed[path][0][0].shape == (4, 8, 8, 1)
            seen = [vit.reference.patches(observed[path][0][0], 2)]
        for mine, theirs in zip(seen, operands, strict=len(seen) == 2):
            np.testing.assert_allclose(mine, theirs, atol=2e-5, err_msg=path)


@pytest.mark.slow
def test_one_backward_pass_has_the_gradients_of_every_site_on_its_own(vit, calibration, observed):
    rng, step = np.random.default_rng(0), 1e-5
    for path, y in outputs(vit, calibration).items():
        g = by_images(path, np.asarray(observed[path][1], np.float64))
        directions = rng.normal(size=(3, *y.shape))
        higher, lower = (
            losses(vit, calibration, {path: sign * step * directions}) for sign in (1, -1)
        )
        expected = (higher - lower) / (2 * step)  # [3, 4]
        found = np.einsum("pik,ik->pi", directions.reshape(3, 4, -1), g.reshape(4, -1))
        assert abs(expected).max() > 1e-3
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=1e-4 * abs(expected).max(), err_msg=path
        )


# --- Search -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scales(vit, calibration):
    return search_scales(vit.backbone, vit.params, *calibration, bits=BITS, batch_size=2)


def gradient(vit, calibration, path, shape):
    """Computes gradients of every image's loss by the output of a site, from differences: [B, ...]
    like `shape`."""
    steps = 1e-5 * np.eye(np.prod(shape[1:])).reshape(-1, 1, *shape[1:])
    higher, lower = (losses(vit, calibration, {path: sign * steps}) for sign in (1, -1))
    return ((higher - lower) / 2e-5).T.reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["block_0/mlp_0", "embed", "block_0/attention/mixture", "block_1/attention/scores", "output"],
)
def test_scales_are_those_of_an_exhaustive_search(vit, calibration, scales, path):
    reference = vit.reference
    operands = reference.observe(vit.exact, calibration[0], 2)[path]
    y = outputs(vit, calibration)[path]
    g = gradient(vit, calibration, path, y.shape)
    check_search(reference, path, BITS, operands, y, g, scales)


def check_search(reference, path, bits, operands, y, g, scales):
    """Compares with `reference.search` in every group of entries with a scale in common."""
    product = np.matmul if len(operands) == 2 else (lambda x: x)
    if path.endswith("scores"):
        product = lambda q, k: q @ k.swapaxes(-1, -2)  # noqa: E731
    bases = [reference.largest(path, x, bits) for x in operands]
    found = [scales.output] if path == "output" else [scales.first[path], scales.second[path]]
    fractions = [np.asarray(s, np.float64) / base for s, base in zip(found, bases, strict=True)]

    def error(*candidates):
        """Computes Eq. 8 in every group."""
        spread = [
            reference.spread(path, c * base) for c, base in zip(candidates, bases, strict=True)
        ]
        both = [
            x if s is None else reference.rounded(x, s, bits)
            for x, s in zip(operands, spread, strict=True)
        ]
        if path == "embed":
            both[0] = operands[0]
        squares = (g * (product(*both) - y)) ** 2
        if path.endswith(PRODUCTS):
            return squares.mean((0, 2, 3))
        return squares.mean((0, 1)) if path == "embed" else squares.mean(keepdims=True).ravel()

    groups = np.size(fractions[-1])
    if path == "output":
        allowed = [{(c,) for c in near(CANDIDATES, [error(c)[0] for c in CANDIDATES])}]
    elif path == "embed":  # The images are not quantised.
        errors = np.array([error(1.0, c) for c in CANDIDATES])
        allowed = [{(1.0, c) for c in near(CANDIDATES, errors[:, k])} for k in range(groups)]
    else:
        table = functools.lru_cache(error)
        allowed = [
            reference.search(lambda *c, k=k: table(*c)[k], 3, CANDIDATES) for k in range(groups)
        ]
    for k in range(groups):
        mine = [np.broadcast_to(f, groups)[k] for f in fractions]
        assert any(np.allclose(mine, pair, rtol=1e-5) for pair in allowed[k]), (
            path,
            k,
            mine,
            allowed[k],
        )


def near(candidates, errors):
    return [c for c, e in zip(candidates, errors, strict=True) if e <= min(errors) * (1 + 1e-6)]


@pytest.mark.slow
def test_every_scale_is_a_candidate_of_its_own_operand(vit, calibration, scales):
    seen = vit.reference.observe(vit.exact, calibration[0], 2)
    found = {path: (scales.first[path], scales.second[path]) for path in scales.first} | {
        "output": (scales.output,)
    }
    assert set(found) == set(seen) == {*scales.second, "output"}
    for path, operands in seen.items():
        for which, (scale, x) in enumerate(zip(found[path], operands, strict=True)):
            base = vit.reference.largest(path, x, BITS)
            assert scale.shape == np.shape(base) and scale.dtype == jnp.float32
            if (path, which) != ("embed", 0):  # Images are not quantised.
                distance = abs(np.asarray(scale / base).reshape(-1, 1) - CANDIDATES).min(1)
                np.testing.assert_allclose(distance, 0, atol=2e-5, err_msg=path)


def without(vit, *paths):
    """Returns the parameters with some kernels zero."""

    def leaf(path, value):
        name = "/".join(entry.key for entry in path)
        return jnp.zeros_like(value) if name.removesuffix("/kernel") in paths else value

    return jax.tree_util.tree_map_with_path(leaf, vit.params)


@pytest.mark.parametrize(
    ("zero", "named"),
    [("head", "block_0/attention/key"), ("block_1/mlp_1", "block_1/mlp_0")],
)
def test_gradients_that_are_zero_are_refused(vit, calibration, zero, named):
    message = (
        rf"with respect to {named} are numerically zero, so they select no scale. .* metric='mse'"
    )
    with pytest.raises(ValueError, match=message):
        search_scales(vit.backbone, without(vit, zero), *calibration, bits=BITS, batch_size=2)


@pytest.mark.slow
def test_gradients_that_are_round_off_are_refused(vit, calibration):
    """Checks parameters that give the right classes almost probability one."""
    images = calibration[0]
    params = {**vit.params, "head": {**vit.params["head"], "bias": jnp.array([16.0, 0.0, 0.0])}}
    _, of_logits = observe(vit.backbone, params, images, jnp.zeros(4, int))["logits"]
    assert 1e-8 < abs(of_logits).max() < 1e-6
    with pytest.raises(ValueError, match="with respect to the logits are numerically zero"):
        search_scales(vit.backbone, params, images, jnp.zeros(4, int), bits=BITS)


@pytest.mark.slow
def test_a_head_that_no_gradient_reaches_is_not_clamped(vit, calibration):
    """Checks a first head whose output has no effect. Its scales are the largest ones."""
    params = jax.tree.map(jnp.copy, vit.params)
    out = params["block_0"]["attention"]["out"]
    width = len(out["kernel"]) // vit.backbone.model.num_heads
    out["kernel"] = out["kernel"].at[:width].set(0.0)
    scales = search_scales(vit.backbone, params, *calibration, bits=BITS, batch_size=2)
    path = "block_0/attention/mixture"
    operands = vit.reference.observe(
        jax.tree.map(lambda x: np.asarray(x, np.float64), params), calibration[0], 2
    )[path]
    for scale, x in zip((scales.first[path], scales.second[path]), operands, strict=True):
        fractions = np.asarray(scale) / vit.reference.largest(path, x, BITS)
        np.testing.assert_allclose(fractions[0], 1.0, rtol=1e-5)
        assert np.all(abs(fractions[1:] - 1) > 1e-4)


@pytest.mark.slow
def test_the_plain_error_needs_no_gradient(vit, calibration):
    params = without(vit, "head", "block_1/mlp_1")
    scales = search_scales(
        vit.backbone, params, *calibration, bits=BITS, batch_size=2, metric="mse"
    )
    # Nothing depends on the scale of a weight that is zero, which must still be one.
    assert all(np.all(np.isfinite(s)) and np.all(s > 0) for s in jax.tree.leaves(scales))
    seen, y = vit.reference.observe(vit.exact, calibration[0], 2), outputs(vit, calibration)
    for path in ("block_0/mlp_0", "block_0/attention/mixture"):
        check_search(vit.reference, path, BITS, seen[path], y[path], 1.0, scales)


@pytest.mark.slow
def test_impossible_searches_are_refused(vit):
    search = functools.partial(search_scales, vit.backbone, vit.params)
    for labels, message in [
        (vit.labels[:3], r"labels must be \[n\].* of another n"),
        (vit.labels[:4] + 1, r"labels must be in \[0, 3\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            search(vit.images[:4], labels)
    with pytest.raises(ValueError, match="images must not be empty"):
        search(vit.images[:0], vit.labels[:0])
    with pytest.raises(ValueError, match="metric must be 'hessian' or 'mse', got 'kl'"):
        search(vit.images, vit.labels, metric="kl")
    for bad in [(0.0, 1.2, 100), (1.2, 0.1, 100), (0.1, 1.2, 0)]:
        with pytest.raises(ValueError, match="fractions must be"):
            search(vit.images, vit.labels, fractions=bad)
    for name in ("rounds", "batch_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            search(vit.images, vit.labels, **{name: 0})


# --- Quantised frontends ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, BITS])
def test_all_that_is_shipped_are_codes(vit, bits):
    frontend = vit.quantized(bits)
    leaves = flatten_dict(vit.front, sep="/")
    assert set(frontend.codes) == set(frontend.units) == set(leaves)
    for path, leaf in leaves.items():
        codes, unit = np.asarray(frontend.codes[path]), np.asarray(frontend.units[path])
        assert codes.dtype == np.int8 and codes.shape == leaf.shape
        if not path.endswith("kernel"):
            peak = abs(np.asarray(leaf, np.float64)).max()
            np.testing.assert_allclose(unit, peak / 127 if peak else 1.0, rtol=1e-6)
            np.testing.assert_allclose(codes * np.float64(unit), leaf, atol=0.501 * unit)
            continue
        k = bits
        axes = (0, 1, 2) if path == "embed/kernel" else None
        peak = abs(np.asarray(leaf)).max(axes)
        np.testing.assert_allclose(unit, peak / (2 ** (k - 1) - 0.5), rtol=1e-6)
        exact = np.asarray(leaf, np.float64) / unit
        # The largest entry lies on a tie, which float32 may break in either way.
        tie = abs(abs(exact - np.floor(exact)) - 0.5) < 1e-4
        low, high = -(2 ** (k - 1)), 2 ** (k - 1) - 1
        assert np.array_equal(codes[~tie], np.clip(np.rint(exact[~tie]), low, high))
        assert tie.sum() >= np.size(peak) and np.all(abs(codes[tie] - exact[tie]) < 0.5001)
    params = frontend.params
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), vit.front
    )
    kernel = (
        frontend.codes["embed/kernel"]
        * np.asarray(frontend.units["embed/kernel"])[None, None, None]
    )
    np.testing.assert_allclose(params["embed"]["kernel"], kernel, rtol=1e-6)
    assert frontend.bits == bits


def check_codes(found, expected, unit):
    """Checks equality except for a few codes that float32 may round to a neighbour."""
    steps = abs(np.asarray(found) - expected) / np.asarray(unit)
    assert steps.max() < 1.01 and np.mean(steps > 0.01) < 0.01, (steps.max(), np.mean(steps > 0.01))


@pytest.mark.slow
def test_fewer_bits_are_a_larger_error_and_every_operand_is_rounded(vit):
    exact, errors = vit.represent(vit.images), []
    for bits in (8, BITS, 3):
        frontend = vit.quantized(bits)
        found = represent(vit.backbone, frontend, frontend.params, vit.images)
        assert found.shape == exact.shape and found.dtype == jnp.float32
        check_codes(
            found,
            vit.represent_quantized(frontend, frontend.params, vit.images),
            frontend.scales.output,
        )
        errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert (
        0.001 < errors[0] < 0.03 and 5 * errors[0] < errors[1] and 1.5 * errors[1] < errors[2] < 1
    ), errors


@pytest.mark.slow
def test_noisy_parameters_are_used_as_they_are(vit):
    frontend = vit.quantized(BITS)
    rng = np.random.default_rng(0)
    # Less than half a unit: rounding would remove all of it.
    noisy = {
        path: np.asarray(
            np.asarray(leaf)
            + np.asarray(frontend.units[path]) * rng.uniform(-0.4, 0.4, leaf.shape),
            "f4",
        )
        for path, leaf in flatten_dict(frontend.params, sep="/").items()
    }
    noisy = unflatten_dict(noisy, sep="/")
    found = represent(vit.backbone, frontend, noisy, vit.images)
    check_codes(found, vit.represent_quantized(frontend, noisy, vit.images), frontend.scales.output)
    assert np.mean(found != represent(vit.backbone, frontend, frontend.params, vit.images)) > 0.2


@pytest.mark.slow
def test_heads_of_all_windows_of_a_swin_share_scales(reference):
    """Checks attention with images, windows and heads in one axis, heads fastest."""
    model = Swin(
        num_classes=3, patch_size=2, window=2, width=8, depths=(2,), num_heads=(2,), mlp_ratio=1
    )
    backbone = Backbone(model, Preprocessing(size=8, mean=(0.3,), std=(0.4,)), 1)
    rng = np.random.default_rng(0)
    images, labels = rng.random((2, 8, 8, 1), np.float32), np.array([0, 2])
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)
    scales = search_scales(backbone, params, images, labels, batch_size=2)
    assert len(scales.first) == len(scales.second) == 9
    observed = observe(backbone, params, images, labels)

    attention = "stage_0_block_0/attention"
    weights = params["stage_0_block_0"]["attention"]["query"]
    (x,) = observed[f"{attention}/query"][0]
    # of images, windows, tokens
    query = (np.asarray(x) @ weights["kernel"] + weights["bias"]).reshape(2, 4, 4, 2, 4)
    base = abs(query).max((0, 1, 2, 4)) / 127.5  # of each head
    assert abs(base[0] / base[1] - 1) > 0.05
    distance = abs(
        np.asarray(scales.first[f"{attention}/scores"] / base)[:, None] - CANDIDATES
    ).min(1)
    np.testing.assert_allclose(distance, 0, atol=2e-5)

    for path in (f"{attention}/scores", f"{attention}/mixture"):
        operands, g = jax.tree.map(
            lambda x: np.asarray(x, np.float64).reshape(-1, 2, *x.shape[1:]), observed[path]
        )
        assert g.shape == (8, 2, 4, 4)
        y = np.matmul(
            operands[0], operands[1].swapaxes(-1, -2) if path.endswith("scores") else operands[1]
        )
        check_search(reference, path, 8, operands, y, g, scales)

    frontend = jax.jit(quantize_frontend)(backbone.divide(params)[0], scales)
    found, exact = represent(backbone, frontend, frontend.params, images), observed["output"][0][0]
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert found.shape == (2, 16, 8) and 0.001 < error < 0.05
    np.testing.assert_allclose(found / scales.output, np.rint(found / scales.output), atol=1e-3)
