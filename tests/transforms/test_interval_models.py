"""`jaxdp.interval` on whole models and inside other transformations, and what it refuses."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp import losses, models
from jaxdp.transforms import boxes, intervals


def box(tree, radius):
    return jaxdp.Interval(jax.tree.map(lambda x: x - radius, tree), jax.tree.map(lambda x: x + radius, tree))


def ends(tree):
    pairs = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jaxdp.Interval))
    return [x.lower for x in pairs], [x.upper for x in pairs]


@functools.cache
def bounds_of(fun):
    return jax.jit(lambda params, radius, args: jaxdp.interval(fun)(box(params, radius), *args))


def worst_violation(fun, params, radius, args, points=20):
    """Returns how far sampled values leave the bounds (negative if all are inside), and the width of the bounds."""
    low, high = ends(bounds_of(fun)(params, radius, args))

    def moved(key):
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        inside = [jax.random.uniform(k, x.shape, x.dtype, -1, 1) for k, x in zip(keys, leaves, strict=True)]
        corner = jax.random.bernoulli(key)
        steps = [radius * jnp.where(corner, jnp.sign(s), s) for s in inside]
        return jax.tree.unflatten(structure, [x + s for x, s in zip(leaves, steps, strict=True)])

    values = jax.lax.map(lambda key: fun(moved(key), *args), jax.random.split(jax.random.key(0), points))
    out = [
        jnp.max(jnp.maximum(a[None] - v, v - b[None]))
        for a, v, b in zip(low, jax.tree.leaves(values), high, strict=True)
    ]
    return float(max(out)), float(max(jnp.max(b - a) for a, b in zip(low, high, strict=True)))


class Attention(nn.Module):
    """LayerNorm, two heads of self-attention, GELU and a head: what a ViT block is made of."""

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        q, k, v = (nn.Dense(4, name=name)(y).reshape(3, 2, 2) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 2, axis=-1)
        x = x + nn.Dense(4)(jnp.einsum("hqk,khd->qhd", weights, v).reshape(3, 4))
        return nn.Dense(3)(nn.gelu(nn.Dense(6)(x)).mean(axis=0))


class Block(nn.Module):
    """A residual block with weight standardisation and GroupNorm, max and average pooling."""

    @nn.compact
    def __call__(self, x):
        x = x[None]
        y = nn.relu(nn.GroupNorm(2)(models.layers.WSConv(4, (3, 3))(x)))
        x = nn.max_pool(x + models.layers.WSConv(2, (3, 3))(y), (2, 2), (2, 2))
        return nn.Dense(3)(nn.avg_pool(x, (2, 2), (1, 1)).reshape(-1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape", "radius"),
    [(Attention(), (3, 4), 1e-4), (Block(), (6, 6, 2), 1e-3)],
    ids=["attention", "residual block"],
)
def test_gradients_of_layers_are_inside_their_bounds(model, shape, radius):
    with jax.numpy_dtype_promotion("standard"):  # Flax's GroupNorm
        x = jax.random.normal(jax.random.key(1), shape)
        params = model.init(jax.random.key(2), x)["params"]

        def loss(params, x):
            return losses.softmax_cross_entropy(model.apply({"params": params}, x), 1)

        violation, width = worst_violation(jax.grad(loss), params, radius, (x,))
    assert violation <= 0 and np.isfinite(width)


@pytest.mark.slow
def test_gradients_of_a_cnn_of_the_registry_are_inside_their_bounds():
    model = models.create("cnn", num_classes=3, widths=(4, 4), dense=0)
    x = jax.random.uniform(jax.random.key(0), (8, 8, 1))
    params = model.init(jax.random.key(1), x[None])["params"]

    def loss(params, x):
        return losses.softmax_cross_entropy(model.apply({"params": params}, x[None])[0], 1)

    gradient = jax.grad(loss)
    for radius in (1e-4, 0.02):
        violation, width = worst_violation(gradient, params, radius, (x,))
        assert violation <= 0 and np.isfinite(width)


def dense_loss(params, example):
    x, y = example
    hidden = jnp.maximum(x @ params["w"] + params["b"], 0.0)
    return losses.softmax_cross_entropy(hidden @ params["v"], y)


def dense():
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = {"w": (4, 6), "b": (6,), "v": (6, 3)}
    return {name: jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=True)}


@pytest.mark.slow
def test_vmap_over_examples_and_bounds_of_vmap_agree():
    xs, ys = jax.random.normal(jax.random.key(4), (5, 4)), jnp.arange(5) % 3
    params = box(dense(), 0.01)
    outside = jax.jit(jax.vmap(lambda e: jaxdp.interval(jax.grad(dense_loss))(params, e)))((xs, ys))
    inside = jax.jit(jaxdp.interval(jax.vmap(jax.grad(dense_loss), (None, 0))))(params, (xs, ys))
    for a, b in zip(jax.tree.leaves(outside), jax.tree.leaves(inside), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_point_gives_the_plain_gradient():
    params, example = dense(), (jnp.arange(4.0) / 4, jnp.asarray(2))
    low, high = ends(jaxdp.interval(jax.grad(dense_loss))(box(params, 0.0), example))
    for a, value, b in zip(low, jax.tree.leaves(jax.grad(dense_loss)(params, example)), high, strict=True):
        assert (a <= value).all() and (value <= b).all()
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.slow
def test_scan_carries_become_intervals_and_cond_returns_the_hull():
    def looped(w, x):
        return lax.scan(lambda carry, t: (carry * 0.5 + w * t, carry), x, jnp.arange(1.0, 4.0))

    final, states = jaxdp.interval(looped)(jaxdp.Interval(jnp.asarray(-1.0), jnp.asarray(2.0)), jnp.asarray(1.0))
    np.testing.assert_allclose((final.lower, final.upper), (0.125 - 4.25, 0.125 + 8.5), rtol=1e-5)
    np.testing.assert_allclose(states.upper, [1.0, 2.5, 5.25], rtol=1e-5)

    def branched(w):
        return lax.cond(w > 0, lambda v: v + 10.0, lambda v: v, w)

    for ends_, expected in (((-1.0, 2.0), (-1.0, 12.0)), ((1.0, 2.0), (11.0, 12.0)), ((-2.0, -1.0), (-2.0, -1.0))):
        found = jaxdp.interval(branched)(jaxdp.Interval(*map(jnp.asarray, ends_)))
        assert found.lower <= expected[0] and expected[1] <= found.upper
    assert float(jaxdp.interval(branched)(jaxdp.Interval(jnp.asarray(1.0), jnp.asarray(2.0))).lower) > 10.9


@pytest.mark.slow
def test_arguments_and_results_are_pytrees():
    def fun(tree, scale, *, shift):
        return {"sum": tree["a"] * scale + shift, "positive": tree["a"] > 0, "index": jnp.argmax(tree["b"])}

    tree = {"a": jnp.asarray([-1.0, 3.0]), "b": jnp.asarray([0.0, 5.0, 0.1])}
    found = jaxdp.interval(fun)(box(tree, 0.5), 2.0, shift=jnp.asarray([1.0, 1.0]))
    np.testing.assert_allclose(found["sum"].lower, [-2.0, 6.0], rtol=1e-6)
    assert found["positive"].lower.tolist() == [False, True] and found["positive"].upper.tolist() == [False, True]
    assert (int(found["index"].lower), int(found["index"].upper)) == (1, 1)
    mixed = jaxdp.interval(fun)({"a": jaxdp.Interval.point(tree["a"]), "b": tree["b"]}, 2.0, shift=jnp.zeros(2))
    assert float(mixed["sum"].width.max()) < 1e-5


def test_a_missing_rule_names_the_primitive_the_line_and_the_remedy():
    def fun(x):
        return lax.lgamma(x)

    wide = jaxdp.Interval(jnp.asarray(2.0), jnp.asarray(3.0))
    with pytest.raises(
        intervals.UnsupportedPrimitive, match=r"'lgamma'.*test_interval_models.py:\d+, in .*fun"
    ) as error:
        jaxdp.interval(fun)(wide)
    assert "register_rule('lgamma')" in str(error.value)
    try:

        @intervals.register_rule("lgamma")
        def rule(eqn, x):  # increasing from 1.4616 on
            return jaxdp.Interval(*intervals.widen(*(eqn.bind(end)[0] for end in (x.lower, x.upper)), 32))

        found = jaxdp.interval(fun)(wide)
        np.testing.assert_allclose((found.lower, found.upper), (0.0, np.log(2.0)), atol=1e-5)
    finally:
        del boxes.RULES["lgamma"]


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


def test_settings_and_loops_that_depend_on_an_interval_are_refused():
    with pytest.raises(ValueError, match="product must be 'tight' or 'rump', got 'exact'"):
        jaxdp.interval(jnp.sin, product="exact")
    with pytest.raises(intervals.UnsupportedPrimitive, match="The condition of the loop depends on an interval"):
        jaxdp.interval(lambda x: lax.while_loop(lambda v: v < 3.0, lambda v: v * 2.0, x))(
            jaxdp.Interval(jnp.asarray(1.0), jnp.asarray(2.0))
        )
    with pytest.raises(intervals.UnsupportedPrimitive, match="index or predicate depends on an interval"):
        jaxdp.interval(lambda x: jnp.arange(4.0)[x])(jaxdp.Interval(jnp.asarray(1), jnp.asarray(2)))


@pytest.mark.slow
def test_endpoints_of_numpy_float64_are_rounded_outward():
    tenth = np.asarray(0.1)
    interval = jaxdp.Interval(tenth, tenth)
    assert float(interval.lower) <= 0.1 <= float(interval.upper) and interval.lower.dtype == jnp.float32
    assert float(jaxdp.Interval(-np.inf, np.inf).upper) == np.inf
