"""What `clipped_grad` promises besides gradients: its rules, bounds and edge cases."""

import functools
import itertools
import re
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.transforms import barriers, clipping, rounding
from tests.transforms.small_net import (
    PARAMS,
    Smooth,
    assert_close,
    assert_equal,
    batch_of,
    both_computations,
    clipped,
    every_engine,
    loss,
    norm,
)

# --- Clipping ---


@pytest.mark.slow
def test_bookkeeping_treats_the_small_net_as_auto_does(oracle: Any) -> None:
    for size in (1, 5, 64):
        made = []
        for engine in ("bookkeeping", "auto"):
            with oracle.forced("auto") as components:
                f = jaxdp.clipped_grad(loss, clip_norm=0.5, engine=engine)
                program = jax.make_jaxpr(lambda p, b, f=f: f(p, b).grads)(PARAMS, batch_of(size))
            made.append(str(program))
            assert len(components) == 3
        assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "clip_norm"),
    [("bookkeeping", 0.5), *itertools.product(("vmap", "auto"), (0.0, 0.5, float("inf")))],
)
def test_clip_norm(engine: str, clip_norm: float, reference: Any, oracle: Any) -> None:
    out = clipped(engine, clip_norm)(PARAMS, batch_of(5))
    oracle.assert_same_sum(PARAMS, out.grads, reference.clipped_sum(clip_norm))
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)
    np.testing.assert_allclose(out.losses, reference.losses, rtol=1e-5)
    assert out.aux is None
    assert (out.nonfinite.dtype, int(out.nonfinite)) == (jnp.int32, 0)
    if clip_norm == 0:
        assert norm(out.grads) == 0


@pytest.mark.slow
@both_computations
def test_traced_clip_norm(engine: str, reference: Any, oracle: Any) -> None:
    chex.clear_trace_counter()
    f = lambda c: jaxdp.clipped_grad(loss, clip_norm=c, engine=engine)(PARAMS, batch_of(5)).grads  # noqa: E731
    step = jax.jit(chex.assert_max_traces(f, n=1))
    for clip_norm in (0.01, 0.5, float("inf")):
        oracle.assert_same_sum(PARAMS, step(clip_norm), reference.clipped_sum(clip_norm))
    for nothing in (0.0, -1.0, float("nan"), float("-inf"), 1e-13):
        assert norm(step(nothing)) == 0


@pytest.mark.slow
@both_computations
def test_automatic_clip_rule_makes_examples_count_alike(
    engine: str, reference: Any, oracle: Any
) -> None:
    out = clipped(engine, 2.0, clip_rule="automatic")(PARAMS, batch_of(5))
    factors = 2.0 / (reference.norms + 0.01)
    oracle.assert_same_sum(
        PARAMS, out.grads, [np.einsum("b,b...->...", factors, g) for g in reference.grads]
    )
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)


class Broken(Smooth):
    """Its factors are twice of what its bound allows."""

    def bound(self, clip_norm: Any) -> Any:
        return super().bound(clip_norm) / 2


class Wild(Smooth):
    """Its factors are negative, infinite or NaN."""

    def factor(self, norms: Any, clip_norm: Any) -> Any:
        return jnp.where(
            norms > 3, -clip_norm, clip_norm * 0 / jnp.where(norms > 1, 0, 1) + 1 / (0 * norms)
        )


class Unhashable(Smooth):
    __hash__ = None  # type: ignore[assignment]


class Scalar(Smooth):
    """One factor for all examples."""

    def factor(self, norms: Any, clip_norm: Any) -> Any:
        return clip_norm


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_clip_rule_from_outside(
    engine: str, chunk: int | None, reference: Any, oracle: Any
) -> None:
    f = clipped(engine, 2.0, clip_rule=Smooth(), microbatch_size=chunk)
    out = f(PARAMS, batch_of(5))
    factors = 1.0 / (reference.norms + 0.3)
    oracle.assert_same_sum(
        PARAMS, out.grads, [np.einsum("b,b...->...", factors, g) for g in reference.grads]
    )
    np.testing.assert_allclose(out.norms, reference.norms, rtol=1e-5)
    assert (f.sensitivity(), f.sensitivity("replace_one")) == (1.0, 2.0)
    assert jaxdp.privatize(f, noise_multiplier=1.0, divisor=1.0).clip_norm == 1.0


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_a_clip_rule_from_outside_sees_no_bad_example(engine: str, poison: float) -> None:
    x, y = batch_of(5)
    bad = np.array([False, True, False, False, True])
    x[1, 2, 0], y[4] = np.nan, poison
    for clip_norm in (2.0, 0.0, float("inf")):
        f = clipped(engine, clip_norm, clip_rule=Smooth())
        out = f(PARAMS, (x, y))
        assert out.nonfinite == 2
        if clip_norm < np.inf:
            assert_close(out.grads, f(PARAMS, batch_of(5), ~bad).grads, rtol=1e-6)
            assert norm(out.grads) <= 3 * f.sensitivity()
    for nothing in (0.0, -1.0, float("nan"), 1e-13):
        assert norm(smoothly_clipped(engine, nothing, (x, y)).grads) == 0


