"""`jaxdp.interval` inside other transformations, its arguments and results, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdp
from jaxdp import losses
from jaxdp.transforms import boxes, intervals


def box(tree, radius):
    return jaxdp.Interval(
        jax.tree.map(lambda x: x - radius, tree), jax.tree.map(lambda x: x + radius, tree)
    )


def ends(tree):
    pairs = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, jaxdp.Interval))
    return [x.lower for x in pairs], [x.upper for x in pairs]


def dense_loss(params, example):
    x, y = example
    hidden = jnp.maximum(x @ params["w"] + params["b"], 0.0)
    return losses.softmax_cross_entropy(hidden @ params["v"], y)


def dense():
    rng = np.random.default_rng(3)
    shapes = {"w": (4, 6), "b": (6,), "v": (6, 3)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.slow
def test_vmap_over_examples_and_bounds_of_vmap_agree():
    xs, ys = (
        np.random.default_rng(4).normal(size=(5, 4)).astype(np.float32),
        np.arange(5, dtype=np.int32) % 3,
    )
    params = box(dense(), np.float32(0.01))
    outside = jax.jit(jax.vmap(lambda e: jaxdp.interval(jax.grad(dense_loss))(params, e)))((xs, ys))
    inside = jax.jit(jaxdp.interval(jax.vmap(jax.grad(dense_loss), (None, 0))))(params, (xs, ys))
    for a, b in zip(jax.tree.leaves(outside), jax.tree.leaves(inside), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_point_gives_the_plain_gradient():
    params, example = dense(), (np.arange(4, dtype=np.float32) / 4, np.int32(2))
    gradient = jax.grad(dense_loss)
    low, high = ends(jax.jit(jaxdp.interval(gradient))(box(params, 0), example))
    for a, value, b in zip(
        low, jax.tree.leaves(jax.jit(gradient)(params, example)), high, strict=True
    ):
        assert (a <= value).all() and (value <= b).all()
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.slow
def test_scan_carries_become_intervals_and_cond_returns_the_hull():
    def looped(w, x):
        return lax.scan(lambda carry, t: (carry * 0.5 + w * t, carry), x, jnp.arange(1.0, 4.0))

    final, states = jaxdp.interval(looped)(
        jaxdp.Interval(jnp.asarray(-1.0), jnp.asarray(2.0)), jnp.asarray(1.0)
    )
    np.testing.assert_allclose((final.lower, final.upper), (0.125 - 4.25, 0.125 + 8.5), rtol=1e-5)
    np.testing.assert_allclose(states.upper, [1.0, 2.5, 5.25], rtol=1e-5)

    def branched(w):
        return lax.cond(w > 0, lambda v: v + 10.0, lambda v: v, w)

    for ends_, expected in (
        ((-1.0, 2.0), (-1.0, 12.0)),
        ((1.0, 2.0), (11.0, 12.0)),
        ((-2.0, -1.0), (-2.0, -1.0)),
    ):
        found = jaxdp.interval(branched)(jaxdp.Interval(*map(jnp.asarray, ends_)))
        assert found.lower <= expected[0] and expected[1] <= found.upper
    assert (
        float(jaxdp.interval(branched)(jaxdp.Interval(jnp.asarray(1.0), jnp.asarray(2.0))).lower)
        > 10.9
    )


@pytest.mark.slow
def test_arguments_and_results_are_pytrees():
    def fun(tree, scale, *, shift):
        return {
            "sum": tree["a"] * scale + shift,
            "positive": tree["a"] > 0,
            "index": jnp.argmax(tree["b"]),
        }

    tree = {"a": jnp.asarray([-1.0, 3.0]), "b": jnp.asarray([0.0, 5.0, 0.1])}
    found = jaxdp.interval(fun)(box(tree, 0.5), 2.0, shift=jnp.asarray([1.0, 1.0]))
    np.testing.assert_allclose(found["sum"].lower, [-2.0, 6.0], rtol=1e-6)
    assert found["positive"].lower.tolist() == [False, True] and found[
        "positive"
    ].upper.tolist() == [False, True]
    assert (int(found["index"].lower), int(found["index"].upper)) == (1, 1)
    mixed = jaxdp.interval(fun)(
        {"a": jaxdp.Interval.point(tree["a"]), "b": tree["b"]}, 2.0, shift=jnp.zeros(2)
    )
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
            return jaxdp.Interval(
                *intervals.widen(*(eqn.bind(end)[0] for end in (x.lower, x.upper)), 32)
            )

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
    with pytest.raises(
        intervals.UnsupportedPrimitive, match="The condition of the loop depends on an interval"
    ):
        jaxdp.interval(lambda x: lax.while_loop(lambda v: v < 3.0, lambda v: v * 2.0, x))(
            jaxdp.Interval(jnp.asarray(1.0), jnp.asarray(2.0))
        )
    with pytest.raises(
        intervals.UnsupportedPrimitive, match="index or predicate depends on an interval"
    ):
        jaxdp.interval(lambda x: jnp.arange(4.0)[x])(jaxdp.Interval(jnp.asarray(1), jnp.asarray(2)))


@pytest.mark.slow
def test_endpoints_of_numpy_float64_are_rounded_outward():
    tenth = np.asarray(0.1)
    interval = jaxdp.Interval(tenth, tenth)
    assert (
        float(interval.lower) <= 0.1 <= float(interval.upper)
        and interval.lower.dtype == jnp.float32
    )
    assert float(jaxdp.Interval(-np.inf, np.inf).upper) == np.inf