@functools.partial(jax.jit, static_argnums=0)
def smoothly_clipped(engine: Any, clip_norm: Any, batch: Any) -> Any:
    return jaxdp.clipped_grad(loss, clip_norm=clip_norm, engine=engine, clip_rule=Smooth())(
        PARAMS, batch
    )


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("rule", [Broken(), Wild(), Smooth(gamma=0.0)])
def test_no_clip_rule_exceeds_its_bound(engine: str, rule: Any) -> None:
    """Shows that a mistake in a rule costs accuracy and not privacy."""
    scaled = lambda p, e: e[2] * loss(p, e[:2])  # noqa: E731
    f = jaxdp.clipped_grad(scaled, clip_norm=2.0, engine=engine, clip_rule=rule)
    for i in range(5):
        out = f(PARAMS, (*batch_of(5), np.ones(5, np.float32)), np.arange(5) == i)
        assert norm(out.grads) <= f.sensitivity() * (1 + 1e-5)
    zero = f(PARAMS, (*batch_of(5), np.zeros(5, np.float32)), np.ones(5, bool))
    assert norm(zero.grads) <= 1e-3


@pytest.mark.slow
def test_clip_rules_are_checked() -> None:
    for rule in (*clipping.CLIP_RULES, Smooth(), Smooth(gamma=1e-6), *clipping.CLIP_RULES.values()):
        clipping.check_clip_rule(rule)
    with pytest.raises(
        ValueError,
        match=r"Broken\(gamma=0.3.*gradient of norm .* bound at clip_norm=.*bound / norm",
    ):
        clipping.check_clip_rule(Broken())
    with pytest.raises(ValueError, match="A factor must lie between 0"):
        clipping.check_clip_rule(Wild())
    for check in (
        clipping.check_clip_rule,
        lambda rule: clipped("auto", clip_rule=rule)(PARAMS, batch_of(5)),
    ):
        with pytest.raises(AssertionError, match="one factor per norm"):
            check(Scalar())


@pytest.mark.slow
def test_a_clip_rule_of_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(clipping.CLIP_RULES, "smooth", Smooth())
    named = jaxdp.clipped_grad(loss, clip_norm=2.0, clip_rule="smooth")
    assert_equal(
        named(PARAMS, batch_of(5)).grads,
        clipped("auto", 2.0, clip_rule=Smooth())(PARAMS, batch_of(5)).grads,
    )


@pytest.mark.parametrize("rule", [None, 0.5, Smooth, Unhashable(), object(), lambda norms: norms])
def test_what_is_no_clip_rule_is_refused(rule: Any) -> None:
    rules = re.escape(str(sorted(clipping.CLIP_RULES)))
    message = rf"clip_rule must be one of {rules}, or .*factor\(norms, clip_norm\).* of type"
    with pytest.raises(TypeError, match=message):
        jaxdp.clipped_grad(loss, clip_norm=1.0, clip_rule=rule)


def test_sensitivity() -> None:
    f = clipped("auto", 0.5)
    assert (f.sensitivity(), f.sensitivity("add_remove"), f.sensitivity("zero_out")) == (
        0.5,
        0.5,
        0.5,
    )
    assert f.sensitivity("replace_one") == 1.0
    with pytest.raises(ValueError, match="adjacency must be one of"):
        f.sensitivity("substitute")


@pytest.mark.slow
@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("method", ["vmap", "factors", "keep", "drop"])
def test_one_example_moves_the_sum_by_at_most_clip_norm(
    method: str, data: Any, oracle: Any
) -> None:
    """Draws gradients sum_t u_t w_t^T of any scale, whose terms may cancel, in mixed batches."""
    size, length = 3, 6
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    u, w = rng.normal(size=(size, length, 5)), rng.normal(size=(size, length, 4))
    for i in range(size):
        cancel = data.draw(st.sampled_from([1.0, 1.0, 1e-2, 1e-4, 0.0]))
        u[i] = np.repeat(u[i, ::2], 2, axis=0) if cancel < 1 else u[i]
        w[i] = (
            np.repeat(w[i, ::2], 2, axis=0) * np.resize([1, -1], (length, 1)) + cancel * w[i]
            if cancel < 1
            else w[i]
        )
        u[i] *= 10.0 ** data.draw(st.integers(-20, 15))
        w[i] *= 10.0 ** data.draw(st.integers(-20, 15))
    batch = u.astype(np.float32), w.astype(np.float32)
    f = product_loss_function(method)
    weight = np.zeros((5, 4), np.float32)
    with oracle.forced(method):
        whole = np.asarray(f(weight, batch, np.ones(size, bool)).grads, np.float64)
        for i in range(size):
            others = np.asarray(f(weight, batch, np.arange(size) != i).grads, np.float64)
            assert np.linalg.norm(whole - others) <= (1 + rounding.SLACK) * (1 + 1e-5)
            alone = np.asarray(f(weight, batch, np.arange(size) == i).grads, np.float64)
            assert np.linalg.norm(alone) <= (1 + rounding.SLACK) * (1 + 1e-5)


@functools.cache
def product_loss_function(method: str) -> Any:
    """Returns a loss whose gradient is u^T w for every weight."""
    engine = "vmap" if method == "vmap" else "auto"
    return jaxdp.clipped_grad(lambda p, e: jnp.sum((e[0] @ p) * e[1]), clip_norm=1.0, engine=engine)


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("rows", [1, 7])
def test_a_tiny_input_cannot_hide_a_huge_error(engine: str, rows: int) -> None:
    """Uses an |x|^2 that underflows and a gradient -2 y x of 4 times the bound."""
    f = jaxdp.clipped_grad(
        lambda w, e: jnp.sum(jnp.square(e[0] @ w - e[1])), clip_norm=1.0, engine=engine
    )
    x = np.full((1, rows, 3072), 1e-20, np.float32)
    out = f(np.zeros(3072, np.float32), (x, np.full((1, rows), 4e18 / rows, np.float32)))
    assert norm(out.grads) <= 1 + 1e-5
    assert out.norms[0] >= 4 or out.nonfinite == 1


@pytest.mark.slow
@both_computations
def test_gradients_of_norm_zero(engine: str) -> None:
    x, y = batch_of(5)
    f = jaxdp.clipped_grad(lambda p, e: 0 * loss(p, e), clip_norm=1.0, engine=engine)
    out = f(PARAMS, (x, y))
    assert norm(out.grads) == 0
    np.testing.assert_allclose(out.norms, 0, atol=1e-15)
    assert out.nonfinite == 0


# --- Masks and bad examples ---


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("padding", [0.0, np.nan, np.inf, 1e38])
def test_masked_examples_contribute_nothing_whatever_they_hold(
    engine: str, padding: float, reference: Any, oracle: Any
) -> None:
    x, y = batch_of(5)
    mask = np.array([True, False, True, True, False])
    x[~mask], y[~mask] = padding, padding
    out = clipped(engine)(PARAMS, (x, y), mask)
    oracle.assert_same_sum(PARAMS, out.grads, reference.clipped_sum(0.5, mask))
    np.testing.assert_allclose(out.norms, reference.norms * mask, rtol=1e-5)
    np.testing.assert_allclose(out.losses, reference.losses * mask, rtol=1e-5)
    assert out.nonfinite == 0


@every_engine
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_examples_without_a_finite_gradient_are_left_out_and_counted(
    engine: str, poison: float
) -> None:
    x, y = batch_of(5)
    bad = np.array([False, True, False, False, True])
    poisoned = x.copy(), y.copy()
    poisoned[0][1, 2, 0], poisoned[1][4] = np.nan, poison
    out = clipped(engine)(PARAMS, poisoned)
    without = clipped(engine)(PARAMS, (x, y), ~bad)
    assert_close(out.grads, without.grads, rtol=1e-6)
    assert out.nonfinite == 2
    assert not np.isfinite(np.asarray(out.norms)[bad]).any()
    np.testing.assert_array_equal(np.asarray(out.norms)[~bad], np.asarray(without.norms)[~bad])


@pytest.mark.slow
def test_a_clipped_sum_has_derivatives() -> None:
    """Compares both computations with the derivative of the definition, in both modes, where one
    row is masked."""
    batch, mask = batch_of(5), np.arange(5) != 2
    direction = jax.tree.map(np.cos, PARAMS)

    def defined(p: Any) -> Any:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(p, batch)
        squares = sum(jnp.square(g).sum((1, 2)) for g in jax.tree.leaves(grads))
        factors = jnp.where(mask, jnp.minimum(1, 0.5 / jnp.sqrt(squares)), 0)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)

    def derivatives(f: Any) -> Any:
        backward = jax.grad(lambda p: sum(jnp.square(g).sum() for g in jax.tree.leaves(f(p))))(
            PARAMS
        )
        return backward, jax.jvp(f, (PARAMS,), (direction,))[1]

    expected = jax.jit(lambda: derivatives(defined))()
    for engine in ("vmap", "auto"):
        computed = lambda p, engine=engine: clipped(engine)(p, batch, mask).grads  # noqa: E731
        assert_close(jax.jit(lambda f=computed: derivatives(f))(), expected, rtol=1e-4)


@pytest.mark.slow
@both_computations
def test_derivatives_are_those_of_the_examples_that_contribute(engine: str) -> None:
    """A NaN row, and a row of gradient zero. Without any example that contributes, the derivative
    is zero."""
    x, y = batch_of(5)
    poisoned = x.copy()
    poisoned[1] = np.nan
    mask = np.arange(5) != 1

    def gradients(batch: Any, mask: Any) -> Any:
        def total(p: Any, y: Any) -> Any:
            grads = clipped(engine)(p, (batch, y), mask).grads
            return sum(jnp.square(g).sum() for g in jax.tree.leaves(grads))

        return jax.grad(total, argnums=(0, 1))(PARAMS, y)

    run = jax.jit(gradients)
    expected = run(x, mask)
    assert norm(expected) > 0
    assert_close(run(poisoned, np.ones(5, bool)), expected, rtol=1e-6)
    assert norm(run(np.full_like(x, np.nan), np.ones(5, bool))) == 0
    f = jaxdp.clipped_grad(lambda w, e: jnp.maximum(0, 1 - e @ w), clip_norm=0.5, engine=engine)
    rows = np.array([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]], np.float32)  # the last loss is zero
    slope = jax.grad(lambda w: jnp.square(f(w, rows).grads).sum())(jnp.array([0.1, 0.3]))
    assert np.isfinite(slope).all()


@every_engine
def test_a_loss_that_is_not_finite_counts_although_its_gradient_is(engine: str) -> None:
    loss = lambda w, e: jnp.sum(w * e[0]) + e[1]  # noqa: E731
    f = jaxdp.clipped_grad(loss, clip_norm=10.0, engine=engine)
    rows = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    for value in (np.nan, np.inf):
        batch = rows, np.array([0.0, value], np.float32)
        out = f(np.zeros(2, np.float32), batch)
        np.testing.assert_allclose(out.grads, rows[0], rtol=1e-6)
        assert out.nonfinite == 1
        formed = f.per_example(np.zeros(2, np.float32), batch)
        np.testing.assert_allclose(formed.grads, rows * [[1], [0]], rtol=1e-6)
        assert formed.nonfinite == 1


@pytest.mark.slow
@both_computations
@pytest.mark.parametrize("name", ["next_token", "softmax_cross_entropy", "hinge"])
def test_a_label_that_does_not_exist_contributes_zero(engine: str, name: str) -> None:
    """A lookup outside of the vocabulary has a gradient of zero, so the loss of such a text has a
    finite gradient."""
    tokens = name == "next_token"
    function = getattr(jaxdp.losses, name)
    good, bad = ([1, 2], [1, 4]) if tokens else (1, 4)

    def loss(p: Any, e: Any) -> Any:
        logits = e[0] @ p
        return function(logits if tokens else logits[0], e[1])

    x, p = np.ones((2, 2, 3), np.float32), np.eye(3, 4, dtype=np.float32)
    f = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)
    out = f(p, (x, np.array([good, bad], np.int8)), np.ones(2, bool))
    assert out.nonfinite == 1
    alone = f(p, (x, np.array([good, good], np.int8)), np.array([True, False]))
    assert_close(out.grads, alone.grads, rtol=1e-6)


def no_positions(p: Any, e: Any) -> Any:
    return jnp.sum(e[0] @ p["w"]) + jnp.sum(e[1] @ p["w"]) + jnp.sum(e[0] @ p["b"])


def small_image(p: Any, e: Any) -> Any:
    return jnp.sum(jax.lax.conv(e[None], p["k"], (1, 1), "VALID")) + jnp.sum(p["k"] * jnp.sum(e))


def no_turns(p: Any, e: Any) -> Any:
    return jax.lax.scan(lambda total, x: (total + jnp.sum(x @ p["w"]), None), 0.0, e)[0]


EMPTY = {
    "dot": (no_positions, {"w": (3, 2), "b": (3, 0)}, [(0, 3), (2, 3)]),
    "convolution": (small_image, {"k": (4, 2, 3, 3)}, (2, 2, 2)),
    "scan": (no_turns, {"w": (3, 2)}, (0, 2, 3)),
    "rows": (lambda p, e: jnp.sum(e @ p["w"]), {"w": (0, 2)}, (2, 0)),
}


@functools.cache
def without_positions(case: str) -> tuple[Any, Any, Any]:
    """Returns parameters, a batch and the sum of the gradients."""
    loss, shapes, example = EMPTY[case]
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(lambda shape: np.ones(shape, np.float32), shapes, is_leaf=is_shape)
    batch = jax.tree.map(lambda shape: np.ones((2, *shape), np.float32), example, is_leaf=is_shape)
    of_examples = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    return params, batch, jax.tree.map(lambda g: np.asarray(g).sum(0), of_examples)


@pytest.mark.slow
@every_engine
@pytest.mark.parametrize("case", EMPTY)
def test_layers_without_positions(engine: str, case: str) -> None:
    params, batch, expected = without_positions(case)
    f = jaxdp.clipped_grad(EMPTY[case][0], clip_norm=100.0, engine=engine)
    assert_close(f(params, batch).grads, expected, rtol=1e-6)
    assert [leaf.path for leaf in f.plan(params, batch)] == sorted(params, key=str)


def test_a_convolutional_net_takes_the_memory_of_a_plain_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA would pad records and take memory for gradients of all layers at once, if it knew their
    zeros early."""

    def loss(kernels: list[Any], x: Any) -> Any:
        x = x[None]
        for kernel in kernels:
            x = jnp.tanh(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        return jnp.square(x).sum()

    kernels, batch = (
        [np.ones((16, 16, 3, 3), np.float32)] * 6,
        np.ones((32, 16, 16, 16), np.float32),
    )

    def memory(gradient: Any) -> int:
        return int(
            jax.jit(gradient).lower(kernels, batch).compile().memory_analysis().temp_size_in_bytes
        )

    def clipped() -> int:
        f = jaxdp.clipped_grad(loss, clip_norm=1.0)
        return memory(lambda kernels, batch: f(kernels, batch).grads)

    plain = memory(
        jax.grad(lambda kernels, batch: jax.vmap(functools.partial(loss, kernels))(batch).sum())
    )
    assert clipped() < 1.3 * plain
    monkeypatch.setattr(barriers, "zero_after", lambda _: jnp.uint32(0))
    assert clipped() > 1.5 * plain


@every_engine
def test_no_examples(engine: str) -> None:
    for chunk in (None, 2):
        f = clipped(engine, has_aux=False, microbatch_size=chunk)
        out = f(PARAMS, batch_of(0))
        assert norm(out.grads) == 0
        assert jax.tree.map(jnp.shape, out.grads) == jax.tree.map(jnp.shape, PARAMS)
        assert out.norms.shape == out.losses.shape == (0,)
        assert (out.norms.dtype, out.losses.dtype, int(out.nonfinite)) == (
            jnp.float32,
            jnp.float32,
            0,
        )
    nothing = clipped(engine)(PARAMS, batch_of(5), np.zeros(5, bool))
    assert norm(nothing.grads) == 0
    assert not np.any(nothing.norms)
    assert not np.any(nothing.losses)


@pytest.mark.slow
@both_computations
def test_one_example(engine: str, reference: Any, oracle: Any) -> None:
    x, y = batch_of(5)
    out = clipped(engine)(PARAMS, (x[3:4], y[3:4]))
    oracle.assert_same_sum(PARAMS, out.grads, reference.clipped_sum(0.5, np.arange(5) == 3))
